#include <llmmem/schedule/pipeline.hpp>
#include <llmmem/schedule/pipeline_timeline.hpp>
#include <llmmem/version/stash.hpp>
#include <llmmem/version/versioned.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

using namespace llmmem;

namespace {

struct toy_weights {
  std::uint64_t updates = 0;
  std::uint64_t digest = 0;  // of all updates, in order
};

/// One update, by the micro-batch whose backward pass saw `seen`.
[[nodiscard]] toy_weights updated(const toy_weights& newest, const toy_weights& seen, std::uint64_t batch) {
  return {newest.updates + 1, (newest.digest + seen.digest * 3 + batch + 1) * 0x9E37'79B9'7F4A'7C15ULL};
}

}  // namespace

TEST_CASE("under 1F1B stage i of n holds n - i versions at most, and each backward pass sees its forward's") {
  for (std::uint32_t stages = 1; stages <= 6; ++stages) {
    for (const std::uint32_t batches : {1U, 3U, 20U}) {
      const pipeline_order order = one_f_one_b({.devices = stages, .micro_batches = batches});
      const auto uses = stashed_versions(order);
      for (std::uint32_t stage = 0; stage < stages; ++stage) {
        CAPTURE(stages);
        CAPTURE(batches);
        CAPTURE(stage);
        const std::uint32_t depth = stash_depth(stages, stage);
        CHECK(depth == stages - stage);
        versioned<toy_weights, stash<>> weights(stash{depth}, {}, "stage");
        CHECK(weights.publish({}).has_value());
        std::vector<toy_weights> all{{}};  // the oracle keeps every version
        std::vector<version_id> forward(batches);
        std::uint64_t most = weights.live();
        for (std::size_t i = 0; i < order.tasks[stage].size(); ++i) {
          const pipeline_task& task = order.tasks[stage][i];
          if (task.pass == pipeline_pass::forward) {
            forward[task.micro_batch] = weights.newest();
            // Counted from 1 here, from 0 there.
            REQUIRE(to_number(weights.newest()) == uses[stage][i].version + 1);
          } else {
            auto seen = weights.pin(forward[task.micro_batch]).value();
            const toy_weights& expected = all[to_number(seen.version()) - 1];
            REQUIRE(seen->digest == expected.digest);
            REQUIRE(seen->updates == expected.updates);
            const toy_weights next = updated(all.back(), *seen, task.micro_batch);
            seen.release();
            REQUIRE(weights.publish(next).has_value());
            all.push_back(next);
          }
          REQUIRE(weights.live() <= depth);
          most = std::max(most, weights.live());
          REQUIRE(weights.audit() == std::vector<std::string>{});
        }
        CHECK(most == std::min<std::uint64_t>(depth, batches + 1));
        CHECK(weights.stats().max_live == most);
        CHECK(weights.snapshot().value()->digest == all.back().digest);
      }
    }
  }
}

TEST_CASE("with one version fewer than n - i, some backward pass does not find its weights") {
  const std::uint32_t stages = 4;
  const pipeline_order order = one_f_one_b({.devices = stages, .micro_batches = 12});
  for (std::uint32_t stage = 0; stage + 1 < stages; ++stage) {
    versioned<int, stash<>> weights(stash{stash_depth(stages, stage) - 1}, 0);
    CHECK(weights.publish(0).has_value());
    std::vector<version_id> forward(12);
    std::uint64_t lost = 0;
    for (const pipeline_task& task : order.tasks[stage]) {
      if (task.pass == pipeline_pass::forward) {
        forward[task.micro_batch] = weights.newest();
        continue;
      }
      lost += weights.pin(forward[task.micro_batch]).code() == errc::version_expired ? 1U : 0U;
      CHECK(weights.publish(1).has_value());
    }
    CHECK(lost > 0);
  }
}

TEST_CASE("a late backward pass stops the update, which names the version that it holds") {
  versioned<int, stash<2>> weights({}, 0, "stage 2 of 4");
  CHECK(weights.publish(1).has_value());
  CHECK(weights.publish(2).has_value());
  auto late = weights.pin(version_id{1}).value();
  const auto also = weights.pin(version_id{1}).value();
  CHECK(
      weights.publish(3).error().message() ==
      "stage 2 of 4: version 1 is pinned 2 times, and none of the 2 slots is free; release it first, or give "
      "it more slots");
  CHECK(*late == 1);
  CHECK(weights.newest() == version_id{2});
}

TEST_CASE("the last stage updates its only version in place") {
  versioned<int, stash<1>> weights({}, 0);
  CHECK(weights.publish(1).has_value());
  CHECK(weights
            .publish_in_place([&](int& into, const int* newest) {
              CHECK(newest == &into);
              CHECK(weights.live() == 0);
              into += 10;
            })
            .value() == version_id{2});
  CHECK(*weights.snapshot().value() == 11);
  CHECK(weights.live() == 1);
}

TEST_CASE("a stage outside the pipeline, and an empty stash, are refused") {
  constexpr std::uint32_t depth = stash_depth(4, 0);
  CHECK(depth == 4);
  CHECK_THROWS_WITH_AS(static_cast<void>(stash_depth(4, 4)),
                       "stash_depth: stage 4 of a pipeline of 4 stages; they count from 0", argument_error);
  CHECK_THROWS_WITH_AS((versioned<int, stash<>>(stash{0}, 0)),
                       "stash: 0 slots for 0 versions to keep; give it at least one each", argument_error);
}
