/// @file
/// How checkpoints are looked for and held to their checksums.
#pragma once

#include <llmmem/checkpoint/search.hpp>
#include <llmmem/transfer/crc32c.hpp>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <exception>
#include <span>

namespace llmmem::inline v0 {

inline std::string checkpoint_search::message() const {
  std::string text = found ? found->folder : "no checkpoint";
  for (const skipped_checkpoint& each : skipped)
    text += "; passed over " + each.folder + ": " + each.why;
  return text;
}

namespace detail {

/// Memory that files can be read into past the page cache.
class aligned_bytes {
 public:
  static constexpr std::size_t alignment = 4096;

  explicit aligned_bytes(std::size_t bytes) : held_(bytes + alignment) {
    const auto address = reinterpret_cast<std::uintptr_t>(held_.data());
    begin_ = (alignment - address % alignment) % alignment;
    bytes_ = bytes;
  }
  [[nodiscard]] std::span<std::byte> span() noexcept { return std::span(held_).subspan(begin_, bytes_); }

 private:
  std::vector<std::byte> held_;
  std::size_t begin_ = 0;
  std::size_t bytes_ = 0;
};

/// Bytes of chunk `i` of a file. @pre it has that many.
[[nodiscard]] inline std::uint64_t chunk_bytes_of(const checkpoint_file& file, std::uint64_t chunk_bytes,
                                                  std::size_t i) noexcept {
  const std::uint64_t left = file.bytes - i * chunk_bytes;
  return left < chunk_bytes ? left : chunk_bytes;
}

/// Reads a chunk and holds it to its checksum.
template <storage_input Input>
void read_chunk(const Input& input, const checkpoint_file& file, std::uint64_t chunk_bytes, std::size_t i,
                std::span<std::byte> into, const std::string& path) {
  input.read(i * chunk_bytes, into);
  const std::uint32_t sum = crc32c(0, into);
  if (sum == file.chunks[i]) return;
  std::string text = path + ": bytes " + std::to_string(i * chunk_bytes) + " to " +
                     std::to_string(i * chunk_bytes + into.size()) + " are damaged: their CRC-32C is ";
  append_hex(text, sum);
  text += ", the manifest has ";
  append_hex(text, file.chunks[i]);
  throw format_error(text);
}

template <checkpoint_storage Storage>
[[nodiscard]] std::string read_whole(Storage& storage, const std::string& path, std::uint64_t most) {
  const auto input = storage.open(path);
  if (input.bytes() > most) {
    throw format_error(storage.path(path) + ": has " + std::to_string(input.bytes()) + " bytes, more than " +
                       std::to_string(most));
  }
  std::string text(static_cast<std::size_t>(input.bytes()), '\0');
  input.read(0, std::as_writable_bytes(std::span(text.data(), text.size())));
  return text;
}

template <checkpoint_storage Storage>
void verify_file(Storage& storage, const found_checkpoint& found, const checkpoint_file& file,
                 verification how) {
  const std::string path = found.folder + "/" + file.name;
  const auto input = storage.open(path);
  if (input.bytes() != file.bytes) {
    throw format_error(storage.path(path) + ": has " + std::to_string(input.bytes()) +
                       " bytes, the manifest says " + std::to_string(file.bytes));
  }
  if (how == verification::sizes) return;
  const std::uint64_t chunk_bytes = found.manifest.chunk_bytes;
  aligned_bytes memory(static_cast<std::size_t>(std::min(file.bytes, chunk_bytes)));
  for (std::size_t i = 0; i < file.chunks.size(); ++i) {
    const std::uint64_t bytes = chunk_bytes_of(file, chunk_bytes, i);
    read_chunk(input, file, chunk_bytes, i, memory.span().first(static_cast<std::size_t>(bytes)),
               storage.path(path));
  }
}

}  // namespace detail

template <checkpoint_storage Storage>
std::vector<checkpoint_id> list_checkpoints(Storage& storage) {
  std::vector<checkpoint_id> all;
  for (const storage_entry& each : storage.list("")) {
    if (each.what != storage_entry::kind::folder) continue;
    if (const auto id = read_folder_name(each.name)) all.push_back(*id);
  }
  std::sort(all.begin(), all.end(), [](const checkpoint_id& a, const checkpoint_id& b) {
    return a.generation != b.generation ? a.generation > b.generation : a.step > b.step;
  });
  return all;
}

template <checkpoint_storage Storage>
found_checkpoint open_checkpoint(Storage& storage, const checkpoint_id& id, verification how) {
  found_checkpoint found{id, folder_name(id), {}};
  const std::string path = found.folder + "/" + std::string(checkpoint_names::manifest);
  found.manifest = read_manifest(detail::read_whole(storage, path, max_manifest_bytes), storage.path(path));
  if (found.manifest.step != id.step || found.manifest.generation != id.generation) {
    throw format_error(storage.path(path) + ": it is of step " + std::to_string(found.manifest.step) +
                       ", generation " + std::to_string(found.manifest.generation) +
                       ", not of what the folder is called");
  }
  for (const checkpoint_file& file : found.manifest.files)
    detail::verify_file(storage, found, file, how);
  return found;
}

template <checkpoint_storage Storage>
checkpoint_search find_checkpoint(Storage& storage, verification how) {
  // One goes only when newer ones are there: whoever meets that looks again, from the newest, rather than
  // take an older one that may have been kept. More often than this is a race that cannot be won.
  constexpr int tries = 16;
  checkpoint_search search;
  for (int i = 0; i < tries; ++i) {
    bool is_outdated = false;
    search = {};
    const std::vector<checkpoint_id> listed = list_checkpoints(storage);
    for (const checkpoint_id& id : listed) {
      try {
        search.found = open_checkpoint(storage, id, how);
        return search;
      } catch (const std::exception& error) {  // too large for this machine, too
        const std::vector<checkpoint_id> now = list_checkpoints(storage);
        const bool is_there = std::ranges::find(now, id) != now.end();
        is_outdated = is_outdated || !is_there || now.front().generation > listed.front().generation;
        if (is_there) search.skipped.push_back({folder_name(id), error.what()});
        if (is_outdated && i + 1 < tries) break;
      }
    }
    if (!is_outdated) break;
  }
  return search;
}

}  // namespace llmmem::inline v0
