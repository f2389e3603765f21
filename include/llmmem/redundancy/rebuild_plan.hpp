/// @file
/// `rebuild_plan`: the pieces of a k+m code that restore lost ones, and their coefficients. Plain data from
/// pure functions.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/redundancy/gf256.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// A piece of a k+m code: data pieces are 0 to k - 1, parity pieces k to k + m - 1.
enum class piece_id : std::uint32_t {};

/// Returns its number.
[[nodiscard]] constexpr std::uint32_t to_index(piece_id piece) noexcept {
  return static_cast<std::uint32_t>(piece);
}

/// The number of pieces of a code: k of data, and m of parity; any m pieces may be lost.
struct code_shape {
  std::uint32_t data = 1;
  std::uint32_t parity = 1;

  [[nodiscard]] constexpr std::uint32_t pieces() const noexcept { return data + parity; }
  friend constexpr bool operator==(const code_shape&, const code_shape&) noexcept = default;
};

/// The most pieces of a code: a Cauchy matrix needs as many different bytes.
inline constexpr std::uint32_t max_code_pieces = 256;
[[deprecated("its name is max_code_pieces")]] inline constexpr std::uint32_t most_pieces = max_code_pieces;

/// Returns "2+2".
[[nodiscard]] inline std::string to_text(const code_shape& shape) {
  return std::to_string(shape.data) + "+" + std::to_string(shape.parity);
}

/// Returns `shape` itself. @throws argument_error for one without data or parity, or with more than 256
/// pieces.
inline code_shape checked_shape(const code_shape& shape) {
  if (shape.data == 0 || shape.parity == 0) {
    throw argument_error("reed_solomon: a code of " + to_text(shape) +
                         "; use at least one piece of data and one of parity");
  }
  if (shape.data > max_code_pieces || shape.parity > max_code_pieces || shape.pieces() > max_code_pieces) {
    throw argument_error("reed_solomon: a code of " + to_text(shape) +
                         "; use at most 256 pieces of data and parity together");
  }
  return shape;
}

/// Returns the factor of data piece `data` in piece `piece`: for a data piece 1 or 0; for a parity piece `1 /
/// (piece ^ data)`. The latter form a Cauchy matrix, of which every square part can be inverted.
///
/// @pre both are less than 256, `data` is a data piece, `piece` is a piece of `shape`.
/// @par Source   Bloemer et al., "An XOR-Based Erasure-Resilient Coding Scheme", 1995. The same matrix as
///               ISA-L's `gf_gen_cauchy1_matrix`.
[[nodiscard]] constexpr std::uint8_t code_coefficient(const code_shape& shape, piece_id piece,
                                                      piece_id data) noexcept {
  if (to_index(piece) < shape.data) return piece == data ? 1 : 0;
  return gf256_inverse(static_cast<std::uint8_t>(to_index(piece) ^ to_index(data)));
}

/// How to restore pieces: each of `targets` is the sum of all `sources`, each times its coefficient in the
/// target's row.
struct rebuild_plan {
  std::vector<piece_id> sources;           ///< k of them
  std::vector<piece_id> targets;           ///< in the requested order
  std::vector<std::uint8_t> coefficients;  ///< a row of k per target

  [[nodiscard]] std::uint8_t coefficient(std::size_t target, std::size_t source) const noexcept {
    return coefficients[target * sources.size() + source];
  }
  friend bool operator==(const rebuild_plan&, const rebuild_plan&) = default;
};

namespace detail {

/// Returns "piece 3", "pieces 0, 1 and 4".
[[nodiscard]] inline std::string pieces_text(std::span<const piece_id> pieces) {
  std::string text = pieces.size() == 1 ? "piece " : "pieces ";
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    if (i != 0) text += i + 1 == pieces.size() ? " and " : ", ";
    text += std::to_string(to_index(pieces[i]));
  }
  return text;
}

inline void check_pieces(const code_shape& shape, std::span<const piece_id> pieces, const char* what) {
  std::vector<bool> seen(shape.pieces());
  for (const piece_id piece : pieces) {
    const std::uint32_t index = to_index(piece);
    if (index >= shape.pieces()) {
      throw argument_error("reed_solomon: " + std::string(what) + " piece " + std::to_string(index) + "; " +
                           to_text(shape) + " has pieces 0 to " + std::to_string(shape.pieces() - 1));
    }
    if (seen[index]) {
      throw argument_error("reed_solomon: " + std::string(what) + " piece " + std::to_string(index) +
                           " twice; name each piece once");
    }
    seen[index] = true;
  }
}

/// Returns the inverse of an invertible square matrix, by Gauss and Jordan.
[[nodiscard]] inline std::vector<std::uint8_t> gf_inverse(std::vector<std::uint8_t> from, std::size_t n) {
  std::vector<std::uint8_t> to(n * n, 0);
  for (std::size_t i = 0; i < n; ++i)
    to[i * n + i] = 1;
  for (std::size_t column = 0; column < n; ++column) {
    std::size_t pivot = column;
    while (from[pivot * n + column] == 0)
      ++pivot;
    const std::uint8_t scale = gf256_inverse(from[pivot * n + column]);
    for (std::size_t i = 0; i < n; ++i) {
      std::swap(from[pivot * n + i], from[column * n + i]);
      std::swap(to[pivot * n + i], to[column * n + i]);
      from[column * n + i] = gf256_multiply(from[column * n + i], scale);
      to[column * n + i] = gf256_multiply(to[column * n + i], scale);
    }
    for (std::size_t row = 0; row < n; ++row) {
      const std::uint8_t factor = from[row * n + column];
      if (row == column || factor == 0) continue;
      for (std::size_t i = 0; i < n; ++i) {
        from[row * n + i] ^= gf256_multiply(factor, from[column * n + i]);
        to[row * n + i] ^= gf256_multiply(factor, to[column * n + i]);
      }
    }
  }
  return to;
}

}  // namespace detail

/// Plans to make `targets` from `sources`, which may be any k pieces, such as those of the least busy ranks.
///
/// @par Complexity   O(k^3), and O(k^2) per target.
/// @throws argument_error  for a bad shape, an invalid or duplicate piece, or not k sources.
[[nodiscard]] inline rebuild_plan plan_rebuild_from(const code_shape& shape,
                                                    std::span<const piece_id> sources,
                                                    std::span<const piece_id> targets) {
  checked_shape(shape);
  detail::check_pieces(shape, sources, "source");
  detail::check_pieces(shape, targets, "target");
  if (sources.size() != shape.data) {
    throw argument_error("reed_solomon: " + std::to_string(sources.size()) + " sources; " + to_text(shape) +
                         " rebuilds from exactly " + std::to_string(shape.data));
  }
  const std::size_t k = shape.data;
  std::vector<std::uint8_t> rows(k * k);
  for (std::size_t s = 0; s < k; ++s) {
    for (std::size_t d = 0; d < k; ++d)
      rows[s * k + d] = code_coefficient(shape, sources[s], piece_id{static_cast<std::uint32_t>(d)});
  }
  // The inverse makes data pieces of the sources; a target's own row of the code then gives its coefficients.
  const std::vector<std::uint8_t> inverse = detail::gf_inverse(rows, k);
  rebuild_plan plan{.sources = {sources.begin(), sources.end()},
                    .targets = {targets.begin(), targets.end()},
                    .coefficients = std::vector<std::uint8_t>(targets.size() * k, 0)};
  for (std::size_t t = 0; t < targets.size(); ++t) {
    for (std::size_t d = 0; d < k; ++d) {
      const std::uint8_t factor =
          code_coefficient(shape, targets[t], piece_id{static_cast<std::uint32_t>(d)});
      if (factor == 0) continue;
      for (std::size_t s = 0; s < k; ++s)
        plan.coefficients[t * k + s] ^= gf256_multiply(factor, inverse[d * k + s]);
    }
  }
  return plan;
}

/// Plans to make all of `lost` from the other pieces: from data pieces first, then from the first parity
/// pieces.
///
///     rebuild_plan plan = plan_rebuild({.data = 4, .parity = 2}, std::vector{piece_id{1}, piece_id{3}});
///
/// @par Complexity   as `plan_rebuild_from`.
/// @throws argument_error  for a bad shape, an invalid or duplicate piece, or more than m lost pieces; the
///                         text names them.
[[nodiscard]] inline rebuild_plan plan_rebuild(const code_shape& shape, std::span<const piece_id> lost) {
  checked_shape(shape);
  detail::check_pieces(shape, lost, "lost");
  if (lost.size() > shape.parity) {
    throw argument_error("reed_solomon: " + detail::pieces_text(lost) + " are lost, " +
                         std::to_string(lost.size()) + " in all; " + to_text(shape) +
                         " tolerates the loss of " + std::to_string(shape.parity) + ": use an older version");
  }
  std::vector<bool> is_lost(shape.pieces());
  for (const piece_id piece : lost)
    is_lost[to_index(piece)] = true;
  std::vector<piece_id> sources;
  for (std::uint32_t piece = 0; piece < shape.pieces() && sources.size() < shape.data; ++piece) {
    if (!is_lost[piece]) sources.push_back(piece_id{piece});
  }
  return plan_rebuild_from(shape, sources, lost);
}

}  // namespace v0
}  // namespace llmmem
