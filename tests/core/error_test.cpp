#include <llmmem/error.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <stdexcept>
#include <type_traits>

using namespace llmmem;

TEST_CASE("a product is exact up to max_bytes, and refused past it with both factors") {
  CHECK(checked_multiply(0, 0, "x") == 0);
  CHECK(checked_multiply(max_bytes, 0, "x") == 0);
  CHECK(checked_multiply(0, ~std::uint64_t{0}, "x") == 0);
  CHECK(checked_multiply(max_bytes, 1, "x") == max_bytes);
  CHECK(checked_multiply(1, max_bytes, "x") == max_bytes);
  CHECK(checked_multiply(std::uint64_t{1} << 31, std::uint64_t{1} << 31, "x") == std::uint64_t{1} << 62);

  // 2^63 - 1 = 7 * 7 * 73 * 127 * 337 * 92737 * 649657, so 7 divides it evenly and 8 does not.
  CHECK(checked_multiply(max_bytes / 7, 7, "x") == max_bytes);
  CHECK_THROWS_AS(static_cast<void>(checked_multiply(max_bytes / 7 + 1, 7, "x")), length_error);
  CHECK(checked_multiply(max_bytes / 8, 8, "x") == max_bytes - 7);
  CHECK_THROWS_AS(static_cast<void>(checked_multiply(max_bytes / 8 + 1, 8, "x")), length_error);

  CHECK_THROWS_WITH_AS(static_cast<void>(checked_multiply(std::uint64_t{1} << 32, std::uint64_t{1} << 31,
                                                          "pool: blocks x bytes")),
                       "pool: blocks x bytes: 4294967296 x 2147483648 exceeds the limit of 2^63 - 1 bytes; "
                       "lower one of the two",
                       length_error);
  // The product wraps to 0 in 64 bits.
  CHECK_THROWS_AS(static_cast<void>(checked_multiply(std::uint64_t{1} << 32, std::uint64_t{1} << 32, "x")),
                  length_error);
}

TEST_CASE("a sum is exact up to max_bytes, and refused past it with both terms") {
  CHECK(checked_add(0, 0, "x") == 0);
  CHECK(checked_add(max_bytes, 0, "x") == max_bytes);
  CHECK(checked_add(0, max_bytes, "x") == max_bytes);
  CHECK(checked_add(max_bytes - 5, 5, "x") == max_bytes);
  CHECK_THROWS_WITH_AS(
      static_cast<void>(checked_add(max_bytes, 1, "index")),
      "index: 9223372036854775807 + 1 exceeds the limit of 2^63 - 1 bytes; lower one of the two",
      length_error);
  CHECK_THROWS_AS(static_cast<void>(checked_add(1, max_bytes, "x")), length_error);
  CHECK_THROWS_AS(static_cast<void>(checked_add(max_bytes + 1, 0, "x")), length_error);
  // The sum wraps to 0 in 64 bits.
  CHECK_THROWS_AS(static_cast<void>(checked_add(~std::uint64_t{0}, 1, "x")), length_error);
}

TEST_CASE("checked arithmetic works in constant expressions") {
  static_assert(checked_multiply(3, 5, "x") == 15);
  static_assert(checked_add(3, 5, "x") == 8);
}

TEST_CASE("every exception of the library can be caught as llmmem::error and as std::runtime_error") {
  const auto derives = []<class... Errors>() { return (std::is_base_of_v<error, Errors> && ...); };
  static_assert(
      derives.operator()<length_error, argument_error, out_of_memory, handle_error, system_error>());
  static_assert(std::is_base_of_v<std::runtime_error, error>);
  CHECK_THROWS_WITH_AS(throw system_error("open: /data: no such file"), "open: /data: no such file", error);
}
