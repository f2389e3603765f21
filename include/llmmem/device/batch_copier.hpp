/// @file
/// `batch_copier`: copies many pieces in the way that a `copy_plan` selects.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/device/device_runtime.hpp>
#include <llmmem/device/errors.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/transfer/copy_plan.hpp>
#include <llmmem/transfer/copy_task.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// A `device_runtime` that copies many pieces in one call.
///
/// - `copy_many(to, from, bytes, count, stream)`: arrays of pointers and lengths, read before it returns. The
///   sources are read in the order of the stream.
/// - `copy_evenly(to, to_stride, from, from_stride, bytes, count, stream)`: `count` pieces of equal length.
/// - `takes_many(stream)`: whether it accepts such a call now. (CUDA: not during a capture of the stream,
///   because the copy would be missing from the graph; nor on the legacy default stream.)
template <class R>
concept batching_runtime =
    device_runtime<R> && requires(const R& run, typename R::stream stream, void* const* to,
                                  const void* const* from, const std::size_t* bytes, std::size_t count) {
      { run.copy_many(to, from, bytes, count, stream) } noexcept -> std::same_as<device_status>;
      {
        run.copy_evenly(*to, count, *from, count, count, count, stream)
      } noexcept -> std::same_as<device_status>;
      { run.takes_many(stream) } noexcept -> std::same_as<bool>;
    };

/// Removes pieces of no bytes. In place, in their order. O(n). @return how many remain.
[[nodiscard]] inline std::size_t drop_empty_pieces(std::span<copy_task> pieces) noexcept {
  return static_cast<std::size_t>(std::ranges::remove(pieces, std::uint64_t{0}, &copy_task::bytes).begin() -
                                  pieces.begin());
}

/// Joins pieces that are adjacent at both ends, and removes those of no bytes. In place, in their order.
/// O(n). @pre they are of one allocation at each end. @return how many remain.
[[nodiscard]] inline std::size_t join_pieces(std::span<copy_task> pieces) noexcept {
  std::size_t last = 0;
  for (const copy_task& each : pieces) {
    if (each.bytes == 0) continue;
    if (last != 0) {
      copy_task& before = pieces[last - 1];
      if (before.from + before.bytes == each.from && before.to + before.bytes == each.to) {
        before.bytes += each.bytes;
        continue;
      }
    }
    pieces[last++] = each;
  }
  return last;
}

/// Distances between pieces of one length.
struct even_pieces {
  std::uint64_t from_stride = 0;
  std::uint64_t to_stride = 0;
};

/// Returns the distances if two or more pieces of one length are evenly spaced and ascending at both ends;
/// else nothing. O(n).
[[nodiscard]] inline std::optional<even_pieces> even_pieces_of(std::span<const copy_task> pieces) noexcept {
  if (pieces.size() < 2) return std::nullopt;
  const auto address = [](const std::byte* at) { return reinterpret_cast<std::uintptr_t>(at); };
  const std::uint64_t bytes = pieces[0].bytes;
  const even_pieces apart{address(pieces[1].from) - address(pieces[0].from),
                          address(pieces[1].to) - address(pieces[0].to)};
  constexpr std::uint64_t most = std::uint64_t{1} << 31;  // the largest pitch that the driver accepts
  if (apart.from_stride < bytes || apart.from_stride >= most || apart.to_stride < bytes ||
      apart.to_stride >= most)
    return std::nullopt;
  for (std::size_t i = 1; i < pieces.size(); ++i) {
    if (pieces[i].bytes != bytes ||
        address(pieces[i].from) - address(pieces[i - 1].from) != apart.from_stride ||
        address(pieces[i].to) - address(pieces[i - 1].to) != apart.to_stride)
      return std::nullopt;
  }
  return apart;
}

/// The direction of the pieces of a batch, and their memory.
///
/// A driver refuses one call across adjacent allocations, and one across two registrations of pinned memory
/// (chunks of a `pinned_source`). So pieces become one call, joined or strided, only if the route names the
/// memory of both ends; otherwise each piece stays separate.
struct copy_route {
  copy_direction direction = copy_direction::up;
  std::span<const std::byte> from{};  ///< one allocation or registration, with all sources; empty: several
  std::span<std::byte> to{};          ///< the same with all destinations
};

/// The result of a copy.
struct batch_copy {
  copy_way way = copy_way::loop;
  std::uint64_t pieces = 0;  ///< after adjacent ones were joined
};

/// Copies pieces on a stream by its plan: joins adjacent pieces if the route names their memory, then takes
/// the fastest of the available ways. Never a batch during a capture of the stream.
///
///     batch_copier<cuda_runtime> copies(plan);
///     copies.copy(pieces, {copy_direction::up}, stream).value();            // of several allocations
///     copies.copy(pieces, {copy_direction::down, cache, staging}, stream,   // of one each: joined, strided
///                 [&](std::span<const copy_task> all) {
///       return copy_few(device_executor(stream, {.blocks = 16}), all);      // by nvcc: a kernel as well
///     }).value();
///
/// Give pieces in pinned memory by the address that devices use, `pinned_source::device_address`, where it
/// differs from the host's (CUDA: cudaDevAttrCanUseHostPointerForRegisteredMem is 0, as under WSL2). With
/// host addresses a batch or a kernel would fault there, and the process would lose the device;
/// `measured_copy_plan` measures neither, so a plan of such a device uses neither for copies up or down.
///
/// @par Complexity      O(pieces) on the host; allocates only for more pieces than any copy before.
/// @par Thread safety   one thread at a time.
/// @par Errors          `errc::out_of_range`, before anything is copied, for a piece outside the memory that
///      the route names: index the piece, found the offset at which the piece begins, wanted the bytes that
///      the route names. `errc::device_failed` if the driver refuses, index its status; in a loop, earlier
///      pieces are in flight. Passes on what a kernel's launch returns.
template <batching_runtime Runtime>
class batch_copier {
 public:
  explicit batch_copier(copy_plan plan = {}, Runtime runtime = {})
      : plan_(std::move(plan)), runtime_(runtime) {}

  /// Copies without a kernel. Joins `pieces` in place. @pre no byte is written twice, or both read and
  /// written.
  result<batch_copy> copy(std::span<copy_task> pieces, const copy_route& route,
                          stream_argument<typename Runtime::stream> stream) {
    return copy_by(pieces, route, stream.get(), static_cast<no_kernel*>(nullptr));
  }
  /// `kernel(pieces)` launches a kernel on the stream, if that is the fastest way, and returns the launch's
  /// result.
  template <class Kernel>
    requires std::same_as<std::invoke_result_t<Kernel&, std::span<const copy_task>>, result<void>>
  result<batch_copy> copy(std::span<copy_task> pieces, const copy_route& route,
                          stream_argument<typename Runtime::stream> stream, Kernel kernel) {
    return copy_by(pieces, route, stream.get(), &kernel);
  }

  [[nodiscard]] const copy_plan& plan() const noexcept { return plan_; }

 private:
  struct no_kernel {
    result<void> operator()(std::span<const copy_task>) const noexcept { return {}; }
  };

  template <class Kernel>
  result<batch_copy> copy_by(std::span<copy_task> all, const copy_route& route,
                             typename Runtime::stream stream, Kernel* kernel) {
    if (auto inside = check(all, route); !inside) return inside.error();
    const bool is_of_one = !route.from.empty() && !route.to.empty();
    const std::span<copy_task> pieces = all.first(is_of_one ? join_pieces(all) : drop_empty_pieces(all));
    if (pieces.empty()) return batch_copy{};
    std::uint64_t bytes = 0;
    for (const copy_task& each : pieces)
      bytes += each.bytes;
    const std::optional<even_pieces> apart = is_of_one ? even_pieces_of(pieces) : std::nullopt;
    const copy_ways_open open{.batch = runtime_.takes_many(stream),
                              .strided = apart.has_value(),
                              .kernel = !std::same_as<Kernel, no_kernel>};
    const copy_way way = plan_.choose({route.direction, bytes / pieces.size(), pieces.size()}, open);
    result<void> done;
    switch (way) {
      case copy_way::kernel:
        done = (*kernel)(pieces);
        break;
      case copy_way::strided:
        done = told(runtime_.copy_evenly(pieces[0].to, static_cast<std::size_t>(apart->to_stride),
                                         pieces[0].from, static_cast<std::size_t>(apart->from_stride),
                                         static_cast<std::size_t>(pieces[0].bytes), pieces.size(), stream),
                    pieces.size());
        break;
      case copy_way::batch:
        done = copy_batched(pieces, stream);
        break;
      case copy_way::loop:
        done = copy_each(pieces, stream);
    }
    if (!done) return done.error();
    return batch_copy{way, pieces.size()};
  }

  result<void> copy_each(std::span<const copy_task> pieces, typename Runtime::stream stream) const noexcept {
    for (const copy_task& each : pieces) {
      const auto bytes = static_cast<std::size_t>(each.bytes);
      if (auto done = told(runtime_.copy(each.to, each.from, bytes, stream), pieces.size()); !done)
        return done;
    }
    return {};
  }
  result<void> copy_batched(std::span<const copy_task> pieces, typename Runtime::stream stream) {
    to_.clear();
    from_.clear();
    bytes_.clear();
    for (const copy_task& each : pieces) {
      to_.push_back(each.to);
      from_.push_back(each.from);
      bytes_.push_back(static_cast<std::size_t>(each.bytes));
    }
    return told(runtime_.copy_many(to_.data(), from_.data(), bytes_.data(), pieces.size(), stream),
                pieces.size());
  }
  /// Checks that every piece is inside the memory that the route names.
  [[nodiscard]] static result<void> check(std::span<const copy_task> pieces,
                                          const copy_route& route) noexcept {
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const copy_task& each = pieces[i];
      if (!lies_in(route.from, each.from, each.bytes)) return outside(i, each.from, route.from, true);
      if (!lies_in(route.to, each.to, each.bytes)) return outside(i, each.to, route.to, false);
    }
    return {};
  }
  [[nodiscard]] static std::uint64_t distance(std::span<const std::byte> whole,
                                              const std::byte* at) noexcept {
    return reinterpret_cast<std::uintptr_t>(at) - reinterpret_cast<std::uintptr_t>(whole.data());
  }
  [[nodiscard]] static bool lies_in(std::span<const std::byte> whole, const std::byte* at,
                                    std::uint64_t bytes) noexcept {
    if (whole.empty() || bytes == 0) return true;
    const std::uint64_t begin = distance(whole, at);  // wraps around below it: then it is larger
    return begin <= whole.size() && bytes <= whole.size() - begin;
  }
  [[nodiscard]] static failure outside(std::size_t piece, const std::byte* at,
                                       std::span<const std::byte> whole, bool is_source) noexcept {
    return {.code = errc::out_of_range,
            .index = static_cast<std::uint32_t>(piece),
            .wanted = whole.size(),
            .found = distance(whole, at),
            .where = is_source ? "batch_copier: from" : "batch_copier: to"};
  }
  [[nodiscard]] static result<void> told(device_status status, std::uint64_t pieces) noexcept {
    if (status == 0) return {};
    return failure{errc::device_failed, status, pieces, 0, "batch_copier"};
  }

  copy_plan plan_;
  Runtime runtime_;
  std::vector<void*> to_{};
  std::vector<const void*> from_{};
  std::vector<std::size_t> bytes_{};
};

}  // namespace v0
}  // namespace llmmem
