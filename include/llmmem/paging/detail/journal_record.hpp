/// @file
/// One record of a journal: an operation, its arguments and its outcome. Private to paging/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/paging/compaction.hpp>
#include <llmmem/paging/hybrid_types.hpp>
#include <llmmem/paging/journal_types.hpp>
#include <llmmem/paging/paged_types.hpp>
#include <llmmem/paging/super_page_types.hpp>
#include <llmmem/result.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Owners in a journal, where the real ones have no meaning: 0 for no object, `journal_owner` for the
/// journal's cache, `foreign_owner` for any other object. Real owners are odd, so no object has
/// `foreign_owner`.
inline constexpr std::uint32_t journal_owner = 1;
inline constexpr std::uint32_t foreign_owner = 2;

/// Whose operations a journal records: its version.
enum class journal_format : std::uint32_t { paged = journal_version, hybrid = hybrid_journal_version };

/// Whether a journal of this format records `op`.
[[nodiscard]] constexpr bool is_recorded(journal_format format, journal_op op) noexcept {
  switch (op) {
    case journal_op::match_keys:
    case journal_op::commit_keys:
    case journal_op::expect_keys:
    case journal_op::compact:
    case journal_op::pressed:
    case journal_op::relieved:
    case journal_op::outcome:
      return format == journal_format::paged;
    case journal_op::read_until:
    case journal_op::limit_releases:
    case journal_op::shortage:
    case journal_op::batch_shortage:
    case journal_op::evacuate:
      return format == journal_format::hybrid;
    default:
      return true;
  }
}

/// The arguments of an operation: the fields that its kind has, see `each_argument`.
struct journal_arguments {
  sequence_id sequence{};
  prefix_context context{};
  request_hints hints{};
  token_range range{};
  std::span<const token_id> tokens{};
  keyed_blocks keyed{};
  std::uint64_t number = 0;  // depends on the operation: tokens, blocks, bytes, a time, a group's size, a
                             // point, a digest, the length of an output
  std::uint64_t extra = 0;   // the point of a fence; the length of an output
  std::span<const paging::growth> batch{};
  std::span<const block_move> moves{};
  std::span<const std::uint64_t> leave{};  // of each group; a cache with blocks of one size has `number`
};

/// The fields of each operation's arguments, in order: the format that `record_encoder` writes and
/// `record_decoder` reads.
///
/// @param fields  has a member for each kind of field.
template <class Fields>
void each_argument(journal_op op, Fields& fields) {
  switch (op) {
    case journal_op::create:
      fields.context();
      fields.request();
      return fields.keep();
    case journal_op::fork:
    case journal_op::release:
    case journal_op::deduplicate:
      return fields.sequence();
    case journal_op::release_after:
    case journal_op::deduplicate_after:
    case journal_op::read_until:
      fields.sequence();
      return fields.extra();
    case journal_op::match:
    case journal_op::append:
    case journal_op::name_tokens:
      fields.sequence();
      return fields.tokens();
    case journal_op::limit_commits:
    case journal_op::limit_releases:
      fields.sequence();
      return fields.limit();
    case journal_op::match_keys:
    case journal_op::commit_keys:
      fields.sequence();
      return fields.keyed();
    case journal_op::extend:
    case journal_op::truncate:
    case journal_op::commit:
    case journal_op::invalidate:
      fields.sequence();
      return fields.number();
    case journal_op::remove:
      fields.sequence();
      return fields.range();
    case journal_op::remove_after:
      fields.sequence();
      fields.range();
      return fields.extra();
    case journal_op::truncate_after:
    case journal_op::shortage:
      fields.sequence();
      fields.number();
      return fields.extra();
    case journal_op::append_batch:
      fields.batch();
      fields.leave();
      return fields.extra();
    case journal_op::batch_shortage:
      fields.batch();
      return fields.extra();
    case journal_op::retain:
      fields.sequence();
      fields.range();
      return fields.keep();
    case journal_op::expect:
      fields.context();
      fields.tokens();
      return fields.limit();
    case journal_op::expect_keys:
      fields.context();
      fields.keyed();
      return fields.limit();
    case journal_op::compact:
      fields.moves();
      return fields.number();
    case journal_op::checkpoint:
      return fields.digest();
    case journal_op::pressed:
      fields.number();
      return fields.extra();
    case journal_op::advance:
    case journal_op::resize:
    case journal_op::evacuate:
    case journal_op::reset:
    case journal_op::invalidate_block:
    case journal_op::pin:
    case journal_op::unpin:
    case journal_op::fences_passed:
    case journal_op::relieved:
      return fields.number();
    case journal_op::collect:
    case journal_op::drop_idle:
    case journal_op::outcome:
      return;
  }
}

/// The outcome of an operation.
struct journal_outcome {
  failure why{};
  std::array<std::uint64_t, 5> numbers{};
  std::span<const append_result> batch{};
  std::span<const hybrid_append> grown{};  // of a `hybrid_allocator`, for a batch and for one sequence
  std::span<const group_shortage> lacks{};
};

/// Returns how many of `journal_outcome::numbers` an operation returns.
[[nodiscard]] constexpr std::size_t outcome_numbers(journal_format format, journal_op op) noexcept {
  switch (op) {
    case journal_op::create:
    case journal_op::fork:
      return 2;
    case journal_op::match:
    case journal_op::match_keys:
      return 5;
    case journal_op::append:
    case journal_op::extend:
      return format == journal_format::paged ? 5 : 0;
    case journal_op::commit:
    case journal_op::commit_keys:
    case journal_op::deduplicate:
    case journal_op::deduplicate_after:
    case journal_op::expect:
    case journal_op::expect_keys:
    case journal_op::resize:
    case journal_op::collect:
    case journal_op::drop_idle:
    case journal_op::compact:
    case journal_op::reset:
    case journal_op::invalidate_block:
    case journal_op::invalidate:
    case journal_op::remove:
    case journal_op::remove_after:
    case journal_op::shortage:
    case journal_op::batch_shortage:
    case journal_op::evacuate:
      return 1;
    default:
      return 0;
  }
}

[[nodiscard]] inline std::array<std::uint64_t, 5> numbers_of(const append_result& grown) noexcept {
  return {grown.first, grown.new_blocks, to_index(grown.copy.source), to_index(grown.copy.destination),
          grown.copy.tokens};
}
[[nodiscard]] inline journal_outcome outcome_of(const result<void>& done) noexcept {
  return {.why = done.error()};
}
[[nodiscard]] inline journal_outcome outcome_of(const result<std::uint64_t>& done) noexcept {
  return {.why = done.error(), .numbers = {*done}};
}
[[nodiscard]] inline journal_outcome outcome_of(const result<sequence_id>& done) noexcept {
  return {.why = done.error(), .numbers = {done->slot, done->generation}};
}
[[nodiscard]] inline journal_outcome outcome_of(const result<append_result>& done) noexcept {
  return {.why = done.error(), .numbers = numbers_of(*done)};
}
/// The outcome refers to `done`.
[[nodiscard]] inline journal_outcome outcome_of(const result<hybrid_append>& done) noexcept {
  return {.why = done.error(), .grown = std::span(&*done, 1)};
}
[[nodiscard]] inline journal_outcome outcome_of(const result<match_result>& done) noexcept {
  return {.why = done.error(),
          .numbers = {done->tokens, done->blocks, to_index(done->copy.source),
                      to_index(done->copy.destination), done->copy.tokens}};
}

/// Calls `put(number)` for each number of a successful outcome, in the order of the format. Lists begin with
/// their length.
template <class Put>
void each_number(journal_format format, journal_op op, const journal_outcome& came, Put&& put) {
  for (std::size_t i = 0; i < outcome_numbers(format, op); ++i)
    put(came.numbers[i]);
  const bool is_batch = op == journal_op::append_batch;
  if (format == journal_format::paged) {
    if (!is_batch) return;
    put(std::uint64_t{came.batch.size()});
    for (const append_result& each : came.batch) {
      for (const std::uint64_t number : numbers_of(each))
        put(number);
    }
    return;
  }
  if (is_batch) put(std::uint64_t{came.grown.size()});
  for (const hybrid_append& each : came.grown) {
    put(each.first);
    put(each.new_blocks);
    put(std::uint64_t{each.copies.size()});
    for (const group_copy& copy : each.copies) {
      put(std::uint64_t{copy.group});
      put(std::uint64_t{to_index(copy.copy.source)});
      put(std::uint64_t{to_index(copy.copy.destination)});
      put(std::uint64_t{copy.copy.tokens});
    }
  }
  if (op != journal_op::shortage && op != journal_op::batch_shortage) return;
  put(std::uint64_t{came.lacks.size()});
  for (const group_shortage& each : came.lacks) {
    put(each.wanted);
    put(each.available);
    put(each.pages);
  }
}

/// A bit of a record's first byte: the outcome follows later.
inline constexpr std::byte open_operation{0x80};

/// The first bytes of a journal.
inline constexpr std::string_view journal_magic = "llmmem J";

/// A record that owns the data of its spans.
struct owned_record {
  journal_op op = journal_op::create;
  bool is_open = false;                    // its outcome follows later
  journal_op closes = journal_op::create;  // of an `outcome` record: the operation that it ends
  journal_arguments given{};
  failure why{};                       // of the outcome
  std::vector<std::uint64_t> numbers;  // of the outcome

  std::vector<token_id> tokens;
  std::vector<block_key> keys;
  std::vector<access_hint> hints;
  std::vector<paging::growth> batch;
  std::vector<std::size_t> batch_tokens;  // how many of `tokens` each entry of the batch has
  std::vector<block_move> moves;
  std::vector<std::uint64_t> leave;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
