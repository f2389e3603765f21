/// @file
/// Snapshots by copy on write, compared with a memcpy of the same state.
///
///   cow/snapshot         to take one; `share_of_time`: of the memcpy's, the goal is less than 0.01
///   cow/step/live:P      a step that rewrites P percent of the pages, spread evenly, a snapshot of the state
///                        being held: `added_over_copy` is what it takes longer than without a snapshot, by
///                        what the copied bytes take at the memcpy's rate (the goal is 1.3 at most)
///   cow/step/free:P      the same step without a snapshot
///   cow/step/copy:P      the copies alone, of the same pages to the same pool

#include <llmmem/version/cow_range.hpp>

#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/state.hpp"

namespace {

using namespace llmmem_benchmarks;

constexpr int percents[] = {1, 10, 50, 100};

class cow_fixture {
 public:
  cow_fixture() : range_(state_.span(), pool_.span()) {}

  [[nodiscard]] turn copy_all() {
    return {seconds_of([&] { std::memcpy(pool_.data(), state_.data(), state_.span().size()); }), {}};
  }

  /// After a step that has written everything, so that all pages have changed.
  [[nodiscard]] turn take_snapshot() {
    write_pages(100);
    llmmem::cow_snapshot kept;
    const double seconds = seconds_of([&] { kept = range_.snapshot().value(); });
    return {seconds, {{"us", seconds * 1e6}}};
  }

  [[nodiscard]] turn step(int percent, bool is_live) {
    turn taken;
    for (int i = 0; i < repeats(percent); ++i) {
      llmmem::cow_snapshot kept;
      if (is_live) kept = range_.snapshot().value();
      taken.seconds += seconds_of([&] { write_pages(percent); }) / repeats(percent);
    }
    return taken;
  }

  /// Copies the pages that a step writes to the pool, in the order of the writes.
  [[nodiscard]] turn copy_pages(int percent) {
    const std::uint64_t page = range_.page_bytes();
    turn taken;
    for (int i = 0; i < repeats(percent); ++i) {
      taken.seconds += seconds_of([&] {
                         std::uint64_t to = 0;
                         each_page(percent, [&](std::uint64_t at) {
                           std::memcpy(pool_.data() + to, state_.data() + at, page);
                           to += page;
                         });
                       }) /
                       repeats(percent);
    }
    return taken;
  }

  [[nodiscard]] static double bytes_written(int percent) {
    const std::uint64_t page = llmmem::copy_on_write{}.page_bytes;
    std::uint64_t pages = 0;
    for (std::uint64_t i = 0; i < state_bytes() / page; ++i)
      pages += is_written(i, percent) ? 1U : 0U;
    return static_cast<double>(pages * page);
  }

 private:
  [[nodiscard]] static int repeats(int percent) { return percent < 10 ? 16 : percent < 50 ? 4 : 1; }
  [[nodiscard]] static bool is_written(std::uint64_t page, int percent) {
    const auto part = static_cast<std::uint64_t>(percent);
    return (page + 1) * part / 100 != page * part / 100;
  }
  template <class Visit>
  void each_page(int percent, Visit visit) {
    for (std::uint64_t i = 0; i < range_.pages(); ++i) {
      if (is_written(i, percent)) visit(i * range_.page_bytes());
    }
  }
  void write_pages(int percent) {
    each_page(percent, [&](std::uint64_t at) {
      const std::span<std::byte> page = range_.write(at, range_.page_bytes()).value();
      auto* const values = reinterpret_cast<std::uint32_t*>(page.data());
      for (std::size_t i = 0; i < page.size() / sizeof(std::uint32_t); ++i)
        values[i] += 3;
      benchmark::ClobberMemory();
    });
  }

  host_memory state_{state_bytes(), 1};
  host_memory pool_{state_bytes(), 1};
  llmmem::cow_range range_;
};

const int added = [] {
  std::vector<std::string> whom{"floor", "snapshot"};
  for (const int percent : percents) {
    for (const char* kind : {"step/free:", "step/live:", "step/copy:"})
      whom.push_back(kind + std::to_string(percent));
  }
  const auto make = [] {
    const auto fixture = std::make_shared<cow_fixture>();
    std::vector<take_turn> turns{[=] { return fixture->copy_all(); },
                                 [=] { return fixture->take_snapshot(); }};
    for (const int percent : percents) {
      turns.push_back([=] { return fixture->step(percent, false); });
      turns.push_back([=] { return fixture->step(percent, true); });
      turns.push_back([=] { return fixture->copy_pages(percent); });
    }
    return turns;
  };
  return add_experiment(
      "cow", "", whom, make, [](benchmark::State& state, const outcome& all, const std::string& who) {
        if (who == "snapshot") {
          count(state, "share_of_time",
                all.by_round({"floor", who}, [](const std::vector<double>& s) { return s[1] / s[0]; }));
        }
        for (const int percent : percents) {
          const std::string number = std::to_string(percent);
          if (who != "step/live:" + number) continue;
          const double part = cow_fixture::bytes_written(percent) / static_cast<double>(state_bytes());
          count(state, "added_over_copy",
                all.by_round({"floor", "step/free:" + number, who},
                             [&](const std::vector<double>& s) { return (s[2] - s[1]) / (s[0] * part); }));
          count(state, "over_free",
                all.by_round({"step/free:" + number, who},
                             [](const std::vector<double>& s) { return s[1] / s[0]; }));
        }
      });
}();

}  // namespace
