// A cache whose full blocks are quantised by channel, under requests that fork and take drafts back.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "paged_decode/closing_cache.hpp"
#include "paged_decode/service.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace paged_decode;
using llmmem_tests::random_numbers;

namespace {

[[nodiscard]] service_result serve(const model& of, const service_plan& plan, const paged_config& how) {
  closing_cache cache(of.config(), how);
  return service(of, cache, plan).run();
}

}  // namespace

TEST_CASE(
    "one token at a time, in chunks and at once, tokens get the same bits over closing blocks, also in "
    "forks") {
  std::uint64_t taken_back = 0;
  for (const auto seed : llmmem_tests::seeds(8)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const model_config shape{.layers = 2,
                             .query_heads = 4,
                             .kv_heads = 2,
                             .head_dim = 16,
                             .hidden = 16,
                             .inner = 16,
                             .vocabulary = 20,
                             .window = random.once_in(2) ? 7U : 0U};
    const service_plan plan{.requests = 3,
                            .prefix_tokens = 5,
                            .own_tokens = 1 + random.below(std::uint32_t{20}),
                            .answer_tokens = 9,
                            .chunk_tokens = 1,
                            .samples = 3,
                            .drafts = 0,
                            .seed = seed};
    const paged_config how{.form = closing_forms[seed % 2],
                           .blocks = 500,
                           .block_tokens = 1 + random.below(std::uint32_t{7}),
                           .most_tokens = 64,
                           .order = llmmem::block_order(random.below(llmmem::block_order_count))};
    const model made(shape, 64, seed);
    const service_result right = serve(made, plan, how);
    for (const std::uint32_t chunk : {3U, 64U}) {
      service_plan other = plan;
      other.chunk_tokens = chunk;
      const service_result found = serve(made, other, how);
      REQUIRE(found.transcripts.size() == right.transcripts.size());
      for (std::size_t i = 0; i < found.transcripts.size(); ++i) {
        CHECK(found.transcripts[i].tokens == right.transcripts[i].tokens);
        CHECK(found.transcripts[i].logits == right.transcripts[i].logits);
      }
    }
    // Drafts that are taken back out of a closed block reopen it; all requests end, and logits are numbers.
    service_plan drafting = plan;
    drafting.drafts = 4;
    drafting.answer_tokens = 20;
    const service_result drafted = serve(made, drafting, how);
    taken_back += drafted.drafted - drafted.accepted;
    for (const transcript& each : drafted.transcripts) {
      for (const float logit : each.logits)
        REQUIRE(logit == logit);
    }
  }
  CHECK(taken_back > 20);
}
