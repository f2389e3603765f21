/// @file
/// The program: its arguments, its commands and its output.
#pragma once

#include <llmmem/error.hpp>

#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint_tool/command_line.hpp"
#include "checkpoint_tool/convert.hpp"
#include "checkpoint_tool/describe.hpp"
#include "checkpoint_tool/diff.hpp"
#include "checkpoint_tool/fold.hpp"
#include "checkpoint_tool/list.hpp"
#include "checkpoint_tool/prune.hpp"
#include "checkpoint_tool/published.hpp"
#include "checkpoint_tool/select.hpp"
#include "checkpoint_tool/show.hpp"
#include "checkpoint_tool/verify.hpp"
#include "common/program.hpp"

namespace checkpoint_tool {

using example::exit_status;

/// The output of a command, and whether all is right.
struct answer {
  std::string text{};
  exit_status status = exit_status::success;
};

namespace detail {

[[nodiscard]] inline exit_status success_if(bool good) noexcept {
  return good ? exit_status::success : exit_status::failure;
}

/// Returns the output of a reading command for a published model; nothing for any other folder.
[[nodiscard]] inline std::optional<answer> answer_published(const checkpoint_reference& what, bool json,
                                                            bool with_tensors) {
  if (what.which || !is_published(what.folder)) return std::nullopt;
  const auto storage = open_folder(what.folder);
  const llmmem::found_checkpoint model = llmmem::open_safetensors_folder(*storage);
  const std::string folder = storage->path("");
  return answer{json ? published_json(folder, model) : published_report(folder, model, with_tensors)};
}

[[nodiscard]] inline answer answer_list(const command_line& asked) {
  if (auto published = answer_published({asked.first, std::nullopt}, asked.json, false)) return *published;
  const auto storage = open_folder(asked.first);
  const listing all = list_folder(*storage);
  return {asked.json ? to_json(all) : to_report(all), success_if(all.is_complete())};
}

[[nodiscard]] inline answer answer_show(const command_line& asked) {
  const checkpoint_reference what = read_reference(asked.first, asked.second);
  if (auto published = answer_published(what, asked.json, true)) return *published;
  const auto storage = open_folder(what.folder);
  const llmmem::found_checkpoint one =
      what.which ? read_checkpoint(*storage, find_id(*storage, *what.which)) : newest_whole(*storage);
  return {asked.json ? to_json(storage->path(""), one) : to_report(storage->path(""), one)};
}

[[nodiscard]] inline answer answer_verify(const command_line& asked, std::FILE* notes) {
  const checkpoint_reference what = read_reference(asked.first, asked.second);
  if (auto published = answer_published(what, asked.json, false)) return *published;
  const auto storage = open_folder(what.folder);
  std::vector<llmmem::checkpoint_id> ids;
  if (what.which) {
    ids.push_back(find_id(*storage, *what.which));
  } else {
    ids = list_checkpoints(*storage);
  }
  if (ids.empty()) throw llmmem::io_error(storage->path("") + ": there is no checkpoint in it");
  std::vector<verdict> all;
  std::string text;
  bool is_complete = true;
  for (const llmmem::checkpoint_id& id : ids) {
    fmt::print(notes, "checkpoint_tool: verifying {}\n", folder_name(id));
    verdict one = verifier(*storage, id, asked.how, notes).run();
    if (!one.is_complete() && !is_there(*storage, id)) {
      fmt::print(notes, "checkpoint_tool: {} was removed meanwhile\n", folder_name(id));
      continue;
    }
    text += to_report(one, asked.how);
    is_complete = is_complete && one.is_complete();
    all.push_back(std::move(one));
  }
  return {asked.json ? to_json(storage->path(""), all, asked.how) : text, success_if(is_complete)};
}

[[nodiscard]] inline answer answer_diff(const command_line& asked, std::FILE* notes) {
  const checkpoint_reference of_a = read_reference(asked.first);
  checkpoint_reference of_b = read_reference(*asked.second);
  const bool is_of_a = of_b.which && asked.second->find('/') == std::string::npos;
  if (is_of_a) of_b.folder = of_a.folder;
  const auto folder_a = open_folder(of_a.folder);
  const auto folder_b = open_folder(of_b.folder);
  const compared_checkpoint a{*folder_a, open_whole(*folder_a, of_a.which)};
  const compared_checkpoint b{*folder_b, open_whole(*folder_b, of_b.which)};
  const std::vector<tensor_difference> all = compare_checkpoints(a, b, notes);
  return {asked.json ? to_json(a, b, all) : to_report(a, b, all), success_if(is_same(all))};
}

[[nodiscard]] inline answer answer_convert(const command_line& asked, std::FILE* notes) {
  reshard_options options{.world = asked.world, .partition = asked.partition};
  if (asked.max_shard_mib) options.max_shard_bytes = *asked.max_shard_mib << 20;
  options.tensor_prefix = asked.tensor_prefix;
  const conversion done = convert(read_reference(asked.first), *asked.second, options, notes);
  return {asked.json ? to_json(done) : to_report(done)};
}

[[nodiscard]] inline answer answer_copy(const command_line& asked, std::FILE* notes) {
  const folding done = copy_to(read_reference(asked.first), *asked.second, notes);
  return {asked.json ? to_json(done) : to_report(done)};
}

[[nodiscard]] inline answer answer_compact(const command_line& asked, std::FILE* notes) {
  const auto storage = open_folder(asked.first);
  const folding done = compact(*storage, notes);
  return {asked.json ? to_json(done) : to_report(done)};
}

[[nodiscard]] inline answer answer_prune(const command_line& asked) {
  llmmem::keep_last_and_every retention;
  if (asked.keep_last) retention.last = *asked.keep_last;
  if (asked.keep_every) retention.every_steps = *asked.keep_every;
  const auto storage = open_folder(asked.first);
  const pruning done = asked.dry_run ? plan_pruning(*storage, retention) : prune(*storage, retention);
  return {asked.json ? to_json(done) : to_report(done)};
}

[[nodiscard]] inline answer answer_to(const command_line& asked, std::FILE* notes) {
  switch (asked.command) {
    case command_kind::list:
      return answer_list(asked);
    case command_kind::show:
      return answer_show(asked);
    case command_kind::verify:
      return answer_verify(asked, notes);
    case command_kind::diff:
      return answer_diff(asked, notes);
    case command_kind::convert:
      return answer_convert(asked, notes);
    case command_kind::copy:
      return answer_copy(asked, notes);
    case command_kind::compact:
      return answer_compact(asked, notes);
    case command_kind::prune:
      break;
  }
  return answer_prune(asked);
}

}  // namespace detail

/// Runs the program. Errors become one line on `notes` and an exit status; with `--json`, `out` gets the JSON
/// or nothing. Damage and differences are results, with exit status 1.
[[nodiscard]] inline exit_status run_application(const std::vector<std::string>& arguments, std::FILE* out,
                                                 std::FILE* notes) {
  exit_status found = exit_status::success;
  const auto work = [&](const command_line& asked) {
    try {
      const answer given = detail::answer_to(asked, notes);
      example::write(out, given.text, "standard output");
      found = given.status;
    } catch (const example::usage_error&) {
      throw;
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const std::exception& failed) {
      throw llmmem::error(one_line(failed.what()));  // names of files and tensors are untrusted
    }
  };
  const exit_status ran =
      example::run({"checkpoint_tool", "the checkpoint's manifest or chunks are too large"}, arguments, out,
                   notes, parse_command_line, work);
  return ran == exit_status::success ? found : ran;
}

}  // namespace checkpoint_tool
