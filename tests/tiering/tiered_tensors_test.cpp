/// What tensors in a tiered buffer promise, one sentence at a time.
#include <llmmem/space/host.hpp>
#include <llmmem/testing/faulty_io.hpp>
#include <llmmem/tiered_buffer.hpp>
#include <llmmem/tiering/tiered_tensors.hpp>
#include <llmmem/transfer/file_space.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "support/heap_counter.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::faulty_io;
using llmmem::testing::io_fault;
using llmmem::testing::planned_fault;

namespace {

constexpr std::uint64_t unit = 64;
using buffer_type = tiered_buffer<host_space, host_space>;
using tensors_type = tiered_tensors<buffer_type>;

// Three small tensors in one chunk, one alone in the next, and one in four parts of 224, 224, 224 and 128
// bytes.
constexpr tensor_id first{0};
constexpr tensor_id second{1};
constexpr tensor_id third{2};
constexpr tensor_id alone{3};
constexpr tensor_id large{4};
constexpr std::array<tensor_size, 5> sizes{{{.bytes = 64, .alignment = 64},
                                            {.bytes = 4, .alignment = 64},
                                            {.bytes = 64, .alignment = 64},
                                            {.bytes = 250, .alignment = 64},
                                            {.bytes = 800, .alignment = 64}}};
constexpr chunk_mapping_options options{.group_bytes = 192, .split_bytes = 256, .unit = 32};

struct small_world {
  host_space above;
  host_space beneath;
  buffer_type buffer;
  tensors_type tensors;

  explicit small_world(std::uint64_t top = 4096)
      : above({.budget = 1 << 16}),
        beneath({.budget = 1 << 16}),
        buffer({}, {above, top, unit}, {beneath, 1 << 15, unit}),
        tensors(buffer, map_to_chunks(sizes, options), "weights") {}

  void audited() const {
    for (const std::string& broken : buffer.audit())
      FAIL_CHECK(broken);
    for (const std::string& broken : tensors.audit())
      FAIL_CHECK(broken);
  }
  [[nodiscard]] std::uint64_t down() const { return buffer.stats().moved.links[0].offload.bytes; }
  [[nodiscard]] std::uint64_t up() const { return buffer.stats().moved.links[0].onboard.bytes; }
};

template <class Lease>
void fill(const Lease& lease, int value) {
  std::ranges::fill(lease.span(), static_cast<std::byte>(value));
}
template <class Lease>
[[nodiscard]] bool holds(const Lease& lease, int value) {
  return std::ranges::all_of(lease.span(),
                             [value](std::byte each) { return each == static_cast<std::byte>(value); });
}
void fill(tensors_type& tensors, tensor_id tensor, int value) {
  fill(tensors.write(tensor).value(), value);
}
[[nodiscard]] bool holds(tensors_type& tensors, tensor_id tensor, int value) {
  return holds(tensors.read(tensor).value(), value);
}

}  // namespace

TEST_CASE("a lease spans the tensor's bytes and no others") {
  small_world world;
  auto one = world.tensors.write(first).value();
  auto two = world.tensors.write(second).value();
  auto three = world.tensors.write(third).value();
  CHECK(one.span().size() == 64);
  CHECK(two.span().size() == 4);
  CHECK(two.span().data() == one.span().data() + 64);
  CHECK(three.span().data() == one.span().data() + 128);
  CHECK(three.range().bytes == 64);
  CHECK(world.buffer.stats().leases == 1);
  CHECK(world.tensors.stats().leases == 3);
  CHECK(world.tensors.stats().chunk_leases == 1);
  world.audited();
}

TEST_CASE("tensors in one chunk are read and written at the same time, and none of them moves") {
  small_world world;
  fill(world.tensors, first, 1);
  fill(world.tensors, second, 2);
  fill(world.tensors, third, 3);
  auto reading = world.tensors.read(first).value();
  const auto again = world.tensors.read(first).value();
  const auto* place = reading.span().data();
  auto changing = world.tensors.update(second).value();
  auto fresh = world.tensors.write(third).value();
  fill(changing, 4);
  fill(fresh, 5);
  CHECK(holds(reading, 1));
  CHECK(reading.span().data() == place);
  CHECK(world.tensors.write(first).error().message() ==
        "weights: tensor 0 is leased 2 times; end these leases first");
  CHECK(world.tensors.read(third).error().message() ==
        "weights: tensor 2 is leased 1 times; end these leases first");
  CHECK(world.tensors.evict(first).error().message() ==
        "weights: tensor 0 is leased 4 times; end these leases first");
  CHECK(world.tensors.flush(first).code() == errc::chunk_leased);
  world.audited();
  changing.end();
  reading.end();
  CHECK(holds(again, 1));
  CHECK(fresh.span().data() == place + 128);
  fresh.end();
  CHECK(holds(world.tensors, second, 4));
  CHECK(holds(world.tensors, third, 5));
  world.audited();
}

TEST_CASE("only bytes of written tensors move down, although the chunk was leased once for all") {
  small_world world;
  fill(world.tensors, first, 1);
  fill(world.tensors, second, 2);
  fill(world.tensors, third, 3);
  REQUIRE(world.buffer.flush());
  CHECK(world.down() == 192);
  {
    const auto reading = world.tensors.read(second).value();
    const auto changing = world.tensors.update(third).value();
    fill(changing, 4);
    fill(world.tensors, first, 5);
  }
  REQUIRE(world.tensors.flush(first));
  CHECK(world.down() == 192 + 128);
  REQUIRE(world.tensors.evict(second));
  CHECK(holds(world.tensors, first, 5));
  CHECK(holds(world.tensors, second, 2));
  CHECK(holds(world.tensors, third, 4));
  {
    const auto reading = world.tensors.read(second).value();
  }
  REQUIRE(world.buffer.flush());
  CHECK(world.down() == 192 + 128);
}

TEST_CASE("only the bytes that an update named move down") {
  small_world world;
  fill(world.tensors, alone, 1);
  REQUIRE(world.buffer.flush());
  const std::uint64_t before = world.down();
  {
    auto lease = world.tensors.update(alone, 0, {64, 65}).value();
    CHECK(lease.span().size() == 250);
    lease.span()[64] = std::byte{2};
  }
  REQUIRE(world.tensors.flush(alone));
  CHECK(world.down() - before == 64);
  CHECK(world.tensors.update(alone, 0, {250, 251}).error().message() ==
        "weights: bytes up to 251 requested, but it has 250; request fewer, or make it larger");
  CHECK(world.tensors.update(alone, 0, {3, 2}).code() == errc::past_the_bytes);
}

TEST_CASE("a write brings its chunk in for the neighbours, and not if there are none") {
  small_world world;
  fill(world.tensors, first, 1);
  REQUIRE(world.tensors.evict(first));
  fill(world.tensors, first, 2);
  CHECK(world.up() == 0);
  REQUIRE(world.tensors.evict(first));
  fill(world.tensors, second, 3);
  CHECK(world.up() == 192);
  CHECK(holds(world.tensors, first, 2));
  fill(world.tensors, alone, 4);
  REQUIRE(world.tensors.evict(alone));
  fill(world.tensors, alone, 5);
  CHECK(world.up() == 192);
  world.audited();
}

TEST_CASE("a tensor that was never written has no contents, regardless of its neighbours") {
  small_world world;
  CHECK(world.tensors.prefetch(first).code() == errc::no_contents);
  fill(world.tensors, first, 1);
  CHECK(world.tensors.read(second).error().message() ==
        "weights: tensor 1 has no contents; write all of it first");
  CHECK(world.tensors.update(second).code() == errc::no_contents);
  CHECK(world.tensors.prefetch(second).code() == errc::no_contents);
  CHECK(world.tensors.has_contents(first).value());
  CHECK_FALSE(world.tensors.has_contents(second).value());
  CHECK(world.tensors.flush(second));
  CHECK(world.tensors.read(alone).code() == errc::no_contents);
}

TEST_CASE("a chunk's contents are discarded with those of its last tensor, and no sooner") {
  small_world world;
  fill(world.tensors, first, 1);
  fill(world.tensors, third, 3);
  REQUIRE(world.tensors.discard(first));
  REQUIRE(world.tensors.discard(second));
  CHECK(world.tensors.read(first).code() == errc::no_contents);
  CHECK(holds(world.tensors, third, 3));
  CHECK(world.buffer.stats().tiers[0].used == 192);
  {
    const auto held = world.tensors.read(third).value();
    CHECK(world.tensors.discard(third).error().message() ==
          "weights: tensor 2 is leased 1 times; end these leases first");
  }
  REQUIRE(world.tensors.discard(third));
  CHECK(world.buffer.stats().tiers[0].used == 0);
  CHECK(world.down() == 0);
  world.audited();
}

TEST_CASE("a large tensor is leased part by part") {
  small_world world;
  CHECK(world.tensors.parts(large).value().size() == 4);
  CHECK(world.tensors.read(large).error().message() ==
        "weights: tensor 4 has 4 parts; take them one by one, or by for_each_part");
  CHECK(world.tensors.write(large).code() == errc::tensor_in_parts);
  CHECK(world.tensors.update(large).code() == errc::tensor_in_parts);
  for (std::uint32_t i = 0; i < 3; ++i)
    fill(world.tensors.write(large, i).value(), static_cast<int>(i));
  CHECK_FALSE(world.tensors.has_contents(large).value());
  auto last = world.tensors.write(large, 3).value();
  CHECK(last.span().size() == 128);
  fill(last, 3);
  last.end();
  CHECK(world.tensors.has_contents(large).value());
  CHECK(holds(world.tensors.read(large, 2).value(), 2));
  CHECK(world.tensors.update(large, 1));
  CHECK(world.tensors.read(large, 4).error().message() ==
        "weights: tensor 4 has no part 4; its number of parts is 4");
  REQUIRE(world.tensors.discard(large));
  CHECK(world.tensors.read(large, 0).code() == errc::no_contents);
  world.audited();
}

TEST_CASE("the next part comes up while the caller works on one") {
  small_world world;
  REQUIRE(world.tensors.for_each_part<access_mode::write>(
      large, [](auto& lease, const tensor_part& part) { fill(lease, static_cast<int>(part.begin / 224)); }));
  REQUIRE(world.tensors.evict(large));
  world.buffer.progress();
  std::vector<std::uint64_t> begins;
  std::vector<std::uint64_t> brought;
  REQUIRE(world.tensors.for_each_part<access_mode::read>(large, [&](auto& lease, const tensor_part& part) {
    CHECK(holds(lease, static_cast<int>(part.begin / 224)));
    begins.push_back(part.begin);
    brought.push_back(world.buffer.stats().moved.links[0].onboard.operations);
  }));
  CHECK(begins == std::vector<std::uint64_t>{0, 224, 448, 672});
  CHECK(brought == std::vector<std::uint64_t>{2, 3, 4, 4});
  REQUIRE(world.tensors.evict(large));
  world.buffer.progress();
  REQUIRE(world.tensors.prefetch(large));
  CHECK(world.buffer.stats().moved.links[0].onboard.operations == 8);
}

TEST_CASE("a walk over the parts ends with a refused one") {
  small_world world;
  fill(world.tensors.write(large, 0).value(), 1);
  fill(world.tensors.write(large, 1).value(), 1);
  int seen = 0;
  const auto count = [&](auto&, const tensor_part&) { ++seen; };
  CHECK(world.tensors.for_each_part<access_mode::read_write>(large, count).code() == errc::no_contents);
  CHECK(seen == 2);
  CHECK(world.tensors.for_each_part<access_mode::read>(tensor_id{5}, count).code() == errc::no_such_tensor);
  REQUIRE(world.tensors.prefetch(large));
  // One in one part is one of its kind.
  fill(world.tensors, alone, 1);
  CHECK(world.tensors.for_each_part<access_mode::read>(alone, count));
  CHECK(seen == 3);
}

TEST_CASE("every call refuses missing tensors and parts") {
  small_world world;
  constexpr tensor_id gone{5};
  CHECK(world.tensors.read(gone).error().message() ==
        "weights: there is no tensor 5; the number of tensors is 5");
  const std::array codes{
      world.tensors.write(gone).code(),     world.tensors.update(gone).code(),
      world.tensors.read(gone, 0).code(),   world.tensors.write(gone, 0).code(),
      world.tensors.update(gone, 0).code(), world.tensors.update(gone, 0, {0, 1}).code(),
      world.tensors.bytes(gone).code(),     world.tensors.parts(gone).code(),
      world.tensors.chunk(gone, 0).code(),  world.tensors.has_contents(gone).code(),
      world.tensors.prefetch(gone).code(),  world.tensors.evict(gone).code(),
      world.tensors.flush(gone).code(),     world.tensors.discard(gone).code(),
  };
  for (const error_code each : codes)
    CHECK(each == errc::no_such_tensor);
  CHECK(world.tensors.write(first, 1).code() == errc::no_such_part);
  CHECK(world.tensors.update(first, 1).code() == errc::no_such_part);
  CHECK(world.tensors.update(first, 1, {0, 1}).code() == errc::no_such_part);
  CHECK(world.tensors.chunk(first, 1).code() == errc::no_such_part);
  CHECK(world.tensors.bytes(large).value() == 800);
}

TEST_CASE("a tensor that is read may be flushed if it is alone in its chunk, and never evicted") {
  small_world world;
  fill(world.tensors, alone, 1);
  {
    const auto one = world.tensors.read(alone).value();
    const auto two = world.tensors.read(alone).value();
    CHECK(world.tensors.flush(alone));
    CHECK(world.down() == 256);
    CHECK(world.tensors.evict(alone).error().message() ==
          "weights: tensor 3 is leased 2 times; end these leases first");
    CHECK(world.tensors.write(alone).code() == errc::chunk_leased);
  }
  const auto changing = world.tensors.update(alone).value();
  CHECK(world.tensors.flush(alone).error().message() ==
        "weights: tensor 3 is leased 1 times; end these leases first");
}

TEST_CASE("a lease that was moved from holds nothing, and a move to one ends its former hold") {
  small_world world;
  fill(world.tensors, first, 1);
  fill(world.tensors, alone, 2);
  auto held = world.tensors.read(first).value();
  auto other = std::move(held);
  CHECK_FALSE(held);
  CHECK(held.span().empty());
  CHECK(holds(other, 1));
  other = world.tensors.read(alone).value();
  CHECK(world.tensors.update(first));
  CHECK(holds(other, 2));
  {
    const auto kept = std::move(other);
    CHECK(world.buffer.evict(world.tensors.chunk(alone, 0).value()).code() == errc::chunk_leased);
    other = world.tensors.read(first).value();
  }
  CHECK(holds(other, 1));
  other.end();
  other.end();
  CHECK(other.span().empty());
  CHECK(world.tensors.update(alone));
  world.audited();
}

TEST_CASE("a lease that times out changes nothing") {
  const temporary_folder folder;
  host_space above({.budget = 1 << 16});
  file_space<faulty_io<posix_io>> disk(
      folder.file("tier"), {.budget = 1 << 20, .queue = {.driver = llmmem::transfer::driven_by::waiters}},
      std::vector{planned_fault{
          .what = io_fault::late, .every = 1, .count = 9, .number = 40, .way = planned_fault::side::reads}});
  tiered_buffer<host_space, file_space<faulty_io<posix_io>>> buffer({}, {above, 1 << 14, unit},
                                                                    {disk, 1 << 19});
  tiered_tensors tensors(buffer, map_to_chunks(sizes, options));
  for (const tensor_id each : {first, second, alone})
    fill(tensors.write(each).value(), 1);
  for (const tensor_id each : {first, alone}) {
    REQUIRE(tensors.flush(each));
    REQUIRE(tensors.evict(each));
  }
  CHECK(tensors.read(first, llmmem::tiering::best_effort).code() == errc::timed_out);
  CHECK(tensors.read(alone, llmmem::tiering::best_effort).code() == errc::timed_out);
  CHECK(tensors.write(third, llmmem::tiering::best_effort).code() == errc::timed_out);
  CHECK_FALSE(tensors.has_contents(third).value());
  CHECK(tensors.audit().empty());
  CHECK(tensors.stats().leases == 3);
  CHECK(holds(tensors.read(second).value(), 1));
  CHECK(holds(tensors.update(first).value(), 1));
  CHECK(holds(tensors.read(alone).value(), 1));
}

TEST_CASE("tensors that do not fit leave the buffer as it was") {
  host_space above({.budget = 1 << 16});
  host_space beneath({.budget = 1 << 16});
  buffer_type buffer({}, {above, 4096, unit}, {beneath, 1024, unit});
  CHECK_THROWS_AS(tensors_type(buffer, map_to_chunks(sizes, options)), out_of_memory);
  CHECK(buffer.stats().tiers[1].used == 0);
  buffer_type few({.max_chunks = 3}, {above, 4096, unit}, {beneath, 4096, unit});
  CHECK_THROWS_AS(tensors_type(few, map_to_chunks(sizes, options)), out_of_memory);
  CHECK(few.stats().tiers[1].used == 0);
  {
    const tensors_type fits(buffer, map_to_chunks(std::array{sizes[0]}, options));
  }
  CHECK(buffer.stats().tiers[1].used == 0);
}

TEST_CASE("chunks of tensors are chunks of the buffer, and counted") {
  small_world world;
  const tiered_tensors_stats stats = world.tensors.stats();
  CHECK(stats.tensors == 5);
  CHECK(stats.parts == 8);
  CHECK(stats.chunks == 6);
  CHECK(stats.shared_chunks == 1);
  CHECK(stats.tensor_bytes == 1182);
  CHECK(stats.padding_bytes == 192 + 256 + 800 - 1182);
  CHECK(stats.metadata_bytes > 0);
  const chunk_handle shared = world.tensors.chunk(first, 0).value();
  CHECK(world.tensors.chunk(third, 0).value() == shared);
  CHECK(world.buffer.bytes(shared).value() == 192);
  CHECK(world.buffer.bytes(world.tensors.chunk(large, 3).value()).value() == 128);
}

TEST_CASE("leases of tensors allocate nothing") {
  small_world world(1024);
  for (const tensor_id each : {first, second, third, alone})
    fill(world.tensors, each, 1);
  const std::uint64_t before = heap_allocations();
  for (int round = 0; round < 10; ++round) {
    static_cast<void>(world.tensors.for_each_part<access_mode::write>(large, [](auto&, const auto&) {}));
    const auto reading = world.tensors.read(first).value();
    fill(world.tensors, second, round);
    static_cast<void>(world.tensors.prefetch(alone));
    static_cast<void>(world.tensors.flush(large));
    static_cast<void>(world.tensors.evict(large));
    static_cast<void>(world.tensors.discard(third));
    fill(world.tensors, third, round);
  }
  CHECK(heap_allocations() == before);
  world.audited();
}
