/// ZeRO 3 that gathers the next layers' weights while it computes with this one's.
#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/thread_network.hpp>
#include <llmmem/sharding/concepts.hpp>
#include <llmmem/space/host.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <thread>
#include <vector>

#include "support/tiny_gpt.hpp"
#include "train_gpt/sharded_stores.hpp"

using namespace train_gpt;

namespace {

constexpr gpt_shape shape{.blocks = 3, .width = 12, .heads = 2, .context = 7, .batch = 12};
constexpr std::uint64_t steps = 3;
constexpr std::uint64_t ten_seconds = 10'000'000'000;

/// What a rank came to, by its own share of the batches.
struct rank_end {
  std::vector<double> losses;
  std::uint64_t digest = 0;
  std::uint64_t peak_bytes = 0;  // of weights, gradients and moments
  std::uint64_t sent_bytes = 0;  // in the steps
  llmmem::gather_schedule_stats gathers;
};

token_batch share_of(const token_batch& batch, std::size_t part, std::size_t parts) {
  const auto cut = [&](const std::vector<std::uint8_t>& all) {
    const auto each = static_cast<std::ptrdiff_t>(all.size() / parts);
    const auto first = all.begin() + static_cast<std::ptrdiff_t>(part) * each;
    return std::vector<std::uint8_t>(first, first + each);
  };
  return {cut(batch.tokens), cut(batch.targets)};
}

std::vector<rank_end> train(std::uint32_t world, std::uint32_t ahead, update_time when) {
  gpt_shape mine = shape;
  mine.batch = shape.batch / world;
  const corpus text("tiny", llmmem_tests::tiny_text(2000), shape);
  llmmem::thread_network net(world);
  std::vector<rank_end> ends(world);
  std::vector<std::thread> threads;
  for (std::uint32_t seat = 0; seat < world; ++seat) {
    threads.emplace_back([&, seat] {
      llmmem::thread_endpoint end(net, llmmem::seat_id{seat});
      llmmem::communicator ranks(end);
      ranks.join(ranks.after(ten_seconds)).value();
      llmmem::host_space kept({.budget = std::uint64_t{1} << 30, .name = "state"});
      llmmem::host_space host({.budget = std::uint64_t{1} << 30, .name = "host"});
      worker_team team(1);
      sharded_layers<float, llmmem::host_space, decltype(ranks)> state(
          kept, mine, ranks, {.stage = llmmem::zero_stage::weights, .gather_ahead = ahead});
      host_activations<float, llmmem::host_space> activations(host, mine);
      gpt<float, llmmem::host_space> model(mine, team, host);
      trainer training(model, team, state, activations, adam_options{}, when);
      training.initialise(1);
      const auto sent = [&] {
        std::uint64_t bytes = 0;
        for (const llmmem::seat_id each : ranks.seats())
          bytes += ranks.traffic(each).sent_bytes;
        return bytes;
      };
      rank_end& to = ends[seat];
      const std::uint64_t before = sent();
      for (std::uint64_t step = 0; step < steps; ++step)
        to.losses.push_back(training.step(share_of(text.batch(shape, 1, step), seat, world), step));
      to.sent_bytes = sent() - before;
      to.gathers = state.gather_stats();
      to.losses.push_back(training.evaluate(share_of(text.batch(shape, 1, steps), seat, world)));
      to.digest = training.digest();
      to.peak_bytes = kept.stats().peak;
      ranks.agree(0, ranks.after(ten_seconds)).value();
    });
  }
  for (std::thread& each : threads)
    each.join();
  return ends;
}

std::uint64_t bytes_of_layer(std::size_t layer) {
  return 4 * parameter_layout(shape, shape.layer(layer)).elements;
}

/// The most that so many layers in a row take, and one, in the order in which a step reads them.
std::uint64_t bytes_in_a_row(std::uint32_t ahead) {
  std::vector<std::size_t> reads{0, 1, 2, 3, 4, 4, 3, 2, 1};
  std::uint64_t most = 0;
  for (std::size_t i = 0; i < reads.size(); ++i) {
    std::uint64_t bytes = 0;
    for (std::size_t k = i; k < std::min<std::size_t>(i + 1 + ahead, reads.size()); ++k)
      bytes += bytes_of_layer(reads[k]);
    most = std::max(most, bytes);
  }
  return most;
}

}  // namespace

TEST_CASE("weights gathered ahead or on demand train to the same losses and weights, bit for bit") {
  CHECK(weight_reads(shape) == std::vector<std::uint32_t>{0, 1, 2, 3, 4, 4, 3, 2, 1});
  for (const std::uint32_t world : {1U, 2U, 3U, 4U}) {
    for (const update_time when : {update_time::in_backward, update_time::after_backward}) {
      const auto asked = train(world, 0, when);
      CHECK(asked[0].gathers.uses == 0);
      for (const std::uint32_t ahead : {1U, 2U, 3U, 20U}) {
        CAPTURE(world);
        CAPTURE(ahead);
        const auto early = train(world, ahead, when);
        for (std::uint32_t rank = 0; rank < world; ++rank) {
          CHECK(early[rank].losses == asked[rank].losses);
          CHECK(early[rank].digest == asked[rank].digest);
          CHECK(early[rank].gathers.uses == steps * 9);
        }
      }
    }
  }
}

TEST_CASE("a rank's peak grows exactly by the layers gathered ahead") {
  std::uint64_t largest = 0;
  std::uint64_t parameters = 0;
  for (std::size_t i = 0; i < shape.layers(); ++i) {
    largest = std::max(largest, bytes_of_layer(i));
    parameters += bytes_of_layer(i) / 4;
  }
  for (const std::uint32_t world : {2U, 3U, 4U}) {
    for (const std::uint32_t ahead : {0U, 1U, 2U, 20U}) {
      CAPTURE(world);
      CAPTURE(ahead);
      const auto ends = train(world, ahead, update_time::in_backward);
      for (std::uint32_t rank = 0; rank < world; ++rank) {
        const std::uint64_t share = llmmem::even_share(parameters, rank, world).count;
        // A layer's gradients, what a sum takes, and the weights of as many layers and one. (In all there are
        // no more than all layers.)
        const std::uint64_t sums = world * std::min(largest, 4 * share);
        const std::uint64_t whole = ahead == 0 ? largest : std::min(bytes_in_a_row(ahead), 4 * parameters);
        CHECK(ends[rank].peak_bytes <= 16 * share + largest + sums + whole);
      }
    }
  }
}

TEST_CASE(
    "with one layer ahead, all gathers except a step's first run during computation, and two layers stay") {
  for (const std::uint32_t world : {1U, 2U, 3U, 4U}) {
    for (const std::uint32_t ahead : {1U, 2U}) {
      CAPTURE(world);
      CAPTURE(ahead);
      const auto asked = train(world, 0, update_time::in_backward);
      const auto early = train(world, ahead, update_time::in_backward);
      // The last layers of the forward pass are the first of the backward pass.
      const std::uint64_t stay = ahead + 1;
      for (const rank_end& each : early) {
        CHECK(each.gathers.kept == steps * stay);
        CHECK(each.gathers.gathers == steps * (9 - stay));
        CHECK(each.gathers.ahead == each.gathers.gathers - steps * ahead);
      }
      std::uint64_t not_again = 0;
      for (std::size_t i = 0; i < stay; ++i)
        not_again += bytes_of_layer(shape.layers() - 1 - i);
      const auto sent = [](const std::vector<rank_end>& ends) {
        return std::accumulate(ends.begin(), ends.end(), std::uint64_t{0},
                               [](std::uint64_t sum, const rank_end& each) { return sum + each.sent_bytes; });
      };
      CHECK(sent(asked) - sent(early) == steps * (world - 1) * not_again);
    }
  }
}
