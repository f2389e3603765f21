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
#include <llmmem/kernels/packet.hpp>
#include <llmmem/kernels/rows.hpp>
#include <llmmem/result.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The state of a sequence. Rows are in a list by their last use.
struct hot_state {
  std::int32_t* slot_of;      // [positions]
  std::int32_t* position_of;  // [slots]
  std::int32_t* older;
  std::int32_t* newer;
  std::int32_t* ends;  // the oldest, the newest

  LLMMEM_HD hot_state(const hot_rows_shape& shape, std::int32_t* all, std::uint64_t sequence) noexcept
      : slot_of(all + sequence * hot_rows_words(shape)),
        position_of(slot_of + shape.positions),
        older(position_of + shape.slots),
        newer(older + shape.slots),
        ends(newer + shape.slots) {}

  /// Makes a slot the newest.
  LLMMEM_HD void touch(std::int32_t slot) const noexcept {
    if (ends[1] == slot) return;
    const std::int32_t before = older[slot];
    const std::int32_t after = newer[slot];  // there is one: the slot is not the newest
    if (before >= 0) {
      newer[before] = after;
    } else {
      ends[0] = after;
    }
    older[after] = before;
    newer[ends[1]] = slot;
    older[slot] = ends[1];
    newer[slot] = -1;
    ends[1] = slot;
  }
  /// Gives up a position, and its slot before all others.
  LLMMEM_HD void forget(std::int32_t position) const noexcept {
    const std::int32_t slot = slot_of[position];
    if (slot < 0) return;
    slot_of[position] = -1;
    position_of[slot] = -1;
    if (ends[0] == slot) return;
    const std::int32_t before = older[slot];  // there is one: the slot is not the oldest
    const std::int32_t after = newer[slot];
    newer[before] = after;
    if (after >= 0) {
      older[after] = before;
    } else {
      ends[1] = before;
    }
    older[ends[0]] = slot;
    newer[slot] = ends[0];
    older[slot] = -1;
    ends[0] = slot;
  }
  /// Returns the slot used longest ago, which has a position from now on.
  [[nodiscard]] LLMMEM_HD std::int32_t take(std::int32_t position) const noexcept {
    const std::int32_t slot = ends[0];
    const std::int32_t left = position_of[slot];
    if (left >= 0) slot_of[left] = -1;
    position_of[slot] = position;
    slot_of[position] = slot;
    touch(slot);
    return slot;
  }
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
    const std::uint32_t order = shape_.positions + shape_.slots;
    std::int32_t value = -1;
    if (word >= order) {
      const std::uint32_t in_order = word - order;
      const std::uint32_t last = shape_.slots - 1;
      if (in_order < shape_.slots) {
        value = static_cast<std::int32_t>(in_order) - 1;
      } else if (in_order < 2 * shape_.slots) {
        const std::uint32_t slot = in_order - shape_.slots;
        value = slot == last ? -1 : static_cast<std::int32_t>(slot + 1);
      } else {
        value = in_order == 2 * shape_.slots ? 0 : static_cast<std::int32_t>(last);
      }
    }
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

/// An item for each sequence.
class hot_resolve_work {
 public:
  hot_resolve_work(const hot_rows_shape& shape, std::int32_t* state, const hot_rows_step& step) noexcept
      : shape_(shape), state_(state), step_(step) {}

  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return shape_.sequences; }
  LLMMEM_HD void run(std::uint64_t sequence) const noexcept {
    const hot_state state(shape_, state_, sequence);
    const std::uint64_t row = sequence * step_.stride;
    const std::int32_t* const wanted = step_.wanted + row;
    std::int32_t* const slots = step_.slots + row;
    hot_miss* const misses = step_.misses + row;
    const std::int32_t newest = step_.newest == nullptr ? -1 : step_.newest[sequence];
    const auto is_kept = [&](std::int32_t position) {
      return position >= 0 && static_cast<std::uint32_t>(position) < shape_.positions && position != newest;
    };
    // The engine writes it in this step: a row of it that is here is from before a truncation.
    if (newest >= 0 && static_cast<std::uint32_t>(newest) < shape_.positions) state.forget(newest);
    for (std::uint32_t i = 0; i < step_.wanted_count; ++i) {
      const std::int32_t position = wanted[i];
      if (!is_kept(position)) continue;
      const std::int32_t slot = state.slot_of[position];
      if (slot >= 0) state.touch(slot);
    }
    std::uint32_t missed = 0;
    for (std::uint32_t i = 0; i < step_.wanted_count; ++i) {
      const std::int32_t position = wanted[i];
      std::int32_t slot = -1;
      if (is_kept(position)) {
        slot = state.slot_of[position];
        if (slot < 0) {
          slot = state.take(position);
          misses[missed] = {position, slot};
          ++missed;
        }
      } else if (position >= 0 && position == newest) {
        slot = static_cast<std::int32_t>(shape_.slots);
      }
      slots[i] = slot;
    }
    step_.counts[sequence] = missed;
  }

 private:
  hot_rows_shape shape_;
  std::int32_t* state_;
  hot_rows_step step_;
};
static_assert(item_work<hot_resolve_work>);

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
