/// @file
/// Processes that pass blocks to each other until one of them is killed, at any moment.
#pragma once

#include <llmmem/comm/socket_endpoint.hpp>
#include <llmmem/pool/kv_pool.hpp>
#include <llmmem/pool/shared_memory_mover.hpp>

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "pool/pool_cluster.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/temporary_folder.hpp"

namespace llmmem_tests {

/// What a process does when it is killed.
enum class moment : std::uint32_t { joining, asking, receiving, announcing, sending };
inline constexpr std::size_t moments = 5;

/// What each process says, in memory that all share.
struct kill_board {
  struct seat {
    std::atomic<std::uint32_t> now{0};
    std::atomic<bool> is_done{false};
    std::atomic<bool> is_wrong{false};   // a token, an invariant, or an exception
    std::atomic<bool> is_pinned{false};  // at the end
    std::atomic<std::uint64_t> fetched{0};
    std::atomic<std::uint64_t> cut{0};  // blocks that failed, or were late
  };
  std::array<seat, 3> seats{};
  std::atomic<bool> has_killed{false};  // until then all go on
  std::atomic<bool> is_over{false};

  kill_board() = default;
  kill_board(const kill_board&) = delete;
  kill_board& operator=(const kill_board&) = delete;
};

struct kill_totals {
  std::array<std::uint64_t, moments> at{};
  std::uint64_t kills = 0;
  std::uint64_t restarts = 0;
  std::uint64_t fetched = 0;
  std::uint64_t cut = 0;
};

inline const std::array kill_group{full_attention({"kv", 1, 16, 64})};  // blocks of 1 KiB

/// Serves prompts that other nodes serve as well, and then others until all are done.
template <class Node, class... Parts>
void live_until_killed(kill_board& board, socket_endpoint& end, std::uint64_t seed, Parts&... parts) {
  const std::uint32_t seat = to_index(end.self());
  kill_board::seat& mine = board.seats[seat];
  const auto says = [&](moment what) { mine.now = static_cast<std::uint32_t>(what); };
  random_numbers random(seed * 8 + seat);
  const node_form form{.groups = kill_group, .blocks = 240, .slots = 160, .lower_slots = 64, .tokens = 4096};
  Node node(end, form,
            {.patience_ns = 1'000'000'000, .directory_spans = 64, .domain = seat, .copies = 1, .hot_uses = 1},
            parts...);
  for (int i = 0; i < 200 && node.pool().peers() < 2; ++i)
    node.pool().progress(50'000);
  for (int i = 0; (i < 8 || !board.has_killed) && node.wrong().empty(); ++i) {
    says(moment::asking);
    const auto prompt = prompt_of(random.below(std::uint32_t{16}), 65 + random.below(std::uint64_t{2400}));
    const auto served = node.serve(prompt, [&](auto& request) {
      request.wait_for_answers();
      says(moment::receiving);
      request.fetch();
      request.wait();
      says(moment::announcing);
    });
    mine.fetched += served.fetched.blocks;
    mine.cut += served.fetched.failed_blocks + served.fetched.late_blocks;
    says(moment::sending);
    node.step();
    node.pool().progress(20'000);
  }
  mine.is_done = true;
  while (!board.is_over) {
    node.step();
    node.pool().progress(200'000);
  }
  const auto is_pinned = [&] { return node.tiers().stats().tiers[0].in_use != 0; };
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  while (is_pinned() && std::chrono::steady_clock::now() < limit) {
    node.step();
    node.pool().progress(200'000);
  }
  mine.is_pinned = is_pinned();
  if (!node.tiers().audit().empty() || !node.wrong().empty()) mine.is_wrong = true;
}

/// Kills one process of three, and perhaps starts another in its seat. The others must end their work.
/// @param live  called in each process with the board, its endpoint and the seed.
template <class Live>
void kill_one(std::uint64_t seed, kill_totals& totals, Live&& live) {
  CAPTURE(seed);
  random_numbers random(seed);
  const temporary_folder folder;
  void* const memory =
      ::mmap(nullptr, sizeof(kill_board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(memory != MAP_FAILED);
  kill_board& board = *::new (memory) kill_board;
  const auto start = [&](std::uint32_t seat, std::uint64_t which) {
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child != 0) return child;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    try {
      socket_endpoint end({.seat = seat_id{seat}, .seats = 3, .folder = folder.path(), .socket_bytes = 4096});
      live(board, end, which);
    } catch (const std::exception& failed) {
      board.seats[seat].is_wrong = true;
      std::fprintf(stderr, "node %u: %s\n", seat, failed.what());
    }
    ::_exit(0);
  };
  std::array<pid_t, 3> children{};
  for (std::uint32_t seat = 0; seat < 3; ++seat)
    children[seat] = start(seat, seed);
  const std::uint32_t victim = random.below(std::uint32_t{3});
  kill_board::seat& killed = board.seats[victim];
  // Early moments are as likely as late ones, though a process joins for a short time.
  const std::uint64_t wait_us = random.below(std::uint64_t{random.once_in(8) ? 3'000U : 40'000U});
  std::this_thread::sleep_for(std::chrono::microseconds(wait_us));
  ::kill(children[victim], SIGKILL);
  ::waitpid(children[victim], nullptr, 0);
  board.has_killed = true;
  ++totals.kills;
  ++totals.at[killed.now];
  const bool restarts = random.once_in(2);
  CHECK_FALSE(killed.is_wrong);
  if (restarts) {
    children[victim] = start(victim, seed + 1'000'000);
    ++totals.restarts;
  }
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  const auto is_done = [&] {
    for (std::uint32_t seat = 0; seat < 3; ++seat) {
      const kill_board::seat& each = board.seats[seat];
      if ((seat != victim || restarts) && !each.is_done && !each.is_wrong) return false;
    }
    return true;
  };
  while (!is_done() && std::chrono::steady_clock::now() < limit)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(is_done());
  board.is_over = true;
  for (std::uint32_t seat = 0; seat < 3; ++seat) {
    if (seat == victim && !restarts) continue;
    if (!is_done()) ::kill(children[seat], SIGKILL);
    int status = 0;
    ::waitpid(children[seat], &status, 0);
    CHECK(status == 0);
    CHECK_FALSE(board.seats[seat].is_wrong);
    CHECK_FALSE(board.seats[seat].is_pinned);
    totals.fetched += board.seats[seat].fetched;
    totals.cut += board.seats[seat].cut;
  }
  board.~kill_board();
  ::munmap(memory, sizeof(kill_board));
}

/// Kills one process of three in each of `count` runs. `scripts/soak` sets the factor to many.
template <class Live>
void kill_many(std::uint64_t count, Live&& live) {
  kill_totals totals;
  for (const std::uint64_t seed : seeds(count))
    kill_one(seed, totals, live);
  MESSAGE(totals.kills << " killed while joining " << totals.at[0] << ", asking " << totals.at[1]
                       << ", receiving " << totals.at[2] << ", announcing " << totals.at[3] << ", sending "
                       << totals.at[4] << "; " << totals.restarts << " started again; fetched "
                       << totals.fetched << " blocks, cut " << totals.cut);
  CHECK(totals.fetched > 0);
}

inline shared_memory_options kill_memory() {
  return {.bytes = std::uint64_t{1} << 20, .blocks = 160};
}

}  // namespace llmmem_tests
