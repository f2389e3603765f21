/// @file
/// The record of a pool's request for blocks of other nodes.
#pragma once

#include <llmmem/comm/ranks.hpp>
#include <llmmem/config.hpp>
#include <llmmem/offload/kv_chain.hpp>
#include <llmmem/offload/kv_tiers_types.hpp>
#include <llmmem/pool/directory.hpp>
#include <llmmem/pool/kv_pool_types.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The progress of one block of a request.
enum class pool_part_state : std::uint8_t {
  queued,   ///< not yet asked for
  asked,    ///< it has a slot, and a node was asked to send it
  nearby,   ///< another request of this node brings it
  arrived,  ///< in the first tier, pinned
  failed,   ///< no node is left that has it
  late,
  no_slot,  ///< the first tier has no space
};

/// One block of a request.
struct pool_part {
  std::uint32_t group = 0;
  std::uint32_t chunk = 0;  ///< the block's last chunk, counted from 0 in the chain
  offload::held_block block{};
  std::uint64_t received = 0;  ///< bytes
  std::uint32_t crc = 0;       ///< CRC-32C of those
  seat_id holder = no_seat;    ///< that was asked
  seat_id planned = no_seat;   ///< to ask first: the choice by cost
  pool_part_state state = pool_part_state::queued;
  std::uint64_t ask_again = 0;   ///< when the holder is asked again
  std::uint8_t asked_times = 0;  ///< how often this holder was asked
  std::uint8_t tried = 0;        ///< bit i: holder i of the span was asked
  std::uint8_t read_from = 0;    ///< bit i: the memory of holder i was read
  std::uint8_t damaged_by = 0;   ///< bit i: what holder i sent was damaged
  bool is_reading = false;       ///< the mover reads the holder's memory
  bool is_receiving = false;     ///< the transport has the slot's memory
  bool is_broken = false;        ///< its node sends nothing after the frame in flight
  bool is_fetched = false;       ///< it came from another node
};

/// What the directory answered about a span of the chain.
struct pool_span {
  std::uint32_t asked = pool::no_keeper;  ///< the directory's keeper
  bool is_answered = false;
  bool is_unknown = false;       ///< the directory cannot answer
  std::uint8_t asked_times = 0;  ///< of nodes that did not answer
  std::uint32_t holder_count = 0;
  std::uint64_t ask_again = ~std::uint64_t{0};  ///< when it is asked again: its answer may have been dropped
  std::array<pool::holder, pool::max_holders> holders{};

  [[nodiscard]] bool is_asked() const noexcept { return is_answered || asked != pool::no_keeper; }
};

/// A request from `ask` to its end.
struct pool_record {
  bool is_live = false;
  bool is_late = false;
  std::uint32_t generation = 1;
  const kv_chain* chain = nullptr;
  std::uint64_t before = 0;  ///< digest of the key before the chain's first: of a span that is copied
  std::uint64_t deadline = 0;
  std::uint64_t first_span = 0;  ///< the first span of the chain that was asked for
  std::size_t asked_spans = 0;   ///< the questions for all spans before this one have been sent
  std::uint64_t chunks = 0;      ///< length of the chain at `ask`; the chain may have grown since
  std::size_t first_open = 0;    ///< parts before it are done
  std::uint64_t ask_again = ~std::uint64_t{0};  ///< no earlier is anything asked again
  pool::fetch_result came{};
  std::vector<pool_span> spans;
  std::vector<std::uint64_t> masks;  ///< by span, holder and group
  std::vector<pool_part> parts;
};

/// A block that another node asked this one to send.
struct pool_serving {
  seat_id to = no_seat;
  std::uint64_t nonce = 0;
  std::uint64_t id = 0;  ///< of the other node's request
  std::uint64_t since = 0;
  block_key span{};
  block_key key{};
  std::uint32_t part = 0;
  std::uint32_t group = 0;
  std::uint32_t place = 0;      ///< the block's chunk within the span
  std::uint32_t crc = 0;        ///< CRC-32C of the bytes before `offset`, unless the tiers have the block's
  std::uint64_t offset = 0;     ///< bytes that the transport has taken
  std::uint64_t pinned_at = 0;  ///< when it took the first of them
  offload::held_block block{};  ///< pinned, while some bytes have gone and others have not
  bool is_missing =
      false;  ///< this node does not have the block, and says so when the other node reads again
};

/// A block that this node will offer to readers when it is in the first tier.
struct pool_offer {
  block_key key{};
  std::uint32_t group = 0;
};

/// The properties that two nodes must have in common, so that a block of one is right in the other.
struct pool_likeness {
  std::uint32_t magic = 0;
  std::uint32_t version = 0;
  std::uint64_t model = 0;
  block_key key{};  ///< the key of some fixed tokens, which depends on the seed and kind of the hash, and on
                    ///< the epoch
  std::uint32_t groups = 0;
  std::uint32_t chunk_tokens = 0;
  std::uint64_t blocks = 0;  ///< digest of the groups' block sizes

  friend constexpr bool operator==(const pool_likeness&, const pool_likeness&) noexcept = default;
};

/// The uses of a span that this node has published, and the copies that it asked for.
struct pool_span_use {
  block_key span{};
  std::uint32_t uses = 0;
  std::uint32_t copied_uses = 0;    ///< when it asked last
  std::uint32_t copied_chunks = 0;  ///< how many it named then
  std::uint64_t copied_by = 0;      ///< digest of the nodes that it asked
};

/// The copies that this node has verified because another node reported them damaged.
struct pool_checks {
  std::uint64_t since = 0;  ///< when the second began in which they are counted
  std::uint32_t count = 0;

  /// Returns whether there is one more, and counts it. Each second begins with the first one after the last.
  [[nodiscard]] constexpr bool may_check(std::uint64_t now, std::uint32_t most) noexcept {
    constexpr std::uint64_t second = 1'000'000'000;
    if (count == 0 || now - since >= second) {
      since = now;
      count = 0;
    }
    if (count >= most) return false;
    ++count;
    return true;
  }
};

/// What this node knows of another node.
struct pool_peer {
  pool::peer_state state = pool::peer_state::absent;
  pool_likeness likeness{};
  std::uint64_t nonce = 0;
  std::uint32_t domain = 0;
  std::uint64_t slow_until = 0;    ///< until then no send waits for it
  std::uint64_t taken_at = 0;      ///< when it last took a frame
  std::uint64_t introduce_at = 0;  ///< when it receives again how to read this node's memory, and
  std::uint8_t introductions = 0;  ///< how often it was
  std::uint64_t stalled_in = 0;    ///< the turn of `serve` in which it took nothing
  std::uint32_t outstanding = 0;   ///< blocks that this node awaits from it
  pool_checks checks{};            ///< it outlives the process in that seat: a death gives it no more checks
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
