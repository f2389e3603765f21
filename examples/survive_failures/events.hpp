/// @file
/// What ranks tell of themselves while they train.
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
  failed,     ///< this epoch: somebody is missing, for what this rank knows
  agreed,     ///< with the others on who is left: `members`
  fetched,    ///< what the last kept version has of this rank's parts; `value`: bytes that moved
  verified,   ///< that all ranks have the same weights; `value`: their digest
  committed,  ///< `step` steps in all; `loss` is that of the last one
  repeats,    ///< `step` was computed, and counts for nothing
  differs,    ///< part `value` was computed in two ways
  finished,   ///< all steps; `value`: the digest of the weights
  out,        ///< the others went on without this one, or may have
  lost,       ///< more ranks are gone than the redundancy bears, and nothing is saved
  restored,   ///< nothing is in memory: all go on at `step`; `value`: 1 from a checkpoint, 0 from the
              ///< beginning
  saved,      ///< `step`, in a checkpoint; `text`: what went wrong after that
  unsaved,    ///< `step`; `text`: why
};

/// One record, small enough to be written to a pipe at once, so that several may write to the same.
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
