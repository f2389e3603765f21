/// @file
/// The command line of `checkpoint_tool`.
#pragma once

#include <llmmem/checkpoint/search.hpp>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/program.hpp"
#include "common/text.hpp"

namespace checkpoint_tool {

using example::usage_error;

enum class command_kind : std::uint8_t { list, show, verify, diff, convert, copy, compact, prune };

/// The distribution of a tensor's elements over the ranks.
enum class partition_kind : std::uint8_t {
  flat,        ///< all tensors concatenated, with a range for each rank
  rows,        ///< a band of rows of each
  columns,     ///< a band of columns of each tensor with two dimensions or more
  replicated,  ///< each rank holds all, and writes about the same number of bytes
};

struct command_line {
  command_kind command = command_kind::list;
  std::string first{};                  ///< DIR, A or FROM
  std::optional<std::string> second{};  ///< STEP|NAME, B or TO
  llmmem::verification how = llmmem::verification::checksums;
  std::uint32_t world = 1;
  partition_kind partition = partition_kind::flat;
  std::optional<std::uint64_t> max_shard_mib{};
  std::optional<std::string> tensor_prefix{};
  std::optional<std::uint64_t> keep_last{};
  std::optional<std::uint64_t> keep_every{};
  bool dry_run = false;
  bool json = false;
};

namespace detail {

/// A command of CLI11, and its given texts.
struct command_texts {
  CLI::App* app = nullptr;
  std::optional<std::string> first{};
  std::optional<std::string> second{};
};

[[nodiscard]] inline partition_kind usage_partition(const std::string& text) {
  if (text == "flat") return partition_kind::flat;
  if (text == "rows") return partition_kind::rows;
  if (text == "columns") return partition_kind::columns;
  if (text == "replicated") return partition_kind::replicated;
  throw usage_error(example::given("--partition", text) +
                    ": no such partition; there are flat, rows, columns and replicated");
}

}  // namespace detail

/// Reads `arguments`, without the program's name; returns the help text if that was requested.
/// @throws usage_error  the text names what is missing or wrong, and valid values.
[[nodiscard]] inline std::pair<command_line, std::optional<std::string>> parse_command_line(
    std::vector<std::string> arguments) {
  CLI::App app("Inspects and changes a folder of llmmem checkpoints.", "checkpoint_tool");
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  command_line asked;
  bool sizes = false;
  std::optional<std::string> world, partition, shard, last, every;
  detail::command_texts list, show, verify, diff, convert, copy, compact, prune;
  const auto add = [&](detail::command_texts& to, const char* name, const char* what, const char* first,
                       const char* second, const char* second_what) {
    to.app = app.add_subcommand(name, what)->fallthrough();
    to.app
        ->add_option(first, to.first,
                     second == nullptr ? "folder of checkpoints" : "folder of checkpoints, or one of them")
        ->type_name("");
    if (second != nullptr) to.app->add_option(second, to.second, second_what)->type_name("");
  };
  constexpr const char* which = "a step, or a checkpoint's name (default: the newest complete one)";
  add(list, "list", "names the checkpoints of a folder, and says which are whole", "DIR", nullptr, nullptr);
  add(show, "show", "shows the contents of a checkpoint", "DIR", "STEP|NAME", which);
  add(verify, "verify", "reads every byte, and reports damage", "DIR", "STEP|NAME",
      "a step, or a checkpoint's name (default: all of them)");
  add(diff, "diff", "compares two checkpoints, tensor by tensor, whatever their sharding", "A", "B",
      "the other: DIR/STEP, DIR/NAME, DIR; or STEP or NAME of the same folder");
  add(convert, "convert", "reshards a checkpoint into a new folder", "FROM", "TO", "a new folder");
  add(copy, "copy", "copies a checkpoint, proven and whole, to another folder", "FROM", "TO",
      "a folder of checkpoints, or a new one");
  add(compact, "compact", "makes the newest checkpoint whole, if it takes chunks from others", "DIR", nullptr,
      nullptr);
  add(prune, "prune", "removes checkpoints that need not stay", "DIR", nullptr, nullptr);
  app.add_flag("--json", asked.json, "JSON on standard output, all else on standard error");
  verify.app->add_flag("--sizes", sizes, "check only sizes and headers, read no data");
  convert.app->add_option("--world", world, "ranks (default: 1, as Hugging Face has it)")->type_name("M");
  convert.app->add_option("--partition", partition, "the distribution over several ranks (default: flat)")
      ->type_name("flat|rows|columns|replicated");
  convert.app->add_option("--max-shard-mib", shard, "MiB of tensors in a file (default: 5 GB)")
      ->type_name("N");
  convert.app
      ->add_option("--tensor-prefix", asked.tensor_prefix,
                   "only tensors whose names begin so, and no extras; names stay as they are")
      ->type_name("P");
  prune.app->add_option("--keep-last", last, "the newest N stay, two at least (default: 2)")->type_name("N");
  prune.app->add_option("--keep-every", every, "of the others those stay whose step is a multiple of K")
      ->type_name("K");
  prune.app->add_flag("--dry-run", asked.dry_run, "say what would go, and change nothing");
  if (auto help = example::parse(app, std::move(arguments))) return {asked, std::move(help)};

  const std::pair<command_kind, const detail::command_texts*> all[] = {
      {command_kind::list, &list},       {command_kind::show, &show},       {command_kind::verify, &verify},
      {command_kind::diff, &diff},       {command_kind::convert, &convert}, {command_kind::copy, &copy},
      {command_kind::compact, &compact}, {command_kind::prune, &prune}};
  const detail::command_texts* chosen = nullptr;
  for (const auto& [kind, texts] : all) {
    if (!texts->app->parsed()) continue;
    if (chosen != nullptr) {
      throw usage_error(chosen->app->get_name() + " and " + texts->app->get_name() +
                        " are two commands; give one");
    }
    chosen = texts;
    asked.command = kind;
  }
  if (chosen == nullptr) {
    throw usage_error(
        "nothing to do; give a command: list, show, verify, diff, convert, copy, compact or prune");
  }
  const std::string name = chosen->app->get_name();
  if (!chosen->first) {
    constexpr std::string_view needs[] = {"DIR, a folder of checkpoints",
                                          "DIR, a folder of checkpoints",
                                          "DIR, a folder of checkpoints",
                                          "A and B, two checkpoints",
                                          "FROM, a checkpoint, and TO, a new folder",
                                          "FROM, a checkpoint, and TO, a folder",
                                          "DIR, a folder of checkpoints",
                                          "DIR, a folder of checkpoints"};
    throw usage_error(fmt::format("{} needs {}", name, needs[static_cast<std::size_t>(asked.command)]));
  }
  asked.first = *chosen->first;
  asked.second = chosen->second;
  if (asked.command == command_kind::diff && !asked.second) {
    throw usage_error("diff needs B, the checkpoint to compare with");
  }
  if (asked.command == command_kind::convert && !asked.second) {
    throw usage_error("convert needs TO, a new folder");
  }
  if (asked.command == command_kind::copy && !asked.second) throw usage_error("copy needs TO, a folder");
  if (sizes) asked.how = llmmem::verification::sizes;
  if (world) asked.world = static_cast<std::uint32_t>(example::usage_count("--world", *world, 1, 65'536));
  if (partition) {
    asked.partition = detail::usage_partition(*partition);
    if (asked.world == 1) throw usage_error("--partition is of several ranks; add --world M");
  }
  if (shard) asked.max_shard_mib = example::usage_count("--max-shard-mib", *shard, 1, 1 << 30);
  constexpr std::uint64_t most = 1'000'000'000'000;
  if (last) asked.keep_last = example::usage_count("--keep-last", *last, 1, most);
  if (every) asked.keep_every = example::usage_count("--keep-every", *every, 1, most);
  if (asked.command == command_kind::prune && !last && !every) {
    throw usage_error("prune needs to know what stays; give --keep-last N or --keep-every K");
  }
  return {asked, std::nullopt};
}

}  // namespace checkpoint_tool
