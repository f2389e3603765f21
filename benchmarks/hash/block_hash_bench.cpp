// The cost of a link of the prefix chain: the key of a block from its parent's and its tokens.
//
//   block_key/hash/n   blocks of n tokens, each the child of the one before; an item is a block

#include <llmmem/hash/sha256.hpp>
#include <llmmem/hash/siphash.hpp>
#if __has_include(<xxhash.h>)
#include <llmmem/hash/xxh3.hpp>
#endif

#include <benchmark/benchmark.h>

#include <cstddef>
#include <span>
#include <vector>

namespace {

using namespace llmmem;

template <block_hash Hash>
void chaining(benchmark::State& state) {
  const Hash hash{};
  std::vector<token_id> tokens(static_cast<std::size_t>(state.range(0)));
  for (std::size_t i = 0; i < tokens.size(); ++i)
    tokens[i] = static_cast<token_id>(i * 7);
  block_key key = hash.root({});
  for ([[maybe_unused]] auto _ : state)
    key = hash.chain(key, tokens);
  benchmark::DoNotOptimize(key);
  state.SetItemsProcessed(state.iterations());
}

void sizes(benchmark::internal::Benchmark* rows) {
  rows->Arg(16)->Arg(64)->Arg(512);
}

BENCHMARK(chaining<siphash13_128>)->Name("block_key/llmmem")->Apply(sizes);
BENCHMARK(chaining<siphash_128>)->Name("block_key/siphash_2_4")->Apply(sizes);
BENCHMARK(chaining<sha256_128>)->Name("block_key/sha256")->Apply(sizes);
#if __has_include(<xxhash.h>)
BENCHMARK(chaining<xxh3_128>)->Name("block_key/xxh3")->Apply(sizes);
#endif

}  // namespace
