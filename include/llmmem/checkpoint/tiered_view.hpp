/// @file
/// `tiered_state_view`: a checkpoint of state in a `tiered_buffer`, which changes while it is being saved.
#pragma once

#include <llmmem/checkpoint/detail/shared_part.hpp>
#include <llmmem/checkpoint/state_view.hpp>
#include <llmmem/config.hpp>
#include <llmmem/detail/history.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/tiering/tiered_buffer.hpp>
#include <llmmem/tiering/tiered_types.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The bytes that tensors had at one moment, in chunks of a `tiered_buffer`: clones of the chunks, copied on
/// write in every tier.
///
///     const snapshot_guard guard = saves.begin_snapshot(step, tiered_state_view(buffer, chunks, places));
///     for (layer : layers) {
///       update(buffer, chunks[layer]);            // parts from its clone first
///       saves.stage_for(2'000'000);               // copies for 2 ms, without leases held
///     }
///
/// A buffer is one thread's, and so is the view: that thread copies, in `stage_for` or when it waits, and the
/// clones go in it. A chunk that comes up to be copied may displace another, as any lease.
///
/// A chunk that is updated while its clone lives takes a second place in the last tier, and for a while in
/// tier 0. Where there is none the update is refused (`errc::out_of_bytes`, and nothing has changed): then
/// `guard.wait_staged()`, and once more. A step that updates all chunks needs the last tier twice as large,
/// and `max_chunks` twice as many, as without. A lease that is refused while copying ends the checkpoint:
/// hold none of those that fill tier 0.
///
/// A chunk that no lease has written since another view tells so (`change_tracking_view`): an incremental
/// save neither brings it up nor writes it.
///
/// Copies of a view share its clones. They are removed when the last copy goes.
///
/// @par Complexity      to take it O(chunks + places), and no byte moves. `is_unchanged_since` O(1).
/// @par Thread safety   the buffer's thread. The buffer outlives it: see `snapshot_guard`.
/// @par Errors          the constructor throws what `clone` refuses: `out_of_memory` where the table of
///                      chunks is full, `argument_error` for one that is being written or has no contents,
///                      `handle_error` for one that is none.
template <class Buffer>
class tiered_state_view {
 public:
  static constexpr bool is_concurrent = false;
  static constexpr bool is_stable = true;
  static_assert(Buffer::template space_type<0>::is_host_accessible,
                "the host copies out of tier 0: it must be able to touch it");

  /// @param places  of each tensor, in the order in which they were described: chunks are its sources.
  tiered_state_view(Buffer& buffer, std::span<const chunk_handle> chunks,
                    const view_list<state_place>& places)
      : places_(places), clones_(std::in_place, buffer) {
    clones_->handles.reserve(chunks.size());
    clones_->changes.reserve(chunks.size());
    history_.add(buffer.identity());
    for (const chunk_handle each : chunks) {
      static_cast<void>(buffer.tier_of(each).value());
      clones_->handles.push_back(buffer.clone(each).value());
      clones_->changes.push_back(buffer.last_change(each).value());
      history_.add(std::uint64_t{each.slot} << 32 | each.generation);
    }
    detail::add_places(history_, places_.entries());
    number_ = buffer.changes() + 1;
  }

  /// @throws argument_error  where a tensor has fewer bytes than were described, or does not lie in a chunk;
  ///                         and what a lease fails with.
  void copy_out(std::uint32_t tensor, std::uint64_t offset, std::span<std::byte> into) const {
    const state_place& place =
        detail::place_of(places_.entries(), tensor, offset, into.size(), "tiered_state_view");
    check_source(place, tensor);
    const auto lease = clones_->buffer->read(clones_->handles[place.source]).value();
    detail::check_place(place, tensor, lease.span().size(), "tiered_state_view");
    std::memcpy(into.data(), lease.span().data() + (place.offset + offset), into.size());
  }

  /// See `change_tracking_view`. Views of other chunks or other places do not know it.
  [[nodiscard]] std::uint64_t version() const noexcept { return history_.tag(number_); }
  /// The same, by chunks. `version` is that of a view of the same chunks, which may be gone.
  /// @throws argument_error  as `copy_out`.
  [[nodiscard]] bool is_unchanged_since(std::uint64_t version, std::uint32_t tensor, std::uint64_t offset,
                                        std::uint64_t bytes) const {
    const state_place& place =
        detail::place_of(places_.entries(), tensor, offset, bytes, "tiered_state_view");
    check_source(place, tensor);
    const std::uint64_t number = history_.number(version);  // of another history: no number that there was
    return number != 0 && number <= number_ && clones_->changes[place.source] < number;
  }

  [[nodiscard]] std::span<const state_place> places() const noexcept { return places_.entries(); }

 private:
  struct clones {
    explicit clones(Buffer& of) noexcept : buffer(&of) {}
    clones(const clones&) = delete;
    clones& operator=(const clones&) = delete;
    ~clones() {
      for (const chunk_handle each : handles)
        static_cast<void>(buffer->remove(each));
    }

    Buffer* buffer;
    std::vector<chunk_handle> handles{};
    std::vector<std::uint64_t> changes{};  // the last of each, when the view was taken
  };

  void check_source(const state_place& place, std::uint32_t tensor) const {
    detail::check_held(static_cast<bool>(clones_), "tiered_state_view");
    if (place.source < clones_->handles.size()) return;
    throw argument_error("tiered_state_view: tensor " + std::to_string(tensor) + " lies in chunk " +
                         std::to_string(place.source) + ", there are " +
                         std::to_string(clones_->handles.size()));
  }

  view_list<state_place> places_;
  detail::shared_part<clones> clones_;
  detail::history_tag history_{};
  std::uint64_t number_ = 0;  // one more than the buffer's changes were
};

}  // namespace v0
}  // namespace llmmem
