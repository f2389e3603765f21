/// @file
/// Sums of floats over a wire, of contributions that may be anywhere: for authors of collectives.
#pragma once

#include <llmmem/comm/collectives.hpp>
#include <llmmem/comm/transport.hpp>
#include <llmmem/comm/wire_form.hpp>
#include <llmmem/comm/wire_traffic.hpp>
#include <llmmem/config.hpp>
#include <llmmem/result.hpp>

#include <algorithm>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// A rank's contribution to a sum, and the place of the sum.
///
/// | member | |
/// |---|---|
/// | `values(rank, at, room)` | `room.size()` contiguous elements of the rank's block, from `at` on |
/// | `keeps_errors()` | whether `keep_error` is called |
/// | `keep_error(rank, at, values, restored)` | of these, what goes out, and what the wire restores |
/// | `sum(at, values)` | the sum of elements of this rank's block |
///
/// `values` may use `room`, and returns it or a place of its own.
template <class S>
concept sum_ends = requires(S& ends, std::uint32_t rank, std::uint64_t at, std::span<float> room,
                            const float* values, std::span<const float> seen) {
  { ends.values(rank, at, room) } -> std::same_as<const float*>;
  { ends.keeps_errors() } noexcept -> std::same_as<bool>;
  ends.keep_error(rank, at, values, seen);
  ends.sum(at, seen);
};

namespace detail {

/// Returns what a wire has lost of a value; 0 if either is not finite.
[[nodiscard]] inline float lost_of(float value, float restored) noexcept {
  const float lost = value - restored;
  return (std::bit_cast<std::uint32_t>(lost) & 0x7F80'0000U) == 0x7F80'0000U ? 0.0F : lost;
}

/// Returns the greatest number that divides both, by Euclid's algorithm. @pre neither is 0
[[nodiscard]] constexpr std::uint64_t common_divisor(std::uint64_t a, std::uint64_t b) noexcept {
  while (b != 0) {
    const std::uint64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

}  // namespace detail

/// A sum over a wire, and its memory. In one hop: `reduce_scatter`; in two: `two_hop_reduce_scatter`.
///
/// @par Complexity      each element is encoded once for each hop, and decoded and added once for each rank.
/// @par Thread safety   as the transport.
template <wire_codec W>
class wired_sum {
 public:
  /// @param blocks      elements: N + 1 numbers. They outlive this object.
  /// @param node_ranks  ranks of a node; 0: one hop, with `wires.within`.
  /// @pre `node_ranks` divides N
  wired_sum(std::span<const std::uint64_t> blocks, const hop_wires<W>& wires, std::uint32_t node_ranks,
            std::uint32_t segment_bytes) noexcept
      : blocks_(blocks), wires_(wires), world_(static_cast<std::uint32_t>(blocks.size() - 1)) {
    if (node_ranks == 1) wires_.within = wires_.between;
    if (node_ranks > 1 && node_ranks < world_) {
      node_ranks_ = node_ranks;
      nodes_ = world_ / node_ranks;
    } else {
      node_ranks_ = world_;
      nodes_ = 1;
    }
    std::uint64_t unit = wires_.within.group();
    // Whole groups of both wires: the least common multiple, which is below 2^64.
    if (nodes_ > 1)
      unit = unit / detail::common_divisor(unit, wires_.between.group()) * wires_.between.group();
    piece_ = std::max<std::uint64_t>(segment_bytes / 4 / unit, 1) * unit;
    for (std::uint32_t rank = 0; rank < world_; ++rank)
      most_ = std::max(most_, elements_of(rank));
    piece_ = std::min(piece_, most_);
  }

  /// Returns the bytes of memory that `run` takes: 0 with one rank.
  [[nodiscard]] std::uint64_t scratch_bytes() const noexcept {
    if (world_ == 1) return 0;
    const std::uint64_t floats = nodes_ == 1 ? 2 : 2 + std::uint64_t{nodes_};
    return 4 * floats * piece_ + (std::uint64_t{messages()} + 1) * message_bytes();
  }

  /// Sums. All ranks call it. @pre N is the number of ranks
  /// @param scratch  `scratch_bytes()`, aligned to a float; undefined afterwards.
  template <transport T, sum_ends Ends>
  [[nodiscard]] result<void> run(T& ranks, Ends& ends, std::span<std::byte> scratch,
                                 const collective_call& call) const;

  /// Returns what `rank` sends.
  [[nodiscard]] wire_traffic traffic(std::uint32_t node_ranks, rank_id rank) const noexcept {
    if (nodes_ > 1) return two_hop_reduce_traffic(blocks_, wires_, node_ranks_, rank);
    return reduce_traffic(blocks_, wires_.within, node_ranks == 0 ? world_ : node_ranks, rank);
  }

 private:
  [[nodiscard]] std::uint64_t elements_of(std::uint32_t rank) const noexcept {
    return blocks_[rank + 1] - blocks_[rank];
  }
  /// Returns how many elements of a block there are in the piece from `at` on.
  [[nodiscard]] std::uint64_t left(std::uint32_t rank, std::uint64_t at) const noexcept {
    const std::uint64_t all = elements_of(rank);
    return at >= all ? 0 : std::min(piece_, all - at);
  }
  [[nodiscard]] std::uint64_t message_bytes() const noexcept {
    const std::uint64_t one = wires_.within.bytes(piece_);
    return nodes_ == 1 ? one : std::max(one, wires_.between.bytes(piece_));
  }
  [[nodiscard]] std::uint32_t messages() const noexcept { return std::max(node_ranks_, nodes_); }

  std::span<const std::uint64_t> blocks_;
  hop_wires<W> wires_;
  std::uint32_t world_;
  std::uint32_t node_ranks_ = 1;
  std::uint32_t nodes_ = 1;
  std::uint64_t piece_ = 0;  // elements
  std::uint64_t most_ = 0;   // elements of the largest block
};

template <wire_codec W>
template <transport T, sum_ends Ends>
result<void> wired_sum<W>::run(T& ranks, Ends& ends, std::span<std::byte> scratch,
                               const collective_call& call) const {
  if (world_ == 1) return {};
  const std::uint32_t self = to_index(ranks.rank());
  const std::uint32_t node = self / node_ranks_;
  const std::uint32_t place = self % node_ranks_;
  const std::uint64_t message = message_bytes();
  // Floats first, so that they are aligned.
  auto* const floats = reinterpret_cast<float*>(scratch.data());
  const std::span<float> room(floats, piece_);
  const std::span<float> sum(floats + piece_, piece_);
  float* const partial = floats + 2 * piece_;
  std::byte* const out = scratch.data() + 4 * (nodes_ == 1 ? 2 : 2 + std::uint64_t{nodes_}) * piece_;
  std::byte* const in = out + message;
  const auto trade = [&](std::uint64_t sent, std::uint32_t to, std::byte* into, std::uint64_t got,
                         std::uint32_t from) {
    result<void> done;
    if (sent != 0 && got != 0) {
      done = ranks.exchange({out, sent}, rank_id{to}, {into, got}, rank_id{from}, call.tag, call.by);
    } else if (sent != 0) {
      done = ranks.send({out, sent}, rank_id{to}, call.tag, call.by);
    } else if (got != 0) {
      done = ranks.recv({into, got}, rank_id{from}, call.tag, call.by);
    }
    if (!done) ranks.revoke();
    return done;
  };
  // Adds the `count` messages in `in` by their number.
  const auto add_up = [&](const W& wire, std::uint32_t count, std::span<float> into) {
    for (std::uint32_t i = 0; i < count; ++i) {
      const std::span<float> one = i == 0 ? into : room.first(into.size());
      wire.decode(in + i * message, one);
      for (std::size_t k = 0; i != 0 && k < into.size(); ++k)
        into[k] += one[k];
    }
  };
  /// This rank's part of a block, as it is sent.
  const auto encode = [&](std::uint32_t rank, std::uint64_t at, std::byte* to) {
    const std::uint64_t count = left(rank, at);
    if (count == 0) return std::uint64_t{0};
    const float* const values = ends.values(rank, at, room.first(count));
    wires_.within.encode({values, count}, to);
    if (ends.keeps_errors()) {
      wires_.within.decode(to, sum.first(count));
      ends.keep_error(rank, at, values, sum.first(count));
    }
    return wires_.within.bytes(count);
  };
  for (std::uint64_t at = 0; at < most_; at += piece_) {
    for (std::uint32_t of = 0; of < nodes_; ++of) {
      const std::uint32_t mine = of * node_ranks_ + place;
      const std::uint64_t count = left(mine, at);
      static_cast<void>(encode(mine, at, in + place * message));
      for (std::uint32_t d = 1; d < node_ranks_; ++d) {
        const std::uint32_t to = (place + d) % node_ranks_;
        const std::uint32_t from = (place + node_ranks_ - d) % node_ranks_;
        const std::uint64_t sent = encode(of * node_ranks_ + to, at, out);
        if (auto done = trade(sent, node * node_ranks_ + to, in + from * message, wires_.within.bytes(count),
                              node * node_ranks_ + from);
            !done)
          return done;
      }
      add_up(wires_.within, node_ranks_,
             nodes_ == 1 ? sum.first(count) : std::span(partial + of * piece_, count));
    }
    const std::uint64_t count = left(self, at);
    if (nodes_ > 1) {
      if (count != 0) wires_.between.encode({partial + node * piece_, count}, in + node * message);
      for (std::uint32_t d = 1; d < nodes_; ++d) {
        const std::uint32_t to = (node + d) % nodes_;
        const std::uint32_t from = (node + nodes_ - d) % nodes_;
        const std::uint64_t theirs = left(to * node_ranks_ + place, at);
        if (theirs != 0) wires_.between.encode({partial + to * piece_, theirs}, out);
        if (auto done = trade(wires_.between.bytes(theirs), to * node_ranks_ + place, in + from * message,
                              wires_.between.bytes(count), from * node_ranks_ + place);
            !done)
          return done;
      }
      add_up(wires_.between, nodes_, sum.first(count));
    }
    if (count != 0) ends.sum(at, sum.first(count));
  }
  return {};
}

/// Returns the bytes of `collective_call::scratch` that an `all_reduce` of floats over a wire takes: 0 with
/// one rank.
/// @par Complexity      O(world).
/// @par Thread safety   pure.
template <wire_codec W>
[[nodiscard]] std::uint64_t all_reduce_scratch_bytes(std::uint64_t elements, rank_count world, const W& wire,
                                                     std::uint32_t segment_bytes) {
  if (to_number(world) == 1) return 0;
  const std::vector<std::uint64_t> blocks = even_blocks(elements, world);
  std::uint64_t gathered = 0;
  for (std::size_t i = 0; i + 1 < blocks.size(); ++i)
    gathered += wire.bytes(blocks[i + 1] - blocks[i]);
  const wired_sum<W> sum(blocks, hop_wires<W>{wire, wire}, 0, segment_bytes);
  return std::max(gathered, sum.scratch_bytes());
}

/// Returns the bytes that `rank` sends in it: to each other rank its block, and the rank's own sum.
/// Otherwise as `all_reduce_scratch_bytes`. @pre rank < world
template <wire_codec W>
[[nodiscard]] std::uint64_t all_reduce_sent_bytes(std::uint64_t elements, rank_count world, const W& wire,
                                                  rank_id rank) {
  const std::vector<std::uint64_t> blocks = even_blocks(elements, world);
  const std::uint32_t node = to_number(world);
  return reduce_traffic(blocks, wire, node, rank).total() + gather_traffic(blocks, wire, node, rank).total();
}

}  // namespace v0
}  // namespace llmmem
