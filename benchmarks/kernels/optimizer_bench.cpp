// An optimizer's step on the host, on one core, as a share of a stream with the same mix of bytes.
//
//   step/form   16 Mi parameters with float gradients; an item is 1 Ki parameters
//   adafactor   the four phases of a matrix of 4,096 x 4,096, with as many parameters
//   muon        the Newton-Schulz steps of a matrix of 768 x 768, on one thread
//   stream      four arrays of floats in, three of them out, each element of which takes one addition
//
// Counters: gb_per_s, of bytes read and written by the form's widths; for muon
// multiplications_per_s.

#include <llmmem/kernels/adafactor.hpp>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/muon.hpp>
#include <llmmem/kernels/optimizer_step.hpp>
#include <llmmem/kernels/unordered_sum.hpp>
#include <llmmem/sharding/tensor_shape.hpp>
#include <llmmem/sharding/whole_matrices.hpp>

#include <benchmark/benchmark.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace llmmem;

constexpr std::uint64_t count = std::uint64_t{16} << 20;

void count_items(benchmark::State& state) {
  state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(count / 1024));
}

void count_bytes(benchmark::State& state, std::uint64_t bytes) {
  count_items(state);
  state.counters["gb_per_s"] =
      benchmark::Counter(static_cast<double>(bytes) * static_cast<double>(state.iterations()) / 1e9,
                         benchmark::Counter::kIsRate);
}

void step(benchmark::State& state, optimizer_form form) {
  const optimizer_widths each = widths_of(form);
  const std::uint64_t groups = (count + optimizer_group - 1) / optimizer_group;
  std::array<std::vector<std::byte>, 6> arrays;
  const std::array<std::uint64_t, 6> bytes{count * each.weights,      count * each.low,
                                           count * each.mean,         count * each.variance,
                                           groups * each.group_scale, groups * each.group_scale};
  for (std::size_t i = 0; i < arrays.size(); ++i)
    arrays[i].resize(bytes[i]);
  std::vector<float> gradients(count);
  for (std::uint64_t i = 0; i < count; ++i)
    gradients[i] = static_cast<float>(i % 1000) * 1e-5F - 5e-3F;
  const optimizer_piece piece{.weights = arrays[0].data(),
                              .low = arrays[1].data(),
                              .mean = arrays[2].data(),
                              .variance = arrays[3].data(),
                              .mean_scales = arrays[4].data(),
                              .variance_scales = arrays[5].data(),
                              .count = count};
  const gradient_piece by{reinterpret_cast<const std::byte*>(gradients.data()), dtype::f32, count};
  std::uint64_t number = 0;
  for (auto _ : state) {
    optimizer_step(host_executor{}, form, piece, by, {.step = ++number}).value();
    benchmark::ClobberMemory();
  }
  count_bytes(state, count * 4 + 2 * optimizer_bytes(form, count));
}

void adafactor(benchmark::State& state) {
  constexpr adafactor_shape shape{4096, 4096};
  static_assert(shape.elements() == count);
  std::vector<float> weights(count, 0.02F);
  std::vector<float> gradients(count);
  for (std::uint64_t i = 0; i < count; ++i)
    gradients[i] = static_cast<float>(i % 1000) * 1e-5F - 5e-3F;
  std::vector<float> factors(shape.factors());
  std::vector<unordered_sum> sums;
  const optimizer_piece piece{.weights = reinterpret_cast<std::byte*>(weights.data()), .count = count};
  const gradient_piece by{reinterpret_cast<const std::byte*>(gradients.data()), dtype::f32, count};
  adafactor_hyper hyper{.step = 0};
  for (auto _ : state) {
    ++hyper.step;
    sums.assign(shape.sums(), {});
    unordered_sum updates;
    adafactor_add(shape, piece, by, hyper, sums).value();
    const adafactor_terms terms = adafactor_factors(shape, sums, hyper, factors).value();
    adafactor_add_updates(shape, piece, by, hyper, factors, terms, updates).value();
    adafactor_apply(shape, piece, by, hyper, factors, terms, updates).value();
    benchmark::ClobberMemory();
  }
  count_items(state);
}

void muon(benchmark::State& state) {
  constexpr muon_shape shape{768, 768};
  std::vector<float> drawn(shape.elements());
  for (std::uint64_t i = 0; i < drawn.size(); ++i)
    drawn[i] = static_cast<float>(i * 7919 % 1009) * 1e-5F - 5e-3F;
  std::vector<float> matrix;
  std::vector<float> scratch(shape.scratch());
  for (auto _ : state) {
    matrix = drawn;
    orthogonalize(shape, matrix, scratch).value();
    benchmark::ClobberMemory();
  }
  const auto cost = static_cast<double>(newton_schulz_cost(tensor_shape::matrix(shape.rows, shape.columns)));
  state.counters["multiplications_per_s"] =
      benchmark::Counter(cost * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}

/// In tiles through local arrays, so that it is vectorised like the step.
void stream(benchmark::State& state) {
  std::array<std::vector<float>, 4> arrays;
  for (auto& each : arrays)
    each.assign(count, 1.0F);
  constexpr std::size_t tile = 64;
  for (auto _ : state) {
    for (std::uint64_t first = 0; first < count; first += tile) {
      const auto load = [&](std::size_t i) {
        std::array<float, tile> in;
        std::memcpy(in.data(), arrays[i].data() + first, sizeof in);
        return in;
      };
      // All loads come before the stores, because equal places of two arrays look the same to a processor
      // that compares 12 bits.
      std::array<float, tile> a = load(0);
      std::array<float, tile> b = load(1);
      std::array<float, tile> c = load(2);
      const std::array<float, tile> d = load(3);
      for (std::size_t k = 0; k < tile; ++k) {
        a[k] += d[k];
        b[k] += d[k];
        c[k] += d[k];
      }
      std::memcpy(arrays[0].data() + first, a.data(), sizeof a);
      std::memcpy(arrays[1].data() + first, b.data(), sizeof b);
      std::memcpy(arrays[2].data() + first, c.data(), sizeof c);
    }
    benchmark::ClobberMemory();
  }
  count_bytes(state, count * 28);
}

const bool registered = [] {
  benchmark::RegisterBenchmark("stream", stream);
  benchmark::RegisterBenchmark("adafactor", adafactor);
  benchmark::RegisterBenchmark("muon", muon);
  for (const auto& [name, form] :
       {std::pair{"adamw", optimizer_form::adamw}, std::pair{"adamw_split16", optimizer_form::adamw_split16},
        std::pair{"adamw_stochastic", optimizer_form::adamw_stochastic},
        std::pair{"adamw_8bit", optimizer_form::adamw_8bit}, std::pair{"sgd", optimizer_form::sgd}}) {
    benchmark::RegisterBenchmark((std::string("step/") + name).c_str(),
                                 [form](benchmark::State& state) { step(state, form); });
  }
  return true;
}();

}  // namespace
