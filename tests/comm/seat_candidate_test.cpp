/// The process that is to take a seat, with plain socket pairs for its lanes.
#include <llmmem/comm/detail/seat_candidate.hpp>

#include <doctest/doctest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "support/socket_pair.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using detail::descriptor;
using detail::seat_candidate;
using detail::socket_lane;

namespace {

detail::incarnation_id some_life() {
  detail::incarnation_id id{};
  id.fill(std::byte{3});
  return id;
}

}  // namespace

TEST_CASE("a candidate is complete when both lanes have arrived, in either order") {
  for (const bool is_told_first : {false, true}) {
    const socket_lane first = is_told_first ? socket_lane::told : socket_lane::data;
    const socket_lane second = is_told_first ? socket_lane::data : socket_lane::told;
    socket_pair one;
    socket_pair other;
    const int one_number = one.here.get();
    seat_candidate next;
    CHECK_FALSE(next.is_any());
    CHECK_FALSE(next.is_there());
    next.begin(some_life(), {}, true, 77);
    next.add(first, std::move(one.here));
    CHECK(next.is_any());
    CHECK_FALSE(next.is_complete());
    CHECK(next.is_there());
    next.add(second, std::move(other.here));
    CHECK(next.is_complete());
    CHECK(next.is_of(some_life()));
    CHECK_FALSE(next.is_of({}));
    CHECK(next.is_own());
    CHECK(next.since() == 77);
    CHECK(next.take(first).get() == one_number);
    CHECK_FALSE(next.is_complete());
    next = {};
    CHECK_FALSE(next.is_any());
    CHECK(other.is_closed_there());
  }
}

TEST_CASE("a candidate exists until a lane ends or its process exits") {
  for (const int what : {0, 1, 2}) {
    socket_pair data;
    socket_pair told;
    descriptor process(::eventfd(0, EFD_CLOEXEC));  // readable, as a pidfd, once it "exits"
    const int exits = process.get();
    seat_candidate next;
    next.begin(some_life(), std::move(process), false, 0);
    next.add(socket_lane::data, std::move(data.here));
    next.add(socket_lane::told, std::move(told.here));
    CHECK(next.is_there());
    if (what == 0) data.there.close();
    if (what == 1) told.there.close();
    const std::uint64_t one = 1;
    if (what == 2) REQUIRE(::write(exits, &one, sizeof(one)) == sizeof(one));
    CHECK_FALSE(next.is_there());
  }
}

TEST_CASE("a check of the control lane consumes nothing") {
  socket_pair data;
  socket_pair told;
  seat_candidate next;
  next.begin(some_life(), {}, false, 0);
  next.add(socket_lane::data, std::move(data.here));
  next.add(socket_lane::told, std::move(told.here));
  CHECK(next.look() == seat_candidate::word::none);
  REQUIRE(told.say_there("x"));
  CHECK(next.look() == seat_candidate::word::some);
  CHECK(next.look() == seat_candidate::word::some);
  std::byte one{};
  CHECK(::recv(next.told_socket(), &one, 1, 0) == 1);
  CHECK(next.look() == seat_candidate::word::none);
  told.there.close();
  CHECK(next.look() == seat_candidate::word::ended);
}
