/// Tensors that share chunks, or are several, hold what was written to them, over every kind of tier.
#include <llmmem/space/host.hpp>
#include <llmmem/testing/faulty_io.hpp>
#include <llmmem/testing/simulated_space.hpp>
#include <llmmem/tiered_buffer.hpp>
#include <llmmem/tiering/tiered_tensors.hpp>
#include <llmmem/transfer/file_space.hpp>

#include <doctest/doctest.h>

#include <cerrno>
#include <cstdint>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/temporary_folder.hpp"
#include "support/tensor_world.hpp"
#include "support/tiered_world.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::faulty_io;
using llmmem::testing::io_fault;
using llmmem::testing::planned_fault;
using llmmem::testing::simulated_space;
using llmmem::testing::virtual_clock;

namespace {

constexpr std::uint64_t top_bytes = 80'000;
constexpr std::uint64_t low_bytes = 1 << 20;
constexpr chunk_mapping_options options{.group_bytes = 4096, .split_bytes = 8192, .unit = 64};

template <class Buffer, class Touch>
void run_program(Buffer& buffer, Touch touch, std::uint64_t seed) {
  tiered_tensors tensors(buffer, map_to_chunks(random_tensor_sizes(seed, 24), options));
  tensor_world world(buffer, tensors, touch, seed);
  world.run(400);
}

}  // namespace

TEST_CASE("tensors over two tiers of host memory hold what was written to them") {
  for (const auto seed : seeds(20)) {
    CAPTURE(seed);
    host_space above({.budget = 1 << 20});
    host_space beneath({.budget = 2 << 20});
    tiered_buffer<host_space, host_space> buffer({}, {above, top_bytes, 64}, {beneath, low_bytes, 64});
    run_program(buffer, host_touch{}, seed);
    CHECK(buffer.stats().tiers[1].used == 0);
  }
}

TEST_CASE("tensors under a write-through policy hold what was written to them") {
  for (const auto seed : seeds(10)) {
    CAPTURE(seed);
    host_space above({.budget = 1 << 20});
    host_space beneath({.budget = 2 << 20});
    tiered_buffer<tier<host_space, lru_eviction, write_through>, host_space> buffer(
        {}, {above, top_bytes, 64}, {beneath, low_bytes, 64});
    run_program(buffer, host_touch{}, seed);
  }
}

TEST_CASE("tensors over a device, the host and a file hold what was written to them") {
  const temporary_folder folder;
  for (const auto seed : seeds(6)) {
    CAPTURE(seed);
    virtual_clock clock;
    simulated_space device(clock, {.budget = 1 << 20, .link = {.bytes_per_second = 1'000'000'000 * seed}});
    host_space between({.budget = 1 << 20});
    file_space<> disk(folder.file("tier"), {.budget = 2 << 20});
    tiered_buffer<simulated_space, host_space, file_space<>> buffer(
        {}, {device, top_bytes, 64}, {between, 2 * top_bytes, 64}, {disk, low_bytes});
    run_program(buffer, queue_touch<simulated_space>{&device}, seed);
  }
}

TEST_CASE("failing devices refuse leases of tensors, and change none of them") {
  const temporary_folder folder;
  std::uint64_t refusals = 0;
  for (const auto seed : seeds(20)) {
    CAPTURE(seed);
    random_numbers random(seed);
    host_space above({.budget = 1 << 20});
    file_space<faulty_io<posix_io>> disk(folder.file("tier"),
                                         {.budget = 2 << 20, .queue = {.max_failures = 100'000}},
                                         std::vector{planned_fault{.what = io_fault::error,
                                                                   .first = 1 + random.below(20U),
                                                                   .every = 3 + random.below(20U),
                                                                   .count = 1000,
                                                                   .number = EIO}});
    tiered_buffer<host_space, file_space<faulty_io<posix_io>>> buffer({}, {above, top_bytes, 64},
                                                                      {disk, low_bytes});
    tiered_tensors tensors(buffer, map_to_chunks(random_tensor_sizes(seed, 24), options));
    tensor_world world(buffer, tensors, host_touch{}, seed, devices::failing);
    world.run(400);
    refusals += world.refusals();
  }
  CHECK(refusals > 0);
}
