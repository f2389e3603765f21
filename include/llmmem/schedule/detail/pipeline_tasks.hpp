/// @file
/// Numbers the tasks of a pipeline order: their places, and the tasks that must end before each.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/schedule/pipeline.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

[[nodiscard]] inline std::string task_text(const pipeline_task& task) {
  return std::string(task.pass == pipeline_pass::forward ? "forward" : "backward") + " of micro-batch " +
         std::to_string(task.micro_batch) + " in chunk " + std::to_string(task.chunk) + " on device " +
         std::to_string(task.device);
}

/// Numbers the tasks of a shape, and finds the place of each in an order, which must contain it exactly once.
class task_places {
 public:
  static constexpr std::uint32_t nowhere = ~std::uint32_t{0};

  task_places(const pipeline_order& order, const char* who) : shape_(order.shape) {
    const std::uint64_t count = checked_tasks(shape_, who);
    if (order.tasks.size() != shape_.devices) {
      throw argument_error(std::string(who) + ": the order lists tasks of " +
                           std::to_string(order.tasks.size()) + " devices, but its shape has " +
                           std::to_string(shape_.devices));
    }
    places_.assign(static_cast<std::size_t>(count), nowhere);
    for (std::uint32_t device = 0; device < shape_.devices; ++device) {
      for (std::size_t i = 0; i < order.tasks[device].size(); ++i)
        list(order.tasks[device][i], device, i, who);
    }
    for (std::uint64_t i = 0; i < count; ++i) {
      if (places_[i] == nowhere)
        throw argument_error(std::string(who) + ": the order lacks " + task_text(named(i)));
    }
  }

  /// Returns the place of a task in its device's list.
  [[nodiscard]] std::uint32_t of(const pipeline_task& task) const noexcept { return places_[number(task)]; }

  [[nodiscard]] std::size_t number(const pipeline_task& task) const noexcept {
    const std::uint64_t in_stage =
        2 * std::uint64_t{task.micro_batch} + static_cast<std::uint64_t>(task.pass);
    return static_cast<std::size_t>(stage(task) * 2 * shape_.micro_batches + in_stage);
  }

  [[nodiscard]] std::uint64_t stage(const pipeline_task& task) const noexcept {
    return std::uint64_t{task.chunk} * shape_.devices + task.device;
  }

 private:
  void list(const pipeline_task& task, std::uint32_t device, std::size_t place, const char* who) {
    if (task.device != device || task.chunk >= shape_.chunks || task.micro_batch >= shape_.micro_batches ||
        task.pass > pipeline_pass::backward) {
      throw argument_error(std::string(who) + ": task " + std::to_string(place) + " of device " +
                           std::to_string(device) + " is " + task_text(task) +
                           ", which its shape does not have");
    }
    std::uint32_t& known = places_[number(task)];
    if (known != nowhere)
      throw argument_error(std::string(who) + ": the order lists a task twice: " + task_text(task));
    known = static_cast<std::uint32_t>(place);
  }

  [[nodiscard]] pipeline_task named(std::uint64_t number) const noexcept {
    const std::uint64_t stage = number / (2 * std::uint64_t{shape_.micro_batches});
    const std::uint64_t in_stage = number % (2 * std::uint64_t{shape_.micro_batches});
    return {.device = static_cast<std::uint32_t>(stage % shape_.devices),
            .micro_batch = static_cast<std::uint32_t>(in_stage / 2),
            .chunk = static_cast<std::uint32_t>(stage / shape_.devices),
            .pass = static_cast<pipeline_pass>(in_stage % 2)};
  }

  pipeline_shape shape_;
  std::vector<std::uint32_t> places_;
};

/// The tasks that must end before a task may begin: at most two, the second only for backward passes.
struct task_inputs {
  pipeline_task first, second;
  unsigned count = 0;

  task_inputs(const pipeline_shape& shape, const pipeline_task& task) noexcept {
    const auto add = [this](const pipeline_task& input) { (count++ == 0 ? first : second) = input; };
    const auto at = [&](std::uint64_t stage, pipeline_pass pass) {
      return pipeline_task{.device = static_cast<std::uint32_t>(stage % shape.devices),
                           .micro_batch = task.micro_batch,
                           .chunk = static_cast<std::uint32_t>(stage / shape.devices),
                           .pass = pass};
    };
    const std::uint64_t stage = std::uint64_t{task.chunk} * shape.devices + task.device;
    if (task.pass == pipeline_pass::forward) {
      if (stage > 0) add(at(stage - 1, pipeline_pass::forward));
    } else {
      add(at(stage, pipeline_pass::forward));
      if (stage + 1 < shape.stages()) add(at(stage + 1, pipeline_pass::backward));
    }
  }
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
