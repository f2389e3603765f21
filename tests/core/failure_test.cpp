#include <llmmem/failure.hpp>
#include <llmmem/paged_allocator.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/tiered_buffer.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

using namespace llmmem;

namespace {

const std::string refused_1000 =
    ": sequence 0 would hold 1000 tokens, more than the 64 allowed; raise max_sequence_tokens, or blocks";

failure extend_too_far(std::string name) {
  paged_allocator<> cache({.blocks = 4, .name = std::move(name)});
  const auto sequence = cache.create().value();
  return cache.extend(sequence, 1000).error();
}

result<void> load_too_much() {
  host_space memory({.budget = 1 << 20});
  host_space below({.budget = 1 << 20});
  tiered_buffer<host_space, host_space> buffer({.name = "weights"}, {memory, 1 << 12}, {below, 1 << 16});
  const auto chunk = buffer.create(1 << 14);
  if (!chunk) return chunk.error();
  return {};
}

constexpr bool a_constant_keeps_its_name() {
  const failure one{errc::stale_handle, 7, 30, 12, "kv"};
  const failure two = one;
  return two.where == failure_name("kv") && two.where.view() == "kv" && failure{}.where.empty();
}
static_assert(a_constant_keeps_its_name());
static_assert(std::is_trivially_copyable_v<failure> &&
              std::is_nothrow_constructible_v<failure_name, const char*>);
static_assert(sizeof(failure) <= 128);

}  // namespace

TEST_CASE("a failure names an object that no longer exists, whether its name is short or long") {
  CHECK(extend_too_far("kv").message() == "kv" + refused_1000);
  const std::string name = "a name that is long enough for the heap";
  CHECK(extend_too_far(name).message() == name + refused_1000);
}

TEST_CASE("a failure names its object unchanged after the object was moved and its place reused") {
  std::optional<paged_allocator<>> first(std::in_place, paged_options{.blocks = 4, .name = "kv"});
  const auto sequence = first->create().value();
  const failure why = first->extend(sequence, 1000).error();
  CHECK(why.message() == "kv" + refused_1000);
  const paged_allocator<> second = std::move(*first);
  CHECK(why.message() == "kv" + refused_1000);
  first.emplace(paged_options{.blocks = 4, .name = "other"});
  CHECK(why.message() == "kv" + refused_1000);
}

TEST_CASE("a function that owns its buffer returns the buffer's failure to its caller") {
  const auto done = load_too_much();
  REQUIRE_FALSE(done);
  CHECK(done.error().message() ==
        "weights: tier 0: 16384 bytes needed in one piece, but it never has more than 4096; raise its "
        "budget, or request smaller pieces");
}

TEST_CASE("an exception from value() keeps its text when the object no longer exists") {
  std::string text;
  try {
    paged_allocator<> cache({.blocks = 4, .name = "a name that is long enough for the heap"});
    const auto sequence = cache.create().value();
    cache.extend(sequence, 1000).value();
  } catch (const std::exception& e) {
    text = e.what();
  }
  CHECK(text == "a name that is long enough for the heap" + refused_1000);
}

TEST_CASE("a name of at most max_size bytes is kept completely") {
  for (std::size_t size = 0; size <= failure_name::max_size; ++size) {
    const std::string name(size, 'n');
    CHECK(failure_name(name).view() == name);
    CHECK(std::string_view(failure_name(name.c_str()).c_str()) == name);
  }
  CHECK(failure_name(nullptr).empty());
}

TEST_CASE("a path that is too long keeps its first folder, three dots and its end") {
  const std::string path =
      "/var/lib/engine/models/" + std::string(200, 'x') + "/shard-00017-of-00030.safetensors";
  const std::string shown(failure_name(path).view());
  CHECK(shown.size() == failure_name::max_size);
  CHECK(shown.starts_with("/var/lib/engine/models/xxxxxxxx..."));
  CHECK(shown.ends_with("x/shard-00017-of-00030.safetensors"));
  CHECK(failure{.code = errc::file_locked, .where = path}.message() ==
        shown +
            ": another process, or another object in this one, holds the file; end that, or use another "
            "path: each rank and each tier needs its own");
}

TEST_CASE("shortening a name cuts no character in half") {
  // Two bytes each, so that one offset of two falls inside a character at either cut.
  for (const std::string begin : {"", "a"}) {
    std::string name = begin;
    for (int i = 0; i < 100; ++i)
      name += "\u00e9";
    for (const std::string end : {"", "z"}) {
      std::string shown(failure_name(name + end).view());
      CHECK(shown.size() <= failure_name::max_size);
      std::size_t odd = 0;
      for (std::size_t at = 0; at < shown.size(); at += shown[at] == '\xc3' ? 2U : 1U) {
        if (shown[at] == '\xc3') odd += at + 1 == shown.size() || shown[at + 1] != '\xa9' ? 1U : 0U;
        if (shown[at] == '\xa9') ++odd;
      }
      CHECK(odd == 0);
    }
  }
}

namespace {

result<int> seven() {
  return 7;
}
result<void> nothing_wrong() {
  return {};
}
failure no_refusal() {
  return {};
}

/// Bytes of the name that `make` writes into memory where it makes its failure or success.
template <class T>
std::size_t name_bytes_written(T (*make)()) {
  alignas(T) std::array<std::byte, sizeof(T)> place{};
  place.fill(std::byte{0x5A});
  const T* const made = ::new (static_cast<void*>(place.data())) T(make());
  const failure* why = nullptr;
  if constexpr (std::is_same_v<T, failure>) {
    why = made;
  } else {
    why = &made->error();
  }
  const auto* const name = reinterpret_cast<const std::byte*>(&why->where);
  return static_cast<std::size_t>(std::count_if(name, name + sizeof(failure_name),
                                                [](std::byte each) { return each != std::byte{0x5A}; }));
}

}  // namespace

TEST_CASE("a success writes only the first byte of a name") {
  CHECK(name_bytes_written(seven) == 1);
  CHECK(name_bytes_written(nothing_wrong) == 1);
  CHECK(name_bytes_written(no_refusal) == 1);
}
