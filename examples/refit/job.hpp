/// @file
/// A job of trainers, which share a model by ZeRO 3, and engines, which share it by columns and rows: after
/// every few steps the engines take the trainers' weights.
#pragma once

#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/thread_network.hpp>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/quantize_groups.hpp>
#include <llmmem/paged_allocator.hpp>
#include <llmmem/refit/refit.hpp>
#include <llmmem/sharding/zero.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/version/double_buffer.hpp>
#include <llmmem/version/versioned.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "refit/names.hpp"
#include "train_gpt/corpus.hpp"
#include "train_gpt/gpt.hpp"
#include "train_gpt/host_stores.hpp"
#include "train_gpt/sharded_stores.hpp"
#include "train_gpt/trainer.hpp"
#include "train_gpt/worker_team.hpp"

namespace refit_example {

struct job_options {
  train_gpt::gpt_shape shape{.blocks = 2, .width = 64, .heads = 4, .context = 64, .batch = 2};  ///< of a rank
  std::uint32_t trainers = 2;
  std::uint32_t engines = 2;
  std::uint64_t steps = 8;
  std::uint64_t every = 1;  ///< steps from one refit to the next
  double rate = 1e-5;
  std::uint64_t seed = 1;
  weight_form form = weight_form::bf16;
  llmmem::refit_sends sends = llmmem::refit_sends::changes;
  bool keeps_arrivals = true;  ///< so that quantised matrices also travel as changes
};

/// One refit, with the traffic of all trainers.
struct refit_line {
  std::uint64_t step = 0;
  double loss = 0;
  std::uint64_t elements_bytes = 0;
  std::uint64_t sent_bytes = 0;
  std::uint32_t links = 0;
  std::uint32_t changed_links = 0;
  std::uint64_t version = 0;
  std::uint64_t dropped_blocks = 0;  ///< of the engines' caches, which later prompts do not match
  std::uint64_t matched_tokens = 0;  ///< of a prompt that was cached with older weights; must be 0
  std::uint64_t wrong_tensors = 0;   ///< whose bytes differ from the trainers', in the engine's form
};

struct job_result {
  std::string plan;
  std::vector<refit_line> lines;
  std::uint64_t image_bytes = 0;    ///< of one version, on all engines
  std::uint64_t base_bytes = 0;     ///< of what trainers keep to send changes
  std::uint64_t arrival_bytes = 0;  ///< of what engines keep of quantised matrices
};

namespace detail {

using ranks_type = llmmem::communicator<llmmem::thread_endpoint>;

/// Complete weights by layer, for the engines' check alone. Two versions: trainers write the next one while
/// engines may still read this one.
struct shared_weights {
  std::array<std::vector<std::vector<float>>, 2> versions;
};

/// Whether an engine's part of a tensor is what the trainers have, rounded and quantised here, whole.
[[nodiscard]] inline bool is_right(const llmmem::refit_plan& plan, const llmmem::refit_image& image,
                                   std::size_t target, std::size_t receiver,
                                   const std::vector<std::vector<float>>& weights) {
  using namespace llmmem;
  const refit_tensor& tensor = plan.target[target];
  std::vector<float> whole(tensor.shape.elements());
  for (const refit_part& part : plan.parts) {
    if (to_index(part.target) != target) continue;
    for (std::uint64_t p = 0; p < part.to.elements(); ++p)
      whole[part.to.element_at(p)] = weights[to_index(part.source)][part.from.element_at(p)];
  }
  const element_runs set = plan.target_set(target, receiver);
  std::vector<std::uint16_t> mine;
  for (std::uint64_t p = 0; p < set.elements(); ++p)
    mine.push_back(bf16_from_f32_bits(std::bit_cast<std::uint32_t>(whole[set.element_at(p)])));
  const auto has = image.tensor(tensor_id{static_cast<std::uint32_t>(target)});
  if (tensor.group == 0) return std::ranges::equal(std::as_bytes(std::span(mine)), has);
  std::vector<std::byte> wanted(has.size());
  const auto scales = image.scales(tensor_id{static_cast<std::uint32_t>(target)});
  std::vector<std::byte> wanted_scales(scales.size());
  const auto groups = static_cast<std::uint32_t>(mine.size() / tensor.group);
  quantize_groups(host_executor{}, {.rows = 1, .groups = groups, .elements = tensor.group},
                  {std::as_bytes(std::span(mine)).data(), dtype::bf16, 2 * mine.size()},
                  {wanted.data(), tensor.element, mine.size()},
                  {wanted_scales.data(), 4 * std::uint64_t{groups}})
      .value();
  return std::ranges::equal(wanted, has) && std::ranges::equal(wanted_scales, scales);
}

/// What all ranks of a job share.
struct job {
  const job_options& options;
  const train_gpt::corpus& text;
  const llmmem::refit_plan& plan;
  job_result& result;
  std::mutex mutex{};
  shared_weights weights{};
};

/// Adds one rank's part of a refit to the result.
template <class Add>
void report(job& of, std::size_t line, Add&& add) {
  const std::lock_guard held(of.mutex);
  if (of.result.lines.size() <= line) of.result.lines.resize(line + 1);
  add(of.result.lines[line]);
}

inline constexpr std::uint64_t patience_ns = 60'000'000'000;

inline void train(job& of, ranks_type& ranks, llmmem::refit<ranks_type>& moving) {
  using namespace llmmem;
  using namespace train_gpt;
  const job_options& asked = of.options;
  std::vector<rank_id> members;
  for (std::uint32_t i = 0; i < asked.trainers; ++i)
    members.push_back(rank_id{i});
  rank_group trainers(ranks, members);
  host_space space({.budget = std::uint64_t{8} << 30, .name = "trainer"});
  worker_team team(1);
  sharded_layers<float, host_space, rank_group<ranks_type>> layers(space, asked.shape, trainers,
                                                                   {.stage = zero_stage::weights});
  host_activations<float, host_space> activations(space, asked.shape);
  gpt<float, host_space> model(asked.shape, team, space);
  adam_options options;
  options.rate = asked.rate;
  trainer<decltype(layers), decltype(activations), host_space> training(model, team, layers, activations,
                                                                        options, update_time::in_backward);
  training.initialise(asked.seed);
  std::size_t line = 0;
  for (std::uint64_t step = 0; step < asked.steps; ++step) {
    const double loss = training.step(
        of.text.batch(asked.shape, asked.seed, step * asked.trainers + to_index(ranks.rank())), step);
    if ((step + 1) % asked.every != 0) continue;
    std::vector<std::span<const std::byte>> pieces;
    for (std::size_t i = 0; i < asked.shape.layers(); ++i) {
      const layer_id layer = asked.shape.layer(i);
      const std::span<float> piece =
          layers.acquire_held(layer, train_gpt::state_kind::weights, lease_mode::read);
      pieces.push_back(std::as_bytes(piece));
      const element_runs set = of.plan.source_set(i, to_index(ranks.rank()));
      std::ranges::copy(piece,
                        of.weights.versions[line % 2][i].begin() + static_cast<std::ptrdiff_t>(set.begin));
    }
    refit_spans source(pieces);
    const auto done = moving.send(step + 1, source, asked.sends, ranks.after(patience_ns));
    const refit_outcome& sent = done.value();
    report(of, line++, [&](refit_line& at) {
      at.step = step + 1;
      at.loss += loss / asked.trainers;
      at.elements_bytes += sent.elements_bytes;
      at.sent_bytes += sent.sent_bytes;
      at.links += sent.links;
      at.changed_links += sent.changed_links;
    });
  }
}

inline void serve(job& of, ranks_type& ranks, llmmem::refit<ranks_type>& moving) {
  using namespace llmmem;
  const job_options& asked = of.options;
  const refit_layout layout(of.plan, ranks.rank());
  std::array<std::vector<std::byte>, 2> memory;
  for (auto& each : memory)
    each.resize(layout.bytes());
  versioned<refit_image, double_buffer> weights(
      {}, [&](std::size_t i) { return refit_image(layout, memory[i]); });
  paged_allocator<> cache({.blocks = 32, .block_tokens = 4, .name = "kv"});
  const std::vector<token_id> prompt(32, 7);
  const std::size_t receiver = refit_plan::place_of(of.plan.receivers, ranks.rank());
  for (std::uint64_t line = 0; line < asked.steps / asked.every; ++line) {
    // A request with the weights of before, whose keys and values stay cached.
    const sequence_id request = cache.create().value();
    cache.append(request, prompt).value();
    cache.commit(request).value();
    cache.release(request).value();
    const auto done =
        moving.receive((line + 1) * asked.every, weights, asked.sends, ranks.after(patience_ns));
    const std::uint64_t dropped = finish_refit(done.value(), cache).value();
    const auto now = weights.snapshot().value();
    std::uint64_t wrong = 0;
    for (std::size_t t = 0; t < of.plan.target.size(); ++t)
      wrong += is_right(of.plan, *now, t, receiver, of.weights.versions[line % 2]) ? 0U : 1U;
    report(of, line, [&](refit_line& at) {
      at.version = to_number(done->version);
      at.dropped_blocks += dropped;
      at.matched_tokens += cache.cached_tokens(prompt);
      at.wrong_tensors += wrong;
    });
  }
}

}  // namespace detail

/// Trains and refits, each rank in a thread of its own.
/// @throws the exception of a rank that failed.
[[nodiscard]] inline job_result run_job(const job_options& asked, const train_gpt::corpus& text) {
  using namespace llmmem;
  const engine_model model = engine_of(asked.shape, asked.form);
  detail::check_engines(model, asked.engines);
  std::vector<rank_id> trainers;
  std::vector<rank_id> engines;
  for (std::uint32_t i = 0; i < asked.trainers + asked.engines; ++i)
    (i < asked.trainers ? trainers : engines).push_back(rank_id{i});
  const zero_partition from(facts_of(model.source), rank_count{asked.trainers}, zero_stage::weights,
                            llmmem::state_kind::weights);
  const split_2d to(facts_of(model.target), model.axes, rank_count{asked.engines});
  const refit_plan plan = make_refit(refit_side<zero_partition>{model.source, from, trainers},
                                     refit_side<split_2d>{model.target, to, engines}, model.rules,
                                     {.keeps_arrivals = asked.keeps_arrivals, .quantizes_from = dtype::bf16});
  job_result result;
  result.plan = to_text(plan);
  detail::job shared{asked, text, plan, result};
  for (auto& version : shared.weights.versions) {
    for (const refit_tensor& each : model.source)
      version.emplace_back(each.shape.elements());
  }
  for (const rank_id each : engines)
    result.image_bytes += refit_layout(plan, each).bytes();
  result.base_bytes = asked.sends == refit_sends::all ? 0 : plan.bytes;

  thread_network net(asked.trainers + asked.engines);
  std::exception_ptr cause;
  const auto live = [&](std::uint32_t seat) {
    try {
      thread_endpoint end(net, seat_id{seat});
      detail::ranks_type ranks(end);
      ranks.join(ranks.after(detail::patience_ns)).value();
      refit moving(ranks, plan, {.keeps_base = asked.sends != refit_sends::all});
      try {
        {
          const std::lock_guard held(shared.mutex);
          result.arrival_bytes += moving.arrival_bytes();
        }
        seat < asked.trainers ? detail::train(shared, ranks, moving) : detail::serve(shared, ranks, moving);
      } catch (...) {
        ranks.revoke();
        throw;
      }
      ranks.agree(0, ranks.after(detail::patience_ns)).value();
    } catch (...) {
      const std::lock_guard held(shared.mutex);
      if (!cause) cause = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  for (std::uint32_t seat = 1; seat < asked.trainers + asked.engines; ++seat)
    threads.emplace_back(live, seat);
  live(0);
  for (std::thread& each : threads)
    each.join();
  if (cause) std::rethrow_exception(cause);
  return result;
}

}  // namespace refit_example
