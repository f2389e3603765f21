/// @file
/// What a call refuses with.
#pragma once

#include <llmmem/error.hpp>

#include <string>

namespace llmmem_tests {

/// The text of the library's error that `work` throws; "none" when it throws none.
template <class Work>
std::string text_of(Work&& work) {
  try {
    work();
  } catch (const llmmem::error& failure) {
    return failure.what();
  }
  return "none";
}

}  // namespace llmmem_tests
