/// @file
/// `kv_pool`: the KV blocks of several processes and machines as one cache.
#pragma once

#include <llmmem/comm/endpoint.hpp>
#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/offload/kv_chain.hpp>
#include <llmmem/offload/kv_tiers.hpp>
#include <llmmem/pool/detail/fetch_shares.hpp>
#include <llmmem/pool/detail/pool_request.hpp>
#include <llmmem/pool/detail/pool_wire.hpp>
#include <llmmem/pool/detail/span_table.hpp>
#include <llmmem/pool/directory.hpp>
#include <llmmem/pool/embedded_directory.hpp>
#include <llmmem/pool/fetch_costs.hpp>
#include <llmmem/pool/kv_pool_types.hpp>
#include <llmmem/pool/mover.hpp>
#include <llmmem/result.hpp>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Joins the tiers of several nodes. A node that lacks blocks of a prompt asks which nodes have them and
/// fetches them into its first tier, from which its cache loads them like its own.
///
///     socket_endpoint end({.seat = seat_id{0}, .seats = 4, .folder = "/run/pool"});
///     kv_pool pool(tiers, end, {.model = layout.content_fingerprint()});
///
///     auto request = pool.ask(chain, cache.tokens(sequence)).value();  // asks the directory, does not wait
///     ... in the next steps, until request.where().next is no longer `pending`: pool.progress();
///     request.fetch();                                   // asks the nodes for their blocks, does not wait
///     ... until request.has_arrived(): pool.progress();
///     auto load = tiers.prepare_load(sequence, chain).value();  // this node's blocks and those that came
///     request.end();
///     ...
///     tiers.store(sequence, kernel_done).value();
///     pool.publish(chain, cache.tokens(sequence));       // other nodes find what the tiers have
///
/// **The directory** records which nodes hold which blocks, by *span*: 64 chunks of a chain. By default the
/// nodes share it: a span belongs to the node that rendezvous hashing picks, so that a prompt asks few nodes,
/// and a node that joins or leaves moves only its share. Another `pool_directory`, as `redis_directory`, is
/// given to the constructor, the same kind on each node. An answer of the directory is a hint. A node that no
/// longer has a block says so and corrects the directory.
///
/// **Never a wrong token.** A request names a block by its whole key, which covers the tokens of its prefix,
/// their tenant, the epoch of the weights and the seed of the hash. A block arrives with the CRC-32C that it
/// had when it came to its holder from a file or by message, or was first sent or offered there: damage on
/// the way and in the holder's memory is a miss, unless a holder has a sound copy. The reader reports damage
/// to the holder. The holder trusts no report: it verifies its own copy, at most `max_checks` times a second
/// for each other node. It drops a damaged copy, so that a sound one in a lower tier is sent from then on;
/// if there is none, it corrects the directory.
/// Nodes whose caches, layouts or weights (`kv_pool_options::model`) differ pass no blocks: see `state_of`.
/// Messages are untrusted input: the pool checks lengths, numbers and offsets against what this node awaits.
///
/// **A node that dies** is forgotten when the endpoint reports its death. The pool asks another holder for
/// the blocks that the node was sending, or counts them as failed; nothing waits for it.
///
/// **Nodes that fetch become holders** once they publish, so a popular prompt has many holders. A request
/// takes the holder from which its node awaits the fewest blocks.
///
/// **Move, wait or compute.** `request.fetch(costs)` brings what is cheaper to move than to compute, and from
/// the holders with which it is here first, by the model of `offload::load_chooser`.
///
/// **Copies in other domains.** With `kv_pool_options::copies`, nodes of other failure domains fetch and keep
/// the blocks of hot spans, so that a prompt that is often used survives its host or rack. Rendezvous hashing
/// picks the nodes, so that holders of a span in one domain ask the same; after a death the next use asks
/// another.
///
/// **How the bytes come.** By default the owner sends a block as frames of the endpoint. A `pool_mover` that
/// is given to the constructor reads it from the owner's first tier instead, which then has its memory from
/// `mover.space()`. What the mover does not bring comes by message.
///
/// **Only these wait: `wait`, `wait_for_answers` and `progress(wait_ns)`.** There is no thread: a node
/// answers others in its own `progress`, so an engine calls that in every step. `kv_pool` is for transports
/// whose owner must take part.
///
/// @tparam Tiers     a `kv_tiers`, which outlives the pool.
/// @tparam Endpoint  an `endpoint`, which outlives the pool and serves nothing else. Every node has the same
///                   number of seats; one that starts later, or again, joins by itself.
/// @tparam Directory a `pool_directory` that the pool owns, or a reference to one.
/// @tparam Mover     `pool::message_mover`, or a reference to a `pool_mover`.
///
/// @par Complexity      `ask` one message of 300 bytes a span; a directory answer O(entries of the span x
///                      chunks); a block one copy into its slot, in addition to the transport's.
/// @par Thread safety   that of the tiers.
/// @par Errors          the constructor throws `argument_error`, and `out_of_memory`; `ask` returns its
///                      failure, and throws `std::bad_alloc`. All else ends in `fetch_result`.
/// @par Sources         spans of a chain as unit of placement: Mooncake's groups; rendezvous hashing: Thaler
///                      and Ravishankar, 1998; hints that arrival confirms: NIXL and Mooncake both verify a
///                      lease after a read.
template <class Tiers, endpoint Endpoint, class Directory = pool::embedded_directory,
          class Mover = pool::message_mover>
  requires detail::pool_parts<Directory, Mover>
class kv_pool {
 public:
  class request;

  kv_pool(Tiers& tiers, Endpoint& end, const kv_pool_options& options = {})
    requires(std::same_as<Directory, pool::embedded_directory> && std::same_as<Mover, pool::message_mover>)
      : kv_pool(tiers, end, nullptr, nullptr, options) {}
  /// @param directory  outlives the pool, and serves it alone.
  kv_pool(Tiers& tiers, Endpoint& end, std::remove_reference_t<Directory>& directory,
          const kv_pool_options& options = {})
    requires(std::is_reference_v<Directory> && std::same_as<Mover, pool::message_mover>)
      : kv_pool(tiers, end, &directory, nullptr, options) {}
  /// @param mover  outlives the pool and the tiers, whose first one has its space, and serves the pool alone.
  kv_pool(Tiers& tiers, Endpoint& end, std::remove_reference_t<Mover>& mover,
          const kv_pool_options& options = {})
    requires(std::same_as<Directory, pool::embedded_directory> && std::is_reference_v<Mover>)
      : kv_pool(tiers, end, nullptr, &mover, options) {}
  /// Both.
  kv_pool(Tiers& tiers, Endpoint& end, std::remove_reference_t<Directory>& directory,
          std::remove_reference_t<Mover>& mover, const kv_pool_options& options = {})
    requires(std::is_reference_v<Directory> && std::is_reference_v<Mover>)
      : kv_pool(tiers, end, &directory, &mover, options) {}
  /// @pre no `request` is left.
  ~kv_pool();
  kv_pool(const kv_pool&) = delete;
  kv_pool& operator=(const kv_pool&) = delete;

  /// Asks the directory which nodes hold the chain's blocks after the first `first` tokens. Does not wait.
  ///
  /// The request keeps the address of `chain`, which must neither move nor end before it.
  /// @return `errc::table_full` for more than `max_requests`; `errc::epoch_differs` for a chain of another
  ///         epoch than the cache's.
  result<request> ask(const kv_chain& chain, std::uint64_t first);
  result<request> ask(const kv_chain& chain, std::uint64_t first, std::uint64_t patience_ns);
  result<request> ask(const kv_chain&& chain, std::uint64_t first) = delete;

  /// Announces to the directory which blocks of the chain's first `tokens` tokens this node's tiers have,
  /// also those that `store` has begun to write. Says nothing twice. Waits for nothing.
  void publish(const kv_chain& chain, std::uint64_t tokens) noexcept;
  /// Returns whether every node that asks from now on, and exchanges blocks with the same processes as this
  /// one, finds what this node has announced. A node that computes a prompt for another one reports it as
  /// computed when this is true: a node that asks earlier may miss the prompt. Until then the engine calls
  /// `progress`. False while the directory cannot be reached, and while this node repeats its announcements
  /// because another one has joined. A node that does not know yet each process that this one knows, or its
  /// end, asks another keeper, and may miss the prompt until its next steps (`peers`). O(seats).
  [[nodiscard]] bool is_announced() const noexcept {
    return !must_republish_ && directory_.has_received_all();
  }

  /// Reads what has arrived, answers other nodes, and advances the requests. The engine calls it in each
  /// step. Waits at most `send_ns` for receivers that take nothing.
  void progress();
  /// The same, but first waits up to `wait_ns` nanoseconds for something from another node: for a thread that
  /// has nothing else to do.
  void progress(std::uint64_t wait_ns);

  /// Returns the number of other nodes with which this node exchanges blocks.
  [[nodiscard]] std::uint32_t peers() const noexcept;
  /// Returns whether this node exchanges blocks with the node in a seat.
  [[nodiscard]] pool::peer_state state_of(seat_id seat) const noexcept {
    return to_index(seat) < peers_.size() ? peers_[to_index(seat)].state : pool::peer_state::absent;
  }
  [[nodiscard]] pool::stats stats() const noexcept;
  /// Returns what the mover declares.
  [[nodiscard]] pool::mover_limits mover_limits() const noexcept;

 private:
  using record = detail::pool_record;
  using part = detail::pool_part;
  using part_state = detail::pool_part_state;

  /// The handler that the endpoint calls.
  struct hearing {
    kv_pool* all;
    frame_buffer buffer_for(seat_id from, const frame_header& frame) noexcept {
      return all->buffer_for(from, frame);
    }
    void on_frame(seat_id from, const frame_header& frame) noexcept { all->on_frame(from, frame); }
    void on_message(seat_id from, const frame_header& frame, std::span<const std::byte> bytes) noexcept {
      all->on_message(from, frame, bytes);
    }
    void on_death(seat_id seat, comm::death) noexcept { all->on_death(seat); }
    void on_joined(seat_id seat) noexcept { all->post_hello(seat); }
    [[nodiscard]] bool keeps_waiting() const noexcept { return true; }
  };

  using directory_type = std::remove_reference_t<Directory>;

  /// What the directory is given: see `detail::any_directory_link`.
  struct directory_link {
    kv_pool* all;
    [[nodiscard]] seat_id self() const noexcept { return all->self(); }
    [[nodiscard]] std::uint64_t nonce() const noexcept { return all->nonce_; }
    [[nodiscard]] std::uint32_t seats() const noexcept {
      return static_cast<std::uint32_t>(all->peers_.size());
    }
    [[nodiscard]] bool is_present(seat_id seat) const noexcept {
      return all->peers_[to_index(seat)].state == pool::peer_state::present;
    }
    [[nodiscard]] std::uint64_t nonce_of(seat_id seat) const noexcept {
      return all->peers_[to_index(seat)].nonce;
    }
    [[nodiscard]] std::uint64_t now_ns() const noexcept { return all->end_->now_ns(); }
    [[nodiscard]] bool may_post(seat_id to) const noexcept { return all->may_post(to); }
    void post(seat_id to, detail::pool_frame kind, const detail::pool_writer& message) noexcept {
      all->post(to, kind, message);
    }
    void post_or_drop(seat_id to, detail::pool_frame kind, const detail::pool_writer& message) noexcept {
      all->post_or_drop(to, kind, message);
    }
    bool on_answer(std::uint32_t keeper, std::uint64_t id, std::uint32_t index,
                   const pool::span_holders& found) noexcept {
      return all->take_answer(keeper, id, index, found);
    }
    void on_unknown(std::uint64_t id, std::uint32_t index) noexcept { all->take_unknown(id, index); }
    void on_keepers_changed() noexcept { all->announce_again(); }
  };

  using mover_type = std::remove_reference_t<Mover>;
  static constexpr bool reads_directly = !mover_type::moves_by_message;

  kv_pool(Tiers& tiers, Endpoint& end, directory_type* directory, mover_type* mover,
          const kv_pool_options& options);
  [[nodiscard]] static Mover make_mover(mover_type* given) noexcept {
    if constexpr (std::is_reference_v<Mover>) {
      return *given;
    } else {
      return Mover{};
    }
  }
  [[nodiscard]] Directory make_directory(directory_type* given) const {
    if constexpr (std::is_reference_v<Directory>) {
      return *given;
    } else {
      return Directory(options_.directory_spans, groups_, options_.metadata);
    }
  }
  [[nodiscard]] pool::directory_identity identity() const noexcept;
  [[nodiscard]] std::uint32_t keeper_of(const block_key& span) noexcept {
    return directory_.keeper_of(directory_link{this}, span);
  }
  [[nodiscard]] bool takes(std::uint32_t keeper) noexcept {
    return directory_.takes(directory_link{this}, keeper);
  }
  [[nodiscard]] kv_pool_options checked(const kv_pool_options& options) const;
  [[nodiscard]] detail::pool_likeness own_likeness() const;
  void begin_epoch() noexcept;
  [[nodiscard]] seat_id self() const noexcept { return end_->self(); }
  [[nodiscard]] std::uint64_t block_bytes(std::size_t group) const noexcept {
    return tiers_->mover().block_bytes(group);
  }
  [[nodiscard]] const block_key& key_of(const record& of, const part& each) const noexcept {
    return of.chain->keys()[each.chunk];
  }
  [[nodiscard]] static std::uint64_t id_of(std::uint32_t slot, const record& of) noexcept {
    return std::uint64_t{of.generation} << 32 | slot;
  }
  [[nodiscard]] record* find(std::uint64_t id) noexcept;
  [[nodiscard]] bool is_present(seat_id seat, std::uint64_t nonce) const noexcept;

  // Hearing
  void hear();
  [[nodiscard]] frame_buffer buffer_for(seat_id from, const frame_header& frame) noexcept;
  void on_frame(seat_id from, const frame_header& frame) noexcept;
  void on_message(seat_id from, const frame_header& frame, std::span<const std::byte> bytes) noexcept;
  void on_death(seat_id seat) noexcept;
  void hear_hello(seat_id from, detail::pool_reader in) noexcept;
  void hear_get(seat_id from, detail::pool_reader in, bool is_again) noexcept;
  void hear_missing(seat_id from, detail::pool_reader in) noexcept;
  void hear_damaged(seat_id from, detail::pool_reader in) noexcept;
  [[nodiscard]] part* awaited(seat_id from, std::uint64_t id, std::uint32_t part_index) noexcept;
  void forget_peer(seat_id seat, bool is_dead) noexcept;

  // Sending words
  void post(seat_id to, detail::pool_frame kind, const detail::pool_writer& message) noexcept;
  void post_hello(seat_id to) noexcept;
  void post_published(std::uint32_t entry) noexcept;
  void post_missing(detail::pool_serving what) noexcept;
  [[nodiscard]] bool may_post(seat_id to) const noexcept;
  void post_or_drop(seat_id to, detail::pool_frame kind, const detail::pool_writer& message) noexcept;

  // The directory
  bool take_answer(std::uint32_t keeper, std::uint64_t id, std::uint32_t index,
                   const pool::span_holders& found) noexcept;
  void take_unknown(std::uint64_t id, std::uint32_t index) noexcept;
  void announce_again() noexcept {
    must_republish_ = true;
    republished_ = 0;
  }
  [[nodiscard]] std::uint32_t digests_of(const kv_chain& chain, std::uint64_t span,
                                         std::array<std::uint32_t, pool::span_chunks>& into) const noexcept;
  void ask_spans(std::uint32_t slot) noexcept;
  [[nodiscard]] bool ask_span(std::uint32_t slot, std::size_t index) noexcept;
  void post_question(std::uint32_t slot, std::size_t index) noexcept;
  void ask_again(std::uint32_t slot) noexcept;
  void put_wanted(detail::pool_writer& out, const record& of, std::size_t index) noexcept;
  [[nodiscard]] std::uint64_t wait_for_block() const noexcept {
    constexpr std::uint64_t most = ~std::uint64_t{0};
    return options_.ask_again_ns > most / 4 ? most : options_.ask_again_ns * 4;
  }
  [[nodiscard]] std::uint64_t time_to_ask_again(record& of, std::uint64_t first_ns,
                                                std::uint32_t times) noexcept;
  void publish(const kv_chain& chain, std::uint64_t tokens, bool is_use) noexcept;
  void publish_span(const kv_chain& chain, std::uint64_t span, std::uint64_t chunks, bool is_use) noexcept;
  std::uint32_t publish_blocks(const block_key& span, std::span<const std::uint32_t> digests,
                               std::span<const std::uint64_t> masks) noexcept;
  void retract(const block_key& span, std::uint32_t group, std::uint32_t place,
               const block_key& key) noexcept;
  void republish() noexcept;

  // Copies in other domains
  using copy_targets = std::array<seat_id, pool::max_holders>;
  [[nodiscard]] std::uint32_t targets_of(const block_key& span, copy_targets& into) const noexcept;
  void use(std::uint32_t entry, const kv_chain& chain, std::uint64_t span, std::uint64_t count,
           std::span<const std::uint64_t> masks) noexcept;
  void hear_copy(seat_id from, detail::pool_reader in) noexcept;
  void begin_copy(seat_id from, std::span<const block_key> keys, std::uint64_t before,
                  std::span<const std::uint64_t> masks);
  void end_copies() noexcept;
  void end_copy(std::size_t place) noexcept;

  // Serving
  void serve();
  void pop_serving() noexcept;
  void push_serving(const detail::pool_serving& what) noexcept;
  [[nodiscard]] bool may_wait(const detail::pool_serving& what) const noexcept;
  void serve_held(detail::pool_serving& next, const offload::held_block& block);
  void serve_absent(const detail::pool_serving& next);
  enum class sending : std::uint8_t { done, stalled, failed };
  [[nodiscard]] sending send_block(detail::pool_serving& what, const offload::held_block& block);
  void unpin(detail::pool_serving& what) noexcept;

  // Damage
  void report_damage(const record& of, part& each) noexcept;
  void check_copy(const block_key& span, std::uint32_t group, std::uint32_t place,
                  const block_key& key) noexcept;
  void offer_again(std::size_t group, const block_key& key) noexcept;

  // Reading other nodes' memory
  void open_memory();
  void close_memory() noexcept;
  static void on_left(void* self, const block_key& name) noexcept {
    static_cast<kv_pool*>(self)->mover_.withdraw(name);
  }
  void post_introduction(seat_id to) noexcept;
  void introduce_again(seat_id to) noexcept;
  void hear_introduction(seat_id from, detail::pool_reader in) noexcept;
  void offer_later(std::size_t group, const block_key& key) noexcept;
  void offer(std::size_t group, const block_key& key, const offload::held_block& block) noexcept;
  void offer_some() noexcept;
  [[nodiscard]] bool may_read(seat_id from, const part& each, std::uint32_t holder) const noexcept {
    if constexpr (reads_directly) {
      return (each.read_from >> holder & 1U) == 0 && mover_.reaches(from);
    } else {
      return false;
    }
  }
  /// Blocks to read, by their index in the request.
  struct read_batch {
    static constexpr std::size_t most = 64;
    std::array<std::size_t, most> parts{};
    std::array<std::uint32_t, most> holders{};
    std::array<pool::moved, most> outcomes{};
    std::size_t count = 0;
  };
  void read(record& of, read_batch& batch) noexcept;
  void end_read(record& of, part& each, std::uint32_t holder, pool::moved how) noexcept;
  void on_moved(const pool::move_ticket& ticket, pool::moved how) noexcept;
  void stop_reading(record& of, part& each) noexcept;
  [[nodiscard]] pool::move_ticket ticket_of(const record& of, const part& each) const noexcept;
  void arrive(part& each) noexcept;

  // Requests
  [[nodiscard]] std::span<std::uint64_t> masks_of(record& of, std::size_t span, std::uint32_t holder) const {
    return std::span(of.masks).subspan((span * pool::max_holders + holder) * groups_, groups_);
  }
  [[nodiscard]] std::uint64_t mask(const record& of, std::size_t span, std::uint32_t holder,
                                   std::size_t group) const noexcept {
    return of.masks[(span * pool::max_holders + holder) * groups_ + group];
  }
  /// What is not known yet of a request's blocks, or will not be.
  struct open_answers {
    bool is_pending = false;
    bool is_unknown = false;
  };
  [[nodiscard]] offload::kv_lookup_result where(const record& of, std::uint64_t upto,
                                                open_answers& open) const noexcept;
  [[nodiscard]] bool has_elsewhere(const record& of, std::size_t group, std::uint64_t chunks,
                                   open_answers& open) const noexcept;
  [[nodiscard]] std::uint64_t chunks_upto(const record& of, std::uint64_t upto) const noexcept;

  // Costs
  class other_nodes;
  [[nodiscard]] offload::load_choice choose(const record& of, const pool::fetch_costs& costs,
                                            std::uint64_t upto) const;
  void expect_open_parts(const pool::fetch_costs& costs, detail::fetch_shares& shares) const;
  [[nodiscard]] detail::block_sources sources_of(const record& of, std::size_t group, std::uint64_t chunk,
                                                 const pool::fetch_costs& costs,
                                                 detail::fetch_shares& shares) const;
  void plan_holders(record& of, const pool::fetch_costs& costs, bool is_later);
  void begin_fetch(std::uint32_t slot, std::uint64_t upto, const pool::fetch_costs* costs = nullptr,
                   bool is_later = false);
  [[nodiscard]] bool reads_from(seat_id seat) const noexcept {
    if constexpr (reads_directly) {
      return mover_.reaches(seat);
    } else {
      return false;
    }
  }
  void proceed(std::uint32_t slot) noexcept;
  [[nodiscard]] bool take_slot(record& of, part& each) noexcept;
  void wait_once(const record& of);
  void settle_nearby(record& of, part& each) noexcept;
  void give_up_late(record& of) noexcept;
  [[nodiscard]] std::uint32_t choose_holder(const record& of, const part& each) const noexcept;
  [[nodiscard]] static bool is_over(const part& each) noexcept { return each.state >= part_state::arrived; }
  void fail(record& of, part& each, error_code why) noexcept;
  void let_go(part& each) noexcept;
  pool::fetch_result finish(std::uint32_t slot) noexcept;

  kv_pool_options options_;
  Tiers* tiers_;
  Endpoint* end_;
  std::size_t groups_;
  std::uint64_t nonce_;  // of this pool: its endpoint may have had another before
  std::uint64_t epoch_ = 0;
  detail::pool_likeness likeness_{};
  Directory directory_;
  Mover mover_;
  detail::span_table published_;
  detail::fixed_array<detail::pool_span_use> uses_;    // by entry of `published_`, with copies only
  detail::fixed_array<detail::pool_serving> serving_;  // a ring
  std::size_t serving_first_ = 0;
  std::size_t serving_count_ = 0;
  std::uint64_t serve_turn_ = 0;
  std::uint64_t send_wait_ = 0;                     // how long further sends of this step may wait
  std::vector<detail::pool_peer> peers_;            // by seat
  std::vector<record> requests_;                    // of the engine, and behind them those for copies
  std::vector<std::optional<kv_chain>> copies_;     // the chains of those
  detail::fixed_array<detail::pool_offer> offers_;  // a ring
  std::size_t offer_first_ = 0;
  std::size_t offer_count_ = 0;
  std::uint64_t read_in_step_ = 0;  // bytes
  std::uint32_t in_flight_ = 0;     // blocks asked of other nodes
  bool must_republish_ = false;     // because the set of nodes has changed
  std::uint32_t republished_ = 0;   // entries looked at in this round
  bool has_passed_over_ = false;    // some of them, whose receiver was busy: there is another round
  pool::stats counted_{};
};

/// Of the types of its arguments.
template <class Tiers, endpoint Endpoint>
kv_pool(Tiers&, Endpoint&, kv_pool_options) -> kv_pool<Tiers, Endpoint>;
template <class Tiers, endpoint Endpoint, pool_directory Directory>
kv_pool(Tiers&, Endpoint&, Directory&) -> kv_pool<Tiers, Endpoint, Directory&>;
template <class Tiers, endpoint Endpoint, pool_directory Directory>
kv_pool(Tiers&, Endpoint&, Directory&, kv_pool_options) -> kv_pool<Tiers, Endpoint, Directory&>;
template <class Tiers, endpoint Endpoint, pool_mover Mover>
kv_pool(Tiers&, Endpoint&, Mover&) -> kv_pool<Tiers, Endpoint, pool::embedded_directory, Mover&>;
template <class Tiers, endpoint Endpoint, pool_mover Mover>
kv_pool(Tiers&, Endpoint&, Mover&, kv_pool_options)
    -> kv_pool<Tiers, Endpoint, pool::embedded_directory, Mover&>;
template <class Tiers, endpoint Endpoint, pool_directory Directory, pool_mover Mover>
kv_pool(Tiers&, Endpoint&, Directory&, Mover&) -> kv_pool<Tiers, Endpoint, Directory&, Mover&>;
template <class Tiers, endpoint Endpoint, pool_directory Directory, pool_mover Mover>
kv_pool(Tiers&, Endpoint&, Directory&, Mover&, kv_pool_options)
    -> kv_pool<Tiers, Endpoint, Directory&, Mover&>;

}  // namespace v0
}  // namespace llmmem

#include <llmmem/pool/detail/kv_pool_request.hpp>

#include <llmmem/pool/detail/kv_pool_body.hpp>
#include <llmmem/pool/detail/kv_pool_choosing.hpp>
#include <llmmem/pool/detail/kv_pool_copying.hpp>
#include <llmmem/pool/detail/kv_pool_fetching.hpp>
#include <llmmem/pool/detail/kv_pool_healing.hpp>
#include <llmmem/pool/detail/kv_pool_hearing.hpp>
#include <llmmem/pool/detail/kv_pool_moving.hpp>
