/// @file
/// Stores for train_gpt that hand out other memory for every lease and poison it before and after, so that
/// whoever touches memory outside of a lease, or leaves some of it unwritten, is found out.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "train_gpt/shape.hpp"
#include "train_gpt/stores.hpp"

namespace llmmem_tests {

/// What checking stores find and count; shared by the two of a run.
struct store_log {
  std::vector<train_gpt::step_event> events;
  std::vector<std::string> findings;
  std::size_t leases = 0;        ///< now
  std::size_t leased_bytes = 0;  ///< now
  std::size_t max_leased_bytes = 0;
  std::size_t acquisitions = 0;
  std::size_t fail_at = 0;  ///< the acquisition, save or fetch of this number, from 1, throws

  void begin_lease(std::size_t bytes) {
    ++leases;
    leased_bytes += bytes;
    max_leased_bytes = std::max(max_leased_bytes, leased_bytes);
  }
  void end_lease(std::size_t bytes) noexcept {
    --leases;
    leased_bytes -= bytes;
  }
  void count_acquisition() {
    if (++acquisitions == fail_at) throw std::runtime_error("the store has failed");
  }
};

/// A NaN that no arithmetic makes: as an operand it shows in every result, as contents it shows what was not
/// written.
template <std::floating_point T>
[[nodiscard]] inline T poison() noexcept {
  if constexpr (sizeof(T) == 8) {
    return std::bit_cast<T>(std::uint64_t{0x7ff8'dead'beef'5afe});
  } else {
    return std::bit_cast<T>(std::uint32_t{0x7fcd'beef});
  }
}

template <std::floating_point T>
[[nodiscard]] inline bool same_bits(T a, T b) noexcept {
  using bits = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;
  return std::bit_cast<bits>(a) == std::bit_cast<bits>(b);
}

/// Memory of leases past and present.
template <std::floating_point T>
class lease_memory {
 public:
  /// Fresh and poisoned.
  [[nodiscard]] std::span<T> take(std::size_t elements) {
    auto& taken = all_.emplace_back(elements, poison<T>());
    return taken;
  }

  /// The lease has ended: nobody may read it, or write it again.
  static void bury(std::span<T> values) noexcept { std::fill(values.begin(), values.end(), poison<T>()); }

  [[nodiscard]] static bool has_poison(std::span<const T> values) noexcept {
    return std::any_of(values.begin(), values.end(), [](T v) { return same_bits(v, poison<T>()); });
  }

  /// Whether what was buried was left alone. Frees it. @pre no lease lives.
  [[nodiscard]] bool rests() {
    bool untouched = true;
    for (const auto& each : all_) {
      untouched =
          untouched && std::all_of(each.begin(), each.end(), [](T v) { return same_bits(v, poison<T>()); });
    }
    all_.clear();
    return untouched;
  }

 private:
  std::vector<std::vector<T>> all_;
};

/// The contract of `state_store`, verified.
template <std::floating_point T>
class checking_state {
 public:
  using value_type = T;

  checking_state(const train_gpt::gpt_shape& shape, store_log& log) : log_(&log) {
    for (std::size_t layer = 0; layer < shape.parts(); ++layer) {
      pieces_.push_back({});
      for (std::size_t place = 0; place < train_gpt::state_kinds(shape); ++place) {
        const auto kind = kind_at(shape, place);
        pieces_.back()[static_cast<std::size_t>(kind)].kept.assign(
            state_layout(shape, shape.layer(layer), kind).elements, poison<T>());
      }
    }
  }

  [[nodiscard]] std::span<T> acquire(train_gpt::layer_id layer, train_gpt::state_kind kind,
                                     train_gpt::lease_mode mode) {
    log_->count_acquisition();
    log_->events.push_back({train_gpt::step_event::call::acquire, layer, kind, mode});
    piece& of = at(layer, kind);
    if (of.leased) log_->findings.push_back(name(layer, kind) + " leased twice");
    const std::span<T> values = memory_.take(of.kept.size());
    if (mode != train_gpt::lease_mode::write) {
      if (memory_.has_poison(of.kept)) log_->findings.push_back(name(layer, kind) + " read, never written");
      std::copy(of.kept.begin(), of.kept.end(), values.begin());
    }
    of.leased = true;
    of.mode = mode;
    of.values = values;
    log_->begin_lease(values.size_bytes());
    return values;
  }

  void release(train_gpt::layer_id layer, train_gpt::state_kind kind, train_gpt::lease_mode mode) noexcept {
    log_->events.push_back({train_gpt::step_event::call::release, layer, kind, mode});
    piece& of = at(layer, kind);
    if (!of.leased || of.mode != mode)
      log_->findings.push_back(name(layer, kind) + " released, not leased so");
    if (mode == train_gpt::lease_mode::read) {
      if (!std::equal(of.kept.begin(), of.kept.end(), of.values.begin(), same_bits<T>)) {
        log_->findings.push_back(name(layer, kind) + " changed under a lease to read");
      }
    } else {
      if (std::uncaught_exceptions() == 0 && memory_.has_poison(of.values)) {
        log_->findings.push_back(name(layer, kind) + " not written whole");
      }
      std::copy(of.values.begin(), of.values.end(), of.kept.begin());
    }
    memory_.bury(of.values);
    log_->end_lease(of.values.size_bytes());
    of.leased = false;
  }

  void begin_step(std::uint64_t step) { boundary(step, 0); }
  void end_step(std::uint64_t step) { boundary(step, 1); }

  [[nodiscard]] train_gpt::element_range owned(train_gpt::layer_id layer) const noexcept {
    return {0, pieces_[to_index(layer)][0].kept.size()};
  }

  /// How many steps began and ended.
  [[nodiscard]] std::uint64_t steps() const noexcept { return boundaries_ / 2; }

  /// @pre no lease lives.
  [[nodiscard]] bool rests() { return memory_.rests(); }

 private:
  struct piece {
    std::vector<T> kept;
    std::span<T> values{};
    train_gpt::lease_mode mode{};
    bool leased = false;
  };

  void boundary(std::uint64_t step, std::uint64_t is_end) {
    if (boundaries_ != 2 * step + is_end) log_->findings.push_back("steps begin and end out of order");
    if (log_->leases != 0) log_->findings.push_back("leased at the boundary of a step");
    ++boundaries_;
  }
  [[nodiscard]] piece& at(train_gpt::layer_id layer, train_gpt::state_kind kind) noexcept {
    return pieces_[to_index(layer)][static_cast<std::size_t>(kind)];
  }
  [[nodiscard]] static std::string name(train_gpt::layer_id layer, train_gpt::state_kind kind) {
    constexpr std::array kinds{"weights", "gradients", "mean", "variance", "factors"};
    return "layer " + std::to_string(to_index(layer)) + ": " + kinds[static_cast<std::size_t>(kind)];
  }

  store_log* log_;
  lease_memory<T> memory_;
  std::vector<std::array<piece, 5>> pieces_;
  std::uint64_t boundaries_ = 0;
};

/// Whether records are kept whole or as their input alone, the rest computed again.
enum class kept_part : std::uint8_t { whole, input };

/// The contract of `activation_store`, verified.
template <std::floating_point T>
class checking_activations {
 public:
  using value_type = T;

  checking_activations(const train_gpt::gpt_shape& shape, store_log& log, kept_part part = kept_part::whole)
      : shape_(shape), log_(&log), part_(part) {}

  [[nodiscard]] std::span<T> save(train_gpt::layer_id layer) {
    log_->count_acquisition();
    log_->events.push_back({.what = train_gpt::step_event::call::save, .layer = layer});
    if (records_.contains(layer)) log_->findings.push_back(name(layer) + " saved twice");
    return lease(layer).values;
  }

  void keep(train_gpt::layer_id layer) noexcept {
    log_->events.push_back({.what = train_gpt::step_event::call::keep, .layer = layer});
    record& of = records_.at(layer);
    if (memory_.has_poison(of.values)) log_->findings.push_back(name(layer) + " not written whole");
    of.kept.assign(of.values.begin(), of.values.end());
    end(of);
  }

  [[nodiscard]] std::span<const T> fetch(train_gpt::layer_id layer,
                                         const train_gpt::rebuild_activations<T>& rebuild) {
    log_->count_acquisition();
    log_->events.push_back({.what = train_gpt::step_event::call::fetch, .layer = layer});
    const auto found = records_.find(layer);
    if (found == records_.end() || found->second.kept.empty()) {
      throw std::logic_error(name(layer) + " fetched, not kept");
    }
    record& of = lease(layer);
    const std::size_t part = part_ == kept_part::input ? train_gpt::input_elements(shape_) : of.kept.size();
    std::copy_n(of.kept.begin(), part, of.values.begin());
    if (part_ == kept_part::input) {
      try {
        rebuild(layer, of.values);
      } catch (...) {
        end(of);
        throw;
      }
      if (!std::equal(of.kept.begin(), of.kept.end(), of.values.begin(), same_bits<T>)) {
        log_->findings.push_back(name(layer) + " computed again, differently");
      }
    }
    return of.values;
  }

  void drop(train_gpt::layer_id layer) noexcept {
    log_->events.push_back({.what = train_gpt::step_event::call::drop, .layer = layer});
    record& of = records_.at(layer);
    if (!of.kept.empty() && !std::equal(of.kept.begin(), of.kept.end(), of.values.begin(), same_bits<T>)) {
      log_->findings.push_back(name(layer) + " changed by the backward pass");
    }
    end(of);
    records_.erase(layer);
  }

  [[nodiscard]] std::size_t records() const noexcept { return records_.size(); }

  /// @pre no lease lives.
  [[nodiscard]] bool rests() { return memory_.rests(); }

 private:
  struct record {
    std::vector<T> kept{};
    std::span<T> values{};
  };

  [[nodiscard]] record& lease(train_gpt::layer_id layer) {
    record& of = records_[layer];
    of.values = memory_.take(train_gpt::activation_layout(shape_, layer).elements);
    log_->begin_lease(of.values.size_bytes());
    return of;
  }
  void end(record& of) noexcept {
    memory_.bury(of.values);
    log_->end_lease(of.values.size_bytes());
    of.values = {};
  }
  [[nodiscard]] static std::string name(train_gpt::layer_id layer) {
    return "layer " + std::to_string(to_index(layer)) + ": activations";
  }

  train_gpt::gpt_shape shape_;
  store_log* log_;
  kept_part part_;
  lease_memory<T> memory_;
  std::map<train_gpt::layer_id, record> records_;
};

static_assert(train_gpt::state_store<checking_state<float>> &&
              train_gpt::follows_steps<checking_state<float>>);
static_assert(train_gpt::activation_store<checking_activations<float>>);

}  // namespace llmmem_tests
