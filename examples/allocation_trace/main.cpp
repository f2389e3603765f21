// Finds the smallest budget at which each arena survives a program: see README.md next to this file.
#include <cstdio>
#include <string>
#include <vector>

#include "allocation_trace/application.hpp"
#include "common/standard_streams.hpp"

int main(int argc, char** argv) {
  example::hold_standard_descriptors();
  const std::vector<std::string> arguments(argv + (argc > 0 ? 1 : 0), argv + argc);
  return static_cast<int>(allocation_trace::run_application(arguments, stdout, stderr));
}
