#include <llmmem/transfer/io_tuner.hpp>

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using llmmem_tests::random_numbers;
using llmmem_tests::seeds;

namespace {

/// A device that is fastest at one depth and block, and slower by a factor for each power of two beside it.
struct device {
  io_setting peak;
  double depth_loss = 0.85;
  double block_loss = 0.9;
  double noise = 0;
  random_numbers random{1};

  [[nodiscard]] double speed(const io_setting& s) const {
    const auto apart = [](auto a, auto b) {
      return std::abs(static_cast<int>(std::bit_width(a)) - static_cast<int>(std::bit_width(b)));
    };
    return 2.0 * std::pow(depth_loss, apart(s.depth, peak.depth)) *
           std::pow(block_loss, apart(s.block_bytes, peak.block_bytes));
  }
  /// Bytes that move in a millisecond, give or take.
  [[nodiscard]] std::uint64_t window(const io_setting& s) {
    const double off = noise * (static_cast<double>(random.below(2001U)) / 1000 - 1);
    return static_cast<std::uint64_t>(speed(s) * (1 + off) * 1e6);
  }
};

[[nodiscard]] io_setting any_setting(random_numbers& random) {
  return {1U << random.below(7U), std::uint64_t{1} << (16 + random.below(7U))};
}

}  // namespace

TEST_CASE("a tuner reaches the peak of any device that has one, from anywhere, within max_windows") {
  for (const auto seed : seeds(400)) {
    CAPTURE(seed);
    random_numbers random(seed);
    device d{
        .peak = any_setting(random), .noise = seed % 2 == 0 ? 0.012 : 0.0, .random = random_numbers(seed)};
    io_tuner tuner({.first = any_setting(random)});
    for (std::uint32_t i = 0; i < tuner.max_windows(); ++i)
      tuner.window(d.window(tuner.setting()), 1'000'000);
    CHECK(tuner.best() == d.peak);
  }
}

TEST_CASE(
    "on a flat device the tuner keeps its setting, and on a ridge it ends within a twentieth of the best") {
  for (const auto seed : seeds(200)) {
    CAPTURE(seed);
    random_numbers random(seed);
    device flat{.peak = any_setting(random), .depth_loss = 1, .block_loss = 1, .noise = 0.01};
    io_tuner still({.first = any_setting(random)});
    for (int i = 0; i < 2000; ++i)
      still.window(flat.window(still.setting()), 1'000'000);
    CHECK(still.moves() == 0);

    // Gains below the threshold stay where they are: it may end a step away from the best, not further down.
    device gentle{.peak = any_setting(random), .depth_loss = 0.96, .block_loss = 0.95, .noise = 0.003};
    io_tuner tuner({.first = any_setting(random)});
    for (std::uint32_t i = 0; i < tuner.max_windows(); ++i)
      tuner.window(gentle.window(tuner.setting()), 1'000'000);
    CHECK(gentle.speed(tuner.best()) >= 0.95 * gentle.speed(gentle.peak));
  }
}

TEST_CASE("on an unchanging device, also a noisy one, a tuner settles more and more") {
  for (const auto seed : seeds(40)) {
    CAPTURE(seed);
    random_numbers random(seed);
    device d{.peak = any_setting(random), .noise = 0.05, .random = random_numbers(seed)};
    io_tuner tuner({.first = any_setting(random)});
    for (std::uint32_t i = 0; i < tuner.max_windows(); ++i)
      tuner.window(d.window(tuner.setting()), 1'000'000);
    double moved = 0;
    constexpr int windows = 20'000;
    for (int i = 0; i < windows; ++i) {
      moved += d.speed(tuner.setting());
      tuner.window(d.window(tuner.setting()), 1'000'000);
    }
    CHECK(moved / windows >= 0.95 * d.speed(d.peak));
  }
}

TEST_CASE("a tuner notices a change of the device at once, and climbs again") {
  for (const auto seed : seeds(100)) {
    CAPTURE(seed);
    random_numbers random(seed);
    device d{.peak = {1, std::uint64_t{1} << 16}, .depth_loss = 0.7};
    io_tuner tuner({.first = {1, std::uint64_t{1} << 16}});
    for (int i = 0; i < 5000; ++i)
      tuner.window(d.window(tuner.setting()), 1'000'000);
    REQUIRE(tuner.best() == d.peak);
    d.peak = {64, std::uint64_t{1} << 22};
    for (std::uint32_t i = 0; i < tuner.max_windows() + 3; ++i)
      tuner.window(d.window(tuner.setting()), 1'000'000);
    CHECK(tuner.best() == d.peak);
  }
}

TEST_CASE("a tuner climbs on a device whose speed continually changes") {
  for (const auto seed : seeds(200)) {
    CAPTURE(seed);
    random_numbers random(seed);
    device d{.peak = any_setting(random), .depth_loss = 0.8, .block_loss = 0.8};
    io_tuner tuner({.first = any_setting(random)});
    const std::uint32_t period = 40 + static_cast<std::uint32_t>(random.below(160U));
    for (std::uint32_t i = 0; i < 2 * tuner.max_windows(); ++i) {
      // Down by a half, and up again: within a look it may be by more than a neighbour gains.
      const double phase = static_cast<double>(i % period) / period;
      const double factor = 0.5 + std::abs(phase - 0.5);
      tuner.window(static_cast<std::uint64_t>(static_cast<double>(d.window(tuner.setting())) * factor),
                   1'000'000);
    }
    CHECK(tuner.best() == d.peak);
  }
}

TEST_CASE("empty windows are ignored") {
  io_tuner tuner;
  for (int i = 0; i < 1000; ++i) {
    CHECK(tuner.window(0, 5) == io_setting{});
    CHECK(tuner.window(5, 0) == io_setting{});
  }
  CHECK_FALSE(tuner.is_at_rest());
}

TEST_CASE("options of a tuner that cannot work are refused") {
  CHECK_THROWS_WITH_AS(io_tuner({.first = {33, 1 << 20}}),
                       "io_tuner: depths and block sizes must be powers of two", argument_error);
  CHECK_THROWS_WITH_AS(io_tuner({.first = {128, 1 << 20}}),
                       "io_tuner: the first setting must be between the least and the most", argument_error);
  CHECK_THROWS_WITH_AS(io_tuner({.windows = 0}), "io_tuner: windows must be 1 to 15", argument_error);
  CHECK_THROWS_WITH_AS(io_tuner({.rest_windows = 100, .max_rest = 50}),
                       "io_tuner: rest_windows must be at least 1, and at most max_rest", argument_error);
  CHECK_THROWS_WITH_AS(io_tuner({.gain = 0}), "io_tuner: gain must be between 0 and 1", argument_error);
}
