/// @file
/// `state_view`: the source of a snapshot's bytes. Also `host_state_view`, for host memory.
#pragma once

#include <llmmem/checkpoint/detail/shared_part.hpp>
#include <llmmem/config.hpp>
#include <llmmem/detail/history.hpp>
#include <llmmem/error.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// A state whose tensors were described to the checkpointer (`state_tensor`), and whose bytes it copies.
///
/// - `copy_out(tensor, offset, into)` fills `into` with the tensor's part from byte `offset` on. Tensors are
///   numbered in the order of their descriptions. An exception ends the checkpoint, and becomes its reason.
/// - `is_concurrent` whether another thread may call `copy_out` while the state's owner reads the state and
///   computes. If not, the owner's thread copies when it waits.
/// - `is_stable`                       optional: see `is_stable_view`.
///
/// A view is a handle: it is copied when a snapshot begins, and destroyed as soon as it has been read.
template <class V>
concept state_view = std::copy_constructible<V> && requires(V& view, std::uint32_t tensor,
                                                            std::uint64_t offset, std::span<std::byte> into) {
  view.copy_out(tensor, offset, into);
  requires std::same_as<std::remove_cv_t<decltype(V::is_concurrent)>, bool>;
};

namespace detail {

template <class V>
concept says_whether_stable =
    requires { requires std::same_as<std::remove_cv_t<decltype(V::is_stable)>, bool>; };

template <class V>
[[nodiscard]] consteval bool says_stable() noexcept {
  if constexpr (says_whether_stable<V>) {
    return V::is_stable;
  } else {
    return false;
  }
}

}  // namespace detail

/// Whether the data that the view reads stays the same while the state changes (`V::is_stable`; false if it
/// is not defined). If so, the state may change while it is being saved: the gate is not frozen, and the view
/// keeps its data until it is destroyed. `cow_state_view`, `tiered_state_view` and `paged_state_view` are
/// stable.
template <class V>
inline constexpr bool is_stable_view = detail::says_stable<V>();

/// A view that knows which bytes are the same as in another view of the same state, for saves that write only
/// changes.
///
/// - `version()` the tag of this snapshot: opaque, and not 0. Only views of the same state in the same
///   process understand it; it stays valid after its view has ended.
/// - `is_unchanged_since(version, tensor, offset, bytes)` true only if these bytes of the tensor are
///   certainly the same as in the view of that tag; false if the view does not know, as for tag 0. Only the
///   copying thread calls it.
template <class V>
concept change_tracking_view =
    state_view<V> && requires(const V& view, std::uint64_t version, std::uint32_t tensor,
                              std::uint64_t offset, std::uint64_t bytes) {
      { view.version() } -> std::same_as<std::uint64_t>;
      { view.is_unchanged_since(version, tensor, offset, bytes) } -> std::same_as<bool>;
    };

/// A view of any type, which a snapshot holds, with the calls that a checkpointer makes.
class any_state_view {
 public:
  any_state_view() = default;
  any_state_view(const any_state_view&) = delete;
  any_state_view& operator=(const any_state_view&) = delete;
  virtual ~any_state_view() = default;

  virtual void copy_out(std::uint32_t tensor, std::uint64_t offset, std::span<std::byte> into) = 0;
  /// Returns 0 if the view does not track changes.
  [[nodiscard]] virtual std::uint64_t version() const = 0;
  /// Returns false if the view does not track changes.
  [[nodiscard]] virtual bool is_unchanged_since(std::uint64_t version, std::uint32_t tensor,
                                                std::uint64_t offset, std::uint64_t bytes) const = 0;
};

/// Wraps a view of that type.
template <state_view V>
class held_state_view final : public any_state_view {
 public:
  explicit held_state_view(V view) : view_(std::move(view)) {}

  void copy_out(std::uint32_t tensor, std::uint64_t offset, std::span<std::byte> into) override {
    view_.copy_out(tensor, offset, into);
  }
  [[nodiscard]] std::uint64_t version() const override {
    if constexpr (change_tracking_view<V>) {
      return view_.version();
    } else {
      return 0;
    }
  }
  [[nodiscard]] bool is_unchanged_since(std::uint64_t version, std::uint32_t tensor, std::uint64_t offset,
                                        std::uint64_t bytes) const override {
    if constexpr (change_tracking_view<V>) {
      return view_.is_unchanged_since(version, tensor, offset, bytes);
    } else {
      return false;
    }
  }

 private:
  V view_;
};

/// A list that all copies of a view share; a copy of the list copies no entries. It is made from anything
/// that converts to a span, and copies the entries once. So a temporary array is fine, and code that makes a
/// view for every snapshot should keep a `view_list`.
///
/// @par Thread safety   any threads may read.
template <class T>
class view_list {
 public:
  view_list() : entries_(std::in_place) {}
  template <class Range>
    requires(!std::same_as<std::remove_cvref_t<Range>, view_list> &&
             std::convertible_to<const Range&, std::span<const T>>)
  view_list(const Range& entries) : view_list() {  // NOLINT(google-explicit-constructor): as a span
    const std::span<const T> all = entries;
    entries_->assign(all.begin(), all.end());
  }

  view_list(std::initializer_list<T> entries)
      : view_list(std::span<const T>(entries.begin(), entries.end())) {}
  // Not movable, so that a moved-from view can be used again.
  view_list(const view_list&) noexcept = default;
  view_list& operator=(const view_list&) noexcept = default;
  ~view_list() = default;

  [[nodiscard]] std::span<const T> entries() const noexcept { return *entries_; }

 private:
  detail::shared_part<std::vector<T>> entries_;
};

/// Where the bytes of a tensor are, for views over several ranges or chunks.
struct state_place {
  std::uint32_t source = 0;  ///< index of the range or chunk, in the view's order
  std::uint64_t offset = 0;  ///< position of the tensor's first byte in the source
  std::uint64_t bytes = 0;   ///< length of the tensor's part, as described

  friend constexpr bool operator==(const state_place&, const state_place&) noexcept = default;
};

namespace detail {

inline void add_places(history_tag& history, std::span<const state_place> places) noexcept {
  for (const state_place& each : places) {
    history.add(each.source);
    history.add(each.offset);
    history.add(each.bytes);
  }
}

/// Returns the place of a tensor of which bytes `[offset, offset + bytes)` are requested.
/// @throws argument_error  if it does not have them.
[[nodiscard]] inline const state_place& place_of(std::span<const state_place> places, std::uint32_t tensor,
                                                 std::uint64_t offset, std::uint64_t bytes,
                                                 const char* what) {
  if (tensor >= places.size() || offset > places[tensor].bytes || bytes > places[tensor].bytes - offset) {
    throw argument_error(std::string(what) + ": bytes " + std::to_string(offset) + " to " +
                         std::to_string(offset + bytes) + " of tensor " + std::to_string(tensor) +
                         " do not exist: pass a place for each described tensor, in that order");
  }
  return places[tensor];
}

/// @throws argument_error  for a view that was moved from.
inline void check_held(bool is_held, const char* what) {
  if (!is_held)
    throw argument_error(std::string(what) + ": it was moved from; take another view, or copy it first");
}

/// @throws argument_error  for a place that is not inside its source of `bytes` bytes.
inline void check_place(const state_place& place, std::uint32_t tensor, std::uint64_t bytes,
                        const char* what) {
  if (place.offset <= bytes && place.bytes <= bytes - place.offset) return;
  throw argument_error(std::string(what) + ": the place of tensor " + std::to_string(tensor) + ", " +
                       std::to_string(place.bytes) + " bytes from " + std::to_string(place.offset) +
                       ", is past the end of source " + std::to_string(place.source) + ", which has " +
                       std::to_string(bytes));
}

}  // namespace detail

/// Tensors in host memory, each in one piece, which must stay in place until the snapshot is staged.
/// Construction is O(tensors), a copy O(1). If the tensors are always in the same place, one view serves all
/// snapshots.
class host_state_view {
 public:
  static constexpr bool is_concurrent = true;

  /// @param tensors  the bytes of each, in the order of their descriptions.
  explicit host_state_view(const view_list<std::span<const std::byte>>& tensors) noexcept
      : tensors_(tensors) {}

  /// @throws argument_error  if a tensor has fewer bytes than described.
  void copy_out(std::uint32_t tensor, std::uint64_t offset, std::span<std::byte> into) const {
    const std::span<const std::span<const std::byte>> all = tensors_.entries();
    if (tensor >= all.size() || offset > all[tensor].size() || into.size() > all[tensor].size() - offset) {
      throw argument_error("host_state_view: bytes " + std::to_string(offset) + " to " +
                           std::to_string(offset + into.size()) + " of tensor " + std::to_string(tensor) +
                           " do not exist: pass a span for each described tensor, in that order");
    }
    std::memcpy(into.data(), all[tensor].data() + offset, into.size());
  }
  [[nodiscard]] std::span<const std::span<const std::byte>> tensors() const noexcept {
    return tensors_.entries();
  }

 private:
  view_list<std::span<const std::byte>> tensors_;
};

static_assert(state_view<host_state_view> && !is_stable_view<host_state_view>);

}  // namespace v0
}  // namespace llmmem
