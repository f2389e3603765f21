/// @file
/// The messages between the nodes of a pool: their kinds, writer and reader.
#pragma once

#include <llmmem/comm/endpoint.hpp>
#include <llmmem/config.hpp>
#include <llmmem/hash/block_key.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The kinds of frames (`frame_header::kind`). `endpoint::post` sends all of them except `data`.
enum class pool_frame : std::uint16_t {
  hello = 1,  ///< the likeness of the node's cache, and its incarnation
  publish,    ///< the sender holds these blocks of a span, and no others
  ask,        ///< which nodes hold blocks of this span?
  answer,     ///< these nodes hold blocks of the span
  get,        ///< send these blocks
  missing,    ///< one of the requested blocks will not arrive
  data,       ///< bytes of a block
  gone,       ///< the sender no longer holds this block of a span
  get_again,  ///< as `get`, for blocks that were requested before
  copy,       ///< the sender holds these blocks of a hot span: hold them, too
  reach,      ///< how the sender's memory can be read: its mover's introduction
  damaged,    ///< the bytes that the sender got of this block do not have the block's checksum
  received,   ///< the sender's part of the directory has the receiver's announcements up to this number
};

/// Writes numbers and keys into a message, one after another.
class pool_writer {
 public:
  template <class T>
  void put(const T& value) noexcept {
    static_assert(std::is_trivially_copyable_v<T>);
    if (sizeof(T) > bytes_.size() - size_) {
      is_whole_ = false;
      return;
    }
    std::memcpy(bytes_.data() + size_, &value, sizeof(T));
    size_ += sizeof(T);
  }
  void put_bytes(std::span<const std::byte> bytes) noexcept {
    if (bytes.size() > left()) {
      is_whole_ = false;
      return;
    }
    for (const std::byte each : bytes)
      bytes_[size_++] = each;
  }
  [[nodiscard]] std::size_t left() const noexcept { return bytes_.size() - size_; }
  /// Returns whether the message had space for everything.
  [[nodiscard]] bool is_complete() const noexcept { return is_whole_; }
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept LLMMEM_LIFETIMEBOUND {
    return std::span(bytes_).first(size_);
  }
  /// Overwrites the value that was put at `at`.
  template <class T>
  void put_at(std::size_t at, const T& value) noexcept {
    std::memcpy(bytes_.data() + at, &value, sizeof(T));
  }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }

 private:
  std::array<std::byte, max_post_bytes> bytes_{};
  std::size_t size_ = 0;
  bool is_whole_ = true;
};

/// Reads numbers and keys. Values past the message's end read as zero, and `is_right` then returns false.
class pool_reader {
 public:
  explicit pool_reader(std::span<const std::byte> bytes) noexcept : bytes_(bytes) {}

  template <class T>
  [[nodiscard]] T take() noexcept {
    static_assert(std::is_trivially_copyable_v<T>);
    T value{};
    if (sizeof(T) > bytes_.size()) {
      is_right_ = false;
      bytes_ = {};
      return value;
    }
    std::memcpy(&value, bytes_.data(), sizeof(T));
    bytes_ = bytes_.subspan(sizeof(T));
    return value;
  }
  /// Returns the bytes that were not read.
  [[nodiscard]] std::span<const std::byte> rest() const noexcept { return bytes_; }
  [[nodiscard]] bool is_right() const noexcept { return is_right_; }
  /// Returns whether the message has been read exactly to its end.
  [[nodiscard]] bool is_over() const noexcept { return is_right_ && bytes_.empty(); }

 private:
  std::span<const std::byte> bytes_;
  bool is_right_ = true;
};

/// Returns 32 bits of a key, by which a directory compares chains: a hint, which the block's whole key
/// confirms.
[[nodiscard]] constexpr std::uint32_t hint_digest(const block_key& key) noexcept {
  return static_cast<std::uint32_t>(key.high ^ (key.high >> 32) ^ key.low);
}

/// Mixes two numbers into one whose bits are evenly distributed.
[[nodiscard]] constexpr std::uint64_t mix_pair(std::uint64_t a, std::uint64_t b) noexcept {
  std::uint64_t x = a ^ (b + 0x9E37'79B9'7F4A'7C15ULL + (a << 6) + (a >> 2));
  x = (x ^ (x >> 30)) * 0xBF58'476D'1CE4'E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D0'49BB'1331'11EBULL;
  return x ^ (x >> 31);
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
