/// @file
/// `seat_candidate`: the process that will take a seat of a socket endpoint next.
#pragma once

#include <llmmem/comm/detail/frame_seal.hpp>
#include <llmmem/comm/detail/socket_descriptor.hpp>
#include <llmmem/comm/detail/socket_system.hpp>
#include <llmmem/comm/detail/socket_wire.hpp>
#include <llmmem/config.hpp>

#include <sys/socket.h>
#include <sys/types.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The connections of one process that has proved itself. It can take its seat when both lanes exist.
///
/// @invariant  Every lane belongs to the process of the first one.
/// @par Thread safety   one thread at a time.
class seat_candidate {
 public:
  [[nodiscard]] bool is_any() const noexcept { return lanes_[0].is_open() || lanes_[1].is_open(); }
  [[nodiscard]] bool is_complete() const noexcept { return lanes_[0].is_open() && lanes_[1].is_open(); }
  [[nodiscard]] bool is_of(const incarnation_id& incarnation) const noexcept {
    return incarnation_ == incarnation;
  }
  [[nodiscard]] const incarnation_id& incarnation() const noexcept { return incarnation_; }
  /// Whether it is this process.
  [[nodiscard]] bool is_own() const noexcept { return is_own_; }
  /// The time at which its first lane came.
  [[nodiscard]] std::uint64_t since() const noexcept { return since_; }
  /// Whether epoll watches its control lane: a caller takes the seat with its first message there.
  [[nodiscard]] bool is_watched() const noexcept { return is_watched_; }
  void set_watched(bool is_watched) noexcept { is_watched_ = is_watched; }
  [[nodiscard]] int told_socket() const noexcept { return lanes_[1].get(); }

  /// Begins with the first lane of a process. @param process  a pidfd, closed if unknown
  void begin(const incarnation_id& incarnation, descriptor process, bool is_own, std::uint64_t now) noexcept {
    incarnation_ = incarnation;
    process_ = std::move(process);
    is_own_ = is_own;
    since_ = now;
  }
  void add(socket_lane lane, descriptor socket, const lane_seals& seals = {}) noexcept {
    lanes_[static_cast<std::size_t>(lane)] = std::move(socket);
    seals_[static_cast<std::size_t>(lane)] = seals;
  }
  /// By lane.
  [[nodiscard]] const std::array<lane_seals, 2>& seals() const noexcept { return seals_; }
  [[nodiscard]] descriptor take(socket_lane lane) noexcept {
    return std::move(lanes_[static_cast<std::size_t>(lane)]);
  }
  [[nodiscard]] descriptor take_process() noexcept { return std::move(process_); }

  /// Whether it lives and holds its lanes open, as far as this process can see.
  [[nodiscard]] bool is_there() const noexcept {
    if (!is_any() || has_exited(process_)) return false;
    for (const descriptor& lane : lanes_)
      if (lane.is_open() && !is_open_there(lane)) return false;
    return true;
  }

  /// The state of its control lane.
  enum class word : std::uint8_t { none, some, ended };
  [[nodiscard]] word look() const noexcept {
    std::byte first{};
    const ssize_t got = ::recv(lanes_[1].get(), &first, 1, MSG_PEEK | MSG_DONTWAIT);
    if (got > 0) return word::some;
    return got < 0 && (would_block(errno) || errno == EINTR) ? word::none : word::ended;
  }

 private:
  std::array<descriptor, 2> lanes_;
  std::array<lane_seals, 2> seals_{};
  descriptor process_;
  incarnation_id incarnation_{};
  std::uint64_t since_ = 0;
  bool is_watched_ = false;
  bool is_own_ = false;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
