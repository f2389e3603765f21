/// @file
/// Free blocks that several threads take and return concurrently, without locks.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/atomic_array.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/error.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/paging/ids.hpp>

#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace llmmem {
inline namespace v0 {

/// The part of a `sharded_free_list` that a thread uses first: for example the thread's number. Any number is
/// valid; threads with the same number contend more often, and lose nothing else.
enum class shard_id : std::uint32_t {};

/// A hook called between two atomic steps of a lock-free operation. The default does nothing and costs
/// nothing; a test's hook yields, so that another thread can run in between.
template <class S>
concept interleaving = requires {
  { S::point() } noexcept;
};

namespace paging {

/// The hook that does nothing.
struct uninterrupted {
  static void point() noexcept {}
};

}  // namespace paging

using uninterrupted [[deprecated("its name is paging::uninterrupted")]] = paging::uninterrupted;

static_assert(interleaving<paging::uninterrupted>);

/// The free blocks of several threads: a stack per shard, and one count over all of them.
///
/// `try_take` first reserves the whole batch on the count, or nothing, then collects it: from its own shard
/// first, then from the other shards in order. Because blocks are pushed before they are counted, reserved
/// blocks can always be found. A refusal is therefore exact: at that moment fewer blocks were free. No call
/// takes blocks and puts them back.
///
/// Each stack links its blocks by index. Its head carries a number that rises with every change, so an
/// exchange succeeds only if the head has not changed in between (Treiber 1986, with IBM's tag). The number
/// wraps after 2^32 changes of one shard, which does harm only if exactly a multiple of 2^32 changes happen
/// between reading a head and its exchange. A slower thread may still read the links of taken blocks; they
/// are never unmapped, and its exchange then fails.
///
/// @tparam Interleaving  for tests, see `interleaving`.
///
/// @par Complexity   taking a batch needs one exchange of the count and one per shard that it comes from,
///   returning a batch one of each; both O(batch) links in addition. 4 bytes per block, 64 per shard and 64
///   more.
/// @par Progress   `push` is lock-free. So is `try_take`: an exchange fails, or a round over all shards finds
///   nothing, only because other threads made progress.
/// @par Thread safety   `push`, `try_take` and `size` may run concurrently. The thread that takes a block
///   sees all that another thread wrote before it pushed the block.
/// @par Errors   the constructor throws `length_error` and `out_of_memory`; nothing else fails.
template <interleaving Interleaving = paging::uninterrupted>
class basic_sharded_free_list {
 public:
  /// Constructs an empty list.
  /// @param blocks  ids 1 to `blocks` may be pushed; 1 to `max_blocks`.
  /// @param shards  1 to 65,536: the number of threads that allocate and free often.
  basic_sharded_free_list(std::uint64_t blocks, std::uint32_t shards, const metadata_source& source = {})
      : links_(checked(blocks, shards) + 1, 0, source, "sharded_free_list: links"),
        heads_((shards + std::uint64_t{1}) * words_a_line, 0, source, "sharded_free_list: heads"),
        shards_(shards) {}

  /// Adds free blocks, the first one on top. @pre none of them is free already or named twice.
  void push(std::span<const block_id> blocks, shard_id shard = {}) noexcept {
    if (blocks.empty()) return;
    for (std::size_t i = 0; i + 1 < blocks.size(); ++i)
      link(blocks[i]).store(to_index(blocks[i + 1]), std::memory_order_relaxed);
    const auto head = head_of(number(shard));
    std::uint64_t seen = head.load(std::memory_order_relaxed);
    do {
      link(blocks.back()).store(top(seen), std::memory_order_relaxed);
      Interleaving::point();
    } while (!head.compare_exchange_weak(seen, after(seen, to_index(blocks.front())),
                                         std::memory_order_release, std::memory_order_relaxed));
    Interleaving::point();
    count().fetch_add(blocks.size(), std::memory_order_release);
  }

  /// Fills `out`, or takes nothing and returns false.
  [[nodiscard]] bool try_take(std::span<block_id> out, shard_id shard = {}) noexcept {
    const auto all = count();
    std::uint64_t free = all.load(std::memory_order_relaxed);
    do {
      if (free < out.size()) return false;
    } while (!all.compare_exchange_weak(free, free - out.size(), std::memory_order_acquire,
                                        std::memory_order_relaxed));
    for (std::uint32_t from = number(shard); !out.empty(); from = from + 1 == shards_ ? 0 : from + 1)
      out = out.subspan(pop(from, out));
    return true;
  }

  /// The free blocks that are not reserved, at some moment during the call.
  [[nodiscard]] std::uint64_t size() const noexcept { return count().load(std::memory_order_relaxed); }
  [[nodiscard]] std::uint32_t shards() const noexcept { return shards_; }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return links_.bytes() + heads_.bytes(); }

  /// Calls `visit(block_id)` for each free block, for audits, while no other thread pushes or takes. Stops
  /// after the maximum number of blocks.
  template <class Visit>
  void for_each(Visit&& visit) const {
    std::uint64_t left = links_.size();
    for (std::uint32_t shard = 0; shard < shards_; ++shard) {
      std::uint32_t at = top(head_of(shard).load(std::memory_order_acquire));
      for (; at != 0 && left > 0; --left, at = links_[at].load(std::memory_order_relaxed))
        visit(block_id{at});
    }
  }

 private:
  // Each head, and the count, has a cache line of its own.
  static constexpr std::size_t words_a_line = 8;

  [[nodiscard]] static std::uint64_t checked(std::uint64_t blocks, std::uint32_t shards) {
    if (blocks == 0 || blocks > max_blocks) {
      throw length_error("sharded_free_list: " + std::to_string(blocks) + " blocks; use 1 to " +
                         std::to_string(max_blocks));
    }
    if (shards == 0 || shards > 65'536) {
      throw length_error("sharded_free_list: " + std::to_string(shards) +
                         " shards; use 1 to 65536, one for each thread that allocates");
    }
    return blocks;
  }

  // A head: the number of its changes, and the block on top (0: none).
  [[nodiscard]] static std::uint32_t top(std::uint64_t head) noexcept {
    return static_cast<std::uint32_t>(head);
  }
  [[nodiscard]] static std::uint64_t after(std::uint64_t head, std::uint32_t top) noexcept {
    return ((head >> 32) + 1) << 32 | top;
  }
  [[nodiscard]] auto head_of(std::uint32_t shard) const noexcept { return heads_[shard * words_a_line]; }
  [[nodiscard]] auto count() const noexcept { return heads_[shards_ * words_a_line]; }
  [[nodiscard]] auto link(block_id block) const noexcept { return links_[to_index(block)]; }
  [[nodiscard]] std::uint32_t number(shard_id shard) const noexcept {
    return static_cast<std::uint32_t>(shard) % shards_;
  }

  /// Takes up to `out.size()` blocks off one stack at once; returns how many.
  std::size_t pop(std::uint32_t shard, std::span<block_id> out) noexcept {
    const auto head = head_of(shard);
    std::uint64_t seen = head.load(std::memory_order_acquire);
    for (;;) {
      // Other threads may change links during the walk. Then it may follow wrong links, but stays inside the
      // table and takes at most `out.size()` steps, and the exchange fails.
      std::size_t taken = 0;
      std::uint32_t next = top(seen);
      for (; next != 0 && taken < out.size(); ++taken) {
        out[taken] = block_id{next};
        next = links_[next].load(std::memory_order_relaxed);
      }
      if (taken == 0) return 0;
      Interleaving::point();
      if (head.compare_exchange_weak(seen, after(seen, next), std::memory_order_acquire,
                                     std::memory_order_acquire)) {
        return taken;
      }
    }
  }

  detail::atomic_array<std::uint32_t> links_;  // by block: the block below it
  detail::atomic_array<std::uint64_t> heads_;  // by shard, followed by the count of all shards
  std::uint32_t shards_;
};

/// The free list without test hooks.
using sharded_free_list = basic_sharded_free_list<>;

}  // namespace v0
}  // namespace llmmem
