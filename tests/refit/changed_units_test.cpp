#include <llmmem/refit/detail/changed_units.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

std::vector<std::byte> random_bytes(random_numbers& random, std::size_t count, std::uint64_t changes_one_in) {
  std::vector<std::byte> made(count);
  for (std::byte& each : made) {
    if (random.once_in(changes_one_in)) each = static_cast<std::byte>(random.next());
  }
  return made;
}

}  // namespace

TEST_CASE("applied changes are the new bytes, and any other form is refused or stays within the bytes") {
  for (const auto seed : seeds(300)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const auto count = static_cast<std::size_t>(random.below(std::uint64_t{600}));
    const auto old = random_bytes(random, count, 1);
    const auto changes = random_bytes(random, count, 1 + random.below(std::uint64_t{60}));
    std::vector<std::byte> form(3 * count + 4);
    const auto bytes = detail::encode_changes(changes, form);
    REQUIRE(bytes);
    form.resize(*bytes);
    std::vector<std::byte> now = old;
    REQUIRE(detail::apply_changes(form, now));
    for (std::size_t i = 0; i < count; ++i)
      REQUIRE(now[i] == (old[i] ^ changes[i]));
    // A form that does not fit is nothing, and one that ends too early is refused.
    if (*bytes == 0) continue;
    std::vector<std::byte> less(*bytes - 1);
    CHECK_FALSE(detail::encode_changes(changes, less));
    CHECK_FALSE(detail::apply_changes(std::span(form).first(form.size() - 1), now));
    form[static_cast<std::size_t>(random.below(form.size()))] ^=
        static_cast<std::byte>(1 + random.below(255U));
    static_cast<void>(detail::apply_changes(form, now));
  }
}

TEST_CASE("the form of no changes has no bytes, and that of one has three or more") {
  std::vector<std::byte> changes(1000);
  std::vector<std::byte> form(16);
  CHECK(detail::encode_changes(changes, form) == 0);
  changes[301] = std::byte{1};
  CHECK(detail::encode_changes(changes, form) == 5);  // a gap of 150 units takes two bytes
  std::vector<std::byte> now(1000);
  // A gap past the end, more units than there are, a number without an end, a run of no units.
  for (const std::vector<unsigned>& bad :
       {std::vector<unsigned>{0xFF, 0x7F, 1, 0, 0}, {0, 0x7F, 0, 0}, {0x80}, {1, 0}}) {
    std::vector<std::byte> bytes;
    for (const unsigned each : bad)
      bytes.push_back(static_cast<std::byte>(each));
    CHECK_FALSE(detail::apply_changes(bytes, now));
  }
}
