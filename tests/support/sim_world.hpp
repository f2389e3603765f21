/// @file
/// Ranks of a simulated network that have joined.
#pragma once

#include <llmmem/comm/communicator.hpp>
#include <llmmem/testing/sim_network.hpp>

#include <cstdint>

namespace llmmem_tests {

using sim_ranks = llmmem::communicator<llmmem::testing::sim_endpoint>;

/// Calls `body(ranks, rank)` on each rank of a world; they leave together.
template <class Body>
void in_world(std::uint32_t world, std::uint64_t seed, Body body) {
  constexpr std::uint64_t second = 1'000'000'000;
  llmmem::testing::sim_network net({.seats = world, .seed = seed});
  net.run([&](llmmem::testing::sim_endpoint& end) {
    sim_ranks ranks(end);
    ranks.join(ranks.after(second)).value();
    body(ranks, to_index(ranks.rank()));
    ranks.agree(0, ranks.after(second)).value();
  });
}

}  // namespace llmmem_tests
