/// @file
/// A service around a batch_scheduler, for tests.
#pragma once

#include <llmmem/paging/batch_scheduler.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/random.hpp"
#include "support/toy_engine.hpp"
#include "support/toy_group_engine.hpp"

namespace llmmem_tests {

/// A small service whose answers end when somebody says so.
template <class Cache, bool Swaps, llmmem::scheduling_order Order = llmmem::first_come_first_served>
struct service {
  service(const cache_options<Cache>& blocks, const llmmem::scheduler_options& options, Order order = {})
      : cache(blocks), engine(cache), scheduler(cache, engine, options, std::move(order)) {}

  void submit(std::uint64_t user, std::vector<llmmem::token_id> prompt,
              const llmmem::request_class& of = {}) {
    engine.ask(user, std::move(prompt));
    tickets[user] = scheduler.submit(user, {}, {}, of).value();
  }

  /// `ends(user, answer)`: whether the answer, of so many tokens, ends there.
  template <class Ends>
  void step(Ends&& ends) {
    const llmmem::scheduled_step now = scheduler.step().value();
    work_in_last_step = now.work.size();
    blocked = now.blocked;
    // Copies, as work's are one token each, must not depend on what is computed in the step.
    engine.compute(now.work);
    std::vector<std::uint64_t> over;
    for (const llmmem::scheduled_work& each : now.work) {
      const toy_request& request = engine.requests.at(each.user);
      if (each.first + each.count + 1 == request.tokens.size() &&
          ends(each.user, request.tokens.size() - request.prompt)) {
        over.push_back(each.user);
      }
    }
    scheduler.completed().value();
    for (const std::uint64_t user : over) {
      scheduler.finish(tickets.at(user)).value();
      tickets.erase(user);
    }
    for (auto each = tickets.begin(); each != tickets.end();) {
      each = engine.requests.at(each->first).is_exhausted ? tickets.erase(each) : std::next(each);
    }
  }

  /// Everything said so far is what the model says alone.
  [[nodiscard]] bool is_right(std::uint64_t user) const {
    const toy_request& request = engine.requests.at(user);
    return request.tokens ==
           toy_text(std::span(request.tokens).first(request.prompt), request.tokens.size() - request.prompt);
  }

  Cache cache;
  toy_engine<Cache, Swaps> engine;
  llmmem::batch_scheduler<Cache, toy_engine<Cache, Swaps>, Order> scheduler;
  std::map<std::uint64_t, llmmem::request_ticket> tickets;  // of those that are not over
  std::size_t work_in_last_step = 0;
  llmmem::block_shortage blocked{};
};

/// Serves thirty requests of random lengths, some of which are cancelled and some of which a cache for
/// `longest` tokens cannot hold. Every answer is right, and only requests that are too long are exhausted.
template <class Service, class AfterStep>
void serve_random_requests(Service& all, random_numbers& random, std::uint64_t longest,
                           AfterStep after_step) {
  std::uint64_t submitted = 0;
  std::map<std::uint64_t, std::size_t> lengths;
  for (int steps = 0; submitted < 30 || !all.tickets.empty(); ++steps) {
    REQUIRE(steps < 20'000);
    if (submitted < 30 && all.tickets.size() < 20 && random.once_in(3)) {
      std::vector<llmmem::token_id> prompt(1 + random.below(longest / 2), 7);
      if (random.once_in(2)) prompt.back() = 8;
      // An answer that may outgrow the cache once in a while.
      lengths[submitted] = 1 + random.below(random.once_in(10) ? longest * 2 : longest / 2);
      all.submit(submitted++, std::move(prompt));
    }
    if (!all.tickets.empty() && random.once_in(40)) {
      const auto which = all.tickets.begin();
      all.scheduler.finish(which->second).value();
      all.tickets.erase(which);
    }
    all.step([&](std::uint64_t user, std::size_t answer) { return answer >= lengths.at(user); });
    REQUIRE((all.work_in_last_step != 0 || all.tickets.empty()));
    after_step();
    REQUIRE(all.scheduler.audit() == std::vector<std::string>{});
  }
  for (std::uint64_t user = 0; user < submitted; ++user) {
    REQUIRE(all.is_right(user));
    if (all.engine.requests.at(user).is_exhausted)
      REQUIRE(all.engine.requests.at(user).tokens.size() > longest);
  }
}

}  // namespace llmmem_tests
