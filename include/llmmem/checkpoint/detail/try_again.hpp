/// @file
/// Distinguishes errors that may pass from proofs that a checkpoint is damaged or incomplete.
#pragma once

#include <llmmem/checkpoint/search_patience.hpp>
#include <llmmem/checkpoint/storage.hpp>
#include <llmmem/checkpoint/storage_ref.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <time.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Returns whether a storage's error is about contents: a file is missing, has another kind, or ends early
/// (an error without a number). All other errors are about the machine: they may pass, and prove nothing.
[[nodiscard]] inline bool proves_damage(const storage_error& error) noexcept {
  const int number = error.number();
  return number == 0 || number == ENOENT || number == ENOTDIR || number == EISDIR;
}

inline void pause_for(std::uint64_t ns) noexcept {
  constexpr std::uint64_t second = 1'000'000'000;
  timespec left{static_cast<time_t>(ns / second), static_cast<long>(ns % second)};
  while (ns != 0 && ::nanosleep(&left, &left) != 0 && errno == EINTR) {
  }
}

/// Calls `work` until it succeeds, proves damage, or has been tried often enough; then rethrows its
/// exception.
template <class Work>
auto try_again(const search_patience& waits, Work work) {
  std::uint64_t pause_ns = waits.pause_ns;
  for (std::uint32_t left = waits.tries;; --left) {
    try {
      return work();
    } catch (const format_error&) {
      throw;
    } catch (const storage_error& error) {
      if (left <= 1 || proves_damage(error)) throw;
    } catch (const std::exception&) {  // also for lack of memory
      if (left <= 1) throw;
    }
    pause_for(pause_ns);
    pause_ns *= 2;
  }
}

inline constexpr std::string_view link_without_end =
    "the folder is a symbolic link without a target: mount its target, or remove the link";

/// Returns whether a folder in the storage is a symbolic link without a target: its disk may not be mounted.
[[nodiscard]] inline bool leads_nowhere(storage_ref storage, const std::string& folder) {
  try {
    const auto entries = storage.list("");
    const auto named = std::ranges::find(entries, folder, &storage_entry::name);
    if (named == entries.end() || named->what != storage_entry::kind::link) return false;
    static_cast<void>(storage.list(folder));
    return false;
  } catch (const storage_error&) {
    return true;  // any other error proves nothing
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
