/// @file
/// Bodies of `rank_session`: how ranks join, and how their session begins.
#pragma once

#include <llmmem/checkpoint/detail/bodies.hpp>
#include <llmmem/checkpoint/rank_session.hpp>

#include <cerrno>
#include <cstddef>

namespace llmmem {
inline namespace v0 {

LLMMEM_CHECKPOINT_BODY rank_session_base::rank_session_base(storage_ref storage,
                                                            const rank_session_options& options)
    : storage_(storage), options_(options), nonce_(storage.nonce()), lock_(take_rank(storage, options)) {
  if (options_.rank == 0) folder_.emplace(storage);
}

LLMMEM_CHECKPOINT_BODY storage_ref::lock_type rank_session_base::take_rank(
    storage_ref storage, const rank_session_options& options) {
  const std::string who = "rank " + std::to_string(options.rank);
  if (options.rank >= options.world)
    throw argument_error("rank_session: " + who + " of " + std::to_string(options.world));
  const std::string name = std::string(checkpoint_names::rank_lock) + std::to_string(options.rank);
  std::optional<storage_ref::lock_type> lock = storage.try_lock(name);
  if (lock) return std::move(*lock);
  throw io_error(storage.path(name) + ": another process is " + who + " here; stop it, or use another rank");
}

LLMMEM_CHECKPOINT_BODY std::string rank_session_base::where(const checkpoint_draft& draft) const {
  return storage_.path("") + ": step " + std::to_string(draft.id.step) + ", generation " +
         std::to_string(draft.id.generation) + ": ";
}

LLMMEM_CHECKPOINT_BODY void rank_session_base::check_lock() const {
  if (lock_.is_held()) return;
  const std::string rank = std::to_string(options_.rank);
  throw fenced(
      storage_.path(std::string(checkpoint_names::rank_lock) + rank) +
      ": it was removed or replaced while this process held it, or its lease ran out: another one may be "
      "rank " +
      rank + " now; nothing was committed");
}

LLMMEM_CHECKPOINT_BODY bool rank_session_base::try_join() {
  if (session_) return true;
  check_lock();
  const std::vector<std::string> there = names();
  return options_.rank == 0 ? gather(there) : find_session(there);
}

LLMMEM_CHECKPOINT_BODY bool rank_session_base::gather(const std::vector<std::string>& there) {
  std::vector<std::vector<std::pair<std::uint64_t, std::string>>> joined(options_.world);
  joined[0].emplace_back(nonce_, "");
  std::string notes;
  const std::string prefix = std::string(checkpoint_names::rendezvous) + "join-";
  for (const std::string& name : there) {
    if (!name.starts_with(prefix)) continue;
    const auto message = read(name);
    if (!message || message->kind != "join" || message->numbers.size() != 3) continue;
    const std::uint64_t rank = message->numbers[0];
    const std::uint64_t world = message->numbers[1];
    if (world != options_.world || rank == 0 || rank >= world) {
      notes += "; a process joined as rank " + std::to_string(rank) + " of " + std::to_string(world);
    } else {
      joined[static_cast<std::size_t>(rank)].emplace_back(message->numbers[2], name);
    }
  }
  waits_ = {};
  detail::rank_message session{"session", {storage_.nonce(), options_.world}, {}};
  for (std::uint32_t rank = 0; rank < options_.world; ++rank) {
    if (joined[rank].size() == 1) {
      session.numbers.push_back(joined[rank].front().first);
      continue;
    }
    waits_.ranks.push_back(rank);
    // All but one belong to dead processes: rank 0 removes all, and a live process publishes its nonce again.
    for (const auto& [nonce, name] : joined[rank])
      remove_quietly(name);
  }
  if (!waits_.ranks.empty()) {
    waits_.text = detail::to_text(waits_.ranks) + " of " + std::to_string(options_.world) +
                  (waits_.ranks.size() == 1 ? " has" : " have") + " not joined" + notes;
    return false;
  }
  if (!publish(detail::rank_file("session", session.numbers[0]), session)) return false;
  session_ = session.numbers[0];
  return true;
}

LLMMEM_CHECKPOINT_BODY bool rank_session_base::find_session(const std::vector<std::string>& there) {
  const std::string own = detail::rank_file("join", nonce_);
  const std::string prefix = std::string(checkpoint_names::rendezvous) + "session-";
  waits_ = {{0}, "rank 0 has not begun a session with this process"};
  for (const std::string& name : there) {
    if (!name.starts_with(prefix)) continue;
    const auto message = read(name);
    if (!message || message->kind != "session" || message->numbers.size() < 2) continue;
    const std::vector<std::uint64_t>& numbers = message->numbers;
    if (numbers[1] == options_.world && numbers.size() == std::size_t{2} + options_.world &&
        numbers[std::size_t{2} + options_.rank] == nonce_) {
      session_ = numbers[0];
      remove_quietly(own);
      return true;
    }
    waits_.text = "rank 0 has not begun a session with this process, but a session with others exists";
  }
  if (has(there, own)) return false;
  try {
    static_cast<void>(publish(own, {"join", {options_.rank, options_.world, nonce_}, {}}));
  } catch (const storage_error& error) {
    // Rank 0 started and tidied, possibly while this rank opened the file, which has no error number. The
    // next call publishes again.
    if (error.number() != ENOENT && error.number() != 0) throw;
    if (error.number() == 0) waits_.text += "; " + std::string(error.what());
  } catch (const io_error& error) {  // the same: rank 0 removed the file while this rank opened it
    waits_.text += "; " + std::string(error.what());
  }
  return false;
}

LLMMEM_CHECKPOINT_BODY void rank_session_base::leave() noexcept {
  try {
    if (!session_ && options_.rank != 0) remove_quietly(detail::rank_file("join", nonce_));
  } catch (...) {
  }
}

}  // namespace v0
}  // namespace llmmem
