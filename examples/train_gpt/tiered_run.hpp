/// @file
/// Training in tiers: the spaces, the buffer over them, and what it reports.
#pragma once

#include <llmmem/arena/stitched_source.hpp>
#include <llmmem/eviction/min.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/tiered_buffer.hpp>
#include <llmmem/transfer/file_space.hpp>

#include <fmt/format.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/program.hpp"
#include "common/text.hpp"
#include "train_gpt/command_line.hpp"
#include "train_gpt/gpt.hpp"
#include "train_gpt/run.hpp"
#include "train_gpt/tiered_stores.hpp"
#include "train_gpt/train_with.hpp"
#include "train_gpt/worker_team.hpp"

namespace train_gpt {

/// A file of its own name in `folder`. Once it is open it needs none: what is killed then leaves nothing
/// there.
class tier_file {
 public:
  explicit tier_file(const std::string& folder) {
    const std::filesystem::path where =
        folder.empty() ? std::filesystem::temp_directory_path() : std::filesystem::path(folder);
    path_ = (where / "train_gpt-").string() + std::string(6, 'X');  // mkstemp puts letters of its own there
    const int file = ::mkstemp(path_.data());
    if (file < 0) throw example::file_error(where.string(), "made a file in (--tier-dir)");
    ::close(file);
  }
  tier_file(const tier_file&) = delete;
  tier_file& operator=(const tier_file&) = delete;
  ~tier_file() { unname(); }

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  void unname() noexcept {
    if (!path_.empty()) ::unlink(path_.c_str());
    path_.clear();
  }

 private:
  std::string path_;
};

namespace detail {

inline constexpr std::uint64_t mib = std::uint64_t{1} << 20;

/// What a step keeps, each piece rounded to whole pages: what the last tier must hold.
[[nodiscard]] inline std::uint64_t rounded_bytes(const gpt_shape& shape) {
  const auto rounded = [](std::size_t elements) { return (elements * sizeof(float) + 4095) / 4096 * 4096; };
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < shape.layers(); ++i) {
    bytes += 4 * rounded(parameter_layout(shape, shape.layer(i)).elements);
    if (i != 0) bytes += rounded(activation_layout(shape, shape.layer(i)).elements);
  }
  return bytes;
}

/// What a buffer and its workspace hold, in the report's terms.
/// @param steps  of the whole run, for the bounds on it.
template <class Buffer, class Schedule>
[[nodiscard]] memory_report report_of(const Buffer& buffer, const Schedule& schedule, std::uint64_t steps,
                                      std::span<const char* const> names) {
  const auto stats = buffer.stats();
  memory_report report;
  for (std::size_t i = 0; i < Buffer::tiers; ++i)
    report.tiers.push_back({names[i], stats.tiers[i].used, stats.tiers[i].peak});
  for (std::size_t i = 0; i + 1 < Buffer::tiers; ++i) {
    report.links.push_back(
        {fmt::format("{} to {}", names[i + 1], names[i]), stats.moved.links[i].onboard.bytes});
    report.links.push_back(
        {fmt::format("{} to {}", names[i], names[i + 1]), stats.moved.links[i].offload.bytes});
  }
  report.stall_seconds = static_cast<double>(stats.moved.stalls.total()) * 1e-9;
  if (schedule.has_plan()) {
    const llmmem::plan_iteration& planned = schedule.plan().steady;
    report.stall_lower_bound_seconds =
        static_cast<double>(planned.bound.stall_ns) * 1e-9 * static_cast<double>(steps);
    const double fewest = static_cast<double>(planned.bound.bytes());
    report.regret = fewest == 0 ? 0 : static_cast<double>(planned.forecast.bytes()) / fewest - 1;
  }
  return report;
}

/// What plans compute with: bytes a second of the median of `times` copies of `bytes`. The fastest is one
/// that met a cache.
/// @param copy  called with the number of the copy.
template <class Copy>
[[nodiscard]] std::uint64_t measured_rate(std::uint64_t bytes, std::size_t times, Copy copy) {
  std::vector<double> took;
  for (std::size_t i = 0; i < times; ++i) {
    const auto began = std::chrono::steady_clock::now();
    copy(i);
    took.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
  }
  std::sort(took.begin(), took.end());
  return static_cast<std::uint64_t>(static_cast<double>(bytes) / std::max(took[times / 2], 1e-6)) + 1;
}

/// Copies to and from other parts of the file each, as those of a step are. @pre nothing is in the file yet.
template <class File>
[[nodiscard]] llmmem::link_model file_link(File& file) {
  constexpr std::uint64_t bytes = 4 * mib;
  llmmem::host_space memory({.budget = 2 * bytes});
  const llmmem::space_buffer held(memory, bytes, std::align_val_t{4096});
  const std::span<std::byte> all = held.range().span();
  std::fill(all.begin(), all.end(), std::byte{1});
  const auto times = static_cast<std::size_t>(std::clamp<std::uint64_t>(file.capacity() / bytes, 1, 15));
  const auto run = [&](const llmmem::file_copy& copy) { file.queue().start(copy).value().wait(); };
  const std::uint64_t down =
      measured_rate(bytes, times, [&](std::size_t i) { run(llmmem::write_to(file.file(), i * bytes, all)); });
  const std::uint64_t up = measured_rate(
      bytes, times, [&](std::size_t i) { run(llmmem::read_from(file.file(), i * bytes, all)); });
  return {.bytes_per_second = up,
          .latency_ns = 50'000,
          .offload_bytes_per_second = down,
          .duplex = llmmem::link_duplex::half};
}

[[nodiscard]] inline llmmem::link_model memory_link() {
  const std::vector<std::byte> from(4 * mib, std::byte{1});
  std::vector<std::byte> to(from.size());
  const std::uint64_t rate =
      measured_rate(from.size(), 5, [&](std::size_t) { std::copy(from.begin(), from.end(), to.begin()); });
  return {.bytes_per_second = rate, .latency_ns = 1'000, .duplex = llmmem::link_duplex::half};
}

/// Lets pieces go on while the team computes, for as long as this lives.
template <class Pieces>
class progress_beside_computing {
 public:
  progress_beside_computing(worker_team& team, Pieces& pieces) noexcept : team_(team) {
    team.before_slices([](void* self) noexcept { static_cast<Pieces*>(self)->progress(); }, &pieces);
  }
  progress_beside_computing(const progress_beside_computing&) = delete;
  progress_beside_computing& operator=(const progress_beside_computing&) = delete;
  ~progress_beside_computing() { team_.before_slices(nullptr, nullptr); }

 private:
  worker_team& team_;
};

template <class Buffer>
[[nodiscard]] run_result train_in(Buffer& buffer, std::span<const char* const> names,
                                  std::vector<llmmem::link_model> links, const command_line& asked,
                                  worker_team& team, const corpus& text, std::FILE* notes) {
  llmmem::host_space workspace(
      {.budget = 2 * gpt<float, llmmem::host_space>::workspace_elements(asked.shape, asked.threads) *
                     sizeof(float) +
                 mib,
       .name = "workspace"});
  tiered_pieces<float, Buffer> pieces(buffer, asked.shape, asked.tiers.schedule, asked.update,
                                      std::move(links));
  tiered_state<float, Buffer> state(pieces);
  tiered_activations<float, Buffer> activations(pieces);
  const progress_beside_computing beside(team, pieces);
  return train_with(
      asked, team, workspace, state, activations, text,
      [&] { return report_of(buffer, pieces.schedule(), asked.steps, names); }, notes);
}

[[nodiscard]] inline run_result train_in_tiers(const command_line& asked, worker_team& team,
                                               const corpus& text, std::FILE* notes) {
  using file = llmmem::file_space<>;
  using memory = llmmem::stitched_host_space;
  using tier = llmmem::tier<memory, llmmem::min_eviction>;
  const std::uint64_t budget = asked.tiers.budget_mib * mib;
  const std::uint64_t host_budget = asked.tiers.host_mib * mib;
  const std::uint64_t all = rounded_bytes(asked.shape);
  tier_file where(asked.tiers.folder);
  file disk(where.path(), {.budget = all, .file = {.mode = llmmem::open_mode::update}});
  where.unname();
  // Layers are of unequal size: in one range, a piece may not fit though enough is free in parts.
  constexpr std::uint64_t page = 16 * 1024;
  memory top(llmmem::stitched_source({.budget = budget, .chunk_bytes = page, .name = "first tier"}),
             {.budget = budget, .name = "first tier"});
  const llmmem::tiered_options options{
      .largest_lease_bytes = most_leased_elements(asked.shape) * sizeof(float), .name = "train_gpt"};
  if (host_budget == 0) {
    llmmem::tiered_buffer<tier, file> buffer(options, {top, budget}, {disk, all});
    constexpr std::array names{"memory", "file"};
    return train_in(buffer, names, {file_link(disk)}, asked, team, text, notes);
  }
  memory host(llmmem::stitched_source({.budget = host_budget, .chunk_bytes = page, .name = "second tier"}),
              {.budget = host_budget, .name = "second tier"});
  llmmem::tiered_buffer<tier, tier, file> buffer(options, {top, budget}, {host, host_budget}, {disk, all});
  constexpr std::array names{"memory", "host", "file"};
  return train_in(buffer, names, {memory_link(), file_link(disk)}, asked, team, text, notes);
}

}  // namespace detail

}  // namespace train_gpt
