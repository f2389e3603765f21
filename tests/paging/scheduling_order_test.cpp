#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/batch_scheduler.hpp>
#include <llmmem/paging/scheduling_order.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "support/all_choices.hpp"
#include "support/counting_metadata.hpp"
#include "support/random.hpp"
#include "support/scheduler_service.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

using cache_type = paged_allocator<>;
const std::vector<std::string> sound{};

request_class class_of(std::uint32_t kind) {
  return {.priority = kind, .tenant = kind, .deadline = 10 - kind};
}

/// One service's life under all that its environment may do, with requests of three classes.
template <class Order>
void live(all_choices& choices, Order order, std::uint64_t blocks, std::uint32_t requests,
          std::uint32_t longest) {
  service<cache_type, false, Order> all(
      {.blocks = blocks, .block_tokens = 2, .max_sequences = 4, .max_sequence_tokens = 64},
      {.max_running = 3, .max_requests = 4, .max_step_tokens = 5}, std::move(order));
  std::uint32_t submitted = 0;
  std::uint32_t steps = 0;
  while (submitted < requests || !all.tickets.empty()) {
    if (submitted < requests && (all.tickets.empty() || choices.below(2) == 0)) {
      const std::uint32_t kind = choices.below(3);
      all.submit(submitted, std::vector<token_id>(1 + submitted % 3, 7), class_of((submitted + kind) % 3));
      ++submitted;
      continue;
    }
    all.step([&](std::uint64_t, std::size_t answer) { return answer >= longest || choices.below(2) == 0; });
    REQUIRE(all.work_in_last_step != 0);  // no request is stuck
    REQUIRE(++steps < 200);
    const auto proof = all.scheduler.audit();
    REQUIRE((proof.empty() ? "" : proof.front()) == std::string());
  }
  for (std::uint32_t user = 0; user < requests; ++user) {
    REQUIRE(all.is_right(user));
    REQUIRE_FALSE(all.engine.requests.at(user).is_exhausted);
  }
  REQUIRE(all.cache.stats().active_blocks == 0);
  REQUIRE(all.scheduler.stats().finished == requests);
}

template <class Make>
std::uint64_t live_every_life(Make&& make, std::uint64_t blocks, std::uint32_t requests,
                              std::uint32_t longest) {
  all_choices choices;
  std::uint64_t lives = 0;
  do {
    live(choices, make(), blocks, requests, longest);
    ++lives;
  } while (choices.advance());
  return lives;
}

/// Whether `order` orders `requests` strictly and totally.
template <class Order>
void check_total_order(const Order& order, const std::vector<ranked_request>& requests) {
  for (const ranked_request& a : requests) {
    for (const ranked_request& b : requests) {
      REQUIRE(order.precedes(a, b) + order.precedes(b, a) == (a.arrival == b.arrival ? 0 : 1));
      for (const ranked_request& c : requests) {
        if (order.precedes(a, b) && order.precedes(b, c)) REQUIRE(order.precedes(a, c));
      }
    }
  }
}

}  // namespace

TEST_CASE("every order is strict and total") {
  fair_shares shares(3);
  for (std::uint32_t i = 0; i < 3; ++i)
    shares.computed({.arrival = 1, .of = {.tenant = i}}, i % 2, 0);
  for (const auto seed : seeds(50)) {
    CAPTURE(seed);
    random_numbers random(seed);
    std::vector<ranked_request> requests;
    for (std::uint64_t i = 1; i <= 12; ++i) {
      requests.push_back(
          {.arrival = i,
           .of = {.priority = random.below(std::uint32_t{4}),
                  .tenant = random.below(std::uint32_t{3}),
                  .deadline = random.once_in(3) ? unlimited : random.below(std::uint64_t{5})}});
    }
    check_total_order(first_come_first_served{}, requests);
    check_total_order(by_priority{}, requests);
    check_total_order(by_priority(0), requests);
    check_total_order(by_priority(2), requests);
    check_total_order(by_priority(unlimited / 2), requests);
    check_total_order(earliest_deadline_first{}, requests);
    check_total_order(shares, requests);
  }
}

TEST_CASE("with blocks for just one request, none is stuck under any order, in any environment") {
  CHECK(live_every_life([] { return by_priority{}; }, 4, 3, 3) > 5'000);
  CHECK(live_every_life([] { return by_priority(1); }, 4, 3, 3) > 5'000);
  CHECK(live_every_life([] { return earliest_deadline_first{}; }, 4, 3, 3) > 5'000);
  CHECK(live_every_life([] { return fair_shares(3); }, 4, 3, 3) > 5'000);
}

namespace {

/// Runs requests of random classes; returns the arrivals in order of their first admission.
template <class Order>
std::vector<std::uint64_t> admissions(std::uint64_t seed, Order order, std::vector<request_class>& classes) {
  random_numbers random(seed);
  service<cache_type, false, Order> all({.blocks = 12, .block_tokens = 2, .max_sequences = 4},
                                        {.max_running = 2, .max_requests = 64}, std::move(order));
  std::vector<std::uint64_t> out;
  std::map<std::uint64_t, std::size_t> lengths;
  std::uint64_t now = 0;
  for (int steps = 0; classes.size() < 60 || !all.tickets.empty(); ++steps) {
    REQUIRE(steps < 10'000);
    while (classes.size() < 60 && all.tickets.size() < 64 && random.once_in(2)) {
      classes.push_back({.priority = random.below(std::uint32_t{3}),
                         .tenant = 0,
                         .deadline = random.once_in(4) ? unlimited : now + random.below(std::uint64_t{60})});
      lengths[classes.size()] = 1 + random.below(std::uint64_t{8});
      all.submit(classes.size(), std::vector<token_id>(1 + random.below(std::uint64_t{6}), 7),
                 classes.back());
    }
    ++now;
    const std::uint64_t before = all.scheduler.stats().admitted;
    all.step([&](std::uint64_t user, std::size_t answer) {
      if (std::find(out.begin(), out.end(), user) == out.end()) out.push_back(user);
      return answer >= lengths.at(user);
    });
    REQUIRE(out.size() == all.scheduler.stats().admitted);
    REQUIRE(all.scheduler.stats().admitted - before <= 2);
    REQUIRE(all.scheduler.audit() == sound);
  }
  return out;
}

/// How many of the later arrivals were admitted before `user` was.
std::uint64_t overtakers(const std::vector<std::uint64_t>& admitted, std::uint64_t user) {
  std::uint64_t count = 0;
  for (const std::uint64_t each : admitted) {
    if (each == user) return count;
    count += each > user ? 1U : 0U;
  }
  return count;
}

}  // namespace

TEST_CASE("a head start bounds how many later requests of higher priority come first") {
  std::uint64_t most = 0;
  std::uint64_t most_without = 0;
  for (const auto seed : seeds(40)) {
    CAPTURE(seed);
    std::vector<request_class> classes;
    const auto order = admissions(seed, by_priority(4), classes);
    for (std::uint64_t user = 1; user <= classes.size(); ++user) {
      const std::uint64_t bound = (2 - classes[static_cast<std::size_t>(user - 1)].priority) * 4;
      REQUIRE(overtakers(order, user) <= bound);
      if (overtakers(order, user) > most) most = overtakers(order, user);
    }
    classes.clear();
    const auto strict = admissions(seed, by_priority{}, classes);
    for (std::uint64_t user = 1; user <= classes.size(); ++user)
      most_without = std::max(most_without, overtakers(strict, user));
    classes.clear();
    const auto served = admissions(seed, first_come_first_served{}, classes);
    REQUIRE(std::is_sorted(served.begin(), served.end()));
  }
  CHECK(most > 4);
  CHECK(most_without > 20);
}

TEST_CASE("a request is overtaken only by requests with earlier deadlines") {
  std::uint64_t overtaken = 0;
  for (const auto seed : seeds(40)) {
    CAPTURE(seed);
    std::vector<request_class> classes;
    const auto order = admissions(seed, earliest_deadline_first{}, classes);
    for (std::size_t i = 0; i < order.size(); ++i) {
      for (std::size_t later = i + 1; later < order.size(); ++later) {
        if (order[later] > order[i]) continue;  // arrived after it as well
        ++overtaken;
        REQUIRE(classes[order[i] - 1].deadline < classes[order[later] - 1].deadline);
      }
    }
  }
  CHECK(overtaken > 1'000);
}

namespace {

struct spread {
  std::uint64_t most = 0;   // by which the service of one tenant exceeded another's, while both waited
  std::uint64_t total = 0;  // service of all
  std::uint64_t preempted = 0;
};

constexpr std::uint64_t most_prompt = 12;
constexpr std::uint64_t most_answer = 16;
constexpr std::uint32_t runners = 4;

/// Tenant 0 floods the service, tenant 1 keeps a few requests waiting; both from the start.
template <class Order>
spread compete(std::uint64_t seed, Order order, std::uint64_t first_share = 1) {
  random_numbers random(seed);
  service<cache_type, false, Order> all({.blocks = 20, .block_tokens = 2, .max_sequences = 8},
                                        {.max_running = runners, .max_requests = 64, .max_step_tokens = 16},
                                        std::move(order));
  std::map<std::uint64_t, std::size_t> lengths;
  std::map<std::uint64_t, std::uint32_t> tenants;
  std::map<std::uint64_t, std::uint64_t> done;  // tokens of each user computed so far
  std::uint64_t service_of[2] = {0, 0};
  std::uint64_t users = 0;
  spread out;
  const auto waiting = [&](std::uint32_t tenant) {
    return static_cast<std::uint64_t>(
        std::count_if(all.tickets.begin(), all.tickets.end(),
                      [&](const auto& each) { return tenants.at(each.first) == tenant; }));
  };
  for (int steps = 0; steps < 1'500; ++steps) {
    for (const std::uint32_t tenant : {0U, 1U}) {
      // More than can run at once, so that one of them always waits.
      while (waiting(tenant) < (tenant == 0 ? 40 : runners + 2)) {
        tenants[users] = tenant;
        lengths[users] = 1 + random.below(most_answer);
        std::vector<token_id> prompt(1 + random.below(most_prompt));
        for (token_id& each : prompt)
          each = static_cast<token_id>(random.below(std::uint64_t{50'000}));
        all.submit(users++, std::move(prompt), {.tenant = tenant});
      }
    }
    all.step([&](std::uint64_t user, std::size_t answer) { return answer >= lengths.at(user); });
    for (const auto& [user, tenant] : tenants) {
      const toy_request& request = all.engine.requests.at(user);
      // The KV of all tokens except the last was computed, unless none was said yet.
      const std::uint64_t computed = request.tokens.size() > request.prompt ? request.tokens.size() - 1 : 0;
      const std::uint64_t before = done[user];
      if (computed == before) continue;
      const std::uint64_t prompt = before == 0 ? request.prompt : 0;
      service_of[tenant] += prompt + 2 * (computed - before - prompt);
      done[user] = computed;
    }
    std::erase_if(tenants, [&](const auto& each) { return !all.tickets.contains(each.first); });
    const std::uint64_t first = service_of[0] / first_share;
    out.most = std::max(out.most, first > service_of[1] ? first - service_of[1] : service_of[1] - first);
    REQUIRE(all.work_in_last_step != 0);
    const auto proof = all.scheduler.audit();
    REQUIRE((proof.empty() ? "" : proof.front()) == std::string());
  }
  out.total = service_of[0] + service_of[1];
  out.preempted = all.scheduler.stats().preempted;
  return out;
}

}  // namespace

TEST_CASE("a tenant that floods the service takes no more than its share while others wait") {
  constexpr std::uint64_t bound = 2 * runners * (most_prompt + 2 * most_answer);
  std::uint64_t most = 0;
  std::uint64_t preempted = 0;
  for (const auto seed : seeds(12)) {
    CAPTURE(seed);
    const spread fair = compete(seed, fair_shares(2));
    const spread flood = compete(seed, first_come_first_served{});
    CHECK(fair.most <= bound);
    CHECK(flood.most > 4 * bound);
    CHECK(fair.total * 10 > flood.total * 9);  // at no great cost in throughput
    fair_shares weighted(2);
    REQUIRE(weighted.set_share(0, 3));
    CHECK(compete(seed, std::move(weighted), 3).most <= bound);
    most = std::max(most, fair.most);
    preempted += fair.preempted;
  }
  MESSAGE("spread " << most << " of at most " << bound << ", " << preempted << " preemptions");
  CHECK(preempted > 100);
}

TEST_CASE("a tenant that was away saves up no credit") {
  fair_shares order(3);
  const ranked_request first{.arrival = 1, .of = {.tenant = 0}};
  const ranked_request second{.arrival = 2, .of = {.tenant = 1}};
  const ranked_request third{.arrival = 3, .of = {.tenant = 2}};
  order.arrived(first);
  order.queued(first);
  order.unqueued(first);
  order.computed(first, 100, 50);
  order.arrived(second);  // nobody waits: it starts where the one that waited last is
  order.queued(second);
  CHECK(order.counter(1) == 200 * std::uint64_t{fair_shares::max_share});
  order.computed(second, 10, 0);
  order.arrived(third);
  CHECK(order.counter(2) == 210 * std::uint64_t{fair_shares::max_share});
  CHECK(order.precedes(first, second));
}

TEST_CASE("a tenant that does not exist, a share out of range and no tenants are refused") {
  cache_type cache({.blocks = 8});
  toy_engine<cache_type, false> engine(cache);
  batch_scheduler scheduler(cache, engine, {}, fair_shares(2));
  engine.ask(1, {1, 2, 3});
  CHECK(scheduler.submit(1, {}, {}, {.tenant = 2}).error().message() ==
        "fair_shares: tenant: 2 requested, but the highest allowed is 1");
  CHECK(scheduler.submit(1, {}, {}, {.tenant = 1}).has_value());
  CHECK(scheduler.order().set_share(2, 1).code() == errc::out_of_range);
  CHECK(scheduler.order().set_share(1, 0).error().message() ==
        "fair_shares: share, from 1: 0 requested, but the highest allowed is 65536");
  CHECK_THROWS_WITH_AS(fair_shares(0), "fair_shares: 0 tenants; at least 1 is needed", length_error);
  CHECK(fail_each_allocation([](const metadata_source& source) { fair_shares(3, {}, source); }) == 1);
}

TEST_CASE("a running request that was first stays first when its tenant has received more, so that it ends") {
  cache_type cache({.blocks = 5, .block_tokens = 4});
  toy_engine<cache_type, false> engine(cache);
  batch_scheduler scheduler(cache, engine, {}, fair_shares(2));
  engine.ask(1, std::vector<token_id>(8, 1));
  engine.ask(2, std::vector<token_id>(4, 2));
  REQUIRE(scheduler.submit(1, {}, {}, {.tenant = 0}));
  REQUIRE(scheduler.submit(2, {}, {}, {.tenant = 1}));
  REQUIRE(scheduler.step().value().work.size() == 2);
  REQUIRE(scheduler.completed());
  for (int i = 0; i < 9; ++i) {  // tenant 1 has received less at first, then more
    engine.requests.at(2).tokens.push_back(5);
    const auto work = scheduler.step().value().work;
    REQUIRE(work.size() == 1);
    CHECK(work[0].user == 2);
    CHECK(scheduler.stats().preempted == (i == 8 ? 1 : 0));  // the first's two blocks, for the fourth
    REQUIRE(scheduler.completed());
  }
  CHECK(scheduler.order().counter(0) < scheduler.order().counter(1));
}
