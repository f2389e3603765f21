/// The two seams: the trainer keeps their contract, and what may stand behind them leaves the bits alone.
#include "train_gpt/stores.hpp"

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/checking_stores.hpp"
#include "support/tiny_gpt.hpp"
#include "train_gpt/trainer.hpp"

using namespace train_gpt;
using namespace llmmem_tests;

namespace {

constexpr std::uint64_t steps = 3;

/// What a run came to, whatever its stores.
struct trained {
  std::vector<double> losses;
  std::uint64_t digest = 0;

  friend bool operator==(const trained&, const trained&) = default;
};

template <class Trainer>
trained train(Trainer& trainer, const corpus& text) {
  trained result;
  for (std::uint64_t step = 0; step < steps; ++step)
    result.losses.push_back(trainer.step(text.batch(tiny_shape, 1, step), step));
  result.losses.push_back(trainer.evaluate(text.batch(tiny_shape, 1, steps)));
  result.digest = trainer.digest();
  return result;
}

const trained& in_host_memory() {
  static const trained result = [] {
    tiny_training<float> tiny;
    return train(tiny.trainer, tiny.text);
  }();
  return result;
}

/// A trainer over checking stores.
struct checked_training : tiny_gpt<float> {
  explicit checked_training(kept_part part = kept_part::whole, update_time when = update_time::after_backward)
      : activations(shape, log, part), trainer(model, team, state, activations, {}, when) {}

  store_log log;
  checking_state<float> state{shape, log};
  checking_activations<float> activations;
  train_gpt::trainer<checking_state<float>, checking_activations<float>, space> trainer;

  /// Nothing found, nothing leased, nobody touched memory of a lease that had ended.
  [[nodiscard]] bool clean() {
    for (const std::string& finding : log.findings)
      MESSAGE(finding);
    return log.findings.empty() && log.leases == 0 && log.leased_bytes == 0 && state.rests() &&
           activations.rests();
  }
};

}  // namespace

TEST_CASE("the trainer accesses memory only under leases, and moving the memory changes no bit") {
  checked_training checked;
  checked.trainer.initialise(1);
  CHECK(train(checked.trainer, checked.text) == in_host_memory());
  CHECK(checked.clean());
  CHECK(checked.activations.records() == 0);
  CHECK(checked.state.steps() == steps);
}

TEST_CASE("activations recomputed from a layer's input have the same bits") {
  checked_training checked(kept_part::input);
  checked.trainer.initialise(1);
  CHECK(train(checked.trainer, checked.text) == in_host_memory());
  CHECK(checked.clean());
}

TEST_CASE("layers updated in the backward pass get the same bits, recomputed or not") {
  for (const kept_part part : {kept_part::whole, kept_part::input}) {
    checked_training checked(part, update_time::in_backward);
    checked.trainer.initialise(1);
    CHECK(train(checked.trainer, checked.text) == in_host_memory());
    CHECK(checked.clean());
  }
}

TEST_CASE("every step makes the calls of the schedule, in its order") {
  for (const std::size_t blocks : {1U, 2U, 5U, 6U}) {
    CAPTURE(blocks);
    const update_time when = blocks % 2 == 0 ? update_time::in_backward : update_time::after_backward;
    gpt_shape shape = tiny_shape;
    shape.blocks = blocks;
    if (blocks > 2)
      shape.optimizer = blocks == 5 ? llmmem::optimizer_form::adafactor : llmmem::optimizer_form::muon;
    if (blocks <= 2) shape.tiles = static_cast<std::uint32_t>(3 * (blocks - 1));
    tiny_gpt<float> tiny(shape);
    store_log log;
    checking_state<float> state(shape, log);
    checking_activations<float> activations(shape, log);
    trainer<checking_state<float>, checking_activations<float>, llmmem::host_space> training(
        tiny.model, tiny.team, state, activations, {}, when);
    training.initialise(1);
    for (std::uint64_t step = 0; step < 2; ++step) {
      log.events.clear();
      training.step(tiny.text.batch(shape, 1, step), step);
      CHECK(log.events == step_schedule(shape, when));
      CHECK(log.findings.empty());
    }
  }
}

TEST_CASE("at most one layer's state, or its activations, weights and gradients, are leased at once") {
  checked_training checked;
  checked.trainer.initialise(1);
  checked.trainer.step(checked.text.batch(tiny_shape, 1, 0), 0);
  std::size_t most = 0;
  for (std::size_t i = 0; i < tiny_shape.layers(); ++i) {
    const std::size_t parameters = parameter_layout(tiny_shape, tiny_shape.layer(i)).elements;
    const std::size_t record = activation_layout(tiny_shape, tiny_shape.layer(i)).elements;
    most = std::max({most, 4 * parameters, 2 * parameters + record});
  }
  CHECK(checked.log.max_leased_bytes == most * sizeof(float));
  CHECK(most_leased_elements(tiny_shape) == most);
}

TEST_CASE("if a store refuses any lease, all others are returned, and the trainer can continue") {
  std::size_t calls = 0;
  {
    checked_training checked;
    checked.trainer.initialise(1);
    checked.log.acquisitions = 0;
    checked.trainer.step(checked.text.batch(tiny_shape, 1, 0), 0);
    calls = checked.log.acquisitions;
  }
  CHECK(calls > 20);
  for (const kept_part part : {kept_part::whole, kept_part::input}) {
    for (std::size_t at = 1; at <= calls; ++at) {
      CAPTURE(at);
      checked_training checked(part);
      checked.trainer.initialise(1);
      const token_batch batch = checked.text.batch(tiny_shape, 1, 0);
      checked.log.acquisitions = 0;
      checked.log.fail_at = at;
      REQUIRE_THROWS_WITH_AS(checked.trainer.step(batch, 0), "the store has failed", std::runtime_error);
      REQUIRE(checked.clean());
    }
  }
}

TEST_CASE("checking stores detect breaches of the contract") {
  const layer_id layer = tiny_shape.layer(1);
  const auto found = [&](auto&& misuse) {
    checked_training checked;
    checked.trainer.initialise(1);
    misuse(checked);
    std::string all;
    for (const std::string& finding : checked.log.findings)
      all += finding + '\n';
    if (!checked.state.rests()) all += "touched after its release\n";
    return all;
  };
  CHECK(found([&](checked_training& checked) {
          const state_lease<checking_state<float>, lease_mode::write> lease(checked.state, layer,
                                                                            state_kind::gradients);
          lease.values()[0] = 1;
        }) == "layer 1: gradients not written whole\n");
  CHECK(found([&](checked_training& checked) {
          const auto values = checked.state.acquire(layer, state_kind::weights, lease_mode::read);
          values[3] += 1;
          checked.state.release(layer, state_kind::weights, lease_mode::read);
        }) == "layer 1: weights changed under a lease to read\n");
  CHECK(found([&](checked_training& checked) {
          const auto values = checked.state.acquire(layer, state_kind::mean, lease_mode::read_write);
          checked.state.release(layer, state_kind::mean, lease_mode::read_write);
          values[3] = 0;
        }) == "touched after its release\n");
  CHECK(found([&](checked_training& checked) {
          static_cast<void>(checked.state.acquire(layer, state_kind::gradients, lease_mode::read));
          checked.state.release(layer, state_kind::gradients, lease_mode::read);
        }) == "layer 1: gradients read, never written\n");
  CHECK(found([&](checked_training& checked) {
          const auto values = checked.activations.save(layer);
          std::fill(values.begin() + 1, values.end(), 0.0F);
          checked.activations.keep(layer);
        }) == "layer 1: activations not written whole\n");
}

TEST_CASE("NaN in any parameter or activation of a layer reaches the loss or the gradients") {
  // What makes poison show: nothing that is read is without effect.
  for (std::size_t i = 0; i < tiny_shape.layers(); ++i) {
    tiny_training<float> tiny;
    const token_batch batch = tiny.text.batch(tiny_shape, 1, 0);
    for (const tensor_place& tensor : tiny.model.parameters(tiny_shape.layer(i)).tensors) {
      CAPTURE(tensor.name);
      const auto weights =
          tiny.state.acquire(tiny_shape.layer(i), state_kind::weights, lease_mode::read_write);
      const std::size_t k =
          tensor.offset + (i == 0 && tensor.offset == 0 ? batch.tokens[0] * tensor.columns : 0);
      const float here = std::exchange(weights[k], poison<float>());
      CHECK(std::isnan(tiny.trainer.evaluate(batch)));
      weights[k] = here;
    }
    CHECK(!std::isnan(tiny.trainer.evaluate(batch)));
  }
}

namespace {

/// One rank of two that share every layer's state by halves: a sharded store at its simplest, whose ranks
/// take turns on one thread. Weights are gathered by lying in one place; gradients are the ranks' own, equal
/// when their batches are.
class half_state {
 public:
  using value_type = float;

  half_state(const gpt_shape& shape, std::size_t rank, std::vector<std::vector<float>>& weights)
      : rank_(rank), weights_(&weights) {
    for (std::size_t i = 0; i < shape.layers(); ++i) {
      const std::size_t elements = parameter_layout(shape, shape.layer(i)).elements;
      weights[i].resize(elements);
      gradients_.emplace_back(elements);
      for (auto& moment : moments_)
        moment.emplace_back(owned(shape.layer(i)).count);
    }
  }

  [[nodiscard]] std::span<float> acquire(layer_id layer, state_kind kind, lease_mode mode) noexcept {
    const std::size_t i = to_index(layer);
    const element_range mine = owned(layer);
    if (kind == state_kind::mean) return moments_[0][i];
    if (kind == state_kind::variance) return moments_[1][i];
    const bool computes = mode == (kind == state_kind::weights ? lease_mode::read : lease_mode::write);
    const std::span<float> all = kind == state_kind::weights ? (*weights_)[i] : gradients_[i];
    return computes ? all : all.subspan(mine.first, mine.count);
  }
  void release(layer_id, state_kind, lease_mode) noexcept {}
  [[nodiscard]] element_range owned(layer_id layer) const noexcept {
    const std::size_t elements = (*weights_)[to_index(layer)].size();
    const std::size_t half = elements / 2;
    return rank_ == 0 ? element_range{0, half} : element_range{half, elements - half};
  }

 private:
  std::size_t rank_;
  std::vector<std::vector<float>>* weights_;
  std::vector<std::vector<float>> gradients_;
  std::array<std::vector<std::vector<float>>, 2> moments_;
};

static_assert(state_store<half_state>);

}  // namespace

TEST_CASE("two ranks that each own half of every layer train as one") {
  tiny_gpt<float> tiny;
  std::vector<std::vector<float>> weights(tiny_shape.layers());
  std::array<half_state, 2> ranks{half_state(tiny_shape, 0, weights), half_state(tiny_shape, 1, weights)};
  host_activations<float, llmmem::host_space> activations(tiny.host, tiny_shape);
  using rank_trainer = trainer<half_state, host_activations<float, llmmem::host_space>, llmmem::host_space>;
  std::array<rank_trainer, 2> trainers{rank_trainer(tiny.model, tiny.team, ranks[0], activations),
                                       rank_trainer(tiny.model, tiny.team, ranks[1], activations)};
  for (auto& each : trainers)
    each.initialise(1);
  for (std::uint64_t step = 0; step < steps; ++step) {
    for (auto& each : trainers)
      CHECK(each.forward_backward(tiny.text.batch(tiny_shape, 1, step)) == in_host_memory().losses[step]);
    for (auto& each : trainers)
      each.update(step);
  }
  CHECK(trainers[0].digest() == in_host_memory().digest);
}
