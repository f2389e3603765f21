/// @file
/// Checkpoints of a small state whose bytes tell their step, and what may be there after a crash.
#pragma once

#include <llmmem/checkpoint/folder.hpp>
#include <llmmem/checkpoint/manifest.hpp>
#include <llmmem/checkpoint/search.hpp>
#include <llmmem/hash/crc32c.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace llmmem_tests {

/// How large a world of checkpoints is.
struct checkpoint_world {
  std::uint32_t ranks = 2;
  std::uint32_t files = 2;  ///< of each rank
  std::uint64_t file_bytes = 24;
  std::uint64_t write_bytes = 12;  ///< of one write, and of a chunk
};

/// What file `file` of rank `rank` has in the checkpoint of `step`.
inline std::vector<std::byte> world_bytes(const checkpoint_world& world, std::uint64_t step,
                                          std::uint32_t rank, std::uint32_t file) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(world.file_bytes));
  for (std::size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<std::byte>((step * 31 + rank * 7 + file * 3 + i) % 251);
  return bytes;
}

inline std::string world_file(std::uint32_t rank, std::uint32_t file) {
  return "rank" + std::to_string(rank) + "-" + std::to_string(file) + ".bin";
}

/// A file's entry in a manifest, from its bytes.
inline llmmem::checkpoint_file described(const std::string& name, std::span<const std::byte> bytes,
                                         std::uint64_t chunk_bytes, std::uint32_t rank = 0) {
  llmmem::checkpoint_file file{name, bytes.size(), rank, llmmem::crc32c(0, bytes), {}};
  for (std::uint64_t at = 0; at < bytes.size(); at += chunk_bytes) {
    const std::uint64_t count = std::min<std::uint64_t>(chunk_bytes, bytes.size() - at);
    file.chunks.push_back(
        llmmem::crc32c(0, bytes.subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(count))));
  }
  return file;
}

/// Writes and syncs a rank's files, and what it has to say of them.
template <class Storage>
llmmem::checkpoint_manifest write_rank(Storage& storage, const checkpoint_world& world,
                                       const llmmem::checkpoint_draft& draft, std::uint32_t rank) {
  llmmem::checkpoint_manifest part{.generation = draft.id.generation,
                                   .step = draft.id.step,
                                   .world = world.ranks,
                                   .chunk_bytes = world.write_bytes,
                                   .files = {},
                                   .tensors = {}};
  for (std::uint32_t i = 0; i < world.files; ++i) {
    const std::vector<std::byte> bytes = world_bytes(world, draft.id.step, rank, i);
    auto output = storage.create(draft.path(world_file(rank, i)), bytes.size());
    const std::span<const std::byte> all(bytes);
    for (std::size_t at = 0; at < bytes.size(); at += world.write_bytes)
      static_cast<void>(output.begin_write(
          at, all.subspan(at, std::min<std::size_t>(world.write_bytes, bytes.size() - at))));
    output.sync();
    part.files.push_back(described(world_file(rank, i), bytes, world.write_bytes, rank));
  }
  return part;
}

/// A whole checkpoint of all ranks.
template <class Storage>
void save_step(llmmem::checkpoint_folder<Storage>& folder, const checkpoint_world& world,
               std::uint64_t step) {
  const llmmem::checkpoint_draft draft = folder.begin(step);
  llmmem::checkpoint_manifest all = write_rank(folder.storage(), world, draft, 0);
  for (std::uint32_t rank = 1; rank < world.ranks; ++rank)
    merge_manifest(all, write_rank(folder.storage(), world, draft, rank), "rank " + std::to_string(rank));
  folder.commit(draft, all);
}

/// Whether a checkpoint has the bytes of its step, and no others.
template <class Storage>
bool has_its_bytes(Storage& storage, const checkpoint_world& world, const llmmem::found_checkpoint& found) {
  if (found.manifest.files.size() != world.ranks * world.files) return false;
  for (std::uint32_t rank = 0; rank < world.ranks; ++rank) {
    for (std::uint32_t i = 0; i < world.files; ++i) {
      const auto input = storage.open(found.folder + "/" + world_file(rank, i));
      std::vector<std::byte> bytes(static_cast<std::size_t>(input.bytes()));
      input.read(0, bytes);
      if (bytes != world_bytes(world, found.id.step, rank, i)) return false;
    }
  }
  return true;
}

/// What a run has acknowledged.
struct acknowledged {
  std::optional<std::uint64_t> step{};
};

/// What must hold after any crash: the newest whole checkpoint is at least the last that was acknowledged,
/// and is exactly that step's bytes. What is wrong, or empty.
template <class Storage>
std::string what_is_lost(Storage& storage, const checkpoint_world& world, const acknowledged& told) {
  const llmmem::checkpoint_search search = llmmem::find_checkpoint(storage);
  if (!search.found)
    return told.step ? "step " + std::to_string(*told.step) + " is lost: " + search.message() : "";
  if (told.step && search.found->id.step < *told.step)
    return "step " + std::to_string(*told.step) + " is lost: " + search.message();
  if (!has_its_bytes(storage, world, *search.found)) return search.found->folder + " has other bytes";
  return {};
}

/// That every folder with the name of a checkpoint is a whole one; where the manifest comes last, that each
/// with a manifest is. What is wrong, or empty.
template <class Storage>
std::string what_is_torn(Storage& storage, const checkpoint_world& world, llmmem::commit_method how) {
  for (const llmmem::checkpoint_id& id : llmmem::list_checkpoints(storage)) {
    try {
      const auto found = llmmem::open_checkpoint(storage, id, llmmem::verification::checksums);
      if (!has_its_bytes(storage, world, found)) return found.folder + " has other bytes";
    } catch (const llmmem::error& error) {
      const std::string why = error.what();
      const bool is_of_manifest = why.find("MANIFEST.json") != std::string::npos;
      if (how == llmmem::commit_method::rename || !is_of_manifest) return folder_name(id) + ": " + why;
    }
  }
  return {};
}

}  // namespace llmmem_tests
