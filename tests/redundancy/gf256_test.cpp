#include <llmmem/redundancy/gf256.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "redundancy/pieces.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// The definition: multiply as polynomials bit by bit, then take the remainder.
std::uint8_t naive_product(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (int bit = 0; bit < 8; ++bit) {
    if ((b >> bit & 1U) != 0) product ^= a << bit;
  }
  for (int bit = 15; bit >= 8; --bit) {
    if ((product >> bit & 1U) != 0) product ^= 0x11DU << (bit - 8);
  }
  return static_cast<std::uint8_t>(product);
}

std::uint8_t byte(std::uint32_t value) {
  return static_cast<std::uint8_t>(value);
}

constexpr std::uint8_t at_compile_time = gf256_multiply(0x80, 2);

}  // namespace

TEST_CASE("every product equals that of the polynomials, bit by bit") {
  for (std::uint32_t a = 0; a < 256; ++a) {
    for (std::uint32_t b = 0; b < 256; ++b)
      REQUIRE(gf256_multiply(byte(a), byte(b)) == naive_product(a, b));
  }
}

TEST_CASE("inverses, quotients and powers agree with products") {
  for (std::uint32_t a = 1; a < 256; ++a) {
    CAPTURE(a);
    REQUIRE(naive_product(a, gf256_inverse(byte(a))) == 1);
    for (std::uint32_t b = 0; b < 256; ++b)
      REQUIRE(naive_product(gf256_divide(byte(b), byte(a)), a) == b);
    std::uint8_t power = 1;
    for (std::uint32_t exponent = 0; exponent < 600; ++exponent) {
      REQUIRE(gf256_power(byte(a), exponent) == power);
      power = naive_product(power, a);
    }
  }
  CHECK(at_compile_time == 0x1D);
  CHECK(gf256_power(0, 0) == 1);
  CHECK(gf256_power(0, 7) == 0);
  CHECK(gf256_power(2, 0xFFFF'FFFF) == 1);  // 255 divides it
}

TEST_CASE("buffers are multiplied and added byte by byte, by every constant and path") {
  std::mt19937_64 random(1);
  for (const simd_path path : paths_here()) {
    CAPTURE(to_text(path));
    for (std::uint32_t c = 0; c < 256; ++c) {
      CAPTURE(c);
      const byte_vector was = random_bytes(random, 600 + random() % 100);
      const byte_vector source = random_bytes(random, was.size() - random() % 40);
      byte_vector expected = was;
      for (std::size_t i = 0; i < source.size(); ++i)
        expected[i] ^= std::byte{naive_product(static_cast<std::uint8_t>(source[i]), c)};
      guarded_piece destination(was, random() % 64);
      REQUIRE(gf256_multiply_add(destination.bytes(), source, byte(c), path).has_value());
      REQUIRE(destination.contents() == expected);
      REQUIRE(destination.guards_stand());
    }
  }
}

TEST_CASE("every length from 0 to 300 is multiplied to its end and no further") {
  std::mt19937_64 random(2);
  for (const simd_path path : paths_here()) {
    CAPTURE(to_text(path));
    for (std::size_t length = 0; length <= 300; ++length) {
      CAPTURE(length);
      const std::uint8_t c = byte(static_cast<std::uint32_t>(random() % 256));
      const byte_vector was = random_bytes(random, length);
      const byte_vector source = random_bytes(random, length);
      byte_vector expected = was;
      for (std::size_t i = 0; i < length; ++i)
        expected[i] ^= std::byte{naive_product(static_cast<std::uint8_t>(source[i]), c)};
      guarded_piece destination(was, random() % 64);
      guarded_piece from(source, random() % 64);
      REQUIRE(gf256_multiply_add(destination.bytes(), from.bytes(), c, path).has_value());
      REQUIRE(destination.contents() == expected);
      REQUIRE(destination.guards_stand());
    }
  }
}

TEST_CASE("buffers are multiplied into others, or in place, regardless of earlier contents") {
  std::mt19937_64 random(3);
  for (const simd_path path : paths_here()) {
    CAPTURE(to_text(path));
    for (std::uint32_t c = 0; c < 256; ++c) {
      CAPTURE(c);
      const byte_vector was = random_bytes(random, 300 + random() % 300);
      const byte_vector source = random_bytes(random, was.size() - random() % 40);
      byte_vector expected = was;
      for (std::size_t i = 0; i < source.size(); ++i)
        expected[i] = std::byte{naive_product(static_cast<std::uint8_t>(source[i]), c)};
      guarded_piece destination(was, random() % 64);
      REQUIRE(gf256_multiply_into(destination.bytes(), source, byte(c), path).has_value());
      REQUIRE(destination.contents() == expected);
      REQUIRE(destination.guards_stand());
      byte_vector same = source;
      REQUIRE(gf256_multiply_into(same, same, byte(c), path).has_value());
      REQUIRE(std::equal(same.begin(), same.end(), expected.begin()));
    }
  }
  byte_vector three(3, std::byte{1});
  const byte_vector four(4, std::byte{1});
  CHECK(gf256_multiply_into(three, four, 5).error().message() ==
        "gf256_multiply_into: bytes up to 4 requested, but it has 3; request fewer, or make it larger");
  CHECK(three == byte_vector(3, std::byte{1}));
}

TEST_CASE("a source longer than its destination is refused, and nothing is written") {
  byte_vector destination(3, std::byte{1});
  const byte_vector source(4, std::byte{1});
  CHECK(gf256_multiply_add(destination, source, 5).error().message() ==
        "gf256_multiply_add: bytes up to 4 requested, but it has 3; request fewer, or make it larger");
  CHECK(destination == byte_vector(3, std::byte{1}));
}
