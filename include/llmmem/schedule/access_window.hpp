/// @file
/// The last accesses of a running program, and the bytes brought up for them compared with the fewest
/// possible.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/schedule/detail/bodies.hpp>
#include <llmmem/tiering/access.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// The bytes that came up to tier 0 in a window of accesses, and the fewest that any choice needs.
struct access_regret {
  std::uint64_t accesses = 0;     ///< leases that began in the window
  std::uint64_t moved_bytes = 0;  ///< brought up for these leases, or in advance
  std::uint64_t min_bytes = 0;    ///< the fewest, over all choices of chunks to evict

  /// Returns the bytes that an optimal choice would have saved.
  [[nodiscard]] constexpr std::uint64_t bytes() const noexcept { return moved_bytes - min_bytes; }
  /// Returns the bytes moved for each necessary one; 1 if no choice moves fewer.
  [[nodiscard]] constexpr double ratio() const noexcept {
    if (moved_bytes == min_bytes) return 1.0;
    return static_cast<double>(moved_bytes) / static_cast<double>(min_bytes);
  }

  friend constexpr bool operator==(const access_regret&, const access_regret&) noexcept = default;
};

/// Keeps the last events of a tier 0 in a ring, and compares them with Belady's MIN.
///
///     struct watched : tiered_traits {
///       using observer = access_window;
///     };
///     basic_tiered_buffer<watched, tier<host_space>, tier<file_space<>>> buffer(
///         access_window(4096), {}, {host, budget}, {disk, size});
///     ...
///     buffer.observer().regret(budget).ratio();     // 1.0: no policy could have moved less
///
/// An `access_observer`; any other code with chunks and a budget may report events to it, too.
///
/// **The least** is `lower_bound`'s on the window's events (bounds.hpp has the proof), from the contents of
/// tier 0 when the window began: for equal chunks exactly the bytes that MIN fetches from then on, for other
/// chunks and with overlapping leases a bound below MIN's. Each chunk's first event shows whether tier 0 held
/// it, so the bound assumes no free contents, and `moved_bytes` is at least the bound. Bytes count as tier 0
/// rounds them. The buffer reports clones that share contents as one chunk.
///
/// A chunk that was prefetched and is not yet used counts as moved, and as regret until the window has a
/// lease that uses it. A chunk whose size changes counts as a new one.
///
/// @par Complexity      an event O(1), 16 bytes, in memory taken by the constructor. `regret` is O(events log
///                      events), and allocates.
/// @par Thread safety   as a plain value; movable.
/// @par Errors          the constructor throws `argument_error` for no events, and `out_of_memory`.
class access_window {
 public:
  /// @param events  how many events it keeps: a lease is two, a lease that misses in a full tier four.
  explicit access_window(std::uint32_t events, const metadata_source& metadata = {});

  /// @name Events   of a chunk in tier 0, which takes `bytes` there, at least 1
  /// @{
  /// The first lease of the chunk began.
  void on_leased(chunk_id chunk, std::uint64_t bytes, access_mode mode) noexcept {
    add(chunk, bytes,
        mode == access_mode::write  ? kind::written
        : mode == access_mode::read ? kind::read
                                    : kind::updated);
  }
  /// The last lease of the chunk ended.
  void on_released(chunk_id chunk, std::uint64_t bytes) noexcept { add(chunk, bytes, kind::released); }
  /// The chunk was brought up from the tier below.
  void on_arrived(chunk_id chunk, std::uint64_t bytes) noexcept { add(chunk, bytes, kind::arrived); }
  /// The chunk appeared in tier 0 without a lease and without a transfer from below: copied from contents of
  /// this tier.
  void on_made(chunk_id chunk, std::uint64_t bytes) noexcept { add(chunk, bytes, kind::made); }
  /// The chunk was evicted, discarded or removed.
  void on_left(chunk_id chunk, std::uint64_t bytes) noexcept { add(chunk, bytes, kind::left); }
  /// @}

  /// Returns the regret of the window's events, for a tier 0 of `budget` bytes.
  [[nodiscard]] access_regret regret(std::uint64_t budget) const;

  /// Returns the number of events in the window, at most `capacity()`; the oldest leave first.
  [[nodiscard]] std::size_t size() const noexcept {
    return seen_ < events_.size() ? static_cast<std::size_t>(seen_) : events_.size();
  }
  [[nodiscard]] std::size_t capacity() const noexcept { return events_.size(); }
  /// Drops all events.
  void clear() noexcept { seen_ = 0; }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return events_.bytes(); }

 private:
  enum class kind : std::uint8_t { read, updated, written, released, arrived, made, left };
  struct event {
    std::uint64_t bytes;
    chunk_id chunk;
    kind what;
  };

  void add(chunk_id chunk, std::uint64_t bytes, kind what) noexcept {
    events_[static_cast<std::size_t>(seen_++ % events_.size())] = {bytes, chunk, what};
  }
  /// Returns the i-th event in the window, oldest first.
  [[nodiscard]] const event& at(std::size_t i) const noexcept {
    return events_[seen_ <= events_.size() ? i : static_cast<std::size_t>((seen_ + i) % events_.size())];
  }

  detail::fixed_array<event> events_;
  std::uint64_t seen_ = 0;
};

static_assert(access_observer<access_window>);

}  // namespace v0
}  // namespace llmmem

#if LLMMEM_SCHEDULE_BODIES
#include <llmmem/schedule/detail/access_window_body.hpp>
#endif
