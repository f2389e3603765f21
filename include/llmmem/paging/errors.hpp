/// @file
/// The errors of blocks, sequences and KV caches: their codes, the meaning of their three numbers, and their
/// texts.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/failure.hpp>

#include <array>

namespace llmmem {
inline namespace v0 {

namespace detail {

inline constexpr std::array paging_errors{
    error_info{.number = 1,
               .name = "out_of_blocks",
               .raises = error_kind::out_of_memory,
               .wanted = "blocks needed",
               .found = "blocks free or evictable",
               .sentence = "{wanted} blocks needed, {found} free or evictable; release sequences, or build "
                           "the cache with more blocks"},
    error_info{.number = 2,
               .name = "out_of_sequences",
               .raises = error_kind::out_of_memory,
               .found = "sequences alive, the most that the options allow",
               .sentence = "all {found} sequences are in use; release one, or raise max_sequences"},
    error_info{.number = 3,
               .name = "out_of_requests",
               .raises = error_kind::out_of_memory,
               .found = "requests known, the most that the options allow",
               .sentence = "all {found} requests are in use; finish one, or raise max_requests"},
    error_info{.number = 4,
               .name = "step_pending",
               .found = "requests in the step",
               .sentence = "the last step, with {found} requests, is not completed; call completed() first"},
    error_info{.number = 6,
               .name = "sequence_full",
               .raises = error_kind::out_of_memory,
               .index = "sequence slot",
               .wanted = "tokens it would hold",
               .found = "the most a sequence may hold",
               .sentence = "sequence {index} would hold {wanted} tokens, more than the {found} allowed; "
                           "raise max_sequence_tokens, or blocks"},
    error_info{.number = 7,
               .name = "too_many_shares",
               .raises = error_kind::out_of_memory,
               .index = "block",
               .wanted = "references to add at most",
               .found = "references it has",
               .sentence = "block {index} has {found} references; {wanted} more could exceed the limit of "
                           "2^24 - 1; release some first"},
    error_info{.number = 11,
               .name = "double_free",
               .raises = error_kind::handle,
               .index = "block",
               .sentence = "double free: block {index} has no references left; release each reference once, "
                           "through one owner"},
    error_info{
        .number = 12,
        .name = "past_the_end",
        .index = "sequence slot",
        .wanted = "tokens named",
        .found = "tokens it holds",
        .sentence =
            "{wanted} tokens named, but sequence {index} holds {found}; name fewer, or append them first"},
    error_info{.number = 13,
               .name = "deferred_full",
               .raises = error_kind::out_of_memory,
               .wanted = "references to add",
               .found = "free entries for references",
               .sentence =
                   "{wanted} deferred frees to queue, but space for only {found}; call collect() once "
                   "fences have passed, or raise max_deferred, or max_sequences (4 releases each)"},
    error_info{.number = 16,
               .name = "bad_block_count",
               .raises = error_kind::length,
               .wanted = "blocks asked for",
               .found = "the most the pool was built for",
               .sentence = "{wanted} blocks asked for, but the pool allows 1 to {found}; build it with a "
                           "larger block_capacity to grow further"},
    error_info{.number = 17,
               .name = "bad_priority",
               .wanted = "the priority",
               .found = "the highest",
               .sentence = "priority {wanted} is out of range; use 0 to {found}"},
    error_info{.number = 18,
               .name = "empty_range",
               .wanted = "first token",
               .found = "end of the tokens",
               .sentence =
                   "the range of tokens {wanted} to {found} is empty; its end must be larger than its first"},
    error_info{.number = 19,
               .name = "listed_twice",
               .index = "sequence slot",
               .wanted = "place in the batch",
               .found = "entries of the batch",
               .sentence = "sequence {index} is listed again at place {wanted} of a batch of {found}; put "
                           "its tokens into one entry"},
    error_info{.number = 20,
               .name = "ring_busy",
               .raises = error_kind::out_of_memory,
               .index = "next slot in the ring",
               .found = "slots in the ring",
               .sentence = "slot {index} of {found} is still in use; release it after the fence of its last "
                           "kernel, or build more slots"},
    error_info{.number = 22,
               .name = "not_a_kv_stream",
               .wanted = "the version read",
               .found = "the version supported",
               .sentence =
                   "not a stream of keys and values of version {found} (the version read is {wanted}); the "
                   "rest of the stream is still unread: close the source, or skip to the end of the frame"},
    error_info{.number = 23,
               .name = "damaged_stream",
               .index = "block, or 0 for the header",
               .sentence = "the stream is damaged at block {index} (0: block 0 or the header): its digest is "
                           "wrong; send it again"},
    error_info{
        .number = 24,
        .name = "missing_prefix",
        .wanted = "blocks that must be cached here",
        .found = "blocks cached here",
        .sentence =
            "the stream omits {wanted} blocks, of which {found} are cached here; request the whole stream"},
    error_info{.number = 26,
               .name = "stale_plan",
               .index = "source block",
               .wanted = "destination block",
               .found = "number of the move",
               .sentence = "move {found} of the plan, block {index} to {wanted}, is not possible: the source "
                           "must be in use and the destination free; make a new plan"},
    error_info{.number = 27,
               .name = "not_fresh",
               .index = "sequence slot",
               .found = "tokens it holds",
               .sentence = "match needs a sequence without tokens, but sequence {index} holds {found}; call "
                           "match first, then append the rest"},
    error_info{.number = 40,
               .name = "out_of_group_blocks",
               .raises = error_kind::out_of_memory,
               .index = "group of layers",
               .wanted = "blocks it needs",
               .found = "blocks available to it",
               .sentence = "group {index} needs {wanted} blocks, but {found} are available to it; release "
                           "sequences, or build it with a larger budget"},
    error_info{.number = 41,
               .name = "already_cached",
               .index = "block",
               .sentence = "block {index} is already cached with other contents; commit each block once, "
                           "with the contents it held then"},
    error_info{
        .number = 43,
        .name = "not_kept",
        .index = "group of layers",
        .wanted = "tokens to cut to",
        .found = "the next larger length that all groups still have",
        .sentence =
            "group {index} no longer has the contents needed to continue after {wanted} tokens; cut to "
            "{found}, or to the shorter length that nearest_cuts() returns, and compute the rest again"},
    error_info{.number = 44,
               .name = "no_such_block",
               .index = "block asked for",
               .wanted = "block asked for",
               .found = "blocks in the memory, including the null block",
               .sentence = "block {wanted} asked for, but the memory has {found}, numbered from 0; build the "
                           "memory with the cache's max_physical_blocks()"},
    error_info{
        .number = 45,
        .name = "past_the_table",
        .index = "sequence slot",
        .wanted = "blocks named",
        .found = "blocks it holds",
        .sentence = "{wanted} blocks named, but sequence {index} holds {found}; name at most that many"},
    error_info{
        .number = 47,
        .name = "block_tokens_differ",
        .wanted = "tokens per block of the stream or memory",
        .found = "tokens per block of the cache",
        .sentence =
            "blocks hold {wanted} tokens there and {found} here; build both with the same block_tokens"},
    error_info{.number = 93,
               .name = "not_a_prefix",
               .index = "sequence slot",
               .wanted = "tokens it holds",
               .found = "leading tokens whose blocks hold the contents of their prefix",
               .sentence = "sequence {index} holds {wanted} tokens, but only the first {found} are a sound "
                           "prefix: contents after them were invalidated, or tokens were removed; truncate "
                           "it to {found} tokens and compute the rest again"},
    error_info{.number = 94,
               .name = "not_whole_blocks",
               .index = "sequence slot",
               .wanted = "token where the range begins or ends",
               .found = "tokens it must be a multiple of",
               .sentence = "a range of sequence {index} begins or ends at token {wanted}; use a multiple of "
                           "{found}, or the sequence's end"},
    error_info{.number = 95,
               .name = "old_epoch",
               .wanted = "the epoch asked for",
               .found = "the current epoch",
               .sentence = "epoch {wanted} asked for, but the current epoch is {found}; name a later one"},
    error_info{.number = 96,
               .name = "cannot_remove",
               .index = "group of layers",
               .wanted = "first token to remove",
               .found = "first token to keep after them",
               .sentence = "tokens {wanted} to {found} cannot be removed from group {index}: its states "
                           "include them, its chunks would begin elsewhere, or its window would reach "
                           "dropped tokens or lose its sinks; compute the sequence again without them"},
    error_info{.number = 97,
               .name = "epoch_differs",
               .wanted = "the stream's epoch",
               .found = "the cache's epoch",
               .sentence = "the stream belongs to epoch {wanted}, the cache to {found}; compute it again "
                           "with the present weights"},
    error_info{.number = 98,
               .name = "no_slots",
               .index = "group of layers",
               .wanted = "bytes of a token, 0 if a block does not divide into tokens",
               .found = "bytes of a page",
               .sentence = "tokens of group {index} take {wanted} bytes (0: its blocks are not rows of "
                           "tokens), and the page size of {found} bytes is not a multiple, so slots cannot "
                           "count them; choose a page_bytes that is one, or use write_table()"},
    error_info{.number = 101,
               .name = "bad_budget",
               .raises = error_kind::length,
               .wanted = "bytes asked for",
               .found = "the most the pool was built for",
               .sentence = "a budget of {wanted} bytes asked for, but the pool allows two pages to {found} "
                           "bytes; build it with a larger budget_capacity_bytes to grow further"},
    error_info{.number = 102,
               .name = "unexpected_part",
               .index = "rank that sent it",
               .wanted = "its plan, request, layer, token or share: the first that differs",
               .found = "the one expected here",
               .sentence = "rank {index} sent a part of keys and values with {wanted} (plan, request, layer, "
                           "token or share) where {found} is expected; send and receive the same parts in "
                           "the same order, by the same plan"},
};

}  // namespace detail

namespace errc {

/// Too few blocks are free or evictable: wanted = blocks needed, found = blocks free or evictable.
inline constexpr error_code out_of_blocks = detail::code_of<1>(detail::paging_errors);
/// No sequence slot is free: found = sequences alive, the most that the options allow.
inline constexpr error_code out_of_sequences = detail::code_of<2>(detail::paging_errors);
/// The scheduler has no slot for another request: found = requests known, the most that the options allow.
inline constexpr error_code out_of_requests = detail::code_of<3>(detail::paging_errors);
/// The last step has not been completed: found = requests in the step.
inline constexpr error_code step_pending = detail::code_of<4>(detail::paging_errors);
/// A sequence would grow too long: index = sequence slot, wanted = tokens it would hold, found = the most a
/// sequence may hold.
inline constexpr error_code sequence_full = detail::code_of<6>(detail::paging_errors);
/// A block would have too many references: index = block, wanted = references to add at most, found =
/// references it has.
inline constexpr error_code too_many_shares = detail::code_of<7>(detail::paging_errors);
/// A block without references was released: index = block.
inline constexpr error_code double_free = detail::code_of<11>(detail::paging_errors);
/// More tokens were named than the sequence holds: index = sequence slot, wanted = tokens named, found =
/// tokens it holds.
inline constexpr error_code past_the_end = detail::code_of<12>(detail::paging_errors);
/// The ring of deferred frees is full: wanted = references to add, found = free entries for references.
inline constexpr error_code deferred_full = detail::code_of<13>(detail::paging_errors);
/// A size that the pool cannot have: wanted = blocks asked for, found = the most the pool was built for.
inline constexpr error_code bad_block_count = detail::code_of<16>(detail::paging_errors);
/// A priority out of range: wanted = the priority, found = the highest.
inline constexpr error_code bad_priority = detail::code_of<17>(detail::paging_errors);
/// An empty range of tokens: wanted = first token, found = end of the tokens.
inline constexpr error_code empty_range = detail::code_of<18>(detail::paging_errors);
/// A batch lists a sequence twice: index = sequence slot, wanted = place in the batch, found = entries of the
/// batch.
inline constexpr error_code listed_twice = detail::code_of<19>(detail::paging_errors);
/// The next slot of a ring is held or in flight: index = next slot in the ring, found = slots in the ring.
inline constexpr error_code ring_busy = detail::code_of<20>(detail::paging_errors);
/// Not a stream of keys and values of this library: wanted = the version read, found = the version supported.
inline constexpr error_code not_a_kv_stream = detail::code_of<22>(detail::paging_errors);
[[deprecated("its name is not_a_kv_stream")]] inline constexpr error_code foreign_stream = not_a_kv_stream;
/// A stream's digest is wrong: index = block, or 0 for the header.
inline constexpr error_code damaged_stream = detail::code_of<23>(detail::paging_errors);
/// A stream omits blocks that are not cached here: wanted = blocks that must be cached here, found = blocks
/// cached here.
inline constexpr error_code missing_prefix = detail::code_of<24>(detail::paging_errors);
/// A move of a plan is no longer possible: index = source block, wanted = destination block, found = number
/// of the move.
inline constexpr error_code stale_plan = detail::code_of<26>(detail::paging_errors);
/// `match` on a sequence that already holds tokens: index = sequence slot, found = tokens it holds.
inline constexpr error_code not_fresh = detail::code_of<27>(detail::paging_errors);
/// A group of layers has too few blocks: index = group of layers, wanted = blocks it needs, found = blocks
/// available to it.
inline constexpr error_code out_of_group_blocks = detail::code_of<40>(detail::paging_errors);
/// A block is already cached with contents other than those to commit: index = block.
inline constexpr error_code already_cached = detail::code_of<41>(detail::paging_errors);
/// A group no longer has the contents needed to continue after a cut: index = group of layers, wanted =
/// tokens to cut to, found = the next larger length that all groups still have.
inline constexpr error_code not_kept = detail::code_of<43>(detail::paging_errors);
/// A block that the memory does not have: index = block asked for, wanted = block asked for, found = blocks
/// in the memory, including the null block.
inline constexpr error_code no_such_block = detail::code_of<44>(detail::paging_errors);
/// More blocks were named than the sequence holds: index = sequence slot, wanted = blocks named, found =
/// blocks it holds.
inline constexpr error_code past_the_table = detail::code_of<45>(detail::paging_errors);
/// Blocks hold different numbers of tokens: wanted = tokens per block of the stream or memory, found = tokens
/// per block of the cache.
inline constexpr error_code block_tokens_differ = detail::code_of<47>(detail::paging_errors);
/// Part of a sequence does not hold the contents of its prefix: index = sequence slot, wanted = tokens it
/// holds, found = leading tokens whose blocks hold the contents of their prefix.
inline constexpr error_code not_a_prefix = detail::code_of<93>(detail::paging_errors);
/// A range that ends within a block: index = sequence slot, wanted = token where the range begins or ends,
/// found = tokens it must be a multiple of.
inline constexpr error_code not_whole_blocks = detail::code_of<94>(detail::paging_errors);
/// An epoch that is not later than the current one: wanted = the epoch asked for, found = the current epoch.
inline constexpr error_code old_epoch = detail::code_of<95>(detail::paging_errors);
/// Tokens cannot be removed from the middle of a group: index = group of layers, wanted = first token to
/// remove, found = first token to keep after them.
inline constexpr error_code cannot_remove = detail::code_of<96>(detail::paging_errors);
/// A stream that was computed with other weights: wanted = the stream's epoch, found = the cache's epoch.
inline constexpr error_code epoch_differs = detail::code_of<97>(detail::paging_errors);
/// A group whose tokens are not at multiples of their size: index = group of layers, wanted = bytes of a
/// token, 0 if a block does not divide into tokens, found = bytes of a page.
inline constexpr error_code no_slots = detail::code_of<98>(detail::paging_errors);
/// A budget that a pool of pages cannot have: wanted = bytes asked for, found = the most the pool was built
/// for.
inline constexpr error_code bad_budget = detail::code_of<101>(detail::paging_errors);
/// A part of keys and values that is not the next one: index = rank that sent it, wanted = its plan, request,
/// layer, token or share, the first that differs, found = the one expected here.
inline constexpr error_code unexpected_part = detail::code_of<102>(detail::paging_errors);

}  // namespace errc

}  // namespace v0
}  // namespace llmmem
