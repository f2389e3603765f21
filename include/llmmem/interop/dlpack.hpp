/// @file
/// Exchanges tensors by DLPack in both directions without a copy: `to_dlpack` and `dlpack_tensor`. Includes
/// no header of DLPack, because the structures are template arguments: an engine uses those of its own
/// `dlpack.h`.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/model/safetensors_type.hpp>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// `DLManagedTensorVersioned` of DLPack 1.0 and newer, or `DLManagedTensor` of all versions.
template <class M>
concept dlpack_managed = requires(M& tensor) {
  { tensor.dl_tensor.data } -> std::convertible_to<void*>;
  { tensor.dl_tensor.shape } -> std::convertible_to<std::int64_t*>;
  { tensor.dl_tensor.strides } -> std::convertible_to<std::int64_t*>;
  { tensor.dl_tensor.byte_offset } -> std::convertible_to<std::uint64_t>;
  tensor.dl_tensor.device.device_type;
  tensor.dl_tensor.device.device_id;
  tensor.dl_tensor.dtype.code;
  { tensor.manager_ctx } -> std::convertible_to<void*>;
  tensor.deleter(&tensor);
};

/// `DLManagedTensorVersioned`, which has a version, and flags such as read-only.
template <class M>
concept dlpack_versioned = dlpack_managed<M> && requires(M& tensor) {
  tensor.version.major;
  tensor.flags;
};

/// Where a tensor's bytes are, in DLPack's numbers (`DLDeviceType`).
struct dlpack_place {
  static constexpr std::int32_t cpu = 1;
  static constexpr std::int32_t cuda = 2;
  static constexpr std::int32_t cuda_host = 3;  ///< pinned
  static constexpr std::int32_t cuda_managed = 13;

  std::int32_t type = cpu;
  std::int32_t device = 0;

  [[nodiscard]] constexpr bool is_host_accessible() const noexcept {
    return type == cpu || type == cuda_host || type == cuda_managed;
  }
  friend constexpr bool operator==(const dlpack_place&, const dlpack_place&) noexcept = default;
};

/// A tensor in DLPack's terms, without its owner. `strides` counts elements; empty means row-major.
struct dlpack_view {
  std::byte* data = nullptr;  ///< address of the first element, also in device memory
  safetensors_type type = safetensors_type::f32;
  std::span<const std::int64_t> shape{};
  std::span<const std::int64_t> strides{};
  dlpack_place place{};
  bool is_read_only = false;
};

namespace detail {

struct dlpack_number {
  std::uint8_t code;
  std::uint8_t bits;
};

/// `DLDataTypeCode` and bits, by `safetensors_type`. DLPack 1.1 added the narrow floating-point formats.
inline constexpr std::array<dlpack_number, safetensors_types> dlpack_numbers{
    {{6, 8},  {17, 4}, {15, 6}, {16, 6}, {1, 8},  {0, 8},  {12, 8}, {10, 8}, {14, 8}, {11, 8}, {13, 8},
     {0, 16}, {1, 16}, {2, 16}, {4, 16}, {0, 32}, {1, 32}, {2, 32}, {5, 64}, {2, 64}, {0, 64}, {1, 64}}};

[[nodiscard]] inline std::optional<safetensors_type> dlpack_type_of(std::uint8_t code,
                                                                    std::uint8_t bits) noexcept {
  for (std::size_t i = 0; i < safetensors_types; ++i) {
    if (dlpack_numbers[i].code == code && dlpack_numbers[i].bits == bits)
      return static_cast<safetensors_type>(i);
  }
  return std::nullopt;
}

/// Returns the number of elements, or nothing if an extent is negative or the bytes exceed 2^63 - 1.
[[nodiscard]] inline std::optional<std::uint64_t> dlpack_elements(std::span<const std::int64_t> shape,
                                                                  std::uint64_t bits) noexcept {
  std::uint64_t count = 1;
  bool is_empty = false;
  for (const std::int64_t extent : shape) {
    if (extent < 0) return std::nullopt;
    is_empty = is_empty || extent == 0;
  }
  if (is_empty) return 0;
  for (const std::int64_t extent : shape) {
    const auto times = static_cast<std::uint64_t>(extent);
    if (count > (max_bytes / bits) / times) return std::nullopt;
    count *= times;
  }
  return count;
}

/// The object that an exported tensor owns. `manager_ctx` is its address.
template <class Managed, class Owner>
struct dlpack_export {
  Managed tensor{};
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
  Owner owner;

  static void end(Managed* tensor) noexcept {
    if (tensor != nullptr) delete static_cast<dlpack_export*>(tensor->manager_ctx);
  }
};

}  // namespace detail

/// Exports a tensor: the consumer (PyTorch, JAX, CuPy, another C++ library) uses the bytes in place. When it
/// has finished, it calls `deleter` from any thread, which destroys `owner`.
///
///     auto lease = std::make_shared<decltype(buffer)::lease>(buffer.read(chunk).value());
///     DLManagedTensorVersioned* out = to_dlpack<DLManagedTensorVersioned>(
///         {.data = ..., .type = safetensors_type::bf16, .shape = shape, .is_read_only = true}, lease);
///
/// @param owner  keeps the bytes valid: a lease, a `std::shared_ptr`, a buffer. Movable. A lease must end on
///               its buffer's thread, so if the consumer may finish on another thread, pass an owner that
///               hands the lease back.
/// @par Complexity   one allocation.
/// @par Errors   throws `argument_error` if strides and shape differ in length, an extent is negative, the
///      bytes exceed 2^63 - 1, a tensor with elements has no address, or a read-only tensor is exported
///      without a version, which cannot mark it as read-only; `std::bad_alloc`. The owner is destroyed then.
template <dlpack_managed Managed, class Owner>
[[nodiscard]] Managed* to_dlpack(const dlpack_view& view, Owner owner) {
  if (!view.strides.empty() && view.strides.size() != view.shape.size()) {
    throw argument_error("to_dlpack: " + std::to_string(view.strides.size()) + " strides for " +
                         std::to_string(view.shape.size()) + " dimensions; give one for each, or none");
  }
  const std::optional<std::uint64_t> elements = detail::dlpack_elements(view.shape, bits_of(view.type));
  if (!elements) {
    throw argument_error("to_dlpack: the shape has a negative extent, or exceeds 2^63 - 1 bytes");
  }
  if (view.is_read_only && !dlpack_versioned<Managed>) {
    throw argument_error(
        "to_dlpack: DLManagedTensor cannot say that a tensor is read-only; use DLManagedTensorVersioned, or "
        "export a copy");
  }
  if (view.data == nullptr && *elements != 0) {
    throw argument_error("to_dlpack: the address of a tensor with elements is null; give that of its first");
  }
  using exported = detail::dlpack_export<Managed, Owner>;
  auto made = std::make_unique<exported>(exported{.tensor = {},
                                                  .shape = {view.shape.begin(), view.shape.end()},
                                                  .strides = {view.strides.begin(), view.strides.end()},
                                                  .owner = std::move(owner)});
  Managed& out = made->tensor;
  auto& tensor = out.dl_tensor;
  tensor.data = view.data;
  tensor.device.device_type =
      static_cast<std::remove_cvref_t<decltype(tensor.device.device_type)>>(view.place.type);
  tensor.device.device_id = view.place.device;
  tensor.ndim = static_cast<std::remove_cvref_t<decltype(tensor.ndim)>>(view.shape.size());
  const detail::dlpack_number number = detail::dlpack_numbers[static_cast<std::size_t>(view.type)];
  tensor.dtype.code = number.code;
  tensor.dtype.bits = number.bits;
  tensor.dtype.lanes = 1;
  // DLPack 1.2 requires strides for a tensor with dimensions.
  if (made->strides.empty()) {
    made->strides.resize(made->shape.size());
    constexpr auto most = static_cast<std::int64_t>(max_bytes);
    std::int64_t stride = 1;
    for (std::size_t i = made->shape.size(); i-- != 0;) {
      made->strides[i] = stride;
      // If one extent is 0, the product of the others may be arbitrarily large.
      const std::int64_t times = made->shape[i] == 0 ? 1 : made->shape[i];
      stride = stride > most / times ? most : stride * times;
    }
  }
  tensor.shape = made->shape.data();
  tensor.strides = made->strides.data();
  tensor.byte_offset = 0;
  if constexpr (dlpack_versioned<Managed>) {
    out.version.major = 1;
    out.version.minor = 1;
    out.flags = view.is_read_only ? 1U : 0U;
  }
  out.deleter = &exported::end;
  out.manager_ctx = made.release();
  return &out;
}

/// A tensor that another library exported. Move-only; its destructor calls the exporter's `deleter`.
///
///     dlpack_tensor<DLManagedTensorVersioned> weights(capsule);   // now it owns the capsule's tensor
///     buffer.copy_in(weights.bytes(), ...);
///
/// @par Thread safety   none; const calls may run concurrently.
/// @par Errors   the constructor throws `argument_error` for null, and `format_error` for a major version
///      other than 1, an element type without a `safetensors_type`, vector lanes, padded sub-byte elements, a
///      negative extent, a size past 2^63 - 1, or elements without an address. The caller then keeps the
///      tensor.
template <dlpack_managed Managed>
class dlpack_tensor {
 public:
  /// Takes ownership of a tensor.
  explicit dlpack_tensor(Managed* tensor) : type_(checked(tensor)), tensor_(tensor) {}
  dlpack_tensor(dlpack_tensor&& other) noexcept
      : type_(other.type_), tensor_(std::exchange(other.tensor_, nullptr)) {}
  dlpack_tensor& operator=(dlpack_tensor&& other) noexcept {
    std::swap(type_, other.type_);
    std::swap(tensor_, other.tensor_);
    return *this;
  }
  ~dlpack_tensor() {
    if (tensor_ != nullptr && tensor_->deleter != nullptr) tensor_->deleter(tensor_);
  }

  [[nodiscard]] safetensors_type type() const noexcept { return type_; }
  [[nodiscard]] std::span<const std::int64_t> shape() const noexcept LLMMEM_LIFETIMEBOUND {
    return {tensor_->dl_tensor.shape, dimensions()};
  }
  /// Returns the strides in elements; none if the tensor is row-major and its exporter gave none.
  [[nodiscard]] std::span<const std::int64_t> strides() const noexcept LLMMEM_LIFETIMEBOUND {
    const std::int64_t* const strides = tensor_->dl_tensor.strides;
    return {strides, strides == nullptr ? 0 : dimensions()};
  }
  [[nodiscard]] dlpack_place place() const noexcept {
    const auto& device = tensor_->dl_tensor.device;
    return {static_cast<std::int32_t>(device.device_type), static_cast<std::int32_t>(device.device_id)};
  }
  /// Returns whether the tensor is read-only; false for a structure without a version, which cannot express
  /// it.
  [[nodiscard]] bool is_read_only() const noexcept {
    if constexpr (dlpack_versioned<Managed>) {
      return (tensor_->flags & 1U) != 0;
    } else {
      return false;
    }
  }
  /// Returns the number of elements.
  [[nodiscard]] std::uint64_t elements() const noexcept {
    return detail::dlpack_elements(shape(), bits_of(type_)).value_or(0);
  }
  /// Returns the address of the first element, also of device memory. Null only without elements.
  [[nodiscard]] const std::byte* data() const noexcept {
    const auto* const start = static_cast<const std::byte*>(tensor_->dl_tensor.data);
    return elements() == 0 ? start : start + tensor_->dl_tensor.byte_offset;
  }
  /// Returns whether the elements are adjacent, in row-major order.
  [[nodiscard]] bool is_contiguous() const noexcept {
    std::int64_t wanted = 1;
    const auto extents = shape();
    const auto steps = strides();
    if (elements() == 0) return true;
    for (std::size_t i = steps.size(); i-- != 0;) {
      if (extents[i] != 1 && steps[i] != wanted) return false;
      wanted *= extents[i];
    }
    return true;
  }
  /// Returns the bytes of a contiguous tensor in memory that the host can access.
  /// @throws argument_error  if it is elsewhere, or not contiguous: copy it in its own library first
  [[nodiscard]] std::span<const std::byte> bytes() const LLMMEM_LIFETIMEBOUND {
    if (!place().is_host_accessible())
      refuse("is in memory of a device, not of the host; copy it to the host, or use data() on the device");
    return addresses();
  }
  /// Returns the same bytes for writing. @throws argument_error also if the tensor is read-only
  [[nodiscard]] std::span<std::byte> writable_bytes() LLMMEM_LIFETIMEBOUND {
    if (is_read_only()) refuse("is read-only; copy it");
    const auto same = bytes();
    return {const_cast<std::byte*>(same.data()), same.size()};  // the exporter gave a void*
  }
  /// Returns the addresses of the bytes of a contiguous tensor in any memory.
  [[nodiscard]] std::span<const std::byte> addresses() const LLMMEM_LIFETIMEBOUND {
    if (!is_contiguous()) refuse("is not contiguous; copy it to a contiguous one in its own library");
    return {data(), static_cast<std::size_t>((elements() * bits_of(type_) + 7) / 8)};
  }

 private:
  [[nodiscard]] std::size_t dimensions() const noexcept {
    return static_cast<std::size_t>(tensor_->dl_tensor.ndim);
  }
  [[noreturn]] static void refuse(const char* why) {
    throw argument_error(std::string("dlpack_tensor: the tensor ") + why);
  }
  [[nodiscard]] static safetensors_type checked(const Managed* tensor) {
    if (tensor == nullptr) throw argument_error("dlpack_tensor: the tensor is null");
    const auto malformed = [](const std::string& what) { throw format_error("dlpack_tensor: " + what); };
    if constexpr (dlpack_versioned<Managed>) {
      if (tensor->version.major != 1) {
        malformed("major version " + std::to_string(tensor->version.major) +
                  " of DLPack, but 1 is known; call its deleter, and ask the exporter for version 1");
      }
      if ((tensor->flags & 4U) != 0)
        malformed("elements of less than a byte are padded; export them packed, or in a wider type");
    }
    const auto& of = tensor->dl_tensor;
    if (of.dtype.lanes != 1)
      malformed("vectors of " + std::to_string(of.dtype.lanes) + " lanes; only 1 is known");
    const auto type = detail::dlpack_type_of(static_cast<std::uint8_t>(of.dtype.code), of.dtype.bits);
    if (!type) {
      malformed("element type " + std::to_string(static_cast<int>(of.dtype.code)) + " of " +
                std::to_string(of.dtype.bits) + " bits is not known");
    }
    if (of.ndim < 0 || (of.ndim != 0 && of.shape == nullptr))
      malformed(std::to_string(of.ndim) + " dimensions without a shape");
    const std::span<const std::int64_t> shape(of.shape, static_cast<std::size_t>(of.ndim));
    const auto elements = detail::dlpack_elements(shape, bits_of(*type));
    if (!elements) malformed("the shape has a negative extent, or exceeds 2^63 - 1 bytes");
    if (*elements != 0) {
      if (of.data == nullptr) malformed("the tensor has elements, but its address is null");
      const std::uint64_t left = ~reinterpret_cast<std::uintptr_t>(of.data);
      if (of.byte_offset > left || (*elements * bits_of(*type) + 7) / 8 > left - of.byte_offset) {
        malformed("the byte offset " + std::to_string(of.byte_offset) +
                  " leads past the end of the addresses");
      }
    }
    return *type;
  }

  safetensors_type type_;
  Managed* tensor_;
};

}  // namespace v0
}  // namespace llmmem
