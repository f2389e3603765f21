#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/quantize_groups.hpp>
#include <llmmem/refit/refit.hpp>
#include <llmmem/version/double_buffer.hpp>
#include <llmmem/version/versioned.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "support/refit_world.hpp"
#include "support/seeds.hpp"
#include "support/sim_world.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

using weights_of = versioned<refit_image, double_buffer>;

/// An engine's rank: two images and the versions in them.
struct engine_rank {
  engine_rank(const refit_plan& plan, rank_id rank)
      : layout(plan, rank),
        memory{std::vector<std::byte>(layout.bytes()), std::vector<std::byte>(layout.bytes())},
        weights({}, [this](std::size_t i) { return refit_image(layout, memory[i]); }) {}

  refit_layout layout;
  std::array<std::vector<std::byte>, 2> memory;
  weights_of weights;
};

/// What a sender holds: the dense pieces of its partition.
struct trainer_rank {
  trainer_rank(const refit_plan& plan, const std::vector<std::vector<std::byte>>& contents,
               std::size_t sender) {
    for (std::size_t t = 0; t < contents.size(); ++t)
      memory.push_back(dense(contents[t], plan.source_set(t, sender), bits_of(plan.source[t].element) / 8));
    for (const auto& each : memory)
      spans.emplace_back(each);
  }
  [[nodiscard]] refit_spans source() const { return refit_spans(spans); }

  std::vector<std::vector<std::byte>> memory;
  std::vector<std::span<const std::byte>> spans;
};

/// One call of `refit` on a rank, by what the rank is in the plan.
result<refit_outcome> call(refit<sim_ranks>& moving, const refit_plan& plan, sim_ranks& ranks,
                           const std::vector<std::vector<std::byte>>& contents,
                           const std::unique_ptr<engine_rank>& engine, std::uint64_t number,
                           refit_sends what) {
  const std::size_t sender = refit_plan::place_of(plan.senders, ranks.rank());
  const bool sends = sender != plan.senders.size();
  const deadline by = ranks.after(60'000'000'000);
  if (!sends)
    return engine ? moving.receive(number, engine->weights, what, by) : moving.attend(number, what, by);
  const trainer_rank trainer(plan, contents, sender);
  refit_spans source = trainer.source();
  return engine ? moving.move(number, source, engine->weights, what, by)
                : moving.send(number, source, what, by);
}

std::unique_ptr<engine_rank> engine_of(const refit_plan& plan, rank_id rank) {
  if (refit_plan::place_of(plan.receivers, rank) == plan.receivers.size()) return nullptr;
  return std::make_unique<engine_rank>(plan, rank);
}

/// What a tensor of a rank must be, by the definition: codes and scales of whole rows if it is quantised.
void check_image(const refit_image& image, const refit_plan& plan, const refit_model& model,
                 const std::vector<std::vector<std::byte>>& contents, rank_id rank) {
  const std::size_t receiver = refit_plan::place_of(plan.receivers, rank);
  for (std::uint32_t t = 0; t < model.target.size(); ++t) {
    const refit_tensor& tensor = model.target[t];
    const element_runs set = plan.target_set(t, receiver);
    const dtype wire =
        tensor.group == 0 ? tensor.element : model.source[model.origins[t].front().tensor].element;
    std::vector<std::byte> wanted;
    for (std::uint64_t i = 0; i < set.elements(); ++i) {
      const auto element = converted(contents, model, model.origins[t][set.element_at(i)], wire);
      wanted.insert(wanted.end(), element.begin(), element.end());
    }
    if (tensor.group != 0 && !set.empty()) {
      const std::uint64_t columns = tensor.shape.columns();
      const std::uint64_t rows = set.elements() / columns;
      const std::uint64_t groups = columns / tensor.group;
      std::vector<std::byte> codes(rows * columns);
      std::vector<std::byte> scales(rows * groups * 4);
      quantize_groups(host_executor{}, {rows, static_cast<std::uint32_t>(groups), tensor.group},
                      {wanted.data(), wire, columns * bits_of(wire) / 8},
                      {codes.data(), tensor.element, columns}, {scales.data(), groups * 4})
          .value();
      REQUIRE(copy_of(image.scales(tensor_id{t})) == scales);
      wanted = codes;
    }
    REQUIRE(copy_of(image.tensor(tensor_id{t})) == wanted);
  }
}

/// Changes a few elements: what a small step leaves of bf16.
void change_some(random_numbers& random, std::vector<std::vector<std::byte>>& contents) {
  for (auto& each : contents) {
    for (std::size_t i = 0; i < each.size(); i += 2) {
      if (random.once_in(20)) each[i] ^= std::byte{1};
    }
  }
}

}  // namespace

TEST_CASE("every element of every rank is what its rule says, after all and after changes") {
  std::uint64_t changed = 0;
  for (const auto seed : seeds_within(250, 60)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const bool quantises = random.once_in(3);
    const refit_model model = random_refit(random, quantises);
    const refit_sides sides = random_sides(random, model, quantises);
    const refit_plan plan = sides.plan(model, {.arrival_bytes = quantises ? 8192U : 0U});
    std::vector<std::vector<std::vector<std::byte>>> versions{source_contents(model, seed)};
    for (int i = 0; i < 2; ++i) {
      versions.push_back(versions.back());
      change_some(random, versions.back());
    }
    in_world(sides.world, seed, [&](sim_ranks& ranks, std::uint32_t) {
      refit moving(ranks, plan, {.staging_bytes = 28672});
      auto engine = engine_of(plan, ranks.rank());
      for (std::uint64_t v = 0; v < versions.size(); ++v) {
        const auto done = call(moving, plan, ranks, versions[v], engine, v + 1, refit_sends::changes);
        done.value();
        if (v != 0) CHECK(done->changed_links == done->links);
        CHECK(done->elements_bytes == plan.sent_bytes(ranks.rank()));
        if (v == 2) changed += done->changed_links;
        if (engine) check_image(*engine->weights.snapshot().value(), plan, model, versions[v], ranks.rank());
      }
      CHECK(moving.staging_bytes() <= 28672);
      CHECK(moving.base_bytes() == plan.sent_bytes(ranks.rank()));
    });
  }
  CHECK(changed > 10);
}
