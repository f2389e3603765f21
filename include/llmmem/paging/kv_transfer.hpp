/// @file
/// Transfers a sequence's keys and values as bytes from one allocator or process to another.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/error.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/hash/siphash.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/paging/errors.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/paging/kv_contents.hpp>
#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/paging/paged_types.hpp>
#include <llmmem/result.hpp>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// A consumer of bytes: `bool sink(std::span<const std::byte>) noexcept` returns false to stop.
template <class S>
concept byte_sink = std::is_nothrow_invocable_r_v<bool, S&, std::span<const std::byte>>;

/// A supplier of bytes: `bool source(std::span<std::byte>) noexcept` fills the whole span, or returns false.
template <class S>
concept byte_supply = std::is_nothrow_invocable_r_v<bool, S&, std::span<std::byte>>;

/// The result of `import_sequence`.
struct imported_sequence {
  sequence_id sequence{};
  std::uint64_t tokens = 0;
  std::uint64_t reused_tokens = 0;  ///< of those, tokens found in the importer's own cache
};

namespace detail {

static_assert(
    std::endian::native == std::endian::little,
    "streams are little-endian and written without byte swapping, so the host must be little-endian");

/// SipHash over bytes, under a key that identifies their kind.
[[nodiscard]] inline block_key digest_of(std::span<const std::byte> bytes, hash_seed key) noexcept {
  siphash_state<2, 4> state(key);
  const std::size_t words = bytes.size() / sizeof(std::uint64_t);
  for (std::size_t i = 0; i < words; ++i) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + i * sizeof(word), sizeof(word));
    state.absorb(word);
  }
  std::uint64_t tail = 0;
  const std::size_t rest = bytes.size() % sizeof(std::uint64_t);
  if (rest != 0) std::memcpy(&tail, bytes.data() + words * sizeof(std::uint64_t), rest);
  return state.finish(tail, bytes.size());
}

/// The head of a stream. After it, in this order: in version 2 the record of the contents; if `has_epoch`,
/// the weights' epoch; token ids; the head's digest; the blocks, each with its own digest. Layouts that do
/// not need the record use version 1, so that older peers can still read them; epoch 0 is omitted for the
/// same reason.
struct kv_stream_header {
  static constexpr std::array<char, 8> right_magic{'l', 'l', 'm', 'm', 'e', 'm', 'k', 'v'};
  static constexpr std::uint32_t newest_version = 2;

  static constexpr std::uint16_t has_epoch = 1;  // of `flags`

  std::array<char, 8> magic = right_magic;
  std::uint16_t version = 1;
  std::uint16_t flags = 0;
  std::uint32_t block_tokens = 0;
  std::uint64_t contents = 0;  // content_fingerprint
  std::uint64_t tokens = 0;
  std::uint64_t first_block = 0;
  std::uint64_t block_bytes = 0;
  prefix_context context{};
};

static_assert(sizeof(kv_stream_header) == 48 + 32 && std::is_trivially_copyable_v<kv_stream_header>);

inline constexpr hash_seed header_digest{.low = 0x6B76'2068'6561'6400ULL, .high = 1};

/// A block's digest depends on its stream and on its position in the stream.
[[nodiscard]] inline hash_seed block_digest(const block_key& header, std::uint64_t block) noexcept {
  return {.low = header.low ^ block, .high = header.high};
}

[[nodiscard]] inline fixed_array<std::byte> packed_block(const kv_layout& packed,
                                                         const metadata_source& source) {
  return {packed.block_bytes(), source, "kv_transfer: a packed block"};
}

/// Returns the digest of a stream's head: of all bytes before the digest.
template <class Header>
[[nodiscard]] block_key digest_of_head(const Header& header, const kv_layout_record& contents,
                                       std::uint64_t epoch, std::span<const token_id> tokens) noexcept {
  block_key out = digest_of(std::as_bytes(tokens), header_digest);
  if (header.flags != 0)
    out = digest_of(std::as_bytes(std::span(&epoch, 1)), {.low = out.low, .high = out.high});
  if (header.version != 1)
    out = digest_of(std::as_bytes(std::span(contents)), {.low = out.low, .high = out.high});
  return digest_of(std::as_bytes(std::span<const Header, 1>(&header, 1)), {.low = out.low, .high = out.high});
}

/// Reports which part of the contents differs, as far as the stream describes them.
[[nodiscard]] inline failure contents_differ(const kv_stream_header& header, const kv_layout_record& theirs,
                                             const kv_layout& ours, const char* who) noexcept {
  const kv_layout_record here = ours.packed().record();
  const failure unknown{errc::layout_mismatch, 0, header.contents, ours.content_fingerprint(), who};
  if (header.version != 1) {
    const std::size_t at = first_difference(theirs, here);
    return at == kv_layout_words ? unknown : field_differs(at, theirs, here, who);
  }
  // Version 1 means all heads and tokens, and no form that came later. If nothing else differs, the cause is
  // known.
  kv_layout_record there = plain_record(here);
  there[5] = header.block_tokens;
  for (const std::uint64_t heads :
       {std::uint64_t{ours.heads}, std::uint64_t{ours.heads} * ours.part.tp_size}) {
    there[2] = heads;
    const std::size_t at = first_difference(there, here);
    if (at != kv_layout_words && (digest_of_record(there) | 1U) == header.contents)
      return field_differs(at, there, here, who);
  }
  return unknown;
}

template <class T>
[[nodiscard]] std::span<const std::byte> bytes_of_object(const T& object) noexcept {
  return std::as_bytes(std::span<const T, 1>(&object, 1));
}

}  // namespace detail

/// Writes a sequence's keys and values, packed, to `sink`, with everything that an importer needs to check
/// them.
///
/// The stream is little-endian: magic, version, fingerprint of the contents (and their record, if a layout
/// has more than a shape), token ids, context, then one packed block after the other. The header and each
/// block carry a 128-bit SipHash digest; a block's digest depends on the header and on the block's position.
/// The stream contains no block ids, so an allocator of any size can import it. It does not depend on
/// the memory's order either: a block-first cache can import the stream of a layer-first one.
///
/// Under context parallelism each rank sends the KV of its own tokens to a rank with the same part. `tokens`
/// are the tokens of all ranks, and the allocator's blocks cover `virtual_block_tokens()`.
///
/// @param tokens  all tokens of the sequence; their KV must be written.
/// @param first_block  earlier blocks are not sent, because the importer has them cached.
/// @return bytes written. `errc::size_mismatch` if the number of `tokens` differs from the sequence's,
///   `errc::not_a_prefix` if some of its contents were invalidated or tokens removed,
///   `errc::block_tokens_differ` if the layout's `virtual_block_tokens()` differs from the allocator's
///   `block_tokens`, `errc::no_such_block` for a memory too small for the sequence's blocks,
///   `errc::past_the_table` for a `first_block` that the sequence does not have, `errc::stopped` when the
///   sink returns false.
/// @param metadata  source of memory for one packed block.
/// @throws out_of_memory when that memory is not available; then nothing was sent.
/// @par Waits   only for the sink; the sequence must not change meanwhile.
template <class Cache, byte_sink Sink>
result<std::uint64_t> export_sequence(const Cache& cache, sequence_id sequence,
                                      std::span<const token_id> tokens, const prefix_context& context,
                                      const kv_memory& memory, Sink&& sink, std::uint64_t first_block = 0,
                                      const metadata_source& metadata = {}) {
  const char* const who = cache.name().c_str();
  if (const auto alive = cache.check(sequence); !alive) return alive.error();
  const auto table = cache.blocks(sequence);
  if (tokens.size() != cache.tokens(sequence))
    return failure{errc::size_mismatch, sequence.slot, tokens.size(), cache.tokens(sequence), who};
  if (cache.prefix_tokens(sequence) != tokens.size())
    return failure{errc::not_a_prefix, sequence.slot, tokens.size(), cache.prefix_tokens(sequence), who};
  if (memory.layout.virtual_block_tokens() != cache.block_tokens())
    return failure{errc::block_tokens_differ, 0, memory.layout.virtual_block_tokens(), cache.block_tokens(),
                   who};
  if (first_block > table.size())
    return failure{errc::past_the_table, sequence.slot, first_block, table.size(), who};
  for (const block_id block : table) {
    if (to_index(block) >= memory.blocks)
      return failure{errc::no_such_block, to_index(block), to_index(block), memory.blocks, who};
  }

  const kv_layout packed = memory.layout.packed();
  detail::fixed_array<std::byte> packed_bytes = detail::packed_block(packed, metadata);
  const std::span<std::byte> buffer(packed_bytes.data(), packed_bytes.size());
  const detail::kv_layout_record contents = packed.record();
  const std::uint64_t epoch = cache.epoch(sequence);
  detail::kv_stream_header header{
      .version = static_cast<std::uint16_t>(contents[0]),
      .flags = epoch == 0 ? std::uint16_t{0} : detail::kv_stream_header::has_epoch,
      .block_tokens = cache.block_tokens(),
      .contents = memory.layout.content_fingerprint(),
      .tokens = tokens.size(),
      .first_block = first_block,
      .block_bytes = packed.block_bytes(),
      .context = context};
  std::uint64_t written = 0;
  const auto send = [&](std::span<const std::byte> bytes) noexcept {
    written += bytes.size();
    return static_cast<bool>(sink(bytes));
  };
  const block_key digest = detail::digest_of_head(header, contents, epoch, tokens);
  const failure stopped{errc::stopped, 0, 0, 0, who};
  if (!send(detail::bytes_of_object(header))) return stopped;
  if (header.version != 1 && !send(std::as_bytes(std::span(contents)))) return stopped;
  if (header.flags != 0 && !send(detail::bytes_of_object(epoch))) return stopped;
  if (!send(std::as_bytes(tokens)) || !send(detail::bytes_of_object(digest))) return stopped;
  const kv_memory staging{.data = buffer.data(), .blocks = 1, .layout = packed};
  for (std::uint64_t i = first_block; i < table.size(); ++i) {
    const std::uint64_t rest = tokens.size() - i * cache.block_tokens();
    const std::uint64_t part = rest < cache.block_tokens() ? rest : cache.block_tokens();
    std::memset(buffer.data(), 0, buffer.size());  // bytes after the last token are unspecified: do not leak
                                                   // them
    copy_kv_block(staging, 0, memory, to_index(table[static_cast<std::size_t>(i)]),
                  memory.layout.part.local_tokens(part));
    const block_key block = detail::digest_of(buffer, detail::block_digest(digest, i));
    if (!send(buffer) || !send(detail::bytes_of_object(block))) return stopped;
  }
  return written;
}

/// Reads a stream of `export_sequence` into a new sequence of `cache`, and its blocks into `memory`.
///
/// The sequence shares the prefix that the cache already holds. Other sequences find the imported blocks only
/// after all of them were verified and the sequence was committed. After a refusal, nothing of the stream
/// remains.
///
/// After a refusal, the source may be anywhere inside the stream. If more data follows the stream, frame
/// streams or close the source.
///
/// @param memory  of at least `max_physical_blocks()` blocks, else `errc::no_such_block`.
/// @return `errc::not_a_kv_stream` for another magic or version, `errc::layout_mismatch` when the contents'
///   fingerprints differ (another model, shape, element type, block size, form or part), with the name of the
///   field if the stream contains it, `errc::block_tokens_differ` for a memory whose blocks differ from the
///   allocator's, `errc::damaged_stream` with the block (or 0 for the header) when a digest is wrong,
///   `errc::epoch_differs` when the stream was computed with other weights than those of the cache's epoch,
///   `errc::missing_prefix` when omitted blocks are not cached here, `errc::stopped` when the source ends
///   early, and the errors of `create`, `match` and `append`.
/// @param metadata  source of memory for the token ids (at most as many as a sequence may hold) and one
///   packed block.
/// @throws out_of_memory when that memory is not available; then nothing was imported.
template <class Cache, byte_supply Source>
result<imported_sequence> import_sequence(Cache& cache, const kv_memory& memory, Source&& source,
                                          const request_hints& hints = {},
                                          const metadata_source& metadata = {}) {
  const char* const who = cache.name().c_str();
  const failure stopped{errc::stopped, 0, 0, 0, who};
  detail::kv_stream_header header;
  if (!source(std::as_writable_bytes(std::span(&header, 1)))) return stopped;
  if (header.magic != detail::kv_stream_header::right_magic || header.version == 0 ||
      header.version > detail::kv_stream_header::newest_version ||
      header.flags > detail::kv_stream_header::has_epoch) {
    return failure{errc::not_a_kv_stream, 0, header.version, detail::kv_stream_header::newest_version, who};
  }
  detail::kv_layout_record contents{};
  if (header.version != 1) {
    if (!source(std::as_writable_bytes(std::span(contents)))) return stopped;
    if (contents[0] != header.version || (detail::digest_of_record(contents) | 1U) != header.contents)
      return failure{errc::damaged_stream, 0, 0, 0, who};
  }
  std::uint64_t epoch = 0;
  if (header.flags != 0 && !source(std::as_writable_bytes(std::span(&epoch, 1)))) return stopped;
  if (header.contents != memory.layout.content_fingerprint())
    return detail::contents_differ(header, contents, memory.layout, who);
  const kv_layout packed = memory.layout.packed();
  // The stream covers as many tokens per block as the memory, because the fingerprints are equal.
  if (memory.layout.virtual_block_tokens() != cache.block_tokens())
    return failure{errc::block_tokens_differ, 0, memory.layout.virtual_block_tokens(), cache.block_tokens(),
                   who};
  if (header.block_tokens != cache.block_tokens() || header.block_bytes != packed.block_bytes())
    return failure{errc::damaged_stream, 0, 0, 0, who};
  if (memory.blocks < cache.max_physical_blocks())
    return failure{errc::no_such_block, 0, cache.max_physical_blocks() - 1, memory.blocks, who};
  if (header.tokens > cache.max_sequence_tokens())
    return failure{errc::sequence_full, 0, header.tokens, cache.max_sequence_tokens(), who};

  detail::fixed_array<token_id> ids_read(header.tokens, metadata, "kv_transfer: token ids");
  const std::span<token_id> tokens(ids_read.data(), ids_read.size());
  block_key digest{};
  if (!source(std::as_writable_bytes(tokens)) || !source(std::as_writable_bytes(std::span(&digest, 1)))) {
    return stopped;
  }
  if (detail::digest_of_head(header, contents, epoch, tokens) != digest)
    return failure{errc::damaged_stream, 0, 0, 0, who};
  if (epoch != cache.epoch()) return failure{errc::epoch_differs, 0, epoch, cache.epoch(), who};

  detail::fixed_array<std::byte> packed_bytes = detail::packed_block(packed, metadata);
  const std::span<std::byte> buffer(packed_bytes.data(), packed_bytes.size());
  const kv_memory staging{.data = buffer.data(), .blocks = 1, .layout = packed};
  const auto sequence = cache.create(header.context, hints);
  if (!sequence) return sequence.error();
  const auto undo = [&](const failure& why) noexcept {
    static_cast<void>(cache.release(*sequence));
    return why;
  };
  // Full blocks only: if the cache could also share the beginning of a block, the stream still brings all of
  // it.
  const std::uint64_t cached = cache.cached_tokens(tokens, header.context);
  const auto hit = cache.match(*sequence, tokens.first(static_cast<std::size_t>(cached)));
  if (!hit) return undo(hit.error());
  const std::uint64_t reused = hit->tokens;
  if (reused / header.block_tokens < header.first_block) {
    return undo({errc::missing_prefix, 0, header.first_block, reused / header.block_tokens, who});
  }
  const auto grown = cache.append(*sequence, tokens.subspan(static_cast<std::size_t>(reused)));
  if (!grown) return undo(grown.error());

  const auto table = cache.blocks(*sequence);
  for (std::uint64_t i = header.first_block; i < table.size(); ++i) {
    block_key block{};
    if (!source(buffer) || !source(std::as_writable_bytes(std::span(&block, 1)))) return undo(stopped);
    if (detail::digest_of(buffer, detail::block_digest(digest, i)) != block)
      return undo({errc::damaged_stream, static_cast<std::uint32_t>(i), i, table.size(), who});
    const std::uint64_t first = i * header.block_tokens;
    if (first < reused) continue;  // shared with other sequences: read-only
    const std::uint64_t rest = tokens.size() - first;
    const std::uint64_t part = rest < header.block_tokens ? rest : header.block_tokens;
    copy_kv_block(memory, to_index(table[static_cast<std::size_t>(i)]), staging, 0,
                  memory.layout.part.local_tokens(part));
  }
  if (const auto done = cache.commit(*sequence); !done) return undo(done.error());
  return imported_sequence{.sequence = *sequence, .tokens = tokens.size(), .reused_tokens = reused};
}

}  // namespace v0
}  // namespace llmmem
