#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/block_storage.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/testing/simulated_space.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstring>
#include <vector>

using namespace llmmem;

TEST_CASE("blocks are consecutive and do not overlap") {
  host_space host({.budget = 1 << 20});
  const block_storage storage(host, 5, 96);
  CHECK(storage.range().bytes == 480);
  for (std::uint32_t i = 0; i < 5; ++i) {
    CHECK(storage[block_id{i}].data == storage.range().data + i * 96);
    CHECK(storage[block_id{i}].bytes == 96);
  }
  CHECK(storage.at(block_id{5}).error().message() ==
        "block_storage: block 5 asked for, but the memory has 5, numbered from 0; build the memory with the "
        "cache's max_physical_blocks()");
}

TEST_CASE("a fork's first write goes into a copy of the block it shared") {
  host_space host({.budget = 1 << 20});
  paged_allocator<> cache({.blocks = 8, .block_tokens = 4});
  const block_storage storage(host, cache.physical_blocks(), 4);
  const auto write = [&](sequence_id sequence, std::uint64_t position, char value) {
    storage[cache.blocks(sequence)[position / 4]].data[position % 4] = std::byte(value);
  };
  const auto read = [&](sequence_id sequence) {
    std::string text;
    for (std::uint64_t i = 0; i < cache.tokens(sequence); ++i) {
      text += static_cast<char>(storage[cache.blocks(sequence)[i / 4]].data[i % 4]);
    }
    return text;
  };
  const sequence_id parent = cache.create().value();
  REQUIRE(cache.extend(parent, 6));
  for (std::uint64_t i = 0; i < 6; ++i)
    write(parent, i, "abcdef"[i]);
  const sequence_id child = cache.fork(parent).value();
  const append_result grown = cache.extend(child, 1).value();
  REQUIRE(grown.copy);
  storage.copy_async(host, grown.copy).value().wait();
  write(child, 6, 'X');
  CHECK(read(child) == "abcdefX");
  CHECK(read(parent) == "abcdef");
}

TEST_CASE("blocks on a simulated device are copied without access by the host") {
  testing::virtual_clock clock;
  testing::simulated_space device(clock, {.budget = 1 << 20});
  const block_storage storage(device, 3, 64);
  std::vector<std::byte> bytes(64, std::byte{42});
  const auto in = device.copy_in_async(storage[block_id{1}], bytes, {}).value();
  const auto copied = storage.copy_async(device, {block_id{1}, block_id{2}, 1}, std::array{in}).value();
  std::vector<std::byte> back(64);
  device.copy_out_async(back, storage[block_id{2}], std::array{copied}).value().wait();
  CHECK(back == bytes);
}

TEST_CASE("an empty list of copies starts nothing") {
  host_space host({.budget = 1 << 20});
  const block_storage storage(host, 3, 64);
  CHECK(storage.copy_async(host, {}).value().ready());
  CHECK(storage.copy_async(host, {block_id{7}, block_id{1}, 1}).code() == errc::no_such_block);
}

TEST_CASE("sizes that cannot be are refused, with the reason") {
  host_space host({.budget = 1 << 20, .name = "host"});
  CHECK_THROWS_WITH_AS(block_storage(host, 4, 0), "host: an allocation of 0 bytes; request at least 1",
                       length_error);
  CHECK_THROWS_WITH_AS(
      block_storage(host, std::uint64_t{1} << 32, std::uint64_t{1} << 31),
      "host: elements x bytes per element: 4294967296 x 2147483648 exceeds the limit of 2^63 "
      "- 1 bytes; lower one of the two",
      length_error);
  CHECK_THROWS_WITH_AS(
      block_storage(host, 3, 1 << 20),
      "host: 3145728 bytes needed, but 1048576 left in its budget; release ranges, or raise the budget",
      out_of_memory);
}
