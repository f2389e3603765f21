/// @file
/// The handshake of two endpoints, without their sockets: four messages of fixed size, of which the last two
/// prove that both have the secret.
#pragma once

#include <llmmem/comm/detail/frame_seal.hpp>
#include <llmmem/comm/detail/socket_wire.hpp>
#include <llmmem/config.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// One side of a handshake: caller's hello, listener's hello, caller's proof, listener's answer with its own.
///
/// The endpoint keeps only these bytes of a foreign process, and reacts only with a hello. Each proof covers
/// both hellos, and so both nonces, seats and incarnations, and the lane.
class socket_handshake {
 public:
  enum class turn : std::uint8_t {
    wait,     ///< for more bytes
    say,      ///< send `says()`, then wait
    judge,    ///< the caller has proved itself: `answer` it
    settled,  ///< the listener has proved itself: `answered()`
    refused,  ///< a foreign process
  };

  /// Why the other end is refused.
  enum class refusal : std::uint8_t {
    none,
    no_hello,
    other_version,
    other_seat,   ///< of `theirs()`: it is not the called process, or did not call this one
    wrong_proof,  ///< of `theirs()`
  };

  /// Begins as the caller: `says()` comes first.
  void call(const wire_hello& mine) noexcept {
    is_caller_ = true;
    begin(mine, wire_hello_bytes);
    write_hello(mine, mine_bytes_);
    say(mine_bytes_);
  }
  /// Begins as the listener; the handshake determines the seat that `mine` is for.
  void listen(const wire_hello& mine) noexcept {
    is_caller_ = false;
    begin(mine, wire_hello_bytes);
  }

  /// Returns where the next bytes go: never empty before it is settled, refused or judged.
  [[nodiscard]] std::span<std::byte> wanted() noexcept {
    return std::span(in_).subspan(got_, wanted_ - got_);
  }
  [[nodiscard]] std::span<const std::byte> says() const noexcept { return std::span(out_).first(out_bytes_); }
  [[nodiscard]] const wire_hello& theirs() const noexcept { return theirs_; }
  [[nodiscard]] hello_answer answered() const noexcept { return answer_; }
  [[nodiscard]] refusal why() const noexcept { return why_; }
  /// Whether this process names itself to a refused caller, which then knows the reason: `says()`.
  [[nodiscard]] bool has_farewell() const noexcept {
    return !is_caller_ && (why_ == refusal::other_version || why_ == refusal::other_seat);
  }
  /// Whether anything has come from the other end.
  [[nodiscard]] bool has_heard() const noexcept { return got_ != 0 || wanted_ != wire_hello_bytes; }
  /// Whether the other end began with a record of TLS instead of a hello: a handshake, or an alert.
  [[nodiscard]] bool has_seen_tls() const noexcept {
    if (wanted_ != wire_hello_bytes || (got_ < 2 && why_ != refusal::no_hello)) return false;
    return (in_[0] == std::byte{0x15} || in_[0] == std::byte{0x16}) && in_[1] == std::byte{3};
  }
  /// Whether this process has called, and proved its knowledge.
  [[nodiscard]] bool has_proved() const noexcept { return is_caller_ && wanted_ == wire_answer_bytes; }

  /// Returns how the frames of the connection are sealed: not at all if neither side requests it.
  /// @pre `turn::judge` or `turn::settled`
  [[nodiscard]] lane_seals seals(const hmac_sha256& secret) const noexcept {
    if (!mine_.asks_for_seals && !theirs_.asks_for_seals) return {};
    return is_caller_ ? seals_of(secret, mine_bytes_, theirs_bytes_, true)
                      : seals_of(secret, theirs_bytes_, mine_bytes_, false);
  }

  /// Processes `count` received bytes. @pre at most `wanted()`
  turn took(std::size_t count, const hmac_sha256& secret) noexcept {
    got_ += count;
    if (got_ != wanted_) return turn::wait;
    got_ = 0;
    if (wanted_ == wire_hello_bytes) return took_hello(secret);
    return is_caller_ ? took_answer(secret) : took_proof(secret);
  }

  /// Answers a caller that has proved itself. @pre `turn::judge`
  void answer(hello_answer what, const hmac_sha256& secret) noexcept {
    std::array<std::byte, wire_answer_bytes> said{};
    wire_writer(said).put(static_cast<std::uint32_t>(what));
    const wire_proof proof = listener_proof(secret, theirs_bytes_, mine_bytes_, what);
    for (std::size_t i = 0; i < proof.size(); ++i)
      said[4 + i] = proof[i];
    say(said);
  }

 private:
  void begin(const wire_hello& mine, std::size_t wanted) noexcept {
    mine_ = mine;
    wanted_ = wanted;
    got_ = out_bytes_ = 0;
    why_ = refusal::none;
  }
  void say(std::span<const std::byte> bytes) noexcept {
    for (std::size_t i = 0; i < bytes.size(); ++i)
      out_[i] = bytes[i];
    out_bytes_ = bytes.size();
  }

  void say_hello() noexcept {
    write_hello(mine_, mine_bytes_);
    say(mine_bytes_);
  }
  turn refuse(refusal why) noexcept {
    why_ = why;
    return turn::refused;
  }

  turn took_hello(const hmac_sha256& secret) noexcept {
    for (std::size_t i = 0; i < wire_hello_bytes; ++i)
      theirs_bytes_[i] = in_[i];
    if (is_other_version(theirs_bytes_)) {
      if (!is_caller_) say_hello();
      return refuse(refusal::other_version);
    }
    const std::optional<wire_hello> theirs = read_hello(theirs_bytes_, max_seats);
    if (!theirs) return refuse(refusal::no_hello);
    theirs_ = *theirs;
    if (is_caller_) {
      if (theirs_.to != mine_.from) return refuse(refusal::no_hello);
      if (theirs_.from != mine_.to) return refuse(refusal::other_seat);
      if (theirs_.purpose != mine_.purpose) return refuse(refusal::no_hello);
      say(caller_proof(secret, mine_bytes_, theirs_bytes_));
      wanted_ = wire_answer_bytes;
      return turn::say;
    }
    if (theirs_.to != mine_.from) {
      mine_.to = theirs_.from;
      mine_.purpose = theirs_.purpose;
      say_hello();
      return refuse(refusal::other_seat);
    }
    // The higher seat makes lanes, the lower one knocks.
    const bool is_from_above = to_index(theirs_.from) > to_index(mine_.from);
    if (is_from_above == (theirs_.purpose == hello_purpose::knock)) return refuse(refusal::no_hello);
    mine_.to = theirs_.from;
    mine_.purpose = theirs_.purpose;
    say_hello();
    wanted_ = wire_proof_bytes;
    return turn::say;
  }
  turn took_proof(const hmac_sha256& secret) noexcept {
    const wire_proof right = caller_proof(secret, theirs_bytes_, mine_bytes_);
    const std::span<const std::byte> said = std::span<const std::byte>(in_).first(wire_proof_bytes);
    return is_equal_in_constant_time(said, right) ? turn::judge : refuse(refusal::wrong_proof);
  }
  turn took_answer(const hmac_sha256& secret) noexcept {
    const std::span<const std::byte> said = in_;
    const auto what = wire_reader(said).take<std::uint32_t>();
    if (what > static_cast<std::uint32_t>(hello_answer::mismatched)) return refuse(refusal::no_hello);
    answer_ = static_cast<hello_answer>(what);
    const wire_proof right = listener_proof(secret, mine_bytes_, theirs_bytes_, answer_);
    return is_equal_in_constant_time(said.subspan(4, wire_proof_bytes), right) ? turn::settled
                                                                               : refuse(refusal::wrong_proof);
  }

  wire_hello mine_{};
  wire_hello theirs_{};
  std::array<std::byte, wire_hello_bytes> mine_bytes_{};
  std::array<std::byte, wire_hello_bytes> theirs_bytes_{};
  std::array<std::byte, wire_hello_bytes> in_{};
  std::array<std::byte, wire_hello_bytes> out_{};
  std::size_t wanted_ = 0;
  std::size_t got_ = 0;
  std::size_t out_bytes_ = 0;
  hello_answer answer_ = hello_answer::welcome;
  refusal why_ = refusal::none;
  bool is_caller_ = false;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
