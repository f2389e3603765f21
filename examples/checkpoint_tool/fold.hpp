/// @file
/// `copy` and `compact`: copy a checkpoint to another folder, and make one full in its own folder.
#pragma once

#include <llmmem/checkpoint/copy.hpp>
#include <llmmem/checkpoint/folder.hpp>
#include <llmmem/checkpoint/retention.hpp>
#include <llmmem/checkpoint/search.hpp>
#include <llmmem/error.hpp>

#include <fmt/format.h>

#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "checkpoint_tool/describe.hpp"
#include "checkpoint_tool/progress.hpp"
#include "checkpoint_tool/select.hpp"
#include "checkpoint_tool/stored.hpp"
#include "common/text.hpp"

namespace checkpoint_tool {

/// The outcome of a copy.
struct folding {
  std::string from{};  ///< folder of checkpoints
  llmmem::checkpoint_id from_id{};
  own_share from_share{};
  std::string to{};
  llmmem::checkpoint_id to_id{};  ///< the same id in the same folder means that there was nothing to do
  std::uint64_t files = 0;
  std::uint64_t bytes = 0;

  [[nodiscard]] bool is_new() const noexcept { return from != to || from_id != to_id; }
};

namespace detail {

/// Reports the progress of a copy, and never stops it.
class copy_meter {
 public:
  copy_meter(std::FILE* notes, const llmmem::found_checkpoint& what)
      : meter_(notes, "copying " + what.folder, bytes_in(what.manifest)) {}
  [[nodiscard]] llmmem::copy_verdict operator()(const llmmem::copy_progress& now) {
    meter_.add(now.copied - meter_.done());
    return llmmem::copy_verdict::proceed;
  }

 private:
  progress meter_;
};

/// Updates LATEST, and removes nothing.
inline void hint_at_newest(llmmem::checkpoint_folder<storage_type>& folder, std::FILE* notes) {
  try {
    constexpr std::uint64_t all = std::numeric_limits<std::uint64_t>::max();
    static_cast<void>(folder.tidy(llmmem::keep_last_and_every{.last = all}));
  } catch (const llmmem::error& wrong) {
    fmt::print(notes, "checkpoint_tool: {}\n", one_line(wrong.what()));
  }
}

[[nodiscard]] inline folding folding_of(storage_type& from, const llmmem::found_checkpoint& what,
                                        storage_type& to, const llmmem::checkpoint_id& id) {
  return {
      from.path(""),          what.id, share_of(what.manifest), to.path(""), id, what.manifest.files.size(),
      bytes_in(what.manifest)};
}

}  // namespace detail

/// Copies a checkpoint to another folder, under its own name.
/// @throws llmmem::argument_error  if that folder has a checkpoint of its generation.
[[nodiscard]] inline folding copy_to(const checkpoint_reference& from, const std::string& to,
                                     std::FILE* notes) {
  const auto source = open_folder(from.folder);
  const llmmem::found_checkpoint what = open_whole(*source, from.which);
  storage_type target(to);
  llmmem::checkpoint_folder<storage_type> folder(target);
  const llmmem::copy_report done =
      llmmem::copy_checkpoint(*source, what, folder, {}, detail::copy_meter(notes, what));
  detail::hint_at_newest(folder, notes);
  return detail::folding_of(*source, what, target, done.copy.id);
}

/// Folds the newest checkpoint of a folder into a full one, unless it already is.
/// @throws llmmem::io_error  if another process has the lock.
[[nodiscard]] inline folding compact(storage_type& storage, std::FILE* notes) {
  const std::vector<llmmem::checkpoint_id> all = list_checkpoints(storage);
  if (all.empty()) throw llmmem::io_error(storage.path("") + ": there is no checkpoint in it");
  const llmmem::found_checkpoint what = open_checkpoint(storage, all.front(), llmmem::verification::sizes);
  if (what.manifest.stored.empty()) return detail::folding_of(storage, what, storage, what.id);
  llmmem::checkpoint_folder<storage_type> folder(storage);
  const llmmem::copy_report done =
      llmmem::compact_checkpoint(folder, what, {}, detail::copy_meter(notes, what));
  detail::hint_at_newest(folder, notes);
  return detail::folding_of(storage, what, storage, done.copy.id);
}

[[nodiscard]] inline std::string to_report(const folding& done) {
  std::string text = fmt::format("{}/{}\n", shown(done.to), folder_name(done.to_id));
  if (!done.is_new()) return text + "  is whole: there is nothing to fold\n";
  text += fmt::format("  of {}/{}", shown(done.from), folder_name(done.from_id));
  if (done.from_share.is_incremental) text += ", " + share_text(done.from_share);
  return text + fmt::format("\n  {} of {}, whole\n", counted(done.files, "file"), bytes_shown(done.bytes));
}

[[nodiscard]] inline std::string to_json(const folding& done) {
  return fmt::format(R"({{"from": {{{}, {}}}, "to": {{{}}}, "new": {}, "files": {}, "bytes": {}}})"
                     "\n",
                     json_of(done.from, done.from_id), share_json(done.from_share),
                     json_of(done.to, done.to_id), done.is_new(), done.files, done.bytes);
}

}  // namespace checkpoint_tool
