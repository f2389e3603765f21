/// @file
/// One checkpoint through a fresh checkpointer, and its times.
#pragma once

#include <llmmem/async_checkpointer.hpp>
#ifdef LLMMEM_BENCH_URING
#include <llmmem/transfer/uring_io.hpp>
#endif

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <string>

#include "checkpoint/state.hpp"

namespace llmmem_benchmarks {

template <class Engine>
struct traits_of : llmmem::checkpointer_traits {
  using storage_type = llmmem::posix_storage<Engine>;
  using coordinator_type = llmmem::solo_coordinator<storage_type>;
};

/// A folder of checkpoints, which is removed at the end.
template <class Engine = llmmem::posix_io>
class checkpointer_setup {
 public:
  checkpointer_setup(const std::string& root, const saved_state& state, llmmem::checkpointer_options options,
                     llmmem::posix_storage_options of_storage = {})
      : root_(root),
        storage(root, of_storage),
        coordinator(storage),
        saves(coordinator, state.tensors, options) {}
  checkpointer_setup(const checkpointer_setup&) = delete;
  checkpointer_setup& operator=(const checkpointer_setup&) = delete;
  ~checkpointer_setup() {
    saves.flush();
    std::error_code ignored;
    std::filesystem::remove_all(root_, ignored);
  }

 private:
  std::string root_;

 public:
  llmmem::posix_storage<Engine> storage;
  llmmem::solo_coordinator<llmmem::posix_storage<Engine>> coordinator;
  llmmem::async_checkpointer<traits_of<Engine>> saves;
};

enum class until : std::uint8_t { mutable_again, durable };

/// A snapshot of the state through a ring of `ring_bytes`; the time until the state may change, or until the
/// snapshot is durable.
template <class Engine = llmmem::posix_io>
[[nodiscard]] turn save_once(const bench_folder& folder, const saved_state& state, std::uint64_t ring_bytes,
                             until what, llmmem::posix_storage_options of_storage = {}) {
  checkpointer_setup<Engine> setup(folder.path + "/saves", state, {.ring_bytes = ring_bytes}, of_storage);
  folder.settle();
  turn taken;
  {
    const auto began = std::chrono::steady_clock::now();
    const auto so_far = [&] {
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    };
    auto guard = setup.saves.begin_snapshot(1, llmmem::host_state_view(state.spans));
    const llmmem::commit_ticket ticket = guard.ticket();
    const double begun = so_far();
    const llmmem::mutation_permit permit = std::move(guard).mutate();
    const double stalled = so_far();
    const bool is_safe = ticket.wait() == llmmem::commit_status::committed;
    const double durable = so_far();
    if (!is_safe) throw std::runtime_error("not committed: " + ticket.why());
    taken.seconds = what == until::durable ? durable : stalled;
    taken.told["begin_us"] = begun * 1e6;
    taken.told["durable_ms"] = durable * 1e3;
  }
  setup.saves.flush();
  const llmmem::checkpointer_stats stats = setup.saves.stats();
  taken.told["copy_ms"] = static_cast<double>(stats.stage_ns) * 1e-6;
  taken.told["ring_MiB"] = static_cast<double>(stats.ring_bytes) / (1 << 20);
  taken.told["peak_of_ring"] = static_cast<double>(stats.staging_peak) / static_cast<double>(ring_bytes);
  return taken;
}

/// The ring for all of the state and the head of its file, in whole chunks.
[[nodiscard]] inline std::uint64_t whole_ring() {
  return state_bytes() + 2 * llmmem::checkpointer_options{}.chunk_bytes;
}

}  // namespace llmmem_benchmarks
