/// @file
/// `sharded_state`: weights, gradients or moments of which each rank keeps the part that its partition
/// assigns, gathered layer by layer and reduced to their owners.
#pragma once

#include <llmmem/comm/reduce_op.hpp>
#include <llmmem/comm/transport.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/sharding/concepts.hpp>
#include <llmmem/sharding/detail/sharded_state_parts.hpp>
#include <llmmem/sharding/detail/state_bytes.hpp>
#include <llmmem/sharding/element_runs.hpp>
#include <llmmem/sharding/ids.hpp>
#include <llmmem/sharding/piece_store.hpp>
#include <llmmem/sharding/sharded_wires.hpp>
#include <llmmem/sharding/tensor_shape.hpp>
#include <llmmem/sharding/working_space.hpp>
#include <llmmem/space/concepts.hpp>
#include <llmmem/tiering/access.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// How a sharded state is set up.
struct sharded_options {
  std::string name = "sharded_state";          ///< the name in error texts
  std::uint64_t patience_ns = 60'000'000'000;  ///< each operation ends or fails within this time
  std::uint32_t tag = 0;                       ///< the tag of its messages
  std::uint32_t segment_bytes = 256 * 1024;    ///< the longest message: the unit of packing and summing
  std::uint64_t alignment = 64;                ///< the alignment of the pieces together, and of each buffer
  sharded_wires wires{};                       ///< the form of its messages
};

/// Bytes of one kind of operation, as this rank counted them: of messages, without headers.
struct moved_bytes {
  std::uint64_t calls = 0;
  std::uint64_t sent = 0;
  std::uint64_t received = 0;

  friend constexpr bool operator==(const moved_bytes&, const moved_bytes&) noexcept = default;
};

/// Counters of a sharded state.
struct sharded_stats {
  moved_bytes gathers{};          ///< gathers of the world and of a group
  moved_bytes reduces{};          ///< includes the first half of an all-reduce
  moved_bytes refreshes{};        ///< includes the second half of an all-reduce
  moved_bytes reshards{};         ///< into this state
  std::uint64_t local_bytes = 0;  ///< bytes of the pieces
  std::uint64_t whole_bytes = 0;  ///< bytes of buffers of whole tensors that live now
  std::uint64_t peak_whole_bytes = 0;
  std::uint64_t peak_stage_bytes = 0;  ///< most bytes for packing and summing, during an operation
  std::uint64_t residual_bytes = 0;    ///< of what sums have lost (`sharded_wires::keeps_errors`)

  [[nodiscard]] constexpr std::uint64_t sent() const noexcept {
    return gathers.sent + reduces.sent + refreshes.sent + reshards.sent;
  }
};

/// The whole tensors of a scope. A tensor that the rank holds whole anyway is its own piece, unless a wire
/// restores it; the others are
/// in one buffer of the space, in the order of the scope, without gaps (except for the alignment of an
/// element). The buffer ends with this object.
///
/// The state outlives it.
///
/// @par Thread safety   as a plain value; it may end on any thread. One that holds pieces of a tiered buffer
///                      must end on the buffer's thread.
template <memory_space Space, piece_store Pieces = resident_pieces<Space>>
class whole_tensors {
 public:
  whole_tensors() noexcept = default;

  [[nodiscard]] std::size_t size() const noexcept { return tensors_.size(); }
  /// Returns the ids of its tensors, in the order of the scope.
  [[nodiscard]] std::span<const tensor_id> scope() const noexcept LLMMEM_LIFETIMEBOUND { return scope_; }
  /// Returns all of the `index`-th tensor of the scope, row-major. @pre `index < size()`
  [[nodiscard]] std::span<std::byte> tensor(std::size_t index) const noexcept { return tensors_[index]; }
  [[nodiscard]] std::span<const std::span<std::byte>> tensors() const noexcept LLMMEM_LIFETIMEBOUND {
    return tensors_;
  }
  /// Returns the bytes of the buffer: 0 if the rank holds everything.
  [[nodiscard]] std::uint64_t buffer_bytes() const noexcept { return buffer_.bytes(); }

 private:
  template <partition P, transport T, memory_space S, piece_store M>
  friend class sharded_state;

  std::vector<tensor_id> scope_{};
  std::vector<std::span<std::byte>> tensors_{};
  detail::held_range<Space> buffer_{};
  held_pieces_of<Pieces> held_{};  // pieces that are whole tensors
  bool copies_pieces_ = false;     // all tensors are in the buffer
};

/// A rank's piece of one tensor, at one address while this lives. Movable; the state outlives it.
template <piece_store Pieces>
class piece_lease {
 public:
  piece_lease() noexcept = default;

  /// Returns the elements of `local`, in their order.
  [[nodiscard]] std::span<std::byte> local() const noexcept { return local_; }
  /// Returns the elements of `local` that this rank owns.
  [[nodiscard]] std::span<std::byte> owned() const noexcept { return owned_; }

 private:
  template <partition P, transport T, memory_space S, piece_store M>
  friend class sharded_state;

  held_pieces_of<Pieces> held_{};
  std::span<std::byte> local_{};
  std::span<std::byte> owned_{};
};

/// One kind of state of a catalogue of tensors. Each rank keeps its `local` part of every tensor, dense: in a
/// space whose accounting shows its cost, or in chunks of a `tiered_buffer`.
///
///     sharded_state weights(zero.of(state_kind::weights), tensors, ranks, space);
///     sharded_state gradients(zero.of(state_kind::gradients), tensors, ranks, space);
///     {
///       const auto layer = weights.gather(ids_of_layer).value();     // whole, until the end of the block
///       const auto sums = gradients.allocate_whole(ids_of_layer).value();
///       backward(layer.tensor(0), sums.tensor(0), ...);
///       gradients.reduce_scatter(sums, sum_f32).value();             // as gradients appear
///     }
///     update(weights.owned(id), gradients.owned(id), ...);           // the shard; divide by the ranks here
///     weights.refresh(ids_of_layer).value();                         // if other ranks hold copies of it
///
/// One type for the partitions of sharding/: what is *local* and what is *owned* determines what moves.
///
/// | partition | `gather` | `reduce_scatter` | `refresh` |
/// |---|---|---|---|
/// | `replicated`, ZeRO 1, ZeRO 2's weights | nothing | n (N-1)/N sent | n (N-1)/N |
/// | `flat_uneven`, what ZeRO has sharded | n (N-1)/N | n (N-1)/N | nothing |
/// | `split_2d`, `grid_partition` | what the rank lacks | the same way | copies of blocks |
/// | `hierarchical_zero` | see `gather_within` | | primaries to secondaries |
///
/// n is the bytes of the scope, N the number of ranks; each entry is the bytes that a rank with an even share
/// sends.
///
/// **All ranks of the partition call the same operations in the same order with the same scopes.** A failure
/// that a rank finds ends its call and revokes the transport, so that no rank waits for it; the pieces are
/// then unusable, because they hold old contents or part of the new. Call `agree()`, `shrink()`, and build
/// the state again.
///
/// Sums are in the order of ranks, regardless of owners (`reduce_algorithm::direct`): the bits of a sum
/// depend on the number of ranks alone. **Nothing is scaled**: the caller computes a mean from `owned()`
/// after a `reduce_scatter`, so that each element is scaled once.
///
/// Ranks of the transport beyond the partition's world hold nothing, and may only `reshard_to`.
///
/// **Wires.** `sharded_options::wires` gives messages of floats another form. Shards stay as they are:
///
/// - `gather` and `gather_within` send it if each element of the scope is held by one rank (of the group);
///   all ranks then read the same restored values, the owner too. Other gathers and `refresh` stay plain,
///   because a piece that several ranks hold is their master copy.
/// - Sums add restored contributions, in the order of ranks. `all_reduce` also gathers the sum over the wire
///   if every rank holds all of each tensor, and rounds the owner's part alike, so that all have the same
///   bits.
///
/// **Pieces in tiers.** Given a `tiered_buffer`, or a `prefetch_schedule` over one, each piece is a chunk of
/// it, and is in host memory or a file between operations; an operation leases the pieces of its scope while
/// it runs. Sums and gathers have the same bits. The program leases a piece by `lease`, which is the same
/// call for pieces in memory.
///
///     sharded_state weights(zero.of(state_kind::weights), tensors, ranks, space, buffer);
///     auto mine = weights.lease(tensor_id{3}, access_mode::read_write).value();   // in tier 0 until it ends
///     update(mine.owned());
///
/// **Pieces on a device.** Given a `kernel_space` (kernels/kernel_space.hpp) and an `nccl_transport`, pieces,
/// whole tensors and staging are in the device's memory: kernels on the space's stream pack and add, NCCL
/// sends, and the host copies no byte. Spans are then addresses of the device.
///
///     kernel_space space(memory, queue, device_executor(queue.stream()));
///     sharded_state weights(zero.of(state_kind::weights), tensors, nccl_ranks, space);
///
/// - Every call waits on the host until its work is done, as for pieces in memory: its results may be used on
///   any stream, and `gather_schedule` and `background_sums` overlap it from the thread of their queue.
/// - Before a call that reads or writes what another stream still uses, let the space's stream wait for that
///   stream: `queue.follow`. The caller ends whole tensors, and leases of `gather_schedule`, when the kernels
///   that use them are done: the next gather may write to their memory at once.
/// - Kernels are launched on the calling thread's current device: in the thread of an `operation_queue`,
///   `cudaSetDevice` is the first operation.
/// - The transport's stream may be the space's, which saves an event for each message. Neither may be
///   captured into a graph.
/// - Sums have the host's bits, and are `sum_f32`, `sum_bf16` or `sum_f16`; a sum that is a NaN has the bits
///   that devices produce. Wires need the host, and are refused.
/// - Pieces in tiers come up into the device: tier 0 of their buffer is a `streamed_space` of it. Each call
///   orders its kernels after the copies of that tier, and is done before its leases end. For a piece that
///   the program leases, see `lease`.
///
/// @tparam Partition  copied.
/// @tparam Space      of memory that the host can access, or a `working_space`. Gathered buffers, staging and
///                    resident pieces come from it.
/// @tparam Pieces     where pieces are: `resident_pieces`, or `leased_pieces` over a buffer, on a device with
///                    the space.
/// @par Complexity      an operation takes O(runs) of the pieces involved in addition to its bytes, which
///                      each side copies at most once if runs are strided, and never if they are flat ranges.
///                      An operation that sums takes memory for N + 2 messages in addition; on a device,
///                      up to 15 bytes for each in addition.
/// @par Thread safety   one thread for operations, which use the transport; `local` and `owned` read nothing
///                      that changes; the caller does not access what an operation in flight reads or writes.
///                      Operations on pieces in tiers lease them on the calling thread, except those that
///                      `hold` holds meanwhile. Counters may be read when no operation is in flight,
///                      `whole_bytes` at any time.
/// @par Errors          the constructor throws `argument_error` for a catalogue or a transport that does not
///                      match the partition, and for wires with tensors that are not floats, with more ranks
///                      in the transport than in the partition, on a device, or that `check_wires`
///                      refuses;
///                      `length_error` past 2^63 - 1 bytes, `out_of_memory` if the space lacks space for the
///                      pieces. Sums over a wire throw `argument_error` for another operation than `sum_f32`,
///                      and sums on a device for an operation that is no sum of floats.
///                      Operations return the transport's failure, the space's shortage,
///                      `errc::no_such_tensor` for unknown ids and `errc::size_mismatch` for elements that do
///                      not match the operation: for the last two, nothing was sent. On a device also
///                      `errc::device_failed`: the operation ends for all ranks, and no work is in flight
///                      unless the device is lost. A queue that was refused a wait refuses all later marks:
///                      make another one for the next state.
/// @par Source          Rajbhandari et al. 2020, "ZeRO", arXiv 1910.02054; hierarchical: Wang et al. 2023,
///                      "ZeRO++", arXiv 2306.10209.
template <partition Partition, transport Transport, memory_space Space,
          piece_store Pieces = resident_pieces<Space>>
class sharded_state {
  static_assert(
      Space::is_host_accessible || working_space<Space>,
      "the host cannot access this space: give the state a kernel_space of it (kernels/kernel_space.hpp), "
      "which copies and adds its bytes");
  static_assert(!working_space<Space> || messages_after_work_of<Transport, Space>,
                "pieces on a device need a transport of device memory, whose stream can wait for the space's "
                "work: nccl_transport");

 public:
  using partition_type = Partition;
  using transport_type = Transport;
  using space_type = Space;
  using pieces_type = Pieces;
  using whole = whole_tensors<Space, Pieces>;
  using hold_type = held_pieces_of<Pieces>;

  /// Fills pieces with zeros. Transport and space outlive the state.
  sharded_state(const Partition& layout, std::span<const tensor_facts> tensors, Transport& ranks,
                Space& space, sharded_options options = {})
    requires(Pieces::is_resident);
  /// Pieces are chunks of `store`, which also outlives the state.
  template <class Store>
    requires(std::same_as<Pieces, leased_pieces<Store>> || std::same_as<Pieces, leased_pieces<Store, Space>>)
  sharded_state(const Partition& layout, std::span<const tensor_facts> tensors, Transport& ranks,
                Space& space, Store& store, sharded_options options = {});
  sharded_state(const sharded_state&) = delete;
  sharded_state& operator=(const sharded_state&) = delete;

  [[nodiscard]] const Partition& layout() const noexcept { return layout_; }
  [[nodiscard, deprecated("call layout()")]] const Partition& who() const noexcept { return layout_; }
  [[nodiscard]] std::span<const tensor_facts> tensors() const noexcept LLMMEM_LIFETIMEBOUND { return facts_; }
  /// Returns the transport of its operations.
  [[nodiscard]] Transport& ranks() const noexcept { return *ranks_; }
  /// Returns this rank's number, and whether it is a rank of the partition.
  [[nodiscard]] rank_id rank() const noexcept { return ranks_->rank(); }
  [[nodiscard]] bool is_member() const noexcept { return to_index(rank()) < to_number(layout_.world()); }

  /// Returns this rank's piece: the elements of `layout().local`, in their order. @pre that tensor exists
  [[nodiscard]] std::span<std::byte> local(tensor_id tensor) noexcept
    requires(Pieces::is_resident)
  {
    return local_of(tensor, pieces_.data(to_index(tensor)));
  }
  [[nodiscard]] std::span<const std::byte> local(tensor_id tensor) const noexcept LLMMEM_LIFETIMEBOUND
    requires(Pieces::is_resident)
  {
    return local_of(tensor, pieces_.data(to_index(tensor)));
  }
  /// Returns the part of it that this rank owns: `layout().owned`. An optimizer updates it.
  [[nodiscard]] std::span<std::byte> owned(tensor_id tensor) noexcept
    requires(Pieces::is_resident)
  {
    return owned_of(tensor, pieces_.data(to_index(tensor)));
  }
  [[nodiscard]] std::span<const std::byte> owned(tensor_id tensor) const noexcept LLMMEM_LIFETIMEBOUND
    requires(Pieces::is_resident)
  {
    return owned_of(tensor, pieces_.data(to_index(tensor)));
  }

  /// Leases the same two, regardless of where pieces are between operations. `errc::no_such_tensor`; for
  /// pieces in tiers, the errors of a chunk's lease. On a device the bytes of a piece in tiers are ordered
  /// before the space's further work: launch kernels on its stream, or let theirs hold a mark of its queue.
  /// The lease ends when they are done, or tier 0's queue follows them (`streamed_space`).
  [[nodiscard]] result<piece_lease<Pieces>> lease(tensor_id tensor, access_mode mode);
  /// Holds the pieces of a scope at their addresses, so that an operation on them may run on a thread other
  /// than their buffer's. Costs nothing if pieces are resident.
  [[nodiscard]] result<hold_type> hold(std::span<const tensor_id> scope, access_mode mode);
  /// The same for the pieces that a sum of the scope writes.
  [[nodiscard]] result<hold_type> hold_for_sum(std::span<const tensor_id> scope);
  /// Discards the contents of a piece: pieces in tiers need not be kept, and the next writer writes all of
  /// it. Does nothing if pieces are resident. `errc::no_such_tensor`, `errc::chunk_leased`.
  result<void> discard(tensor_id tensor);

  /// Returns the whole tensors. Elements that this rank holds come from its piece, every other element from
  /// its owner. After owners have changed their elements, call `refresh` first if other ranks hold copies.
  [[nodiscard]] result<whole> gather(std::span<const tensor_id> scope);
  /// Ends the holds of pieces that are whole tensors, so that a tier may move them while the scope stays
  /// gathered. Their spans are invalid until `hold_again`; those in the buffer stay. Sends nothing.
  void let_go(whole& gathered) const noexcept {
    if constexpr (!Pieces::is_resident) gathered.held_.end();
  }
  /// Holds those pieces again, to read; they may have other addresses. The caller must not have changed them
  /// since the gather. Sends nothing.
  [[nodiscard]] result<void> hold_again(whole& gathered);
  /// The same among some ranks, such as those of a node with `hierarchical_zero`. Their pieces make up each
  /// tensor once, or each piece is the whole tensor. No other rank receives anything. All members of the
  /// group call it. `errc::size_mismatch` if they do not hold all: wanted = elements of the tensor, found =
  /// theirs.
  [[nodiscard]] result<whole> gather_within(rank_group<Transport>& node, std::span<const tensor_id> scope);
  /// Allocates memory for whole tensors, with unspecified contents: this rank's contribution to a sum. Sends
  /// nothing. Any stream may write it: if a piece in tiers is the whole tensor, on a device, this waits for
  /// the copies of tier 0 so far.
  [[nodiscard]] result<whole> allocate_whole(std::span<const tensor_id> scope);
  [[nodiscard, deprecated("call allocate_whole()")]] result<whole> room_for(
      std::span<const tensor_id> scope) {
    return allocate_whole(scope);
  }

  /// Sums the ranks' whole tensors into the pieces of the owners. Other elements of pieces are unchanged.
  /// Whole tensors may be the pieces themselves, as `allocate_whole` returns them.
  result<void> reduce_scatter(const whole& contribution, const reduce_op& op) {
    return reduce_scatter(contribution.scope(), contribution.tensors(), op);
  }
  /// @param contribution  this rank's, one for each tensor of the scope, all of it.
  result<void> reduce_scatter(std::span<const tensor_id> scope,
                              std::span<const std::span<std::byte>> contribution, const reduce_op& op);
  /// The same, and then all holders receive the sum: `reduce_scatter`, `refresh`.
  result<void> all_reduce(const whole& contribution, const reduce_op& op) {
    if (auto done = reduce_scatter(contribution, op); !done) return done;
    if constexpr (Space::is_host_accessible) return share_sums(contribution.scope());
    return refresh(contribution.scope());
  }

  /// Updates the elements that a rank holds and does not own, from their owners: weights after the update of
  /// a shard.
  result<void> refresh(std::span<const tensor_id> scope);

  /// Gives `next` the elements that its partition assigns, each from a rank that has it (`live_reshard`),
  /// over the transport of `next`, which contains both partitions' ranks. This state is unchanged. The ranks
  /// of both worlds call it.
  /// @throws argument_error  when the two have different catalogues, and what `reshard` throws.
  ///
  /// Resident pieces move all at once, pieces in tiers one tensor at a time: both states keep their pieces in
  /// the same kind of store.
  template <partition To, memory_space S, piece_store M>
  result<void> reshard_to(sharded_state<To, Transport, S, M>& next) const;

  [[nodiscard]] sharded_stats stats() const noexcept;

 private:
  template <partition P, transport T, memory_space S, piece_store M>
  friend class sharded_state;

  /// The offsets of pieces in memory, or only their lengths.
  struct piece_places {
    std::vector<std::uint64_t> offsets{};
    std::vector<std::uint64_t> sizes{};
    std::uint64_t bytes = 0;
  };
  /// Checks the arguments, and finds this rank's pieces.
  [[nodiscard]] piece_places place_pieces();
  template <class Store>
  [[nodiscard]] Pieces make_pieces(Store& store) {
    if constexpr (Space::is_host_accessible) {
      return Pieces(store, places_.sizes);
    } else {
      return Pieces(store, places_.sizes, detail::lease_work<Space>(*space_));
    }
  }

  /// Returns the piece at its address. @pre it is held
  [[nodiscard]] std::span<std::byte> local_of(tensor_id tensor, std::byte* piece) const noexcept {
    return {piece, local_[to_index(tensor)].elements() * facts_[to_index(tensor)].element_bytes};
  }
  [[nodiscard]] std::span<std::byte> owned_of(tensor_id tensor, std::byte* piece) const noexcept {
    const std::size_t at = to_index(tensor);
    const element_runs& mine = owned_[at];
    if (mine.empty()) return {};
    const std::uint64_t width = facts_[at].element_bytes;
    return {piece + local_[at].position_of(mine.begin) * width, mine.elements() * width};
  }
  /// As `hold`, and notes the addresses for the operation that begins. A failure ends the operation for all
  /// ranks.
  [[nodiscard]] result<hold_type> begin(std::span<const tensor_id> scope, access_mode mode) const;
  /// Holds the pieces that a sum writes, and calls `visit(index of the tensor, address)` for each.
  template <class Visit>
  [[nodiscard]] result<hold_type> hold_owned(std::span<const tensor_id> scope, const Visit& visit);
  [[nodiscard]] std::byte* address(tensor_id tensor) const noexcept { return addresses_[to_index(tensor)]; }
  [[nodiscard]] bool has_all(tensor_id tensor) const noexcept {
    return local_[to_index(tensor)].elements() == facts_[to_index(tensor)].shape.elements();
  }
  [[nodiscard]] failure refuse(error_code code, std::uint32_t index, std::uint64_t wanted,
                               std::uint64_t found) const noexcept {
    return {.code = code, .index = index, .wanted = wanted, .found = found, .where = options_.name.c_str()};
  }
  [[nodiscard]] result<void> check(std::span<const tensor_id> scope) const noexcept;
  [[nodiscard]] result<void> check_sum(std::span<const tensor_id> scope,
                                       std::span<const std::span<std::byte>> contribution,
                                       const reduce_op& op) const noexcept;
  [[nodiscard]] result<void> check_group(rank_group<Transport>& node, std::span<const tensor_id> scope) const;

  /// Adds elements `first` to `first + count` of a tensor, from this rank's piece of it or from all of it.
  void add_from_piece(detail::scattered_bytes& to, tensor_id tensor, std::uint64_t first,
                      std::uint64_t count) const {
    const std::size_t at = to_index(tensor);
    const std::uint64_t width = facts_[at].element_bytes;
    to.add(address(tensor) + local_[at].position_of(first) * width, count * width);
  }
  void add_from_whole(detail::scattered_bytes& to, tensor_id tensor, std::span<std::byte> all,
                      std::uint64_t first, std::uint64_t count) const {
    const std::uint64_t width = facts_[to_index(tensor)].element_bytes;
    to.add(all.data() + first * width, count * width);
  }
  [[nodiscard]] result<whole> make_whole(std::span<const tensor_id> scope, access_mode of_pieces,
                                         bool copies_pieces = false);
  /// Copies this rank's pieces into the buffer.
  [[nodiscard]] result<void> copy_own(const whole& into);
  [[nodiscard]] bool moves_in_refresh(tensor_id tensor) const noexcept;

  /// Gathers among ranks 0 to `world` - 1 of `ranks`; rank r provides `from(tensor, r)` and already has
  /// `has(tensor, r)`.
  template <class Ranks, class From, class Has>
  [[nodiscard]] result<whole> gather_among(Ranks& ranks, std::uint32_t world,
                                           std::span<const tensor_id> scope, const From& from,
                                           const Has& has);
  /// Sends to each other rank what `fill_out(rank)` has put into `out_`, and receives from each into `in_`.
  template <class Ranks, class FillOut, class FillIn>
  [[nodiscard]] result<void> trade(Ranks& ranks, std::uint32_t world, moved_bytes& counted,
                                   const FillOut& fill_out, const FillIn& fill_in);
  template <class Ranks>
  [[nodiscard]] result<void> trade_window(Ranks& ranks, std::uint64_t at, std::uint32_t to,
                                          std::uint32_t from, deadline by, moved_bytes& counted);
  template <class Ranks>
  [[nodiscard]] result<void> swap(Ranks& ranks, std::span<const std::byte> out, std::uint32_t to,
                                  std::span<std::byte> into, std::uint32_t from, deadline by,
                                  moved_bytes& counted);
  [[nodiscard]] result<void> sum_window(std::uint64_t at, std::uint64_t bytes, std::uint64_t step,
                                        std::span<const tensor_id> scope,
                                        std::span<const std::span<std::byte>> contribution,
                                        const reduce_op& op, deadline by);
  [[nodiscard]] result<std::byte*> pack(const detail::scattered_bytes& from, std::uint64_t at,
                                        std::uint64_t bytes, detail::held_range<Space>& room,
                                        std::uint64_t most);
  [[nodiscard]] result<void> unpack(const detail::scattered_bytes& to, const std::byte* from,
                                    std::uint64_t at, std::uint64_t bytes);
  [[nodiscard]] result<std::byte*> stage(detail::held_range<Space>& room, std::uint64_t bytes);
  [[nodiscard]] result<void> end(result<void> done) noexcept;

  // Over a wire.
  void take_wires();
  void take_host_wires();
  /// Whether each element of the scope is in one rank's `from` alone, and each rank has nothing else.
  template <class From, class Has>
  [[nodiscard]] bool is_split(std::uint32_t world, std::span<const tensor_id> scope, const From& from,
                              const Has& has) const;
  /// Gives all ranks each rank's part of what `fill(rank, bytes)` describes, in place.
  template <class Ranks, class Fill>
  [[nodiscard]] result<void> gather_wired(Ranks& ranks, std::uint32_t world, const wire_form& wire,
                                          std::uint32_t node_ranks, moved_bytes& counted, const Fill& fill);
  [[nodiscard]] result<void> share_sums(std::span<const tensor_id> scope);
  [[nodiscard]] result<void> share_wired_sums(std::span<const tensor_id> scope);
  [[nodiscard]] result<void> sum_wired(std::span<const tensor_id> scope,
                                       std::span<const std::span<std::byte>> contribution,
                                       const reduce_op& op);

  Partition layout_;
  std::vector<tensor_facts> facts_;
  Transport* ranks_;
  Space* space_;
  detail::state_bytes<Space> bytes_;
  sharded_options options_;
  std::vector<element_runs> local_{};  // of this rank, by tensor
  std::vector<element_runs> owned_{};
  piece_places places_;  // set up before the pieces
  mutable Pieces pieces_;
  mutable std::vector<std::byte*> addresses_{};  // of pieces that the operation in flight holds
  detail::live_bytes wholes_{};
  detail::held_range<Space> residuals_{};  // of all tensors, with `keeps_errors`
  std::vector<std::uint64_t> residual_of_{};

  // Of the operation in flight.
  detail::scattered_bytes out_{};
  detail::scattered_bytes in_{};
  detail::scattered_bytes own_{};
  std::vector<const std::byte*> parts_{};
  detail::held_range<Space> out_stage_{};
  detail::held_range<Space> in_stage_{};
  detail::held_range<Space> own_stage_{};
  sharded_stats stats_{};
};

/// A state whose pieces are chunks of the given store.
template <partition Partition, transport Transport, memory_space Space, detail::makes_chunks Store>
sharded_state(const Partition&, std::span<const tensor_facts>, Transport&, Space&, Store&,
              sharded_options = {})
    -> sharded_state<Partition, Transport, Space,
                     leased_pieces<Store, std::conditional_t<working_space<Space>, Space, void>>>;

}  // namespace v0
}  // namespace llmmem

#include <llmmem/sharding/detail/sharded_state_body.hpp>
#include <llmmem/sharding/detail/sharded_state_trade.hpp>
#include <llmmem/sharding/detail/sharded_state_wires.hpp>
