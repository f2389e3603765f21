#include <llmmem/arena/errors.hpp>
#include <llmmem/codec/errors.hpp>
#include <llmmem/comm/errors.hpp>
#include <llmmem/detail/numbered_errors.hpp>
#include <llmmem/device/errors.hpp>
#include <llmmem/errors.hpp>
#include <llmmem/hash/errors.hpp>
#include <llmmem/kernels/errors.hpp>
#include <llmmem/paging/errors.hpp>
#include <llmmem/pool/errors.hpp>
#include <llmmem/redundancy/errors.hpp>
#include <llmmem/refit/errors.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/errors.hpp>
#include <llmmem/tiering/errors.hpp>
#include <llmmem/transfer/errors.hpp>
#include <llmmem/version/errors.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <vector>

using namespace llmmem;

namespace {

std::vector<const error_info*> every_code() {
  std::vector<const error_info*> all;
  const auto add = [&](const auto& table) {
    for (const error_info& each : table)
      all.push_back(&each);
  };
  add(detail::ground_errors);
  add(detail::arena_errors);
  add(detail::codec_errors);
  add(detail::comm_errors);
  add(detail::device_errors);
  add(detail::hash_errors);
  add(detail::kernels_errors);
  add(detail::paging_errors);
  add(detail::pool_errors);
  add(detail::redundancy_errors);
  add(detail::refit_errors);
  add(detail::space_errors);
  add(detail::tiering_errors);
  add(detail::transfer_errors);
  add(detail::version_errors);
  return all;
}

std::string sentence_of(const error_info& info) {
  return detail::sentence_of({.code = error_code(info), .index = 2, .wanted = 30, .found = 12});
}

// An engine's own code, as docs/ tell: a table entry and a constant.
constexpr error_info out_of_lanes_info{.number = error_code::first_of_users,
                                       .name = "out_of_lanes",
                                       .raises = error_kind::out_of_memory,
                                       .wanted = "lanes needed",
                                       .found = "lanes free",
                                       .sentence = "{wanted} lanes needed, {found} free"};
constexpr error_code out_of_lanes{out_of_lanes_info};

// What journals of earlier versions hold.
static_assert(errc::ok.number() == 0 && errc::out_of_blocks.number() == 1 &&
              errc::out_of_bytes.number() == 5);
static_assert(errc::zero_bytes.number() == 28 && errc::dependency_failed.number() == 58);
static_assert(errc::peer_failed.number() == 76 && errc::frame_forged.number() == 99 &&
              errc::lease_lost.number() == 100 && errc::unexpected_part.number() == 102 &&
              errc::other_refit.number() == 106 && errc::directory_name_taken.number() == 109 &&
              errc::base_differs.number() == 110 && errc::mover_lane_differs.number() == 113);

}  // namespace

TEST_CASE("each number up to the last belongs to one code, and each code has its own name") {
  std::set<unsigned> numbers;
  std::set<std::string_view> names;
  for (const error_info* each : every_code()) {
    CAPTURE(each->name);
    CHECK(numbers.insert(each->number).second);
    CHECK(names.insert(each->name).second);
  }
  CHECK(numbers.size() == last_error_number);
  CHECK(*numbers.begin() == 1);
  CHECK(*numbers.rbegin() == last_error_number);
  CHECK(last_error_number < error_code::first_of_users);
}

TEST_CASE("a code names each number that its sentence shows") {
  for (const error_info* each : every_code()) {
    CAPTURE(each->name);
    const std::string sentence = sentence_of(*each);
    CHECK(sentence.size() > 10);
    const auto shows = [&](std::string_view term) { return sentence.find(term) != std::string::npos; };
    if (shows("{index}") || shows("{cause}") || shows("{chunk}"))
      CHECK_FALSE(std::string_view(each->index).empty());
    if (shows("{wanted}") || shows("{place}") || shows("{absence}")) {
      CHECK_FALSE(std::string_view(each->wanted).empty());
    }
    if (shows("{found}") || shows("{place}") || shows("{others}") || shows("{last}")) {
      CHECK_FALSE(std::string_view(each->found).empty());
    }
  }
}

TEST_CASE("no failure's text contains a brace") {
  for (const error_info* each : every_code()) {
    const std::string text =
        failure{.code = error_code(*each), .index = 2, .wanted = 30, .found = 12}.message();
    CAPTURE(text);
    CHECK(text.find_first_of("{}") == std::string::npos);
  }
}

TEST_CASE("a code read by its number equals the constant, and has its text if the table is known") {
  for (const error_info* each : every_code()) {
    const error_code read = detail::code_numbered(each->number, detail::ground_errors, detail::paging_errors);
    CHECK(read == error_code(*each));
    CHECK(read.number() == each->number);
  }
  CHECK(detail::code_numbered(0, detail::ground_errors) == errc::ok);
  const failure known{.code = detail::code_numbered(2, detail::paging_errors), .found = 4, .where = "kv"};
  CHECK(known.message() == "kv: all 4 sequences are in use; release one, or raise max_sequences");
  CHECK(failure{.code = detail::code_numbered(2), .where = "kv"}.message() == "kv: unknown failure 2");
}

TEST_CASE("codes differ when their numbers do, and only the default one is ok") {
  CHECK(errc::out_of_blocks != errc::out_of_bytes);
  CHECK(errc::out_of_blocks != errc::ok);
  CHECK(errc::ok == error_code{});
  CHECK(std::string_view(errc::ok.name()) == "ok");
  CHECK(std::string_view(errc::out_of_bytes.name()) == "out_of_bytes");
  for (const error_code each : {errc::out_of_blocks, errc::out_of_bytes})  // values, as they were
    CHECK(each != errc::ok);
  switch (errc::out_of_bytes.number()) {
    case errc::out_of_bytes.number():
      break;
    default:
      FAIL("a switch over numbers takes the constants");
  }
}

TEST_CASE("an engine's own code has its own text and exception") {
  const failure why{.code = out_of_lanes, .wanted = 3, .found = 1, .where = "decoder"};
  CHECK(why.message() == "decoder: 3 lanes needed, 1 free");
  CHECK_THROWS_WITH_AS(why.raise(), "decoder: 3 lanes needed, 1 free", out_of_memory);
  CHECK(result<int>(why).code() == out_of_lanes);
}
