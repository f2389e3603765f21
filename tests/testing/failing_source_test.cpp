#include <llmmem/testing/failing_source.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

using namespace llmmem;

TEST_CASE("exactly the calls first, first + every, first + 2 every are refused") {
  for (std::uint64_t first = 0; first <= 5; ++first) {
    for (std::uint64_t every = 0; every <= 4; ++every) {
      CAPTURE(first);
      CAPTURE(every);
      testing::failing_source<> source{first, every};
      std::uint64_t refused = 0;
      for (std::uint64_t call = 1; call <= 20; ++call) {
        const bool due =
            first != 0 && (call == first || (every != 0 && call > first && (call - first) % every == 0));
        std::byte* const data = source.take(8, 8);
        REQUIRE((data == nullptr) == due);
        refused += due ? 1 : 0;
        if (data != nullptr) source.give_back(data, 8, 8);
      }
      CHECK(source.calls() == 20);
      CHECK(source.refused() == refused);
    }
  }
}
