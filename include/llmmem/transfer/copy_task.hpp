/// @file
/// `copy_task`: one copy of a batch, for batched copies and kernels.
#pragma once

#include <llmmem/config.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// One copy of a batch.
struct copy_task {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::uint64_t bytes = 0;
};

}  // namespace v0
}  // namespace llmmem
