/// @file
/// The bodies of `training_plan`.
#pragma once

#include <llmmem/schedule/bounds.hpp>
#include <llmmem/sharding/sharded_wires.hpp>
#include <llmmem/tiering/access.hpp>
#include <llmmem/tiering/machine.hpp>
#include <llmmem/training/detail/rank_shares.hpp>
#include <llmmem/training/training_plan.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <string>

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

/// Refuses sums of the largest gradients with what they do not go with.
inline void check_top_k(const training_plan& plan, const training_shape& shape) {
  if (plan.top_k.density == 0) return;
  if (!(plan.top_k.density > 0) || !(plan.top_k.density <= 1))
    throw argument_error("training_plan: top_k.density is not above 0 and at most 1; DGC's is 0.001");
  if (plan.optimizer != optimizer_form::sgd) {
    throw argument_error(
        "training_plan: top_k with an optimizer that has moments of its own, of sums that are mostly zeros; "
        "use sgd, whose momentum each rank then adds before it sends");
  }
  if (plan.zero != zero_stage::none) {
    throw argument_error(
        "training_plan: top_k with shards: each rank keeps momentum and unsent gradients of all weights; use "
        "zero_stage::none");
  }
  if (!plan.wires.is_plain()) {
    throw argument_error(
        "training_plan: top_k with wires, nodes or error feedback: its sums have a form of their own, in one "
        "hop, and what is not sent waits already; leave wires as they are");
  }
  if (plan.sums_in_flight != 0) {
    throw argument_error("training_plan: top_k with sums_in_flight " + std::to_string(plan.sums_in_flight) +
                         ", which sums all gradients of a layer; use 0");
  }
  for (const training_layer& each : shape.layers) {
    if (each.parameters <= std::uint64_t{1} << 32U) continue;
    throw argument_error("training_plan: top_k with a layer of " + std::to_string(each.parameters) +
                         " parameters; its indices reach 2^32");
  }
  if (shape.value_bytes != sizeof(float)) {
    throw argument_error("training_plan: top_k with values of " + std::to_string(shape.value_bytes) +
                         " bytes; it sums floats only");
  }
}

/// Adds bytes, of which a plan may have too many.
inline void add_bytes(std::uint64_t& to, std::uint64_t more, const char* what) {
  to = checked_add(to, more, what);
}

/// Returns the most bytes of activations at once, if ranges are rounded as `memory` says.
[[nodiscard]] inline std::uint64_t records_at_once(const training_shape& shape,
                                                   const memory_rounding& memory) {
  std::uint64_t kept = 0;
  std::uint64_t most = 0;
  for (const training_layer& each : shape.layers) {
    const std::uint64_t stays = memory.taken(each.record.kept_bytes());
    const std::uint64_t in_use = each.record.is_complete()
                                     ? stays
                                     : checked_add(memory.taken(each.record.bytes), stays, "training_plan");
    most = std::max(most, checked_add(kept, in_use, "training_plan: bytes of activations"));
    kept += stays;
  }
  return most;
}

/// Returns the bytes of weights, gradients and the optimizer's state in plain memory.
[[nodiscard]] inline std::uint64_t resident_state(const training_plan& plan, const rank_shares_of& shares) {
  std::uint64_t sum = 0;
  const auto add_kind = [&](const auto& local) {
    std::uint64_t range = 0;
    for (std::size_t layer = 0; layer < shares.layers(); ++layer) {
      range = checked_add(range, local(layer), "training_plan: bytes of a kind of state");
      if (plan.ranges == state_ranges::per_kind && layer + 1 < shares.layers()) continue;
      sum = checked_add(sum, plan.memory.taken(range), "training_plan: bytes of state");
      range = 0;
    }
  };
  for (const state_kind kind : {state_kind::weights, state_kind::gradients})
    add_kind([&](std::size_t layer) { return shares.local(layer, kind); });
  for (const optimizer_array array : optimizer_arrays)
    add_kind([&](std::size_t layer) { return shares.state(layer, array); });
  return sum;
}

/// Returns the most bytes of gathered layers and sums at once.
[[nodiscard]] inline predicted_bytes gathered_at_once(const training_plan& plan,
                                                      const rank_shares_of& shares) {
  std::uint64_t most = 0;
  std::uint64_t most_sum = 0;  // gradients and the messages of their sum
  std::uint64_t most_gradients = 0;
  std::uint64_t most_sum_messages = 0;
  std::uint64_t most_messages = 0;  // of a gather
  std::uint64_t most_rebuilt = 0;   // weights that are gathered in addition to the plan
  constexpr const char* what = "training_plan: bytes of gathered layers";
  std::vector<std::uint64_t> wholes;
  for (std::size_t layer = 0; layer < shares.layers(); ++layer) {
    const std::uint64_t whole = plan.memory.taken(shares.whole(layer));
    const std::uint64_t weights = shares.is_gathered(layer, state_kind::weights) ? whole : 0;
    const std::uint64_t gradients = shares.is_gathered(layer, state_kind::gradients) ? whole : 0;
    const std::uint64_t sum_messages = plan.memory.taken(shares.sum_bytes(layer));
    const std::uint64_t sum = checked_add(gradients, sum_messages, what);
    // The embedding's gradients are made without its weights.
    const std::uint64_t messages = plan.memory.taken(shares.gather_bytes(layer));
    const bool needs_weights = shares.is_read_back(layer) && !shares.has_weights_back(layer);
    most = std::max(
        {most, checked_add(weights, messages, what), checked_add(sum, needs_weights ? weights : 0, what)});
    most_sum = std::max(most_sum, sum);
    most_gradients = std::max(most_gradients, gradients);
    most_sum_messages = std::max(most_sum_messages, sum_messages);
    most_messages = std::max(most_messages, messages);
    if (shares.is_read_by_rebuild(layer)) most_rebuilt = std::max(most_rebuilt, weights);
    wholes.push_back(whole);
  }
  // Contributions wait for their sums, of which one has messages at a time.
  std::uint64_t in_flight = 0;
  if (plan.sums_in_flight != 0) {
    const std::uint64_t sums = std::min<std::uint64_t>(plan.sums_in_flight, shares.layers());
    in_flight = checked_add(checked_multiply(sums, most_gradients, what), most_sum_messages, what);
  }
  if (plan.gather_ahead == 0) return {checked_add(most, in_flight, what), in_flight != 0};
  // The largest sum over `gather_ahead` + 1 consecutive layers, in the order of use: the plan's budget, of
  // which also a rank that has one of them completely may use all, with earlier layers that stay.
  std::uint64_t in_a_row = 0;
  const std::size_t layers = wholes.size();
  std::vector<std::uint64_t> uses(wholes.begin(), wholes.end());
  for (std::size_t layer = layers; layer-- > 1;)
    uses.push_back(wholes[layer]);
  for (std::size_t first = 0; first < uses.size(); ++first) {
    std::uint64_t bytes = 0;
    for (std::size_t i = first; i < uses.size() && i - first <= plan.gather_ahead; ++i)
      add_bytes(bytes, uses[i], what);
    in_a_row = std::max(in_a_row, bytes);
  }
  std::uint64_t all = 0;
  for (std::size_t layer = 0; layer < layers; ++layer)
    add_bytes(all, shares.is_gathered(layer, state_kind::weights) ? wholes[layer] : 0, what);
  add_bytes(most_sum, in_flight, what);
  add_bytes(most_sum, most_rebuilt, what);
  return {checked_add(checked_add(std::min(in_a_row, all), most_sum, what), most_messages, what), true};
}

/// Counts the memory and the messages of outer steps.
/// @param shares  of a rank of `worker`.
inline void count_outer(const training_plan& plan, const rank_shares_of& shares, std::uint32_t worker,
                        training_prediction& into) {
  if (plan.outer.local_steps == 0) return;
  constexpr const char* what = "training_plan: bytes of outer steps";
  const bool is_resident = plan.tiers.empty();
  std::uint64_t change = 0;
  std::uint64_t messages = 0;
  for (std::size_t layer = 0; layer < shares.layers(); ++layer) {
    const std::uint64_t bytes = sizeof(float) * shares.updated(layer);
    if (bytes == 0) continue;
    add_bytes(into.outer_bytes, 2 * bytes, what);
    if (is_resident) add_bytes(into.resident_outer_bytes, 2 * plan.memory.taken(bytes), what);
    change = std::max(change, bytes);
    messages = std::max(messages, shares.outer_sum_bytes(layer));
    add_bytes(into.sent_per_round, shares.sent_by_round(layer, worker), what);
    // Once, by the ranks of the first worker, of which several may keep the same.
    if (worker == 0) add_bytes(into.saved_bytes, 2 * shares.owned(layer), what);
  }
  into.round_bytes = messages + (is_resident ? plan.memory.taken(change) : 0);
}

/// The chunks of outer steps in tiers.
struct outer_chunks {
  std::uint64_t bytes = 0;  ///< of all
  std::uint64_t largest_chunk = 0;
  std::uint64_t largest_lease = 0;  ///< of a layer in a round, with its weights
};
[[nodiscard]] inline outer_chunks outer_chunks_of(const training_plan& plan, const rank_shares_of& shares) {
  outer_chunks all;
  if (plan.outer.local_steps == 0) return all;
  constexpr const char* what = "training_plan: bytes of outer steps";
  const auto chunk = [&](std::uint64_t bytes) {
    return checked_multiply((bytes + plan.granularity - 1) / plan.granularity, plan.granularity, what);
  };
  std::uint64_t change = 0;
  for (std::size_t layer = 0; layer < shares.layers(); ++layer)
    change = std::max(change, chunk(sizeof(float) * shares.updated(layer)));
  all.bytes = change;
  all.largest_chunk = change;
  for (std::size_t layer = 0; layer < shares.layers(); ++layer) {
    const std::uint64_t both = 2 * chunk(sizeof(float) * shares.updated(layer));
    add_bytes(all.bytes, both, what);
    const std::uint64_t weights = chunk(shares.local(layer, state_kind::weights));
    if (both == 0) continue;
    const std::uint64_t in_pages =
        tier_bytes(plan, weights) + 2 * tier_bytes(plan, both / 2) + tier_bytes(plan, change);
    all.largest_lease = std::max(all.largest_lease, in_pages);
  }
  return all;
}

/// Counts the bytes that a rank sends, in a step and outside of steps.
inline void count_sent(const training_plan& plan, const rank_shares_of& shares, training_prediction& into) {
  constexpr const char* what = "training_plan: bytes sent";
  const std::uint64_t others = plan.ranks - 1;
  const std::size_t layers = shares.layers();
  const bool is_gathered = is_sharded(plan.zero, state_kind::weights);
  const std::size_t stay =
      plan.gather_ahead == 0 ? 0 : std::min<std::size_t>(plan.gather_ahead + 1, layers - 1);
  for (std::size_t layer = 0; layer < layers; ++layer) {
    add_bytes(into.sent_per_step, shares.sent_by_sum(layer), what);
    add_bytes(into.sent_per_step, shares.sent_by_update(layer), what);
    if (is_gathered) {
      const bool is_read_back = shares.is_read_back(layer) && layer < layers - stay;
      add_bytes(into.sent_per_step, shares.sent_by_gather(layer), what);
      if (shares.is_read_by_rebuild(layer))
        add_bytes(into.sent_per_step, shares.sent_by_gather_back(layer), what);
      if (is_read_back) add_bytes(into.sent_per_step, shares.sent_by_gather_back(layer), what);
      add_bytes(into.sent_once, shares.sent_by_gather(layer), what);
    } else if (plan.zero != zero_stage::none) {
      add_bytes(into.sent_per_step, shares.owned(layer) * others, what);
      add_bytes(into.sent_once, shares.owned(layer) * others, what);
    }
  }
}

}  // namespace detail

namespace detail {

/// Refuses parts of layers that cannot be trained by themselves.
inline void check_parts(const training_plan& plan, const training_shape& shape) {
  for (std::size_t i = 0; i < shape.layers.size(); ++i) {
    const training_layer& each = shape.layers[i];
    if (!each.continues) continue;
    const std::string part = "training_plan: layer " + std::to_string(i) + ", which continues the one before";
    if (i == 0) throw argument_error(part + ", is the first; clear continues");
    if (each.record.bytes != 0) {
      throw argument_error(part + ", has a record of " + std::to_string(each.record.bytes) +
                           " bytes; give it to the layer's first part");
    }
    if (plan.optimizer == optimizer_form::adafactor || plan.optimizer == optimizer_form::muon) {
      throw argument_error(part + ", with " +
                           (plan.optimizer == optimizer_form::muon ? "muon" : "adafactor") +
                           ", which works on whole matrices; use an optimizer of each element");
    }
  }
}

}  // namespace detail

inline void check_plan(const training_plan& plan, const training_shape& shape) {
  if (plan.ranks == 0) throw argument_error("training_plan: 0 ranks; 1 means no split");
  if (shape.layers.size() < 2)
    throw argument_error("training_plan: a shape of " + std::to_string(shape.layers.size()) +
                         " layers; give an embedding and at least one more");
  if (plan.gather_ahead != 0 && plan.zero != zero_stage::weights) {
    throw argument_error("training_plan: gather_ahead " + std::to_string(plan.gather_ahead) +
                         " with weights that every rank holds completely; use zero_stage::weights, or 0");
  }
  if (plan.sums_in_flight != 0 && plan.update == optimizer_time::in_backward) {
    throw argument_error("training_plan: sums_in_flight " + std::to_string(plan.sums_in_flight) +
                         " with optimizer_time::in_backward, which needs each sum before the next layer; use "
                         "after_backward, or 0");
  }
  if (shape.value_bytes == 0) throw argument_error("training_plan: values of 0 bytes");
  check_wires(plan.wires, plan.ranks, "training_plan");
  if (!plan.wires.gather.is_plain() && plan.zero != zero_stage::weights) {
    throw argument_error(
        "training_plan: a wire for gathers of weights that every rank holds completely; use "
        "zero_stage::weights, or a plain one");
  }
  if (plan.keeps_secondary) {
    if (plan.zero != zero_stage::weights)
      throw argument_error(
          "training_plan: secondary shards of weights that every rank holds completely; use "
          "zero_stage::weights");
    if (plan.wires.node_ranks < 2)
      throw argument_error("training_plan: secondary shards with nodes of " +
                           std::to_string(plan.wires.node_ranks) +
                           " ranks; give wires.node_ranks, at least 2");
    if (plan.gather_ahead != 0)
      throw argument_error("training_plan: secondary shards with gather_ahead " +
                           std::to_string(plan.gather_ahead) + ", which gathers from all ranks; use 0");
  }
  if (!plan.wires.is_plain() && shape.value_bytes != 4) {
    throw argument_error("training_plan: wires for values of " + std::to_string(shape.value_bytes) +
                         " bytes; they carry floats only");
  }
  if (plan.optimizer == optimizer_form::muon) {
    if (shape.value_bytes != sizeof(float)) {
      throw argument_error("training_plan: muon with values of " + std::to_string(shape.value_bytes) +
                           " bytes; its weights are floats");
    }
    if (plan.zero != zero_stage::none) {
      throw argument_error(
          "training_plan: muon with shards, which cut matrices; use zero_stage::none, with which the ranks "
          "share out whole matrices");
    }
    for (const training_layer& each : shape.layers) {
      if (const std::uint64_t elements = detail::elements_of(each.matrices); elements > each.parameters) {
        throw argument_error("training_plan: muon with matrices of " + std::to_string(elements) +
                             " elements in a layer of " + std::to_string(each.parameters) + " parameters");
      }
    }
  }
  if (plan.optimizer == optimizer_form::adafactor) {
    if (shape.value_bytes != sizeof(float)) {
      throw argument_error("training_plan: adafactor with values of " + std::to_string(shape.value_bytes) +
                           " bytes; its weights are floats");
    }
    for (const training_layer& each : shape.layers) {
      if (each.parameters == 0 || (each.factors != 0 && each.tensors != 0)) continue;
      throw argument_error("training_plan: adafactor with a layer of " + std::to_string(each.parameters) +
                           " parameters, and no factors or tensors; add up factor_count of its tensors");
    }
  }
  if (plan.outer.workers == 0) throw argument_error("training_plan: outer steps of 0 workers");
  if (plan.outer.local_steps == 0 && plan.outer.workers != 1) {
    throw argument_error("training_plan: " + std::to_string(plan.outer.workers) +
                         " workers that never join their weights; give outer.local_steps");
  }
  if (plan.outer.local_steps != 0 && shape.value_bytes != sizeof(float)) {
    throw argument_error("training_plan: outer steps of values of " + std::to_string(shape.value_bytes) +
                         " bytes; they change floats only");
  }
  detail::check_top_k(plan, shape);
  detail::check_parts(plan, shape);
  if (plan.granularity == 0) throw argument_error("training_plan: a granularity of 0 bytes; 1 is the least");
  if (plan.tier_page_bytes == 0)
    throw argument_error("training_plan: a tier_page_bytes of 0 bytes; 1 means that a tier has no pages");
}

inline schedule_trace step_trace(const training_plan& plan, const training_shape& shape, rank_id rank) {
  check_plan(plan, shape);
  return detail::step_writer(plan, shape, rank_id{to_index(rank) % plan.ranks}).write();
}

inline training_prediction predict(const training_plan& plan, const training_shape& shape, rank_id rank,
                                   std::span<const link_model> links, const link_model& network) {
  check_plan(plan, shape);
  const std::uint64_t world = std::uint64_t{plan.ranks} * plan.outer.workers;
  if (to_index(rank) >= world) {
    throw argument_error("training_plan: rank " + std::to_string(to_index(rank)) + " of " +
                         std::to_string(world));
  }
  if (!links.empty() && links.size() != plan.tiers.size()) {
    throw argument_error("training_plan: " + std::to_string(links.size()) + " links for " +
                         std::to_string(plan.tiers.size()) + " budgets; give one link below each budget");
  }
  const detail::rank_shares_of shares(plan, shape, rank_id{to_index(rank) % plan.ranks});
  training_prediction all;
  constexpr const char* state = "training_plan: bytes of state";
  constexpr const char* memory = "training_plan: bytes";
  std::uint64_t compute_ns = 0;
  for (std::size_t layer = 0; layer < shares.layers(); ++layer) {
    const training_layer& it = shape.layers[layer];
    detail::add_bytes(all.kept.weights, shares.local(layer, state_kind::weights), state);
    detail::add_bytes(all.kept.gradients, shares.local(layer, state_kind::gradients), state);
    detail::add_bytes(all.saved_bytes, shares.owned(layer), state);
    for (const detail::optimizer_array array : detail::optimizer_arrays) {
      detail::add_bytes(all.kept.optimizer, shares.state(layer, array), state);
      detail::add_bytes(all.saved_bytes, shares.owned_state(layer, array), state);
    }
    compute_ns += it.forward_ns + it.backward_ns + it.update_ns + it.rebuild_ns;
  }
  all.records_bytes = detail::records_at_once(shape, {.from_bytes = max_bytes});
  all.workspace_bytes = shape.workspace_bytes;
  all.gathered = detail::gathered_at_once(plan, shares);
  detail::count_sent(plan, shares, all);
  detail::count_outer(plan, shares, to_index(rank) / plan.ranks, all);
  if (plan.wires.keeps_errors && plan.ranks > 1) {
    for (std::size_t layer = 0; layer < shares.layers(); ++layer)
      detail::add_bytes(all.residual_bytes, shares.whole(layer), state);
    all.residual_bytes = plan.memory.taken(all.residual_bytes);
  }
  for (std::size_t layer = 0; layer < shares.layers(); ++layer)
    detail::add_bytes(all.secondary_bytes, shares.secondary(layer), state);
  all.secondary_bytes = plan.memory.taken(all.secondary_bytes);
  all.fast = {std::max(all.gathered.bytes, all.round_bytes), all.gathered.is_bound};
  for (const std::uint64_t more :
       {all.residual_bytes, all.secondary_bytes, all.workspace_bytes, all.resident_outer_bytes})
    detail::add_bytes(all.fast.bytes, more, memory);
  if (plan.tiers.empty()) {
    all.resident_state_bytes = detail::resident_state(plan, shares);
    all.resident_records_bytes = detail::records_at_once(shape, plan.memory);
    detail::add_bytes(all.fast.bytes, all.resident_state_bytes, memory);
    detail::add_bytes(all.fast.bytes, all.resident_records_bytes, memory);
  } else {
    const schedule_trace trace = step_trace(plan, shape, rank);
    const detail::outer_chunks outer = detail::outer_chunks_of(plan, shares);
    std::uint64_t chunks = outer.bytes;
    for (const std::uint64_t each : trace.sizes())
      chunks = checked_add(chunks, each, "training_plan: bytes of all chunks");
    const std::uint64_t held = detail::most_held_of_tier(plan, shape, rank);
    all.largest_lease_bytes = std::max(held, outer.largest_lease);
    if (all.largest_lease_bytes > plan.tiers.front()) {
      throw argument_error(
          "training_plan: a first tier of " + std::to_string(plan.tiers.front()) + " bytes; " +
          (outer.largest_lease > held ? "an outer step" : "a step") + " leases " +
          std::to_string(all.largest_lease_bytes) + " at once" +
          (plan.tier_page_bytes == 1 ? "" : ", in pages of " + std::to_string(plan.tier_page_bytes)));
    }
    const auto sizes = trace.sizes();
    const auto largest = std::ranges::max_element(sizes);
    const std::uint64_t chunk = largest == sizes.end() ? 0 : *largest;
    all.largest_chunk_bytes = detail::tier_bytes(plan, std::max(chunk, outer.largest_chunk));
    for (std::size_t tier = 1; tier < plan.tiers.size(); ++tier) {
      if (plan.tiers[tier] >= all.largest_chunk_bytes) continue;
      throw argument_error("training_plan: tier " + std::to_string(tier) + " of " +
                           std::to_string(plan.tiers[tier]) + " bytes; the largest chunk takes " +
                           std::to_string(all.largest_chunk_bytes));
    }
    for (const std::uint64_t budget : plan.tiers)
      all.tiers.push_back({budget, true});
    all.tiers.push_back({chunks, false});
    all.fast = {checked_add(all.fast.bytes, all.tiers.front().bytes, memory), true};
    if (!links.empty()) {
      const plan_bound bound = lower_bound(
          trace, {.budgets = plan.tiers, .links = {links.begin(), links.end()}}, bounded_iteration::steady);
      for (std::size_t edge = 0; edge < bound.edges.size(); ++edge)
        all.min_moved_bytes.push_back(bound.bytes(edge));
      all.stall_ns = bound.stall_ns;
    }
  }
  if (network.bytes_per_second != 0) {
    const std::uint64_t round = plan.outer.local_steps == 0 ? 0 : all.sent_per_round / plan.outer.local_steps;
    const std::uint64_t sending = transfer_ns(network, checked_add(all.sent_per_step, round, memory));
    all.stall_ns = std::max(all.stall_ns, sending > compute_ns ? sending - compute_ns : 0);
  }
  all.step_ns = compute_ns + all.stall_ns;
  return all;
}

}  // namespace v0
}  // namespace llmmem
