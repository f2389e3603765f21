#include <llmmem/checkpoint/load.hpp>
#include <llmmem/model/safetensors.hpp>
#include <llmmem/testing/simulated_storage.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "support/checkpoint_world.hpp"
#include "support/error_text.hpp"
#include "support/manifests.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/small_checkpoint.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::simulated_storage;
using llmmem::testing::storage_fault;

namespace {

/// What was given to the sink, and how often each byte was.
struct received {
  std::vector<std::vector<std::byte>> bytes{};
  std::vector<std::vector<std::uint8_t>> times{};

  received(const found_checkpoint& from, std::span<const wanted_tensor> wanted) {
    for (const wanted_tensor& each : wanted) {
      const auto tensor = std::find_if(from.manifest.tensors.begin(), from.manifest.tensors.end(),
                                       [&](const checkpoint_tensor& one) { return one.name == each.name; });
      std::uint64_t count = 0;
      if (tensor != from.manifest.tensors.end())
        count = bytes_of(tensor->type, each.part ? each.part->elements() : elements_of(*tensor), each.name);
      bytes.emplace_back(static_cast<std::size_t>(count));
      times.emplace_back(static_cast<std::size_t>(count));
    }
  }
  void operator()(std::uint32_t wanted, std::uint64_t offset, std::span<const std::byte> part) {
    std::vector<std::byte>& to = bytes.at(wanted);
    if (offset > to.size() || part.size() > to.size() - offset) throw std::logic_error("bytes past the part");
    std::memcpy(to.data() + offset, part.data(), part.size());
    for (std::size_t i = 0; i < part.size(); ++i)
      ++times[wanted][static_cast<std::size_t>(offset) + i];
  }
  [[nodiscard]] bool each_once() const {
    return std::all_of(times.begin(), times.end(), [](const auto& of) {
      return std::all_of(of.begin(), of.end(), [](std::uint8_t count) { return count == 1; });
    });
  }
};

/// Some tensors of one kind and another.
std::vector<state_tensor> some_tensors(random_numbers& random) {
  std::vector<state_tensor> tensors;
  for (std::uint64_t i = 1 + random.below(5U); i > 0; --i) {
    state_tensor made;
    made.name = "t" + std::to_string(i);
    made.type = static_cast<safetensors_type>(random.below(safetensors_types));
    for (std::uint64_t k = random.below(4U); k > 0; --k)
      made.shape.push_back(random.once_in(12) ? 0 : 1 + random.below(9U));
    if (bits_of(made.type) < 8) made.shape = {random.below(5U), 8};  // rows of whole bytes
    if (random.once_in(3)) made.group = "optimizer";
    tensors.push_back(std::move(made));
  }
  return tensors;
}

/// A tensor's rows, columns or flat elements for each of `world` ranks, or all of it at rank 0.
void share(random_numbers& random, const state_tensor& tensor,
           std::vector<std::vector<state_tensor>>& ranks) {
  const tensor_shape shape = tensor_shape::of(tensor.shape);
  const std::uint64_t world = ranks.size();
  const auto how = bits_of(tensor.type) < 8 ? shared_by::rows : static_cast<shared_by>(random.below(4U));
  for (std::uint64_t rank = 0; rank < world; ++rank) {
    const auto slice = [&](std::uint64_t of) {
      return index_range{of * rank / world, of * (rank + 1) / world - of * rank / world};
    };
    state_tensor mine = tensor;
    switch (how) {
      case shared_by::one:
        if (rank != 0) continue;
        break;
      case shared_by::flat:
        mine.part = element_runs::flat_range(slice(shape.elements()).first, slice(shape.elements()).count);
        break;
      case shared_by::rows:
        mine.part = element_runs::rows(shape, slice(shape.rows()));
        break;
      case shared_by::columns:
        mine.part = element_runs::columns(shape, slice(shape.columns()));
        break;
    }
    ranks[static_cast<std::size_t>(rank)].push_back(mine);
  }
}

/// Two small files with an index, an extra, and what was in them.
struct small_state {
  simulated_storage storage{};
  std::vector<state_tensor> tensors{{.name = "w", .type = safetensors_type::f32, .shape = {4, 6}},
                                    {.name = "b", .type = safetensors_type::bf16, .shape = {6}},
                                    {.name = "n", .type = safetensors_type::i64, .shape = {}},
                                    {.name = "none", .type = safetensors_type::u8, .shape = {0, 3}}};
  tensor_values values{};
  std::vector<checkpoint_extra> extras{{"seed", {std::byte{1}, std::byte{2}, std::byte{3}}}};

  explicit small_state(std::uint64_t chunk_bytes = 64) {
    random_numbers random(11);
    values = random_values(random, tensors);
    checkpoint_folder folder(storage);
    const std::vector<std::vector<state_tensor>> ranks{tensors};
    save_state(folder, 10, chunk_bytes, ranks, values, extras, {.max_shard_bytes = 100, .data_alignment = 8});
  }
  [[nodiscard]] found_checkpoint found(verification how = verification::checksums) {
    return find_checkpoint(storage, how).found.value();
  }
  [[nodiscard]] std::vector<wanted_tensor> all() const {
    std::vector<wanted_tensor> wanted;
    for (const state_tensor& each : tensors)
      wanted.push_back({.name = each.name, .part = {}, .type = each.type, .shape = each.shape});
    return wanted;
  }
  /// "right", "wrong", or why it was refused.
  [[nodiscard]] std::string load(const found_checkpoint& from, const load_options& options) {
    const std::vector<wanted_tensor> wanted = all();
    received got(from, wanted);
    const std::string said = text_of([&] { load_checkpoint(storage, from, wanted, got, options); });
    if (said != "none") return said;
    return got.bytes == values && got.each_once() ? "right" : "wrong";
  }
};

/// A checkpoint whose one file and manifest are what somebody made them, with right checksums.
struct made_by_hand {
  simulated_storage storage{};
  std::optional<found_checkpoint> found{};

  made_by_hand(const std::string& file, std::vector<checkpoint_tensor> tensors) {
    checkpoint_folder folder(storage);
    const checkpoint_draft draft = folder.begin(10);
    const auto bytes = std::as_bytes(std::span(file.data(), file.size()));
    auto output = storage.create(draft.path("m.safetensors"), bytes.size());
    if (!bytes.empty()) static_cast<void>(output.begin_write(0, bytes));
    output.sync();
    folder.commit(draft, {.generation = draft.id.generation,
                          .step = 10,
                          .world = 1,
                          .chunk_bytes = 16,
                          .files = {described("m.safetensors", bytes, 16)},
                          .tensors = std::move(tensors)});
    found = find_checkpoint(storage).found;
  }
  /// Why its tensor `w` is refused, by either verification alike.
  [[nodiscard]] std::string refusal() {
    const std::vector<wanted_tensor> wanted{{.name = "w"}};
    std::string said;
    for (const verification how : {verification::sizes, verification::checksums}) {
      received got(*found, wanted);
      std::string now;
      try {
        load_checkpoint(storage, *found, wanted, got, {.verify = how});
        now = "taken";
      } catch (const format_error& error) {
        now = error.what();
      }
      if (!said.empty()) CHECK(now == said);
      said = now;
    }
    return said;
  }
};

/// A file: the length of `json`, `json` and `data` bytes.
std::string safetensors_file(const std::string& json, std::size_t data) {
  std::string text;
  for (std::uint64_t i = 0, length = json.size(); i < 8; ++i, length >>= 8)
    text += static_cast<char>(static_cast<unsigned char>(length & 0xFF));
  return text + json + std::string(data, 'd');
}

}  // namespace

TEST_SUITE("load_checkpoint") {
  TEST_CASE("any loaded parts of any saved parts have the elements of the whole") {
    std::uint64_t copies = 0;
    for (const auto seed : seeds(250)) {
      CAPTURE(seed);
      random_numbers random(seed);
      const std::vector<state_tensor> tensors = some_tensors(random);
      const tensor_values values = random_values(random, tensors);
      std::vector<std::vector<state_tensor>> ranks(1 + random.below(std::uint64_t{3}));
      for (const state_tensor& each : tensors)
        share(random, each, ranks);
      simulated_storage storage;
      checkpoint_folder folder(storage);
      const checkpoint_draft draft = folder.begin(10);
      checkpoint_manifest all{.generation = 1,
                              .step = 10,
                              .world = static_cast<std::uint32_t>(ranks.size()),
                              .chunk_bytes = 1 + random.below(300U),
                              .files = {},
                              .tensors = {}};
      for (std::uint32_t rank = 0; rank < ranks.size(); ++rank) {
        tensor_values mine;
        for (const state_tensor& each : ranks[rank]) {
          const auto at = std::find_if(tensors.begin(), tensors.end(),
                                       [&](const state_tensor& one) { return one.name == each.name; });
          mine.push_back(values[static_cast<std::size_t>(at - tensors.begin())]);
        }
        checkpoint_manifest part = all;
        part.files.clear();
        part.tensors.clear();
        const file_plan plan = plan_files(ranks[rank], {.max_shard_bytes = 1 + random.below(400U),
                                                        .data_alignment = 8,
                                                        .rank = rank,
                                                        .world = all.world});
        write_plan(storage, draft, plan, ranks[rank], mine, rank, part);
        merge_manifest(all, part, "rank " + std::to_string(rank));
      }
      folder.commit(draft, all);

      const checkpoint_search search = find_checkpoint(storage);
      REQUIRE(search.found);
      std::vector<wanted_tensor> wanted;
      tensor_values expected;
      std::uint64_t bytes = 0;
      for (std::uint64_t i = random.below(8U); i > 0; --i) {
        const std::size_t at = random.below(tensors.size());
        const tensor_shape shape = tensor_shape::of(tensors[at].shape);
        const std::uint64_t bits = bits_of(tensors[at].type);
        wanted_tensor some{.name = tensors[at].name, .part = {}, .type = {}, .shape = {}};
        if (random.once_in(2)) {
          some.part = bits < 8 ? element_runs::rows(shape, {0, random.below(shape.rows() + 1)})
                               : random_runs(random, shape);
        }
        expected.push_back(
            part_of(values[at], some.part.value_or(element_runs::all_of(shape.elements())), bits));
        bytes += expected.back().size();
        wanted.push_back(std::move(some));
      }
      for (const verification how : {verification::sizes, verification::checksums}) {
        const auto readers = static_cast<std::uint32_t>(1 + random.below(4U));
        CAPTURE(readers);
        received got(*search.found, wanted);
        const load_report report =
            load_checkpoint(storage, *search.found, wanted, got, {.verify = how, .readers = readers});
        CHECK(got.bytes == expected);
        CHECK(got.each_once());
        CHECK(report.bytes == bytes);
        CHECK(report.read_bytes >= (how == verification::sizes ? bytes : 0));
        CHECK((report.files == 0) == (bytes == 0));
        copies += report.files;
      }
    }
    MESSAGE(copies << " files were read");
  }

  TEST_CASE("whole tensors are loaded with any number of readers, also without requested tensors") {
    small_state state;
    for (const verification how : {verification::sizes, verification::checksums}) {
      for (std::uint32_t readers = 0; readers <= 4; ++readers)
        CHECK(state.load(state.found(), {.verify = how, .readers = readers}) == "right");
    }
  }

  TEST_CASE("with sizes only wanted bytes and headers are read, with checksums whole chunks") {
    small_state state(32);
    const found_checkpoint from = state.found();
    const std::vector<wanted_tensor> wanted{{.name = "w", .part = element_runs::flat_range(0, 1)}};
    received got(from, wanted);
    const std::uint64_t header = [&] {
      const auto input = state.storage.open(from.folder + "/" + from.manifest.files[0].name);
      std::vector<std::byte> begin(8);
      input.read(0, begin);
      return safetensors_header_bytes(begin, "x");
    }();
    const load_report sizes =
        load_checkpoint(state.storage, from, wanted, got, {.verify = verification::sizes});
    CHECK(sizes.bytes == 4);
    CHECK(sizes.files == 1);
    CHECK(sizes.read_bytes == header + 4);
    const load_report sums = load_checkpoint(state.storage, from, wanted, got, {});
    CHECK(sums.bytes == 4);
    CHECK(sums.read_bytes == (header + 31) / 32 * 32 + 32);
  }

  TEST_CASE(
      "a flipped bit in any byte of any file is refused or outside the request, and never gives wrong data") {
    small_state state;
    const found_checkpoint from = state.found();
    std::uint64_t refused = 0;
    std::uint64_t irrelevant = 0;
    std::uint64_t wrong_if_believed = 0;
    for (const auto& [path, bytes] : state.storage.files()) {
      if (!path.starts_with(from.folder)) continue;
      CAPTURE(path);
      for (std::uint64_t byte = 0; byte < bytes.size(); ++byte) {
        CAPTURE(byte);
        const std::uint64_t bit = byte * 8 + byte % 8;
        state.storage.flip(path, bit);
        const std::string said = state.load(
            from, {.readers = 1 + static_cast<std::uint32_t>(byte % 2)});  // found before it rotted
        REQUIRE(said != "wrong");
        (said == "right" ? irrelevant : refused) += 1;
        if (said == "right") {
          // Nothing of the tensors: their index, the extras, or the manifest, which was read already.
          const bool is_of_tensors = path.find("/model-") != std::string::npos;
          CHECK_FALSE(is_of_tensors);
        }
        // Whoever looks for a checkpoint afterwards does not find it.
        CHECK_FALSE(find_checkpoint(state.storage).found);
        const checkpoint_search believed = find_checkpoint(state.storage, verification::sizes);
        if (believed.found)
          wrong_if_believed +=
              state.load(*believed.found, {.verify = verification::sizes}) == "wrong" ? 1U : 0U;
        state.storage.flip(path, bit);
      }
    }
    CHECK(state.load(from, {}) == "right");
    CHECK(refused > 400);
    CHECK(irrelevant > 500);
    CHECK(wrong_if_believed >= 96 + 12 + 8);  // each byte of a value
    MESSAGE(refused << " refused, " << irrelevant << " irrelevant");
  }

  TEST_CASE("damage is reported by file, bytes and both checksums") {
    small_state state;
    const found_checkpoint from = state.found();
    const std::string path = from.folder + "/" + from.manifest.files[0].name;
    state.storage.flip(path, 70 * 8);
    const std::string said = state.load(from, {});
    CHECK(said.starts_with("simulated/" + path + ": bytes 64 to 128 are damaged: their CRC-32C is "));
    CHECK(said.ends_with(", but the manifest has " + hex8(from.manifest.files[0].chunks[1])));
  }

  TEST_CASE("truncated, extended and missing files are refused") {
    for (const verification how : {verification::sizes, verification::checksums}) {
      small_state state;
      const found_checkpoint from = state.found();
      const std::string path = from.folder + "/" + from.manifest.files[0].name;
      const std::uint64_t bytes = from.manifest.files[0].bytes;
      const std::string of = "simulated/" + path + ": has ";
      const std::string says = " bytes, but the manifest says " + std::to_string(bytes);
      state.storage.grow(path, bytes + 1);
      CHECK(state.load(from, {.verify = how}) == of + std::to_string(bytes + 1) + says);
      for (const std::uint64_t left : {bytes - 1, std::uint64_t{8}, std::uint64_t{7}, std::uint64_t{0}}) {
        state.storage.truncate(path, left);
        CHECK(state.load(from, {.verify = how}) == of + std::to_string(left) + says);
      }
      state.storage.grow(path, bytes);  // as long as it was, and empty
      CHECK(state.load(from, {.verify = how}).starts_with("simulated/" + path + ": "));
      state.storage.remove(path);
      CHECK(state.load(from, {.verify = how}) ==
            "simulated/" + path + ": cannot be opened: No such file or directory");
    }
  }

  TEST_CASE("a requested tensor must exist, with its type and shape") {
    small_state state;
    const found_checkpoint from = state.found();
    const auto refusal = [&](wanted_tensor wanted) {
      const std::vector<wanted_tensor> all{std::move(wanted)};
      received got(from, all);
      std::string said = "taken";
      try {
        load_checkpoint(state.storage, from, all, got);
      } catch (const argument_error& error) {
        said = error.what();
      } catch (const length_error& error) {
        said = error.what();
      }
      return said;
    };
    const std::string folder = "step-0000000010-g00000001: tensor ";
    CHECK(refusal({.name = "v"}) == folder + "\"v\" is not in this checkpoint");
    CHECK(refusal({.name = ""}) == folder + "\"\" is not in this checkpoint");
    CHECK(refusal({.name = "w\n"}) == folder + "\"w\\n\" is not in this checkpoint");
    CHECK(refusal({.name = "w", .part = {}, .type = safetensors_type::i32}) ==
          folder + "\"w\" is of type F32, but the wanted type is I32");
    CHECK(refusal({.name = "w", .part = {}, .type = {}, .shape = {{6, 4}}}) ==
          folder + "\"w\" is 4 x 6, but the wanted shape is 6 x 4");
    CHECK(refusal({.name = "n", .part = {}, .type = {}, .shape = {{1}}}) ==
          folder + "\"n\" is a single element, but the wanted shape is 1");
    CHECK(refusal({.name = "w", .part = {}, .type = {}, .shape = {std::vector<std::uint64_t>{}}}) ==
          folder + "\"w\" is 4 x 6, but the wanted shape is a single element");
    CHECK(refusal({.name = "w", .part = element_runs{0, 25, 25, 1}}) ==
          folder +
              "\"w\": elements {begin 0, run 25, stride 25, count 1}: they pass the end of the tensor, "
              "which has 24 elements");
    CHECK(refusal({.name = "w", .part = element_runs{0, 2, 1, 2}}) ==
          folder +
              "\"w\": elements {begin 0, run 2, stride 1, count 2}: runs overlap: the stride is less "
              "than the run");
  }

  TEST_CASE("elements that no rank saved are reported, and not invented") {
    simulated_storage storage;
    checkpoint_folder folder(storage);
    const std::vector<std::vector<state_tensor>> ranks{{{.name = "w",
                                                         .type = safetensors_type::f32,
                                                         .shape = {4, 6},
                                                         .group = "model",
                                                         .part = element_runs::flat_range(0, 12)}}};
    save_state(folder, 10, 64, ranks, {std::vector<std::byte>(96)}, {}, {});
    const found_checkpoint from = find_checkpoint(storage).found.value();
    const std::vector<wanted_tensor> wanted{{.name = "w"}};
    received got(from, wanted);
    CHECK_THROWS_WITH_AS(
        load_checkpoint(storage, from, wanted, got),
        "make_reshard: no stored piece has element 12 of tensor 'step-0000000010-g00000001: tensor "
        "\"w\"', which rank 0 wants",
        argument_error);
  }

  TEST_CASE("parts of packed types begin and end at bytes") {
    simulated_storage storage;
    checkpoint_folder folder(storage);
    const std::vector<state_tensor> tensors{{.name = "q", .type = safetensors_type::f4, .shape = {16}}};
    random_numbers random(3);
    const tensor_values values = random_values(random, tensors);
    save_state(folder, 10, 64, std::vector<std::vector<state_tensor>>{tensors}, values, {}, {});
    const found_checkpoint from = find_checkpoint(storage).found.value();
    for (const auto& [begin, count] :
         std::vector<std::pair<std::uint64_t, std::uint64_t>>{{0, 3}, {1, 2}, {1, 1}, {3, 13}}) {
      const std::vector<wanted_tensor> wanted{{.name = "q", .part = element_runs::flat_range(begin, count)}};
      CHECK_THROWS_WITH_AS(load_checkpoint(storage, from, wanted, [](auto...) {}),
                           "simulated/step-0000000010-g00000001/model.safetensors: q: a part of it begins or "
                           "ends inside a byte; request parts of whole bytes",
                           argument_error);
    }
    const std::vector<wanted_tensor> wanted{{.name = "q", .part = element_runs::flat_range(6, 4)}};
    received got(from, wanted);
    load_checkpoint(storage, from, wanted, got);
    CHECK(got.bytes[0] == part_of(values[0], element_runs::flat_range(6, 4), 4));
  }

  TEST_CASE("a file whose header contradicts the manifest is refused, even with right checksums") {
    const std::vector<checkpoint_tensor> w{
        {"w", safetensors_type::f32, {2}, {{0, "w", element_runs::all_of(2)}}}};
    const std::string file = "simulated/step-0000000010-g00000001/m.safetensors: ";
    const auto with_header = [&](const std::string& json, std::size_t data) {
      return made_by_hand(safetensors_file(json, data), w).refusal();
    };
    CHECK(with_header(R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8) == "taken");
    CHECK(with_header(R"({"v":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8) ==
          file + "the manifest says that tensor \"w\" is in it, but it is not");
    CHECK(with_header("{}     ", 0) == file + "the manifest says that tensor \"w\" is in it, but it is not");
    const std::string other = file + "tensor \"w\" has a type or size other than the manifest says";
    CHECK(with_header(R"({"w":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}})", 8) == other);
    CHECK(with_header(R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4) == other);
    CHECK(with_header(R"({"w":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}})", 12) == other);
    CHECK(with_header(R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 9) ==
          file + "the tensors end at byte 8 of the data, the file at 9");
    CHECK(with_header(R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})", 12)
              .starts_with(file + "tensor \"w\" has data_offsets [4, 12], after a gap"));
    CHECK(with_header("no JSON at all", 8).starts_with(file + "byte 8: "));
    CHECK(made_by_hand("1234567890", w).refusal() ==
          file + "a header of 4050765991979987505 bytes, at most 100000000 are allowed");
    CHECK(made_by_hand(std::string("\xFF\0\0\0\0\0\0\0{}", 10), w).refusal() ==
          file + "a header of 263 bytes in a file of 10");
  }

  TEST_CASE("a manifest that names another tensor or file gives its contents or nothing") {
    const std::string json = R"({"w":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}})";
    made_by_hand twice(safetensors_file(json, 8),
                       {{"w", safetensors_type::u8, {8}, {{0, "w", element_runs::all_of(8)}}},
                        {"x", safetensors_type::u8, {16}, {{0, "w", element_runs::flat_range(8, 8)}}}});
    const std::vector<wanted_tensor> wanted{{.name = "x", .part = element_runs::flat_range(8, 8)}};
    received got(*twice.found, wanted);
    load_checkpoint(twice.storage, *twice.found, wanted, got);
    CHECK(got.bytes[0] == std::vector<std::byte>(8, std::byte{'d'}));
    const std::vector<wanted_tensor> more{{.name = "x"}};
    CHECK(text_of([&] {
            load_checkpoint(twice.storage, *twice.found, more, got);
          }).starts_with("make_reshard: "));
  }

  TEST_CASE("if any call of the storage fails, the load reports it, and the next one works") {
    for (const verification how : {verification::sizes, verification::checksums}) {
      for (const std::uint32_t readers : {1U, 3U}) {
        small_state state;
        const found_checkpoint from = state.found();
        std::uint64_t failures = 0;
        for (std::uint64_t call = 1;; ++call) {
          state.storage.set_faults({{.call = {}, .first = call, .number = EIO}});
          const std::string said = state.load(from, {.verify = how, .readers = readers});
          state.storage.set_faults({});
          if (said == "right") break;
          ++failures;
          CHECK(said.starts_with("simulated/step-0000000010-g00000001/model-0000"));
          CHECK(said.ends_with(": Input/output error; a planned fault"));
          REQUIRE(state.load(from, {.verify = how, .readers = readers}) == "right");
        }
        CHECK(failures >= 8);
      }
    }
  }

  TEST_CASE("an exception of the sink reaches the caller after all readers have returned") {
    for (const verification how : {verification::sizes, verification::checksums}) {
      for (std::uint32_t readers = 1; readers <= 4; ++readers) {
        small_state state(8);
        const found_checkpoint from = state.found();
        const std::vector<wanted_tensor> wanted = state.all();
        for (const std::uint32_t bad : {0U, 1U, 2U}) {
          const auto sink = [&](std::uint32_t which, std::uint64_t, std::span<const std::byte>) {
            if (which == bad) throw std::out_of_range("enough");
          };
          CHECK_THROWS_WITH_AS(
              load_checkpoint(state.storage, from, wanted, sink, {.verify = how, .readers = readers}),
              "enough", std::out_of_range);
        }
      }
    }
  }

  TEST_CASE("each rank's extras are restored and verified") {
    simulated_storage storage;
    checkpoint_folder folder(storage);
    const std::vector<std::vector<state_tensor>> ranks(2);
    const std::vector<checkpoint_extra> extras{{"seed", {std::byte{1}, std::byte{2}}}, {"nothing", {}}};
    save_state(folder, 10, 64, ranks, {}, extras, {});
    const found_checkpoint from = find_checkpoint(storage).found.value();
    for (const std::uint32_t rank : {0U, 1U}) {
      CHECK(load_extra(storage, from, rank, "seed") == extras[0].bytes);
      CHECK(load_extra(storage, from, rank, "nothing") == extras[1].bytes);
      CHECK_FALSE(load_extra(storage, from, rank, "see"));
    }
    CHECK_FALSE(load_extra(storage, from, 2, "seed"));
    const std::string file = from.folder + "/extra-rank-00002-of-00002.safetensors";
    storage.flip(file, (storage.files().at(file).size() - 1) * 8);
    CHECK(load_extra(storage, from, 0, "seed") == extras[0].bytes);
    CHECK(text_of([&] {
            static_cast<void>(load_extra(storage, from, 1, "seed"));
          }).starts_with("simulated/" + file + ": bytes 4096 to 4098 are damaged: "));
  }

  TEST_CASE("an extra with a false length takes no memory for it") {
    const std::string json = R"({"rank.0/x":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}})";
    const element_runs eight = element_runs::flat_range(0, 8);
    for (const std::vector<checkpoint_piece>& pieces :
         {std::vector<checkpoint_piece>{},
          {{0, "rank.0/x", eight}},
          {{0, "rank.0/x", eight}, {0, "rank.0/x", element_runs::flat_range(8, 8)}}}) {
      made_by_hand made(safetensors_file(json, 8),
                        {{"rank.0/x", safetensors_type::u8, {std::uint64_t{1} << 61}, pieces}});
      CHECK_THROWS_WITH_AS(static_cast<void>(load_extra(made.storage, *made.found, 0, "x")),
                           "step-0000000010-g00000001: extra \"rank.0/x\" is not in one piece", format_error);
    }
  }
}
