/// @file
/// The state of a trained model, by the fixture examples/train_gpt.
#pragma once

#include <llmmem/codec/bf16_cast.hpp>
#include <llmmem/space/host.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "train_gpt/corpus.hpp"
#include "train_gpt/gpt.hpp"
#include "train_gpt/host_stores.hpp"
#include "train_gpt/shape.hpp"
#include "train_gpt/trainer.hpp"
#include "train_gpt/worker_team.hpp"

namespace llmmem_benchmarks {

/// All layers' pieces of one kind, concatenated as in memory.
struct trained_state {
  std::vector<std::byte> weights_f32;
  std::vector<std::byte> weights_bf16;  ///< the same, rounded
  std::vector<std::byte> mean_f32;      ///< Adam's moments
  std::vector<std::byte> variance_f32;
};

namespace detail {

/// tinyshakespeare.txt in the folder that LLMMEM_DATA_DIR names (set but empty means none), otherwise in
/// shared/data next to the checkout; without it, words of a small language.
inline std::pair<std::string, std::string> training_text() {
  const char* const told = std::getenv("LLMMEM_DATA_DIR");
  const std::filesystem::path folder = told == nullptr ? LLMMEM_BENCH_DATA_DIR : told;
  if (!folder.empty()) {
    std::ifstream file(folder / "tinyshakespeare.txt", std::ios::binary);
    std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    if (!text.empty()) return {"tinyshakespeare.txt", std::move(text)};
  }
  std::string text;
  for (std::uint64_t i = 0; i < 100'000; ++i) {
    constexpr const char* words[] = {"the ", "cat ", "sat ", "on ", "a ", "mat.\n"};
    text += words[train_gpt::mixed(7, i) % 6];
  }
  return {"words of a small language", std::move(text)};
}

}  // namespace detail

/// LLMMEM_BENCH_TRAIN_STEPS, or 12.
inline std::uint64_t training_steps() {
  const char* const told = std::getenv("LLMMEM_BENCH_TRAIN_STEPS");
  return told == nullptr ? 12 : std::strtoull(told, nullptr, 10);
}

/// The source of the figures, for the context of the JSON.
inline std::string trained_source() {
  return std::to_string(training_steps()) + " steps on " + detail::training_text().first;
}

/// Trained on first use: 4.9 million parameters, `training_steps()` of 256 tokens. The loss of the last one
/// goes to standard error.
inline const trained_state& trained() {
  static const trained_state all = [] {
    using train_gpt::state_kind;
    const std::uint64_t steps = training_steps();
    auto [name, text] = detail::training_text();
    const train_gpt::gpt_shape shape;
    const train_gpt::corpus corpus(name, std::move(text), shape);
    llmmem::host_space host({.budget = std::uint64_t{1} << 32, .name = "host"});
    train_gpt::worker_team team(std::max(1U, std::thread::hardware_concurrency()));
    train_gpt::gpt<float, llmmem::host_space> model(shape, team, host);
    train_gpt::host_state<float, llmmem::host_space> state(host, shape);
    train_gpt::host_activations<float, llmmem::host_space> activations(host, shape);
    train_gpt::trainer trainer(model, team, state, activations);
    trainer.initialise(1);
    double loss = 0;
    for (std::uint64_t step = 0; step < steps; ++step)
      loss = trainer.step(corpus.batch(shape, 1, step), step);
    std::fprintf(stderr, "trained: %s, last loss %.4f\n", trained_source().c_str(), loss);

    const auto all_of = [&](state_kind kind) {
      std::vector<std::byte> bytes;
      for (std::size_t layer = 0; layer < shape.layers(); ++layer) {
        const auto piece = state.acquire(shape.layer(layer), kind, train_gpt::lease_mode::read);
        const auto part = std::as_bytes(piece);
        bytes.insert(bytes.end(), part.begin(), part.end());
        state.release(shape.layer(layer), kind, train_gpt::lease_mode::read);
      }
      return bytes;
    };
    trained_state found{.weights_f32 = all_of(state_kind::weights),
                        .weights_bf16 = {},
                        .mean_f32 = all_of(state_kind::mean),
                        .variance_f32 = all_of(state_kind::variance)};
    llmmem::bf16_cast cast(found.weights_f32.size());
    found.weights_bf16.resize(found.weights_f32.size() / 2);
    cast.encode(found.weights_f32, found.weights_bf16).value();
    return found;
  }();
  return all;
}

}  // namespace llmmem_benchmarks
