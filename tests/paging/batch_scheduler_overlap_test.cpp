/// Steps planned while others run, against an engine that computes a step as late as it may.
#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/batch_scheduler.hpp>
#include <llmmem/space/fence.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "support/all_choices.hpp"
#include "support/drafting_service.hpp"
#include "support/overlapped_service.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/toy_engine.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

using cache_type = paged_allocator<>;

struct copying_traits : paged_traits {
  using partial = copy_partial_blocks;
};

struct counts {
  std::uint64_t lives = 0;
  std::uint64_t early = 0;
  std::uint64_t dropped = 0;
  std::uint64_t preempted = 0;
};

/// One life under all orders in which requests come, steps are planned and completed, and answers end.
template <class Cache, bool Swaps>
void live(all_choices& choices, std::uint64_t blocks, std::uint32_t requests, std::uint32_t longest,
          counts& seen) {
  overlapped<Cache, Swaps> all(
      {.blocks = blocks, .block_tokens = 2, .max_sequences = 4, .max_sequence_tokens = 64},
      {.max_running = 3, .max_requests = 4, .max_step_tokens = 5, .max_steps_in_flight = 2});
  live_as_chosen(all, choices, requests, longest);
  REQUIRE(all.cache.stats().active_blocks == 0);
  const scheduler_stats stats = all.scheduler.stats();
  ++seen.lives;
  seen.early += all.early;
  seen.dropped += stats.dropped;
  seen.preempted += stats.preempted;
}

template <class Cache, bool Swaps>
counts live_every_life(std::uint64_t blocks, std::uint32_t requests, std::uint32_t longest) {
  all_choices choices;
  counts seen;
  do {
    live<Cache, Swaps>(choices, blocks, requests, longest, seen);
  } while (choices.advance());
  MESSAGE(seen.lives << " lives, " << seen.early << " entries ahead, " << seen.dropped << " dropped, "
                     << seen.preempted << " preempted");
  return seen;
}

}  // namespace

TEST_CASE("a step planned while another runs takes no block from it, in any order of events") {
  for (const counts& seen :
       {live_every_life<cache_type, false>(4, 2, 3), live_every_life<cache_type, true>(4, 2, 3),
        live_every_life<paged_allocator<copying_traits>, true>(4, 2, 3),
        live_every_life<cache_type, false>(3, 3, 2)}) {
    CHECK(seen.lives > 1'000);
    CHECK(seen.early > 1'000);
    CHECK(seen.dropped > 100);
    CHECK(seen.preempted > 100);
  }
}

TEST_CASE("tokens that were sampled after their places were planned are cached like others") {
  for (const std::uint32_t steps : {1U, 2U}) {
    CAPTURE(steps);
    cache_type cache({.blocks = 32, .block_tokens = 4});
    late_engine<cache_type, false> engine(cache);
    batch_scheduler scheduler(cache, engine, {.max_steps_in_flight = steps});
    engine.ask(1, {1, 2, 3});
    const request_ticket ticket = scheduler.submit(1).value();
    std::deque<std::vector<scheduled_work>> flights;
    while (engine.requests.at(1).tokens.size() < 20) {
      while (flights.size() < steps) {
        const auto work = scheduler.step().value().work;
        REQUIRE(work.size() == 1);
        flights.emplace_back(work.begin(), work.end());
      }
      engine.compute(flights.front());
      flights.pop_front();
      REQUIRE(scheduler.completed());
    }
    REQUIRE(scheduler.finish(ticket));
    if (!flights.empty()) {
      CHECK(scheduler.stats().dropped == 1);
      CHECK(scheduler.stats().running == 1);  // its blocks stay until the step is completed
      REQUIRE(scheduler.completed());
    }
    CHECK(scheduler.stats().running == 0);
    // The last token is not computed, or in the work that no longer counts.
    CHECK(cache.cached_tokens(engine.requests.at(1).tokens) == 16);
    CHECK(cache.stats().active_blocks == 0);
    CHECK(cache.audit() == std::vector<std::string>{});
  }
}

TEST_CASE("a client that foresees no token has its request left out of the next step") {
  struct foreseeing : toy_engine<cache_type, false> {
    using toy_engine::toy_engine;
    [[nodiscard]] std::uint64_t pending(std::uint64_t user) noexcept { return user == 1 ? 0 : 1; }
  };
  cache_type cache({.blocks = 32, .block_tokens = 4});
  foreseeing engine(cache);
  batch_scheduler scheduler(cache, engine, {.max_steps_in_flight = 2});
  engine.ask(1, {1, 2, 3});
  engine.ask(2, {4, 5});
  REQUIRE(scheduler.submit(1));
  REQUIRE(scheduler.submit(2));
  const auto first = scheduler.step().value().work;
  REQUIRE(first.size() == 2);
  const auto second = scheduler.step().value().work;
  REQUIRE(second.size() == 1);
  CHECK(second[0].user == 2);
  CHECK(second[0].first == 2);
  CHECK(second[0].count == 1);
  CHECK(scheduler.step().code() == errc::step_pending);
  engine.compute(first);
  REQUIRE(scheduler.completed());
  engine.compute(second);
  REQUIRE(scheduler.completed());
  CHECK(scheduler.audit() == std::vector<std::string>{});
}

TEST_CASE("refused drafts are taken back, and nothing computed after them is ever read") {
  const draft_counts seen = refuse_drafts<cache_type>(200, [](random_numbers& random) {
    const std::uint64_t blocks = 12 + random.below(std::uint64_t{20});
    const std::uint32_t tokens = 1 + random.below(std::uint32_t{4});
    return std::pair(paged_options{.blocks = blocks, .block_tokens = tokens, .max_sequences = 8},
                     blocks * tokens - 6);
  });
  MESSAGE(seen.taken_back << " tokens taken back, " << seen.preempted << " preempted");
  CHECK(seen.taken_back > 1'000);
  CHECK(seen.preempted > 200);
}

TEST_CASE("a request that was cut is planned again only when no step runs past the cut") {
  cache_type cache({.blocks = 32, .block_tokens = 4});
  late_engine<cache_type, false> engine(cache);
  batch_scheduler scheduler(cache, engine, {.max_steps_in_flight = 2});
  engine.ask(1, {1, 2, 3, 40, 50});  // the last two are drafts
  const request_ticket ticket = scheduler.submit(1).value();
  CHECK(scheduler.accepted(ticket, 1).error().message() ==
        "batch_scheduler: 1 tokens named, but sequence 0 holds 0; name fewer, or append them first");
  REQUIRE(scheduler.step().value().work.size() == 1);
  const auto ahead = scheduler.step().value().work;
  REQUIRE(ahead.size() == 1);
  CHECK(ahead[0].first == 5);
  engine.requests.at(1).tokens = {1, 2, 3, 4, 5, 6, 7};
  REQUIRE(scheduler.accepted(ticket, 3));
  REQUIRE(scheduler.completed());
  CHECK(scheduler.step().value().work.empty());
  CHECK(cache.cached_tokens(std::vector<token_id>{1, 2, 3, 40}) == 0);  // not what was refused
  REQUIRE(scheduler.completed());
  CHECK(scheduler.stats().taken_back == 3);
  const auto again = scheduler.step().value().work;
  REQUIRE(again.size() == 1);
  CHECK(again[0].first == 3);
  CHECK(again[0].count == 4);
  CHECK(scheduler.accepted({}, 0).code() == errc::null_handle);
  REQUIRE(scheduler.completed());
  CHECK(cache.cached_tokens(engine.requests.at(1).tokens) == 4);
  CHECK(scheduler.audit() == std::vector<std::string>{});
}

namespace {

/// Services of random size, with preemption, swaps that fail, requests that are cancelled at any moment, and
/// other sequences whose blocks wait for fences.
template <class Order>
void random_services(Order (*make)(), std::uint64_t count, std::uint64_t& preempted) {
  for (const auto seed : seeds(count)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::uint64_t blocks = 6 + random.below(std::uint64_t{16});
    const std::uint32_t block_tokens = 1 + random.below(std::uint32_t{4});
    const std::uint32_t running = 2 + random.below(std::uint32_t{5});
    overlapped<paged_allocator<copying_traits>, true, Order> all(
        {.blocks = blocks, .block_tokens = block_tokens, .max_sequences = 10},
        {.max_running = running,
         .max_requests = 24,
         .max_step_tokens = 1 + random.below(std::uint64_t{12}),
         .watermark = random.below(std::uint64_t{3}),
         .max_steps_in_flight = 2},
        make());
    all.engine.lose_every = random.below(std::uint64_t{4});
    const std::uint64_t room = blocks * block_tokens;
    host_timeline stream;
    std::vector<host_fence> pending;
    std::map<std::uint64_t, std::size_t> lengths;
    std::uint64_t submitted = 0;
    for (int events = 0; submitted < 30 || !all.tickets.empty() || !all.flights.empty(); ++events) {
      REQUIRE(events < 40'000);
      if (submitted < 30 && all.tickets.size() < 16 && random.once_in(4)) {
        std::vector<token_id> prompt(1 + random.below(room / 2), 7);
        if (random.once_in(2)) prompt.back() = 8;
        lengths[submitted] = 1 + random.below(room / 2);
        const std::uint32_t kind = random.below(std::uint32_t{3});
        all.submit(submitted++, std::move(prompt), {.priority = kind, .tenant = kind, .deadline = kind});
      }
      if (!all.tickets.empty() && random.once_in(40)) {  // cancelled, perhaps with two steps in flight
        all.finish_now(all.tickets.begin()->first);
      }
      if (pending.size() < 4 && random.once_in(10)) {
        const sequence_id other = all.cache.create().value();
        if (all.cache.extend(other, 1 + random.below(room / 4))) {
          pending.push_back(stream.issue());
          REQUIRE(all.cache.release_after(other, pending.back()));
        } else {
          REQUIRE(all.cache.release(other));
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
    while (!pending.empty()) {
      stream.pass(pending.front()).value();
      pending.erase(pending.begin());
    }
    all.cache.collect();
    REQUIRE(all.cache.stats().active_blocks == 0);
    REQUIRE(all.cache.audit() == std::vector<std::string>{});
    CHECK(all.scheduler.stats().finished == 30);
    preempted += all.scheduler.stats().preempted;
  }
}

}  // namespace

TEST_CASE("services of random size that plan ahead keep every token, under every order") {
  std::uint64_t preempted = 0;
  random_services<first_come_first_served>([] { return first_come_first_served{}; }, 40, preempted);
  random_services<by_priority>([] { return by_priority(3); }, 40, preempted);
  random_services<earliest_deadline_first>([] { return earliest_deadline_first{}; }, 40, preempted);
  random_services<fair_shares>([] { return fair_shares(3); }, 40, preempted);
  MESSAGE(preempted << " preempted");
  CHECK(preempted > 500);
}
