/// @file
/// How long a snapshot delays the next change of the state, by the size of the ring. The floor is a memcpy of
/// the state; a ring of R bytes for S of state should cost R at its rate and S - R at the disk's, where the
/// disk's is that of `raw_write` in the same round: O_DIRECT, blocks of 4 MiB, without its syncs.
///
///   stall/llmmem/ring:<MiB>   `over_goal`: the stall, by what it should be (the goal is 1.1 at most);
///                             `over_memcpy`: by the memcpy; `peak_of_ring`: staging memory, by what was
///                             allowed

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/disk.hpp"
#include "checkpoint/saves.hpp"

namespace {

using namespace llmmem_benchmarks;

struct stall_fixture {
  saved_state state{};
  host_memory copy{state_bytes()};
  bench_folder folder{};
};

[[nodiscard]] std::vector<std::uint64_t> rings() {
  std::vector<std::uint64_t> all;
  for (std::uint64_t ring = std::uint64_t{16} << 20; ring < state_bytes(); ring *= 2)
    all.push_back(ring);
  all.push_back(whole_ring());
  return all;
}

[[nodiscard]] std::string name_of(std::uint64_t ring) {
  return "llmmem/ring:" + std::to_string(ring >> 20);
}

const int added = [] {
  std::vector<std::string> whom{"floor", "raw_write"};
  for (const std::uint64_t ring : rings())
    whom.push_back(name_of(ring));
  const auto make = [] {
    const auto fixture = std::make_shared<stall_fixture>();
    std::vector<take_turn> turns{
        [=] {
          const std::span<std::byte> from = fixture->state.bytes();
          return turn{seconds_of([&] { std::memcpy(fixture->copy.data(), from.data(), from.size()); }), {}};
        },
        [=] {
          fixture->folder.settle();
          turn taken = write_raw(fixture->folder.path, fixture->state.bytes(), page_cache::past_it);
          taken.seconds = taken.told["write_ms"] * 1e-3;
          return taken;
        }};
    for (const std::uint64_t ring : rings())
      turns.push_back([=] { return save_once(fixture->folder, fixture->state, ring, until::mutable_again); });
    return turns;
  };
  return add_experiment(
      "stall", "", whom, make, [](benchmark::State& state, const outcome& all, const std::string& who) {
        for (const std::uint64_t ring : rings()) {
          if (who != name_of(ring)) continue;
          const double in_ring =
              std::min(1.0, static_cast<double>(ring) / static_cast<double>(state_bytes()));
          const auto over_goal = [&](const std::vector<double>& s) {
            return s[2] / (s[0] * in_ring + s[1] * (1 - in_ring));
          };
          count(state, "over_goal", all.by_round({"floor", "raw_write", who}, over_goal));
          count(state, "over_memcpy",
                all.by_round({"floor", who}, [](const std::vector<double>& s) { return s[1] / s[0]; }));
        }
      });
}();

}  // namespace
