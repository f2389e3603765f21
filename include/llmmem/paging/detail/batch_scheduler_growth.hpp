/// @file
/// Bodies of batch_scheduler.hpp, which alone includes this header: how running requests get blocks, and
/// which of them are preempted for that.
#pragma once

#include <llmmem/paging/batch_scheduler.hpp>
#include <llmmem/paging/errors.hpp>

namespace llmmem {
inline namespace v0 {

/// Collects the tokens that the running requests would compute, the first in order first.
template <class Cache, class Client, scheduling_order Order>
void batch_scheduler<Cache, Client, Order>::plan_growth() noexcept {
  growing_count_ = 0;
  std::uint64_t budget = options_.max_step_tokens;
  rank();
  for (std::uint32_t i = 0; i < running_count_ && budget != 0; ++i) {
    const request& each = requests_[ranked_[i]];
    if (each.is_ending || each.is_leaving || each.is_held || each.cut != none) continue;
    const auto tokens = client_->tokens(each.user);
    if (tokens.size() < each.planned) continue;  // it has not got the token of a completed step yet
    const auto rest = tokens.subspan(static_cast<std::size_t>(each.planned));
    const auto count = static_cast<std::size_t>(rest.size() < budget ? rest.size() : budget);
    const std::uint64_t pending = rest.empty() ? pending_tokens(each, tokens.size()) : 0;
    if (count + pending == 0 || pending > budget) continue;  // nothing new to compute
    growths_[growing_count_] = {
        .sequence = each.sequence, .tokens = rest.first(count), .unknown_tokens = pending};
    growing_[growing_count_++] = ranked_[i];
    budget -= count + pending;
  }
}

/// Returns whether no request was preempted and none lacks blocks.
template <class Cache, class Client, scheduling_order Order>
bool batch_scheduler<Cache, Client, Order>::grow_running(scheduled_step& out) noexcept {
  bool all_kept = true;
  end_emptied();
  for (std::uint32_t i = 0; i < running_count_; ++i)
    requests_[running_[i]].is_held = false;
  for (;;) {
    plan_growth();
    if (growing_count_ == 0) return all_kept;
    const auto grow = [&]() noexcept {
      return cache_->append_batch({growths_.data(), growing_count_}, {grown_.data(), growing_count_});
    };
    const auto done = grow();
    if (done) break;
    if (done.code() == errc::out_of_blocks) {
      all_kept = false;
      const std::uint64_t lacking = done.error().wanted - done.error().found;
      const std::uint64_t coming = coming_blocks();
      if (lacking > coming && preempt_last(1)) continue;
      const std::uint32_t first = growing_[0];
      keep_what_fits(done.error().found);
      if (growing_count_ != 0 && grow()) break;
      // Blocks that requests share come only when all of their holders are preempted.
      if (coming == 0 && preempt_last(0)) continue;
      growing_[0] = first;
      growing_count_ = 1;
    }
    // If only the first is left, it cannot grow. Otherwise the failure names the culprit: a sequence that is
    // too long, or that the engine released itself.
    std::uint32_t culprit = growing_[0];
    for (std::uint32_t i = 0; done.code() != errc::out_of_blocks && i < growing_count_; ++i) {
      if (growths_[i].sequence.slot == done.error().index) culprit = growing_[i];
    }
    const bool may_pass =
        done.code() == errc::out_of_blocks &&
        blocks_for(client_->tokens(requests_[culprit].user).size()) <= cache_->pool().blocks();
    if (may_pass) {  // other sequences, fences or a step in flight hold the blocks it needs
      out.blocked = {.needed = done.error().wanted, .available = done.error().found};
      return false;
    }
    if (requests_[culprit].in_flight != 0) {
      requests_[culprit].is_held = true;  // it ends when its step is completed
      continue;
    }
    give_up(culprit, done.error());
  }
  for (std::uint32_t i = 0; i < growing_count_; ++i) {
    request& each = requests_[growing_[i]];
    copy(grown_[i].copy);
    add_work(growing_[i], grown_[i].first, growths_[i].tokens.size() + growths_[i].unknown_tokens);
    each.known += growths_[i].tokens.size();
  }
  return all_kept;
}

/// Blocks that become available without preempting anyone: those of requests that go when their step in
/// flight is completed, and those that wait for fences.
template <class Cache, class Client, scheduling_order Order>
std::uint64_t batch_scheduler<Cache, Client, Order>::coming_blocks() const noexcept {
  std::uint64_t coming = cache_->stats().deferred;
  for (std::uint32_t i = 0; i < running_count_; ++i) {
    const request& each = requests_[running_[i]];
    if (each.is_ending || each.is_leaving) coming += own_blocks(each.sequence);
  }
  return coming;
}

/// Blocks that no other sequence holds: what preempting the holder brings.
template <class Cache, class Client, scheduling_order Order>
std::uint64_t batch_scheduler<Cache, Client, Order>::own_blocks(sequence_id sequence) const noexcept {
  std::uint64_t own = 0;
  for (const block_id block : cache_->blocks(sequence))
    own += cache_->pool().record(block).references() == 1 ? 1U : 0U;
  return own;
}

/// Blocks that a growth takes, including the block for a copy on write.
template <class Cache, class Client, scheduling_order Order>
std::uint64_t batch_scheduler<Cache, Client, Order>::needed_to_grow(
    const paging::growth& each) const noexcept {
  const std::uint64_t tokens = cache_->tokens(each.sequence);
  const auto blocks = cache_->blocks(each.sequence);
  const bool copies =
      tokens % cache_->block_tokens() != 0 && cache_->pool().record(blocks.back()).references() > 1;
  return blocks_for(tokens + each.tokens.size() + each.unknown_tokens) - blocks.size() + (copies ? 1 : 0);
}

/// Leaves in the step what `available` blocks allow. No request takes a block before an earlier one that
/// lacks blocks; requests that need none run on.
template <class Cache, class Client, scheduling_order Order>
void batch_scheduler<Cache, Client, Order>::keep_what_fits(std::uint64_t available) noexcept {
  std::uint32_t kept = 0;
  for (std::uint32_t i = 0; i < growing_count_; ++i) {
    const std::uint64_t needed = needed_to_grow(growths_[i]);
    if (needed > available) {
      available = 0;
      continue;
    }
    available -= needed;
    growths_[kept] = growths_[i];
    growing_[kept++] = growing_[i];
  }
  growing_count_ = kept;
}

/// Ends the running requests of which the client has taken back every token; cuts back those that shrank.
template <class Cache, class Client, scheduling_order Order>
void batch_scheduler<Cache, Client, Order>::end_emptied() noexcept {
  for (std::uint32_t i = 0; i < running_count_;) {
    const std::uint32_t slot = running_[i];
    request& each = requests_[slot];
    if (each.is_ending) {
      ++i;
      continue;
    }
    take_values(each);
    const std::uint64_t tokens = client_->tokens(each.user).size();
    if (tokens < each.known && tokens < each.cut) each.cut = tokens;
    cut_back(each);
    if (tokens != 0 || each.in_flight != 0) {
      ++i;
      continue;
    }
    give_up(slot, refusal(errc::empty_range, slot, 0, 0));
    i = 0;  // the client may have ended other requests in its callback
  }
}

template <class Cache, class Client, scheduling_order Order>
void batch_scheduler<Cache, Client, Order>::give_up(std::uint32_t slot, const failure& why) noexcept {
  const std::uint64_t user = requests_[slot].user;
  end(slot);
  ++counters_.exhausted;
  calls_ = calls::queue;  // nothing is half done, and the queues are examined again
  client_->exhausted(user, why);
  calls_ = calls::none;
}

/// Preempts the last running request in order that brings at least `least` blocks; never the first. Returns
/// false if there is none.
template <class Cache, class Client, scheduling_order Order>
bool batch_scheduler<Cache, Client, Order>::preempt_last(std::uint64_t least) noexcept {
  std::uint32_t first = 0;
  while (first < running_count_ && requests_[ranked_[first]].is_ending)
    ++first;
  for (std::uint32_t i = running_count_; i > first + 1; --i) {
    request& victim = requests_[ranked_[i - 1]];
    if (victim.is_ending || victim.is_leaving || own_blocks(victim.sequence) < least) continue;
    if (victim.in_flight != 0) {
      victim.is_leaving = true;
    } else {
      preempt(ranked_[i - 1]);
    }
    return true;
  }
  return false;
}

/// Preempts a request: releases its blocks and lets it wait again; its tokens stay with the client.
template <class Cache, class Client, scheduling_order Order>
void batch_scheduler<Cache, Client, Order>::preempt(std::uint32_t slot) noexcept {
  request& victim = requests_[slot];
  if constexpr (swapping_client<Client>) {
    victim.is_saved =
        is_worth_saving(victim) && client_->swap_out(victim.user, victim.sequence, victim.written);
    victim.saved = victim.is_saved ? victim.written : 0;
    counters_.swapped_out += victim.is_saved ? 1U : 0U;
  }
  static_cast<void>(cache_->release(victim.sequence));  // cannot fail: the scheduler owns it
  victim.sequence = {};
  victim.planned = 0;
  victim.known = 0;
  victim.written = 0;
  victim.cut = none;
  victim.is_running = false;
  victim.is_leaving = false;
  stop_running(slot);
  wait_again(slot);
  ++counters_.preempted;
}

/// Whether saving the KV and bringing it back takes less time than computing it again.
template <class Cache, class Client, scheduling_order Order>
bool batch_scheduler<Cache, Client, Order>::is_worth_saving(const request& victim) const noexcept {
  const swap_costs& costs = options_.swap;
  if (costs.compute_tokens_per_second == 0) return true;
  // Blocks that other sequences hold stay cached.
  const std::uint64_t own = own_blocks(victim.sequence) * cache_->block_tokens();
  const auto lost = static_cast<double>(own < victim.written ? own : victim.written);
  const auto moved = static_cast<double>(victim.written) * costs.bytes_per_token;
  return 2 * (costs.seconds_per_swap + moved / costs.bytes_per_second) <
         lost / costs.compute_tokens_per_second;
}

}  // namespace v0
}  // namespace llmmem
