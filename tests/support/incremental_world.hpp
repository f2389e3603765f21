/// @file
/// Incremental checkpoints, written without the checkpointer: some chunks are new, the others lie where an
/// earlier checkpoint has them.
#pragma once

#include <llmmem/checkpoint/detail/file_chunks.hpp>
#include <llmmem/checkpoint/folder.hpp>
#include <llmmem/checkpoint/manifest.hpp>
#include <llmmem/checkpoint/search.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "support/checkpoint_world.hpp"
#include "support/random.hpp"

namespace llmmem_tests {

/// All bytes of a checkpoint's files, by name, each chunk proven.
template <class Storage>
std::map<std::string, std::vector<std::byte>> contents_of_files(Storage& storage,
                                                                const llmmem::found_checkpoint& found) {
  std::map<std::string, std::vector<std::byte>> all;
  for (const llmmem::checkpoint_file& file : found.manifest.files) {
    const llmmem::detail::file_chunks chunks(storage, found.folder, found.manifest, file);
    std::vector<std::byte> bytes(static_cast<std::size_t>(file.bytes));
    for (std::size_t i = 0; i < file.chunks.size(); ++i) {
      const auto count =
          static_cast<std::size_t>(llmmem::detail::chunk_bytes_of(file, found.manifest.chunk_bytes, i));
      chunks.read_chunk(i, std::span(bytes).subspan(i * found.manifest.chunk_bytes, count));
    }
    all[file.name] = std::move(bytes);
  }
  return all;
}

/// Commits what follows `base`, which is whole or incremental itself: of each file, each chunk is new by a
/// chance of a half. Gives what it wrote.
template <class Storage>
std::map<std::string, std::vector<std::byte>> save_incremental(llmmem::checkpoint_folder<Storage>& folder,
                                                               const llmmem::found_checkpoint& base,
                                                               std::uint64_t step, random_numbers& random) {
  using namespace llmmem;
  Storage& storage = folder.storage();
  auto all = contents_of_files(storage, base);
  const checkpoint_draft draft = folder.begin(step);
  const std::uint64_t chunk_bytes = base.manifest.chunk_bytes;
  checkpoint_manifest made = base.manifest;
  made.generation = draft.id.generation;
  made.step = step;
  made.stored.clear();
  const auto stored_as = [&](const stored_chunks& stored) {
    const auto at = std::find(made.stored.begin(), made.stored.end(), stored);
    if (at != made.stored.end()) return static_cast<std::uint32_t>(at - made.stored.begin());
    made.stored.push_back(stored);
    return static_cast<std::uint32_t>(made.stored.size() - 1);
  };
  for (std::size_t f = 0; f < made.files.size(); ++f) {
    const checkpoint_file& before = base.manifest.files[f];
    std::vector<std::byte>& bytes = all[before.name];
    std::vector<std::byte> own;
    std::vector<bool> is_new(before.chunks.size());
    for (std::size_t i = 0; i < is_new.size(); ++i) {
      const auto at = static_cast<std::size_t>(i * chunk_bytes);
      const auto count = static_cast<std::size_t>(detail::chunk_bytes_of(before, chunk_bytes, i));
      is_new[i] = random.once_in(2);
      if (!is_new[i]) continue;
      for (std::size_t k = at; k < at + count; ++k)
        bytes[k] = static_cast<std::byte>(random.below(256U));
      own.insert(own.end(), bytes.begin() + static_cast<std::ptrdiff_t>(at),
                 bytes.begin() + static_cast<std::ptrdiff_t>(at + count));
    }
    made.files[f] = described(before.name, bytes, chunk_bytes, before.rank);
    const std::string own_name = before.name + ".new";
    std::uint64_t place = 0;
    for (std::size_t i = 0; i < is_new.size(); ++i) {
      chunk_run run{i, 1, 0, 0};
      if (is_new[i]) {
        run.stored = stored_as({draft.id.generation, step, own_name, own.size()});
        run.place = place++;
      } else if (before.runs.empty()) {
        run.stored = stored_as({base.id.generation, base.id.step, before.name, before.bytes});
        run.place = i;
      } else {
        for (const chunk_run& of : before.runs) {
          if (i < of.first || i >= of.first + of.count) continue;
          run.stored = stored_as(base.manifest.stored[of.stored]);
          run.place = of.place + (i - of.first);
        }
      }
      made.files[f].runs.push_back(run);
    }
    // A file of no chunks has no runs: it is whole.
    if (!own.empty() || bytes.empty()) {
      auto output = storage.create(draft.path(bytes.empty() ? before.name : own_name), own.size());
      static_cast<void>(output.begin_write(0, own));
      output.sync();
    }
  }
  folder.commit(draft, made);
  return all;
}

}  // namespace llmmem_tests
