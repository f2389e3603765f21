/// @file
/// Inputs and outputs of a `paged_allocator`: options, results, statistics, the observer.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/paging/ids.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// Means "no limit" in options.
inline constexpr std::uint64_t unlimited = ~std::uint64_t{0};

/// The most tokens a block may hold.
inline constexpr std::uint32_t max_block_tokens = 65'536;

/// The blocks that an operation lacks.
struct block_shortage {
  std::uint64_t needed = 0;     ///< for the operation; 0: nothing is refused yet, but the pool runs low
  std::uint64_t available = 0;  ///< free or evictable
};

/// A callback for when blocks run short, so that the engine can preempt a sequence, offload or `collect`.
///
/// The allocator calls it before it refuses an operation, with nothing changed yet. The callback may call the
/// allocator. It returns whether to try again; the allocator calls it again as long as it makes blocks
/// available.
///
/// The allocator also calls it, with `needed` 0, once each time an append, a match or a resize leaves fewer
/// than `low` blocks available; the return value is then ignored. The operation is complete but has not yet
/// returned to its caller, so the callback may then neither compact, nor commit the sequence that has just
/// grown.
struct pressure_callback {
  bool (*call)(void* context, const block_shortage& shortage) noexcept = nullptr;
  void* context = nullptr;
  std::uint64_t low = 0;
};

/// The construction parameters of a `paged_allocator`.
struct paged_options {
  std::uint64_t blocks = 0;           ///< usable blocks, 1 to `max_blocks`
  std::uint64_t block_capacity = 0;   ///< the most blocks that `resize` may set; 0: at most `blocks`
  std::uint32_t block_tokens = 16;    ///< tokens a block holds, 1 to `max_block_tokens`
  std::uint32_t max_sequences = 256;  ///< alive at once, at least 1
  /// The most tokens a sequence may have; the pool bounds it anyway.
  std::uint64_t max_sequence_tokens = 131'072;
  std::uint64_t max_idle_blocks = unlimited;  ///< idle blocks that may keep their contents
  /// References that `release_after` and `truncate_after` may hold, from at most 4 x `max_sequences` calls;
  /// unlimited: one per block.
  std::uint64_t max_deferred = unlimited;
  pressure_callback pressure{};          ///< called when blocks run short
  hash_seed seed{};                      ///< keys the hash chain
  std::uint64_t epoch = 0;               ///< epoch of the initial weights, see `paged_allocator::reset`
  std::string name = "paged_allocator";  ///< the name in error texts
  metadata_source metadata{};            ///< source of memory for its tables
};

/// The blocks of a prompt, named by external keys from traces and other services.
struct keyed_blocks {
  std::span<const block_key> keys;       ///< key i names block i and everything before it
  std::uint64_t tokens = 0;              ///< tokens in all blocks together; the last block may be partial
  std::span<const access_hint> hints{};  ///< for the eviction policy: one per key, or none
};

/// Tokens `first` to `end` of a sequence, `end` excluded.
struct token_range {
  std::uint64_t first = 0;
  std::uint64_t end = ~std::uint64_t{0};  ///< default: to the end of the sequence, also as it grows

  friend constexpr bool operator==(const token_range&, const token_range&) noexcept = default;
};

/// The number of ranges that `retain` remembers per sequence.
inline constexpr std::size_t max_retained_ranges = 4;

/// Hints from a request to the eviction policy about the worth of its contents.
struct request_hints {
  std::uint64_t session = 0;  ///< the conversation it belongs to, see `access_hint`; 0: unknown
  float cost = 1;             ///< of recomputing a block, see `access_hint`
  retention keep{};           ///< of all its blocks; `retain` sets that of a range

  friend constexpr bool operator==(const request_hints&, const request_hints&) noexcept = default;
};

/// The result of `match`.
struct match_result {
  std::uint64_t tokens = 0;  ///< cached tokens, now part of the sequence
  std::uint64_t blocks = 0;  ///< blocks that hold them
  /// Only with `Traits::partial`: carry it out before anything is written. It brings the last of `tokens`
  /// into their block.
  block_copy copy{};

  friend constexpr bool operator==(const match_result&, const match_result&) noexcept = default;
};

/// What a prompt would need if it arrived now.
struct prompt_cost {
  std::uint64_t cached_tokens = 0;   ///< tokens that `match` would find, in full blocks
  std::uint64_t cached_blocks = 0;   ///< blocks that hold them
  std::uint64_t revived_blocks = 0;  ///< of those, blocks without users: they stop being evictable
  std::uint64_t new_blocks = 0;      ///< for the tokens after them

  /// Blocks that must be available for it.
  [[nodiscard]] constexpr std::uint64_t needed() const noexcept { return revived_blocks + new_blocks; }
  friend constexpr bool operator==(const prompt_cost&, const prompt_cost&) noexcept = default;
};

namespace paging {

/// The growth of one sequence of a batch.
struct growth {
  sequence_id sequence{};
  std::span<const token_id> tokens{};
  std::uint64_t unknown_tokens = 0;  ///< tokens without given values, as in `extend`, after `tokens`
};

}  // namespace paging

using growth [[deprecated("its name is paging::growth")]] = paging::growth;

/// The result of `append`.
struct append_result {
  std::uint64_t first = 0;       ///< position of the first new token
  std::uint64_t new_blocks = 0;  ///< blocks allocated, including the destination of `copy`
  block_copy copy{};             ///< copy on write: carry it out before the new tokens are written
};

/// The state of a `paged_allocator` now, and its counts since construction.
struct paged_stats {
  std::uint64_t sequences = 0;      ///< alive
  std::uint64_t tokens = 0;         ///< of living sequences; a shared token counts once per sequence
  std::uint64_t table_blocks = 0;   ///< entries of their block tables
  std::uint64_t blocks = 0;         ///< usable: active + idle + free
  std::uint64_t active_blocks = 0;  ///< held by sequences or waiting for a fence
  std::uint64_t idle_blocks = 0;    ///< cached, evictable
  std::uint64_t free_blocks = 0;
  std::uint64_t retiring_blocks = 0;  ///< in use above the end of a pool that was shrunk
  std::uint64_t cached_blocks = 0;    ///< found by `match`, active or idle
  std::uint64_t deferred = 0;         ///< references waiting for a fence

  std::uint64_t matches = 0;           ///< calls of `match`
  std::uint64_t requested_blocks = 0;  ///< blocks that `match` looked for: the full ones, one per key, or all
                                       ///< with partial reuse
  std::uint64_t hit_blocks = 0;        ///< blocks that `match` shared
  std::uint64_t hit_tokens = 0;
  std::uint64_t partial_hits = 0;          ///< matches that shared the beginning of a further block
  std::uint64_t stolen_blocks = 0;         ///< of those, blocks taken over instead of copied
  std::uint64_t allocations = 0;           ///< blocks allocated
  std::uint64_t evictions = 0;             ///< blocks whose cached contents were dropped to make space
  std::uint64_t evicting_allocations = 0;  ///< allocated blocks that had to be evicted first
  std::uint64_t registrations = 0;         ///< blocks that became cached
  std::uint64_t duplicates = 0;            ///< commits that found equal contents already cached
  std::uint64_t orphans = 0;               ///< blocks dropped because the contents before theirs were dropped
  std::uint64_t invalidated = 0;           ///< blocks that `invalidate` removed from the cache
  std::uint64_t unchained = 0;             ///< commits by keys that met a key cached after a different key
  std::uint64_t replaced = 0;      ///< entries replaced by a commit with the same key and other contents
  std::uint64_t deduplicated = 0;  ///< blocks released in favour of equal cached ones
  std::uint64_t refused = 0;       ///< blocks that the admission policy refused
  std::uint64_t copies = 0;        ///< copies on write

  std::size_t metadata_bytes = 0;      ///< pool, index, tables and queue
  std::size_t verification_bytes = 0;  ///< the verification's, counted separately

  /// The share of the slots in block tables that hold a token; 1 when there are no slots.
  [[nodiscard]] double token_occupancy(std::uint32_t block_tokens) const noexcept {
    const auto slots = static_cast<double>(table_blocks) * block_tokens;
    return slots == 0 ? 1.0 : static_cast<double>(tokens) / slots;
  }
};

/// A block whose contents have become cached.
struct stored_block {
  block_id block = null_block;
  block_key key{};
  block_key parent{};                       ///< key of the contents before these; zero: none, or not cached
  std::uint64_t first = 0;                  ///< position of its first token: 0 where nothing precedes it
  std::uint32_t tokens = 0;                 ///< covered by the key
  std::span<const token_id> token_ids{};    ///< their values, if the verification keeps them
  const prefix_context* context = nullptr;  ///< never null in a call
};

/// Cached contents, as a snapshot lists them.
struct stored_key {
  block_key key{};
  block_id block = null_block;
  std::uint32_t tokens = 0;
};

/// A type whose `noexcept` calls report which contents become cached and which are dropped: the source of a
/// router's event stream. `event_log` and `cache_metrics` are observers; `observers<...>` joins several.
template <class O>
concept cache_observer = std::movable<O> && requires(O& observer, const stored_block& stored, block_id block,
                                                     const block_key& key) {
  { observer.on_cached(stored) } noexcept;
  { observer.on_dropped(block, key) } noexcept;
};

/// An observer that also receives each block that a `match` shares.
template <class O>
concept sharing_observer = cache_observer<O> && requires(O& observer, block_id block, const block_key& key) {
  { observer.on_shared(block, key) } noexcept;
};

/// An observer that receives one call when the whole cache is cleared, with the epoch that begins (`reset`);
/// other observers receive `on_dropped` for each block.
template <class O>
concept clearing_observer = requires(O& observer, std::uint64_t epoch) {
  { observer.on_cleared(epoch) } noexcept;
};

/// An observer that receives evictions separately. The contents are correct and remain in the block during
/// the call, so the observer can save them. Called instead of `on_dropped`.
template <class O>
concept evicting_observer = requires(O& observer, block_id block, const block_key& key) {
  { observer.on_evicted(block, key) } noexcept;
};

/// An observer that receives invalidations separately: the contents are wrong (`invalidate`), so it can
/// withdraw copies of them. Called instead of `on_dropped`.
template <class O>
concept invalidating_observer = requires(O& observer, block_id block, const block_key& key) {
  { observer.on_invalidated(block, key) } noexcept;
};

namespace detail {

/// Why contents are dropped.
enum class loss : std::uint8_t { dropped, evicted, invalidated };

/// Reports a loss to an observer by the most specific call that the observer has.
template <loss Why, class Observer, class... Group>
void tell_loss(Observer& observer, block_id block, const block_key& key, Group... group) noexcept {
  if constexpr (Why == loss::evicted && requires { observer.on_evicted(block, key, group...); }) {
    observer.on_evicted(block, key, group...);
  } else if constexpr (Why == loss::invalidated &&
                       requires { observer.on_invalidated(block, key, group...); }) {
    observer.on_invalidated(block, key, group...);
  } else {
    observer.on_dropped(block, key, group...);
  }
}

}  // namespace detail

/// An observer that also receives each move of a cached or staged block by compaction.
template <class O>
concept moving_observer = cache_observer<O> && requires(O& observer, block_id block) {
  { observer.on_moved(block, block) } noexcept;
};

/// An observer that ignores all events, at no cost.
struct ignore_cache_events {
  void on_cached(const stored_block&) const noexcept {}
  void on_dropped(block_id, const block_key&) const noexcept {}
  void on_cleared(std::uint64_t) const noexcept {}
};

static_assert(cache_observer<ignore_cache_events>);

namespace paging {

/// Forwards events to several observers, in order.
template <cache_observer... Observers>
class observers {
 public:
  observers() = default;
  explicit observers(Observers... all) noexcept(
      std::is_nothrow_constructible_v<std::tuple<Observers...>, Observers...>)
      : all_(std::move(all)...) {}

  void on_cached(const stored_block& stored) noexcept {
    std::apply([&](Observers&... each) noexcept { (each.on_cached(stored), ...); }, all_);
  }
  void on_dropped(block_id block, const block_key& key) noexcept {
    std::apply([&](Observers&... each) noexcept { (each.on_dropped(block, key), ...); }, all_);
  }
  void on_evicted(block_id block, const block_key& key) noexcept
    requires(evicting_observer<Observers> || ...)
  {
    const auto tell = [&](auto& each) noexcept {
      detail::tell_loss<detail::loss::evicted>(each, block, key);
    };
    std::apply([&](Observers&... each) noexcept { (tell(each), ...); }, all_);
  }
  void on_invalidated(block_id block, const block_key& key) noexcept
    requires(invalidating_observer<Observers> || ...)
  {
    const auto tell = [&](auto& each) noexcept {
      detail::tell_loss<detail::loss::invalidated>(each, block, key);
    };
    std::apply([&](Observers&... each) noexcept { (tell(each), ...); }, all_);
  }
  void on_shared(block_id block, const block_key& key) noexcept {
    const auto tell = [&]<class O>(O& each) noexcept {
      if constexpr (sharing_observer<O>) each.on_shared(block, key);
    };
    std::apply([&](Observers&... each) noexcept { (tell(each), ...); }, all_);
  }
  void on_cleared(std::uint64_t epoch) noexcept
    requires(clearing_observer<Observers> && ...)
  {
    std::apply([&](Observers&... each) noexcept { (each.on_cleared(epoch), ...); }, all_);
  }
  void on_moved(block_id from, block_id to) noexcept {
    const auto tell = [&]<class O>(O& each) noexcept {
      if constexpr (moving_observer<O>) each.on_moved(from, to);
    };
    std::apply([&](Observers&... each) noexcept { (tell(each), ...); }, all_);
  }

  template <std::size_t Index>
  [[nodiscard]] const auto& get() const noexcept {
    return std::get<Index>(all_);
  }
  template <std::size_t Index>
  [[nodiscard]] auto& get() noexcept {
    return std::get<Index>(all_);
  }

 private:
  std::tuple<Observers...> all_;
};

}  // namespace paging

template <cache_observer... Observers>
using observers [[deprecated("its name is paging::observers")]] = paging::observers<Observers...>;

static_assert(sharing_observer<paging::observers<ignore_cache_events, ignore_cache_events>>);

}  // namespace v0
}  // namespace llmmem
