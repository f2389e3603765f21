// The cost of a link of the prefix chain: the key of a block from its parent's and its tokens.
//
//   block_key/hash/n   blocks of n tokens, each the child of the one before; an item is a block

#include <llmmem/hash/aes_pmac.hpp>
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
void chaining(benchmark::State& state, const Hash& hash) {
  std::vector<token_id> tokens(static_cast<std::size_t>(state.range(0)));
  for (std::size_t i = 0; i < tokens.size(); ++i)
    tokens[i] = static_cast<token_id>(i * 7);
  block_key key = hash.root({});
  for ([[maybe_unused]] auto _ : state)
    key = hash.chain(key, tokens);
  benchmark::DoNotOptimize(key);
  state.SetItemsProcessed(state.iterations());
}

template <block_hash Hash>
void chaining_of(benchmark::State& state) {
  chaining(state, Hash{});
}

void sizes(benchmark::internal::Benchmark* rows) {
  rows->Arg(16)->Arg(64)->Arg(512);
}

void aes_by_table(benchmark::State& state) {
  chaining(state, aes_pmac_128({}, aes_path::table));
}

BENCHMARK(chaining_of<aes_pmac_128>)->Name("block_key/llmmem")->Apply(sizes);
BENCHMARK(aes_by_table)->Name("block_key/aes_pmac_by_table")->Apply(sizes);
BENCHMARK(chaining_of<siphash13_128>)->Name("block_key/siphash_1_3")->Apply(sizes);
BENCHMARK(chaining_of<siphash_128>)->Name("block_key/siphash_2_4")->Apply(sizes);
BENCHMARK(chaining_of<sha256_128>)->Name("block_key/sha256")->Apply(sizes);
#if __has_include(<xxhash.h>)
BENCHMARK(chaining_of<xxh3_128>)->Name("block_key/xxh3")->Apply(sizes);
#endif

}  // namespace
