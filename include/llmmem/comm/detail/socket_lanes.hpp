/// @file
/// The lanes of a socket endpoint without their sockets: received bytes become frames, and frames that cannot
/// be sent yet wait as bytes.
#pragma once

#include <llmmem/comm/detail/frame_seal.hpp>
#include <llmmem/comm/detail/socket_wire.hpp>
#include <llmmem/comm/endpoint.hpp>
#include <llmmem/config.hpp>

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// A frame handler without its type, so that its callers are compiled once.
struct frame_handler_ref {
  void* object;
  frame_buffer (*on_buffer_for)(void*, seat_id, const frame_header&) noexcept;
  void (*on_arrived)(void*, seat_id, const frame_header&) noexcept;
  void (*on_told)(void*, seat_id, const frame_header&, std::span<const std::byte>) noexcept;
  void (*on_died)(void*, seat_id, comm::death) noexcept;
  void (*on_came)(void*, seat_id) noexcept;
  bool (*on_keeps_waiting)(void*) noexcept;
};

template <frame_handler H>
[[nodiscard]] frame_handler_ref refer_to(H& handler) noexcept {
  return {&handler,
          [](void* h, seat_id from, const frame_header& header) noexcept {
            return static_cast<H*>(h)->buffer_for(from, header);
          },
          [](void* h, seat_id from, const frame_header& header) noexcept {
            static_cast<H*>(h)->on_frame(from, header);
          },
          [](void* h, seat_id from, const frame_header& header, std::span<const std::byte> bytes) noexcept {
            static_cast<H*>(h)->on_message(from, header, bytes);
          },
          [](void* h, seat_id seat, comm::death how) noexcept { static_cast<H*>(h)->on_death(seat, how); },
          [](void* h, seat_id seat) noexcept { static_cast<H*>(h)->on_joined(seat); },
          [](void* h) noexcept { return static_cast<const H*>(h)->keeps_waiting(); }};
}

/// The handler of one call of an endpoint, and whether anything was reported to it.
struct handler_call {
  frame_handler_ref handler{};
  bool has_come = false;

  void on_joined(seat_id seat) noexcept {
    has_come = true;
    handler.on_came(handler.object, seat);
  }
  void on_death(seat_id seat, comm::death how) noexcept {
    has_come = true;
    handler.on_died(handler.object, seat, how);
  }
  [[nodiscard]] bool keeps_waiting() const noexcept { return handler.on_keeps_waiting(handler.object); }
};

/// What a lane has carried in one direction.
struct lane_count {
  std::uint64_t frames = 0;
  std::uint64_t bytes = 0;
};

/// The result of reading.
enum class read_state : std::uint8_t {
  more,       ///< everything is taken, more may be read
  later,      ///< a frame has no space yet: nothing more may be read
  malformed,  ///< no header where one must be: everything after it is meaningless
  forged,     ///< a frame has a wrong seal: this frame and all after it count as forged
};

/// Turns bytes into frames of data. Short ones are read at once and copied; the rest of a long one is read
/// directly to its destination.
class data_reader {
 public:
  static constexpr std::size_t staging_bytes = 16384;
  static constexpr std::size_t long_bytes = 4096;

  /// Before the first `restart`. Throws `std::bad_alloc`.
  void reserve() { staging_.resize(staging_bytes); }
  /// Prepares for a new connection.
  void restart(std::uint32_t most_bytes, const frame_seal& seal = {}) noexcept {
    phase_ = phase::header;
    begin_ = end_ = 0;
    header_ = {};
    seal_ = seal;
    number_ = 0;
    most_bytes_ = most_bytes;
  }
  /// From now on ignores incoming bytes.
  void drain() noexcept { phase_ = phase::draining; }
  [[nodiscard]] bool is_held() const noexcept { return phase_ == phase::later; }
  /// Bytes that were read.
  [[nodiscard]] std::uint64_t taken() const noexcept { return taken_; }
  /// Takes back the buffer of the frame in progress.
  void withdraw() noexcept {
    if (phase_ == phase::taking) phase_ = phase::dropping;
  }

  /// Returns where the next bytes must be read to, one or two places. @pre not `is_held()`
  std::size_t places(std::span<iovec, 2> into, std::span<std::byte> scratch) noexcept {
    switch (phase_) {
      case phase::taking: {
        into[0] = {buffer_.data() + done_, buffer_.size() - done_};
        into[1] = {staging_.data(), ahead()};
        return 2;
      }
      case phase::dropping:
        into[0] = {scratch.data(), smaller(scratch.size(), header_.bytes - done_)};
        return 1;
      case phase::draining:
        into[0] = {scratch.data(), scratch.size()};
        return 1;
      default:
        into[0] = {staging_.data() + end_, ahead() - end_};
        return 1;
    }
  }

  /// Processes `count` bytes that were read to these places.
  read_state took(std::size_t count, seat_id from, const frame_handler_ref& handler, lane_count& counted,
                  bool& has_come) noexcept {
    taken_ += count;
    switch (phase_) {
      case phase::draining:
        return read_state::more;
      case phase::dropping:
        done_ += count;
        if (done_ == header_.bytes) finish(counted);
        return read_state::more;
      case phase::taking: {
        const std::size_t part = smaller(count, buffer_.size() - done_);
        done_ += part;
        end_ = count - part;
        break;
      }
      default:
        end_ += count;
    }
    return proceed(from, handler, counted, has_come);
  }

  /// Asks again for the held frame.
  read_state ask_again(seat_id from, const frame_handler_ref& handler, lane_count& counted,
                       bool& has_come) noexcept {
    return proceed(from, handler, counted, has_come);
  }

 private:
  enum class phase : std::uint8_t { header, later, taking, dropping, draining };

  /// How much is read before its destination is known. A long frame is usually followed by another long
  /// frame, whose bytes must not be copied: so only its header.
  [[nodiscard]] std::size_t ahead() const noexcept {
    return header_.bytes > long_bytes ? wire_header_bytes : staging_.size();
  }
  [[nodiscard]] static std::size_t smaller(std::size_t a, std::size_t b) noexcept { return a < b ? a : b; }

  void finish(lane_count& counted) noexcept {
    phase_ = phase::header;
    ++counted.frames;
    counted.bytes += header_.bytes;
  }

  read_state proceed(seat_id from, const frame_handler_ref& handler, lane_count& counted,
                     bool& has_come) noexcept {
    for (;;) {
      if (phase_ == phase::header) {
        if (end_ - begin_ < wire_header_bytes) break;
        const std::span<const std::byte, wire_header_bytes> bytes(staging_.data() + begin_,
                                                                  wire_header_bytes);
        if (!seal_.opens(bytes, number_)) return read_state::forged;
        const std::optional<wire_header> next = read_header(
            bytes, socket_lane::data, static_cast<std::uint32_t>(number_), most_bytes_, seal_.is_closed());
        if (!next) return read_state::malformed;
        bytes_tag_ = frame_seal::bytes_tag(bytes);
        ++number_;
        begin_ += wire_header_bytes;
        header_ = next->frame;
        phase_ = phase::later;
      }
      if (phase_ == phase::later) {
        const frame_buffer given = handler.on_buffer_for(handler.object, from, header_);
        if (given.what == frame_buffer::answer::ask_again) return read_state::later;
        done_ = 0;
        const bool is_taken = given.what == frame_buffer::answer::take && given.bytes.size() >= header_.bytes;
        phase_ = is_taken ? phase::taking : phase::dropping;
        buffer_ = is_taken ? given.bytes.first(header_.bytes) : std::span<std::byte>();
      }
      const std::size_t part = smaller(end_ - begin_, header_.bytes - done_);
      if (phase_ == phase::taking && part != 0)
        std::memcpy(buffer_.data() + done_, staging_.data() + begin_, part);
      begin_ += part;
      done_ += part;
      if (done_ != header_.bytes) break;
      const bool is_taken = phase_ == phase::taking;
      // Dropped bytes need not be authentic.
      if (is_taken && !seal_.opens_bytes(buffer_, bytes_tag_, number_ - 1)) {
        std::memset(buffer_.data(), 0, buffer_.size());  // no forged byte remains where others read
        return read_state::forged;
      }
      finish(counted);
      if (!is_taken) continue;
      has_come = true;
      handler.on_arrived(handler.object, from, header_);
    }
    if (begin_ != 0) std::memmove(staging_.data(), staging_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
    return read_state::more;
  }

  std::vector<std::byte> staging_;
  std::size_t begin_ = 0;  // the first of the bytes in it not yet processed
  std::size_t end_ = 0;
  std::span<std::byte> buffer_;
  std::size_t done_ = 0;  // bytes of the frame in progress
  std::uint64_t taken_ = 0;
  frame_header header_{};
  frame_seal seal_{};
  std::uint64_t number_ = 0;     // of the next frame
  std::uint64_t bytes_tag_ = 0;  // of the frame in progress
  std::uint32_t most_bytes_ = 0;
  phase phase_ = phase::header;
};

/// Turns bytes into control frames.
class told_reader {
 public:
  /// Before the first `restart`. Throws `std::bad_alloc`.
  void reserve() { staging_.resize(2 * (wire_header_bytes + max_post_bytes)); }
  void restart(const frame_seal& seal = {}) noexcept {
    is_draining_ = is_mute_ = is_leaving_ = is_given_up_ = false;
    end_ = 0;
    seal_ = seal;
    number_ = 0;
  }
  /// From now on ignores incoming bytes.
  void drain() noexcept { is_draining_ = true; }
  /// From now on delivers nothing, but still notes the endpoint's own notices.
  void mute() noexcept { is_mute_ = true; }
  [[nodiscard]] bool is_leaving() const noexcept { return is_leaving_; }
  [[nodiscard]] bool is_given_up() const noexcept { return is_given_up_; }

  [[nodiscard]] iovec place() noexcept {
    if (is_draining_) end_ = 0;
    return {staging_.data() + end_, staging_.size() - end_};
  }

  read_state took(std::size_t count, seat_id from, const frame_handler_ref& handler, lane_count& counted,
                  bool& has_come) noexcept {
    if (is_draining_) return read_state::more;
    end_ += count;
    std::size_t begin = 0;
    while (end_ - begin >= wire_header_bytes) {
      const std::span<const std::byte, wire_header_bytes> bytes(staging_.data() + begin, wire_header_bytes);
      if (!seal_.opens(bytes, number_)) return read_state::forged;
      const std::optional<wire_header> header = read_header(
          bytes, socket_lane::told, static_cast<std::uint32_t>(number_), max_post_bytes, seal_.is_closed());
      if (!header) return read_state::malformed;
      const std::size_t whole = wire_header_bytes + header->frame.bytes;
      if (end_ - begin < whole) break;
      const std::span<const std::byte> content(staging_.data() + begin + wire_header_bytes,
                                               header->frame.bytes);
      if (!seal_.opens_bytes(content, frame_seal::bytes_tag(bytes), number_)) return read_state::forged;
      ++number_;
      is_leaving_ |= header->sort == frame_sort::leaving;
      is_given_up_ |= header->sort == frame_sort::given_up;
      if (header->sort == frame_sort::frame && !is_mute_ && !is_given_up_) {
        ++counted.frames;
        counted.bytes += header->frame.bytes;
        has_come = true;
        handler.on_told(handler.object, from, header->frame, content);
      }
      begin += whole;
    }
    if (begin != 0) std::memmove(staging_.data(), staging_.data() + begin, end_ - begin);
    end_ -= begin;
    return read_state::more;
  }

 private:
  std::vector<std::byte> staging_;  // has space for a whole frame after the beginning of another
  std::size_t end_ = 0;
  frame_seal seal_{};
  std::uint64_t number_ = 0;  // of the next frame
  bool is_draining_ = false;
  bool is_mute_ = false;
  bool is_leaving_ = false;
  bool is_given_up_ = false;
};

/// Bytes that wait to be written, up to a fixed number.
class waiting_bytes {
 public:
  /// Throws `std::bad_alloc`. The pages are touched only when bytes wait.
  void reserve(std::size_t most) { bytes_.reserve(most); }
  void clear() noexcept {
    bytes_.clear();
    begin_ = 0;
  }
  [[nodiscard]] bool empty() const noexcept { return begin_ == bytes_.size(); }
  [[nodiscard]] std::size_t free_bytes() const noexcept {
    return bytes_.capacity() - (bytes_.size() - begin_);
  }
  [[nodiscard]] std::span<const std::byte> waiting() const noexcept {
    return std::span<const std::byte>(bytes_).subspan(begin_);
  }
  void went(std::size_t count) noexcept {
    begin_ += count;
    if (empty()) clear();
  }
  /// @pre at most `free_bytes()`
  void add(std::span<const std::byte> more) noexcept {
    if (bytes_.capacity() - bytes_.size() < more.size()) {
      bytes_.erase(bytes_.begin(), bytes_.begin() + static_cast<std::ptrdiff_t>(begin_));
      begin_ = 0;
    }
    bytes_.insert(bytes_.end(), more.begin(), more.end());
  }

 private:
  std::vector<std::byte> bytes_;
  std::size_t begin_ = 0;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
