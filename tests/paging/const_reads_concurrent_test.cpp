#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/block_table.hpp>

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <numeric>
#include <thread>
#include <vector>

using namespace llmmem;

TEST_CASE("const calls of one allocator run together in several threads") {
  paged_allocator<> cache({.blocks = 64, .block_tokens = 4});
  std::vector<token_id> prompt(30);
  std::iota(prompt.begin(), prompt.end(), 0);
  const sequence_id sequence = cache.create().value();
  REQUIRE(cache.append(sequence, prompt));
  REQUIRE(cache.commit(sequence));

  std::atomic<int> right{0};
  const auto read = [&] {
    for (int i = 0; i < 200; ++i) {
      std::array<std::int32_t, 8> indices{};
      std::array<std::int32_t, 2> indptr{};
      std::array<std::int32_t, 1> last{};
      std::array<std::int64_t, 30> slots{};
      const bool found = cache.cached_tokens(prompt) == 28 && cache.tokens(sequence) == 30;
      const auto table = write_csr(cache, std::span(&sequence, 1), {indptr, indices, last});
      const bool mapped = write_slot_mapping(cache, sequence, 0, slots).has_value();
      if (found && mapped && table && table->tokens(0) == 30 && cache.stats().active_blocks == 8 &&
          cache.audit().empty() && cache.check(sequence)) {
        ++right;
      }
    }
  };
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i)
    readers.emplace_back(read);
  for (std::thread& reader : readers)
    reader.join();
  CHECK(right == 600);
}
