// Trains a small GPT, whose memory the other examples manage: see README.md next to this file.
#include <cstdio>
#include <string>
#include <vector>

#include "common/standard_streams.hpp"
#include "train_gpt/application.hpp"

int main(int argc, char** argv) {
  example::hold_standard_descriptors();
  const std::vector<std::string> arguments(argv + (argc > 0 ? 1 : 0), argv + argc);
  return static_cast<int>(train_gpt::run_application(arguments, stdout, stderr));
}
