/// @file
/// Presents one group of a `hybrid_allocator` to the functions of block_table.hpp.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/paging/block_table.hpp>
#include <llmmem/paging/errors.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace llmmem {
inline namespace v0 {

namespace paging {

/// A view of one group's tables for `write_csr`, `write_padded` and `write_slot_mapping`, so that a batch of
/// a hybrid model has a table per group.
///
///     const llmmem::paging::group_tables full(cache, 0);
///     auto view = write_csr(full, sequences, buffers).value();
///     write_slot_mapping(full, sequence, first, slots).value();
///
/// Entries count `layout().unit` bytes (see `super_page_pool`): address = base + entry * `entry_bytes`, for
/// every group. A null block, where a sequence holds nothing that a kernel reads, is entry 0: the null page.
///
/// @par Thread safety   as a const call of the allocator, which must outlive the view.
/// @par Errors   the constructor throws `argument_error` for a group that the allocator does not have.
template <class Cache>
class group_tables {
 public:
  group_tables(const Cache& cache, std::size_t group) : cache_(&cache), group_(group) {
    if (group < cache.groups().size()) return;
    throw argument_error(cache.name() + ": tables of group " + std::to_string(group) +
                         " asked for, but the allocator has " + std::to_string(cache.groups().size()) +
                         " groups, numbered from 0");
  }
  group_tables(Cache&&, std::size_t) = delete;  // the allocator must outlive the view

  [[nodiscard]] result<void> check(sequence_id sequence) const noexcept { return cache_->check(sequence); }
  [[nodiscard]] std::span<const block_id> blocks(sequence_id sequence) const noexcept {
    return cache_->table(sequence, group_);
  }
  [[nodiscard]] std::uint64_t tokens(sequence_id sequence) const noexcept { return cache_->tokens(sequence); }
  [[nodiscard]] std::uint32_t block_tokens() const noexcept { return cache_->groups()[group_].block_tokens; }

  /// Returns the entry for a block in a kernel's table.
  [[nodiscard]] std::int32_t entry(block_id block) const noexcept { return cache_->pool().unit_index(block); }
  [[nodiscard]] std::uint64_t entry_bytes() const noexcept { return cache_->layout().unit; }
  /// Bytes of a token in a block; 0 if a block does not divide into tokens (states).
  [[nodiscard]] std::uint64_t token_bytes() const noexcept {
    const auto& of = cache_->groups()[group_];
    return of.block_bytes % of.block_tokens == 0 ? of.block_bytes / of.block_tokens : 0;
  }
  /// Returns the slot of a block's first token. @pre `has_slots()`; the sequence holds it.
  [[nodiscard]] std::uint64_t slot_of(block_id block) const noexcept {
    return cache_->pool().offset(block) / token_bytes();
  }
  /// Checks that every token of the group is at a multiple of its size, so that slots can count tokens.
  [[nodiscard]] result<void> has_slots() const noexcept {
    const std::uint64_t bytes = token_bytes();
    if (bytes != 0 && cache_->layout().page_bytes % bytes == 0) return {};
    return failure{errc::no_slots, static_cast<std::uint32_t>(group_), bytes, cache_->layout().page_bytes,
                   cache_->name()};
  }

 private:
  const Cache* cache_;
  std::size_t group_;
};

}  // namespace paging

}  // namespace v0
}  // namespace llmmem
