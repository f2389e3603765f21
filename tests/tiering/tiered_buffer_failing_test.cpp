// What a buffer holds while its devices fail now and then.
#include <llmmem/space/host.hpp>
#include <llmmem/testing/faulty_io.hpp>
#include <llmmem/testing/simulated_space.hpp>
#include <llmmem/tiered_buffer.hpp>
#include <llmmem/transfer/file_space.hpp>

#include <doctest/doctest.h>

#include <cerrno>
#include <vector>

#include "support/seeds.hpp"
#include "support/temporary_folder.hpp"
#include "support/tiered_world.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::faulty_io;
using llmmem::testing::io_fault;
using llmmem::testing::planned_fault;
using llmmem::testing::simulated_space;
using llmmem::testing::virtual_clock;

TEST_CASE("a device with occasional failures refuses leases, and loses nothing") {
  using between = tier<host_space, lru_eviction, write_back, identity_codec, admit_half>;
  const temporary_folder folder;
  for (const auto seed : seeds(12)) {
    CAPTURE(seed);
    random_numbers random(seed);
    std::vector<planned_fault> plan;
    for (const int error : {EIO, ENOSPC}) {
      plan.push_back({.what = io_fault::error,
                      .first = 1 + random.below(20U),
                      .every = 3 + random.below(20U),
                      .count = 1000,
                      .number = error});
    }
    plan.push_back({.what = io_fault::bit_flip, .first = random.below(9U), .every = 11, .count = 1000});
    host_space above({.budget = 2 * top_bytes});
    host_space beneath({.budget = 2 * host_bytes});
    file_space<faulty_io<posix_io>> disk(folder.file("tier"),
                                         {.budget = disk_bytes, .queue = {.max_failures = 100'000}}, plan);
    tiered_buffer<tier<host_space, lru_eviction, demoting<>>, between, file_space<faulty_io<posix_io>>>
        buffer({}, {above, top_bytes}, {beneath, host_bytes}, {disk, disk_bytes});
    tiered_world world(buffer, host_touch{}, seed, {.may_fail = true});
    world.run();
  }
}

TEST_CASE("devices with occasional failures on both sides of a ring refuse leases, and lose nothing") {
  using failing_space = file_space<faulty_io<posix_io>>;
  const temporary_folder folder;
  for (const auto seed : seeds(12)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const auto plan = [&] {
      std::vector<planned_fault> faults;
      for (const int error : {EIO, ENOSPC}) {
        faults.push_back({.what = io_fault::error,
                          .first = 1 + random.below(20U),
                          .every = 5 + random.below(30U),
                          .count = 1000,
                          .number = error});
      }
      faults.push_back({.what = io_fault::bit_flip, .first = random.below(9U), .every = 17, .count = 1000});
      return faults;
    };
    host_space memory({.budget = 2 * top_bytes});
    failing_space disk(folder.file("disk"), {.budget = 2 * host_bytes, .queue = {.max_failures = 100'000}},
                       plan());
    failing_space share(folder.file("share"), {.budget = disk_bytes, .queue = {.max_failures = 100'000}},
                        plan());
    tiered_buffer<host_space, failing_space, failing_space> buffer(
        {.bounce_bytes = 12'288, .bounce_slot_bytes = 4096}, {memory, top_bytes}, {disk, host_bytes},
        {share, disk_bytes});
    tiered_world world(buffer, host_touch{}, seed, {.may_fail = true});
    world.run();
  }
}

TEST_CASE("a device directly above a file with flipped bits gets no wrong byte") {
  using failing_space = file_space<faulty_io<posix_io>>;
  const temporary_folder folder;
  for (const auto seed : seeds(12)) {
    CAPTURE(seed);
    const std::vector<planned_fault> plan{
        {.what = io_fault::bit_flip, .first = 1 + seed % 7, .every = 9, .count = 1000},
        {.what = io_fault::error, .first = 5, .every = 13, .count = 1000, .number = EIO}};
    virtual_clock clock;
    simulated_space device(clock, {.budget = 2 * top_bytes});
    failing_space disk(folder.file("tier"), {.budget = disk_bytes, .queue = {.max_failures = 100'000}}, plan);
    tiered_buffer<simulated_space, failing_space> buffer({.bounce_bytes = 12'288, .bounce_slot_bytes = 4096},
                                                         {device, top_bytes}, {disk, disk_bytes});
    tiered_world world(buffer, queue_touch<simulated_space>{&device}, seed, {.may_fail = true});
    world.run();
  }
}
