// Inspects and changes a folder of checkpoints: see README.md next to this file.
#include <cstdio>
#include <string>
#include <vector>

#include "checkpoint_tool/application.hpp"
#include "common/standard_streams.hpp"

int main(int argc, char** argv) {
  example::hold_standard_descriptors();
  const std::vector<std::string> arguments(argv + (argc > 0 ? 1 : 0), argv + argc);
  return static_cast<int>(checkpoint_tool::run_application(arguments, stdout, stderr));
}
