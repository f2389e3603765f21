/// @file
/// Places deferrable work into the bubbles of a pipeline, without making the pipeline longer.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/schedule/detail/gap_fill.hpp>
#include <llmmem/schedule/detail/nanoseconds.hpp>
#include <llmmem/schedule/pipeline_timeline.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Work for a device's bubbles: an offload copy, a checkpoint's write, the redundant forward pass of the
/// neighbour (Bamboo, Thorpe et al., NSDI 2023).
struct bubble_work {
  /// No deadline.
  static constexpr std::uint64_t no_deadline = ~std::uint64_t{0};

  std::uint32_t device = 0;
  std::uint64_t ns = 0;
  std::uint64_t release_ns = 0;             ///< the earliest start
  std::uint64_t deadline_ns = no_deadline;  ///< the latest end
};

/// A copy that takes the device's time: `copy_ns` computes its `bubble_work::ns`.
struct bubble_copy {
  std::uint64_t bytes = 0;
  std::uint64_t bytes_per_second = 0;  ///< 1 to 2^53
  std::uint64_t latency_ns = 0;
};

/// Returns the latency plus bytes over bandwidth, rounded up to whole nanoseconds; 0 for no bytes.
/// @throws argument_error  for a bandwidth out of range.
/// @throws length_error    when the time passes 2^63 - 1 ns.
[[nodiscard]] constexpr std::uint64_t copy_ns(const bubble_copy& copy) {
  return detail::link_ns(copy.bytes, copy.bytes_per_second, copy.latency_ns, "copy_ns");
}

namespace schedule {

/// Whether work may be cut into pieces that run in several bubbles, at no cost.
enum class preemption : std::uint8_t { none, free };

}  // namespace schedule

using preemption [[deprecated("its name is schedule::preemption")]] = schedule::preemption;

/// How thoroughly to search.
enum class bubble_search : std::uint8_t {
  greedy,  ///< earliest deadline first
  exact,   ///< as many items as can be placed; for few items per device
};

/// The options of `bubble_fill`.
struct bubble_options {
  schedule::preemption cut = schedule::preemption::none;
  bubble_search search = bubble_search::greedy;
};

/// The maximum number of items of one device that `bubble_search::exact` takes, because it tries each of
/// their 2^n subsets.
inline constexpr std::size_t max_exact_bubble_items = 16;

/// Part of an item, or all of it.
struct bubble_piece {
  std::size_t item = 0;  ///< index into the work given
  std::uint32_t device = 0;
  std::uint64_t start_ns = 0;
  std::uint64_t finish_ns = 0;

  friend constexpr bool operator==(const bubble_piece&, const bubble_piece&) noexcept = default;
};

/// The place of each item, and the items that found no space.
struct bubble_plan {
  std::vector<bubble_piece> pieces{};   ///< by device, then by start
  std::vector<std::size_t> left_out{};  ///< items that were not placed at all, ascending
  std::uint64_t filled_ns = 0;          ///< bubble time with work
  std::uint64_t idle_ns = 0;            ///< bubble time that is left
};

/// Returns the intervals from 0 to the makespan in which `device` computes nothing, ascending, none of them
/// empty.
/// @throws argument_error  when the timeline has no such device, or its spans overlap or pass the makespan.
[[nodiscard]] inline std::vector<time_gap> bubbles_of(const pipeline_timeline& timeline,
                                                      std::uint32_t device) {
  if (device >= timeline.tasks.size()) {
    throw argument_error("bubbles_of: device " + std::to_string(device) + "; the timeline has " +
                         std::to_string(timeline.tasks.size()));
  }
  std::vector<time_gap> gaps{};
  std::uint64_t from = 0;
  for (const task_span& span : timeline.tasks[device]) {
    if (span.start_ns < from || span.finish_ns < span.start_ns || span.finish_ns > timeline.makespan_ns) {
      throw argument_error("bubbles_of: device " + std::to_string(device) + " runs a task from " +
                           std::to_string(span.start_ns) + " to " + std::to_string(span.finish_ns) +
                           " ns, after one until " + std::to_string(from) + " ns and with a makespan of " +
                           std::to_string(timeline.makespan_ns) + " ns; take a timeline as simulated");
    }
    if (span.start_ns > from) gaps.push_back({from, span.start_ns});
    from = span.finish_ns;
  }
  if (timeline.makespan_ns > from) gaps.push_back({from, timeline.makespan_ns});
  return gaps;
}

/// Places each item completely into bubbles of its device, between its release and its deadline, or leaves it
/// out. Items run one at a time. No task moves, so the makespan stays the same. Devices do not affect each
/// other.
///
/// **Greedy, cut freely.** At each moment of a bubble, the released item with the earliest deadline runs
/// (EDF). When that misses a deadline, the search leaves out the longest item due at the missed deadline or
/// earlier, and starts again; at the end it tries each left-out item once more. So no left-out item can be
/// added to the result. It places all items whenever that is possible, and as many as possible when no item
/// has a release time (Moore and Hodgson 1968); with release times it may place a few fewer. *Why EDF meets
/// all deadlines that can be met:* take a schedule that meets all, and the first moment at which EDF runs
/// item a while the schedule runs b or nothing. The schedule runs the rest of a later, before a's deadline.
/// Exchange as much of that as possible with the work done now: a is released, so it may run now; b, due no
/// earlier than a, then ends by a's deadline. All deadlines are still met, and the two schedules agree for
/// longer. (Time outside the bubbles exists for neither schedule.)
///
/// **Greedy, undivided.** In the order of deadlines, each item goes to the earliest gap that it fits. A
/// left-out item fits into no remaining gap, but another order might place more items: the problem is
/// NP-hard.
///
/// **Exact.** Places as many items as possible; of two equally large sets, it chooses the one with the item
/// listed first. Cut freely: EDF decides each subset. Undivided: computes for each subset the earliest moment
/// by which all of it can be done, from the subsets with one item less.
///
/// @par Complexity   of n items of a device over g bubbles: greedy O(n (n + g) log n) cut, O(n (n + g))
///                   undivided; exact O(2^n (n + g) log n) cut, O(2^n n g) undivided.
/// @throws argument_error  for an item of no length, of a device the timeline lacks, or released after its
///                         deadline; as `bubbles_of`.
/// @throws length_error    for more than `max_exact_bubble_items` of a device under exact search.
[[nodiscard]] inline bubble_plan bubble_fill(const pipeline_timeline& timeline,
                                             std::span<const bubble_work> work,
                                             const bubble_options& options = {}) {
  const auto refuse = [](std::size_t item, const std::string& why) {
    throw argument_error("bubble_fill: item " + std::to_string(item) + " " + why);
  };
  std::vector<std::vector<detail::gap_item>> by_device(timeline.tasks.size());
  for (std::size_t i = 0; i < work.size(); ++i) {
    const bubble_work& item = work[i];
    if (item.device >= timeline.tasks.size()) {
      refuse(i, "is for device " + std::to_string(item.device) + "; the timeline has " +
                    std::to_string(timeline.tasks.size()));
    }
    if (item.ns == 0) refuse(i, "takes 0 ns; leave it out");
    if (item.release_ns > item.deadline_ns) {
      refuse(i, "is released at " + std::to_string(item.release_ns) + " ns, after its deadline at " +
                    std::to_string(item.deadline_ns) + " ns");
    }
    by_device[item.device].push_back({.item = i,
                                      .ns = item.ns,
                                      .release_ns = item.release_ns,
                                      .deadline_ns = std::min(item.deadline_ns, timeline.makespan_ns)});
  }

  bubble_plan plan;
  for (std::uint32_t device = 0; device < timeline.tasks.size(); ++device) {
    const auto& items = by_device[device];
    const auto gaps = bubbles_of(timeline, device);
    if (options.search == bubble_search::exact && items.size() > max_exact_bubble_items) {
      throw length_error("bubble_fill: device " + std::to_string(device) + " has " +
                         std::to_string(items.size()) + " items, but exact search takes at most " +
                         std::to_string(max_exact_bubble_items) + "; use greedy search, or give it fewer");
    }
    const bool cut = options.cut == schedule::preemption::free;
    const auto pieces = options.search == bubble_search::exact
                            ? (cut ? detail::most_cut(gaps, items) : detail::most_whole(gaps, items))
                            : (cut ? detail::greedy_cut(gaps, items) : detail::greedy_whole(gaps, items));
    std::vector<bool> placed(items.size(), false);
    for (const auto& piece : pieces) {
      placed[piece.index] = true;
      plan.filled_ns += piece.finish_ns - piece.start_ns;
      plan.pieces.push_back({.item = items[piece.index].item,
                             .device = device,
                             .start_ns = piece.start_ns,
                             .finish_ns = piece.finish_ns});
    }
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (!placed[i]) plan.left_out.push_back(items[i].item);
    }
    for (const time_gap& gap : gaps)
      plan.idle_ns += gap.finish_ns - gap.start_ns;
  }
  plan.idle_ns -= plan.filled_ns;
  std::ranges::sort(plan.left_out);
  return plan;
}

}  // namespace v0
}  // namespace llmmem
