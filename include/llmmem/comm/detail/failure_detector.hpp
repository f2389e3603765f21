/// @file
/// `failure_detector`: the evidence that processes in other seats have died, and the conclusions from it.
#pragma once

#include <llmmem/comm/detail/listening_clock.hpp>
#include <llmmem/comm/detail/socket_descriptor.hpp>
#include <llmmem/comm/detail/socket_system.hpp>
#include <llmmem/comm/detail/socket_wire.hpp>
#include <llmmem/comm/endpoint.hpp>
#include <llmmem/comm/id_set.hpp>
#include <llmmem/comm/socket_options.hpp>
#include <llmmem/config.hpp>

#include <cstdint>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// How long data of a dead process may be in transit in a machine's TCP.
inline constexpr std::uint64_t drain_ns = 20'000'000;

/// The known state of the process in a seat.
enum class seat_state : std::uint8_t {
  nobody,
  up,
  ending,    ///< there is evidence that it is dead: its earlier data is still read
  given_up,  ///< by this process or by the other, or suspected
};

/// Why a process may be dead; a later value is stronger evidence.
enum class death_evidence : std::uint8_t {
  reset,    ///< a connection ended or broke
  leaving,  ///< the process announced that it leaves
  exited,   ///< the kernel reports that it has exited
};

/// The conclusion from the evidence.
enum class death_verdict : std::uint8_t {
  undecided,
  read_rest,  ///< read everything that arrived, then ask `judge_rest`
  suspected,
  certain,
};

/// Decides which processes are dead. The caller reports what happens to their connections, and acts on the
/// verdicts; the detector itself reads and writes nothing. Evidence without a verdict gets one at a certain
/// time; the clock's timer is set to that.
///
/// @invariant  A process that was `up` is reported as suspected at most once, and as certainly dead at most
///             once, in this order.
/// @par Complexity      O(1).
/// @par Thread safety   one thread at a time.
/// @par Source          Gupta, Chandra and Goldszmidt, "On scalable and efficient distributed failure
///                      detectors", PODC 2001, for the terms; `pidfd_open(2)`.
class failure_detector {
 public:
  failure_detector(listening_clock& clock, const socket_options& options, std::uint32_t seats)
      : clock_(clock),
        confirm_ns_(options.confirm_ns),
        soft_silence_ns_(options.soft_silence_ns),
        hard_silence_ns_(options.hard_silence_ns),
        silence_(options.silence),
        reset_(options.reset),
        reads_all_at_exit_(!options.folder.empty()),
        seats_(seats) {}

  /// @name Seats
  /// @{
  [[nodiscard]] seat_state state(seat_id seat) const noexcept { return at(seat).now; }
  [[nodiscard]] bool is_up(seat_id seat) const noexcept { return at(seat).now == seat_state::up; }
  /// Whether that process had the seat before, and is dead or given up: it may not come again.
  [[nodiscard]] bool is_rejected(seat_id seat, const incarnation_id& incarnation) const noexcept {
    return at(seat).has_rejected && at(seat).rejected == incarnation;
  }
  /// The process as a pidfd, closed if it is unknown.
  [[nodiscard]] const descriptor& process(seat_id seat) const noexcept { return at(seat).process; }
  /// Records that a process is connected from now on.
  /// @param is_own  the process is this one, which is never killed.
  void seat(seat_id seat, const incarnation_id& incarnation, descriptor process, bool is_own) noexcept {
    seat_record& of = at(seat);
    of.process = std::move(process);
    of.incarnation = incarnation;
    of.is_own = is_own;
    of.why = death_evidence::reset;
    of.reported = report::none;
    of.is_soft_silent = false;
    of.heard = clock_.listened();
    of.looked_at = 0;
    of.now = seat_state::up;
    ++came_;
  }
  /// Records that the seat is empty.
  void vacate(seat_id seat) noexcept {
    at(seat).process.close();
    at(seat).is_soft_silent = false;
    at(seat).now = seat_state::nobody;
  }
  /// Records that the process is ignored from now on, and may not come again.
  void give_up(seat_id seat) noexcept {
    at(seat).now = seat_state::given_up;
    reject(at(seat));
  }
  /// @}

  /// @name Evidence
  /// @{
  void note(seat_id seat, death_evidence why) noexcept;
  /// Whether the process announced that it leaves, or was found to have exited.
  [[nodiscard]] bool is_known_dead(seat_id seat) const noexcept {
    return at(seat).why != death_evidence::reset;
  }
  /// Judges a seat that is `ending`. @param is_drained  everything was read, up to the end of both lanes.
  [[nodiscard]] death_verdict judge(seat_id seat, bool is_drained) const noexcept;
  /// After `read_rest`.
  [[nodiscard]] death_verdict judge_rest(seat_id seat) const noexcept;
  /// Judges a seat that is about to become suspected: the death may be certain.
  /// @return  `read_rest` when the process was just found to have exited: note that, and judge again.
  [[nodiscard]] death_verdict judge_suspect(seat_id seat) const noexcept;
  /// Judges a seat that was given up and whose lanes have both ended.
  [[nodiscard]] death_verdict judge_given_up(seat_id seat) const noexcept {
    if (at(seat).process.is_open()) return death_verdict::undecided;
    return reset_ == on_reset::dead ? death_verdict::certain : death_verdict::suspected;
  }
  /// Sets the timer of a seat that is `ending`.
  void remind(seat_id seat) noexcept { clock_.due(at(seat).ends_by); }
  /// @}

  /// @name Reports
  /// Whether to report it to the handler: true once for each seat.
  /// @{
  [[nodiscard]] bool report_suspected(seat_id seat) noexcept {
    if (at(seat).reported != report::none) return false;
    at(seat).reported = report::suspected;
    ++suspected_;
    return true;
  }
  [[nodiscard]] bool report_certain(seat_id seat) noexcept {
    reject(at(seat));
    if (at(seat).reported == report::certain) return false;
    at(seat).reported = report::certain;
    ++died_;
    return true;
  }
  /// @}

  /// @name Silence
  /// @{
  /// Records that bytes have arrived from there.
  void heard(seat_id seat) noexcept {
    at(seat).heard = clock_.listened();
    at(seat).looked_at = 0;
  }
  /// Records whether the seat is silent beyond the soft limit; returns whether it is beyond the hard one.
  [[nodiscard]] bool look_at_silence(seat_id seat) noexcept {
    at(seat).looked_at = silence_of(seat);
    at(seat).is_soft_silent = silence_of(seat) >= soft_silence_ns_;
    return is_silent(seat);
  }
  /// Whether to ask the kernel what the process waits for: it has missed heartbeats, and is known.
  [[nodiscard]] bool may_excuse(seat_id seat) const noexcept {
    return hard_silence_ns_ != 0 && at(seat).process.is_open() && !at(seat).is_own &&
           silence_of(seat) >= hard_silence_ns_ / 4;
  }
  /// Records that its heartbeats wait for a core: the time since the last check does not count as silence.
  void excuse(seat_id seat) noexcept { at(seat).heard = clock_.listened() - at(seat).looked_at; }
  /// Whether the seat is silent beyond the hard limit.
  [[nodiscard]] bool is_silent(seat_id seat) const noexcept {
    return hard_silence_ns_ != 0 && silence_of(seat) >= hard_silence_ns_;
  }
  /// Whether a silent process should be killed rather than suspected.
  [[nodiscard]] bool may_kill(seat_id seat) const noexcept {
    return silence_ == on_silence::kill_local && at(seat).process.is_open() && !at(seat).is_own;
  }
  void kill(seat_id seat) noexcept {
    kill_process(at(seat).process);
    ++killed_;
    note(seat, death_evidence::reset);
  }
  /// @}

  void add_to(socket_stats& all) const noexcept {
    all.joined += came_;
    all.died += died_;
    all.suspected += suspected_;
    all.killed += killed_;
    for (const seat_record& each : seats_) {
      all.connected += each.now == seat_state::up ? 1U : 0U;
      all.silent += each.is_soft_silent ? 1U : 0U;
    }
  }

 private:
  enum class report : std::uint8_t { none, suspected, certain };

  struct seat_record {
    seat_state now = seat_state::nobody;
    death_evidence why = death_evidence::reset;
    report reported = report::none;
    bool has_rejected = false;
    bool is_own = false;
    bool is_soft_silent = false;
    std::uint64_t ends_by = 0;    // when `ending`
    std::uint64_t heard = 0;      // time of the last bytes, in listened time
    std::uint64_t looked_at = 0;  // its silence at the last check
    incarnation_id incarnation{};
    incarnation_id rejected{};
    descriptor process;
  };

  [[nodiscard]] seat_record& at(seat_id seat) noexcept { return seats_[to_index(seat)]; }
  [[nodiscard]] const seat_record& at(seat_id seat) const noexcept { return seats_[to_index(seat)]; }
  [[nodiscard]] std::uint64_t silence_of(seat_id seat) const noexcept {
    return clock_.listened() - at(seat).heard;
  }
  static void reject(seat_record& of) noexcept {
    of.rejected = of.incarnation;
    of.has_rejected = true;
  }
  /// Whether everything that an exited process wrote to a Unix socket is in this process's buffers.
  [[nodiscard]] bool is_all_here(const seat_record& of) const noexcept {
    return of.why == death_evidence::exited && reads_all_at_exit_;
  }

  listening_clock& clock_;
  std::uint64_t confirm_ns_;
  std::uint64_t soft_silence_ns_;
  std::uint64_t hard_silence_ns_;
  on_silence silence_;
  on_reset reset_;
  bool reads_all_at_exit_;
  std::vector<seat_record> seats_;
  std::uint64_t came_ = 0;
  std::uint64_t died_ = 0;
  std::uint64_t suspected_ = 0;
  std::uint64_t killed_ = 0;
};

inline void failure_detector::note(seat_id seat, death_evidence why) noexcept {
  seat_record& of = at(seat);
  if (of.now == seat_state::up) {
    of.now = seat_state::ending;
    of.why = why;
    of.ends_by = clock_.now() + (why == death_evidence::exited ? drain_ns : confirm_ns_);
  } else if (of.now == seat_state::ending && why > of.why) {
    of.why = why;
    if (why == death_evidence::exited) of.ends_by = clock_.now() + drain_ns;
  }
  if (of.now == seat_state::ending) clock_.due(of.ends_by);
}

inline death_verdict failure_detector::judge(seat_id seat, bool is_drained) const noexcept {
  const seat_record& of = at(seat);
  if (of.now != seat_state::ending) return death_verdict::undecided;
  const bool is_late = clock_.now() >= of.ends_by;
  if (!is_drained && !is_late && !is_all_here(of)) return death_verdict::undecided;
  // The connection has ended and the process lives: it may be about to exit.
  if (of.why == death_evidence::reset && of.process.is_open())
    return is_late ? death_verdict::suspected : death_verdict::undecided;
  return is_drained || is_all_here(of) ? judge_rest(seat) : death_verdict::read_rest;
}

inline death_verdict failure_detector::judge_rest(seat_id seat) const noexcept {
  const seat_record& of = at(seat);
  if (of.now != seat_state::ending) return death_verdict::undecided;
  return of.why == death_evidence::reset && reset_ == on_reset::suspected ? death_verdict::suspected
                                                                          : death_verdict::certain;
}

inline death_verdict failure_detector::judge_suspect(seat_id seat) const noexcept {
  const seat_record& of = at(seat);
  if (of.why != death_evidence::exited && has_exited(of.process)) return death_verdict::read_rest;
  const bool is_certain = of.why == death_evidence::exited && of.now == seat_state::ending;
  return is_certain ? death_verdict::certain : death_verdict::suspected;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
