// Serves requests with layers of several kinds, and shows where the memory goes: see README.md next to this
// file.
#include <cstdio>
#include <string>
#include <vector>

#include "common/standard_streams.hpp"
#include "layer_groups/application.hpp"

int main(int argc, char** argv) {
  example::hold_standard_descriptors();
  const std::vector<std::string> arguments(argv + (argc > 0 ? 1 : 0), argv + argc);
  return static_cast<int>(layer_groups::run_application(arguments, stdout, stderr));
}
