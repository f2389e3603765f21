#include <llmmem/kernels/errors.hpp>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/optimizer_step.hpp>
#include <llmmem/kernels/vector_path.hpp>
#include <llmmem/model/bf16.hpp>
#include <llmmem/testing/grid_executor.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "support/optimizer_world.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::grid_executor;

constexpr std::uint32_t no_number = 0x7FC0'0000U;

/// Forces a rounding, whatever the compiler would fuse.
float rounded(float x) {
  volatile float kept = x;
  const float out = kept;
  return out == out ? out : std::bit_cast<float>(no_number);
}

/// The rules as the contract writes them, element by element.
struct written_rule {
  optimizer_hyper by;
  double power(double base) const {
    double product = 1;
    double square = base;
    for (std::uint64_t left = by.step; left != 0; left /= 2, square *= square)
      product *= left % 2 != 0 ? square : 1;
    return product;
  }
  void adamw(float& w, float& m, float& v, float gradient) const {
    const auto share1 = static_cast<float>(1 - by.mean_decay);
    const auto share2 = static_cast<float>(1 - by.variance_decay);
    const auto keep = static_cast<float>(1 - by.rate * by.weight_decay);
    const auto size = static_cast<float>(by.rate / (1 - power(by.mean_decay)));
    const auto correction = static_cast<float>(1 / (1 - power(by.variance_decay)));
    const float g = rounded(gradient * by.gradient_scale);
    m = rounded(rounded(static_cast<float>(by.mean_decay) * m) + rounded(share1 * g));
    v = rounded(rounded(static_cast<float>(by.variance_decay) * v) + rounded(rounded(share2 * g) * g));
    const float root = rounded(std::sqrt(rounded(v * correction)));
    const float below = rounded(root + static_cast<float>(by.epsilon));
    w = rounded(rounded(keep * w) - rounded(rounded(size * m) / below));
  }
  void sgd(float& w, float& m, float gradient) const {
    const auto keep = static_cast<float>(1 - by.rate * by.weight_decay);
    m = rounded(rounded(static_cast<float>(by.mean_decay) * m) + rounded(gradient * by.gradient_scale));
    w = rounded(rounded(keep * w) - rounded(static_cast<float>(by.rate) * m));
  }
};

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
/// As a compiler for a processor with FMA makes it, whatever the flags of this file are.
__attribute__((target("fma"), optimize("O2", "fp-contract=fast"), noinline, flatten)) float keep_with_fma(
    const optimizer_hyper& by) {
  return llmmem::detail::optimizer_constants::of(by, false).keep;
}
#endif

gradient_piece gradients_of(const std::vector<float>& of) {
  return {reinterpret_cast<const std::byte*>(of.data()), dtype::f32, of.size()};
}

std::vector<std::uint32_t> bits_of(std::span<const float> values) {
  std::vector<std::uint32_t> all;
  for (const float each : values)
    all.push_back(std::bit_cast<std::uint32_t>(each));
  return all;
}
std::vector<std::uint32_t> bits_in(const std::vector<std::byte>& array) {
  std::vector<std::uint32_t> all(array.size() / 4);
  std::memcpy(all.data(), array.data(), array.size());
  return all;
}

optimizer_hyper any_hyper(std::mt19937_64& random, std::uint64_t step) {
  return {.rate = 1e-3 * static_cast<double>(1 + random() % 9),
          .weight_decay = random() % 2 == 0 ? 0.0 : 0.1,
          .step = step,
          .gradient_scale = random() % 2 == 0 ? 1.0F : 0.37F,
          .seed = random()};
}

}  // namespace

TEST_SUITE("optimizer_step") {
  TEST_CASE("AdamW and SGD follow the contract's rules to the bit") {
    for (const auto seed : seeds(40, 15)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const std::uint64_t count = random() % 300;
      const auto start = drawn_floats(count, 0.1, seed % 3 == 0 ? 40 : 0, random);
      for (const optimizer_form form : {optimizer_form::adamw, optimizer_form::sgd}) {
        optimizer_arrays arrays(form, count);
        const optimizer_piece piece = arrays.whole(form, count);
        optimizer_begin(host_executor{}, form, piece, start.data()).value();
        std::vector<float> w = start;
        std::vector<float> m(count);
        std::vector<float> v(count);
        for (std::uint64_t step = 1; step <= 8; ++step) {
          const auto g = drawn_floats(count, 0.01, seed % 3 == 0 ? 60 : 0, random);
          const written_rule rule{any_hyper(random, step)};
          optimizer_step(host_executor{}, form, piece, gradients_of(g), rule.by).value();
          for (std::size_t i = 0; i < count; ++i) {
            if (form == optimizer_form::sgd) {
              rule.sgd(w[i], m[i], g[i]);
            } else {
              rule.adamw(w[i], m[i], v[i], g[i]);
            }
          }
          REQUIRE(bits_in(arrays.of[0]) == bits_of(w));
          REQUIRE(bits_in(arrays.of[2]) == bits_of(m));
          if (form == optimizer_form::adamw) REQUIRE(bits_in(arrays.of[3]) == bits_of(v));
        }
      }
    }
  }

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  TEST_CASE("a processor that fuses products into sums has the constants of one that does not") {
    if (!__builtin_cpu_supports("fma")) return;
    // 1 - rate weight_decay is near the middle of two floats: fused, it would be the other one.
    constexpr optimizer_hyper near_middle[] = {
        {.rate = 0x1.2bf7ced916873p-10, .weight_decay = 0x1.4119d5b98c469p-5},
        {.rate = 0x1.08b4395810625p-10, .weight_decay = 0x1.a2c318435f619p-7},
        {.rate = 0x1.f68p-1, .weight_decay = 0x1.1e4a2edea17f2p-1}};
    constexpr float apart[] = {0x1.fffa2p-1F, 0x1.fffe5p-1F, 0x1.ce0b64p-2F};
    for (std::size_t i = 0; i < std::size(apart); ++i) {
      CHECK(llmmem::detail::optimizer_constants::of(near_middle[i], false).keep == apart[i]);
      CHECK(keep_with_fma(near_middle[i]) == apart[i]);
    }
  }
#endif

  TEST_CASE("a weight of bf16 and 16 low bits has the bits of a float over a thousand steps") {
    for (const auto seed : seeds(2)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      constexpr std::uint64_t count = 130;
      const auto start = drawn_floats(count, 0.1, 30, random);
      optimizer_arrays floats(optimizer_form::adamw, count);
      optimizer_arrays split(optimizer_form::adamw_split16, count);
      const optimizer_piece one = floats.whole(optimizer_form::adamw, count);
      const optimizer_piece two = split.whole(optimizer_form::adamw_split16, count);
      optimizer_begin(host_executor{}, optimizer_form::adamw, one, start.data()).value();
      optimizer_begin(host_executor{}, optimizer_form::adamw_split16, two, start.data()).value();
      std::vector<float> joined(count);
      for (std::uint64_t step = 1; step <= 1000; ++step) {
        const auto g = drawn_floats(count, 0.01, step % 100 == 0 ? 50 : 0, random);
        const optimizer_hyper by = any_hyper(random, step);
        optimizer_step(host_executor{}, optimizer_form::adamw, one, gradients_of(g), by).value();
        optimizer_step(host_executor{}, optimizer_form::adamw_split16, two, gradients_of(g), by).value();
        optimizer_weights(host_executor{}, optimizer_form::adamw_split16, two, joined.data()).value();
        const auto expected = bits_in(floats.of[0]);
        REQUIRE(bits_of(joined) == expected);
        REQUIRE(split.of[2] == floats.of[2]);
        REQUIRE(split.of[3] == floats.of[3]);
        for (std::size_t i = 0; i < count; ++i) {
          std::uint16_t high = 0;
          std::memcpy(&high, split.of[0].data() + 2 * i, 2);
          // Rounded, of two equally near away from zero; what is no number stays none.
          REQUIRE(high == (expected[i] == no_number ? no_number >> 16U : (expected[i] + 0x8000U) >> 16U));
        }
      }
    }
  }

  TEST_CASE("both halves of any bits are restored, and a NaN stays a NaN") {
    const auto check = [](std::uint32_t bits) {
      const detail::split_float halves = detail::split_of(bits);
      const std::uint32_t back = detail::joined_bits(halves.high, halves.low);
      if ((bits & 0x7FFF'FFFFU) <= 0x7F80'0000U) {
        REQUIRE(back == bits);
        return;
      }
      REQUIRE((back & 0x7FFF'FFFFU) > 0x7F80'0000U);
      REQUIRE((back >> 31U) == (bits >> 31U));
      REQUIRE((std::uint32_t{halves.high} & 0x7FFFU) > 0x7F80U);  // as bf16 alone, too
    };
    for (const std::uint32_t high : {0x7FFFU, 0xFFFFU, 0x7F80U, 0xFF80U, 0x7F7FU, 0U, 0x8000U, 0x3F80U}) {
      for (const std::uint32_t low : {0U, 1U, 0x7FFFU, 0x8000U, 0x8001U, 0xFFFFU})
        check(high << 16U | low);
    }
    std::mt19937_64 random(1);
    for (int i = 0; i < 100'000; ++i)
      check(static_cast<std::uint32_t>(random()));
    CHECK(detail::split_of(0x7F7F'FFFFU).high == 0x7F80U);
  }

  TEST_CASE("cuts into pieces, executors, vectors and widths of accesses change no bit of any form") {
    std::vector<vector_path> paths(vector_paths.begin(), vector_paths.end());
    std::erase_if(paths, [](vector_path path) { return !has_vector_path(path); });
    for (const auto seed : seeds(60, 25)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const optimizer_form form = all_optimizer_forms[seed % all_optimizer_forms.size()];
      CAPTURE(form);
      const std::uint64_t count = random() % 4 == 0 ? random() % 40 : random() % 2500;
      const bool is_half = random() % 2 == 0;
      const auto start = drawn_floats(count, 0.1, 0, random);
      optimizer_arrays whole(form, count);
      optimizer_begin(host_executor{}, form, whole.whole(form, count), start.data()).value();
      optimizer_arrays pieces = whole;
      optimizer_arrays grid = whole;
      const auto bases = pieces.bases();
      for (std::uint64_t step = 1; step <= 4; ++step) {
        const auto floats = drawn_floats(count, 0.01, seed % 4 == 0 ? 100 : 0, random);
        std::vector<std::uint16_t> halves;
        for (const float each : floats)
          halves.push_back(bf16_from_f32_bits(std::bit_cast<std::uint32_t>(each)));
        const optimizer_hyper by = any_hyper(random, step);
        const auto part = [&](std::uint64_t first, std::uint64_t size) -> gradient_piece {
          if (is_half) return {reinterpret_cast<const std::byte*>(halves.data() + first), dtype::bf16, size};
          return {reinterpret_cast<const std::byte*>(floats.data() + first), dtype::f32, size};
        };
        optimizer_step(host_executor{}, form, whole.whole(form, count), part(0, count), by).value();
        optimizer_step(grid_executor({.blocks = 2}), form, grid.whole(form, count), part(0, count), by)
            .value();
        for (std::uint64_t first = 0; first < count;) {
          const std::uint64_t unit = cut_multiple(form);
          const std::uint64_t size = std::min(count - first, unit * (1 + random() % (600 / unit)));
          const vector_path path = paths[random() % paths.size()];
          detail::optimizer_step_by(path, host_executor{}, form,
                                    optimizer_arrays::piece(form, bases, first, size), part(first, size), by)
              .value();
          first += size;
        }
        REQUIRE(pieces == whole);
        REQUIRE(grid == whole);
      }
    }
  }

  TEST_CASE("vectors draw the random bits of each element's index, also where its lower half overflows") {
    constexpr auto form = optimizer_form::adamw_stochastic;
    constexpr std::uint64_t count = 200;
    std::mt19937_64 random(3);
    const auto start = drawn_floats(count, 0.1, 0, random);
    const auto floats = drawn_floats(count, 0.01, 0, random);
    const gradient_piece by{reinterpret_cast<const std::byte*>(floats.data()), dtype::f32, count};
    optimizer_arrays one_by_one(form, count);
    optimizer_begin(host_executor{}, form, one_by_one.whole(form, count), start.data()).value();
    const optimizer_arrays begun = one_by_one;
    const auto step = [&](const auto& run, vector_path path, optimizer_arrays& arrays) {
      optimizer_piece piece = arrays.whole(form, count);
      piece.first = (std::uint64_t{1} << 32U) - 107;
      detail::optimizer_step_by(path, run, form, piece, by, {.step = 1, .seed = 5}).value();
    };
    step(grid_executor({.blocks = 2}), vector_path::baseline, one_by_one);
    for (const vector_path path : vector_paths) {
      if (!has_vector_path(path)) continue;
      CAPTURE(to_text(path));
      optimizer_arrays arrays = begun;
      step(host_executor{}, path, arrays);
      CHECK(arrays == one_by_one);
    }
  }

  TEST_CASE("8-bit codes are the nearest codes of dynamic quantisation, within its bounds") {
    for (const bool has_signs : {true, false}) {
      const auto& book = has_signs ? detail::signed_codes : detail::unsigned_codes;
      CHECK(std::is_sorted(std::begin(book.value), std::end(book.value)));
      CHECK(book.value[255] == 1);
      CHECK(book.value[has_signs ? 127 : 0] == 0);
      const double smallest = static_cast<double>(book.value[has_signs ? 128 : 1]);
      CHECK(smallest == doctest::Approx(has_signs ? 5.5e-7 : 3.25e-7));
      const double bound = has_signs ? 0.00704 : 0.00352;
      std::mt19937_64 random(2);
      for (int i = 0; i < 20'000; ++i) {
        auto x = static_cast<float>(static_cast<double>(random() >> 11U) * 0x1p-53);
        if (random() % 3 == 0) x = x * x * x * x * x * x;
        if (has_signs && random() % 2 == 0) x = -x;
        const double error = std::abs(static_cast<double>(book.value[book.nearest(x)] - x));
        REQUIRE(error <= bound);
        double nearest = error;
        for (const float each : book.value)
          nearest = std::min(nearest, std::abs(static_cast<double>(each) - static_cast<double>(x)));
        REQUIRE(error <= nearest + 1e-8);
      }
    }
  }

  TEST_CASE("8-bit moments are near those of floats, and a group with a NaN is reported") {
    constexpr std::uint64_t count = 1000;
    std::mt19937_64 random(3);
    const auto start = drawn_floats(count, 0.1, 0, random);
    constexpr auto form = optimizer_form::adamw_8bit;
    optimizer_arrays arrays(form, count);
    optimizer_arrays exact(optimizer_form::adamw, count);
    optimizer_begin(host_executor{}, form, arrays.whole(form, count), start.data()).value();
    optimizer_begin(host_executor{}, optimizer_form::adamw, exact.whole(optimizer_form::adamw, count),
                    start.data())
        .value();
    auto g = drawn_floats(count, 0.01, 0, random);
    const auto step = [&](std::uint64_t number) {
      optimizer_step(host_executor{}, form, arrays.whole(form, count), gradients_of(g), {.step = number})
          .value();
    };
    step(1);
    optimizer_step(host_executor{}, optimizer_form::adamw, exact.whole(optimizer_form::adamw, count),
                   gradients_of(g), {})
        .value();
    CHECK(arrays.of[0] == exact.of[0]);  // weights change by the unrounded moments
    std::vector<float> m(count);
    std::memcpy(m.data(), exact.of[2].data(), 4 * count);
    std::array<float, 4> scales{};
    std::memcpy(scales.data(), arrays.of[4].data(), sizeof scales);
    for (std::size_t i = 0; i < count; ++i) {
      const float scale = scales[i / 256];
      const float restored =
          detail::signed_codes.value[std::to_integer<std::uint8_t>(arrays.of[2][i])] * scale;
      REQUIRE(std::abs(static_cast<double>(restored - m[i])) <= 0.00704 * static_cast<double>(scale));
    }
    g[300] = std::numeric_limits<float>::infinity();
    step(2);
    for (const std::size_t moment : {4U, 5U}) {
      const auto told = bits_in(arrays.of[moment]);
      CHECK(told[1] == no_number);
      CHECK(told[0] != no_number);
    }
    g[300] = 0;
    step(3);
    std::vector<float> w(count);
    optimizer_weights(host_executor{}, form, arrays.whole(form, count), w.data()).value();
    for (std::size_t i = 0; i < count; ++i)
      REQUIRE(std::isnan(w[i]) == (i / 256 == 1));
  }

  TEST_CASE("each moment has the scale of its own largest element") {
    // The first has the largest variance and soon a small mean, the second the largest mean.
    constexpr std::uint64_t count = 2;
    optimizer_arrays arrays(optimizer_form::adamw_8bit, count);
    optimizer_arrays exact(optimizer_form::adamw, count);
    for (const auto& g : {std::vector<float>{1.0F, 0.9F}, std::vector<float>{-1.0F, 0.9F}}) {
      optimizer_step(host_executor{}, optimizer_form::adamw_8bit,
                     arrays.whole(optimizer_form::adamw_8bit, count), gradients_of(g), {})
          .value();
      optimizer_step(host_executor{}, optimizer_form::adamw, exact.whole(optimizer_form::adamw, count),
                     gradients_of(g), {})
          .value();
    }
    CHECK(bits_in(arrays.of[5])[0] == bits_in(exact.of[3])[0]);
    CHECK(std::bit_cast<float>(bits_in(arrays.of[4])[0]) > 0.15F);
  }

  TEST_CASE("in a group with one huge element, no other element takes a longer step than floats allow") {
    constexpr std::uint64_t count = 256;
    constexpr auto form = optimizer_form::adamw_8bit;
    optimizer_arrays arrays(form, count);
    const optimizer_piece piece = arrays.whole(form, count);
    const std::vector<float> zeros(count, 0.0F);
    optimizer_begin(host_executor{}, form, piece, zeros.data()).value();
    std::vector<float> gradients(count, 1e-4F);
    gradients[0] = 1;
    std::vector<float> before(count);
    std::vector<float> after(count);
    // Variances of 1e-8 of the giant's are below half the least code. Then all gradients are 0.
    for (std::uint64_t step = 1; step <= 40; ++step) {
      if (step == 20) gradients.assign(count, 0.0F);
      optimizer_weights(host_executor{}, form, piece, before.data()).value();
      optimizer_step(host_executor{}, form, piece, gradients_of(gradients), {.rate = 1e-3, .step = step})
          .value();
      optimizer_weights(host_executor{}, form, piece, after.data()).value();
      for (std::uint64_t i = 0; i < count; ++i)
        REQUIRE(std::abs(after[i] - before[i]) < 1.1e-3F);
    }
  }

  TEST_CASE("stochastic rounding is right on average, and keeps exact bf16 values") {
    constexpr std::uint64_t count = 40'000;
    constexpr auto form = optimizer_form::adamw_stochastic;
    const detail::optimizer_constants by = detail::optimizer_constants::of({.step = 3, .seed = 4}, false);
    std::uint64_t up = 0;
    for (std::uint64_t i = 0; i < count; ++i)
      up += detail::stochastic_bf16(0x3F80'4000U, detail::drawn_bits(i, by)) == 0x3F81U ? 1U : 0U;
    CHECK(up > count / 4 - 400);
    CHECK(up < count / 4 + 400);
    for (const std::uint32_t exact : {0x3F80'0000U, 0x7F80'0000U, 0xFF80'0000U, 0U, 0x8000'0000U, no_number})
      CHECK(detail::stochastic_bf16(exact, 0xFFFFU) == exact >> 16U);
    // Another step and another seed draw other bits.
    std::vector<float> start(count, 1.0F);
    const std::vector<float> g(count, 1e-3F);
    std::vector<std::vector<std::byte>> seen;
    for (const optimizer_hyper& each : {optimizer_hyper{.step = 1}, optimizer_hyper{.step = 1},
                                        optimizer_hyper{.step = 2}, optimizer_hyper{.step = 1, .seed = 1}}) {
      optimizer_arrays arrays(form, count);
      optimizer_begin(host_executor{}, form, arrays.whole(form, count), start.data()).value();
      optimizer_step(host_executor{}, form, arrays.whole(form, count), gradients_of(g), each).value();
      seen.push_back(arrays.of[0]);
    }
    CHECK(seen[0] == seen[1]);
    CHECK(seen[0] != seen[2]);
    CHECK(seen[0] != seen[3]);
  }

  TEST_CASE("the bytes of a form are those of its arrays, and small tensors keep floats") {
    for (const optimizer_form form : all_optimizer_forms) {
      for (const std::uint64_t count : {0U, 1U, 255U, 256U, 257U, 5000U}) {
        optimizer_arrays arrays(form, count);
        std::uint64_t sum = 0;
        for (const auto& each : arrays.of)
          sum += each.size();
        CHECK(optimizer_bytes(form, count) == sum);
      }
    }
    // With bf16 gradients, 2 more: 14 instead of the 16 of floats with 2 + 2 of bf16 weights and gradients.
    CHECK(optimizer_bytes(optimizer_form::adamw_split16, 1000) == 12'000);
    CHECK(form_for(optimizer_form::adamw_8bit, 4095) == optimizer_form::adamw);
    CHECK(form_for(optimizer_form::adamw_8bit, 4096) == optimizer_form::adamw_8bit);
    CHECK(form_for(optimizer_form::sgd, 1) == optimizer_form::sgd);
  }

  TEST_CASE("what does not fit is refused, and nothing has changed") {
    for (const optimizer_form form : all_optimizer_forms) {
      CAPTURE(form);
      constexpr std::uint64_t count = 300;
      std::mt19937_64 random(5);
      const auto start = drawn_floats(count, 0.1, 0, random);
      optimizer_arrays arrays(form, count);
      const optimizer_piece well = arrays.whole(form, count);
      optimizer_begin(host_executor{}, form, well, start.data()).value();
      const optimizer_arrays before = arrays;
      const auto told = [&](const optimizer_piece& piece, const gradient_piece& g,
                            const optimizer_hyper& by = {}) {
        const auto done = optimizer_step(host_executor{}, form, piece, g, by);
        return done ? failure{} : done.error();
      };
      const gradient_piece g = gradients_of(start);
      CHECK(told(well, {g.data, g.element, count - 1}) == failure{errc::size_mismatch, 0, count, count - 1});
      CHECK(told(well, {g.data, dtype::f16, count}).code == errc::no_conversion);
      CHECK(told(well, {nullptr, g.element, count}).code == errc::too_short);
      CHECK(told(well, {g.data + 1, g.element, count}).code == errc::bad_granularity);
      CHECK(told(well, g, {.step = 0}).code == errc::out_of_range);
      optimizer_piece other = well;
      other.mean = nullptr;
      CHECK(told(other, g) == failure{errc::too_short, 2, count, 0});
      other = well;
      other.weights += 1;
      CHECK(told(other, g).code == errc::bad_granularity);
      other = well;
      other.first = 100;
      if (form == optimizer_form::adamw_8bit)
        CHECK(told(other, g) == failure{errc::bad_granularity, 0, 100, 256});
      CHECK(optimizer_begin(host_executor{}, form, well, nullptr).code() == errc::too_short);
      CHECK(optimizer_weights(host_executor{}, form, well, nullptr).code() == errc::too_short);
      std::vector<float> two(count + 1);
      auto* const between = reinterpret_cast<float*>(reinterpret_cast<std::byte*>(two.data()) + 1);
      CHECK(optimizer_begin(host_executor{}, form, well, between).code() == errc::bad_granularity);
      CHECK(optimizer_weights(host_executor{}, form, well, between).code() == errc::bad_granularity);
      constexpr std::uint64_t beyond = std::uint64_t{1} << 60U;
      other = well;
      other.first = ~std::uint64_t{255};
      CHECK(told(other, g) == failure{errc::out_of_range, 0, other.first, beyond - 1});
      other = well;
      other.count = ~std::uint64_t{0};
      CHECK(told(other, {g.data, g.element, other.count}) ==
            failure{errc::out_of_range, 0, other.count, beyond - 1});
      CHECK(optimizer_weights(host_executor{}, form, other, two.data()).code() == errc::out_of_range);
      CHECK(arrays == before);
      CHECK(told({}, {}) == failure{});
      CHECK(optimizer_begin(host_executor{}, form, {}, nullptr).has_value());
    }
  }
}
