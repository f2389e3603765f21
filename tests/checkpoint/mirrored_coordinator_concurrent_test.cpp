#include <llmmem/async_checkpointer.hpp>
#include <llmmem/checkpoint/file_coordinator.hpp>
#include <llmmem/checkpoint/load.hpp>
#include <llmmem/checkpoint/mirrored_coordinator.hpp>
#include <llmmem/checkpoint/recover.hpp>
#include <llmmem/testing/crash_states.hpp>
#include <llmmem/testing/simulated_storage.hpp>

#include <doctest/doctest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/checkpoint_world.hpp"
#include "support/error_text.hpp"
#include "support/hooked_storage.hpp"
#include "support/incremental_world.hpp"
#include "support/named_storage.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::crash_limits;
using llmmem::testing::power_cut;
using llmmem::testing::simulated_storage;
using llmmem::testing::simulated_storage_options;
using llmmem::testing::storage_fault;
using llmmem::testing::visit_crash_states;

namespace {

const checkpoint_world world{.ranks = 1, .files = 2};
constexpr std::uint64_t patience_ns = 30'000'000'000;  // nothing takes as long

/// Notes what it is told.
struct copy_log {
  struct notes {
    std::mutex mutex{};
    std::vector<checkpoint_id> copied{};
    std::vector<std::string> failed{};
    std::optional<std::uint64_t> last_step{};
  };
  notes* to;

  void copied(const checkpoint_id& id) const {
    const std::scoped_lock lock(to->mutex);
    to->copied.push_back(id);
    to->last_step = id.step;
  }
  void failed(const checkpoint_id& id, const std::string& why) const {
    const std::scoped_lock lock(to->mutex);
    to->failed.push_back(folder_name(id) + ": " + why);
  }
};

struct throwing_log {
  void copied(const checkpoint_id& /*id*/) const { throw std::runtime_error("closed"); }
  void failed(const checkpoint_id& /*id*/, const std::string& /*why*/) const { throw 1; }
};

/// Saves a step as a checkpointer does: begin, files, commit, tidy. What tidying told.
template <class Coordinator>
std::string save(Coordinator& coordinator, std::uint64_t step) {
  const checkpoint_draft draft = coordinator.begin(step);
  try {
    coordinator.commit(draft, write_rank(coordinator.storage(), world, draft, 0));
  } catch (const error& failure) {
    static_cast<void>(coordinator.abandon(draft, failure.what()));
    throw;
  }
  return coordinator.tidy();
}

/// Returns when nothing is being copied or tidied.
template <class Mirror>
void settle(Mirror& mirror) {
  while (mirror.stats().copying.id.generation != 0)
    std::this_thread::yield();
}

std::vector<std::uint64_t> steps_in(simulated_storage& storage) {
  std::vector<std::uint64_t> steps;
  for (const checkpoint_id& id : list_checkpoints(storage))
    steps.push_back(id.step);
  return steps;
}

/// Something that hangs until it is let go.
class gate {
 public:
  void close() { open_.store(false); }
  void open() {
    open_.store(true);
    open_.notify_all();
  }
  /// By who may hang.
  void pass() {
    if (open_.load()) return;
    arrived_.store(true);
    open_.wait(false);
  }
  void wait_for_arrival() const {
    for (int ms = 0; !arrived_.load() && ms < 20'000; ++ms)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    REQUIRE(arrived_.load());
  }

 private:
  std::atomic<bool> open_{true};
  std::atomic<bool> arrived_{false};
};

/// Lets go of who hangs, also when a test ends early.
struct opened_at_end {
  gate* which;
  explicit opened_at_end(gate& of) : which(&of) {}
  opened_at_end(const opened_at_end&) = delete;
  opened_at_end& operator=(const opened_at_end&) = delete;
  ~opened_at_end() { which->open(); }
};

/// A durable storage of which files cannot be made while the gate is closed.
auto hanging(simulated_storage& below, gate& at, const std::string& only = "") {
  return hooked_storage(below, [&at, only](storage_call call, const std::string& path) {
    if (call == storage_call::create && path.find(".tmp-") == 0 && path.find(only) != std::string::npos)
      at.pass();
  });
}

const mirror_options at_once{.buffer_bytes = 20, .attempts = 1, .retry_after_ns = 0};
const mirror_options thrice{.buffer_bytes = 20, .attempts = 3, .retry_after_ns = 0};

/// A run of one rank that saves to a local folder, copied to a durable one, and notes what is told of that.
struct mirrored_run {
  simulated_storage local{called("local")};
  simulated_storage durable;
  copy_log::notes notes{};
  solo_coordinator<simulated_storage> fast{local};
  mirrored_coordinator<solo_coordinator<simulated_storage>, simulated_storage, keep_last_and_every, copy_log>
      mirror;

  explicit mirrored_run(const mirror_options& options,
                        const simulated_storage_options& durable_options = called("durable"))
      : durable(durable_options), mirror(fast, durable, {}, options, copy_log{&notes}) {}
};

}  // namespace

TEST_SUITE("mirrored_coordinator") {
  TEST_CASE("a committed checkpoint arrives in the durable folder, under the same name, and is reported") {
    simulated_storage local(called("local"));
    simulated_storage durable(called("durable"));
    copy_log::notes notes;
    {
      solo_coordinator fast(local);
      mirrored_coordinator mirror(fast, durable, keep_last_and_every{.last = 3}, at_once, copy_log{&notes});
      CHECK(mirror.rank() == 0);
      CHECK(mirror.world() == 1);
      CHECK(mirror.stats().last_copied == checkpoint_id{});
      for (std::uint64_t step = 10; step <= 50; step += 10) {
        CHECK(save(mirror, step) == "");
        CHECK(mirror.wait_copied(step / 10, patience_ns));
        CHECK(mirror.stats().behind == 0);
      }
      const mirror_stats stats = mirror.stats();
      CHECK(stats.copied == 5);
      CHECK(stats.skipped == 0);
      CHECK(stats.failed == 0);
      CHECK(stats.bytes == 5 * 48);
      CHECK(stats.bandwidth() > 0);
      CHECK(stats.last_committed == checkpoint_id{50, 5});
      CHECK(stats.last_copied == checkpoint_id{50, 5});
      CHECK(stats.last_error == "");
      CHECK_FALSE(mirror.wait_copied(6, 1));
    }
    CHECK(steps_in(local) == std::vector<std::uint64_t>{50, 40});
    CHECK(steps_in(durable) == std::vector<std::uint64_t>{50, 40, 30});
    CHECK(what_is_torn(durable, world, commit_method::rename) == "");
    CHECK(notes.copied == std::vector<checkpoint_id>{{10, 1}, {20, 2}, {30, 3}, {40, 4}, {50, 5}});
    CHECK(notes.failed.empty());
  }

  TEST_CASE(
      "while the durable storage hangs, the training continues, and the newest checkpoint is copied next") {
    simulated_storage local(called("local"));
    simulated_storage durable(called("durable"));
    gate stuck;
    auto slow = hanging(durable, stuck);
    copy_log::notes notes;
    solo_coordinator fast(local);
    mirrored_coordinator mirror(fast, slow, keep_last_and_every{}, at_once, copy_log{&notes});
    const opened_at_end lets_go(stuck);
    stuck.close();
    CHECK(save(mirror, 10) == "");
    stuck.wait_for_arrival();
    CHECK(mirror.stats().copying.id == checkpoint_id{10, 1});
    for (std::uint64_t step = 20; step <= 90; step += 10)
      CHECK(save(mirror, step) == "");
    mirror_stats stats = mirror.stats();
    CHECK(stats.copied == 0);
    CHECK(stats.skipped == 7);
    CHECK(stats.behind == 9);
    CHECK_FALSE(mirror.wait_copied(9, 1'000'000));
    // What is being copied stays in the local folder, and what waits; nothing else.
    CHECK(steps_in(local) == std::vector<std::uint64_t>{90, 80, 10});
    stuck.open();
    CHECK(mirror.wait_copied(9, patience_ns));
    CHECK(mirror.wait_copied(5, patience_ns));  // a newer one is there
    CHECK(steps_in(durable) == std::vector<std::uint64_t>{90, 10});
    CHECK(save(mirror, 100) == "");
    CHECK(mirror.wait_copied(10, patience_ns));
    CHECK(steps_in(local) == std::vector<std::uint64_t>{100, 90});
    stats = mirror.stats();
    CHECK(stats.copied == 3);
    CHECK(stats.skipped == 7);
    CHECK(stats.behind == 0);
    settle(mirror);  // the observer has been told
    CHECK(notes.copied == std::vector<checkpoint_id>{{10, 1}, {90, 9}, {100, 10}});
    CHECK(what_is_torn(durable, world, commit_method::rename) == "");
  }

  TEST_CASE("a checkpoint that waits for its copy stays, and so do those it refers to") {
    simulated_storage local(called("local"));
    simulated_storage durable(called("durable"));
    gate stuck;
    auto slow = hanging(durable, stuck, "rank0-1");  // in the middle
    solo_coordinator fast(local);
    random_numbers random(5);
    save_step(fast.folder(), world, 10);
    const auto saved = save_incremental(fast.folder(), *find_checkpoint(local).found, 20, random);
    REQUIRE(find_checkpoint(local).found->manifest.stored.size() > 2);
    stuck.close();
    mirrored_coordinator mirror(fast, slow, keep_last_and_every{}, at_once);
    const opened_at_end lets_go(stuck);
    stuck.wait_for_arrival();
    CHECK(mirror.stats().copying.copied == 20);  // told before the last 4 bytes of the first file
    for (std::uint64_t step = 30; step <= 60; step += 10)
      CHECK(save(mirror, step) == "");
    CHECK(steps_in(local) == std::vector<std::uint64_t>{60, 50, 20, 10});
    stuck.open();
    CHECK(mirror.wait_copied(6, patience_ns));
    CHECK(steps_in(durable) == std::vector<std::uint64_t>{60, 20});
    const found_checkpoint copy = open_checkpoint(durable, {20, 2}, verification::checksums);
    CHECK(copy.manifest.stored.empty());
    CHECK(contents_of_files(durable, copy) == saved);
    CHECK(save(mirror, 70) == "");
    CHECK(steps_in(local) == std::vector<std::uint64_t>{70, 60});
  }

  TEST_CASE("a waiting checkpoint also stays, and is copied, while newer ones cannot be handed over") {
    simulated_storage local(called("local"));
    simulated_storage durable(called("durable"));
    gate stuck;
    auto slow = hanging(durable, stuck);
    solo_coordinator fast(local);
    mirrored_coordinator mirror(fast, slow, keep_last_and_every{}, at_once);
    const opened_at_end lets_go(stuck);
    stuck.close();
    CHECK(save(mirror, 10) == "");
    stuck.wait_for_arrival();
    CHECK(save(mirror, 20) == "");
    for (std::uint64_t step = 30; step <= 50; step += 10) {
      const checkpoint_draft draft = mirror.begin(step);
      mirror.commit(draft, write_rank(local, world, draft, 0));
      local.set_faults({storage_fault{.call = storage_call::open}});
      CHECK(mirror.tidy().find("was not copied: ") != std::string::npos);
      local.set_faults({});
    }
    CHECK(steps_in(local) == std::vector<std::uint64_t>{50, 40, 20, 10});
    stuck.open();
    CHECK(mirror.wait_copied(2, patience_ns));
    CHECK(steps_in(durable) == std::vector<std::uint64_t>{20, 10});
  }

  TEST_CASE("a run whose local disk was lost continues after the durable folder's last generation") {
    simulated_storage durable(called("durable"));
    {
      simulated_storage lost(called("local"));
      solo_coordinator fast(lost);
      mirrored_coordinator mirror(fast, durable, keep_last_and_every{}, at_once);
      for (const std::uint64_t step : {10U, 20U, 30U})
        save(mirror, step);
      CHECK(mirror.wait_copied(3, patience_ns));
    }
    simulated_storage local(called("local"));
    solo_coordinator fast(local);
    mirrored_coordinator mirror(fast, durable, keep_last_and_every{}, at_once);
    CHECK(mirror.stats().last_copied == checkpoint_id{30, 3});
    CHECK(mirror.stats().behind == 0);
    save(mirror, 25);  // it went back
    CHECK(mirror.wait_copied(4, patience_ns));
    settle(mirror);
    const auto recovered = recover(verification::checksums, checkpoint_source("local", local),
                                   checkpoint_source("durable", durable));
    CHECK(recovered.message() == "local: step-0000000025-g00000004");
    CHECK(steps_in(durable) == std::vector<std::uint64_t>{25, 30});
  }

  TEST_CASE(
      "a checkpoint that an ended process has not copied is copied first, and existing copies are not "
      "repeated") {
    simulated_storage local(called("local"));
    simulated_storage durable(called("durable"));
    {
      solo_coordinator fast(local);
      for (const std::uint64_t step : {10U, 20U, 30U})
        save(fast, step);
    }
    for (const std::uint64_t copied : {1U, 0U}) {
      copy_log::notes notes;
      {
        solo_coordinator fast(local);
        mirrored_coordinator mirror(fast, durable, keep_last_and_every{}, at_once, copy_log{&notes});
        CHECK(mirror.wait_copied(3, patience_ns));
        CHECK(mirror.stats().copied == copied);
        CHECK(mirror.stats().behind == 0);
        CHECK(mirror.stats().last_committed == checkpoint_id{30, 3});
      }
      CHECK(notes.copied.size() == copied);
      CHECK(steps_in(durable) == std::vector<std::uint64_t>{30});
    }
  }

  TEST_CASE("folders of two runs are refused, and nothing of either is changed") {
    simulated_storage local(called("local"));
    simulated_storage durable(called("durable"));
    {
      solo_coordinator one(local);
      REQUIRE(save(one, 10) == "");
      solo_coordinator other(durable);
      REQUIRE(save(other, 20) == "");
    }
    solo_coordinator fast(local);
    CHECK(
        text_of([&] { const mirrored_coordinator mirror(fast, durable, keep_last_and_every{}, at_once); }) ==
        "local/step-0000000010-g00000001 and durable/step-0000000020-g00000001 have the same generation but "
        "differ: two runs wrote to these folders; use a new folder for one of them");
    CHECK(steps_in(durable) == std::vector<std::uint64_t>{20});
    CHECK(steps_in(local) == std::vector<std::uint64_t>{10});
  }

  TEST_CASE("an older local checkpoint than the durable newest is not copied") {
    simulated_storage local(called("local"));
    simulated_storage durable(called("durable"));
    {
      solo_coordinator fast(local);
      save(fast, 10);
      checkpoint_folder far(durable);
      far.raise_generation(6);
      save_step(far, world, 70);
    }
    solo_coordinator fast(local);
    mirrored_coordinator mirror(fast, durable, keep_last_and_every{}, at_once);
    CHECK(mirror.stats().last_copied == checkpoint_id{70, 7});
    save(mirror, 80);
    CHECK(mirror.wait_copied(8, patience_ns));
    CHECK(steps_in(durable) == std::vector<std::uint64_t>{80, 70});
    CHECK(steps_in(local) == std::vector<std::uint64_t>{80, 10});
  }

  // Each call of the durable storage fails, once or from there on; each thing that may be wrong is told.
  TEST_CASE("any failure in the durable tier is reported, and training continues") {
    for (const bool renames : {true, false}) {
      for (const mirror_options& options : {at_once, thrice}) {
        for (const auto what : {storage_fault::kind::refused, storage_fault::kind::reported}) {
          for (const std::uint64_t count : {std::uint64_t{1}, storage_fault::forever}) {
            std::uint64_t told = 0;
            bool ended = false;
            for (std::uint64_t first = 1; !ended; ++first) {
              CAPTURE(first);
              CAPTURE(count);
              CAPTURE(options.attempts);
              simulated_storage local(called("local"));
              simulated_storage durable(called("durable", renames));
              copy_log::notes notes;
              mirror_stats stats;
              {
                solo_coordinator fast(local);
                mirrored_coordinator mirror(fast, durable, keep_last_and_every{}, options, copy_log{&notes});
                for (const std::uint64_t step : {10U, 20U}) {
                  save(mirror, step);
                  REQUIRE(mirror.wait_copied(step / 10, patience_ns));
                }
                settle(mirror);  // tidying calls the storage, too
                const std::uint64_t begin = durable.calls();
                durable.set_faults({storage_fault{
                    .call = {}, .first = first, .every = 1, .count = count, .number = ENOSPC, .what = what}});
                std::string trouble = save(mirror, 30);
                const bool is_copied = mirror.wait_copied(3, patience_ns);
                CHECK(is_copied == (mirror.stats().last_copied == checkpoint_id{30, 3}));
                if (options.attempts == 3 && count == 1 && what == storage_fault::kind::refused && renames &&
                    !is_copied) {
                  // Only a name that may not last is not tried again, and a draft that could not be removed.
                  CHECK(mirror.stats().last_error != "");
                }
                // Whatever that was, when it is over the next one comes through.
                settle(mirror);
                ended = durable.calls() - begin < first;
                durable.set_faults({});
                trouble += save(mirror, 40);
                CHECK(mirror.wait_copied(4, patience_ns));
                stats = mirror.stats();
                CHECK(stats.last_copied == checkpoint_id{40, 4});
                CHECK(is_copied == (stats.copied == 4));
                CHECK((is_copied || stats.failed > 0));
                if (!is_copied || stats.failed > 0) {
                  ++told;
                  CHECK(stats.last_error != "");
                  CHECK(trouble.find("was not copied: ") != std::string::npos);
                }
              }
              CHECK(notes.failed.size() == stats.failed);
              CHECK(notes.copied.size() == stats.copied);
              CHECK(what_is_lost(local, world, acknowledged{40}) == "");
              CHECK(what_is_lost(durable, world, acknowledged{40}) == "");
              CHECK(what_is_torn(durable, world, renames ? commit_method::rename : commit_method::manifest) ==
                    "");
            }
            CHECK(told > 10);
          }
        }
      }
    }
  }

  TEST_CASE("a failed copy is tried again, as often as configured, and not if a newer one waits") {
    for (const std::uint32_t attempts : {1U, 2U, 4U}) {
      mirrored_run w({.buffer_bytes = 20, .attempts = attempts, .retry_after_ns = 0});
      w.durable.set_faults({storage_fault{.call = storage_call::create, .every = 1, .count = 3}});
      const std::string early = save(w.mirror, 10);
      CHECK(w.mirror.wait_copied(1, patience_ns) == (attempts > 3));
      CHECK(w.mirror.stats().failed == std::min(attempts, 3U));
      CHECK(w.mirror.stats().last_error.find(
                "step-0000000010-g00000001 was not copied: durable/.tmp-step-") == 0);
      CHECK(w.mirror.stats().behind == (attempts > 3 ? 0 : 1));
      // Once.
      CHECK((early + w.mirror.tidy()).find("was not copied: ") != std::string::npos);
      CHECK(w.mirror.tidy() == "");
    }
    mirrored_run w({.buffer_bytes = 20,
                    .attempts = 100,
                    .retry_after_ns = 100 * patience_ns,
                    .at_end = mirror_end::stop});
    w.durable.set_faults({storage_fault{.call = storage_call::create}});
    save(w.mirror, 10);
    while (w.mirror.stats().failed == 0)
      std::this_thread::yield();
    CHECK_FALSE(w.mirror.wait_copied(1, 1'000'000));
    save(w.mirror, 20);  // in its place, at once
    CHECK(w.mirror.wait_copied(2, patience_ns));
    CHECK(steps_in(w.durable) == std::vector<std::uint64_t>{20});
  }

  TEST_CASE("a copy is tried again even if its remains could not be removed at once") {
    mirrored_run w({.buffer_bytes = 20, .attempts = 3, .retry_after_ns = 0});
    w.durable.set_faults({storage_fault{.call = storage_call::sync_folder},  // of the copy's own folder
                          storage_fault{.call = storage_call::remove}});
    save(w.mirror, 10);
    CHECK(w.mirror.wait_copied(1, patience_ns));
    settle(w.mirror);
    CHECK(w.mirror.stats().failed == 1);
    CHECK(w.durable.folders() == std::vector<std::string>{"step-0000000010-g00000001"});
  }

  TEST_CASE("a full durable disk is reported, and does not stop the training") {
    simulated_storage_options small = called("durable");
    small.capacity = 60;
    mirrored_run w(at_once, small);
    std::string told = save(w.mirror, 10);  // all of it, where the copy has failed before that tidies
    CHECK_FALSE(w.mirror.wait_copied(1, patience_ns));
    CHECK(w.mirror.stats().last_error.find("No space left on device") != std::string::npos);
    told += save(w.mirror, 20);
    CHECK(told.find("No space left on device") != std::string::npos);
    CHECK_FALSE(w.mirror.wait_copied(2, patience_ns));
    CHECK(w.mirror.stats().failed == 2);
    CHECK(w.durable.folders().empty());
    CHECK(what_is_lost(w.local, world, acknowledged{20}) == "");
  }

  TEST_CASE("a damaged local checkpoint is not copied, and the previous durable one stays") {
    mirrored_run w(thrice);
    save(w.mirror, 10);
    CHECK(w.mirror.wait_copied(1, patience_ns));
    const checkpoint_draft draft = w.mirror.begin(20);
    w.mirror.commit(draft, write_rank(w.local, world, draft, 0));
    w.local.flip("step-0000000020-g00000002/rank0-1.bin", 77);
    static_cast<void>(w.mirror.tidy());
    CHECK_FALSE(w.mirror.wait_copied(2, patience_ns));
    CHECK(w.mirror.stats().failed == 3);
    CHECK(w.notes.failed.at(0).find("step-0000000020-g00000002: local/step-0000000020-g00000002/rank0-1.bin: "
                                    "bytes 0 to 12 are damaged") == 0);
    CHECK(steps_in(w.durable) == std::vector<std::uint64_t>{10});
    const auto recovered = recover(verification::checksums, checkpoint_source("local", w.local),
                                   checkpoint_source("durable", w.durable));
    CHECK(recovered.found->id == checkpoint_id{10, 1});
    // One whose manifest cannot be read is not even begun.
    const checkpoint_draft next = w.mirror.begin(30);
    w.mirror.commit(next, write_rank(w.local, world, next, 0));
    w.local.flip("step-0000000030-g00000003/MANIFEST.json", 77);
    CHECK(w.mirror.tidy().find(
              "step-0000000030-g00000003 was not copied: local/step-0000000030-g00000003/MANIFEST.json: its "
              "checksum is wrong: it is damaged") != std::string::npos);
    CHECK_FALSE(w.mirror.wait_copied(3, patience_ns));
  }

  TEST_CASE("a checkpoint whose local durability is uncertain is copied nevertheless") {
    mirrored_run w(at_once);
    const checkpoint_draft draft = w.mirror.begin(10);
    const auto manifest = write_rank(w.local, world, draft, 0);
    w.local.set_faults({storage_fault{.call = storage_call::sync_folder, .first = 2}});
    CHECK_THROWS_AS(w.mirror.commit(draft, manifest), durability_uncertain);
    w.local.set_faults({});
    CHECK(w.mirror.tidy() == "");
    CHECK(w.mirror.wait_copied(1, patience_ns));
    CHECK(what_is_lost(w.durable, world, acknowledged{10}) == "");
  }

  TEST_CASE("a checkpoint that failed locally is not copied") {
    mirrored_run w(at_once);
    const checkpoint_draft draft = w.mirror.begin(10);
    w.local.set_faults({storage_fault{.call = storage_call::rename}});
    CHECK_THROWS_AS(w.mirror.commit(draft, write_rank(w.local, world, draft, 0)), storage_error);
    CHECK(w.mirror.abandon(draft, "no") == "");
    CHECK(w.mirror.tidy() == "");
    CHECK(!w.mirror.wait_copied(draft.id.generation));  // at once: nobody is told to wait for ever
    CHECK(!w.mirror.wait_copied(0));                    // stats().last_generation where nothing was committed
    CHECK(w.mirror.stats().last_committed == checkpoint_id{});
    CHECK(w.durable.folders().empty());
  }

  TEST_CASE("waiting checkpoints are copied at the end, or reported as not copied") {
    for (const bool finishes : {true, false}) {
      simulated_storage local(called("local"));
      simulated_storage durable(called("durable"));
      gate stuck;
      auto slow = hanging(durable, stuck);
      copy_log::notes notes;
      std::thread opener;
      {
        solo_coordinator fast(local);
        mirror_options options = at_once;
        if (!finishes) options.at_end = mirror_end::stop;
        mirrored_coordinator mirror(fast, slow, keep_last_and_every{}, options, copy_log{&notes});
        stuck.close();
        save(mirror, 10);
        stuck.wait_for_arrival();
        save(mirror, 20);
        opener = std::thread([&] {
          std::this_thread::sleep_for(std::chrono::milliseconds(finishes ? 1 : 100));
          stuck.open();
        });
      }
      opener.join();
      if (finishes) {
        CHECK(notes.copied == std::vector<checkpoint_id>{{10, 1}, {20, 2}});
      } else {
        CHECK(notes.copied.empty());
        CHECK(notes.failed ==
              std::vector<std::string>{
                  "step-0000000010-g00000001: local/step-0000000010-g00000001: its copy was stopped after 0 "
                  "of 48 bytes",
                  "step-0000000020-g00000002: it was not copied before the run ended; the next one copies "
                  "it"});
        CHECK(durable.folders().empty());
      }
    }
  }

  TEST_CASE("a copy that never ends delays the end at most as long as configured") {
    simulated_storage local(called("local"));
    simulated_storage durable(called("durable"));
    copy_log::notes notes;
    {
      solo_coordinator fast(local);
      mirrored_coordinator mirror(fast, durable, keep_last_and_every{},
                                  {.buffer_bytes = 20,
                                   .attempts = 1000,
                                   .retry_after_ns = 1000 * patience_ns,
                                   .finish_within_ns = 20'000'000},
                                  copy_log{&notes});
      durable.set_faults({storage_fault{.call = storage_call::create, .every = 1, .count = 1000}});
      save(mirror, 10);
    }
    CHECK(notes.failed.size() == 1);
    CHECK(notes.copied.empty());
  }

  TEST_CASE("an exception of an observer is recorded") {
    simulated_storage local(called("local"));
    simulated_storage durable(called("durable"));
    solo_coordinator fast(local);
    {
      mirrored_coordinator mirror(fast, durable, keep_last_and_every{}, at_once, throwing_log{});
      save(mirror, 10);
      CHECK(mirror.wait_copied(1, patience_ns));
      while (mirror.stats().last_error.empty())
        std::this_thread::yield();
      CHECK(mirror.stats().last_error == "the observer of copies failed: closed");
      settle(mirror);  // tidying comes behind the observer, and calls the storage, too
      durable.set_faults({storage_fault{.call = storage_call::create}});
      save(mirror, 20);
      CHECK_FALSE(mirror.wait_copied(2, patience_ns));
      CHECK(mirror.stats().last_error == "the observer of copies failed");
      CHECK(mirror.stats().failed == 1);
    }
  }

  TEST_CASE("a durable folder that cannot be opened is refused at once, before anything begins") {
    simulated_storage local(called("local"));
    simulated_storage durable(called("durable"));
    solo_coordinator fast(local);
    using mirror_type = mirrored_coordinator<solo_coordinator<simulated_storage>, simulated_storage>;
    CHECK(text_of([&] { const mirror_type mirror(fast, durable, {}, {.buffer_bytes = 1}); }) ==
          "copy_checkpoint: a buffer of 1 bytes cannot be halved; give it some megabytes");
    {
      const auto other = durable.try_lock("LOCK");
      CHECK(text_of([&] { const mirror_type mirror(fast, durable); }) ==
            "durable/LOCK: another process commits to this folder; stop it, or use another folder");
    }
    durable.set_faults({storage_fault{.call = storage_call::list, .every = 1, .count = 100}});
    CHECK_THROWS_AS(mirror_type(fast, durable), storage_error);
    CHECK(text_of([&] { const mirror_type mirror(fast, local); }) ==
          "local/LOCK: another process commits to this folder; stop it, or use another folder");
  }
}

// --- crashes

namespace {

/// What a run over two tiers has acknowledged.
struct told_of_tiers {
  std::optional<std::uint64_t> committed{};
  std::optional<std::uint64_t> copied{};
};

/// Saves steps over two tiers until the power of either goes off.
template <class Waits>
told_of_tiers run_tiers(simulated_storage& local, simulated_storage& durable,
                        const std::vector<std::uint64_t>& steps, told_of_tiers told, Waits wait_too) {
  copy_log::notes notes;
  notes.last_step = told.copied;
  try {
    solo_coordinator fast(local);
    mirrored_coordinator mirror(fast, durable, keep_last_and_every{}, at_once, copy_log{&notes});
    for (const std::uint64_t step : steps) {
      const checkpoint_draft draft = mirror.begin(step);
      mirror.commit(draft, write_rank(local, world, draft, 0));
      told.committed = step;
      static_cast<void>(mirror.tidy());
      if (wait_too(step)) static_cast<void>(mirror.wait_copied(draft.id.generation, patience_ns));
    }
  } catch (const power_cut&) {
  } catch (const fenced&) {  // locks go with the power
    REQUIRE(local.power_is_off());
  } catch (const durability_uncertain&) {  // also between a rename and the look after it, when a copy reads
    REQUIRE(local.power_is_off());
  }
  told.copied = notes.last_step;
  return told;
}

/// What is wrong with what `recover` finds over both, or empty.
std::string wrong_of_tiers(simulated_storage& local, simulated_storage& durable,
                           std::optional<std::uint64_t> at_least) {
  const auto recovered = recover(verification::checksums, checkpoint_source("local", local),
                                 checkpoint_source("durable", durable));
  const std::string wanted = at_least ? std::to_string(*at_least) : "none";
  if (recovered.has_conflict()) return "given twice: " + recovered.message();
  if (!recovered.found) return at_least ? "step " + wanted + " is lost: " + recovered.message() : "";
  if (at_least && recovered.found->id.step < *at_least)
    return "step " + wanted + " is lost: " + recovered.message();
  const bool right =
      recovered.visit([&](auto& storage) { return has_its_bytes(storage, world, *recovered.found); });
  return right ? "" : recovered.message() + " has other bytes";
}

/// Two tiers at rest, after some steps.
struct start_of_tiers {
  simulated_storage local{called("local")};
  simulated_storage durable{called("durable")};
  told_of_tiers told{};

  explicit start_of_tiers(const std::vector<std::uint64_t>& steps, bool renames) {
    local = simulated_storage(called("local"));
    durable = simulated_storage(called("durable", renames));
    told = run_tiers(local, durable, steps, {}, [](std::uint64_t) { return true; });
  }
};

constexpr crash_limits some_states{.exhaustive_up_to = 4, .samples = 6, .seed = 1, .tears = 1};

}  // namespace

TEST_SUITE("mirrored_coordinator, power cuts") {
  TEST_CASE("after a crash of either tier, or both, acknowledged checkpoints are recovered") {
    enum class crash : std::uint8_t { of_local, of_durable, of_both };
    std::uint64_t states = 0;
    std::uint64_t runs = 0;
    for (const bool renames : {true, false}) {
      for (const std::vector<std::uint64_t>& before :
           {std::vector<std::uint64_t>{}, std::vector<std::uint64_t>{10, 20, 30}}) {
        const start_of_tiers start(before, renames);
        for (const crash what : {crash::of_local, crash::of_durable, crash::of_both}) {
          for (const bool waits : {true, false}) {
            if (!renames && !waits) continue;
            bool ended = false;
            for (std::uint64_t cut = 1; !ended; cut += llmmem_tests::is_watched ? 5 : 1) {
              simulated_storage local = start.local.after_crash(start.local.all_survives());
              simulated_storage durable = start.durable.after_crash(start.durable.all_survives());
              simulated_storage& first = what == crash::of_durable ? durable : local;
              first.cut_power_at(first.calls() + cut);
              const told_of_tiers told =
                  run_tiers(local, durable, {40, 50}, start.told, [&](std::uint64_t) { return waits; });
              ended = !first.power_is_off();
              ++runs;
              // What the tier that lives has when the run is over; of both, when the other's power goes, too.
              const auto survivor = [](simulated_storage& storage) {
                return storage.after_crash(storage.all_survives());
              };
              CAPTURE(cut);
              CAPTURE(renames);
              CAPTURE(waits);
              const auto check = [&](simulated_storage& of_local, simulated_storage& of_durable) {
                ++states;
                const std::string both = wrong_of_tiers(of_local, of_durable, told.committed);
                if (!both.empty()) FAIL(both);
              };
              // Only one tier is left: an empty disk in the other's place.
              simulated_storage no_local(called("local"));
              visit_crash_states(durable, some_states, [&](simulated_storage& of_durable) {
                const std::string alone = wrong_of_tiers(no_local, of_durable, told.copied);
                if (!alone.empty()) FAIL(alone);
                if (what != crash::of_local) {
                  simulated_storage of_local = survivor(local);
                  check(of_local, of_durable);
                }
              });
              visit_crash_states(local, some_states, [&](simulated_storage& of_local) {
                simulated_storage of_durable =
                    what == crash::of_both ? durable.after_crash() : survivor(durable);
                check(of_local, of_durable);
              });
            }
          }
        }
      }
    }
    MESSAGE(runs << " runs, " << states << " states");
    CHECK(runs > (llmmem_tests::is_watched ? 100 : 500));
  }

  TEST_CASE("after a crash the run continues, and both tiers agree again") {
    const start_of_tiers start({10, 20, 30}, true);
    for (const bool of_local : {true, false}) {
      bool ended = false;
      for (std::uint64_t cut = 1; !ended; ++cut) {
        CAPTURE(cut);
        simulated_storage local = start.local.after_crash(start.local.all_survives());
        simulated_storage durable = start.durable.after_crash(start.durable.all_survives());
        simulated_storage& first = of_local ? local : durable;
        first.cut_power_at(first.calls() + cut);
        const told_of_tiers told =
            run_tiers(local, durable, {40, 50}, start.told, [](std::uint64_t) { return true; });
        ended = !first.power_is_off();
        simulated_storage next_local =
            of_local ? local.after_crash() : local.after_crash(local.all_survives());
        simulated_storage next_durable =
            of_local ? durable.after_crash(durable.all_survives()) : durable.after_crash();
        {
          solo_coordinator fast(next_local);
          mirrored_coordinator mirror(fast, next_durable, keep_last_and_every{}, at_once);
        }  // copies what is missing
        const auto there = find_checkpoint(next_durable);
        REQUIRE(there.found);
        CHECK(there.found->id.step >= *told.committed);
        const told_of_tiers after =
            run_tiers(next_local, next_durable, {60}, told, [](std::uint64_t) { return true; });
        CHECK(after.copied == 60);
        CHECK(wrong_of_tiers(next_local, next_durable, 60) == "");
        simulated_storage no_local(called("local"));
        CHECK(wrong_of_tiers(no_local, next_durable, 60) == "");
      }
    }
  }
}

// --- real folders, threads and processes

namespace {

struct traits : checkpointer_traits {
  using coordinator_type = mirrored_coordinator<solo_coordinator<posix_storage<>>, posix_storage<>>;
};

struct rank_traits : checkpointer_traits {
  using coordinator_type = mirrored_coordinator<file_coordinator<posix_storage<>>, posix_storage<>>;
};

const std::vector<state_tensor> catalogue = {
    {.name = "weight", .shape = {300, 257}, .part = {}},
    {.name = "moment", .shape = {300, 257}, .group = "optimizer", .part = {}},
};

using tensor_bytes = std::vector<std::vector<float>>;

tensor_bytes state_at(std::uint64_t step) {
  tensor_bytes all(2);
  for (std::size_t t = 0; t < 2; ++t) {
    for (std::size_t i = 0; i < 300 * 257; ++i)
      all[t].push_back(static_cast<float>(step * 1000 + t * 100 + i % 97));
  }
  return all;
}

template <class Storage>
tensor_bytes loaded(Storage& storage, const found_checkpoint& from) {
  tensor_bytes all(2, std::vector<float>(300 * 257));
  const std::vector<wanted_tensor> wanted = {{.name = "weight", .part = {}, .type = {}, .shape = {}},
                                             {.name = "moment", .part = {}, .type = {}, .shape = {}}};
  load_checkpoint(storage, from, wanted, [&](std::uint32_t i, std::uint64_t offset, auto bytes) {
    std::memcpy(std::as_writable_bytes(std::span(all[i])).data() + offset, bytes.data(), bytes.size());
  });
  return all;
}

}  // namespace

TEST_SUITE("mirrored_coordinator, real folders") {
  TEST_CASE("a checkpointer saves through the coordinator, and either folder alone restores the state") {
    const temporary_folder place;
    posix_storage<> local(place.file("local"));
    posix_storage<> durable(place.file("durable"));
    const std::uint64_t last = 6;
    {
      solo_coordinator fast(local);
      mirrored_coordinator mirror(fast, durable, keep_last_and_every{.last = 3},
                                  {.buffer_bytes = std::uint64_t{64} << 10});
      async_checkpointer<traits> saves(mirror, catalogue, {.ring_bytes = 1 << 18, .chunk_bytes = 1 << 15});
      tensor_bytes state = state_at(0);
      for (std::uint64_t step = 1; step <= last; ++step) {
        {
          const mutation_permit permit = saves.gate().mutate();
          state = state_at(step);
        }
        const std::vector<std::span<const std::byte>> spans{std::as_bytes(std::span(state[0])),
                                                            std::as_bytes(std::span(state[1]))};
        const snapshot_guard guard = saves.begin_snapshot(step, host_state_view(spans));
        static_cast<void>(mirror.stats());
        guard.wait_staged();
      }
      CHECK(saves.flush());
      CHECK(mirror.wait_copied(last, patience_ns));
      const mirror_stats stats = mirror.stats();
      CHECK(stats.copied + stats.skipped == last);
      CHECK(stats.failed == 0);
      CHECK(stats.last_copied == checkpoint_id{last, last});
      CHECK(saves.stats().last_error == "");
    }
    const auto recovered = recover(verification::checksums, checkpoint_source("local", local),
                                   checkpoint_source("durable", durable));
    CHECK(recovered.message() == "local: step-0000000006-g00000006");
    CHECK(recovered.visit([&](auto& storage) { return loaded(storage, *recovered.found); }) ==
          state_at(last));
    const checkpoint_search alone = find_checkpoint(durable);
    REQUIRE(alone.found);
    CHECK(alone.found->id.step == last);
    CHECK(loaded(durable, *alone.found) == state_at(last));
  }

  TEST_CASE("ranks that share the local folder get one copy, made by rank 0") {
    const temporary_folder place;
    constexpr std::uint32_t ranks = 2;
    std::vector<mirror_stats> stats(ranks);
    std::vector<std::thread> threads;
    std::vector<bool> waited(ranks);
    std::mutex mutex;
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] {
        posix_storage<> local(place.file("local"));
        posix_storage<> durable(place.file("durable"));
        file_coordinator<posix_storage<>> fast(local, {.rank = rank,
                                                       .world = ranks,
                                                       .join_within = std::chrono::minutes(1),
                                                       .begin_within = std::chrono::minutes(1),
                                                       .commit_within = std::chrono::minutes(1),
                                                       .poll = std::chrono::milliseconds(1)});
        mirrored_coordinator mirror(fast, durable, keep_last_and_every{}, {.buffer_bytes = 4096});
        const checkpoint_world two{.ranks = ranks, .files = 1, .file_bytes = 5000, .write_bytes = 1000};
        for (std::uint64_t step = 1; step <= 3; ++step) {
          const checkpoint_draft draft = mirror.begin(step);
          mirror.commit(draft, write_rank(local, two, draft, rank));
          static_cast<void>(mirror.tidy());
        }
        const bool is_there = mirror.wait_copied(3, patience_ns);
        const std::scoped_lock lock(mutex);
        waited[rank] = is_there;
        stats[rank] = mirror.stats();
      });
    }
    for (std::thread& each : threads)
      each.join();
    CHECK(waited == std::vector<bool>{true, false});
    CHECK(stats[0].last_copied == checkpoint_id{3, 3});
    CHECK(stats[0].last_error == "");
    CHECK(stats[1].copied == 0);
    CHECK(stats[1].behind == 0);
    posix_storage<> durable(place.file("durable"));
    const checkpoint_search search = find_checkpoint(durable);
    REQUIRE(search.found);
    CHECK(has_its_bytes(durable, {.ranks = ranks, .files = 1, .file_bytes = 5000, .write_bytes = 1000},
                        *search.found));
  }

  TEST_CASE("the next process copies what a killed one has not") {
    for (const int after_ms : {0, 3, 10, 30, 60}) {
      CAPTURE(after_ms);
      const temporary_folder place;
      const checkpoint_world large{.ranks = 1, .files = 2, .file_bytes = 200'000, .write_bytes = 4096};
      std::array<int, 2> ends{};
      REQUIRE(::pipe(ends.data()) == 0);
      const ::pid_t child = ::fork();
      REQUIRE(child >= 0);
      if (child == 0) {
        ::alarm(60);
        posix_storage<> local(place.file("local"));
        posix_storage<> durable(place.file("durable"));
        solo_coordinator fast(local);
        mirrored_coordinator mirror(fast, durable, keep_last_and_every{}, {.buffer_bytes = 8192});
        for (std::uint64_t step = 1;; ++step) {
          const checkpoint_draft draft = mirror.begin(step);
          mirror.commit(draft, write_rank(local, large, draft, 0));
          const char told = static_cast<char>(step);
          static_cast<void>(!::write(ends[1], &told, 1));
          static_cast<void>(mirror.tidy());
        }
      }
      char told = 0;
      REQUIRE(::read(ends[0], &told, 1) == 1);
      {
        posix_storage<> durable(place.file("durable"));
        CHECK_THROWS_AS(static_cast<void>(checkpoint_folder(durable)), io_error);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(after_ms));
      ::kill(child, SIGKILL);
      REQUIRE(::waitpid(child, nullptr, 0) == child);
      ::close(ends[1]);
      std::uint64_t last = static_cast<unsigned char>(told);
      while (::read(ends[0], &told, 1) == 1)
        last = static_cast<unsigned char>(told);
      ::close(ends[0]);

      posix_storage<> local(place.file("local"));
      posix_storage<> durable(place.file("durable"));
      const auto recovered = recover(verification::checksums, checkpoint_source("local", local),
                                     checkpoint_source("durable", durable));
      REQUIRE(recovered.found);
      CHECK_FALSE(recovered.has_conflict());
      CHECK(recovered.found->id.step >= last);
      CHECK(recovered.visit([&](auto& storage) { return has_its_bytes(storage, large, *recovered.found); }));
      solo_coordinator fast(local);
      mirrored_coordinator mirror(fast, durable, keep_last_and_every{}, {.buffer_bytes = 8192});
      CHECK(mirror.wait_copied(recovered.found->id.generation, patience_ns));
      const checkpoint_search there = find_checkpoint(durable);
      REQUIRE(there.found);
      CHECK(there.found->id == recovered.found->id);
      CHECK(has_its_bytes(durable, large, *there.found));
    }
  }
}
