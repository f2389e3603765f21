/// @file
/// `embedded_directory`: the nodes of a pool keep its directory themselves.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/pool/detail/pool_wire.hpp>
#include <llmmem/pool/detail/span_table.hpp>
#include <llmmem/pool/directory.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace pool {

/// The directory that the nodes share: rendezvous hashing of a span's first key picks, among the nodes that
/// exchange blocks, the one that keeps the span's entries. A node that joins or leaves moves only its share,
/// and the entries of a dead node's share return when their holders announce them to its successor.
///
/// @par Complexity   `keeper_of` O(seats); an answer O(entries of the span x chunks); `max_spans` entries of
///                   320 bytes, and 8 for each group: the oldest is forgotten first.
/// @par Errors       the constructor throws `out_of_memory`.
/// @par Source       rendezvous hashing: Thaler and Ravishankar, 1998.
class embedded_directory {
 public:
  static constexpr bool keepers_are_seats = true;
  static constexpr std::uint64_t kind = 0;

  embedded_directory(std::uint32_t max_spans, std::size_t groups, const metadata_source& source)
      : groups_(groups), table_(max_spans, groups, source) {}

  template <class Link>
  void begin(const Link& link, const directory_identity&) {
    table_.clear();
    peers_.resize(link.seats());
    for (announcements& each : peers_)
      each.end();
  }

  template <class Link>
  [[nodiscard]] std::uint32_t keeper_of(const Link& link, const block_key& span) const noexcept {
    const std::uint64_t what = span.low ^ span.high;
    std::uint32_t best = to_index(link.self());
    std::uint64_t most = detail::mix_pair(what, link.nonce());
    for (std::uint32_t i = 0; i < link.seats(); ++i) {
      if (!link.is_present(seat_id{i})) continue;
      const std::uint64_t score = detail::mix_pair(what, link.nonce_of(seat_id{i}));
      if (score <= most) continue;
      most = score;
      best = i;
    }
    return best;
  }
  template <class Link>
  [[nodiscard]] bool takes(const Link& link, std::uint32_t keeper) const noexcept {
    return seat_id{keeper} == link.self() || link.may_post(seat_id{keeper});
  }

  template <class Link>
  void announce(Link& link, const block_key& span, const span_record& record, const span_records&) noexcept {
    const seat_id to{keeper_of(link, span)};
    if (to == link.self()) {
      table_.put(span, to, link.nonce(), record.digests, record.masks);
      return;
    }
    detail::pool_writer out;
    out.put(span);
    put_digests(out, record.digests);
    for (const std::uint64_t mask : record.masks)
      out.put(mask);
    out.put(++peers_[to_index(to)].told);
    link.post(to, detail::pool_frame::publish, out);
  }
  [[nodiscard]] bool has_received_all() const noexcept {
    return std::ranges::all_of(peers_, [](const announcements& each) { return each.told == each.settled; });
  }
  template <class Link>
  void retract(Link& link, const block_key& span, const span_block& block, const span_records&) noexcept {
    const seat_id to{keeper_of(link, span)};
    if (to == link.self()) return table_.take_back(span, to, block.group, block.place, block.digest);
    detail::pool_writer out;
    out.put(span);
    out.put(block.group);
    out.put(block.place);
    out.put(block.digest);
    // If the message is dropped, the next node that asks for the block corrects the directory.
    link.post_or_drop(to, detail::pool_frame::gone, out);
  }

  template <class Link>
  [[nodiscard]] asked ask(Link& link, const span_question& question) noexcept {
    const seat_id to{keeper_of(link, question.span)};
    if (to == link.self()) {
      span_holders found;
      find(question.span, question.digests, to, found);
      link.on_answer(to_index(to), question.id, question.index, found);
      return asked::answered;
    }
    detail::pool_writer out;
    out.put(question.id);
    out.put(question.index);
    out.put(question.span);
    put_digests(out, question.digests);
    link.post(to, detail::pool_frame::ask, out);
    return asked::pending;
  }

  template <class Link>
  [[nodiscard]] bool hear(Link& link, seat_id from, detail::pool_frame what,
                          detail::pool_reader in) noexcept {
    switch (what) {
      case detail::pool_frame::publish:
        return hear_publish(link, from, in);
      case detail::pool_frame::ask:
        return hear_ask(link, from, in);
      case detail::pool_frame::answer:
        return hear_answer(link, from, in);
      case detail::pool_frame::gone:
        return hear_gone(from, in);
      case detail::pool_frame::received:
        return hear_received(link, from, in);
      default:
        return false;
    }
  }

  template <class Link>
  void forget(const Link&, seat_id seat) noexcept {
    table_.forget(seat);
    peers_[to_index(seat)].end();
  }
  /// Answers other nodes with the last of their announcements that this node has received, once in a step.
  template <class Link>
  void progress(Link& link) noexcept {
    if (!owes_any_) return;
    owes_any_ = false;
    for (std::uint32_t i = 0; i < peers_.size(); ++i) {
      announcements& of = peers_[i];
      if (!of.owes_answer) continue;
      if (!link.may_post(seat_id{i})) {
        owes_any_ = true;
        continue;
      }
      of.owes_answer = false;
      detail::pool_writer out;
      out.put(link.nonce_of(seat_id{i}));
      out.put(of.received);
      link.post(seat_id{i}, detail::pool_frame::received, out);
    }
  }
  [[nodiscard]] std::uint32_t size() const noexcept { return table_.size(); }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept {
    return table_.metadata_bytes() + peers_.size() * sizeof(announcements);
  }

 private:
  using digest_list = std::array<std::uint32_t, span_chunks>;

  /// What this node announced to another one, and received from it. Announcements have numbers; messages
  /// arrive in order, so that a number stands for all up to it.
  struct announcements {
    std::uint64_t told = 0;      // the last one to that node
    std::uint64_t settled = 0;   // the last one that the node has received, or no longer needs
    std::uint64_t received = 0;  // the last one from that node
    bool owes_answer = false;    // for `received`

    /// The node is another process now, or its entries belong to an earlier epoch.
    void end() noexcept {
      settled = told;  // an answer that is still on its way changes nothing
      owes_answer = false;
    }
  };

  static void put_digests(detail::pool_writer& out, std::span<const std::uint32_t> digests) noexcept {
    out.put(static_cast<std::uint32_t>(digests.size()));
    for (const std::uint32_t each : digests)
      out.put(each);
  }
  /// Returns an empty span if the number is impossible.
  static std::span<const std::uint32_t> take_digests(detail::pool_reader& in, digest_list& into) noexcept {
    const auto count = in.take<std::uint32_t>();
    if (count == 0 || count > span_chunks) return {};
    for (std::uint32_t i = 0; i < count; ++i)
      into[i] = in.take<std::uint32_t>();
    return std::span(into).first(count);
  }

  /// Finds the nodes that have most of the chain's blocks in a span.
  void find(const block_key& span, std::span<const std::uint32_t> digests, seat_id without,
            span_holders& into) const noexcept {
    detail::holder_ranking ranking(into, groups_);
    table_.for_each_of(span, [&](std::uint32_t entry) {
      const detail::span_entry& each = table_.at(entry);
      if (each.holder == without) return;
      ranking.offer(each.holder, each.nonce, detail::span_table::common(each, digests), table_.masks(entry));
    });
  }

  template <class Link>
  [[nodiscard]] bool hear_publish(const Link& link, seat_id from, detail::pool_reader in) noexcept {
    const auto span = in.take<block_key>();
    digest_list digests{};
    const std::span<const std::uint32_t> told = take_digests(in, digests);
    std::array<std::uint64_t, max_layer_groups> masks{};
    for (std::size_t g = 0; g < groups_; ++g)
      masks[g] = in.take<std::uint64_t>();
    const auto number = in.take<std::uint64_t>();
    if (told.empty() || !in.is_over()) return false;
    table_.put(span, from, link.nonce_of(from), told, std::span(masks).first(groups_));
    announcements& of = peers_[to_index(from)];
    of.received = number;
    of.owes_answer = owes_any_ = true;
    return true;
  }
  template <class Link>
  [[nodiscard]] bool hear_received(const Link& link, seat_id from, detail::pool_reader in) noexcept {
    const auto nonce = in.take<std::uint64_t>();
    const auto number = in.take<std::uint64_t>();
    if (!in.is_over()) return false;
    if (nonce != link.nonce()) return true;  // an answer to an earlier pool of this seat
    announcements& of = peers_[to_index(from)];
    if (number > of.told) return false;
    of.settled = std::max(of.settled, number);
    return true;
  }
  template <class Link>
  [[nodiscard]] bool hear_ask(Link& link, seat_id from, detail::pool_reader in) noexcept {
    const auto id = in.take<std::uint64_t>();
    const auto index = in.take<std::uint32_t>();
    const auto span = in.take<block_key>();
    digest_list digests{};
    const std::span<const std::uint32_t> told = take_digests(in, digests);
    if (told.empty() || !in.is_over()) return false;
    span_holders found;
    find(span, told, from, found);
    detail::pool_writer out;
    out.put(id);
    out.put(index);
    out.put(found.count);
    for (std::uint32_t h = 0; h < found.count; ++h) {
      out.put(found.holders[h].seat);
      out.put(found.holders[h].nonce);
      for (std::size_t g = 0; g < groups_; ++g)
        out.put(found.masks[h * groups_ + g]);
    }
    link.post_or_drop(from, detail::pool_frame::answer, out);
    return true;
  }
  template <class Link>
  [[nodiscard]] bool hear_answer(Link& link, seat_id from, detail::pool_reader in) noexcept {
    const auto id = in.take<std::uint64_t>();
    const auto index = in.take<std::uint32_t>();
    const auto count = in.take<std::uint32_t>();
    if (count > max_holders) return false;
    span_holders found;
    found.count = count;
    for (std::uint32_t h = 0; h < count; ++h) {
      found.holders[h].seat = in.take<seat_id>();
      found.holders[h].nonce = in.take<std::uint64_t>();
      for (std::size_t g = 0; g < groups_; ++g)
        found.masks[h * groups_ + g] = in.take<std::uint64_t>();
    }
    const bool is_right = in.is_over();
    if (!is_right) found.count = 0;
    return link.on_answer(to_index(from), id, index, found) && is_right;
  }
  [[nodiscard]] bool hear_gone(seat_id from, detail::pool_reader in) noexcept {
    const auto span = in.take<block_key>();
    const auto group = in.take<std::uint32_t>();
    const auto place = in.take<std::uint32_t>();
    const auto digest = in.take<std::uint32_t>();
    if (!in.is_over() || group >= groups_ || place >= span_chunks) return false;
    table_.take_back(span, from, group, place, digest);
    return true;
  }

  std::size_t groups_;
  detail::span_table table_;
  std::vector<announcements> peers_;  // by seat
  bool owes_any_ = false;
};

static_assert(pool_directory<embedded_directory>);

}  // namespace pool
}  // namespace v0
}  // namespace llmmem
