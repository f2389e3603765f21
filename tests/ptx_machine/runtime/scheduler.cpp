/// @file
/// Decides when a device performs operations.
#include "ptx_machine/runtime/scheduler.hpp"

#include <algorithm>
#include <chrono>
#include <thread>

namespace ptx_machine {

namespace {
thread_local bool in_host_function = false;
constexpr u64 least_split = 256;
}  // namespace

bool scheduler::is_in_host_function() {
  return in_host_function;
}

void scheduler::use(timing when, u64 seed) {
  when_ = when;
  seed_ = seed;
  random_ = seeded_numbers(seed);
  wants_.clear();
  constexpr u64 choices[] = {0, 1, 4, 7};
  eagerness_ = choices[random_.below(4)];
}

/// Moves all from some byte on out of `first` into `last`.
void scheduler::split(task& first, task& last) {
  u64 all = 0;
  for (const move_of_bytes& each : first.moves)
    all += each.bytes;
  u64 left = 16 * (1 + random_.below(all / 16 - 1));
  last.call = first.call;
  last.names = first.names;
  last.is_unordered = first.is_unordered;
  std::vector<move_of_bytes> some;
  for (move_of_bytes each : first.moves) {
    const u64 here = std::min(left, each.bytes);
    left -= here;
    if (here != 0) {
      some.push_back(each);
      some.back().bytes = here;
    }
    if (here == each.bytes) continue;
    each.to += here;
    if (each.value < 0) each.from += here;
    each.bytes -= here;
    last.moves.push_back(std::move(each));
  }
  first.moves = std::move(some);
  if (random_.below(2) == 0) std::swap(first, last);
}

operation_pointer scheduler::add(task what, u32 stream, const std::vector<operation_pointer>& behind) {
  operation_pointer made;
  u64 all = 0;
  for (const move_of_bytes& each : what.moves)
    all += each.bytes;
  if (when_ == timing::seeded && what.is_unordered) {
    for (std::size_t n = what.moves.size(); n > 1; --n)
      std::swap(what.moves[n - 1], what.moves[random_.below(n)]);
  }
  if (when_ == timing::seeded && all >= least_split && random_.below(2) == 0) {
    task rest;
    split(what, rest);
    made = put(std::move(what), stream, behind);
    made = put(std::move(rest), stream, {made});
  } else {
    made = put(std::move(what), stream, behind);
  }
  while (when_ == timing::at_once && !ready_.empty())
    start(*ready_.begin()->second, false);
  return made;
}

operation_pointer scheduler::put(task what, u32 stream, const std::vector<operation_pointer>& behind) {
  const auto made = std::make_shared<operation>();
  made->what = std::move(what);
  made->number = next_number_++;
  made->stream = stream;
  for (const operation_pointer& each : behind) {
    if (!each || each->is_done) continue;
    made->behind.push_back(each);
    each->then.push_back(made.get());
    ++made->waits_for;
  }
  pending_[made->number] = made;
  if (made->waits_for == 0) ready_[made->number] = made.get();
  return made;
}

void scheduler::finish(operation& of) {
  for (operation* each : of.then)
    if (--each->waits_for == 0) ready_[each->number] = each;
  of.is_done = true;
  of.then.clear();
  of.behind.clear();
  of.what = {};
  pending_.erase(of.number);  // it may have been the last to hold it
  came_.notify_all();
}

/// Performs an operation that is free to run. A host function is only begun: it may wait for what the caller
/// holds, so the caller waits for it briefly.
void scheduler::start(operation& next, bool waits) {
  ready_.erase(next.number);
  if (!next.what.is_host_function) {
    perform_(next.what);
    finish(next);
    return;
  }
  const operation_pointer keeps = pending_[next.number];
  for_host_.push_back(&next);
  if (!std::exchange(has_worker_, true)) std::thread([this] { work_for_host(); }).detach();
  came_.notify_all();
  if (waits) return;  // in a loop of its own
  std::unique_lock held(lock, std::adopt_lock);
  came_.wait_for(held, std::chrono::milliseconds(20), [&] { return keeps->is_done; });
  static_cast<void>(held.release());
}

void scheduler::work_for_host() {
  in_host_function = true;
  std::unique_lock held(lock);
  for (;;) {
    came_.wait(held, [&] { return !for_host_.empty(); });
    operation& next = *for_host_.front();
    for_host_.pop_front();
    const std::function<void()> act = std::move(next.what.act);
    held.unlock();
    act();
    held.lock();
    finish(next);
  }
}

/// An operation that is free to run, of a stream that is preferred now.
operation* scheduler::preferred() {
  constexpr u64 choices[] = {0, 1, 4, 16};
  u64 all = 0;
  for (const auto& [number, each] : ready_) {
    const auto [found, is_new] = wants_.try_emplace(each->stream, 0);
    if (is_new) found->second = choices[random_.below(4)];
    all += found->second;
  }
  if (all == 0) return nullptr;
  u64 at = random_.below(all);
  for (const auto& [number, each] : ready_) {
    const u64 wanted = wants_[each->stream];
    if (at < wanted) return each;
    at -= wanted;
  }
  return nullptr;
}

void scheduler::proceed() {
  if (when_ != timing::seeded || ready_.empty()) return;
  constexpr u64 choices[] = {0, 1, 4, 7};
  if (random_.below(16) == 0) wants_.clear();
  if (random_.below(32) == 0) eagerness_ = choices[random_.below(4)];
  while (!ready_.empty() && random_.below(8) < eagerness_) {
    operation* const next = preferred();
    if (next == nullptr) return;
    start(*next, false);
  }
}

void scheduler::mark(const std::vector<operation_pointer>& wanted) {
  ++ticket_;
  std::vector<operation*> open;
  for (const operation_pointer& each : wanted)
    if (each && !each->is_done) open.push_back(each.get());
  while (!open.empty()) {
    operation& next = *open.back();
    open.pop_back();
    if (std::exchange(next.needed_by, ticket_) == ticket_) continue;
    for (const operation_pointer& each : next.behind)
      if (!each->is_done) open.push_back(each.get());
  }
}

/// A marked operation that is free to run.
operation* scheduler::needed() {
  std::vector<operation*> may;
  for (const auto& [number, each] : ready_) {
    if (each->needed_by != ticket_) continue;
    may.push_back(each);
    if (when_ != timing::seeded) break;
  }
  if (may.empty()) return nullptr;
  return may[may.size() == 1 ? 0 : random_.below(may.size())];
}

void scheduler::settle(const std::vector<operation_pointer>& wanted) {
  const auto is_over = [&] {
    return std::all_of(wanted.begin(), wanted.end(),
                       [](const operation_pointer& each) { return !each || each->is_done; });
  };
  mark(wanted);
  while (!is_over()) {
    // Operations that no one waits for may come in between.
    if (when_ == timing::seeded && random_.below(8) < eagerness_ && random_.below(4) == 0) {
      if (operation* const other = preferred(); other != nullptr) start(*other, false);
      mark(wanted);
      continue;
    }
    if (operation* const next = needed(); next != nullptr) {
      start(*next, true);
      continue;
    }
    // All that is left waits for a host function.
    std::unique_lock held(lock, std::adopt_lock);
    came_.wait(held);
    static_cast<void>(held.release());
    mark(wanted);
  }
}

void scheduler::settle_all() {
  std::vector<operation_pointer> all;
  for (const auto& [number, each] : pending_)
    all.push_back(each);
  settle(all);
}

bool scheduler::ask(operation& of) {
  if (of.is_done || when_ == timing::at_once) return of.is_done;
  const bool is_forced = ++of.asked % 4 == 0;
  if (when_ == timing::seeded && !is_forced && random_.below(2) == 0) return false;
  const operation_pointer keeps = pending_[of.number];
  mark({keeps});
  if (operation* const next = needed(); next != nullptr) start(*next, false);
  // Late timing answers as it was when the host asked.
  return when_ == timing::seeded && of.is_done;
}

bool scheduler::is_ordered(const operation& first, const std::vector<operation_pointer>& behind) {
  mark(behind);
  return first.needed_by == ticket_;
}

}  // namespace ptx_machine
