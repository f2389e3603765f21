/// @file
/// `cow_state_view`: a checkpoint of state in `cow_range`s that changes while it is being saved.
#pragma once

#include <llmmem/checkpoint/detail/shared_part.hpp>
#include <llmmem/checkpoint/state_view.hpp>
#include <llmmem/config.hpp>
#include <llmmem/detail/history.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/version/concepts.hpp>
#include <llmmem/version/cow_range.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The bytes of tensors at one moment: snapshots of `cow_range`s that continue to change.
///
///     struct my_traits : checkpointer_traits { using view_type = cow_state_view; };
///     cow_range state(state_bytes, spare_bytes);  // before the checkpointer: it outlives the views
///     const std::array<cow_range*, 1> ranges{&state};
///     async_checkpointer<my_traits> saves(coordinator, tensors);
///     std::optional<snapshot_guard> saving;
///     ...
///     saving.emplace(saves.begin_snapshot(step, cow_state_view(ranges, places)));
///     optimizer.step(saves.gate().mutate());      // waits for nothing
///
/// The optimizer requests writable memory by `cow_range::write`, which copies old pages into the pool. If the
/// pool is full, it waits until the snapshot has been read and its pages are free; the saved state is
/// unaffected.
///
///     const auto by_waiting = [&](std::uint64_t) {
///       if (!saving) return false;  // nothing is being read: waiting would free nothing
///       saving->wait_staged();      // at most max_stall_ns
///       saving.reset();
///       return true;                // even if it was already read: look again
///     };
///     std::span<std::byte> weights = state.write(offset, bytes, by_waiting).value();
///
/// So a pool of any size is correct; a larger one stalls less. All pages return at once, when the whole
/// snapshot has been read. Snapshots are read in the order in which they began, so a wait for the newest is a
/// wait for all. A snapshot is refused while `max_snapshots` are alive, so set that to at least
/// `checkpointer_options::max_pending` + 1.
///
/// Copies of a view share its snapshots, which the last copy releases.
///
/// @par Complexity      to take one, O(ranges + tensors), and O(1) for each snapshot of one range that the
///   others lack. `is_unchanged_since` O(log(changed runs)); the first call for a tag O(pages), with 16 bytes
///   per run.
/// @par Thread safety   the writer of the ranges takes a view; then any one thread at a time may read it, and
///   several threads may read copies. The ranges, their bytes and their pools outlive it: see
///   `snapshot_guard`.
/// @par Errors          the constructor throws `argument_error` for an empty list, a null range or a
///                      duplicate, and `out_of_memory` for a refused snapshot.
class cow_state_view {
 public:
  static constexpr bool is_concurrent = true;
  static constexpr bool is_stable = true;

  /// Takes a snapshot of each range, all with the same version number: one above the highest of any of them.
  /// @param places  the place of each tensor, in the order of their descriptions; its source is a range.
  cow_state_view(std::span<cow_range* const> ranges, const view_list<state_place>& places) : places_(places) {
    std::uint64_t newest = 0;
    for (const cow_range* each : ranges) {
      if (each == nullptr) throw argument_error("cow_state_view: a range is null");
      if (to_number(each->newest()) > newest) newest = to_number(each->newest());
    }
    if (ranges.empty())
      throw argument_error("cow_state_view: no ranges; pass the ranges that hold the tensors");
    version_ = newest + 1;
    snapshots_->reserve(ranges.size());
    for (cow_range* each : ranges) {
      history_.add(each->identity());
      snapshots_->push_back(snapshot_of(*each, version_));
    }
    detail::add_places(history_, places_.entries());
  }

  /// @throws argument_error  if a tensor has fewer bytes than described, or is not inside a range.
  void copy_out(std::uint32_t tensor, std::uint64_t offset, std::span<std::byte> into) const {
    const state_place& place =
        detail::place_of(places_.entries(), tensor, offset, into.size(), "cow_state_view");
    check(place, tensor);
    (*snapshots_)[place.source].read(place.offset + offset, into).value();
  }

  /// See `change_tracking_view`. Views of other ranges or places do not know this version, even if a new
  /// range replaced another in the same place.
  [[nodiscard]] std::uint64_t version() const noexcept { return history_.tag(version_); }
  /// Decides by pages. `version` is that of a view of the same ranges, which may have been destroyed.
  /// @throws argument_error  as `copy_out`; `std::bad_alloc`.
  [[nodiscard]] bool is_unchanged_since(std::uint64_t version, std::uint32_t tensor, std::uint64_t offset,
                                        std::uint64_t bytes) const {
    const state_place& place = detail::place_of(places_.entries(), tensor, offset, bytes, "cow_state_view");
    check(place, tensor);
    const std::uint64_t number = history_.number(version);
    if (number == 0 || number > version_) return false;
    if (number != since_) look_since(number);
    const std::uint64_t begin = place.offset + offset;
    const std::vector<run>& runs = changed_[place.source];
    // Finds the first run that ends after `begin`.
    std::size_t low = 0;
    for (std::size_t high = runs.size(); low < high;) {
      const std::size_t middle = low + (high - low) / 2;
      if (runs[middle].end <= begin) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return bytes == 0 || low == runs.size() || runs[low].begin >= begin + bytes;
  }

  [[nodiscard]] std::span<const state_place> places() const noexcept { return places_.entries(); }

 private:
  struct run {
    std::uint64_t begin = 0;  // first byte in the range; runs are whole pages
    std::uint64_t end = 0;
  };

  [[nodiscard]] static cow_snapshot snapshot_of(cow_range& range, std::uint64_t version) {
    if (to_number(range.newest()) >= version)
      throw argument_error("cow_state_view: " + range.name() + " is listed twice");
    for (;;) {
      result<cow_snapshot> taken = range.snapshot();
      if (taken.code() == errc::table_full) {
        throw out_of_memory("cow_state_view: " + std::to_string(range.live()) + " snapshots of " +
                            range.name() +
                            " are alive, the maximum; wait until one is staged, or raise "
                            "copy_on_write::max_snapshots");
      }
      cow_snapshot made = std::move(taken).value();
      if (to_number(made.version()) == version) return made;
    }
  }

  void check(const state_place& place, std::uint32_t tensor) const {
    detail::check_held(static_cast<bool>(snapshots_), "cow_state_view");
    if (place.source >= snapshots_->size()) {
      throw argument_error("cow_state_view: tensor " + std::to_string(tensor) + " is in range " +
                           std::to_string(place.source) + ", but the number of ranges is " +
                           std::to_string(snapshots_->size()));
    }
    detail::check_place(place, tensor, (*snapshots_)[place.source].bytes(), "cow_state_view");
  }

  void look_since(std::uint64_t version) const {
    std::vector<std::vector<run>> changed(snapshots_->size());
    for (std::size_t i = 0; i < changed.size(); ++i) {
      const cow_snapshot& snapshot = (*snapshots_)[i];
      const std::uint64_t page = snapshot.page_bytes();
      snapshot.changed_since(version_id{version}, [&](std::uint64_t first, std::uint64_t count) {
        changed[i].push_back({first * page, (first + count) * page});
      });
    }
    changed_ = std::move(changed);
    since_ = version;
  }

  view_list<state_place> places_;
  std::uint64_t version_ = 0;      // of each range
  detail::history_tag history_{};  // the history to which those versions belong
  detail::shared_part<std::vector<cow_snapshot>> snapshots_{std::in_place};
  mutable std::uint64_t since_ = 0;  // the version looked up last
  // The runs of each range that have changed since then, in order.
  mutable std::vector<std::vector<run>> changed_{};
};

static_assert(change_tracking_view<cow_state_view> && is_stable_view<cow_state_view>);

}  // namespace v0
}  // namespace llmmem
