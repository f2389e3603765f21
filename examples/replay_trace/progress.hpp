/// @file
/// Progress of long work on a stream: a line that is rewritten on a terminal, a few lines elsewhere.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>

namespace replay_trace {

/// Where progress goes.
enum class progress_style : std::uint8_t {
  silent,
  lines,     ///< one line per quarter of the work, if a quarter takes half a second or more
  terminal,  ///< one line, rewritten at most ten times a second, and erased at the end
};

/// Shows the progress of work of `total` units. One writer.
class progress_meter {
 public:
  using clock = std::chrono::steady_clock;

  progress_meter(std::FILE* to, progress_style style, std::uint64_t total)
      : to_(to), style_(style), total_(std::max<std::uint64_t>(total, 1)) {}
  progress_meter(const progress_meter&) = delete;
  progress_meter& operator=(const progress_meter&) = delete;
  ~progress_meter() { finish(); }

  /// Names the present work.
  void begin(std::string what) { what_ = std::move(what); }

  /// Reports that `done` units are done at the time `now`.
  void update(std::uint64_t done, clock::time_point now = clock::now()) {
    done = std::min(done, total_);
    if (style_ == progress_style::terminal) {
      if (now - last_ < std::chrono::milliseconds(100)) return;
      last_ = now;
      const auto filled = static_cast<int>(done * bar_width / total_);
      fmt::print(to_, "\r\x1b[K[{:=<{}}{: <{}}] {:3}%  {}", "", filled, "", bar_width - filled,
                 done * 100 / total_, what_);
      std::fflush(to_);
      drawn_ = true;
    } else if (style_ == progress_style::lines) {
      const std::uint64_t quarter = done * 4 / total_;
      if (quarter <= quarter_ || now - last_ < std::chrono::milliseconds(500)) return;
      last_ = now;
      quarter_ = quarter;
      fmt::print(to_, "replay_trace: {} % done ({})\n", quarter * 25, what_);
    }
  }

  /// Erases the line from a terminal.
  void finish() noexcept {
    if (!std::exchange(drawn_, false)) return;
    std::fputs("\r\x1b[K", to_);
    std::fflush(to_);
  }

 private:
  static constexpr int bar_width = 30;

  std::FILE* to_;
  progress_style style_;
  std::uint64_t total_;
  std::uint64_t quarter_ = 0;
  std::string what_;
  clock::time_point last_ = clock::now();
  bool drawn_ = false;
};

}  // namespace replay_trace
