#include <llmmem/async_checkpointer.hpp>
#include <llmmem/checkpoint/load.hpp>
#include <llmmem/testing/simulated_storage.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/stuck_coordinator.hpp"

using namespace llmmem;
using llmmem::testing::simulated_storage;
using llmmem_tests::stuck_coordinator;

namespace {

using bytes = std::vector<std::byte>;

/// Where views are let go of, and whether by their owner alone.
struct watched {
  bytes contents;
  std::thread::id owner = std::this_thread::get_id();
  std::atomic<int>* gone = nullptr;
  std::atomic<int>* elsewhere = nullptr;

  watched(bytes of, std::atomic<int>& counts, std::atomic<int>& strays)
      : contents(std::move(of)), gone(&counts), elsewhere(&strays) {}
  watched(const watched&) = delete;
  watched& operator=(const watched&) = delete;
  ~watched() {
    if (std::this_thread::get_id() != owner) ++*elsewhere;
    ++*gone;
  }
};

/// A copy of the state: as stable as can be.
template <bool IsConcurrent>
class copied_view {
 public:
  static constexpr bool is_concurrent = IsConcurrent;
  static constexpr bool is_stable = true;

  explicit copied_view(std::shared_ptr<const watched> of) : of_(std::move(of)) {}
  void copy_out(std::uint32_t /*tensor*/, std::uint64_t offset, std::span<std::byte> into) const {
    if (!IsConcurrent && std::this_thread::get_id() != of_->owner) ++*of_->elsewhere;
    std::memcpy(into.data(), of_->contents.data() + offset, into.size());
  }

 private:
  std::shared_ptr<const watched> of_;
};

struct says_no {
  static constexpr bool is_concurrent = true;
  static constexpr bool is_stable = false;
  void copy_out(std::uint32_t /*tensor*/, std::uint64_t /*offset*/, std::span<std::byte> /*into*/) const {}
};

static_assert(is_stable_view<copied_view<true>> && !is_stable_view<host_state_view> &&
              !is_stable_view<says_no> && state_view<says_no>);
static_assert(!change_tracking_view<copied_view<true>>);

template <class View>
struct traits : checkpointer_traits {
  using storage_type = simulated_storage;
  using coordinator_type = stuck_coordinator;
  using view_type = View;
};

constexpr std::size_t state_bytes = 4000;
const checkpointer_options tiny{.ring_bytes = 512, .chunk_bytes = 256};

struct world {
  simulated_storage storage{};
  stuck_coordinator coordinator{storage};
  std::vector<state_tensor> tensors{
      {.name = "state", .type = safetensors_type::u8, .shape = {state_bytes}, .group = "model", .part = {}}};
  bytes state = bytes(state_bytes);
  std::atomic<int> gone{0};
  std::atomic<int> elsewhere{0};

  void fill(std::uint64_t step) {
    for (std::size_t i = 0; i < state.size(); ++i)
      state[i] = static_cast<std::byte>((step * 37 + i) % 251);
  }
  template <class View>
  [[nodiscard]] View view() {
    return View(std::make_shared<const watched>(state, gone, elsewhere));
  }
  /// Whether the newest checkpoint is of that step, to the byte.
  [[nodiscard]] bool has(std::uint64_t step) {
    const checkpoint_search search = find_checkpoint(storage);
    if (!search.found || search.found->id.step != step) return false;
    bytes loaded(state_bytes);
    const wanted_tensor wanted[] = {{.name = "state",
                                     .part = {},
                                     .type = safetensors_type::u8,
                                     .shape = std::vector<std::uint64_t>{state_bytes}}};
    load_checkpoint(storage, *search.found, wanted,
                    [&](std::uint32_t, std::uint64_t offset, std::span<const std::byte> part) {
                      std::memcpy(loaded.data() + offset, part.data(), part.size());
                    },
                    {.readers = 1});
    bytes kept = std::exchange(state, bytes(state_bytes));
    fill(step);
    std::swap(kept, state);
    return loaded == kept;
  }
};

}  // namespace

TEST_SUITE("stable_view") {
  TEST_CASE("the state may change while a stable view of it is saved, for any behaviour of the disk") {
    using view = copied_view<true>;
    world w;
    async_checkpointer<traits<view>> saves(w.coordinator, w.tensors, tiny);
    w.fill(1);
    w.coordinator.close();
    commit_ticket ticket;
    {
      snapshot_guard guard = saves.begin_snapshot(1, w.view<view>());
      ticket = guard.ticket();
      CHECK(!guard.is_staged());  // the ring is smaller than the state, and nothing leaves it
      CHECK(!saves.gate().is_frozen());
      const mutation_permit permit = std::move(guard).mutate();
      CHECK(!guard.is_staged());
      w.fill(2);
      const mutation_permit another = saves.gate().mutate();
    }
    {
      const snapshot_guard goes_at_once = saves.begin_snapshot(2, w.view<view>());
      CHECK(!goes_at_once.is_staged());
    }
    w.fill(3);
    CHECK(ticket.status() == commit_status::pending);
    CHECK(w.gone == 0);
    CHECK(saves.stats().stall_ns == 0);
    w.coordinator.open();
    CHECK(ticket.wait() == commit_status::committed);
    saves.flush();
    CHECK(w.gone == 2);
    CHECK(w.has(2));
    CHECK(saves.stats().stall_ns == 0);
    CHECK(saves.stats().committed == 2);
  }

  TEST_CASE(
      "a caller that waits until a stable view has been read finds its memory free, and learns how long that "
      "took") {
    using view = copied_view<true>;
    world w;
    async_checkpointer<traits<view>> saves(w.coordinator, w.tensors, tiny);
    w.coordinator.close();
    w.fill(1);
    const snapshot_guard first = saves.begin_snapshot(1, w.view<view>());
    std::thread opens([&] { w.coordinator.open(); });
    first.wait_staged();
    CHECK(first.is_staged());
    CHECK(w.gone == 1);
    first.wait_staged();
    opens.join();
    saves.flush();
    CHECK(w.has(1));
    w.coordinator.close();
    const snapshot_guard second = saves.begin_snapshot(2, w.view<view>());
    CHECK(first.is_staged());  // each guard tells of its own
    CHECK(!second.is_staged());
    w.coordinator.open();
  }

  TEST_CASE(
      "a disk that hangs costs a caller that waits for a stable view max_stall_ns, and that checkpoint") {
    using view = copied_view<true>;
    world w;
    checkpointer_options impatient = tiny;
    impatient.max_stall_ns = 2'000'000;
    async_checkpointer<traits<view>> saves(w.coordinator, w.tensors, impatient);
    w.coordinator.close();
    const snapshot_guard guard = saves.begin_snapshot(1, w.view<view>());
    guard.wait_staged();
    CHECK(guard.is_staged());
    CHECK(w.gone == 1);
    CHECK(saves.stats().stall_ns >= impatient.max_stall_ns);
    w.coordinator.open();
    CHECK(guard.ticket().wait() == commit_status::not_committed);
    CHECK(guard.ticket().why() ==
          "async_checkpointer: step 1 was abandoned: it stalled the training for longer than max_stall_ns");
  }

  TEST_CASE("a snapshot of a stable view does not begin within a step, either") {
    using view = copied_view<true>;
    world w;
    async_checkpointer<traits<view>> saves(w.coordinator, w.tensors, tiny);
    {
      const mutation_permit permit = saves.gate().mutate();
      CHECK_THROWS_WITH_AS(
          saves.begin_snapshot(1, w.view<view>()),
          "snapshot_gate: a snapshot begins while the state is being changed: 1 permits are alive; begin it "
          "between two steps, or end them first",
          argument_error);
      CHECK(w.gone == 1);
      CHECK(saves.stats().begun == 0);
    }
    CHECK(!saves.gate().is_frozen());
    CHECK(saves.begin_snapshot(1, w.view<view>()).ticket().wait() == commit_status::committed);
  }

  TEST_CASE(
      "a stable view that only its owner reads is copied by stage_for, and destroyed on the owner's thread") {
    using view = copied_view<false>;
    world w;
    checkpointer_options some = tiny;
    some.ring_bytes = 2048;
    async_checkpointer<traits<view>> saves(w.coordinator, w.tensors, some);
    w.fill(1);
    w.coordinator.close();
    const snapshot_guard guard = saves.begin_snapshot(1, w.view<view>());
    const mutation_permit permit = saves.gate().mutate();
    w.fill(9);
    CHECK(!saves.stage_for(0));
    CHECK(saves.progress().staged == 0);
    CHECK(!saves.stage_for(commit_ticket::forever));  // no further than the ring
    CHECK(saves.progress().staged == 2048);
    CHECK(!guard.is_staged());
    w.coordinator.open();
    while (!saves.stage_for(1'000'000))
      std::this_thread::yield();
    CHECK(guard.is_staged());
    CHECK(w.gone == 1);
    CHECK(guard.ticket().wait() == commit_status::committed);
    CHECK(w.has(1));
    CHECK(saves.stage_for(1));
    CHECK(saves.stats().stall_ns == 0);
    CHECK(w.elsewhere == 0);
  }

  TEST_CASE(
      "views that only their owner reads are destroyed on its thread: given up, skipped, refused or "
      "flushed") {
    using view = copied_view<false>;
    world w;
    checkpointer_options impatient = tiny;
    impatient.max_stall_ns = 200'000'000;
    impatient.max_pending = 1;
    impatient.busy = when_busy::skip;
    {
      async_checkpointer<traits<view>> saves(w.coordinator, w.tensors, impatient);
      w.coordinator.close();
      const snapshot_guard given_up = saves.begin_snapshot(1, w.view<view>());
      const snapshot_guard skipped = saves.begin_snapshot(2, w.view<view>());
      CHECK(skipped.is_staged());
      skipped.wait_staged();
      CHECK(w.gone == 1);
      given_up.wait_staged();
      CHECK(given_up.is_staged());
      CHECK(w.gone == 2);
      w.coordinator.open();
      CHECK(given_up.ticket().wait() == commit_status::not_committed);
      saves.flush();
      CHECK_THROWS_AS(saves.begin_snapshot(3, w.view<view>(), {{"note", {}}, {"note", {}}}), argument_error);
      CHECK(w.gone == 3);
      w.fill(4);
      static_cast<void>(saves.begin_snapshot(4, w.view<view>()));
      CHECK(w.gone == 3);
    }
    CHECK(w.gone == 4);
    CHECK(w.elsewhere == 0);
    CHECK(w.has(4));
  }

  TEST_CASE("a failed write waits until the owner has released the view") {
    using view = copied_view<false>;
    world w;
    async_checkpointer<traits<view>> saves(w.coordinator, w.tensors, tiny);
    w.storage.set_faults(
        {{.call = {}, .first = 1, .number = ENOSPC, .what = llmmem::testing::storage_fault::kind::refused}});
    const snapshot_guard guard = saves.begin_snapshot(1, w.view<view>());
    CHECK(guard.ticket().wait() == commit_status::not_committed);
    CHECK(saves.flush());
    CHECK(w.gone == 1);
    CHECK(w.elsewhere == 0);
  }
}
