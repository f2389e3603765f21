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
    if (each.planned < each.restart && each.in_flight != 0) continue;
    const auto tokens = client_->tokens(each.user);
    if (tokens.size() < each.planned) continue;  // it has not got the token of a completed step yet
    const auto rest = tokens.subspan(static_cast<std::size_t>(each.planned));
    auto count = static_cast<std::size_t>(rest.size() < budget ? rest.size() : budget);
    if (growing_count_ == 0 && count > first_part_) count = static_cast<std::size_t>(first_part_);
    if (const std::uint64_t most = step_limit(each, tokens.size()); count > most)
      count = static_cast<std::size_t>(most);
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
  limit_releases();
  for (;;) {
    plan_growth();
    if (growing_count_ == 0) return all_kept;
    const auto grow = [&]() noexcept {
      return cache_->append_batch({growths_.data(), growing_count_}, {grown_.data(), growing_count_});
    };
    const auto done = grow();
    if (done) break;
    if (accounts::is_short(done.code())) {
      all_kept = false;
      const counts missing = accounts_.missing({growths_.data(), growing_count_}, done.error());
      const counts coming = coming_blocks();
      if (!detail::covers(coming, missing) && preempt_last(missing, 1)) continue;
      const std::uint32_t first = growing_[0];
      keep_what_fits();
      if (growing_count_ != 0 && grow()) break;
      // Blocks that requests share come only when all of their holders are preempted.
      if (detail::sum_of(coming) == 0 && preempt_last(missing, 0)) continue;
      if (step_down(first)) continue;
      growing_[0] = first;
      growing_count_ = 1;
    }
    // If only the first is left, it cannot grow. Otherwise the failure names the culprit: a sequence that is
    // too long, or that the engine released itself.
    std::uint32_t culprit = growing_[0];
    for (std::uint32_t i = 0; !accounts::is_short(done.code()) && i < growing_count_; ++i) {
      if (growths_[i].sequence.slot == done.error().index) culprit = growing_[i];
    }
    bool may_pass = accounts::is_short(done.code()) &&
                    !accounts_.lack_alone(client_->tokens(requests_[culprit].user).size()).any;
    if constexpr (accounts::is_grouped) {
      may_pass =
          may_pass && (requests_[culprit].in_flight != 0 || !accounts_.is_alone(requests_[culprit].sequence));
    }
    if (may_pass) {  // other sequences, fences or a step in flight hold the blocks it needs
      out.blocked = {.needed = done.error().wanted, .available = done.error().found};
      if constexpr (accounts::is_grouped) out.blocked_group = done.error().index;
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
    copy(grown_[i]);
    add_work(growing_[i], grown_[i].first, growths_[i].tokens.size() + growths_[i].unknown_tokens);
    each.known += growths_[i].tokens.size();
  }
  return all_kept;
}

/// Blocks that become available without preempting anyone: those of requests that go when their step in
/// flight is completed, and those that wait for fences.
template <class Cache, class Client, scheduling_order Order>
typename batch_scheduler<Cache, Client, Order>::counts batch_scheduler<Cache, Client, Order>::coming_blocks()
    const noexcept {
  counts coming = accounts_.deferred();
  for (std::uint32_t i = 0; i < running_count_; ++i) {
    const request& each = requests_[running_[i]];
    if (each.is_ending || each.is_leaving) detail::add_counts(coming, accounts_.own(each.sequence));
  }
  return coming;
}

/// Keeps what a step in flight still reads; for other requests, releases may follow their length again. A
/// request that has passed the length for which it started again is cached again.
template <class Cache, class Client, scheduling_order Order>
void batch_scheduler<Cache, Client, Order>::limit_releases() noexcept {
  if constexpr (accounts::is_grouped) {
    for (std::uint32_t i = 0; i < running_count_; ++i) {
      request& each = requests_[running_[i]];
      if (each.restart != 0 && each.planned >= each.restart)
        static_cast<void>(cache_->limit_commits(each.sequence, unlimited));
      note_others(each);
      if (each.cut != none) continue;  // it is cut when its step in flight is completed
      static_cast<void>(cache_->limit_releases(each.sequence, each.in_flight != 0 ? each.oldest : unlimited));
    }
  }
}

/// Notes whether a request that started again takes its blocks while the engine holds others.
template <class Cache, class Client, scheduling_order Order>
void batch_scheduler<Cache, Client, Order>::note_others(request& each) noexcept {
  if constexpr (accounts::is_grouped) {
    if (each.planned < each.restart && !each.had_others) each.had_others = !accounts_.is_alone(each.sequence);
  }
}

/// Over groups, if a request lacks blocks and no preemption brings them: plans a shorter step for it, or, if
/// its own blocks take all pages, lets it start again. Returns whether to plan again.
template <class Cache, class Client, scheduling_order Order>
bool batch_scheduler<Cache, Client, Order>::step_down(std::uint32_t slot) noexcept {
  if constexpr (accounts::is_grouped) {
    request& each = requests_[slot];
    const std::uint64_t more = client_->tokens(each.user).size() - each.planned;
    std::uint64_t count = more < options_.max_step_tokens ? more : options_.max_step_tokens;
    if (count > first_part_) count = first_part_;
    if (count > 1) {
      first_part_ = count / 2;
      return true;
    }
    // Once, unless others have scattered its blocks again meanwhile.
    if (each.in_flight != 0 || (each.restart > each.planned && !each.had_others) ||
        !accounts_.is_alone(each.sequence) || accounts_.lack_alone(each.planned + 1).any)
      return false;
    const std::uint64_t lacked = each.planned + 1;
    preempt(slot);
    each.restart = lacked;
    each.had_others = false;
    first_part_ = none;
    return true;
  } else {
    static_cast<void>(slot);
    return false;
  }
}

/// Leaves in the step what the available blocks allow. No request takes a block before an earlier one that
/// lacks blocks; requests that need none run on.
template <class Cache, class Client, scheduling_order Order>
void batch_scheduler<Cache, Client, Order>::keep_what_fits() noexcept {
  std::uint32_t kept = 0;
  counts taken{};
  bool is_short = false;
  for (std::uint32_t i = 0; i < growing_count_; ++i) {
    const counts needed = accounts_.to_grow(growths_[i]);
    if (detail::sum_of(needed) != 0) {
      counts all = taken;
      detail::add_counts(all, needed);
      is_short = is_short || accounts_.lack(all, 0).any;
      if (is_short) continue;
      taken = all;
    }
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
    if constexpr (accounts::is_grouped) {
      // It no longer has the length for which it started again, so others need not wait until it passes that.
      if (tokens < each.restart && each.in_flight == 0) {
        each.restart = 0;
        static_cast<void>(cache_->limit_commits(each.sequence, unlimited));
      }
    }
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

/// Preempts the last running request in order that brings at least `least` blocks, if possible of a group
/// that lacks some; never the first. Returns false if there is none.
template <class Cache, class Client, scheduling_order Order>
bool batch_scheduler<Cache, Client, Order>::preempt_last(const counts& missing,
                                                         std::uint64_t least) noexcept {
  std::uint32_t first = 0;
  while (first < running_count_ && requests_[ranked_[first]].is_ending)
    ++first;
  // Blocks of other groups help only where they make a page free.
  for (const bool asks_group : {true, false}) {
    if (asks_group && (!accounts::is_grouped || least == 0)) continue;
    for (std::uint32_t i = running_count_; i > first + 1; --i) {
      request& victim = requests_[ranked_[i - 1]];
      if (victim.is_ending || victim.is_leaving) continue;
      const counts own = accounts_.own(victim.sequence);
      if (detail::sum_of(own) < least || (asks_group && !detail::helps(own, missing))) continue;
      if (victim.in_flight != 0) {
        victim.is_leaving = true;
      } else {
        preempt(ranked_[i - 1]);
      }
      return true;
    }
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
  if (victim.planned >= victim.restart) victim.restart = 0;
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
  const auto lost = static_cast<double>(accounts_.lost_tokens(victim.sequence, victim.written));
  const auto moved = static_cast<double>(victim.written) * costs.bytes_per_token;
  return 2 * (costs.seconds_per_swap + moved / costs.bytes_per_second) <
         lost / costs.compute_tokens_per_second;
}

}  // namespace v0
}  // namespace llmmem
