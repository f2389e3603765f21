#include <llmmem/space/growable_range.hpp>
#include <llmmem/space/host_virtual.hpp>
#include <llmmem/testing/simulated_mapper.hpp>

#include <doctest/doctest.h>

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <exception>
#include <fstream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

const std::uint64_t page = system_page_bytes();

/// Pages of `[data, data + bytes)` that are in memory now.
std::uint64_t resident_pages(std::byte* data, std::uint64_t bytes) {
  std::vector<unsigned char> there(bytes / page);
  REQUIRE(::mincore(data, bytes, there.data()) == 0);
  std::uint64_t count = 0;
  for (const unsigned char each : there)
    count += each & 1U;
  return count;
}

/// The signal that a child dies of when it writes to `at`; 0 when it does not.
int signal_of_touching(std::byte* at) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::signal(SIGSEGV, SIG_DFL);  // sanitizers have a handler of their own
    *static_cast<volatile std::byte*>(at) = std::byte{1};
    ::_exit(0);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

}  // namespace

TEST_CASE("a handle mapped at two addresses has the same bytes at both") {
  host_virtual_memory memory({.budget = 4 * page});
  const virtual_range range = memory.try_reserve(4 * page).value();
  const physical_handle handle = memory.try_create(page).value();
  memory.map(range, 0, std::span(&handle, 1)).value();
  memory.map(range, 2 * page, std::span(&handle, 1)).value();
  range.data[7] = std::byte{42};
  CHECK(range.data[2 * page + 7] == std::byte{42});
  memory.unmap(range, 0, page).value();
  CHECK(range.data[2 * page + 7] == std::byte{42});
  memory.map(range, page, std::span(&handle, 1)).value();
  CHECK(range.data[page + 7] == std::byte{42});
  CHECK(memory.used() == page);
  CHECK(memory.stats().mapped_bytes == 2 * page);
}

TEST_CASE("stitched pieces read as one range, in their order") {
  host_virtual_memory memory({.budget = 64 * page});
  const virtual_range home = memory.try_reserve(64 * page).value();
  std::vector<physical_handle> chosen;
  for (std::uint64_t i = 0; i < 16; ++i) {
    const auto handle = commit(memory, home, i * page, page).value();
    std::memset(home.data + i * page, static_cast<int>(i), page);
    if (i % 3 == 0) chosen.push_back(handle);
  }
  const virtual_range joined = stitch(memory, chosen).value();
  REQUIRE(joined.bytes == 6 * page);
  for (std::uint64_t i = 0; i < joined.bytes; ++i)
    REQUIRE(joined.data[i] == static_cast<std::byte>(i / page * 3));
  std::memset(joined.data, 0x77, joined.bytes);
  CHECK(home.data[3 * page] == std::byte{0x77});
  CHECK(home.data[4 * page] == std::byte{4});
}

TEST_CASE("reserved or unmapped addresses fault when accessed") {
  host_virtual_memory memory({.budget = 4 * page});
  const virtual_range range = memory.try_reserve(2 * page).value();
  CHECK(signal_of_touching(range.data) == SIGSEGV);
  static_cast<void>(commit(memory, range, 0, page).value());
  CHECK(signal_of_touching(range.data) == 0);
  CHECK(signal_of_touching(range.data + page) == SIGSEGV);
  memory.decommit(range, 0, page).value();
  CHECK(signal_of_touching(range.data) == SIGSEGV);
}

TEST_CASE("destroyed memory returns to the system, and new memory is zero") {
  host_virtual_memory memory({.budget = 8 * page});
  const virtual_range range = memory.try_reserve(8 * page).value();
  const auto handle = commit(memory, range, 0, 8 * page).value();
  CHECK(resident_pages(range.data, 8 * page) == 0);  // nothing was touched
  std::memset(range.data, 0x5A, 8 * page);
  CHECK(resident_pages(range.data, 8 * page) == 8);
  memory.unmap(range, 0, 8 * page).value();
  memory.map(range, 0, std::span(&handle, 1)).value();
  CHECK(resident_pages(range.data, 8 * page) == 8);  // unmapped is not given back
  memory.decommit(range, 0, 8 * page).value();
  static_cast<void>(commit(memory, range, 0, 8 * page).value());
  CHECK(resident_pages(range.data, 8 * page) == 0);
  for (std::uint64_t i = 0; i < 8 * page; ++i)
    REQUIRE(range.data[i] == std::byte{0});
  CHECK(memory.mapper().report().kept_bytes == 0);
}

TEST_CASE("memory taken in advance is present before its first access") {
  host_virtual_memory memory(host_mapper({.take = backing::at_once}), {.budget = 4 * page});
  const virtual_range range = memory.try_reserve(4 * page).value();
  static_cast<void>(commit(memory, range, 0, 4 * page).value());
  CHECK(memory.mapper().held_bytes() == 4 * page);
  memory.decommit(range, 0, 4 * page).value();
  CHECK(memory.mapper().held_bytes() == 0);
}

TEST_CASE("ranges begin at a multiple of the requested granularity") {
  const std::uint64_t large = 512 * page;
  host_virtual_memory memory(host_mapper({.granularity = large, .huge = huge_pages::advise}),
                             {.budget = 4 * large});
  CHECK(memory.granularity() == large);
  for (int i = 0; i < 5; ++i) {
    const virtual_range range = memory.try_reserve(large).value();
    CHECK(reinterpret_cast<std::uintptr_t>(range.data) % large == 0);
  }
  const virtual_range range = memory.try_reserve(large).value();
  static_cast<void>(commit(memory, range, 0, large).value());
  range.data[large - 1] = std::byte{1};
  const auto& report = memory.mapper().report();
  CHECK(report.huge_advised + report.huge_refused == 1);  // a hint: either is right
}

TEST_CASE("a granularity that is not a multiple of the page size is refused with both") {
  const std::string text = "host_mapper: a granularity of " + std::to_string(page + 1) +
                           " bytes is not a multiple of the page size, " + std::to_string(page);
  CHECK_THROWS_WITH_AS(host_mapper({.granularity = page + 1}), text.c_str(), argument_error);
}

TEST_CASE("a refusal of address space or file length has the system's error number") {
  host_virtual_memory memory({.budget = max_bytes / page * page, .name = "kv"});
  const std::uint64_t huge = (std::uint64_t{1} << 61) / page * page;
  const auto range = memory.try_reserve(huge);
  REQUIRE_FALSE(range);
  CHECK(range.error().message() == "kv: the system refused " + std::to_string(huge) +
                                       " bytes of address space (error 12); reserve less, or raise the limit "
                                       "(ulimit -v)");
  REQUIRE(memory.try_create(max_bytes / page * page - page).has_value());
  const auto handle = memory.try_create(page);
  CHECK(handle.has_value());  // just fits the longest file there is
}

TEST_CASE("a refused memfd is reported with errno and an alternative") {
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  rlimit none = before;
  none.rlim_cur = 0;
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &none) == 0);
  std::exception_ptr refused;
  try {
    host_mapper mapper;
  } catch (...) {
    refused = std::current_exception();  // looked at when files can be opened again: sanitizers need some
  }
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &before) == 0);
  REQUIRE(refused);
  CHECK_THROWS_WITH_AS(std::rethrow_exception(refused),
                       "host_mapper: memfd_create: Too many open files (errno 24); Linux has it from 3.17 "
                       "on, and a sandbox may forbid it: use host_space there",
                       system_error);
}

TEST_CASE("a process at the system's limit of mappings learns it, and continues after unmapping") {
  std::ifstream limit_file("/proc/sys/vm/max_map_count");
  std::uint64_t limit = 0;
  if (!(limit_file >> limit) || limit > 100'000) return;  // more than a test should map
  const std::uint64_t count = limit + 10;
  host_virtual_memory memory(
      {.budget = page * 2, .max_mappings = static_cast<std::uint32_t>(count), .name = "kv"});
  const virtual_range range = memory.try_reserve(count * page).value();
  const physical_handle handle = memory.try_create(page).value();  // one page everywhere: no two merge
  std::uint64_t mapped = 0;
  result<void> last;
  while (mapped < count && (last = memory.map(range, mapped * page, std::span(&handle, 1))))
    ++mapped;
  REQUIRE_FALSE(last);
  CHECK(last.error().message() ==
        "kv: the system refused to change the mapping of " + std::to_string(page) +
            " bytes (error 12) with " + std::to_string(mapped) +
            " mappings held; hold fewer, map larger pieces, or raise vm.max_map_count");
  CHECK(memory.audit().empty());
  memory.unmap(range, 0, mapped / 2 * page).value();
  memory.map(range, 0, std::span(&handle, 1)).value();
}

TEST_CASE("a growing and shrinking range keeps its elements in place") {
  for (const auto seed : seeds(20)) {
    CAPTURE(seed);
    random_numbers random(seed);
    host_virtual_memory memory({.budget = 64 * page});
    growable_range<host_virtual_memory, std::uint32_t> range(memory, 64 * page / 4, random.below(3 * page));
    std::vector<std::uint32_t> naive;
    const std::uint32_t* const where = range.data();
    for (int i = 0; i < 60; ++i) {
      if (random.once_in(3)) {
        const std::uint64_t count = random.below(range.capacity() + 1);
        const auto done = range.resize(count);
        REQUIRE(done.has_value() == (range.size() == count));
        if (!done) continue;  // the last step may pass the budget
        const std::uint64_t known = naive.size();
        naive.resize(count);
        for (std::uint64_t k = known; k < count; ++k)
          naive[k] = range[k] = static_cast<std::uint32_t>(random.next());
      } else if (range.size() < range.capacity()) {
        const auto value = static_cast<std::uint32_t>(random.next());
        if (range.push_back(value)) naive.push_back(value);
      }
      REQUIRE(range.data() == where);
      REQUIRE(std::vector<std::uint32_t>(range.begin(), range.end()) == naive);
      REQUIRE(range.committed_bytes() == memory.used());
      REQUIRE(memory.audit() == std::vector<std::string>{});
    }
  }
}

TEST_CASE("growth past the capacity or the budget is refused, and the range stays as it was") {
  host_virtual_memory memory({.budget = 2 * page, .name = "kv"});
  growable_range<host_virtual_memory> range(memory, 4 * page);
  CHECK(range.resize(4 * page + 1).error().message() ==
        "growable_range: elements: " + std::to_string(4 * page + 1) +
            " requested, but the highest allowed is " + std::to_string(4 * page));
  range.resize(page).value();
  range[0] = std::byte{9};
  CHECK(range.resize(3 * page).code() == errc::out_of_bytes);
  CHECK(range.size() == page);
  CHECK(range.committed_bytes() == page);
  CHECK(memory.used() == page);
  CHECK(range[0] == std::byte{9});
  growable_range<host_virtual_memory> moved(std::move(range));
  CHECK(moved[0] == std::byte{9});
  CHECK(range.capacity() == 0);  // NOLINT(bugprone-use-after-move)
  CHECK(range.resize(0));
  moved = growable_range<host_virtual_memory>();
  CHECK(memory.used() == 0);
  CHECK(memory.stats().ranges == 0);
  CHECK_THROWS_WITH_AS((growable_range<host_virtual_memory>(memory, 0)),
                       "kv: growable_range: a capacity of 0 elements", length_error);
}

TEST_CASE("if the system refuses any call, a growing or shrinking range stays as it was") {
  using simulated = llmmem::testing::simulated_virtual_memory;
  for (const auto& [from, to] : {std::pair<std::uint64_t, std::uint64_t>{1, 4}, {4, 1}}) {
    for (std::uint64_t nth = 1;; ++nth) {
      CAPTURE(nth);
      simulated memory({.budget = std::uint64_t{64} << 20});
      const std::uint64_t unit = memory.granularity();
      growable_range<simulated> range(memory, 8 * unit);
      range.resize(from * unit).value();
      memory.mapper().refuse({.first = nth});
      const auto done = range.resize(to * unit);
      REQUIRE(memory.audit() == std::vector<std::string>{});
      if (memory.mapper().refused() == 0) {
        CHECK(done);
        CHECK(nth == (from < to ? 10 : 2));  // three steps of three calls; one unmapping
        break;
      }
      CHECK_FALSE(done);
      CHECK(range.size() == from * unit);
      CHECK(range.committed_bytes() == from * unit);
      CHECK(memory.used() == from * unit);
      memory.mapper().refuse({});
      CHECK(range.resize(to * unit));
      CHECK(memory.used() == to * unit);
    }
  }
}
