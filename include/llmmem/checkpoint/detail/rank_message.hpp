/// @file
/// The messages that ranks exchange through files, and the names of those files.
#pragma once

#include <llmmem/checkpoint/detail/hex.hpp>
#include <llmmem/checkpoint/names.hpp>
#include <llmmem/config.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// A kind, numbers and a text. A file has a line with the kind and the numbers, then the text, then a CRC-32C
/// of both, so that a partial or damaged message counts as none.
struct rank_message {
  std::string kind{};
  std::vector<std::uint64_t> numbers{};
  std::string text{};

  friend bool operator==(const rank_message&, const rank_message&) = default;
};

inline constexpr std::string_view rank_message_format = "llmmem-rank-1 ";

[[nodiscard]] inline std::string to_text(const rank_message& message) {
  std::string text(rank_message_format);
  text += message.kind;
  for (const std::uint64_t each : message.numbers)
    text += " " + std::to_string(each);
  text += "\n" + message.text + "\n";
  append_hex(text, crc32c_of(text));
  return text + "\n";
}

/// Returns nothing if the message is incomplete.
[[nodiscard]] inline std::optional<rank_message> read_rank_message(std::string_view text) {
  constexpr std::size_t tail = 9;  // length of the checksum and the end of the line
  if (text.size() < tail + 1 || text.back() != '\n') return std::nullopt;
  const auto sum = read_hex(text.substr(text.size() - tail, tail - 1));
  text.remove_suffix(tail);
  if (!sum || *sum != crc32c_of(text) || !take_text(text, rank_message_format)) return std::nullopt;
  text.remove_suffix(1);
  const std::size_t line = text.find('\n');
  if (line == std::string_view::npos) return std::nullopt;
  std::string_view head = text.substr(0, line);
  rank_message message;
  const std::size_t kind = head.find(' ');
  message.kind = std::string(head.substr(0, kind));
  head.remove_prefix(kind == std::string_view::npos ? head.size() : kind);
  while (!head.empty()) {
    if (!take_text(head, " ")) return std::nullopt;
    const auto number = take_number(head);
    if (!number) return std::nullopt;
    message.numbers.push_back(*number);
  }
  message.text = std::string(text.substr(line + 1));
  return message;
}

[[nodiscard]] inline std::string rank_text(std::uint64_t number) {
  std::string text;
  append_hex(text, static_cast<std::uint32_t>(number >> 32));
  append_hex(text, static_cast<std::uint32_t>(number));
  return text;
}

/// `.rank-join-<nonce>`, `.rank-session-<session>`, `.rank-tmp-<nonce>`.
[[nodiscard]] inline std::string rank_file(std::string_view kind, std::uint64_t number) {
  return std::string(checkpoint_names::rendezvous) + std::string(kind) + "-" + rank_text(number);
}

/// Returns `.rank-<session>-`, the prefix of all messages of a session.
[[nodiscard]] inline std::string session_prefix(std::uint64_t session) {
  return std::string(checkpoint_names::rendezvous) + rank_text(session) + "-";
}

/// Returns the round in the text after a session's prefix: `draft-7`, `vote-7-3`.
[[nodiscard]] inline std::optional<std::uint64_t> round_in(std::string_view name) {
  const std::size_t dash = name.find('-');
  if (dash == std::string_view::npos) return std::nullopt;
  name.remove_prefix(dash + 1);
  return take_number(name);
}

/// "rank 3", or "ranks 1, 2 and 5".
[[nodiscard]] inline std::string to_text(std::span<const std::uint32_t> ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i != 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
