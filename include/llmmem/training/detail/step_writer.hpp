/// @file
/// A training step as a trace of the calls on its chunks, and what of a tier it holds.
#pragma once

#include <llmmem/schedule/trace.hpp>
#include <llmmem/tiering/access.hpp>
#include <llmmem/training/detail/rank_shares.hpp>
#include <llmmem/training/training_types.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Returns what a chunk takes of the first tier.
[[nodiscard]] inline std::uint64_t tier_bytes(const training_plan& plan, std::uint64_t bytes) {
  constexpr const char* what = "training_plan: bytes of a chunk in pages";
  for (const std::uint64_t unit : {plan.granularity, plan.tier_page_bytes})
    bytes = checked_multiply(bytes / unit + (bytes % unit != 0 ? 1 : 0), unit, what);
  return bytes;
}

/// What `step_writer` records.
enum class recorded_step : std::uint8_t {
  calls,       ///< of a store of chunks
  held_pages,  ///< what is held of the first tier, in its pages, without the weights that are gathered ahead
};

/// Records a step, call by call.
class step_writer {
 public:
  step_writer(const training_plan& plan, const training_shape& shape, rank_id rank,
              recorded_step what = recorded_step::calls)
      : plan_(&plan), shape_(&shape), shares_(plan, shape, rank), what_(what) {
    for (std::size_t layer = 0; layer < shares_.layers(); ++layer)
      pieces_[weights].push_back(add(shares_.local(layer, state_kind::weights)));
    for (std::size_t layer = 0; layer < shares_.layers(); ++layer)
      pieces_[gradients].push_back(add(shares_.local(layer, state_kind::gradients)));
    for (const optimizer_array array : optimizer_arrays) {
      for (std::size_t layer = 0; layer < shares_.layers(); ++layer)
        pieces_[mean + static_cast<std::size_t>(array)].push_back(add(shares_.state(layer, array)));
    }
    for (const training_layer& each : shape.layers) {
      records_.push_back(add(each.record.bytes));
      kept_.push_back(each.record.is_complete() ? std::nullopt : add(each.record.kept_bytes()));
    }
  }

  [[nodiscard]] schedule_trace write() {
    const std::size_t layers = shares_.layers();
    for (std::size_t layer = 0; layer < layers; ++layer)
      forward(layer);
    for (std::size_t layer = layers; layer-- > 0;) {
      backward(layer);
      if (plan_->update == optimizer_time::in_backward) update(layer);
    }
    while (!in_flight_.empty())
      finish_sum();
    for (std::size_t layer = 0; layer < layers && plan_->update == optimizer_time::after_backward; ++layer)
      update(layer);
    return recorder_.freeze();
  }

 private:
  using chunk = std::optional<chunk_id>;
  enum piece : std::size_t { weights, gradients, mean, variance, low };

  [[nodiscard]] chunk add(std::uint64_t bytes) {
    if (bytes == 0) return std::nullopt;
    if (what_ == recorded_step::held_pages) return recorder_.add_chunk(tier_bytes(*plan_, bytes));
    const std::uint64_t unit = plan_->granularity;
    return recorder_.add_chunk((bytes + unit - 1) / unit * unit);
  }
  void acquire(const chunk& it, access_mode mode) {
    if (it) recorder_.acquire(*it, mode);
  }
  void release(const chunk& it) {
    if (it) recorder_.release(*it);
  }
  void discard(const chunk& it) {
    if (it) recorder_.discard(*it);
  }
  void touch(const chunk& it, access_mode mode) {
    acquire(it, mode);
    release(it);
  }

  /// A shard is leased while it is sent; weights that the rank has completely, while they are used.
  void begin_planned_weights(std::size_t layer) {
    if (!is_ahead()) begin_reading_weights(layer);
  }
  void end_planned_weights(std::size_t layer) {
    if (!is_ahead()) end_reading_weights(layer);
  }
  [[nodiscard]] bool is_ahead() const noexcept {
    return what_ == recorded_step::held_pages && plan_->gather_ahead != 0;
  }
  void begin_reading_weights(std::size_t layer) {
    acquire(pieces_[weights][layer], access_mode::read);
    if (shares_.is_gathered(layer, state_kind::weights)) release(pieces_[weights][layer]);
  }
  void end_reading_weights(std::size_t layer) {
    if (!shares_.is_gathered(layer, state_kind::weights)) release(pieces_[weights][layer]);
  }
  void forward(std::size_t layer) {
    acquire(records_[layer], access_mode::write);
    begin_planned_weights(layer);
    recorder_.compute(shape_->layers[layer].forward_ns);
    end_planned_weights(layer);
    if (!shares_.is_last_part(layer)) return;
    const std::size_t first = shares_.first_part(layer);
    if (kept_[first]) touch(kept_[first], access_mode::write);
    release(records_[first]);
    if (kept_[first]) discard(records_[first]);
  }
  void fetch(std::size_t first) {
    if (kept_[first]) {
      acquire(kept_[first], access_mode::read);
      acquire(records_[first], access_mode::write);
      release(kept_[first]);
      discard(kept_[first]);
      for (std::size_t part = first; part < shares_.layers() && shares_.first_part(part) == first; ++part) {
        if (!shares_.is_read_by_rebuild(part)) continue;
        begin_reading_weights(part);
        end_reading_weights(part);
      }
      recorder_.compute(shape_->layers[first].rebuild_ns);
    } else {
      acquire(records_[first], access_mode::read);
    }
  }
  void backward(std::size_t layer) {
    const training_layer& it = shape_->layers[layer];
    const std::size_t first = shares_.first_part(layer);
    const bool has_record = records_[first].has_value();
    if (has_record) {
      // The parts' weights are not leased together with those that rebuild the record.
      if (!shares_.is_whole(layer) && shares_.is_last_part(layer)) fetch(first);
      begin_planned_weights(layer);
      if (shares_.is_whole(layer)) fetch(first);
    }
    const bool is_gathered = shares_.is_gathered(layer, state_kind::gradients);
    if (!is_gathered) acquire(pieces_[gradients][layer], access_mode::write);
    recorder_.compute(it.backward_ns);
    if (plan_->sums_in_flight != 0) {
      if (in_flight_.size() == plan_->sums_in_flight) finish_sum();
      if (is_gathered) acquire(pieces_[gradients][layer], access_mode::write);
      in_flight_.push_back(layer);
    } else if (is_gathered) {
      if (shares_.owned(layer) != 0) touch(pieces_[gradients][layer], access_mode::write);
      touch(pieces_[gradients][layer], access_mode::read_write);  // the sum becomes the mean
    } else {
      if (shares_.has_top_k()) {
        for (const piece each : {mean, variance})
          acquire(pieces_[each][layer], access_mode::read_write);
        for (const piece each : {variance, mean})
          release(pieces_[each][layer]);
      }
      release(pieces_[gradients][layer]);
    }
    if (has_record) {
      if (layer == first) {
        release(records_[first]);
        discard(records_[first]);
      }
      end_planned_weights(layer);
    }
  }
  /// The oldest sum in flight becomes the mean, and its piece need not be held any longer.
  void finish_sum() {
    release(pieces_[gradients][in_flight_.front()]);
    in_flight_.erase(in_flight_.begin());
  }
  void update(std::size_t layer) {
    acquire(pieces_[gradients][layer], access_mode::read);
    acquire(pieces_[weights][layer], access_mode::read_write);
    if (!shares_.has_top_k()) {  // else the sum has used them
      for (const piece each : {mean, variance, low})
        acquire(pieces_[each][layer], access_mode::read_write);
    }
    recorder_.compute(shape_->layers[layer].update_ns);
    if (!shares_.has_top_k()) {
      for (const piece each : {low, variance, mean})
        release(pieces_[each][layer]);
    }
    release(pieces_[weights][layer]);
    const bool is_refreshed =
        plan_->ranks > 1 && plan_->zero != zero_stage::none && !is_sharded(plan_->zero, state_kind::weights);
    if (is_refreshed) touch(pieces_[weights][layer], access_mode::read_write);
    release(pieces_[gradients][layer]);
    discard(pieces_[gradients][layer]);
  }

  const training_plan* plan_;
  const training_shape* shape_;
  rank_shares_of shares_;
  recorded_step what_;
  trace_recorder recorder_{};
  std::array<std::vector<chunk>, 5> pieces_{};
  std::vector<chunk> records_{};
  std::vector<chunk> kept_{};
  std::vector<std::size_t> in_flight_{};  // layers, the oldest first
};

/// Returns the most bytes of the first tier that a step holds at once. Gathers ahead hold the pieces of the
/// weights in use, or of those that are awaited, and of the `gather_ahead` reads after them
/// (`gather_schedule`).
[[nodiscard]] inline std::uint64_t most_held_of_tier(const training_plan& plan, const training_shape& shape,
                                                     rank_id rank) {
  constexpr const char* what = "training_plan: bytes held of the first tier";
  const rank_id own{to_index(rank) % plan.ranks};
  const std::uint64_t others =
      step_writer(plan, shape, own, recorded_step::held_pages).write().max_leased_bytes();
  if (plan.gather_ahead == 0) return others;
  const rank_shares_of shares(plan, shape, own);
  std::vector<std::size_t> reads;
  reads.reserve(2 * shares.layers());
  for (std::size_t layer = 0; layer < shares.layers(); ++layer)
    reads.push_back(layer);
  for (std::size_t layer = shares.layers(); layer-- > 1;)
    reads.push_back(layer);
  const auto bytes_of = [&](std::size_t layer) {
    return tier_bytes(plan, shares.local(layer, state_kind::weights));
  };
  std::uint64_t most = 0;
  std::uint64_t held = 0;
  std::vector<std::uint32_t> times(shares.layers());  // in the reads from `first` to `end`: held once
  std::size_t end = 0;
  for (std::size_t first = 0; first < reads.size(); ++first) {
    for (; end < reads.size() && end - first <= plan.gather_ahead; ++end) {
      if (times[reads[end]]++ == 0) held = checked_add(held, bytes_of(reads[end]), what);
    }
    most = std::max(most, held);
    if (--times[reads[first]] == 0) held -= bytes_of(reads[first]);
  }
  return checked_add(others, most, what);
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
