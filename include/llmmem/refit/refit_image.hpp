/// @file
/// `refit_image`: an engine's weights on one rank, in memory of the engine.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/refit/refit_plan.hpp>
#include <llmmem/sharding/element_runs.hpp>
#include <llmmem/sharding/ids.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Where the target's tensors are in the memory of a rank: each at a multiple of `alignment`, in the order of
/// the catalogue; of a quantised tensor the codes, then, aligned again, one float for each group.
///
/// @par Complexity   O(tensors), once.
/// @par Thread safety   const throughout.
/// @par Errors          the constructor throws `argument_error` for a rank that is no receiver of the plan.
class refit_layout {
 public:
  static constexpr std::uint64_t alignment = 64;

  /// Where a tensor of the rank is in the image. Offsets and sizes are in bytes.
  struct place {
    element_runs elements{};  ///< of the tensor, stored densely
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
    std::uint64_t scales_offset = 0;
    std::uint64_t scales_bytes = 0;
    std::uint64_t row_elements = 0;  ///< of a quantised tensor: what the rank has of a row
  };

  refit_layout(const refit_plan& plan, rank_id rank) {
    const std::size_t receiver = refit_plan::place_of(plan.receivers, rank);
    if (receiver == plan.receivers.size())
      throw argument_error("refit_layout: rank " + std::to_string(to_index(rank)) +
                           " receives nothing in this plan; only receivers have an image");
    const auto next = [&](std::uint64_t bytes) {
      const std::uint64_t at = bytes_;
      bytes_ += (bytes + alignment - 1) / alignment * alignment;
      return at;
    };
    for (std::size_t t = 0; t < plan.target.size(); ++t) {
      const refit_tensor& tensor = plan.target[t];
      place at{.elements = plan.target_set(t, receiver)};
      at.bytes = at.elements.elements() * (bits_of(tensor.element) / 8);
      at.offset = next(at.bytes);
      if (tensor.group != 0 && !at.elements.empty()) {
        const bool is_whole_rows = at.elements.run % tensor.shape.columns() == 0;
        at.row_elements = is_whole_rows ? tensor.shape.columns() : at.elements.run;
        at.scales_bytes = at.elements.elements() / tensor.group * sizeof(float);
        at.scales_offset = next(at.scales_bytes);
      }
      places_.push_back(at);
    }
  }

  /// Returns the bytes of an image, a multiple of `alignment`.
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] const place& of(tensor_id tensor) const noexcept { return places_[to_index(tensor)]; }
  [[nodiscard]] std::size_t tensors() const noexcept { return places_.size(); }

 private:
  std::vector<place> places_{};
  std::uint64_t bytes_ = 0;
};

/// The weights of one version: a view of memory that the engine owns and that stays where it is, so that
/// captured graphs may keep addresses. As the value of a `versioned`, one image for each slot:
///
///     const refit_layout layout(plan, rank);
///     versioned<refit_image, double_buffer> weights({}, [&](std::size_t i) {
///       return refit_image(layout, memory[i]);     // two ranges of layout.bytes(), pinned or not
///     });
///
/// @par Thread safety   as a span.
/// @par Errors          the constructor throws `argument_error` for memory of another length.
class refit_image {
 public:
  refit_image() noexcept = default;
  /// @param layout  outlives the image.
  refit_image(const refit_layout& layout, std::span<std::byte> memory) : layout_(&layout), memory_(memory) {
    if (memory.size() != layout.bytes())
      throw argument_error("refit_image: memory of " + std::to_string(memory.size()) +
                           " bytes for a layout of " + std::to_string(layout.bytes()));
  }

  /// The same in a `memory_range`. A refit joins, converts and quantises what arrives on the host: a range of
  /// a space that the host cannot touch, such as a `device_space`, is refused when the program is compiled.
  template <class Range>
    requires requires(const Range& range) { range.addresses(); }
  refit_image(const refit_layout& layout, const Range& memory) : refit_image(layout, host_bytes(memory)) {}

  [[nodiscard]] const refit_layout& layout() const noexcept { return *layout_; }
  [[nodiscard]] std::span<std::byte> memory() const noexcept { return memory_; }
  /// Returns the elements, or the codes, that this rank has of a tensor.
  [[nodiscard]] std::span<std::byte> tensor(tensor_id tensor) const noexcept {
    const refit_layout::place& at = layout_->of(tensor);
    return memory_.subspan(static_cast<std::size_t>(at.offset), static_cast<std::size_t>(at.bytes));
  }
  /// Returns the scales of a quantised tensor: floats, by rows.
  [[nodiscard]] std::span<std::byte> scales(tensor_id tensor) const noexcept {
    const refit_layout::place& at = layout_->of(tensor);
    return memory_.subspan(static_cast<std::size_t>(at.scales_offset),
                           static_cast<std::size_t>(at.scales_bytes));
  }
  /// The number that the trainer gave to these weights; 0 before the first.
  [[nodiscard]] std::uint64_t number() const noexcept { return number_; }
  /// Set by a refit, or by a program that fills the image itself.
  void set_number(std::uint64_t number) noexcept { number_ = number; }
  /// Returns the checksum of all elements, codes and scales. O(bytes).
  [[nodiscard]] std::uint32_t digest() const noexcept {
    std::uint32_t sum = 0;
    for (std::uint32_t t = 0; t < layout_->tensors(); ++t) {
      sum = crc32c(sum, tensor(tensor_id{t}));
      sum = crc32c(sum, scales(tensor_id{t}));
    }
    return sum;
  }

 private:
  template <class Range>
  [[nodiscard]] static std::span<std::byte> host_bytes(const Range& memory) noexcept {
    constexpr bool is_touched = requires { memory.span(); };
    static_assert(
        is_touched,
        "refit_image: the host cannot touch this space; take host memory, and copy each published image to "
        "the device with refit_upload (refit_device.hpp)");
    if constexpr (is_touched) return memory.span();
    return {};
  }

  const refit_layout* layout_ = nullptr;
  std::span<std::byte> memory_{};
  std::uint64_t number_ = 0;
};

}  // namespace v0
}  // namespace llmmem
