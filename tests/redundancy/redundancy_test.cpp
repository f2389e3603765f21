#include <llmmem/redundancy/redundancy.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <set>
#include <string>

#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

std::string refusal(const std::string& text) {
  try {
    static_cast<void>(redundancy_scheme::parse(text));
  } catch (const argument_error& error) {
    return error.what();
  }
  return "taken";
}

std::string reason(const std::string& text, std::uint32_t world) {
  return redundancy_scheme::parse(text).fits(rank_count{world}).value_or("fits");
}

/// Every scheme there is, written out.
std::set<std::string> all_schemes() {
  std::set<std::string> all{"compute"};
  for (int copies = 2; copies <= 1024; ++copies)
    all.insert("mirror:" + std::to_string(copies));
  for (int data = 1; data <= 255; ++data) {
    all.insert("parity:" + std::to_string(data));
    for (int parity = 1; data + parity <= 256; ++parity)
      all.insert("rs:" + std::to_string(data) + "+" + std::to_string(parity));
  }
  return all;
}

/// Without the zeros that numbers may begin with.
std::string plain(const std::string& text) {
  std::string short_text;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto is_digit = [&](std::size_t at) {
      return at < text.size() && text[at] >= '0' && text[at] <= '9';
    };
    const bool in_number = !short_text.empty() && short_text.back() >= '0' && short_text.back() <= '9';
    if (text[i] == '0' && !in_number && is_digit(i + 1)) continue;
    short_text += text[i];
  }
  return short_text;
}

}  // namespace

TEST_CASE("each scheme reports its needs, tolerance and cost") {
  const auto mirror = redundancy_scheme::parse("mirror:3");
  CHECK(mirror == redundancy_scheme::mirror(3));
  CHECK(mirror.kind() == redundancy_kind::mirror);
  CHECK_FALSE(mirror.is_coded());
  CHECK(mirror.copies() == 3);
  CHECK(mirror.group_ranks() == 3);
  CHECK(mirror.tolerates() == 2);
  CHECK(mirror.extra_bytes(1'000) == 2'000);

  const auto parity = redundancy_scheme::parse("parity:4");
  CHECK(parity == redundancy_scheme::parity(4));
  CHECK(parity.is_coded());
  CHECK(parity.copies() == 1);
  CHECK(parity.group_ranks() == 5);
  CHECK(parity.tolerates() == 1);
  CHECK(parity.extra_bytes(1'024) == 256);
  CHECK(parity.extra_bytes(1'025) == 320);  // whole units of 64

  const auto rs = redundancy_scheme::parse("rs:4+2");
  CHECK(rs == redundancy_scheme::rs({.data = 4, .parity = 2}));
  CHECK(rs.is_coded());
  CHECK(rs.group_ranks() == 6);
  CHECK(rs.tolerates() == 2);
  CHECK(rs.extra_bytes(4'096) == 2'048);

  const auto compute = redundancy_scheme::parse("compute");
  CHECK(compute == redundancy_scheme::compute());
  CHECK(compute.copies() == 2);
  CHECK(compute.group_ranks() == 2);
  CHECK(compute.tolerates() == 1);
  CHECK(compute.extra_bytes(77) == 77);
  CHECK(compute != redundancy_scheme::mirror(2));

  for (const char* text : {"mirror:2", "mirror:1024", "parity:1", "parity:255", "rs:1+1", "rs:255+1",
                           "rs:1+255", "rs:2+2", "compute"}) {
    CHECK(to_text(redundancy_scheme::parse(text)) == text);
  }
  CHECK_THROWS_WITH_AS(static_cast<void>(redundancy_scheme::mirror(3).extra_bytes(max_bytes)),
                       "redundancy: copies or parity pieces x bytes each: 2 x 9223372036854775807 exceeds "
                       "the limit of 2^63 - 1 bytes; lower one of the two",
                       length_error);
}

TEST_CASE("an invalid scheme is refused with the place and what is allowed there") {
  CHECK(refusal("") ==
        "redundancy: '', character 1: not the beginning of a scheme; write mirror:F, parity:K, rs:K+M or "
        "compute");
  CHECK(refusal("Parity:2") ==
        "redundancy: 'Parity:2', character 1: not the beginning of a scheme; write mirror:F, parity:K, "
        "rs:K+M or compute");
  CHECK(refusal("mirrors:2") ==
        "redundancy: 'mirrors:2', character 1: not the beginning of a scheme; write mirror:F, parity:K, "
        "rs:K+M or compute");
  CHECK(refusal("mirror") ==
        "redundancy: 'mirror', character 7: ':' is expected here, then the number of copies including the "
        "rank's own");
  CHECK(refusal("mirror:") ==
        "redundancy: 'mirror:', character 8: the number of copies including the rank's own is expected here, "
        "2 to 1024");
  CHECK(refusal("mirror:1") ==
        "redundancy: 'mirror:1', character 8: the number of copies including the rank's own is expected "
        "here, 2 to 1024");
  CHECK(refusal("mirror:1025") ==
        "redundancy: 'mirror:1025', character 8: the number of copies including the rank's own is expected "
        "here, 2 to 1024");
  CHECK(refusal("mirror:4294967298") ==
        "redundancy: 'mirror:4294967298', character 8: the number of copies including the rank's own is "
        "expected here, 2 to 1024");
  CHECK(refusal("mirror:-2") ==
        "redundancy: 'mirror:-2', character 8: the number of copies including the rank's own is expected "
        "here, 2 to 1024");
  CHECK(refusal("mirror:2 ") == "redundancy: 'mirror:2 ', character 9: the text must end here");
  CHECK(
      refusal("parity=3") ==
      "redundancy: 'parity=3', character 7: ':' is expected here, then how many ranks' data share a parity");
  CHECK(refusal("parity:256") ==
        "redundancy: 'parity:256', character 8: how many ranks' data share a parity is expected here, 1 to "
        "255");
  CHECK(refusal("rs:2") ==
        "redundancy: 'rs:2', character 5: '+' is expected here, then the number of parity pieces");
  CHECK(refusal("rs:+2") ==
        "redundancy: 'rs:+2', character 4: the number of data pieces is expected here, 1 to 255");
  CHECK(refusal("rs:2+0") ==
        "redundancy: 'rs:2+0', character 6: the number of parity pieces is expected here, 1 to 254");
  CHECK(refusal("rs:200+57") ==
        "redundancy: 'rs:200+57', character 8: the number of parity pieces is expected here, 1 to 56");
  CHECK(refusal("rs 2+2") ==
        "redundancy: 'rs 2+2', character 3: ':' is expected here, then the number of data pieces");
  CHECK(refusal("compute:2") == "redundancy: 'compute:2', character 8: the text must end here");

  CHECK_THROWS_WITH_AS(redundancy_scheme::mirror(1),
                       "redundancy: a mirror of 1 copy; use 2 to 1024, including the rank's own",
                       argument_error);
  CHECK_THROWS_WITH_AS(redundancy_scheme::mirror(1025),
                       "redundancy: a mirror of 1025 copies; use 2 to 1024, including the rank's own",
                       argument_error);
  CHECK_THROWS_WITH_AS(redundancy_scheme::parity(0), "redundancy: parity over 0 pieces of data; use 1 to 255",
                       argument_error);
  CHECK_THROWS_WITH_AS(redundancy_scheme::rs({.data = 0, .parity = 2}),
                       "reed_solomon: a code of 0+2; use at least one piece of data and one of parity",
                       argument_error);
}

TEST_CASE("random texts are accepted exactly if the grammar has them, and survive a round trip") {
  const std::string parts[] = {"mirror", "parity", "rs", "compute", ":",  "+", "0",
                               "1",      "2",      "25", "256",     "99", " ", "x"};
  const std::set<std::string> legal = all_schemes();
  std::uint64_t taken = 0;
  for (const auto seed : seeds(20'000)) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    std::string text = parts[random() % 4];
    if (random() % 4 != 0) text += ":";
    for (std::uint64_t part = random() % 4; part != 0; --part)
      text += parts[4 + random() % 10];
    CAPTURE(text);
    const std::string refused = refusal(text);
    REQUIRE((refused == "taken") == legal.contains(plain(text)));
    if (refused == "taken") {
      ++taken;
      const redundancy_scheme scheme = redundancy_scheme::parse(text);
      REQUIRE(redundancy_scheme::parse(to_text(scheme)) == scheme);
    } else {
      REQUIRE(refused.starts_with("redundancy: '" + text + "', character "));
    }
  }
  CHECK(taken > 500);
}

TEST_CASE("a refusal of a small world names a scheme that fits") {
  CHECK(reason("mirror:3", 3) == "fits");
  CHECK(reason("mirror:3", 2) ==
        "mirror:3 needs 3 ranks, but the world has 2: start 1 more, or use mirror:2");
  CHECK(reason("mirror:3", 1) == "mirror:3 needs 3 ranks, but the world has 1: start 2 more");
  CHECK(reason("parity:3", 4) == "fits");
  CHECK(reason("parity:3", 3) ==
        "parity:3 needs 4 ranks, but the world has 3: start 1 more, or use parity:2");
  CHECK(reason("rs:2+2", 4) == "fits");
  CHECK(reason("rs:2+2", 3) == "rs:2+2 needs 4 ranks, but the world has 3: start 1 more, or use rs:1+2");
  CHECK(reason("rs:4+2", 2) == "rs:4+2 needs 6 ranks, but the world has 2: start 4 more, or use mirror:2");
  CHECK(reason("compute", 2) == "fits");
  CHECK(reason("compute", 1) == "compute needs 2 ranks, but the world has 1: start 1 more");
}
