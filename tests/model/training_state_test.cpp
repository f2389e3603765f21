#include <llmmem/model/presets.hpp>
#include <llmmem/model/training_state.hpp>

#include <doctest/doctest.h>

#include <cstdint>

using namespace llmmem;

namespace {

/// One line of ZeRO's Table 1: gigabytes a device, in hundredths, and the step that the print rounds to.
struct row {
  std::uint64_t parameters;
  std::uint64_t ranks;
  std::uint64_t stage1, stage2, stage3;
  std::uint64_t step;
};

constexpr std::uint64_t billion = 1'000'000'000;

constexpr row table1[] = {
    {7'500'000'000, 1, 12000, 12000, 12000, 1},        {7'500'000'000, 4, 5250, 4130, 3000, 10},
    {7'500'000'000, 16, 3560, 2160, 750, 10},          {7'500'000'000, 64, 3140, 1660, 188, 10},
    {7'500'000'000, 256, 3040, 1540, 47, 10},          {7'500'000'000, 1024, 3010, 1510, 12, 10},
    {128 * billion, 1, 204800, 204800, 204800, 1},     {128 * billion, 4, 89600, 70400, 51200, 100},
    {128 * billion, 16, 60800, 36800, 12800, 100},     {128 * billion, 64, 53600, 28400, 3200, 100},
    {128 * billion, 256, 51800, 26300, 800, 100},      {128 * billion, 1024, 51300, 25700, 200, 100},
    {1000 * billion, 1, 1600000, 1600000, 1600000, 1}, {1000 * billion, 4, 700000, 550000, 400000, 100},
    {1000 * billion, 16, 475000, 287500, 100000, 100}, {1000 * billion, 64, 418700, 221800, 25000, 100},
    {1000 * billion, 256, 404600, 205400, 6250, 100},  {1000 * billion, 1024, 401100, 201300, 1560, 100},
};

/// The paper rounds some cells and cuts others: within one step of the last digit it prints.
constexpr bool prints_as(std::uint64_t bytes, std::uint64_t hundredths, std::uint64_t step) {
  const std::uint64_t printed = hundredths * (billion / 100);
  const std::uint64_t apart = bytes > printed ? bytes - printed : printed - bytes;
  return apart < step * (billion / 100);
}

constexpr bool table1_holds() {
  for (const row& r : table1) {
    const auto bytes = [&](zero_stage stage) { return training_state(r.parameters, stage, r.ranks).total(); };
    if (!prints_as(bytes(zero_stage::optimizer), r.stage1, r.step)) return false;
    if (!prints_as(bytes(zero_stage::gradients), r.stage2, r.step)) return false;
    if (!prints_as(bytes(zero_stage::weights), r.stage3, r.step)) return false;
    if (bytes(zero_stage::none) != 16 * r.parameters) return false;
  }
  return true;
}

static_assert(table1_holds());

// Figure 1 of the paper: 7.5 B parameters over 64 ranks.
static_assert(training_state(7'500'000'000, zero_stage::optimizer, 64).total() == 31'406'250'000);
static_assert(training_state(7'500'000'000, zero_stage::gradients, 64).total() == 16'640'625'000);
static_assert(training_state(7'500'000'000, zero_stage::weights, 64).total() == 1'875'000'000);

// Mixed-precision Adam keeps 2 + 2 + 12 bytes for each parameter of GPT-2.
static_assert(training_state(models::gpt2_124m.parameters()) ==
              training_bytes{.weights = 248'879'616, .gradients = 248'879'616, .optimizer = 1'493'277'696});
static_assert(training_state(models::gpt2_124m.parameters()).total() == 1'991'036'928);

}  // namespace

TEST_CASE("a share is rounded up to whole parameters") {
  CHECK(training_state(10, zero_stage::weights, 4).total() == 3 * 16);
  CHECK(training_state(10, zero_stage::weights, 100).total() == 16);
  CHECK(training_state(0).total() == 0);
}

TEST_CASE("zero ranks and too many bytes are refused") {
  CHECK_THROWS_WITH_AS(static_cast<void>(training_state(1, zero_stage::none, 0)),
                       "training_state: 0 ranks; 1 means no split", argument_error);
  CHECK_THROWS_WITH_AS(
      static_cast<void>(training_state(max_bytes)),
      "training_state: parameters x bytes per parameter: 9223372036854775807 x 2 exceeds the "
      "limit of 2^63 - 1 bytes; lower one of the two",
      length_error);
  CHECK_THROWS_WITH_AS(static_cast<void>(training_state(max_bytes / 12).total()),
                       "training state: 3074457345618258600 + 9223372036854775800 exceeds the limit of 2^63 "
                       "- 1 bytes; lower one of the two",
                       length_error);
}
