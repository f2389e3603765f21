/// @file
/// Bodies of simulated_space.hpp. Only it includes them.
#pragma once

#include <llmmem/space/errors.hpp>
#include <llmmem/testing/simulated_space.hpp>

#include <bit>
#include <cstring>

namespace llmmem {
inline namespace v0 {
namespace testing {

inline result<simulated_space::range_type> simulated_space::try_allocate(std::uint64_t bytes,
                                                                         std::uint64_t alignment) noexcept {
  space_stats& memory = stats_.memory;
  const auto refuse = [&](error_code code, std::uint64_t wanted) {
    ++memory.refusals;
    return failure{.code = code,
                   .wanted = wanted,
                   .found = options_.budget - memory.used,
                   .where = options_.name.c_str()};
  };
  if (bytes == 0) return refuse(errc::zero_bytes, 0);
  if (!std::has_single_bit(alignment)) return refuse(errc::bad_alignment, alignment);
  if (bytes > options_.budget - memory.used) return refuse(errc::out_of_bytes, bytes);
  if (!live_.reserve_one()) return refuse(errc::system_refused, bytes);
  const aliased_pages pages = aliased_pages::map(bytes, alignment);
  if (pages.address == nullptr) return refuse(errc::system_refused, bytes);
  if (options_.fresh)
    std::memset(pages.alias, static_cast<int>(*options_.fresh), static_cast<std::size_t>(bytes));
  live_.insert(pages.address, bytes, {pages, memory.allocations});
  memory.used += bytes;
  if (memory.used > memory.peak) memory.peak = memory.used;
  ++memory.allocations;
  return range_type{pages.address, bytes};
}

inline void simulated_space::deallocate(range_type range) noexcept {
  if (range.data == nullptr && range.bytes == 0) return;
  misuse wrong = live_.check(options_.name.c_str(), range.data, range.bytes);
  if (wrong.what == misuse::kind::none) {
    const interval whole{range.data, range.bytes};
    for (const copy& c : in_flight_) {
      if (c.from.overlaps(whole) || c.to.overlaps(whole)) wrong.what = misuse::kind::in_flight;
    }
  }
  if (wrong.what != misuse::kind::none) {
    ++stats_.memory.misuses;
    options_.on_misuse(wrong, options_.misuse_context);
    return;
  }
  auto removed = live_.remove(range.data);
  stats_.memory.used -= removed.bytes;
  removed.payload.pages.unmap();
}

inline result<virtual_fence> simulated_space::start(direction way, interval from, interval to,
                                                    std::span<const virtual_fence> after) {
  if (from.bytes != to.bytes) {
    return failure{
        .code = errc::size_mismatch, .wanted = to.bytes, .found = from.bytes, .where = options_.name.c_str()};
  }
  if (from.overlaps(to)) {
    const std::uint64_t apart = from.data < to.data ? static_cast<std::uint64_t>(to.data - from.data)
                                                    : static_cast<std::uint64_t>(from.data - to.data);
    return failure{.code = errc::overlapping_ranges,
                   .wanted = to.bytes,
                   .found = to.bytes - apart,
                   .where = options_.name.c_str()};
  }
  virtual_time ready = clock_->now();
  for (const virtual_fence& f : after) {
    if (f.clock() == nullptr) continue;
    if (f.clock() != clock_) return failure{.code = errc::foreign_handle, .where = options_.name.c_str()};
    if (f.time() > ready) ready = f.time();
  }
  copy wanted{.number = copies_, .way = way, .from = from, .to = to, .finish = {}};
  check_order(wanted, ready);

  in_flight_.reserve(in_flight_.size() + 1);
  clock_->reserve(2);
  virtual_link& link = way == direction::within ? internal_ : link_;
  const virtual_link::span taken = link.schedule(ready, from.bytes);
  wanted.finish = taken.finish;
  in_flight_.push_back(wanted);
  ++copies_;
  auto& [memory, in, out, within, bytes_in, bytes_out, bytes_within, flying] = stats_;
  ++(way == direction::in ? in : way == direction::out ? out : within);
  (way == direction::in ? bytes_in : way == direction::out ? bytes_out : bytes_within) += from.bytes;

  const auto on_begin = [](void* self, std::uint64_t number) noexcept {
    static_cast<simulated_space*>(self)->begin(number);
  };
  const auto on_finish = [](void* self, std::uint64_t number) noexcept {
    static_cast<simulated_space*>(self)->finish(number);
  };
  clock_->at(taken.start, on_begin, this, wanted.number);
  clock_->at(taken.finish, on_finish, this, wanted.number);
  clock_->advance_to(clock_->now());  // what starts, or ends, immediately
  return virtual_fence{*clock_, taken.finish};
}

/// Throws if `wanted`, which may start at `ready`, touches what an unfinished copy touches, and one of them
/// writes.
inline void simulated_space::check_order(const copy& wanted, virtual_time ready) const {
  static constexpr const char* names[] = {"copy in", "copy out", "copy within"};
  for (const copy& other : in_flight_) {
    if (other.finish <= ready) continue;
    const bool reads_written = wanted.from.overlaps(other.to);
    const bool writes_written = wanted.to.overlaps(other.to);
    const bool writes_read = wanted.to.overlaps(other.from);
    if (!reads_written && !writes_written && !writes_read) continue;
    throw fence_error(options_.name + ": " + names[static_cast<int>(wanted.way)] +
                      (reads_written ? " reads " : " writes ") +
                      describe(reads_written ? wanted.from : wanted.to) + " from " +
                      std::to_string(ready.ns) + " ns on, but the " + names[static_cast<int>(other.way)] +
                      (reads_written || writes_written ? " that writes " : " that reads ") +
                      describe(reads_written || writes_written ? other.to : other.from) + " finishes at " +
                      std::to_string(other.finish.ns) + " ns; wait for its fence, or pass it in `after`");
  }
}

inline std::string simulated_space::describe(const interval& bytes) const {
  const auto* live = live_.holding(bytes.data, bytes.bytes);
  if (live == nullptr) return std::to_string(bytes.bytes) + " bytes of the host";
  const auto offset = static_cast<std::uint64_t>(bytes.data - live->data);
  return "bytes [" + std::to_string(offset) + ", " + std::to_string(offset + bytes.bytes) + ") of range " +
         std::to_string(live->payload.number);
}

/// Returns where the simulator itself may touch these bytes: the alias of a range, or the host's bytes.
inline std::byte* simulated_space::touchable(const interval& bytes) const noexcept {
  const auto* live = live_.holding(bytes.data, bytes.bytes);
  return live == nullptr ? const_cast<std::byte*>(bytes.data)
                         : live->payload.pages.alias + (bytes.data - live->data);
}

inline std::span<std::byte> simulated_space::device_view(range_type range) const {
  if (!holds(range)) dead(range).raise();
  const interval seen{range.data, range.bytes};
  for (const copy& c : in_flight_) {
    if (!c.to.overlaps(seen)) continue;
    throw fence_error(options_.name + ": the device looks at " + describe(seen) + ", which copy " +
                      std::to_string(c.number) + " fills until " + std::to_string(c.finish.ns) +
                      " ns; wait for its fence first");
  }
  return {touchable(seen), static_cast<std::size_t>(range.bytes)};
}

inline void simulated_space::begin(std::uint64_t number) noexcept {
  const copy& c = in_flight_[find(number)];
  if (c.to.bytes != 0) {
    std::memset(touchable(c.to), static_cast<int>(in_flight_fill), static_cast<std::size_t>(c.to.bytes));
  }
}

inline void simulated_space::finish(std::uint64_t number) noexcept {
  const std::size_t i = find(number);
  const copy done = in_flight_[i];
  in_flight_.erase(in_flight_.begin() + static_cast<std::ptrdiff_t>(i));
  if (done.to.bytes != 0) {
    std::memcpy(touchable(done.to), touchable(done.from), static_cast<std::size_t>(done.to.bytes));
  }
}

}  // namespace testing
}  // namespace v0
}  // namespace llmmem
