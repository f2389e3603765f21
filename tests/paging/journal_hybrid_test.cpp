#include <llmmem/paging/batch_scheduler.hpp>
#include <llmmem/paging/group_transfer.hpp>
#include <llmmem/paging/hybrid_what_if.hpp>
#include <llmmem/paging/journal.hpp>
#include <llmmem/paging/journal_replay.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "support/heap_counter.hpp"
#include "support/journal_hybrid_world.hpp"
#include "support/journal_world.hpp"
#include "support/kv_side.hpp"
#include "support/random.hpp"
#include "support/replayed_journal.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

const std::array mixed{full_attention({"full", 2, 64, 4}), sliding_window({"local", 3, 64, 4}, 10, 4),
                       chunked_local({"chunk", 1, 64, 4}, 8), state_snapshots("state", 1, 700, 8)};

hybrid_options small() {
  return {.groups = mixed,
          .budget_bytes = 1 << 16,
          .page_bytes = 2048,
          .max_sequences = 4,
          .max_sequence_tokens = 64,
          .name = "kv"};
}

std::vector<token_id> numbered(std::size_t count) {
  std::vector<token_id> tokens(count);
  for (std::size_t i = 0; i < count; ++i)
    tokens[i] = static_cast<token_id>(i);
  return tokens;
}

std::vector<std::byte> copy_of(std::span<const std::byte> bytes) {
  return {bytes.begin(), bytes.end()};
}

}  // namespace

TEST_CASE("a replay over groups of layers gives the outcomes and the state of the recorded calls") {
  std::uint64_t refused = 0;
  std::uint64_t copies = 0;
  std::set<layer_kind> kinds;
  for (const auto seed : seeds(60)) {
    CAPTURE(seed);
    journal_hybrid_world world(seed);
    for (const layer_group& each : world.cache().groups())
      kinds.insert(each.kind);
    for (int i = 0; i < 200; ++i)
      world.step();
    check_replay(world, hybrid_of);
    refused += world.refused();
    copies += world.copies();
  }
  CHECK(kinds.size() == 4);
  CHECK(refused > 500);
  CHECK(copies > 50);
}

TEST_CASE("a journal over groups cut after any byte replays to the state at its last complete record") {
  std::uint64_t compared = 0;
  for (const auto seed : seeds(5)) {
    CAPTURE(seed);
    journal_hybrid_world world(seed);
    std::map<std::uint64_t, std::string> states;  // by bytes written
    for (int i = 0; i < 25; ++i) {
      const auto now = paging::replay(world.bytes(), hybrid_of);
      states[world.bytes().size()] = state_of(world.cache().cache(), world.own(now.sequences()));
      world.step();
    }
    const auto whole = world.bytes();
    std::uint64_t records = 0;
    for (std::size_t cut = states.begin()->first; cut <= whole.size(); ++cut) {
      CAPTURE(cut);
      const auto restored = paging::replay(whole.first(cut), hybrid_of);
      CHECK_FALSE(restored.divergence());
      CHECK(restored.end().offset <= cut);
      CHECK((restored.end().offset == cut) == restored.end().reason.empty());
      CHECK(restored.end().records >= records);
      records = restored.end().records;
      const auto then = states.find(restored.end().offset);
      if (then == states.end() || restored.end().offset != cut) continue;
      CHECK(state_of(restored.cache(), restored.sequences()) == then->second);
      ++compared;
    }
    CHECK(records == world.cache().records());
  }
  CHECK(compared > 60);
}

TEST_CASE("a journal over groups cut inside its header is unreadable, and every flipped byte is detected") {
  journal_hybrid_world world(7);
  const std::size_t header = world.bytes().size();
  for (std::size_t cut = 0; cut < header; ++cut) {
    CAPTURE(cut);
    CHECK_THROWS_AS(paging::hybrid_journal_reader(world.bytes().first(cut)), journal_error);
  }
  for (int i = 0; i < 40; ++i)
    world.step();
  std::vector<std::byte> bytes = copy_of(world.bytes());
  for (std::size_t at = 0; at < bytes.size(); ++at) {
    CAPTURE(at);
    bytes[at] ^= std::byte{0x41};
    bool seen = false;
    try {
      paging::hybrid_journal_reader reader(bytes);
      while (reader.next())
        CHECK(reader.end().offset <= at);
      seen = !reader.end().reason.empty();
    } catch (const journal_error&) {
      seen = true;
    }
    CHECK(seen);
    bytes[at] ^= std::byte{0x41};
  }
}

TEST_CASE("the header has the groups, their names included, and the options, in copies too") {
  std::array groups = mixed;
  groups[3].writes = snapshot_times::end_of_step;
  hybrid_options options = small();
  options.groups = groups;
  options.max_chunks = 50;
  options.max_deferred = 7;
  options.seed = {.low = 11, .high = ~std::uint64_t{0}};
  options.epoch = 77;
  const hybrid_journal cache(options, memory_journal(1000), "s3fifo", named_evictions{"s3fifo"});
  std::optional<paging::hybrid_journal_reader> reader(cache.sink().bytes());
  const paging::hybrid_journal_header copied = reader->header();
  paging::hybrid_journal_header assigned;
  assigned = copied;
  reader.reset();
  for (const auto* each : std::array<const paging::hybrid_journal_header*, 2>{&copied, &assigned}) {
    CHECK(each->version == 3);
    CHECK(each->configuration == "s3fifo");
    REQUIRE(each->options.groups.size() == 4);
    CHECK(each->options.groups.data() == each->groups.data());
    for (std::size_t g = 0; g < 4; ++g) {
      const layer_group& found = each->options.groups[g];
      CHECK(found.name == groups[g].name);
      CHECK(found.name.data() == each->names[g].data());
      CHECK(found.kind == groups[g].kind);
      CHECK(found.writes == groups[g].writes);
      CHECK(found.reach == groups[g].reach);
      CHECK(found.sinks == groups[g].sinks);
      CHECK(found.block_tokens == groups[g].block_tokens);
      CHECK(found.block_bytes == groups[g].block_bytes);
    }
    CHECK(each->options.budget_bytes == 1 << 16);
    CHECK(each->options.page_bytes == 2048);
    CHECK(each->options.max_sequences == 4);
    CHECK(each->options.max_sequence_tokens == 64);
    CHECK(each->options.max_chunks == 50);
    CHECK(each->options.max_deferred == 7);
    CHECK(each->options.seed.low == 11);
    CHECK(each->options.seed.high == ~std::uint64_t{0});
    CHECK(each->options.epoch == 77);
    CHECK(each->options.name == "kv");
  }
}

TEST_CASE("the journal of one allocator is refused by the reader of the other, which says why") {
  const hybrid_journal grouped(small(), memory_journal(1000), "lru", named_evictions{"lru"});
  const auto uniform = framed({header_payload({.blocks = 4})});
  CHECK_THROWS_WITH_AS(static_cast<void>(journal_reader(grouped.sink().bytes())),
                       "journal: offset 10 of the header: it records a hybrid_allocator, not a "
                       "paged_allocator; build the cache that it records",
                       journal_error);
  CHECK_THROWS_WITH_AS(static_cast<void>(paging::replay(uniform, hybrid_of)),
                       "journal: offset 10 of the header: it records a paged_allocator, not a "
                       "hybrid_allocator; build the cache that it records",
                       journal_error);
  const std::array policy{std::string_view("lru")};
  CHECK_THROWS_AS(static_cast<void>(paging::hybrid_what_if(uniform, policy)), journal_error);
}

TEST_CASE("a header that no cache could have written is refused with its reason") {
  const std::string long_text(100, 'c');  // so that 17 groups could follow
  const hybrid_journal cache(small(), memory_journal(1000), long_text, named_evictions{"lru"});
  const std::vector<std::byte> right = payloads_of(cache.sink().bytes()).front();
  const auto why = [](const std::vector<std::byte>& payload) {
    try {
      static_cast<void>(paging::hybrid_journal_reader(framed({payload})));
    } catch (const journal_error& error) {
      const std::string text = error.what();
      return text.substr(text.find("header: ") + 8);
    }
    return std::string();
  };
  const auto with = [&](std::size_t at, int value) {
    std::vector<std::byte> changed = right;
    changed[at] = static_cast<std::byte>(value);
    return why(changed);
  };
  CHECK(why(right).empty());
  CHECK(with(0, 4) == "an unknown version of the format");
  CHECK(with(1, 0) == "a number of groups that no cache has");
  CHECK(with(1, 17) == "a number of groups that no cache has");
  CHECK(with(1, 127) == "a count exceeds the bytes that are left");
  CHECK(with(7, 4) == "an unknown kind of layers");
  CHECK(with(8, 2) == "unknown snapshot times");
  std::vector<std::byte> longer = right;
  longer.push_back(std::byte{});
  CHECK(why(longer) == "bytes are left over");
}

TEST_CASE("an operation that the recorded allocator lacks ends the journal") {
  const hybrid_journal cache(small(), memory_journal(1000), "lru", named_evictions{"lru"});
  const std::vector<std::byte> header = payloads_of(cache.sink().bytes()).front();
  const auto reason = [&](const std::vector<std::byte>& record) {
    const auto bytes = framed({header, record});
    paging::hybrid_journal_reader reader(bytes);
    CHECK_FALSE(reader.next());
    return reader.end().reason.substr(reader.end().reason.find(": ") + 2);
  };
  for (const journal_op op :
       {journal_op::match_keys, journal_op::commit_keys, journal_op::expect_keys, journal_op::compact,
        journal_op::pressed, journal_op::relieved, journal_op::outcome}) {
    CAPTURE(to_string(op));
    CHECK(reason({static_cast<std::byte>(op)}) == "an unknown operation");
  }
  CHECK(reason({static_cast<std::byte>(journal_op::collect) | detail::open_operation}) ==
        "an unknown operation");
  CHECK(reason({std::byte{43}}) == "an unknown operation");
  for (const journal_op op : {journal_op::read_until, journal_op::limit_releases, journal_op::shortage,
                              journal_op::batch_shortage, journal_op::evacuate}) {
    CAPTURE(to_string(op));
    const auto bytes = framed({header_payload({.blocks = 4}), {static_cast<std::byte>(op)}});
    journal_reader reader(bytes);
    CHECK_FALSE(reader.next());
    CHECK(reader.end().reason.ends_with("an unknown operation"));
  }
}

TEST_CASE("the records of groups are as documented, to the byte") {
  hybrid_journal cache(small(), memory_journal(4000), "lru", named_evictions{"lru"});
  const auto bytes = [](std::initializer_list<int> values) {
    std::vector<std::byte> out;
    for (const int each : values)
      out.push_back(static_cast<std::byte>(each));
    return out;
  };
  const auto id = cache.create().value();
  cache.append(id, numbered(8)).value();
  cache.commit(id).value();
  const std::array batch{paging::growth{.sequence = id, .unknown_tokens = 1}};
  std::array<hybrid_append, 1> out{};
  const std::array<std::uint64_t, 4> leave{1, 0, 2, 300};
  CHECK(cache.append_batch(batch, out, leave).code() == errc::out_of_group_blocks);
  cache.append_batch(batch, out).value();
  REQUIRE(out[0].copies.size() == 1);
  const block_copy carried = out[0].copies[0].copy;
  std::array<group_shortage, 4> lacks{};
  CHECK_FALSE(cache.shortage(id, 1, lacks).value());
  const auto payloads = payloads_of(cache.sink().bytes());
  REQUIRE(payloads.size() == 7);
  CHECK(payloads[2] == bytes({7, 1, 0, 1, 8, 0, 2, 4, 6, 8, 10, 12, 14,  // append: own handle, eight tokens
                              0, 0, 7, 0}));  // ok: from 0, seven blocks in all groups, no copy
  CHECK(std::vector(payloads[4].begin(), payloads[4].begin() + 14) ==
        bytes({9, 1, 1, 0, 1, 0, 1, 4, 1, 0, 2, 0xAC, 2, 1}));  // a batch of one; what is left; one output
  std::vector<std::byte> grown = bytes({9, 1, 1, 0, 1, 0, 1, 0, 1,  // nothing is left of any group
                                        0, 1, 8, 4, 1, 3});         // ok: from 8, four blocks, group 3 copies
  for (const std::uint64_t each :
       {std::uint64_t{to_index(carried.source)}, std::uint64_t{to_index(carried.destination)},
        std::uint64_t{carried.tokens}}) {
    for (std::uint64_t rest = each; rest >= 0x80; rest >>= 7)
      grown.push_back(static_cast<std::byte>(rest | 0x80));
    grown.push_back(static_cast<std::byte>(each >= 0x80 ? each >> 7 : each));
  }
  CHECK(payloads[5] == grown);
  CHECK(std::vector(payloads[6].begin(), payloads[6].begin() + 9) ==
        bytes({40, 1, 0, 1, 1, 4, 0, 0, 4}));  // one token more, four outputs; ok: not short, four groups
}

TEST_CASE("a replay over groups into another budget names the first record that differs") {
  hybrid_journal cache(small(), memory_journal(4000), "lru", named_evictions{"lru"});
  const auto id = cache.create().value();
  cache.append(id, numbered(40)).value();
  cache.checkpoint();
  const auto smaller = paging::replay(cache.sink().bytes(), [](const paging::hybrid_journal_header& header) {
    hybrid_options options = header.options;
    options.budget_bytes = 5 * options.page_bytes;
    return traced_hybrid(options, named_evictions{"lru"});
  });
  REQUIRE(smaller.divergence());
  CHECK(smaller.divergence()->record == 2);
  CHECK(smaller.divergence()->operation == journal_op::append);
  CHECK(smaller.divergence()->found.starts_with("\"kv: group "));
  const auto larger = paging::replay(cache.sink().bytes(), [](const paging::hybrid_journal_header& header) {
    hybrid_options options = header.options;
    options.budget_bytes *= 2;
    return traced_hybrid(options, named_evictions{"lru"});
  });
  REQUIRE(larger.divergence());
  CHECK(larger.divergence()->operation == journal_op::checkpoint);
  const auto partly = paging::replay(cache.sink().bytes(), hybrid_of, 1);
  CHECK(partly.end().records == 1);
  CHECK(partly.cache().tokens(partly.handle(id)) == 0);
}

TEST_CASE("a fence given to read_until passes in the replay where the journal saw it pass") {
  host_timeline stream;
  hybrid_journal cache(small(), memory_journal(10'000), "lru", named_evictions{"lru"});
  const auto id = cache.create().value();
  cache.append(id, numbered(16)).value();
  cache.read_until(id, stream.issue()).value();
  const host_fence done = stream.issue();
  cache.read_until(id, done).value();
  cache.release(id).value();
  const std::uint64_t waiting = cache.stats().deferred;
  CHECK(waiting > 8);
  CHECK(cache.collect() == 0);
  stream.pass(done).value();
  CHECK(cache.collect() == waiting);
  REQUIRE(cache.records() == 8);
  for (const std::uint64_t records : {6U, 7U, 8U}) {
    const auto then = paging::replay(cache.sink().bytes(), hybrid_of, records);
    CHECK_FALSE(then.divergence());
    CHECK(then.cache().stats().deferred == (records < 8 ? waiting : 0));
  }
}

TEST_CASE("a journal over groups keeps a bounded number of fences, equal ones once, and refuses more") {
  host_timeline stream;
  hybrid_journal cache(small(), memory_journal(1 << 16), "lru", named_evictions{"lru"});
  const auto id = cache.create().value();
  cache.append(id, numbered(16)).value();
  host_fence last{};
  for (int i = 0; i < 32; ++i) {
    last = stream.issue();
    cache.read_until(id, last).value();
    cache.read_until(id, last).value();          // of each sequence of a step: the same fence
    cache.read_until(id, host_fence{}).value();  // one that has passed takes no place
  }
  const std::uint64_t records = cache.records();
  CHECK(cache.read_until(id, stream.issue()).code() == errc::deferred_full);
  CHECK(cache.release_after(id, stream.issue()).code() == errc::deferred_full);
  CHECK(cache.tokens(id) == 16);
  CHECK(cache.records() == records);
  stream.pass(last).value();
  cache.release_after(id, stream.issue()).value();
  const auto same = paging::replay(cache.sink().bytes(), hybrid_of);
  CHECK_FALSE(same.divergence());
  CHECK(same.cache().stats().deferred == cache.stats().deferred);
}

TEST_CASE("after a crash the contents of all groups are restored, without sequences, pins and fences") {
  host_timeline stream;
  hybrid_journal cache(small(), memory_journal(10'000), "lru", named_evictions{"lru"});
  const auto first = cache.create().value();
  cache.append(first, numbered(16)).value();
  cache.commit(first).value();
  cache.pin(cache.table(first, 0)[0]).value();
  cache.release_after(first, stream.issue()).value();
  const auto second = cache.create().value();
  cache.append(second, numbered(16)).value();
  cache.read_until(second, stream.issue()).value();

  auto restored = paging::replay(cache.sink().bytes(), hybrid_of);
  CHECK(restored.cache().stats().pages.active_bytes != 0);
  CHECK(restored.cache().cached_tokens(numbered(20)) == 16);
  restored.release_all();
  CHECK(restored.cache().stats().pages.active_bytes == 0);
  CHECK(restored.cache().stats().sequences == 0);
  CHECK(restored.cache().cached_tokens(numbered(20)) == 16);
  CHECK(restored.cache().audit().empty());
}

TEST_CASE("after a replay that differs, release_all ends what the last operation began, too") {
  hybrid_journal cache(small(), memory_journal(10'000), "lru", named_evictions{"lru"});
  for (int i = 0; i < 4; ++i)
    cache.create().value();
  REQUIRE(cache.create().code() == errc::out_of_sequences);
  auto more = paging::replay(cache.sink().bytes(), [](paging::hybrid_journal_header header) {
    header.options.max_sequences = 8;
    return hybrid_of(header);
  });
  REQUIRE(more.divergence());
  CHECK(more.sequences().size() == 5);
  more.release_all();
  CHECK(more.cache().stats().sequences == 0);
}

TEST_CASE("a scheduler and a transfer between caches work on journaled caches, and replay") {
  hybrid_options options = small();
  options.budget_bytes = 14 * options.page_bytes;
  hybrid_journal cache(options, memory_journal(1 << 18), "lru", named_evictions{"lru"});
  struct engine {
    std::vector<std::vector<token_id>> texts;
    std::uint64_t copies = 0;
    std::span<const token_id> tokens(std::uint64_t user) noexcept { return texts[user]; }
    void copy(const group_copy&) noexcept { ++copies; }
    void exhausted(std::uint64_t, const failure&) noexcept {}
  } model;
  for (std::size_t user = 0; user < 4; ++user)
    model.texts.push_back(numbered(9 + 8 * user));
  {
    batch_scheduler scheduler(cache, model, {.max_running = 3, .max_requests = 4, .max_step_tokens = 16});
    std::vector<request_ticket> tickets;
    for (std::uint64_t user = 0; user < 4; ++user)
      tickets.push_back(scheduler.submit(user).value());
    for (int i = 0; i < 20; ++i) {
      for (const scheduled_work& each : scheduler.step().value().work) {
        std::vector<token_id>& text = model.texts[each.user];
        if (each.first + each.count == text.size()) text.push_back(5);
      }
      scheduler.completed().value();
    }
    CHECK(scheduler.stats().computed_tokens > 60);
    for (const request_ticket& each : tickets)
      scheduler.finish(each).value();
  }
  CHECK(model.copies > 4);

  std::vector<std::byte> memory(cache.pool().physical_bytes());
  const std::vector<token_id> text = numbered(20);
  const auto sent = cache.create().value();
  const auto hit = cache.match(sent, text).value();
  cache.append(sent, std::span(text).subspan(hit.tokens)).value();
  cache.commit(sent).value();
  wire line;
  hybrid_journal other(small(), memory_journal(1 << 16), "lru", named_evictions{"lru"});
  std::vector<std::byte> there(other.pool().physical_bytes());
  export_sequence(cache, sent, text, group_memory{memory, 1}, line.sink()).value();
  const auto received = import_sequence(other, group_memory{there, 1}, line.source()).value();
  CHECK(other.tokens(received.sequence) == 20);
  for (hybrid_journal* each : {&cache, &other}) {
    each->checkpoint();
    const auto same = paging::replay(each->sink().bytes(), hybrid_of);
    if (same.divergence()) FAIL(same.divergence()->message());
    CHECK(same.end().records == each->records());
  }
}

TEST_CASE("a replay of any contents of records over groups ends with a sound cache") {
  std::uint64_t replayed_records = 0;
  for (const auto seed : seeds(40)) {
    CAPTURE(seed);
    random_numbers random(seed);
    journal_hybrid_world world(seed);
    for (int i = 0; i < 60; ++i)
      world.step();
    std::vector<std::vector<std::byte>> payloads;
    for (auto& payload : payloads_of(world.bytes())) {
      if (payloads.empty() || !random.once_in(30)) payloads.push_back(payload);
      if (payloads.size() == 1 || !random.once_in(8)) continue;
      payloads.back()[random.below(std::uint64_t{payloads.back().size()})] =
          static_cast<std::byte>(random.below(std::uint64_t{256}));
    }
    const auto done = paging::replay(framed(payloads), hybrid_of);
    CHECK(done.cache().audit().empty());
    replayed_records += done.end().records;
  }
  CHECK(replayed_records > 200);
}

TEST_CASE("a journal over groups allocates nothing in addition to its sink") {
  hybrid_journal cache(small(), memory_journal(1 << 20), "lru", named_evictions{"lru"});
  const std::vector<token_id> prompt = numbered(24);
  std::array<hybrid_append, 1> out{};
  std::array<group_shortage, 4> lacks{};
  const std::uint64_t before = heap_allocations();
  for (int i = 0; i < 100; ++i) {
    const auto id = cache.create();
    const auto hit = cache.match(*id, prompt);
    static_cast<void>(cache.append(*id, std::span(prompt).subspan(hit->tokens)));
    const std::array batch{paging::growth{.sequence = *id, .unknown_tokens = 3}};
    static_cast<void>(cache.shortage(batch, lacks));
    static_cast<void>(cache.append_batch(batch, out));
    static_cast<void>(cache.read_until(*id, host_fence{}));
    static_cast<void>(cache.commit(*id));
    static_cast<void>(cache.release_after(*id, {}));
    cache.collect();
  }
  CHECK(heap_allocations() == before);
  CHECK(cache.recording());
}

// What if

namespace {

struct served_groups {
  hybrid_stats stats;
  std::vector<std::byte> journal;
};

/// Requests that share prefixes, one after the other, each prompt in one step.
served_groups serve_groups(std::uint64_t seed, const std::string& policy, const hybrid_options& options) {
  hybrid_journal cache(options, memory_journal(1 << 20), policy, named_evictions{policy});
  random_numbers random(seed);
  for (int i = 0; i < 80; ++i) {
    const std::uint64_t family = random.below(std::uint64_t{6}) * random.below(std::uint64_t{2});
    std::vector<token_id> prompt;
    for (std::uint64_t k = 4 + random.below(std::uint64_t{36}); k > 0; --k)
      prompt.push_back(static_cast<token_id>(family * 100 + k % 4 * (prompt.size() % 3)));
    const std::vector<token_id> more(1 + random.below(std::uint64_t{9}), 7);
    const auto id = cache.create().value();
    const auto hit = cache.match(id, std::span(prompt).first(prompt.size() - 1)).value();
    cache.append(id, std::span(prompt).subspan(hit.tokens)).value();
    cache.commit(id).value();
    for (const token_id each : more) {
      cache.append(id, std::span(&each, 1)).value();
      cache.commit(id).value();
    }
    cache.release(id).value();
  }
  return {cache.stats(), copy_of(cache.sink().bytes())};
}

}  // namespace

TEST_CASE("a what-if result over groups equals that of the run that it predicts") {
  std::uint64_t differing = 0;
  for (const auto seed : seeds(2)) {
    CAPTURE(seed);
    for (const std::size_t groups : {1U, 2U, 4U}) {
      CAPTURE(groups);
      hybrid_options options = small();
      options.groups = std::span(mixed).first(groups);
      options.budget_bytes = (9 + 6 * groups) * options.page_bytes;
      const served_groups recorded = serve_groups(seed, "fifo", options);
      for (const std::string_view policy : eviction_names) {
        if (policy == "min") continue;
        CAPTURE(policy);
        const hybrid_stats real = serve_groups(seed, std::string(policy), options).stats;
        const what_if_result asked = paging::hybrid_what_if(recorded.journal, std::array{policy}).at(0);
        CHECK(asked.hit_tokens == real.hit_tokens);
        CHECK(asked.evictions == real.pages.evictions);
        CHECK(asked.skipped == 0);
        CHECK(asked.sequences == 80);
        differing += real.hit_tokens != recorded.stats.hit_tokens ? 1U : 0U;
      }
      const std::array lru{std::string_view("lru")};
      hybrid_options other = options;
      other.budget_bytes = 40 * options.page_bytes;
      const what_if_result larger =
          paging::hybrid_what_if(recorded.journal, lru, {.budget_bytes = other.budget_bytes}).at(0);
      CHECK(larger.hit_tokens == serve_groups(seed, "lru", other).stats.hit_tokens);
      other = options;
      other.page_bytes = 1536;
      const what_if_result repaged =
          paging::hybrid_what_if(recorded.journal, lru, {.page_bytes = other.page_bytes}).at(0);
      CHECK(repaged.hit_tokens == serve_groups(seed, "lru", other).stats.hit_tokens);
      CHECK(repaged.requested_tokens == larger.requested_tokens);
    }
  }
  CHECK(differing > 10);
}

TEST_CASE("a what-if of a scheduler's run over groups, with the same options, loses no sequence and no hit") {
  struct engine {
    std::vector<std::vector<token_id>> texts{};
    std::span<const token_id> tokens(std::uint64_t user) noexcept { return texts[user]; }
    void copy(const group_copy&) noexcept {}
    void exhausted(std::uint64_t, const failure&) noexcept {}
  };
  std::uint64_t preempted = 0;
  for (const auto seed : seeds(30)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::vector<layer_group> groups = choose_groups(random);
    std::uint64_t page = 0;
    for (const layer_group& each : groups)
      page = std::max(page, each.block_bytes);
    std::uint64_t pages = 3 + random.below(std::uint64_t{6});  // and those of one request
    for (const layer_group& each : groups)
      pages += detail::peak_blocks(each, 30, 1);
    hybrid_journal cache({.groups = groups,
                          .budget_bytes = pages * page,
                          .page_bytes = page,
                          .max_sequences = 4,
                          .max_sequence_tokens = 40},
                         memory_journal(1 << 19), "lru", named_evictions{"lru"});
    engine model;
    batch_scheduler scheduler(cache, model, {.max_running = 4, .max_requests = 16, .max_step_tokens = 7});
    std::vector<request_ticket> tickets;
    for (std::uint64_t user = 0; user < 16; ++user) {
      model.texts.push_back(numbered(1 + random.below(std::uint64_t{12})));
      tickets.push_back(scheduler.submit(user).value());
    }
    for (int i = 0; i < 400 && scheduler.stats().finished + scheduler.stats().exhausted < 16; ++i) {
      std::vector<std::uint64_t> over;
      for (const scheduled_work& each : scheduler.step().value().work) {
        std::vector<token_id>& text = model.texts[each.user];
        if (each.first + each.count == text.size()) text.push_back(static_cast<token_id>(each.user % 3));
        if (text.size() == 25) over.push_back(each.user);
      }
      scheduler.completed().value();
      for (const std::uint64_t user : over)
        scheduler.finish(tickets[user]).value();
    }
    REQUIRE(scheduler.stats().finished == 16);
    preempted += scheduler.stats().preempted;
    const std::array lru{std::string_view("lru")};
    const what_if_result same = paging::hybrid_what_if(cache.sink().bytes(), lru).at(0);
    CHECK(same.skipped == 0);
    CHECK(same.hit_tokens == cache.stats().hit_tokens);
    CHECK(same.evictions == cache.stats().pages.evictions);
  }
  CHECK(preempted > 30);
}

TEST_CASE("any journal over groups can be run under every policy, budget and page size") {
  std::uint64_t skipped = 0;
  for (const auto seed : seeds(25)) {
    CAPTURE(seed);
    journal_hybrid_world world(seed);
    for (int i = 0; i < 150; ++i)
      world.step();
    const paging::hybrid_journal_reader reader(world.bytes());
    const hybrid_options& as = reader.header().options;
    for (const std::uint64_t pages : {4U, 40U}) {
      const paging::hybrid_what_if_options other{.budget_bytes = pages * 2 * as.page_bytes,
                                                 .page_bytes = 2 * as.page_bytes};
      for (const what_if_result& each : paging::hybrid_what_if(world.bytes(), eviction_names, other)) {
        CHECK(each.skipped <= each.sequences);
        CHECK(each.hit_tokens <= each.requested_tokens);
        skipped += each.skipped;
      }
    }
  }
  CHECK(skipped > 300);
}
