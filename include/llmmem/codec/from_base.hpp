/// @file
/// A chunk as its difference to an earlier version of it: XOR, then any lossless codec.
#pragma once

#include <llmmem/codec/concepts.hpp>
#include <llmmem/codec/errors.hpp>
#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace llmmem {
inline namespace v0 {

/// Encodes the XOR of a chunk and its base, such as the same weights in the checkpoint before. A few steps
/// apart, signs, exponents and high bits of mantissas are mostly equal, and their planes shrink to little:
/// docs/codecs.md has figures, and how soon the gain ends.
///
///     from_base<byte_plane<dtype::bf16>> coder(bytes);
///     const auto length = coder.encode(weights, last_saved, form);
///     coder.decode(form.first(*length), last_saved, restored);
///
/// The form: the checksum (`crc32c`) of the base, 4 bytes, little-endian, and the codec's form. To decode it
/// takes the base: a chain of checkpoints begins with a complete one.
///
/// @tparam Codec  lossless.
///
/// Movable; a moved-from object takes chunks of 0 bytes alone.
///
/// @par Complexity   linear. Scratch memory: a chunk, and the codec's.
/// @par Thread safety   one call at a time.
/// @par Errors   as of `codec`; of a base shorter than the chunk `errc::too_short`, of a longer one
///               `errc::out_of_range`; `errc::base_differs` if `decode` gets another base than `encode` had.
template <codec Codec>
  requires(Codec::is_lossless)
class from_base {
 public:
  static constexpr const char* name = "from_base";
  static constexpr std::uint64_t format_id = format_digest("XOR with a base 1", Codec::format_id);

  explicit from_base(std::uint64_t max_chunk_bytes, const metadata_source& source = {})
      : codec_(max_chunk_bytes, source), changes_(max_chunk_bytes, source, "from_base: changes") {}

  [[nodiscard]] static constexpr std::uint64_t worst_case_bytes(std::uint64_t bytes) noexcept {
    return sum_bytes + Codec::worst_case_bytes(bytes);
  }

  /// @param base  as long as `in`
  [[nodiscard]] result<std::uint64_t> encode(std::span<const std::byte> in, std::span<const std::byte> base,
                                             std::span<std::byte> out) noexcept {
    if (const failure why = refusal(in.size(), base.size()); why.code != errc::ok) return why;
    if (out.size() < worst_case_bytes(in.size()))
      return failure{errc::too_short, 0, worst_case_bytes(in.size()), out.size(), name};
    for (std::size_t i = 0; i < in.size(); ++i)
      changes_[i] = in[i] ^ base[i];
    const std::uint32_t sum = crc32c(0, base);
    std::memcpy(out.data(), &sum, sizeof(sum));
    const auto form = codec_.encode({changes_.data(), in.size()}, out.subspan(sum_bytes));
    if (!form) return form;
    return sum_bytes + *form;
  }
  /// @param base  the same bytes that `encode` had; may be `out`, which a refusal leaves as it is
  [[nodiscard]] result<void> decode(std::span<const std::byte> in, std::span<const std::byte> base,
                                    std::span<std::byte> out) noexcept {
    if (const failure why = refusal(out.size(), base.size()); why.code != errc::ok) return why;
    if (in.size() < sum_bytes) return failure{errc::damaged_encoding, 0, sum_bytes, in.size(), name};
    std::uint32_t wanted = 0;
    std::memcpy(&wanted, in.data(), sizeof(wanted));
    if (const std::uint32_t found = crc32c(0, base); found != wanted)
      return failure{errc::base_differs, 0, wanted, found, name};
    const std::span<std::byte> changes(changes_.data(), out.size());
    if (const auto done = codec_.decode(in.subspan(sum_bytes), changes); !done) return done;
    for (std::size_t i = 0; i < out.size(); ++i)
      out[i] = base[i] ^ changes[i];
    return {};
  }

  [[nodiscard]] std::uint64_t max_chunk_bytes() const noexcept { return changes_.size(); }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept {
    return changes_.bytes() + codec_.metadata_bytes();
  }

 private:
  static constexpr std::uint64_t sum_bytes = 4;

  [[nodiscard]] failure refusal(std::uint64_t chunk, std::uint64_t base) const noexcept {
    if (const failure why = chunk_refusal(codec_, chunk); why.code != errc::ok) return why;
    if (chunk > changes_.size())
      return {.code = errc::out_of_range, .wanted = chunk, .found = changes_.size(), .where = name};
    if (base < chunk) return {.code = errc::too_short, .wanted = chunk, .found = base, .where = name};
    if (base > chunk) return {.code = errc::out_of_range, .wanted = base, .found = chunk, .where = name};
    return {};
  }

  Codec codec_;
  detail::fixed_array<std::byte> changes_;
};

}  // namespace v0
}  // namespace llmmem
