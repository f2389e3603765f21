/// @file
/// Bodies of paged_allocator.hpp: growing many sequences at once, and calling the engine when blocks run
/// short. Only paged_allocator_body.hpp includes it.
#pragma once

#include <llmmem/paging/errors.hpp>
#include <llmmem/paging/paged_allocator.hpp>

namespace llmmem {
inline namespace v0 {

template <class Traits>
result<void> paged_allocator<Traits>::append_batch(std::span<const paging::growth> batch,
                                                   std::span<append_result> out,
                                                   std::uint64_t leave) noexcept {
  if (batch.size() != out.size()) return refusal(errc::size_mismatch, 0, batch.size(), out.size());
  for (;;) {
    const auto needed = count_batch(batch);
    if (!needed) return needed.error();
    const std::uint64_t available = pool_.available();
    if (leave <= available && *needed <= available - leave) break;
    const std::uint64_t wanted = leave > max_bytes ? max_bytes : *needed + leave;
    if (collect() != 0 || relieve(wanted)) continue;
    if (const auto again = count_batch(batch); again && *again < *needed) continue;  // fewer copies now
    return refusal(errc::out_of_blocks, 0, wanted, pool_.available());
  }
  const std::uint64_t before = pool_.available();
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const paging::growth& each = batch[i];
    const std::uint32_t slot = each.sequence.slot;
    const std::uint64_t count = each.tokens.size() + each.unknown_tokens;
    const auto grown = grow(slot, count, needed_for(slot, count));
    if (!grown) return grown.error();  // only under a policy that breaks its contract
    out[i] = *grown;
    if (records_[slot].tokens_known) fill(slot, grown->first, each.tokens);
    if (each.unknown_tokens != 0) records_[slot].lose_tokens(grown->first + each.tokens.size());
  }
  warn_if_low(before);  // last, because the callback may change everything
  return {};
}

/// Counts the blocks that the whole `batch` takes. Of k sequences that share their last block, all except the
/// last holder copy it. So the count drops references as growth would, then restores them.
template <class Traits>
result<std::uint64_t> paged_allocator<Traits>::count_batch(std::span<const paging::growth> batch) noexcept {
  ++batches_;
  std::uint64_t needed = 0;
  failure refused{};
  std::size_t counted = 0;
  for (; counted < batch.size(); ++counted) {
    const paging::growth& each = batch[counted];
    const auto alive = check(each.sequence);
    if (!alive) {
      refused = alive.error();
      break;
    }
    record& sequence = at(each.sequence);
    const std::uint64_t count =
        each.unknown_tokens > max_bytes ? max_bytes : each.tokens.size() + each.unknown_tokens;
    const auto fits = check_length(each.sequence.slot, count);
    if (sequence.batch == batches_) {
      refused = refusal(errc::listed_twice, each.sequence.slot, counted, batch.size());
    } else if (!fits) {
      refused = fits.error();
    }
    if (refused.code != errc::ok) break;
    sequence.batch = batches_;
    const need required = needed_for(each.sequence.slot, count);
    needed += required.blocks;
    if (required.copies) static_cast<void>(pool_.release(row(each.sequence.slot)[sequence.blocks - 1]));
    sequence.copies = required.copies;
  }
  for (std::size_t i = 0; i < counted; ++i) {
    record& sequence = at(batch[i].sequence);
    if (sequence.copies) static_cast<void>(pool_.share(row(batch[i].sequence.slot)[sequence.blocks - 1]));
  }
  if (refused.code != errc::ok) return refused;
  return needed;
}

/// Whether the callback made blocks available.
template <class Traits>
bool paged_allocator<Traits>::relieve(std::uint64_t needed) noexcept {
  if (pressure_.call == nullptr) return false;
  const std::uint64_t before = pool_.available();
  const bool again = pressure_.call(pressure_.context, {.needed = needed, .available = before});
  return again && pool_.available() > before;
}

template <class Traits>
void paged_allocator<Traits>::warn() noexcept {
  if (pressure_.call == nullptr) return;
  static_cast<void>(pressure_.call(pressure_.context, {.needed = 0, .available = pool_.available()}));
}

template <class Traits>
std::uint64_t paged_allocator<Traits>::cached_tokens(std::span<const token_id> tokens,
                                                     const prefix_context& context) const noexcept {
  return cost(tokens, context).cached_tokens;
}

template <class Traits>
prompt_cost paged_allocator<Traits>::cost(std::span<const token_id> tokens,
                                          const prefix_context& context) const noexcept {
  prompt_cost out;
  walk(tokens, paging::root_key(hash_, context, epoch_), context, [&](block_id block) noexcept {
    ++out.cached_blocks;
    if (pool_.record(block).is_idle()) ++out.revived_blocks;
    return true;
  });
  out.cached_tokens = out.cached_blocks * block_tokens_;
  out.new_blocks = detail::blocks_for(tokens.size() - out.cached_tokens, block_tokens_);
  return out;
}

template <class Traits>
std::uint64_t paged_allocator<Traits>::expect(std::span<const token_id> tokens, const prefix_context& context,
                                              std::uint64_t next_use) noexcept {
  std::uint64_t cached = 0;
  walk(tokens, paging::root_key(hash_, context, epoch_), context, [&](block_id block) noexcept {
    pool_.expect(block, next_use);
    cached += block_tokens_;
    return true;
  });
  return cached;
}

template <class Traits>
std::uint64_t paged_allocator<Traits>::expect(const keyed_blocks& prompt, const prefix_context& context,
                                              std::uint64_t next_use) noexcept {
  std::uint64_t tokens = 0;
  block_key before{};
  for (const block_key& key : in_chain(prompt, context).keys) {
    const std::uint64_t part = detail::lesser(prompt.tokens - tokens, block_tokens_);
    const block_id found = index_.block_of(key);
    if (found == null_block || index_.tokens(found) != part || !verification_.holds_key(found, context) ||
        !followers_.comes_after(found, before)) {
      break;
    }
    before = key;
    pool_.expect(found, next_use);
    tokens += part;
  }
  return tokens;
}

}  // namespace v0
}  // namespace llmmem
