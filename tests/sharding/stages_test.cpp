#include <llmmem/schedule/pipeline.hpp>
#include <llmmem/sharding/stages.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

#include "support/partition_checks.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using llmmem_tests::check_partition;
using llmmem_tests::random_numbers;
using llmmem_tests::seeds;
using llmmem_tests::tensors_of;

namespace {

/// One tensor for each layer, and one that the first and the last share.
struct small_model {
  std::vector<tensor_facts> tensors;
  std::vector<layer_place> places;

  explicit small_model(std::uint32_t layers) {
    std::vector<tensor_shape> shapes(layers + 1, tensor_shape::matrix(2, 3));
    tensors = tensors_of(shapes);
    for (std::uint32_t i = 0; i < layers; ++i)
      places.push_back(layer_place::in(i));
    places.push_back(layer_place::in_both(0, layers - 1));
  }
};

}  // namespace

TEST_CASE("a device has consecutive layers with one chunk, and every P-th chunk with several") {
  // Section 2.2 of the paper: of 16 layers, on 4 devices with 2 chunks, the first has 1, 2, 9, 10.
  const small_model model(16);
  const pipeline_stages one(model.tensors, model.places, 16, rank_count{4});
  CHECK(one.chunks() == 1);
  CHECK(one.layers_of(rank_id{1}) == index_range{4, 4});
  const pipeline_stages two(model.tensors, model.places, 16, rank_count{4}, 2);
  CHECK(two.stages() == 8);
  CHECK(two.chunks() == 2);
  CHECK(two.layers_of(rank_id{0}, 0) == index_range{0, 2});
  CHECK(two.layers_of(rank_id{0}, 1) == index_range{8, 2});
  CHECK(two.layers_of(rank_id{3}, 1) == index_range{14, 2});
  for (std::uint32_t layer = 0; layer < 16; ++layer) {
    CHECK(two.stage_of(layer) == layer / 2);
    CHECK(two.rank_of(layer) == rank_id{layer / 2 % 4});
    CHECK(two.chunk_of(layer) == layer / 8);
  }
  CHECK(two.shape_of(12) == pipeline_shape{.devices = 4, .micro_batches = 12, .chunks = 2});
  CHECK(two.shape_of(12).stages() == two.stages());
}

TEST_CASE("the first and the last device hold a tied tensor, and the first owns it") {
  const small_model model(6);
  const tensor_id embedding{6};
  const pipeline_stages p(model.tensors, model.places, 6, rank_count{3});
  CHECK(p.first() == rank_id{0});
  CHECK(p.last() == rank_id{2});
  CHECK(p.local(embedding, p.first()) == element_runs::all_of(6));
  CHECK(p.local(embedding, p.last()) == element_runs::all_of(6));
  CHECK(p.local(embedding, rank_id{1}).empty());
  CHECK(p.owned(embedding, p.last()).empty());
  CHECK(p.owner(embedding, 5) == rank_id{0});
  CHECK(!p.is_replicated(embedding));
  // Two devices: both have it. One: there is nobody to share with.
  CHECK(pipeline_stages(model.tensors, model.places, 6, rank_count{2}).is_replicated(embedding));
  CHECK(!pipeline_stages(model.tensors, model.places, 6, rank_count{2}).is_replicated(tensor_id{0}));
  CHECK(pipeline_stages(model.tensors, model.places, 6, rank_count{1}).is_replicated(embedding));
}

TEST_CASE("stages, layers and devices agree with a list of all layers, regardless of the boundaries") {
  for (const auto seed : seeds(200)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const rank_count devices{1 + random.below(5U)};
    const std::uint32_t chunks = 1 + random.below(3U);
    std::vector<std::uint32_t> boundaries{0};
    std::vector<std::uint32_t> stage_of;
    for (std::uint32_t stage = 0; stage < to_number(devices) * chunks; ++stage) {
      const std::uint32_t layers = random.below(3U);
      boundaries.push_back(boundaries.back() + layers);
      stage_of.insert(stage_of.end(), layers, stage);
    }
    if (stage_of.empty()) continue;
    const small_model model(static_cast<std::uint32_t>(stage_of.size()));
    const pipeline_stages p(model.tensors, model.places, boundaries, devices);
    check_partition(p, model.tensors, devices);
    REQUIRE(p.layers() == stage_of.size());
    for (std::uint32_t layer = 0; layer < stage_of.size(); ++layer) {
      const std::uint32_t stage = stage_of[layer];
      REQUIRE(p.stage_of(layer) == stage);
      REQUIRE(p.rank_of(layer) == rank_id{stage % to_number(devices)});
      REQUIRE(p.owner(tensor_id{layer}, 0) == p.rank_of(layer));
      const index_range range = p.layers_of(p.rank_of(layer), p.chunk_of(layer));
      REQUIRE(range == p.layers_of_stage(stage));
      REQUIRE(layer - range.first < range.count);
    }
  }
}

TEST_CASE("with more stages than layers, the last devices have none") {
  const small_model model(2);
  const pipeline_stages p(model.tensors, model.places, 2, rank_count{4});
  check_partition(p, model.tensors, rank_count{4});
  CHECK(p.last() == rank_id{1});
  CHECK(p.layers_of(rank_id{3}).count == 0);
}

TEST_CASE("impossible stages are refused with what is wrong") {
  const small_model model(4);
  const auto from = [&](std::vector<std::uint32_t> boundaries, std::uint32_t devices) {
    return pipeline_stages(model.tensors, model.places, boundaries, rank_count{devices});
  };
  CHECK_THROWS_WITH_AS(pipeline_stages(model.tensors, model.places, 4, rank_count{0}),
                       "pipeline_stages: 0 ranks; a world has at least one", argument_error);
  CHECK_THROWS_WITH_AS(pipeline_stages(model.tensors, model.places, 4, rank_count{2}, 0),
                       "pipeline_stages: 0 chunks; a device has at least one", argument_error);
  CHECK_THROWS_WITH_AS(pipeline_stages(model.tensors, model.places, 4, rank_count{65536}, 65536),
                       "pipeline_stages: 65536 devices x 65536 chunks; stages are 32 bits wide",
                       length_error);
  CHECK_THROWS_WITH_AS(pipeline_stages(model.tensors, model.places, 3, rank_count{2}),
                       "pipeline_stages: tensor 'w' is in layer 3, and there are 3", argument_error);
  const std::vector<layer_place> one(1);
  CHECK_THROWS_WITH_AS(pipeline_stages(model.tensors, one, 4, rank_count{2}),
                       "pipeline_stages: 5 tensors and 1 places; each tensor has one", argument_error);
  CHECK_THROWS_WITH_AS(from({}, 2),
                       "pipeline_stages: 0 stages on 2 devices; every device has as many, at least one",
                       argument_error);
  CHECK_THROWS_WITH_AS(from({0, 1, 2, 4}, 2),
                       "pipeline_stages: 3 stages on 2 devices; every device has as many, at least one",
                       argument_error);
  CHECK_THROWS_WITH_AS(from({1, 2, 4}, 2),
                       "pipeline_stages: the first boundary is 1; stages begin at layer 0", argument_error);
  CHECK_THROWS_WITH_AS(from({0, 3, 2}, 2), "pipeline_stages: boundary 2 is 2, less than the one before it, 3",
                       argument_error);
}
