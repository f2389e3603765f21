/// @file
/// `redis_directory`: the directory of a `kv_pool` in a Redis server. Needs hiredis (0.14 or newer).
#pragma once

#include <llmmem/config.hpp>

#if !__has_include(<hiredis/hiredis.h>)
#error "llmmem/pool/redis_directory.hpp needs hiredis: install libhiredis-dev and link llmmem::redis."
#endif

#include <llmmem/error.hpp>
#include <llmmem/failure.hpp>
#include <llmmem/pool/detail/redis_connection.hpp>
#include <llmmem/pool/detail/redis_values.hpp>
#include <llmmem/pool/directory.hpp>
#include <llmmem/pool/errors.hpp>
#include <llmmem/pool/redis_types.hpp>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Keeps a pool's directory in Redis, which outlives the pool's nodes and serves tools and routers, too.
///
///     redis_directory directory({.unix_socket = "/run/redis/redis.sock"});
///     kv_pool pool(tiers, end, directory, {.model = layout.content_fingerprint()});
///
/// **Keys.** `<prefix><likeness>:node:<seat>` has the node's incarnation, with a lifetime that the node
/// renews at a third of it. `<prefix><likeness>:span:<key>` is a hash: for each node and incarnation the
/// blocks that it holds of the span. An entry counts only while its node's key names the same incarnation, so
/// one expiry is enough for a death; entries have no lifetime. A node that finds its key gone (it slept for
/// longer than the lifetime, or the server was emptied) takes a new incarnation and announces all of its
/// blocks again. Entries of dead incarnations are removed by a node that finds them; the others stay until
/// Redis evicts them, so give it `maxmemory` and `maxmemory-policy allkeys-lru`.
///
/// **A name taken by a new process** is a new incarnation: the new process overwrites the key. If the earlier
/// process lives, it announces nothing more (`redis_state::name_taken`) until the name is free again.
///
/// **The server is not trusted** with lengths and numbers: malformed names and values are counted and
/// ignored, at most 16 entries of a hash are read, and a reply that is too long closes the connection. A
/// value that is well-formed and wrong costs a message, as any hint.
///
/// **A server that is down or stopped** costs nothing but the blocks of other nodes: questions that are open
/// become unknown when `answer_ns` has passed since the last sign of the server, or earlier by the request's
/// own patience; later ones are unknown at once until the server is back. Then the pool announces all of its
/// spans again, 64 in each step.
///
/// It needs no thread: the pool's `progress` sends and reads, and nothing waits. The names of `host` are
/// looked up once, in the constructor, and all of their addresses are tried. What a full server refuses is
/// announced again, after `retry_ns` and then doubled times. An engine that computes for longer than
/// `lifetime_ns` without `progress` is dead for others meanwhile. Redis Cluster is not followed; commands are
/// those of Redis 6.2 or newer.
///
/// @par Complexity      a question one `HRANDFIELD` for each 8 chunks, and one `MGET` of the nodes' keys
///                      for all questions of a step; an announcement one `HSET` for each 8 chunks, of at
///                      most 800 bytes with one layer group.
/// @par Thread safety   that of its pool, which it outlives.
/// @par Errors          the constructor throws `argument_error` and `std::bad_alloc`. All else is in
///                      `state()` and `why()`: `errc::directory_unreachable`, `errc::directory_refused`,
///                      `errc::directory_name_taken`.
/// @par Source          keys of nodes that expire in place of entries that do: FlexKV's Redis directory;
///                      incarnations: Mooncake (issue 501), LMCache (issue 2088).
class redis_directory {
 public:
  static constexpr bool keepers_are_seats = false;
  static constexpr std::uint64_t kind = 0x5244'4953;  // "RDIS"

  explicit redis_directory(const redis_options& options)
      : options_(checked(options)), connection_(options), questions_(options.max_questions) {
    free_.reserve(questions_.size());
    for (std::size_t i = questions_.size(); i-- > 0;)
      free_.push_back(static_cast<std::uint32_t>(i));
  }
  redis_directory(const redis_directory&) = delete;
  redis_directory& operator=(const redis_directory&) = delete;
  /// Removes this node's name from the server, if that needs no wait and no other process has taken it.
  ~redis_directory() {
    if (!is_up_ || !is_owner_) return;
    connection_.command({"EVAL", "if redis.call('GET',KEYS[1])==ARGV[1] then redis.call('DEL',KEYS[1]) end",
                         "1", node_key(identity_.seat).view(), detail::redis_life_text(own_life()).view()});
    static_cast<void>(connection_.flush());
  }

  [[nodiscard]] pool::redis_state state() const noexcept {
    if (is_up_) return is_contested_ ? pool::redis_state::name_taken : pool::redis_state::up;
    return is_down_ ? pool::redis_state::down : pool::redis_state::connecting;
  }
  /// Returns the last trouble, `errc::ok` if there was none since the server came up. Its `where` has the
  /// server's address, and the server's words if it refused something.
  [[nodiscard]] const failure& why() const noexcept LLMMEM_LIFETIMEBOUND { return why_; }
  [[nodiscard]] pool::redis_stats stats() const noexcept {
    pool::redis_stats out = counted_;
    out.open_commands = sent_count_;
    return out;
  }

  // What a `pool_directory` has

  template <class Link>
  void begin(Link& link, const pool::directory_identity& identity);
  template <class Link>
  [[nodiscard]] std::uint32_t keeper_of(const Link&, const block_key&) const noexcept {
    return is_down_ ? pool::no_keeper : generation_;
  }
  template <class Link>
  [[nodiscard]] bool takes(const Link&, std::uint32_t keeper) const noexcept {
    return is_up_ && keeper == generation_ && !free_.empty() && !connection_.is_half_full() &&
           sent_count_ < sent_.size() / 2;
  }
  template <class Link>
  void announce(Link&, const block_key& span, const pool::span_record& record,
                const pool::span_records& all) noexcept {
    write(span, record, all, nullptr);
  }
  [[nodiscard]] bool has_received_all() const noexcept {
    return is_up_ && !is_contested_ && written_ == 0 && announce_at_ == 0;
  }
  template <class Link>
  void retract(Link&, const block_key& span, const pool::span_block& block,
               const pool::span_records& all) noexcept {
    std::uint32_t left = most_corrected;
    all.for_each([&](const pool::span_record& each) {
      if (left == 0 || block.place >= each.digests.size() || each.digests[block.place] != block.digest)
        return;
      --left;
      write(span, each, all, &block);
    });
  }
  template <class Link>
  [[nodiscard]] pool::asked ask(Link& link, const pool::span_question& question) noexcept;
  template <class Link>
  [[nodiscard]] bool hear(Link&, seat_id, detail::pool_frame, detail::pool_reader) noexcept {
    return false;  // nodes with this directory send none
  }
  template <class Link>
  void forget(Link&, seat_id) noexcept {}
  template <class Link>
  void progress(Link& link) noexcept;
  [[nodiscard]] std::uint64_t size() const noexcept { return 0; }
  [[nodiscard]] std::uint64_t metadata_bytes() const noexcept {
    return options_.buffer_bytes + questions_.size() * sizeof(open_question) + sizeof(*this) +
           alive_.size() * sizeof(detail::redis_life);
  }

 private:
  /// A command whose reply has not been read.
  enum class command : std::uint8_t { setup, claim, claim_free, see_name, renew, view, find, write, repair };
  struct sent_command {
    command what = command::setup;
    std::uint32_t slot = 0;
    std::uint32_t depth = 0;
  };
  struct open_question {
    bool is_open = false;
    std::uint32_t keeper = 0;
    std::uint64_t id = 0;
    std::uint32_t index = 0;
    std::uint32_t count = 0;
    block_key span{};
    std::array<std::uint32_t, pool::span_chunks> digests{};
    std::uint32_t left = 0;   // replies that have not been read
    bool is_refused = false;  // by one of them
    pool::span_holders found;
    std::optional<detail::holder_ranking> ranking{};
  };
  /// An entry whose node was dead when it was read. It is removed if a later look shows the same.
  struct suspect {
    detail::redis_key key{};
    detail::redis_holder holder{};
  };
  static constexpr std::string_view most_fields = "16";
  static constexpr std::uint32_t depth_step = 8;  // chunks
  /// Chains, the newest, in which a block that has gone is corrected: thousands may begin with it.
  static constexpr std::uint32_t most_corrected = 16;

  [[nodiscard]] static redis_options checked(const redis_options& options);
  [[nodiscard]] detail::redis_key key(std::string_view kind_of) const noexcept {
    detail::redis_key out;
    out.put(options_.prefix).put_hex(identity_.likeness, 16).put(kind_of);
    return out;
  }
  [[nodiscard]] detail::redis_key node_key(seat_id seat) const noexcept {
    return key(":node:").put_hex(to_index(seat), 4);
  }
  /// The hash of the chains that have `depth` leading chunks of a span in common.
  [[nodiscard]] detail::redis_key span_key(const block_key& span, std::span<const std::uint32_t> digests,
                                           std::uint32_t depth) const noexcept {
    detail::redis_key out = key(":span:").put_hex(span.high, 16).put_hex(span.low, 16);
    if (depth == 0) return out;
    std::uint64_t mixed = 0;
    for (const std::uint32_t each : digests.first(depth))
      mixed = detail::mix_pair(mixed, each);
    return out.put(":").put_hex(depth, 2).put(":").put_hex(mixed, 16);
  }
  [[nodiscard]] static std::uint32_t common(std::span<const std::uint32_t> one,
                                            std::span<const std::uint32_t> other) noexcept {
    std::uint32_t same = 0;
    while (same < one.size() && same < other.size() && one[same] == other[same])
      ++same;
    return same;
  }
  [[nodiscard]] detail::redis_life own_life() const noexcept { return {identity_.nonce, life_}; }
  void put_lifetime(detail::short_text<24>& into) const noexcept {
    into.put_number(options_.lifetime_ns / 1'000'000);
  }

  void expect(command what, std::uint32_t slot = 0, std::uint32_t depth = 0) noexcept {
    sent_[(sent_first_ + sent_count_++) % sent_.size()] = {what, slot, depth};
  }
  [[nodiscard]] bool has_space() const noexcept { return sent_count_ + 16 < sent_.size(); }
  void write(const block_key& span, const pool::span_record& of, const pool::span_records& all,
             const pool::span_block* without) noexcept;
  void claim(bool only_if_free) noexcept;
  void see_name() noexcept;
  void look() noexcept;
  [[nodiscard]] int flush(std::uint64_t now) noexcept;
  void repair() noexcept;

  template <class Link>
  void open(Link& link, std::uint64_t now) noexcept;
  template <class Link>
  void lose(Link& link, error_code code, std::uint64_t index, std::string_view words = {}) noexcept;
  template <class Link>
  [[nodiscard]] bool exchange(Link& link, std::uint64_t now) noexcept;
  template <class Link>
  [[nodiscard]] bool take(Link& link, const sent_command& of, const redisReply& reply) noexcept;
  template <class Link>
  void take_name(Link& link, const redisReply& reply, std::string_view words) noexcept;
  template <class Link>
  void come_up(Link& link) noexcept;
  template <class Link>
  void change_keeper(Link& link) noexcept;
  [[nodiscard]] std::uint64_t next_wait(std::uint64_t& wait) const noexcept;
  template <class Link>
  void take_found(Link& link, const sent_command& what, const redisReply& reply) noexcept;
  [[nodiscard]] bool take_view(const redisReply& reply) noexcept;
  template <class Link>
  void release(Link& link, std::uint32_t slot, bool is_unknown) noexcept;
  void refuse(error_code code, std::uint64_t index, std::string_view words) noexcept;

  redis_options options_;
  detail::redis_connection connection_;
  pool::directory_identity identity_{};
  std::vector<open_question> questions_;
  std::vector<std::uint32_t> free_;
  std::vector<detail::redis_life> alive_;  // by seat, at the last look
  std::array<sent_command, 2048> sent_{};  // a ring
  std::size_t sent_first_ = 0;
  std::size_t sent_count_ = 0;
  std::size_t in_flight_ = 0;  // of these, whose bytes were given to the socket
  std::size_t written_ = 0;    // of these, writes of entries
  std::array<suspect, 16> suspects_{};
  std::size_t suspect_count_ = 0;
  std::size_t looked_at_ = 0;     // suspects that are older than the look in flight
  bool has_looked_ = false;       // since the last `progress`
  std::uint32_t life_ = 0;        // of this node's name
  std::uint32_t generation_ = 1;  // of its announcements: the keeper
  bool is_up_ = false;
  bool is_down_ = false;
  bool has_claimed_ = false;    // its name, once
  bool is_owner_ = false;       // of its name
  bool is_contested_ = false;   // another process owns it
  std::uint64_t heard_at_ = 0;  // or when the oldest unanswered command was sent, if that is later
  std::uint64_t renew_at_ = 0;
  std::uint64_t retry_at_ = 0;
  std::uint64_t retry_wait_ = 0;
  std::uint64_t announce_at_ = 0;  // again, because the server refused some; 0: not
  std::uint64_t announce_wait_ = 0;
  failure why_{};
  pool::redis_stats counted_{};
};

}  // namespace v0
}  // namespace llmmem

#include <llmmem/pool/detail/redis_directory_body.hpp>

namespace llmmem {
inline namespace v0 {

static_assert(pool_directory<redis_directory>);

}  // namespace v0
}  // namespace llmmem
