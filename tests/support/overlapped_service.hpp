/// @file
/// A service that plans a step while another runs, and an engine that computes each step as late as it may.
#pragma once

#include <llmmem/paging/batch_scheduler.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/all_choices.hpp"
#include "support/scheduler_service.hpp"
#include "support/toy_engine.hpp"
#include "support/toy_group_engine.hpp"

namespace llmmem_tests {

/// A copy, or KV of a swapped request that is brought back.
using queued = std::function<void()>;

/// Carries out copies and swaps in the order of the stream: after the step before, not when the scheduler
/// asks.
template <class Cache, bool Swaps>
struct late_engine : toy_engine<Cache, Swaps> {
  explicit late_engine(const Cache& of) : toy_engine<Cache, Swaps>(of), cache(&of) {}

  [[nodiscard]] std::span<const llmmem::token_id> tokens(std::uint64_t user) noexcept {
    asked_late += over.contains(user) ? 1U : 0U;
    return toy_engine<Cache, Swaps>::tokens(user);
  }
  template <class Copy>
  void copy(const Copy& what) noexcept {
    queue.emplace_back([this, what] { toy_engine<Cache, Swaps>::copy(what); });
  }
  [[nodiscard]] bool swap_in(std::uint64_t user, llmmem::sequence_id sequence, std::uint64_t first,
                             std::uint64_t end) noexcept
    requires Swaps
  {
    if (!this->has_saved(user)) return false;
    if constexpr (llmmem::detail::grouped_cache<Cache>) {
      if (first == end) return false;
      for (auto& each : this->coming_back(user, sequence, first, end))
        queue.emplace_back([this, each] { this->write(each.group, each.block, each.cells); });
    } else {
      for (std::uint64_t i = first; i < end; ++i) {
        const auto block = cache->blocks(sequence)[static_cast<std::size_t>(i / cache->block_tokens())];
        const std::uint64_t kv = this->requests.find(user)->second.saved[static_cast<std::size_t>(i)];
        queue.emplace_back([this, block, i, kv] { this->write(block, i % cache->block_tokens(), kv); });
      }
    }
    return true;
  }
  void carry_out(const std::vector<queued>& all) {
    for (const queued& each : all)
      each();
  }

  const Cache* cache;
  std::vector<queued> queue{};
  std::set<std::uint64_t> over{};  // users that were finished: their tokens may no longer exist
  std::uint64_t asked_late = 0;    // questions for their tokens
};

/// The blocks that a step reads and writes for one request.
struct touched_blocks {
  std::vector<llmmem::block_id> read{};
  std::vector<llmmem::block_id> written{};
};

template <class Cache>
[[nodiscard]] touched_blocks touched_by(const Cache& cache, const llmmem::scheduled_work& work) {
  touched_blocks out;
  if constexpr (llmmem::detail::grouped_cache<Cache>) {
    for (std::size_t g = 0; g < cache.groups().size(); ++g) {
      const llmmem::layer_group& of = cache.groups()[g];
      const auto table = cache.table(work.sequence, g);
      for (std::uint64_t i = 0; i < table.size(); ++i) {
        if (table[i] == llmmem::null_block) continue;
        if (i < of.sink_blocks() || i >= of.dead_blocks(work.first)) out.read.push_back(table[i]);
        const bool is_written =
            (i + 1) * of.block_tokens > work.first && i * of.block_tokens < work.first + work.count;
        if (is_written) out.written.push_back(table[i]);
      }
    }
  } else {
    const auto table = cache.blocks(work.sequence);
    out.read.assign(table.begin(), table.end());
    for (std::uint64_t t = work.first; t < work.first + work.count; ++t)
      out.written.push_back(table[static_cast<std::size_t>(t / cache.block_tokens())]);
  }
  return out;
}

/// A step that was planned and is not completed.
struct flight {
  std::vector<llmmem::scheduled_work> work{};
  std::vector<touched_blocks> blocks{};
  std::vector<queued> queue{};
  bool is_early = false;  // planned while another was in flight
};

/// A service that runs up to two steps ahead, and proves at each call that no block of a step in flight is
/// free, or written for one request and read or written for another.
template <class Cache, bool Swaps, llmmem::scheduling_order Order = llmmem::first_come_first_served>
struct overlapped {
  overlapped(const cache_options<Cache>& blocks, const llmmem::scheduler_options& options, Order order = {})
      : cache(blocks), engine(cache), scheduler(cache, engine, options, std::move(order)) {}

  void submit(std::uint64_t user, std::vector<llmmem::token_id> prompt,
              const llmmem::request_class& of = {}) {
    engine.ask(user, std::move(prompt));
    tickets[user] = scheduler.submit(user, {}, {}, of).value();
  }

  /// Returns whether the step has work.
  bool plan() {
    const llmmem::scheduled_step step = scheduler.step().value();
    flight next{.work = {step.work.begin(), step.work.end()},
                .queue = std::move(engine.queue),
                .is_early = !flights.empty()};
    engine.queue.clear();
    for (const llmmem::scheduled_work& each : next.work) {
      next.blocks.push_back(touched_by(cache, each));
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
    std::erase_if(done.work, [&](const llmmem::scheduled_work& each) {
      if (tickets.contains(each.user)) return false;
      if (skipped.contains(each.user) || (done.is_early && skips(each.user)))
        return skipped.insert(each.user), true;
      return false;
    });
    std::vector<std::uint64_t> over;
    engine.compute(done.work);
    for (const llmmem::scheduled_work& each : done.work) {
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
    std::map<llmmem::block_id, std::uint64_t> writers;
    for (const flight& each : flights) {
      for (std::size_t i = 0; i < each.work.size(); ++i) {
        for (const llmmem::block_id block : each.blocks[i].read)
          REQUIRE(cache.pool().record(block).references() >= 1);
        for (const llmmem::block_id block : each.blocks[i].written) {
          const auto [at, is_new] = writers.emplace(block, each.work[i].ticket.slot);
          REQUIRE((is_new || at->second == each.work[i].ticket.slot));
        }
      }
    }
    for (const flight& each : flights) {
      for (std::size_t i = 0; i < each.work.size(); ++i) {
        for (const llmmem::block_id block : each.blocks[i].read) {
          const auto writer = writers.find(block);
          REQUIRE((writer == writers.end() || writer->second == each.work[i].ticket.slot));
        }
      }
    }
    if constexpr (llmmem::detail::grouped_cache<Cache>) REQUIRE(engine.wrong == 0);
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
  llmmem::batch_scheduler<Cache, late_engine<Cache, Swaps>, Order> scheduler;
  std::map<std::uint64_t, llmmem::request_ticket> tickets{};  // of those that are not over
  std::deque<flight> flights{};
  std::set<std::uint64_t> skipped{};  // of those that are over
  std::uint64_t early = 0;            // entries planned while another step was in flight
};

/// One life under all orders, as `choices` decides, in which requests come, steps are planned and completed,
/// and answers of at most `longest` tokens end. Every answer is right, and every request finishes.
template <class Service>
void live_as_chosen(Service& all, all_choices& choices, std::uint32_t requests, std::uint32_t longest) {
  std::uint32_t submitted = 0;
  std::uint32_t events = 0;
  bool plans = true;  // no second attempt before something has changed
  while (submitted < requests || !all.tickets.empty() || !all.flights.empty()) {
    REQUIRE(++events < 400);
    if (submitted < requests && (all.tickets.empty() || choices.below(2) == 0)) {
      all.submit(submitted, std::vector<llmmem::token_id>(1 + (submitted + choices.below(2)) % 3, 7));
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
  REQUIRE(all.cache.audit().empty());
  REQUIRE(all.scheduler.stats().finished == requests);
}

}  // namespace llmmem_tests
