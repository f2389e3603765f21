// What a program does between two iterations ends no plan.
#include <llmmem/eviction/min.hpp>
#include <llmmem/prefetch_schedule.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/tiered_buffer.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

using namespace llmmem;

namespace {

constexpr std::uint64_t page = 4096;

/// Eight chunks over a tier of four, with a schedule that may not leave its plan in silence.
struct training {
  using buffer_type = tiered_buffer<tier<host_space, min_eviction>, host_space>;

  training() {
    for (int i = 0; i < 8; ++i) {
      chunks.push_back(schedule.create(page).value());
      std::ranges::fill(schedule.write(chunks.back()).value().span(), std::byte{1});
    }
  }
  void iteration() {
    schedule.begin_iteration();
    for (const chunk_handle each : chunks)
      schedule.update(each).value().span()[0] ^= std::byte{1};
    schedule.end_iteration();
  }
  /// The last first, and with a lease that is held across.
  void evaluation() {
    for (std::size_t i = chunks.size(); i-- > 0;)
      schedule.read(chunks[i]).value();
    const auto held = schedule.read(chunks[3]).value();
    schedule.read(chunks[1]).value();
  }

  host_space top{{.budget = 4 * page}};
  host_space below{{.budget = 16 * page}};
  buffer_type buffer{{}, {top, 4 * page}, {below, 16 * page}};
  prefetch_schedule<buffer_type> schedule{
      buffer, {.links = {{.bytes_per_second = 1'000'000'000}}, .divergence = on_divergence::fall_back}};
  std::vector<chunk_handle> chunks{};
};

}  // namespace

TEST_CASE("an evaluation between two iterations is not part of the plan, and the plan continues after it") {
  training with;
  training without;
  for (std::uint64_t i = 1; i <= 6; ++i) {
    with.iteration();
    without.iteration();
    const prefetch_stats& stats = with.schedule.stats();
    CHECK(stats.on_plan == without.schedule.stats().on_plan);
    CHECK(stats.on_plan == 16 * (i - 1));
    CHECK(stats.between == 20 * (i < 2 ? 0 : i - 2));
    CHECK(stats.inserted + stats.skipped + stats.diverged == 0);
    CHECK(stats.recordings == 1);
    with.evaluation();
    CHECK(with.schedule.state() == (i == 1 ? schedule_state::idle : schedule_state::replaying));
  }
  // What it moved was brought again: nothing waits for what the plan believed to be there.
  CHECK(with.buffer.audit().empty());
}
