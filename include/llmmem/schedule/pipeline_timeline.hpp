/// @file
/// The times of a pipeline order's tasks, its bubbles, and the number of weight versions alive.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/schedule/detail/nanoseconds.hpp>
#include <llmmem/schedule/detail/pipeline_tasks.hpp>
#include <llmmem/schedule/pipeline.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Times of tasks and sends, in nanoseconds. One entry per stage, see `pipeline_shape`.
struct pipeline_costs {
  std::vector<std::uint64_t> forward_ns{};
  std::vector<std::uint64_t> backward_ns{};
  std::uint64_t send_ns = 0;  ///< from a stage to the next or back, if they are on different devices
};

/// The time of a task.
struct task_span {
  pipeline_task task{};
  std::uint64_t start_ns = 0;
  std::uint64_t finish_ns = 0;
};

/// An order in virtual time. All lists have one entry per device.
struct pipeline_timeline {
  std::vector<std::vector<task_span>> tasks{};  ///< in the same order as `pipeline_order::tasks`
  std::uint64_t makespan_ns = 0;                ///< when the last task ends
  std::vector<std::uint64_t> busy_ns{};
  std::vector<std::uint64_t> bubble_ns{};  ///< makespan minus busy
  /// The maximum number of activations at once: forward passes begun whose backward pass has not ended, each
  /// of one micro-batch in one chunk.
  std::vector<std::uint64_t> peak_activations{};
};

/// The weights that a task uses when each backward pass updates its stage at once (PipeDream without flush).
struct weight_use {
  std::uint64_t version = 0;  ///< updates of the stage before the micro-batch's forward pass began
  std::uint64_t live = 0;     ///< versions of the stage's weights kept while the task runs
};

namespace detail {

inline void check_costs(const pipeline_shape& shape, const pipeline_costs& costs, const char* who) {
  checked_tasks(shape, who);
  const auto check = [&](const std::vector<std::uint64_t>& list, const char* name) {
    if (list.size() != shape.stages()) {
      throw argument_error(std::string(who) + ": " + name + " has " + std::to_string(list.size()) +
                           " entries, the pipeline " + std::to_string(shape.stages()) + " stages");
    }
  };
  check(costs.forward_ns, "forward_ns");
  check(costs.backward_ns, "backward_ns");
  // No chain of tasks is longer than all tasks with a send after each, so later sums cannot overflow.
  std::uint64_t chain = multiply_ns(costs.send_ns, 2 * shape.stages() * shape.micro_batches, who);
  for (std::size_t stage = 0; stage < shape.stages(); ++stage) {
    const std::uint64_t both = add_ns(costs.forward_ns[stage], costs.backward_ns[stage], who);
    chain = add_ns(chain, multiply_ns(both, shape.micro_batches, who), who);
  }
}

}  // namespace detail

/// Runs an order in virtual time: each device runs its tasks one after the other, each as soon as its inputs
/// have arrived. The forward pass of a stage waits for the forward pass of the previous stage, the backward
/// pass for the backward pass of the next stage and for its own forward pass. A send takes `send_ns` but no
/// device's time, and any number of sends run at once.
///
/// @par Complexity   O(tasks) time and memory.
/// @throws argument_error  when the order lacks a task, has one twice, or deadlocks because devices wait for
///                         each other (the text names the tasks); when the costs have the wrong length.
/// @throws length_error    when times pass 2^63 - 1 ns.
[[nodiscard]] inline pipeline_timeline simulate_pipeline(const pipeline_order& order,
                                                         const pipeline_costs& costs) {
  static constexpr const char* who = "simulate_pipeline";
  const detail::task_places places(order, who);
  detail::check_costs(order.shape, costs, who);
  const std::uint32_t devices = order.shape.devices;

  pipeline_timeline timeline;
  timeline.tasks.resize(devices);
  timeline.busy_ns.assign(devices, 0);
  timeline.peak_activations.assign(devices, 0);
  std::vector<std::uint64_t> live(devices, 0);
  const auto done = [&](const pipeline_task& task) {
    return places.of(task) < timeline.tasks[task.device].size();
  };

  const auto run_next = [&](std::uint32_t device) {  // returns whether it could
    auto& spans = timeline.tasks[device];
    if (spans.size() == order.tasks[device].size()) return false;
    const pipeline_task& task = order.tasks[device][spans.size()];
    std::uint64_t start = spans.empty() ? 0 : spans.back().finish_ns;
    const detail::task_inputs inputs(order.shape, task);
    for (unsigned i = 0; i < inputs.count; ++i) {
      const pipeline_task& input = i == 0 ? inputs.first : inputs.second;
      if (!done(input)) return false;
      const std::uint64_t send = input.device == device ? 0 : costs.send_ns;
      start = std::max(start, timeline.tasks[input.device][places.of(input)].finish_ns + send);
    }
    const bool forward = task.pass == pipeline_pass::forward;
    const std::uint64_t takes = (forward ? costs.forward_ns : costs.backward_ns)[places.stage(task)];
    spans.push_back({.task = task, .start_ns = start, .finish_ns = start + takes});
    timeline.busy_ns[device] += takes;
    live[device] += forward ? 1 : ~std::uint64_t{0};
    timeline.peak_activations[device] = std::max(timeline.peak_activations[device], live[device]);
    timeline.makespan_ns = std::max(timeline.makespan_ns, start + takes);
    return true;
  };

  // Tries a blocked device again after a neighbour has advanced, because it can wait only for a neighbour.
  std::vector<std::uint32_t> ask;
  for (std::uint32_t device = devices; device-- > 0;)
    ask.push_back(device);
  while (!ask.empty()) {
    const std::uint32_t device = ask.back();
    ask.pop_back();
    bool went_on = false;
    while (run_next(device))
      went_on = true;
    if (went_on && devices > 1) {
      ask.push_back((device + devices - 1) % devices);
      ask.push_back((device + 1) % devices);
    }
  }

  for (std::uint32_t device = 0; device < devices; ++device) {
    const std::size_t next = timeline.tasks[device].size();
    if (next == order.tasks[device].size()) continue;
    const detail::task_inputs inputs(order.shape, order.tasks[device][next]);
    const pipeline_task& missing = done(inputs.first) ? inputs.second : inputs.first;
    throw argument_error(std::string(who) + ": the order deadlocks: task " + std::to_string(next) +
                         " of device " + std::to_string(device) + ", " +
                         detail::task_text(order.tasks[device][next]) + ", waits for " +
                         detail::task_text(missing) + ", which never begins; list that earlier");
  }
  for (const std::uint64_t busy : timeline.busy_ns)
    timeline.bubble_ns.push_back(timeline.makespan_ns - busy);
  return timeline;
}

/// Returns a time that no order of `shape` can beat. A device runs the 2m passes of each of its stages one
/// after the other. Its first pass waits until a micro-batch has come down the previous stages; after its
/// last pass, a backward pass, the gradient returns up through these.
///
/// `one_f_one_b` and `gpipe` meet it when stages are equal and sends are free, because the last device is
/// then never idle between its first task and its last.
///
/// @par Complexity   O(stages).
/// @throws argument_error, length_error as `simulate_pipeline`.
[[nodiscard]] inline std::uint64_t pipeline_bound_ns(const pipeline_shape& shape,
                                                     const pipeline_costs& costs) {
  detail::check_costs(shape, costs, "pipeline_bound_ns");
  std::vector<std::uint64_t> work(shape.devices, 0);
  for (std::size_t stage = 0; stage < shape.stages(); ++stage)
    work[stage % shape.devices] += shape.micro_batches * (costs.forward_ns[stage] + costs.backward_ns[stage]);
  std::uint64_t bound = 0;
  std::uint64_t above = 0;  // time down to the device's first stage and back
  for (std::size_t device = 0; device < shape.devices; ++device) {
    bound = std::max(bound, above + work[device]);
    above += costs.forward_ns[device] + costs.backward_ns[device] + 2 * costs.send_ns;
  }
  std::uint64_t chain = 0;  // one micro-batch through all stages
  for (std::size_t stage = 0; stage < shape.stages(); ++stage)
    chain += costs.forward_ns[stage] + costs.backward_ns[stage];
  if (shape.devices > 1) chain += 2 * (shape.stages() - 1) * costs.send_ns;
  return std::max(bound, chain);
}

/// Returns the version of the weights that each task uses, and how many versions its stage keeps meanwhile.
/// Every backward pass ends with an update of its stage, and a micro-batch's two passes use the same weights:
/// PipeDream's weight stashing (Narayanan et al., SOSP 2019). The lists are parallel to `order.tasks`.
///
/// A stage keeps the latest version, and each version that a begun micro-batch still needs; a backward pass
/// releases its own version when it makes the new one. Under `one_f_one_b`, stage i of n keeps at most n - i.
///
/// @par Complexity   O(tasks).
/// @throws argument_error  as `simulate_pipeline`, and for a backward pass before its forward pass.
[[nodiscard]] inline std::vector<std::vector<weight_use>> stashed_versions(const pipeline_order& order) {
  static constexpr const char* who = "stashed_versions";
  const detail::task_places places(order, who);
  std::vector<std::vector<weight_use>> uses(order.shape.devices);
  for (std::uint32_t device = 0; device < order.shape.devices; ++device) {
    struct stage_versions {
      std::uint64_t latest = 0;
      std::vector<std::uint64_t> readers{0};  // of each version: micro-batches in flight
      std::uint64_t kept = 1;                 // versions with readers, and the latest
    };
    std::vector<stage_versions> chunks(order.shape.chunks);
    for (const pipeline_task& task : order.tasks[device]) {
      stage_versions& stage = chunks[task.chunk];
      if (task.pass == pipeline_pass::forward) {
        ++stage.readers[stage.latest];
        uses[device].push_back({.version = stage.latest, .live = stage.kept});
        continue;
      }
      const std::uint32_t forward =
          places.of({.device = device, .micro_batch = task.micro_batch, .chunk = task.chunk});
      if (forward >= uses[device].size()) {
        throw argument_error(std::string(who) + ": " + detail::task_text(task) +
                             " comes before its forward pass; list that pass earlier");
      }
      const std::uint64_t version = uses[device][forward].version;
      uses[device].push_back({.version = version, .live = stage.kept});
      // The version that was the latest stays only for its readers.
      if (--stage.readers[version] == 0 && version != stage.latest) --stage.kept;
      if (stage.readers[stage.latest] == 0) --stage.kept;
      ++stage.latest;
      stage.readers.push_back(0);
      ++stage.kept;
    }
  }
  return uses;
}

}  // namespace v0
}  // namespace llmmem
