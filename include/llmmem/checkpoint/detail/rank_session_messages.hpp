/// @file
/// The messages between ranks of a `rank_session`: files that are synced before they get their names.
#pragma once

#include <llmmem/checkpoint/detail/bodies.hpp>
#include <llmmem/checkpoint/detail/search_body.hpp>
#include <llmmem/checkpoint/rank_session.hpp>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <span>

namespace llmmem {
inline namespace v0 {

LLMMEM_CHECKPOINT_BODY std::string rank_session_base::name_of(std::string_view kind,
                                                              std::uint64_t number) const {
  return detail::session_prefix(*session_) + std::string(kind) + "-" + std::to_string(number);
}

LLMMEM_CHECKPOINT_BODY std::string rank_session_base::vote_name(std::uint64_t number,
                                                                std::uint32_t rank) const {
  return name_of("vote", number) + "-" + std::to_string(rank);
}

/// Returns the names of all messages, sorted.
LLMMEM_CHECKPOINT_BODY std::vector<std::string> rank_session_base::names() {
  std::vector<std::string> there;
  for (storage_entry& each : storage_.list("")) {
    if (each.name.starts_with(checkpoint_names::rendezvous)) there.push_back(std::move(each.name));
  }
  std::ranges::sort(there);
  return there;
}

LLMMEM_CHECKPOINT_BODY bool rank_session_base::has(const std::vector<std::string>& sorted,
                                                   const std::string& name) {
  return std::ranges::binary_search(sorted, name);
}

/// If a file cannot be removed, the next opening of the folder removes it.
LLMMEM_CHECKPOINT_BODY void rank_session_base::remove_quietly(const std::string& name) {
  try {
    storage_.remove(name);
  } catch (const std::exception&) {
  }
}

/// Writes and syncs a message, because another machine reliably sees only synced data of a shared folder.
LLMMEM_CHECKPOINT_BODY void rank_session_base::write_message(const std::string& name, std::string_view text) {
  auto output = storage_.create(name, text.size());
  static_cast<void>(output.begin_write(0, std::as_bytes(std::span(text.data(), text.size()))));
  output.sync();
}

/// Gives a message its name, and returns whether it is the first file of that name.
LLMMEM_CHECKPOINT_BODY bool rank_session_base::publish(const std::string& name,
                                                       const detail::rank_message& message) {
  const std::string text = detail::to_text(message);
  const std::string unnamed = detail::rank_file("tmp", storage_.nonce());
  try {
    write_message(unnamed, text);
    if (give_name(unnamed, name, text)) return true;
  } catch (...) {
    remove_quietly(unnamed);
    throw;
  }
  remove_quietly(unnamed);
  return false;
}

LLMMEM_CHECKPOINT_BODY bool rank_session_base::give_name(const std::string& from, const std::string& name,
                                                         std::string_view text) {
  try {
    storage_.rename(from, name);
    return true;
  } catch (const storage_error& error) {
    if (error.number() == EEXIST) return false;
    if (!detail::is_unsupported(error.number())) throw;
  }
  try {
    storage_.link(from, name);
    remove_quietly(from);
    return true;
  } catch (const storage_error& error) {
    if (error.number() == EEXIST) return false;
    if (!detail::is_unsupported(error.number())) throw;
  }
  // Other ranks may see half of the message, and ignore it.
  try {
    write_message(name, text);
  } catch (const storage_error& error) {
    if (error.call() == storage_call::create && error.number() == EEXIST) return false;
    throw;
  }
  remove_quietly(from);
  return true;
}

/// Returns nothing if the message does not exist, or is incomplete.
LLMMEM_CHECKPOINT_BODY std::optional<detail::rank_message> rank_session_base::read(const std::string& name) {
  try {
    return detail::read_rank_message(detail::read_whole(storage_, name, max_manifest_bytes + 4096));
  } catch (const storage_error& error) {
    if (error.number() == ENOENT || error.number() == ESTALE) return std::nullopt;
    throw;
  } catch (const io_error&) {  // another rank removed it while this one opened it
    return std::nullopt;
  }
}

/// Reads a message of this session and that round.
LLMMEM_CHECKPOINT_BODY std::optional<detail::rank_message> rank_session_base::read_told(
    const std::string& name, std::string_view kind, std::uint64_t number, std::size_t numbers) {
  auto message = read(name);
  if (!message || message->kind != kind || message->numbers.size() != numbers ||
      message->numbers[0] != *session_ || message->numbers[1] != number) {
    return std::nullopt;
  }
  return message;
}

LLMMEM_CHECKPOINT_BODY auto rank_session_base::read_decision(std::uint64_t number)
    -> std::optional<decision> {
  auto message = read_told(name_of("decision", number), "decision", number, 4);
  if (!message) return std::nullopt;
  return decision{message->numbers[3] == 1 ? verdict::go : verdict::stop,
                  static_cast<std::uint32_t>(message->numbers[2]), std::move(message->text)};
}

/// Returns whether this is the first decision.
LLMMEM_CHECKPOINT_BODY bool rank_session_base::decide(std::uint64_t number, verdict what,
                                                      const std::string& why) {
  return publish(name_of("decision", number),
                 {"decision", {*session_, number, options_.rank, what == verdict::go ? 1U : 0U}, why});
}

/// Announces the outcome, which stands even if that fails.
LLMMEM_CHECKPOINT_BODY void rank_session_base::tell(const round& of, fate how, const std::string& why) {
  try {
    static_cast<void>(
        publish(name_of("outcome", of.number),
                {"outcome", {*session_, of.number, options_.rank, static_cast<std::uint64_t>(how)}, why}));
  } catch (const std::exception& error) {
    note_trouble(of, "the other ranks could not be informed of its outcome: ", error);
  }
}

/// Removes the messages of rounds before `number`: all ranks have voted in a later round, so no rank reads
/// them.
LLMMEM_CHECKPOINT_BODY void rank_session_base::forget_before(std::uint64_t number,
                                                             const std::vector<std::string>& there) {
  const std::string prefix = detail::session_prefix(*session_);
  for (const std::string& name : there) {
    if (!name.starts_with(prefix)) continue;
    const auto told_in = detail::round_in(std::string_view(name).substr(prefix.size()));
    if (told_in && *told_in < number) remove_quietly(name);
  }
}

}  // namespace v0
}  // namespace llmmem
