/// @file
/// An observer that measures in histograms how long cached blocks live, are idle and wait for their next use.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/error.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/paging/paged_types.hpp>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// A clock that returns microseconds since any origin; never goes back.
template <class C>
concept microsecond_clock = std::movable<C> && requires(const C& clock) {
  { clock.now() } noexcept -> std::convertible_to<std::uint64_t>;
};

namespace paging {

/// A clock with a time set by the caller: an engine sets it once per step, a test at will.
class set_clock {
 public:
  [[nodiscard]] std::uint64_t now() const noexcept { return now_; }
  /// Ignores a time before the last one.
  void set(std::uint64_t now) noexcept { now_ = now > now_ ? now : now_; }

 private:
  std::uint64_t now_ = 0;
};

}  // namespace paging

using set_clock [[deprecated("its name is paging::set_clock")]] = paging::set_clock;

static_assert(microsecond_clock<paging::set_clock>);

/// Counts of durations by fixed bounds. Plain data: subtract two to get the counts between them.
struct duration_histogram {
  /// Upper bounds in microseconds, inclusive: 1, 2 and 5 of each power of ten from 1 ms to 5000 s.
  static constexpr std::array<std::uint64_t, 21> bounds = [] {
    std::array<std::uint64_t, 21> all{};
    std::uint64_t power = 1000;
    for (std::size_t i = 0; i < all.size(); i += 3, power *= 10) {
      all[i] = power;
      all[i + 1] = 2 * power;
      all[i + 2] = 5 * power;
    }
    return all;
  }();

  std::array<std::uint64_t, bounds.size() + 1> counts{};  ///< by bucket; the last one is above all bounds
  std::uint64_t sum = 0;                                  ///< microseconds

  void add(std::uint64_t duration) noexcept {
    std::size_t bucket = 0;
    while (bucket < bounds.size() && bounds[bucket] < duration)
      ++bucket;
    ++counts[bucket];
    sum += duration;
  }
  [[nodiscard]] std::uint64_t count() const noexcept {
    std::uint64_t all = 0;
    for (const std::uint64_t each : counts)
      all += each;
    return all;
  }
  friend constexpr bool operator==(const duration_histogram&, const duration_histogram&) noexcept = default;
};

/// The measurements of `cache_metrics` for the blocks it samples.
struct cache_histograms {
  duration_histogram lifetime;      ///< from being stored to being dropped
  duration_histogram residency;     ///< from being stored to the last use: lifetime = residency + idle
  duration_histogram idle;          ///< from the last use to being dropped
  duration_histogram reuse_gap;     ///< from one use to the next
  std::uint64_t sample_one_in = 1;  ///< one block in this many is measured

  friend constexpr bool operator==(const cache_histograms&, const cache_histograms&) noexcept = default;
};

/// The construction parameters of a `cache_metrics`.
struct cache_metrics_options {
  std::uint64_t blocks = 0;            ///< `block_capacity` of the cache it observes, 1 to `max_blocks`
  std::uint64_t sample_one_in = 1;     ///< measures the blocks whose id is a multiple of this; at least 1
  std::string name = "cache_metrics";  ///< the name in error texts
  metadata_source metadata{};          ///< source of memory for its table
};

/// An observer that measures how long contents live and how they are used.
///
///     struct measured : llmmem::paged_traits { using observer = llmmem::cache_metrics<>; };
///     llmmem::paged_allocator<measured> cache(options, llmmem::cache_metrics<>({.blocks = 4096}));
///     cache.observer().clock().set(microseconds);      // once a step
///     write_prometheus(cache.stats(), cache.observer().histograms(), ...);
///
/// Contents are *used* when they become cached and at each `match` that shares them; a sequence that merely
/// continues to hold a block does not use it again. They are *dropped* by eviction or when other contents
/// replace them. A block's id does not depend on its contents, so every n-th id is a fair sample.
///
/// @par Complexity   O(1) per event, nothing for blocks that are not sampled; 16 bytes per sampled block.
/// @par Thread safety   one caller at a time, including the cache's own calls.
/// @par Errors   the constructor throws `length_error` and `out_of_memory`; all else is `noexcept`.
/// @par Source   lifetime, idle time before eviction and reuse gap: the sampled histograms of vLLM. Theirs
///   begin a lifetime at the allocation, these when contents become cached.
template <microsecond_clock Clock = paging::set_clock>
class cache_metrics {
 public:
  explicit cache_metrics(const cache_metrics_options& options, Clock clock = {})
      : lives_(samples(options) + 1, life{}, options.metadata, "cache_metrics: samples"),
        clock_(std::move(clock)) {
    histograms_.sample_one_in = options.sample_one_in;
  }

  void on_cached(const stored_block& stored) noexcept {
    if (life* const now = find(stored.block)) *now = {clock_.now(), clock_.now()};
  }
  void on_shared(block_id block, const block_key&) noexcept {
    life* const now = find(block);
    if (now == nullptr || !now->is_known()) return;
    const std::uint64_t time = clock_.now();
    histograms_.reuse_gap.add(time - now->used);
    now->used = time;
  }
  void on_dropped(block_id block, const block_key&) noexcept {
    life* const now = find(block);
    if (now == nullptr || !now->is_known()) return;
    const std::uint64_t time = clock_.now();
    histograms_.lifetime.add(time - now->stored);
    histograms_.residency.add(now->used - now->stored);
    histograms_.idle.add(time - now->used);
    *now = {};
  }
  /// Contents that move to or from a block that is not sampled are not measured.
  void on_moved(block_id from, block_id to) noexcept {
    life* const source = find(from);
    const life moved = source == nullptr ? life{} : std::exchange(*source, life{});
    if (life* const destination = find(to)) *destination = moved;
  }

  [[nodiscard]] Clock& clock() noexcept { return clock_; }
  [[nodiscard]] const Clock& clock() const noexcept { return clock_; }
  [[nodiscard]] const cache_histograms& histograms() const noexcept { return histograms_; }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return lives_.bytes(); }

 private:
  struct life {
    static constexpr std::uint64_t unknown = ~std::uint64_t{0};
    std::uint64_t stored = unknown;
    std::uint64_t used = unknown;
    [[nodiscard]] bool is_known() const noexcept { return stored != unknown; }
  };

  [[nodiscard]] static std::uint64_t samples(const cache_metrics_options& options) {
    if (options.blocks == 0 || options.blocks > max_blocks) {
      throw length_error(options.name + ": " + std::to_string(options.blocks) + " blocks; use 1 to " +
                         std::to_string(max_blocks));
    }
    if (options.sample_one_in == 0) {
      throw length_error(options.name + ": one sample in 0 blocks; at least 1 is needed");
    }
    return options.blocks / options.sample_one_in;
  }

  [[nodiscard]] life* find(block_id block) noexcept {
    const std::uint64_t every = histograms_.sample_one_in;
    const std::uint64_t place = to_index(block) / every;
    return to_index(block) % every == 0 && place < lives_.size() ? &lives_[place] : nullptr;
  }

  detail::fixed_array<life> lives_;  // by id / sample_one_in
  cache_histograms histograms_;
  LLMMEM_NO_UNIQUE_ADDRESS Clock clock_;
};

static_assert(sharing_observer<cache_metrics<>> && moving_observer<cache_metrics<>>);

}  // namespace v0
}  // namespace llmmem
