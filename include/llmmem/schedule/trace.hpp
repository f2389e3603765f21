/// @file
/// One iteration of a program as its memory sees it: when it holds which chunks, and how long it computes.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/schedule/detail/bodies.hpp>
#include <llmmem/tiering/access.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The kind of an event of a chunk.
enum class trace_call : std::uint8_t {
  acquire,  ///< from here to its release the chunk must be in tier 0
  release,  ///< the lease ends; the chunk keeps what was written
  discard,  ///< the chunk's contents are dropped; its next acquire is a `write`
};

/// One event. `compute_ns` passes between the previous event, or the iteration's beginning, and this one.
struct trace_event {
  std::uint64_t compute_ns = 0;
  chunk_id chunk{};
  trace_call call = trace_call::acquire;
  access_mode mode = access_mode::read;  ///< of an acquire; `read` otherwise

  friend constexpr bool operator==(const trace_event&, const trace_event&) noexcept = default;
};

/// One checked iteration of a program that repeats it: the first event follows the last. Made by
/// `trace_recorder::freeze`; it never changes.
///
/// Leases of different chunks may overlap; a chunk has at most one lease at a time. Before the first
/// iteration every chunk's contents are in the last tier.
///
/// @par Thread safety   const throughout.
class schedule_trace {
 public:
  static constexpr std::size_t most_events = std::size_t{1} << 30;
  static constexpr std::size_t most_chunks = std::size_t{1} << 30;
  /// The longest iteration without stalls, some 36 years, so that times computed from it cannot overflow.
  static constexpr std::uint64_t most_compute_ns = std::uint64_t{1} << 60;

  /// Returns the bytes of each chunk; none is 0.
  [[nodiscard]] std::span<const std::uint64_t> sizes() const noexcept LLMMEM_LIFETIMEBOUND { return sizes_; }
  [[nodiscard]] std::uint64_t size(chunk_id chunk) const noexcept { return sizes_[to_index(chunk)]; }
  [[nodiscard]] std::span<const trace_event> events() const noexcept LLMMEM_LIFETIMEBOUND { return events_; }
  /// Returns the computing time after the last event.
  [[nodiscard]] std::uint64_t tail_ns() const noexcept { return tail_ns_; }
  /// Returns the total computing time: the length of the iteration if nothing stalls.
  [[nodiscard]] std::uint64_t compute_ns() const noexcept { return compute_ns_; }
  /// Returns the most bytes leased at once: the smallest budget of tier 0 that can work.
  [[nodiscard]] std::uint64_t max_leased_bytes() const noexcept { return most_leased_; }
  [[nodiscard, deprecated("call max_leased_bytes()")]] std::uint64_t most_leased_bytes() const noexcept {
    return max_leased_bytes();
  }
  /// Identifies the program: a hash of sizes and events, without times, so that a plan outlives a recording.
  [[nodiscard]] std::uint64_t fingerprint() const noexcept { return fingerprint_; }

  /// Returns `times` iterations as one, to plan or to count over several.
  /// @throws length_error    when the events or the computing exceed the limits of a trace.
  [[nodiscard]] schedule_trace repeated(std::size_t times) const;

 private:
  friend class trace_recorder;
  schedule_trace() = default;

  std::vector<std::uint64_t> sizes_;
  std::vector<trace_event> events_;
  std::uint64_t tail_ns_ = 0;
  std::uint64_t compute_ns_ = 0;
  std::uint64_t most_leased_ = 0;
  std::uint64_t fingerprint_ = 0;
};

/// Records one iteration, call by call, and freezes it into a `schedule_trace`.
///
///     trace_recorder record;
///     const chunk_id weights = record.add_chunk(bytes);
///     record.acquire(weights, access_mode::read);
///     record.compute(ns);
///     record.release(weights);
///     const schedule_trace trace = record.freeze();
///
/// `freeze` checks the calls, so that recording in a running engine costs only a `push_back` per call.
///
/// @par Complexity      each call O(1) amortised; `freeze` O(events + chunks).
/// @par Thread safety   one writer.
/// @par Errors          `freeze` throws `argument_error` that names the event's index, its call and the
///                      reason; `length_error` past the limits of `schedule_trace`.
class trace_recorder {
 public:
  /// Adds a chunk. Ids count up from 0.
  chunk_id add_chunk(std::uint64_t bytes) {
    sizes_.push_back(bytes);
    acquired_.push_back(0);
    return chunk_id{static_cast<std::uint32_t>(sizes_.size() - 1)};
  }

  void acquire(chunk_id chunk, access_mode mode) {
    add(chunk, trace_call::acquire, mode);
    if (to_index(chunk) < acquired_.size()) acquired_[to_index(chunk)] = events_.size();
  }
  void release(chunk_id chunk) { add(chunk, trace_call::release, access_mode::read); }
  /// Records that a chunk that was acquired to read also changes.
  void also_changes(chunk_id chunk) noexcept {
    const std::uint32_t index = to_index(chunk);
    if (index >= acquired_.size() || acquired_[index] == 0) return;
    trace_event& event = events_[acquired_[index] - 1];
    if (event.mode == access_mode::read) event.mode = access_mode::read_write;
  }
  void discard(chunk_id chunk) { add(chunk, trace_call::discard, access_mode::read); }
  /// Adds `ns` of computing after the last event; several calls add up.
  void compute(std::uint64_t ns) noexcept {
    pending_ns_ = ns > ~std::uint64_t{0} - pending_ns_ ? ~std::uint64_t{0} : pending_ns_ + ns;
  }

  /// Returns the number of events so far.
  [[nodiscard]] std::size_t events() const noexcept { return events_.size(); }

  /// Returns the trace of the recording. The recorder does not change.
  [[nodiscard]] schedule_trace freeze() const;

 private:
  friend class schedule_trace;
  void add(chunk_id chunk, trace_call call, access_mode mode) {
    events_.push_back({std::exchange(pending_ns_, 0), chunk, call, mode});
  }

  std::vector<std::uint64_t> sizes_;
  std::vector<std::size_t> acquired_;  // by chunk: the event of its last acquire, plus one
  std::vector<trace_event> events_;
  std::uint64_t pending_ns_ = 0;
};

}  // namespace v0
}  // namespace llmmem

#if LLMMEM_SCHEDULE_BODIES
#include <llmmem/schedule/detail/trace_body.hpp>
#endif
