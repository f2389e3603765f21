/// @file
/// Numbered events of what a cache stores and drops, for a router outside to follow.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/error.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/paging/group_observer.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/paging/paged_types.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// What happened to the contents that a key names.
enum class cache_event_kind : std::uint8_t {
  cleared,  ///< nothing is cached now, and `epoch` has begun; no key
  stored,   ///< cached from now on
  removed,  ///< no longer cached
  shared,   ///< a `match` shared them; only if requested
  moved,    ///< they moved from `block` to `to`; no key; only if requested
};

/// One event, plain data. Fields that a kind lacks are zero.
struct cache_event {
  std::uint64_t number = 0;  ///< one more than the event before
  block_key key{};
  block_key parent{};        ///< stored: key of the contents before these; zero: none, or not cached
  prefix_context context{};  ///< stored: salt and extra keys
  std::uint64_t first = 0;   ///< stored: position of the first token; 0 where nothing precedes it
  std::uint64_t epoch = 0;   ///< cleared: epoch of keys from now on, see `paging::root_key`
  block_id block = null_block;
  block_id to = null_block;  ///< moved
  std::uint32_t tokens = 0;  ///< stored: covered by the key
  std::uint32_t group = 0;   ///< as given to the log
  cache_event_kind kind = cache_event_kind::cleared;
  std::uint8_t medium = 0;  ///< as given to the log

  friend constexpr bool operator==(const cache_event&, const cache_event&) noexcept = default;
};

/// The construction parameters of an `event_log`.
struct event_log_options {
  std::uint64_t events = 0;  ///< number of events kept for readers, 1 to 2^32
  /// Number of the first event. A log that replaces another, with a cache that starts empty, continues at the
  /// other's `end()` and begins with a `cleared`.
  std::uint64_t first = 0;
  std::uint32_t group = 0;         ///< which of an engine's KV cache groups this is; recorded in every event
  std::uint8_t medium = 0;         ///< where the blocks are, in the engine's own numbering; recorded in every
                                   ///< event
  bool shares = false;             ///< whether `shared` is logged
  bool moves = false;              ///< whether `moved` is logged
  std::string name = "event_log";  ///< the name in error texts
  metadata_source metadata{};      ///< source of memory for its ring
};

/// The result of `event_log::read`.
struct event_read {
  std::size_t count = 0;    ///< events written to the front of the span
  std::uint64_t first = 0;  ///< number of the first of them
  std::uint64_t lost = 0;   ///< requested events before `first` that are no longer kept
  std::uint64_t next = 0;   ///< the number to read from next

  friend constexpr bool operator==(const event_read&, const event_read&) noexcept = default;
};

/// An observer that keeps the last events of a cache in a ring.
///
/// Every event takes the next 64-bit number before it is written, so a reader detects every gap: a reader
/// that falls behind learns exactly how many events it lost, takes a snapshot and continues from the
/// snapshot's number.
///
///     struct logged : llmmem::paged_traits { using observer = llmmem::event_log; };
///     llmmem::paged_allocator<logged> cache({.blocks = 4096}, llmmem::event_log({.events = 1024}));
///     ...
///     auto got = cache.observer().read(next, batch).value();
///     if (got.lost != 0) next = cache.observer().snapshot(cache, [&](const stored_key& each) { ... });
///
/// A snapshot is the state before the event whose number it returns: the visited contents, with the events
/// from that number applied in order, give the index at any later time.
///
/// @par Complexity   O(1) per event, 112 bytes per event kept, allocated once; `snapshot` O(blocks).
/// @par Thread safety   one caller at a time, including the cache's own calls: the code that sends events
///   elsewhere reads them between two steps of the engine.
/// @par Errors   the constructor throws `length_error` and `out_of_memory`; all else is `noexcept`.
/// @par Source   stored, removed and cleared are the KV events of vLLM, as are medium and group; routers
///   above such streams have had to add numbers with visible gaps, and snapshots.
class event_log {
 public:
  explicit event_log(const event_log_options& options)
      : ring_(checked_events(options), cache_event{}, options.metadata, "event_log: events"),
        first_(options.first),
        next_(options.first),
        group_(options.group),
        medium_(options.medium),
        shares_(options.shares),
        moves_(options.moves),
        name_(options.name) {
    if (first_ != 0) clear();
  }

  // Calls by the cache

  void on_cached(const stored_block& stored) noexcept {
    cache_event& event = reserve(cache_event_kind::stored);
    event.key = stored.key;
    event.parent = stored.parent;
    event.context = *stored.context;
    event.block = stored.block;
    event.tokens = stored.tokens;
    event.first = stored.first;
  }
  void on_cleared(std::uint64_t epoch) noexcept { reserve(cache_event_kind::cleared).epoch = epoch; }
  void on_dropped(block_id block, const block_key& key) noexcept {
    cache_event& event = reserve(cache_event_kind::removed);
    event.key = key;
    event.block = block;
  }
  void on_shared(block_id block, const block_key& key) noexcept {
    if (!shares_) return;
    cache_event& event = reserve(cache_event_kind::shared);
    event.key = key;
    event.block = block;
  }
  void on_moved(block_id from, block_id to) noexcept {
    if (!moves_) return;
    cache_event& event = reserve(cache_event_kind::moved);
    event.block = from;
    event.to = to;
  }

  // The same calls from a cache with several groups: events carry the group passed in, not that of the
  // options.

  void on_cached(const stored_block& stored, std::size_t group) noexcept {
    on_cached(stored);
    of_group(group);
  }
  void on_dropped(block_id block, const block_key& key, std::size_t group) noexcept {
    on_dropped(block, key);
    of_group(group);
  }
  void on_shared(block_id block, const block_key& key, std::size_t group) noexcept {
    if (!shares_) return;
    on_shared(block, key);
    of_group(group);
  }

  /// Logs that nothing is stored now, for an engine that knows it by other means than `removed`.
  void clear() noexcept { reserve(cache_event_kind::cleared); }

  // Calls by readers

  /// Number of the next event.
  [[nodiscard]] std::uint64_t end() const noexcept { return next_; }
  /// Number of the oldest event kept; `end()` if there is none.
  [[nodiscard]] std::uint64_t begin() const noexcept {
    return next_ - first_ > ring_.size() ? next_ - ring_.size() : first_;
  }

  /// Copies events in order, from number `from` or from the oldest event kept, as many as exist and fit.
  /// Numbers from `from` to the first event kept are lost.
  /// @return `errc::out_of_range` for a number past `end()`: it belongs to another log.
  [[nodiscard]] result<event_read> read(std::uint64_t from, std::span<cache_event> out) const noexcept {
    if (from > next_) return failure{errc::out_of_range, 0, from, next_, name_.c_str()};
    const std::uint64_t oldest = begin();
    event_read got{.first = from < oldest ? oldest : from};
    got.lost = got.first - from;
    const std::uint64_t there = next_ - got.first;
    got.count = there < out.size() ? static_cast<std::size_t>(there) : out.size();
    for (std::size_t i = 0; i < got.count; ++i)
      out[i] = ring_[place(got.first + i)];
    got.next = got.first + got.count;
    return got;
  }

  /// Calls `visit(const stored_key&)` for all contents cached in `cache`, which this log observes.
  /// @return the number of the first event that the snapshot does not include.
  template <class Cache, class Visit>
    requires std::is_invocable_v<Visit&, const stored_key&>
  std::uint64_t snapshot(const Cache& cache, Visit&& visit) const
      noexcept(std::is_nothrow_invocable_v<Visit&, const stored_key&>) {
    for (std::uint64_t i = 1; i <= cache.pool().block_capacity(); ++i) {
      const block_id block{static_cast<std::uint32_t>(i)};
      if (cache.index().contains(block))
        visit(stored_key{cache.index().key(block), block, cache.index().tokens(block)});
    }
    return next_;
  }

  /// As above for a cache with several groups: calls `visit(const stored_key&, std::size_t group)`.
  template <class Cache, class Visit>
    requires std::is_invocable_v<Visit&, const stored_key&, std::size_t>
  std::uint64_t snapshot(const Cache& cache, Visit&& visit) const
      noexcept(std::is_nothrow_invocable_v<Visit&, const stored_key&, std::size_t>) {
    cache.for_each_cached(visit);
    return next_;
  }

  [[nodiscard]] std::uint64_t capacity() const noexcept { return ring_.size(); }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return ring_.bytes(); }
  [[nodiscard]] const std::string& name() const noexcept LLMMEM_LIFETIMEBOUND { return name_; }

 private:
  [[nodiscard]] static std::uint64_t checked_events(const event_log_options& options) {
    constexpr std::uint64_t most = std::uint64_t{1} << 32;
    if (options.events == 0 || options.events > most) {
      throw length_error(options.name + ": " + std::to_string(options.events) + " events; use 1 to " +
                         std::to_string(most));
    }
    return options.events;
  }

  [[nodiscard]] std::size_t place(std::uint64_t number) const noexcept {
    return static_cast<std::size_t>((number - first_) % ring_.size());
  }

  void of_group(std::size_t group) noexcept {
    ring_[place(next_ - 1)].group = static_cast<std::uint32_t>(group);
  }

  cache_event& reserve(cache_event_kind kind) noexcept {
    cache_event& event = ring_[place(next_)];
    event = {.number = next_++, .group = group_, .kind = kind, .medium = medium_};
    return event;
  }

  detail::fixed_array<cache_event> ring_;
  std::uint64_t first_;
  std::uint64_t next_;
  std::uint32_t group_;
  std::uint8_t medium_;
  bool shares_;
  bool moves_;
  std::string name_;
};

static_assert(sharing_observer<event_log> && moving_observer<event_log>);
static_assert(group_sharing_observer<event_log>);

}  // namespace v0
}  // namespace llmmem
