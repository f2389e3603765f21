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
  int signal = 0;          ///< that ended it; SIGSTOP for one that others killed because it was stopped
  std::uint64_t step = 0;  ///< that it was computing
};

/// The time from a death to the next step that counts, on the last of the remaining ranks.
struct job_recovery {
  /// From the kill until all remaining ranks knew; nothing for a kill from outside.
  std::optional<double> detect_ms;
  double agree_ms = 0;   ///< until all knew the remaining ranks
  double fetch_ms = 0;   ///< until all had their parts of the last kept version
  double verify_ms = 0;  ///< until all had compared their weights
  double resume_ms = 0;  ///< until the end of the next step

  [[nodiscard]] double total_ms() const noexcept {
    return detect_ms.value_or(0) + agree_ms + fetch_ms + verify_ms + resume_ms;
  }
};

/// The result of a job.
struct job_figures {
  std::uint64_t faults = 0;
  std::vector<job_death> deaths{};
  std::vector<job_recovery> recoveries{};
  std::uint64_t steps_repeated = 0;
  std::uint64_t joined = 0;      ///< fresh processes that were admitted
  std::uint64_t steps_lost = 0;  ///< committed and computed again, because more died than memory tolerates
  std::vector<std::uint64_t> restored_from{};  ///< steps of the loaded checkpoints, in order
  std::vector<std::uint64_t> digests{};        ///< of the weights, of each rank that finished
};

/// The signal's name, as in `kill -l`.
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
