// Trains a small GPT on some ranks, and gives its weights to an engine's ranks as it trains: see README.md
// next to this file.
#include <cstdio>
#include <string>
#include <vector>

#include "common/standard_streams.hpp"
#include "refit/application.hpp"

int main(int argc, char** argv) {
  example::hold_standard_descriptors();
  const std::vector<std::string> arguments(argv + (argc > 0 ? 1 : 0), argv + argc);
  return static_cast<int>(refit_example::run_application(arguments, stdout, stderr));
}
