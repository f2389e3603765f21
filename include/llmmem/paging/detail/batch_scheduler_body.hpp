/// @file
/// Bodies of batch_scheduler.hpp, which alone includes this header.
#pragma once

#include <llmmem/paging/batch_scheduler.hpp>
#include <llmmem/paging/errors.hpp>

namespace llmmem {
inline namespace v0 {

namespace detail {

[[nodiscard]] inline scheduler_options checked_scheduler_options(scheduler_options options) {
  const auto refuse = [&](const char* what) { throw length_error(options.name + ": " + what); };
  if (options.max_running == 0) refuse("max_running is 0; at least 1 is needed");
  if (options.max_step_tokens == 0) refuse("max_step_tokens is 0; at least 1 is needed");
  if (options.max_requests < options.max_running) {
    throw length_error(options.name + ": max_requests is " + std::to_string(options.max_requests) +
                       ", fewer than the " + std::to_string(options.max_running) +
                       " of max_running; raise max_requests");
  }
  return options;
}

}  // namespace detail

template <class Cache, class Client>
batch_scheduler<Cache, Client>::batch_scheduler(Cache& cache, Client& client, scheduler_options options)
    : cache_(&cache),
      client_(&client),
      options_(detail::checked_scheduler_options(std::move(options))),
      requests_(options_.max_requests, request{}, options_.metadata, "batch_scheduler: requests"),
      free_slots_(options_.max_requests, options_.metadata, "batch_scheduler: free slots"),
      running_(options_.max_running, options_.metadata, "batch_scheduler: running"),
      waiting_(options_.max_requests, options_.metadata, "batch_scheduler: waiting"),
      growths_(options_.max_running, paging::growth{}, options_.metadata, "batch_scheduler: growths"),
      grown_(options_.max_running, append_result{}, options_.metadata, "batch_scheduler: grown"),
      growing_(options_.max_running, options_.metadata, "batch_scheduler: growing"),
      work_(options_.max_running, scheduled_work{}, options_.metadata, "batch_scheduler: work"),
      free_slot_count_(options_.max_requests) {
  // Checked here, not on the template parameter, so that an engine may hold its scheduler as a member.
  static_assert(batch_client<Client>, "Client must be a batch_client: noexcept tokens, copy and exhausted");
  for (std::uint32_t i = 0; i < free_slot_count_; ++i)
    free_slots_[i] = free_slot_count_ - 1 - i;
}

template <class Cache, class Client>
result<void> batch_scheduler<Cache, Client>::check(request_ticket ticket) const noexcept {
  if (ticket == request_ticket{}) return refusal(errc::null_handle, 0, 0, 0);
  if (ticket.slot >= requests_.size()) return refusal(errc::foreign_handle, ticket.slot, 0, 0);
  const std::uint32_t now = requests_[ticket.slot].generation;
  if (ticket.generation != now) return refusal(errc::stale_handle, ticket.slot, ticket.generation, now);
  return {};
}

template <class Cache, class Client>
result<request_ticket> batch_scheduler<Cache, Client>::submit(std::uint64_t user,
                                                              const prefix_context& context,
                                                              const request_hints& hints) noexcept {
  if (calls_ == calls::none) return refusal(errc::reentered, 0, 0, 0);
  const std::uint64_t tokens = client_->tokens(user).size();
  if (tokens == 0) return refusal(errc::empty_range, 0, 0, 0);
  if (hints.keep.priority > retention::max_priority)
    return refusal(errc::bad_priority, 0, hints.keep.priority, retention::max_priority);
  if (tokens + 1 > cache_->max_sequence_tokens())
    return refusal(errc::sequence_full, 0, tokens + 1, cache_->max_sequence_tokens());
  if (const std::uint64_t needed = blocks_for(tokens + 1); needed > cache_->pool().blocks())
    return refusal(errc::out_of_blocks, 0, needed, cache_->pool().blocks());
  if (free_slot_count_ == 0) return refusal(errc::out_of_requests, 0, 1, requests_.size());

  const std::uint32_t slot = free_slots_[--free_slot_count_];
  request& fresh = requests_[slot];
  fresh = request{.user = user,
                  .arrival = ++arrivals_,
                  .context = context,
                  .hints = hints,
                  .generation = fresh.generation + 1};
  waiting_at(waiting_count_++) = slot;
  ++counters_.submitted;
  return request_ticket{slot, fresh.generation};
}

template <class Cache, class Client>
result<scheduled_step> batch_scheduler<Cache, Client>::step() noexcept {
  if (calls_ != calls::all) return refusal(errc::reentered, 0, 0, 0);
  if (is_pending_) return refusal(errc::step_pending, 0, 0, work_count_);
  scheduled_step out;
  work_count_ = 0;
  step_tokens_ = 0;
  calls_ = calls::none;
  const bool all_kept = grow_running(out);
  const auto is_stuck = [&] { return work_count_ == 0 && out.blocked.needed == 0; };
  // A request that has just been preempted would take back the blocks that it gave to the running ones.
  if (all_kept || is_stuck()) admit_waiting(out);
  if (is_stuck() && waiting_count_ != 0) {
    out.blocked = {.needed = needed_to_start(requests_[waiting_at(0)]) + blocks_left_to_runners(),
                   .available = cache_->pool().available()};
  }
  calls_ = calls::all;
  out.work = {work_.data(), work_count_};
  is_pending_ = work_count_ != 0;
  ++counters_.steps;
  counters_.computed_tokens += step_tokens_;
  return out;
}

/// Collects the tokens that the running requests would compute, in order of arrival.
template <class Cache, class Client>
void batch_scheduler<Cache, Client>::plan_growth() noexcept {
  growing_count_ = 0;
  std::uint64_t budget = options_.max_step_tokens;
  for (std::uint32_t i = 0; i < running_count_ && budget != 0; ++i) {
    const request& each = requests_[running_[i]];
    const auto rest = client_->tokens(each.user).subspan(static_cast<std::size_t>(each.written));
    const auto count = static_cast<std::size_t>(rest.size() < budget ? rest.size() : budget);
    if (count == 0) continue;  // nothing new to compute
    growths_[growing_count_] = {.sequence = each.sequence, .tokens = rest.first(count)};
    growing_[growing_count_++] = running_[i];
    budget -= count;
  }
}

/// Returns whether no request was preempted and none is blocked.
template <class Cache, class Client>
bool batch_scheduler<Cache, Client>::grow_running(scheduled_step& out) noexcept {
  bool all_kept = true;
  end_shrunken();
  for (;;) {
    plan_growth();
    if (growing_count_ == 0) return all_kept;
    const auto done =
        cache_->append_batch({growths_.data(), growing_count_}, {grown_.data(), growing_count_});
    if (done) break;
    if (done.code() == errc::out_of_blocks && running_count_ > 1) {
      all_kept = false;
      preempt_last();
      continue;
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
    if (may_pass) {  // other sequences hold the blocks it needs
      out.blocked = {.needed = done.error().wanted, .available = done.error().found};
      return false;
    }
    give_up(culprit, done.error());
  }
  for (std::uint32_t i = 0; i < growing_count_; ++i) {
    copy(grown_[i].copy);
    add_work(growing_[i], grown_[i].first, growths_[i].tokens.size());
  }
  return all_kept;
}

/// Ends the running requests for which the client has taken back computed tokens, against the contract.
template <class Cache, class Client>
void batch_scheduler<Cache, Client>::end_shrunken() noexcept {
  for (std::uint32_t i = 0; i < running_count_;) {
    const std::uint32_t slot = running_[i];
    const std::uint64_t tokens = client_->tokens(requests_[slot].user).size();
    if (tokens >= requests_[slot].written) {
      ++i;
      continue;
    }
    give_up(slot, refusal(errc::past_the_end, slot, requests_[slot].written, tokens));
    i = 0;  // the client may have ended other requests in its callback
  }
}

template <class Cache, class Client>
void batch_scheduler<Cache, Client>::give_up(std::uint32_t slot, const failure& why) noexcept {
  const std::uint64_t user = requests_[slot].user;
  end(slot);
  ++counters_.exhausted;
  calls_ = calls::queue;  // nothing is half done, and the queues are examined again
  client_->exhausted(user, why);
  calls_ = calls::none;
}

/// Preempts the newest request: releases its blocks and puts it at the head of the queue; its tokens stay
/// with the client.
template <class Cache, class Client>
void batch_scheduler<Cache, Client>::preempt_last() noexcept {
  const std::uint32_t slot = running_[--running_count_];
  request& victim = requests_[slot];
  if constexpr (swapping_client<Client>) {
    victim.is_saved = client_->swap_out(victim.user, victim.sequence, victim.written);
    victim.saved = victim.is_saved ? victim.written : 0;
    counters_.swapped_out += victim.is_saved ? 1U : 0U;
  }
  static_cast<void>(cache_->release(victim.sequence));  // cannot fail: the scheduler owns it
  victim.sequence = {};
  victim.written = 0;
  victim.is_running = false;
  first_waiting_ = (first_waiting_ == 0 ? static_cast<std::uint32_t>(waiting_.size()) : first_waiting_) - 1;
  ++waiting_count_;
  waiting_at(0) = slot;
  ++counters_.preempted;
}

template <class Cache, class Client>
void batch_scheduler<Cache, Client>::admit_waiting(scheduled_step& out) noexcept {
  while (waiting_count_ != 0 && running_count_ < options_.max_running &&
         step_tokens_ < options_.max_step_tokens) {
    const std::uint32_t slot = waiting_at(0);
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
    const std::uint64_t needed = needed_to_start(next);
    const std::uint64_t leave = blocks_left_to_runners();
    const std::uint64_t available = cache_->pool().available();
    const bool fits = leave <= available && needed <= available - leave;
    if (!fits && cache_->collect() != 0) continue;  // the blocks collected may be enough
    if (!fits || !start(slot)) {
      if (running_count_ == 0) {
        if (blocks_for(client_->tokens(next.user).size()) >
            cache_->pool().blocks()) {  // it grew while it waited, or the pool shrank
          give_up(slot, refusal(errc::out_of_blocks, slot, needed, available));
          continue;
        }
        out.blocked = {.needed = needed, .available = available};
      }
      return;
    }
  }
}

/// Blocks for all tokens of a request. The last token is always computed, because the next one needs it.
template <class Cache, class Client>
std::uint64_t batch_scheduler<Cache, Client>::needed_to_start(const request& next) const noexcept {
  const auto tokens = client_->tokens(next.user);
  const auto cacheable = tokens.first(tokens.size() - 1);
  const std::uint64_t last = cacheable.size() % cache_->block_tokens() == 0 ? 1 : 0;
  return cache_->cost(cacheable, next.context).needed() + last;
}

/// Moves the head of the queue to the running requests; returns false if it does not fit after all.
template <class Cache, class Client>
bool batch_scheduler<Cache, Client>::start(std::uint32_t slot) noexcept {
  request& starting = requests_[slot];
  const auto tokens = client_->tokens(starting.user);
  const auto sequence = cache_->create(starting.context, starting.hints);
  if (!sequence) return false;
  starting.sequence = *sequence;
  const auto hit = cache_->match(*sequence, tokens.first(tokens.size() - 1));
  starting.written = hit ? hit->tokens : 0;
  if (hit) copy(hit->copy);
  const auto take_back = [&]() noexcept {
    static_cast<void>(cache_->release(*sequence));  // cannot fail: the scheduler owns it
    starting.sequence = {};
    starting.written = 0;
    return false;
  };
  if (!bring_back(starting, tokens)) return take_back();

  const auto rest = tokens.subspan(static_cast<std::size_t>(starting.written));
  const std::uint64_t budget = options_.max_step_tokens - step_tokens_;
  const auto part = rest.first(static_cast<std::size_t>(rest.size() < budget ? rest.size() : budget));
  const auto grown = cache_->append(*sequence, part);
  if (!grown) return take_back();
  copy(grown->copy);
  first_waiting_ = static_cast<std::uint32_t>((first_waiting_ + 1) % waiting_.size());
  --waiting_count_;
  running_[running_count_++] = slot;
  starting.is_running = true;
  ++(starting.has_run ? counters_.resumed : counters_.admitted);
  starting.has_run = true;
  add_work(slot, starting.written, part.size());
  return true;
}

/// Lets the client write the KV it saved, as far as the cache lacks it; returns false if there is no space.
template <class Cache, class Client>
bool batch_scheduler<Cache, Client>::bring_back(request& starting,
                                                std::span<const token_id> tokens) noexcept {
  if constexpr (swapping_client<Client>) {
    if (!starting.is_saved) return true;
    const std::uint64_t first = starting.written;
    // The last token is always computed.
    const std::uint64_t saved = starting.saved < tokens.size() ? starting.saved : tokens.size() - 1;
    const std::uint64_t end = saved > first ? saved : first;
    const auto span = tokens.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(end - first));
    const auto grown = cache_->append(starting.sequence, span);
    if (!grown) return false;
    copy(grown->copy);
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

template <class Cache, class Client>
void batch_scheduler<Cache, Client>::add_work(std::uint32_t slot, std::uint64_t first,
                                              std::uint64_t count) noexcept {
  request& worker = requests_[slot];
  const std::uint64_t end = first + count;
  if (worker.computed > first)
    counters_.recomputed_tokens += (worker.computed < end ? worker.computed : end) - first;
  if (worker.computed < end) worker.computed = end;
  step_tokens_ += count;
  work_[work_count_++] = {.ticket = {slot, worker.generation},
                          .user = worker.user,
                          .sequence = worker.sequence,
                          .first = first,
                          .count = count};
}

template <class Cache, class Client>
result<void> batch_scheduler<Cache, Client>::completed() noexcept {
  if (calls_ != calls::all) return refusal(errc::reentered, 0, 0, 0);
  calls_ = calls::none;
  is_pending_ = false;
  for (std::uint32_t i = 0; i < work_count_; ++i) {
    const scheduled_work& done = work_[i];
    request& worker = requests_[done.ticket.slot];
    worker.written = done.first + done.count;
    static_cast<void>(cache_->commit(done.sequence, worker.written));  // cannot fail: it holds them
    if (worker.is_ending) end(done.ticket.slot);
  }
  work_count_ = 0;
  calls_ = calls::all;
  return {};
}

template <class Cache, class Client>
result<void> batch_scheduler<Cache, Client>::finish(request_ticket ticket) noexcept {
  if (calls_ == calls::none) return refusal(errc::reentered, 0, 0, 0);
  if (const auto alive = check(ticket); !alive) return alive;
  request& done = requests_[ticket.slot];
  for (std::uint32_t i = 0; i < work_count_; ++i) {
    if (work_[i].ticket == ticket) {
      done.is_ending = true;
      return {};
    }
  }
  end(ticket.slot);
  ++counters_.finished;
  return {};
}

/// Removes a request and releases its blocks.
template <class Cache, class Client>
void batch_scheduler<Cache, Client>::end(std::uint32_t slot) noexcept {
  request& gone = requests_[slot];
  if (gone.is_running) {
    static_cast<void>(cache_->release(gone.sequence));  // cannot fail: the scheduler owns it
    std::uint32_t kept = 0;
    for (std::uint32_t i = 0; i < running_count_; ++i) {
      if (running_[i] != slot) running_[kept++] = running_[i];
    }
    running_count_ = kept;
  } else {
    std::uint32_t kept = 0;
    for (std::uint32_t i = 0; i < waiting_count_; ++i) {
      const std::uint32_t each = waiting_at(i);
      if (each != slot) waiting_at(kept++) = each;
    }
    waiting_count_ = kept;
  }
  if (gone.is_ending) ++counters_.finished;
  ++gone.generation;
  gone.is_running = false;
  free_slots_[free_slot_count_++] = slot;
}

template <class Cache, class Client>
scheduler_stats batch_scheduler<Cache, Client>::stats() const noexcept {
  scheduler_stats out = counters_;
  out.running = running_count_;
  out.waiting = waiting_count_;
  out.metadata_bytes = requests_.bytes() + free_slots_.bytes() + running_.bytes() + waiting_.bytes() +
                       growths_.bytes() + grown_.bytes() + growing_.bytes() + work_.bytes();
  return out;
}

template <class Cache, class Client>
std::vector<std::string> batch_scheduler<Cache, Client>::audit() const {
  std::vector<std::string> found;
  const auto blame = [&](std::uint32_t slot, const char* what) {
    found.push_back(options_.name + ": request " + std::to_string(slot) + " (arrival " +
                    std::to_string(requests_[slot].arrival) + ") " + what);
  };
  std::uint64_t before = 0;
  const auto look = [&](std::uint32_t slot, bool runs) {
    const request& each = requests_[slot];
    if (each.arrival <= before) blame(slot, "is queued behind a later arrival");
    before = each.arrival;
    if ((each.generation & 1U) == 0) blame(slot, "is queued but ended");
    if (each.is_running != runs) blame(slot, runs ? "is listed as running but waits" : "waits but runs");
    if (runs != cache_->check(each.sequence).has_value()) {
      blame(slot, runs ? "runs without a sequence" : "waits with a sequence");
    }
    if (runs && each.written > cache_->tokens(each.sequence))
      blame(slot, "counts more written tokens than it holds");
  };
  for (std::uint32_t i = 0; i < running_count_; ++i)
    look(running_[i], true);
  for (std::uint32_t i = 0; i < waiting_count_; ++i)
    look(waiting_at(i), false);
  if (running_count_ + waiting_count_ + free_slot_count_ != requests_.size()) {
    found.push_back(options_.name + ": " + std::to_string(running_count_) + " running, " +
                    std::to_string(waiting_count_) + " waiting and " + std::to_string(free_slot_count_) +
                    " free slots do not add up to " + std::to_string(requests_.size()));
  }
  return found;
}

}  // namespace v0
}  // namespace llmmem
