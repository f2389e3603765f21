/// @file
/// Checks of kernels over paged caches before they begin: missing memory, and invalid distances.
#pragma once

#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/result.hpp>

#include <bit>
#include <cstdint>
#include <limits>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The names of a paged memory's parts, for errors.
struct memory_names {
  const char* data = "";
  const char* plane_alignment = "";
};

/// @pre there is something to move
[[nodiscard]] inline result<void> check_memory(const kv_memory& memory, const memory_names& names) noexcept {
  if (memory.plane_table == nullptr) {
    if (memory.data != nullptr || memory.blocks == 0) return {};
    return failure{errc::too_short, 0, memory.layout.block_bytes(), 0, names.data};
  }
  if (std::has_single_bit(memory.plane_alignment)) return {};
  return failure{errc::bad_alignment, 0, memory.plane_alignment, 0, names.plane_alignment};
}

/// Checks that a number is a multiple of a unit: `errc::bad_granularity`.
[[nodiscard]] inline result<void> whole(std::uint64_t number, std::uint64_t unit, const char* what) noexcept {
  if (number % unit == 0) return {};
  return failure{errc::bad_granularity, 0, number, unit, what};
}

/// The names of a batch's arguments, for errors.
struct vector_names {
  const char* data = "";
  const char* token_stride = "";
  const char* head_stride = "";
};

/// Vectors that must exist: one for each head of each token.
struct vector_array {
  const void* data = nullptr;
  std::uint64_t tokens = 0;
  std::uint64_t token_stride = 0;
  std::uint64_t heads = 0;
  std::uint64_t head_stride = 0;
  std::uint64_t vector_bytes = 0;
};

/// Refuses a distance shorter than a vector, because it is most likely in elements.
///
/// @param is_written  whether vectors that share bytes would overwrite each other, instead of only being
///      equal.
/// @pre there is a token
[[nodiscard]] inline result<void> check_vectors(const vector_array& of, bool is_written,
                                                const vector_names& names) noexcept {
  if (of.vector_bytes == 0) return {};
  if (of.data == nullptr) return failure{errc::too_short, 0, of.vector_bytes * of.heads, 0, names.data};
  if (of.heads > 1 && of.head_stride < of.vector_bytes)
    return failure{errc::too_short, 0, of.vector_bytes, of.head_stride, names.head_stride};
  if (of.tokens > 1 && of.token_stride < of.vector_bytes)
    return failure{errc::too_short, 0, of.vector_bytes, of.token_stride, names.token_stride};
  if (!is_written || of.heads <= 1 || of.tokens <= 1) return {};
  // The wider distance exceeds all that the narrower one spans.
  const bool is_by_token = of.token_stride >= of.head_stride;
  const std::uint64_t narrow = is_by_token ? of.head_stride : of.token_stride;
  const std::uint64_t wide = is_by_token ? of.token_stride : of.head_stride;
  const std::uint64_t more = (is_by_token ? of.heads : of.tokens) - 1;
  if (narrow <= (wide - of.vector_bytes) / more) return {};
  constexpr std::uint64_t all = std::numeric_limits<std::uint64_t>::max();
  const std::uint64_t needed =
      narrow > (all - of.vector_bytes) / more ? all : narrow * more + of.vector_bytes;
  return failure{errc::too_short, 0, needed, wide, is_by_token ? names.token_stride : names.head_stride};
}

/// The names of the arguments of a call that moves tokens.
struct token_names {
  const char* who = "";
  const char* layer = "";
  memory_names cache{};
  vector_names batch[2]{};
  const char* cut = "";  ///< where a vector in two parts is cut
};

inline constexpr token_names append_kv_names{
    "append_kv",
    "append_kv: layer",
    {"append_kv: cache", "append_kv: cache.plane_alignment"},
    {{"append_kv: keys", "append_kv: keys.token_stride", "append_kv: keys.head_stride"},
     {"append_kv: values", "append_kv: values.token_stride", "append_kv: values.head_stride"}}};
inline constexpr token_names gather_kv_names{
    "gather_kv",
    "gather_kv: layer",
    {"gather_kv: cache", "gather_kv: cache.plane_alignment"},
    {{"gather_kv: keys", "gather_kv: keys.token_stride", "gather_kv: keys.head_stride"},
     {"gather_kv: values", "gather_kv: values.token_stride", "gather_kv: values.head_stride"}}};
// MLA has one head, so no head_stride is read.
inline constexpr token_names append_mla_names{
    "append_mla",
    "append_mla: layer",
    {"append_mla: cache", "append_mla: cache.plane_alignment"},
    {{"append_mla: latent", "append_mla: latent.token_stride"},
     {"append_mla: rotary", "append_mla: rotary.token_stride"}},
    "append_mla: bits of latent_elements, which must be whole bytes"};
inline constexpr token_names gather_mla_names{
    "gather_mla",
    "gather_mla: layer",
    {"gather_mla: cache", "gather_mla: cache.plane_alignment"},
    {{"gather_mla: latent", "gather_mla: latent.token_stride"},
     {"gather_mla: rotary", "gather_mla: rotary.token_stride"}},
    "gather_mla: bits of latent_elements, which must be whole bytes"};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
