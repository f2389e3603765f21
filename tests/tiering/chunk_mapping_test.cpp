/// Tensors in chunks: where each lies, and what that wastes.
#include <llmmem/tiering/chunk_mapping.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

using sizes = std::vector<tensor_size>;

[[nodiscard]] tensor_part at(std::uint32_t chunk, std::uint64_t offset, std::uint64_t begin,
                             std::uint64_t bytes) {
  return {.chunk = chunk_id{chunk}, .offset = offset, .begin = begin, .bytes = bytes};
}
[[nodiscard]] std::vector<tensor_part> parts_of(const chunk_mapping& mapping, std::uint32_t tensor) {
  const auto parts = mapping.parts(tensor_id{tensor});
  return {parts.begin(), parts.end()};
}
[[nodiscard]] std::vector<std::uint64_t> chunks_of(const chunk_mapping& mapping) {
  return {mapping.chunks().begin(), mapping.chunks().end()};
}
using parts = std::vector<tensor_part>;
using numbers = std::vector<std::uint64_t>;

struct mapped {
  sizes tensors;
  chunk_mapping_options options;
};

[[nodiscard]] mapped random_tensors(std::uint64_t seed) {
  random_numbers random(seed);
  mapped made;
  made.options.unit = std::uint64_t{1} << random.below(5U);
  if (random.once_in(4)) made.options.unit = 3;
  made.options.split_bytes = made.options.unit * (1 + random.below(40U));
  made.options.group_bytes = std::min(made.options.split_bytes, made.options.unit * random.below(30U));
  const std::uint64_t count = random.below(30U);
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t most =
        random.once_in(3) ? 4 * made.options.split_bytes : 1 + made.options.group_bytes;
    made.tensors.push_back({.bytes = 1 + random.below(most),
                            .alignment = std::uint64_t{1} << random.below(7U),
                            .set = random.below(3U) * 1'000'000'000});
  }
  return made;
}

/// The rule said once more, byte by byte: each byte of each tensor goes to the lowest place that it may.
struct naive_mapping {
  struct chunk {
    std::vector<bool> taken;
    bool shared = false;
  };
  std::vector<chunk> chunks;
  std::vector<parts> tensors;

  explicit naive_mapping(const mapped& given) {
    std::map<std::uint32_t, std::size_t> open;
    const chunk_mapping_options& options = given.options;
    for (const tensor_size& tensor : given.tensors) {
      tensors.emplace_back();
      if (tensor.bytes <= options.group_bytes) {
        if (!open.contains(tensor.set) || !fits(chunks[open[tensor.set]], tensor, options.group_bytes)) {
          open[tensor.set] = chunks.size();
          chunks.emplace_back();
        }
        put(open[tensor.set], 0, tensor.bytes, tensor.alignment);
        continue;
      }
      // As few as will do, and as small as so few may be.
      std::uint64_t fewest = 1;
      while (fewest * options.split_bytes < tensor.bytes)
        ++fewest;
      std::uint64_t each = options.unit;
      while (each * fewest < tensor.bytes)
        each += options.unit;
      if (fewest == 1) each = tensor.bytes;
      for (std::uint64_t begin = 0; begin < tensor.bytes; begin += each) {
        chunks.emplace_back();
        put(chunks.size() - 1, begin, std::min(each, tensor.bytes - begin), 1);
      }
    }
    for (chunk& each : chunks) {
      while (each.taken.size() % options.unit != 0)
        each.taken.push_back(false);
    }
  }

  [[nodiscard]] static bool fits(const chunk& into, const tensor_size& tensor, std::uint64_t most) {
    std::uint64_t offset = into.taken.size();
    while (offset % tensor.alignment != 0)
      ++offset;
    return offset + tensor.bytes <= most;
  }
  void put(std::size_t at_chunk, std::uint64_t begin, std::uint64_t bytes, std::uint64_t alignment) {
    auto& taken = chunks[at_chunk].taken;
    while (taken.size() % alignment != 0)
      taken.push_back(false);
    tensors.back().push_back(at(static_cast<std::uint32_t>(at_chunk), taken.size(), begin, bytes));
    taken.resize(taken.size() + bytes, true);
  }
};

}  // namespace

TEST_CASE("small tensors share chunks, larger ones have their own, the largest have several") {
  const sizes tensors{{.bytes = 100}, {.bytes = 5'000}, {.bytes = 4, .alignment = 4}, {.bytes = 20'000}};
  const chunk_mapping mapping =
      map_to_chunks(tensors, {.group_bytes = 1024, .split_bytes = 8192, .unit = 512});
  CHECK(mapping.tensors() == 4);
  CHECK(parts_of(mapping, 0) == parts{at(0, 0, 0, 100)});
  CHECK(parts_of(mapping, 1) == parts{at(1, 0, 0, 5'000)});
  CHECK(parts_of(mapping, 2) == parts{at(0, 100, 0, 4)});
  CHECK(parts_of(mapping, 3) == parts{at(2, 0, 0, 7'168), at(3, 0, 7'168, 7'168), at(4, 0, 14'336, 5'664)});
  CHECK(chunks_of(mapping) == numbers{512, 5'120, 7'168, 7'168, 6'144});
  CHECK(mapping.bytes(tensor_id{3}) == 20'000);
  CHECK(mapping.sharers(chunk_id{0}) == 2);
  CHECK(mapping.sharers(chunk_id{4}) == 1);
  CHECK(mapping.first_part(tensor_id{3}) == 3);
  CHECK(mapping.tensor_bytes() == 25'104);
  CHECK(mapping.padding_bytes() == 26'112 - 25'104);
}

TEST_CASE("tensors of different sets share no chunk") {
  const sizes tensors{{.bytes = 8, .alignment = 1, .set = 7},
                      {.bytes = 8, .alignment = 1, .set = 3},
                      {.bytes = 8, .alignment = 1, .set = 7}};
  const chunk_mapping mapping = map_to_chunks(tensors, {.group_bytes = 64, .split_bytes = 64, .unit = 64});
  CHECK(parts_of(mapping, 0) == parts{at(0, 0, 0, 8)});
  CHECK(parts_of(mapping, 1) == parts{at(1, 0, 0, 8)});
  CHECK(parts_of(mapping, 2) == parts{at(0, 8, 0, 8)});
}

TEST_CASE("with group_bytes 0 every tensor is alone in a chunk, and zero tensors need zero chunks") {
  const sizes tensors{{.bytes = 1}, {.bytes = 1}};
  CHECK(chunks_of(map_to_chunks(tensors, {.group_bytes = 0, .unit = 16})) == numbers{16, 16});
  CHECK(map_to_chunks({}).chunks().empty());
  CHECK(map_to_chunks({}).tensors() == 0);
}

TEST_CASE("a mapping follows the rule byte by byte") {
  for (const auto seed : seeds(400)) {
    CAPTURE(seed);
    const mapped given = random_tensors(seed);
    const chunk_mapping mapping = map_to_chunks(given.tensors, given.options);
    const naive_mapping naive(given);
    REQUIRE(mapping.tensors() == naive.tensors.size());
    for (std::uint32_t i = 0; i < mapping.tensors(); ++i)
      REQUIRE(parts_of(mapping, i) == naive.tensors[i]);
    numbers chunks;
    std::uint64_t padding = 0;
    for (const naive_mapping::chunk& each : naive.chunks) {
      chunks.push_back(each.taken.size());
      padding += static_cast<std::uint64_t>(std::count(each.taken.begin(), each.taken.end(), false));
    }
    REQUIRE(chunks_of(mapping) == chunks);
    REQUIRE(mapping.padding_bytes() == padding);
  }
}

TEST_CASE("every byte has its own place, aligned and in order, with little waste") {
  for (const auto seed : seeds(400)) {
    CAPTURE(seed);
    const mapped given = random_tensors(seed);
    const chunk_mapping_options& options = given.options;
    const chunk_mapping mapping = map_to_chunks(given.tensors, options);
    std::vector<std::uint64_t> filled(mapping.chunks().size());
    std::vector<std::uint32_t> sharers(filled.size());
    std::map<std::uint32_t, std::uint64_t> shared_of_set;
    std::map<std::uint32_t, std::uint64_t> padded_of_set;
    std::uint64_t allowed = filled.size() * (options.unit - 1);
    for (std::uint32_t i = 0; i < mapping.tensors(); ++i) {
      const tensor_size& tensor = given.tensors[i];
      std::uint64_t next = 0;
      for (const tensor_part& part : mapping.parts(tensor_id{i})) {
        const std::uint32_t chunk = to_index(part.chunk);
        REQUIRE(part.begin == next);
        next += part.bytes;
        REQUIRE(part.offset % tensor.alignment == 0);
        REQUIRE(part.offset >= filled[chunk]);
        if (part.offset != 0) allowed += tensor.alignment - 1;
        filled[chunk] = part.offset + part.bytes;
        REQUIRE(filled[chunk] <= mapping.chunks()[chunk]);
        ++sharers[chunk];
        if (next != tensor.bytes) REQUIRE(part.bytes % options.unit == 0);
        if (tensor.bytes <= options.group_bytes && part.offset == 0) ++shared_of_set[tensor.set];
      }
      REQUIRE(next == tensor.bytes);
      REQUIRE(mapping.bytes(tensor_id{i}) == tensor.bytes);
      const std::size_t fewest = (tensor.bytes - 1) / options.split_bytes + 1;
      REQUIRE(mapping.parts(tensor_id{i}).size() == fewest);
      if (tensor.bytes <= options.group_bytes) padded_of_set[tensor.set] += tensor.bytes + tensor.alignment;
    }
    std::uint64_t all = 0;
    for (std::size_t i = 0; i < filled.size(); ++i) {
      const std::uint64_t bytes = mapping.chunks()[i];
      REQUIRE(sharers[i] == mapping.sharers(chunk_id{static_cast<std::uint32_t>(i)}));
      REQUIRE(bytes % options.unit == 0);
      REQUIRE(bytes - filled[i] < options.unit);
      REQUIRE(bytes <= (sharers[i] > 1 ? options.group_bytes : options.split_bytes));
      all += bytes;
    }
    REQUIRE(mapping.padding_bytes() == all - mapping.tensor_bytes());
    REQUIRE(mapping.padding_bytes() <= allowed);
    for (const auto& [set, chunks] : shared_of_set)
      REQUIRE((chunks - 1) * options.group_bytes < 2 * padded_of_set[set]);
  }
}

TEST_CASE("impossible options and tensors are refused by name") {
  const auto refused = [](const char* text, const sizes& tensors, const chunk_mapping_options& options) {
    CHECK_THROWS_WITH_AS(static_cast<void>(map_to_chunks(tensors, options)), text, argument_error);
  };
  const sizes none;
  refused("map_to_chunks: unit is 0; it must be at least 1", none, {.unit = 0});
  refused("map_to_chunks: split_bytes is 0; it must be at least unit", none, {.split_bytes = 0});
  refused("map_to_chunks: split_bytes 100 is not a multiple of unit 64", none,
          {.split_bytes = 100, .unit = 64});
  refused("map_to_chunks: group_bytes 65 is not a multiple of unit 64", none,
          {.group_bytes = 65, .split_bytes = 128, .unit = 64});
  refused("map_to_chunks: group_bytes 192 is more than split_bytes 128, the most that a chunk has", none,
          {.group_bytes = 192, .split_bytes = 128, .unit = 64});
  refused("map_to_chunks: tensor 1 has 0 bytes; leave it out", {{.bytes = 4}, {.bytes = 0}}, {});
  refused("map_to_chunks: tensor 0 has alignment 48; it must be a power of two",
          {{.bytes = 4, .alignment = 48}}, {});
  refused("map_to_chunks: tensor 0 has alignment 0; it must be a power of two",
          {{.bytes = 4, .alignment = 0}}, {});
}

TEST_CASE("sizes past the limit are refused with both numbers") {
  const auto refused = [](const char* text, const sizes& tensors, const chunk_mapping_options& options) {
    CHECK_THROWS_WITH_AS(static_cast<void>(map_to_chunks(tensors, options)), text, length_error);
  };
  refused(
      "map_to_chunks: bytes of tensors: 1 + 9223372036854775807 exceeds the limit of 2^63 - 1 bytes; lower "
      "one of the two",
      {{.bytes = 1}, {.bytes = max_bytes}}, {});
  refused(
      "map_to_chunks: bytes of chunks: 9223372036854775807 + 4096 exceeds the limit of 2^63 - 1 bytes; lower "
      "one of the two",
      {{.bytes = max_bytes}}, {});
  refused(
      "map_to_chunks: tensor 1 makes it 4294967296 parts, but a tensor may have at most 2^32 - 2; raise "
      "split_bytes",
      {{.bytes = 1}, {.bytes = std::uint64_t{4096} * 0xFFFF'FFFF}}, {.group_bytes = 0, .split_bytes = 4096});
}
