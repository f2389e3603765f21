/// @file
/// `result<T>`: what a `noexcept` operation returns, a value or a `failure` with the shortage in it.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <system_error>
#include <type_traits>
#include <utility>

namespace llmmem::inline v0 {

/// Why an operation was refused. The object it was refused by is as it was.
///
/// The numbers are written into journals: new reasons come last.
enum class errc : std::uint8_t {
  ok = 0,
  out_of_blocks,     ///< wanted = blocks needed, found = blocks that could be had
  out_of_sequences,  ///< found = sequences alive, all the options allow
  out_of_requests,   ///< found = requests known, all the options allow
  step_pending,      ///< a step is out that has not been completed: found = requests in it
  out_of_bytes,      ///< wanted = bytes needed, found = bytes left; index = 1 where they can never be had:
                     ///< found = the most that can
  sequence_full,    ///< index = sequence slot, wanted = tokens it would hold, found = the most a sequence may
  too_many_shares,  ///< index = block, wanted = references to add at most, found = those it has
  null_handle,      ///< a default-constructed handle
  foreign_handle,   ///< a handle that another object gave out
  stale_handle,     ///< index = slot, wanted = the handle's generation, found = the slot's generation now
  double_free,      ///< index = block: released already, nobody holds it
  past_the_end,     ///< index = sequence slot, wanted = tokens named, found = tokens it holds
  deferred_full,    ///< the ring of deferred frees: wanted = references to add, found = room
  size_mismatch,    ///< lengths that must agree: wanted = one, found = the other
  out_of_range,     ///< wanted = number asked for, found = the highest there is
  bad_block_count,  ///< a size for a pool: wanted = blocks asked for, found = the most it was built for
  bad_priority,     ///< wanted = the priority, found = the highest
  empty_range,      ///< a range of tokens without tokens: wanted = first, found = end
  listed_twice,     ///< index = sequence slot: the same sequence twice in a batch, wanted = at what place
  ring_busy,        ///< index = slot whose turn it is, found = slots there are: it is held or in flight
  layout_mismatch,  ///< fingerprints of contents: wanted = theirs, found = ours
  foreign_stream,   ///< not a stream of ours: wanted = its version, found = the one understood
  damaged_stream,   ///< index = block, or 0 for the header
  missing_prefix,   ///< wanted = blocks that must be cached here, found = those that are
  stopped,          ///< whoever gives or takes bytes would not go on
  stale_plan,       ///< index = source block, wanted = destination block, found = number of the move
  not_fresh,        ///< `match` on a sequence that already holds tokens: found = how many
  zero_bytes,       ///< an allocation of nothing
  bad_alignment,    ///< wanted = the alignment, which is not a power of two
  system_refused,   ///< wanted = bytes asked of what lies beneath, found = bytes left of the budget,
                    ///< index = the system's error number, 0 when it tells none
  dead_range,       ///< wanted = bytes of a range that is not inside a live one
  overlapping_ranges,   ///< wanted = bytes to copy, found = bytes that source and destination share
  bad_granularity,      ///< wanted = the size or offset, found = what it must be a multiple of
  table_full,           ///< a table of fixed size: wanted = entries needed, found = entries free,
                        ///< index = which (`full_table`)
  already_mapped,       ///< wanted = offset in the range, found = offset of the mapping in the way
  not_mapped,           ///< wanted = offset in the range where no mapping begins, or one goes on
  still_mapped,         ///< found = mappings that keep it from being given back
  reserve_refused,      ///< index = the system's error number, wanted = bytes of address space
  map_refused,          ///< index = the system's error number, wanted = bytes, found = mappings held
  out_of_group_blocks,  ///< index = group of layers, wanted = blocks it needs, found = blocks it could have
  already_cached,       ///< index = block: it is cached for other contents than were to be committed
  reentered,            ///< called by a callback of the call that is under way
  not_kept,             ///< index = group of layers that no longer has what comes next after
                        ///< wanted = tokens to cut to, found = the fewest above them that all still have
  no_such_block,        ///< wanted = block asked for, found = blocks there are, the null block among them
  past_the_table,       ///< index = sequence slot, wanted = blocks named, found = blocks it holds
  too_short,            ///< a buffer, named in `where`: wanted = entries needed, found = entries given
  block_tokens_differ,  ///< tokens a block: wanted = of the stream or memory, found = of the cache
  past_the_bytes,       ///< wanted = end of the bytes asked for, found = bytes there are
  // Of files: index = the system's error number, wanted = bytes, found = offset, where = the path
  read_failed,
  write_failed,
  sync_failed,  ///< bytes written before may not have reached the device
  grow_failed,  ///< room for wanted bytes from offset found on could not be had
  file_ends,    ///< wanted = end of the bytes asked for, found = where the file ends
  file_locked,  ///< another process holds the file
  not_opened,   ///< the file was opened only to be read
  // Of transfers
  cancelled,          ///< wanted = bytes to move, found = bytes moved before
  completion_lost,    ///< wanted = bytes, found = offset: the device never answered
  dependency_failed,  ///< what it was to come after failed; it did not begin
  not_finished,       ///< its outcome was asked for before it was there
  damaged_encoding,   ///< not what a codec writes: index = block of the chunk, wanted = what must be there,
                      ///< found = what is
  // Of chunks: index = the chunk's slot; of the first and last also a tensor's number, wanted = 1 then
  no_contents,       ///< nothing was ever written to it, or it was discarded
  checksum_differs,  ///< wanted = the checksum it left with, found = of what came back
  timed_out,         ///< wanted = bytes that had to be brought in, found = nanoseconds waited
  chunk_leased,      ///< found = leases that are in the way
  // Of queues
  engine_failed,  ///< index = the system's error number: it refused what the engine itself asked of it
  failures_kept,  ///< found = failures kept and not cleared, all that the options allow
  // Of chunks with keys
  no_such_key,  ///< no chunk has that key
  key_taken,    ///< index = slot of the chunk that has it
  // Of tensors: index = the tensor's number
  no_such_tensor,   ///< found = tensors there are
  no_such_part,     ///< wanted = part asked for, found = parts it has
  tensor_in_parts,  ///< found = parts it has, of which only one at a time can be had
  // Of places in a range
  place_taken,  ///< wanted = the first byte asked for that another piece has, found = end of such bytes
  // Of versions
  no_such_version,  ///< wanted = version asked for, found = the newest, 0 when there is none
  version_gone,     ///< wanted = version asked for, found = the oldest there is
  version_pinned,   ///< wanted = the version whose slot is needed, index = its pins, found = slots there are
  // Of ranks
  peer_failed,      ///< index = the rank, or below a communicator the seat, that has died
  epoch_revoked,    ///< found = the epoch, which somebody has ended
  no_quorum,        ///< wanted = members that must be heard, found = those that are
  peer_timed_out,   ///< index = rank or seat waited for, wanted = bytes to move, found = bytes moved
  message_damaged,  ///< index = rank that sent it, wanted = its checksum, found = that of what came
  state_lost,       ///< index = the lowest rank whose state is lost, wanted = such ranks, found = ranks lost
  library_failed,   ///< a library beneath, `where` says which call and why: index = its status
  not_joined,       ///< asked of a communicator that is no member of an epoch as yet
};

/// The last reason there is: what a reader of stored ones holds them to.
inline constexpr errc last_errc = errc::not_joined;

/// Which table is full, and so which option makes it larger: the index of `errc::table_full`.
enum class full_table : std::uint32_t {
  some,         ///< the text names the object, which has one
  chunks,       ///< of a tiered buffer, clones among them: `tiered_options::max_chunks`
  pieces,       ///< of a tier, its gaps among them: `tier_place::max_pieces`
  keyed_chunks  ///< of a persistent tier: `persistent_file_options::max_chunks`
};

/// A refusal: its reason, the two numbers that show it, and who refused.
struct failure {
  errc code = errc::ok;
  std::uint32_t index = 0;   ///< block or sequence slot, where the reason names one
  std::uint64_t wanted = 0;  ///< see `errc`
  std::uint64_t found = 0;   ///< see `errc`
  const char* where = "";    ///< name given to the object at construction; valid until that is moved from or
                             ///< destroyed: take `message()` before

  /// One sentence for a person: who, what, how much, and how to mend it. Allocates: not for hot paths.
  [[nodiscard]] LLMMEM_COLD std::string message() const;

  /// Throws what `code` calls for: `out_of_memory` for shortages, `handle_error` for handles and dead ranges,
  /// `length_error` for nothing asked, `io_error` for files and transfers, `comm_error` for ranks, else
  /// `argument_error`.
  [[noreturn]] LLMMEM_COLD void raise() const;

  friend constexpr bool operator==(const failure& a, const failure& b) noexcept {
    return a.code == b.code && a.index == b.index && a.wanted == b.wanted && a.found == b.found;
  }
};

/// A `T` or the `failure` that kept it from being made. Cheap to return: two words more than `T`.
///
///     if (auto sequence = cache.create()) use(*sequence);
///     else log(sequence.error().message());
///
///     auto sequence = cache.create().value();   // throws instead
template <class T>
class [[nodiscard]] result {
 public:
  static_assert(std::is_nothrow_move_constructible_v<T> && std::is_default_constructible_v<T>);

  constexpr result(T value) noexcept : value_(std::move(value)) {}
  constexpr result(const failure& why) noexcept : failure_(why) {}

  [[nodiscard]] constexpr explicit operator bool() const noexcept { return failure_.code == errc::ok; }
  [[nodiscard]] constexpr bool has_value() const noexcept { return failure_.code == errc::ok; }

  /// The value. @pre `has_value()`.
  [[nodiscard]] constexpr T& operator*() & noexcept { return value_; }
  [[nodiscard]] constexpr const T& operator*() const& noexcept { return value_; }
  [[nodiscard]] constexpr T&& operator*() && noexcept { return std::move(value_); }
  [[nodiscard]] constexpr T* operator->() noexcept { return &value_; }
  [[nodiscard]] constexpr const T* operator->() const noexcept { return &value_; }

  /// The value, or an exception with the failure's text. May be called for the exception alone.
  constexpr T& value() & {
    check();
    return value_;
  }
  constexpr const T& value() const& {
    check();
    return value_;
  }
  /// By value, so that `for (auto& each : call().value().parts)` has something to live in.
  constexpr T value() && {
    check();
    return std::move(value_);
  }

  /// Why there is no value; `errc::ok` when there is one.
  [[nodiscard]] constexpr const failure& error() const noexcept { return failure_; }
  [[nodiscard]] constexpr errc code() const noexcept { return failure_.code; }

 private:
  constexpr void check() const {
    if (!has_value()) failure_.raise();
  }

  T value_{};
  failure failure_{};
};

/// Done, or the `failure` that kept it from being done.
template <>
class [[nodiscard]] result<void> {
 public:
  constexpr result() noexcept = default;
  constexpr result(const failure& why) noexcept : failure_(why) {}

  [[nodiscard]] constexpr explicit operator bool() const noexcept { return failure_.code == errc::ok; }
  [[nodiscard]] constexpr bool has_value() const noexcept { return failure_.code == errc::ok; }

  /// Throws if it was refused.
  constexpr void value() const {
    if (!has_value()) failure_.raise();
  }

  [[nodiscard]] constexpr const failure& error() const noexcept { return failure_; }
  [[nodiscard]] constexpr errc code() const noexcept { return failure_.code; }

 private:
  failure failure_{};
};

inline std::string failure::message() const {
  const auto n = [](std::uint64_t value) { return std::to_string(value); };
  const std::string who = where[0] == '\0' ? std::string("llmmem") : std::string(where);
  const auto place = [&] { return n(wanted) + " bytes at offset " + n(found); };
  const auto chunk_or_tensor = [&] { return (wanted == 1 ? "tensor " : "chunk ") + n(index); };
  const auto cause = [&] {
    return index == 0 ? std::string(" failed: the system moved nothing, and called it a success")
                      : " failed: " + std::generic_category().message(static_cast<int>(index)) + " (errno " +
                            n(index) + ")";
  };
  switch (code) {
    case errc::ok:
      return who + ": no failure";
    case errc::out_of_blocks:
      return who + ": " + n(wanted) + " blocks needed, " + n(found) +
             " free or evictable; release sequences, or build it with more blocks";
    case errc::out_of_sequences:
      return who + ": all " + n(found) + " sequences are alive; release one, or raise max_sequences";
    case errc::out_of_requests:
      return who + ": all " + n(found) + " requests are known; finish one, or raise max_requests";
    case errc::step_pending:
      return who + ": the last step, of " + n(found) + " requests, is not completed; call completed() first";
    case errc::reentered:
      return who +
             ": called from within one of its own calls; remember what to do, and do it when that returns";
    case errc::out_of_bytes:
      if (index == 1) {
        return who + ": " + n(wanted) + " bytes needed in one piece, it never has more than " + n(found) +
               "; raise its budget, or ask for less at once";
      }
      return who + ": " + n(wanted) + " bytes needed, " + n(found) +
             " left of its budget; give ranges back, or raise it";
    case errc::sequence_full:
      return who + ": sequence " + n(index) + " would hold " + n(wanted) + " tokens, the most is " +
             n(found) + "; raise max_sequence_tokens, or blocks";
    case errc::too_many_shares:
      return who + ": block " + n(index) + " has " + n(found) + " references; " + n(wanted) +
             " more could pass the most there may be, 2^24 - 1";
    case errc::null_handle:
      return who + ": null handle; it was never given a value, or was moved from";
    case errc::foreign_handle:
      return who + ": the handle (slot " + n(index) +
             ") was given out by another object; ask the one that made it";
    case errc::stale_handle:
      return who + ": stale handle to slot " + n(index) + " (generation " + n(wanted) + ", now " + n(found) +
             "): it was released before; keep one owner for each handle";
    case errc::double_free:
      return who + ": double free: block " + n(index) +
             " has no references left; release each reference once, through one owner";
    case errc::past_the_end:
      return who + ": " + n(wanted) + " tokens named, sequence " + n(index) + " holds " + n(found) +
             "; name fewer, or append them first";
    case errc::deferred_full:
      return who + ": " + n(wanted) + " deferred frees to queue, room for " + n(found) +
             "; call collect() once fences have passed, or raise max_deferred, or max_sequences (4 releases "
             "each)";
    case errc::size_mismatch:
      return who + ": lengths that must agree are " + n(wanted) + " and " + n(found);
    case errc::out_of_range:
      return who + ": " + n(wanted) + " asked for, the most is " + n(found);
    case errc::bad_block_count:
      return who + ": " + n(wanted) + " blocks asked for, allowed are 1 to " + n(found) +
             "; build it with a larger most_blocks to grow further";
    case errc::bad_priority:
      return who + ": priority " + n(wanted) + "; allowed are 0 to " + n(found);
    case errc::empty_range:
      return who + ": tokens " + n(wanted) + " to " + n(found) + " are none; the end lies behind the first";
    case errc::listed_twice:
      return who + ": sequence " + n(index) + " stands a second time at place " + n(wanted) +
             " of a batch of " + n(found) + "; put its tokens into one entry";
    case errc::ring_busy:
      return who + ": slot " + n(index) + " of " + n(found) +
             " is still in use; release it behind the fence of its last kernel, or build more slots";
    case errc::layout_mismatch:
      return who + ": the contents' fingerprints differ, " + n(wanted) + " there, " + n(found) +
             " here: other shape, element type, block size or model; nothing was taken";
    case errc::foreign_stream:
      return who + ": not a stream of keys and values of version " + n(found) + " (the version read is " +
             n(wanted) + "); after a refusal the rest of a stream is still to come";
    case errc::damaged_stream:
      return who + ": the stream is damaged at block " + n(index) +
             " (0: or before): its digest is wrong; send it "
             "again";
    case errc::missing_prefix:
      return who + ": the stream leaves out " + n(wanted) + " blocks, of which " + n(found) +
             " are cached here; ask for the whole";
    case errc::stopped:
      return who + ": the other side of the stream stopped";
    case errc::stale_plan:
      return who + ": move " + n(found) + " of the plan, of block " + n(index) + " to " + n(wanted) +
             ", is not possible: the one must be in use, the other free; plan anew";
    case errc::not_fresh:
      return who + ": match needs a sequence without tokens, sequence " + n(index) + " holds " + n(found) +
             "; match first, then append the rest";
    case errc::zero_bytes:
      return who + ": an allocation of 0 bytes; ask for at least 1";
    case errc::bad_alignment:
      return who + ": alignment " + n(wanted) + " is not a power of two";
    case errc::system_refused:
      return who + ": the memory beneath it refused " + n(wanted) + " bytes" +
             (index == 0 ? std::string() : " (error " + n(index) + ")") + ", though its budget has " +
             n(found) + " left; free memory elsewhere, or lower the budget";
    case errc::dead_range:
      return who + ": the range of " + n(wanted) +
             " bytes is not inside a live one; it was deallocated before, or another space gave it out";
    case errc::overlapping_ranges:
      return who + ": source and destination of " + n(wanted) + " bytes share " + n(found) +
             "; copy in parts";
    case errc::bad_granularity:
      return who + ": " + n(wanted) + " bytes is no multiple of the granularity, " + n(found) + " bytes";
    case errc::table_full: {
      constexpr const char* tables[] = {"a table of fixed size", "the table of chunks", "the table of pieces",
                                        "the index of chunks with keys"};
      constexpr const char* raise[] = {"the max_ option for it", "tiered_options::max_chunks",
                                       "tier_place::max_pieces", "persistent_file_options::max_chunks"};
      const std::size_t table = index < sizeof(tables) / sizeof(*tables) ? index : 0;
      return who + ": " + tables[table] + " is full: " + n(wanted) + " entries needed, " + n(found) +
             " free; raise " + raise[table];
    }
    case errc::already_mapped:
      return who + ": offset " + n(wanted) + " of the range is in the way of the mapping at offset " +
             n(found) + "; unmap that first";
    case errc::not_mapped:
      return who + ": no mapping begins or ends at offset " + n(wanted) +
             " of the range; unmap whole mappings that are there";
    case errc::still_mapped:
      return who + ": " + n(found) + " mappings keep it from being given back; unmap them first";
    case errc::reserve_refused:
      return who + ": the system refused " + n(wanted) + " bytes of address space (error " + n(index) +
             "); reserve less, or raise the limit (ulimit -v)";
    case errc::map_refused:
      return who + ": the system refused to change the mapping of " + n(wanted) + " bytes (error " +
             n(index) + ") with " + n(found) +
             " mappings held; hold fewer, map larger pieces, or raise vm.max_map_count";
    case errc::out_of_group_blocks:
      return who + ": group " + n(index) + " needs " + n(wanted) + " blocks, " + n(found) +
             " can be had for it; release sequences, or build it with a larger budget";
    case errc::already_cached:
      return who + ": block " + n(index) +
             " is cached for other contents; commit each block once, and what it held then";
    case errc::not_kept:
      return who + ": group " + n(index) + " no longer has what comes next after " + n(wanted) +
             " tokens; cut to " + n(found) +
             ", or to the length below that nearest_cuts() names, and compute the rest again";
    case errc::no_such_block:
      return who + ": block " + n(wanted) + " asked for, there are " + n(found) +
             " from 0 on; give the memory as many as the cache's most_physical_blocks()";
    case errc::past_the_table:
      return who + ": " + n(wanted) + " blocks named, sequence " + n(index) + " holds " + n(found) +
             "; name as many at most";
    case errc::too_short:
      return who + ": " + n(wanted) + " entries needed, " + n(found) + " given; make it longer";
    case errc::block_tokens_differ:
      return who + ": blocks of " + n(wanted) + " tokens there, of " + n(found) +
             " here; build both with the same block_tokens";
    case errc::past_the_bytes:
      return who + ": bytes up to " + n(wanted) + " asked for, there are " + n(found) +
             "; ask for fewer, or make it larger";
    case errc::read_failed:
      return who + ": read of " + place() + cause();
    case errc::write_failed:
      return who + ": write of " + place() + cause();
    case errc::sync_failed:
      return who + ": sync" + cause() + "; what was written before may be lost: write it again elsewhere";
    case errc::grow_failed:
      return who + ": room for " + place() + cause();
    case errc::file_ends:
      return who + ": bytes up to " + n(wanted) + " asked for, the file ends at " + n(found) +
             "; it was cut short, or never written so far";
    case errc::file_locked:
      return who + ": another process holds the file; end that, or take another path";
    case errc::not_opened:
      return who +
             ": it was opened only to be read; open it with open_mode::update or open_mode::create (a "
             "model_file_space is never written to: adopt what lies there, and keep what changes in another "
             "buffer)";
    case errc::cancelled:
      return who + ": cancelled after " + n(found) + " of " + n(wanted) + " bytes";
    case errc::completion_lost:
      return who + ": the device never answered for " + place() +
             "; keep that memory as it is until the queue is gone";
    case errc::dependency_failed:
      return who + ": it did not begin: what it was to come after failed";
    case errc::not_finished:
      return who + ": not finished yet; wait for it before asking how it went";
    case errc::damaged_encoding:
      return who + ": the encoded bytes are damaged at block " + n(index) + ": " + n(wanted) +
             " must be there, found " + n(found) +
             "; nothing decoded from them may be used, fetch them again";
    case errc::no_contents:
      return who + ": " + chunk_or_tensor() + " has no contents; write all of it first";
    case errc::checksum_differs:
      return who + ": chunk " + n(index) + " came back with checksum " + n(found) + ", it left with " +
             n(wanted) + "; its bytes are damaged and are not handed out";
    case errc::timed_out:
      return who + ": chunk " + n(index) + " of " + n(wanted) + " bytes was not there after " + n(found) +
             " ns; it goes on being brought in: ask again";
    case errc::chunk_leased:
      return who + ": " + chunk_or_tensor() + " is leased " + n(found) + " times; end these leases first";
    case errc::engine_failed:
      return who + ": the I/O engine" + cause() + "; build the queue anew, or on posix_io";
    case errc::failures_kept:
      return who + ": " + n(found) +
             " failures are kept, as many as may be; look at what failed, then call clear_failures()";
    case errc::no_such_key:
      return who + ": no chunk has that key; create it, and write it";
    case errc::key_taken:
      return who + ": chunk " + n(index) + " has that key; find() it, or remove it first";
    case errc::no_such_tensor:
      return who + ": tensor " + n(index) + " asked for, there are " + n(found) + " from 0 on";
    case errc::no_such_part:
      return who + ": part " + n(wanted) + " of tensor " + n(index) + " asked for, it has " + n(found) +
             " from 0 on";
    case errc::tensor_in_parts:
      return who + ": tensor " + n(index) + " lies in " + n(found) +
             " parts; take them one by one, or by for_each_part";
    case errc::place_taken:
      return who + ": bytes " + n(wanted) + " to " + n(found - 1) +
             " of its range are another's; name bytes that nobody has, or end what has them first (pieces "
             "take "
             "whole multiples of the granularity)";
    case errc::no_such_version:
      return who + ": version " + n(wanted) + " was never published, the newest is " + n(found) +
             " (0: none); publish first";
    case errc::version_gone:
      return who + ": version " + n(wanted) + " is gone, the oldest that is kept is " + n(found) +
             " (0: none); pin it earlier, or keep more versions";
    case errc::version_pinned:
      return who + ": version " + n(wanted) + " is pinned " + n(index) + " times, and none of the " +
             n(found) + " slots is free; release it first, or give it more slots";
    case errc::peer_failed:
      return who + ": rank " + n(index) + " has died; revoke(), agree() and go on without it";
    case errc::epoch_revoked:
      return who + ": epoch " + n(found) + " was revoked: a rank has failed; agree() on which, and shrink()";
    case errc::no_quorum:
      return who + ": " + n(found) + " members are heard, " + n(wanted) +
             " are needed: the others may live and go on; end here, and join anew";
    case errc::peer_timed_out:
      return who + ": " + n(found) + " of " + n(wanted) + " bytes moved, then rank " + n(index) +
             " was waited for beyond the deadline; give it more time, or revoke() and agree()";
    case errc::message_damaged:
      return who + ": a message of rank " + n(index) + " has checksum " + n(found) + " and left with " +
             n(wanted) + "; it is dropped: have it sent again";
    case errc::state_lost:
      return who + ": " + n(found) + " ranks are gone, and nobody has the state of " + n(wanted) +
             " of them, rank " + n(index) + " the lowest; go back to a checkpoint, or take a stronger scheme";
    case errc::library_failed:
      return who + ": the library beneath failed with its status " + n(index) +
             "; revoke(), agree() and go on with who is left";
    case errc::not_joined:
      return who + ": it has not joined the others; call join() first, and look at what it returns";
  }
  return who + ": unknown failure " + n(static_cast<std::uint64_t>(code));
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
      throw io_error(message());
    case errc::peer_failed:
    case errc::epoch_revoked:
    case errc::no_quorum:
    case errc::peer_timed_out:
    case errc::message_damaged:
    case errc::state_lost:
    case errc::library_failed:
      throw comm_error(message());
    default:
      throw argument_error(message());
  }
}

}  // namespace llmmem::inline v0
