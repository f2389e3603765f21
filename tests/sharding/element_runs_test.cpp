#include <llmmem/sharding/element_runs.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <set>
#include <utility>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/sharding_world.hpp"

using namespace llmmem;
using llmmem_tests::elements_of;
using llmmem_tests::random_numbers;
using llmmem_tests::random_range;
using llmmem_tests::random_runs;
using llmmem_tests::random_shape;
using llmmem_tests::seeds;

TEST_CASE("a set of runs behaves as a sorted list of its elements") {
  for (const auto seed : seeds(300)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::uint64_t tensor = random.below(std::uint64_t{60});
    const element_runs runs = random_runs(random, tensor);
    CAPTURE(runs.begin);
    CAPTURE(runs.run);
    CAPTURE(runs.stride);
    CAPTURE(runs.count);
    REQUIRE(runs.is_valid(tensor));
    CHECK_NOTHROW(runs.validate(tensor, "set"));
    const std::set<std::uint64_t> elements = elements_of(runs);
    REQUIRE(runs.elements() == elements.size());
    REQUIRE(runs.empty() == elements.empty());
    std::uint64_t position = 0;
    for (std::uint64_t e = 0; e <= tensor + 3; ++e) {
      REQUIRE(runs.contains(e) == elements.contains(e));
      if (!elements.contains(e)) continue;
      REQUIRE(runs.position_of(e) == position);
      REQUIRE(runs.element_at(position) == e);
      ++position;
    }
    if (runs.empty()) continue;
    CHECK(runs.end() == *elements.rbegin() + 1);
    for (std::uint64_t e = 0; e <= tensor; ++e) {
      std::uint64_t first = 0;
      while (first < runs.count && runs.begin + first * runs.stride + runs.run <= e)
        ++first;
      const std::uint64_t found = runs.first_run_after(e);
      REQUIRE((found < runs.count ? found : runs.count) == first);
    }
  }
}

TEST_CASE("rows, columns and boxes contain the elements whose row and column are within them") {
  for (const auto seed : seeds(300)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const tensor_shape shape = random_shape(random, 6);
    const index_range rows = random_range(random, shape.rows());
    const index_range columns = random_range(random, shape.columns());
    const auto within = [&](index_range r, index_range c) {
      std::set<std::uint64_t> all;
      for (std::uint64_t e = 0; e < shape.elements(); ++e) {
        const std::uint64_t row = e / shape.columns();
        const std::uint64_t column = e % shape.columns();
        if (row >= r.first && row - r.first < r.count && column >= c.first && column - c.first < c.count)
          all.insert(e);
      }
      return all;
    };
    const index_range all_rows{0, shape.rows()};
    const index_range all_columns{0, shape.columns()};
    for (const auto& [set, expected] :
         {std::pair(element_runs::box(shape, rows, columns), within(rows, columns)),
          std::pair(element_runs::rows(shape, rows), within(rows, all_columns)),
          std::pair(element_runs::columns(shape, columns), within(all_rows, columns)),
          std::pair(element_runs::all_of(shape.elements()), within(all_rows, all_columns))}) {
      REQUIRE(elements_of(set) == expected);
      REQUIRE(set.is_valid(shape.elements()));
    }
  }
}

TEST_CASE("equal sets of elements have one canonical form") {
  // Of all quadruples of small numbers, those that are valid are different sets.
  std::set<std::set<std::uint64_t>> seen;
  constexpr std::uint64_t tensor = 9;
  for (std::uint64_t code = 0; code < 11 * 11 * 11 * 11; ++code) {
    const element_runs runs{code % 11, code / 11 % 11, code / 121 % 11, code / 1331};
    if (!runs.is_valid(tensor)) {
      CHECK_THROWS_AS(runs.validate(tensor, "set"), error);
      continue;
    }
    const std::set<std::uint64_t> elements = elements_of(runs);
    REQUIRE(elements.size() == runs.elements());
    REQUIRE((elements.empty() || *elements.rbegin() < tensor));
    REQUIRE(seen.insert(elements).second);
  }
  CHECK(element_runs::columns(tensor_shape::matrix(3, 4), {0, 4}) == element_runs::all_of(12));
  CHECK(element_runs::columns(tensor_shape::matrix(1, 4), {1, 2}) == element_runs::flat_range(1, 2));
  CHECK(element_runs::flat_range(5, 0) == element_runs{});
}

TEST_CASE("the intersection of two sets has the common elements, in maximal ranges") {
  for (const auto seed : seeds(2000)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::uint64_t tensor = random.below(std::uint64_t{80});
    const element_runs a = random_runs(random, tensor);
    const element_runs b = random_runs(random, tensor);
    const std::set<std::uint64_t> of_b = elements_of(b);
    std::vector<index_range> expected;
    for (const std::uint64_t e : elements_of(a)) {
      if (!of_b.contains(e)) continue;
      if (!expected.empty() && expected.back().first + expected.back().count == e) {
        ++expected.back().count;
      } else {
        expected.push_back({e, 1});
      }
    }
    std::vector<index_range> found;
    intersect(a, b, [&](std::uint64_t first, std::uint64_t count) { found.push_back({first, count}); });
    REQUIRE(found == expected);
  }
}

TEST_CASE("an intersection skips any number of runs without common elements") {
  // 2^40 runs each; one at a time this would take hours.
  const std::uint64_t many = std::uint64_t{1} << 40;
  const element_runs everywhere{0, 1, 1000, many};
  const element_runs few{999'999, 2, many, 2};
  std::vector<index_range> found;
  const auto note = [&](std::uint64_t first, std::uint64_t count) { found.push_back({first, count}); };
  intersect(everywhere, few, note);
  CHECK(found == std::vector<index_range>{{1'000'000, 1}});
  found.clear();
  intersect(few, everywhere, note);
  CHECK(found == std::vector<index_range>{{1'000'000, 1}});

  // The largest tensor there is: its last element.
  found.clear();
  const element_runs ends{0, 1, max_bytes - 1, 2};
  REQUIRE(ends.is_valid(max_bytes));
  intersect(ends, element_runs::all_of(max_bytes), note);
  CHECK(found == std::vector<index_range>{{0, 1}, {max_bytes - 1, 1}});
}

TEST_CASE("four numbers that are not a set of the tensor's elements are refused with the reason") {
  constexpr std::uint64_t huge = std::numeric_limits<std::uint64_t>::max();
  const auto text = [](const char* numbers, const char* why) {
    return "m.json: tensor 'w': elements {" + std::string(numbers) + "}: " + why;
  };
  const char* const where = "m.json: tensor 'w'";
  const char* const passes = "they pass the end of the tensor, which has 20 elements";

  const auto refuses = [&]<class Error>(Error*, element_runs runs, const char* numbers, const char* why) {
    CHECK(!runs.is_valid(20));
    CHECK_THROWS_WITH_AS(runs.validate(20, where), text(numbers, why).c_str(), Error);
  };
  constexpr argument_error* form = nullptr;
  constexpr length_error* size = nullptr;
  refuses(form, {1, 0, 4, 2}, "begin 1, run 0, stride 4, count 2", "no elements are written as four zeros");
  refuses(form, {0, 3, 3, 0}, "begin 0, run 3, stride 3, count 0", "no elements are written as four zeros");
  refuses(form, {5, 0, 0, 0}, "begin 5, run 0, stride 0, count 0", "no elements are written as four zeros");
  refuses(form, {0, 3, 8, 1}, "begin 0, run 3, stride 8, count 1",
          "the stride of a single run must be its length");
  refuses(form, {0, 4, 3, 2}, "begin 0, run 4, stride 3, count 2",
          "runs overlap: the stride is less than the run");
  refuses(form, {0, 4, 0, 2}, "begin 0, run 4, stride 0, count 2",
          "runs overlap: the stride is less than the run");
  refuses(form, {0, 4, 4, 2}, "begin 0, run 4, stride 4, count 2", "runs that touch are written as one");
  refuses(size, {0, 21, 21, 1}, "begin 0, run 21, stride 21, count 1", passes);
  refuses(size, {18, 3, 3, 1}, "begin 18, run 3, stride 3, count 1", passes);
  refuses(size, {0, 3, 9, 3}, "begin 0, run 3, stride 9, count 3", passes);
  // Each of these is within the tensor when computed modulo 2^64.
  refuses(size, {huge, 2, 2, 1}, "begin 18446744073709551615, run 2, stride 2, count 1", passes);
  refuses(size, {0, 1, std::uint64_t{1} << 63, 3}, "begin 0, run 1, stride 9223372036854775808, count 3",
          passes);
  refuses(size, {0, 1, 2, (std::uint64_t{1} << 63) + 2},
          "begin 0, run 1, stride 2, count 9223372036854775810", passes);
  refuses(size, {1, huge, huge, 1}, "begin 1, run 18446744073709551615, stride 18446744073709551615, count 1",
          passes);
  CHECK_THROWS_WITH_AS(
      element_runs::all_of(huge).validate(huge, "w"),
      "w: elements {begin 0, run 18446744073709551615, stride 18446744073709551615, count 1}: a tensor of "
      "18446744073709551615 elements passes the limit of 2^63 - 1",
      length_error);
}

TEST_CASE("rows and columns outside a shape are refused with the shape's numbers") {
  const tensor_shape shape = tensor_shape::matrix(4, 6);
  CHECK_THROWS_WITH_AS(element_runs::rows(shape, {3, 2}),
                       "element_runs: 2 rows from 3 on, of a tensor that has 4", argument_error);
  CHECK_THROWS_WITH_AS(element_runs::columns(shape, {7, 0}),
                       "element_runs: 0 columns from 7 on, of a tensor that has 6", argument_error);
  CHECK_THROWS_AS(element_runs::box(shape, {0, 1}, {1, ~std::uint64_t{0}}), argument_error);
  CHECK_THROWS_WITH_AS(element_runs::flat_range(max_bytes, 1),
                       "element_runs: first element + elements: 9223372036854775807 + 1 exceeds the limit of "
                       "2^63 - 1 bytes; lower one of the two",
                       length_error);
}
