/// @file
/// The codec that keeps the upper half of every float.
#pragma once

#include <llmmem/codec/concepts.hpp>
#include <llmmem/codec/errors.hpp>
#include <llmmem/model/bf16.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace llmmem {
inline namespace v0 {

/// Half the bytes: rounds floats to bfloat16, to nearest even, and widens them again exactly. For state that
/// tolerates it (activations that wait for the backward pass, weights of inference), never for an optimizer's
/// master weights.
///
/// Values that are bfloat16 already are restored bit for bit, so encoding decoded values again loses nothing
/// more. The error is at most 2^-8 of a value; below the smallest normal float, 2^-126, it is at most 2^-134,
/// half of bfloat16's smallest step there. A value that would round above the largest bfloat16, (2 - 2^-7) x
/// 2^127, becomes infinite.
///
/// The encoded form is only the bfloat16s, in memory order, without a header: exactly half a chunk's bytes.
///
/// @par Complexity   one vectorised pass; no scratch memory.
/// @par Thread safety   const calls only: any number of threads.
/// @par Errors   as of `codec`; encoded bytes of another length are damaged.
class bf16_cast {
 public:
  static constexpr const char* name = "bf16_cast";
  static constexpr std::uint64_t format_id = format_digest("bf16 cast of f32 1");
  static constexpr std::uint64_t element_bytes = 4;
  static constexpr bool is_lossless = false;
  static constexpr codec_error error_bound{.relative = 0x1p-8, .absolute = 0x1p-134, .largest = 0x1.FEp127};

  explicit bf16_cast(std::uint64_t max_chunk_bytes, const metadata_source& = {})
      : max_chunk_bytes_(checked_chunk_bytes(max_chunk_bytes, name)) {}

  [[nodiscard]] static constexpr std::uint64_t worst_case_bytes(std::uint64_t bytes) noexcept {
    return bytes / 2 + bytes % 2;
  }

  [[nodiscard]] result<std::uint64_t> encode(std::span<const std::byte> in,
                                             std::span<std::byte> out) const noexcept {
    const failure refused = encode_refusal(*this, in.size(), out.size());
    if (refused.code != errc::ok) return refused;
    convert<std::uint32_t, std::uint16_t>(in.data(), out.data(), in.size() / 4,
                                          [](std::uint32_t bits) { return bf16_from_f32_bits(bits); });
    return std::uint64_t{in.size() / 2};
  }

  [[nodiscard]] result<void> decode(std::span<const std::byte> in, std::span<std::byte> out) const noexcept {
    const failure refused = chunk_refusal(*this, out.size());
    if (refused.code != errc::ok) return refused;
    if (in.size() != out.size() / 2) {
      return failure{
          .code = errc::damaged_encoding, .wanted = out.size() / 2, .found = in.size(), .where = name};
    }
    convert<std::uint16_t, std::uint32_t>(in.data(), out.data(), out.size() / 4,
                                          [](std::uint16_t bits) { return f32_from_bf16_bits(bits); });
    return {};
  }

  [[nodiscard]] std::uint64_t max_chunk_bytes() const noexcept { return max_chunk_bytes_; }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return 0; }

 private:
  /// Converts in tiles of a fixed length, through local arrays, because compilers then vectorise it at any
  /// level of optimisation and any alignment.
  template <class From, class To, class Convert>
  static void convert(const std::byte* in, std::byte* out, std::size_t count, Convert one) noexcept {
    static constexpr std::size_t tile = 32;
    for (std::size_t tiles = count / tile; tiles != 0; --tiles) {
      // Uninitialised, because the loop fills each completely.
      std::array<From, tile> from;  // NOLINT(cppcoreguidelines-pro-type-member-init)
      std::array<To, tile> to;      // NOLINT(cppcoreguidelines-pro-type-member-init)
      std::memcpy(from.data(), in, sizeof(from));
      for (std::size_t k = 0; k < tile; ++k)
        to[k] = one(from[k]);
      std::memcpy(out, to.data(), sizeof(to));
      in += sizeof(from);
      out += sizeof(to);
    }
    for (std::size_t left = count % tile; left != 0; --left) {
      From from;
      std::memcpy(&from, in, sizeof(from));
      const To to = one(from);
      std::memcpy(out, &to, sizeof(to));
      in += sizeof(from);
      out += sizeof(to);
    }
  }

  std::uint64_t max_chunk_bytes_;
};

static_assert(codec<bf16_cast>);

}  // namespace v0
}  // namespace llmmem
