/// @file
/// Moves the pieces of a `bounce_queue` through its ring.
#pragma once

#include <llmmem/space/errors.hpp>
#include <llmmem/transfer/bounce_queue.hpp>
#include <llmmem/transfer/errors.hpp>
#include <llmmem/transfer/settle.hpp>

#include <time.h>

#include <new>

namespace llmmem {
inline namespace v0 {

template <class Upper, class Lower, memory_space Staging>
  requires(copy_queue<Upper, Upper> && copy_queue<Lower, Lower> && Staging::is_host_accessible)
bounce_options bounce_queue<Upper, Lower, Staging>::checked(bounce_options options) {
  if (options.slot_bytes == 0 || options.slot_bytes > options.budget_bytes) {
    throw argument_error(options.name + ": a budget of " + std::to_string(options.budget_bytes) +
                         " bytes has no space for a slot of " + std::to_string(options.slot_bytes) +
                         "; give it at least one slot, or two for both links to work at once");
  }
  if (options.alignment == 0 || (options.alignment & (options.alignment - 1)) != 0 ||
      options.slot_bytes % options.alignment != 0) {
    throw argument_error(options.name + ": slots of " + std::to_string(options.slot_bytes) +
                         " bytes at an alignment of " + std::to_string(options.alignment) +
                         "; the alignment must be a power of two that divides the slots' bytes");
  }
  if (options.max_operations == 0)
    throw argument_error(options.name + ": max_operations is 0; it must be at least 1");
  return options;
}

template <class Upper, class Lower, memory_space Staging>
  requires(copy_queue<Upper, Upper> && copy_queue<Lower, Lower> && Staging::is_host_accessible)
bounce_queue<Upper, Lower, Staging>::bounce_queue(Upper& upper, Lower& lower, Staging& staging,
                                                  bounce_options options)
    : options_(checked(std::move(options))),
      upper_(&upper),
      lower_(&lower),
      ring_(staging, options_.budget_bytes / options_.slot_bytes, options_.slot_bytes,
            std::align_val_t{options_.alignment}),
      board_(options_.max_operations, options_.max_failures, options_.metadata),
      slots_(static_cast<std::size_t>(options_.budget_bytes / options_.slot_bytes)),
      operations_(options_.max_operations, operation{}, options_.metadata, "bounce_queue: operations") {
  stats_.budget_bytes = slots_.size() * options_.slot_bytes;
  board_.driven_by(
      [](void* self, const transfer_fence& awaited) noexcept {
        static_cast<bounce_queue*>(self)->await(awaited);
      },
      this);
}

template <class Upper, class Lower, memory_space Staging>
  requires(copy_queue<Upper, Upper> && copy_queue<Lower, Lower> && Staging::is_host_accessible)
bounce_queue<Upper, Lower, Staging>::~bounce_queue() {
  for (std::uint32_t i = 0; i < operations_.size(); ++i) {
    if (operations_[i].runs) fail(i, {.code = errc::cancelled, .where = options_.name.c_str()});
  }
  for (std::uint32_t i = 0; i < slots_.size(); ++i) {
    while (slots_[i].at != hop::idle && slots_[i].at != hop::lost)
      step(i, true);
  }
  // With a lost slot in it the ring stays charged to the space, and is never reused.
  if (stats_.lost_bytes != 0) static_cast<void>(ring_.release());
}

template <class Upper, class Lower, memory_space Staging>
  requires(copy_queue<Upper, Upper> && copy_queue<Lower, Lower> && Staging::is_host_accessible)
result<transfer_fence> bounce_queue<Upper, Lower, Staging>::start(way direction, upper_range upper,
                                                                  lower_range lower,
                                                                  std::span<const transfer_fence> after,
                                                                  transfer::urgency how,
                                                                  bounce_checksum* checksum) {
  const char* where = options_.name.c_str();
  if (upper.bytes != lower.bytes) {
    return failure{.code = errc::size_mismatch, .wanted = upper.bytes, .found = lower.bytes, .where = where};
  }
  if (after.size() > max_after) {
    return failure{.code = errc::out_of_range, .wanted = after.size(), .found = max_after, .where = where};
  }
  if (checksum != nullptr && checksum->bytes > upper.bytes) {
    return failure{
        .code = errc::past_the_bytes, .wanted = checksum->bytes, .found = upper.bytes, .where = where};
  }
  if (stats_.lost_bytes == stats_.budget_bytes) {
    return failure{.code = errc::out_of_bytes, .wanted = options_.slot_bytes, .found = 0, .where = where};
  }
  const result<std::uint32_t> had = board_.begin(where);
  if (!had) return had.error();
  const transfer_fence fence = board_.fence(*had);
  operation& o = operations_[*had];
  o = operation{};
  o.runs = true;
  o.direction = direction;
  o.how = how;
  o.number = ++started_;
  o.upper = upper;
  o.lower = lower;
  o.checksum = checksum;
  for (const transfer_fence& each : after)
    o.after[o.after_count++] = each;
  if (checksum != nullptr) checksum->crc = 0;
  finish_if_over(*had);  // one without bytes or dependencies
  poll();
  return fence;
}

template <class Upper, class Lower, memory_space Staging>
  requires(copy_queue<Upper, Upper> && copy_queue<Lower, Lower> && Staging::is_host_accessible)
void bounce_queue<Upper, Lower, Staging>::poll() noexcept {
  detail::poll_queue(*upper_);
  detail::poll_queue(*lower_);
  for (std::uint32_t i = 0; i < slots_.size(); ++i)
    step(i, false);
  begin_pieces();
}

/// Fills the free slots.
template <class Upper, class Lower, memory_space Staging>
  requires(copy_queue<Upper, Upper> && copy_queue<Lower, Lower> && Staging::is_host_accessible)
void bounce_queue<Upper, Lower, Staging>::begin_pieces() noexcept {
  std::uint32_t index = 0;
  for (;;) {
    const std::uint32_t owner = next_operation();
    if (owner == none) return;
    while (index < slots_.size() && slots_[index].at != hop::idle)
      ++index;
    if (index == slots_.size()) {
      if (stats_.lost_bytes != stats_.budget_bytes) return;
      fail(owner, {.code = errc::out_of_bytes,
                   .wanted = options_.slot_bytes,
                   .found = 0,
                   .where = options_.name.c_str()});
      continue;
    }
    operation& o = operations_[owner];
    slot& s = slots_[index];
    const std::uint64_t left = o.upper.bytes - o.begun;
    s.owner = owner;
    s.begin = o.begun;
    s.bytes = left < options_.slot_bytes ? left : options_.slot_bytes;
    s.at = hop::filling;
    const result<void> begun = begin_hop(index, o.direction == way::down);
    if (!begun) {
      s.at = hop::idle;
      // Other operations occupy it: the next poll asks again.
      if (begun.code() == errc::table_full) return;
      fail(owner, begun.error());
      continue;
    }
    o.begun += s.bytes;
    ++o.flying;
    stats_.used_bytes += options_.slot_bytes;
    if (stats_.used_bytes > stats_.peak_bytes) stats_.peak_bytes = stats_.used_bytes;
  }
}

/// Returns the operation whose next piece begins, or `none`. Ends due operations that have no piece left or
/// whose dependencies failed.
template <class Upper, class Lower, memory_space Staging>
  requires(copy_queue<Upper, Upper> && copy_queue<Lower, Lower> && Staging::is_host_accessible)
std::uint32_t bounce_queue<Upper, Lower, Staging>::next_operation() noexcept {
  std::uint32_t found = none;
  for (std::uint32_t i = 0; i < operations_.size(); ++i) {
    operation& o = operations_[i];
    if (!o.runs || (has_begun_all(o) && o.after_count == 0)) continue;
    if (!all_ready(std::span<const transfer_fence>(o.after).first(o.after_count))) continue;
    failure why;
    for (std::uint32_t k = 0; k < o.after_count; ++k) {
      if (!o.after[k].outcome()) why = {.code = errc::dependency_failed, .where = options_.name.c_str()};
    }
    o.after_count = 0;
    if (why.code != errc::ok) {
      fail(i, why);
    } else if (has_begun_all(o)) {
      finish_if_over(i);
    } else if (found == none || o.how < operations_[found].how ||
               (o.how == operations_[found].how && o.number < operations_[found].number)) {
      found = i;
    }
  }
  return found;
}

/// Begins a hop of a slot's piece: from the upper or lower space while the slot is being filled, to the other
/// one after that.
template <class Upper, class Lower, memory_space Staging>
  requires(copy_queue<Upper, Upper> && copy_queue<Lower, Lower> && Staging::is_host_accessible)
result<void> bounce_queue<Upper, Lower, Staging>::begin_hop(std::uint32_t index, bool at_upper) noexcept {
  slot& s = slots_[index];
  const operation& o = operations_[s.owner];
  const std::span<std::byte> here = bytes_of(index);
  const bool fills = s.at == hop::filling;
  // A device's queue would wait for space, while others report that they have none.
  if (!(at_upper ? detail::has_capacity(*upper_) : detail::has_capacity(*lower_)))
    return failure{.code = errc::table_full, .where = options_.name.c_str()};
  try {
    if (at_upper) {
      const upper_range there = part(o.upper, s);
      const auto begun = fills ? detail::copy_out(*upper_, here, there, o.how)
                               : detail::copy_in(*upper_, there, std::span<const std::byte>(here), o.how);
      if (!begun) return begun.error();
      s.upper = *begun;
    } else {
      const lower_range there = part(o.lower, s);
      const auto begun = fills ? detail::copy_out(*lower_, here, there, o.how)
                               : detail::copy_in(*lower_, there, std::span<const std::byte>(here), o.how);
      if (!begun) return begun.error();
      s.lower = *begun;
    }
  } catch (...) {
    return failure{.code = errc::dependency_failed, .where = options_.name.c_str()};
  }
  s.number = ++hops_;
  return {};
}

template <class Upper, class Lower, memory_space Staging>
  requires(copy_queue<Upper, Upper> && copy_queue<Lower, Lower> && Staging::is_host_accessible)
bool bounce_queue<Upper, Lower, Staging>::is_ready(const slot& s) const noexcept {
  return is_at_upper(s) ? s.upper.ready() : s.lower.ready();
}

/// Waits for a slot's hop, and returns its result.
template <class Upper, class Lower, memory_space Staging>
  requires(copy_queue<Upper, Upper> && copy_queue<Lower, Lower> && Staging::is_host_accessible)
result<void> bounce_queue<Upper, Lower, Staging>::land(slot& s) noexcept {
  try {
    return is_at_upper(s) ? detail::settle(s.upper) : detail::settle(s.lower);
  } catch (...) {
    return failure{.code = errc::dependency_failed, .where = options_.name.c_str()};
  }
}

/// Makes progress with a slot's piece; waits for it if `waits`.
template <class Upper, class Lower, memory_space Staging>
  requires(copy_queue<Upper, Upper> && copy_queue<Lower, Lower> && Staging::is_host_accessible)
void bounce_queue<Upper, Lower, Staging>::step(std::uint32_t index, bool waits) noexcept {
  slot& s = slots_[index];
  if (s.at == hop::idle || s.at == hop::lost) return;
  if (s.at == hop::filled) return leave(index);
  if (!waits && !is_ready(s)) return;
  const result<void> landed = land(s);
  const bool fills = s.at == hop::filling;
  if (landed) return fills ? arrived(index) : release(index, hop::idle);
  failure why = landed.error();
  const bool is_lost = why.code == errc::completion_lost;
  // A device that may still write to the slot leaves the destination alone.
  if (is_lost && fills) why.code = errc::read_failed;
  fail(s.owner, why);
  release(index, is_lost ? hop::lost : hop::idle);
}

/// Handles a piece that is in the ring.
template <class Upper, class Lower, memory_space Staging>
  requires(copy_queue<Upper, Upper> && copy_queue<Lower, Lower> && Staging::is_host_accessible)
void bounce_queue<Upper, Lower, Staging>::arrived(std::uint32_t index) noexcept {
  slot& s = slots_[index];
  s.at = hop::filled;
  if (bounce_checksum* sum = operations_[s.owner].checksum; sum != nullptr && s.begin < sum->bytes) {
    const std::uint64_t left = sum->bytes - s.begin;
    const std::uint64_t counts = left < s.bytes ? left : s.bytes;
    // Pieces arrive in any order: each contributes its checksum shifted by the bytes after it.
    const std::uint32_t one = crc32c(0, bytes_of(index).first(static_cast<std::size_t>(counts)));
    sum->crc ^= crc32c_combine(one, 0, left - counts);
  }
  leave(index);
}

/// Sends a piece on.
template <class Upper, class Lower, memory_space Staging>
  requires(copy_queue<Upper, Upper> && copy_queue<Lower, Lower> && Staging::is_host_accessible)
void bounce_queue<Upper, Lower, Staging>::leave(std::uint32_t index) noexcept {
  slot& s = slots_[index];
  const operation& o = operations_[s.owner];
  if (o.why.code != errc::ok) return release(index, hop::idle);
  const result<void> begun = begin_hop(index, o.direction == way::up);
  if (begun) {
    s.at = hop::leaving;
    (o.direction == way::down ? stats_.bytes_down : stats_.bytes_up) += s.bytes;
  } else if (begun.code() != errc::table_full) {
    fail(s.owner, begun.error());
    release(index, hop::idle);
  }
}

/// Frees a slot.
template <class Upper, class Lower, memory_space Staging>
  requires(copy_queue<Upper, Upper> && copy_queue<Lower, Lower> && Staging::is_host_accessible)
void bounce_queue<Upper, Lower, Staging>::release(std::uint32_t index, hop now) noexcept {
  slot& s = slots_[index];
  const std::uint32_t owner = std::exchange(s.owner, none);
  s.at = now;
  stats_.used_bytes -= options_.slot_bytes;
  if (now == hop::lost) stats_.lost_bytes += options_.slot_bytes;
  --operations_[owner].flying;
  finish_if_over(owner);
}

/// Begins no further piece of it. Of several failures the first counts, except that `errc::completion_lost`
/// overrides others.
template <class Upper, class Lower, memory_space Staging>
  requires(copy_queue<Upper, Upper> && copy_queue<Lower, Lower> && Staging::is_host_accessible)
void bounce_queue<Upper, Lower, Staging>::fail(std::uint32_t owner, const failure& why) noexcept {
  operation& o = operations_[owner];
  if (o.why.code == errc::ok || why.code == errc::completion_lost) o.why = why;
  o.begun = o.upper.bytes;
  o.after_count = 0;
  finish_if_over(owner);
}

template <class Upper, class Lower, memory_space Staging>
  requires(copy_queue<Upper, Upper> && copy_queue<Lower, Lower> && Staging::is_host_accessible)
void bounce_queue<Upper, Lower, Staging>::finish_if_over(std::uint32_t owner) noexcept {
  operation& o = operations_[owner];
  if (!o.runs || o.flying != 0 || o.after_count != 0 || !has_begun_all(o)) return;
  o.runs = false;
  ++stats_.operations;
  if (o.why.code != errc::ok) ++stats_.failures;
  board_.finish(owner, o.why);
}

/// Makes progress until something has ended, by waiting for the hop that is most likely to end next,
/// preferably of `awaited`.
template <class Upper, class Lower, memory_space Staging>
  requires(copy_queue<Upper, Upper> && copy_queue<Lower, Lower> && Staging::is_host_accessible)
void bounce_queue<Upper, Lower, Staging>::await(const transfer_fence& awaited) noexcept {
  poll();
  if (awaited.ready()) return;
  const std::uint32_t owner = transfer_board::slot_of(awaited);
  std::uint32_t chosen = none;
  bool chosen_is_own = false;
  for (std::uint32_t i = 0; i < slots_.size(); ++i) {
    const slot& s = slots_[i];
    if (s.at != hop::filling && s.at != hop::leaving) continue;
    const bool is_own = s.owner == owner;
    const bool is_older = chosen != none && s.number < slots_[chosen].number;
    if (chosen == none || (is_own && !chosen_is_own) || (is_own == chosen_is_own && is_older)) {
      chosen = i;
      chosen_is_own = is_own;
    }
  }
  if (chosen != none) return step(chosen, true);
  for (std::uint32_t k = 0; k < operations_[owner].after_count; ++k) {
    // A fence of another queue: nothing here can make it pass.
    if (!operations_[owner].after[k].ready()) return static_cast<void>(operations_[owner].after[k].settled());
  }
  const timespec little{0, 20'000};  // a queue filled by other users
  ::nanosleep(&little, nullptr);
}

template <class Upper, class Lower, memory_space Staging>
  requires(copy_queue<Upper, Upper> && copy_queue<Lower, Lower> && Staging::is_host_accessible)
bounce_stats bounce_queue<Upper, Lower, Staging>::stats() const noexcept {
  bounce_stats now = stats_;
  now.metadata_bytes = board_.metadata_bytes() + operations_.bytes() + slots_.size() * sizeof(slot);
  return now;
}

}  // namespace v0
}  // namespace llmmem
