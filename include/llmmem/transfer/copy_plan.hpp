/// @file
/// `copy_plan`: chooses the fastest of several ways to copy many pieces, from measurements on the device.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// A way to copy many pieces.
enum class copy_way : std::uint8_t {
  loop,     ///< one driver call per piece
  batch,    ///< one call for all: cudaMemcpyBatchAsync
  strided,  ///< one call for all, if they are evenly spaced: cudaMemcpy2DAsync
  kernel    ///< one kernel, whose threads copy: `copy_batch`, `copy_few`
};
inline constexpr std::size_t copy_ways = 4;

/// The direction of a copy.
enum class copy_direction : std::uint8_t { up, down, within };
inline constexpr std::size_t copy_directions = 3;

/// Whether the device itself dereferences host addresses in a copy. Some devices see pinned memory at the
/// host's own addresses; on others this copy would fault and end the context, so it uses the device's
/// addresses of that memory. The driver's own copies handle that themselves.
[[nodiscard]] constexpr bool follows_host_addresses(copy_way way, copy_direction direction) noexcept {
  return direction != copy_direction::within && (way == copy_way::batch || way == copy_way::kernel);
}

/// The properties of a copy on which the choice depends.
struct copy_shape {
  copy_direction direction = copy_direction::up;
  std::uint64_t bytes = 0;  ///< average bytes of a piece
  std::uint64_t count = 0;  ///< number of pieces
};

/// The available ways: those that the runtime has, that the pieces allow, and that a stream under capture
/// accepts (no batch: the capture would continue without it, and the copy would be missing from the graph).
struct copy_ways_open {
  bool batch = false;
  bool strided = false;
  bool kernel = false;

  [[nodiscard]] constexpr bool operator[](copy_way way) const noexcept {
    return way == copy_way::loop || (way == copy_way::batch && batch) ||
           (way == copy_way::strided && strided) || (way == copy_way::kernel && kernel);
  }
};

/// The points at which a plan is measured.
struct copy_grid {
  std::vector<std::uint64_t> bytes{4096, 16384, 65536, 262144, 1048576, 4194304};
  std::vector<std::uint64_t> counts{1, 8, 64, 512, 4096};
  std::uint64_t most_bytes = std::uint64_t{1} << 30;  ///< bytes of a measurement: larger ones are skipped
};

/// Times of every way, direction, size and count, from which the fastest way is chosen. No way is always the
/// best: a device's copy engines cost microseconds per piece, kernels take processors from computing, and the
/// crossover depends on the device and on the count as much as on the size.
///
///     copy_plan plan = copy_plan::measured({}, [&](copy_way way, const copy_shape& shape) { ... });  // ns
///     std::string text = plan.text();  // kept with the engine's settings
///     copy_plan again = copy_plan::parsed(text);
///     copy_way way = again.choose({copy_direction::up, 32768, 200}, {.batch = true, .kernel = true});
///
/// Between measured points, times are interpolated linearly by size and by count: exact for a cost that is a
/// sum of shares for calls, pieces and bytes. Above them, and where a point was skipped, they grow with bytes
/// and count; below, they stay constant. Without measurements, and for unmeasured cases, it chooses by
/// published experience: see `choose`.
///
/// @par Complexity      `choose` O(log of the grid).
/// @par Thread safety   const calls may run concurrently.
/// @par Errors          `measured` throws `argument_error` for a grid that does not ascend, or has more than
///   4096 points, `parsed` throws `format_error` with the line.
class copy_plan {
 public:
  /// Constructs a plan without measurements.
  copy_plan() = default;

  /// Calls `nanoseconds(way, shape)` for each point of the grid: it returns the time of one copy of that
  /// shape, or nothing if that way is impossible.
  template <class Measure>
  [[nodiscard]] static copy_plan measured(copy_grid grid, Measure nanoseconds) {
    copy_plan made(std::move(grid));
    for (std::size_t way = 0; way < copy_ways; ++way) {
      for (std::size_t direction = 0; direction < copy_directions; ++direction) {
        for (std::size_t b = 0; b < made.grid_.bytes.size(); ++b) {
          for (std::size_t c = 0; c < made.grid_.counts.size(); ++c) {
            const copy_shape shape{static_cast<copy_direction>(direction), made.grid_.bytes[b],
                                   made.grid_.counts[c]};
            if (shape.bytes > made.grid_.most_bytes / shape.count) continue;
            const std::optional<double> ns = nanoseconds(static_cast<copy_way>(way), shape);
            constexpr double limit_ns = 1e15;  // eleven days
            if (ns && *ns > 0 && *ns < limit_ns)
              made.time(static_cast<copy_way>(way), shape.direction, b, c) = *ns;
          }
        }
      }
    }
    return made;
  }
  /// Parses the output of `text`.
  [[nodiscard]] static copy_plan parsed(std::string_view text);
  [[nodiscard]] std::string text() const;

  /// Returns the fastest available way by the measurements. Without any: one piece by its own call; evenly
  /// spaced pieces by one strided call; more than 16 pieces below 32 KiB each by the kernel; otherwise by a
  /// batch, or one after the other. (vllm#42212, vllm#57555: on an H100 batches of pieces below 28 KiB ran at
  /// 4 to 7 GB/s, at 64 KiB at 51; on an A30 kernels won from about 64 pieces on.)
  [[nodiscard]] copy_way choose(const copy_shape& shape, const copy_ways_open& open) const noexcept;
  /// Returns the interpolated time of a copy in nanoseconds; nothing if that was not measured.
  [[nodiscard]] std::optional<double> nanoseconds(copy_way way, const copy_shape& shape) const noexcept;

  [[nodiscard]] bool is_measured() const noexcept { return !times_.empty(); }
  [[nodiscard]] const copy_grid& grid() const noexcept { return grid_; }

 private:
  explicit copy_plan(copy_grid grid);

  [[nodiscard]] std::size_t place(copy_way way, copy_direction direction, std::size_t b,
                                  std::size_t c) const noexcept {
    const std::size_t of_way =
        static_cast<std::size_t>(way) * copy_directions + static_cast<std::size_t>(direction);
    return (of_way * grid_.bytes.size() + b) * grid_.counts.size() + c;
  }
  /// The time of a point of the grid: as measured there, or at fewer pieces or bytes, scaled by their ratio;
  /// 0 if none was.
  [[nodiscard]] double time_near(copy_way way, copy_direction direction, std::size_t b,
                                 std::size_t c) const noexcept;
  [[nodiscard]] double& time(copy_way way, copy_direction direction, std::size_t b, std::size_t c) noexcept {
    return times_[place(way, direction, b, c)];
  }

  static constexpr std::size_t most_points = 4096;

  copy_grid grid_{{}, {}, 0};
  std::vector<double> times_{};  // nanoseconds; 0: not measured
};

}  // namespace v0
}  // namespace llmmem

#include <llmmem/transfer/detail/copy_plan_body.hpp>
