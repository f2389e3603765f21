/// @file
/// Writes a journal's frames to a sink, each with its checksum. Private to paging/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/paging/detail/journal_codec.hpp>
#include <llmmem/paging/detail/journal_encode.hpp>
#include <llmmem/paging/detail/journal_record.hpp>
#include <llmmem/paging/journal_types.hpp>

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Writes a header and then records of `format`, until the sink refuses bytes; then it only counts records.
template <journal_sink Sink>
class journal_writer {
 public:
  journal_writer(Sink&& sink, journal_format format) : sink_(std::move(sink)), format_(format) {}

  template <class Options>
  void header(const Options& options, std::string_view configuration) noexcept {
    checked_writer<Sink> magic(sink_, crc_);
    for (const char each : journal_magic)
      magic.put(static_cast<std::byte>(each));
    magic.flush();
    recording_ = magic.good();
    crc_ = magic.crc();
    if (recording_) {
      frame([&](auto& out) noexcept { encode_header(out, options, configuration); });
    }
  }

  /// @param owner  the owner of the journal's own handles.
  /// @param encode  called with the encoder of the record.
  template <class Encode>
  void record(std::uint32_t owner, Encode&& encode) noexcept {
    if (recording_) {
      frame([&](auto& out) noexcept {
        record_encoder one(out, owner, format_);
        encode(one);
      });
    }
    ++(recording_ ? records_ : unrecorded_);
  }

  [[nodiscard]] bool recording() const noexcept { return recording_; }
  [[nodiscard]] std::uint64_t records() const noexcept { return records_; }
  [[nodiscard]] std::uint64_t unrecorded() const noexcept { return unrecorded_; }
  [[nodiscard]] Sink& sink() noexcept { return sink_; }
  [[nodiscard]] const Sink& sink() const noexcept { return sink_; }

 private:
  /// Encodes twice: first for the length, then to write.
  template <class Encode>
  void frame(Encode&& encode) noexcept {
    byte_counter length;
    encode(length);
    checked_writer<Sink> out(sink_, crc_);
    put_varint(out, length.count());
    encode(out);
    out.flush();
    crc_ = out.crc();
    put_fixed32(out, crc_);
    out.flush();
    recording_ = out.good();
  }

  Sink sink_;
  journal_format format_;
  std::uint32_t crc_ = 0;
  bool recording_ = false;
  std::uint64_t records_ = 0;
  std::uint64_t unrecorded_ = 0;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
