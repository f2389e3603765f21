/// @file
/// The bodies of the collectives.
#pragma once

#include <llmmem/comm/collectives.hpp>
#include <llmmem/detail/named_range.hpp>

#include <algorithm>
#include <cstring>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// A collective in progress, from one rank's point of view.
template <transport T>
class collective {
 public:
  collective(T& ranks, const collective_call& call)
      : ranks_(&ranks), call_(&call), world_(to_number(ranks.world())), self_(to_index(ranks.rank())) {}

  [[nodiscard]] std::uint32_t world() const noexcept { return world_; }
  [[nodiscard]] std::uint32_t self() const noexcept { return self_; }
  [[nodiscard]] std::uint32_t segment_bytes(std::uint32_t element_bytes) const noexcept {
    return std::max(call_->segment_bytes / element_bytes, 1U) * element_bytes;
  }
  /// Returns the rank that is `places` ahead in the ring.
  [[nodiscard]] std::uint32_t ahead(std::uint32_t places) const noexcept { return (self_ + places) % world_; }
  [[nodiscard]] std::uint32_t behind(std::uint32_t places) const noexcept {
    return (self_ + world_ - places % world_) % world_;
  }

  [[nodiscard]] result<void> send(std::span<const std::byte> bytes, std::uint32_t to) {
    return ended(ranks_->send(bytes, rank_id{to}, call_->tag, call_->by));
  }
  [[nodiscard]] result<void> recv(std::span<std::byte> bytes, std::uint32_t from) {
    return ended(ranks_->recv(bytes, rank_id{from}, call_->tag, call_->by));
  }
  [[nodiscard]] result<void> exchange(std::span<const std::byte> out, std::uint32_t to,
                                      std::span<std::byte> into, std::uint32_t from) {
    return ended(ranks_->exchange(out, rank_id{to}, into, rank_id{from}, call_->tag, call_->by));
  }
  /// Blocks may differ in size, so one may have more pieces than the other. A piece without bytes is not
  /// sent.
  [[nodiscard]] result<void> exchange_pieces(std::span<const std::byte> out, std::uint32_t to,
                                             std::span<std::byte> into, std::uint32_t from) {
    if (out.empty() && into.empty()) return {};
    if (out.empty()) return recv(into, from);
    if (into.empty()) return send(out, to);
    return exchange(out, to, into, from);
  }
  [[nodiscard]] static failure misfit(std::uint64_t wanted, std::uint64_t found) noexcept {
    return {.code = errc::size_mismatch, .wanted = wanted, .found = found, .where = "collective"};
  }
  /// Returns success if nodes of as many ranks divide the world.
  [[nodiscard]] result<void> fit_nodes(std::uint32_t node_ranks) const noexcept {
    if (node_ranks == 0 || world_ % node_ranks != 0) return misfit(world_, node_ranks);
    return {};
  }
  /// Returns success if there is one block per rank, in order and of whole elements, and the blocks make up
  /// `bytes`.
  [[nodiscard]] result<void> fit(std::span<const std::uint64_t> blocks, std::uint64_t bytes,
                                 std::uint32_t element_bytes) const noexcept {
    if (blocks.size() != std::size_t{world_} + 1) return misfit(std::size_t{world_} + 1, blocks.size());
    if (blocks.front() != 0) return misfit(0, blocks.front());
    if (blocks.back() != bytes) return misfit(bytes, blocks.back());
    for (std::size_t i = 0; i + 1 < blocks.size(); ++i) {
      if (blocks[i] > blocks[i + 1]) return misfit(blocks[i], blocks[i + 1]);
    }
    for (const std::uint64_t each : blocks) {
      if (each % element_bytes != 0) return misfit(element_bytes, each);
    }
    return {};
  }

 private:
  [[nodiscard]] result<void> ended(const result<void>& done) {
    if (!done) ranks_->revoke();
    return done;
  }

  T* ranks_;
  const collective_call* call_;
  std::uint32_t world_;
  std::uint32_t self_;
};

/// Returns block `rank` of `data`, as divided by `blocks`.
template <class Byte>
[[nodiscard]] std::span<Byte> block_of(std::span<Byte> all, std::span<const std::uint64_t> blocks,
                                       std::uint32_t rank) noexcept {
  return all.subspan(blocks[rank], blocks[std::size_t{rank} + 1] - blocks[rank]);
}

/// Returns bytes `at` to `at + most`, or as many as exist.
template <class Byte>
[[nodiscard]] std::span<Byte> piece_of(std::span<Byte> all, std::uint64_t at, std::uint64_t most) noexcept {
  if (at >= all.size()) return {};
  return all.subspan(at, std::min<std::uint64_t>(most, all.size() - at));
}

/// Exchanges blocks of any size in pieces, so that data is still in the processor's caches when it is used.
template <transport T>
result<void> exchange_blocks(collective<T>& all, std::span<const std::byte> out, std::uint32_t to,
                             std::span<std::byte> into, std::uint32_t from, std::uint32_t segment_bytes) {
  const std::uint64_t piece = std::max(segment_bytes, 1U);
  for (std::uint64_t at = 0; at < std::max(out.size(), into.size()); at += piece) {
    const auto goes = piece_of(out, at, piece);
    if (auto done = all.exchange_pieces(goes, to, piece_of(into, at, piece), from); !done) return done;
  }
  return {};
}

[[nodiscard]] inline std::uint64_t largest_block(std::span<const std::uint64_t> blocks) noexcept {
  std::uint64_t most = 0;
  for (std::size_t i = 0; i + 1 < blocks.size(); ++i)
    most = std::max(most, blocks[i + 1] - blocks[i]);
  return most;
}

/// Adds the `count` pieces of `into`'s length in `parts`, with `into` itself as the piece of rank `self`, in
/// the order of ranks. The contents of `parts` are undefined afterwards.
inline void combine_by_rank(std::span<std::byte> into, std::byte* parts, std::uint32_t count,
                            std::uint32_t self, const reduce_op& op) noexcept {
  const std::size_t bytes = into.size();
  if (bytes == 0) return;
  const auto part = [&](std::uint32_t rank) {
    return rank == self ? into.data() : parts + std::size_t{rank} * bytes;
  };
  // The sum accumulates in the place of the first part.
  for (std::uint32_t rank = 1; rank < count; ++rank)
    op.combine(part(0), part(rank), bytes);
  if (self != 0) std::memcpy(into.data(), part(0), bytes);
}

template <transport T>
result<void> direct_reduce_scatter(collective<T>& all, std::span<std::byte> data,
                                   std::span<const std::uint64_t> blocks, const reduce_op& op,
                                   collective_call& call) {
  const std::uint64_t segment =
      std::min<std::uint64_t>(all.segment_bytes(op.element_bytes), largest_block(blocks));
  call.scratch.resize(std::size_t{all.world()} * segment);
  const std::span<std::byte> own = block_of(data, blocks, all.self());
  for (std::uint64_t at = 0; at < largest_block(blocks); at += segment) {
    const std::span<std::byte> mine = piece_of(own, at, segment);
    for (std::uint32_t d = 1; d < all.world(); ++d) {
      const auto out = piece_of(block_of(data, blocks, all.ahead(d)), at, segment);
      const std::span<std::byte> in(call.scratch.data() + all.behind(d) * mine.size(), mine.size());
      if (auto done = all.exchange(out, all.ahead(d), in, all.behind(d)); !done) return done;
    }
    combine_by_rank(mine, call.scratch.data(), all.world(), all.self(), op);
  }
  return {};
}

template <transport T>
result<void> ring_reduce_scatter(collective<T>& all, std::span<std::byte> data,
                                 std::span<const std::uint64_t> blocks, const reduce_op& op,
                                 collective_call& call) {
  const std::uint64_t segment =
      std::min<std::uint64_t>(all.segment_bytes(op.element_bytes), largest_block(blocks));
  call.scratch.resize(segment);
  for (std::uint32_t d = 1; d < all.world(); ++d) {
    // The incoming data is the sum of the ranks before. This rank adds its part and sends the sum on; it ends
    // at the part's owner.
    const std::span<std::byte> out = block_of(data, blocks, all.behind(d));
    const std::span<std::byte> into = block_of(data, blocks, all.behind(d + 1));
    for (std::uint64_t at = 0; at < std::max(out.size(), into.size()); at += segment) {
      const auto mine = piece_of(into, at, segment);
      const std::span<std::byte> in(call.scratch.data(), mine.size());
      const std::span<const std::byte> goes = piece_of(out, at, segment);
      if (auto done = all.exchange_pieces(goes, all.ahead(1), in, all.behind(1)); !done) return done;
      // The sum so far, then this rank's part: this gives the order of the ring.
      op.combine(in.data(), mine.data(), mine.size());
      if (!mine.empty()) std::memcpy(mine.data(), in.data(), mine.size());
    }
  }
  return {};
}

/// All to all, and every rank adds.
template <transport T>
result<void> reduce_everywhere(collective<T>& all, std::span<std::byte> data, const reduce_op& op,
                               collective_call& call) {
  call.scratch.resize(std::size_t{all.world()} * data.size());
  for (std::uint32_t d = 1; d < all.world(); ++d) {
    const std::span<std::byte> in(call.scratch.data() + all.behind(d) * data.size(), data.size());
    if (auto done = all.exchange(data, all.ahead(d), in, all.behind(d)); !done) return done;
  }
  combine_by_rank(data, call.scratch.data(), all.world(), all.self(), op);
  return {};
}

template <transport T>
result<void> tree_reduce(collective<T>& all, std::span<std::byte> data, const reduce_op& op,
                         collective_call& call) {
  call.scratch.resize(data.size());
  for (std::uint32_t step = 1; step < all.world(); step *= 2) {
    if (all.self() % (2 * step) != 0) return all.send(data, all.self() - step);
    if (all.self() + step >= all.world()) continue;
    if (auto done = all.recv(call.scratch, all.self() + step); !done) return done;
    op.combine(data.data(), call.scratch.data(), data.size());
  }
  return {};
}

/// One hop of an all-to-all: `count` ranks, of which this one is `self`, exchange bundles of `bundle` bytes.
struct hop_shape {
  std::uint32_t count = 1;
  std::uint32_t self = 0;
  std::size_t bundle = 0;
};

/// @param rank_of  the rank of each of them.
template <transport T, class RankOf>
result<void> hop(collective<T>& all, std::span<const std::byte> out, std::span<std::byte> into, hop_shape of,
                 const RankOf& rank_of) {
  for (std::uint32_t d = 0; d < of.count; ++d) {
    const std::uint32_t to = (of.self + d) % of.count;
    const std::uint32_t from = (of.self + of.count - d) % of.count;
    const auto sent = out.subspan(to * of.bundle, of.bundle);
    const auto got = into.subspan(from * of.bundle, of.bundle);
    if (d == 0) {
      if (of.bundle != 0) std::memcpy(got.data(), sent.data(), of.bundle);
    } else if (auto done = all.exchange(sent, rank_of(to), got, rank_of(from)); !done) {
      return done;
    }
  }
  return {};
}

}  // namespace detail

[[nodiscard]] inline std::vector<std::uint64_t> even_blocks(std::uint64_t bytes, rank_count world,
                                                            std::uint32_t element_bytes) {
  const std::uint64_t elements = bytes / element_bytes;
  const std::uint64_t ranks = to_number(world);
  std::vector<std::uint64_t> blocks(ranks + 1, bytes);
  for (std::uint64_t i = 0; i < ranks; ++i)
    blocks[i] = (elements / ranks * i + std::min(i, elements % ranks)) * element_bytes;
  return blocks;
}

template <transport T>
result<void> broadcast(T& ranks, std::span<std::byte> bytes, rank_id root, const collective_call& call) {
  const detail::named_range range("broadcast", bytes.size());
  detail::collective all(ranks, call);
  if (to_index(root) >= all.world()) return all.misfit(all.world(), to_index(root));
  // Places count from the root. A rank that has the data sends it on, over ever shorter distances.
  const std::uint32_t place = all.behind(to_index(root));
  std::uint32_t step = 1;
  while (step < all.world() && place % (2 * step) == 0)
    step *= 2;
  if (place != 0) {
    if (auto done = all.recv(bytes, (all.self() + all.world() - step) % all.world()); !done) return done;
  }
  for (step /= 2; step > 0; step /= 2) {
    if (place + step >= all.world()) continue;
    if (auto done = all.send(bytes, all.ahead(step)); !done) return done;
  }
  return {};
}

template <transport T>
result<void> all_gather(T& ranks, std::span<std::byte> all_bytes, std::span<const std::uint64_t> blocks,
                        const collective_call& call) {
  const detail::named_range range("all_gather", all_bytes.size());
  detail::collective all(ranks, call);
  if (auto fits = all.fit(blocks, all_bytes.size(), 1); !fits) return fits;
  const bool is_ring = call.algorithm == reduce_algorithm::ring;
  for (std::uint32_t d = 1; d < all.world(); ++d) {
    // `direct`: each rank sends its own block to all. `ring`: it sends the block that came last.
    const auto out = detail::block_of(all_bytes, blocks, is_ring ? all.behind(d - 1) : all.self());
    const auto into = detail::block_of(all_bytes, blocks, all.behind(d));
    const std::uint32_t to = is_ring ? all.ahead(1) : all.ahead(d);
    const std::uint32_t from = is_ring ? all.behind(1) : all.behind(d);
    if (auto done = detail::exchange_blocks(all, out, to, into, from, call.segment_bytes); !done) return done;
  }
  return {};
}

template <transport T>
result<void> two_hop_all_gather(T& ranks, std::span<std::byte> all_bytes,
                                std::span<const std::uint64_t> blocks, std::uint32_t node_ranks,
                                const collective_call& call) {
  detail::collective all(ranks, call);
  const std::uint32_t world = all.world();
  if (auto even = all.fit_nodes(node_ranks); !even) return even;
  if (auto fits = all.fit(blocks, all_bytes.size(), 1); !fits) return fits;
  const std::uint32_t nodes = world / node_ranks;
  const std::uint32_t node = all.self() / node_ranks;
  const std::uint32_t place = all.self() % node_ranks;
  const auto trade = [&](std::uint32_t sent, std::uint32_t to, std::uint32_t got, std::uint32_t from) {
    return detail::exchange_blocks(all, detail::block_of(all_bytes, blocks, sent), to,
                                   detail::block_of(all_bytes, blocks, got), from, call.segment_bytes);
  };
  for (std::uint32_t d = 1; d < nodes; ++d) {
    const std::uint32_t to = (node + d) % nodes * node_ranks + place;
    const std::uint32_t from = (node + nodes - d) % nodes * node_ranks + place;
    if (auto done = trade(all.self(), to, from, from); !done) return done;
  }
  for (std::uint32_t d = 1; d < node_ranks; ++d) {
    const std::uint32_t to = (place + d) % node_ranks;
    const std::uint32_t from = (place + node_ranks - d) % node_ranks;
    const std::uint32_t first = node * node_ranks;
    for (std::uint32_t of = 0; of < world; of += node_ranks) {
      if (auto done = trade(of + place, first + to, of + from, first + from); !done) return done;
    }
  }
  return {};
}

template <transport T>
result<void> reduce_scatter(T& ranks, std::span<std::byte> data, std::span<const std::uint64_t> blocks,
                            const reduce_op& op, collective_call& call) {
  const detail::named_range range("reduce_scatter", data.size());
  detail::collective all(ranks, call);
  if (auto fits = all.fit(blocks, data.size(), op.element_bytes); !fits) return fits;
  if (all.world() == 1) return {};
  if (call.algorithm == reduce_algorithm::ring)
    return detail::ring_reduce_scatter(all, data, blocks, op, call);
  return detail::direct_reduce_scatter(all, data, blocks, op, call);
}

template <transport T>
result<void> all_reduce(T& ranks, std::span<std::byte> data, const reduce_op& op, collective_call& call) {
  const detail::named_range range("all_reduce", data.size());
  detail::collective all(ranks, call);
  if (data.size() % op.element_bytes != 0) return all.misfit(op.element_bytes, data.size());
  if (all.world() == 1 || data.empty()) return {};
  if (call.algorithm == reduce_algorithm::tree) {
    if (auto done = detail::tree_reduce(all, data, op, call); !done) return done;
    return broadcast(ranks, data, rank_id{0}, call);
  }
  if (call.algorithm == reduce_algorithm::direct && data.size() * (all.world() - 1) <= call.small_bytes)
    return detail::reduce_everywhere(all, data, op, call);
  const std::vector<std::uint64_t> blocks = even_blocks(data.size(), ranks.world(), op.element_bytes);
  if (auto done = reduce_scatter(ranks, data, blocks, op, call); !done) return done;
  return all_gather(ranks, data, blocks, call);
}

template <transport T>
result<void> all_to_all(T& ranks, std::span<const std::byte> out, std::span<const std::uint64_t> out_blocks,
                        std::span<std::byte> into, std::span<const std::uint64_t> into_blocks,
                        const collective_call& call) {
  detail::collective all(ranks, call);
  if (auto fits = all.fit(out_blocks, out.size(), 1); !fits) return fits;
  if (auto fits = all.fit(into_blocks, into.size(), 1); !fits) return fits;
  const auto own = detail::block_of(out, out_blocks, all.self());
  const auto kept = detail::block_of(into, into_blocks, all.self());
  if (own.size() != kept.size()) return all.misfit(own.size(), kept.size());
  if (!own.empty()) std::memcpy(kept.data(), own.data(), own.size());
  for (std::uint32_t d = 1; d < all.world(); ++d) {
    const auto goes = detail::block_of(out, out_blocks, all.ahead(d));
    const auto comes = detail::block_of(into, into_blocks, all.behind(d));
    if (auto done = all.exchange(goes, all.ahead(d), comes, all.behind(d)); !done) return done;
  }
  return {};
}

template <transport T>
result<void> two_hop_all_to_all(T& ranks, std::span<const std::byte> out, std::span<std::byte> into,
                                std::uint32_t node_ranks, collective_call& call) {
  detail::collective all(ranks, call);
  const std::uint32_t world = all.world();
  if (auto even = all.fit_nodes(node_ranks); !even) return even;
  if (out.size() != into.size()) return all.misfit(out.size(), into.size());
  if (out.size() % world != 0) return all.misfit(world, out.size());
  const std::size_t block = out.size() / world;
  const std::uint32_t nodes = world / node_ranks;
  const std::uint32_t node = all.self() / node_ranks;
  const std::uint32_t place = all.self() % node_ranks;
  // Three areas of n bytes: the first hop's input, its output, and the second hop's input.
  call.scratch.resize(3 * out.size());
  const std::span<std::byte> goes(call.scratch.data(), out.size());
  const std::span<std::byte> came(call.scratch.data() + out.size(), out.size());
  const std::span<std::byte> goes_on(call.scratch.data() + 2 * out.size(), out.size());
  const auto copy = [block](std::byte* to, const std::byte* from) {
    if (block != 0) std::memcpy(to, from, block);
  };
  // Within the node: sends to place p everything for place p of any node.
  for (std::uint32_t p = 0; p < node_ranks; ++p) {
    for (std::uint32_t n = 0; n < nodes; ++n)
      copy(goes.data() + (p * nodes + n) * block, out.data() + (n * node_ranks + p) * block);
  }
  const auto within = [&](std::uint32_t p) { return node * node_ranks + p; };
  if (auto done = detail::hop(all, goes, came, {node_ranks, place, block * nodes}, within); !done)
    return done;
  // Between nodes: sends to node n everything that the places of this node have for it.
  for (std::uint32_t n = 0; n < nodes; ++n) {
    for (std::uint32_t p = 0; p < node_ranks; ++p)
      copy(goes_on.data() + (n * node_ranks + p) * block, came.data() + (p * nodes + n) * block);
  }
  const auto across = [&](std::uint32_t n) { return n * node_ranks + place; };
  return detail::hop(all, goes_on, into, {nodes, node, block * node_ranks}, across);
}

template <transport T>
result<void> barrier(T& ranks, const collective_call& call) {
  detail::collective all(ranks, call);
  for (std::uint32_t step = 1; step < all.world(); step *= 2) {
    if (auto done = all.exchange({}, all.ahead(step), {}, all.behind(step)); !done) return done;
  }
  return {};
}

}  // namespace v0
}  // namespace llmmem
