/// @file
/// The texts of failures, and the exceptions that they call for.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/failure.hpp>
#include <llmmem/model/dtype.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <system_error>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// Why a seat is missing, and what helps.
[[nodiscard]] LLMMEM_COLD constexpr const char* absence_sentence(seat_absence why) noexcept {
  switch (why) {
    case seat_absence::unheard:
      return "nothing has come from there; start its process, and give all the same folder or addresses";
    case seat_absence::nobody_listens:
      return "nobody listens at its address; start its process, and give all the same folder or addresses";
    case seat_absence::unreachable:
      return "its address cannot be reached; look at the network, and give all the right addresses";
    case seat_absence::no_answer:
      return "its process is there and says nothing; have it call join(), or look at why it stands still";
    case seat_absence::other_secret:
      return "who is there has another secret; give all processes the same";
    case seat_absence::other_version:
      return "who is there speaks another version of the protocol; build all processes with the same llmmem";
    case seat_absence::other_options:
      return "its process has another number of seats or other frame_bytes; give all the same";
    case seat_absence::other_seat:
      return "its address is another seat's, or this one's is; give all the same addresses, in one order";
    case seat_absence::foreign:
      return "only strangers are there; run all processes as one user, and give all the right addresses";
    case seat_absence::seat_taken:
      return "it holds this seat for taken by a process before; end that, or wait until it is dead or "
             "suspected";
    case seat_absence::given_up:
      return "it has given this process up; end this one, and start a fresh one";
    case seat_absence::ended:
      return "its process has come and is gone again; start a fresh one";
    case seat_absence::in_epoch:
      return "its process is in an epoch that has begun without this one; have its members agree() and "
             "admit()";
  }
  return absence_sentence(seat_absence::unheard);
}

/// Which table is full, and what makes it larger.
[[nodiscard]] LLMMEM_COLD constexpr const char* table_sentence(full_table which) noexcept {
  switch (which) {
    case full_table::some:
      break;
    case full_table::chunks:
      return "the table of chunks is full: {wanted} entries needed, {found} free; raise "
             "tiered_options::max_chunks";
    case full_table::pieces:
      return "the table of pieces is full: {wanted} entries needed, {found} free; raise "
             "tier_place::max_pieces";
    case full_table::keyed_chunks:
      return "the index of chunks with keys is full: {wanted} entries needed, {found} free; raise "
             "persistent_file_options::max_chunks";
  }
  return "a table of fixed size is full: {wanted} entries needed, {found} free; raise the max_ option for it";
}

/// What a failure says behind who it is. In braces stand its numbers, and what `failure_term` makes of them.
[[nodiscard]] LLMMEM_COLD constexpr const char* sentence_of(const failure& why) noexcept {
  switch (why.code) {
    case errc::ok:
      return "no failure";
    case errc::out_of_blocks:
      return "{wanted} blocks needed, {found} free or evictable; release sequences, or build it with more "
             "blocks";
    case errc::out_of_sequences:
      return "all {found} sequences are alive; release one, or raise max_sequences";
    case errc::out_of_requests:
      return "all {found} requests are known; finish one, or raise max_requests";
    case errc::step_pending:
      return "the last step, of {found} requests, is not completed; call completed() first";
    case errc::reentered:
      return "called from within one of its own calls; remember what to do, and do it when that returns";
    case errc::out_of_bytes:
      return why.index == 1
                 ? "{wanted} bytes needed in one piece, it never has more than {found}; raise its budget, or "
                   "ask for less at once"
                 : "{wanted} bytes needed, {found} left of its budget; give ranges back, or raise it";
    case errc::sequence_full:
      return "sequence {index} would hold {wanted} tokens, the most is {found}; raise max_sequence_tokens, "
             "or blocks";
    case errc::too_many_shares:
      return "block {index} has {found} references; {wanted} more could pass the most there may be, 2^24 - 1";
    case errc::null_handle:
      return "null handle; it was never given a value, or was moved from";
    case errc::foreign_handle:
      return "the handle (slot {index}) was given out by another object; ask the one that made it";
    case errc::stale_handle:
      return "stale handle to slot {index} (generation {wanted}, now {found}): it was released before; keep "
             "one owner for each handle";
    case errc::double_free:
      return "double free: block {index} has no references left; release each reference once, through one "
             "owner";
    case errc::past_the_end:
      return "{wanted} tokens named, sequence {index} holds {found}; name fewer, or append them first";
    case errc::deferred_full:
      return "{wanted} deferred frees to queue, room for {found}; call collect() once fences have passed, or "
             "raise max_deferred, or max_sequences (4 releases each)";
    case errc::size_mismatch:
      return "lengths that must agree are {wanted} and {found}";
    case errc::out_of_range:
      return "{wanted} asked for, the most is {found}";
    case errc::bad_block_count:
      return "{wanted} blocks asked for, allowed are 1 to {found}; build it with a larger most_blocks to "
             "grow further";
    case errc::bad_priority:
      return "priority {wanted}; allowed are 0 to {found}";
    case errc::empty_range:
      return "tokens {wanted} to {found} are none; the end lies behind the first";
    case errc::listed_twice:
      return "sequence {index} stands a second time at place {wanted} of a batch of {found}; put its tokens "
             "into one entry";
    case errc::ring_busy:
      return "slot {index} of {found} is still in use; release it behind the fence of its last kernel, or "
             "build more slots";
    case errc::layout_mismatch:
      return "the contents' fingerprints differ, {wanted} there, {found} here: other shape, element type, "
             "block size or model; nothing was taken";
    case errc::foreign_stream:
      return "not a stream of keys and values of version {found} (the version read is {wanted}); after a "
             "refusal the rest of a stream is still to come";
    case errc::damaged_stream:
      return "the stream is damaged at block {index} (0: or before): its digest is wrong; send it again";
    case errc::missing_prefix:
      return "the stream leaves out {wanted} blocks, of which {found} are cached here; ask for the whole";
    case errc::stopped:
      return "the other side of the stream stopped";
    case errc::stale_plan:
      return "move {found} of the plan, of block {index} to {wanted}, is not possible: the one must be in "
             "use, the other free; plan anew";
    case errc::not_fresh:
      return "match needs a sequence without tokens, sequence {index} holds {found}; match first, then "
             "append the rest";
    case errc::zero_bytes:
      return "an allocation of 0 bytes; ask for at least 1";
    case errc::bad_alignment:
      return "alignment {wanted} is not a power of two";
    case errc::system_refused:
      return why.index == 0 ? "the memory beneath it refused {wanted} bytes, though its budget has {found} "
                              "left; free memory elsewhere, or lower the budget"
                            : "the memory beneath it refused {wanted} bytes (error {index}), though its "
                              "budget has {found} left; free memory elsewhere, or lower the budget";
    case errc::dead_range:
      return "the range of {wanted} bytes is not inside a live one; it was deallocated before, or another "
             "space gave it out";
    case errc::overlapping_ranges:
      return "source and destination of {wanted} bytes share {found}; copy in parts";
    case errc::bad_granularity:
      return "{wanted} bytes is no multiple of the granularity, {found} bytes";
    case errc::table_full:
      return table_sentence(static_cast<full_table>(why.index));
    case errc::already_mapped:
      return "offset {wanted} of the range is in the way of the mapping at offset {found}; unmap that first";
    case errc::not_mapped:
      return "no mapping begins or ends at offset {wanted} of the range; unmap whole mappings that are there";
    case errc::still_mapped:
      return "{found} mappings keep it from being given back; unmap them first";
    case errc::reserve_refused:
      return "the system refused {wanted} bytes of address space (error {index}); reserve less, or raise the "
             "limit (ulimit -v)";
    case errc::map_refused:
      return "the system refused to change the mapping of {wanted} bytes (error {index}) with {found} "
             "mappings held; hold fewer, map larger pieces, or raise vm.max_map_count";
    case errc::out_of_group_blocks:
      return "group {index} needs {wanted} blocks, {found} can be had for it; release sequences, or build it "
             "with a larger budget";
    case errc::already_cached:
      return "block {index} is cached for other contents; commit each block once, and what it held then";
    case errc::not_kept:
      return "group {index} no longer has what comes next after {wanted} tokens; cut to {found}, or to the "
             "length below that nearest_cuts() names, and compute the rest again";
    case errc::no_such_block:
      return "block {wanted} asked for, there are {found} from 0 on; give the memory as many as the cache's "
             "most_physical_blocks()";
    case errc::past_the_table:
      return "{wanted} blocks named, sequence {index} holds {found}; name as many at most";
    case errc::too_short:
      return "{wanted} entries needed, {found} given; make it longer";
    case errc::block_tokens_differ:
      return "blocks of {wanted} tokens there, of {found} here; build both with the same block_tokens";
    case errc::past_the_bytes:
      return "bytes up to {wanted} asked for, there are {found}; ask for fewer, or make it larger";
    case errc::read_failed:
      return "read of {place}{cause}";
    case errc::write_failed:
      return "write of {place}{cause}";
    case errc::sync_failed:
      return "sync{cause}; what was written before may be lost: write it again elsewhere";
    case errc::grow_failed:
      return "room for {place}{cause}";
    case errc::file_ends:
      return "bytes up to {wanted} asked for, the file ends at {found}; it was cut short, or never written "
             "so far";
    case errc::file_locked:
      return "another process holds the file; end that, or take another path";
    case errc::not_opened:
      return "it was opened only to be read; open it with open_mode::update or open_mode::create (a "
             "model_file_space is never written to: adopt what lies there, and keep what changes in another "
             "buffer)";
    case errc::cancelled:
      return "cancelled after {found} of {wanted} bytes";
    case errc::completion_lost:
      return "the device never answered for {place}; keep that memory as it is until the queue is gone";
    case errc::dependency_failed:
      return "it did not begin: what it was to come after failed";
    case errc::not_finished:
      return "not finished yet; wait for it before asking how it went";
    case errc::damaged_encoding:
      return "the encoded bytes are damaged at block {index}: {wanted} must be there, found {found}; nothing "
             "decoded from them may be used, fetch them again";
    case errc::no_contents:
      return "{chunk} has no contents; write all of it first";
    case errc::checksum_differs:
      return "chunk {index} came back with checksum {found}, it left with {wanted}; its bytes are damaged "
             "and are not handed out";
    case errc::timed_out:
      return "chunk {index} of {wanted} bytes was not there after {found} ns; it goes on being brought in: "
             "ask again";
    case errc::chunk_leased:
      return "{chunk} is leased {found} times; end these leases first";
    case errc::engine_failed:
      return "the I/O engine{cause}; build the queue anew, or on posix_io";
    case errc::failures_kept:
      return "{found} failures are kept, as many as may be; look at what failed, then call clear_failures()";
    case errc::no_such_key:
      return "no chunk has that key; create it, and write it";
    case errc::key_taken:
      return "chunk {index} has that key; find() it, or remove it first";
    case errc::no_such_tensor:
      return "tensor {index} asked for, there are {found} from 0 on";
    case errc::no_such_part:
      return "part {wanted} of tensor {index} asked for, it has {found} from 0 on";
    case errc::tensor_in_parts:
      return "tensor {index} lies in {found} parts; take them one by one, or by for_each_part";
    case errc::place_taken:
      return "bytes {wanted} to {last} of its range are another's; name bytes that nobody has, or end what "
             "has them first (pieces take whole multiples of the granularity)";
    case errc::no_such_version:
      return "version {wanted} was never published, the newest is {found} (0: none); publish first";
    case errc::version_gone:
      return "version {wanted} is gone, the oldest that is kept is {found} (0: none); pin it earlier, or "
             "keep more versions";
    case errc::version_pinned:
      return "version {wanted} is pinned {index} times, and none of the {found} slots is free; release it "
             "first, or give it more slots";
    case errc::peer_failed:
      return "rank {index} has died; revoke(), agree() and go on without it";
    case errc::epoch_revoked:
      return "epoch {found} was revoked: a rank has failed; agree() on which, and shrink()";
    case errc::no_quorum:
      return "{found} members are heard, {wanted} are needed: the others may live and go on; end here, and "
             "join anew";
    case errc::peer_timed_out:
      return why.wanted == 0 ? "rank {index} was waited for beyond the deadline; call again with more time, "
                               "or revoke() and agree()"
                             : "{found} of {wanted} bytes moved, then rank {index} was waited for beyond the "
                               "deadline; give it more time, or revoke() and agree()";
    case errc::message_damaged:
      return "a message of rank {index} has checksum {found} and left with {wanted}; it is dropped: have it "
             "sent again";
    case errc::state_lost:
      return "{found} ranks are gone or hold their state damaged, and nobody else has that of {wanted} of "
             "them, rank {index} the lowest; forget() on all ranks and go back to a checkpoint, or take a "
             "stronger scheme";
    case errc::library_failed:
      return "the library beneath failed with its status {index}; revoke(), agree() and go on with who is "
             "left";
    case errc::not_joined:
      return "it has not joined the others; call join() first, and look at what it returns";
    case errc::seat_missing:
      return why.found > 1 ? "seat {index} is missing at the deadline, and {others} more: {absence}"
                           : "seat {index} is missing at the deadline: {absence}";
    case errc::setup_differs:
      return "rank {index} is set up otherwise than rank 0 (digests {found} and {wanted}); give all ranks "
             "the same scheme, sizes, homes and placement";
    case errc::not_recovered:
      return "it has not recovered in epoch {wanted}, last in epoch {found} (0: never); call recover() on "
             "all ranks when an epoch begins, and look at what it returns";
    case errc::no_conversion:
      return "no kernel makes {wanted type} of {found type}; convert before, or keep what comes as it is";
    case errc::misaligned:
      return "row {found} of part {index} is not aligned to {wanted} bytes, as its map says; have its "
             "alignment() say less";
    case errc::lanes_differ:
      return "lane {index} has come to another result for item {found} than lane 0; have combine() come to "
             "the same in any order";
    case errc::device_failed:
      return "the device's runtime refused with status {index} (of CUDA 35 and 100: there is no driver or no "
             "device; 209: nothing was compiled for that device, see CMAKE_CUDA_ARCHITECTURES; others: "
             "cudaGetErrorName); it may tell of what went wrong before on that device: run under "
             "compute-sanitizer, or with CUDA_LAUNCH_BLOCKING=1, to see where";
    case errc::no_device_code:
      return "the kernel needs compute capability {wanted} and was compiled for {found}; set "
             "CMAKE_CUDA_ARCHITECTURES (nvcc -arch) to {wanted} or more";
  }
  return "unknown failure {code}";
}

/// The system's error of a file's failure.
[[nodiscard]] LLMMEM_COLD inline std::string failed_because(std::uint32_t error_number) {
  if (error_number == 0) return " failed: the system moved nothing, and called it a success";
  return " failed: " + std::generic_category().message(static_cast<int>(error_number)) + " (errno " +
         std::to_string(error_number) + ")";
}

/// What stands for a name in braces.
[[nodiscard]] LLMMEM_COLD inline std::string failure_term(const failure& why, std::string_view name) {
  const auto type = [](std::uint64_t number) { return std::string(name_of(static_cast<dtype>(number))); };
  if (name == "wanted") return std::to_string(why.wanted);
  if (name == "found") return std::to_string(why.found);
  if (name == "index") return std::to_string(why.index);
  if (name == "place") return std::to_string(why.wanted) + " bytes at offset " + std::to_string(why.found);
  if (name == "cause") return failed_because(why.index);
  if (name == "chunk") return (why.wanted == 1 ? "tensor " : "chunk ") + std::to_string(why.index);
  if (name == "last" || name == "others") return std::to_string(why.found - 1);
  if (name == "absence") return absence_sentence(static_cast<seat_absence>(why.wanted));
  if (name == "wanted type") return type(why.wanted);
  if (name == "found type") return type(why.found);
  return std::to_string(static_cast<unsigned>(why.code));
}

}  // namespace detail

inline std::string failure::message() const {
  std::string text(where.empty() ? std::string_view("llmmem") : where.view());
  text += ": ";
  std::string_view left = detail::sentence_of(*this);
  while (!left.empty()) {
    const std::size_t plain = left.find('{');
    text += left.substr(0, plain);
    if (plain == std::string_view::npos) break;
    const std::size_t end = left.find('}', plain);
    text += detail::failure_term(*this, left.substr(plain + 1, end - plain - 1));
    left.remove_prefix(end + 1);
  }
  return text;
}

inline void failure::raise() const {
  switch (code) {
    case errc::out_of_blocks:
    case errc::out_of_sequences:
    case errc::out_of_requests:
    case errc::ring_busy:
    case errc::out_of_bytes:
    case errc::sequence_full:
    case errc::too_many_shares:
    case errc::deferred_full:
    case errc::system_refused:
    case errc::table_full:
    case errc::failures_kept:
    case errc::reserve_refused:
    case errc::map_refused:
    case errc::out_of_group_blocks:
    case errc::version_pinned:
      throw out_of_memory(message());
    case errc::null_handle:
    case errc::foreign_handle:
    case errc::stale_handle:
    case errc::double_free:
    case errc::dead_range:
      throw handle_error(message());
    case errc::zero_bytes:
    case errc::bad_block_count:
    case errc::bad_granularity:
      throw length_error(message());
    case errc::read_failed:
    case errc::write_failed:
    case errc::sync_failed:
    case errc::grow_failed:
    case errc::file_ends:
    case errc::file_locked:
    case errc::completion_lost:
    case errc::dependency_failed:
    case errc::cancelled:
    case errc::checksum_differs:
    case errc::timed_out:
    case errc::engine_failed:
    case errc::device_failed:
      throw io_error(message());
    case errc::peer_failed:
    case errc::epoch_revoked:
    case errc::no_quorum:
    case errc::peer_timed_out:
    case errc::message_damaged:
    case errc::state_lost:
    case errc::library_failed:
    case errc::seat_missing:
      throw comm_error(message());
    default:
      throw argument_error(message());
  }
}

}  // namespace v0
}  // namespace llmmem
