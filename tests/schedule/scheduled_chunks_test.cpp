/// The numbers of chunks against a vector of handles.
#include <llmmem/schedule/detail/scheduled_chunks.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr chunk_handle handle(std::uint32_t slot, std::uint32_t generation = 1) {
  return {.slot = slot, .generation = generation, .owner = 7};
}

/// The definition: handles in the order of their adding; a removed one leaves a gap until the next adding.
struct chunk_list {
  std::vector<chunk_handle> chunks;

  [[nodiscard]] std::optional<chunk_id> find(chunk_handle chunk) const {
    const auto at = std::ranges::find(chunks, chunk);
    if (at == chunks.end()) return {};
    return chunk_id{static_cast<std::uint32_t>(at - chunks.begin())};
  }
  void close_gaps() { std::erase(chunks, chunk_handle{}); }
};

}  // namespace

TEST_CASE("chunks have the numbers of a list of their handles, through removals and reused slots") {
  for (const auto seed : seeds(100)) {
    CAPTURE(seed);
    random_numbers random(seed);
    detail::scheduled_chunks chunks;
    chunk_list oracle;
    std::vector<std::uint32_t> generations(12, 1);
    for (int step = 0; step < 150; ++step) {
      const auto slot = random.below(std::uint32_t{12});
      const chunk_handle chunk = handle(slot, generations[slot]);
      switch (random.below(4U)) {
        case 0:
          if (oracle.find(chunk)) {
            std::ranges::replace(oracle.chunks, chunk, chunk_handle{});
            REQUIRE(chunks.remove(chunk));
            ++generations[slot];
          } else {
            REQUIRE_FALSE(chunks.remove(chunk));
          }
          break;
        case 1:
          chunks.close_gaps();
          oracle.close_gaps();
          break;
        default:
          if (!oracle.find(chunk)) {
            oracle.close_gaps();
            oracle.chunks.push_back(chunk);
          }
          REQUIRE(chunks.add(chunk) == oracle.find(chunk));
      }
      REQUIRE(std::ranges::equal(chunks.all(), oracle.chunks));
      REQUIRE(chunks.size() == oracle.chunks.size());
      for (std::uint32_t i = 0; i < 12; ++i) {
        REQUIRE(chunks.find(handle(i, generations[i])) == oracle.find(handle(i, generations[i])));
        REQUIRE_FALSE(chunks.find(handle(i, generations[i] + 1)));
      }
    }
  }
}

TEST_CASE("a handle of an earlier chunk in the same slot is unknown") {
  detail::scheduled_chunks chunks;
  CHECK(chunks.add(handle(3)) == chunk_id{0});
  CHECK_FALSE(chunks.find(handle(3, 2)));
  CHECK_FALSE(chunks.remove(handle(3, 2)));
  CHECK_FALSE(chunks.find(handle(900)));
  CHECK(chunks[chunk_id{0}] == handle(3));
}

namespace {

/// Notes what it is asked, and for which handle.
struct noting_buffer {
  using call = std::tuple<char, chunk_handle, std::uint64_t>;
  std::vector<call> calls;

  void progress() { calls.push_back({'p', {}, 0}); }
  llmmem::tiering::step_outcome execute(chunk_handle chunk, plan_operation, std::size_t tier) {
    calls.push_back({'x', chunk, tier});
    return llmmem::tiering::step_outcome::deferred;
  }
  result<void> prefetch(chunk_handle chunk) {
    calls.push_back({'f', chunk, 0});
    return {};
  }
  result<void> expect(chunk_handle chunk, std::uint64_t next_use) noexcept {
    calls.push_back({'e', chunk, next_use});
    return {};
  }
};

}  // namespace

TEST_CASE("a numbered buffer calls the buffer with the chunk of that number") {
  detail::scheduled_chunks chunks;
  chunks.add(handle(5));
  chunks.add(handle(2));
  noting_buffer buffer;
  const detail::numbered_buffer target(buffer, chunks);
  target.progress();
  CHECK(target.execute(chunk_id{1}, plan_operation::drop, 2) == llmmem::tiering::step_outcome::deferred);
  target.prefetch(chunk_id{0});
  target.expect(chunk_id{1}, 17);
  CHECK(buffer.calls ==
        std::vector<noting_buffer::call>{
            {'p', chunk_handle{}, 0}, {'x', handle(2), 2}, {'f', handle(5), 0}, {'e', handle(2), 17}});
}
