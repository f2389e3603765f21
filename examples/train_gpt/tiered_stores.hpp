/// @file
/// The stores that keep state and activations in one `llmmem::tiered_buffer`: what is not leased may lie in
/// any tier.
#pragma once

#include <llmmem/tiered_buffer.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <variant>
#include <vector>

#include "train_gpt/shape.hpp"
#include "train_gpt/stores.hpp"

namespace train_gpt {

/// The chunks of a model in a buffer, and the leases that are held now.
///
/// @par Errors   what the buffer refuses is thrown (`result::value`).
template <std::floating_point T, class Buffer>
class tiered_pieces {
 public:
  static constexpr std::size_t kinds = 4;

  /// @param look_ahead  how many pieces to prefetch beyond the one that is asked for, by the step's schedule.
  tiered_pieces(Buffer& buffer, const gpt_shape& shape, std::size_t look_ahead)
      : buffer_(&buffer), look_ahead_(look_ahead) {
    for (std::size_t layer = 0; layer < shape.layers(); ++layer) {
      const std::size_t elements = parameter_layout(shape, shape.layer(layer)).elements;
      for (std::size_t kind = 0; kind < kinds; ++kind)
        add(elements);
    }
    for (std::size_t layer = 1; layer < shape.layers(); ++layer)
      add(activation_layout(shape, shape.layer(layer)).elements);
    first_record_ = shape.layers() * kinds;
    for (const step_event& event : step_schedule(shape)) {
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
  }

  [[nodiscard]] static std::size_t place(layer_id layer, state_kind kind) noexcept {
    return to_index(layer) * kinds + static_cast<std::size_t>(kind);
  }
  [[nodiscard]] std::size_t record(layer_id layer) const noexcept {
    return first_record_ + to_index(layer) - 1;
  }
  [[nodiscard]] std::size_t elements(std::size_t at) const noexcept { return pieces_[at].elements; }

  [[nodiscard]] std::span<T> begin(std::size_t at, lease_mode mode) {
    piece& p = pieces_[at];
    switch (mode) {
      case lease_mode::read:
        p.held = buffer_->read(p.chunk).value();
        break;
      case lease_mode::write:
        p.held = buffer_->write(p.chunk).value();
        break;
      case lease_mode::read_write:
        p.held = buffer_->update(p.chunk).value();
        break;
    }
    follow(at);
    // A lease to read is a span that nobody writes through: the seam has one type for all.
    return std::visit([&](const auto& lease) { return values(lease, p.elements); }, p.held);
  }

  void end(std::size_t at) noexcept {
    piece& p = pieces_[at];
    p.held = std::monostate{};
    if (std::exchange(p.is_last, false)) static_cast<void>(buffer_->discard(p.chunk));
  }
  void discard(std::size_t at) noexcept {
    pieces_[at].is_last = true;
    end(at);
  }

  /// The schedule begins anew.
  void begin_step() noexcept { next_ = 0; }

 private:
  struct piece {
    llmmem::chunk_handle chunk;
    std::size_t elements = 0;
    std::variant<std::monostate, typename Buffer::read_lease, typename Buffer::write_lease,
                 typename Buffer::update_lease>
        held{};
    bool is_last = false;
  };
  struct use {
    std::size_t at = 0;
    bool needs_contents = false;
    bool is_last = false;  // what comes next overwrites it: it need not be kept
  };

  void add(std::size_t elements) {
    pieces_.push_back({buffer_->create(elements * sizeof(T)).value(), elements});
  }

  [[nodiscard]] static std::span<T> values(const std::monostate&, std::size_t) noexcept { return {}; }
  template <class Lease>
  [[nodiscard]] static std::span<T> values(const Lease& lease, std::size_t elements) noexcept {
    return {reinterpret_cast<T*>(lease.range().data), elements};
  }

  /// Keeps its place in the schedule, and asks for what comes next in it.
  void follow(std::size_t at) {
    if (next_ == order_.size() || order_[next_].at != at) return;
    pieces_[at].is_last = order_[next_].is_last;
    ++next_;
    std::size_t asked = 0;
    for (std::size_t i = next_; i < order_.size() && asked < look_ahead_; ++i) {
      if (!order_[i].needs_contents) continue;
      ++asked;
      static_cast<void>(buffer_->prefetch(pieces_[order_[i].at].chunk));
    }
  }

  Buffer* buffer_;
  std::size_t look_ahead_;
  std::vector<piece> pieces_;
  std::size_t first_record_ = 0;
  std::vector<use> order_;
  std::size_t next_ = 0;
};

/// Weights, gradients and moments in a tiered buffer.
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
    return {0, pieces_->elements(pieces_->place(layer, state_kind::weights))};
  }
  void begin_step(std::uint64_t) noexcept { pieces_->begin_step(); }
  void end_step(std::uint64_t) noexcept {}

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
