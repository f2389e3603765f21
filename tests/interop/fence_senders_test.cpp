#include <llmmem/interop/fence_senders.hpp>

#include <doctest/doctest.h>
#include <llmmem/error.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/space/fence.hpp>
#include <llmmem/transfer/errors.hpp>
#include <llmmem/transfer/transfer_fence.hpp>

#include "support/heap_counter.hpp"
#include "support/noted_receiver.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

using namespace llmmem;
using llmmem_tests::completion_note;
using llmmem_tests::noted_receiver;

namespace {

// A board of operations that the test ends by hand.
struct operations {
  metadata_source metadata;
  transfer_board board{4, 4, metadata};

  struct running {
    std::uint32_t slot;
    transfer_fence fence;
  };
  running begin() {
    const std::uint32_t slot = board.begin("test").value();
    return {slot, board.fence(slot)};
  }
};

const failure refusal{.code = errc::completion_lost, .wanted = 4096, .found = 8192, .where = "a file"};

template <class Sender>
using operation_of = decltype(stdexec::connect(std::declval<Sender>(), std::declval<noted_receiver>()));

}  // namespace

TEST_CASE("a sender of a fence completes at the poll after the fence has passed, and not before") {
  fence_loop loop;
  host_timeline work;
  const host_fence copied = work.issue();
  completion_note note;
  auto operation = stdexec::connect(when_passed(loop, copied), noted_receiver(note));
  CHECK(loop.pending() == 0);
  stdexec::start(operation);
  CHECK(loop.pending() == 1);
  CHECK(loop.poll() == 0);
  CHECK(note.times == 0);
  REQUIRE(work.pass(copied));
  CHECK(note.times == 0);  // nothing happens outside of a poll
  CHECK(loop.poll() == 1);
  CHECK(note.times == 1);
  CHECK(note.how == "value");
  CHECK(loop.pending() == 0);
  CHECK(loop.poll() == 0);
}

TEST_CASE("a fence that has passed already completes at the next poll, never inside start") {
  fence_loop loop;
  completion_note note;
  auto operation = stdexec::connect(when_passed(loop, host_fence{}), noted_receiver(note));
  stdexec::start(operation);
  CHECK(note.times == 0);
  CHECK(loop.poll() == 1);
  CHECK(note.how == "value");
}

TEST_CASE("senders complete when their own fences pass, in the order of starts within one poll") {
  fence_loop loop;
  operations ops;
  const auto first = ops.begin();
  const auto second = ops.begin();
  const auto third = ops.begin();
  std::array<completion_note, 3> notes;
  std::vector<int> order;
  std::array<std::pair<std::vector<int>*, int>, 3> contexts{{{&order, 1}, {&order, 2}, {&order, 3}}};
  for (std::size_t i = 0; i < 3; ++i) {
    notes[i].context = &contexts[i];
    notes[i].then = [](void* context) {
      auto& [list, number] = *static_cast<std::pair<std::vector<int>*, int>*>(context);
      list->push_back(number);
    };
  }
  auto one = stdexec::connect(when_passed(loop, first.fence), noted_receiver(notes[0]));
  auto two = stdexec::connect(when_passed(loop, second.fence), noted_receiver(notes[1]));
  auto three = stdexec::connect(when_passed(loop, third.fence), noted_receiver(notes[2]));
  stdexec::start(one);
  stdexec::start(two);
  stdexec::start(three);
  ops.board.finish(second.slot, {});
  CHECK(loop.poll() == 1);
  ops.board.finish(third.slot, {});
  ops.board.finish(first.slot, {});
  CHECK(loop.poll() == 2);
  CHECK(order == std::vector<int>{2, 1, 3});
}

TEST_CASE(
    "a failed operation completes with the exception that its fence throws, and other copies still report "
    "it") {
  fence_loop loop;
  operations ops;
  const auto running = ops.begin();
  completion_note note;
  auto operation = stdexec::connect(when_passed(loop, running.fence), noted_receiver(note));
  stdexec::start(operation);
  ops.board.finish(running.slot, refusal);
  CHECK(loop.poll() == 1);
  CHECK(note.how == refusal.message());
  CHECK(running.fence.outcome().code() == errc::completion_lost);
  CHECK(ops.board.failures() == 1);
}

TEST_CASE("submit calls its work when it is started, and forgets the failure that it reports") {
  fence_loop loop;
  operations ops;
  std::optional<operations::running> running;
  completion_note note;
  auto sender = submit(loop, [&]() -> result<transfer_fence> {
    running = ops.begin();
    return running->fence;
  });
  auto operation = stdexec::connect(sender, noted_receiver(note));
  CHECK_FALSE(running.has_value());
  stdexec::start(operation);
  REQUIRE(running.has_value());
  CHECK(loop.poll() == 0);
  ops.board.finish(running->slot, refusal);
  CHECK(loop.poll() == 1);
  CHECK(note.how == refusal.message());
  CHECK(ops.board.failures() == 0);  // so that the board can keep others

  completion_note again;  // a sender can be connected any number of times if its work can be copied
  auto second = stdexec::connect(sender, noted_receiver(again));
  stdexec::start(second);
  ops.board.finish(running->slot, {});
  CHECK(loop.poll() == 1);
  CHECK(again.how == "value");
}

TEST_CASE("work that is refused or throws completes with that error, at a poll") {
  fence_loop loop;
  completion_note refused;
  completion_note thrown;
  auto one = stdexec::connect(submit(loop, [&]() -> result<host_fence> { return refusal; }),
                              noted_receiver(refused));
  auto two = stdexec::connect(submit(loop, [&]() -> host_fence { throw argument_error("no such file"); }),
                              noted_receiver(thrown));
  stdexec::start(one);
  stdexec::start(two);
  CHECK(refused.times == 0);
  CHECK(loop.poll() == 2);
  CHECK(refused.how == refusal.message());
  CHECK(thrown.how == "no such file");
}

TEST_CASE("a stop before the start leaves the work unstarted; a stop after it waits for the fence") {
  fence_loop loop;
  host_timeline timeline;
  int started = 0;
  const auto work = [&] {
    ++started;
    return timeline.issue();
  };
  completion_note early;
  early.stop_requested = true;
  auto one = stdexec::connect(submit(loop, work), noted_receiver(early));
  stdexec::start(one);
  CHECK(loop.poll() == 1);
  CHECK(early.how == "stopped");
  CHECK(started == 0);

  completion_note late;
  auto two = stdexec::connect(submit(loop, work), noted_receiver(late));
  stdexec::start(two);
  CHECK(started == 1);
  late.stop_requested = true;
  CHECK(loop.poll() == 0);  // the operation may still use its memory
  const host_fence end = timeline.issue();
  REQUIRE(timeline.pass(end));
  CHECK(loop.poll() == 1);
  CHECK(late.how == "value");
}

TEST_CASE("a scheduler's work runs at the next poll, or is stopped") {
  fence_loop loop;
  const auto scheduler = loop.get_scheduler();
  fence_loop other;
  CHECK(scheduler == loop.get_scheduler());
  CHECK(scheduler != other.get_scheduler());
  completion_note note;
  completion_note stopped;
  stopped.stop_requested = true;
  auto one = stdexec::connect(stdexec::schedule(scheduler), noted_receiver(note));
  auto two = stdexec::connect(stdexec::schedule(scheduler), noted_receiver(stopped));
  stdexec::start(one);
  stdexec::start(two);
  CHECK(note.times == 0);
  CHECK(loop.poll() == 2);
  CHECK(note.how == "value");
  CHECK(stopped.how == "stopped");
}

TEST_CASE("every sender names its loop as the scheduler on which it completes") {
  fence_loop loop;
  const auto names_it = [&](const auto& sender) {
    return stdexec::get_completion_scheduler<stdexec::set_value_t>(stdexec::get_env(sender)) ==
           loop.get_scheduler();
  };
  CHECK(names_it(when_passed(loop, host_fence{})));
  CHECK(names_it(submit(loop, [] { return host_fence{}; })));
  CHECK(names_it(stdexec::schedule(loop.get_scheduler())));
}

TEST_CASE("a continuation may end its operation, start others, and poll without effect") {
  fence_loop loop;
  struct chain {
    fence_loop* loop;
    completion_note first;
    completion_note second;
    std::optional<operation_of<passed_sender<host_fence>>> one;
    std::optional<operation_of<passed_sender<host_fence>>> two;
    std::size_t polled = 1;
  } world{&loop, {}, {}, {}, {}};
  // An operation state cannot be moved: it is made in its place.
  struct made {
    fence_loop* loop;
    completion_note* note;
    operator operation_of<passed_sender<host_fence>>() const {
      return stdexec::connect(when_passed(*loop, host_fence{}), noted_receiver(*note));
    }
  };
  world.first.context = &world;
  world.first.then = [](void* context) {
    auto& its = *static_cast<chain*>(context);
    its.polled = its.loop->poll();
    its.one.reset();
    its.two.emplace(made{its.loop, &its.second});
    stdexec::start(*its.two);
  };
  world.one.emplace(made{&loop, &world.first});
  stdexec::start(*world.one);
  CHECK(loop.poll() == 1);
  CHECK(world.polled == 0);
  CHECK(world.second.times == 0);
  CHECK(loop.pending() == 1);
  CHECK(loop.poll() == 1);
  CHECK(world.second.times == 1);
}

TEST_CASE("starting and completing allocate nothing") {
  fence_loop loop;
  completion_note note;
  note.how.reserve(32);
  const std::uint64_t before = llmmem_tests::heap_allocations();
  for (int i = 0; i < 10; ++i) {
    auto one = stdexec::connect(when_passed(loop, host_fence{}), noted_receiver(note));
    auto two = stdexec::connect(submit(loop, [] { return host_fence{}; }), noted_receiver(note));
    stdexec::start(one);
    stdexec::start(two);
    while (loop.poll() != 0) {
    }
  }
  CHECK(llmmem_tests::heap_allocations() == before);
  CHECK(note.times == 20);
}
