/// @file
/// The rules that all lines of a trace must follow: tokens per id, times of requests, numbers of ids.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>

#include "replay_trace/json_line.hpp"
#include "replay_trace/trace.hpp"
#include "replay_trace/trace_lines.hpp"

namespace replay_trace {

/// The number of a prompt's ids: one per block of `tokens` tokens, where a partial block has one or none.
struct block_rule {
  std::uint32_t tokens = 0;
  bool full_blocks_only = false;

  [[nodiscard]] constexpr std::uint64_t ids(std::uint64_t input_tokens) const noexcept {
    return (input_tokens + (full_blocks_only ? 0 : tokens - 1)) / tokens;
  }
};

/// Finds the rule that all lines of a trace follow.
///
/// It begins with several rules, the best first, and drops those that a line does not follow. A line that
/// would drop all of them is malformed, and drops none.
class block_rules {
 public:
  /// `block_tokens` tokens if given; otherwise those of `format`, or, for Mooncake's format as other tools
  /// write it, 16.
  block_rules(trace_format format, std::optional<std::uint32_t> block_tokens) noexcept {
    const std::uint32_t own = block_tokens.value_or(default_block_tokens(format));
    const std::uint32_t other = block_tokens ? own : default_block_tokens(trace_format::bailian);
    rules_ = {block_rule{own, false}, block_rule{own, true}, block_rule{other, false},
              block_rule{other, true}};
  }

  [[nodiscard]] bool fits(const parsed_line& line) const noexcept {
    bool any = false;
    for (std::size_t i = 0; i < rules_.size(); ++i)
      any = any || (left_.at(i) && follows(line, rules_.at(i)));
    return any;
  }

  /// @throws line_fault
  void take(const parsed_line& line, std::uint64_t number) {
    if (!fits(line)) refuse(line);
    for (std::size_t i = 0; i < rules_.size(); ++i) {
      if (!left_.at(i) || follows(line, rules_.at(i))) continue;
      left_.at(i) = false;
      told_by_ = number;
    }
    begun_ = true;
  }

  /// The best rule that every line has followed.
  [[nodiscard]] const block_rule& best() const noexcept {
    std::size_t i = 0;
    while (i + 1 < rules_.size() && !left_.at(i))
      ++i;
    return rules_.at(i);
  }

 private:
  [[nodiscard]] static bool follows(const parsed_line& line, const block_rule& rule) noexcept {
    return line.block_ids.size() == rule.ids(line.input_tokens);
  }

  [[noreturn]] void refuse(const parsed_line& line) const {
    const block_rule& rule = best();
    std::string reason =
        "hash_ids has " + std::to_string(line.block_ids.size()) + " ids, but input_length " +
        std::to_string(line.input_tokens) + " makes " + std::to_string(rule.ids(line.input_tokens)) +
        (rule.full_blocks_only ? " full" : "") + " blocks of " + std::to_string(rule.tokens) + " tokens";
    if (told_by_ != 0) reason += ", as they are counted since line " + std::to_string(told_by_);
    for (std::uint32_t tokens = 1; !begun_ && tokens <= max_suggested; tokens *= 2) {
      if (!follows(line, {tokens, false}) && !follows(line, {tokens, true})) continue;
      reason += "; it would fit --block-tokens " + std::to_string(tokens);
      break;
    }
    throw line_fault(line.ids_offset, reason);
  }

  static constexpr std::uint32_t max_suggested = 4096;

  std::array<block_rule, 4> rules_{};
  std::array<bool, 4> left_{true, true, true, true};
  std::uint64_t told_by_ = 0;  ///< the last line that dropped a rule
  bool begun_ = false;
};

/// Determines the times of requests: by their timestamps, or, without these, by their session's delays from
/// 0.
class request_clock {
 public:
  /// The time of the request in `line`, in microseconds.
  /// @throws line_fault  for a request without a timestamp, a session and a delay, if the first request has a
  ///                     timestamp.
  [[nodiscard]] std::uint64_t take(const parsed_line& line) {
    if (!line.timestamp_us && !line.session && !line.delay_us && begun_ && first_is_timed_) {
      throw line_fault(
          0,
          "field timestamp is missing, which the first request has; only a request with session_id or "
          "delay may go without");
    }
    std::uint64_t time = line.timestamp_us.value_or(line.delay_us.value_or(0));
    if (!line.timestamp_us && line.session) {
      if (const auto before = turns_.find(*line.session); before != turns_.end()) time += before->second;
    }
    if (static_cast<double>(time) > detail::max_time_us) {
      throw line_fault(0, "the delays of its session are more than 285 years");
    }
    if (line.session) turns_[*line.session] = time;
    if (!begun_) first_is_timed_ = line.timestamp_us.has_value();
    begun_ = true;
    any_is_timed_ = any_is_timed_ || line.timestamp_us.has_value();
    return time;
  }

  /// Returns whether any request had a timestamp.
  [[nodiscard]] bool has_timestamps() const noexcept { return any_is_timed_; }

 private:
  std::unordered_map<std::string, std::uint64_t> turns_;  ///< the time of each session's last request
  bool begun_ = false;
  bool first_is_timed_ = false;
  bool any_is_timed_ = false;
};

/// Refuses a trace whose ids are below 0 here and 2^63 or more there: as 64 bits, two of them might be the
/// same.
class id_signs {
 public:
  /// @throws line_fault
  void take(const parsed_line& line, std::uint64_t number) {
    const std::uint64_t negative = line.negative_id && negative_in_ == 0 ? number : negative_in_;
    const std::uint64_t large = line.large_id && large_in_ == 0 ? number : large_in_;
    if (negative != 0 && large != 0) {
      throw line_fault(line.ids_offset, "hash_ids are below 0 in line " + std::to_string(negative) +
                                            " and above 2^63 - 1 in line " + std::to_string(large) +
                                            ": write all of them signed or all of them unsigned");
    }
    negative_in_ = negative;
    large_in_ = large;
  }

 private:
  std::uint64_t negative_in_ = 0;  ///< the first line with one, 0 for none
  std::uint64_t large_in_ = 0;
};

/// All three rules. A refused line changes nothing.
class line_order {
 public:
  line_order(trace_format format, std::optional<std::uint32_t> block_tokens) noexcept
      : blocks_(format, block_tokens) {}

  /// Checks line `number` against the earlier ones. Returns its time in microseconds.
  /// @throws line_fault
  [[nodiscard]] std::uint64_t take(const parsed_line& line, std::uint64_t number) {
    block_rules blocks = blocks_;
    id_signs signs = signs_;
    blocks.take(line, number);
    signs.take(line, number);
    const std::uint64_t time = clock_.take(line);
    blocks_ = blocks;
    signs_ = signs;
    return time;
  }

  [[nodiscard]] std::uint32_t block_tokens() const noexcept { return blocks_.best().tokens; }
  [[nodiscard]] bool has_timestamps() const noexcept { return clock_.has_timestamps(); }

 private:
  block_rules blocks_;
  request_clock clock_;
  id_signs signs_;
};

}  // namespace replay_trace
