#include <llmmem/checkpoint/file_coordinator.hpp>
#include <llmmem/testing/crash_states.hpp>
#include <llmmem/testing/simulated_storage.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/checkpoint_world.hpp"
#include "support/error_text.hpp"
#include "support/hooked_storage.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::crash_limits;
using llmmem::testing::simulated_storage;
using llmmem::testing::simulated_storage_options;
using llmmem::testing::storage_fault;
using llmmem::testing::sweep_power_cuts;

namespace {

using session = rank_session<simulated_storage>;

simulated_storage_options tiny(bool rename_allowed = true, bool links_allowed = true) {
  simulated_storage_options options;
  options.sector_bytes = 8;
  options.rename_allowed = rename_allowed;
  options.links_allowed = links_allowed;
  return options;
}

/// Which of what a checkpoint may throw comes.
enum class thrown { nothing, stopped, uncertain, is_fenced, io, argument, other };
template <class Work>
thrown kind_of(Work work) {
  try {
    work();
  } catch (const checkpoint_stopped&) {
    return thrown::stopped;
  } catch (const durability_uncertain&) {
    return thrown::uncertain;
  } catch (const fenced&) {
    return thrown::is_fenced;
  } catch (const io_error&) {
    return thrown::io;
  } catch (const argument_error&) {
    return thrown::argument;
  } catch (const error&) {
    return thrown::other;
  }
  return thrown::nothing;
}

/// All ranks of a world, in one thread.
struct ranks {
  ranks(simulated_storage& on, std::uint32_t world, verification votes = verification::sizes) : storage(&on) {
    for (std::uint32_t rank = 0; rank < world; ++rank)
      all.push_back(
          std::make_unique<session>(on, rank_session_options{.rank = rank, .world = world, .votes = votes}));
  }
  session& operator[](std::size_t rank) { return *all[rank]; }

  void join() {
    for (int turn = 0; turn < 5; ++turn) {
      bool joined = true;
      for (const auto& each : all)
        joined = each->try_join() && joined;
      if (joined) return;
    }
    FAIL("the ranks do not join");
  }
  checkpoint_draft begin(std::uint64_t step) {
    const auto draft = all[0]->try_begin(step);
    REQUIRE(draft);
    for (const auto& each : all) {
      if (each->rank() == 0) continue;
      const auto others = each->try_begin(step);
      REQUIRE(others);
      REQUIRE(others->id == draft->id);
      REQUIRE(others->folder == draft->folder);
    }
    return *draft;
  }
  void write_and_vote(const checkpoint_world& of, const checkpoint_draft& draft, std::uint32_t rank) {
    all[rank]->vote(draft, write_rank(*storage, of, draft, rank));
  }
  /// All vote, the last rank first, and learn; `told` as soon as one knows.
  void save(const checkpoint_world& of, std::uint64_t step, acknowledged& told) {
    const checkpoint_draft draft = begin(step);
    for (std::uint32_t rank = of.ranks; rank-- > 0;)
      write_and_vote(of, draft, rank);
    for (const auto& each : all) {
      const bool is_committed = each->try_conclude(draft);  // a power cut must go through
      REQUIRE(is_committed);
      told.step = step;
    }
  }

  simulated_storage* storage;
  std::vector<std::unique_ptr<session>> all{};
};

/// A whole run of all ranks.
void run(simulated_storage& storage, const checkpoint_world& world, const std::vector<std::uint64_t>& steps,
         acknowledged& told) {
  ranks all(storage, world.ranks);
  all.join();
  for (const std::uint64_t step : steps) {
    all.save(world, step, told);
    static_cast<void>(all[0].folder()->tidy(keep_last_and_every{}));
  }
}

simulated_storage settled(const checkpoint_world& world, const std::vector<std::uint64_t>& steps,
                          const simulated_storage_options& options) {
  simulated_storage storage(options);
  acknowledged told;
  run(storage, world, steps, told);
  return storage.after_crash(storage.all_survives());
}

std::vector<std::string> told_in(simulated_storage& storage, std::string_view kind = "") {
  std::vector<std::string> names;
  for (const storage_entry& each : storage.list("")) {
    if (each.name.rfind(checkpoint_names::rendezvous, 0) == 0 && each.name.find(kind) != std::string::npos)
      names.push_back(each.name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::uint64_t newest(simulated_storage& storage) {
  const checkpoint_search search = find_checkpoint(storage);
  return search.found ? search.found->id.step : 0;
}

/// Time that only pauses let pass, in which others may act.
struct test_time {
  std::chrono::nanoseconds now{0};
  std::function<void()> meanwhile = [] {};
};
struct test_waiter {
  test_time* time;
  [[nodiscard]] std::chrono::nanoseconds now() const { return time->now; }
  void pause(std::chrono::nanoseconds most) const {
    time->now += most;
    time->meanwhile();
  }
};
static_assert(rank_waiter<test_waiter>);

using coordinator = file_coordinator<simulated_storage, keep_last_and_every, test_waiter>;
static_assert(checkpoint_coordinator<coordinator>);

file_coordinator_options patient(std::uint32_t rank, std::uint32_t world) {
  using std::chrono::seconds;
  return {.rank = rank,
          .world = world,
          .join_within = seconds(5),
          .begin_within = seconds(3),
          .commit_within = seconds(2)};
}

const checkpoint_world two{.ranks = 2, .files = 1};

/// Rank 0, before each of whose calls of the storage something may happen, and rank 1: both have voted for a
/// checkpoint of step 10.
template <class Before>
struct both_voted {
  hooked_storage<Before> hooked;
  rank_session<hooked_storage<Before>> zero{hooked, {.rank = 0, .world = 2}};
  session one;
  checkpoint_draft draft{};   // of rank 0
  checkpoint_draft others{};  // of rank 1

  both_voted(simulated_storage& storage, Before before)
      : hooked(storage, std::move(before)), one(storage, {.rank = 1, .world = 2}) {
    CHECK(!one.try_join());
    REQUIRE(zero.try_join());
    REQUIRE(one.try_join());
    draft = zero.try_begin(10).value();
    others = one.try_begin(10).value();
    one.vote(others, write_rank(storage, two, others, 1));
    zero.vote(draft, write_rank(storage, two, draft, 0));
  }
};

}  // namespace

TEST_SUITE("file_coordinator") {
  TEST_CASE("a checkpoint of several ranks has the bytes of each, and the messages about it are removed") {
    const checkpoint_world world{.ranks = 3, .files = 2};
    for (const int how : {0, 1, 2}) {  // by rename, by link, by the file itself
      CAPTURE(how);
      simulated_storage storage(tiny(how == 0, how < 2));
      ranks all(storage, 3);
      all.join();
      CHECK(told_in(storage, "join").empty());
      CHECK(told_in(storage, "session").size() == 1);
      acknowledged told;
      for (const std::uint64_t step : {10U, 20U, 30U, 40U}) {
        all.save(world, step, told);
        const checkpoint_search search = find_checkpoint(storage);
        REQUIRE(search.found);
        CHECK(search.found->id.step == step);
        CHECK(has_its_bytes(storage, world, *search.found));
        // A session, and of the last round a draft, two votes, a decision and an outcome.
        CHECK(told_in(storage).size() == 6);
        CHECK(told_in(storage, "tmp").empty());
      }
      for (const auto& [path, bytes] : storage.files())
        CHECK((path.find('/') == std::string::npos || path.find("rank-") == std::string::npos));
    }
  }

  TEST_CASE("ranks find each other in any order of arrivals and looks") {
    for (const auto seed : seeds(300, 60)) {
      CAPTURE(seed);
      random_numbers random(seed);
      simulated_storage_options options = tiny(random.once_in(2), random.once_in(2));
      options.seed = seed;
      simulated_storage storage(options);
      const std::uint32_t world = 1 + random.below(4U);
      std::vector<std::unique_ptr<session>> all(world);
      const auto make = [&](std::uint32_t rank) {
        all[rank] = std::make_unique<session>(storage, rank_session_options{.rank = rank, .world = world});
      };
      for (int turn = 0; turn < 30; ++turn) {
        const std::uint32_t rank = random.below(world);
        if (!all[rank]) {
          make(rank);
        } else {
          static_cast<void>(all[rank]->try_join());
        }
        if (rank != 0 && all[rank] && !all[rank]->is_joined() && random.once_in(8)) {
          // It dies, its join stays, and another takes its place; unless rank 0 counts on it already.
          if (all[0] && all[0]->is_joined()) continue;
          all[rank].reset();
        }
      }
      for (std::uint32_t rank = 0; rank < world; ++rank) {
        if (!all[rank]) make(rank);
      }
      bool joined = false;
      bool counts_on_the_dead = false;
      for (int turn = 0; turn < 6 && !joined; ++turn) {
        joined = true;
        for (const auto& each : all)
          joined = each->try_join() && joined;
      }
      // One that died after its join and whose successor had not said anything yet.
      for (const auto& each : all)
        counts_on_the_dead =
            counts_on_the_dead || each->waits_for().text.find("a session with others") != std::string::npos;
      REQUIRE((joined || counts_on_the_dead));
      if (joined) CHECK(told_in(storage, "session").size() == 1);
    }
  }

  TEST_CASE("if two processes joined as one rank, the live process takes part") {
    simulated_storage storage(tiny());
    session zero(storage, {.rank = 0, .world = 3});
    session two_of(storage, {.rank = 2, .world = 3});
    auto first = std::make_unique<session>(storage, rank_session_options{.rank = 1, .world = 3});
    CHECK(!first->try_join());
    CHECK(!zero.try_join());
    first.reset();
    session second(storage, {.rank = 1, .world = 3});
    CHECK(!second.try_join());
    CHECK(!two_of.try_join());
    CHECK(!zero.try_join());
    CHECK(zero.waits_for().text == "rank 1 of 3 has not joined");
    CHECK(told_in(storage, "join").size() == 1);
    CHECK(!second.try_join());
    CHECK(zero.try_join());
    CHECK(second.try_join());
    CHECK(two_of.try_join());
    session stranger(storage, {.rank = 3, .world = 4});
    CHECK(!stranger.try_join());
    CHECK(stranger.waits_for().text ==
          "rank 0 has not begun a session with this process, but a session with others exists");
  }

  TEST_CASE("no rank joins a session that an earlier run has left") {
    simulated_storage storage(tiny());
    {
      ranks all(storage, 2);
      all.join();
    }
    CHECK(told_in(storage, "session").size() == 1);
    session one(storage, {.rank = 1, .world = 2});
    CHECK(!one.try_join());
    CHECK(!one.try_join());
    session zero(storage, {.rank = 0, .world = 2});
    CHECK(told_in(storage).empty());
    CHECK(!zero.try_join());
    CHECK(!one.try_join());
    CHECK(zero.try_join());
    CHECK(one.try_join());
  }

  // The proof, as that of checkpoint_folder: two ranks, cut off at every call of either.
  TEST_CASE(
      "after any crash, a checkpoint that a rank has acknowledged is there, complete, with the bytes of all "
      "ranks") {
    for (const int how : {0, 1, 2}) {
      const bool is_first = how == 1;
      const bool renames = how != 2;
      CAPTURE(how);
      const simulated_storage start =
          is_first ? simulated_storage(tiny()) : settled(two, {10, 20}, tiny(renames, renames));
      acknowledged told;
      std::uint64_t recovered = 0;
      std::uint64_t states = 0;
      const auto sweep = sweep_power_cuts(
          start,
          [&](simulated_storage& storage) {
            told.step = is_first ? std::nullopt : std::optional<std::uint64_t>(20);
            run(storage, two, {30}, told);
          },
          [&](simulated_storage& after) {
            if (llmmem_tests::is_watched && ++states % 4 != 0) return;
            const std::string lost = what_is_lost(after, two, told);
            if (!lost.empty()) FAIL(lost);
            const std::string torn =
                what_is_torn(after, two, renames ? commit_method::rename : commit_method::manifest);
            if (!torn.empty()) FAIL(torn);
            recovered += find_checkpoint(after).found ? 1U : 0U;
          },
          llmmem_tests::is_watched
              ? crash_limits{.exhaustive_up_to = 2, .samples = 3, .seed = 1, .tears = 1}
              : crash_limits{.exhaustive_up_to = 10, .samples = 40, .seed = 1, .tears = 2});
      MESSAGE(sweep.power_cuts << " cuts, " << sweep.states << " states, " << recovered
                               << " with a checkpoint");
      CHECK(sweep.power_cuts > 60);
      CHECK(recovered > 0);
    }
  }

  TEST_CASE("after any crash the ranks meet again, and nothing of the earlier run is left") {
    const simulated_storage start = settled(two, {10, 20}, tiny());
    acknowledged told;
    const auto sweep = sweep_power_cuts(
        start,
        [&](simulated_storage& storage) {
          told.step = 20;
          run(storage, two, {30}, told);
        },
        [&](simulated_storage& after) {
          acknowledged next;
          run(after, two, {40}, next);
          REQUIRE(what_is_lost(after, two, acknowledged{40}).empty());
          REQUIRE(told_in(after).size() == 5);
        },
        llmmem_tests::is_watched ? crash_limits{.exhaustive_up_to = 1, .samples = 2, .seed = 1, .tears = 1}
                                 : crash_limits{.exhaustive_up_to = 5, .samples = 6, .seed = 1, .tears = 1});
    CHECK(sweep.states > 100);
  }

  TEST_CASE("rank 0 dies between the votes and the commit: nothing is committed, and a new run continues") {
    simulated_storage storage(tiny());
    acknowledged told;
    run(storage, two, {10}, told);
    ranks all(storage, 2);
    all.join();
    const checkpoint_draft draft = all.begin(20);
    all.write_and_vote(two, draft, 0);
    all.write_and_vote(two, draft, 1);
    all.all[0].reset();
    CHECK(!all[1].try_conclude(draft));
    CHECK(all[1].waits_for().ranks == std::vector<std::uint32_t>{0});
    CHECK(all[1].waits_for().text == "rank 0 has not decided, though all others have voted");
    all[1].stop(draft, "it has waited for too long");
    CHECK(newest(storage) == 10);
    all.all[1].reset();

    ranks again(storage, 2);
    again.join();
    again.save(two, 20, told);
    CHECK(find_checkpoint(storage).found->id == checkpoint_id{20, 3});
  }

  TEST_CASE("rank 0 dies after its decision: a rank that voted does not guess") {
    simulated_storage storage(tiny());
    ranks all(storage, 2);
    all.join();
    const checkpoint_draft draft = all.begin(20);
    all.write_and_vote(two, draft, 1);
    all.write_and_vote(two, draft, 0);
    // Every sync after that of the decision fails: rank 0 neither commits nor tells.
    storage.set_faults(
        {{.call = storage_call::sync, .first = 2, .every = 1, .count = storage_fault::forever}});
    CHECK(kind_of([&] { static_cast<void>(all[0].try_conclude(draft)); }) == thrown::io);
    CHECK(all[0].take_error().find("the other ranks could not be informed of its outcome") !=
          std::string::npos);
    CHECK(all[0].take_error() == "");
    all.all[0].reset();
    storage.set_faults({});
    CHECK(!all[1].try_conclude(draft));
    CHECK(all[1].waits_for().text == "rank 0 has decided to commit, but not reported the outcome");
    CHECK_THROWS_WITH_AS(all[1].stop(draft, "it has waited for too long"),
                         "simulated: step 20, generation 1: rank 0 had decided to commit, but has not "
                         "reported the outcome; look for step-0000000020-g00000001",
                         durability_uncertain);
  }

  TEST_CASE("a rank that fails stops the checkpoint for all at once, and the next one is made") {
    const checkpoint_world three{.ranks = 3, .files = 1};
    for (const std::uint32_t who : {0U, 1U, 2U}) {
      for (const bool says_why : {true, false}) {
        simulated_storage storage(tiny());
        ranks all(storage, 3);
        all.join();
        acknowledged told;
        all.save(three, 10, told);
        const checkpoint_draft draft = all.begin(20);
        for (std::uint32_t rank = 0; rank < 3; ++rank) {
          if (rank != who) all.write_and_vote(three, draft, rank);
        }
        if (says_why) all[who].stop(draft, "the disk is full");
        CHECK(all[who].abandon(draft, "its device is lost") == "");
        const std::string text = "simulated: step 20, generation 2: rank " + std::to_string(who) +
                                 " stopped it: " + (says_why ? "the disk is full" : "its device is lost") +
                                 "; nothing was committed";
        for (std::uint32_t rank = 0; rank < 3; ++rank) {
          if (rank == who) continue;
          CHECK_THROWS_WITH_AS(static_cast<void>(all[rank].try_conclude(draft)), text.c_str(),
                               checkpoint_stopped);
          static_cast<void>(all[rank].abandon(draft, "it has failed"));
        }
        CHECK(newest(storage) == 10);
        for (const storage_entry& each : storage.list(""))
          CHECK(each.name != draft.folder);
        all.save(three, 30, told);
        CHECK(newest(storage) == 30);
        CHECK(told_in(storage).size() == 6);
      }
    }
  }

  TEST_CASE("a rank that fails because another stopped it learns that") {
    const checkpoint_world three{.ranks = 3, .files = 1};
    simulated_storage storage(tiny());
    ranks all(storage, 3);
    all.join();
    const checkpoint_draft draft = all.begin(20);
    all.write_and_vote(three, draft, 0);
    CHECK(all[1].abandon(draft, "its device is lost") == "");
    CHECK(kind_of([&] { static_cast<void>(all[0].try_conclude(draft)); }) == thrown::stopped);
    CHECK(all[0].abandon(draft, "rank 1 has stopped") == "");
    CHECK(kind_of([&] { static_cast<void>(write_rank(storage, three, draft, 2)); }) == thrown::io);
    CHECK(all[2].abandon(draft, "the folder is not there") == "rank 1 stopped it: its device is lost");
    CHECK(all[2].abandon(draft, "the folder is not there") == "");  // it is over
  }

  TEST_CASE("a stop takes effect before rank 0's decision or after it, never in between") {
    simulated_storage storage(tiny());
    ranks all(storage, 2);
    all.join();
    checkpoint_draft draft = all.begin(20);
    all.write_and_vote(two, draft, 0);
    all.write_and_vote(two, draft, 1);
    all[1].stop(draft, "it has waited for too long");
    CHECK(kind_of([&] { static_cast<void>(all[0].try_conclude(draft)); }) == thrown::stopped);
    CHECK(newest(storage) == 0);
    static_cast<void>(all[0].abandon(draft, "it has failed"));
    draft = all.begin(30);
    all.write_and_vote(two, draft, 1);
    all.write_and_vote(two, draft, 0);
    CHECK(all[0].try_conclude(draft));
    CHECK(kind_of([&] { all[1].stop(draft, "it has waited for too long"); }) == thrown::uncertain);
    static_cast<void>(all[1].abandon(draft, "it has failed"));
    static_cast<void>(all[0].abandon(draft, "it has failed"));  // it is there: nothing is removed
    CHECK(newest(storage) == 30);
    acknowledged told;
    all.save(two, 40, told);
  }

  TEST_CASE("a stop just before rank 0's decision comes first, and nothing is committed") {
    simulated_storage storage(tiny());
    std::function<void()> before_rename = [] {};
    both_voted voted(storage, [&](storage_call what, const std::string&) {
      if (what == storage_call::rename) std::exchange(before_rename, [] {})();
    });
    before_rename = [&] { voted.one.stop(voted.others, "it has waited for too long"); };
    CHECK(kind_of([&] { static_cast<void>(voted.zero.try_conclude(voted.draft)); }) == thrown::stopped);
    CHECK(newest(storage) == 0);
  }

  TEST_CASE("the others learn the outcome of rank 0's commit") {
    simulated_storage storage(tiny());
    ranks all(storage, 2);
    all.join();
    checkpoint_draft draft = all.begin(20);
    all.write_and_vote(two, draft, 1);
    all.write_and_vote(two, draft, 0);
    // The decision is renamed first, then the draft.
    storage.set_faults({{.call = storage_call::rename, .first = 2}});
    const std::string failed = text_of([&] { static_cast<void>(all[0].try_conclude(draft)); });
    CHECK(failed.find("cannot be renamed: Input/output error; a planned fault") != std::string::npos);
    CHECK_THROWS_WITH_AS(static_cast<void>(all[1].try_conclude(draft)),
                         ("simulated: step 20, generation 1: rank 0 could not commit it: " + failed).c_str(),
                         io_error);
    static_cast<void>(all[0].abandon(draft, "it has failed"));
    CHECK(newest(storage) == 0);

    storage.set_faults({});
    draft = all.begin(30);
    all.write_and_vote(two, draft, 1);
    all.write_and_vote(two, draft, 0);
    storage.set_faults({{.call = storage_call::sync_folder, .first = 2}});
    const std::string unsure = text_of([&] { static_cast<void>(all[0].try_conclude(draft)); });
    CHECK_THROWS_WITH_AS(static_cast<void>(all[1].try_conclude(draft)), unsure.c_str(), durability_uncertain);
    static_cast<void>(all[0].abandon(draft, "it has failed"));
    CHECK(newest(storage) == 30);

    storage.set_faults({});
    draft = all.begin(40);
    all.write_and_vote(two, draft, 1);
    all.write_and_vote(two, draft, 0);
    // A decision that cannot be made: nothing is committed, and that can be told.
    storage.set_faults({{.call = storage_call::sync, .first = 1}});
    CHECK(kind_of([&] { static_cast<void>(all[0].try_conclude(draft)); }) == thrown::io);
    CHECK(newest(storage) == 30);
  }

  TEST_CASE("messages from a process of an earlier session are ignored") {
    simulated_storage storage(tiny());
    ranks old(storage, 2);
    old.join();
    const checkpoint_draft stale = old.begin(20);
    const checkpoint_manifest stale_part = write_rank(storage, two, stale, 1);
    old.all[0].reset();

    // Rank 0 comes up anew; the old rank 1 only then says that its files are there, and stops, too.
    session zero(storage, {.rank = 0, .world = 2});
    CHECK(kind_of([&] { old[1].vote(stale, stale_part); }) == thrown::io);  // its draft is gone
    storage.make_folder(stale.folder);
    old[1].vote(stale, stale_part);
    static_cast<void>(old[1].abandon(stale, "it has failed"));
    CHECK(told_in(storage, "vote").size() == 1);
    CHECK(kind_of([&] { session second(storage, {.rank = 1, .world = 2}); }) == thrown::io);
    storage.remove("LOCK.rank-1");
    session one(storage, {.rank = 1, .world = 2});
    CHECK(!one.try_join());
    REQUIRE(zero.try_join());
    REQUIRE(one.try_join());
    const auto draft = zero.try_begin(20);
    REQUIRE(draft);
    zero.vote(*draft, write_rank(storage, two, *draft, 0));
    CHECK(!zero.try_conclude(*draft));
    CHECK(zero.waits_for().ranks == std::vector<std::uint32_t>{1});

    const std::string text =
        "simulated/LOCK.rank-1: it was removed or replaced while this process held it, or its lease ran out: "
        "another one may be rank 1 now; nothing was committed";
    CHECK_THROWS_WITH_AS(old[1].vote(stale, stale_part), text.c_str(), fenced);
    CHECK_THROWS_WITH_AS(static_cast<void>(old[1].try_begin(30)), text.c_str(), fenced);

    const auto others = one.try_begin(20);
    REQUIRE(others);
    one.vote(*others, write_rank(storage, two, *others, 1));
    CHECK(zero.try_conclude(*draft));
    CHECK(one.try_conclude(*draft));
    CHECK(what_is_lost(storage, two, acknowledged{20}) == "");
    CHECK(find_checkpoint(storage).found->id.generation == draft->id.generation);
  }

  TEST_CASE("a message of another session, round or rank than its name says is ignored") {
    simulated_storage storage(tiny());
    ranks all(storage, 2);
    all.join();
    acknowledged told;
    all.save(two, 10, told);
    const std::string vote = told_in(storage, "vote-1-1").at(0);
    const checkpoint_draft draft = all.begin(20);
    std::string later = vote;
    later.replace(later.find("vote-1-1"), 8, "vote-2-1");
    storage.link(vote, later);
    all.write_and_vote(two, draft, 0);
    CHECK(!all[0].try_conclude(draft));
    CHECK(all[0].waits_for().text == "rank 1 has not reported all files as synced, or not whole");
    storage.remove(later);
    all.write_and_vote(two, draft, 1);
    CHECK(all[0].try_conclude(draft));
    CHECK(all[1].try_conclude(draft));
  }

  TEST_CASE("a false vote is refused, and all ranks learn what was wrong") {
    struct lie {
      std::function<void(checkpoint_manifest&, simulated_storage&, const std::string&)> tell;
      std::string text;
      verification how = verification::sizes;
    };
    const std::vector<lie> lies = {
        {[](checkpoint_manifest&, simulated_storage& storage, const std::string& folder) {
           storage.truncate(folder + "/rank1-0.bin", 20);
         },
         "/rank1-0.bin: has 20 bytes, but the manifest says 24"},
        {[](checkpoint_manifest&, simulated_storage& storage, const std::string& folder) {
           storage.remove(folder + "/rank1-0.bin");
         },
         "/rank1-0.bin: cannot be opened: No such file or directory"},
        {[](checkpoint_manifest&, simulated_storage& storage, const std::string& folder) {
           storage.flip(folder + "/rank1-0.bin", 100);
         },
         "/rank1-0.bin: bytes 12 to 24 are damaged", verification::checksums},
        {[](checkpoint_manifest& part, simulated_storage&, const std::string&) {
           part.files[0].name = "rank0-0.bin";
         },
         "file \"rank0-0.bin\" occurs twice"},
    };
    for (const lie& each : lies) {
      CAPTURE(each.text);
      simulated_storage storage(tiny());
      ranks all(storage, 2, each.how);
      all.join();
      const checkpoint_draft draft = all.begin(20);
      checkpoint_manifest part = write_rank(storage, two, draft, 1);
      all.write_and_vote(two, draft, 0);
      each.tell(part, storage, draft.folder);
      all[1].vote(draft, part);
      const std::string why = text_of([&] { static_cast<void>(all[0].try_conclude(draft)); });
      CHECK(why.find("simulated: step 20, generation 1: the vote of rank 1") == 0);
      CHECK(why.find(each.text) != std::string::npos);
      const std::string heard = text_of([&] { static_cast<void>(all[1].try_conclude(draft)); });
      CHECK(heard.find("simulated: step 20, generation 1: rank 0 stopped it: the vote of rank 1") == 0);
      CHECK(heard.find(each.text) != std::string::npos);
      CHECK(newest(storage) == 0);
    }
  }

  TEST_CASE("wrong checksums that rank 0 did not have to verify are found before the checkpoint is used") {
    simulated_storage storage(tiny());
    ranks all(storage, 2);
    all.join();
    acknowledged told;
    all.save(two, 10, told);
    const checkpoint_draft draft = all.begin(20);
    checkpoint_manifest part = write_rank(storage, two, draft, 1);
    part.files[0] = described(part.files[0].name, world_bytes(two, 21, 1, 0), two.write_bytes, 1);
    all[1].vote(draft, part);
    all.write_and_vote(two, draft, 0);
    CHECK(all[0].try_conclude(draft));
    CHECK(newest(storage) == 10);
  }

  TEST_CASE("a part of another rank, or of another draft, is not a vote") {
    simulated_storage storage(tiny());
    ranks all(storage, 2);
    all.join();
    CHECK(text_of([&] { static_cast<void>(all[1].try_conclude({})); }) ==
          "rank_session::try_conclude: step 0, generation 0 is not the draft begun last");
    const checkpoint_draft draft = all.begin(20);
    CHECK(text_of([&] { static_cast<void>(all[1].try_conclude(draft)); }) ==
          "rank_session::try_conclude: this rank has not voted, or it is over");
    checkpoint_manifest part = write_rank(storage, two, draft, 1);
    CHECK(text_of([&] { all[0].vote(draft, part); }) ==
          "simulated: step 20, generation 1: the vote of rank 0 lists rank1-0.bin, a file of rank 1");
    part.step = 10;
    CHECK(
        text_of([&] { all[1].vote(draft, part); }) ==
        "simulated: step 20, generation 1: the vote of rank 1 is of step 10, generation 1 and a world of 2");
    CHECK(told_in(storage, "vote").empty());
  }

  TEST_CASE("a damaged vote does not count") {
    simulated_storage storage(tiny());
    ranks all(storage, 2);
    all.join();
    const checkpoint_draft draft = all.begin(20);
    all.write_and_vote(two, draft, 0);
    all.write_and_vote(two, draft, 1);
    const std::string vote = told_in(storage, "vote").at(0);
    storage.flip(vote, 333);
    CHECK(!all[0].try_conclude(draft));
    CHECK(all[0].waits_for().text == "rank 1 has not reported all files as synced, or not whole");
    storage.flip(vote, 333);
    CHECK(all[0].try_conclude(draft));
  }

  TEST_CASE("half a message, or one with a flipped bit, does not count") {
    const detail::rank_message message{"vote", {0, 7, ~std::uint64_t{0}}, "two\nlines"};
    const std::string text = detail::to_text(message);
    REQUIRE(detail::read_rank_message(text));
    CHECK(*detail::read_rank_message(text) == message);
    for (std::size_t bytes = 0; bytes < text.size(); ++bytes)
      CHECK(!detail::read_rank_message(std::string_view(text).substr(0, bytes)));
    for (std::size_t bit = 0; bit < text.size() * 8; ++bit) {
      std::string turned = text;
      turned[bit / 8] = static_cast<char>(turned[bit / 8] ^ (1 << bit % 8));
      CHECK(!detail::read_rank_message(turned));
    }
  }

  TEST_CASE("a rank whose names are not durable does not vote") {
    simulated_storage storage(tiny());
    ranks all(storage, 2);
    all.join();
    const checkpoint_draft draft = all.begin(20);
    const checkpoint_manifest part = write_rank(storage, two, draft, 1);
    storage.set_faults({{.call = storage_call::sync_folder, .first = 1}});
    CHECK(text_of([&] { all[1].vote(draft, part); }).find("the folder cannot be synced") !=
          std::string::npos);
    CHECK(told_in(storage, "vote").empty());
  }

  TEST_CASE("a message gets its name only once it is completely written and synced") {
    for (const auto call : {storage_call::reserve, storage_call::write, storage_call::sync}) {
      for (const bool renames : {true, false}) {
        simulated_storage storage(tiny(renames));
        ranks all(storage, 2);
        all.join();
        const checkpoint_draft draft = all.begin(20);
        const checkpoint_manifest part = write_rank(storage, two, draft, 1);
        storage.set_faults({{.call = call, .first = 1}});
        CHECK(kind_of([&] { all[1].vote(draft, part); }) == thrown::io);
        storage.set_faults({});
        CHECK(told_in(storage, "vote").empty());
        CHECK(told_in(storage, "tmp").empty());
      }
    }
  }

  TEST_CASE(
      "if any call fails, no rank reports a missing checkpoint as committed, or an existing one as lost") {
    const simulated_storage start = settled(two, {10}, tiny());
    for (const auto what : {storage_fault::kind::refused, storage_fault::kind::reported}) {
      bool ended = false;
      for (std::uint64_t first = 1; !ended; ++first) {
        CAPTURE(first);
        simulated_storage storage = start.after_crash(start.all_survives());
        ranks all(storage, 2);
        all.join();
        storage.set_faults({{.call = {}, .first = first, .what = what}});
        const std::uint64_t before = storage.calls();
        thrown how[2] = {};
        std::optional<checkpoint_draft> drafts[2];
        // As the coordinator does it: who has voted must not guess.
        const auto attempt = [&](std::uint32_t rank, auto work) {
          how[rank] = kind_of([&] {
            try {
              work();
            } catch (const storage_error&) {
              if (drafts[rank]) all[rank].stop(*drafts[rank], "a call failed");
              throw;
            }
          });
        };
        for (const std::uint32_t rank : {0U, 1U}) {
          attempt(rank, [&] {
            drafts[rank] = all[rank].try_begin(20);
            if (!drafts[rank]) throw io_error("there is none");
            all[rank].vote(*drafts[rank], write_rank(storage, two, *drafts[rank], rank));
          });
        }
        for (const std::uint32_t rank : {0U, 1U}) {
          if (how[rank] != thrown::nothing) continue;
          attempt(rank, [&] {
            if (all[rank].try_conclude(*drafts[rank])) return;
            all[rank].stop(*drafts[rank], "it has waited for too long");
            throw io_error("it has waited for too long");
          });
        }
        ended = storage.calls() - before < first;
        if (ended) CHECK((how[0] == thrown::nothing && how[1] == thrown::nothing));
        for (const std::uint32_t rank : {0U, 1U}) {
          if (drafts[rank] && how[rank] != thrown::nothing && how[rank] != thrown::uncertain)
            static_cast<void>(all[rank].abandon(*drafts[rank], "it has failed"));
        }
        storage.set_faults({});
        const bool there = newest(storage) == 20;
        for (const thrown each : how) {
          if (each == thrown::nothing) CHECK(there);
          if (each != thrown::nothing && each != thrown::uncertain) CHECK(!there);
        }
        CHECK(what_is_lost(storage, two, acknowledged{10}) == "");
        // Nothing of it is in the way of the next.
        acknowledged told;
        all.save(two, 30, told);
        CHECK(newest(storage) == 30);
      }
    }
  }

  TEST_CASE("ranks at different steps report that at once") {
    simulated_storage storage(tiny());
    ranks all(storage, 2);
    all.join();
    const auto draft = all[0].try_begin(20);
    REQUIRE(draft);
    all.write_and_vote(two, *draft, 0);
    CHECK(!all[1].try_begin(30));  // rank 1 made none of 20
    CHECK(text_of([&] { static_cast<void>(all[0].try_conclude(*draft)); }) ==
          "simulated: step 20, generation 1: rank 1 stopped it: it is at step 30 already; nothing was "
          "committed");
    CHECK(all[1].waits_for().text == "rank 0 has not begun a checkpoint of step 30");
    acknowledged told;
    all.save(two, 30, told);
    const auto later = all[0].try_begin(50);
    REQUIRE(later);
    CHECK(text_of([&] { static_cast<void>(all[1].try_begin(40)); }) ==
          "simulated: step 50, generation 3: rank 0 is already there, and makes no checkpoint of step 40");
    const auto others = all[1].try_begin(50);
    REQUIRE(others);
    all.write_and_vote(two, *others, 1);
    all.write_and_vote(two, *later, 0);
    CHECK(all[0].try_conclude(*later));
    CHECK(all[1].try_conclude(*others));
    // Rank 0 begins another without ending this one; whoever comes to the first learns that it is stopped.
    REQUIRE(all[0].try_begin(60));
    REQUIRE(all[0].try_begin(70));
    CHECK(text_of([&] { static_cast<void>(all[1].try_begin(60)); }) ==
          "simulated: step 60, generation 4: rank 0 stopped it: it begins step 70; nothing was committed");
    CHECK(all[1].try_begin(70));
  }

  TEST_CASE("a rank that another process has, or an impossible one, is refused") {
    simulated_storage storage(tiny());
    CHECK_THROWS_WITH_AS(session(storage, {.rank = 2, .world = 2}), "rank_session: rank 2 of 2",
                         argument_error);
    const session one(storage, {.rank = 1, .world = 2});
    CHECK_THROWS_WITH_AS(
        session(storage, {.rank = 1, .world = 2}),
        "simulated/LOCK.rank-1: another process is rank 1 here; stop it, or use another rank", io_error);
    checkpoint_folder solo(storage);
    CHECK_THROWS_WITH_AS(
        session(storage, {.rank = 0, .world = 2}),
        "simulated/LOCK: another process commits to this folder; stop it, or use another folder", io_error);
  }

  TEST_CASE("a coordinator waits for the others, and at most as long as configured") {
    simulated_storage storage(tiny());
    test_time time;
    CHECK_THROWS_WITH_AS(coordinator(storage, patient(0, 4), {}, {&time}),
                         "simulated: ranks 1, 2 and 3 of 4 have not joined within 5000 ms", ranks_missing);
    CHECK(time.now >= std::chrono::seconds(5));
    CHECK(time.now < std::chrono::seconds(6));
    {
      const session stranger(storage, {.rank = 1, .world = 3});
      time.meanwhile = [&] { static_cast<void>(const_cast<session&>(stranger).try_join()); };
      CHECK(text_of([&] { const coordinator zero(storage, patient(0, 2), {}, {&time}); }) ==
            "simulated: rank 1 of 2 has not joined; a process joined as rank 1 of 3 within 5000 ms");
      time.meanwhile = [] {};
    }
    CHECK(text_of([&] { const coordinator one(storage, patient(1, 2), {}, {&time}); }) ==
          "simulated: rank 0 has not begun a session with this process within 5000 ms");
    CHECK(told_in(storage, "join").size() == 1);  // the stranger's, who left without a word

    auto one = std::make_unique<session>(storage, rank_session_options{.rank = 1, .world = 2});
    time.meanwhile = [&] { static_cast<void>(one->try_join()); };
    coordinator zero(storage, patient(0, 2), {}, {&time});
    REQUIRE(one->try_join());

    // The other votes while this one waits; and learns of the commit.
    std::optional<checkpoint_draft> others;
    time.meanwhile = [&] {
      if (others) return;
      others = one->try_begin(10);
      REQUIRE(others);
      one->vote(*others, write_rank(storage, two, *others, 1));
    };
    checkpoint_draft draft = zero.begin(10);
    zero.commit(draft, write_rank(storage, two, draft, 0));
    CHECK(one->try_conclude(*others));
    CHECK(zero.tidy() == "");
    CHECK(storage.files().contains("LATEST"));
    CHECK(newest(storage) == 10);

    time.meanwhile = [] {};
    draft = zero.begin(20);
    const auto began = time.now;
    CHECK_THROWS_WITH_AS(zero.commit(draft, write_rank(storage, two, draft, 0)),
                         "simulated: step 20: rank 1 has not reported all files as synced within 2000 ms",
                         ranks_missing);
    CHECK(time.now - began < std::chrono::seconds(3));
    CHECK(text_of([&] { static_cast<void>(one->try_begin(20)); }) ==
          "simulated: step 20, generation 2: rank 0 stopped it: it has waited for too long: rank 1 has not "
          "reported all files as synced; nothing was committed");
    static_cast<void>(zero.abandon(draft, "it has failed"));
    CHECK(newest(storage) == 10);
  }

  TEST_CASE("a coordinator of another rank waits for rank 0, and at most as long as configured") {
    simulated_storage storage(tiny());
    test_time time;
    session zero(storage, {.rank = 0, .world = 2});
    time.meanwhile = [&] { static_cast<void>(zero.try_join()); };
    coordinator one(storage, patient(1, 2), {}, {&time});
    time.meanwhile = [] {};
    const auto began = time.now;
    CHECK_THROWS_WITH_AS(static_cast<void>(one.begin(10)),
                         "simulated: rank 0 has not begun a checkpoint of step 10 within 3000 ms",
                         ranks_missing);
    CHECK(time.now - began < std::chrono::seconds(4));
    auto draft = zero.try_begin(10);
    checkpoint_draft others = one.begin(10);
    CHECK_THROWS_WITH_AS(one.commit(others, write_rank(storage, two, others, 1)),
                         "simulated: step 10: rank 0 has not decided, though all others have voted within "
                         "2000 ms",
                         ranks_missing);
    zero.vote(*draft, write_rank(storage, two, *draft, 0));
    CHECK(kind_of([&] { static_cast<void>(zero.try_conclude(*draft)); }) == thrown::stopped);
    CHECK(newest(storage) == 0);

    // A call that fails while it waits: it stops the round, rather than to leave open whether it is
    // committed.
    draft = zero.try_begin(20);
    others = one.begin(20);
    time.meanwhile = [&] { storage.set_faults({{.call = storage_call::list, .first = 1}}); };
    CHECK(kind_of([&] { one.commit(others, write_rank(storage, two, others, 1)); }) == thrown::io);
    storage.set_faults({});
    zero.vote(*draft, write_rank(storage, two, *draft, 0));
    CHECK(kind_of([&] { static_cast<void>(zero.try_conclude(*draft)); }) == thrown::stopped);

    // A vote that fails: the other learns why.
    time.meanwhile = [] {};
    draft = zero.try_begin(30);
    others = one.begin(30);
    const checkpoint_manifest part = write_rank(storage, two, others, 1);
    storage.set_faults({{.call = storage_call::sync_folder, .first = 1}});
    const std::string why = text_of([&] { one.commit(others, part); });
    storage.set_faults({});
    zero.vote(*draft, write_rank(storage, two, *draft, 0));
    CHECK(text_of([&] { static_cast<void>(zero.try_conclude(*draft)); }) ==
          "simulated: step 30, generation 3: rank 1 stopped it: " + why + "; nothing was committed");
    CHECK(one.tidy() == "");
  }

  TEST_CASE("any failure after the vote stops the round, and no rank guesses") {
    simulated_storage storage(tiny());
    test_time time;
    session zero(storage, {.rank = 0, .world = 2});
    time.meanwhile = [&] { static_cast<void>(zero.try_join()); };
    coordinator one(storage, patient(1, 2), {}, {&time});
    // Rank 0 has not decided: nothing is committed, and it learns that at once.
    auto draft = zero.try_begin(10);
    checkpoint_draft others = one.begin(10);
    time.meanwhile = [] { throw std::bad_alloc(); };
    CHECK_THROWS_AS(one.commit(others, write_rank(storage, two, others, 1)), std::bad_alloc);
    zero.vote(*draft, write_rank(storage, two, *draft, 0));
    CHECK(text_of([&] { static_cast<void>(zero.try_conclude(*draft)); }) ==
          "simulated: step 10, generation 1: rank 1 stopped it: std::bad_alloc; nothing was committed");
    // It has: whether it is there is not for this rank to say.
    time.meanwhile = [] {};
    draft = zero.try_begin(20);
    others = one.begin(20);
    zero.vote(*draft, write_rank(storage, two, *draft, 0));
    time.meanwhile = [&] {
      CHECK(zero.try_conclude(*draft));
      throw 20;
    };
    CHECK(text_of([&] { one.commit(others, write_rank(storage, two, others, 1)); }) ==
          "simulated: step 20, generation 2: rank 0 had decided to commit, but has not reported the outcome; "
          "look for step-0000000020-g00000002");
    CHECK(newest(storage) == 20);
    // And where it cannot be stopped either, the first reason is the one that is told.
    time.meanwhile = [] {};
    draft = zero.try_begin(30);
    others = one.begin(30);
    CHECK(
        text_of([&] {
          checkpoint_manifest part = write_rank(storage, two, others, 1);
          part.step = 31;
          storage.set_faults({{.first = 1, .count = ~std::uint64_t{0}}});
          one.commit(others, part);
        }) ==
        "simulated: step 30, generation 3: the vote of rank 1 is of step 31, generation 3 and a world of 2");
  }

  TEST_CASE("an exception in rank 0's commit that is not a library error is reported to the others") {
    simulated_storage storage(tiny());
    bool fails = false;
    const auto before = [&](storage_call what, const std::string& path) {
      if (fails && what == storage_call::create && path.ends_with("MANIFEST.json")) throw std::bad_alloc();
    };
    both_voted voted(storage, before);
    fails = true;
    CHECK_THROWS_AS(static_cast<void>(voted.zero.try_conclude(voted.draft)), std::bad_alloc);
    CHECK(text_of([&] { static_cast<void>(voted.one.try_conclude(voted.others)); }) ==
          "simulated: step 10, generation 1: rank 0 could not commit it: std::bad_alloc");
    static_cast<void>(voted.zero.abandon(voted.draft, "it has failed"));
    CHECK(newest(storage) == 0);
  }

  TEST_CASE("a failure after the commit does not make a checkpoint look uncommitted") {
    simulated_storage storage(tiny());
    std::string forbidden;
    const auto before = [&](storage_call what, const std::string& path) {
      if (what == storage_call::create && !forbidden.empty() && storage.files().contains(forbidden))
        throw std::bad_alloc();
      static_cast<void>(path);
    };
    both_voted voted(storage, before);
    forbidden = "step-0000000010-g00000001/MANIFEST.json";
    CHECK(voted.zero.try_conclude(voted.draft));
    CHECK(voted.zero.take_error() ==
          "simulated: step 10, generation 1: the other ranks could not be informed of its outcome: "
          "std::bad_alloc");
    CHECK(newest(storage) == 10);
  }

  TEST_CASE("a finished draft, which may be a checkpoint by now, is not abandoned") {
    for (const bool renames : {true, false}) {
      simulated_storage storage(tiny(renames));
      ranks all(storage, 2);
      all.join();
      acknowledged told;
      const checkpoint_draft first = all.begin(10);
      for (std::uint32_t rank = 2; rank-- > 0;)
        all.write_and_vote(two, first, rank);
      REQUIRE(all[0].try_conclude(first));
      REQUIRE(all[1].try_conclude(first));
      CHECK(all[0].abandon(first, "it is said to have failed") == "");
      all.save(two, 20, told);
      CHECK(all[0].abandon(first, "it is said to have failed") == "");
      CHECK(list_checkpoints(storage).size() == 2);
      CHECK_NOTHROW(open_checkpoint(storage, first.id, verification::checksums));
    }
  }

  TEST_CASE("ranks that together lack a part of a tensor commit nothing, and all ranks learn which part") {
    using part = element_runs;
    struct example {
      std::vector<std::uint64_t> shape;
      part zero;
      part one;
      std::string missing;  // none: it is complete
    };
    const example examples[] = {
        {{10}, {0, 6, 6, 1}, {6, 4, 4, 1}, ""},
        {{10}, {0, 10, 10, 1}, {0, 10, 10, 1}, ""},  // replicated
        {{10}, {0, 10, 10, 1}, {2, 3, 3, 1}, ""},
        {{0}, {}, {}, ""},
        {{10}, {0, 6, 6, 1}, {7, 3, 3, 1}, "element 6 of its 10"},
        {{10}, {0, 8, 8, 1}, {0, 8, 8, 1}, "element 8 of its 10"},
        {{10}, {}, {}, "element 0 of its 10"},
        {{2, 4}, {0, 2, 4, 2}, {2, 2, 4, 2}, ""},
        {{2, 4}, {0, 3, 4, 2}, {1, 2, 4, 2}, "element 3 of its 8"},
        {{3, 4}, {0, 2, 4, 3}, {2, 2, 4, 2}, "some elements of its 12"},
    };
    for (const example& each : examples) {
      CAPTURE(each.missing);
      simulated_storage storage(tiny());
      ranks all(storage, 2);
      all.join();
      const checkpoint_draft draft = all.begin(10);
      for (const std::uint32_t rank : {1U, 0U}) {
        checkpoint_manifest made = write_rank(storage, two, draft, rank);
        made.tensors.push_back({"w", safetensors_type::u8, each.shape, {}});
        made.tensors[0].pieces.push_back({0, "w", rank == 0 ? each.zero : each.one});
        all[rank].vote(draft, made);
      }
      bool is_told = false;
      const std::string why = text_of([&] { is_told = all[0].try_conclude(draft); });
      const std::string refused = "the votes of all ranks: tensor \"w\": no rank has " + each.missing;
      CHECK(why == (each.missing.empty()
                        ? "none"
                        : "simulated: step 10, generation 1: " + refused + "; nothing was committed"));
      CHECK(text_of([&] { is_told = all[1].try_conclude(draft); }) ==
            (each.missing.empty() ? "none"
                                  : "simulated: step 10, generation 1: rank 0 stopped it: " + refused +
                                        "; nothing was committed"));
      CHECK(is_told == each.missing.empty());
      CHECK(newest(storage) == (each.missing.empty() ? 10 : 0));
    }
    // One that was committed by somebody who did not look is passed over.
    simulated_storage storage(tiny());
    checkpoint_folder folder(storage);
    const checkpoint_draft draft = folder.begin(10);
    checkpoint_manifest made = write_rank(storage, two, draft, 0);
    made.tensors.push_back({"w", safetensors_type::u8, {10}, {}});
    folder.commit(draft, made);
    CHECK(find_checkpoint(storage).message() ==
          "no checkpoint; passed over step-0000000010-g00000001: simulated/step-0000000010-g00000001: tensor "
          "\"w\": no rank has element 0 of its 10");
  }
}
