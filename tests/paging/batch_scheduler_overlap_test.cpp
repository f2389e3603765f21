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

/// A copy, or KV of a swapped request that is brought back into one block.
struct queued {
  block_copy copy{};
  block_id to = null_block;
  std::uint64_t i = 0;
  std::uint64_t kv = 0;
};

/// Carries out copies and swaps in the order of the stream: after the step before, not when the scheduler
/// asks.
template <class Cache, bool Swaps>
struct late_engine : toy_engine<Cache, Swaps> {
  explicit late_engine(const Cache& of) : toy_engine<Cache, Swaps>(of), cache(&of) {}

  [[nodiscard]] std::span<const token_id> tokens(std::uint64_t user) noexcept {
    asked_late += over.contains(user) ? 1U : 0U;
    return toy_engine<Cache, Swaps>::tokens(user);
  }
  void copy(const block_copy& what) noexcept { queue.push_back({.copy = what}); }
  [[nodiscard]] bool swap_in(std::uint64_t user, sequence_id sequence, std::uint64_t first,
                             std::uint64_t end) noexcept
    requires Swaps
  {
    if (!this->has_saved(user)) return false;
    for (std::uint64_t i = first; i < end; ++i) {
      queue.push_back({.to = cache->blocks(sequence)[i / cache->block_tokens()],
                       .i = i % cache->block_tokens(),
                       .kv = this->requests.find(user)->second.saved[i]});
    }
    return true;
  }
  void carry_out(const std::vector<queued>& all) noexcept {
    for (const queued& each : all) {
      if (each.to == null_block) {
        toy_engine<Cache, Swaps>::copy(each.copy);
      } else {
        this->write(each.to, each.i, each.kv);
      }
    }
  }

  const Cache* cache;
  std::vector<queued> queue{};
  std::set<std::uint64_t> over{};  // users that were finished: their tokens may no longer exist
  std::uint64_t asked_late = 0;    // questions for their tokens
};

/// A step that was planned and is not completed.
struct flight {
  std::vector<scheduled_work> work{};
  std::vector<std::vector<block_id>> tables{};
  std::vector<queued> queue{};
  bool is_early = false;  // planned while another was in flight
};

/// A service that runs up to two steps ahead, and proves at each call that no block of a step in flight is
/// free, or written for one request and read or written for another.
template <class Cache, bool Swaps, scheduling_order Order = first_come_first_served>
struct overlapped {
  overlapped(const paged_options& blocks, const scheduler_options& options, Order order = {})
      : cache(blocks), engine(cache), scheduler(cache, engine, options, std::move(order)) {}

  void submit(std::uint64_t user, std::vector<token_id> prompt, const request_class& of = {}) {
    engine.ask(user, std::move(prompt));
    tickets[user] = scheduler.submit(user, {}, {}, of).value();
  }

  /// Returns whether the step has work.
  bool plan() {
    const scheduled_step step = scheduler.step().value();
    flight next{.work = {step.work.begin(), step.work.end()},
                .queue = std::move(engine.queue),
                .is_early = !flights.empty()};
    engine.queue.clear();
    for (const scheduled_work& each : next.work) {
      const auto table = cache.blocks(each.sequence);
      next.tables.emplace_back(table.begin(), table.end());
      early += flights.empty() ? 0U : 1U;
    }
    drop_exhausted();
    if (next.work.empty()) {
      REQUIRE(next.queue.empty());
      return false;
    }
    flights.push_back(std::move(next));
    prove();
    return true;
  }

  /// Runs and completes the oldest step; `ends(user, answer)` says which requests end, `first(user)` whether
  /// they do before the step is completed, `skips(user)` whether work of ended requests is skipped.
  template <class Ends, class First, class Skips>
  void complete(Ends&& ends, First&& first, Skips&& skips) {
    flight done = std::move(flights.front());
    flights.pop_front();
    engine.carry_out(done.queue);
    std::erase_if(done.work, [&](const scheduled_work& each) {
      if (tickets.contains(each.user)) return false;
      if (skipped.contains(each.user) || (done.is_early && skips(each.user)))
        return skipped.insert(each.user), true;
      return false;
    });
    std::vector<std::uint64_t> over;
    engine.compute(done.work);
    for (const scheduled_work& each : done.work) {
      const toy_request& request = engine.requests.at(each.user);
      if (tickets.contains(each.user) && each.first + each.count + 1 == request.tokens.size() &&
          ends(each.user, request.tokens.size() - request.prompt)) {
        over.push_back(each.user);
      }
    }
    const auto finish = [&](std::uint64_t user) { finish_now(user); };
    std::erase_if(over, [&](std::uint64_t user) {
      if (!first(user)) return false;
      finish(user);
      return true;
    });
    scheduler.completed().value();
    for (const std::uint64_t user : over)
      finish(user);
    prove();
  }

  void finish_now(std::uint64_t user) {
    scheduler.finish(tickets.at(user)).value();
    tickets.erase(user);
    engine.over.insert(user);
  }

  void drop_exhausted() {
    std::erase_if(tickets, [&](const auto& each) { return engine.requests.at(each.first).is_exhausted; });
  }

  void prove() {
    std::map<block_id, std::uint64_t> writers;
    for (const flight& each : flights) {
      for (std::size_t i = 0; i < each.work.size(); ++i) {
        const scheduled_work& work = each.work[i];
        for (const block_id block : each.tables[i])
          REQUIRE(cache.pool().record(block).references() >= 1);
        for (std::uint64_t t = work.first; t < work.first + work.count; ++t) {
          const block_id block = each.tables[i][static_cast<std::size_t>(t / cache.block_tokens())];
          const auto [at, is_new] = writers.emplace(block, work.ticket.slot);
          REQUIRE((is_new || at->second == work.ticket.slot));
        }
      }
    }
    for (const flight& each : flights) {
      for (std::size_t i = 0; i < each.work.size(); ++i) {
        for (const block_id block : each.tables[i]) {
          const auto writer = writers.find(block);
          REQUIRE((writer == writers.end() || writer->second == each.work[i].ticket.slot));
        }
      }
    }
    REQUIRE(engine.asked_late == 0);
    const auto proof = scheduler.audit();
    REQUIRE((proof.empty() ? "" : proof.front()) == std::string());
  }

  /// Whether everything said so far is what the model says alone.
  [[nodiscard]] bool is_right(std::uint64_t user) const {
    const toy_request& request = engine.requests.at(user);
    return request.tokens ==
           toy_text(std::span(request.tokens).first(request.prompt), request.tokens.size() - request.prompt);
  }

  Cache cache;
  late_engine<Cache, Swaps> engine;
  batch_scheduler<Cache, late_engine<Cache, Swaps>, Order> scheduler;
  std::map<std::uint64_t, request_ticket> tickets{};  // of those that are not over
  std::deque<flight> flights{};
  std::set<std::uint64_t> skipped{};  // of those that are over
  std::uint64_t early = 0;            // entries planned while another step was in flight
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
  std::uint32_t submitted = 0;
  std::uint32_t events = 0;
  bool plans = true;  // no second attempt before something has changed
  while (submitted < requests || !all.tickets.empty() || !all.flights.empty()) {
    REQUIRE(++events < 400);
    if (submitted < requests && (all.tickets.empty() || choices.below(2) == 0)) {
      all.submit(submitted, std::vector<token_id>(1 + (submitted + choices.below(2)) % 3, 7));
      ++submitted;
      plans = true;
      continue;
    }
    const bool can_plan = plans && all.flights.size() < 2 && !all.tickets.empty();
    if (can_plan && (all.flights.empty() || choices.below(2) == 0)) {
      plans = all.plan();
      REQUIRE((plans || !all.flights.empty()));  // no request is stuck
      continue;
    }
    REQUIRE(!all.flights.empty());
    all.complete(
        [&](std::uint64_t, std::size_t answer) { return answer >= longest || choices.below(2) == 0; },
        [](std::uint64_t user) { return user % 2 == 0; }, [&](std::uint64_t) { return events % 2 == 0; });
    plans = true;
  }
  for (std::uint32_t user = 0; user < requests; ++user) {
    REQUIRE(all.is_right(user));
    REQUIRE_FALSE(all.engine.requests.at(user).is_exhausted);
  }
  REQUIRE(all.cache.stats().active_blocks == 0);
  REQUIRE(all.cache.audit().empty());
  const scheduler_stats stats = all.scheduler.stats();
  REQUIRE(stats.finished == requests);
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

namespace {

/// An engine that proposes drafts and verifies them a step later; a part of them is wrong.
template <bool Swaps>
struct drafting_service {
  using engine_type = late_engine<cache_type, Swaps>;

  drafting_service(const paged_options& blocks, const scheduler_options& options)
      : cache(blocks), engine(cache), scheduler(cache, engine, options) {}

  void submit(std::uint64_t user, std::vector<token_id> prompt) {
    truth[user] = toy_text(prompt, 160);
    stands[user] = prompt.size();
    std::uint64_t kv = 0;
    for (const token_id token : truth.at(user))
      values[user].push_back(kv = toy_kv(kv, token));
    engine.ask(user, std::move(prompt));
    tickets[user] = scheduler.submit(user).value();
  }

  /// Verifies what a step computed; returns how many computed tokens stand, if drafts were refused.
  std::uint64_t verify(const scheduled_work& work) {
    std::vector<token_id>& tokens = engine.requests.at(work.user).tokens;
    std::size_t& good = stands.at(work.user);
    const std::vector<token_id>& right = truth.at(work.user);
    const auto end = static_cast<std::size_t>(work.first + work.count);
    if (end < good) return end;  // a part of a prompt
    while (good < end && tokens[good] == right[good])
      ++good;
    if (good == end && good < tokens.size()) return good;  // more drafts are computed later
    const std::size_t kept = good;
    tokens.resize(good);
    tokens.push_back(right[good++]);
    return kept;
  }

  cache_type cache;
  engine_type engine;
  batch_scheduler<cache_type, engine_type> scheduler;
  std::map<std::uint64_t, request_ticket> tickets{};
  std::map<std::uint64_t, std::vector<token_id>> truth{};
  std::map<std::uint64_t, std::vector<std::uint64_t>> values{};  // the KV of `truth`
  std::map<std::uint64_t, std::size_t> stands{};                 // tokens that are no drafts
};

}  // namespace

TEST_CASE("refused drafts are taken back, and nothing computed after them is ever read") {
  std::uint64_t taken_back = 0;
  std::uint64_t preempted = 0;
  for (const auto seed : seeds(200)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::uint64_t blocks = 12 + random.below(std::uint64_t{20});
    const std::uint32_t ahead = 1 + random.below(std::uint32_t{2});
    drafting_service<true> all(
        {.blocks = blocks, .block_tokens = 1 + random.below(std::uint32_t{4}), .max_sequences = 8},
        {.max_running = 4,
         .max_requests = 16,
         .max_step_tokens = 3 + random.below(std::uint64_t{12}),
         .max_steps_in_flight = ahead});
    std::deque<flight> flights;
    std::map<std::uint64_t, std::uint64_t> void_from;  // by user: work from here on does not count
    std::uint64_t submitted = 0;
    const std::uint64_t longest = blocks * all.cache.block_tokens() - 6;
    for (int events = 0; submitted < 10 || !all.tickets.empty() || !flights.empty(); ++events) {
      REQUIRE(events < 20'000);
      if (submitted < 10 && all.tickets.size() < 8 && random.once_in(3))
        all.submit(submitted++, std::vector<token_id>(1 + random.below(std::uint64_t{4}), 7));
      if (flights.size() < ahead) {
        const auto work = all.scheduler.step().value().work;
        if (!work.empty()) {
          flights.push_back({.work = {work.begin(), work.end()}, .queue = std::move(all.engine.queue)});
        } else {
          REQUIRE((!flights.empty() || all.tickets.empty()));
        }
        all.engine.queue.clear();
        if (flights.empty() || (flights.size() < ahead && random.once_in(2))) continue;
      }
      const flight done = std::move(flights.front());
      flights.pop_front();
      all.engine.carry_out(done.queue);
      std::vector<std::pair<std::uint64_t, std::uint64_t>> refused;
      std::vector<std::uint64_t> over;
      for (const scheduled_work& each : done.work) {
        if (!all.tickets.contains(each.user)) continue;
        const auto bad = void_from.find(each.user);
        if (bad != void_from.end() && each.first >= bad->second) {
          void_from.erase(bad);
          continue;
        }
        toy_request& now = all.engine.requests.at(each.user);
        const std::size_t before = now.tokens.size();
        const std::size_t end = static_cast<std::size_t>(each.first + each.count);
        REQUIRE(end <= before);
        all.engine.compute(std::span(&each, 1));  // it may append a token: `verify` does that
        now.tokens.resize(before);
        const std::uint64_t kept = all.verify(each);
        for (std::uint64_t i = 0; i < kept; ++i)
          REQUIRE(all.engine.kv(each.sequence, i) == all.values.at(each.user)[static_cast<std::size_t>(i)]);
        if (kept < end) {
          refused.emplace_back(each.user, kept);
          const bool is_ahead =
              !flights.empty() &&
              std::any_of(flights[0].work.begin(), flights[0].work.end(), [&](const scheduled_work& next) {
                return next.user == each.user && next.first >= kept;
              });
          if (is_ahead) void_from[each.user] = kept;
        }
        if (all.stands.at(each.user) >= longest || random.once_in(30)) {
          over.push_back(each.user);
        } else if (all.stands.at(each.user) == now.tokens.size()) {
          // Drafts, unless a step in flight already computes the next token.
          const bool flies = !flights.empty() &&
                             std::any_of(flights[0].work.begin(), flights[0].work.end(),
                                         [&](const scheduled_work& next) { return next.user == each.user; });
          const std::vector<token_id>& right = all.truth.at(each.user);
          for (std::uint64_t drafts = flies ? 0 : random.below(std::uint64_t{4}); drafts > 0; --drafts)
            now.tokens.push_back(random.once_in(3) ? 1 : right[now.tokens.size()]);
        }
      }
      const bool before_completed = random.once_in(2);
      const auto accept = [&] {
        for (const auto& [user, kept] : refused)
          all.scheduler.accepted(all.tickets.at(user), kept).value();
      };
      if (before_completed) accept();
      REQUIRE(all.scheduler.completed());
      if (!before_completed) accept();
      for (const std::uint64_t user : over) {
        REQUIRE(all.scheduler.finish(all.tickets.at(user)));
        all.tickets.erase(user);
        void_from.erase(user);
      }
      const auto proof = all.scheduler.audit();
      REQUIRE((proof.empty() ? "" : proof.front()) == std::string());
    }
    taken_back += all.scheduler.stats().taken_back;
    preempted += all.scheduler.stats().preempted;
    CHECK(all.scheduler.stats().exhausted == 0);
    REQUIRE(all.cache.stats().active_blocks == 0);
    REQUIRE(all.cache.audit() == std::vector<std::string>{});
  }
  MESSAGE(taken_back << " tokens taken back, " << preempted << " preempted");
  CHECK(taken_back > 1'000);
  CHECK(preempted > 200);
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
