/// @file
/// Bodies of batch_scheduler.hpp, which alone includes this header.
#pragma once

#include <llmmem/detail/named_range.hpp>
#include <llmmem/paging/batch_scheduler.hpp>
#include <llmmem/paging/errors.hpp>

namespace llmmem {
inline namespace v0 {

namespace detail {

[[nodiscard]] inline scheduler_options checked_scheduler_options(scheduler_options options) {
  const auto refuse = [&](const char* what) { throw length_error(options.name + ": " + what); };
  if (options.max_running == 0) refuse("max_running is 0; at least 1 is needed");
  if (options.max_step_tokens == 0) refuse("max_step_tokens is 0; at least 1 is needed");
  if (options.max_steps_in_flight == 0 || options.max_steps_in_flight > 2)
    refuse("max_steps_in_flight must be 1 or 2");
  const swap_costs& swap = options.swap;
  if (!(swap.compute_tokens_per_second >= 0) || !(swap.bytes_per_token >= 0) || !(swap.seconds_per_swap >= 0))
    refuse("swap has a negative cost; use 0 or more");
  if (swap.compute_tokens_per_second > 0 && !(swap.bytes_per_second > 0))
    refuse("swap.bytes_per_second must be more than 0 where swap.compute_tokens_per_second is");
  if (options.max_requests < options.max_running) {
    throw length_error(options.name + ": max_requests is " + std::to_string(options.max_requests) +
                       ", fewer than the " + std::to_string(options.max_running) +
                       " of max_running; raise max_requests");
  }
  return options;
}

}  // namespace detail

template <class Cache, class Client, scheduling_order Order>
batch_scheduler<Cache, Client, Order>::batch_scheduler(Cache& cache, Client& client,
                                                       scheduler_options options, Order order)
    : cache_(&cache),
      accounts_(cache),
      client_(&client),
      options_(detail::checked_scheduler_options(std::move(options))),
      order_(std::move(order)),
      requests_(options_.max_requests, request{}, options_.metadata, "batch_scheduler: requests"),
      free_slots_(options_.max_requests, options_.metadata, "batch_scheduler: free slots"),
      running_(options_.max_running, options_.metadata, "batch_scheduler: running"),
      ranked_(options_.max_running, options_.metadata, "batch_scheduler: ranked"),
      waiting_(options_.max_requests, options_.metadata, "batch_scheduler: waiting"),
      growths_(options_.max_running, typename accounts::growth{}, options_.metadata,
               "batch_scheduler: growths"),
      grown_(options_.max_running, typename accounts::grown{}, options_.metadata, "batch_scheduler: grown"),
      growing_(options_.max_running, options_.metadata, "batch_scheduler: growing"),
      work_(std::uint64_t{options_.max_running} * options_.max_steps_in_flight, scheduled_work{},
            options_.metadata, "batch_scheduler: work"),
      notes_(work_.size(), work_note{}, options_.metadata, "batch_scheduler: notes"),
      free_slot_count_(options_.max_requests) {
  // Checked here, not on the template parameter, so that an engine may hold its scheduler as a member.
  static_assert(detail::grouped_cache<Cache> || detail::uniform_cache<Cache>,
                "Cache must be a paged_allocator or a hybrid_allocator");
  static_assert(
      accounts::is_grouped ? group_batch_client<Client> : batch_client<Client>,
      "Client must be a batch_client, over groups a group_batch_client: noexcept tokens, copy (of a "
      "block_copy, over groups of a group_copy) and exhausted");
  for (std::uint32_t i = 0; i < free_slot_count_; ++i)
    free_slots_[i] = free_slot_count_ - 1 - i;
}

template <class Cache, class Client, scheduling_order Order>
result<void> batch_scheduler<Cache, Client, Order>::check(request_ticket ticket) const noexcept {
  if (ticket == request_ticket{}) return refusal(errc::null_handle, 0, 0, 0);
  if (ticket.slot >= requests_.size()) return refusal(errc::foreign_handle, ticket.slot, 0, 0);
  const std::uint32_t now = requests_[ticket.slot].generation;
  if (ticket.generation != now) return refusal(errc::stale_handle, ticket.slot, ticket.generation, now);
  return {};
}

template <class Cache, class Client, scheduling_order Order>
result<request_ticket> batch_scheduler<Cache, Client, Order>::submit(std::uint64_t user,
                                                                     const prefix_context& context,
                                                                     const request_hints& hints,
                                                                     const request_class& of) noexcept {
  if (calls_ == calls::none) return refusal(errc::reentered, 0, 0, 0);
  const std::uint64_t tokens = client_->tokens(user).size();
  if (tokens == 0) return refusal(errc::empty_range, 0, 0, 0);
  if (hints.keep.priority > retention::max_priority)
    return refusal(errc::bad_priority, 0, hints.keep.priority, retention::max_priority);
  if (const auto accepted = order_.check(of); !accepted) return accepted.error();
  if (tokens + 1 > cache_->max_sequence_tokens())
    return refusal(errc::sequence_full, 0, tokens + 1, cache_->max_sequence_tokens());
  if (const detail::block_lack lack = accounts_.lack_alone(tokens + 1); lack.any) return too_large(0, lack);
  if (free_slot_count_ == 0) return refusal(errc::out_of_requests, 0, 1, requests_.size());

  const std::uint32_t slot = free_slots_[--free_slot_count_];
  request& fresh = requests_[slot];
  fresh = request{.user = user,
                  .rank = {.arrival = ++arrivals_, .of = of},
                  .context = context,
                  .hints = hints,
                  .prompt = tokens,
                  .generation = fresh.generation + 1};
  order_.arrived(fresh.rank);
  order_.queued(fresh.rank);
  waiting_at(waiting_count_++) = slot;
  ++counters_.submitted;
  return request_ticket{slot, fresh.generation};
}

template <class Cache, class Client, scheduling_order Order>
result<scheduled_step> batch_scheduler<Cache, Client, Order>::step() noexcept {
  const detail::named_range range("batch_scheduler step");
  if (calls_ != calls::all) return refusal(errc::reentered, 0, 0, 0);
  if (steps_in_flight_ == options_.max_steps_in_flight)
    return refusal(errc::step_pending, 0, 0, work_counts_[oldest_step_]);
  scheduled_step out;
  std::uint32_t& work_count = work_counts_[planned_step()];
  work_count = 0;
  step_tokens_ = 0;
  first_part_ = none;
  calls_ = calls::none;
  const bool all_kept = grow_running(out);
  const auto is_stuck = [&] { return work_count == 0 && out.blocked.needed == 0; };
  // A request that has just been preempted would take back the blocks that it gave to the running ones.
  if (all_kept || is_stuck()) admit_waiting(out);
  while (is_stuck() && waiting_count_ != 0) {
    const std::uint32_t slot = waiting_at(next_waiting());
    if (client_->tokens(requests_[slot].user).empty()) {  // it shrank while it waited for a running slot
      give_up(slot, refusal(errc::empty_range, slot, 0, 0));
      continue;
    }
    block_on(out, needed_to_start(requests_[slot]), blocks_left_to_runners());
    break;
  }
  calls_ = calls::all;
  out.work = {work_.data() + first_work(planned_step()), work_count};
  steps_in_flight_ += work_count != 0 ? 1U : 0U;
  ++counters_.steps;
  counters_.computed_tokens += step_tokens_;
  return out;
}

/// Gives the cache the values of tokens whose places were reserved, as far as the client has them.
template <class Cache, class Client, scheduling_order Order>
void batch_scheduler<Cache, Client, Order>::take_values(request& each) noexcept {
  if constexpr (reserves) {
    // The client need not have the tokens of a request that it has finished.
    if (each.known == each.planned || each.is_ending) return;
    const auto tokens = client_->tokens(each.user);
    std::uint64_t end = tokens.size() < each.planned ? tokens.size() : each.planned;
    if (end > each.cut) end = each.cut;
    if (end <= each.known) return;
    const auto values =
        tokens.subspan(static_cast<std::size_t>(each.known), static_cast<std::size_t>(end - each.known));
    // It fails only for a sequence that the engine released or changed itself: nothing of it is cached then.
    static_cast<void>(cache_->name_tokens(each.sequence, values));
    each.known = end;
  }
}

/// Cuts a request to the tokens that stand, when no step in flight has work of it.
template <class Cache, class Client, scheduling_order Order>
void batch_scheduler<Cache, Client, Order>::cut_back(request& each) noexcept {
  if (each.cut == none || each.in_flight != 0) return;
  if (each.cut < each.planned) {
    counters_.taken_back += each.planned - each.cut;
    if constexpr (accounts::is_grouped) {
      // Where a group lacks what the next token reads, the sequence goes back to the last length that has it.
      const auto tokens = client_->tokens(each.user);
      const auto nearest = cache_->nearest_cuts(each.sequence, each.cut);
      const std::uint64_t kept = nearest ? nearest->below : 0;
      const auto stands =
          tokens.first(static_cast<std::size_t>(each.cut < tokens.size() ? each.cut : tokens.size()));
      if (kept < each.cut && cache_->cached_tokens(stands, each.context) > kept) {
        static_cast<void>(cache_->release(each.sequence));  // cannot fail: the scheduler owns it
        each.sequence =
            cache_->create(each.context, each.hints).value();  // the sequence that was just released
        const auto hit = cache_->match(each.sequence, stands);
        each.cut = hit ? hit->tokens : 0;
      } else {
        static_cast<void>(cache_->truncate(each.sequence, kept));  // cannot fail: every group has this length
        each.cut = kept;
      }
    } else {
      static_cast<void>(cache_->truncate(each.sequence, each.cut));  // cannot fail: it holds more tokens
    }
    each.planned = each.cut;
    if constexpr (accounts::is_grouped) {
      if (each.planned < each.restart) static_cast<void>(cache_->limit_commits(each.sequence, 0));
    }
  }
  if (each.cut < each.known) each.known = each.cut;
  if (each.cut < each.written) each.written = each.cut;
  each.cut = none;
}

/// Sorts the running requests by the order.
template <class Cache, class Client, scheduling_order Order>
void batch_scheduler<Cache, Client, Order>::rank() noexcept {
  for (std::uint32_t i = 0; i < running_count_; ++i) {
    std::uint32_t to = i;
    if constexpr (!Order::is_by_arrival) {
      for (; to > 0 && order_.precedes(requests_[running_[i]].rank, requests_[ranked_[to - 1]].rank); --to)
        ranked_[to] = ranked_[to - 1];
    }
    ranked_[to] = running_[i];
  }
  if constexpr (!Order::is_static) {
    // Whichever request is first once stays first until it ends. Otherwise requests could preempt each other
    // forever, and none would end.
    std::uint32_t at = 0;
    while (at < running_count_ &&
           (ranked_[at] != anchor_ || requests_[anchor_].generation != anchor_generation_))
      ++at;
    if (at == running_count_) {
      if (running_count_ == 0) return;
      anchor_ = ranked_[0];
      anchor_generation_ = requests_[anchor_].generation;
      return;
    }
    for (; at > 0; --at)
      ranked_[at] = ranked_[at - 1];
    ranked_[0] = anchor_;
  }
}

/// Tokens after the `tokens` that the client has, which will exist when the steps in flight are completed.
template <class Cache, class Client, scheduling_order Order>
std::uint64_t batch_scheduler<Cache, Client, Order>::pending_tokens(const request& each,
                                                                    std::uint64_t tokens) noexcept {
  if constexpr (reserves) {
    if (each.in_flight == 0 || each.planned != tokens) return 0;
    std::uint64_t pending = 1;
    if constexpr (foreseeing_client<Client>) pending = client_->pending(each.user);
    const std::uint64_t longest = cache_->max_sequence_tokens();
    if (pending > longest - tokens) return 0;  // decided when the tokens exist
    return accounts_.lack_alone(tokens + pending).any ? 0 : pending;
  } else {
    return 0;
  }
}

template <class Cache, class Client, scheduling_order Order>
void batch_scheduler<Cache, Client, Order>::add_work(std::uint32_t slot, std::uint64_t first,
                                                     std::uint64_t count) noexcept {
  request& worker = requests_[slot];
  const std::uint64_t end = first + count;
  const std::uint64_t fresh = worker.computed > first ? worker.computed : first;
  counters_.recomputed_tokens += (fresh < end ? fresh : end) - first;
  if (fresh < end) {
    const std::uint64_t prompt =
        worker.prompt > fresh ? (worker.prompt < end ? worker.prompt : end) - fresh : 0;
    order_.computed(worker.rank, prompt, end - fresh - prompt);
    worker.computed = end;
  }
  worker.planned = end;
  worker.newest = first;
  if (worker.in_flight == 0) {
    worker.oldest = first;
    // A cut to any of the step's tokens stays possible until the next step is planned.
    if constexpr (accounts::is_grouped) static_cast<void>(cache_->limit_releases(worker.sequence, first));
  }
  ++worker.in_flight;
  step_tokens_ += count;
  std::uint32_t& work_count = work_counts_[planned_step()];
  const std::size_t at = first_work(planned_step()) + work_count++;
  work_[at] = {.ticket = {slot, worker.generation},
               .user = worker.user,
               .sequence = worker.sequence,
               .first = first,
               .count = count};
  notes_[at] = {.is_early = steps_in_flight_ != 0};
}

template <class Cache, class Client, scheduling_order Order>
result<void> batch_scheduler<Cache, Client, Order>::completed() noexcept {
  if (calls_ != calls::all) return refusal(errc::reentered, 0, 0, 0);
  if (steps_in_flight_ == 0) return {};
  calls_ = calls::none;
  const std::uint32_t step = oldest_step_;
  oldest_step_ = (oldest_step_ + 1) % options_.max_steps_in_flight;
  --steps_in_flight_;
  for (std::size_t i = first_work(step); i < first_work(step) + work_counts_[step]; ++i)
    complete(work_[i], notes_[i]);
  work_counts_[step] = 0;
  calls_ = calls::all;
  return {};
}

template <class Cache, class Client, scheduling_order Order>
void batch_scheduler<Cache, Client, Order>::complete(const scheduled_work& done,
                                                     const work_note& note) noexcept {
  const std::uint32_t slot = done.ticket.slot;
  request& worker = requests_[slot];
  --worker.in_flight;
  worker.oldest = worker.newest;
  if (!note.is_dropped) {
    take_values(worker);
    const std::uint64_t end = done.first + done.count;
    const std::uint64_t stands = end < worker.cut ? end : worker.cut;
    if (worker.written < stands) worker.written = stands;
    // Cannot fail: the sequence holds them.
    static_cast<void>(cache_->commit(done.sequence, stands < worker.known ? stands : worker.known));
  }
  if (worker.in_flight != 0) return;
  if (worker.is_ending) return end(slot);
  cut_back(worker);
  if (worker.is_leaving) preempt(slot);
}

template <class Cache, class Client, scheduling_order Order>
result<void> batch_scheduler<Cache, Client, Order>::accepted(request_ticket ticket,
                                                             std::uint64_t kept) noexcept {
  if (calls_ != calls::all) return refusal(errc::reentered, 0, 0, 0);
  if (const auto alive = check(ticket); !alive) return alive;
  request& each = requests_[ticket.slot];
  const std::uint64_t computed = each.computed > each.planned ? each.computed : each.planned;
  if (kept > computed) return refusal(errc::past_the_end, ticket.slot, kept, computed);
  if (kept < each.computed) each.computed = kept;
  // A window or a state that was saved after more tokens is worth nothing after fewer.
  if (kept < each.saved) each.saved = accounts::is_grouped ? 0 : kept;
  if (kept < each.planned && kept < each.cut) each.cut = kept;
  cut_back(each);
  return {};
}

template <class Cache, class Client, scheduling_order Order>
result<void> batch_scheduler<Cache, Client, Order>::finish(request_ticket ticket) noexcept {
  if (calls_ == calls::none) return refusal(errc::reentered, 0, 0, 0);
  if (const auto alive = check(ticket); !alive) return alive;
  request& done = requests_[ticket.slot];
  if (done.in_flight != 0) {
    if (!done.is_ending) drop_early_work(ticket);
    done.is_ending = true;
    return {};
  }
  end(ticket.slot);
  ++counters_.finished;
  return {};
}

/// Makes work that was planned while another step ran count for nothing: its engine may have skipped it.
template <class Cache, class Client, scheduling_order Order>
void batch_scheduler<Cache, Client, Order>::drop_early_work(request_ticket ticket) noexcept {
  for (std::uint32_t step = 0; step < options_.max_steps_in_flight; ++step) {
    for (std::size_t i = first_work(step); i < first_work(step) + work_counts_[step]; ++i) {
      if (!(work_[i].ticket == ticket) || !notes_[i].is_early) continue;
      notes_[i].is_dropped = true;
      ++counters_.dropped;
    }
  }
}

/// Removes a request and releases its blocks.
template <class Cache, class Client, scheduling_order Order>
void batch_scheduler<Cache, Client, Order>::end(std::uint32_t slot) noexcept {
  request& gone = requests_[slot];
  if (gone.is_running) {
    static_cast<void>(cache_->release(gone.sequence));  // cannot fail: the scheduler owns it
    stop_running(slot);
  } else {
    std::uint32_t place = 0;
    while (waiting_at(place) != slot)
      ++place;
    stop_waiting(place);
  }
  if (gone.is_ending) ++counters_.finished;
  ++gone.generation;
  gone.is_running = false;
  free_slots_[free_slot_count_++] = slot;
}

/// Adds a slot to the running ones, by arrival.
template <class Cache, class Client, scheduling_order Order>
void batch_scheduler<Cache, Client, Order>::run(std::uint32_t slot) noexcept {
  std::uint32_t to = running_count_++;
  for (; to > 0 && requests_[running_[to - 1]].rank.arrival > requests_[slot].rank.arrival; --to)
    running_[to] = running_[to - 1];
  running_[to] = slot;
  requests_[slot].is_running = true;
}

template <class Cache, class Client, scheduling_order Order>
void batch_scheduler<Cache, Client, Order>::stop_running(std::uint32_t slot) noexcept {
  std::uint32_t kept = 0;
  for (std::uint32_t i = 0; i < running_count_; ++i) {
    if (running_[i] != slot) running_[kept++] = running_[i];
  }
  running_count_ = kept;
}

/// Puts a preempted request back into the queue, by arrival: at the head, if the order is by arrival.
template <class Cache, class Client, scheduling_order Order>
void batch_scheduler<Cache, Client, Order>::wait_again(std::uint32_t slot) noexcept {
  first_waiting_ = (first_waiting_ == 0 ? static_cast<std::uint32_t>(waiting_.size()) : first_waiting_) - 1;
  ++waiting_count_;
  std::uint32_t to = 0;
  for (; to + 1 < waiting_count_ && requests_[waiting_at(to + 1)].rank.arrival < requests_[slot].rank.arrival;
       ++to)
    waiting_at(to) = waiting_at(to + 1);
  waiting_at(to) = slot;
  order_.queued(requests_[slot].rank);
}

/// Takes the request at `place` out of the queue.
template <class Cache, class Client, scheduling_order Order>
void batch_scheduler<Cache, Client, Order>::stop_waiting(std::uint32_t place) noexcept {
  order_.unqueued(requests_[waiting_at(place)].rank);
  for (std::uint32_t i = place; i > 0; --i)
    waiting_at(i) = waiting_at(i - 1);
  first_waiting_ = static_cast<std::uint32_t>((first_waiting_ + 1) % waiting_.size());
  --waiting_count_;
}

template <class Cache, class Client, scheduling_order Order>
scheduler_stats batch_scheduler<Cache, Client, Order>::stats() const noexcept {
  scheduler_stats out = counters_;
  out.running = running_count_;
  out.waiting = waiting_count_;
  out.metadata_bytes = requests_.bytes() + free_slots_.bytes() + running_.bytes() + ranked_.bytes() +
                       waiting_.bytes() + growths_.bytes() + grown_.bytes() + growing_.bytes() +
                       work_.bytes() + notes_.bytes();
  return out;
}

template <class Cache, class Client, scheduling_order Order>
std::vector<std::string> batch_scheduler<Cache, Client, Order>::audit() const {
  std::vector<std::string> found;
  const auto blame = [&](std::uint32_t slot, const char* what) {
    found.push_back(options_.name + ": request " + std::to_string(slot) + " (arrival " +
                    std::to_string(requests_[slot].rank.arrival) + ") " + what);
  };
  const auto steps_with = [&](std::uint32_t slot) {
    std::uint32_t steps = 0;
    for (std::uint32_t step = 0; step < options_.max_steps_in_flight; ++step) {
      for (std::size_t i = first_work(step); i < first_work(step) + work_counts_[step]; ++i)
        steps += work_[i].ticket == request_ticket{slot, requests_[slot].generation} ? 1U : 0U;
    }
    return steps;
  };
  std::uint64_t before = 0;
  const auto look = [&](std::uint32_t slot, bool runs) {
    const request& each = requests_[slot];
    if (each.rank.arrival <= before) blame(slot, "is queued behind a later arrival");
    before = each.rank.arrival;
    if ((each.generation & 1U) == 0) blame(slot, "is queued but ended");
    if (each.is_running != runs) blame(slot, runs ? "is listed as running but waits" : "waits but runs");
    if (runs != cache_->check(each.sequence).has_value()) {
      blame(slot, runs ? "runs without a sequence" : "waits with a sequence");
    }
    if (runs && each.planned != cache_->tokens(each.sequence))
      blame(slot, "does not hold the tokens that were planned");
    if (each.written > each.planned) blame(slot, "counts more written tokens than it holds");
    if (each.known > each.planned) blame(slot, "counts more known tokens than it holds");
    if (each.in_flight != steps_with(slot)) blame(slot, "miscounts the steps in flight that have work of it");
  };
  for (std::uint32_t i = 0; i < running_count_; ++i)
    look(running_[i], true);
  before = 0;
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
