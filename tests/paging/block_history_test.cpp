#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/block_history.hpp>

#include <doctest/doctest.h>

#include <string>
#include <type_traits>
#include <vector>

#include "support/testing_access.hpp"

using namespace llmmem;

namespace {

struct debug_traits : paged_traits {
  using history = owner_ring<8>;
};

}  // namespace

TEST_CASE("an audit names the actor and the transition of the broken block") {
  paged_allocator<debug_traits> cache({.blocks = 4, .block_tokens = 4, .name = "kv"});
  const sequence_id one = cache.create().value();
  REQUIRE(cache.extend(one, 4));
  const sequence_id two = cache.fork(one).value();
  REQUIRE(cache.release(one));
  testing_access::add_reference(cache, cache.blocks(two)[0]);
  CHECK(cache.audit() ==
        std::vector<std::string>{
            "kv: block 1 counts 2 references, 1 exist; held by sequence 1[0] (last: shared; #0 allocated by "
            "sequence 0, #1 shared by sequence 0, #2 released by sequence 0, #3 shared by sequence 0)"});
}

TEST_CASE("a ring keeps the latest transitions, those of one block in order") {
  owner_ring<3> ring;
  const block_id one{1};
  const block_id two{2};
  CHECK(ring.history_of(one).empty());
  ring.set_actor(7);
  ring.note(one, llmmem::paging::transition::allocated);
  ring.note(two, llmmem::paging::transition::allocated);
  ring.set_actor(llmmem::paging::no_actor);
  ring.note(one, llmmem::paging::transition::freed);
  CHECK(ring.history_of(one) == "#0 allocated by sequence 7, #2 freed");
  ring.note(two, llmmem::paging::transition::freed);
  CHECK(ring.history_of(one) == "#2 freed");
}

TEST_CASE("a history of 0 entries takes no space") {
  CHECK(std::is_empty_v<llmmem::paging::no_history>);
  CHECK(paging::no_history{}.history_of(block_id{1}).empty());
}
