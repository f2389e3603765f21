// Decodes over a paged cache, and over a contiguous one: see README.md next to this file.
#include <cstdio>
#include <string>
#include <vector>

#include "common/standard_streams.hpp"
#include "paged_decode/application.hpp"

int main(int argc, char** argv) {
  example::hold_standard_descriptors();
  const std::vector<std::string> arguments(argv + (argc > 0 ? 1 : 0), argv + argc);
  return static_cast<int>(paged_decode::run_application(arguments, stdout, stderr));
}
