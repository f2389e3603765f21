#include <llmmem/paging/batch_scheduler.hpp>
#include <llmmem/paging/journal.hpp>
#include <llmmem/paging/journal_replay.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "support/heap_counter.hpp"
#include "support/journal_world.hpp"
#include "support/kv_side.hpp"
#include "support/random.hpp"
#include "support/replayed_journal.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

template <class Traits>
std::uint64_t worlds_replay(std::uint64_t count) {
  std::uint64_t relieved = 0;
  for (const auto seed : seeds(count)) {
    CAPTURE(seed);
    journal_world<Traits> world(seed);
    for (int i = 0; i < 300; ++i)
      world.step();
    check_replay(world, cache_of<Traits>);
    relieved += world.relieved();
  }
  return relieved;
}

struct plain_traced : paged_traits {
  using fence = recorded_fence;
};
using plain_cache = paged_allocator<plain_traced>;
using plain_journal = llmmem::paging::journaled<plain_cache, memory_journal>;

plain_cache plain_cache_of(const journal_header& header) {
  return plain_cache(header.options);
}

const std::vector<token_id> prompt{1, 2, 3, 4, 5, 6, 7, 8};

std::vector<std::byte> bytes_of(std::initializer_list<int> values) {
  std::vector<std::byte> out;
  for (const int each : values)
    out.push_back(static_cast<std::byte>(each));
  return out;
}

/// Why a journal with this record stops at it.
std::string reason_of(const std::vector<std::byte>& payload) {
  const auto bytes = framed({header_payload({.blocks = 4}), payload});
  journal_reader reader(bytes);
  CHECK_FALSE(reader.next());
  CHECK_FALSE(reader.next());
  return reader.end().reason;
}

}  // namespace

TEST_CASE("a replay gives the outcomes and the state of the recorded calls") {
  CHECK(worlds_replay<traced_traits>(300) > 100);
}

TEST_CASE("a replay gives those outcomes with partial reuse, admission and ascending ids, too") {
  CHECK(worlds_replay<traced_partial_traits>(150) > 50);
}

TEST_CASE("a journal cut after any byte replays to the state at its last complete record") {
  std::uint64_t compared = 0;
  for (const auto seed : seeds(12)) {
    CAPTURE(seed);
    journal_world<traced_traits> world(seed);
    std::map<std::uint64_t, std::string> states;  // by bytes written
    for (int i = 0; i < 40; ++i) {
      const auto now = llmmem::paging::replay(world.bytes(), cache_of<traced_traits>);
      states[world.bytes().size()] = state_of(world.cache().cache(), world.own(now.sequences()));
      world.step();
    }
    const auto whole = world.bytes();
    std::uint64_t records = 0;
    for (std::size_t cut = states.begin()->first; cut <= whole.size(); ++cut) {
      CAPTURE(cut);
      const auto restored = llmmem::paging::replay(whole.first(cut), cache_of<traced_traits>);
      CHECK_FALSE(restored.divergence());
      CHECK(restored.end().offset <= cut);
      CHECK((restored.end().offset == cut) == restored.end().reason.empty());
      CHECK(restored.end().records >= records);
      records = restored.end().records;
      CHECK(restored.cache().audit().empty());
      const auto then = states.find(restored.end().offset);
      if (then == states.end()) continue;
      CHECK(state_of(restored.cache(), restored.sequences()) == then->second);
      ++compared;
    }
    CHECK(records == world.cache().records());
  }
  CHECK(compared > 2'000);
}

TEST_CASE("a journal cut inside its header is unreadable, and the error says where it ends") {
  plain_journal cache({.blocks = 4, .block_tokens = 4}, memory_journal(1000), "lru");
  const auto header = cache.sink().bytes();
  for (std::size_t cut = 0; cut < header.size(); ++cut) {
    CAPTURE(cut);
    CHECK_THROWS_AS(journal_reader(header.first(cut)), journal_error);
  }
  CHECK_THROWS_WITH_AS(journal_reader(header.first(5)),
                       "journal: offset 5: the bytes end here; a journal begins with 8 bytes and a header",
                       journal_error);
  CHECK_THROWS_WITH_AS(journal_reader(header.first(20)), "journal: offset 9 of the header: it is truncated",
                       journal_error);
}

TEST_CASE("every flipped bit is detected") {
  journal_world<traced_traits> world(7);
  for (int i = 0; i < 60; ++i)
    world.step();
  const std::vector<std::byte> whole(world.bytes().begin(), world.bytes().end());
  std::vector<std::byte> bytes = whole;
  for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    CAPTURE(bit);
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    bool seen = false;
    try {
      journal_reader reader(bytes);
      while (reader.next())
        CHECK(reader.end().offset <= bit / 8);
      seen = !reader.end().reason.empty();
    } catch (const journal_error&) {
      seen = true;
    }
    CHECK(seen);
    bytes[bit / 8] = whole[bit / 8];
  }
}

TEST_CASE("a missing, repeated or misplaced record ends the journal") {
  plain_journal cache({.blocks = 8, .block_tokens = 4}, memory_journal(1000), "lru");
  std::vector<std::size_t> ends{cache.sink().bytes().size()};
  for (int i = 0; i < 3; ++i) {
    static_cast<void>(cache.create());
    ends.push_back(cache.sink().bytes().size());
  }
  const auto all = cache.sink().bytes();
  const auto piece = [&](std::size_t i) { return all.subspan(ends[i], ends[i + 1] - ends[i]); };
  const auto records_in = [&](std::initializer_list<std::size_t> order) {
    std::vector<std::byte> bytes(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(ends[0]));
    for (const std::size_t each : order)
      bytes.insert(bytes.end(), piece(each).begin(), piece(each).end());
    journal_reader reader(bytes);
    while (reader.next()) {
    }
    return reader.end().records;
  };
  CHECK(records_in({0, 1, 2}) == 3);
  CHECK(records_in({0, 2}) == 1);
  CHECK(records_in({1, 0, 2}) == 0);
  CHECK(records_in({0, 0}) == 1);
}

TEST_CASE("the format is as documented, to the byte") {
  plain_journal cache({.blocks = 4,
                       .block_tokens = 4,
                       .max_sequences = 2,
                       .max_sequence_tokens = 16,
                       .seed = {.low = 1, .high = 2},
                       .name = "kv"},
                      memory_journal(1000), "lru");
  const auto id = cache.create().value();
  cache.append(id, std::vector<token_id>{1, -1, 64}).value();
  CHECK(cache.release({}).code() == errc::null_handle);
  const std::vector<std::vector<std::byte>> expected{
      bytes_of({2,                                                        // version
                4, 0,   4,   2, 17,  0,   0,  0,                          // counts, limits
                1, 0,   0,   0, 0,   0,   0,  0, 2, 0, 0, 0, 0, 0, 0, 0,  // seed
                0,                                                        // epoch
                2, 'k', 'v', 3, 'l', 'r', 'u'}),
      bytes_of({1, 0, 0, 0, 0, 0x80, 0x3F, 35, 0,  // create: no context, session 0, cost 1, worth 35, never
                0, 0, 1}),                         // ok: slot 0, generation 1
      bytes_of({7, 1, 0, 1, 3, 2, 1, 0x80, 1,      // append: own handle, three tokens
                0, 0, 1, 0, 0, 0}),                // ok: from 0, one block, no copy
      bytes_of({3, 0, 8, 0, 0, 0})};               // release: null handle, refused as such
  const std::vector<std::byte> bytes(cache.sink().bytes().begin(), cache.sink().bytes().end());
  CHECK(bytes == framed(expected));
  const auto* const text = reinterpret_cast<const char*>(bytes.data());
  CHECK(std::string(text, 8) == "llmmem J");
}

TEST_CASE("every operation's arguments are written in the documented order, to the byte") {
  using bytes = std::vector<std::byte>;
  const auto fixed64 = [](int low) { return bytes_of({low, 0, 0, 0, 0, 0, 0, 0}); };
  const auto join = [](std::initializer_list<bytes> parts) {
    bytes all;
    for (const bytes& each : parts)
      all.insert(all.end(), each.begin(), each.end());
    return all;
  };
  constexpr std::uint32_t owner = 99;
  const std::array<token_id, 2> two{15, -16};
  const std::array keys{block_key{.low = 16, .high = 17}};
  const std::array hints{
      access_hint{.next_use = 18, .session = 19, .cost = 2, .keep = {.priority = 20, .until = 21}}};
  const sequence_id own{3, 4, owner};
  const std::array batch{paging::growth{.sequence = own, .tokens = two, .unknown_tokens = 22}};
  const std::array moves{block_move{block_id{23}, block_id{24}}};
  const detail::journal_arguments given{
      .sequence = own,
      .context = {.salt = {5, 6}, .extra_keys = {7, 8}},
      .hints = {.session = 9, .cost = 1, .keep = {.priority = 10, .until = 11}},
      .range = {.first = 12, .end = 13},
      .tokens = two,
      .keyed = {.keys = keys, .tokens = 14, .hints = hints},
      .number = 25,
      .extra = 26,
      .batch = batch,
      .moves = moves};

  const bytes sequence = bytes_of({1, 3, 4});
  const bytes context = join({bytes_of({1}), fixed64(5), fixed64(6), fixed64(7), fixed64(8)});
  const bytes request = bytes_of({9, 0, 0, 0x80, 0x3F});
  const bytes keep = bytes_of({10, 12});  // limits are one more, so that none is 0
  const bytes range = bytes_of({12, 14});
  const bytes tokens = bytes_of({2, 30, 31});  // zigzag
  const bytes keyed =
      join({bytes_of({14, 1}), fixed64(16), fixed64(17), bytes_of({1, 19, 19, 0, 0, 0, 0x40, 20, 22})});
  const bytes number = bytes_of({25});
  const bytes limit = bytes_of({26});
  const bytes extra = bytes_of({26});
  struct written {
    journal_op op;
    bytes arguments;
  };
  const std::vector<written> all{
      {journal_op::create, join({context, request, keep})},
      {journal_op::fork, sequence},
      {journal_op::release, sequence},
      {journal_op::release_after, join({sequence, extra})},
      {journal_op::match, join({sequence, tokens})},
      {journal_op::match_keys, join({sequence, keyed})},
      {journal_op::append, join({sequence, tokens})},
      {journal_op::extend, join({sequence, number})},
      {journal_op::append_batch, join({bytes_of({1}), sequence, tokens, bytes_of({22}), number, extra})},
      {journal_op::truncate, join({sequence, number})},
      {journal_op::truncate_after, join({sequence, number, extra})},
      {journal_op::commit, join({sequence, number})},
      {journal_op::commit_keys, join({sequence, keyed})},
      {journal_op::deduplicate, sequence},
      {journal_op::deduplicate_after, join({sequence, extra})},
      {journal_op::retain, join({sequence, range, keep})},
      {journal_op::advance, number},
      {journal_op::expect, join({context, tokens, limit})},
      {journal_op::expect_keys, join({context, keyed, limit})},
      {journal_op::resize, number},
      {journal_op::collect, {}},
      {journal_op::drop_idle, {}},
      {journal_op::compact, join({bytes_of({1, 23, 24}), number})},
      {journal_op::fences_passed, number},
      {journal_op::checkpoint, fixed64(25)},
      {journal_op::pressed, join({number, extra})},
      {journal_op::relieved, number},
      {journal_op::outcome, {}},
      {journal_op::reset, number},
      {journal_op::invalidate_block, number},
      {journal_op::invalidate, join({sequence, number})},
      {journal_op::remove, join({sequence, range})},
      {journal_op::remove_after, join({sequence, range, extra})},
      {journal_op::name_tokens, join({sequence, tokens})},
      {journal_op::pin, number},
      {journal_op::unpin, number},
      {journal_op::limit_commits, join({sequence, limit})},
      {journal_op::read_until, join({sequence, extra})},
      {journal_op::limit_releases, join({sequence, limit})},
      {journal_op::shortage, join({sequence, number, extra})},
      {journal_op::batch_shortage, join({bytes_of({1}), sequence, tokens, bytes_of({22}), extra})},
      {journal_op::evacuate, number},
  };
  for (std::size_t i = 0; i < all.size(); ++i) {
    CAPTURE(to_string(all[i].op));
    CHECK(static_cast<std::size_t>(all[i].op) == i + 1);  // the format's number, and none left out
    struct collector {
      bytes written;
      void put(std::byte each) noexcept { written.push_back(each); }
      void put(std::span<const std::byte> all) noexcept {
        written.insert(written.end(), all.begin(), all.end());
      }
    } out;
    const auto format = detail::is_recorded(detail::journal_format::paged, all[i].op)
                            ? detail::journal_format::paged
                            : detail::journal_format::hybrid;
    detail::record_encoder(out, owner, format).open(all[i].op, given);
    CHECK(out.written == join({bytes_of({static_cast<int>(i + 1) | 0x80}), all[i].arguments}));
  }
}

TEST_CASE("the checksum is CRC-32C") {
  const std::string text = "123456789";
  CHECK(crc32c(0, std::as_bytes(std::span(text))) == 0xE306'9283U);  // the published check value
}

TEST_CASE("the header has the options, and the configuration as given") {
  const plain_journal cache({.blocks = 9,
                             .block_capacity = 12,
                             .block_tokens = 4,
                             .max_sequences = 3,
                             .max_sequence_tokens = 40,
                             .max_idle_blocks = 5,
                             .max_deferred = 0,
                             .seed = {.low = 11, .high = ~std::uint64_t{0}},
                             .epoch = 77,
                             .name = "name"},
                            memory_journal(1000), "anything");
  const journal_reader reader(cache.sink().bytes());
  const journal_header& header = reader.header();
  CHECK(header.version == 2);
  CHECK(header.options.epoch == 77);
  CHECK(header.configuration == "anything");
  CHECK(header.options.blocks == 9);
  CHECK(header.options.block_capacity == 12);
  CHECK(header.options.block_tokens == 4);
  CHECK(header.options.max_sequences == 3);
  CHECK(header.options.max_sequence_tokens == 40);
  CHECK(header.options.max_idle_blocks == 5);
  CHECK(header.options.max_deferred == 0);
  CHECK(header.options.seed.low == 11);
  CHECK(header.options.seed.high == ~std::uint64_t{0});
  CHECK(header.options.name == "name");
}

TEST_CASE("a replay into another configuration names the first record that differs") {
  plain_journal cache({.blocks = 4, .block_tokens = 4, .name = "kv"}, memory_journal(1000));
  const auto id = cache.create().value();
  cache.append(id, prompt).value();
  cache.commit(id).value();
  cache.checkpoint();
  const auto smaller = llmmem::paging::replay(cache.sink().bytes(), [](const journal_header& header) {
    paged_options options = header.options;
    options.blocks = 1;
    return plain_cache(options);
  });
  REQUIRE(smaller.divergence());
  CHECK(smaller.divergence()->record == 2);
  CHECK(smaller.divergence()->operation == journal_op::append);
  CHECK(smaller.divergence()->message() ==
        "journal: record 2, append: expected (0, 2, 0, 0, 0); found \"kv: sequence 0 would hold 8 tokens, "
        "more than the 4 allowed; raise max_sequence_tokens, or blocks\"");
  const auto larger = llmmem::paging::replay(cache.sink().bytes(), [](const journal_header& header) {
    paged_options options = header.options;
    options.blocks = 5;
    return plain_cache(options);
  });
  REQUIRE(larger.divergence());
  CHECK(larger.divergence()->record == 4);
  CHECK(larger.divergence()->message().starts_with("journal: record 4, checkpoint: expected state "));
}

TEST_CASE("a replay stops at the requested record") {
  plain_journal cache({.blocks = 4, .block_tokens = 4}, memory_journal(1000));
  const auto id = cache.create().value();
  cache.append(id, prompt).value();
  cache.release(id).value();
  const auto before = llmmem::paging::replay(cache.sink().bytes(), plain_cache_of, 2);
  REQUIRE(before.sequences().size() == 1);
  CHECK(before.cache().tokens(before.sequences()[0]) == 8);
  CHECK(before.handle(id) == before.sequences()[0]);
  CHECK(before.end().records == 2);
  CHECK(before.end().reason.empty());
}

TEST_CASE("after a crash the index is restored, without sequences") {
  host_timeline stream;
  plain_journal cache({.blocks = 8, .block_tokens = 4}, memory_journal(10'000));
  const auto first = cache.create().value();
  cache.append(first, prompt).value();
  cache.commit(first).value();
  cache.release_after(first, stream.issue()).value();
  const auto second = cache.create().value();
  cache.append(second, prompt).value();

  auto restored = llmmem::paging::replay(cache.sink().bytes(), plain_cache_of);
  CHECK(restored.cache().stats().active_blocks == 4);
  CHECK(restored.cache().cached_tokens(prompt) == 8);
  restored.release_all();
  CHECK(restored.cache().stats().active_blocks == 0);
  CHECK(restored.cache().stats().sequences == 0);
  CHECK(restored.cache().stats().idle_blocks == 2);
  CHECK(restored.cache().cached_tokens(prompt) == 8);
  CHECK(restored.cache().audit().empty());
}

TEST_CASE("a fence passes in the replay at the record at which the journal saw it pass") {
  host_timeline stream;
  plain_journal cache({.blocks = 4, .block_tokens = 4}, memory_journal(10'000));
  const auto id = cache.create().value();
  cache.append(id, prompt).value();
  const host_fence done = stream.issue();
  cache.release_after(id, done).value();
  CHECK(cache.collect() == 0);
  stream.pass(done).value();
  CHECK(cache.stats().free_blocks == 2);  // nobody has looked yet
  CHECK(cache.collect() == 2);
  for (const std::uint64_t records : {4U, 5U, 6U}) {
    const auto then = llmmem::paging::replay(cache.sink().bytes(), plain_cache_of, records);
    CHECK(then.cache().stats().free_blocks == (records < 6 ? 2U : 4U));
  }
}

TEST_CASE("recording ends when the sink is full, and the cache continues") {
  plain_journal cache({.blocks = 4, .block_tokens = 4}, memory_journal(100));
  CHECK(cache.recording());
  std::uint64_t served = 0;
  for (int i = 0; i < 20; ++i) {
    const auto id = cache.create().value();
    served += cache.append(id, prompt).has_value() ? 1U : 0U;
    cache.release(id).value();
  }
  CHECK(served == 20);
  CHECK_FALSE(cache.recording());
  CHECK(cache.records() + cache.unrecorded() == 60);
  journal_reader reader(cache.sink().bytes());
  while (reader.next()) {
  }
  CHECK(reader.end().records == cache.records());
}

TEST_CASE("a scheduler and a transfer work on journaled caches, which replay what they did") {
  plain_journal cache({.blocks = 12, .block_tokens = 4, .max_sequences = 4}, memory_journal(1 << 16));
  struct engine {
    std::vector<std::vector<token_id>> texts;
    std::span<const token_id> tokens(std::uint64_t user) noexcept { return texts[user]; }
    void copy(const block_copy&) noexcept {}
    void exhausted(std::uint64_t, const failure&) noexcept {}
  } model;
  model.texts.assign(3, prompt);
  batch_scheduler scheduler(cache, model, {.max_running = 3, .max_requests = 3, .max_step_tokens = 8});
  std::vector<request_ticket> tickets;
  for (std::uint64_t user = 0; user < 3; ++user)
    tickets.push_back(scheduler.submit(user).value());
  for (int i = 0; i < 30; ++i) {
    for (const scheduled_work& each : scheduler.step().value().work) {
      std::vector<token_id>& text = model.texts[each.user];
      if (each.first + each.count == text.size()) text.push_back(static_cast<token_id>(each.user));
    }
    scheduler.completed().value();
  }
  CHECK(scheduler.stats().preempted > 0);
  for (const request_ticket& each : tickets)
    scheduler.finish(each).value();

  const kv_layout layout{.layers = 1, .heads = 1, .head_dim = 2, .block_tokens = 4, .model = 5};
  plain_journal other({.blocks = 4, .block_tokens = 4}, memory_journal(1 << 12));
  std::vector<std::byte> here(layout.total_bytes(cache.max_physical_blocks()));
  std::vector<std::byte> there(layout.total_bytes(other.max_physical_blocks()));
  const auto sent = cache.create().value();
  cache.append(sent, prompt).value();
  cache.commit(sent).value();
  wire line;
  export_sequence(cache, sent, prompt, {}, kv_memory{here.data(), cache.max_physical_blocks(), layout},
                  line.sink())
      .value();
  const kv_memory to{there.data(), other.max_physical_blocks(), layout};
  CHECK(import_sequence(other, to, line.source()).value().tokens == 8);
  for (plain_journal* each : {&cache, &other}) {
    each->checkpoint();
    const auto same = llmmem::paging::replay(each->sink().bytes(), plain_cache_of);
    if (same.divergence()) FAIL(same.divergence()->message());
    CHECK(same.end().records == each->records());
  }
}

TEST_CASE("a sink may be a function") {
  std::vector<std::byte> kept;
  const callback_journal sink{.call =
                                  [](void* context, std::span<const std::byte> bytes) noexcept {
                                    auto& to = *static_cast<std::vector<std::byte>*>(context);
                                    to.insert(to.end(), bytes.begin(), bytes.end());
                                    return true;
                                  },
                              .context = &kept};
  paging::journaled<plain_cache, callback_journal> cache({.blocks = 200, .block_tokens = 4}, sink);
  const auto id = cache.create().value();
  cache.append(id, std::vector<token_id>(700, 100'000)).value();  // longer than the writer's buffer
  const auto same = llmmem::paging::replay(kept, plain_cache_of);
  CHECK_FALSE(same.divergence());
  CHECK(same.cache().stats().tokens == 700);
  callback_journal none;
  CHECK_FALSE(none.write({}));
}

TEST_CASE("a recorded fence does not wait") {
  const std::uint64_t passed = 3;
  CHECK(recorded_fence().ready());
  CHECK(recorded_fence(&passed, 3).ready());
  recorded_fence(&passed, 3).wait();
  CHECK_FALSE(recorded_fence(&passed, 4).ready());
  CHECK_THROWS_WITH_AS(recorded_fence(&passed, 4).wait(),
                       "recorded_fence: it has not passed; wait for the engine's fence that it represents",
                       argument_error);
}

TEST_CASE("a journal allocates nothing in addition to its sink") {
  plain_journal cache({.blocks = 64, .block_tokens = 4}, memory_journal(1 << 20));
  std::array<append_result, 1> out{};
  const std::uint64_t before = heap_allocations();
  for (int i = 0; i < 200; ++i) {
    const auto id = cache.create();
    static_cast<void>(cache.match(*id, prompt));
    static_cast<void>(cache.append(*id, prompt));
    const std::array batch{paging::growth{.sequence = *id, .unknown_tokens = 3}};
    static_cast<void>(cache.append_batch(batch, out));
    static_cast<void>(cache.commit(*id));
    static_cast<void>(cache.release_after(*id, {}));
    cache.collect();
  }
  CHECK(heap_allocations() == before);
  CHECK(cache.recording());
}

TEST_CASE("bytes that are not a journal are refused with their offset and reason") {
  CHECK_THROWS_WITH_AS(journal_reader({}),
                       "journal: offset 0: the bytes end here; a journal begins with 8 bytes and a header",
                       journal_error);
  const auto text = bytes_of({'l', 'l', 'm', 'm', 'e', 'm', ' ', 'K'});
  CHECK_THROWS_WITH_AS(journal_reader(text), "journal: offset 7: these bytes are not a journal",
                       journal_error);
  auto newer = header_payload({.blocks = 1});
  newer[0] = std::byte{4};
  CHECK_THROWS_WITH_AS(journal_reader(framed({newer})),
                       "journal: offset 10 of the header: an unknown version of the format", journal_error);
  auto longer = header_payload({.blocks = 1});
  longer.push_back(std::byte{});
  CHECK_THROWS_AS(journal_reader(framed({longer})), journal_error);
}

TEST_CASE("an invalid record is refused with its number, its offset and the reason") {
  const std::uint64_t begin = framed({header_payload({.blocks = 4})}).size() + 1;
  const auto at = [&](std::uint64_t offset, const char* why) {
    return "record 1, offset " + std::to_string(begin + offset) + ": " + why;
  };
  CHECK(reason_of({}) == at(0, "the bytes end here"));
  CHECK(reason_of(bytes_of({static_cast<int>(last_journal_op) + 1})) == at(1, "an unknown operation"));
  CHECK(reason_of(bytes_of({0})) == at(1, "an unknown operation"));
  CHECK(reason_of(bytes_of({28, static_cast<int>(last_journal_op) + 1})) == at(2, "an unknown operation"));
  CHECK(reason_of(bytes_of({21, int{last_error_number}})) == at(2, "the bytes end here"));
  CHECK(reason_of(bytes_of({21, int{last_error_number} + 1})) == at(2, "an unknown outcome"));
  CHECK(reason_of(bytes_of({21, 0, 1, 1})) == at(3, "bytes are left over"));
  CHECK(reason_of(bytes_of({3, 3})) == at(2, "an unknown kind of handle"));
  CHECK(reason_of(bytes_of({3, 1, 0x80})) == at(3, "the bytes end here"));
  CHECK(reason_of(bytes_of({3, 1, 0x80, 0})) == at(4, "a number is not written in its shortest form"));
  CHECK(reason_of(bytes_of({3, 1, 0xFF, 0xFF, 0xFF, 0xFF, 0x10})) == at(7, "a number exceeds 32 bits"));
  CHECK(reason_of(bytes_of({17, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 2})) ==
        at(11, "a number exceeds 64 bits"));
  CHECK(reason_of(bytes_of({7, 0, 0xFF, 0xFF, 3, 0})) == at(5, "a count exceeds the bytes that are left"));
  CHECK(reason_of(bytes_of({1, 2})) == at(2, "an unknown kind of context"));
}

TEST_CASE("records out of any order are a divergence, not a crash") {
  const auto diverges = [](const std::vector<std::vector<std::byte>>& records) {
    std::vector<std::vector<std::byte>> payloads{header_payload({.blocks = 1, .block_tokens = 1})};
    payloads.insert(payloads.end(), records.begin(), records.end());
    const auto bytes = framed(payloads);
    const auto done = llmmem::paging::replay(bytes, plain_cache_of);
    return done.divergence() ? done.divergence()->message() : done.end().reason;
  };
  CHECK(diverges({bytes_of({27, 1, 0})}) ==
        "journal: record 1, relieved: expected relieved; found no operation open");
  CHECK(diverges({bytes_of({28, 21, 0, 0})}) ==
        "journal: record 1, outcome: expected outcome; found no operation open");
  CHECK(diverges({bytes_of({0x80 | 21}), bytes_of({21, 0, 0})}) ==
        "journal: record 2, collect: expected collect; found the outcome of collect");
  CHECK(diverges({bytes_of({0x80 | 21}), bytes_of({28, 21, 0, 1})}) ==
        "journal: record 2, collect: expected (1); found (0)");
  CHECK(diverges({bytes_of({1, 0, 0, 0, 0, 0x80, 0x3F, 35, 0, 0, 255, 1, 1})})
            .starts_with("journal: record 1, create: expected ("));
  // An append that is short of blocks and was interrupted, by something that is no pressure.
  const auto create = bytes_of({1, 0, 0, 0, 0, 0x80, 0x3F, 35, 0, 0, 0, 1});
  const auto full = bytes_of({8, 1, 0, 1, 1, 0, 0, 1, 0, 0, 0});
  const auto other = bytes_of({1, 0, 0, 0, 0, 0x80, 0x3F, 35, 0, 0, 1, 1});
  const auto pressed = bytes_of({0x80 | 8, 1, 1, 1, 1});
  CHECK(diverges({create, full, other, pressed, bytes_of({21, 0, 0})}) ==
        "journal: record 5, collect: expected collect; found pressure (1, 0)");
  CHECK(diverges({create, full, other, pressed, bytes_of({26, 2, 0, 0})}) ==
        "journal: record 5, pressed: expected pressure (2, 0); found pressure (1, 0)");
  CHECK(diverges({create, full, other, pressed, bytes_of({26, 1, 0, 0}), bytes_of({27, 0, 0}),
                  bytes_of({28, 8, 1, 0, 1, 0})})
            .empty());
}

TEST_CASE("a replay of any contents of records ends with a sound cache") {
  std::uint64_t replayed_records = 0;
  for (const auto seed : seeds(60)) {
    CAPTURE(seed);
    random_numbers random(seed);
    journal_world<traced_traits> world(seed);
    for (int i = 0; i < 60; ++i)
      world.step();
    // A few bytes of the payloads changed, a few records left out, under checksums that fit.
    std::vector<std::vector<std::byte>> payloads;
    for (auto& payload : payloads_of(world.bytes())) {
      if (payloads.empty() || !random.once_in(30)) payloads.push_back(payload);
      if (payloads.size() == 1 || !random.once_in(8)) continue;
      payloads.back()[random.below(std::uint64_t{payloads.back().size()})] =
          static_cast<std::byte>(random.below(std::uint64_t{256}));
    }
    CHECK(framed(payloads_of(world.bytes())) == std::vector(world.bytes().begin(), world.bytes().end()));
    const auto bytes = framed(payloads);
    const auto done = llmmem::paging::replay(
        bytes, [](const journal_header& header) { return paged_allocator<traced_traits>(header.options); });
    CHECK(done.cache().audit().empty());
    replayed_records += done.end().records;
  }
  CHECK(replayed_records > 300);
}
