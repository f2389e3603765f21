/// @file
/// `device_file_space`: a file that a device reads and writes by itself, as a tier beneath its memory.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/concepts.hpp>
#include <llmmem/transfer/device_file_io.hpp>
#include <llmmem/transfer/file_space.hpp>
#include <llmmem/transfer/transfer_fence.hpp>

#include <cstddef>
#include <span>

namespace llmmem {
inline namespace v0 {

/// A `file_space` that is a `straight_queue` of a device's space: chunks go between file and device memory
/// without host memory (GPUDirect Storage), where the library can do that; cuFile itself otherwise copies
/// through memory of its own.
///
///     device_file_space<streamed_device_space, device_file_io<cufile_library>> disk("/nvme/tier", {...});
///     tiered_buffer<streamed_device_space, decltype(disk)> buffer({}, {gpu, hot}, {disk, cold});
///
/// - **Order.** Copies do not follow the device's streams: wait on the host for kernels that used a chunk
///   before its lease ends (`straight_queue`).
/// - **No checksums**: the host does not see these bytes, so tiers keep no CRC-32C of them.
/// - Over an engine that takes no device memory it does not compile.
///
/// @tparam Device  the space of device memory
/// @par Complexity, thread safety, errors   those of `file_space`.
template <memory_space Device, io_engine Engine>
class device_file_space : public file_space<Engine> {
  static_assert(
      requires { requires Engine::takes_device_memory; },
      "the engine of a device_file_space takes requests that name device memory: device_file_io, or one of "
      "your own with `static constexpr bool takes_device_memory = true`");

 public:
  using typename file_space<Engine>::fence_type;
  /// Ranges are those of the file's space, so that its calls take them.
  using range_type = memory_range<file_space<Engine>>;
  using device_range = typename Device::range_type;

  using file_space<Engine>::file_space;

  /// Writes a device's bytes to the file. See `copy_queue`.
  [[nodiscard]] result<fence_type> copy_from_async(range_type to, device_range from,
                                                   std::span<const fence_type> after) {
    return this->copy_in_async(to, {from.data, static_cast<std::size_t>(from.bytes)}, after);
  }
  /// Reads bytes of the file into a device's memory. See `copy_queue`.
  [[nodiscard]] result<fence_type> copy_to_async(device_range to, range_type from,
                                                 std::span<const fence_type> after) {
    return this->copy_out_async({to.data, static_cast<std::size_t>(to.bytes)}, from, after);
  }
};

}  // namespace v0
}  // namespace llmmem
