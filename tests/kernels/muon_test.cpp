#include <llmmem/kernels/errors.hpp>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/muon.hpp>
#include <llmmem/kernels/muon_phases.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <thread>
#include <vector>

#include "support/optimizer_world.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;

std::vector<float> orthogonal(const muon_shape& shape, std::vector<float> matrix) {
  std::vector<float> scratch(shape.scratch(), std::numeric_limits<float>::quiet_NaN());
  orthogonalize(shape, matrix, scratch).value();
  return matrix;
}

/// The rule in doubles, element by element.
std::vector<double> rule(const muon_shape& shape, const std::vector<float>& matrix) {
  const bool is_tall = shape.rows > shape.columns;
  const std::uint64_t m = shape.shorter();
  const std::uint64_t n = shape.elements() / m;
  const auto at = [&](std::uint64_t i, std::uint64_t j) { return is_tall ? j * m + i : i * n + j; };
  double norm = 0;
  for (const float each : matrix)
    norm += static_cast<double>(each) * static_cast<double>(each);
  norm = std::max(std::sqrt(norm), 1e-7);
  std::vector<double> x(matrix.begin(), matrix.end());
  for (double& each : x)
    each /= norm;
  for (int step = 0; step < 5; ++step) {
    std::vector<double> gram(m * m);
    for (std::uint64_t i = 0; i < m; ++i) {
      for (std::uint64_t j = 0; j < m; ++j) {
        for (std::uint64_t k = 0; k < n; ++k)
          gram[i * m + j] += x[at(i, k)] * x[at(j, k)];
      }
    }
    std::vector<double> next(x.size());
    for (std::uint64_t i = 0; i < m; ++i) {
      std::vector<double> by(m);
      for (std::uint64_t j = 0; j < m; ++j) {
        double square = 0;
        for (std::uint64_t k = 0; k < m; ++k)
          square += gram[i * m + k] * gram[k * m + j];
        by[j] = -4.775 * gram[i * m + j] + 2.0315 * square;
      }
      for (std::uint64_t j = 0; j < n; ++j) {
        double sum = 3.4445 * x[at(i, j)];
        for (std::uint64_t k = 0; k < m; ++k)
          sum += by[k] * x[at(k, j)];
        next[at(i, j)] = sum;
      }
    }
    x = next;
  }
  return x;
}

}  // namespace

TEST_SUITE("muon") {
  TEST_CASE("a matrix becomes what the rule in doubles makes of it, and its transpose the transpose") {
    for (const auto seed : seeds(20)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const muon_shape shape{2 + random() % 20, 2 + random() % 30};
      const muon_shape turned_shape{shape.columns, shape.rows};
      // Gradients of any size have the same direction.
      const auto matrix = drawn_floats(shape.elements(), seed % 3 == 0 ? 1e-6 : 100, 0, random);
      const auto made = orthogonal(shape, matrix);
      const auto expected = rule(shape, matrix);
      for (std::size_t i = 0; i < made.size(); ++i)
        REQUIRE(std::abs(static_cast<double>(made[i]) - expected[i]) < 2e-5);
      std::vector<float> turned(matrix.size());
      for (std::uint64_t i = 0; i < matrix.size(); ++i)
        turned[i % shape.columns * shape.rows + i / shape.columns] = matrix[i];
      const auto made_turned = orthogonal(turned_shape, turned);
      for (std::uint64_t i = 0; i < made.size() && shape.rows != shape.columns; ++i)
        REQUIRE(made_turned[i % shape.columns * shape.rows + i / shape.columns] == made[i]);
    }
  }

  TEST_CASE("the singular values of a rotation become one number near 1") {
    // Of 8 x 8, each value is 1 / sqrt(8) of the norm; a step maps s to 3.4445 s - 4.775 s^3 + 2.0315 s^5.
    std::vector<float> matrix(64);
    for (std::uint64_t i = 0; i < 8; ++i)
      matrix[i * 8 + (i + 3) % 8] = i % 2 == 0 ? 5.0F : -5.0F;
    double s = 1 / std::sqrt(8.0);
    for (int step = 0; step < 5; ++step)
      s = 3.4445 * s - 4.775 * s * s * s + 2.0315 * s * s * s * s * s;
    CHECK(s > 0.6);
    CHECK(s < 1.3);
    const auto made = orthogonal({8, 8}, matrix);
    for (std::size_t i = 0; i < 64; ++i)
      CHECK(static_cast<double>(made[i]) ==
            doctest::Approx(static_cast<double>(matrix[i]) / 5 * s).epsilon(1e-5));
  }

  TEST_CASE("rows on several threads, in any ranges, have the same bits") {
    std::mt19937_64 random(3);
    const muon_shape shape{17, 9};
    const auto matrix = drawn_floats(shape.elements(), 1, 0, random);
    std::vector<float> shared = matrix;
    std::vector<float> scratch(shape.scratch());
    const auto in_threads = [](std::uint64_t rows, const auto& act) {
      const std::uint64_t cut = rows / 3;
      std::thread other([&] { act(cut, rows); });
      act(std::uint64_t{0}, cut);
      other.join();
    };
    orthogonalize(shape, shared, scratch, {}, in_threads).value();
    CHECK(shared == orthogonal(shape, matrix));
  }

  TEST_CASE("momentum is Nesterov's, and pieces have the bits of the whole") {
    std::mt19937_64 random(4);
    const muon_shape shape{12, 8};
    const muon_hyper by{.rate = 0.02, .weight_decay = 0.1, .gradient_scale = 0.25F};
    auto weights = drawn_floats(96, 0.1, 0, random);
    const auto before = weights;
    std::vector<float> momentum(96);
    std::vector<float> updates(96);
    std::vector<double> m(96);
    for (int step = 0; step < 3; ++step) {
      const auto g = drawn_floats(96, 1, 0, random);
      muon_momentum(std::span(g).first(50), std::span(momentum).first(50), std::span(updates).first(50), by)
          .value();
      muon_momentum(std::span(g).last(46), std::span(momentum).last(46), std::span(updates).last(46), by)
          .value();
      for (std::size_t i = 0; i < 96; ++i) {
        const double scaled = 0.25 * static_cast<double>(g[i]);
        m[i] = 0.95 * m[i] + 0.05 * scaled;
        CHECK(static_cast<double>(momentum[i]) == doctest::Approx(m[i]).epsilon(1e-5));
        CHECK(static_cast<double>(updates[i]) == doctest::Approx(0.95 * m[i] + 0.05 * scaled).epsilon(1e-5));
      }
    }
    muon_apply(shape, std::span(weights).first(9), std::span(updates).first(9), by).value();
    muon_apply(shape, std::span(weights).last(87), std::span(updates).last(87), by).value();
    for (std::size_t i = 0; i < 96; ++i) {
      const double size = 0.02 * std::sqrt(1.5);
      CHECK(static_cast<double>(weights[i]) ==
            doctest::Approx(static_cast<double>(before[i]) * (1 - 0.02 * 0.1) -
                            size * static_cast<double>(updates[i]))
                .epsilon(1e-5));
    }
  }

  TEST_CASE("one number that is not finite, or a norm that no float holds, makes a NaN of each element") {
    for (const float odd : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN(),
                            std::numeric_limits<float>::max()}) {
      std::vector<float> matrix(20, odd == std::numeric_limits<float>::max() ? odd : 1.0F);
      matrix[7] = odd;
      for (const float each : orthogonal({4, 5}, matrix))
        CHECK(std::bit_cast<std::uint32_t>(each) == 0x7FC0'0000U);
    }
    CHECK(orthogonal({4, 5}, std::vector<float>(20)) == std::vector<float>(20));
  }

  TEST_CASE("misfits are refused before anything changes") {
    std::vector<float> some(20, 1.0F);
    const std::vector<float> before = some;
    std::vector<float> scratch(muon_shape{4, 5}.scratch());
    CHECK(orthogonalize({1, 20}, some, scratch).error().code == errc::out_of_range);
    CHECK(orthogonalize({1U << 20U, 1U << 20U}, some, scratch).error().code == errc::out_of_range);
    CHECK(orthogonalize({4, 4}, some, scratch).error().code == errc::size_mismatch);
    CHECK(orthogonalize({4, 5}, some, std::span(scratch).first(9)).error().code == errc::size_mismatch);
    CHECK(muon_momentum(some, std::span(some).first(3), some, {}).error().code == errc::size_mismatch);
    CHECK(muon_momentum(some, some, std::span(some).first(3), {}).error().code == errc::size_mismatch);
    CHECK(muon_apply({4, 5}, some, std::span(some).first(3), {}).error().code == errc::size_mismatch);
    CHECK(muon_apply({20, 1}, some, some, {}).error().code == errc::out_of_range);
    CHECK(some == before);
  }

  TEST_CASE("the phases on an executor have the same bits, also of NaNs and of a matrix of zeros") {
    for (const auto seed : seeds(40)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const muon_shape shape{2 + random() % 40, 2 + random() % 40};
      const muon_hyper by{.weight_decay = 0.1, .gradient_scale = 0.5F};
      std::vector<float> gradients = drawn_floats(shape.elements(), 0.01, 0, random);
      if (seed % 8 == 3) gradients[0] = std::numeric_limits<float>::quiet_NaN();
      if (seed % 8 == 5) gradients.assign(gradients.size(), 0);
      std::vector<float> momentum(gradients.size());
      std::vector<float> updates(gradients.size());
      std::vector<float> weights = drawn_floats(shape.elements(), 0.1, 0, random);
      std::vector<float> scratch(shape.scratch(), std::numeric_limits<float>::quiet_NaN());
      std::vector<float> momentum_there = momentum;
      std::vector<float> updates_there = updates;
      std::vector<float> weights_there = weights;
      muon_momentum(gradients, momentum, updates, by).value();
      orthogonalize(shape, updates, scratch, by).value();
      muon_apply(shape, weights, updates, by).value();
      const host_executor run;
      scratch.assign(scratch.size(), 7);
      muon_momentum(run, gradients, momentum_there, updates_there, by).value();
      orthogonalize(run, shape, updates_there, scratch, by).value();
      muon_apply(run, shape, weights_there, updates_there, by).value();
      const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
        return std::memcmp(a.data(), b.data(), 4 * a.size()) == 0;
      };
      CHECK(same(momentum_there, momentum));
      CHECK(same(updates_there, updates));
      CHECK(same(weights_there, weights));
    }
    std::vector<float> four(4);
    CHECK(orthogonalize(host_executor{}, {1, 4}, four, four).error().code == errc::out_of_range);
    CHECK(orthogonalize(host_executor{}, {2, 2}, four, four).error().code == errc::size_mismatch);
    CHECK(muon_momentum(host_executor{}, four, four, std::span<float>(four).first(3), {}).error().code ==
          errc::size_mismatch);
    CHECK(muon_apply(host_executor{}, {2, 2}, four, std::span<float>(four).first(3), {}).error().code ==
          errc::size_mismatch);
  }
}
