/// @file
/// The bytes of a journal: varints, writers that count or frame, and a cursor for untrusted input. Private to
/// paging/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/hash/crc32c.hpp>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Counts the bytes that a writer would write.
class byte_counter {
 public:
  void put(std::byte) noexcept { ++count_; }
  void put(std::span<const std::byte> bytes) noexcept { count_ += bytes.size(); }
  [[nodiscard]] std::uint64_t count() const noexcept { return count_; }

 private:
  std::uint64_t count_ = 0;
};

/// Writes to a sink through a small buffer, and computes the checksum of the bytes.
template <class Sink>
class checked_writer {
 public:
  checked_writer(Sink& sink, std::uint32_t crc) noexcept : sink_(&sink), crc_(crc) {}

  void put(std::byte value) noexcept {
    if (used_ == buffer_.size()) flush();
    buffer_[used_++] = value;
  }
  /// @pre `bytes` is no longer than a few numbers.
  void put(std::span<const std::byte> bytes) noexcept {
    if (bytes.size() > buffer_.size() - used_) flush();
    std::memcpy(buffer_.data() + used_, bytes.data(), bytes.size());
    used_ += bytes.size();
  }
  void flush() noexcept {
    const std::span<const std::byte> ready(buffer_.data(), used_);
    crc_ = crc32c(crc_, ready);
    good_ = good_ && sink_->write(ready);
    used_ = 0;
  }
  [[nodiscard]] std::uint32_t crc() const noexcept { return crc_; }
  [[nodiscard]] bool good() const noexcept { return good_; }

 private:
  Sink* sink_;
  std::array<std::byte, 256> buffer_{};
  std::size_t used_ = 0;
  std::uint32_t crc_;
  bool good_ = true;
};

template <class Writer>
void put_varint(Writer& out, std::uint64_t value) noexcept {
  for (; value >= 0x80; value >>= 7)
    out.put(static_cast<std::byte>(value | 0x80));
  out.put(static_cast<std::byte>(value));
}

/// Writes a signed number; numbers near 0 take few bytes.
template <class Writer>
void put_signed(Writer& out, std::int32_t value) noexcept {
  const auto bits = static_cast<std::uint32_t>(value);
  put_varint(out, (bits << 1) ^ (value < 0 ? 0xFFFF'FFFFU : 0U));
}

/// Writes `value` + 1, so that "no limit" and "never" take one byte.
template <class Writer>
void put_limit(Writer& out, std::uint64_t value) noexcept {
  put_varint(out, value + 1);
}

static_assert(std::endian::native == std::endian::little,
              "numbers are written without byte swapping, so the host must be little-endian");

template <class Writer>
void put_fixed32(Writer& out, std::uint32_t value) noexcept {
  out.put(std::as_bytes(std::span(&value, 1)));
}

template <class Writer>
void put_fixed64(Writer& out, std::uint64_t value) noexcept {
  out.put(std::as_bytes(std::span(&value, 1)));
}

template <class Writer>
void put_text(Writer& out, std::string_view text) noexcept {
  put_varint(out, text.size());
  for (const char each : text)
    out.put(static_cast<std::byte>(each));
}

/// Reads untrusted bytes. It keeps the first error; after that, every read returns 0.
class byte_cursor {
 public:
  /// @param offset  of the first byte, for error texts.
  explicit byte_cursor(std::span<const std::byte> bytes, std::uint64_t offset = 0) noexcept
      : bytes_(bytes), offset_(offset) {}

  [[nodiscard]] bool ok() const noexcept { return why_ == nullptr; }
  [[nodiscard]] const char* why() const noexcept { return why_; }
  [[nodiscard]] std::uint64_t offset() const noexcept { return offset_ + at_; }
  [[nodiscard]] std::size_t left() const noexcept { return bytes_.size() - at_; }
  [[nodiscard]] bool ran_out() const noexcept { return ran_out_; }

  void refuse(const char* why) noexcept {
    if (why_ == nullptr) why_ = why;
  }

  [[nodiscard]] std::uint8_t byte() noexcept {
    if (!ok()) return 0;
    if (left() == 0) {
      ran_out_ = true;
      refuse("the bytes end here");
      return 0;
    }
    return static_cast<std::uint8_t>(bytes_[at_++]);
  }

  [[nodiscard]] std::uint64_t varint() noexcept {
    std::uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const std::uint64_t part = byte();
      if (!ok()) return 0;
      if (shift == 63 && part > 1) break;
      value |= (part & 0x7F) << shift;
      if (part < 0x80) {
        if (part == 0 && shift != 0) refuse("a number is not written in its shortest form");
        return ok() ? value : 0;
      }
    }
    refuse("a number exceeds 64 bits");
    return 0;
  }

  [[nodiscard]] std::uint64_t limit() noexcept { return varint() - 1; }

  [[nodiscard]] std::uint32_t narrow() noexcept {
    const std::uint64_t value = varint();
    if (value > 0xFFFF'FFFF) refuse("a number exceeds 32 bits");
    return ok() ? static_cast<std::uint32_t>(value) : 0;
  }

  [[nodiscard]] std::int32_t signed32() noexcept {
    const std::uint32_t value = narrow();
    return static_cast<std::int32_t>((value >> 1) ^ ((value & 1U) != 0 ? 0xFFFF'FFFFU : 0U));
  }

  [[nodiscard]] std::uint32_t fixed32() noexcept {
    std::uint32_t value = 0;
    for (int shift = 0; shift < 32; shift += 8)
      value |= static_cast<std::uint32_t>(byte()) << shift;
    return ok() ? value : 0;
  }

  [[nodiscard]] std::uint64_t fixed64() noexcept {
    const std::uint64_t low = fixed32();
    return low | (static_cast<std::uint64_t>(fixed32()) << 32);
  }

  /// Reads a count of items that follow, of at least `bytes` bytes each.
  [[nodiscard]] std::size_t count(std::size_t bytes) noexcept {
    const std::uint64_t value = varint();
    if (value > left() / bytes) refuse("a count exceeds the bytes that are left");
    return ok() ? static_cast<std::size_t>(value) : 0;
  }

  [[nodiscard]] std::string text() {
    std::string out(count(1), '\0');
    for (char& each : out)
      each = static_cast<char>(byte());
    return out;
  }

 private:
  std::span<const std::byte> bytes_;
  std::uint64_t offset_;
  std::size_t at_ = 0;
  const char* why_ = nullptr;
  bool ran_out_ = false;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
