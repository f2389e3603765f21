/// @file
/// A byte source that unpacks another one, whose format it recognises by the first bytes.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/text.hpp"
#include "replay_trace/byte_source.hpp"
#include "replay_trace/trace.hpp"
#include "replay_trace/unpackers.hpp"

namespace replay_trace {

/// A packing of a file, with its first bytes.
struct packing {
  std::string_view name;
  std::string_view magic;
  std::string_view unpack_command;
};

inline constexpr std::string_view gzip_name = "gzip";
inline constexpr std::string_view zstd_name = "zstd";

/// The packing that `head`, the first bytes of a file, belongs to; null for none. zstd's skippable frames,
/// which some tools put first, count as zstd.
[[nodiscard]] inline const packing* find_packing(std::string_view head) noexcept {
  using namespace std::string_view_literals;
  static constexpr std::array all{
      packing{gzip_name, "\x1f\x8b"sv, "gzip -d"},    packing{zstd_name, "\x28\xb5\x2f\xfd"sv, "zstd -d"},
      packing{"xz", "\xfd\x37zXZ\0"sv, "xz -d"},      packing{"bzip2", "BZh"sv, "bzip2 -d"},
      packing{"lz4", "\x04\x22\x4d\x18"sv, "lz4 -d"}, packing{"zip", "PK\x03\x04"sv, "unzip"}};
  for (const packing& each : all) {
    if (head.starts_with(each.magic)) return &each;
  }
  const bool skippable = head.size() >= 4 && (static_cast<unsigned char>(head[0]) & 0xf0U) == 0x50 &&
                         head.substr(1, 3) == "\x2a\x4d\x18"sv;
  return skippable ? &all[1] : nullptr;
}

/// The error for a packing whose library the build did not find.
[[nodiscard]] inline trace_error lacks_library(const std::string& shown_name, const packing& kind,
                                               std::string_view library, std::string_view package) {
  const auto text = [](std::string_view part) { return std::string(part); };
  return trace_error(shown_name + ": is " + text(kind.name) + " data, and this program was built without " +
                     text(library) + ": install it (Debian: " + text(package) +
                     ") and configure the build again, or unpack the file with `" +
                     text(kind.unpack_command) + "`");
}

/// Returns the bytes of `Source`: unpacked if they are gzip or zstd data, otherwise unchanged.
///
/// @par Memory   64 KiB, and the unpacker's own.
/// @par Errors   `trace_error` with the source's name: for an unsupported packing, or one whose library is
///               missing; damaged data, with the byte; truncated data; more than `max_unpacked_bytes`
///               unpacked. The source's exceptions pass through.
template <byte_source Source>
class unpacking_source {
 public:
  /// @param source  must outlive this object.
  unpacking_source(Source& source, std::uint64_t max_unpacked_bytes)
      : source_(&source), max_unpacked_(max_unpacked_bytes) {}
  unpacking_source(const unpacking_source&) = delete;
  unpacking_source& operator=(const unpacking_source&) = delete;

  [[nodiscard]] std::size_t read(std::span<char> into) {
    if (into.empty()) return 0;
    if (!begun_) begin();
#ifdef LLMMEM_TRACE_ZLIB
    if (gzip_) return unpack(*gzip_, into);
#endif
#ifdef LLMMEM_TRACE_ZSTD
    if (zstd_) return unpack(*zstd_, into);
#endif
    if (held_.empty()) return source_->read(into);
    const std::size_t count = std::min(into.size(), held_.size());
    std::memcpy(into.data(), held_.data(), count);
    held_ = held_.subspan(count);
    return count;
  }

  [[nodiscard]] std::string_view name() const { return source_->name(); }

 private:
  static constexpr std::size_t buffer_bytes = std::size_t{64} << 10;
  static constexpr std::size_t head_bytes = 6;  // of the longest magic number

  [[nodiscard]] std::string shown() const { return example::printable(std::string(source_->name()), 512); }

  /// Reads the first bytes and chooses an unpacker.
  void begin() {
    begun_ = true;
    std::size_t have = 0;
    while (have < head_bytes) {
      const std::size_t got = source_->read(std::span(buffer_).subspan(have));
      if (got == 0) break;
      have += got;
    }
    held_ = std::span(buffer_).first(have);
    packing_ = find_packing(std::string_view(held_.data(), held_.size()));
    if (packing_ == nullptr) return;
    if (packing_->name == gzip_name) {
#ifdef LLMMEM_TRACE_ZLIB
      gzip_.emplace();
      return;
#else
      throw lacks_library(shown(), *packing_, "zlib", "zlib1g-dev");
#endif
    }
    if (packing_->name == zstd_name) {
#ifdef LLMMEM_TRACE_ZSTD
      zstd_.emplace();
      return;
#else
      throw lacks_library(shown(), *packing_, "zstd", "libzstd-dev");
#endif
    }
    fail("is " + std::string(packing_->name) + " data, which is not read: unpack it with `" +
         std::string(packing_->unpack_command) + "`");
  }

  [[noreturn]] void fail(const std::string& what) const { throw trace_error(shown() + ": " + what); }

  template <class Unpacker>
  [[nodiscard]] std::size_t unpack(Unpacker& unpacker, std::span<char> into) {
    for (;;) {
      if (held_.empty() && !ended_) {
        held_ = std::span(buffer_).first(source_->read(std::span(buffer_)));
        ended_ = held_.empty();
      }
      unpack_step step;
      try {
        step = unpacker.unpack(held_, into);
      } catch (const unpack_fault& fault) {
        fail(data() + " is damaged at about byte " + std::to_string(taken_ + fault.taken()) + ": " +
             fault.what());
      }
      held_ = held_.subspan(step.taken);
      taken_ += step.taken;
      given_ += step.given;
      if (given_ > max_unpacked_) {
        fail(data() + " unpacks to more than " + std::to_string(max_unpacked_) +
             " bytes; if it is meant to, unpack it with `" + std::string(packing_->unpack_command) + "`");
      }
      if (step.given > 0) return step.given;
      if (held_.empty() && ended_) {
        if (unpacker.complete()) return 0;
        fail(data() + " ends in the middle, after " + std::to_string(taken_) +
             " bytes: the file is cut short; fetch it again");
      }
    }
  }

  [[nodiscard]] std::string data() const { return "the " + std::string(packing_->name) + " data"; }

  Source* source_;
  std::uint64_t max_unpacked_;
  std::vector<char> buffer_ = std::vector<char>(buffer_bytes);
  std::span<char> held_{};  ///< read from the source and not yet used
  const packing* packing_ = nullptr;
  std::uint64_t taken_ = 0;
  std::uint64_t given_ = 0;
  bool begun_ = false;
  bool ended_ = false;
#ifdef LLMMEM_TRACE_ZLIB
  std::optional<gzip_unpacker> gzip_;
#endif
#ifdef LLMMEM_TRACE_ZSTD
  std::optional<zstd_unpacker> zstd_;
#endif
};

static_assert(byte_source<unpacking_source<memory_source>>);

}  // namespace replay_trace
