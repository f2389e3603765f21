/// @file
/// `kv_tiers`: the blocks of a paged cache in several memories.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/error.hpp>
#include <llmmem/offload/detail/cache_view.hpp>
#include <llmmem/offload/detail/load_record.hpp>
#include <llmmem/offload/detail/pending_save.hpp>
#include <llmmem/offload/detail/tier_stack.hpp>
#include <llmmem/offload/detail/use_counts.hpp>
#include <llmmem/offload/kv_chain.hpp>
#include <llmmem/offload/kv_mover.hpp>
#include <llmmem/offload/kv_tier.hpp>
#include <llmmem/offload/kv_tiers_types.hpp>
#include <llmmem/offload/tier_link.hpp>

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

/// Keeps the blocks of one cache in several memories. Blocks that the cache evicts, or that are worth
/// keeping, move down to host memory and files; the engine loads them instead of computing them again.
///
///     struct traits : paged_traits { using observer = offload::tier_link; };
///     paged_allocator<traits> cache({.blocks = 4096});
///     kv_tiers tiers(cache, offload::layout_mover(host_executor{}, memory),
///                    {.store = write_through_selective<2>{}, .patience_ns = 3'000'000},
///                    offload::kv_tier(pinned, 64 << 30, write_through{}), offload::kv_tier(disk, 1 << 40));
///
///     kv_chain chain(cache, prompt);                            // the keys of the prompt's blocks
///     cache.match(sequence, prompt.first(prompt.size() - 1)).value();
///     if (tiers.lookup(sequence, chain).loadable() != 0) {      // moves nothing
///       auto load = tiers.prepare_load(sequence, chain).value();  // `match` does not find these blocks yet
///       cache.append(sequence, prompt.subspan(load.wanted())).value();
///       for (std::uint32_t l = 0; l < layers; ++l) {
///         load.wait(l).value();                                 // layer by layer, in the order of the model
///         attend(l);
///       }
///       const auto came = load.complete();   // from now on `match` finds the blocks that are right
///       if (!came.is_complete()) cache.truncate(sequence, came.tokens).value();   // compute the rest
///     }
///     ...
///     tiers.store(sequence, kernel_done).value();   // what the policy selects, after the fence
///
/// **The first tier is the gateway.** The host can access it, the mover copies between it and the cache, and
/// all lower tiers read and write through its slots. These slots are the staging memory; the tier's budget
/// includes them.
///
/// **Never a wrong token.** A lookup finds a block by the key of its whole prefix. The tiers verify the
/// checksum of each block that returns from a file before the mover restores any of its layers; a damaged
/// block is a miss. Contents that the cache invalidates leave the tiers together with all blocks computed
/// from them, also where the tiers lack a chunk in between. `match` finds a loading block only after
/// `complete`. The tiers pin the blocks that they store or load until the copy has ended, even if their
/// sequences are released before.
///
/// **One load serves all requests.** A block that one request loads is `pending` for the others. They match
/// it after the first one's `complete`. `match` takes a sequence without tokens, so they match again from the
/// beginning.
///
/// **Only `wait`, `issue`, `complete`, `flush`, `persist` and the destructor wait.** There is no thread.
/// Transfers advance in these calls and in `prepare_load`, `store`, `has_arrived` and `progress`; `lookup`,
/// `touch` and `stats` do not advance them. An engine that waits for a `pending` block calls `progress`.
///
/// @tparam Cache  a `paged_allocator` or `hybrid_allocator` whose observer is an `offload::tier_link`, or
///                contains one.
/// @tparam Mover  an `offload::kv_mover` over its memory.
/// @tparam Tiers  1 to 4 `offload::kv_tier`, from the fastest down.
///
/// @par Complexity      `lookup` O(keys x tiers); to move a block O(1) in addition to its copy. Metadata: 68
///                      bytes per slot and the policy's. Only `prepare_load` (O(blocks)) and the cache's
///                      `invalidate` (O(slots)) allocate.
/// @par Thread safety   that of the cache: one thread at a time for both. File queues have their own threads.
/// @par Errors          the constructor throws `argument_error` and `length_error`, and what spaces throw.
///                      All else returns its failure.
/// @par Sources         verbs and answers: vLLM's offloading manager; store policies: SGLang HiCache; the
///                      gateway: both. Quarantine of slots until the transport has answered: asked for in
///                      vLLM #49829.
template <class Cache, offload::kv_mover Mover, class... Tiers>
class kv_tiers final : private offload::loss_listener {
  static_assert(sizeof...(Tiers) >= 1 && sizeof...(Tiers) <= max_kv_tiers, "kv_tiers takes 1 to 4 tiers");
  using observer_type = typename Cache::observer_type;
  static_assert(detail::link_finder<observer_type>::has_link,
                "the cache must report evicted and wrong blocks to its tiers: set Traits::observer to "
                "offload::tier_link, or to paging::observers<..., offload::tier_link>");
  using first_tier = std::tuple_element_t<0, std::tuple<Tiers...>>;
  static_assert(
      first_tier::space_type::is_host_accessible,
      "the host must be able to access the first tier, through which all others are read and written: "
      "put a host_space or pinned_space in front");
  static_assert(
      std::same_as<typename first_tier::codec_type, offload::plain_blocks>,
      "the mover reads and writes blocks of the first tier, which takes no codec: give it to a tier "
      "below");
  static_assert(detail::is_sound_above_lossy<Tiers...>(),
                "only the last tier may be lossy, and no tier above it may persist: the cache stores what "
                "came back from it under the keys of exact blocks");

 public:
  using cache_type = Cache;
  using fence_type = typename Mover::fence_type;
  static constexpr std::size_t tiers = sizeof...(Tiers);
  /// Whether blocks come back bit for bit. If not, any contents of the cache may be approximate.
  static constexpr bool is_lossless = (Tiers::codec_type::is_lossless && ...);

  class load;

  /// @param cache   outlives the tiers, as do the spaces of `places`. It has no other `kv_tiers` meanwhile.
  /// @param mover   moves the blocks of `cache`: it has the same number of groups, and memory with all of the
  ///                cache's blocks (otherwise `argument_error`), which outlives the tiers.
  /// @param places  the tiers from the fastest down. The constructor takes each budget from its space.
  kv_tiers(Cache& cache, Mover mover, kv_tiers_options options, Tiers... places);
  /// Waits for all transfers. @pre no `load` remains: complete or cancel each first, because a remaining load
  /// would call the destroyed tiers.
  ~kv_tiers();
  kv_tiers(const kv_tiers&) = delete;
  kv_tiers& operator=(const kv_tiers&) = delete;

  /// @name Looking
  /// @{ Returns how many tokens of the chain, after those that `sequence` holds, a load could bring now.
  /// Moves nothing, counts no use, and advances no transfer. For a handle that the cache's `check` refuses,
  /// it starts at token 0.
  [[nodiscard]] offload::kv_lookup_result lookup(sequence_id sequence, const kv_chain& chain) const noexcept;
  /// As above, for a request that holds, or would match, `first` tokens.
  [[nodiscard]] offload::kv_lookup_result lookup(const kv_chain& chain, std::uint64_t first) const noexcept;
  /// Returns how much of the chain, after those tokens, is worth loading now, how long that takes together
  /// with the computation of the rest, and whether a wait for pending blocks would be cheaper. The tiers add
  /// to `costs` the bytes that they still move over each link. Moves nothing.
  ///
  /// @par Complexity   O(keys x tiers), and O(blocks of the loads under way); for a hybrid cache, O(keys) for
  ///                   each length that can be loaded.
  [[nodiscard]] offload::load_choice choose_load(sequence_id sequence, const kv_chain& chain,
                                                 const offload::load_costs& costs) const noexcept {
    return choose_load(chain, view_.cache().tokens(sequence), chain.keys().size(), costs);
  }
  /// Returns the tiers' answer for one block of a chain, and its tier (`tiers` if no tier has it).
  [[nodiscard]] std::pair<offload::answer, std::size_t> lookup_block(const kv_chain& chain, std::size_t group,
                                                                     std::uint64_t index) const noexcept;
  /// Counts a use of the blocks of the first `tokens` tokens in every tier that has them. It counts the last
  /// block first, so that prefixes outlive the blocks after them. Call it for hits of the cache itself, which
  /// the tiers do not see.
  void touch(const kv_chain& chain, std::uint64_t tokens) noexcept;
  /// @}

  /// @name Loading
  /// @{
  /// Appends to `sequence` the tokens that `lookup` reports as loadable, at most up to token `upto` of the
  /// chain, and begins to load their contents. Returns an empty load if no token is loadable.
  ///
  /// The load keeps the address of `chain`, which must outlive the load and must not move.
  ///
  /// Until the load ends, the engine must not write to the loading blocks, nor append to a sequence of a
  /// `hybrid_allocator`, which would copy its states. It may append to a sequence of a `paged_allocator`, and
  /// compute those tokens as layers arrive. A commit caches none of the loading blocks and none after them.
  /// The engine may release the sequence: its blocks become free when the copies have ended.
  /// @return what the cache refuses (`errc::out_of_blocks`; a stale handle); `errc::not_whole_blocks` for a
  ///         sequence that ends within a block; `errc::table_full` for more than `max_loads`;
  ///         `errc::epoch_differs` for a chain of another epoch; `errc::not_a_prefix` for a chain of another
  ///         context, or of other tokens than the sequence's. The sequence is then as it was; in a hybrid
  ///         cache whose windows have moved, it may be shorter: read `tokens(sequence)` again.
  result<load> prepare_load(sequence_id sequence, const kv_chain& chain, std::uint64_t upto = unlimited) {
    return prepare_load(sequence, chain, offload::load_limits{.upto = upto});
  }
  /// As above, with limits for this request, whose patience may be longer, or 0.
  result<load> prepare_load(sequence_id sequence, const kv_chain& chain, const offload::load_limits& limits);
  /// A load keeps a reference to its chain, which a temporary would leave dangling.
  result<load> prepare_load(sequence_id sequence, const kv_chain&& chain,
                            std::uint64_t upto = unlimited) = delete;
  result<load> prepare_load(sequence_id sequence, const kv_chain&& chain,
                            const offload::load_limits& limits) = delete;
  /// @}

  /// @name Storing
  /// @{ Stores the committed blocks of the sequence that the policy selects, once `after` has passed: the
  /// fence after the kernels that write the blocks. Does not wait for the fence. The tiers pin the blocks
  /// until then, so the engine may release the sequence immediately. Stores nothing under `write_back`.
  ///
  /// Considers each block once for each sequence. If a block finds no slot, the next call considers it again.
  /// @return how many of the blocks that this call considered a tier already has, or this call began to
  ///         store; the failure of the cache's `check` for a bad handle.
  result<std::uint64_t> store(sequence_id sequence, const fence_type& after = {});
  /// @}

  /// @name Progress
  /// @{
  /// Advances transfers without waiting. An engine calls it in each step. O(transfers in flight).
  void progress() noexcept;
  /// Returns when no transfer is in flight and every block selected for a lower tier is there. Waits for the
  /// fences that `store` received.
  void flush() noexcept;
  /// Calls `flush`, then waits until the devices hold all bytes written to files.
  /// @return the failure of a file, or of an update of its index since the last call. After such a failure
  ///         and a restart, a block is missing, or a withdrawn block is back.
  result<void> persist() noexcept;
  /// @}

  /// @name Passing blocks on
  /// For code that moves blocks between the first tiers of several processes, as `kv_pool` does.
  /// @{ Brings blocks from lower tiers into the first one, ahead of a load of the chain's tokens `first` to
  /// `upto`: a scheduler calls it for requests in its queue. Leaves `load_headroom` to loads, and stops when
  /// slots or transfers run out. Does not wait, and pins nothing: the blocks may be evicted again.
  /// @return blocks whose transfers this call began. O(blocks).
  std::uint64_t prefetch(const kv_chain& chain, std::uint64_t first, std::uint64_t upto = unlimited) noexcept;
  /// Prefetches one block. Returns whether it is in the first tier or on its way there.
  bool prefetch_block(std::size_t group, const block_key& key) noexcept;
  /// As `lookup`, but a block that no tier can bring now counts as well if `elsewhere(group, chunks, answer)`
  /// says that another cache has it. The arguments name the block of `group` that ends with the first
  /// `chunks` chunks of the chain, and the tiers' answer for it.
  template <class Elsewhere>
  [[nodiscard]] offload::kv_lookup_result lookup_with(const kv_chain& chain, std::uint64_t first,
                                                      std::uint64_t chunks,
                                                      Elsewhere&& elsewhere) const noexcept;
  /// As `choose_load` for the chain's first `chunks` chunks, of which other caches have blocks, too:
  /// - `others.has(group, chunks)`   whether one has the block, which the tiers miss. Arguments as above.
  /// - `others.add(group, chunks)`   the length on offer needs that block; `others.clear()`: another length.
  /// - `others.bytes()`, `others.arrival_ns(is_later)`   of the added blocks, and how long they take to the
  ///   first tier: from now, or once all pending bytes have moved.
  template <class Others>
  [[nodiscard]] offload::load_choice choose_load_with(const kv_chain& chain, std::uint64_t first,
                                                      std::uint64_t chunks, const offload::load_costs& costs,
                                                      Others&& others) const;
  /// Returns the tiers' answer for one block by its key in the chain, and its tier.
  [[nodiscard]] std::pair<offload::answer, std::size_t> lookup_block(std::size_t group,
                                                                     const block_key& key) const noexcept;
  /// Pins a block in the first tier. Returns nothing if the block is not there, or still on its way.
  [[nodiscard]] std::optional<offload::held_block> hold(std::size_t group, const block_key& key) noexcept;
  /// Takes a slot of the first tier for a block from elsewhere: the caller writes `bytes_of` it, then calls
  /// `end_arrival`. Meanwhile other requests see the block as `pending`. Returns nothing if a tier has the
  /// block, or no slot can be freed.
  /// @param parent  `paging::key_digest` of the chain's previous key; 0 for the first chunk.
  [[nodiscard]] std::optional<offload::held_block> begin_arrival(std::size_t group, const block_key& key,
                                                                 std::uint64_t parent) noexcept;
  /// Ends an arrival: the contents are there and right, or will not come. Returns whether the block can be
  /// loaded now; it then stays held until `release`. Otherwise the hold is over.
  bool end_arrival(const offload::held_block& block, bool is_right) noexcept;
  /// Lets the first tier evict a block that `hold` or `end_arrival` left pinned.
  void release(const offload::held_block& block) noexcept;
  /// Returns the memory of a held block, `mover().block_bytes(block.group)` bytes.
  [[nodiscard]] std::span<std::byte> bytes_of(const offload::held_block& block) noexcept LLMMEM_LIFETIMEBOUND;
  /// Returns the CRC-32C that a held block had when it came from a file or by message, went into a file or
  /// was first sent or offered; nothing before that, nor after the block has been in a tier with a codec. A
  /// block whose bytes no longer have it was damaged since.
  [[nodiscard]] std::optional<std::uint32_t> checksum_of(const offload::held_block& block) const noexcept {
    return stack_.first().slots[block.group].sum(block.slot);
  }
  /// Keeps the CRC-32C of a held block, which also goes along to lower tiers, until its slot has other
  /// contents. For a block that arrives: before `end_arrival`.
  void note_checksum(const offload::held_block& block, std::uint32_t crc) noexcept {
    stack_.first().slots[block.group].note_sum(block.slot, crc);
  }
  /// Verifies the first tier's copy of a block by the checksum that it keeps. A damaged copy is dropped, so
  /// that it no longer hides a sound one in a lower tier; the same holds for copies in other tiers of host
  /// memory, and for copies that are being written to a lower tier from a damaged one. Transfers and holders
  /// that use the copy keep its slot until they end, and loads that have not ended count the block as failed.
  /// Call it when there is reason to doubt a block, because another node reports damage for example. Reads at
  /// most the block's bytes in each tier of host memory; waits for nothing.
  offload::copy_state verify_copy(std::size_t group, const block_key& key) noexcept;
  /// Returns the name by which the first tier knows a block of a group, and a `leave_watcher` learns of it.
  [[nodiscard]] static constexpr block_key name_of(std::size_t group, const block_key& key) noexcept {
    return detail::tier_key(key, group);
  }
  /// Calls a watcher whenever a block leaves its slot of the first tier. There is one; `{}` ends it.
  void watch_first_tier(const offload::leave_watcher& watcher) noexcept {
    for (std::size_t g = 0; g < groups_; ++g)
      stack_.first().slots[g].watch(watcher);
  }
  [[nodiscard]] Cache& cache() noexcept { return view_.cache(); }
  [[nodiscard]] const Cache& cache() const noexcept { return view_.cache(); }
  /// Returns the cache's groups of layers; one for a `paged_allocator`.
  [[nodiscard]] std::span<const layer_group> groups() const noexcept LLMMEM_LIFETIMEBOUND {
    return view_.groups();
  }
  /// @}

  /// @name Withdrawing
  /// @{
  /// Drops all blocks of all tiers, files included. `cache.reset` calls it.
  void clear() noexcept { cleared(); }
  /// @}

  [[nodiscard]] offload::kv_tiers_stats stats() const noexcept;
  [[nodiscard]] const Mover& mover() const noexcept { return mover_; }
  [[nodiscard]] const std::string& name() const noexcept LLMMEM_LIFETIMEBOUND { return options_.name; }
  /// Returns one sentence for each broken invariant. O(slots); allocates.
  [[nodiscard]] std::vector<std::string> audit() const;
  /// Returns 0 if `is_lossless`, else 64 bits of the lossy form: caches that differ in it must not exchange
  /// blocks. `kv_pool` compares it.
  [[nodiscard]] std::uint64_t content_form() const noexcept { return content_form_; }

 private:
  using record = detail::load_record<fence_type>;
  using part = detail::load_part<fence_type>;
  using pending_save = detail::pending_save<fence_type>;
  using part_state = detail::part_state;

  void evicted(block_id block, const block_key& key, std::size_t group) noexcept override;
  void invalidated(const block_key& key, std::size_t group) noexcept override;
  void cleared() noexcept override;

  [[nodiscard]] static std::vector<std::uint64_t> bytes_of_blocks(const Mover& mover);
  [[nodiscard]] std::vector<double> shares() const;
  [[nodiscard]] kv_tiers_options checked(kv_tiers_options options) const;
  [[nodiscard]] std::uint64_t now() const noexcept {
    return options_.now_ns != nullptr ? options_.now_ns(options_.clock_context)
                                      : steady_meter_clock{}.now_ns();
  }
  [[nodiscard]] failure refusal(error_code code, std::uint32_t index, std::uint64_t wanted,
                                std::uint64_t found) const noexcept {
    return {code, index, wanted, found, options_.name};
  }
  [[nodiscard]] std::pair<offload::answer, detail::tier_place_found> look(std::size_t group,
                                                                          const block_key& key,
                                                                          std::uint64_t at) const noexcept;

  template <class Elsewhere, class OnHit>
  offload::kv_lookup_result each_hit(const kv_chain& chain, std::uint64_t first, std::uint64_t chunks,
                                     std::uint64_t at, Elsewhere&& elsewhere, OnHit&& on_hit) const;
  template <class F>
  void each_needed(const kv_chain& chain, std::uint64_t first, std::uint64_t tokens, std::uint64_t at,
                   F&& f) const;
  [[nodiscard]] offload::load_choice choose_load(const kv_chain& chain, std::uint64_t first,
                                                 std::uint64_t chunks,
                                                 const offload::load_costs& costs) const noexcept;
  void add_pending(offload::load_costs& costs) const noexcept;

  // Saving

  /// The block of a sequence's group that a store considers next.
  struct cursor {
    std::uint32_t generation = 0;
    std::uint32_t next = 0;  // block
    block_key last{};        // key of the block before it
  };
  [[nodiscard]] cursor& cursor_of(sequence_id sequence, std::size_t group) noexcept {
    return cursors_[sequence.slot * groups_ + group];
  }
  enum class considered : std::uint8_t { stored, passed, later };
  considered consider(std::size_t group, block_id block, const block_key& key, detail::parent_digest parent,
                      const fence_type& after) noexcept;
  [[nodiscard]] bool has_place_to_save() const noexcept { return save_count_ < saves_.size(); }
  void begin_saves(std::size_t first) noexcept;
  void poll_saves() noexcept;
  void wait_for_save() noexcept;
  void finish_save(const pending_save& done) noexcept;

  // Loading

  [[nodiscard]] std::uint32_t layers_to_restore(std::size_t group, std::uint32_t layer) const noexcept {
    const std::uint32_t once = layers_at_once_[group];
    const std::uint32_t all = mover_.layers(group);
    const std::uint32_t end = layer / once * once;
    return all - end > once ? end + once : all;
  }
  offload::kv_lookup_result find_parts(record* into, const kv_chain& chain, std::uint64_t first,
                                       std::uint64_t chunks);
  void take_parts(record& of) noexcept;
  void take_back(sequence_id sequence, std::uint64_t have) noexcept;
  [[nodiscard]] bool take_blocks(record& of) noexcept;
  [[nodiscard]] bool continues(sequence_id sequence, const kv_chain& chain,
                               std::uint64_t have) const noexcept;
  void begin_reads(std::uint32_t slot) noexcept;
  void arrive(const detail::load_cookie& waiting, slot_id upper, const failure& why) noexcept;
  void restore(record& of, std::size_t group, std::uint32_t layers) noexcept;
  void free_restored(record& of) noexcept;
  void let_go(part& of) noexcept;
  void give_up(record& from, part& of, part_state state) noexcept;
  void give_up_missing(record& of) noexcept;
  [[nodiscard]] bool is_reading(const record& of) const noexcept;
  void make_way(std::uint32_t slot) noexcept;
  result<fence_type> bring(std::uint32_t slot, std::size_t group, std::uint32_t layer) noexcept;
  offload::load_result finish(std::uint32_t slot) noexcept;
  void cancel(std::uint32_t slot) noexcept;
  [[nodiscard]] std::uint64_t count_parts(record& of) noexcept;
  void end(record& of) noexcept;
  void reap() noexcept;
  void proceed() noexcept;
  static void pause() noexcept;

  kv_tiers_options options_;
  detail::cache_view<Cache> view_;
  Mover mover_;
  std::size_t groups_;
  std::array<std::uint32_t, max_layer_groups> layers_at_once_{};
  detail::kv_tier_stack<Tiers...> stack_;
  std::uint64_t content_form_;  // after `groups_`
  detail::use_counts seen_;
  bool stores_at_once_;  // whether the policy stores every block, so that no use need be counted
  detail::fixed_array<pending_save> saves_;
  std::size_t save_count_ = 0;
  std::vector<cursor> cursors_;  // by sequence slot and group, for the slots seen so far
  std::vector<record> loads_;
  std::uint64_t invalidated_ = 0;
};

/// A load in flight: the contents of blocks on their way into the cache. Movable; its destructor cancels it.
///
/// `cancel` does not wait. Later calls of the tiers end the copies that have begun; until then the tiers keep
/// the blocks pinned, and late arrivals are not written to them.
///
/// @par Thread safety   that of its tiers, which outlive it.
template <class Cache, offload::kv_mover Mover, class... Tiers>
class kv_tiers<Cache, Mover, Tiers...>::load {
 public:
  /// An empty load.
  load() noexcept = default;
  load(load&& other) noexcept
      : tiers_(std::exchange(other.tiers_, nullptr)), slot_(other.slot_), result_(other.result_) {}
  load& operator=(load&& other) noexcept {
    if (this == &other) return *this;
    cancel();
    tiers_ = std::exchange(other.tiers_, nullptr);
    slot_ = other.slot_;
    result_ = other.result_;
    return *this;
  }
  ~load() { cancel(); }

  /// Returns whether the load has something to wait for.
  [[nodiscard]] explicit operator bool() const noexcept { return tiers_ != nullptr; }
  /// Returns the tokens that the sequence had before the load.
  [[nodiscard]] std::uint64_t first() const noexcept { return result_.first; }
  /// Returns the tokens that the sequence has from `prepare_load` on; only the first `load_result::tokens`
  /// are right.
  [[nodiscard]] std::uint64_t wanted() const noexcept { return result_.wanted; }

  /// Returns when layer `layer` of every block of `group` is in the cache's memory, has failed, or is dropped
  /// because the patience has ended. Succeeds in all three cases: `complete` says which tokens are right. The
  /// engine waits in the order in which the model runs.
  /// @return `errc::out_of_range` for a layer or group that the mover does not have; the failure of a copy's
  ///         fence.
  result<void> wait(std::uint32_t layer, std::size_t group = 0) noexcept {
    const auto fence = issue(layer, group);
    if (!fence) return fence.error();
    return detail::settled(*fence);
  }
  /// The same for a mover that runs on a stream: waits for the reads of lower tiers, begins the copies of
  /// that layer and of those copied with it (`kv_tiers_options::restore_bytes`), and returns the fence after
  /// which they are done, for the engine's stream to wait for.
  result<fence_type> issue(std::uint32_t layer, std::size_t group = 0) noexcept {
    if (tiers_ == nullptr) return fence_type{};
    return tiers_->bring(slot_, group, layer);
  }
  /// Returns whether all blocks are in the first tier, or failed; from then on `wait` only copies. Does not
  /// wait. Gives up late blocks.
  [[nodiscard]] bool has_arrived() noexcept;
  /// Waits until every block is in the cache's memory, has failed or is late, and then lets `match` find the
  /// right ones. Ends the load. The sequence still has `wanted()` tokens: truncate it to
  /// `load_result::tokens` and compute the rest. Until then no token after those is cached.
  offload::load_result complete() noexcept {
    if (tiers_ == nullptr) return result_;
    return result_ = std::exchange(tiers_, nullptr)->finish(slot_);
  }
  /// Cancels the load. The sequence keeps its blocks, but no token after `first()` is right: truncate it to
  /// `first()`, or release it.
  void cancel() noexcept {
    if (tiers_ != nullptr) std::exchange(tiers_, nullptr)->cancel(slot_);
  }

 private:
  friend kv_tiers;
  load(kv_tiers& of, std::uint32_t slot, const offload::load_result& wanted) noexcept
      : tiers_(&of), slot_(slot), result_(wanted) {}

  kv_tiers* tiers_ = nullptr;
  std::uint32_t slot_ = 0;
  offload::load_result result_{};
};

/// Deduces the types of the arguments.
template <class Cache, class Mover, class... Tiers>
kv_tiers(Cache&, Mover, kv_tiers_options, Tiers...) -> kv_tiers<Cache, Mover, Tiers...>;

}  // namespace v0
}  // namespace llmmem

#include <llmmem/offload/detail/kv_tiers_body.hpp>
#include <llmmem/offload/detail/kv_tiers_choosing.hpp>
#include <llmmem/offload/detail/kv_tiers_loading.hpp>
#include <llmmem/offload/detail/kv_tiers_passing.hpp>
#include <llmmem/offload/detail/kv_tiers_storing.hpp>
