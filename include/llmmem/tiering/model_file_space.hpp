/// @file
/// `model_file_space`: a read-only file, such as a file of a model's weights, as the last tier.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/concepts.hpp>
#include <llmmem/space/errors.hpp>
#include <llmmem/space/file.hpp>
#include <llmmem/transfer/file_queue.hpp>
#include <llmmem/transfer/transfer_fence.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// How a model file is opened.
struct model_file_options {
  direct_io direct = direct_io::preferred;
  file_queue_options queue{};
};

/// The bytes of a file that another program wrote, as the last tier of a `tiered_buffer`: the first layer can
/// be leased before anything is copied or converted.
///
///     model_file_space<uring_io> model("model-00001.safetensors");
///     tiered_buffer<host_space, model_file_space<uring_io>> weights(
///         {}, {host, 1 << 30}, {model, model.capacity(), 1});  // granularity 1: tensors as they are
///     // `begin` and `end` of a tensor are in the file's own header.
///     const chunk_handle wq = weights.adopt(begin, end - begin).value();
///     auto seen = weights.read(wq).value();
///
/// The space is one range, of the whole file from byte 0. Tensors may begin anywhere, because incomplete
/// pages go through the page cache. Stores and `create` are refused with `errc::not_opened`. A chunk that was
/// changed nevertheless stays in the tier above, dirty; `flush` is then refused, and so is a lease that finds
/// no other space.
///
/// The file must not change while it is open. If it becomes shorter, reads return `errc::file_ends`; changed
/// bytes pass unnoticed unless `adopt` received their checksum.
///
/// @par Thread safety   copies from any number of threads; the range is for one tier.
/// @par Errors          the constructor throws `io_error` for a file that cannot be read, `length_error` for
///                      an empty one.
/// @tparam Engine  an `io_engine`.
template <io_engine Engine = posix_io>
class model_file_space {
 public:
  using range_type = memory_range<model_file_space>;
  using fence_type = transfer_fence;
  static constexpr bool is_host_accessible = false;
  static constexpr bool leaves_memory = true;
  /// Chunks are adopted here, not created.
  static constexpr bool is_read_only = true;

  template <class... Args>
  explicit model_file_space(std::string path, model_file_options options = {}, Args&&... engine)
      : file_(std::move(path), {.mode = open_mode::read, .direct = options.direct}),
        bytes_(file_.size().value()),
        queue_(std::move(options.queue), std::forward<Args>(engine)...) {
    if (bytes_ == 0) throw length_error(file_.path() + ": the file is empty; name one with weights in it");
    queue_.register_file(file_);
  }
  model_file_space(const model_file_space&) = delete;
  model_file_space& operator=(const model_file_space&) = delete;

  /// Returns the first `bytes` of the file, at most all of it.
  [[nodiscard]] result<range_type> try_allocate(std::uint64_t bytes, std::uint64_t alignment) noexcept {
    const char* const where = file_.path().c_str();
    if (bytes == 0) return failure{.code = errc::zero_bytes, .where = where};
    if (alignment == 0 || origin % alignment != 0)
      return failure{.code = errc::bad_alignment, .wanted = alignment, .where = where};
    const std::uint64_t left = is_given_ ? 0 : bytes_;
    if (bytes > left) return failure{errc::out_of_bytes, 0, bytes, left, where};
    is_given_ = true;
    // NOLINTNEXTLINE(performance-no-int-to-ptr): the address encodes an offset
    return range_type{reinterpret_cast<std::byte*>(origin), bytes};
  }
  void deallocate(range_type) noexcept { is_given_ = false; }

  /// Returns the file's length in bytes.
  [[nodiscard]] std::uint64_t capacity() const noexcept { return bytes_; }
  [[nodiscard]] std::uint64_t used() const noexcept { return is_given_ ? bytes_ : 0; }
  [[nodiscard]] std::string_view name() const noexcept { return file_.path(); }

  /// @name Copies   see `copy_queue`. `how` is their urgency.
  /// @{
  [[nodiscard]] result<transfer_fence> copy_out_async(std::span<std::byte> to, range_type from,
                                                      std::span<const transfer_fence> after,
                                                      transfer::urgency how = transfer::urgency::demand) {
    const std::uint64_t offset = offset_of(from.data);
    if (from.bytes != to.size())
      return failure{errc::size_mismatch, 0, from.bytes, to.size(), file_.path().c_str()};
    if (offset > bytes_ || from.bytes > bytes_ - offset)
      return failure{.code = errc::dead_range, .wanted = from.bytes, .where = file_.path().c_str()};
    const file_copy copy = read_from(file_, offset, to);
    return queue_.start(std::span(&copy, 1), how, after);
  }
  [[nodiscard]] result<transfer_fence> copy_in_async(range_type, std::span<const std::byte>,
                                                     std::span<const transfer_fence>,
                                                     transfer::urgency = transfer::urgency::write_back) {
    return only_read();
  }
  [[nodiscard]] result<transfer_fence> copy_within_async(range_type, range_type,
                                                         std::span<const transfer_fence>) {
    return only_read();
  }
  /// @}

  [[nodiscard]] const io_file& file() const noexcept { return file_; }
  [[nodiscard]] file_queue<Engine>& queue() noexcept { return queue_; }

 private:
  // The address that means byte 0 of the file. It is not null, because pointer arithmetic from null is
  // undefined.
  static constexpr std::uintptr_t origin = std::uintptr_t{1} << 32;

  [[nodiscard]] static std::uint64_t offset_of(const std::byte* data) noexcept {
    return static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(data) - origin);
  }
  [[nodiscard]] failure only_read() const noexcept {
    return {.code = errc::not_opened, .where = file_.path().c_str()};
  }

  io_file file_;
  std::uint64_t bytes_;
  bool is_given_ = false;
  file_queue<Engine> queue_;  // destroyed before the file, which it may have registered
};

static_assert(memory_space<model_file_space<>>);
static_assert(copy_queue<model_file_space<>, model_file_space<>>);

}  // namespace v0
}  // namespace llmmem
