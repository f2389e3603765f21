/// @file
/// `tiered_buffer`: model state larger than memory, in chunks that move between tiers and are leased.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/result.hpp>
#include <llmmem/tiering/access.hpp>
#include <llmmem/tiering/chunk_key.hpp>
#include <llmmem/tiering/chunk_lease.hpp>
#include <llmmem/tiering/detail/tiered_parts.hpp>
#include <llmmem/tiering/plan.hpp>
#include <llmmem/tiering/tier.hpp>
#include <llmmem/tiering/tiered_types.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Chunks of bytes of any size, in tiers of spaces, fastest first.
///
///     host_space host({.budget = 64 << 20});
///     file_space<uring_io> disk("state", {.budget = 1 << 30});
///     tiered_buffer<host_space, file_space<uring_io>> buffer({}, {host, 64 << 20}, {disk, 1 << 30});
///     const chunk_handle weights = buffer.create(bytes).value();
///     fill(buffer.write(weights).value().span());  // replaces all contents, so nothing is brought in
///     buffer.prefetch(other).value();              // moves while we compute
///     auto seen = buffer.read(weights).value();    // waits until it is in tier 0, and holds it there
///
/// - **A lease** pins its chunk in tier 0 at one address. A chunk has any number of `read` leases, or one
///   `write` or `update`.
/// - **Every chunk has its place in the last tier** from `create` on, so that a copy that must leave can
///   always move down. The tiers above hold copies; the topmost is the newest.
/// - **Dirty bytes.** A lease that writes marks its range. When the copy moves down, only those bytes move,
///   rounded to the granularity of the tier below. A clean copy that must leave is dropped.
/// - **Budgets are hard**: each tier is one range of its space, allocated by best fit; a transfer takes its
///   space before it begins. A request that does not fit returns `errc::out_of_bytes` with the missing bytes,
///   and changes nothing.
/// - **Bytes that leave memory** (a space with `leaves_memory`) are verified with CRC-32C when they return:
///   `errc::checksum_differs`, never wrong bytes.
/// - **Clones** are copied on write: until one of them changes, they share every copy and place.
/// - **Rings** between tiers that the host cannot access: `tiered_options`. **Codecs**: `tier`.
/// - **A failure loses nothing.** The buffer drops a copy only after the tier below has all of it. A write
///   that fails leaves the copy above dirty and in its place; the buffer tries again when it next needs the
///   space.
/// - **Transfers in flight advance on their own.** What follows them (the next hop of a prefetch, the use of
///   freed space) happens inside calls; `progress` is the call that does only that.
///
/// @tparam Traits  see `tiered_traits`.
/// @tparam Tiers   at least two: spaces, or `tier<Space, Eviction, Write, Codec, Admission>`
/// @par Complexity      a lease of a resident chunk O(1), or the cost of its policy's `pin`; only
///                      construction allocates.
/// @par Thread safety   one thread at a time; the lease holder may share leased memory between threads.
/// @par Errors          the constructor throws `out_of_memory` if a tier's space lacks its budget, or the
///                      first tier has less than `largest_lease_bytes`, and `argument_error` for options that
///                      are impossible. All other errors are values; what a space's copies throw passes
///                      through.
template <class Traits, class... Tiers>
class basic_tiered_buffer {
  static_assert(sizeof...(Tiers) >= 2,
                "a tiered_buffer moves chunks between tiers: give it at least two, the fastest first, as in "
                "tiered_buffer<host_space, file_space<>>");
  using parts = detail::tiered_parts<Traits, Tiers...>;
  template <class Tier>
  using place = tier_place<typename Tier::space_type>;

 public:
  static constexpr std::size_t tiers = sizeof...(Tiers);
  template <std::size_t Index>
  using space_type = typename std::tuple_element_t<Index, std::tuple<Tiers...>>::space_type;
  /// Whether `adopt` can make chunks of contents in the last tier: that tier must store them unencoded, in
  /// one range.
  static constexpr bool adopts = !parts::encodes && !detail::never_fragments<space_type<tiers - 1>>();
  /// Whether chunks may have keys, and outlive the process.
  static constexpr bool persists_chunks = detail::persists_chunks<space_type<tiers - 1>>();
  [[deprecated("its name is persists_chunks")]] static constexpr bool keeps_chunks = persists_chunks;
  using top_range = typename space_type<0>::range_type;
  using stats_type = tiered_stats<tiers>;
  using clock_type = typename Traits::clock;
  using observer_type = typename Traits::observer;

  template <access_mode Mode>
  using lease = chunk_lease<typename parts::desk_type, Mode>;
  using read_lease = lease<access_mode::read>;
  using write_lease = lease<access_mode::write>;
  using update_lease = lease<access_mode::read_write>;

  /// @param places  the space of each tier, and its budget there. The spaces outlive the buffer.
  explicit basic_tiered_buffer(tiered_options options, const place<Tiers>&... places)
    requires std::default_initializable<observer_type>
      : basic_tiered_buffer(clock_type{}, observer_type{}, options, places...) {}
  basic_tiered_buffer(observer_type observer, tiered_options options, const place<Tiers>&... places)
      : basic_tiered_buffer(clock_type{}, std::move(observer), options, places...) {}
  basic_tiered_buffer(clock_type clock, tiered_options options, const place<Tiers>&... places)
    requires std::default_initializable<observer_type>
      : basic_tiered_buffer(clock, observer_type{}, options, places...) {}
  basic_tiered_buffer(clock_type clock, observer_type observer, const tiered_options& options,
                      const place<Tiers>&... places)
      : parts_(clock, std::move(observer), options, places...) {}
  /// Waits for transfers in flight. Contents that were not flushed end with the upper tiers.
  ~basic_tiered_buffer() = default;

  /// @name Chunks
  /// @{
  /// Creates a chunk without contents, with its place in the last tier. `errc::out_of_bytes` if that tier has
  /// no place, or if any tier could not hold the chunk alone (the text names that tier and the most it can
  /// hold); `errc::table_full` beyond `max_chunks`; `errc::not_opened` if the last tier is read-only.
  result<chunk_handle> create(std::uint64_t bytes) { return parts_.desk.create(bytes); }
  /// Creates another chunk with the same contents, in O(1). It takes no space and moves nothing: both share
  /// every copy, their place and the transfer in flight, until one is written, updated, resized or discarded.
  /// That one *parts*: it first takes its own place in the last tier (`errc::out_of_bytes` if there is none).
  /// `write` and `discard` part without copying a byte; `update` and `resize` bring the shared contents up to
  /// tier 0 and copy them there, where both stay for a while; the chunk that parts is then all dirty. If
  /// parting is refused, both stay as they were. The last sharer changes in place. A lease of one blocks only
  /// `evict` of the others. Movement, hints and the count of leases for write policies apply to the shared
  /// contents, `remove` to one sharer. `errc::table_full` beyond `max_chunks`, `errc::chunk_leased` while the
  /// chunk is being written.
  result<chunk_handle> clone(chunk_handle chunk) { return parts_.desk.clone(chunk); }
  /// Makes a chunk of contents that the last tier already has, `offset` bytes into its range, such as a
  /// tensor in a model's file (`model_file_space`). Other chunks use the space between adopted chunks. With
  /// `checksum`, a CRC-32C, each transfer from there verifies the contents. `errc::place_taken` if another
  /// chunk has any of these bytes; `errc::past_the_bytes`; `errc::bad_granularity` for an offset that is not
  /// a multiple of the tier's granularity.
  result<chunk_handle> adopt(std::uint64_t offset, std::uint64_t bytes,
                             std::optional<std::uint32_t> checksum = {})
    requires(adopts)
  {
    return parts_.desk.adopt(offset, bytes, checksum);
  }
  /// Ends a chunk. `errc::chunk_leased` while it is leased.
  result<void> remove(chunk_handle chunk) { return parts_.desk.remove(chunk); }
  /// Gives the chunk another size. Contents up to the smaller size stay; bytes after those are unspecified. A
  /// chunk with contents comes up to tier 0 for this, has two places there meanwhile, and is all dirty
  /// afterwards. Waits. `errc::chunk_leased`, and what `create` and `read` refuse; the chunk is then as it
  /// was.
  result<void> resize(chunk_handle chunk, std::uint64_t bytes) { return parts_.desk.resize(chunk, bytes); }
  /// Discards the contents: the buffer no longer moves them. The next lease must be a `write`.
  result<void> discard(chunk_handle chunk) { return parts_.desk.discard(chunk); }
  [[nodiscard]] result<std::uint64_t> bytes(chunk_handle chunk) const noexcept {
    return parts_.desk.bytes(chunk);
  }
  /// Returns how often the contents of any chunk may have changed: by `create`, a lease that writes,
  /// `resize`, `discard`.
  [[nodiscard]] std::uint64_t changes() const noexcept { return parts_.chunks.changes(); }
  /// Returns the value of `changes()` after this chunk's last change. While this value stays equal, so do the
  /// contents.
  [[nodiscard]] result<std::uint64_t> last_change(chunk_handle chunk) const noexcept {
    return parts_.desk.last_change(chunk);
  }
  /// Returns a number that identifies this buffer's count: another buffer of the process has the same one
  /// with probability 2^-64.
  [[nodiscard]] std::uint64_t identity() const noexcept { return parts_.chunks.identity(); }
  /// Returns the tier of the newest copy. `errc::no_contents`.
  [[nodiscard]] result<std::size_t> tier_of(chunk_handle chunk) const noexcept {
    return parts_.desk.tier_of(chunk);
  }
  /// @}

  /// @name Leases
  /// `errc::no_contents` for a chunk that was never written, `errc::chunk_leased` if another lease is in the
  /// way, `errc::out_of_bytes` if leased chunks leave no space in tier 0, `errc::timed_out` if patience ends
  /// (the chunk then comes up in the background), and the error of a failed transfer.
  /// @{
  result<read_lease> read(chunk_handle chunk, tiering::patience wait = tiering::wait_complete) {
    return parts_.desk.template lease<access_mode::read>(chunk, {}, wait);
  }
  /// The caller writes all of it; until then the contents are unspecified.
  result<write_lease> write(chunk_handle chunk, tiering::patience wait = tiering::wait_complete) {
    return parts_.desk.template lease<access_mode::write>(chunk, {}, wait);
  }
  /// Any of it may change.
  result<update_lease> update(chunk_handle chunk, tiering::patience wait = tiering::wait_complete) {
    return parts_.desk.update(chunk, wait);
  }
  /// Only `count` bytes from `offset` change, and only these move down. The span is the whole chunk.
  result<update_lease> update(chunk_handle chunk, std::uint64_t offset, std::uint64_t count,
                              tiering::patience wait = tiering::wait_complete) {
    return parts_.desk.update(chunk, offset, count, wait);
  }
  /// @}

  /// @name Movement
  /// @{ Begins to bring a chunk up. `background_failure()` reports a later failure; the next lease tries
  /// again.
  result<void> prefetch(chunk_handle chunk) { return parts_.desk.prefetch(chunk); }
  /// Makes the chunk leave tier 0; writes it back first if it is dirty. Waits for space in the tier below,
  /// not for the write. `errc::chunk_leased`.
  result<void> evict(chunk_handle chunk) { return parts_.desk.evict(chunk); }
  /// Returns when the last tier has all of the chunk's contents. A chunk without contents is unchanged.
  result<void> flush(chunk_handle chunk) { return parts_.desk.flush(chunk); }
  /// The same for all chunks; continues after a failure, and returns the first.
  result<void> flush() { return parts_.mover.flush(); }
  /// Notes which transfers have arrived, and begins the transfers that waited for them. Never waits.
  void progress() { parts_.mover.progress(); }
  /// Executes one step of a plan (`prefetch_schedule`) over one hop: a `fetch` to `tier` from the tier below,
  /// a `write_back` from `tier`, or a `drop` of the copy in `tier`, which is written back first if dirty.
  /// Never waits. Evicts only if free space and the space of copies that are leaving do not suffice.
  tiering::step_outcome execute(chunk_handle chunk, plan_operation operation, std::size_t tier) {
    return parts_.desk.execute(chunk, operation, tier);
  }
  /// Returns what stood in the way of the last `execute` that was not done.
  [[nodiscard]] tiering::step_blocker step_blocker() const noexcept { return parts_.mover.step_blocker(); }
  /// Informs the tiers' policies when the chunk is next leased, in the unit of any growing count
  /// (`access_hint`).
  result<void> expect(chunk_handle chunk, std::uint64_t next_use) noexcept {
    return parts_.desk.expect(chunk, next_use);
  }
  /// @}

  /// @name Keys Over a `persistent_file_space`, chunks with a key outlive the process, with the contents that
  /// the last tier had.
  /// @{ Creates a chunk that a later process finds by its key. `errc::key_taken`; `errc::table_full` if the
  /// index is full.
  result<chunk_handle> create(std::uint64_t bytes, const chunk_key& key)
    requires(persists_chunks)
  {
    return parts_.desk.create(bytes, key);
  }
  /// Returns the chunk of that key, from this process or an earlier one. `errc::no_such_key`.
  [[nodiscard]] result<chunk_handle> find(const chunk_key& key) const noexcept
    requires(persists_chunks)
  {
    return parts_.keys.find(key);
  }
  /// Flushes all chunks, and then makes the contents durable: neither a crash nor a loss of power loses them.
  /// Returns the first failure.
  result<void> persist()
    requires(persists_chunks)
  {
    return parts_.desk.persist();
  }
  /// Reads the chunks with a key that only the last tier has, removes the damaged ones and returns how many.
  /// Continues after a read that fails, and returns the first failure.
  result<std::uint64_t> check_kept()
    requires(persists_chunks)
  {
    return parts_.desk.check_kept();
  }
  /// @}

  /// Returns the space of tier 0, where leased bytes are.
  [[nodiscard]] auto& first_space() const noexcept { return parts_.stack.space(detail::nth<0>); }
  [[nodiscard]] stats_type stats() const { return parts_.stats(); }
  /// Returns the most bytes that a chunk of `bytes` takes of any tier, which rounds it to its granularity.
  [[nodiscard]] std::uint64_t rounded_bytes(std::uint64_t bytes) const noexcept {
    return parts_.stack.rounded_bytes(bytes);
  }
  [[nodiscard]] const observer_type& observer() const noexcept { return parts_.stack.observer(); }
  [[nodiscard]] observer_type& observer() noexcept { return parts_.stack.observer(); }
  /// Returns the time of the clock that the buffer measures with.
  [[nodiscard]] std::uint64_t now_ns() const noexcept { return parts_.engine.now_ns(); }
  /// Returns the last failure of a transfer that no call waited for.
  [[nodiscard]] const failure& background_failure() const noexcept {
    return parts_.engine.background_failure();
  }

  /// Returns one sentence for each broken invariant. O(chunks).
  [[nodiscard]] std::vector<std::string> audit() const { return parts_.audit(); }

 private:
  parts parts_;
};

/// A tiered buffer with the usual traits.
template <class... Tiers>
using tiered_buffer = basic_tiered_buffer<tiered_traits, detail::lifted_tier_t<Tiers>...>;

}  // namespace v0
}  // namespace llmmem
