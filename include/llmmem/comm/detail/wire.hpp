/// @file
/// Numbers as bytes, the lowest first, whatever the machine.
#pragma once

#include <llmmem/comm/id_set.hpp>
#include <llmmem/config.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem::inline v0::detail {

/// Writes into room that is known to be enough.
class wire_writer {
 public:
  explicit wire_writer(std::span<std::byte> room) noexcept : room_(room) {}

  void u32(std::uint32_t value) noexcept { number(value, 4); }
  void u64(std::uint64_t value) noexcept { number(value, 8); }
  /// As many words as `count` seats need.
  void seats(const seat_set& set, std::uint32_t count) noexcept {
    for (std::size_t i = 0; i < (count + 63) / 64; ++i)
      u64(set.words()[i]);
  }
  [[nodiscard]] std::span<const std::byte> written() const noexcept { return room_.first(at_); }

 private:
  void number(std::uint64_t value, std::size_t bytes) noexcept {
    for (std::size_t i = 0; i < bytes; ++i)
      room_[at_++] = static_cast<std::byte>(value >> (8 * i));
  }

  std::span<std::byte> room_;
  std::size_t at_ = 0;
};

/// Reads what may be too short: zeros then, and `is_all_read` says no.
class wire_reader {
 public:
  explicit wire_reader(std::span<const std::byte> bytes) noexcept : bytes_(bytes) {}

  [[nodiscard]] std::uint32_t u32() noexcept { return static_cast<std::uint32_t>(number(4)); }
  [[nodiscard]] std::uint64_t u64() noexcept { return number(8); }
  /// Seats that are not among `count` make it unreadable.
  [[nodiscard]] seat_set seats(std::uint32_t count) noexcept {
    std::array<std::uint64_t, max_seats / 64> words{};
    for (std::size_t i = 0; i < (count + 63) / 64; ++i)
      words[i] = u64();
    const seat_set set = seat_set::from_words(words);
    if (!(set - seat_set::first(rank_count{count})).empty()) is_bad_ = true;
    return set;
  }
  /// Whether all was there that was asked for, and nothing else.
  [[nodiscard]] bool is_all_read() const noexcept { return !is_bad_ && at_ == bytes_.size(); }

 private:
  [[nodiscard]] std::uint64_t number(std::size_t bytes) noexcept {
    if (bytes_.size() - at_ < bytes) {
      is_bad_ = true;
      return 0;
    }
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < bytes; ++i)
      value |= std::uint64_t{static_cast<std::uint8_t>(bytes_[at_++])} << (8 * i);
    return value;
  }

  std::span<const std::byte> bytes_;
  std::size_t at_ = 0;
  bool is_bad_ = false;
};

}  // namespace llmmem::inline v0::detail
