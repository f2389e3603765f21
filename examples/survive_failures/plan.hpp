/// @file
/// The computation of a job of ranks that may die, and its division.
#pragma once

#include <llmmem/comm/ranks.hpp>
#include <llmmem/redundancy/part_ownership.hpp>
#include <llmmem/redundancy/redundancy.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "train_gpt/shape.hpp"

namespace survive_failures {

/// The connection of the ranks.
enum class transport_kind : std::uint8_t {
  sockets,    ///< a process each, which dies by SIGKILL
  threads,    ///< a thread each, of one process
  simulated,  ///< one after another, in virtual time
};

/// The job, the same for all ranks, from its beginning to its end.
struct job_plan {
  train_gpt::gpt_shape shape{.blocks = 2, .width = 64, .heads = 4, .context = 16, .batch = 8};
  std::uint64_t steps = 1000;
  std::uint64_t seed = 1;
  std::uint32_t ranks = 4;
  llmmem::redundancy_scheme redundancy = llmmem::redundancy_scheme::mirror(2);
  std::uint32_t faults = 0;
  transport_kind transport = transport_kind::sockets;
  std::uint64_t restart_ms = 50;   ///< from a death to the start of a fresh process in its seat
  std::uint64_t silence_ms = 500;  ///< until the ranks that wait for a stopped one kill it
  std::string checkpoint_dir{};    ///< the folder into which all ranks save the job; empty: nothing is saved
  std::uint64_t checkpoint_every = 50;  ///< steps

  [[nodiscard]] bool is_saved() const noexcept { return !checkpoint_dir.empty(); }

  /// The number of weights.
  [[nodiscard]] std::size_t elements() const {
    std::size_t all = 0;
    for (std::size_t i = 0; i < shape.layers(); ++i)
      all += parameter_layout(shape, shape.layer(i)).elements;
    return all;
  }
  /// The shape of one shard of the batch. There are as many shards as a complete job has ranks; the ranks
  /// that compute them change, but neither the shards nor the sums over them do.
  [[nodiscard]] train_gpt::gpt_shape shard_shape() const noexcept {
    train_gpt::gpt_shape one = shape;
    one.batch = shape.batch / ranks;
    return one;
  }
};

/// Values of the flat state, as many parts as the job has seats.
struct value_range {
  std::size_t first = 0;
  std::size_t count = 0;
};

/// Divides the model's values into parts, as evenly as possible. Each has its home in a seat, and is kept,
/// moved and restored as a whole.
class state_parts {
 public:
  state_parts(std::size_t elements, std::uint32_t parts) {
    for (std::size_t i = 0; i < parts; ++i) {
      const std::size_t first = elements * i / parts;
      ranges_.push_back({first, elements * (i + 1) / parts - first});
    }
  }

  [[nodiscard]] std::uint32_t count() const noexcept { return static_cast<std::uint32_t>(ranges_.size()); }
  [[nodiscard]] const value_range& operator[](llmmem::part_id part) const noexcept {
    return ranges_[to_index(part)];
  }
  /// Bytes of each part: weights, then means, then variances.
  [[nodiscard]] std::vector<std::uint64_t> bytes() const {
    std::vector<std::uint64_t> all;
    for (const value_range& each : ranges_)
      all.push_back(3 * sizeof(float) * each.count);
    return all;
  }
  [[nodiscard]] std::vector<llmmem::seat_id> homes() const {
    std::vector<llmmem::seat_id> all;
    for (std::uint32_t i = 0; i < count(); ++i)
      all.push_back(llmmem::seat_id{i});
    return all;
  }

 private:
  std::vector<value_range> ranges_;
};

}  // namespace survive_failures
