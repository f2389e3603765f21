// How well any eviction policy could order blocks if it knew the statistics of the traffic exactly, but of
// each block only what a policy learns as it serves: uses so far, place in the prompt, length of the prompt,
// last gap between uses, blocks that were new with it, length of the answer.
//
//   reuse_oracle/features/folds   10,000 blocks; `hit_ratio` as in docs/eviction.md
//
// Each idle period of the whole trace, past and future, is counted in a table by features and age: how many
// lasted that long, and how many of them ended in a reuse within the next 10,000 periods. The policy evicts
// the leaf whose chance of that is lowest; a block is a leaf if no cached block continues it. `features` is
// how many of those above count, in that order (0: LRU).
//
// With one fold the table has seen the periods that it predicts, so that many features recognise single
// requests. With ten folds a block's chance comes from the other nine tenths of the requests: what could be
// known of it from endless traffic of the same kind.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <span>
#include <vector>

#include "support/requests.hpp"

namespace {

using llmmem_benchmarks::prompt;

constexpr std::uint64_t cache_blocks = 10'000;
constexpr std::uint64_t horizon = 10'000;  // idle periods
constexpr std::size_t ages = 40;           // two for each doubling of the age, from 64 on

std::uint64_t age_from(std::size_t bin) {
  return bin == 0 ? 0 : static_cast<std::uint64_t>(64 * std::exp2(static_cast<double>(bin - 1) / 2));
}
std::size_t age_bin(std::uint64_t age) {
  if (age < 64) return 0;
  const double bin = 2 * std::log2(static_cast<double>(age) / 64) + 1;
  return std::min(ages - 1, static_cast<std::size_t>(bin));
}

std::uint64_t size_class(std::uint64_t number, std::uint64_t most) {
  return std::min<std::uint64_t>(most - 1, static_cast<std::uint64_t>(std::bit_width(number)));
}

struct block_facts {
  std::uint64_t uses;
  std::uint64_t after_it;  // blocks of the prompt behind it
  std::uint64_t prompt_blocks;
  std::uint64_t gap;  // since its last use, 0 for the first
  std::uint64_t fresh;
  std::uint64_t output_tokens;
};

std::uint64_t class_of(const block_facts& of, int features) {
  std::uint64_t known = 0;
  const auto add = [&](int number, std::uint64_t value, std::uint64_t values) {
    if (features >= number) known = known * values + value;
  };
  add(1, std::min<std::uint64_t>(of.uses, 5) - 1, 5);
  add(2, size_class(of.after_it, 12), 12);
  add(3, size_class(of.prompt_blocks, 9), 9);
  add(4, size_class(of.gap / 2'000, 6), 6);
  add(5, size_class(of.fresh, 6), 6);
  add(6, size_class(of.output_tokens / 64, 6), 6);
  return known;
}

using chances = std::array<double, ages>;

/// Every idle period of the trace, and what follows from them.
class reuse_table {
 public:
  reuse_table(int features, std::uint64_t folds) : folds_(folds), of_fold_(folds) {
    struct block {
      std::uint64_t uses = 0;
      std::uint64_t idle_since = 0;
      std::uint64_t known = 0;
      std::uint64_t fold = 0;
    };
    const auto& all = llmmem_benchmarks::requests();
    std::vector<block> blocks(all.distinct_blocks());
    std::uint64_t now = 0;
    classes_.resize(all.size());
    for (std::size_t i = 0; i < all.size(); ++i) {
      const std::span<const std::uint32_t> numbers = all[i].numbers;
      std::uint64_t fresh = 0;
      for (const std::uint32_t number : numbers) {
        const block& each = blocks[number];
        fresh += each.uses == 0 ? 1 : 0;
        if (each.uses != 0) periods_.push_back({each.known, each.fold, each.idle_since, now});
      }
      classes_[i].resize(numbers.size());
      for (std::size_t at = numbers.size(); at-- > 0;) {
        block& each = blocks[numbers[at]];
        const std::uint64_t gap = each.uses == 0 ? 0 : now - each.idle_since;
        each = {each.uses + 1, now++, 0, fold_of(i)};
        each.known = class_of(
            {each.uses, numbers.size() - 1 - at, numbers.size(), gap, fresh, all[i].output_tokens}, features);
        classes_[i][at] = each.known;
      }
    }
    for (const block& each : blocks)
      if (each.uses != 0) periods_.push_back({each.known, each.fold, each.idle_since, never});
    for (std::uint64_t fold = 0; fold < folds; ++fold)
      fit(fold, now);
  }

  /// The chances of a reuse, by age, of the block at a place of a request.
  [[nodiscard]] const chances& of(std::size_t request, std::size_t place) const {
    static constexpr chances unknown{};
    const auto& table = of_fold_[fold_of(request)];
    const auto found = table.find(classes_[request][place]);
    return found == table.end() ? unknown : found->second;
  }
  [[nodiscard]] std::size_t classes() const { return of_fold_[0].size(); }

 private:
  static constexpr std::uint64_t never = std::numeric_limits<std::uint64_t>::max();
  struct period {
    std::uint64_t known;
    std::uint64_t fold;
    std::uint64_t begin;
    std::uint64_t end;
  };

  [[nodiscard]] std::uint64_t fold_of(std::size_t request) const {
    return (request * 2'654'435'761U >> 7) % folds_;
  }

  void fit(std::uint64_t fold, std::uint64_t now) {
    struct count {
      std::array<double, ages> lasted{};
      std::array<double, ages> reused{};
    };
    std::map<std::uint64_t, count> counts;
    for (const period& each : periods_) {
      if (folds_ > 1 && each.fold == fold) continue;
      count& into = counts[each.known];
      for (std::size_t bin = 0; bin < ages; ++bin) {
        const std::uint64_t age = age_from(bin);
        const bool is_open = each.end == never;
        if (is_open ? each.begin + age + horizon > now : each.end - each.begin <= age) break;
        into.lasted[bin] += 1;
        into.reused[bin] += !is_open && each.end - each.begin <= age + horizon ? 1 : 0;
      }
    }
    for (const auto& [known, counted] : counts) {
      chances& chance = of_fold_[fold][known];
      double last = 0;
      for (std::size_t bin = 0; bin < ages; ++bin) {
        if (counted.lasted[bin] > 0) last = counted.reused[bin] / counted.lasted[bin];
        chance[bin] = last;
      }
    }
  }

  std::uint64_t folds_;
  std::vector<std::vector<std::uint64_t>> classes_;  // by request and place
  std::vector<period> periods_;
  std::vector<std::map<std::uint64_t, chances>> of_fold_;
};

/// A cache of prefixes that evicts the leaf with the lowest chance of a reuse, the longest idle among equals.
class oracle_cache {
 public:
  explicit oracle_cache(std::size_t distinct) : blocks_(distinct) {}

  /// Serves one request; returns how many leading blocks were cached.
  std::uint64_t serve(std::span<const std::uint32_t> numbers, const auto& chance_at) {
    std::size_t hits = 0;
    while (hits < numbers.size() && blocks_[numbers[hits]].is_cached)
      ++hits;
    for (const std::uint32_t number : numbers) {
      blocks_[number].is_used = blocks_[number].is_cached;
      unlist(number);
    }
    std::uint32_t parent = none;
    for (const std::uint32_t number : numbers) {
      block& each = blocks_[number];
      if (!each.is_cached) {
        if (cached_ == cache_blocks && !evict()) break;
        each.is_cached = each.is_used = true;
        each.parent = parent;
        ++cached_;
        if (parent != none) ++blocks_[parent].children;
      }
      parent = number;
    }
    for (std::size_t at = numbers.size(); at-- > 0;) {
      block& each = blocks_[numbers[at]];
      const std::uint64_t now = now_++;
      if (!each.is_cached) continue;
      each.is_used = false;
      each.idle_since = now;
      each.chance = chance_at(at);
      if (each.children == 0) list(numbers[at]);
    }
    return hits;
  }

 private:
  static constexpr std::uint32_t none = std::numeric_limits<std::uint32_t>::max();
  struct block {
    bool is_cached = false;
    bool is_used = false;
    std::uint32_t parent = none;
    std::uint32_t children = 0;
    std::uint32_t listed = none;
    std::uint64_t idle_since = 0;
    const chances* chance = nullptr;
  };

  void list(std::uint32_t number) {
    blocks_[number].listed = static_cast<std::uint32_t>(leaves_.size());
    leaves_.push_back(number);
  }
  void unlist(std::uint32_t number) {
    const std::uint32_t at = blocks_[number].listed;
    if (at == none) return;
    leaves_[at] = leaves_.back();
    blocks_[leaves_[at]].listed = at;
    leaves_.pop_back();
    blocks_[number].listed = none;
  }
  bool evict() {
    std::uint32_t victim = none;
    double lowest = 2;
    for (const std::uint32_t leaf : leaves_) {
      const block& each = blocks_[leaf];
      const double chance = each.chance == nullptr ? 0 : (*each.chance)[age_bin(now_ - each.idle_since)];
      if (chance > lowest) continue;
      if (chance == lowest && blocks_[victim].idle_since < each.idle_since) continue;
      victim = leaf;
      lowest = chance;
    }
    if (victim == none) return false;
    unlist(victim);
    block& gone = blocks_[victim];
    gone.is_cached = false;
    --cached_;
    if (gone.parent == none) return true;
    block& parent = blocks_[gone.parent];
    if (--parent.children == 0 && parent.is_cached && !parent.is_used) list(gone.parent);
    return true;
  }

  std::vector<block> blocks_;
  std::vector<std::uint32_t> leaves_;
  std::uint64_t cached_ = 0;
  std::uint64_t now_ = 0;
};

void reuse_oracle(benchmark::State& state) {
  const auto& all = llmmem_benchmarks::requests();
  const int features = static_cast<int>(state.range(0));
  double hits = 0;
  std::size_t classes = 0;
  for (auto _ : state) {
    const reuse_table table(features, static_cast<std::uint64_t>(state.range(1)));
    oracle_cache cache(all.distinct_blocks());
    hits = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      hits += static_cast<double>(cache.serve(
          all[i].numbers, [&](std::size_t at) { return features == 0 ? nullptr : &table.of(i, at); }));
    }
    classes = table.classes();
  }
  state.counters["hit_ratio"] = hits / static_cast<double>(all.block_refs());
  state.counters["classes"] = static_cast<double>(classes);
}

BENCHMARK(reuse_oracle)
    ->ArgNames({"features", "folds"})
    ->ArgsProduct({{0}, {1}})
    ->ArgsProduct({{1, 2, 3, 4, 5, 6}, {1, 10}})
    ->Iterations(1)
    ->Unit(benchmark::kSecond);

}  // namespace
