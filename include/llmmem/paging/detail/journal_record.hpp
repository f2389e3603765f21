/// @file
/// One record of a journal: an operation, its arguments and its outcome. Private to paging/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/paging/compaction.hpp>
#include <llmmem/paging/journal_types.hpp>
#include <llmmem/paging/paged_types.hpp>
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

/// The arguments of an operation: the fields that its kind has, see `each_argument`.
struct journal_arguments {
  sequence_id sequence{};
  prefix_context context{};
  request_hints hints{};
  token_range range{};
  std::span<const token_id> tokens{};
  keyed_blocks keyed{};
  std::uint64_t number = 0;  // depends on the operation: tokens, blocks, a time, a group's size, a point, a
                             // digest
  std::uint64_t extra = 0;   // the point of a fence; the length of an output
  std::span<const paging::growth> batch{};
  std::span<const block_move> moves{};
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
      fields.sequence();
      return fields.extra();
    case journal_op::match:
    case journal_op::append:
    case journal_op::name_tokens:
      fields.sequence();
      return fields.tokens();
    case journal_op::limit_commits:
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
      fields.sequence();
      fields.number();
      return fields.extra();
    case journal_op::append_batch:
      fields.batch();
      fields.number();
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
};

/// Returns how many numbers an operation returns; a batch returns the numbers of an `append` for each
/// sequence.
[[nodiscard]] constexpr std::size_t outcome_numbers(journal_op op) noexcept {
  switch (op) {
    case journal_op::create:
    case journal_op::fork:
      return 2;
    case journal_op::match:
    case journal_op::match_keys:
    case journal_op::append:
    case journal_op::extend:
      return 5;
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
[[nodiscard]] inline journal_outcome outcome_of(const result<match_result>& done) noexcept {
  return {.why = done.error(),
          .numbers = {done->tokens, done->blocks, to_index(done->copy.source),
                      to_index(done->copy.destination), done->copy.tokens}};
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
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
