#include <llmmem/transfer/link_model.hpp>
#include <llmmem/transfer/meter.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <string>

using namespace llmmem;

namespace {

/// A clock that a test moves.
struct hand_clock {
  const std::uint64_t* now = nullptr;
  [[nodiscard]] std::uint64_t now_ns() const noexcept { return *now; }
};

constexpr link_model two_speeds{.bytes_per_second = 2'000'000'000, .offload_bytes_per_second = 1'000'000'000};
static_assert(transfer_ns(two_speeds, 4'000) == 2'000);
static_assert(transfer_ns(two_speeds, 4'000, link_direction::offload) == 4'000);
static_assert(transfer_ns({.bytes_per_second = 2'000'000'000}, 4'000, link_direction::offload) == 2'000);

}  // namespace

TEST_CASE("a meter sums moved bytes by link and direction, and waits by cause") {
  std::uint64_t now = 100;
  transfer::meter<2, hand_clock> counted(hand_clock{&now});
  counted.moved(0, link_direction::onboard, 10);
  counted.moved(0, link_direction::onboard, 5);
  counted.moved(1, link_direction::offload, 7);
  {
    const auto wait = counted.stalling(stall_cause::budget);
    now += 30;
  }
  counted.stalled(stall_cause::codec, 4);
  counted.stalled(stall_cause::codec, 0);
  const auto& stats = counted.stats();
  CHECK(stats.links[0] == link_flow{{15, 2}, {}});
  CHECK(stats.links[1] == link_flow{{}, {7, 1}});
  CHECK(stats.stalls[stall_cause::budget] == 30);
  CHECK(stats.stalls.total() == 34);
  CHECK(stats.stalled == 2);

  transfer::meter<2> other;
  other.absorb(stats);
  other.absorb(stats);
  CHECK(other.stats().links[1][link_direction::offload].bytes == 14);
  CHECK(other.stats().stalls.total() == 68);
  CHECK(other.stats().stalled == 4);
  counted.reset();
  CHECK(counted.stats() == transfer::meter_stats<2>{});
}

TEST_CASE("every cause of a stall has a name") {
  CHECK(std::string(name_of(stall_cause::demand_fetch)) == "demand_fetch");
  CHECK(std::string(name_of(stall_cause::io_error_retry)) == "io_error_retry");
}
