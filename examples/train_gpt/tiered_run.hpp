/// @file
/// Training in tiers: the spaces, the buffer over them, and its report.
#pragma once

#include <llmmem/arena/stitched_source.hpp>
#include <llmmem/eviction/min.hpp>
#include <llmmem/prefetch_schedule.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/tiered_buffer.hpp>
#include <llmmem/training/training_plan.hpp>
#include <llmmem/transfer/file_space.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "train_gpt/activation_codec.hpp"
#include "train_gpt/any_stores.hpp"
#include "train_gpt/chunk_store.hpp"
#include "train_gpt/gpt.hpp"
#include "train_gpt/recomputation.hpp"
#include "train_gpt/run.hpp"
#include "train_gpt/run_options.hpp"
#include "train_gpt/tier_places.hpp"
#include "train_gpt/tiered_stores.hpp"
#include "train_gpt/train_with.hpp"
#include "train_gpt/worker_team.hpp"

namespace train_gpt {

namespace detail {

/// The bytes that a step keeps, with each piece rounded to whole pages: the size of the last tier.
[[nodiscard]] inline std::uint64_t rounded_bytes(const gpt_shape& shape) {
  const auto rounded = [](std::size_t elements) { return (elements * sizeof(float) + 4095) / 4096 * 4096; };
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < shape.parts(); ++i) {
    for (std::size_t kind = 0; kind < state_kinds(shape); ++kind)
      bytes += rounded(state_layout(shape, shape.layer(i), kind_at(shape, kind)).elements);
  }
  for (std::size_t i = 1; i < shape.layers(); ++i)
    bytes += rounded(activation_layout(shape, shape.layer(i)).elements);
  return bytes;
}

/// The usage of a buffer and its workspace, in the report's terms.
/// @param steps  of the whole run, for its bounds.
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
  for (std::size_t i = 0; i < llmmem::stall_causes; ++i)
    report.stalls[i] = static_cast<double>(stats.moved.stalls[static_cast<llmmem::stall_cause>(i)]) * 1e-9;
  if (schedule.has_plan()) {
    const llmmem::plan_iteration& planned = schedule.plan().steady;
    report.stall_lower_bound_seconds =
        static_cast<double>(planned.bound.stall_ns) * 1e-9 * static_cast<double>(steps);
    const double fewest = static_cast<double>(planned.bound.bytes());
    report.regret = fewest == 0 ? 0 : static_cast<double>(planned.forecast.bytes()) / fewest - 1;
  }
  return report;
}

/// Lets transfers progress while the team computes, as long as this lives.
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

/// The spaces of a run's tiers.
struct tier_spaces {
  using file = llmmem::file_space<>;
  using memory = llmmem::stitched_host_space;
  using tier = llmmem::tier<memory, llmmem::min_eviction>;

  /// @param all  bytes of the last tier.
  tier_spaces(const tier_options& asked, std::uint64_t all_bytes)
      : budget(asked.budget_mib * mib),
        host_budget(asked.host_mib * mib),
        all(all_bytes),
        where(asked.folder),
        disk(where.path(), {.budget = all, .file = {.mode = llmmem::open_mode::update}}),
        // Layers have different sizes, so in one range a piece may not fit although enough bytes are free in
        // parts.
        top(llmmem::stitched_source({.budget = budget, .chunk_bytes = page, .name = "first tier"}),
            {.budget = budget, .name = "first tier"}) {
    where.unname();
    if (host_budget == 0) return;
    host.emplace(llmmem::stitched_source({.budget = host_budget, .chunk_bytes = page, .name = "second tier"}),
                 llmmem::host_options{.budget = host_budget, .name = "second tier"});
  }

  static constexpr std::uint64_t page = tier_options::page_bytes;
  std::uint64_t budget;
  std::uint64_t host_budget;
  std::uint64_t all;
  tier_file where;
  file disk;
  memory top;
  std::optional<memory> host{};
};

inline constexpr std::array two_tier_names{"memory", "file"};
inline constexpr std::array three_tier_names{"memory", "host", "file"};

/// Chunks of a tiered buffer under a schedule that records the first step.
class run_tiers {
 public:
  virtual ~run_tiers() = default;
  [[nodiscard]] virtual chunk_store& chunks() noexcept = 0;
  [[nodiscard]] virtual memory_report report(std::uint64_t steps) const = 0;
};

template <class Buffer>
class planned_tiers final : public run_tiers {
 public:
  template <class... Places>
  planned_tiers(schedule_kind kind, std::vector<llmmem::link_model> links, std::span<const char* const> names,
                const llmmem::tiered_options& options, const Places&... places)
      : names_(names),
        buffer_(options, places...),
        schedule_(buffer_, {.links = std::move(links), .replans = 2}, chosen_planner{kind}),
        chunks_(schedule_, kind != schedule_kind::on_demand) {}

  [[nodiscard]] chunk_store& chunks() noexcept override { return chunks_; }
  [[nodiscard]] memory_report report(std::uint64_t steps) const override {
    return report_of(buffer_, schedule_, steps, names_);
  }

 private:
  std::span<const char* const> names_;
  Buffer buffer_;
  llmmem::prefetch_schedule<Buffer, chosen_planner> schedule_;
  erased_chunks<llmmem::prefetch_schedule<Buffer, chosen_planner>> chunks_;
};

/// @param largest  bytes leased at once.
[[nodiscard]] inline std::unique_ptr<run_tiers> open_tiers(tier_spaces& spaces, schedule_kind kind,
                                                           std::uint64_t largest) {
  using tier = tier_spaces::tier;
  using file = tier_spaces::file;
  const llmmem::tiered_options options{.largest_lease_bytes = largest, .name = "train_gpt"};
  const llmmem::tier_place<tier_spaces::memory> top(spaces.top, spaces.budget);
  const llmmem::tier_place<file> disk(spaces.disk, spaces.all);
  if (!spaces.host) {
    return std::make_unique<planned_tiers<llmmem::tiered_buffer<tier, file>>>(
        kind, std::vector{file_link(spaces.disk)}, two_tier_names, options, top, disk);
  }
  return std::make_unique<planned_tiers<llmmem::tiered_buffer<tier, tier, file>>>(
      kind, std::vector{memory_link(), file_link(spaces.disk)}, three_tier_names, options, top,
      llmmem::tier_place<tier_spaces::memory>(*spaces.host, spaces.host_budget), disk);
}

[[nodiscard]] inline std::uint64_t workspace_budget(const command_line& asked) {
  return 2 * gpt<float, llmmem::host_space>::workspace_elements(asked.shape, asked.threads) * sizeof(float) +
         mib;
}

template <class Buffer>
[[nodiscard]] run_result train_in(Buffer& buffer, std::span<const char* const> names,
                                  std::vector<llmmem::link_model> links, const command_line& asked,
                                  worker_team& team, const corpus& text, std::FILE* notes) {
  llmmem::host_space workspace({.budget = workspace_budget(asked), .name = "workspace"});
  tiered_pieces<float, Buffer> pieces(buffer, asked.shape, asked.tiers.schedule, asked.update,
                                      std::move(links));
  tiered_state<float, Buffer> state(pieces);
  tiered_activations<float, Buffer> activations(pieces);
  const progress_beside_computing beside(team, pieces);
  erased_state held(state);
  erased_activations records(activations);
  return train_with(
      asked, team, workspace, held, records, text,
      [&] { return report_of(buffer, pieces.schedule(), asked.steps, names); }, notes);
}

/// Everything is kept, so the calls of a step are known before the first.
[[nodiscard]] inline run_result train_in_tiers(const command_line& asked,
                                               const llmmem::training_prediction& predicted,
                                               worker_team& team, const corpus& text, std::FILE* notes) {
  using tier = tier_spaces::tier;
  using file = tier_spaces::file;
  tier_spaces spaces(asked.tiers, rounded_bytes(asked.shape));
  const llmmem::tiered_options options{.largest_lease_bytes = predicted.largest_lease_bytes,
                                       .name = "train_gpt"};
  if (!spaces.host) {
    llmmem::tiered_buffer<tier, file> buffer(options, {spaces.top, spaces.budget}, {spaces.disk, spaces.all});
    return train_in(buffer, two_tier_names, {file_link(spaces.disk)}, asked, team, text, notes);
  }
  llmmem::tiered_buffer<tier, tier, file> buffer(
      options, {spaces.top, spaces.budget}, {*spaces.host, spaces.host_budget}, {spaces.disk, spaces.all});
  return train_in(buffer, three_tier_names, {memory_link(), file_link(spaces.disk)}, asked, team, text,
                  notes);
}

/// A part of the activations is recomputed, or they are encoded.
[[nodiscard]] inline run_result train_in_tiers(const command_line& asked, const planned_records& records,
                                               const llmmem::training_prediction& predicted,
                                               worker_team& team, const corpus& text, std::FILE* notes) {
  llmmem::host_space workspace({.budget = workspace_budget(asked), .name = "workspace"});
  tier_spaces spaces(asked.tiers, predicted.tiers.back().bytes);
  const auto tiers = open_tiers(spaces, asked.tiers.schedule, predicted.largest_lease_bytes);
  chunk_state<float> state(tiers->chunks(), asked.shape);
  recorded_activations<float> activations(tiers->chunks(), records.forms,
                                          activation_codec(asked.activation_bits));
  const progress_beside_computing beside(team, tiers->chunks());
  erased_state held(state);
  erased_activations kept(activations);
  return train_with(
      asked, team, workspace, held, kept, text, [&] { return tiers->report(asked.steps); }, notes);
}

}  // namespace detail

}  // namespace train_gpt
