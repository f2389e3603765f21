/// @file
/// `background_sums`: sums of a sharded state that run while the program computes.
#pragma once

#include <llmmem/comm/operation_queue.hpp>
#include <llmmem/comm/reduce_op.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/failure.hpp>
#include <llmmem/result.hpp>
#include <llmmem/sharding/ids.hpp>
#include <llmmem/tiering/access.hpp>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The ranks that have a sum when it is finished.
enum class sum_holders : std::uint8_t {
  owners,  ///< `sharded_state::reduce_scatter`
  all      ///< `sharded_state::all_reduce`
};

/// Counters of sums in the background.
struct background_sums_stats {
  std::uint64_t sums = 0;   ///< begun
  std::uint64_t waits = 0;  ///< sums that were not finished when the program needed them to be
};

/// Runs the sums of a `sharded_state` on the thread of an `operation_queue`. The gradients of a layer are
/// summed during the backward pass of the next one.
///
///     background_sums sums(gradients, queue, 1);
///     const auto to_mean = [&](std::span<const tensor_id> scope) { ... };
///     for (layer = last; ...) {
///       auto whole = gradients.allocate_whole(ids_of(layer)).value();
///       backward(layer, whole.tensor(0));
///       sums.begin(std::move(whole), sum_f32, to_mean).value();   // may finish the layer before it
///     }
///     sums.finish(to_mean).value();
///     update();
///
/// Sums end in the order in which they began, and only in a call of `begin` or `finish`: what the program
/// sees depends on its calls, and not on the network. The bits are those of sums in the foreground. All ranks
/// begin the same sums in the same order.
///
/// @tparam State  a `sharded_state`, with pieces in memory or in tiers. Until `finish`, its other operations
///                go through the same queue; `allocate_whole`, and leases of tensors that are not in a sum,
///                do not need to.
/// @par Complexity      memory: `in_flight` contributions in addition to the one that the program writes, and
///                      the messages of one sum.
/// @par Thread safety   one thread, which also leases the pieces; the sums run on the queue's.
/// @par Errors          `begin` and `finish` return the first failure of a sum that they wait for, and
///                      rethrow its exception; the pieces of its scope are then unusable. The other sums are
///                      waited for all the same. A piece that cannot be held revokes the transport, so that
///                      no rank waits. If `done` throws in `begin`, the new sum has not begun: revoke the
///                      transport, or the other ranks wait for it.
/// @par Source          Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3: communication during the
///                      backward pass.
template <class State>
class background_sums {
 public:
  using whole_type = typename State::whole;
  using hold_type = typename State::hold_type;

  /// State and queue outlive it.
  /// @param in_flight  how many sums may be unfinished at once, in addition to the one that begins
  /// @throws argument_error  for 0 in flight.
  background_sums(State& state, operation_queue& queue, std::uint32_t in_flight,
                  sum_holders holders = sum_holders::owners)
      : state_(&state), queue_(&queue), holders_(holders) {
    if (in_flight == 0) {
      throw argument_error(
          "background_sums: 0 sums in flight, which would sum in the foreground; use 1, or call the state's "
          "own reduce_scatter");
    }
    for (std::uint32_t i = 0; i < in_flight; ++i)
      slots_.push_back(std::make_unique<slot>(*this));
  }
  background_sums(const background_sums&) = delete;
  background_sums& operator=(const background_sums&) = delete;
  /// Waits for the sums in flight.
  ~background_sums() {
    while (in_flight_ != 0) {
      try {
        static_cast<void>(finish_oldest([](std::span<const tensor_id>) noexcept {}));
      } catch (...) {  // the program no longer waits for this sum
      }
    }
  }

  /// Begins to sum the contributions of all ranks. If as many sums as allowed are in flight, waits for the
  /// oldest first, and calls `done` with its scope while its pieces are still held. Ends `contribution` when
  /// its sum is finished.
  /// @param done  called as `done(std::span<const tensor_id>)`, on this thread
  template <class Done>
  result<void> begin(whole_type&& contribution, const reduce_op& op, Done&& done) {
    if (in_flight_ == slots_.size()) {
      if (const auto ended = finish_oldest(done); !ended) return ended;
    }
    slot& it = *slots_[(first_ + in_flight_) % slots_.size()];
    auto held = holders_ == sum_holders::all ? state_->hold(contribution.scope(), access_mode::read_write)
                                             : state_->hold_for_sum(contribution.scope());
    if (!held) {
      it.refuse(*queue_);
      return held.error();
    }
    it.whole = std::move(contribution);
    it.held = std::move(*held);
    it.op = op;
    ++in_flight_;
    ++stats_.sums;
    queue_->put(it);
    return {};
  }

  /// Waits for all sums, and calls `done` with the scope of each, in order. Returns the first failure.
  template <class Done>
  result<void> finish(Done&& done) {
    result<void> all;
    std::exception_ptr thrown;
    while (in_flight_ != 0) {
      try {
        const auto ended = finish_oldest(done);
        if (all && !ended) all = ended;
      } catch (...) {
        if (!thrown) thrown = std::current_exception();
      }
    }
    if (thrown) std::rethrow_exception(thrown);
    return all;
  }

  [[nodiscard]] std::uint32_t in_flight() const noexcept { return static_cast<std::uint32_t>(in_flight_); }
  [[nodiscard]] const background_sums_stats& stats() const noexcept { return stats_; }

 private:
  struct slot : operation_queue::entry {
    explicit slot(background_sums& of)
        : entry([](entry& self) -> result<void> { return static_cast<slot&>(self).sum(); }), sums(&of) {}

    [[nodiscard]] result<void> sum() {
      if (sums->holders_ == sum_holders::all) return sums->state_->all_reduce(whole, op);
      return sums->state_->reduce_scatter(whole, op);
    }
    /// Revokes the transport, on the thread that has it.
    void refuse(operation_queue& queue) {
      static_cast<void>(queue.run([this]() -> result<void> {
        sums->state_->ranks().revoke();
        return {};
      }));
    }

    background_sums* sums;
    whole_type whole{};
    hold_type held{};  // leased and ended by the program's thread
    reduce_op op{};    // a copy: the program's may end with the call of `begin`
  };

  template <class Done>
  result<void> finish_oldest(Done&& done) {
    slot& it = *slots_[first_];
    first_ = (first_ + 1) % slots_.size();
    --in_flight_;
    struct ending {
      slot& it;
      ~ending() {
        it.held.end();
        it.whole = whole_type{};
      }
    } const at_end{it};
    if (!queue_->is_done(it)) ++stats_.waits;
    if (const auto ended = queue_->wait(it); !ended) return ended;
    done(it.whole.scope());
    return {};
  }

  State* state_;
  operation_queue* queue_;
  sum_holders holders_;
  std::vector<std::unique_ptr<slot>> slots_{};  // a ring; each stays at its address
  std::size_t first_ = 0;
  std::size_t in_flight_ = 0;
  background_sums_stats stats_{};
};

}  // namespace v0
}  // namespace llmmem
