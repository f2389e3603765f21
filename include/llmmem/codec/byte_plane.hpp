/// @file
/// The lossless codec for floating point state: separates exponents from mantissas, and compresses them.
#pragma once

#include <llmmem/codec/concepts.hpp>
#include <llmmem/codec/detail/planes.hpp>
#include <llmmem/codec/errors.hpp>
#include <llmmem/codec/huffman_plane.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/model/dtype.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// Splits floats into planes of their bytes, with the exponents in one plane, and compresses the planes that
/// shrink.
///
/// The exponents of trained weights take few values: some 2.6 of their eight bits hold all information, while
/// mantissas and signs are noise. So bf16 shrinks to about two thirds, fp32 to five sixths; docs/codecs.md
/// has figures, and shows up to which link speed it pays. Unsuited to integers, quantised weights (int8, fp8,
/// int4) and text: use a general compressor for these.
///
/// The encoded form, in little-endian order: 8 bytes that spell `llmmemBP`, `format_id`, the chunk's number
/// of bytes, 8 bytes each; then blocks, each of 2^18 bytes of the chunk, the last one shorter. A block has a
/// plane for each byte of an element, rotated left by one bit so that the eight bits of an exponent are the
/// highest byte; the lowest byte's plane comes first. Each plane is 4 bytes with its stored length, then its
/// contents: unchanged if that length is the plane's own, otherwise compressed.
///
/// A sample of 4096 bytes of a plane decides whether to compress it, so noise costs only a copy. Patterns
/// without a preferred byte value (counters, for example) count as noise.
///
/// @tparam Element     `dtype::bf16`, `dtype::f16` (five exponent bits share a plane with three bits of the
///                     mantissa) or `dtype::f32`.
/// @tparam Compressor  see `plane_compressor`.
///
/// @par Complexity   linear. Scratch memory: a block, 256 KiB or the largest chunk, and the compressor's.
/// @par Thread safety   one call at a time.
/// @par Errors   as of `codec`; the `index` of a `damaged_encoding` is the block.
/// @par Source   separate exponents, entropy coded: Hershcovitch et al., "ZipNN: Lossless Compression for AI
///      Models", 2024 (arXiv 2411.05239).
template <dtype Element, plane_compressor Compressor = huffman_plane>
  requires(Element == dtype::bf16 || Element == dtype::f16 || Element == dtype::f32)
class byte_plane {
 public:
  static constexpr const char* name = "byte_plane";
  static constexpr std::uint64_t format_id =
      format_digest(name_of(Element), format_digest("byte planes 1 of ", Compressor::format_id));
  static constexpr std::uint64_t element_bytes = bits_of(Element) / 8;
  static constexpr bool is_lossless = true;
  static constexpr codec_error error_bound{};

  explicit byte_plane(std::uint64_t max_chunk_bytes, const metadata_source& source = {})
      : max_chunk_bytes_(checked_chunk_bytes(max_chunk_bytes, name)),
        scratch_(std::min(max_chunk_bytes, block_bytes), source, "byte_plane: scratch"),
        compressor_(scratch_.size() / element_bytes, source) {}

  /// Returns the bytes for a chunk in which no plane shrinks, so that every plane is stored unchanged.
  [[nodiscard]] static constexpr std::uint64_t worst_case_bytes(std::uint64_t bytes) noexcept {
    const std::uint64_t blocks = bytes / block_bytes + (bytes % block_bytes != 0 ? 1 : 0);
    return header_bytes + bytes + blocks * planes * length_bytes;
  }

  [[nodiscard]] result<std::uint64_t> encode(std::span<const std::byte> in,
                                             std::span<std::byte> out) noexcept {
    const failure refused = encode_refusal(*this, in.size(), out.size());
    if (refused.code != errc::ok) return refused;
    writer to{out.data()};
    to.number(magic);
    to.number(format_id);
    to.number(std::uint64_t{in.size()});
    while (!in.empty()) {
      const auto block = in.first(std::min<std::size_t>(in.size(), block_bytes));
      encode_block(block, to);
      in = in.subspan(block.size());
    }
    return static_cast<std::uint64_t>(to.at - out.data());
  }

  [[nodiscard]] result<void> decode(std::span<const std::byte> in, std::span<std::byte> out) noexcept {
    const failure refused = chunk_refusal(*this, out.size());
    if (refused.code != errc::ok) return refused;
    if (in.size() < header_bytes) return damaged(0, header_bytes, in.size());
    if (number<std::uint64_t>(in) != magic) return damaged(0, magic, number<std::uint64_t>(in));
    const auto format = number<std::uint64_t>(in.subspan(8));
    if (format != format_id) {
      return failure{.code = errc::layout_mismatch, .wanted = format, .found = format_id, .where = name};
    }
    const auto bytes = number<std::uint64_t>(in.subspan(16));
    if (bytes != out.size()) return damaged(0, out.size(), bytes);
    in = in.subspan(header_bytes);
    std::uint32_t index = 0;
    for (; !out.empty(); ++index) {
      const auto block = out.first(std::min<std::size_t>(out.size(), block_bytes));
      const failure why = decode_block(in, block, index);
      if (why.code != errc::ok) return why;
      out = out.subspan(block.size());
    }
    if (!in.empty()) return damaged(index, 0, in.size());
    return {};
  }

  [[nodiscard]] std::uint64_t max_chunk_bytes() const noexcept { return max_chunk_bytes_; }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept {
    return scratch_.bytes() + compressor_.metadata_bytes();
  }

 private:
  static_assert(std::endian::native == std::endian::little, "the encoded form is written by copying numbers");
  static constexpr std::uint64_t magic = 0x5042'6D65'6D6D'6C6CULL;  // "llmmemBP"
  static constexpr std::uint64_t header_bytes = 24;
  static constexpr std::uint64_t length_bytes = 4;
  static constexpr std::uint64_t block_bytes = std::uint64_t{1} << 18;
  static constexpr std::size_t planes = element_bytes;

  struct writer {
    std::byte* at;

    template <class Number>
    void number(Number value) noexcept {
      std::memcpy(at, &value, sizeof(value));
      at += sizeof(value);
    }
  };

  /// @pre `in` has at least the bytes of a `Number`.
  template <class Number>
  [[nodiscard]] static Number number(std::span<const std::byte> in) noexcept {
    Number value;
    std::memcpy(&value, in.data(), sizeof(value));
    return value;
  }

  [[nodiscard]] static failure damaged(std::uint32_t block, std::uint64_t wanted,
                                       std::uint64_t found) noexcept {
    return {.code = errc::damaged_encoding, .index = block, .wanted = wanted, .found = found, .where = name};
  }

  [[nodiscard]] std::span<std::byte> scratch(std::size_t plane, std::size_t bytes) noexcept {
    return {scratch_.data() + plane * bytes, bytes};
  }

  void encode_block(std::span<const std::byte> block, writer& to) noexcept {
    const std::size_t count = block.size() / element_bytes;
    detail::plane_pointers<planes> split;
    for (std::size_t plane = 0; plane < planes; ++plane)
      split[plane] = scratch(plane, count).data();
    detail::split_planes<planes>(block.data(), count, split);
    for (std::size_t plane = 0; plane < planes; ++plane) {
      const std::span<const std::byte> bytes = scratch(plane, count);
      std::byte* const body = to.at + length_bytes;
      std::optional<std::uint64_t> length;
      if (detail::has_uneven_bytes(bytes)) length = compressor_.compress(bytes, {body, count - 1});
      if (!length) std::memcpy(body, bytes.data(), count);
      to.number(static_cast<std::uint32_t>(length.value_or(count)));
      to.at = body + length.value_or(count);
    }
  }

  /// Reads and removes the block's bytes from `in`.
  [[nodiscard]] failure decode_block(std::span<const std::byte>& in, std::span<std::byte> block,
                                     std::uint32_t index) noexcept {
    const std::size_t count = block.size() / element_bytes;
    detail::const_plane_pointers<planes> split;
    for (std::size_t plane = 0; plane < planes; ++plane) {
      if (in.size() < length_bytes) return damaged(index, length_bytes, in.size());
      const std::size_t length = number<std::uint32_t>(in);
      in = in.subspan(length_bytes);
      if (length > count) return damaged(index, count, length);
      if (length > in.size()) return damaged(index, length, in.size());
      split[plane] = in.data();
      if (length != count) {
        const auto room = scratch(plane, count);
        if (!compressor_.decompress(in.first(length), room)) return damaged(index, count, length);
        split[plane] = room.data();
      }
      in = in.subspan(length);
    }
    detail::merge_planes<planes>(split, count, block.data());
    return {};
  }

  std::uint64_t max_chunk_bytes_;
  detail::fixed_array<std::byte> scratch_;
  Compressor compressor_;
};

static_assert(codec<byte_plane<dtype::bf16>>);
static_assert(codec<byte_plane<dtype::f16>>);
static_assert(codec<byte_plane<dtype::f32>>);

}  // namespace v0
}  // namespace llmmem
