#include <llmmem/space/buffer.hpp>
#include <llmmem/space/host.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <new>
#include <type_traits>
#include <utility>

using namespace llmmem;

using buffer = space_buffer<host_space>;
static_assert(!std::is_copy_constructible_v<buffer>);
static_assert(std::is_nothrow_move_constructible_v<buffer> && std::is_nothrow_move_assignable_v<buffer>);

TEST_CASE("a buffer returns its range once, regardless of moves") {
  host_space space{host_options{.budget = 1000}};
  {
    buffer a(space, 100, std::align_val_t{8});
    CHECK(space.used() == 100);
    buffer b = std::move(a);
    CHECK(b.bytes() == 100);
    buffer c(space, 10, 20, std::align_val_t{8});
    CHECK(space.used() == 300);
    c = std::move(b);
    CHECK(space.used() == 100);
    buffer& self = c;
    c = std::move(self);
    CHECK(c.bytes() == 100);
    buffer empty;
    CHECK_FALSE(empty);
    empty.reset();
  }
  CHECK(space.used() == 0);
}

TEST_CASE("a released range belongs to the caller") {
  host_space space{host_options{.budget = 1000}};
  buffer a(space, 100, std::align_val_t{8});
  const auto range = a.release();
  a.reset();
  CHECK_FALSE(a);
  CHECK(space.used() == 100);
  space.deallocate(range);
}

TEST_CASE("a failed construction of a buffer throws the space's failure") {
  host_space space{host_options{.budget = 1000, .name = "staging"}};
  CHECK_THROWS_WITH_AS(
      buffer(space, 1001, std::align_val_t{8}),
      "staging: 1001 bytes needed, but 1000 left in its budget; release ranges, or raise the budget",
      out_of_memory);
  CHECK_THROWS_WITH_AS(buffer(space, 0, std::align_val_t{8}),
                       "staging: an allocation of 0 bytes; request at least 1", length_error);
  CHECK_THROWS_WITH_AS(buffer(space, 8, std::align_val_t{12}), "staging: alignment 12 is not a power of two",
                       argument_error);
  CHECK_THROWS_WITH_AS(buffer(space, std::uint64_t{1} << 32, std::uint64_t{1} << 31, std::align_val_t{8}),
                       "staging: elements x bytes per element: 4294967296 x 2147483648 exceeds the limit of "
                       "2^63 - 1 bytes; lower one of the two",
                       length_error);
  CHECK(space.used() == 0);
}
