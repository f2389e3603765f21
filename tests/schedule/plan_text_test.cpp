#include <llmmem/hash/crc32c.hpp>
#include <llmmem/schedule/plan_text.hpp>
#include <llmmem/schedule/planners.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <span>
#include <string>

#include "support/random.hpp"
#include "support/schedule_world.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

schedule_plan some_plan(std::uint64_t seed) {
  random_numbers random(seed);
  const auto trace =
      random_trace(random, {.chunks = 5, .accesses = 14, .most_units = 3, .writes = true, .overlaps = true});
  schedule_machine machine{.budgets = {trace.max_leased_bytes() + 1'000, 8'000},
                           .links = {{.bytes_per_second = 1'000'000'000, .duplex = link_duplex::half}},
                           .edges = {0, 0}};
  return schedule::next_use{}(trace, machine);
}

/// With the checksum that belongs to it.
std::string sealed(std::string text) {
  text.resize(text.rfind("crc32c"));
  const std::uint32_t crc = crc32c(0, std::as_bytes(std::span(text)));
  text += "crc32c ";
  for (int i = 8; i-- > 0;)
    text += "0123456789abcdef"[crc >> (4 * i) & 15U];
  return text + "\n";
}

std::string why(const std::string& text) {
  try {
    static_cast<void>(read_plan(text));
  } catch (const argument_error& wrong) {
    return wrong.what();
  }
  return "read";
}

std::string replaced(std::string text, const std::string& what, const std::string& by) {
  text.replace(text.find(what), what.size(), by);
  return text;
}

}  // namespace

TEST_CASE("a plan and its text survive a round trip") {
  for (const auto seed : seeds(100)) {
    CAPTURE(seed);
    const auto plan = some_plan(seed);
    const std::string text = write_plan(plan);
    const auto back = read_plan(text);
    REQUIRE(back == plan);
    REQUIRE(write_plan(back) == text);
  }
}

TEST_CASE("a text with a changed byte, or cut short, is refused") {
  const std::string text = write_plan(some_plan(3));
  random_numbers random(1);
  for (std::size_t i = 0; i < text.size(); ++i) {
    CAPTURE(i);
    std::string damaged = text;
    damaged[i] = static_cast<char>(damaged[i] ^ static_cast<char>(1 + random.below(std::uint64_t{255})));
    REQUIRE(why(damaged).starts_with("plan, line "));
    REQUIRE(why(text.substr(0, i)).starts_with("plan, line "));
  }
}

TEST_CASE("a damaged text with a right checksum is refused or read, and is always harmless") {
  const std::string text = write_plan(some_plan(5));
  for (const auto seed : seeds(3000, 500)) {
    CAPTURE(seed);
    random_numbers random(seed);
    std::string damaged = text;
    for (std::uint64_t i = 0; i <= random.below(std::uint64_t{3}); ++i) {
      const std::size_t at = random.below(damaged.size());
      const std::string_view letters = "0123456789 \naefhlmnrstwz-";
      switch (random.below(std::uint32_t{3})) {
        case 0:
          damaged[at] = letters[random.below(letters.size())];
          break;
        case 1:
          damaged.erase(at, 1 + random.below(std::uint64_t{30}));
          break;
        default:
          damaged.insert(at, damaged.substr(random.below(damaged.size()), random.below(std::uint64_t{40})));
      }
      if (damaged.rfind("crc32c") == std::string::npos) damaged += "crc32c";
    }
    const std::string reason = why(sealed(damaged));
    REQUIRE((reason == "read" || reason.starts_with("plan, line ")));
  }
}

TEST_CASE("a wrong plan is refused by line and reason") {
  const std::string text = write_plan(some_plan(3));
  CHECK(why("") == "plan, line 1: the text ends where 'llmmem-schedule' is expected");
  CHECK(why("#!/bin/sh\n") == "plan, line 1: 'llmmem-schedule' expected, found '#!/bin/sh'");
  CHECK(why(replaced(text, "llmmem-schedule 1", "llmmem-schedule 2")) ==
        "plan, line 1: version 2; this reads 1");
  CHECK(why(replaced(text, "chunks 5", "chunks 05")) ==
        "plan, line 3: chunks '05' is not a number of 64 bits");
  CHECK(why(replaced(text, "chunks 5", "chunks 99999999999")) ==
        "plan, line 3: chunks is 99999999999; the most is 1073741824");
  CHECK(why(replaced(text, "\nlink 1000000000", "\nlink 0")) ==
        "plan, line 8: schedule_machine: link 0: a bandwidth of 0 bytes per second; it must be 1 to 2^60");
  CHECK(why(text + "\n").ends_with("there is text after the last line"));
  CHECK(why(replaced(text, "fetch", "fetsh")).ends_with("operation 'fetsh' is not known"));
  CHECK(why(replaced(text, "bound ", "bound 1"))
            .ends_with("the checksum differs: the text was changed or damaged"));
}
