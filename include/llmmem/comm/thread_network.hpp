/// @file
/// `thread_network`: ranks that are threads of one process.
#pragma once

#include <llmmem/comm/endpoint.hpp>
#include <llmmem/comm/id_set.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Thrown by a call of a `thread_endpoint` that was killed. Not a `std::exception`, so that no code handles
/// it as an error and continues. Catch it where the rank's thread begins, and return: escaping from a thread
/// it would end the process.
struct rank_killed {};

/// The construction parameters of a thread network.
struct thread_network_options {
  std::uint32_t frame_bytes = std::uint32_t{1} << 20;
  /// Frames up to this size are copied, and their sender continues; a longer one is read in place, and its
  /// sender waits for that.
  std::uint32_t copied_bytes = 16384;
  std::uint64_t lane_bytes = 65536;  ///< the most bytes of copies in one lane that have not been taken yet
};

class thread_endpoint;

/// Joins the threads of a process as a job's ranks: for engines with a thread per device, and for tests that
/// need real concurrency without separate processes.
///
///     thread_network net(4);
///     std::thread([&] { thread_endpoint end(net, seat_id{1}); communicator ranks(end); ... });
///
/// A rank dies when its endpoint is destroyed, or by `kill`: its next call of the endpoint throws
/// `rank_killed`, because threads cannot be ended from outside. A rank suspects another rank only if the
/// other gave it up, because the other may continue without it.
///
/// @par Complexity      a frame takes one copy (two up to `copied_bytes`), one lock and one wake-up.
/// @par Thread safety   any thread; each endpoint one thread at a time, except `wake`.
/// @par Errors          the constructors throw argument_error.
class thread_network {
 public:
  explicit thread_network(std::uint32_t seats, const thread_network_options& options = {});
  thread_network(const thread_network&) = delete;
  thread_network& operator=(const thread_network&) = delete;

  [[nodiscard]] std::uint32_t seats() const noexcept { return static_cast<std::uint32_t>(places_.size()); }
  /// Kills the rank in that seat: the others learn it at once, its thread in its next call.
  void kill(seat_id seat) noexcept;

 private:
  friend class thread_endpoint;
  struct parcel {
    std::uint64_t of = 0;  // incarnation of the sender
    frame_header header{};
    std::vector<std::byte> copy{};
    const std::byte* bytes = nullptr;  // the copy's, or the sender's
    bool is_copy = false;
  };
  /// Frames from one seat to another that have not been taken.
  struct lane {
    std::deque<parcel> told{};
    std::deque<parcel> data{};
    std::uint64_t copied = 0;  // bytes
    std::uint64_t taken = 0;   // frames of data since the beginning
    std::uint64_t put = 0;
    bool is_being_read = false;  // the first frame, without the lock
    bool is_held = false;        // its receiver answered `ask_again`
  };
  struct notice {
    seat_id seat{};
    std::uint64_t of = 0;  // incarnation
    bool is_death = false;
    comm::death how = comm::death::certain;
  };
  struct place {
    std::condition_variable changed{};
    std::uint64_t changes = 0;  // number of changes its thread may wait for, also counted while it does not
                                // wait
    std::deque<notice> notices{};
    std::vector<std::uint64_t> peers{};  // by seat, the incarnation that it receives from; 0: none
    std::uint64_t incarnation = 0;       // the present or last occupant's
    bool is_taken = false;
    bool is_killed = false;
    bool is_woken = false;

    void tell_change() noexcept {
      ++changes;
      changed.notify_one();
    }
  };

  [[nodiscard]] lane& between(seat_id from, seat_id to) noexcept {
    return lanes_[std::size_t{to_index(from)} * places_.size() + to_index(to)];
  }
  /// Takes the seat; returns its nonce: the number of occupants up to now.
  [[nodiscard]] std::uint64_t sit(seat_id seat);
  void leave(seat_id seat) noexcept;
  void tell_death(seat_id seat) noexcept;
  /// Whether frames of `from` reach the process that `from` expects in `to`.
  [[nodiscard]] bool reaches(seat_id from, seat_id to) const noexcept;

  thread_network_options options_;
  std::mutex mutex_;
  std::uint64_t sat_ = 0;
  std::vector<place> places_;
  std::vector<lane> lanes_;
};

/// A seat of a thread network. An `endpoint`.
class thread_endpoint {
 public:
  /// @throws argument_error  for a seat that does not exist, or is taken.
  thread_endpoint(thread_network& net, seat_id self);
  thread_endpoint(const thread_endpoint&) = delete;
  thread_endpoint& operator=(const thread_endpoint&) = delete;
  ~thread_endpoint() { net_->leave(self_); }

  [[nodiscard]] seat_id self() const noexcept { return self_; }
  [[nodiscard]] std::uint32_t seats() const noexcept { return net_->seats(); }
  [[nodiscard]] std::uint64_t nonce() const noexcept { return nonce_; }
  [[nodiscard]] std::uint64_t now_ns() const noexcept;
  [[nodiscard]] std::uint32_t frame_bytes() const noexcept { return net_->options_.frame_bytes; }
  [[nodiscard]] bool is_connected(seat_id seat) const noexcept;

  template <frame_handler Handler>
  result<void> send(seat_id to, const frame_header& frame, std::span<const std::byte> bytes, deadline by,
                    Handler& handler);
  void post(seat_id to, const frame_header& frame, std::span<const std::byte> bytes) noexcept;
  [[deprecated("call post()")]] void tell(seat_id to, const frame_header& frame,
                                          std::span<const std::byte> bytes) noexcept {
    post(to, frame, bytes);
  }
  template <frame_handler Handler>
  [[nodiscard]] bool poll(deadline by, Handler& handler);
  void withdraw(seat_id /*from*/) noexcept {}  // frames arrive complete
  void give_up(seat_id seat) noexcept;
  void wake() noexcept;

 private:
  friend class thread_network;
  using lock = std::unique_lock<std::mutex>;

  [[nodiscard]] thread_network::place& here() const noexcept { return net_->places_[to_index(self_)]; }
  void check_alive() const;
  void ask_again() noexcept;
  /// Waits unless something has changed since `seen` was read: callbacks run without the lock.
  void wait(lock& held, deadline by, std::uint64_t seen);
  template <frame_handler Handler>
  [[nodiscard]] bool deliver_one(lock& held, Handler& handler);
  template <frame_handler Handler>
  [[nodiscard]] bool deliver_data(lock& held, seat_id from, Handler& handler);
  template <frame_handler Handler>
  [[nodiscard]] bool deliver_notice(lock& held, Handler& handler);
  void retract(seat_id to, std::uint64_t number, lock& held) noexcept;

  thread_network* net_;
  seat_id self_;
  std::uint64_t nonce_ = 0;
  std::uint32_t turn_ = 0;  // the seat that is checked first: none starves
};

static_assert(endpoint<thread_endpoint>);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/comm/detail/thread_network_body.hpp>
