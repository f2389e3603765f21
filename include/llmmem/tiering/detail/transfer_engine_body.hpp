/// @file
/// Transfers of a `tiered_buffer`: setup of the edges, counters, and the audit of the accounts.
#pragma once

#include <llmmem/tiering/detail/transfer_engine.hpp>

#include <array>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

template <class Traits, class... Tiers>
transfer_engine<Traits, Tiers...>::transfer_engine(table_type& chunks, stack_type& stack, keys_type& keys,
                                                   clock_type clock, const tiered_options& options)
    : chunks_(chunks),
      stack_(stack),
      keys_(keys),
      meter_(clock),
      clock_(clock),
      edges_([&]<std::size_t... Index>(std::index_sequence<Index...>) {
        using setups = typename edges::setup;
        return setups(typename edges::template edge<Index>::setup{
            stack_.space(nth<Index>), stack_.space(nth<Index + 1>), options.max_transfers,
            options.bounce_bytes, options.bounce_slot_bytes,
            options.name + ": ring beneath tier " + std::to_string(Index), options.metadata}...);
      }(std::make_index_sequence<last>{})),
      transfers_(options.max_transfers, options.metadata) {}

template <class Traits, class... Tiers>
void transfer_engine<Traits, Tiers...>::add_to(tiered_stats<tiers>& now) const noexcept {
  now.moved = meter_.stats();
  now.background_failures = background_failures_;
  now.metadata_bytes += transfers_.bytes() + keys_.metadata_bytes();
  for_each_index<last>([&](auto index) {
    now.bounce_bytes += std::get<index.value>(edges_).bounce_bytes();
    now.metadata_bytes += std::get<index.value>(edges_).metadata_bytes();
  });
}

template <class Traits, class... Tiers>
void transfer_engine<Traits, Tiers...>::audit(std::vector<std::string>& found) const {
  const std::string name = chunks_.where();
  std::array<std::uint64_t, tiers> leaving{};
  std::uint32_t under_way = 0;
  for (std::uint32_t slot = 0; slot < chunks_.slots(); ++slot) {
    if (!chunks_.is_live(slot)) continue;
    const record_type& c = chunks_[slot];
    const auto say = [&](const std::string& what) {
      found.push_back(name + ": chunk " + std::to_string(c.name) + " " + what);
    };
    const bool moves = c.transfer != no_index;
    const tier_transfer t = moves ? transfers_[c.transfer] : tier_transfer{};
    if (moves) {
      ++under_way;
      if (t.chunk != slot) say("has the transfer of another");
      if (t.then_drops) leaving[t.edge] += c.copies[t.edge].granted;
    }
    for (std::size_t i = 0; i < tiers; ++i) {
      const tier_copy& held = c.copies[i];
      const std::string here = "in tier " + std::to_string(i);
      std::uint32_t users = i == 0 ? c.leases : 0;
      if (moves) users += (t.edge + 1 == i) || (t.stores && t.edge == i) ? 1U : 0U;
      if (held.pins != users) {
        say(here + " is pinned " + std::to_string(held.pins) + " times, by " + std::to_string(users));
      }
      if (held.at == residence::arriving && !moves) say(here + " awaits nothing");
    }
  }
  if (under_way + transfers_.free_count() != transfers_.capacity()) {
    found.push_back(name + ": " + std::to_string(under_way) + " transfers under way and " +
                    std::to_string(transfers_.free_count()) + " free are not " +
                    std::to_string(transfers_.capacity()));
  }
  for (std::size_t i = 0; i < tiers; ++i) {
    if (stack_.leaving(i) != leaving[i]) {
      found.push_back(name + ": " + std::to_string(leaving[i]) + " bytes leave tier " + std::to_string(i) +
                      ", " + std::to_string(stack_.leaving(i)) + " are counted");
    }
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
