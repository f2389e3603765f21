/// @file
/// `wire_form`: the form in which collectives send floats: whole, as bfloat16, or as codes of groups with a
/// scale.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/model/bf16.hpp>
#include <llmmem/model/fp8.hpp>

#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>

namespace llmmem {
inline namespace v0 {

/// The elements of a message.
enum class wire_format : std::uint8_t {
  plain,  ///< floats, unchanged
  bf16,   ///< bfloat16, rounded to nearest even
  fp8,    ///< e4m3 codes and a scale for each group
  int8,   ///< codes of -127 to 127 and a scale for each group
  int4,   ///< codes of -7 to 7, two in a byte, the first in its lower half, and a scale for each group
};

/// The scale of a group.
enum class wire_scale : std::uint8_t {
  f32,   ///< 4 bytes: the largest element of a group is restored exactly
  bf16,  ///< 2 bytes: rounded up, by at most 2^-7 of it (below 2^-126, by less than 2^-133)
};

/// Converts floats to the form of a message and back. Collectives take any such type.
///
/// | member | |
/// |---|---|
/// | `group()` | elements that are encoded together, at least 1; a part begins at a multiple of it |
/// | `bytes(n)` | the encoded bytes of n elements, exactly; parts of whole groups add up |
/// | `encode(in, out)` | writes `bytes(in.size())` bytes |
/// | `decode(in, out)` | reads `bytes(out.size())` bytes; accepts any bytes |
///
/// The functions depend on their arguments only, so that all ranks restore the same bits.
template <class W>
concept wire_codec =
    std::copyable<W> && requires(const W& w, std::span<const float> values, std::span<float> restored,
                                 std::byte* out, const std::byte* in, std::uint64_t elements) {
      { w.group() } noexcept -> std::same_as<std::uint32_t>;
      { w.bytes(elements) } noexcept -> std::same_as<std::uint64_t>;
      { w.encode(values, out) } noexcept;
      { w.decode(in, restored) } noexcept;
    };

/// The form of floats in messages, chosen at run time.
///
/// With amax the largest size of a group's elements and qmax 127, 7 or 448 (e4m3), the message has amax as
/// the group's scale, and
///
///     code     = nearest(x * (qmax / amax))
///     restored = code * (amax / qmax)
///
/// computed in double precision and rounded once to a float. So a group's positive and negative maximum is
/// restored exactly, and a restored group has the same codes again (with a scale of f32, and with e4m3 if
/// amax is at least 2^-126). All other elements are within half a step, amax / 254 (int8) or amax / 14
/// (int4), plus one rounding of a float; e4m3 within 2^-4 of an element, or amax / 448 x 2^-10 near zero.
///
/// A group with an infinite or NaN element is restored as NaNs, all of it: a broken value does not become a
/// plausible one, and neighbouring groups are unaffected. In bf16 and plain messages such values remain what
/// they are. A group of zeros is restored as zeros; the signs of zeros are lost. The last group may be
/// shorter.
///
/// A scale of bf16 is amax rounded up, so that no code saturates; an amax above the largest bfloat16,
/// (2 - 2^-7) x 2^127, is restored as this.
///
/// @par Complexity      one pass over the elements to find amax, one to encode, one to decode.
/// @par Thread safety   as a plain value.
/// @par Source          Dettmers et al. 2021, arXiv 2110.02861 (groups); Wang et al. 2023, "ZeRO++", arXiv
///                      2306.10209 (in collectives); Micikevicius et al. 2022, arXiv 2209.05433 (e4m3).
class wire_form {
 public:
  /// Plain floats.
  constexpr wire_form() noexcept = default;
  /// That format, with its usual groups: 128 elements of int8 and int4, 4,096 of fp8.
  constexpr explicit(false) wire_form(wire_format format) noexcept
      : format_(format), group_(usual_group(format)) {}
  /// @throws argument_error  for a group of 0 elements; for an odd one of int4, because two codes share a
  ///                         byte; for plain or bf16 and a group other than 1.
  constexpr wire_form(wire_format format, std::uint32_t group, wire_scale scale = wire_scale::f32)
      : format_(format), scale_(scale), group_(group) {
    if (group == 0) throw argument_error("wire_form: a group of 0 elements; 1 is the least");
    if (format == wire_format::int4 && group % 2 != 0) {
      throw argument_error("wire_form: a group of " + std::to_string(group) +
                           " elements of int4; two codes share a byte, so give an even number");
    }
    if (!has_groups() && group != 1) {
      throw argument_error("wire_form: a group of " + std::to_string(group) +
                           " elements of a format without scales; give 1");
    }
  }

  [[nodiscard]] constexpr wire_format format() const noexcept { return format_; }
  [[nodiscard]] constexpr wire_scale scale() const noexcept { return scale_; }
  [[nodiscard]] constexpr std::uint32_t group() const noexcept { return group_; }
  /// Whether messages have the floats themselves.
  [[nodiscard]] constexpr bool is_plain() const noexcept { return format_ == wire_format::plain; }
  /// Whether groups have scales.
  [[nodiscard]] constexpr bool has_groups() const noexcept {
    return format_ != wire_format::plain && format_ != wire_format::bf16;
  }

  /// Returns the bytes of `elements` in a message: for each element 4, 2, 1 or a half, and for each group,
  /// the last one too, its scale. @pre `elements` is at most 2^61
  [[nodiscard]] constexpr std::uint64_t bytes(std::uint64_t elements) const noexcept {
    const std::uint64_t groups = elements / group_ + (elements % group_ != 0 ? 1 : 0);
    switch (format_) {
      case wire_format::plain:
        break;
      case wire_format::bf16:
        return 2 * elements;
      case wire_format::fp8:
      case wire_format::int8:
        return elements + groups * scale_bytes();
      case wire_format::int4:
        return elements / 2 + elements % 2 + groups * scale_bytes();
    }
    return 4 * elements;
  }

  /// Writes `bytes(in.size())` bytes. @pre the two do not overlap
  void encode(std::span<const float> in, std::byte* out) const noexcept {
    if (in.empty()) return;
    if (is_plain()) {
      std::memcpy(out, in.data(), in.size_bytes());
      return;
    }
    if (format_ == wire_format::bf16) {
      map<float, std::uint16_t>(reinterpret_cast<const std::byte*>(in.data()), out, in.size(),
                                [](float x) { return bf16_from_f32_bits(std::bit_cast<std::uint32_t>(x)); });
      return;
    }
    for (std::size_t at = 0; at < in.size(); at += group_)
      out = encode_group(in.subspan(at, left(in.size(), at)), out);
  }

  /// Reads `bytes(out.size())` bytes. @pre the two do not overlap
  void decode(const std::byte* in, std::span<float> out) const noexcept {
    if (out.empty()) return;
    if (is_plain()) {
      std::memcpy(out.data(), in, out.size_bytes());
      return;
    }
    if (format_ == wire_format::bf16) {
      map<std::uint16_t, float>(
          in, reinterpret_cast<std::byte*>(out.data()), out.size(),
          [](std::uint16_t bits) { return std::bit_cast<float>(f32_from_bf16_bits(bits)); });
      return;
    }
    for (std::size_t at = 0; at < out.size(); at += group_)
      in = decode_group(in, out.subspan(at, left(out.size(), at)));
  }

  friend constexpr bool operator==(const wire_form&, const wire_form&) noexcept = default;

 private:
  [[nodiscard]] static constexpr std::uint32_t usual_group(wire_format format) noexcept {
    if (format == wire_format::fp8) return 4096;
    return format == wire_format::int8 || format == wire_format::int4 ? 128 : 1;
  }
  [[nodiscard]] constexpr std::uint64_t scale_bytes() const noexcept {
    return scale_ == wire_scale::f32 ? 4 : 2;
  }
  [[nodiscard]] constexpr double largest_code() const noexcept {
    if (format_ == wire_format::fp8) return e4m3_max;
    return format_ == wire_format::int8 ? 127 : 7;
  }

  /// Returns how many elements the group from `at` on has.
  [[nodiscard]] std::size_t left(std::size_t all, std::size_t at) const noexcept {
    return all - at < group_ ? all - at : group_;
  }

  /// Converts in tiles of a fixed length, through local arrays: compilers vectorise this at any alignment.
  template <class From, class To, class Convert>
  static void map(const std::byte* in, std::byte* out, std::size_t count, Convert one) noexcept {
    static constexpr std::size_t tile = 32;
    const auto some = [&](std::size_t now) {
      std::array<From, tile> from{};
      std::array<To, tile> to;  // NOLINT(cppcoreguidelines-pro-type-member-init)
      std::memcpy(from.data(), in, now * sizeof(From));
      for (std::size_t k = 0; k < tile; ++k)
        to[k] = one(from[k]);
      std::memcpy(out, to.data(), now * sizeof(To));
      in += now * sizeof(From);
      out += now * sizeof(To);
    };
    for (std::size_t tiles = count / tile; tiles != 0; --tiles)
      some(tile);
    if (count % tile != 0) some(count % tile);
  }

  /// Returns the integer nearest to a number of at most 2^21; of two equally near, the even one. The sum with
  /// 1.5 x 2^23 has it in its last bits, which every machine can do for many floats at once.
  [[nodiscard]] static std::int32_t nearest(float value) noexcept {
    return std::bit_cast<std::int32_t>(value + 0x1.8p23F) - 0x4B40'0000;
  }

  /// Returns the bits of the largest size: floats are ordered as their bits, infinity and NaNs above all.
  /// @{
  [[nodiscard]] static std::uint32_t larger(std::uint32_t a, std::uint32_t b) noexcept {
    return a < b ? b : a;
  }
  [[nodiscard]] static std::uint32_t largest_size(std::span<const float> values) noexcept {
    static constexpr std::size_t lanes = 16;
    std::array<std::uint32_t, lanes> most{};
    const auto size_of = [](float x) { return std::bit_cast<std::uint32_t>(x) & 0x7FFF'FFFFU; };
    std::size_t i = 0;
    for (; i + lanes <= values.size(); i += lanes) {
      for (std::size_t k = 0; k < lanes; ++k)
        most[k] = larger(most[k], size_of(values[i + k]));
    }
    for (std::size_t k = 0; i < values.size(); ++i, ++k)
      most[k] = larger(most[k], size_of(values[i]));
    std::uint32_t all = 0;
    for (const std::uint32_t each : most)
      all = larger(all, each);
    return all;
  }
  /// @}

  [[nodiscard]] std::byte* write_scale(std::uint32_t bits, std::byte* out) const noexcept {
    if (scale_ == wire_scale::f32) {
      std::memcpy(out, &bits, 4);
      return out + 4;
    }
    const auto upper = static_cast<std::uint16_t>(bits >> 16U);
    std::memcpy(out, &upper, 2);
    return out + 2;
  }
  /// Returns the bits of the scale that is sent: a NaN for a group with a value that is not finite.
  [[nodiscard]] std::uint32_t sent_scale(std::uint32_t largest) const noexcept {
    if (largest >= infinity) return 0x7FC0'0000U;
    if (scale_ == wire_scale::f32) return largest;
    return largest > 0x7F7F'0000U ? 0x7F7F'0000U : (largest + 0xFFFFU) & 0xFFFF'0000U;
  }

  [[nodiscard]] std::byte* encode_group(std::span<const float> in, std::byte* out) const noexcept {
    const std::uint32_t sent = sent_scale(largest_size(in));
    out = write_scale(sent, out);
    const std::size_t code_bytes = format_ == wire_format::int4 ? in.size() / 2 + in.size() % 2 : in.size();
    if (sent == 0 || sent > infinity) {
      std::memset(out, 0, code_bytes);
      return out + code_bytes;
    }
    const double factor = largest_code() / static_cast<double>(std::bit_cast<float>(sent));
    const auto* const from = reinterpret_cast<const std::byte*>(in.data());
    if (format_ == wire_format::fp8) {
      map<float, std::uint8_t>(from, out, in.size(), [factor](float x) {
        const auto scaled = static_cast<float>(static_cast<double>(x) * factor);
        return e4m3_from_f32_bits(std::bit_cast<std::uint32_t>(scaled));
      });
      return out + code_bytes;
    }
    // An amax above the largest bfloat16 is at most 1 + 2^-8 of it, and 127 times that still rounds to 127.
    const auto code_of = [factor](float x) {
      return nearest(static_cast<float>(static_cast<double>(x) * factor));
    };
    if (format_ == wire_format::int8) {
      map<float, std::int8_t>(from, out, in.size(),
                              [&](float x) { return static_cast<std::int8_t>(code_of(x)); });
      return out + code_bytes;
    }
    using pair = std::array<float, 2>;
    map<pair, std::uint8_t>(from, out, in.size() / 2, [&](const pair& x) {
      return static_cast<std::uint8_t>((code_of(x[0]) & 0xF) | (code_of(x[1]) & 0xF) << 4);
    });
    if (in.size() % 2 != 0) out[code_bytes - 1] = static_cast<std::byte>(code_of(in.back()) & 0xF);
    return out + code_bytes;
  }

  [[nodiscard]] const std::byte* decode_group(const std::byte* in, std::span<float> out) const noexcept {
    std::uint32_t scale = 0;
    if (scale_ == wire_scale::f32) {
      std::memcpy(&scale, in, 4);
      in += 4;
    } else {
      std::uint16_t upper = 0;
      std::memcpy(&upper, in, 2);
      scale = std::uint32_t{upper} << 16U;
      in += 2;
    }
    const std::size_t code_bytes =
        format_ == wire_format::int4 ? out.size() / 2 + out.size() % 2 : out.size();
    if ((scale & 0x7FFF'FFFFU) >= infinity) {
      for (float& each : out)
        each = std::numeric_limits<float>::quiet_NaN();
      return in + code_bytes;
    }
    const double step = static_cast<double>(std::bit_cast<float>(scale)) / largest_code();
    auto* const to = reinterpret_cast<std::byte*>(out.data());
    if (format_ == wire_format::fp8) {
      map<std::uint8_t, float>(in, to, out.size(), [step](std::uint8_t code) {
        return static_cast<float>(static_cast<double>(e4m3_values[code]) * step);
      });
      return in + code_bytes;
    }
    const auto value_of = [step](int code) { return static_cast<float>(code * step); };
    if (format_ == wire_format::int8) {
      map<std::int8_t, float>(in, to, out.size(), [&](std::int8_t code) { return value_of(code); });
      return in + code_bytes;
    }
    using pair = std::array<float, 2>;
    const auto lower = [](std::uint8_t codes) { return ((codes & 0xF) ^ 8) - 8; };
    map<std::uint8_t, pair>(in, to, out.size() / 2, [&](std::uint8_t codes) {
      return pair{value_of(lower(codes)), value_of(lower(static_cast<std::uint8_t>(codes >> 4)))};
    });
    if (out.size() % 2 != 0) out.back() = value_of(lower(static_cast<std::uint8_t>(in[code_bytes - 1])));
    return in + code_bytes;
  }

  static constexpr std::uint32_t infinity = 0x7F80'0000U;
  /// By code.
  static constexpr std::array<float, 256> e4m3_values = [] {
    std::array<float, 256> all{};
    for (std::size_t i = 0; i < all.size(); ++i)
      all[i] = std::bit_cast<float>(f32_from_e4m3_bits(static_cast<std::uint8_t>(i)));
    return all;
  }();

  wire_format format_ = wire_format::plain;
  wire_scale scale_ = wire_scale::f32;
  std::uint32_t group_ = 1;
};

static_assert(wire_codec<wire_form>);

}  // namespace v0
}  // namespace llmmem
