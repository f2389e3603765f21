#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/kv_transfer.hpp>
#include <llmmem/paging/latent_record.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "support/counting_metadata.hpp"
#include "support/kv_forms_world.hpp"
#include "support/kv_side.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

[[nodiscard]] std::vector<token_id> prompt(std::size_t count, token_id first = 1) {
  std::vector<token_id> out(count);
  for (std::size_t i = 0; i < count; ++i)
    out[i] = first + static_cast<token_id>(i);
  return out;
}

constexpr kv_layout shape{.layers = 2, .heads = 2, .head_dim = 3, .block_tokens = 4, .model = 5};

}  // namespace

TEST_CASE("a sequence is sent bit for bit between any orders and sizes, and other sequences find it there") {
  for (const auto seed : seeds(150)) {
    CAPTURE(seed);
    random_numbers random(seed);
    kv_layout here = shape;
    kv_layout there = shape;
    for (kv_layout* each : {&here, &there}) {
      each->heads_in_block = llmmem::paging::head_order(random.below(std::uint32_t{2}));
      each->order = block_order(random.below(block_order_count));
    }
    side<> prefill({.blocks = 20, .block_tokens = 4}, here);
    side<> decode({.blocks = 30, .block_tokens = 4}, there);
    const prefix_context context{.salt = {random.below(std::uint64_t{2}), 0}};
    const auto tokens = prompt(1 + random.below(std::uint64_t{40}));
    // What the other side has already, from an earlier prompt that began alike.
    const std::size_t known = random.below(std::uint64_t{tokens.size()} + 1);
    const sequence_id before =
        decode.write({tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(known)}, context);
    REQUIRE(decode.cache.release(before));

    const sequence_id sent = prefill.write(tokens, context);
    wire line;
    const std::uint64_t leave_out = random.once_in(2) ? known / 4 : 0;
    const auto written =
        export_sequence(prefill.cache, sent, tokens, context, prefill.memory(), line.sink(), leave_out);
    REQUIRE(written);
    CHECK(*written == line.bytes.size());
    const auto received = import_sequence(decode.cache, decode.memory(), line.source());
    REQUIRE(received);
    CHECK(received->tokens == tokens.size());
    CHECK(received->reused_tokens == known / 4 * 4);
    CHECK(line.at == line.bytes.size());
    CHECK(decode.holds(received->sequence, tokens));
    CHECK(decode.cache.cached_tokens(tokens, context) == tokens.size() / 4 * 4);
    CHECK(decode.cache.audit() == std::vector<std::string>{});
  }
}

TEST_CASE("a stream with any wrong bit, or cut anywhere, is refused and leaves nothing behind") {
  side<> prefill({.blocks = 8, .block_tokens = 4}, shape);
  const auto tokens = prompt(10);
  wire line;
  REQUIRE(export_sequence(prefill.cache, prefill.write(tokens), tokens, {}, prefill.memory(), line.sink()));
  side<> decode({.blocks = 8, .block_tokens = 4}, shape);
  const auto refused = [&](error_code& code) {
    const auto received = import_sequence(decode.cache, decode.memory(), line.source());
    code = received.code();
    const paged_stats now = decode.cache.stats();
    return !received && now.sequences == 0 && now.active_blocks == 0 && now.cached_blocks == 0;
  };
  error_code code{};
  const std::vector<std::byte> whole = line.bytes;
  for (std::size_t i = 0; i < whole.size(); ++i) {
    CAPTURE(i);
    line.bytes[i] ^= std::byte{0x10};
    REQUIRE(refused(code));
    line.bytes[i] = whole[i];
    line.bytes.resize(i);
    REQUIRE(refused(code));
    REQUIRE(code == errc::stopped);
    line.bytes = whole;
  }
  // Two blocks in each other's places.
  const std::size_t block = shape.block_bytes() + 16;
  std::swap_ranges(line.bytes.end() - static_cast<std::ptrdiff_t>(3 * block),
                   line.bytes.end() - static_cast<std::ptrdiff_t>(2 * block),
                   line.bytes.end() - static_cast<std::ptrdiff_t>(2 * block));
  REQUIRE(refused(code));
  CHECK(code == errc::damaged_stream);
  line.bytes = whole;
  CHECK(import_sequence(decode.cache, decode.memory(), line.source()));
}

TEST_CASE("other contents are refused by their fingerprint, even if they look alike") {
  side<> prefill({.blocks = 8, .block_tokens = 4}, shape);
  const auto tokens = prompt(8);
  wire line;
  REQUIRE(export_sequence(prefill.cache, prefill.write(tokens), tokens, {}, prefill.memory(), line.sink()));
  kv_layout other = shape;
  SUBCASE("another model of the same shape") {
    other.model = 6;
  }
  SUBCASE("another type of the same size") {
    other.element = dtype::f16;
  }
  SUBCASE("heads and layers exchanged in size") {
    other.heads = 1;
    other.layers = 4;
  }
  side<> decode({.blocks = 8, .block_tokens = 4}, other);
  CHECK(import_sequence(decode.cache, decode.memory(), line.source()).code() == errc::layout_mismatch);
  CHECK(decode.cache.stats().free_blocks == 8);
}

TEST_CASE("any form and any rank's part is sent between any orders and places") {
  std::uint64_t parts = 0;
  for (const auto seed : seeds(150)) {
    CAPTURE(seed);
    random_numbers random(seed);
    kv_layout here = any_forms(random);
    here.block_tokens = 4;
    if (random.once_in(2)) {
      here.part.cp_size = 2 + random.below(std::uint32_t{2});
      here.part.cp_rank = random.below(here.part.cp_size);
      here.part.cp_interleave = 1U << random.below(std::uint32_t{3});
      ++parts;
    }
    const kv_layout there = rearranged(here.checked(), random).checked();
    const auto block_tokens = static_cast<std::uint32_t>(here.virtual_block_tokens());
    side<> prefill({.blocks = 12, .block_tokens = block_tokens}, here);
    side<> decode({.blocks = 9, .block_tokens = block_tokens}, there);
    const auto tokens = prompt(1 + random.below(std::uint64_t{5} * block_tokens));
    const sequence_id sent = prefill.write(tokens);
    wire line;
    const auto bytes = export_sequence(prefill.cache, sent, tokens, {}, prefill.memory(), line.sink());
    REQUIRE(bytes);
    CHECK(*bytes == line.bytes.size());
    std::fill(decode.bytes.begin(), decode.bytes.end(), std::byte{0xEE});
    const auto received = import_sequence(decode.cache, decode.memory(), line.source());
    REQUIRE(received);
    CHECK(decode.holds(received->sequence, tokens));
    CHECK(line.at == line.bytes.size());
    // Nothing beside is written, not even places of tokens that other ranks hold.
    decode.each_byte(received->sequence, tokens, [](std::byte& at, std::byte) { at = std::byte{0xEE}; });
    CHECK(std::ranges::all_of(decode.bytes, [](std::byte each) { return each == std::byte{0xEE}; }));
  }
  CHECK(parts > 30);
}

TEST_CASE("records of latents are sent as bytes between any orders, and another writer's are refused") {
  const auto layout_in = [](const paging::latent_record& record, block_order order) {
    return paging::latent_layout(
        {.layers = 2, .heads = 1, .head_dim = 1, .block_tokens = 16, .order = order, .model = 5}, record);
  };
  for (const paging::latent_record& record : {paging::fp8_ds_mla, paging::fp8_v4_mla, paging::nvfp4_ds_mla}) {
    for (std::uint32_t order = 0; order < block_order_count; ++order) {
      side<> prefill({.blocks = 4, .block_tokens = 16}, layout_in(record, block_order(order)));
      side<> decode({.blocks = 5, .block_tokens = 16}, layout_in(record, block_order::layer_last));
      const auto tokens = prompt(37);
      wire line;
      REQUIRE(
          export_sequence(prefill.cache, prefill.write(tokens), tokens, {}, prefill.memory(), line.sink()));
      const auto received = import_sequence(decode.cache, decode.memory(), line.source());
      REQUIRE(received);
      CHECK(decode.holds(received->sequence, tokens));
      if (record != paging::fp8_ds_mla) continue;
      side<> other({.blocks = 5, .block_tokens = 16},
                   layout_in(paging::fp8_ds_mla_flashmla, block_order(order)));
      CHECK(import_sequence(other.cache, other.memory(), line.source()).code() == errc::layout_mismatch);
    }
  }
}

TEST_CASE("layouts that older versions know are sent as those versions wrote them") {
  side<> prefill({.blocks = 8, .block_tokens = 4}, shape);
  const auto tokens = prompt(10);
  wire line;
  REQUIRE(export_sequence(prefill.cache, prefill.write(tokens), tokens, {}, prefill.memory(), line.sink()));
  CHECK(line.bytes[8] == std::byte{1});
  CHECK(line.bytes.size() == 80 + 10 * sizeof(token_id) + 16 + 3 * (shape.block_bytes() + 16));
  std::uint64_t sum = 0;
  for (const std::byte each : line.bytes)
    sum = random_numbers(sum * 31 + std::to_integer<std::uint64_t>(each)).next();
  CHECK(sum == 13'053'639'034'054'410'929U);
}

TEST_CASE("a stream with a layout's record and any wrong bit is refused and leaves nothing behind") {
  kv_layout layout = shape;
  layout.key_scales.group = llmmem::paging::scale_group::vector;
  layout.part = {.cp_rank = 1, .cp_size = 2};
  side<> prefill({.blocks = 4, .block_tokens = 8}, layout);
  const auto tokens = prompt(10);
  wire line;
  REQUIRE(export_sequence(prefill.cache, prefill.write(tokens), tokens, {}, prefill.memory(), line.sink()));
  CHECK(line.bytes[8] == std::byte{2});
  side<> decode({.blocks = 4, .block_tokens = 8}, layout);
  const std::vector<std::byte> whole = line.bytes;
  for (std::size_t i = 0; i < whole.size(); ++i) {
    CAPTURE(i);
    line.bytes[i] ^= std::byte{0x10};
    REQUIRE(!import_sequence(decode.cache, decode.memory(), line.source()));
    REQUIRE(decode.cache.stats().sequences == 0);
    REQUIRE(decode.cache.stats().cached_blocks == 0);
    line.bytes[i] = whole[i];
  }
  CHECK(import_sequence(decode.cache, decode.memory(), line.source()));
}

TEST_CASE("another rank's part and another form are refused with the name of the field") {
  using llmmem::paging::scale_group;
  const auto refused = [](const kv_layout& from, const kv_layout& to) {
    const auto tokens = prompt(8);
    side<> prefill({.blocks = 8, .block_tokens = static_cast<std::uint32_t>(from.virtual_block_tokens())},
                   from);
    wire line;
    REQUIRE(export_sequence(prefill.cache, prefill.write(tokens), tokens, {}, prefill.memory(), line.sink()));
    side<> decode({.blocks = 8,
                   .block_tokens = static_cast<std::uint32_t>(to.virtual_block_tokens()),
                   .name = "decode"},
                  to);
    const auto received = import_sequence(decode.cache, decode.memory(), line.source());
    REQUIRE(!received);
    CHECK(received.code() == errc::layout_mismatch);
    CHECK(decode.cache.stats().sequences == 0);
    return received.error().message();
  };
  const auto sentence = [](const std::string& field, const std::string& there, const std::string& here) {
    return "decode: the layouts' " + field + ": " + there + " there, " + here +
           " here; both sides must hold the same values; nothing was copied";
  };
  const auto of = [](auto change) {
    kv_layout out = shape;
    change(out);
    return out.checked();
  };
  const kv_layout first_heads = of([](kv_layout& l) { l.part = {.tp_rank = 0, .tp_size = 2}; });
  const kv_layout last_heads = of([](kv_layout& l) { l.part = {.tp_rank = 1, .tp_size = 2}; });
  CHECK(refused(first_heads, last_heads) == sentence("part.tp_rank", "0", "1"));
  const kv_layout even = of([](kv_layout& l) { l.part = {.cp_rank = 0, .cp_size = 2}; });
  const kv_layout odd = of([](kv_layout& l) { l.part = {.cp_rank = 1, .cp_size = 2}; });
  const kv_layout runs = of([](kv_layout& l) { l.part = {.cp_size = 2, .cp_interleave = 4}; });
  CHECK(refused(even, odd) == sentence("part.cp_rank", "0", "1"));
  CHECK(refused(even, runs) == sentence("part.cp_interleave", "1", "4"));
  const kv_layout scaled = of([](kv_layout& l) { l.key_scales.group = scale_group::vector; });
  const kv_layout by_run = of([](kv_layout& l) { l.key_scales = {.group = scale_group::run, .run = 3}; });
  CHECK(refused(scaled, by_run) == sentence("key_scales.group", "1", "2"));
  CHECK(refused(scaled, shape) == sentence("key_scales.group", "1", "0"));
  // A stream of all heads and tokens names no field, and yet it is known which.
  CHECK(refused(shape, scaled) == sentence("key_scales.group", "0", "1"));
  CHECK(refused(shape, even) == sentence("part.cp_size", "1", "2"));
  CHECK(refused(shape, last_heads) == sentence("part.tp_size", "1", "2"));
  const kv_layout half = of([](kv_layout& l) {
    l.heads = 1;
    l.part = {.tp_rank = 1, .tp_size = 2};
  });
  CHECK(refused(shape, half) == sentence("part.tp_size", "1", "2"));
  // Where nothing tells, the fingerprints.
  kv_layout other = shape;
  other.model = 9;
  CHECK(refused(other, scaled) ==
        "decode: the contents' fingerprints differ, " + std::to_string(other.content_fingerprint()) +
            " there, " + std::to_string(scaled.content_fingerprint()) +
            " here: different shape, element type, block size or model; nothing was copied");
}

TEST_CASE("a record that does not describe the stream's contents is damage") {
  kv_layout layout = shape;
  layout.part.tp_size = 2;
  kv_layout other = layout;
  other.part.tp_rank = 1;
  side<> prefill({.blocks = 8, .block_tokens = 4}, layout);
  const auto tokens = prompt(8);
  wire line;
  REQUIRE(export_sequence(prefill.cache, prefill.write(tokens), tokens, {}, prefill.memory(), line.sink()));
  const auto record = other.packed().record();
  std::memcpy(line.bytes.data() + 80, record.data(), sizeof(record));
  kv_layout third = layout;
  third.part = {.cp_size = 2};
  for (const kv_layout& ours : {layout, other, third}) {
    side<> decode({.blocks = 8, .block_tokens = static_cast<std::uint32_t>(ours.virtual_block_tokens())},
                  ours);
    CHECK(import_sequence(decode.cache, decode.memory(), line.source()).code() == errc::damaged_stream);
  }
}

TEST_CASE("a stream is accepted only by a cache of its epoch") {
  side<> prefill({.blocks = 8, .block_tokens = 4}, shape);
  side<> decode({.blocks = 8, .block_tokens = 4, .name = "kv"}, shape);
  const auto tokens = prompt(10);
  prefill.cache.reset(3).value();
  const sequence_id sent = prefill.write(tokens, {});
  wire line;
  REQUIRE(export_sequence(prefill.cache, sent, tokens, {}, prefill.memory(), line.sink()));
  CHECK(import_sequence(decode.cache, decode.memory(), line.source()).error().message() ==
        "kv: the stream belongs to epoch 3, the cache to 0; compute it again with the present weights");
  CHECK(decode.cache.stats().active_blocks == 0);
  decode.cache.reset(3).value();
  line.at = 0;
  const auto received = import_sequence(decode.cache, decode.memory(), line.source());
  REQUIRE(received);
  CHECK(decode.holds(received->sequence, tokens));
  // Each bit of the head counts, that of the epoch too.
  for (std::size_t byte = 0; byte < 80 + 8; ++byte) {
    line.bytes[byte] ^= std::byte{16};
    line.at = 0;
    CHECK_FALSE(import_sequence(decode.cache, decode.memory(), line.source()));
    line.bytes[byte] ^= std::byte{16};
  }
  // Of a sequence that goes on with the weights of before, the epoch goes along.
  prefill.cache.reset(4).value();
  wire old;
  REQUIRE(export_sequence(prefill.cache, sent, tokens, {}, prefill.memory(), old.sink()));
  CHECK(old.bytes == line.bytes);
}

TEST_CASE("a sequence that differs from its prefix is not sent") {
  side<> prefill({.blocks = 8, .block_tokens = 4, .name = "kv"}, shape);
  const auto tokens = prompt(10);
  const sequence_id sent = prefill.write(tokens, {});
  CHECK(prefill.cache.invalidate(sent, 5).value() == 1);
  wire line;
  CHECK(export_sequence(prefill.cache, sent, tokens, {}, prefill.memory(), line.sink()).error().message() ==
        "kv: sequence 0 holds 10 tokens, but only the first 4 are a sound prefix: contents after them were "
        "invalidated, or tokens were removed; truncate it to 4 tokens and compute the rest again");
  CHECK(line.bytes.empty());
}

TEST_CASE(
    "a memory whose blocks hold a different number of tokens than the cache's is refused on either side") {
  kv_layout other = shape;
  other.block_tokens = 8;
  side<> prefill({.blocks = 8, .block_tokens = 4, .name = "prefill"}, shape);
  const auto tokens = prompt(8);
  const sequence_id sent = prefill.write(tokens);
  wire line;
  kv_memory memory = prefill.memory();
  memory.layout = other;
  CHECK(export_sequence(prefill.cache, sent, tokens, {}, memory, line.sink()).error().message() ==
        "prefill: blocks hold 8 tokens there and 4 here; build both with the same block_tokens");
  REQUIRE(export_sequence(prefill.cache, sent, tokens, {}, prefill.memory(), line.sink()));
  side<> decode({.blocks = 8, .block_tokens = 8, .name = "decode"}, shape);
  CHECK(import_sequence(decode.cache, decode.memory(), line.source()).error().message() ==
        "decode: blocks hold 4 tokens there and 8 here; build both with the same block_tokens");
  CHECK(decode.cache.stats().free_blocks == 8);
}

TEST_CASE("what does not fit is refused, with the reason") {
  side<> prefill({.blocks = 8, .block_tokens = 4, .name = "prefill"}, shape);
  const auto tokens = prompt(20);
  const sequence_id sent = prefill.write(tokens);
  wire line;
  CHECK(export_sequence(prefill.cache, sent, prompt(19), {}, prefill.memory(), line.sink()).code() ==
        errc::size_mismatch);
  CHECK(export_sequence(prefill.cache, {}, tokens, {}, prefill.memory(), line.sink()).code() ==
        errc::null_handle);
  CHECK(
      export_sequence(prefill.cache, sent, tokens, {}, prefill.memory(), line.sink(), 6).error().message() ==
      "prefill: 6 blocks named, but sequence 0 holds 5; name at most that many");
  kv_memory small = prefill.memory();
  small.blocks = 3;
  CHECK(export_sequence(prefill.cache, sent, tokens, {}, small, line.sink()).error().message() ==
        "prefill: block 3 asked for, but the memory has 3, numbered from 0; build the memory with the "
        "cache's max_physical_blocks()");
  const auto full = [](std::span<const std::byte>) noexcept { return false; };
  CHECK(export_sequence(prefill.cache, sent, tokens, {}, prefill.memory(), full).error().message() ==
        "prefill: the other side of the stream stopped; start the transfer again");
  REQUIRE(line.bytes.empty());
  REQUIRE(export_sequence(prefill.cache, sent, tokens, {}, prefill.memory(), line.sink(), 2));

  side<> decode({.blocks = 8, .block_tokens = 4, .name = "decode"}, shape);
  CHECK(import_sequence(decode.cache, decode.memory(), line.source()).error().message() ==
        "decode: the stream omits 2 blocks, of which 0 are cached here; request the whole stream");
  side<> little({.blocks = 4, .block_tokens = 4}, shape);
  CHECK(import_sequence(little.cache, little.memory(), line.source()).code() == errc::sequence_full);
  wire noise{.bytes = std::vector<std::byte>(200, std::byte{1})};
  CHECK(import_sequence(decode.cache, decode.memory(), noise.source()).code() == errc::not_a_kv_stream);
  kv_memory beyond = decode.memory();
  beyond.blocks = 4;
  CHECK(import_sequence(decode.cache, beyond, line.source()).error().message() ==
        "decode: block 8 asked for, but the memory has 4, numbered from 0; build the memory with the cache's "
        "max_physical_blocks()");

  const sequence_id busy = decode.cache.create().value();
  REQUIRE(decode.cache.extend(busy, 16));
  wire whole;
  REQUIRE(export_sequence(prefill.cache, sent, tokens, {}, prefill.memory(), whole.sink()));
  CHECK(import_sequence(decode.cache, decode.memory(), whole.source()).code() == errc::out_of_blocks);
  CHECK(decode.cache.stats().sequences == 1);
  CHECK(decode.cache.audit() == std::vector<std::string>{});
}

TEST_CASE("an import takes no blocks for a stream that it refuses") {
  struct stealing_traits : paged_traits {
    using partial = steal_partial_blocks;
  };
  side<> prefill({.blocks = 8, .block_tokens = 4}, shape);
  side<stealing_traits> decode({.blocks = 8, .block_tokens = 4}, shape);
  auto similar = prompt(8);
  similar[6] = 99;
  REQUIRE(decode.cache.release(decode.write(similar)));
  wire line;
  const auto tokens = prompt(8);
  REQUIRE(export_sequence(prefill.cache, prefill.write(tokens), tokens, {}, prefill.memory(), line.sink()));
  line.bytes.back() ^= std::byte{1};
  CHECK(import_sequence(decode.cache, decode.memory(), line.source()).code() == errc::damaged_stream);
  CHECK(decode.cache.cached_tokens(similar) == 8);
}

TEST_CASE("an import writes no block that others share") {
  side<> prefill({.blocks = 8, .block_tokens = 4}, shape);
  side<> decode({.blocks = 8, .block_tokens = 4}, shape);
  const auto tokens = prompt(8);
  const sequence_id there = decode.write(prompt(4));
  // Written over, to see whether somebody writes it again.
  decode.each_byte(there, prompt(4), [](std::byte& at, std::byte) { at = std::byte{0x77}; });
  wire line;
  REQUIRE(export_sequence(prefill.cache, prefill.write(tokens), tokens, {}, prefill.memory(), line.sink()));
  REQUIRE(import_sequence(decode.cache, decode.memory(), line.source()));
  decode.each_byte(there, prompt(4), [](std::byte& at, std::byte) { REQUIRE(at == std::byte{0x77}); });
}

TEST_CASE("if beginnings of blocks are reused, an import brings those blocks completely") {
  struct copying_traits : paged_traits {
    using partial = copy_partial_blocks;
  };
  side<> prefill({.blocks = 8, .block_tokens = 4}, shape);
  side<copying_traits> decode({.blocks = 8, .block_tokens = 4}, shape);
  auto similar = prompt(8);
  similar[6] = 99;
  REQUIRE(decode.cache.release(decode.write(similar)));
  const auto tokens = prompt(8);
  wire line;
  REQUIRE(export_sequence(prefill.cache, prefill.write(tokens), tokens, {}, prefill.memory(), line.sink()));
  const auto received = import_sequence(decode.cache, decode.memory(), line.source());
  REQUIRE(received);
  CHECK(received->reused_tokens == 4);
  CHECK(decode.holds(received->sequence, tokens));
}

TEST_CASE("missing memory is reported, and nothing is sent or taken") {
  side<> prefill({.blocks = 8, .block_tokens = 4}, shape);
  side<> decode({.blocks = 8, .block_tokens = 4}, shape);
  const auto tokens = prompt(8);
  const sequence_id sent = prefill.write(tokens);
  wire line;
  const std::int64_t failed_exports = fail_each_allocation([&](const metadata_source& source) {
    export_sequence(prefill.cache, sent, tokens, {}, prefill.memory(), line.sink(), 0, source).value();
  });
  CHECK(failed_exports == 1);
  wire whole;
  REQUIRE(export_sequence(prefill.cache, sent, tokens, {}, prefill.memory(), whole.sink()));
  CHECK(line.bytes == whole.bytes);  // nothing came before
  std::vector<std::uint64_t> sequences;
  const std::int64_t failed_imports = fail_each_allocation([&](const metadata_source& source) {
    sequences.push_back(decode.cache.stats().sequences);
    import_sequence(decode.cache, decode.memory(), line.source(), {}, source).value();
  });
  CHECK(failed_imports == 2);
  CHECK(sequences == std::vector<std::uint64_t>{0, 0, 0});
  CHECK(decode.cache.cached_tokens(tokens) == 8);
}
