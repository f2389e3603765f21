/// @file
/// The cost of checkpoints for a training loop. A step reads all of the state and computes for about 50 ms in
/// total (forward and backward pass), then changes every value (the optimizer). Every tenth step is saved,
/// through a ring as large as the state. A turn is 20 steps; writes after those are not timed.
///
///   step/floor               no checkpoints
///   step/llmmem              a snapshot when a step begins; the optimizer waits for its permit
///   step/llmmem_small_ring   the same through the default ring
///   step/synchronous         the same checkpointer, waited for at once
///
/// `over_floor`: the step's time by the floor's; `stall_ms`: waited for permits, a snapshot

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/saves.hpp"

namespace {

using namespace llmmem_benchmarks;

constexpr std::uint64_t steps_of_turn = 20;
constexpr std::uint64_t steps_between = 10;

enum class saving : std::uint8_t { none, behind, at_once };

class step_fixture {
 public:
  step_fixture() {
    // Enough arithmetic for 50 ms minus the reads, by the fastest of several measurements, because other
    // programs may run.
    double reading = 1;
    double once = 1;
    for (int i = 0; i < 10; ++i) {
      reading = std::min(reading, seconds_of([&] { read_all(); }));
      once = std::min(once, seconds_of([&] { compute(64); }) / 64);
    }
    rounds_ = static_cast<int>(std::max(0.0, 0.050 - reading) / once);
  }

  [[nodiscard]] turn run(saving how, std::uint64_t ring) {
    checkpointer_setup<> setup(folder_.path + "/saves", state_, {.ring_bytes = ring});
    folder_.settle();
    turn taken;
    const double seconds = seconds_of([&] {
      for (std::uint64_t step = 0; step < steps_of_turn; ++step) {
        if (how != saving::none && step % steps_between == 0) {
          auto guard = setup.saves.begin_snapshot(step + 1, llmmem::host_state_view(state_.spans));
          if (how == saving::at_once) setup.saves.flush();
          pass();
          change(std::move(guard).mutate());
        } else {
          pass();
          change(setup.saves.gate().mutate());
        }
      }
    });
    setup.saves.flush();
    const llmmem::checkpointer_stats stats = setup.saves.stats();
    if (stats.committed != stats.begun) throw std::runtime_error("not committed: " + stats.last_error);
    taken.seconds = seconds / static_cast<double>(steps_of_turn);
    taken.told["stall_ms"] =
        stats.begun == 0 ? 0 : static_cast<double>(stats.stall_ns) * 1e-6 / static_cast<double>(stats.begun);
    return taken;
  }

 private:
  void read_all() {
    const std::span<std::byte> bytes = state_.bytes();
    const auto* const values = reinterpret_cast<const std::uint32_t*>(bytes.data());
    std::uint32_t sum = 0;
    for (std::size_t i = 0; i < bytes.size() / sizeof(std::uint32_t); ++i)
      sum ^= values[i];
    benchmark::DoNotOptimize(sum);
  }
  void compute(int rounds) {
    for (int round = 0; round < rounds; ++round) {
      for (float& each : block_)
        each = each * 0.999F + 0.001F;
      benchmark::ClobberMemory();
    }
  }
  void pass() {
    read_all();
    compute(rounds_);
  }
  void change(const llmmem::mutation_permit& /*permit*/) {
    const std::span<std::byte> bytes = state_.bytes();
    auto* const values = reinterpret_cast<std::uint32_t*>(bytes.data());
    for (std::size_t i = 0; i < bytes.size() / sizeof(std::uint32_t); ++i)
      values[i] += 3;
    benchmark::ClobberMemory();
  }

  saved_state state_{};
  bench_folder folder_{};
  std::vector<float> block_ = std::vector<float>(16'384, 0.5F);
  int rounds_ = 0;
};

const int added = [] {
  const auto make = [] {
    const auto fixture = std::make_shared<step_fixture>();
    const auto row = [=](saving how, std::uint64_t ring) -> take_turn {
      return [=] { return fixture->run(how, ring); };
    };
    return std::vector<take_turn>{
        row(saving::none, std::uint64_t{8} << 20), row(saving::behind, whole_ring()),
        row(saving::behind, llmmem::checkpointer_options{}.ring_bytes), row(saving::at_once, whole_ring())};
  };
  return add_experiment(
      "step", "", {"floor", "llmmem", "llmmem_small_ring", "synchronous"}, make,
      [](benchmark::State& state, const outcome& all, const std::string& who) {
        if (who == "floor") return;
        count(state, "over_floor",
              all.by_round({"floor", who}, [](const std::vector<double>& s) { return s[1] / s[0]; }));
      });
}();

}  // namespace
