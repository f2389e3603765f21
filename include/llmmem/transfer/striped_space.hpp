/// @file
/// `striped_space`: one space over files on several devices, each used according to its speed.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/concepts.hpp>
#include <llmmem/space/errors.hpp>
#include <llmmem/space/live_ranges.hpp>
#include <llmmem/transfer/errors.hpp>
#include <llmmem/transfer/file_space.hpp>
#include <llmmem/transfer/stripe_weights.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// A copy over several members: the fences of its parts. 136 bytes, trivially copyable.
///
/// It has passed when every part is complete. If a part failed, it reports that failure, which names the
/// member's path.
///
/// @par Thread safety   as `transfer_fence`.
class striped_fence {
 public:
  /// Constructs a fence that has passed without failure.
  constexpr striped_fence() noexcept = default;

  [[nodiscard]] bool ready() const noexcept { return all_ready(parts()); }

  /// Blocks until every part is complete. @throws io_error  when one failed.
  void wait() const { settled().value(); }

  /// As `wait`, but returns what it would throw: the first failure, by member.
  result<void> settled() const noexcept {
    result<void> outcome;
    for (const transfer_fence& each : parts()) {
      const result<void> one = each.settled();
      if (outcome && !one) outcome = one;
    }
    return outcome;
  }

  /// Returns the outcome without waiting: `errc::not_finished` while a part is in flight.
  [[nodiscard]] result<void> outcome() const noexcept {
    if (!ready()) return failure{.code = errc::not_finished, .where = "striped_fence"};
    return settled();
  }

  /// The fences of the members.
  [[nodiscard]] std::span<const transfer_fence> parts() const noexcept LLMMEM_LIFETIMEBOUND {
    return std::span(parts_).first(count_);
  }

  friend constexpr bool operator==(const striped_fence&, const striped_fence&) noexcept = default;

 private:
  template <io_engine Engine>
  friend class striped_space;

  void add(const transfer_fence& part) noexcept { parts_[count_++] = part; }

  std::array<transfer_fence, max_stripe_members> parts_{};
  std::uint32_t count_ = 0;
};

static_assert(fence<striped_fence>);

/// The construction parameters of a striped space.
struct striped_options {
  std::uint64_t stripe_bytes = std::uint64_t{1} << 20;  ///< a power of two, at least 4096
  std::uint32_t max_pieces = 4096;                      ///< stripes of one member that one copy may use
  std::string name = "striped_space";                   ///< the name in error texts
  misuse_handler on_misuse = &abort_on_misuse;
  void* misuse_context = nullptr;
};

/// The statistics of a member.
struct striped_member_stats {
  double bytes_per_ns = 0;       ///< as measured; 0 before the first measurement
  std::uint32_t last_share = 0;  ///< its stripes of 32, in the range allocated last
};

/// Distributes the stripes of each range over its members by their measured speed. The shares are fixed when
/// a range is allocated, so that its layout is a record of about two hundred bytes; they differ from range to
/// range. A member without space is left out of a range.
///
///     file_space<uring_io> fast("/nvme0/chunks", options), slow("/nvme1/chunks", options);
///     const std::array members{&fast, &slow};
///     striped_space<uring_io> both(members);
///     auto range = both.try_allocate(bytes, 4096).value();
///
/// The members' queues measure the speed: bytes moved per time with requests in flight.
///
/// @par Complexity      allocation O(live ranges); a copy O(stripes), one operation on each member that it
///   uses.
/// @par Thread safety   any number of threads; one mutex, held while copies are passed to the members.
/// @par Errors          the constructor throws `argument_error`, `length_error` and `std::bad_alloc`; the
///   rest are values. A copy that uses more than `max_pieces` stripes of a member is refused with
///   `errc::table_full`. A failure reported by the device names the member's path.
/// @tparam Engine  the members' `io_engine`.
template <io_engine Engine = posix_io>
class striped_space {
 public:
  using member_type = file_space<Engine>;
  using range_type = memory_range<striped_space>;
  using fence_type = striped_fence;
  static constexpr bool is_host_accessible = false;
  static constexpr bool leaves_memory = true;

  /// @param members  must outlive this; other users may share them.
  explicit striped_space(std::span<member_type* const> members, striped_options options = {});
  striped_space(const striped_space&) = delete;
  striped_space& operator=(const striped_space&) = delete;
  /// Deallocates all remaining ranges of the members.
  ~striped_space() {
    for (const auto& live : live_)
      give_back(live.payload);
  }

  /// @return `errc::out_of_bytes` past the sum of the members' budgets, otherwise the refusal of the last
  ///   member that had a share.
  [[nodiscard]] result<range_type> try_allocate(std::uint64_t bytes, std::uint64_t alignment) noexcept;
  void deallocate(range_type range) noexcept;

  /// The sum of the members' budgets.
  [[nodiscard]] std::uint64_t capacity() const noexcept { return capacity_; }
  [[nodiscard]] std::uint64_t used() const noexcept {
    const std::scoped_lock lock(mutex_);
    return used_;
  }
  [[nodiscard]] std::string_view name() const noexcept LLMMEM_LIFETIMEBOUND { return options_.name; }

  /// @name Copies   see `copy_queue`. The calling thread waits for `after`. `how` is their urgency.
  /// @{
  [[nodiscard]] result<striped_fence> copy_in_async(range_type to, std::span<const std::byte> from,
                                                    std::span<const striped_fence> after,
                                                    transfer::urgency how = transfer::urgency::write_back) {
    return copy(to, const_cast<std::byte*>(from.data()), from.size(), io_direction::write, after, how);
  }
  [[nodiscard]] result<striped_fence> copy_out_async(std::span<std::byte> to, range_type from,
                                                     std::span<const striped_fence> after,
                                                     transfer::urgency how = transfer::urgency::demand) {
    return copy(from, to.data(), to.size(), io_direction::read, after, how);
  }
  /// Runs on the calling thread, a stripe at a time.
  [[nodiscard]] result<striped_fence> copy_within_async(range_type to, range_type from,
                                                        std::span<const striped_fence> after);
  /// @}

  /// @name A queue, as tiers expect one
  /// @{
  [[nodiscard]] striped_space& queue() noexcept { return *this; }
  void promote(const striped_fence& of, transfer::urgency how) noexcept {
    for (member_type* const each : members_) {
      for (const transfer_fence& part : of.parts())
        each->queue().promote(part, how);
    }
  }
  void cancel(const striped_fence& of) noexcept {
    for (member_type* const each : members_) {
      for (const transfer_fence& part : of.parts())
        each->queue().cancel(part);
    }
  }
  void poll() noexcept {
    for (member_type* const each : members_)
      each->queue().poll();
  }
  void clear_failures() noexcept {
    for (member_type* const each : members_)
      each->queue().clear_failures();
  }
  /// @}

  /// Returns the layout of the live range that contains `range`; nothing when there is none.
  [[nodiscard]] stripe_shares shares_of(range_type range) const noexcept {
    const std::scoped_lock lock(mutex_);
    const auto* const live = live_.holding(range.data, range.bytes);
    return live == nullptr ? stripe_shares{} : live->payload.layout.shares();
  }
  [[nodiscard]] striped_member_stats member_stats(std::uint32_t member) const noexcept {
    const std::scoped_lock lock(mutex_);
    return {weights_.speed(member), last_shares_[member]};
  }

 private:
  using part_type = typename member_type::range_type;
  struct record {
    stripe_layout layout;
    std::array<part_type, max_stripe_members> parts{};
  };
  struct seen {
    std::uint64_t bytes = 0;
    std::uint64_t ns = 0;
  };

  [[nodiscard]] static std::uint32_t checked(std::span<member_type* const> members,
                                             const striped_options& options);
  [[nodiscard]] static std::uint64_t number(const std::byte* data) noexcept {
    return member_type::offset_of(data);
  }
  [[nodiscard]] static std::byte* address(std::uint64_t number) noexcept {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): an offset in the form of an address
    return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(number));
  }
  void measure() noexcept;
  void give_back(const record& what) noexcept {
    for (std::size_t m = 0; m < members_.size(); ++m)
      members_[m]->deallocate(what.parts[m]);
  }
  struct refused {
    std::uint32_t member = 0;
    failure why{};
  };
  [[nodiscard]] refused take_parts(record& what, std::uint64_t bytes) noexcept;
  [[nodiscard]] failure refusal(range_type range, std::uint64_t bytes) const noexcept;
  [[nodiscard]] result<striped_fence> copy(range_type range, std::byte* data, std::uint64_t bytes,
                                           io_direction way, std::span<const striped_fence> after,
                                           transfer::urgency how);
  [[nodiscard]] result<std::span<const file_copy>> pieces(const record& what, std::uint32_t member,
                                                          std::uint64_t offset, std::byte* data,
                                                          std::uint64_t bytes, io_direction way) noexcept;

  striped_options options_;
  std::vector<member_type*> members_;
  std::uint64_t capacity_ = 0;
  mutable std::mutex mutex_;
  live_ranges<record> live_;
  std::uint64_t used_ = 0;
  stripe_weights weights_;
  stripe_shares last_shares_{};
  std::array<seen, max_stripe_members> seen_{};
  std::vector<file_copy> pieces_;
  std::mutex within_mutex_;
  std::vector<std::byte> within_;
};

static_assert(memory_space<striped_space<>>);
static_assert(copy_queue<striped_space<>, striped_space<>>);

template <io_engine Engine>
std::uint32_t striped_space<Engine>::checked(std::span<member_type* const> members,
                                             const striped_options& options) {
  const auto refuse = [&](const std::string& what) { throw argument_error(options.name + ": " + what); };
  if (members.empty() || members.size() > max_stripe_members) {
    refuse(std::to_string(members.size()) + " members; use 1 to 8");
  }
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (members[i] == nullptr) refuse("member " + std::to_string(i) + " is null");
    for (std::size_t j = 0; j < i; ++j) {
      if (members[i] == members[j])
        refuse("members " + std::to_string(j) + " and " + std::to_string(i) + " are the same object");
    }
  }
  const std::uint64_t unit = options.stripe_bytes;
  if (unit < 4096 || unit > std::uint64_t{1} << 30 || (unit & (unit - 1)) != 0) {
    refuse("stripe_bytes is " + std::to_string(unit) + "; it must be a power of two from 4096 to 2^30");
  }
  if (options.max_pieces == 0) refuse("max_pieces is 0; it must be at least 1");
  return static_cast<std::uint32_t>(members.size());
}

template <io_engine Engine>
striped_space<Engine>::striped_space(std::span<member_type* const> members, striped_options options)
    : options_(std::move(options)),
      members_(members.begin(), members.end()),
      weights_(checked(members, options_)),
      pieces_(options_.max_pieces),
      within_(options_.stripe_bytes) {
  for (const member_type* const each : members_)
    capacity_ = checked_add(capacity_, each->capacity(), options_.name.c_str());
}

/// Reads how many bytes the members' queues have moved since the last time. A small amount is left for the
/// next time, because it carries little information.
template <io_engine Engine>
void striped_space<Engine>::measure() noexcept {
  for (std::uint32_t m = 0; m < members_.size(); ++m) {
    const file_queue_stats now = members_[m]->queue().stats();
    const seen here{now.bytes_read + now.bytes_written, now.busy_ns};
    if (here.bytes - seen_[m].bytes < options_.stripe_bytes) continue;
    weights_.completed(m, here.bytes - seen_[m].bytes, here.ns - seen_[m].ns);
    seen_[m] = here;
  }
}

/// Allocates a part on each member that has a share of `bytes`, or none; reports the refusing member.
template <io_engine Engine>
typename striped_space<Engine>::refused striped_space<Engine>::take_parts(record& what,
                                                                          std::uint64_t bytes) noexcept {
  const std::uint64_t unit = options_.stripe_bytes;
  const std::uint64_t stripes = (bytes - 1) / unit + 1;
  const stripe_layout::place last_stripe_of = what.layout.at(stripes - 1);
  for (std::uint32_t m = 0; m < members_.size(); ++m) {
    const std::uint64_t count = what.layout.count(m, stripes);
    if (count == 0) continue;
    const std::uint64_t missing = last_stripe_of.member == m ? stripes * unit - bytes : 0;
    const result<part_type> part = members_[m]->try_allocate(count * unit - missing, 1);
    if (!part) {
      give_back(what);
      what.parts = {};
      return {m, part.error()};
    }
    what.parts[m] = *part;
  }
  return {};
}

template <io_engine Engine>
result<typename striped_space<Engine>::range_type> striped_space<Engine>::try_allocate(
    std::uint64_t bytes, std::uint64_t alignment) noexcept {
  const char* const where = options_.name.c_str();
  const std::scoped_lock lock(mutex_);
  if (bytes == 0) return failure{.code = errc::zero_bytes, .where = where};
  if (alignment == 0 || (alignment & (alignment - 1)) != 0) {
    return failure{.code = errc::bad_alignment, .wanted = alignment, .where = where};
  }
  const failure short_of{
      .code = errc::out_of_bytes, .wanted = bytes, .found = capacity_ - used_, .where = where};
  if (bytes > capacity_ - used_) return short_of;
  const std::uint64_t unit = options_.stripe_bytes;
  const std::uint64_t at = live_.first_gap(unit, bytes, alignment < unit ? unit : alignment);
  if (at > max_bytes - bytes || !live_.reserve_one()) {
    return failure{.code = errc::system_refused, .wanted = bytes, .found = capacity_ - used_, .where = where};
  }
  measure();
  std::uint32_t left_out = 0;
  failure why = short_of;
  // Each turn leaves out one more member, so the loop ends.
  while (left_out + 1 != std::uint32_t{1} << members_.size()) {
    record made{stripe_layout(weights_.shares(left_out)), {}};
    const refused by = take_parts(made, bytes);
    if (by.why.code == errc::ok) {
      last_shares_ = made.layout.shares();
      live_.insert(address(at), bytes, made);
      used_ += bytes;
      return range_type{address(at), bytes};
    }
    why = by.why;
    left_out |= std::uint32_t{1} << by.member;
  }
  return why;
}

template <io_engine Engine>
void striped_space<Engine>::deallocate(range_type range) noexcept {
  if (range.bytes == 0) return;
  misuse wrong;
  {
    const std::scoped_lock lock(mutex_);
    wrong = live_.check(options_.name.c_str(), range.data, range.bytes);
    if (wrong.what == misuse::kind::none) {
      give_back(live_.remove(range.data).payload);
      used_ -= range.bytes;
      return;
    }
  }
  options_.on_misuse(wrong, options_.misuse_context);
}

template <io_engine Engine>
failure striped_space<Engine>::refusal(range_type range, std::uint64_t bytes) const noexcept {
  const char* const where = options_.name.c_str();
  if (range.bytes != bytes) {
    return {.code = errc::size_mismatch, .wanted = range.bytes, .found = bytes, .where = where};
  }
  const std::scoped_lock lock(mutex_);
  if (range.bytes != 0 && live_.holding(range.data, range.bytes) == nullptr) {
    return {.code = errc::dead_range, .wanted = range.bytes, .where = where};
  }
  return {};
}

/// Returns `member`'s runs of `[offset, offset + bytes)` of a range, with adjacent runs merged.
template <io_engine Engine>
result<std::span<const file_copy>> striped_space<Engine>::pieces(const record& what, std::uint32_t member,
                                                                 std::uint64_t offset, std::byte* data,
                                                                 std::uint64_t bytes,
                                                                 io_direction way) noexcept {
  const std::uint64_t unit = options_.stripe_bytes;
  std::size_t count = 0;
  for (std::uint64_t done = 0; done != bytes;) {
    const std::uint64_t inside = (offset + done) % unit;
    const std::uint64_t length = bytes - done < unit - inside ? bytes - done : unit - inside;
    const stripe_layout::place place = what.layout.at((offset + done) / unit);
    if (place.member == member) {
      const std::uint64_t begin = number(what.parts[member].data) + place.index * unit + inside;
      if (count != 0 && pieces_[count - 1].data + pieces_[count - 1].bytes == data + done) {
        pieces_[count - 1].bytes += length;
      } else if (count == pieces_.size()) {
        return failure{.code = errc::table_full,
                       .wanted = count + 1,
                       .found = pieces_.size(),
                       .where = options_.name.c_str()};
      } else {
        pieces_[count++] = {&members_[member]->file(), way, begin, data + done, length};
      }
    }
    done += length;
  }
  return std::span<const file_copy>(pieces_.data(), count);
}

template <io_engine Engine>
result<striped_fence> striped_space<Engine>::copy(range_type range, std::byte* data, std::uint64_t bytes,
                                                  io_direction way, std::span<const striped_fence> after,
                                                  transfer::urgency how) {
  if (const failure wrong = refusal(range, bytes); wrong.code != errc::ok) return wrong;
  for (const striped_fence& each : after) {
    if (const result<void> passed = each.settled(); !passed) return passed.error();
  }
  if (bytes == 0) return striped_fence{};
  striped_fence begun;
  failure wrong;
  {
    const std::scoped_lock lock(mutex_);
    const auto* const live = live_.holding(range.data, bytes);
    if (live == nullptr) {
      return failure{.code = errc::dead_range, .wanted = bytes, .where = options_.name.c_str()};
    }
    const std::uint64_t offset = number(range.data) - number(live->data);
    for (std::uint32_t m = 0; m < members_.size() && wrong.code == errc::ok; ++m) {
      const auto mine = pieces(live->payload, m, offset, data, bytes, way);
      if (mine && mine->empty()) continue;
      const result<transfer_fence> part =
          mine ? members_[m]->queue().start(*mine, how) : result<transfer_fence>(mine.error());
      if (part) {
        begun.add(*part);
      } else {
        wrong = part.error();
      }
    }
  }
  if (wrong.code == errc::ok) return begun;
  // A refusal starts nothing: copies that have begun are cancelled here.
  cancel(begun);
  static_cast<void>(begun.settled());
  return wrong;
}

template <io_engine Engine>
result<striped_fence> striped_space<Engine>::copy_within_async(range_type to, range_type from,
                                                               std::span<const striped_fence> after) {
  if (const failure wrong = refusal(to, from.bytes); wrong.code != errc::ok) return wrong;
  if (const failure wrong = refusal(from, to.bytes); wrong.code != errc::ok) return wrong;
  const std::uint64_t a = number(to.data);
  const std::uint64_t b = number(from.data);
  const std::uint64_t apart = a < b ? b - a : a - b;
  if (apart < to.bytes) {
    return failure{.code = errc::overlapping_ranges,
                   .wanted = to.bytes,
                   .found = to.bytes - apart,
                   .where = options_.name.c_str()};
  }
  for (const striped_fence& each : after) {
    if (const result<void> passed = each.settled(); !passed) return passed.error();
  }
  const std::scoped_lock lock(within_mutex_);
  for (std::uint64_t done = 0; done != to.bytes;) {
    const std::uint64_t count = to.bytes - done < within_.size() ? to.bytes - done : within_.size();
    const std::span<std::byte> part = std::span(within_).first(static_cast<std::size_t>(count));
    const auto moved = [](const result<striped_fence>& begun) {
      return begun ? begun->settled() : result<void>(begun.error());
    };
    if (const auto read = moved(copy_out_async(part, {from.data + done, count}, {})); !read)
      return read.error();
    if (const auto wrote = moved(copy_in_async({to.data + done, count}, part, {})); !wrote)
      return wrote.error();
    done += count;
  }
  return striped_fence{};
}

}  // namespace v0
}  // namespace llmmem
