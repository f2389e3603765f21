/// @file
/// Reads a file of a checkpoint that is full, or whose chunks are in several stored files.
#pragma once

#include <llmmem/checkpoint/detail/hex.hpp>
#include <llmmem/checkpoint/manifest.hpp>
#include <llmmem/checkpoint/names.hpp>
#include <llmmem/checkpoint/storage_ref.hpp>
#include <llmmem/error.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/space/pages.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Memory for reads that bypass the page cache, in huge pages if available: with small pages, a read costs
/// the system about twice the time of the copy.
class aligned_bytes {
 public:
  static constexpr std::size_t alignment = 4096;

  /// @throws out_of_memory
  explicit aligned_bytes(std::size_t bytes) : bytes_(bytes), data_(source_.take(bytes + 1, alignment)) {
    if (data_ == nullptr)
      throw out_of_memory("reading a checkpoint: no memory for " + std::to_string(bytes) + " bytes");
  }
  aligned_bytes(const aligned_bytes&) = delete;
  aligned_bytes& operator=(const aligned_bytes&) = delete;
  ~aligned_bytes() { source_.give_back(data_, bytes_ + 1, alignment); }

  [[nodiscard]] std::span<std::byte> span() noexcept { return {data_, bytes_}; }

 private:
  page_source source_{};
  std::size_t bytes_;
  std::byte* data_;  // one more byte, because 0 bytes is not a valid request
};

/// Returns the bytes of chunk `i` of a file. @pre it has that many chunks.
[[nodiscard]] inline std::uint64_t chunk_bytes_of(const checkpoint_file& file, std::uint64_t chunk_bytes,
                                                  std::size_t i) noexcept {
  const std::uint64_t left = file.bytes - i * chunk_bytes;
  return left < chunk_bytes ? left : chunk_bytes;
}

/// An open file of a checkpoint. Any number of threads may read concurrently.
class file_chunks {
 public:
  /// Opens all files that hold its chunks, and checks their sizes.
  /// @param folder  the folder of the checkpoint, or of its draft. @param manifest must outlive this, and so
  ///                must its `file`.
  /// @throws storage_error  @throws format_error  for a size other than the manifest's.
  file_chunks(storage_ref storage, const std::string& folder, const checkpoint_manifest& manifest,
              const checkpoint_file& file)
      : file_(&file), chunk_bytes_(manifest.chunk_bytes) {
    if (file.runs.empty()) {
      const std::string path = folder.empty() ? file.name : folder + "/" + file.name;
      path_ = storage.path(path);
      open(storage, path, file.bytes, 0);
      return;
    }
    path_ = storage.path(folder) + ": " + file.name;
    for (const chunk_run& run : file.runs) {
      if (position_of(run.stored) != nullptr) continue;
      const stored_chunks& in = manifest.stored[run.stored];
      const bool is_own = in.generation == manifest.generation;
      const std::string in_folder = is_own ? folder : folder_name({in.step, in.generation});
      open(storage, in_folder + "/" + in.name, in.bytes, run.stored);
    }
  }

  /// For error texts.
  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return file_->bytes; }
  /// Returns the number of opened files that hold the chunks.
  [[nodiscard]] std::size_t stored_files() const noexcept { return stored_.size(); }

  /// Reads bytes without verification.
  void read(std::uint64_t offset, std::span<std::byte> into) const {
    while (!into.empty()) {
      const location at = find(offset);
      const auto bytes =
          into.first(static_cast<std::size_t>(std::min<std::uint64_t>(into.size(), at.run_bytes)));
      at.in->input.read(at.offset, bytes);
      offset += bytes.size();
      into = into.subspan(bytes.size());
    }
  }

  /// For callers that read chunk `i` piece by piece. @throws format_error  as `read_chunk`.
  void check_chunk(std::size_t i, std::uint32_t sum) const {
    hold_to_checksum(i, find(i * chunk_bytes_), chunk_bytes_of(*file_, chunk_bytes_, i), sum);
  }

  /// Reads chunk `i` whole, and verifies its checksum. @throws format_error the text names the place.
  void read_chunk(std::size_t i, std::span<std::byte> into) const {
    const location at = find(i * chunk_bytes_);
    at.in->input.read(at.offset, into);
    hold_to_checksum(i, at, into.size(), crc32c(0, into));
  }

  /// Verifies all chunks without keeping them; `memory` may be shorter than a chunk.
  void verify(std::span<std::byte> memory) const {
    for (std::size_t i = 0; i < file_->chunks.size(); ++i) {
      const std::uint64_t bytes = chunk_bytes_of(*file_, chunk_bytes_, i);
      const location at = find(i * chunk_bytes_);
      std::uint32_t sum = 0;
      for (std::uint64_t done = 0; done < bytes;) {
        const auto part =
            memory.first(static_cast<std::size_t>(std::min<std::uint64_t>(memory.size(), bytes - done)));
        at.in->input.read(at.offset + done, part);
        sum = crc32c(sum, part);
        done += part.size();
      }
      hold_to_checksum(i, at, bytes, sum);
    }
  }

 private:
  struct stored_input {
    storage_ref::input input;
    std::string path;
  };
  struct numbered {
    std::uint32_t number = 0;    // number of the stored file in the manifest
    std::uint32_t position = 0;  // position in `stored_`
  };
  struct location {
    const stored_input* in;
    std::uint64_t offset;     // position in the stored file
    std::uint64_t run_bytes;  // bytes from there to the end of the run
  };

  void open(storage_ref storage, const std::string& path, std::uint64_t bytes, std::uint32_t number) {
    auto input = storage.open(path);
    if (input.bytes() != bytes) {
      throw format_error(storage.path(path) + ": has " + std::to_string(input.bytes()) +
                         " bytes, but the manifest says " + std::to_string(bytes));
    }
    const auto behind = std::ranges::upper_bound(numbers_, number, {}, &numbered::number);
    numbers_.insert(behind, {number, static_cast<std::uint32_t>(stored_.size())});
    stored_.push_back({std::move(input), storage.path(path)});
  }

  [[nodiscard]] const std::uint32_t* position_of(std::uint32_t number) const {
    const auto found = std::ranges::lower_bound(numbers_, number, {}, &numbered::number);
    return found != numbers_.end() && found->number == number ? &found->position : nullptr;
  }

  [[nodiscard]] location find(std::uint64_t offset) const {
    if (file_->runs.empty()) return {&stored_.front(), offset, file_->bytes - offset};
    const std::uint64_t chunk = offset / chunk_bytes_;
    const auto after = std::ranges::upper_bound(file_->runs, chunk, {}, &chunk_run::first);
    const chunk_run& run = *(after - 1);  // the first begins at 0
    const std::uint64_t into_run = offset - run.first * chunk_bytes_;
    const std::uint64_t end = std::min((run.first + run.count) * chunk_bytes_, file_->bytes);
    return {&stored_[*position_of(run.stored)], run.place * chunk_bytes_ + into_run, end - offset};
  }

  void hold_to_checksum(std::size_t i, const location& at, std::uint64_t bytes, std::uint32_t sum) const {
    if (sum == file_->chunks[i]) return;
    std::string text = at.in->path + ": bytes " + std::to_string(at.offset) + " to " +
                       std::to_string(at.offset + bytes) + " are damaged: their CRC-32C is ";
    append_hex(text, sum);
    text += ", but the manifest has ";
    append_hex(text, file_->chunks[i]);
    throw format_error(text);
  }

  const checkpoint_file* file_;
  std::uint64_t chunk_bytes_;
  std::string path_;
  std::vector<stored_input> stored_;
  std::vector<numbered> numbers_;  // sorted
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
