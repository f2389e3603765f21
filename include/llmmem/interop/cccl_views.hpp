/// @file
/// Views of libcu++ (`cuda::std::span`, `cuda::std::mdspan`) as those that this library takes.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/result.hpp>

#include <cuda/std/mdspan>
#include <cuda/std/span>

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace llmmem {
inline namespace v0 {

/// The same elements as a `std::span`. A named `cuda::std::span` converts by itself; a temporary one with
/// writable elements does not, because the standard library does not know it as borrowed.
template <class T, cuda::std::size_t Extent>
[[nodiscard]] constexpr std::span<T> std_span(cuda::std::span<T, Extent> view) noexcept {
  return {view.data(), view.size()};
}

/// The bytes of a matrix or tensor without gaps between its elements, in any order of its dimensions:
/// what spaces, tiers and copies take. Reads no element, so the elements may be in a device's memory.
/// @return the bytes; `errc::size_mismatch` for a view with gaps between its elements: found = bytes from its
///         first element to its last one, wanted = bytes of all elements
template <class T, class Extents, class Layout, class Accessor>
[[nodiscard]] result<std::span<std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>>> bytes_of(
    const cuda::std::mdspan<T, Extents, Layout, Accessor>& view) noexcept {
  static_assert(
      std::is_same_v<typename cuda::std::mdspan<T, Extents, Layout, Accessor>::data_handle_type, T*>,
      "bytes_of needs a view whose elements have addresses: one with the default accessor");
  static_assert(std::is_trivially_copyable_v<T>,
                "bytes_of needs elements that are copied byte by byte (trivially copyable)");
  using byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  const auto reach = static_cast<std::uint64_t>(view.mapping().required_span_size()) * sizeof(T);
  const auto all = static_cast<std::uint64_t>(view.size()) * sizeof(T);
  if (reach != all) return failure{errc::size_mismatch, 0, all, reach, "bytes_of: elements with gaps"};
  return std::span<byte>(reinterpret_cast<byte*>(view.data_handle()), static_cast<std::size_t>(all));
}

}  // namespace v0
}  // namespace llmmem
