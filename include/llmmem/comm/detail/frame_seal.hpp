/// @file
/// `frame_seal`: proves that a frame was sent by the process at the other end of a handshake, unchanged and
/// in turn.
#pragma once

#include <llmmem/comm/detail/socket_wire.hpp>
#include <llmmem/comm/detail/wire.hpp>
#include <llmmem/config.hpp>
#include <llmmem/hash/hmac_sha256.hpp>
#include <llmmem/hash/siphash.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Seals the frames of one lane in one direction. A sealed header has two tags. One covers the frame's bytes
/// and is in the otherwise unused words. The other covers the header with that tag and the frame's number on
/// its lane, and replaces the magic number and the checksum. The number is not sent. So a frame that was
/// changed, invented, omitted, sent twice or out of turn, or taken from another lane, connection or direction
/// does not open.
///
/// The tags are SipHash-2-4 tags of 64 bits, under two keys of 128 bits that only the two processes have: a
/// forger with one attempt per connection succeeds once in 2^64. SipHash is a keyed pseudo-random function
/// for short messages, so a header costs about 60 ns, and over long ones it is several times as fast as
/// HMAC-SHA256 without special instructions.
///
/// A seal constructed without keys is open: frames carry only a checksum of their header.
///
/// @par Complexity      O(1) for a header, O(n) for its bytes.
/// @par Thread safety   const throughout.
/// @par Source          Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012.
class frame_seal {
 public:
  constexpr frame_seal() noexcept = default;
  /// @param key  256 bits that are used for nothing else
  constexpr explicit frame_seal(const wire_proof& key) noexcept : is_closed_(true) {
    wire_reader words(key);
    header_key_.low = words.take<std::uint64_t>();
    header_key_.high = words.take<std::uint64_t>();
    bytes_key_.low = words.take<std::uint64_t>();
    bytes_key_.high = words.take<std::uint64_t>();
  }

  /// Whether frames are sealed at all.
  [[nodiscard]] constexpr bool is_closed() const noexcept { return is_closed_; }

  /// Seals the `number`-th frame of its lane, from 0.
  constexpr void close(std::span<std::byte, wire_header_bytes> head, std::span<const std::byte> bytes,
                       std::uint64_t number) const noexcept {
    if (!is_closed_) return;
    wire_writer(head.subspan<bytes_tag_at>()).put(bytes.empty() ? 0 : tag_of(bytes_key_, bytes, number));
    wire_writer(head).put(tag_of(header_key_, head.subspan<8>(), number));
  }
  /// Whether this is that frame's header.
  [[nodiscard]] constexpr bool opens(std::span<const std::byte, wire_header_bytes> head,
                                     std::uint64_t number) const noexcept {
    return !is_closed_ ||
           wire_reader(head).take<std::uint64_t>() == tag_of(header_key_, head.subspan<8>(), number);
  }
  /// Returns the tag of the frame's bytes. @pre its header opens
  [[nodiscard]] static constexpr std::uint64_t bytes_tag(
      std::span<const std::byte, wire_header_bytes> head) noexcept {
    return wire_reader(head.subspan<bytes_tag_at>()).take<std::uint64_t>();
  }
  /// Whether these are the frame's bytes.
  [[nodiscard]] constexpr bool opens_bytes(std::span<const std::byte> bytes, std::uint64_t tag,
                                           std::uint64_t number) const noexcept {
    return !is_closed_ || tag == (bytes.empty() ? 0 : tag_of(bytes_key_, bytes, number));
  }

 private:
  static constexpr std::size_t bytes_tag_at = wire_header_bytes - 8;

  [[nodiscard]] static constexpr std::uint64_t word_at(std::span<const std::byte> bytes,
                                                       std::size_t at) noexcept {
    if (!std::is_constant_evaluated() && std::endian::native == std::endian::little) {
      std::uint64_t word = 0;
      std::memcpy(&word, bytes.data() + at, sizeof(word));
      return word;
    }
    return wire_reader(bytes.subspan(at)).take<std::uint64_t>();
  }
  /// The tag over the number and the bytes.
  [[nodiscard]] static constexpr std::uint64_t tag_of(hash_seed key, std::span<const std::byte> bytes,
                                                      std::uint64_t number) noexcept {
    siphash_state<2, 4> state(key);
    state.absorb(number);
    std::size_t at = 0;
    for (; bytes.size() - at >= 8; at += 8)
      state.absorb(word_at(bytes, at));
    std::uint64_t tail = 0;
    for (std::size_t i = 0; at + i < bytes.size(); ++i)
      tail |= std::to_integer<std::uint64_t>(bytes[at + i]) << (8 * i);
    return state.finish(tail, 8 + bytes.size()).low;
  }

  bool is_closed_ = false;
  hash_seed header_key_{};
  hash_seed bytes_key_{};
};

/// The two directions of a lane, from the point of view of one end.
struct lane_seals {
  frame_seal out{};
  frame_seal in{};
};

/// Returns the seals of a connection with these hellos: making them requires the secret. The hellos of each
/// connection contain random numbers of both sides, so no two connections have the same keys.
[[nodiscard]] inline lane_seals seals_of(const hmac_sha256& secret,
                                         std::span<const std::byte, wire_hello_bytes> caller,
                                         std::span<const std::byte, wire_hello_bytes> listener,
                                         bool is_caller) noexcept {
  constexpr std::array to_listener{std::byte{'k'}, std::byte{'e'}, std::byte{'y'}, std::byte{'>'}};
  constexpr std::array to_caller{std::byte{'k'}, std::byte{'e'}, std::byte{'y'}, std::byte{'<'}};
  const frame_seal there(to_bytes(secret.of(to_listener, caller, listener)));
  const frame_seal back(to_bytes(secret.of(to_caller, caller, listener)));
  return is_caller ? lane_seals{.out = there, .in = back} : lane_seals{.out = back, .in = there};
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
