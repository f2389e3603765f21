/// @file
/// `tiered_state_view`: a checkpoint of state in a `tiered_buffer` that changes while it is being saved.
#pragma once

#include <llmmem/checkpoint/detail/shared_part.hpp>
#include <llmmem/checkpoint/state_view.hpp>
#include <llmmem/config.hpp>
#include <llmmem/detail/history.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/tiering/chunk_mapping.hpp>
#include <llmmem/tiering/tiered_buffer.hpp>
#include <llmmem/tiering/tiered_types.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// The buffer of the tensors, directly or below a schedule.
template <class Store>
[[nodiscard]] decltype(auto) buffer_beneath(Store& store) noexcept {
  if constexpr (requires { store.buffer(); }) {
    return store.buffer();
  } else {
    return (store);
  }
}

}  // namespace detail

/// The bytes of tensors at one moment, in chunks of a `tiered_buffer`: clones of the chunks, which are copied
/// on write in every tier.
///
///     const snapshot_guard guard = saves.begin_snapshot(step, tiered_state_view(buffer, chunks, places));
///     for (layer : layers) {
///       update(buffer, chunks[layer]);            // separates from its clone first
///       saves.stage_for(2'000'000);               // copies for 2 ms, without leases held
///     }
///
/// A buffer belongs to one thread, and so does the view: that thread copies the chunks, in `stage_for` or
/// when it waits, and releases the clones. A chunk that comes up for the copy may displace another, as with
/// any lease.
///
/// A chunk that is updated while its clone lives takes a second place in the last tier, and for a while in
/// tier 0. If there is no place, the update is refused with `errc::out_of_bytes` and changes nothing: then
/// call `guard.wait_staged()` and try again. If steps update all chunks, each unread snapshot keeps a
/// complete state: the last tier needs 1 + `max_pending` times the state (three times with the default of 2;
/// twice if the caller waits for each guard before the next snapshot), and `max_chunks` the same multiple of
/// the chunks. A refused lease during the copy ends the checkpoint, so hold no leases that fill tier 0.
///
/// **Tensors of a `tiered_tensors`**, of any sizes and in any number of chunks, are the tensors of the
/// checkpoint, in the order of their numbers; each is one tensor there, regardless of its size:
///
///     const auto described = ...;                             // state_tensors: names, types, shapes
///     tiered_tensors tensors(buffer, map_to_chunks(sizes_of(described)));   // sizes_of: tiered_load.hpp
///     async_checkpointer<traits> saves(coordinator, described);
///     const snapshot_guard guard = saves.begin_snapshot(step, tensors);
///
/// `load_into` (tiered_load.hpp) restores them, regardless of the chunks that hold them then.
///
/// The view reports chunks that no lease has written since another view (`change_tracking_view`), so an
/// incremental save neither brings them up nor writes them.
///
/// Copies of a view share its clones, which the last copy removes.
///
/// @par Complexity      O(chunks + places) to take one, which moves no byte. `is_unchanged_since` O(1).
/// @par Thread safety   the buffer's thread. The buffer outlives it: see `snapshot_guard`.
/// @par Errors          the constructor throws `argument_error` for tensors without contents, and the errors
///   of `clone`: `out_of_memory` if the table of chunks is full, `argument_error` for a chunk that is being
///   written or has no contents, `handle_error` for an invalid handle.
template <class Buffer>
class tiered_state_view {
 public:
  static constexpr bool is_concurrent = false;
  static constexpr bool is_stable = true;
  static_assert(Buffer::template space_type<0>::is_host_accessible,
                "the host copies from tier 0, so tier 0 must be host-accessible");

  /// @param places  the place of each tensor, in the order of their descriptions; its source is a chunk.
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

  /// @param tensors  a `tiered_tensors` or `persistent_tensors` on the buffer, or on a schedule over it.
  template <class Tensors>
    requires requires(const Tensors& tensors) {
      { detail::buffer_beneath(tensors.store()) } -> std::same_as<Buffer&>;
      { tensors.mapping() } -> std::convertible_to<const chunk_mapping&>;
    }
  tiered_state_view(const Tensors& tensors)  // NOLINT(google-explicit-constructor): begin_snapshot takes them
      : clones_(std::in_place, detail::buffer_beneath(tensors.store())), is_of_tensors_(true) {
    Buffer& beneath = *clones_->buffer;
    const chunk_mapping& mapping = tensors.mapping();
    clones_->handles.resize(mapping.chunks().size());
    clones_->changes.resize(mapping.chunks().size());
    history_.add(beneath.identity());
    for (std::uint32_t i = 0; i < mapping.tensors(); ++i) {
      const tensor_id tensor{i};
      if (!tensors.has_contents(tensor).value()) {
        throw argument_error("tiered_state_view: tensor " + std::to_string(i) +
                             " was never written completely; write it, or leave it out");
      }
      clones_->first_part.push_back(static_cast<std::uint32_t>(clones_->parts.size()));
      std::uint32_t number = 0;
      for (const tensor_part& part : mapping.parts(tensor)) {
        const chunk_handle chunk = tensors.chunk(tensor, number++).value();
        const std::uint32_t at = to_index(part.chunk);
        if (clones_->handles[at] == chunk_handle{}) {
          clones_->handles[at] = beneath.clone(chunk).value();
          clones_->changes[at] = beneath.last_change(chunk).value();
          history_.add(std::uint64_t{chunk.slot} << 32 | chunk.generation);
        }
        clones_->parts.push_back({at, part.offset, part.begin, part.bytes});
        history_.add(at);
        history_.add(part.offset);
        history_.add(part.bytes);
      }
    }
    clones_->first_part.push_back(static_cast<std::uint32_t>(clones_->parts.size()));
    number_ = beneath.changes() + 1;
  }

  /// @throws argument_error  if a tensor has fewer bytes than described, or is not inside a chunk; and the
  ///   errors of a lease.
  void copy_out(std::uint32_t tensor, std::uint64_t offset, std::span<std::byte> into) const {
    if (is_of_tensors_) {
      each_part(tensor, offset, into.size(),
                [&](const tensor_place& part, std::uint64_t at, std::uint64_t from, std::uint64_t bytes) {
                  const auto lease = clones_->buffer->read(clones_->handles[part.chunk]).value();
                  std::memcpy(into.data() + at, lease.span().data() + (part.offset + from),
                              static_cast<std::size_t>(bytes));
                });
      return;
    }
    const state_place& place =
        detail::place_of(places_.entries(), tensor, offset, into.size(), "tiered_state_view");
    check_source(place, tensor);
    const auto lease = clones_->buffer->read(clones_->handles[place.source]).value();
    detail::check_place(place, tensor, lease.span().size(), "tiered_state_view");
    std::memcpy(into.data(), lease.span().data() + (place.offset + offset), into.size());
  }

  /// See `change_tracking_view`. Views of other chunks or places do not know this version.
  [[nodiscard]] std::uint64_t version() const noexcept { return history_.tag(number_); }
  /// Decides by chunks. `version` is that of a view of the same chunks, which may have been destroyed.
  /// @throws argument_error  as `copy_out`.
  [[nodiscard]] bool is_unchanged_since(std::uint64_t version, std::uint32_t tensor, std::uint64_t offset,
                                        std::uint64_t bytes) const {
    // A version of another history becomes a number that does not occur.
    const std::uint64_t number = history_.number(version);
    const auto is_unchanged = [&](std::uint32_t chunk) {
      return number != 0 && number <= number_ && clones_->changes[chunk] < number;
    };
    if (is_of_tensors_) {
      bool are_all = true;
      each_part(tensor, offset, bytes,
                [&](const tensor_place& part, std::uint64_t /*at*/, std::uint64_t /*from*/,
                    std::uint64_t /*bytes*/) { are_all = are_all && is_unchanged(part.chunk); });
      return are_all;
    }
    const state_place& place =
        detail::place_of(places_.entries(), tensor, offset, bytes, "tiered_state_view");
    check_source(place, tensor);
    return is_unchanged(place.source);
  }

  [[nodiscard]] std::span<const state_place> places() const noexcept { return places_.entries(); }

 private:
  /// Bytes of a tensor in a chunk.
  struct tensor_place {
    std::uint32_t chunk = 0;
    std::uint64_t offset = 0;  // in the chunk
    std::uint64_t begin = 0;   // in the tensor
    std::uint64_t bytes = 0;
  };
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
    std::vector<std::uint64_t> changes{};  // last change of each chunk when the view was taken
    // Only for a view of tensors.
    std::vector<tensor_place> parts{};
    std::vector<std::uint32_t> first_part{};  // by tensor, plus one entry
  };

  /// Calls `visit(part, offset in the requested bytes, offset in the part, bytes)` for each part in `[offset,
  /// offset + bytes)`.
  template <class Visit>
  void each_part(std::uint32_t tensor, std::uint64_t offset, std::uint64_t bytes, Visit visit) const {
    detail::check_held(static_cast<bool>(clones_), "tiered_state_view");
    const std::vector<std::uint32_t>& first = clones_->first_part;
    std::uint64_t there = 0;
    std::span<const tensor_place> parts;
    if (tensor + std::size_t{1} < first.size()) {
      parts = std::span(clones_->parts).subspan(first[tensor], first[tensor + 1] - first[tensor]);
      there = parts.back().begin + parts.back().bytes;
    }
    if (offset > there || bytes > there - offset) {
      throw argument_error("tiered_state_view: bytes " + std::to_string(offset) + " to " +
                           std::to_string(offset + bytes) + " of tensor " + std::to_string(tensor) +
                           " are described, but it has " + std::to_string(there) +
                           ": describe the tensors in the order of their numbers, with their lengths");
    }
    std::size_t next = 0;  // the last part that begins at or before `offset`
    for (std::size_t behind = parts.size(); behind - next > 1;) {
      const std::size_t middle = next + (behind - next) / 2;
      (parts[middle].begin <= offset ? next : behind) = middle;
    }
    for (std::uint64_t done = 0; done < bytes; ++next) {
      const tensor_place& part = parts[next];
      const std::uint64_t from = offset + done - part.begin;
      const std::uint64_t left = part.bytes - from;
      const std::uint64_t count = left < bytes - done ? left : bytes - done;
      visit(part, done, from, count);
      done += count;
    }
  }

  void check_source(const state_place& place, std::uint32_t tensor) const {
    detail::check_held(static_cast<bool>(clones_), "tiered_state_view");
    if (place.source < clones_->handles.size()) return;
    throw argument_error("tiered_state_view: tensor " + std::to_string(tensor) + " is in chunk " +
                         std::to_string(place.source) + ", but the number of chunks is " +
                         std::to_string(clones_->handles.size()));
  }

  view_list<state_place> places_;
  detail::shared_part<clones> clones_;
  detail::history_tag history_{};
  std::uint64_t number_ = 0;  // one more than the buffer's number of changes
  bool is_of_tensors_ = false;
};

}  // namespace v0
}  // namespace llmmem
