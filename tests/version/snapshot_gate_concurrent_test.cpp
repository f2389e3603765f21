#include <llmmem/version/snapshot_gate.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "support/error_text.hpp"

using namespace llmmem;
using llmmem_tests::text_of;

TEST_CASE("a permit waits until the copy has ended, and the wait is counted") {
  snapshot_gate gate;
  guarded<int> state(gate, 0);
  // On a busy machine the copy may be over before this thread asks for its permit: then there is no wait to
  // count, and the next copy is waited for.
  int copies = 0;
  while (gate.waited_ns() == 0) {
    gate.freeze();
    CHECK(gate.is_frozen());
    std::atomic<int> copied{-1};
    std::thread copier([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      copied.store(state.read());
      gate.thaw();
    });
    const mutation_permit permit = gate.mutate();
    CHECK(copied.load() == copies);
    state.write(permit) = ++copies;
    copier.join();
    CHECK(state.read() == copies);
  }
}

TEST_CASE("with several copies in progress, a permit waits for the last") {
  snapshot_gate gate;
  gate.freeze();
  gate.freeze();
  gate.thaw();
  CHECK(gate.is_frozen());
  gate.thaw();
  CHECK(!gate.is_frozen());
  const mutation_permit permit = gate.mutate();
  CHECK(gate.waited_ns() == 0);
}

TEST_CASE("a waiting thread may do some of the copying itself") {
  struct copier {
    snapshot_gate gate{};
    int left = 3;
  } one;
  one.gate.freeze(
      [](void* self) {
        auto& all = *static_cast<copier*>(self);
        if (--all.left == 0) all.gate.thaw();
      },
      &one);
  const mutation_permit permit = one.gate.mutate();
  CHECK(one.left == 0);
}

TEST_CASE("no copy begins while a permit is alive, and permits end with their holder") {
  snapshot_gate gate;
  {
    mutation_permit first = gate.mutate();
    const mutation_permit second = gate.mutate();
    const mutation_permit moved = std::move(first);
    CHECK(moved.is_of(gate));
    CHECK(text_of([&] { gate.freeze(); }) ==
          "snapshot_gate: a snapshot begins while the state is being changed: 2 permits are alive; begin it "
          "between two steps, or end them first");
    CHECK(!gate.is_frozen());
  }
  gate.freeze();
  gate.thaw();
}

TEST_CASE("a permit of another gate changes nothing") {
  snapshot_gate gate;
  snapshot_gate other;
  guarded<int> state(gate, 1);
  mutation_permit theirs = other.mutate();
  mutation_permit ours = gate.mutate();
  CHECK(text_of([&] { state.write(theirs) = 2; }) ==
        "guarded: the permit is of another gate, or was moved from");
  const mutation_permit moved = std::move(ours);
  CHECK(text_of([&] { state.write(ours) = 2; }) ==  // NOLINT(bugprone-use-after-move): that is the test
        "guarded: the permit is of another gate, or was moved from");
  state.write(moved) = 3;
  CHECK(state.read() == 3);
}
