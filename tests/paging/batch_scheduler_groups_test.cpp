/// The batch scheduler over groups of layers: full attention, windows, chunks and states from one budget.
#include <llmmem/paging/batch_scheduler.hpp>
#include <llmmem/paging/hybrid_allocator.hpp>
#include <llmmem/space/fence.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/all_choices.hpp"
#include "support/drafting_service.hpp"
#include "support/overlapped_service.hpp"
#include "support/random.hpp"
#include "support/scheduler_service.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

using cache_type = hybrid_allocator<>;

/// Full attention, a window of three tokens, and a state every two tokens.
const std::array<layer_group, 3> three_kinds{
    layer_group{.name = "full", .block_tokens = 2, .block_bytes = 4},
    layer_group{.name = "window",
                .kind = layer_kind::sliding_window,
                .reach = 3,
                .block_tokens = 2,
                .block_bytes = 4},
    layer_group{.name = "state", .kind = layer_kind::state_snapshots, .block_tokens = 2, .block_bytes = 8}};
/// A chunk of four tokens, and states that are written only at the ends of steps.
const std::array<layer_group, 2> two_kinds{
    layer_group{
        .name = "chunk", .kind = layer_kind::chunked_local, .reach = 4, .block_tokens = 2, .block_bytes = 4},
    layer_group{.name = "state",
                .kind = layer_kind::state_snapshots,
                .block_tokens = 2,
                .block_bytes = 5,
                .writes = snapshot_times::end_of_step}};

template <bool Swaps>
void live(all_choices& choices, std::span<const layer_group> groups, std::uint64_t pages,
          std::uint32_t requests, std::uint32_t longest, std::uint64_t& preempted) {
  service<cache_type, Swaps> all({.groups = groups,
                                  .budget_bytes = 8 * (pages + 1),
                                  .page_bytes = 8,
                                  .max_sequences = 4,
                                  .max_sequence_tokens = 64},
                                 {.max_running = 3, .max_requests = 4, .max_step_tokens = 5});
  std::uint32_t submitted = 0;
  std::uint32_t steps = 0;
  while (submitted < requests || !all.tickets.empty()) {
    if (submitted < requests && (all.tickets.empty() || choices.below(2) == 0)) {
      std::vector<token_id> prompt(1 + choices.below(3), 7);
      all.submit(submitted++, std::move(prompt));
      continue;
    }
    all.step([&](std::uint64_t, std::size_t answer) { return answer == longest || choices.below(2) == 0; });
    REQUIRE(all.work_in_last_step != 0);  // no request is stuck
    REQUIRE(all.engine.wrong == 0);
    REQUIRE(++steps < 200);
    const auto proof = all.scheduler.audit();
    REQUIRE((proof.empty() ? "" : proof.front()) == std::string());
  }
  for (std::uint32_t user = 0; user < requests; ++user) {
    REQUIRE(all.is_right(user));
    REQUIRE_FALSE(all.engine.requests.at(user).is_exhausted);
  }
  REQUIRE(all.cache.stats().pages.active_bytes == 0);
  REQUIRE(all.cache.audit().empty());
  REQUIRE(all.scheduler.stats().finished == requests);
  preempted += all.scheduler.stats().preempted;
}

template <bool Swaps>
std::uint64_t live_every_life(std::span<const layer_group> groups, std::uint64_t pages,
                              std::uint32_t requests, std::uint32_t longest) {
  all_choices choices;
  std::uint64_t lives = 0;
  std::uint64_t preempted = 0;
  do {
    live<Swaps>(choices, groups, pages, requests, longest, preempted);
    ++lives;
  } while (choices.advance());
  MESSAGE(lives << " lives, " << preempted << " preemptions");
  CHECK(preempted > 50);
  return lives;
}

}  // namespace

TEST_CASE("with pages for only one request of several groups, no request is stuck and no token is lost") {
  // Eight tokens: two pages of full attention, one of the window, two of states.
  CHECK(live_every_life<false>(three_kinds, 5, 2, 5) > 500);
  CHECK(live_every_life<true>(three_kinds, 5, 2, 5) > 500);
  CHECK(live_every_life<false>(three_kinds, 5, 3, 3) > 5'000);
  CHECK(live_every_life<true>(three_kinds, 5, 3, 3) > 5'000);
  CHECK(live_every_life<false>(two_kinds, 3, 2, 5) > 500);
  CHECK(live_every_life<true>(two_kinds, 3, 2, 5) > 500);
}

namespace {

struct counts {
  std::uint64_t lives = 0;
  std::uint64_t early = 0;
  std::uint64_t dropped = 0;
  std::uint64_t preempted = 0;
};

/// One life under all orders in which requests come, steps are planned and completed, and answers end.
template <bool Swaps>
void live_ahead(all_choices& choices, std::span<const layer_group> groups, std::uint64_t pages,
                std::uint32_t requests, std::uint32_t longest, counts& seen) {
  overlapped<cache_type, Swaps> all(
      {.groups = groups,
       .budget_bytes = 8 * (pages + 1),
       .page_bytes = 8,
       .max_sequences = 4,
       .max_sequence_tokens = 64},
      {.max_running = 3, .max_requests = 4, .max_step_tokens = 5, .max_steps_in_flight = 2});
  live_as_chosen(all, choices, requests, longest);
  REQUIRE(all.cache.stats().pages.active_bytes == 0);
  const scheduler_stats stats = all.scheduler.stats();
  ++seen.lives;
  seen.early += all.early;
  seen.dropped += stats.dropped;
  seen.preempted += stats.preempted;
}

template <bool Swaps>
void live_every_life_ahead(std::span<const layer_group> groups, std::uint64_t pages, std::uint32_t requests,
                           std::uint32_t longest) {
  all_choices choices;
  counts seen;
  do {
    live_ahead<Swaps>(choices, groups, pages, requests, longest, seen);
  } while (choices.advance());
  MESSAGE(seen.lives << " lives, " << seen.early << " entries ahead, " << seen.dropped << " dropped, "
                     << seen.preempted << " preempted");
  CHECK(seen.lives > 1'000);
  CHECK(seen.early > 1'000);
  CHECK(seen.dropped > 100);
  CHECK(seen.preempted > 50);
}

/// One to four groups of any kind, with the name of none.
std::vector<layer_group> random_groups(random_numbers& random) {
  std::vector<layer_group> groups;
  const std::uint64_t count = 1 + random.below(std::uint64_t{4});
  const std::uint32_t base = 1 + random.below(std::uint32_t{3});
  for (std::uint64_t i = 0; i < count; ++i) {
    layer_group each;
    each.kind = layer_kind(random.below(std::uint32_t{4}));
    each.reach = 1 + random.below(std::uint64_t{9});
    if (each.kind == layer_kind::sliding_window && random.once_in(3))
      each.sinks = 1 + random.below(std::uint64_t{3});
    if (each.kind == layer_kind::state_snapshots && random.once_in(2))
      each.writes = snapshot_times::end_of_step;
    each.block_tokens = random.once_in(3) ? base * (1 + random.below(std::uint32_t{2})) : base;
    each.block_bytes = each.block_tokens + random.below(std::uint64_t{3});
    groups.push_back(each);
  }
  return groups;
}

/// A cache that one request of `longest` tokens fills, and up to `more` pages.
hybrid_options random_cache(random_numbers& random, const std::vector<layer_group>& groups,
                            std::uint64_t longest, std::uint64_t more) {
  std::uint64_t page = 0;
  for (const layer_group& each : groups)
    page = std::max(page, each.block_bytes * (1 + random.below(std::uint64_t{3})));
  for (const layer_group& each : groups)
    page = std::max(page, each.block_bytes);
  std::uint64_t pages = 0;
  for (const layer_group& each : groups) {
    const std::uint64_t in_page = page / each.block_bytes;
    pages += (detail::peak_blocks(each, longest, 1) + in_page - 1) / in_page;
  }
  return {.groups = groups,
          .budget_bytes = (pages + 1 + random.below(more + 1)) * page,
          .page_bytes = page,
          .max_sequences = 8,
          .max_sequence_tokens = 256};
}

}  // namespace

TEST_CASE("a step planned while another runs takes no block of any group from it, in any order of events") {
  live_every_life_ahead<false>(three_kinds, 5, 2, 3);
  live_every_life_ahead<true>(three_kinds, 5, 2, 3);
  live_every_life_ahead<false>(two_kinds, 3, 2, 3);
  live_every_life_ahead<true>(two_kinds, 3, 2, 3);
}

TEST_CASE("refused drafts are taken back in every group, where states have to go back to a snapshot") {
  std::vector<layer_group> groups;
  const draft_counts seen = refuse_drafts<cache_type>(400, [&](random_numbers& random) {
    groups = random_groups(random);
    const std::uint64_t longest = 20 + random.below(std::uint64_t{20});
    return std::pair(random_cache(random, groups, longest + 8, 12), longest);
  });
  MESSAGE(seen.taken_back << " tokens taken back, " << seen.preempted << " preempted, " << seen.recomputed
                          << " computed again");
  CHECK(seen.taken_back > 1'000);
  CHECK(seen.preempted > 200);
}

TEST_CASE(
    "services over groups of any kind and size keep every token, under failing swaps and cancelled "
    "requests") {
  std::uint64_t preempted = 0;
  std::uint64_t swapped = 0;
  std::uint64_t exhausted = 0;
  for (const auto seed : seeds(300)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::vector<layer_group> groups = random_groups(random);
    const std::uint64_t longest = 10 + random.below(std::uint64_t{30});
    service<cache_type, true> all(random_cache(random, groups, longest, 4),
                                  {.max_running = 2 + random.below(std::uint32_t{7}),
                                   .max_requests = 20,
                                   .max_step_tokens = 1 + random.below(std::uint64_t{12}),
                                   .watermark = random.below(std::uint64_t{3})});
    all.engine.lose_every = random.below(std::uint64_t{4});
    serve_random_requests(all, random, longest, [&] { REQUIRE(all.engine.wrong == 0); });
    const scheduler_stats stats = all.scheduler.stats();
    CHECK(stats.finished + stats.exhausted == 30);
    preempted += stats.preempted;
    swapped += stats.swapped_out;
    exhausted += stats.exhausted;
    REQUIRE(all.cache.stats().pages.active_bytes == 0);
    REQUIRE(all.cache.audit() == std::vector<std::string>{});
  }
  MESSAGE(preempted << " preempted, " << swapped << " swapped, " << exhausted << " exhausted");
  CHECK(preempted > 1'000);
  CHECK(swapped > 500);
  CHECK(exhausted > 10);
}

namespace {

/// Services of random size that plan ahead, with requests that are cancelled at any moment and sequences of
/// others whose blocks wait for fences.
template <class Order>
void services_ahead(Order (*make)(), std::uint64_t count, std::uint64_t& preempted) {
  for (const auto seed : seeds(count)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::vector<layer_group> groups = random_groups(random);
    const std::uint64_t longest = 10 + random.below(std::uint64_t{30});
    overlapped<cache_type, true, Order> all(random_cache(random, groups, longest + 1, 6),
                                            {.max_running = 2 + random.below(std::uint32_t{5}),
                                             .max_requests = 24,
                                             .max_step_tokens = 1 + random.below(std::uint64_t{12}),
                                             .watermark = random.below(std::uint64_t{3}),
                                             .max_steps_in_flight = 2},
                                            make());
    all.engine.lose_every = random.below(std::uint64_t{4});
    host_timeline stream;
    std::vector<host_fence> pending;
    std::map<std::uint64_t, std::size_t> lengths;
    std::uint64_t submitted = 0;
    for (int events = 0; submitted < 30 || !all.tickets.empty() || !all.flights.empty(); ++events) {
      REQUIRE(events < 40'000);
      if (submitted < 30 && all.tickets.size() < 16 && random.once_in(4)) {
        std::vector<token_id> prompt(1 + random.below(longest / 2), 7);
        if (random.once_in(2)) prompt.back() = 8;
        lengths[submitted] = 1 + random.below(longest / 2);
        const std::uint32_t kind = random.below(std::uint32_t{3});
        all.submit(submitted++, std::move(prompt), {.priority = kind, .tenant = kind, .deadline = kind});
      }
      if (!all.tickets.empty() && random.once_in(40)) all.finish_now(all.tickets.begin()->first);
      if (pending.size() < 2 && random.once_in(10)) {
        const auto other = all.cache.create();
        if (other && all.cache.extend(*other, 1 + random.below(longest / 4))) {
          pending.push_back(stream.issue());
          REQUIRE(all.cache.release_after(*other, pending.back()));
        } else if (other) {
          REQUIRE(all.cache.release(*other));
        }
      }
      if (!pending.empty() && random.once_in(6)) {
        stream.pass(pending.front()).value();
        pending.erase(pending.begin());
      }
      if (all.flights.size() < 2 && random.below(std::uint32_t{3}) != 0) {
        const bool has_work = all.plan();
        if (!has_work && all.flights.empty() && !all.tickets.empty()) REQUIRE_FALSE(pending.empty());
      } else if (!all.flights.empty()) {
        all.complete([&](std::uint64_t user, std::size_t answer) { return answer >= lengths.at(user); },
                     [&](std::uint64_t) { return random.once_in(2); },
                     [&](std::uint64_t) { return random.once_in(2); });
      }
    }
    for (std::uint64_t user = 0; user < submitted; ++user)
      REQUIRE(all.is_right(user));
    if (!pending.empty()) stream.pass(pending.back()).value();
    all.cache.collect();
    REQUIRE(all.cache.stats().pages.active_bytes == 0);
    REQUIRE(all.cache.audit() == std::vector<std::string>{});
    CHECK(all.scheduler.stats().finished == 30);
    preempted += all.scheduler.stats().preempted;
  }
}

}  // namespace

TEST_CASE("services over groups that plan ahead keep every token, under every order") {
  std::uint64_t preempted = 0;
  services_ahead<first_come_first_served>([] { return first_come_first_served{}; }, 60, preempted);
  services_ahead<by_priority>([] { return by_priority(3); }, 60, preempted);
  services_ahead<earliest_deadline_first>([] { return earliest_deadline_first{}; }, 60, preempted);
  services_ahead<fair_shares>([] { return fair_shares(3); }, 60, preempted);
  MESSAGE(preempted << " preempted");
  CHECK(preempted > 500);
}

TEST_CASE("while no other runs, no request waits that fits without its hit and in smaller steps") {
  // Others hold blocks, so that no request is alone, and what earlier requests left is cached anywhere.
  std::uint64_t rounds = 0;
  std::uint64_t waits = 0;
  std::uint64_t needless = 0;
  for (const auto seed : seeds(150)) {
    CAPTURE(seed);
    random_numbers random(seed);
    // Many small blocks are a page, and a few large ones.
    const std::uint64_t page = random.once_in(2) ? 4 : 8;
    const std::array<layer_group, 3> groups{
        layer_group{.name = "small", .block_tokens = 1, .block_bytes = 1},
        layer_group{.name = "large", .block_tokens = 1, .block_bytes = random.once_in(2) ? page : page / 2},
        layer_group{
            .name = "state", .kind = layer_kind::state_snapshots, .block_tokens = 1, .block_bytes = 1}};
    const std::uint64_t longest = 6 + random.below(std::uint64_t{10});
    const scheduler_options options{.max_running = 2 + random.below(std::uint32_t{4}),
                                    .max_requests = 20,
                                    .max_step_tokens = 1 + random.below(std::uint64_t{12})};
    service<cache_type, false> all({.groups = std::span(groups).first(2 + random.below(std::uint64_t{2})),
                                    .budget_bytes = page * (longest + 5 + random.below(longest)),
                                    .page_bytes = page,
                                    .max_sequences = 8,
                                    .max_sequence_tokens = 64},
                                   options);
    const detail::scheduler_accounts<cache_type> accounts(all.cache);
    std::vector<sequence_id> others;
    const auto ends = [](std::uint64_t user, std::size_t answer) { return answer > user % 3; };
    std::uint64_t user = 0;
    while (user < 20) {
      // Requests that run together leave their blocks in turn in each page.
      for (std::uint64_t left = 1 + random.below(std::uint64_t{5}); left > 0; --left) {
        std::vector<token_id> prompt(1 + random.below(longest - 3),
                                     static_cast<token_id>(5 + random.below(std::uint32_t{3})));
        all.submit(user++, std::move(prompt));
      }
      if (others.size() == 2) {
        all.cache.release(others.front()).value();
        others.erase(others.begin());
      }
      const auto other = all.cache.create();
      if (other && all.cache.extend(*other, 1 + random.below(std::uint64_t{3}))) {
        others.push_back(*other);
      } else if (other) {
        all.cache.release(*other).value();
      }
      ++rounds;
      for (int steps = 0; !all.tickets.empty(); ++steps) {
        REQUIRE(steps < 1'000);
        // The request that is next, as if nothing were cached for it.
        const auto& next = all.engine.requests.at(all.tickets.begin()->first).tokens;
        const bool fits =
            all.scheduler.stats().running == 0 && !accounts.lack(accounts.to_start(next, {}, 1, 0), 0).any;
        all.step(ends);
        REQUIRE(all.engine.wrong == 0);
        if (all.work_in_last_step != 0 || all.tickets.empty()) continue;
        ++waits;
        needless += fits ? 1U : 0U;
        for (; !others.empty(); others.pop_back())
          all.cache.release(others.back()).value();
      }
      REQUIRE(all.scheduler.audit() == std::vector<std::string>{});
    }
    for (std::uint64_t each = 0; each < user; ++each)
      REQUIRE(all.is_right(each));
  }
  MESSAGE(rounds << " rounds, " << waits << " waited, " << needless << " needlessly");
  CHECK(needless == 0);
}

namespace {

/// Attention of one token a block in two groups: four small blocks are a page, and one large block.
const std::array<layer_group, 2> small_and_large{
    layer_group{.name = "small", .block_tokens = 1, .block_bytes = 1},
    layer_group{.name = "large", .block_tokens = 1, .block_bytes = 4}};

/// A service of five pages whose first request the engine can make scatter its small blocks.
struct scattered : service<cache_type, false> {
  scattered()
      : service({.groups = small_and_large,
                 .budget_bytes = 4 * 6,
                 .page_bytes = 4,
                 .max_sequences = 4,
                 .max_sequence_tokens = 16},
                {.max_running = 2, .max_requests = 4, .max_step_tokens = 1}) {}

  void run() {
    step([](std::uint64_t, std::size_t) { return false; });
  }
  /// Takes the other three small blocks of a page, then lets the request take one in the next page.
  void scatter() {
    for (int i = 0; i < 3; ++i)
      take(0);
    run();
  }
  /// Takes a block of a group, for others.
  void take(std::size_t group) {
    const sequence_id other = cache.create().value();
    cache.extend(other, 1).value();
    pinned.push_back(cache.table(other, group)[0]);
    cache.pin(pinned.back()).value();
    cache.release(other).value();
  }
  void give_back() {
    for (; !pinned.empty(); pinned.pop_back())
      cache.unpin(pinned.back()).value();
  }

  std::vector<block_id> pinned{};
};

}  // namespace

TEST_CASE("a request whose hit takes pages that another group needs starts with less of the hit") {
  // Requests that run together leave their small blocks in turn in each page, so a hit takes every page.
  std::uint64_t fitting = 0;
  std::uint64_t with_less = 0;
  const auto running = [](std::uint64_t, std::size_t) { return false; };
  const auto run = [&](std::uint64_t pages, std::uint64_t steps, std::uint64_t together,
                       std::uint64_t other) {
    service<cache_type, false> all({.groups = small_and_large,
                                    .budget_bytes = 4 * (pages + 1),
                                    .page_bytes = 4,
                                    .max_sequences = 6,
                                    .max_sequence_tokens = 32},
                                   {.max_running = 5, .max_requests = 8, .max_step_tokens = 32});
    for (std::uint64_t user = 0; user < together; ++user)
      all.submit(user, {static_cast<token_id>(7 + user)});
    for (std::uint64_t i = 0; i < steps; ++i)
      all.step(running);
    if (all.scheduler.stats().running != together || all.scheduler.stats().preempted != 0) return;
    std::vector<token_id> text = all.engine.requests.at(0).tokens;
    for (std::uint64_t user = together; user > 0; --user) {
      all.scheduler.finish(all.tickets.at(user - 1)).value();
      all.tickets.erase(user - 1);
    }
    all.submit(20, std::vector<token_id>(other, 5));
    all.step(running);
    if (all.scheduler.stats().running != 1) return;
    const detail::scheduler_accounts<cache_type> accounts(all.cache);
    auto needed = accounts.to_start(text, {}, 32, 0);
    ++needed[0];  // the next token of the other request
    ++needed[1];
    const bool fits = !accounts.lack(needed, 0).any;
    const std::uint64_t hit = all.cache.cached_tokens(std::span(text).first(text.size() - 1));
    const std::uint64_t before = all.cache.stats().hit_tokens;
    all.submit(21, std::move(text));
    all.step(running);
    REQUIRE(all.engine.wrong == 0);
    REQUIRE(all.scheduler.audit() == std::vector<std::string>{});
    if (!fits) return;
    ++fitting;
    CHECK(all.scheduler.stats().running == 2);
    // The attempt with the whole hit is counted, too.
    with_less += all.cache.stats().hit_tokens - before > hit ? 1U : 0U;
  };
  for (std::uint64_t pages = 8; pages < 16; ++pages) {
    for (std::uint64_t steps = 1; steps < 6; ++steps) {
      for (std::uint64_t together = 2; together < 6; ++together) {
        for (std::uint64_t other = 1; other + 4 <= pages && steps + 5 <= pages; ++other) {
          CAPTURE(pages);
          CAPTURE(steps);
          CAPTURE(together);
          CAPTURE(other);
          run(pages, steps, together, other);
        }
      }
    }
  }
  MESSAGE(fitting << " fit without their hit, " << with_less << " of them only with a part of it");
  CHECK(fitting > 100);
  CHECK(with_less > 10);
}

TEST_CASE("a request whose blocks others scatter while it starts again starts once more") {
  scattered all;
  all.submit(0, {7});
  all.run();
  all.scatter();
  all.give_back();
  all.run();  // three tokens: two pages of small blocks, three of large ones
  all.run();  // the fourth large block has no page
  REQUIRE(all.scheduler.stats().preempted == 1);
  all.scatter();
  all.give_back();
  while (all.work_in_last_step != 0 && all.engine.requests.at(0).tokens.size() < 5)
    all.run();
  CHECK_FALSE(all.engine.requests.at(0).is_exhausted);
  CHECK(all.scheduler.stats().preempted == 2);
  CHECK(all.engine.requests.at(0).tokens.size() == 5);  // four are computed
  CHECK(all.engine.wrong == 0);
}

TEST_CASE("a request that shrinks after it has started again lets others start") {
  scattered all;
  all.submit(0, {7});
  all.run();
  all.scatter();
  all.give_back();
  all.run();
  all.run();
  REQUIRE(all.scheduler.stats().preempted == 1);
  REQUIRE(all.scheduler.stats().running == 1);
  all.submit(1, {8});
  all.run();
  CHECK(all.scheduler.stats().running == 1);  // the first must pass the length that it lacked first
  all.engine.requests.at(0).tokens.resize(1);
  all.run();
  CHECK(all.scheduler.stats().running == 2);
}

TEST_CASE("a request that has its blocks alone except for a fork waits for the fork") {
  const std::array<layer_group, 1> full{layer_group{.name = "full", .block_tokens = 4, .block_bytes = 8}};
  service<cache_type, false> all(
      {.groups = full, .budget_bytes = 16, .page_bytes = 8, .max_sequences = 4, .max_sequence_tokens = 16},
      {.max_running = 2, .max_requests = 4, .max_step_tokens = 8});
  all.submit(0, {7, 7});
  const scheduled_step step = all.scheduler.step().value();
  all.engine.compute(step.work);
  const sequence_id fork = all.cache.fork(step.work[0].sequence).value();
  all.scheduler.completed().value();
  const auto never = [](std::uint64_t, std::size_t) { return false; };
  all.step(never);
  CHECK(all.work_in_last_step == 0);
  CHECK(all.blocked.needed == 1);
  CHECK(all.blocked.available == 0);
  CHECK(all.scheduler.stats().preempted == 0);
  CHECK_FALSE(all.engine.requests.at(0).is_exhausted);
  REQUIRE(all.cache.release(fork));
  all.step(never);
  CHECK(all.work_in_last_step == 1);
  CHECK(all.engine.wrong == 0);
}

TEST_CASE("a request over groups that waits for a running slot learns it, and ends without tokens") {
  service<cache_type, false> all({.groups = three_kinds,
                                  .budget_bytes = 8 * 13,
                                  .page_bytes = 8,
                                  .max_sequences = 4,
                                  .max_sequence_tokens = 64},
                                 {.max_running = 1, .max_requests = 4});
  all.submit(0, {7, 7});
  all.submit(1, {8});
  static_cast<void>(all.scheduler.step().value());
  all.scheduler.completed().value();  // the engine has no further token
  scheduled_step step = all.scheduler.step().value();
  CHECK(step.work.empty());
  CHECK(step.blocked.needed == 1);
  CHECK(step.blocked.available > 1);
  all.engine.requests.at(1).tokens.clear();
  step = all.scheduler.step().value();
  CHECK(step.work.empty());
  CHECK(step.blocked.needed == 0);
  CHECK(all.engine.requests.at(1).is_exhausted);
  CHECK(all.scheduler.stats().waiting == 0);
}
