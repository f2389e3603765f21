/// @file
/// `command_line`: what a training program was asked for.
#pragma once

#include <llmmem/checkpoint/termination.hpp>
#include <llmmem/model/training_state.hpp>
#include <llmmem/sharding/sharded_wires.hpp>
#include <llmmem/training/top_k_sums.hpp>
#include <llmmem/training/training_types.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>

#include "train_gpt/outer_options.hpp"
#include "train_gpt/shape.hpp"
#include "train_gpt/step_guard.hpp"
#include "train_gpt/stores.hpp"

namespace train_gpt {

/// Where state and activations are stored.
enum class memory_kind : std::uint8_t {
  plain,   ///< everything in host memory
  tiered,  ///< in tiers, of which the first is small
};

/// When the data of a step is brought up.
enum class schedule_kind : std::uint8_t {
  on_demand,  ///< when it is requested
  lookahead,  ///< a few pieces in advance
  next_use,   ///< by a plan of the whole step: as early as links and space allow, in the order of use
};

/// Tiers, the fastest first: memory for computation, more memory, and a file.
struct tier_options {
  std::uint64_t budget_mib = 0;
  std::uint64_t host_mib = 0;  ///< 0: no tier between
  schedule_kind schedule = schedule_kind::next_use;
  std::string folder{};  ///< of the file; empty: the system's folder for temporary files

  static constexpr std::uint64_t page_bytes = 16 * 1024;  ///< of the tiers in memory
};

/// Where and how often a run is saved.
struct checkpoint_options {
  std::string folder{};     ///< empty: the run is not saved
  std::string copy{};       ///< another folder, to which each checkpoint is copied; empty: none
  std::uint64_t every = 0;  ///< steps; 0: the optimum by the measured cost of saves
  bool resumes = false;
  const llmmem::termination_request* termination = nullptr;  ///< of the program, if there is a folder
};

/// The activations that the backward pass recomputes.
enum class recompute_kind : std::uint8_t {
  none,       ///< nothing
  selective,  ///< the attention's probabilities
  full,       ///< each block from its input
  budget,     ///< the cheapest choice within a budget, layer by layer
};

struct recompute_options {
  recompute_kind kind = recompute_kind::none;
  std::uint64_t budget_bytes = 0;  ///< with `budget`: of a rank's activations at once
};

/// Ranks that train together, each on its share of the batch.
struct parallel_options {
  std::size_t ranks = 0;       ///< of all workers; 0: no ranks, one process keeps everything
  bool are_processes = false;  ///< processes joined by sockets; otherwise threads
  llmmem::zero_stage stage = llmmem::zero_stage::none;
  std::uint32_t gather_ahead = 0;    ///< layers whose weights are gathered before they are used
  std::uint32_t sums_in_flight = 0;  ///< layers whose gradients are summed during the next layers' backward
  llmmem::sharded_wires wires{};     ///< the form of their messages
  llmmem::top_k_plan top_k{};        ///< with a density: the largest gradients alone are sent
  llmmem::sent_momentum sent = llmmem::sent_momentum::cleared;  ///< with `top_k`
  bool keeps_secondary = false;  ///< the weights of the forward pass also stay in shards of each node
  outer_options outer{};         ///< workers, which share out the ranks

  [[nodiscard]] std::uint32_t ranks_of_worker() const noexcept {
    return static_cast<std::uint32_t>(std::max<std::size_t>(ranks, 1)) / outer.workers;
  }
  [[nodiscard]] std::uint32_t worker_of(std::uint32_t rank) const noexcept {
    return rank / ranks_of_worker();
  }
  [[nodiscard]] bool is_first_of_worker(std::uint32_t rank) const noexcept {
    return rank % ranks_of_worker() == 0;
  }
};

struct command_line {
  gpt_shape shape;
  std::uint64_t steps = 12;
  std::uint64_t seed = 1;
  std::size_t threads = std::clamp<std::size_t>(std::thread::hardware_concurrency(), 1, 16);
  std::optional<std::string> text_file;
  bool json = false;
  memory_kind memory = memory_kind::plain;
  update_time update = update_time::in_backward;
  tier_options tiers;
  checkpoint_options checkpoints;
  parallel_options parallel;
  recompute_options recompute;
  std::uint32_t activation_bits = 0;  ///< of activations between their passes; 0: floats
  std::uint64_t evaluate = 1;         ///< batches of the last loss
  guard_options guard;
};

}  // namespace train_gpt
