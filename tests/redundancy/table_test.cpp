#include <llmmem/redundancy/placement.hpp>
#include <llmmem/redundancy/redundancy.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>

using namespace llmmem;

namespace {

std::string percent(double chance) {
  if (chance == 0) return "never";
  if (chance > 0.995) return "over 99 %";
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.2g %%", chance * 100);
  return text.data();
}

/// A row of the table in docs/redundancy.md: the chance that a state is lost.
std::string row(const char* text, std::uint32_t jump, std::uint32_t world) {
  const auto scheme = redundancy_scheme::parse(text);
  const replica_map map = llmmem::redundancy::grouped(jump).place(scheme, rank_count{world});
  const double memory = static_cast<double>(map.extra_bytes(rank_id{0}, 1 << 30)) / (1 << 30);
  std::array<char, 32> states{};
  std::snprintf(states.data(), states.size(), "%.3g", memory);
  std::string line = std::string("| `") + text + "` | " + states.data() + " |";
  for (const std::uint32_t failures : {2U, 3U, 4U, 8U})
    line += " " + percent(map.loss_probability(failures).probability) + " |";
  return line;
}

}  // namespace

TEST_CASE("the table of docs/redundancy.md matches the maps") {
  std::ifstream file(std::string(LLMMEM_SOURCE_DIR) + "/docs/redundancy.md");
  REQUIRE(file);
  const std::string page{std::istreambuf_iterator<char>(file), {}};
  for (const std::uint32_t world : {64U, 1024U}) {
    for (const char* scheme : {"mirror:2", "mirror:3", "parity:3", "parity:7", "rs:2+2", "rs:6+2"}) {
      const std::string wanted = row(scheme, 8, world);
      CAPTURE(wanted);
      CHECK(page.find(wanted) != std::string::npos);
    }
  }
}
