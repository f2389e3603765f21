/// @file
/// The bodies of Muon's phases on an executor.
#pragma once

#include <llmmem/kernels/detail/exact_sum_work.hpp>
#include <llmmem/kernels/detail/muon_body.hpp>
#include <llmmem/kernels/detail/optimizer_step_body.hpp>
#include <llmmem/kernels/items.hpp>
#include <llmmem/kernels/muon_phases.hpp>

#include <cstring>

namespace llmmem {
inline namespace v0 {
namespace detail {

[[nodiscard]] inline bool are_aligned(const void* a, const void* b = nullptr,
                                      const void* c = nullptr) noexcept {
  const auto bits = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p); };
  return (bits(a) | bits(b) | bits(c)) % 16 == 0;
}

class muon_momentum_work {
 public:
  muon_momentum_work(std::span<const float> gradients, std::span<float> momentum, std::span<float> updates,
                     const muon_hyper& by) noexcept
      : gradients_(reinterpret_cast<const std::byte*>(gradients.data())),
        momentum_(reinterpret_cast<std::byte*>(momentum.data())),
        updates_(reinterpret_cast<std::byte*>(updates.data())),
        count_(gradients.size()),
        keep_(static_cast<float>(by.momentum)),
        share_(static_cast<float>(1 - by.momentum)),
        scale_(by.gradient_scale),
        is_wide_(are_aligned(gradients.data(), momentum.data(), updates.data())) {}
  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return (count_ + 3) / 4; }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    const std::uint64_t first = item * 4;
    const std::uint64_t count = count_ - first < 4 ? count_ - first : 4;
    const bool is_complete = is_wide_ && count == 4;
    float g[4];
    float m[4];
    float u[4];
    load_elements(g, gradients_ + first * 4, count, is_complete);
    load_elements(m, momentum_ + first * 4, count, is_complete);
    LLMMEM_UNROLL
    for (unsigned i = 0; i < 4; ++i)
      muon_rule(m[i], u[i], g[i], keep_, share_, scale_);
    store_elements(m, momentum_ + first * 4, count, is_complete);
    store_elements(u, updates_ + first * 4, count, is_complete);
  }

 private:
  const std::byte* gradients_;
  std::byte* momentum_;
  std::byte* updates_;
  std::uint64_t count_;
  float keep_;
  float share_;
  float scale_;
  bool is_wide_;
};

class muon_apply_work {
 public:
  muon_apply_work(std::span<float> weights, std::span<const float> updates, float keep, float size) noexcept
      : weights_(reinterpret_cast<std::byte*>(weights.data())),
        updates_(reinterpret_cast<const std::byte*>(updates.data())),
        count_(weights.size()),
        keep_(keep),
        size_(size),
        is_wide_(are_aligned(weights.data(), updates.data())) {}
  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return (count_ + 3) / 4; }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    const std::uint64_t first = item * 4;
    const std::uint64_t count = count_ - first < 4 ? count_ - first : 4;
    const bool is_complete = is_wide_ && count == 4;
    float w[4];
    float u[4];
    load_elements(w, weights_ + first * 4, count, is_complete);
    load_elements(u, updates_ + first * 4, count, is_complete);
    LLMMEM_UNROLL
    for (unsigned i = 0; i < 4; ++i)
      w[i] = settled(unfused(keep_, w[i]) - unfused(size_, u[i]));
    store_elements(w, weights_ + first * 4, count, is_complete);
  }

 private:
  std::byte* weights_;
  const std::byte* updates_;
  std::uint64_t count_;
  float keep_;
  float size_;
  bool is_wide_;
};

/// The words of a sum, for memory that is aligned to floats only.
struct sum_words {
  static constexpr unsigned count = sizeof(unordered_sum) / sizeof(float);

  static LLMMEM_HD void store(float* to, const unordered_sum& sum) noexcept {
    float words[count];
    memcpy(words, &sum, sizeof(sum));
    LLMMEM_UNROLL
    for (unsigned i = 0; i < count; ++i)
      to[i] = words[i];
  }
  [[nodiscard]] static LLMMEM_HD unordered_sum load(const float* from) noexcept {
    float words[count];
    LLMMEM_UNROLL
    for (unsigned i = 0; i < count; ++i)
      words[i] = from[i];
    unordered_sum sum;
    memcpy(static_cast<void*>(&sum), words, sizeof(sum));
    return sum;
  }
};

/// The sum of a band's squares.
class muon_square_work : public exact_sum_work {
 public:
  muon_square_work(const float* matrix, std::uint64_t count, std::uint64_t bands, float* sums) noexcept
      : matrix_(matrix), count_(count), bands_(bands), each_((count + bands - 1) / bands), sums_(sums) {}
  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return bands_; }
  [[nodiscard]] LLMMEM_HD held take(std::uint64_t item, group_lane lane) const noexcept {
    const std::uint64_t begin = item * each_;
    const std::uint64_t end = begin + each_ < count_ ? begin + each_ : count_;
    unordered_sum sum;
    for (std::uint64_t i = begin + lane.lane; i < end; i += lane.lanes)
      sum.add_square(matrix_[i]);
    return sum;
  }
  LLMMEM_HD void give(std::uint64_t item, group_lane lane, const held& /*mine*/,
                      const partial& all) const noexcept {
    if (lane.lane == 0) sum_words::store(sums_ + item * sum_words::count, all);
  }

 private:
  const float* matrix_;
  std::uint64_t count_;
  std::uint64_t bands_;
  std::uint64_t each_;
  float* sums_;
};

/// The divisor of a matrix, from the sums of bands.
class muon_norm_work : public exact_sum_work {
 public:
  muon_norm_work(const float* sums, std::uint64_t bands, double epsilon, float* divisor) noexcept
      : sums_(sums), bands_(bands), epsilon_(epsilon), divisor_(divisor) {}
  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return 1; }
  [[nodiscard]] LLMMEM_HD held take(std::uint64_t /*item*/, group_lane lane) const noexcept {
    unordered_sum sum;
    for (std::uint64_t i = lane.lane; i < bands_; i += lane.lanes)
      sum.merge(sum_words::load(sums_ + i * sum_words::count));
    return sum;
  }
  LLMMEM_HD void give(std::uint64_t /*item*/, group_lane lane, const held& /*mine*/,
                      const partial& all) const noexcept {
    if (lane.lane == 0) *divisor_ = muon_divisor(all, epsilon_);
  }

 private:
  const float* sums_;
  std::uint64_t bands_;
  double epsilon_;
  float* divisor_;
};

/// Copies a matrix, or transposes it, in tiles of 4 x 4; divides its elements, or settles their NaNs.
class muon_turn_work {
 public:
  struct options {
    bool transposes = false;
    const float* divisor = nullptr;
    bool settles = false;
  };

  muon_turn_work(float* to, const float* from, std::uint64_t rows, std::uint64_t columns,
                 const options& how) noexcept
      : to_(to),
        from_(from),
        rows_(rows),
        columns_(columns),
        tiles_(static_cast<std::uint32_t>((columns + 3) / 4)),
        how_(how),
        is_wide_from_(columns % 4 == 0 && are_aligned(from)),
        is_wide_to_((how.transposes ? rows : columns) % 4 == 0 && are_aligned(to)) {}
  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return (rows_ + 3) / 4 * tiles_; }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    const std::uint32_t tile = static_cast<std::uint32_t>(item) / tiles_;
    const std::uint64_t row = std::uint64_t{tile} * 4;
    const std::uint64_t column = std::uint64_t{static_cast<std::uint32_t>(item) - tile * tiles_} * 4;
    const std::uint64_t rows = rows_ - row < 4 ? rows_ - row : 4;
    const std::uint64_t columns = columns_ - column < 4 ? columns_ - column : 4;
    const float by = how_.divisor != nullptr ? *how_.divisor : 1.0F;
    float x[4][4];
    LLMMEM_UNROLL
    for (unsigned i = 0; i < 4; ++i) {
      const std::uint64_t at = (i < rows ? row + i : row) * columns_ + column;
      load_elements(x[i], reinterpret_cast<const std::byte*>(from_ + at), columns,
                    is_wide_from_ && columns == 4);
      LLMMEM_UNROLL
      for (float& each : x[i]) {
        if (how_.divisor != nullptr) each = quotient_of(each, by);
        if (how_.settles) each = settled(each);
      }
    }
    LLMMEM_UNROLL
    for (unsigned i = 0; i < 4; ++i) {
      float out[4];
      LLMMEM_UNROLL
      for (unsigned j = 0; j < 4; ++j)
        out[j] = how_.transposes ? x[j][i] : x[i][j];
      if (i >= (how_.transposes ? columns : rows)) continue;
      const std::uint64_t at = how_.transposes ? (column + i) * rows_ + row : (row + i) * columns_ + column;
      const std::uint64_t count = how_.transposes ? rows : columns;
      store_elements(out, reinterpret_cast<std::byte*>(to_ + at), count, is_wide_to_ && count == 4);
    }
  }

 private:
  float* to_;
  const float* from_;
  std::uint64_t rows_;
  std::uint64_t columns_;
  std::uint32_t tiles_;
  options how_;
  bool is_wide_from_;
  bool is_wide_to_;
};

/// to = left x right, or `start` * from + `size` * (left x right).
class muon_product_work {
 public:
  struct matrices {
    float* to = nullptr;
    const float* left = nullptr;
    const float* right = nullptr;
    std::uint64_t rows = 0;
    std::uint64_t inner = 0;
    std::uint64_t columns = 0;
    const float* from = nullptr;  ///< null: the product alone
    float start = 0;
    float size = 1;  ///< not 0
  };

  explicit muon_product_work(const matrices& of) noexcept
      : of_(of),
        tiles_(static_cast<std::uint32_t>((of.columns + 3) / 4)),
        is_wide_(of.columns % 4 == 0 && are_aligned(of.to, of.right, of.from)) {}
  [[nodiscard]] LLMMEM_HD std::uint64_t items() const noexcept { return (of_.rows + 7) / 8 * tiles_; }
  LLMMEM_HD void run(std::uint64_t item) const noexcept {
    const std::uint32_t tile = static_cast<std::uint32_t>(item) / tiles_;
    const std::uint64_t row = std::uint64_t{tile} * 8;
    const std::uint64_t column = std::uint64_t{static_cast<std::uint32_t>(item) - tile * tiles_} * 4;
    const std::uint64_t rows = of_.rows - row < 8 ? of_.rows - row : 8;
    const std::uint64_t columns = of_.columns - column < 4 ? of_.columns - column : 4;
    const bool is_complete = is_wide_ && columns == 4;
    const float* left[8];
    float sum[8][4];
    LLMMEM_UNROLL
    for (unsigned i = 0; i < 8; ++i) {
      left[i] = of_.left + (i < rows ? row + i : row) * of_.inner;  // of a row that exists
      LLMMEM_UNROLL
      for (float& each : sum[i])
        each = 0;
    }
    const auto* right = reinterpret_cast<const std::byte*>(of_.right + column);
    for (std::uint64_t k = 0; k < of_.inner; ++k, right += of_.columns * 4) {
      float b[4];
      load_elements(b, right, columns, is_complete);
      LLMMEM_UNROLL
      for (unsigned i = 0; i < 8; ++i) {
        const float a = left[i][k];
        LLMMEM_UNROLL
        for (unsigned j = 0; j < 4; ++j)
          sum[i][j] += unfused(a, b[j]);
      }
    }
    LLMMEM_UNROLL
    for (unsigned i = 0; i < 8; ++i) {
      if (i >= rows) continue;
      const std::uint64_t at = (row + i) * of_.columns + column;
      if (of_.from != nullptr) {
        float start[4];
        load_elements(start, reinterpret_cast<const std::byte*>(of_.from + at), columns, is_complete);
        LLMMEM_UNROLL
        for (unsigned j = 0; j < 4; ++j)
          sum[i][j] = unfused(of_.start, start[j]) + unfused(of_.size, sum[i][j]);
      }
      store_elements(sum[i], reinterpret_cast<std::byte*>(of_.to + at), columns, is_complete);
    }
  }

 private:
  matrices of_;
  std::uint32_t tiles_;
  bool is_wide_;
};

/// Bands whose squares are added together: as many as scratch has sums for, up to this.
inline constexpr std::uint64_t most_muon_bands = 1024;

}  // namespace detail

template <class Run>
result<void> muon_momentum(const Run& run, std::span<const float> gradients, std::span<float> momentum,
                           std::span<float> updates, const muon_hyper& hyper) {
  constexpr const char* who = "muon_momentum";
  if (auto fits = detail::check_lengths(gradients.size(), momentum.size(), who); !fits) return fits;
  if (auto fits = detail::check_lengths(gradients.size(), updates.size(), who); !fits) return fits;
  return run.each(detail::muon_momentum_work(gradients, momentum, updates, hyper));
}

template <class Run>
result<void> orthogonalize(const Run& run, const muon_shape& shape, std::span<float> matrix,
                           std::span<float> scratch, const muon_hyper& hyper) {
  if (auto fits = detail::check_orthogonalize(shape, matrix.size(), scratch.size()); !fits) return fits;
  const std::uint64_t m = shape.shorter();
  const std::uint64_t n = shape.elements() / m;
  const bool is_tall = shape.rows > shape.columns;
  float* x = scratch.data();
  float* next = x + m * n;
  float* const turned = next + m * n;
  float* const gram = turned + m * n;
  float* const both = gram + m * m;
  // The sums of bands are where the matrices will be, and the divisor is where the second product will be.
  const std::uint64_t bands =
      std::min({3 * m * n / detail::sum_words::count, (m * n + 1023) / 1024, detail::most_muon_bands});
  float* const divisor = both;
  const detail::muon_square_work squares(matrix.data(), matrix.size(), bands, x);
  const auto turn = [&](float* to, const float* from, std::uint64_t rows, std::uint64_t columns,
                        const detail::muon_turn_work::options& how) {
    return run.each(detail::muon_turn_work(to, from, rows, columns, how));
  };
  if (auto done = run.each(squares); !done) return done;
  if (auto done = run.each(detail::muon_norm_work(x, bands, hyper.epsilon, divisor)); !done) return done;
  if (auto done =
          turn(x, matrix.data(), shape.rows, shape.columns, {.transposes = is_tall, .divisor = divisor});
      !done)
    return done;
  for (int step = 0; step < detail::newton_schulz_steps; ++step) {
    if (auto done = turn(turned, x, m, n, {.transposes = true}); !done) return done;
    const detail::muon_product_work::matrices products[] = {
        {.to = gram, .left = x, .right = turned, .rows = m, .inner = n, .columns = m},
        {.to = both,
         .left = gram,
         .right = gram,
         .rows = m,
         .inner = m,
         .columns = m,
         .from = gram,
         .start = -4.775F,
         .size = 2.0315F},
        {.to = next,
         .left = both,
         .right = x,
         .rows = m,
         .inner = m,
         .columns = n,
         .from = x,
         .start = 3.4445F}};
    for (const auto& each : products) {
      if (auto done = run.each(detail::muon_product_work(each)); !done) return done;
    }
    std::swap(x, next);
  }
  return turn(matrix.data(), x, m, n, {.transposes = is_tall, .settles = true});
}

template <class Run>
result<void> muon_apply(const Run& run, const muon_shape& shape, std::span<float> weights,
                        std::span<const float> updates, const muon_hyper& hyper) {
  constexpr const char* who = "muon_apply";
  if (auto fits = detail::check_muon(shape, who); !fits) return fits;
  if (auto fits = detail::check_lengths(weights.size(), updates.size(), who); !fits) return fits;
  return run.each(
      detail::muon_apply_work(weights, updates, detail::muon_keep(hyper), detail::muon_size(shape, hyper)));
}

}  // namespace v0
}  // namespace llmmem
