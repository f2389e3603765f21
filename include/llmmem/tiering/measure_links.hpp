/// @file
/// `measure_links`: how fast a buffer's chunks move between its tiers, for the plans of a
/// `prefetch_schedule`.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/errors.hpp>
#include <llmmem/tiering/access.hpp>
#include <llmmem/tiering/plan.hpp>
#include <llmmem/tiering/tiered_types.hpp>
#include <llmmem/transfer/link_model.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// What `measure_links` moves.
struct link_measurement {
  /// Bytes of the chunk that it moves; 0: a quarter of the smallest tier above the last, at most 64 MiB. A
  /// larger chunk shows the rate with less noise.
  std::uint64_t bytes = 0;
  std::uint32_t repeats = 5;  ///< of each transfer; the median counts. At least 1
};

/// Measures the link below each tier: moves chunks of its own through the buffer, one after another and two
/// at once, by the buffer's clock.
///
///     prefetch_schedule schedule(buffer, {.links = measure_links(buffer).value()});
///
/// The rates are those of an idle machine, and of the path that the spaces use: a `file_space` that writes
/// into the page cache shows the cache's rate. A link is `link_duplex::half` if two simultaneous transfers,
/// one each way, take closer to the sum of both times than to the longer one.
///
/// Its chunks take space, so other chunks may have to leave the upper tiers; no contents are lost. It removes
/// its chunks before it returns.
///
/// @tparam Buffer  a `tiered_buffer`. No other call of it may be in progress; it may still be empty.
/// @return one link for each pair of neighbours, beginning with the one below tier 0. `errc::out_of_bytes` if
///   the last tier has no space for two chunks of a page, or leased chunks leave none above it;
///   `errc::table_full` without two chunks below `max_chunks`; `errc::not_opened` if the last tier is
///   read-only; the error of a failed transfer.
/// @par Complexity   for each link some 8 `repeats` transfers of `bytes`, and as many of a sixteenth of that.
///                   Waits.
/// @par Thread safety   as the buffer.
template <class Buffer>
[[nodiscard]] result<std::vector<link_model>> measure_links(Buffer& buffer, const link_measurement& how = {});

namespace detail {

/// Moves chunks of its own through a buffer and measures the time.
template <class Buffer>
class link_meter {
 public:
  explicit link_meter(Buffer& buffer) noexcept : buffer_(buffer) {}
  link_meter(const link_meter&) = delete;
  link_meter& operator=(const link_meter&) = delete;
  ~link_meter() {
    for (const chunk_handle each : chunks_)
      static_cast<void>(buffer_.remove(each));
  }

  /// The time of one transfer each way.
  struct times {
    std::uint64_t up = 0;
    std::uint64_t down = 0;
    std::uint64_t both = 0;  ///< one each way at once
  };

  /// Creates two chunks. On a refusal there are none.
  result<void> create(std::uint64_t bytes) {
    while (chunks_.size() < 2) {
      const result<chunk_handle> made = buffer_.create(bytes);
      if (!made) {
        remove();
        return made.error();
      }
      chunks_.push_back(*made);
    }
    return {};
  }
  void remove() {
    for (const chunk_handle each : chunks_)
      static_cast<void>(buffer_.remove(each));
    chunks_.clear();
  }

  /// Returns the medians of each link.
  result<std::vector<times>> measure(std::uint32_t repeats) {
    constexpr std::size_t links = Buffer::tiers - 1;
    std::vector<std::vector<std::uint64_t>> up(links), down(links), both(links);
    for (std::uint32_t i = 0; i < repeats; ++i) {
      for (std::size_t link = 0; link < links; ++link) {
        // A chunk with new contents moves down to the link, over it, and back up.
        const auto fell = fall(chunks_[0], link);
        if (!fell) return fell.error();
        const auto first = over(link, {{chunks_[0], plan_operation::drop}});
        if (!first) return first.error();
        down[link].push_back(*first);
        const auto second = over(link, {{chunks_[0], plan_operation::fetch}});
        if (!second) return second.error();
        up[link].push_back(*second);
        // Then both ways at once: one chunk moves up while the other moves down.
        if (const auto again = over(link, {{chunks_[0], plan_operation::drop}}); !again) return again.error();
        const auto other = fall(chunks_[1], link);
        if (!other) return other.error();
        const auto third =
            over(link, {{chunks_[1], plan_operation::drop}, {chunks_[0], plan_operation::fetch}});
        if (!third) return third.error();
        both[link].push_back(*third);
      }
    }
    std::vector<times> medians;
    for (std::size_t link = 0; link < links; ++link)
      medians.push_back({median(up[link]), median(down[link]), median(both[link])});
    return medians;
  }

 private:
  struct movement {
    chunk_handle chunk{};
    plan_operation operation{};
  };

  [[nodiscard]] static std::uint64_t median(std::vector<std::uint64_t>& of) {
    std::ranges::nth_element(of, of.begin() + static_cast<std::ptrdiff_t>(of.size() / 2));
    return of[of.size() / 2];
  }

  /// Writes a chunk and makes it leave the tiers above `tier`, whose copy is then the newest.
  result<void> fall(chunk_handle chunk, std::size_t tier) {
    {
      auto lease = buffer_.write(chunk);
      if (!lease) return lease.error();
      if constexpr (requires { lease->span()[0] = std::byte{}; }) {
        std::uint64_t state = ++written_;
        for (std::byte& each : lease->span()) {
          state = state * 6364136223846793005U + 1442695040888963407U;
          each = static_cast<std::byte>(state >> 56U);
        }
      }
    }
    for (std::size_t above = 0; above < tier; ++above) {
      if (const auto left = over(above, {{chunk, plan_operation::drop}}); !left) return left.error();
    }
    return {};
  }

  /// Moves chunks over a link and returns how long that took: a drop moves its chunk from `tier` to the tier
  /// below, a fetch brings it back.
  result<std::uint64_t> over(std::size_t tier, std::initializer_list<movement> all) {
    const std::uint64_t failures = buffer_.stats().background_failures;
    const std::uint64_t began = buffer_.now_ns();
    std::uint64_t seen = began;
    std::uint32_t standing = 0;  // consecutive checks without a change of the clock
    std::vector<bool> has_begun(all.size());
    for (bool is_over = false; !is_over;) {
      is_over = true;
      std::size_t at = 0;
      for (const movement& each : all) {
        std::vector<bool>::reference begun = has_begun[at++];
        const std::size_t goal = each.operation == plan_operation::fetch ? tier : tier + 1;
        const auto is_there = [&] {
          const result<std::size_t> now = buffer_.tier_of(each.chunk);
          return now && (each.operation == plan_operation::fetch ? *now <= goal : *now >= goal);
        };
        if (is_there()) continue;
        const tiering::step_outcome outcome = buffer_.execute(each.chunk, each.operation, tier);
        buffer_.progress();
        if (is_there()) continue;
        is_over = false;
        if (outcome == tiering::step_outcome::done) begun = true;
        if (outcome == tiering::step_outcome::unneeded && !begun) {
          return failure{.code = errc::out_of_bytes,
                         .wanted = *buffer_.bytes(each.chunk),
                         .found = 0,
                         .where = "measure_links"};  // leased chunks take the space
        }
      }
      if (buffer_.stats().background_failures != failures) return buffer_.background_failure();
      if (const std::uint64_t now = buffer_.now_ns(); std::exchange(seen, now) != now) standing = 0;
      if (++standing < 64) continue;
      // A virtual clock advances when the program waits, and not while it polls.
      for (const movement& each : all) {
        if (each.operation == plan_operation::drop) {
          if (const auto done = buffer_.flush(each.chunk); !done) return done.error();
        } else if (const auto done = buffer_.read(each.chunk); !done) {
          return done.error();
        }
      }
    }
    return std::max<std::uint64_t>(buffer_.now_ns() - began, 1);
  }

  Buffer& buffer_;
  std::vector<chunk_handle> chunks_;
  std::uint64_t written_ = 0;
};

/// Returns bytes per second, clamped to the range that a link may have.
[[nodiscard]] constexpr std::uint64_t measured_rate(std::uint64_t bytes, std::uint64_t ns) noexcept {
  const std::uint64_t time = ns == 0 ? 1 : ns;
  const std::uint64_t whole = bytes / time;
  constexpr std::uint64_t second = 1'000'000'000;
  const std::uint64_t rate = whole > link_model::most_bytes_per_second / second
                                 ? link_model::most_bytes_per_second
                                 : whole * second + bytes % time * second / time;
  return std::clamp<std::uint64_t>(rate, 1, link_model::most_bytes_per_second);
}

}  // namespace detail

template <class Buffer>
result<std::vector<link_model>> measure_links(Buffer& buffer, const link_measurement& how) {
  constexpr std::uint64_t most = std::uint64_t{64} << 20;
  const auto stats = buffer.stats();
  std::uint64_t smallest = ~std::uint64_t{0};
  for (std::size_t i = 0; i + 1 < Buffer::tiers; ++i)
    smallest = std::min(smallest, stats.tiers[i].budget);
  std::uint64_t bytes = how.bytes != 0 ? how.bytes : std::clamp<std::uint64_t>(smallest / 4, 1, most);
  detail::link_meter<Buffer> meter(buffer);
  // A last tier sized for the program's chunks may only have space for small ones.
  for (result<void> made = meter.create(bytes); !made; made = meter.create(bytes)) {
    if (made.code() != errc::out_of_bytes || bytes <= 4096) return made.error();
    bytes /= 2;
  }
  const std::uint32_t repeats = std::max(how.repeats, 1U);
  const auto of_wholes = meter.measure(repeats);
  if (!of_wholes) return of_wholes.error();
  meter.remove();
  const std::uint64_t few = std::max<std::uint64_t>(bytes / 16, 1);
  if (const auto made = meter.create(few); !made) return made.error();
  const auto of_parts = meter.measure(repeats);
  if (!of_parts) return of_parts.error();
  std::vector<link_model> links;
  for (std::size_t i = 0; i + 1 < Buffer::tiers; ++i) {
    const auto& whole = (*of_wholes)[i];
    const auto& part = (*of_parts)[i];
    // Each time contains the latency once, so the difference of both shows the rate alone. Noise may hide it.
    const std::uint64_t rest = buffer.rounded_bytes(bytes) - std::min(buffer.rounded_bytes(few), bytes);
    const std::uint64_t for_rest = whole.up > part.up ? whole.up - part.up : 0;
    const std::uint64_t for_all =
        for_rest == 0 || rest == 0
            ? whole.up
            : static_cast<std::uint64_t>(static_cast<double>(for_rest) * static_cast<double>(bytes) /
                                         static_cast<double>(rest));
    const std::uint64_t latency = whole.up > for_all ? whole.up - for_all : 0;
    const std::uint64_t longer = std::max(whole.up, whole.down);
    const bool is_full = whole.both < longer + std::min(whole.up, whole.down) / 2;
    links.push_back({.bytes_per_second = detail::measured_rate(bytes, std::min(for_all, whole.up)),
                     .latency_ns = latency,
                     .offload_bytes_per_second = detail::measured_rate(
                         bytes, whole.down > 2 * latency ? whole.down - latency : whole.down),
                     .duplex = is_full ? link_duplex::full : link_duplex::half});
  }
  return links;
}

}  // namespace v0
}  // namespace llmmem
