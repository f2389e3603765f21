#include "support/random.hpp"
#include "support/seeds.hpp"

#include <llmmem/schedule/bubble_fill.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

using namespace llmmem;
using llmmem_tests::random_numbers;
using llmmem_tests::seeds;

namespace {

constexpr bubble_options cut_greedy{.cut = llmmem::schedule::preemption::free};
constexpr bubble_options whole_greedy{.cut = llmmem::schedule::preemption::none};
constexpr bubble_options cut_exact{.cut = llmmem::schedule::preemption::free, .search = bubble_search::exact};
constexpr bubble_options whole_exact{.cut = llmmem::schedule::preemption::none,
                                     .search = bubble_search::exact};

/// One device that is busy in some of `ticks` nanoseconds.
pipeline_timeline random_timeline(random_numbers& random, std::uint64_t ticks) {
  pipeline_timeline timeline{.tasks = {{}}, .makespan_ns = ticks};
  for (std::uint64_t now = random.below(std::uint64_t{4}); now < ticks;) {
    const std::uint64_t finish = std::min(ticks, now + 1 + random.below(std::uint64_t{4}));
    timeline.tasks[0].push_back({.task = {}, .start_ns = now, .finish_ns = finish});
    now = finish + random.below(std::uint64_t{5});
  }
  return timeline;
}

std::vector<bubble_work> random_work(random_numbers& random, std::size_t items, std::uint64_t ticks,
                                     std::uint64_t longest) {
  std::vector<bubble_work> work;
  for (std::size_t i = 0; i < items; ++i) {
    bubble_work item{.ns = 1 + random.below(longest)};
    if (random.once_in(2)) item.release_ns = random.below(ticks);
    if (!random.once_in(3)) item.deadline_ns = item.release_ns + random.below(ticks);
    work.push_back(item);
  }
  return work;
}

std::vector<bool> idle_ticks(const pipeline_timeline& timeline) {
  std::vector<bool> idle(static_cast<std::size_t>(timeline.makespan_ns), true);
  for (const auto& span : timeline.tasks[0]) {
    for (auto tick = span.start_ns; tick < span.finish_ns; ++tick)
      idle[tick] = false;
  }
  return idle;
}

/// Whether all items in `set` can be cut into idle ticks: a matching of each of their nanoseconds with a
/// tick, by augmenting paths (Kuhn).
bool can_be_cut(const std::vector<bool>& idle, const std::vector<bubble_work>& work, std::uint32_t set) {
  std::vector<std::optional<std::size_t>> user(idle.size());
  for (std::size_t i = 0; i < work.size(); ++i) {
    if ((set >> i & 1) == 0) continue;
    for (std::uint64_t unit = 0; unit < work[i].ns; ++unit) {
      std::vector<bool> tried(idle.size(), false);
      const auto place = [&](const auto& self, std::size_t item) -> bool {
        const auto end = std::min<std::uint64_t>(idle.size(), work[item].deadline_ns);
        for (auto tick = work[item].release_ns; tick < end; ++tick) {
          if (!idle[tick] || tried[tick]) continue;
          tried[tick] = true;
          if (!user[tick] || self(self, *user[tick])) {
            user[tick] = item;
            return true;
          }
        }
        return false;
      };
      if (!place(place, i)) return false;
    }
  }
  return true;
}

/// The most items that can be placed whole: every start of every item tried.
std::size_t most_whole_items(std::vector<bool>& idle, const std::vector<bubble_work>& work,
                             std::size_t i = 0) {
  if (i == work.size()) return 0;
  std::size_t best = most_whole_items(idle, work, i + 1);
  for (auto start = work[i].release_ns; start + work[i].ns <= idle.size(); ++start) {
    if (start + work[i].ns > work[i].deadline_ns) break;
    bool free = true;
    for (auto tick = start; tick < start + work[i].ns; ++tick)
      free = free && idle[tick];
    if (!free) continue;
    for (auto tick = start; tick < start + work[i].ns; ++tick)
      idle[tick] = false;
    best = std::max(best, 1 + most_whole_items(idle, work, i + 1));
    for (auto tick = start; tick < start + work[i].ns; ++tick)
      idle[tick] = true;
  }
  return best;
}

/// Every promise of a plan that does not speak of how many: each tick once and idle, each item whole, in
/// time.
void check_plan(const pipeline_timeline& timeline, const std::vector<bubble_work>& work,
                const bubble_plan& plan, llmmem::schedule::preemption cut) {
  auto idle = idle_ticks(timeline);
  const auto idle_before = static_cast<std::uint64_t>(std::count(idle.begin(), idle.end(), true));
  std::vector<std::uint64_t> done(work.size(), 0);
  std::uint64_t filled = 0;
  std::uint64_t last_start = 0;
  for (const auto& piece : plan.pieces) {
    REQUIRE(piece.start_ns < piece.finish_ns);
    REQUIRE(piece.finish_ns <= timeline.makespan_ns);
    REQUIRE(piece.start_ns >= last_start);
    last_start = piece.start_ns;
    REQUIRE(piece.start_ns >= work[piece.item].release_ns);
    REQUIRE(piece.finish_ns <= work[piece.item].deadline_ns);
    for (auto tick = piece.start_ns; tick < piece.finish_ns; ++tick) {
      REQUIRE(idle[tick]);
      idle[tick] = false;
    }
    done[piece.item] += piece.finish_ns - piece.start_ns;
    filled += piece.finish_ns - piece.start_ns;
    if (cut == llmmem::schedule::preemption::none)
      REQUIRE(piece.finish_ns - piece.start_ns == work[piece.item].ns);
  }
  for (std::size_t i = 0; i < work.size(); ++i) {
    const bool left_out = std::count(plan.left_out.begin(), plan.left_out.end(), i) == 1;
    REQUIRE(done[i] == (left_out ? 0 : work[i].ns));
  }
  REQUIRE(std::is_sorted(plan.left_out.begin(), plan.left_out.end()));
  REQUIRE(plan.filled_ns == filled);
  REQUIRE(plan.idle_ns == idle_before - filled);
}

std::string refusal(const pipeline_timeline& timeline, const std::vector<bubble_work>& work,
                    const bubble_options& options = {}) {
  try {
    static_cast<void>(bubble_fill(timeline, work, options));
  } catch (const error& refused) {
    return refused.what();
  }
  return "";
}

}  // namespace

TEST_CASE(
    "for divisible work greedy places as many items as a matching can, and exact as many as any subset has") {
  for (const auto seed : seeds(400)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const auto timeline = random_timeline(random, 12 + random.below(std::uint64_t{20}));
    const auto work = random_work(random, static_cast<std::size_t>(1 + random.below(std::uint64_t{6})),
                                  timeline.makespan_ns, 5);
    const auto idle = idle_ticks(timeline);
    std::size_t most = 0;
    const std::uint32_t all = (1U << work.size()) - 1;
    for (std::uint32_t set = 0; set <= all; ++set) {
      if (can_be_cut(idle, work, set)) most = std::max(most, static_cast<std::size_t>(std::popcount(set)));
    }
    const auto exact = bubble_fill(timeline, work, cut_exact);
    check_plan(timeline, work, exact, llmmem::schedule::preemption::free);
    REQUIRE(work.size() - exact.left_out.size() == most);

    const auto greedy = bubble_fill(timeline, work, cut_greedy);
    check_plan(timeline, work, greedy, llmmem::schedule::preemption::free);
    REQUIRE(work.size() - greedy.left_out.size() <= most);
    if (most == work.size()) REQUIRE(greedy.left_out.empty());
    std::uint32_t placed = all;
    for (const auto item : greedy.left_out)
      placed &= ~(1U << item);
    for (const auto item : greedy.left_out)
      REQUIRE_FALSE(can_be_cut(idle, work, placed | 1U << item));
  }
}

TEST_CASE("with release times, greedy may place fewer items than exact") {
  const pipeline_timeline idle{.tasks = {{}}, .makespan_ns = 6};
  const std::vector<bubble_work> work{{.ns = 2, .release_ns = 3, .deadline_ns = 5},
                                      {.ns = 2, .release_ns = 4},
                                      {.ns = 3, .release_ns = 1, .deadline_ns = 5}};
  CHECK(bubble_fill(idle, work, cut_greedy).left_out == std::vector<std::size_t>{1, 2});
  CHECK(bubble_fill(idle, work, cut_exact).left_out == std::vector<std::size_t>{0});
}

TEST_CASE("for divisible work without release times, greedy places as many items as exact") {
  for (const auto seed : seeds(300)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const auto timeline = random_timeline(random, 30);
    auto work = random_work(random, static_cast<std::size_t>(1 + random.below(std::uint64_t{9})), 30, 9);
    for (auto& item : work)
      item.release_ns = 0;
    REQUIRE(bubble_fill(timeline, work, cut_greedy).left_out.size() ==
            bubble_fill(timeline, work, cut_exact).left_out.size());
  }
}

TEST_CASE(
    "for indivisible work exact places as many items as trying every start, and greedy at most as many") {
  for (const auto seed : seeds(200)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const auto timeline = random_timeline(random, 10 + random.below(std::uint64_t{12}));
    const auto work = random_work(random, static_cast<std::size_t>(1 + random.below(std::uint64_t{4})),
                                  timeline.makespan_ns, 4);
    auto idle = idle_ticks(timeline);
    const std::size_t most = most_whole_items(idle, work);
    const auto exact = bubble_fill(timeline, work, whole_exact);
    check_plan(timeline, work, exact, llmmem::schedule::preemption::none);
    REQUIRE(work.size() - exact.left_out.size() == most);
    const auto greedy = bubble_fill(timeline, work, whole_greedy);
    check_plan(timeline, work, greedy, llmmem::schedule::preemption::none);
    REQUIRE(work.size() - greedy.left_out.size() <= most);
    for (const auto& piece : greedy.pieces) {
      for (auto tick = piece.start_ns; tick < piece.finish_ns; ++tick)
        idle[tick] = false;
    }
    for (const auto item : greedy.left_out)
      REQUIRE(most_whole_items(idle, {work[item]}) == 0);
  }
}

TEST_CASE("indivisible work may fit in an order other than by deadline") {
  pipeline_timeline timeline{.tasks = {{{.start_ns = 3, .finish_ns = 5}}}, .makespan_ns = 7};
  const std::vector<bubble_work> work{{.ns = 2, .deadline_ns = 7}, {.ns = 3, .deadline_ns = 8}};
  CHECK(bubble_fill(timeline, work, whole_greedy).left_out == std::vector<std::size_t>{1});
  CHECK(bubble_fill(timeline, work, whole_exact).pieces ==
        std::vector<bubble_piece>{{1, 0, 0, 3}, {0, 0, 5, 7}});
}

TEST_CASE("indivisible work is ordered so that later items fit") {
  const pipeline_timeline idle{.tasks = {{}}, .makespan_ns = 9};
  const std::vector<bubble_work> work{{.ns = 3}, {.ns = 1, .release_ns = 5}, {.ns = 3, .release_ns = 6}};
  CHECK(bubble_fill(idle, work, whole_exact).pieces ==
        std::vector<bubble_piece>{{0, 0, 0, 3}, {1, 0, 5, 6}, {2, 0, 6, 9}});
}

TEST_CASE("of two sets of equal size, exact takes the one with the earlier listed item") {
  pipeline_timeline timeline{.tasks = {{}}, .makespan_ns = 4};
  const std::vector<bubble_work> work{{.ns = 4}, {.ns = 3}};
  for (const auto& options : {cut_exact, whole_exact}) {
    const auto plan = bubble_fill(timeline, work, options);
    CHECK(plan.left_out == std::vector<std::size_t>{1});
  }
}

TEST_CASE("a divisible item continues in the next bubble, another waits for a bubble that fits it") {
  const pipeline_shape shape{.devices = 2, .micro_batches = 2};
  const auto timeline =
      simulate_pipeline(one_f_one_b(shape), {.forward_ns = {2, 2}, .backward_ns = {3, 3}, .send_ns = 0});
  // Device 0: F0 0-2, F1 2-4, B0 7-10, B1 12-15. Device 1: F0 2-4, B0 4-7, F1 7-9, B1 9-12.
  CHECK(bubbles_of(timeline, 0) == std::vector<time_gap>{{4, 7}, {10, 12}});
  CHECK(bubbles_of(timeline, 1) == std::vector<time_gap>{{0, 2}, {12, 15}});
  const std::vector<bubble_work> work{{.device = 0, .ns = 4}, {.device = 1, .ns = 3}, {.device = 0, .ns = 9}};
  const auto cut = bubble_fill(timeline, work, cut_greedy);
  CHECK(cut.pieces == std::vector<bubble_piece>{{0, 0, 4, 7}, {0, 0, 10, 11}, {1, 1, 0, 2}, {1, 1, 12, 13}});
  CHECK(cut.left_out == std::vector<std::size_t>{2});
  CHECK(cut.filled_ns == 7);
  CHECK(cut.idle_ns == 3);
  const auto whole = bubble_fill(timeline, work, whole_greedy);
  CHECK(whole.pieces == std::vector<bubble_piece>{{1, 1, 12, 15}});
  CHECK(whole.left_out == std::vector<std::size_t>{0, 2});
}

TEST_CASE("a copy takes its latency and its bytes over the bandwidth, rounded up") {
  CHECK(copy_ns({.bytes = 10, .bytes_per_second = 3'000'000'000, .latency_ns = 5}) == 5 + 4);
  CHECK(copy_ns({.bytes = 9, .bytes_per_second = 3'000'000'000}) == 3);
  CHECK(copy_ns({.bytes = 0, .bytes_per_second = 1, .latency_ns = 5}) == 0);
  CHECK(copy_ns({.bytes = 9'223'372'036, .bytes_per_second = 1}) == 9'223'372'036'000'000'000);
  CHECK(copy_ns({.bytes = max_bytes, .bytes_per_second = std::uint64_t{1} << 53}) == 1'024'000'000'000);
  CHECK_THROWS_WITH_AS(static_cast<void>(copy_ns({.bytes = 1})),
                       "copy_ns: bytes_per_second is 0; it must be 1 to 2^53", argument_error);
  CHECK_THROWS_WITH_AS(
      static_cast<void>(copy_ns({.bytes = 9'223'372'037, .bytes_per_second = 1})),
      "copy_ns: 9223372037000000 x 1000 exceeds the latest time, 2^63 - 1 ns; lower the times", length_error);
}

TEST_CASE("impossible work is refused with its number") {
  const pipeline_timeline timeline{.tasks = {{}}, .makespan_ns = 4};
  CHECK(refusal(timeline, {{.ns = 1}, {.device = 1, .ns = 1}}) ==
        "bubble_fill: item 1 is for device 1; the timeline has 1");
  CHECK(refusal(timeline, {{.ns = 0}}) == "bubble_fill: item 0 takes 0 ns; leave it out");
  CHECK(refusal(timeline, {{.ns = 1, .release_ns = 3, .deadline_ns = 2}}) ==
        "bubble_fill: item 0 is released at 3 ns, after its deadline at 2 ns");
  CHECK(refusal(timeline, std::vector<bubble_work>(17, {.ns = 1}), whole_exact) ==
        "bubble_fill: device 0 has 17 items, but exact search takes at most 16; use greedy search, or give "
        "it fewer");
  CHECK_THROWS_WITH_AS(static_cast<void>(bubbles_of(timeline, 1)), "bubbles_of: device 1; the timeline has 1",
                       argument_error);
}

TEST_CASE("a timeline whose tasks overlap, or end after its makespan, is refused") {
  pipeline_timeline timeline{.tasks = {{{{}, 0, 3}, {{}, 2, 4}}}, .makespan_ns = 4};
  CHECK(refusal(timeline, {}) ==
        "bubbles_of: device 0 runs a task from 2 to 4 ns, after one until 3 ns and with a makespan of 4 ns; "
        "take "
        "a timeline as simulated");
  timeline.tasks[0][1] = {{}, 3, 5};
  CHECK(refusal(timeline, {}) ==
        "bubbles_of: device 0 runs a task from 3 to 5 ns, after one until 3 ns and with a makespan of 4 ns; "
        "take "
        "a timeline as simulated");
}
