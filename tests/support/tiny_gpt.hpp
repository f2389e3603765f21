/// @file
/// Models and text small enough for tests of train_gpt.
#pragma once

#include <llmmem/space/host.hpp>

#include <cstddef>
#include <cstdint>
#include <string>

#include "train_gpt/corpus.hpp"
#include "train_gpt/gpt.hpp"
#include "train_gpt/host_stores.hpp"
#include "train_gpt/shape.hpp"
#include "train_gpt/trainer.hpp"
#include "train_gpt/worker_team.hpp"

namespace llmmem_tests {

/// Odd numbers, so that tiles, strips and slices all have ends that are cut.
inline constexpr train_gpt::gpt_shape tiny_shape{
    .blocks = 2, .width = 20, .heads = 4, .context = 11, .batch = 3};

/// Words of a small language: learned quickly.
[[nodiscard]] inline std::string tiny_text(std::size_t bytes) {
  std::string text;
  for (std::uint64_t i = 0; text.size() < bytes; ++i) {
    constexpr const char* words[] = {"the ", "cat ", "sat ", "on ", "a ", "mat.\n"};
    text += words[train_gpt::mixed(7, i) % 6];
  }
  text.resize(bytes);
  return text;
}

/// A space, a team and a model in it.
template <class T>
struct tiny_gpt {
  using space = llmmem::host_space;

  explicit tiny_gpt(const train_gpt::gpt_shape& of = tiny_shape, std::size_t threads = 2)
      : shape(of), team(threads), model(shape, team, host), text("tiny", tiny_text(4000), shape) {}

  train_gpt::gpt_shape shape;
  space host{{.budget = std::uint64_t{1} << 30, .name = "host"}};
  train_gpt::worker_team team;
  train_gpt::gpt<T, space> model;
  train_gpt::corpus text;
};

/// The same with stores in that space, and a trainer.
template <class T>
struct tiny_training : tiny_gpt<T> {
  using typename tiny_gpt<T>::space;

  explicit tiny_training(const train_gpt::gpt_shape& of = tiny_shape, std::size_t threads = 2)
      : tiny_gpt<T>(of, threads) {
    trainer.initialise(1);
  }

  train_gpt::host_state<T, space> state{this->host, this->shape};
  train_gpt::host_activations<T, space> activations{this->host, this->shape};
  train_gpt::trainer<train_gpt::host_state<T, space>, train_gpt::host_activations<T, space>, space> trainer{
      this->model, this->team, state, activations};
};

}  // namespace llmmem_tests
