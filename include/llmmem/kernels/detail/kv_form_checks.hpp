/// @file
/// Checks of a layout for kernels that read or write single keys and values.
#pragma once

#include <llmmem/kernels/errors.hpp>
#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/result.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Refuses forms that a kernel on single elements of keys and values does not support: scales and rotary
/// parts, which it would neither read nor write, and values of another type than keys. It ignores index keys.
[[nodiscard]] inline result<void> check_forms(const kv_layout& layout, const char* who) noexcept {
  using enum paging::plane_role;
  if (layout.has(key_scale) || layout.has(value_scale))
    return failure{errc::unsupported_layout, 0, layout.kv_planes(), layout.planes(), who};
  const dtype values = layout.value_element.value_or(layout.element);
  if (layout.has_values && values != layout.element)
    return failure{errc::unsupported_layout, 1, static_cast<std::uint64_t>(layout.element),
                   static_cast<std::uint64_t>(values), who};
  if (layout.has(rotary)) return failure{errc::unsupported_layout, 2, 0, layout.rotary_dim, who};
  return {};
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
