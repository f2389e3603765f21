// What the program saves is read without the library, from what is published of its files' format.
#include <llmmem/checkpoint/load.hpp>
#include <llmmem/checkpoint/posix_storage.hpp>
#include <llmmem/checkpoint/search.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "support/child_process.hpp"
#include "support/temporary_folder.hpp"

using namespace llmmem_tests;

namespace {

constexpr const char* script = LLMMEM_SOURCE_DIR "/tests/checkpoint/read_safetensors.py";

int python(const std::vector<std::string>& arguments, const std::string& out, const std::string& notes) {
  std::vector<std::string> all{"python3"};
  all.insert(all.end(), arguments.begin(), arguments.end());
  child_process child("/usr/bin/env", all, out, notes);
  return child.wait().status;
}

/// A tensor as `load_checkpoint` gives it.
struct loaded_tensor {
  std::string said;  // type, shape and bytes, as the reader in Python says them
  std::string bytes;
};

/// All tensors but extras, by name.
template <class Storage>
std::map<std::string, loaded_tensor> load_all(Storage& storage, const llmmem::found_checkpoint& found) {
  std::map<std::string, loaded_tensor> all;
  for (const llmmem::checkpoint_tensor& each : found.manifest.tensors) {
    if (each.name.starts_with("rank.")) continue;
    loaded_tensor loaded;
    loaded.bytes.resize(static_cast<std::size_t>(llmmem::bytes_of(each.type, elements_of(each), each.name)));
    const llmmem::wanted_tensor wanted[] = {{.name = each.name, .part = {}, .type = {}, .shape = {}}};
    llmmem::load_checkpoint(storage, found, wanted,
                            [&](std::uint32_t, std::uint64_t offset, std::span<const std::byte> bytes) {
                              std::memcpy(loaded.bytes.data() + offset, bytes.data(), bytes.size());
                            });
    loaded.said = std::string(name_of(each.type)) + " ";
    for (std::size_t i = 0; i < each.shape.size(); ++i)
      loaded.said += (i == 0 ? "" : ",") + std::to_string(each.shape[i]);
    loaded.said += " " + std::to_string(loaded.bytes.size());
    all[each.name] = std::move(loaded);
  }
  return all;
}

bool has_a_value(const loaded_tensor& tensor) {
  return std::any_of(tensor.bytes.begin(), tensor.bytes.end(), [](char c) { return c != 0; });
}

}  // namespace

TEST_CASE("Python reads the weights and both of Adam's moments that a run saved, byte for byte") {
  const temporary_folder folder;
  const std::string notes = folder.file("notes");
  if (python({"-c", "pass"}, folder.file("out"), notes) != 0) {
    MESSAGE("not tested: there is no python3");
    return;
  }
  {
    child_process child(
        std::string(LLMMEM_EXAMPLES_DIR) + "/train_gpt",
        {"--layers", "2", "--width", "32", "--heads", "2", "--context", "16", "--batch", "2", "--steps", "3",
         "--threads", "1", "--text", LLMMEM_SOURCE_DIR "/README.md", "--checkpoint-dir", folder.file("run")},
        folder.file("out"), notes);
    REQUIRE(child.wait().status == 0);
  }
  llmmem::posix_storage<> storage(folder.file("run"));
  const llmmem::checkpoint_search search = llmmem::find_checkpoint(storage);
  REQUIRE(search.found);
  CHECK(search.found->id.step == 3);
  const std::map<std::string, loaded_tensor> all = load_all(storage, *search.found);

  const std::string saved = storage.path(search.found->folder);
  const std::string bytes = folder.file("bytes");
  const std::string out = folder.file("lines");
  const int status = python({script, saved, bytes, "model.safetensors", "optimizer.safetensors"}, out, notes);
  CAPTURE(contents_of(notes));
  REQUIRE(status == 0);
  const std::vector<std::string> lines = lines_of(contents_of(out));
  const std::string read = contents_of(bytes);
  REQUIRE(lines.size() == all.size() + 1);  // the last is a note
  MESSAGE(lines.back());
  std::size_t line = 0;
  std::size_t at = 0;
  std::size_t weights = 0;
  for (const auto& [name, tensor] : all) {
    CAPTURE(name);
    const std::string& told = lines[line++];
    CHECK(told.substr(0, told.rfind(' ')) == name + " " + tensor.said);  // behind it is a checksum
    REQUIRE(read.size() >= at + tensor.bytes.size());
    CHECK(std::string_view(read).substr(at, tensor.bytes.size()) == tensor.bytes);
    at += tensor.bytes.size();
    if (name.starts_with("mean.") || name.starts_with("variance.")) continue;
    ++weights;
    REQUIRE(all.count("mean." + name) == 1);
    REQUIRE(all.count("variance." + name) == 1);
    CHECK(has_a_value(all.at("mean." + name)));
    CHECK(has_a_value(all.at("variance." + name)));
    CHECK(all.at("mean." + name).said == tensor.said);
    CHECK(all.at("variance." + name).said == tensor.said);
  }
  CHECK(read.size() == at);
  CHECK(all.size() == 3 * weights);
  CHECK(weights > 20);
  CHECK(python({script, saved, bytes, "model.safetensors", "model.safetensors"}, out, notes) !=
        0);  // it can fail
}
