/// @file
/// `refit_device_image`, `refit_upload`: an engine's weights in memory of a device, one version behind
/// another.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/refit/errors.hpp>
#include <llmmem/refit/refit_image.hpp>
#include <llmmem/result.hpp>
#include <llmmem/sharding/ids.hpp>
#include <llmmem/space/buffer.hpp>
#include <llmmem/space/concepts.hpp>
#include <llmmem/space/errors.hpp>
#include <llmmem/version/concepts.hpp>
#include <llmmem/version/errors.hpp>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <optional>
#include <span>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// The weights of one version in a space that the host need not touch. It owns its range, which stays where
/// it is, so that captured graphs may keep addresses. As the value of a `versioned`, one image for each slot:
///
///     versioned<refit_device_image<device_space>, double_buffer> weights(
///         {}, [&](std::size_t) { return refit_device_image(layout, device); });
///
/// @par Thread safety   as a span.
/// @par Errors          the constructor throws `out_of_memory` when the space lacks the bytes.
template <memory_space Space>
class refit_device_image {
 public:
  using range_type = typename Space::range_type;

  /// Layout and space outlive the image.
  refit_device_image(const refit_layout& layout, Space& space) : layout_(&layout) {
    if (layout.bytes() == 0) return;  // a rank whose parts are all empty
    memory_ = space_buffer<Space>(space, layout.bytes(), std::align_val_t{refit_layout::alignment});
  }

  [[nodiscard]] const refit_layout& layout() const noexcept { return *layout_; }
  [[nodiscard]] range_type memory() const noexcept { return memory_.range(); }
  /// Returns the elements, or the codes, that this rank has of a tensor.
  [[nodiscard]] range_type tensor(tensor_id tensor) const noexcept {
    const refit_layout::place& at = layout_->of(tensor);
    return {memory().data + at.offset, at.bytes};
  }
  /// Returns the scales of a quantised tensor: floats, by rows.
  [[nodiscard]] range_type scales(tensor_id tensor) const noexcept {
    const refit_layout::place& at = layout_->of(tensor);
    return {memory().data + at.scales_offset, at.scales_bytes};
  }
  /// The number that the trainer gave to these weights; 0 before the first.
  [[nodiscard]] std::uint64_t number() const noexcept { return number_; }
  void set_number(std::uint64_t number) noexcept { number_ = number; }

 private:
  const refit_layout* layout_;
  space_buffer<Space> memory_{};
  std::uint64_t number_ = 0;
};

/// Copies published images to a device, in pieces through pinned memory, and publishes them there.
///
///     refit_upload upload(copies, pinned);              // copies: a device_queue
///     const auto done = moving.receive(step, ...);      // all ranks have the new weights on the host
///     const auto now = weights.snapshot().value();
///     upload.publish(*now, device_weights, readers).value();
///
/// `readers` are marks of the kernels that still read the slot to be written.
///
/// The spare slot is written; readers may keep the version in it pinned until then. A version is
/// published when all its bytes are on the device: kernels that start afterwards need no fence. A reader that
/// unpins a version while its kernels still run passes their fence as `after`.
///
/// If an upload fails, the device serves the version before it, and the host has the new one: call `publish`
/// again. Each rank publishes alone: `joint_upload` (refit_together.hpp) publishes on all ranks or on none.
///
/// @tparam Pinned  the host can touch it, and the queue copies from it.
/// @par Complexity      each byte copied once on the host and once to the device; two pieces of staging, of
///                      which one is filled while the other is copied.
/// @par Thread safety   one thread; it waits on the host for the copies.
/// @par Errors          the constructor throws `argument_error` for pieces of 0 bytes, and `out_of_memory`
///                      when the pinned space lacks two of them. `publish` returns `errc::size_mismatch` for
///                      an image of another size, `errc::old_weights` for one that is not newer than the
///                      device's newest, `errc::version_pinned` if no slot is available or there is only one,
///                      and the queue's failures. It throws what the queue and its fences throw:
///                      `system_error` if the device has failed. Nothing is published then, and no copy is in
///                      flight, unless the queue has lost its end (`errc::completion_lost`).
template <memory_space Pinned, class Queue>
  requires(Pinned::is_host_accessible)
class refit_upload {
 public:
  using fence_type = typename Queue::fence_type;

  static constexpr std::uint64_t default_piece_bytes = std::uint64_t{8} << 20;

  /// Queue and space outlive it.
  refit_upload(Queue& queue, Pinned& pinned, std::uint64_t piece_bytes = default_piece_bytes)
      : queue_(&queue), piece_bytes_(checked(piece_bytes)) {
    for (piece& each : pieces_)
      each.memory = space_buffer<Pinned>(pinned, piece_bytes_, std::align_val_t{refit_layout::alignment});
  }
  refit_upload(const refit_upload&) = delete;
  refit_upload& operator=(const refit_upload&) = delete;

  /// @param weights  a `versioned<refit_device_image<Space>, ...>` with two slots at least.
  /// @param after    of everything that still reads the slot to be written.
  template <class Versions>
  [[nodiscard]] result<version_id> publish(const refit_image& image, Versions& weights,
                                           std::span<const fence_type> after = {}) {
    return publish(image, weights, after, [] { return result<void>(); });
  }
  /// The same, if `may_publish()`, called when all bytes are on the device, returns no failure: else that is
  /// the outcome, and nothing is published. What it throws passes through.
  template <class Versions, class MayPublish>
    requires requires(MayPublish& may_publish) {
      { may_publish() } -> std::same_as<result<void>>;
    }
  [[nodiscard]] result<version_id> publish(const refit_image& image, Versions& weights,
                                           std::span<const fence_type> after, MayPublish&& may_publish) {
    // Before a slot is chosen to be written, because that ends the version in it.
    if (weights.slots() < 2) return refuse(errc::version_pinned, 2, weights.slots());
    result<void> done;
    if (const auto newest = weights.snapshot()) done = may_replace(image, **newest);
    if (!done) return done.error();
    try {
      return weights.publish_in_place([&](auto& into, const auto* /*newest*/) {
        done = is_of_size(image, into);
        if (done) done = copy(image.memory(), into.memory(), after);
        if (done) done = may_publish();
        if (!done) throw refused{};
        into.set_number(image.number());
      });
    } catch (const refused&) {
      return done.error();
    }
  }

  [[nodiscard]] std::uint64_t staging_bytes() const noexcept { return pieces_.size() * piece_bytes_; }

 private:
  struct refused {};
  struct piece {
    space_buffer<Pinned> memory{};
    std::optional<fence_type> copied{};

    void wait() {
      if (const auto fence = std::exchange(copied, std::nullopt)) fence->wait();
    }
  };

  [[nodiscard]] static std::uint64_t checked(std::uint64_t piece_bytes) {
    if (piece_bytes == 0)
      throw argument_error("refit_upload: pieces of 0 bytes; 1 MiB and more is efficient");
    return piece_bytes;
  }
  [[nodiscard]] static failure refuse(error_code code, std::uint64_t wanted, std::uint64_t found) noexcept {
    return {.code = code, .wanted = wanted, .found = found, .where = "refit_upload"};
  }
  template <class Image>
  [[nodiscard]] static result<void> is_of_size(const refit_image& image, const Image& there) noexcept {
    if (image.memory().size() != there.memory().bytes)
      return refuse(errc::size_mismatch, there.memory().bytes, image.memory().size());
    return {};
  }
  template <class Image>
  [[nodiscard]] static result<void> may_replace(const refit_image& image, const Image& newest) noexcept {
    if (auto fits = is_of_size(image, newest); !fits) return fits;
    if (image.number() <= newest.number()) return refuse(errc::old_weights, image.number(), newest.number());
    return {};
  }
  template <class Range>
  [[nodiscard]] result<void> copy(std::span<const std::byte> from, const Range& to,
                                  std::span<const fence_type> after) {
    try {
      result<void> done = begin_copies(from, to, after);
      for (piece& each : pieces_)
        each.wait();
      return done;
    } catch (...) {
      for (piece& each : pieces_) {
        try {
          each.wait();
        } catch (...) {  // the first exception says why
        }
      }
      throw;
    }
  }
  template <class Range>
  [[nodiscard]] result<void> begin_copies(std::span<const std::byte> from, const Range& to,
                                          std::span<const fence_type> after) {
    std::size_t turn = 0;
    for (std::size_t at = 0; at < from.size(); ++turn) {
      piece& staged = pieces_[turn % pieces_.size()];
      staged.wait();
      const std::size_t count =
          std::min<std::size_t>(from.size() - at, static_cast<std::size_t>(piece_bytes_));
      const std::span<std::byte> staging = staged.memory.range().span().first(count);
      std::memcpy(staging.data(), from.data() + at, count);
      auto copied = queue_->copy_in_async(Range{to.data + at, count}, staging, after);
      if (!copied) return copied.error();
      staged.copied = std::move(*copied);
      at += count;
    }
    return {};
  }

  Queue* queue_;
  std::uint64_t piece_bytes_;
  std::array<piece, 2> pieces_{};
};

}  // namespace v0
}  // namespace llmmem
