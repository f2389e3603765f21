/// PipeDream: a pipeline that never stops to update. Each stage of layers is a rank, works in the order of
/// 1F1B, changes its weights after every backward pass, and keeps those that a micro-batch's forward pass had
/// for its backward pass.
#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/thread_network.hpp>
#include <llmmem/schedule/pipeline.hpp>
#include <llmmem/schedule/pipeline_timeline.hpp>
#include <llmmem/sharded_state.hpp>
#include <llmmem/sharding/stages.hpp>
#include <llmmem/version/stash.hpp>
#include <llmmem/version/versioned.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "support/state_world.hpp"
#include "support/tables.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;
using ranks_of = communicator<thread_endpoint>;

constexpr std::uint32_t layers = 6;
constexpr std::size_t rows = 5;
constexpr std::size_t width = 12;
constexpr float rate = 0.25F;

table drawn(std::size_t r, std::size_t c, std::uint64_t seed) {
  random_numbers random(seed);
  table made(r, c);
  for (float& each : made.values)
    each = static_cast<float>(random.below(2001U)) / 2000.0F - 0.5F;
  return made;
}

/// y = x + gelu(x W + b)
struct layer_weights {
  table w, b;
};
using stage_weights = std::vector<layer_weights>;

/// What a micro-batch leaves on a stage for its backward pass.
struct stage_record {
  std::vector<table> inputs, inner;
};

layer_weights first_weights(std::uint32_t layer) {
  return {drawn(width, width, 2 * layer), drawn(1, width, 2 * layer + 1)};
}

table forward(const stage_weights& weights, table x, stage_record& kept) {
  for (const layer_weights& each : weights) {
    kept.inputs.push_back(x);
    kept.inner.push_back(with_bias(product(x, each.w), each.b));
    x = sum(gelu(kept.inner.back()), x);
  }
  return x;
}

/// The gradient of the stage's input; those of its weights become `gradients`.
table backward(const stage_weights& weights, table dy, const stage_record& kept, stage_weights& gradients) {
  gradients.resize(weights.size());
  for (std::size_t i = weights.size(); i-- > 0;) {
    const table d_inner = gelu_backward(dy, kept.inner[i]);
    gradients[i] = {product(transposed(kept.inputs[i]), d_inner), transposed(column_sums(d_inner))};
    dy = sum(product(d_inner, transposed(weights[i].w)), dy);
  }
  return dy;
}

/// @param newest  may be the same.
void descend(stage_weights& weights, const stage_weights& newest, const stage_weights& gradients) {
  const auto step = [](table& to, const table& from, const table& by) {
    to = from;
    for (std::size_t i = 0; i < to.values.size(); ++i)
      to.values[i] -= rate * by.values[i];
  };
  weights.resize(newest.size());
  for (std::size_t i = 0; i < newest.size(); ++i) {
    step(weights[i].w, newest[i].w, gradients[i].w);
    step(weights[i].b, newest[i].b, gradients[i].b);
  }
}

table input_of(std::uint32_t micro) {
  return drawn(rows, width, 1000 + micro);
}

/// Of the mean square distance from what is wanted.
table gradient_of_loss(const table& y, std::uint32_t micro) {
  const table wanted = drawn(rows, width, 2000 + micro);
  table dy = y;
  for (std::size_t i = 0; i < dy.values.size(); ++i)
    dy.values[i] = 2 * (y.values[i] - wanted.values[i]) / static_cast<float>(y.values.size());
  return dy;
}

/// Layers in stages, and the tensors of each layer: its matrix, its bias.
struct model_in_stages {
  std::vector<tensor_facts> facts;
  pipeline_stages who;

  explicit model_in_stages(std::uint32_t stages)
      : facts(catalogue()), who(facts, places(), layers, rank_count{stages}) {}

  static std::vector<tensor_facts> catalogue() {
    std::vector<tensor_facts> all;
    for (std::uint32_t i = 0; i < layers; ++i) {
      all.push_back({"w" + std::to_string(i), tensor_shape::matrix(width, width), 4});
      all.push_back({"b" + std::to_string(i), tensor_shape::vector(width), 4});
    }
    return all;
  }
  static std::vector<layer_place> places() {
    std::vector<layer_place> all;
    for (std::uint32_t i = 0; i < layers; ++i)
      all.insert(all.end(), 2, layer_place::in(i));
    return all;
  }
};

/// Versions behind the newest that stage s of n computes with, counted from 0.
using delay_of = std::uint32_t (*)(std::uint32_t stages, std::uint32_t stage);

/// The definition, on one thread, with all versions of all stages:
///
///     w(t+1) = w(t) - rate x gradient of f at (w_1(t - n + 1), w_2(t - n + 2), ..., w_n(t))
///
/// (Narayanan et al., "PipeDream", SOSP 2019, section 3.3), and version 0 where that is before the first.
/// @return  the weights behind the last micro-batch, by layer.
std::vector<layer_weights> one_after_the_other(const pipeline_stages& who, std::uint32_t micro_batches,
                                               delay_of delay) {
  const std::uint32_t stages = who.stages();
  std::vector<std::vector<stage_weights>> versions(stages);
  for (std::uint32_t s = 0; s < stages; ++s) {
    const index_range of = who.layers_of_stage(s);
    stage_weights& first = versions[s].emplace_back();
    for (std::uint64_t i = of.first; i < of.first + of.count; ++i)
      first.push_back(first_weights(static_cast<std::uint32_t>(i)));
  }
  for (std::uint32_t t = 0; t < micro_batches; ++t) {
    const auto seen = [&](std::uint32_t s) -> const stage_weights& {
      const std::uint32_t behind = delay(stages, s);
      return versions[s][t < behind ? 0 : t - behind];
    };
    std::vector<stage_record> records(stages);
    table x = input_of(t);
    for (std::uint32_t s = 0; s < stages; ++s)
      x = forward(seen(s), x, records[s]);
    table dy = gradient_of_loss(x, t);
    for (std::uint32_t s = stages; s-- > 0;) {
      stage_weights gradients;
      dy = backward(seen(s), dy, records[s], gradients);
      stage_weights next;
      descend(next, versions[s].back(), gradients);
      versions[s].push_back(std::move(next));
    }
  }
  std::vector<layer_weights> all;
  for (const auto& each : versions)
    all.insert(all.end(), each.back().begin(), each.back().end());
  return all;
}

std::uint32_t pipedream_delay(std::uint32_t stages, std::uint32_t stage) {
  return stages - 1 - stage;
}
std::uint32_t no_delay(std::uint32_t, std::uint32_t) {
  return 0;
}

bool are_equal(const std::vector<layer_weights>& a, const std::vector<layer_weights>& b) {
  return std::ranges::equal(a, b, [](const layer_weights& one, const layer_weights& other) {
    return bytes_of(one.w) == bytes_of(other.w) && bytes_of(one.b) == bytes_of(other.b);
  });
}

/// A stage on its rank.
class stage_of_pipeline {
 public:
  stage_of_pipeline(ranks_of& ranks, const pipeline_stages& who, const stage_weights& first)
      : ranks_(&ranks),
        stage_(to_index(ranks.rank())),
        stages_(who.stages()),
        weights_(stash{stash_depth(stages_, stage_)}, first, "stage") {
    weights_.publish(first).value();
  }

  void forward_pass(std::uint32_t micro) {
    const table x = stage_ == 0 ? input_of(micro) : received(stage_ - 1, 2 * micro);
    in_flight& begun = begun_[micro];
    const auto seen = weights_.snapshot().value();
    begun.version = seen.version();
    begun.output = forward(*seen, x, begun.record);
    most_begun_ = std::max<std::uint64_t>(most_begun_, begun_.size());
    if (stage_ + 1 != stages_) send(begun.output, stage_ + 1, 2 * micro);
  }

  void backward_pass(std::uint32_t micro) {
    const in_flight& begun = begun_.at(micro);
    const table dy =
        stage_ + 1 == stages_ ? gradient_of_loss(begun.output, micro) : received(stage_ + 1, 2 * micro + 1);
    stage_weights gradients;
    {
      const auto seen = weights_.pin(begun.version).value();
      const table dx = backward(*seen, dy, begun.record, gradients);
      if (stage_ != 0) send(dx, stage_ - 1, 2 * micro + 1);
    }
    // The gradients of old weights change the newest.
    weights_
        .publish_in_place(
            [&](stage_weights& into, const stage_weights* newest) { descend(into, *newest, gradients); })
        .value();
    begun_.erase(micro);
  }

  /// Updates before the version that a begun micro-batch saw: numbers of versions begin with 1.
  [[nodiscard]] std::uint64_t version_of(std::uint32_t micro) const {
    return to_number(begun_.at(micro).version) - 1;
  }
  [[nodiscard]] const versioned<stage_weights, stash<>>& weights() const { return weights_; }
  [[nodiscard]] stage_weights newest() { return *weights_.snapshot().value(); }
  [[nodiscard]] std::uint64_t most_begun() const { return most_begun_; }

 private:
  struct in_flight {
    version_id version{};
    stage_record record;
    table output;
  };

  void send(table what, std::uint32_t to, std::uint32_t tag) {
    ranks_->send(what.bytes(), rank_id{to}, tag, ranks_->after(30 * one_second)).value();
  }
  [[nodiscard]] table received(std::uint32_t from, std::uint32_t tag) {
    table what(rows, width);
    ranks_->recv(what.bytes(), rank_id{from}, tag, ranks_->after(30 * one_second)).value();
    return what;
  }

  ranks_of* ranks_;
  std::uint32_t stage_;
  std::uint32_t stages_;
  versioned<stage_weights, stash<>> weights_;
  std::map<std::uint32_t, in_flight> begun_{};
  std::uint64_t most_begun_ = 0;
};

/// All of a tensor that is here, in its layer.
void put(std::span<std::byte> piece, const table& from) {
  REQUIRE(piece.size() == bytes_of(from).size());
  std::memcpy(piece.data(), from.values.data(), piece.size());
}
table got(std::span<const std::byte> piece, std::size_t columns) {
  table made(piece.size() / 4 / columns, columns);
  std::memcpy(made.values.data(), piece.data(), piece.size());
  return made;
}

void check_pipeline(std::uint32_t stages, std::uint32_t micro_batches) {
  const model_in_stages model(stages);
  const pipeline_stages& who = model.who;
  const std::vector<layer_weights> expected = one_after_the_other(who, micro_batches, pipedream_delay);
  const pipeline_order order = one_f_one_b(who.shape_of(micro_batches));
  const auto uses = stashed_versions(order);
  const std::uint64_t activation = 4 * rows * width;
  in_thread_world(stages, [&](ranks_of& ranks, host_space& space, std::uint32_t self) {
    CAPTURE(self);
    sharded_state held(who, model.facts, ranks, space, {.name = "weights"});
    const auto piece = [&](std::uint64_t tensor) {
      return held.local(tensor_id{static_cast<std::uint32_t>(tensor)});
    };
    const index_range mine = who.layers_of(rank_id{self});
    stage_weights first;
    for (std::uint64_t i = mine.first; i < mine.first + mine.count; ++i)
      first.push_back(first_weights(static_cast<std::uint32_t>(i)));
    stage_of_pipeline stage(ranks, who, first);

    const std::uint64_t before = sent_by(ranks);
    for (std::size_t i = 0; i < order.tasks[self].size(); ++i) {
      const std::uint32_t micro = order.tasks[self][i].micro_batch;
      const pipeline_pass pass = order.tasks[self][i].pass;
      if (pass == pipeline_pass::forward) {
        stage.forward_pass(micro);
        const std::uint32_t behind = pipedream_delay(stages, self);
        CHECK(stage.version_of(micro) == (micro < behind ? 0 : micro - behind));
      }
      CHECK(stage.version_of(micro) == uses[self][i].version);
      if (pass == pipeline_pass::backward) stage.backward_pass(micro);
      CHECK(stage.weights().audit().empty());
    }
    // NOAM, the micro-batches that are let in, is n where all stages have one rank each: n - i versions here.
    CHECK(stage.weights().stats().max_live == std::min(stages - self, micro_batches + 1));
    CHECK(stage.weights().stats().refused_publishes == 0);
    CHECK(stage.most_begun() == std::min(stages - self, micro_batches));
    const std::uint64_t neighbours = (self == 0 ? 0 : 1) + (self + 1 == stages ? 0 : 1);
    CHECK(sent_by(ranks) - before == neighbours * micro_batches * activation);

    const stage_weights last = stage.newest();
    for (std::uint64_t i = 0; i < mine.count; ++i) {
      put(piece(2 * (mine.first + i)), last[i].w);
      put(piece(2 * (mine.first + i) + 1), last[i].b);
    }
    std::vector<tensor_id> all;
    for (std::uint32_t t = 0; t < 2 * layers; ++t)
      all.push_back(tensor_id{t});
    const auto whole = held.gather(all).value();
    std::vector<layer_weights> seen;
    for (std::uint32_t i = 0; i < layers; ++i)
      seen.push_back({got(whole.tensor(2 * i), width), got(whole.tensor(2 * i + 1), width)});
    CHECK(are_equal(seen, expected));
  });
}

}  // namespace

TEST_SUITE("stash_pipeline") {
  TEST_CASE("2 and 4 stages that stash weights learn by PipeDream's formula, bit for bit") {
    for (const std::uint32_t stages : {1U, 2U, 4U}) {
      for (const std::uint32_t micro_batches : {1U, 3U, 17U}) {
        CAPTURE(stages);
        CAPTURE(micro_batches);
        check_pipeline(stages, micro_batches);
      }
    }
  }

  TEST_CASE("the delay shows in the weights once a micro-batch has seen updated weights") {
    const model_in_stages model(4);
    CHECK(are_equal(one_after_the_other(model.who, 1, pipedream_delay),
                    one_after_the_other(model.who, 1, no_delay)));
    CHECK_FALSE(are_equal(one_after_the_other(model.who, 2, pipedream_delay),
                          one_after_the_other(model.who, 2, no_delay)));
    // All layers before the last stage differ, and with them what the last one learns of them.
    const auto delayed = one_after_the_other(model.who, 17, pipedream_delay);
    const auto at_once = one_after_the_other(model.who, 17, no_delay);
    for (std::uint32_t i = 0; i < layers; ++i)
      CHECK(difference(delayed[i].w, at_once[i].w) > 1e-4F);
  }
}
