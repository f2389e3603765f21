/// @file
/// Checks of parts of attention, for all code that reads or writes them.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/attention_parts.hpp>
#include <llmmem/kernels/detail/kv_checks.hpp>
#include <llmmem/kernels/kv_tokens.hpp>
#include <llmmem/result.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

template <class Byte>
[[nodiscard]] result<void> whole(const token_vectors<Byte>& of, std::uint64_t unit,
                                 const char* what) noexcept {
  for (const std::uint64_t each :
       {std::uint64_t{reinterpret_cast<std::uintptr_t>(of.data)}, of.token_stride, of.head_stride}) {
    if (auto fits = whole(each, unit, what); !fits) return fits;
  }
  return {};
}

/// The names of a part's arguments, for errors.
struct part_names {
  vector_names sums{};
  vector_names states{};
};

inline constexpr part_names paged_attention_part_names{
    {"paged_attention: part.sums", "paged_attention: part.sums.token_stride",
     "paged_attention: part.sums.head_stride"},
    {"paged_attention: part.states", "paged_attention: part.states.token_stride",
     "paged_attention: part.states.head_stride"}};

/// Sums are accessed by 16 bytes, states by 8.
template <class Byte>
[[nodiscard]] result<void> check_part_units(const basic_attention_part<Byte>& of,
                                            const part_names& names) noexcept {
  if (auto fits = whole(of.sums, 16, names.sums.data); !fits) return fits;
  return whole(of.states, sizeof(attention_state), names.states.data);
}

/// @pre there is a row
template <class Byte>
[[nodiscard]] result<void> check_part(const basic_attention_part<Byte>& of, const attention_part_shape& shape,
                                      bool is_written, const part_names& names) noexcept {
  const auto array_of = [&](const token_vectors<Byte>& vectors, std::uint64_t bytes) {
    return vector_array{vectors.data,      shape.rows,          vectors.token_stride,
                        shape.query_heads, vectors.head_stride, bytes};
  };
  const std::uint64_t vector = std::uint64_t{shape.value_dim} * sizeof(float);
  if (auto fits = check_vectors(array_of(of.sums, vector), is_written, names.sums); !fits) return fits;
  return check_vectors(array_of(of.states, sizeof(attention_state)), is_written, names.states);
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
