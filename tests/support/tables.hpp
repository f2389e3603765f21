/// @file
/// Matrices of floats and what a transformer does with them, written as their definitions: for models that
/// tests cut into parts.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace llmmem_tests {

/// Rows by columns, row-major.
struct table {
  std::size_t rows = 0;
  std::size_t columns = 0;
  std::vector<float> values{};

  table() = default;
  table(std::size_t r, std::size_t c) : rows(r), columns(c), values(r * c) {}
  table(std::size_t r, std::size_t c, std::span<const float> from)
      : rows(r), columns(c), values(from.begin(), from.end()) {}
  float& at(std::size_t r, std::size_t c) { return values[r * columns + c]; }
  [[nodiscard]] float at(std::size_t r, std::size_t c) const { return values[r * columns + c]; }
  [[nodiscard]] std::span<std::byte> bytes() { return std::as_writable_bytes(std::span(values)); }
};

inline table transposed(const table& a) {
  table made(a.columns, a.rows);
  for (std::size_t r = 0; r < a.rows; ++r) {
    for (std::size_t c = 0; c < a.columns; ++c)
      made.at(c, r) = a.at(r, c);
  }
  return made;
}

inline table product(const table& a, const table& b) {
  table made(a.rows, b.columns);
  for (std::size_t r = 0; r < a.rows; ++r) {
    for (std::size_t k = 0; k < a.columns; ++k) {
      for (std::size_t c = 0; c < b.columns; ++c)
        made.at(r, c) += a.at(r, k) * b.at(k, c);
    }
  }
  return made;
}

inline table sum(table a, const table& b) {
  for (std::size_t i = 0; i < a.values.size(); ++i)
    a.values[i] += b.values[i];
  return a;
}

inline table with_bias(table a, const table& bias) {
  for (std::size_t i = 0; i < a.values.size(); ++i)
    a.values[i] += bias.values[i % a.columns];
  return a;
}

inline table column_sums(const table& a) {
  table made(a.columns, 1);
  for (std::size_t i = 0; i < a.values.size(); ++i)
    made.values[i % a.columns] += a.values[i];
  return made;
}

struct norm_row {
  float mean = 0;
  float inverse = 0;
};

inline norm_row statistics(const table& x, std::size_t r) {
  const auto n = static_cast<float>(x.columns);
  norm_row of;
  float variance = 0;
  for (std::size_t c = 0; c < x.columns; ++c)
    of.mean += x.at(r, c) / n;
  for (std::size_t c = 0; c < x.columns; ++c)
    variance += (x.at(r, c) - of.mean) * (x.at(r, c) - of.mean) / n;
  of.inverse = 1 / std::sqrt(variance + 1e-5F);
  return of;
}

inline table norm(const table& x, const table& scale, const table& shift) {
  table y(x.rows, x.columns);
  for (std::size_t r = 0; r < x.rows; ++r) {
    const norm_row of = statistics(x, r);
    for (std::size_t c = 0; c < x.columns; ++c)
      y.at(r, c) = (x.at(r, c) - of.mean) * of.inverse * scale.values[c] + shift.values[c];
  }
  return y;
}

inline table norm_backward(const table& dy, const table& x, const table& scale) {
  table dx(x.rows, x.columns);
  const auto n = static_cast<float>(x.columns);
  for (std::size_t r = 0; r < x.rows; ++r) {
    const norm_row of = statistics(x, r);
    float all = 0;
    float along = 0;
    for (std::size_t c = 0; c < x.columns; ++c) {
      const float g = dy.at(r, c) * scale.values[c];
      all += g / n;
      along += g * (x.at(r, c) - of.mean) * of.inverse / n;
    }
    for (std::size_t c = 0; c < x.columns; ++c) {
      const float g = dy.at(r, c) * scale.values[c];
      dx.at(r, c) = (g - all - (x.at(r, c) - of.mean) * of.inverse * along) * of.inverse;
    }
  }
  return dx;
}

inline table gelu(table x) {
  for (float& v : x.values)
    v = 0.5F * v * (1 + std::tanh(0.7978845608F * (v + 0.044715F * v * v * v)));
  return x;
}

inline table gelu_backward(table dy, const table& x) {
  for (std::size_t i = 0; i < dy.values.size(); ++i) {
    const float v = x.values[i];
    const float t = std::tanh(0.7978845608F * (v + 0.044715F * v * v * v));
    dy.values[i] *= 0.5F * (1 + t) + 0.5F * v * (1 - t * t) * 0.7978845608F * (1 + 3 * 0.044715F * v * v);
  }
  return dy;
}

/// Causal attention of the heads that lie in `q`, `k` and `v`; one sequence.
struct attention {
  table q, k, v;
  std::size_t head_width;
  std::vector<table> likely{};

  table forward() {
    table y(q.rows, q.columns);
    const float scale = 1 / std::sqrt(static_cast<float>(head_width));
    for (std::size_t first = 0; first < q.columns; first += head_width) {
      table p(q.rows, q.rows);
      for (std::size_t i = 0; i < q.rows; ++i) {
        float all = 0;
        for (std::size_t j = 0; j <= i; ++j) {
          float dot = 0;
          for (std::size_t c = first; c < first + head_width; ++c)
            dot += q.at(i, c) * k.at(j, c);
          p.at(i, j) = std::exp(dot * scale);
          all += p.at(i, j);
        }
        for (std::size_t j = 0; j <= i; ++j) {
          p.at(i, j) /= all;
          for (std::size_t c = first; c < first + head_width; ++c)
            y.at(i, c) += p.at(i, j) * v.at(j, c);
        }
      }
      likely.push_back(p);
    }
    return y;
  }

  /// Gradients of q, k and v.
  [[nodiscard]] std::vector<table> backward(const table& dy) const {
    std::vector<table> to(3, table(q.rows, q.columns));
    const float scale = 1 / std::sqrt(static_cast<float>(head_width));
    for (std::size_t first = 0; first < q.columns; first += head_width) {
      const table& p = likely[first / head_width];
      for (std::size_t i = 0; i < q.rows; ++i) {
        std::vector<float> dp(i + 1);
        float all = 0;
        for (std::size_t j = 0; j <= i; ++j) {
          for (std::size_t c = first; c < first + head_width; ++c) {
            dp[j] += dy.at(i, c) * v.at(j, c);
            to[2].at(j, c) += p.at(i, j) * dy.at(i, c);
          }
          all += p.at(i, j) * dp[j];
        }
        for (std::size_t j = 0; j <= i; ++j) {
          const float ds = p.at(i, j) * (dp[j] - all) * scale;
          for (std::size_t c = first; c < first + head_width; ++c) {
            to[0].at(i, c) += ds * k.at(j, c);
            to[1].at(j, c) += ds * q.at(i, c);
          }
        }
      }
    }
    return to;
  }
};

inline float difference(const table& a, const table& b) {
  REQUIRE(a.values.size() == b.values.size());
  float most = 0;
  for (std::size_t i = 0; i < a.values.size(); ++i)
    most = std::max(most, std::abs(a.values[i] - b.values[i]));
  return most;
}

inline table rows_of(const table& all, std::uint32_t part, std::uint32_t parts) {
  const std::size_t rows = all.rows / parts;
  return table(rows, all.columns,
               std::span<const float>(all.values).subspan(part * rows * all.columns, rows * all.columns));
}

/// A copy of its bytes.
inline std::vector<std::byte> bytes_of(const table& all) {
  const auto bytes = std::as_bytes(std::span(all.values));
  return {bytes.begin(), bytes.end()};
}

}  // namespace llmmem_tests
