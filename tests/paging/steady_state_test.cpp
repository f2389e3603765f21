#include <llmmem/eviction/any.hpp>
#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/batch_scheduler.hpp>
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
    const std::array<llmmem::paging::growth, 2> step{
        paging::growth{.sequence = *sequence, .unknown_tokens = 1},
        paging::growth{.sequence = *twin, .tokens = std::span(prompt).first(2)}};
    std::array<append_result, 2> grown{};
    static_cast<void>(cache.append_batch(step, grown, 2));
    static_cast<void>(cache.retain(*twin, {0, 9}, {.priority = 50}));
    static_cast<void>(cache.expect(prompt, {}, static_cast<std::uint64_t>(i)));
    static_cast<void>(cache.deduplicate(*twin));
    static_cast<void>(cache.cost(prompt));
    cache.advance(static_cast<std::uint64_t>(i));
    static_cast<void>(write_csr(cache, std::span(&*twin, 1), {indptr, indices, last}));
    static_cast<void>(write_slot_mapping(cache, *twin, 3, slot));
    static_cast<void>(cache.release_after(*twin, {}));
    static_cast<void>(cache.release(*sequence));
    static_cast<void>(cache.release(*sequence));  // refused: that must not allocate either
    cache.collect();
  }
}

}  // namespace

TEST_CASE("nothing is allocated from the heap after construction, regardless of the policy") {
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

namespace {

/// Four requests whose texts grow in place.
struct writers {
  std::array<std::array<token_id, 64>, 4> texts{};
  std::array<std::size_t, 4> lengths{};

  [[nodiscard]] std::span<const token_id> tokens(std::uint64_t user) noexcept {
    return std::span(texts[user]).first(lengths[user]);
  }
  void copy(const block_copy&) noexcept {}
  void exhausted(std::uint64_t, const failure&) noexcept {}
};

}  // namespace

TEST_CASE("admission, preemption, resumption and steps planned ahead allocate nothing from the heap") {
  for (const std::uint32_t ahead : {1U, 2U}) {
    CAPTURE(ahead);
    paged_allocator<> cache({.blocks = 24, .block_tokens = 4, .max_sequences = 4});
    writers client;
    batch_scheduler scheduler(cache, client,
                              {.max_running = 4, .max_requests = 8, .max_steps_in_flight = ahead});
    std::array<request_ticket, 4> tickets{};
    std::array<std::span<const scheduled_work>, 2> flights{};
    std::size_t in_flight = 0;
    const std::uint64_t before = heap_allocations();
    for (int i = 0; i < 2'000; ++i) {
      for (std::uint64_t user = 0; user < 4; ++user) {
        if (client.lengths[user] != 0) continue;
        client.texts[user].fill(static_cast<token_id>(user + 10));
        client.lengths[user] = 5 + user;
        tickets[user] = *scheduler.submit(user);
      }
      const auto step = scheduler.step();
      if (!step->work.empty()) flights[in_flight++] = step->work;
      if (in_flight == 0 || (in_flight < ahead && !step->work.empty())) continue;
      for (const scheduled_work& each : flights[0]) {
        std::size_t& length = client.lengths[each.user];
        if (each.ticket == tickets[each.user] && each.first + each.count == length) ++length;
      }
      flights[0] = flights[1];
      --in_flight;
      static_cast<void>(scheduler.completed());
      for (std::uint64_t user = 0; user < 4; ++user) {
        if (client.lengths[user] < 60) continue;
        static_cast<void>(scheduler.finish(tickets[user]));
        client.lengths[user] = 0;
      }
    }
    CHECK(heap_allocations() == before);
    CHECK(scheduler.stats().preempted > 20);
    CHECK(scheduler.stats().finished > 20);
    CHECK((scheduler.stats().dropped > 20) == (ahead == 2));
  }
}

TEST_CASE("the counter of heap calls counts") {
  const std::uint64_t before = heap_allocations();
  ::operator delete(::operator new(100));  // a new-expression whose memory nobody reads may be left out
  CHECK(heap_allocations() == before + 1);
}
