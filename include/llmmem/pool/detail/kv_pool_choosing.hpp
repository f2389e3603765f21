/// @file
/// Bodies of kv_pool.hpp: how much of a prompt is worth fetching, and from which nodes. Only that file
/// includes this one.
#pragma once

#include <llmmem/pool/kv_pool.hpp>

namespace llmmem {
inline namespace v0 {

/// The blocks of other nodes, for `kv_tiers::choose_load_with`.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
class kv_pool<Tiers, Endpoint, Directory, Mover>::other_nodes {
 public:
  other_nodes(const kv_pool& all, const record& of, const pool::fetch_costs& costs)
      : all_(&all), of_(&of), costs_(&costs), now_(costs.inward), later_(costs.inward) {
    all.expect_open_parts(costs, now_);
  }

  [[nodiscard]] std::uint64_t wait_ns() const noexcept { return now_.wait_ns(); }
  [[nodiscard]] bool has(std::size_t group, std::uint64_t chunks) const noexcept {
    open_answers open;
    return all_->has_elsewhere(*of_, group, chunks, open);
  }
  void clear() noexcept {
    now_.clear();
    later_.clear();
  }
  void add(std::size_t group, std::uint64_t chunks) {
    now_.add(all_->sources_of(*of_, group, chunks - 1, *costs_, now_));
    later_.add(all_->sources_of(*of_, group, chunks - 1, *costs_, later_));
  }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return now_.bytes(); }
  [[nodiscard]] std::uint64_t arrival_ns(bool is_later) const noexcept {
    return is_later ? later_.arrival_ns() : now_.arrival_ns();
  }

 private:
  const kv_pool* all_;
  const record* of_;
  const pool::fetch_costs* costs_;
  detail::fetch_shares now_;    // behind the bytes that this node awaits
  detail::fetch_shares later_;  // after them
};

template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
offload::load_choice kv_pool<Tiers, Endpoint, Directory, Mover>::choose(const record& of,
                                                                        const pool::fetch_costs& costs,
                                                                        std::uint64_t upto) const {
  other_nodes others(*this, of, costs);
  offload::load_costs load = costs.load;
  const std::uint64_t wait = others.wait_ns();
  if (wait > load.pending_ns) load.pending_ns = wait;
  return tiers_->choose_load_with(*of.chain, of.came.first, chunks_upto(of, upto), load, others);
}

/// Counts the blocks that all requests still await, each at the node that sends it or will be asked.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::expect_open_parts(const pool::fetch_costs& costs,
                                                                   detail::fetch_shares& shares) const {
  for (const record& of : requests_) {
    if (!of.is_live) continue;
    for (std::size_t i = of.first_open; i < of.parts.size(); ++i) {
      const part& each = of.parts[i];
      seat_id from = no_seat;
      if (each.state == part_state::asked) from = each.holder;
      if (each.state == part_state::queued) {
        const std::uint32_t holder = choose_holder(of, each);
        if (holder == pool::max_holders) continue;
        from = of.spans[static_cast<std::size_t>(each.chunk / pool::span_chunks - of.first_span)]
                   .holders[holder]
                   .seat;
      }
      if (from == no_seat) continue;
      const std::uint64_t bytes = block_bytes(each.group);
      shares.expect(shares.source(from, costs.link_of(from, reads_from(from))),
                    bytes - (each.received < bytes ? each.received : bytes));
    }
  }
}

/// Returns the present holders of a block, in an order that differs from node to node.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
detail::block_sources kv_pool<Tiers, Endpoint, Directory, Mover>::sources_of(
    const record& of, std::size_t group, std::uint64_t chunk, const pool::fetch_costs& costs,
    detail::fetch_shares& shares) const {
  detail::block_sources out{.block_bytes = block_bytes(group)};
  const std::uint64_t span = chunk / pool::span_chunks;
  if (span < of.first_span) return out;
  const auto index = static_cast<std::size_t>(span - of.first_span);
  const detail::pool_span& in = of.spans[index];
  std::array<std::uint64_t, pool::max_holders> ranks{};
  for (std::uint32_t h = 0; h < in.holder_count; ++h) {
    const auto& [seat, nonce] = in.holders[h];
    if ((mask(of, index, h, group) >> chunk % pool::span_chunks & 1U) == 0 || !is_present(seat, nonce))
      continue;
    const std::uint64_t rank = detail::mix_pair(nonce, nonce_);
    std::uint32_t place = out.count++;
    for (; place != 0 && ranks[place - 1] > rank; --place) {
      ranks[place] = ranks[place - 1];
      out.of[place] = out.of[place - 1];
    }
    ranks[place] = rank;
    out.of[place] = shares.source(seat, costs.link_of(seat, reads_from(seat)));
  }
  return out;
}

/// Names for each block of a request the node from which `choose` takes it.
template <class Tiers, endpoint Endpoint, class Directory, class Mover>
  requires detail::pool_parts<Directory, Mover>
void kv_pool<Tiers, Endpoint, Directory, Mover>::plan_holders(record& of, const pool::fetch_costs& costs,
                                                              bool is_later) {
  detail::fetch_shares shares(costs.inward);
  std::vector<part> parts = std::exchange(of.parts, {});  // those are not yet awaited
  struct put_back {
    record* of;
    std::vector<part>* parts;
    ~put_back() { of->parts = std::move(*parts); }
  } const at_end{&of, &parts};
  expect_open_parts(costs, shares);
  if (is_later) shares.settle();
  const auto each_source = [&](auto&& f) {
    for (part& each : parts) {
      if (each.state != part_state::queued) continue;
      const detail::block_sources from = sources_of(of, each.group, each.chunk, costs, shares);
      if (from.count != 0) f(each, from);
    }
  };
  each_source([&](part&, const detail::block_sources& from) { shares.add(from); });
  each_source([&](part& each, const detail::block_sources& from) { each.planned = shares.take(from); });
}

}  // namespace v0
}  // namespace llmmem
