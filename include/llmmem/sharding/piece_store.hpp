/// @file
/// Where a rank's pieces of a `sharded_state` are between operations: in memory, or in chunks of a tiered
/// buffer.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/sharding/detail/sharded_state_parts.hpp>
#include <llmmem/sharding/detail/state_bytes.hpp>
#include <llmmem/sharding/ids.hpp>
#include <llmmem/space/concepts.hpp>
#include <llmmem/tiering/access.hpp>
#include <llmmem/tiering/errors.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The memory of pieces, one for each tensor, numbered from 0. A piece has an address while it is held.
///
///     hold(i, mode)   the address of piece `i` until `release`, for one more holder: to `read`, to `write`
///                     all of it, or both. The holders of one piece share the first one's access: the others
///                     may do at most as much. Null for a piece of no bytes.
///     release(i)      removes one holder
///     discard(i)      drops the contents: the next hold is to `write`
///     is_resident     whether addresses are the same for the store's whole life, held or not
template <class P>
concept piece_store = requires(P& pieces, std::uint32_t piece, access_mode mode) {
  { P::is_resident } -> std::convertible_to<bool>;
  { pieces.hold(piece, mode) } -> std::same_as<result<std::byte*>>;
  { pieces.release(piece) } noexcept;
  { pieces.discard(piece) } -> std::same_as<result<void>>;
};

/// Pieces in one range of a space, always resident. They begin with zeros. The constructor waits until they
/// do.
///
/// @par Complexity      every call O(1).
/// @par Thread safety   any thread may hold and release.
template <memory_space Space>
class resident_pieces {
 public:
  static constexpr bool is_resident = true;

  /// @param offsets  of each piece in the range. @param bytes of the range.
  /// @throws out_of_memory  when the space lacks them, and what a space's refusal to clear them throws.
  resident_pieces(Space& space, std::vector<std::uint64_t> offsets, std::span<const std::uint64_t> /*sizes*/,
                  std::uint64_t bytes, std::uint64_t alignment)
      : offsets_(std::move(offsets)) {
    all_.take(space, bytes, alignment).value();
    if (bytes == 0) return;
    detail::state_bytes<Space> work(space);
    const detail::finished_work done_before_they_go(work);
    work.clear(all_.data(), bytes).value();
    work.finish().value();
  }

  [[nodiscard]] std::byte* data(std::uint32_t piece) const noexcept { return all_.data() + offsets_[piece]; }
  [[nodiscard]] result<std::byte*> hold(std::uint32_t piece, access_mode /*mode*/) const noexcept {
    return data(piece);
  }
  void release(std::uint32_t /*piece*/) const noexcept {}
  [[nodiscard]] result<void> discard(std::uint32_t /*piece*/) const noexcept { return {}; }

 private:
  std::vector<std::uint64_t> offsets_;
  detail::held_range<Space> all_{};
};

namespace detail {

/// A store that makes chunks and leases them. Options are none, so they name no store where a state's
/// arguments are deduced.
template <class Store>
concept makes_chunks = requires(Store& store, std::uint64_t bytes) {
  store.create(bytes).value();
  typename Store::read_lease;
  typename Store::write_lease;
  typename Store::update_lease;
};

/// What happens to the bytes of a piece behind its lease, and how they begin.
///
/// @tparam Space  a `working_space`, whose work comes after the copies of the store's tier 0; void: the host
///                accesses the bytes, and the store waits for its copies.
template <class Space>
class lease_work {
 public:
  explicit lease_work(Space& space) noexcept : space_(&space) {}

  template <class Lease>
  [[nodiscard]] static std::byte* address(const Lease& lease) noexcept {
    return lease.range().addresses().data();
  }
  /// Lets the space's work from now on come after the copies that tier 0 has been given: a copy that leaves
  /// may still read the place that a lease writes.
  template <class Store>
  [[nodiscard]] result<void> follow(Store& store) const noexcept {
    return space_->follow(store.first_space().queue());
  }
  /// Returns when these copies are done: then any stream may access what is leased.
  template <class Store>
  [[nodiscard]] static result<void> wait(Store& store) {
    const auto so_far = store.first_space().queue().mark();
    if (!so_far) return so_far.error();
    so_far->wait();
    return {};
  }
  [[nodiscard]] result<void> clear(std::byte* at, std::uint64_t bytes) const {
    state_bytes<Space> work(*space_);
    const finished_work done_before_the_lease_ends(work);
    if (auto cleared = work.clear(at, bytes); !cleared) return cleared;
    return work.finish();
  }

 private:
  Space* space_;
};
template <>
class lease_work<void> {
 public:
  template <class Lease>
  [[nodiscard]] static std::byte* address(const Lease& lease) noexcept {
    return const_cast<std::byte*>(lease.span().data());  // a holder that reads does not write
  }
  template <class Store>
  [[nodiscard]] static result<void> follow(Store& /*store*/) noexcept {
    return {};
  }
  [[nodiscard]] static result<void> clear(std::byte* at, std::uint64_t bytes) noexcept {
    std::memset(at, 0, bytes);
    return {};
  }
};

/// A store whose tier 0 has a queue for its copies, which the work of a space can follow.
template <class Store, class Space>
concept moves_before_work_of = requires(Store& store, Space& space) {
  { space.follow(store.first_space().queue()) } -> std::same_as<result<void>>;
};
template <class Store>
concept brings_to_host = requires(const typename Store::read_lease& lease) { lease.span(); };

}  // namespace detail

/// Pieces that are chunks of a `tiered_buffer`, or of a `prefetch_schedule` over one: between operations they
/// are in any tier, host memory or a file, and while they are held they are in tier 0. They begin with zeros.
/// With ZeRO 3 that is the layout of ZeRO-Infinity (Rajbhandari et al. 2021, arXiv 2104.07857).
///
/// @tparam Store  has `create`, `read`, `write`, `update`, `discard` and `remove`. The host can access its
///                tier 0, unless there is a
/// @tparam Space  of a device, which works on the pieces: tier 0 is then memory of that device with a queue
///                for its copies (`streamed_space`). The space's work comes after the copies that this queue
///                was given before a piece was held; that on a released piece must be done.
/// @par Complexity      the first hold as the store's lease, any other O(1).
/// @par Thread safety   as the store: one thread at a time takes first holds and releases last ones. Another
///                      thread may add holds to a piece that is held meanwhile.
/// @par Errors          the constructor throws what `create` and the leases refuse (`result::value`). `hold`
///                      returns the lease's failure, and `errc::chunk_leased` for more access than the first
///                      holder's.
template <detail::makes_chunks Store, class Space = void>
class leased_pieces {
  static_assert(!std::is_void_v<Space> || detail::brings_to_host<Store>,
                "the host cannot access tier 0 of this store: give the state a kernel_space of the device "
                "(kernels/kernel_space.hpp), which works on its bytes");
  static_assert(std::is_void_v<Space> || detail::moves_before_work_of<Store, Space>,
                "a state on a device works on its pieces in tier 0 of their store: make tier 0 a "
                "streamed_space of that device, whose queue the state's work can follow");

 public:
  static constexpr bool is_resident = false;

  /// Creates a chunk for each piece that has bytes, and writes zeros. The store outlives the pieces, and so
  /// does the space.
  leased_pieces(Store& store, std::span<const std::uint64_t> sizes, detail::lease_work<Space> work = {})
      : store_(&store), work_(work) {
    pieces_.reserve(sizes.size());
    try {
      for (const std::uint64_t bytes : sizes) {
        pieces_.push_back({});
        if (bytes == 0) continue;
        pieces_.back().chunk = store_->create(bytes).value();
        pieces_.back().bytes = bytes;
        const auto lease = store_->write(pieces_.back().chunk).value();
        work_.follow(*store_).value();
        work_.clear(work_.address(lease), bytes).value();
      }
    } catch (...) {
      remove_all();
      throw;
    }
  }
  leased_pieces(const leased_pieces&) = delete;
  leased_pieces& operator=(const leased_pieces&) = delete;
  ~leased_pieces() { remove_all(); }

  [[nodiscard]] result<std::byte*> hold(std::uint32_t piece, access_mode mode) {
    entry& it = pieces_[piece];
    if (it.bytes == 0) return nullptr;
    if (it.holders != 0) {
      const bool is_allowed = it.mode != access_mode::read || mode == access_mode::read;
      if (!is_allowed)
        return failure{.code = errc::chunk_leased, .index = piece, .wanted = 1, .found = it.holders};
      ++it.holders;
      return it.data;
    }
    switch (mode) {
      case access_mode::read:
        return take(it, mode, it.read, store_->read(it.chunk));
      case access_mode::write:
        return take(it, mode, it.write, store_->write(it.chunk));
      case access_mode::read_write:
        break;
    }
    return take(it, mode, it.update, store_->update(it.chunk));
  }
  void release(std::uint32_t piece) noexcept {
    entry& it = pieces_[piece];
    if (it.bytes == 0 || --it.holders != 0) return;
    it.data = nullptr;
    it.end();
  }
  [[nodiscard]] result<void> discard(std::uint32_t piece) {
    return pieces_[piece].bytes == 0 ? result<void>{} : store_->discard(pieces_[piece].chunk);
  }
  /// On a device: waits until any stream may write what is held to `write`.
  [[nodiscard]] result<void> wait() const
    requires(!std::is_void_v<Space>)
  {
    return work_.wait(*store_);
  }

 private:
  using handle_type = std::remove_cvref_t<decltype(std::declval<Store&>().create(std::uint64_t{}).value())>;

  struct entry {
    handle_type chunk{};
    std::uint64_t bytes = 0;
    std::uint32_t holders = 0;
    access_mode mode = access_mode::read;  // of the first holder
    std::byte* data = nullptr;
    // One of these leases, according to `mode`.
    typename Store::read_lease read{};
    typename Store::write_lease write{};
    typename Store::update_lease update{};

    void end() noexcept {
      read = {};
      write = {};
      update = {};
    }
  };

  template <class Lease>
  [[nodiscard]] result<std::byte*> take(entry& it, access_mode mode, Lease& held, result<Lease> had) const {
    if (!had) return had.error();
    if (auto ordered = work_.follow(*store_); !ordered) return ordered.error();
    it.mode = mode;
    it.holders = 1;
    it.data = work_.address(*had);
    held = std::move(*had);
    return it.data;
  }
  void remove_all() noexcept {
    for (entry& each : pieces_) {
      each.end();
      if (each.bytes != 0) static_cast<void>(store_->remove(each.chunk));
    }
  }

  Store* store_;
  [[no_unique_address]] detail::lease_work<Space> work_;
  std::vector<entry> pieces_{};
};

/// Pieces of a state that are held until this ends. Movable; the state outlives it.
template <piece_store Pieces>
class held_pieces_of {
 public:
  held_pieces_of() noexcept = default;
  explicit held_pieces_of(Pieces& pieces) noexcept : pieces_(&pieces) {}
  held_pieces_of(held_pieces_of&& other) noexcept
      : pieces_(std::exchange(other.pieces_, nullptr)), held_(std::exchange(other.held_, {})) {}
  held_pieces_of& operator=(held_pieces_of&& other) noexcept {
    if (this != &other) {
      end();
      pieces_ = std::exchange(other.pieces_, nullptr);
      held_ = std::exchange(other.held_, {});
    }
    return *this;
  }
  ~held_pieces_of() { end(); }

  /// Holds one further piece. @return its address. @pre it was made for pieces
  [[nodiscard]] result<std::byte*> add(tensor_id tensor, access_mode mode) {
    if constexpr (!Pieces::is_resident) held_.push_back(tensor);  // before the hold, because this may throw
    auto had = pieces_->hold(to_index(tensor), mode);
    if constexpr (!Pieces::is_resident) {
      if (!had) held_.pop_back();
    }
    return had;
  }
  void end() noexcept {
    for (const tensor_id each : held_)
      pieces_->release(to_index(each));
    held_.clear();
  }

 private:
  Pieces* pieces_ = nullptr;
  std::vector<tensor_id> held_{};
};

}  // namespace v0
}  // namespace llmmem
