/// What becomes of plans that were left, by kind of response.
#include <llmmem/schedule/detail/divergence_response.hpp>

#include <doctest/doctest.h>

#include <cstdint>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

TEST_CASE("a plan is repaired until several consecutive iterations have left it") {
  for (const auto seed : seeds(50)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::uint32_t most = 1 + random.below(std::uint32_t{4});
    detail::divergence_response response(on_divergence::repair, most);
    std::uint32_t in_a_row = 0;
    for (int step = 0; step < 60; ++step) {
      if (random.once_in(4)) {
        response.plan_kept();
        in_a_row = 0;
        continue;
      }
      const bool drop = ++in_a_row == most;
      REQUIRE(response.plan_left() == drop);
      REQUIRE_FALSE(response.fell_back());
      if (drop) in_a_row = 0;
    }
  }
}

TEST_CASE("a response may drop a plan at once to record another, or keep it and follow none") {
  detail::divergence_response anew(on_divergence::re_record, 3);
  CHECK(anew.plan_left());
  CHECK_FALSE(anew.fell_back());

  for (const on_divergence what : {on_divergence::fall_back, on_divergence::by_frequency}) {
    detail::divergence_response response(what, 1);
    CHECK_FALSE(response.plan_left());
    CHECK(response.fell_back());
    response.plan_kept();
    CHECK(response.fell_back());
    response.forget();
    CHECK_FALSE(response.fell_back());
  }
}

TEST_CASE("uses are counted by frequency only, and forecast as by a separate forecast") {
  for (const on_divergence what :
       {on_divergence::repair, on_divergence::re_record, on_divergence::fall_back}) {
    detail::divergence_response response(what, 3);
    response.know_chunks(4);
    response.begin_iteration();
    response.used(chunk_id{0});
    CHECK_FALSE(response.has_forecast());
  }
  detail::divergence_response response(on_divergence::by_frequency, 3);
  response.used(chunk_id{0});  // before any chunk is known
  CHECK_FALSE(response.has_forecast());
  response.know_chunks(4);
  use_forecast oracle(4);
  random_numbers random(1);
  for (int iteration = 0; iteration < 20; ++iteration) {
    response.begin_iteration();
    oracle.begin_iteration();
    for (int use = 0; use < 6; ++use) {
      const chunk_id chunk{random.below(std::uint32_t{4})};
      response.used(chunk);
      oracle.used(chunk);
    }
    response.know_chunks(4);  // recorded again: what was counted stays
    for (std::uint32_t i = 0; i < 4; ++i)
      CHECK(response.next_use(chunk_id{i}) == oracle.next_use(chunk_id{i}));
  }
  response.forget();
  CHECK_FALSE(response.has_forecast());
}

TEST_CASE("a recording with more chunks than before counts all of them") {
  detail::divergence_response response(on_divergence::by_frequency, 3);
  response.know_chunks(1);
  response.used(chunk_id{0});
  response.know_chunks(3);
  CHECK(response.next_use(chunk_id{0}) == use_forecast::never);
  response.used(chunk_id{2});
  CHECK(response.next_use(chunk_id{2}) != use_forecast::never);
}
