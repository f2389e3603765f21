/// @file
/// Training in tiers: the spaces, the buffer over them, and what it reports.
#pragma once

#include <llmmem/paging/stitched_source.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/tiered_buffer.hpp>
#include <llmmem/transfer/file_space.hpp>

#include <fmt/format.h>
#include <stdlib.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
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

/// Pieces that are brought up before they are asked for.
inline constexpr std::size_t usual_look_ahead = 4;

/// A file of its own name in `folder`, gone when this is.
class tier_file {
 public:
  explicit tier_file(const std::string& folder) {
    const std::filesystem::path where =
        folder.empty() ? std::filesystem::temp_directory_path() : std::filesystem::path(folder);
    path_ = (where / "train_gpt-XXXXXX").string();
    const int file = ::mkstemp(path_.data());
    if (file < 0) throw example::file_error(where.string(), "made a file in (--tier-dir)");
    ::close(file);
  }
  tier_file(const tier_file&) = delete;
  tier_file& operator=(const tier_file&) = delete;
  ~tier_file() { ::unlink(path_.c_str()); }

  [[nodiscard]] const std::string& path() const noexcept { return path_; }

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
template <class Buffer>
[[nodiscard]] memory_report report_of(const Buffer& buffer, std::span<const char* const> names) {
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
  return report;
}

template <class Buffer>
[[nodiscard]] run_result train_in(Buffer& buffer, std::span<const char* const> names,
                                  const command_line& asked, worker_team& team, const corpus& text,
                                  std::FILE* notes) {
  llmmem::host_space workspace(
      {.budget = 2 * gpt<float, llmmem::host_space>::workspace_elements(asked.shape, asked.threads) *
                     sizeof(float) +
                 mib,
       .name = "workspace"});
  const std::size_t ahead = asked.tiers.schedule == schedule_kind::lookahead ? usual_look_ahead : 0;
  tiered_pieces<float, Buffer> pieces(buffer, asked.shape, ahead);
  tiered_state<float, Buffer> state(pieces);
  tiered_activations<float, Buffer> activations(pieces);
  return train_with(
      asked, team, workspace, state, activations, text, [&] { return report_of(buffer, names); }, notes);
}

[[nodiscard]] inline run_result train_in_tiers(const command_line& asked, worker_team& team,
                                               const corpus& text, std::FILE* notes) {
  using file = llmmem::file_space<>;
  using memory = llmmem::stitched_host_space;
  const std::uint64_t budget = asked.tiers.budget_mib * mib;
  const std::uint64_t host_budget = asked.tiers.host_mib * mib;
  const std::uint64_t all = rounded_bytes(asked.shape);
  const tier_file where(asked.tiers.folder);
  file disk(where.path(), {.budget = all, .file = {.mode = llmmem::open_mode::update}});
  // Layers are of unequal size: in one range, a piece may not fit though enough is free in parts.
  constexpr std::uint64_t page = 16 * 1024;
  memory top(llmmem::stitched_source({.budget = budget, .chunk_bytes = page, .name = "first tier"}),
             {.budget = budget, .name = "first tier"});
  const llmmem::tiered_options options{
      .largest_lease_bytes = most_leased_elements(asked.shape) * sizeof(float), .name = "train_gpt"};
  if (host_budget == 0) {
    llmmem::tiered_buffer<memory, file> buffer(options, {top, budget}, {disk, all});
    constexpr std::array names{"memory", "file"};
    return train_in(buffer, names, asked, team, text, notes);
  }
  memory host(llmmem::stitched_source({.budget = host_budget, .chunk_bytes = page, .name = "second tier"}),
              {.budget = host_budget, .name = "second tier"});
  llmmem::tiered_buffer<memory, memory, file> buffer(options, {top, budget}, {host, host_budget},
                                                     {disk, all});
  constexpr std::array names{"memory", "host", "file"};
  return train_in(buffer, names, asked, team, text, notes);
}

}  // namespace detail

}  // namespace train_gpt
