/// @file
/// The messages of ranks that attend for each other.
#pragma once

#include <llmmem/kernels/detail/kv_checks.hpp>
#include <llmmem/kernels/errors.hpp>
#include <llmmem/kernels/rank_attention.hpp>
#include <llmmem/paging/errors.hpp>

#include <algorithm>
#include <bit>
#include <cstring>
#include <string_view>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The header of a query. All numbers are in the machine's byte order, because the ranks are of one job.
struct near_header {
  static constexpr std::uint32_t known = 0x316E'726EU;  // "nrn1"

  std::uint32_t what = known;
  std::uint32_t layer = 0;
  std::uint64_t rows = 0;
  std::uint32_t query_heads = 0;
  std::uint32_t head_dim = 0;
  std::uint32_t value_dim = 0;
  std::uint32_t element = 0;
  float scale = 0;
  std::uint32_t window = 0;
  std::uint64_t body_bytes = 0;
  std::uint64_t spare[2]{};
};
static_assert(sizeof(near_header) == near_header_bytes);

/// The header of a part, or a refusal.
struct near_answer {
  std::uint32_t number = 0;  // of an error; 0: the part follows
  std::uint32_t index = 0;
  std::uint64_t wanted = 0;
  std::uint64_t found = 0;
  std::uint64_t spare = 0;
  char where[96]{};
};
static_assert(sizeof(near_answer) == near_answer_bytes);

/// The refusals of attention, by number.
inline constexpr std::array near_refusals{
    errc::size_mismatch,      errc::out_of_range,        errc::bad_granularity,
    errc::too_short,          errc::no_conversion,       errc::bad_alignment,
    errc::unsupported_layout, errc::block_tokens_differ, errc::no_device_code};

template <class T>
[[nodiscard]] std::span<const std::byte> bytes_of(const T& value) noexcept {
  return std::as_bytes(std::span(&value, 1));
}

[[nodiscard]] inline near_answer answer_of(const failure& why) noexcept {
  near_answer out;
  out.number = why.code.number();
  out.index = why.index;
  out.wanted = why.wanted;
  out.found = why.found;
  const std::string_view where = why.where.view();
  where.copy(out.where, sizeof out.where - 1);
  return out;
}

/// Returns another rank's refusal. A number that is not a refusal of attention is untrusted.
[[nodiscard]] inline failure refusal_of(const near_answer& of, std::uint32_t rank) noexcept {
  const std::string_view where(of.where, std::find(of.where, of.where + sizeof of.where, '\0'));
  const auto* const code =
      std::ranges::find_if(near_refusals, [&](const error_code& each) { return each.number() == of.number; });
  if (code == near_refusals.end()) return {errc::stopped, rank, of.number, 0, "attend_near: another rank"};
  return {*code, rank, of.wanted, of.found, where};
}

/// Returns the bytes of the sequences and lengths of `rows` rows.
[[nodiscard]] constexpr std::uint64_t near_tables_bytes(std::uint64_t rows) noexcept {
  return (rows * 8 + 15) / 16 * 16;
}

/// Writes the message after a header. @pre `to` has space for it
inline void write_query(std::byte* to, const near_query& of) noexcept {
  if (of.rows == 0) return;
  const auto half = static_cast<std::size_t>(of.rows * 4);
  const auto tables = static_cast<std::size_t>(near_tables_bytes(of.rows));
  std::memcpy(to, of.sequences, half);
  std::memcpy(to + half, of.lengths, half);
  std::memset(to + 2 * half, 0, tables - 2 * half);
  std::memcpy(to + tables, of.queries, static_cast<std::size_t>(of.query_bytes()));
}

/// Returns the query that a header describes, without its pointers, if the header is valid. It is untrusted
/// until all of it is consistent.
[[nodiscard]] inline result<near_query> query_of(const near_header& of, std::uint64_t most_bytes) noexcept {
  if (of.what != near_header::known)
    return failure{errc::size_mismatch, 0, near_header::known, of.what,
                   "serve_attention: what a query begins with"};
  constexpr std::uint32_t elements[] = {static_cast<std::uint32_t>(dtype::f32),
                                        static_cast<std::uint32_t>(dtype::bf16),
                                        static_cast<std::uint32_t>(dtype::f16)};
  if (std::ranges::find(elements, of.element) == std::end(elements))
    return failure{errc::no_conversion, 0, elements[0], of.element, "serve_attention: element of the query"};
  near_query out;
  out.element = static_cast<dtype>(of.element);
  out.rows = of.rows;
  out.layer = of.layer;
  out.query_heads = of.query_heads;
  out.head_dim = of.head_dim;
  out.value_dim = of.value_dim;
  out.scale = of.scale;
  out.window = of.window;
  // Vectors of kernels have at most 256 elements; then no product below exceeds 64 bits.
  constexpr std::uint32_t most_elements = 256;
  if (of.head_dim > most_elements || of.value_dim > most_elements)
    return failure{errc::out_of_range, 0, std::max(of.head_dim, of.value_dim), most_elements,
                   "serve_attention: elements of a vector of the query"};
  const std::uint64_t a_row = 8 + std::uint64_t{of.query_heads} * (most_elements * 4 + 8);
  if (of.rows > most_bytes / 8 || (of.rows != 0 && a_row > ~std::uint64_t{0} / 64 / of.rows))
    return failure{errc::out_of_range, 0, of.rows, most_bytes / 8, "serve_attention: rows of the query"};
  const std::uint64_t body = near_tables_bytes(of.rows) + out.query_bytes();
  if (of.body_bytes != body)
    return failure{errc::size_mismatch, 0, body, of.body_bytes, "serve_attention: bytes of the query"};
  if (near_serving_bytes(out) > most_bytes)
    return failure{errc::too_short, 0, near_serving_bytes(out), most_bytes,
                   "serve_attention: memory of the rank that is asked (bytes)"};
  return out;
}

/// Returns the name of rank `i` of a transport.
template <class Ranks>
[[nodiscard]] auto rank_at(const Ranks& /*ranks*/, std::uint32_t i) noexcept {
  return decltype(std::declval<const Ranks&>().rank()){i};
}

}  // namespace detail

template <message_ranks Ranks>
result<void> asked_ranks<Ranks>::begin(const near_query& query, std::span<std::byte> memory) {
  if (auto fits = detail::check_query(query); !fits) return fits;
  shape_ = query.shape();
  memory_ = memory;
  traffic_ = {};
  const auto body = static_cast<std::size_t>(near_body_bytes(query));
  if (message_.size() < body)
    return failure{errc::too_short, 0, body, message_.size(), "asked_ranks: memory (bytes)"};
  detail::write_query(message_.data(), query);
  detail::near_header header;
  header.layer = query.layer;
  header.rows = query.rows;
  header.query_heads = query.query_heads;
  header.head_dim = query.head_dim;
  header.value_dim = query.value_dim;
  header.element = static_cast<std::uint32_t>(query.element);
  header.scale = query.scale;
  header.window = query.window;
  header.body_bytes = body;
  for (const rank_type each : others_) {
    const auto by = ranks_->after(how_.patience_ns);
    if (auto sent = ranks_->send(detail::bytes_of(header), each, how_.tag, by); !sent) return sent;
    if (auto sent = ranks_->send(message_.first(body), each, how_.tag, by); !sent) return sent;
    traffic_.sent_bytes += near_query_bytes(query);
  }
  return {};
}

template <message_ranks Ranks>
result<void> asked_ranks<Ranks>::take_answer(rank_type from, std::span<std::byte> part) {
  const auto by = ranks_->after(how_.patience_ns);
  detail::near_answer answer;
  if (auto came = ranks_->recv(std::as_writable_bytes(std::span(&answer, 1)), from, how_.tag + 1, by); !came)
    return came;
  traffic_.received_bytes += sizeof answer;
  if (answer.number != 0) return detail::refusal_of(answer, static_cast<std::uint32_t>(from));
  if (auto came = ranks_->recv(part, from, how_.tag + 1, by); !came) return came;
  traffic_.received_bytes += part.size();
  return {};
}

template <message_ranks Ranks>
result<near_traffic> asked_ranks<Ranks>::finish() {
  const auto bytes = static_cast<std::size_t>(attention_part_bytes(shape_));
  const auto stride = static_cast<std::size_t>(near_part_stride(shape_));
  failure first{};
  // Receives from each, also after a failure, so that no message is left for the next call.
  for (std::size_t i = 0; i < others_.size(); ++i) {
    auto taken = take_answer(others_[i], memory_.subspan(i * stride, bytes));
    if (!taken && first.code == errc::ok) first = taken.error();
  }
  if (first.code != errc::ok) return first;
  return traffic_;
}

template <message_ranks Ranks, attention_holder Holder>
result<near_traffic> serve_attention(Ranks& ranks, decltype(std::declval<const Ranks&>().rank()) from,
                                     Holder& holder, std::span<std::byte> memory,
                                     const rank_attention_options& how) {
  if (auto fits =
          detail::whole(reinterpret_cast<std::uintptr_t>(memory.data()), 16, "serve_attention: memory");
      !fits)
    return fits.error();
  detail::near_header header;
  if (auto came = ranks.recv(std::as_writable_bytes(std::span(&header, 1)), from, how.tag,
                             ranks.after(how.patience_ns));
      !came)
    return came.error();
  near_traffic traffic{0, sizeof header};
  const auto refuse = [&](const failure& why) -> result<near_traffic> {
    const detail::near_answer answer = detail::answer_of(why);
    if (auto told = ranks.send(detail::bytes_of(answer), from, how.tag + 1, ranks.after(how.patience_ns));
        !told)
      return told.error();
    return why;
  };
  auto read = detail::query_of(header, memory.size());
  if (!read) return refuse(read.error());
  near_query query = read.value();
  const auto body = static_cast<std::size_t>(header.body_bytes);
  const auto part = static_cast<std::size_t>(near_part_stride(query.shape()));
  std::byte* const at = memory.data();
  if (auto came = ranks.recv({at, body}, from, how.tag, ranks.after(how.patience_ns)); !came)
    return came.error();
  traffic.received_bytes += body;
  query.sequences = reinterpret_cast<const std::int32_t*>(at);
  query.lengths = query.sequences + query.rows;
  query.queries = at + detail::near_tables_bytes(query.rows);
  const std::span<std::byte> into(at + body, part);  // bodies are multiples of 16
  if (holder.parts() != 1)
    return refuse({errc::size_mismatch, 0, 1, holder.parts(), "serve_attention: parts of the holder"});
  if (auto begun = holder.begin(query, into); !begun) return refuse(begun.error());
  if (auto done = holder.finish(); !done) return refuse(done.error());
  const auto by = ranks.after(how.patience_ns);
  const detail::near_answer answer;
  if (auto sent = ranks.send(detail::bytes_of(answer), from, how.tag + 1, by); !sent) return sent.error();
  const auto bytes = static_cast<std::size_t>(attention_part_bytes(query.shape()));
  if (auto sent = ranks.send(into.first(bytes), from, how.tag + 1, by); !sent) return sent.error();
  traffic.sent_bytes += near_reply_bytes(query.shape());
  return traffic;
}

template <message_ranks Ranks, attention_holder Holder>
result<void> sharing_ranks<Ranks, Holder>::begin(const near_query& query, std::span<std::byte> memory) {
  const auto give_up = [&](const failure& why) {
    ranks_->revoke();
    return why;
  };
  if (own_->parts() != 1)
    return give_up({errc::size_mismatch, 0, 1, own_->parts(), "sharing_ranks: parts of the own holder"});
  shape_ = query.shape();
  memory_ = memory;
  const auto stride = static_cast<std::size_t>(near_part_stride(shape_));
  if (auto begun =
          own_->begin(query, memory.subspan(static_cast<std::size_t>(ranks_->rank()) * stride, stride));
      !begun)
    return give_up(begun.error());
  return {};
}

template <message_ranks Ranks, attention_holder Holder>
result<near_traffic> sharing_ranks<Ranks, Holder>::finish() {
  const auto give_up = [&](const failure& why) {
    ranks_->revoke();
    return why;
  };
  if (auto done = own_->finish(); !done) return give_up(done.error());
  const auto bytes = static_cast<std::size_t>(attention_part_bytes(shape_));
  const auto stride = static_cast<std::size_t>(near_part_stride(shape_));
  const auto world = static_cast<std::uint32_t>(ranks_->world());
  const auto self = static_cast<std::uint32_t>(ranks_->rank());
  const auto part = [&](std::uint32_t rank) { return memory_.subspan(rank * stride, bytes); };
  near_traffic traffic{};
  for (std::uint32_t d = 1; d < world; ++d) {
    const std::uint32_t to = (self + d) % world;
    const std::uint32_t from = (self + world - d) % world;
    if (auto done =
            ranks_->exchange(part(self), detail::rank_at(*ranks_, to), part(from),
                             detail::rank_at(*ranks_, from), how_.tag, ranks_->after(how_.patience_ns));
        !done)
      return give_up(done.error());
    traffic.sent_bytes += bytes;
    traffic.received_bytes += bytes;
  }
  return traffic;
}

}  // namespace v0
}  // namespace llmmem
