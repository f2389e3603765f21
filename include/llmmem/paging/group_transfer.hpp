/// @file
/// Transfers a sequence of a `hybrid_allocator` as bytes, all groups of layers together, from one cache or
/// process to another.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/paging/errors.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/paging/kv_transfer.hpp>
#include <llmmem/paging/layer_group.hpp>
#include <llmmem/paging/paged_types.hpp>
#include <llmmem/result.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>

namespace llmmem {
inline namespace v0 {

/// A cache with groups of layers and the memory behind its pages, as `export_sequence` and `import_sequence`
/// read and write it.
struct group_memory {
  std::span<std::byte> bytes{};  ///< at least `pool().max_physical_bytes()`, from the null page on
  /// Identifies what the bytes of blocks mean: model, element types, order inside a block. The same on both
  /// sides.
  std::uint64_t contents = 0;
};

namespace detail {

/// The geometry of one group in a stream.
struct group_stream_record {
  std::uint32_t kind = 0;
  std::uint32_t writes = 0;
  std::uint64_t reach = 0;
  std::uint64_t sinks = 0;
  std::uint64_t block_tokens = 0;
  std::uint64_t block_bytes = 0;

  friend constexpr bool operator==(const group_stream_record&, const group_stream_record&) noexcept = default;
};

[[nodiscard]] constexpr group_stream_record stream_record(const layer_group& of) noexcept {
  return {.kind = static_cast<std::uint32_t>(of.kind),
          .writes = static_cast<std::uint32_t>(of.writes),
          .reach = of.reach,
          .sinks = of.sinks,
          .block_tokens = of.block_tokens,
          .block_bytes = of.block_bytes};
}

/// The head of a stream. After it: in version 2 the first token that is sent, the record of each group, token
/// ids, the digest of all this, then the blocks group by group, each with its own digest. Version 1 sends
/// from token 0.
struct group_stream_header {
  static constexpr std::array<char, 8> right_magic{'l', 'l', 'm', 'm', 'e', 'm', 'k', 'g'};
  static constexpr std::uint32_t newest_version = 2;

  std::array<char, 8> magic = right_magic;
  std::uint32_t version = 1;
  std::uint32_t groups = 0;
  std::uint64_t contents = 0;
  std::uint64_t tokens = 0;
  std::uint64_t epoch = 0;
  prefix_context context{};
};

static_assert(sizeof(group_stream_header) == 40 + 32 && std::is_trivially_copyable_v<group_stream_header>);
static_assert(sizeof(group_stream_record) == 40 && std::is_trivially_copyable_v<group_stream_record>);

[[nodiscard]] inline block_key digest_of_head(const group_stream_header& header, std::uint64_t first_token,
                                              std::span<const group_stream_record> groups,
                                              std::span<const token_id> tokens) noexcept {
  block_key out = digest_of(std::as_bytes(tokens), header_digest);
  if (header.version != 1) out = digest_of(bytes_of_object(first_token), {.low = out.low, .high = out.high});
  out = digest_of(std::as_bytes(groups), {.low = out.low, .high = out.high});
  return digest_of(bytes_of_object(header), {.low = out.low, .high = out.high});
}

/// Names the first field in which a group differs. Allocates.
[[nodiscard]] inline failure group_differs(const std::string& who, std::size_t group,
                                           const group_stream_record& theirs,
                                           const group_stream_record& ours) {
  const auto differs = [&](const char* field, std::uint64_t there, std::uint64_t here) {
    return failure{errc::layout_mismatch, 1, there, here,
                   who + ": group " + std::to_string(group) + ": " + field};
  };
  if (theirs.kind != ours.kind) return differs("kind", theirs.kind, ours.kind);
  if (theirs.writes != ours.writes) return differs("writes", theirs.writes, ours.writes);
  if (theirs.reach != ours.reach) return differs("reach", theirs.reach, ours.reach);
  if (theirs.sinks != ours.sinks) return differs("sinks", theirs.sinks, ours.sinks);
  if (theirs.block_tokens != ours.block_tokens)
    return differs("block_tokens", theirs.block_tokens, ours.block_tokens);
  return differs("block_bytes", theirs.block_bytes, ours.block_bytes);
}

/// Whether the token after `tokens` tokens reads block number `block` of a group.
[[nodiscard]] constexpr bool is_read(const layer_group& of, std::uint64_t tokens,
                                     std::uint64_t block) noexcept {
  return block < of.sink_blocks() || block >= of.dead_blocks(tokens);
}

/// Whether block number `block` ends at or before `token`: the blocks that a hit of so many tokens holds, if
/// they are read.
[[nodiscard]] constexpr bool ends_by(const layer_group& of, std::uint64_t token,
                                     std::uint64_t block) noexcept {
  return block < token / of.block_tokens;
}

/// The blocks that a stream omits, although the token after `tokens` tokens reads them, and how many of these
/// a hit of `reused` tokens holds.
struct omitted_blocks {
  std::uint64_t needed = 0;
  std::uint64_t found = 0;
};
[[nodiscard]] constexpr omitted_blocks count_omitted(std::span<const layer_group> groups,
                                                     std::uint64_t tokens, std::uint64_t first_token,
                                                     std::uint64_t reused) noexcept {
  omitted_blocks out;
  for (const layer_group& of : groups) {
    for (std::uint64_t i = 0; ends_by(of, first_token, i); ++i) {
      if (!is_read(of, tokens, i)) continue;
      ++out.needed;
      out.found += ends_by(of, reused, i) ? 1U : 0U;
    }
  }
  return out;
}

}  // namespace detail

/// Writes what the next token of a sequence reads, in every group, to `sink`: all blocks of full attention,
/// the live blocks of windows and chunks, the last state. The importer caches that state only if it is the
/// one at the end of a block; other lengths are hits there only if it has their states already.
///
/// The stream is little-endian: magic, version, identity of the contents, the geometry of each group, token
/// ids, context and epoch, then the blocks as they are in memory. The head and each block carry a 128-bit
/// SipHash digest; a block's digest depends on the head and on the block's position. The stream contains no
/// block ids and no page size, so a cache of any size can import it.
///
/// @param tokens  all tokens of the sequence; their KV and states must be written.
/// @param first_token  blocks that end at or before this token are not sent, because the importer has them
///   cached: what `cached_tokens` of its cache returned. It is then on the importer that they stay cached.
/// @return bytes written. `errc::size_mismatch` if the number of `tokens` differs from the sequence's,
///   `errc::past_the_end` for a `first_token` after its end, `errc::not_a_prefix` if some of its contents
///   were invalidated or tokens removed, `errc::no_such_block` for a memory smaller than the pool,
///   `errc::stopped` when the sink returns false, and the errors of `check`.
/// @par Waits   only for the sink; the sequence must not change meanwhile. Allocates nothing.
template <class Cache, byte_sink Sink>
  requires requires(const Cache& cache) { cache.groups(); }
result<std::uint64_t> export_sequence(const Cache& cache, sequence_id sequence,
                                      std::span<const token_id> tokens, const group_memory& memory,
                                      Sink&& sink, std::uint64_t first_token = 0) {
  const char* const who = cache.name().c_str();
  if (const auto alive = cache.check(sequence); !alive) return alive.error();
  const std::uint64_t held = cache.tokens(sequence);
  if (tokens.size() != held) return failure{errc::size_mismatch, sequence.slot, tokens.size(), held, who};
  if (first_token > held) return failure{errc::past_the_end, sequence.slot, first_token, held, who};
  if (cache.prefix_tokens(sequence) != held)
    return failure{errc::not_a_prefix, sequence.slot, held, cache.prefix_tokens(sequence), who};
  if (memory.bytes.size() < cache.pool().max_physical_bytes()) {
    const std::uint64_t blocks = memory.bytes.size() / cache.layout().page_bytes << cache.layout().shift;
    return failure{errc::no_such_block, 0, cache.pool().block_ids() - 1, blocks, who};
  }
  const std::span<const layer_group> groups = cache.groups();
  const detail::group_stream_header header{.version = first_token == 0 ? 1U : 2U,
                                           .groups = static_cast<std::uint32_t>(groups.size()),
                                           .contents = memory.contents,
                                           .tokens = held,
                                           .epoch = cache.epoch(sequence),
                                           .context = cache.context(sequence)};
  std::array<detail::group_stream_record, max_layer_groups> records{};
  for (std::size_t g = 0; g < groups.size(); ++g)
    records[g] = detail::stream_record(groups[g]);
  const auto described = std::span<const detail::group_stream_record>(records).first(groups.size());
  const block_key digest = detail::digest_of_head(header, first_token, described, tokens);
  std::uint64_t written = 0;
  const auto send = [&](std::span<const std::byte> bytes) noexcept {
    written += bytes.size();
    return static_cast<bool>(sink(bytes));
  };
  const failure stopped{errc::stopped, 0, 0, 0, who};
  if (!send(detail::bytes_of_object(header))) return stopped;
  if (header.version != 1 && !send(detail::bytes_of_object(first_token))) return stopped;
  if (!send(std::as_bytes(described)) || !send(std::as_bytes(tokens)) ||
      !send(detail::bytes_of_object(digest)))
    return stopped;
  std::uint64_t number = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto table = cache.table(sequence, g);
    for (std::uint64_t i = 0; i < table.size(); ++i) {
      if (!detail::is_read(groups[g], held, i) || detail::ends_by(groups[g], first_token, i)) continue;
      const auto bytes = std::span<const std::byte>(memory.bytes)
                             .subspan(static_cast<std::size_t>(cache.pool().offset(table[i])),
                                      static_cast<std::size_t>(groups[g].block_bytes));
      const block_key block = detail::digest_of(bytes, detail::block_digest(digest, number++));
      if (!send(bytes) || !send(detail::bytes_of_object(block))) return stopped;
    }
  }
  return written;
}

/// Reads a stream of `export_sequence` into a new sequence of `cache`, and its blocks into `memory`.
///
/// The sequence shares the prefix that the cache already has in every group. Other sequences find the
/// imported blocks only after all of them were verified and the sequence was committed. After a refusal,
/// nothing of the stream remains, and the source may be anywhere inside the stream.
///
/// @return `errc::not_a_kv_stream` for another magic or version, `errc::layout_mismatch` when `contents` or
///   the groups differ (then `where` names the first group and its field), `errc::damaged_stream` with the
///   number of the block in the stream (or 0 for the head) when a digest is wrong, `errc::epoch_differs` for
///   other weights, `errc::missing_prefix` when omitted blocks that the next token reads are not cached here
///   (those of windows that it does not read may be missing), `errc::no_such_block` for a memory smaller than
///   the pool, `errc::stopped` when the source ends early, and the errors of `create`, `match` and `append`.
/// @param metadata  source of memory for the token ids and one block.
/// @throws out_of_memory when that memory is not available; then nothing was imported.
template <class Cache, byte_supply Source>
  requires requires(const Cache& cache) { cache.groups(); }
result<imported_sequence> import_sequence(Cache& cache, const group_memory& memory, Source&& source,
                                          const request_hints& hints = {},
                                          const metadata_source& metadata = {}) {
  const char* const who = cache.name().c_str();
  const failure stopped{errc::stopped, 0, 0, 0, who};
  const std::span<const layer_group> groups = cache.groups();
  detail::group_stream_header header;
  if (!source(std::as_writable_bytes(std::span(&header, 1)))) return stopped;
  if (header.magic != detail::group_stream_header::right_magic || header.version == 0 ||
      header.version > detail::group_stream_header::newest_version)
    return failure{errc::not_a_kv_stream, 0, header.version, detail::group_stream_header::newest_version,
                   who};
  std::uint64_t first_token = 0;
  if (header.version != 1 && !source(std::as_writable_bytes(std::span(&first_token, 1)))) return stopped;
  if (header.groups != groups.size())
    return failure{errc::layout_mismatch, 1, header.groups, groups.size(), cache.name() + ": groups"};
  if (header.contents != memory.contents)
    return failure{errc::layout_mismatch, 0, header.contents, memory.contents, who};
  std::array<detail::group_stream_record, max_layer_groups> records{};
  const auto described = std::span(records).first(groups.size());
  if (!source(std::as_writable_bytes(described))) return stopped;
  std::uint64_t largest = 0;
  std::uint64_t step = 1;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const detail::group_stream_record here = detail::stream_record(groups[g]);
    if (described[g] != here) return detail::group_differs(cache.name(), g, described[g], here);
    if (here.block_bytes > largest) largest = here.block_bytes;
    if (here.block_tokens > step) step = here.block_tokens;
  }
  if (memory.bytes.size() < cache.pool().max_physical_bytes()) {
    const std::uint64_t blocks = memory.bytes.size() / cache.layout().page_bytes << cache.layout().shift;
    return failure{errc::no_such_block, 0, cache.pool().block_ids() - 1, blocks, who};
  }
  if (header.tokens > cache.max_sequence_tokens())
    return failure{errc::sequence_full, 0, header.tokens, cache.max_sequence_tokens(), who};
  detail::fixed_array<token_id> ids(header.tokens, metadata, "group_transfer: token ids");
  const std::span<token_id> tokens(ids.data(), ids.size());
  block_key digest{};
  if (!source(std::as_writable_bytes(tokens)) || !source(std::as_writable_bytes(std::span(&digest, 1))))
    return stopped;
  if (detail::digest_of_head(header, first_token, described, tokens) != digest || first_token > tokens.size())
    return failure{errc::damaged_stream, 0, 0, 0, who};
  if (header.epoch != cache.epoch()) return failure{errc::epoch_differs, 0, header.epoch, cache.epoch(), who};

  detail::fixed_array<std::byte> block_read(largest, metadata, "group_transfer: a block");
  const auto sequence = cache.create(header.context, hints);
  if (!sequence) return sequence.error();
  const auto undo = [&](const failure& why) noexcept {
    static_cast<void>(cache.release(*sequence));
    return why;
  };
  const auto hit = cache.match(*sequence, tokens);
  if (!hit) return undo(hit.error());
  const std::uint64_t reused = hit->tokens;
  const detail::omitted_blocks omitted = detail::count_omitted(groups, tokens.size(), first_token, reused);
  if (omitted.found != omitted.needed)
    return undo({errc::missing_prefix, 0, omitted.needed, omitted.found, who});
  // In parts: each append releases what the one before it does not read, so windows and states take little.
  // No copy is carried out, because the stream has every block that remains after the hit.
  for (std::uint64_t at = reused; at < tokens.size(); at += step) {
    const std::uint64_t rest = tokens.size() - at;
    const auto part =
        tokens.subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(rest < step ? rest : step));
    if (const auto grown = cache.append(*sequence, part); !grown) return undo(grown.error());
  }
  if (const auto done = cache.append(*sequence, {}); !done) return undo(done.error());

  std::uint64_t number = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto table = cache.table(*sequence, g);
    for (std::uint64_t i = 0; i < table.size(); ++i) {
      if (!detail::is_read(groups[g], tokens.size(), i) || detail::ends_by(groups[g], first_token, i))
        continue;
      const std::span<std::byte> bytes(block_read.data(), static_cast<std::size_t>(groups[g].block_bytes));
      block_key block{};
      if (!source(bytes) || !source(std::as_writable_bytes(std::span(&block, 1)))) return undo(stopped);
      if (detail::digest_of(bytes, detail::block_digest(digest, number)) != block)
        return undo({errc::damaged_stream, static_cast<std::uint32_t>(number), number, number, who});
      ++number;
      if (detail::ends_by(groups[g], reused, i)) continue;  // shared with other sequences: read-only
      std::memcpy(memory.bytes.data() + cache.pool().offset(table[i]), bytes.data(), bytes.size());
    }
  }
  if (const auto done = cache.commit(*sequence); !done) return undo(done.error());
  return imported_sequence{.sequence = *sequence, .tokens = tokens.size(), .reused_tokens = reused};
}

}  // namespace v0
}  // namespace llmmem
