/// @file
/// A refit from a folder of checkpoints that train_gpt saved, on any number of ranks and with any settings.
#pragma once

#include <llmmem/checkpoint/load.hpp>
#include <llmmem/checkpoint/posix_storage.hpp>
#include <llmmem/checkpoint/search.hpp>
#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/thread_network.hpp>
#include <llmmem/error.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/refit/refit.hpp>
#include <llmmem/refit/refit_folder.hpp>
#include <llmmem/sharding/replicated.hpp>
#include <llmmem/version/double_buffer.hpp>
#include <llmmem/version/versioned.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <filesystem>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "refit/job.hpp"
#include "refit/names.hpp"

namespace refit_example {

/// The refit of a saved run.
struct saved_result {
  std::string checkpoint;      ///< the name of its folder
  std::uint32_t saved_by = 0;  ///< ranks
  std::string plan;
  refit_line line{};  ///< the loss is that of the last step
  std::uint64_t image_bytes = 0;
  std::uint64_t read_bytes = 0;  ///< from the checkpoint's files, by all engines
  std::uint32_t checksum = 0;    ///< of all engines' weights, in the order of ranks
};

/// The engine of a saved run's weights, by the names and shapes that its checkpoint has: those of GPT-2, with
/// queries, keys and values joined. The optimizer's state, and weights of workers after the first, stay
/// unused.
/// @throws llmmem::argument_error  for a checkpoint without them.
[[nodiscard]] inline engine_model engine_of(std::span<const llmmem::refit_tensor> saved, weight_form form) {
  using namespace llmmem;
  engine_model made;
  made.source.assign(saved.begin(), saved.end());
  for (const refit_tensor& each : saved) {
    const bool is_weight = each.name.starts_with("h.") || each.name.starts_with("wte.") ||
                           each.name.starts_with("wpe.") || each.name.starts_with("ln_f.") ||
                           each.name.starts_with("lm_head.");
    if (!is_weight) continue;
    // A vector is cut along its only axis.
    const bool is_vector = each.shape.dimensions() < 2;
    const split_axis axis = detail::axis_of_tensor(each.name);
    const auto add = [&](std::string name, std::uint64_t width, split_axis by, const refit_bands& from) {
      made.rules.push_back({each.name, name, from, {}});
      made.target.push_back(is_vector
                                ? refit_tensor{.name = std::move(name), .shape = tensor_shape::vector(width)}
                                : detail::engine_tensor(std::move(name), each.shape.rows(), width, form));
      made.axes.push_back(is_vector && by == split_axis::columns ? split_axis::rows : by);
    };
    const std::uint64_t width = is_vector ? each.shape.elements() : each.shape.columns();
    const std::size_t fused = each.name.find("c_attn");
    if (fused == std::string::npos) {
      add(each.name, width, axis, {});
      continue;
    }
    const std::uint64_t third = width / 3;
    for (std::uint64_t part = 0; part < 3; ++part) {
      std::string name = each.name;
      name.replace(fused, 6, std::string(1, "qkv"[part]));
      add(std::move(name), third, split_axis::columns,
          is_vector ? refit_bands::rows(part * third, third) : refit_bands::columns(part * third, third));
    }
  }
  if (made.target.empty())
    throw argument_error("the checkpoint has no weights with the names that train_gpt gives");
  return made;
}

namespace detail {

/// The weights of a checkpoint, whole, by tensor; empty for those that no engine has.
[[nodiscard]] inline std::vector<std::vector<float>> load_weights(llmmem::storage_ref storage,
                                                                  const llmmem::found_checkpoint& found,
                                                                  const llmmem::refit_plan& plan) {
  std::vector<std::vector<float>> all(plan.source.size());
  for (std::size_t i = 0; i < plan.source.size(); ++i) {
    const bool is_used =
        std::any_of(plan.parts.begin(), plan.parts.end(),
                    [&](const llmmem::refit_part& part) { return to_index(part.source) == i; });
    if (!is_used) continue;
    all[i].resize(plan.source[i].shape.elements());
    const llmmem::wanted_tensor wanted{.name = plan.source[i].name};
    llmmem::load_checkpoint(storage, found, {&wanted, 1},
                            [&](std::uint32_t, std::uint64_t offset, std::span<const std::byte> bytes) {
                              std::memcpy(reinterpret_cast<std::byte*>(all[i].data()) + offset, bytes.data(),
                                          bytes.size());
                            });
  }
  return all;
}

/// The loss of the last saved step.
[[nodiscard]] inline double last_loss(llmmem::storage_ref storage, const llmmem::found_checkpoint& found) {
  const auto bytes = llmmem::load_extra(storage, found, 0, "losses");
  double loss = 0;
  if (bytes && bytes->size() >= sizeof loss)
    std::memcpy(&loss, bytes->data() + bytes->size() - sizeof loss, sizeof loss);
  return loss;
}

}  // namespace detail

/// Refits `engines` ranks with the newest complete checkpoint in `folder`: each reads what it needs, and none
/// sends anything. Every part of every engine is then compared with the checkpoint's weights, rounded and
/// quantised whole.
/// @throws llmmem::error  for a folder without one; the exceptions of `load_checkpoint` and `check_engines`.
[[nodiscard]] inline saved_result refit_saved(const std::string& folder, std::uint32_t engines,
                                              weight_form form) {
  using namespace llmmem;
  const auto refuse = [&](const char* why) {
    throw llmmem::error(folder + why + "; name the folder of train_gpt --checkpoint-dir");
  };
  if (!std::filesystem::is_directory(folder)) refuse(" is no folder");  // a storage would make it
  posix_storage<> storage(folder);
  const checkpoint_search search = find_checkpoint(storage);
  if (!search.found) refuse(" has no complete checkpoint");
  const found_checkpoint& found = *search.found;
  const refit_checkpoint catalogue(storage, found);
  const engine_model model = engine_of(catalogue.tensors(), form);
  detail::check_engines(model, engines);
  std::vector<rank_id> all;
  for (std::uint32_t i = 0; i < engines; ++i)
    all.push_back(rank_id{i});
  const sharding::replicated from(facts_of(model.source), rank_count{engines});
  const split_2d to(facts_of(model.target), model.axes, rank_count{engines});
  const refit_plan plan =
      make_refit(refit_side<sharding::replicated>{model.source, from, all},
                 refit_side<split_2d>{model.target, to, all}, model.rules, {.quantizes_from = dtype::bf16});
  const std::vector<std::vector<float>> wanted = detail::load_weights(storage, found, plan);
  saved_result result{.checkpoint = found.folder, .saved_by = found.manifest.world, .plan = to_text(plan)};
  result.line.step = found.id.step;
  result.line.loss = detail::last_loss(storage, found);
  std::vector<std::uint32_t> checksums(engines);
  std::mutex mutex;
  std::exception_ptr cause;
  thread_network net(engines);
  const auto live = [&](std::uint32_t seat) {
    try {
      thread_endpoint end(net, seat_id{seat});
      communicator ranks(end);
      ranks.join(ranks.after(detail::patience_ns)).value();
      posix_storage<> own(folder);
      refit_checkpoint source(own, found);
      const refit_layout layout(plan, ranks.rank());
      std::array<std::vector<std::byte>, 2> memory;
      for (auto& each : memory)
        each.resize(layout.bytes());
      versioned<refit_image, double_buffer> weights(
          {}, [&](std::size_t i) { return refit_image(layout, memory[i]); });
      refit moving(ranks, plan);
      const auto done =
          moving.move(found.id.step, source, weights, refit_sends::all, ranks.after(detail::patience_ns));
      const refit_outcome& outcome = done.value();
      const auto now = weights.snapshot().value();
      const std::size_t receiver = refit_plan::place_of(plan.receivers, ranks.rank());
      const std::lock_guard held(mutex);
      for (std::size_t t = 0; t < plan.target.size(); ++t) {
        result.line.wrong_tensors += detail::is_right(plan, *now, t, receiver, wanted) ? 0U : 1U;
        const tensor_id id{static_cast<std::uint32_t>(t)};
        for (const auto bytes : {now->tensor(id), now->scales(id)})
          checksums[seat] = crc32c(checksums[seat], bytes);
      }
      result.line.version = to_number(outcome.version);
      result.line.elements_bytes += outcome.elements_bytes;
      result.line.sent_bytes += outcome.sent_bytes;
      result.line.links += outcome.links;
      result.image_bytes += layout.bytes();
      result.read_bytes += source.read_bytes();
    } catch (...) {
      const std::lock_guard held(mutex);
      if (!cause) cause = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  for (std::uint32_t seat = 1; seat < engines; ++seat)
    threads.emplace_back(live, seat);
  live(0);
  for (std::thread& each : threads)
    each.join();
  if (cause) std::rethrow_exception(cause);
  for (const std::uint32_t each : checksums)
    result.checksum = crc32c(result.checksum, std::as_bytes(std::span(&each, 1)));
  return result;
}

}  // namespace refit_example
