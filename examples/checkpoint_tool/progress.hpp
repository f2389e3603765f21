/// @file
/// Progress reports of long work.
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>

#include "checkpoint_tool/describe.hpp"

namespace checkpoint_tool {

/// Reports every few seconds how many bytes are done. One thread.
class progress {
 public:
  using clock = std::chrono::steady_clock;

  /// @param what  the work, such as "verifying step-...".
  progress(std::FILE* to, std::string what, std::uint64_t total,
           clock::duration every = std::chrono::seconds(2))
      : to_(to), what_(std::move(what)), total_(total), every_(every), told_(clock::now()) {}

  void add(std::uint64_t bytes) {
    done_ += bytes;
    const auto now = clock::now();
    if (now - told_ < every_) return;
    told_ = now;
    fmt::print(to_, "checkpoint_tool: {}: {} of {}\n", what_, bytes_shown(done_), bytes_shown(total_));
    std::fflush(to_);
  }
  [[nodiscard]] std::uint64_t done() const noexcept { return done_; }

 private:
  std::FILE* to_;
  std::string what_;
  std::uint64_t total_;
  std::uint64_t done_ = 0;
  clock::duration every_;
  clock::time_point told_;
};

}  // namespace checkpoint_tool
