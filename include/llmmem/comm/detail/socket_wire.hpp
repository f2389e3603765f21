/// @file
/// The bytes exchanged over a socket between two endpoints: numbers little-endian, every length fixed or
/// bounded before anything after it is read.
#pragma once

#include <llmmem/comm/detail/wire.hpp>
#include <llmmem/comm/endpoint.hpp>
#include <llmmem/comm/id_set.hpp>
#include <llmmem/config.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/hash/hmac_sha256.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The two connections between two seats.
enum class socket_lane : std::uint8_t { data, told };

/// The kind of a frame. All but the first are the endpoint's own, and have no bytes.
enum class frame_sort : std::uint8_t {
  frame,
  beat,      ///< its process lives
  leaving,   ///< its process announces that it leaves
  given_up,  ///< its process ignores the reader from now on, and sends nothing more
};

inline constexpr std::uint32_t wire_magic = 0x314D'4D4C;  // "LMM1"
inline constexpr std::uint16_t wire_version = 3;
/// A whole cache line: a system call that copies bytes after it keeps their alignment, and copies faster.
inline constexpr std::size_t wire_header_bytes = 64;
inline constexpr std::size_t wire_hello_bytes = 88;
inline constexpr std::size_t wire_proof_bytes = 32;
inline constexpr std::size_t wire_answer_bytes = 4 + wire_proof_bytes;

using incarnation_id = std::array<std::byte, 16>;

/// The header of a frame, with the endpoint's additions.
struct wire_header {
  frame_header frame{};
  socket_lane lane = socket_lane::data;
  frame_sort sort = frame_sort::frame;
  std::uint32_t sequence = 0;  ///< the frame's number on its lane, from 0

  friend constexpr bool operator==(const wire_header&, const wire_header&) noexcept = default;
};

constexpr void write_header(const wire_header& header,
                            std::span<std::byte, wire_header_bytes> into) noexcept {
  const frame_header& f = header.frame;
  wire_writer(into.subspan<8>())
      .put(f.epoch)
      .put(f.message)
      .put(f.offset)
      .put(f.bytes)
      .put(f.tag)
      .put(f.crc)
      .put(f.kind)
      .put(f.is_checked)
      .put(static_cast<std::uint16_t>(header.lane))
      .put(static_cast<std::uint16_t>(header.sort))
      .put(header.sequence)
      .put(std::uint64_t{0});
  wire_writer(into).put(wire_magic).put(crc32c(0, into.subspan<8>()));
}

/// Returns nothing for an invalid header: damaged, of another lane, out of turn, or of more bytes than
/// `most`.
/// @param is_sealed  it has a tag in place of the magic number and the checksum, which the caller has checked
[[nodiscard]] constexpr std::optional<wire_header> read_header(
    std::span<const std::byte, wire_header_bytes> from, socket_lane lane, std::uint32_t sequence,
    std::uint32_t most, bool is_sealed = false) noexcept {
  wire_reader reader(from);
  if (!is_sealed) {
    if (reader.take<std::uint32_t>() != wire_magic) return std::nullopt;
    if (reader.take<std::uint32_t>() != crc32c(0, from.subspan<8>())) return std::nullopt;
  } else {
    static_cast<void>(reader.take<std::uint64_t>());
  }
  wire_header header;
  frame_header& f = header.frame;
  f.epoch = reader.take<std::uint64_t>();
  f.message = reader.take<std::uint64_t>();
  f.offset = reader.take<std::uint64_t>();
  f.bytes = reader.take<std::uint32_t>();
  f.tag = reader.take<std::uint32_t>();
  f.crc = reader.take<std::uint32_t>();
  f.kind = reader.take<std::uint16_t>();
  f.is_checked = reader.take<std::uint16_t>();
  const auto told_lane = reader.take<std::uint16_t>();
  const auto sort = reader.take<std::uint16_t>();
  header.sequence = reader.take<std::uint32_t>();
  if (told_lane != static_cast<std::uint16_t>(lane) || header.sequence != sequence) return std::nullopt;
  if (sort > static_cast<std::uint16_t>(frame_sort::given_up)) return std::nullopt;
  header.lane = lane;
  header.sort = static_cast<frame_sort>(sort);
  if (header.sort != frame_sort::frame && (lane != socket_lane::told || f.bytes != 0)) return std::nullopt;
  if (f.bytes > most) return std::nullopt;
  return header;
}

/// The purpose of a connection.
enum class hello_purpose : std::uint16_t {
  data,   ///< the lane of data: from the higher seat to the lower
  told,   ///< the control lane: from the higher seat, too
  knock,  ///< informs the higher seat that a process has come to the lower one, so that it calls
};

/// The first message of either side.
struct wire_hello {
  hello_purpose purpose = hello_purpose::data;
  seat_id from{};
  seat_id to{};
  std::uint32_t seats = 0;
  std::uint32_t frame_bytes = 0;
  incarnation_id incarnation{};
  incarnation_id nonce{};
  incarnation_id boot{};        ///< identifies the machine's run: its processes know each other by number
  std::uint64_t pid_space = 0;  ///< the name space of `pid`; 0 if unknown
  std::uint32_t pid = 0;
  bool asks_for_seals = false;  ///< frames are sealed if either side requests it

  friend constexpr bool operator==(const wire_hello&, const wire_hello&) noexcept = default;
};

constexpr void write_hello(const wire_hello& hello, std::span<std::byte, wire_hello_bytes> into) noexcept {
  wire_writer(into)
      .put(wire_magic)
      .put(wire_version)
      .put(static_cast<std::uint16_t>(hello.purpose))
      .put(to_index(hello.from))
      .put(to_index(hello.to))
      .put(hello.seats)
      .put(hello.frame_bytes)
      .put(hello.incarnation)
      .put(hello.nonce)
      .put(hello.boot)
      .put(hello.pid_space)
      .put(hello.pid)
      .put(std::uint32_t{hello.asks_for_seals ? 1U : 0U});
}

/// Whether an endpoint with another version sent it: nothing else in it has a meaning.
[[nodiscard]] constexpr bool is_other_version(std::span<const std::byte, wire_hello_bytes> from) noexcept {
  wire_reader reader(from);
  return reader.take<std::uint32_t>() == wire_magic && reader.take<std::uint16_t>() != wire_version;
}

/// Returns nothing for an invalid hello: of another version, with two equal seats, with a seat past `seats`,
/// or with a caller past the number of seats that it names. So a caller whose job has as many seats as this
/// one has a seat that exists here.
[[nodiscard]] constexpr std::optional<wire_hello> read_hello(
    std::span<const std::byte, wire_hello_bytes> from, std::uint32_t seats) noexcept {
  wire_reader reader(from);
  if (reader.take<std::uint32_t>() != wire_magic || reader.take<std::uint16_t>() != wire_version)
    return std::nullopt;
  const auto purpose = reader.take<std::uint16_t>();
  if (purpose > static_cast<std::uint16_t>(hello_purpose::knock)) return std::nullopt;
  wire_hello hello;
  hello.purpose = static_cast<hello_purpose>(purpose);
  hello.from = seat_id{reader.take<std::uint32_t>()};
  hello.to = seat_id{reader.take<std::uint32_t>()};
  if (to_index(hello.from) >= seats || to_index(hello.to) >= seats || hello.from == hello.to)
    return std::nullopt;
  hello.seats = reader.take<std::uint32_t>();
  if (to_index(hello.from) >= hello.seats) return std::nullopt;
  hello.frame_bytes = reader.take<std::uint32_t>();
  hello.incarnation = reader.take_bytes<16>();
  hello.nonce = reader.take_bytes<16>();
  hello.boot = reader.take_bytes<16>();
  hello.pid_space = reader.take<std::uint64_t>();
  hello.pid = reader.take<std::uint32_t>();
  hello.asks_for_seals = reader.take<std::uint32_t>() != 0;
  return hello;
}

/// The answer to a connection whose maker has proved that it knows the secret.
enum class hello_answer : std::uint32_t {
  welcome,
  busy,        ///< the process in the seat is not known to be dead: try again
  unwanted,    ///< this process was given up before: a fresh one may come
  mismatched,  ///< another number of seats, or other frame lengths
};

using wire_proof = std::array<std::byte, wire_proof_bytes>;

[[nodiscard]] constexpr wire_proof to_bytes(const sha256_words& words) noexcept {
  wire_proof bytes{};
  for (std::size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = std::byte((words[i / 4] >> (24 - 8 * (i % 4))) & 0xFFU);
  return bytes;
}

/// Returns the caller's proof. It comes first: a foreign process that only listens learns nothing to test
/// secrets against.
[[nodiscard]] constexpr wire_proof caller_proof(
    const hmac_sha256& secret, std::span<const std::byte, wire_hello_bytes> caller,
    std::span<const std::byte, wire_hello_bytes> listener) noexcept {
  constexpr std::array label{std::byte{'c'}, std::byte{'a'}, std::byte{'l'}, std::byte{'l'}};
  return to_bytes(secret.of(label, caller, listener));
}

/// Returns the listener's proof, and its answer.
[[nodiscard]] constexpr wire_proof listener_proof(const hmac_sha256& secret,
                                                  std::span<const std::byte, wire_hello_bytes> caller,
                                                  std::span<const std::byte, wire_hello_bytes> listener,
                                                  hello_answer answer) noexcept {
  constexpr std::array label{std::byte{'h'}, std::byte{'e'}, std::byte{'a'}, std::byte{'r'}};
  std::array<std::byte, 4> said{};
  wire_writer(said).put(static_cast<std::uint32_t>(answer));
  return to_bytes(secret.of(label, caller, listener, said));
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
