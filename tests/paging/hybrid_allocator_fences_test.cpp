#include <llmmem/paging/hybrid_allocator.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <numeric>
#include <vector>

using namespace llmmem;

namespace {

using cache_type = hybrid_allocator<>;

std::vector<token_id> count_up(token_id first, std::size_t count) {
  std::vector<token_id> tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

// Blocks of 4 tokens: full attention, and a window of 4.
const std::array groups{full_attention({"full", 1, 10, 4}), sliding_window({"local", 1, 10, 4}, 4)};

cache_type cache_of(std::uint64_t blocks, std::uint64_t max_deferred = unlimited) {
  return cache_type({.groups = groups,
                     .budget_bytes = (blocks + 1) * 40,
                     .page_bytes = 40,
                     .max_sequences = 4,
                     .max_sequence_tokens = 100,
                     .max_deferred = max_deferred,
                     .name = "kv"});
}

}  // namespace

TEST_CASE("blocks that leave a window while a kernel reads them return after its fence") {
  cache_type cache = cache_of(8);
  host_timeline stream;
  const auto sequence = cache.create().value();
  cache.append(sequence, count_up(0, 8)).value();
  const host_fence first_step = stream.issue();
  cache.read_until(sequence, first_step).value();
  cache.commit(sequence).value();
  CHECK(cache.table(sequence, 1)[0] == null_block);
  CHECK(cache.stats().deferred == 1);
  CHECK(cache.stats().pages.active_bytes == 4 * 40);
  CHECK(cache.audit().empty());
  CHECK(cache.collect() == 0);
  stream.pass(first_step).value();
  CHECK(cache.collect() == 1);
  CHECK(cache.stats().pages.active_bytes == 3 * 40);
  CHECK(cache.stats().pages.idle_bytes == 40);
  CHECK(cache.stats().released_early == 1);

  // append gives back too, and so does shortage; once the fence has passed, at once.
  cache.append(sequence, count_up(8, 4)).value();
  cache.read_until(sequence, stream.issue()).value();
  cache.append(sequence, count_up(12, 1)).value();
  CHECK(cache.stats().deferred == 1);
  cache.append(sequence, count_up(13, 3)).value();
  stream.pass(stream.issue()).value();
  std::array<group_shortage, 2> lacks{};
  cache.shortage(sequence, 0, lacks).value();
  CHECK(cache.table(sequence, 1)[2] == null_block);
  CHECK(cache.stats().deferred == 1);  // nobody ran short
  CHECK(cache.audit().empty());
}

TEST_CASE("a sequence that ends behind a fence ends at once, and its blocks when the fence passes") {
  cache_type cache = cache_of(8);
  host_timeline stream;
  const auto ended = cache.create().value();
  cache.append(ended, count_up(0, 16)).value();
  const host_fence step = stream.issue();
  cache.release_after(ended, step).value();
  CHECK(cache.release(ended).code() == errc::stale_handle);
  CHECK(cache.release_after(ended, step).code() == errc::stale_handle);
  CHECK(cache.read_until(ended, step).code() == errc::stale_handle);
  CHECK(cache.stats().deferred == 8);
  CHECK(cache.stats().tokens == 0);
  CHECK(cache.audit().empty());

  const auto next = cache.create().value();
  CHECK(cache.append(next, count_up(0, 4)).error().message() ==
        "kv: group 0 needs 1 blocks, but 0 are available to it; release sequences, or build it with a larger "
        "budget");
  stream.pass(step).value();
  cache.append(next, count_up(0, 4)).value();  // collects by itself
  CHECK(cache.stats().deferred == 0);
  CHECK(cache.audit().empty());
}

TEST_CASE("batches and shortages collect passed frees before they refuse") {
  const auto tokens = count_up(0, 4);
  for (const bool by_batch : {false, true}) {
    cache_type cache = cache_of(8);
    host_timeline stream;
    const auto ended = cache.create().value();
    cache.append(ended, count_up(0, 16)).value();
    const host_fence step = stream.issue();
    cache.release_after(ended, step).value();
    const auto next = cache.create().value();
    const std::array batch{hybrid_growth{.sequence = next, .tokens = tokens}};
    std::array<hybrid_append, 1> out{};
    std::array<group_shortage, 2> lacks{};
    CHECK(cache.shortage(next, 4, lacks).value());
    CHECK(cache.append_batch(batch, out).code() == errc::out_of_group_blocks);
    stream.pass(step).value();
    if (by_batch) {
      cache.append_batch(batch, out).value();
    } else {
      CHECK(!cache.shortage(next, 4, lacks).value());
    }
    CHECK(cache.stats().deferred == 0);
  }
}

TEST_CASE("with a full queue, optional frees wait and necessary ones are refused") {
  cache_type cache = cache_of(8, 1);
  host_timeline stream;
  const auto sequence = cache.create().value();
  cache.append(sequence, count_up(0, 12)).value();
  const host_fence step = stream.issue();
  cache.read_until(sequence, step).value();
  cache.commit(sequence).value();
  CHECK(cache.table(sequence, 1)[0] != null_block);  // two would have had to wait
  CHECK(cache.stats().deferred == 0);
  CHECK(cache.release(sequence).error().message() ==
        "kv: 6 deferred frees to queue, but space for only 1; call collect() once fences have passed, or "
        "raise max_deferred, or max_sequences (4 releases each)");
  CHECK(cache.truncate(sequence, 1).code() == errc::deferred_full);
  CHECK(cache.tokens(sequence) == 12);
  // A refused `..._after` leaves the fence that was told before.
  CHECK(cache.release_after(sequence, stream.issue()).code() == errc::deferred_full);
  CHECK(cache.truncate_after(sequence, 1, stream.issue()).code() == errc::deferred_full);
  CHECK(cache.audit().empty());
  stream.pass(step).value();
  cache.commit(sequence).value();
  CHECK(cache.table(sequence, 1)[1] == null_block);
  cache.release(sequence).value();
  CHECK(cache.stats().pages.active_bytes == 0);
}

TEST_CASE("truncated blocks that a kernel reads return after its fence") {
  cache_type cache = cache_of(8);
  host_timeline stream;
  const auto sequence = cache.create().value();
  cache.append(sequence, count_up(0, 16)).value();
  cache.truncate_after(sequence, 5, stream.issue()).value();
  CHECK(cache.tokens(sequence) == 5);
  CHECK(cache.stats().deferred == 4);
  CHECK(cache.append(sequence, count_up(0, 4)).code() == errc::out_of_group_blocks);
  stream.pass(stream.issue()).value();
  cache.append(sequence, count_up(0, 4)).value();
  CHECK(cache.audit().empty());
}

TEST_CASE("a twin cannot write a copy's source before the kernel that reads it has ended") {
  cache_type cache = cache_of(12, 2);
  host_timeline stream;
  const auto one = cache.create().value();
  cache.append(one, count_up(0, 3)).value();
  const auto two = cache.fork(one).value();
  const host_fence step = stream.issue();
  cache.read_until(one, step).value();
  CHECK(cache.append(one, count_up(3, 1)).value().copies.size() == 2);
  CHECK(cache.stats().deferred == 2);
  cache.truncate(two, 2).value();
  CHECK(cache.append(two, count_up(9, 1)).value().copies.size() == 2);  // the kernel reads token 2
  CHECK(cache.audit().empty());

  // Where the source cannot be queued, nothing is copied.
  const auto three = cache.fork(two).value();
  cache.read_until(two, stream.issue()).value();
  CHECK(cache.append(two, count_up(9, 1)).code() == errc::deferred_full);
  const auto token = count_up(9, 1);
  const std::array batch{hybrid_growth{.sequence = three, .tokens = token},
                         hybrid_growth{.sequence = two, .tokens = token}};
  std::array<hybrid_append, 2> out{};
  cache.read_until(three, stream.issue()).value();
  CHECK(cache.append_batch(batch, out).error() ==
        failure{.code = errc::deferred_full, .index = 0, .wanted = 4, .found = 0, .where = "kv"});
  CHECK(cache.tokens(two) == 3);
  CHECK(cache.audit().empty());
  stream.pass(stream.issue()).value();
  cache.append_batch(batch, out).value();
  CHECK(out[0].copies.size() == 2);
  CHECK(out[1].copies.empty());
  CHECK(cache.audit().empty());
}
