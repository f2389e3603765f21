// What several kinds of layer cost a cache's bookkeeping, beside a paged_allocator that does the same for
// one. SipHash, token verification, LRU everywhere; blocks of 16 tokens, states every 512. The rows' middle:
//
//   paged       paged_allocator: one kind of layer, no pages
//   one_group   hybrid_allocator with full attention alone: what pages and the prefix chain cost
//   gemma3      Gemma 3 27B: full attention in 10 layers, a window of 1024 in 52
//   jamba       Jamba v0.1: full attention in 4 layers, states in 28
//
// and their beginning:
//
//   append/X/n     a prompt of n tokens, in pieces of 2048, each committed, as a service does
//   grow/X/n       a piece of n tokens appended, not committed
//   commit/X/n     its commit alone
//   match/X/n      a prompt of n tokens of which all but the last 512 are cached, held by nobody
//   release/X/n    a sequence of n committed tokens ends
//   decode/X/n     a step of n sequences of 1100 to 1300 tokens: append_batch of a token each, commit each
//   draft/X/1      4 tokens appended to a sequence and all but one taken back: by truncate; jamba, whose
//                  states cannot be cut, on a fork that is released, with the one appended anew
//
// An item is a token (of a draft: the draft), so that its time is ns a token; a block is 16 of them, `blocks`
// is what n tokens take over all groups. Times are those of the column Time; CPU has the setting up in it.

#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/hybrid_allocator.hpp>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <vector>

#include "support/timed.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_benchmarks;

constexpr std::uint32_t block_tokens = 16;
constexpr std::uint64_t piece = 2'048;

void require(bool succeeded) {
  if (!succeeded) std::abort();
}

// The caches

struct paged {
  using cache_type = paged_allocator<>;
  using growth_type = llmmem::paging::growth;
  using grown_type = append_result;
  static constexpr bool cuts = true;
  static cache_type make(std::uint32_t sequences) {
    return cache_type({.blocks = 32'768, .block_tokens = block_tokens, .max_sequences = sequences});
  }
};

struct hybrid {
  using cache_type = hybrid_allocator<>;
  using growth_type = hybrid_growth;
  using grown_type = hybrid_append;
  static cache_type make(std::span<const layer_group> groups, std::uint64_t pages, std::uint32_t sequences) {
    std::vector<std::uint64_t> sizes;
    for (const layer_group& each : groups)
      sizes.push_back(each.block_bytes);
    const std::uint64_t largest = *std::ranges::max_element(sizes);
    const std::uint64_t page = choose_page_bytes(sizes, largest, 2 * largest, 2'048).page_bytes;
    return cache_type({.groups = groups,
                       .budget_bytes = (pages + 1) * page,
                       .page_bytes = page,
                       .max_sequences = sequences,
                       .max_sequence_tokens = 16'384});
  }
};

struct one_group : hybrid {
  static constexpr bool cuts = true;
  static cache_type make(std::uint32_t sequences) {
    const std::array groups{full_attention({"full", 4, 4'096, block_tokens})};
    return hybrid::make(groups, 32'768, sequences);
  }
};

struct gemma3 : hybrid {
  static constexpr bool cuts = true;
  static cache_type make(std::uint32_t sequences) {
    const std::array groups{full_attention({"full", 10, 8'192, block_tokens}),
                            sliding_window({"local", 52, 8'192, block_tokens}, 1'024)};
    return hybrid::make(groups, 16'384, sequences);
  }
};

struct jamba : hybrid {
  static constexpr bool cuts = false;
  static cache_type make(std::uint32_t sequences) {
    const std::array groups{full_attention({"full", 4, 4'096, block_tokens}),
                            state_snapshots("mamba", 28, 573'440, 512)};
    return hybrid::make(groups, 2'048, sequences);
  }
};

// The operations

[[nodiscard]] std::vector<token_id> prompt(std::uint64_t tokens, token_id first) {
  std::vector<token_id> out(static_cast<std::size_t>(tokens));
  for (std::size_t i = 0; i < out.size(); ++i)
    out[i] = first + static_cast<token_id>(i);
  return out;
}

[[nodiscard]] std::uint64_t size(const benchmark::State& state) {
  return static_cast<std::uint64_t>(state.range(0));
}

/// Appends `tokens` in pieces, each committed unless it is the last and `all` says otherwise.
enum class last_piece { committed, left };
template <class Cache>
void fill(Cache& cache, sequence_id sequence, std::span<const token_id> tokens,
          last_piece last = last_piece::committed) {
  while (!tokens.empty()) {
    const auto part = tokens.first(std::min<std::size_t>(tokens.size(), piece));
    cache.append(sequence, part).value();
    tokens = tokens.subspan(part.size());
    if (!tokens.empty() || last == last_piece::committed) cache.commit(sequence).value();
  }
}

template <class Cache>
void tell_blocks(benchmark::State& state, const Cache& cache, sequence_id sequence) {
  std::uint64_t blocks = 0;
  if constexpr (requires { cache.groups(); }) {
    for (std::size_t g = 0; g < cache.groups().size(); ++g)
      blocks += cache.table(sequence, g).size();
  } else {
    blocks = cache.blocks(sequence).size();
  }
  state.counters["blocks"] = static_cast<double>(blocks);
}

template <class Shape>
void appending(benchmark::State& state) {
  auto cache = Shape::make(4);
  sequence_id writer{};
  token_id first = 0;
  std::vector<token_id> tokens;
  measure(
      state,
      [&] {
        writer = cache.create().value();
        tokens = prompt(size(state), first += 1 << 15);
      },
      [&] { fill(cache, writer, tokens); },
      [&] {
        tell_blocks(state, cache, writer);
        cache.release(writer).value();
        cache.drop_idle();
      });
}

/// One piece without its commit, or the commit without the append.
template <class Shape, bool Commits>
void one_piece(benchmark::State& state) {
  auto cache = Shape::make(4);
  sequence_id writer{};
  token_id first = 0;
  std::vector<token_id> tokens;
  measure(
      state,
      [&] {
        writer = cache.create().value();
        tokens = prompt(size(state), first += 1 << 15);
        if (Commits) cache.append(writer, tokens).value();
      },
      [&] {
        if (Commits) {
          benchmark::DoNotOptimize(cache.commit(writer));
        } else {
          benchmark::DoNotOptimize(cache.append(writer, tokens));
        }
      },
      [&] {
        require(cache.tokens(writer) == tokens.size());
        cache.release(writer).value();
        cache.drop_idle();
      });
}

template <class Shape>
void matching(benchmark::State& state) {
  auto cache = Shape::make(4);
  const auto tokens = prompt(size(state), 1);
  const auto cached = std::span(tokens).first(tokens.size() - 512);
  const sequence_id writer = cache.create().value();
  fill(cache, writer, cached);
  cache.release(writer).value();
  sequence_id taker{};
  measure(
      state, [&] { taker = cache.create().value(); },
      [&] { benchmark::DoNotOptimize(cache.match(taker, std::span<const token_id>(tokens))); },
      [&] {
        require(cache.tokens(taker) == cached.size());
        cache.release(taker).value();
      });
}

template <class Shape>
void releasing(benchmark::State& state) {
  auto cache = Shape::make(4);
  const auto tokens = prompt(size(state), 1);
  sequence_id holder{};
  measure(
      state,
      [&] {
        cache.drop_idle();
        holder = cache.create().value();
        fill(cache, holder, tokens);
      },
      [&] { benchmark::DoNotOptimize(cache.release(holder)); }, [] {});
}

template <class Shape>
void decoding(benchmark::State& state) {
  constexpr std::uint64_t steps = 128;
  auto cache = Shape::make(static_cast<std::uint32_t>(size(state)));
  const token_id token = 7;
  std::vector<typename Shape::growth_type> batch(static_cast<std::size_t>(size(state)));
  std::vector<typename Shape::grown_type> out(batch.size());
  token_id first = 0;
  const auto begin = [&] {
    cache.drop_idle();
    for (std::size_t i = 0; i < batch.size(); ++i) {
      batch[i] = {.sequence = cache.create().value(), .tokens = std::span(&token, 1)};
      fill(cache, batch[i].sequence, prompt(1'100 + i % 64, first += 1 << 11));
    }
  };
  begin();
  std::uint64_t step = 0;
  measure(
      state, [] {},
      [&] {
        require(cache.append_batch(batch, out).has_value());
        for (const auto& each : batch)
          require(cache.commit(each.sequence).has_value());
      },
      [&] {
        if (++step % steps != 0) return;
        for (const auto& each : batch)
          cache.release(each.sequence).value();
        begin();
      });
}

template <class Shape>
void drafting(benchmark::State& state) {
  auto cache = Shape::make(4);
  sequence_id writer = cache.create().value();
  const auto tokens = prompt(2'048, 1);
  fill(cache, writer, tokens);
  const std::array<token_id, 4> draft{7, 8, 9, 10};
  measure(
      state,
      [&] {
        if (cache.tokens(writer) < 8'000) return;
        cache.release(writer).value();
        cache.drop_idle();
        writer = cache.create().value();
        fill(cache, writer, tokens);
      },
      [&] {
        if constexpr (Shape::cuts) {
          require(cache.append(writer, draft).has_value());
          require(cache.truncate(writer, cache.tokens(writer) - 3).has_value());
        } else {
          const auto twin = cache.fork(writer);
          require(cache.append(*twin, draft).has_value());
          require(cache.release(*twin).has_value());
          require(cache.append(writer, std::span(draft).first(1)).has_value());
        }
        require(cache.commit(writer).has_value());
      },
      [] {});
}

void prompts(benchmark::internal::Benchmark* bench) {
  bench->Arg(2'048)->Arg(8'192)->UseManualTime();
}
void pieces(benchmark::internal::Benchmark* bench) {
  bench->Arg(512)->Arg(2'048)->UseManualTime();
}
void batches(benchmark::internal::Benchmark* bench) {
  bench->Arg(1)->Arg(128)->UseManualTime();
}

#define LLMMEM_BENCH_SHAPE(shape)                                             \
  BENCHMARK(appending<shape>)->Name("append/" #shape)->Apply(prompts);        \
  BENCHMARK((one_piece<shape, false>))->Name("grow/" #shape)->Apply(pieces);  \
  BENCHMARK((one_piece<shape, true>))->Name("commit/" #shape)->Apply(pieces); \
  BENCHMARK(matching<shape>)->Name("match/" #shape)->Apply(prompts);          \
  BENCHMARK(releasing<shape>)->Name("release/" #shape)->Apply(prompts);       \
  BENCHMARK(decoding<shape>)->Name("decode/" #shape)->Apply(batches);         \
  BENCHMARK(drafting<shape>)->Name("draft/" #shape)->Arg(1)->UseManualTime()

LLMMEM_BENCH_SHAPE(paged);
LLMMEM_BENCH_SHAPE(one_group);
LLMMEM_BENCH_SHAPE(gemma3);
LLMMEM_BENCH_SHAPE(jamba);

}  // namespace
