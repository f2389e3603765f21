/// Engines and devices that stop working, and what becomes of the operations of a queue over them.
#include <llmmem/testing/faulty_io.hpp>
#include <llmmem/transfer/file_queue.hpp>
#if defined(LLMMEM_TESTS_URING)
#include <llmmem/transfer/uring_io.hpp>
#endif

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#include "support/temporary_folder.hpp"

using namespace llmmem;
using llmmem::testing::faulty_io;
using llmmem::testing::io_fault;
using llmmem::testing::planned_fault;
using llmmem_tests::temporary_folder;

namespace {

using fault_plan = std::vector<planned_fault>;

constexpr std::size_t file_bytes = 40'960;

struct small_file {
  temporary_folder folder;
  io_file file{folder.file("data"), {.direct = direct_io::never}};
  std::vector<std::byte> memory = std::vector<std::byte>(file_bytes, std::byte{7});

  small_file() {
    file_queue<> queue({.driver = llmmem::transfer::driven_by::waiters});
    queue.start(write_to(file, 0, memory)).value().wait();
  }
};

/// What a test tells an engine to do, and sees of it. Outlives the queue.
struct orders {
  std::atomic<int> refused_reaps{0};  ///< that many fail with EEXIST
  std::atomic<std::uint64_t> reaps{0};
  std::atomic<std::uint32_t> left{0};  ///< in flight when the engine was destroyed
  std::atomic<int> answers_after{0};   ///< reaps that bring nothing first
  std::atomic<bool> backwards{false};  ///< last asked, first answered
  std::vector<std::uint64_t> order{};  ///< offsets, as they were queued
};

/// Answers when and as it is told to.
class ordered_io {
 public:
  ordered_io(orders& told, std::uint32_t depth) : told_(&told), depth_(depth) {}
  ordered_io(const ordered_io&) = delete;
  ordered_io& operator=(const ordered_io&) = delete;
  ~ordered_io() { told_->left = in_flight(); }

  [[nodiscard]] io_caps caps() const noexcept { return {.name = "ordered", .depth = depth_}; }
  [[nodiscard]] std::uint32_t in_flight() const noexcept { return static_cast<std::uint32_t>(held_.size()); }
  [[nodiscard]] bool try_queue(const io_request& request) noexcept {
    if (held_.size() == depth_) return false;
    held_.push_back(request);
    told_->order.push_back(request.offset);
    return true;
  }
  [[nodiscard]] result<std::size_t> reap(std::span<io_completion> out, const io_wait&) noexcept {
    ++told_->reaps;
    if (told_->refused_reaps > 0) {
      --told_->refused_reaps;
      return failure{.code = errc::engine_failed, .index = EEXIST, .where = "ordered_io"};
    }
    if (told_->answers_after > 0) {
      --told_->answers_after;
      return std::size_t{0};
    }
    if (held_.empty() || out.empty()) return std::size_t{0};
    const auto place = told_->backwards ? held_.end() - 1 : held_.begin();
    out[0] = {place->tag, detail::run_request(*place)};
    held_.erase(place);
    return std::size_t{1};
  }
  void wake() noexcept {}

 private:
  orders* told_;
  std::uint32_t depth_;
  std::vector<io_request> held_;
};

static_assert(io_engine<ordered_io>);

constexpr std::array both_drivers{llmmem::transfer::driven_by::own_thread,
                                  llmmem::transfer::driven_by::waiters};

}  // namespace

TEST_CASE("an engine with occasional failures is tried again, and nothing is lost") {
  for (const llmmem::transfer::driven_by driver : both_drivers) {
    small_file small;
    orders told;
    told.refused_reaps = 5;
    file_queue<ordered_io> queue({.driver = driver, .max_attempts = 6}, told, 2U);
    CHECK(queue.start(read_from(small.file, 0, small.memory)).value().settled());
    CHECK(queue.stats().lost == 0);
  }
}

TEST_CASE("an engine that always fails ends every operation with its own error, and no call waits for ever") {
  for (const llmmem::transfer::driven_by driver : both_drivers) {
    small_file small;
    orders told;
    told.refused_reaps = 1'000'000;
    {
      file_queue<ordered_io> queue({.driver = driver, .block_bytes = 4096, .max_attempts = 3}, told, 2U);
      const failure wanted{.code = errc::engine_failed, .index = EEXIST};
      const auto begun = queue.start(read_from(small.file, 0, small.memory)).value();
      const auto behind =
          queue.start(read_from(small.file, 0, small.memory), llmmem::transfer::urgency::demand, begun)
              .value();
      CHECK(begun.settled().error() == wanted);
      CHECK(begun.settled().error().message() ==
            "ordered_io: the I/O engine failed: File exists (errno 17); construct the queue again, or on "
            "posix_io");
      CHECK(behind.settled().code() == errc::dependency_failed);
      CHECK(queue.stats().lost == 2);
      // Those to come fail as well.
      CHECK_FALSE(queue.start(read_from(small.file, 0, small.memory)).value().settled());
      queue.wait_idle();
    }
    CHECK(told.left == 2);
  }
}

TEST_CASE(
    "an engine that works again after it was given up serves again, once the lost requests are answered") {
  for (const llmmem::transfer::driven_by driver : both_drivers) {
    small_file small;
    orders told;
    told.refused_reaps = 3;
    file_queue<ordered_io> queue({.driver = driver, .max_attempts = 3}, told, 1U);
    CHECK(queue.start(read_from(small.file, 0, small.memory)).value().settled().code() ==
          errc::engine_failed);
    // The only slot is lost until its answer is taken in.
    result<void> outcome = queue.start(read_from(small.file, 0, small.memory)).value().settled();
    for (int i = 0; i < 1000 && !outcome; ++i) {
      queue.clear_failures();
      outcome = queue.start(read_from(small.file, 0, small.memory)).value().settled();
    }
    CHECK(outcome);
  }
}

TEST_CASE("when every slot is lost, the device counts as dead: later operations fail at once") {
  for (const llmmem::transfer::driven_by driver : both_drivers) {
    small_file small;
    file_queue<faulty_io<posix_io>> queue({.driver = driver, .give_up_ns = 1'000'000},
                                          fault_plan{{.what = io_fault::lost}});
    CHECK(queue.start(read_from(small.file, 0, small.memory)).value().settled().code() ==
          errc::completion_lost);
    CHECK(queue.start(read_from(small.file, 4096, std::span(small.memory).first(512)))
              .value()
              .settled()
              .error() == failure{errc::completion_lost, 0, 512, 4096});
  }
}

TEST_CASE("a destroyed queue waits for the requests that it gave up") {
  for (const llmmem::transfer::driven_by driver : both_drivers) {
    small_file small;
    orders told;
    told.answers_after = 40;
    {
      file_queue<ordered_io> queue({.driver = driver, .give_up_ns = 1}, told, 4U);
      CHECK(queue.start(read_from(small.file, 0, small.memory)).value().settled().code() ==
            errc::completion_lost);
    }
    CHECK(told.left == 0);
  }
}

TEST_CASE("a temporarily refused request is retried after a pause, which grows each time") {
  small_file small;
  for (const llmmem::transfer::driven_by driver : both_drivers) {
    orders told;
    file_queue<faulty_io<ordered_io>> queue(
        {.driver = driver}, fault_plan{{.what = io_fault::error, .every = 1, .count = 20, .number = EAGAIN}},
        told, 1U);
    timespec before{};
    ::clock_gettime(CLOCK_MONOTONIC, &before);
    CHECK(queue.start(read_from(small.file, 0, small.memory)).value().settled());
    timespec after{};
    ::clock_gettime(CLOCK_MONOTONIC, &after);
    const auto took = (after.tv_sec - before.tv_sec) * 1'000'000'000LL + after.tv_nsec - before.tv_nsec;
    CHECK(queue.stats().retries == 20);
    CHECK(took >= 20 * 21 / 2 * 100'000LL);  // a sleep is never shorter than asked for
  }
}

TEST_CASE("the end of a file is found for any order of the answers") {
  small_file small;
  orders told;
  told.backwards = true;
  file_queue<ordered_io> queue({.driver = llmmem::transfer::driven_by::waiters, .block_bytes = 4096}, told,
                               16U);
  std::vector<std::byte> into(file_bytes + 20'000);
  const auto bad = queue.start(read_from(small.file, 0, into)).value();
  CHECK(bad.settled().error() == failure{errc::file_ends, 0, file_bytes + 20'000, file_bytes});
}

TEST_CASE("a file that shrinks during a read fails the read, which reports the present end") {
  small_file small;
  file_queue<> queue({.driver = llmmem::transfer::driven_by::waiters, .block_bytes = 4096});
  const auto bad = queue.start(read_from(small.file, 0, small.memory)).value();
  REQUIRE(small.file.resize(10'000));
  CHECK(bad.settled().error() == failure{errc::file_ends, 0, file_bytes, 10'000});
}

TEST_CASE("operations that finish at once let those after them begin at once") {
  small_file small;
  transfer_board others(1, 1, {});
  const std::uint32_t gate = others.begin("gate").value();
  const transfer_fence go = others.fence(gate);
  file_queue<> queue({.driver = llmmem::transfer::driven_by::waiters});
  // The second is asked for first in the list of those that wait.
  const auto nothing =
      queue.start(std::span<const file_copy>{}, llmmem::transfer::urgency::demand, std::span(&go, 1)).value();
  const auto behind =
      queue.start(std::span<const file_copy>{}, llmmem::transfer::urgency::demand, std::span(&nothing, 1))
          .value();
  const auto last =
      queue.start(std::span<const file_copy>{}, llmmem::transfer::urgency::demand, std::span(&behind, 1))
          .value();
  others.finish(gate, {});
  queue.poll();
  CHECK((nothing.ready() && behind.ready() && last.ready()));
}

TEST_CASE("an operation after one of another queue begins when that is over, without a call") {
  small_file small;
  transfer_board others(1, 1, {});
  const std::uint32_t gate = others.begin("gate").value();
  const transfer_fence go = others.fence(gate);
  file_queue<> queue;
  const auto behind =
      queue.start(read_from(small.file, 0, small.memory), llmmem::transfer::urgency::demand, go).value();
  const timespec while_it_sleeps{0, 5'000'000};
  ::nanosleep(&while_it_sleeps, nullptr);
  CHECK_FALSE(behind.ready());
  others.finish(gate, {});
  CHECK(behind.settled());
}

TEST_CASE("an operation reports the first failure") {
  small_file small;
  file_queue<faulty_io<posix_io>> queue(
      {.driver = llmmem::transfer::driven_by::waiters, .give_up_ns = 1'000'000},
      fault_plan{{.what = io_fault::lost}});
  const auto lost = queue.start(read_from(small.file, 0, small.memory)).value();
  queue.cancel(lost);
  CHECK_FALSE(lost.ready());
  CHECK(lost.settled().code() == errc::cancelled);
  CHECK(queue.stats().lost == 1);
}

TEST_CASE("a table full of failures is reported as such, and not as full of operations") {
  small_file small;
  file_queue<> queue({.driver = llmmem::transfer::driven_by::waiters, .max_failures = 1, .name = "tier"});
  std::vector<std::byte> into(4096);
  CHECK_FALSE(queue.start(read_from(small.file, file_bytes, into)).value().settled());
  CHECK(queue.start(read_from(small.file, 0, into)).error().message() ==
        "tier: 1 failures are kept, the most that the options allow; read them, then call clear_failures()");
}

TEST_CASE("a waiter returns when another waiter has completed its operation") {
  // One waiter holds the engine for as long as its own operation takes; the other's is over meanwhile.
  small_file small;
  transfer_board others(1, 1, {});
  const std::uint32_t gate = others.begin("gate").value();
  const transfer_fence go = others.fence(gate);
  file_queue<> queue({.driver = llmmem::transfer::driven_by::waiters, .block_bytes = 4096});
  const auto held =
      queue.start(read_from(small.file, 0, small.memory), llmmem::transfer::urgency::demand, go).value();
  std::thread waiter([&] { static_cast<void>(held.settled()); });
  // Were the lock held while it waits, none of this would come through.
  for (int i = 0; i < 20; ++i) {
    CHECK(queue.start(read_from(small.file, 0, small.memory)).value().settled());
  }
  queue.cancel(held);
  waiter.join();
  CHECK(held.outcome().code() == errc::cancelled);
  others.finish(gate, {});
}

TEST_CASE("a queue that waits to be idle lets other threads complete operations") {
  small_file small;
  transfer_board others(1, 1, {});
  const std::uint32_t gate = others.begin("gate").value();
  file_queue<> queue({.driver = llmmem::transfer::driven_by::waiters});
  const auto held = queue
                        .start(read_from(small.file, 0, small.memory), llmmem::transfer::urgency::demand,
                               others.fence(gate))
                        .value();
  std::thread waiter([&] { queue.wait_idle(); });
  queue.cancel(held);
  waiter.join();
  CHECK(held.outcome().code() == errc::cancelled);
  others.finish(gate, {});
}

TEST_CASE("a cancelled operation ends for its waiters, even if the driving thread waits for something else") {
  // Nothing is answered before the gate is opened; its reap sleeps until it is woken.
  struct gated_io {
    explicit gated_io(std::atomic<bool>& gate) : open(&gate) {}
    [[nodiscard]] io_caps caps() const noexcept { return {.name = "gated"}; }
    [[nodiscard]] std::uint32_t in_flight() const noexcept { return waiting ? 1 : 0; }
    [[nodiscard]] bool try_queue(const io_request& request) noexcept {
      if (waiting) return false;
      tag = request.tag;
      bytes = request.bytes;
      return waiting = true;
    }
    [[nodiscard]] result<std::size_t> reap(std::span<io_completion> out, const io_wait& wait) noexcept {
      if (wait.least != 0 && !*open) wakes.wait(seen);
      seen = wakes;
      if (!waiting || !*open) return std::size_t{0};
      out[0] = {tag, static_cast<std::int32_t>(bytes)};
      waiting = false;
      return std::size_t{1};
    }
    void wake() noexcept {
      ++wakes;
      wakes.notify_all();
    }
    std::atomic<bool>* open;
    std::atomic<std::uint32_t> wakes{0};
    std::uint32_t seen = 0;
    std::uint64_t tag = 0;
    std::uint32_t bytes = 0;
    bool waiting = false;
  };
  for (const llmmem::transfer::driven_by driver : both_drivers) {
    small_file small;
    std::atomic<bool> open{false};
    file_queue<gated_io> queue({.driver = driver}, open);
    const auto flying = queue.start(read_from(small.file, 0, small.memory)).value();
    const auto behind = queue.start(read_from(small.file, 0, small.memory)).value();
    const auto last =
        queue.start(read_from(small.file, 0, small.memory), llmmem::transfer::urgency::demand, behind)
            .value();
    std::thread first([&] { static_cast<void>(flying.settled()); });
    std::thread second([&] { static_cast<void>(behind.settled()); });
    queue.cancel(behind);
    second.join();
    CHECK(behind.outcome().code() == errc::cancelled);
    CHECK(last.settled().code() == errc::dependency_failed);
    // What the device has is not over before it comes back, cancelled or not: its memory is in use.
    queue.cancel(flying);
    CHECK_FALSE(flying.ready());
    open = true;
    // Whoever drives is woken by something to do.
    CHECK(queue.start(read_from(small.file, 0, small.memory)).value().settled());
    first.join();
    CHECK(flying.outcome().code() == errc::cancelled);
  }
}

#if defined(LLMMEM_TESTS_URING)
TEST_CASE("a ring for one thread fails when a second one calls it, and the operation ends") {
  small_file small;
  file_queue<uring_io> queue({.driver = transfer::driven_by::waiters, .max_attempts = 4},
                             uring_options{.depth = 4, .issuer = uring_issuer::one_thread});
  if (!queue.caps().fallback_reason.empty()) return;
  REQUIRE(queue.start(read_from(small.file, 0, small.memory)).value().settled());
  failure why;
  std::thread second(
      [&] { why = queue.start(read_from(small.file, 0, small.memory)).value().settled().error(); });
  second.join();
  CHECK(why == failure{.code = errc::engine_failed, .index = EEXIST});
  queue.clear_failures();
  // The first may go on.
  CHECK(queue.start(read_from(small.file, 0, small.memory)).value().settled());
}

TEST_CASE("a ring that is woken repeatedly is destroyed without a hang") {
  for (int i = 0; i < 50; ++i) {
    uring_io engine({.depth = 2});
    std::array<io_completion, 1> none{};
    engine.wake();
    CHECK(engine.reap(none, {.least = 1}).value() == 0);  // nothing is under way
    std::thread other([&] { engine.wake(); });
    other.join();
  }
}

TEST_CASE(
    "memory that cannot be registered is refused with the kernel's reason, and only transfers are slower") {
  small_file small;
  std::vector<std::byte> memory(8192);
  uring_io engine({.depth = 4});
  const std::array good{std::span(memory).first(4096)};
  REQUIRE(engine.register_memory({}));
  REQUIRE(engine.register_memory(good));
  const std::array twice{std::span(memory).subspan(4096)};
  CHECK(engine.register_memory(twice).error().message() ==
        "uring_io: register_memory: the I/O engine failed: Device or resource busy (errno 16); construct the "
        "queue again, or on posix_io");
  const std::vector<std::span<std::byte>> many(17, std::span(memory));
  CHECK(engine.register_memory(many).error() ==
        failure{.code = errc::out_of_range, .wanted = 17, .found = 16});
  // The ranges of the refused call were not taken for registered ones.
  for (const std::size_t at : {0U, 4096U}) {
    REQUIRE(engine.try_queue(
        {.file = small.file.buffered(), .bytes = 4096, .offset = at, .data = memory.data() + at, .tag = at}));
    std::array<io_completion, 4> done{};
    REQUIRE(engine.reap(done, {.least = 1}).value() == 1);
    CHECK(done[0].outcome == 4096);
    CHECK(memory[at] == std::byte{7});
  }
}

TEST_CASE("a queue passes memory on to an engine that registers it") {
  small_file small;
  std::vector<std::byte> into(file_bytes);
  file_queue<uring_io> queue({}, uring_options{.issuer = uring_issuer::one_thread});
  const std::array ranges{std::span(into)};
  REQUIRE(queue.register_memory(ranges));
  CHECK(queue.start(read_from(small.file, 0, into)).value().settled());
  CHECK(into == small.memory);
}
#endif
