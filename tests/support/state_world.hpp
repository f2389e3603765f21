/// @file
/// Worlds of ranks that hold sharded state, and what their pieces and messages must come to.
#pragma once

#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/thread_network.hpp>
#include <llmmem/sharded_state.hpp>
#include <llmmem/sharding/experts.hpp>
#include <llmmem/sharding/grid.hpp>
#include <llmmem/sharding/hierarchical_zero.hpp>
#include <llmmem/sharding/stages.hpp>
#include <llmmem/sharding/whole_matrices.hpp>
#include <llmmem/sharding/zero.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/testing/sim_network.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <set>
#include <thread>
#include <variant>
#include <vector>

#include "support/comm_job.hpp"
#include "support/random.hpp"
#include "support/sharding_world.hpp"

namespace llmmem_tests {

/// What any partition says, written down: so that tests of all kinds are one.
class table_partition {
 public:
  table_partition() = default;
  template <llmmem::partition P>
  explicit table_partition(const P& from) : world_(from.world()) {
    for (std::uint32_t t = 0; t < from.tensors(); ++t) {
      const llmmem::tensor_id tensor{t};
      shapes_.push_back(from.shape(tensor));
      replicated_.push_back(from.is_replicated(tensor));
      for (std::uint32_t r = 0; r < to_number(world_); ++r) {
        local_.push_back(from.local(tensor, llmmem::rank_id{r}));
        owned_.push_back(from.owned(tensor, llmmem::rank_id{r}));
      }
    }
  }

  [[nodiscard]] llmmem::rank_count world() const noexcept { return world_; }
  [[nodiscard]] std::uint32_t tensors() const noexcept { return static_cast<std::uint32_t>(shapes_.size()); }
  [[nodiscard]] llmmem::tensor_shape shape(llmmem::tensor_id t) const noexcept {
    return shapes_[to_index(t)];
  }
  [[nodiscard]] llmmem::element_runs local(llmmem::tensor_id t, llmmem::rank_id r) const noexcept {
    return local_[to_index(t) * to_number(world_) + to_index(r)];
  }
  [[nodiscard]] llmmem::element_runs owned(llmmem::tensor_id t, llmmem::rank_id r) const noexcept {
    return owned_[to_index(t) * to_number(world_) + to_index(r)];
  }
  [[nodiscard]] llmmem::rank_id owner(llmmem::tensor_id t, std::uint64_t e) const noexcept {
    std::uint32_t r = 0;
    while (!owned(t, llmmem::rank_id{r}).contains(e))
      ++r;
    return llmmem::rank_id{r};
  }
  [[nodiscard]] bool is_replicated(llmmem::tensor_id t) const noexcept { return replicated_[to_index(t)]; }

 private:
  llmmem::rank_count world_{1};
  std::vector<llmmem::tensor_shape> shapes_;
  std::vector<bool> replicated_;
  std::vector<llmmem::element_runs> local_;
  std::vector<llmmem::element_runs> owned_;
};
static_assert(llmmem::partition<table_partition>);

inline constexpr std::uint32_t state_kinds = partition_kinds + 7;

/// The partitions of `random_partition`, and behind them: ZeRO with whole pieces, with shards; hierarchical;
/// a grid; stages; experts; whole matrices.
inline table_partition partition_of_kind(random_numbers& random,
                                         const std::vector<llmmem::tensor_facts>& tensors, std::uint32_t kind,
                                         std::uint32_t world) {
  using namespace llmmem;
  const rank_count ranks{world};
  if (kind < partition_kinds) {
    return std::visit([](const auto& p) { return table_partition(p); },
                      random_partition(random, tensors, kind, ranks));
  }
  switch (kind - partition_kinds) {
    case 0:
      return table_partition(zero_partition(tensors, ranks, zero_stage::gradients, state_kind::weights));
    case 1:
      return table_partition(zero_partition(tensors, ranks, zero_stage::weights, state_kind::weights));
    case 2:
      return table_partition(hierarchical_zero(tensors, ranks, rank_count{1 + random.below(world)}));
    case 3: {
      std::vector<grid_role> roles;
      for (const tensor_facts& each : tensors) {
        const std::uint64_t dimensions = each.shape.dimensions();
        roles.push_back(dimensions == 0     ? grid_role::whole
                        : dimensions == 1   ? grid_role::bias
                        : random.once_in(2) ? grid_role::weight
                                            : grid_role::activation);
      }
      const std::uint32_t depth = world % 2 == 0 ? 2 : 1;
      const std::uint32_t rows = world / depth % 2 == 0 ? 2 : 1;
      return table_partition(grid_partition(tensors, roles, process_grid(rows, world / depth / rows, depth)));
    }
    case 4: {
      std::vector<layer_place> places;
      for (std::uint32_t i = 0; i < tensors.size(); ++i)
        places.push_back({i, random.below(static_cast<std::uint32_t>(tensors.size()))});
      std::vector<std::uint32_t> boundaries{0};
      for (std::uint32_t i = 1; i <= world; ++i)
        boundaries.push_back(static_cast<std::uint32_t>(tensors.size() * i / world));
      return table_partition(pipeline_stages(tensors, places, boundaries, ranks));
    }
    case 5: {
      std::vector<expert_id> experts;
      for (std::uint32_t i = 0; i < tensors.size(); ++i)
        experts.push_back(i % 2 == 0 ? no_expert : expert_id{i / 2});
      return table_partition(
          expert_parallel(tensors, experts, static_cast<std::uint32_t>(tensors.size()), ranks));
    }
    default:
      return table_partition(whole_matrices(tensors, ranks));
  }
}

/// All of a tensor, as everybody is to see it.
inline std::vector<std::byte> contents(const llmmem::tensor_facts& facts, std::uint64_t seed) {
  return bytes_of_seed(facts.bytes(), seed);
}

/// The elements of `runs`, one behind the other.
inline std::vector<std::byte> dense(const std::vector<std::byte>& all, const llmmem::element_runs& runs,
                                    std::size_t width) {
  std::vector<std::byte> made;
  for (const std::uint64_t element : elements_of(runs)) {
    const auto at = all.begin() + static_cast<std::ptrdiff_t>(element * width);
    made.insert(made.end(), at, at + static_cast<std::ptrdiff_t>(width));
  }
  return made;
}

/// Numbers of very different sizes, so that the order in which they are added shows.
inline void fill_floats(std::span<std::byte> to, std::uint64_t seed) {
  random_numbers random(seed);
  for (std::size_t at = 0; at + 4 <= to.size(); at += 4) {
    const float value =
        static_cast<float>(random.below(2'000'001U)) * static_cast<float>(1U << random.below(20U));
    std::memcpy(to.data() + at, &value, 4);
  }
}

inline std::vector<std::byte> copy_of(std::span<const std::byte> bytes) {
  return {bytes.begin(), bytes.end()};
}

/// Elements that are in `a` and, as `both` says, in `b` or not.
inline std::uint64_t count_elements(const llmmem::element_runs& a, const llmmem::element_runs& b, bool both) {
  std::uint64_t count = 0;
  const auto less = elements_of(b);
  for (const std::uint64_t each : elements_of(a)) {
    if (less.contains(each) == both) ++count;
  }
  return count;
}

inline constexpr std::uint64_t one_second = 1'000'000'000;

/// All ranks of a simulated world, joined; they leave together.
template <class Body>
void in_sim_world(std::uint32_t world, std::uint64_t seed, Body body) {
  using namespace llmmem;
  testing::sim_network net({.seats = world, .seed = seed});
  net.run([&](testing::sim_endpoint& end) {
    communicator ranks(end);
    ranks.join(ranks.after(one_second)).value();
    host_space space({.budget = 1 << 24, .name = "rank"});
    body(ranks, space, to_index(ranks.rank()));
    ranks.agree(0, ranks.after(60 * one_second)).value();
  });
}

/// The same of threads.
template <class Body>
void in_thread_world(std::uint32_t world, Body body) {
  using namespace llmmem;
  thread_network net(world);
  std::vector<std::thread> threads;
  for (std::uint32_t seat = 0; seat < world; ++seat) {
    threads.emplace_back([&, seat] {
      thread_endpoint end(net, seat_id{seat});
      communicator ranks(end);
      ranks.join(ranks.after(10 * one_second)).value();
      host_space space({.budget = 1 << 26, .name = "rank"});
      body(ranks, space, to_index(ranks.rank()));
      ranks.agree(0, ranks.after(60 * one_second)).value();
    });
  }
  for (std::thread& each : threads)
    each.join();
}

template <class Ranks>
std::uint64_t sent_by(Ranks& ranks) {
  std::uint64_t bytes = 0;
  for (const llmmem::seat_id seat : ranks.seats())
    bytes += ranks.traffic(seat).sent_bytes;
  return bytes;
}

}  // namespace llmmem_tests
