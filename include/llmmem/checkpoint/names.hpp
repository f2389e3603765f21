/// @file
/// The names in folders of checkpoints, and the order of checkpoints.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace llmmem {
inline namespace v0 {

/// Identifies a checkpoint. The generation counts commits to a folder of checkpoints, independent of the
/// step.
struct checkpoint_id {
  std::uint64_t step = 0;
  std::uint64_t generation = 0;

  friend constexpr bool operator==(const checkpoint_id&, const checkpoint_id&) noexcept = default;
};

/// The names in a folder of checkpoints:
///
///     step-0000001200-g00000042   a checkpoint
///     LATEST                      the name of one, a hint for people and scripts
///     LOCK                        held by the committing process
///     .tmp-..., .trash-...        one under construction, one being removed: removed at the next opening
///     .latest-..., .probe-...     removed then, too
///     LOCK.rank-3                 held by the process that is rank 3 (`rank_session`)
///     .rank-...                   messages between ranks: removed when the folder is next opened
///     .hold-g42-...               held by a reader of that generation, which stays (`checkpoint_hold`)
///     LOCK.holding                briefly locked by a reader that takes a hold, and by a run that removes
///     checkpoints
struct checkpoint_names {
  static constexpr std::string_view manifest = "MANIFEST.json";
  static constexpr std::string_view latest = "LATEST";
  static constexpr std::string_view lock = "LOCK";
  static constexpr std::string_view draft = ".tmp-";
  [[deprecated("its name is draft")]] static constexpr std::string_view in_the_making = draft;
  static constexpr std::string_view trash = ".trash-";
  static constexpr std::string_view hint = ".latest-";
  static constexpr std::string_view probe = ".probe-";
  static constexpr std::string_view rank_lock = "LOCK.rank-";
  static constexpr std::string_view rendezvous = ".rank-";
  static constexpr std::string_view hold = ".hold-g";
  static constexpr std::string_view holding = "LOCK.holding";
};

namespace detail {

inline void append_padded(std::string& to, std::uint64_t number, std::size_t digits) {
  const std::string text = std::to_string(number);
  if (text.size() < digits) to.append(digits - text.size(), '0');
  to += text;
}

/// Takes the digits up to the suffix that follows them in `text`.
[[nodiscard]] inline std::optional<std::uint64_t> take_number(std::string_view& text) noexcept {
  std::uint64_t value = 0;
  std::size_t count = 0;
  for (; count < text.size() && text[count] >= '0' && text[count] <= '9'; ++count) {
    const auto digit = static_cast<std::uint64_t>(text[count] - '0');
    if (value > (~std::uint64_t{0} - digit) / 10) return std::nullopt;
    value = value * 10 + digit;
  }
  if (count == 0) return std::nullopt;
  text.remove_prefix(count);
  return value;
}

[[nodiscard]] inline bool take_text(std::string_view& text, std::string_view wanted) noexcept {
  if (text.substr(0, wanted.size()) != wanted) return false;
  text.remove_prefix(wanted.size());
  return true;
}

}  // namespace detail

/// Returns `step-0000001200-g00000042`: sorted by name, steps are in order.
[[nodiscard]] inline std::string folder_name(const checkpoint_id& id) {
  std::string name = "step-";
  detail::append_padded(name, id.step, 10);
  name += "-g";
  detail::append_padded(name, id.generation, 8);
  return name;
}

/// Returns the checkpoint of a folder of that name, if it is a checkpoint's name.
[[nodiscard]] inline std::optional<checkpoint_id> read_folder_name(std::string_view name) {
  std::string_view rest = name;
  if (!detail::take_text(rest, "step-")) return std::nullopt;
  const std::optional<std::uint64_t> step = detail::take_number(rest);
  if (!step || !detail::take_text(rest, "-g")) return std::nullopt;
  const std::optional<std::uint64_t> generation = detail::take_number(rest);
  if (!generation || !rest.empty()) return std::nullopt;
  const checkpoint_id id{*step, *generation};
  if (folder_name(id) != name) return std::nullopt;  // other leading zeros: not written by this library
  return id;
}

/// Returns the generation in the name of a draft or trash, so that no number is used twice.
[[nodiscard]] inline std::optional<std::uint64_t> generation_in(std::string_view name) {
  if (const auto id = read_folder_name(name)) return id->generation;
  if (!detail::take_text(name, checkpoint_names::draft) &&
      !detail::take_text(name, checkpoint_names::trash)) {
    return std::nullopt;
  }
  static_cast<void>(detail::take_text(name, "step-"));
  if (!detail::take_number(name) || !detail::take_text(name, "-g")) return std::nullopt;
  return detail::take_number(name);
}

/// Returns the generation that a reader holds, from the name of its file.
[[nodiscard]] inline std::optional<std::uint64_t> held_generation(std::string_view name) noexcept {
  if (!detail::take_text(name, checkpoint_names::hold)) return std::nullopt;
  const std::optional<std::uint64_t> generation = detail::take_number(name);
  return name.starts_with("-") ? generation : std::nullopt;
}

/// Returns whether the name is that of an entry which a crash may leave behind.
[[nodiscard]] inline bool is_left_over(std::string_view name) noexcept {
  for (const std::string_view prefix :
       {checkpoint_names::draft, checkpoint_names::trash, checkpoint_names::hint, checkpoint_names::probe,
        checkpoint_names::rendezvous}) {
    if (name.substr(0, prefix.size()) == prefix) return true;
  }
  return false;
}

}  // namespace v0
}  // namespace llmmem
