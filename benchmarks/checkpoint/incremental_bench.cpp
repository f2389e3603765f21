/// @file
/// Saves of changes: the time from `begin_snapshot` until durable, if P percent of the chunks have one
/// changed byte since the last checkpoint. Each contestant saves repeatedly to its own folder.
///
///   incremental/whole         the usual: every byte
///   incremental/digest:<P>    `xxh3_chunk_digest`: all is copied and read, what changed is written
///   incremental/told:<P>      `cow_state_view`: what did not change is not even copied
///
///   `over_whole`: by `whole` of the same round; `written_MiB`, `copied_MiB`: of the last turn

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#if __has_include(<xxhash.h>)
#include <llmmem/checkpoint/xxh3_chunk_digest.hpp>
#endif
#include <llmmem/checkpoint/cow_view.hpp>

#include "checkpoint/saves.hpp"

namespace {

using namespace llmmem_benchmarks;

constexpr std::uint64_t percents[] = {0, 1, 10, 100};

struct told_traits : llmmem::checkpointer_traits {
  using view_type = llmmem::cow_state_view;
};
#if __has_include(<xxhash.h>)
struct digest_traits : llmmem::checkpointer_traits {
  using digest_type = llmmem::xxh3_chunk_digest;
};
#endif

/// A state that changes, and its checkpoints.
template <class Traits>
class saving_run {
 public:
  saving_run(const std::string& root, std::uint64_t percent, std::uint32_t full_every)
      : percent_(percent),
        root_(root),
        storage_(root),
        coordinator_(storage_),
        saves_(
            coordinator_, state_.tensors,
            {.ring_bytes = whole_ring(), .chunk_bytes = std::uint64_t{1} << 20, .full_every = full_every}) {
    std::uint64_t begin = 0;
    for (const auto& each : state_.spans) {
      places_.push_back({.source = 0, .offset = begin, .bytes = each.size()});
      begin += each.size();
    }
  }
  saving_run(const saving_run&) = delete;
  saving_run& operator=(const saving_run&) = delete;
  ~saving_run() {
    saves_.flush();
    std::error_code ignored;
    std::filesystem::remove_all(root_, ignored);
  }

  [[nodiscard]] turn operator()(const bench_folder& folder) {
    change();
    folder.settle();
    const llmmem::checkpointer_stats before = saves_.stats();
    turn taken;
    taken.seconds = seconds_of([&] {
      if (begin().wait() != llmmem::commit_status::committed)
        throw std::runtime_error(saves_.stats().last_error);
    });
    saves_.flush();
    const llmmem::checkpointer_stats after = saves_.stats();
    const auto mib = [](std::uint64_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
    taken.told["written_MiB"] = mib(after.persisted_bytes - before.persisted_bytes);
    taken.told["copied_MiB"] = mib(after.staged_bytes - before.staged_bytes);
    return taken;
  }

 private:
  [[nodiscard]] llmmem::commit_ticket begin() {
    ++step_;
    if constexpr (llmmem::change_tracking_view<typename Traits::view_type>) {
      llmmem::cow_range* const ranges[] = {&range_};
      return saves_.begin_snapshot(step_, llmmem::cow_state_view(ranges, places_)).ticket();
    } else {
      return saves_.begin_snapshot(step_, llmmem::host_state_view(state_.spans)).ticket();
    }
  }
  /// Changes a byte in each of that many chunks.
  void change() {
    const llmmem::mutation_permit permit = saves_.gate().mutate();
    const std::uint64_t chunks = state_bytes() >> 20;
    for (std::uint64_t i = 0; i < chunks * percent_ / 100; ++i) {
      const std::uint64_t chunk = i * 100 / percent_;
      range_.write((chunk << 20) + 5000, 1).value()[0] ^= std::byte{1};
    }
  }

  std::uint64_t percent_;
  std::string root_;
  saved_state state_{};
  host_memory pool_{std::uint64_t{32} << 20};
  llmmem::cow_range range_{state_.bytes(), pool_.span()};
  std::vector<llmmem::state_place> places_{};
  std::uint64_t step_ = 0;
  llmmem::posix_storage<> storage_;
  llmmem::solo_coordinator<llmmem::posix_storage<>> coordinator_;
  llmmem::async_checkpointer<Traits> saves_;
};

template <class Traits>
[[nodiscard]] take_turn turns_of(const std::shared_ptr<bench_folder>& folder, const std::string& name,
                                 std::uint64_t percent, std::uint32_t full_every) {
  const auto run = std::make_shared<saving_run<Traits>>(folder->path + "/" + name, percent, full_every);
  return [=] { return (*run)(*folder); };
}

const int added = [] {
  std::vector<std::string> whom{"whole"};
  for (const std::uint64_t percent : percents) {
#if __has_include(<xxhash.h>)
    whom.push_back("digest:" + std::to_string(percent));
#endif
    whom.push_back("told:" + std::to_string(percent));
  }
  const auto make = [] {
    const auto folder = std::make_shared<bench_folder>();
    std::vector<take_turn> turns{turns_of<llmmem::checkpointer_traits>(folder, "whole", 100, 1)};
    for (const std::uint64_t percent : percents) {
      const std::string name = std::to_string(percent);
#if __has_include(<xxhash.h>)
      turns.push_back(turns_of<digest_traits>(folder, "digest" + name, percent, llmmem::max_full_every));
#endif
      turns.push_back(turns_of<told_traits>(folder, "told" + name, percent, llmmem::max_full_every));
    }
    return turns;
  };
  return add_experiment(
      "incremental", "", whom, make, [](benchmark::State& state, const outcome& all, const std::string& who) {
        count(state, "over_whole",
              all.by_round({"whole", who}, [](const std::vector<double>& s) { return s[1] / s[0]; }));
      });
}();

}  // namespace
