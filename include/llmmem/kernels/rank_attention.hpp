/// @file
/// Ranks as holders of blocks: one rank asks the others, or all ask each other.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/errors.hpp>
#include <llmmem/kernels/attention_parts.hpp>
#include <llmmem/kernels/near_attention.hpp>
#include <llmmem/result.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// Ranks that exchange messages of known lengths: a `transport` of <llmmem/comm/transport.hpp>, such as a
/// `communicator`, whose ranks may be threads of this process or processes anywhere.
template <class R>
concept message_ranks = requires(R& ranks, const R& seen, std::span<const std::byte> out,
                                 std::span<std::byte> into, std::uint32_t tag, std::uint64_t ns) {
  static_cast<std::uint32_t>(seen.rank());
  static_cast<std::uint32_t>(seen.world());
  { ranks.send(out, seen.rank(), tag, seen.after(ns)) } -> std::same_as<result<void>>;
  { ranks.recv(into, seen.rank(), tag, seen.after(ns)) } -> std::same_as<result<void>>;
  { ranks.exchange(out, seen.rank(), into, seen.rank(), tag, seen.after(ns)) } -> std::same_as<result<void>>;
};

/// Options of the messages between ranks.
struct rank_attention_options {
  std::uint32_t tag = 0x6E656172;              ///< the tag of queries; answers have the next higher one
  std::uint64_t patience_ns = 30'000'000'000;  ///< the longest wait for each message
};

/// Bytes of the messages of a query: a header of `near_header_bytes`, then in one message the rows' sequences
/// and lengths, padded to a multiple of 16, and their queries.
inline constexpr std::uint64_t near_header_bytes = 64;
[[nodiscard]] constexpr std::uint64_t near_body_bytes(const near_query& query) noexcept {
  return (query.rows * 8 + 15) / 16 * 16 + query.query_bytes();
}
[[nodiscard]] constexpr std::uint64_t near_query_bytes(const near_query& query) noexcept {
  return near_header_bytes + near_body_bytes(query);
}
/// Returns the bytes that a rank needs to serve a query: the received query, and the part.
[[nodiscard]] constexpr std::uint64_t near_serving_bytes(const near_query& query) noexcept {
  return near_body_bytes(query) + near_part_stride(query.shape());
}
/// Bytes of the messages of an answer: whether it was refused, and the part.
inline constexpr std::uint64_t near_answer_bytes = 128;
[[nodiscard]] constexpr std::uint64_t near_reply_bytes(const attention_part_shape& shape) noexcept {
  return near_answer_bytes + attention_part_bytes(shape);
}

/// Other ranks that hold blocks and serve this one (`serve_attention`). Parts are in the order of the ranks.
///
/// @par Thread safety   as the ranks'.
/// @par Errors          those of the ranks' messages; a rank's refusal, in its words, with `index` the rank.
template <message_ranks Ranks>
class asked_ranks {
 public:
  using rank_type = decltype(std::declval<const Ranks&>().rank());

  /// @param others  the ranks that hold blocks, each once, without this rank. They, the ranks and the memory
  ///      outlive it.
  /// @param memory  for the message of a query: `near_body_bytes` of the largest.
  asked_ranks(Ranks& ranks, std::span<const rank_type> others, std::span<std::byte> memory,
              const rank_attention_options& how = {})
      : ranks_(&ranks), others_(others), message_(memory), how_(how) {}

  [[nodiscard]] std::uint32_t parts() const noexcept { return static_cast<std::uint32_t>(others_.size()); }
  result<void> begin(const near_query& query, std::span<std::byte> memory);
  result<near_traffic> finish();

 private:
  [[nodiscard]] result<void> take_answer(rank_type from, std::span<std::byte> part);

  Ranks* ranks_;
  std::span<const rank_type> others_;
  std::span<std::byte> message_;
  rank_attention_options how_;
  attention_part_shape shape_{};
  std::span<std::byte> memory_{};
  near_traffic traffic_{};
};

/// Serves one query of rank `from` with the blocks of `holder`, of which it takes one part. Waits for the
/// query.
///
/// @param memory  `near_serving_bytes` of the largest query that is served, aligned to 16.
/// @return the bytes that went over the link. If this rank refuses a query (its vectors do not fit the cache,
///         it is larger than `most_bytes`, it is not a query), it reports that to the rank that asked, and
///         also returns it. The failure of a message is only returned.
template <message_ranks Ranks, attention_holder Holder>
result<near_traffic> serve_attention(Ranks& ranks, decltype(std::declval<const Ranks&>().rank()) from,
                                     Holder& holder, std::span<std::byte> memory,
                                     const rank_attention_options& how = {});

/// All ranks have the same rows and ask each other, as at a decode step with context parallelism: each
/// attends by its own holder, and gets all parts, in the order of the ranks. So all of them merge the same
/// bits. Every rank must call `attend_near` with the same query. Each sends its part to all others.
template <message_ranks Ranks, attention_holder Holder>
class sharing_ranks {
 public:
  /// Both outlive it. @pre `own` returns one part
  sharing_ranks(Ranks& ranks, Holder& own, const rank_attention_options& how = {})
      : ranks_(&ranks), own_(&own), how_(how) {}

  [[nodiscard]] std::uint32_t parts() const noexcept { return static_cast<std::uint32_t>(ranks_->world()); }
  result<void> begin(const near_query& query, std::span<std::byte> memory);
  result<near_traffic> finish();

 private:
  Ranks* ranks_;
  Holder* own_;
  rank_attention_options how_;
  attention_part_shape shape_{};
  std::span<std::byte> memory_{};
};

}  // namespace v0
}  // namespace llmmem

#include <llmmem/kernels/detail/rank_attention_body.hpp>
