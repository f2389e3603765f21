#include "checkpoint_tool/values.hpp"

#include <doctest/doctest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

using namespace checkpoint_tool;
using enum llmmem::safetensors_type;

TEST_CASE("floats of every width have the values of their formats") {
  const double infinity = std::numeric_limits<double>::infinity();
  CHECK(float_value(f16, 0x3C00) == 1);
  CHECK(float_value(f16, 0xC000) == -2);
  CHECK(float_value(f16, 0x7BFF) == 65504);
  CHECK(float_value(f16, 0x0001) == 0x1p-24);
  CHECK(float_value(f16, 0xFC00) == -infinity);
  CHECK(std::isnan(float_value(f16, 0x7C01)));
  CHECK(float_value(bf16, 0x3F80) == 1);
  CHECK(float_value(bf16, 0xC040) == -3);
  CHECK(float_value(bf16, 0x7F80) == infinity);
  CHECK(float_value(f8_e4m3, 0x7E) == 448);
  CHECK(float_value(f8_e4m3, 0x01) == 0x1p-9);
  CHECK(std::isnan(float_value(f8_e4m3, 0x7F)));
  CHECK(std::isnan(float_value(f8_e4m3, 0xFF)));
  CHECK(float_value(f8_e5m2, 0x7B) == 57344);
  CHECK(float_value(f8_e5m2, 0x7C) == infinity);
  CHECK(float_value(f8_e4m3fnuz, 0x7F) == 240);
  CHECK(std::isnan(float_value(f8_e4m3fnuz, 0x80)));
  CHECK(float_value(f8_e5m2fnuz, 0x7F) == 57344);
  CHECK(std::isnan(float_value(f8_e5m2fnuz, 0x80)));
  CHECK(float_value(f32, std::bit_cast<std::uint32_t>(-0.1F)) == static_cast<double>(-0.1F));
  CHECK(float_value(f64, std::bit_cast<std::uint64_t>(1e300)) == 1e300);
}

TEST_CASE("every BF16 is the upper half of a float") {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto meant = static_cast<double>(std::bit_cast<float>(bits << 16));
    const double value = float_value(bf16, bits);
    CAPTURE(bits);
    REQUIRE((std::isnan(meant) ? std::isnan(value) : value == meant));
  }
}

TEST_CASE("elements are extracted from bytes, the first from the lowest bits") {
  const std::array<std::byte, 6> bytes{std::byte{0x21}, std::byte{0x43}, std::byte{0x65},
                                       std::byte{0x87}, std::byte{0xA9}, std::byte{0xCB}};
  for (std::uint64_t i = 0; i < 12; ++i)
    CHECK(element_bits(bytes, 4, i) == i + 1);
  CHECK(element_bits(bytes, 6, 0) == 0x21);
  CHECK(element_bits(bytes, 6, 1) == 0x0C);  // 0x4321 >> 6
  CHECK(element_bits(bytes, 6, 7) == 0x32);
  CHECK(element_bits(bytes, 16, 1) == 0x8765);
}
