/// The batch scheduler over groups of layers: full attention, windows, chunks and states from one budget.
#include <llmmem/paging/batch_scheduler.hpp>
#include <llmmem/paging/hybrid_allocator.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "support/all_choices.hpp"
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
