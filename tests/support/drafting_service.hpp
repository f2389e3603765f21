/// @file
/// A service whose requests propose drafts, of which a part is refused.
#pragma once

#include <llmmem/paging/batch_scheduler.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/overlapped_service.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

namespace llmmem_tests {

/// The KV of a token; an engine with groups checks its own.
template <class Engine>
[[nodiscard]] std::uint64_t kv_of(Engine& engine, llmmem::sequence_id sequence, std::uint64_t i) {
  if constexpr (requires { engine.kv(sequence, i); }) return engine.kv(sequence, i);
  return 0;
}

/// An engine that proposes drafts and verifies them a step later; a part of them is wrong.
template <class Cache, bool Swaps>
struct drafting_service {
  using engine_type = late_engine<Cache, Swaps>;

  drafting_service(const cache_options<Cache>& blocks, const llmmem::scheduler_options& options)
      : cache(blocks), engine(cache), scheduler(cache, engine, options) {}

  void submit(std::uint64_t user, std::vector<llmmem::token_id> prompt) {
    truth[user] = toy_text(prompt, 160);
    stands[user] = prompt.size();
    std::uint64_t kv = 0;
    for (const llmmem::token_id token : truth.at(user))
      values[user].push_back(kv = toy_kv(kv, token));
    engine.ask(user, std::move(prompt));
    tickets[user] = scheduler.submit(user).value();
  }

  /// Verifies what a step computed; returns how many computed tokens stand, if drafts were refused.
  std::uint64_t verify(const llmmem::scheduled_work& work) {
    std::vector<llmmem::token_id>& tokens = engine.requests.at(work.user).tokens;
    std::size_t& good = stands.at(work.user);
    const std::vector<llmmem::token_id>& right = truth.at(work.user);
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

  Cache cache;
  engine_type engine;
  llmmem::batch_scheduler<Cache, engine_type> scheduler;
  std::map<std::uint64_t, llmmem::request_ticket> tickets{};
  std::map<std::uint64_t, std::vector<llmmem::token_id>> truth{};
  std::map<std::uint64_t, std::vector<std::uint64_t>> values{};  // the KV of `truth`
  std::map<std::uint64_t, std::size_t> stands{};                 // tokens that are no drafts
};

struct draft_counts {
  std::uint64_t taken_back = 0;
  std::uint64_t preempted = 0;
  std::uint64_t recomputed = 0;
};

/// Services of random size whose drafts are refused at any time; `make(random)` returns the options of the
/// cache and the longest request.
template <class Cache, class Make>
draft_counts refuse_drafts(std::uint64_t count, Make&& make) {
  draft_counts seen;
  for (const auto seed : seeds(count)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::uint32_t ahead = 1 + random.below(std::uint32_t{2});
    const llmmem::scheduler_options options{.max_running = 4,
                                            .max_requests = 16,
                                            .max_step_tokens = 3 + random.below(std::uint64_t{12}),
                                            .max_steps_in_flight = ahead};
    const auto [made, longest] = make(random);
    drafting_service<Cache, true> all(made, options);
    std::deque<flight> flights;
    std::map<std::uint64_t, std::uint64_t> void_from;  // by user: work from here on does not count
    std::uint64_t submitted = 0;
    for (int events = 0; submitted < 10 || !all.tickets.empty() || !flights.empty(); ++events) {
      REQUIRE(events < 20'000);
      if (submitted < 10 && all.tickets.size() < 8 && random.once_in(3))
        all.submit(submitted++, std::vector<llmmem::token_id>(1 + random.below(std::uint64_t{4}), 7));
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
      for (const llmmem::scheduled_work& each : done.work) {
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
        for (std::uint64_t i = 0; i < kept && !llmmem::detail::grouped_cache<Cache>; ++i)
          REQUIRE(kv_of(all.engine, each.sequence, i) ==
                  all.values.at(each.user)[static_cast<std::size_t>(i)]);
        if (kept < end) {
          refused.emplace_back(each.user, kept);
          const bool is_ahead =
              !flights.empty() && std::any_of(flights[0].work.begin(), flights[0].work.end(),
                                              [&](const llmmem::scheduled_work& next) {
                                                return next.user == each.user && next.first >= kept;
                                              });
          if (is_ahead) void_from[each.user] = kept;
        }
        if (all.stands.at(each.user) >= longest || random.once_in(30)) {
          over.push_back(each.user);
        } else if (all.stands.at(each.user) == now.tokens.size()) {
          // Drafts, unless a step in flight already computes the next token.
          const bool flies = !flights.empty() && std::any_of(flights[0].work.begin(), flights[0].work.end(),
                                                             [&](const llmmem::scheduled_work& next) {
                                                               return next.user == each.user;
                                                             });
          const std::vector<llmmem::token_id>& right = all.truth.at(each.user);
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
    seen.taken_back += all.scheduler.stats().taken_back;
    seen.preempted += all.scheduler.stats().preempted;
    seen.recomputed += all.scheduler.stats().recomputed_tokens;
    CHECK(all.scheduler.stats().exhausted == 0);
    if constexpr (llmmem::detail::grouped_cache<Cache>) {
      REQUIRE(all.engine.wrong == 0);
      REQUIRE(all.cache.stats().pages.active_bytes == 0);
    } else {
      REQUIRE(all.cache.stats().active_blocks == 0);
    }
    REQUIRE(all.cache.audit() == std::vector<std::string>{});
  }
  return seen;
}

}  // namespace llmmem_tests
