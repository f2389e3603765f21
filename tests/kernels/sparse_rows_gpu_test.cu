// Summaries, bounds, choosing the highest scores or the tokens to keep, copying these, and attending to
// lists, against the host's run of the same bodies: every number and every bit.
#include <llmmem/kernels/block_summary.hpp>
#include <llmmem/kernels/device_executor.cuh>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/hot_rows.hpp>
#include <llmmem/kernels/kept_tokens.hpp>
#include <llmmem/kernels/select_tokens.hpp>
#include <llmmem/kernels/select_top.hpp>
#include <llmmem/kernels/token_lists.hpp>

#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "support/attention_world.hpp"
#include "support/device.cuh"
#include "support/kept_world.hpp"
#include "support/listed_world.hpp"
#include "support/summary_world.hpp"
#include "support/top_world.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;

void check_choice(std::uint64_t seed, cudaStream_t stream) {
  std::mt19937_64 random(seed);
  const top_world world(random);
  const top_order order = random() % 2 == 0 ? top_order::by_number : top_order::by_score;
  const device_array<float> scores(world.scores);
  const device_array<std::int32_t> counts(world.counts);
  const device_array<std::int32_t> numbers(world.numbers);
  const device_array<std::int32_t> out(std::vector<std::int32_t>(world.rows * world.k, -7));
  top_scores of = world.view();
  of.scores = scores.data();
  of.counts = counts.data();
  of.numbers = numbers.data();
  const device_array<std::byte> workspace(
      std::vector<std::byte>(select_top_workspace_bytes(of, world.k, order)));
  launch_or_replay(seed, stream, "a choice", [&] {
    return select_top(device_executor(stream), of, world.k, out.data(), world.k, order,
                      std::span(workspace.data(), workspace.size()))
        .has_value();
  });
  require(out.host() == world.select(host_executor{}, order), "the choice differs from the host's", seed);
}

void check_kept(std::uint64_t seed, cudaStream_t stream) {
  std::mt19937_64 random(seed);
  const scored_world scored(random);
  const device_array<float> scores(scored.scores);
  const device_array<std::int32_t> lengths(scored.lengths);
  const device_array<std::int32_t> out(std::vector<std::int32_t>(scored.entries(), -7));
  token_scores of = scored.view();
  of.scores = scores.data();
  of.lengths = lengths.data();
  launch_or_replay(seed, stream, "tokens to keep", [&] {
    return select_tokens(device_executor(stream), of, scored.budget, out.data(), scored.budget.budget)
        .has_value();
  });
  require(out.host() == scored.select(host_executor{}), "the tokens to keep differ from the host's", seed);

  kept_world world(random);
  const device_array<std::byte> from(world.cache);
  const device_array<std::byte> to(world.fresh());
  const device_array<std::int32_t> from_table(world.from_table);
  const device_array<std::int32_t> to_table(world.to_table);
  const device_array<std::int32_t> listed(world.listed);
  const device_array<std::uint32_t> flag(std::vector<std::uint32_t>{0});
  launch_or_replay(seed, stream, "kept tokens", [&] {
    return copy_kept_tokens(
               device_executor(stream), {to.data(), world.to_blocks, world.to_layout},
               world.to_view(to_table.data()), {from.data(), world.from_blocks, world.from_layout},
               world.from_view(from_table.data()), world.kept(listed.data()), world.layer, flag.data())
        .has_value();
  });
  require(to.host() == world.copy(host_executor{}), "kept tokens differ from the host's", seed);
  require(flag.host()[0] == 0, "a kept token has no place", seed);
}

void check_summaries(std::uint64_t seed, cudaStream_t stream) {
  std::mt19937_64 random(seed);
  summary_world summarized(random);
  const attention_world& world = summarized.world;
  std::vector<std::byte> expected = summarized.empty_summaries();
  require(summarized.summarize(host_executor{}, expected, true) == 0, "a block is none", seed);
  const device_array<std::byte> cache(world.cache);
  const device_array<std::byte> summaries(summarized.empty_summaries());
  std::vector<std::int32_t> named = summarized.blocks;
  std::vector<std::int32_t> named_ends = summarized.ends;
  const bool names_none = seed % 3 == 0;  // a block that does not exist
  if (names_none) {
    named.push_back(static_cast<std::int32_t>(world.blocks));
    named_ends.push_back(1);
  }
  const device_array<std::int32_t> blocks(named);
  const device_array<std::int32_t> ends(named_ends);
  const device_array<std::uint32_t> flag(std::vector<std::uint32_t>{0});
  const kv_memory memory{cache.data(), world.blocks, world.layout};
  launch_or_replay(seed, stream, "summaries", [&] {
    return summarize_keys(device_executor(stream),
                          {.blocks = blocks.data(), .ends = ends.data(), .count = blocks.size()}, memory,
                          world.layer, {summaries.data(), summaries.size()}, flag.data())
        .has_value();
  });
  require(summaries.host() == expected, "summaries differ from the host's", seed);
  require(flag.host()[0] == (names_none ? 1U : 0U), "a block that is none is flagged", seed);
  if (names_none) summarized.world.name_no_block(random);
  if (seed % 4 == 1 && !world.sequences.empty())
    summarized.world.sequences.back() = static_cast<std::int32_t>(world.tables.size());  // one past the last
  const device_array<std::uint32_t> bound_flag(std::vector<std::uint32_t>{0});
  const device_array<std::byte> queries(world.queries);
  const device_array<std::int32_t> padded(world.padded);
  const device_array<std::int32_t> tokens(world.tokens);
  const device_array<std::int32_t> sequences(world.sequences);
  const device_array<std::int32_t> lengths(world.lengths);
  const device_array<float> scales(world.scales[0]);
  const device_array<float> scores(std::vector<float>(world.rows * summarized.columns, 12345.0F));
  attention_options options = world.options;
  if (!world.scales[0].empty()) options.scales.keys = scales.data();
  options.out_of_range = bound_flag.data();
  const padded_table_view tables{.block_table = padded.data(),
                                 .seq_lens = tokens.data(),
                                 .num_sequences = static_cast<std::int32_t>(world.tables.size()),
                                 .max_blocks = world.columns,
                                 .block_tokens = static_cast<std::int32_t>(world.layout.block_tokens)};
  launch_or_replay(seed, stream, "bounds", [&] {
    return bound_scores(device_executor(stream), tables,
                        {.rows = world.rows, .sequences = sequences.data(), .lengths = lengths.data()},
                        {queries.data(), world.query_strides[0], world.query_strides[1]}, memory,
                        {summaries.data(), summaries.size()}, summarized.columns, scores.data(), options)
        .has_value();
  });
  require(scores.host() == summarized.bound(host_executor{}, expected), "bounds differ from the host's",
          seed);
}

void check_lists(std::uint64_t seed, cudaStream_t stream) {
  std::mt19937_64 random(seed);
  const listed_world lists(random);
  const attention_world& world = lists.world;
  const device_array<std::byte> queries(world.queries);
  const device_array<std::byte> out(world.out);
  const device_array<std::byte> cache(world.cache);
  const device_array<std::byte> workspace(std::vector<std::byte>(world.workspace_bytes(), std::byte{0xFF}));
  const device_array<std::int32_t> padded(world.padded);
  const device_array<std::int32_t> tokens(world.tokens);
  const device_array<std::int32_t> of_row(lists.of_row);
  const device_array<std::int32_t> listed(lists.listed);
  const device_array<std::int32_t> counts(lists.counts);
  const device_array<float> scales[2] = {device_array<float>(world.scales[0]),
                                         device_array<float>(world.scales[1])};
  const device_array<std::uint32_t> flag(std::vector<std::uint32_t>{0});
  const padded_table_view tables{.block_table = padded.data(),
                                 .seq_lens = tokens.data(),
                                 .num_sequences = static_cast<std::int32_t>(world.tables.size()),
                                 .max_blocks = world.columns,
                                 .block_tokens = static_cast<std::int32_t>(world.layout.block_tokens)};
  token_lists<padded_table_view> view = lists.lists_over(tables);
  view.of_row = of_row.data();
  view.listed = listed.data();
  view.counts = counts.data();
  attention_options options = world.options;
  if (!world.scales[0].empty()) {
    options.scales.keys = scales[0].data();
    options.scales.values = scales[1].data();
  }
  options.out_of_range = flag.data();
  launch_or_replay(seed, stream, "attention to lists", [&] {
    return paged_attention(device_executor(stream), view, {.rows = world.rows},
                           {queries.data(), world.query_strides[0], world.query_strides[1]},
                           {out.data(), world.out_strides[0], world.out_strides[1]},
                           {cache.data(), world.blocks, world.layout}, world.layer,
                           {workspace.data(), workspace.size()}, options)
        .has_value();
  });
  std::vector<std::byte> expected = world.out;
  std::vector<std::byte> host_cache = world.cache;
  std::vector<std::byte> host_workspace(world.workspace_bytes());
  std::uint32_t host_flag = 0;
  require(world
              .attend_to(host_executor{},
                         {.queries = world.queries.data(),
                          .out = expected.data(),
                          .cache = host_cache.data(),
                          .workspace = host_workspace.data(),
                          .padded = world.padded.data(),
                          .seq_lens = world.tokens.data(),
                          .scales = {world.scales[0].data(), world.scales[1].data()},
                          .flag = &host_flag},
                         table_form::padded, lists)
              .has_value(),
          "attention to lists on the host", seed);
  require(out.host() == expected, "outputs differ from the host's", seed);
  require(flag.host()[0] == host_flag, "the flag differs from the host's", seed);
}

/// Buffers of hot rows over some steps: every word of the state, and every row.
void check_hot_rows(std::uint64_t seed, cudaStream_t stream) {
  std::mt19937_64 random(seed);
  const bool is_large = seed % 2 == 0;  // more slots, and wanted rows, than a warp has lanes
  const hot_rows_shape shape{.sequences = static_cast<std::uint32_t>(1 + random() % (is_large ? 5 : 40)),
                             .slots = static_cast<std::uint32_t>(1 + random() % (is_large ? 90 : 9)),
                             .positions = is_large ? 200U : 24U};
  const auto k = static_cast<std::uint32_t>(1 + random() % shape.slots);
  constexpr std::uint64_t row_bytes = 48;
  const std::uint32_t columns = (shape.positions + 3) / 4;
  std::vector<std::int32_t> table(std::size_t{shape.sequences} * columns);
  for (std::size_t i = 0; i < table.size(); ++i)
    table[i] = random() % 9 == 0 ? -1 : static_cast<std::int32_t>(random() % table.size());
  std::vector<std::byte> pool(table.size() * 4 * row_bytes);
  for (std::byte& each : pool)
    each = static_cast<std::byte>(random());
  std::vector<std::int32_t> state(hot_rows_words(shape) * shape.sequences, 5);
  std::vector<std::byte> rows((shape.slots + 1) * shape.sequences * row_bytes, std::byte{0xA5});
  const device_array<std::int32_t> device_table(table);
  const device_array<std::byte> device_pool(pool);
  const device_array<std::int32_t> device_state(state);
  const device_array<std::byte> device_rows(rows);
  const padded_table_view tables{.block_table = table.data(),
                                 .num_sequences = static_cast<std::int32_t>(shape.sequences),
                                 .max_blocks = static_cast<std::int32_t>(columns),
                                 .block_tokens = 4};
  padded_table_view there = tables;
  there.block_table = device_table.data();
  require(reset_hot_rows(host_executor{}, shape, state).has_value(), "a reset on the host", seed);
  require(reset_hot_rows(device_executor(stream), shape, {device_state.data(), state.size()}).has_value(),
          "a reset", seed);
  for (int turn = 0; turn < 4; ++turn) {
    std::vector<std::int32_t> wanted(std::size_t{k} * shape.sequences);
    for (std::int32_t& each : wanted)
      each = static_cast<std::int32_t>(random() % (shape.positions + 2)) - 1;
    std::vector<std::int32_t> newest(shape.sequences, turn);
    std::vector<std::int32_t> slots(wanted.size(), -9);
    std::vector<hot_miss> misses(wanted.size());
    std::vector<std::uint32_t> counts(shape.sequences);
    const device_array<std::int32_t> device_wanted(wanted);
    const device_array<std::int32_t> device_newest(newest);
    const device_array<std::int32_t> device_slots(slots);
    const device_array<hot_miss> device_misses(misses);
    const device_array<std::uint32_t> device_counts(counts);
    const hot_rows_step step{wanted.data(), newest.data(), slots.data(), misses.data(), counts.data(), k, k};
    const hot_rows_step on_device{device_wanted.data(),
                                  device_newest.data(),
                                  device_slots.data(),
                                  device_misses.data(),
                                  device_counts.data(),
                                  k,
                                  k};
    require(resolve_hot_rows(host_executor{}, shape, state, step).has_value(), "a step on the host", seed);
    require(fetch_hot_rows(host_executor{}, shape, step, tables,
                           {pool.data(), table.size(), 4 * row_bytes, row_bytes}, std::span(rows), row_bytes)
                .has_value(),
            "a fetch on the host", seed);
    const device_executor run(stream, {.blocks = static_cast<std::uint32_t>(seed % 3 == 0 ? 2 : 0)});
    require(resolve_hot_rows(run, shape, {device_state.data(), state.size()}, on_device).has_value(),
            "a step", seed);
    require(fetch_hot_rows(run, shape, on_device, there,
                           {device_pool.data(), table.size(), 4 * row_bytes, row_bytes},
                           {device_rows.data(), rows.size()}, row_bytes)
                .has_value(),
            "a fetch", seed);
    check(cudaStreamSynchronize(stream), "a step of hot rows");
    require(device_slots.host() == slots, "slots differ from the host's", seed);
    require(device_counts.host() == counts, "counts differ from the host's", seed);
  }
  require(device_state.host() == state, "the state differs from the host's", seed);
  require(device_rows.host() == rows, "rows differ from the host's", seed);
}

/// Tokens of chosen blocks: of blocks that are none, and behind a row's end, there are none.
void check_block_tokens(std::uint64_t seed, cudaStream_t stream) {
  std::mt19937_64 random(seed);
  const std::uint64_t rows = random() % 9;
  const auto k = static_cast<std::uint32_t>(random() % 40);
  const auto block_tokens = static_cast<std::uint32_t>(1 + random() % 20);
  std::vector<std::int32_t> blocks(rows * k);
  for (std::int32_t& each : blocks)
    each = static_cast<std::int32_t>(random() % 40) - 1;
  std::vector<std::int32_t> lengths(rows);
  for (std::int32_t& each : lengths)
    each = static_cast<std::int32_t>(random() % (40 * block_tokens));
  std::vector<std::int32_t> listed(blocks.size() * block_tokens, -7);
  const device_array<std::int32_t> blocks_there(blocks);
  const device_array<std::int32_t> lengths_there(lengths);
  const device_array<std::int32_t> listed_there(listed);
  const auto list = [&](const auto& run, const std::int32_t* of, const std::int32_t* ends, std::int32_t* to) {
    return list_block_tokens(
               run, {.blocks = of, .lengths = ends, .rows = rows, .k = k, .block_tokens = block_tokens}, to)
        .has_value();
  };
  launch_or_replay(seed, stream, "tokens of blocks", [&] {
    return list(device_executor(stream), blocks_there.data(), lengths_there.data(), listed_there.data());
  });
  require(list(host_executor{}, blocks.data(), lengths.data(), listed.data()), "tokens on the host", seed);
  require(listed_there.host() == listed, "tokens of blocks differ from the host's", seed);
}

void check_world(std::uint64_t seed, cudaStream_t stream) {
  check_choice(seed, stream);
  check_kept(seed, stream);
  check_summaries(seed, stream);
  check_lists(seed, stream);
  check_block_tokens(seed, stream);
  if (seed % 3 == 0) check_hot_rows(seed, stream);
}

}  // namespace

int main() {
  check_worlds(150, check_world);
}
