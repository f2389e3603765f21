/// @file
/// Bodies of kv_pool.hpp: requests for blocks of other nodes. Only that file includes this one.
#pragma once

#include <llmmem/comm/errors.hpp>
#include <llmmem/paging/errors.hpp>
#include <llmmem/paging/outside_keys.hpp>
#include <llmmem/pool/kv_pool.hpp>

namespace llmmem {
inline namespace v0 {

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
result<typename kv_pool<Tiers, Endpoint, Directory, Mover>::request>
kv_pool<Tiers, Endpoint, Directory, Mover>::ask(const kv_chain& chain, std::uint64_t first) {
  return ask(chain, first, options_.patience_ns);
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
result<typename kv_pool<Tiers, Endpoint, Directory, Mover>::request>
kv_pool<Tiers, Endpoint, Directory, Mover>::ask(const kv_chain& chain, std::uint64_t first,
                                                std::uint64_t patience_ns) {
  const std::uint64_t epoch = tiers_->cache().epoch();
  if (chain.epoch() != epoch) {
    return failure{
        .code = errc::epoch_differs, .wanted = chain.epoch(), .found = epoch, .where = options_.name};
  }
  if (epoch != epoch_) begin_epoch();
  std::uint32_t slot = 0;
  while (slot < options_.max_requests && requests_[slot].is_live)
    ++slot;
  if (slot == options_.max_requests) {
    return failure{.code = errc::table_full,
                   .wanted = std::uint64_t{options_.max_requests} + 1,
                   .found = options_.max_requests,
                   .where = options_.name};
  }
  record& made = requests_[slot];
  const std::uint64_t now = end_->now_ns();
  const std::uint64_t chunks = chain.keys().size();
  made.first_span = first / chain.chunk_tokens() / pool::span_chunks;
  const std::uint64_t spans = (chunks + pool::span_chunks - 1) / pool::span_chunks;
  const std::size_t count =
      spans > made.first_span ? static_cast<std::size_t>(spans - made.first_span) : std::size_t{0};
  made.parts.clear();
  made.spans.assign(count, {});
  made.masks.assign(count * pool::max_holders * groups_, 0);
  made.chain = &chain;
  made.chunks = chunks;
  made.deadline = patience_ns > ~std::uint64_t{0} - now ? ~std::uint64_t{0} : now + patience_ns;
  made.is_late = false;
  made.first_open = 0;
  made.came = {.first = first, .tokens = first};
  made.asked_spans = 0;
  made.ask_again = ~std::uint64_t{0};
  made.is_live = true;
  ask_spans(slot);
  return request(*this, slot);
}

/// Sends the questions of a request to the receivers that take them; the next `progress` sends the rest. A
/// busy receiver delays no question to another node.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::ask_spans(std::uint32_t slot) noexcept {
  record& of = requests_[slot];
  for (std::size_t i = of.asked_spans; i < of.spans.size(); ++i) {
    const bool is_asked = of.spans[i].is_asked() || ask_span(slot, i);
    if (is_asked && i == of.asked_spans) ++of.asked_spans;
  }
}

/// Returns false, and sends nothing, while the receiver is busy.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
bool kv_pool<Tiers, Endpoint, Directory, Mover>::ask_span(std::uint32_t slot, std::size_t index) noexcept {
  record& of = requests_[slot];
  detail::pool_span& span = of.spans[index];
  const std::uint64_t which = of.first_span + index;
  const block_key& key = of.chain->keys()[static_cast<std::size_t>(which * pool::span_chunks)];
  const std::uint32_t keeper = keeper_of(key);
  if (keeper != pool::no_keeper && !takes(keeper)) return false;
  ++counted_.asked_spans;
  span.asked = keeper;
  post_question(slot, index);
  return true;
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::post_question(std::uint32_t slot,
                                                               std::size_t index) noexcept {
  record& of = requests_[slot];
  detail::pool_span& span = of.spans[index];
  const std::uint64_t which = of.first_span + index;
  std::array<std::uint32_t, pool::span_chunks> digests{};
  const std::uint32_t count = digests_of(*of.chain, which, digests);
  directory_link link{this};
  const pool::asked out =
      directory_.ask(link, {.id = id_of(slot, of),
                            .index = static_cast<std::uint32_t>(index),
                            .span = of.chain->keys()[static_cast<std::size_t>(which * pool::span_chunks)],
                            .digests = std::span(digests).first(count)});
  if (out == pool::asked::unreachable) span.is_answered = span.is_unknown = true;
  if (out == pool::asked::pending && directory_type::keepers_are_seats)
    span.ask_again = time_to_ask_again(of, options_.ask_again_ns, span.asked_times++);
}

/// When something that is asked now is asked again, if nothing comes. @param times  that it was asked before.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
std::uint64_t kv_pool<Tiers, Endpoint, Directory, Mover>::time_to_ask_again(record& of,
                                                                            std::uint64_t first_ns,
                                                                            std::uint32_t times) noexcept {
  const std::uint64_t now = end_->now_ns();
  constexpr std::uint64_t never = ~std::uint64_t{0};
  const std::uint32_t doublings = times < 6 ? times : 6;
  const std::uint64_t wait = first_ns > never >> doublings ? never : first_ns << doublings;
  const std::uint64_t at = wait > never - now ? never : now + wait;
  if (at < of.ask_again) of.ask_again = at;
  return at;
}

/// A node whose queue of messages to this one was half full has dropped its answer; with unlimited patience
/// this one would wait for it without end. Nothing is asked again of a node that does not read.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::ask_again(std::uint32_t slot) noexcept {
  record& of = requests_[slot];
  const std::uint64_t now = end_->now_ns();
  if (now < of.ask_again) return;
  of.ask_again = ~std::uint64_t{0};
  const auto waits_until = [&of](std::uint64_t at) {
    if (at < of.ask_again) of.ask_again = at;
  };
  for (std::size_t i = 0; i < of.spans.size(); ++i) {
    detail::pool_span& span = of.spans[i];
    if (span.is_answered || span.asked == pool::no_keeper) continue;
    if (now >= span.ask_again && takes(span.asked)) {
      ++counted_.asked_again;
      if (span.asked_times == 0xFF) --span.asked_times;
      post_question(slot, i);
    } else {
      waits_until(span.ask_again);
    }
  }
  for (std::size_t i = of.first_open; i < of.parts.size(); ++i) {
    part& each = of.parts[i];
    if (each.state != part_state::asked || each.is_receiving) continue;
    if (each.is_reading && now >= each.ask_again) {  // the next step asks its owner for it
      stop_reading(of, each);
      fail(of, each, errc::ok);
      continue;
    }
    if (now < each.ask_again || !may_post(each.holder)) {
      waits_until(each.ask_again);
      continue;
    }
    ++counted_.asked_again;
    if (each.asked_times == 0xFF) --each.asked_times;
    each.ask_again = time_to_ask_again(of, wait_for_block(), each.asked_times++);
    detail::pool_writer out;
    out.put(id_of(slot, of));
    out.put(of.chain->keys()[std::size_t{each.chunk / pool::span_chunks} * pool::span_chunks]);
    put_wanted(out, of, i);
    post(each.holder, detail::pool_frame::get_again, out);
  }
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::put_wanted(detail::pool_writer& out, const record& of,
                                                            std::size_t index) noexcept {
  const part& each = of.parts[index];
  out.put(static_cast<std::uint32_t>(index));
  out.put(each.group);
  out.put(static_cast<std::uint32_t>(each.chunk % pool::span_chunks));
  out.put(key_of(of, each));
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
offload::kv_lookup_result kv_pool<Tiers, Endpoint, Directory, Mover>::where(
    const record& of, std::uint64_t upto, open_answers& open) const noexcept {
  open = {};
  return tiers_->lookup_with(*of.chain, of.came.first, chunks_upto(of, upto),
                             [&](std::size_t group, std::uint64_t chunks, offload::answer here) noexcept {
                               return here == offload::answer::miss && has_elsewhere(of, group, chunks, open);
                             });
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
std::uint64_t kv_pool<Tiers, Endpoint, Directory, Mover>::chunks_upto(const record& of,
                                                                      std::uint64_t upto) const noexcept {
  const std::uint64_t limit = upto >= of.chain->tokens() ? of.chunks : upto / of.chain->chunk_tokens();
  return limit < of.chunks ? limit : of.chunks;
}

/// Returns whether another node has the block of a group that ends with the chain's first `chunks` chunks.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
bool kv_pool<Tiers, Endpoint, Directory, Mover>::has_elsewhere(const record& of, std::size_t group,
                                                               std::uint64_t chunks,
                                                               open_answers& open) const noexcept {
  const std::uint64_t span = (chunks - 1) / pool::span_chunks;
  if (span < of.first_span) return false;
  const auto index = static_cast<std::size_t>(span - of.first_span);
  const detail::pool_span& in = of.spans[index];
  open.is_pending = open.is_pending || !in.is_answered;
  open.is_unknown = open.is_unknown || in.is_unknown;
  const std::uint64_t bit = std::uint64_t{1} << (chunks - 1) % pool::span_chunks;
  for (std::uint32_t h = 0; h < in.holder_count; ++h) {
    if ((mask(of, index, h, group) & bit) != 0 && is_present(in.holders[h].seat, in.holders[h].nonce))
      return true;
  }
  return false;
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::begin_fetch(std::uint32_t slot, std::uint64_t upto,
                                                             const pool::fetch_costs* costs, bool is_later) {
  record& of = requests_[slot];
  if (!of.parts.empty()) return;
  open_answers open;
  const std::uint64_t known = where(of, costs == nullptr ? upto : unlimited, open).tokens;
  const std::uint64_t wanted = costs == nullptr ? known : upto;
  if (known > wanted) of.came.costly_tokens = known - wanted;
  if (wanted <= of.came.first) return;
  const std::uint64_t step = of.chain->chunk_tokens();
  const std::uint64_t length = (wanted + step - 1) / step * step;
  std::size_t most = 0;
  for (std::size_t g = 0; g < groups_; ++g)
    detail::for_each_needed(tiers_->groups()[g], length, [&](std::uint64_t) { ++most; });
  of.parts.reserve(most);
  for (std::size_t g = 0; g < groups_; ++g) {
    const std::uint64_t tokens = tiers_->groups()[g].block_tokens;
    detail::for_each_needed(tiers_->groups()[g], length, [&](std::uint64_t index) {
      const std::uint64_t end = (index + 1) * tokens;
      if (end <= of.came.first) return;
      part each{.group = static_cast<std::uint32_t>(g), .chunk = static_cast<std::uint32_t>(end / step - 1)};
      const auto found = tiers_->lookup_block(g, key_of(of, each));
      if (found.first == offload::answer::hit) {
        if (found.second != 0) return;  // a load brings it from this node's lower tiers
        if (const auto held = tiers_->hold(g, key_of(of, each))) {
          each.block = *held;
          each.state = part_state::arrived;
        }
      } else if (found.first == offload::answer::pending) {
        each.state = part_state::nearby;
      }
      of.parts.push_back(each);
    });
  }
  if (costs != nullptr) plan_holders(of, *costs, is_later);
  proceed(slot);
}

/// Returns the holder to ask next for a block: the planned one, then one whose memory this node reads, then
/// the one from which it awaits the fewest blocks, then one that has sent damaged bytes, and a busy one last.
/// `max_holders`: none is left.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
std::uint32_t kv_pool<Tiers, Endpoint, Directory, Mover>::choose_holder(const record& of,
                                                                        const part& each) const noexcept {
  const std::uint64_t span = each.chunk / pool::span_chunks;
  std::uint32_t best = pool::max_holders;
  if (span < of.first_span) return best;
  const auto index = static_cast<std::size_t>(span - of.first_span);
  const detail::pool_span& in = of.spans[index];
  std::uint64_t least = ~std::uint64_t{0};
  for (std::uint32_t h = 0; h < in.holder_count; ++h) {
    if ((each.tried >> h & 1U) != 0 || !is_present(in.holders[h].seat, in.holders[h].nonce)) continue;
    if ((mask(of, index, h, each.group) >> each.chunk % pool::span_chunks & 1U) == 0) continue;
    // Ties are broken in an order that differs from node to node.
    const std::uint64_t rank = detail::mix_pair(in.holders[h].nonce, nonce_) >> 32;
    const seat_id seat = in.holders[h].seat;
    const bool is_read = may_read(seat, each, h);
    std::uint64_t busy = is_read || may_post(seat) ? 0 : std::uint64_t{1} << 63;
    if (reads_directly && !is_read) busy |= std::uint64_t{1} << 61;
    const bool was_damaged = (each.damaged_by >> h & 1U) != 0;
    if (was_damaged) busy |= std::uint64_t{1} << 62;
    if (seat == each.planned && !was_damaged && (is_read || may_post(seat))) return h;
    const std::uint64_t cost =
        busy | std::uint64_t{peers_[to_index(in.holders[h].seat)].outstanding} << 32 | rank;
    if (cost >= least) continue;
    least = cost;
    best = h;
  }
  return best;
}

/// Takes a slot of the first tier for a block. Returns false if there is none to take; the part's state is
/// then the outcome.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
bool kv_pool<Tiers, Endpoint, Directory, Mover>::take_slot(record& of, part& each) noexcept {
  const block_key& key = key_of(of, each);
  const std::uint64_t parent =
      each.chunk == 0 ? of.before : paging::key_digest(of.chain->keys()[each.chunk - 1]);
  if (const auto slot = tiers_->begin_arrival(each.group, key, parent)) {
    each.block = *slot;
    each.received = 0;
    each.is_broken = false;
    return true;
  }
  each.state = part_state::nearby;
  settle_nearby(of, each);
  if (each.state == part_state::queued) each.state = part_state::no_slot;
  return false;
}

/// A block that another request or a load brings, or brought. A load that waits for its caller keeps it
/// `pending` for long: what is in the first tier is here all the same, and lower tiers' is a load's to bring.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::settle_nearby(record& of, part& each) noexcept {
  if (const auto held = tiers_->hold(each.group, key_of(of, each))) {
    each.block = *held;
    each.state = part_state::arrived;
    return;
  }
  const auto found = tiers_->lookup_block(each.group, key_of(of, each));
  const bool is_here = found.first == offload::answer::hit || found.first == offload::answer::pending;
  if (is_here && found.second == 0) return;  // it is on its way
  each.state = is_here ? part_state::arrived : part_state::queued;
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::proceed(std::uint32_t slot) noexcept {
  record& of = requests_[slot];
  // Also for a request that begins to fetch after its deadline.
  if (end_->now_ns() >= of.deadline) give_up_late(of);
  if (!of.is_late) {
    ask_spans(slot);
    ask_again(slot);
  }
  detail::pool_writer out;
  seat_id to = no_seat;
  std::uint64_t span = 0;
  const auto flush = [&] {
    if (to != no_seat) post(to, detail::pool_frame::get, out);
    to = no_seat;
  };
  constexpr std::size_t entry_bytes = 3 * sizeof(std::uint32_t) + sizeof(block_key);
  const auto ask = [&](std::size_t i, std::uint32_t holder) {
    part& each = of.parts[i];
    const std::uint64_t in = each.chunk / pool::span_chunks;
    each.tried |= static_cast<std::uint8_t>(1U << holder);
    if (to != each.holder || span != in || out.left() < entry_bytes) {
      flush();
      to = each.holder;
      span = in;
      out = {};
      out.put(id_of(slot, of));
      out.put(of.chain->keys()[static_cast<std::size_t>(in * pool::span_chunks)]);
    }
    each.asked_times = 1;
    each.ask_again = time_to_ask_again(of, wait_for_block(), 0);
    put_wanted(out, of, i);
  };
  // One block at first, and more together while the mover copies each at once. A mover that may be busy would
  // take none of the blocks for which slots were already found.
  read_batch reads;
  std::size_t reads_at_once = 1;
  const auto read_now = [&] {
    read(of, reads);
    reads_at_once = read_batch::most;
    for (std::size_t k = 0; k < reads.count; ++k) {
      part& each = of.parts[reads.parts[k]];
      const pool::moved how = reads.outcomes[k];
      if (how == pool::moved::here) continue;
      reads_at_once = 1;
      if (how == pool::moved::begun) continue;
      if (how == pool::moved::busy || !may_post(each.holder)) {
        fail(of, each, errc::ok);
      } else {
        ask(reads.parts[k], reads.holders[k]);
      }
    }
    reads.count = 0;
  };
  while (of.first_open < of.parts.size() && is_over(of.parts[of.first_open]))
    ++of.first_open;
  // A copy leaves half of the gets to the engine, because its orderer decides how long it takes.
  const bool is_copy = slot >= options_.max_requests;
  const std::uint32_t most = is_copy ? options_.max_gets - options_.max_gets / 2 : options_.max_gets;
  for (std::size_t i = of.first_open; i < of.parts.size(); ++i) {
    if (in_flight_ >= most && reads.count != 0) read_now();
    if (in_flight_ >= most) break;
    part& each = of.parts[i];
    if (each.state == part_state::nearby) settle_nearby(of, each);
    if (each.state != part_state::queued) continue;
    const std::uint32_t holder = choose_holder(of, each);
    if (holder == pool::max_holders) {
      each.state = part_state::failed;
      continue;
    }
    const std::uint64_t in = each.chunk / pool::span_chunks;
    const seat_id from = of.spans[static_cast<std::size_t>(in - of.first_span)].holders[holder].seat;
    const bool is_read = may_read(from, each, holder);
    if (is_read ? read_in_step_ >= options_.serve_bytes : !may_post(from)) continue;
    if (!take_slot(of, each)) continue;
    each.holder = from;
    each.state = part_state::asked;
    ++in_flight_;
    ++peers_[to_index(from)].outstanding;
    if (!is_read) {
      ask(i, holder);
      continue;
    }
    read_in_step_ += block_bytes(each.group);
    reads.parts[reads.count] = i;
    reads.holders[reads.count++] = holder;
    if (reads.count == reads_at_once) read_now();
  }
  read_now();
  flush();
}

/// The node that was asked will not send the block; another node may have it.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::fail(record& of, part& each, error_code why) noexcept {
  --in_flight_;
  --peers_[to_index(each.holder)].outstanding;
  tiers_->end_arrival(each.block, false);
  each.block = {};
  each.state = part_state::queued;
  if (why == errc::ok || of.came.why.code != errc::ok) return;
  of.came.why = {.code = why, .index = to_index(each.holder), .where = options_.name};
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::give_up_late(record& of) noexcept {
  of.is_late = true;
  for (std::size_t i = of.first_open; i < of.parts.size(); ++i) {
    part& each = of.parts[i];
    if (is_over(each)) continue;
    if (each.state == part_state::asked) {
      // The transport must drop the bytes in flight before the slot has another use.
      if (std::exchange(each.is_receiving, false)) end_->withdraw(each.holder);
      stop_reading(of, each);
      fail(of, each, errc::ok);
    }
    each.state = part_state::late;
  }
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::let_go(part& each) noexcept {
  if (each.state == part_state::arrived && each.block.slot != no_slot) tiers_->release(each.block);
  each.block = {};
}

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
pool::fetch_result kv_pool<Tiers, Endpoint, Directory, Mover>::finish(std::uint32_t slot) noexcept {
  record& of = requests_[slot];
  give_up_late(of);
  pool::fetch_result out = of.came;
  if (of.chain->epoch() == tiers_->cache().epoch()) {
    // A load that was prepared has taken some: they are its, and `pending` for others.
    const auto is_loading = [](std::size_t, std::uint64_t, offload::answer here) noexcept {
      return here == offload::answer::pending;
    };
    out.tokens = tiers_->lookup_with(*of.chain, out.first, of.chain->keys().size(), is_loading).tokens;
  }
  for (part& each : of.parts) {
    out.blocks += each.is_fetched ? 1U : 0U;
    out.failed_blocks += each.state == part_state::failed ? 1U : 0U;
    out.late_blocks += each.state == part_state::late ? 1U : 0U;
    out.without_slot += each.state == part_state::no_slot ? 1U : 0U;
  }
  if (out.blocks != 0) publish(*of.chain, out.tokens, false);
  for (part& each : of.parts)
    let_go(each);
  of.is_live = false;
  ++of.generation;
  return out;
}

/// Receives the next message, or waits a moment for this node's own transfers.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::wait_once(const record& of) {
  constexpr std::uint64_t moment = 100'000;
  const std::uint64_t now = end_->now_ns();
  progress(of.deadline > now && of.deadline - now < moment ? of.deadline - now : moment);
}

}  // namespace v0
}  // namespace llmmem
