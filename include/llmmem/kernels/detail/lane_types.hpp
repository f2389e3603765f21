/// @file
/// The types of vectors of any width, as compilers offer them.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

// NOLINTBEGIN(modernize-use-using): `using` would lose the vectors' size.

/// The types of `N` lanes. Functions on them have no `target` of their own: they are inlined into one that
/// has, and take vectors by reference, because the compilers pass wide ones differently for each target.
template <unsigned N>
struct lanes_of {
  typedef float floats __attribute__((vector_size(N * 4)));
  typedef std::uint32_t words __attribute__((vector_size(N * 4)));
  typedef std::int32_t integers __attribute__((vector_size(N * 4)));
  typedef std::uint16_t half_words __attribute__((vector_size(N * 2)));
};

// NOLINTEND(modernize-use-using)

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
