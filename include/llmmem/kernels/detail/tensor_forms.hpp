/// @file
/// How the lanes of a warp read a cache for tensor cores: elements of 8 or 16 bits, as they are.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/attention_share.hpp>
#include <llmmem/kernels/detail/attention_tile.hpp>
#include <llmmem/kernels/detail/tensor_tiles.hpp>
#include <llmmem/kernels/kv_tokens.hpp>
#include <llmmem/model/dtype.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Elements of 16 bits that equal a cache's: its own, or halves of fp8.
template <dtype Element>
inline constexpr dtype tensor_type = Element == dtype::fp8_e4m3 ? dtype::f16 : Element;

/// Eight elements, two to a word.
struct tensor_pack {
  std::uint32_t word[4];
};

/// A lane's keys and values of a step as tensor cores take them: of each half of the step's tokens a key's
/// packs, and of both tokens of each half a value's.
template <std::uint32_t Dim>
struct tensor_keys {
  tensor_pack of[2][Dim / 32];
};
template <std::uint32_t Dim>
struct tensor_values {
  tensor_pack of[2][2][Dim / 64];
};

/// Packs that a lane has in registers.
template <std::uint32_t Dim>
struct tensor_held {
  [[nodiscard]] LLMMEM_HD static tensor_pack key(const tensor_keys<Dim>& of, std::uint32_t half,
                                                 std::uint32_t c, std::uint32_t /*lane*/) noexcept {
    return of.of[half][c];
  }
  [[nodiscard]] LLMMEM_HD static tensor_pack value(const tensor_values<Dim>& of, std::uint32_t half,
                                                   std::uint32_t which, std::uint32_t s,
                                                   std::uint32_t /*lane*/) noexcept {
    return of.of[half][which][s];
  }
};

/// Eight elements of a key or value as a tensor core takes them.
template <dtype Element>
[[nodiscard]] LLMMEM_HD inline tensor_pack tensor_pack_of(const attention_raw<Element>& raw) noexcept {
  tensor_pack out{};
  LLMMEM_UNROLL
  for (unsigned i = 0; i < 4; ++i) {
    if constexpr (Element == dtype::fp8_e4m3) {
      out.word[i] = halves_of_pair(element_of<std::uint16_t>(raw.part[0], i));
    } else {
      out.word[i] = raw.part[0].words[i];
    }
  }
  return out;
}

// A form says which packs of a key and a value a lane reads (`key_pack`, `value_pack`), which elements of a
// pack share a word (2w and 2w + 1, or w and w + 4 where `splits_keys`, `splits_values`), and makes words of
// what it read. Where it `has_token_scales`, each token has a scale of its key, which multiplies its
// products, and one of its value, which multiplies its weights. Where it `has_zeros`, each token has a zero
// of either too, which all elements have in addition. Where it `is_streamed`, `key` and `value` read memory,
// and lanes may part there. `value_dim` are the elements of values that a warp sums; of values with more,
// `columns` warps make the same products and sum a part each. `key_factor` multiplies all products, and
// `value_factor` all outputs. Where it `exchanges_keys`, the lanes read the keys of eight tokens in one block
// together, by `load_keys`.

/// Elements as they are.
template <dtype Element, std::uint32_t Dim>
struct tensor_elements : tensor_held<Dim> {
  static constexpr dtype type = tensor_type<Element>;
  static constexpr std::uint32_t key_dim = Dim;
  static constexpr std::uint32_t value_dim = Dim;
  static constexpr std::uint32_t columns = 1;
  static constexpr std::uint32_t blocks = Dim == 64 ? 5 : 3;  // of 128 threads that fit at once
  static constexpr bool is_streamed = false;
  static constexpr bool has_token_scales = false;
  static constexpr bool has_zeros = false;
  static constexpr bool has_codes = false;
  static constexpr bool exchanges_keys = false;

  using keys = tensor_keys<Dim>;
  using values = tensor_values<Dim>;

  /// A lane's keys and values of a step. Keys: elements 8t to 8t + 7 of each 32, of tokens g and g + 8.
  /// Values: elements 8g to 8g + 7 of each 64, of tokens 2t, 2t + 1, 2t + 8 and 2t + 9. All lanes read
  /// stretches of at least 64 and 32 elements, and every product finds its factors in its own lane.
  struct read {
    attention_raw<Element> key[2][Dim / 32];
    attention_raw<Element> value[2][2][Dim / 64];
    bool counts[2] = {false, false};  // the keys' tokens
  };

  [[nodiscard]] LLMMEM_HD static std::uint32_t key_pack(std::uint32_t c, std::uint32_t lane) noexcept {
    return c * 4 + lane % 4;
  }
  [[nodiscard]] LLMMEM_HD static std::uint32_t value_pack(std::uint32_t s, std::uint32_t lane) noexcept {
    return s * 8 + lane / 4;
  }
  [[nodiscard]] LLMMEM_HD static constexpr bool splits_keys() noexcept { return false; }
  [[nodiscard]] LLMMEM_HD static constexpr bool splits_values() noexcept { return false; }
  [[nodiscard]] LLMMEM_HD static constexpr float key_factor() noexcept { return 1; }
  [[nodiscard]] LLMMEM_HD static constexpr float value_factor() noexcept { return 1; }

  LLMMEM_HD void load_key(const attention_shape& shape, const attention_place& at, const token_place& token,
                          std::uint32_t half, std::uint32_t lane, read& into) const noexcept {
    LLMMEM_UNROLL
    for (std::uint32_t c = 0; c < Dim / 32; ++c)
      into.key[half][c].load(pack_at<Element>(at.keys, shape.keys.strides, token, key_pack(c, lane)));
  }
  LLMMEM_HD void load_value(const attention_shape& shape, const attention_place& at, const token_place& token,
                            std::uint32_t half, std::uint32_t which, std::uint32_t lane,
                            read& into) const noexcept {
    LLMMEM_UNROLL
    for (std::uint32_t s = 0; s < Dim / 64; ++s)
      into.value[half][which][s].load(
          pack_at<Element>(at.values, shape.values.strides, token, value_pack(s, lane)));
  }
  LLMMEM_HD static void clear_key(std::uint32_t half, read& into) noexcept {
    LLMMEM_UNROLL
    for (std::uint32_t c = 0; c < Dim / 32; ++c)
      into.key[half][c] = {};
  }
  LLMMEM_HD static void clear_value(std::uint32_t half, std::uint32_t which, read& into) noexcept {
    LLMMEM_UNROLL
    for (std::uint32_t s = 0; s < Dim / 64; ++s)
      into.value[half][which][s] = {};
  }

  [[nodiscard]] LLMMEM_HD tensor_keys<Dim> keys_of(const read& from) const noexcept {
    tensor_keys<Dim> out{};
    LLMMEM_UNROLL
    for (std::uint32_t half = 0; half < 2; ++half) {
      LLMMEM_UNROLL
      for (std::uint32_t c = 0; c < Dim / 32; ++c)
        out.of[half][c] = tensor_pack_of(from.key[half][c]);
    }
    return out;
  }
  [[nodiscard]] LLMMEM_HD tensor_values<Dim> values_of(const read& from) const noexcept {
    tensor_values<Dim> out{};
    LLMMEM_UNROLL
    for (std::uint32_t i = 0; i < 4; ++i) {
      LLMMEM_UNROLL
      for (std::uint32_t s = 0; s < Dim / 64; ++s)
        out.of[i / 2][i % 2][s] = tensor_pack_of(from.value[i / 2][i % 2][s]);
    }
    return out;
  }
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
