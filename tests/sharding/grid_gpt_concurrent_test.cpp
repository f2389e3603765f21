/// The small GPT of examples/train_gpt on grids of ranks: 2-D (Optimus) and 2.5-D (Tesseract), forward, back
/// and some steps of gradient descent. The unsplit one is the example's own.
#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/thread_network.hpp>
#include <llmmem/sharding/grid.hpp>
#include <llmmem/sharding/process_grid.hpp>
#include <llmmem/sharding/summa.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "support/grid_gpt.hpp"
#include "support/state_world.hpp"
#include "support/tables.hpp"
#include "support/tiny_gpt.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;
using ranks_of = communicator<thread_endpoint>;

constexpr train_gpt::gpt_shape shape{.blocks = 2, .width = 24, .heads = 4, .context = 6, .batch = 8};
constexpr int steps = 3;
constexpr float rate = 0.5F;

/// What the example's own model has at each step: before it the weights, then loss and gradients; and behind
/// the last step the weights.
struct unsplit_step {
  std::vector<table> weights, gradients;
  train_gpt::token_batch batch;
  double loss = 0;
};

std::vector<unsplit_step> run_unsplit(std::uint32_t grid_columns) {
  using train_gpt::state_kind;
  tiny_training<float> tiny(shape, 1);
  const auto values = [&](std::size_t layer, state_kind kind) {
    return tiny.state.acquire(shape.layer(layer), kind, train_gpt::lease_mode::read_write);
  };
  // Biases and norms that do something.
  for (std::size_t i = 0; i < shape.layers(); ++i) {
    const auto w = values(i, state_kind::weights);
    for (std::size_t k = 0; k < w.size(); ++k)
      w[k] += 0.05F * std::sin(static_cast<float>(k + i));
  }
  std::vector<unsplit_step> all(steps + 1);
  for (int step = 0; step <= steps; ++step) {
    unsplit_step& now = all[static_cast<std::size_t>(step)];
    now.weights = tensors_of_store(tiny.state, shape, state_kind::weights, grid_columns);
    now.batch = tiny.text.batch(shape, 1, static_cast<std::uint64_t>(step));
    now.loss = tiny.trainer.forward_backward(now.batch);
    now.gradients = tensors_of_store(tiny.state, shape, state_kind::gradients, grid_columns);
    for (std::size_t i = 0; i < shape.layers(); ++i) {
      const auto w = values(i, state_kind::weights);
      const auto g = values(i, state_kind::gradients);
      for (std::size_t k = 0; k < w.size(); ++k)
        w[k] -= rate * g[k];
    }
  }
  return all;
}

/// What a rank of q x q x d sends in one forward and backward pass, in elements. All send as much, and
/// receive as much.
///
/// **SUMMA.** Of C = A B, A of M x K is in q d x q blocks and B of K x N in q x q. Step l of q broadcasts
/// column l of A along the rows of the grid and row l of B along its columns. A rank is the root of either
/// once, and receives in the other q - 1 steps; as it takes every place in the trees by turns, it sends as
/// much:
///
///     S(K, N) = (q - 1) (M K / (q^2 d) + K N / q^2)
///
/// Optimus counts time, not a rank's bytes: log2(q) rounds of a block in each of q steps, which is
/// q log2(q) / (q - 1) times S. A' = C' B^T broadcasts B and reduces A' along rows, B' = A^T C' broadcasts A
/// and reduces B' along columns: S each. So a product takes 3 S of a training step.
///
/// **A block** has four products, of h x 3h, h x h, h x 4h and 4h x h: with M = b s, S is (q - 1) / q^2 times
/// 7 b s h / d + 12 h^2, the sum that Optimus' table has. **The head** has one, of h x V. **An embedding** is
/// a product whose left factor is known to those who need it: (q - 1) R h / q^2 for a table of R rows,
/// forward to broadcast it, back to reduce its gradient.
///
/// **Norms** add up two numbers a token along the row, in either direction; the **loss** three, a maximum, a
/// sum of exponentials and the target's logit. An all-reduce of n elements by g ranks has each send
/// 2 n (g - 1) / g. At last a rank tells the q d - 1 others of its column its part of the loss.
///
/// **Copies**: layers of depth have the same matrices, and add up the gradients of K N / q^2 elements
/// (Tesseract); of the n / q elements of a vector, q d ranks have the same.
std::uint64_t elements_sent(const process_grid& grid) {
  const std::uint64_t q = grid.columns();
  const std::uint64_t d = grid.depth();
  const std::uint64_t h = shape.width;
  const std::uint64_t v = train_gpt::vocabulary;
  const std::uint64_t tokens = shape.tokens();
  const std::uint64_t mine = tokens / (q * d);
  const auto summa = [&](std::uint64_t k, std::uint64_t n) {
    const std::uint64_t elements = (q - 1) * (tokens * k / (q * q * d) + k * n / (q * q));
    // The library's plan says the same.
    for (const std::uint64_t each : traffic_of(plan_summa(grid, {.m = tokens, .n = n, .k = k})).received)
      CHECK(each == elements);
    return elements;
  };
  const auto all_reduce_of = [](std::uint64_t elements, std::uint64_t ranks) {
    CHECK(elements % ranks == 0);
    return 2 * elements / ranks * (ranks - 1);
  };
  const std::uint64_t block = summa(h, 3 * h) + summa(h, h) + summa(h, 4 * h) + summa(4 * h, h);
  CHECK(block == (q - 1) * (7 * tokens * h / d + 12 * h * h) / (q * q));
  const std::uint64_t products = 3 * (shape.blocks * block + summa(h, v));
  const std::uint64_t tables = (v + shape.context) * h;
  const std::uint64_t look_ups = 2 * (q - 1) * tables / (q * q);
  const std::uint64_t norms = 2 * (2 * shape.blocks + 1) * all_reduce_of(2 * mine, q);
  const std::uint64_t loss = all_reduce_of(mine, q) + all_reduce_of(2 * mine, q) + (q * d - 1);
  const std::uint64_t matrices = shape.blocks * 12 * h * h + h * v + tables;
  const std::uint64_t vectors = shape.blocks * (3 * h + h + 4 * h + h + 4 * h) + 2 * h;
  const std::uint64_t copies = all_reduce_of(matrices / (q * q), d) + all_reduce_of(vectors / q, q * d);
  return products + look_ups + norms + loss + copies;
}

template <class Grid>
void check_on(const gpt_catalogue& catalogue, const Grid& who) {
  const process_grid& grid = who.grid();
  const std::vector<unsplit_step> expected = run_unsplit(grid.columns());
  const std::uint64_t sent_a_step = 4 * elements_sent(grid);
  const std::uint32_t world = to_number(grid.world());
  in_thread_world(world, [&](ranks_of& ranks, host_space& space, std::uint32_t self) {
    CAPTURE(self);
    grid_gpt model(ranks, space, who, shape, catalogue);
    const auto part_of = [&](const std::vector<table>& all, std::uint32_t t) {
      return dense(bytes_of(all[t]), who.local(tensor_id{t}, rank_id{self}), 4);
    };
    const auto far_off = [](std::span<const std::byte> mine, const std::vector<std::byte>& other) {
      const auto all = [](std::span<const std::byte> bytes) {
        table made(1, bytes.size() / 4);
        std::copy(bytes.begin(), bytes.end(), made.bytes().begin());
        return made;
      };
      return difference(all(mine), all(other));
    };
    for (std::uint32_t t = 0; t < catalogue.tensors(); ++t) {
      const auto part = part_of(expected[0].weights, t);
      std::copy(part.begin(), part.end(), model.weights().local(tensor_id{t}).begin());
    }
    for (int step = 0; step <= steps; ++step) {
      CAPTURE(step);
      const unsplit_step& now = expected[static_cast<std::size_t>(step)];
      const std::uint64_t before = sent_by(ranks);
      const float loss = model.forward_backward(now.batch);
      CHECK(sent_by(ranks) - before == sent_a_step);
      CHECK(std::abs(static_cast<double>(loss) - now.loss) < 1e-5);
      for (std::uint32_t t = 0; t < catalogue.tensors(); ++t) {
        CAPTURE(catalogue.facts[t].name);
        CHECK(far_off(std::as_bytes(std::span(model.gradient(t).values)), part_of(now.gradients, t)) < 1e-5F);
        CHECK(far_off(model.weights().local(tensor_id{t}), part_of(now.weights, t)) < 1e-5F);
      }
      if (step != steps) model.descend(rate);
    }
    // Activations are split over all ranks, on both axes.
    std::size_t activations = 0;
    for (std::size_t i = 1; i < shape.layers(); ++i)
      activations += activation_layout(shape, shape.layer(i)).elements;
    const std::size_t statistics = 2 * shape.tokens() * (2 * shape.blocks + 1);
    CHECK(model.kept() * world == activations - statistics);
  });
}

}  // namespace

TEST_SUITE("grid_gpt") {
  TEST_CASE("on 2 x 2 ranks (Optimus) a GPT trains as on one rank, and sends the paper's bytes") {
    const gpt_catalogue catalogue(shape);
    check_on(catalogue, grid2d(catalogue.facts, catalogue.roles, 2));
  }

  TEST_CASE(
      "on 2 x 2 x 2 ranks (Tesseract) a GPT trains so, too, with half the activations and sums of "
      "gradients") {
    const gpt_catalogue catalogue(shape);
    check_on(catalogue, grid25d(catalogue.facts, catalogue.roles, 2, 2));
  }

  TEST_CASE("on a grid of one rank a GPT trains so, too, and sends nothing") {
    CHECK(elements_sent(process_grid()) == 0);
    const gpt_catalogue catalogue(shape);
    check_on(catalogue, grid2d(catalogue.facts, catalogue.roles, 1));
  }
}
