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

/// Thrown out of a call of a `thread_endpoint` that was killed. No `std::exception`, so that nobody takes it
/// for an error and goes on. Catch it where the rank's thread begins, and return: out of a thread it would
/// end the process.
struct rank_killed {};

/// How a thread network is set up.
struct thread_network_options {
  std::uint32_t frame_bytes = std::uint32_t{1} << 20;
  /// Frames up to that size are copied, and their sender goes on; a longer one is read where it lies, and its
  /// sender waits until it was.
  std::uint32_t copied_bytes = 16384;
  std::uint64_t lane_bytes = 65536;  ///< of copies from one to another that are not taken yet
};

class thread_endpoint;

/// Joins the threads of a process as a job's ranks: for engines with a thread for each device, and for tests
/// that want real concurrency without real processes.
///
///     thread_network net(4);
///     std::thread([&] { thread_endpoint end(net, seat_id{1}); communicator ranks(end); ... });
///
/// A rank's death is the end of its endpoint, or `kill`, which its next call of the endpoint answers by
/// throwing `rank_killed`: threads cannot be ended by others. Only a rank that another one gave up suspects
/// it, because that one may go on without it.
///
/// @par Complexity      a frame one copy (two up to `copied_bytes`), one lock and one wake-up.
/// @par Thread safety   any thread; each endpoint one thread at a time, but `wake`.
/// @par Errors          the constructors throw argument_error.
class thread_network {
 public:
  explicit thread_network(std::uint32_t seats, const thread_network_options& options = {});
  thread_network(const thread_network&) = delete;
  thread_network& operator=(const thread_network&) = delete;

  [[nodiscard]] std::uint32_t seats() const noexcept { return static_cast<std::uint32_t>(places_.size()); }
  /// Who sits there dies: the others are told at once, its thread in its next call.
  void kill(seat_id seat) noexcept;

 private:
  friend class thread_endpoint;
  struct parcel {
    std::uint64_t of = 0;  // incarnation of who sent it
    frame_header header{};
    std::vector<std::byte> copy{};
    const std::byte* bytes = nullptr;  // the copy's, or the sender's
    bool is_copy = false;
  };
  /// What one seat sent another, and has not been taken.
  struct lane {
    std::deque<parcel> told{};
    std::deque<parcel> data{};
    std::uint64_t copied = 0;  // bytes
    std::uint64_t taken = 0;   // frames of data since the beginning
    std::uint64_t put = 0;
    bool is_being_read = false;  // the first frame, outside of the lock
    bool is_held = false;        // its receiver said `later`
  };
  struct notice {
    seat_id seat{};
    std::uint64_t of = 0;  // incarnation
    bool is_death = false;
    comm::death how = comm::death::certain;
  };
  struct place {
    std::condition_variable changed{};
    std::uint64_t changes = 0;  // of what its thread may wait for, told while it did not wait, too
    std::deque<notice> notices{};
    std::vector<std::uint64_t> peers{};  // the incarnation that is heard there, by seat; 0: none
    std::uint64_t incarnation = 0;       // of who sits here, or sat
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
  /// Its nonce: how many have sat down by then.
  [[nodiscard]] std::uint64_t sit(seat_id seat);
  void leave(seat_id seat) noexcept;
  void tell_death(seat_id seat) noexcept;
  /// Whether what `from` sends goes to the one that it believes to sit there.
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
  /// @throws argument_error  for a seat there is not, or that is taken.
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
  void tell(seat_id to, const frame_header& frame, std::span<const std::byte> bytes) noexcept;
  template <frame_handler Handler>
  [[nodiscard]] bool poll(deadline by, Handler& handler);
  void withdraw(seat_id /*from*/) noexcept {}  // frames come whole
  void give_up(seat_id seat) noexcept;
  void wake() noexcept;

 private:
  friend class thread_network;
  using lock = std::unique_lock<std::mutex>;

  [[nodiscard]] thread_network::place& here() const noexcept { return net_->places_[to_index(self_)]; }
  void check_alive() const;
  void ask_again() noexcept;
  /// Unless something has changed since `seen` was read: callbacks run outside of the lock.
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
  std::uint32_t turn_ = 0;  // which seat is looked at first: none starves
};

static_assert(endpoint<thread_endpoint>);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/comm/detail/thread_network_body.hpp>
