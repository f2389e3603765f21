/// @file
/// Places items into the gaps of time in which one machine is free.
///
/// An item's index is its place in the given list. `bubble_fill` has the guarantees and their proofs.
#pragma once

#include <llmmem/config.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <queue>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The time from `start_ns` to `finish_ns`, which is excluded.
struct time_gap {
  std::uint64_t start_ns = 0;
  std::uint64_t finish_ns = 0;

  friend constexpr bool operator==(const time_gap&, const time_gap&) noexcept = default;
};

namespace detail {

struct gap_item {
  std::size_t item = 0;  // the caller's number
  std::uint64_t ns = 0;
  std::uint64_t release_ns = 0;
  std::uint64_t deadline_ns = 0;
};

struct gap_piece {
  std::size_t index = 0;
  std::uint64_t start_ns = 0;
  std::uint64_t finish_ns = 0;
};

/// The result of earliest deadline first over the items marked in `chosen`: the pieces, and the first item in
/// time that misses its deadline, if any.
struct edf_run {
  std::vector<gap_piece> pieces;
  std::optional<std::size_t> missed;

  edf_run(std::span<const time_gap> gaps, std::span<const gap_item> items, const std::vector<bool>& chosen) {
    std::vector<std::size_t> arrivals;
    std::vector<std::uint64_t> left(items.size(), 0);
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (!chosen[i]) continue;
      arrivals.push_back(i);
      left[i] = items[i].ns;
    }
    std::ranges::sort(arrivals, [&](std::size_t a, std::size_t b) {
      return std::tuple(items[a].release_ns, a) < std::tuple(items[b].release_ns, b);
    });
    using urgency = std::pair<std::uint64_t, std::size_t>;  // deadline, index
    struct later {
      bool operator()(const urgency& a, const urgency& b) const noexcept { return a > b; }
    };
    std::priority_queue<urgency, std::vector<urgency>, later> ready;
    std::size_t next = 0;
    for (const time_gap& gap : gaps) {
      std::uint64_t now = gap.start_ns;
      while (now < gap.finish_ns) {
        for (; next < arrivals.size() && items[arrivals[next]].release_ns <= now; ++next)
          ready.emplace(items[arrivals[next]].deadline_ns, arrivals[next]);
        std::uint64_t until = gap.finish_ns;
        if (next < arrivals.size()) until = std::min(until, items[arrivals[next]].release_ns);
        if (ready.empty()) {
          now = until;
          continue;
        }
        const std::size_t index = ready.top().second;
        until = std::min(until, now + left[index]);
        if (until > items[index].deadline_ns) {
          missed = index;
          return;
        }
        if (!pieces.empty() && pieces.back().index == index && pieces.back().finish_ns == now) {
          pieces.back().finish_ns = until;
        } else {
          pieces.push_back({.index = index, .start_ns = now, .finish_ns = until});
        }
        left[index] -= until - now;
        if (left[index] == 0) ready.pop();
        now = until;
      }
    }
    if (!ready.empty()) {
      missed = ready.top().second;
    } else if (next < arrivals.size()) {
      missed = arrivals[next];
    }
  }
};

[[nodiscard]] inline std::vector<gap_piece> greedy_cut(std::span<const time_gap> gaps,
                                                       std::span<const gap_item> items) {
  std::vector<bool> chosen(items.size(), true);
  for (;;) {
    const edf_run run(gaps, items, chosen);
    if (!run.missed) break;
    const auto due = [&](std::size_t i) { return std::tuple(items[i].deadline_ns, i); };
    std::size_t longest = *run.missed;
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (chosen[i] && due(i) <= due(*run.missed) && items[i].ns > items[longest].ns) longest = i;
    }
    chosen[longest] = false;
  }
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (chosen[i]) continue;
    chosen[i] = true;
    if (edf_run(gaps, items, chosen).missed) chosen[i] = false;
  }
  return edf_run(gaps, items, chosen).pieces;
}

/// Returns the first place at or after `from` at which `item` fits undivided into a gap and meets release and
/// deadline.
[[nodiscard]] inline std::optional<std::uint64_t> first_place(std::span<const time_gap> gaps,
                                                              const gap_item& item, std::uint64_t from) {
  from = std::max(from, item.release_ns);
  auto gap = std::ranges::partition_point(gaps, [&](const time_gap& each) { return each.finish_ns <= from; });
  for (; gap != gaps.end(); ++gap) {
    const std::uint64_t start = std::max(from, gap->start_ns);
    if (start >= item.deadline_ns || item.ns > item.deadline_ns - start) return std::nullopt;
    if (item.ns <= gap->finish_ns - start) return start;
  }
  return std::nullopt;
}

[[nodiscard]] inline std::vector<gap_piece> greedy_whole(std::span<const time_gap> gaps,
                                                         std::span<const gap_item> items) {
  std::vector<std::size_t> order(items.size());
  for (std::size_t i = 0; i < order.size(); ++i)
    order[i] = i;
  std::ranges::sort(order, [&](std::size_t a, std::size_t b) {
    return std::tuple(items[a].deadline_ns, items[a].release_ns, a) <
           std::tuple(items[b].deadline_ns, items[b].release_ns, b);
  });
  std::vector<time_gap> rest(gaps.begin(), gaps.end());
  std::vector<gap_piece> pieces;
  for (const std::size_t index : order) {
    const auto start = first_place(rest, items[index], 0);
    if (!start) continue;
    const std::uint64_t finish = *start + items[index].ns;
    pieces.push_back({.index = index, .start_ns = *start, .finish_ns = finish});
    const auto gap =
        std::ranges::partition_point(rest, [&](const time_gap& each) { return each.finish_ns <= *start; });
    const time_gap after{finish, gap->finish_ns};
    gap->finish_ns = *start;
    if (after.start_ns < after.finish_ns) {
      rest.insert(gap + 1, after);
    }
    std::erase_if(rest, [](const time_gap& each) { return each.start_ns == each.finish_ns; });
  }
  std::ranges::sort(pieces, [](const gap_piece& a, const gap_piece& b) { return a.start_ns < b.start_ns; });
  return pieces;
}

/// Subsets of n items, as bits; item 0 is the highest bit, so that of two subsets of equal size the greater
/// number has the item listed first.
class item_subsets {
 public:
  explicit item_subsets(std::size_t items) noexcept : items_(items) {}

  [[nodiscard]] std::uint32_t count() const noexcept { return std::uint32_t{1} << items_; }
  [[nodiscard]] std::uint32_t bit(std::size_t item) const noexcept {
    return std::uint32_t{1} << (items_ - 1 - item);
  }

  /// Returns the largest subset that `fits`; among equals, the greatest number.
  template <class Fits>
  [[nodiscard]] std::uint32_t largest(const Fits& fits) const {
    std::uint32_t best = 0;
    for (std::uint32_t set = count(); set-- > 1;) {
      if (std::popcount(set) > std::popcount(best) && fits(set)) best = set;
    }
    return best;
  }

 private:
  std::size_t items_;
};

[[nodiscard]] inline std::vector<gap_piece> most_cut(std::span<const time_gap> gaps,
                                                     std::span<const gap_item> items) {
  const item_subsets subsets(items.size());
  const auto run = [&](std::uint32_t set) {
    std::vector<bool> chosen(items.size());
    for (std::size_t i = 0; i < items.size(); ++i)
      chosen[i] = (set & subsets.bit(i)) != 0;
    return edf_run(gaps, items, chosen);
  };
  return run(subsets.largest([&](std::uint32_t set) { return !run(set).missed; })).pieces;
}

[[nodiscard]] inline std::vector<gap_piece> most_whole(std::span<const time_gap> gaps,
                                                       std::span<const gap_item> items) {
  // An earlier end is never worse, because it can only let later items start sooner.
  constexpr std::uint64_t never = ~std::uint64_t{0};
  struct finished {
    std::uint64_t at_ns = ~std::uint64_t{0};
    std::uint64_t last_start_ns = 0;
    std::size_t last = 0;
  };
  const item_subsets subsets(items.size());
  std::vector<finished> soonest(subsets.count());
  soonest[0].at_ns = 0;
  for (std::uint32_t set = 1; set < subsets.count(); ++set) {
    for (std::size_t i = 0; i < items.size(); ++i) {
      if ((set & subsets.bit(i)) == 0) continue;
      const finished& before = soonest[set & ~subsets.bit(i)];
      if (before.at_ns == never) continue;
      const auto start = first_place(gaps, items[i], before.at_ns);
      if (start && *start + items[i].ns < soonest[set].at_ns) {
        soonest[set] = {.at_ns = *start + items[i].ns, .last_start_ns = *start, .last = i};
      }
    }
  }
  std::vector<gap_piece> pieces;
  std::uint32_t set = subsets.largest([&](std::uint32_t each) { return soonest[each].at_ns != never; });
  while (set != 0) {
    const finished& step = soonest[set];
    pieces.push_back({.index = step.last, .start_ns = step.last_start_ns, .finish_ns = step.at_ns});
    set &= ~subsets.bit(step.last);
  }
  std::ranges::reverse(pieces);
  return pieces;
}

}  // namespace detail

}  // namespace v0
}  // namespace llmmem
