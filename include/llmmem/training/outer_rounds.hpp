/// @file
/// `outer_rounds`: workers that train apart for many steps and then take one step together, as in DiLoCo and
/// local SGD.
#pragma once

#include <llmmem/comm/collectives.hpp>
#include <llmmem/comm/transport.hpp>
#include <llmmem/comm/wire_form.hpp>
#include <llmmem/comm/wired_collectives.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/kernels/outer_update.hpp>
#include <llmmem/result.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Joins the weights of workers that train apart. In each round a worker takes many steps alone. Its change
/// of the weights is then one gradient, the mean of all workers' gradients moves common *base weights*, and
/// each worker continues from these. So a round's messages are paid once in hundreds of steps, and workers
/// may be in different data centres.
///
///     outer_rounds rounds(store, elements);               // of each fragment: a layer, a shard, everything
///     for (f ...) rounds.begin(f, weights[f]).value();    // all workers have the same weights
///     for (step = 1; step <= steps; ++step) {
///       train(step);                                      // its own batches, its own optimizer state
///       if (step % 500 != 0) continue;
///       for (f ...) {
///         rounds.take(f, weights[f]).value();             // its change since the last round
///         const bool is_summed = rounds.sum(workers, wire_form{}, call).has_value();
///         const auto all = workers.agree(is_summed ? 1 : 0, by).value();
///         if (all.bits == 1) rounds.apply(weights[f]).value();
///         else { workers.shrink(all); --f; }              // nothing has changed: again, without the dead
///       }
///     }
///
/// `sum` may run on another thread, by an `operation_queue`, while the worker trains on: with fragments that
/// take turns and `keep_local` 0.5 this is Streaming DiLoCo. `outer_update` has the formulas.
///
/// All workers have the same bits of base weights and momentum; with `keep_local` 0 also of the weights. They
/// depend neither on where the store keeps them, nor, with a plain wire, on how fragments divide the weights.
/// A value that is not finite on one worker becomes NaN or infinite on all.
///
/// - **Sharded weights**: a fragment is this rank's part, and `workers` is the `rank_group` of the ranks that
///   have the same part.
/// - **Saved**: `save` and `restore`. In a round, `save` has what was before it. The rest of a worker's state
///   is its own. A checkpointer that copies chunks reads those of `base` and `momentum`.
/// - **A worker that joins**: `restore` with the base weights and the momentum of another worker.
/// - **Devices**: all of this is on the host. The caller copies weights from the device for `take`, and back
///   after `apply`. Base weights and momentum are used once a round: host memory or a file is fast enough.
///
/// @tparam Store  `memory_chunks` or a `tiered_buffer`, which keeps 8 bytes for each element, and during a
///                round 4 bytes for each of the largest fragment. A round leases 8 bytes for each element of
///                its fragment, and these 4.
/// @par Complexity      O(elements) a round, and the messages of one all-reduce.
/// @par Thread safety   the store's thread. Between `take` and `apply`, `sum` may be on another one, which
///                      uses only leased memory; meanwhile this one may use the store, and call `save`.
/// @par Errors          values: those of the store and of the transport, `errc::size_mismatch` for weights of
///                      another length, and `errc::out_of_range` for a fragment that does not exist. Calls
///                      out of order throw `argument_error`. After each of them the base weights, the
///                      momentum and the caller's weights are unchanged, except that a failed `begin` or
///                      `restore` leaves its fragment without base weights.
/// @par Source          Douillard et al., "DiLoCo", 2023 (arXiv 2311.08105), and "Streaming DiLoCo", 2025
///                      (arXiv 2501.18512); Stich, "Local SGD Converges Fast and Communicates Little", ICLR
///                      2019.
template <class Store>
class outer_rounds {
  static_assert(
      requires(Store& store, std::uint64_t bytes) { store.create(bytes).value(); },
      "outer_rounds: the store is a memory_chunks or a tiered_buffer");
  static_assert(
      requires(const typename Store::update_lease& lease) { lease.span(); },
      "outer_rounds: the host reads and writes leased bytes, so the store's first tier must be host memory");

 public:
  using chunk_type = std::remove_cvref_t<decltype(std::declval<Store&>().create(1).value())>;

  /// The store outlives it. Takes chunks, without contents yet.
  /// @param elements  of each fragment
  /// @throws argument_error  for no fragments, a fragment without elements or of 2^60 or more, and values of
  ///                         `by` outside their ranges.
  ///                         Also the store's errors.
  outer_rounds(Store& store, std::span<const std::uint64_t> elements, const outer_hyper& by = {});
  outer_rounds(const outer_rounds&) = delete;
  outer_rounds& operator=(const outer_rounds&) = delete;
  /// Removes its chunks.
  ~outer_rounds();

  /// Makes these the base weights of a fragment, without momentum. All workers pass the same.
  result<void> begin(std::uint32_t fragment, std::span<const float> weights);

  /// Begins a round of a fragment: keeps the change from the base weights to these, and leases what `apply`
  /// will change. A round that was begun before and not applied ends.
  result<void> take(std::uint32_t fragment, std::span<const float> weights);
  /// Sums the change of all workers, once. After a failure or an exception the change is lost: call `take`
  /// again.
  /// @param wire  the form of the messages. The change is rounded to it twice, and what it loses is lost;
  ///              Streaming DiLoCo took 4-bit floats without harm to the model.
  template <transport T, wire_codec W>
  result<void> sum(T& workers, const W& wire, collective_call& call);
  /// Takes the outer step, and ends the round. Cannot fail if the number of weights fits.
  /// @param weights  the worker's present weights of the fragment; they become the ones to continue with.
  result<void> apply(std::span<float> weights);
  /// Ends a round without a step, if there is one, and its leases with it: for a worker that trains on after
  /// a failed sum. `take` does the same first.
  void end_round() noexcept;

  /// Copies a fragment's base weights and momentum, for example into a checkpoint.
  result<void> save(std::uint32_t fragment, std::span<float> base, std::span<float> momentum) const;
  /// Continues from what `save` copied.
  result<void> restore(std::uint32_t fragment, std::span<const float> base, std::span<const float> momentum);

  /// Return the chunks of a fragment's base weights and momentum, floats, for a checkpointer that copies them
  /// and writes them back where they are. Only these two have what a resumed run needs. Leased by the caller,
  /// they make `take`, `save` and `restore` fail as any lease does; a round has them leased itself.
  /// @pre the fragment exists; to read, it has begun
  [[nodiscard]] chunk_type base(std::uint32_t fragment) const noexcept { return fragments_[fragment].base; }
  [[nodiscard]] chunk_type momentum(std::uint32_t fragment) const noexcept {
    return fragments_[fragment].momentum;
  }

  [[nodiscard]] std::uint32_t fragments() const noexcept {
    return static_cast<std::uint32_t>(fragments_.size());
  }
  /// Rounds of a fragment that were applied since `begin` or `restore`. @pre the fragment exists
  [[nodiscard]] std::uint64_t rounds(std::uint32_t fragment) const noexcept {
    return fragments_[fragment].rounds;
  }

 private:
  struct fragment_state {
    std::uint64_t elements = 0;
    chunk_type base{};
    chunk_type momentum{};
    bool has_begun = false;
    std::uint64_t rounds = 0;
  };

  // Leased from `take` on, so that no worker can fail in `apply` once all have agreed to it.
  struct round {
    typename Store::update_lease base{};
    typename Store::update_lease momentum{};
    typename Store::write_lease change{};
    std::span<float> values{};  // of the change, as a lease's own span may read what the store changes
    std::uint32_t fragment = 0;
    bool has_begun_sum = false;
    std::uint32_t workers = 0;  // in the sum; 0: there is none
  };

  [[nodiscard]] bool is_in_round() const noexcept { return !round_.values.empty(); }
  [[nodiscard]] static std::span<float> as_floats(std::span<std::byte> bytes, std::uint64_t elements) {
    return {reinterpret_cast<float*>(bytes.data()), elements};
  }
  [[nodiscard]] result<void> fits(std::uint32_t fragment, std::uint64_t elements, const char* where) const;
  [[nodiscard]] result<void> write(chunk_type chunk, std::span<const float> values);
  [[nodiscard]] result<void> read(chunk_type chunk, std::span<float> into) const;
  /// @param momentum  none: zeros
  [[nodiscard]] result<void> set(std::uint32_t fragment, std::span<const float> base,
                                 std::span<const float> momentum);
  static void must_have_begun(const fragment_state& of, const char* call) {
    if (of.has_begun) return;
    throw argument_error(std::string("outer_rounds::") + call +
                         ": the fragment has no base weights; call begin or restore first");
  }
  void remove_all() noexcept;

  Store* store_;
  outer_hyper by_;
  std::vector<fragment_state> fragments_{};
  chunk_type change_{};  // the largest fragment's
  round round_{};
};

template <class Store>
outer_rounds<Store>::outer_rounds(Store& store, std::span<const std::uint64_t> elements,
                                  const outer_hyper& by)
    : store_(&store), by_(by) {
  if (elements.empty()) throw argument_error("outer_rounds: no fragments; one of all weights will do");
  if (!(by.rate > 0) || !(by.rate < 1e30F))
    throw argument_error("outer_rounds: the rate is not a number above 0; DiLoCo's is 0.7");
  if (!(by.momentum >= 0) || !(by.momentum < 1))
    throw argument_error("outer_rounds: the momentum is not from 0 to below 1; DiLoCo's is 0.9");
  if (!(by.keep_local >= 0) || !(by.keep_local < 1))
    throw argument_error("outer_rounds: keep_local is not from 0 to below 1; 1 would join nothing");
  std::uint64_t largest = 0;
  for (std::size_t i = 0; i < elements.size(); ++i) {
    if (elements[i] == 0 || elements[i] >= std::uint64_t{1} << 60U) {
      throw argument_error("outer_rounds: fragment " + std::to_string(i) + " has " +
                           std::to_string(elements[i]) + " elements; leave out what is empty");
    }
    largest = std::max(largest, elements[i]);
  }
  fragments_.reserve(elements.size());
  try {
    for (const std::uint64_t each : elements) {
      const auto base = store.create(4 * each);
      fragments_.push_back({.elements = each, .base = base.value()});
      fragments_.back().momentum = store.create(4 * each).value();
    }
    change_ = store.create(4 * largest).value();
  } catch (...) {
    remove_all();
    throw;
  }
}

template <class Store>
outer_rounds<Store>::~outer_rounds() {
  end_round();
  remove_all();
}

template <class Store>
void outer_rounds<Store>::remove_all() noexcept {
  const auto remove = [this](chunk_type chunk) {
    if (chunk != chunk_type{}) static_cast<void>(store_->remove(chunk));  // else it was not created
  };
  remove(change_);
  for (const fragment_state& each : fragments_) {
    remove(each.base);
    remove(each.momentum);
  }
}

template <class Store>
result<void> outer_rounds<Store>::fits(std::uint32_t fragment, std::uint64_t elements,
                                       const char* where) const {
  if (fragment >= fragments_.size())
    return failure{errc::out_of_range, fragment, fragment, fragments_.size() - 1, where};
  if (elements != fragments_[fragment].elements)
    return failure{errc::size_mismatch, fragment, fragments_[fragment].elements, elements, where};
  return {};
}

template <class Store>
result<void> outer_rounds<Store>::write(chunk_type chunk, std::span<const float> values) {
  auto lease = store_->write(chunk);
  if (!lease) return lease.error();
  std::memcpy(lease->span().data(), values.data(), values.size_bytes());
  return {};
}

template <class Store>
result<void> outer_rounds<Store>::read(chunk_type chunk, std::span<float> into) const {
  auto lease = store_->read(chunk);
  if (!lease) return lease.error();
  std::memcpy(into.data(), lease->span().data(), into.size_bytes());
  return {};
}

template <class Store>
void outer_rounds<Store>::end_round() noexcept {
  if (!is_in_round()) return;
  round_ = {};
  static_cast<void>(store_->discard(change_));
}

template <class Store>
result<void> outer_rounds<Store>::begin(std::uint32_t fragment, std::span<const float> weights) {
  return set(fragment, weights, {});
}

template <class Store>
result<void> outer_rounds<Store>::take(std::uint32_t fragment, std::span<const float> weights) {
  if (const auto fit = fits(fragment, weights.size(), "outer_rounds::take"); !fit) return fit;
  const fragment_state& of = fragments_[fragment];
  must_have_begun(of, "take");
  end_round();
  auto base = store_->update(of.base);
  if (!base) return base.error();
  auto momentum = store_->update(of.momentum);
  if (!momentum) return momentum.error();
  auto change = store_->write(change_);
  if (!change) return change.error();
  round_ = {.base = std::move(*base), .momentum = std::move(*momentum), .change = std::move(*change)};
  round_.fragment = fragment;
  const auto from = as_floats(round_.base.span(), of.elements);
  const auto into = as_floats(round_.change.span(), of.elements);
  round_.values = into;
  for (std::size_t i = 0; i < weights.size(); ++i)
    into[i] = from[i] - weights[i];
  return {};
}

template <class Store>
template <transport T, wire_codec W>
result<void> outer_rounds<Store>::sum(T& workers, const W& wire, collective_call& call) {
  if (!is_in_round() || round_.has_begun_sum)
    throw argument_error("outer_rounds::sum: no change to sum; call take first");
  round_.has_begun_sum = true;  // from here on the change is the sum, or undefined
  if (const auto done = all_reduce(workers, round_.values, wire, call); !done) return done;
  round_.workers = to_number(workers.world());
  return {};
}

template <class Store>
result<void> outer_rounds<Store>::apply(std::span<float> weights) {
  if (round_.workers == 0)
    throw argument_error("outer_rounds::apply: no sum to apply; call take, and sum until it succeeds");
  if (const auto fit = fits(round_.fragment, weights.size(), "outer_rounds::apply"); !fit) return fit;
  fragment_state& of = fragments_[round_.fragment];
  outer_update(round_.values, round_.workers, by_, as_floats(round_.momentum.span(), of.elements),
               as_floats(round_.base.span(), of.elements), weights);
  ++of.rounds;
  end_round();
  return {};
}

template <class Store>
result<void> outer_rounds<Store>::save(std::uint32_t fragment, std::span<float> base,
                                       std::span<float> momentum) const {
  if (const auto fit = fits(fragment, base.size(), "outer_rounds::save: base"); !fit) return fit;
  if (const auto fit = fits(fragment, momentum.size(), "outer_rounds::save: momentum"); !fit) return fit;
  const fragment_state& of = fragments_[fragment];
  must_have_begun(of, "save");
  if (is_in_round() && round_.fragment == fragment) {  // both are leased
    std::memcpy(base.data(), round_.base.span().data(), base.size_bytes());
    std::memcpy(momentum.data(), round_.momentum.span().data(), momentum.size_bytes());
    return {};
  }
  if (const auto done = read(of.base, base); !done) return done;
  return read(of.momentum, momentum);
}

template <class Store>
result<void> outer_rounds<Store>::restore(std::uint32_t fragment, std::span<const float> base,
                                          std::span<const float> momentum) {
  if (const auto fit = fits(fragment, momentum.size(), "outer_rounds::restore: momentum"); !fit) return fit;
  return set(fragment, base, momentum);
}

template <class Store>
result<void> outer_rounds<Store>::set(std::uint32_t fragment, std::span<const float> base,
                                      std::span<const float> momentum) {
  if (const auto fit = fits(fragment, base.size(), "outer_rounds: base weights"); !fit) return fit;
  fragment_state& of = fragments_[fragment];
  if (round_.fragment == fragment) end_round();
  of.has_begun = false;  // until both are written
  if (const auto done = write(of.base, base); !done) return done;
  auto lease = store_->write(of.momentum);
  if (!lease) return lease.error();
  if (momentum.empty()) {
    std::memset(lease->span().data(), 0, 4 * of.elements);
  } else {
    std::memcpy(lease->span().data(), momentum.data(), momentum.size_bytes());
  }
  of.has_begun = true;
  of.rounds = 0;
  return {};
}

}  // namespace v0
}  // namespace llmmem
