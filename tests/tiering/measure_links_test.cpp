/// Links as they are measured, against links whose speed is known.
#include <llmmem/eviction/min.hpp>
#include <llmmem/prefetch_schedule.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/testing/simulated_space.hpp>
#include <llmmem/testing/virtual_clock.hpp>
#include <llmmem/tiered_buffer.hpp>
#include <llmmem/tiering/measure_links.hpp>
#include <llmmem/transfer/file_space.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "support/temporary_folder.hpp"

using namespace llmmem;
using llmmem::testing::simulated_space;
using llmmem::testing::virtual_clock;
using llmmem_tests::temporary_folder;

namespace {

/// A virtual clock; each look at it takes `look_ns`.
struct looking_meter {
  virtual_clock* clock = nullptr;
  std::uint64_t look_ns = 0;
  [[nodiscard]] std::uint64_t now_ns() const noexcept {
    clock->advance(look_ns);
    return clock->now().ns;
  }
};
struct looking_traits : tiered_traits {
  using clock = looking_meter;
};
using device_buffer =
    basic_tiered_buffer<looking_traits, tier<simulated_space, min_eviction>, tier<host_space>>;

constexpr std::uint64_t mib = std::uint64_t{1} << 20;

bool is_near(std::uint64_t seen, std::uint64_t right, double by) {
  const auto s = static_cast<double>(seen), r = static_cast<double>(right);
  return s >= r * (1 - by) && s <= r * (1 + by);
}

}  // namespace

TEST_CASE("a link's rate, latency and duplex are measured correctly, with a real and a virtual clock") {
  for (const std::uint64_t look_ns : {0U, 50U}) {
    CAPTURE(look_ns);
    for (const std::uint64_t mb_per_second : {std::uint64_t{200}, std::uint64_t{5000}}) {
      const std::uint64_t rate = mb_per_second * 1'000'000;
      CAPTURE(rate);
      virtual_clock clock;
      simulated_space device(clock, {.budget = 8 * mib, .link = {rate, 40'000}});
      host_space host({.budget = 32 * mib});
      device_buffer buffer(looking_meter{&clock, look_ns}, {}, {device, 8 * mib}, {host, 32 * mib});
      const auto links = measure_links(buffer);
      REQUIRE(links);
      REQUIRE(links->size() == 1);
      const link_model& link = links->front();
      CHECK(is_near(link.bytes_per_second, rate, .02));
      CHECK(is_near(link.offload_bytes_per_second, rate, .02));
      CHECK(is_near(link.latency_ns, 40'000, .05));
      CHECK(link.duplex == link_duplex::half);   // the simulated link takes one copy at a time
      CHECK(buffer.stats().tiers[1].used == 0);  // its chunks are gone
      CHECK(buffer.audit().empty());
    }
  }
}

TEST_CASE("a measurement leaves the program's chunks as they were, and uses the available space") {
  const temporary_folder folder;
  host_space host({.budget = 2 * mib});
  host_space middle({.budget = 4 * mib});
  file_space<> disk(folder.file("tier"), {.budget = 8 * mib});
  tiered_buffer<host_space, host_space, file_space<>> buffer({}, {host, 2 * mib}, {middle, 4 * mib},
                                                             {disk, 8 * mib});
  std::vector<chunk_handle> chunks;
  // The last tier has 64 KiB left: not enough for what would be measured with otherwise.
  for (std::size_t i = 0; i < 127; ++i) {
    chunks.push_back(buffer.create(64 * 1024).value());
    auto lease = buffer.write(chunks.back()).value();
    for (std::byte& each : lease.span())
      each = static_cast<std::byte>(i);
  }
  const auto links = measure_links(buffer, {.bytes = 0, .repeats = 2});
  REQUIRE_MESSAGE(links, links.error().message());
  REQUIRE(links->size() == 2);
  for (const link_model& each : *links)
    check_link(each, "measured");
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    const auto lease = buffer.read(chunks[i]).value();
    CHECK(lease.span().front() == static_cast<std::byte>(i));
    CHECK(lease.span().back() == static_cast<std::byte>(i));
  }
  CHECK(buffer.stats().tiers[2].chunks == 127);
  CHECK(buffer.audit().empty());
}

TEST_CASE("if links cannot be measured, the result is an error, and nothing is left behind") {
  host_space host({.budget = 2 * mib});
  host_space below({.budget = 2 * mib});
  tiered_buffer<host_space, host_space> buffer({.max_chunks = 2}, {host, 2 * mib}, {below, 2 * mib});
  const chunk_handle all = buffer.create(2 * mib).value();
  CHECK(measure_links(buffer).code() == errc::out_of_bytes);
  REQUIRE(buffer.remove(all));
  const chunk_handle one = buffer.create(4096).value();
  CHECK(measure_links(buffer).code() == errc::table_full);
  REQUIRE(buffer.remove(one));
  CHECK(measure_links(buffer).has_value());
  CHECK(buffer.stats().tiers[1].used == 0);
}

TEST_CASE("a schedule without given links measures them") {
  virtual_clock clock;
  simulated_space device(clock, {.budget = 4 * mib, .link = {1'000'000'000, 5'000}});
  host_space host({.budget = 32 * mib});
  device_buffer buffer(looking_meter{&clock, 0}, {}, {device, 4 * mib}, {host, 32 * mib});
  prefetch_schedule schedule(buffer, {});
  REQUIRE(schedule.machine().links.size() == 1);
  CHECK(is_near(schedule.machine().links[0].bytes_per_second, 1'000'000'000, .02));
}
