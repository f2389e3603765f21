/// @file
/// A process of four is killed: how long until the other three know, and until they have agreed on it. A
/// round starts four processes over Unix sockets, which wait for a message that never comes; the clock runs
/// from just before `kill` and is the machine's, the same for all. `seen` is when a survivor's wait ends,
/// `agreed` when it has revoked, agreed and begun the next epoch without the dead one. Of the three, the last
/// counts.
///
/// LLMMEM_BENCH_DEATHS  rounds of a row (1)

#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/socket_endpoint.hpp>
#include <llmmem/detail/monotonic.hpp>

#include <benchmark/benchmark.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "comm/local_job.hpp"

namespace {

using namespace llmmem;

constexpr std::uint32_t processes = 4;

/// The shared times, on the machine's clock; 0: not yet.
struct shared_times {
  std::array<std::atomic<std::uint64_t>, processes> joined{};
  std::array<std::atomic<std::uint64_t>, processes> seen{};
  std::array<std::atomic<std::uint64_t>, processes> agreed{};
};

struct unmap {
  void operator()(shared_times* times) const noexcept { ::munmap(times, sizeof(shared_times)); }
};

[[nodiscard]] std::unique_ptr<shared_times, unmap> share_times() {
  void* const room =
      ::mmap(nullptr, sizeof(shared_times), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (room == MAP_FAILED) throw std::runtime_error("no shared memory");
  return std::unique_ptr<shared_times, unmap>(new (room) shared_times);
}

/// @param killed  the process whose message all wait for.
int live(const socket_options& options, std::uint32_t killed, shared_times& times) {
  socket_endpoint end(options);
  communicator ranks(end);
  const std::uint32_t self = to_index(options.seat);
  if (!ranks.join(ranks.after(10'000'000'000))) return 3;
  times.joined[self] = end.now_ns();
  std::array<std::byte, 8> word{};
  const rank_id from{self == killed ? (self + 1) % processes : killed};
  const auto came = ranks.recv(word, from, 1, ranks.after(10'000'000'000));
  times.seen[self] = end.now_ns();
  if (came) return 4;
  ranks.revoke();
  const auto outcome = ranks.agree(~std::uint64_t{0}, ranks.after(5'000'000'000));
  if (!outcome) return 5;
  ranks.shrink(*outcome);
  times.agreed[self] = end.now_ns();
  return to_number(ranks.world()) == processes - 1 ? 0 : 6;
}

struct death_times {
  double seen_ms = 0;
  double agreed_ms = 0;
};

[[nodiscard]] death_times kill_one(llmmem_bench::socket_kind of, std::uint32_t killed) {
  const auto times = share_times();
  const llmmem_bench::bench_folder folder;
  socket_options options = llmmem_bench::job_options(of, processes, folder);
  std::vector<llmmem_bench::bench_process> all;
  for (std::uint32_t i = 0; i < processes; ++i) {
    options.seat = seat_id{i};
    all.emplace_back([&] { return live(options, killed, *times); });
  }
  for (int i = 0; i < 10'000 && std::count(times->joined.begin(), times->joined.end(), 0U) != 0; ++i)
    ::usleep(1000);
  ::usleep(5000);  // all are within `recv`
  const std::uint64_t began = detail::monotonic_ns();
  ::kill(all[killed].pid(), SIGKILL);
  death_times last;
  for (std::uint32_t i = 0; i < processes; ++i) {
    const int status = all[i].wait();
    if (i == killed) continue;
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) throw std::runtime_error("a survivor has failed");
    last.seen_ms = std::max(last.seen_ms, static_cast<double>(times->seen[i] - began) * 1e-6);
    last.agreed_ms = std::max(last.agreed_ms, static_cast<double>(times->agreed[i] - began) * 1e-6);
  }
  return last;
}

void put(benchmark::State& state, const std::string& name, std::vector<double>& times) {
  std::sort(times.begin(), times.end());
  state.counters[name + "_ms"] = times[times.size() / 2];
  state.counters[name + "_min"] = times.front();
  state.counters[name + "_max"] = times.back();
}

void death(benchmark::State& state, llmmem_bench::socket_kind of) {
  std::vector<double> seen;
  std::vector<double> agreed;
  for (auto _ : state) {
    // Kills each rank in turn, also the lowest one, which would lead the agreement.
    const death_times last = kill_one(of, static_cast<std::uint32_t>(seen.size()) % processes);
    seen.push_back(last.seen_ms);
    agreed.push_back(last.agreed_ms);
    state.SetIterationTime(last.agreed_ms * 1e-3);
  }
  put(state, "seen", seen);
  put(state, "agreed", agreed);
}

[[maybe_unused]] const bool is_registered = [] {
  const std::int64_t rounds = llmmem_bench::number("LLMMEM_BENCH_DEATHS", 1);
  benchmark::RegisterBenchmark(
      "death_of_four/llmmem/unix",
      [](benchmark::State& state) { death(state, llmmem_bench::socket_kind::local); })
      ->Iterations(rounds)
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond);
  benchmark::RegisterBenchmark("death_of_four/llmmem/tcp",
                               [](benchmark::State& state) { death(state, llmmem_bench::socket_kind::tcp); })
      ->Iterations(rounds)
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond);
  return true;
}();

}  // namespace
