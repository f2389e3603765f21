/// @file
/// `saved_job`: the job's state in files, in case more ranks die than the redundancy tolerates.
#pragma once

#include <llmmem/checkpoint/comm_coordinator.hpp>
#include <llmmem/checkpoint/file_plan.hpp>
#include <llmmem/checkpoint/load.hpp>
#include <llmmem/checkpoint/posix_storage.hpp>
#include <llmmem/checkpoint/replica_source.hpp>
#include <llmmem/checkpoint/search.hpp>
#include <llmmem/comm/collectives.hpp>
#include <llmmem/error.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/redundancy/part_ownership.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "survive_failures/part_state.hpp"
#include "survive_failures/plan.hpp"
#include "train_gpt/corpus.hpp"

namespace survive_failures {

/// The outcome of a checkpoint, as one rank knows it.
struct save_outcome {
  bool is_saved = false;
  std::string trouble{};  ///< why it was not saved, or a problem afterwards
};

/// The state with which all ranks continue.
struct state_found {
  bool is_kept = false;  ///< the state is in memory; otherwise it is in `saved`, or nowhere
  std::uint64_t step = 0;
  std::uint64_t moved_bytes = 0;  ///< between ranks, as far as known
  std::optional<llmmem::found_checkpoint> saved{};
  /// Newer checkpoints that were skipped, with the reasons; empty if there are none.
  std::string skip_reason{};
};

/// Checkpoints of a job, of all ranks in one folder; each rank has one of these objects on the same folder. A
/// checkpoint has three tensors for each part, saved by its owner, and identifies its job.
///
/// The training thread writes and syncs the files between two steps, because the state is small and does not
/// change meanwhile.
///
/// @par Thread safety   one thread, which owns the ranks that it is called with.
class saved_job {
 public:
  using storage_type = llmmem::posix_storage<>;

  /// @throws llmmem::storage_error  for a folder that does not exist and cannot be created.
  saved_job(const job_plan& plan, const train_gpt::corpus& text)
      : every_(plan.checkpoint_every),
        steps_(plan.steps),
        cut_(plan.elements(), plan.ranks),
        job_(text_of(plan, text)),
        storage_(plan.checkpoint_dir) {}

  /// Returns whether to save the state after that many steps.
  [[nodiscard]] bool is_due(std::uint64_t step) const noexcept { return step != 0 && step % every_ == 0; }

  /// Returns the step of the newest checkpoint, if there is one.
  /// @throws llmmem::error  if it is of another job.
  [[nodiscard]] std::optional<std::uint64_t> newest() {
    const llmmem::checkpoint_search search = llmmem::find_checkpoint(storage_);
    if (!search.found) return std::nullopt;
    check(*search.found);
    return search.found->id.step;
  }

  /// Returns the newest state with which all ranks can continue: that in memory, or a checkpoint. All ranks
  /// call it when an epoch has begun. Returns nothing if one dies meanwhile.
  /// @throws llmmem::error  for a checkpoint of another job.
  template <class Ranks, class Replica>
  [[nodiscard]] std::optional<state_found> recover(Ranks& ranks, Replica& replica, llmmem::deadline by) {
    try {
      auto all = llmmem::recover(llmmem::verification::checksums,
                                 llmmem::replica_source("the ranks' memory", ranks, replica, by),
                                 llmmem::checkpoint_source("--checkpoint-dir", storage_));
      if (all.version) return state_found{.is_kept = true, .step = *all.version};
      if (!all.found) return state_found{};
      check(*all.found);
      return state_found{.step = all.found->id.step,
                         .saved = std::move(all.found),
                         .skip_reason = all.skipped.empty() ? std::string() : all.message()};
    } catch (const llmmem::comm_error&) {
      return std::nullopt;
    }
  }

  /// Fills those parts from a checkpoint.
  void load(const llmmem::found_checkpoint& from, std::map<llmmem::part_id, part_state>& parts) {
    std::vector<llmmem::wanted_tensor> wanted;
    std::vector<std::span<std::byte>> places;
    for (auto& [part, state] : parts) {
      for (std::size_t kind = 0; kind < kinds; ++kind) {
        wanted.push_back({.name = name_of(kind, part),
                          .part = {},
                          .type = llmmem::safetensors_type::f32,
                          .shape = std::vector<std::uint64_t>{cut_[part].count}});
        places.push_back(state.bytes().subspan(kind * bytes_of(part), bytes_of(part)));
      }
    }
    llmmem::load_checkpoint(storage_, from, wanted,
                            [&](std::uint32_t i, std::uint64_t offset, std::span<const std::byte> bytes) {
                              std::memcpy(places[i].data() + offset, bytes.data(), bytes.size());
                            },
                            {.readers = 1});
  }

  /// Saves the job together with the other ranks, which all call it for the same step. A rank that dies
  /// meanwhile breaks only this checkpoint, and the others learn of it.
  /// @param parts  the parts that this rank owns; those of all ranks together are all parts.
  template <class Ranks>
  [[nodiscard]] save_outcome save(Ranks& ranks, std::uint64_t step, std::span<const llmmem::part_bytes> parts,
                                  const llmmem::collective_call& call) {
    std::string why;
    std::optional<llmmem::comm_coordinator<storage_type, Ranks>> coordinator;
    try {
      coordinator.emplace(storage_, ranks, patience);
    } catch (const llmmem::error& failed) {
      why = failed.what();
    }
    // Only rank 0 opens the folder. If it cannot, no rank may wait for its draft.
    std::byte is_open[] = {std::byte{why.empty()}};
    if (const auto told = llmmem::broadcast(ranks, is_open, llmmem::rank_id{0}, call); !told)
      return {false, why.empty() ? told.error().message() : why};
    if (!why.empty()) return {false, why};
    if (is_open[0] == std::byte{0}) return {false, "rank 0 cannot open the folder"};
    std::optional<llmmem::checkpoint_draft> draft;
    try {
      draft = coordinator->begin(step);
      coordinator->commit(*draft, write(*draft, coordinator->rank(), coordinator->world(), parts));
    } catch (const llmmem::error& failed) {
      why = failed.what();
      if (!draft) return {false, why};
      const std::string before = coordinator->abandon(*draft, why);
      return {false, before.empty() ? why : before};
    }
    return {true, coordinator->tidy()};
  }

 private:
  static constexpr std::size_t kinds = 3;
  static constexpr std::uint64_t second = 1'000'000'000;
  // The sum is less than ranks wait for each other in a step.
  static constexpr llmmem::comm_coordinator_options patience{.open_within_ns = 5 * second,
                                                             .begin_within_ns = 20 * second,
                                                             .commit_within_ns = 20 * second,
                                                             .answer_within_ns = 5 * second};

  /// Everything that determines the weights of a step.
  [[nodiscard]] static std::string text_of(const job_plan& plan, const train_gpt::corpus& text) {
    const train_gpt::gpt_shape& shape = plan.shape;
    return fmt::format(
        "--ranks {} --seed {} --layers {} --width {} --heads {} --context {} --batch {}, text of {} bytes, "
        "CRC-32C {:08x}",
        plan.ranks, plan.seed, shape.blocks, shape.width, shape.heads, shape.context, shape.batch,
        text.bytes(), text.checksum());
  }
  [[nodiscard]] static std::string name_of(std::size_t kind, llmmem::part_id part) {
    constexpr std::string_view names[kinds] = {"weights", "mean", "variance"};
    return fmt::format("{}-{}", names[kind], to_index(part));
  }
  /// The tensors of one kind.
  [[nodiscard]] std::size_t bytes_of(llmmem::part_id part) const noexcept {
    return cut_[part].count * sizeof(float);
  }

  /// Checks that a checkpoint is of this job, and not past its end.
  void check(const llmmem::found_checkpoint& found) {
    const std::string where = storage_.path(found.folder);
    const auto bytes = llmmem::load_extra(storage_, found, 0, "job");
    if (!bytes) {
      throw llmmem::error(where +
                          ": is no checkpoint of survive_failures; give --checkpoint-dir another folder");
    }
    const std::string job(reinterpret_cast<const char*>(bytes->data()), bytes->size());
    if (job != job_) {
      throw llmmem::error(
          fmt::format("{}: is a checkpoint of another job: {}; this one is {}. Ask for that one, or give "
                      "--checkpoint-dir "
                      "another folder",
                      where, job, job_));
    }
    if (found.id.step > steps_) {
      throw llmmem::error(fmt::format("{}: is of step {}, past --steps {}; ask for --steps {} at least",
                                      where, found.id.step, steps_, found.id.step));
    }
  }

  /// Writes and syncs this rank's files.
  [[nodiscard]] llmmem::checkpoint_manifest write(const llmmem::checkpoint_draft& draft, std::uint32_t rank,
                                                  std::uint32_t world,
                                                  std::span<const llmmem::part_bytes> parts) {
    std::vector<llmmem::state_tensor> tensors;
    for (const llmmem::part_bytes& each : parts) {
      for (std::size_t kind = 0; kind < kinds; ++kind)
        tensors.push_back({.name = name_of(kind, each.part), .shape = {cut_[each.part].count}, .part = {}});
    }
    std::vector<llmmem::checkpoint_extra> extras;
    if (rank == 0) {
      const auto job = std::as_bytes(std::span(job_));
      extras.push_back({.name = "job", .bytes = {job.begin(), job.end()}});
    }
    llmmem::checkpoint_manifest all{.generation = draft.id.generation,
                                    .step = draft.id.step,
                                    .world = world,
                                    .files = {},
                                    .tensors = {},
                                    .stored = {}};
    const llmmem::file_plan_options placed{.rank = rank, .world = world};
    for (const llmmem::file_plan& plan :
         {llmmem::plan_files(tensors, placed), llmmem::plan_extras(extras, placed)}) {
      const auto before = static_cast<std::uint32_t>(all.files.size());
      for (const llmmem::planned_file& file : plan.files)
        all.files.push_back(write_file(draft, file, rank, all.chunk_bytes, parts));
      for (llmmem::checkpoint_tensor tensor : plan.tensors) {
        for (llmmem::checkpoint_piece& piece : tensor.pieces)
          piece.file += before;
        all.tensors.push_back(std::move(tensor));
      }
    }
    return all;
  }

  [[nodiscard]] llmmem::checkpoint_file write_file(const llmmem::checkpoint_draft& draft,
                                                   const llmmem::planned_file& file, std::uint32_t rank,
                                                   std::uint64_t chunk_bytes,
                                                   std::span<const llmmem::part_bytes> parts) {
    std::vector<std::byte> bytes(file.bytes);
    std::memcpy(bytes.data(), file.head.data(), file.head.size());
    for (const llmmem::planned_span& span : file.spans) {
      const llmmem::part_bytes& part = parts[span.tensor / kinds];
      const std::size_t from = span.tensor % kinds * bytes_of(part.part) + span.offset;
      std::memcpy(bytes.data() + span.begin, part.bytes.data() + from, span.bytes);
    }
    const std::span<const std::byte> whole(bytes);
    storage_type::output output = storage_.create(draft.path(file.name), file.bytes);
    static_cast<void>(output.begin_write(0, whole));
    llmmem::checkpoint_file made{.name = file.name,
                                 .bytes = file.bytes,
                                 .rank = rank,
                                 .crc32c = llmmem::crc32c(0, whole),
                                 .chunks = {},
                                 .runs = {}};
    for (std::size_t at = 0; at < whole.size(); at += chunk_bytes) {
      const std::size_t count = std::min<std::size_t>(chunk_bytes, whole.size() - at);
      made.chunks.push_back(llmmem::crc32c(0, whole.subspan(at, count)));
    }
    output.sync();
    return made;
  }

  std::uint64_t every_;
  std::uint64_t steps_;
  state_parts cut_;
  std::string job_;
  storage_type storage_;
};

}  // namespace survive_failures
