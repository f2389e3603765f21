/// @file
/// `fetch_shares`: from which of its holders each block comes.
#pragma once

#include <llmmem/comm/ranks.hpp>
#include <llmmem/config.hpp>
#include <llmmem/offload/load_choice.hpp>
#include <llmmem/pool/kv_pool_types.hpp>
#include <llmmem/transfer/link_model.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The holders of a block, by their place among the sources of a `fetch_shares`. The first of equal ones is
/// preferred.
struct block_sources {
  std::array<std::uint32_t, pool::max_holders> of{};
  std::uint32_t count = 0;
  std::uint64_t block_bytes = 0;

  friend constexpr bool operator==(const block_sources&, const block_sources&) noexcept = default;
};

/// Shares blocks among the nodes that hold them, so that the last one arrives as early as possible.
///
/// Blocks are added one after another. A new block goes to the source that has it first, where blocks of
/// equal holders and size may move on to another of their holders to make way: the shortest such path to the
/// source that would end first. For blocks of one size no sharing ends earlier: the used places of the
/// sources are a transversal matroid, in which the greedy choice is the best (Edmonds and Fulkerson, 1965).
/// Blocks of another size do not make way, so that the sharing of mixed sizes is an upper bound.
///
/// @par Complexity      `add` O(different sets of holders); allocates.
/// @par Thread safety   none.
class fetch_shares {
 public:
  /// @param inward  the link that all blocks cross as well
  explicit fetch_shares(const link_model& inward = {}) noexcept : inward_{.link = inward} {}

  /// Returns the place of a node among the sources; the first call names its link.
  std::uint32_t source(seat_id seat, const link_model& link) {
    for (std::size_t i = 0; i < sources_.size(); ++i) {
      if (sources_[i].seat == seat) return static_cast<std::uint32_t>(i);
    }
    sources_.push_back({.seat = seat, .link = link});
    steps_.resize(sources_.size());
    reached_.reserve(sources_.size());
    return static_cast<std::uint32_t>(sources_.size() - 1);
  }
  /// Counts bytes that the source still sends for earlier requests.
  void expect(std::uint32_t source, std::uint64_t bytes) noexcept {
    sources_[source].before = saturating_add(sources_[source].before, bytes);
    inward_.before = saturating_add(inward_.before, bytes);
  }
  /// Returns how long those bytes take.
  [[nodiscard]] std::uint64_t wait_ns() const noexcept {
    std::uint64_t out = link_ns(inward_.link, inward_.before);
    for (const source_state& each : sources_)
      out = std::max(out, link_ns(each.link, each.before));
    return out;
  }
  /// Forgets the bytes that are expected: they have come.
  void settle() noexcept {
    inward_.before = 0;
    for (source_state& each : sources_)
      each.before = 0;
  }
  /// Forgets the blocks.
  void clear() noexcept {
    kinds_.clear();
    inward_.bytes = 0;
    for (source_state& each : sources_)
      each.bytes = 0;
  }
  /// @pre `block.count` is not 0.
  void add(const block_sources& block) {
    kind& own = kind_of(block);
    reached_.clear();
    for (source_step& each : steps_)
      each = {};
    for (std::uint32_t i = 0; i < block.count; ++i)
      reach(block.of[i], {.is_reached = true});
    // NOLINTNEXTLINE(modernize-loop-convert): the list grows while it is read
    for (std::size_t next = 0; next < reached_.size(); ++next) {
      const std::uint32_t from = reached_[next];
      for (std::size_t k = 0; k < kinds_.size(); ++k) {
        const kind& each = kinds_[k];
        if (each.block.block_bytes != block.block_bytes || each.share_of(from) == 0) continue;
        for (std::uint32_t i = 0; i < each.block.count; ++i)
          reach(each.block.of[i], {.kind = k, .from = from, .is_reached = true, .is_moved = true});
      }
    }
    std::uint32_t best = reached_[0];
    for (const std::uint32_t each : reached_) {
      if (end_with(each, block.block_bytes) < end_with(best, block.block_bytes)) best = each;
    }
    sources_[best].bytes = saturating_add(sources_[best].bytes, block.block_bytes);
    inward_.bytes = saturating_add(inward_.bytes, block.block_bytes);
    while (steps_[best].is_moved) {
      const source_step& step = steps_[best];
      kinds_[step.kind].change(best, 1);
      kinds_[step.kind].change(step.from, -1);
      best = step.from;
    }
    own.change(best, 1);
  }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return inward_.bytes; }
  /// Returns when the last added block is here; 0 if there is none.
  [[nodiscard]] std::uint64_t arrival_ns() const noexcept {
    std::uint64_t out = inward_.end();
    for (const source_state& each : sources_)
      out = std::max(out, each.end());
    return out;
  }
  /// Takes one of the added blocks of these sources out, and returns from which node it comes: from one after
  /// another, so that consecutive blocks come from the same. `no_seat` if none is left.
  [[nodiscard]] seat_id take(const block_sources& block) noexcept {
    for (kind& each : kinds_) {
      if (each.block != block) continue;
      for (std::uint32_t i = 0; i < block.count; ++i) {
        if (each.shares[i] == 0) continue;
        --each.shares[i];
        return sources_[block.of[i]].seat;
      }
    }
    return no_seat;
  }

 private:
  struct source_state {
    seat_id seat = no_seat;
    link_model link{};
    std::uint64_t before = 0;
    std::uint64_t bytes = 0;  // of added blocks
    [[nodiscard]] std::uint64_t end() const noexcept {
      return bytes == 0 ? 0 : link_ns(link, saturating_add(before, bytes));
    }
  };
  /// Blocks of the same holders and size: how many come from each.
  struct kind {
    block_sources block{};
    std::array<std::uint32_t, pool::max_holders> shares{};

    [[nodiscard]] std::uint32_t share_of(std::uint32_t source) const noexcept {
      for (std::uint32_t i = 0; i < block.count; ++i) {
        if (block.of[i] == source) return shares[i];
      }
      return 0;
    }
    void change(std::uint32_t source, int by) noexcept {
      for (std::uint32_t i = 0; i < block.count; ++i) {
        if (block.of[i] == source) shares[i] += static_cast<std::uint32_t>(by);
      }
    }
  };
  /// How a source is reached: a block of a kind moves to it from another source.
  struct source_step {
    std::size_t kind = 0;
    std::uint32_t from = 0;
    bool is_reached = false;
    bool is_moved = false;
  };

  kind& kind_of(const block_sources& block) {
    for (std::size_t i = kinds_.size(); i-- > 0;) {
      if (kinds_[i].block == block) return kinds_[i];
    }
    return kinds_.emplace_back(kind{.block = block});
  }
  void reach(std::uint32_t source, const source_step& by) noexcept {
    if (steps_[source].is_reached) return;
    steps_[source] = by;
    reached_.push_back(source);  // reserved
  }
  [[nodiscard]] std::uint64_t end_with(std::uint32_t source, std::uint64_t bytes) const noexcept {
    const source_state& each = sources_[source];
    return link_ns(each.link, saturating_add(each.before, saturating_add(each.bytes, bytes)));
  }

  source_state inward_;
  std::vector<source_state> sources_;
  std::vector<kind> kinds_;
  std::vector<source_step> steps_;  // by source, of one `add`
  std::vector<std::uint32_t> reached_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
