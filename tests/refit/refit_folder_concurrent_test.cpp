#include <llmmem/checkpoint/posix_storage.hpp>
#include <llmmem/refit/refit.hpp>
#include <llmmem/refit/refit_folder.hpp>
#include <llmmem/sharding/replicated.hpp>
#include <llmmem/sharding/split_2d.hpp>
#include <llmmem/transfer/safetensors_file.hpp>
#include <llmmem/version/double_buffer.hpp>
#include <llmmem/version/versioned.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "support/published_model.hpp"
#include "support/sim_world.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

using weights_of = versioned<refit_image, double_buffer>;

std::vector<std::byte> copy_bytes(std::span<const std::byte> bytes) {
  return {bytes.begin(), bytes.end()};
}

}  // namespace

TEST_CASE("engines read a published model without a message, and one rank writes what it has") {
  const published_model model;
  temporary_folder out;
  const std::vector<refit_tensor> target{{"embed", tensor_shape::matrix(16, 8)},
                                         {"head", tensor_shape::matrix(16, 8), dtype::f32},
                                         {"bias", tensor_shape::vector(5), dtype::bf16}};
  const std::vector<refit_rule> rules{
      {"model.embed_tokens.weight", "embed"}, {"lm_head.weight", "head"}, {"model.layers.0.bias", "bias"}};
  in_world(3, 1, [&](sim_ranks& ranks, std::uint32_t rank) {
    const std::array all{rank_id{0}, rank_id{1}, rank_id{2}};
    refit_folder folder(model.path());
    CHECK(folder.tensors().size() == 5);  // "model.step" is an integer of 64 bits
    const sharding::replicated from(facts_of(folder.tensors()), rank_count{3});
    const split_2d to(facts_of(target), std::vector(3, split_axis::rows), rank_count{3});
    const refit_plan plan = make_refit(refit_side<sharding::replicated>{folder.tensors(), from, all},
                                       refit_side<split_2d>{target, to, all}, rules);
    CHECK(plan.bytes == 0);
    CHECK(plan.unused == std::vector<std::string>{"model.layers.0.weight", "scaled_fp8"});
    const refit_layout layout(plan, ranks.rank());
    std::array<std::vector<std::byte>, 2> memory;
    for (auto& each : memory)
      each.resize(layout.bytes());
    weights_of weights({}, [&](std::size_t i) { return refit_image(layout, memory[i]); });
    refit moving(ranks, plan);
    const auto done = moving.move(1, folder, weights, refit_sends::all, ranks.after(60'000'000'000));
    CHECK(done.value().sent_bytes == 0);
    const auto now = weights.snapshot().value();
    const auto& embed = model.bytes_of_tensor("model.embed_tokens.weight");
    const element_runs mine = plan.target_set(0, rank);
    CHECK(copy_bytes(now->tensor(tensor_id{0})) ==
          std::vector<std::byte>(embed.begin() + static_cast<std::ptrdiff_t>(2 * mine.begin),
                                 embed.begin() + static_cast<std::ptrdiff_t>(2 * mine.end())));
    posix_storage<> storage(out.path().string());
    CHECK_THROWS_WITH_AS(save_refit(storage, plan, ranks.rank(), *now),
                         ("save_refit: rank " + std::to_string(rank) +
                          " has a part of 'embed' only; refit a rank of sharding::replicated, and save there")
                             .c_str(),
                         argument_error);
  });
}

TEST_CASE("what one rank saves is read back, with codes and scales, and replaces the file before") {
  const published_model model;
  temporary_folder out;
  std::vector<refit_tensor> target{{"model.embed_tokens.weight", tensor_shape::matrix(16, 8)},
                                   {"q", tensor_shape::matrix(4, 32), dtype::int8, 32}};
  // 16 rows of 8 become 4 of 32.
  const std::vector<refit_rule> rules{{"lm_head.weight", "q", refit_bands::rows(0, 16), {}}};
  in_world(2, 1, [&](sim_ranks& ranks, std::uint32_t rank) {
    const rank_id reader{0};
    const rank_id writer{1};
    refit_folder folder(model.path());
    const sharding::replicated one_source(facts_of(folder.tensors()), rank_count{1});
    const sharding::replicated one_target(facts_of(target), rank_count{1});
    const refit_plan plan =
        make_refit(refit_side<sharding::replicated>{folder.tensors(), one_source, {&reader, 1}},
                   refit_side<sharding::replicated>{target, one_target, {&writer, 1}}, rules);
    refit moving(ranks, plan);
    if (rank == 0) {
      for (std::uint64_t number = 1; number < 3; ++number)
        moving.send(number, folder, refit_sends::changes, ranks.after(60'000'000'000)).value();
      return;
    }
    const refit_layout layout(plan, ranks.rank());
    std::array<std::vector<std::byte>, 2> memory;
    for (auto& each : memory)
      each.resize(layout.bytes());
    weights_of weights({}, [&](std::size_t i) { return refit_image(layout, memory[i]); });
    posix_storage<> storage(out.path().string());
    for (std::uint64_t number = 1; number < 3; ++number) {
      moving.receive(number, weights, refit_sends::changes, ranks.after(60'000'000'000)).value();
      const auto now = weights.snapshot().value();
      save_refit(storage, plan, ranks.rank(), *now);
      const safetensors_file file(out.file("model.safetensors"));
      CHECK(file.header().metadata == safetensors_metadata{{"weights", std::to_string(number)}});
      CHECK(copy_bytes(file.bytes(*file.find("model.embed_tokens.weight"))) ==
            model.bytes_of_tensor("model.embed_tokens.weight"));
      CHECK(copy_bytes(file.bytes(*file.find("q"))) == copy_bytes(now->tensor(tensor_id{1})));
      CHECK(copy_bytes(file.bytes(*file.find("q_scale"))) == copy_bytes(now->scales(tensor_id{1})));
      CHECK(file.find("q_scale")->shape == std::vector<std::uint64_t>{4, 1});
    }
    CHECK(std::distance(std::filesystem::directory_iterator(out.path()), {}) == 1);
    refit_folder again(out.path().string());
    CHECK(again.tensors().size() == 3);
  });
}
