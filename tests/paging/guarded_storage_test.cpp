#include <llmmem/paging/guarded_storage.hpp>
#include <llmmem/space/host.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

using namespace llmmem;

namespace {

[[nodiscard]] block_id id(std::uint32_t i) {
  return block_id{i};
}

}  // namespace

TEST_CASE("a write one byte past or before a block is detected, and named") {
  for (const std::uint64_t bytes : {1U, 64U, 100U, 256U}) {
    CAPTURE(bytes);
    host_space host({.budget = 1 << 16});
    guarded_storage<host_space> memory(host, 4, bytes, 128);
    for (std::uint32_t i = 0; i < 4; ++i) {
      CHECK(reinterpret_cast<std::uintptr_t>(memory[id(i)].data) % 128 == 0);
      std::memset(memory[id(i)].data, 0, bytes);
    }
    CHECK(memory.damaged().empty());
    memory[id(2)].data[bytes] = std::byte{0};
    CHECK(memory.damaged() ==
          std::vector<std::string>{"guarded_storage: the guard was overwritten behind block 2"});
    memory[id(0)].data[-1] = std::byte{1};
    CHECK(memory.damaged() ==
          std::vector<std::string>{"guarded_storage: the guard before block 0 was overwritten",
                                   "guarded_storage: the guard was overwritten behind block 2"});
  }
}

TEST_CASE("memory that was never written reads as NaN") {
  host_space host({.budget = 1 << 16});
  guarded_storage<host_space> memory(host, 2, 16);
  float value = 0;
  std::memcpy(&value, memory[id(1)].data, sizeof(value));
  CHECK(std::isnan(value));
  CHECK(memory.is_poisoned(id(1)));
  std::memset(memory[id(1)].data, 0, 16);
  CHECK_FALSE(memory.is_poisoned(id(1)));
  const block_id one = id(1);
  memory.poison({&one, 1});
  CHECK(memory.is_poisoned(id(1)));
  CHECK(memory.at(id(2)).code() == errc::no_such_block);
  CHECK(memory.at(id(1)).value().bytes == 16);
}

TEST_CASE("impossible guarded blocks are refused") {
  host_space host({.budget = 1 << 10, .name = "ram"});
  CHECK_THROWS_WITH_AS(guarded_storage<host_space>(host, 1, 0),
                       "guarded_storage: blocks of 0 bytes; at least 1 is needed", length_error);
  CHECK_THROWS_WITH_AS(guarded_storage<host_space>(host, 1, 1, 32),
                       "ram: an alignment of 32 for guarded blocks; it must be a power of two of at least 64",
                       argument_error);
  CHECK_THROWS_AS(guarded_storage<host_space>(host, ~std::uint64_t{0}, 100), length_error);
  CHECK_THROWS_AS(guarded_storage<host_space>(host, 100, 100), out_of_memory);
}
