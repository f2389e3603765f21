#include <llmmem/comm/communicator.hpp>
#include <llmmem/error.hpp>
#include <llmmem/testing/sim_network.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "support/error_text.hpp"
#include "support/sim_world.hpp"

namespace {

using namespace llmmem;
using namespace llmmem::testing;
using llmmem_tests::sim_ranks;

constexpr std::uint64_t second = 1'000'000'000;
constexpr std::uint64_t message_bytes = 1'000'000;
constexpr std::uint64_t message_ns = 1'000'000;  // at 1 GB/s
constexpr std::uint64_t delay_ns = 5'000;

/// As long as that, but for the time that the calls take themselves.
bool is_about(std::uint64_t ns, std::uint64_t wanted) {
  return ns >= wanted && ns < wanted + message_ns / 10;
}

/// All frames take as long, and the links carry 1 GB/s each way.
sim_options with_links(std::uint32_t seats) {
  return {.seats = seats,
          .min_delay_ns = delay_ns,
          .max_delay_ns = delay_ns,
          .frame_bytes = 100'000,
          .lane_bytes = 4 * message_bytes,
          .bytes_per_second = 1'000'000'000};
}

/// How long `body` takes on the slowest of the ranks, from when they all begin.
template <class Body>
std::uint64_t virtual_ns_of(const sim_options& options, Body body) {
  sim_network net(options);
  std::vector<std::uint64_t> ends(options.seats);
  constexpr std::uint64_t begins = second;
  net.run([&](sim_endpoint& end) {
    sim_ranks ranks(end);
    ranks.join(ranks.after(second)).value();
    end.work(begins - end.now_ns());
    body(ranks);
    ends[to_index(ranks.rank())] = end.now_ns() - begins;
    ranks.agree(0, ranks.after(second)).value();
  });
  std::uint64_t most = 0;
  for (const std::uint64_t each : ends)
    most = each > most ? each : most;
  return most;
}

void send_message(sim_ranks& ranks, std::uint32_t to) {
  const std::vector<std::byte> message(message_bytes);
  ranks.send(message, rank_id{to}, 1, ranks.after(second)).value();
}
void take_message(sim_ranks& ranks, std::uint32_t from) {
  std::vector<std::byte> message(message_bytes);
  ranks.recv(message, rank_id{from}, 1, ranks.after(second)).value();
}

}  // namespace

TEST_SUITE("sim_network") {
  TEST_CASE("a message takes the time of its bytes over the links, plus the delay of a frame") {
    const auto body = [](sim_ranks& ranks) {
      if (ranks.rank() == rank_id{0}) send_message(ranks, 1);
      if (ranks.rank() == rank_id{1}) take_message(ranks, 0);
    };
    CHECK(is_about(virtual_ns_of(with_links(2), body), message_ns + delay_ns));
    sim_options unlimited = with_links(2);
    unlimited.bytes_per_second = 0;
    CHECK(is_about(virtual_ns_of(unlimited, body), delay_ns));
  }

  TEST_CASE("a process that sends to two others sends to one after another") {
    const auto body = [](sim_ranks& ranks) {
      if (ranks.rank() == rank_id{0}) send_message(ranks, 1);
      if (ranks.rank() == rank_id{0}) send_message(ranks, 2);
      if (ranks.rank() != rank_id{0}) take_message(ranks, 0);
    };
    CHECK(is_about(virtual_ns_of(with_links(3), body), 2 * message_ns + delay_ns));
  }

  TEST_CASE("a process that receives from two others receives from each at half the speed") {
    const auto body = [](sim_ranks& ranks) {
      if (ranks.rank() != rank_id{0}) return send_message(ranks, 0);
      take_message(ranks, 1);
      take_message(ranks, 2);
    };
    CHECK(is_about(virtual_ns_of(with_links(3), body), 2 * message_ns + delay_ns));
  }

  TEST_CASE("two ranks that exchange messages use both directions at once") {
    const auto body = [](sim_ranks& ranks) {
      const std::uint32_t other = 1 - to_index(ranks.rank());
      send_message(ranks, other);
      take_message(ranks, other);
    };
    CHECK(is_about(virtual_ns_of(with_links(2), body), message_ns + delay_ns));
  }

  TEST_CASE("a link that is too fast to compute with is refused") {
    sim_options options = with_links(2);
    options.bytes_per_second = ~std::uint64_t{0};
    CHECK(llmmem_tests::text_of([&] { sim_network net(options); }) ==
          "sim_network: a bandwidth of 18446744073709551615 bytes per second; it must be 1 to 2^60");
  }
}
