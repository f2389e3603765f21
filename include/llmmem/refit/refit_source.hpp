/// @file
/// Sources of a refit: memory, or the pieces of a `sharded_state`, resident or in tiers.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/result.hpp>
#include <llmmem/sharding/ids.hpp>
#include <llmmem/tiering/access.hpp>

#include <concepts>
#include <cstddef>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// What this rank holds of the source's tensors, dense, in the order of the partition's `local`.
///
///     hold(t)   a `result` of an object whose `bytes()` are tensor t's piece for as long as it lives
///
/// A refit holds one piece at a time, so a source in tiers brings up one piece at a time; and it holds each
/// piece once for each rank that needs something of it, not once for each message.
template <class S>
concept refit_source = requires(S& source, tensor_id tensor) {
  { source.hold(tensor).value().bytes() } -> std::convertible_to<std::span<const std::byte>>;
  { source.hold(tensor).has_value() } -> std::same_as<bool>;
};

/// Pieces in memory, or in a mapped file.
class refit_spans {
 public:
  /// A tensor's piece, where the caller keeps it.
  struct held {
    std::span<const std::byte> piece{};
    [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return piece; }
  };
  /// @param pieces  one for each source tensor; outlive the source.
  explicit refit_spans(std::span<const std::span<const std::byte>> pieces) noexcept : pieces_(pieces) {}
  [[nodiscard]] result<held> hold(tensor_id tensor) noexcept { return held{pieces_[to_index(tensor)]}; }

 private:
  std::span<const std::span<const std::byte>> pieces_;
};

static_assert(refit_source<refit_spans>);

/// The pieces of a `sharded_state` in host memory, in place, or in tiers, leased one at a time.
template <class State>
class refit_state {
  static_assert(State::space_type::is_host_accessible || !State::pieces_type::is_resident,
                "a refit reads pieces on the host, which cannot access this state's: publish from a state in "
                "host memory or in tiers");

 public:
  using lease_type =
      std::remove_cvref_t<decltype(*std::declval<State&>().lease(tensor_id{}, access_mode::read))>;
  /// A piece of the state, at one address while this lives.
  struct held {
    lease_type lease{};
    [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return lease.local(); }
  };
  explicit refit_state(State& state) noexcept : state_(&state) {}
  [[nodiscard]] result<held> hold(tensor_id tensor) {
    auto lease = state_->lease(tensor, access_mode::read);
    if (!lease) return lease.error();
    return held{std::move(*lease)};
  }

 private:
  State* state_;
};

namespace detail {

/// The piece of a source that is held: the last one that was asked for.
template <class Source>
class held_piece {
 public:
  result<std::span<const std::byte>> of(Source& source, tensor_id tensor) {
    if (!held_ || tensor_ != tensor) {
      held_.reset();  // before the next one is held
      auto now = source.hold(tensor);
      if (!now) return now.error();
      held_.emplace(std::move(*now));
      tensor_ = tensor;
    }
    return std::span<const std::byte>(held_->bytes());
  }

 private:
  std::optional<std::remove_cvref_t<decltype(*std::declval<Source&>().hold(tensor_id{}))>> held_{};
  tensor_id tensor_{};
};

}  // namespace detail

}  // namespace v0
}  // namespace llmmem
