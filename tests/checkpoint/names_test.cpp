#include <llmmem/checkpoint/names.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr std::uint64_t largest = ~std::uint64_t{0};

}  // namespace

TEST_SUITE("checkpoint names") {
  TEST_CASE("a folder's name gives its checkpoint, and any other byte is refused") {
    for (const auto seed : seeds(300)) {
      CAPTURE(seed);
      random_numbers random(seed);
      const checkpoint_id id{random.next() >> random.below(64U), random.next() >> random.below(64U)};
      const std::string name = folder_name(id);
      REQUIRE(read_folder_name(name) == id);
      CHECK(generation_in(name) == id.generation);
      CHECK_FALSE(is_left_over(name));
      // One byte changed: none, or another checkpoint with that very name.
      std::string other = name;
      other[random.below(other.size())] = static_cast<char>(random.below(256U));
      if (const auto read = read_folder_name(other)) CHECK(folder_name(*read) == other);
    }
  }

  TEST_CASE("the smallest and the largest numbers have names") {
    CHECK(folder_name({0, 0}) == "step-0000000000-g00000000");
    CHECK(folder_name({1200, 42}) == "step-0000001200-g00000042");
    CHECK(folder_name({largest, largest}) == "step-18446744073709551615-g18446744073709551615");
    CHECK(read_folder_name("step-0000000000-g00000000") == checkpoint_id{});
    CHECK(read_folder_name("step-18446744073709551615-g18446744073709551615") ==
          checkpoint_id{largest, largest});
    CHECK(read_folder_name("step-9999999999-g99999999") == checkpoint_id{9'999'999'999, 99'999'999});
    CHECK(read_folder_name("step-10000000000-g100000000") == checkpoint_id{10'000'000'000, 100'000'000});
  }

  TEST_CASE("names sort as steps do, up to ten digits") {
    CHECK(folder_name({9, 1}) < folder_name({10, 1}));
    CHECK(folder_name({999'999'999, 9}) < folder_name({9'999'999'999, 1}));
  }

  TEST_CASE("a name that only looks like a checkpoint's is not one") {
    for (const std::string& name :
         std::vector<std::string>{"",
                                  "step",
                                  "step-",
                                  "step--g",
                                  "step-0000001200",
                                  "step-0000001200-",
                                  "step-0000001200-g",
                                  "step-0000001200-g0000004",             // seven digits
                                  "step-0000001200-g000000042",           // nine, and a zero first
                                  "step-1200-g00000042",                  // as people would write it
                                  "step-00000001200-g00000042",           // eleven digits
                                  "step-+000001200-g00000042",            //
                                  "step--000001200-g00000042",            //
                                  "step- 000001200-g00000042",            //
                                  "step-0000001200-g00000042 ",           //
                                  " step-0000001200-g00000042",           //
                                  "step-0000001200-g00000042/",           //
                                  "step-0000001200-g00000042.tmp",        //
                                  "step-0000001200-G00000042",            //
                                  "Step-0000001200-g00000042",            //
                                  "step-0000001200g00000042",             //
                                  "step_0000001200-g00000042",            //
                                  "step-0x00001200-g00000042",            //
                                  "step-000000120a-g00000042",            //
                                  ".tmp-step-0000001200-g00000042",       //
                                  ".trash-step-0000001200-g00000042",     //
                                  "step-18446744073709551616-g00000042",  // 2^64
                                  "step-0000001200-g18446744073709551616",
                                  "step-99999999999999999999999-g00000042",
                                  std::string("step-0000001200-g00000042\0", 26),
                                  "step-\xD9\xA1\xD9\xA2-g00000042",  // digits, but not these
                                  "LATEST",
                                  "LOCK"}) {
      CAPTURE(name);
      CHECK_FALSE(read_folder_name(name));
    }
  }

  TEST_CASE("the generation of a checkpoint, a draft and trash is read from the name") {
    CHECK(generation_in("step-0000001200-g00000042") == 42);
    CHECK(generation_in(".tmp-step-0000001200-g00000042-12345") == 42);
    CHECK(generation_in(".tmp-step-0000001200-g00000042") == 42);
    CHECK(generation_in(".trash-step-0000001200-g00000042") == 42);
    CHECK(generation_in(".tmp-0000001200-g00000042-12345") == 42);
    CHECK(generation_in(".trash-step-1-g18446744073709551615") == largest);
    for (const char* name : {"", "LOCK", "LATEST", ".tmp-", ".trash-", ".tmp-step-", ".tmp-step-12",
                             ".tmp-step-12-g", ".tmp-x", ".latest-step-0000001200-g00000042", ".probe-12",
                             "step-1-g9", "tmp-step-1-g9", ".tmp-step-1-g18446744073709551616",
                             ".tmp-step-18446744073709551616-g1", ".trash-.tmp-step-1-g9"}) {
      CAPTURE(name);
      CHECK_FALSE(generation_in(name));
    }
  }

  TEST_CASE("a name counts as left over by its beginning only") {
    for (const char* name : {".tmp-", ".tmp-step-0000001200-g00000042-1", ".trash-x", ".latest-123",
                             ".probe-123", ".probe-123-renamed"})
      CHECK(is_left_over(name));
    for (const char* name : {"", ".", "..", ".tmp", "tmp-1", ".trash", "x.tmp-", ".latest", ".probe",
                             "LATEST", "LOCK", "MANIFEST.json", "step-0000001200-g00000042", ".TMP-1"})
      CHECK_FALSE(is_left_over(name));
  }
}
