/// @file
/// `prune`: removes checkpoints that need not stay.
#pragma once

#include <llmmem/checkpoint/folder.hpp>
#include <llmmem/checkpoint/retention.hpp>
#include <llmmem/checkpoint/search.hpp>
#include <llmmem/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint_tool/describe.hpp"
#include "checkpoint_tool/list.hpp"
#include "checkpoint_tool/select.hpp"
#include "checkpoint_tool/stored.hpp"
#include "common/text.hpp"

namespace checkpoint_tool {

/// A checkpoint, and what happens to it.
struct pruned_checkpoint {
  llmmem::checkpoint_id id{};
  std::uint64_t bytes = 0;                 ///< of its own files
  std::vector<std::uint64_t> needed_by{};  ///< generations that stay and take chunks from it
  enum class fate : std::uint8_t {
    stays,
    goes,
    not_whole,  ///< stays, for a person to examine
  } what = fate::stays;
};

struct pruning {
  std::string folder{};
  std::vector<pruned_checkpoint> checkpoints{};  ///< the newest first
  std::vector<std::string> left_over{};          ///< goes
  bool is_dry = false;

  [[nodiscard]] std::uint64_t count_of(pruned_checkpoint::fate what) const noexcept {
    std::uint64_t count = 0;
    for (const pruned_checkpoint& each : checkpoints)
      count += each.what == what ? 1 : 0;
    return count;
  }
  [[nodiscard]] std::uint64_t freed_bytes() const noexcept {
    std::uint64_t bytes = 0;
    for (const pruned_checkpoint& each : checkpoints)
      bytes += each.what == pruned_checkpoint::fate::goes ? each.bytes : 0;
    return bytes;
  }
};

/// Plans what happens to the checkpoints: as `checkpoint_folder::removable`, without its lock.
[[nodiscard]] inline pruning plan_pruning(storage_type& storage,
                                          const llmmem::keep_last_and_every& retention) {
  const listing all = list_folder(storage);
  pruning plan{all.folder, {}, all.left_over, true};
  std::uint64_t newer = 0;
  // A remaining generation, and an older one that it refers to.
  std::vector<std::pair<std::uint64_t, std::uint64_t>> needs;
  for (const listed_checkpoint& each : all.checkpoints) {
    const own_share share = each.manifest ? share_of(*each.manifest) : own_share{};
    pruned_checkpoint one{each.id, share.own_bytes, {}};
    for (const auto& [by, needed] : needs) {
      if (needed == each.id.generation) one.needed_by.push_back(by);
    }
    if (!each.why.empty()) {
      one.what = pruned_checkpoint::fate::not_whole;
      for (const std::uint64_t needed : share.refers_to)
        needs.emplace_back(each.id.generation, needed);
    } else {
      const bool stays = newer < 2 || retention.keeps(each.id, newer) || !one.needed_by.empty();
      one.what = stays ? pruned_checkpoint::fate::stays : pruned_checkpoint::fate::goes;
      ++newer;
      for (const std::uint64_t needed : share.refers_to) {
        if (stays) needs.emplace_back(each.id.generation, needed);
      }
    }
    plan.checkpoints.push_back(std::move(one));
  }
  return plan;
}

/// Removes what need not stay. @throws llmmem::io_error if another process has the lock.
[[nodiscard]] inline pruning prune(storage_type& storage, const llmmem::keep_last_and_every& retention) {
  pruning plan = plan_pruning(storage, retention);  // sizes and remains
  llmmem::checkpoint_folder<storage_type> folder(storage);
  const std::vector<llmmem::checkpoint_id> gone = folder.tidy(retention);
  plan.is_dry = false;
  for (pruned_checkpoint& each : plan.checkpoints) {
    // Another process may have committed in between, so the removed checkpoints count.
    const bool went = std::find(gone.begin(), gone.end(), each.id) != gone.end();
    if (went) each.what = pruned_checkpoint::fate::goes;
    if (!went && each.what == pruned_checkpoint::fate::goes) each.what = pruned_checkpoint::fate::stays;
  }
  return plan;
}

[[nodiscard]] inline std::string_view to_string(pruned_checkpoint::fate what) noexcept {
  constexpr std::string_view texts[] = {"stays", "goes", "not_whole"};
  return texts[static_cast<std::size_t>(what)];
}

[[nodiscard]] inline std::string to_report(const pruning& plan) {
  using fate = pruned_checkpoint::fate;
  std::string text = shown(plan.folder) + '\n';
  for (const pruned_checkpoint& each : plan.checkpoints) {
    const std::string_view what = each.what == fate::stays ? "stays"
                                  : each.what == fate::not_whole
                                      ? "incomplete: left as it is, verify shows why"
                                  : plan.is_dry ? "would go"
                                                : "is gone";
    text += fmt::format("  {:<26}{:>11}  {}", folder_name(each.id), bytes_shown(each.bytes), what);
    if (!each.needed_by.empty()) {
      text += fmt::format("; {} {} to it", generations_text(each.needed_by),
                          each.needed_by.size() == 1 ? "refers" : "refer");
    }
    text += '\n';
  }
  for (const std::string& name : plan.left_over)
    text += fmt::format("  {:<26}{:>11}  {}\n", shown(name), "", plan.is_dry ? "would go" : "is gone");
  return text + fmt::format("{} {}, {}\n", counted(plan.count_of(fate::goes), "checkpoint"),
                            plan.is_dry ? "would go" : "removed", bytes_shown(plan.freed_bytes()));
}

[[nodiscard]] inline std::string to_json(const pruning& plan) {
  std::vector<std::string> checkpoints;
  for (const pruned_checkpoint& each : plan.checkpoints) {
    checkpoints.push_back(fmt::format(
        R"({{"name": {}, "step": {}, "generation": {}, "bytes": {}, "needed_by": [{}], "fate": "{}"}})",
        example::json_string(folder_name(each.id)), each.id.step, each.id.generation, each.bytes,
        fmt::join(each.needed_by, ", "), to_string(each.what)));
  }
  std::vector<std::string> left_over;
  for (const std::string& name : plan.left_over)
    left_over.push_back(example::json_string(name));
  return fmt::format(
      R"({{"folder": {}, "dry_run": {}, "freed_bytes": {}, "left_over": [{}], "checkpoints": {}}})"
      "\n",
      example::json_string(plan.folder), plan.is_dry, plan.freed_bytes(), fmt::join(left_over, ", "),
      json_lines(checkpoints));
}

}  // namespace checkpoint_tool
