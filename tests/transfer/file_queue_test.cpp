#include <llmmem/testing/faulty_io.hpp>
#include <llmmem/transfer/file_queue.hpp>
#if defined(LLMMEM_TESTS_URING)
#include <llmmem/transfer/uring_io.hpp>
#endif

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using llmmem::testing::faulty_io;
using llmmem::testing::io_fault;
using llmmem::testing::planned_fault;
using llmmem_tests::random_numbers;
using llmmem_tests::seeds;
using llmmem_tests::temporary_folder;

namespace {

using bytes = std::vector<std::byte>;

[[nodiscard]] bytes random_bytes(random_numbers& random, std::size_t count) {
  bytes made(count);
  for (std::byte& each : made)
    each = static_cast<std::byte>(random.next());
  return made;
}

/// Memory at a multiple of 4096, or `shift` bytes behind one.
class aligned_bytes {
 public:
  aligned_bytes(aligned_bytes&&) noexcept = default;
  explicit aligned_bytes(std::size_t count, std::size_t shift = 0)
      : held_(count + 8192 + shift), count_(count) {
    const auto address = reinterpret_cast<std::uintptr_t>(held_.data());
    data_ = held_.data() + (4096 - address % 4096) % 4096 + shift;
  }
  [[nodiscard]] std::span<std::byte> span() const noexcept { return {data_, count_}; }
  [[nodiscard]] bytes copy() const { return {data_, data_ + count_}; }
  void fill(const bytes& from) { std::copy(from.begin(), from.end(), data_); }

 private:
  bytes held_;
  std::size_t count_;
  std::byte* data_;
};

using fault_plan = std::vector<planned_fault>;

/// Random writes and reads of any size, offset and alignment against a vector: batches of disjoint writes
/// that begin at once, each followed by reads of anything, ordered by fences alone.
template <class Queue>
void behaves_like_a_vector(Queue& queue, const io_file& file, std::uint64_t seed) {
  random_numbers random(seed);
  constexpr std::size_t size = 300'000;
  bytes model = random_bytes(random, size);
  REQUIRE(queue.start(write_to(file, 0, model)).value().settled());
  for (int turn = 0; turn < 6; ++turn) {
    std::vector<aligned_bytes> sources;
    std::vector<file_copy> writes;
    for (std::size_t offset = random.below(9000U); offset < size;) {
      std::size_t count = random.once_in(2) ? 4096 * (1 + random.below(12U)) : 1 + random.below(30'000U);
      count = std::min(count, size - offset);
      sources.emplace_back(count, random.once_in(3) ? random.below(600U) : offset % 4096);
      sources.back().fill(random_bytes(random, count));
      std::copy(sources.back().span().begin(), sources.back().span().end(),
                model.begin() + static_cast<std::ptrdiff_t>(offset));
      writes.push_back(write_to(file, offset, sources.back().span()));
      const std::size_t gap = random.below(20'000U);
      offset = random.once_in(2) ? (offset + count + gap + 4095) / 4096 * 4096 : offset + count + gap;
    }
    const transfer_fence written = queue.start(writes, llmmem::transfer::urgency::write_back).value();
    for (int reads = 0; reads < 3; ++reads) {
      const std::size_t from = random.below(size - 1);
      const std::size_t count = 1 + random.below(size - from);
      const aligned_bytes into(count, random.once_in(3) ? 1 : from % 4096);
      const auto read =
          queue.start(read_from(file, from, into.span()), llmmem::transfer::urgency::demand, written);
      const result<void> outcome = read.value().settled();
      REQUIRE_MESSAGE(outcome, outcome.error().message());
      const bool same = std::equal(into.span().begin(), into.span().end(),
                                   model.begin() + static_cast<std::ptrdiff_t>(from));
      REQUIRE(same);
    }
    REQUIRE(written.settled());
  }
}

/// The same with every kind of fault that a queue must see through.
template <class Engine, class... Args>
void sees_through_faults(llmmem::transfer::driven_by driver, Args... engine) {
  const temporary_folder folder;
  const io_file file(folder.file("data"));
  std::uint64_t shorts = 0;
  std::uint64_t retries = 0;
  for (const auto seed : seeds(8)) {
    CAPTURE(seed);
    random_numbers random(seed ^ 0xFA17);
    fault_plan plan;
    for (const io_fault what : {io_fault::short_move, io_fault::late, io_fault::error}) {
      plan.push_back({.what = what,
                      .first = 1 + random.below(9U),
                      .every = 2 + random.below(9U),
                      .count = 1'000'000,
                      .number = what == io_fault::late ? 2
                                : random.once_in(2)    ? EAGAIN
                                                       : EINTR});
    }
    file_queue<faulty_io<Engine>> queue({.driver = driver, .block_bytes = 16384}, plan, engine...);
    behaves_like_a_vector(queue, file, seed);
    shorts += queue.stats().short_transfers;
    retries += queue.stats().retries;
    CHECK(queue.stats().failures == 0);
  }
  CHECK(shorts != 0);
  CHECK(retries != 0);
}

template <class Engine, class... Args>
void is_right_without_faults(llmmem::transfer::driven_by driver, Args... engine) {
  const temporary_folder folder;
  const io_file file(folder.file("data"));
  for (const auto seed : seeds(8)) {
    CAPTURE(seed);
    file_queue<Engine> queue({.driver = driver, .block_bytes = 16384}, engine...);
    behaves_like_a_vector(queue, file, seed);
    const file_queue_stats stats = queue.stats();
    CHECK(stats.bytes_buffered < stats.bytes_read + stats.bytes_written);
    CHECK(stats.failures == 0);
  }
}

/// A queue without a thread: what happens, happens when the test says so.
[[nodiscard]] file_queue_options by_hand(file_queue_options options = {}) {
  options.driver = llmmem::transfer::driven_by::waiters;
  return options;
}

using faulty_queue = file_queue<faulty_io<posix_io>>;

/// A file of 40,960 bytes, and memory for as many.
struct small_file {
  temporary_folder folder;
  io_file file{folder.file("data")};
  aligned_bytes memory{40'960};

  small_file() {
    random_numbers random(1);
    memory.fill(random_bytes(random, 40'960));
    file_queue<> queue(by_hand());
    queue.start(write_to(file, 0, memory.span())).value().wait();
  }
};

}  // namespace

TEST_CASE("transfers of any size, offset and alignment move exactly their bytes") {
  is_right_without_faults<posix_io>(llmmem::transfer::driven_by::own_thread);
  is_right_without_faults<posix_io>(llmmem::transfer::driven_by::waiters);
}

TEST_CASE("short transfers, late answers and retried requests change nothing") {
  sees_through_faults<posix_io>(llmmem::transfer::driven_by::own_thread);
  sees_through_faults<posix_io>(llmmem::transfer::driven_by::waiters);
}

#if defined(LLMMEM_TESTS_URING)
TEST_CASE("io_uring moves the same bytes, with and without faults, driven by its thread or its waiters") {
  const uring_options options{.depth = 8, .issuer = uring_issuer::any_thread};
  is_right_without_faults<uring_io>(transfer::driven_by::own_thread,
                                    uring_options{.issuer = uring_issuer::one_thread});
  is_right_without_faults<uring_io>(transfer::driven_by::waiters, options);
  sees_through_faults<uring_io>(transfer::driven_by::own_thread,
                                uring_options{.issuer = uring_issuer::one_thread});
  sees_through_faults<uring_io>(transfer::driven_by::waiters, options);
}

TEST_CASE("io_uring moves bytes of registered memory, and of adjacent memory") {
  small_file small;
  aligned_bytes into(8192);
  uring_io engine({.depth = 4});
  const std::array ranges{into.span().first(4096)};
  REQUIRE(engine.register_memory(ranges));
  for (const std::uint64_t at : {0U, 2048U, 4096U}) {
    CAPTURE(at);
    REQUIRE(engine.try_queue({.file = small.file.buffered(),
                              .bytes = 4096,
                              .offset = at,
                              .data = into.span().data() + at,
                              .tag = at}));
    std::array<io_completion, 4> done{};
    REQUIRE(engine.reap(done, {.least = 1}).value() == 1);
    CHECK(done[0].tag == at);
    CHECK(done[0].outcome == 4096);
    CHECK(std::equal(into.span().begin() + static_cast<std::ptrdiff_t>(at),
                     into.span().begin() + static_cast<std::ptrdiff_t>(at + 4096),
                     small.memory.span().begin() + static_cast<std::ptrdiff_t>(at)));
  }
}

TEST_CASE("a ring refuses a depth it cannot have") {
  CHECK_THROWS_WITH_AS(uring_io({.depth = 0}), "uring_io: a depth of 0; it must be 1 to 4096",
                       argument_error);
  CHECK_THROWS_WITH_AS(uring_io({.depth = 4097}), "uring_io: a depth of 4097; it must be 1 to 4096",
                       argument_error);
}
#endif

TEST_CASE("an error names the operation, the place and the reason, and every later query does") {
  small_file small;
  for (const int error : {EIO, ENOSPC, ENODEV}) {
    CAPTURE(error);
    faulty_queue queue(by_hand(), fault_plan{{.what = io_fault::error, .first = 2, .number = error}});
    const transfer_fence fine = queue.start(write_to(small.file, 0, small.memory.span())).value();
    CHECK(fine.settled());
    const transfer_fence bad =
        queue.start(write_to(small.file, 4096, small.memory.span().first(8192))).value();
    const failure wanted{errc::write_failed, static_cast<std::uint32_t>(error), 8192, 4096};
    CHECK(bad.settled().error() == wanted);
    CHECK(queue.start(read_from(small.file, 0, small.memory.span())).value().settled());
    CHECK(bad.outcome().error() == wanted);
    CHECK(fine.outcome());
    CHECK_THROWS_AS(bad.wait(), io_error);
    queue.clear_failures();
    CHECK(bad.outcome());
  }
}

TEST_CASE("the text of an error has path, operation, bytes, offset and the system's words") {
  small_file small;
  faulty_queue queue(by_hand(), fault_plan{{.what = io_fault::error, .number = ENOSPC}});
  const auto bad = queue.start(write_to(small.file, 4096, small.memory.span().first(8192))).value();
  CHECK(bad.settled().error().message() ==
        small.file.path() +
            ": write of 8192 bytes at offset 4096 failed: No space left on device (errno 28)");
}

TEST_CASE("a read past the end of the file fails, although the system reports success") {
  small_file small;
  file_queue<> queue(by_hand());
  aligned_bytes into(8192);
  const auto bad = queue.start(read_from(small.file, 36'864, into.span())).value();
  CHECK(bad.settled().error() == failure{errc::file_ends, 0, 45'056, 40'960});
}

TEST_CASE("a write that moves nothing is an error, not an endless loop") {
  small_file small;
  faulty_queue queue(by_hand(), fault_plan{{.what = io_fault::nothing}});
  const auto bad = queue.start(write_to(small.file, 0, small.memory.span())).value();
  CHECK(bad.settled().error() == failure{errc::write_failed, 0, 40'960, 0});
}

TEST_CASE("a system that always asks to try again is given up after max_attempts") {
  small_file small;
  faulty_queue queue(by_hand({.max_attempts = 5}),
                     fault_plan{{.what = io_fault::error, .every = 1, .count = 5, .number = EAGAIN}});
  const auto bad = queue.start(read_from(small.file, 0, small.memory.span())).value();
  CHECK(bad.settled().error() == failure{errc::read_failed, EAGAIN, 40'960, 0});
  CHECK(queue.stats().retries == 4);
  CHECK(queue.start(read_from(small.file, 0, small.memory.span())).value().settled());
}

TEST_CASE("EINVAL of a direct transfer falls back to the page cache, and the file says so") {
  small_file small;
  REQUIRE(small.file.fallback() == fallback_reason::none);
  faulty_queue queue(by_hand(), fault_plan{{.what = io_fault::error, .number = EINVAL}});
  CHECK(queue.start(write_to(small.file, 0, small.memory.span())).value().settled());
  CHECK(queue.stats().rejected == 1);
  CHECK(queue.stats().bytes_buffered == 40'960);
  CHECK(small.file.fallback() == fallback_reason::rejected);
  CHECK(small.file.direct() == -1);
}

TEST_CASE("EINVAL through the page cache is an error") {
  small_file small;
  const io_file cached(small.file.path(), {.mode = open_mode::update, .direct = direct_io::never});
  CHECK(cached.fallback() == fallback_reason::not_asked);
  faulty_queue queue(by_hand(), fault_plan{{.what = io_fault::error, .number = EINVAL}});
  const auto bad = queue.start(write_to(cached, 0, small.memory.span())).value();
  CHECK(bad.settled().error() == failure{errc::write_failed, EINVAL, 40'960, 0});
}

TEST_CASE("an unanswered request is given up, and its slot is not used again") {
  small_file small;
  for (const llmmem::transfer::driven_by driver :
       {llmmem::transfer::driven_by::own_thread, llmmem::transfer::driven_by::waiters}) {
    faulty_queue queue({.driver = driver, .give_up_ns = 2'000'000}, fault_plan{{.what = io_fault::lost}});
    const auto bad = queue.start(read_from(small.file, 0, small.memory.span())).value();
    CHECK(bad.settled().error() == failure{errc::completion_lost, 0, 40'960, 0});
    CHECK(queue.stats().lost == 1);
  }
}

TEST_CASE("an operation whose predecessor failed does not begin") {
  small_file small;
  faulty_queue queue(by_hand(), fault_plan{{.what = io_fault::error}});
  const auto first = queue.start(write_to(small.file, 0, small.memory.span())).value();
  const auto second =
      queue.start(write_to(small.file, 0, small.memory.span()), llmmem::transfer::urgency::demand, first)
          .value();
  CHECK(second.settled().code() == errc::dependency_failed);
  CHECK(queue.stats().requests == 1);
}

TEST_CASE("urgent operations overtake others, and so does a promoted prefetch") {
  small_file small;
  // Depth 1, and nothing goes on before somebody waits: the order of requests is that of the urgencies.
  struct noting_io : posix_io {
    explicit noting_io(std::vector<std::uint64_t>& seen) : order(&seen) {}
    bool try_queue(const io_request& request) noexcept {
      const bool queued = posix_io::try_queue(request);
      if (queued) order->push_back(request.offset);
      return queued;
    }
    std::vector<std::uint64_t>* order;
  };
  std::vector<std::uint64_t> order;
  file_queue<noting_io> queue(by_hand(), order);
  const auto begin = [&](std::uint64_t offset, llmmem::transfer::urgency how, const transfer_fence& after) {
    return queue.start(read_from(small.file, offset, small.memory.span().first(4096)), how, after).value();
  };
  transfer_board others(1, 1, {});
  const std::uint32_t gate = others.begin("gate").value();
  const transfer_fence go = others.fence(gate);
  const auto written = begin(0, llmmem::transfer::urgency::write_back, go);
  const auto early = begin(4096, llmmem::transfer::urgency::prefetch, go);
  const auto late = begin(8192, llmmem::transfer::urgency::prefetch, go);
  const auto wanted = begin(12'288, llmmem::transfer::urgency::demand, go);
  queue.promote(late, llmmem::transfer::urgency::demand);
  queue.promote(wanted, llmmem::transfer::urgency::write_back);  // never less urgent
  others.finish(gate, {});
  written.wait();
  CHECK(order == std::vector<std::uint64_t>{8192, 12'288, 4096, 0});
  CHECK((early.ready() && late.ready() && wanted.ready()));
}

TEST_CASE("a cancelled operation ends with the bytes moved so far, and the queue continues") {
  small_file small;
  transfer_board others(1, 1, {});
  const std::uint32_t gate = others.begin("gate").value();
  file_queue<> queue(by_hand({.block_bytes = 4096}));
  const auto waiting = queue
                           .start(read_from(small.file, 0, small.memory.span()),
                                  llmmem::transfer::urgency::demand, others.fence(gate))
                           .value();
  CHECK(queue.bytes_done(waiting) == 0);
  queue.cancel(waiting);
  CHECK(waiting.outcome().error() == failure{errc::cancelled, 0, 40'960, 0});
  others.finish(gate, {});

  // The first block is read when the operation starts; the others when somebody polls.
  const auto begun = queue.start(read_from(small.file, 0, small.memory.span())).value();
  queue.poll();
  CHECK(queue.bytes_done(begun) == 8192);
  queue.cancel(begun);
  CHECK(begun.outcome().error() == failure{errc::cancelled, 0, 40'960, 8192});
  queue.cancel(begun);
  CHECK(queue.stats().cancelled == 2);
  CHECK(queue.start(read_from(small.file, 0, small.memory.span())).value().settled());
}

TEST_CASE("an impossible operation is refused before anything begins") {
  small_file small;
  const io_file read_only(small.file.path(), {.mode = open_mode::read});
  file_queue<> queue(by_hand({.max_operations = 2, .max_copies = 3, .max_failures = 1, .name = "tier"}));
  const auto memory = small.memory.span();
  const auto refusal = [&](const file_copy& copy) { return queue.start(copy).error(); };
  CHECK(refusal({}) == failure{.code = errc::null_handle});
  CHECK(refusal({&small.file, io_direction::read, 0, nullptr, 1}) == failure{.code = errc::null_handle});
  CHECK(refusal(write_to(read_only, 0, memory)).message() ==
        small.file.path() +
            ": it was opened only for reading; open it with open_mode::update or open_mode::create (a "
            "model_file_space is never written: adopt its contents, and keep changes in another buffer)");
  CHECK(refusal(read_from(small.file, max_bytes, memory)) ==
        failure{.code = errc::out_of_range, .wanted = max_bytes, .found = max_bytes});
  const std::vector<file_copy> four(4, read_from(small.file, 0, memory));
  CHECK(queue.start(four).error() == failure{.code = errc::table_full, .wanted = 4, .found = 3});
  const std::vector<transfer_fence> five(5);
  CHECK(queue.start(std::span(four).first(1), llmmem::transfer::urgency::demand, five).error() ==
        failure{.code = errc::out_of_range, .wanted = 5, .found = 4});
  CHECK(queue.stats().operations == 0);

  // Failures nobody has cleared: no more are taken than can be told of.
  aligned_bytes into(8192);
  CHECK(queue.start(read_from(small.file, 40'960, into.span())).value().settled().code() == errc::file_ends);
  CHECK(refusal(read_from(small.file, 0, memory)).code == errc::failures_kept);
  queue.clear_failures();
  CHECK(queue.start(read_from(small.file, 0, memory)).value().settled());
}

TEST_CASE("an operation of 0 bytes ends at once") {
  small_file small;
  file_queue<> queue(by_hand());
  CHECK(queue.start(std::span<const file_copy>{}).value().outcome());
  CHECK(queue.start(read_from(small.file, 0, {})).value().outcome());
  CHECK(transfer_fence{}.outcome());
}

TEST_CASE("the tables of a queue serve any number of operations") {
  small_file small;
  file_queue<> queue(by_hand({.max_operations = 3, .max_copies = 5}));
  for (int i = 0; i < 100; ++i) {
    const std::array two{read_from(small.file, 0, small.memory.span().first(4096)),
                         read_from(small.file, 4096, small.memory.span().subspan(4096, 4096))};
    REQUIRE(queue.start(two).value().settled());
  }
  CHECK(queue.stats().operations == 100);
}

TEST_CASE("options that cannot work are refused by name") {
  CHECK_THROWS_WITH_AS(file_queue<>({.block_bytes = 5000, .name = "tier"}),
                       "tier: block_bytes is 5000; it must be a power of two from 4096 to 2^30",
                       argument_error);
  CHECK_THROWS_WITH_AS(file_queue<>({.max_operations = 0}),
                       "file_queue: max_operations is 0; it must be at least 1", argument_error);
}

TEST_CASE("a destroyed queue cancels waiting operations, and lets the others finish") {
  small_file small;
  transfer_board others(1, 1, {});
  const transfer_fence never = others.fence(others.begin("gate").value());
  for (const llmmem::transfer::driven_by driver :
       {llmmem::transfer::driven_by::own_thread, llmmem::transfer::driven_by::waiters}) {
    file_queue<> queue({.driver = driver});
    REQUIRE(
        queue.start(read_from(small.file, 0, small.memory.span()), llmmem::transfer::urgency::demand, never));
    REQUIRE(queue.start(read_from(small.file, 0, small.memory.span())));
  }
}

TEST_CASE("a queue that tunes itself moves the same bytes, within its limits, and reports its setting") {
  const temporary_folder folder;
  const io_file file(folder.file("data"));
  const io_tuner_options tuner{.least = {1, 4096}, .most = {64, 65'536}, .window_ns = 0};
  for (const llmmem::transfer::driven_by driver :
       {llmmem::transfer::driven_by::own_thread, llmmem::transfer::driven_by::waiters}) {
    file_queue<faulty_io<posix_io>> queue(
        {.driver = driver, .block_bytes = 16'384, .tuning = io_tuning::on, .tuner = tuner}, fault_plan{});
    std::vector<io_setting> seen;
    aligned_bytes memory(1 << 20);
    for (int i = 0; i < 40; ++i) {
      behaves_like_a_vector(queue, file, static_cast<std::uint64_t>(i) % 3);
      REQUIRE(queue.start(write_to(file, 0, memory.span())).value().settled());
      const io_setting now = queue.stats().setting;
      CHECK(now.depth == 1);  // all that the engine takes
      CHECK(now.block_bytes >= 4096);
      CHECK(now.block_bytes <= 65'536);
      if (std::find(seen.begin(), seen.end(), now) == seen.end()) seen.push_back(now);
    }
    CHECK(seen.size() > 1);
  }
  file_queue<> still({.driver = llmmem::transfer::driven_by::waiters, .block_bytes = 16'384});
  CHECK(still.stats().setting == io_setting{1, 16'384});
  CHECK_THROWS_WITH_AS(file_queue<>({.tuning = io_tuning::on, .tuner = {.least = {1, 512}}}),
                       "file_queue: tuner: blocks must be from 4096 to 2^30 bytes", argument_error);
}
