/// What goes wrong around a tiered buffer: devices that fail, lie or fall silent, queues that are too small,
/// spaces that throw. What a program has written it gets back, or an error.
#include <llmmem/arena/stitched_source.hpp>
#include <llmmem/codec/byte_plane.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/testing/faulty_io.hpp>
#include <llmmem/tiered_buffer.hpp>
#include <llmmem/transfer/file_space.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "support/seeds.hpp"
#include "support/temporary_folder.hpp"
#include "support/tiered_world.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::faulty_io;
using llmmem::testing::io_fault;
using llmmem::testing::planned_fault;

namespace {

constexpr std::uint64_t page = 4096;
/// `posix_io` that takes eight requests: a device that loses one goes on with the others.
class roomy_io {
 public:
  [[nodiscard]] io_caps caps() const noexcept { return {.name = "roomy", .depth = most}; }
  [[nodiscard]] std::uint32_t in_flight() const noexcept { return count_; }
  [[nodiscard]] bool try_queue(const io_request& request) noexcept {
    if (count_ == most) return false;
    waiting_[count_++] = request;
    return true;
  }
  [[nodiscard]] result<std::size_t> reap(std::span<io_completion> out, const io_wait&) noexcept {
    std::size_t done = 0;
    while (count_ != 0 && done < out.size()) {
      const io_request& request = waiting_[--count_];
      out[done++] = {request.tag, detail::run_request(request)};
    }
    return done;
  }
  void wake() noexcept {}

 private:
  static constexpr std::uint32_t most = 8;
  std::array<io_request, most> waiting_{};
  std::uint32_t count_ = 0;
};
static_assert(io_engine<roomy_io>);

/// Takes requests, and is of no use any more once it is told so.
class dying_io {
 public:
  explicit dying_io(const bool& dead) noexcept : dead_(&dead) {}
  [[nodiscard]] io_caps caps() const noexcept { return engine_.caps(); }
  [[nodiscard]] std::uint32_t in_flight() const noexcept { return engine_.in_flight(); }
  [[nodiscard]] bool try_queue(const io_request& request) noexcept { return engine_.try_queue(request); }
  [[nodiscard]] result<std::size_t> reap(std::span<io_completion> out, const io_wait& wait) noexcept {
    if (*dead_) return failure{.code = errc::engine_failed, .index = EIO, .where = "dying_io"};
    return engine_.reap(out, wait);
  }
  void wake() noexcept { engine_.wake(); }

 private:
  const bool* dead_;
  posix_io engine_;
};
static_assert(io_engine<dying_io>);

using faulty_file = file_space<faulty_io<roomy_io>>;
using side = planned_fault::side;

/// The memory of a ring, which tells when it is given back.
struct ring_memory : host_space {
  using host_space::host_space;
  ring_memory(const ring_memory&) = delete;
  ring_memory& operator=(const ring_memory&) = delete;
  ~ring_memory() { ++gone; }
  static inline int gone = 0;
};
struct ring_traits : tiered_traits {
  using bounce_space = ring_memory;
  [[nodiscard]] static ring_memory make_bounce_space(std::uint64_t bytes) {
    host_options options;
    options.budget = bytes;
    return ring_memory(options);
  }
};

/// Memory for `top` chunks of a page over a file that has the faults of `plan`; the waiter drives the file.
struct memory_over_file {
  temporary_folder folder;
  host_space above;
  faulty_file disk;
  tiered_buffer<host_space, faulty_file> buffer;

  memory_over_file(std::uint64_t top, const std::vector<planned_fault>& plan,
                   file_queue_options queue = {.driver = llmmem::transfer::driven_by::waiters})
      : above({.budget = top * page}),
        disk(folder.file("tier"), {.budget = 64 * page, .queue = queue}, plan),
        buffer({.name = "state"}, {above, top * page}, {disk, 64 * page}) {}

  /// A page of `value`, at rest in the file.
  [[nodiscard]] chunk_handle stored(int value) {
    const chunk_handle made = written(value);
    REQUIRE(buffer.evict(made));
    REQUIRE(buffer.flush(made));
    return made;
  }
  [[nodiscard]] chunk_handle written(int value) {
    const chunk_handle made = buffer.create(page).value();
    fill(made, value);
    return made;
  }
  void fill(chunk_handle chunk, int value) {
    auto lease = buffer.write(chunk).value();
    std::ranges::fill(lease.span(), static_cast<std::byte>(value));
  }
  [[nodiscard]] bool holds(chunk_handle chunk, int value) {
    auto lease = buffer.read(chunk);
    return lease && std::ranges::all_of(lease->span(), [value](std::byte each) {
             return each == static_cast<std::byte>(value);
           });
  }
  void audited() {
    for (const std::string& broken : buffer.audit())
      FAIL_CHECK(broken);
  }
};

[[nodiscard]] planned_fault failing_reads(std::uint64_t first, std::uint64_t count) {
  return {.what = io_fault::error, .first = first, .every = 1, .count = count, .way = side::reads};
}
[[nodiscard]] planned_fault failing_writes(std::uint64_t first, std::uint64_t count) {
  return {.what = io_fault::error, .first = first, .every = 1, .count = count, .way = side::writes};
}
const file_queue_options impatient{.driver = llmmem::transfer::driven_by::waiters, .give_up_ns = 1'000'000};

/// Host memory that calls itself far away, and whose copies throw when they are told to.
class throwing_space {
 public:
  using range_type = memory_range<throwing_space>;
  using fence_type = host_fence;
  static constexpr bool is_host_accessible = false;

  explicit throwing_space(std::uint64_t budget) : inner_({.budget = budget}) {}

  [[nodiscard]] result<range_type> try_allocate(std::uint64_t bytes, std::uint64_t alignment) noexcept {
    const auto had = inner_.try_allocate(bytes, alignment);
    if (!had) return had.error();
    return range_type{had->data, had->bytes};
  }
  void deallocate(range_type range) noexcept { inner_.deallocate({range.data, range.bytes}); }
  [[nodiscard]] std::uint64_t capacity() const noexcept { return inner_.capacity(); }
  [[nodiscard]] std::uint64_t used() const noexcept { return inner_.used(); }
  [[nodiscard]] std::string_view name() const noexcept { return "throwing_space"; }

  [[nodiscard]] result<host_fence> copy_in_async(range_type to, std::span<const std::byte> from,
                                                 std::span<const host_fence> after) {
    count();
    return inner_.copy_in_async({to.data, to.bytes}, from, after);
  }
  [[nodiscard]] result<host_fence> copy_out_async(std::span<std::byte> to, range_type from,
                                                  std::span<const host_fence> after) {
    count();
    return inner_.copy_out_async(to, {from.data, from.bytes}, after);
  }
  [[nodiscard]] result<host_fence> copy_within_async(range_type to, range_type from,
                                                     std::span<const host_fence> after) {
    count();
    return inner_.copy_within_async({to.data, to.bytes}, {from.data, from.bytes}, after);
  }

  int throws_in = 0;  // copies from now; 0: never

 private:
  void count() {
    if (throws_in != 0 && --throws_in == 0) throw std::runtime_error("the stream is broken");
  }
  host_space inner_;
};

}  // namespace

TEST_CASE("a failed prefetch does not block a write to its chunk") {
  memory_over_file world(2, {failing_reads(1, 1)});
  const chunk_handle chunk = world.stored(1);
  REQUIRE(world.buffer.prefetch(chunk));
  {
    const auto lease = world.buffer.write(chunk);
    REQUIRE_MESSAGE(lease, lease.error().message());
    std::ranges::fill(lease->span(), std::byte{7});
  }
  CHECK(world.holds(chunk, 7));
  CHECK(world.buffer.stats().background_failures == 1);
  CHECK(world.buffer.background_failure().code == errc::read_failed);
  world.audited();
}

TEST_CASE("a lease is not refused for another chunk's failed prefetch") {
  memory_over_file world(1, {failing_reads(1, 1)});
  const chunk_handle other = world.stored(1);
  const chunk_handle chunk = world.stored(2);
  REQUIRE(world.buffer.prefetch(other));
  CHECK(world.holds(chunk, 2));
  CHECK(world.buffer.background_failure().code == errc::read_failed);
  CHECK(world.holds(other, 1));
  world.audited();
}

TEST_CASE("a failed read is reported with its text, and the next one may succeed") {
  memory_over_file world(2, {failing_reads(1, 1)});
  const chunk_handle chunk = world.stored(3);
  const auto refused = world.buffer.read(chunk);
  REQUIRE_FALSE(refused);
  CHECK(refused.error().message() ==
        world.folder.file("tier") +
            ": read of 4096 bytes at offset 4096 failed: Input/output error (errno 5)");
  CHECK(world.buffer.stats().tiers[0].used == 0);
  CHECK(world.holds(chunk, 3));
}

TEST_CASE("a chunk whose write-back fails stays dirty in its place, and moves down later") {
  memory_over_file world(1, {failing_writes(1, 2)});
  const chunk_handle first = world.written(1);
  const chunk_handle second = world.buffer.create(page).value();
  for (int attempt = 0; attempt < 2; ++attempt) {
    const auto refused = world.buffer.write(second);
    CHECK(refused.error().message() ==
          world.folder.file("tier") +
              ": write of 4096 bytes at offset 4096 failed: Input/output error (errno 5)");
    CHECK(world.buffer.tier_of(first).value() == 0);
    CHECK(world.holds(first, 1));
  }
  world.fill(second, 2);
  CHECK(world.holds(first, 1));
  CHECK(world.holds(second, 2));
  world.audited();
}

TEST_CASE("a flush reports its failure, and repeats an earlier failed write") {
  memory_over_file world(2, {failing_writes(1, 2)});
  const chunk_handle chunk = world.written(1);
  REQUIRE(world.buffer.evict(chunk));  // the write begins, and fails
  CHECK(world.buffer.flush(chunk).code() == errc::write_failed);
  CHECK(world.buffer.background_failure().code == errc::write_failed);
  REQUIRE(world.buffer.flush(chunk));
  REQUIRE(world.buffer.evict(chunk));
  CHECK(world.buffer.tier_of(chunk).value() == 1);
  CHECK(world.holds(chunk, 1));
}

TEST_CASE("a device may fail more often than its queue keeps failures") {
  memory_over_file world(2, {failing_reads(1, 200)});
  const chunk_handle chunk = world.stored(1);
  int refusals = 0;
  while (!world.buffer.read(chunk) && refusals < 300)
    ++refusals;
  CHECK(refusals == 200);
  CHECK(world.holds(chunk, 1));
}

TEST_CASE("damaged bytes are detected each time they come back, and never handed out") {
  memory_over_file world(
      2, {{.what = io_fault::bit_flip, .first = 1, .every = 1, .count = 2, .way = side::reads}});
  const chunk_handle chunk = world.stored(5);
  for (int time = 0; time < 2; ++time) {
    const auto refused = world.buffer.read(chunk);
    REQUIRE(refused.code() == errc::checksum_differs);
    CHECK(refused.error().message() ==
          "state: chunk 0 was read with checksum " + std::to_string(refused.error().found) +
              ", but was written with " + std::to_string(refused.error().wanted) +
              "; its bytes are damaged and not returned: restore them from another copy");
    CHECK(refused.error().found != refused.error().wanted);
  }
  CHECK(world.holds(chunk, 5));
  world.audited();
}

TEST_CASE("memory in flight in a failed engine is not handed out again") {
  const temporary_folder folder;
  bool dead = false;
  host_space above({.budget = 2 * page});
  file_space<dying_io> disk(folder.file("tier"),
                            {.budget = 8 * page, .queue = {.driver = llmmem::transfer::driven_by::waiters}},
                            dead);
  tiered_buffer<host_space, file_space<dying_io>> buffer({}, {above, 2 * page}, {disk, 8 * page});
  const chunk_handle chunk = buffer.create(page).value();
  {
    const auto lease = buffer.write(chunk).value();
  }
  REQUIRE(buffer.evict(chunk));
  REQUIRE(buffer.flush(chunk));
  dead = true;
  CHECK(buffer.read(chunk).code() == errc::completion_lost);
  CHECK(buffer.stats().tiers[0].lost == page);
  // What does not begin takes nothing with it.
  CHECK_FALSE(buffer.read(chunk));
  CHECK(buffer.stats().tiers[0].lost <= 2 * page);
  for (const std::string& broken : buffer.audit())
    FAIL_CHECK(broken);
}

TEST_CASE("memory of a device that never answered is not handed out again") {
  memory_over_file world(2, {{.what = io_fault::lost, .first = 1, .way = side::reads}}, impatient);
  const chunk_handle chunk = world.stored(1);
  CHECK(world.buffer.read(chunk).code() == errc::completion_lost);
  CHECK(world.buffer.stats().tiers[0].lost == page);
  CHECK(world.buffer.stats().tiers[0].used == page);
  CHECK(world.buffer.stats().tiers[0].chunks == 0);
  CHECK(world.holds(chunk, 1));
  const auto lease = world.buffer.read(chunk).value();
  const chunk_handle other = world.buffer.create(page).value();
  CHECK(world.buffer.write(other).code() == errc::out_of_bytes);
  world.audited();
}

TEST_CASE("a place in a file whose device never answered is not handed out again") {
  memory_over_file world(2, {{.what = io_fault::lost, .first = 1, .way = side::writes}}, impatient);
  const chunk_handle chunk = world.written(1);
  CHECK(world.buffer.flush(chunk).code() == errc::completion_lost);
  CHECK(world.buffer.stats().tiers[1].lost == page);
  CHECK(world.holds(chunk, 1));
  REQUIRE(world.buffer.evict(chunk));
  REQUIRE(world.buffer.flush(chunk));
  CHECK(world.buffer.tier_of(chunk).value() == 1);
  CHECK(world.buffer.stats().tiers[1].used == 2 * page);
  CHECK(world.holds(chunk, 1));
  REQUIRE(world.buffer.remove(chunk));
  CHECK(world.buffer.stats().tiers[1].used == page);
  world.audited();
}

TEST_CASE("a chunk that lost its place, with none left for it, stays above and can be removed") {
  const temporary_folder folder;
  host_space above({.budget = 2 * page});
  faulty_file disk(folder.file("tier"), {.budget = page, .queue = impatient},
                   std::vector{planned_fault{.what = io_fault::lost, .way = side::writes}});
  tiered_buffer<host_space, faulty_file> buffer({}, {above, 2 * page}, {disk, page});
  const chunk_handle chunk = buffer.create(page).value();
  std::ranges::fill(buffer.write(chunk).value().span(), std::byte{9});
  CHECK(buffer.flush(chunk).code() == errc::completion_lost);
  CHECK(buffer.flush(chunk).code() == errc::out_of_bytes);
  CHECK(buffer.evict(chunk).code() == errc::out_of_bytes);
  CHECK(buffer.read(chunk).value().span()[0] == std::byte{9});
  CHECK(buffer.audit().empty());
  REQUIRE(buffer.remove(chunk));
  CHECK(buffer.stats().tiers[0].used == 0);
  CHECK(buffer.stats().tiers[1].used == page);
}

TEST_CASE("a destroyed buffer keeps lost memory from the space, and returns the rest") {
  const temporary_folder folder;
  host_space above({.budget = 2 * page});
  faulty_file disk(folder.file("tier"), {.budget = 4 * page, .queue = impatient},
                   std::vector{planned_fault{.what = io_fault::lost, .way = side::reads}});
  {
    tiered_buffer<host_space, faulty_file> buffer({}, {above, 2 * page}, {disk, 4 * page});
    const chunk_handle chunk = buffer.create(page).value();
    std::ranges::fill(buffer.write(chunk).value().span(), std::byte{9});
    REQUIRE(buffer.evict(chunk));
    REQUIRE(buffer.flush(chunk));
    CHECK(buffer.read(chunk).code() == errc::completion_lost);
  }
  CHECK(above.used() == 2 * page);
  CHECK(disk.used() == 0);
}

TEST_CASE("a ring that a device may still write to outlives its destroyed buffer") {
  const auto gone_with_buffer = [](const std::vector<planned_fault>& plan, error_code expected) {
    const temporary_folder folder;
    const int before = ring_memory::gone;
    faulty_file above(folder.file("above"), {.budget = 8 * page, .queue = impatient}, plan);
    faulty_file beneath(folder.file("beneath"), {.budget = 8 * page, .queue = impatient},
                        std::vector<planned_fault>{});
    {
      basic_tiered_buffer<ring_traits, tier<faulty_file>, tier<faulty_file>> buffer(
          {.bounce_bytes = 2 * page, .bounce_slot_bytes = page}, {above, 8 * page}, {beneath, 8 * page});
      const chunk_handle chunk = buffer.create(page).value();
      above.copy_in_async(buffer.write(chunk).value().range(), std::vector<std::byte>(page), {})
          .value()
          .wait();
      CHECK(buffer.flush(chunk).code() == expected);
    }
    return ring_memory::gone - before;
  };
  CHECK(gone_with_buffer({}, errc::ok) == 1);
  CHECK(gone_with_buffer({{.what = io_fault::lost, .way = side::reads}}, errc::read_failed) == 0);
}

TEST_CASE("staging memory of a device that never answered is replaced") {
  const temporary_folder folder;
  using encoded = tier<faulty_file, lru_eviction, write_back, byte_plane<dtype::bf16>>;
  host_space above({.budget = 16 * page});
  faulty_file disk(folder.file("tier"), {.budget = 16 * page, .queue = impatient},
                   std::vector{planned_fault{.what = io_fault::lost, .way = side::reads}});
  tiered_buffer<host_space, encoded> buffer({.largest_chunk_bytes = page, .staging_slots = 1},
                                            {above, 16 * page}, {disk, 16 * page});
  const chunk_handle chunk = buffer.create(page).value();
  std::ranges::fill(buffer.write(chunk).value().span(), std::byte{9});
  REQUIRE(buffer.evict(chunk));
  REQUIRE(buffer.flush(chunk));
  CHECK(buffer.read(chunk).code() == errc::completion_lost);
  CHECK(buffer.stats().tiers[0].lost == 2 * page);
  CHECK(buffer.stats().tiers[0].used == 2 * page);
  CHECK(buffer.read(chunk).value().span()[page - 1] == std::byte{9});
  CHECK(buffer.audit().empty());
}

TEST_CASE("an exception of a space's copies passes through, and leaves no transfer behind") {
  for (int after = 1; after <= 6; ++after) {
    CAPTURE(after);
    host_space above({.budget = 2 * page});
    throwing_space beneath(8 * page);
    tiered_buffer<host_space, throwing_space> buffer({}, {above, 2 * page}, {beneath, 8 * page});
    std::vector<chunk_handle> chunks;
    std::vector<int> values;
    const auto guarded = [&](auto&& act) {
      bool threw = false;
      try {
        act();
      } catch (const std::runtime_error& why) {
        CHECK(why.what() == std::string("the stream is broken"));
        threw = true;
      }
      for (const std::string& broken : buffer.audit())
        FAIL_CHECK(broken);
      return !threw;
    };
    beneath.throws_in = after;
    for (int value = 1; value <= 4; ++value) {
      chunks.push_back(buffer.create(page).value());
      values.push_back(0);
      const std::size_t at = chunks.size() - 1;
      const auto fill = [&] {
        auto lease = buffer.write(chunks[at]).value();
        std::ranges::fill(lease.span(), static_cast<std::byte>(value));
        values[at] = value;
      };
      if (!guarded(fill)) CHECK(guarded(fill));
    }
    for (std::size_t at = 0; at < chunks.size(); ++at) {
      const auto look = [&] {
        const auto lease = buffer.read(chunks[at]).value();
        CHECK(lease.span()[page - 1] == static_cast<std::byte>(values[at]));
      };
      if (!guarded(look)) CHECK(guarded(look));
    }
    CHECK(beneath.throws_in <= 0);
  }
}

TEST_CASE("an update whose parts throw halfway leaves all of them dirty") {
  host_space above({.budget = page});
  throwing_space beneath(4 * page);
  tiered_buffer<host_space, throwing_space> buffer({}, {above, page, 64}, {beneath, 4 * page, 64});
  const chunk_handle chunk = buffer.create(1024).value();
  std::ranges::fill(buffer.write(chunk).value().span(), std::byte{1});
  REQUIRE(buffer.flush(chunk));
  for (const std::uint64_t offset : {0U, 512U}) {
    auto lease = buffer.update(chunk, offset, 64).value();
    std::ranges::fill(lease.span().subspan(offset, 64), std::byte{2});
  }
  beneath.throws_in = 2;
  CHECK_THROWS_AS(static_cast<void>(buffer.flush(chunk)), std::runtime_error);
  CHECK(buffer.audit().empty());
  const auto before = buffer.stats().moved.links[0].offload.bytes;
  REQUIRE(buffer.flush(chunk));
  CHECK(buffer.stats().moved.links[0].offload.bytes - before == 128);
  REQUIRE(buffer.evict(chunk));
  const auto lease = buffer.read(chunk).value();
  CHECK(lease.span()[0] == std::byte{2});
  CHECK(lease.span()[512] == std::byte{2});
  CHECK(lease.span()[64] == std::byte{1});
}

TEST_CASE("parts without space in the queue go one after another") {
  memory_over_file world(3, {{.what = io_fault::late, .first = 1, .every = 1, .count = 1000, .number = 3}},
                         {.driver = llmmem::transfer::driven_by::waiters, .max_operations = 1});
  auto& buffer = world.buffer;
  const chunk_handle chunk = buffer.create(3 * page).value();
  std::ranges::fill(buffer.write(chunk).value().span(), std::byte{1});
  REQUIRE(buffer.flush(chunk));
  for (const std::uint64_t offset : {std::uint64_t{0}, 2 * page})
    buffer.update(chunk, offset, 1).value().span()[offset] = std::byte{2};
  REQUIRE(buffer.flush(chunk));
  CHECK(buffer.stats().moved.links[0].offload.bytes == 5 * page);
  REQUIRE(buffer.evict(chunk));
  const auto lease = buffer.read(chunk).value();
  CHECK(lease.span()[0] == std::byte{2});
  CHECK(lease.span()[2 * page] == std::byte{2});
  CHECK(lease.span()[page] == std::byte{1});
}

TEST_CASE("a queue too small for a buffer's transfers only makes it wait") {
  const temporary_folder folder;
  for (const auto seed : seeds(4)) {
    CAPTURE(seed);
    host_space above({.budget = 160'000});
    file_space<> disk(folder.file("tier"),
                      {.budget = 4 << 20, .queue = {.max_operations = 1, .max_copies = 1}});
    tiered_buffer<host_space, file_space<>> buffer({}, {above, 160'000, 64}, {disk, 4 << 20});
    tiered_world world(buffer, host_touch{}, seed, {});
    world.run();
  }
}

TEST_CASE("if any request fails, the contents are there at the next try") {
  std::uint64_t failed = 0;
  for (std::uint64_t nth = 1;; ++nth) {
    CAPTURE(nth);
    memory_over_file world(2, {{.what = io_fault::error, .first = nth}});
    bool refused = false;
    const auto twice = [&](auto&& act) {
      if (act()) return;
      refused = true;
      CHECK(act());
    };
    std::vector<chunk_handle> chunks;
    for (int value = 0; value < 5; ++value) {
      chunks.push_back(world.buffer.create(page).value());
      twice([&] {
        const auto lease = world.buffer.write(chunks.back());
        if (lease) std::ranges::fill(lease->span(), static_cast<std::byte>(value));
        return lease.has_value();
      });
    }
    for (int value = 4; value >= 0; --value) {
      twice([&] {
        auto lease = world.buffer.update(chunks[static_cast<std::size_t>(value)], 8, 8);
        if (lease) lease->span()[8] = static_cast<std::byte>(value + 50);
        return lease.has_value();
      });
    }
    twice([&] { return world.buffer.flush().has_value(); });
    for (int value = 0; value < 5; ++value) {
      twice([&] {
        const auto lease = world.buffer.read(chunks[static_cast<std::size_t>(value)]);
        if (!lease) return false;
        CHECK(lease->span()[0] == static_cast<std::byte>(value));
        CHECK(lease->span()[8] == static_cast<std::byte>(value + 50));
        return true;
      });
    }
    world.audited();
    if (!refused && world.buffer.stats().background_failures == 0) break;
    ++failed;
    REQUIRE(nth < 200);
  }
  CHECK(failed >= 12);
}

TEST_CASE("a chunk may be removed, discarded and written while its transfer is in flight or has failed") {
  for (const std::uint64_t fails : {0U, 1U}) {
    CAPTURE(fails);
    memory_over_file world(4, {failing_reads(1, fails), failing_writes(3, fails)});
    const chunk_handle first = world.stored(1);
    const chunk_handle second = world.stored(2);
    REQUIRE(world.buffer.prefetch(first));
    REQUIRE(world.buffer.remove(first));
    CHECK(world.buffer.read(first).code() == errc::stale_handle);
    REQUIRE(world.buffer.prefetch(second));
    REQUIRE(world.buffer.discard(second));
    CHECK(world.buffer.read(second).code() == errc::no_contents);
    world.fill(second, 3);
    REQUIRE(world.buffer.evict(second));
    world.fill(second, 4);
    CHECK(world.holds(second, 4));
    REQUIRE(world.buffer.evict(second));
    REQUIRE(world.buffer.remove(second));
    world.audited();
    CHECK(world.buffer.stats().tiers[0].used == 0);
    CHECK(world.buffer.stats().tiers[1].used == 0);
  }
}

TEST_CASE("a buffer may be destroyed while transfers are in flight") {
  const temporary_folder folder;
  host_space above({.budget = 8 * page});
  file_space<> disk(folder.file("tier"), {.budget = 16 * page});
  {
    tiered_buffer<host_space, file_space<>> buffer({}, {above, 8 * page}, {disk, 16 * page});
    for (int i = 0; i < 8; ++i) {
      const chunk_handle chunk = buffer.create(page).value();
      std::ranges::fill(buffer.write(chunk).value().span(), std::byte{1});
      REQUIRE(buffer.evict(chunk));
    }
  }
  CHECK(above.used() == 0);
  CHECK(disk.used() == 0);
}

TEST_CASE("a space with a range for each copy has them all back when the buffer is destroyed") {
  stitched_host_space above(stitched_source({.budget = 1 << 20}), {.budget = 1 << 20});
  host_space beneath({.budget = 1 << 20});
  {
    tiered_buffer<stitched_host_space, host_space> buffer({}, {above, 1 << 20}, {beneath, 1 << 20});
    const chunk_handle chunk = buffer.create(100'000).value();
    std::ranges::fill(buffer.write(chunk).value().span(), std::byte{1});
    CHECK(above.used() == 131'072);
  }
  CHECK(above.used() == 0);
}

TEST_CASE("if a parting cannot read the contents, both clones stay as they were") {
  memory_over_file world(3, {failing_reads(1, 1)});
  const chunk_handle chunk = world.stored(1);
  const chunk_handle twin = world.buffer.clone(chunk).value();
  CHECK(world.buffer.update(twin).code() == errc::read_failed);
  CHECK(world.buffer.stats().shared == 2);
  CHECK(world.buffer.stats().tiers[0].used == 0);
  CHECK(world.buffer.stats().tiers[1].used == page);
  world.audited();
  world.buffer.update(twin).value().span()[0] = std::byte{2};
  CHECK(world.holds(chunk, 1));
  CHECK(world.buffer.read(twin).value().span()[0] == std::byte{2});
  world.audited();
}

TEST_CASE("if a parting needs the space of a failing write-back, both clones stay as they were") {
  memory_over_file world(1, {failing_writes(1, 1)});
  const chunk_handle chunk = world.written(1);
  const chunk_handle twin = world.buffer.clone(chunk).value();
  CHECK(world.buffer.write(twin).code() == errc::write_failed);
  CHECK(world.buffer.stats().shared == 2);
  CHECK(world.buffer.stats().tiers[1].used == page);
  CHECK(world.holds(twin, 1));
  world.audited();
  world.fill(twin, 2);
  CHECK(world.holds(chunk, 1));
  CHECK(world.holds(twin, 2));
}

TEST_CASE(
    "if the patience of a parting ends, both clones stay as they were, and the shared contents continue to "
    "come up") {
  // Reads end only when asked for the fifth time.
  memory_over_file world(
      2, {{.what = io_fault::late, .first = 1, .every = 1, .count = 100, .number = 5, .way = side::reads}});
  const chunk_handle chunk = world.stored(1);
  const chunk_handle twin = world.buffer.clone(chunk).value();
  const auto refused = world.buffer.update(twin, llmmem::tiering::best_effort);
  REQUIRE(refused.code() == errc::timed_out);
  CHECK(refused.error().index == twin.slot);
  CHECK(world.buffer.stats().shared == 2);
  CHECK(world.buffer.stats().tiers[1].used == page);
  world.audited();
  for (int i = 0; i < 100 && world.buffer.tier_of(chunk).value() != 0; ++i)
    world.buffer.progress();
  CHECK(world.buffer.tier_of(chunk).value() == 0);
  CHECK(world.buffer.update(twin, llmmem::tiering::best_effort));
  CHECK(world.buffer.stats().shared == 0);
  world.audited();
}

TEST_CASE("if a parting gets no space in time, both clones stay as they were") {
  memory_over_file world(1, {{.what = io_fault::late, .first = 1, .every = 1, .count = 100, .number = 5}});
  const chunk_handle chunk = world.written(1);
  const chunk_handle twin = world.buffer.clone(chunk).value();
  const auto refused = world.buffer.write(twin, llmmem::tiering::best_effort);
  REQUIRE(refused.code() == errc::timed_out);
  CHECK(refused.error().index == twin.slot);
  CHECK(world.buffer.stats().shared == 2);
  CHECK(world.buffer.stats().tiers[1].used == page);
  world.audited();
  world.fill(twin, 2);
  CHECK(world.holds(chunk, 1));
}

TEST_CASE("a parting waits for another chunk's transfer at most as long as its patience") {
  memory_over_file world(
      1, {{.what = io_fault::late, .first = 1, .every = 1, .count = 100, .number = 5, .way = side::reads}});
  const chunk_handle chunk = world.stored(1);
  const chunk_handle twin = world.buffer.clone(chunk).value();
  const chunk_handle other = world.stored(2);
  REQUIRE(world.buffer.prefetch(other));
  const auto refused = world.buffer.write(twin, llmmem::tiering::best_effort);
  REQUIRE(refused.code() == errc::timed_out);
  CHECK(refused.error().index == twin.slot);
  CHECK(world.buffer.stats().background_failures == 0);
  CHECK(world.buffer.stats().shared == 2);
  world.audited();
}

TEST_CASE("an exception of a copy within tier 0 leaves both clones, and a chunk in resize, as they were") {
  throwing_space above(4 * page);
  host_space beneath({.budget = 8 * page});
  tiered_buffer<throwing_space, host_space> buffer({}, {above, 4 * page}, {beneath, 8 * page});
  const chunk_handle chunk = buffer.create(page).value();
  static_cast<void>(buffer.write(chunk).value());
  const chunk_handle twin = buffer.clone(chunk).value();
  const auto before = buffer.stats();
  const auto same = [&] {
    CHECK(buffer.audit().empty());
    CHECK(buffer.stats().tiers[0].used == before.tiers[0].used);
    CHECK(buffer.stats().tiers[1].used == before.tiers[1].used);
  };
  above.throws_in = 1;
  CHECK_THROWS_AS(static_cast<void>(buffer.update(twin)), std::runtime_error);
  CHECK(buffer.stats().shared == 2);
  same();
  above.throws_in = 1;
  CHECK_THROWS_AS(static_cast<void>(buffer.resize(twin, 2 * page)), std::runtime_error);
  CHECK(buffer.stats().shared == 2);
  same();
  REQUIRE(buffer.remove(twin));
  above.throws_in = 1;
  CHECK_THROWS_AS(static_cast<void>(buffer.resize(chunk, 2 * page)), std::runtime_error);
  CHECK(buffer.bytes(chunk).value() == page);
  same();
}

TEST_CASE("a demotion that fails is a drop, and no lease is refused for it") {
  for (const io_fault fault : {io_fault::error, io_fault::lost}) {
    const temporary_folder folder;
    host_space space({.budget = 1 << 20});
    // The third write to the middle tier's file is the demotion.
    faulty_file between(
        folder.file("middle"),
        {.budget = 4 * page,
         .queue = {.driver = llmmem::transfer::driven_by::waiters, .give_up_ns = 1'000'000}},
        std::vector{planned_fault{.what = fault, .first = 3, .count = 1, .way = side::writes}});
    tiered_buffer<tier<host_space, lru_eviction, demoting<>>, faulty_file, host_space> buffer(
        {}, {space, page}, {between, 2 * page}, {space, 16 * page});
    std::array<chunk_handle, 2> chunks;
    for (std::size_t i = 0; i < 2; ++i) {
      chunks[i] = buffer.create(page).value();
      std::ranges::fill(buffer.write(chunks[i]).value().span(), static_cast<std::byte>(i));
      REQUIRE(buffer.flush(chunks[i]));
    }
    REQUIRE(buffer.execute(chunks[1], plan_operation::drop, 1) == llmmem::tiering::step_outcome::done);
    CHECK(buffer.read(chunks[0]).value().span()[9] == std::byte{0});
    CHECK(buffer.stats().background_failures == 1);
    CHECK(buffer.stats().tiers[0].demotions == 0);
    CHECK(buffer.read(chunks[1]).value().span()[9] == std::byte{1});
    CHECK(buffer.audit().empty());
  }
}
