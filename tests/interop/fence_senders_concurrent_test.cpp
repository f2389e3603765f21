#include <llmmem/interop/fence_senders.hpp>

#include <doctest/doctest.h>
#include <llmmem/error.hpp>
#include <llmmem/space/fence.hpp>

#include "support/noted_receiver.hpp"

#include <atomic>
#include <cstddef>
#include <exception>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

using namespace llmmem;
using llmmem_tests::completion_note;
using llmmem_tests::noted_receiver;

namespace {

// An operation that is connected where it stays.
template <class Sender>
class kept_operation {
 public:
  kept_operation(Sender sender, completion_note& note)
      : operation_(stdexec::connect(std::move(sender), noted_receiver(note))) {}
  void start() noexcept { stdexec::start(operation_); }

 private:
  decltype(stdexec::connect(std::declval<Sender>(), std::declval<noted_receiver>())) operation_;
};

}  // namespace

TEST_CASE("operations started by several threads complete once each, on the thread that runs the loop") {
  constexpr int starters = 3;
  constexpr int each = 200;
  fence_loop loop;
  std::thread::id runner;
  std::atomic<bool> has_returned{false};
  std::thread runs([&] {
    runner = std::this_thread::get_id();
    loop.run();
    has_returned = true;
  });
  std::vector<completion_note> notes(starters * each);
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < starters; ++t) {
      threads.emplace_back([&, t] {
        host_timeline timeline;
        for (int i = 0; i < each; ++i) {
          completion_note& note = notes[static_cast<std::size_t>(t * each + i)];
          const host_fence fence = timeline.issue();
          kept_operation operation(submit(loop, [&] { return fence; }), note);
          operation.start();
          static_cast<void>(timeline.pass(fence));
          while (note.times == 0)
            std::this_thread::yield();
        }
      });
    }
  }
  CHECK_FALSE(has_returned);
  loop.finish();
  runs.join();
  CHECK(has_returned);
  CHECK(loop.pending() == 0);
  for (const completion_note& note : notes) {
    CHECK(note.times == 1);
    CHECK(note.how == "value");
    CHECK(note.thread == runner);
  }
}

TEST_CASE("run drains what is pending after finish, and calls the progress of a queue that needs it") {
  fence_loop loop;
  host_timeline timeline;
  const host_fence fence = timeline.issue();
  completion_note note;
  kept_operation operation(when_passed(loop, fence), note);
  operation.start();
  loop.finish();
  int calls = 0;
  loop.run([&]() noexcept {
    if (++calls == 5) static_cast<void>(timeline.pass(fence));
  });
  CHECK(calls >= 5);
  CHECK(note.how == "value");
  CHECK(loop.pending() == 0);
}

#if defined(LLMMEM_TESTS_STDEXEC)
TEST_CASE("stdexec's own algorithms compose senders of fences, of work and of the loop's scheduler") {
  fence_loop loop;
  std::jthread runs([&] { loop.run(); });
  const std::thread::id runner = runs.get_id();
  host_timeline timeline;
  int steps = 0;
  const auto passing = [&] {
    const host_fence fence = timeline.issue();
    static_cast<void>(timeline.pass(fence));
    return fence;
  };
  auto pipeline = submit(loop, passing) |
                  stdexec::then([&] { return std::this_thread::get_id() == runner; }) |
                  stdexec::let_value([&](bool& on_runner) {
                    return stdexec::when_all(submit(loop, passing), when_passed(loop, timeline.issue()),
                                             stdexec::schedule(loop.get_scheduler()) | stdexec::then([&] {
                                               static_cast<void>(timeline.pass(timeline.issue()));
                                             })) |
                           stdexec::then([&] {
                             ++steps;
                             return on_runner;
                           });
                  });
  const auto outcome = stdexec::sync_wait(std::move(pipeline));
  REQUIRE(outcome.has_value());
  CHECK(std::get<0>(*outcome));
  CHECK(steps == 1);

  auto failing = submit(loop, []() -> host_fence { throw argument_error("no such file"); });
  CHECK_THROWS_WITH_AS(stdexec::sync_wait(failing), "no such file", argument_error);
  bool was_told = false;
  CHECK(
      stdexec::sync_wait(failing | stdexec::upon_error([&](const std::exception_ptr&) { was_told = true; })));
  CHECK(was_told);
  auto moved = stdexec::on(loop.get_scheduler(),
                           stdexec::just() | stdexec::then([] { return std::this_thread::get_id(); }));
  CHECK(std::get<0>(*stdexec::sync_wait(std::move(moved))) == runner);
  loop.finish();
}
#endif
