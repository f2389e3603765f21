/// @file
/// Blocks of another node over Unix sockets, compared with the same frames by the same endpoint without a
/// pool; blocks read from its memory, compared with memcpy; and the cost of the directory.
#include <llmmem/comm/socket_endpoint.hpp>
#include <llmmem/offload/kv_tiers.hpp>
#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/outside_keys.hpp>
#include <llmmem/pool/kv_pool.hpp>
#include <llmmem/pool/shared_memory_mover.hpp>
#ifdef LLMMEM_BENCH_UCX
#include <llmmem/pool/ucx_mover.hpp>
#endif
#include <llmmem/space/host.hpp>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "support/bench_folder.hpp"
#include "support/requests.hpp"

namespace {

using namespace llmmem;

struct traits : paged_traits {
  using observer = offload::tier_link;
};
using cache_type = paged_allocator<traits>;
using mover_type = offload::layout_mover<host_executor>;

constexpr std::uint64_t moved_bytes = std::uint64_t{64} << 20;

/// A node whose first tier can have all blocks of a row.
template <class Space, class Mover = pool::message_mover>
struct node {
  using tiers_type = kv_tiers<cache_type, mover_type, offload::kv_tier<Space>>;
  using pool_type = kv_pool<tiers_type, socket_endpoint, pool::embedded_directory, Mover>;

  template <class... Movers>
  node(Space& host, const std::string& folder, std::uint32_t seat, std::uint64_t bytes, std::uint64_t blocks,
       Movers&... mover)
      : layout({.layers = 1,
                .heads = 1,
                .head_dim = static_cast<std::uint32_t>(bytes / 16),
                .block_tokens = 16,
                .has_values = false,
                .element = dtype::int8,
                .order = block_order::block_first}),
        cache({.blocks = 16, .block_tokens = 16, .max_sequences = 2, .max_sequence_tokens = 256}),
        kv(layout.total_bytes(cache.physical_blocks())),
        tiers(cache, mover_type({}, {.data = kv.data(), .blocks = cache.physical_blocks(), .layout = layout}),
              {.load_headroom = 0}, offload::kv_tier(host, blocks * bytes)),
        end({.seat = seat_id{seat}, .seats = 2, .folder = folder}),
        pool(tiers, end, mover..., kv_pool_options{.patience_ns = 60'000'000'000}) {}

  /// Fills the first tier with the blocks of a prompt, and publishes them.
  void hold(const std::vector<token_id>& prompt, std::uint64_t bytes) {
    const kv_chain chain(cache, prompt);
    for (std::size_t i = 0; i < chain.keys().size(); ++i) {
      const std::uint64_t parent = i == 0 ? 0 : paging::key_digest(chain.keys()[i - 1]);
      const auto slot = tiers.begin_arrival(0, chain.keys()[i], parent).value();
      std::fill_n(tiers.bytes_of(slot).data(), bytes, std::byte{7});
      tiers.end_arrival(slot, true);
      tiers.release(slot);
    }
    pool.publish(chain, chain.tokens());
  }

  kv_layout layout;
  cache_type cache;
  std::vector<std::byte> kv;
  tiers_type tiers;
  socket_endpoint end;
  pool_type pool;
};

/// Frames to and from a seat, without a pool.
struct plain_frames {
  explicit plain_frames(const socket_options& options) : end(options) {}

  frame_buffer buffer_for(seat_id, const frame_header& frame) noexcept {
    const std::size_t first = at % into.size();
    return {.what = frame_buffer::answer::take, .bytes = std::span(into).subspan(first, frame.bytes)};
  }
  void on_frame(seat_id, const frame_header& frame) noexcept { at += frame.bytes; }
  void on_message(seat_id, const frame_header&, std::span<const std::byte>) noexcept { ++asked; }
  void on_death(seat_id, comm::death) noexcept {}
  void on_joined(seat_id) noexcept { is_joined = true; }
  [[nodiscard]] bool keeps_waiting() const noexcept { return true; }

  socket_endpoint end;
  std::vector<std::byte> into = std::vector<std::byte>(moved_bytes);
  std::size_t at = 0;
  std::uint64_t asked = 0;
  bool is_joined = false;
};

deadline soon(socket_endpoint& end) {
  return deadline{end.now_ns() + 1'000'000};
}

/// Sends all bytes of a row on each request.
void send_plain(const std::string& folder, std::uint64_t bytes, const std::atomic<bool>& is_over) {
  plain_frames one({.seat = seat_id{0}, .seats = 2, .folder = folder});
  while (!is_over) {
    static_cast<void>(one.end.poll(soon(one.end), one));
    for (; one.asked != 0; --one.asked) {
      for (std::uint64_t sent = 0; sent < moved_bytes;) {
        const std::uint64_t most = std::min<std::uint64_t>(bytes, one.end.frame_bytes());
        static_cast<void>(one.end.send(seat_id{1}, {}, std::span(one.into).subspan(sent, most),
                                       deadline{one.end.now_ns() + 10'000'000'000}, one));
        sent += most;
      }
    }
  }
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> of) {
  std::sort(of.begin(), of.end());
  return of[of.size() / 2];
}

/// Asks for a prompt until another node has all of its blocks. Returns false after 60 s.
template <class Node>
bool finds(Node& asker, const kv_chain& chain) {
  const auto since = std::chrono::steady_clock::now();
  while (seconds_since(since) < 60) {
    auto request = asker.pool.ask(chain, 0).value();
    request.wait_for_answers();
    if (request.where().elsewhere == chain.keys().size()) return true;
    asker.pool.progress();
  }
  return false;
}

/// Fetches all blocks of a prompt, and returns the seconds that it took. Then the tiers are empty again.
template <class Node>
double seconds_of_fetch(benchmark::State& state, Node& asker, const kv_chain& chain) {
  const auto start = std::chrono::steady_clock::now();
  auto request = asker.pool.ask(chain, 0).value();
  request.wait_for_answers();
  request.fetch();
  request.wait();
  const double taken = seconds_since(start);
  if (request.end().blocks != chain.keys().size()) state.SkipWithError("a block did not come");
  asker.tiers.clear();
  return taken;
}

/// Reports the rate of 64 MiB, and that of what was timed in turns with it.
void report(benchmark::State& state, const std::vector<double>& ours, const std::vector<double>& others,
            const std::string& name) {
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(moved_bytes));
  state.counters[name + "_GB/s"] = static_cast<double>(moved_bytes) / median(others) / 1e9;
  std::vector<double> ratios;
  for (std::size_t i = 0; i < ours.size(); ++i)
    ratios.push_back(others[i] / ours[i]);
  state.counters["of_" + name] = median(ratios);
}

/// One iteration fetches 64 MiB and receives as many plain bytes, in turns.
void pool_fetch(benchmark::State& state) {
  const auto bytes = static_cast<std::uint64_t>(state.range(0));
  const std::uint64_t blocks = moved_bytes / bytes;
  const llmmem_bench::bench_folder folder;
  const llmmem_bench::bench_folder plain_folder;
  std::atomic<bool> is_over = false;
  std::thread sender([&] { send_plain(plain_folder.path(), bytes, is_over); });
  std::thread holder([&] {
    host_space host({.budget = blocks * bytes + 4096});
    node<host_space> one(host, folder.path(), 0, bytes, blocks);
    std::vector<token_id> prompt(blocks * 16);
    std::iota(prompt.begin(), prompt.end(), 0);
    one.hold(prompt, bytes);
    while (!is_over)
      one.pool.progress(1'000'000);
  });
  {
    host_space host({.budget = blocks * bytes + 4096});
    node<host_space> asker(host, folder.path(), 1, bytes, blocks);
    plain_frames plain({.seat = seat_id{1}, .seats = 2, .folder = plain_folder.path()});
    std::vector<token_id> prompt(blocks * 16);
    std::iota(prompt.begin(), prompt.end(), 0);
    const kv_chain chain(asker.cache, prompt);
    const auto since = std::chrono::steady_clock::now();
    while (!plain.is_joined && seconds_since(since) < 60)
      static_cast<void>(plain.end.poll(soon(plain.end), plain));
    if (!plain.is_joined || !finds(asker, chain))
      state.SkipWithError("the other node was not found within 60 s");
    std::vector<double> pool_times;
    std::vector<double> plain_times;
    for (auto _ : state) {
      pool_times.push_back(seconds_of_fetch(state, asker, chain));
      state.SetIterationTime(pool_times.back());
      const auto start = std::chrono::steady_clock::now();
      plain.at = 0;
      plain.end.post(seat_id{0}, {}, std::span(plain.into).first(1));
      while (plain.at < moved_bytes)
        static_cast<void>(plain.end.poll(soon(plain.end), plain));
      plain_times.push_back(seconds_since(start));
    }
    report(state, pool_times, plain_times, "plain");
    is_over = true;
  }
  sender.join();
  holder.join();
}

/// One iteration reads 64 MiB from the memory of another node, and copies as many bytes with memcpy, in
/// turns.
template <class Mover, class Make>
void read_by(benchmark::State& state, Make make) {
  using node_type = node<typename Mover::space_type, Mover&>;
  const auto bytes = static_cast<std::uint64_t>(state.range(0));
  const std::uint64_t blocks = moved_bytes / bytes;
  const llmmem_bench::bench_folder folder;
  std::atomic<bool> is_over = false;
  std::vector<token_id> prompt(blocks * 16);
  std::iota(prompt.begin(), prompt.end(), 0);
  std::thread holder([&] {
    auto mover = make(bytes, blocks);
    node_type one(mover->space(), folder.path(), 0, bytes, blocks, *mover);
    one.hold(prompt, bytes);
    while (!is_over)
      one.pool.progress(1'000'000);
  });
  {
    auto mover = make(bytes, blocks);
    node_type asker(mover->space(), folder.path(), 1, bytes, blocks, *mover);
    const kv_chain chain(asker.cache, prompt);
    if (!finds(asker, chain)) state.SkipWithError("the other node was not found within 60 s");
    seconds_of_fetch(state, asker, chain);  // what the owner has not offered yet comes by message
    const std::uint64_t first = asker.pool.stats().read_blocks;
    const std::vector<std::byte> from(moved_bytes, std::byte{7});
    std::vector<std::byte> into(moved_bytes);
    std::vector<double> read_times;
    std::vector<double> copy_times;
    for (auto _ : state) {
      read_times.push_back(seconds_of_fetch(state, asker, chain));
      state.SetIterationTime(read_times.back());
      const auto start = std::chrono::steady_clock::now();
      for (std::uint64_t at = 0; at < moved_bytes; at += bytes)
        std::memcpy(into.data() + at, from.data() + at, bytes);
      benchmark::ClobberMemory();
      copy_times.push_back(seconds_since(start));
    }
    report(state, read_times, copy_times, "memcpy");
    state.counters["by_message"] = static_cast<double>(
        static_cast<std::uint64_t>(state.iterations()) * blocks - (asker.pool.stats().read_blocks - first));
    is_over = true;
  }
  holder.join();
}

void pool_fetch_shared(benchmark::State& state) {
  read_by<shared_memory_mover>(state, [](std::uint64_t bytes, std::uint64_t blocks) {
    return std::make_unique<shared_memory_mover>(
        shared_memory_options{.bytes = blocks * bytes + 4096, .blocks = blocks});
  });
}

#ifdef LLMMEM_BENCH_UCX
template <ucx_lane Lane>
void pool_fetch_ucx(benchmark::State& state) {
  read_by<ucx_mover>(state, [](std::uint64_t bytes, std::uint64_t blocks) {
    return std::make_unique<ucx_mover>(
        ucx_options{.bytes = blocks * bytes + 4096, .blocks = blocks, .block_bytes = bytes, .lane = Lane});
  });
}
#endif

/// The time in which a node's part of the directory stores and finds a span of 64 chunks.
void directory_span(benchmark::State& state) {
  const auto spans = static_cast<std::uint32_t>(state.range(0));
  detail::span_table table(spans, 1, {});
  std::vector<block_key> keys(spans);
  for (std::uint32_t i = 0; i < spans; ++i)
    keys[i] = {.low = detail::mix_pair(i, 1), .high = detail::mix_pair(i, 2)};
  std::array<std::uint32_t, pool::span_chunks> digests{};
  std::iota(digests.begin(), digests.end(), 1U);
  const std::array<std::uint64_t, 1> all{~std::uint64_t{0}};
  for (std::uint32_t i = 0; i < spans; ++i)
    table.put(keys[i], seat_id{i % 8}, 1, digests, all);
  std::uint64_t at = 0;
  std::uint64_t found = 0;
  for (auto _ : state) {
    at = (at + 7919) % spans;
    table.for_each_of(keys[static_cast<std::size_t>(at)], [&](std::uint32_t entry) {
      found += detail::span_table::common(table.at(entry), digests);
    });
  }
  benchmark::DoNotOptimize(found);
  state.SetItemsProcessed(state.iterations() * pool::span_chunks);
  state.counters["bytes/chunk"] = static_cast<double>(table.metadata_bytes()) / (64.0 * spans);
}

/// What a request for blocks costs its engine before the first byte moves: the questions, and a message that
/// names 64 blocks or fewer.
void post_blocks(benchmark::State& state) {
  constexpr std::uint64_t bytes = 1024;
  constexpr std::uint64_t blocks = 4096;
  const llmmem_bench::bench_folder folder;
  std::atomic<bool> is_over = false;
  std::vector<token_id> prompt(blocks * 16);
  std::iota(prompt.begin(), prompt.end(), 0);
  std::thread holder([&] {
    host_space host({.budget = blocks * bytes + 4096});
    node<host_space> one(host, folder.path(), 0, bytes, blocks);
    one.hold(prompt, bytes);
    while (!is_over)
      one.pool.progress(1'000'000);
  });
  {
    host_space host({.budget = blocks * bytes + 4096});
    node<host_space> asker(host, folder.path(), 1, bytes, blocks);
    const kv_chain chain(asker.cache, prompt);
    if (!finds(asker, chain)) state.SkipWithError("the other node was not found within 60 s");
    const std::uint64_t before = asker.pool.stats().posted_messages;
    std::uint64_t posted = 0;
    for (auto _ : state) {
      auto request = asker.pool.ask(chain, 0).value();
      request.wait_for_answers();
      const auto start = std::chrono::steady_clock::now();
      request.fetch();  // as many as `max_gets` allows
      state.SetIterationTime(seconds_since(start));
      posted += kv_pool_options{}.max_gets;
      request.wait();
      if (request.end().blocks != blocks) state.SkipWithError("a block did not come");
      asker.tiers.clear();
    }
    state.SetItemsProcessed(static_cast<std::int64_t>(posted));
    state.counters["messages/block"] = static_cast<double>(asker.pool.stats().posted_messages - before) /
                                       static_cast<double>(state.iterations()) / blocks;
    is_over = true;
  }
  holder.join();
}

/// A node that starts, until it knows another one, and until it has a first block of 64 KiB from it.
template <class Space, class Make>
void first_contact(benchmark::State& state, Make make) {
  constexpr std::uint64_t bytes = 65536;
  constexpr std::uint64_t blocks = 64;
  const llmmem_bench::bench_folder folder;
  std::atomic<bool> is_over = false;
  std::vector<token_id> prompt(16);
  std::iota(prompt.begin(), prompt.end(), 0);
  std::thread holder([&] {
    make(bytes, blocks, [&](Space& space, auto&... mover) {
      node<Space, decltype(mover)...> one(space, folder.path(), 0, bytes, blocks, mover...);
      one.hold(prompt, bytes);
      while (!is_over)
        one.pool.progress(1'000'000);
    });
  });
  std::vector<double> known;
  for (auto _ : state) {
    make(bytes, blocks, [&](Space& space, auto&... mover) {
      const auto start = std::chrono::steady_clock::now();
      node<Space, decltype(mover)...> asker(space, folder.path(), 1, bytes, blocks, mover...);
      while (asker.pool.peers() == 0 && seconds_since(start) < 60)
        asker.pool.progress(100'000);
      known.push_back(seconds_since(start));
      const kv_chain chain(asker.cache, prompt);
      if (!finds(asker, chain)) state.SkipWithError("the other node was not found within 60 s");
      static_cast<void>(seconds_of_fetch(state, asker, chain));
      state.SetIterationTime(seconds_since(start));
    });
  }
  state.counters["known_ms"] = median(known) * 1e3;
  is_over = true;
  holder.join();
}
void first_contact_by_message(benchmark::State& state) {
  first_contact<host_space>(state, [](std::uint64_t bytes, std::uint64_t blocks, auto&& with) {
    host_space host({.budget = blocks * bytes + 4096});
    with(host);
  });
}
void first_contact_shared(benchmark::State& state) {
  first_contact<shared_memory_mover::space_type>(
      state, [](std::uint64_t bytes, std::uint64_t blocks, auto&& with) {
        shared_memory_mover mover({.bytes = blocks * bytes + 4096, .blocks = blocks});
        with(mover.space(), mover);
      });
}
#ifdef LLMMEM_BENCH_UCX
void first_contact_ucx(benchmark::State& state) {
  first_contact<ucx_mover::space_type>(state, [](std::uint64_t bytes, std::uint64_t blocks, auto&& with) {
    ucx_mover mover({.bytes = blocks * bytes + 4096,
                     .blocks = blocks,
                     .block_bytes = bytes,
                     .lane = ucx_lane::shared_memory});
    with(mover.space(), mover);
  });
}
#endif

/// A link to as many nodes as a row has, all present.
struct many_nodes : detail::any_directory_link {
  explicit many_nodes(std::uint32_t count) : nonces(count) {
    for (std::uint32_t i = 0; i < count; ++i)
      nonces[i] = detail::mix_pair(i, 12345);
  }
  [[nodiscard]] seat_id self() const noexcept { return seat_id{0}; }
  [[nodiscard]] std::uint64_t nonce() const noexcept { return nonces[0]; }
  [[nodiscard]] std::uint32_t seats() const noexcept { return static_cast<std::uint32_t>(nonces.size()); }
  [[nodiscard]] bool is_present(seat_id seat) const noexcept { return seat != gone; }
  [[nodiscard]] std::uint64_t nonce_of(seat_id seat) const noexcept { return nonces[to_index(seat)]; }

  std::vector<std::uint64_t> nonces;
  seat_id gone = no_seat;
};

/// The conversation trace's prompts over the nodes of a large pool: how many nodes a lookup asks, how many it
/// would ask block by block, how evenly the entries lie, and how many move when a node leaves. A request is
/// timed in turn: the keepers of one prompt's spans.
void directory_of_many(benchmark::State& state) {
  const auto count = static_cast<std::uint32_t>(state.range(0));
  const auto chunks_of_block = static_cast<std::uint64_t>(state.range(1));  // of the trace's 512 tokens
  const many_nodes all(count);
  many_nodes fewer = all;
  fewer.gone = seat_id{count / 2};
  const pool::embedded_directory directory(1, 1, {});
  const auto& requests = llmmem_benchmarks::requests();
  std::vector<std::uint64_t> spans_of(count);
  std::vector<bool> is_asked(count);
  std::unordered_set<std::uint64_t> seen;
  std::uint64_t asked = 0;
  std::uint64_t by_block = 0;
  std::uint64_t moved = 0;
  std::uint64_t left = 0;
  const auto key_of = [&](const auto& of, std::uint64_t chunk) {
    const block_key& block = of.keys[static_cast<std::size_t>(chunk / chunks_of_block)];
    return block_key{.low = detail::mix_pair(block.low, chunk % chunks_of_block), .high = block.high};
  };
  const auto nodes_asked = [&](const auto& of, std::uint64_t step, auto&& each_key) {
    std::fill(is_asked.begin(), is_asked.end(), false);
    std::uint64_t nodes = 0;
    for (std::uint64_t chunk = 0; chunk < of.keys.size() * chunks_of_block; chunk += step) {
      const block_key key = key_of(of, chunk);
      const std::uint32_t keeper = directory.keeper_of(all, key);
      nodes += is_asked[keeper] ? 0U : 1U;
      is_asked[keeper] = true;
      each_key(key, keeper);
    }
    return nodes;
  };
  std::uint64_t number = 0;
  for (const auto& each : requests) {
    asked += nodes_asked(each, pool::span_chunks, [&](const block_key& key, std::uint32_t keeper) {
      if (!seen.insert(key.low).second) return;
      ++spans_of[keeper];
      left += keeper == count / 2 ? 1U : 0U;
      moved += directory.keeper_of(fewer, key) != keeper ? 1U : 0U;
    });
    if (number++ % 100 == 0) by_block += nodes_asked(each, 1, [](const block_key&, std::uint32_t) {});
  }
  std::size_t at = 0;
  for (auto _ : state) {
    const auto& of = requests[at];
    at = (at + 1) % requests.size();
    for (std::uint64_t chunk = 0; chunk < of.keys.size() * chunks_of_block; chunk += pool::span_chunks)
      benchmark::DoNotOptimize(directory.keeper_of(all, key_of(of, chunk)));
  }
  const double mean = static_cast<double>(seen.size()) / count;
  state.counters["nodes/lookup"] = static_cast<double>(asked) / static_cast<double>(requests.size());
  state.counters["by_block"] = static_cast<double>(by_block) / static_cast<double>((number + 99) / 100);
  state.counters["spans"] = static_cast<double>(seen.size());
  state.counters["most/mean"] =
      static_cast<double>(*std::max_element(spans_of.begin(), spans_of.end())) / mean;
  state.counters["moved/share"] = left == 0 ? 0 : static_cast<double>(moved) / static_cast<double>(left);
}

void block_sizes(benchmark::internal::Benchmark* rows) {
  rows->RangeMultiplier(4)->Range(16 << 10, 4 << 20)->UseManualTime()->MinTime(0.5);
}
BENCHMARK(pool_fetch)->Apply(block_sizes);
BENCHMARK(pool_fetch_shared)->Apply(block_sizes);
#ifdef LLMMEM_BENCH_UCX
BENCHMARK(pool_fetch_ucx<ucx_lane::shared_memory>)->Name("pool_fetch_ucx_shared")->Apply(block_sizes);
BENCHMARK(pool_fetch_ucx<ucx_lane::tcp>)
    ->Name("pool_fetch_ucx_tcp")
    ->Arg(16 << 10)
    ->Arg(1 << 20)
    ->UseManualTime()
    ->Iterations(2);
#endif
BENCHMARK(directory_span)->Arg(1 << 10)->Arg(160'000);
BENCHMARK(post_blocks)->UseManualTime()->Iterations(20);
BENCHMARK(first_contact_by_message)->UseManualTime()->Iterations(20);
BENCHMARK(first_contact_shared)->UseManualTime()->Iterations(20);
#ifdef LLMMEM_BENCH_UCX
BENCHMARK(first_contact_ucx)->UseManualTime()->Iterations(20);
#endif
// Blocks of 512 tokens as the trace has them, and of 16 tokens.
BENCHMARK(directory_of_many)->Args({20, 1})->Args({1000, 1})->Args({1000, 32})->Unit(benchmark::kMicrosecond);

}  // namespace
