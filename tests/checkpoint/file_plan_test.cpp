#include <llmmem/checkpoint/file_plan.hpp>
#include <llmmem/model/safetensors.hpp>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/manifests.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

safetensors_header header_of(const planned_file& file) {
  return read_safetensors(std::as_bytes(std::span(file.head)), file.bytes, file.name);
}

std::vector<std::string> names_of(const file_plan& plan) {
  std::vector<std::string> names;
  for (const planned_file& each : plan.files)
    names.push_back(each.name);
  return names;
}

const planned_file& file_called(const file_plan& plan, const std::string& name) {
  const auto found = std::find_if(plan.files.begin(), plan.files.end(),
                                  [&](const planned_file& each) { return each.name == name; });
  REQUIRE(found != plan.files.end());
  return *found;
}

/// Bytes of what a rank has of a tensor.
std::uint64_t bytes_here(const state_tensor& tensor) {
  const std::uint64_t elements = tensor_shape::of(tensor.shape).elements();
  return bytes_of(tensor.type, tensor.part ? tensor.part->elements() : elements, tensor.name);
}

template <class Work>
std::string refusal(Work work) {
  try {
    work();
  } catch (const argument_error& error) {
    return error.what();
  } catch (const length_error& error) {
    return error.what();
  }
  return "taken";
}

std::string refusal_of(std::vector<state_tensor> tensors, const file_plan_options& options = {}) {
  return refusal([&] { static_cast<void>(plan_files(tensors, options)); });
}

state_tensor tensor(std::string name, std::vector<std::uint64_t> shape,
                    safetensors_type type = safetensors_type::u8) {
  return {.name = std::move(name), .type = type, .shape = std::move(shape)};
}

/// What the plan must be by the definition alone: each byte of each file is its head's or one tensor's, each
/// byte of each part in one place, of the entry of its name; shards are filled in order.
void check_against_definition(std::span<const state_tensor> tensors, const file_plan_options& options) {
  const file_plan plan = plan_files(tensors, options);
  std::vector<std::uint64_t> planned(tensors.size());
  std::uint64_t total = 0;
  std::set<std::string> names;
  for (const planned_file& file : plan.files) {
    CAPTURE(file.name);
    CHECK(names.insert(file.name).second);
    total += file.bytes;
    if (file.name.ends_with(".json")) {
      CHECK(file.spans.empty());
      CHECK(file.head.size() == file.bytes);
      continue;
    }
    const safetensors_header header = header_of(file);
    CHECK(header.data_begin % options.data_alignment == 0);
    std::uint64_t at = file.head.size();
    CHECK(at == header.data_begin);
    for (const planned_span& span : file.spans) {
      REQUIRE(span.begin == at);
      REQUIRE(span.bytes > 0);
      const auto entry =
          std::find_if(header.entries.begin(), header.entries.end(),
                       [&](const safetensors_entry& each) { return each.name == tensors[span.tensor].name; });
      REQUIRE(entry != header.entries.end());
      REQUIRE(entry->begin + header.data_begin + span.offset == span.begin);
      REQUIRE(entry->type == tensors[span.tensor].type);
      REQUIRE(span.offset == planned[span.tensor]);
      planned[span.tensor] += span.bytes;
      at += span.bytes;
    }
    CHECK(at == file.bytes);
  }
  CHECK(plan.bytes == total);
  REQUIRE(plan.tensors.size() == tensors.size());
  std::map<std::string, std::vector<std::uint32_t>> files_of_group;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    CAPTURE(i);
    CHECK(planned[i] == bytes_here(tensors[i]));
    const checkpoint_tensor& described = plan.tensors[i];
    CHECK(described.name == tensors[i].name);
    CHECK(described.type == tensors[i].type);
    CHECK(described.shape == tensors[i].shape);
    if (tensors[i].part && tensors[i].part->empty()) {
      CHECK(described.pieces.empty());
      continue;
    }
    REQUIRE(described.pieces.size() == 1);
    const checkpoint_piece& piece = described.pieces[0];
    const auto all = element_runs::all_of(tensor_shape::of(tensors[i].shape).elements());
    CHECK(piece.runs == tensors[i].part.value_or(all));
    CHECK(piece.entry == tensors[i].name);
    REQUIRE(piece.file < plan.files.size());
    const planned_file& file = plan.files[piece.file];
    CHECK(file.name.starts_with(tensors[i].group));
    files_of_group[tensors[i].group].push_back(piece.file);
    const safetensors_header header = header_of(file);
    const bool is_in_it =
        std::any_of(header.entries.begin(), header.entries.end(),
                    [&](const safetensors_entry& each) { return each.name == tensors[i].name; });
    CHECK(is_in_it);
    const std::string key = "llmmem.part:" + tensors[i].name;
    const bool is_told = std::any_of(header.metadata.begin(), header.metadata.end(),
                                     [&](const auto& each) { return each.first == key; });
    CHECK(is_told == tensors[i].part.has_value());
  }
  for (auto& [group, files] : files_of_group) {
    CHECK(std::is_sorted(files.begin(), files.end()));  // in their order
    files.erase(std::unique(files.begin(), files.end()), files.end());
    for (std::size_t shard = 0; shard < files.size(); ++shard) {
      const planned_file& file = plan.files[files[shard]];
      const std::uint64_t bytes = file.bytes - file.head.size();
      if (file.spans.size() > 1) CHECK(bytes <= options.max_shard_bytes);
      // The next one was begun because its first tensor did not fit.
      if (shard + 1 == files.size()) continue;
      const auto next =
          std::find_if(plan.tensors.begin(), plan.tensors.end(), [&](const checkpoint_tensor& each) {
            return !each.pieces.empty() && each.pieces[0].file == files[shard + 1];
          });
      const auto first = static_cast<std::size_t>(next - plan.tensors.begin());
      CHECK(bytes + bytes_here(tensors[first]) > options.max_shard_bytes);
    }
  }
}

}  // namespace

TEST_SUITE("file plan") {
  TEST_CASE("every byte of every file belongs to its head or to exactly one tensor") {
    for (const auto seed : seeds(300)) {
      CAPTURE(seed);
      random_numbers random(seed);
      std::vector<state_tensor> tensors;
      constexpr const char* groups[] = {"model", "optimizer", "a b"};
      for (std::uint64_t i = random.below(9U); i > 0; --i) {
        state_tensor made{.name = "t" + std::to_string(i) + (random.once_in(4) ? "\"\n\xC3\xBC" : "")};
        made.type = static_cast<safetensors_type>(random.below(safetensors_types));
        for (std::uint64_t k = random.below(4U); k > 0; --k)
          made.shape.push_back(random.once_in(10) ? 0 : 1 + random.below(7U));
        if (bits_of(made.type) < 8) made.shape = {random.below(5U), 8};
        made.group = groups[random.below(3U)];
        const tensor_shape shape = tensor_shape::of(made.shape);
        if (random.once_in(2)) {
          made.part = bits_of(made.type) < 8 ? element_runs::rows(shape, {0, random.below(shape.rows() + 1)})
                                             : random_runs(random, shape);
        }
        tensors.push_back(std::move(made));
      }
      const auto world = static_cast<std::uint32_t>(1 + random.below(3U));
      check_against_definition(tensors,
                               {.max_shard_bytes = random.below(300U),
                                .data_alignment = std::uint64_t{8} << random.below(6U),
                                .rank = static_cast<std::uint32_t>(random.below(std::uint64_t{world})),
                                .world = world});
    }
  }

  TEST_CASE("a single shard has the name of Hugging Face's tools, and no index") {
    const std::vector<state_tensor> tensors{tensor("w", {4}, safetensors_type::f32), tensor("b", {2})};
    const file_plan plan = plan_files(tensors, {});
    CHECK(names_of(plan) == std::vector<std::string>{"model.safetensors"});
    CHECK(plan.files[0].bytes == 4096 + 18);
    CHECK(header_of(plan.files[0]).metadata == safetensors_metadata{{"format", "pt"}});
    CHECK(plan.files[0].spans.size() == 2);
    CHECK(plan_files({}, {}).files.empty());
    CHECK(plan_files({}, {}).bytes == 0);
  }

  TEST_CASE("several shards have an index that says where each tensor is") {
    std::vector<state_tensor> tensors{tensor("b\"\n", {40}), tensor("a", {50}), tensor("large", {1000}),
                                      tensor("c", {60}),     tensor("d", {40}), tensor("e", {1})};
    const file_plan plan = plan_files(tensors, {.max_shard_bytes = 100});
    CHECK(names_of(plan) ==
          std::vector<std::string>{"model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors",
                                   "model-00003-of-00004.safetensors", "model-00004-of-00004.safetensors",
                                   "model.safetensors.index.json"});
    CHECK(plan.files.back().head ==
          "{\n  \"metadata\": {\n    \"total_size\": 1191\n  },\n  \"weight_map\": {\n"
          "    \"a\": \"model-00001-of-00004.safetensors\",\n"
          "    \"b\\\"\\n\": \"model-00001-of-00004.safetensors\",\n"
          "    \"c\": \"model-00003-of-00004.safetensors\",\n"
          "    \"d\": \"model-00003-of-00004.safetensors\",\n"
          "    \"e\": \"model-00004-of-00004.safetensors\",\n"
          "    \"large\": \"model-00002-of-00004.safetensors\"\n  }\n}\n");
    const auto index = nlohmann::json::parse(plan.files.back().head);
    CHECK(index["metadata"]["total_size"] == 1191);
    CHECK(index["weight_map"].size() == tensors.size());
    for (const state_tensor& each : tensors) {
      const safetensors_header header = header_of(file_called(plan, index["weight_map"][each.name]));
      CHECK(std::count_if(header.entries.begin(), header.entries.end(),
                          [&](const safetensors_entry& one) { return one.name == each.name; }) == 1);
    }
    // The last byte that fits, and the first that does not.
    CHECK(plan_files(tensors, {.max_shard_bytes = 1191}).files.size() == 1);
    CHECK(plan_files(tensors, {.max_shard_bytes = 1190}).files.size() == 3);
    // None is too small: each tensor alone.
    CHECK(plan_files(tensors, {.max_shard_bytes = 0}).files.size() == 7);
  }

  TEST_CASE("each group has its own files, and each of several ranks its own") {
    std::vector<state_tensor> tensors{tensor("w", {60}), tensor("m", {60}), tensor("v", {60})};
    tensors[1].group = tensors[2].group = "optimizer";
    CHECK(names_of(plan_files(tensors, {.max_shard_bytes = 100})) ==
          std::vector<std::string>{"model.safetensors", "optimizer-00001-of-00002.safetensors",
                                   "optimizer-00002-of-00002.safetensors",
                                   "optimizer.safetensors.index.json"});
    CHECK(names_of(plan_files(tensors, {.max_shard_bytes = 100, .rank = 2, .world = 16})) ==
          std::vector<std::string>{"model-rank-00003-of-00016.safetensors",
                                   "optimizer-rank-00003-of-00016-00001-of-00002.safetensors",
                                   "optimizer-rank-00003-of-00016-00002-of-00002.safetensors"});
  }

  TEST_CASE("a part has its own shape, and the file describes the part") {
    const auto of_part = [](std::vector<std::uint64_t> shape, element_runs part) {
      state_tensor made = tensor("w", std::move(shape), safetensors_type::f32);
      made.part = part;
      const file_plan plan = plan_files({&made, 1}, {.rank = 1, .world = 4});
      const safetensors_header header = header_of(plan.files.at(0));
      REQUIRE(header.metadata.size() == 2);
      CHECK(header.metadata[0] == std::pair<std::string, std::string>("format", "pt"));
      CHECK(header.metadata[1].first == "llmmem.part:w");
      return std::pair(header.entries.at(0).shape, header.metadata[1].second);
    };
    using expected = std::pair<std::vector<std::uint64_t>, std::string>;
    const tensor_shape matrix = tensor_shape::matrix(8, 6);
    CHECK(of_part({8, 6}, element_runs::all_of(48)) ==
          expected({8, 6}, "shape 8 6 begin 0 run 48 stride 48 count 1"));
    CHECK(of_part({8, 6}, element_runs::rows(matrix, {2, 3})) ==
          expected({3, 6}, "shape 8 6 begin 12 run 18 stride 18 count 1"));
    CHECK(of_part({8, 6}, element_runs::columns(matrix, {2, 3})) ==
          expected({8, 3}, "shape 8 6 begin 2 run 3 stride 6 count 8"));
    CHECK(of_part({8, 6}, element_runs::box(matrix, {1, 2}, {2, 3})) ==
          expected({2, 3}, "shape 8 6 begin 8 run 3 stride 6 count 2"));
    CHECK(of_part({8, 6}, element_runs::flat_range(5, 9)) ==
          expected({9}, "shape 8 6 begin 5 run 9 stride 9 count 1"));
    // Runs at a row's distance that go across the ends of rows are no columns.
    CHECK(of_part({8, 6}, {4, 3, 6, 2}) == expected({6}, "shape 8 6 begin 4 run 3 stride 6 count 2"));
    CHECK(of_part({8, 6}, {0, 3, 12, 2}) == expected({6}, "shape 8 6 begin 0 run 3 stride 12 count 2"));
    CHECK(of_part({4, 2, 3},
                  element_runs::rows(tensor_shape::of(std::vector<std::uint64_t>{4, 2, 3}), {1, 2})) ==
          expected({2, 2, 3}, "shape 4 2 3 begin 6 run 12 stride 12 count 1"));
    CHECK(of_part({10}, element_runs::flat_range(3, 4)) ==
          expected({4}, "shape 10 begin 3 run 4 stride 4 count 1"));
    CHECK(of_part({}, element_runs::all_of(1)) == expected({}, "shape begin 0 run 1 stride 1 count 1"));
  }

  TEST_CASE("tensors without elements and scalars are in the files; parts without elements are not") {
    std::vector<state_tensor> tensors{tensor("none", {0, 3}), tensor("one", {}, safetensors_type::i64),
                                      tensor("elsewhere", {4})};
    tensors[2].part = element_runs{};
    const file_plan plan = plan_files(tensors, {});
    const safetensors_header header = header_of(plan.files.at(0));
    REQUIRE(header.entries.size() == 2);
    CHECK(header.entries[0].shape.empty());
    CHECK(header.entries[0].bytes() == 8);
    CHECK(header.entries[1].shape == std::vector<std::uint64_t>{0, 3});
    CHECK(plan.files[0].spans.size() == 1);
    CHECK(plan.tensors[0].pieces.size() == 1);
    CHECK(plan.tensors[2].pieces.empty());
    // Alone, it makes no file at all.
    CHECK(plan_files(std::span(tensors).subspan(2), {}).files.empty());
  }

  TEST_CASE("types of less than a byte fill whole bytes") {
    CHECK(bytes_of(safetensors_type::f4, 0, "x") == 0);
    CHECK(bytes_of(safetensors_type::f4, 6, "x") == 3);
    CHECK(bytes_of(safetensors_type::f6_e2m3, 4, "x") == 3);
    CHECK(bytes_of(safetensors_type::f6_e3m2, 20, "x") == 15);
    CHECK(bytes_of(safetensors_type::bf16, 3, "x") == 6);
    CHECK(bytes_of(safetensors_type::c64, 3, "x") == 24);
    CHECK(bytes_of(safetensors_type::f4, max_bytes - 1, "x") == (max_bytes - 1) / 2);
    CHECK(refusal([] {
            static_cast<void>(bytes_of(safetensors_type::f64, max_bytes / 8 + 1, "x"));
          }).starts_with("x: "));
    CHECK(refusal([] { static_cast<void>(bytes_of(safetensors_type::f6_e2m3, 6, "x")); }) ==
          "x: 6 elements of 6 bits do not fill whole bytes");
    CHECK(refusal_of({tensor("q", {3}, safetensors_type::f4)}) ==
          "file plan: tensor \"q\": 3 elements of 4 bits do not fill whole bytes");
    state_tensor part = tensor("q", {8}, safetensors_type::f4);
    part.part = element_runs::flat_range(0, 3);
    CHECK(refusal_of({part}) == "file plan: tensor \"q\": 3 elements of 4 bits do not fill whole bytes");
  }

  TEST_CASE("an impossible plan is refused by name") {
    const state_tensor fine = tensor("w", {4});
    const auto changed = [&](auto change) {
      state_tensor made = fine;
      change(made);
      return refusal_of({made});
    };
    CHECK(refusal_of({fine, fine}) == "file plan: tensor \"w\" occurs twice");
    CHECK(refusal_of({fine}, {.rank = 2, .world = 2}) == "file plan: rank 2 of a world of 2");
    CHECK(refusal_of({fine}, {.rank = 0, .world = 0}) == "file plan: rank 0 of a world of 0");
    CHECK(refusal_of({fine}, {.data_alignment = 12}) ==
          "safetensors: a data alignment of 12; it must be a multiple of 8");
    CHECK(changed([](auto& t) { t.name = "\xFF"; }) ==
          "file plan: tensor (a name that is not UTF-8): the name must be UTF-8");
    CHECK(changed([](auto& t) { t.name = "rank.0/seed"; }) ==
          "file plan: tensor \"rank.0/seed\": names that begin with \"rank.\" are reserved for extras");
    CHECK(changed([](auto& t) { t.name = "__metadata__"; }) ==
          "safetensors: a tensor called \"__metadata__\", which readers take for something else");
    for (const std::string& group :
         std::vector<std::string>{"", ".", "..", ".tmp-x", "a/b", "extra", "MANIFEST.json",
                                  std::string(65, 'x'), std::string("a\0b", 3)}) {
      const std::string said = changed([&](auto& t) { t.group = group; });
      CHECK(said.starts_with("file plan: tensor \"w\": group \""));
      CHECK(
          said.ends_with(" cannot name a file: use a plain name of at most 64 bytes, other than \"extra\""));
    }
    CHECK(changed([](auto& t) { t.group = std::string(64, 'x'); }) == "taken");
    CHECK(changed([](auto& t) { t.part = element_runs{0, 5, 5, 1}; }) ==
          "file plan: tensor \"w\": elements {begin 0, run 5, stride 5, count 1}: they pass the end of the "
          "tensor, which has 4 elements");
    CHECK(
        changed([](auto& t) { t.part = element_runs{0, 2, 1, 2}; }) ==
        "file plan: tensor \"w\": elements {begin 0, run 2, stride 1, count 2}: runs overlap: the stride is "
        "less than the run");
    CHECK(changed([](auto& t) {
            t.shape = {std::uint64_t{1} << 40, std::uint64_t{1} << 40};
          }).starts_with("tensor_shape: rows x columns: "));
    CHECK(changed([](auto& t) {
            t.shape = {std::uint64_t{1} << 62};
            t.type = safetensors_type::f64;
          }).starts_with("file plan: tensor \"w\": 4611686018427387904 x 8 exceeds"));
    // The format's reader counts bits, and takes no more than 2^63 - 1 of them.
    CHECK(refusal_of({tensor("v", {std::uint64_t{1} << 62})}) ==
          "safetensors: tensor \"v\" has a shape whose bytes pass 2^63 - 1, or are not a whole number");
  }

  TEST_CASE("groups whose files would have the same name are refused when they are planned") {
    std::vector<state_tensor> tensors{tensor("a", {60}), tensor("b", {60}), tensor("c", {1})};
    tensors[2].group = "model-00002-of-00002";
    CHECK(refusal_of(tensors, {.max_shard_bytes = 100}) ==
          "file plan: two groups have a file \"model-00002-of-00002.safetensors\"; rename one of them");
    CHECK(refusal_of(tensors, {.max_shard_bytes = 1000}) == "taken");
  }

  TEST_CASE("extras are U8 tensors of their own file, completely in its head") {
    const std::vector<checkpoint_extra> extras{
        {"seed", {std::byte{1}, std::byte{0}, std::byte{255}}}, {"nothing", {}}, {"a", {std::byte{7}}}};
    const file_plan plan = plan_extras(extras, {.data_alignment = 64, .rank = 3, .world = 4});
    CHECK(names_of(plan) == std::vector<std::string>{"extra-rank-00004-of-00004.safetensors"});
    CHECK(names_of(plan_extras(extras, {})) == std::vector<std::string>{"extra.safetensors"});
    const planned_file& file = plan.files[0];
    CHECK(file.spans.empty());
    CHECK(file.head.size() == file.bytes);
    CHECK(plan.bytes == file.bytes);
    const safetensors_header header = header_of(file);
    REQUIRE(header.entries.size() == 3);
    for (std::size_t i = 0; i < extras.size(); ++i) {
      const std::string name = "rank.3/" + extras[i].name;
      CHECK(extra_name(3, extras[i].name) == name);
      const auto entry = std::find_if(header.entries.begin(), header.entries.end(),
                                      [&](const safetensors_entry& each) { return each.name == name; });
      REQUIRE(entry != header.entries.end());
      CHECK(entry->type == safetensors_type::u8);
      CHECK(entry->shape == std::vector<std::uint64_t>{extras[i].bytes.size()});
      const auto bytes =
          std::as_bytes(std::span(file.head)).subspan(header.data_begin + entry->begin, entry->bytes());
      CHECK(std::equal(bytes.begin(), bytes.end(), extras[i].bytes.begin(), extras[i].bytes.end()));
      CHECK(plan.tensors[i].name == name);
      CHECK(plan.tensors[i].pieces ==
            std::vector<checkpoint_piece>{{0, name, element_runs::all_of(extras[i].bytes.size())}});
    }
    CHECK(plan_extras({}, {}).files.empty());
    const std::vector<checkpoint_extra> twice{{"a", {}}, {"a", {}}};
    CHECK(refusal([&] { static_cast<void>(plan_extras(twice, {})); }) ==
          "safetensors: tensor \"rank.0/a\" occurs twice");
    const std::vector<checkpoint_extra> bad{{"\xFF", {}}};
    CHECK(refusal([&] { static_cast<void>(plan_extras(bad, {})); }) ==
          "safetensors: a tensor's name that is not UTF-8");
  }
}
