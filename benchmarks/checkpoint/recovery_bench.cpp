/// @file
/// A state lost with its process, restored to a fresh one from a peer's memory and from a file, each compared
/// with its limit.
///
///   recovery/memory      redundant_replica::recover, mirror:2, two ranks over Unix sockets: who owns what,
///                        the bytes, their checksums; into memory of its own, fresh as the process is
///   recovery/memory_into the same into memory of the caller's that is there, as an engine's parameters are,
///                        and the raw socket's
///   recovery/raw_socket  as many bytes through one Unix socket, and nothing else
///   recovery/file        load_checkpoint with checksums, past the page cache
///   recovery/raw_direct  4 readers of 4 MiB each, no copy to where it belongs
///
/// share_of_X: the share of X's rate in the same round.

#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/socket_endpoint.hpp>
#include <llmmem/redundant_replica.hpp>

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/disk.hpp"
#include "checkpoint/loads.hpp"

namespace {

using namespace llmmem_benchmarks;
using llmmem::part_bytes;
using llmmem::part_id;
using llmmem::seat_id;

constexpr std::uint64_t second = 1'000'000'000;
constexpr seat_id survivor{0};
constexpr seat_id victim{1};

/// Two ranks that keep a state for each other: one lives, and the other dies in each turn and starts again.
class peer_memory {
 public:
  explicit peer_memory(std::span<const std::byte> state)
      : state_(state), sizes_{64, state.size()}, lives_([this] { live(); }) {
    rank first(*this, victim);
    first.recover();
    first.keep({{part_id{1}, state_}});
  }
  peer_memory(const peer_memory&) = delete;
  peer_memory& operator=(const peer_memory&) = delete;
  ~peer_memory() {
    is_over_ = true;
    lives_.join();
  }

  /// @param into  the destination; none: the replica's own memory.
  [[nodiscard]] turn give_back(std::span<std::byte> into = {}) {
    rank fresh(*this, victim);
    turn taken;
    taken.seconds = seconds_of([&] {
      if (into.empty()) return fresh.recover();
      const auto room = [into](part_id) { return into; };
      fresh.replica.recover(fresh.ranks.after(60 * second), room).value();
    });
    const auto got = fresh.replica.recovered(part_id{1});
    if (got.size() != state_.size() || std::memcmp(got.data(), state_.data(), got.size()) != 0)
      throw std::runtime_error("what was given back is not what was kept");
    fresh.agree();
    return taken;
  }

 private:
  /// A process of the job, as a thread.
  struct rank {
    rank(const peer_memory& job, seat_id seat)
        : end({.seat = seat, .seats = 2, .folder = job.folder_.path}),
          ranks(end),
          replica(ranks, llmmem::redundancy_scheme::mirror(2), job.sizes_, homes) {
      ranks.join(ranks.after(60 * second)).value();
    }

    void recover() { replica.recover(ranks.after(60 * second)).value(); }
    void keep(const std::vector<part_bytes>& own) {
      replica.keep(1, own, ranks.after(60 * second)).value();
      agree();
      replica.commit();
    }
    llmmem::comm::agreed agree() { return ranks.agree(1, ranks.after(60 * second)).value(); }

    static constexpr std::array<seat_id, 2> homes{survivor, victim};
    llmmem::socket_endpoint end;
    llmmem::communicator<llmmem::socket_endpoint> ranks;
    llmmem::redundant_replica<llmmem::communicator<llmmem::socket_endpoint>> replica;
  };

  void live() {
    rank mine(*this, survivor);
    const std::array<std::byte, 64> own{};
    mine.recover();
    mine.keep({{part_id{0}, own}});
    while (!is_over_) {
      mine.ranks.poll();
      const bool is_alone = to_number(mine.ranks.world()) == 1;
      if (is_alone ? mine.ranks.waiting().empty() : mine.ranks.failed().empty()) {
        std::this_thread::sleep_for(std::chrono::microseconds(200));
        continue;
      }
      mine.ranks.admit(mine.agree());
      mine.recover();
      if (to_number(mine.ranks.world()) == 2) mine.agree();
    }
  }

  bench_folder folder_{};
  std::span<const std::byte> state_;
  std::array<std::uint64_t, 2> sizes_;
  std::atomic<bool> is_over_{false};
  std::thread lives_;
};

/// Sends `from` through a socket into `into`.
[[nodiscard]] turn send_raw(std::span<const std::byte> from, std::span<std::byte> into) {
  std::array<int, 2> both{};
  if (::socketpair(AF_UNIX, SOCK_STREAM, 0, both.data()) != 0) throw system_trouble("socketpair");
  std::atomic<bool> is_bad{false};
  turn taken;
  taken.seconds = seconds_of([&] {
    std::thread sender([&] {
      for (std::size_t at = 0; at < from.size();) {
        const ssize_t put = ::write(both[0], from.data() + at, from.size() - at);
        if (put <= 0) is_bad = true;
        if (put <= 0) break;
        at += static_cast<std::size_t>(put);
      }
      ::close(both[0]);
    });
    for (std::size_t at = 0; at < into.size();) {
      const ssize_t got = ::read(both[1], into.data() + at, into.size() - at);
      if (got <= 0) is_bad = true;
      if (got <= 0) break;
      at += static_cast<std::size_t>(got);
    }
    sender.join();
  });
  ::close(both[1]);
  if (is_bad) throw std::runtime_error("a socket gave up");
  return taken;
}

const int added = [] {
  const std::vector<std::string> whom{"memory", "memory_into", "raw_socket", "file", "raw_direct"};
  const auto make = [] {
    const auto file = std::make_shared<load_fixture>();
    const auto state = std::make_shared<saved_state>();
    const auto into = std::make_shared<host_memory>(state_bytes());
    const auto peer = std::make_shared<peer_memory>(state->bytes());
    return std::vector<take_turn>{
        [=] { return peer->give_back(); },
        [=] { return peer->give_back(into->span().first(state->bytes().size())); },
        [=] { return send_raw(state->bytes(), into->span().first(state->bytes().size())); },
        [=] {
          return file->load(llmmem::verification::checksums, llmmem::direct_io::preferred, warmth::cold,
                            false);
        },
        [=] {
          file->make(warmth::cold);
          return read_raw(file->file(), 4, page_cache::past_it);
        },
    };
  };
  return add_experiment("recovery", "", whom, make,
                        [](benchmark::State& bench, const outcome& all, const std::string& who) {
                          for (const char* limit : {"raw_socket", "raw_direct"})
                            count_share(bench, all, who, limit);
                          bench.SetBytesProcessed(static_cast<std::int64_t>(state_bytes()));
                        });
}();

}  // namespace
