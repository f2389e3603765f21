/// @file
/// Storages that are told apart by their names, in a test of several.
#pragma once

#include <llmmem/testing/simulated_storage.hpp>

#include <string>

namespace llmmem_tests {

/// A storage of that name, whose sectors are so small that the least of files has several to lose.
[[nodiscard]] inline llmmem::testing::simulated_storage_options called(const std::string& name,
                                                                       bool rename_allowed = true) {
  llmmem::testing::simulated_storage_options options;
  options.name = name;
  options.sector_bytes = 8;
  options.rename_allowed = rename_allowed;
  return options;
}

}  // namespace llmmem_tests
