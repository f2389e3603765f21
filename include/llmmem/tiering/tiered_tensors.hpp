/// @file
/// `tiered_tensors`: tensors of any size on a `tiered_buffer`, leased one by one; the buffer moves chunks of
/// a size that moves well.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/elements.hpp>
#include <llmmem/tiering/access.hpp>
#include <llmmem/tiering/chunk_mapping.hpp>
#include <llmmem/tiering/tiered_buffer.hpp>
#include <llmmem/version/dirty_ranges.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

template <class Buffer>
class persistent_tensors;

/// What tensors are built on: a `tiered_buffer`, or a `prefetch_schedule` over one, which then records and
/// plans the leases of their chunks.
template <class T>
concept chunk_store = requires(T& store, chunk_handle chunk, std::uint64_t bytes, tiering::patience wait,
                               typename T::update_lease& update, typename T::write_lease& write) {
  typename T::top_range;
  { store.create(bytes) } -> std::same_as<result<chunk_handle>>;
  { store.remove(chunk) } -> std::same_as<result<void>>;
  { store.discard(chunk) } -> std::same_as<result<void>>;
  { store.tier_of(chunk) } -> std::same_as<result<std::size_t>>;
  { store.read(chunk, wait) } -> std::same_as<result<typename T::template lease<access_mode::read>>>;
  { store.write(chunk, wait) } -> std::same_as<result<typename T::write_lease>>;
  { store.update(chunk, bytes, bytes, wait) } -> std::same_as<result<typename T::update_lease>>;
  { update.also_changes(bytes, bytes) } -> std::same_as<result<void>>;
  { write.range() } -> std::same_as<typename T::top_range>;
  { write.end() };
  { store.prefetch(chunk) } -> std::same_as<result<void>>;
  { store.evict(chunk) } -> std::same_as<result<void>>;
  { store.flush(chunk) } -> std::same_as<result<void>>;
};

/// Counters of the tensors in a buffer.
struct tiered_tensors_stats {
  std::uint32_t tensors = 0;
  std::uint64_t parts = 0;
  std::uint64_t chunks = 0;
  std::uint64_t shared_chunks = 0;   ///< of these, with more than one tensor
  std::uint64_t tensor_bytes = 0;    ///< of all tensors
  std::uint64_t padding_bytes = 0;   ///< bytes of chunks in addition to those
  std::uint64_t leases = 0;          ///< of tensors, granted
  std::uint64_t chunk_leases = 0;    ///< taken from the buffer for them
  std::uint64_t metadata_bytes = 0;  ///< in addition to the buffer's
};

/// Tensors of 4 bytes to many GiB on a buffer whose chunks are a few MiB: small ones share a chunk, large
/// ones take several (`map_to_chunks`).
///
///     tiered_tensors weights(buffer, map_to_chunks(sizes));
///     auto gain = weights.update(norm).value();       // 4 KiB, whose chunk holds others as well
///     scale(gain.span());
///     weights.for_each_part<access_mode::read>(embedding, [&](auto& lease, const tensor_part& part) {
///       use(lease.span(), part.begin);                // the next part moves meanwhile
///     }).value();
///
/// - **A lease** is of one part of a tensor: of the whole tensor, if it has one part. Its bytes keep their
///   address until it ends. A part has any number of `read` leases, or one `write` or `update`.
/// - **Tensors that share a chunk do not block each other**: a program may read one while it writes another,
///   in any number, order and mode. The tensors lease the chunk once, exclusively, for as long as any of them
///   is leased. So a first lease waits for a write-back of the chunk that is in flight, even if the lease
///   only reads, and no other call can flush, evict, clone or write through the chunk meanwhile.
/// - **Only bytes that a lease may change are dirty**, also in a shared chunk. A `write` keeps the
///   neighbours' contents and therefore brings the chunk in. If no neighbour has contents, it brings in
///   nothing, and all of the chunk is dirty.
/// - **Contents** belong to a tensor: one that was never written, or was discarded, returns
///   `errc::no_contents` although its chunk has some. The chunk's contents are discarded with those of its
///   last tensor.
/// - **Movement** is of chunks: a call that prefetches, evicts or flushes a tensor does so to its neighbours
///   as well.
///
/// The object owns its chunks, and removes them when it ends; the next process finds `persistent_tensors`
/// again. The program may use other chunks of the same buffer.
///
/// @tparam Buffer  a `chunk_store`: a `tiered_buffer`, or a `prefetch_schedule` over one.
/// @par Complexity      a lease O(1) in addition to the buffer's own. No allocation after construction.
/// @par Thread safety   as the buffer: one thread at a time; the lease holder may share leased memory between
///                      threads.
/// @par Errors          the constructor throws what `create` refuses, and leaves the buffer as it was. A
///                      tensor number out of range is `errc::no_such_tensor`, a part number
///                      `errc::no_such_part`. Refusals of the buffer pass through, with its name and its
///                      chunk.
template <class Buffer>
class tiered_tensors {
  static_assert(chunk_store<Buffer>, "tensors need a tiered_buffer, or a prefetch_schedule over one");

 public:
  using top_range = typename Buffer::top_range;

  /// Holds a part of a tensor in tier 0 while it lives. Movable. The tensors outlive it.
  template <access_mode Mode>
  class lease {
   public:
    using byte_type = std::conditional_t<Mode == access_mode::read, const std::byte, std::byte>;

    lease() noexcept = default;
    lease(lease&& other) noexcept
        : owner_(std::exchange(other.owner_, nullptr)),
          part_(other.part_),
          range_(std::exchange(other.range_, top_range{})),
          alone_(std::move(other.alone_)) {}
    lease& operator=(lease&& other) noexcept {
      if (this != &other) {
        end();
        owner_ = std::exchange(other.owner_, nullptr);
        part_ = other.part_;
        range_ = std::exchange(other.range_, top_range{});
        alone_ = std::move(other.alone_);
      }
      return *this;
    }
    ~lease() { end(); }

    /// Ends the lease now.
    void end() noexcept {
      range_ = {};
      alone_.end();
      if (owner_ != nullptr) std::exchange(owner_, nullptr)->end_lease(part_, Mode);
    }

    /// Returns exactly the part's bytes, if the host may access tier 0; none after the lease has ended, or
    /// was moved from.
    [[nodiscard]] std::span<byte_type> span() const noexcept LLMMEM_LIFETIMEBOUND
      requires requires(const top_range& range) { range.span(); }
    {
      return range_.span();
    }
    /// Returns the bytes as elements: `lease.as<float>()`. @throws length_error, argument_error see
    /// `as_elements`.
    template <plain_element T>
    [[nodiscard]] auto as() const LLMMEM_LIFETIMEBOUND
      requires requires(const top_range& range) { range.span(); }
    {
      return as_elements<T>(span(), "lease");
    }
    /// Returns the bytes as tier 0's range type.
    [[nodiscard]] top_range range() const noexcept { return range_; }
    [[nodiscard]] explicit operator bool() const noexcept { return owner_ != nullptr; }

   private:
    friend class tiered_tensors;
    using chunk_lease = typename Buffer::template lease<Mode>;

    tiered_tensors* owner_ = nullptr;
    std::uint32_t part_ = 0;
    top_range range_{};
    chunk_lease alone_;  // the lease of a chunk that holds one tensor only
  };
  using read_lease = lease<access_mode::read>;
  using write_lease = lease<access_mode::write>;
  using update_lease = lease<access_mode::read_write>;

  /// Creates the chunks. @param buffer  outlives the tensors.
  tiered_tensors(Buffer& buffer, chunk_mapping mapping, std::string name = "tiered_tensors")
      : tiered_tensors(without_chunks{}, buffer, std::move(mapping), std::move(name)) {
    create_chunks();
  }
  tiered_tensors(const tiered_tensors&) = delete;
  tiered_tensors& operator=(const tiered_tensors&) = delete;
  /// Removes the chunks. @pre no lease is held.
  ~tiered_tensors() { remove_chunks(); }

  /// @name Tensors
  /// @{
  [[nodiscard]] const chunk_mapping& mapping() const noexcept { return mapping_; }
  /// Returns the store that the tensors are built on.
  [[nodiscard]] Buffer& store() const noexcept { return *buffer_; }
  [[nodiscard]] result<std::uint64_t> bytes(tensor_id tensor) const noexcept;
  [[nodiscard]] result<std::span<const tensor_part>> parts(tensor_id tensor) const noexcept;
  /// Returns whether all of the tensor was written, and not discarded since. The answer is the `value()`: the
  /// result itself only converts to whether it has a value.
  [[nodiscard]] result<bool> has_contents(tensor_id tensor) const noexcept;
  /// The same for one part.
  [[nodiscard]] result<bool> has_contents(tensor_id tensor, std::uint32_t part) const noexcept;
  /// Returns the buffer's chunk that holds a part: for `expect` or `clone`. Lease the chunk through the
  /// tensors only.
  [[nodiscard]] result<chunk_handle> chunk(tensor_id tensor, std::uint32_t part) const noexcept;
  /// Discards the contents. `errc::chunk_leased` while any of it is leased.
  result<void> discard(tensor_id tensor);
  /// @}

  /// @name Leases For a tensor in one part; `errc::tensor_in_parts` for any other. `errc::no_contents` if it
  /// was never written, `errc::chunk_leased` if a lease of the same part is in the way, and the buffer's
  /// refusals.
  /// @{
  result<read_lease> read(tensor_id tensor, tiering::patience wait = tiering::wait_complete) {
    return whole<access_mode::read>(tensor, wait);
  }
  /// The caller writes all of the tensor; until then its contents are unspecified.
  result<write_lease> write(tensor_id tensor, tiering::patience wait = tiering::wait_complete) {
    return whole<access_mode::write>(tensor, wait);
  }
  /// Any of it may change.
  result<update_lease> update(tensor_id tensor, tiering::patience wait = tiering::wait_complete) {
    return whole<access_mode::read_write>(tensor, wait);
  }
  /// @}

  /// @name Leases of one part, counted from 0
  /// @{
  result<read_lease> read(tensor_id tensor, std::uint32_t part,
                          tiering::patience wait = tiering::wait_complete) {
    return lease_part<access_mode::read>(tensor, part, wait);
  }
  result<write_lease> write(tensor_id tensor, std::uint32_t part,
                            tiering::patience wait = tiering::wait_complete) {
    return lease_part<access_mode::write>(tensor, part, wait);
  }
  result<update_lease> update(tensor_id tensor, std::uint32_t part,
                              tiering::patience wait = tiering::wait_complete) {
    return lease_part<access_mode::read_write>(tensor, part, wait);
  }
  /// Only the bytes `changed`, counted from the part's first byte, change and move down. The span is the
  /// whole part. `errc::past_the_bytes`.
  result<update_lease> update(tensor_id tensor, std::uint32_t part, byte_interval changed,
                              tiering::patience wait = tiering::wait_complete);
  /// @}

  /// Leases one part after another and calls `f(lease, part)` with a `lease<Mode>&` and its `tensor_part`;
  /// the next part is brought up meanwhile. Ends at the first refused lease and returns its reason; `f` has
  /// then received all parts before it.
  template <access_mode Mode, class F>
  result<void> for_each_part(tensor_id tensor, F&& f, tiering::patience wait = tiering::wait_complete);

  /// @name Movement   as the buffer's, of all chunks of the tensor; continues after a failure, and
  /// returns the first
  /// @{ Brings up the parts that have contents. `errc::no_contents` if none has.
  result<void> prefetch(tensor_id tensor);
  /// `errc::chunk_leased` while a part of the tensor, or a neighbour in its chunk, is leased.
  result<void> evict(tensor_id tensor);
  /// `errc::chunk_leased` while a part of the tensor is written, or anything in a chunk that it shares is
  /// leased.
  result<void> flush(tensor_id tensor);
  /// @}

  [[nodiscard]] tiered_tensors_stats stats() const noexcept;
  /// Returns one sentence for each broken invariant, except the buffer's own. O(parts + chunks).
  [[nodiscard]] std::vector<std::string> audit() const;

 private:
  friend class persistent_tensors<Buffer>;
  static constexpr std::uint32_t none = ~std::uint32_t{0};
  struct without_chunks {};

  struct part_state {
    std::uint32_t leases = 0;
    bool writing = false;
    bool filled = false;
  };
  struct chunk_state {
    chunk_handle handle;
    std::uint32_t shared = none;  // in `shared_`
    std::uint32_t filled = 0;     // parts in it with contents
  };
  /// The only lease of a chunk that holds several tensors; all their leases use it.
  struct shared_chunk {
    typename Buffer::write_lease fresh;  // if no tensor in the chunk had contents
    typename Buffer::update_lease kept;  // otherwise
    std::uint32_t leases = 0;

    [[nodiscard]] top_range range() const noexcept { return fresh ? fresh.range() : kept.range(); }
  };

  tiered_tensors(without_chunks, Buffer& buffer, chunk_mapping mapping, std::string name);
  void create_chunks();
  /// Marks the part's contents as present.
  void fill(std::uint32_t part) noexcept {
    if (!std::exchange(parts_[part].filled, true)) ++chunk_of(part).filled;
  }
  [[nodiscard]] result<void> check_free(tensor_id tensor);

  [[nodiscard]] failure about(error_code code, tensor_id tensor, std::uint64_t wanted,
                              std::uint64_t found) const noexcept {
    return {code, to_index(tensor), wanted, found, name_.c_str()};
  }
  /// Returns `errc::ok` if nothing is wrong.
  [[nodiscard]] failure check(tensor_id tensor) const noexcept;
  [[nodiscard]] chunk_state& chunk_of(std::uint32_t part) noexcept {
    return chunks_[to_index(mapping_.parts()[part].chunk)];
  }
  [[nodiscard]] const chunk_state& chunk_of(std::uint32_t part) const noexcept {
    return chunks_[to_index(mapping_.parts()[part].chunk)];
  }
  template <access_mode Mode>
  [[nodiscard]] result<lease<Mode>> whole(tensor_id tensor, tiering::patience wait);
  template <access_mode Mode>
  [[nodiscard]] result<lease<Mode>> lease_part(tensor_id tensor, std::uint32_t part, tiering::patience wait);
  template <access_mode Mode>
  [[nodiscard]] result<lease<Mode>> begin_lease(tensor_id tensor, std::uint32_t part, byte_interval changed,
                                                tiering::patience wait);
  template <access_mode Mode>
  [[nodiscard]] result<typename Buffer::template lease<Mode>> take(chunk_handle chunk, byte_interval changed,
                                                                   tiering::patience wait);
  [[nodiscard]] result<void> join(std::uint32_t part, access_mode mode, byte_interval changed,
                                  tiering::patience wait);
  void end_lease(std::uint32_t part, access_mode mode) noexcept;
  /// Calls `f` with each part's number, and keeps the first failure.
  template <class F>
  result<void> each_part(tensor_id tensor, F&& f);
  void remove_chunks() noexcept;

  Buffer* buffer_;
  chunk_mapping mapping_;
  std::string name_;
  std::vector<part_state> parts_;
  std::vector<chunk_state> chunks_;
  std::vector<shared_chunk> shared_;
  std::uint64_t leases_ = 0;
  std::uint64_t chunk_leases_ = 0;
};

}  // namespace v0
}  // namespace llmmem

#include <llmmem/tiering/detail/tiered_tensors_body.hpp>
