/// @file
/// `comm_coordinator`: commits a checkpoint, and determines its outcome.
#pragma once

#include <llmmem/checkpoint/comm_coordinator.hpp>
#include <llmmem/checkpoint/detail/coverage.hpp>
#include <llmmem/checkpoint/detail/rank_texts.hpp>
#include <llmmem/checkpoint/detail/reason.hpp>

#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

// Committing
// ---------------------------------------------------------------------------------------------------------

template <checkpoint_storage S, watched_transport T, retention_policy R, rank_waiter W>
void comm_coordinator<S, T, R, W>::commit(const checkpoint_draft& draft, const checkpoint_manifest& part) {
  round& of = current(draft);
  try {
    check_part(part, rank(), draft);
    if (rank() == 0) {
      lead(of, part);
    } else {
      follow(of, part);
    }
  } catch (const std::exception& error) {
    if (of.at == phase::over) throw;
    const std::string why = detail::reason_of(error);
    fate how = fate::stopped;
    if (of.at == phase::part_sent) {
      of.at = phase::over;
      how = fate_of(of);
    } else if (const std::string before = stop(of, why); !before.empty()) {
      throw checkpoint_stopped(where(draft) + before + "; nothing was committed");
    }
    of.is_there = how == fate::committed || how == fate::uncertain;
    if (how == fate::committed) return;
    if (how == fate::uncertain) {
      throw durability_uncertain(why + ", which had this rank's part; it may be committed: look for " +
                                 folder_name(draft.id));
    }
    if (const auto* const late = dynamic_cast<const ranks_missing*>(&error))
      throw ranks_missing(why + "; nothing was committed", late->ranks());
    throw;
  }
}

/// Rank 0: gathers the parts, and decides.
template <checkpoint_storage S, watched_transport T, retention_policy R, rank_waiter W>
void comm_coordinator<S, T, R, W>::lead(round& of, const checkpoint_manifest& part) {
  const deadline by = ranks_->after(options_.commit_within_ns);
  of.parts[0] = part;
  for (;;) {
    std::vector<std::uint32_t> missing;
    for (std::uint32_t each = 1; each < world(); ++each) {
      while (const auto message = take(each))
        hear_part(of, each, *message);
      if (!of.parts[each]) missing.push_back(each);
    }
    if (missing.empty()) return commit_all(of);
    if (const auto dead = failed_of(missing); !dead.empty()) {
      const std::string why = detail::death_text(dead);
      end(of, fate::stopped, why);
      throw ranks_missing(where(of.draft) + why + "; nothing was committed", dead);
    }
    if (is_over(by)) {
      const std::string why = detail::to_text(missing) + (missing.size() == 1 ? " has" : " have") +
                              " not reported all files as synced" +
                              detail::within_text(options_.commit_within_ns);
      end(of, fate::stopped, why);
      throw ranks_missing(where(of.draft) + why + "; nothing was committed", missing);
    }
    wait(missing.front(), by);
  }
}

template <checkpoint_storage S, watched_transport T, retention_policy R, rank_waiter W>
void comm_coordinator<S, T, R, W>::hear_part(round& of, std::uint32_t from,
                                             const detail::rank_message& message) {
  if (message.numbers[0] != of.number) return;  // of another round
  const std::string who = "rank " + std::to_string(from);
  if (message.kind == "stop") {
    end(of, fate::stopped, message.text);
    throw checkpoint_stopped(where(of.draft) + message.text + "; nothing was committed");
  }
  if (message.kind == "ready") static_cast<void>(tell(from, {"ask", {of.number}, {}}));
  if (message.kind != "part") return;
  try {
    checkpoint_manifest part = read_manifest(message.text, "the part of " + who);
    check_part(part, from, of.draft);
    for (const checkpoint_file& each : part.files)
      detail::verify_file(*storage_, of.draft.folder, part, each, options_.votes);
    of.parts[from] = std::move(part);
  } catch (const std::exception& error) {
    const std::string why = "the part of " + who + " is invalid: " + detail::reason_of(error);
    end(of, fate::stopped, why);
    throw io_error(where(of.draft) + why + "; nothing was committed");
  }
}

/// Rank 0: merges and commits all parts.
template <checkpoint_storage S, watched_transport T, retention_policy R, rank_waiter W>
void comm_coordinator<S, T, R, W>::commit_all(round& of) {
  manifest_merger merger;
  for (std::uint32_t each = 0; each < world(); ++each)
    merger.add(*std::move(of.parts[each]), "the part of rank " + std::to_string(each));
  const checkpoint_manifest all = std::move(merger).finish("the parts of all ranks");
  detail::check_complete(all, "the parts of all ranks");
  of.at = phase::deciding;
  try {
    folder_->commit(of.draft, all);
  } catch (const durability_uncertain& error) {
    of.is_there = true;
    end(of, fate::uncertain, detail::reason_of(error));
    throw;
  } catch (const std::exception& error) {
    end(of, fate::failed, detail::reason_of(error));
    throw;
  }
  of.is_there = true;
  end(of, fate::committed, {});
}

/// Rank 0: announces the outcome. Unreachable ranks learn it from the folder.
template <checkpoint_storage S, watched_transport T, retention_policy R, rank_waiter W>
void comm_coordinator<S, T, R, W>::end(round& of, fate how, const std::string& why) {
  of.at = phase::over;
  tell_others({"outcome", {of.number, static_cast<std::uint64_t>(how)}, why});
}

/// Other ranks: send this rank's part, and wait for the outcome.
template <checkpoint_storage S, watched_transport T, retention_policy R, rank_waiter W>
void comm_coordinator<S, T, R, W>::follow(round& of, const checkpoint_manifest& part) {
  const std::string text = to_json(part);
  storage_->sync_folder(of.draft.folder);
  deadline by = ranks_->after(options_.commit_within_ns);
  of.at = phase::told;
  static_cast<void>(tell(0, {"ready", {of.number}, {}}));
  for (;;) {
    while (const auto message = take(0)) {
      if (message->numbers[0] != of.number) {
        hear_zero(*message);
      } else if (message->kind == "outcome" && message->numbers.size() == 2) {
        return settle(of, *message);
      } else if (message->kind == "ask" && of.at == phase::told) {
        of.at = phase::part_sent;  // even if the send fails, the part may have arrived
        const std::string whole = detail::to_text({"part", {of.number}, text});
        static_cast<void>(
            ranks_->send(std::as_bytes(std::span(whole.data(), whole.size())), rank_id{0}, options_.tag, by)
                .has_value());
      }
    }
    for (std::uint32_t each = 1; each < world(); ++each) {
      if (each == rank()) continue;
      while (const auto message = take(each)) {
        if (message->kind != "stop" || message->numbers[0] != of.number) continue;
        of.at = phase::over;  // this rank's part was not sent, and will not be
        throw checkpoint_stopped(where(of.draft) + message->text + "; nothing was committed");
      }
    }
    if (ranks_->has_failed(rank_id{0})) {
      throw ranks_missing(where(of.draft) + detail::death_text({0}), {0});
    }
    if (is_over(by)) ask_to_stop(of, by);
    wait(0, by);
  }
}

/// This rank has waited for too long. If it did not send its part, no rank can commit; otherwise only rank 0
/// knows the outcome.
template <checkpoint_storage S, watched_transport T, retention_policy R, rank_waiter W>
void comm_coordinator<S, T, R, W>::ask_to_stop(round& of, deadline& by) {
  const bool is_told = of.at == phase::told;
  const std::string why = std::string("rank 0 has not ") +
                          (is_told ? "asked for the part of this rank" : "reported its outcome") +
                          detail::within_text(options_.commit_within_ns);
  if (is_told || of.has_asked) throw ranks_missing(where(of.draft) + why, {0});
  of.has_asked = true;
  static_cast<void>(tell(0, {"stop", {of.number}, by_this("it has waited for too long: " + why)}));
  by = ranks_->after(options_.answer_within_ns);
}

template <checkpoint_storage S, watched_transport T, retention_policy R, rank_waiter W>
void comm_coordinator<S, T, R, W>::settle(round& of, const detail::rank_message& outcome) {
  of.at = phase::over;
  const std::uint64_t how = outcome.numbers[1];
  of.is_there = how == static_cast<std::uint64_t>(fate::committed) ||
                how == static_cast<std::uint64_t>(fate::uncertain);
  if (how == static_cast<std::uint64_t>(fate::committed)) return;
  if (of.is_there) throw durability_uncertain(outcome.text);
  if (how == static_cast<std::uint64_t>(fate::failed))
    throw io_error(where(of.draft) + "rank 0 could not commit it: " + outcome.text);
  throw checkpoint_stopped(where(of.draft) + outcome.text + "; nothing was committed");
}

// The outcome, when rank 0 does not report it
// ---------------------------------------------------------------------------------------------------------

/// Called if rank 0 was asked and did not answer.
template <checkpoint_storage S, watched_transport T, retention_policy R, rank_waiter W>
auto comm_coordinator<S, T, R, W>::fate_of(const round& of) -> fate {
  const bool has_waited = of.has_asked && !ranks_->has_failed(rank_id{0});
  return look(of.draft, ranks_->after(has_waited ? 0 : options_.answer_within_ns));
}

template <checkpoint_storage S, watched_transport T, retention_policy R, rank_waiter W>
auto comm_coordinator<S, T, R, W>::look(const checkpoint_draft& draft, deadline by) -> fate {
  for (;;) {
    try {
      if (const std::optional<fate> seen = look_once(draft)) return *seen;
      // Only the holder of the lock can commit. If the lock is free, rank 0 is dead, or would find that it
      // lost the lock.
      if (const auto lock = storage_->try_lock(std::string(checkpoint_names::lock))) {
        return look_once(draft).value_or(fate::failed);  // rank 0 may have committed before it died
      }
    } catch (const std::exception&) {  // the folder is unreadable now
    }
    if (is_over(by)) return fate::uncertain;
    waiter_.pause(std::chrono::nanoseconds(options_.poll_ns));
  }
}

/// Returns the outcome that the folder shows, if it shows one.
template <checkpoint_storage S, watched_transport T, retention_policy R, rank_waiter W>
auto comm_coordinator<S, T, R, W>::look_once(const checkpoint_draft& draft) -> std::optional<fate> {
  const std::string name = folder_name(draft.id);
  bool is_there = false;
  for (const storage_entry& each : storage_->list(""))
    is_there = is_there || each.name == name;
  if (!is_there) return std::nullopt;
  if (draft.folder != name) {
    // Rank 0 may have died before it synced this.
    storage_->sync_folder("");
    return fate::committed;
  }
  // The draft had its final name from the beginning, so it is a checkpoint once its manifest is complete;
  // only rank 0 knows whether that will last.
  try {
    static_cast<void>(open_checkpoint(*storage_, draft.id, verification::sizes));
    return fate::uncertain;
  } catch (const format_error&) {
  } catch (const storage_error& error) {
    if (error.number() != ENOENT) throw;
  }
  return std::nullopt;
}

}  // namespace v0
}  // namespace llmmem
