/// @file
/// One interface for chunks of memory or tiers, and the stores built on it: state, and activations that are
/// partly recomputed.
#pragma once

#include <llmmem/result.hpp>
#include <llmmem/tiering/access.hpp>
#include <llmmem/tiering/tiered_types.hpp>
#include <llmmem/training/kept_records.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <utility>
#include <variant>
#include <vector>

#include "train_gpt/activation_codec.hpp"
#include "train_gpt/run.hpp"
#include "train_gpt/shape.hpp"
#include "train_gpt/stores.hpp"

namespace train_gpt {

/// The calls of the stores to a `memory_chunks`, a `tiered_buffer` or a schedule. A chunk has one lease at a
/// time.
class chunk_store {
 public:
  template <llmmem::access_mode Mode>
  class lease {
   public:
    lease() noexcept = default;
    lease(chunk_store& store, llmmem::chunk_handle chunk, std::span<std::byte> bytes) noexcept
        : store_(&store), chunk_(chunk), bytes_(bytes) {}
    lease(lease&& other) noexcept
        : store_(std::exchange(other.store_, nullptr)), chunk_(other.chunk_), bytes_(other.bytes_) {}
    lease& operator=(lease&& other) noexcept {
      if (this != &other) {
        end();
        store_ = std::exchange(other.store_, nullptr);
        chunk_ = other.chunk_;
        bytes_ = other.bytes_;
      }
      return *this;
    }
    ~lease() { end(); }
    void end() noexcept {
      if (store_ != nullptr) std::exchange(store_, nullptr)->end(chunk_);
    }
    [[nodiscard]] std::span<std::byte> span() const noexcept { return bytes_; }

   private:
    chunk_store* store_ = nullptr;
    llmmem::chunk_handle chunk_{};
    std::span<std::byte> bytes_{};
  };
  using read_lease = lease<llmmem::access_mode::read>;
  using write_lease = lease<llmmem::access_mode::write>;
  using update_lease = lease<llmmem::access_mode::read_write>;

  virtual ~chunk_store() = default;
  [[nodiscard]] virtual llmmem::result<llmmem::chunk_handle> create(std::uint64_t bytes) = 0;
  virtual llmmem::result<void> discard(llmmem::chunk_handle chunk) = 0;
  virtual llmmem::result<void> remove(llmmem::chunk_handle chunk) = 0;
  [[nodiscard]] llmmem::result<read_lease> read(llmmem::chunk_handle chunk) {
    return take<llmmem::access_mode::read>(chunk);
  }
  [[nodiscard]] llmmem::result<write_lease> write(llmmem::chunk_handle chunk) {
    return take<llmmem::access_mode::write>(chunk);
  }
  [[nodiscard]] llmmem::result<update_lease> update(llmmem::chunk_handle chunk) {
    return take<llmmem::access_mode::read_write>(chunk);
  }

  virtual void begin_step() {}
  virtual void end_step() {}
  /// Called while the trainer computes. The next lease rethrows its exception.
  virtual void progress() noexcept {}

 protected:
  [[nodiscard]] virtual llmmem::result<std::span<std::byte>> begin(llmmem::chunk_handle chunk,
                                                                   llmmem::access_mode mode) = 0;
  virtual void end(llmmem::chunk_handle chunk) noexcept = 0;

 private:
  template <llmmem::access_mode Mode>
  [[nodiscard]] llmmem::result<lease<Mode>> take(llmmem::chunk_handle chunk) {
    const auto bytes = begin(chunk, Mode);
    if (!bytes) return bytes.error();
    return llmmem::result<lease<Mode>>(lease<Mode>(*this, chunk, *bytes));
  }
};

/// The interface to chunks, which outlive it; it informs a schedule of the steps.
template <class Store>
class erased_chunks final : public chunk_store {
 public:
  explicit erased_chunks(Store& store, bool follows_plan = true) noexcept
      : store_(&store), follows_plan_(follows_plan) {}

  [[nodiscard]] llmmem::result<llmmem::chunk_handle> create(std::uint64_t bytes) override {
    auto made = store_->create(bytes);
    if (made && made->slot >= held_.size()) held_.resize(made->slot + std::size_t{1});
    return made;
  }
  llmmem::result<void> discard(llmmem::chunk_handle chunk) override { return store_->discard(chunk); }
  llmmem::result<void> remove(llmmem::chunk_handle chunk) override { return store_->remove(chunk); }

  void begin_step() override {
    if constexpr (is_schedule) {
      if (follows_plan_) store_->begin_iteration();
    }
  }
  void end_step() override {
    if constexpr (is_schedule) {
      if (follows_plan_) store_->end_iteration();
    }
  }
  void progress() noexcept override {
    if constexpr (is_schedule) {
      try {
        store_->progress();
      } catch (...) {
        thrown_ = std::current_exception();
      }
    }
  }

 private:
  static constexpr bool is_schedule = requires(Store& store) { store.begin_iteration(); };
  using held = std::variant<std::monostate, typename Store::read_lease, typename Store::write_lease,
                            typename Store::update_lease>;

  [[nodiscard]] llmmem::result<std::span<std::byte>> begin(llmmem::chunk_handle chunk,
                                                           llmmem::access_mode mode) override {
    if (thrown_) std::rethrow_exception(std::exchange(thrown_, nullptr));
    if (mode == llmmem::access_mode::read) return note(chunk, store_->read(chunk));
    if (mode == llmmem::access_mode::write) return note(chunk, store_->write(chunk));
    return note(chunk, store_->update(chunk));
  }
  void end(llmmem::chunk_handle chunk) noexcept override { held_[chunk.slot] = std::monostate{}; }

  template <class Lease>
  [[nodiscard]] llmmem::result<std::span<std::byte>> note(llmmem::chunk_handle chunk,
                                                          llmmem::result<Lease> had) {
    if (!had) return had.error();
    // A read lease is a span that the trainer does not write; all leases have one type.
    const std::span<std::byte> bytes(const_cast<std::byte*>(had->span().data()), had->span().size());
    held_[chunk.slot] = std::move(*had);
    return bytes;
  }

  Store* store_;
  bool follows_plan_;
  std::vector<held> held_{};
  std::exception_ptr thrown_{};
};

/// The steps of a store of chunks.
struct step_bounds {
  void* store = nullptr;
  void (*at_begin)(void* store) = nullptr;
  void (*at_end)(void* store) = nullptr;

  template <class Store>
  [[nodiscard]] static step_bounds of(Store& store) noexcept {
    return {&store, [](void* it) { static_cast<Store*>(it)->begin_step(); },
            [](void* it) { static_cast<Store*>(it)->end_step(); }};
  }
  void begin() const {
    if (store != nullptr) at_begin(store);
  }
  void end() const {
    if (store != nullptr) at_end(store);
  }
};

/// Weights, gradients and the optimizer's state, with one chunk each.
template <std::floating_point T>
class chunk_state {
 public:
  using value_type = T;

  chunk_state(chunk_store& chunks, const gpt_shape& shape) : chunks_(&chunks), kinds_(state_kinds(shape)) {
    for (std::size_t layer = 0; layer < shape.parts(); ++layer) {
      for (std::size_t kind = 0; kind < kinds_; ++kind) {
        const std::size_t elements = state_layout(shape, shape.layer(layer), kind_at(shape, kind)).elements;
        pieces_.push_back({chunks.create(elements * sizeof(T)).value(), elements, {}});
      }
    }
  }

  [[nodiscard]] std::span<T> acquire(layer_id layer, state_kind kind, lease_mode mode) {
    piece& it = at(layer, kind);
    if (mode == lease_mode::read) return begin(it, chunks_->read(it.chunk).value());
    if (mode == lease_mode::write) return begin(it, chunks_->write(it.chunk).value());
    return begin(it, chunks_->update(it.chunk).value());
  }
  void release(layer_id layer, state_kind kind, lease_mode mode) noexcept {
    piece& it = at(layer, kind);
    it.held = std::monostate{};
    // The optimizer has used them.
    if (kind == state_kind::gradients && mode == lease_mode::read)
      static_cast<void>(chunks_->discard(it.chunk));
  }
  [[nodiscard]] element_range owned(layer_id layer) const noexcept {
    return {0, elements(layer, state_kind::weights)};
  }
  [[nodiscard]] std::size_t elements(layer_id layer, state_kind kind) const noexcept {
    return pieces_[to_index(layer) * kinds_ + place_of(kind)].elements;
  }
  void begin_step(std::uint64_t) { chunks_->begin_step(); }
  void end_step(std::uint64_t) { chunks_->end_step(); }

 private:
  struct piece {
    llmmem::chunk_handle chunk;
    std::size_t elements;
    std::variant<std::monostate, chunk_store::read_lease, chunk_store::write_lease, chunk_store::update_lease>
        held;
  };

  [[nodiscard]] piece& at(layer_id layer, state_kind kind) noexcept {
    return pieces_[to_index(layer) * kinds_ + place_of(kind)];
  }
  template <class Lease>
  [[nodiscard]] static std::span<T> begin(piece& it, Lease lease) {
    const std::span<T> values(reinterpret_cast<T*>(lease.span().data()), it.elements);
    it.held = std::move(lease);
    return values;
  }

  chunk_store* chunks_;
  std::size_t kinds_;
  std::vector<piece> pieces_;
};

/// Activations: each layer keeps its form, encoded where the form says so, and recomputes the rest.
template <std::floating_point T>
class recorded_activations {
 public:
  using value_type = T;

  /// @param forms  of layers 1 and up; the first kept run of a partial form is the layer's input.
  recorded_activations(chunk_store& chunks, std::vector<llmmem::record_form> forms,
                       activation_codec codec = activation_codec())
      : records_(chunks, std::move(forms), codec) {}

  void begin_step(std::uint64_t step) noexcept { records_.set_version(step); }
  void end_step(std::uint64_t) noexcept {}

  [[nodiscard]] std::span<T> save(layer_id layer) {
    throw_what_failed();
    return values(records_.save(number(layer)).value());
  }
  void keep(layer_id layer) noexcept {
    try {
      records_.keep(number(layer)).value();
    } catch (...) {
      failed_ = std::current_exception();
    }
  }
  [[nodiscard]] std::span<const T> fetch(layer_id layer, const rebuild_activations<T>& rebuild) {
    throw_what_failed();
    const bool keeps_input_only = records_.form(number(layer)).kept.size() == 1;
    const auto found = records_.fetch(number(layer), [&](std::uint32_t, std::span<std::byte> record) {
      rebuild(layer, values(record),
              keeps_input_only ? rebuilt_part::all_but_input : rebuilt_part::attention);
    });
    const std::span<const std::byte> bytes = found.value();
    return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
  }
  void drop(layer_id layer) noexcept { records_.drop(number(layer)); }

  [[nodiscard]] const llmmem::kept_records_stats& stats() const noexcept { return records_.stats(); }

 private:
  [[nodiscard]] static std::uint32_t number(layer_id layer) noexcept { return to_index(layer) - 1; }
  [[nodiscard]] static std::span<T> values(std::span<std::byte> bytes) noexcept {
    return {reinterpret_cast<T*>(bytes.data()), bytes.size() / sizeof(T)};
  }
  void throw_what_failed() {
    if (failed_) std::rethrow_exception(std::exchange(failed_, nullptr));
  }

  llmmem::kept_records<chunk_store, activation_codec> records_;
  std::exception_ptr failed_{};
};

}  // namespace train_gpt
