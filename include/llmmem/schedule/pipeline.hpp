/// @file
/// Pipeline orders as data: the tasks of each device of a pipeline, one after the other.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The direction of a micro-batch.
enum class pipeline_pass : std::uint8_t { forward, backward };

/// The size of a pipeline. The model is cut into `devices * chunks` stages; stage `s` is chunk `s / devices`
/// of device `s % devices`, so each device holds `chunks` separate pieces of the model (virtual stages). With
/// one chunk, stage and device are the same.
struct pipeline_shape {
  std::uint32_t devices = 0;
  std::uint32_t micro_batches = 0;
  std::uint32_t chunks = 1;

  [[nodiscard]] constexpr std::uint64_t stages() const noexcept { return std::uint64_t{devices} * chunks; }
  friend constexpr bool operator==(const pipeline_shape&, const pipeline_shape&) noexcept = default;
};

/// One pass of one micro-batch through one chunk of one device.
struct pipeline_task {
  std::uint32_t device = 0;
  std::uint32_t micro_batch = 0;
  std::uint32_t chunk = 0;
  pipeline_pass pass = pipeline_pass::forward;

  friend constexpr bool operator==(const pipeline_task&, const pipeline_task&) noexcept = default;
};

/// The tasks of each device, in order: `tasks[d]` is device d's list. An order has no times: see
/// `simulate_pipeline`, which also refuses an order that cannot run.
struct pipeline_order {
  pipeline_shape shape{};
  std::vector<std::vector<pipeline_task>> tasks{};

  friend bool operator==(const pipeline_order&, const pipeline_order&) = default;
};

/// The maximum number of tasks in one order: forward and backward of each micro-batch in each stage.
inline constexpr std::uint64_t max_pipeline_tasks = std::uint64_t{1} << 28;

namespace detail {

/// Returns the number of `shape`'s tasks, forward and backward, or refuses the shape.
inline std::uint64_t checked_tasks(const pipeline_shape& shape, const char* who) {
  const auto refuse = [&](const char* what) {
    throw argument_error(std::string(who) + ": " + what + " is 0; a pipeline needs at least one");
  };
  if (shape.devices == 0) refuse("devices");
  if (shape.micro_batches == 0) refuse("micro_batches");
  if (shape.chunks == 0) refuse("chunks");
  const std::uint64_t most = max_pipeline_tasks / 2;
  if (shape.stages() > most || shape.stages() * shape.micro_batches > most) {
    throw length_error(std::string(who) + ": " + std::to_string(shape.devices) + " devices x " +
                       std::to_string(shape.chunks) + " chunks x " + std::to_string(shape.micro_batches) +
                       " micro-batches exceed the limit of " + std::to_string(most) +
                       "; lower one of the three");
  }
  return shape.stages() * shape.micro_batches * 2;
}

/// @throws argument_error  when `shape` has several chunks per device, which the order named `who` cannot
///                         use.
inline void require_one_chunk(const pipeline_shape& shape, const char* who) {
  checked_tasks(shape, who);
  if (shape.chunks != 1) {
    throw argument_error(std::string(who) + ": chunks is " + std::to_string(shape.chunks) +
                         ", but this order has one chunk on each device; use interleaved_1f1b");
  }
}

/// Returns task number `i` of its pass on `device`: micro-batches are in groups of as many as there are
/// devices, and each group passes through all chunks before the next; the backward pass takes the chunks from
/// the last.
[[nodiscard]] constexpr pipeline_task interleaved_task(const pipeline_shape& shape, std::uint32_t device,
                                                       std::uint64_t i, pipeline_pass pass) noexcept {
  const std::uint64_t group = std::uint64_t{shape.devices} * shape.chunks;
  const auto chunk = static_cast<std::uint32_t>(i % group / shape.devices);
  return {.device = device,
          .micro_batch = static_cast<std::uint32_t>(i / group * shape.devices + i % shape.devices),
          .chunk = pass == pipeline_pass::forward ? chunk : shape.chunks - 1 - chunk,
          .pass = pass};
}

/// Returns `warm_up` forward passes, then forward and backward passes alternately, then the remaining
/// backward passes.
template <class TaskAt>
[[nodiscard]] std::vector<pipeline_task> warmed_up(std::uint64_t passes, std::uint64_t warm_up,
                                                   const TaskAt& task) {
  std::vector<pipeline_task> list;
  list.reserve(static_cast<std::size_t>(2 * passes));
  const std::uint64_t before = std::min(passes, warm_up);
  for (std::uint64_t i = 0; i < before; ++i)
    list.push_back(task(i, pipeline_pass::forward));
  for (std::uint64_t i = 0; i < passes; ++i) {
    if (before + i < passes) list.push_back(task(before + i, pipeline_pass::forward));
    list.push_back(task(i, pipeline_pass::backward));
  }
  return list;
}

}  // namespace detail

/// All forward passes, then all backward passes, both by rising micro-batch (GPipe, Huang et al. 2019, as
/// Narayanan et al. 2021 draw it).
///
/// Every device keeps the activations of all m micro-batches at once. With equal stages and free sends the
/// bubble of p devices is (p - 1) / m of the ideal time, as with `one_f_one_b`, which keeps fewer
/// activations.
///
/// @par Complexity   O(tasks).
/// @throws argument_error  for a 0 in the shape, or more than one chunk.
/// @throws length_error    past `max_pipeline_tasks`.
[[nodiscard]] inline pipeline_order gpipe(const pipeline_shape& shape) {
  detail::require_one_chunk(shape, "gpipe");
  pipeline_order order{.shape = shape, .tasks = {}};
  for (std::uint32_t device = 0; device < shape.devices; ++device) {
    order.tasks.push_back(
        detail::warmed_up(shape.micro_batches, shape.micro_batches, [&](std::uint64_t i, pipeline_pass pass) {
          return detail::interleaved_task(shape, device, i, pass);
        }));
  }
  return order;
}

/// One forward, one backward alternately, after p - 1 - i forward passes on device i (PipeDream-flush:
/// Narayanan et al. 2021, arXiv 2006.09503; the order is PipeDream's 1F1B, Narayanan et al. 2019).
///
/// Device i keeps the activations of at most p - i micro-batches. With equal stages and free sends no order
/// is faster (`pipeline_bound_ns`); otherwise some order may be, and `gpipe` hides a long send better.
///
/// @par Complexity   O(tasks).
/// @throws argument_error  for a 0 in the shape, or more than one chunk.
/// @throws length_error    past `max_pipeline_tasks`.
[[nodiscard]] inline pipeline_order one_f_one_b(const pipeline_shape& shape) {
  detail::require_one_chunk(shape, "one_f_one_b");
  pipeline_order order{.shape = shape, .tasks = {}};
  for (std::uint32_t device = 0; device < shape.devices; ++device) {
    order.tasks.push_back(detail::warmed_up(shape.micro_batches, shape.devices - 1 - device,
                                            [&](std::uint64_t i, pipeline_pass pass) {
                                              return detail::interleaved_task(shape, device, i, pass);
                                            }));
  }
  return order;
}

/// 1F1B over v chunks per device: the bubble shrinks by the factor v, the sends grow by it (Narayanan et al.,
/// SC21, arXiv 2104.04473, section 2.2; the warm-up of 2 (p - 1 - i) + (v - 1) p passes is Megatron-LM's).
///
/// With equal chunks and free sends the bubble is (p - 1) / (v m) of the ideal time. Device i keeps at most 2
/// (p - 1 - i) + (v - 1) p + 1 activations, each of one chunk. With one chunk the order is `one_f_one_b`.
///
/// @par Complexity   O(tasks).
/// @throws argument_error  for a 0 in the shape, or when the number of micro-batches is not a multiple of the
///                         devices, because chunks change every p micro-batches.
/// @throws length_error    past `max_pipeline_tasks`.
[[nodiscard]] inline pipeline_order interleaved_1f1b(const pipeline_shape& shape) {
  detail::checked_tasks(shape, "interleaved_1f1b");
  if (shape.chunks == 1) return one_f_one_b(shape);
  if (shape.micro_batches % shape.devices != 0) {
    throw argument_error("interleaved_1f1b: micro_batches " + std::to_string(shape.micro_batches) +
                         " is not a multiple of devices " + std::to_string(shape.devices) + "; " +
                         std::to_string(shape.micro_batches / shape.devices * shape.devices + shape.devices) +
                         " is the next multiple");
  }
  pipeline_order order{.shape = shape, .tasks = {}};
  const std::uint64_t passes = std::uint64_t{shape.micro_batches} * shape.chunks;
  for (std::uint32_t device = 0; device < shape.devices; ++device) {
    const std::uint64_t warm_up =
        2 * std::uint64_t{shape.devices - 1 - device} + std::uint64_t{shape.chunks - 1} * shape.devices;
    order.tasks.push_back(detail::warmed_up(passes, warm_up, [&](std::uint64_t i, pipeline_pass pass) {
      return detail::interleaved_task(shape, device, i, pass);
    }));
  }
  return order;
}

}  // namespace v0
}  // namespace llmmem
