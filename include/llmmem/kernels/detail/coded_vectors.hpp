/// @file
/// Keys and values in codes, with their scales in the block: reads and writes of eight elements of a vector,
/// for all kernels on single tokens.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/aligned_access.hpp>
#include <llmmem/kernels/detail/attention_tile.hpp>
#include <llmmem/kernels/detail/float_steps.hpp>
#include <llmmem/kernels/detail/group_codes.hpp>
#include <llmmem/kernels/divider.hpp>
#include <llmmem/kernels/elements.hpp>
#include <llmmem/kernels/packet.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/paging/kv_layout.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Two codes of four bits are in a byte, the first in its lower half.
[[nodiscard]] LLMMEM_HD constexpr bool is_half_byte(dtype code) noexcept {
  return code == dtype::int4 || code == dtype::fp4_e2m1;
}

/// The largest number that a code stands for.
[[nodiscard]] LLMMEM_HD constexpr float largest_number(dtype code) noexcept {
  if (code == dtype::int8) return largest_code<dtype::int8>;
  if (code == dtype::int4) return largest_code<dtype::int4>;
  if (code == dtype::fp8_e4m3) return largest_code<dtype::fp8_e4m3>;
  return 6.0F;  // of e2m1
}

/// The number of a code of e2m1: a sign, and 0, 1/2, 1, 3/2, 2, 3, 4 or 6.
[[nodiscard]] LLMMEM_HD inline float float_of_e2m1(std::uint32_t code) noexcept {
  const std::uint32_t digit = code & 1U;
  const std::uint32_t exponent = code >> 1U & 3U;
  // Twice the number is an integer: no step of it meets subnormal floats.
  const std::uint32_t twice = exponent == 0 ? digit : (2U | digit) << (exponent - 1U);
  const float size = static_cast<float>(static_cast<std::int32_t>(twice)) * 0.5F;
  return float_of_bits(bits_of_float(size) | (code & 8U) << 28U);
}
/// The code of e2m1 nearest to a number, of two equally near the even one; numbers beyond 6 become 6, a NaN a
/// zero.
[[nodiscard]] LLMMEM_HD inline std::uint32_t e2m1_of_float(float x) noexcept {
  const float size = size_of(x);
  const std::uint32_t code = (size > 0.25F ? 1U : 0U) + (size >= 0.75F ? 1U : 0U) + (size > 1.25F ? 1U : 0U) +
                             (size >= 1.75F ? 1U : 0U) + (size > 2.5F ? 1U : 0U) + (size >= 3.5F ? 1U : 0U) +
                             (size > 5.0F ? 1U : 0U);
  return code | (bits_of_float(x) >> 28U & 8U);
}

/// Reads a scale of any type that scales have.
[[nodiscard]] LLMMEM_HD inline float load_scale(dtype element, const std::byte* from) noexcept {
  if (element == dtype::f32) return float_of_bits(load_packet<4>(from).words[0]);
  if (element == dtype::bf16) return float_of<dtype::bf16>(load_packet<2>(from).words[0]);
  return float_of<dtype::fp8_e4m3>(load_packet<1>(from).words[0]);
}
[[nodiscard]] LLMMEM_HD constexpr std::uint32_t scale_bytes_of(dtype element) noexcept {
  return element == dtype::f32 ? 4 : element == dtype::bf16 ? 2 : 1;
}

/// Reads the scales of eight channels. @param width  their alignment
[[nodiscard]] LLMMEM_HD inline attention_floats load_channel_scales(dtype element, const std::byte* from,
                                                                    std::uint32_t width) noexcept {
  attention_floats out{};
  if (element == dtype::bf16 && width >= 16) {
    attention_raw<dtype::bf16> raw{};
    raw.part[0] = load_packet<16>(from);
    out = floats_of(raw);
  } else if (element == dtype::f32 && width >= 16) {
    attention_raw<dtype::f32> raw{};
    raw.part[0] = load_packet<16>(from);
    raw.part[1] = load_packet<16>(from + 16);
    out = floats_of(raw);
  } else {
    LLMMEM_UNROLL
    for (unsigned i = 0; i < attention_pack; ++i)
      out.of[i] = load_scale(element, from + std::size_t{i} * scale_bytes_of(element));
  }
  return out;
}

/// The numbers of a group of codes: value = code x scale + zero.
struct group_numbers {
  float scale;
  float zero;
};
/// They change no number, and no bit of -0.
inline constexpr group_numbers no_numbers{1, -0.0F};
/// Reads a group's scale and zero at once. @param width  their alignment
[[nodiscard]] LLMMEM_HD inline group_numbers load_numbers(dtype element, const std::byte* from,
                                                          std::uint32_t width) noexcept {
  if (element == dtype::bf16 && width >= 4) {
    const packet<4> in = load_packet<4>(from);
    return {float_of<dtype::bf16>(element_of<std::uint16_t>(in, 0)),
            float_of<dtype::bf16>(element_of<std::uint16_t>(in, 1))};
  }
  return {load_scale(element, from), load_scale(element, from + scale_bytes_of(element))};
}

/// Eight codes in their form in memory: those of four bits take the first word.
struct code_words {
  std::uint32_t word[2];
};

[[nodiscard]] LLMMEM_HD inline code_words load_codes(dtype code, const std::byte* from,
                                                     std::uint32_t width) noexcept {
  if (is_half_byte(code))
    return {{load_aligned<4, cache_hint::streaming, group_access::pieces>(from, width).words[0], 0}};
  const packet<8> in = load_aligned<8, cache_hint::streaming, group_access::pieces>(from, width);
  return {{in.words[0], in.words[1]}};
}
LLMMEM_HD inline void store_codes(dtype code, std::byte* to, const code_words& codes,
                                  std::uint32_t width) noexcept {
  if (is_half_byte(code)) return store_aligned<group_access::pieces>(to, packet<4>{{codes.word[0]}}, width);
  store_aligned<group_access::pieces>(to, packet<8>{{codes.word[0], codes.word[1]}}, width);
}

/// The numbers of eight codes, without their scale.
[[nodiscard]] LLMMEM_HD inline attention_floats floats_of_codes(dtype code, const code_words& in) noexcept {
  attention_floats out{};
  const auto integer = [&](unsigned i, unsigned bits) {
    const std::uint32_t at_top = in.word[i * bits / 32] << (32 - bits - i * bits % 32);
    return static_cast<float>(static_cast<std::int32_t>(at_top) >> (32 - bits));
  };
  if (code == dtype::int8) {
    LLMMEM_UNROLL
    for (unsigned i = 0; i < attention_pack; ++i)
      out.of[i] = integer(i, 8);
  } else if (code == dtype::int4) {
    LLMMEM_UNROLL
    for (unsigned i = 0; i < attention_pack; ++i)
      out.of[i] = integer(i, 4);
  } else if (code == dtype::fp8_e4m3) {
    LLMMEM_UNROLL
    for (unsigned i = 0; i < attention_pack; i += 2) {
      const auto both = static_cast<std::uint16_t>(in.word[i / 4] >> (i % 4 * 8));
      const float_pair pair = floats_of_pair<dtype::fp8_e4m3>(both);
      out.of[i] = pair.first;
      out.of[i + 1] = pair.second;
    }
  } else {
    LLMMEM_UNROLL
    for (unsigned i = 0; i < attention_pack; ++i)
      out.of[i] = float_of_e2m1(in.word[0] >> (4 * i));
  }
  return out;
}

/// x - y times the reciprocal of a scale, for any finite x and y: halves of them are far enough below the
/// largest float.
[[nodiscard]] LLMMEM_HD inline float steps_between(float x, float y, float inverse) noexcept {
  return product_of(product_of(x, 0.5F) - product_of(y, 0.5F), product_of(inverse, 2.0F));
}

/// The codes of eight values, each times the reciprocal of its scale.
/// @param zero  what code 0 stands for; it is subtracted first.
template <bool HasZero = false>
[[nodiscard]] LLMMEM_HD inline code_words codes_of_floats(dtype code, const attention_floats& values,
                                                          float inverse, float zero = 0) noexcept {
  code_words out{};
  LLMMEM_UNROLL
  for (unsigned i = 0; i < attention_pack; ++i) {
    float x = 0;
    if constexpr (HasZero) {
      x = steps_between(values.of[i], zero, inverse);
    } else {
      x = product_of(values.of[i], inverse);
    }
    if (code == dtype::int8) {
      out.word[i / 4] |= (static_cast<std::uint32_t>(nearest_integer(x)) & 0xFFU) << (i % 4 * 8);
    } else if (code == dtype::int4) {
      out.word[0] |= (static_cast<std::uint32_t>(nearest_integer(x)) & 0xFU) << (i * 4);
    } else if (code == dtype::fp8_e4m3) {
      out.word[i / 4] |= std::uint32_t{nearest_of<dtype::fp8_e4m3>(x)} << (i % 4 * 8);
    } else {
      out.word[0] |= e2m1_of_float(x) << (i * 4);
    }
  }
  return out;
}

/// A group's scale as stored, and the factors of its values in both directions.
struct coded_scale {
  float stored = 0;
  float scale = 0;
  float inverse = 0;
};
/// By the bits of the largest size of a group's values.
/// @param global  scales the scales; 1: nothing does.
[[nodiscard]] LLMMEM_HD inline coded_scale coded_scale_of(dtype code, dtype element, std::uint32_t largest,
                                                          float global) noexcept {
  if (largest == 0) return {};
  constexpr float least_normal = 0x1p-126F;
  const float nan = float_of_bits(0x7FFF'FFFFU);
  if (largest >= 0x7F80'0000U) return {nan, nan, 0};
  // The least number of e4m3 keeps a group of small values from becoming one without a scale.
  const float least = element == dtype::fp8_e4m3 ? 0x1p-9F : least_normal;
  float wanted = quotient_of(float_of_bits(largest), largest_number(code));
  if (global != 1.0F) wanted = quotient_of(wanted, global);
  if (wanted < least) wanted = least;
  coded_scale out;
  if (element == dtype::f32) {
    out.stored = wanted;
  } else if (element == dtype::bf16) {
    out.stored = float_of<dtype::bf16>(nearest_of<dtype::bf16>(wanted));
  } else {
    out.stored = float_of<dtype::fp8_e4m3>(nearest_of<dtype::fp8_e4m3>(wanted));
  }
  out.scale = global != 1.0F ? product_of(out.stored, global) : out.stored;
  // A global scale that is no positive number leaves no reciprocal: zeros and NaNs come of it.
  if (out.scale >= least_normal) out.inverse = quotient_of(1.0F, out.scale);
  return out;
}
/// A number that bf16 would round to an infinity becomes the largest bf16: codes stand for numbers beyond the
/// values that they came from.
[[nodiscard]] LLMMEM_HD inline float held_below_infinity(float value) noexcept {
  const std::uint32_t size = bits_of_float(value) & 0x7FFF'FFFFU;
  const bool is_beyond = size > 0x7F7F'0000U && size < 0x7F80'0000U;
  return is_beyond ? float_of_bits((bits_of_float(value) & 0x8000'0000U) | 0x7F7F'0000U) : value;
}
/// A float as a scale's type, f32 or bf16, stores it.
[[nodiscard]] LLMMEM_HD inline float stored_number(dtype element, float x) noexcept {
  return element == dtype::bf16 ? float_of<dtype::bf16>(nearest_of<dtype::bf16>(held_below_infinity(x))) : x;
}

/// A group's scale and the number of its code 0 as stored, and the factors of its values in both directions.
struct coded_range {
  coded_scale of{};
  float stored_zero = 0;
  float zero = 0;
};
/// By a group's least and largest value, of which the codes from -8 to 7 (or -128 to 127) take the whole
/// distance. The scale is found for the zero as it is stored, so no value is beyond the codes by more than a
/// rounding. Equal values have the scale 0 if the zero holds them.
/// @param sizes  the bits of the largest size of the group's values.
[[nodiscard]] LLMMEM_HD inline coded_range coded_range_of(dtype code, dtype element, float least, float most,
                                                          std::uint32_t sizes, float global) noexcept {
  constexpr float least_normal = 0x1p-126F;
  const float nan = float_of_bits(0x7FFF'FFFFU);
  const coded_range broken{{nan, nan, 0}, nan, nan};
  if (sizes >= 0x7F80'0000U) return broken;
  const bool is_byte = code == dtype::int8;
  const float above = is_byte ? 127.0F : 7.0F;
  const float below = is_byte ? 128.0F : 8.0F;
  const float share = is_byte ? 128.0F / 255.0F : 8.0F / 15.0F;
  float zero = least == most ? most : product_of(least, 1.0F - share) + product_of(most, share);
  if (global != 1.0F) zero = quotient_of(zero, global);
  coded_range out;
  out.stored_zero = stored_number(element, zero);
  out.zero = global != 1.0F ? product_of(out.stored_zero, global) : out.stored_zero;
  if (bits_of_float(size_of(out.zero)) >= 0x7F80'0000U) return broken;
  const float half = product_of(out.zero, 0.5F);
  const float up = quotient_of(product_of(most, 0.5F) - half, 0.5F * above);
  const float down = quotient_of(half - product_of(least, 0.5F), 0.5F * below);
  float wanted = larger_of(up, down);
  if (wanted == 0.0F) return out;
  if (global != 1.0F) wanted = quotient_of(wanted, global);
  if (wanted < least_normal) wanted = least_normal;
  out.of.stored = stored_number(element, wanted);
  out.of.scale = global != 1.0F ? product_of(out.of.stored, global) : out.of.stored;
  if (out.of.scale >= least_normal) out.of.inverse = quotient_of(1.0F, out.of.scale);
  return out;
}

/// code x scale + zero, rounded once. A NaN gets the bits that devices produce.
[[nodiscard]] LLMMEM_HD inline float number_from_zero(float code, float scale, float zero) noexcept {
  const float x = fused(code, scale, zero);
#if defined(__CUDA_ARCH__)
  return x;
#else
  return x == x ? x : float_of_bits(0x7FFF'FFFFU);
#endif
}

LLMMEM_HD inline void store_scale(dtype element, std::byte* to, float stored) noexcept {
  if (element == dtype::f32) return store_packet<4>(to, packet<4>{{bits_of_float(stored)}});
  if (element == dtype::bf16) return store_packet<2>(to, packet<2>{{nearest_of<dtype::bf16>(stored)}});
  store_packet<1>(to, packet<1>{{nearest_of<dtype::fp8_e4m3>(stored)}});
}

/// A plane of codes with its scales. Made by `coded_plane_of`.
struct coded_plane {
  kv_plane codes{};
  kv_plane scales{};
  kv_plane globals{};             // a number for a block; of a layout without one not read
  const float* global = nullptr;  // a number of the caller, or null
  dtype code = dtype::int8;
  dtype scale = dtype::f32;
  bool is_by_channel = false;
  bool has_global = false;
  bool is_global_by_head = false;
  bool has_zero = false;            // after each scale, the number that code 0 stands for
  divider run{};                    // packs of a vector that share a scale
  std::uint32_t code_width = 1;     // the alignment of eight codes
  std::uint32_t scale_width = 1;    // and of a vector's scales, at most 16
  std::uint32_t rotated_packs = 0;  // of the blocks that Hadamard's matrix turns; 0: nothing is turned
  float rotation = 1;

  [[nodiscard]] LLMMEM_HD std::uint32_t pack_bytes() const noexcept { return is_half_byte(code) ? 4 : 8; }
  /// Bytes of a group's numbers.
  [[nodiscard]] LLMMEM_HD std::uint32_t group_bytes() const noexcept {
    return scale_bytes_of(scale) << (has_zero ? 1U : 0U);
  }
};

/// The codes and scales of a head in a layer.
struct coded_head {
  std::byte* codes = nullptr;
  std::byte* scales = nullptr;
  std::byte* globals = nullptr;
  float global = 1;
};
[[nodiscard]] LLMMEM_HD inline coded_head head_of(const coded_plane& plane, std::uint64_t layer,
                                                  std::uint64_t head) noexcept {
  coded_head out;
  out.codes = plane_base(plane.codes, layer) + head * plane.codes.strides.head;
  out.scales = plane_base(plane.scales, layer) + head * plane.scales.strides.head;
  if (plane.has_global) out.globals = plane_base(plane.globals, layer);
  if (!plane.has_global && plane.global != nullptr)
    out.global = plane.global[plane.is_global_by_head ? head : 0];
  return out;
}

/// Returns what scales the scales of a block.
[[nodiscard]] LLMMEM_HD inline float global_of(const coded_plane& plane, const coded_head& head,
                                               std::uint64_t block) noexcept {
  return plane.has_global ? load_scale(dtype::f32, head.globals + block * plane.globals.strides.block)
                          : head.global;
}
[[nodiscard]] LLMMEM_HD inline float whole_scale(float stored, float global) noexcept {
  return global != 1.0F ? product_of(stored, global) : stored;
}
/// Returns the numbers of a pack of a token. @param global  of the block. @pre the scales are not by channel
[[nodiscard]] LLMMEM_HD inline group_numbers token_numbers(const coded_plane& plane, const coded_head& head,
                                                           std::uint64_t block, std::uint64_t token,
                                                           std::uint32_t pack, float global) noexcept {
  const std::byte* const at = head.scales + block * plane.scales.strides.block +
                              token * plane.scales.strides.token +
                              plane.run.quotient(pack) * plane.group_bytes();
  if (!plane.has_zero) return {whole_scale(load_scale(plane.scale, at), global), -0.0F};
  const group_numbers stored = load_numbers(plane.scale, at, plane.scale_width);
  return {whole_scale(stored.scale, global), whole_scale(stored.zero, global)};
}
/// Returns the scales of a pack's channels in a block. @pre they are by channel
[[nodiscard]] LLMMEM_HD inline attention_floats scales_of_channels(const coded_plane& plane,
                                                                   const coded_head& head,
                                                                   std::uint64_t block,
                                                                   std::uint32_t pack) noexcept {
  const float global = global_of(plane, head, block);
  attention_floats out =
      load_channel_scales(plane.scale,
                          head.scales + block * plane.scales.strides.block +
                              std::uint64_t{pack} * attention_pack * scale_bytes_of(plane.scale),
                          plane.scale_width);
  LLMMEM_UNROLL
  for (float& each : out.of)
    each = whole_scale(each, global);
  return out;
}
/// Eight codes times the scales of their channels.
[[nodiscard]] LLMMEM_HD inline attention_floats scaled_by(const attention_floats& scales,
                                                          const attention_floats& codes) noexcept {
  attention_floats out{};
  LLMMEM_UNROLL
  for (unsigned i = 0; i < attention_pack; ++i)
    out.of[i] = product_of(codes.of[i], scales.of[i]);
  return out;
}
/// The values of eight codes with the same numbers. Without a zero, the number -0 in its place changes no
/// bit.
[[nodiscard]] LLMMEM_HD inline attention_floats scaled_by(const group_numbers& by,
                                                          [[maybe_unused]] bool has_zero,
                                                          const attention_floats& codes) noexcept {
#if defined(__CUDA_ARCH__)
  has_zero = true;  // a branch would cost more than it saves
#endif
  attention_floats out{};
  LLMMEM_UNROLL
  for (unsigned i = 0; i < attention_pack; ++i)
    out.of[i] =
        has_zero ? number_from_zero(codes.of[i], by.scale, by.zero) : product_of(codes.of[i], by.scale);
  return out;
}

/// The scales of eight elements of a head's vectors in a block: by channel one each, else by token.
class pack_scales {
 public:
  LLMMEM_HD pack_scales(const coded_plane& plane, const coded_head& head, std::uint64_t block,
                        std::uint32_t pack) noexcept
      : head_(head), block_(block), pack_(pack) {
    if (plane.is_by_channel) {
      by_channel_ = scales_of_channels(plane, head, block, pack);
    } else {
      global_ = global_of(plane, head, block);
    }
  }
  /// Eight values of a token of the block.
  [[nodiscard]] LLMMEM_HD attention_floats scaled(const coded_plane& plane, std::uint64_t token,
                                                  const attention_floats& codes) const noexcept {
    if (plane.is_by_channel) return scaled_by(by_channel_, codes);
    return scaled_by(token_numbers(plane, head_, block_, token, pack_, global_), plane.has_zero, codes);
  }

 private:
  attention_floats by_channel_{};
  coded_head head_;
  std::uint64_t block_;
  std::uint32_t pack_;
  float global_ = 1;
};

/// Returns the address of a token's eight codes.
[[nodiscard]] LLMMEM_HD inline std::byte* codes_at(const coded_plane& plane, const coded_head& head,
                                                   std::uint64_t block, std::uint64_t token,
                                                   std::uint32_t pack) noexcept {
  return head.codes + block * plane.codes.strides.block + token * plane.codes.strides.token +
         std::uint64_t{pack} * plane.pack_bytes();
}

/// Turns vectors, of which each lane has eight elements, by the orthonormal matrix of Hadamard: blocks of
/// `packs` lanes. It is its own inverse. The order of additions is the same for hosts and devices.
template <class Group>
LLMMEM_HD inline void rotate_lanes(const Group& group, typename Group::template held<attention_floats>& of,
                                   std::uint32_t packs, float factor) noexcept {
  group.each([&](std::uint32_t lane) {
    float* const x = of[lane].of;
    LLMMEM_UNROLL
    for (unsigned step = 1; step < attention_pack; step *= 2) {
      LLMMEM_UNROLL
      for (unsigned i = 0; i < attention_pack; ++i) {
        if ((i & step) != 0) continue;
        const float a = x[i];
        const float b = x[i | step];
        x[i] = a + b;
        x[i | step] = a - b;
      }
    }
  });
  typename Group::template held<float> other;
  for (std::uint32_t step = 1; step < packs; step *= 2) {
    LLMMEM_UNROLL
    for (unsigned i = 0; i < attention_pack; ++i) {
      group.each([&](std::uint32_t lane) { other[lane] = of[lane].of[i]; });
      group.swap(other, step);
      group.each([&](std::uint32_t lane) {
        const float mine = of[lane].of[i];
        of[lane].of[i] = (lane & step) != 0 ? other[lane] - mine : mine + other[lane];
      });
    }
  }
  group.each([&](std::uint32_t lane) {
    LLMMEM_UNROLL
    for (unsigned i = 0; i < attention_pack; ++i)
      of[lane].of[i] = product_of(of[lane].of[i], factor);
  });
}

/// The codes of both planes, as attention reads them: each lane as floats.
struct attention_codes {
  coded_plane keys{};
  coded_plane values{};
  std::uint32_t layer = 0;
};
/// Attention to elements that are no codes.
struct no_codes {};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
