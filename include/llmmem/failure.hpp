/// @file
/// `failure`: why an operation was refused, with the shortage in it. And all the reasons there are.
#pragma once

#include <llmmem/config.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

namespace llmmem {
inline namespace v0 {

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
  state_lost,  ///< index = the lowest rank whose state is lost, wanted = such ranks, found = ranks that are
               ///< gone, or whose own state is damaged
  library_failed,  ///< a library beneath, `where` says which call and why: index = its status
  not_joined,      ///< asked of a communicator that is no member of an epoch as yet
  seat_missing,    ///< index = the lowest seat that is missing to join, wanted = why (`seat_absence`),
                   ///< found = seats that are missing
  setup_differs,   ///< index = the first rank that is set up otherwise than rank 0, wanted = the digest of
                   ///< rank 0's setup, found = of that one's
  not_recovered,   ///< a replica was to keep something before it has recovered: wanted = the epoch, found =
                   ///< the one in which it has, 0 for none
  // Of kernels
  no_conversion,  ///< wanted = the `dtype` that was to come out, found = the one that comes
  misaligned,     ///< index = part of a kernel's map, wanted = the alignment it promises, found = row without
  lanes_differ,   ///< index = lane of a group that came to another result than lane 0, found = item
  // Of devices
  device_failed,   ///< a call of the device's runtime or driver, `where` says which: index = its status
  no_device_code,  ///< wanted = the compute capability that a kernel needs, 80 for 8.0, found = that it was
                   ///< compiled for
};

/// The last reason there is: what a reader of stored ones holds them to.
inline constexpr errc last_errc = errc::no_device_code;

/// Which table is full, and so which option makes it larger: the index of `errc::table_full`.
enum class full_table : std::uint32_t {
  some,         ///< the text names the object, which has one
  chunks,       ///< of a tiered buffer, clones among them: `tiered_options::max_chunks`
  pieces,       ///< of a tier, its gaps among them: `tier_place::max_pieces`
  keyed_chunks  ///< of a persistent tier: `persistent_file_options::max_chunks`
};

/// Why a seat is missing, as far as the process knows that waits for it: `wanted` of `errc::seat_missing`.
enum class seat_absence : std::uint32_t {
  unheard,         ///< nothing has come from there
  nobody_listens,  ///< at its address
  unreachable,     ///< its address is
  no_answer,       ///< its process is there, and says nothing
  other_secret,    ///< who is there does not know this one's
  other_version,   ///< of the protocol
  other_options,   ///< another number of seats, or other frames
  other_seat,      ///< its address is that of another seat's process, or this one's is in its eyes
  foreign,         ///< who is there is of another user, or speaks no such protocol
  seat_taken,      ///< it holds this seat for taken by a process before this one
  given_up,        ///< it has given this very process up
  ended,           ///< its process has come, and is gone again
  in_epoch         ///< its process is a member of an epoch that has begun without this one
};

/// The name of the object that refused, or the path of its file: a copy, so that it outlives the object.
///
/// A name of more than `max_size` bytes is shortened when it is copied: its first third, `...`, and its end
/// stay, which of a path are the folder it begins with and the file.
///
/// @par Complexity   an empty name writes one byte, any other as many as it has; never allocates.
class failure_name {
 public:
  /// Bytes of a name that are kept, without the zero behind them.
  static constexpr std::size_t max_size = 95;

  constexpr failure_name() noexcept : kept_(nothing()) {}
  constexpr failure_name(const char* name) noexcept
      : kept_(copy_of(name == nullptr ? std::string_view() : std::string_view(name))) {}
  constexpr failure_name(const std::string& name) noexcept : kept_(copy_of(name)) {}
  constexpr failure_name(std::string_view name) noexcept : kept_(copy_of(name)) {}

  [[nodiscard]] constexpr bool empty() const noexcept { return kept_.text[0] == '\0'; }
  [[nodiscard]] constexpr const char* c_str() const noexcept { return kept_.text; }
  [[nodiscard]] constexpr std::string_view view() const noexcept { return kept_.text; }
  constexpr operator std::string_view() const noexcept { return view(); }

  friend constexpr bool operator==(const failure_name& a, const failure_name& b) noexcept {
    return a.view() == b.view();
  }

 private:
  static constexpr std::string_view gap = "...";

  struct letters {
    char text[max_size + 1];

    constexpr std::size_t append(std::size_t at, std::string_view part) noexcept {
      part.copy(text + at, part.size());
      return at + part.size();
    }
    /// A constant must have a value in each byte; an object that is made while the program runs need not.
    constexpr void end_at(std::size_t at) noexcept {
      text[at] = '\0';
      if (std::is_constant_evaluated()) {
        for (; at <= max_size; ++at)
          text[at] = '\0';
      }
    }
  };

  [[nodiscard]] static constexpr letters nothing() noexcept {
    letters out;
    out.end_at(0);
    return out;
  }
  [[nodiscard]] LLMMEM_COLD LLMMEM_OUTLINED static constexpr letters copy_of(std::string_view name) noexcept {
    letters out;
    if (name.size() <= max_size) {
      out.end_at(out.append(0, name));
      return out;
    }
    std::size_t head = max_size / 3;
    while (head != 0 && is_inside_character(name[head]))
      --head;
    std::size_t tail = name.size() - (max_size - head - gap.size());
    while (tail != name.size() && is_inside_character(name[tail]))
      ++tail;
    out.end_at(out.append(out.append(out.append(0, name.substr(0, head)), gap), name.substr(tail)));
    return out;
  }
  /// Whether `byte` continues a character of UTF-8, which must not be cut.
  [[nodiscard]] static constexpr bool is_inside_character(char byte) noexcept {
    return (static_cast<unsigned char>(byte) & 0xC0U) == 0x80U;
  }

  letters kept_;
};

/// A refusal: its reason, the two numbers that show it, and who refused. A value: it may be kept, copied and
/// handed up after the object that refused is gone.
struct failure {
  errc code = errc::ok;
  std::uint32_t index = 0;   ///< block or sequence slot, where the reason names one
  std::uint64_t wanted = 0;  ///< see `errc`
  std::uint64_t found = 0;   ///< see `errc`
  failure_name where = {};   ///< the name given to the object at construction, or the path of a file

  /// One sentence for a person: who, what, how much, and how to mend it. Allocates: not for hot paths.
  [[nodiscard]] LLMMEM_COLD std::string message() const;

  /// Throws what `code` calls for: `out_of_memory` for shortages, `handle_error` for handles and dead ranges,
  /// `length_error` for nothing asked, `io_error` for files, transfers and devices, `comm_error` for ranks,
  /// else `argument_error`.
  [[noreturn]] LLMMEM_COLD void raise() const;

  friend constexpr bool operator==(const failure& a, const failure& b) noexcept {
    return a.code == b.code && a.index == b.index && a.wanted == b.wanted && a.found == b.found;
  }
};

static_assert(std::is_trivially_copyable_v<failure>);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/detail/failure_text.hpp>
