/// @file
/// The reports of ranks during training.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace survive_failures {

enum class event_kind : std::uint8_t {
  began,      ///< an epoch, of `members`
  failed,     ///< this epoch: a rank is missing, as far as this rank knows
  agreed,     ///< with the others on the remaining ranks: `members`
  fetched,    ///< this rank's parts of the last kept version; `value`: bytes that moved
  verified,   ///< that all ranks have the same weights; `value`: their digest
  committed,  ///< `step` steps in all; `loss` is that of the last one
  repeats,    ///< `step` was computed and does not count
  differs,    ///< part `value` has two different results
  finished,   ///< all steps; `value`: the digest of the weights
  out,        ///< the others continued without this rank, or may have
  lost,       ///< more ranks died than the redundancy tolerates, and nothing is saved
  restored,   ///< nothing is in memory: all continue at `step`; `value`: 1 from a checkpoint, 0 from the
              ///< beginning
  saved,      ///< `step`, in a checkpoint; `text`: problems after that
  unsaved,    ///< `step`; `text`: why
};

/// One record, small enough for one atomic write to a pipe, so that several processes may share it.
struct job_event {
  event_kind kind{};
  std::uint32_t seat = 0;
  std::int64_t pid = 0;
  std::uint64_t epoch = 0;
  std::uint64_t step = 0;  ///< steps that are committed
  std::uint64_t at_ns = 0;
  std::uint64_t members = 0;  ///< a bit for each seat
  std::uint64_t value = 0;
  double loss = 0;
  std::array<char, 256> text{};  ///< to the first 0

  void say(std::string_view what) noexcept {
    text = {};
    std::copy_n(what.data(), std::min(what.size(), text.size() - 1), text.data());
  }
  [[nodiscard]] std::string_view said() const noexcept { return text.data(); }
};
static_assert(std::is_trivially_copyable_v<job_event>);

}  // namespace survive_failures
