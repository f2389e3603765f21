#include <llmmem/paging/shared_prefix_cache.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/giving_way.hpp"
#include "support/history.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using llmmem_tests::giving_way;
using llmmem_tests::linearization;
using llmmem_tests::random_numbers;
using llmmem_tests::seeds;
using llmmem_tests::timed;

namespace {

constexpr std::uint64_t blocks = 5;
constexpr std::size_t longest = 3;

struct tiny_traits : shared_traits {
  using steps = giving_way;
  using mutex = std::mutex;
};

/// What one call did, or one block's part of it.
struct operation {
  enum class kind { match, commit, release, evict, become_free, reserve, hold } what = kind::match;
  std::vector<token_id> path{};   // match: the prompt; commit: up to and with the block
  std::vector<block_id> given{};  // match: what was found
  block_id block = null_block;    // commit, release, evict, hold: of this block
  bool succeeded = false;         // commit: registered; reserve: not refused
};

/// That blocks are free is one thing, which of them a thread gets another: a call reserves a number of them
/// first, and may then be given one that another call is still about to count.
///
/// The definition: the cached prefixes, who holds how many references, how many blocks are free.
struct tiny_cache {
  std::map<std::vector<token_id>, block_id> cached;
  std::array<int, blocks + 1> held{};
  int free = int{blocks};

  friend auto operator<=>(const tiny_cache&, const tiny_cache&) = default;
};

std::optional<tiny_cache> apply(tiny_cache state, const operation& done) {
  switch (done.what) {
    case operation::kind::match: {
      std::vector<block_id> found;
      for (std::size_t n = 1; n <= done.path.size(); ++n) {
        const auto at =
            state.cached.find({done.path.begin(), done.path.begin() + static_cast<std::ptrdiff_t>(n)});
        if (at == state.cached.end()) break;
        found.push_back(at->second);
        ++state.held[to_index(at->second)];
      }
      if (found != done.given) return std::nullopt;
      return state;
    }
    case operation::kind::commit:
      if (state.cached.contains(done.path) == done.succeeded) return std::nullopt;
      if (done.path.size() > 1 && !state.cached.contains({done.path.begin(), done.path.end() - 1})) {
        return std::nullopt;  // what comes before it is held throughout
      }
      if (done.succeeded) state.cached[done.path] = done.block;
      return state;
    case operation::kind::release:
      --state.held[to_index(done.block)];
      return state;
    case operation::kind::evict:
      for (auto at = state.cached.begin(); at != state.cached.end(); ++at) {
        if (at->second != done.block) continue;
        const auto next = std::next(at);
        const bool is_leaf = next == state.cached.end() || next->first.size() <= at->first.size();
        if (!is_leaf || state.held[to_index(done.block)] != 0) return std::nullopt;
        state.cached.erase(at);
        return state;
      }
      return std::nullopt;
    case operation::kind::become_free:
      ++state.free;
      return state;
    case operation::kind::reserve:
      if ((state.free > 0) != done.succeeded) return std::nullopt;
      state.free -= done.succeeded ? 1 : 0;
      return state;
    case operation::kind::hold: {
      const auto holds = [&](const auto& entry) { return entry.second == done.block; };
      const bool is_cached = std::any_of(state.cached.begin(), state.cached.end(), holds);
      if (is_cached || state.held[to_index(done.block)]++ != 0) return std::nullopt;
      return state;
    }
  }
  return std::nullopt;
}

/// One thread's sequence: matched, grown, committed block by block, released from its end.
class tiny_engine {
 public:
  tiny_engine(shared_prefix_cache<tiny_traits>& cache, std::atomic<std::uint64_t>& clock, std::uint64_t seed)
      : cache_(cache), clock_(clock), random_(seed) {}

  void step() {
    switch (random_.below(std::uint32_t{8})) {
      case 0:
        return evict();
      case 1:
      case 2:
        if (table_.empty()) return match();
        ending_ = true;
        return release();
      default:
        if (ending_) return release();
        if (prompt_.empty()) return match();
        if (committed_ < table_.size()) return commit();
        if (table_.size() < prompt_.size()) return allocate();
        ending_ = true;
        return release();
    }
  }

  [[nodiscard]] const std::vector<timed<operation>>& calls() const { return calls_; }
  [[nodiscard]] bool is_sound() const { return sound_; }

 private:
  /// Seq-cst throughout: what had ended before a call began also happened before it.
  std::uint64_t now() { return clock_.fetch_add(1); }
  void record(std::uint64_t began, operation done) { calls_.push_back({began, 0, std::move(done)}); }
  /// Parts of one call may come at any moments of it, in their order.
  void end(std::size_t parts) {
    const std::uint64_t ended = now();
    for (std::size_t i = calls_.size() - parts; i < calls_.size(); ++i)
      calls_[i].ended = ended;
  }

  void match() {
    prompt_.resize(1 + random_.below(longest));
    for (token_id& token : prompt_)
      token = static_cast<token_id>(random_.below(std::uint32_t{4}) / 3);
    table_.resize(prompt_.size());
    const std::uint64_t began = now();
    const shared_match hit = cache_.match(prompt_, {}, table_);
    table_.resize(hit.blocks);
    committed_ = hit.blocks;
    end_ = hit.end;
    record(began, {.what = operation::kind::match, .path = prompt_, .given = table_});
    end(1);
    if (table_.size() == prompt_.size()) ending_ = true;
    private_.assign(table_.size(), false);
  }

  void allocate() {
    std::array<block_id, 1> one{};
    const std::uint64_t began = now();
    const bool got = cache_.try_allocate(one, shard_id{random_.below(std::uint32_t{2})}).has_value();
    record(began, {.what = operation::kind::reserve, .succeeded = got});
    if (got) record(began, {.what = operation::kind::hold, .block = one[0]});
    end(got ? 2 : 1);
    if (got) {
      table_.push_back(one[0]);
      private_.push_back(true);
    } else {
      ending_ = true;
      if (table_.empty()) forget();
    }
  }

  void commit() {
    const std::uint64_t began = now();
    const auto done = cache_.commit(end_, std::span(prompt_).subspan(committed_, 1),
                                    std::span(table_).subspan(committed_, 1));
    if (!done) {  // the chain went on behind a block of somebody else's, which has been evicted since
      sound_ = sound_ && done.code() == errc::stale_handle && borrowed_;
      ending_ = true;
      return;
    }
    const std::vector<token_id> path(prompt_.begin(),
                                     prompt_.begin() + static_cast<std::ptrdiff_t>(committed_) + 1);
    record(began, {.what = operation::kind::commit,
                   .path = path,
                   .block = table_[committed_],
                   .succeeded = done->registered == 1});
    end(1);
    borrowed_ = done->duplicates == 1;
    private_[committed_] = done->duplicates == 1;
    end_ = done->end;
    ++committed_;
  }

  void release() {
    if (table_.empty()) return forget();
    const std::uint64_t began = now();
    sound_ = sound_ &&
             cache_.release(std::span(table_).last(1), shard_id{random_.below(std::uint32_t{2})}).has_value();
    record(began, {.what = operation::kind::release, .block = table_.back()});
    if (private_.back()) record(began, {.what = operation::kind::become_free});
    end(private_.back() ? 2 : 1);
    table_.pop_back();
    private_.pop_back();
    if (table_.empty()) forget();
  }

  void forget() {
    prompt_.clear();
    ending_ = borrowed_ = false;
  }

  void evict() {
    block_id victim = null_block;
    const std::uint64_t began = now();
    cache_.evict(1, {}, [&](std::span<const block_id> gone) noexcept { victim = gone[0]; });
    if (victim == null_block) return;  // it met none: no promise
    record(began, {.what = operation::kind::evict, .block = victim});
    record(began, {.what = operation::kind::become_free});
    end(2);
  }

  shared_prefix_cache<tiny_traits>& cache_;
  std::atomic<std::uint64_t>& clock_;
  random_numbers random_;
  std::vector<timed<operation>> calls_;
  std::vector<token_id> prompt_;
  std::vector<block_id> table_;
  std::vector<bool> private_;  // by entry of the table
  std::size_t committed_ = 0;
  chain_end end_{};
  bool ending_ = false;
  bool borrowed_ = false;
  bool sound_ = true;
};

}  // namespace

TEST_CASE("some order of the threads' calls would show what the threads see of a shared cache") {
  std::uint64_t concurrent = 0;
  for (const auto seed : seeds(600)) {
    CAPTURE(seed);
    shared_prefix_cache<tiny_traits> cache({.blocks = blocks, .block_tokens = 1, .shards = 2});
    std::atomic<std::uint64_t> clock{0};
    std::vector<tiny_engine> engines;
    const std::size_t count = 2 + seed % 2;
    for (std::size_t t = 0; t < count; ++t)
      engines.emplace_back(cache, clock, seed * 8 + t);
    std::atomic<std::size_t> ready{0};
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < count; ++t) {
      threads.emplace_back([&, t] {
        giving_way::seed(seed * 8 + t);
        ++ready;
        while (ready.load() < count)
          std::this_thread::yield();
        for (int i = 0; i < 24; ++i)
          engines[t].step();
      });
    }
    for (std::thread& each : threads)
      each.join();
    std::vector<std::vector<timed<operation>>> calls;
    for (const tiny_engine& each : engines) {
      CHECK(each.is_sound());
      calls.push_back(each.calls());
      for (const auto& call : each.calls())
        concurrent += call.ended - call.began > 1 ? 1 : 0;
    }
    linearization<tiny_cache, operation, decltype(&apply)> order(calls, &apply);
    REQUIRE(order.exists({}));
    CHECK(cache.audit() == std::vector<std::string>{});
  }
  CHECK(concurrent > 500);  // else nothing was tested
}

TEST_CASE("the checker accepts possible histories and refuses impossible ones") {
  using kind = operation::kind;
  const auto order_exists = [](const std::vector<std::vector<timed<operation>>>& calls) {
    return linearization<tiny_cache, operation, decltype(&apply)>(calls, &apply).exists({});
  };
  const operation commit{.what = kind::commit, .path = {1}, .block = block_id{2}, .succeeded = true};
  const operation hit{.what = kind::match, .path = {1, 1}, .given = {block_id{2}}};
  const operation miss{.what = kind::match, .path = {1, 1}};
  CHECK(order_exists({{{0, 1, commit}}, {{2, 3, hit}}}));
  CHECK_FALSE(order_exists({{{0, 1, commit}}, {{2, 3, miss}}}));
  CHECK_FALSE(order_exists({{{2, 3, commit}}, {{0, 1, hit}}}));
  CHECK(order_exists({{{0, 3, commit}}, {{1, 2, miss}}}));
  CHECK(order_exists({{{0, 3, commit}}, {{1, 2, hit}}}));
  // Seen by one, then not by another that began later.
  CHECK_FALSE(order_exists({{{0, 9, commit}}, {{1, 2, hit}}, {{3, 4, miss}}}));
  CHECK(order_exists({{{0, 9, commit}}, {{3, 4, hit}}, {{1, 2, miss}}}));
  // Evicted while it is held.
  CHECK_FALSE(
      order_exists({{{0, 1, commit}, {2, 3, hit}, {4, 5, {.what = kind::evict, .block = block_id{2}}}}}));
}
