/// @file
/// The last accesses of a running program, and how far what came up for them is from the fewest bytes
/// possible.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/tiering/access.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// What came up to tier 0 in a window of accesses, and what had to.
struct access_regret {
  std::uint64_t accesses = 0;     ///< leases that began in the window
  std::uint64_t moved_bytes = 0;  ///< brought up for them, or in advance
  std::uint64_t least_bytes = 0;  ///< that had to be, whoever chooses what leaves

  /// Bytes that a choice with foresight would not have brought.
  [[nodiscard]] constexpr std::uint64_t bytes() const noexcept { return moved_bytes - least_bytes; }
  /// Bytes moved for each one that had to be; 1 where nothing was to be gained.
  [[nodiscard]] constexpr double ratio() const noexcept {
    if (moved_bytes == least_bytes) return 1.0;
    return static_cast<double>(moved_bytes) / static_cast<double>(least_bytes);
  }

  friend constexpr bool operator==(const access_regret&, const access_regret&) noexcept = default;
};

/// Keeps the last events of a tier 0 in a ring, and tells what Belady's MIN would have made of them.
///
///     struct watched : tiered_traits {
///       using observer = access_window;
///     };
///     basic_tiered_buffer<watched, tier<host_space>, tier<file_space<>>> buffer(
///         access_window(4096), {}, {host, budget}, {disk, size});
///     ...
///     buffer.observer().regret(budget).ratio();     // 1.0: no policy could have moved less
///
/// An `access_observer`; it may as well be fed by whoever else has chunks and a budget.
///
/// **The least** is `lower_bound`'s on the window's events (bounds.hpp has the proof), from what lay in tier
/// 0 when the window began: for equal chunks exactly what MIN fetches from there, for others and with leases
/// that overlap a bound below it. What lay there is told by each chunk's first event, so that nothing is had
/// for free: `moved_bytes` is never less than the least. Bytes are as tier 0 rounds them. Of clones that
/// share what they hold the buffer tells as of one chunk.
///
/// What was brought in advance and is still to be used counts as moved, and is regretted until the window has
/// the lease that uses it. A chunk that gets another size counts as a new one.
///
/// @par Complexity      an event O(1), 16 bytes, in memory taken by the constructor. `regret` is
///                      O(events log events), and allocates.
/// @par Thread safety   as a plain value; movable.
/// @par Errors          the constructor throws `argument_error` for no events, and `out_of_memory`.
class access_window {
 public:
  /// @param events  how many it keeps: a lease is two, one that misses in a full tier four.
  explicit access_window(std::uint32_t events, const metadata_source& metadata = {});

  /// @name Events   of a chunk in tier 0, which takes `bytes` there, not 0
  /// @{
  /// A lease began, where there was none.
  void on_leased(chunk_id chunk, std::uint64_t bytes, access_mode mode) noexcept {
    add(chunk, bytes,
        mode == access_mode::write  ? kind::written
        : mode == access_mode::read ? kind::read
                                    : kind::updated);
  }
  /// The last lease of it ended.
  void on_released(chunk_id chunk, std::uint64_t bytes) noexcept { add(chunk, bytes, kind::released); }
  /// It was brought from beneath.
  void on_arrived(chunk_id chunk, std::uint64_t bytes) noexcept { add(chunk, bytes, kind::arrived); }
  /// It came to be there without a lease, and without coming from beneath: copied from what lay there.
  void on_made(chunk_id chunk, std::uint64_t bytes) noexcept { add(chunk, bytes, kind::made); }
  /// It was evicted, discarded or removed.
  void on_left(chunk_id chunk, std::uint64_t bytes) noexcept { add(chunk, bytes, kind::left); }
  /// @}

  /// How well what is in the window was done, by a tier 0 of `budget` bytes.
  [[nodiscard]] access_regret regret(std::uint64_t budget) const;

  /// Events it keeps now, at most `capacity()`, the oldest given up first.
  [[nodiscard]] std::size_t size() const noexcept {
    return seen_ < events_.size() ? static_cast<std::size_t>(seen_) : events_.size();
  }
  [[nodiscard]] std::size_t capacity() const noexcept { return events_.size(); }
  /// Begins anew.
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
  /// The i-th of those kept, the oldest first.
  [[nodiscard]] const event& at(std::size_t i) const noexcept {
    return events_[seen_ <= events_.size() ? i : static_cast<std::size_t>((seen_ + i) % events_.size())];
  }

  detail::fixed_array<event> events_;
  std::uint64_t seen_ = 0;
};

static_assert(access_observer<access_window>);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/schedule/detail/access_window_body.hpp>
