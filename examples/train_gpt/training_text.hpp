/// @file
/// `load_text`: the text that a program trains on.
#pragma once

#include <llmmem/error.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "common/program.hpp"
#include "common/text.hpp"

namespace train_gpt {

/// A text, and its name in error texts and reports.
struct named_text {
  std::string name;
  std::string text;
};

namespace detail {

inline constexpr std::size_t most_text = std::size_t{1} << 30;

/// Appends a file. @throws llmmem::system_error, llmmem::argument_error
inline void append_file(std::string& text, const std::string& path) {
  const example::file_handle file = example::open(path, "rb");
  std::vector<char> part(std::size_t{1} << 20);
  while (const std::size_t got = std::fread(part.data(), 1, part.size(), file.get())) {
    text.append(part.data(), got);
    if (text.size() > most_text) {
      throw llmmem::argument_error(example::printable(path, 512) +
                                   ": has more than 1 GiB; train on a part of it");
    }
  }
  if (std::ferror(file.get()) != 0) throw example::file_error(path, "read");
}

/// The headers in `folder`, in the order of their paths.
[[nodiscard]] inline std::vector<std::string> headers_in(const std::filesystem::path& folder) {
  std::vector<std::string> paths;
  std::error_code ignored;
  for (std::filesystem::recursive_directory_iterator at(folder, ignored), end; at != end;
       at.increment(ignored)) {
    if (at->path().extension() == ".hpp") paths.push_back(at->path().string());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

}  // namespace detail

/// Returns the requested text, or the first existing default.
/// @throws llmmem::system_error  for an unreadable file.
/// @throws usage_error           if there is no text.
[[nodiscard]] inline named_text load_text(const std::optional<std::string>& file) {
  named_text found;
  if (file) {
    found.name = example::printable(*file, 512);
    detail::append_file(found.text, *file);
    return found;
  }
  if (const char* const folder = std::getenv("LLMMEM_DATA_DIR"); folder != nullptr && *folder != '\0') {
    const std::string path = std::string(folder) + "/tinyshakespeare.txt";
    if (std::error_code ignored; std::filesystem::exists(path, ignored)) {
      found.name = "tinyshakespeare.txt";
      detail::append_file(found.text, path);
      return found;
    }
  }
#if defined(LLMMEM_SOURCE_DIR)
  for (const std::string& path : detail::headers_in(LLMMEM_SOURCE_DIR "/include/llmmem"))
    detail::append_file(found.text, path);
  found.name = "llmmem's own headers";
#endif
  if (found.text.empty()) {
    throw example::usage_error(
        "there is no text to train on: give --text FILE, or set LLMMEM_DATA_DIR to the folder of "
        "tinyshakespeare.txt");
  }
  return found;
}

}  // namespace train_gpt
