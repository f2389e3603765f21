/// @file
/// The bodies of `quantize_kv_blocks` and `dequantize_kv_blocks`.
#pragma once

#include <llmmem/kernels/detail/code_tokens.hpp>
#include <llmmem/kernels/detail/coded_planes.hpp>
#include <llmmem/kernels/detail/group_codes.hpp>
#include <llmmem/kernels/detail/kv_blocks_body.hpp>
#include <llmmem/kernels/detail/kv_checks.hpp>
#include <llmmem/kernels/detail/kv_form_checks.hpp>
#include <llmmem/kernels/detail/quantize_groups_body.hpp>
#include <llmmem/kernels/divider.hpp>
#include <llmmem/kernels/errors.hpp>
#include <llmmem/kernels/items.hpp>
#include <llmmem/kernels/kv_quantize.hpp>
#include <llmmem/kernels/packet.hpp>
#include <llmmem/kernels/rows.hpp>
#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/result.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// Which way a block goes.
enum class block_recoding : std::uint8_t { to_codes, to_values };

/// Values that an item handles side by side: 16 bytes of bf16.
inline constexpr std::uint32_t octet = 8;

/// One plane of blocks in values, and in codes with scales.
struct recoded_plane {
  kv_plane values{};
  kv_plane codes{};
  kv_plane scales{};
  const block_pair* pairs = nullptr;
  std::uint64_t pair_count = 0;
  std::uint64_t from_blocks = 0;
  std::uint64_t to_blocks = 0;
  std::uint32_t first_layer = 0;
  divider layers{};
  divider heads{};
  divider units{};  ///< of a head: octets of channels if `is_by_channel`, else tokens
  std::uint32_t tokens = 0;
  std::uint32_t octets = 0;
  bool is_by_channel = false;
  std::uint32_t value_width = 1;  ///< alignment of every octet of values; `code_width` for codes
  std::uint32_t code_width = 1;
  std::uint32_t* out_of_range = nullptr;

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept {
    return pair_count * layers.by() * heads.by() * units.by();
  }
};

/// The ends of an item: addresses of a head's first token and first element.
struct recoded_ends {
  std::byte* values = nullptr;  ///< null: there is nothing to do
  std::byte* codes = nullptr;
  std::byte* scales = nullptr;
  std::uint32_t unit = 0;
};

/// An item is an octet of channels of a head over all tokens of a block, or a token's vector of a head.
template <block_recoding Way, dtype Value, dtype Code, dtype Scale>
class recode_work {
 public:
  explicit recode_work(const recoded_plane& of) noexcept : of_(of) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return of_.items(); }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    const recoded_ends ends = ends_of(item);
    if (ends.values == nullptr) return;
    if (of_.is_by_channel) {
      run_channels(ends);
    } else {
      run_token(ends);
    }
  }

 private:
  static constexpr std::uint32_t value_bytes = octet * sizeof(element_bits<Value>);
  static constexpr std::uint32_t code_bytes_of_octet = octet * (Code == dtype::int4 ? 4 : 8) / 8;
  static constexpr std::uint32_t scale_bytes = sizeof(element_bits<Scale>);

  /// An octet of floats, and their codes.
  struct floats {
    float of[octet];
  };

  [[nodiscard]] LLMMEM_HD recoded_ends ends_of(std::uint64_t item) const noexcept {
    const std::uint64_t outer = of_.units.quotient(item);
    const auto unit = static_cast<std::uint32_t>(item - outer * of_.units.by());
    const std::uint64_t layers_on = of_.heads.quotient(outer);
    const std::uint64_t head = outer - layers_on * of_.heads.by();
    const std::uint64_t number = of_.layers.quotient(layers_on);
    const std::uint64_t layer = of_.first_layer + (layers_on - number * of_.layers.by());
    const block_pair pair = of_.pairs[number];
    if (pair.from < 0 || pair.to < 0) return {};
    const auto from = static_cast<std::uint64_t>(pair.from);
    const auto to = static_cast<std::uint64_t>(pair.to);
    if (from >= of_.from_blocks || to >= of_.to_blocks) {
      if (of_.out_of_range != nullptr) raise_flag(*of_.out_of_range);
      return {};
    }
    constexpr bool is_quantize = Way == block_recoding::to_codes;
    const std::uint64_t values_in = is_quantize ? from : to;
    const std::uint64_t codes_in = is_quantize ? to : from;
    return {plane_base(of_.values, layer) + of_.values.strides.offset(0, values_in, 0, head),
            plane_base(of_.codes, layer) + of_.codes.strides.offset(0, codes_in, 0, head),
            plane_base(of_.scales, layer) + of_.scales.strides.offset(0, codes_in, 0, head), unit};
  }

  [[nodiscard]] LLMMEM_HD floats load_values(const std::byte* from) const noexcept {
    floats out{};
    LLMMEM_UNROLL
    for (unsigned half = 0; half < value_bytes / 16; ++half) {
      const auto in = load_aligned<16, cache_hint::kept, group_access::pieces>(from + std::size_t{16} * half,
                                                                               of_.value_width);
      constexpr unsigned in_half = 16 / sizeof(element_bits<Value>);
      LLMMEM_UNROLL
      for (unsigned i = 0; i < in_half; ++i)
        out.of[half * in_half + i] = float_of<Value>(element_of<element_bits<Value>>(in, i));
    }
    return out;
  }
  /// A number that bf16 would round to an infinity becomes the largest bf16, because a scale that was rounded
  /// up brings the largest values of a group beyond it.
  [[nodiscard]] static LLMMEM_HD float held_finite(float value) noexcept {
    if constexpr (Value == dtype::f32) {
      return value;
    } else {
      const std::uint32_t size = size_of(value);
      const bool is_beyond = size > 0x7F7F'0000U && size < 0x7F80'0000U;
      return is_beyond ? float_of_bits((bits_of_float(value) & 0x8000'0000U) | 0x7F7F'0000U) : value;
    }
  }
  LLMMEM_HD void store_values(std::byte* to, const floats& values) const noexcept {
    LLMMEM_UNROLL
    for (unsigned half = 0; half < value_bytes / 16; ++half) {
      packet<16> out{};
      constexpr unsigned in_half = 16 / sizeof(element_bits<Value>);
      LLMMEM_UNROLL
      for (unsigned i = 0; i < in_half; ++i)
        set_element(out, i, nearest_of<Value>(held_finite(values.of[half * in_half + i])));
      store_aligned<group_access::pieces>(to + std::size_t{16} * half, out, of_.value_width);
    }
  }

  /// The bits of a float without its sign, which are ordered as sizes: infinity and NaNs above all numbers.
  [[nodiscard]] static LLMMEM_HD std::uint32_t size_of(float value) noexcept {
    return bits_of_float(value) & 0x7FFF'FFFFU;
  }
  /// The factors of a group, with its scale as stored.
  [[nodiscard]] static LLMMEM_HD group_factors factors(std::uint32_t largest) noexcept {
    group_factors out = factors_of<dtype::f32, Code>(largest);
    if constexpr (Scale != dtype::f32) {
      if (out.scale != 0 && out.inverse != 0) {
        out.scale = float_of<Scale>(nearest_of<Scale>(out.scale));
        out.inverse = quotient_of(1.0F, out.scale);
      }
    }
    return out;
  }
  static LLMMEM_HD void store_scale(std::byte* to, float scale) noexcept {
    store_packet<scale_bytes>(to, {{nearest_of<Scale>(scale)}});
  }
  /// A NaN gets the bits that a device gives a product with a NaN, so that a host's are the same.
  [[nodiscard]] static LLMMEM_HD float load_scale(const std::byte* from) noexcept {
    const float scale =
        float_of<Scale>(static_cast<element_bits<Scale>>(load_packet<scale_bytes>(from).words[0]));
    return size_of(scale) > 0x7F80'0000U ? float_of_bits(0x7FFF'FFFFU) : scale;
  }

  LLMMEM_HD void store_codes(std::byte* to, const floats& values, const floats& inverses) const noexcept {
    constexpr unsigned bits = Code == dtype::int4 ? 4 : 8;
    constexpr unsigned per_word = 32 / bits;
    packet<code_bytes_of_octet> out{};
    LLMMEM_UNROLL
    for (unsigned i = 0; i < octet; ++i) {
      const auto code = static_cast<std::uint32_t>(nearest_integer(product_of(values.of[i], inverses.of[i])));
      out.words[i / per_word] |= (code & ((1U << bits) - 1U)) << (i % per_word * bits);
    }
    store_aligned<group_access::pieces>(to, out, of_.code_width);
  }
  [[nodiscard]] LLMMEM_HD floats load_codes(const std::byte* from, const floats& scales) const noexcept {
    constexpr unsigned bits = Code == dtype::int4 ? 4 : 8;
    constexpr unsigned per_word = 32 / bits;
    const auto in =
        load_aligned<code_bytes_of_octet, cache_hint::streaming, group_access::pieces>(from, of_.code_width);
    floats out{};
    LLMMEM_UNROLL
    for (unsigned i = 0; i < octet; ++i) {
      const std::uint32_t at_top = in.words[i / per_word] << (32 - bits - i % per_word * bits);
      out.of[i] =
          product_of(static_cast<float>(static_cast<std::int32_t>(at_top) >> (32 - bits)), scales.of[i]);
    }
    return out;
  }

  LLMMEM_HD void run_channels(const recoded_ends& ends) const noexcept {
    std::byte* const values = ends.values + std::uint64_t{ends.unit} * value_bytes;
    std::byte* const codes = ends.codes + std::uint64_t{ends.unit} * code_bytes_of_octet;
    std::byte* const scales = ends.scales + std::uint64_t{ends.unit} * octet * scale_bytes;
    const std::uint64_t value_step = of_.values.strides.token;
    const std::uint64_t code_step = of_.codes.strides.token;
    floats by{};
    if constexpr (Way == block_recoding::to_codes) {
      std::uint32_t largest[octet]{};
      for (std::uint32_t token = 0; token < of_.tokens; ++token) {
        const floats in = load_values(values + token * value_step);
        LLMMEM_UNROLL
        for (unsigned i = 0; i < octet; ++i)
          largest[i] = size_of(in.of[i]) > largest[i] ? size_of(in.of[i]) : largest[i];
      }
      LLMMEM_UNROLL
      for (unsigned i = 0; i < octet; ++i) {
        const group_factors each = factors(largest[i]);
        store_scale(scales + std::uint64_t{i} * scale_bytes, each.scale);
        by.of[i] = each.inverse;
      }
      for (std::uint32_t token = 0; token < of_.tokens; ++token)
        store_codes(codes + token * code_step, load_values(values + token * value_step), by);
    } else {
      LLMMEM_UNROLL
      for (unsigned i = 0; i < octet; ++i)
        by.of[i] = load_scale(scales + std::uint64_t{i} * scale_bytes);
      for (std::uint32_t token = 0; token < of_.tokens; ++token)
        store_values(values + token * value_step, load_codes(codes + token * code_step, by));
    }
  }

  LLMMEM_HD void run_token(const recoded_ends& ends) const noexcept {
    std::byte* const values = ends.values + ends.unit * of_.values.strides.token;
    std::byte* const codes = ends.codes + ends.unit * of_.codes.strides.token;
    std::byte* const scale = ends.scales + ends.unit * of_.scales.strides.token;
    floats by{};
    if constexpr (Way == block_recoding::to_codes) {
      std::uint32_t largest = 0;
      for (std::uint32_t at = 0; at < of_.octets; ++at) {
        const floats in = load_values(values + std::uint64_t{at} * value_bytes);
        LLMMEM_UNROLL
        for (unsigned i = 0; i < octet; ++i)
          largest = size_of(in.of[i]) > largest ? size_of(in.of[i]) : largest;
      }
      const group_factors each = factors(largest);
      store_scale(scale, each.scale);
      LLMMEM_UNROLL
      for (unsigned i = 0; i < octet; ++i)
        by.of[i] = each.inverse;
      for (std::uint32_t at = 0; at < of_.octets; ++at)
        store_codes(codes + std::uint64_t{at} * code_bytes_of_octet,
                    load_values(values + std::uint64_t{at} * value_bytes), by);
    } else {
      const float each = load_scale(scale);
      LLMMEM_UNROLL
      for (unsigned i = 0; i < octet; ++i)
        by.of[i] = each;
      for (std::uint32_t at = 0; at < of_.octets; ++at)
        store_values(values + std::uint64_t{at} * value_bytes,
                     load_codes(codes + std::uint64_t{at} * code_bytes_of_octet, by));
    }
  }

  recoded_plane of_;
};
static_assert(item_work<recode_work<block_recoding::to_codes, dtype::bf16, dtype::int4, dtype::bf16>>);

inline constexpr block_copy_names quantize_kv_blocks_names{
    "quantize_kv_blocks: layers",
    "quantize_kv_blocks: pairs",
    {"quantize_kv_blocks: to", "quantize_kv_blocks: to.plane_alignment"},
    {"quantize_kv_blocks: from", "quantize_kv_blocks: from.plane_alignment"}};
inline constexpr block_copy_names dequantize_kv_blocks_names{
    "dequantize_kv_blocks: layers",
    "dequantize_kv_blocks: pairs",
    {"dequantize_kv_blocks: to", "dequantize_kv_blocks: to.plane_alignment"},
    {"dequantize_kv_blocks: from", "dequantize_kv_blocks: from.plane_alignment"}};

/// Whether a plane's blocks are recoded octet by octet: integers with a scale for a channel or a vector, and
/// nothing else. All other forms go token by token.
///
/// @param scales_of_all  the caller's, which only the work by token multiplies.
[[nodiscard]] inline bool is_recoded_by_octets(const kv_layout& codes, std::uint32_t p,
                                               const kv_scales& scales_of_all) noexcept {
  if ((p == 0 ? scales_of_all.keys : scales_of_all.values) != nullptr) return false;
  const dtype code = codes.element_of(p);
  const paging::scale_form& scales = scales_of_plane(codes, p);
  return (code == dtype::int4 || code == dtype::int8) && scales.group != paging::scale_group::run &&
         scales.numbers == 1 && !scales.has_global && !scales.is_rotated;
}
[[nodiscard]] inline bool is_recoded_by_octets(const kv_layout& codes,
                                               const kv_scales& scales_of_all) noexcept {
  for (std::uint32_t p = 0; p < codes.kv_planes(); ++p)
    if (!is_recoded_by_octets(codes, p, scales_of_all)) return false;
  return true;
}

/// Refuses forms that these kernels do not support.
[[nodiscard]] inline result<void> check_recoding(const kv_layout& values, const kv_layout& codes,
                                                 const kv_scales& scales_of_all, bool is_quantize,
                                                 const char* who) noexcept {
  using enum paging::plane_role;
  if (auto plain = check_forms(values, who); !plain) return plain;
  if (codes.has(rotary)) return failure{errc::unsupported_layout, 2, 0, codes.rotary_dim, who};
  for (const kv_layout* each : {&values, &codes}) {
    if (each->has(index_key))
      return failure{errc::unsupported_layout, 0, each->kv_planes(), each->planes(), who};
  }
  if (auto fits = check_codes(codes, who); !fits) return fits;
  if (auto fits = check_code_vectors(codes, who); !fits && !is_recoded_by_octets(codes, scales_of_all))
    return fits;
  const auto no_conversion = [&](dtype code) {
    const auto value = static_cast<std::uint64_t>(values.element);
    const auto number = static_cast<std::uint64_t>(code);
    return failure{errc::no_conversion, 0, is_quantize ? number : value, is_quantize ? value : number, who};
  };
  if (values.element != dtype::bf16 && values.element != dtype::f32) return no_conversion(codes.element);
  for (std::uint32_t p = 0; p < codes.kv_planes(); ++p) {
    const paging::scale_form& scales = scales_of_plane(codes, p);
    const bool is_by_channel = scales.group == paging::scale_group::channel;
    if (is_quantize && is_by_channel && !is_recoded_by_octets(codes, p, scales_of_all))
      return failure{errc::unsupported_layout, 4, 0, static_cast<std::uint64_t>(scales.group), who};
    if (is_quantize && scales.group == paging::scale_group::run && !std::has_single_bit(scales.run))
      return failure{errc::bad_granularity, 0, scales.run, std::bit_floor(scales.run), who};
    if (codes.vector_elements(p) % octet != 0 || codes.vector_elements(p) == 0)
      return failure{errc::bad_granularity, 0, codes.vector_elements(p), octet, who};
  }
  return {};
}

template <block_recoding Way, dtype Value, dtype Code, class Run>
result<void> recode_plane(const Run& run, const recoded_plane& of, dtype scale) {
  if (scale == dtype::f32) return run.each(recode_work<Way, Value, Code, dtype::f32>(of));
  return run.each(recode_work<Way, Value, Code, dtype::bf16>(of));
}

template <block_recoding Way, dtype Value, class Run>
result<void> recode_plane(const Run& run, const recoded_plane& of, dtype code, dtype scale) {
  if (code == dtype::int4) return recode_plane<Way, Value, dtype::int4>(run, of, scale);
  return recode_plane<Way, Value, dtype::int8>(run, of, scale);
}

/// A plane of blocks in a form that goes token by token.
template <block_recoding Way, class Run>
result<void> recode_tokens(const Run& run, const recoded_plane& of, const kv_memory& codes, dtype value,
                           std::uint32_t p, const kv_scales& scales) {
  constexpr bool is_quantize = Way == block_recoding::to_codes;
  typename block_values<block_pair>::request values;
  values.values = of.values;
  values.pairs = of.pairs;
  values.pair_count = of.pair_count;
  values.from_blocks = of.from_blocks;
  values.to_blocks = of.to_blocks;
  values.first_layer = of.first_layer;
  values.layers = of.layers;
  values.tokens = divider(of.tokens);
  values.is_from_values = is_quantize;
  using work =
      code_tokens_work<is_quantize ? kv_direction::append : kv_direction::gather, block_values<block_pair>>;
  typename work::request to;
  to.planes[0] = coded_plane_of(codes, p, scales);
  to.packs[0] = of.octets;
  to.value_width[0] = of.value_width;
  to.heads = of.heads.by();
  to.lanes = std::max(std::bit_ceil(of.octets), 8U);
  to.element = value;
  to.out_of_range = of.out_of_range;
  return run.each(work(block_values<block_pair>(values), to));
}

template <block_recoding Way, class Run>
result<void> recode_blocks(const Run& run, const kv_memory& to, const kv_memory& from,
                           std::span<const block_pair> pairs, const block_copy_options& options,
                           const kv_scales& scales_of_all, const block_copy_names& names, const char* who) {
  constexpr bool is_quantize = Way == block_recoding::to_codes;
  const kv_memory& values = is_quantize ? from : to;
  const kv_memory& codes = is_quantize ? to : from;
  if (auto known = check_recoding(values.layout, codes.layout, scales_of_all, is_quantize, who); !known)
    return known;
  // Both hold the same values in different forms: compare them as if the forms were equal.
  kv_memory alike = to;
  alike.layout.element = from.layout.element;
  alike.layout.value_element = from.layout.value_element;
  alike.layout.key_scales = from.layout.key_scales;
  alike.layout.value_scales = from.layout.value_scales;
  const auto layers = check_copy(alike, from, pairs, options.layers, names);
  if (!layers) return layers.error();
  if (pairs.empty()) return {};
  recoded_plane plane[2]{};
  for (std::uint32_t p = 0; p < codes.layout.kv_planes(); ++p) {
    const paging::scale_form& scales = p == 0 ? codes.layout.key_scales : codes.layout.value_scales;
    recoded_plane& of = plane[p];
    of = {.values = kv_plane_of(values, p),
          .codes = kv_plane_of(codes, p),
          .scales = kv_plane_of(codes, scale_plane_of(codes.layout, p)),
          .pairs = pairs.data(),
          .pair_count = pairs.size(),
          .from_blocks = from.blocks,
          .to_blocks = to.blocks,
          .first_layer = layers->first,
          .layers = divider(layers->count),
          .heads = divider(codes.layout.heads),
          .tokens = codes.layout.block_tokens,
          .octets = static_cast<std::uint32_t>(codes.layout.vector_elements(p) / octet),
          .is_by_channel = scales.group == paging::scale_group::channel,
          .out_of_range = options.out_of_range};
    of.units = divider(of.is_by_channel ? of.octets : of.tokens);
    of.value_width = std::min<std::uint32_t>(plane_width(of.values), 16);
    of.code_width =
        std::min<std::uint32_t>(plane_width(of.codes), codes.layout.element_of(p) == dtype::int4 ? 4 : 8);
    const auto element = static_cast<std::uint32_t>(bits_of(values.layout.element) / 8);
    const auto scale = static_cast<std::uint32_t>(bits_of(scales.element) / 8);
    if (of.value_width < element) return failure{errc::bad_granularity, 0, of.value_width, element, who};
    if (plane_width(of.scales) < scale)
      return failure{errc::bad_granularity, 0, plane_width(of.scales), scale, who};
  }
  if (auto fits = check_code_places(codes, who); !fits) return fits;
  for (std::uint32_t p = 0; p < codes.layout.kv_planes(); ++p) {
    const dtype code = codes.layout.element_of(p);
    if (!is_recoded_by_octets(codes.layout, p, scales_of_all)) {
      if (auto done = recode_tokens<Way>(run, plane[p], codes, values.layout.element, p, scales_of_all);
          !done)
        return done;
      continue;
    }
    const dtype scale = (p == 0 ? codes.layout.key_scales : codes.layout.value_scales).element;
    auto done = values.layout.element == dtype::f32
                    ? recode_plane<Way, dtype::f32>(run, plane[p], code, scale)
                    : recode_plane<Way, dtype::bf16>(run, plane[p], code, scale);
    if (!done) return done;
  }
  return {};
}

}  // namespace detail

template <class Run>
result<void> quantize_kv_blocks(const Run& run, const kv_memory& to, const kv_memory& from,
                                std::span<const block_pair> pairs, const block_copy_options& options,
                                const kv_scales& scales) {
  return detail::recode_blocks<detail::block_recoding::to_codes>(
      run, to, from, pairs, options, scales, detail::quantize_kv_blocks_names, "quantize_kv_blocks");
}

template <class Run>
result<void> dequantize_kv_blocks(const Run& run, const kv_memory& to, const kv_memory& from,
                                  std::span<const block_pair> pairs, const block_copy_options& options,
                                  const kv_scales& scales) {
  return detail::recode_blocks<detail::block_recoding::to_values>(
      run, to, from, pairs, options, scales, detail::dequantize_kv_blocks_names, "dequantize_kv_blocks");
}

}  // namespace v0
}  // namespace llmmem
