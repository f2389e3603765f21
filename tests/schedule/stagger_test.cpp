#include "support/random.hpp"
#include "support/seeds.hpp"

#include <llmmem/schedule/stagger.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

using namespace llmmem;
using llmmem_tests::random_numbers;
using llmmem_tests::seeds;

namespace {

/// The sum of contexts of each step, counted one by one.
using steps = std::vector<std::uint64_t>;

void add(steps& to, const stagger_request& of, std::uint64_t start) {
  if (to.size() < start + of.steps) to.resize(start + of.steps);
  for (std::uint64_t k = 0; k < of.steps; ++k)
    to[start + k] += of.prompt + k;
}

bool fits(const steps& all, const stagger_request& of, std::uint64_t start, std::uint64_t cap) {
  for (std::uint64_t k = 0; k < of.steps; ++k) {
    const std::uint64_t before = start + k < all.size() ? all[start + k] : 0;
    if (before + of.prompt + k > cap) return false;
  }
  return true;
}

/// Groups of `size` requests that make `length` tokens, `apart` steps from one another.
std::vector<stagger_request> groups(std::uint64_t count, std::uint64_t size, std::uint64_t length,
                                    std::uint64_t apart) {
  std::vector<stagger_request> out;
  for (std::uint64_t i = 0; i < count * size; ++i)
    out.push_back({.prompt = 1, .steps = length, .earliest = i / size * apart});
  return out;
}

}  // namespace

TEST_CASE("each request starts at the first step at which no sum of contexts exceeds the cap") {
  std::uint64_t waited = 0;
  std::uint64_t overtaken = 0;
  for (const auto seed : seeds(1500)) {
    CAPTURE(seed);
    random_numbers random(seed);
    std::vector<stagger_request> requests(static_cast<std::size_t>(1 + random.below(std::uint64_t{14})));
    std::uint64_t cap = 0;
    for (stagger_request& each : requests) {
      each = {.prompt = random.below(std::uint64_t{12}),
              .steps = 1 + random.below(std::uint64_t{12}),
              .earliest = random.once_in(3) ? random.below(std::uint64_t{20}) : 0};
      cap = std::max(cap, each.last_context());
    }
    cap += random.below(std::uint64_t{30});
    const stagger_plan plan = stagger(requests, cap);
    REQUIRE(plan.starts.size() == requests.size());
    steps all;
    for (std::size_t i = 0; i < requests.size(); ++i) {
      std::uint64_t start = requests[i].earliest;
      while (!fits(all, requests[i], start, cap))
        ++start;
      REQUIRE(plan.starts[i] == start);
      add(all, requests[i], start);
      waited += start != requests[i].earliest ? 1U : 0U;
      overtaken += i != 0 && start < plan.starts[i - 1] && requests[i - 1].earliest <= start ? 1U : 0U;
    }
    CHECK(plan.most_tokens == *std::ranges::max_element(all));
    CHECK(plan.most_tokens <= cap);
    CHECK(plan.end_step == all.size());
  }
  CHECK(waited > 1000);
  CHECK(overtaken > 100);
}

TEST_CASE("groups that start apart need half of the sum that starting together needs, exactly") {
  for (const std::uint64_t apart : {1U, 2U, 5U, 10U, 20U, 40U}) {
    CAPTURE(apart);
    constexpr std::uint64_t length = 40;
    constexpr std::uint64_t batch = 80;
    const std::uint64_t size = batch * apart / length;
    const std::uint64_t bound = batch * (length + apart) / 2;
    // Five times as long as an answer, so that as many end as start.
    const auto requests = groups(5 * length / apart, size, length, apart);
    const stagger_plan plan = stagger(requests, bound);
    CHECK(plan.most_tokens == bound);
    for (std::size_t i = 0; i < requests.size(); ++i)
      REQUIRE(plan.starts[i] == requests[i].earliest);
    // One token less delays some of them.
    const stagger_plan tight = stagger(requests, bound - 1);
    CHECK(tight.most_tokens < bound);
    CHECK(tight.starts != plan.starts);
    // Together.
    const auto at_once = groups(1, batch, length, 0);
    CHECK(stagger(at_once, batch * length).starts == steps(batch, 0));
    CHECK(stagger(at_once, batch * length - 1).starts != steps(batch, 0));
  }
}

TEST_CASE("requests that cannot be staggered are refused by their number") {
  const auto refused = [](const std::vector<stagger_request>& requests, std::uint64_t cap) {
    static_cast<void>(stagger(requests, cap));
  };
  CHECK(stagger({}, 0) == stagger_plan{});
  CHECK(stagger(std::vector<stagger_request>{{.prompt = 5, .steps = 6}}, 10).most_tokens == 10);
  CHECK_THROWS_WITH_AS(
      refused({{.prompt = 1}, {.prompt = 5, .steps = 7}}, 10),
      "stagger: request 1 has a context of 11 tokens at its end, but the cap is 10; raise the "
      "cap, or let it make fewer tokens",
      length_error);
  CHECK_THROWS_WITH_AS(refused({{.prompt = 5, .steps = 0}}, 10),
                       "stagger: request 0 has 0 steps; leave it out, or let it make at least 1 token",
                       argument_error);
  constexpr std::uint64_t most = ~std::uint64_t{0};
  constexpr std::uint64_t half = std::uint64_t{1} << 62;
  CHECK_THROWS_WITH_AS(
      refused({{.prompt = most}}, most),
      "stagger: request 0: its prompt of 18446744073709551615 tokens, its 1 steps or its earliest "
      "step, 0, exceed 2^63 - 1, with the requests before it; lower them",
      length_error);
  CHECK_THROWS_AS(refused({{.steps = most}}, most), length_error);
  CHECK_THROWS_AS(refused({{.earliest = most}}, most), length_error);
  CHECK_THROWS_AS(refused({{.prompt = half, .steps = half}}, most), length_error);
  CHECK_THROWS_AS(refused({{.steps = half}, {.steps = half}}, most), length_error);
  CHECK_THROWS_AS(refused({{.steps = half}, {.earliest = half}}, most), length_error);
  CHECK(stagger(std::vector<stagger_request>{{.steps = half}, {.earliest = half - 2}}, half).starts[1] ==
        half - 2);
}
