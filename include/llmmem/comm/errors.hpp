/// @file
/// The errors of ranks and the messages between them: their codes, the meaning of their three numbers, and
/// their texts.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/failure.hpp>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace llmmem {
inline namespace v0 {

/// Why a seat is missing, as far as the waiting process knows: `wanted` of `errc::seat_missing`.
enum class seat_absence : std::uint32_t {
  no_contact,     ///< nothing has arrived from it
  no_listener,    ///< no process listens at its address
  unreachable,    ///< its address cannot be reached
  no_answer,      ///< its process is connected but silent
  other_secret,   ///< the process there has another secret
  other_version,  ///< the process there has another version of the protocol
  other_options,  ///< another number of seats, or other frames
  other_seat,     ///< its address belongs to another seat's process, or this one's does as far as that
                  ///< process knows
  foreign,        ///< the process there belongs to another user, or speaks another protocol
  seat_taken,     ///< it considers this seat taken by an earlier process
  given_up,       ///< it has given up this process
  ended,          ///< its process came, and has ended
  in_epoch,       ///< its process is a member of an epoch that began without this one
  crowded,        ///< too many callers stayed silent, so the oldest were closed
  other_wrapper,  ///< it wraps its connections (`socket_options::wrapper`) and this process does not, or the
                  ///< other way round
  unheard [[deprecated("its name is no_contact")]] = no_contact,
  nobody_listens [[deprecated("its name is no_listener")]] = no_listener
};

namespace detail {

/// Some of the bytes may have been transferred.
[[nodiscard]] LLMMEM_COLD constexpr const char* timed_out_sentence(const failure& why) noexcept {
  return why.wanted == 0 ? "rank {index} did not respond before the deadline; call again with more time, or "
                           "revoke() and agree()"
                         : "{found} of {wanted} bytes moved, then rank {index} did not respond before the "
                           "deadline; give it more time, or revoke() and agree()";
}

/// Returns why a seat is missing, and the remedy.
[[nodiscard]] LLMMEM_COLD constexpr const char* absence_sentence(seat_absence why) noexcept {
  switch (why) {
    case seat_absence::no_contact:
      return "nothing has arrived from it; start its process, and give all processes the same folder or "
             "addresses";
    case seat_absence::no_listener:
      return "no process listens at its address; start its process, and give all processes the same folder "
             "or addresses";
    case seat_absence::unreachable:
      return "its address cannot be reached; check the network, and give all processes the right addresses";
    case seat_absence::no_answer:
      return "its process is connected but silent; let it call join(), or check why it is stopped";
    case seat_absence::other_secret:
      return "the process there has another secret; give all processes the same secret";
    case seat_absence::other_version:
      return "the process there speaks another version of the protocol; build all processes with the same "
             "llmmem";
    case seat_absence::other_options:
      return "its process has another number of seats or other frame_bytes; give all processes the same "
             "values";
    case seat_absence::other_seat:
      return "its address or this one's belongs to another seat; give all processes the same addresses, in "
             "the same order";
    case seat_absence::foreign:
      return "only foreign processes are there; run all processes as one user, and give them the right "
             "addresses";
    case seat_absence::seat_taken:
      return "it considers this seat taken by an earlier process; end that process, or wait until it is dead "
             "or "
             "suspected";
    case seat_absence::given_up:
      return "it has given this process up; end this process, and start a fresh one";
    case seat_absence::ended:
      return "its process came and has ended; start a fresh one";
    case seat_absence::in_epoch:
      return "its process is in an epoch that began without this one; let its members agree() and "
             "admit()";
    case seat_absence::crowded:
      return "nothing has arrived from it, but many silent connections exist; find the processes that "
             "make them, or raise max_half_open";
    case seat_absence::other_wrapper:
      return "either its process or this one wraps its connections in TLS, and the other does not; give all "
             "processes a wrapper, or none";
  }
  return absence_sentence(seat_absence::no_contact);
}

/// One or several seats may be missing.
[[nodiscard]] LLMMEM_COLD constexpr const char* seat_missing_sentence(const failure& why) noexcept {
  return why.found > 1 ? "seat {index} and {others} more are missing at the deadline: {absence}"
                       : "seat {index} is missing at the deadline: {absence}";
}

/// Returns the text for a name in braces, in addition to the three numbers.
[[nodiscard]] LLMMEM_COLD inline std::string comm_term(const failure& why, std::string_view name) {
  if (name == "others") return std::to_string(why.found - 1);
  return absence_sentence(static_cast<seat_absence>(why.wanted));
}

inline constexpr std::array comm_errors{
    error_info{.number = 76,
               .name = "peer_failed",
               .raises = error_kind::comm,
               .index = "the rank, or for an endpoint the seat",
               .sentence = "rank {index} has died; revoke(), agree() and continue without it"},
    error_info{.number = 77,
               .name = "epoch_revoked",
               .raises = error_kind::comm,
               .found = "the epoch",
               .sentence = "epoch {found} was revoked: a rank has failed; agree() on which, and shrink()"},
    error_info{.number = 78,
               .name = "no_quorum",
               .raises = error_kind::comm,
               .wanted = "members that must be reachable",
               .found = "members that are reachable",
               .sentence = "{found} members are reachable, but {wanted} are needed: the others may live and "
                           "continue; end this process, "
                           "and join again"},
    error_info{.number = 79,
               .name = "peer_timed_out",
               .raises = error_kind::comm,
               .index = "rank or seat waited for",
               .wanted = "bytes to move",
               .found = "bytes moved",
               .sentence_for = timed_out_sentence},
    error_info{.number = 80,
               .name = "message_damaged",
               .raises = error_kind::comm,
               .index = "rank that sent it",
               .wanted = "its checksum",
               .found = "the checksum received",
               .sentence = "a message of rank {index} was sent with checksum {wanted} but arrived with "
                           "{found}; it is dropped: let "
                           "the rank send it again"},
    error_info{
        .number = 81,
        .name = "state_lost",
        .raises = error_kind::comm,
        .index = "the lowest rank whose state is lost",
        .wanted = "ranks whose state is lost",
        .found = "ranks that are lost, or whose own state is damaged",
        .sentence =
            "{found} ranks are lost or have damaged state, and no other rank has the state of {wanted} of "
            "them (rank {index} is the lowest); call forget() on all ranks and return to a checkpoint, or "
            "use a "
            "stronger scheme"},
    error_info{.number = 82,
               .name = "library_failed",
               .raises = error_kind::comm,
               .index = "the library's status",
               .sentence = "the underlying library failed with its status {index}; revoke(), agree() and "
                           "continue with the ranks that are "
                           "left"},
    error_info{.number = 83,
               .name = "not_joined",
               .sentence = "it has not joined the others; call join() first, and check its result"},
    error_info{.number = 84,
               .name = "seat_missing",
               .raises = error_kind::comm,
               .index = "the lowest seat that is missing",
               .wanted = "why (`seat_absence`)",
               .found = "seats that are missing",
               .sentence_for = seat_missing_sentence,
               .term = comm_term},
    error_info{
        .number = 99,
        .name = "frame_forged",
        .raises = error_kind::comm,
        .index = "the rank, or for an endpoint the seat",
        .sentence =
            "the connection to rank {index} carried a frame that its process did not send, or not at that "
            "time, and "
            "was closed; find the machine that writes into the network, then revoke(), agree() and continue "
            "without the rank"},
    error_info{.number = 114,
               .name = "sparse_index_beyond",
               .raises = error_kind::comm,
               .index = "rank whose list it is",
               .wanted = "elements of the sum",
               .found = "the index in the list",
               .sentence = "rank {index} has index {found} in its list, but the sum has {wanted} elements; "
                           "give all ranks the same sizes"},
    error_info{.number = 115,
               .name = "sparse_indices_unordered",
               .raises = error_kind::comm,
               .index = "rank whose list it is",
               .wanted = "an index in the list",
               .found = "the next index",
               .sentence = "rank {index} has index {found} after {wanted} in its list; list each element "
                           "once, in ascending order"},
};

}  // namespace detail

namespace errc {

/// A rank has died: index = the rank, or for an endpoint the seat.
inline constexpr error_code peer_failed = detail::code_of<76>(detail::comm_errors);
/// A rank has ended the epoch: found = the epoch.
inline constexpr error_code epoch_revoked = detail::code_of<77>(detail::comm_errors);
/// Too few members are reachable: wanted = members that must be, found = members that are.
inline constexpr error_code no_quorum = detail::code_of<78>(detail::comm_errors);
/// A rank did not respond before the deadline: index = rank or seat waited for, wanted = bytes to move, found
/// = bytes moved.
inline constexpr error_code peer_timed_out = detail::code_of<79>(detail::comm_errors);
/// A message arrived damaged: index = rank that sent it, wanted = its checksum, found = the checksum
/// received.
inline constexpr error_code message_damaged = detail::code_of<80>(detail::comm_errors);
/// No rank has the state of some ranks: index = the lowest rank whose state is lost, wanted = ranks whose
/// state is lost, found = ranks that are lost, or whose own state is damaged.
inline constexpr error_code state_lost = detail::code_of<81>(detail::comm_errors);
/// An underlying library failed; `where` says which call and why: index = the library's status.
inline constexpr error_code library_failed = detail::code_of<82>(detail::comm_errors);
/// A call to a communicator that is not yet a member of an epoch.
inline constexpr error_code not_joined = detail::code_of<83>(detail::comm_errors);
/// Seats were missing at the deadline: index = the lowest seat that is missing, wanted = why
/// (`seat_absence`), found = seats that are missing.
inline constexpr error_code seat_missing = detail::code_of<84>(detail::comm_errors);
/// The connection to a rank carried a frame with a wrong seal: index = the rank, or for an endpoint the seat.
inline constexpr error_code frame_forged = detail::code_of<99>(detail::comm_errors);
/// A list of a sparse sum has an element that the sum does not: index = rank whose list it is, wanted =
/// elements of the sum, found = the index in the list.
inline constexpr error_code sparse_index_beyond = detail::code_of<114>(detail::comm_errors);
/// A list of a sparse sum does not ascend: index = rank whose list it is, wanted = an index in the list,
/// found = the next index.
inline constexpr error_code sparse_indices_unordered = detail::code_of<115>(detail::comm_errors);

}  // namespace errc

}  // namespace v0
}  // namespace llmmem
