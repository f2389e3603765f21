/// @file
/// Checks that manifests are consistent, and merges the parts of several ranks.
#pragma once

#include <llmmem/checkpoint/detail/bodies.hpp>
#include <llmmem/checkpoint/manifest.hpp>
#include <llmmem/detail/json_reader.hpp>
#include <llmmem/hash/crc32c.hpp>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// Returns whether a name stays inside its folder and is not reserved by the library.
[[nodiscard]] inline bool is_plain_name(std::string_view name) noexcept {
  return !name.empty() && name.size() <= 255 && name.front() != '.' && is_utf8(name) &&
         name.find('/') == std::string_view::npos && name.find('\0') == std::string_view::npos &&
         name != "MANIFEST.json";
}

/// Returns the first of `names` that occurs again, if any.
[[nodiscard]] inline std::optional<std::string_view> first_repeated(std::vector<std::string_view> names) {
  std::ranges::sort(names);
  const auto found = std::ranges::adjacent_find(names);
  if (found == names.end()) return std::nullopt;
  return *found;
}

[[nodiscard]] inline std::uint64_t chunks_in(std::uint64_t bytes, std::uint64_t chunk_bytes) noexcept {
  return bytes / chunk_bytes + (bytes % chunk_bytes == 0 ? 0 : 1);
}

/// Computes the file's checksum from those of its chunks: `crc32c_combine` with one product per chunk.
[[nodiscard]] inline std::uint32_t combined_crc32c(const checkpoint_file& file,
                                                   std::uint64_t chunk_bytes) noexcept {
  if (file.chunks.empty()) return 0;
  const std::uint32_t past_a_chunk = crc32c_combine(0x8000'0000U, 0, chunk_bytes);
  std::uint32_t sum = 0;
  for (std::size_t i = 0; i + 1 < file.chunks.size(); ++i)
    sum = crc32c_product(past_a_chunk, sum) ^ file.chunks[i];
  return crc32c_combine(sum, file.chunks.back(), file.bytes - (file.chunks.size() - 1) * chunk_bytes);
}

/// Returns the bytes of the stored files that hold a file's chunks. The file cannot be longer, because each
/// chunk has its own place. Without this check, a manifest could make a file of any length from a short one.
[[nodiscard]] inline std::uint64_t stored_bytes(const checkpoint_manifest& manifest,
                                                const checkpoint_file& file) {
  const auto key = [&](std::uint32_t i) {
    return std::pair<std::uint64_t, std::string_view>(manifest.stored[i].generation, manifest.stored[i].name);
  };
  std::vector<std::uint32_t> in;
  in.reserve(file.runs.size());
  for (const chunk_run& each : file.runs) {
    if (in.empty() || in.back() != each.stored) in.push_back(each.stored);
  }
  std::ranges::sort(in, {}, key);
  in.erase(std::ranges::unique(in, {}, key).begin(), in.end());  // a duplicate counts once
  std::uint64_t bytes = 0;
  for (const std::uint32_t each : in)
    // Cannot overflow: neither exceeds `max_bytes`.
    bytes = std::min(bytes + manifest.stored[each].bytes, max_bytes);
  return bytes;
}

/// Checks that the runs cover all chunks in order, and that each is inside its stored file.
inline void check_chunk_runs(const checkpoint_manifest& manifest, const checkpoint_file& file,
                             const std::string& what) {
  std::uint64_t next = 0;
  for (const chunk_run& each : file.runs) {
    const auto wrong = [&](const std::string& why) {
      std::string text = what;
      text.append(": file ").append(json_quoted(file.name)).append(": the run of chunks from ");
      text.append(std::to_string(each.first)).append(" on ").append(why);
      throw argument_error(text);
    };
    if (each.first != next) wrong("does not begin where the one before ends, at " + std::to_string(next));
    if (each.count == 0 || each.count > file.chunks.size() - next)
      wrong("has " + std::to_string(each.count) + " of the file's " + std::to_string(file.chunks.size()));
    if (each.stored >= manifest.stored.size()) {
      wrong("is in stored file " + std::to_string(each.stored) + " of " +
            std::to_string(manifest.stored.size()));
    }
    next += each.count;
    const std::uint64_t end = next * manifest.chunk_bytes;  // cannot overflow: at most a chunk past 2^63
    const std::uint64_t bytes = (end < file.bytes ? end : file.bytes) - each.first * manifest.chunk_bytes;
    const stored_chunks& in = manifest.stored[each.stored];
    if (each.place > in.bytes / manifest.chunk_bytes ||
        bytes > in.bytes - each.place * manifest.chunk_bytes) {
      wrong("is past the end of " + json_quoted(in.name) + ", which has " + std::to_string(in.bytes) +
            " bytes");
    }
  }
  if (next != file.chunks.size()) {
    throw argument_error(what + ": file " + json_quoted(file.name) + ": its runs are of " +
                         std::to_string(next) + " chunks, but it has " + std::to_string(file.chunks.size()));
  }
  if (const std::uint64_t bytes = stored_bytes(manifest, file); bytes < file.bytes) {
    throw argument_error(what + ": file " + json_quoted(file.name) + ": its chunks are in stored files of " +
                         std::to_string(bytes) + " bytes, but it has " + std::to_string(file.bytes));
  }
}

inline void check_stored_chunks(const checkpoint_manifest& manifest, const stored_chunks& stored,
                                const std::string& what) {
  const auto wrong = [&](const std::string& why) {
    throw argument_error(what + ": stored file " + json_quoted(stored.name) + ": " + why);
  };
  if (!is_plain_name(stored.name))
    wrong("the name must be plain: UTF-8, without '/', not beginning with '.'");
  if (stored.bytes > max_bytes) wrong("more than 2^63 - 1 bytes");
  if (stored.generation > manifest.generation)
    wrong("it is of generation " + std::to_string(stored.generation) + ", a later one");
  if (stored.generation == manifest.generation && stored.step != manifest.step)
    wrong("it is of this generation, and of step " + std::to_string(stored.step));
}

inline void check_checkpoint_file(const checkpoint_manifest& manifest, const checkpoint_file& file,
                                  const std::string& what) {
  const auto wrong = [&](const std::string& why) {
    throw argument_error(what + ": file " + json_quoted(file.name) + ": " + why);
  };
  if (!is_plain_name(file.name)) wrong("the name must be plain: UTF-8, without '/', not beginning with '.'");
  if (file.bytes > max_bytes) wrong("more than 2^63 - 1 bytes");
  if (file.rank >= manifest.world)
    wrong("rank " + std::to_string(file.rank) + " of " + std::to_string(manifest.world));
  if (const std::uint64_t chunks = chunks_in(file.bytes, manifest.chunk_bytes); chunks != file.chunks.size())
    wrong(std::to_string(file.chunks.size()) + " checksums for " + std::to_string(chunks) + " chunks");
  if (combined_crc32c(file, manifest.chunk_bytes) != file.crc32c)
    wrong("its checksum does not match those of its chunks");
  if (!file.runs.empty()) check_chunk_runs(manifest, file, what);
}

inline void check_checkpoint_tensor(const checkpoint_manifest& manifest, const checkpoint_tensor& tensor,
                                    const std::string& what) {
  const std::string named = what + ": tensor " + json_quoted(tensor.name);
  if (!is_utf8(tensor.name)) throw argument_error(named + ": the name must be UTF-8");
  const auto at_most = [&](const char* kind, std::size_t count, std::uint64_t most) {
    if (count <= most) return;
    throw argument_error(named + ": " + std::to_string(count) + " " + kind + ", at most " +
                         std::to_string(most) + " are allowed");
  };
  at_most("dimensions", tensor.shape.size(), max_checkpoint_dimensions);
  at_most("pieces", tensor.pieces.size(), max_checkpoint_pieces);
  std::uint64_t elements = 0;
  try {
    elements = elements_of(tensor);
    static_cast<void>(bytes_of(tensor.type, elements, "bytes of it"));
  } catch (const error& error) {
    throw argument_error(named + ": " + error.what());
  }
  for (const checkpoint_piece& piece : tensor.pieces) {
    if (piece.file >= manifest.files.size()) {
      throw argument_error(named + ": a piece in file " + std::to_string(piece.file) + " of " +
                           std::to_string(manifest.files.size()));
    }
    if (!is_utf8(piece.entry)) throw argument_error(named + ": the name of a piece must be UTF-8");
    const std::string in_file = "a piece in file " + std::to_string(piece.file);
    std::uint64_t bytes = 0;
    try {
      piece.runs.validate(elements, in_file);
      bytes = bytes_of(tensor.type, piece.runs.elements(), in_file);
    } catch (const error& error) {
      throw argument_error(named + ": " + error.what());
    }
    if (bytes > manifest.files[piece.file].bytes) {
      std::string text = named;
      text += ": " + in_file + " of " + std::to_string(bytes) + " bytes, more than the file has, ";
      throw argument_error(text += std::to_string(manifest.files[piece.file].bytes));
    }
  }
}

}  // namespace detail

LLMMEM_CHECKPOINT_BODY std::uint64_t elements_of(const checkpoint_tensor& tensor) {
  return tensor_shape::of(tensor.shape).elements();
}

LLMMEM_CHECKPOINT_BODY std::uint64_t bytes_of(safetensors_type type, std::uint64_t elements,
                                              const std::string& what) {
  const std::uint64_t bits = bits_of(type);
  if (bits % 8 == 0) return checked_multiply(elements, bits / 8, what.c_str());
  // The narrow types have 4 and 6 bits: eight elements fill whole bytes.
  const std::uint64_t rest = elements % 8 * bits;
  if (rest % 8 != 0) {
    throw argument_error(what + ": " + std::to_string(elements) + " elements of " + std::to_string(bits) +
                         " bits do not fill whole bytes");
  }
  return checked_add(checked_multiply(elements / 8, bits, what.c_str()), rest / 8, what.c_str());
}

LLMMEM_CHECKPOINT_BODY void check_manifest(const checkpoint_manifest& manifest, const std::string& what) {
  if (manifest.world == 0) throw argument_error(what + ": the world has 0 ranks");
  if (manifest.chunk_bytes == 0 || manifest.chunk_bytes > max_checkpoint_chunk) {
    throw argument_error(what + ": chunks of " + std::to_string(manifest.chunk_bytes) +
                         " bytes; they have 1 to " + std::to_string(max_checkpoint_chunk));
  }
  for (const stored_chunks& each : manifest.stored)
    detail::check_stored_chunks(manifest, each, what);
  std::vector<std::string_view> names;
  for (const checkpoint_file& each : manifest.files) {
    detail::check_checkpoint_file(manifest, each, what);
    names.push_back(each.name);
  }
  if (const auto twice = detail::first_repeated(std::move(names)))
    throw argument_error(what + ": file " + detail::json_quoted(std::string(*twice)) + " occurs twice");
  names.clear();
  for (const checkpoint_tensor& each : manifest.tensors) {
    detail::check_checkpoint_tensor(manifest, each, what);
    names.push_back(each.name);
  }
  if (const auto twice = detail::first_repeated(std::move(names)))
    throw argument_error(what + ": tensor " + detail::json_quoted(std::string(*twice)) + " occurs twice");
}

namespace detail {

/// Returns the indices of named items, by name, and by index for equal names.
template <class Named>
[[nodiscard]] std::vector<std::size_t> places_by_name(const std::vector<Named>& all) {
  std::vector<std::size_t> places(all.size());
  for (std::size_t i = 0; i < places.size(); ++i)
    places[i] = i;
  std::ranges::sort(places, [&](std::size_t a, std::size_t b) {
    const int order = all[a].name.compare(all[b].name);
    return order != 0 ? order < 0 : a < b;
  });
  return places;
}

}  // namespace detail

LLMMEM_CHECKPOINT_BODY void manifest_merger::add(checkpoint_manifest part, const std::string& what) {
  const auto same = [&](const char* name, std::uint64_t have, std::uint64_t got) {
    if (have != got) {
      throw argument_error(what + ": its " + name + " is " + std::to_string(got) + ", but the others' is " +
                           std::to_string(have));
    }
  };
  check_manifest(part, what);  // checks the part's file indices before any number is added to them
  if (parts_.empty()) {
    merged_ = std::move(part);
  } else {
    same("generation", merged_.generation, part.generation);
    same("step", merged_.step, part.step);
    same("world", merged_.world, part.world);
    same("chunk size", merged_.chunk_bytes, part.chunk_bytes);
    const auto first_file = static_cast<std::uint32_t>(merged_.files.size());
    const auto first_stored = static_cast<std::uint32_t>(merged_.stored.size());
    for (checkpoint_file& file : part.files) {
      for (chunk_run& each : file.runs)
        each.stored += first_stored;
      merged_.files.push_back(std::move(file));
    }
    for (stored_chunks& each : part.stored)
      merged_.stored.push_back(std::move(each));
    for (checkpoint_tensor& each : part.tensors) {
      for (checkpoint_piece& piece : each.pieces)
        piece.file += first_file;
      merged_.tensors.push_back(std::move(each));
    }
  }
  parts_.push_back({what, merged_.files.size(), merged_.tensors.size()});
}

LLMMEM_CHECKPOINT_BODY void manifest_merger::check_files() const {
  const std::vector<std::size_t> places = detail::places_by_name(merged_.files);
  for (std::size_t i = 1; i < places.size(); ++i) {
    const std::string& name = merged_.files[places[i]].name;
    if (name != merged_.files[places[i - 1]].name) continue;
    const auto by = std::ranges::upper_bound(parts_, places[i], {}, &added_part::end_of_files);
    throw argument_error(by->what + ": file " + detail::json_quoted(name) + " occurs twice");
  }
}

/// Merges a tensor's entries of all parts into the first one.
LLMMEM_CHECKPOINT_BODY void manifest_merger::fold_tensors() {
  std::vector<checkpoint_tensor>& all = merged_.tensors;
  const std::vector<std::size_t> places = detail::places_by_name(all);
  std::vector<bool> is_folded(all.size());
  std::size_t first = 0;
  for (std::size_t i = 1; i < places.size(); ++i) {
    checkpoint_tensor& there = all[places[first]];
    checkpoint_tensor& each = all[places[i]];
    if (each.name != there.name) {
      first = i;
      continue;
    }
    if (there.type != each.type || there.shape != each.shape) {
      const auto by = std::ranges::upper_bound(parts_, places[i], {}, &added_part::end_of_tensors);
      throw argument_error(by->what + ": tensor " + detail::json_quoted(each.name) +
                           " has a type or shape other than on other ranks");
    }
    there.pieces.insert(there.pieces.end(), each.pieces.begin(), each.pieces.end());
    is_folded[places[i]] = true;
  }
  std::size_t kept = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (is_folded[i]) continue;
    if (kept != i) all[kept] = std::move(all[i]);
    ++kept;
  }
  all.resize(kept);
}

LLMMEM_CHECKPOINT_BODY checkpoint_manifest manifest_merger::finish(const std::string& what) && {
  if (parts_.empty()) return {};
  check_files();
  fold_tensors();
  check_manifest(merged_, what);
  return std::move(merged_);
}

LLMMEM_CHECKPOINT_BODY void merge_manifest(checkpoint_manifest& into, const checkpoint_manifest& part,
                                           const std::string& what) {
  manifest_merger all;
  all.add(into, what);
  all.add(part, what);
  into = std::move(all).finish(what);
}

}  // namespace v0
}  // namespace llmmem
