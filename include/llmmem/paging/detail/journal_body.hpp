/// @file
/// Bodies of journal.hpp: a running operation, and its interruptions. Only journal.hpp includes it.
#pragma once

#include <llmmem/paging/journal.hpp>

#include <utility>

namespace llmmem {
inline namespace v0 {

namespace paging {

/// An operation while it runs. An operation that throws has changed nothing, and is not recorded.
template <class Cache, journal_sink Sink, fence Fence>
class journaled<Cache, Sink, Fence>::interruptible {
 public:
  interruptible(journaled& owner, journal_op op, const detail::journal_arguments& given) noexcept
      : owner_(&owner), op_(op), given_(&given) {
    if (owner.fences_.poll()) {
      const detail::journal_arguments point{.number = *owner.fences_.passed()};
      owner.write([&](auto& out) noexcept { out.record(journal_op::fences_passed, point, {}); });
    }
    outer_ = std::exchange(owner.current_, this);
  }
  ~interruptible() { owner_->current_ = outer_; }
  interruptible(const interruptible&) = delete;
  interruptible& operator=(const interruptible&) = delete;

  void end(const detail::journal_outcome& came) noexcept {
    owner_->write(
        [&](auto& out) noexcept { is_open_ ? out.close(op_, came) : out.record(op_, *given_, came); });
  }
  /// Opens the record, because other records precede the outcome.
  void open() noexcept {
    if (std::exchange(is_open_, true)) return;
    owner_->write([&](auto& out) noexcept { out.open(op_, *given_); });
  }

 private:
  journaled* owner_;
  journal_op op_;
  const detail::journal_arguments* given_;
  interruptible* outer_ = nullptr;
  bool is_open_ = false;
};

}  // namespace paging

template <class Cache, journal_sink Sink, fence Fence>
auto paging::journaled<Cache, Sink, Fence>::watched(options_type options) noexcept -> options_type {
  if constexpr (!is_hybrid) {
    if (options.pressure.call != nullptr) {
      options.pressure.call = &journaled::on_pressure;
      options.pressure.context = this;
    }
  }
  return options;
}

/// Wraps the engine's callback, so that its calls are recorded inside the operation.
template <class Cache, journal_sink Sink, fence Fence>
bool paging::journaled<Cache, Sink, Fence>::on_pressure(void* context,
                                                        const block_shortage& shortage) noexcept {
  auto& self = *static_cast<journaled*>(context);
  if (self.depth_ == max_pressure_depth) return false;
  ++self.depth_;
  self.current_->open();
  const detail::journal_arguments asked{.number = shortage.needed, .extra = shortage.available};
  self.write([&](auto& out) noexcept { out.record(journal_op::pressed, asked, {}); });
  const bool again = self.pressure_.call(self.pressure_.context, shortage);
  const detail::journal_arguments answer{.number = again ? 1U : 0U};
  self.write([&](auto& out) noexcept { out.record(journal_op::relieved, answer, {}); });
  --self.depth_;
  return again;
}

}  // namespace v0
}  // namespace llmmem
