/// @file
/// The common parts of the examples' programs: command lines, files and exit statuses.
#pragma once

#include <llmmem/error.hpp>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "common/standard_streams.hpp"
#include "common/text.hpp"

namespace example {

enum class exit_status : int { success = 0, failure = 1, wrong_usage = 2 };

/// The command line is invalid: exit status 2.
class usage_error : public llmmem::error {
 public:
  using error::error;
};

/// Lets `app` read `arguments`, without the program's name.
/// @return the help text if it was requested.
/// @throws usage_error
[[nodiscard]] inline std::optional<std::string> parse(CLI::App& app, std::vector<std::string> arguments) {
  try {
    std::reverse(arguments.begin(), arguments.end());  // CLI11 takes them from the end
    app.parse(arguments);
  } catch (const CLI::CallForHelp&) {
    return app.help();
  } catch (const CLI::ParseError& wrong) {
    throw usage_error(printable(wrong.what(), 200));
  }
  return std::nullopt;
}

/// Returns an option and its value, as a `usage_error` begins: `--seed "x"`.
[[nodiscard]] inline std::string given(std::string_view option, std::string_view text) {
  return fmt::format("{} \"{}\"", option, printable(text, 40));
}

/// @param range  the valid numbers, in words
/// @throws usage_error  with the option, its value and valid ones.
template <std::floating_point Number>
[[nodiscard]] Number usage_number(std::string_view option, std::string_view text, Number least, Number most,
                                  std::string_view range) {
  Number read = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, failed] = std::from_chars(text.data(), end, read);
  if (failed != std::errc() || stop != end || !(read >= least) || !(read <= most))
    throw usage_error(fmt::format("{}: must be a number {}", given(option, text), range));
  return read;
}

/// @throws usage_error  with the option, its value and valid ones.
[[nodiscard]] inline std::uint64_t usage_count(std::string_view option, std::string_view text,
                                               std::uint64_t least, std::uint64_t most) {
  const auto value = parse_count(text);
  if (!value || *value < least || *value > most) {
    throw usage_error(
        fmt::format("{}: must be a whole number from {} to {}", given(option, text), least, most));
  }
  return *value;
}

/// Reads counts by name, `host=8,file=64`: each name once, in any order.
/// @param otherwise  the counts of names that are missing; 0: the name is required.
/// @return the counts, in the order of `names`.
/// @throws usage_error  for an unknown name, one that occurs twice, and a required one that is missing.
template <std::size_t Count>
[[nodiscard]] std::array<std::uint64_t, Count> usage_named_counts(
    const std::string& option, const std::string& text, const std::array<std::string_view, Count>& names,
    std::uint64_t most, std::string_view unit = "blocks",
    const std::array<std::uint64_t, Count>& otherwise = {}) {
  std::array<std::uint64_t, Count> counts{};
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find(',', at), text.size());
    const std::string part = text.substr(at, end - at);
    const std::size_t equal = std::min(part.find('='), part.size());
    const auto name = std::find(names.begin(), names.end(), part.substr(0, equal));
    if (name == names.end() || equal == part.size()) {
      std::string each;
      for (std::size_t i = 0; i < Count; ++i)
        each += fmt::format("{}{}=N", i == 0 ? "" : i + 1 == Count ? " or " : ", ", names[i]);
      throw usage_error(given(option, text) + ": each part is " + each + (unit.empty() ? "" : ", of ") +
                        std::string(unit));
    }
    std::uint64_t& count = counts[static_cast<std::size_t>(name - names.begin())];
    if (count != 0) throw usage_error(given(option, text) + ": " + std::string(*name) + " stands twice");
    count = usage_count(option + " " + std::string(*name), part.substr(equal + 1), 1, most);
    at = end + 1;
  }
  for (std::size_t i = 0; i < Count; ++i) {
    if (counts[i] == 0) counts[i] = otherwise[i];
    if (counts[i] == 0)
      throw usage_error(given(option, text) + ": " + std::string(names[i]) + "=N is missing");
  }
  return counts;
}

/// Reads a seed: any number, also 0.
/// @throws usage_error
[[nodiscard]] inline std::uint64_t usage_seed(std::string_view text) {
  return usage_count("--seed", text, 0, std::numeric_limits<std::uint64_t>::max());
}

using file_handle = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

/// Returns `path: cannot <what> it:` with the reason of `errno`.
[[nodiscard]] inline llmmem::system_error file_error(std::string_view path, std::string_view what) {
  const std::string reason = std::generic_category().message(errno);
  return llmmem::system_error(fmt::format("{}: cannot {} it: {}", printable(path, 512), what, reason));
}

/// @throws llmmem::system_error
[[nodiscard]] inline file_handle open(const std::string& path, const char* mode) {
  file_handle file(std::fopen(path.c_str(), mode), &std::fclose);
  if (!file) throw file_error(path, "open");
  return file;
}

/// Refuses to write a picture over what the program reads.
/// @throws usage_error
inline void check_not_overwritten(std::string_view option, const std::string& written,
                                  std::string_view read_option, const std::string& read) {
  std::error_code missing;
  if (!std::filesystem::equivalent(written, read, missing)) return;
  throw usage_error(std::string(option) + " would overwrite the file that " + std::string(read_option) +
                    " reads; give it another name");
}

/// Opens `path` for writing, and keeps its contents until something is written.
[[nodiscard]] inline file_handle open_for_writing(const std::string& path) {
  file_handle file(std::fopen(path.c_str(), "ab"), &std::fclose);
  if (!file) throw file_error(path, "write");
  return file;
}

inline void write_file(const std::string& path, std::string_view text) {
  file_handle file(std::fopen(path.c_str(), "wb"), &std::fclose);
  const bool written = file != nullptr &&
                       std::fwrite(text.data(), 1, text.size(), file.get()) == text.size() &&
                       std::fclose(file.release()) == 0;
  if (!written) throw file_error(path, "write");
}

/// Writes all of `text`, or throws `llmmem::system_error` with `name`.
inline void write(std::FILE* to, std::string_view text, std::string_view name) {
  if (std::fwrite(text.data(), 1, text.size(), to) != text.size() || std::fflush(to) != 0) {
    throw file_error(name, "write");
  }
}

/// A program's name, and its text for a lack of memory.
struct program {
  std::string_view name;
  std::string_view too_large;
};

/// Runs a program. An exception becomes one line on `notes` and an exit status.
/// @param parse  returns the parsed arguments, or the help text if that was requested.
/// @param work   does the work.
template <class Parse, class Work>
[[nodiscard]] exit_status run(const program& which, const std::vector<std::string>& arguments, std::FILE* out,
                              std::FILE* notes, Parse&& parse, Work&& work) {
  try {
    const auto [asked, help] = parse(arguments);
    if (help) {
      write(out, *help, "standard output");
    } else {
      work(asked);
    }
    return exit_status::success;
  } catch (const usage_error& wrong) {
    tell(notes, "{0}: {1}\nrun {0} --help for the options\n", which.name, wrong.what());
    return exit_status::wrong_usage;
  } catch (const std::bad_alloc&) {
    tell(notes, "{}: out of memory; {}\n", which.name, which.too_large);
  } catch (const std::exception& failed) {
    tell(notes, "{}: {}\n", which.name, failed.what());
  }
  return exit_status::failure;
}

}  // namespace example
