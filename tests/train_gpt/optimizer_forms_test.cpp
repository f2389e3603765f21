/// The fixture trained with each form of an optimizer's state.
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/optimizer_step.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "support/optimizer_world.hpp"
#include "support/tiny_gpt.hpp"
#include "train_gpt/trainer.hpp"

using namespace train_gpt;
using namespace llmmem_tests;

namespace {

constexpr gpt_shape shape{.blocks = 2, .width = 32, .heads = 4, .context = 32, .batch = 4};
constexpr std::uint64_t steps = 60;
constexpr double adafactor_rate = 0.05;  // relative to the size of the weights

struct trained_form {
  double loss = 0;  ///< of a batch that was not trained on
  std::uint64_t digest = 0;
};

trained_form train(llmmem::optimizer_form form) {
  tiny_training<float> tiny(shape);
  tiny.trainer.initialise(1);
  std::vector<optimizer_arrays> arrays;
  for (std::size_t i = 0; i < shape.layers(); ++i) {
    const layer_id layer = shape.layer(i);
    const state_lease<decltype(tiny.state), lease_mode::read> weights(tiny.state, layer, state_kind::weights);
    arrays.emplace_back(form, weights.values().size());
    llmmem::optimizer_begin(llmmem::host_executor{}, form, arrays[i].whole(form, weights.values().size()),
                            weights.values().data())
        .value();
  }
  const double rate = form == llmmem::optimizer_form::sgd ? 0.05 : 1e-3;
  for (std::uint64_t step = 1; step <= steps; ++step) {
    tiny.trainer.forward_backward(tiny.text.batch(shape, 1, step - 1));
    for (std::size_t i = 0; i < shape.layers(); ++i) {
      const layer_id layer = shape.layer(i);
      const state_lease<decltype(tiny.state), lease_mode::read> gradients(tiny.state, layer,
                                                                          state_kind::gradients);
      const state_lease<decltype(tiny.state), lease_mode::write> weights(tiny.state, layer,
                                                                         state_kind::weights);
      const std::uint64_t count = gradients.values().size();
      const llmmem::optimizer_piece piece = arrays[i].whole(form, count);
      llmmem::optimizer_step(
          llmmem::host_executor{}, form, piece,
          {reinterpret_cast<const std::byte*>(gradients.values().data()), llmmem::dtype::f32, count},
          {.rate = rate, .variance_decay = 0.95, .step = step, .seed = i})
          .value();
      llmmem::optimizer_weights(llmmem::host_executor{}, form, piece, weights.values().data()).value();
    }
  }
  return {tiny.trainer.evaluate(tiny.text.batch(shape, 1, 1000)), tiny.trainer.digest()};
}

/// Adafactor needs sums of whole tensors, and Muon whole matrices, so the trainer steps.
trained_form train_whole(llmmem::optimizer_form form, std::size_t threads, std::uint64_t until = steps) {
  gpt_shape whole = shape;
  whole.optimizer = form;
  tiny_training<float> tiny(whole, threads);
  trainer trained(tiny.model, tiny.team, tiny.state, tiny.activations,
                  {.rate = form == llmmem::optimizer_form::muon ? 1e-3 : adafactor_rate});
  trained.initialise(1);
  for (std::uint64_t step = 0; step < until; ++step)
    static_cast<void>(trained.step(tiny.text.batch(whole, 1, step), step));
  return {trained.evaluate(tiny.text.batch(whole, 1, 1000)), trained.digest()};
}

}  // namespace

TEST_CASE("adafactor and muon train to the same bits with any number of threads") {
  for (const llmmem::optimizer_form form :
       {llmmem::optimizer_form::adafactor, llmmem::optimizer_form::muon}) {
    const double loss = train_whole(form, 2).loss;
    MESSAGE("form " << static_cast<int>(form) << ": loss " << loss);
    CHECK(loss < 4.5);
    CHECK(train_whole(form, 3, 2).digest == train_whole(form, 1, 2).digest);
  }
}

TEST_CASE("each form of an optimizer's state trains, and those that are exact to the same bits") {
  std::map<llmmem::optimizer_form, trained_form> all;
  for (const llmmem::optimizer_form form : all_optimizer_forms)
    all[form] = train(form);
  const trained_form& exact = all[llmmem::optimizer_form::adamw];
  for (const auto& [form, of] : all) {
    MESSAGE("form " << static_cast<int>(form) << ": loss " << of.loss);
    CHECK(of.loss < 4.5);  // ln 256 is 5.55: every byte alike
  }
  CHECK(all[llmmem::optimizer_form::adamw_split16].digest == exact.digest);
  CHECK(all[llmmem::optimizer_form::adamw_8bit].loss == doctest::Approx(exact.loss).epsilon(0.05));
  CHECK(all[llmmem::optimizer_form::adamw_stochastic].loss == doctest::Approx(exact.loss).epsilon(0.05));
  // The trainer's own steps are those of the primitive.
  tiny_training<float> tiny(shape);
  tiny.trainer.initialise(1);
  for (std::uint64_t step = 0; step < steps; ++step)
    tiny.trainer.step(tiny.text.batch(shape, 1, step), step);
  CHECK(tiny.trainer.digest() == exact.digest);
}
