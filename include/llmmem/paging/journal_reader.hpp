/// @file
/// Reads a journal up to the first damage.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/paging/detail/journal_codec.hpp>
#include <llmmem/paging/detail/journal_decode.hpp>
#include <llmmem/paging/detail/journal_record.hpp>
#include <llmmem/paging/journal_types.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>

namespace llmmem {
inline namespace v0 {

/// Where a journal ended, and why.
struct journal_end {
  std::uint64_t records = 0;  ///< complete records before the end
  std::uint64_t offset = 0;   ///< of the byte after the last of them
  std::string reason;         ///< empty: no bytes follow; otherwise what is wrong with them
};

namespace paging {

/// Reads a journal record by record, and stops at the first damaged byte.
///
/// A bad tail is the normal result of a crash, not an error; `end()` describes it. The reader detects every
/// damage of up to 32 consecutive bits, and all other damage except one case in 2^32.
///
/// @par Errors   the constructor throws `journal_error` for bytes whose header cannot be read, and for the
///   journal of the other allocator; `next` throws only `std::bad_alloc`. No input causes undefined
///   behaviour, and memory use stays a small multiple of the input's length.
///
/// @tparam Header  `journal_header`, or `hybrid_journal_header`: that of a `hybrid_allocator`'s journal.
template <class Header>
class basic_journal_reader {
 public:
  static constexpr detail::journal_format format = std::is_same_v<Header, hybrid_journal_header>
                                                       ? detail::journal_format::hybrid
                                                       : detail::journal_format::paged;

  explicit basic_journal_reader(std::span<const std::byte> bytes) : bytes_(bytes) {
    const auto magic = bytes.first(
        bytes.size() < detail::journal_magic.size() ? bytes.size() : detail::journal_magic.size());
    for (std::size_t i = 0; i < detail::journal_magic.size(); ++i) {
      if (i == magic.size())
        throw journal_error("journal: offset " + std::to_string(i) +
                            ": the bytes end here; a journal begins with 8 bytes and a header");
      if (magic[i] != static_cast<std::byte>(detail::journal_magic[i]))
        throw journal_error("journal: offset " + std::to_string(i) + ": these bytes are not a journal");
    }
    crc_ = crc32c(0, magic);
    end_.offset = magic.size();
    detail::byte_cursor in = frame();
    if (in.ok()) detail::decode_header(in, header_);
    if (!in.ok()) {
      throw journal_error("journal: offset " + std::to_string(in.offset()) +
                          " of the header: " + (in.why() == nullptr ? "" : in.why()));
    }
    accept();
  }

  [[nodiscard]] const Header& header() const noexcept { return header_; }

  /// Reads the next record; returns false at the end.
  bool next() {
    if (!end_.reason.empty() || end_.offset == bytes_.size()) return false;
    detail::byte_cursor in = frame();
    if (in.ok()) detail::record_decoder(in, record_, format).record();
    if (!in.ok()) {
      end_.reason = "record " + std::to_string(end_.records + 1) + ", offset " + std::to_string(in.offset()) +
                    ": " + in.why();
      return false;
    }
    accept();
    ++end_.records;
    return true;
  }

  /// The record that `next` read; its spans are valid until the next call.
  [[nodiscard]] detail::owned_record& record() noexcept { return record_; }
  [[nodiscard]] const journal_end& end() const noexcept { return end_; }

 private:
  /// Verifies the checksum of the current frame. Returns a cursor over its payload, or one with the reason
  /// for the refusal.
  [[nodiscard]] detail::byte_cursor frame() noexcept {
    const auto rest = bytes_.subspan(static_cast<std::size_t>(end_.offset));
    detail::byte_cursor in(rest, end_.offset);
    const std::uint64_t length = in.varint();
    if (!in.ok()) return in;
    const std::size_t begin = rest.size() - in.left();
    if (in.left() < 4 || length > in.left() - 4) {
      in.refuse("it is truncated");
      return in;
    }
    const std::size_t covered = begin + static_cast<std::size_t>(length);
    next_crc_ = crc32c(crc_, rest.first(covered));
    detail::byte_cursor stored(rest.subspan(covered), end_.offset + covered);
    if (stored.fixed32() != next_crc_) {
      stored.refuse("its checksum is wrong");
      return stored;
    }
    next_offset_ = end_.offset + covered + 4;
    return detail::byte_cursor(rest.subspan(begin, static_cast<std::size_t>(length)), end_.offset + begin);
  }

  void accept() noexcept {
    crc_ = next_crc_;
    end_.offset = next_offset_;
  }

  std::span<const std::byte> bytes_;
  Header header_;
  detail::owned_record record_;
  journal_end end_;
  std::uint32_t crc_ = 0;
  std::uint32_t next_crc_ = 0;
  std::uint64_t next_offset_ = 0;
};

/// Reads the journal of a `hybrid_allocator`.
using hybrid_journal_reader = basic_journal_reader<hybrid_journal_header>;

}  // namespace paging

/// Reads the journal of a `paged_allocator`.
using journal_reader = paging::basic_journal_reader<journal_header>;

}  // namespace v0
}  // namespace llmmem
