// What only a transport shows whose frames come in pieces: a buffer is in use between two looks at it.
#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/socket_endpoint.hpp>

#include <doctest/doctest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "support/temporary_folder.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr std::uint64_t second = 1'000'000'000;
constexpr std::uint32_t long_frame = 48U << 20;

socket_options seat_in(const std::string& folder, std::uint32_t seat) {
  return {.seat = seat_id{seat}, .seats = 2, .folder = folder, .frame_bytes = long_frame};
}

std::vector<std::byte> pattern(std::size_t size) {
  std::vector<std::byte> made(size);
  for (std::size_t i = 0; i < size; ++i)
    made[i] = static_cast<std::byte>(i * 31 + i / 251);
  return made;
}

}  // namespace

TEST_SUITE("communicator") {
  TEST_CASE("the rest of a message that no rank requested is written nowhere once its epoch is over") {
    const temporary_folder folder;
    const std::string where = folder.path();
    const std::vector<std::byte> next = pattern(100'000);
    const auto talk = [&](std::uint32_t seat, auto before, auto after) {
      return std::thread([&where, seat, before, after] {
        socket_endpoint end(seat_in(where, seat));
        communicator ranks(end);
        ranks.join(ranks.after(20 * second)).value();
        before(ranks);
        ranks.revoke();
        const llmmem::comm::agreed outcome = ranks.agree(1, ranks.after(20 * second)).value();
        CHECK(outcome.failed.empty());
        ranks.shrink(outcome);
        after(ranks);
        // Nobody leaves before the other has heard all.
        static_cast<void>(ranks.agree(1, ranks.after(20 * second)));
      });
    };
    std::thread sender = talk(
        0,
        [](auto& ranks) {
          // Begun, and given up: its rest follows all the same, while others agree that the epoch is over.
          const std::vector<std::byte> lost(long_frame);
          CHECK(ranks.send(lost, rank_id{1}, 1, ranks.after(second / 5)).code() == errc::peer_timed_out);
        },
        [&](auto& ranks) { CHECK(ranks.send(next, rank_id{1}, 2, ranks.after(20 * second)).has_value()); });
    std::thread receiver = talk(
        1,
        [](auto& ranks) {
          // A look at a time: one that may wait stays until the whole frame is there.
          for (; !ranks.probe(rank_id{0}, 1, {0}).has_value(); ranks.poll())
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          std::this_thread::sleep_for(std::chrono::milliseconds(400));
        },
        [&](auto& ranks) {
          std::vector<std::byte> got(next.size());
          CHECK(ranks.recv(got, rank_id{0}, 2, ranks.after(20 * second)).has_value());
          CHECK(got == next);
        });
    sender.join();
    receiver.join();
  }
}
