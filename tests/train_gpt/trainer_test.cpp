#include "train_gpt/trainer.hpp"

#include <llmmem/space/host.hpp>
#include <llmmem/training/memory_chunks.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "support/seeds.hpp"
#include "support/tiny_gpt.hpp"
#include "train_gpt/activation_codec.hpp"
#include "train_gpt/any_stores.hpp"
#include "train_gpt/chunk_store.hpp"
#include "train_gpt/recomputation.hpp"

using namespace train_gpt;
using llmmem_tests::tiny_shape;
using llmmem_tests::tiny_text;
using llmmem_tests::tiny_training;

TEST_CASE("the figures are the same for every compiler, at every optimisation") {
  // Additions, multiplications, divisions and square roots alone, in a fixed order: IEEE 754 leaves no
  // choice.
  tiny_training<float> tiny;
  const double first = tiny.trainer.step(tiny.text.batch(tiny_shape, 1, 0), 0);
  for (std::uint64_t step = 1; step < 4; ++step)
    tiny.trainer.step(tiny.text.batch(tiny_shape, 1, step), step);
  CHECK(first == 0x1.6662e78117e9ep+2);
  CHECK(tiny.trainer.digest() == 0x7007'965c'6bbc'5066U);
}

TEST_CASE("a model learns within twelve steps, for any seed") {
  const gpt_shape shape{.blocks = 2, .width = 64, .heads = 4, .context = 32, .batch = 4};
  for (const auto seed : llmmem_tests::seeds(3)) {
    CAPTURE(seed);
    tiny_training<float> tiny(shape);
    tiny.trainer.initialise(seed);
    const token_batch unseen = tiny.text.batch(shape, seed, 1000);
    const double before = tiny.trainer.evaluate(unseen);
    for (std::uint64_t step = 0; step < 12; ++step)
      tiny.trainer.step(tiny.text.batch(shape, seed, step), step);
    CHECK(before > 5.3);  // ln 256 is 5.55: every byte alike
    CHECK(tiny.trainer.evaluate(unseen) < before - 1);
  }
}

TEST_CASE("an evaluation changes nothing") {
  tiny_training<float> tiny;
  const token_batch batch = tiny.text.batch(tiny_shape, 1, 0);
  const std::uint64_t before = tiny.trainer.digest();
  const double loss = tiny.trainer.evaluate(batch);
  CHECK(tiny.trainer.evaluate(batch) == loss);
  CHECK(tiny.trainer.digest() == before);
}

TEST_CASE("Adam's first step moves every weight with a gradient by the rate") {
  tiny_training<double> tiny;
  const token_batch batch = tiny.text.batch(tiny_shape, 1, 0);
  tiny.trainer.forward_backward(batch);
  const layer_id head = tiny_shape.head();
  const auto weights = tiny.state.acquire(head, state_kind::weights, lease_mode::read);
  const auto gradients = tiny.state.acquire(head, state_kind::gradients, lease_mode::read);
  const std::vector<double> before(weights.begin(), weights.end());
  tiny.trainer.update(0);
  for (std::size_t k = 0; k < weights.size(); ++k) {
    const double g = gradients[k];
    REQUIRE(weights[k] - before[k] == doctest::Approx(-1e-3 * g / (std::abs(g) + 1e-8)));
  }
}

TEST_CASE("activations of fewer bits give gradients of a larger error, whose mean over versions shrinks") {
  tiny_training<float> tiny;
  const token_batch batch = tiny.text.batch(tiny_shape, 1, 0);
  const auto gradients = [&] {
    std::vector<double> all;
    for (std::size_t i = 0; i < tiny_shape.layers(); ++i) {
      const auto of = tiny.state.acquire(tiny_shape.layer(i), state_kind::gradients, lease_mode::read);
      all.insert(all.end(), of.begin(), of.end());
    }
    return all;
  };
  const double loss = tiny.trainer.forward_backward(batch);
  const std::vector<double> exact = gradients();
  const auto error = [&](const std::vector<double>& sum, double count) {
    double squares = 0;
    double all = 0;
    for (std::size_t k = 0; k < exact.size(); ++k) {
      squares += (sum[k] / count - exact[k]) * (sum[k] / count - exact[k]);
      all += exact[k] * exact[k];
    }
    return std::sqrt(squares / all);
  };
  double before = 0;
  for (const std::uint32_t bits : {8U, 4U, 2U}) {
    llmmem::memory_chunks<llmmem::host_space> chunks(tiny.host);
    erased_chunks<llmmem::memory_chunks<llmmem::host_space>> store(chunks);
    recorded_activations<float> encoded(store, plan_records(tiny_shape, {}, bits).forms,
                                        activation_codec(bits));
    erased_activations kept(encoded);
    trainer<host_state<float, llmmem::host_space>, any_activations<float>, llmmem::host_space> by(
        tiny.model, tiny.team, tiny.state, kept);
    constexpr std::uint64_t versions = 16;
    std::vector<double> sum(exact.size());
    double one = 0;
    for (std::uint64_t version = 0; version < versions; ++version) {
      kept.begin_step(version);
      REQUIRE(by.forward_backward(batch) == loss);  // the forward pass uses what it has just computed
      const std::vector<double> now = gradients();
      if (version == 0) one = error(now, 1);
      for (std::size_t k = 0; k < sum.size(); ++k)
        sum[k] += now[k];
    }
    const double of_mean = error(sum, versions);
    MESSAGE(bits << " bits: relative error " << one << ", of the mean of " << versions << " " << of_mean);
    CHECK(one > 4 * before);
    CHECK(one < (bits == 8 ? 0.02 : bits == 4 ? 0.4 : 4));
    CHECK(of_mean < one / 2);  // a quarter, if the rounding has no bias
    before = one;
  }
}

TEST_CASE("a digest changes with any bit of any weight") {
  tiny_training<float> tiny;
  const std::uint64_t before = tiny.trainer.digest();
  for (std::size_t i = 0; i < tiny_shape.layers(); ++i) {
    const auto weights = tiny.state.acquire(tiny_shape.layer(i), state_kind::weights, lease_mode::read_write);
    for (const std::size_t k : {std::size_t{0}, weights.size() - 1}) {
      const float here = weights[k];
      weights[k] = -here;  // the sign alone: of zeros, too
      CHECK(tiny.trainer.digest() != before);
      weights[k] = here;
    }
  }
  CHECK(tiny.trainer.digest() == before);
}

TEST_CASE("a batch depends only on the seed and the step, and its targets are the next tokens") {
  const std::string text = tiny_text(500);
  const corpus from("tiny", text, tiny_shape);
  for (std::uint64_t step = 0; step < 50; ++step) {
    const token_batch batch = from.batch(tiny_shape, 3, step);
    REQUIRE(batch.tokens.size() == tiny_shape.tokens());
    for (std::size_t sequence = 0; sequence < tiny_shape.batch; ++sequence) {
      const std::size_t at = sequence * tiny_shape.context;
      std::string both(batch.tokens.begin() + static_cast<std::ptrdiff_t>(at),
                       batch.tokens.begin() + static_cast<std::ptrdiff_t>(at + tiny_shape.context));
      both += static_cast<char>(batch.targets[at + tiny_shape.context - 1]);
      CHECK(text.find(both) != text.npos);
      CHECK(std::equal(batch.tokens.begin() + static_cast<std::ptrdiff_t>(at + 1),
                       batch.tokens.begin() + static_cast<std::ptrdiff_t>(at + tiny_shape.context),
                       batch.targets.begin() + static_cast<std::ptrdiff_t>(at)));
    }
    CHECK(from.batch(tiny_shape, 3, step).tokens == batch.tokens);
    CHECK(from.batch(tiny_shape, 3, step + 1).tokens != batch.tokens);
    CHECK(from.batch(tiny_shape, 4, step).tokens != batch.tokens);
  }
}

TEST_CASE("a text that is just long enough is accepted, a shorter one refused") {
  const gpt_shape shape{.context = 128};
  const corpus just("a.txt", tiny_text(129), shape);
  CHECK(just.batch(shape, 1, 0).targets.size() == shape.tokens());
  CHECK_THROWS_WITH_AS(
      corpus("a.txt", tiny_text(128), shape),
      "a.txt: has 128 bytes; sequences of 128 tokens need at least 129: take a longer text, or "
      "a context of fewer tokens",
      llmmem::argument_error);
}
