#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/quantize_groups.hpp>
#include <llmmem/testing/grid_executor.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "support/seeds.hpp"
#include "support/small_elements.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::grid_executor;

constexpr std::byte untouched{0xA5};
constexpr dtype value_types[] = {dtype::f32, dtype::bf16, dtype::f16};
constexpr dtype code_types[] = {dtype::int8, dtype::fp8_e4m3, dtype::int4};

double largest_of(dtype code) {
  return code == dtype::int8 ? 127 : code == dtype::int4 ? 7 : 448;
}

/// A product of floats that no compiler merges with what becomes of it.
float times(float a, float b) {
  const volatile float product = a * b;
  return product;
}

/// A code in its memory: the four or eight bits of element `i` of a row.
std::uint8_t code_at(dtype code, const std::byte* row, std::uint64_t i) {
  if (code != dtype::int4) return static_cast<std::uint8_t>(row[i]);
  return static_cast<std::uint8_t>(row[i / 2] >> (i % 2 * 4)) & 0xFU;
}
void set_code(dtype code, std::byte* row, std::uint64_t i, std::uint8_t bits) {
  if (code != dtype::int4) {
    row[i] = static_cast<std::byte>(bits);
  } else {
    const std::byte keep = i % 2 == 0 ? std::byte{0xF0} : std::byte{0x0F};
    row[i / 2] = (row[i / 2] & keep) | static_cast<std::byte>((bits & 0xFU) << (i % 2 * 4));
  }
}

/// What a code is, without its scale.
float number_of(dtype code, std::uint8_t bits) {
  if (code == dtype::int8) return static_cast<float>(static_cast<std::int8_t>(bits));
  if (code == dtype::int4) return static_cast<float>(bits < 8 ? bits : bits - 16);
  const auto byte = static_cast<std::byte>(bits);
  return load_element(code, &byte);
}

/// The scale of a group, by the contract.
float scale_of(dtype code, const std::vector<float>& group) {
  float amax = 0;
  for (const float x : group) {
    if (!std::isfinite(x)) return std::bit_cast<float>(0x7FFF'FFFFU);
    amax = std::max(amax, std::fabs(x));
  }
  if (amax == 0) return 0;
  return std::max(amax / static_cast<float>(largest_of(code)), std::numeric_limits<float>::min());
}

/// A code, by the contract.
std::uint8_t code_of(dtype code, float x, float scale) {
  if (std::isnan(scale) || scale == 0) {
    if (code != dtype::fp8_e4m3) return 0;
    return std::isfinite(x) ? (std::signbit(x) ? 0x80 : 0) : 0x7F;
  }
  const float scaled = times(x, 1.0F / scale);
  if (code != dtype::fp8_e4m3) {
    const double most = largest_of(code);
    const double rounded = std::clamp(std::nearbyint(static_cast<double>(scaled)), -most, most);
    return static_cast<std::uint8_t>(static_cast<std::int8_t>(rounded)) & (code == dtype::int4 ? 0xF : 0xFF);
  }
  std::byte out{};
  store_element(code, &out, scaled);
  return static_cast<std::uint8_t>(out);
}

std::uint64_t code_row_bytes(dtype code, std::uint64_t elements) {
  return code == dtype::int4 ? elements / 2 : elements;
}

/// Rows of groups in memory of any strides, with scales apart or behind each row.
struct group_world {
  group_shape shape{};
  dtype value = dtype::bf16;
  dtype code = dtype::int8;
  std::uint64_t value_stride = 0, code_stride = 0, scale_stride = 0;
  std::size_t value_first = 0, code_first = 0, scale_first = 0;
  bool is_inline = false;
  std::vector<std::byte> values{}, codes{}, scales{};

  [[nodiscard]] std::uint64_t row_elements() const { return std::uint64_t{shape.groups} * shape.elements; }

  void lay_out(std::mt19937_64& random) {
    const std::uint64_t each = element_bytes(value);
    const auto gap = [&](std::uint64_t multiple) {
      return multiple * (random() % 3 == 0 ? random() % 9 : 0);
    };
    const std::uint64_t fine = random() % 2 == 0 ? 16 : each;
    const std::uint64_t fine_codes = std::uint64_t{1} << random() % 5;
    value_stride = row_elements() * each + gap(fine);
    code_stride = code_row_bytes(code, row_elements()) + gap(fine_codes);
    value_first = gap(fine);
    code_first = gap(fine_codes);
    is_inline = random() % 3 == 0;
    if (is_inline) {  // behind each row
      code_first = code_first / 4 * 4;
      code_stride = code_row_bytes(code, row_elements()) + std::uint64_t{4} * shape.groups;
      scale_stride = code_stride;
      scale_first = code_first + code_row_bytes(code, row_elements());
    } else {
      scale_stride = std::uint64_t{4} * shape.groups + gap(4);
      scale_first = gap(4);
    }
    values.assign(value_first + shape.rows * value_stride + 16, untouched);
    codes.assign(code_first + shape.rows * code_stride + 16, untouched);
    scales.assign(is_inline ? 0 : scale_first + shape.rows * scale_stride + 16, untouched);
  }
  [[nodiscard]] std::byte* value_row(std::uint64_t row) {
    return values.data() + value_first + row * value_stride;
  }
  [[nodiscard]] std::byte* code_row(std::uint64_t row) {
    return codes.data() + code_first + row * code_stride;
  }
  [[nodiscard]] std::byte* scale_row(std::uint64_t row) {
    return (is_inline ? codes : scales).data() + scale_first + row * scale_stride;
  }
  [[nodiscard]] float value_of(std::uint64_t row, std::uint64_t i) {
    return load_element(value, value_row(row) + i * element_bytes(value));
  }
  [[nodiscard]] float scale_at(std::uint64_t row, std::uint64_t group) {
    float out = 0;
    std::memcpy(&out, scale_row(row) + 4 * group, 4);
    return out;
  }

  template <class Run>
  [[nodiscard]] result<void> quantize(const Run& run) {
    return quantize_groups(run, shape, {value_row(0), value, value_stride}, {code_row(0), code, code_stride},
                           {scale_row(0), scale_stride});
  }
  template <class Run>
  [[nodiscard]] result<void> dequantize(const Run& run) {
    return dequantize_groups(run, shape, {code_row(0), code, code_stride}, {scale_row(0), scale_stride},
                             {value_row(0), value, value_stride});
  }

  /// By the definition: an element at a time.
  void quantize_by_hand() {
    for (std::uint64_t row = 0; row < shape.rows; ++row) {
      for (std::uint32_t g = 0; g < shape.groups; ++g) {
        std::vector<float> group;
        for (std::uint32_t i = 0; i < shape.elements; ++i)
          group.push_back(value_of(row, std::uint64_t{g} * shape.elements + i));
        const float scale = scale_of(code, group);
        std::memcpy(scale_row(row) + std::size_t{4} * g, &scale, 4);
        for (std::uint32_t i = 0; i < shape.elements; ++i)
          set_code(code, code_row(row), std::uint64_t{g} * shape.elements + i,
                   code_of(code, group[i], scale));
      }
    }
  }
  void dequantize_by_hand() {
    for (std::uint64_t row = 0; row < shape.rows; ++row) {
      for (std::uint64_t i = 0; i < row_elements(); ++i) {
        const float number = number_of(code, code_at(code, code_row(row), i));
        float out = times(number, scale_at(row, i / shape.elements));
        std::byte* const to = value_row(row) + i * element_bytes(value);
        if (!std::isnan(out)) {
          store_element(value, to, out);
        } else {  // the one that devices make
          const std::uint32_t bits = value == dtype::f32 ? 0x7FFF'FFFFU : 0x7FFFU;
          std::memcpy(to, &bits, element_bytes(value));
        }
      }
    }
  }
};

group_world any_world(std::mt19937_64& random) {
  group_world world;
  world.shape = {.rows = 1 + random() % 12,
                 .groups = static_cast<std::uint32_t>(1 + random() % 5),
                 .elements = std::uint32_t{32} << random() % 3};
  if (random() % 40 == 0)  // rows of several stretches
    world.shape = {.rows = 2, .groups = static_cast<std::uint32_t>(40 + random() % 30), .elements = 128};
  world.value = value_types[random() % 3];
  world.code = code_types[random() % 3];
  world.lay_out(random);
  return world;
}

/// Values of any size that a type has, some groups zero, some with something that is no number.
void draw_values(group_world& world, std::mt19937_64& random) {
  for (std::uint64_t row = 0; row < world.shape.rows; ++row) {
    for (std::uint32_t g = 0; g < world.shape.groups; ++g) {
      const std::uint64_t kind = random() % 12;
      const int exponent =
          kind < 3 ? static_cast<int>(random() % 270) - 145 : static_cast<int>(random() % 9) - 4;
      const std::uint64_t broken = kind == 11 ? random() % world.shape.elements : world.shape.elements;
      for (std::uint32_t i = 0; i < world.shape.elements; ++i) {
        float x = static_cast<float>(static_cast<std::int64_t>(random() % 20001) - 10000) / 10000;
        x = kind == 10 ? (random() % 2 == 0 ? 0.0F : -0.0F) : std::ldexp(x, exponent);
        if (kind == 9) x = static_cast<float>(static_cast<int>(random() % 15) - 7) / 2;  // ties
        if (i == broken) {
          constexpr float none[] = {std::numeric_limits<float>::infinity(),
                                    -std::numeric_limits<float>::infinity(),
                                    std::numeric_limits<float>::quiet_NaN()};
          x = none[random() % 3];
        }
        const std::uint64_t at = std::uint64_t{g} * world.shape.elements + i;
        store_element(world.value, world.value_row(row) + at * element_bytes(world.value), x);
      }
    }
  }
}

/// The most that a value may be off when it has come back.
double bound_of(dtype code, double x, double scale, double amax) {
  const double roundings = std::ldexp(amax, -21);
  if (code != dtype::fp8_e4m3) return scale / 2 + roundings;
  // Half of the distance between neighbours: 3 digits below the first, down to steps of 2^-9.
  const double scaled = std::fabs(x) / scale * (1 + 0x1p-22);
  const int exponent = scaled == 0 ? -6 : std::max(std::ilogb(scaled), -6);
  return std::ldexp(scale, exponent - 4) + roundings;
}

/// Asks which kernel was chosen.
struct which_access {
  mutable bool is_wide = false;
  mutable std::uint32_t lanes = 0;
  mutable std::uint32_t packets_a_lane = 0;
  template <dtype Value, dtype Code, std::uint32_t Each>
  result<void> each(const detail::quantize_work<Value, Code, Each>& work) const {
    is_wide = true;
    lanes = work.lanes();
    packets_a_lane = Each;
    return {};
  }
  template <dtype Value, dtype Code>
  result<void> each(const detail::quantize_rows_work<Value, Code>& work) const {
    is_wide = false;
    lanes = work.lanes();
    packets_a_lane = 1;
    return {};
  }
};

launch_limits any_limits(std::mt19937_64& random) {
  return {.blocks = static_cast<std::uint32_t>(random() % 3)};
}

}  // namespace

TEST_SUITE("quantize_groups") {
  TEST_CASE("codes and scales follow the definition, and nothing else is written") {
    std::uint64_t whole = 0;
    for (const auto seed : llmmem_tests::seeds(700)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      group_world expected = any_world(random);
      draw_values(expected, random);
      group_world here = expected;
      group_world grid = expected;
      expected.quantize_by_hand();
      here.quantize(host_executor{}).value();
      CHECK(here.codes == expected.codes);
      CHECK(here.scales == expected.scales);
      CHECK(here.values == expected.values);
      grid.quantize(grid_executor(any_limits(random))).value();
      CHECK(grid.codes == expected.codes);
      CHECK(grid.scales == expected.scales);
      whole += expected.is_inline ? 0U : 1U;
    }
    CHECK(whole > 300);
  }

  TEST_CASE("values follow the definition for any codes and scales, and nothing else is written") {
    for (const auto seed : llmmem_tests::seeds(500)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      group_world expected = any_world(random);
      for (std::uint64_t row = 0; row < expected.shape.rows; ++row) {
        for (std::uint64_t i = 0; i < code_row_bytes(expected.code, expected.row_elements()); ++i)
          expected.code_row(row)[i] = static_cast<std::byte>(random());
        for (std::uint32_t g = 0; g < expected.shape.groups; ++g) {
          float scale = std::ldexp(static_cast<float>(random() % 1000), static_cast<int>(random() % 40) - 30);
          if (random() % 9 == 0) scale = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
          std::memcpy(expected.scale_row(row) + std::size_t{4} * g, &scale, 4);
        }
      }
      group_world here = expected;
      group_world grid = expected;
      expected.dequantize_by_hand();
      here.dequantize(host_executor{}).value();
      CHECK(here.values == expected.values);
      CHECK(here.codes == expected.codes);
      grid.dequantize(grid_executor(any_limits(random))).value();
      CHECK(grid.values == expected.values);
      CHECK(grid.scales == expected.scales);
    }
  }

  TEST_CASE("restored values are within the promised bound") {
    for (const auto seed : llmmem_tests::seeds(300)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      group_world world = any_world(random);
      draw_values(world, random);
      group_world back = world;
      world.quantize(host_executor{}).value();
      back.codes = world.codes;
      back.scales = world.scales;
      // As floats: what is then lost by a shorter type is not the quantisation's.
      back.value = dtype::f32;
      back.value_first = 0;
      back.value_stride = back.row_elements() * 4;
      back.values.assign(back.shape.rows * back.value_stride, untouched);
      back.dequantize(host_executor{}).value();
      for (std::uint64_t row = 0; row < world.shape.rows; ++row) {
        for (std::uint64_t i = 0; i < world.row_elements(); ++i) {
          const std::uint64_t group = i / world.shape.elements;
          const double scale = world.scale_at(row, group);
          if (std::isnan(scale)) {
            if (!std::isnan(back.value_of(row, i))) CHECK(std::isnan(back.value_of(row, i)));
            continue;
          }
          double amax = 0;
          for (std::uint32_t k = 0; k < world.shape.elements; ++k)
            amax = std::max<double>(amax, std::fabs(world.value_of(row, group * world.shape.elements + k)));
          const double x = world.value_of(row, i);
          const double off = std::fabs(x - static_cast<double>(back.value_of(row, i)));
          const double most = scale == 0 ? 0 : bound_of(world.code, x, scale, amax);
          if (off > most) CHECK(off <= most);
        }
      }
    }
  }

  TEST_CASE("all patterns of 16 bits have the definition's codes, with every possible scale") {
    for (const dtype value : {dtype::bf16, dtype::f16}) {
      for (const dtype code : code_types) {
        CAPTURE(name_of(value));
        CAPTURE(name_of(code));
        // In each group one element is the largest, by an exponent of its own; the others are all patterns
        // in turn.
        group_world expected;
        expected.shape = {.rows = 65536 / 31 + 1, .groups = 1, .elements = 32};
        expected.value = value;
        expected.code = code;
        std::mt19937_64 random(static_cast<std::uint64_t>(code));
        expected.lay_out(random);
        std::uint32_t pattern = 0;
        for (std::uint64_t row = 0; row < expected.shape.rows; ++row) {
          for (std::uint32_t i = 0; i < 32; ++i) {
            const auto bits = static_cast<std::uint16_t>(i == row % 32 ? random() : pattern++);
            std::memcpy(expected.value_row(row) + std::size_t{2} * i, &bits, 2);
          }
        }
        group_world here = expected;
        expected.quantize_by_hand();
        here.quantize(grid_executor()).value();
        CHECK(here.codes == expected.codes);
        CHECK(here.scales == expected.scales);
      }
    }
  }

  TEST_CASE("every code comes back to itself") {
    for (const dtype code : code_types) {
      for (const dtype value : value_types) {
        const std::uint32_t codes = code == dtype::int4 ? 16 : 256;
        group_world world;
        world.shape = {.rows = codes, .groups = 1, .elements = 32};
        world.value = value;
        world.code = code;
        std::mt19937_64 random(1);
        world.lay_out(random);
        for (std::uint32_t row = 0; row < codes; ++row) {
          const float scale = 0.25F;
          std::memcpy(world.scale_row(row), &scale, 4);
          for (std::uint32_t i = 0; i < 32; ++i) {  // the largest, and the code itself
            const std::uint8_t largest = code == dtype::int8 ? 127 : code == dtype::int4 ? 7 : 0x7E;
            set_code(code, world.code_row(row), i, i == 5 ? largest : static_cast<std::uint8_t>(row));
          }
        }
        const std::vector<std::byte> before = world.codes;
        world.dequantize(host_executor{}).value();
        world.quantize(grid_executor()).value();
        for (std::uint32_t row = 0; row < codes; ++row) {
          const std::uint8_t bits = code_at(code, world.code_row(row), 0);
          const auto signed_bits = static_cast<std::uint8_t>(row);
          const bool is_none = code == dtype::fp8_e4m3 && (row & 0x7FU) == 0x7FU;  // a NaN
          // -128 and -8 are no codes: their group's largest is more than the largest code.
          const bool is_below = code == dtype::int8 ? row == 128 : code == dtype::int4 && row == 8;
          if (!is_none && !is_below) CHECK(bits == signed_bits);
        }
      }
    }
  }

  TEST_CASE("the largest elements get the largest codes, and the most negative code is unused") {
    std::vector<float> values(32, 0.0F);
    values[3] = -5.0F;
    values[4] = 5.0F;
    values[5] = 2.5F;
    std::byte codes[32];
    float scale = 0;
    const group_shape one{.rows = 1, .groups = 1, .elements = 32};
    const auto quantize = [&](dtype to) {
      quantize_groups(grid_executor(), one,
                      {reinterpret_cast<const std::byte*>(values.data()), dtype::f32, 0}, {codes, to, 0},
                      {reinterpret_cast<std::byte*>(&scale), 0})
          .value();
    };
    quantize(dtype::int8);
    CHECK(scale == 5.0F / 127);
    CHECK(codes[3] == std::byte{0x81});
    CHECK(codes[4] == std::byte{0x7F});
    CHECK(codes[5] == std::byte{0x40});  // 63.5, to the even 64
    quantize(dtype::int4);
    CHECK(codes[1] == std::byte{0x90});  // element 3 in the upper half
    CHECK(codes[2] == std::byte{0x47});  // 3.5, to the even 4
    quantize(dtype::fp8_e4m3);
    CHECK(codes[3] == std::byte{0xFE});
    CHECK(codes[4] == std::byte{0x7E});
  }

  TEST_CASE("accesses are as wide as addresses and strides allow") {
    const group_shape shape{.rows = 3, .groups = 1, .elements = 32};
    const auto width = [&](std::uintptr_t address, std::uint64_t stride, std::uint32_t packet_bytes) {
      // Never read: the address alone is asked.
      const auto* const data = reinterpret_cast<const std::byte*>(std::uintptr_t{4096} + address);
      return detail::end_of(data, stride, shape, 32, packet_bytes, 1, "").value().width;
    };
    CHECK(width(0, 64, 16) == 16);
    CHECK(width(0, 64, 8) == 8);
    CHECK(width(8, 64, 16) == 8);
    CHECK(width(8, 64, 8) == 8);
    CHECK(width(0, 36, 8) == 4);
    CHECK(width(2, 64, 4) == 2);
    CHECK(width(0, 33, 4) == 1);
    alignas(16) std::byte memory[1024]{};
    const auto is_wide = [&](std::size_t value, std::uint64_t value_stride, std::size_t code,
                             std::uint64_t code_stride) {
      const which_access run;
      quantize_groups(run, shape, {memory + value, dtype::bf16, value_stride},
                      {memory + 512 + code, dtype::int8, code_stride}, {memory + 768, 4})
          .value();
      return run.is_wide;
    };
    CHECK(is_wide(0, 64, 8, 40));
    CHECK(!is_wide(8, 64, 0, 32));
    CHECK(!is_wide(0, 72, 0, 32));
    CHECK(!is_wide(0, 64, 4, 32));
    CHECK(!is_wide(0, 64, 0, 36));
  }

  TEST_CASE("lanes cover all packets of a group, with a sector of codes side by side") {
    alignas(16) std::byte memory[1024]{};
    const auto shared = [&](dtype value, dtype code, std::uint32_t elements, std::size_t shift = 0) {
      const which_access run;
      quantize_groups(run, {1, 1, elements}, {memory + shift, value, 0}, {memory + 640, code, 0},
                      {memory + 768, 0})
          .value();
      return std::pair(run.lanes, run.packets_a_lane);
    };
    CHECK(shared(dtype::bf16, dtype::int8, 32) == std::pair(4U, 1U));
    CHECK(shared(dtype::bf16, dtype::int8, 64) == std::pair(4U, 2U));
    CHECK(shared(dtype::f16, dtype::fp8_e4m3, 128) == std::pair(4U, 4U));
    CHECK(shared(dtype::bf16, dtype::int4, 64) == std::pair(8U, 1U));
    CHECK(shared(dtype::bf16, dtype::int4, 128) == std::pair(8U, 2U));
    CHECK(shared(dtype::f32, dtype::int8, 32) == std::pair(8U, 1U));
    CHECK(shared(dtype::f32, dtype::int8, 128) == std::pair(8U, 4U));
    CHECK(shared(dtype::f32, dtype::int4, 128) == std::pair(16U, 2U));
    // In pieces, where it is bound by their number.
    CHECK(shared(dtype::f32, dtype::int8, 128, 4) == std::pair(32U, 1U));
    CHECK(shared(dtype::bf16, dtype::int8, 128, 8) == std::pair(32U, 1U));
  }

  TEST_CASE("offsets have 64 bits") {
    // Rows three gigabytes apart: nothing is there, but the arithmetic of the two ends.
    constexpr std::uint64_t apart = std::uint64_t{3} << 30;
    std::byte base{};
    const detail::group_end<std::byte> end{&base, apart, 256, 16};
    const auto at = reinterpret_cast<std::uintptr_t>(end.at(5, 7, 48));
    CHECK(at - reinterpret_cast<std::uintptr_t>(&base) == 5 * apart + 7 * 256 + 48);
    const detail::group_ends<std::byte, const std::byte> ends{
        end, {&base, apart, 128, 8}, {&base, apart, 4, 4}};
    const group_shape many{.rows = std::uint64_t{1} << 33, .groups = 3, .elements = 128};
    using work = detail::dequantize_work<dtype::bf16, dtype::int8>;
    CHECK(work(many, ends).items() == (std::uint64_t{1} << 33) * 3 * 16);
  }

  TEST_CASE("what does not fit is refused, with what it is, and nothing is written") {
    std::vector<std::byte> memory(4096, untouched);
    std::byte* const data = memory.data();
    const group_shape shape{.rows = 2, .groups = 2, .elements = 32};
    const auto quantize = [&](group_shape of, group_rows<const std::byte> values, group_rows<std::byte> codes,
                              group_scales<std::byte> scales) {
      return quantize_groups(host_executor{}, of, values, codes, scales).error();
    };
    const group_rows<const std::byte> values{data, dtype::bf16, 128};
    const group_rows<std::byte> codes{data + 1024, dtype::int8, 64};
    const group_scales<std::byte> scales{data + 2048, 8};
    for (const std::uint32_t elements : {0U, 16U, 48U, 256U}) {
      CHECK(quantize({2, 2, elements}, values, codes, scales) ==
            failure{errc::out_of_range, 0, elements, 128});
    }
    CHECK(quantize(shape, {nullptr, dtype::bf16, 128}, codes, scales) == failure{errc::too_short, 0, 128, 0});
    CHECK(quantize(shape, values, {nullptr, dtype::int8, 64}, scales) == failure{errc::too_short, 0, 64, 0});
    CHECK(quantize(shape, values, codes, {nullptr, 8}) == failure{errc::too_short, 0, 8, 0});
    CHECK(quantize(shape, {data, dtype::bf16, 126}, codes, scales) == failure{errc::too_short, 0, 128, 126});
    CHECK(quantize(shape, values, {data, dtype::int8, 63}, scales) == failure{errc::too_short, 0, 64, 63});
    CHECK(quantize(shape, values, codes, {data, 4}) == failure{errc::too_short, 0, 8, 4});
    CHECK(quantize(shape, values, codes, {data, 10}) == failure{errc::bad_granularity, 0, 10, 4});
    CHECK(quantize(shape, {data, dtype::bf16, 129}, codes, scales) ==
          failure{errc::bad_granularity, 0, 129, 2});
    CHECK(quantize(shape, {data + 1, dtype::bf16, 128}, codes, scales).code == errc::bad_granularity);
    CHECK(quantize(shape, {data, dtype::int8, 128}, codes, scales).code == errc::no_conversion);
    CHECK(quantize(shape, values, {data, dtype::bf16, 128}, scales) ==
          failure{errc::no_conversion, 0, static_cast<std::uint64_t>(dtype::bf16),
                  static_cast<std::uint64_t>(dtype::bf16)});
    const failure back = dequantize_groups(host_executor{}, shape, {data, dtype::int8, 64}, {data, 8},
                                           {data, dtype::fp8_e4m3, 64})
                             .error();
    CHECK(back == failure{errc::no_conversion, 0, static_cast<std::uint64_t>(dtype::fp8_e4m3),
                          static_cast<std::uint64_t>(dtype::int8)});
    // Strides are to other rows: of one row none matters.
    CHECK(quantize_groups(host_executor{}, {0, 2, 32}, values, codes, scales).has_value());
    CHECK(quantize_groups(host_executor{}, {2, 0, 32}, values, codes, scales).has_value());
    CHECK(std::ranges::count(memory, untouched) == 4096);
    CHECK(quantize_groups(host_executor{}, {1, 2, 32}, {data, dtype::bf16, 1}, {data + 1024, dtype::int8, 1},
                          {data + 2048, 1})
              .has_value());
  }
}
