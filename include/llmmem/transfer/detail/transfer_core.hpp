/// @file
/// The tables and decisions of a file queue: requested operations, requests in flight, outcomes. No locks, no
/// threads, no waiting.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/errors.hpp>
#include <llmmem/transfer/direct_span.hpp>
#include <llmmem/transfer/errors.hpp>
#include <llmmem/transfer/file_copy.hpp>
#include <llmmem/transfer/io_engine.hpp>
#include <llmmem/transfer/transfer_fence.hpp>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

namespace llmmem {
inline namespace v0 {
namespace detail {

// Without <algorithm>, which costs every user of this header 12,000 lines.
template <class T>
[[nodiscard]] constexpr T smaller(T a, T b) noexcept {
  return b < a ? b : a;
}
template <class T>
[[nodiscard]] constexpr T larger(T a, T b) noexcept {
  return a < b ? b : a;
}

/// A fence represents an *operation*; it consists of *copies*, and these are divided into *pieces*, one
/// request each. Urgent copies are divided first; with equal urgency, in the order of the requests.
class transfer_core {
 public:
  static constexpr std::size_t max_after = 4;
  static constexpr std::uint32_t none = 0xFFFF'FFFF;

  transfer_core(const file_queue_options& options, std::uint32_t depth);

  [[nodiscard]] transfer_board& board() noexcept { return board_; }
  [[nodiscard]] const transfer_board& board() const noexcept { return board_; }
  [[nodiscard]] file_queue_stats stats(std::uint64_t now_ns) const noexcept {
    file_queue_stats now = stats_;
    if (flying_ != 0) now.busy_ns += now_ns - busy_since_ns_;
    now.setting = {depth_limit_, block_bytes_};
    return now;
  }

  [[nodiscard]] result<transfer_fence> start(std::span<const file_copy> copies, transfer::urgency how,
                                             std::span<const transfer_fence> after) noexcept;

  /// Makes operations ready whose dependencies have passed.
  void admit() noexcept;

  /// Queues requests until the engine or the depth has enough.
  template <io_engine Engine>
  void issue(Engine& engine, std::uint64_t now_ns) noexcept;

  void settle(std::span<const io_completion> completions, std::uint64_t now_ns) noexcept;

  /// The engine no longer works: requests in flight count as lost, and everything that could continue fails
  /// with `why`.
  void engine_failed(const failure& why) noexcept;

  /// Returns the most retries that the system asked of one request since the last call; 0 for none. The
  /// higher, the longer the system should be left alone.
  [[nodiscard]] std::uint32_t take_pause() noexcept { return std::exchange(pause_, 0); }

  /// Gives up requests that were not answered in time. Returns the next time to call, `io_wait::forever` for
  /// never.
  [[nodiscard]] std::uint64_t give_up(std::uint64_t now_ns) noexcept;

  void cancel(std::uint32_t slot) noexcept {
    const operation& o = operations_[slot];
    fail(slot, {errc::cancelled, 0, o.bytes, o.done, name_});
  }
  void cancel_all() noexcept {
    for (std::uint32_t slot = 0; slot < operations_.size(); ++slot)
      cancel(slot);
  }
  void promote(std::uint32_t slot, transfer::urgency how) noexcept;
  /// Returns a running operation; a fence that has passed if there is none.
  [[nodiscard]] transfer_fence some_running() noexcept;
  [[nodiscard]] std::uint64_t done(std::uint32_t slot) const noexcept { return operations_[slot].done; }

  /// Sets the setting for requests from now on. @pre the depth is not above that of the constructor.
  void use(const io_setting& setting) noexcept {
    depth_limit_ = setting.depth;
    block_bytes_ = setting.block_bytes;
  }
  [[nodiscard]] std::uint64_t bytes_moved() const noexcept {
    return stats_.bytes_read + stats_.bytes_written;
  }

  /// Whether a request could be queued now, and whether any operation waits for others.
  [[nodiscard]] bool has_work() const noexcept {
    for (const list& ready : ready_) {
      if (ready.head != none) return true;
    }
    return again_count_ != 0;
  }
  [[nodiscard]] bool has_waiting() const noexcept { return waiting_.head != none; }
  /// Whether one of them waits for an operation of another queue, which does not notify this one.
  [[nodiscard]] bool waits_for_others() const noexcept { return waits_for_others_; }
  [[nodiscard]] std::uint32_t flying() const noexcept { return flying_; }

 private:
  enum class stage : std::uint8_t { over, waiting, ready, failing };
  enum class flight : std::uint8_t { landed, flying, again, lost };

  struct operation {
    stage at = stage::over;
    transfer::urgency how = transfer::urgency::demand;
    std::uint32_t first_copy = none;
    std::uint32_t copies_left = 0;
    std::uint32_t pieces = 0;  // requests in flight or to be repeated
    std::uint32_t next = none;
    std::uint32_t after_count = 0;
    std::uint64_t bytes = 0;
    std::uint64_t done = 0;
    failure why;
    std::array<transfer_fence, max_after> after{};
  };

  struct copy {
    file_copy what;
    std::uint64_t issued = 0;
    std::uint64_t done = 0;
    std::uint32_t owner = none;
    std::uint32_t sibling = none;
    std::uint32_t next = none;
  };

  struct piece {
    flight at = flight::landed;
    bool direct = false;
    std::uint32_t of = none;
    std::uint32_t life = 0;  // distinguishes a late answer from that of the slot's next piece
    std::uint32_t attempts = 0;
    std::uint32_t asked = 0;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    std::uint64_t since_ns = 0;
  };

  struct list {
    std::uint32_t head = none;
    std::uint32_t tail = none;
  };

  template <class T>
  static void append(fixed_array<T>& table, list& to, std::uint32_t index) noexcept {
    table[index].next = none;
    (to.tail == none ? to.head : table[to.tail].next) = index;
    to.tail = index;
  }

  /// Removes from `from` the entries for which `belongs(index)`, and passes them to `taken`.
  template <class T, class Belongs, class Taken>
  static void extract(fixed_array<T>& table, list& from, Belongs belongs, Taken taken) noexcept {
    std::uint32_t index = std::exchange(from, list{}).head;
    while (index != none) {
      const std::uint32_t next = table[index].next;
      if (belongs(index)) {
        taken(index);
      } else {
        append(table, from, index);
      }
      index = next;
    }
  }

  [[nodiscard]] result<void> check(std::span<const file_copy> copies, std::size_t afters) const noexcept;
  [[nodiscard]] std::uint32_t add_copies(std::uint32_t slot, std::span<const file_copy> copies) noexcept;
  void make_ready(std::uint32_t slot) noexcept;
  [[nodiscard]] std::uint32_t next_piece() noexcept;
  void choose_way(piece& p) const noexcept;
  void land(std::uint32_t index, std::int32_t outcome) noexcept;
  void repeat(std::uint32_t index) noexcept {
    pieces_[index].at = flight::again;
    again_[again_count_++] = index;
  }
  void release_piece(std::uint32_t index) noexcept;
  void lose(std::uint32_t index, failure why) noexcept;
  void fail_ready(const failure& why) noexcept;
  void fail_lost() noexcept;
  void fail(std::uint32_t slot, const failure& why) noexcept;
  void finish_if_over(std::uint32_t slot) noexcept;
  [[nodiscard]] failure failed(const piece& p, int error) const noexcept;

  transfer_board board_;
  fixed_array<operation> operations_;
  fixed_array<copy> copies_;
  fixed_array<piece> pieces_;
  fixed_array<std::uint32_t> free_pieces_;
  fixed_array<std::uint32_t> again_;
  std::array<list, 3> ready_{};
  list waiting_{};
  std::uint32_t free_copies_ = none;
  std::uint32_t free_copy_count_;
  std::uint32_t free_piece_count_;
  std::uint32_t again_count_ = 0;
  std::uint32_t flying_ = 0;
  std::uint32_t lost_ = 0;
  std::uint32_t pause_ = 0;
  std::uint32_t max_attempts_;
  std::uint32_t depth_limit_;
  std::uint64_t block_bytes_;
  std::uint64_t give_up_ns_;
  std::uint64_t busy_since_ns_ = 0;
  bool waits_for_others_ = false;
  const char* name_;
  file_queue_stats stats_;
};

inline transfer_core::transfer_core(const file_queue_options& options, std::uint32_t depth)
    : board_(options.max_operations, options.max_failures, options.metadata),
      operations_(options.max_operations, operation{}, options.metadata, "file_queue: operations"),
      copies_(options.max_copies, copy{}, options.metadata, "file_queue: copies"),
      pieces_(depth, piece{}, options.metadata, "file_queue: requests"),
      free_pieces_(depth, options.metadata, "file_queue: free requests"),
      again_(depth, options.metadata, "file_queue: requests to repeat"),
      free_copy_count_(options.max_copies),
      free_piece_count_(depth),
      max_attempts_(options.max_attempts),
      depth_limit_(depth),
      block_bytes_(options.block_bytes),
      give_up_ns_(options.give_up_ns),
      name_(options.name.c_str()) {
  for (std::uint32_t i = options.max_copies; i-- > 0;)
    copies_[i].next = std::exchange(free_copies_, i);
  for (std::uint32_t i = 0; i < depth; ++i)
    free_pieces_[i] = depth - 1 - i;
  stats_.metadata_bytes = board_.metadata_bytes() + operations_.bytes() + copies_.bytes() + pieces_.bytes() +
                          free_pieces_.bytes() + again_.bytes();
}

inline result<void> transfer_core::check(std::span<const file_copy> copies,
                                         std::size_t afters) const noexcept {
  if (afters > max_after) {
    return failure{.code = errc::out_of_range, .wanted = afters, .found = max_after, .where = name_};
  }
  if (copies.size() > free_copy_count_) {
    return failure{
        .code = errc::table_full, .wanted = copies.size(), .found = free_copy_count_, .where = name_};
  }
  for (const file_copy& each : copies) {
    if (each.file == nullptr || (each.data == nullptr && each.bytes != 0)) {
      return failure{.code = errc::null_handle, .where = name_};
    }
    if (each.way == io_direction::write && !each.file->is_writable()) {
      return failure{.code = errc::not_opened, .where = each.file->path().c_str()};
    }
    if (each.bytes > max_bytes || each.offset > max_bytes - each.bytes) {
      return failure{.code = errc::out_of_range,
                     .wanted = each.offset,
                     .found = max_bytes,
                     .where = each.file->path().c_str()};
    }
  }
  return {};
}

inline result<transfer_fence> transfer_core::start(std::span<const file_copy> copies, transfer::urgency how,
                                                   std::span<const transfer_fence> after) noexcept {
  if (const result<void> fine = check(copies, after.size()); !fine) return fine.error();
  const result<std::uint32_t> begun = board_.begin(name_);
  if (!begun) return begun.error();
  const std::uint32_t slot = *begun;
  operation& o = operations_[slot];
  o = {};
  o.how = how;
  o.copies_left = add_copies(slot, copies);
  for (const transfer_fence& each : after)
    o.after[o.after_count++] = each;
  const transfer_fence fence = board_.fence(slot);
  o.at = stage::waiting;
  append(operations_, waiting_, slot);
  admit();
  return fence;
}

inline std::uint32_t transfer_core::add_copies(std::uint32_t slot,
                                               std::span<const file_copy> copies) noexcept {
  operation& o = operations_[slot];
  std::uint32_t count = 0;
  // From the back, so that the chain of siblings is in the order of the requests.
  for (std::size_t i = copies.size(); i-- > 0;) {
    if (copies[i].bytes == 0) continue;
    const std::uint32_t index = std::exchange(free_copies_, copies_[free_copies_].next);
    --free_copy_count_;
    copies_[index] = {.what = copies[i], .owner = slot, .sibling = std::exchange(o.first_copy, index)};
    o.bytes += copies[i].bytes;
    ++count;
  }
  return count;
}

inline void transfer_core::make_ready(std::uint32_t slot) noexcept {
  operation& o = operations_[slot];
  o.at = stage::ready;
  for (std::uint32_t c = o.first_copy; c != none; c = copies_[c].sibling)
    append(copies_, ready_[static_cast<std::size_t>(o.how)], c);
  finish_if_over(slot);
}

inline void transfer_core::admit() noexcept {
  waits_for_others_ = false;
  if (waiting_.head == none) return;
  const auto passed = [this](std::uint32_t slot) {
    const operation& o = operations_[slot];
    bool all = true;
    for (std::uint32_t i = 0; i < o.after_count; ++i) {
      if (o.after[i].ready()) continue;
      all = false;
      if (!board_.gave(o.after[i])) waits_for_others_ = true;
    }
    return all;
  };
  list passing;
  extract(operations_, waiting_, passed, [&](std::uint32_t slot) { append(operations_, passing, slot); });
  for (std::uint32_t slot = passing.head; slot != none;) {
    const std::uint32_t next = operations_[slot].next;
    const operation& o = operations_[slot];
    bool fine = true;
    for (std::uint32_t i = 0; i < o.after_count; ++i)
      fine = fine && o.after[i].outcome();
    if (fine) {
      make_ready(slot);
    } else {
      operations_[slot].at = stage::ready;
      fail(slot, {.code = errc::dependency_failed, .where = name_});
    }
    slot = next;
  }
  // Some may have completed at once, so operations after them can continue.
  if (passing.head != none) admit();
}

inline void transfer_core::choose_way(piece& p) const noexcept {
  const file_copy& what = copies_[p.of].what;
  const std::uint64_t left = p.end - p.begin;
  io_span span{smaller(left, block_bytes_), false};
  if (what.file->direct() >= 0) {
    span = transfer::first_span(what.offset + p.begin, left,
                                reinterpret_cast<std::uintptr_t>(what.data + p.begin), what.file->limits(),
                                larger(block_bytes_, what.file->limits().offset_alignment));
  }
  p.asked = static_cast<std::uint32_t>(span.bytes);
  p.direct = span.direct;
}

/// Returns the next piece to request, with its path chosen; `none` when there is nothing, or no space.
inline std::uint32_t transfer_core::next_piece() noexcept {
  if (again_count_ != 0) {
    const std::uint32_t index = again_[--again_count_];
    choose_way(pieces_[index]);
    return index;
  }
  if (free_piece_count_ == 0 || pieces_.size() - free_piece_count_ - lost_ >= depth_limit_) return none;
  for (list& ready : ready_) {
    if (ready.head == none) continue;
    const std::uint32_t of = ready.head;
    copy& c = copies_[of];
    const std::uint32_t index = free_pieces_[--free_piece_count_];
    piece& p = pieces_[index];
    p = {.of = of, .life = p.life + 1, .begin = c.issued, .end = c.what.bytes};
    choose_way(p);
    p.end = p.begin + p.asked;
    c.issued = p.end;
    ++operations_[c.owner].pieces;
    if (c.issued == c.what.bytes) {
      ready.head = c.next;
      if (ready.head == none) ready.tail = none;
    }
    return index;
  }
  return none;
}

template <io_engine Engine>
void transfer_core::issue(Engine& engine, std::uint64_t now_ns) noexcept {
  // With every slot lost the device is dead: no request would ever be made.
  if (lost_ == pieces_.size()) fail_lost();
  for (;;) {
    const std::uint32_t index = next_piece();
    if (index == none) return;
    piece& p = pieces_[index];
    const file_copy& what = copies_[p.of].what;
    const io_request request{.file = p.direct ? what.file->direct() : what.file->buffered(),
                             .way = what.way,
                             .bytes = p.asked,
                             .offset = what.offset + p.begin,
                             .data = what.data + p.begin,
                             .tag = (std::uint64_t{p.life} << 32) | index};
    if (!engine.try_queue(request)) return repeat(index);
    p.at = flight::flying;
    p.since_ns = now_ns;
    if (flying_++ == 0) busy_since_ns_ = now_ns;
  }
}

inline void transfer_core::settle(std::span<const io_completion> completions, std::uint64_t now_ns) noexcept {
  for (const io_completion& each : completions) {
    const auto index = static_cast<std::uint32_t>(each.tag);
    if (index >= pieces_.size() || pieces_[index].life != each.tag >> 32) continue;
    piece& p = pieces_[index];
    if (p.at == flight::lost) {
      // A late answer, but now the memory is free.
      p.at = flight::landed;
      free_pieces_[free_piece_count_++] = index;
      --lost_;
    } else if (p.at == flight::flying) {
      if (--flying_ == 0) stats_.busy_ns += now_ns - busy_since_ns_;
      ++stats_.requests;
      land(index, each.outcome);
    }
  }
}

inline failure transfer_core::failed(const piece& p, int error) const noexcept {
  const file_copy& what = copies_[p.of].what;
  return {what.way == io_direction::read ? errc::read_failed : errc::write_failed,
          static_cast<std::uint32_t>(error), p.asked, what.offset + p.begin, what.file->path().c_str()};
}

inline void transfer_core::land(std::uint32_t index, std::int32_t outcome) noexcept {
  piece& p = pieces_[index];
  const std::uint32_t of = p.of;
  const file_copy& what = copies_[of].what;
  const std::uint32_t slot = copies_[of].owner;
  const bool reads = what.way == io_direction::read;

  if (outcome > 0) {
    const auto moved = smaller(static_cast<std::uint32_t>(outcome), p.asked);
    (reads ? stats_.bytes_read : stats_.bytes_written) += moved;
    if (!p.direct) stats_.bytes_buffered += moved;
    if (moved < p.asked) ++stats_.short_transfers;
    copies_[of].done += moved;
    operations_[slot].done += moved;
    p.begin += moved;
    p.attempts = 0;
    if (p.begin != p.end && operations_[slot].at == stage::ready) return repeat(index);
  } else if (operations_[slot].at == stage::ready) {
    const int error = -outcome;
    if (error == EINVAL && p.direct) {
      what.file->reject_direct();
      ++stats_.rejected;
      return repeat(index);
    }
    if ((error == EAGAIN || error == EINTR || error == EBUSY) && ++p.attempts < max_attempts_) {
      ++stats_.retries;
      if (error != EINTR) pause_ = larger(pause_, p.attempts);
      return repeat(index);
    }
    failure why = failed(p, error);
    if (outcome == 0 && reads) {
      // Pieces return in any order: this one may be far behind the end.
      const result<std::uint64_t> size = what.file->size();
      const std::uint64_t end = what.offset + p.begin;
      why = {errc::file_ends, 0, what.offset + what.bytes, size ? smaller(*size, end) : end,
             what.file->path().c_str()};
    }
    release_piece(index);
    return fail(slot, why);
  }
  release_piece(index);
  copy& c = copies_[of];
  if (c.done == c.what.bytes) --operations_[slot].copies_left;
  finish_if_over(slot);
}

inline void transfer_core::release_piece(std::uint32_t index) noexcept {
  piece& p = pieces_[index];
  p.at = flight::landed;
  free_pieces_[free_piece_count_++] = index;
  --operations_[copies_[p.of].owner].pieces;
}

/// Stops requesting for the operation; it is complete when the requests in flight have returned.
inline void transfer_core::fail(std::uint32_t slot, const failure& why) noexcept {
  operation& o = operations_[slot];
  if (o.at == stage::failing || o.at == stage::over) return;
  if (o.at == stage::waiting) {
    extract(operations_, waiting_, [slot](std::uint32_t i) { return i == slot; }, [](std::uint32_t) {});
  } else {
    extract(
        copies_, ready_[static_cast<std::size_t>(o.how)],
        [&](std::uint32_t i) { return copies_[i].owner == slot; }, [](std::uint32_t) {});
  }
  o.at = stage::failing;
  o.why = why;
  std::uint32_t kept = 0;
  for (std::uint32_t i = 0; i < again_count_; ++i) {
    const std::uint32_t index = again_[i];
    if (copies_[pieces_[index].of].owner == slot) {
      release_piece(index);
    } else {
      again_[kept++] = index;
    }
  }
  again_count_ = kept;
  finish_if_over(slot);
}

inline void transfer_core::finish_if_over(std::uint32_t slot) noexcept {
  operation& o = operations_[slot];
  const bool fails = o.at == stage::failing;
  if (o.at == stage::over || o.at == stage::waiting) return;
  if (o.pieces != 0 || (!fails && o.copies_left != 0)) return;
  while (o.first_copy != none) {
    const std::uint32_t index = std::exchange(o.first_copy, copies_[o.first_copy].sibling);
    copies_[index].next = std::exchange(free_copies_, index);
    ++free_copy_count_;
  }
  o.at = stage::over;
  ++stats_.operations;
  if (fails) ++stats_.failures;
  if (o.why.code == errc::cancelled) ++stats_.cancelled;
  board_.finish(slot, o.why);
}

inline std::uint64_t transfer_core::give_up(std::uint64_t now_ns) noexcept {
  if (give_up_ns_ == io_wait::forever) return io_wait::forever;
  std::uint64_t first = io_wait::forever;
  for (std::uint32_t index = 0; index < pieces_.size(); ++index) {
    piece& p = pieces_[index];
    if (p.at != flight::flying) continue;
    if (now_ns - p.since_ns < give_up_ns_) {
      first = smaller(first, give_up_ns_ - (now_ns - p.since_ns));
      continue;
    }
    failure why = failed(p, 0);
    why.code = errc::completion_lost;
    lose(index, why);
  }
  return first;
}

/// The device may still write to that memory: the slot stays occupied until an answer arrives.
inline void transfer_core::lose(std::uint32_t index, failure why) noexcept {
  piece& p = pieces_[index];
  p.at = flight::lost;
  --flying_;
  ++lost_;
  ++stats_.lost;
  const std::uint32_t slot = copies_[p.of].owner;
  --operations_[slot].pieces;
  fail(slot, why);
  finish_if_over(slot);
}

inline void transfer_core::fail_ready(const failure& why) noexcept {
  for (std::uint32_t slot = 0; slot < operations_.size(); ++slot) {
    if (operations_[slot].at == stage::ready) fail(slot, why);
  }
}

inline void transfer_core::fail_lost() noexcept {
  for (std::uint32_t slot = 0; slot < operations_.size(); ++slot) {
    if (operations_[slot].at != stage::ready) continue;
    const file_copy& what = copies_[operations_[slot].first_copy].what;
    fail(slot, {errc::completion_lost, 0, what.bytes, what.offset, what.file->path().c_str()});
  }
}

inline void transfer_core::engine_failed(const failure& why) noexcept {
  for (std::uint32_t index = 0; index < pieces_.size(); ++index) {
    if (pieces_[index].at == flight::flying) lose(index, why);
  }
  fail_ready(why);
}

inline transfer_fence transfer_core::some_running() noexcept {
  for (std::uint32_t slot = 0; slot < operations_.size(); ++slot) {
    if (operations_[slot].at != stage::over) return board_.fence(slot);
  }
  return {};
}

inline void transfer_core::promote(std::uint32_t slot, transfer::urgency how) noexcept {
  operation& o = operations_[slot];
  if (how >= o.how) return;
  list& from = ready_[static_cast<std::size_t>(std::exchange(o.how, how))];
  if (o.at != stage::ready) return;
  extract(
      copies_, from, [&](std::uint32_t i) { return copies_[i].owner == slot; },
      [&](std::uint32_t i) { append(copies_, ready_[static_cast<std::size_t>(how)], i); });
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
