/// @file
/// Why something is refused, of ranks and the messages between them: the codes, what their three numbers are,
/// and their texts.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/failure.hpp>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace llmmem {
inline namespace v0 {

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
  in_epoch,        ///< its process is a member of an epoch that has begun without this one
  crowded          ///< so many callers said nothing that the oldest of them were closed
};

namespace detail {

/// Bytes may have been on their way, or not.
[[nodiscard]] LLMMEM_COLD constexpr const char* timed_out_sentence(const failure& why) noexcept {
  return why.wanted == 0 ? "rank {index} was waited for beyond the deadline; call again with more time, or "
                           "revoke() and agree()"
                         : "{found} of {wanted} bytes moved, then rank {index} was waited for beyond the "
                           "deadline; give it more time, or revoke() and agree()";
}

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
      return "the process there has another secret; give all processes the same";
    case seat_absence::other_version:
      return "the process there speaks another version of the protocol; build all processes with the same "
             "llmmem";
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
    case seat_absence::crowded:
      return "nothing has come from there, but a crowd of connections that say nothing; look which processes "
             "make them, or raise most_half_open";
  }
  return absence_sentence(seat_absence::unheard);
}

/// One seat may be missing, or several.
[[nodiscard]] LLMMEM_COLD constexpr const char* seat_missing_sentence(const failure& why) noexcept {
  return why.found > 1 ? "seat {index} is missing at the deadline, and {others} more: {absence}"
                       : "seat {index} is missing at the deadline: {absence}";
}

/// What stands for a name in braces, beyond the three numbers.
[[nodiscard]] LLMMEM_COLD inline std::string comm_term(const failure& why, std::string_view name) {
  if (name == "others") return std::to_string(why.found - 1);
  return absence_sentence(static_cast<seat_absence>(why.wanted));
}

inline constexpr std::array comm_errors{
    error_info{.number = 76,
               .name = "peer_failed",
               .raises = error_kind::comm,
               .index = "the rank, or below a communicator the seat",
               .sentence = "rank {index} has died; revoke(), agree() and go on without it"},
    error_info{.number = 77,
               .name = "epoch_revoked",
               .raises = error_kind::comm,
               .found = "the epoch",
               .sentence = "epoch {found} was revoked: a rank has failed; agree() on which, and shrink()"},
    error_info{.number = 78,
               .name = "no_quorum",
               .raises = error_kind::comm,
               .wanted = "members that must be heard",
               .found = "members that are heard",
               .sentence =
                   "{found} members are heard, {wanted} are needed: the others may live and go on; end here, "
                   "and join anew"},
    error_info{.number = 79,
               .name = "peer_timed_out",
               .raises = error_kind::comm,
               .index = "rank or seat waited for",
               .wanted = "bytes to move",
               .found = "bytes moved",
               .sentence_for = timed_out_sentence},
    error_info{
        .number = 80,
        .name = "message_damaged",
        .raises = error_kind::comm,
        .index = "rank that sent it",
        .wanted = "its checksum",
        .found = "the checksum of what came",
        .sentence =
            "a message of rank {index} has checksum {found} and left with {wanted}; it is dropped: have "
            "it sent again"},
    error_info{
        .number = 81,
        .name = "state_lost",
        .raises = error_kind::comm,
        .index = "the lowest rank whose state is lost",
        .wanted = "ranks whose state is lost",
        .found = "ranks that are gone, or whose own state is damaged",
        .sentence =
            "{found} ranks are gone or hold their state damaged, and nobody else has that of {wanted} of "
            "them, rank {index} the lowest; forget() on all ranks and go back to a checkpoint, or take a "
            "stronger scheme"},
    error_info{
        .number = 82,
        .name = "library_failed",
        .raises = error_kind::comm,
        .index = "the library's status",
        .sentence =
            "the library beneath failed with its status {index}; revoke(), agree() and go on with who is "
            "left"},
    error_info{.number = 83,
               .name = "not_joined",
               .sentence = "it has not joined the others; call join() first, and look at what it returns"},
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
        .index = "the rank, or below a communicator the seat",
        .sentence =
            "the connection to rank {index} carried a frame that its process did not send, or not then, and "
            "was given up; look which machine writes into the network, then revoke(), agree() and go on "
            "without the rank"},
};

}  // namespace detail

namespace errc {

/// A rank has died: index = the rank, or below a communicator the seat.
inline constexpr error_code peer_failed = detail::code_of<76>(detail::comm_errors);
/// Somebody has ended the epoch: found = the epoch.
inline constexpr error_code epoch_revoked = detail::code_of<77>(detail::comm_errors);
/// Too few members are heard: wanted = members that must be heard, found = members that are heard.
inline constexpr error_code no_quorum = detail::code_of<78>(detail::comm_errors);
/// A rank was waited for in vain: index = rank or seat waited for, wanted = bytes to move, found = bytes
/// moved.
inline constexpr error_code peer_timed_out = detail::code_of<79>(detail::comm_errors);
/// A message came damaged: index = rank that sent it, wanted = its checksum, found = the checksum of what
/// came.
inline constexpr error_code message_damaged = detail::code_of<80>(detail::comm_errors);
/// Nobody has the state of some ranks any more: index = the lowest rank whose state is lost, wanted = ranks
/// whose state is lost, found = ranks that are gone, or whose own state is damaged.
inline constexpr error_code state_lost = detail::code_of<81>(detail::comm_errors);
/// A library beneath failed; `where` says which call and why: index = the library's status.
inline constexpr error_code library_failed = detail::code_of<82>(detail::comm_errors);
/// Asked of a communicator that is no member of an epoch as yet.
inline constexpr error_code not_joined = detail::code_of<83>(detail::comm_errors);
/// Seats were missing at the deadline: index = the lowest seat that is missing, wanted = why
/// (`seat_absence`), found = seats that are missing.
inline constexpr error_code seat_missing = detail::code_of<84>(detail::comm_errors);
/// The connection to a rank carried a frame that its seal does not fit: index = the rank, or below a
/// communicator the seat.
inline constexpr error_code frame_forged = detail::code_of<99>(detail::comm_errors);

}  // namespace errc

}  // namespace v0
}  // namespace llmmem
