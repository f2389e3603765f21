#include <llmmem/kernels/adafactor.hpp>
#include <llmmem/kernels/adafactor_phases.hpp>
#include <llmmem/kernels/errors.hpp>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/optimizer_step.hpp>
#include <llmmem/kernels/unordered_sum.hpp>
#include <llmmem/model/bf16.hpp>
#include <llmmem/model/presets.hpp>

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
#include <vector>

#include "support/optimizer_world.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;

/// The floats of Adafactor's state for a model whose norms have a scale and a shift, and matrices a bias.
constexpr std::uint64_t factors_of(const model_shape& of) {
  const std::uint64_t width = of.hidden;
  const auto with_bias = [](std::uint64_t in, std::uint64_t out) {
    return factor_count(in, out) + factor_count(1, out);
  };
  const std::uint64_t layer = 4 * width + with_bias(width, 3 * width) + with_bias(width, width) +
                              with_bias(width, of.intermediate) + with_bias(of.intermediate, width);
  return factor_count(of.vocabulary, width) + factor_count(of.context, width) + of.layers * layer + 2 * width;
}
static_assert(models::gpt2_124m.parameters() == 124'439'808);
static_assert(factors_of(models::gpt2_124m) * sizeof(float) == 1'286'468);
static_assert(optimizer_bytes(optimizer_form::adafactor, 768, 3072) == 4 * (768 * 3072 + 768 + 3072));
static_assert(optimizer_bytes(optimizer_form::adafactor, 1, 768) ==
              optimizer_bytes(optimizer_form::adafactor, 768));
static_assert(optimizer_bytes(optimizer_form::adamw, 3, 5) == optimizer_bytes(optimizer_form::adamw, 15));

/// A tensor, in floats.
struct tensor {
  adafactor_shape shape;
  std::vector<float> weights;
  std::vector<float> factors = std::vector<float>(shape.factors());

  optimizer_piece piece(std::uint64_t first, std::uint64_t count) {
    return {.weights = reinterpret_cast<std::byte*>(weights.data() + first), .first = first, .count = count};
  }
  friend bool operator==(const tensor& a, const tensor& b) {
    return a.weights.size() == b.weights.size() &&
           std::memcmp(a.weights.data(), b.weights.data(), 4 * a.weights.size()) == 0 &&
           std::memcmp(a.factors.data(), b.factors.data(), 4 * a.factors.size()) == 0;
  }
};

gradient_piece piece_of(const std::vector<float>& gradients, std::uint64_t first, std::uint64_t count) {
  return {.data = reinterpret_cast<const std::byte*>(gradients.data() + first), .count = count};
}

/// A step of a tensor in pieces that begin at `cuts`, each with sums of its own, merged from the last one on.
void step(tensor& of, const std::vector<float>& gradients, const adafactor_hyper& by,
          std::vector<std::uint64_t> cuts = {0}) {
  cuts.push_back(of.shape.elements());
  std::vector<unordered_sum> sums(of.shape.sums());
  unordered_sum updates;
  for (std::size_t i = cuts.size() - 1; i-- > 0;) {
    std::vector<unordered_sum> own(sums.size());
    const std::uint64_t count = cuts[i + 1] - cuts[i];
    adafactor_add(of.shape, of.piece(cuts[i], count), piece_of(gradients, cuts[i], count), by, own).value();
    for (std::size_t j = 0; j < sums.size(); ++j)
      sums[j].merge(own[j]);
  }
  const adafactor_terms terms = adafactor_factors(of.shape, sums, by, of.factors).value();
  for (std::size_t i = cuts.size() - 1; i-- > 0;) {
    unordered_sum own;
    const std::uint64_t count = cuts[i + 1] - cuts[i];
    adafactor_add_updates(of.shape, of.piece(cuts[i], count), piece_of(gradients, cuts[i], count), by,
                          of.factors, terms, own)
        .value();
    updates.merge(own);
  }
  for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
    const std::uint64_t count = cuts[i + 1] - cuts[i];
    adafactor_apply(of.shape, of.piece(cuts[i], count), piece_of(gradients, cuts[i], count), by, of.factors,
                    terms, updates)
        .value();
  }
}

/// PyTorch's rule in doubles.
struct torch_rule {
  adafactor_shape shape;
  std::vector<double> w;
  std::vector<double> rows = std::vector<double>(shape.rows);
  std::vector<double> columns = std::vector<double>(shape.is_factored() ? shape.columns : shape.elements());
  double largest_change = 0;

  void step(const std::vector<float>& gradients, const adafactor_hyper& by) {
    const auto t = static_cast<double>(by.step);
    const double share = std::pow(t, -0.8);
    const std::uint64_t c = columns.size();
    const std::uint64_t r = shape.elements() / c;
    const auto g = [&](std::uint64_t i) {
      return static_cast<double>(gradients[i]) * static_cast<double>(by.gradient_scale);
    };
    double weights = 0;
    std::vector<double> row_sums(r);
    std::vector<double> column_sums(c);
    for (std::uint64_t i = 0; i < w.size(); ++i) {
      weights += w[i] * w[i];
      row_sums[i / c] += g(i) * g(i);
      column_sums[i % c] += g(i) * g(i);
    }
    double mean = 0;
    for (std::uint64_t i = 0; i < r; ++i) {
      rows[i] += share * (row_sums[i] / static_cast<double>(c) - rows[i]);
      mean += rows[i] / static_cast<double>(r);
    }
    for (std::uint64_t j = 0; j < c; ++j)
      columns[j] += share * (column_sums[j] / static_cast<double>(r) - columns[j]);
    std::vector<double> u(w.size());
    double squares = 0;
    for (std::uint64_t i = 0; i < u.size(); ++i) {
      const double v =
          shape.is_factored() ? rows[i / c] * columns[i % c] / std::max(mean, by.least_square) : columns[i];
      u[i] = g(i) / std::sqrt(std::max(v, by.least_square * by.least_square));
      squares += u[i] * u[i];
    }
    const auto n = static_cast<double>(w.size());
    const double size = std::max(by.least_size, std::sqrt(weights / n)) *
                        std::min(by.rate, 1 / std::sqrt(t)) / std::max(1.0, std::sqrt(squares / n) / by.clip);
    for (std::uint64_t i = 0; i < u.size(); ++i) {
      w[i] = w[i] * (1 - by.rate * by.weight_decay) - size * u[i];
      largest_change = std::max(largest_change, std::abs(size * u[i]));
    }
  }
};

float float_of_any_size(std::mt19937_64& random) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(random() % 0x7F80'0000U));
}

}  // namespace

TEST_SUITE("unordered_sum") {
  TEST_CASE("numbers in any order and grouping have the same bits, and the exact sum but for 2^-45") {
    for (const auto seed : seeds(60)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      std::vector<float> numbers(1 + random() % 300);
      const bool is_narrow = seed % 2 == 0;
      for (float& each : numbers)
        each = is_narrow ? static_cast<float>(random() % 1000) * 1e-9F : float_of_any_size(random);
      const auto all = [&](auto add) {
        unordered_sum sum;
        for (const float each : numbers)
          add(sum, each);
        return sum;
      };
      const auto square = [](unordered_sum& sum, float each) { sum.add_square(-each); };
      const auto plain = [](unordered_sum& sum, float each) { sum.add(each); };
      long double squares = 0;
      long double plains = 0;
      for (const float each : numbers) {
        squares += static_cast<long double>(each) * static_cast<long double>(each);
        plains += static_cast<long double>(each);
      }
      const unordered_sum first = all(square);
      const unordered_sum first_plain = all(plain);
      CHECK(first.value() == doctest::Approx(static_cast<double>(squares)).epsilon(0x1p-44));
      CHECK(first_plain.value() == doctest::Approx(static_cast<double>(plains)).epsilon(0x1p-44));
      for (int tries = 0; tries < 3; ++tries) {
        std::shuffle(numbers.begin(), numbers.end(), random);
        REQUIRE(all(square) == first);
        REQUIRE(all(plain) == first_plain);
        std::vector<unordered_sum> parts(1 + random() % 5);
        for (const float each : numbers)
          parts[random() % parts.size()].add_square(each);
        unordered_sum joined;
        for (const unordered_sum& each : parts)
          joined.merge(each);
        REQUIRE(joined == first);
      }
    }
  }

  TEST_CASE("a number that is not finite, and a negative one that is not squared, make a NaN that stays") {
    for (const float odd :
         {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      unordered_sum sum;
      sum.add_square(-odd);
      sum.add_square(1e30F);
      sum.add_square(1e-30F);  // in the lowest digits
      sum.add(1);
      CHECK(std::isnan(sum.value()));
      unordered_sum other;
      other.add(odd);
      CHECK(other == sum);
      other = {};
      other.add_square(2);
      other.merge(sum);
      CHECK(other == sum);
      sum.merge({});
      CHECK(other == sum);
    }
    unordered_sum sum;
    sum.add(-0.0F);
    sum.add_square(-3);
    CHECK(sum.value() == 9);
    sum.add(-1);
    CHECK(std::isnan(sum.value()));
  }
}

TEST_SUITE("adafactor") {
  TEST_CASE("steps are those of PyTorch's rule in doubles, within the roundings to floats") {
    for (const auto seed : seeds(24)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const adafactor_shape shapes[] = {{1 + random() % 40, 1 + random() % 150}, {1, 200}, {70, 1}};
      tensor of{shapes[seed % 3], {}};
      of.weights = drawn_floats(of.shape.elements(), seed % 4 == 0 ? 1e-5 : 0.1, 0, random);
      torch_rule rule{of.shape, {of.weights.begin(), of.weights.end()}};
      constexpr std::uint64_t steps = 6;
      for (std::uint64_t t = 1; t <= steps; ++t) {
        const adafactor_hyper by{.rate = seed % 5 == 0 ? 0.9 : 0.01,
                                 .least_square = seed % 2 == 0 ? 0x1p-23 : 1e-15,
                                 .weight_decay = 0.1,
                                 .step = t,
                                 .gradient_scale = 0.5F};
        // Rows and columns of different sizes, as gradients of seldom tokens are.
        std::vector<float> g = drawn_floats(of.shape.elements(), 0.01, 0, random);
        for (std::size_t i = 0; i < g.size(); ++i)
          g[i] *= static_cast<float>(1 + (i / of.shape.columns) % 7 * 30);
        step(of, g, by);
        rule.step(g, by);
      }
      for (std::size_t i = 0; i < of.weights.size(); ++i) {
        const double bound = steps * (0x1p-23 * std::abs(rule.w[i]) + 0x1p-20 * rule.largest_change);
        REQUIRE(std::abs(static_cast<double>(of.weights[i]) - rule.w[i]) <= bound);
      }
    }
  }

  TEST_CASE("no cut into pieces changes a bit of weights or state, and bf16 gradients are their floats") {
    for (const auto seed : seeds(20)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      tensor whole{{1 + random() % 12, 1 + random() % 90}, {}};
      const std::uint64_t count = whole.shape.elements();
      whole.weights = drawn_floats(count, 0.1, 0, random);
      tensor cut = whole;
      tensor rows = whole;
      for (std::uint64_t t = 1; t <= 3; ++t) {
        const adafactor_hyper by{.rate = 0.5, .weight_decay = 0.01, .step = t};
        std::vector<float> g = drawn_floats(count, 0.01, 0, random);
        std::vector<std::uint16_t> half(count);
        for (std::size_t i = 0; i < g.size(); ++i) {
          half[i] = bf16_from_f32_bits(std::bit_cast<std::uint32_t>(g[i]));
          g[i] = std::bit_cast<float>(f32_from_bf16_bits(half[i]));
        }
        step(whole, g, by);
        std::vector<std::uint64_t> cuts{0};
        while (cuts.back() < count)
          cuts.push_back(std::min(count, cuts.back() + random() % 70));
        step(cut, g, by, cuts);
        REQUIRE(cut == whole);
        std::vector<unordered_sum> sums(rows.shape.sums());
        unordered_sum updates;
        const gradient_piece halves{reinterpret_cast<const std::byte*>(half.data()), dtype::bf16, count};
        const optimizer_piece piece = rows.piece(0, count);
        adafactor_add(rows.shape, piece, halves, by, sums).value();
        const adafactor_terms terms = adafactor_factors(rows.shape, sums, by, rows.factors).value();
        adafactor_add_updates(rows.shape, piece, halves, by, rows.factors, terms, updates).value();
        adafactor_apply(rows.shape, piece, halves, by, rows.factors, terms, updates).value();
        REQUIRE(rows == whole);
      }
    }
  }

  TEST_CASE("the share of a step is t^-0.8, and the first step takes all of the new mean") {
    CHECK(detail::adafactor_share(1) == 1);
    for (std::uint64_t t = 2; t != 0; t *= t < 100 ? 3 : 1000) {
      CAPTURE(t);
      CHECK(detail::adafactor_share(t) ==
            doctest::Approx(std::pow(static_cast<double>(t), -0.8)).epsilon(1e-14));
      if (t > std::numeric_limits<std::uint64_t>::max() / 1000) break;
    }
  }

  TEST_CASE("one gradient that is not finite, or too large, makes its whole tensor NaN and no other float") {
    for (const float odd :
         {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN(), -3e38F}) {
      for (const adafactor_shape shape : {adafactor_shape{5, 90}, adafactor_shape{1, 90}}) {
        tensor of{shape, std::vector<float>(shape.elements(), 1.0F)};
        std::vector<float> g(shape.elements(), 0.5F);
        g[7] = odd;
        step(of, g, {});
        for (const float each : of.weights)
          REQUIRE(std::bit_cast<std::uint32_t>(each) == 0x7FC0'0000U);
      }
    }
    // Zeros are no trouble.
    tensor none{{4, 70}, std::vector<float>(280)};
    step(none, std::vector<float>(280), {.least_square = 0});
    CHECK(none.weights == std::vector<float>(280));
  }

  TEST_CASE("misfits are refused before anything changes") {
    tensor of{{4, 6}, std::vector<float>(24, 1.0F)};
    const tensor before = of;
    const std::vector<float> g(24, 1.0F);
    std::vector<unordered_sum> sums(of.shape.sums());
    const adafactor_hyper by;
    const auto add = [&](const optimizer_piece& piece, const gradient_piece& gradients,
                         const adafactor_hyper& how = {}) {
      return adafactor_add(of.shape, piece, gradients, how, sums).error().code;
    };
    CHECK(add(of.piece(0, 24), piece_of(g, 0, 23)) == errc::size_mismatch);
    CHECK(add(of.piece(0, 24), piece_of(g, 0, 24), {.step = 0}) == errc::out_of_range);
    CHECK(add(of.piece(20, 5), piece_of(g, 0, 5)) == errc::out_of_range);
    CHECK(add({.first = ~std::uint64_t{0}, .count = 2}, piece_of(g, 0, 2)) == errc::out_of_range);
    CHECK(add({.count = 2}, piece_of(g, 0, 2)) == errc::too_short);
    CHECK(add(of.piece(0, 2), {.count = 2}) == errc::too_short);
    CHECK(add(of.piece(0, 2), {piece_of(g, 0, 2).data + 1, dtype::f32, 2}) == errc::bad_granularity);
    CHECK(add(of.piece(0, 2), {piece_of(g, 0, 2).data, dtype::f16, 2}) == errc::no_conversion);
    CHECK(adafactor_add({1U << 20U, 1U << 20U}, of.piece(0, 2), piece_of(g, 0, 2), by, sums).error().code ==
          errc::out_of_range);
    CHECK(adafactor_add(of.shape, of.piece(0, 2), piece_of(g, 0, 2), by, std::span(sums).first(10))
              .error()
              .code == errc::size_mismatch);
    CHECK(adafactor_factors(of.shape, sums, {.step = 0}, of.factors).error().code == errc::out_of_range);
    CHECK(adafactor_factors(of.shape, sums, by, std::span(of.factors).first(4)).error().code ==
          errc::size_mismatch);
    unordered_sum updates;
    CHECK(adafactor_add_updates(of.shape, of.piece(0, 2), piece_of(g, 0, 2), by, {}, {}, updates)
              .error()
              .code == errc::size_mismatch);
    CHECK(adafactor_apply(of.shape, of.piece(0, 2), piece_of(g, 0, 2), by, {}, {}, updates).error().code ==
          errc::size_mismatch);
    CHECK(of == before);
    CHECK(std::ranges::all_of(sums, [](const unordered_sum& each) { return each == unordered_sum{}; }));
    // A step of elements cannot know the sums.
    const auto alone =
        optimizer_step(host_executor{}, optimizer_form::adafactor, of.piece(0, 2), piece_of(g, 0, 2), {});
    CHECK(
        alone.error().message() ==
        "optimizer_step: form adafactor, whose steps begin with adafactor_add: 5 requested, but the highest "
        "allowed is 4");
    const auto muon =
        optimizer_step(host_executor{}, optimizer_form::muon, of.piece(0, 2), piece_of(g, 0, 2), {});
    CHECK(muon.error().message() ==
          "optimizer_step: form muon, whose steps begin with muon_momentum: 6 requested, but the highest "
          "allowed "
          "is 4");
  }

  TEST_CASE("the phases on an executor have the same bits, in any pieces") {
    for (const auto seed : seeds(24)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const adafactor_shape shape = seed % 4 == 0 ? adafactor_shape{1, 1 + random() % 3000}
                                                  : adafactor_shape{2 + random() % 200, 2 + random() % 20};
      tensor here{shape, drawn_floats(shape.elements(), 0.1, 0, random)};
      tensor there = here;
      std::vector<unordered_sum> sums(adafactor_sums(shape));
      adafactor_terms terms;
      const adafactor_arrays arrays{there.factors.data(), sums.data(), &terms};
      for (std::uint64_t t = 1; t <= 3; ++t) {
        const std::vector<float> gradients =
            drawn_floats(shape.elements(), 0.01, seed % 3 == 0 ? 80 : 0, random);
        const adafactor_hyper by{.rate = 0.05, .weight_decay = 0.1, .step = t, .gradient_scale = 0.5F};
        const std::uint64_t cut = random() % (shape.elements() + 1);
        step(here, gradients, by, {0, cut});
        const auto phase = [&](const auto& call) {
          call(there.piece(0, cut), piece_of(gradients, 0, cut));
          call(there.piece(cut, shape.elements() - cut), piece_of(gradients, cut, shape.elements() - cut));
        };
        const host_executor run;
        adafactor_begin(run, shape, arrays).value();
        phase([&](const auto& piece, const auto& g) {
          adafactor_add(run, shape, piece, g, by, arrays).value();
        });
        adafactor_factors(run, shape, by, arrays).value();
        phase([&](const auto& piece, const auto& g) {
          adafactor_add_updates(run, shape, piece, g, by, arrays).value();
        });
        phase([&](const auto& piece, const auto& g) {
          adafactor_apply(run, shape, piece, g, by, arrays).value();
        });
        CHECK(there == here);
      }
    }
  }

  TEST_CASE("phases on an executor without their arrays are refused") {
    tensor of{{2, 2}, std::vector<float>(4)};
    const std::vector<float> gradients(4);
    std::vector<unordered_sum> sums(adafactor_sums(of.shape));
    adafactor_terms terms;
    const host_executor run;
    for (const adafactor_arrays& arrays : {adafactor_arrays{nullptr, sums.data(), &terms},
                                           adafactor_arrays{of.factors.data(), nullptr, &terms},
                                           adafactor_arrays{of.factors.data(), sums.data(), nullptr}}) {
      CHECK(adafactor_begin(run, of.shape, arrays).error().code == errc::too_short);
      CHECK(
          adafactor_add(run, of.shape, of.piece(0, 4), piece_of(gradients, 0, 4), {}, arrays).error().code ==
          errc::too_short);
    }
    const adafactor_arrays arrays{of.factors.data(), sums.data(), &terms};
    CHECK(
        adafactor_apply(run, of.shape, of.piece(2, 4), piece_of(gradients, 0, 4), {}, arrays).error().code ==
        errc::out_of_range);
    CHECK(adafactor_add(run, of.shape, of.piece(4, 0), piece_of(gradients, 0, 0), {}, arrays).has_value());
    // A tensor without elements has no state.
    const adafactor_shape none{1, 0};
    const adafactor_arrays without{nullptr, sums.data(), &terms};
    CHECK(adafactor_begin(run, none, without).has_value());
    CHECK(adafactor_add(run, none, of.piece(0, 0), piece_of(gradients, 0, 0), {}, without).has_value());
    CHECK(adafactor_factors(run, none, {}, without).has_value());
  }
}
