/// @file
/// `inbox`: an epoch's messages, assembled from frames in the waiting receiver's buffer or, early, in a
/// store.
#pragma once

#include <llmmem/comm/endpoint.hpp>
#include <llmmem/comm/id_set.hpp>
#include <llmmem/config.hpp>
#include <llmmem/hash/crc32c.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace comm {

/// What the store charges for each early message in addition to its bytes: the cost of keeping it.
inline constexpr std::uint64_t early_message_bytes = 256;

}  // namespace comm

namespace detail {

/// How a message arrived.
struct message_outcome {
  enum class kind : std::uint8_t { none, whole, damaged, other_size };

  kind what = kind::none;
  std::uint64_t bytes = 0;      ///< of the message
  std::uint32_t left_with = 0;  ///< checksum of a damaged frame, as sent
  std::uint32_t came_with = 0;
};

/// A message that has not been requested yet.
struct early_message {
  message_outcome outcome{};
  std::vector<std::byte> bytes{};
};

/// Whole messages of a tag, in the order of arrival.
class early_queue {
 public:
  [[nodiscard]] bool empty() const noexcept { return begin_ == kept_.size(); }
  [[nodiscard]] const early_message& front() const noexcept { return kept_[begin_]; }
  /// Makes space for one more, so that `push` needs no memory. A tag with one message costs only its charge.
  void make_room() {
    if (kept_.size() == kept_.capacity()) kept_.reserve(kept_.empty() ? 1 : 2 * kept_.size());
  }
  void push(early_message&& message) noexcept { kept_.push_back(std::move(message)); }
  void pop() noexcept {
    kept_[begin_++].bytes = {};
    const std::size_t left = kept_.size() - begin_;
    if (4 * left <= kept_.capacity() && shrink(left)) return;
    if (begin_ < left) return;
    kept_.erase(kept_.begin(), kept_.begin() + static_cast<std::ptrdiff_t>(begin_));
    begin_ = 0;
  }
  /// Messages that fit without more memory, including those kept.
  [[nodiscard]] std::size_t capacity() const noexcept { return kept_.capacity(); }

 private:
  /// Shrinks to twice the remaining messages, plus one for a message in progress. Returns whether it did; it
  /// fails without memory.
  [[nodiscard]] bool shrink(std::size_t left) noexcept {
    if (2 * left + 1 >= kept_.capacity()) return false;
    std::vector<early_message> fewer;
    try {
      fewer.reserve(2 * left + 1);
    } catch (...) {
      return false;
    }
    for (std::size_t i = begin_; i < kept_.size(); ++i)
      fewer.push_back(std::move(kept_[i]));
    kept_ = std::move(fewer);
    begin_ = 0;
    return true;
  }

  std::vector<early_message> kept_{};
  std::size_t begin_ = 0;  // messages before it are taken: at most half of all
};

/// One message at a time is awaited; other messages are kept while there is space, and left in the transport
/// when there is none. A seat's messages are assembled one at a time, as its frames arrive. The first frame
/// of a message fixes its length and its tag: a later frame that differs is not part of it.
///
/// @par Complexity   a frame or a message taken: O(log t) for t tags among its sender's kept messages.
/// @par Errors       the constructor throws `std::bad_alloc`. Without memory an early message is left in the
///   transport.
class inbox {
 public:
  /// @throws std::bad_alloc
  inbox(std::uint32_t seats, std::uint64_t early_bytes) : senders_(seats), most_(early_bytes) {}

  /// Charged for messages that have not been requested yet: their bytes, and `comm::early_message_bytes`
  /// each.
  [[nodiscard]] std::uint64_t early_bytes() const noexcept { return held_; }
  /// Bytes that the next early message may have.
  [[nodiscard]] std::uint64_t room() const noexcept {
    const std::uint64_t left = most_ - held_;
    return left < comm::early_message_bytes ? 0 : left - comm::early_message_bytes;
  }
  /// Frames of messages whose beginning was lost, because their sender or receiver abandoned them.
  [[nodiscard]] std::uint64_t torn_frames() const noexcept { return torn_; }

  /// Waits for the next message of that tag. A stored one is taken at once. @pre none is awaited
  void await(seat_id from, std::uint32_t tag, std::span<std::byte> bytes) noexcept {
    from_ = from;
    tag_ = tag;
    bytes_ = bytes;
    outcome_ = {};
    take_early();
  }
  [[nodiscard]] bool is_awaiting() const noexcept { return from_ != no_seat; }
  /// Bytes of the awaited message that have arrived.
  [[nodiscard]] std::uint64_t awaited_bytes() const noexcept {
    if (from_ == no_seat) return 0;
    const sender& of = senders_[to_index(from_)];
    return of.into == target::awaited ? of.next : 0;
  }
  /// How the awaited message arrived. Valid once nothing is awaited.
  [[nodiscard]] const message_outcome& outcome() const noexcept { return outcome_; }
  /// Ends the wait. Returns whether a frame may be in flight into its bytes: it must be withdrawn.
  [[nodiscard]] bool end_await() noexcept {
    if (from_ == no_seat) return false;
    sender& of = senders_[to_index(std::exchange(from_, no_seat))];
    if (of.into != target::awaited) return false;
    of.into = target::none;
    return true;
  }

  /// Returns the length of the next message of that tag, once it is known.
  [[nodiscard]] std::optional<std::uint64_t> size_of_next(seat_id from, std::uint32_t tag) const noexcept {
    const sender& of = senders_[to_index(from)];
    const auto kept = of.early.find(tag);
    if (kept != of.early.end() && !kept->second.empty()) return kept->second.front().bytes.size();
    if (of.into == target::early && of.tag == tag) return of.length;
    if (of.offered && of.offered->tag == tag) return of.offered->message;
    return std::nullopt;
  }

  /// See `frame_handler`. For frames of this epoch, from reachable members.
  [[nodiscard]] frame_buffer buffer_for(seat_id from, const frame_header& frame) noexcept {
    sender& of = senders_[to_index(from)];
    if (frame.bytes > frame.message || frame.offset > frame.message - frame.bytes) return torn();
    if (frame.offset == 0) {
      abandon(of, from);
      if (!begin(of, from, frame)) return {.what = frame_buffer::answer::ask_again};
    } else if (of.into == target::none || frame.offset != of.next || frame.message != of.length ||
               frame.tag != of.tag) {
      return torn();
    }
    if (of.into == target::dropped) return {};
    return {.what = frame_buffer::answer::take, .bytes = place(of, frame)};
  }

  void on_frame(seat_id from, const frame_header& frame) noexcept {
    sender& of = senders_[to_index(from)];
    if (of.into == target::none || of.into == target::dropped) return;
    if (frame.is_checked != 0) check(of, frame);
    of.next = frame.offset + frame.bytes;
    if (of.next != of.length) return;
    if (std::exchange(of.into, target::none) == target::awaited) {
      if (outcome_.what == message_outcome::kind::none) outcome_.what = message_outcome::kind::whole;
      from_ = no_seat;
    } else {
      of.early.find(of.tag)->second.push(std::move(*of.building));
      of.building.reset();
      if (from == from_) take_early();
    }
  }

  /// Nothing more comes from that seat. Complete messages stay.
  void forget(seat_id from) noexcept {
    sender& of = senders_[to_index(from)];
    abandon(of, from);
    of.offered.reset();
  }
  /// Begins another epoch: drops the stored messages of the previous one.
  void clear() noexcept {
    for (sender& of : senders_) {
      of.early.clear();
      of.building.reset();
      of.offered.reset();
      of.into = target::none;
    }
    held_ = 0;
    from_ = no_seat;
  }

 private:
  enum class target : std::uint8_t { none, awaited, early, dropped };
  struct sender {
    target into = target::none;
    std::uint32_t tag = 0;                    // the tag of the message being assembled
    std::uint64_t length = 0;                 // its length, by its first frame
    std::uint64_t next = 0;                   // next byte of that message
    std::optional<early_message> building{};  // the message itself, if it has not been requested yet
    // Whole messages, by tag. The tag of `building` has an entry here.
    std::map<std::uint32_t, early_queue> early{};
    std::optional<frame_header> offered{};  // the beginning of a message that waits for space
  };

  [[nodiscard]] frame_buffer torn() noexcept {
    ++torn_;
    return {};
  }

  [[nodiscard]] bool begin(sender& of, seat_id from, const frame_header& frame) noexcept {
    of.next = 0;
    of.tag = frame.tag;
    of.length = frame.message;
    if (from == from_ && frame.tag == tag_) {
      outcome_ = {.bytes = frame.message};
      of.into = target::awaited;
      if (frame.message != bytes_.size()) {
        outcome_.what = message_outcome::kind::other_size;
        from_ = no_seat;
        of.into = target::dropped;
      }
    } else if (!keep(of, frame)) {
      of.offered = frame;
      return false;
    }
    of.offered.reset();
    return true;
  }

  [[nodiscard]] bool keep(sender& of, const frame_header& frame) noexcept {
    if (most_ - held_ < comm::early_message_bytes || frame.message > room()) return false;
    try {
      of.early[frame.tag].make_room();
      of.building.emplace().outcome.bytes = frame.message;
      of.building->bytes.resize(frame.message);
    } catch (...) {  // out of memory
      of.building.reset();
      forget_tag(of);
      return false;
    }
    held_ += price_of(frame.message);
    of.into = target::early;
    return true;
  }
  [[nodiscard]] static constexpr std::uint64_t price_of(std::uint64_t bytes) noexcept {
    return bytes + comm::early_message_bytes;
  }
  /// Removes the tag of the message in progress, unless others of that tag are kept.
  static void forget_tag(sender& of) noexcept {
    const auto kept = of.early.find(of.tag);
    if (kept != of.early.end() && kept->second.empty()) of.early.erase(kept);
  }

  [[nodiscard]] std::span<std::byte> place(sender& of, const frame_header& frame) noexcept {
    const std::span<std::byte> all =
        of.into == target::awaited ? bytes_ : std::span<std::byte>(of.building->bytes);
    return all.subspan(frame.offset, frame.bytes);
  }

  void check(sender& of, const frame_header& frame) noexcept {
    const std::uint32_t came_with = crc32c(0, place(of, frame));
    if (came_with == frame.crc) return;
    message_outcome& outcome = of.into == target::awaited ? outcome_ : of.building->outcome;
    outcome.what = message_outcome::kind::damaged;
    outcome.left_with = frame.crc;
    outcome.came_with = came_with;
  }

  /// Abandons the message being assembled: its sender gave it up, or died.
  void abandon(sender& of, seat_id from) noexcept {
    switch (std::exchange(of.into, target::none)) {
      case target::early:
        held_ -= price_of(of.building->bytes.size());
        of.building.reset();
        forget_tag(of);
        break;
      case target::awaited:
        if (from == from_) outcome_ = {};
        break;
      case target::dropped:
      case target::none:
        break;
    }
  }

  void take_early() noexcept {
    sender& of = senders_[to_index(from_)];
    const auto kept = of.early.find(tag_);
    if (kept == of.early.end() || kept->second.empty()) return;
    const early_message& first = kept->second.front();
    outcome_ = first.outcome;
    if (first.bytes.size() != bytes_.size()) {
      outcome_.what = message_outcome::kind::other_size;
    } else if (outcome_.what == message_outcome::kind::none) {
      outcome_.what = message_outcome::kind::whole;
      if (!bytes_.empty()) std::memcpy(bytes_.data(), first.bytes.data(), bytes_.size());
    }
    held_ -= price_of(first.bytes.size());
    kept->second.pop();
    const bool is_under_way = of.into == target::early && of.tag == tag_;
    if (kept->second.empty() && !is_under_way) of.early.erase(kept);
    from_ = no_seat;
  }

  std::vector<sender> senders_;
  std::uint64_t most_;
  std::uint64_t held_ = 0;
  std::uint64_t torn_ = 0;
  seat_id from_ = no_seat;  // awaited
  std::uint32_t tag_ = 0;
  std::span<std::byte> bytes_{};
  message_outcome outcome_{};
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
