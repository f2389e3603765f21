/// @file
/// A folder that `checkpoint_tool` is run on, and files in it that are changed.
#pragma once

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint_tool/application.hpp"
#include "support/program_run.hpp"
#include "support/temporary_folder.hpp"

namespace llmmem_tests {

/// A folder whose path texts call `DIR`.
class world_folder {
 public:
  world_folder() : path_(std::filesystem::canonical(folder_.path()).string()) {}
  /// With what `fill` puts into it.
  template <class Fill>
  explicit world_folder(Fill fill) : world_folder() {
    fill(std::as_const(*this));
  }

  [[nodiscard]] std::string operator/(std::string_view name) const { return path_ + "/" + std::string(name); }
  [[nodiscard]] outcome run(std::vector<std::string> arguments) const {
    for (std::string& each : arguments)
      replace(each, "DIR", path_);
    outcome done = run_captured([&](std::FILE* out, std::FILE* notes) {
      return checkpoint_tool::run_application(arguments, out, notes);
    });
    replace(done.out, path_, "DIR");
    replace(done.notes, path_, "DIR");
    return done;
  }
  /// The output of a run that ends so.
  [[nodiscard]] std::string text(
      const std::vector<std::string>& arguments,
      checkpoint_tool::exit_status status = checkpoint_tool::exit_status::success) const {
    const outcome done = run(arguments);
    CAPTURE(done.notes);
    CHECK(done.status == status);
    return done.out;
  }
  /// The same of a run that is asked for JSON.
  [[nodiscard]] nlohmann::json json(
      std::vector<std::string> arguments,
      checkpoint_tool::exit_status status = checkpoint_tool::exit_status::success) const {
    arguments.emplace_back("--json");
    return nlohmann::json::parse(text(arguments, status));
  }
  /// The one line that says why a run failed, without the progress before it.
  [[nodiscard]] std::string why(
      const std::vector<std::string>& arguments,
      checkpoint_tool::exit_status status = checkpoint_tool::exit_status::failure) const {
    const outcome done = run(arguments);
    CHECK(done.status == status);
    CHECK(done.out.empty());
    return done.notes;
  }

 private:
  static void replace(std::string& text, std::string_view what, std::string_view by) {
    for (std::size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + by.size()))
      text.replace(at, what.size(), by);
  }

  temporary_folder folder_;
  std::string path_;
};

/// Prunes as `asked`, after a dry run which has to say the same. What was done.
inline nlohmann::json prune_as_foretold(const world_folder& world, const std::vector<std::string>& asked) {
  auto dry = asked;
  dry.emplace_back("--dry-run");
  nlohmann::json would = world.json(dry);
  nlohmann::json did = world.json(asked);
  CHECK(would["dry_run"] == true);
  would["dry_run"] = false;
  CHECK(would == did);
  return did;
}

inline std::string content(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void overwrite(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

inline void flip(const std::string& path, std::size_t at) {
  std::string text = content(path);
  text.at(at) = static_cast<char>(text.at(at) ^ 0x10);
  overwrite(path, text);
}

}  // namespace llmmem_tests
