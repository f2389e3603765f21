/// Single tokens and blocks into codes with scales, and back: every form.
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/kv_append.hpp>
#include <llmmem/kernels/kv_gather.hpp>
#include <llmmem/kernels/kv_quantize.hpp>
#include <llmmem/paging/named_forms.hpp>
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
#include <span>
#include <string>
#include <vector>

#include "support/coded_world.hpp"
#include "support/seeds.hpp"
#include "support/small_elements.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::paging::scale_group;
using llmmem::testing::grid_executor;

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

/// Blocks in codes, aligned to 16, whose bytes are all the same before.
struct coded_blocks {
  coded_blocks(const kv_layout& of, std::uint64_t count)
      : layout(of.checked()), blocks(count), words(of.total_bytes(count) / 16 + 1, {~0ULL, ~0ULL}) {}
  [[nodiscard]] std::byte* data() { return reinterpret_cast<std::byte*>(words.data()); }
  [[nodiscard]] kv_memory view() { return {data(), blocks, layout}; }
  [[nodiscard]] float value(std::uint32_t p, std::uint64_t block, std::uint64_t token, std::uint64_t head,
                            std::uint64_t i, float global = 1, std::uint64_t layer = 0) {
    return value_in_codes(layout, data(), blocks, p, layer, block, token, head, i, global);
  }

  struct alignas(16) pair_of_words {
    std::uint64_t of[2];
    friend bool operator==(const pair_of_words&, const pair_of_words&) = default;
  };
  kv_layout layout;
  std::uint64_t blocks;
  std::vector<pair_of_words> words;
};

/// A layout of keys and values of one form.
kv_layout coded(dtype code, const paging::scale_form& scales, std::uint32_t dim = 32) {
  kv_layout out{.layers = 1, .heads = 1, .head_dim = dim, .block_tokens = 4};
  out.element = code;
  out.key_scales = out.value_scales = scales;
  out.value_scales.is_rotated = false;
  return out;
}
constexpr paging::scale_form by_vector{.group = scale_group::vector, .element = dtype::f32};
constexpr paging::scale_form nvfp4_scales{
    .group = scale_group::run, .element = dtype::fp8_e4m3, .run = 16, .has_global = false};

/// Appends one token's key, and the same as its value.
template <class Run>
result<void> append_one(const Run& run, coded_blocks& to, std::int64_t slot, const std::vector<float>& vector,
                        const kv_scales& scales = {}) {
  const std::vector<std::int64_t> slots{slot};
  const std::byte* const data = std::as_bytes(std::span(vector)).data();
  const std::uint64_t stride = vector.size() * 4;
  return append_kv(run, slot_front(slots, to.layout.block_tokens, to.blocks), {data, stride, stride},
                   {data, stride, stride}, to.view(), 0, {.element = dtype::f32, .scales = scales});
}

/// The distance to the next number of a format's codes that is farthest away, at a size in units of the
/// scale.
double half_step(dtype code, double size) {
  if (code == dtype::int8 || code == dtype::int4) return 0.5;
  if (code == dtype::fp4_e2m1) return size <= 2 ? 0.25 : size <= 4 ? 0.5 : 1;
  const double least = 0x1p-9;
  return std::max(std::exp2(std::floor(std::log2(std::max(size, 0x1p-6)))) / 16, least / 2);
}

}  // namespace

TEST_SUITE("coded_tokens") {
  TEST_CASE("tokens of any layout become codes that come back within half a step, on hosts and in grids") {
    std::uint64_t seen = 0;
    for (const auto seed : seeds(120, 60)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      constexpr std::uint32_t dims[] = {8, 32, 40, 64, 80, 128, 256};
      kv_layout shape{.layers = 2,
                      .heads = static_cast<std::uint32_t>(1 + random() % 3),
                      .head_dim = dims[random() % 7],
                      .value_dim = random() % 2 == 0 ? dims[random() % 7] : 0,
                      .block_tokens = static_cast<std::uint32_t>(1 + random() % 9),
                      .heads_in_block = random() % 2 == 0 ? paging::head_order::hnd : paging::head_order::nhd,
                      .order = static_cast<block_order>(random() % block_order_count)};
      const kv_layout layout = [&] {
        while (true) {
          const kv_layout drawn = any_coded_layout(random, shape, 3);
          if (llmmem::detail::check_written_codes(drawn, "")) return drawn;
        }
      }();
      constexpr dtype types[] = {dtype::f32, dtype::bf16, dtype::f16};
      const dtype element = types[seed % 3];
      const std::uint64_t tokens = 1 + random() % (std::uint64_t{3} * layout.block_tokens);
      std::vector<std::int64_t> slots(std::size_t{3} * layout.block_tokens);
      for (std::size_t i = 0; i < slots.size(); ++i)
        slots[i] = static_cast<std::int64_t>(i);
      std::shuffle(slots.begin(), slots.end(), random);
      slots.resize(tokens);
      // A global scale in the block is written with its first token.
      const bool has_scales = layout.key_scales.has_global || layout.value_scales.has_global || seed % 2 == 0;
      const float all[] = {0.5F};
      const kv_scales scales = has_scales ? kv_scales{all, all} : kv_scales{};
      for (std::size_t i = 0; i < 3; ++i)
        slots.push_back(static_cast<std::int64_t>(i * layout.block_tokens));
      std::sort(slots.begin(), slots.end());
      slots.erase(std::unique(slots.begin(), slots.end()), slots.end());
      const std::size_t size = element_bytes(element);
      std::vector<std::byte> batch[2];
      std::uint64_t vector[2];
      for (std::uint32_t p = 0; p < 2; ++p) {
        vector[p] = layout.vector_elements(p) * size + (seed % 4) * size;
        batch[p].resize(vector[p] * layout.heads * slots.size() + 16);
        for (std::size_t i = 0; i + size <= batch[p].size(); i += size)
          store_element(element, batch[p].data() + i,
                        (static_cast<float>(random() % 20'001) / 10'000 - 1) * (i % 7 == 3 ? 9.0F : 1.0F));
      }
      const auto append = [&](const auto& run, coded_blocks& to) {
        return append_kv(run, slot_front(slots, layout.block_tokens, 3),
                         {batch[0].data(), vector[0] * layout.heads, vector[0]},
                         {batch[1].data(), vector[1] * layout.heads, vector[1]}, to.view(), 1,
                         {.element = element, .scales = scales});
      };
      coded_blocks cache(layout, 3);
      append(host_executor{}, cache).value();
      coded_blocks by_grid(layout, 3);
      REQUIRE(append(grid_executor({.blocks = 2}), by_grid));
      CHECK(by_grid.words == cache.words);
      const auto gather = [&](const auto& run, std::vector<std::byte>(&to)[2]) {
        for (std::uint32_t p = 0; p < 2; ++p)
          to[p].assign(batch[p].size(), std::byte{0});
        return gather_kv(run, slot_front(slots, layout.block_tokens, 3),
                         {to[0].data(), vector[0] * layout.heads, vector[0]},
                         {to[1].data(), vector[1] * layout.heads, vector[1]}, cache.view(), 1,
                         {.element = element, .scales = scales});
      };
      std::vector<std::byte> came[2];
      std::vector<std::byte> came_by_grid[2];
      REQUIRE(gather(host_executor{}, came));
      REQUIRE(gather(grid_executor(), came_by_grid));
      for (std::uint32_t p = 0; p < 2; ++p) {
        CHECK(came[p] == came_by_grid[p]);
        const paging::scale_form& form = p == 0 ? layout.key_scales : layout.value_scales;
        const std::uint64_t elements = layout.vector_elements(p);
        const std::uint64_t run = form.group == scale_group::run ? form.run : elements;
        const auto largest = [&](const std::vector<float>& of, std::size_t from) {
          float out = 0;
          for (std::size_t i = from; i < from + run; ++i)
            out = std::max(out, std::fabs(of[i]));
          return static_cast<double>(out);
        };
        for (std::size_t token = 0; token < slots.size(); ++token) {
          const auto slot = static_cast<std::uint64_t>(slots[token]);
          for (std::uint64_t head = 0; head < layout.heads; ++head) {
            const std::size_t at = token * vector[p] * layout.heads + head * vector[p];
            std::vector<float> x(elements);
            std::vector<float> y(elements);
            for (std::uint64_t i = 0; i < elements; ++i) {
              x[i] = load_element(element, batch[p].data() + at + i * size);
              y[i] = cache.value(p, slot / layout.block_tokens, slot % layout.block_tokens, head, i,
                                 has_scales ? 0.5F : 1.0F, 1);
            }
            if (form.is_rotated) turn_vector(x);
            for (std::uint64_t i = 0; i < elements; ++i) {
              const double amax = largest(x, i / run * run);
              const double qmax = layout.element_of(p) == dtype::int8       ? 127
                                  : layout.element_of(p) == dtype::int4     ? 7
                                  : layout.element_of(p) == dtype::fp4_e2m1 ? 6
                                                                            : 448;
              double scale =
                  std::max(amax / qmax, form.element == dtype::fp8_e4m3 && amax != 0 ? 0x1p-10 : 0);
              if (form.element == dtype::fp8_e4m3) scale = std::max(scale * (1 + 0x1p-4), scale + 0x1p-11);
              if (form.element == dtype::bf16) scale *= 1 + 0x1p-8;
              const double size_in_steps =
                  scale == 0 ? 0 : std::fabs(static_cast<double>(x[i])) / scale * 1.13;
              const double bound = scale * half_step(layout.element_of(p), size_in_steps) + amax * 0x1p-20;
              const double wrong = std::fabs(static_cast<double>(x[i]) - static_cast<double>(y[i]));
              if (wrong > bound) {
                CAPTURE(i);
                CAPTURE(x[i]);
                CAPTURE(y[i]);
                CHECK(wrong <= bound);
              }
              ++seen;
            }
            // A gather gives the stored values, turned back.
            if (form.is_rotated) turn_vector(y);
            for (std::uint64_t i = 0; i < elements; ++i) {
              std::byte rounded[4];
              store_element(element, rounded, y[i]);
              REQUIRE(std::memcmp(rounded, came[p].data() + at + i * size, size) == 0);
            }
          }
        }
      }
    }
    CHECK(seen > 20'000);
  }

  TEST_CASE("blocks in values become the codes of their tokens, and come back") {
    for (const auto seed : seeds(60, 30)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      kv_layout values{.layers = 2,
                       .heads = static_cast<std::uint32_t>(1 + random() % 2),
                       .head_dim = 16U << (random() % 3),
                       .block_tokens = static_cast<std::uint32_t>(1 + random() % 5),
                       .element = seed % 2 == 0 ? dtype::f32 : dtype::bf16,
                       .order = static_cast<block_order>(random() % block_order_count)};
      const kv_layout layout = [&] {
        while (true) {
          const kv_layout drawn = any_coded_layout(random, values, 3);
          if (llmmem::detail::check_written_codes(drawn, "")) return drawn;
        }
      }();
      const float all[] = {0.25F};
      const kv_scales scales = seed % 3 == 0 ? kv_scales{} : kv_scales{all, all};
      coded_blocks from(values, 3);
      const std::size_t size = element_bytes(values.element);
      for (std::size_t i = 0; i + size <= values.total_bytes(3); i += size)
        store_element(values.element, from.data() + i, static_cast<float>(random() % 2'001) / 100 - 10);
      const std::vector<block_pair> pairs{{2, 0}, {-1, 1}, {0, 2}, {3, 1}};
      std::uint32_t flag = 0;
      coded_blocks by_block(layout, 3);
      REQUIRE(quantize_kv_blocks(host_executor{}, by_block.view(), from.view(), pairs,
                                 {.out_of_range = &flag}, scales));
      CHECK(flag == 1);  // of block 3
      coded_blocks by_grid(layout, 3);
      REQUIRE(quantize_kv_blocks(grid_executor(), by_grid.view(), from.view(), pairs, {}, scales));
      CHECK(by_grid.words == by_block.words);
      coded_blocks by_token(layout, 3);
      for (std::uint32_t layer = 0; layer < 2; ++layer) {
        for (const block_pair& pair : pairs) {
          if (pair.from < 0 || pair.from == 3) continue;
          for (std::uint32_t token = 0; token < values.block_tokens; ++token) {
            const std::vector<std::int64_t> slots{pair.to * values.block_tokens + token};
            const auto at = [&](std::uint32_t p) {
              const plane_strides of = values.strides(p, 3);
              return batch_vectors{
                  from.data() + of.offset(layer, static_cast<std::uint64_t>(pair.from), token, 0), of.head,
                  of.head};
            };
            REQUIRE(append_kv(host_executor{}, slot_front(slots, values.block_tokens, 3), at(0), at(1),
                              by_token.view(), layer, {.element = values.element, .scales = scales}));
          }
        }
      }
      CHECK(by_token.words == by_block.words);
      coded_blocks back(values, 3);
      const std::vector<block_pair> home{{0, 2}, {2, 0}};
      REQUIRE(dequantize_kv_blocks(host_executor{}, back.view(), by_block.view(), home, {}, scales));
      for (std::uint32_t p = 0; p < 2; ++p) {
        std::vector<float> y(values.head_dim);
        for (std::uint64_t i = 0; i < values.head_dim; ++i)
          y[i] =
              by_block.value(p, 2, values.block_tokens - 1, 0, i, scales.keys == nullptr ? 1.0F : 0.25F, 1);
        if (p == 0 && layout.key_scales.is_rotated) turn_vector(y);
        for (std::uint64_t i = 0; i < values.head_dim; ++i) {
          std::byte rounded[4];
          store_element(values.element, rounded, y[i]);
          const std::byte* const got =
              back.data() + values.strides(p, 3).offset(1, 0, values.block_tokens - 1, 0) + i * size;
          REQUIRE(std::memcmp(rounded, got, size) == 0);
        }
      }
    }
  }

  TEST_CASE(
      "every number between two codes of e2m1 goes to the nearer, and to the even one from the middle") {
    constexpr float sizes[] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
    for (std::uint32_t code = 0; code < 8; ++code) {
      CHECK(llmmem::detail::float_of_e2m1(code) == sizes[code]);
      CHECK(llmmem::detail::float_of_e2m1(code | 8) == -sizes[code]);
      CHECK(llmmem::detail::e2m1_of_float(sizes[code]) == code);
      CHECK(llmmem::detail::e2m1_of_float(-sizes[code]) == (code | 8U));
      if (code == 7) continue;
      const float middle = (sizes[code] + sizes[code + 1]) / 2;
      CHECK(llmmem::detail::e2m1_of_float(middle) == (code % 2 == 0 ? code : code + 1));
      CHECK(llmmem::detail::e2m1_of_float(std::nextafter(middle, 0.0F)) == code);
      CHECK(llmmem::detail::e2m1_of_float(std::nextafter(middle, 9.0F)) == code + 1);
    }
    CHECK(llmmem::detail::e2m1_of_float(1e30F) == 7);
    CHECK(llmmem::detail::e2m1_of_float(std::numeric_limits<float>::infinity()) == 7);
    CHECK(llmmem::detail::e2m1_of_float(nan_value) == 0);
  }

  TEST_CASE("zeros, broken numbers, equal values and the least ones have defined codes in every form") {
    struct form {
      dtype code;
      paging::scale_form scales;
    };
    paging::scale_form bf16 = by_vector;
    bf16.element = dtype::bf16;
    paging::scale_form run32 = by_vector;
    run32.group = scale_group::run;
    run32.run = 16;
    paging::scale_form zero = bf16;
    zero.numbers = 2;
    paging::scale_form zero_by_run = run32;
    zero_by_run.numbers = 2;
    const form forms[] = {{dtype::int8, by_vector},   {dtype::int4, bf16},
                          {dtype::int4, run32},       {dtype::int4, zero},
                          {dtype::int4, zero_by_run}, {dtype::int8, zero},
                          {dtype::fp8_e4m3, bf16},    {dtype::fp4_e2m1, nvfp4_scales},
                          {dtype::fp4_e2m1, run32}};
    for (const form& of : forms) {
      CAPTURE(name_of(of.code));
      const bool has_runs = of.scales.group == scale_group::run;
      for (const bool is_rotated : {false, true}) {
        paging::scale_form scales = of.scales;
        scales.is_rotated = is_rotated;
        const auto stored = [&](const std::vector<float>& vector) {
          coded_blocks cache(coded(of.code, scales), 1);
          REQUIRE(append_one(host_executor{}, cache, 0, vector));
          coded_blocks other(coded(of.code, scales), 1);
          REQUIRE(append_one(grid_executor(), other, 0, vector));
          CHECK(other.words == cache.words);
          std::vector<float> out;
          for (std::uint64_t i = 0; i < 32; ++i)
            out.push_back(cache.value(1, 0, 0, 0, i));
          if (is_rotated) {
            // A broken number is in all of a rotated vector, and so is a sum beyond the floats.
            bool has_nan = false;
            for (const float each : vector)
              has_nan = has_nan || !std::isfinite(each * 32);
            for (std::uint64_t i = 0; i < 32; ++i)
              CHECK(std::isnan(cache.value(0, 0, 0, 0, i)) == has_nan);
          }
          return out;
        };
        CHECK(stored(std::vector<float>(32, 0.0F)) == std::vector<float>(32, 0.0F));
        for (const float wrong :
             {nan_value, std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
          std::vector<float> vector(32, 1.0F);
          vector[20] = wrong;
          const std::vector<float> came = stored(vector);
          for (std::size_t i = 0; i < 32; ++i)
            CHECK(std::isnan(came[i]) == (!has_runs || i >= 16));
        }
        for (const float each : {1.0F, 3.7F, 1e-3F}) {
          const std::vector<float> came = stored(std::vector<float>(32, each));
          // Of e4m3 scales the least is 2^-9, and its nearest are 1/16 apart.
          const float bound =
              of.scales.element == dtype::fp8_e4m3 ? std::max(each / 16, 0x1p-10F) : each / 100;
          for (const float value : came)
            CHECK(std::fabs(value - each) <= bound);
        }
        // Subnormal floats: a scale is 2^-126 at least, so they become zeros or the step nearest to them.
        const std::vector<float> least = stored(std::vector<float>(32, 0x1p-140F));
        for (const float value : least)
          CHECK(std::fabs(value) <= 0x1p-126F);
        const std::vector<float> most = stored(std::vector<float>(32, std::numeric_limits<float>::max()));
        for (const float value : most) {
          if (of.scales.element == dtype::fp8_e4m3) {
            CHECK(value == 448.0F * 6);  // what a scale of e4m3 reaches: a global scale moves that
          } else {
            CHECK(!std::isnan(value));
          }
        }
      }
    }
  }

  TEST_CASE("with a zero, each code takes the numbers within half a step of its own, over any range") {
    using llmmem::detail::number_from_zero;
    constexpr float ranges[][2] = {{0, 1},
                                   {-1, 1},
                                   {-0.3F, 2},
                                   {100, 100.5F},
                                   {-7.25F, -7.2F},
                                   {1e-36F, 3e-36F},
                                   {-3e38F, 3e38F},
                                   {0x1p-140F, 1},
                                   {-0x1p-149F, 0},
                                   {-3e38F, -2.9e38F},
                                   {0, 0x1.fffffep127F}};
    for (const dtype code : {dtype::int4, dtype::int8}) {
      for (const dtype element : {dtype::bf16, dtype::f32}) {
        for (const auto& [least, most] : ranges) {
          CAPTURE(name_of(code));
          CAPTURE(name_of(element));
          CAPTURE(least);
          CAPTURE(most);
          const auto of = llmmem::detail::coded_range_of(code, element, least, most, 0x3F80'0000U, 1.0F);
          const int low = code == dtype::int4 ? -8 : -128;
          const auto code_of = [&](float x) {
            return llmmem::detail::nearest_integer(llmmem::detail::steps_between(x, of.zero, of.of.inverse));
          };
          const double step = static_cast<double>(of.of.scale);
          // As wide as the range asks, or as the zero's roundings: half a unit of bf16 at the farther end.
          const double size = std::max(std::fabs(static_cast<double>(least)), static_cast<double>(most));
          const double span = static_cast<double>(most) - static_cast<double>(least);
          CHECK(step * -low <= std::max((span * -low / (-2 * low - 1) + size * 0x1p-8) * 1.02, 0x1p-119));
          for (const float end : {least, most}) {
            CHECK(code_of(end) >= low);
            CHECK(code_of(end) < -low);
          }
          if (step == 0) continue;
          for (int c = low; c < -low; ++c) {
            const float number = number_from_zero(static_cast<float>(c), of.of.scale, of.zero);
            if (!(std::fabs(number) < 1e38F) || step < 0x1p-120) continue;
            const double rounding = std::fabs(static_cast<double>(number)) * 0x1p-22;
            for (const double part : {-0.49, -0.3, 0.0, 0.3, 0.49}) {
              const double x = static_cast<double>(number) + part * step;
              if (rounding > step / 200) continue;  // floats are as coarse as the codes
              if (code_of(static_cast<float>(x)) != c) CHECK(code_of(static_cast<float>(x)) == c);
            }
          }
        }
      }
    }
    const float equal = 0x1.234p3F;
    const auto same =
        llmmem::detail::coded_range_of(dtype::int4, dtype::f32, equal, equal, 0x3F80'0000U, 1.0F);
    CHECK(same.of.scale == 0);
    CHECK(same.zero == equal);
    CHECK(std::isnan(
        llmmem::detail::coded_range_of(dtype::int4, dtype::f32, 1, 2, 0x3F80'0000U, 0.0F).stored_zero));
  }

  TEST_CASE("a scale above those of e4m3 moves their range, of the caller or of the block") {
    const std::vector<float> vector(32, 30'000.0F);
    const float all[] = {16.0F};
    for (const bool is_in_block : {false, true}) {
      paging::scale_form scales = nvfp4_scales;
      scales.has_global = is_in_block;
      coded_blocks cache(coded(dtype::fp4_e2m1, scales), 2);
      REQUIRE(append_one(host_executor{}, cache, 5, vector, {all, all}));
      REQUIRE(append_one(host_executor{}, cache, 4, vector, {all, all}));
      const float global = is_in_block ? 1.0F : 16.0F;  // the block says its own
      CHECK(std::fabs(cache.value(1, 1, 0, 0, 3, global) / 30'000 - 1) < 0x1p-4F);
      CHECK(std::fabs(cache.value(1, 1, 1, 0, 3, global) / 30'000 - 1) < 0x1p-4F);
    }
  }

  TEST_CASE("tokens of forms that kernels do not write are refused with a valid alternative") {
    const std::vector<float> vector(32, 1.0F);
    const auto told = [&](const kv_layout& layout) {
      coded_blocks cache(layout, 1);
      const auto before = cache.words;
      const auto done = append_one(host_executor{}, cache, 0, vector);
      CHECK(cache.words == before);
      return done ? std::string() : std::string(done.error().message());
    };
    const auto has = [](const std::string& text, const char* part) {
      CAPTURE(text);
      CHECK(text.find(part) != std::string::npos);
    };
    paging::scale_form scales = by_vector;
    scales.group = scale_group::channel;
    has(told(coded(dtype::int8, scales)),
        "append to an open block in bf16 or f32, and close it by quantize_kv_blocks");
    scales = by_vector;
    scales.numbers = 2;
    has(told(coded(dtype::fp8_e4m3, scales)), "for int8 and int4 by vector or run a zero point");
    scales.group = scale_group::channel;
    has(told(coded(dtype::int8, scales)), "for int8 and int4 by vector or run a zero point");
    scales = by_vector;
    scales.numbers = 3;
    has(told(coded(dtype::int8, scales)), "other elements or scales");
    scales = by_vector;
    scales.element = dtype::fp8_e4m3;
    has(told(coded(dtype::int8, scales)), "of fp8_e4m3 for fp4_e2m1");
    has(told(coded(dtype::bf16, by_vector)), "takes keys and values both in codes");
    scales = nvfp4_scales;
    scales.run = 4;
    has(told(coded(dtype::fp4_e2m1, scales)), "granularity");
    scales = by_vector;
    scales.group = scale_group::run;
    scales.run = 24;
    has(told(coded(dtype::int4, scales, 48)), "granularity");
    has(told(coded(dtype::int4, by_vector, 264)), "256");
    kv_layout turned = coded(dtype::int4, by_vector);
    turned.key_scales.group = scale_group::channel;
    turned.key_scales.is_rotated = true;
    CHECK_THROWS_AS(static_cast<void>(turned.checked()), argument_error);
    turned = coded(dtype::int4, by_vector);
    turned.value_scales.is_rotated = true;
    CHECK_THROWS_AS(static_cast<void>(turned.checked()), argument_error);
  }

  TEST_CASE("each named form is written, copied to another order and read with the same values") {
    std::mt19937_64 random(9);
    for (std::uint32_t i = 0; i < paging::named_form_count; ++i) {
      const auto form = static_cast<paging::named_form>(i);
      CAPTURE(paging::name_of(form));
      for (const bool is_rotated : {false, true}) {
        const kv_layout shape{.layers = 1, .heads = 2, .head_dim = 32, .block_tokens = 4};
        kv_layout layout = paging::in_form(shape, form);
        if (is_rotated && layout.key_scales.group == scale_group::channel) continue;
        layout.key_scales.is_rotated = is_rotated;
        coded_blocks open(shape, 2);
        for (std::size_t at = 0; at + 2 <= shape.total_bytes(2); at += 2)
          store_element(dtype::bf16, open.data() + at, static_cast<float>(random() % 401) / 100 - 2);
        const std::vector<block_pair> pairs{{0, 1}, {1, 0}};
        coded_blocks cache(layout, 2);
        REQUIRE(quantize_kv_blocks(host_executor{}, cache.view(), open.view(), pairs));
        kv_layout elsewhere = layout;
        elsewhere.order = block_order::block_first_separate;
        elsewhere.heads_in_block = paging::head_order::hnd;
        elsewhere.key_scales.place = paging::scale_place::separate;
        coded_blocks moved(elsewhere, 2);
        REQUIRE(copy_kv_blocks(host_executor{}, moved.view(), cache.view(), pairs));
        for (std::uint32_t p = 0; p < 2; ++p) {
          for (std::uint64_t head = 0; head < 2; ++head) {
            for (std::uint64_t token = 0; token < 4; ++token) {
              for (std::uint64_t e = 0; e < 32; ++e)
                REQUIRE(moved.value(p, 0, token, head, e) == cache.value(p, 1, token, head, e));
            }
          }
        }
        coded_blocks back(shape, 2);
        REQUIRE(dequantize_kv_blocks(host_executor{}, back.view(), cache.view(), pairs));
        double worst = 0;
        for (std::size_t at = 0; at + 2 <= shape.total_bytes(2); at += 2)
          worst =
              std::max(worst, std::fabs(static_cast<double>(load_element(dtype::bf16, back.data() + at)) -
                                        static_cast<double>(load_element(dtype::bf16, open.data() + at))));
        CHECK(worst > 0);
        CHECK(worst < 0.6);  // of values up to 2
      }
    }
    constexpr kv_layout wide{.layers = 1, .heads = 1, .head_dim = 128, .block_tokens = 32};
    using enum paging::named_form;
    const auto bits = [&](paging::named_form form) {
      return static_cast<double>(paging::in_form(wide, form).block_bytes()) * 8 / (2 * 128 * 32);
    };
    CHECK(bits(int8_by_token) == 8.25);
    CHECK(bits(int4_by_token) == 4.25);
    CHECK(bits(k8v4) == 6.25);
    CHECK(bits(nvfp4) == 4.5);
    CHECK(bits(int8_by_channel) == 8.3125);
    CHECK(bits(int4_by_channel) == 4.3125);
    CHECK(bits(int4_by_token_zero) == 4.25);
  }

  TEST_CASE("a rotation is a part of both fingerprints, and changes none of a layout without one") {
    kv_layout plain = coded(dtype::int4, by_vector);
    kv_layout turned = plain;
    turned.key_scales.is_rotated = true;
    CHECK(plain.fingerprint() != turned.fingerprint());
    CHECK(plain.content_fingerprint() != turned.content_fingerprint());
  }
}
