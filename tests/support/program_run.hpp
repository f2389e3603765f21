/// @file
/// A run of an example's program, and what it wrote.
#pragma once

#include <doctest/doctest.h>

#include <cstdio>
#include <string>

#include "common/program.hpp"

namespace llmmem_tests {

/// What a program wrote and how it ended.
struct outcome {
  example::exit_status status = example::exit_status::failure;
  std::string out;
  std::string notes;
};

/// Runs `program`, which is called with the files for results and for everything else.
template <class Program>
[[nodiscard]] outcome run_captured(Program&& program) {
  const example::file_handle out(std::tmpfile(), &std::fclose);
  const example::file_handle notes(std::tmpfile(), &std::fclose);
  REQUIRE(out);
  REQUIRE(notes);
  const example::exit_status status = program(out.get(), notes.get());
  const auto contents = [](std::FILE* file) {
    std::string text;
    std::rewind(file);
    for (int c = std::fgetc(file); c != EOF; c = std::fgetc(file))
      text += static_cast<char>(c);
    return text;
  };
  return {status, contents(out.get()), contents(notes.get())};
}

}  // namespace llmmem_tests
