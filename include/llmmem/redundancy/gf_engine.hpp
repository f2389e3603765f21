/// @file
/// The arithmetic of a Reed-Solomon code: the concept of an engine, and the engine that needs no library.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/redundancy/detail/gf256_kernels.hpp>
#include <llmmem/redundancy/gf256.hpp>
#include <llmmem/redundancy/simd_path.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// A matrix of coefficients over GF(2^8), times sources. All engines compute the same bytes.
///
///     E::matrix                                   the coefficients in the engine's form. Immutable; a
///                                                 default one has none
///     prepare(coefficients, columns)              row by row, a row for each destination, a column for each
///                                                 source; sizes are a precondition. No other
///                                                 operation allocates
///     multiply(m, sources, destinations, bytes)   destinations = m * sources
///     add(m, column, source, destinations, bytes) destinations += m's column * source
///
/// The matrix determines the number of pointers, and each points to `bytes` bytes, aligned or not. No
/// destination shares a byte with a source. `multiply` only writes destinations: several may be the same
/// memory, whose contents are then undefined. Any number of threads may use one engine and one matrix.
template <class E>
concept gf_engine =
    std::copyable<E> && std::copyable<typename E::matrix> && std::default_initializable<typename E::matrix> &&
    requires(const E& engine, const typename E::matrix& m, std::span<const std::uint8_t> coefficients,
             std::uint32_t number, const std::byte* const* sources, const std::byte* source,
             std::byte* const* destinations, std::size_t bytes) {
      { engine.prepare(coefficients, number) } -> std::same_as<typename E::matrix>;
      { engine.multiply(m, sources, destinations, bytes) } noexcept;
      { engine.add(m, number, source, destinations, bytes) } noexcept;
    };

/// Uses this library's own kernels: shuffles, affine maps or table look-ups, depending on the processor.
///
/// @par Complexity   a coefficient takes 72 bytes; `multiply` reads each source once for every four rows.
/// @par Errors       the constructor throws `argument_error` for a path that this machine does not have.
class portable_gf_engine {
 public:
  class matrix {
   private:
    friend class portable_gf_engine;
    std::vector<detail::gf_product_table> tables_;
    std::uint32_t columns_ = 0;
  };

  portable_gf_engine() noexcept : path_(best_simd_path()) {}
  explicit portable_gf_engine(simd_path path) : path_(checked_simd_path(path)) {}

  [[nodiscard]] simd_path path() const noexcept { return path_; }

  [[nodiscard]] matrix prepare(std::span<const std::uint8_t> coefficients, std::uint32_t columns) const {
    matrix made;
    made.tables_.reserve(coefficients.size());
    for (const std::uint8_t coefficient : coefficients)
      made.tables_.push_back(detail::gf_table_of(coefficient));
    made.columns_ = columns;
    return made;
  }

  void multiply(const matrix& m, const std::byte* const* sources, std::byte* const* destinations,
                std::size_t bytes) const noexcept {
    if (m.columns_ == 0) return;
    detail::gf_run_all<detail::gf_start::zero>(path_,
                                               {.tables = m.tables_.data(),
                                                .stride = m.columns_,
                                                .sources = sources,
                                                .source_count = m.columns_,
                                                .destinations = destinations},
                                               m.tables_.size() / m.columns_, bytes);
  }

  void add(const matrix& m, std::uint32_t column, const std::byte* source, std::byte* const* destinations,
           std::size_t bytes) const noexcept {
    if (m.columns_ == 0) return;
    detail::gf_run_all<detail::gf_start::destination>(path_,
                                                      {.tables = m.tables_.data() + column,
                                                       .stride = m.columns_,
                                                       .sources = &source,
                                                       .source_count = 1,
                                                       .destinations = destinations},
                                                      m.tables_.size() / m.columns_, bytes);
  }

 private:
  simd_path path_;
};

static_assert(gf_engine<portable_gf_engine>);

}  // namespace v0
}  // namespace llmmem
