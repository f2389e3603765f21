#pragma once

#include <llmmem/async_checkpointer.hpp>
#include <llmmem/checkpoint/tiered_load.hpp>
#include <llmmem/checkpoint/tiered_view.hpp>
#include <llmmem/eviction/min.hpp>
#include <llmmem/prefetch_schedule.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/tiering/tiered_tensors.hpp>
#include <llmmem/transfer/file_space.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

struct training_run {
  std::string tier, checkpoints;           // a file for the state, and a folder
  std::uint64_t memory_bytes, file_bytes;  // of tier 0; of the file: three times the state
  llmmem::chunk_mapping_options chunks{};
  std::uint64_t steps = 1000, save_every = 20;
  // Gives the bytes of a tensor from `offset` on their initial values at step 0, and their next ones at any
  // other.
  std::function<void(std::uint64_t step, std::uint32_t tensor, std::uint64_t offset, std::span<std::byte>)>
      change;
};

// Runs to the last step, from the newest checkpoint if there is one. Returns false if a save failed.
inline bool train_from_disk(const training_run& run, const std::vector<llmmem::state_tensor>& described) {
  using namespace llmmem;
  using disk_buffer = tiered_buffer<tier<host_space, min_eviction>, file_space<>>;
  struct traits : checkpointer_traits {
    using view_type = tiered_state_view<disk_buffer>;
  };
  host_space memory({.budget = run.memory_bytes});
  file_space<> disk(run.tier, {.budget = run.file_bytes});
  disk_buffer buffer({}, {memory, run.memory_bytes}, {disk, run.file_bytes});
  prefetch_schedule schedule(buffer, {.links = {{.bytes_per_second = 3'000'000'000}}});
  tiered_tensors tensors(schedule, map_to_chunks(sizes_of(described), run.chunks));
  posix_storage<> storage(run.checkpoints);
  std::uint64_t step = 0;
  std::uint32_t i = 0;
  const auto work = [&](auto& lease, const tensor_part& part) {
    run.change(step, i, part.begin, lease.span());
  };
  if (const checkpoint_search search = find_checkpoint(storage, verification::sizes); search.found) {
    load_into(storage, *search.found, described, tensors);
    step = search.found->id.step;
  } else {
    for (i = 0; i < described.size(); ++i)
      tensors.for_each_part<access_mode::write>(tensor_id{i}, work).value();
  }
  solo_coordinator coordinator(storage);
  async_checkpointer<traits> saves(coordinator, described);
  while (step < run.steps) {
    ++step;
    schedule.begin_iteration();
    for (i = 0; i < described.size(); ++i) {
      tensors.for_each_part<access_mode::read_write>(tensor_id{i}, work).value();
      saves.stage_for(2'000'000);  // a save continues between two tensors, for 2 ms at most
    }
    schedule.end_iteration();
    if (step % run.save_every == 0 || step == run.steps)
      static_cast<void>(saves.begin_snapshot(step, tensors));
  }
  saves.flush();
  return saves.stats().failed == 0;
}
