#include "train_gpt/matrix.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace train_gpt;

namespace {

/// Of many magnitudes, so that sums in another order round otherwise.
std::vector<float> random_values(llmmem_tests::random_numbers& random, std::size_t count) {
  std::vector<float> values(count);
  for (float& each : values) {
    const double fraction = static_cast<double>(random.next() >> 40) * 0x1p-23 - 1;
    each = static_cast<float>(fraction / static_cast<double>(1U << random.below(12U)));
  }
  return values;
}

/// A matrix with room to spare, transposed in memory one time in two.
matrix<const float> random_matrix(llmmem_tests::random_numbers& random, const std::vector<float>& values,
                                  std::size_t rows, std::size_t columns) {
  const std::size_t spare = random.below(std::uint64_t{3});
  if (random.once_in(2)) return {values.data(), rows, columns, columns + spare};
  return matrix<const float>{values.data(), columns, rows, rows + spare}.transposed();
}

}  // namespace

TEST_CASE("every element of a blocked product has the bits of the plain sum in order") {
  std::vector<float> scratch(product_scratch_elements);
  for (const auto seed : llmmem_tests::seeds(60)) {
    CAPTURE(seed);
    llmmem_tests::random_numbers random(seed);
    const std::size_t rows = 1 + random.below(seed % 4 == 0 ? 150U : 20U);
    const std::size_t columns = 1 + random.below(seed % 5 == 0 ? 1100U : 30U);
    const std::size_t depth = 1 + random.below(seed % 3 == 0 ? 600U : 40U);
    const auto a_values = random_values(random, (rows + 3) * (depth + 3));
    const auto b_values = random_values(random, (columns + 3) * (depth + 3));
    const auto a = random_matrix(random, a_values, rows, depth);
    const auto b = random_matrix(random, b_values, depth, columns);
    const std::size_t step = columns + random.below(std::uint64_t{4});
    auto c_values = random_values(random, rows * step);
    const auto before = c_values;
    multiply_add(matrix<float>{c_values.data(), rows, columns, step}, a, b, std::span(scratch));
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < rows; ++i) {
      for (std::size_t j = 0; j < step; ++j) {
        float sum = before[i * step + j];
        for (std::size_t k = 0; k < depth && j < columns; ++k)
          sum += a.data[i * a.row_step + k * a.column_step] * b.data[k * b.row_step + j * b.column_step];
        wrong += c_values[i * step + j] == sum ? 0U : 1U;
      }
    }
    REQUIRE(wrong == 0);
  }
}

TEST_CASE("an ordered sum adds sixteen partial sums, each in order") {
  for (const auto seed : llmmem_tests::seeds(20)) {
    CAPTURE(seed);
    llmmem_tests::random_numbers random(seed);
    const auto values = random_values(random, random.below(200U));
    float partial[16] = {};
    for (std::size_t i = 0; i < values.size(); ++i)
      partial[i % 16] += values[i];
    float sum = 0;
    for (const float each : partial)
      sum += each;
    CHECK(ordered_sum<float>(values.size(), [&](std::size_t i) { return values[i]; }) == sum);
  }
}
