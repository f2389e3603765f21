/// @file
/// A `paged_allocator` and the memory behind its blocks, driven by choices from anywhere: a seed, a fuzzer's
/// bytes.
#pragma once

#include <llmmem/eviction/any.hpp>
#include <llmmem/paged_allocator.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "support/random.hpp"
#include "support/world.hpp"

namespace llmmem_tests {

/// The contents that the allocator says are cached, as they were when it began to say so.
struct cached_contents {
  std::map<llmmem::block_id, std::vector<std::uint64_t>> blocks;
  const std::vector<std::uint64_t>* memory = nullptr;
  std::uint32_t block_tokens = 0;
};

struct content_recorder {
  cached_contents* contents;
  void on_cached(const llmmem::stored_block& stored) noexcept {
    const llmmem::block_id block = stored.block;
    const auto first = contents->memory->begin() +
                       static_cast<std::ptrdiff_t>(llmmem::to_index(block)) * contents->block_tokens;
    must(contents->blocks.emplace(block, std::vector(first, first + contents->block_tokens)).second);
  }
  void on_dropped(llmmem::block_id block, const llmmem::block_key&) noexcept {
    must(contents->blocks.erase(block) == 1);
  }
  void on_cleared(std::uint64_t) noexcept { contents->blocks.clear(); }
  void on_moved(llmmem::block_id from, llmmem::block_id to) noexcept {
    auto moved = contents->blocks.extract(from);
    if (moved.empty()) return;
    moved.key() = to;
    must(contents->blocks.insert(std::move(moved)).inserted);
  }
};

struct world_traits : llmmem::paged_traits {
  using eviction = llmmem::any_eviction;
  using observer = content_recorder;
};
struct weak_world_traits : world_traits {
  using hash = weak_hash;
};
struct trusting_world_traits : world_traits {
  using verification = llmmem::trust_hash;
};
/// Beginnings of blocks are shared too, by copy or taken over; ids ascend; not everything is cached.
struct copying_world_traits : world_traits {
  using partial = llmmem::copy_partial_blocks;
  using free_list = llmmem::ascending_free_list;
};
struct stealing_world_traits : world_traits {
  using partial = llmmem::steal_partial_blocks;
};
/// Keys from outside name each block alone.
struct alone_world_traits : world_traits {
  using keys = llmmem::paging::block_keys;
};
struct choosy_world_traits : world_traits {
  using admission = llmmem::second_touch<>;
};

/// Each slot of memory is given the one value that its token's KV could have, a function of the context and
/// all tokens so far; whatever the allocator does, every living sequence must read its own values back, and
/// what is cached must stay as it was. A broken rule throws `broken_promise` (or, from an observer, ends the
/// program).
///
/// @tparam Choices  `below(n)` and `once_in(n)` as `random_numbers` has them.
template <class Traits, class Choices>
class paged_world {
 public:
  using cache_type = llmmem::paged_allocator<Traits>;

  explicit paged_world(Choices choices)
      : choices_(choices),
        options_(choose_options(choices_)),
        limit_(
            std::min<std::uint64_t>(options_.max_sequence_tokens, block_capacity() * options_.block_tokens)),
        memory_((block_capacity() + 1) * options_.block_tokens),
        contents_{.blocks = {}, .memory = &memory_, .block_tokens = options_.block_tokens},
        cache_(options_,
               llmmem::make_eviction(
                   llmmem::eviction_names[choices_.below(std::uint64_t{llmmem::eviction_names.size()})],
                   llmmem::slot_count{block_capacity() + 1}),
               content_recorder{&contents_}) {}
  paged_world(const paged_world&) = delete;
  paged_world& operator=(const paged_world&) = delete;

  /// One operation, and every rule after it.
  void step() {
    act();
    if (const auto found = cache_.audit(); !found.empty()) throw broken_promise(found.front());
    for (const held_sequence& each : living_)
      check_contents(each);
    check_cached();
  }

  /// Everything can be given back, and then nothing is in use.
  void end() {
    while (!living_.empty())
      release(living_.size() - 1);
    must(stream_.pass(stream_.issue()).has_value());
    cache_.collect();
    must(cache_.stats().active_blocks == 0 && cache_.stats().tokens == 0 && cache_.stats().deferred == 0);
    cache_.drop_idle();
    must(cache_.stats().free_blocks == cache_.stats().blocks && cache_.stats().retiring_blocks == 0);
    must(cache_.index().size() == 0 && contents_.blocks.empty());
    must(cache_.audit().empty());
  }

  [[nodiscard]] Choices& choices() { return choices_; }
  /// Blocks shared by `match` so far, by tokens and by keys.
  [[nodiscard]] std::uint64_t hits() const { return hits_; }
  [[nodiscard]] std::uint64_t hits_by_key() const { return hits_by_key_; }
  /// Matches that shared the beginning of a block, blocks given back for equal ones, blocks not let in.
  [[nodiscard]] std::uint64_t beginnings() const { return beginnings_; }
  [[nodiscard]] std::uint64_t moves() const { return moves_; }
  /// Tokens that were computed again after their contents had been invalidated, and tokens removed from the
  /// middle of sequences.
  [[nodiscard]] std::uint64_t mended() const { return mended_; }
  /// Tokens that got their values after their places.
  [[nodiscard]] std::uint64_t named() const { return named_; }
  [[nodiscard]] std::uint64_t removed() const { return removed_; }
  [[nodiscard]] llmmem::paged_stats stats() const { return cache_.stats(); }

 private:
  static constexpr std::uint32_t most_sequences = 6;

  struct held_sequence {
    llmmem::sequence_id id;
    llmmem::prefix_context context;
    std::vector<llmmem::token_id> tokens;
    std::vector<std::uint64_t> expected;  // KV of each token
    std::uint64_t weights = 0;            // that they were computed with
  };

  static llmmem::paged_options choose_options(Choices& choices) {
    llmmem::paged_options options{.blocks = 1 + choices.below(std::uint64_t{32}),
                                  .block_tokens = 1 + choices.below(std::uint32_t{5}),
                                  .max_sequences = most_sequences,
                                  .max_sequence_tokens = choices.once_in(4) ? 7U : 40U,
                                  .name = "kv"};
    if (choices.once_in(3)) options.max_idle_blocks = choices.below(options.blocks);
    if (choices.once_in(3)) options.max_deferred = choices.below(options.blocks);
    if (choices.once_in(4)) options.block_capacity = options.blocks + choices.below(std::uint64_t{12});
    return options;
  }

  [[nodiscard]] std::uint64_t block_capacity() const {
    return std::max(options_.blocks, options_.block_capacity);
  }

  static std::uint64_t kv_of_context(const llmmem::prefix_context& context, std::uint64_t weights) {
    return random_numbers(context.salt[0] * 7 + context.extra_keys[1] + weights * 1000).next();
  }
  static std::uint64_t last_kv(const held_sequence& sequence) {
    return sequence.expected.empty() ? kv_of_context(sequence.context, sequence.weights)
                                     : sequence.expected.back();
  }

  std::vector<llmmem::token_id> prompt() { return choose_prompt(choices_, 18); }

  /// Keys as another service would give them: of all tokens up to a block's end. They know the context only
  /// where nobody verifies it.
  [[nodiscard]] std::vector<llmmem::block_key> keys(std::span<const llmmem::token_id> tokens,
                                                    const llmmem::prefix_context& context) const {
    std::vector<llmmem::block_key> out;
    const std::uint64_t nothing = Traits::verification::keeps_tokens ? 0 : kv_of_context(context, 0);
    std::uint64_t all = nothing;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      all = next_value(all, tokens[i]);
      if ((i + 1) % options_.block_tokens != 0 && i + 1 != tokens.size()) continue;
      out.push_back(llmmem::key_from_id(all));
      if (Traits::keys::chains) all = nothing;
    }
    return out;
  }

  std::uint64_t& slot(llmmem::sequence_id id, std::uint64_t position) {
    const std::uint64_t block = llmmem::to_index(cache_.blocks(id)[position / options_.block_tokens]);
    return memory_[block * options_.block_tokens + position % options_.block_tokens];
  }

  void check_contents(const held_sequence& sequence) {
    must(cache_.tokens(sequence.id) == sequence.expected.size());
    for (std::uint64_t i = 0; i < sequence.expected.size(); ++i)
      must(slot(sequence.id, i) == sequence.expected[i]);
  }

  void check_cached() {
    must(cache_.index().size() == contents_.blocks.size());
    must(cache_.stats().idle_blocks <= options_.max_idle_blocks);
    for (const auto& [block, then] : contents_.blocks) {
      must(cache_.index().contains(block));
      const std::uint32_t tokens = cache_.index().tokens(block);
      for (std::uint32_t i = 0; i < tokens; ++i)
        must(memory_[std::size_t{llmmem::to_index(block)} * options_.block_tokens + i] == then[i]);
    }
  }

  void begin() {
    held_sequence fresh;
    fresh.weights = cache_.epoch();
    if (choices_.once_in(3)) fresh.context.salt[0] = 1;
    if (choices_.once_in(8)) fresh.context.extra_keys[1] = 9;
    const auto id = cache_.create(fresh.context);
    must(id.has_value() == (living_.size() < most_sequences));
    if (!id) return must(id.code() == llmmem::errc::out_of_sequences);
    fresh.id = *id;
    living_.push_back(fresh);
    if (choices_.once_in(4)) retain(living_.back());
    fill(living_.back());
  }

  void retain(const held_sequence& sequence) {
    const std::uint64_t first = choices_.below(std::uint64_t{20});
    const llmmem::retention keep{.priority = static_cast<std::uint8_t>(choices_.below(std::uint32_t{101})),
                                 .until = choices_.once_in(2) ? now_ + 3 : llmmem::retention{}.until};
    must(
        cache_.retain(sequence.id, {first, first + 1 + choices_.below(std::uint64_t{20})}, keep).has_value());
    cache_.advance(++now_);
  }

  /// Match and append: what an engine does with a prompt.
  void fill(held_sequence& fresh) {
    const std::vector<llmmem::token_id> tokens = prompt();
    const bool by_key = choices_.once_in(3);
    llmmem::match_result hit;
    if (by_key) {
      const auto named = keys(tokens, fresh.context);
      hit = cache_.match(fresh.id, llmmem::keyed_blocks{.keys = named, .tokens = tokens.size()}).value();
      hits_by_key_ += hit.blocks;
    } else {
      const std::uint64_t whole = limit_ / options_.block_tokens * options_.block_tokens;
      const llmmem::prompt_cost foretold = cache_.cost(tokens, fresh.context);
      must(foretold.cached_tokens == cache_.cached_tokens(tokens, fresh.context));
      const std::uint64_t idle = cache_.stats().idle_blocks;
      if (choices_.once_in(3)) must(cache_.expect(tokens, fresh.context, now_) == foretold.cached_tokens);
      hit = cache_.match(fresh.id, tokens).value();
      const std::uint64_t full = std::min(foretold.cached_tokens, whole);
      if (Traits::partial::source == llmmem::partial_source::none) {
        must(hit.tokens == full && !hit.copy);
        if (foretold.cached_tokens <= whole)
          must(idle - cache_.stats().idle_blocks == foretold.revived_blocks);
      } else {
        must(hit.tokens >= full && hit.tokens < full + options_.block_tokens);
        beginnings_ += hit.tokens != full ? 1 : 0;
        carry_out(hit.copy);
      }
    }
    must(hit.tokens <= tokens.size() && hit.tokens <= limit_);
    for (std::uint64_t i = 0; i < hit.tokens; ++i) {
      fresh.tokens.push_back(tokens[i]);
      fresh.expected.push_back(next_value(last_kv(fresh), tokens[i]));
    }
    hits_ += hit.blocks;
    check_contents(fresh);
    append(fresh, std::span(tokens).subspan(hit.tokens), by_key && choices_.once_in(2));
  }

  void append(held_sequence& sequence, std::span<const llmmem::token_id> tokens,
              bool unknown_tokens = false) {
    const llmmem::paged_stats before = cache_.stats();
    const auto done =
        unknown_tokens ? cache_.extend(sequence.id, tokens.size()) : cache_.append(sequence.id, tokens);
    if (!done) return check_refused(sequence, tokens.size(), done.code(), before);
    must(done->first == sequence.expected.size());
    carry_out(done->copy);
    write(sequence, tokens);
  }

  /// Gives values to tokens that were appended without, in two parts. The refusal of too many says where they
  /// begin.
  void name(const held_sequence& sequence) {
    const std::vector<llmmem::token_id> too_many(sequence.tokens.size() + 1);
    const auto refused = cache_.name_tokens(sequence.id, too_many);
    must(refused.code() == llmmem::errc::past_the_end);
    const auto first = static_cast<std::size_t>(refused.error().wanted - too_many.size());
    must(first <= sequence.tokens.size());
    const auto values = std::span(sequence.tokens).subspan(first);
    const auto part = static_cast<std::size_t>(choices_.below(std::uint64_t{values.size() + 1}));
    must(cache_.name_tokens(sequence.id, values.first(part)).has_value());
    if (choices_.once_in(2)) return;
    must(cache_.name_tokens(sequence.id, values.subspan(part)).has_value());
    named_ += values.size();
  }

  void carry_out(const llmmem::block_copy& copy) {
    for (std::uint32_t i = 0; i < copy.tokens; ++i) {
      memory_[std::size_t{llmmem::to_index(copy.destination)} * options_.block_tokens + i] =
          memory_[std::size_t{llmmem::to_index(copy.source)} * options_.block_tokens + i];
    }
  }

  void write(held_sequence& sequence, std::span<const llmmem::token_id> tokens) {
    for (const llmmem::token_id token : tokens) {
      sequence.tokens.push_back(token);
      sequence.expected.push_back(next_value(last_kv(sequence), token));
      slot(sequence.id, sequence.expected.size() - 1) = sequence.expected.back();
    }
  }

  /// All of them or none: a refusal has changed nothing, not even what is evictable.
  void append_batch() {
    std::vector<std::size_t> who;
    std::vector<std::vector<llmmem::token_id>> tokens;
    for (std::size_t i = 0; i < living_.size(); ++i) {
      if (choices_.once_in(3)) continue;
      who.push_back(i);
      tokens.push_back(choices_.once_in(2) ? prompt() : std::vector<llmmem::token_id>{1});
    }
    std::vector<llmmem::paging::growth> batch;
    std::uint64_t longest = 0;
    for (std::size_t k = 0; k < who.size(); ++k) {
      batch.push_back({.sequence = living_[who[k]].id, .tokens = tokens[k]});
      longest = std::max<std::uint64_t>(longest, living_[who[k]].expected.size() + tokens[k].size());
    }
    const bool twice = batch.size() > 1 && choices_.once_in(10);
    if (twice) batch.back().sequence = batch.front().sequence;
    const std::uint64_t leave = choices_.once_in(3) ? choices_.below(std::uint64_t{4}) : 0;
    std::vector<llmmem::append_result> out(batch.size());
    cache_.collect();
    const llmmem::paged_stats before = cache_.stats();
    const auto done = cache_.append_batch(batch, out, leave);
    const llmmem::paged_stats after = cache_.stats();
    if (!done) {
      must(after.free_blocks == before.free_blocks && after.idle_blocks == before.idle_blocks &&
           after.tokens == before.tokens && after.evictions == before.evictions);
      if (done.code() == llmmem::errc::listed_twice) return must(twice);
      if (done.code() == llmmem::errc::sequence_full) return must(longest > limit_ || twice);
      must(done.code() == llmmem::errc::out_of_blocks);
      return must(done.error().wanted > before.free_blocks + before.idle_blocks);
    }
    must(!twice);
    must(after.free_blocks + after.idle_blocks >= leave);
    std::uint64_t taken = 0;
    for (const llmmem::append_result& each : out)
      taken += each.new_blocks;
    must(after.allocations - before.allocations == taken);
    for (const llmmem::append_result& each : out)
      carry_out(each.copy);  // all before any write
    for (std::size_t k = 0; k < who.size(); ++k) {
      must(out[k].first == living_[who[k]].expected.size());
      write(living_[who[k]], tokens[k]);
    }
  }

  /// Blocks in use go elsewhere, or stop halfway; what they hold does not change.
  void compact() {
    const llmmem::compaction_goal goal{.what = choices_.once_in(2)
                                                   ? llmmem::compaction_goal::kind::pack
                                                   : llmmem::compaction_goal::kind::straighten,
                                       .end = choices_.once_in(2) ? 0 : cache_.pool().blocks() / 2,
                                       .max_moves = choices_.once_in(2) ? 3 : llmmem::unlimited};
    const llmmem::compaction_plan plan = llmmem::plan_compaction(cache_.compaction_facts_now(), goal);
    must(plan.moves.size() <= goal.max_moves);
    must(goal.what == llmmem::compaction_goal::kind::pack ? plan.highest_after <= plan.highest_before
                                                          : plan.runs_after <= plan.runs_before);
    std::uint64_t left = choices_.below(std::uint64_t{8});
    const auto copy = [&](std::span<const llmmem::block_move> moves) noexcept {
      if (left-- == 0) return false;
      for (const llmmem::block_move& move : moves) {
        for (std::uint32_t i = 0; i < options_.block_tokens; ++i) {
          memory_[std::size_t{llmmem::to_index(move.destination)} * options_.block_tokens + i] =
              memory_[std::size_t{llmmem::to_index(move.source)} * options_.block_tokens + i];
          memory_[std::size_t{llmmem::to_index(move.source)} * options_.block_tokens + i] = 0;
        }
      }
      return true;
    };
    moves_ += cache_.compact(plan.moves, copy, choices_.below(std::uint64_t{4})).value();
  }

  void deduplicate(const held_sequence& sequence) {
    if (choices_.once_in(2)) {
      const auto done = cache_.deduplicate_after(sequence.id, stream_.issue());
      return must(done || done.code() == llmmem::errc::deferred_full);
    }
    must(cache_.deduplicate(sequence.id).has_value());
    must(cache_.deduplicate(sequence.id).value() == 0);
  }

  /// Nothing was changed, and there really was no room.
  void check_refused(const held_sequence& sequence, std::uint64_t more, llmmem::error_code why,
                     const llmmem::paged_stats& before) {
    const llmmem::paged_stats now = cache_.stats();
    must(now.tokens == before.tokens && now.table_blocks == before.table_blocks);
    const std::uint64_t tokens = sequence.expected.size() + more;
    if (why == llmmem::errc::sequence_full) return must(tokens > limit_);
    must(why == llmmem::errc::out_of_blocks && tokens <= limit_);
    const std::span<const llmmem::block_id> held = cache_.blocks(sequence.id);
    std::uint64_t needed = (tokens + options_.block_tokens - 1) / options_.block_tokens - held.size();
    if (sequence.expected.size() % options_.block_tokens != 0 &&
        cache_.pool().record(held.back()).references() > 1) {
      ++needed;  // a copy
    }
    must(needed > now.free_blocks + now.idle_blocks);
  }

  void commit(held_sequence& sequence) {
    if (!choices_.once_in(3)) return must(cache_.commit(sequence.id).has_value());
    const std::uint64_t count =
        choices_.once_in(3) ? choices_.below(sequence.tokens.size() + 1) : sequence.tokens.size();
    const auto named = keys(std::span(sequence.tokens).first(count), sequence.context);
    std::vector<llmmem::access_hint> hints;
    if (choices_.once_in(2)) {
      for (std::size_t i = 0; i < named.size(); ++i)
        hints.push_back({choices_.below(std::uint64_t{50})});
    }
    must(cache_.commit(sequence.id, {.keys = named, .tokens = count, .hints = hints}).has_value());
  }

  void fork(const held_sequence& sequence) {
    const auto twin = cache_.fork(sequence.id);
    must(twin.has_value() == (living_.size() < most_sequences));
    if (!twin) return;
    held_sequence copy = sequence;
    copy.id = *twin;
    living_.push_back(copy);
  }

  void truncate(held_sequence& sequence) {
    const std::uint64_t keep = choices_.below(sequence.expected.size() + 1);
    bool cut = false;
    if (choices_.once_in(3)) {
      const llmmem::host_fence after = choices_.once_in(2) ? stream_.issue() : llmmem::host_fence{};
      const auto deferred = cache_.truncate_after(sequence.id, keep, after);
      must(deferred || deferred.code() == llmmem::errc::deferred_full);
      cut = deferred.has_value();
    }
    if (!cut) must(cache_.truncate(sequence.id, keep).has_value());
    sequence.expected.resize(keep);
    sequence.tokens.resize(keep);
    if (keep == 0) sequence.weights = cache_.epoch();
    if (keep == 0 && choices_.once_in(2)) fill(sequence);
  }

  void release(std::size_t i) {
    const llmmem::sequence_id id = living_[i].id;
    bool done = false;
    if (choices_.once_in(3)) {
      const llmmem::host_fence after = choices_.once_in(2) ? stream_.issue() : llmmem::host_fence{};
      const auto deferred = cache_.release_after(id, after);
      done = deferred.has_value();
      if (!done) {
        must(deferred.code() == llmmem::errc::deferred_full);
        check_contents(living_[i]);  // it lives on
      }
    }
    if (!done) must(cache_.release(id).has_value());
    must(cache_.release(id).code() == llmmem::errc::stale_handle);
    living_.erase(living_.begin() + static_cast<std::ptrdiff_t>(i));
  }

  /// Other weights: what was computed with those before is found no more, now or later.
  void reset() {
    const std::uint64_t cached = contents_.blocks.size();
    const std::uint64_t now = cache_.epoch();
    if (choices_.once_in(2)) {
      must(cache_.reset() == cached);
    } else {
      must(cache_.reset(now).code() == llmmem::errc::old_epoch);
      must(cache_.reset(now + 1 + choices_.below(std::uint64_t{3})).value() == cached);
    }
    must(contents_.blocks.empty() && cache_.index().size() == 0);
    for (held_sequence& each : living_) {
      if (each.tokens.empty()) each.weights = cache_.epoch();
      must(cache_.epoch(each.id) == each.weights);
    }
  }

  /// A block's contents turn out to be wrong, and with them all that was computed from it.
  void invalidate(held_sequence& sequence) {
    const std::uint64_t from = choices_.below(sequence.tokens.size() + 1);
    std::vector<std::uint64_t> sound;
    for (const held_sequence& each : living_)
      sound.push_back(cache_.prefix_tokens(each.id));
    const std::size_t cached = contents_.blocks.size();
    const auto table = cache_.blocks(sequence.id);
    const bool one = choices_.once_in(2) && !table.empty();
    const llmmem::block_id block =
        one ? table[choices_.below(std::uint64_t{table.size()})] : llmmem::null_block;
    const std::uint64_t gone =
        one ? cache_.invalidate(block).value() : cache_.invalidate(sequence.id, from).value();
    must(cached - contents_.blocks.size() == gone);
    if (!one) must(cache_.prefix_tokens(sequence.id) <= from);
    std::map<llmmem::block_id, bool> wrong;
    for (std::size_t k = 0; k < living_.size(); ++k) {
      const auto blocks = cache_.blocks(living_[k].id);
      const std::uint64_t left = cache_.prefix_tokens(living_[k].id);
      must(left <= sound[k]);
      if (left == sound[k]) continue;
      must(left % options_.block_tokens == 0);
      for (std::uint64_t i = left / options_.block_tokens; i < blocks.size(); ++i)
        wrong[blocks[i]] = true;
    }
    for (const auto& [each, _] : wrong) {
      for (std::uint32_t i = 0; i < options_.block_tokens; ++i)
        memory_[std::size_t{llmmem::to_index(each)} * options_.block_tokens + i] =
            choices_.below(~std::uint64_t{0});
    }
    for (held_sequence& each : living_) {
      for (std::uint64_t i = 0; i < each.expected.size(); ++i) {
        if (wrong.contains(cache_.blocks(each.id)[i / options_.block_tokens]))
          each.expected[i] = slot(each.id, i);
      }
    }
    if (choices_.once_in(2)) mend(sequence);
  }

  /// What is not sound is computed again.
  void mend(held_sequence& sequence) {
    const std::uint64_t sound = cache_.prefix_tokens(sequence.id);
    const std::vector<llmmem::token_id> again(sequence.tokens.begin() + static_cast<std::ptrdiff_t>(sound),
                                              sequence.tokens.end());
    must(cache_.truncate(sequence.id, sound).has_value());
    sequence.expected.resize(sound);
    sequence.tokens.resize(sound);
    if (sound == 0) sequence.weights = cache_.epoch();
    must(cache_.prefix_tokens(sequence.id) == sound);
    append(sequence, again);
    mended_ += again.size();
  }

  /// Whole blocks go from the middle; what lies behind keeps its values.
  void remove(held_sequence& sequence) {
    const std::uint64_t blocks = cache_.blocks(sequence.id).size();
    const std::uint64_t first = choices_.below(blocks + 1) * options_.block_tokens;
    const std::uint64_t end = first + choices_.below(std::uint64_t{3}) * options_.block_tokens;
    const std::uint64_t held = sequence.tokens.size();
    const bool waits = choices_.once_in(2);
    const llmmem::token_range range{first, choices_.once_in(4) ? llmmem::token_range{}.end : end};
    const auto done =
        waits ? cache_.remove_after(sequence.id, range, stream_.issue()) : cache_.remove(sequence.id, range);
    if (range.first >= range.end) return must(done.code() == llmmem::errc::empty_range);
    if (first > held) return must(done.code() == llmmem::errc::past_the_end);
    if (!done) return must(waits && done.code() == llmmem::errc::deferred_full);
    const auto from = static_cast<std::ptrdiff_t>(first);
    const auto to = static_cast<std::ptrdiff_t>(std::min(range.end, held));
    sequence.tokens.erase(sequence.tokens.begin() + from, sequence.tokens.begin() + to);
    sequence.expected.erase(sequence.expected.begin() + from, sequence.expected.begin() + to);
    if (to < static_cast<std::ptrdiff_t>(held)) {
      must(cache_.prefix_tokens(sequence.id) <= first);
      removed_ += static_cast<std::uint64_t>(to - from);
    }
    if (sequence.tokens.empty()) sequence.weights = cache_.epoch();
  }

  /// There and back: handles, tables and what is cached go along.
  void move() {
    cache_type elsewhere(std::move(cache_));
    cache_ = std::move(elsewhere);
  }

  void act() {
    if (living_.size() == most_sequences && choices_.once_in(2))
      release(choices_.below(std::uint64_t{living_.size()}));
    if (living_.empty() || choices_.once_in(4)) return begin();
    const std::size_t i = choices_.below(std::uint64_t{living_.size()});
    held_sequence& sequence = living_[i];
    switch (choices_.below(std::uint32_t{15})) {
      case 0:
      case 1:
        return append(sequence, prompt());
      case 2: {
        const std::vector<llmmem::token_id> one{choices_.once_in(2) ? 1 : 2};
        return append(sequence, one);
      }
      case 3:
      case 4:
      case 5:
        return commit(sequence);
      case 6:
        return fork(sequence);
      case 7:
        return truncate(sequence);
      case 8:
        if (choices_.once_in(4)) return append(sequence, prompt(), true);
        if (choices_.once_in(2)) return name(sequence);
        return must(stream_.pass(stream_.issue()).has_value());
      case 9:
        if (choices_.once_in(6)) return static_cast<void>(cache_.drop_idle());
        if (choices_.once_in(6)) return move();
        return static_cast<void>(cache_.collect());
      case 10:
        return append_batch();
      case 11:
        return deduplicate(sequence);
      case 13:
        // Rare, since they leave little to find.
        if (choices_.once_in(3)) return remove(sequence);
        if (choices_.once_in(24)) return reset();
        return choices_.once_in(3) ? invalidate(sequence) : mend(sequence);
      case 12:
        if (choices_.once_in(3)) return compact();
        if (choices_.once_in(3)) return retain(sequence);
        if (!choices_.once_in(3)) return commit(sequence);
        return must(cache_.resize(1 + choices_.below(block_capacity())).has_value());
      default:
        return release(i);
    }
  }

  Choices choices_;
  llmmem::paged_options options_;
  std::uint64_t limit_;  // tokens of the longest sequence
  std::vector<std::uint64_t> memory_;
  cached_contents contents_;
  cache_type cache_;
  std::vector<held_sequence> living_;
  llmmem::host_timeline stream_;
  std::uint64_t hits_ = 0;
  std::uint64_t hits_by_key_ = 0;
  std::uint64_t beginnings_ = 0;
  std::uint64_t moves_ = 0;
  std::uint64_t mended_ = 0;
  std::uint64_t named_ = 0;
  std::uint64_t removed_ = 0;
  std::uint64_t now_ = 0;
};

}  // namespace llmmem_tests
