/// @file
/// Prompts from prefill ranks to decode ranks of another split, layer by layer. An engine would write this
/// code.
#pragma once

#include <llmmem/comm/collectives.hpp>
#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/socket_endpoint.hpp>
#include <llmmem/error.hpp>
#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/kv_split.hpp>
#include <llmmem/pool/kv_handover.hpp>
#include <llmmem/redundancy/run_epochs.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "kv_pool/board.hpp"
#include "kv_pool/command_line.hpp"
#include "kv_pool/prompts.hpp"
#include "kv_pool/split_model.hpp"

namespace kv_pool_example {

/// One rank of a role. A step of `run_epochs` is one request: if a rank dies in the middle of it, the others
/// repeat it, without the prefill ranks if one of these is missing.
class handover_rank {
 public:
  using outcome = llmmem::redundancy::job_outcome;
  using ranks_type = llmmem::communicator<llmmem::socket_endpoint>;

  handover_rank(const command_line& asked, board& shared, ranks_type& ranks, std::uint32_t seat)
      : asked_(&asked),
        shared_(&shared),
        figures_(&shared.node(seat)),
        ranks_(&ranks),
        seat_(seat),
        from_(layouts_of(asked, asked.splits->prefill, llmmem::block_order::layer_first)),
        to_(layouts_of(asked, asked.splits->decode, llmmem::block_order::block_first)),
        cache_({.blocks = 16'384 / layout().virtual_block_tokens(),
                .block_tokens = static_cast<std::uint32_t>(layout().virtual_block_tokens()),
                .max_sequences = 4,
                .max_sequence_tokens = 4096}),
        keys_(layout(), cache_.physical_blocks()),
        is_released_(figures_->starts > 1 ? 1 : 0) {}

  /// @name The functions that `run_epochs` calls
  /// @{

  /// Finds the request that the others have come to, and plans the handover if all ranks are present.
  [[nodiscard]] outcome begin() {
    if (!asked_->restarts && ranks_->seats().size() != asked_->nodes()) is_released_ = 1;
    struct standing {
      std::uint64_t next;
      std::uint64_t is_released;
    };
    std::vector<standing> all(ranks_->seats().size());
    all[to_index(ranks_->rank())] = {next_, is_released_};
    const std::span<std::byte> bytes = std::as_writable_bytes(std::span(all));
    llmmem::collective_call call{.by = soon()};
    if (!llmmem::all_gather(*ranks_, bytes,
                            llmmem::even_blocks(bytes.size(), ranks_->world(), sizeof(standing)), call))
      return outcome::failed;
    for (const standing& each : all) {
      next_ = std::max(next_, each.next);
      is_released_ = std::max(is_released_, each.is_released);
    }
    handover_.reset();
    if (ranks_->seats().size() != asked_->nodes()) return outcome::succeeded;
    std::vector<llmmem::rank_id> senders, receivers;
    for (std::uint32_t seat = 0; seat < asked_->nodes(); ++seat)
      (seat < asked_->prefill ? senders : receivers).push_back(llmmem::rank_id{seat});
    handover_.emplace(*ranks_, llmmem::paging::kv_split_plan(from_, to_), senders, receivers);
    return outcome::succeeded;
  }
  [[nodiscard]] bool is_over() const noexcept { return next_ == asked_->requests; }
  [[nodiscard]] outcome step() {
    if (is_held()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return outcome::succeeded;
    }
    const std::vector<llmmem::token_id> prompt = prompt_of(*asked_, static_cast<std::uint32_t>(next_));
    const llmmem::sequence_id sequence = cache_.create().value();
    const bool is_done = !is_prefill() ? decode(sequence, prompt) : !handover_ || prefill(sequence, prompt);
    cache_.release(sequence).value();
    return is_done ? outcome::succeeded : outcome::failed;
  }
  void commit() noexcept {
    if (is_held()) return;
    if (!is_prefill() || handover_) ++figures_->requests;
    const auto request = static_cast<std::uint32_t>(next_++);
    if (seat_ == asked_->prefill) shared_->set_answered(request);
  }
  void drop() noexcept {}
  /// @}

 private:
  /// The same on all ranks, because only `begin` and `commit` change it.
  [[nodiscard]] bool is_held() const noexcept { return next_ >= asked_->held_from() && is_released_ == 0; }
  [[nodiscard]] bool is_prefill() const noexcept { return seat_ < asked_->prefill; }
  [[nodiscard]] const llmmem::kv_layout& layout() const noexcept {
    return is_prefill() ? from_[seat_] : to_[seat_ - asked_->prefill];
  }
  [[nodiscard]] llmmem::deadline soon() const { return ranks_->after(20'000'000'000); }
  [[nodiscard]] llmmem::kv_handover_part part(std::uint32_t layer, std::uint64_t tokens) const noexcept {
    return {.request = next_, .layer = layer, .range = {0, tokens}};
  }
  void count(const llmmem::kv_handover_part& part) noexcept {
    ++figures_->layers;
    const auto& plan = handover_->plan();
    for (const auto& share : is_prefill() ? plan.shares_from(seat_) : plan.shares_to(seat_ - asked_->prefill))
      figures_->bytes += plan.bytes(share, part.range);
  }

  /// Computes what the cache lacks, and sends each layer when it is done.
  [[nodiscard]] bool prefill(llmmem::sequence_id sequence, std::span<const llmmem::token_id> prompt) {
    const auto digests = digests_of(prompt);
    const std::uint64_t matched = take_known(sequence, prompt);
    const auto blocks = cache_.blocks(sequence);
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
      keys_.compute(layer, {matched, prompt.size()}, digests, blocks);
      if (!handover_->send(part(layer, prompt.size()), keys_.memory(), blocks, soon())) return false;
      count(part(layer, prompt.size()));
    }
    cache_.commit(sequence).value();
    return true;
  }

  /// Receives the prompt, or computes it if a prefill rank is missing, and generates tokens.
  [[nodiscard]] bool decode(llmmem::sequence_id sequence, std::vector<llmmem::token_id> tokens) {
    const std::uint64_t prompt = tokens.size();
    for (std::uint32_t i = 0; i < answer_tokens; ++i)
      tokens.push_back(static_cast<llmmem::token_id>(next_ + i));
    const auto digests = digests_of(tokens);
    const std::span<const llmmem::token_id> all(tokens);
    std::uint64_t have = 0;
    if (handover_) {
      cache_.append(sequence, all.first(prompt)).value();  // cached by nobody before `commit`
      if (!receive(sequence, prompt, digests)) return false;
      have = prompt;
      cache_.append(sequence, all.subspan(prompt)).value();
      figures_->computed += answer_tokens;
    } else {
      have = take_known(sequence, all);
    }
    for (std::uint32_t layer = 0; layer < layers; ++layer)
      keys_.compute(layer, {have, all.size()}, digests, cache_.blocks(sequence));
    cache_.commit(sequence).value();
    return true;
  }
  [[nodiscard]] bool receive(llmmem::sequence_id sequence, std::uint64_t tokens,
                             std::span<const std::uint64_t> digests) {
    const auto blocks = cache_.blocks(sequence);
    std::vector<bool> is_wrong(blocks.size());
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
      if (!handover_->receive(part(layer, tokens), keys_.memory(), blocks, soon())) return false;
      keys_.check(layer, {0, tokens}, digests, blocks, is_wrong);  // and attends with it
      count(part(layer, tokens));
    }
    figures_->verified += is_wrong.size();
    figures_->wrong += static_cast<std::uint64_t>(std::ranges::count(is_wrong, true));
    return true;
  }
  /// Matches the known tokens and appends the others. @return how many are known
  [[nodiscard]] std::uint64_t take_known(llmmem::sequence_id sequence,
                                         std::span<const llmmem::token_id> tokens) {
    const std::uint64_t matched = cache_.match(sequence, tokens.first(tokens.size() - 1)).value().tokens;
    cache_.append(sequence, tokens.subspan(matched)).value();
    figures_->matched += matched;
    figures_->computed += tokens.size() - matched;
    return matched;
  }

  const command_line* asked_;
  board* shared_;
  node_figures* figures_;
  ranks_type* ranks_;
  std::uint32_t seat_;
  std::vector<llmmem::kv_layout> from_;
  std::vector<llmmem::kv_layout> to_;
  llmmem::paged_allocator<> cache_;
  rank_keys keys_;
  std::uint64_t is_released_;  // 1: the process was killed, or replaced, as the options say
  std::uint64_t next_ = 0;     // the request of the next step
  std::optional<llmmem::kv_handover<ranks_type>> handover_{};
};

/// The life of one process.
inline void hand_over(const command_line& asked, board& shared, llmmem::socket_endpoint& end) {
  llmmem::communicator ranks(end);
  for (int tries = 60;; --tries) {
    const auto joined = ranks.join(ranks.after(500'000'000));
    if (joined) break;
    if (shared.is_over()) return;  // a process that takes a seat as the last answer is given
    if (tries == 0) joined.value();
  }
  handover_rank rank(asked, shared, ranks, to_index(end.self()));
  const auto ended = llmmem::run_epochs(ranks, rank, {.patience_ns = 30'000'000'000});
  ended.value();
}

}  // namespace kv_pool_example
