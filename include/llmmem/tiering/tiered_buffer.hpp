/// @file
/// `tiered_buffer`: model state larger than memory. Chunks live in tiers of spaces, move by themselves or as
/// told, and are touched under leases.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/detail/handle_table.hpp>
#include <llmmem/detail/history.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/result.hpp>
#include <llmmem/tiering/access.hpp>
#include <llmmem/tiering/chunk_key.hpp>
#include <llmmem/tiering/detail/tier_edge.hpp>
#include <llmmem/tiering/detail/tier_state.hpp>
#include <llmmem/tiering/detail/tier_steps.hpp>
#include <llmmem/tiering/detail/tiered_buffer_records.hpp>
#include <llmmem/tiering/plan.hpp>
#include <llmmem/tiering/tier.hpp>
#include <llmmem/tiering/tiered_types.hpp>
#include <llmmem/transfer/meter.hpp>
#include <llmmem/version/dirty_ranges.hpp>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

class prefix_index;  // complete wherever a space keeps chunks: their index has one

/// Chunks of bytes of any size, in tiers of spaces, fastest first.
///
///     host_space host({.budget = 64 << 20});
///     file_space<uring_io> disk("state", {.budget = 1 << 30});
///     tiered_buffer<host_space, file_space<uring_io>> buffer({}, {host, 64 << 20}, {disk, 1 << 30});
///
///     const chunk_handle weights = buffer.create(bytes).value();
///     {
///       auto all = buffer.write(weights).value();     // contents are made anew: nothing is brought in
///       fill(all.span());
///     }
///     buffer.prefetch(other).value();                 // on its way while we compute
///     auto seen = buffer.read(weights).value();       // waits until it is in tier 0, and holds it there
///
/// - **A lease** pins its chunk in tier 0 at one address. Any number of `read`, or one `write` or `update`.
/// - **Every chunk has its place in the last tier** from `create` on, so that what has to leave can always go
///   down. Tiers above hold copies; the topmost is the newest.
/// - **Dirty bytes.** A lease that writes marks its range; when the copy goes down, only those bytes move,
///   rounded to the granularity of the tier beneath. A clean copy that has to leave is dropped.
/// - **Budgets are hard**: each tier is one range of its space, carved by best fit; a transfer takes its room
///   before it begins. What does not fit is `errc::out_of_bytes` with the shortage, and changes nothing.
/// - **What leaves memory** (a space with `leaves_memory`) is verified with CRC-32C when it comes back:
///   `errc::checksum_differs`, never wrong bytes.
/// - **Clones** are copied on write: until one of them changes they share every copy, and the place in the
///   last tier. Then that one parts, with a place of its own there.
/// - **Two neighbours that the host cannot touch**, a device above a file or a file above another, copy
///   through a ring of `bounce_bytes` of host memory (`bounce_queue`), whose pieces go on inside calls:
///   `progress` now and then keeps them going. A copy that goes down from such a tier to one that leaves
///   memory goes whole where it has not come up from there, as a checksum is of all of it.
/// - **A codec** gives chunks another form in the last tier. Encoding and decoding run on the calling
///   thread, in staging memory that is taken out of the budget of the tier above when the buffer is built.
/// - **Nothing is lost by a failure.** A copy is dropped only once what is beneath has all of it; a write
///   that fails leaves the copy above dirty and where it was, and is tried again when room is next needed.
/// - **What goes on by itself**: transfers under way. What follows them (the next hop of a prefetch, the
///   use of room come free) happens inside calls; `progress` is the one that does only that.
///
/// @tparam Traits  see `tiered_traits`.
/// @tparam Tiers   at least two: spaces, or `tier<Space, Eviction, Write, Codec, Admission>`. Only the
///                 last can have a codec, and the host must be able to touch the one above it.
/// @par Complexity      a lease of a resident chunk O(1), or as its eviction policy's `pin`. No allocation
///                      after construction.
/// @par Thread safety   one thread at a time; leased memory is the lease holder's to share.
/// @par Errors          the constructor throws `out_of_memory` when a tier's space has not got its budget, or
///                      the first tier less than `largest_lease_bytes`, `argument_error` for options that
///                      cannot be. Everything else is a value; what a space's copies throw passes through.
template <class Traits, class... Tiers>
class basic_tiered_buffer {
 public:
  static_assert(sizeof...(Tiers) >= 2,
                "a tiered_buffer moves chunks between tiers: give it at least two, the fastest first, as in "
                "tiered_buffer<host_space, file_space<>>");
  static constexpr std::size_t tiers = sizeof...(Tiers);
  template <std::size_t Index>
  using space_type = typename std::tuple_element_t<Index, std::tuple<Tiers...>>::space_type;
  /// Whether contents that lie in the last tier can become chunks: they are there as they are, in one range.
  static constexpr bool adopts =
      !detail::tier_state<std::tuple_element_t<tiers - 1, std::tuple<Tiers...>>>::encodes &&
      !detail::never_fragments<space_type<tiers - 1>>();
  /// Whether chunks may have keys, and outlive the process.
  static constexpr bool keeps_chunks = detail::keeps_chunks<space_type<tiers - 1>>();
  using top_range = typename space_type<0>::range_type;
  using stats_type = tiered_stats<tiers>;
  using observer_type = typename Traits::observer;
  static_assert(access_observer<observer_type>, "Traits::observer must be an access_observer");

  /// Holds a chunk in tier 0 for as long as it lives. Movable. The buffer outlives it.
  template <access_mode Mode>
  class lease {
   public:
    using byte_type = std::conditional_t<Mode == access_mode::read, const std::byte, std::byte>;

    lease() noexcept = default;
    lease(lease&& other) noexcept
        : buffer_(std::exchange(other.buffer_, nullptr)),
          slot_(other.slot_),
          range_(std::exchange(other.range_, {})) {}
    lease& operator=(lease&& other) noexcept {
      if (this == &other) return *this;
      end();
      buffer_ = std::exchange(other.buffer_, nullptr);
      slot_ = other.slot_;
      range_ = std::exchange(other.range_, {});
      return *this;
    }
    ~lease() { end(); }

    /// Ends it now.
    void end() noexcept {
      range_ = {};
      if (buffer_ != nullptr) std::exchange(buffer_, nullptr)->end_lease(slot_, Mode);
    }

    /// More bytes of the chunk change under it than those that it was taken for. `errc::past_the_bytes`.
    /// @pre it has not ended.
    result<void> also_changes(std::uint64_t offset, std::uint64_t count) noexcept
      requires(Mode == access_mode::read_write)
    {
      return buffer_->add_dirty(slot_, offset, count);
    }

    /// The bytes, where the host may touch tier 0; none when it has ended, or was moved from.
    [[nodiscard]] std::span<byte_type> span() const noexcept LLMMEM_LIFETIMEBOUND
      requires(space_type<0>::is_host_accessible)
    {
      return range_.span();
    }
    /// The bytes in tier 0's own terms.
    [[nodiscard]] top_range range() const noexcept { return range_; }
    [[nodiscard]] explicit operator bool() const noexcept { return buffer_ != nullptr; }

   private:
    friend class basic_tiered_buffer;
    lease(basic_tiered_buffer& buffer, std::uint32_t slot, top_range range) noexcept
        : buffer_(&buffer), slot_(slot), range_(range) {}

    basic_tiered_buffer* buffer_ = nullptr;
    std::uint32_t slot_ = 0;
    top_range range_{};
  };
  using read_lease = lease<access_mode::read>;
  using write_lease = lease<access_mode::write>;
  using update_lease = lease<access_mode::read_write>;

  /// @param places  the space of each tier, and its budget there. The spaces outlive the buffer.
  explicit basic_tiered_buffer(tiered_options options,
                               const tier_place<typename Tiers::space_type>&... places)
    requires std::default_initializable<observer_type>
      : basic_tiered_buffer(typename Traits::clock{}, observer_type{}, std::move(options), places...) {}
  basic_tiered_buffer(observer_type observer, tiered_options options,
                      const tier_place<typename Tiers::space_type>&... places)
      : basic_tiered_buffer(typename Traits::clock{}, std::move(observer), std::move(options), places...) {}
  basic_tiered_buffer(typename Traits::clock clock, tiered_options options,
                      const tier_place<typename Tiers::space_type>&... places)
    requires std::default_initializable<observer_type>
      : basic_tiered_buffer(clock, observer_type{}, std::move(options), places...) {}
  basic_tiered_buffer(typename Traits::clock clock, observer_type observer, tiered_options options,
                      const tier_place<typename Tiers::space_type>&... places);
  basic_tiered_buffer(const basic_tiered_buffer&) = delete;
  basic_tiered_buffer& operator=(const basic_tiered_buffer&) = delete;

  /// Waits for what is under way. What was not flushed is gone with the upper tiers.
  ~basic_tiered_buffer();

  /// @name Chunks
  /// @{
  /// A chunk without contents. Takes its place in the last tier; `errc::out_of_bytes` where there is none,
  /// and where any tier could not hold it alone (the text names that tier and the most it can),
  /// `errc::table_full` beyond `max_chunks`, `errc::not_opened` where the last tier is only read.
  result<chunk_handle> create(std::uint64_t bytes);
  /// Another chunk of the same size and contents. Takes no room and moves nothing: both share every copy, the
  /// place in the last tier and the transfer under way, until one of them is written, updated, resized or
  /// discarded. That one then *parts*: it takes a place of its own in the last tier first
  /// (`errc::out_of_bytes` where there is none). `write` and `discard` part without copying a byte; `update`
  /// and `resize` bring the shared contents up to tier 0 and copy them there, so that tier 0 has both for a
  /// while, and the one that parts is all dirty. A refused parting leaves both as they were. The last one
  /// left owns what was shared, and changes in place.
  ///
  /// Leases of one are in no other's way: a clone parts from what is being read. `flush`, `evict`,
  /// `prefetch`, `execute` and `expect` are about what is shared, and so is the count of leases that write
  /// policies ask for; a lease of any is in the way of `evict`. `remove` of one leaves the others as they
  /// are.
  ///
  /// O(1), of clones of clones too. `errc::table_full` beyond `max_chunks`, `errc::chunk_leased` while it is
  /// being written.
  result<chunk_handle> clone(chunk_handle chunk);
  /// A chunk whose contents lie in the last tier already, `offset` bytes into its range: a tensor in a
  /// model's file (`model_file_space`). The other chunks' room there is what such chunks leave.
  /// @param checksum  CRC-32C of them, where it is known: they are held to it each time.
  /// `errc::place_taken` where another chunk lies, with the bytes; `errc::past_the_bytes` where the range
  /// ends; `errc::bad_granularity` for an offset that is no multiple of the tier's (1 takes any).
  result<chunk_handle> adopt(std::uint64_t offset, std::uint64_t bytes,
                             std::optional<std::uint32_t> checksum = {})
    requires(adopts);
  /// Ends a chunk. `errc::chunk_leased` while it is leased.
  result<void> remove(chunk_handle chunk);
  /// Gives the chunk another size. Contents stay up to the smaller of both; those behind are anything. A
  /// chunk with contents comes up to tier 0 for it, where it has two places meanwhile, and is all dirty then.
  /// Waits. `errc::chunk_leased`, and what `create` and `read` refuse; the chunk is then as it was.
  result<void> resize(chunk_handle chunk, std::uint64_t bytes);
  /// Makes the contents worthless: nothing of them is moved any more. The next lease is a `write`.
  result<void> discard(chunk_handle chunk);
  [[nodiscard]] result<std::uint64_t> bytes(chunk_handle chunk) const noexcept;
  /// How often contents of any chunk may have changed: by `create`, a lease that writes, `resize`, `discard`.
  [[nodiscard]] std::uint64_t changes() const noexcept { return changes_; }
  /// What `changes()` was after the last that may have changed this chunk: its contents are the same for as
  /// long as that is. Chunks that share contents share it.
  [[nodiscard]] result<std::uint64_t> last_change(chunk_handle chunk) const noexcept;
  /// Whose count that is: a number that no other buffer of the process has, but for a chance of 2^-64.
  [[nodiscard]] std::uint64_t identity() const noexcept { return identity_; }
  /// The tier of the newest copy. `errc::no_contents`.
  [[nodiscard]] result<std::size_t> tier_of(chunk_handle chunk) const noexcept;
  /// @}

  /// @name Leases
  /// `errc::no_contents` for a chunk that was never written, `errc::chunk_leased` when another lease is in
  /// the way, `errc::out_of_bytes` when leased chunks leave no room in tier 0, `errc::timed_out` when
  /// patience ends (the chunk then comes up in the background), and what a transfer failed with.
  /// @{
  result<read_lease> read(chunk_handle chunk, patience wait = wait_complete);
  /// All of it will be written; until then the contents are anything.
  result<write_lease> write(chunk_handle chunk, patience wait = wait_complete);
  /// Any of it may change.
  result<update_lease> update(chunk_handle chunk, patience wait = wait_complete);
  /// Only `count` bytes from `offset` on change: no others are moved down for it. The span is the whole
  /// chunk.
  result<update_lease> update(chunk_handle chunk, std::uint64_t offset, std::uint64_t count,
                              patience wait = wait_complete);
  /// @}

  /// @name Movement
  /// @{
  /// Begins to bring a chunk up. What fails then is told by `background_failure()`, and the next lease tries
  /// again.
  result<void> prefetch(chunk_handle chunk);
  /// Makes the chunk leave tier 0, written back first where it is dirty. Waits for room beneath, not for the
  /// write. `errc::chunk_leased`.
  result<void> evict(chunk_handle chunk);
  /// Returns when the last tier has all of the chunk's contents. No change for one without.
  result<void> flush(chunk_handle chunk);
  /// The same for all chunks; goes on after a failure, and gives the first.
  result<void> flush();
  /// Takes note of what has arrived, and begins what was waiting for it. Never waits.
  void progress();
  /// One step of a plan (`prefetch_schedule`), of one hop: `fetch` to `tier` from the one beneath it,
  /// `write_back` from `tier` to the one beneath, `drop` of the copy in `tier`, written back first where it
  /// is dirty. Never waits. Room is taken from what lies free or is on its way out before anything is
  /// evicted.
  step_outcome execute(chunk_handle chunk, plan_operation operation, std::size_t tier);
  /// Tells the tiers' policies when the chunk is next leased, in any count that grows (`access_hint`).
  result<void> expect(chunk_handle chunk, std::uint64_t next_use) noexcept;
  /// @}

  /// @name Keys
  /// Where the last tier's space keeps an index (`persistent_file_space`), chunks with a key outlive the
  /// process: as the last tier had them.
  /// @{
  /// A chunk that a later process finds by its key. `errc::key_taken`; `errc::table_full` where the index has
  /// no room for one more.
  result<chunk_handle> create(std::uint64_t bytes, const chunk_key& key)
    requires(keeps_chunks);
  /// The chunk of that key, of this process or one before. `errc::no_such_key`.
  [[nodiscard]] result<chunk_handle> find(const chunk_key& key) const noexcept
    requires(keeps_chunks);
  /// `flush`, and returns when neither a crash nor a loss of power can take what is there. Goes on after a
  /// failure, and gives the first.
  result<void> persist()
    requires(keeps_chunks);
  /// Reads each chunk with a key that rests in the last tier only, and removes those whose bytes are
  /// damaged; how many. Of reads that fail it gives the first failure, and goes on.
  result<std::uint64_t> check_kept()
    requires(keeps_chunks);
  /// @}

  [[nodiscard]] stats_type stats() const;
  /// What a chunk of `bytes` takes of any tier, at most: as its granularity rounds it.
  [[nodiscard]] std::uint64_t rounded_bytes(std::uint64_t bytes) const noexcept;
  [[nodiscard]] const observer_type& observer() const noexcept { return observer_; }
  [[nodiscard]] observer_type& observer() noexcept { return observer_; }
  /// By the clock it measures with.
  [[nodiscard]] std::uint64_t now_ns() const noexcept { return clock_.now_ns(); }
  /// The last failure of a transfer nobody waited for.
  [[nodiscard]] const failure& background_failure() const noexcept { return background_failure_; }

  /// One sentence for each broken invariant. O(chunks).
  [[nodiscard]] std::vector<std::string> audit() const;

 private:
  static constexpr std::size_t last = tiers - 1;
  static constexpr std::uint32_t none = detail::no_index;
  static constexpr bool encodes =
      detail::tier_state<std::tuple_element_t<last, std::tuple<Tiers...>>>::encodes;
  static_assert(!encodes || space_type<last - 1>::is_host_accessible,
                "a codec works on host memory: the tier above the last must be one that the host can touch");

  using attempt = detail::attempt;
  using chunk_name = detail::chunk_name;
  using chunk_record = detail::chunk_record<tiers, keeps_chunks>;
  using copy = detail::tier_copy;
  using edges = detail::tier_edges<Traits, std::make_index_sequence<last>, typename Tiers::space_type...>;
  using parting = detail::parting;
  using passage = detail::passage;
  using sieve = detail::slot_sieve;
  using staging_slot = detail::staging_slot;
  using transfer = detail::tier_transfer;

  template <std::size_t Count, class F>
  static void with_index(std::size_t i, F&& f);
  template <std::size_t Index>
  [[nodiscard]] auto& tier_at() noexcept {
    return std::get<Index>(tiers_);
  }
  template <std::size_t Index>
  [[nodiscard]] const auto& tier_at() const noexcept {
    return std::get<Index>(tiers_);
  }

  // Chunks: tiering/detail/tiered_buffer_body.hpp
  [[nodiscard]] failure check(chunk_handle chunk) const noexcept;
  [[nodiscard]] failure check_size(std::uint64_t bytes) const noexcept;
  [[nodiscard]] failure check_fits(std::uint64_t bytes) const noexcept;
  [[nodiscard]] failure at_chunk(error_code code, std::uint32_t slot, std::uint64_t wanted = 0,
                                 std::uint64_t found = 0) const noexcept;
  [[nodiscard]] failure no_more_chunks() const noexcept;
  [[nodiscard]] std::uint32_t record_of(chunk_handle chunk) noexcept;
  [[nodiscard]] access_hint hint_of(std::uint32_t slot) const noexcept;
  [[nodiscard]] result<chunk_handle> enter(copy& place, std::uint64_t bytes);
  result<void> resize_top(std::uint32_t slot, std::uint64_t bytes);
  result<void> await_quiet(std::uint32_t slot);
  void forget_contents(std::uint32_t slot) noexcept;
  void release_reservations(std::uint32_t slot) noexcept;
  void unqueue_prefetch(std::uint32_t slot) noexcept;
  void release_places() noexcept;
  void note(const failure& why) noexcept;

  // Leases: tiering/detail/tiered_buffer_leases.hpp
  result<top_range> begin_lease(chunk_handle chunk, access_mode mode, byte_interval changed, patience wait);
  void end_lease(std::uint32_t name, access_mode mode) noexcept;
  result<void> add_dirty(std::uint32_t name, std::uint64_t offset, std::uint64_t count) noexcept;

  // Clones: tiering/detail/tiered_buffer_clones.hpp
  void join(std::uint32_t name, std::uint32_t slot) noexcept;
  void leave(std::uint32_t name) noexcept;
  result<void> part(std::uint32_t name, std::uint64_t bytes, parting how, patience wait);
  result<void> await_top_room(copy& fresh, std::uint64_t bytes, std::uint32_t held, patience wait,
                              std::uint64_t began_ns);
  result<void> copy_top(const copy& to, const copy& from, std::uint64_t bytes);
  void audit_names(std::vector<std::string>& found) const;

  // Keys: tiering/detail/tiered_buffer_keeping.hpp
  void adopt_kept();
  [[nodiscard]] std::uint64_t& adopt(const chunk_extent& extent)
    requires(keeps_chunks);
  void set_key(std::uint32_t name, const chunk_key& key) noexcept
    requires(keeps_chunks);
  [[nodiscard]] bool owns_key(std::uint32_t name) const noexcept;
  [[nodiscard]] result<void> give_up_key(std::uint32_t name);
  [[nodiscard]] result<void> unindex(std::uint32_t slot);
  [[nodiscard]] result<void> reindex(std::uint32_t slot);

  // Steps of plans: tiering/detail/tiered_buffer_steps.hpp
  template <std::size_t Index>
  [[nodiscard]] step_outcome execute_fetch(std::uint32_t slot);
  template <std::size_t Index>
  [[nodiscard]] step_outcome execute_store(std::uint32_t slot, plan_operation operation);

  // Movement of chunks: tiering/detail/tiered_buffer_movement.hpp
  [[nodiscard]] attempt advance(std::uint32_t slot, bool needs_contents, urgency how);
  [[nodiscard]] result<void> make_resident(std::uint32_t slot, bool needs_contents, patience wait);
  void note_ended();
  [[nodiscard]] bool is_due(const chunk_record& c, std::size_t tier) const noexcept;
  void mark_due(std::uint32_t slot) noexcept;
  void write_through_due(std::uint32_t except);
  result<void> flush_record(std::uint32_t slot);
  void begin_writing_all();

  // Room in a tier: tiering/detail/tiered_buffer_room.hpp, tiering/detail/tiered_buffer_middle.hpp
  template <std::size_t Index>
  class hold;
  template <std::size_t Index>
  class passed_over;
  template <std::size_t Index>
  void pin(std::uint32_t slot) noexcept;
  template <std::size_t Index>
  void unpin(std::uint32_t slot) noexcept;
  template <std::size_t Index>
  void become_valid(std::uint32_t slot) noexcept;
  template <std::size_t Index>
  void drop(std::uint32_t slot) noexcept;
  template <std::size_t Index>
  void drop_clean(std::uint32_t slot) noexcept;
  template <std::size_t Index>
  void forget(std::uint32_t slot) noexcept;
  template <std::size_t Index>
  [[nodiscard]] std::uint64_t most_room() const noexcept;
  template <std::size_t Index>
  [[nodiscard]] attempt make_room(copy& into, std::uint64_t bytes, urgency how);
  [[nodiscard]] bool cancel_reservations() noexcept;
  template <std::size_t Index>
  [[nodiscard]] bool is_admitted(std::uint32_t slot, passage way) noexcept;
  template <std::size_t Index>
  void admit(std::uint32_t slot, passage way) noexcept;
  template <std::size_t Index>
  void leave_when_passed(std::uint32_t slot) noexcept;
  template <std::size_t Index>
  void let_go(std::uint32_t slot, urgency how);
  template <std::size_t Index>
  [[nodiscard]] bool take_clean_room(copy& into, std::uint64_t bytes) noexcept;

  // Transfers over an edge: tiering/detail/tiered_buffer_transfers.hpp
  template <std::size_t Index>
  struct below;
  template <std::size_t Index>
  [[nodiscard]] attempt can_begin() noexcept;
  template <std::size_t Index>
  [[nodiscard]] attempt begin_store(std::uint32_t slot, bool then_drops, urgency how);
  template <std::size_t Index>
  [[nodiscard]] result<std::uint64_t> store_parts(std::uint32_t id, std::uint32_t slot, urgency how);
  template <std::size_t Index>
  void finish_store(std::uint32_t id, const transfer& done, const result<void>& outcome) noexcept;
  template <std::size_t Index>
  [[nodiscard]] attempt begin_fetch(std::uint32_t slot, urgency how);
  template <std::size_t Index>
  result<void> finish_fetch(std::uint32_t id, const transfer& done, result<void> outcome) noexcept;
  template <std::size_t Index>
  result<void> finish(std::uint32_t id, const result<void>& outcome) noexcept;
  [[nodiscard]] attempt refused(const failure& why) const noexcept;
  [[nodiscard]] failure not_moved() const noexcept;
  result<void> verify(std::uint32_t slot, const copy& beneath, std::uint32_t found) const noexcept;
  [[nodiscard]] std::uint32_t claim_transfer(const transfer& fresh) noexcept;
  void release_transfer(std::uint32_t id) noexcept;
  [[nodiscard]] std::uint32_t transfer_touching(std::size_t tier) const noexcept;
  [[nodiscard]] bool is_ready(std::uint32_t id);
  result<void> wait_for(std::uint32_t id, patience wait, std::uint64_t began_ns);
  result<void> complete(std::uint32_t id);
  [[nodiscard]] std::uint64_t stage_size() const noexcept;
  [[nodiscard]] std::uint64_t placed_stages() const noexcept;
  [[nodiscard]] std::uint32_t free_stage() noexcept;
  template <std::size_t Index>
  [[nodiscard]] std::span<std::byte> stage_bytes(std::uint32_t stage, std::uint64_t bytes) noexcept;

  tiered_options options_;
  meter<tiers - 1, typename Traits::clock> meter_;
  typename Traits::clock clock_;
  LLMMEM_NO_UNIQUE_ADDRESS observer_type observer_;
  std::tuple<detail::tier_state<Tiers>...> tiers_;
  typename edges::type edges_;
  detail::handle_table<chunk_handle, chunk_name> names_;
  LLMMEM_NO_UNIQUE_ADDRESS std::conditional_t<keeps_chunks, prefix_index, detail::no_keys>
      keys_;                                                 // to names, + 1
  detail::handle_table<chunk_handle, chunk_record> chunks_;  // what has names; their slots are the policies'
  detail::fixed_array<transfer> transfers_;
  detail::fixed_array<std::uint32_t> free_transfers_;
  std::uint32_t free_transfer_count_ = 0;
  detail::fixed_array<staging_slot> stages_;
  detail::fixed_array<std::uint32_t> wanted_;  // prefetches, the oldest first
  std::uint32_t wanted_count_ = 0;
  detail::fixed_array<std::uint32_t> due_;  // writes through
  std::uint32_t due_count_ = 0;
  std::array<std::uint64_t, tiers> leaving_{};  // bytes of each tier that are on their way out of it
  std::array<std::uint64_t, tiers> hits_{};
  std::uint64_t changes_ = 0;
  std::uint64_t identity_ = detail::number_of_its_own(this);
  std::uint64_t leases_ = 0;
  std::uint64_t shared_ = 0;
  std::uint64_t parted_bytes_ = 0;
  std::uint64_t background_failures_ = 0;
  failure background_failure_;
};

/// A tiered buffer with the usual traits.
template <class... Tiers>
using tiered_buffer = basic_tiered_buffer<tiered_traits, detail::lifted_tier_t<Tiers>...>;

}  // namespace v0
}  // namespace llmmem

#include <llmmem/tiering/detail/tiered_buffer_accounts.hpp>
#include <llmmem/tiering/detail/tiered_buffer_body.hpp>
#include <llmmem/tiering/detail/tiered_buffer_clones.hpp>
#include <llmmem/tiering/detail/tiered_buffer_keeping.hpp>
#include <llmmem/tiering/detail/tiered_buffer_leases.hpp>
#include <llmmem/tiering/detail/tiered_buffer_middle.hpp>
#include <llmmem/tiering/detail/tiered_buffer_movement.hpp>
#include <llmmem/tiering/detail/tiered_buffer_room.hpp>
#include <llmmem/tiering/detail/tiered_buffer_steps.hpp>
#include <llmmem/tiering/detail/tiered_buffer_transfers.hpp>
