/// @file
/// The job in virtual time.
#pragma once

#include <llmmem/comm/communicator.hpp>
#include <llmmem/error.hpp>
#include <llmmem/testing/sim_network.hpp>

#include <csignal>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "survive_failures/events.hpp"
#include "survive_failures/fault_plan.hpp"
#include "survive_failures/job_log.hpp"
#include "survive_failures/plan.hpp"
#include "survive_failures/survivor.hpp"
#include "train_gpt/corpus.hpp"

namespace survive_failures {

/// Runs the job in a `sim_network`: the same for the same seed. A shard takes 2 ms to compute; the network
/// draws the times of frames.
/// @throws llmmem::error  if more was lost than the redundancy tolerates; and the exceptions of ranks.
inline void run_simulated(const job_plan& plan, const std::vector<planned_fault>& faults,
                          const train_gpt::corpus& text, job_log& log) {
  using llmmem::testing::sim_endpoint;
  llmmem::testing::sim_network net({.seats = plan.ranks,
                                    .seed = plan.seed,
                                    .frame_bytes = 1U << 16,
                                    .lane_bytes = 1U << 18,
                                    .max_calls = ~std::uint64_t{0}});
  for (const planned_fault& fault : faults) {
    for (const std::uint32_t seat : fault.seats)
      net.restart_after(llmmem::seat_id{seat}, plan.restart_ms * 1'000'000);
  }
  std::size_t next = 0;
  // One process runs at a time, so nothing here needs a lock.
  const auto hear = [&](const job_event& event) {
    log.hear(event);
    if (next == faults.size() || !log.is_complete() || log.step() < faults[next].after_step) return;
    const planned_fault& fault = faults[next++];
    log.fault(fault.seats, SIGKILL, net.now_ns() + fault.delay_ns);
    for (const std::uint32_t seat : fault.seats)
      net.kill_at(llmmem::seat_id{seat}, net.now_ns() + fault.delay_ns);
  };
  net.run([&](sim_endpoint& end) {
    const std::uint32_t seat = to_index(end.self());
    log.started(seat, 0);
    try {
      llmmem::communicator ranks(end);
      // A process that comes after the end finds no rank.
      const auto joined = ranks.join(ranks.after(10'000'000'000));
      if (!joined && (log.finished() != 0 || log.is_lost())) return;
      joined.value();
      survivor training(ranks, plan, text, hear);
      if (training.run() == ending::finished) return;
    } catch (const llmmem::testing::process_killed&) {
      log.died(seat, SIGKILL);
      throw;
    }
    log.died(seat, 0);
  });
  if (log.is_lost()) throw llmmem::error("more ranks were lost than the redundancy bears");
}

}  // namespace survive_failures
