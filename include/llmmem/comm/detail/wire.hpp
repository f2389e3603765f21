/// @file
/// Encodes numbers as bytes, lowest first, on every machine.
#pragma once

#include <llmmem/comm/id_set.hpp>
#include <llmmem/comm/ranks.hpp>
#include <llmmem/config.hpp>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Writes numbers one after the other into memory that is known to be large enough.
class wire_writer {
 public:
  constexpr explicit wire_writer(std::span<std::byte> buffer) noexcept : buffer_(buffer) {}

  template <std::unsigned_integral T>
  constexpr wire_writer& put(T value) noexcept {
    for (std::size_t i = 0; i < sizeof(T); ++i)
      buffer_[at_ + i] = static_cast<std::byte>((value >> (8 * i)) & 0xFFU);
    at_ += sizeof(T);
    return *this;
  }
  template <std::size_t Count>
  constexpr wire_writer& put(const std::array<std::byte, Count>& bytes) noexcept {
    for (const std::byte each : bytes)
      buffer_[at_++] = each;
    return *this;
  }
  /// Writes the words that `count` seats need.
  constexpr wire_writer& put_seats(const seat_set& set, std::uint32_t count) noexcept {
    for (std::size_t i = 0; i < (count + 63) / 64; ++i)
      put(set.words()[i]);
    return *this;
  }
  [[nodiscard]] constexpr std::span<const std::byte> written() const noexcept { return buffer_.first(at_); }

 private:
  std::span<std::byte> buffer_;
  std::size_t at_ = 0;
};

/// Reads input that may be too short: returns zeros then, and `is_all_read` is false.
class wire_reader {
 public:
  constexpr explicit wire_reader(std::span<const std::byte> bytes) noexcept : bytes_(bytes) {}

  template <std::unsigned_integral T>
  [[nodiscard]] constexpr T take() noexcept {
    if (!has(sizeof(T))) return 0;
    T value = 0;
    for (std::size_t i = 0; i < sizeof(T); ++i)
      value = static_cast<T>(value | (static_cast<T>(std::to_integer<T>(bytes_[at_ + i])) << (8 * i)));
    at_ += sizeof(T);
    return value;
  }
  template <std::size_t Count>
  [[nodiscard]] constexpr std::array<std::byte, Count> take_bytes() noexcept {
    std::array<std::byte, Count> taken{};
    if (!has(Count)) return taken;
    for (std::byte& each : taken)
      each = bytes_[at_++];
    return taken;
  }
  /// Seats outside `count` make the input invalid, and the set empty: seats are used as indices.
  [[nodiscard]] constexpr seat_set take_seats(std::uint32_t count) noexcept {
    seat_set::word_array words{};
    for (std::size_t i = 0; i < (count + 63) / 64; ++i)
      words[i] = take<std::uint64_t>();
    const seat_set set = seat_set::from_words(words);
    if (set.is_subset_of(seat_set::first(rank_count{count}))) return set;
    is_bad_ = true;
    return {};
  }
  /// Whether everything requested was there, and nothing else.
  [[nodiscard]] constexpr bool is_all_read() const noexcept { return !is_bad_ && at_ == bytes_.size(); }

 private:
  [[nodiscard]] constexpr bool has(std::size_t count) noexcept {
    if (bytes_.size() - at_ >= count) return true;
    is_bad_ = true;
    return false;
  }

  std::span<const std::byte> bytes_;
  std::size_t at_ = 0;
  bool is_bad_ = false;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
