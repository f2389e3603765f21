#include <llmmem/space/pages.hpp>

#include <doctest/doctest.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>

using namespace llmmem;

TEST_CASE("a request of at least a huge page starts at a huge page boundary and is advised") {
  page_source source;
  const std::uint64_t huge = source.report().huge_page_bytes;
  if (huge == 0 || huge > 64 * 1024 * 1024) {
    MESSAGE("skipped: this kernel has no transparent huge pages of a size to test with");
    return;
  }
  const std::uint64_t bytes = 2 * huge + 1;
  std::byte* const data = source.take(bytes, 64);
  REQUIRE(data != nullptr);
  CHECK(reinterpret_cast<std::uintptr_t>(data) % huge == 0);
  std::memset(data, 1, bytes);
  CHECK(source.report().huge_advised + source.report().huge_refused == 1);
  CHECK(source.report().mapped_bytes == source.footprint(bytes, 64));
  source.give_back(data, bytes, 64);
  CHECK(source.report().mapped_bytes == 0);
}

TEST_CASE("without the hint no huge pages are requested") {
  page_source source{page_options{.huge = huge_pages::never}};
  std::byte* const data = source.take(8 << 20, 64);
  REQUIRE(data != nullptr);
  CHECK(source.report().huge_advised + source.report().huge_refused == 0);
  source.give_back(data, 8 << 20, 64);
}

TEST_CASE("a NUMA hint is granted or refused and never fatal, and the report says which") {
  for (const std::uint32_t node : {std::uint32_t{0}, page_source::max_numa_node}) {
    CAPTURE(node);
    page_source source{page_options{.numa_node = node}};
    CHECK(source.footprint(1, 1) == source.report().page_bytes);
    std::byte* const data = source.take(100, 8);
    REQUIRE(data != nullptr);
    std::memset(data, 1, 100);
    const page_report& report = source.report();
    CHECK(report.numa_bound + report.numa_refused == 1);
    CHECK((report.last_errno != 0) == (report.numa_refused == 1));
    if (node == page_source::max_numa_node) CHECK(report.numa_refused == 1);  // no such machine
    source.give_back(data, 100, 8);
  }
}

TEST_CASE("unneeded pages mapped for an alignment are unmapped at once") {
  const auto address_space_pages = [] {
    std::uint64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    return pages;
  };
  const std::uint64_t before = address_space_pages();
  if (before == 0) {
    MESSAGE("skipped: no /proc/self/statm");
    return;
  }
  page_source source;
  for (int i = 0; i < 100; ++i) {
    std::byte* const data = source.take(1, 1 << 28);
    REQUIRE(data != nullptr);
    source.give_back(data, 1, 1 << 28);
  }
  const std::uint64_t most = before + (std::uint64_t{1} << 30) / source.report().page_bytes;
  CHECK(address_space_pages() < most);  // there may be less than before: threads of others end
}

TEST_CASE("an impossible NUMA node is refused at once") {
  CHECK_THROWS_WITH_AS(page_source(page_options{.numa_node = 1023}),
                       "page_source: NUMA node 1023 exceeds the largest, 1022", argument_error);
}

TEST_CASE("alignments above a page are met by mapping") {
  page_source source;
  for (std::uint64_t alignment = 1; alignment <= (std::uint64_t{1} << 26); alignment *= 2) {
    CAPTURE(alignment);
    std::byte* const data = source.take(3, alignment);
    REQUIRE(data != nullptr);
    CHECK(reinterpret_cast<std::uintptr_t>(data) % alignment == 0);
    std::memset(data, 1, 3);
    source.give_back(data, 3, alignment);
  }
}
