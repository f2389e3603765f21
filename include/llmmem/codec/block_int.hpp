/// @file
/// The codec of floats as 8, 4 or 2-bit integers in groups with a scale, rounded stochastically by a counter.
#pragma once

#include <llmmem/codec/concepts.hpp>
#include <llmmem/codec/detail/int_group.hpp>
#include <llmmem/codec/errors.hpp>
#include <llmmem/config.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/model/int_rounding.hpp>
#include <llmmem/model/random_bits.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>

namespace llmmem {
inline namespace v0 {

/// A quarter, an eighth or a sixteenth of the bytes: for activations that wait for the backward pass, and for
/// gradients. The rounding has no bias: over the versions of a position, the mean of the restored values is
/// the value.
///
/// With amax the largest size in a group and qmax = 2^(Bits-1) - 1, which is 127, 7 or 1:
///
///     steps    = |x| / amax * qmax, to the nearest 2^-(24-Bits)
///     code     = sign(x) * the whole number below or above, the latter for exactly
///                (steps - below) of all random bits
///     restored = code * (amax / qmax), rounded once to a float
///
/// - **Error**: less than a step, amax / qmax. The expected value is within 2^-(25-Bits) steps, less than
///   2^-23 amax, of x; zeros and the largest elements are exact.
/// - **Random bits** are a function of the position (`encode_position`), the group and the element. So the
///   form does not depend on threads, repetitions, or the cut of a chunk into parts of whole groups.
///   Encoded again, at any position, restored values have the same form (scales of f32, amax at least
///   2^-126).
/// - **A NaN or an infinity** makes its group NaNs, all of it, and no other: a broken value does not become a
///   plausible one. **A group of zeros** is restored as zeros; signs of zeros are lost. **Subnormal** scales
///   are scales like others, with an error of less than a step and 2^-150. **The last group** may be shorter.
/// - **A scale of bf16** is amax rounded up, by at most 2^-7 of it, so that no code saturates. Values above
///   the largest bf16, (2 - 2^-7) x 2^127, are restored as this.
///
/// The encoded form, group by group, without a header: the scale, 4 or 2 bytes, little-endian, then the
/// codes, two's complement, the first in the lowest bits of the first byte. Forms of parts of whole groups,
/// one after the other, are the form of the whole. `decode` refuses codes, scales and padding that no encoder
/// writes. On a device `encode_int_groups` and `decode_int_groups` have the same bytes.
///
/// @tparam Bits   8, 4 or 2
/// @tparam Group  elements that share a scale: a multiple of the codes in a byte, at most 65536
/// @tparam Scale  `dtype::f32`, or `dtype::bf16` for half the bytes of scales
/// @par Complexity      two passes to encode, one to decode; no scratch memory.
/// @par Thread safety   const calls only: any number of threads.
/// @par Errors          as of `codec`; the `index` of a `damaged_encoding` is the group.
/// @par Source          Chen et al., "ActNN", ICML 2021, arXiv 2104.14129 (activations, per group, unbiased).
template <unsigned Bits, std::uint32_t Group = 256, dtype Scale = dtype::f32>
  requires((Bits == 8 || Bits == 4 || Bits == 2) && Group != 0 && Group % (8 / Bits) == 0 && Group <= 65536 &&
           (Scale == dtype::f32 || Scale == dtype::bf16))
class block_int {
  using rounding = detail::int_rounding<Bits>;
  using packed = detail::packed_codes<Bits>;

 public:
  static constexpr const char* name = "block_int";
  static constexpr std::uint64_t format_id = format_digest(
      name_of(Scale), format_digest("block int 1", std::uint64_t{Bits} << 32U | std::uint64_t{Group}));
  static constexpr std::uint64_t element_bytes = 4;
  static constexpr std::uint32_t group = Group;
  static constexpr bool is_lossless = false;
  /// Absolute: a step of the largest subnormal scale, and half of a float's smallest.
  static constexpr codec_error error_bound{
      .absolute = 0x1p-126 / rounding::largest + 0x1p-150,
      .group = (Scale == dtype::f32 ? 1 : 1 + 0x1p-7) / rounding::largest};

  explicit block_int(std::uint64_t max_chunk_bytes, const metadata_source& = {})
      : max_chunk_bytes_(checked_chunk_bytes(max_chunk_bytes, name)) {}

  /// Returns the bytes of every chunk of `bytes`.
  [[nodiscard]] static constexpr std::uint64_t worst_case_bytes(std::uint64_t bytes) noexcept {
    const std::uint64_t elements = bytes / 4 + (bytes % 4 != 0 ? 1 : 0);
    return elements / Group * group_bytes(Group) +
           (elements % Group != 0 ? group_bytes(elements % Group) : 0);
  }

  [[nodiscard]] result<std::uint64_t> encode(std::span<const std::byte> in, std::span<std::byte> out,
                                             const encode_position& at = {}) const noexcept {
    const failure refused = encode_refusal(*this, in.size(), out.size());
    if (refused.code != errc::ok) return refused;
    const std::uint64_t key = detail::int_rounding_key::of_chunk(at.chunk, at.version);
    std::byte* to = out.data();
    for (std::uint64_t index = at.group; !in.empty(); ++index) {
      const std::size_t count = std::min<std::size_t>(in.size() / 4, Group);
      encode_group(in.data(), count, to, detail::int_rounding_key::of_group(key, index));
      to += group_bytes(count);
      in = in.subspan(4 * count);
    }
    return static_cast<std::uint64_t>(to - out.data());
  }

  [[nodiscard]] result<void> decode(std::span<const std::byte> in, std::span<std::byte> out) const noexcept {
    const failure refused = chunk_refusal(*this, out.size());
    if (refused.code != errc::ok) return refused;
    if (const std::uint64_t whole = worst_case_bytes(out.size()); in.size() != whole)
      return damaged(0, whole, in.size());
    const std::byte* from = in.data();
    for (std::uint32_t index = 0; !out.empty(); ++index) {
      const std::size_t count = std::min<std::size_t>(out.size() / 4, Group);
      const failure why = decode_group(from, count, out.data(), index);
      if (why.code != errc::ok) return why;
      from += group_bytes(count);
      out = out.subspan(4 * count);
    }
    return {};
  }

  [[nodiscard]] std::uint64_t max_chunk_bytes() const noexcept { return max_chunk_bytes_; }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return 0; }

 private:
  static_assert(std::endian::native == std::endian::little, "the encoded form is written by copying numbers");
  static constexpr std::size_t scale_bytes = detail::int_scale::bytes(Scale);
  static constexpr std::uint32_t no_number = detail::int_scale::no_number;

  [[nodiscard]] static constexpr std::uint64_t group_bytes(std::uint64_t elements) noexcept {
    return scale_bytes + packed::bytes(elements);
  }
  [[nodiscard]] static failure damaged(std::uint32_t index, std::uint64_t wanted,
                                       std::uint64_t found) noexcept {
    return {.code = errc::damaged_encoding, .index = index, .wanted = wanted, .found = found, .where = name};
  }
  static void encode_group(const std::byte* in, std::size_t count, std::byte* out,
                           std::uint64_t key) noexcept {
    const std::uint32_t scale = detail::int_scale::of(Scale, detail::largest_size(in, count));
    const std::uint32_t stored = Scale == dtype::f32 ? scale : scale >> 16U;
    std::memcpy(out, &stored, scale_bytes);
    if (scale == 0 || scale == no_number) {
      std::memset(out + scale_bytes, 0, packed::bytes(count));
      return;
    }
    const double factor = rounding::factor(std::bit_cast<float>(scale));
    packed::write(in, count, out + scale_bytes, [factor, key](float x, std::uint32_t element) {
      const auto bits = std::bit_cast<std::uint32_t>(x);
      const std::int32_t steps = rounding::steps(std::bit_cast<float>(bits & 0x7FFF'FFFFU), factor);
      const std::int32_t size = rounding::rounded(steps, random_bits(element, key));
      return bits >> 31U != 0 ? -size : size;
    });
  }

  [[nodiscard]] static failure decode_group(const std::byte* in, std::size_t count, std::byte* out,
                                            std::uint32_t index) noexcept {
    std::uint32_t scale = 0;
    std::memcpy(&scale, in, scale_bytes);
    if constexpr (Scale == dtype::bf16) scale <<= 16U;
    if (scale >= detail::int_scale::infinity && scale != no_number) return damaged(index, no_number, scale);
    const std::byte* const codes = in + scale_bytes;
    if (scale == 0 || scale == no_number) {
      const auto wrong = std::count_if(codes, codes + packed::bytes(count),
                                       [](std::byte each) { return each != std::byte{0}; });
      if (wrong != 0) return damaged(index, 0, static_cast<std::uint64_t>(wrong));
      for (std::size_t i = 0; i < count; ++i)
        std::memcpy(out + 4 * i, &scale, 4);
      return {};
    }
    const double step = static_cast<double>(std::bit_cast<float>(scale)) / rounding::largest;
    const std::uint32_t wrong =
        packed::read(codes, count, out, [step](std::int32_t code) { return rounding::restored(code, step); });
    if (wrong != 0) return damaged(index, 0, wrong);
    return {};
  }

  std::uint64_t max_chunk_bytes_;
};

static_assert(positioned_codec<block_int<8>> && positioned_codec<block_int<4>> &&
              positioned_codec<block_int<2>>);

}  // namespace v0
}  // namespace llmmem
