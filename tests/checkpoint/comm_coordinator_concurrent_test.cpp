#include <llmmem/async_checkpointer.hpp>
#include <llmmem/checkpoint/comm_coordinator.hpp>
#include <llmmem/checkpoint/load.hpp>
#include <llmmem/checkpoint/rank_state.hpp>
#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/thread_network.hpp>
#include <llmmem/sharding/flat_uneven.hpp>
#include <llmmem/testing/sim_network.hpp>
#include <llmmem/testing/simulated_storage.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/checkpoint_world.hpp"
#include "support/error_text.hpp"
#include "support/hooked_storage.hpp"
#include "support/seeds.hpp"
#include "support/temporary_folder.hpp"

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
    const llmmem::comm::agreed outcome = ranks.agree(1, ranks.after(300 * second)).value();
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
    const result<llmmem::comm::agreed> outcome = ranks.agree(is_last ? 1 : 0, ranks.after(1000 * second));
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

/// Rank 0 of three dies in the first call of that kind of the storage in its second checkpoint, before it has
/// an effect, or before what comes next. `check` is run by each.
template <class Check>
void rank_0_dies_in(storage_call call, const std::string& of, bool is_done, bool rename_allowed,
                    Check check) {
  for (const auto seed : seeds(5)) {
    CAPTURE(seed);
    sim_network net({.seats = 3, .seed = seed});
    simulated_storage below(tiny(rename_allowed));
    bool commits = false;
    net.run([&](sim_endpoint& end) {
      bool dies_next = false;
      const auto before = [&](storage_call what, const std::string& path) {
        if (end.self() != seat_id{0} || !commits) return;
        if (dies_next) throw process_killed{};
        const bool is_it = what == call && path.find(of) != std::string::npos;
        if (is_it && !is_done) throw process_killed{};
        dies_next = is_it;
      };
      hooked_storage storage(below, before);
      process<decltype(storage)> self(end, storage, quick);
      CHECK(self.save(10) == "committed");
      static_cast<void>(self.ranks.agree(1, self.ranks.after(300 * second)));
      if (self.rank() == 0) commits = true;
      check(self, end, below);
    });
  }
}

}  // namespace

TEST_SUITE("comm_coordinator") {
  TEST_CASE("a checkpoint of several ranks has the bytes of each, and all learn the outcome") {
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

  TEST_CASE(
      "regardless of which rank dies in which call, reports match the folder, and the others continue "
      "saving") {
    constexpr std::uint32_t seats = 3;
    std::uint64_t max_calls = 0;
    {
      sim_network net({.seats = seats});
      simulated_storage storage(tiny());
      record seen;
      net.run([&](sim_endpoint& end) { save_steps(end, storage, 3, seen); });
      CHECK(check_told(storage, seen) == 3);
      for (std::uint32_t i = 0; i < seats; ++i)
        max_calls = std::max(max_calls, net.calls(seat_id{i}));
    }
    CHECK(max_calls > 30);
    for (std::uint32_t victim = 0; victim < seats; ++victim) {
      for (std::uint64_t call = 0; call < max_calls; ++call) {
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

  TEST_CASE("ranks die at any time, some return and are admitted, and all reports match the folder") {
    std::size_t most_there = 0;
    std::uint64_t failures = 0;
    for (const auto seed : seeds(200, 70)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const auto seats = static_cast<std::uint32_t>(2 + random() % 3);
      sim_network net({.seats = seats, .seed = seed});
      std::uint32_t killed = 0;
      for (std::uint32_t i = 0; i < seats && killed + 1 < seats; ++i) {
        if (random() % 2 == 0) continue;
        ++killed;
        if (random() % 2 == 0) net.restart_after(seat_id{i}, random() % (20 * millisecond));
        net.kill_at(seat_id{i}, 2 * millisecond + random() % (60 * millisecond));
      }
      simulated_storage storage(tiny());
      record seen;
      net.run([&](sim_endpoint& end) { save_steps(end, storage, 8, seen, 2 * millisecond); });
      most_there = std::max(most_there, check_told(storage, seen));
      for (const auto& [draft, told] : seen.drafts)
        failures += told.failed;
    }
    CHECK(most_there >= 8);
    CHECK(failures > (llmmem_tests::is_watched ? 15 : 50));
  }

  TEST_CASE("a silent rank 0 that returns makes no other rank report a false outcome") {
    // It may commit while they have given it up: whoever cannot tell must say so.
    std::uint64_t uncertain = 0;
    for (const auto seed : seeds(100, 30)) {
      CAPTURE(seed);
      sim_network net({.seats = 3, .seed = seed});
      std::mt19937_64 random(seed);
      net.stop(seat_id{0}, random() % (10 * millisecond), 40 * second);
      simulated_storage storage(tiny());
      record seen;
      net.run([&](sim_endpoint& end) { save_steps(end, storage, 4, seen); });
      for (auto& [draft, told] : seen.drafts)
        uncertain += std::exchange(told.uncertain, 0);
      check_told(storage, seen);
    }
    CHECK(uncertain > 0);
  }

  TEST_CASE(
      "a rank that dies before its files exist stops the checkpoint, and all ranks learn which rank died") {
    in_threes([](auto& self, sim_endpoint& end, simulated_storage& storage) {
      CHECK(self.save(10) == "committed");
      if (self.rank() == 2) {
        static_cast<void>(self.coordinator.begin(20));
        end.work(100 * millisecond);
        throw process_killed{};
      }
      const std::string dead = "rank 2 has died, or is unreachable";
      CHECK(self.save(20) == "simulated: step 20: " + dead + "; nothing was committed");
      end.work(second);
      // Whoever asks first is told so by himself, others also by rank 0.
      const std::string refused = "simulated: " + dead +
                                  "; agree with the remaining ranks, admit or shrink, redistribute the "
                                  "state, and make new checkpointers";
      const std::string by_zero =
          "simulated: step 30: rank 0 cannot begin it: " + refused + "; nothing was committed";
      const std::string text = self.save(30);
      CHECK(text == (text.size() == by_zero.size() ? by_zero : refused));
      self.regroup();
      CHECK(self.save(50) == "committed");
      const checkpoint_search search = find_checkpoint(storage);
      CHECK(search.found->manifest.world == 2);
      CHECK(has_its_bytes(storage, {.ranks = 2, .files = 1}, *search.found));
    });
  }

  TEST_CASE("rank 0 dies before its rename: the others find that nothing was committed, and continue") {
    const auto check = [](auto& self, sim_endpoint& end, simulated_storage& below) {
      const std::string told = self.save(20);
      CHECK(told == "simulated: step 20: rank 0 has died, or is unreachable; nothing was committed");
      end.work(second);
      CHECK(find_checkpoint(below).found->id.step == 10);
      self.regroup();
      CHECK(self.save(30) == "committed");
      CHECK(has_its_bytes(below, {.ranks = 2, .files = 1}, *find_checkpoint(below).found));
      static_cast<void>(self.ranks.agree(1, self.ranks.after(300 * second)));
      // The draft of rank 0 is gone.
      for (const storage_entry& each : below.list(""))
        CHECK(each.name.rfind(checkpoint_names::draft, 0) != 0);
    };
    rank_0_dies_in(storage_call::rename, "step-", false, true, check);
  }

  TEST_CASE(
      "rank 0 dies before it syncs its rename: the others sync it and report the checkpoint committed") {
    const auto check = [](auto& self, sim_endpoint&, simulated_storage& below) {
      const std::string told = self.save(20);
      CHECK(told == "committed");
      simulated_storage later = below.after_crash();
      const checkpoint_search search = find_checkpoint(later);
      REQUIRE(search.found);
      CHECK(search.found->id.step == 20);
      CHECK(has_its_bytes(later, {.ranks = 3, .files = 1}, *search.found));
      self.regroup();
      CHECK(self.save(30) == "committed");
      static_cast<void>(self.ranks.agree(1, self.ranks.after(300 * second)));
    };
    rank_0_dies_in(storage_call::rename, "step-", true, true, check);
  }

  TEST_CASE("if folders cannot be renamed, only rank 0 knows whether a manifest is durable") {
    const auto check = [](auto& self, sim_endpoint&, simulated_storage&) {
      const std::string told = self.save(20);
      CHECK(told ==
            "simulated: step 20: rank 0 has died, or is unreachable, which had this rank's part; it may be "
            "committed: look for step-0000000020-g00000002");
      self.regroup();
      CHECK(self.save(30) == "committed");
      static_cast<void>(self.ranks.agree(1, self.ranks.after(300 * second)));
    };
    rank_0_dies_in(storage_call::create, "MANIFEST", true, false, check);
    const auto none = [](auto& self, sim_endpoint&, simulated_storage&) {
      const std::string told = self.save(20);
      CHECK(told == "simulated: step 20: rank 0 has died, or is unreachable; nothing was committed");
    };
    rank_0_dies_in(storage_call::create, "MANIFEST", false, false, none);
  }

  TEST_CASE("a rank whose files cannot be written stops the checkpoint for all, and the next one is made") {
    in_threes([](auto& self, sim_endpoint& end, simulated_storage&) {
      for (const std::uint32_t victim : {1U, 0U}) {
        const checkpoint_draft draft = self.coordinator.begin(10 * (2 - victim));
        const auto part = write_rank(self.coordinator.storage(), self.world(), draft, self.rank());
        end.work(self.rank() * millisecond);
        if (self.rank() == victim) {
          end.work(50 * millisecond);
          CHECK(self.coordinator.abandon(draft, "the device is lost") == "");
        } else {
          CHECK(text_of([&] { self.coordinator.commit(draft, part); }) ==
                "simulated: step " + std::to_string(draft.id.step) + ": rank " + std::to_string(victim) +
                    " stopped it: the device is lost; nothing was committed");
          CHECK(self.coordinator.abandon(draft, "as said") == "");
        }
      }
      CHECK(self.save(30) == "committed");
    });
  }

  TEST_CASE("a rank that gives up learns the earlier reason if the checkpoint was already stopped") {
    in_threes([](auto& self, sim_endpoint& end, simulated_storage&) {
      const checkpoint_draft draft = self.coordinator.begin(10);
      end.work((3 - self.rank()) * 10 * millisecond);
      const std::string before = self.coordinator.abandon(draft, "no room");
      CHECK(before == std::string(self.rank() == 2 ? "" : "rank 2 stopped it: no room"));
      CHECK(self.save(20) == "committed");
    });
  }

  TEST_CASE("if rank 0 cannot begin, it informs all ranks") {
    sim_network net({.seats = 2});
    simulated_storage storage(tiny());
    net.run([&](sim_endpoint& end) {
      process<simulated_storage> self(end, storage, quick);
      if (self.rank() == 0) storage.set_faults({{.call = storage_call::make_folder, .number = EIO}});
      const std::string why = "simulated/.tmp-step-0000000010-g00000001-";
      const std::string text = self.save(10);
      CHECK(text.find("Input/output error") != std::string::npos);
      const std::string by_zero = "simulated: step 10: rank 0 cannot begin it: " + why;
      CHECK(text.rfind(self.rank() == 0 ? why : by_zero, 0) == 0);
      CHECK(self.save(20) == "committed");
      static_cast<void>(self.ranks.agree(1, self.ranks.after(300 * second)));
    });
  }

  TEST_CASE("late ranks are named, and late messages belong to no other round") {
    const comm_coordinator_options hasty{
        .begin_within_ns = second, .commit_within_ns = second, .answer_within_ns = 20 * second};
    for (const auto seed : seeds(5)) {
      CAPTURE(seed);
      sim_network net({.seats = 2, .seed = seed});
      simulated_storage storage(tiny());
      net.run([&](sim_endpoint& end) {
        process<simulated_storage> self(end, storage, hasty);
        const bool is_zero = self.rank() == 0;
        if (is_zero) end.work(5 * second);
        CHECK(self.save(10) ==
              (is_zero ? "simulated: step 10: rank 1 has not reported all files as synced within 1000 ms; "
                         "nothing was committed"
                       : "simulated: rank 0 has not begun a checkpoint of step 10 within 1000 ms"));
        static_cast<void>(self.ranks.agree(1, self.ranks.after(300 * second)));
        // The draft of step 10, and its end, are still on their way to rank 1.
        CHECK(self.save(20) == "committed");
        // It has its draft and then rank 0 takes its time.
        const checkpoint_draft draft = self.coordinator.begin(30);
        const auto part = write_rank(storage, self.world(), draft, self.rank());
        if (is_zero) end.work(5 * second);
        const std::string late = "rank 0 has not asked for the part of this rank within 1000 ms";
        CHECK(text_of([&] { self.coordinator.commit(draft, part); }) ==
              (is_zero ? "simulated: step 30: rank 1 stopped it: simulated: step 30: " + late +
                             "; nothing was committed"
                       : "simulated: step 30: " + late + "; nothing was committed"));
        self.coordinator.abandon(draft, "late");
        static_cast<void>(self.ranks.agree(1, self.ranks.after(300 * second)));
        CHECK(self.save(40) == "committed");
        static_cast<void>(self.ranks.agree(1, self.ranks.after(300 * second)));
      });
    }
  }

  TEST_CASE("a rank whose part is sent asks rank 0 to stop, and gets an answer") {
    const comm_coordinator_options patient{
        .begin_within_ns = 100 * second, .commit_within_ns = 100 * second, .answer_within_ns = 20 * second};
    comm_coordinator_options hasty = patient;
    hasty.commit_within_ns = 2 * second;
    for (const auto seed : seeds(5)) {
      CAPTURE(seed);
      sim_network net({.seats = 3, .seed = seed});
      simulated_storage storage(tiny());
      net.run([&](sim_endpoint& end) {
        process<simulated_storage> self(end, storage, end.self() == seat_id{1} ? hasty : patient);
        const checkpoint_draft draft = self.coordinator.begin(10);
        const auto part = write_rank(storage, self.world(), draft, self.rank());
        if (self.rank() == 2) end.work(10 * second);
        CHECK(text_of([&] { self.coordinator.commit(draft, part); }) ==
              "simulated: step 10: rank 1 stopped it: it has waited for too long: rank 0 has not reported "
              "its outcome within 2000 ms; nothing was committed");
        self.coordinator.abandon(draft, "late");
        static_cast<void>(self.ranks.agree(1, self.ranks.after(300 * second)));
        CHECK(self.save(20) == "committed");
        static_cast<void>(self.ranks.agree(1, self.ranks.after(300 * second)));
      });
    }
  }

  TEST_CASE("ranks meet by the step") {
    sim_network net({.seats = 2});
    simulated_storage storage(tiny());
    net.run([&](sim_endpoint& end) {
      process<simulated_storage> self(end, storage, quick);
      if (self.rank() == 1) {
        CHECK(text_of([&] { static_cast<void>(self.coordinator.begin(10)); }) ==
              "simulated: step 20: rank 0 is already there, and makes no checkpoint of step 10");
      }
      CHECK(self.save(20) == "committed");
      if (self.rank() == 0) {
        CHECK(self.save(30) ==
              "simulated: step 30: rank 1 stopped it: it is at step 40 already; nothing was committed");
      }
      CHECK(self.save(40) == "committed");
      static_cast<void>(self.ranks.agree(1, self.ranks.after(300 * second)));
    });
  }

  TEST_CASE("a part of another draft is refused by the rank that receives it") {
    sim_network net({.seats = 2});
    simulated_storage storage(tiny());
    net.run([&](sim_endpoint& end) {
      process<simulated_storage> self(end, storage, quick);
      auto& coordinator = self.coordinator;
      const bool is_zero = self.rank() == 0;
      const auto refused = [&](std::uint64_t step, auto change) {
        checkpoint_draft draft = coordinator.begin(step);
        checkpoint_manifest part = write_rank(storage, self.world(), draft, self.rank());
        change(draft, part);
        const std::string text = text_of([&] { coordinator.commit(draft, part); });
        coordinator.abandon(draft, "refused");
        // Rank 0 may remove its draft while the other one still writes to it.
        static_cast<void>(self.ranks.agree(1, self.ranks.after(300 * second)));
        return text;
      };
      CHECK(refused(10, [&](auto&, auto& part) { part.step = is_zero ? 10U : 11U; }) ==
            (is_zero
                 ? "simulated: step 10: rank 1 stopped it: simulated: step 10: the part of rank 1 is of step "
                   "11, generation 1 and a world of 2; nothing was committed"
                 : "simulated: step 10: the part of rank 1 is of step 11, generation 1 and a world of 2"));
      CHECK(refused(20, [&](auto&, auto& part) { part.files[0].rank = 0; }) ==
            (is_zero ? "simulated: step 20: rank 1 stopped it: simulated: step 20: the part of rank 1 lists "
                       "rank1-0.bin, a file of rank 0; nothing was committed"
                     : "simulated: step 20: the part of rank 1 lists rank1-0.bin, a file of rank 0"));
      const std::string lost = "simulated: step 30: the part of rank 1 is invalid: simulated/";
      CHECK(refused(30, [&](auto& draft, auto&) {
              if (!is_zero) storage.remove(draft.path("rank1-0.bin"));
            }).rfind(lost, 0) == 0);
      CHECK(refused(40, [&](auto& draft, auto&) {
              if (is_zero) end.work(second);
              static_cast<void>(draft);
              if (is_zero) storage.set_faults({{.call = storage_call::rename, .number = EIO}});
            }).find("Input/output error") != std::string::npos);
      CHECK(self.save(50) == "committed");
      CHECK(text_of([&] { coordinator.commit({{50, 5}, "elsewhere"}, {}); }) ==
            "comm_coordinator::commit: step 50, generation 5 is not the draft begun last in this epoch");
      static_cast<void>(self.ranks.agree(1, self.ranks.after(300 * second)));
    });
  }

  TEST_CASE("a coordinator refuses ranks that have not joined") {
    sim_network net({.seats = 2});
    simulated_storage storage(tiny());
    net.run([&](sim_endpoint& end) {
      ranks_of ranks(end);
      CHECK(text_of([&] { coordinator_of<> made(storage, ranks, quick, {}, {&end}); }) ==
            "simulated: comm_coordinator: the ranks have not joined; call join first");
    });
  }

  TEST_CASE("a folder to which another process commits is refused after a wait for its lock") {
    sim_network net({.seats = 1});
    simulated_storage storage(tiny());
    const auto lock = storage.try_lock("LOCK");
    net.run([&](sim_endpoint& end) {
      ranks_of ranks(end);
      ranks.join(ranks.after(second)).value();
      CHECK(text_of([&] { coordinator_of<> made(storage, ranks, quick, {}, {&end}); }) ==
            "simulated/LOCK: another process commits to this folder; stop it, or use another folder");
      CHECK(end.now_ns() >= 20 * second);
    });
  }

  TEST_CASE("no checkpoint is made in a revoked epoch until its ranks have agreed") {
    in_threes([](auto& self, sim_endpoint& end, simulated_storage&) {
      CHECK(self.save(10) == "committed");
      end.work(second);
      self.ranks.revoke();
      CHECK(
          self.save(20) ==
          "simulated: the epoch of the checkpoints' ranks was revoked; agree with them, and admit or shrink");
      self.ranks.shrink(self.ranks.agree(1, self.ranks.after(300 * second)).value());
      CHECK(self.save(30) == "committed");
    });
  }

  TEST_CASE("a fresh process in the seat of rank 0 is rank 0 again, and commits") {
    for (const auto seed : seeds(10)) {
      CAPTURE(seed);
      sim_network net({.seats = 3, .seed = seed});
      net.kill_at(seat_id{0}, 30 * second);
      net.restart_after(seat_id{0}, 10 * millisecond);
      simulated_storage storage(tiny());
      net.run([&](sim_endpoint& end) {
        process<simulated_storage> self(end, storage, quick);
        if (end.incarnation() == 0) {
          CHECK(self.save(10) == "committed");
          static_cast<void>(self.ranks.agree(1, self.ranks.after(300 * second)));
          while (self.rank() == 0)
            end.work(second);  // until it is killed
          end.work(31 * second);
          self.regroup();
          if (self.coordinator.world() == 2) {  // it had not been heard of: another one is rank 0
            CHECK(self.rank() == to_index(end.self()) - 1);
            CHECK(self.save(20) == "committed");
          }
          for (int i = 0; i < 10 && self.coordinator.world() == 2; ++i)
            self.regroup();
        }
        REQUIRE(self.coordinator.world() == 3);
        CHECK(self.save(30) == "committed");
        CHECK(has_its_bytes(storage, {.ranks = 3, .files = 1}, *find_checkpoint(storage).found));
        static_cast<void>(self.ranks.agree(1, self.ranks.after(300 * second)));
      });
    }
  }

  TEST_CASE(
      "one of several ranks in threads with checkpointers dies, and the others share the state again and "
      "continue") {
    const temporary_folder folder;
    thread_network net(3);
    const std::vector<state_tensor> catalogue = {{.name = "weight", .shape = {30, 25}, .part = {}},
                                                 {.name = "bias", .shape = {25}, .part = {}}};
    const auto value = [](std::uint64_t step, std::size_t tensor, std::uint64_t i) {
      return static_cast<float>(step * 1000 + tensor * 100 + i % 97);
    };
    struct traits : checkpointer_traits {
      using coordinator_type = comm_coordinator<storage_type, communicator<thread_endpoint>>;
    };
    const auto live = [&](std::uint32_t seat) {
      posix_storage<> storage(folder.file("run"));
      thread_endpoint end(net, seat_id{seat});
      communicator ranks(end, {.name = "checkpoints"});
      ranks.join(ranks.after(60 * second)).value();
      comm_coordinator coordinator(storage, ranks, {.commit_within_ns = 60 * second}, keep_last_and_every{});
      // Each epoch: the state as the ranks of now share it.
      const auto save = [&](std::uint64_t step) {
        const auto split = flat_uneven::even(facts_of(catalogue), rank_count{coordinator.world()});
        const std::vector<state_tensor> saved = rank_state(catalogue, split, ranks.rank());
        async_checkpointer<traits> checkpointer(coordinator, saved,
                                                {.ring_bytes = 1 << 16, .chunk_bytes = 1 << 12});
        std::vector<std::vector<float>> held(catalogue.size());
        std::vector<std::span<const std::byte>> spans;
        for (std::uint32_t t = 0; t < catalogue.size(); ++t) {
          const element_runs local = split.local(tensor_id{t}, ranks.rank());
          for (std::uint64_t i = 0; i < local.elements(); ++i)
            held[t].push_back(value(step, t, local.element_at(i)));
          spans.push_back(std::as_bytes(std::span(held[t])));
        }
        const commit_ticket ticket = checkpointer.begin_snapshot(step, host_state_view(spans)).ticket();
        const commit_status how = ticket.wait();
        return std::pair(how, ticket.why());
      };
      const commit_status first = save(1).first;
      CHECK(first == commit_status::committed);
      if (seat == 1) return;
      const std::pair<commit_status, std::string> second_save = save(2);
      const std::string why = second_save.second;
      CAPTURE(why);
      CHECK(second_save.first == commit_status::not_committed);
      CHECK(why.find("rank 1 has died, or is unreachable") != std::string::npos);
      ranks.admit(ranks.agree(1, ranks.after(60 * second)).value());
      const auto [again, trouble] = save(3);
      CHECK(trouble == "");
      CHECK(again == commit_status::committed);
      static_cast<void>(ranks.agree(1, ranks.after(60 * second)));
    };
    std::vector<std::thread> threads;
    for (std::uint32_t seat = 0; seat < 3; ++seat)
      threads.emplace_back(live, seat);
    for (std::thread& each : threads)
      each.join();
    posix_storage<> storage(folder.file("run"));
    const checkpoint_search search = find_checkpoint(storage);
    REQUIRE(search.found);
    CHECK(search.found->id.step == 3);
    CHECK(search.found->manifest.world == 2);
    std::vector<wanted_tensor> wanted;
    for (const state_tensor& each : catalogue)
      wanted.push_back({.name = each.name, .part = {}, .type = each.type, .shape = each.shape});
    std::vector<float> got(30 * 25 + 25);
    load_checkpoint(storage, *search.found, wanted,
                    [&](std::uint32_t t, std::uint64_t offset, std::span<const std::byte> bytes) {
                      std::memcpy(reinterpret_cast<std::byte*>(got.data() + (t == 0 ? 0 : 750)) + offset,
                                  bytes.data(), bytes.size());
                    });
    for (std::size_t i = 0; i < got.size(); ++i)
      REQUIRE(got[i] == (i < 750 ? value(3, 0, i) : value(3, 1, i - 750)));
  }
}
