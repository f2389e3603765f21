/// @file
/// Random operations through a journaled cache, fences and pressure included: what its journal must replay.
#pragma once

#include <llmmem/eviction/any.hpp>
#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/journal.hpp>
#include <llmmem/paging/journal_replay.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/random.hpp"

namespace llmmem_tests {

struct traced_traits : llmmem::paged_traits {
  using eviction = llmmem::any_eviction;
  using fence = llmmem::recorded_fence;
};
struct traced_partial_traits : traced_traits {
  using partial = llmmem::copy_partial_blocks;
  using free_list = llmmem::ascending_free_list;
  using admission = llmmem::second_touch<>;
};

/// A cache as the header says, under the policy that its configuration names.
template <class Traits>
llmmem::paged_allocator<Traits> cache_of(const llmmem::journal_header& header) {
  const std::uint64_t most = std::max(header.options.blocks, header.options.block_capacity);
  return {header.options, llmmem::make_eviction(header.configuration, llmmem::slot_count{most + 1})};
}

template <class Traits>
class journal_world {
 public:
  using cache_type = llmmem::paged_allocator<Traits>;
  using journal_type = llmmem::paging::journaled<cache_type, llmmem::memory_journal>;

  explicit journal_world(std::uint64_t seed, std::uint64_t journal_bytes = 1 << 20)
      : random_(seed),
        options_(choose()),
        policy_(llmmem::eviction_names[random_.below(std::uint64_t{llmmem::eviction_names.size()})]),
        cache_(options_, llmmem::memory_journal(journal_bytes), policy_,
               llmmem::make_eviction(policy_, llmmem::slot_count{block_capacity() + 1})) {}
  journal_world(const journal_world&) = delete;
  journal_world& operator=(const journal_world&) = delete;

  void step() {
    if (random_.once_in(12)) static_cast<void>(stream_.pass(stream_.issue()));
    if (random_.once_in(25)) cache_.checkpoint();
    if (living_.empty() || random_.once_in(4)) return begin();
    const llmmem::sequence_id id = random_.once_in(20) ? odd_handle() : any();
    switch (random_.below(std::uint32_t{19})) {
      case 16:
        return kept(cache_.name_tokens(id, prompt()));
      case 17:
        return pin(id);
      case 18:
        return kept(cache_.limit_commits(
            id, random_.once_in(2) ? llmmem::unlimited : random_.below(std::uint64_t{20})));
      case 0:
        return kept(cache_.append(id, prompt()));
      case 1:
        return kept(cache_.extend(id, random_.below(std::uint64_t{5})));
      case 2:
        return append_batch();
      case 3:
      case 4:
        return kept(cache_.commit(id));
      case 5:
        return kept(cache_.commit(id, random_.below(std::uint64_t{20})));
      case 6:
        return commit_keys(id);
      case 7:
        if (const auto twin = cache_.fork(id)) living_.push_back(*twin);
        return;
      case 8:
        return kept(cache_.truncate(id, random_.below(std::uint64_t{16})));
      case 9:
        return kept(cache_.truncate_after(id, random_.below(std::uint64_t{16}), fence()));
      case 10:
        return kept(random_.once_in(2) ? cache_.deduplicate(id) : cache_.deduplicate_after(id, fence()));
      case 11:
        return rare(id);
      case 12:
        return kept(cache_.release_after(id, fence()));
      default:
        return kept(cache_.release(id));
    }
  }

  [[nodiscard]] journal_type& cache() { return cache_; }
  [[nodiscard]] std::span<const std::byte> bytes() const { return cache_.sink().bytes(); }
  /// The world's own handles of what a replay holds, for `state_of`.
  [[nodiscard]] std::vector<llmmem::sequence_id> own(std::vector<llmmem::sequence_id> handles) const {
    for (llmmem::sequence_id& each : handles)
      each.owner = owner_;
    return handles;
  }
  /// How often the pressure callback gave a sequence up.
  [[nodiscard]] std::uint64_t relieved() const { return relieved_; }

 private:
  static constexpr std::uint32_t most_sequences = 6;

  llmmem::paged_options choose() {
    llmmem::paged_options options{.blocks = 2 + random_.below(std::uint64_t{24}),
                                  .block_tokens = 1 + random_.below(std::uint32_t{5}),
                                  .max_sequences = most_sequences,
                                  .max_sequence_tokens = 40,
                                  .name = "kv"};
    if (random_.once_in(3)) options.max_idle_blocks = random_.below(options.blocks);
    if (random_.once_in(3)) options.max_deferred = random_.below(options.blocks);
    if (random_.once_in(3)) options.block_capacity = options.blocks + random_.below(std::uint64_t{12});
    if (random_.once_in(2)) options.pressure = {.call = &relieve, .context = this};
    return options;
  }
  [[nodiscard]] std::uint64_t block_capacity() const {
    return std::max(options_.blocks, options_.block_capacity);
  }

  /// An engine's: gives a sequence up, at once or behind a fence that has passed already or has not.
  static bool relieve(void* context, const llmmem::block_shortage& shortage) noexcept {
    auto& world = *static_cast<journal_world*>(context);
    if (shortage.needed == 0 || world.living_.empty()) return false;
    ++world.relieved_;
    const llmmem::sequence_id victim = world.any();
    if (world.random_.once_in(3)) static_cast<void>(world.stream_.pass(world.stream_.issue()));
    if (world.random_.once_in(2)) {
      static_cast<void>(world.cache_.release_after(victim, world.fence()));
      world.cache_.collect();
    } else {
      static_cast<void>(world.cache_.release(victim));
    }
    return true;
  }

  template <class T>
  static void kept(const llmmem::result<T>&) {}

  llmmem::sequence_id any() { return living_[random_.below(std::uint64_t{living_.size()})]; }
  llmmem::sequence_id odd_handle() {
    if (random_.once_in(2)) return {};
    return {random_.below(std::uint32_t{9}), random_.below(std::uint32_t{4}),
            random_.once_in(2) ? 12345U : living_.front().owner};
  }
  /// Keeps a block of a sequence, or stops to keep one.
  void pin(llmmem::sequence_id id) {
    const auto table = cache_.blocks(id);
    if (!pinned_.empty() && (random_.once_in(2) || pinned_.size() == 2)) {
      kept(cache_.unpin(pinned_.back()));
      return pinned_.pop_back();
    }
    const llmmem::block_id block = table.empty() ? llmmem::block_id{random_.below(std::uint32_t{40})}
                                                 : table[random_.below(std::uint64_t{table.size()})];
    if (cache_.pin(block)) pinned_.push_back(block);
  }
  llmmem::host_fence fence() { return random_.once_in(2) ? stream_.issue() : llmmem::host_fence{}; }

  std::vector<llmmem::token_id> prompt() {
    std::vector<llmmem::token_id> tokens(random_.below(std::uint64_t{18}));
    for (auto& token : tokens)
      token = random_.once_in(12) ? -2 : 1;
    return tokens;
  }
  std::vector<llmmem::block_key> keys(std::uint64_t tokens) {
    std::vector<llmmem::block_key> named((tokens + options_.block_tokens - 1) / options_.block_tokens);
    const std::uint64_t family = random_.below(std::uint64_t{2});
    for (std::size_t i = 0; i < named.size(); ++i)
      named[i] = llmmem::key_from_id(family * 1000 + i * 10 + (i + 1 == named.size() ? tokens : 0));
    if (random_.once_in(20)) named.emplace_back();
    return named;
  }
  std::vector<llmmem::access_hint> hints(std::size_t count) {
    std::vector<llmmem::access_hint> told;
    for (; count > 0 && count < 30; --count) {
      told.push_back({.next_use = random_.below(std::uint64_t{50}), .session = 3, .cost = 0.5F});
      if (random_.once_in(60)) break;
    }
    return told;
  }

  void begin() {
    llmmem::prefix_context context;
    if (random_.once_in(3)) context.salt[0] = 1;
    llmmem::request_hints hints{.session = random_.below(std::uint64_t{3})};
    if (random_.once_in(9))
      hints.keep = {.priority = static_cast<std::uint8_t>(random_.below(std::uint32_t{103}))};
    const auto tokens = prompt();
    if (random_.once_in(4)) cache_.expect(tokens, context, random_.below(std::uint64_t{90}));
    const auto id = cache_.create(context, hints);
    if (!id) return;
    owner_ = id->owner;
    living_.push_back(*id);
    if (random_.once_in(3)) {
      const auto named = keys(tokens.size());
      const auto told = random_.once_in(2) ? this->hints(named.size()) : std::vector<llmmem::access_hint>{};
      const llmmem::keyed_blocks keyed{.keys = named, .tokens = tokens.size(), .hints = told};
      if (random_.once_in(4)) cache_.expect(keyed, context, llmmem::access_hint::never);
      const auto hit = cache_.match(*id, keyed);
      if (hit) kept(cache_.extend(*id, tokens.size() - hit->tokens));
    } else {
      const auto hit = cache_.match(*id, tokens);
      if (hit) kept(cache_.append(*id, std::span(tokens).subspan(hit->tokens)));
    }
  }
  void commit_keys(llmmem::sequence_id id) {
    const std::uint64_t tokens = cache_.tokens(id);
    const auto named = keys(tokens);
    const auto told = random_.once_in(2) ? hints(named.size()) : std::vector<llmmem::access_hint>{};
    kept(cache_.commit(id, llmmem::keyed_blocks{.keys = named, .tokens = tokens, .hints = told}));
  }
  void append_batch() {
    std::vector<std::vector<llmmem::token_id>> tokens(living_.size());
    std::vector<llmmem::paging::growth> batch;
    for (std::size_t i = 0; i < living_.size(); ++i) {
      tokens[i] = random_.once_in(3) ? prompt() : std::vector<llmmem::token_id>{1};
      batch.push_back(
          {.sequence = living_[i], .tokens = tokens[i], .unknown_tokens = random_.once_in(4) ? 2U : 0U});
    }
    if (random_.once_in(9)) batch.push_back(batch.front());
    std::vector<llmmem::append_result> out(batch.size() + (random_.once_in(20) ? 1 : 0));
    kept(cache_.append_batch(batch, out, random_.below(std::uint64_t{3})));
  }
  llmmem::token_range some_blocks() {
    const std::uint64_t first = random_.below(std::uint64_t{4}) * options_.block_tokens;
    return {first, first + random_.below(std::uint64_t{3}) * options_.block_tokens};
  }
  void rare(llmmem::sequence_id id) {
    switch (random_.below(std::uint32_t{10})) {
      case 0:
        cache_.drop_idle();
        return;
      case 6:
        return kept(cache_.reset(cache_.epoch() + random_.below(std::uint64_t{3})));
      case 7:
        return kept(random_.once_in(2)
                        ? cache_.invalidate(id, random_.below(std::uint64_t{12}))
                        : cache_.invalidate(llmmem::block_id{random_.below(std::uint32_t{30})}));
      case 8:
        return kept(cache_.remove(id, some_blocks()));
      case 9:
        return kept(cache_.remove_after(id, some_blocks(), fence()));
      case 1:
        return kept(cache_.resize(random_.below(block_capacity() + 2)));
      case 2: {
        const auto plan = llmmem::plan_compaction(cache_.cache().compaction_facts_now(), {});
        std::uint64_t left = random_.below(std::uint64_t{6});
        return kept(cache_.compact(
            plan.moves, [&](std::span<const llmmem::block_move>) noexcept { return left-- != 0; },
            random_.below(std::uint64_t{4})));
      }
      case 3:
        cache_.advance(now_ += random_.below(std::uint64_t{5}));
        return;
      case 4: {
        const std::uint64_t first = random_.below(std::uint64_t{9});
        return kept(cache_.retain(id, {first, first + random_.below(std::uint64_t{9})},
                                  {.priority = 90, .until = now_ + 3}));
      }
      default:
        cache_.collect();
    }
  }

  random_numbers random_;
  llmmem::paged_options options_;
  std::string policy_;
  journal_type cache_;
  std::vector<llmmem::block_id> pinned_;
  llmmem::host_timeline stream_;
  std::vector<llmmem::sequence_id> living_;  // and some that are not any more
  std::uint32_t owner_ = 0;
  std::uint64_t relieved_ = 0;
  std::uint64_t now_ = 0;
};

/// The bytes of a journal with these payloads, the first of them the header's, each frame as it should be.
inline std::vector<std::byte> framed(const std::vector<std::vector<std::byte>>& payloads) {
  struct growing {
    std::vector<std::byte> bytes;
    bool write(std::span<const std::byte> more) noexcept {
      bytes.insert(bytes.end(), more.begin(), more.end());
      return true;
    }
  } out;
  std::uint32_t crc = 0;
  for (const char each : llmmem::detail::journal_magic)
    out.bytes.push_back(static_cast<std::byte>(each));
  crc = llmmem::crc32c(0, out.bytes);
  for (const auto& payload : payloads) {
    llmmem::detail::checked_writer<growing> writer(out, crc);
    llmmem::detail::put_varint(writer, payload.size());
    for (const std::byte each : payload)
      writer.put(each);
    writer.flush();
    crc = writer.crc();
    llmmem::detail::put_fixed32(writer, crc);
    writer.flush();
  }
  return out.bytes;
}

/// The payloads of a whole journal, for `framed`.
inline std::vector<std::vector<std::byte>> payloads_of(std::span<const std::byte> journal) {
  std::vector<std::vector<std::byte>> out;
  for (std::size_t at = llmmem::detail::journal_magic.size(); at < journal.size();) {
    llmmem::detail::byte_cursor in(journal.subspan(at));
    const auto length = static_cast<std::size_t>(in.varint());
    const auto payload = journal.subspan(journal.size() - in.left(), length);
    out.emplace_back(payload.begin(), payload.end());
    at = journal.size() - in.left() + length + 4;
  }
  return out;
}

/// The payload of a header.
inline std::vector<std::byte> header_payload(const llmmem::paged_options& options,
                                             std::string_view configuration = "lru") {
  struct collector {
    std::vector<std::byte> bytes;
    void put(std::byte each) noexcept { bytes.push_back(each); }
    void put(std::span<const std::byte> all) noexcept { bytes.insert(bytes.end(), all.begin(), all.end()); }
  } out;
  llmmem::detail::encode_header(out, options, configuration);
  return out.bytes;
}

/// All that two caches can be asked: equal texts, equal states.
template <class Cache>
std::string state_of(const Cache& cache, std::span<const llmmem::sequence_id> sequences) {
  const auto n = [](std::uint64_t value) { return " " + std::to_string(value); };
  std::string text = n(llmmem::detail::state_digest(cache));
  for (const llmmem::sequence_id each : sequences) {
    text += "\n" + n(each.slot) + n(each.generation) + n(cache.tokens(each)) + ":";
    for (const llmmem::block_id block : cache.blocks(each))
      text += n(llmmem::to_index(block));
  }
  text += "\nfree:";
  cache.pool().for_each_free([&](llmmem::block_id block) { text += n(llmmem::to_index(block)); });
  for (const std::string& found : cache.audit())
    text += "\n" + found;
  return text;
}

}  // namespace llmmem_tests
