#include <llmmem/eviction/any.hpp>
#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/block_table.hpp>

#include <doctest/doctest.h>

#include <array>
#include <new>
#include <string_view>

#include "support/heap_counter.hpp"
#include "support/random.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

struct named_policy : paged_traits {
  using eviction = any_eviction;
};

/// A little of everything an engine does, many times over.
void serve(paged_allocator<named_policy>& cache, int requests, random_numbers& random) {
  std::array<token_id, 63> prompt{};  // ends inside a block, so that twins copy
  std::array<std::int32_t, 64> indices{};
  std::array<std::int32_t, 2> indptr{};
  std::array<std::int32_t, 1> last{};
  std::array<std::int64_t, 1> slot{};
  for (int i = 0; i < requests; ++i) {
    for (auto& token : prompt)
      token = static_cast<token_id>(random.once_in(20) ? 1 : 0);
    const auto sequence = cache.create();
    const auto hit = cache.match(*sequence, prompt);
    if (!cache.append(*sequence, std::span(prompt).subspan(hit->tokens))) continue;
    static_cast<void>(cache.commit(*sequence));
    const auto twin = cache.fork(*sequence);
    static_cast<void>(cache.append(*twin, std::span(prompt).first(3)));
    static_cast<void>(cache.truncate(*twin, 20));
    static_cast<void>(cache.extend(*twin, 5));
    static_cast<void>(write_csr(cache, std::span(&*twin, 1), {indptr, indices, last}));
    static_cast<void>(write_slot_mapping(cache, *twin, 3, slot));
    static_cast<void>(cache.release_after(*twin, {}));
    static_cast<void>(cache.release(*sequence));
    static_cast<void>(cache.release(*sequence));  // refused: that must not allocate either
    cache.collect();
  }
}

}  // namespace

TEST_CASE("nothing is allocated from the heap after construction, whatever the policy") {
  for (const std::string_view policy : eviction_names) {
    CAPTURE(policy);
    paged_allocator<named_policy> cache({.blocks = 60, .block_tokens = 4},
                                        make_eviction(policy, slot_count{61}));
    random_numbers random(1);
    const std::uint64_t before = heap_allocations();
    serve(cache, 2000, random);
    CHECK(heap_allocations() == before);
    CHECK(cache.stats().evictions > 1000);
    CHECK(cache.stats().hit_blocks > 1000);
    CHECK(cache.stats().copies > 0);
  }
}

TEST_CASE("the counter counts") {
  const std::uint64_t before = heap_allocations();
  ::operator delete(::operator new(100));  // a new-expression whose memory nobody reads may be left out
  CHECK(heap_allocations() == before + 1);
}
