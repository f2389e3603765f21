/// @file
/// Compares pages of the documentation with what the code computes.
#pragma once

#include <doctest/doctest.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>

namespace llmmem_tests {

/// `value` with `digits` after the point.
inline std::string decimal(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

/// Checks that page `docs/<page>` holds `table`, and prints it to be pasted there if it does not.
inline void check_documented(const std::string& page, const std::string& table) {
  const std::string here = __FILE__;
  std::ifstream file(here.substr(0, here.rfind("tests/support/")) + "docs/" + page);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  if (text.empty()) {
    MESSAGE("skipped: the sources are not where they were compiled");
    return;
  }
  INFO("docs/" << page << " should hold\n" << table);
  CHECK(text.find(table) != std::string::npos);
}

}  // namespace llmmem_tests
