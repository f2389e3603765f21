/// @file
/// `vector_heads`: the query heads that the host's vectors attend with at a time.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Query heads of an item at most. With their sums and a tile, 16 of 256 floats take 48 KiB: the first level
/// of a processor's cache, and a small part of a thread's stack.
inline constexpr std::uint32_t vector_heads = 16;

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
