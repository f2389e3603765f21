/// @file
/// Encodes a journal's header and records as bytes. Private to paging/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/paging/compaction.hpp>
#include <llmmem/paging/detail/journal_codec.hpp>
#include <llmmem/paging/detail/journal_record.hpp>
#include <llmmem/paging/hybrid_types.hpp>
#include <llmmem/paging/journal_types.hpp>
#include <llmmem/paging/layer_group.hpp>
#include <llmmem/paging/paged_types.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace llmmem {
inline namespace v0 {
namespace detail {

template <class Writer>
void encode_header(Writer& out, const paged_options& options, std::string_view configuration) noexcept {
  put_varint(out, journal_version);
  put_varint(out, options.blocks);
  put_varint(out, options.block_capacity);
  put_varint(out, options.block_tokens);
  put_varint(out, options.max_sequences);
  put_limit(out, options.max_sequence_tokens);
  put_limit(out, options.max_idle_blocks);
  put_limit(out, options.max_deferred);
  put_varint(out, options.pressure.low);
  put_fixed64(out, options.seed.low);
  put_fixed64(out, options.seed.high);
  put_varint(out, options.epoch);
  put_text(out, options.name);
  put_text(out, configuration);
}

template <class Writer>
void encode_header(Writer& out, const hybrid_options& options, std::string_view configuration) noexcept {
  put_varint(out, hybrid_journal_version);
  put_varint(out, options.groups.size());
  for (const layer_group& each : options.groups) {
    put_text(out, each.name);
    out.put(static_cast<std::byte>(each.kind));
    out.put(static_cast<std::byte>(each.writes));
    put_varint(out, each.reach);
    put_varint(out, each.sinks);
    put_varint(out, each.block_tokens);
    put_varint(out, each.block_bytes);
  }
  put_varint(out, options.budget_bytes);
  put_varint(out, options.budget_capacity_bytes);
  put_varint(out, options.page_bytes);
  put_varint(out, options.max_sequences);
  put_limit(out, options.max_sequence_tokens);
  put_varint(out, options.max_chunks);
  put_limit(out, options.max_deferred);
  put_fixed64(out, options.seed.low);
  put_fixed64(out, options.seed.high);
  put_varint(out, options.epoch);
  put_text(out, options.name);
  put_text(out, configuration);
}

/// Writes records' payloads.
template <class Writer>
class record_encoder {
 public:
  /// @param owner  the owner of the journal's own handles.
  record_encoder(Writer& out, std::uint32_t owner, journal_format format) noexcept
      : out_(&out), owner_(owner), format_(format) {}

  /// Writes an operation that is complete.
  void record(journal_op op, const journal_arguments& given, const journal_outcome& came) noexcept {
    out_->put(static_cast<std::byte>(op));
    arguments(op, given);
    outcome(op, came);
  }
  /// Writes an operation that is interrupted; `close` follows later.
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
  /// Writes the fields of one operation's arguments.
  struct argument_writer {
    record_encoder& to;
    const journal_arguments& given;

    void sequence() noexcept { to.handle(given.sequence); }
    void context() noexcept { to.context(given.context); }
    void request() noexcept {
      put_varint(*to.out_, given.hints.session);
      put_fixed32(*to.out_, std::bit_cast<std::uint32_t>(given.hints.cost));
    }
    void keep() noexcept { to.keep(given.hints.keep); }
    void range() noexcept {
      put_varint(*to.out_, given.range.first);
      put_limit(*to.out_, given.range.end);
    }
    void tokens() noexcept { to.tokens(given.tokens); }
    void keyed() noexcept { to.keyed(given.keyed); }
    void number() noexcept { put_varint(*to.out_, given.number); }
    void limit() noexcept { put_limit(*to.out_, given.number); }
    void digest() noexcept { put_fixed64(*to.out_, given.number); }
    void extra() noexcept { put_varint(*to.out_, given.extra); }
    void batch() noexcept {
      put_varint(*to.out_, given.batch.size());
      for (const paging::growth& each : given.batch) {
        to.handle(each.sequence);
        to.tokens(each.tokens);
        put_varint(*to.out_, each.unknown_tokens);
      }
    }
    void leave() noexcept {
      if (to.format_ == journal_format::paged) return number();
      put_varint(*to.out_, given.leave.size());
      for (const std::uint64_t each : given.leave)
        put_varint(*to.out_, each);
    }
    void moves() noexcept {
      put_varint(*to.out_, given.moves.size());
      for (const block_move& each : given.moves) {
        put_varint(*to.out_, to_index(each.source));
        put_varint(*to.out_, to_index(each.destination));
      }
    }
  };

  void arguments(journal_op op, const journal_arguments& given) noexcept {
    argument_writer fields{*this, given};
    each_argument(op, fields);
  }

  void outcome(journal_op op, const journal_outcome& came) noexcept {
    out_->put(std::byte{came.why.code.number()});
    if (came.why.code != errc::ok) {
      for (const std::uint64_t each : {std::uint64_t{came.why.index}, came.why.wanted, came.why.found})
        put_varint(*out_, each);
      return;
    }
    each_number(format_, op, came, [this](std::uint64_t number) noexcept { put_varint(*out_, number); });
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
  journal_format format_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
