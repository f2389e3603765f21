/// @file
/// The job's processes: their work, and the process that starts, kills and awaits them.
#pragma once

#include <llmmem/comm/socket_endpoint.hpp>
#include <llmmem/error.hpp>
#ifdef LLMMEM_EXAMPLE_REDIS
#include <llmmem/pool/redis_directory.hpp>
#endif
#include <llmmem/pool/shared_memory_mover.hpp>
#ifdef LLMMEM_EXAMPLE_UCX
#include <llmmem/pool/ucx_mover.hpp>
#endif
#include <llmmem/space/host.hpp>

#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "common/socket_folder.hpp"
#include "kv_pool/board.hpp"
#include "kv_pool/command_line.hpp"
#include "kv_pool/handover.hpp"
#include "kv_pool/node.hpp"

namespace kv_pool_example {

namespace detail {

inline constexpr std::uint64_t moment_ns = 50'000;

/// Answers other nodes until a request may begin.
template <class Node>
void wait_for_turn(const command_line& asked, board& shared, std::uint32_t request, Node& of) {
  while (request >= asked.held_from() && !shared.is_released() && !shared.is_over())
    of.progress(moment_ns);
}

/// Answers other nodes until the directory knows this node's prompts: a process that asks earlier may miss
/// them. A directory that does not answer for a second is not awaited again.
class announcement_wait {
 public:
  template <class Node>
  void operator()(Node& of) {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(has_answered_ ? 1 : 0);
    while (!of.is_announced() && std::chrono::steady_clock::now() < limit)
      of.progress(moment_ns);
    has_answered_ = of.is_announced();
  }

 private:
  bool has_answered_ = true;
};

/// Computes this process's prompts, and then answers other nodes until the job is over.
template <class Node>
void prefill(const command_line& asked, board& shared, std::uint32_t seat, Node& of) {
  announcement_wait wait_until_announced;
  for (std::uint32_t r = seat; r < asked.requests && !shared.is_over(); r += asked.prefill) {
    wait_for_turn(asked, shared, r, of);
    if (shared.at(r) != progress::waiting) continue;
    of.serve(r, 0);
    wait_until_announced(of);
    shared.set_prefilled(r);
    of.progress();
    of.report();
  }
}

/// Answers its requests, each when its prompt is computed, or at once if the responsible process is dead.
template <class Node>
void decode(const command_line& asked, board& shared, std::uint32_t seat, Node& of) {
  for (std::uint32_t r = seat - asked.prefill; r < asked.requests; r += asked.decode) {
    wait_for_turn(asked, shared, r, of);
    const node_figures& prefills = shared.node(r % asked.prefill);
    while (shared.at(r) == progress::waiting && prefills.is_alive && !shared.is_over()) {
      of.progress(moment_ns);
    }
    if (shared.is_over()) return;
    of.serve(r, answer_tokens);
    shared.set_answered(r);
    of.report();
  }
}

/// One process of the pool, from its seat's first or a later start to the end of the job.
template <class Node>
void take_part(const command_line& asked, board& shared, std::uint32_t seat, Node& of) {
  const bool is_first = shared.node(seat).starts++ == 0;
  // Waits for all nodes, so that runs can be compared; a process that takes a seat later begins with the
  // present nodes.
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(is_first ? 30 : 1);
  while (of.peers() + 1 < asked.nodes() && std::chrono::steady_clock::now() < limit) {
    of.progress(moment_ns);
  }
  if (!is_first) shared.release();
  seat < asked.prefill ? prefill(asked, shared, seat, of) : decode(asked, shared, seat, of);
  while (!shared.is_over()) {
    of.progress(moment_ns);
    of.report();
  }
}

[[nodiscard]] inline llmmem::host_options host_of(const command_line& asked) {
  return {.budget = asked.host_blocks * asked.block_bytes, .name = "host tier"};
}

#ifdef LLMMEM_EXAMPLE_REDIS
/// @param folder  of this run: its last name makes the keys of runs differ.
inline void take_part_by_redis(const command_line& asked, board& shared, const std::string& folder,
                               std::uint32_t seat, llmmem::socket_endpoint& end) {
  llmmem::redis_options options = redis_place(*asked.redis);
  options.prefix = "llmmem:" + folder.substr(folder.rfind('/') + 1) + ":";
  llmmem::redis_directory directory(options);
  llmmem::host_space host(host_of(asked));
  node<llmmem::host_space, llmmem::redis_directory&> of(asked, end, shared.node(seat), host, directory);
  take_part(asked, shared, seat, of);
  if (directory.why().code != llmmem::errc::ok)
    fmt::print(stderr, "kv_pool: node {}: {}\n", seat, directory.why().message());
}
#endif

/// With a host tier that other processes can read.
template <class Mover>
void take_part_by(Mover& mover, const command_line& asked, board& shared, std::uint32_t seat,
                  llmmem::socket_endpoint& end) {
  node<typename Mover::space_type, llmmem::pool::embedded_directory, Mover&> of(asked, end, shared.node(seat),
                                                                                mover.space(), mover);
  take_part(asked, shared, seat, of);
}

inline void live(const command_line& asked, board& shared, const std::string& folder, std::uint32_t seat) {
  llmmem::socket_endpoint end({.seat = llmmem::seat_id{seat}, .seats = asked.nodes(), .folder = folder});
  node_figures& figures = shared.node(seat);
  if (asked.splits) {
    ++figures.starts;
    return hand_over(asked, shared, end);
  }
#ifdef LLMMEM_EXAMPLE_REDIS
  if (asked.redis) return take_part_by_redis(asked, shared, folder, seat, end);
#endif
  const std::uint64_t bytes = asked.host_blocks * asked.block_bytes;
  if (asked.mover == block_way::shared) {
    llmmem::shared_memory_mover mover({.bytes = bytes, .blocks = asked.host_blocks});
    return take_part_by(mover, asked, shared, seat, end);
  }
#ifdef LLMMEM_EXAMPLE_UCX
  if (asked.mover == block_way::ucx) {
    llmmem::ucx_mover mover({.bytes = bytes, .blocks = asked.host_blocks});
    return take_part_by(mover, asked, shared, seat, end);
  }
#endif
  llmmem::host_space host(host_of(asked));
  node<> of(asked, end, figures, host);
  take_part(asked, shared, seat, of);
}

/// A child process.
[[nodiscard]] inline pid_t start(const command_line& asked, board& shared, const std::string& folder,
                                 std::uint32_t seat) {
  std::fflush(nullptr);
  shared.node(seat).is_alive = true;
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child < 0) example::throw_errno("a process");
  if (child > 0) return child;
  int status = 0;
  try {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(1);
    live(asked, shared, folder, seat);
  } catch (const std::exception& failed) {
    fmt::print(stderr, "kv_pool: node {}: {}\n", seat, failed.what());
    shared.give_up();
    status = 1;
  }
  std::fflush(nullptr);
  ::_exit(status);
}

}  // namespace detail

/// Runs the job to its end.
/// @return whether every process that was not killed succeeded.
inline bool run_job(const command_line& asked, board& shared, std::FILE* notes) {
  const example::socket_folder folder;
  std::vector<pid_t> children;
  for (std::uint32_t seat = 0; seat < asked.nodes(); ++seat)
    children.push_back(detail::start(asked, shared, folder.path(), seat));
  bool is_well = true;
  bool has_killed = false;
  std::size_t left = children.size();
  while (left != 0) {
    if (asked.kill_at && !has_killed && shared.answered() >= *asked.kill_at && !shared.is_over()) {
      has_killed = true;
      ::kill(children[0], SIGKILL);
      fmt::print(notes, "kv_pool: killed prefill node 0 after {} answers\n", shared.answered());
    }
    int status = 0;
    const pid_t ended = ::waitpid(-1, &status, WNOHANG);
    if (ended <= 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      continue;
    }
    --left;
    if (has_killed && ended == children[0] && WIFSIGNALED(status)) {
      shared.node(0).is_alive = false;
      if (!asked.restarts || shared.is_over()) {
        shared.release();
        continue;
      }
      children[0] = detail::start(asked, shared, folder.path(), 0);
      ++left;
      continue;
    }
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
    is_well = false;
    shared.give_up();
  }
  return is_well;
}

}  // namespace kv_pool_example
