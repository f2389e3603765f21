/// @file
/// Bodies of batch_scheduler.hpp, which alone includes this header: how a waiting request starts to run.
#pragma once

#include <llmmem/paging/batch_scheduler.hpp>
#include <llmmem/paging/errors.hpp>

namespace llmmem {
inline namespace v0 {

/// The place of the waiting request that is admitted next.
template <class Cache, class Client, scheduling_order Order>
std::uint32_t batch_scheduler<Cache, Client, Order>::next_waiting() const noexcept {
  std::uint32_t next = 0;
  if constexpr (!Order::is_by_arrival) {
    for (std::uint32_t i = 1; i < waiting_count_; ++i) {
      if (order_.precedes(requests_[waiting_at(i)].rank, requests_[waiting_at(next)].rank)) next = i;
    }
  }
  return next;
}

template <class Cache, class Client, scheduling_order Order>
void batch_scheduler<Cache, Client, Order>::admit_waiting(scheduled_step& out) noexcept {
  while (!has_restarted() && waiting_count_ != 0 && running_count_ < options_.max_running &&
         step_tokens_ < options_.max_step_tokens) {
    const std::uint32_t place = next_waiting();
    const std::uint32_t slot = waiting_at(place);
    const request& next = requests_[slot];
    const std::uint64_t tokens = client_->tokens(next.user).size();
    if (tokens == 0) {
      give_up(slot, refusal(errc::empty_range, slot, 0, 0));
      continue;
    }
    if (tokens > cache_->max_sequence_tokens()) {  // it grew while it waited
      give_up(slot, refusal(errc::sequence_full, slot, tokens, cache_->max_sequence_tokens()));
      continue;
    }
    if (tokens < next.restart) requests_[slot].restart = 0;  // it shrank while it waited
    if (next.restart != 0 && running_count_ != 0) return;    // it starts alone
    const counts needed = needed_to_start(next);
    const std::uint64_t leave = blocks_left_to_runners();
    bool fits = !accounts_.lack(needed, leave).any;
    if (!fits && cache_->collect() != 0) continue;  // the blocks collected may be enough
    if constexpr (accounts::is_grouped) {
      // Alone, it may go in smaller steps than the count assumes.
      fits = fits || (running_count_ == 0 && fits_in_small_steps(next));
    }
    if (!fits || !start(place)) {
      if (running_count_ == 0) {
        if (const auto lack = accounts_.lack_alone(tokens);
            lack.any) {  // it grew while it waited, or the pool shrank
          give_up(slot, too_large(slot, accounts_.lack(needed, leave)));
          continue;
        }
        block_on(out, needed, leave);
      }
      return;
    }
  }
}

/// Whether the only request that runs would have its blocks, one token at a time and without a hit.
template <class Cache, class Client, scheduling_order Order>
bool batch_scheduler<Cache, Client, Order>::fits_in_small_steps(const request& next) const noexcept {
  if constexpr (accounts::is_grouped) {
    const auto tokens = client_->tokens(next.user);
    if (accounts_.is_alone({})) return !accounts_.lack_alone(tokens.size()).any;
    return !accounts_.lack(accounts_.to_start(tokens, next.context, 1, 0), 0).any;
  } else {
    return false;
  }
}

/// Whether a request that was preempted to get its pages back has not yet passed the length at which it
/// lacked blocks: until then it stays alone.
template <class Cache, class Client, scheduling_order Order>
bool batch_scheduler<Cache, Client, Order>::has_restarted() const noexcept {
  if constexpr (accounts::is_grouped) {
    for (std::uint32_t i = 0; i < running_count_; ++i) {
      if (requests_[running_[i]].planned < requests_[running_[i]].restart) return true;
    }
  }
  return false;
}

/// Moves a waiting request to the running ones; returns false if it does not fit after all.
template <class Cache, class Client, scheduling_order Order>
bool batch_scheduler<Cache, Client, Order>::start(std::uint32_t place) noexcept {
  const bool is_first = accounts::is_grouped && running_count_ == 0;
  const std::uint64_t most = requests_[waiting_at(place)].restart == 0 ? unlimited : 0;
  attempt done = try_start(place, most, is_first);
  if (done == attempt::swap_lost) done = try_start(place, most, is_first);
  if (done == attempt::no_space && most != 0) done = start_with_less(place, is_first);
  // Without a match, then without what was saved.
  for (int left = 3; is_first && done != attempt::done && left > 0; --left)
    done = try_start(place, 0, true);
  return done == attempt::done;
}

/// Over groups, a match takes blocks from everywhere, so they may hold pages that other groups need. So a
/// request that fits by the count, but not with its hit, is tried with a half of it, a quarter, and so on to
/// none.
template <class Cache, class Client, scheduling_order Order>
typename batch_scheduler<Cache, Client, Order>::attempt
batch_scheduler<Cache, Client, Order>::start_with_less(std::uint32_t place, bool may_split) noexcept {
  attempt done = attempt::no_space;
  if constexpr (accounts::is_grouped) {
    const request& next = requests_[waiting_at(place)];
    const auto tokens = client_->tokens(next.user);
    const auto hit_within = [&](std::uint64_t most) noexcept {
      return cache_->cached_tokens(tokens.first(static_cast<std::size_t>(most)), next.context);
    };
    for (std::uint64_t hit = hit_within(tokens.size() - 1); hit != 0 && done == attempt::no_space;) {
      hit = hit_within(hit / 2);
      const counts needed = accounts_.to_start(tokens, next.context, options_.max_step_tokens, hit);
      if (!may_split && accounts_.lack(needed, blocks_left_to_runners()).any) continue;
      done = try_start(place, hit, may_split);
    }
  } else {
    static_cast<void>(place);
    static_cast<void>(may_split);
  }
  return done;
}

/// @param most_cached  tokens that it takes from the cache at most.
/// @param may_split  whether its first step may be shorter than the budget allows.
template <class Cache, class Client, scheduling_order Order>
typename batch_scheduler<Cache, Client, Order>::attempt batch_scheduler<Cache, Client, Order>::try_start(
    std::uint32_t place, std::uint64_t most_cached, bool may_split) noexcept {
  const std::uint32_t slot = waiting_at(place);
  request& starting = requests_[slot];
  const auto tokens = client_->tokens(starting.user);
  const auto sequence = cache_->create(starting.context, starting.hints);
  if (!sequence) return attempt::no_space;
  starting.sequence = *sequence;
  if constexpr (accounts::is_grouped) {
    if (starting.restart != 0) {
      // It is alone. Idle blocks, others' or its own, would scatter its blocks over pages.
      cache_->drop_idle();
      static_cast<void>(cache_->limit_commits(*sequence, 0));
    }
  }
  if (most_cached != 0) {
    const std::uint64_t cacheable = tokens.size() - 1 < most_cached ? tokens.size() - 1 : most_cached;
    const auto hit = cache_->match(*sequence, tokens.first(static_cast<std::size_t>(cacheable)));
    starting.written = hit ? hit->tokens : 0;
    if constexpr (!accounts::is_grouped) {
      if (hit) copy(append_result{.copy = hit->copy});
    }
  }
  const auto take_back = [&](attempt why) noexcept {
    static_cast<void>(cache_->release(*sequence));  // cannot fail: the scheduler owns it
    starting.sequence = {};
    starting.written = 0;
    return why;
  };
  if constexpr (!accounts::is_grouped) {
    if (!bring_back(starting, tokens)) return take_back(attempt::no_space);
  }
  const std::uint64_t first = starting.written;
  const std::uint64_t most = step_limit(starting, tokens.size());
  const auto lacks_space = [&]() noexcept {
    // Alone, it is computed again in steps that fit.
    if (may_split && first == 0) starting.saved = 0;
    return take_back(attempt::no_space);
  };
  if (!reserve_saved(starting, tokens, most)) return lacks_space();
  const auto rest = tokens.subspan(static_cast<std::size_t>(starting.written));
  const std::uint64_t left = options_.max_step_tokens - step_tokens_;
  const std::uint64_t budget = left < most ? left : most;
  auto part = rest.first(static_cast<std::size_t>(rest.size() < budget ? rest.size() : budget));
  auto grown = cache_->append(*sequence, part);
  while (!grown && may_split && part.size() > 1) {
    part = part.first(part.size() / 2);
    grown = cache_->append(*sequence, part);
  }
  if (!grown) return lacks_space();
  if (!write_saved(starting, first)) return take_back(attempt::swap_lost);
  note_others(starting);
  copy(*grown);
  stop_waiting(place);
  run(slot);
  ++(starting.has_run ? counters_.resumed : counters_.admitted);
  starting.has_run = true;
  starting.known = starting.written + part.size();
  add_work(slot, starting.written, part.size());
  return attempt::done;
}

/// Lets the client write the KV it saved, as far as the cache lacks it; returns false if there is no space.
template <class Cache, class Client, scheduling_order Order>
bool batch_scheduler<Cache, Client, Order>::bring_back(request& starting,
                                                       std::span<const token_id> tokens) noexcept {
  if constexpr (swapping_client<Client> && !accounts::is_grouped) {
    if (!starting.is_saved) return true;
    const std::uint64_t first = starting.written;
    // The last token is always computed.
    const std::uint64_t saved = starting.saved < tokens.size() ? starting.saved : tokens.size() - 1;
    const std::uint64_t end = saved > first ? saved : first;
    const auto span = tokens.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(end - first));
    const auto grown = cache_->append(starting.sequence, span);
    if (!grown) return false;
    copy(*grown);
    starting.is_saved = false;
    starting.saved = 0;
    if (client_->swap_in(starting.user, starting.sequence, first, end)) {
      starting.written = end;
    } else {
      static_cast<void>(cache_->truncate(starting.sequence, first));
    }
  }
  return true;
}

/// Over groups, allocates the blocks of the tokens that the client saved, in parts of `most` tokens, so that
/// windows do not hold all of them: each append releases what the one before it does not read. No copy is
/// carried out, because the client writes all blocks that remain. Returns false if there is no space.
template <class Cache, class Client, scheduling_order Order>
bool batch_scheduler<Cache, Client, Order>::reserve_saved(request& starting, std::span<const token_id> tokens,
                                                          std::uint64_t most) noexcept {
  if constexpr (swapping_client<Client> && accounts::is_grouped) {
    if (!starting.is_saved) return true;
    // Windows and states are saved as the token after the saved ones reads them, and the last token is always
    // computed.
    const std::uint64_t end = starting.saved < tokens.size() ? starting.saved : 0;
    while (starting.written < end) {
      const std::uint64_t part = end - starting.written < most ? end - starting.written : most;
      if (!cache_->append(starting.sequence, tokens.subspan(static_cast<std::size_t>(starting.written),
                                                            static_cast<std::size_t>(part))))
        return false;
      starting.written += part;
    }
  }
  return true;
}

/// Over groups, lets the client write what it saved, after the hit of `first` tokens; returns false if it is
/// lost.
template <class Cache, class Client, scheduling_order Order>
bool batch_scheduler<Cache, Client, Order>::write_saved(request& starting, std::uint64_t first) noexcept {
  if constexpr (swapping_client<Client> && accounts::is_grouped) {
    if (!starting.is_saved) return true;
    starting.is_saved = false;
    starting.saved = 0;
    const bool is_back = client_->swap_in(starting.user, starting.sequence, first, starting.written);
    return is_back || starting.written == first;
  }
  return true;
}

/// The most tokens of a request's next step: a request that started again because its blocks were scattered
/// takes steps that leave every group its pages.
template <class Cache, class Client, scheduling_order Order>
std::uint64_t batch_scheduler<Cache, Client, Order>::step_limit(const request& each,
                                                                std::uint64_t tokens) const noexcept {
  std::uint64_t most = options_.max_step_tokens;
  if constexpr (accounts::is_grouped) {
    if (each.planned >= each.restart) return most;
    while (most > 1 && accounts_.lack_alone(tokens, most).any)
      most /= 2;
  }
  return most;
}

}  // namespace v0
}  // namespace llmmem
