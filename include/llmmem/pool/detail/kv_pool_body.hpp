/// @file
/// Bodies of kv_pool.hpp: setup, the directory, and messages to other nodes. Only that file includes this
/// one.
#pragma once

#include <llmmem/detail/named_range.hpp>
#include <llmmem/error.hpp>
#include <llmmem/paging/errors.hpp>
#include <llmmem/paging/outside_keys.hpp>
#include <llmmem/pool/kv_pool.hpp>

#include <bit>

namespace llmmem {
inline namespace v0 {

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
kv_pool<Tiers, Endpoint, Directory, Mover>::kv_pool(Tiers& tiers, Endpoint& end, directory_type* directory,
                                                    mover_type* mover, const kv_pool_options& options)
    : options_(checked(options)),
      tiers_(&tiers),
      end_(&end),
      groups_(tiers.groups().size()),
      nonce_(detail::mix_pair(end.nonce(), end.now_ns())),
      epoch_(tiers.cache().epoch()),
      likeness_(own_likeness()),
      directory_(make_directory(directory)),
      mover_(make_mover(mover)),
      published_(options.directory_spans, groups_, options.metadata),
      uses_(options.copies == 0 ? 0 : options.directory_spans, detail::pool_span_use{}, options.metadata,
            "kv_pool: uses of spans"),
      serving_(options.max_serving, detail::pool_serving{}, options.metadata, "kv_pool: blocks to send"),
      peers_(end.seats()),
      requests_(std::size_t{options.max_requests} + options.max_copying),
      copies_(options.max_copying),
      offers_(reads_directly ? options.max_offers : 0, detail::pool_offer{}, options.metadata,
              "kv_pool: blocks to offer") {
  // Random generations, because other nodes may still send blocks for requests of an earlier pool of this
  // endpoint.
  for (record& each : requests_)
    each.generation = static_cast<std::uint32_t>(nonce_ >> 32);
  if constexpr (reads_directly) open_memory();
  directory_link link{this};
  directory_.begin(link, identity());
  for (std::uint32_t seat = 0; seat < end.seats(); ++seat) {
    if (end.is_connected(seat_id{seat})) post_hello(seat_id{seat});
  }
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
kv_pool_options kv_pool<Tiers, Endpoint, Directory, Mover>::checked(const kv_pool_options& options) const {
  const auto refuse = [&](const char* what) {
    throw argument_error(options.name + ": " + what + " is 0; at least 1 is needed");
  };
  if (options.max_requests == 0) refuse("max_requests");
  if (options.max_gets == 0) refuse("max_gets");
  if (options.max_serving == 0) refuse("max_serving");
  if (options.directory_spans == 0) refuse("directory_spans");
  if (options.ask_again_ns == 0) refuse("ask_again_ns");
  if (options.copies != 0 && options.hot_uses == 0) refuse("hot_uses");
  if (options.copies >= pool::max_holders) {
    throw argument_error(options.name + ": copies is " + std::to_string(options.copies) +
                         "; the directory names " + std::to_string(pool::max_holders) +
                         " holders of a span, so at most " + std::to_string(pool::max_holders - 1) +
                         " are found");
  }
  return options;
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
detail::pool_likeness kv_pool<Tiers, Endpoint, Directory, Mover>::own_likeness() const {
  const auto& cache = tiers_->cache();
  const std::span<const layer_group> groups = tiers_->groups();
  detail::pool_likeness out{
      .magic = 0x6C70'766B, .version = 4, .model = options_.model ^ tiers_->content_form()};
  out.groups = static_cast<std::uint32_t>(groups_);
  std::array<token_id, 4> some{};
  for (std::size_t i = 0; i < some.size(); ++i)
    some[i] = static_cast<token_id>(i + 1);
  out.key = cache.hash().chain(paging::root_key(cache.hash(), prefix_context{}, epoch_),
                               std::span<const token_id>(some));
  for (std::size_t g = 0; g < groups_; ++g) {
    out.blocks = detail::mix_pair(out.blocks, tiers_->mover().block_bytes(g));
    out.blocks = detail::mix_pair(out.blocks, tiers_->mover().layers(g));
    out.blocks = detail::mix_pair(out.blocks, groups[g].block_tokens);
  }
  if constexpr (requires { cache.chunk_tokens(); }) {
    out.chunk_tokens = cache.chunk_tokens();
  } else {
    out.chunk_tokens = cache.block_tokens();
  }
  // Nodes of different directories would not find each other's blocks.
  if (directory_type::kind != 0) out.blocks = detail::mix_pair(out.blocks, directory_type::kind);
  return out;
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
pool::directory_identity kv_pool<Tiers, Endpoint, Directory, Mover>::identity() const noexcept {
  std::uint64_t like = detail::mix_pair(likeness_.model, likeness_.blocks);
  like = detail::mix_pair(detail::mix_pair(like, likeness_.key.low), likeness_.key.high);
  return {.seat = self(),
          .nonce = nonce_,
          .likeness = detail::mix_pair(like, likeness_.chunk_tokens),
          .seats = static_cast<std::uint32_t>(peers_.size()),
          .groups = static_cast<std::uint32_t>(groups_)};
}

/// The cache has been reset, so its keys change, and so do those of other nodes that reset.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::begin_epoch() noexcept {
  epoch_ = tiers_->cache().epoch();
  likeness_ = own_likeness();
  directory_link link{this};
  directory_.begin(link, identity());
  published_.clear();
  for (std::uint32_t i = 0; i < peers_.size(); ++i) {
    const seat_id seat{i};
    if (seat == self()) continue;
    detail::pool_peer& peer = peers_[i];
    if (peer.state != pool::peer_state::absent) {
      const bool is_alike = peer.likeness == likeness_;
      if (!is_alike) forget_peer(seat, false);
      peer.state = is_alike ? pool::peer_state::present : pool::peer_state::different;
    }
    post_hello(seat);
  }
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
std::uint32_t kv_pool<Tiers, Endpoint, Directory, Mover>::peers() const noexcept {
  std::uint32_t count = 0;
  for (const detail::pool_peer& each : peers_)
    count += each.state == pool::peer_state::present ? 1U : 0U;
  return count;
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
pool::stats kv_pool<Tiers, Endpoint, Directory, Mover>::stats() const noexcept {
  pool::stats out = counted_;
  out.directory_spans = directory_.size();
  out.metadata_bytes = directory_.metadata_bytes() + published_.metadata_bytes() + uses_.bytes() +
                       serving_.bytes() + offers_.bytes();
  return out;
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
pool::mover_limits kv_pool<Tiers, Endpoint, Directory, Mover>::mover_limits() const noexcept {
  pool::mover_limits out = mover_.limits();
  if constexpr (!reads_directly) out.max_piece = end_->frame_bytes();
  return out;
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::progress() {
  if (tiers_->cache().epoch() != epoch_) begin_epoch();
  hear();
  directory_link link{this};
  directory_.progress(link);
  tiers_->progress();
  serve();
  if constexpr (reads_directly) {
    read_in_step_ = 0;
    mover_.progress(
        [this](const pool::move_ticket& ticket, pool::moved how) noexcept { on_moved(ticket, how); });
    offer_some();
  }
  for (std::uint32_t i = 0; i < requests_.size(); ++i) {
    if (requests_[i].is_live) proceed(i);
  }
  end_copies();
  republish();
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::progress(std::uint64_t wait_ns) {
  const detail::named_range range("kv_pool progress");
  hearing handler{this};
  static_cast<void>(end_->poll(deadline{detail::saturating_add(end_->now_ns(), wait_ns)}, handler));
  progress();
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
bool kv_pool<Tiers, Endpoint, Directory, Mover>::is_present(seat_id seat,
                                                            std::uint64_t nonce) const noexcept {
  if (to_index(seat) >= peers_.size()) return false;
  const detail::pool_peer& peer = peers_[to_index(seat)];
  return peer.state == pool::peer_state::present && peer.nonce == nonce;
}

// The directory

/// Writes the digests of the chunks of a chain in a span, and returns their number.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
std::uint32_t kv_pool<Tiers, Endpoint, Directory, Mover>::digests_of(
    const kv_chain& chain, std::uint64_t span,
    std::array<std::uint32_t, pool::span_chunks>& into) const noexcept {
  const std::span<const block_key> keys = chain.keys();
  const std::uint64_t first = span * pool::span_chunks;
  std::uint32_t count = 0;
  for (; count < pool::span_chunks && first + count < keys.size(); ++count)
    into[count] = detail::hint_digest(keys[static_cast<std::size_t>(first + count)]);
  return count;
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::publish(const kv_chain& chain,
                                                         std::uint64_t tokens) noexcept {
  publish(chain, tokens, true);
}

/// @param is_use  whether a request has used the chain; counts for hot spans.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::publish(const kv_chain& chain, std::uint64_t tokens,
                                                         bool is_use) noexcept {
  if (tiers_->cache().epoch() != epoch_) begin_epoch();
  if (chain.epoch() != epoch_ || chain.chunk_tokens() != likeness_.chunk_tokens) return;
  std::uint64_t chunks = tokens >= chain.tokens() ? chain.keys().size() : tokens / chain.chunk_tokens();
  if (chunks > chain.keys().size()) chunks = chain.keys().size();
  for (std::uint64_t span = 0; span * pool::span_chunks < chunks; ++span)
    publish_span(chain, span, chunks, is_use);
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::publish_span(const kv_chain& chain, std::uint64_t span,
                                                              std::uint64_t chunks, bool is_use) noexcept {
  const std::uint64_t first = span * pool::span_chunks;
  std::array<std::uint32_t, pool::span_chunks> digests{};
  std::uint64_t count = digests_of(chain, span, digests);
  if (first + count > chunks) count = chunks - first;
  const std::span<const std::uint32_t> told(digests.data(), static_cast<std::size_t>(count));
  std::array<std::uint64_t, max_layer_groups> masks{};
  for (std::size_t g = 0; g < groups_; ++g) {
    for (std::uint64_t i = 0; i < count; ++i) {
      const std::uint64_t chunk = first + i;
      if ((chunk + 1) * chain.chunk_tokens() % tiers_->groups()[g].block_tokens != 0) continue;
      const offload::answer has =
          tiers_->lookup_block(g, chain.keys()[static_cast<std::size_t>(chunk)]).first;
      if (has != offload::answer::hit && has != offload::answer::pending) continue;
      masks[g] |= std::uint64_t{1} << i;
      if constexpr (reads_directly) offer_later(g, chain.keys()[static_cast<std::size_t>(chunk)]);
    }
  }
  const std::span<const std::uint64_t> has = std::span(masks).first(groups_);
  const std::uint32_t entry = publish_blocks(chain.keys()[static_cast<std::size_t>(first)], told, has);
  if (is_use && entry != detail::span_table::none) use(entry, chain, span, count, has);
}

/// Announces which blocks of a span this node has, unless it has done so. Returns its record of them.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
std::uint32_t kv_pool<Tiers, Endpoint, Directory, Mover>::publish_blocks(
    const block_key& span, std::span<const std::uint32_t> digests,
    std::span<const std::uint64_t> masks) noexcept {
  const std::size_t count = digests.size();
  const std::uint64_t bits = count < 64 ? (std::uint64_t{1} << count) - 1 : ~std::uint64_t{0};
  std::uint32_t known = detail::span_table::none;
  published_.for_each_of(span, [&](std::uint32_t entry) {
    if (published_.at(entry).chunks < count) return;
    if (detail::span_table::common(published_.at(entry), digests) != count) return;
    bool is_same = true;
    for (std::size_t g = 0; g < groups_; ++g)
      is_same = is_same && (published_.masks(entry)[g] & bits) == masks[g];
    if (is_same) known = entry;
  });
  if (known != detail::span_table::none) return known;
  const std::uint32_t entry = published_.put(span, self(), nonce_, digests, masks);
  if (entry == detail::span_table::none) return entry;
  if (takes(keeper_of(span))) {
    post_published(entry);
    return entry;
  }
  published_.at(entry).place = pool::no_keeper;
  has_passed_over_ = has_passed_over_ || must_republish_;  // a round in progress continues
  if (!std::exchange(must_republish_, true)) republished_ = 0;
  return entry;
}

/// Corrects the directory because this node no longer has a block. It does so even if this node has forgotten
/// that it published the block: otherwise the directory would name this node in every answer.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::retract(const block_key& span, std::uint32_t group,
                                                         std::uint32_t place, const block_key& key) noexcept {
  const std::uint32_t digest = detail::hint_digest(key);
  directory_link link{this};
  directory_.retract(link, span, {.group = group, .place = place, .digest = digest},
                     pool::span_records(published_, span));
  published_.take_back(span, self(), group, place, digest);
}

/// Announces what this node holds to the nodes that now keep the spans' entries. A busy node receives the
/// rest in a later step, and delays no other node.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::republish() noexcept {
  constexpr std::uint32_t most = 64;         // entries announced in one step
  constexpr std::uint32_t most_seen = 4096;  // entries checked in one step
  if (!must_republish_) return;
  if (republished_ == 0) has_passed_over_ = false;
  std::uint32_t told = 0;
  for (std::uint32_t seen = 0; republished_ < published_.capacity() && told < most && seen < most_seen;
       ++republished_, ++seen) {
    const detail::span_entry& each = published_.at(republished_);
    const std::uint32_t keeper = keeper_of(each.span);
    if (keeper == pool::no_keeper) return;  // until the directory can be reached again
    if (each.holder == no_seat || each.place == keeper) continue;
    if (!takes(keeper)) {
      has_passed_over_ = true;
      continue;
    }
    post_published(republished_);
    ++told;
  }
  if (republished_ < published_.capacity()) return;
  must_republish_ = has_passed_over_;
  republished_ = 0;
}

// Sending words

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::post(seat_id to, detail::pool_frame kind,
                                                      const detail::pool_writer& message) noexcept {
  if (!message.is_complete()) return;  // cannot happen: the largest message has 1,200 bytes
  ++counted_.posted_messages;
  end_->post(to, frame_header{.kind = static_cast<std::uint16_t>(kind)}, message.bytes());
}

/// Returns whether a node reads the bytes sent to it. If too many bytes waited for a node, the endpoint would
/// suspect it, and none of its blocks would arrive. Questions, requests for blocks and announcements
/// therefore wait here.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
bool kv_pool<Tiers, Endpoint, Directory, Mover>::may_post(seat_id to) const noexcept {
  if constexpr (detail::reports_post_capacity<Endpoint>) {
    return end_->has_post_capacity(to);
  } else {
    return true;
  }
}

/// Posts a message that may be dropped: the receiver asks again for what it misses.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::post_or_drop(seat_id to, detail::pool_frame kind,
                                                              const detail::pool_writer& message) noexcept {
  if (may_post(to)) return post(to, kind, message);
  ++counted_.dropped_messages;
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::post_hello(seat_id to) noexcept {
  if (to == self() || to_index(to) >= peers_.size()) return;
  detail::pool_writer out;
  out.put(likeness_);
  out.put(options_.domain);
  out.put(nonce_);
  post(to, detail::pool_frame::hello, out);
  if constexpr (reads_directly) post_introduction(to);
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::post_published(std::uint32_t entry) noexcept {
  detail::span_entry& each = published_.at(entry);
  each.place = keeper_of(each.span);
  directory_link link{this};
  directory_.announce(link, each.span, {std::span(each.digests).first(each.chunks), published_.masks(entry)},
                      pool::span_records(published_, each.span));
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::post_missing(detail::pool_serving what) noexcept {
  if (!may_post(what.to) && serving_count_ < serving_.size()) {
    what.is_missing = true;
    serving_[(serving_first_ + serving_count_++) % serving_.size()] = what;
    return;
  }
  detail::pool_writer out;
  out.put(what.id);
  out.put(what.part);
  post_or_drop(what.to, detail::pool_frame::missing, out);
}

}  // namespace v0
}  // namespace llmmem
