/// @file
/// Hierarchical ZeRO: one shard for each rank of the world, and a second copy in shards on every node.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/sharding/concepts.hpp>
#include <llmmem/sharding/element_runs.hpp>
#include <llmmem/sharding/ids.hpp>
#include <llmmem/sharding/tensor_shape.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The weights of ZeRO++'s hpZ (Wang et al. 2023, arXiv 2306.10209): every rank owns a *primary* shard, one
/// of the world's, and holds a *secondary* one, one of its node's. The ranks of a node hold all weights
/// between them, so that the gather of the backward pass crosses no link between nodes. That costs 1/node
/// size of the weights on each rank, compared with 1/world for plain ZeRO 3.
///
/// `owned` is the primary, `local` the secondary, and a primary is within the secondary of its rank: the
/// optimizer's updates are sent to the other nodes only. To that end the flat space of all tensors is dealt
/// out by place in the node first, and by node second. With 2 nodes of 2 ranks the primaries are in the order
/// of ranks 0, 2, 1, 3, and the secondaries are 0 + 2 and 1 + 3.
///
/// If the last node is smaller, it holds all weights in fewer, larger secondaries, and its primaries, which
/// are as large as all others, are spread evenly among them. A secondary's ends are then moved as far as
/// needed to keep primaries intact: it differs from an even share by at most one primary in every world of up
/// to 40 ranks, which the tests cover.
///
/// @par Complexity      construction O(tensors + world log world), `local` and `owned` O(1), `owner` O(log
///                      world).
/// @par Thread safety   as a plain value.
class hierarchical_zero {
 public:
  /// @param node_size  ranks r with equal r / node_size share a node; the last may have fewer.
  /// @throws argument_error  when `world` or `node_size` is 0.
  /// @throws length_error    when the elements together pass 2^63 - 1.
  hierarchical_zero(std::span<const tensor_facts> tensors, rank_count world, rank_count node_size)
      : offsets_(1, 0), node_size_(std::min(to_number(node_size), to_number(world))) {
    detail::check_world(world, tensors.size(), "hierarchical_zero");
    if (to_number(node_size) == 0) {
      throw argument_error("hierarchical_zero: nodes of 0 ranks; a node has at least one");
    }
    shapes_.reserve(tensors.size());
    offsets_.reserve(tensors.size() + 1);
    for (const tensor_facts& each : tensors) {
      shapes_.push_back(each.shape);
      offsets_.push_back(
          checked_add(offsets_.back(), each.shape.elements(), "hierarchical_zero: elements of all tensors"));
    }
    deal_primaries(to_number(world));
    cut_secondaries();
  }

  [[nodiscard]] rank_count world() const noexcept {
    return rank_count{static_cast<std::uint32_t>(primaries_.size())};
  }
  [[nodiscard]] std::uint32_t tensors() const noexcept { return static_cast<std::uint32_t>(shapes_.size()); }
  [[nodiscard]] tensor_shape shape(tensor_id tensor) const noexcept { return shapes_[to_index(tensor)]; }

  /// Returns the part of the secondary shard in `tensor`.
  [[nodiscard]] element_runs local(tensor_id tensor, rank_id rank) const noexcept {
    return within(tensor, secondaries_[to_index(rank)]);
  }
  /// Returns the part of the primary shard in `tensor`.
  [[nodiscard]] element_runs owned(tensor_id tensor, rank_id rank) const noexcept {
    return within(tensor, primaries_[to_index(rank)]);
  }
  [[nodiscard]] rank_id owner(tensor_id tensor, std::uint64_t element) const noexcept {
    const std::uint64_t at = offsets_[to_index(tensor)] + element;
    const auto behind = std::ranges::upper_bound(in_order_, at, {},
                                                 [&](std::uint32_t rank) { return primaries_[rank].first; });
    return rank_id{*(behind - 1)};
  }
  /// True if every node is one rank: each holds all.
  [[nodiscard]] bool is_replicated(tensor_id /*tensor*/) const noexcept { return node_size_ == 1; }

  /// Returns the elements of the flat space that `rank` owns.
  [[nodiscard]] index_range primary(rank_id rank) const noexcept { return primaries_[to_index(rank)]; }
  /// Returns the elements of the flat space that `rank` holds.
  [[nodiscard]] index_range secondary(rank_id rank) const noexcept { return secondaries_[to_index(rank)]; }

  /// Returns the number of nodes; the last may be smaller.
  [[nodiscard]] std::uint32_t nodes() const noexcept { return node_of(rank_id{to_number(world()) - 1}) + 1; }
  /// Returns the node of a rank.
  [[nodiscard]] std::uint32_t node_of(rank_id rank) const noexcept { return to_index(rank) / node_size_; }
  /// Returns the ranks of a node: `count` of them from `first`.
  [[nodiscard]] index_range ranks_of(std::uint32_t node) const noexcept {
    const std::uint64_t first = std::uint64_t{node} * node_size_;
    return {first, std::min<std::uint64_t>(node_size_, primaries_.size() - first)};
  }

 private:
  /// Returns the flat space's elements x part / parts, rounded down. Unlike `even_share`, it cuts a node's
  /// parts at places where it also cuts the world's parts, if these are a multiple in number.
  [[nodiscard]] std::uint64_t cut(std::uint64_t part, std::uint64_t parts) const noexcept {
    return offsets_.back() / parts * part + offsets_.back() % parts * part / parts;
  }

  /// Deals out primaries: rank `l` of a node of `s` has its primary at (l + 1/2) / s of the flat space; ties
  /// go by node.
  void deal_primaries(std::uint32_t world) {
    const std::uint32_t last_size = world % node_size_ == 0 ? node_size_ : world % node_size_;
    const std::uint32_t first_of_last = world - last_size;
    in_order_.resize(world);
    for (std::uint32_t rank = 0; rank < world; ++rank)
      in_order_[rank] = rank;
    std::ranges::sort(in_order_, [&](std::uint32_t a, std::uint32_t b) {
      const std::uint64_t size_a = a < first_of_last ? node_size_ : last_size;
      const std::uint64_t size_b = b < first_of_last ? node_size_ : last_size;
      const std::uint64_t at_a = (std::uint64_t{2} * (a % node_size_) + 1) * size_b;
      const std::uint64_t at_b = (std::uint64_t{2} * (b % node_size_) + 1) * size_a;
      return at_a != at_b ? at_a < at_b : a < b;
    });
    primaries_.resize(world);
    for (std::uint32_t place = 0; place < world; ++place) {
      const std::uint64_t begin = cut(place, world);
      primaries_[in_order_[place]] = {begin, cut(std::uint64_t{place} + 1, world) - begin};
    }
  }

  /// Cuts each node's copy where an even cut would be, or as close to it as keeps the primaries intact.
  void cut_secondaries() {
    secondaries_.resize(primaries_.size());
    for (std::uint32_t node = 0; node < nodes(); ++node) {
      const index_range ranks = ranks_of(node);
      std::uint64_t begin = 0;
      for (std::uint64_t i = 0; i < ranks.count; ++i) {
        std::uint64_t end = offsets_.back();
        if (i + 1 < ranks.count) {
          const index_range& mine = primaries_[ranks.first + i];
          const index_range& next = primaries_[ranks.first + i + 1];
          end = std::clamp(cut(i + 1, ranks.count), mine.first + mine.count, next.first);
        }
        secondaries_[ranks.first + i] = {begin, end - begin};
        begin = end;
      }
    }
  }

  [[nodiscard]] element_runs within(tensor_id tensor, const index_range& range) const noexcept {
    const std::uint64_t begins = offsets_[to_index(tensor)];
    const std::uint64_t first = std::max(begins, range.first);
    const std::uint64_t last =
        std::min(offsets_[std::size_t{to_index(tensor)} + 1], range.first + range.count);
    if (first >= last) return {};
    return element_runs::flat_range(first - begins, last - first);
  }

  std::vector<tensor_shape> shapes_;
  std::vector<std::uint64_t> offsets_;  // of tensors in the flat space, and the end of the last one
  std::uint32_t node_size_;
  std::vector<std::uint32_t> in_order_;  // ranks in the order of their primaries
  std::vector<index_range> primaries_;   // by rank
  std::vector<index_range> secondaries_;
};

static_assert(partition<hierarchical_zero>);

}  // namespace v0
}  // namespace llmmem
