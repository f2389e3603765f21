/// @file
/// A lost rank's state, restored in a simulated cluster from its peers' memory over the network, and from a
/// storage that all ranks share. Times are virtual, and the same on every machine. Their assumptions are the
/// two rates, the time until a death is noticed, and that memory and checksums take no time.
///
///   recovery_sim/memory   redundant_replica::recover; the others have their own state still
///   recovery_sim/storage  each rank reads its own state again, at the shared storage's rate: what an older
///                         checkpoint asks for. Steps since that checkpoint are lost beside, and not counted.
///
/// Both from the death until the slowest rank has its state: it is noticed, agreed on, a fresh process comes.
/// share_of_limit: the share of the rate that its link has, of the bytes that must move, after the notice.
///
/// LLMMEM_BENCH_SIM_LINK_GBIT     what a rank sends, and takes, a second (400)
/// LLMMEM_BENCH_SIM_STORAGE_GBIT  what all ranks together read a second (20)
/// LLMMEM_BENCH_SIM_NOTICE_US     until a death is noticed (1000)
/// LLMMEM_BENCH_SIM_MIB           state of a rank (64); all of it is in this process, some four times over

#include <llmmem/comm/communicator.hpp>
#include <llmmem/redundant_replica.hpp>
#include <llmmem/testing/sim_network.hpp>
#include <llmmem/testing/virtual_link.hpp>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "checkpoint/experiment.hpp"

namespace {

using namespace llmmem;
using llmmem::testing::sim_endpoint;
using llmmem::testing::sim_network;
using llmmem::testing::sim_options;
using llmmem::testing::virtual_link;
using llmmem_benchmarks::number_from_environment;
using ranks_of = communicator<sim_endpoint>;

constexpr std::uint64_t second = 1'000'000'000;
constexpr std::uint64_t dies_at = 100 * second;  // all state is kept by then
constexpr seat_id victim{1};

/// The simulated cluster.
struct cluster {
  std::uint32_t ranks = 4;
  std::uint64_t state_bytes = number_from_environment("LLMMEM_BENCH_SIM_MIB", 64) << 20;
  std::uint64_t link_rate = number_from_environment("LLMMEM_BENCH_SIM_LINK_GBIT", 400) * 125'000'000;
  std::uint64_t storage_rate = number_from_environment("LLMMEM_BENCH_SIM_STORAGE_GBIT", 20) * 125'000'000;
  std::uint64_t notice_ns = number_from_environment("LLMMEM_BENCH_SIM_NOTICE_US", 1000) * 1000;

  [[nodiscard]] sim_options options() const {
    return {.seats = ranks,
            .min_delay_ns = 5'000,
            .max_delay_ns = 20'000,
            .min_notice_ns = notice_ns,
            .max_notice_ns = notice_ns,
            .hard_silence_ns = 1000 * second,
            .frame_bytes = 1U << 20,
            .lane_bytes = 16U << 20,
            .bytes_per_second = link_rate};
  }
};

/// Waits for the death, and for a fresh process in that seat.
void bring_back(ranks_of& ranks, std::uint32_t seats) {
  if (ranks.endpoint().self() == victim) ranks.endpoint().work(2 * dies_at);  // it is killed during this
  do {
    ranks.admit(ranks.agree(0, ranks.after(500 * second)).value());
  } while (to_number(ranks.world()) < seats);
}

/// Returns the time from the death until the last rank has its state. `live(ranks, is_first)` is a process:
/// the first of its seat has a state and loses it; a later one calls `bring_back` and continues.
template <class Live>
double seconds_to_recover(const cluster& simulated, Live live) {
  sim_network net(simulated.options());
  net.kill_at(victim, dies_at);
  net.restart_after(victim, 0);
  std::uint64_t last = dies_at;
  net.run([&](sim_endpoint& end) {
    ranks_of ranks(end);
    ranks.join(ranks.after(500 * second)).value();
    live(ranks, end.incarnation() == 0);
    last = std::max(last, end.now_ns());  // without a lock, because one process runs at a time
    ranks.agree(0, ranks.after(500 * second)).value();
  });
  return static_cast<double>(last - dies_at) / static_cast<double>(second);
}

double from_memory(const cluster& simulated, const redundancy_scheme& scheme) {
  const std::vector<std::uint64_t> sizes(simulated.ranks, simulated.state_bytes);
  std::vector<seat_id> homes;
  for (std::uint32_t i = 0; i < simulated.ranks; ++i)
    homes.push_back(seat_id{i});
  return seconds_to_recover(simulated, [&](ranks_of& ranks, bool is_first) {
    const std::uint32_t seat = to_index(ranks.endpoint().self());
    const part_id part{seat};
    const std::vector<std::byte> state(simulated.state_bytes, static_cast<std::byte>(seat + 1));
    redundant_replica<ranks_of> replica(ranks, scheme, sizes, homes);
    if (is_first) {
      replica.recover(ranks.after(second)).value();
      const part_bytes own{part, state};
      replica.keep(1, {&own, 1}, ranks.after(50 * second)).value();
      ranks.agree(0, ranks.after(second)).value();
      replica.commit();
      bring_back(ranks, simulated.ranks);
    }
    replica.recover(ranks.after(500 * second)).value();
    if (!std::ranges::equal(replica.recovered(part), state))
      throw std::runtime_error("what was given back is not what was kept");
  });
}

double from_storage(const cluster& simulated) {
  virtual_link storage({.bytes_per_second = simulated.storage_rate});
  return seconds_to_recover(simulated, [&](ranks_of& ranks, bool is_first) {
    if (is_first) bring_back(ranks, simulated.ranks);
    const std::uint64_t now = ranks.endpoint().now_ns();
    ranks.endpoint().work(storage.schedule({now}, simulated.state_bytes).finish.ns - now);
  });
}

/// One iteration is one recovery in virtual time; iterations differ only in the frames' delays.
void recover(benchmark::State& bench, const std::string& scheme) {
  const cluster simulated{.ranks = static_cast<std::uint32_t>(bench.range(0))};
  const auto bytes = static_cast<double>(simulated.state_bytes);
  // The bytes that must move: k states to the rank that lost its own if states are coded, otherwise all of
  // it.
  const bool is_storage = scheme == "storage";
  const double most = static_cast<double>(is_storage ? simulated.storage_rate : simulated.link_rate);
  const std::uint32_t states = is_storage ? simulated.ranks : redundancy_scheme::parse(scheme).shape().data;
  const double least = bytes * states / most;
  double seconds = 0;
  for (auto _ : bench) {
    seconds = is_storage ? from_storage(simulated) : from_memory(simulated, redundancy_scheme::parse(scheme));
    bench.SetIterationTime(seconds);
  }
  bench.counters["limit_ms"] = 1e3 * least;
  bench.counters["share_of_limit"] = least / (seconds - static_cast<double>(simulated.notice_ns) / 1e9);
}

[[maybe_unused]] const bool is_registered = [] {
  for (const char* const scheme : {"mirror:2", "parity:3", "storage"}) {
    auto* const row = benchmark::RegisterBenchmark(
        (std::string("recovery_sim/") + scheme).c_str(),
        [scheme = std::string(scheme)](benchmark::State& bench) { recover(bench, scheme); });
    row->ArgName("ranks")->Arg(4)->Arg(16)->Iterations(1)->UseManualTime()->Unit(benchmark::kMillisecond);
  }
  return true;
}();

}  // namespace
