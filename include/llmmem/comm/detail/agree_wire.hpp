/// @file
/// Encodes messages of an agreement as bytes.
#pragma once

#include <llmmem/comm/agreement.hpp>
#include <llmmem/comm/detail/wire.hpp>
#include <llmmem/config.hpp>

#include <array>
#include <cstddef>
#include <optional>
#include <span>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Space for any control message: an agreement message has four sets of seats.
using told_bytes = std::array<std::byte, 1024>;
static_assert(sizeof(told_bytes) <= max_post_bytes && sizeof(told_bytes) >= 40 + 4 * sizeof(seat_set));

[[nodiscard]] inline std::span<const std::byte> encode(const agree_message& message, std::uint32_t seats,
                                                       told_bytes& into) noexcept {
  wire_writer out(into);
  out.put(static_cast<std::uint32_t>(message.kind));
  out.put(to_index(message.accepted_by));
  out.put(message.instance);
  out.put(message.value.bits);
  out.put_seats(message.value.failed, seats);
  out.put_seats(message.value.joining, seats);
  out.put_seats(message.certain, seats);
  out.put_seats(message.suspected, seats);
  return out.written();
}

/// Returns nothing for bytes that are not an agreement message.
[[nodiscard]] inline std::optional<agree_message> decode_agree(std::span<const std::byte> bytes,
                                                               std::uint32_t seats) noexcept {
  wire_reader in(bytes);
  agree_message message;
  const auto kind = in.take<std::uint32_t>();
  if (kind > static_cast<std::uint32_t>(agree_kind::waits)) return std::nullopt;
  message.kind = static_cast<agree_kind>(kind);
  message.accepted_by = seat_id{in.take<std::uint32_t>()};
  message.instance = in.take<std::uint64_t>();
  message.value.bits = in.take<std::uint64_t>();
  message.value.failed = in.take_seats(seats);
  message.value.joining = in.take_seats(seats);
  message.certain = in.take_seats(seats);
  message.suspected = in.take_seats(seats);
  if (message.accepted_by != no_seat && to_index(message.accepted_by) >= seats) return std::nullopt;
  if (!in.is_all_read()) return std::nullopt;
  return message;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
