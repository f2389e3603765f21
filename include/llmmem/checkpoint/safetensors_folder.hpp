/// @file
/// `safetensors_folder`: a model as published on Hugging Face, opened by its index as one checkpoint.
#pragma once

#include <llmmem/checkpoint/detail/manifest_check.hpp>
#include <llmmem/checkpoint/load.hpp>
#include <llmmem/checkpoint/manifest.hpp>
#include <llmmem/checkpoint/posix_storage.hpp>
#include <llmmem/checkpoint/search.hpp>
#include <llmmem/checkpoint/storage_ref.hpp>
#include <llmmem/config.hpp>
#include <llmmem/detail/json_reader.hpp>
#include <llmmem/error.hpp>
#include <llmmem/model/safetensors.hpp>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The names that Hugging Face's tools give to an index of shards, and to a model in a single file.
inline constexpr std::string_view published_index = "model.safetensors.index.json";
inline constexpr std::string_view published_file = "model.safetensors";

namespace detail {

/// The shard that holds a tensor, according to an index.
struct indexed_tensor {
  std::string name{};
  std::string shard{};
};

/// Reads an index as untrusted input: names must be unique, and shards must be names of files in the same
/// folder.
/// @throws format_error  the text names the tensor, and what is wrong with its entry.
[[nodiscard]] inline std::vector<indexed_tensor> read_weight_map(std::string_view text,
                                                                 const std::string& what) {
  if (text.starts_with("version https://git-lfs"))
    throw format_error(what + ": it is a Git LFS pointer; fetch the file itself: git lfs pull");
  json_reader json(text, 0, what);
  std::vector<indexed_tensor> all;
  bool has_map = false;
  json.object([&](const std::string& key) {
    if (key != "weight_map") return json.skip(32);
    if (std::exchange(has_map, true)) json.refuse("\"weight_map\" occurs twice");
    json.object([&](std::string name) {
      std::string shard = json.string();
      if (!is_plain_name(shard)) {
        json.refuse("tensor " + json_quoted(name) + " is said to be in " + json_quoted(shard) +
                    ", which is not the name of a file in this folder");
      }
      all.push_back({std::move(name), std::move(shard)});
    });
  });
  json.expect_end();
  if (!has_map) throw format_error(what + ": it has no \"weight_map\", which maps tensors to files");
  std::ranges::sort(all, {}, &indexed_tensor::name);
  const auto twice = std::ranges::adjacent_find(all, {}, &indexed_tensor::name);
  if (twice != all.end()) {
    throw format_error(what + ": tensor " + json_quoted(twice->name) + " occurs twice, in " +
                       json_quoted(twice->shard) + " and " + json_quoted((twice + 1)->shard));
  }
  return all;
}

[[nodiscard]] inline std::string read_text(storage_ref storage, const std::string& path) {
  const auto input = storage.open(path);
  if (input.bytes() > max_manifest_bytes) {
    throw format_error(storage.path(path) + ": has " + std::to_string(input.bytes()) +
                       " bytes, but an index has at most " + std::to_string(max_manifest_bytes));
  }
  std::string text(static_cast<std::size_t>(input.bytes()), '\0');
  input.read(0, std::as_writable_bytes(std::span(text.data(), text.size())));
  return text;
}

/// The header of a file, and the file's length.
struct opened_shard {
  std::string name{};
  safetensors_header header{};
  std::uint64_t bytes = 0;
};

[[nodiscard]] inline opened_shard open_shard(storage_ref storage, const std::string& name) {
  const auto input = storage.open(name);
  const std::string what = storage.path(name);
  std::vector<std::byte> begin(static_cast<std::size_t>(std::min<std::uint64_t>(8, input.bytes())));
  input.read(0, begin);
  begin.resize(static_cast<std::size_t>(std::min(safetensors_header_bytes(begin, what), input.bytes())));
  input.read(0, begin);
  return {name, read_safetensors(begin, input.bytes(), what), input.bytes()};
}

/// Adds the tensors of a shard to the result. @param wanted their entries, sorted by name; null: all tensors
/// of the shard.
inline void add_shard(found_checkpoint& to, const opened_shard& shard,
                      const std::vector<const indexed_tensor*>* wanted, const std::string& index) {
  const auto file = static_cast<std::uint32_t>(to.manifest.files.size());
  to.manifest.files.push_back(
      {.name = shard.name, .bytes = shard.bytes, .rank = 0, .crc32c = 0, .chunks = {}});
  const auto add = [&](const safetensors_entry& entry) {
    std::uint64_t elements = 1;
    for (const std::uint64_t each : entry.shape)
      elements *= each;  // cannot overflow: the bytes were checked
    to.manifest.tensors.push_back(
        {entry.name, entry.type, entry.shape, {{file, entry.name, element_runs::all_of(elements)}}});
  };
  std::vector<const safetensors_entry*> by_name;
  by_name.reserve(shard.header.entries.size());
  for (const safetensors_entry& each : shard.header.entries)
    by_name.push_back(&each);
  const auto name_of_entry = [](const safetensors_entry* each) -> const std::string& { return each->name; };
  std::ranges::sort(by_name, {}, name_of_entry);
  if (wanted == nullptr) {
    for (const safetensors_entry* const each : by_name)
      add(*each);
    return;
  }
  for (const indexed_tensor* const each : *wanted) {
    const auto found = std::ranges::lower_bound(by_name, each->name, {}, name_of_entry);
    if (found == by_name.end() || (*found)->name != each->name) {
      throw format_error(index + ": tensor " + json_quoted(each->name) + " is said to be in " +
                         json_quoted(shard.name) +
                         ", which does not have it: the index belongs to other files");
    }
    add(**found);
  }
}

}  // namespace detail

/// Opens a folder of safetensors files by its index, or by the single file of a model without one, as a
/// checkpoint without checksums: `load_checkpoint` loads its tensors by name, completely or in parts, with
/// `verification::sizes`; so do `load_into` and every function that takes a `found_checkpoint`.
///
/// Ignores files that the index does not name. Each shard that it names must exist, and have its tensors.
/// Reads only headers.
///
/// @param storage  the folder's. @param index the index's name.
/// @throws format_error   for an invalid index, one that names a tensor twice, a shard outside the folder, or
///                        a tensor that is not in its shard; and for a shard that is not a safetensors file.
///                        The text names each.
/// @throws storage_error  for a missing shard, whose text names a tensor that should be in it, and for a
///                        folder with neither an index nor a `model.safetensors`.
/// @par Complexity   O(n log n) for n tensors.
[[nodiscard]] inline found_checkpoint open_safetensors_folder(storage_ref storage,
                                                              std::string_view index = published_index) {
  found_checkpoint found;
  found.folder = {};
  found.manifest.world = 1;
  found.manifest.chunk_bytes = std::uint64_t{4} << 20;
  const std::string path(index);
  std::string text;
  try {
    text = detail::read_text(storage, path);
  } catch (const storage_error& error) {
    if (error.number() != ENOENT || index != published_index) throw;
    try {
      detail::add_shard(found, detail::open_shard(storage, std::string(published_file)), nullptr, {});
      return found;
    } catch (const storage_error& other) {
      if (other.number() != ENOENT) throw;
      throw storage_error(
          storage_call::open, storage.path(path), ENOENT,
          "and there is no " + std::string(published_file) + ": this is not the folder of a published model");
    }
  }
  const std::string what = storage.path(path);
  const std::vector<detail::indexed_tensor> tensors = detail::read_weight_map(text, what);
  std::vector<const detail::indexed_tensor*> by_shard;
  by_shard.reserve(tensors.size());
  for (const detail::indexed_tensor& each : tensors)
    by_shard.push_back(&each);
  std::ranges::sort(by_shard, [](const auto* a, const auto* b) {
    const int order = a->shard.compare(b->shard);
    // The addresses compare, because all are in one array, sorted by name.
    return order != 0 ? order < 0 : a < b;
  });
  for (auto first = by_shard.begin(); first != by_shard.end();) {
    const std::string& shard = (*first)->shard;
    const auto last =
        std::find_if(first, by_shard.end(), [&](const auto* each) { return each->shard != shard; });
    try {
      const std::vector<const detail::indexed_tensor*> wanted(first, last);
      detail::add_shard(found, detail::open_shard(storage, shard), &wanted, what);
    } catch (const storage_error& error) {
      if (error.number() != ENOENT) throw;
      throw storage_error(storage_call::open, storage.path(shard), ENOENT,
                          "the index says that " + std::to_string(last - first) + " tensors are in it, " +
                              detail::json_quoted((*first)->name) + " among them: download it");
    }
    first = last;
  }
  std::ranges::sort(found.manifest.tensors, {}, &checkpoint_tensor::name);
  return found;
}

/// A model as published on Hugging Face: `model.safetensors.index.json` and its shards, or one
/// `model.safetensors`; also in the hub's cache, where files are symbolic links.
///
///     const safetensors_folder model("/models/llama");
///     const checkpoint_tensor* head = model.find("lm_head.weight");
///     const wanted_tensor wanted[] = {{.name = "lm_head.weight", .part = rows}};
///     model.load(wanted, sink);                             // as load_checkpoint
///     load_into(model.storage(), model.found(), described, tensors);   // or into tiers, with sizes
///
/// The format has no checksums, so loads trust the bytes. `safetensors_file` maps one file, for use without a
/// copy.
///
/// @par Complexity      as `open_safetensors_folder`; `find` O(log n).
/// @par Thread safety   const throughout, except `load`: one thread at a time.
/// @par Errors          as `open_safetensors_folder` and `load_checkpoint`.
class safetensors_folder {
 public:
  explicit safetensors_folder(const std::string& path, std::string_view index = published_index)
      : storage_(path, {.missing = missing_root::refuse, .links = symbolic_links::follow}),
        found_(open_safetensors_folder(storage_, index)) {}
  safetensors_folder(const safetensors_folder&) = delete;
  safetensors_folder& operator=(const safetensors_folder&) = delete;

  /// Returns the files and tensors, the latter sorted by name.
  [[nodiscard]] const found_checkpoint& found() const noexcept LLMMEM_LIFETIMEBOUND { return found_; }
  [[nodiscard]] std::span<const checkpoint_tensor> tensors() const noexcept LLMMEM_LIFETIMEBOUND {
    return found_.manifest.tensors;
  }
  /// Returns the tensor of that name, or null.
  [[nodiscard]] const checkpoint_tensor* find(std::string_view name) const noexcept LLMMEM_LIFETIMEBOUND {
    const auto all = tensors();
    const auto found = std::ranges::lower_bound(all, name, {}, &checkpoint_tensor::name);
    return found != all.end() && found->name == name ? &*found : nullptr;
  }
  /// Returns the file that holds a tensor of this folder.
  [[nodiscard]] const std::string& file_of(const checkpoint_tensor& tensor) const noexcept
      LLMMEM_LIFETIMEBOUND {
    return found_.manifest.files[tensor.pieces.front().file].name;
  }
  /// Passes all wanted bytes to the sink, as `load_checkpoint` does.
  template <class Sink>
  load_report load(std::span<const wanted_tensor> wanted, Sink&& sink, load_options options = {}) {
    options.verify = verification::sizes;
    return load_checkpoint(storage_, found_, wanted, sink, options);
  }
  [[nodiscard]] posix_storage<>& storage() noexcept LLMMEM_LIFETIMEBOUND { return storage_; }

 private:
  posix_storage<> storage_;
  found_checkpoint found_;
};

}  // namespace v0
}  // namespace llmmem
