#include <llmmem/transfer/direct_span.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using llmmem_tests::random_numbers;
using llmmem_tests::seeds;

namespace {

constexpr direct_limits limits{.offset_alignment = 4096, .memory_alignment = 512};
constexpr std::uint64_t most = 16384;

}  // namespace

TEST_CASE("an aligned transfer bypasses the page cache, at most `most` bytes at once") {
  CHECK(llmmem::transfer::first_span(8192, 4096, 512, limits, most) == io_span{4096, true});
  CHECK(llmmem::transfer::first_span(8192, 20480, 512, limits, most) == io_span{16384, true});
}

TEST_CASE("an unaligned head is sent separately, and a tail shorter than a block through the page cache") {
  CHECK(llmmem::transfer::first_span(8000, 20480, 512 - 192, limits, most) == io_span{192, false});
  CHECK(llmmem::transfer::first_span(8192, 4095, 512, limits, most) == io_span{4095, false});
  CHECK(llmmem::transfer::first_span(8192, 4097, 512, limits, most) == io_span{4096, true});
}

TEST_CASE("a transfer without a whole block goes in one piece") {
  CHECK(llmmem::transfer::first_span(8000, 4095, 512 - 192, limits, most) == io_span{4095, false});
  CHECK(llmmem::transfer::first_span(8000, 100, 512, limits, most) == io_span{100, false});
}

TEST_CASE("memory with another alignment than the file goes through the page cache") {
  CHECK(llmmem::transfer::first_span(8192, 65536, 513, limits, most) == io_span{16384, false});
  CHECK(llmmem::transfer::first_span(8000, 65536, 512, limits, most) == io_span{16384, false});
}

TEST_CASE("the spans of any transfer cover it once, and every direct one respects the limits") {
  for (const auto seed : seeds(2000)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const direct_limits asked{.offset_alignment = std::uint64_t{512} << random.below(4U),
                              .memory_alignment = std::uint64_t{1} << random.below(14U)};
    const std::uint64_t at_once = asked.offset_alignment * (1 + random.below(5U));
    std::uint64_t offset = random.below(40000U);
    std::uint64_t left = 1 + random.below(80000U);
    std::uintptr_t address = random.below(20000U);
    // Half of them aligned alike, which chance would seldom make them.
    if (random.once_in(2)) address = asked.memory_alignment * 3 + offset;
    bool direct_before = false;
    std::uint64_t turns = 0;
    while (left != 0) {
      const io_span span = llmmem::transfer::first_span(offset, left, address, asked, at_once);
      REQUIRE(span.bytes != 0);
      REQUIRE(span.bytes <= left);
      REQUIRE(span.bytes <= at_once);
      if (span.direct) {
        REQUIRE(offset % asked.offset_alignment == 0);
        REQUIRE(span.bytes % asked.offset_alignment == 0);
        REQUIRE(address % asked.memory_alignment == 0);
      } else {
        // Whole blocks go through the page cache only when memory rules the other way out.
        const std::uint64_t head =
            (asked.offset_alignment - offset % asked.offset_alignment) % asked.offset_alignment;
        const bool has_block = span.bytes >= head + asked.offset_alignment;
        REQUIRE((!has_block || (address + head) % asked.memory_alignment != 0));
      }
      if (span.direct != direct_before) ++turns;
      direct_before = span.direct;
      offset += span.bytes;
      address += span.bytes;
      left -= span.bytes;
    }
    // A head, a body, a tail; where memory asks for more than the file does, chance aligns it on the way.
    if (asked.memory_alignment <= asked.offset_alignment) CHECK(turns <= 2);
  }
}
