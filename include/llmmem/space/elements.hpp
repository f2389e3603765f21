/// @file
/// Views bytes as elements of a type, after checking size and alignment.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>

namespace llmmem {
inline namespace v0 {

/// A type that consists only of its bytes: `float`, a struct of numbers.
template <class T>
concept plain_element = std::is_trivially_copyable_v<T> && std::is_object_v<T> && !std::is_const_v<T>;

/// Returns `bytes` as elements of `T`, which they hold or will hold: a non-owning view.
///
/// @par Errors   `length_error` when they are not a whole number of elements, `argument_error` when the first
///   is not aligned for `T`; both name `what`.
template <plain_element T, class Byte>
  requires std::same_as<std::remove_const_t<Byte>, std::byte>
[[nodiscard]] std::span<std::conditional_t<std::is_const_v<Byte>, const T, T>> as_elements(
    std::span<Byte> bytes, const char* what = "as_elements") {
  using element = std::conditional_t<std::is_const_v<Byte>, const T, T>;
  if (bytes.size() % sizeof(T) != 0) {
    throw length_error(std::string(what) + ": " + std::to_string(bytes.size()) +
                       " bytes are not a whole number of elements of " + std::to_string(sizeof(T)) +
                       "; use the type that was stored");
  }
  if (reinterpret_cast<std::uintptr_t>(bytes.data()) % alignof(T) != 0) {
    throw argument_error(std::string(what) + ": the bytes are not aligned to " + std::to_string(alignof(T)) +
                         ", as elements must be; allocate them with that alignment");
  }
  return {reinterpret_cast<element*>(bytes.data()), bytes.size() / sizeof(T)};
}

}  // namespace v0
}  // namespace llmmem
