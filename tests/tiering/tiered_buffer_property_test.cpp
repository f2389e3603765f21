#include <llmmem/codec/byte_plane.hpp>
#include <llmmem/eviction/s3fifo.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/testing/simulated_space.hpp>
#include <llmmem/tiered_buffer.hpp>
#include <llmmem/transfer/file_space.hpp>
#if defined(LLMMEM_TESTS_URING)
#include <llmmem/transfer/uring_io.hpp>
#endif

#include <doctest/doctest.h>

#include <vector>

#include "support/seeds.hpp"
#include "support/temporary_folder.hpp"
#include "support/tiered_world.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::simulated_space;
using llmmem::testing::virtual_clock;

namespace {

using bf16_plane = byte_plane<dtype::bf16>;

}  // namespace

TEST_CASE("two tiers of host memory hold what was written to them") {
  for (const auto seed : seeds(12)) {
    CAPTURE(seed);
    host_space above({.budget = top_bytes});
    host_space beneath({.budget = disk_bytes});
    tiered_buffer<host_space, host_space> buffer({}, {above, top_bytes, 64}, {beneath, disk_bytes, 64});
    tiered_world world(buffer, host_touch{}, seed, {});
    world.run();
  }
}

TEST_CASE(
    "memory over a file holds what was written to it, regardless of which thread drives the file's queue") {
  const temporary_folder folder;
  for (const llmmem::transfer::driven_by driver :
       {llmmem::transfer::driven_by::own_thread, llmmem::transfer::driven_by::waiters}) {
    for (const auto seed : seeds(6)) {
      CAPTURE(seed);
      host_space above({.budget = 2 * top_bytes});
      file_space<> disk(folder.file("tier"), {.budget = disk_bytes, .queue = {.driver = driver}});
      tiered_buffer<tier<host_space, s3fifo_eviction>, file_space<>> buffer({}, {above, top_bytes},
                                                                            {disk, disk_bytes});
      tiered_world world(buffer, host_touch{}, seed, {});
      world.run();
    }
  }
}

TEST_CASE("three tiers hold what was written to them, under each write policy") {
  const temporary_folder folder;
  const auto run = [&]<class Write>(Write, std::uint64_t seed) {
    host_space above({.budget = 2 * top_bytes});
    host_space beneath({.budget = 2 * host_bytes});
    file_space<> disk(folder.file("tier"), {.budget = disk_bytes, .queue = {.block_bytes = 8192}});
    tiered_buffer<tier<host_space, lru_eviction, Write>, host_space, file_space<>> buffer(
        {}, {above, top_bytes}, {beneath, host_bytes}, {disk, disk_bytes});
    tiered_world world(buffer, host_touch{}, seed, {});
    world.run();
  };
  for (const auto seed : seeds(6)) {
    CAPTURE(seed);
    run(write_back{}, seed);
    run(write_through{}, seed);
    run(write_through_selective<3>{}, seed);
  }
}

TEST_CASE(
    "a middle tier smaller than the first holds what was written, although a chunk's own copy blocks its way "
    "up") {
  const temporary_folder folder;
  for (const auto seed : seeds(30)) {
    CAPTURE(seed);
    host_space above({.budget = 2 * top_bytes});
    host_space beneath({.budget = host_bytes});
    file_space<> disk(folder.file("tier"), {.budget = disk_bytes, .queue = {.block_bytes = 8192}});
    tiered_buffer<host_space, host_space, file_space<>> buffer({}, {above, top_bytes}, {beneath, 50'000},
                                                               {disk, disk_bytes});
    tiered_world world(buffer, host_touch{}, seed, {});
    world.run();
  }
}

TEST_CASE(
    "a first tier that the host cannot access holds what was written to it, and every copy waits its turn") {
  const temporary_folder folder;
  for (const auto seed : seeds(6)) {
    CAPTURE(seed);
    virtual_clock clock;
    simulated_space device(clock,
                           {.budget = 2 * top_bytes, .link = {.bytes_per_second = 1'000'000'000 * seed}});
    host_space beneath({.budget = 2 * host_bytes});
    file_space<> disk(folder.file("tier"), {.budget = disk_bytes});
    tiered_buffer<simulated_space, host_space, file_space<>> buffer(
        {}, {device, top_bytes}, {beneath, host_bytes}, {disk, disk_bytes});
    tiered_world world(buffer, queue_touch<simulated_space>{&device}, seed, {});
    world.run();
  }
}

TEST_CASE(
    "a device directly above a file holds what was written to it, through a ring smaller than its chunks") {
  const temporary_folder folder;
  for (const auto seed : seeds(8)) {
    CAPTURE(seed);
    virtual_clock clock;
    simulated_space device(clock,
                           {.budget = 2 * top_bytes, .link = {.bytes_per_second = 1'000'000'000 * seed}});
    const llmmem::transfer::driven_by driver =
        seed % 2 == 0 ? llmmem::transfer::driven_by::own_thread : llmmem::transfer::driven_by::waiters;
    file_space<> disk(folder.file("tier"), {.budget = disk_bytes, .queue = {.driver = driver}});
    tiered_buffer<simulated_space, file_space<>> buffer(
        {.bounce_bytes = 4096 * (1 + seed % 3), .bounce_slot_bytes = 4096}, {device, top_bytes},
        {disk, disk_bytes});
    tiered_world world(buffer, queue_touch<simulated_space>{&device}, seed, {});
    world.run();
  }
}

TEST_CASE("a file above a slower one holds what was written to it, under any tier above") {
  const temporary_folder folder;
  for (const auto seed : seeds(8)) {
    CAPTURE(seed);
    host_space memory({.budget = 2 * top_bytes});
    file_space<> disk(folder.file("disk"), {.budget = 2 * host_bytes});
    file_space<> share(folder.file("share"), {.budget = disk_bytes, .queue = {.block_bytes = 8192}});
    const tiered_options options{.max_transfers = 1 + static_cast<std::uint32_t>(seed % 5),
                                 .bounce_bytes = 24'576,
                                 .bounce_slot_bytes = 8192};
    if (seed % 2 == 0) {
      tiered_buffer<host_space, file_space<>, file_space<>> buffer(options, {memory, top_bytes, 64},
                                                                   {disk, host_bytes}, {share, disk_bytes});
      tiered_world world(buffer, host_touch{}, seed, {});
      world.run();
    } else {
      virtual_clock clock;
      simulated_space device(clock, {.budget = 2 * top_bytes});
      tiered_buffer<simulated_space, file_space<>, file_space<>> buffer(
          options, {device, top_bytes}, {disk, host_bytes}, {share, disk_bytes});
      tiered_world world(buffer, queue_touch<simulated_space>{&device}, seed, {});
      world.run();
    }
  }
}

#if defined(LLMMEM_TESTS_URING)
TEST_CASE("memory over a file behind io_uring holds what was written to it") {
  const temporary_folder folder;
  for (const auto seed : seeds(6)) {
    CAPTURE(seed);
    host_space above({.budget = 2 * top_bytes});
    file_space<uring_io> disk(folder.file("tier"), {.budget = disk_bytes},
                              uring_options{.issuer = uring_issuer::one_thread});
    tiered_buffer<host_space, file_space<uring_io>> buffer({}, {above, top_bytes}, {disk, disk_bytes});
    tiered_world world(buffer, host_touch{}, seed, {});
    world.run();
  }
}
#endif

TEST_CASE("a last tier with a lossless codec returns what was written") {
  const temporary_folder folder;
  for (const auto seed : seeds(8)) {
    CAPTURE(seed);
    host_space above({.budget = 2 * top_bytes});
    file_space<> disk(folder.file("tier"), {.budget = disk_bytes});
    tiered_buffer<host_space, tier<file_space<>, lru_eviction, write_back, bf16_plane>> buffer(
        {.largest_chunk_bytes = 20'000}, {above, top_bytes}, {disk, disk_bytes});
    tiered_world world(buffer, host_touch{}, seed, {.most_bytes = 19'000, .unit = 2});
    world.run();
  }
}

TEST_CASE("encoded chunks write no other memory if the units of the tiers differ") {
  const temporary_folder folder;
  for (const auto seed : seeds(8)) {
    CAPTURE(seed);
    host_space above({.budget = 2 * top_bytes});
    file_space<> disk(folder.file("tier"), {.budget = disk_bytes});
    tiered_buffer<host_space, tier<file_space<>, lru_eviction, write_back, bf16_plane>> buffer(
        {.largest_chunk_bytes = 5'000}, {above, 40'000, 64}, {disk, disk_bytes});
    tiered_world world(buffer, host_touch{}, seed, {.most_bytes = 4'900, .unit = 2});
    world.run();
  }
}

TEST_CASE("three tiers with a small middle one hold what was written to them") {
  for (const auto seed : seeds(8)) {
    CAPTURE(seed);
    host_space space({.budget = 16 << 20});
    tiered_buffer<host_space, tier<host_space, s3fifo_eviction, write_through>, host_space> buffer(
        {.max_transfers = 1 + static_cast<std::uint32_t>(seed % 4)}, {space, top_bytes, 64},
        {space, 41'000, 64}, {space, disk_bytes, 64});
    tiered_world world(buffer, host_touch{}, seed, {});
    world.run();
  }
}

TEST_CASE("three tiers whose middle one passes half of the chunks hold what was written to them") {
  const temporary_folder folder;
  using between = tier<host_space, lru_eviction, write_back, identity_codec, admit_half>;
  for (const auto seed : seeds(12)) {
    CAPTURE(seed);
    host_space space({.budget = 1 << 20});
    file_space<> disk(folder.file("tier"), {.budget = disk_bytes, .queue = {.block_bytes = 8192}});
    tiered_buffer<host_space, between, file_space<>> buffer({}, {space, top_bytes}, {space, 100'000},
                                                            {disk, disk_bytes});
    tiered_world world(buffer, host_touch{}, seed, {});
    world.run();
    CHECK(buffer.stats().tiers[1].refusals != 0);
  }
}

TEST_CASE("three tiers whose first one demotes clean copies hold what was written to them") {
  const temporary_folder folder;
  using top = tier<host_space, lru_eviction, demoting<write_through_selective<2>>>;
  for (const auto seed : seeds(12)) {
    CAPTURE(seed);
    host_space space({.budget = 1 << 20});
    file_space<> disk(folder.file("tier"), {.budget = disk_bytes, .queue = {.block_bytes = 8192}});
    tiered_buffer<top, host_space, file_space<>> buffer({}, {space, top_bytes}, {space, 100'000},
                                                        {disk, disk_bytes});
    tiered_world world(buffer, host_touch{}, seed, {});
    world.run();
    CHECK(buffer.stats().tiers[0].demotions != 0);
  }
}
