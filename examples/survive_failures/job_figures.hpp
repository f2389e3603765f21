/// @file
/// The figures of a job of ranks that may die.
#pragma once

#include <csignal>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace survive_failures {

/// A rank that died.
struct job_death {
  std::uint32_t seat = 0;
  std::int64_t pid = 0;
  int signal = 0;          ///< that ended it; SIGSTOP for one that others killed because it stood still
  std::uint64_t step = 0;  ///< that was being computed
};

/// How long it took from a death to the first step that counts again, on the last of those left.
struct job_recovery {
  std::optional<double> detect_ms;  ///< from the kill to when all left knew; nothing for one from outside
  double agree_ms = 0;              ///< to when all knew who was left
  double fetch_ms = 0;              ///< to when all had their parts of the last version kept
  double verify_ms = 0;             ///< to when all had compared their weights
  double resume_ms = 0;             ///< to the end of the next step

  [[nodiscard]] double total_ms() const noexcept {
    return detect_ms.value_or(0) + agree_ms + fetch_ms + verify_ms + resume_ms;
  }
};

/// What a job came to.
struct job_figures {
  std::uint64_t faults = 0;
  std::vector<job_death> deaths{};
  std::vector<job_recovery> recoveries{};
  std::uint64_t steps_repeated = 0;
  std::uint64_t joined = 0;                    ///< fresh processes that were admitted
  std::uint64_t steps_lost = 0;                ///< counted, and computed again: more died than memory bears
  std::vector<std::uint64_t> restored_from{};  ///< steps of the checkpoints that were loaded, in that order
  std::vector<std::uint64_t> digests{};        ///< of the weights, of each rank that finished
};

/// The signal's name, as `kill -l` has it.
[[nodiscard]] inline std::string signal_name(int signal) {
  switch (signal) {
    case SIGKILL:
      return "SIGKILL";
    case SIGSTOP:
      return "SIGSTOP";
    case SIGTERM:
      return "SIGTERM";
    case SIGINT:
      return "SIGINT";
    case SIGHUP:
      return "SIGHUP";
    case SIGSEGV:
      return "SIGSEGV";
    case SIGABRT:
      return "SIGABRT";
    case 0:
      return "its own end";
    default:
      return "signal " + std::to_string(signal);
  }
}

}  // namespace survive_failures
