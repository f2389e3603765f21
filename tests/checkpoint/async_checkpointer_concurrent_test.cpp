#include <llmmem/async_checkpointer.hpp>
#include <llmmem/checkpoint/load.hpp>
#include <llmmem/space/pmr.hpp>
#include <llmmem/testing/crash_states.hpp>
#include <llmmem/testing/simulated_storage.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <memory_resource>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/error_text.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/stuck_coordinator.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::crash_limits;
using llmmem::testing::simulated_storage;
using llmmem::testing::simulated_storage_options;
using llmmem::testing::simulated_writes;
using llmmem::testing::storage_fault;

namespace {

/// Tensors of odd sizes, in two groups.
struct state {
  std::vector<state_tensor> tensors{};
  std::vector<std::vector<std::byte>> bytes{};
  std::vector<std::span<const std::byte>> spans{};

  explicit state(std::uint64_t seed, std::size_t count = 5, std::uint64_t largest = 3000) {
    random_numbers random(seed);
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t size = 1 + random.below(largest);
      tensors.push_back({.name = "tensor" + std::to_string(i),
                         .type = safetensors_type::u8,
                         .shape = {size},
                         .group = i % 2 == 0 ? "model" : "optimizer",
                         .part = {}});
      bytes.emplace_back(static_cast<std::size_t>(size));
    }
    for (const auto& each : bytes)
      spans.emplace_back(each);
    fill(0);
  }
  state(const state&) = delete;
  state& operator=(const state&) = delete;

  /// As it is at a step.
  void fill(std::uint64_t step) {
    for (std::size_t t = 0; t < bytes.size(); ++t) {
      for (std::size_t i = 0; i < bytes[t].size(); ++i)
        bytes[t][i] = static_cast<std::byte>((step * 37 + t * 11 + i) % 251);
    }
  }
  [[nodiscard]] std::size_t total() const {
    std::size_t sum = 0;
    for (const auto& each : bytes)
      sum += each.size();
    return sum;
  }
};

struct traits : checkpointer_traits {
  using storage_type = simulated_storage;
  using coordinator_type = solo_coordinator<simulated_storage>;
};
using checkpointer = async_checkpointer<traits>;

const checkpointer_options tiny{.ring_bytes = 512, .chunk_bytes = 256};

std::vector<std::byte> bytes_of_text(const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text.data(), text.size()));
  return {bytes.begin(), bytes.end()};
}

/// Whether the newest checkpoint is that of `step`, to the byte. What is wrong, or empty.
std::string what_is_wrong(simulated_storage& storage, state& as, std::uint64_t step) {
  const checkpoint_search search = find_checkpoint(storage);
  if (!search.found) return search.message();
  if (search.found->id.step != step) return "it is of step " + std::to_string(search.found->id.step);
  std::vector<std::vector<std::byte>> loaded;
  std::vector<wanted_tensor> wanted;
  for (std::size_t i = 0; i < as.tensors.size(); ++i) {
    loaded.emplace_back(as.bytes[i].size());
    wanted.push_back(
        {.name = as.tensors[i].name, .part = {}, .type = as.tensors[i].type, .shape = as.tensors[i].shape});
  }
  load_checkpoint(storage, *search.found, wanted,
                  [&](std::uint32_t i, std::uint64_t offset, std::span<const std::byte> part) {
                    std::memcpy(loaded[i].data() + offset, part.data(), part.size());
                  },
                  {.readers = 1});
  const auto kept = as.bytes;
  as.fill(step);
  const bool same = loaded == as.bytes;
  as.bytes = kept;
  for (std::size_t i = 0; i < kept.size(); ++i)
    as.spans[i] = as.bytes[i];
  return same ? "" : "other bytes";
}

struct stuck_traits : traits {
  using coordinator_type = stuck_coordinator;
};

/// Copied by the thread that owns the state, and by no other.
class owners_view {
 public:
  static constexpr bool is_concurrent = false;

  explicit owners_view(const state& of, std::uint64_t fails_at = 0)
      : of_(&of), owner_(std::this_thread::get_id()), fails_at_(fails_at) {}
  void copy_out(std::uint32_t tensor, std::uint64_t offset, std::span<std::byte> into) {
    if (std::this_thread::get_id() != owner_) throw std::runtime_error("another thread");
    if (++calls_ == fails_at_) throw std::runtime_error("no more");
    std::memcpy(into.data(), of_->bytes[tensor].data() + offset, into.size());
  }

 private:
  const state* of_;
  std::thread::id owner_;
  std::uint64_t fails_at_;
  std::uint64_t calls_ = 0;
};

struct owners_traits : traits {
  using view_type = owners_view;
};

/// Holds on to something.
struct holding {
  static constexpr bool is_concurrent = true;
  std::shared_ptr<std::atomic<int>> held;
  void copy_out(std::uint32_t /*tensor*/, std::uint64_t /*offset*/, std::span<std::byte> into) const {
    std::memset(into.data(), 1, into.size());
  }
};
struct holding_traits : stuck_traits {
  using view_type = holding;
};

struct throwing {
  void settled(const commit_ticket& /*ticket*/) const { throw std::runtime_error("closed"); }
};
struct throwing_traits : traits {
  using observer_type = throwing;
};

struct owners_stuck : stuck_traits {
  using view_type = owners_view;
};

}  // namespace

TEST_SUITE("async_checkpointer") {
  TEST_CASE("a save has the state of the moment when the snapshot began, with any ring") {
    for (const auto seed : seeds(20)) {
      CAPTURE(seed);
      random_numbers random(seed);
      state of(seed);
      simulated_storage_options options;
      options.writes = seed % 2 == 0 ? simulated_writes::deferred : simulated_writes::at_once;
      simulated_storage storage(options);
      solo_coordinator coordinator(storage);
      const std::uint64_t chunk = 64 + random.below(std::uint64_t{400});
      checkpointer saves(coordinator, of.tensors,
                         {.ring_bytes = chunk * (2 + random.below(std::uint64_t{40})),
                          .chunk_bytes = chunk,
                          .max_shard_bytes = 1 + random.below(std::uint64_t{5000})});
      for (std::uint64_t step = 1; step <= 4; ++step) {
        {
          const mutation_permit permit = saves.gate().mutate();
          of.fill(step);
        }
        snapshot_guard guard = saves.begin_snapshot(
            step, host_state_view(of.spans), {{"note", bytes_of_text("step " + std::to_string(step))}});
        const commit_ticket ticket = guard.ticket();
        {
          const mutation_permit permit = std::move(guard).mutate();
          of.fill(1000 + step);
        }
        CHECK(ticket.wait() == commit_status::committed);
        CHECK(ticket.generation() == step);
        CHECK(what_is_wrong(storage, of, step) == "");
        const auto note = load_extra(storage, *find_checkpoint(storage).found, 0, "note");
        REQUIRE(note);
        CHECK(*note == bytes_of_text("step " + std::to_string(step)));
        CHECK(!load_extra(storage, *find_checkpoint(storage).found, 0, "other"));
      }
      saves.flush();
      const checkpointer_stats stats = saves.stats();
      CHECK(stats.begun == 4);
      CHECK(stats.committed == 4);
      CHECK(stats.last_step == 4);
      CHECK(stats.staging_peak <= stats.ring_bytes);
      CHECK(stats.staging_bytes == 0);
      CHECK(stats.staged_bytes == stats.persisted_bytes);
      CHECK(stats.persisted_bytes > 4 * of.total());
      CHECK(stats.last_error == "");
    }
  }

  TEST_CASE("snapshots follow each other without waiting for the disk") {
    state of(7);
    simulated_storage storage;
    solo_coordinator coordinator(storage, keep_last_and_every{.last = 100});
    std::vector<commit_ticket> tickets;
    {
      checkpointer saves(coordinator, of.tensors, {.ring_bytes = 1 << 16, .chunk_bytes = 256});
      for (std::uint64_t step = 1; step <= 20; ++step) {
        {
          const mutation_permit permit = saves.gate().mutate();
          of.fill(step);
        }
        tickets.push_back(saves.begin_snapshot(step, host_state_view(of.spans)).ticket());
      }
    }
    for (const commit_ticket& each : tickets)
      CHECK(each.is_committed());
    CHECK(list_checkpoints(storage).size() == 20);
    CHECK(what_is_wrong(storage, of, 20) == "");
  }

  TEST_CASE("a ring in the caller's space is charged to its budget, saves the same, and is refused whole") {
    struct pool_traits : traits {
      using staging_space = pmr_space;
    };
    state of(3);
    simulated_storage storage;
    solo_coordinator coordinator(storage);
    pmr_space staging(pmr_source(std::pmr::new_delete_resource()), {.budget = 1000, .name = "staging"});
    {
      async_checkpointer<pool_traits> saves(coordinator, of.tensors, staging, tiny);
      CHECK(staging.used() == tiny.ring_bytes);
      for (std::uint64_t step = 1; step <= 3; ++step) {
        {
          const mutation_permit permit = saves.gate().mutate();
          of.fill(step);
        }
        CHECK(saves.begin_snapshot(step, host_state_view(of.spans)).ticket().wait() ==
              commit_status::committed);
      }
      CHECK_THROWS_WITH_AS(async_checkpointer<pool_traits>(coordinator, of.tensors, staging, tiny),
                           doctest::Contains("staging: 512 bytes needed, but 488 left"), out_of_memory);
    }
    CHECK(staging.used() == 0);
    CHECK(what_is_wrong(storage, of, 3) == "");
  }

  TEST_CASE("only the owner copies a view that is not concurrent, while it waits") {
    state of(3);
    simulated_storage storage;
    solo_coordinator coordinator(storage);
    async_checkpointer<owners_traits> saves(coordinator, of.tensors, tiny);
    for (std::uint64_t step = 1; step <= 3; ++step) {
      {
        const mutation_permit permit = saves.gate().mutate();
        of.fill(step);
      }
      const commit_ticket ticket = saves.begin_snapshot(step, owners_view(of)).ticket();
      const mutation_permit permit = saves.gate().mutate();
      of.fill(99);
      CHECK(ticket.wait() == commit_status::committed);
      CHECK(what_is_wrong(storage, of, step) == "");
    }
  }

  TEST_CASE("a state that cannot be copied ends its checkpoint, and may change again") {
    state of(3);
    simulated_storage storage;
    solo_coordinator coordinator(storage);
    async_checkpointer<owners_traits> saves(coordinator, of.tensors, tiny);
    const commit_ticket ticket = saves.begin_snapshot(1, owners_view(of, 4)).ticket();
    CHECK(ticket.wait() == commit_status::not_committed);
    CHECK(ticket.why() == "async_checkpointer: step 1 was abandoned: the state could not be copied: no more");
    CHECK(!saves.gate().is_frozen());
    CHECK(saves.begin_snapshot(2, owners_view(of)).ticket().wait() == commit_status::committed);
    saves.flush();
    CHECK(saves.stats().failed == 1);
    CHECK(list_checkpoints(storage).size() == 1);
    for (const storage_entry& each : storage.list(""))
      CHECK(!is_left_over(each.name));
  }

  TEST_CASE(
      "if any call of the storage fails, once or permanently, that is reported, and the next save works") {
    state of(5);
    for (const auto kind : {storage_fault::kind::refused, storage_fault::kind::lost}) {
      bool ended = false;
      for (std::uint64_t first = 1; !ended; first += llmmem_tests::is_watched ? 4 : 1) {
        CAPTURE(first);
        simulated_storage storage;
        solo_coordinator coordinator(storage);
        checkpointer saves(coordinator, of.tensors, tiny);
        CHECK(saves.begin_snapshot(1, host_state_view(of.spans)).ticket().wait() == commit_status::committed);
        saves.flush();
        storage.set_faults({{.call = {}, .first = first, .number = EDQUOT, .what = kind}});
        const commit_ticket ticket = saves.begin_snapshot(2, host_state_view(of.spans)).ticket();
        const commit_status status = ticket.wait();
        saves.flush();
        storage.set_faults({});
        const std::uint64_t newest = find_checkpoint(storage).found->id.step;
        if (status == commit_status::committed) {
          CHECK(newest == 2);
          CHECK(ticket.why() == "");
          ended = saves.stats().last_error.empty();  // else it met what comes behind the commit
        } else {
          CHECK(newest == (status == commit_status::not_committed ? 1 : 2));
          CHECK(ticket.why().find("Disk quota exceeded") != std::string::npos);
          CHECK(saves.stats().last_error == ticket.why());
        }
        if (status == commit_status::durability_uncertain) continue;  // no sync of that folder is believed
        CHECK(saves.begin_snapshot(3, host_state_view(of.spans)).ticket().wait() == commit_status::committed);
        CHECK(saves.stats().staging_bytes == 0);
      }
    }
  }

  TEST_CASE("a full disk is detected before anything is written") {
    state of(5);
    simulated_storage_options options;
    options.capacity = of.total() / 2;
    simulated_storage storage(options);
    solo_coordinator coordinator(storage);
    checkpointer saves(coordinator, of.tensors, tiny);
    const commit_ticket ticket = saves.begin_snapshot(1, host_state_view(of.spans)).ticket();
    CHECK(ticket.wait() == commit_status::not_committed);
    CHECK(ticket.why().find("space cannot be allocated for the file: No space left on device") !=
          std::string::npos);
    saves.flush();
    CHECK(storage.folders().empty());
  }

  TEST_CASE("a hung disk stalls the training at most as long as allowed") {
    state of(5);
    simulated_storage storage;
    stuck_coordinator coordinator(storage);
    coordinator.close();
    checkpointer_options options = tiny;
    options.max_stall_ns = 20'000'000;
    async_checkpointer<stuck_traits> saves(coordinator, of.tensors, options);
    snapshot_guard guard = saves.begin_snapshot(1, host_state_view(of.spans));
    const commit_ticket ticket = guard.ticket();
    {
      const mutation_permit permit = std::move(guard).mutate();
      of.fill(2);
    }
    CHECK(saves.stats().stall_ns >= 20'000'000);
    CHECK(!saves.flush(1'000'000));
    CHECK(ticket.wait_for(1'000'000) == commit_status::pending);
    coordinator.open();
    CHECK(ticket.wait() == commit_status::not_committed);
    CHECK(ticket.why() ==
          "async_checkpointer: step 1 was abandoned: it stalled the training for longer than max_stall_ns");
    CHECK(saves.flush());
    CHECK(saves.begin_snapshot(2, host_state_view(of.spans)).ticket().wait() == commit_status::committed);
    CHECK(what_is_wrong(storage, of, 2) == "");
  }

  TEST_CASE("a snapshot during another one is skipped and reports that, or waits") {
    state of(5);
    simulated_storage storage;
    stuck_coordinator coordinator(storage);
    coordinator.close();
    async_checkpointer<stuck_traits> saves(
        coordinator, of.tensors,
        {.ring_bytes = 1 << 16, .chunk_bytes = 256, .max_pending = 1, .busy = when_busy::skip});
    const commit_ticket first = saves.begin_snapshot(1, host_state_view(of.spans)).ticket();
    const commit_ticket second = saves.begin_snapshot(2, host_state_view(of.spans)).ticket();
    CHECK(second.status() == commit_status::not_committed);
    CHECK(second.why() == "async_checkpointer: 1 snapshots before it are still being written");
    CHECK(saves.stats().skipped == 1);
    CHECK(saves.progress().step == 1);
    CHECK(saves.progress().bytes == saves.plan().bytes);
    coordinator.open();
    CHECK(first.wait() == commit_status::committed);
    saves.flush();
    CHECK(saves.progress().bytes == 0);
  }

  TEST_CASE("a snapshot that waits for its turn does not wait for ever") {
    state of(5);
    simulated_storage storage;
    stuck_coordinator coordinator(storage);
    coordinator.close();
    async_checkpointer<stuck_traits> saves(
        coordinator, of.tensors,
        {.ring_bytes = 1 << 16, .chunk_bytes = 256, .max_pending = 1, .max_stall_ns = 500'000'000});
    const commit_ticket first = saves.begin_snapshot(1, host_state_view(of.spans)).ticket();
    const commit_ticket second = saves.begin_snapshot(2, host_state_view(of.spans)).ticket();
    CHECK(second.status() == commit_status::not_committed);
    CHECK(second.why() ==
          "async_checkpointer: 1 snapshots before it are still being written, for longer than max_stall_ns");
    CHECK(saves.stats().stall_ns >= 500'000'000);
    coordinator.open();
    CHECK(first.wait() == commit_status::committed);
    CHECK(saves.begin_snapshot(3, host_state_view(of.spans)).ticket().wait() == commit_status::committed);
  }

  TEST_CASE("a snapshot that begins while the state is being changed is refused") {
    state of(5);
    simulated_storage storage;
    solo_coordinator coordinator(storage);
    checkpointer saves(coordinator, of.tensors, tiny);
    {
      const mutation_permit permit = saves.gate().mutate();
      CHECK(
          text_of([&] { static_cast<void>(saves.begin_snapshot(1, host_state_view(of.spans))); }) ==
          "snapshot_gate: a snapshot begins while the state is being changed: 1 permits are alive; begin it "
          "between two steps, or end them first");
    }
    CHECK(saves.begin_snapshot(1, host_state_view(of.spans)).ticket().wait() == commit_status::committed);
    CHECK(saves.stats().begun == 1);
  }

  TEST_CASE("a rank without tensors makes an empty checkpoint") {
    simulated_storage storage;
    solo_coordinator coordinator(storage);
    checkpointer saves(coordinator, {}, tiny);
    CHECK(saves.begin_snapshot(1, host_state_view({})).ticket().wait() == commit_status::committed);
    CHECK(find_checkpoint(storage).found->manifest.files.empty());
  }

  TEST_CASE("bytes that are described but not provided end the checkpoint, and nothing beyond them is read") {
    state of(5);
    simulated_storage storage;
    solo_coordinator coordinator(storage);
    checkpointer saves(coordinator, of.tensors, tiny);
    of.spans[1] = of.spans[1].first(of.spans[1].size() - 1);
    const commit_ticket ticket = saves.begin_snapshot(1, host_state_view(of.spans)).ticket();
    CHECK(ticket.wait() == commit_status::not_committed);
    CHECK(ticket.why().find("of tensor 1 do not exist: pass a span for each described tensor") !=
          std::string::npos);
  }

  TEST_CASE("the copying thread destroys a view before the state may change") {
    state of(5);
    simulated_storage storage;
    stuck_coordinator coordinator(storage);
    coordinator.close();
    async_checkpointer<holding_traits> saves(coordinator, of.tensors,
                                             {.ring_bytes = 1 << 16, .chunk_bytes = 256});
    const auto lease = std::make_shared<std::atomic<int>>(0);
    {
      snapshot_guard guard = saves.begin_snapshot(1, holding{lease});
      const mutation_permit permit = std::move(guard).mutate();
      CHECK(lease.use_count() == 1);
      CHECK(text_of([&] { static_cast<void>(std::move(guard).mutate()); }) ==  // NOLINT: that is the test
            "snapshot_guard: it was moved from, or has given its permit");
    }
    coordinator.open();
  }

  TEST_CASE("an exception of an observer ends nothing") {
    state of(5);
    simulated_storage storage;
    solo_coordinator coordinator(storage);
    async_checkpointer<throwing_traits> saves(coordinator, of.tensors, tiny);
    CHECK(saves.begin_snapshot(1, host_state_view(of.spans)).ticket().wait() == commit_status::committed);
    saves.flush();
    CHECK(saves.stats().last_error == "the observer threw");
  }

  TEST_CASE("a wait for a ticket ends in time, also if the owner copies") {
    state of(5);
    simulated_storage storage;
    stuck_coordinator coordinator(storage);
    coordinator.close();
    checkpointer_options options = tiny;
    options.max_stall_ns = 2'000'000'000;
    async_checkpointer<owners_stuck> saves(coordinator, of.tensors, options);
    snapshot_guard guard = saves.begin_snapshot(1, owners_view(of));
    CHECK(guard.ticket().wait_for(1'000'000) == commit_status::pending);
    CHECK(saves.gate().is_frozen());
    CHECK(saves.stats().stall_ns < 1'000'000'000);
    coordinator.open();
    CHECK(guard.ticket().wait() == commit_status::committed);
  }

  TEST_CASE(
      "after a save that failed on a full disk, removable checkpoints are removed, and the next one fits") {
    state of(5);
    simulated_storage storage;
    solo_coordinator many(storage, keep_last_and_every{.last = 9});
    {
      checkpointer saves(many, of.tensors, tiny);
      for (const std::uint64_t step : {1U, 2U, 3U, 4U})
        CHECK(saves.begin_snapshot(step, host_state_view(of.spans)).ticket().wait() ==
              commit_status::committed);
    }
    std::size_t used = 0;
    for (const auto& [path, bytes] : storage.files())
      used += bytes.size();
    simulated_storage_options options;
    options.capacity = used + 100;
    simulated_storage tight(options);
    {
      solo_coordinator filling(tight, keep_last_and_every{.last = 9});
      checkpointer saves(filling, of.tensors, tiny);
      for (const std::uint64_t step : {1U, 2U, 3U, 4U})
        CHECK(saves.begin_snapshot(step, host_state_view(of.spans)).ticket().wait() ==
              commit_status::committed);
    }
    solo_coordinator few(tight, keep_last_and_every{.last = 2});
    checkpointer saves(few, of.tensors, tiny);
    CHECK(saves.begin_snapshot(5, host_state_view(of.spans)).ticket().wait() == commit_status::not_committed);
    saves.flush();
    CHECK(list_checkpoints(tight).size() == 2);
    CHECK(saves.begin_snapshot(6, host_state_view(of.spans)).ticket().wait() == commit_status::committed);
  }

  TEST_CASE("impossible options are refused, each with the wrong number") {
    state of(5);
    simulated_storage storage;
    solo_coordinator coordinator(storage);
    const auto refusal = [&](const checkpointer_options& options) {
      return text_of([&] { const checkpointer saves(coordinator, of.tensors, options); });
    };
    CHECK(refusal({.ring_bytes = 511, .chunk_bytes = 256}) ==
          "async_checkpointer: a ring of 511 bytes for chunks of 256; it needs space for two of them");
    CHECK(refusal({.chunk_bytes = 0}) == "async_checkpointer: chunks of 0 bytes; they have 1 to 1073741824");
    CHECK(refusal({.max_pending = 0}) == "async_checkpointer: max_pending is 0; it may be 1 to 1024");
  }

  // Threads are in it, but what reaches the storage is the same each time.
  TEST_CASE("if the power fails at any call, acknowledged checkpoints are there, and nothing hangs") {
    state of(11, 3, 300);
    simulated_storage_options options;
    options.sector_bytes = 64;
    std::optional<std::uint64_t> told;
    const auto sweep = llmmem::testing::sweep_power_cuts(
        simulated_storage(options),
        [&](simulated_storage& storage) {
          told = std::nullopt;
          solo_coordinator coordinator(storage);
          checkpointer saves(coordinator, of.tensors, {.ring_bytes = 1024, .chunk_bytes = 256});
          for (const std::uint64_t step : {10U, 20U, 30U}) {
            if (llmmem_tests::is_watched && step == 30) break;
            {
              const mutation_permit permit = saves.gate().mutate();
              of.fill(step);
            }
            const commit_ticket ticket = saves.begin_snapshot(step, host_state_view(of.spans)).ticket();
            if (ticket.wait() == commit_status::committed) told = step;
          }
        },
        [&](simulated_storage& after) {
          const checkpoint_search search = find_checkpoint(after);
          if (told) REQUIRE(search.found);
          if (!search.found) return;
          if (told) REQUIRE(search.found->id.step >= *told);
          REQUIRE(what_is_wrong(after, of, search.found->id.step) == "");
        },
        llmmem_tests::is_watched ? crash_limits{.exhaustive_up_to = 1, .samples = 2, .seed = 1, .tears = 1}
                                 : crash_limits{.exhaustive_up_to = 6, .samples = 8, .seed = 1, .tears = 1});
    CHECK(sweep.power_cuts > 60);
  }

  TEST_CASE("a wait that ends before the copy counts as no further stall, and delays no write") {
    class slow_view : public owners_view {
     public:
      using owners_view::owners_view;
      void copy_out(std::uint32_t tensor, std::uint64_t offset, std::span<std::byte> into) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        owners_view::copy_out(tensor, offset, into);
      }
    };
    struct slow_traits : traits {
      using view_type = slow_view;
    };
    state of(3);
    of.fill(1);
    simulated_storage storage;
    solo_coordinator coordinator(storage);
    async_checkpointer<slow_traits> saves(
        coordinator, of.tensors, {.ring_bytes = 1 << 20, .chunk_bytes = 64, .max_stall_ns = 1'500'000'000});
    const snapshot_guard guard = saves.begin_snapshot(1, slow_view(of));
    CHECK(guard.ticket().wait_for(3'000'000) == commit_status::pending);
    REQUIRE(!guard.is_staged());
    // The forward pass: nobody waits. What was copied is written meanwhile.
    const auto began = std::chrono::steady_clock::now();
    while (std::chrono::steady_clock::now() - began < std::chrono::milliseconds(1600))
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    CHECK(saves.progress().persisted > 0);
    guard.wait_staged();
    CHECK(guard.ticket().wait() == commit_status::committed);
    CHECK(guard.ticket().why() == "");
    CHECK(what_is_wrong(storage, of, 1) == "");
  }
}
