/// @file
/// A run on several ranks in processes, joined by Unix sockets.
#pragma once

#include <llmmem/comm/collectives.hpp>
#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/socket_endpoint.hpp>
#include <llmmem/error.hpp>

#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/socket_folder.hpp"
#include "common/standard_streams.hpp"
#include "train_gpt/corpus.hpp"
#include "train_gpt/ranks_run.hpp"
#include "train_gpt/run.hpp"
#include "train_gpt/run_options.hpp"

namespace train_gpt {

namespace detail {

/// Trains as the rank in `seat`, and exchanges the usage of all ranks.
[[nodiscard]] inline std::pair<run_result, std::vector<rank_usage>> live_as_process(
    const command_line& asked, std::uint64_t budget, const corpus& text, std::FILE* notes,
    const std::string& folder, std::uint32_t seat) {
  constexpr std::uint64_t patience_ns = 60'000'000'000;
  const auto world = static_cast<std::uint32_t>(asked.parallel.ranks);
  llmmem::socket_endpoint end({.seat = llmmem::seat_id{seat}, .seats = world, .folder = folder});
  llmmem::communicator ranks(end);
  ranks.join(ranks.after(patience_ns)).value();
  rank_outcome mine = train_as_rank(asked, budget, ranks, text, notes);
  static_assert(std::is_trivially_copyable_v<rank_usage>);
  std::vector<rank_usage> usage(world, mine.usage);
  const auto bytes = std::as_writable_bytes(std::span(usage));
  llmmem::all_gather(ranks, bytes, llmmem::even_blocks(bytes.size(), ranks.world(), sizeof(rank_usage)),
                     {.by = ranks.after(patience_ns)})
      .value();
  // No rank leaves while another still reads.
  ranks.agree(0, ranks.after(patience_ns)).value();
  return {std::move(mine.result), std::move(usage)};
}

/// The processes of all ranks except the first; killed at the end if they still live.
class rank_children {
 public:
  rank_children() = default;
  rank_children(const rank_children&) = delete;
  rank_children& operator=(const rank_children&) = delete;
  ~rank_children() {
    for (const pid_t pid : pids_)
      ::kill(pid, SIGKILL);
    static_cast<void>(wait());
  }

  /// Forks a process that ends with the result of `live`.
  template <class Live>
  void start(Live live) {
    std::fflush(nullptr);
    const pid_t parent = ::getpid();
    const pid_t pid = ::fork();
    if (pid < 0) example::throw_errno("a process for a rank");
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::_exit(::getppid() == parent ? live() : 1);
    }
    pids_.push_back(pid);
  }
  /// Exit statuses; -1 for a process that a signal ended.
  [[nodiscard]] std::vector<int> wait() {
    std::vector<int> all;
    for (const pid_t pid : std::exchange(pids_, {})) {
      int status = 0;
      const bool ended = ::waitpid(pid, &status, 0) == pid && WIFEXITED(status);
      all.push_back(ended ? WEXITSTATUS(status) : -1);
    }
    return all;
  }

 private:
  std::vector<pid_t> pids_{};
};

}  // namespace detail

/// As `train_in_ranks`, with a process for each rank; this one is the first.
/// @pre the program has no other threads
/// @throws the failure of this rank; `error` for a failure of another rank, which reported the reason on
///         `notes`.
[[nodiscard]] inline run_result train_in_processes(const command_line& asked, std::uint64_t budget,
                                                   const corpus& text, std::FILE* notes) {
  constexpr int has_failed = 1;
  constexpr int was_left = 2;  // by another rank that failed
  const example::socket_folder folder;
  detail::rank_children others;
  for (std::uint32_t seat = 1; seat < asked.parallel.ranks; ++seat) {
    others.start([&, seat]() noexcept {
      int how = 0;
      try {
        static_cast<void>(detail::live_as_process(asked, budget, text, notes, folder.path(), seat));
      } catch (const llmmem::comm_error&) {
        how = was_left;
      } catch (const std::exception& failed) {
        example::tell(notes, "train_gpt: rank {}: {}\n", seat, failed.what());
        how = has_failed;
      }
      std::fflush(notes);
      return how;
    });
  }
  run_result result;
  std::exception_ptr consequence;
  try {
    auto [mine, usage] = detail::live_as_process(asked, budget, text, notes, folder.path(), 0);
    result = std::move(mine);
    report_ranks(result, std::move(usage));
  } catch (const llmmem::comm_error&) {
    consequence = std::current_exception();
  }
  const std::vector<int> statuses = others.wait();
  for (std::size_t i = 0; i < statuses.size(); ++i) {
    if (statuses[i] == has_failed) throw llmmem::error(fmt::format("rank {} failed", i + 1));
    if (statuses[i] == -1) throw llmmem::error(fmt::format("rank {} was killed", i + 1));
  }
  if (consequence) std::rethrow_exception(consequence);
  return result;
}

}  // namespace train_gpt
