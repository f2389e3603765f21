/// @file
/// `memory_chunks`: the calls of a `tiered_buffer` over one space, in which everything stays in memory.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/concepts.hpp>
#include <llmmem/tiering/access.hpp>
#include <llmmem/tiering/errors.hpp>
#include <llmmem/tiering/tiered_types.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Chunks that take memory from a space from their first write until their contents are discarded. If memory
/// suffices, code written for tiers runs on it; the space's peak is then the most bytes alive at once.
///
/// @par Complexity      a first write and a `discard` as the space's allocation and deallocation, every other
///                      call O(1).
/// @par Thread safety   one thread at a time.
/// @par Errors          all are values: `errc::no_contents`, `errc::chunk_leased`, `errc::stale_handle`, and
///                      the space's shortage.
template <memory_space Space>
  requires(Space::is_host_accessible)
class memory_chunks {
 public:
  /// Access to a chunk's bytes while the lease lives. Movable; the `memory_chunks` outlives it.
  template <access_mode Mode>
  class lease {
   public:
    using byte_type = std::conditional_t<Mode == access_mode::read, const std::byte, std::byte>;

    lease() noexcept = default;
    lease(lease&& other) noexcept : chunks_(std::exchange(other.chunks_, nullptr)), slot_(other.slot_) {}
    lease& operator=(lease&& other) noexcept {
      if (this != &other) {
        end();
        chunks_ = std::exchange(other.chunks_, nullptr);
        slot_ = other.slot_;
      }
      return *this;
    }
    ~lease() { end(); }
    void end() noexcept {
      if (chunks_ != nullptr) --std::exchange(chunks_, nullptr)->entries_[slot_].leases;
    }
    [[nodiscard]] std::span<byte_type> span() const noexcept {
      if (chunks_ == nullptr) return {};
      const entry& it = chunks_->entries_[slot_];
      return {it.range.data, static_cast<std::size_t>(it.bytes)};
    }

   private:
    friend class memory_chunks;
    lease(memory_chunks& chunks, std::uint32_t slot) noexcept : chunks_(&chunks), slot_(slot) {
      ++chunks.entries_[slot].leases;
    }
    memory_chunks* chunks_ = nullptr;
    std::uint32_t slot_ = 0;
  };
  using read_lease = lease<access_mode::read>;
  using write_lease = lease<access_mode::write>;
  using update_lease = lease<access_mode::read_write>;

  /// The space outlives this object.
  explicit memory_chunks(Space& space) noexcept : space_(&space) {}
  memory_chunks(const memory_chunks&) = delete;
  memory_chunks& operator=(const memory_chunks&) = delete;
  ~memory_chunks() {
    for (entry& each : entries_)
      free(each);
  }

  /// Adds a chunk without contents, which takes no memory yet. @pre `bytes` is not 0
  [[nodiscard]] result<chunk_handle> create(std::uint64_t bytes) {
    entries_.push_back({});
    entries_.back().bytes = bytes;
    return chunk_handle{static_cast<std::uint32_t>(entries_.size() - 1), 1, 0};
  }
  [[nodiscard]] result<read_lease> read(chunk_handle chunk) { return take<access_mode::read>(chunk); }
  [[nodiscard]] result<write_lease> write(chunk_handle chunk) { return take<access_mode::write>(chunk); }
  [[nodiscard]] result<update_lease> update(chunk_handle chunk) {
    return take<access_mode::read_write>(chunk);
  }
  /// Drops the contents; their memory returns to the space.
  result<void> discard(chunk_handle chunk) {
    if (chunk.slot >= entries_.size()) return failure{.code = errc::no_contents, .index = chunk.slot};
    entry& it = entries_[chunk.slot];
    if (it.leases != 0) return failure{.code = errc::chunk_leased, .index = chunk.slot, .found = it.leases};
    free(it);
    return {};
  }
  /// As `discard`; the caller must not use the chunk again.
  result<void> remove(chunk_handle chunk) { return discard(chunk); }

 private:
  struct entry {
    std::uint64_t bytes = 0;
    typename Space::range_type range{};
    std::uint32_t leases = 0;
    bool has_contents = false;
  };

  template <access_mode Mode>
  [[nodiscard]] result<lease<Mode>> take(chunk_handle chunk) {
    if (chunk.slot >= entries_.size()) return failure{.code = errc::no_contents, .index = chunk.slot};
    entry& it = entries_[chunk.slot];
    if (it.leases != 0) return failure{.code = errc::chunk_leased, .index = chunk.slot, .found = it.leases};
    if (!it.has_contents) {
      if (Mode != access_mode::write) return failure{.code = errc::no_contents, .index = chunk.slot};
      const auto had = space_->try_allocate(it.bytes, alignment);
      if (!had) return had.error();
      it.range = *had;
      it.has_contents = true;
    }
    return result<lease<Mode>>(lease<Mode>(*this, chunk.slot));
  }
  void free(entry& it) noexcept {
    if (std::exchange(it.has_contents, false)) space_->deallocate(std::exchange(it.range, {}));
  }

  static constexpr std::uint64_t alignment = 64;

  Space* space_;
  std::vector<entry> entries_{};
};

}  // namespace v0
}  // namespace llmmem
