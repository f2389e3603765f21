/// @file
/// Decodes a journal's header and records from untrusted bytes. Private to paging/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/numbered_errors.hpp>
#include <llmmem/errors.hpp>
#include <llmmem/paging/compaction.hpp>
#include <llmmem/paging/detail/journal_codec.hpp>
#include <llmmem/paging/detail/journal_record.hpp>
#include <llmmem/paging/errors.hpp>
#include <llmmem/paging/hybrid_types.hpp>
#include <llmmem/paging/journal_types.hpp>
#include <llmmem/paging/paged_types.hpp>
#include <llmmem/space/errors.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Refuses a version other than that of `format`.
inline void check_version(byte_cursor& in, std::uint32_t version, journal_format format) noexcept {
  if (!in.ok() || version == static_cast<std::uint32_t>(format)) return;
  if (version == journal_version)
    return in.refuse("it records a paged_allocator, not a hybrid_allocator; build the cache that it records");
  if (version == hybrid_journal_version)
    return in.refuse("it records a hybrid_allocator, not a paged_allocator; build the cache that it records");
  in.refuse("an unknown version of the format");
}

/// Checks the version before anything after it.
inline void decode_header(byte_cursor& in, journal_header& out) {
  out.version = in.narrow();
  check_version(in, out.version, journal_format::paged);
  if (!in.ok()) return;
  out.options.blocks = in.varint();
  out.options.block_capacity = in.varint();
  out.options.block_tokens = in.narrow();
  out.options.max_sequences = in.narrow();
  out.options.max_sequence_tokens = in.limit();
  out.options.max_idle_blocks = in.limit();
  out.options.max_deferred = in.limit();
  out.options.pressure.low = in.varint();
  out.options.seed.low = in.fixed64();
  out.options.seed.high = in.fixed64();
  out.options.epoch = in.varint();
  out.options.name = in.text();
  out.configuration = in.text();
  if (in.ok() && in.left() != 0) in.refuse("bytes are left over");
}

inline void decode_header(byte_cursor& in, paging::hybrid_journal_header& out) {
  out.version = in.narrow();
  check_version(in, out.version, journal_format::hybrid);
  const std::size_t groups = in.count(7);
  if (groups == 0 || groups > max_layer_groups) in.refuse("a number of groups that no cache has");
  for (std::size_t g = 0; g < groups && in.ok(); ++g) {
    out.names.push_back(in.text());
    layer_group each;
    const std::uint8_t kind = in.byte();
    if (kind > static_cast<std::uint8_t>(layer_kind::state_snapshots)) in.refuse("an unknown kind of layers");
    each.kind = static_cast<layer_kind>(kind);
    const std::uint8_t writes = in.byte();
    if (writes > static_cast<std::uint8_t>(snapshot_times::end_of_step)) in.refuse("unknown snapshot times");
    each.writes = static_cast<snapshot_times>(writes);
    each.reach = in.varint();
    each.sinks = in.varint();
    each.block_tokens = in.narrow();
    each.block_bytes = in.varint();
    out.groups.push_back(each);
  }
  out.options.budget_bytes = in.varint();
  out.options.budget_capacity_bytes = in.varint();
  out.options.page_bytes = in.varint();
  out.options.max_sequences = in.narrow();
  out.options.max_sequence_tokens = in.limit();
  out.options.max_chunks = in.varint();
  out.options.max_deferred = in.limit();
  out.options.seed.low = in.fixed64();
  out.options.seed.high = in.fixed64();
  out.options.epoch = in.varint();
  out.options.name = in.text();
  out.configuration = in.text();
  out.bind();
  if (in.ok() && in.left() != 0) in.refuse("bytes are left over");
}

/// Reads one record's payload. It terminates for any bytes, and allocates at most a small multiple of their
/// size.
class record_decoder {
 public:
  record_decoder(byte_cursor& in, owned_record& out, journal_format format) noexcept
      : in_(&in), out_(&out), format_(format) {}

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
    to.leave.clear();
    const std::uint8_t first = in_->byte();
    to.is_open = (first & std::to_integer<std::uint8_t>(open_operation)) != 0;
    // Only a pressure callback interrupts operations.
    if (to.is_open && format_ == journal_format::hybrid) in_->refuse("an unknown operation");
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
    const auto op = static_cast<journal_op>(number);
    if (number == 0 || number > static_cast<std::uint8_t>(last_journal_op) || !is_recorded(format_, op))
      in_->refuse("an unknown operation");
    return op;
  }

  /// Reads the fields of one operation's arguments.
  struct argument_reader {
    record_decoder& from;
    journal_arguments& given;

    void sequence() noexcept { given.sequence = from.handle(); }
    void context() noexcept { given.context = from.context(); }
    void request() noexcept {
      given.hints.session = from.in_->varint();
      given.hints.cost = std::bit_cast<float>(from.in_->fixed32());
    }
    void keep() noexcept { given.hints.keep = from.keep(); }
    void range() noexcept {
      given.range.first = from.in_->varint();
      given.range.end = from.in_->limit();
    }
    void tokens() { from.tokens(); }
    void keyed() { from.keyed(); }
    void number() noexcept { given.number = from.in_->varint(); }
    void limit() noexcept { given.number = from.in_->limit(); }
    void digest() noexcept { given.number = from.in_->fixed64(); }
    void extra() noexcept { given.extra = from.in_->varint(); }
    void batch() {
      for (std::size_t left = from.in_->count(3); left > 0 && from.in_->ok(); --left) {
        paging::growth each{.sequence = from.handle()};
        from.out_->batch_tokens.push_back(from.tokens());
        each.unknown_tokens = from.in_->varint();
        from.out_->batch.push_back(each);
      }
    }
    void leave() {
      if (from.format_ == journal_format::paged) return number();
      for (std::size_t left = from.in_->count(1); left > 0 && from.in_->ok(); --left)
        from.out_->leave.push_back(from.in_->varint());
    }
    void moves() {
      for (std::size_t left = from.in_->count(2); left > 0 && from.in_->ok(); --left) {
        const block_id source{from.in_->narrow()};
        from.out_->moves.push_back({source, block_id{from.in_->narrow()}});
      }
    }
  };

  void arguments() {
    argument_reader fields{*this, out_->given};
    each_argument(out_->op, fields);
  }

  void outcome() {
    const std::uint8_t code = in_->byte();
    if (code > last_error_number) return in_->refuse("an unknown outcome");
    out_->why.code = code_numbered(code, ground_errors, space_errors, paging_errors);
    if (out_->why.code != errc::ok) {
      out_->why.index = in_->narrow();
      out_->why.wanted = in_->varint();
      out_->why.found = in_->varint();
      return;
    }
    numbers(outcome_numbers(format_, out_->closes));
    const bool is_batch = out_->closes == journal_op::append_batch;
    if (format_ == journal_format::paged) {
      if (is_batch) list(5, 0);
    } else if (is_batch) {
      for (std::size_t left = length(3); left > 0 && in_->ok(); --left)
        list(4, 2);
    } else if (out_->closes == journal_op::append || out_->closes == journal_op::extend) {
      list(4, 2);
    } else if (out_->closes == journal_op::shortage || out_->closes == journal_op::batch_shortage) {
      list(3, 0);
    }
  }

  void numbers(std::size_t count) {
    for (; count > 0 && in_->ok(); --count)
      out_->numbers.push_back(in_->varint());
  }
  /// Reads the length of a list of items of at least `bytes` bytes.
  std::size_t length(std::size_t bytes) {
    const std::size_t items = in_->count(bytes);
    out_->numbers.push_back(items);
    return items;
  }
  /// Reads `before` numbers, then a list of items of `each` numbers.
  void list(std::size_t each, std::size_t before) {
    numbers(before);
    numbers(each * length(each));
  }

  void bind() noexcept {
    journal_arguments& given = out_->given;
    given.keyed.keys = out_->keys;
    given.keyed.hints = out_->hints;
    given.moves = out_->moves;
    given.leave = out_->leave;
    std::span<const token_id> rest = out_->tokens;
    if (out_->op != journal_op::append_batch && out_->op != journal_op::batch_shortage) given.tokens = rest;
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
  journal_format format_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
