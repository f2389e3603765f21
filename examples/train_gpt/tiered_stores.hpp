/// @file
/// The stores that keep state and activations in one `llmmem::tiered_buffer`: unleased data may be in any
/// tier.
#pragma once

#include <llmmem/prefetch_schedule.hpp>
#include <llmmem/tiered_buffer.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <utility>
#include <variant>
#include <vector>

#include "train_gpt/run_options.hpp"
#include "train_gpt/shape.hpp"
#include "train_gpt/stores.hpp"

namespace train_gpt {

/// The planner that a run requests.
struct chosen_planner {
  schedule_kind kind = schedule_kind::next_use;

  [[nodiscard]] llmmem::schedule_plan operator()(const llmmem::schedule_trace& trace,
                                                 const llmmem::schedule_machine& machine) const {
    if (kind == schedule_kind::lookahead) return llmmem::schedule::lookahead{.accesses = 4}(trace, machine);
    return llmmem::schedule::next_use{}(trace, machine);
  }
};

/// The chunks of a model in a buffer, and the present leases. The calls of a step are known and planned
/// before the first one; the plan is remade with the times of the first two.
///
/// @par Errors   refusals of the buffer are thrown (`result::value`).
template <std::floating_point T, class Buffer>
class tiered_pieces {
 public:
  using schedule_type = llmmem::prefetch_schedule<Buffer, chosen_planner>;

  tiered_pieces(Buffer& buffer, const gpt_shape& shape, schedule_kind kind, update_time when,
                std::vector<llmmem::link_model> links)
      : buffer_(&buffer),
        kinds_(state_kinds(shape)),
        kind_(kind),
        schedule_(buffer, {.links = std::move(links), .replans = 2}, chosen_planner{kind}) {
    for (std::size_t layer = 0; layer < shape.parts(); ++layer) {
      for (std::size_t kind_of_state = 0; kind_of_state < kinds_; ++kind_of_state)
        add(state_layout(shape, shape.layer(layer), kind_at(shape, kind_of_state)).elements);
    }
    for (std::size_t layer = 1; layer < shape.layers(); ++layer)
      add(activation_layout(shape, shape.layer(layer)).elements);
    first_record_ = shape.parts() * kinds_;
    const std::vector<step_event> schedule = step_schedule(shape, when);
    find_last_uses(schedule);
    if (kind_ != schedule_kind::on_demand) schedule_.plan_known_trace(known_trace(shape, schedule));
  }

  [[nodiscard]] std::size_t place(layer_id layer, state_kind kind) const noexcept {
    return to_index(layer) * kinds_ + place_of(kind);
  }
  [[nodiscard]] std::size_t record(layer_id layer) const noexcept {
    return first_record_ + to_index(layer) - 1;
  }
  [[nodiscard]] std::size_t elements(std::size_t at) const noexcept { return pieces_[at].elements; }

  [[nodiscard]] std::span<T> begin(std::size_t at, lease_mode mode) {
    if (thrown_) std::rethrow_exception(std::exchange(thrown_, nullptr));
    piece& p = pieces_[at];
    switch (mode) {
      case lease_mode::read:
        p.held = schedule_.read(p.chunk).value();
        break;
      case lease_mode::write:
        p.held = schedule_.write(p.chunk).value();
        break;
      case lease_mode::read_write:
        p.held = schedule_.update(p.chunk).value();
        break;
    }
    if (next_ != order_.size() && order_[next_].at == at) p.is_last = order_[next_++].is_last;
    // A read lease is a span that the trainer does not write; all leases have one type.
    return std::visit([&](const auto& lease) { return values(lease, p.elements); }, p.held);
  }

  void end(std::size_t at) noexcept {
    piece& p = pieces_[at];
    p.held = std::monostate{};
    if (std::exchange(p.is_last, false)) static_cast<void>(schedule_.discard(p.chunk));
  }
  void discard(std::size_t at) noexcept {
    pieces_[at].is_last = true;
    end(at);
  }

  /// Called while the trainer computes: notes finished transfers, and begins those that now have space. The
  /// next lease rethrows its exception.
  void progress() noexcept {
    try {
      schedule_.progress();
    } catch (...) {
      thrown_ = std::current_exception();
    }
  }

  void begin_step() {
    next_ = 0;
    if (kind_ != schedule_kind::on_demand) schedule_.begin_iteration();
  }
  void end_step() {
    if (kind_ != schedule_kind::on_demand) schedule_.end_iteration();
    next_ = order_.size();
  }

  [[nodiscard]] const schedule_type& schedule() const noexcept { return schedule_; }

 private:
  struct piece {
    llmmem::chunk_handle chunk;
    std::size_t elements = 0;
    std::variant<std::monostate, typename schedule_type::read_lease, typename schedule_type::write_lease,
                 typename schedule_type::update_lease>
        held{};
    bool is_last = false;
  };
  struct use {
    std::size_t at = 0;
    bool needs_contents = false;
    bool is_last = false;  // the next use overwrites it, so it need not be kept
  };

  void add(std::size_t elements) {
    pieces_.push_back({buffer_->create(elements * sizeof(T)).value(), elements});
    schedule_.add(pieces_.back().chunk);
  }

  void find_last_uses(const std::vector<step_event>& schedule) {
    for (const step_event& event : schedule) {
      using enum step_event::call;
      if (event.what == acquire) {
        order_.push_back({place(event.layer, event.kind), event.mode != lease_mode::write});
      } else if (event.what == save || event.what == fetch) {
        order_.push_back({record(event.layer), event.what == fetch});
      }
    }
    for (std::size_t i = 0; i < order_.size(); ++i) {
      std::size_t next = i;
      do {
        next = (next + 1) % order_.size();
      } while (order_[next].at != order_[i].at);
      order_[i].is_last = !order_[next].needs_contents;
    }
    next_ = order_.size();
  }

  /// Converts `schedule` to calls of the buffer, with times as if each parameter took an equal time per token
  /// in every pass; the first steps give better ones.
  [[nodiscard]] llmmem::schedule_trace known_trace(const gpt_shape& shape,
                                                   const std::vector<step_event>& schedule) {
    constexpr std::uint64_t multiplications_a_microsecond = 20'000;
    llmmem::trace_recorder known = schedule_.recorder();
    std::vector<bool> is_last(pieces_.size());
    std::size_t next = 0;
    bool forward = true;
    for (const step_event& event : schedule) {
      using enum step_event::call;
      const bool of_state = event.what == acquire || event.what == release;
      const std::size_t at = of_state ? place(event.layer, event.kind) : record(event.layer);
      const llmmem::chunk_id chunk{static_cast<std::uint32_t>(at)};
      forward = forward && event.what != fetch;
      if (event.what == acquire || event.what == save || event.what == fetch) {
        const bool reads = event.what == fetch || (of_state && event.mode == lease_mode::read);
        known.acquire(chunk, reads                         ? llmmem::access_mode::read
                             : order_[next].needs_contents ? llmmem::access_mode::read_write
                                                           : llmmem::access_mode::write);
        is_last[at] = order_[next++].is_last;
        continue;
      }
      const bool computes =
          event.what == release &&
          ((event.kind == state_kind::weights && event.mode == lease_mode::read && forward) ||
           (event.kind == state_kind::gradients && event.mode == lease_mode::write));
      if (computes) {
        known.compute((forward ? 1 : 2) * elements(place(event.layer, state_kind::weights)) * shape.tokens() *
                      1000 / multiplications_a_microsecond);
      }
      known.release(chunk);
      if (is_last[at]) known.discard(chunk);
      is_last[at] = false;
    }
    return known.freeze();
  }

  [[nodiscard]] static std::span<T> values(const std::monostate&, std::size_t) noexcept { return {}; }
  template <class Lease>
  [[nodiscard]] static std::span<T> values(const Lease& lease, std::size_t elements) noexcept {
    return {reinterpret_cast<T*>(lease.range().data), elements};
  }

  Buffer* buffer_;
  std::size_t kinds_;
  schedule_kind kind_;
  schedule_type schedule_;
  std::vector<piece> pieces_;
  std::size_t first_record_ = 0;
  std::vector<use> order_;
  std::size_t next_ = 0;  // index in `order_`; its end outside steps
  std::exception_ptr thrown_;
};

/// Weights, gradients and the optimizer's state in a tiered buffer.
template <std::floating_point T, class Buffer>
class tiered_state {
 public:
  using value_type = T;

  explicit tiered_state(tiered_pieces<T, Buffer>& pieces) noexcept : pieces_(&pieces) {}

  [[nodiscard]] std::span<T> acquire(layer_id layer, state_kind kind, lease_mode mode) {
    return pieces_->begin(pieces_->place(layer, kind), mode);
  }
  void release(layer_id layer, state_kind kind, lease_mode) noexcept {
    pieces_->end(pieces_->place(layer, kind));
  }
  [[nodiscard]] element_range owned(layer_id layer) const noexcept {
    return {0, elements(layer, state_kind::weights)};
  }
  [[nodiscard]] std::size_t elements(layer_id layer, state_kind kind) const noexcept {
    return pieces_->elements(pieces_->place(layer, kind));
  }
  void begin_step(std::uint64_t) { pieces_->begin_step(); }
  void end_step(std::uint64_t) { pieces_->end_step(); }

 private:
  tiered_pieces<T, Buffer>* pieces_;
};

/// Activations in the same buffer.
template <std::floating_point T, class Buffer>
class tiered_activations {
 public:
  using value_type = T;

  explicit tiered_activations(tiered_pieces<T, Buffer>& pieces) noexcept : pieces_(&pieces) {}

  [[nodiscard]] std::span<T> save(layer_id layer) {
    return pieces_->begin(pieces_->record(layer), lease_mode::write);
  }
  void keep(layer_id layer) noexcept { pieces_->end(pieces_->record(layer)); }
  [[nodiscard]] std::span<const T> fetch(layer_id layer, const rebuild_activations<T>&) {
    return pieces_->begin(pieces_->record(layer), lease_mode::read);
  }
  void drop(layer_id layer) noexcept { pieces_->discard(pieces_->record(layer)); }

 private:
  tiered_pieces<T, Buffer>* pieces_;
};

}  // namespace train_gpt
