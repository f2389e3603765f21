/// @file
/// Troubles that may pass, and what proves that a checkpoint is not whole.
#pragma once

#include <llmmem/checkpoint/search.hpp>
#include <llmmem/checkpoint/storage.hpp>
#include <llmmem/checkpoint/storage_ref.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <thread>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Whether what a storage says is about contents: a file is not there, is of another kind, or ends early (a
/// storage gives no number for that). All else is about the machine: it may pass, and proves nothing.
[[nodiscard]] inline bool proves_damage(const storage_error& error) noexcept {
  const int number = error.number();
  return number == 0 || number == ENOENT || number == ENOTDIR || number == EISDIR;
}

/// Calls `work` until it gives something, proves damage, or has been tried often enough; then it throws what
/// `work` threw.
template <class Work>
auto try_again(const search_patience& patience, Work work) {
  std::chrono::milliseconds pause = patience.pause;
  for (std::uint32_t left = patience.tries;; --left) {
    try {
      return work();
    } catch (const format_error&) {
      throw;
    } catch (const storage_error& error) {
      if (left <= 1 || proves_damage(error)) throw;
    } catch (const std::exception&) {  // want of memory, too
      if (left <= 1) throw;
    }
    if (pause.count() > 0) std::this_thread::sleep_for(pause);
    pause *= 2;
  }
}

inline constexpr std::string_view link_without_end =
    "the folder is a symbolic link that leads nowhere: mount what it leads to, or remove the link";

/// Whether a folder in the storage is a symbolic link with nothing at its end: the disk may not be mounted.
[[nodiscard]] inline bool leads_nowhere(storage_ref storage, const std::string& folder) {
  try {
    const auto entries = storage.list("");
    const auto named = std::ranges::find(entries, folder, &storage_entry::name);
    if (named == entries.end() || named->what != storage_entry::kind::link) return false;
    static_cast<void>(storage.list(folder));
    return false;
  } catch (const storage_error&) {
    return true;  // whatever it is, it is no proof
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
