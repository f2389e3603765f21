/// @file
/// What goes into a `paged_allocator` and comes out of it: options, results, statistics, the observer.
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

/// No limit, where an option has one.
inline constexpr std::uint64_t unlimited = ~std::uint64_t{0};

/// The most tokens a block may hold.
inline constexpr std::uint32_t max_block_tokens = 65'536;

/// Blocks that an operation lacks.
struct block_shortage {
  std::uint64_t needed = 0;     ///< by the operation; 0: none is refused yet, the pool only runs low
  std::uint64_t available = 0;  ///< free or evictable
};

/// Called when blocks run short: the engine's chance to preempt a sequence, to offload, to `collect`.
///
/// Called before an operation is refused, with nothing changed yet: it may call the allocator, and returns
/// whether to look again. It is asked again as long as it brings blocks, and no longer.
///
/// Also called, with `needed` 0, once each time an append, a match or a resize leaves fewer than `low` blocks
/// available; what it returns is then ignored. The operation is done, but its caller has no answer yet, so
/// that such a call may neither compact nor commit what has just grown.
struct pressure_callback {
  bool (*call)(void* context, const block_shortage& shortage) noexcept = nullptr;
  void* context = nullptr;
  std::uint64_t low = 0;
};

/// How a `paged_allocator` is built.
struct paged_options {
  std::uint64_t blocks = 0;           ///< usable blocks, 1 to `max_blocks`
  std::uint64_t most_blocks = 0;      ///< what `resize` may raise that to; 0: no more than `blocks`
  std::uint32_t block_tokens = 16;    ///< tokens a block holds, 1 to `max_block_tokens`
  std::uint32_t max_sequences = 256;  ///< alive at once, at least 1
  /// The longest a sequence may become; bounded by the pool anyway.
  std::uint64_t max_sequence_tokens = 131'072;
  std::uint64_t max_idle_blocks = unlimited;  ///< how many idle blocks may keep their contents
  /// References that `release_after` and `truncate_after` may hold, of at most 4 x `max_sequences` calls;
  /// unlimited: one for each block.
  std::uint64_t max_deferred = unlimited;
  pressure_callback pressure{};          ///< asked when blocks run short
  hash_seed seed{};                      ///< keys the hash chain
  std::uint64_t epoch = 0;               ///< of the weights it starts with, see `paged_allocator::reset`
  std::string name = "paged_allocator";  ///< what error texts call it
  metadata_source metadata{};            ///< where its tables come from
};

/// The blocks of a prompt by keys that came with it, as traces and other services have them.
struct keyed_blocks {
  std::span<const block_key> keys;       ///< key i names block i and all before it
  std::uint64_t tokens = 0;              ///< of all blocks together; the last may be partial
  std::span<const access_hint> hints{};  ///< for the eviction policy, one for each key, or none
};

/// Tokens `first` to `end` of a sequence, the latter not included.
struct token_range {
  std::uint64_t first = 0;
  std::uint64_t end = ~std::uint64_t{0};  ///< default: to wherever the sequence will end

  friend constexpr bool operator==(const token_range&, const token_range&) noexcept = default;
};

/// How many ranges `retain` remembers for a sequence.
inline constexpr std::size_t max_retained_ranges = 4;

/// What a request says of itself, for the eviction policy: how much its contents are worth keeping.
struct request_hints {
  std::uint64_t session = 0;  ///< the conversation it belongs to, see `access_hint`; 0: not told
  float cost = 1;             ///< of computing a block again, see `access_hint`
  retention keep{};           ///< of all its blocks; `retain` sets that of a range

  friend constexpr bool operator==(const request_hints&, const request_hints&) noexcept = default;
};

/// What `match` found.
struct match_result {
  std::uint64_t tokens = 0;  ///< cached tokens, now the sequence's
  std::uint64_t blocks = 0;  ///< in as many blocks
  /// Only with `Traits::partial`: to be carried out before anything is written, and then the last of `tokens`
  /// are where `blocks` says.
  block_copy copy{};

  friend constexpr bool operator==(const match_result&, const match_result&) noexcept = default;
};

/// What a prompt would need if it came now.
struct prompt_cost {
  std::uint64_t cached_tokens = 0;   ///< that `match` would find, in full blocks
  std::uint64_t cached_blocks = 0;   ///< in as many blocks
  std::uint64_t revived_blocks = 0;  ///< of those nobody uses now: they stop being evictable
  std::uint64_t new_blocks = 0;      ///< for the tokens behind them

  /// Blocks that have to be available for it.
  [[nodiscard]] constexpr std::uint64_t needed() const noexcept { return revived_blocks + new_blocks; }
  friend constexpr bool operator==(const prompt_cost&, const prompt_cost&) noexcept = default;
};

namespace paging {

/// What one sequence of a batch grows by.
struct growth {
  sequence_id sequence{};
  std::span<const token_id> tokens{};
  std::uint64_t untold = 0;  ///< tokens whose values are not told, as `extend` has them, behind `tokens`
};

}  // namespace paging

using growth [[deprecated("its name is paging::growth")]] = paging::growth;

/// Where the tokens of an `append` went.
struct append_result {
  std::uint64_t first = 0;       ///< position of the first new token
  std::uint64_t new_blocks = 0;  ///< blocks allocated, that of `copy` included
  block_copy copy{};             ///< copy on write: to be carried out before the new tokens are written
};

/// A `paged_allocator` now, and since its construction.
struct paged_stats {
  std::uint64_t sequences = 0;      ///< alive
  std::uint64_t tokens = 0;         ///< of living sequences, shared ones counted for each
  std::uint64_t table_blocks = 0;   ///< entries of their block tables
  std::uint64_t blocks = 0;         ///< usable; active + idle + free
  std::uint64_t active_blocks = 0;  ///< in use, by sequences or behind a fence
  std::uint64_t idle_blocks = 0;    ///< cached, evictable
  std::uint64_t free_blocks = 0;
  std::uint64_t retiring_blocks = 0;  ///< in use above the end of a pool that was made smaller
  std::uint64_t cached_blocks = 0;    ///< found by `match`, active or idle
  std::uint64_t deferred = 0;         ///< references waiting for a fence

  std::uint64_t matches = 0;           ///< calls of `match`
  std::uint64_t requested_blocks = 0;  ///< blocks that `match` was asked for: full ones, one for each key, or
                                       ///< all where beginnings of blocks are shared too
  std::uint64_t hit_blocks = 0;        ///< blocks that `match` shared
  std::uint64_t hit_tokens = 0;
  std::uint64_t partial_hits = 0;          ///< matches that shared the beginning of one more block
  std::uint64_t stolen_blocks = 0;         ///< of those, blocks taken over instead of copied
  std::uint64_t allocations = 0;           ///< blocks handed out
  std::uint64_t evictions = 0;             ///< blocks whose cached contents were given up for room
  std::uint64_t evicting_allocations = 0;  ///< blocks handed out that had to be evicted for it
  std::uint64_t registrations = 0;         ///< blocks that became cached
  std::uint64_t duplicates = 0;            ///< commits that found equal contents cached already
  std::uint64_t orphans = 0;       ///< blocks given up because the contents before theirs were given up
  std::uint64_t invalidated = 0;   ///< blocks that `invalidate` took out of the cache
  std::uint64_t unchained = 0;     ///< commits by keys that met a key which is cached behind another one
  std::uint64_t replaced = 0;      ///< entries that a commit with the same key and other contents replaced
  std::uint64_t deduplicated = 0;  ///< blocks given back for equal cached ones
  std::uint64_t refused = 0;       ///< blocks that the admission policy did not let in
  std::uint64_t copies = 0;        ///< copies on write

  std::size_t metadata_bytes = 0;      ///< pool, index, tables and queue
  std::size_t verification_bytes = 0;  ///< what the verification keeps, apart

  /// Share of the slots in block tables that hold a token; 1 when there are none.
  [[nodiscard]] double token_occupancy(std::uint32_t block_tokens) const noexcept {
    const auto slots = static_cast<double>(table_blocks) * block_tokens;
    return slots == 0 ? 1.0 : static_cast<double>(tokens) / slots;
  }
};

/// A block whose contents have become cached.
struct stored_block {
  block_id block = null_block;
  block_key key{};
  block_key parent{};  ///< key of the contents before these; zero: there are none, or they are not cached
  std::uint64_t first = 0;                  ///< position of its first token: 0 where nothing comes before
  std::uint32_t tokens = 0;                 ///< that the key stands for
  std::span<const token_id> token_ids{};    ///< their values, where the verification keeps them
  const prefix_context* context = nullptr;  ///< never null in a call
};

/// Contents that are cached, as a snapshot tells them.
struct stored_key {
  block_key key{};
  block_id block = null_block;
  std::uint32_t tokens = 0;
};

/// Told, `noexcept`, which contents become cached and which are given up: what a router's event stream is
/// made of. `event_log` and `cache_metrics` are observers; `observers<...>` joins several.
template <class O>
concept cache_observer = std::movable<O> && requires(O& observer, const stored_block& stored, block_id block,
                                                     const block_key& key) {
  { observer.on_cached(stored) } noexcept;
  { observer.on_dropped(block, key) } noexcept;
};

/// An observer that is also told of each block that a `match` shares.
template <class O>
concept sharing_observer = cache_observer<O> && requires(O& observer, block_id block, const block_key& key) {
  { observer.on_shared(block, key) } noexcept;
};

/// An observer that is told in one call that nothing is cached any more, and which epoch has begun (`reset`);
/// the others are told `on_dropped` of each block.
template <class O>
concept clearing_observer = requires(O& observer, std::uint64_t epoch) {
  { observer.on_cleared(epoch) } noexcept;
};

/// An observer that is told apart which contents are given up for room: they are right, and still in the
/// block while the call lasts, so that the observer can save them. Called instead of `on_dropped`.
template <class O>
concept evicting_observer = requires(O& observer, block_id block, const block_key& key) {
  { observer.on_evicted(block, key) } noexcept;
};

/// An observer that is told apart which contents are wrong (`invalidate`), so that it can withdraw copies of
/// them. Called instead of `on_dropped`.
template <class O>
concept invalidating_observer = requires(O& observer, block_id block, const block_key& key) {
  { observer.on_invalidated(block, key) } noexcept;
};

namespace detail {

/// Why contents are given up.
enum class loss : std::uint8_t { dropped, evicted, invalidated };

/// Tells an observer of a loss by the most exact call that it has.
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

/// An observer that is also told when a compaction moves a cached or staged block.
template <class O>
concept moving_observer = cache_observer<O> && requires(O& observer, block_id block) {
  { observer.on_moved(block, block) } noexcept;
};

/// The observer that costs nothing.
struct ignore_cache_events {
  void on_cached(const stored_block&) const noexcept {}
  void on_dropped(block_id, const block_key&) const noexcept {}
  void on_cleared(std::uint64_t) const noexcept {}
};

static_assert(cache_observer<ignore_cache_events>);

namespace paging {

/// Tells several observers, in their order.
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
