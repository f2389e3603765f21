/// @file
/// `paged_state_view`: a checkpoint of sequences' KV blocks while generation continues.
#pragma once

#include <llmmem/checkpoint/detail/shared_part.hpp>
#include <llmmem/checkpoint/state_view.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/paging/block_storage.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The KV blocks of sequences at one moment: forks of the sequences, which share the blocks. A sequence that
/// appends to a shared last block gets a copy (`append_result::copy`); the other blocks are never written.
///
/// Tensor i is sequence i: `rows` blocks of `block_bytes`, in the order of its table, followed by zeros. The
/// engine defines the contents of a block, and keeps the tokens. Save those as extras; `tokens(i)` returns
/// how many of them the blocks hold.
///
///     const state_tensor kv{.name = "kv", .type = safetensors_type::u8,
///                           .shape = {rows, storage.block_bytes()}, .group = "kv", .part = {}};
///     ...
///     const snapshot_guard guard = saves.begin_snapshot(
///         step, paged_state_view(cache, sequences, storage, rows), tokens_of(sequences));
///     cache.append(sequences[0], next).value();     // continues at once
///     saves.stage_for(1'000'000);                   // now and then: copies for about 1 ms
///
/// An allocator belongs to one thread, and so does the view: that thread copies the blocks, in `stage_for` or
/// when it waits, and releases the forks. Until then their blocks are pinned; if an append runs out of blocks
/// for that reason (`errc::out_of_blocks`), `guard.wait_staged()` releases them. Compaction may move the
/// blocks during that time.
///
/// Copies of a view share its forks, which the last copy releases.
///
/// @tparam Cache  `paged_allocator<...>`, or a type that forks, releases and names blocks in the same way.
/// @par Complexity      O(blocks of the sequences) to take one, which copies no byte.
/// @par Thread safety   the allocator's thread. Allocator and storage outlive it: see `snapshot_guard`.
/// @par Errors          the constructor throws the errors of `fork` (`out_of_memory` beyond `max_sequences`,
///   `handle_error`), `length_error` for a sequence of more than `rows` blocks, and `argument_error` for a
///   storage with fewer blocks than the allocator names.
template <class Cache, memory_space Space>
class paged_state_view {
 public:
  static constexpr bool is_concurrent = false;
  static constexpr bool is_stable = true;
  static_assert(Space::is_host_accessible,
                "the host copies the blocks, so it must be able to access their space");

  /// @param sequences  the KV of all their tokens must already be written.
  /// @param rows       blocks of each tensor, as described.
  paged_state_view(Cache& cache, std::span<const sequence_id> sequences, const block_storage<Space>& storage,
                   std::uint64_t rows)
      : rows_(rows), forks_(std::in_place, cache, storage) {
    forks_->handles.reserve(sequences.size());
    for (const sequence_id each : sequences) {
      cache.check(each).value();
      if (cache.blocks(each).size() > rows) {
        throw length_error("paged_state_view: sequence " + std::to_string(forks_->handles.size()) + " has " +
                           std::to_string(cache.blocks(each).size()) +
                           " blocks, but its tensor has rows for " + std::to_string(rows) +
                           "; describe the tensor with more rows");
      }
      for (const block_id block : cache.blocks(each))
        static_cast<void>(storage.at(block).value());
      forks_->handles.push_back(cache.fork(each).value());
    }
  }

  /// @throws argument_error  for bytes that the tensor lacks; and the errors of `block_storage::at`.
  void copy_out(std::uint32_t tensor, std::uint64_t offset, std::span<std::byte> into) const {
    detail::check_held(static_cast<bool>(forks_), "paged_state_view");
    const std::uint64_t block_bytes = forks_->storage->block_bytes();
    const std::uint64_t bytes = rows_ * block_bytes;
    if (tensor >= forks_->handles.size() || offset > bytes || into.size() > bytes - offset) {
      throw argument_error("paged_state_view: bytes " + std::to_string(offset) + " to " +
                           std::to_string(offset + into.size()) + " of tensor " + std::to_string(tensor) +
                           " are not in it: there are " + std::to_string(forks_->handles.size()) + ", with " +
                           std::to_string(bytes) + " bytes each");
    }
    // Looks them up each time, because compaction moves the blocks.
    const std::span<const block_id> blocks = forks_->cache->blocks(forks_->handles[tensor]);
    while (!into.empty()) {
      const std::uint64_t row = offset / block_bytes;
      const std::uint64_t skip = offset % block_bytes;
      const std::uint64_t left = block_bytes - skip;
      const std::size_t part = into.size() < left ? into.size() : static_cast<std::size_t>(left);
      if (row < blocks.size()) {
        const auto block = forks_->storage->at(blocks[static_cast<std::size_t>(row)]).value();
        std::memcpy(into.data(), block.data + skip, part);
      } else {
        std::memset(into.data(), 0, part);
      }
      offset += part;
      into = into.subspan(part);
    }
  }

  /// Returns the number of tokens of tensor `tensor` when the view was taken; 0 for a tensor that does not
  /// exist, and after a move.
  [[nodiscard]] std::uint64_t tokens(std::uint32_t tensor) const noexcept {
    return forks_ && tensor < forks_->handles.size() ? forks_->cache->tokens(forks_->handles[tensor]) : 0;
  }

 private:
  struct forks {
    forks(Cache& of, const block_storage<Space>& in) noexcept : cache(&of), storage(&in) {}
    forks(const forks&) = delete;
    forks& operator=(const forks&) = delete;
    ~forks() {
      for (const sequence_id each : handles)
        static_cast<void>(cache->release(each));
    }

    Cache* cache;
    const block_storage<Space>* storage;
    std::vector<sequence_id> handles{};
  };

  std::uint64_t rows_;
  detail::shared_part<forks> forks_;
};

}  // namespace v0
}  // namespace llmmem
