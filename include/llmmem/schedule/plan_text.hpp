/// @file
/// Plans as text, to store, to compare line by line, and to run on another engine.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/schedule/detail/bodies.hpp>
#include <llmmem/tiering/plan.hpp>

#include <cstdint>
#include <string>
#include <string_view>

namespace llmmem {
inline namespace v0 {

/// The version that `write_plan` writes and `read_plan` reads.
inline constexpr std::uint32_t plan_text_version = 1;

/// Returns `plan` as lines of words and decimal numbers. The last line is a CRC-32C of all lines before it:
///
///     llmmem-schedule 1
///     planner next_use
///     trace 1f0c2d... events 320 chunks 80       fingerprint in 16 hexadecimal digits
///     tier 8000000                               a budget; one line per tier except the last
///     link 25000000000 0 0 full                  bytes a second, latency, bytes a second offload, duplex
///     edge 0                                     which link; none when edge i is link i
///     place 3 0 newest home                      chunk, tier, newest or stale, home or away
///     iteration first
///     forecast 146000 80000 0 66000 0 0 0 0      iteration, computing, stalls by cause
///     flow 144000 144 0 0                        onboard bytes and transfers, offload; one line per edge
///     bound 65000                                stall
///     least 144000 144 0 0                       as flow; one line per edge, none when not bounded
///     step 0 ahead fetch 0 1 0 1000 0 1000 0     event, moment, operation, chunk, from, to, bytes,
///                                                start, finish, latest start
///     iteration steady                           and so on
///     crc32c 89abcdef
///
/// @par Complexity   O(steps).
[[nodiscard]] std::string write_plan(const schedule_plan& plan);

/// Returns the plan in `text`, exactly as it was written. The text is untrusted: its counts allocate memory
/// only in proportion to its own length.
///
/// @throws argument_error  when the text is not a plan of this version, is truncated or damaged, or names a
///                         tier, chunk or event that does not exist; the error gives the line and the reason.
///                         `simulate` checks whether the steps can be executed.
[[nodiscard]] schedule_plan read_plan(std::string_view text);

}  // namespace v0
}  // namespace llmmem

#if LLMMEM_SCHEDULE_BODIES
#include <llmmem/schedule/detail/plan_text_body.hpp>
#endif
