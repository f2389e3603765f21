#include <llmmem/detail/tag_chunk.hpp>

#include <doctest/doctest.h>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

TEST_CASE("all comparisons of bytes agree: this processor's, the portable one, and one byte at a time") {
  for (const auto seed : seeds(2000)) {
    CAPTURE(seed);
    random_numbers random(seed);
    detail::tag_bytes bytes{};
    // Few values, 0 and those around the sign bit among them, so that many are equal and many off by one.
    for (auto& byte : bytes)
      byte = static_cast<std::uint8_t>(random.below(2U) * 0x7F + random.below(3U));
    for (unsigned tag = 0; tag <= 0xFF; ++tag) {
      CAPTURE(tag);
      std::uint32_t expected = 0;
      for (std::size_t i = 0; i < bytes.size(); ++i)
        expected |= bytes[i] == tag ? 1U << i : 0U;
      REQUIRE(detail::equal_bytes(bytes, static_cast<std::uint8_t>(tag)) == expected);
      REQUIRE(detail::equal_bytes_portable(bytes, static_cast<std::uint8_t>(tag)) == expected);
    }
  }
}
