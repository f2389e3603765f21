/// Which requests a batch_scheduler preempts, how many, and what becomes of their KV.
#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/batch_scheduler.hpp>
#include <llmmem/space/fence.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/toy_engine.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

using cache_type = paged_allocator<>;
using engine_type = toy_engine<cache_type, false>;
const std::vector<std::string> sound{};

/// Saves KV by a store that reads the blocks until its fence has passed.
struct storing_engine {
  cache_type* cache = nullptr;
  host_timeline* stores = nullptr;
  std::map<std::uint64_t, std::vector<token_id>> texts{};
  std::vector<host_fence> pending{};
  std::set<block_id> being_read{};
  std::uint64_t exhausted_count = 0;

  [[nodiscard]] std::span<const token_id> tokens(std::uint64_t user) noexcept {
    return texts.find(user)->second;
  }
  void copy(const block_copy&) noexcept {}
  void exhausted(std::uint64_t, const failure&) noexcept { ++exhausted_count; }
  [[nodiscard]] bool swap_out(std::uint64_t, sequence_id sequence, std::uint64_t) noexcept {
    const auto kept = cache->fork(sequence);
    if (!kept) return false;
    for (const block_id block : cache->blocks(*kept))
      being_read.insert(block);
    pending.push_back(stores->issue());
    return cache->release_after(*kept, pending.back()).has_value();
  }
  [[nodiscard]] bool swap_in(std::uint64_t, sequence_id, std::uint64_t, std::uint64_t) noexcept {
    return true;
  }
};

/// Requests 1 to `count` with prompts of `tokens` tokens each, which have run one step and got a token.
struct small_service {
  small_service(const paged_options& blocks, const scheduler_options& options, std::uint64_t count,
                std::size_t tokens)
      : cache(blocks), engine(cache), scheduler(cache, engine, options) {
    for (std::uint64_t user = 1; user <= count; ++user) {
      engine.ask(user, std::vector<token_id>(tokens, static_cast<token_id>(user)));
      tickets[user] = scheduler.submit(user).value();
    }
    const auto work = scheduler.step().value().work;
    REQUIRE(work.size() == count);
    for (const scheduled_work& each : work)
      sequences[each.user] = each.sequence;
    engine.compute(work);
    REQUIRE(scheduler.completed());
  }

  [[nodiscard]] std::vector<std::uint64_t> users_of_step() {
    std::vector<std::uint64_t> users;
    step = scheduler.step().value();
    for (const scheduled_work& each : step.work)
      users.push_back(each.user);
    REQUIRE(scheduler.audit() == sound);
    return users;
  }

  cache_type cache;
  engine_type engine;
  batch_scheduler<cache_type, engine_type> scheduler;
  std::map<std::uint64_t, request_ticket> tickets{};
  std::map<std::uint64_t, sequence_id> sequences{};
  scheduled_step step{};
};

using users = std::vector<std::uint64_t>;

}  // namespace

TEST_CASE(
    "while a store still reads the blocks of preempted requests, no further request is preempted for them") {
  cache_type cache({.blocks = 32, .block_tokens = 4, .max_sequences = 16});
  host_timeline stores;
  storing_engine engine{.cache = &cache, .stores = &stores};
  batch_scheduler scheduler(cache, engine, {.max_running = 8});
  std::map<std::uint64_t, request_ticket> tickets;
  for (std::uint64_t user = 1; user <= 8; ++user) {
    for (std::uint64_t i = 0; i < 16; ++i)
      engine.texts[user].push_back(static_cast<token_id>(100 * user + i));
    tickets[user] = scheduler.submit(user).value();
  }
  int stalled = 0;
  for (int steps = 0; !tickets.empty(); ++steps) {
    REQUIRE(steps < 400);
    const scheduled_step step = scheduler.step().value();
    // Eight requests of four blocks need one block each, and no block is free: two preemptions bring eight.
    if (steps == 1) {
      CHECK(scheduler.stats().preempted == 2);
      CHECK(step.work.empty());
      CHECK(step.blocked.needed == 6);
      CHECK(step.blocked.available == 0);
    }
    if (step.work.empty()) {
      if (++stalled < 4) continue;
      REQUIRE_FALSE(engine.pending.empty());
      for (const host_fence& each : engine.pending)
        stores.pass(each).value();
      engine.pending.clear();
      engine.being_read.clear();
      stalled = 0;
      continue;
    }
    for (const scheduled_work& work : step.work) {
      for (std::uint64_t i = work.first; i < work.first + work.count; ++i)
        REQUIRE_FALSE(
            engine.being_read.contains(cache.blocks(work.sequence)[static_cast<std::size_t>(i / 4)]));
      auto& text = engine.texts[work.user];
      if (work.first + work.count == text.size()) text.push_back(static_cast<token_id>(text.size()));
    }
    REQUIRE(scheduler.completed());
    std::erase_if(tickets, [&](const auto& each) {
      if (engine.texts[each.first].size() <= 40) return false;
      scheduler.finish(each.second).value();
      return true;
    });
    REQUIRE(cache.audit() == sound);
    REQUIRE(scheduler.audit() == sound);
  }
  CHECK(engine.exhausted_count == 0);
  CHECK(scheduler.stats().recomputed_tokens == 0);
  MESSAGE(scheduler.stats().preempted << " preemptions");
}

TEST_CASE("a request whose blocks others hold too is not preempted, because that brings nothing") {
  small_service all({.blocks = 6, .block_tokens = 4}, {}, 3, 8);
  const sequence_id fork = all.cache.fork(all.sequences.at(3)).value();
  all.engine.requests.at(3).tokens.resize(8);  // needs no block
  CHECK(all.users_of_step() == users{1});      // the second is preempted, which brings two blocks
  CHECK(all.scheduler.stats().preempted == 1);
  CHECK(all.cache.tokens(all.sequences.at(3)) == 8);
  REQUIRE(all.cache.release(fork));
}

TEST_CASE("where every later request shares its blocks, the first still gets what they all hold") {
  // The blocks of the second are held by a fork of another caller until it, too, lets go.
  small_service all({.blocks = 4, .block_tokens = 4}, {}, 2, 8);
  const sequence_id fork = all.cache.fork(all.sequences.at(2)).value();
  CHECK(all.users_of_step() == users{});
  CHECK(all.scheduler.stats().preempted == 1);
  CHECK(all.step.blocked.needed == 1);
  REQUIRE(all.cache.release(fork));
  CHECK(all.users_of_step() == users{1});
}

TEST_CASE("no request takes a block before an earlier one that lacks blocks, and those that need none run") {
  small_service all({.blocks = 13, .block_tokens = 4}, {}, 4, 8);
  const sequence_id other = all.cache.create().value();
  REQUIRE(all.cache.extend(other, 16));
  host_timeline stream;
  const host_fence read = stream.issue();
  REQUIRE(all.cache.release_after(other, read));   // four blocks are coming, one is free
  all.engine.requests.at(1).tokens.resize(13, 5);  // needs two blocks
  all.engine.requests.at(3).tokens.resize(7);
  all.engine.requests.at(3).tokens.push_back(9);
  REQUIRE(all.scheduler.accepted(all.tickets.at(3), 7));
  CHECK(all.users_of_step() == users{3});
  CHECK(all.scheduler.stats().preempted == 0);
  REQUIRE(all.scheduler.completed());
  stream.pass(read).value();
  CHECK(all.users_of_step() == users{1, 2, 4});
  CHECK(all.scheduler.stats().preempted == 0);
}

TEST_CASE("the KV of a preempted request is saved only if that takes less time than computing it again") {
  using swapping_engine = toy_engine<cache_type, true>;
  // 12 of 16 tokens are in blocks of its own: 12 ms to compute, 2 x (1 + 4) ms to move.
  for (const double rate : {900.0, 1'300.0}) {
    CAPTURE(rate);
    cache_type cache({.blocks = 6, .block_tokens = 4});
    swapping_engine engine(cache);
    batch_scheduler scheduler(cache, engine,
                              {.swap = {.compute_tokens_per_second = rate,
                                        .bytes_per_second = 4'000,
                                        .bytes_per_token = 1,
                                        .seconds_per_swap = 0.001}});
    std::vector<token_id> prompt(4, 7);
    engine.ask(1, prompt);
    prompt.resize(16, 8);
    engine.ask(2, prompt);
    REQUIRE(scheduler.submit(1));
    engine.compute(scheduler.step().value().work);
    REQUIRE(scheduler.completed());
    REQUIRE(scheduler.submit(2));
    engine.compute(scheduler.step().value().work);  // shares the first block
    REQUIRE(scheduler.completed());
    engine.requests.at(1).tokens.resize(10, 3);
    const auto work = scheduler.step().value().work;
    REQUIRE(work.size() == 1);
    CHECK(scheduler.stats().preempted == 1);
    CHECK(scheduler.stats().swapped_out == (rate < 1'000 ? 1 : 0));
  }
  cache_type cache({.blocks = 4});
  engine_type engine(cache);
  using scheduler = batch_scheduler<cache_type, engine_type>;
  CHECK_THROWS_WITH_AS(scheduler(cache, engine, {.swap = {.compute_tokens_per_second = 1}}),
                       "batch_scheduler: swap.bytes_per_second must be more than 0 where "
                       "swap.compute_tokens_per_second is",
                       length_error);
  CHECK_THROWS_WITH_AS(scheduler(cache, engine, {.swap = {.seconds_per_swap = -1}}),
                       "batch_scheduler: swap has a negative cost; use 0 or more", length_error);
  CHECK_THROWS_WITH_AS(scheduler(cache, engine, {.max_steps_in_flight = 3}),
                       "batch_scheduler: max_steps_in_flight must be 1 or 2", length_error);
}
