/// @file
/// The checks of `trace_recorder::freeze`. Private to schedule/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/schedule/detail/bodies.hpp>
#include <llmmem/schedule/trace.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// Hashes a sequence of numbers: FNV-1a's structure over whole words, with a final mix (SplitMix64's).
class word_hash {
 public:
  constexpr void add(std::uint64_t word) noexcept {
    state_ = (state_ ^ word) * 0x9E37'79B9'7F4A'7C15ULL;
    state_ ^= state_ >> 29;
  }
  [[nodiscard]] constexpr std::uint64_t value() const noexcept {
    std::uint64_t x = state_;
    x = (x ^ (x >> 30)) * 0xBF58'476D'1CE4'E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D0'49BB'1331'11EBULL;
    return x ^ (x >> 31);
  }

 private:
  std::uint64_t state_ = 0xCBF2'9CE4'8422'2325ULL;
};

[[nodiscard]] LLMMEM_COLD inline std::string describe(const trace_event& event, std::size_t index) {
  constexpr const char* calls[] = {"acquire", "release", "discard"};
  return "event " + std::to_string(index) + ", " + calls[static_cast<int>(event.call)] + " of chunk " +
         std::to_string(to_index(event.chunk)) + ": ";
}

/// The state of a chunk during the check of a trace.
struct traced_chunk {
  static constexpr std::uint32_t none = 0xFFFF'FFFF;
  std::uint32_t leased_by = none;     // event that acquired it
  std::uint32_t discarded_by = none;  // event that dropped its contents
};

/// Runs one pass over the events. The second pass, with `again`, begins with the discards of the first.
/// @return the most bytes leased at once.
inline std::uint64_t check_events(const std::vector<std::uint64_t>& sizes,
                                  const std::vector<trace_event>& events, std::vector<traced_chunk>& chunks,
                                  const char* again) {
  const auto refuse = [&](std::size_t index, const std::string& why) {
    throw argument_error("trace: " + describe(events[index], index) + why);
  };
  std::uint64_t leased = 0;
  std::uint64_t most = 0;
  for (std::size_t i = 0; i < events.size(); ++i) {
    const trace_event& event = events[i];
    const std::uint32_t index = to_index(event.chunk);
    if (index >= sizes.size())
      refuse(i, "it is not known; chunks are 0 to " + std::to_string(sizes.size()) + " - 1");
    traced_chunk& chunk = chunks[index];
    const bool held = chunk.leased_by != traced_chunk::none;
    if (event.call == trace_call::release) {
      if (!held) refuse(i, "no event has acquired it; acquire it first");
      chunk.leased_by = traced_chunk::none;
      leased -= sizes[index];
      continue;
    }
    if (held) refuse(i, "event " + std::to_string(chunk.leased_by) + " has acquired it and not released it");
    const bool worthless = chunk.discarded_by != traced_chunk::none;
    const std::string by =
        worthless ? "event " + std::to_string(chunk.discarded_by) + " has discarded it" + again : "";
    if (event.call == trace_call::discard) {
      if (worthless && *again == '\0') refuse(i, by + " already");
      chunk.discarded_by = static_cast<std::uint32_t>(i);
      continue;
    }
    if (worthless && tiering::reads(event.mode)) refuse(i, by + "; acquire it to write all of it");
    chunk.discarded_by = traced_chunk::none;
    chunk.leased_by = static_cast<std::uint32_t>(i);
    leased = checked_add(leased, sizes[index], "trace: bytes leased at once");
    most = std::max(most, leased);
  }
  for (const traced_chunk& chunk : chunks) {
    if (chunk.leased_by != traced_chunk::none)
      refuse(chunk.leased_by, "never released; an iteration ends with no lease");
  }
  return most;
}

}  // namespace detail

LLMMEM_SCHEDULE_BODY schedule_trace trace_recorder::freeze() const {
  if (events_.size() > schedule_trace::most_events || sizes_.size() > schedule_trace::most_chunks) {
    throw length_error("trace: " + std::to_string(events_.size()) + " events of " +
                       std::to_string(sizes_.size()) + " chunks; the most is 2^30 of each");
  }
  std::uint64_t all_bytes = 0;
  for (std::size_t i = 0; i < sizes_.size(); ++i) {
    if (sizes_[i] == 0) throw argument_error("trace: chunk " + std::to_string(i) + " has 0 bytes");
    all_bytes = checked_add(all_bytes, sizes_[i], "trace: bytes of all chunks");
  }
  schedule_trace made;
  std::vector<detail::traced_chunk> chunks(sizes_.size());
  made.most_leased_ = detail::check_events(sizes_, events_, chunks, "");
  detail::check_events(sizes_, events_, chunks, " an iteration earlier");

  detail::word_hash hash;
  for (const std::uint64_t size : sizes_)
    hash.add(size);
  hash.add(~std::uint64_t{0});
  std::uint64_t compute = 0;
  const auto computing = [&](std::uint64_t ns) {
    if (ns > schedule_trace::most_compute_ns || compute + ns > schedule_trace::most_compute_ns)
      throw length_error("trace: its compute time exceeds 2^60 ns, the most of an iteration");
    compute += ns;
  };
  for (const trace_event& event : events_) {
    computing(event.compute_ns);
    hash.add(std::uint64_t{to_index(event.chunk)} << 8 | static_cast<std::uint64_t>(event.call) << 4 |
             static_cast<std::uint64_t>(event.mode));
  }
  computing(pending_ns_);
  made.sizes_ = sizes_;
  made.events_ = events_;
  made.tail_ns_ = pending_ns_;
  made.compute_ns_ = compute;
  made.fingerprint_ = hash.value();
  return made;
}

LLMMEM_SCHEDULE_BODY schedule_trace schedule_trace::repeated(std::size_t times) const {
  if (times == 0) throw argument_error("trace: repeated 0 times; the least is 1");
  if (times > most_events || events_.size() * times > most_events) {
    throw length_error("trace: " + std::to_string(events_.size()) + " events " + std::to_string(times) +
                       " times; the most is 2^30");
  }
  trace_recorder record;
  for (const std::uint64_t size : sizes_)
    record.add_chunk(size);
  for (std::size_t i = 0; i < times; ++i) {
    for (const trace_event& event : events_) {
      record.compute(event.compute_ns);
      record.add(event.chunk, event.call, event.mode);
    }
    record.compute(tail_ns_);
  }
  return record.freeze();
}

}  // namespace v0
}  // namespace llmmem
