#include <llmmem/arena/errors.hpp>
#include <llmmem/codec/errors.hpp>
#include <llmmem/comm/errors.hpp>
#include <llmmem/detail/numbered_errors.hpp>
#include <llmmem/device/errors.hpp>
#include <llmmem/errors.hpp>
#include <llmmem/hash/errors.hpp>
#include <llmmem/kernels/errors.hpp>
#include <llmmem/paging/errors.hpp>
#include <llmmem/pool/errors.hpp>
#include <llmmem/redundancy/errors.hpp>
#include <llmmem/refit/errors.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/errors.hpp>
#include <llmmem/tiering/errors.hpp>
#include <llmmem/transfer/errors.hpp>
#include <llmmem/version/errors.hpp>

#include <doctest/doctest.h>

#include <array>
#include <memory>
#include <string>
#include <type_traits>

using namespace llmmem;

namespace {

// Every refusal with distinct numbers, its whole text, and what raise() makes of it.
enum class raises { out_of_memory, handle_error, argument_error, length_error, io_error, comm_error };

struct refusal {
  error_code code;
  raises kind;
  const char* text;
};

constexpr failure refused(error_code code) {
  return {code, 7, 30, 12, "kv"};
}

constexpr std::array refusals{
    refusal{
        errc::out_of_blocks, raises::out_of_memory,
        "kv: 30 blocks needed, 12 free or evictable; release sequences, or build the cache with more blocks"},
    refusal{errc::out_of_sequences, raises::out_of_memory,
            "kv: all 12 sequences are in use; release one, or raise max_sequences"},
    refusal{errc::out_of_bytes, raises::out_of_memory,
            "kv: 30 bytes needed, but 12 left in its budget; release ranges, or raise the budget"},
    refusal{errc::sequence_full, raises::out_of_memory,
            "kv: sequence 7 would hold 30 tokens, more than the 12 allowed; raise max_sequence_tokens, or "
            "blocks"},
    refusal{errc::too_many_shares, raises::out_of_memory,
            "kv: block 7 has 12 references; 30 more could exceed the limit of 2^24 - 1; release some first"},
    refusal{errc::null_handle, raises::handle_error,
            "kv: null handle; it was never assigned, or was moved from"},
    refusal{errc::foreign_handle, raises::handle_error,
            "kv: the handle (slot 7) belongs to another object; use it with the object that made it"},
    refusal{errc::stale_handle, raises::handle_error,
            "kv: stale handle to slot 7 (generation 30, now 12): it was already released; keep one owner for "
            "each handle"},
    refusal{
        errc::double_free, raises::handle_error,
        "kv: double free: block 7 has no references left; release each reference once, through one owner"},
    refusal{errc::past_the_end, raises::argument_error,
            "kv: 30 tokens named, but sequence 7 holds 12; name fewer, or append them first"},
    refusal{errc::deferred_full, raises::out_of_memory,
            "kv: 30 deferred frees to queue, but space for only 12; call collect() once fences have passed, "
            "or raise max_deferred, or max_sequences (4 releases each)"},
    refusal{errc::size_mismatch, raises::argument_error, "kv: two lengths must be equal, but are 30 and 12"},
    refusal{errc::out_of_range, raises::argument_error, "kv: 30 requested, but the highest allowed is 12"},
    refusal{errc::bad_block_count, raises::length_error,
            "kv: 30 blocks asked for, but the pool allows 1 to 12; build it with a larger block_capacity to "
            "grow further"},
    refusal{errc::bad_budget, raises::length_error,
            "kv: a budget of 30 bytes asked for, but the pool allows two pages to 12 bytes; build it with a "
            "larger budget_capacity_bytes to grow further"},
    refusal{errc::unexpected_part, raises::argument_error,
            "kv: rank 7 sent a part of keys and values with 30 (plan, request, layer, token or share) where "
            "12 is "
            "expected; send and receive the same parts in the same order, by the same plan"},
    refusal{errc::old_weights, raises::argument_error,
            "kv: weights with number 30 cannot follow those with number 12; numbers ascend: give each refit "
            "the trainer's step"},
    refusal{errc::refit_abandoned, raises::comm_error,
            "kv: a rank could not take the weights with number 30, so no rank publishes them (12 ranks are "
            "out): all serve what they had; see the failure of that rank, shrink() if the epoch was revoked, "
            "and call again"},
    refusal{errc::other_base, raises::comm_error,
            "kv: rank 7 does not have the weights with number 30 that changes refer to, it has 12 or other "
            "bytes; send all with refit_sends::changes or all"},
    refusal{errc::other_refit, raises::comm_error,
            "kv: rank 7 sent a message of another refit (12 there, 30 here); make the plan from the same "
            "input on all ranks, and call with the same number"},
    refusal{errc::out_of_requests, raises::out_of_memory,
            "kv: all 12 requests are in use; finish one, or raise max_requests"},
    refusal{errc::step_pending, raises::argument_error,
            "kv: the last step, with 12 requests, is not completed; call completed() first"},
    refusal{errc::reentered, raises::argument_error,
            "kv: called from within one of its own calls; defer the work until that call returns"},
    refusal{errc::stale_plan, raises::argument_error,
            "kv: move 12 of the plan, block 7 to 30, is not possible: the source must be in use and the "
            "destination free; make a new plan"},
    refusal{errc::ring_busy, raises::out_of_memory,
            "kv: slot 7 of 12 is still in use; release it after the fence of its last kernel, or build more "
            "slots"},
    refusal{errc::layout_mismatch, raises::argument_error,
            "kv: the contents' fingerprints differ, 30 there, 12 here: different shape, element type, block "
            "size or model; nothing was copied"},
    refusal{errc::not_a_kv_stream, raises::argument_error,
            "kv: not a stream of keys and values of version 12 (the version read is 30); the rest of the "
            "stream is still unread: close the source, or skip to the end of the frame"},
    refusal{errc::damaged_stream, raises::argument_error,
            "kv: the stream is damaged at block 7 (0: block 0 or the header): its digest is wrong; send it "
            "again"},
    refusal{errc::missing_prefix, raises::argument_error,
            "kv: the stream omits 30 blocks, of which 12 are cached here; request the whole stream"},
    refusal{errc::stopped, raises::argument_error,
            "kv: the other side of the stream stopped; start the transfer again"},
    refusal{errc::bad_priority, raises::argument_error, "kv: priority 30 is out of range; use 0 to 12"},
    refusal{errc::empty_range, raises::argument_error,
            "kv: the range of tokens 30 to 12 is empty; its end must be larger than its first"},
    refusal{errc::listed_twice, raises::argument_error,
            "kv: sequence 7 is listed again at place 30 of a batch of 12; put its tokens into one entry"},
    refusal{errc::not_fresh, raises::argument_error,
            "kv: match needs a sequence without tokens, but sequence 7 holds 12; call match first, then "
            "append the rest"},
    refusal{errc::zero_bytes, raises::length_error, "kv: an allocation of 0 bytes; request at least 1"},
    refusal{errc::bad_alignment, raises::argument_error, "kv: alignment 30 is not a power of two"},
    refusal{errc::system_refused, raises::out_of_memory,
            "kv: the underlying memory refused 30 bytes (error 7), although the budget has 12 left; free "
            "memory elsewhere, or lower the budget"},
    refusal{errc::dead_range, raises::handle_error,
            "kv: the range of 30 bytes is not inside a live one; it was already deallocated, or belongs to "
            "another space"},
    refusal{errc::overlapping_ranges, raises::argument_error,
            "kv: source and destination of 30 bytes share 12; copy in parts"},
    refusal{errc::bad_granularity, raises::length_error,
            "kv: 30 bytes is not a multiple of the granularity, 12 bytes"},
    refusal{errc::table_full, raises::out_of_memory,
            "kv: a table of fixed size is full: 30 entries needed, 12 free; raise its max_ option"},
    refusal{errc::already_mapped, raises::argument_error,
            "kv: offset 30 of the range overlaps the mapping at offset 12; unmap that first"},
    refusal{errc::not_mapped, raises::argument_error,
            "kv: no mapping begins or ends at offset 30 of the range; unmap whole mappings that are there"},
    refusal{errc::still_mapped, raises::argument_error,
            "kv: 12 mappings prevent its release; unmap them first"},
    refusal{errc::reserve_refused, raises::out_of_memory,
            "kv: the system refused 30 bytes of address space (error 7); reserve less, or raise the limit "
            "(ulimit -v)"},
    refusal{errc::map_refused, raises::out_of_memory,
            "kv: the system refused to change the mapping of 30 bytes (error 7) with 12 mappings held; hold "
            "fewer, map larger pieces, or raise vm.max_map_count"},
    refusal{errc::out_of_group_blocks, raises::out_of_memory,
            "kv: group 7 needs 30 blocks, but 12 are available to it; release sequences, or build it with a "
            "larger budget"},
    refusal{errc::already_cached, raises::argument_error,
            "kv: block 7 is already cached with other contents; commit each block once, with the contents it "
            "held then"},
    refusal{errc::not_kept, raises::argument_error,
            "kv: group 7 no longer has the contents needed to continue after 30 tokens; cut to 12, or to the "
            "shorter length that nearest_cuts() returns, and compute the rest again"},
    refusal{errc::no_such_block, raises::argument_error,
            "kv: block 30 asked for, but the memory has 12, numbered from 0; build the memory with the "
            "cache's max_physical_blocks()"},
    refusal{errc::past_the_table, raises::argument_error,
            "kv: 30 blocks named, but sequence 7 holds 12; name at most that many"},
    refusal{errc::block_tokens_differ, raises::argument_error,
            "kv: blocks hold 30 tokens there and 12 here; build both with the same block_tokens"},
    refusal{errc::not_a_prefix, raises::argument_error,
            "kv: sequence 7 holds 30 tokens, but only the first 12 are a sound prefix: contents after them "
            "were invalidated, or tokens were removed; truncate it to 12 tokens and compute the rest again"},
    refusal{
        errc::not_whole_blocks, raises::argument_error,
        "kv: a range of sequence 7 begins or ends at token 30; use a multiple of 12, or the sequence's end"},
    refusal{errc::old_epoch, raises::argument_error,
            "kv: epoch 30 asked for, but the current epoch is 12; name a later one"},
    refusal{errc::cannot_remove, raises::argument_error,
            "kv: tokens 30 to 12 cannot be removed from group 7: its states include them, its chunks would "
            "begin elsewhere, or its window would reach dropped tokens or lose its sinks; compute the "
            "sequence again without them"},
    refusal{errc::epoch_differs, raises::argument_error,
            "kv: the stream belongs to epoch 30, the cache to 12; compute it again with the present weights"},
    refusal{errc::no_slots, raises::argument_error,
            "kv: tokens of group 7 take 30 bytes (0: its blocks are not rows of tokens), and the page size "
            "of 12 bytes is not a multiple, so slots cannot count them; choose a page_bytes that is one, or "
            "use write_table()"},
    refusal{errc::too_short, raises::argument_error, "kv: 30 entries needed, but 12 given; make it longer"},
    refusal{errc::past_the_bytes, raises::argument_error,
            "kv: bytes up to 30 requested, but it has 12; request fewer, or make it larger"},
    refusal{errc::read_failed, raises::io_error,
            "kv: read of 30 bytes at offset 12 failed: Argument list too long (errno 7)"},
    refusal{errc::write_failed, raises::io_error,
            "kv: write of 30 bytes at offset 12 failed: Argument list too long (errno 7)"},
    refusal{errc::sync_failed, raises::io_error,
            "kv: sync failed: Argument list too long (errno 7); earlier writes may be lost: write them again "
            "to another file"},
    refusal{errc::grow_failed, raises::io_error,
            "kv: allocation of 30 bytes at offset 12 failed: Argument list too long (errno 7)"},
    refusal{errc::file_ends, raises::io_error,
            "kv: bytes up to 30 requested, but the file ends at 12; it was truncated, or has not been "
            "written so far"},
    refusal{errc::file_locked, raises::io_error,
            "kv: another process, or another object in this one, holds the file; end that, or use another "
            "path: each rank and each tier needs its own"},
    refusal{
        errc::lease_lost, raises::io_error,
        "kv: the lease of the file ran out while this process was stopped, or is its parent's, and another "
        "process may have the file now; open it again, with a longer lease_ns"},
    refusal{errc::not_opened, raises::argument_error,
            "kv: it was opened only for reading; open it with open_mode::update or open_mode::create (a "
            "model_file_space is never written: adopt its contents, and keep changes in another buffer)"},
    refusal{errc::cancelled, raises::io_error, "kv: cancelled after 12 of 30 bytes"},
    refusal{errc::completion_lost, raises::io_error,
            "kv: the device did not answer for 30 bytes at offset 12; keep that memory unchanged until the "
            "queue is destroyed"},
    refusal{errc::dependency_failed, raises::io_error,
            "kv: it did not begin, because an operation before it failed"},
    refusal{errc::not_finished, raises::argument_error,
            "kv: it is not finished; wait for it before you ask for its outcome"},
    refusal{errc::damaged_encoding, raises::argument_error,
            "kv: the encoded bytes are damaged at block 7: 12 found, 30 expected; discard the decoded "
            "bytes, and fetch the encoded ones again"},
    refusal{errc::no_contents, raises::argument_error, "kv: chunk 7 has no contents; write all of it first"},
    refusal{errc::checksum_differs, raises::io_error,
            "kv: chunk 7 was read with checksum 12, but was written with 30; its bytes are damaged and not "
            "returned: restore them from another copy"},
    refusal{errc::timed_out, raises::io_error,
            "kv: chunk 7 of 30 bytes did not arrive within 12 ns; its transfer continues: ask again"},
    refusal{errc::chunk_leased, raises::argument_error,
            "kv: chunk 7 is leased 12 times; end these leases first"},
    refusal{errc::engine_failed, raises::io_error,
            "kv: the I/O engine failed: Argument list too long (errno 7); construct the queue again, or on "
            "posix_io"},
    refusal{
        errc::failures_kept, raises::out_of_memory,
        "kv: 12 failures are kept, the most that the options allow; read them, then call clear_failures()"},
    refusal{errc::no_such_key, raises::argument_error,
            "kv: no chunk has that key; create a chunk with it, and write that"},
    refusal{errc::key_taken, raises::argument_error,
            "kv: chunk 7 has that key; find() it, or remove it first"},
    refusal{errc::no_such_tensor, raises::argument_error,
            "kv: there is no tensor 7; the number of tensors is 12"},
    refusal{errc::no_such_part, raises::argument_error,
            "kv: tensor 7 has no part 30; its number of parts is 12"},
    refusal{errc::tensor_in_parts, raises::argument_error,
            "kv: tensor 7 has 12 parts; take them one by one, or by for_each_part"},
    refusal{errc::place_taken, raises::argument_error,
            "kv: bytes 30 to 11 of its range belong to another piece; name free bytes, or free the pieces "
            "there first (pieces take whole multiples of the granularity)"},
    refusal{errc::no_such_version, raises::argument_error,
            "kv: version 30 was never published, the newest is 12 (0: none); publish first"},
    refusal{
        errc::version_expired, raises::argument_error,
        "kv: version 30 was dropped, the oldest that is kept is 12 (0: none); pin it earlier, or keep more "
        "versions"},
    refusal{errc::version_pinned, raises::out_of_memory,
            "kv: version 30 is pinned 7 times, and none of the 12 slots is free; release it first, or give "
            "it more slots"},
    refusal{errc::peer_failed, raises::comm_error,
            "kv: rank 7 has died; revoke(), agree() and continue without it"},
    refusal{errc::epoch_revoked, raises::comm_error,
            "kv: epoch 12 was revoked: a rank has failed; agree() on which, and shrink()"},
    refusal{errc::no_quorum, raises::comm_error,
            "kv: 12 members are reachable, but 30 are needed: the others may live and continue; end this "
            "process, and join again"},
    refusal{errc::peer_timed_out, raises::comm_error,
            "kv: 12 of 30 bytes moved, then rank 7 did not respond before the deadline; give it more time, "
            "or revoke() and agree()"},
    refusal{errc::message_damaged, raises::comm_error,
            "kv: a message of rank 7 was sent with checksum 30 but arrived with 12; it is dropped: let the "
            "rank send it again"},
    refusal{
        errc::state_lost, raises::comm_error,
        "kv: 12 ranks are lost or have damaged state, and no other rank has the state of 30 of them (rank 7 "
        "is the lowest); call forget() on all ranks and return to a checkpoint, or use a stronger scheme"},
    refusal{errc::library_failed, raises::comm_error,
            "kv: the underlying library failed with its status 7; revoke(), agree() and continue with the "
            "ranks that are left"},
    refusal{errc::not_joined, raises::argument_error,
            "kv: it has not joined the others; call join() first, and check its result"},
    refusal{errc::seat_missing, raises::comm_error,
            "kv: seat 7 and 11 more are missing at the deadline: nothing has arrived from it; start its "
            "process, and give all processes the same folder or addresses"},
    refusal{errc::frame_forged, raises::comm_error,
            "kv: the connection to rank 7 carried a frame that its process did not send, or not at that "
            "time, and was closed; find the machine that writes into the network, then revoke(), agree() and "
            "continue without the rank"},
    refusal{errc::setup_differs, raises::argument_error,
            "kv: the setup of rank 7 differs from rank 0's (digests 12 and 30); give all ranks the same "
            "scheme, sizes, homes and placement"},
    refusal{errc::not_recovered, raises::argument_error,
            "kv: it has not recovered in epoch 30, only in epoch 12 (0: never); call recover() on all ranks "
            "when an epoch begins, and check its result"},
    refusal{errc::no_conversion, raises::argument_error,
            "kv: no kernel converts unknown to unknown; convert it before the call, or store it as unknown"},
    refusal{errc::misaligned, raises::argument_error,
            "kv: row 12 of part 7 is not aligned to 30 bytes, which its map promises; let the map's "
            "alignment() return less"},
    refusal{errc::lanes_differ, raises::argument_error,
            "kv: lanes 7 and 0 have different results for item 12; make combine() give the same result in "
            "any order"},
    refusal{
        errc::device_failed, raises::io_error,
        "kv: the device's runtime refused with status 7 (of CUDA 35 and 100: there is no driver or no "
        "device; "
        "209: nothing was compiled for that device, see CMAKE_CUDA_ARCHITECTURES; others: cudaGetErrorName); "
        "an earlier operation on that device may be the cause: run under compute-sanitizer, or with "
        "CUDA_LAUNCH_BLOCKING=1, to see where"},
    refusal{
        errc::no_device_code, raises::argument_error,
        "kv: the kernel needs compute capability 30 and was compiled for 12; set CMAKE_CUDA_ARCHITECTURES "
        "(nvcc -arch) to 30 or more"},
    refusal{errc::unsupported_layout, raises::argument_error,
            "kv: the kernel needs all tokens of a sequence; the layout holds the part of one of 12 "
            "context-parallel ranks (part.cp_size): have each rank make a part (paged_attention_part), "
            "and merge them"},
    refusal{errc::directory_unreachable, raises::comm_error,
            "kv: the server cannot be reached (errno 7; 0: no answer in time), so only blocks of this node's "
            "own tiers are found; start it, or correct its address in redis_options: the directory connects "
            "again by itself"},
    refusal{errc::directory_refused, raises::comm_error,
            "kv: the server refused a command or answered nonsense; it must be Redis 6.2 or newer, writable, "
            "and redis_options must give its password, user and database"},
    refusal{errc::directory_name_taken, raises::comm_error,
            "kv: another process has taken the name of seat 7, so this node announces no blocks until that "
            "process ends; give each pool its own redis_options::prefix"},
    refusal{errc::base_differs, raises::argument_error,
            "kv: the bytes are differences to another base, with checksum 30 and not 12; give the version "
            "that they were encoded with"},
    refusal{
        errc::mover_refused, raises::comm_error,
        "kv: the system refused 30 bytes of memory that other nodes can read (errno 7); give the mover fewer "
        "bytes, or the process a higher limit"},
    refusal{
        errc::mover_unreached, raises::comm_error,
        "kv: the memory of seat 7 cannot be read (errno 12; 71: its introduction is wrong, or of another "
        "mover), so its blocks come by message; for one-sided reads its process must have the same mover, "
        "user and PID namespace"},
    refusal{errc::mover_lane_differs, raises::comm_error,
            "kv: this is not the lane to seat 7 that the mover claims, so its blocks come by message; set "
            "ucx_options::lane to what UCX can use between the two"},
    refusal{errc::sparse_index_beyond, raises::comm_error,
            "kv: rank 7 has index 12 in its list, but the sum has 30 elements; give all ranks the same "
            "sizes"},
    refusal{errc::sparse_indices_unordered, raises::comm_error,
            "kv: rank 7 has index 12 after 30 in its list; list each element once, in ascending order"},
};

}  // namespace

TEST_CASE(
    "every refusal names the object, the problem and the numbers, and raises its kind of exception with that "
    "text") {
  // A new code that has no row here fails: the table is as long as the numbers.
  REQUIRE(refusals.size() == std::size_t{last_error_number});
  for (const auto& [code, kind, text] : refusals) {
    CAPTURE(text);
    const failure why = refused(code);
    CHECK(why.message() == text);
    switch (kind) {
      case raises::out_of_memory:
        CHECK_THROWS_WITH_AS(why.raise(), text, out_of_memory);
        break;
      case raises::handle_error:
        CHECK_THROWS_WITH_AS(why.raise(), text, handle_error);
        break;
      case raises::argument_error:
        CHECK_THROWS_WITH_AS(why.raise(), text, argument_error);
        break;
      case raises::length_error:
        CHECK_THROWS_WITH_AS(why.raise(), text, length_error);
        break;
      case raises::io_error:
        CHECK_THROWS_WITH_AS(why.raise(), text, io_error);
        break;
      case raises::comm_error:
        CHECK_THROWS_WITH_AS(why.raise(), text, comm_error);
        break;
    }
  }
}

TEST_CASE("a code for chunks and tensors names which of both it is about") {
  CHECK(failure{.code = errc::no_contents, .index = 7, .wanted = 1, .where = "kv"}.message() ==
        "kv: tensor 7 has no contents; write all of it first");
  CHECK(failure{.code = errc::chunk_leased, .index = 7, .wanted = 1, .found = 2, .where = "kv"}.message() ==
        "kv: tensor 7 is leased 2 times; end these leases first");
}

TEST_CASE("a full table is named, and the option that makes it larger") {
  const auto text = [](full_table which) {
    return failure{errc::table_full, static_cast<std::uint32_t>(which), 2, 0, "kv"}.message();
  };
  CHECK(text(full_table::only_table) ==
        "kv: a table of fixed size is full: 2 entries needed, 0 free; raise its max_ option");
  CHECK(text(full_table::chunks) ==
        "kv: the table of chunks is full: 2 entries needed, 0 free; raise tiered_options::max_chunks");
  CHECK(text(full_table::pieces) ==
        "kv: the table of pieces is full: 2 entries needed, 0 free; raise tier_place::max_pieces");
  CHECK(text(full_table::keyed_chunks) ==
        "kv: the index of chunks with keys is full: 2 entries needed, 0 free; raise "
        "persistent_file_options::max_chunks");
}

TEST_CASE("a timeout names the awaited rank, and the bytes that moved if there were any to move") {
  CHECK(failure{errc::peer_timed_out, 7, 0, 0, "kv"}.message() ==
        "kv: rank 7 did not respond before the deadline; call again with more time, or revoke() and agree()");
  CHECK(failure{errc::peer_timed_out, 7, 1, 0, "kv"}.message() ==
        "kv: 0 of 1 bytes moved, then rank 7 did not respond before the deadline; give it more time, or "
        "revoke() and agree()");
}

TEST_CASE("a missing seat is named, with the reason and how to resolve it") {
  const auto text = [](seat_absence why) {
    return failure{errc::seat_missing, 2, static_cast<std::uint64_t>(why), 1, "job"}.message();
  };
  const std::string begins = "job: seat 2 is missing at the deadline: ";
  CHECK(text(seat_absence::no_contact) == begins +
                                              "nothing has arrived from it; start its process, and give all "
                                              "processes the same folder or addresses");
  CHECK(text(seat_absence::no_listener) == begins +
                                               "no process listens at its address; start its process, and "
                                               "give all processes the same folder or addresses");
  CHECK(text(seat_absence::unreachable) ==
        begins +
            "its address cannot be reached; check the network, and give all processes the right addresses");
  CHECK(text(seat_absence::no_answer) ==
        begins + "its process is connected but silent; let it call join(), or check why it is stopped");
  CHECK(text(seat_absence::other_secret) ==
        begins + "the process there has another secret; give all processes the same secret");
  CHECK(text(seat_absence::other_version) == begins +
                                                 "the process there speaks another version of the protocol; "
                                                 "build all processes with the same llmmem");
  CHECK(
      text(seat_absence::other_options) ==
      begins +
          "its process has another number of seats or other frame_bytes; give all processes the same values");
  CHECK(text(seat_absence::other_seat) == begins +
                                              "its address or this one's belongs to another seat; give all "
                                              "processes the same addresses, in the same order");
  CHECK(text(seat_absence::foreign) == begins +
                                           "only foreign processes are there; run all processes as one user, "
                                           "and give them the right addresses");
  CHECK(text(seat_absence::seat_taken) == begins +
                                              "it considers this seat taken by an earlier process; end that "
                                              "process, or wait until it is dead or suspected");
  CHECK(text(seat_absence::given_up) ==
        begins + "it has given this process up; end this process, and start a fresh one");
  CHECK(text(seat_absence::ended) == begins + "its process came and has ended; start a fresh one");
  CHECK(text(seat_absence::in_epoch) ==
        begins +
            "its process is in an epoch that began without this one; let its members agree() and admit()");
}

TEST_CASE("a failure of an object without a name names the library") {
  CHECK(failure{}.message() == "llmmem: no failure");
  CHECK(failure{.code = errc::out_of_bytes, .wanted = 2, .found = 1}.message() ==
        "llmmem: 2 bytes needed, but 1 left in its budget; release ranges, or raise the budget");
  CHECK(failure{.code = errc::system_refused, .wanted = 2, .found = 9}.message() ==
        "llmmem: the underlying memory refused 2 bytes, although the budget has 9 left; free memory "
        "elsewhere, or lower the budget");
}

TEST_CASE("a code this version does not know still prints") {
  const failure later{.code = detail::code_numbered(200), .where = "kv"};
  CHECK(later.message() == "kv: unknown failure 200");
  CHECK_THROWS_WITH_AS(later.raise(), "kv: unknown failure 200", argument_error);
}

TEST_CASE("failures are equal if their reasons and numbers are, regardless of the object that refused") {
  const failure one{errc::stale_handle, 7, 30, 12, "one"};
  CHECK(one == failure{errc::stale_handle, 7, 30, 12, "other"});
  CHECK(one != failure{errc::foreign_handle, 7, 30, 12, "one"});
  CHECK(one != failure{errc::stale_handle, 8, 30, 12, "one"});
  CHECK(one != failure{errc::stale_handle, 7, 31, 12, "one"});
  CHECK(one != failure{errc::stale_handle, 7, 30, 13, "one"});
}

TEST_CASE("a result with a value returns it, and no failure") {
  result<int> five = 5;
  CHECK(five);
  CHECK(five.has_value());
  CHECK(*five == 5);
  CHECK(five.value() == 5);
  CHECK(five.code() == errc::ok);
  CHECK(five.error() == failure{});
  *five = 6;
  CHECK(std::as_const(five).value() == 6);
  CHECK(*std::as_const(five) == 6);
}

TEST_CASE("a result without a value keeps its failure and throws it from value()") {
  result<int> none = refused(errc::out_of_blocks);
  const char* const text =
      "kv: 30 blocks needed, 12 free or evictable; release sequences, or build the cache with more blocks";
  CHECK_FALSE(none);
  CHECK_FALSE(none.has_value());
  CHECK(none.code() == errc::out_of_blocks);
  CHECK(none.error() == refused(errc::out_of_blocks));
  CHECK_THROWS_WITH_AS(static_cast<void>(none.value()), text, out_of_memory);
  CHECK_THROWS_WITH_AS(static_cast<void>(std::as_const(none).value()), text, out_of_memory);
  CHECK_THROWS_WITH_AS(static_cast<void>(std::move(none).value()), text, out_of_memory);
}

TEST_CASE("a result passes on values that can only be moved") {
  result<std::unique_ptr<int>> held = std::make_unique<int>(5);
  CHECK(**held == 5);
  CHECK(*held->get() == 5);
  CHECK(*std::as_const(held)->get() == 5);
  const std::unique_ptr<int> taken = *std::move(held);
  CHECK(*taken == 5);
  CHECK(*result<std::unique_ptr<int>>(std::make_unique<int>(6)).value() == 6);
}

TEST_CASE("a result<void> is a success, or says why not") {
  const result<void> done;
  CHECK(done);
  CHECK(done.has_value());
  CHECK(done.error() == failure{});
  CHECK_NOTHROW(done.value());

  const result<void> undone = refused(errc::null_handle);
  CHECK_FALSE(undone);
  CHECK_FALSE(undone.has_value());
  CHECK(undone.error() == refused(errc::null_handle));
  CHECK_THROWS_WITH_AS(undone.value(), "kv: null handle; it was never assigned, or was moved from",
                       handle_error);
}

TEST_CASE("results work in constant expressions, and convert to bool only explicitly") {
  static_assert(*result<int>(5) == 5);
  static_assert(!result<int>(refused(errc::out_of_bytes)));
  static_assert(!std::is_convertible_v<result<int>, bool>);
  static_assert(!std::is_convertible_v<result<void>, bool>);
}
