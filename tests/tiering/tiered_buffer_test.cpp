/// What a tiered buffer promises, one sentence at a time.
#include <llmmem/codec/block_int.hpp>
#include <llmmem/codec/byte_plane.hpp>
#include <llmmem/eviction/fifo.hpp>
#include <llmmem/eviction/lfu.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/testing/faulty_io.hpp>
#include <llmmem/testing/simulated_space.hpp>
#include <llmmem/tiered_buffer.hpp>
#include <llmmem/transfer/file_space.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/heap_counter.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::faulty_io;
using llmmem::testing::io_fault;
using llmmem::testing::planned_fault;
using llmmem::testing::simulated_space;
using llmmem::testing::virtual_clock;

namespace {

constexpr std::uint64_t unit = 64;
constexpr std::uint64_t page = 256;  // of a chunk in most of these

/// Chunks of `page` bytes in host memory over host memory: every copy is over when it has begun.
template <class Top = host_space>
struct two_tiers {
  host_space above;
  host_space beneath;
  tiered_buffer<Top, host_space> buffer;

  explicit two_tiers(std::uint64_t top, tiered_options options = {})
      : above({.budget = 1 << 20}),
        beneath({.budget = 1 << 20}),
        buffer(std::move(options), {above, top * page, unit}, {beneath, 64 * page, unit}) {}
};

template <class Top = host_space, class Middle = host_space>
struct three_tiers {
  host_space above;
  host_space between;
  host_space beneath;
  tiered_buffer<Top, Middle, host_space> buffer;

  three_tiers(std::uint64_t top, std::uint64_t middle)
      : above({.budget = 1 << 20}),
        between({.budget = 1 << 20}),
        beneath({.budget = 1 << 20}),
        buffer({}, {above, top * page, unit}, {between, middle * page, unit}, {beneath, 64 * page, unit}) {}
};

template <class Buffer>
void fill(Buffer& buffer, chunk_handle chunk, int value) {
  auto lease = buffer.write(chunk).value();
  std::ranges::fill(lease.span(), static_cast<std::byte>(value));
}

template <class Buffer>
[[nodiscard]] chunk_handle filled(Buffer& buffer, int value, std::uint64_t bytes = page) {
  const chunk_handle made = buffer.create(bytes).value();
  fill(buffer, made, value);
  return made;
}

template <class Buffer>
[[nodiscard]] bool holds(Buffer& buffer, chunk_handle chunk, int value) {
  const auto lease = buffer.read(chunk).value();
  return std::ranges::all_of(lease.span(),
                             [value](std::byte each) { return each == static_cast<std::byte>(value); });
}

template <class Buffer>
void audited(const Buffer& buffer) {
  for (const std::string& broken : buffer.audit())
    FAIL_CHECK(broken);
}

template <class Buffer>
void touch(Buffer& buffer, chunk_handle chunk) {
  REQUIRE(buffer.read(chunk));
}

template <class Buffer>
void change(Buffer& buffer, chunk_handle chunk, std::uint64_t offset, std::uint64_t count, int value) {
  auto lease = buffer.update(chunk, offset, count).value();
  std::ranges::fill(lease.span().subspan(offset, count), static_cast<std::byte>(value));
}

template <class Buffer>
[[nodiscard]] std::vector<std::size_t> places(const Buffer& buffer, const std::vector<chunk_handle>& chunks) {
  std::vector<std::size_t> found;
  for (const chunk_handle chunk : chunks)
    found.push_back(buffer.tier_of(chunk).value());
  return found;
}

using where = std::vector<std::size_t>;

}  // namespace

TEST_CASE("impossible options are refused with their names") {
  host_space space({.budget = 1 << 20});
  using buffer = tiered_buffer<host_space, host_space>;
  using encoded =
      tiered_buffer<host_space, tier<host_space, lru_eviction, write_back, byte_plane<dtype::bf16>>>;
  const tier_place<host_space> place{space, 4096, 64};
  CHECK_THROWS_WITH_AS(buffer({.max_chunks = 0, .name = "moments"}, place, place),
                       "moments: max_chunks is 0; it must be at least 1", argument_error);
  CHECK_THROWS_WITH_AS(buffer({.max_transfers = 0}, place, place),
                       "tiered_buffer: max_transfers is 0; it must be at least 1", argument_error);
  CHECK_THROWS_WITH_AS(encoded({}, place, place),
                       "tiered_buffer: largest_chunk_bytes is 0; it must be at least 1", argument_error);
  CHECK_THROWS_WITH_AS(encoded({.largest_chunk_bytes = 64, .staging_slots = 0}, place, place),
                       "tiered_buffer: staging_slots is 0; it must be at least 1", argument_error);
  CHECK_THROWS_WITH_AS(
      buffer({.largest_lease_bytes = 8192}, place, place),
      "tiered_buffer: tier 0 holds 4096 bytes, but the largest set of leases needs 8192; give it at least "
      "as many",
      out_of_memory);
  CHECK_THROWS_WITH_AS(buffer({}, {space, 4096, 48}, place), "host_space: alignment 48 is not a power of two",
                       argument_error);
  CHECK_THROWS_WITH_AS(
      buffer({}, {space, 2 << 20}, place),
      "host_space: 2097152 bytes needed, but 1044480 left in its budget; release ranges, or raise the budget",
      out_of_memory);
  CHECK(space.used() == 0);
}

TEST_CASE("staging memory is not available to leases") {
  host_space space({.budget = 1 << 20});
  using encoded =
      tiered_buffer<host_space, tier<host_space, lru_eviction, write_back, byte_plane<dtype::bf16>>>;
  const std::uint64_t slot = (byte_plane<dtype::bf16>::worst_case_bytes(1024) + 63) / 64 * 64;
  const tier_place<host_space> beneath{space, 8192, 64};
  const encoded fits({.largest_lease_bytes = 4096, .largest_chunk_bytes = 1024}, {space, 4096 + 2 * slot, 64},
                     beneath);
  CHECK(fits.stats().tiers[0].chunks == 0);
  CHECK(fits.stats().tiers[0].used == 2 * slot);
  CHECK_THROWS_WITH_AS(
      encoded({.largest_lease_bytes = 4097, .largest_chunk_bytes = 1024}, {space, 4096 + 2 * slot, 64},
              beneath),
      "tiered_buffer: tier 0 holds 4096 bytes, but the largest set of leases needs 4097; give it at least "
      "as many",
      out_of_memory);
}

TEST_CASE("handles of another buffer, of no buffer and of removed chunks are refused by every call") {
  two_tiers<> world(4);
  two_tiers<> elsewhere(4);
  auto& buffer = world.buffer;
  const chunk_handle gone = filled(buffer, 1);
  REQUIRE(buffer.remove(gone));
  const chunk_handle foreign = filled(elsewhere.buffer, 1);
  const std::array<std::pair<chunk_handle, error_code>, 3> wrong{
      {{{}, errc::null_handle}, {foreign, errc::foreign_handle}, {gone, errc::stale_handle}}};
  for (const auto& [chunk, code] : wrong) {
    CHECK(buffer.read(chunk).code() == code);
    CHECK(buffer.write(chunk).code() == code);
    CHECK(buffer.update(chunk).code() == code);
    CHECK(buffer.update(chunk, 0, 1).code() == code);
    CHECK(buffer.prefetch(chunk).code() == code);
    CHECK(buffer.evict(chunk).code() == code);
    CHECK(buffer.flush(chunk).code() == code);
    CHECK(buffer.discard(chunk).code() == code);
    CHECK(buffer.remove(chunk).code() == code);
    CHECK(buffer.clone(chunk).code() == code);
    CHECK(buffer.bytes(chunk).code() == code);
    CHECK(buffer.tier_of(chunk).code() == code);
  }
}

TEST_CASE("a lease may change more bytes than it was taken for, which then also move down") {
  two_tiers<> world(4, {.name = "state"});
  auto& buffer = world.buffer;
  const chunk_handle chunk = filled(buffer, 1);
  REQUIRE(buffer.flush());
  const std::uint64_t before = buffer.stats().moved.links[0].offload.bytes;
  {
    auto lease = buffer.update(chunk, 0, 0).value();
    REQUIRE(lease.also_changes(unit, 1));
    lease.span()[unit] = std::byte{2};
    REQUIRE(lease.also_changes(page, 0));
    CHECK(lease.also_changes(page, 1).error().message() ==
          "state: bytes up to 257 requested, but it has 256; request fewer, or make it larger");
    CHECK(lease.also_changes(2, ~std::uint64_t{0}).code() == errc::past_the_bytes);
  }
  REQUIRE(buffer.evict(chunk));
  CHECK(buffer.stats().moved.links[0].offload.bytes - before == unit);
  CHECK(buffer.read(chunk).value().span()[unit] == std::byte{2});
  {
    const auto unchanged = buffer.update(chunk, 0, 0).value();
  }
  REQUIRE(buffer.flush());
  CHECK(buffer.stats().moved.links[0].offload.bytes - before == unit);
}

TEST_CASE("a chunk without contents can only be written") {
  two_tiers<> world(4, {.name = "state"});
  auto& buffer = world.buffer;
  const chunk_handle chunk = buffer.create(page).value();
  CHECK(buffer.read(chunk).error().message() == "state: chunk 0 has no contents; write all of it first");
  CHECK(buffer.update(chunk).code() == errc::no_contents);
  CHECK(buffer.prefetch(chunk).code() == errc::no_contents);
  CHECK(buffer.tier_of(chunk).code() == errc::no_contents);
  CHECK(buffer.evict(chunk));
  CHECK(buffer.flush(chunk));
  CHECK(buffer.bytes(chunk).value() == page);
  fill(buffer, chunk, 1);
  REQUIRE(buffer.discard(chunk));
  CHECK(buffer.read(chunk).code() == errc::no_contents);
  CHECK(buffer.stats().tiers[0].used == 0);
  CHECK(buffer.stats().tiers[1].used == page);
}

TEST_CASE("any number of leases may read, or one may write, and a conflicting call learns the number") {
  two_tiers<> world(4, {.name = "state"});
  auto& buffer = world.buffer;
  const chunk_handle chunk = filled(buffer, 1);
  auto first = buffer.read(chunk).value();
  auto second = buffer.read(chunk).value();
  CHECK(first.span().data() == second.span().data());
  CHECK(buffer.write(chunk).error().message() == "state: chunk 0 is leased 2 times; end these leases first");
  CHECK(buffer.update(chunk).code() == errc::chunk_leased);
  CHECK(buffer.evict(chunk).code() == errc::chunk_leased);
  CHECK(buffer.discard(chunk).code() == errc::chunk_leased);
  CHECK(buffer.remove(chunk).code() == errc::chunk_leased);
  first.end();
  second.end();
  const auto third = buffer.update(chunk).value();
  CHECK(buffer.read(chunk).code() == errc::chunk_leased);
  CHECK(buffer.flush(chunk).code() == errc::chunk_leased);
  CHECK(buffer.flush().code() == errc::chunk_leased);
}

TEST_CASE("a lease that was moved from, or has ended, has no bytes, and ends only once") {
  two_tiers<> world(4);
  auto& buffer = world.buffer;
  const chunk_handle chunk = filled(buffer, 1);
  auto first = buffer.read(chunk).value();
  auto second = std::move(first);
  CHECK_FALSE(static_cast<bool>(first));
  CHECK(first.span().empty());
  CHECK(second.span().size() == page);
  first.end();
  CHECK(buffer.write(chunk).code() == errc::chunk_leased);
  second = std::move(first);
  CHECK(second.span().empty());
  second.end();
  second.end();
  CHECK(buffer.write(chunk));
}

TEST_CASE("an update with bytes outside its chunk is refused with both numbers") {
  two_tiers<> world(4, {.name = "state"});
  auto& buffer = world.buffer;
  const chunk_handle chunk = filled(buffer, 1);
  CHECK(buffer.update(chunk, 200, 57).error().message() ==
        "state: bytes up to 257 requested, but it has 256; request fewer, or make it larger");
  CHECK(buffer.update(chunk, ~std::uint64_t{0}, 2).code() == errc::past_the_bytes);
  CHECK(buffer.update(chunk, 257, 0).code() == errc::past_the_bytes);
  CHECK(buffer.update(chunk, 256, 0));
}

TEST_CASE("an impossible chunk is refused, and takes nothing") {
  two_tiers<> world(4, {.max_chunks = 2, .name = "state"});
  auto& buffer = world.buffer;
  CHECK(buffer.create(0).code() == errc::zero_bytes);
  CHECK(buffer.create(65 * page).error().message() ==
        "state: tier 0: 16640 bytes needed in one piece, but it never has more than 1024; raise its budget, "
        "or request smaller pieces");
  CHECK(buffer.create(~std::uint64_t{0}).code() == errc::past_the_bytes);
  REQUIRE(buffer.create(1));
  REQUIRE(buffer.create(page));
  CHECK(buffer.create(page).error().message() ==
        "state: the table of chunks is full: 1 entries needed, 0 free; raise tiered_options::max_chunks");
  CHECK(buffer.stats().tiers[1].used == unit + page);
}

TEST_CASE("a codec's chunks consist of whole elements, up to the largest chunk") {
  host_space space({.budget = 1 << 20});
  tiered_buffer<host_space, tier<host_space, lru_eviction, write_back, byte_plane<dtype::bf16>>> buffer(
      {.largest_chunk_bytes = 1000, .name = "state"}, {space, 8192, 64}, {space, 8192, 64});
  CHECK(buffer.create(999).error().message() ==
        "state: 999 bytes is not a multiple of the granularity, 2 bytes");
  CHECK(buffer.create(1002).error().message() == "state: 1002 requested, but the highest allowed is 1000");
  CHECK(buffer.create(1000));
}

TEST_CASE("a codec that rounds by a counter gets each chunk's slot and last change, and loses only once") {
  using codec = block_int<4, 32>;
  host_space space({.budget = 1 << 20});
  tiered_buffer<host_space, tier<host_space, lru_eviction, write_back, codec>> buffer(
      {.largest_chunk_bytes = page}, {space, 8192, 64}, {space, 8192, 64});
  std::array<float, page / 4> values{};
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = 0.01F * static_cast<float>(i + 1);
  const auto bytes = std::as_bytes(std::span(values));
  const auto write = [&](chunk_handle chunk) {
    std::ranges::copy(bytes, buffer.write(chunk).value().span().begin());
    REQUIRE(buffer.evict(chunk));
  };
  std::vector<std::vector<std::byte>> came;
  const auto expect = [&](chunk_handle chunk) {
    const codec by(page);
    std::vector<std::byte> form(codec::worst_case_bytes(page));
    by.encode(bytes, form, {.chunk = chunk.slot, .version = buffer.last_change(chunk).value()}).value();
    came.emplace_back(page);
    by.decode(form, came.back()).value();
    CHECK(std::ranges::equal(buffer.read(chunk).value().span(), came.back()));
  };
  const std::array chunks{buffer.create(page).value(), buffer.create(page).value()};
  for (const chunk_handle chunk : {chunks[1], chunks[0], chunks[1]}) {
    write(chunk);
    expect(chunk);
  }
  CHECK(came[0] != came[1]);  // another chunk
  CHECK(came[0] != came[2]);  // another version
  REQUIRE(buffer.update(chunks[1]));
  REQUIRE(buffer.evict(chunks[1]));
  CHECK(std::ranges::equal(buffer.read(chunks[1]).value().span(), came[2]));
  audited(buffer);
}

TEST_CASE("a lease that does not fit in tier 0 is refused with the shortage, and changes nothing") {
  two_tiers<> world(2, {.name = "state"});
  auto& buffer = world.buffer;
  const chunk_handle first = filled(buffer, 1);
  const chunk_handle second = filled(buffer, 2);
  const chunk_handle third = filled(buffer, 3);
  const chunk_handle large = buffer.create(2 * page).value();
  const auto leases = std::pair{buffer.read(first).value(), buffer.read(second).value()};
  const auto before = buffer.stats();
  CHECK(buffer.read(third).error().message() ==
        "state: tier 0: 256 bytes needed, but 0 left in its budget; release ranges, or raise the budget");
  CHECK(buffer.write(large).error().message() ==
        "state: tier 0: 512 bytes needed, but 0 left in its budget; release ranges, or raise the budget");
  CHECK(buffer.stats().tiers[0].used == before.tiers[0].used);
  CHECK(buffer.stats().tiers[0].drops == before.tiers[0].drops);
  CHECK(buffer.tier_of(third).value() == 1);
  audited(buffer);
}

TEST_CASE("a chunk that a tier could never hold is refused on creation, regardless of the contents") {
  const failure too_large{.code = errc::out_of_bytes, .index = 1, .wanted = 3 * page, .found = 2 * page};
  two_tiers<> world(2);
  auto& buffer = world.buffer;
  const std::vector chunks{filled(buffer, 1), filled(buffer, 2)};
  CHECK(buffer.create(3 * page).error() == too_large);
  CHECK(buffer.adopt(60 * page, 3 * page).error() == too_large);
  CHECK(buffer.resize(chunks[0], 2 * page + 1).error().index == 1);
  CHECK(buffer.resize(buffer.create(page).value(), 3 * page).error() == too_large);
  REQUIRE(buffer.create(2 * page));
  CHECK(places(buffer, chunks) == where{0, 0});
  audited(buffer);
  // Between tier 0 and the last it passes those in the middle: none of them may be smaller.
  three_tiers<> middle(4, 1);
  CHECK(middle.buffer.create(2 * page).error().message() ==
        "tiered_buffer: tier 1: 512 bytes needed in one piece, but it never has more than 256; raise its "
        "budget, or request smaller pieces");
  REQUIRE(middle.buffer.create(page));
}

TEST_CASE("a full table of pieces is named, with the option that makes it larger") {
  host_space space({.budget = 1 << 20});
  tier_place<host_space> beneath(space, 64 * page, unit);
  beneath.max_pieces = 3;
  tiered_buffer<host_space, host_space> buffer({}, {space, 4 * page, unit}, beneath);
  REQUIRE(buffer.create(page));
  REQUIRE(buffer.create(page));
  CHECK(buffer.create(page).error().message() ==
        "tiered_buffer: tier 1: the table of pieces is full: 1 entries needed, 0 free; raise "
        "tier_place::max_pieces");
}

TEST_CASE("by default the table has space for as many pieces as the chunks can require") {
  constexpr std::uint32_t most = 64;
  two_tiers<> world(64, {.max_chunks = most});
  auto& buffer = world.buffer;
  std::vector<chunk_handle> chunks;
  for (std::uint32_t i = 0; i < most; ++i)
    chunks.push_back(filled(buffer, 1, unit));
  for (int round = 0; round < 3; ++round) {
    // Every other place becomes a gap, and is taken in parts or not at all.
    for (std::size_t i = 0; i < chunks.size(); i += 2)
      REQUIRE(buffer.remove(chunks[i]));
    for (std::size_t i = 0; i < chunks.size(); i += 2)
      chunks[i] = filled(buffer, 1, (1 + (i + static_cast<std::size_t>(round)) % 3) * unit);
  }
  audited(buffer);
}

TEST_CASE("only dirty bytes move down, in whole units of the tier below") {
  two_tiers<> world(4);
  auto& buffer = world.buffer;
  const chunk_handle chunk = filled(buffer, 1);
  auto went = [&, before = std::uint64_t{0}]() mutable {
    REQUIRE(buffer.flush(chunk));
    const std::uint64_t now = buffer.stats().moved.links[0].offload.bytes;
    return now - std::exchange(before, now);
  };
  CHECK(went() == page);
  CHECK(went() == 0);
  change(buffer, chunk, 70, 1, 2);
  CHECK(went() == unit);
  change(buffer, chunk, 63, 2, 3);
  CHECK(went() == 2 * unit);
  change(buffer, chunk, 0, 1, 4);
  change(buffer, chunk, 255, 1, 4);
  CHECK(went() == 2 * unit);
  change(buffer, chunk, 10, 0, 4);
  CHECK(went() == 0);
  REQUIRE(buffer.update(chunk));
  CHECK(went() == page);
  REQUIRE(buffer.read(chunk));
  CHECK(went() == 0);
  CHECK(buffer.stats().moved.links[0].offload.operations == 5);
  CHECK(buffer.stats().moved.links[0].onboard.bytes == 0);
}

TEST_CASE("a write brings nothing in, an update all of the chunk") {
  two_tiers<> world(1);
  auto& buffer = world.buffer;
  const chunk_handle first = filled(buffer, 1);
  const chunk_handle second = filled(buffer, 2);
  CHECK(buffer.stats().moved.links[0].onboard.bytes == 0);
  fill(buffer, first, 3);
  CHECK(buffer.stats().moved.links[0].onboard.bytes == 0);
  change(buffer, second, 0, 1, 4);
  CHECK(buffer.stats().moved.links[0].onboard.bytes == page);
  CHECK(buffer.stats().moved.links[0].offload.bytes == 3 * page);
  CHECK(buffer.stats().tiers[0].write_backs == 3);
  CHECK(buffer.stats().tiers[0].drops == 0);
  touch(buffer, first);
  touch(buffer, second);
  CHECK(buffer.stats().tiers[0].write_backs == 4);  // the one byte changed
  CHECK(buffer.stats().tiers[0].drops == 1);
  CHECK(buffer.stats().moved.links[0].offload.bytes == 3 * page + unit);
}

TEST_CASE("hits count in the tier of the newest copy") {
  three_tiers<> world(1, 2);
  auto& buffer = world.buffer;
  const chunk_handle first = filled(buffer, 1);
  touch(buffer, first);
  const chunk_handle second = filled(buffer, 2);
  touch(buffer, first);
  const chunk_handle third = filled(buffer, 3);
  const chunk_handle fourth = filled(buffer, 4);
  touch(buffer, second);
  const auto stats = buffer.stats();
  CHECK(stats.leases == 7);
  CHECK(stats.tiers[0].hits == 1);
  CHECK(stats.tiers[1].hits == 1);
  CHECK(stats.tiers[2].hits == 1);
  CHECK(holds(buffer, first, 1));
  CHECK(holds(buffer, third, 3));
  CHECK(holds(buffer, fourth, 4));
  audited(buffer);
}

TEST_CASE("the least recently leased leaves first") {
  two_tiers<> world(3);
  auto& buffer = world.buffer;
  const std::vector chunks{filled(buffer, 0), filled(buffer, 1), filled(buffer, 2), filled(buffer, 3),
                           filled(buffer, 4)};
  CHECK(places(buffer, chunks) == where{1, 1, 0, 0, 0});
  touch(buffer, chunks[2]);
  touch(buffer, chunks[0]);
  CHECK(places(buffer, chunks) == where{0, 1, 0, 1, 0});
  touch(buffer, chunks[1]);
  CHECK(places(buffer, chunks) == where{0, 0, 0, 1, 1});
}

TEST_CASE("a waiting write-back does not change which chunk leaves next") {
  // Tier 1 is full of what is dirty there, and one transfer may be under way: room takes several turns.
  const temporary_folder folder;
  host_space above({.budget = 1 << 20});
  host_space between({.budget = 1 << 20});
  file_space<> disk(folder.file("tier"),
                    {.budget = 1 << 20, .queue = {.driver = llmmem::transfer::driven_by::waiters}});
  tiered_buffer<host_space, host_space, file_space<>> buffer({.max_transfers = 1}, {above, 3 * page, unit},
                                                             {between, page, unit}, {disk, 1 << 20});
  std::vector<chunk_handle> chunks;
  for (int value = 0; value < 6; ++value) {
    chunks.push_back(filled(buffer, value));
    for (int older = 0; older <= value; ++older) {
      CAPTURE(older);
      CHECK((buffer.tier_of(chunks[static_cast<std::size_t>(older)]).value() == 0) == (older > value - 3));
    }
    audited(buffer);
  }
}

TEST_CASE("an eviction policy counts leases as uses") {
  two_tiers<tier<host_space, lfu_eviction>> world(2);
  auto& buffer = world.buffer;
  const std::vector chunks{filled(buffer, 0), filled(buffer, 1), buffer.create(page).value()};
  for (int i = 0; i < 3; ++i)
    touch(buffer, chunks[0]);
  touch(buffer, chunks[1]);
  fill(buffer, chunks[2], 2);
  CHECK(places(buffer, chunks) == where{0, 1, 0});
}

TEST_CASE("a tier with another policy evicts by it") {
  two_tiers<tier<host_space, fifo_eviction>> world(2);
  auto& buffer = world.buffer;
  const std::vector chunks{filled(buffer, 0), filled(buffer, 1), buffer.create(page).value()};
  touch(buffer, chunks[0]);
  fill(buffer, chunks[2], 2);
  CHECK(places(buffer, chunks) == where{1, 0, 0});
}

TEST_CASE("write_back moves nothing until a copy has to leave") {
  two_tiers<> world(2);
  auto& buffer = world.buffer;
  const chunk_handle chunk = filled(buffer, 1);
  fill(buffer, chunk, 2);
  buffer.progress();
  touch(buffer, chunk);
  CHECK(buffer.stats().moved.links[0].offload.bytes == 0);
}

TEST_CASE(
    "write_through moves a lease's writes by the next call that can, and eviction finds the copy clean") {
  two_tiers<tier<host_space, lru_eviction, write_through>> world(2);
  auto& buffer = world.buffer;
  const chunk_handle chunk = filled(buffer, 1);
  fill(buffer, chunk, 1);  // what is about to change is not written before
  CHECK(buffer.stats().moved.links[0].offload.bytes == 0);
  const chunk_handle other = filled(buffer, 2);
  CHECK(buffer.stats().moved.links[0].offload.bytes == page);
  change(buffer, chunk, 0, 1, 3);
  CHECK(buffer.stats().moved.links[0].offload.bytes == 2 * page);
  buffer.progress();
  CHECK(buffer.stats().moved.links[0].offload.bytes == 2 * page + unit);
  buffer.progress();
  const auto before = buffer.stats();
  REQUIRE(buffer.evict(chunk));
  CHECK(buffer.stats().moved.links[0].offload.bytes == before.moved.links[0].offload.bytes);
  CHECK(buffer.stats().tiers[0].drops == 1);
  CHECK(buffer.stats().tiers[0].write_backs == 0);
  CHECK(holds(buffer, other, 2));
  REQUIRE(buffer.discard(other));
  audited(buffer);
}

TEST_CASE("write_through_selective moves from the n-th lease on") {
  two_tiers<tier<host_space, lru_eviction, write_through_selective<3>>> world(2);
  auto& buffer = world.buffer;
  const chunk_handle chunk = filled(buffer, 1);
  buffer.progress();
  fill(buffer, chunk, 2);
  buffer.progress();
  CHECK(buffer.stats().moved.links[0].offload.bytes == 0);
  fill(buffer, chunk, 3);
  buffer.progress();
  CHECK(buffer.stats().moved.links[0].offload.bytes == page);
}

TEST_CASE("a middle tier writes through by its own policy") {
  three_tiers<tier<host_space, lru_eviction, write_through>, tier<host_space, lru_eviction, write_through>>
      both(2, 2);
  three_tiers<tier<host_space, lru_eviction, write_through>> upper(2, 2);
  const auto went = [](auto& buffer) {
    const chunk_handle chunk = filled(buffer, 1);
    for (int i = 0; i < 3; ++i)
      buffer.progress();
    audited(buffer);
    CHECK(holds(buffer, chunk, 1));
    return std::pair{buffer.stats().moved.links[0].offload.bytes,
                     buffer.stats().moved.links[1].offload.bytes};
  };
  CHECK(went(both.buffer) == std::pair{page, page});
  CHECK(went(upper.buffer) == std::pair{page, std::uint64_t{0}});
}

TEST_CASE("a discard of the contents also cancels a write that was due") {
  two_tiers<tier<host_space, lru_eviction, write_through>> world(2);
  auto& buffer = world.buffer;
  const chunk_handle first = filled(buffer, 1);
  REQUIRE(buffer.remove(first));
  const chunk_handle second = filled(buffer, 2);
  REQUIRE(buffer.discard(second));
  for (int i = 0; i < 5000; ++i) {
    const chunk_handle each = filled(buffer, 3);
    REQUIRE(buffer.remove(each));
  }
  buffer.progress();
  CHECK(buffer.stats().moved.links[0].offload.bytes == 0);
  audited(buffer);
}

TEST_CASE("a prefetch that has arrived makes the next lease a hit that waits for nothing") {
  const temporary_folder folder;
  host_space above({.budget = 1 << 20});
  file_space<> disk(folder.file("tier"), {.budget = 1 << 20});
  tiered_buffer<host_space, file_space<>> buffer({}, {above, 16384}, {disk, 1 << 20});
  const chunk_handle chunk = filled(buffer, 1);
  REQUIRE(buffer.evict(chunk));
  REQUIRE(buffer.flush());
  REQUIRE(buffer.tier_of(chunk).value() == 1);
  REQUIRE(buffer.prefetch(chunk));
  while (buffer.tier_of(chunk).value() != 0)
    buffer.progress();
  const auto before = buffer.stats();
  CHECK(holds(buffer, chunk, 1));
  CHECK(buffer.stats().tiers[0].hits == before.tiers[0].hits + 1);
  CHECK(buffer.stats().moved.stalls == before.moved.stalls);
  CHECK(buffer.stats().moved.stalled == before.moved.stalled);
}

TEST_CASE("prefetches come up hop by hop, without a lease") {
  three_tiers<> world(2, 2);
  auto& buffer = world.buffer;
  std::vector<chunk_handle> chunks;
  for (int value = 0; value < 6; ++value)
    chunks.push_back(filled(buffer, value));
  REQUIRE(buffer.tier_of(chunks[0]).value() == 2);
  REQUIRE(buffer.prefetch(chunks[0]));
  for (int i = 0; i < 6; ++i)
    buffer.progress();
  CHECK(buffer.tier_of(chunks[0]).value() == 0);
  for (int value = 0; value < 6; ++value)
    CHECK(holds(buffer, chunks[static_cast<std::size_t>(value)], value));
  audited(buffer);
}

TEST_CASE("if everything is prefetched, the first chunks stay until they are used") {
  two_tiers<> world(3);
  auto& buffer = world.buffer;
  std::vector<chunk_handle> chunks;
  for (int value = 0; value < 12; ++value)
    chunks.push_back(filled(buffer, value));
  REQUIRE(buffer.flush());
  for (const chunk_handle chunk : chunks)
    REQUIRE(buffer.evict(chunk));
  for (const chunk_handle chunk : chunks)
    REQUIRE(buffer.prefetch(chunk));
  const auto before = buffer.stats();
  for (int value = 0; value < 12; ++value) {
    CAPTURE(value);
    CHECK(holds(buffer, chunks[static_cast<std::size_t>(value)], value));
    buffer.progress();
    buffer.progress();
  }
  CHECK(buffer.stats().tiers[0].hits - before.tiers[0].hits == 12);
  CHECK(buffer.stats().moved.links[0].onboard.bytes == 12 * page);
  CHECK(buffer.stats().background_failures == 0);
  audited(buffer);
}

TEST_CASE("a chunk prefetched while it is already in tier 0 stays until it is used") {
  two_tiers<> world(2);
  auto& buffer = world.buffer;
  const std::vector chunks{filled(buffer, 0), filled(buffer, 1), filled(buffer, 2)};
  REQUIRE(buffer.prefetch(chunks[1]));
  REQUIRE(buffer.prefetch(chunks[0]));
  for (int i = 0; i < 4; ++i)
    buffer.progress();
  CHECK(places(buffer, chunks) == where{1, 0, 0});
  touch(buffer, chunks[1]);
  for (int i = 0; i < 4; ++i)
    buffer.progress();
  CHECK(buffer.tier_of(chunks[0]).value() == 0);
}

TEST_CASE("a demand takes the memory of prefetches that were never used") {
  two_tiers<> world(2);
  auto& buffer = world.buffer;
  const std::vector chunks{filled(buffer, 0), filled(buffer, 1), filled(buffer, 2), filled(buffer, 3)};
  REQUIRE(buffer.prefetch(chunks[0]));
  REQUIRE(buffer.prefetch(chunks[1]));
  for (int i = 0; i < 4; ++i)
    buffer.progress();
  REQUIRE(places(buffer, chunks) == where{0, 0, 1, 1});
  const auto third = buffer.read(chunks[2]).value();
  const auto fourth = buffer.read(chunks[3]).value();
  CHECK(places(buffer, chunks) == where{1, 1, 0, 0});
}

TEST_CASE("a prefetch waits while leases hold all of tier 0, without a failure") {
  two_tiers<> world(1);
  auto& buffer = world.buffer;
  const chunk_handle first = filled(buffer, 1);
  const chunk_handle second = filled(buffer, 2);
  auto lease = buffer.read(second).value();
  REQUIRE(buffer.prefetch(first));
  buffer.progress();
  CHECK(buffer.tier_of(first).value() == 1);
  CHECK(buffer.stats().background_failures == 0);
  lease.end();
  for (int i = 0; i < 3; ++i)  // the other one leaves, this one comes, and has come
    buffer.progress();
  CHECK(buffer.tier_of(first).value() == 0);
}

TEST_CASE("eviction ends a prefetch") {
  two_tiers<> world(1);
  auto& buffer = world.buffer;
  const chunk_handle first = filled(buffer, 1);
  const chunk_handle second = filled(buffer, 2);
  {
    const auto lease = buffer.read(second).value();
    REQUIRE(buffer.prefetch(first));
    REQUIRE(buffer.evict(first));
  }
  for (int i = 0; i < 4; ++i)
    buffer.progress();
  CHECK(places(buffer, {first, second}) == where{1, 0});
  audited(buffer);
}

TEST_CASE(
    "when patience ends with its text, the chunk continues to come up; best_effort takes resident chunks") {
  const temporary_folder folder;
  host_space above({.budget = 1 << 20});
  file_space<faulty_io<posix_io>> disk(
      folder.file("tier"), {.budget = 1 << 20, .queue = {.driver = llmmem::transfer::driven_by::waiters}},
      std::vector{planned_fault{
          .what = io_fault::late, .first = 1, .number = 40, .way = planned_fault::side::reads}});
  tiered_buffer<host_space, file_space<faulty_io<posix_io>>> buffer({.name = "state"}, {above, 8192},
                                                                    {disk, 1 << 20});
  const chunk_handle chunk = filled(buffer, 1);
  CHECK(buffer.read(chunk, llmmem::tiering::best_effort));
  REQUIRE(buffer.evict(chunk));
  REQUIRE(buffer.flush());
  const auto late = buffer.read(chunk, llmmem::tiering::best_effort);
  REQUIRE(late.code() == errc::timed_out);
  CHECK(late.error().message() == "state: chunk 0 of 256 bytes did not arrive within " +
                                      std::to_string(late.error().found) +
                                      " ns; its transfer continues: ask again");
  CHECK(buffer.read(chunk, tiering::timeout(1'000)).code() == errc::timed_out);
  CHECK(buffer.stats().background_failures == 0);
  for (int i = 0; i < 100; ++i)
    buffer.progress();
  CHECK(buffer.tier_of(chunk).value() == 0);
  CHECK(buffer.read(chunk, llmmem::tiering::best_effort));
  audited(buffer);
}

TEST_CASE("a middle tier for one chunk suffices, even if both tiers above are dirty") {
  for (const auto seed : seeds(20)) {
    CAPTURE(seed);
    random_numbers random(seed);
    host_space space({.budget = 1 << 20});
    tiered_buffer<host_space, host_space, host_space, host_space> buffer(
        {.max_transfers = 1 + static_cast<std::uint32_t>(seed % 3)}, {space, 2 * page, unit},
        {space, page, unit}, {space, page, unit}, {space, 64 * page, unit});
    std::vector<std::pair<chunk_handle, int>> chunks;
    for (int value = 0; value < 5; ++value)
      chunks.emplace_back(filled(buffer, value), value);
    for (int step = 0; step < 200; ++step) {
      CAPTURE(step);
      auto& [chunk, value] = chunks[random.below(chunks.size())];
      switch (random.below(4U)) {
        case 0:
          fill(buffer, chunk, value = step % 100);
          break;
        case 1:
          REQUIRE(buffer.prefetch(chunk));
          break;
        case 2:
          REQUIRE(buffer.flush(chunk));
          break;
        default:
          CHECK(holds(buffer, chunk, value));
      }
      audited(buffer);
    }
  }
}

TEST_CASE("tiers stay within their budgets, for any prefetches and leases") {
  const temporary_folder folder;
  for (const auto seed : seeds(10)) {
    CAPTURE(seed);
    random_numbers random(seed);
    host_space above({.budget = 8 * page});
    host_space between({.budget = 6 * page});
    file_space<> disk(folder.file("tier"), {.budget = 1 << 20});
    tiered_buffer<host_space, host_space, file_space<>> buffer({.max_transfers = 5}, {above, 8 * page, unit},
                                                               {between, 6 * page, unit}, {disk, 1 << 20});
    std::vector<std::pair<chunk_handle, int>> chunks;
    for (int value = 0; value < 40; ++value)
      chunks.emplace_back(filled(buffer, value, 1 + random.below(3 * page)), value);
    for (int step = 0; step < 300; ++step) {
      for (int i = 0; i < 6; ++i)
        REQUIRE(buffer.prefetch(chunks[random.below(chunks.size())].first));
      const auto& [chunk, value] = chunks[random.below(chunks.size())];
      CHECK(holds(buffer, chunk, value));
      for (const tier_stats& tier : buffer.stats().tiers) {
        REQUIRE(tier.used <= tier.budget);
        REQUIRE(tier.peak <= tier.budget);
      }
      audited(buffer);
    }
    CHECK(buffer.stats().background_failures == 0);
  }
}

TEST_CASE("evict waits for memory in the next tier, but not for the write") {
  virtual_clock clock;
  simulated_space device(clock, {.budget = 1 << 20});
  host_space beneath({.budget = 1 << 20});
  tiered_buffer<simulated_space, host_space> buffer({}, {device, 8192}, {beneath, 1 << 20});
  const chunk_handle chunk = buffer.create(4096).value();
  {
    auto lease = buffer.write(chunk).value();
    const std::vector<std::byte> bytes(4096, std::byte{5});
    device.copy_in_async(lease.range(), bytes, {}).value().wait();
  }
  const auto before = clock.now();
  REQUIRE(buffer.evict(chunk));
  CHECK(clock.now() == before);
  REQUIRE(buffer.flush(chunk));
  CHECK(clock.now().ns > before.ns);
  CHECK(buffer.tier_of(chunk).value() == 1);
}

TEST_CASE("nothing is allocated after construction, regardless of movement") {
  const temporary_folder folder;
  host_space above({.budget = 1 << 20});
  host_space between({.budget = 1 << 20});
  file_space<> disk(folder.file("tier"), {.budget = 1 << 20});
  tiered_buffer<tier<host_space, lru_eviction, write_through_selective<2>>, host_space, file_space<>> buffer(
      {.max_chunks = 64}, {above, 4 * page, unit}, {between, 6 * page, unit}, {disk, 1 << 20});
  std::array<chunk_handle, 24> chunks;
  random_numbers random(1);
  const std::uint64_t before = heap_allocations();
  for (chunk_handle& each : chunks) {
    each = buffer.create(1 + random.below(page)).value();
    static_cast<void>(buffer.write(each).value());
  }
  for (int step = 0; step < 2000; ++step) {
    const chunk_handle chunk = chunks[random.below(chunks.size())];
    bool fine = true;
    switch (random.below(7U)) {
      case 6: {
        chunk_handle& replaced = chunks[random.below(chunks.size())];
        const chunk_handle twin = buffer.clone(chunk).value();
        fine = buffer.remove(replaced).has_value();
        replaced = twin;
        break;
      }
      case 0:
        fine = buffer.prefetch(chunk).has_value();
        break;
      case 1:
        fine = buffer.evict(chunk).has_value();
        break;
      case 2:
        fine = buffer.update(chunk, 0, 1).has_value();
        break;
      case 3:
        fine = buffer.flush(chunk).has_value();
        break;
      case 4:
        fine = buffer.write(chunk).has_value();
        break;
      default:
        fine = buffer.read(chunk).has_value();
    }
    REQUIRE(fine);
  }
  CHECK(heap_allocations() == before);
}

TEST_CASE("resize keeps contents up to the smaller size, in either direction and any tier") {
  three_tiers<> world(4, 4);
  auto& buffer = world.buffer;
  const chunk_handle chunk = filled(buffer, 7);
  for (const std::uint64_t bytes : {page + 1, 2 * page, page / 2, std::uint64_t{1}, page}) {
    CAPTURE(bytes);
    const std::uint64_t kept = std::min(bytes, buffer.bytes(chunk).value());
    REQUIRE(buffer.flush(chunk));
    REQUIRE(buffer.evict(chunk));
    REQUIRE(buffer.resize(chunk, bytes));
    CHECK(buffer.bytes(chunk).value() == bytes);
    {
      const auto lease = buffer.read(chunk).value();
      CHECK(lease.span().size() == bytes);
      CHECK(
          std::ranges::all_of(lease.span().first(kept), [](std::byte each) { return each == std::byte{7}; }));
    }
    fill(buffer, chunk, 7);
    REQUIRE(buffer.flush(chunk));
    REQUIRE(buffer.evict(chunk));
    CHECK(holds(buffer, chunk, 7));
    audited(buffer);
  }
  CHECK(buffer.stats().tiers[2].used == page);
}

TEST_CASE("a resize that displaces the chunk's own copy below waits for it before it frees the old place") {
  three_tiers<> world(5, 3);
  auto& buffer = world.buffer;
  const chunk_handle chunk = filled(buffer, 1);
  REQUIRE(buffer.evict(chunk));
  buffer.progress();
  const chunk_handle clean = filled(buffer, 2, 2 * page);
  REQUIRE(buffer.evict(clean));
  REQUIRE(buffer.flush(clean));
  touch(buffer, chunk);
  touch(buffer, clean);  // in the middle tier the chunk is now the first to leave, then this one
  REQUIRE(buffer.evict(clean));
  const chunk_handle other = filled(buffer, 3, 2 * page);
  REQUIRE(buffer.resize(chunk, 3 * page));
  audited(buffer);
  CHECK(buffer.tier_of(other).value() == 1);
  REQUIRE(buffer.flush());
  audited(buffer);
  CHECK(buffer.read(chunk).value().span()[page - 1] == std::byte{1});
  CHECK(holds(buffer, other, 3));
}

TEST_CASE("resize refuses as create and read do, and leaves the chunk as it was") {
  two_tiers<> world(3, {.name = "state"});
  auto& buffer = world.buffer;
  const chunk_handle chunk = filled(buffer, 1);
  const chunk_handle empty = buffer.create(page).value();
  REQUIRE(buffer.resize(empty, 2 * page));
  CHECK(buffer.read(empty).code() == errc::no_contents);
  CHECK(buffer.resize(empty, 0).code() == errc::zero_bytes);
  CHECK(buffer.resize(chunk, 64 * page).error().message() ==
        "state: tier 0: 16384 bytes needed in one piece, but it never has more than 768; raise its budget, "
        "or request smaller pieces");
  CHECK(buffer.resize(chunk, 3 * page).code() == errc::out_of_bytes);  // two places do not fit in tier 0
  {
    const auto lease = buffer.read(chunk).value();
    CHECK(buffer.resize(chunk, 1).code() == errc::chunk_leased);
  }
  CHECK(buffer.bytes(chunk).value() == page);
  CHECK(holds(buffer, chunk, 1));
  CHECK(buffer.stats().tiers[1].used == 3 * page);
  audited(buffer);
}

TEST_CASE("metadata and counters are reported") {
  two_tiers<> small(2, {.max_chunks = 16});
  two_tiers<> large(2, {.max_chunks = 1600});
  CHECK(small.buffer.stats().metadata_bytes > 0);
  CHECK(small.buffer.stats().metadata_bytes < 65'536);
  CHECK(large.buffer.stats().metadata_bytes > small.buffer.stats().metadata_bytes + 1584 * 100);
  const auto tier = small.buffer.stats().tiers[0];
  CHECK(tier.budget == 2 * page);
  CHECK(tier.used == 0);
  static_cast<void>(filled(small.buffer, 1));
  static_cast<void>(filled(small.buffer, 1));
  static_cast<void>(filled(small.buffer, 1));
  CHECK(small.buffer.stats().tiers[0].used == 2 * page);
  CHECK(small.buffer.stats().tiers[0].peak == 2 * page);
  CHECK(small.buffer.stats().tiers[0].chunks == 2);
  CHECK(small.buffer.stats().tiers[1].chunks == 3);
}
