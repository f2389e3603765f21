#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/thread_network.hpp>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/host_vector_executor.hpp>
#include <llmmem/kernels/near_attention.hpp>
#include <llmmem/kernels/rank_attention.hpp>
#include <llmmem/testing/near_storage.hpp>
#include <llmmem/testing/sim_network.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "support/attention_parts_world.hpp"
#include "support/attention_world.hpp"
#include "support/seeds.hpp"
#include "support/sim_world.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;

/// A world whose rows are a query as it travels: side by side, with sequences and lengths.
struct near_world {
  attention_world world;
  std::vector<std::byte> queries{};
  near_query query{};

  explicit near_world(std::mt19937_64& random) : world(random) {
    while (world.rows == 0)
      world = attention_world(random);
    world.scales[0].clear();
    world.scales[1].clear();
    if (world.sequences.empty()) {
      for (std::uint64_t row = 0; row < world.rows; ++row)
        world.sequences.push_back(static_cast<std::int32_t>(row));
    }
    if (world.lengths.empty()) {
      for (const std::int32_t sequence : world.sequences)
        world.lengths.push_back(sequence < 0 ? 0 : world.tokens[static_cast<std::size_t>(sequence)]);
    }
    query.rows = world.rows;
    query.layer = world.layer;
    query.query_heads = world.query_heads();
    query.head_dim = static_cast<std::uint32_t>(world.layout.vector_elements(0));
    query.value_dim = static_cast<std::uint32_t>(world.layout.vector_elements(1));
    query.element = world.options.element;
    query.scale = world.options.scale;
    query.window = world.options.window;
    query.sequences = world.sequences.data();
    query.lengths = world.lengths.data();
    queries.resize(query.query_bytes());
    const std::size_t head = query.head_dim * element_bytes(query.element);
    for (std::uint64_t row = 0; row < query.rows; ++row)
      for (std::uint64_t h = 0; h < query.query_heads; ++h)
        std::memcpy(queries.data() + (row * query.query_heads + h) * head,
                    world.queries.data() + row * world.query_strides[0] + h * world.query_strides[1], head);
    query.queries = queries.data();
  }
  near_world(const near_world&) = delete;
  near_world& operator=(const near_world&) = delete;

  /// The tokens that a rank of so many holds, by runs of `run`.
  [[nodiscard]] attention_world of_rank(std::uint32_t rank, std::uint32_t size, std::uint32_t run) const {
    return dealt(world, {.cp_rank = rank, .cp_size = size, .cp_interleave = run});
  }
};

[[nodiscard]] padded_table_view tables_of(const attention_world& world) {
  return {.block_table = world.padded.data(),
          .seq_lens = world.tokens.data(),
          .num_sequences = static_cast<std::int32_t>(world.tables.size()),
          .max_blocks = world.columns,
          .block_tokens = static_cast<std::int32_t>(world.layout.block_tokens)};
}

template <class Run = host_executor>
[[nodiscard]] table_holder<Run, padded_table_view> holder_of(attention_world& world,
                                                             std::vector<std::byte>& workspace,
                                                             attention_arithmetic arithmetic = {}) {
  workspace.assign(world.workspace_bytes(), std::byte{0xFF});
  return {Run(),
          tables_of(world),
          kv_memory{world.cache.data(), world.blocks, world.layout},
          {.split = world.options.split, .arithmetic = arithmetic, .workspace = workspace}};
}

/// What a call leaves: outputs as floats, and what went over links.
struct near_made {
  std::vector<float> out{};
  near_traffic traffic{};
};

template <class... Holders>
[[nodiscard]] near_made attend(const near_query& query, Holders&... holders) {
  const attention_part_shape shape = query.shape();
  near_made made{std::vector<float>(shape.rows * shape.query_heads * shape.value_dim, 12345.0F)};
  const std::uint64_t vector = std::uint64_t{shape.value_dim} * sizeof(float);
  merged_attention<> out;
  out.out = {reinterpret_cast<std::byte*>(made.out.data()), vector * shape.query_heads, vector};
  out.sequences = query.sequences;
  const std::uint64_t parts = (std::uint64_t{0} + ... + holders.parts());
  std::vector<std::byte> workspace(near_workspace_bytes(shape, parts), std::byte{0xFF});
  made.traffic = attend_near(host_executor{}, query, workspace, out, holders...).value();
  return made;
}

[[nodiscard]] bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * 4) == 0);
}

/// What attention to the world comes to, without a holder.
[[nodiscard]] std::vector<float> directly(const near_world& near) {
  const attention_part_shape shape = near.query.shape();
  part_memory part(shape);
  attend_part(near.world, host_executor{}, table_form::csr, part);
  std::vector<float> made(shape.rows * shape.query_heads * shape.value_dim, 12345.0F);
  const std::uint64_t vector = std::uint64_t{shape.value_dim} * sizeof(float);
  merged_attention<> out;
  out.out = {reinterpret_cast<std::byte*>(made.data()), vector * shape.query_heads, vector};
  out.sequences = near.query.sequences;
  const attention_part parts[] = {part.part()};
  merge_attention(host_executor{}, shape, parts, out).value();
  return made;
}

[[nodiscard]] double difference(const std::vector<float>& a, const std::vector<float>& b) {
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    if (!(std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i])) <= most))
      most = std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i]));  // a NaN stays
  return most / 2;                                                             // the largest value
}

}  // namespace

TEST_SUITE("near_attention") {
  TEST_CASE(
      "a rank that queries the others gets the whole result, and the link carries the bytes of the formula") {
    for (const auto seed : seeds(24, 6)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const near_world near(random);
      attention_world alone = near.world;
      std::vector<std::byte> alone_workspace;
      table_holder whole = holder_of(alone, alone_workspace);
      const near_made expected = attend(near.query, whole);
      CHECK(expected.traffic == near_traffic{});
      CHECK(same_bits(expected.out, directly(near)));
      const auto size = static_cast<std::uint32_t>(2 + random() % 3);
      const std::uint32_t run = random() % 2 == 0 ? 1 : near.world.layout.block_tokens;
      std::vector<near_made> made(2);
      for (std::size_t turn = 0; turn < 2; ++turn) {
        in_world(size, seed * 2 + turn, [&](sim_ranks& ranks, std::uint32_t self) {
          attention_world mine = near.of_rank(self, size, run);
          std::vector<std::byte> mine_workspace;
          table_holder own = holder_of(mine, mine_workspace);
          if (self != 0) {
            std::vector<std::byte> memory(near_serving_bytes(near.query));
            const near_traffic served = serve_attention(ranks, rank_id{0}, own, memory).value();
            CHECK(served.received_bytes == near_query_bytes(near.query));
            CHECK(served.sent_bytes == near_reply_bytes(near.query.shape()));
            return;
          }
          std::vector<rank_id> others;
          for (std::uint32_t rank = 1; rank < size; ++rank)
            others.push_back(rank_id{rank});
          std::vector<std::byte> message(near_body_bytes(near.query));
          asked_ranks asked(ranks, std::span<const rank_id>(others), message);
          made[turn] = attend(near.query, own, asked);
          std::uint64_t sent = 0;
          std::uint64_t received = 0;
          for (const seat_id seat : ranks.seats()) {
            sent += ranks.traffic(seat).sent_bytes;
            received += ranks.traffic(seat).received_bytes;
          }
          CHECK(made[turn].traffic == near_traffic{sent, received});
        });
        const std::uint64_t asked = size - 1;
        CHECK(made[turn].traffic.sent_bytes == asked * near_query_bytes(near.query));
        CHECK(made[turn].traffic.received_bytes == asked * near_reply_bytes(near.query.shape()));
      }
      // Of another order of messages, the same bits.
      CHECK(same_bits(made[0].out, made[1].out));
      CHECK(difference(made[0].out, expected.out) <= 1e-6);
    }
  }

  TEST_CASE("holders that attend by vectors of the host, and others, make one result") {
    for (const auto seed : seeds(24, 12)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const near_world near(random);
      attention_world first = near.of_rank(0, 2, 4);
      attention_world second = near.of_rank(1, 2, 4);
      std::vector<std::byte> first_workspace;
      std::vector<std::byte> second_workspace;
      table_holder by_vectors =
          holder_of<host_vector_executor<>>(first, first_workspace, attention_arithmetic::host_vectors);
      table_holder by_bits = holder_of(second, second_workspace);
      CHECK(difference(attend(near.query, by_vectors, by_bits).out, directly(near)) <= 3e-6);
    }
  }

  TEST_CASE("ranks that share the tokens query each other, and all get the same bits") {
    for (const auto seed : seeds(24, 6)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const near_world near(random);
      attention_world alone = near.world;
      std::vector<std::byte> alone_workspace;
      table_holder whole = holder_of(alone, alone_workspace);
      const near_made expected = attend(near.query, whole);
      const auto size = static_cast<std::uint32_t>(1 + random() % 4);
      const std::uint32_t run = random() % 2 == 0 ? 1 : near.world.layout.block_tokens;
      std::vector<near_made> made(size);
      in_world(size, seed, [&](sim_ranks& ranks, std::uint32_t self) {
        attention_world mine = near.of_rank(self, size, run);
        std::vector<std::byte> mine_workspace;
        table_holder own = holder_of(mine, mine_workspace);
        sharing_ranks shared(ranks, own);
        made[self] = attend(near.query, shared);
      });
      for (const near_made& each : made) {
        CHECK(same_bits(each.out, made[0].out));
        const std::uint64_t sent = (size - 1) * attention_part_bytes(near.query.shape());
        CHECK(each.traffic == near_traffic{sent, sent});
      }
      CHECK(difference(made[0].out, expected.out) <= 1e-6);
    }
  }

  TEST_CASE("threads of one process serve as ranks, regardless of which starts first") {
    std::mt19937_64 random(7);
    const near_world near(random);
    constexpr std::uint32_t size = 3;
    std::vector<near_made> made(3 * size);
    for (std::uint32_t turn = 0; turn < 3; ++turn) {
      thread_network net(size);
      std::vector<std::thread> threads;
      for (std::uint32_t seat = 0; seat < size; ++seat) {
        threads.emplace_back([&, seat] {
          thread_endpoint end(net, seat_id{seat});
          communicator ranks(end);
          ranks.join(ranks.after(10'000'000'000)).value();
          const std::uint32_t self = to_index(ranks.rank());
          attention_world mine = near.of_rank(self, size, 1);
          std::vector<std::byte> mine_workspace;
          table_holder own = holder_of(mine, mine_workspace);
          sharing_ranks shared(ranks, own);
          made[turn * size + self] = attend(near.query, shared);
          ranks.agree(0, ranks.after(10'000'000'000)).value();
        });
      }
      for (std::thread& each : threads)
        each.join();
    }
    for (const near_made& each : made)
      CHECK(same_bits(each.out, made[0].out));
  }

  TEST_CASE(
      "the querying rank receives another rank's refusal with its text, and the next query is answered") {
    std::mt19937_64 random(3);
    const near_world near(random);
    in_world(2, 1, [&](sim_ranks& ranks, std::uint32_t self) {
      attention_world mine = near.of_rank(self, 2, 1);
      std::vector<std::byte> mine_workspace;
      table_holder own = holder_of(mine, mine_workspace);
      std::vector<std::byte> memory(2 * near_serving_bytes(near.query));
      const rank_id other{1};
      if (self == 1) {
        CHECK(serve_attention(ranks, rank_id{0}, own, memory).code() == errc::size_mismatch);
        CHECK(serve_attention(ranks, rank_id{0}, own, memory).code() == errc::out_of_range);
        CHECK(serve_attention(ranks, rank_id{0}, own, memory).has_value());
        return;
      }
      asked_ranks asked(ranks, std::span<const rank_id>(&other, 1), memory);
      const auto told = [&](const near_query& query) {
        merged_attention<> out;
        std::vector<float> values(query.rows * query.query_heads * query.value_dim);
        const std::uint64_t vector = std::uint64_t{query.value_dim} * sizeof(float);
        out.out = {reinterpret_cast<std::byte*>(values.data()), vector * query.query_heads, vector};
        std::vector<std::byte> workspace(near_workspace_bytes(query.shape(), 1));
        const auto done = attend_near(host_executor{}, query, workspace, out, asked);
        return done ? std::string() : done.error().message();
      };
      near_query wrong = near.query;
      wrong.value_dim += 8;
      CHECK(
          told(wrong).find(
              "table_holder: value_dim of the query and of the cache: two lengths must be equal, but are ") ==
          0);
      wrong = near.query;
      wrong.layer = 9;
      CHECK(told(wrong).find("paged_attention: layer: 9 requested") == 0);
      CHECK(told(near.query).empty());
    });
  }

  TEST_CASE(
      "a message that is not a query, or is too large for the memory, is refused before it is received") {
    in_world(2, 1, [&](sim_ranks& ranks, std::uint32_t self) {
      std::mt19937_64 random(3);
      const near_world near(random);
      attention_world mine = near.of_rank(self, 2, 1);
      std::vector<std::byte> mine_workspace;
      table_holder own = holder_of(mine, mine_workspace);
      std::vector<std::byte> memory(near_serving_bytes(near.query));
      const auto good = [&] {
        detail::near_header header;
        header.rows = near.query.rows;
        header.query_heads = near.query.query_heads;
        header.head_dim = near.query.head_dim;
        header.value_dim = near.query.value_dim;
        header.element = static_cast<std::uint32_t>(near.query.element);
        header.body_bytes = near_query_bytes(near.query) - near_header_bytes;
        return header;
      };
      std::vector<detail::near_header> wrong(8, good());
      wrong[0].what = 0;
      wrong[1].element = 77;
      near_query large = near.query;
      ++large.rows;  // all of it fits together, and not into the memory
      wrong[2].rows = large.rows;
      wrong[2].body_bytes = near_query_bytes(large) - near_header_bytes;
      wrong[3].body_bytes += 16;
      wrong[4].query_heads = ~0U;
      wrong[5].head_dim = ~0U;
      wrong[6].rows = ~std::uint64_t{0} / 3;
      wrong[7].rows = memory.size() / 8;
      wrong[7].query_heads = ~0U;
      for (const detail::near_header& each : wrong) {
        if (self == 0) {
          ranks
              .send(detail::bytes_of(each), rank_id{1}, rank_attention_options{}.tag,
                    ranks.after(1'000'000'000))
              .value();
          detail::near_answer answer;
          ranks
              .recv(std::as_writable_bytes(std::span(&answer, 1)), rank_id{1},
                    rank_attention_options{}.tag + 1, ranks.after(1'000'000'000))
              .value();
          CHECK(answer.number != 0);
          const failure why = detail::refusal_of(answer, 1);
          CHECK(why.where.view().find("serve_attention: ") == 0);
        } else {
          CHECK(!serve_attention(ranks, rank_id{0}, own, memory).has_value());
        }
      }
    });
    detail::near_answer strange;
    strange.number = 250;
    std::fill_n(strange.where, sizeof strange.where, 'x');  // without an end
    CHECK(detail::refusal_of(strange, 4).code == errc::stopped);
    strange.number = errc::too_short.number();
    CHECK(detail::refusal_of(strange, 4).where.view().size() <= 96);
  }

  TEST_CASE("a device near its storage gives the same bits, at the cost of its links") {
    std::mt19937_64 random(11);
    const near_world near(random);
    attention_world alone = near.world;
    std::vector<std::byte> alone_workspace;
    table_holder whole = holder_of(alone, alone_workspace);
    const near_made expected = attend(near.query, whole);
    const link_model link{.bytes_per_second = 1'000'000'000, .latency_ns = 1000};
    const link_model inside{.bytes_per_second = 10'000'000'000, .latency_ns = 0};
    testing::near_storage device(whole, near.world.layout, link, inside);
    const near_made made = attend(near.query, device);
    CHECK(same_bits(made.out, expected.out));
    std::uint64_t tokens = 0;
    for (std::uint64_t row = 0; row < near.query.rows; ++row) {
      if (near.query.sequences[row] < 0) continue;
      const auto length = static_cast<std::uint64_t>(near.query.lengths[row]);
      tokens += near.query.window == 0 ? length : std::min<std::uint64_t>(length, near.query.window);
    }
    const std::uint64_t token_bytes = near.world.layout.layer_bytes() / near.world.layout.block_tokens;
    CHECK(device.costs().read_bytes == tokens * token_bytes);
    CHECK(made.traffic.sent_bytes == near.query.rows * 8 + near.query.query_bytes());
    CHECK(made.traffic.received_bytes == attention_part_bytes(near.query.shape()));
    CHECK(device.costs().near_ns >=
          2000 + made.traffic.sent_bytes + made.traffic.received_bytes + tokens * token_bytes / 10);
    CHECK(device.costs().fetch_ns >= 1000 + tokens * token_bytes);
  }

  TEST_CASE("a mismatched query is refused before any rank is asked, and a failing holder ends the call") {
    std::mt19937_64 random(3);
    const near_world near(random);
    attention_world alone = near.world;
    std::vector<std::byte> alone_workspace;
    table_holder whole = holder_of(alone, alone_workspace);
    std::vector<std::byte> workspace(near_workspace_bytes(near.query.shape(), 2));
    merged_attention<> out;
    std::vector<float> values(near.query.rows * near.query.query_heads * near.query.value_dim, 5.0F);
    const std::uint64_t vector = std::uint64_t{near.query.value_dim} * sizeof(float);
    out.out = {reinterpret_cast<std::byte*>(values.data()), vector * near.query.query_heads, vector};
    const auto told = [&](const near_query& query, std::size_t bytes) {
      const auto done =
          attend_near(host_executor{}, query, std::span(workspace).first(bytes), out, whole, whole);
      return done ? failure{} : done.error();
    };
    CHECK(told(near.query, workspace.size() - 1).code == errc::too_short);
    near_query wrong = near.query;
    wrong.lengths = nullptr;
    CHECK(told(wrong, workspace.size()) == failure{errc::too_short, 0, near.query.rows, 0});
    wrong = near.query;
    wrong.queries += 4;
    CHECK(told(wrong, workspace.size()).code == errc::bad_granularity);
    wrong = near.query;
    wrong.layer = 9;
    CHECK(told(wrong, workspace.size()).code == errc::out_of_range);
    CHECK(std::ranges::count(values, 5.0F) == static_cast<std::ptrdiff_t>(values.size()));
    static_assert(near_workspace_bytes({3, 1, 8}, 2) == 2 * 128);
    static_assert(near_workspace_bytes({~std::uint64_t{0}, 4, 128}, 2) == ~std::uint64_t{0});
  }
}
