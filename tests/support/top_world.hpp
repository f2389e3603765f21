/// @file
/// Scores of any kind, with many that are equal, and the choice among them by sorting.
#pragma once

#include <llmmem/kernels/select_top.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace llmmem_tests {

struct top_world {
  std::uint64_t rows = 0;
  std::uint64_t stride = 0;
  std::uint32_t candidates = 0;
  std::uint32_t k = 0;
  std::vector<float> scores{};
  std::vector<std::int32_t> counts{};   // empty: all
  std::vector<std::int32_t> numbers{};  // empty: places

  explicit top_world(std::mt19937_64& random, bool has_places = false) {
    rows = 1 + random() % 4;
    candidates = static_cast<std::uint32_t>(random() % 5 == 0 ? random() % 3 : random() % 700);
    stride = candidates + random() % 3;
    k = static_cast<std::uint32_t>(1 + (random() % 3 == 0 ? random() % 800 : random() % 40));
    const std::uint64_t kind = random() % 4;
    for (std::uint64_t i = 0; i < rows * stride; ++i)
      scores.push_back(draw(random, kind));
    if (random() % 2 == 0) {
      for (std::uint64_t row = 0; row < rows; ++row)
        counts.push_back(
            static_cast<std::int32_t>(random() % 9 == 0 ? -1 : static_cast<std::int64_t>(random() % 800)));
    }
    if (has_places || random() % 2 == 0) return;
    for (std::uint64_t row = 0; row < rows; ++row) {
      std::vector<std::int32_t> all(stride);
      for (std::size_t i = 0; i < all.size(); ++i)
        all[i] = static_cast<std::int32_t>(i * 3) +
                 (random() % 9 == 0 ? std::numeric_limits<std::int32_t>::min() : 0);
      std::shuffle(all.begin(), all.end(), random);
      numbers.insert(numbers.end(), all.begin(), all.end());
    }
  }

  [[nodiscard]] std::uint32_t count(std::uint64_t row) const {
    if (counts.empty()) return candidates;
    return static_cast<std::uint32_t>(std::clamp<std::int64_t>(counts[row], 0, candidates));
  }

  [[nodiscard]] llmmem::top_scores view() const {
    return {.scores = scores.data(),
            .rows = rows,
            .stride = stride,
            .candidates = candidates,
            .counts = counts.empty() ? nullptr : counts.data(),
            .numbers = numbers.empty() ? nullptr : numbers.data()};
  }

  template <class Run>
  [[nodiscard]] std::vector<std::int32_t> select(const Run& run, llmmem::top_order order) const {
    std::vector<std::int32_t> out(rows * k, -7);
    std::vector<std::byte> workspace(llmmem::select_top_workspace_bytes(view(), k, order));
    llmmem::select_top(run, view(), k, out.data(), k, order, workspace).value();
    return out;
  }

  /// By sorting.
  [[nodiscard]] std::vector<std::int32_t> expected(llmmem::top_order order) const {
    std::vector<std::int32_t> out;
    for (std::uint64_t row = 0; row < rows; ++row) {
      struct candidate {
        float score;
        std::int32_t number;
      };
      std::vector<candidate> all;
      for (std::uint32_t i = 0; i < count(row); ++i) {
        const float score = scores[row * stride + i];
        const std::int32_t number =
            numbers.empty() ? static_cast<std::int32_t>(i) : numbers[row * stride + i];
        if (std::isnan(score) || score == -std::numeric_limits<float>::infinity() || number < 0) continue;
        all.push_back({score, number});
      }
      std::ranges::sort(all, [](const candidate& a, const candidate& b) {
        return a.score != b.score ? a.score > b.score : a.number < b.number;
      });
      if (all.size() > k) all.resize(k);
      if (order == llmmem::top_order::by_number) std::ranges::sort(all, {}, &candidate::number);
      for (std::size_t i = 0; i < k; ++i)
        out.push_back(i < all.size() ? all[i].number : -1);
    }
    return out;
  }

 private:
  static float draw(std::mt19937_64& random, std::uint64_t kind) {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    if (kind == 0) return std::bit_cast<float>(static_cast<std::uint32_t>(random()));  // any float
    if (kind == 1) return static_cast<float>(random() % 4);                            // mostly equal
    if (kind == 2) return random() % 3 == 0 ? (random() % 2 == 0 ? 0.0F : -0.0F) : -infinity;
    return static_cast<float>(static_cast<std::int64_t>(random() % 2001) - 1000) / 64;
  }
};

}  // namespace llmmem_tests
