/// @file
/// What a pool writes into Redis: names of keys, incarnations and records of spans. All of it is read back as
/// untrusted input.
#pragma once

#include <llmmem/comm/ranks.hpp>
#include <llmmem/config.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/paging/layer_group.hpp>
#include <llmmem/pool/kv_pool_types.hpp>

#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Text of a bounded length.
template <std::size_t Most>
class short_text {
 public:
  short_text& put(std::string_view text) noexcept {
    const std::size_t take = text.size() < Most - size_ ? text.size() : Most - size_;
    text.copy(bytes_.data() + size_, take);
    size_ += take;
    return *this;
  }
  /// Puts `digits` hexadecimal digits.
  short_text& put_hex(std::uint64_t value, unsigned digits) noexcept {
    constexpr std::string_view of_values = "0123456789abcdef";
    for (unsigned i = digits; i-- > 0;)
      put(of_values.substr(value >> 4 * i & 15U, 1));
    return *this;
  }
  short_text& put_number(std::uint64_t value) noexcept {
    std::array<char, 20> digits{};
    const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
    return put({digits.data(), static_cast<std::size_t>(end - digits.data())});
  }
  [[nodiscard]] std::string_view view() const noexcept LLMMEM_LIFETIMEBOUND { return {bytes_.data(), size_}; }

 private:
  std::array<char, Most> bytes_{};
  std::size_t size_ = 0;
};

/// Takes exactly `digits` lower-case hexadecimal digits from the front of a text.
[[nodiscard]] inline std::optional<std::uint64_t> take_hex(std::string_view& text, unsigned digits) noexcept {
  if (text.size() < digits) return std::nullopt;
  std::uint64_t value = 0;
  for (unsigned i = 0; i < digits; ++i) {
    const char c = text[i];
    const bool is_digit = c >= '0' && c <= '9';
    if (!is_digit && !(c >= 'a' && c <= 'f')) return std::nullopt;
    value = value << 4 | static_cast<std::uint64_t>(is_digit ? c - '0' : c - 'a' + 10);
  }
  text.remove_prefix(digits);
  return value;
}
[[nodiscard]] inline bool take_colon(std::string_view& text) noexcept {
  if (text.empty() || text.front() != ':') return false;
  text.remove_prefix(1);
  return true;
}

/// The process that has a seat, and how often it had to set its name: entries of an earlier life may have
/// been removed, so they never count again.
struct redis_life {
  std::uint64_t nonce = 0;
  std::uint32_t life = 0;  ///< from 1; 0: no process

  friend constexpr bool operator==(const redis_life&, const redis_life&) noexcept = default;
};

using redis_key = short_text<192>;
using redis_field = short_text<32>;

/// The value of a node's key: `<nonce>:<life>`, hexadecimal.
[[nodiscard]] inline redis_field redis_life_text(const redis_life& of) noexcept {
  redis_field out;
  out.put_hex(of.nonce, 16).put(":").put_hex(of.life, 8);
  return out;
}
[[nodiscard]] inline std::optional<redis_life> parse_redis_life(std::string_view text) noexcept {
  const auto nonce = take_hex(text, 16);
  if (!nonce || !take_colon(text)) return std::nullopt;
  const auto life = take_hex(text, 8);
  if (!life || *life == 0 || !text.empty()) return std::nullopt;
  return redis_life{*nonce, static_cast<std::uint32_t>(*life)};
}

/// The name of a node's value in a span's hash: `<seat>:<nonce>:<life>`.
[[nodiscard]] inline redis_field redis_field_of(seat_id seat, const redis_life& of) noexcept {
  redis_field out;
  out.put_hex(to_index(seat), 4).put(":").put(redis_life_text(of).view());
  return out;
}
struct redis_holder {
  seat_id seat = no_seat;
  redis_life life{};
};
[[nodiscard]] inline std::optional<redis_holder> parse_redis_field(std::string_view text,
                                                                   std::uint32_t seats) noexcept {
  const auto seat = take_hex(text, 4);
  if (!seat || *seat >= seats || !take_colon(text)) return std::nullopt;
  const auto life = parse_redis_life(text);
  if (!life) return std::nullopt;
  return redis_holder{seat_id{static_cast<std::uint32_t>(*seat)}, *life};
}

/// What one node holds of a span: `L`, `1`, the numbers of layer groups and of records; and for each record
/// the number of its chunks, their digests, and a mask for each group. Numbers little-endian.
class redis_record_writer {
 public:
  static constexpr std::uint32_t most_records = 2;

  // Writes the bytes as it adds them. NOLINTNEXTLINE(cppcoreguidelines-pro-type-member-init)
  explicit redis_record_writer(std::size_t groups) noexcept : groups_(groups) {
    bytes_[0] = 'L';
    bytes_[1] = '1';
    bytes_[2] = static_cast<char>(groups);
  }
  /// Adds a record; those after the second are left out.
  void add(std::span<const std::uint32_t> digests, std::span<const std::uint64_t> masks) noexcept {
    if (count_ == most_records) return;
    ++count_;
    bytes_[3] = static_cast<char>(count_);
    bytes_[size_++] = static_cast<char>(digests.size());
    for (const std::uint32_t each : digests)
      put(each, 4);
    for (const std::uint64_t each : masks.first(groups_))
      put(each, 8);
  }
  [[nodiscard]] std::uint32_t count() const noexcept { return count_; }
  [[nodiscard]] std::string_view view() const noexcept LLMMEM_LIFETIMEBOUND { return {bytes_.data(), size_}; }

 private:
  void put(std::uint64_t value, unsigned bytes) noexcept {
    for (unsigned i = 0; i < bytes; ++i)
      bytes_[size_++] = static_cast<char>(value >> 8 * i & 0xFFU);
  }

  std::array<char, 4 + most_records * (1 + 4 * pool::span_chunks + 8 * max_layer_groups)> bytes_;
  std::size_t groups_;
  std::size_t size_ = 4;
  std::uint32_t count_ = 0;
};

/// Calls `f(digests, masks)` for each record of a value, once the whole value is known to be well-formed.
/// @return whether it is.
template <class F>
[[nodiscard]] bool read_redis_records(std::string_view text, std::size_t groups, F&& f) noexcept {
  const auto byte = [&](std::size_t at) { return static_cast<unsigned char>(text[at]); };
  const auto number = [&](std::size_t at, unsigned bytes) {
    std::uint64_t value = 0;
    for (unsigned i = 0; i < bytes; ++i)
      value |= std::uint64_t{byte(at + i)} << 8 * i;
    return value;
  };
  if (text.size() < 4 || text[0] != 'L' || text[1] != '1' || byte(2) != groups) return false;
  const std::size_t count = byte(3);
  if (count == 0 || count > redis_record_writer::most_records) return false;
  std::array<std::uint32_t, pool::span_chunks> digests{};
  std::array<std::uint64_t, max_layer_groups> masks{};
  for (const bool is_checked : {false, true}) {
    std::size_t at = 4;
    for (std::size_t r = 0; r < count; ++r) {
      if (at == text.size()) return false;
      const std::size_t chunks = byte(at++);
      if (chunks == 0 || chunks > pool::span_chunks || text.size() - at < chunks * 4 + groups * 8)
        return false;
      for (std::size_t c = 0; c < chunks; ++c, at += 4)
        digests[c] = static_cast<std::uint32_t>(number(at, 4));
      for (std::size_t g = 0; g < groups; ++g, at += 8) {
        masks[g] = number(at, 8);
        if (chunks < 64 && masks[g] >> chunks != 0) return false;
      }
      if (is_checked)
        f(std::span<const std::uint32_t>(digests).first(chunks),
          std::span<const std::uint64_t>(masks).first(groups));
    }
    if (at != text.size()) return false;
  }
  return true;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
