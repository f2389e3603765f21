/// @file
/// A recorded run of allocations and frees: in memory, as text, and a strict reader.
#pragma once

#include <llmmem/arena/arena.hpp>
#include <llmmem/error.hpp>

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/text.hpp"
#include "replay_trace/byte_source.hpp"
#include "replay_trace/line_reader.hpp"

namespace allocation_trace {

/// A trace that cannot be used: the text names file, line and reason.
class trace_error : public llmmem::error {
 public:
  using error::error;
};

/// One call. `bytes` 0 is a free.
struct event {
  std::uint32_t id = 0;     ///< of the allocation, counted from 0 in order
  std::uint64_t bytes = 0;  ///< requested bytes; 0 frees it
};

/// A program's calls, in order. `allocate` assigns the ids.
class trace {
 public:
  explicit trace(std::string name) : name_(std::move(name)) {}

  std::uint32_t allocate(std::uint64_t bytes) {
    const auto id = static_cast<std::uint32_t>(sizes_.size());
    sizes_.push_back(bytes);
    events_.push_back({id, bytes});
    live_ += bytes;
    if (live_ > peak_) peak_ = live_;
    return id;
  }
  /// @pre `id` is live.
  void free(std::uint32_t id) {
    events_.push_back({id, 0});
    live_ -= sizes_[id];
  }

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] const std::vector<event>& events() const noexcept { return events_; }
  [[nodiscard]] std::uint64_t allocations() const noexcept { return sizes_.size(); }
  [[nodiscard]] std::uint64_t bytes_of(std::uint32_t id) const noexcept { return sizes_[id]; }
  [[nodiscard]] std::uint64_t peak_live_bytes() const noexcept { return peak_; }

 private:
  std::string name_;
  std::vector<event> events_;
  std::vector<std::uint64_t> sizes_;
  std::uint64_t live_ = 0;
  std::uint64_t peak_ = 0;
};

inline constexpr std::string_view trace_header = "llmmem allocation trace 1";

/// The trace as text: the header, then `a ID BYTES` and `f ID`, one a line.
[[nodiscard]] inline std::string to_text(const trace& from) {
  std::string out(trace_header);
  out += '\n';
  for (const event& each : from.events()) {
    if (each.bytes != 0) {
      fmt::format_to(std::back_inserter(out), "a {} {}\n", each.id, each.bytes);
    } else {
      fmt::format_to(std::back_inserter(out), "f {}\n", each.id);
    }
  }
  return out;
}

/// Reads the text of `to_text`; the ids may be any numbers, each allocated once. Anything else is refused:
/// blank lines, signs, double spaces.
/// @throws trace_error  as `file:line: reason; near "text"`, for the first error.
template <replay_trace::byte_source Source>
[[nodiscard]] trace read_allocations(Source& source) {
  constexpr std::size_t longest_line = 64;
  constexpr std::uint64_t most_allocations = 100'000'000;
  const std::string name = example::printable(source.name(), 512);
  trace read{std::string(source.name())};
  std::unordered_map<std::uint64_t, std::optional<std::uint32_t>> ids;  // empty: freed
  replay_trace::line_reader<Source> lines(source, longest_line);
  std::uint64_t live = 0;
  while (const auto line = lines.next()) {
    const auto refuse = [&](const std::string& why) {
      throw trace_error(
          fmt::format("{}:{}: {}; near \"{}\"", name, line->number, why, example::printable(line->text, 40)));
    };
    if (!line->whole) refuse(fmt::format("the line is longer than {} bytes", longest_line));
    if (line->number == 1) {
      if (line->text != trace_header) refuse(fmt::format("the first line must be \"{}\"", trace_header));
      continue;
    }
    const bool allocates = line->text.starts_with("a ");
    if (!allocates && !line->text.starts_with("f ")) refuse("must be `a ID BYTES` or `f ID`");
    const std::string_view rest = line->text.substr(2);
    const std::size_t space = rest.find(' ');
    const auto id = example::parse_count(rest.substr(0, space));
    if (!id) refuse("the id is not a number");
    if (!allocates) {
      if (space != rest.npos) refuse("a free has one number, the id");
      const auto found = ids.find(*id);
      if (found == ids.end()) refuse(fmt::format("id {} was never allocated", *id));
      if (!found->second) refuse(fmt::format("id {} was freed before", *id));
      live -= read.bytes_of(*found->second);
      read.free(*found->second);
      found->second.reset();
      continue;
    }
    if (space == rest.npos) refuse("an allocation has two numbers, the id and the bytes");
    const auto bytes = example::parse_count(rest.substr(space + 1));
    if (!bytes) refuse("the bytes are not a number");
    if (*bytes == 0 || *bytes > llmmem::max_arena_bytes) {
      refuse(fmt::format("{} bytes; an allocation has 1 to {}", *bytes, llmmem::max_arena_bytes));
    }
    if (ids.contains(*id)) refuse(fmt::format("id {} was allocated before", *id));
    if (read.allocations() == most_allocations)
      refuse(fmt::format("more than {} allocations", most_allocations));
    live += *bytes;
    if (live > llmmem::max_arena_bytes) {
      refuse(fmt::format("{} bytes are live, more than {}", live, llmmem::max_arena_bytes));
    }
    ids[*id] = read.allocate(*bytes);
  }
  if (read.allocations() == 0) throw trace_error(name + ": no allocation in it");
  return read;
}

}  // namespace allocation_trace
