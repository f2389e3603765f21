#include <llmmem/transfer/copy_plan.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

namespace {

using namespace llmmem;

constexpr copy_ways_open all_open{.batch = true, .strided = true, .kernel = true};

/// A device on which calls cost 2 us each, and kernels 10 us at first and a tenth of the bandwidth more.
std::optional<double> modelled(copy_way way, const copy_shape& shape) {
  const auto bytes = static_cast<double>(shape.bytes * shape.count);
  const auto count = static_cast<double>(shape.count);
  const double wire = bytes / 50;  // ns at 50 GB/s
  switch (way) {
    case copy_way::loop:
      return 2000 * count + wire;
    case copy_way::batch:
      return 4000 + 300 * count + wire;
    case copy_way::kernel:
      return 10'000 + wire * 1.1;
    default:
      return std::nullopt;
  }
}

copy_plan modelled_plan() {
  return copy_plan::measured({}, modelled);
}

}  // namespace

TEST_SUITE("copy_plan") {
  TEST_CASE("the plan chooses the fastest of the open paths by its measurements") {
    const copy_plan plan = modelled_plan();
    const auto choice = [&](std::uint64_t bytes, std::uint64_t count, const copy_ways_open& open) {
      return plan.choose({copy_direction::up, bytes, count}, open);
    };
    CHECK(choice(65536, 1, all_open) == copy_way::loop);
    CHECK(choice(65536, 8, all_open) == copy_way::batch);
    CHECK(choice(4096, 4096, all_open) == copy_way::kernel);
    CHECK(choice(4096, 4096, {.batch = true}) == copy_way::batch);
    CHECK(choice(4096, 4096, {}) == copy_way::loop);
    // Large pieces: the wire is what counts, and it is the slower by the kernel.
    CHECK(choice(4 << 20, 8, all_open) == copy_way::batch);
  }

  TEST_CASE(
      "if a device cannot access the host's addresses, paths that need them are neither measured nor taken") {
    const copy_plan plan =
        copy_plan::measured({}, [](copy_way way, const copy_shape& shape) -> std::optional<double> {
          if (follows_host_addresses(way, shape.direction)) return std::nullopt;
          return way == copy_way::loop ? 1e6 : 1.0;
        });
    for (const copy_direction direction : {copy_direction::up, copy_direction::down}) {
      for (const std::uint64_t count : {1U, 40U, 4000U}) {
        const copy_shape shape{direction, 4096, count};
        CHECK(plan.choose(shape, {.batch = true, .kernel = true}) == copy_way::loop);
        CHECK(plan.choose(shape, all_open) == copy_way::strided);
      }
    }
    CHECK(plan.choose({copy_direction::within, 4096, 40}, {.batch = true}) == copy_way::batch);
    CHECK(plan.choose({copy_direction::within, 4096, 40}, {.kernel = true}) == copy_way::kernel);
  }

  TEST_CASE("times are interpolated between measurements, grow above them, and stay constant below") {
    const auto shares = [](copy_way, const copy_shape& shape) -> std::optional<double> {
      const auto bytes = static_cast<double>(shape.bytes);
      const auto count = static_cast<double>(shape.count);
      return 100 + bytes + 7 * count + bytes * count;
    };
    copy_grid grid;
    grid.bytes = {1024, 16384, 262144};
    grid.counts = {1, 16, 256};
    const copy_plan plan = copy_plan::measured(grid, shares);
    const auto ns = [&](std::uint64_t bytes, std::uint64_t count) {
      return plan.nanoseconds(copy_way::batch, {copy_direction::down, bytes, count}).value();
    };
    const auto share = [&](std::uint64_t bytes, std::uint64_t count) {
      return doctest::Approx(*shares(copy_way::batch, {copy_direction::down, bytes, count}));
    };
    for (const std::uint64_t bytes : {1024ULL, 1025ULL, 4096ULL, 16384ULL, 100'000ULL, 262'144ULL}) {
      for (const std::uint64_t count : {1ULL, 2ULL, 16ULL, 17ULL, 200ULL, 256ULL})
        CHECK(ns(bytes, count) == share(bytes, count));
    }
    CHECK(ns(1, 1) == share(1024, 1));
    CHECK(ns(1 << 20, 1) == doctest::Approx(4 * ns(262'144, 1)));
    CHECK(ns(1024, 512) == doctest::Approx(2 * ns(1024, 256)));
    CHECK(ns(1 << 20, 512) == doctest::Approx(8 * ns(262'144, 256)));
    CHECK_FALSE(plan.nanoseconds(copy_way::batch, {copy_direction::down, 1024, 0}));
  }

  TEST_CASE("points that are too large are not measured, and a near one represents them") {
    copy_grid grid;
    grid.most_bytes = 1 << 20;
    std::uint64_t most = 0;
    const copy_plan plan = copy_plan::measured(grid, [&](copy_way way, const copy_shape& shape) {
      most = std::max(most, shape.bytes * shape.count);
      return modelled(way, shape);
    });
    CHECK(most == 1 << 20);
    CHECK(plan.nanoseconds(copy_way::loop, {copy_direction::up, 65536, 20}).has_value());
    const auto ns = [&](std::uint64_t bytes, std::uint64_t count) {
      return plan.nanoseconds(copy_way::loop, {copy_direction::up, bytes, count}).value();
    };
    // 65536 bytes were measured eight times, and not 64 times: eight times what they took.
    CHECK(ns(65536, 64) == doctest::Approx(8 * ns(65536, 8)));
    CHECK(ns(1 << 20, 4096) == doctest::Approx(4096 * ns(1 << 20, 1)));
    CHECK(ns(4 << 20, 1) == doctest::Approx(4 * ns(1 << 20, 1)));
    CHECK_FALSE(plan.nanoseconds(copy_way::strided, {copy_direction::up, 4096, 1}).has_value());
  }

  TEST_CASE("without measurements the plan chooses by the built-in figures") {
    const copy_plan plan;
    CHECK_FALSE(plan.is_measured());
    const auto choice = [&](std::uint64_t bytes, std::uint64_t count, const copy_ways_open& open) {
      return plan.choose({copy_direction::up, bytes, count}, open);
    };
    CHECK(choice(4096, 1, all_open) == copy_way::loop);
    CHECK(choice(4096, 100, all_open) == copy_way::strided);
    CHECK(choice(4096, 100, {.batch = true, .kernel = true}) == copy_way::kernel);
    CHECK(choice(4096, 16, {.batch = true, .kernel = true}) == copy_way::batch);
    CHECK(choice(32768, 100, {.batch = true, .kernel = true}) == copy_way::batch);
    CHECK(choice(32768, 100, {.kernel = true}) == copy_way::loop);
  }

  TEST_CASE("a plan survives a round trip through its text") {
    const copy_plan plan = modelled_plan();
    const std::string text = plan.text();
    const copy_plan again = copy_plan::parsed(text);
    CHECK(again.text() == text);
    CHECK(again.grid().bytes == plan.grid().bytes);
    for (const std::uint64_t bytes : {5000ULL, 100'000ULL, 3'000'000ULL}) {
      for (const std::uint64_t count : {1ULL, 20ULL, 700ULL}) {
        const copy_shape shape{copy_direction::within, bytes, count};
        CHECK(again.choose(shape, all_open) == plan.choose(shape, all_open));
      }
    }
    CHECK_FALSE(copy_plan::parsed(copy_plan{}.text()).is_measured());
  }

  TEST_CASE("a text that is not a plan is refused with its line") {
    const std::string title = "llmmem copy plan 1\n";
    CHECK_THROWS_WITH_AS(copy_plan::parsed(""), "copy_plan: no text; measure the plan again", format_error);
    CHECK_THROWS_WITH_AS(
        copy_plan::parsed("llmmem copy plan 2\n"),
        "copy_plan: line 1: 'llmmem copy plan 2' is not 'llmmem copy plan 1'; measure the plan again",
        format_error);
    for (const char* line :
         {"fly up 4096 1 5", "loop off 4096 1 5", "loop up 4096 1", "loop up 4096 1 5 6", "loop up 0 1 5",
          "loop up 4096 0 5", "loop up 4096 1 0", "loop up -1 1 5", "loop up 4096 1 5x", " loop up 4096 1 5",
          "loop  up 4096 1 5", "loop up 99999999999999999999 1 5"}) {
      CAPTURE(line);
      CHECK_THROWS_AS(copy_plan::parsed(title + line), format_error);
    }
    CHECK_THROWS_WITH_AS(copy_plan::parsed(title + "\n# so\nloop up 1 x 5"),
                         "copy_plan: line 4: 'loop up 1 x 5' is not a way, a direction, bytes, a count and "
                         "nanoseconds; measure the plan again",
                         format_error);
    const auto lines = [&](int count) {
      std::string long_text = title;
      for (int i = 1; i <= count; ++i)
        long_text += "loop up " + std::to_string(i) + " " + std::to_string(i) + " 5\n";
      return long_text;
    };
    CHECK(copy_plan::parsed(lines(64)).is_measured());
    CHECK_THROWS_WITH_AS(copy_plan::parsed(lines(65)),
                         "copy_plan: the text has more than 4096 points; measure the plan again",
                         format_error);
    std::string repeated = title;
    for (int i = 0; i <= 12 * 4096; ++i)
      repeated += "loop up 1 1 5\n";
    CHECK_THROWS_AS(copy_plan::parsed(repeated), format_error);
  }

  TEST_CASE("a grid without ascending sizes is refused") {
    for (const auto& bytes : {std::vector<std::uint64_t>{}, {0, 1}, {2, 2}, {3, 1}}) {
      copy_grid grid;
      grid.bytes = bytes;
      CHECK_THROWS_WITH_AS(
          copy_plan::measured(grid, modelled),
          "copy_plan: the grid's bytes must be at least one number above 0, each larger than the "
          "one before",
          argument_error);
    }
    copy_grid grid;
    grid.counts = {};
    CHECK_THROWS_AS(copy_plan::measured(grid, modelled), argument_error);
    grid.counts.resize(4096 / grid.bytes.size() + 1);
    std::iota(grid.counts.begin(), grid.counts.end(), 1);
    CHECK_THROWS_WITH_AS(copy_plan::measured(grid, modelled), "copy_plan: the grid has more than 4096 points",
                         argument_error);
    grid.counts.pop_back();
    const copy_plan plan = copy_plan::measured(grid, modelled);
    CHECK(copy_plan::parsed(plan.text()).text() == plan.text());
    const auto endless = [](copy_way, const copy_shape&) { return std::optional(1e16); };
    CHECK_FALSE(copy_plan::measured({}, endless).nanoseconds(copy_way::loop, {copy_direction::up, 4096, 1}));
  }
}
