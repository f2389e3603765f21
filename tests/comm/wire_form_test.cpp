#include <llmmem/comm/wire_form.hpp>

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "support/seeds.hpp"

using namespace llmmem;

namespace {

std::vector<float> restored(const wire_form& wire, std::span<const float> values) {
  std::vector<std::byte> sent(wire.bytes(values.size()));
  wire.encode(values, sent.data());
  std::vector<float> out(values.size());
  wire.decode(sent.data(), out);
  return out;
}

std::vector<float> floats(std::size_t count, std::mt19937_64& random) {
  std::vector<float> made(count);
  for (float& each : made) {
    each = static_cast<float>(static_cast<double>(random() % 2'000'001) - 1e6) *
           std::ldexp(1.0F, static_cast<int>(random() % 60) - 40);
  }
  return made;
}

float largest(std::span<const float> values) {
  float most = 0;
  for (const float each : values)
    most = std::max(most, std::fabs(each));
  return most;
}

bool equal_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](float x, float y) {
           return std::bit_cast<std::uint32_t>(x) == std::bit_cast<std::uint32_t>(y);
         });
}

/// A group's largest error, and what its format allows.
float bound_of(wire_format format, float value, float most) {
  switch (format) {
    case wire_format::plain:
      return 0;
    case wire_format::bf16:
      return std::fabs(value) * 0x1p-8F;
    case wire_format::fp8:
      return std::max(std::fabs(value) * 0x1p-4F, most / 448 * 0x1p-10F) * 1.0001F;
    case wire_format::int8:
      return most / 254 * 1.00001F;
    case wire_format::int4:
      break;
  }
  return most / 14 * 1.00001F;
}

constexpr wire_format formats[] = {wire_format::plain, wire_format::bf16, wire_format::fp8, wire_format::int8,
                                   wire_format::int4};

}  // namespace

TEST_CASE("each format restores values within its bound, and takes the stated bytes") {
  for (const auto seed : llmmem_tests::seeds(60)) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    const std::vector<float> values = floats(random() % 700, random);
    for (const wire_format format : formats) {
      CAPTURE(static_cast<int>(format));
      const bool has_groups = format != wire_format::plain && format != wire_format::bf16;
      const auto group = has_groups ? static_cast<std::uint32_t>(2 * (1 + random() % 100)) : 1U;
      const wire_form wire(format, group);
      const std::vector<float> back = restored(wire, values);
      std::uint64_t bytes = 0;
      for (std::size_t at = 0; at < values.size(); at += group) {
        const std::size_t count = std::min<std::size_t>(group, values.size() - at);
        const auto in = std::span(values).subspan(at, count);
        const float most = largest(in);
        bytes += format == wire_format::plain  ? 4 * count
                 : format == wire_format::bf16 ? 2 * count
                 : format == wire_format::int4 ? (count + 1) / 2 + 4
                                               : count + 4;
        for (std::size_t i = 0; i < count; ++i) {
          const float error = std::fabs(back[at + i] - in[i]);
          if (error > bound_of(format, in[i], most)) CHECK(error <= bound_of(format, in[i], most));
          if (has_groups && std::fabs(in[i]) == most) CHECK(back[at + i] == in[i]);
        }
      }
      CHECK(wire.bytes(values.size()) == bytes);
      CHECK(equal_bits(restored(wire, back), back));
    }
  }
}

TEST_CASE("a scale of bf16 takes two bytes less a group, and no code saturates") {
  for (const auto seed : llmmem_tests::seeds(40)) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    const std::vector<float> values = floats(1 + random() % 300, random);
    for (const wire_format format : {wire_format::fp8, wire_format::int8, wire_format::int4}) {
      const wire_form wide(format, 32);
      const wire_form narrow(format, 32, wire_scale::bf16);
      CHECK(wide.bytes(values.size()) - narrow.bytes(values.size()) == (values.size() + 31) / 32 * 2);
      const std::vector<float> back = restored(narrow, values);
      for (std::size_t i = 0; i < values.size(); ++i) {
        const auto in =
            std::span(values).subspan(i / 32 * 32, std::min<std::size_t>(32, values.size() - i / 32 * 32));
        const float most = largest(in) * (1 + 0x1p-7F);
        if (std::fabs(back[i] - values[i]) > bound_of(format, values[i], most))
          CHECK(std::fabs(back[i] - values[i]) <= bound_of(format, values[i], most));
      }
    }
  }
  const float huge = std::numeric_limits<float>::max();
  const std::vector<float> back =
      restored(wire_form(wire_format::int8, 4, wire_scale::bf16), std::vector<float>{huge, -huge, 0, 1});
  CHECK(back == std::vector<float>{0x1.FEp127F, -0x1.FEp127F, 0, 0});
}

TEST_CASE("a value that is not finite makes NaNs of its group alone") {
  constexpr float infinite = std::numeric_limits<float>::infinity();
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  for (const float broken : {infinite, -infinite, nan}) {
    for (const wire_scale scale : {wire_scale::f32, wire_scale::bf16}) {
      for (const wire_format format : {wire_format::fp8, wire_format::int8, wire_format::int4}) {
        std::vector<float> values(12, 1.0F);
        values[5] = broken;
        const std::vector<float> back = restored(wire_form(format, 4, scale), values);
        for (std::size_t i = 0; i < values.size(); ++i) {
          if (i / 4 == 1) CHECK(std::isnan(back[i]));
          if (i / 4 != 1) CHECK(back[i] == 1.0F);
        }
      }
    }
    for (const wire_format format : {wire_format::plain, wire_format::bf16}) {
      const std::vector<float> back = restored(format, std::vector<float>{1.0F, broken});
      CHECK(back[0] == 1.0F);
      CHECK((std::isnan(broken) ? std::isnan(back[1]) : back[1] == broken));
    }
  }
}

TEST_CASE("zeros and the least floats are restored, and any bytes are accepted") {
  for (const wire_format format : formats) {
    CHECK(restored(format, std::vector<float>{0, -0.0F, 0}) == std::vector<float>{0, 0, 0});
    CHECK(restored(format, {}).empty());
    if (format == wire_format::bf16) continue;
    CHECK(restored(format, std::vector<float>{0x1p-149F, -0x1p-149F}) ==
          std::vector<float>{0x1p-149F, -0x1p-149F});
  }
  for (const auto seed : llmmem_tests::seeds(30)) {
    std::mt19937_64 random(seed);
    for (const wire_format format : {wire_format::fp8, wire_format::int8, wire_format::int4}) {
      const wire_form wire(format, 2 + 2 * static_cast<std::uint32_t>(random() % 20));
      std::vector<float> out(random() % 100);
      std::vector<std::byte> bytes(wire.bytes(out.size()));
      for (std::byte& each : bytes)
        each = static_cast<std::byte>(random());
      wire.decode(bytes.data(), out);
    }
  }
}

TEST_CASE("groups that cannot be are refused by what they lack") {
  CHECK_THROWS_WITH_AS(wire_form(wire_format::int8, 0), "wire_form: a group of 0 elements; 1 is the least",
                       argument_error);
  CHECK_THROWS_WITH_AS(
      wire_form(wire_format::int4, 3),
      "wire_form: a group of 3 elements of int4; two codes share a byte, so give an even number",
      argument_error);
  CHECK_THROWS_WITH_AS(wire_form(wire_format::bf16, 2),
                       "wire_form: a group of 2 elements of a format without scales; give 1", argument_error);
}
