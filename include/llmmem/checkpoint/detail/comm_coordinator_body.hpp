/// @file
/// Bodies of `comm_coordinator`: how ranks save a checkpoint by messages.
#pragma once

#include <llmmem/checkpoint/comm_coordinator.hpp>
#include <llmmem/checkpoint/detail/coverage.hpp>
#include <llmmem/checkpoint/detail/rank_texts.hpp>
#include <llmmem/checkpoint/detail/reason.hpp>
#include <llmmem/checkpoint/detail/search_body.hpp>
#include <llmmem/comm/errors.hpp>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <exception>
#include <span>
#include <string_view>

namespace llmmem {
inline namespace v0 {

template <checkpoint_storage S, watched_transport T, retention_policy R, rank_waiter W>
comm_coordinator<S, T, R, W>::comm_coordinator(S& storage, T& ranks, const comm_coordinator_options& options,
                                               R retention, W waiter)
    : storage_(&storage),
      ranks_(&ranks),
      options_(options),
      retention_(std::move(retention)),
      waiter_(std::move(waiter)),
      epoch_(ranks.epoch()) {
  if (epoch_ == 0) {
    throw argument_error(where() + "comm_coordinator: the ranks have not joined; call join first");
  }
  if (rank() == 0) open_folder();
}

/// Retries, because a file server may keep a dead process's lock for a while, and because ranks briefly take
/// the lock to learn the outcome of a checkpoint.
template <checkpoint_storage S, watched_transport T, retention_policy R, rank_waiter W>
void comm_coordinator<S, T, R, W>::open_folder() {
  const deadline by = ranks_->after(options_.open_within_ns);
  while (!folder_) {
    try {
      folder_.emplace(*storage_);
    } catch (const storage_error&) {
      throw;
    } catch (const io_error&) {  // another process holds the lock
      if (is_over(by)) throw;
      waiter_.pause(std::chrono::nanoseconds(options_.poll_ns));
    }
  }
}

/// Forgets the ended epoch: its messages do not matter, and rank 0 may be a different process.
template <checkpoint_storage S, watched_transport T, retention_policy R, rank_waiter W>
void comm_coordinator<S, T, R, W>::enter_epoch() {
  if (ranks_->epoch() == epoch_) return;
  epoch_ = ranks_->epoch();
  round_.reset();
  announced_.reset();
  if (rank() != 0) folder_.reset();
}

template <checkpoint_storage S, watched_transport T, retention_policy R, rank_waiter W>
std::vector<std::uint32_t> comm_coordinator<S, T, R, W>::failed_of(
    const std::vector<std::uint32_t>& ranks) const {
  std::vector<std::uint32_t> dead;
  for (const std::uint32_t each : ranks) {
    if (ranks_->has_failed(rank_id{each})) dead.push_back(each);
  }
  return dead;
}

/// Checks that all ranks of the epoch are alive.
template <checkpoint_storage S, watched_transport T, retention_policy R, rank_waiter W>
void comm_coordinator<S, T, R, W>::check_ranks() const {
  std::vector<std::uint32_t> dead;
  for (std::uint32_t each = 0; each < world(); ++each) {
    if (ranks_->has_failed(rank_id{each})) dead.push_back(each);
  }
  if (!dead.empty()) {
    throw ranks_missing(
        where() + detail::death_text(dead) +
            "; agree with the remaining ranks, admit or shrink, redistribute the state, and make "
            "new checkpointers",
        dead);
  }
  if (ranks_->is_revoked()) {
    throw comm_error(where() +
                     "the epoch of the checkpoints' ranks was revoked; agree with them, and admit or shrink");
  }
}

template <checkpoint_storage S, watched_transport T, retention_policy R, rank_waiter W>
auto comm_coordinator<S, T, R, W>::current(const checkpoint_draft& draft) -> round& {
  const bool is_it = round_ && ranks_->epoch() == epoch_ && round_->draft.id == draft.id &&
                     round_->draft.folder == draft.folder;
  if (is_it && round_->at == phase::writing) return *round_;
  throw argument_error("comm_coordinator::commit: step " + std::to_string(draft.id.step) + ", generation " +
                       std::to_string(draft.id.generation) +
                       (is_it ? " is over" : " is not the draft begun last in this epoch"));
}

/// Checks that a part belongs to that draft and rank.
template <checkpoint_storage S, watched_transport T, retention_policy R, rank_waiter W>
void comm_coordinator<S, T, R, W>::check_part(const checkpoint_manifest& part, std::uint32_t rank,
                                              const checkpoint_draft& draft) const {
  const std::string who = "the part of rank " + std::to_string(rank);
  if (part.step != draft.id.step || part.generation != draft.id.generation || part.world != world()) {
    throw argument_error(where(draft) + who + " is of step " + std::to_string(part.step) + ", generation " +
                         std::to_string(part.generation) + " and a world of " + std::to_string(part.world));
  }
  for (const checkpoint_file& each : part.files) {
    if (each.rank == rank) continue;
    throw argument_error(where(draft) + who + " lists " + each.name + ", a file of rank " +
                         std::to_string(each.rank));
  }
}

// Messages
// ---------------------------------------------------------------------------------------------------------

/// Returns whether the message was sent. Skips dead ranks, and ranks that accept nothing.
template <checkpoint_storage S, watched_transport T, retention_policy R, rank_waiter W>
bool comm_coordinator<S, T, R, W>::tell(std::uint32_t to, const detail::rank_message& message) {
  const std::string text = detail::to_text(message);
  return ranks_
      ->send(std::as_bytes(std::span(text.data(), text.size())), rank_id{to}, options_.tag,
             ranks_->after(options_.answer_within_ns))
      .has_value();
}

template <checkpoint_storage S, watched_transport T, retention_policy R, rank_waiter W>
void comm_coordinator<S, T, R, W>::tell_others(const detail::rank_message& message) {
  for (std::uint32_t each = 0; each < world(); ++each) {
    if (each != rank()) static_cast<void>(tell(each, message));
  }
}

/// Returns the next message from that rank, if any. A damaged message counts as none.
/// @throws comm_error  if the epoch has ended.
template <checkpoint_storage S, watched_transport T, retention_policy R, rank_waiter W>
std::optional<detail::rank_message> comm_coordinator<S, T, R, W>::take(std::uint32_t from) {
  for (;;) {
    const result<std::uint64_t> bytes = ranks_->probe(rank_id{from}, options_.tag, deadline{0});
    if (!bytes) {
      const error_code why = bytes.code();
      if (why == errc::peer_timed_out || why == errc::peer_failed || why == errc::frame_forged)
        return std::nullopt;
      bytes.error().raise();
    }
    std::string text(static_cast<std::size_t>(*bytes), '\0');
    const std::span<std::byte> into = std::as_writable_bytes(std::span(text.data(), text.size()));
    const result<void> done =
        ranks_->recv(into, rank_id{from}, options_.tag, ranks_->after(options_.answer_within_ns));
    if (done.code() == errc::message_damaged) continue;
    if (!done) return std::nullopt;
    if (auto message = detail::read_rank_message(text); message && !message->numbers.empty()) return message;
  }
}

/// Waits until a message arrives from that rank, or it is time to check the others.
template <checkpoint_storage S, watched_transport T, retention_policy R, rank_waiter W>
void comm_coordinator<S, T, R, W>::wait(std::uint32_t from, deadline by) {
  const deadline look{std::min(by.ns, ranks_->after(options_.poll_ns).ns)};
  static_cast<void>(ranks_->probe(rank_id{from}, options_.tag, look).has_value());
}

/// Drops messages of rank 0 that do not belong to the current round.
template <checkpoint_storage S, watched_transport T, retention_policy R, rank_waiter W>
void comm_coordinator<S, T, R, W>::hear_zero(const detail::rank_message& message) {
  const std::vector<std::uint64_t>& numbers = message.numbers;
  if (message.kind == "draft" && numbers.size() == 3) {
    announcement& draft = announced_.emplace();
    draft.number = numbers[0];
    draft.draft = {{numbers[1], numbers[2]}, message.text};
  } else if (message.kind == "refusal" && numbers.size() == 2) {
    announcement& refusal = announced_.emplace();
    refusal.number = numbers[0];
    refusal.draft.id.step = numbers[1];
    refusal.stopped = message.text;
  } else if (message.kind == "outcome" && announced_ && announced_->number == numbers[0]) {
    announced_->stopped = message.text;
  }
}

// Beginning
// ---------------------------------------------------------------------------------------------------------

template <checkpoint_storage S, watched_transport T, retention_policy R, rank_waiter W>
checkpoint_draft comm_coordinator<S, T, R, W>::begin(std::uint64_t step) {
  if (round_ && ranks_->epoch() == epoch_ && round_->at != phase::over) {
    static_cast<void>(abandon(round_->draft, "it begins step " + std::to_string(step)));
  }
  enter_epoch();
  round_.reset();
  ranks_->poll();
  return rank() == 0 ? announce(step) : await_draft(step);
}

/// Sends rank 0's draft to all ranks, or the reason why there is none.
template <checkpoint_storage S, watched_transport T, retention_policy R, rank_waiter W>
checkpoint_draft comm_coordinator<S, T, R, W>::announce(std::uint64_t step) {
  const std::uint64_t number = storage_->nonce();
  try {
    check_ranks();
    open_folder();
    const checkpoint_draft draft = folder_->begin(step);
    round_ = round{.number = number, .draft = draft, .parts = {}};
    round_->parts.resize(world());
    tell_others({"draft", {number, draft.id.step, draft.id.generation}, draft.folder});
    return draft;
  } catch (const std::exception& error) {
    tell_others({"refusal", {number, step}, "rank 0 cannot begin it: " + detail::reason_of(error)});
    throw;
  }
}

template <checkpoint_storage S, watched_transport T, retention_policy R, rank_waiter W>
checkpoint_draft comm_coordinator<S, T, R, W>::await_draft(std::uint64_t step) {
  const deadline by = ranks_->after(options_.begin_within_ns);
  for (;;) {
    if (ranks_->is_revoked()) check_ranks();
    while (const auto message = take(0))
      hear_zero(*message);
    if (announced_ && announced_->draft.id.step > step) {
      throw io_error(where(announced_->draft) + "rank 0 is already there, and makes no checkpoint of step " +
                     std::to_string(step));
    }
    if (announced_) {
      const announcement said = *std::exchange(announced_, std::nullopt);
      const bool is_it = said.draft.id.step == step;
      if (is_it && !said.stopped.empty()) {
        throw checkpoint_stopped(where(said.draft) + said.stopped + "; nothing was committed");
      }
      if (is_it) {
        round_ = round{.number = said.number, .draft = said.draft, .parts = {}};
        return said.draft;
      }
      if (said.stopped.empty()) {
        tell_others({"stop", {said.number}, by_this("it is at step " + std::to_string(step) + " already")});
      }
      continue;
    }
    check_ranks();
    if (is_over(by)) {
      throw ranks_missing(where() + "rank 0 has not begun a checkpoint of step " + std::to_string(step) +
                              detail::within_text(options_.begin_within_ns),
                          {0});
    }
    wait(0, by);
  }
}

// Giving up, and tidying
// ---------------------------------------------------------------------------------------------------------

/// Informs the others that the checkpoint will not be completed, and of the first reason. Returns that reason
/// if it came from another rank. @pre no commit is in progress
template <checkpoint_storage S, watched_transport T, retention_policy R, rank_waiter W>
std::string comm_coordinator<S, T, R, W>::stop(round& of, const std::string& why) {
  const phase before = std::exchange(of.at, phase::over);
  std::string stopped;
  ranks_->poll();
  for (std::uint32_t each = 0; each < world(); ++each) {
    if (each == rank() || ranks_->is_revoked()) continue;
    while (const auto message = take(each)) {
      const bool is_of = message->numbers[0] == of.number;
      if (!is_of && each == 0) hear_zero(*message);
      if (is_of && stopped.empty() && (message->kind == "outcome" || message->kind == "stop"))
        stopped = message->text;
    }
  }
  const std::string text = stopped.empty() ? by_this(why) : stopped;
  if (rank() == 0) {
    end(of, fate::stopped, text);
  } else if (before != phase::part_sent) {
    tell_others({"stop", {of.number}, text});
  } else {  // only rank 0 knows whether the checkpoint can still complete
    static_cast<void>(tell(0, {"stop", {of.number}, text}));
  }
  return stopped;
}

template <checkpoint_storage S, watched_transport T, retention_policy R, rank_waiter W>
std::string comm_coordinator<S, T, R, W>::abandon(const checkpoint_draft& draft,
                                                  const std::string& why) noexcept {
  std::string stopped;
  const bool is_current = round_ && round_->draft.id == draft.id && round_->draft.folder == draft.folder;
  // If rank 0 is committing the round, it may be a checkpoint by now.
  if (!is_current || round_->is_there || round_->at == phase::deciding) return stopped;
  try {
    if (round_->at != phase::over && ranks_->epoch() == epoch_) stopped = stop(*round_, why);
  } catch (...) {  // the other ranks then give up at their deadlines
  }
  if (folder_) folder_->abandon(draft);
  return stopped;
}

template <checkpoint_storage S, watched_transport T, retention_policy R, rank_waiter W>
std::string comm_coordinator<S, T, R, W>::tidy() {
  if (!folder_) return {};
  try {
    static_cast<void>(folder_->tidy(retention_));
  } catch (const error& error) {
    return error.what();
  }
  return {};
}

}  // namespace v0
}  // namespace llmmem
