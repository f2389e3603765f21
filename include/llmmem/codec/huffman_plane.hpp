/// @file
/// The compressor of byte planes that needs no library: Huffman codes, with several bytes per table lookup.
#pragma once

#include <llmmem/codec/concepts.hpp>
#include <llmmem/codec/detail/huffman.hpp>
#include <llmmem/detail/fixed_array.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>

namespace llmmem {
inline namespace v0 {

/// Encodes each byte value by a prefix code; the lengths are optimal among codes of at most 11 bits. It uses
/// only the frequency of each value, not their order, which suits exponents, because they hardly repeat in
/// sequences. A byte takes at least one bit, unless all bytes are the same.
///
/// The compressed form: if all bytes of the plane are equal, that byte. Otherwise the lowest and the highest
/// value that occur, a byte each; the code lengths of all values from the one to the other, four bits each,
/// the first in the lower bits; the lengths in bytes of the first three of four streams, four bytes each,
/// little-endian; the streams, each with a quarter of the plane (rounded up, while bytes remain), first bits
/// lowest.
///
/// @par Complexity   linear; the plane is read twice. Memory: tables of 32 KiB.
/// @par Thread safety   one call at a time.
/// @par Errors   the constructor throws `out_of_memory`; nothing else fails.
class huffman_plane {
 public:
  static constexpr std::uint64_t format_id = format_digest("canonical codes of 11 bits, 4 streams, 1");

  explicit huffman_plane(std::uint64_t /*max_plane_bytes*/, const metadata_source& source = {})
      : tables_(2 * detail::decoding_entries, source, "huffman_plane: tables") {}

  /// @pre `in` has fewer than 2^32 bytes.
  [[nodiscard]] std::optional<std::uint64_t> compress(std::span<const std::byte> in,
                                                      std::span<std::byte> out) noexcept {
    if (in.empty() || out.empty()) return std::nullopt;
    const detail::byte_counts counts = detail::count_bytes(in);
    if (counts[static_cast<std::size_t>(in[0])] == in.size()) {
      out[0] = in[0];
      return 1;
    }
    const detail::code_lengths lengths = detail::best_lengths(counts);
    const auto codes = detail::canonical_codes(lengths);
    std::size_t first = 0;
    std::size_t last = 255;
    while (lengths[first] == 0)
      ++first;
    while (lengths[last] == 0)
      --last;
    std::uint64_t bits = 0;
    for (std::size_t value = first; value <= last; ++value)
      bits += std::uint64_t{counts[value]} * lengths[value];
    const std::size_t head = 2 + (last - first) / 2 + 1 + sizeof(stream_bytes);
    // Each stream ends with less than a byte of padding, and the last is written eight bytes at a time.
    if (head + bits / 8 + streams + sizeof(std::uint64_t) > out.size()) return std::nullopt;

    out[0] = static_cast<std::byte>(first);
    out[1] = static_cast<std::byte>(last);
    std::byte* at = out.data() + 2;
    for (std::size_t value = first; value <= last; value += 2)
      *at++ = static_cast<std::byte>(lengths[value] | (value < last ? lengths[value + 1] << 4 : 0));
    std::byte* const sizes_at = at;
    at += sizeof(stream_bytes);
    stream_bytes sizes{};
    for (std::size_t stream = 0; stream < streams; ++stream) {
      std::byte* const end = write(quarter(in, stream), *codes, at);
      if (stream < sizes.size()) sizes[stream] = static_cast<std::uint32_t>(end - at);
      at = end;
    }
    std::memcpy(sizes_at, sizes.data(), sizeof(sizes));
    return static_cast<std::uint64_t>(at - out.data());
  }

  [[nodiscard]] bool decompress(std::span<const std::byte> in, std::span<std::byte> out) noexcept {
    if (in.size() == 1) {
      std::ranges::fill(out, in[0]);
      return true;
    }
    const auto codes = read_codes(in);
    if (!codes || in.size() < sizeof(stream_bytes)) return false;
    stream_bytes sizes;
    std::memcpy(sizes.data(), in.data(), sizeof(sizes));
    in = in.subspan(sizeof(sizes));
    std::array<reader, streams> readers;
    for (std::size_t stream = 0; stream < streams; ++stream) {
      const std::size_t bytes = stream < sizes.size() ? sizes[stream] : in.size();
      if (bytes > in.size()) return false;
      readers[stream] = reader(in.first(bytes), quarter(out, stream));
      in = in.subspan(bytes);
    }
    const std::span<detail::decoded_bytes> table(tables_.data(), detail::decoding_entries);
    const std::span<detail::decoded_bytes> singles(table.data() + table.size(), detail::decoding_entries);
    detail::fill_decoding_table(*codes, table, singles);
    auto [a, b, c, d] = readers;  // in registers, so that the four table lookups are in flight together
    while (const std::size_t rounds = std::min({a.rounds(), b.rounds(), c.rounds(), d.rounds()})) {
      for (std::size_t round = 0; round < rounds; ++round) {
        a.refill();
        b.refill();
        c.refill();
        d.refill();
        for (int look = 0; look < looks; ++look) {
          a.look(table.data());
          b.look(table.data());
          c.look(table.data());
          d.look(table.data());
        }
      }
    }
    bool whole = true;
    for (reader* const each : {&a, &b, &c, &d})
      whole = each->finish(table.data(), singles.data()) && whole;
    return whole;
  }

  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return tables_.bytes(); }

 private:
  static_assert(std::endian::native == std::endian::little, "streams are written by copying numbers");
  static constexpr std::size_t streams = 4;
  using stream_bytes = std::array<std::uint32_t, streams - 1>;

  /// The table lookups, of `longest_code` bits each, for which one refill suffices: of its 64 bits, one is
  /// the reader's mark, and up to seven are already used.
  static constexpr int looks = (64 - 1 - 7) / int{detail::longest_code};

  template <class Byte>
  [[nodiscard]] static std::span<Byte> quarter(std::span<Byte> plane, std::size_t which) noexcept {
    const std::size_t size = plane.size() / streams + (plane.size() % streams != 0 ? 1 : 0);
    const std::size_t first = std::min(plane.size(), which * size);
    return plane.subspan(first, std::min(size, plane.size() - first));
  }

  /// Writes a stream, and up to seven bytes after it; returns its end.
  [[nodiscard]] static std::byte* write(std::span<const std::byte> plane,
                                        const std::array<detail::prefix_code, 256>& codes,
                                        std::byte* at) noexcept {
    std::uint64_t pending = 0;
    std::uint32_t length = 0;
    const auto add = [&](std::byte value) {
      const detail::prefix_code code = codes[static_cast<std::size_t>(value)];
      pending |= std::uint64_t{code.bits} << length;
      length += code.length;
    };
    const auto flush = [&] {
      std::memcpy(at, &pending, sizeof(pending));
      at += length / 8;
      pending >>= length / 8 * 8;
      length %= 8;
    };
    std::size_t i = 0;
    for (; plane.size() - i >= looks; i += looks) {
      for (std::size_t k = 0; k < looks; ++k)
        add(plane[i + k]);
      flush();
    }
    for (; i < plane.size(); ++i)
      add(plane[i]);
    flush();
    if (length != 0) *at++ = static_cast<std::byte>(pending & 0xFFU);
    return at;
  }

  /// Reads and removes the code lengths from `in`; returns nothing if they do not form a code.
  [[nodiscard]] static std::optional<std::array<detail::prefix_code, 256>> read_codes(
      std::span<const std::byte>& in) noexcept {
    if (in.size() < 2) return std::nullopt;
    const auto first = static_cast<std::size_t>(in[0]);
    const auto last = static_cast<std::size_t>(in[1]);
    if (last < first || in.size() < 2 + (last - first) / 2 + 1) return std::nullopt;
    detail::code_lengths lengths{};
    for (std::size_t value = first; value <= last; ++value) {
      const auto pair = static_cast<std::uint32_t>(in[2 + (value - first) / 2]);
      lengths[value] = static_cast<std::uint8_t>((value - first) % 2 == 0 ? pair & 0xFU : pair >> 4);
    }
    in = in.subspan(2 + (last - first) / 2 + 1);
    return detail::canonical_codes(lengths);
  }

  /// One of the four streams, partly read.
  class reader {
   public:
    reader() noexcept = default;
    reader(std::span<const std::byte> in, std::span<std::byte> out) noexcept
        : in_(in.data()),
          in_end_(in.data() + in.size()),
          out_(out.data()),
          out_end_(out.data() + out.size()) {}

    /// Returns a number of times for which a complete refill can be read and all its bytes be written, four
    /// at a time.
    [[nodiscard]] std::size_t rounds() const noexcept {
      const auto in_left = static_cast<std::size_t>(in_end_ - in_);
      const auto out_left = static_cast<std::size_t>(out_end_ - out_);
      const std::size_t loads = in_left / sizeof(bits_);  // each advances by at most seven bytes
      return std::min(loads - (loads != 0 ? 1 : 0), out_left / (4 * std::size_t{looks}));
    }

    /// @pre within the `rounds()`.
    void refill() noexcept {
      const auto gone = static_cast<std::uint32_t>(std::countl_zero(bits_));
      in_ += gone / 8;
      std::memcpy(&bits_, in_, sizeof(bits_));
      bits_ = (bits_ | mark) >> gone % 8;
    }

    /// @pre fewer than `looks` calls since the last refill.
    void look(const detail::decoded_bytes* table) noexcept {
      const detail::decoded_bytes& found = table[bits_ % detail::decoding_entries];
      std::memcpy(out_, &found.bytes, sizeof(found.bytes));
      out_ += found.count;
      bits_ >>= found.length;
    }

    /// Reads the rest, finally one byte per lookup; returns whether the stream ended with the plane.
    [[nodiscard]] bool finish(const detail::decoded_bytes* table,
                              const detail::decoded_bytes* singles) noexcept {
      while (rounds() != 0) {
        refill();
        for (int i = 0; i < looks; ++i)
          look(table);
      }
      const auto in_left = static_cast<std::size_t>(in_end_ - in_);
      auto position = static_cast<std::size_t>(std::countl_zero(bits_));
      for (; out_ != out_end_; ++out_) {
        if (position / 8 >= in_left) return false;
        std::uint64_t bits = 0;
        std::memcpy(&bits, in_ + position / 8, std::min(sizeof(bits), in_left - position / 8));
        const detail::decoded_bytes& found = singles[(bits >> position % 8) % detail::decoding_entries];
        *out_ = static_cast<std::byte>(found.bytes);
        position += found.length;
      }
      return position <= 8 * in_left && position + 8 > 8 * in_left;
    }

   private:
    static constexpr std::uint64_t mark = std::uint64_t{1} << 63;

    const std::byte* in_ = nullptr;
    const std::byte* in_end_ = nullptr;
    std::uint64_t bits_ =
        mark;  // loaded from `in_` and unused, below a mark whose place counts the used bits
    std::byte* out_ = nullptr;
    std::byte* out_end_ = nullptr;
  };

  detail::fixed_array<detail::decoded_bytes> tables_;  // with several bytes per lookup, then with one
};

static_assert(plane_compressor<huffman_plane>);

}  // namespace v0
}  // namespace llmmem
