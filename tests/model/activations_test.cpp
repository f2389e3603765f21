#include <llmmem/model/activations.hpp>

#include <doctest/doctest.h>

#include <cstdint>

using namespace llmmem;

namespace {

/// GPT-3 175B, as Korthikanti et al. 2022 measure it: 2048 tokens, eight tensor-parallel ranks.
constexpr model_shape gpt3{.name = "gpt3-175b",
                           .vocabulary = 51200,
                           .hidden = 12288,
                           .layers = 96,
                           .heads = 96,
                           .kv_heads = 96,
                           .head_width = 128,
                           .intermediate = 49152,
                           .context = 2048};

constexpr std::uint64_t mib(std::uint64_t tensor_parallel, sequence_parallel split, recompute again) {
  const std::uint64_t bytes = activation_bytes_per_layer(gpt3, {.sequence = 2048,
                                                                .batch = 1,
                                                                .tensor_parallel = tensor_parallel,
                                                                .split = split,
                                                                .recomputed = again});
  return bytes % (1024 * 1024) == 0 ? bytes / (1024 * 1024) : 0;
}

constexpr auto off = sequence_parallel::off;
constexpr auto on = sequence_parallel::on;

// Table 2 of the paper, in MiB a layer.
static_assert(mib(1, off, recompute::none) == 2736);
static_assert(mib(8, off, recompute::none) == 552);
static_assert(mib(8, on, recompute::none) == 342);
static_assert(mib(8, off, recompute::selective) == 312);
static_assert(mib(8, on, recompute::selective) == 102);
static_assert(mib(8, off, recompute::full) == 48);

}  // namespace

TEST_CASE("with one rank, a split of the sequence changes nothing") {
  for (const auto again : {recompute::none, recompute::selective, recompute::full}) {
    CHECK(mib(1, off, again) == mib(1, on, again));
  }
}

TEST_CASE("an uneven share is rounded up") {
  constexpr model_shape tiny{.name = "tiny", .vocabulary = 1, .hidden = 1, .layers = 1, .heads = 3};
  // 34 bytes over three ranks is 12, and 15 bytes of scores is 5.
  CHECK(activation_bytes_per_layer(tiny, {.sequence = 1, .tensor_parallel = 3, .split = on}) == 17);
  // 10 bytes whole, 24 over five ranks is 5, and 25 bytes of scores is 5.
  constexpr model_shape five{.name = "five", .vocabulary = 1, .hidden = 1, .layers = 1, .heads = 5};
  CHECK(activation_bytes_per_layer(five, {.sequence = 1, .tensor_parallel = 5}) == 20);
}

TEST_CASE("an impossible training step is refused with the reason") {
  const auto refused = [](const training_step& step, const char* text) {
    CHECK_THROWS_WITH_AS(static_cast<void>(activation_bytes_per_layer(gpt3, step)), text, argument_error);
  };
  refused({}, "activation bytes of gpt3-175b: sequence is 0 tokens");
  refused({.sequence = 1, .batch = 0}, "activation bytes of gpt3-175b: batch is 0 sequences");
  refused({.sequence = 1, .tensor_parallel = 0},
          "activation bytes of gpt3-175b: tensor_parallel is 0 ranks; 1 means no split");
  refused({.sequence = 1, .tensor_parallel = 7},
          "activation bytes of gpt3-175b: tensor_parallel 7 does not divide 96 heads");
}

TEST_CASE("a sequence whose scores exceed 2^63 - 1 bytes is refused, not wrapped") {
  CHECK_THROWS_WITH_AS(
      static_cast<void>(activation_bytes_per_layer(gpt3, {.sequence = std::uint64_t{1} << 33})),
      "activation bytes: 8589934592 x 8589934592 exceeds the limit of 2^63 - 1 bytes; lower one of the two",
      length_error);
}
