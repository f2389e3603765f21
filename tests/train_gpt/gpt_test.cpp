/// The model against its definition: derivatives by differences, and bytes by the library's arithmetic.
#include "train_gpt/gpt.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>

#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/tiny_gpt.hpp"
#include "train_gpt/application.hpp"

using namespace train_gpt;
using llmmem_tests::tiny_shape;
using llmmem_tests::tiny_training;

TEST_CASE("every gradient equals the difference quotient of the loss") {
  const gpt_shape shape{.blocks = 2, .width = 6, .heads = 2, .context = 5, .batch = 2};
  tiny_training<double> tiny(shape);
  for (std::size_t i = 0; i < shape.layers(); ++i) {
    std::uint64_t at = 0;  // away from zero biases and equal scales
    for (double& weight : tiny.state.acquire(shape.layer(i), state_kind::weights, lease_mode::read_write))
      weight += (static_cast<double>(mixed(i, at++) >> 40) * 0x1p-24 - 0.5) * 0.6;
  }
  const token_batch batch = tiny.text.batch(shape, 1, 0);
  const double loss = tiny.trainer.forward_backward(batch);
  CHECK(loss == tiny.trainer.evaluate(batch));
  for (std::size_t i = 0; i < shape.layers(); ++i) {
    const auto weights = tiny.state.acquire(shape.layer(i), state_kind::weights, lease_mode::read_write);
    const auto gradients = tiny.state.acquire(shape.layer(i), state_kind::gradients, lease_mode::read);
    for (const tensor_place& tensor : tiny.model.parameters(shape.layer(i)).tensors) {
      CAPTURE(tensor.name);
      const std::size_t elements = tensor.rows * tensor.columns;
      double worst = 0;
      double largest = 0;
      const std::size_t each = elements / 150 + 1;  // all of small tensors, an even choice of large ones
      for (std::size_t k = tensor.offset; k < tensor.offset + elements; k += each) {
        const double here = weights[k];
        constexpr double h = 1e-5;
        weights[k] = here + h;
        const double above = tiny.trainer.evaluate(batch);
        weights[k] = here - h;
        const double below = tiny.trainer.evaluate(batch);
        weights[k] = here;
        worst = std::max(worst, std::abs((above - below) / (2 * h) - gradients[k]));
        largest = std::max(largest, std::abs(gradients[k]));
      }
      CHECK(largest > 1e-4);  // else nothing is shown
      CHECK(worst < 2e-9);
    }
  }
}

TEST_CASE("single precision agrees with double precision") {
  tiny_training<float> single;
  tiny_training<double> twice;
  for (std::uint64_t step = 0; step < 5; ++step) {
    const token_batch batch = single.text.batch(tiny_shape, 1, step);
    CHECK(single.trainer.step(batch, step) == doctest::Approx(twice.trainer.step(batch, step)).epsilon(1e-5));
  }
}

TEST_CASE("no token sees later ones") {
  tiny_training<float> tiny;
  const layer_id head = tiny_shape.head();
  token_batch batch = tiny.text.batch(tiny_shape, 1, 0);
  const auto probabilities = [&] {
    static_cast<void>(tiny.trainer.evaluate(batch));
    const layer_view<float> record(tiny.activations.save(head), tiny.model.activations(head));
    const auto all = record[head_activation::probabilities];
    return std::vector<float>(all.data, all.data + all.rows * all.columns);
  };
  const auto before = probabilities();
  constexpr std::size_t changed = 6;
  batch.tokens[changed] ^= 1;
  const auto after = probabilities();
  for (std::size_t i = 0; i < tiny_shape.tokens(); ++i) {
    CAPTURE(i);
    const auto row = static_cast<std::ptrdiff_t>(i * vocabulary);
    const auto end = row + static_cast<std::ptrdiff_t>(vocabulary);
    const bool same = std::equal(before.begin() + row, before.begin() + end, after.begin() + row);
    CHECK(same == (i < changed || i >= tiny_shape.context));
  }
}

TEST_CASE("probabilities are all positive and sum to one") {
  tiny_training<float> tiny;
  static_cast<void>(tiny.trainer.evaluate(tiny.text.batch(tiny_shape, 1, 0)));
  const layer_id head = tiny_shape.head();
  const layer_view<float> record(tiny.activations.save(head), tiny.model.activations(head));
  const auto all = record[head_activation::probabilities];
  for (std::size_t i = 0; i < all.rows; ++i) {
    double sum = 0;
    for (std::size_t j = 0; j < vocabulary; ++j) {
      REQUIRE(all.row(i)[j] > 0);
      sum += static_cast<double>(all.row(i)[j]);
    }
    REQUIRE(sum == doctest::Approx(1).epsilon(1e-6));
  }
}

TEST_CASE("layouts have the library's count of parameters, and spaces the planned bytes") {
  for (const auto seed : llmmem_tests::seeds(20)) {
    CAPTURE(seed);
    llmmem_tests::random_numbers random(seed);
    gpt_shape shape;
    shape.blocks = 1 + random.below(std::uint64_t{4});
    shape.heads = 1 + random.below(std::uint64_t{4});
    shape.width = shape.heads * (1 + random.below(std::uint64_t{12}));
    shape.context = 1 + random.below(std::uint64_t{30});
    shape.batch = 1 + random.below(std::uint64_t{4});
    const std::size_t threads = 1 + random.below(std::uint64_t{3});
    shape.model().validate();
    std::uint64_t parameters = 0;
    for (std::size_t i = 0; i < shape.layers(); ++i) {
      const layer_layout layout = parameter_layout(shape, shape.layer(i));
      parameters += layout.elements;
      std::size_t end = 0;
      for (const tensor_place& tensor : layout.tensors) {
        CHECK(tensor.offset == end);
        end += tensor.rows * tensor.columns;
      }
      CHECK(end == layout.elements);
    }
    CHECK(parameters == shape.model().parameters());
    const tiny_training<float> tiny(shape, threads);
    const std::uint64_t planned = plan_bytes(shape, threads).total();
    CHECK(tiny.host.stats().peak >= planned);
    CHECK(tiny.host.stats().peak < planned + (std::uint64_t{1} << 16));  // whole pages
  }
}

TEST_CASE("impossible shapes are refused with valid ones") {
  llmmem::host_space host({.budget = std::uint64_t{1} << 20});
  worker_team team(1);
  using model = gpt<float, llmmem::host_space>;
  CHECK_THROWS_WITH_AS(model(gpt_shape{.width = 100, .heads = 8}, team, host),
                       "gpt_shape: heads 8 does not divide width 100; the next width that it does is 104",
                       llmmem::argument_error);
  CHECK_THROWS_WITH_AS(model(gpt_shape{.context = 0}, team, host),
                       "gpt_shape: context 0; it may be 1 to 8192", llmmem::argument_error);
  CHECK_THROWS_WITH_AS(worker_team(0), "worker_team: 0 threads; there may be 1 to 256",
                       llmmem::argument_error);
}
