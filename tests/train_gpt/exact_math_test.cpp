#include "train_gpt/exact_math.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace train_gpt;

namespace {

double between(llmmem_tests::random_numbers& random, double least, double most) {
  return least + (most - least) * static_cast<double>(random.next() >> 11) * 0x1p-53;
}

}  // namespace

TEST_CASE("exp, tanh and log equal the C library's to about a unit in the last place") {
  llmmem_tests::random_numbers random(llmmem_tests::seeds(1).front());
  double worst_float = 0, worst_double = 0, worst_tanh = 0, worst_log = 0;
  for (int i = 0; i < 100'000; ++i) {
    const auto x = static_cast<float>(between(random, -87, 88));
    const double right = std::exp(static_cast<double>(x));
    worst_float = std::max(worst_float, std::abs(static_cast<double>(exact_exp(x)) / right - 1));
    const double y = between(random, -708, 709);
    worst_double = std::max(worst_double, std::abs(exact_exp(y) / std::exp(y) - 1));
    const double z = between(random, -12, 12);
    worst_tanh = std::max(worst_tanh, std::abs(exact_tanh(z) - std::tanh(z)));
    const double v = std::exp(between(random, -700, 700));
    worst_log =
        std::max(worst_log, std::abs(exact_log(v) - std::log(v)) / std::max(1.0, std::abs(std::log(v))));
  }
  CHECK(worst_float < 1.5e-7);
  CHECK(worst_double < 5e-16);
  CHECK(worst_tanh < 5e-16);
  CHECK(worst_log < 5e-16);
}

TEST_CASE("outside their range the functions stay at its ends, and NaN stays NaN") {
  constexpr float none = std::numeric_limits<float>::quiet_NaN();
  constexpr float infinite = std::numeric_limits<float>::infinity();
  CHECK(exact_exp(-infinite) == exact_exp(-87.0F));
  CHECK(exact_exp(infinite) == exact_exp(88.0F));
  CHECK(exact_exp(0.0F) == 1.0F);
  CHECK(exact_tanh(infinite) == 1.0F);
  CHECK(exact_tanh(-infinite) == -1.0F);
  CHECK(exact_log(1.0) == 0.0);
  CHECK(std::isnan(exact_exp(none)));
  CHECK(std::isnan(exact_exp(static_cast<double>(none))));
  CHECK(std::isnan(exact_tanh(none)));
  CHECK(std::isnan(exact_log(static_cast<double>(none))));
}
