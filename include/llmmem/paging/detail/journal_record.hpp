/// @file
/// One record of a journal: an operation, what it was given and what came of it, to bytes and back. Private
/// to paging/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/paging/compaction.hpp>
#include <llmmem/paging/detail/journal_codec.hpp>
#include <llmmem/paging/journal_types.hpp>
#include <llmmem/paging/paged_types.hpp>
#include <llmmem/result.hpp>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace llmmem::inline v0::detail {

/// Owners in a journal, where the real one means nothing: of no object, of the journal's cache, of another.
/// Real ones are odd, so `foreign_owner` is nobody's.
inline constexpr std::uint32_t journal_owner = 1;
inline constexpr std::uint32_t foreign_owner = 2;

/// What an operation was given: the fields that its kind has, see `each_argument`.
struct journal_arguments {
  sequence_id sequence{};
  prefix_context context{};
  request_hints hints{};
  token_range range{};
  std::span<const token_id> tokens{};
  keyed_blocks keyed{};
  std::uint64_t number = 0;  // tokens, blocks, a time, a group's size, a point, a digest: by operation
  std::uint64_t extra = 0;   // the point of a fence; the length of an output
  std::span<const growth> batch{};
  std::span<const block_move> moves{};
};

/// What came of it.
struct journal_outcome {
  failure why{};
  std::array<std::uint64_t, 5> numbers{};
  std::span<const append_result> batch{};
};

/// How many numbers an operation returns; a batch's are those of an `append` for each sequence.
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

/// In the first byte of a record: its outcome comes later.
inline constexpr std::byte open_operation{0x80};

/// What a journal begins with.
inline constexpr std::string_view journal_magic = "llmmem J";

template <class Writer>
void encode_header(Writer& out, const paged_options& options, std::string_view configuration) noexcept {
  put_varint(out, journal_version);
  put_varint(out, options.blocks);
  put_varint(out, options.most_blocks);
  put_varint(out, options.block_tokens);
  put_varint(out, options.max_sequences);
  put_limit(out, options.max_sequence_tokens);
  put_limit(out, options.max_idle_blocks);
  put_limit(out, options.max_deferred);
  put_varint(out, options.pressure.low);
  put_fixed64(out, options.seed.low);
  put_fixed64(out, options.seed.high);
  put_text(out, options.name);
  put_text(out, configuration);
}

/// The version is looked at before anything behind it.
inline void decode_header(byte_cursor& in, journal_header& out) {
  out.version = in.narrow();
  if (!in.ok()) return;
  if (out.version != journal_version) return in.refuse("a version of the format that is not known");
  out.options.blocks = in.varint();
  out.options.most_blocks = in.varint();
  out.options.block_tokens = in.narrow();
  out.options.max_sequences = in.narrow();
  out.options.max_sequence_tokens = in.limit();
  out.options.max_idle_blocks = in.limit();
  out.options.max_deferred = in.limit();
  out.options.pressure.low = in.varint();
  out.options.seed.low = in.fixed64();
  out.options.seed.high = in.fixed64();
  out.options.name = in.text();
  out.configuration = in.text();
  if (in.ok() && in.left() != 0) in.refuse("bytes are left over");
}

// Writing

template <class Writer>
class record_encoder {
 public:
  /// @param owner  of the journal's own handles.
  record_encoder(Writer& out, std::uint32_t owner) noexcept : out_(&out), owner_(owner) {}

  /// An operation that is over.
  void record(journal_op op, const journal_arguments& given, const journal_outcome& came) noexcept {
    out_->put(static_cast<std::byte>(op));
    arguments(op, given);
    outcome(op, came);
  }
  /// One that is interrupted; `close` comes later.
  void open(journal_op op, const journal_arguments& given) noexcept {
    out_->put(static_cast<std::byte>(op) | open_operation);
    arguments(op, given);
  }
  void close(journal_op op, const journal_outcome& came) noexcept {
    out_->put(std::byte{static_cast<std::uint8_t>(journal_op::outcome)});
    out_->put(static_cast<std::byte>(op));
    outcome(op, came);
  }

 private:
  void arguments(journal_op op, const journal_arguments& given) noexcept {
    switch (op) {
      case journal_op::create:
        context(given.context);
        put_varint(*out_, given.hints.session);
        put_fixed32(*out_, std::bit_cast<std::uint32_t>(given.hints.cost));
        keep(given.hints.keep);
        return;
      case journal_op::fork:
      case journal_op::release:
      case journal_op::deduplicate:
        return handle(given.sequence);
      case journal_op::release_after:
      case journal_op::deduplicate_after:
        handle(given.sequence);
        return put_varint(*out_, given.extra);
      case journal_op::match:
      case journal_op::append:
        handle(given.sequence);
        return tokens(given.tokens);
      case journal_op::match_keys:
      case journal_op::commit_keys:
        handle(given.sequence);
        return keyed(given.keyed);
      case journal_op::extend:
      case journal_op::truncate:
      case journal_op::commit:
        handle(given.sequence);
        return put_varint(*out_, given.number);
      case journal_op::truncate_after:
        handle(given.sequence);
        put_varint(*out_, given.number);
        return put_varint(*out_, given.extra);
      case journal_op::append_batch:
        put_varint(*out_, given.batch.size());
        for (const growth& each : given.batch) {
          handle(each.sequence);
          tokens(each.tokens);
          put_varint(*out_, each.untold);
        }
        put_varint(*out_, given.number);
        return put_varint(*out_, given.extra);
      case journal_op::retain:
        handle(given.sequence);
        put_varint(*out_, given.range.first);
        put_limit(*out_, given.range.end);
        return keep(given.hints.keep);
      case journal_op::expect:
        context(given.context);
        tokens(given.tokens);
        return put_limit(*out_, given.number);
      case journal_op::expect_keys:
        context(given.context);
        keyed(given.keyed);
        return put_limit(*out_, given.number);
      case journal_op::compact:
        put_varint(*out_, given.moves.size());
        for (const block_move& each : given.moves) {
          put_varint(*out_, to_index(each.source));
          put_varint(*out_, to_index(each.destination));
        }
        return put_varint(*out_, given.number);
      case journal_op::checkpoint:
        return put_fixed64(*out_, given.number);
      case journal_op::pressed:
        put_varint(*out_, given.number);
        return put_varint(*out_, given.extra);
      case journal_op::advance:
      case journal_op::resize:
      case journal_op::fences_passed:
      case journal_op::relieved:
        return put_varint(*out_, given.number);
      case journal_op::collect:
      case journal_op::drop_idle:
      case journal_op::outcome:
        return;
    }
  }

  void outcome(journal_op op, const journal_outcome& came) noexcept {
    out_->put(static_cast<std::byte>(came.why.code));
    if (came.why.code != errc::ok) {
      for (const std::uint64_t each : {std::uint64_t{came.why.index}, came.why.wanted, came.why.found})
        put_varint(*out_, each);
      return;
    }
    for (std::size_t i = 0; i < outcome_numbers(op); ++i)
      put_varint(*out_, came.numbers[i]);
    if (op != journal_op::append_batch) return;
    put_varint(*out_, came.batch.size());
    for (const append_result& grown : came.batch) {
      for (const std::uint64_t each : numbers_of(grown))
        put_varint(*out_, each);
    }
  }

  void handle(sequence_id named) noexcept {
    if (named == sequence_id{}) return out_->put(std::byte{0});
    out_->put(named.owner == owner_ ? std::byte{journal_owner} : std::byte{foreign_owner});
    put_varint(*out_, named.slot);
    put_varint(*out_, named.generation);
  }
  void context(const prefix_context& of) noexcept {
    const bool is_plain = of == prefix_context{};
    out_->put(is_plain ? std::byte{0} : std::byte{1});
    if (is_plain) return;
    for (const std::uint64_t each : {of.salt[0], of.salt[1], of.extra_keys[0], of.extra_keys[1]})
      put_fixed64(*out_, each);
  }
  void keep(const retention& worth) noexcept {
    out_->put(std::byte{worth.priority});
    put_limit(*out_, worth.until);
  }
  void tokens(std::span<const token_id> all) noexcept {
    put_varint(*out_, all.size());
    for (const token_id each : all)
      put_signed(*out_, each);
  }
  void keyed(const keyed_blocks& blocks) noexcept {
    put_varint(*out_, blocks.tokens);
    put_varint(*out_, blocks.keys.size());
    for (const block_key& each : blocks.keys) {
      put_fixed64(*out_, each.low);
      put_fixed64(*out_, each.high);
    }
    put_varint(*out_, blocks.hints.size());
    for (const access_hint& each : blocks.hints) {
      put_limit(*out_, each.next_use);
      put_varint(*out_, each.session);
      put_fixed32(*out_, std::bit_cast<std::uint32_t>(each.cost));
      keep(each.keep);
    }
  }

  Writer* out_;
  std::uint32_t owner_;
};

// Reading

/// A record that owns what its spans name.
struct owned_record {
  journal_op op = journal_op::create;
  bool is_open = false;                    // its outcome comes later
  journal_op closes = journal_op::create;  // outcome: of which operation
  journal_arguments given{};
  failure why{};                       // of the outcome
  std::vector<std::uint64_t> numbers;  // of the outcome

  std::vector<token_id> tokens;
  std::vector<block_key> keys;
  std::vector<access_hint> hints;
  std::vector<growth> batch;
  std::vector<std::size_t> batch_tokens;  // how many of `tokens` each of the batch has
  std::vector<block_move> moves;
};

/// Reads one record's payload. Whatever the bytes are, it ends, and allocates no more than a small multiple
/// of them.
class record_decoder {
 public:
  record_decoder(byte_cursor& in, owned_record& out) noexcept : in_(&in), out_(&out) {}

  void record() {
    owned_record& to = *out_;
    to.given = {};
    to.why = {};
    to.numbers.clear();
    to.tokens.clear();
    to.keys.clear();
    to.hints.clear();
    to.batch.clear();
    to.batch_tokens.clear();
    to.moves.clear();
    const std::uint8_t first = in_->byte();
    to.is_open = (first & std::to_integer<std::uint8_t>(open_operation)) != 0;
    to.op = operation(first & 0x7F);
    to.closes = to.op == journal_op::outcome ? operation(in_->byte()) : to.op;
    if (!in_->ok()) return;
    arguments();
    if (!to.is_open) outcome();
    if (in_->ok() && in_->left() != 0) in_->refuse("bytes are left over");
    if (in_->ok()) bind();
  }

 private:
  [[nodiscard]] journal_op operation(std::uint8_t number) noexcept {
    if (number == 0 || number > static_cast<std::uint8_t>(last_journal_op))
      in_->refuse("an unknown operation");
    return static_cast<journal_op>(number);
  }

  void arguments() {
    journal_arguments& given = out_->given;
    switch (out_->op) {
      case journal_op::create:
        given.context = context();
        given.hints.session = in_->varint();
        given.hints.cost = std::bit_cast<float>(in_->fixed32());
        given.hints.keep = keep();
        return;
      case journal_op::fork:
      case journal_op::release:
      case journal_op::deduplicate:
        given.sequence = handle();
        return;
      case journal_op::release_after:
      case journal_op::deduplicate_after:
        given.sequence = handle();
        given.extra = in_->varint();
        return;
      case journal_op::match:
      case journal_op::append:
        given.sequence = handle();
        tokens();
        return;
      case journal_op::match_keys:
      case journal_op::commit_keys:
        given.sequence = handle();
        keyed();
        return;
      case journal_op::extend:
      case journal_op::truncate:
      case journal_op::commit:
        given.sequence = handle();
        given.number = in_->varint();
        return;
      case journal_op::truncate_after:
        given.sequence = handle();
        given.number = in_->varint();
        given.extra = in_->varint();
        return;
      case journal_op::append_batch:
        for (std::size_t left = in_->count(3); left > 0 && in_->ok(); --left) {
          growth each{.sequence = handle()};
          out_->batch_tokens.push_back(tokens());
          each.untold = in_->varint();
          out_->batch.push_back(each);
        }
        given.number = in_->varint();
        given.extra = in_->varint();
        return;
      case journal_op::retain:
        given.sequence = handle();
        given.range.first = in_->varint();
        given.range.end = in_->limit();
        given.hints.keep = keep();
        return;
      case journal_op::expect:
        given.context = context();
        tokens();
        given.number = in_->limit();
        return;
      case journal_op::expect_keys:
        given.context = context();
        keyed();
        given.number = in_->limit();
        return;
      case journal_op::compact:
        for (std::size_t left = in_->count(2); left > 0 && in_->ok(); --left) {
          const block_id source{in_->narrow()};
          out_->moves.push_back({source, block_id{in_->narrow()}});
        }
        given.number = in_->varint();
        return;
      case journal_op::checkpoint:
        given.number = in_->fixed64();
        return;
      case journal_op::pressed:
        given.number = in_->varint();
        given.extra = in_->varint();
        return;
      case journal_op::advance:
      case journal_op::resize:
      case journal_op::fences_passed:
      case journal_op::relieved:
        given.number = in_->varint();
        return;
      case journal_op::collect:
      case journal_op::drop_idle:
      case journal_op::outcome:
        return;
    }
  }

  void outcome() {
    const std::uint8_t code = in_->byte();
    if (code > static_cast<std::uint8_t>(errc::map_refused)) return in_->refuse("an unknown outcome");
    out_->why.code = static_cast<errc>(code);
    if (out_->why.code != errc::ok) {
      out_->why.index = in_->narrow();
      out_->why.wanted = in_->varint();
      out_->why.found = in_->varint();
      return;
    }
    std::size_t count = outcome_numbers(out_->closes);
    if (out_->closes == journal_op::append_batch) count = 5 * in_->count(5);
    for (; count > 0 && in_->ok(); --count)
      out_->numbers.push_back(in_->varint());
  }

  void bind() noexcept {
    journal_arguments& given = out_->given;
    given.keyed.keys = out_->keys;
    given.keyed.hints = out_->hints;
    given.moves = out_->moves;
    std::span<const token_id> rest = out_->tokens;
    if (out_->op != journal_op::append_batch) given.tokens = rest;
    for (std::size_t i = 0; i < out_->batch.size(); ++i) {
      out_->batch[i].tokens = rest.first(out_->batch_tokens[i]);
      rest = rest.subspan(out_->batch_tokens[i]);
    }
    given.batch = out_->batch;
  }

  [[nodiscard]] sequence_id handle() noexcept {
    const std::uint8_t owner = in_->byte();
    if (owner == 0) return {};
    if (owner > foreign_owner) in_->refuse("an unknown kind of handle");
    const std::uint32_t slot = in_->narrow();
    return {slot, in_->narrow(), owner};
  }
  [[nodiscard]] prefix_context context() noexcept {
    prefix_context of;
    const std::uint8_t is_told = in_->byte();
    if (is_told > 1) in_->refuse("an unknown kind of context");
    if (is_told != 1) return of;
    for (std::uint64_t* const each : {&of.salt[0], &of.salt[1], &of.extra_keys[0], &of.extra_keys[1]})
      *each = in_->fixed64();
    return of;
  }
  [[nodiscard]] retention keep() noexcept {
    retention worth;
    worth.priority = in_->byte();
    worth.until = in_->limit();
    return worth;
  }
  std::size_t tokens() {
    const std::size_t count = in_->count(1);
    for (std::size_t i = 0; i < count && in_->ok(); ++i)
      out_->tokens.push_back(in_->signed32());
    return count;
  }
  void keyed() {
    out_->given.keyed.tokens = in_->varint();
    for (std::size_t left = in_->count(16); left > 0 && in_->ok(); --left) {
      const std::uint64_t low = in_->fixed64();
      out_->keys.push_back({.low = low, .high = in_->fixed64()});
    }
    for (std::size_t left = in_->count(8); left > 0 && in_->ok(); --left) {
      access_hint hint;
      hint.next_use = in_->limit();
      hint.session = in_->varint();
      hint.cost = std::bit_cast<float>(in_->fixed32());
      hint.keep = keep();
      out_->hints.push_back(hint);
    }
  }

  byte_cursor* in_;
  owned_record* out_;
};

}  // namespace llmmem::inline v0::detail
