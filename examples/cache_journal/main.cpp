// Journals a cache while it serves a trace, and asks the journal what other policies would have hit: see
// README.md next to this file.
#include <cstdio>
#include <string>
#include <vector>

#include "cache_journal/application.hpp"
#include "common/standard_streams.hpp"

int main(int argc, char** argv) {
  example::hold_standard_descriptors();
  const std::vector<std::string> arguments(argv + (argc > 0 ? 1 : 0), argv + argc);
  return static_cast<int>(cache_journal::run_application(arguments, stdout, stderr));
}
