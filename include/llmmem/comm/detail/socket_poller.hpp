/// @file
/// `socket_poller`: the event loop of a socket endpoint.
#pragma once

#include <llmmem/comm/detail/listening_clock.hpp>
#include <llmmem/comm/detail/socket_descriptor.hpp>
#include <llmmem/comm/detail/socket_system.hpp>
#include <llmmem/config.hpp>
#include <llmmem/detail/monotonic.hpp>
#include <llmmem/error.hpp>

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The kind of descriptor that an event belongs to; the highest byte of its key.
enum class socket_event : std::uint8_t { listener, wake, half_open, candidate, data, told, process };

/// Names a descriptor to epoll. The generation distinguishes an event of a closed socket from an event of its
/// successor in the same place.
[[nodiscard]] constexpr std::uint64_t event_key(socket_event of, std::uint32_t generation,
                                                std::uint32_t index) noexcept {
  return (std::uint64_t{static_cast<std::uint8_t>(of)} << 56) |
         (std::uint64_t{generation & 0xFF'FFFFU} << 32) | index;
}

/// An event of epoll, taken apart.
struct ready_event {
  socket_event of;
  std::uint32_t index;
  bool is_readable;  ///< or broken
  bool is_writable;

  explicit ready_event(const epoll_event& event) noexcept
      : of(static_cast<socket_event>(event.data.u64 >> 56)),
        index(static_cast<std::uint32_t>(event.data.u64)),
        is_readable((event.events & ~std::uint32_t{EPOLLOUT}) != 0),
        is_writable((event.events & std::uint32_t{EPOLLOUT}) != 0),
        generation_(static_cast<std::uint32_t>(event.data.u64 >> 32) & 0xFF'FFFFU) {}

  /// Whether the event belongs to the socket of that generation.
  [[nodiscard]] bool is_of(std::uint32_t generation) const noexcept {
    return (generation & 0xFF'FFFFU) == generation_;
  }

 private:
  std::uint32_t generation_;
};

/// Waits for descriptors and timers, and measures the time. It knows descriptors only by their keys.
///
/// @par Thread safety   one thread at a time, except `wake`, `add`, `change` and `remove`.
/// @par Errors          the constructor throws `system_error`.
class socket_poller {
 public:
  /// The most events of one `wait`.
  static constexpr std::size_t most_events = 32;
  using event_array = std::array<epoll_event, most_events>;

  /// @param has_timers  if false, `wait` ignores the clock's next timer.
  explicit socket_poller(bool has_timers) : clock_(has_timers) {
    epoll_ = descriptor(::epoll_create1(EPOLL_CLOEXEC));
    wake_ = descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!epoll_.is_open() || !wake_.is_open())
      throw system_error("socket_endpoint: epoll_create1 or eventfd" + because(errno));
    if (!add(wake_.get(), EPOLLIN, event_key(socket_event::wake, 0, 0)))
      throw system_error("socket_endpoint: epoll_ctl" + because(errno));
  }
  socket_poller(const socket_poller&) = delete;
  socket_poller& operator=(const socket_poller&) = delete;

  [[nodiscard]] listening_clock& clock() noexcept { return clock_; }
  [[nodiscard]] const listening_clock& clock() const noexcept { return clock_; }
  /// Begins a call of the endpoint.
  void begin() noexcept { clock_.begin(monotonic_ns()); }
  /// Reads the clock in a spinning call.
  void look() noexcept { clock_.look(monotonic_ns(), timer_ns); }

  /// @name Descriptors
  /// Returns whether the system did it; `errno` has the reason if not.
  /// @{
  bool add(int socket, std::uint32_t events, std::uint64_t key) const noexcept {
    return control(EPOLL_CTL_ADD, socket, events, key);
  }
  bool change(int socket, std::uint32_t events, std::uint64_t key) const noexcept {
    return control(EPOLL_CTL_MOD, socket, events, key);
  }
  /// Call it before the descriptor is closed: a forked child may hold it open, and then epoll would continue
  /// to report it. No effect for -1.
  void remove(int socket) const noexcept {
    if (socket >= 0) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, socket, nullptr);
  }
  /// @}

  /// @name Waking
  /// @{
  /// Ends a `wait`, this or the next. Any thread may call it.
  void wake() const noexcept {
    const std::uint64_t one = 1;
    static_cast<void>(!::write(wake_.get(), &one, sizeof(one)));
  }
  /// Consumes the event of `wake`.
  void note_wake() noexcept {
    std::uint64_t times = 0;
    is_woken_ = ::read(wake_.get(), &times, sizeof(times)) > 0 || is_woken_;
  }
  [[nodiscard]] bool is_woken() const noexcept { return is_woken_; }
  void forget_wake() noexcept { is_woken_ = false; }
  /// @}

  /// The result of a `wait`.
  struct found {
    std::size_t events = 0;  ///< number of entries in the array
    bool is_hot_ready = false;
  };
  /// Waits until a descriptor is ready, the next timer is due or that time has come; a signal ends it early.
  /// @param writable  a socket that ends the wait when it can be written to, or -1; epoll need not know it
  /// @param hot  a socket that epoll does not watch and that ends the wait when it can be read, or -1
  [[nodiscard]] found wait(std::uint64_t until, int writable, int hot, event_array& events) noexcept {
    found all;
    int timeout = milliseconds_until(clock_.now(), clock_.wait_until(until));
    const std::uint64_t most =
        timeout < 0 ? ~std::uint64_t{0} : std::uint64_t(timeout) * 1'000'000 + timer_ns;
    bool is_epoll_ready = true;
    if (writable >= 0 || hot >= 0) {
      std::array<pollfd, 3> asked{pollfd{epoll_.get(), POLLIN, 0}, pollfd{writable, POLLOUT, 0},
                                  pollfd{hot, POLLIN, 0}};
      const int ready = ::poll(asked.data(), asked.size(), timeout);
      all.is_hot_ready = ready > 0 && asked[2].revents != 0;
      is_epoll_ready = ready > 0 && asked[0].revents != 0;
      timeout = 0;
    }
    if (is_epoll_ready) {
      const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout);
      all.events = count > 0 ? static_cast<std::size_t>(count) : 0;
    }
    clock_.look(monotonic_ns(), most);
    clock_.note_looked();
    return all;
  }

 private:
  bool control(int what, int socket, std::uint32_t events, std::uint64_t key) const noexcept {
    epoll_event event{};
    event.events = events;
    event.data.u64 = key;
    return ::epoll_ctl(epoll_.get(), what, socket, &event) == 0;
  }

  descriptor epoll_;
  descriptor wake_;
  listening_clock clock_;
  bool is_woken_ = false;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
