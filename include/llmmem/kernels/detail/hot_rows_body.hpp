/// @file
/// The bodies of `reset_hot_rows`, `resolve_hot_rows` and `fetch_hot_rows`.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/kv_checks.hpp>
#include <llmmem/kernels/divider.hpp>
#include <llmmem/kernels/errors.hpp>
#include <llmmem/kernels/hot_rows.hpp>
#include <llmmem/kernels/items.hpp>
#include <llmmem/kernels/kv_tokens.hpp>
#include <llmmem/kernels/lanes.hpp>
#include <llmmem/kernels/packet.hpp>
#include <llmmem/kernels/rows.hpp>
#include <llmmem/result.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The state of a sequence.
struct hot_state {
  std::int32_t* slot_of;      // [positions]
  std::int32_t* position_of;  // [slots]
  std::int32_t* order;        // [slots]: slots, that of the row used longest ago first
  std::int32_t* mark;         // [slots]: -1 between steps

  LLMMEM_HD hot_state(const hot_rows_shape& shape, std::int32_t* all, std::uint64_t sequence) noexcept
      : slot_of(all + sequence * hot_rows_words(shape)),
        position_of(slot_of + shape.positions),
        order(position_of + shape.slots),
        mark(order + shape.slots) {}
};

/// An item for each word of a state.
class hot_reset_work {
 public:
  hot_reset_work(const hot_rows_shape& shape, std::int32_t* state, std::uint32_t first,
                 std::uint32_t count) noexcept
      : shape_(shape),
        state_(state),
        first_(first),
        count_(count),
        words_(static_cast<std::uint32_t>(hot_rows_words(shape))) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return std::uint64_t{count_} * words_.by(); }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    const std::uint64_t sequence = first_ + words_.quotient(item);
    const std::uint32_t word = words_.remainder(item);
    const std::uint32_t in_order = word - (shape_.positions + shape_.slots);  // wraps around before it
    const std::int32_t value = in_order < shape_.slots ? static_cast<std::int32_t>(in_order) : -1;
    state_[sequence * words_.by() + word] = value;
  }

 private:
  hot_rows_shape shape_;
  std::int32_t* state_;
  std::uint32_t first_;
  std::uint32_t count_;
  divider words_;
};
static_assert(item_work<hot_reset_work>);

/// An item for each sequence, for all lanes of a warp: 32 wanted rows at once, or 32 slots. A state is that
/// of the rows taken one after the other:
///
/// - a row that is there is renewed where it is last named, so its slot is marked with the highest of its
///   numbers in the list;
/// - a row that is not there is fetched where it is first named, so its position is marked with the lowest;
/// - as many of the slots without a mark as rows are fetched are given up, in the order they are in.
class hot_resolve_work {
 public:
  static constexpr std::uint32_t threads = 128;
  static constexpr std::uint32_t blocks = 8;

  hot_resolve_work(const hot_rows_shape& shape, std::int32_t* state, const hot_rows_step& step) noexcept
      : shape_(shape), state_(state), step_(step) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return shape_.sequences; }
  [[nodiscard]] LLMMEM_HD std::uint32_t lanes() const noexcept { return 32; }
  template <class Group>
  LLMMEM_HD void run(std::uint64_t sequence, const Group& group) const noexcept {
    if (sequence >= items()) return;
    step_of_one<Group>(*this, sequence, group).run();
  }

 private:
  /// A step of one sequence.
  template <class Group>
  class step_of_one {
   public:
    LLMMEM_HD step_of_one(const hot_resolve_work& all, std::uint64_t sequence, const Group& group) noexcept
        : state_(all.shape_, all.state_, sequence),
          wanted_(all.step_.wanted + sequence * all.step_.stride),
          slots_(all.step_.slots + sequence * all.step_.stride),
          misses_(all.step_.misses + sequence * all.step_.stride),
          count_(all.step_.counts + sequence),
          wanted_count_(all.step_.wanted_count),
          slot_count_(all.shape_.slots),
          positions_(all.shape_.positions),
          newest_(all.step_.newest == nullptr ? -1 : all.step_.newest[sequence]),
          group_(group) {}

    LLMMEM_HD void run() noexcept {
      const std::int32_t forgotten = forget();
      mark();
      count();
      group_.each([&](std::uint32_t lane) {
        if (lane == 0) *count_ = missed_;
      });
      pass_over_slots(forgotten);
      renew();
      place();
      give();
    }

   private:
    template <class T>
    using held = typename Group::template held<T>;
    /// What a position that is not there has, and adds its lowest number in the list to.
    static constexpr std::int32_t lowest = -0x7FFF'FFFF - 1;

    /// Calls `act(lane, i)` for the numbers below `end`, 32 at once; between two calls all lanes met.
    template <class Do>
    LLMMEM_HD void each_of(std::uint32_t first, std::uint32_t end, const Do& act) const noexcept {
      group_.each([&](std::uint32_t lane) {
        if (first + lane < end) act(lane, first + lane);
      });
    }
    [[nodiscard]] LLMMEM_HD bool is_kept(std::int32_t position) const noexcept {
      return position >= 0 && static_cast<std::uint32_t>(position) < positions_ && position != newest_;
    }
    /// Returns how many lanes below this one hold `true`.
    [[nodiscard]] static LLMMEM_HD std::uint32_t before(std::uint32_t lanes, std::uint32_t lane) noexcept {
      std::uint32_t below = lanes & ((1U << lane) - 1U);
      return bits_in(below);
    }
    [[nodiscard]] static LLMMEM_HD std::uint32_t bits_in(std::uint32_t bits) noexcept {
#if defined(__CUDA_ARCH__)
      return static_cast<std::uint32_t>(__popc(bits));
#else
      return static_cast<std::uint32_t>(std::popcount(bits));
#endif
    }

    /// The engine writes the newest row in this step: a row of it that is here is from before a truncation.
    /// Returns the slot that has none from now on, which is before all others.
    [[nodiscard]] LLMMEM_HD std::int32_t forget() const noexcept {
      if (newest_ < 0 || static_cast<std::uint32_t>(newest_) >= positions_) return -1;
      const std::int32_t slot = state_.slot_of[newest_];
      group_.meet();
      if (slot < 0) return -1;
      group_.each([&](std::uint32_t lane) {
        if (lane != 0) return;
        state_.slot_of[newest_] = -1;
        state_.position_of[slot] = -1;
      });
      group_.meet();
      return slot;
    }
    LLMMEM_HD void mark() const noexcept {
      for (std::uint32_t first = 0; first < wanted_count_; first += 32) {
        held<std::int32_t> slot{};
        each_of(first, wanted_count_, [&](std::uint32_t lane, std::uint32_t i) {
          slot[lane] = is_kept(wanted_[i]) ? state_.slot_of[wanted_[i]] : -1;
        });
        group_.meet();
        each_of(first, wanted_count_, [&](std::uint32_t lane, std::uint32_t i) {
          if (slot[lane] >= 0) {
            raise_to(state_.mark[slot[lane]], static_cast<std::int32_t>(i));
          } else if (is_kept(wanted_[i])) {
            lower_to(state_.slot_of[wanted_[i]], lowest + static_cast<std::int32_t>(i));
          }
        });
        group_.meet();
      }
    }
    /// Counts the rows to renew and to fetch, and writes the positions of the latter.
    LLMMEM_HD void count() noexcept {
      for (std::uint32_t first = 0; first < wanted_count_; first += 32) {
        held<bool> is_missed{};
        held<bool> is_renewed{};
        each_of(first, wanted_count_, [&](std::uint32_t lane, std::uint32_t i) {
          if (!is_kept(wanted_[i])) return;
          const std::int32_t slot = state_.slot_of[wanted_[i]];
          is_missed[lane] = slot == lowest + static_cast<std::int32_t>(i);
          is_renewed[lane] = slot >= 0 && state_.mark[slot] == static_cast<std::int32_t>(i);
        });
        const std::uint32_t missed = group_.ballot(is_missed);
        each_of(first, wanted_count_, [&](std::uint32_t lane, std::uint32_t i) {
          if (is_missed[lane]) misses_[missed_ + before(missed, lane)].position = wanted_[i];
        });
        missed_ += bits_in(missed);
        renewed_ += bits_in(group_.ballot(is_renewed));
      }
    }
    /// The first slots without a mark are given up, the others move to the front. Slots are read 32 ahead of
    /// those that are written: behind a forgotten one they may move by one to the back.
    LLMMEM_HD void pass_over_slots(std::int32_t forgotten) const noexcept {
      std::uint32_t passed = 0;
      held<std::int32_t> slot{};
      const auto read = [&](held<std::int32_t>& to, std::uint32_t first) {
        each_of(first, slot_count_, [&](std::uint32_t lane, std::uint32_t i) { to[lane] = state_.order[i]; });
      };
      const auto put = [&](std::uint32_t number, std::int32_t which) {
        if (number < missed_) {
          misses_[number].slot = which;
        } else {
          state_.order[number - missed_] = which;
        }
      };
      read(slot, 0);
      for (std::uint32_t first = 0; first < slot_count_; first += 32) {
        held<std::int32_t> next{};
        held<bool> is_passed{};
        read(next, first + 32);
        group_.meet();
        group_.each([&](std::uint32_t lane) {
          if (first == 0 && lane == 0 && forgotten >= 0) put(0, forgotten);
        });
        if (first == 0 && forgotten >= 0) passed = 1;
        each_of(first, slot_count_, [&](std::uint32_t lane, std::uint32_t /*i*/) {
          is_passed[lane] = slot[lane] != forgotten && state_.mark[slot[lane]] < 0;
        });
        const std::uint32_t those = group_.ballot(is_passed);
        group_.each([&](std::uint32_t lane) {
          if (is_passed[lane]) put(passed + before(those, lane), slot[lane]);
        });
        passed += bits_in(those);
        slot = next;
        group_.meet();
      }
    }
    /// Rows that are there follow, in the order of their last numbers.
    LLMMEM_HD void renew() const noexcept {
      std::uint32_t at = slot_count_ - missed_ - renewed_;
      for (std::uint32_t first = 0; first < wanted_count_; first += 32) {
        held<std::int32_t> slot{};
        held<bool> is_renewed{};
        each_of(first, wanted_count_, [&](std::uint32_t lane, std::uint32_t i) {
          slot[lane] = is_kept(wanted_[i]) ? state_.slot_of[wanted_[i]] : -1;
          is_renewed[lane] = slot[lane] >= 0 && state_.mark[slot[lane]] == static_cast<std::int32_t>(i);
        });
        const std::uint32_t those = group_.ballot(is_renewed);
        group_.meet();
        group_.each([&](std::uint32_t lane) {
          if (!is_renewed[lane]) return;
          state_.order[at + before(those, lane)] = slot[lane];
          state_.mark[slot[lane]] = -1;
        });
        at += bits_in(those);
        group_.meet();
      }
    }
    /// Rows to fetch are the last, in slots that others leave.
    LLMMEM_HD void place() const noexcept {
      for (std::uint32_t first = 0; first < missed_; first += 32) {
        each_of(first, missed_, [&](std::uint32_t /*lane*/, std::uint32_t i) {
          const hot_miss miss = misses_[i];
          const std::int32_t left = state_.position_of[miss.slot];
          if (left >= 0) state_.slot_of[left] = -1;
          state_.position_of[miss.slot] = miss.position;
          state_.slot_of[miss.position] = miss.slot;
          state_.order[slot_count_ - missed_ + i] = miss.slot;
        });
      }
      group_.meet();
    }
    LLMMEM_HD void give() const noexcept {
      for (std::uint32_t first = 0; first < wanted_count_; first += 32) {
        each_of(first, wanted_count_, [&](std::uint32_t /*lane*/, std::uint32_t i) {
          const std::int32_t position = wanted_[i];
          const bool is_newest = position >= 0 && position == newest_;
          slots_[i] = is_kept(position) ? state_.slot_of[position]
                      : is_newest       ? static_cast<std::int32_t>(slot_count_)
                                        : -1;
        });
      }
    }

    hot_state state_;
    const std::int32_t* wanted_;
    std::int32_t* slots_;
    hot_miss* misses_;
    std::uint32_t* count_;
    std::uint32_t wanted_count_;
    std::uint32_t slot_count_;
    std::uint32_t positions_;
    std::int32_t newest_;
    std::uint32_t missed_ = 0;
    std::uint32_t renewed_ = 0;
    const Group& group_;
  };

  hot_rows_shape shape_;
  std::int32_t* state_;
  hot_rows_step step_;
};
static_assert(lane_work<hot_resolve_work>);

/// An item for each 16 bytes of each row that may be missed.
template <class Tables>
class hot_fetch_work {
 public:
  hot_fetch_work(const hot_rows_shape& shape, const hot_rows_step& step, const Tables& tables,
                 const row_pool& pool, std::byte* rows, std::uint64_t row_bytes) noexcept
      : step_(step),
        tables_(tables),
        pool_(pool),
        rows_(rows),
        row_bytes_(row_bytes),
        sequences_(shape.sequences),
        slots_(shape.slots),
        wanted_(step.wanted_count),
        packets_(static_cast<std::uint32_t>(row_bytes / 16)),
        by_(static_cast<std::uint32_t>(tables.block_tokens)) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept {
    return std::uint64_t{sequences_} * wanted_.by() * packets_.by();
  }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    const std::uint64_t number = packets_.quotient(item);
    const std::uint64_t at = std::uint64_t{packets_.remainder(item)} * 16;
    const std::uint64_t sequence = wanted_.quotient(number);
    const std::uint32_t i = wanted_.remainder(number);
    if (i >= step_.counts[sequence]) return;
    const hot_miss miss = step_.misses[sequence * step_.stride + i];
    const token_place place =
        place_in(tables_, by_, pool_.blocks, static_cast<std::int32_t>(sequence), miss.position);
    packet<16> row{};
    if (place.what == token_place::kind::in_cache)
      row = load_packet<16, cache_hint::streaming>(pool_.data + place.block * pool_.block_stride +
                                                   place.token * pool_.row_stride + at);
    store_packet<16>(
        rows_ +
            (sequence * (std::uint64_t{slots_} + 1) + static_cast<std::uint64_t>(miss.slot)) * row_bytes_ +
            at,
        row);
  }

 private:
  hot_rows_step step_;
  Tables tables_;
  row_pool pool_;
  std::byte* rows_;
  std::uint64_t row_bytes_;
  std::uint32_t sequences_;
  std::uint32_t slots_;
  divider wanted_;
  divider packets_;
  divider by_;
};

[[nodiscard]] inline result<void> check_hot_shape(const hot_rows_shape& shape, std::size_t words,
                                                  const char* slots_name, const char* state_name) noexcept {
  constexpr std::uint64_t most = 0x7FFF'FFFE;
  if (shape.slots == 0) return failure{errc::too_short, 0, 1, 0, slots_name};
  // A state's words are numbered by 32 bits.
  if (hot_rows_words(shape) > most)
    return failure{errc::out_of_range, 0, hot_rows_words(shape), most, state_name};
  const std::uint64_t needed = hot_rows_words(shape) * shape.sequences;
  if (words < needed) return failure{errc::too_short, 0, needed, words, state_name};
  return {};
}

}  // namespace detail

template <class Run>
result<void> reset_hot_rows(const Run& run, const hot_rows_shape& shape, std::span<std::int32_t> state,
                            std::uint32_t first, std::uint32_t count) {
  if (auto fits = detail::check_hot_shape(shape, state.size(), "reset_hot_rows: shape.slots",
                                          "reset_hot_rows: state");
      !fits)
    return fits;
  if (first > shape.sequences)
    return failure{errc::out_of_range, 1, first, shape.sequences, "reset_hot_rows: first"};
  const std::uint32_t left = std::min(count, shape.sequences - first);
  if (left == 0) return {};
  return run.each(detail::hot_reset_work(shape, state.data(), first, left));
}

template <class Run>
result<void> resolve_hot_rows(const Run& run, const hot_rows_shape& shape, std::span<std::int32_t> state,
                              const hot_rows_step& step) {
  if (auto fits = detail::check_hot_shape(shape, state.size(), "resolve_hot_rows: shape.slots",
                                          "resolve_hot_rows: state");
      !fits)
    return fits;
  if (step.wanted_count > shape.slots)
    return failure{errc::out_of_range, 0, step.wanted_count, shape.slots, "resolve_hot_rows: wanted_count"};
  if (shape.sequences == 0) return {};
  if (step.stride < step.wanted_count)
    return failure{errc::too_short, 0, step.wanted_count, step.stride, "resolve_hot_rows: stride"};
  if (step.counts == nullptr)
    return failure{errc::too_short, 0, shape.sequences, 0, "resolve_hot_rows: counts"};
  if (step.wanted_count != 0 && (step.wanted == nullptr || step.slots == nullptr || step.misses == nullptr))
    return failure{errc::too_short, 0, step.wanted_count, 0, "resolve_hot_rows: wanted, slots and misses"};
  return run.each(detail::hot_resolve_work(shape, state.data(), step));
}

template <class Run, class Tables>
  requires bounded_table<Tables>
result<void> fetch_hot_rows(const Run& run, const hot_rows_shape& shape, const hot_rows_step& step,
                            const Tables& tables, const row_pool& pool, std::span<std::byte> rows,
                            std::uint64_t row_bytes) {
  const auto address = [](const void* of) { return reinterpret_cast<std::uintptr_t>(of); };
  const std::uint64_t unit =
      alignment_of(address(pool.data), address(rows.data()), pool.block_stride, pool.row_stride, row_bytes);
  if (row_bytes == 0 || unit < 16) return failure{errc::bad_granularity, 0, unit, 16, "fetch_hot_rows: rows"};
  if (tables.block_tokens <= 0) return failure{errc::block_tokens_differ, 0, 0, 1, "fetch_hot_rows: tables"};
  const std::uint64_t count = (std::uint64_t{shape.slots} + 1) * shape.sequences;
  if (rows.size() / row_bytes < count) {
    constexpr std::uint64_t most = ~std::uint64_t{0};
    const std::uint64_t needed = count <= most / row_bytes ? count * row_bytes : most;
    return failure{errc::too_short, 0, needed, rows.size(), "fetch_hot_rows: rows"};
  }
  if (shape.sequences == 0 || step.wanted_count == 0) return {};
  if (const char* const what = detail::missing_table(tables); what != nullptr)
    return failure{errc::too_short, 0, shape.sequences, 0, what};
  if (pool.data == nullptr || step.misses == nullptr || step.counts == nullptr)
    return failure{errc::too_short, 0, step.wanted_count, 0, "fetch_hot_rows: pool, misses and counts"};
  return run.each(detail::hot_fetch_work<Tables>(shape, step, tables, pool, rows.data(), row_bytes));
}

}  // namespace v0
}  // namespace llmmem
