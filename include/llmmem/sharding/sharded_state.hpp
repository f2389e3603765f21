/// @file
/// `sharded_state`: weights, gradients or moments of which each rank keeps what its partition says, gathered
/// layer by layer and reduced to their owners.
#pragma once

#include <llmmem/comm/reduce_op.hpp>
#include <llmmem/comm/transport.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/sharding/concepts.hpp>
#include <llmmem/sharding/detail/sharded_state_parts.hpp>
#include <llmmem/sharding/element_runs.hpp>
#include <llmmem/sharding/ids.hpp>
#include <llmmem/sharding/piece_store.hpp>
#include <llmmem/sharding/tensor_shape.hpp>
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
  std::string name = "sharded_state";  ///< for error texts
  std::uint64_t patience_ns =
      60'000'000'000;     ///< each operation is through that long after it began, or failed
  std::uint32_t tag = 0;  ///< of its messages
  std::uint32_t segment_bytes = 256 * 1024;  ///< the longest message: what is packed or summed at a time
  std::uint64_t alignment = 64;              ///< of the pieces together, and of each buffer
};

/// Bytes of one kind of operation, as this rank saw them: of messages, headers not counted.
struct moved_bytes {
  std::uint64_t calls = 0;
  std::uint64_t sent = 0;
  std::uint64_t received = 0;

  friend constexpr bool operator==(const moved_bytes&, const moved_bytes&) noexcept = default;
};

/// What a sharded state has counted.
struct sharded_stats {
  moved_bytes gathers{};          ///< whole and within a group
  moved_bytes reduces{};          ///< the first half of an all-reduce among them
  moved_bytes refreshes{};        ///< the second half of an all-reduce among them
  moved_bytes reshards{};         ///< into this state
  std::uint64_t local_bytes = 0;  ///< of the pieces
  std::uint64_t whole_bytes = 0;  ///< of buffers of whole tensors that live now
  std::uint64_t peak_whole_bytes = 0;
  std::uint64_t peak_stage_bytes = 0;  ///< of room to pack and to sum in, for the length of an operation

  [[nodiscard]] constexpr std::uint64_t sent() const noexcept {
    return gathers.sent + reduces.sent + refreshes.sent + reshards.sent;
  }
};

/// The tensors of a scope, whole. What the rank holds whole anyway is its own piece; the others lie in one
/// buffer of the space, in the order of the scope without gaps (but for the alignment of an element), which
/// goes with this object.
///
/// The state outlives it.
///
/// @par Thread safety   as a plain value; it may end on another thread than it was made on, but one that
/// holds
///                      pieces of a tiered buffer, where that is one's thread.
template <memory_space Space, piece_store Pieces = resident_pieces<Space>>
class whole_tensors {
 public:
  whole_tensors() noexcept = default;

  [[nodiscard]] std::size_t size() const noexcept { return tensors_.size(); }
  /// What it is whole of, in the order of the scope.
  [[nodiscard]] std::span<const tensor_id> scope() const noexcept LLMMEM_LIFETIMEBOUND { return scope_; }
  /// All of the `index`-th tensor of the scope, row-major. @pre `index < size()`
  [[nodiscard]] std::span<std::byte> tensor(std::size_t index) const noexcept { return tensors_[index]; }
  [[nodiscard]] std::span<const std::span<std::byte>> tensors() const noexcept LLMMEM_LIFETIMEBOUND {
    return tensors_;
  }
  /// Bytes of the buffer: 0 where the rank holds everything.
  [[nodiscard]] std::uint64_t buffer_bytes() const noexcept { return buffer_.bytes(); }

 private:
  template <partition P, transport T, memory_space S, piece_store M>
    requires(S::is_host_accessible)
  friend class sharded_state;

  std::vector<tensor_id> scope_{};
  std::vector<std::span<std::byte>> tensors_{};
  detail::held_range<Space> buffer_{};
  held_pieces_of<Pieces> held_{};  // what is whole as a piece
};

/// A rank's piece of one tensor, at its address for as long as this lives. Movable; the state outlives it.
template <piece_store Pieces>
class piece_lease {
 public:
  piece_lease() noexcept = default;

  /// The elements of `local`, in their order.
  [[nodiscard]] std::span<std::byte> local() const noexcept { return local_; }
  /// Those of them that are this rank's to answer for.
  [[nodiscard]] std::span<std::byte> owned() const noexcept { return owned_; }

 private:
  template <partition P, transport T, memory_space S, piece_store M>
    requires(S::is_host_accessible)
  friend class sharded_state;

  held_pieces_of<Pieces> held_{};
  std::span<std::byte> local_{};
  std::span<std::byte> owned_{};
};

/// One kind of state of a catalogue of tensors, of which each rank keeps its `local` part of every tensor,
/// dense: in a space whose accounting tells what it costs, or in chunks of a `tiered_buffer`.
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
///     weights.refresh(ids_of_layer).value();                         // where others hold what was changed
///
/// One type for the partitions of sharding/: what is *local* and what is *owned* tells what moves.
///
/// | partition | `gather` | `reduce_scatter` | `refresh` |
/// |---|---|---|---|
/// | `replicated`, ZeRO 1, ZeRO 2's weights | nothing | n (N-1)/N sent | n (N-1)/N |
/// | `flat_uneven`, what ZeRO has sharded | n (N-1)/N | n (N-1)/N | nothing |
/// | `split_2d`, `grid_partition` | what is not there | the same way | copies of blocks |
/// | `hierarchical_zero` | see `gather_within` | | primaries to secondaries |
///
/// n are the bytes of the scope, N the ranks; each is what an even share of all ranks sends.
///
/// **All ranks of the partition call the same operations in the same order with the same scopes.** What a
/// rank finds failed ends its call and revokes the transport, so that nobody waits for it; pieces hold what
/// was there or part of what was to come, and are of no use. `agree()`, `shrink()`, and build the state anew.
///
/// Sums are in the order of ranks, whoever owns what (`reduce_way::direct`): the bits of a sum depend on the
/// number of ranks alone. **Nothing is scaled**: a mean is the caller's to make, of `owned()` after a
/// `reduce_scatter`, so that it is done once an element.
///
/// Ranks of the transport beyond the partition's world hold nothing, and may only `reshard_to`.
///
/// **Pieces in tiers.** Given a `tiered_buffer`, or a `prefetch_schedule` over one, each piece is a chunk of
/// it, and lies in host memory or a file between operations; an operation leases the pieces of its scope for
/// its own length. Sums and gathers have the same bits. The program leases a piece by `lease`, which is the
/// same call for pieces in memory.
///
///     sharded_state weights(zero.of(state_kind::weights), tensors, ranks, space, buffer);
///     auto mine = weights.lease(tensor_id{3}, access_mode::read_write).value();   // in tier 0 until it ends
///     update(mine.owned());
///
/// @tparam Partition  copied.
/// @tparam Space      of memory that the host can touch. Gathered buffers, staging and resident pieces come
///                    from it.
/// @tparam Pieces     where pieces lie: `resident_pieces`, or `leased_pieces` over a buffer.
/// @par Complexity      an operation takes O(runs) of the pieces involved beside its bytes, which are copied
///                      once at most on either side where runs are strided, and not at all where they are
///                      flat ranges. An operation that sums takes room for N + 2 messages beside it.
/// @par Thread safety   one thread for operations, which talk on the transport; `local` and `owned` read
///                      nothing that changes, but do not touch what an operation under way reads or writes.
///                      Operations on pieces in tiers lease them on the calling thread, but those that `hold`
///                      holds meanwhile.
///                      Counters may be read when none is under way, but `whole_bytes` at any time.
/// @par Errors          the constructor throws `argument_error` for a catalogue or a transport that is not
///                      the partition's, `length_error` past 2^63 - 1 bytes, `out_of_memory` when the space
///                      has not got the pieces. Operations return what the transport says, the space's
///                      shortage, `errc::no_such_tensor` for ids there are not and `errc::size_mismatch` for
///                      elements that are not the operation's: of the last two nothing was sent.
/// @par Source          Rajbhandari et al. 2020, "ZeRO", arXiv 1910.02054; hierarchical: Wang et al. 2023,
///                      "ZeRO++", arXiv 2306.10209.
template <partition Partition, transport Transport, memory_space Space,
          piece_store Pieces = resident_pieces<Space>>
  requires(Space::is_host_accessible)
class sharded_state {
 public:
  using partition_type = Partition;
  using transport_type = Transport;
  using space_type = Space;
  using pieces_type = Pieces;
  using whole = whole_tensors<Space, Pieces>;
  using hold_type = held_pieces_of<Pieces>;

  /// Pieces begin with zeros. Transport and space outlive the state.
  sharded_state(const Partition& who, std::span<const tensor_facts> tensors, Transport& ranks, Space& space,
                sharded_options options = {})
    requires(Pieces::is_resident);
  /// Pieces are chunks of `store`, which outlives the state, too.
  template <class Store>
    requires std::same_as<Pieces, leased_pieces<Store>>
  sharded_state(const Partition& who, std::span<const tensor_facts> tensors, Transport& ranks, Space& space,
                Store& store, sharded_options options = {});
  sharded_state(const sharded_state&) = delete;
  sharded_state& operator=(const sharded_state&) = delete;

  [[nodiscard]] const Partition& who() const noexcept { return who_; }
  [[nodiscard]] std::span<const tensor_facts> tensors() const noexcept LLMMEM_LIFETIMEBOUND { return facts_; }
  /// What its operations talk on.
  [[nodiscard]] Transport& ranks() const noexcept { return *ranks_; }
  /// This rank's number, and whether it is one of the partition's.
  [[nodiscard]] rank_id rank() const noexcept { return ranks_->rank(); }
  [[nodiscard]] bool is_member() const noexcept { return to_index(rank()) < to_number(who_.world()); }

  /// This rank's piece: the elements of `who().local`, in their order. @pre there is that tensor
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
  /// The part of it that this rank answers for: `who().owned`. What an optimizer updates.
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

  /// The same two for as long as the lease lives, wherever pieces lie between operations.
  /// `errc::no_such_tensor`; of pieces in tiers what the lease of a chunk refuses.
  [[nodiscard]] result<piece_lease<Pieces>> lease(tensor_id tensor, access_mode mode);
  /// Holds the pieces of a scope at their addresses, so that an operation on them may run on another thread
  /// than that of the buffer they lie in. Costs nothing where pieces are resident.
  [[nodiscard]] result<hold_type> hold(std::span<const tensor_id> scope, access_mode mode);
  /// The contents of a piece are worthless: pieces in tiers need not be kept, and whoever is next writes all
  /// of it. Nothing where pieces are resident. `errc::no_such_tensor`, `errc::chunk_leased`.
  result<void> discard(tensor_id tensor);

  /// The tensors whole, each element from its owner, but what this rank holds from its piece: after owners
  /// have changed theirs, `refresh` first where others hold copies.
  [[nodiscard]] result<whole> gather(std::span<const tensor_id> scope);
  /// The same among some ranks, whose pieces make up each tensor once, or are each all of it: those of a node
  /// with `hierarchical_zero`. Nothing is sent to anybody else. All members of the group call it.
  /// `errc::size_mismatch` when they do not hold all: wanted = elements of the tensor, found = theirs.
  [[nodiscard]] result<whole> gather_within(rank_group<Transport>& node, std::span<const tensor_id> scope);
  /// Memory for whole tensors, of any contents: this rank's contribution to a sum. Sends nothing.
  [[nodiscard]] result<whole> allocate_whole(std::span<const tensor_id> scope);
  [[nodiscard, deprecated("call allocate_whole()")]] result<whole> room_for(
      std::span<const tensor_id> scope) {
    return allocate_whole(scope);
  }

  /// What the ranks' whole tensors sum up to, in the pieces of those who own it. Other elements of pieces
  /// stay. Whole tensors may be the pieces themselves, as `allocate_whole` gives them.
  result<void> reduce_scatter(const whole& contribution, const reduce_op& op) {
    return reduce_scatter(contribution.scope(), contribution.tensors(), op);
  }
  /// @param contribution  this rank's, one for each tensor of the scope, all of it.
  result<void> reduce_scatter(std::span<const tensor_id> scope,
                              std::span<const std::span<std::byte>> contribution, const reduce_op& op);
  /// The same, and then everybody has it who holds it: `reduce_scatter`, `refresh`.
  result<void> all_reduce(const whole& contribution, const reduce_op& op) {
    if (auto done = reduce_scatter(contribution, op); !done) return done;
    return refresh(contribution.scope());
  }

  /// What a rank holds and does not own becomes what its owner has: weights after the update of a shard.
  result<void> refresh(std::span<const tensor_id> scope);

  /// Gives `next` what its partition says, each element from whoever has it (`live_reshard`), over the
  /// transport of `next`, of which both partitions' ranks are. This state stays as it is. Both worlds' ranks
  /// call it.
  /// @throws argument_error  when the two have not one catalogue, what `reshard` throws.
  ///
  /// Resident pieces move all at once, of pieces in tiers those of one tensor at a time: both states' ranks
  /// have theirs in the same kind of place.
  template <partition To, memory_space S, piece_store M>
  result<void> reshard_to(sharded_state<To, Transport, S, M>& next) const;

  [[nodiscard]] sharded_stats stats() const noexcept;

 private:
  template <partition P, transport T, memory_space S, piece_store M>
    requires(S::is_host_accessible)
  friend class sharded_state;

  /// Where pieces go in memory, or how long each is.
  struct piece_places {
    std::vector<std::uint64_t> offsets{};
    std::vector<std::uint64_t> sizes{};
    std::uint64_t bytes = 0;
  };
  /// Checks the arguments, and learns what is this rank's.
  [[nodiscard]] piece_places place_pieces();

  /// The piece at its address. @pre it is held
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
  /// As `hold`, and notes the addresses for the operation that begins. What fails ends it for all ranks.
  [[nodiscard]] result<hold_type> begin(std::span<const tensor_id> scope, access_mode mode) const;
  [[nodiscard]] std::byte* address(tensor_id tensor) const noexcept { return addresses_[to_index(tensor)]; }
  [[nodiscard]] bool has_all(tensor_id tensor) const noexcept {
    return local_[to_index(tensor)].elements() == facts_[to_index(tensor)].shape.elements();
  }
  [[nodiscard]] failure refuse(error_code code, std::uint32_t index, std::uint64_t wanted,
                               std::uint64_t found) const noexcept {
    return {.code = code, .index = index, .wanted = wanted, .found = found, .where = options_.name.c_str()};
  }
  [[nodiscard]] result<void> check(std::span<const tensor_id> scope) const noexcept;
  [[nodiscard]] result<void> check_group(rank_group<Transport>& node, std::span<const tensor_id> scope) const;

  /// Elements `first` to `first + count` of a tensor, in this rank's piece of it or in all of it.
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
  [[nodiscard]] result<whole> make_whole(std::span<const tensor_id> scope, access_mode of_pieces);
  void copy_own(const whole& into) noexcept;
  [[nodiscard]] bool moves_in_refresh(tensor_id tensor) const noexcept;

  /// Gathers among ranks 0 to `world` - 1 of `ranks`, of which rank r has `from(tensor, r)` to give and
  /// `has(tensor, r)` already.
  template <class Ranks, class From, class Has>
  [[nodiscard]] result<whole> gather_among(Ranks& ranks, std::uint32_t world,
                                           std::span<const tensor_id> scope, const From& from,
                                           const Has& has);
  /// To each of the others what `fill_out(rank)` has put into `out_`, and from each what goes to `in_`.
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
  [[nodiscard]] result<std::byte*> stage(detail::held_range<Space>& room, std::uint64_t bytes);
  void end_stage() noexcept;

  Partition who_;
  std::vector<tensor_facts> facts_;
  Transport* ranks_;
  Space* space_;
  sharded_options options_;
  std::vector<element_runs> local_{};  // of this rank, by tensor
  std::vector<element_runs> owned_{};
  piece_places places_;  // set up before the pieces
  mutable Pieces pieces_;
  mutable std::vector<std::byte*> addresses_{};  // of pieces that the operation under way holds
  detail::live_bytes wholes_{};

  // Of the operation under way.
  detail::scattered_bytes out_{};
  detail::scattered_bytes in_{};
  detail::scattered_bytes own_{};
  detail::held_range<Space> out_stage_{};
  detail::held_range<Space> in_stage_{};
  detail::held_range<Space> own_stage_{};
  sharded_stats stats_{};
};

/// A state whose pieces are chunks of the store that it is given.
template <partition Partition, transport Transport, memory_space Space, class Store>
  requires(!std::same_as<Store, sharded_options>)
sharded_state(const Partition&, std::span<const tensor_facts>, Transport&, Space&, Store&,
              sharded_options = {}) -> sharded_state<Partition, Transport, Space, leased_pieces<Store>>;

}  // namespace v0
}  // namespace llmmem

#include <llmmem/sharding/detail/sharded_state_body.hpp>
