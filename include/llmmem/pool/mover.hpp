/// @file
/// `pool_mover`: how the bytes of a block in one node's first tier reach another node of a `kv_pool`.
#pragma once

#include <llmmem/comm/ranks.hpp>
#include <llmmem/config.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/pool/directory.hpp>
#include <llmmem/result.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace llmmem {
inline namespace v0 {

namespace pool {

/// What a mover declares.
struct mover_limits {
  bool one_sided = false;            ///< the reader takes the bytes: no engine step of the owner is needed
  bool needs_owner_progress = true;  ///< the bytes move only while the owner calls `progress`
  std::uint64_t max_piece = 0;       ///< the most bytes that one copy, read or frame of it moves

  friend constexpr bool operator==(const mover_limits&, const mover_limits&) noexcept = default;
};

/// The most bytes of a `pool_mover`'s introduction: it travels in one message.
inline constexpr std::size_t max_introduction_bytes = 3072;

/// The state of a read of another node's memory.
enum class moved : std::uint8_t {
  here,       ///< the bytes are in place, and verified
  begun,      ///< `progress` reports the end
  absent,     ///< the owner's index does not name the block: its owner may still have it in a lower tier
  changed,    ///< the owner rewrote the block meanwhile, or its entry in the index is malformed
  busy,       ///< the mover has as many reads under way as it can: ask again in a later step
  unreached,  ///< the node's memory cannot be read: it died, or it introduced none
  damaged     ///< the owner's index did not change, and the bytes do not have the checksum in it
};

/// A read that has begun, by the numbers of the pool's request.
struct move_ticket {
  std::uint64_t request = 0;
  std::uint32_t part = 0;

  friend constexpr bool operator==(const move_ticket&, const move_ticket&) noexcept = default;
};

}  // namespace pool

namespace detail {

/// For concepts: the receiver of the ends of reads.
struct any_move_handler {
  void operator()(const pool::move_ticket&, pool::moved) noexcept {}
};

}  // namespace detail

/// Moves the bytes of blocks between the nodes of a pool.
///
/// `pool::message_mover` is the default: the reader asks, and the owner sends frames through the pool's
/// endpoint. Movers that are `one_sided` read the owner's first tier themselves: `shared_memory_mover`
/// between processes of one machine, `ucx_mover` by UCX. Their memory is that of a space which the mover
/// allocates, with an index of the blocks there, so that a reader finds a block by its name and the owner
/// says nothing.
///
/// **Messages remain the way of last resort**: what a mover does not bring (a block in a lower tier, a node
/// on another machine, or with another mover) is asked of its owner by a message. So a mover that fails costs
/// time, and nodes with different movers make one pool.
///
/// **Arrival is verified.** A read is `here` only if the owner's index named the block by its whole key
/// before and after the copy, in the same generation, and the CRC-32C of the bytes that arrived is the one in
/// the index. Lengths, offsets and introductions of others are input from elsewhere: a mover bounds them by
/// the memory that it has mapped itself.
///
/// - `moves_by_message`        true for the default alone: then the pool calls nothing else but `limits`.
/// - `limits()`                what it declares: see `pool::mover_limits`.
/// - `can_offer(bytes)`        whether others can read these bytes: they are of its space.
/// - `introduction()`          what another node needs to reach this memory: at most
///   `pool::max_introduction_bytes`.
/// - `attach(seat, bytes)`     another node's introduction. Hostile input. Replaces an earlier one.
/// - `detach(seat)`            a node has ended, or is another process now. Its open reads end `unreached`.
/// - `reaches(seat)`           whether reads from there can begin.
/// - `offer(name, bytes, crc)`   puts a block and its CRC-32C into this node's index. The bytes stay as they
///   are until `withdraw`; a reader refuses those that do not.
/// - `is_offered(name)`, `withdraw(name)`, `withdraw_all()`   the same index. After `withdraw` no read that
///   begins finds the block, and one that is under way ends as `changed` or with the right bytes.
/// - `fetch(seat, name, into, ticket)`  begins a read, or does all of it. Only `here` leaves right bytes.
/// - `drop(ticket)`            gives up a read: nothing is written to its destination from then on.
/// - `progress(on_end)`        advances reads, and calls `on_end(ticket, moved)` for those that ended.
///
/// @par Complexity      `is_offered` and `reaches` take nanoseconds: a pool calls them for each block.
/// @par Thread safety   that of its pool.
template <class M>
concept pool_mover = requires(M& mover, const M& seen, seat_id seat, const block_key& name,
                              std::span<const std::byte> bytes, std::uint32_t crc, std::span<std::byte> into,
                              const pool::move_ticket& ticket, detail::any_move_handler& on_end) {
  { M::moves_by_message } -> std::convertible_to<bool>;
  { seen.limits() } noexcept -> std::same_as<pool::mover_limits>;
  { seen.can_offer(bytes) } noexcept -> std::same_as<bool>;
  { seen.introduction() } noexcept -> std::convertible_to<std::span<const std::byte>>;
  { mover.attach(seat, bytes) } noexcept -> std::same_as<result<void>>;
  { mover.detach(seat) } noexcept;
  { seen.reaches(seat) } noexcept -> std::same_as<bool>;
  { mover.offer(name, bytes, crc) } noexcept -> std::same_as<bool>;
  { seen.is_offered(name) } noexcept -> std::same_as<bool>;
  { mover.withdraw(name) } noexcept;
  { mover.withdraw_all() } noexcept;
  { mover.fetch(seat, name, into, ticket) } noexcept -> std::same_as<pool::moved>;
  { mover.drop(ticket) } noexcept;
  { mover.progress(on_end) } noexcept;
};

namespace pool {

/// Moves blocks as frames of the pool's endpoint: the reader asks its owner, which sends them in its own
/// `progress`. Works wherever the endpoint does, and needs no space of its own.
class message_mover {
 public:
  static constexpr bool moves_by_message = true;

  /// `max_piece` is the endpoint's `frame_bytes`: see `kv_pool::mover_limits`.
  [[nodiscard]] mover_limits limits() const noexcept { return {}; }
  [[nodiscard]] bool can_offer(std::span<const std::byte>) const noexcept { return false; }
  [[nodiscard]] std::span<const std::byte> introduction() const noexcept { return {}; }
  result<void> attach(seat_id, std::span<const std::byte>) noexcept { return {}; }
  void detach(seat_id) noexcept {}
  [[nodiscard]] bool reaches(seat_id) const noexcept { return false; }
  bool offer(const block_key&, std::span<const std::byte>, std::uint32_t) noexcept { return false; }
  [[nodiscard]] bool is_offered(const block_key&) const noexcept { return false; }
  void withdraw(const block_key&) noexcept {}
  void withdraw_all() noexcept {}
  moved fetch(seat_id, const block_key&, std::span<std::byte>, const move_ticket&) noexcept {
    return moved::unreached;
  }
  void drop(const move_ticket&) noexcept {}
  template <class F>
  void progress(F&&) noexcept {}
};

static_assert(pool_mover<message_mover>);

}  // namespace pool

namespace detail {

/// The types that a `kv_pool` may be made of.
template <class Directory, class Mover>
concept pool_parts =
    pool_directory<std::remove_reference_t<Directory>> && pool_mover<std::remove_reference_t<Mover>>;

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
