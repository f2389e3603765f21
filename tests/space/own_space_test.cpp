#include "space/own_space.hpp"

#include <llmmem/space/buffer.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <fstream>
#include <iterator>
#include <new>
#include <span>
#include <string>

using namespace llmmem;

namespace {

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

TEST_CASE("the space of docs/spaces.md models a space") {
  alignas(64) std::array<std::byte, 256> memory;
  arena_space space(memory, "arena");
  {
    const space_buffer<arena_space> a(space, 100, std::align_val_t{64});
    const space_buffer<arena_space> b(space, 100, std::align_val_t{64});
    CHECK(space.used() == 228);
    CHECK(space.try_allocate(29, 1).error().message() ==
          "arena: 29 bytes needed, but 28 left in its budget; release ranges, or raise the budget");
    CHECK(space.try_allocate(0, 1).error().message() ==
          "arena: an allocation of 0 bytes; request at least 1");
    CHECK(space.try_allocate(1, 3).error().message() == "arena: alignment 3 is not a power of two");
    std::array<std::byte, 100> source;
    std::array<std::byte, 100> back;
    source.fill(std::byte{7});
    const std::array in{space.copy_in_async(a.range(), source, {}).value()};
    const std::array within{space.copy_within_async(b.range(), a.range(), in).value()};
    space.copy_out_async(back, b.range(), within).value().wait();
    CHECK(back == source);
    CHECK(space.copy_in_async(a.range(), std::span(source).first(99), {}).error().message() ==
          "arena: two lengths must be equal, but are 100 and 99");
  }
  CHECK(space.used() == 0);
}

TEST_CASE("docs/spaces.md shows exactly the space that was just tested") {
  const std::string here = __FILE__;
  const std::string tests = here.substr(0, here.rfind("tests/space/"));
  const std::string page = text_of(tests + "docs/spaces.md");
  const std::string code = text_of(tests + "tests/space/own_space.hpp");
  if (page.empty() || code.empty()) {
    MESSAGE("skipped: the sources are not where they were compiled");
    return;
  }
  CHECK(page.find("```cpp\n" + code + "```\n") != std::string::npos);
}
