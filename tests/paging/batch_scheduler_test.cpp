#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/batch_scheduler.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "support/all_choices.hpp"
#include "support/counting_metadata.hpp"
#include "support/random.hpp"
#include "support/scheduler_service.hpp"
#include "support/seeds.hpp"
#include "support/toy_engine.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

using cache_type = paged_allocator<>;
template <bool Swaps>
using engine_type = toy_engine<cache_type, Swaps>;

struct copying_traits : paged_traits {
  using partial = copy_partial_blocks;
};

/// One service's life under all that its environment may do: when requests come, how long their prompts are,
/// where each answer ends. Each must end, with the text the model says alone; and each step must do
/// something.
template <class Cache, bool Swaps>
void live(all_choices& choices, std::uint64_t blocks, std::uint32_t requests, std::uint32_t longest) {
  service<Cache, Swaps> all(
      {.blocks = blocks, .block_tokens = 2, .max_sequences = 4, .max_sequence_tokens = 64},
      {.max_running = 3, .max_requests = 4, .max_step_tokens = 5, .watermark = 1});
  std::uint32_t submitted = 0;
  std::uint32_t steps = 0;
  while (submitted < requests || !all.tickets.empty()) {
    if (submitted < requests && (all.tickets.empty() || choices.below(2) == 0)) {
      // Prompts that begin alike, so that blocks are shared.
      std::vector<token_id> prompt(1 + choices.below(3), 7);
      all.submit(submitted++, std::move(prompt));
      continue;
    }
    all.step([&](std::uint64_t, std::size_t answer) { return answer == longest || choices.below(2) == 0; });
    REQUIRE(all.work_in_last_step != 0);  // nobody is stuck
    REQUIRE(++steps < 200);
    const auto proof = all.scheduler.audit();
    REQUIRE((proof.empty() ? "" : proof.front()) == std::string());
  }
  for (std::uint32_t user = 0; user < requests; ++user) {
    REQUIRE(all.is_right(user));
    REQUIRE_FALSE(all.engine.requests.at(user).is_exhausted);
  }
  REQUIRE(all.cache.stats().active_blocks == 0);
  REQUIRE(all.cache.audit().empty());
  REQUIRE(all.scheduler.stats().finished == requests);
}

template <class Cache, bool Swaps>
std::uint64_t live_every_life(std::uint64_t blocks, std::uint32_t requests, std::uint32_t longest) {
  all_choices choices;
  std::uint64_t lives = 0;
  do {
    live<Cache, Swaps>(choices, blocks, requests, longest);
    ++lives;
  } while (choices.advance());
  return lives;
}

}  // namespace

TEST_CASE("with blocks for only one request, no request is stuck and no token is lost, in any environment") {
  // Three tokens of prompt, five of answer: four blocks hold the longest request, and nothing beside it.
  CHECK(live_every_life<cache_type, false>(4, 2, 5) > 500);
  CHECK(live_every_life<cache_type, true>(4, 2, 5) > 500);
  CHECK(live_every_life<paged_allocator<copying_traits>, true>(4, 2, 5) > 500);
  CHECK(live_every_life<cache_type, false>(4, 3, 3) > 5'000);
  CHECK(live_every_life<cache_type, true>(4, 3, 3) > 5'000);
}

TEST_CASE("services of random size keep every token under preemption, failing swaps and cancelled requests") {
  std::uint64_t preempted = 0;
  std::uint64_t swapped = 0;
  std::uint64_t lost = 0;
  for (const auto seed : seeds(150)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::uint64_t blocks = 4 + random.below(std::uint64_t{20});
    service<paged_allocator<copying_traits>, true> all(
        {.blocks = blocks, .block_tokens = 1 + random.below(std::uint32_t{4}), .max_sequences = 8},
        {.max_running = 1 + random.below(std::uint32_t{8}),
         .max_requests = 20,
         .max_step_tokens = 1 + random.below(std::uint64_t{12}),
         .watermark = random.below(std::uint64_t{3})});
    all.engine.lose_every = random.below(std::uint64_t{4});
    const std::uint64_t room = blocks * all.cache.block_tokens();
    serve_random_requests(all, random, room, [] {});
    const scheduler_stats stats = all.scheduler.stats();
    CHECK(stats.finished + stats.exhausted == 30);
    preempted += stats.preempted;
    swapped += stats.swapped_out;
    lost += stats.recomputed_tokens;
    REQUIRE(all.cache.stats().active_blocks == 0);
    REQUIRE(all.cache.audit() == std::vector<std::string>{});
  }
  CHECK(preempted > 1'000);
  CHECK(swapped > 500);
  CHECK(lost > 500);
}

TEST_CASE(
    "requests arrive and end by the lengths of a production trace, which the scheduler does not know in "
    "advance") {
  const char* folder = std::getenv("LLMMEM_DATA_DIR");
  std::ifstream trace(std::string(folder == nullptr ? "" : folder) + "/azure_llm_inference_2023_conv.csv");
  if (!trace) {
    MESSAGE("NOT CHECKED on real data: LLMMEM_DATA_DIR has no azure_llm_inference_2023_conv.csv");
    return;
  }
  std::string line;
  std::getline(trace, line);
  std::uint64_t count = 0;  // of requests that have come
  service<cache_type, false> all(
      {.blocks = 2'048, .block_tokens = 16, .max_sequences = 64},
      {.max_running = 64, .max_requests = 64, .max_step_tokens = 2'048, .watermark = 8});
  std::vector<std::size_t> lengths;
  std::uint64_t tokens = 0;
  while (trace || !all.tickets.empty()) {
    while (all.tickets.size() < 64 && std::getline(trace, line)) {
      const std::size_t first = line.find(',');
      const std::size_t second = line.find(',', first + 1);
      std::vector<token_id> prompt(std::stoul(line.substr(first + 1)));
      for (std::size_t i = 0; i < prompt.size(); ++i)
        prompt[i] = static_cast<token_id>(count * 7 + i);
      lengths.push_back(std::stoul(line.substr(second + 1)));
      tokens += prompt.size() + lengths.back();
      all.submit(count++, std::move(prompt));
    }
    all.step([&](std::uint64_t user, std::size_t answer) { return answer >= lengths[user]; });
    REQUIRE((all.work_in_last_step != 0 || all.tickets.empty()));
  }
  for (std::uint64_t user = 0; user < count; ++user) {
    REQUIRE(all.is_right(user));
    REQUIRE(all.engine.requests.at(user).tokens.size() ==
            all.engine.requests.at(user).prompt + lengths[user]);
  }
  const scheduler_stats stats = all.scheduler.stats();
  MESSAGE(count << " requests, " << tokens << " tokens in " << stats.steps << " steps, " << stats.preempted
                << " preemptions, " << stats.recomputed_tokens << " tokens computed again");
  CHECK(stats.finished == count);
  CHECK(stats.preempted > 0);
  CHECK(all.cache.audit() == std::vector<std::string>{});
}

TEST_CASE("a request that can never run is refused on arrival, with the reason") {
  cache_type cache(
      {.blocks = 4, .block_tokens = 4, .max_sequences = 4, .max_sequence_tokens = 12, .name = "kv"});
  engine_type<false> engine(cache);
  batch_scheduler scheduler(cache, engine, {.max_running = 1, .max_requests = 1, .name = "queue"});
  engine.ask(1, {});
  engine.ask(2, std::vector<token_id>(12, 1));
  engine.ask(3, {1, 2, 3});
  CHECK(scheduler.submit(1).error().message() ==
        "queue: the range of tokens 0 to 0 is empty; its end must be larger than its first");
  CHECK(scheduler.submit(2).code() == errc::sequence_full);
  REQUIRE(cache.resize(2));
  engine.ask(2, std::vector<token_id>(8, 1));
  CHECK(scheduler.submit(2).code() == errc::out_of_blocks);
  const request_ticket ticket = scheduler.submit(3).value();
  CHECK(scheduler.submit(3).error().message() ==
        "queue: all 1 requests are in use; finish one, or raise max_requests");
  REQUIRE(scheduler.step().value().work.size() == 1);
  CHECK(scheduler.step().code() == errc::step_pending);
  REQUIRE(scheduler.finish(ticket));  // takes effect with the step
  CHECK(scheduler.stats().running == 1);
  REQUIRE(scheduler.completed());
  CHECK(scheduler.stats().running == 0);
  CHECK(scheduler.finish(ticket).code() == errc::stale_handle);
  CHECK(scheduler.finish({}).code() == errc::null_handle);
  CHECK(scheduler.finish({.slot = 9, .generation = 1}).code() == errc::foreign_handle);
  CHECK(cache.stats().active_blocks == 0);
}

TEST_CASE("the next request is blocked, not exhausted, while others hold the blocks it needs") {
  cache_type cache({.blocks = 4, .block_tokens = 4});
  engine_type<false> engine(cache);
  batch_scheduler scheduler(cache, engine, {});
  const sequence_id pinned = cache.create().value();
  REQUIRE(cache.extend(pinned, 9));
  engine.ask(1, std::vector<token_id>(8, 1));
  REQUIRE(scheduler.submit(1));
  const scheduled_step step = scheduler.step().value();
  CHECK(step.work.empty());
  CHECK(step.blocked.needed == 2);
  CHECK(step.blocked.available == 1);
  REQUIRE(cache.release(pinned));
  CHECK(scheduler.step().value().work.size() == 1);
}

TEST_CASE("a request behind one with nothing to compute learns what it waits for") {
  cache_type cache({.blocks = 4, .block_tokens = 4});
  engine_type<false> engine(cache);
  batch_scheduler scheduler(cache, engine, {});
  engine.ask(1, std::vector<token_id>(8, 1));
  engine.ask(2, std::vector<token_id>(8, 2));
  const request_ticket first = scheduler.submit(1).value();
  REQUIRE(scheduler.submit(2));
  REQUIRE(scheduler.step().value().work.size() == 2);
  REQUIRE(scheduler.completed());
  engine.requests.at(2).tokens.push_back(3);  // the first has got no token yet
  const scheduled_step step = scheduler.step().value();
  CHECK(step.work.empty());
  CHECK(scheduler.stats().preempted == 1);
  CHECK(step.blocked.needed == 3);
  CHECK(step.blocked.available == 2);
  CHECK(scheduler.step().value().blocked.needed == 3);
  REQUIRE(scheduler.finish(first));
  CHECK(scheduler.step().value().work.size() == 1);
}

TEST_CASE("a request that shrinks to nothing while it waits for a running slot ends") {
  cache_type cache({.blocks = 4, .block_tokens = 4});
  engine_type<false> engine(cache);
  batch_scheduler scheduler(cache, engine, {.max_running = 1});
  engine.ask(1, {1, 1});
  engine.ask(2, {2, 2});
  REQUIRE(scheduler.submit(1));
  REQUIRE(scheduler.submit(2));
  REQUIRE(scheduler.step().value().work.size() == 1);
  REQUIRE(scheduler.completed());
  engine.requests.at(2).tokens.clear();
  const scheduled_step step = scheduler.step().value();
  CHECK(step.work.empty());
  CHECK(step.blocked.needed == 0);
  CHECK(engine.requests.at(2).is_exhausted);
  CHECK(scheduler.stats().waiting == 0);
}

namespace {

/// Calls the scheduler back from wherever it is called.
struct meddling_engine {
  std::map<std::uint64_t, std::vector<token_id>> texts{};
  request_ticket ticket{};
  batch_scheduler<cache_type, meddling_engine>* scheduler = nullptr;
  std::vector<error_code> answers{};
  std::vector<error_code> answers_at_end{};

  void meddle(std::vector<error_code>& to) noexcept {
    to.push_back(scheduler->step().code());
    to.push_back(scheduler->completed().code());
    to.push_back(scheduler->submit(2).code());
    to.push_back(scheduler->finish(ticket).code());
  }
  [[nodiscard]] std::span<const token_id> tokens(std::uint64_t user) noexcept {
    return texts.find(user)->second;
  }
  void copy(const block_copy&) noexcept { meddle(answers); }
  void exhausted(std::uint64_t, const failure&) noexcept { meddle(answers_at_end); }
  [[nodiscard]] bool swap_out(std::uint64_t, sequence_id, std::uint64_t) noexcept {
    meddle(answers);
    return false;
  }
  [[nodiscard]] bool swap_in(std::uint64_t, sequence_id, std::uint64_t, std::uint64_t) noexcept {
    return false;
  }
  static bool relieve(void* self, const block_shortage&) noexcept {
    auto& me = *static_cast<meddling_engine*>(self);
    if (me.scheduler != nullptr) me.meddle(me.answers);
    return false;
  }
};

}  // namespace

TEST_CASE("callbacks that call the scheduler are refused until it is done, and change nothing") {
  meddling_engine engine;
  cache_type cache({.blocks = 3,
                    .block_tokens = 4,
                    .pressure = {.call = &meddling_engine::relieve, .context = &engine, .low = 2}});
  batch_scheduler<cache_type, meddling_engine> scheduler(cache, engine, {});
  engine.scheduler = &scheduler;
  engine.texts[1] = std::vector<token_id>(4, 1);
  engine.texts[2] = std::vector<token_id>(4, 2);
  engine.ticket = scheduler.submit(1).value();
  REQUIRE(scheduler.submit(2));
  REQUIRE(scheduler.step().value().work.size() == 2);
  REQUIRE(scheduler.completed());
  engine.texts[1].push_back(1);
  engine.texts[2].push_back(2);
  const auto work = scheduler.step().value().work;  // who came last is preempted
  REQUIRE(work.size() == 1);
  CHECK(work[0].user == 1);
  CHECK(engine.answers.size() >= 12);  // low, relief, swap_out
  for (const error_code answer : engine.answers)
    CHECK(answer == errc::reentered);
  REQUIRE(scheduler.completed());
  CHECK(scheduler.audit() == std::vector<std::string>{});

  // Whoever is ended alone may ask for others, and end them.
  engine.texts[1].resize(13, 1);
  engine.answers.clear();
  CHECK(scheduler.step().value().work.size() == 2);  // the second, and the one that was asked for then
  CHECK(engine.answers_at_end == std::vector{errc::reentered, errc::reentered, errc::ok, errc::stale_handle});
  REQUIRE(scheduler.completed());
  CHECK(scheduler.audit() == std::vector<std::string>{});
}

TEST_CASE("a running request whose last block another caller has forked writes into a copy of it") {
  cache_type cache({.blocks = 8, .block_tokens = 4});
  engine_type<false> engine(cache);
  batch_scheduler scheduler(cache, engine, {});
  engine.ask(1, {1, 2, 3, 4, 5});
  REQUIRE(scheduler.submit(1));
  const auto work = scheduler.step().value().work;
  const sequence_id running = work[0].sequence;
  engine.compute(work);
  REQUIRE(scheduler.completed());
  const sequence_id fork = cache.fork(running).value();
  const std::uint64_t before = engine.kv(fork, 4);
  engine.compute(scheduler.step().value().work);
  REQUIRE(scheduler.completed());
  CHECK(cache.blocks(running)[1] != cache.blocks(fork)[1]);
  CHECK(engine.kv(running, 4) == before);
  CHECK(engine.kv(fork, 4) == before);
  CHECK(engine.requests.at(1).tokens == toy_text(std::vector<token_id>{1, 2, 3, 4, 5}, 2));
}

TEST_CASE("a request ends if another caller released its sequence, and no other request does") {
  cache_type cache({.blocks = 8, .block_tokens = 4});
  engine_type<false> engine(cache);
  batch_scheduler scheduler(cache, engine, {});
  engine.ask(1, std::vector<token_id>(4, 1));
  engine.ask(2, std::vector<token_id>(4, 2));
  REQUIRE(scheduler.submit(1));
  REQUIRE(scheduler.submit(2));
  const auto work = scheduler.step().value().work;
  engine.compute(work);
  const sequence_id second = work[1].sequence;
  REQUIRE(scheduler.completed());
  REQUIRE(cache.release(second));
  const scheduled_step step = scheduler.step().value();
  CHECK(engine.requests.at(2).is_exhausted);
  REQUIRE(step.work.size() == 1);
  CHECK(step.work[0].user == 1);
  CHECK(scheduler.audit() == std::vector<std::string>{});
}

TEST_CASE("a waiting request that outgrows a sequence ends, and those after it run") {
  cache_type cache({.blocks = 64, .block_tokens = 4, .max_sequences = 4, .max_sequence_tokens = 16});
  engine_type<false> engine(cache);
  batch_scheduler scheduler(cache, engine, {});
  engine.ask(1, std::vector<token_id>(8, 1));
  engine.ask(2, std::vector<token_id>(8, 2));
  REQUIRE(scheduler.submit(1));
  REQUIRE(scheduler.submit(2));
  engine.requests.at(1).tokens.resize(17, 1);
  const scheduled_step step = scheduler.step().value();
  CHECK(engine.requests.at(1).is_exhausted);
  REQUIRE(step.work.size() == 1);
  CHECK(step.work[0].user == 2);
}

TEST_CASE("a request that shrinks is cut to its new length, and ends only without tokens") {
  cache_type cache({.blocks = 64, .block_tokens = 4});
  engine_type<false> engine(cache);
  batch_scheduler scheduler(cache, engine, {.max_running = 2});
  for (const std::uint64_t user : {1U, 2U, 3U}) {
    engine.ask(user, std::vector<token_id>(8, static_cast<token_id>(user)));
    REQUIRE(scheduler.submit(user));
  }
  engine.compute(scheduler.step().value().work);
  REQUIRE(scheduler.completed());
  engine.requests.at(1).tokens.clear();
  engine.requests.at(2).tokens.resize(7);
  engine.requests.at(3).tokens.clear();
  const scheduled_step step = scheduler.step().value();
  CHECK(step.work.empty());  // the second has nothing to compute
  CHECK(engine.requests.at(1).is_exhausted);
  CHECK_FALSE(engine.requests.at(2).is_exhausted);
  CHECK(engine.requests.at(3).is_exhausted);
  CHECK(cache.stats().tokens == 7);
  CHECK(scheduler.stats().taken_back == 9);
  engine.requests.at(2).tokens.push_back(5);
  engine.requests.at(2).tokens.push_back(6);
  const auto work = scheduler.step().value().work;
  REQUIRE(work.size() == 1);
  CHECK(work[0].first == 7);
  CHECK(work[0].count == 2);
  CHECK(scheduler.audit() == std::vector<std::string>{});
}

TEST_CASE("admission collects blocks whose fences have passed") {
  cache_type cache({.blocks = 4, .block_tokens = 4});
  engine_type<false> engine(cache);
  batch_scheduler scheduler(cache, engine, {});
  const sequence_id before = cache.create().value();
  REQUIRE(cache.extend(before, 16));
  REQUIRE(cache.release_after(before, {}));
  engine.ask(1, std::vector<token_id>(8, 1));
  REQUIRE(scheduler.submit(1));
  CHECK(scheduler.step().value().work.size() == 1);
}

TEST_CASE("a prompt is computed in parts, and running requests go first") {
  cache_type cache({.blocks = 64, .block_tokens = 4});
  engine_type<false> engine(cache);
  batch_scheduler scheduler(cache, engine, {.max_step_tokens = 10});
  engine.ask(1, std::vector<token_id>(8, 1));
  engine.ask(2, std::vector<token_id>(25, 2));
  REQUIRE(scheduler.submit(1));
  REQUIRE(scheduler.submit(2));
  std::vector<std::uint64_t> parts;
  for (int i = 0; i < 4; ++i) {
    const auto work = scheduler.step().value().work;
    REQUIRE(work.size() == 2);
    CHECK(work[0].user == 1);
    parts.push_back(work[1].count);
    engine.compute(work);
    REQUIRE(scheduler.completed());
  }
  CHECK(parts == std::vector<std::uint64_t>{2, 9, 9, 5});
  CHECK(engine.requests.at(2).tokens == toy_text(std::vector<token_id>(25, 2), 1));
}

TEST_CASE("impossible options are refused, and so is a lack of memory") {
  cache_type cache({.blocks = 4});
  engine_type<false> engine(cache);
  using scheduler = batch_scheduler<cache_type, engine_type<false>>;
  CHECK_THROWS_WITH_AS(scheduler(cache, engine, {.max_running = 0}),
                       "batch_scheduler: max_running is 0; at least 1 is needed", length_error);
  CHECK_THROWS_WITH_AS(scheduler(cache, engine, {.max_step_tokens = 0}),
                       "batch_scheduler: max_step_tokens is 0; at least 1 is needed", length_error);
  CHECK_THROWS_WITH_AS(
      scheduler(cache, engine, {.max_running = 8, .max_requests = 7}),
      "batch_scheduler: max_requests is 7, fewer than the 8 of max_running; raise max_requests",
      length_error);
  CHECK(fail_each_allocation(
            [&](const metadata_source& source) { scheduler(cache, engine, {.metadata = source}); }) == 10);
}
