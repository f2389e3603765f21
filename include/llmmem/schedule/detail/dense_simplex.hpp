/// @file
/// Linear programs with a few variables.
#pragma once

#include <llmmem/config.hpp>

#include <cstddef>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// `sum of coefficients[j] x[j] <= bound`.
struct linear_row {
  std::vector<double> coefficients{};
  double bound = 0;
};

/// Maximises a linear function of x >= 0 under rows, by the simplex method on a dense dictionary: each basic
/// variable is `bound - sum of a x` over the other variables. Bland's rule (least index enters, least index
/// leaves) prevents cycles. Coefficients and bounds should be near 1, because values below `tolerance` count
/// as 0.
class dense_simplex {
 public:
  static constexpr double tolerance = 1e-11;

  /// Returns the best x, or nothing when no x meets the rows. @pre the function is bounded on them.
  [[nodiscard]] static std::optional<std::vector<double>> maximize(std::span<const double> objective,
                                                                   std::span<const linear_row> rows) {
    dense_simplex program(objective.size(), rows);
    if (!program.make_feasible()) return std::nullopt;
    program.set_objective(objective);
    program.climb();
    return program.solution(objective.size());
  }

 private:
  // Variables: the x, then a slack for each row, then the artificial variable that phase 1 drives to 0.
  dense_simplex(std::size_t variables, std::span<const linear_row> rows)
      : artificial_(variables + rows.size()), gain_(variables + 1, 0) {
    for (std::size_t j = 0; j < variables; ++j)
      outside_.push_back(j);
    outside_.push_back(artificial_);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      basic_.push_back(variables + i);
      rows_.push_back(rows[i]);
      rows_.back().coefficients.push_back(-1);
    }
  }

  bool make_feasible() {
    std::size_t worst = rows_.size();
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      if (rows_[i].bound < 0 && (worst == rows_.size() || rows_[i].bound < rows_[worst].bound)) worst = i;
    }
    if (worst != rows_.size()) {
      gain_.back() = -1;  // of the artificial variable, which should be as small as possible
      pivot(worst, outside_.size() - 1);
      climb();
      for (std::size_t i = 0; i < rows_.size(); ++i) {
        if (basic_[i] != artificial_) continue;
        if (rows_[i].bound > 1e-9) return false;
        for (std::size_t j = 0; j < outside_.size(); ++j) {
          if (is_zero(rows_[i].coefficients[j])) continue;
          pivot(i, j);
          break;
        }
      }
    }
    for (std::size_t j = 0; j < outside_.size(); ++j) {
      if (outside_[j] != artificial_) continue;
      outside_.erase(outside_.begin() + static_cast<std::ptrdiff_t>(j));
      gain_.erase(gain_.begin() + static_cast<std::ptrdiff_t>(j));
      for (linear_row& row : rows_)
        row.coefficients.erase(row.coefficients.begin() + static_cast<std::ptrdiff_t>(j));
      break;
    }
    return true;
  }

  void set_objective(std::span<const double> objective) {
    for (std::size_t j = 0; j < outside_.size(); ++j)
      gain_[j] = outside_[j] < objective.size() ? objective[outside_[j]] : 0;
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      if (basic_[i] >= objective.size()) continue;
      for (std::size_t j = 0; j < outside_.size(); ++j)
        gain_[j] -= objective[basic_[i]] * rows_[i].coefficients[j];
    }
  }

  void climb() {
    for (;;) {
      std::size_t enters = outside_.size();
      for (std::size_t j = 0; j < outside_.size(); ++j) {
        if (gain_[j] > tolerance && (enters == outside_.size() || outside_[j] < outside_[enters])) enters = j;
      }
      if (enters == outside_.size()) return;
      std::size_t leaves = rows_.size();
      double least = 0;
      for (std::size_t i = 0; i < rows_.size(); ++i) {
        const double slope = rows_[i].coefficients[enters];
        if (slope <= tolerance) continue;
        const double ratio = rows_[i].bound / slope;
        if (leaves == rows_.size() || ratio < least - tolerance ||
            (ratio <= least + tolerance && basic_[i] < basic_[leaves])) {
          leaves = i;
          least = ratio;
        }
      }
      if (leaves == rows_.size()) return;  // unbounded: excluded by the precondition
      pivot(leaves, enters);
    }
  }

  /// Exchanges the basic variable of a row with one outside.
  void pivot(std::size_t row, std::size_t column) {
    linear_row& out = rows_[row];
    const double slope = out.coefficients[column];
    out.bound /= slope;
    for (double& each : out.coefficients)
      each /= slope;
    out.coefficients[column] = 1 / slope;
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      if (i == row) continue;
      const double factor = std::exchange(rows_[i].coefficients[column], 0);
      if (is_zero(factor)) continue;
      rows_[i].bound -= factor * out.bound;
      if (rows_[i].bound < 0 && rows_[i].bound > -tolerance) rows_[i].bound = 0;
      for (std::size_t j = 0; j < outside_.size(); ++j)
        rows_[i].coefficients[j] -= factor * out.coefficients[j];
    }
    const double factor = std::exchange(gain_[column], 0);
    for (std::size_t j = 0; j < outside_.size(); ++j)
      gain_[j] -= factor * out.coefficients[j];
    std::swap(basic_[row], outside_[column]);
  }

  [[nodiscard]] std::vector<double> solution(std::size_t variables) const {
    std::vector<double> x(variables, 0);
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      if (basic_[i] < variables) x[basic_[i]] = rows_[i].bound;
    }
    return x;
  }

  [[nodiscard]] static bool is_zero(double value) noexcept { return value < tolerance && value > -tolerance; }

  std::size_t artificial_;
  std::vector<linear_row> rows_{};
  std::vector<std::size_t> basic_{};    // of each row
  std::vector<std::size_t> outside_{};  // of each column
  std::vector<double> gain_;            // of each column, for the objective
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
