/// @file
/// `pool_directory`: what finds the nodes of a `kv_pool` that hold the blocks of a span.
#pragma once

#include <llmmem/comm/ranks.hpp>
#include <llmmem/config.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/paging/layer_group.hpp>
#include <llmmem/pool/detail/pool_wire.hpp>
#include <llmmem/pool/detail/span_table.hpp>
#include <llmmem/pool/kv_pool_types.hpp>

#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

namespace pool {

/// The number of a keeper of entries, when none can be reached.
inline constexpr std::uint32_t no_keeper = ~std::uint32_t{0};

/// The node that a directory serves.
struct directory_identity {
  seat_id seat = no_seat;
  std::uint64_t nonce = 0;     ///< of this node's process: its incarnation
  std::uint64_t likeness = 0;  ///< equal for nodes that exchange blocks: nodes that differ share no entries
  std::uint32_t seats = 0;
  std::uint32_t groups = 0;  ///< layer groups: the number of masks of a record
};

/// The blocks of a span that a node holds, of one chain.
struct span_record {
  std::span<const std::uint32_t> digests{};  ///< `hint_digest` of each chunk's key, 1 to `span_chunks`
  std::span<const std::uint64_t> masks{};    ///< for each group, a bit for each chunk whose block it has
};

/// All records of this node for one span: chains that part within the span have one each.
class span_records {
 public:
  span_records(const detail::span_table& table, const block_key& span) noexcept
      : table_(&table), span_(span) {}
  /// Calls `f(record)` for each, the newest first.
  template <class F>
  void for_each(F&& f) const {
    table_->for_each_of(span_, [&](std::uint32_t entry) {
      const detail::span_entry& each = table_->at(entry);
      f(span_record{std::span(each.digests).first(each.chunks), table_->masks(entry)});
    });
  }

 private:
  const detail::span_table* table_;
  block_key span_;
};

/// One block of a span.
struct span_block {
  std::uint32_t group = 0;
  std::uint32_t place = 0;  ///< its chunk within the span
  std::uint32_t digest = 0;
};

/// Which nodes hold blocks of these chunks?
struct span_question {
  std::uint64_t id = 0;     ///< of the request, and
  std::uint32_t index = 0;  ///< of its span: the answer repeats both
  block_key span{};
  std::span<const std::uint32_t> digests{};
};

/// A node that holds blocks, and its process.
struct holder {
  seat_id seat = no_seat;
  std::uint64_t nonce = 0;
};

/// The answer of a directory.
struct span_holders {
  // Not the masks: to clear them takes a fifth of the time of a question to a node's own part.
  span_holders() noexcept {}  // NOLINT(cppcoreguidelines-pro-type-member-init, modernize-use-equals-default)

  std::uint32_t count = 0;
  std::array<holder, max_holders> holders{};
  /// By holder and group: `h * groups + g`; of `count` holders.
  std::array<std::uint64_t, std::size_t{max_holders} * max_layer_groups> masks;
};

/// The outcome of a question.
enum class asked : std::uint8_t {
  answered,    ///< `on_answer` was called
  pending,     ///< `on_answer` or `on_unknown` follows, unless the message is lost
  unreachable  ///< no keeper can answer now: unknown, which is not a miss
};

}  // namespace pool

namespace detail {

/// Collects the holders that have most of the asked chunks.
class holder_ranking {
 public:
  holder_ranking(pool::span_holders& into, std::size_t groups) noexcept : into_(&into), groups_(groups) {}

  /// Offers a node's record. If several chains of a node part within the span, the one with most in common
  /// counts.
  /// @param same  leading chunks that the record has in common with the question.
  void offer(seat_id seat, std::uint64_t nonce, std::uint32_t same,
             std::span<const std::uint64_t> masks) noexcept {
    const std::uint64_t shared = same < 64 ? (std::uint64_t{1} << same) - 1 : ~std::uint64_t{0};
    int size = 0;
    for (const std::uint64_t mask : masks)
      size += std::popcount(mask & shared);
    if (size == 0) return;
    std::uint32_t place = into_->count;
    for (std::uint32_t h = 0; h < into_->count; ++h) {
      if (into_->holders[h].seat == seat) place = h;
    }
    if (place == pool::max_holders) {
      place = 0;
      for (std::uint32_t h = 1; h < pool::max_holders; ++h)
        place = sizes_[h] < sizes_[place] ? h : place;
    } else if (place == into_->count) {
      ++into_->count;
    }
    if (size <= sizes_[place]) return;
    sizes_[place] = size;
    into_->holders[place] = {seat, nonce};
    for (std::size_t g = 0; g < groups_; ++g)
      into_->masks[place * groups_ + g] = masks[g] & shared;
  }

 private:
  pool::span_holders* into_;
  std::size_t groups_;
  std::array<int, pool::max_holders> sizes_{};
};

/// For concepts: what a pool offers its directory.
struct any_directory_link {
  [[nodiscard]] seat_id self() const noexcept { return no_seat; }
  [[nodiscard]] std::uint64_t nonce() const noexcept { return 0; }
  [[nodiscard]] std::uint32_t seats() const noexcept { return 0; }
  /// Whether this node exchanges blocks with the node in a seat.
  [[nodiscard]] bool is_present(seat_id) const noexcept { return false; }
  [[nodiscard]] std::uint64_t nonce_of(seat_id) const noexcept { return 0; }
  [[nodiscard]] std::uint64_t now_ns() const noexcept { return 0; }
  /// Whether a node reads the messages sent to it.
  [[nodiscard]] bool may_post(seat_id) const noexcept { return false; }
  void post(seat_id, pool_frame, const pool_writer&) noexcept {}
  /// Posts a message, or counts it as dropped if the node does not read.
  void post_or_drop(seat_id, pool_frame, const pool_writer&) noexcept {}
  /// Answers the question `index` of request `id`. Returns false if no request awaits it from that keeper.
  bool on_answer(std::uint32_t, std::uint64_t, std::uint32_t, const pool::span_holders&) noexcept {
    return false;
  }
  /// The question has no answer: unknown, which is not a miss.
  void on_unknown(std::uint64_t, std::uint32_t) noexcept {}
  /// The keepers of entries have changed, or have lost some: the pool announces again, in slices, what
  /// `keeper_of` names another keeper for than at its last announcement.
  void on_keepers_changed() noexcept {}
};

}  // namespace detail

/// The directory of a `kv_pool`: it records which nodes hold which blocks, span by span, and finds them.
///
/// `pool::embedded_directory` is the default: the nodes share the entries, by rendezvous hashing, and nothing
/// else runs. `redis_directory` keeps them in a Redis server. An engine may bring its own: an etcd, a router.
///
/// **Entries are hints.** An answer that is wrong, out of date or forged costs a message or a miss and never
/// yields a wrong byte: the pool asks only nodes with which it is connected, in the incarnation that the
/// answer names, names blocks by their whole keys, and verifies what arrives.
///
/// In all functions `link` is what the pool offers (`detail::any_directory_link` documents it); it is valid
/// during the call. None waits. With these, a pool forms its requests:
///
/// - `begin(link, identity)`     the pool begins, or begins a new epoch: the earlier identity's entries count
///   no more. May throw `std::bad_alloc`, at the pool's construction only.
/// - `keeper_of(link, span)`     a number for what keeps the span's entries now, or `no_keeper`. When it
///   differs from the one at the last announcement, the pool announces the span again.
/// - `takes(link, keeper)`       whether that keeper takes another question or announcement now.
/// - `announce(link, span, record, all)`  this node holds these blocks. `all` are all its records of the
///   span, `record` among them: a directory that keeps one value for a node and span writes those.
/// - `has_received_all()`        whether every node that asks from now on finds what was announced: false
///   while an announcement is on its way, or was refused and waits for another attempt.
/// - `retract(link, span, block, all)`    this node no longer holds a block; `all` still names it.
/// - `ask(link, question)`       returns an `asked`; `question.digests` is valid during the call only.
/// - `hear(link, from, kind, message)`    a message of another node's directory, of the kinds `publish`,
///   `ask`, `answer`, `gone` and `received`. Returns false if it is malformed or not awaited. Hostile input.
/// - `forget(link, seat)`        a node has ended, or is another process now.
/// - `progress(link)`            reads, sends, and renews what needs it; called in each of the pool's steps.
/// - `size()`, `metadata_bytes()`         entries that this node keeps for others, and the memory.
/// - `keepers_are_seats`         keepers are the pool's seats: with a seat's process its entries end, and
///   messages to it can be lost, so that the pool repeats questions.
/// - `kind`                      nodes of one pool need the same: 0 is the embedded directory's.
///
/// @par Complexity      a pool calls `keeper_of` and `takes` for each span in each request: nanoseconds.
/// @par Thread safety   that of its pool.
template <class D>
concept pool_directory = requires(
    D& directory, const D& seen, detail::any_directory_link& link, const block_key& span,
    const pool::directory_identity& identity, const pool::span_record& record, const pool::span_records& all,
    const pool::span_block& block, const pool::span_question& question, std::uint32_t keeper, seat_id seat,
    detail::pool_frame kind, detail::pool_reader message) {
  { directory.begin(link, identity) };
  { seen.keeper_of(link, span) } noexcept -> std::same_as<std::uint32_t>;
  { seen.takes(link, keeper) } noexcept -> std::same_as<bool>;
  { directory.announce(link, span, record, all) } noexcept;
  { seen.has_received_all() } noexcept -> std::same_as<bool>;
  { directory.retract(link, span, block, all) } noexcept;
  { directory.ask(link, question) } noexcept -> std::same_as<pool::asked>;
  { directory.hear(link, seat, kind, message) } noexcept -> std::same_as<bool>;
  { directory.forget(link, seat) } noexcept;
  { directory.progress(link) } noexcept;
  { seen.size() } noexcept -> std::convertible_to<std::uint64_t>;
  { seen.metadata_bytes() } noexcept -> std::convertible_to<std::uint64_t>;
  { D::keepers_are_seats } -> std::convertible_to<bool>;
  { D::kind } -> std::convertible_to<std::uint64_t>;
};

}  // namespace v0
}  // namespace llmmem
