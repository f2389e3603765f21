/// @file
/// A strict reader of Prometheus' text exposition format 0.0.4, to check what a writer of it writes.
#pragma once

#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace llmmem_tests {

using label_map = std::map<std::string, std::string>;

struct exposed_sample {
  std::string name;
  label_map labels;
  double value = 0;
};

struct exposed_family {
  std::string type;
  std::string help;
  std::vector<exposed_sample> samples;
};

/// Families by name. Throws `std::runtime_error` with the line of the first rule that is broken.
class exposition {
 public:
  explicit exposition(std::string_view text) {
    if (!text.empty() && text.back() != '\n') refuse("the last line has no end");
    while (!text.empty()) {
      ++line_number_;
      const std::size_t end = text.find('\n');
      line_ = text.substr(0, end);
      text.remove_prefix(end + 1);
      if (line_.starts_with("# HELP "))
        help();
      else if (line_.starts_with("# TYPE "))
        type();
      else
        sample();
    }
    for (const auto& [name, family] : families_)
      check(name, family);
  }

  [[nodiscard]] const std::map<std::string, exposed_family>& families() const { return families_; }

 private:
  [[noreturn]] void refuse(const std::string& why) const {
    throw std::runtime_error("line " + std::to_string(line_number_) + ": " + why);
  }
  void need(bool holds, const char* why) const {
    if (!holds) refuse(why);
  }

  static bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
  static bool is_digit(char c) { return c >= '0' && c <= '9'; }

  std::string name(bool colon) {
    std::size_t n = 0;
    while (n < line_.size() &&
           (is_letter(line_[n]) || (colon && line_[n] == ':') || (n > 0 && is_digit(line_[n]))))
      ++n;
    need(n > 0, "a name is missing");
    const std::string out(line_.substr(0, n));
    line_.remove_prefix(n);
    return out;
  }
  void skip(std::string_view text) {
    need(line_.starts_with(text), "something else was expected");
    line_.remove_prefix(text.size());
  }

  void help() {
    skip("# HELP ");
    current_ = name(true);
    need(!families_.contains(current_), "a family stands twice");
    skip(" ");
    families_[current_].help = line_;
  }
  void type() {
    skip("# TYPE ");
    need(name(true) == current_ && families_[current_].type.empty(), "TYPE follows its HELP, once");
    skip(" ");
    need(line_ == "counter" || line_ == "gauge" || line_ == "histogram", "an unknown type");
    families_[current_].type = line_;
  }
  void sample() {
    exposed_sample read{.name = name(true), .labels = {}};
    if (line_.starts_with("{")) {
      skip("{");
      for (;;) {
        const std::string label = name(false);
        skip("=\"");
        need(read.labels.emplace(label, quoted()).second, "a label stands twice");
        if (line_.starts_with("}")) break;
        skip(",");
      }
      skip("}");
    }
    skip(" ");
    const char* const end = line_.data() + line_.size();
    const auto [stop, error] = std::from_chars(line_.data(), end, read.value);
    need(error == std::errc() && stop == end, "not a number");
    need(!current_.empty() && !families_[current_].type.empty(), "a sample before its TYPE");
    const bool is_histogram = families_[current_].type == "histogram";
    const bool fits = is_histogram ? read.name == current_ + "_bucket" || read.name == current_ + "_sum" ||
                                         read.name == current_ + "_count"
                                   : read.name == current_;
    need(fits, "a sample outside its family");
    std::string series = read.name;
    for (const auto& [key, value] : read.labels)
      series += '\0' + key + '\0' + value;
    need(seen_.insert(series).second, "a sample stands twice");
    families_[current_].samples.push_back(read);
  }
  std::string quoted() {
    std::string out;
    for (;;) {
      need(!line_.empty(), "a label value has no end");
      const char c = line_.front();
      line_.remove_prefix(1);
      if (c == '"') return out;
      if (c != '\\') {
        out += c;
        continue;
      }
      need(!line_.empty(), "a label value has no end");
      const char escaped = line_.front();
      line_.remove_prefix(1);
      need(escaped == '\\' || escaped == '"' || escaped == 'n', "an unknown escape");
      out += escaped == 'n' ? '\n' : escaped;
    }
  }

  void check(const std::string& name, const exposed_family& family) const {
    const auto fail = [&](const char* why) { throw std::runtime_error(name + ": " + why); };
    if (family.samples.empty()) fail("no samples");
    if (family.type == "counter" && !name.ends_with("_total")) fail("a counter ends in _total");
    if (family.type != "histogram") return;
    double below = 0;
    double bound = -std::numeric_limits<double>::infinity();
    bool closed = false;
    double count = -1;
    for (const exposed_sample& each : family.samples) {
      if (each.name == name + "_bucket") {
        if (closed || !each.labels.contains("le")) fail("a bucket behind +Inf or without le");
        const std::string& le = each.labels.at("le");
        const double next = le == "+Inf" ? std::numeric_limits<double>::infinity() : std::stod(le);
        if (!(next > bound) || each.value < below) fail("buckets do not grow");
        bound = next;
        below = each.value;
        closed = std::isinf(next);
      } else if (each.name == name + "_count") {
        count = each.value;
      }
    }
    if (!closed || count != below) fail("+Inf is not the count");
    if (family.samples.size() < 3 || family.samples[family.samples.size() - 2].name != name + "_sum")
      fail("no sum before the count");
  }

  std::map<std::string, exposed_family> families_;
  std::set<std::string> seen_;
  std::string_view line_;
  std::string current_;
  std::size_t line_number_ = 0;
};

}  // namespace llmmem_tests
