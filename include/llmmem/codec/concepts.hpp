/// @file
/// The concepts of a codec, which gives bytes their form in a slower tier, and of the compressor of a plane.
#pragma once

#include <llmmem/codec/errors.hpp>  // the errors of a codec of your own
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/result.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace llmmem {
inline namespace v0 {

/// The bound on the difference between a decoded value and the original:
///
///     |decoded - value| <= max(relative * |value|, absolute, group * |the largest of its group|)
///                                                               for |value| <= largest
///
/// Larger values may become infinite. A lossless codec has the default.
struct codec_error {
  double relative = 0;  ///< of the value
  double absolute = 0;  ///< applies near zero
  double largest = std::numeric_limits<double>::infinity();
  double group = 0;  ///< of the largest size among the values that share a scale

  friend constexpr bool operator==(const codec_error&, const codec_error&) noexcept = default;
};

/// Converts chunks of bytes to an encoded form, and back.
///
/// Every codec describes itself by `static constexpr` members:
///
/// | member | |
/// |---|---|
/// | `name` | `const char*`, for error texts: the `where` of its failures |
/// | `format_id` | 64 bits of the encoded form: equal if one codec may decode what the other encoded |
/// | `element_bytes` | a chunk is a multiple of it |
/// | `is_lossless` | whether the decoded bytes equal the encoded ones, bit for bit |
/// | `error_bound` | a `codec_error`; the default for a lossless codec |
/// | `worst_case_bytes(n)` | what a tier reserves: no chunk of `n <= max_bytes` is longer. Grows with `n` |
///
/// The functions do not allocate, and accept chunks of at most `max_chunk_bytes()`:
///
/// `encode(in, out)` writes to the beginning of `out`, which has at least `worst_case_bytes(in.size())`, and
/// returns how many bytes it wrote.
///
/// `decode(in, out)` takes exactly the bytes that `encode` wrote, and an `out` of the chunk's own size. `in`
/// is untrusted input: `decode` refuses bytes that encode no chunk, and accesses nothing outside the two
/// spans. After a refusal the contents of `out` are undefined. A codec is no checksum: it detects damage only
/// if it cannot continue. Bytes that leave memory need a checksum in addition (`crc32c`), over the encoded
/// bytes.
///
/// `in` and `out` do not overlap. Neither needs alignment.
///
/// @par Errors   `bad_granularity` for a chunk that is not a multiple of `element_bytes`, `out_of_range`
///      above `max_chunk_bytes()`, `too_short` for an `out` of less than the worst case, `layout_mismatch`
///      for the encoded form of another codec, `damaged_encoding` for bytes that are not an encoded form.
/// @par Constructor   `C(std::uint64_t max_chunk_bytes, const metadata_source&)` allocates all scratch
///      memory; `metadata_bytes()` returns its size. Throws `length_error` for 0 or above
///      `llmmem::max_bytes`, `out_of_memory` if the source has no memory.
/// @par Thread safety   one call at a time on an object, because of its scratch memory. Use one object for
///      each thread that moves data; each object decodes the output of every other.
template <class C>
concept codec = std::constructible_from<C, std::uint64_t, const metadata_source&> && std::movable<C> &&
                requires(C object, const C& read, std::span<const std::byte> in, std::span<std::byte> out,
                         std::uint64_t bytes) {
                  { object.encode(in, out) } noexcept -> std::same_as<result<std::uint64_t>>;
                  { object.decode(in, out) } noexcept -> std::same_as<result<void>>;
                  { C::worst_case_bytes(bytes) } noexcept -> std::same_as<std::uint64_t>;
                  { read.max_chunk_bytes() } noexcept -> std::same_as<std::uint64_t>;
                  { read.metadata_bytes() } noexcept -> std::same_as<std::size_t>;
                  { C::name } -> std::convertible_to<const char*>;
                  { C::format_id } -> std::convertible_to<std::uint64_t>;
                  { C::element_bytes } -> std::convertible_to<std::uint64_t>;
                  { C::is_lossless } -> std::convertible_to<bool>;
                  { C::error_bound } -> std::convertible_to<codec_error>;
                  requires C::element_bytes > 0;
                  requires !C::is_lossless || C::error_bound == codec_error{};
                };

/// What is encoded, for codecs that round by a counter: equal positions get equal random bits, all others
/// unrelated ones.
struct encode_position {
  std::uint64_t chunk = 0;    ///< a number of the chunk
  std::uint64_t version = 0;  ///< of its contents: a step, or a count of changes
  std::uint64_t group = 0;    ///< the codec's group, counted in the chunk, that the bytes begin with
};

/// A codec whose form also depends on what is encoded: `encode(in, out, position)`. So repeated attempts,
/// other threads and parts of whole groups make the same bits. A tier passes the number of the chunk's slot
/// and the count of its last change (`tiered_buffer::last_change`), which depend on the calls of the buffer
/// and not on when bytes move. `encode(in, out)` means the position of zeros.
template <class C>
concept positioned_codec = codec<C> && requires(C object, std::span<const std::byte> in,
                                                std::span<std::byte> out, const encode_position& at) {
  { object.encode(in, out, at) } noexcept -> std::same_as<result<std::uint64_t>>;
};

/// Encodes a chunk at its position, which a codec that is no `positioned_codec` ignores. Errors are the
/// codec's.
template <codec C>
[[nodiscard]] result<std::uint64_t> encode_at(C& object, std::span<const std::byte> in,
                                              std::span<std::byte> out,
                                              [[maybe_unused]] const encode_position& at) noexcept {
  if constexpr (positioned_codec<C>) {
    return object.encode(in, out, at);
  } else {
    return object.encode(in, out);
  }
}

/// Compresses one plane of `byte_plane`: fewer than 2^32 bytes, of which some values occur far more often
/// than others.
///
/// `compress` writes to the beginning of `out`, which is shorter than `in`, and returns the number of bytes;
/// nothing if they do not fit. `decompress` returns whether `in`, which is untrusted, was a plane of exactly
/// `out.size()` bytes; it accesses nothing outside the spans. Neither allocates.
///
/// @par Constructor   `P(std::uint64_t max_plane_bytes, const metadata_source&)`; throws `out_of_memory`.
template <class P>
concept plane_compressor =
    std::constructible_from<P, std::uint64_t, const metadata_source&> && std::movable<P> &&
    requires(P object, const P& read, std::span<const std::byte> in, std::span<std::byte> out) {
      { object.compress(in, out) } noexcept -> std::same_as<std::optional<std::uint64_t>>;
      { object.decompress(in, out) } noexcept -> std::same_as<bool>;
      { read.metadata_bytes() } noexcept -> std::same_as<std::size_t>;
      { P::format_id } -> std::convertible_to<std::uint64_t>;
    };

// For authors of codecs.

/// Returns 64 bits of a format's description, for its `format_id` (FNV-1a; Fowler, Noll and Vo).
[[nodiscard]] constexpr std::uint64_t format_digest(
    std::string_view description, std::uint64_t behind = 0xCBF2'9CE4'8422'2325ULL) noexcept {
  for (const char c : description)
    behind = (behind ^ static_cast<unsigned char>(c)) * 0x100'0000'01B3ULL;
  return behind;
}

/// Returns `bytes` as a codec's `max_chunk_bytes`, or throws the `length_error` that the concept requires.
/// @param codec  the codec's name.
[[nodiscard]] inline std::uint64_t checked_chunk_bytes(std::uint64_t bytes, const char* codec) {
  if (bytes == 0) throw length_error(std::string(codec) + ": max_chunk_bytes is 0; it must be at least 1");
  if (bytes > max_bytes) {
    throw length_error(std::string(codec) + ": max_chunk_bytes " + std::to_string(bytes) +
                       " exceeds 2^63 - 1 bytes");
  }
  return bytes;
}

/// Returns why `object` cannot take a chunk of `bytes`; `errc::ok` if it can.
template <class Codec>
[[nodiscard]] constexpr failure chunk_refusal(const Codec& object, std::uint64_t bytes) noexcept {
  if (bytes % Codec::element_bytes != 0) {
    return {
        .code = errc::bad_granularity, .wanted = bytes, .found = Codec::element_bytes, .where = Codec::name};
  }
  const std::uint64_t most = object.max_chunk_bytes();
  if (bytes > most) return {.code = errc::out_of_range, .wanted = bytes, .found = most, .where = Codec::name};
  return {};
}

/// Returns why `object` cannot encode a chunk of `bytes` into `output_bytes`; `errc::ok` if it can.
template <class Codec>
[[nodiscard]] constexpr failure encode_refusal(const Codec& object, std::uint64_t bytes,
                                               std::uint64_t output_bytes) noexcept {
  const failure refused = chunk_refusal(object, bytes);
  if (refused.code != errc::ok) return refused;
  const std::uint64_t most = Codec::worst_case_bytes(bytes);
  if (output_bytes < most)
    return {.code = errc::too_short, .wanted = most, .found = output_bytes, .where = Codec::name};
  return {};
}

}  // namespace v0
}  // namespace llmmem
