#include <llmmem/checkpoint/comm_coordinator.hpp>
#include <llmmem/comm/communicator.hpp>
#include <llmmem/testing/sim_network.hpp>
#include <llmmem/testing/simulated_storage.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "support/checkpoint_world.hpp"
#include "support/error_text.hpp"
#include "support/hooked_storage.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::process_killed;
using llmmem::testing::sim_endpoint;
using llmmem::testing::sim_network;
using llmmem::testing::simulated_storage;
using llmmem::testing::simulated_storage_options;

namespace {

constexpr std::uint64_t millisecond = 1'000'000;
constexpr std::uint64_t second = 1'000'000'000;
using ranks_of = communicator<sim_endpoint>;

/// Lets the time of the simulation pass.
struct sim_waiter {
  sim_endpoint* end;
  [[nodiscard]] std::chrono::nanoseconds now() const {
    return std::chrono::nanoseconds(static_cast<std::int64_t>(end->now_ns()));
  }
  void pause(std::chrono::nanoseconds time) const { end->work(static_cast<std::uint64_t>(time.count())); }
};
static_assert(rank_waiter<sim_waiter>);

template <class Storage = simulated_storage>
using coordinator_of = comm_coordinator<Storage, ranks_of, keep_last_and_every, sim_waiter>;
static_assert(checkpoint_coordinator<coordinator_of<>>);

simulated_storage_options tiny(bool rename_allowed = true) {
  simulated_storage_options options;
  options.sector_bytes = 8;
  options.rename_allowed = rename_allowed;
  return options;
}

constexpr comm_coordinator_options quick{.open_within_ns = 20 * second,
                                         .begin_within_ns = 100 * second,
                                         .commit_within_ns = 100 * second,
                                         .answer_within_ns = 20 * second};

/// A process of a job that saves: its ranks, which have joined, and its coordinator.
template <class Storage>
struct process {
  ranks_of ranks;
  coordinator_of<Storage> coordinator;

  process(sim_endpoint& end, Storage& storage, const comm_coordinator_options& options)
      : ranks(end), coordinator(storage, joined(ranks), options, {.last = 1000}, {&end}) {}

  [[nodiscard]] static ranks_of& joined(ranks_of& ranks) {
    ranks.join(ranks.after(20 * second)).value();
    return ranks;
  }
  [[nodiscard]] std::uint32_t rank() const { return coordinator.rank(); }
  [[nodiscard]] checkpoint_world world() const { return {.ranks = coordinator.world(), .files = 1}; }

  /// The text of what ended it, or "committed".
  std::string save(std::uint64_t step) {
    std::optional<checkpoint_draft> draft;
    try {
      draft = coordinator.begin(step);
      coordinator.commit(*draft, write_rank(coordinator.storage(), world(), *draft, rank()));
    } catch (const error& failure) {
      if (draft) coordinator.abandon(*draft, failure.what());
      return failure.what();
    }
    return coordinator.tidy() + "committed";
  }
  /// As an owner does between two checkpoints.
  void regroup() {
    const agreed outcome = ranks.agree(1, ranks.after(300 * second)).value();
    if (!outcome.failed.empty() || !outcome.joining.empty()) ranks.admit(outcome);
  }
};

/// What each rank was told of each draft.
struct told_of {
  std::uint32_t committed = 0;
  std::uint32_t failed = 0;
  std::uint32_t uncertain = 0;
};
struct record {
  std::mutex mutex{};
  std::map<std::pair<std::uint64_t, std::uint64_t>, told_of> drafts{};  // generation, step

  void add(const checkpoint_id& id, std::uint32_t told_of::* what) {
    const std::lock_guard held(mutex);
    ++(drafts[{id.generation, id.step}].*what);
  }
};

/// A process's life: it saves, and between two agrees on who is there.
void save_steps(sim_endpoint& end, simulated_storage& storage, std::uint64_t steps, record& seen,
                std::uint64_t write_ns = 0) {
  ranks_of ranks(end);
  if (!ranks.join(ranks.after(20 * second))) return;
  coordinator_of<> coordinator(storage, ranks, quick, {.last = 1000}, {&end});
  // Where the others are: one that comes later must not ask for what is over.
  std::uint64_t step = ranks.epoch() * 1000;
  for (;;) {
    std::optional<checkpoint_draft> draft;
    try {
      draft = coordinator.begin(step);
      if (write_ns != 0) end.work(write_ns);
      const checkpoint_world world{.ranks = coordinator.world(), .files = 1};
      coordinator.commit(*draft, write_rank(storage, world, *draft, coordinator.rank()));
      seen.add(draft->id, &told_of::committed);
    } catch (const durability_uncertain&) {
      seen.add(draft->id, &told_of::uncertain);
      coordinator.abandon(*draft, "uncertain");
    } catch (const error& failure) {
      if (draft) seen.add(draft->id, &told_of::failed);
      if (draft) coordinator.abandon(*draft, failure.what());
    }
    CHECK(coordinator.tidy() == "");
    const bool is_last = step % 1000 + 1 >= steps;
    const result<agreed> outcome = ranks.agree(is_last ? 1 : 0, ranks.after(1000 * second));
    if (!outcome || outcome->bits == 1) return;
    ++step;
    if (outcome->failed.empty() && outcome->joining.empty()) continue;
    ranks.admit(*outcome);
    step = ranks.epoch() * 1000 + (is_last ? steps - 1 : 0);
  }
}

/// What was told against what is there. How many checkpoints are.
std::size_t check_told(simulated_storage& storage, record& seen) {
  const std::vector<checkpoint_id> all = list_checkpoints(storage);
  for (const auto& [draft, told] : seen.drafts) {
    const checkpoint_id id{draft.second, draft.first};
    CAPTURE(id.generation);
    CAPTURE(id.step);
    const bool is_there = std::ranges::find(all, id) != all.end();
    if (told.committed != 0) CHECK(is_there);
    if (told.failed != 0) CHECK_FALSE(is_there);
    CHECK(told.uncertain == 0);
  }
  for (const checkpoint_id& id : all) {
    const found_checkpoint found = open_checkpoint(storage, id, verification::checksums);
    CHECK(has_its_bytes(storage, {.ranks = found.manifest.world, .files = 1}, found));
  }
  return all.size();
}

/// Three processes of a job; `body` for each.
template <class Body>
void in_threes(Body body) {
  for (const auto seed : seeds(5)) {
    CAPTURE(seed);
    sim_network net({.seats = 3, .seed = seed});
    simulated_storage storage(tiny());
    net.run([&](sim_endpoint& end) {
      process<simulated_storage> self(end, storage, quick);
      body(self, end, storage);
      // Nobody's end is a death to others who are not through.
      static_cast<void>(self.ranks.agree(1, self.ranks.after(300 * second)));
    });
  }
}

}  // namespace

TEST_SUITE("comm_coordinator") {
  TEST_CASE("a checkpoint of several ranks has the bytes of each, and all are told") {
    in_threes([](auto& self, sim_endpoint&, simulated_storage& storage) {
      for (const std::uint64_t step : {10U, 20U, 30U}) {
        CHECK(self.save(step) == "committed");
        const checkpoint_search search = find_checkpoint(storage);
        REQUIRE(search.found);
        CHECK(search.found->id.step >= step);
        CHECK(has_its_bytes(storage, self.world(), *search.found));
      }
    });
  }

  TEST_CASE("whoever dies in whatever call, what is told is what is there, and the others go on saving") {
    constexpr std::uint32_t seats = 3;
    std::uint64_t most_calls = 0;
    {
      sim_network net({.seats = seats});
      simulated_storage storage(tiny());
      record seen;
      net.run([&](sim_endpoint& end) { save_steps(end, storage, 3, seen); });
      CHECK(check_told(storage, seen) == 3);
      for (std::uint32_t i = 0; i < seats; ++i)
        most_calls = std::max(most_calls, net.calls(seat_id{i}));
    }
    CHECK(most_calls > 30);
    for (std::uint32_t victim = 0; victim < seats; ++victim) {
      for (std::uint64_t call = 0; call < most_calls; ++call) {
        CAPTURE(victim);
        CAPTURE(call);
        sim_network net({.seats = seats, .seed = call + 1});
        net.kill_in_call(seat_id{victim}, call);
        simulated_storage storage(tiny());
        record seen;
        net.run([&](sim_endpoint& end) { save_steps(end, storage, 3, seen); });
        const std::size_t there = check_told(storage, seen);
        // One that died before all had met leaves nobody to begin with.
        CHECK((there >= 2 || seen.drafts.empty()));
      }
    }
  }
}
