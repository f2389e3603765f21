/// @file
/// Writing and reading a plan. Private to schedule/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/schedule/detail/bodies.hpp>
#include <llmmem/schedule/plan_text.hpp>

#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

namespace detail {

inline constexpr std::array<std::string_view, 4> operation_names{"fetch", "write_back", "drop", "allocate"};
inline constexpr std::array<std::string_view, 2> moment_names{"ahead", "at_call"};

[[nodiscard]] inline std::uint32_t text_crc(std::string_view text) noexcept {
  return crc32c(0, std::as_bytes(std::span<const char>(text.data(), text.size())));
}

/// Appends words and numbers to lines.
class plan_writer {
 public:
  plan_writer& word(std::string_view text) {
    if (!fresh_) text_ += ' ';
    text_ += text;
    fresh_ = false;
    return *this;
  }
  plan_writer& number(std::uint64_t value) {
    std::array<char, 20> digits{};
    const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
    return word({digits.data(), static_cast<std::size_t>(end - digits.data())});
  }
  plan_writer& hex(std::uint64_t value, int digits) {
    std::string text;
    for (int i = digits; i-- > 0;)
      text += "0123456789abcdef"[value >> (4 * i) & 15U];
    return word(text);
  }
  void end() {
    text_ += '\n';
    fresh_ = true;
  }
  void flow_line(std::string_view name, const link_flow& each) {
    word(name).number(each.onboard.bytes).number(each.onboard.operations);
    number(each.offload.bytes).number(each.offload.operations).end();
  }
  void iteration(std::string_view name, const plan_iteration& each) {
    word("iteration").word(name).end();
    word("forecast").number(each.forecast.iteration_ns).number(each.forecast.compute_ns);
    for (const std::uint64_t ns : each.forecast.stalls.ns)
      number(ns);
    end();
    for (const link_flow& edge : each.forecast.edges)
      flow_line("flow", edge);
    word("bound").number(each.bound.stall_ns).end();
    for (const link_flow& edge : each.bound.edges)
      flow_line("least", edge);
    for (const plan_step& step : each.steps) {
      word("step").number(step.at_event).word(moment_names[static_cast<std::size_t>(step.when)]);
      word(operation_names[static_cast<std::size_t>(step.operation)]).number(to_index(step.chunk));
      number(step.from).number(step.to).number(step.bytes);
      number(step.start_ns).number(step.finish_ns).number(step.latest_ns).end();
    }
  }
  [[nodiscard]] std::string finish() {
    const std::uint32_t crc = text_crc(text_);
    word("crc32c").hex(crc, 8).end();
    return std::move(text_);
  }

 private:
  std::string text_;
  bool fresh_ = true;
};

/// Parses lines, and refuses every line that differs from the written form.
class plan_reader {
 public:
  explicit plan_reader(std::string_view text) : text_(text) {}

  [[noreturn]] LLMMEM_COLD void refuse(const std::string& why) const {
    throw argument_error("plan, line " + std::to_string(line_) + ": " + why);
  }

  /// Returns whether the next line begins with `word`; if so, begins to read that line.
  [[nodiscard]] bool begins(std::string_view word) {
    const std::string_view rest = text_.substr(at_);
    if (rest.size() <= word.size() || rest.substr(0, word.size()) != word) return false;
    if (rest[word.size()] != ' ' && rest[word.size()] != '\n') return false;
    ++line_;
    at_ += word.size();
    return true;
  }
  void begin(std::string_view word) {
    if (begins(word)) return;
    ++line_;
    const std::string_view rest = text_.substr(at_);
    refuse(rest.empty() ? "the text ends where '" + std::string(word) + "' is expected"
                        : "'" + std::string(word) + "' expected, found '" + shown(rest) + "'");
  }
  [[nodiscard]] std::string_view word() {
    if (at_ >= text_.size() || text_[at_] != ' ') refuse("a word is missing");
    const std::size_t from = ++at_;
    while (at_ < text_.size() && text_[at_] != ' ' && text_[at_] != '\n')
      ++at_;
    if (at_ == from) refuse("a word is missing");
    return text_.substr(from, at_ - from);
  }
  [[nodiscard]] std::uint64_t number(const char* what,
                                     std::uint64_t most = std::numeric_limits<std::uint64_t>::max()) {
    const std::string_view digits = word();
    std::uint64_t value = 0;
    const auto end = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (end.ec != std::errc{} || end.ptr != digits.data() + digits.size() ||
        (digits[0] == '0' && digits.size() > 1))
      refuse(std::string(what) + " '" + shown(digits) + "' is not a number of 64 bits");
    if (value > most)
      refuse(std::string(what) + " is " + std::to_string(value) + "; the most is " + std::to_string(most));
    return value;
  }
  [[nodiscard]] std::uint64_t hex(const char* what, std::size_t digits) {
    const std::string_view text = word();
    std::uint64_t value = 0;
    const auto end = std::from_chars(text.data(), text.data() + text.size(), value, 16);
    bool lower = true;
    for (const char each : text)
      lower = lower && !(each >= 'A' && each <= 'F');
    if (text.size() != digits || !lower || end.ec != std::errc{} || end.ptr != text.data() + text.size())
      refuse(std::string(what) + " '" + shown(text) + "' is not " + std::to_string(digits) +
             " hexadecimal digits");
    return value;
  }
  template <std::size_t N>
  [[nodiscard]] std::size_t choice(const char* what, const std::array<std::string_view, N>& names) {
    const std::string_view text = word();
    for (std::size_t i = 0; i < N; ++i) {
      if (text == names[i]) return i;
    }
    refuse(std::string(what) + " '" + shown(text) + "' is not known");
  }
  void end() {
    if (at_ >= text_.size()) refuse("the text ends within the line");
    if (text_[at_] != '\n') refuse("the line should end before '" + shown(text_.substr(at_)) + "'");
    ++at_;
  }
  [[nodiscard]] std::size_t at() const noexcept { return at_; }
  [[nodiscard]] bool done() const noexcept { return at_ == text_.size(); }

 private:
  /// Returns the printable part of the beginning of untrusted text.
  [[nodiscard]] static std::string shown(std::string_view text) {
    std::string all;
    for (const char each : text.substr(0, 24)) {
      if (each == '\n') break;
      all += each >= ' ' && each <= '~' ? each : '?';
    }
    return all;
  }

  std::string_view text_;
  std::size_t at_ = 0;
  std::size_t line_ = 0;
};

[[nodiscard]] inline link_flow read_flow(plan_reader& read) {
  link_flow each;
  each.onboard.bytes = read.number("onboard bytes", max_bytes);
  each.onboard.operations = read.number("onboard transfers");
  each.offload.bytes = read.number("offload bytes", max_bytes);
  each.offload.operations = read.number("offload transfers");
  read.end();
  return each;
}

[[nodiscard]] inline plan_step read_step(plan_reader& read, const schedule_plan& plan) {
  plan_step step;
  const std::size_t last_tier = plan.machine.tiers() - 1;
  step.at_event = static_cast<std::uint32_t>(read.number("event", plan.events));
  step.when = static_cast<plan_moment>(read.choice("moment", moment_names));
  step.operation = static_cast<plan_operation>(read.choice("operation", operation_names));
  if (plan.chunks == 0) read.refuse("there is a step, but the plan has no chunks");
  step.chunk = chunk_id{static_cast<std::uint32_t>(read.number("chunk", plan.chunks - 1))};
  step.from = static_cast<std::uint8_t>(read.number("tier", last_tier));
  step.to = static_cast<std::uint8_t>(read.number("tier", last_tier));
  step.bytes = read.number("bytes", max_bytes);
  step.start_ns = read.number("start");
  step.finish_ns = read.number("finish");
  step.latest_ns = read.number("latest start");
  read.end();
  return step;
}

inline void read_iteration(plan_reader& read, plan_iteration& into, const schedule_plan& plan) {
  read.begin("forecast");
  into.forecast.iteration_ns = read.number("iteration");
  into.forecast.compute_ns = read.number("computing");
  for (std::uint64_t& ns : into.forecast.stalls.ns)
    ns = read.number("stall");
  read.end();
  while (into.forecast.edges.size() < plan.machine.budgets.size() && read.begins("flow"))
    into.forecast.edges.push_back(read_flow(read));
  read.begin("bound");
  into.bound.stall_ns = read.number("stall");
  read.end();
  while (into.bound.edges.size() < plan.machine.budgets.size() && read.begins("least"))
    into.bound.edges.push_back(read_flow(read));
  while (read.begins("step")) {
    const plan_step step = read_step(read, plan);
    if (!into.steps.empty()) {
      const plan_step& before = into.steps.back();
      if (std::pair(step.at_event, step.when) < std::pair(before.at_event, before.when))
        read.refuse("the step comes before the one above it; steps are sorted by event and moment");
    }
    into.steps.push_back(step);
  }
}

}  // namespace detail

LLMMEM_SCHEDULE_BODY std::string write_plan(const schedule_plan& plan) {
  detail::plan_writer write;
  write.word("llmmem-schedule").number(plan_text_version).end();
  write.word("planner").word(plan.planner.empty() ? "unnamed" : plan.planner).end();
  write.word("trace").hex(plan.trace_fingerprint, 16).word("events").number(plan.events);
  write.word("chunks").number(plan.chunks).end();
  for (const std::uint64_t budget : plan.machine.budgets)
    write.word("tier").number(budget).end();
  for (const link_model& link : plan.machine.links) {
    write.word("link").number(link.bytes_per_second).number(link.latency_ns);
    write.number(link.offload_bytes_per_second)
        .word(link.duplex == link_duplex::full ? "full" : "half")
        .end();
  }
  for (const std::uint32_t edge : plan.machine.edges)
    write.word("edge").number(edge).end();
  for (const plan_placement& each : plan.start) {
    write.word("place").number(to_index(each.chunk)).number(each.tier);
    write.word(each.newest ? "newest" : "stale").word(each.home ? "home" : "away").end();
  }
  write.iteration("first", plan.first);
  write.iteration("steady", plan.steady);
  return write.finish();
}

LLMMEM_SCHEDULE_BODY schedule_plan read_plan(std::string_view text) {
  using detail::plan_reader;
  plan_reader read(text);
  schedule_plan plan;
  read.begin("llmmem-schedule");
  if (const std::uint64_t version = read.number("version"); version != plan_text_version)
    read.refuse("version " + std::to_string(version) + "; this reads " + std::to_string(plan_text_version));
  read.end();
  read.begin("planner");
  plan.planner = std::string(read.word());
  if (plan.planner.size() > 64) read.refuse("the planner's name has more than 64 letters");
  for (const char each : plan.planner) {
    if (each <= ' ' || each > '~') read.refuse("the planner's name is not plain text");
  }
  read.end();
  constexpr std::uint64_t most = std::uint64_t{1} << 30;
  constexpr std::array<std::string_view, 1> events{"events"};
  constexpr std::array<std::string_view, 1> chunks{"chunks"};
  read.begin("trace");
  plan.trace_fingerprint = read.hex("fingerprint", 16);
  static_cast<void>(read.choice("word", events));
  plan.events = static_cast<std::uint32_t>(read.number("events", most));
  static_cast<void>(read.choice("word", chunks));
  plan.chunks = static_cast<std::uint32_t>(read.number("chunks", most));
  read.end();
  while (plan.machine.tiers() <= schedule_machine::max_tiers && read.begins("tier")) {
    plan.machine.budgets.push_back(read.number("budget"));
    read.end();
  }
  while (plan.machine.links.size() < schedule_machine::max_tiers && read.begins("link")) {
    link_model link;
    link.bytes_per_second = read.number("bytes a second");
    link.latency_ns = read.number("latency");
    link.offload_bytes_per_second = read.number("bytes a second");
    constexpr std::array<std::string_view, 2> duplexes{"full", "half"};
    link.duplex = static_cast<link_duplex>(read.choice("duplex", duplexes));
    read.end();
    plan.machine.links.push_back(link);
  }
  while (plan.machine.edges.size() < schedule_machine::max_tiers && read.begins("edge")) {
    plan.machine.edges.push_back(
        static_cast<std::uint32_t>(read.number("link", schedule_machine::max_tiers)));
    read.end();
  }
  try {
    plan.machine.check();
  } catch (const argument_error& wrong) {
    read.refuse(wrong.what());
  }
  while (read.begins("place")) {
    if (plan.chunks == 0) read.refuse("there is a place, but the plan has no chunks");
    plan_placement each;
    each.chunk = chunk_id{static_cast<std::uint32_t>(read.number("chunk", plan.chunks - 1))};
    each.tier = static_cast<std::uint8_t>(read.number("tier", plan.machine.tiers() - 2));
    constexpr std::array<std::string_view, 2> ages{"stale", "newest"};
    constexpr std::array<std::string_view, 2> homes{"away", "home"};
    each.newest = read.choice("state", ages) == 1;
    each.home = read.choice("state", homes) == 1;
    read.end();
    if (!plan.start.empty() &&
        std::pair(each.chunk, each.tier) <= std::pair(plan.start.back().chunk, plan.start.back().tier))
      read.refuse("the place comes before the one above it; places are sorted by chunk and tier");
    plan.start.push_back(each);
  }
  constexpr std::array<std::string_view, 1> first{"first"};
  constexpr std::array<std::string_view, 1> steady{"steady"};
  read.begin("iteration");
  static_cast<void>(read.choice("iteration", first));
  read.end();
  detail::read_iteration(read, plan.first, plan);
  read.begin("iteration");
  static_cast<void>(read.choice("iteration", steady));
  read.end();
  detail::read_iteration(read, plan.steady, plan);
  const std::uint32_t crc = detail::text_crc(text.substr(0, read.at()));
  read.begin("crc32c");
  if (read.hex("checksum", 8) != crc) read.refuse("the checksum differs: the text was changed or damaged");
  read.end();
  if (!read.done()) read.refuse("there is text after the last line");
  return plan;
}

}  // namespace v0
}  // namespace llmmem
