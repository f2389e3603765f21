/// @file
/// One checkpoint of a `rank_session`: its draft, the votes, and whether it is committed or stopped.
#pragma once

#include <llmmem/checkpoint/detail/bodies.hpp>
#include <llmmem/checkpoint/detail/coverage.hpp>
#include <llmmem/checkpoint/detail/reason.hpp>
#include <llmmem/checkpoint/detail/search_body.hpp>
#include <llmmem/checkpoint/rank_session.hpp>

namespace llmmem {
inline namespace v0 {

LLMMEM_CHECKPOINT_BODY auto rank_session_base::current(const checkpoint_draft& draft, const char* call)
    -> round& {
  if (round_ && round_->draft.id == draft.id && round_->draft.folder == draft.folder) return *round_;
  throw argument_error("rank_session::" + std::string(call) + ": step " + std::to_string(draft.id.step) +
                       ", generation " + std::to_string(draft.id.generation) +
                       " is not the draft begun last");
}

LLMMEM_CHECKPOINT_BODY std::optional<checkpoint_draft> rank_session_base::try_begin(std::uint64_t step) {
  if (!session_) throw argument_error("rank_session::try_begin: not all ranks have joined");
  check_lock();
  if (options_.rank == 0) return announce(step);
  const std::vector<std::string> there = names();
  for (;;) {
    waits_ = {{0}, "rank 0 has not begun a checkpoint of step " + std::to_string(step)};
    const std::string name = name_of("draft", next_);
    if (!has(there, name)) return std::nullopt;
    const auto message = read_told(name, "draft", next_, 4);
    if (!message) return std::nullopt;
    checkpoint_draft draft{{message->numbers[2], message->numbers[3]}, message->text};
    if (draft.id.step > step) {
      throw io_error(where(draft) + "rank 0 is already there, and makes no checkpoint of step " +
                     std::to_string(step));
    }
    round_ = round{.number = next_++, .draft = draft, .votes = {}};
    if (draft.id.step < step) {
      round_->is_over = true;
      static_cast<void>(
          decide(round_->number, verdict::stop, "it is at step " + std::to_string(step) + " already"));
      continue;
    }
    if (has(there, name_of("decision", round_->number))) {
      if (const auto by = read_decision(round_->number)) fail_stopped(*round_, *by);
    }
    return draft;
  }
}

/// Makes rank 0's draft, and a file that announces it.
LLMMEM_CHECKPOINT_BODY checkpoint_draft rank_session_base::announce(std::uint64_t step) {
  if (round_ && !round_->is_over)
    static_cast<void>(abandon(round_->draft, "it begins step " + std::to_string(step)));
  checkpoint_draft draft = folder_->begin(step);
  try {
    const auto told = [&] {
      return publish(name_of("draft", next_),
                     {"draft", {*session_, next_, draft.id.step, draft.id.generation}, draft.folder});
    };
    while (!told()) {  // the write may have succeeded although it was reported as failed; no rank may wait
                       // for this round
      static_cast<void>(decide(next_, verdict::stop, "it could not announce it"));
      ++next_;
    }
  } catch (...) {
    folder_->abandon(draft);
    throw;
  }
  round_ = round{.number = next_++, .draft = draft, .votes = {}};
  round_->votes.resize(options_.world);
  return draft;
}

LLMMEM_CHECKPOINT_BODY void rank_session_base::vote(const checkpoint_draft& draft,
                                                    const checkpoint_manifest& part) {
  round& of = current(draft, "vote");
  check_lock();
  check_vote(part, options_.rank, draft);
  if (options_.rank == 0) {
    of.votes[0] = part;
    of.has_voted = true;
    return;
  }
  storage_.sync_folder(draft.folder);
  of.has_voted = true;  // even if the next line fails, rank 0 may have received the vote
  static_cast<void>(publish(vote_name(of.number, options_.rank),
                            {"vote", {*session_, of.number, options_.rank}, to_json(part)}));
}

/// Checks that a vote belongs to that draft and rank.
LLMMEM_CHECKPOINT_BODY void rank_session_base::check_vote(const checkpoint_manifest& vote, std::uint32_t rank,
                                                          const checkpoint_draft& draft) {
  const std::string who = "the vote of rank " + std::to_string(rank);
  if (vote.step != draft.id.step || vote.generation != draft.id.generation || vote.world != options_.world) {
    throw argument_error(where(draft) + who + " is of step " + std::to_string(vote.step) + ", generation " +
                         std::to_string(vote.generation) + " and a world of " + std::to_string(vote.world));
  }
  for (const checkpoint_file& each : vote.files) {
    if (each.rank == rank) continue;
    throw argument_error(where(draft) + who + " lists " + each.name + ", a file of rank " +
                         std::to_string(each.rank));
  }
}

LLMMEM_CHECKPOINT_BODY bool rank_session_base::try_conclude(const checkpoint_draft& draft) {
  round& of = current(draft, "try_conclude");
  if (!of.has_voted || of.is_over)
    throw argument_error("rank_session::try_conclude: this rank has not voted, or it is over");
  const std::vector<std::string> there = names();
  if (options_.rank != 0) return learn(of, there);
  if (has(there, name_of("decision", of.number))) {
    const auto by = read_decision(of.number);
    if (by) fail_stopped(of, *by);
    return false;
  }
  if (!gather_votes(of, there)) return false;
  if (!commit(of)) return false;
  try {
    forget_before(of.number, there);
  } catch (const std::exception& error) {
    note_trouble(of, "older messages could not be removed: ", error);
  }
  return true;
}

/// Returns whether all votes have arrived.
LLMMEM_CHECKPOINT_BODY bool rank_session_base::gather_votes(round& of,
                                                            const std::vector<std::string>& there) {
  waits_ = {};
  bool damaged = false;
  for (std::uint32_t rank = 1; rank < options_.world; ++rank) {
    if (of.votes[rank]) continue;
    const std::string name = vote_name(of.number, rank);
    const bool is_there = has(there, name);
    const auto message = is_there ? read_told(name, "vote", of.number, 3) : std::nullopt;
    if (!message || message->numbers[2] != rank) {
      damaged = damaged || is_there;
      waits_.ranks.push_back(rank);
      continue;
    }
    try {
      checkpoint_manifest vote = read_manifest(message->text, storage_.path(name));
      check_vote(vote, rank, of.draft);
      for (const checkpoint_file& each : vote.files)
        detail::verify_file(storage_, of.draft.folder, vote, each, options_.votes);
      of.votes[rank] = std::move(vote);
    } catch (const std::exception& error) {
      refuse(of, "the vote of rank " + std::to_string(rank) + " is invalid: " + error.what());
    }
  }
  waits_.text = detail::to_text(waits_.ranks) + (waits_.ranks.size() == 1 ? " has" : " have") +
                " not reported all files as synced" + (damaged ? ", or not whole" : "");
  return waits_.ranks.empty();
}

/// Stops the round for an error that rank 0 found, so that all ranks learn of it.
LLMMEM_CHECKPOINT_BODY void rank_session_base::refuse(round& of, const std::string& why) {
  if (!decide(of.number, verdict::stop, why)) {
    if (const auto by = read_decision(of.number)) fail_stopped(of, *by);
  }
  of.is_over = true;
  throw io_error(where(of.draft) + why + "; nothing was committed");
}

/// Returns whether rank 0's decision came first.
LLMMEM_CHECKPOINT_BODY bool rank_session_base::commit(round& of) {
  checkpoint_manifest all;
  try {
    manifest_merger merger;
    for (std::uint32_t rank = 0; rank < options_.world; ++rank)
      merger.add(*of.votes[rank], "the vote of rank " + std::to_string(rank));
    all = std::move(merger).finish("the votes of all ranks");
    detail::check_complete(all, "the votes of all ranks");
  } catch (const std::exception& error) {  // also if the manifest is too large for this machine
    refuse(of, error.what());
  }
  try {
    if (!decide(of.number, verdict::go, "")) {
      if (const auto by = read_decision(of.number)) fail_stopped(of, *by);
      return false;
    }
    folder_->commit(of.draft, all);
  } catch (const checkpoint_stopped&) {
    throw;
  } catch (const durability_uncertain& error) {
    of.is_over = of.is_there = true;
    tell(of, fate::uncertain, detail::reason_of(error));
    throw;
  } catch (const std::exception& error) {
    of.is_over = true;
    tell(of, fate::failed, detail::reason_of(error));
    throw;
  } catch (...) {
    of.is_over = true;
    tell(of, fate::failed, detail::reason("an exception that is not from the standard library"));
    throw;
  }
  of.is_over = of.is_there = true;
  tell(of, fate::committed, "");
  return true;
}

/// Records a problem that undoes nothing, without an exception that would suggest otherwise.
LLMMEM_CHECKPOINT_BODY void rank_session_base::note_trouble(const round& of, const char* what,
                                                            const std::exception& why) noexcept {
  try {
    trouble_ = where(of.draft) + what + why.what();
  } catch (...) {
  }
}

/// Returns whether rank 0 has announced the commit.
LLMMEM_CHECKPOINT_BODY bool rank_session_base::learn(round& of, const std::vector<std::string>& there) {
  const auto by =
      has(there, name_of("decision", of.number)) ? read_decision(of.number) : std::optional<decision>();
  if (!by) {
    waits_ = {};
    for (std::uint32_t rank = 1; rank < options_.world; ++rank) {
      if (rank != options_.rank && !has(there, vote_name(of.number, rank))) waits_.ranks.push_back(rank);
    }
    const bool all = waits_.ranks.empty();
    if (all) waits_.ranks.push_back(0);
    waits_.text = detail::to_text(waits_.ranks) + (waits_.ranks.size() == 1 ? " has" : " have") +
                  (all ? " not decided, though all others have voted" : " not reported all files as synced");
    return false;
  }
  if (by->what == verdict::stop) fail_stopped(of, *by);
  const auto outcome = read_told(name_of("outcome", of.number), "outcome", of.number, 4);
  if (!outcome) {
    waits_ = {{0}, "rank 0 has decided to commit, but not reported the outcome"};
    return false;
  }
  of.is_over = true;
  of.is_there = outcome->numbers[3] != static_cast<std::uint64_t>(fate::failed);
  if (outcome->numbers[3] == static_cast<std::uint64_t>(fate::committed)) return true;
  if (of.is_there) throw durability_uncertain(outcome->text);
  throw io_error(where(of.draft) + "rank 0 could not commit it: " + outcome->text);
}

LLMMEM_CHECKPOINT_BODY void rank_session_base::fail_stopped(round& of, const decision& by) {
  of.is_over = true;
  throw checkpoint_stopped(where(of.draft) + stopped_by(by) + "; nothing was committed");
}

LLMMEM_CHECKPOINT_BODY std::string rank_session_base::stopped_by(const decision& by) {
  std::string text = "rank ";
  text += std::to_string(by.by);
  text += " stopped it: ";
  return text += by.what == verdict::go ? "it had decided to commit it before" : by.why;
}

LLMMEM_CHECKPOINT_BODY void rank_session_base::stop(const checkpoint_draft& draft, const std::string& why) {
  round& of = current(draft, "stop");
  if (of.is_over) return;
  const bool may_be_there = options_.rank != 0 && of.has_voted;  // rank 0 knows its own commits
  const auto uncertain = [&](const std::string& text) {
    of.is_there = true;
    return durability_uncertain(where(draft) + text + "; look for " + folder_name(draft.id));
  };
  bool is_first = false;
  of.is_over = true;
  try {
    is_first = decide(of.number, verdict::stop, why);
  } catch (const std::exception& error) {
    if (!may_be_there) throw;
    throw uncertain(std::string("this rank has voted, and could not stop it: ") + error.what());
  }
  if (is_first) return;
  const auto by = read_decision(of.number);
  if (by && by->what == verdict::stop) {
    if (by->by != options_.rank) fail_stopped(of, *by);
    return;
  }
  if (may_be_there) throw uncertain("rank 0 had decided to commit, but has not reported the outcome");
}

LLMMEM_CHECKPOINT_BODY std::string rank_session_base::abandon(const checkpoint_draft& draft,
                                                              const std::string& why) noexcept {
  std::string stopped;
  const bool is_current = round_ && round_->draft.id == draft.id && round_->draft.folder == draft.folder;
  if (!is_current)
    return stopped;  // the round is over; without a rename, the draft may be a checkpoint by now
  try {
    round& of = *round_;
    if (of.is_there) return stopped;
    if (!of.is_over) {
      of.is_over = true;
      if (!decide(of.number, verdict::stop, why)) {
        const auto by = read_decision(of.number);
        if (by && by->by != options_.rank) stopped = stopped_by(*by);
      }
    }
  } catch (...) {  // the others learn of it by their deadlines
  }
  if (folder_) folder_->abandon(draft);
  return stopped;
}

}  // namespace v0
}  // namespace llmmem
