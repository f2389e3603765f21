/// @file
/// `fault_plan`: which ranks die, and when: drawn by a seed, within the redundancy's tolerance.
#pragma once

#include <llmmem/comm/id_set.hpp>
#include <llmmem/comm/ranks.hpp>
#include <llmmem/redundancy/placement.hpp>
#include <llmmem/redundancy/replica_map.hpp>

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "survive_failures/plan.hpp"

namespace survive_failures {

/// A fault of some ranks at once.
enum class fault_kind : std::uint8_t {
  kill,   ///< they end at once
  stop,   ///< one is stopped until the ranks that wait for it kill it
  pause,  ///< one is stopped for a while, and continues: slow, not dead
};

struct planned_fault {
  fault_kind kind = fault_kind::kill;
  std::uint64_t after_step = 0;        ///< not before this many steps are committed
  std::uint64_t delay_ns = 0;          ///< and this much later: at any moment of a step
  std::vector<std::uint32_t> seats{};  ///< one or more
};

/// Draws `plan.faults` faults, evenly over the steps; each hits a complete job. One in three hits several
/// ranks at once, any set whose loss the redundancy tolerates; of processes, one in four is stopped instead.
[[nodiscard]] inline std::vector<planned_fault> plan_faults(const job_plan& plan) {
  const llmmem::replica_map map =
      llmmem::ring_neighbours().place(plan.redundancy, llmmem::rank_count{plan.ranks});
  std::mt19937_64 random(plan.seed * 0x9E37'79B9'7F4A'7C15U + 0xFA17);
  std::vector<planned_fault> all;
  for (std::uint32_t i = 0; i < plan.faults; ++i) {
    planned_fault fault;
    fault.after_step = plan.steps * (i + 1) / (std::uint64_t{plan.faults} + 1);
    fault.delay_ns = random() % 20'000'000;
    const auto only = static_cast<std::uint32_t>(random() % plan.ranks);
    fault.seats.push_back(only);
    const std::uint64_t sort = random() % 12;
    if (sort < 3 && plan.transport == transport_kind::sockets) {
      fault.kind = sort == 0 ? fault_kind::pause : fault_kind::stop;
    } else if (sort >= 8 && plan.ranks > 2) {
      llmmem::rank_set several;
      several.insert(llmmem::rank_id{only});
      std::vector<std::uint32_t> seats{only};
      for (std::uint32_t seat = 0; seat < plan.ranks; ++seat) {
        if (seat == only || random() % 2 != 0 || seats.size() + 1 == plan.ranks) continue;
        llmmem::rank_set more = several;
        more.insert(llmmem::rank_id{seat});
        if (!map.survives(more)) continue;
        several = more;
        seats.push_back(seat);
      }
      fault.seats = seats;
    }
    all.push_back(fault);
  }
  return all;
}

}  // namespace survive_failures
