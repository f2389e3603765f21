/// @file
/// `isal_gf_engine`: Reed-Solomon codes by Intel's ISA-L. Needs ISA-L (2.30 or newer).
#pragma once

#include <llmmem/config.hpp>

#if !__has_include(<isa-l/erasure_code.h>)
#error "llmmem/redundancy/isal_reed_solomon.hpp needs ISA-L: install libisal-dev and link llmmem::isal."
#endif

#include <llmmem/redundancy/gf_engine.hpp>

#include <isa-l/erasure_code.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// ISA-L's erasure code, which chooses the best instructions of x86-64 or aarch64 itself. It computes the
/// same bytes as `portable_gf_engine`; `reed_solomon`'s matrix is that of `gf_gen_cauchy1_matrix`.
///
///     reed_solomon<isal_gf_engine> code({.data = 8, .parity = 3});
///
/// @par Complexity   a coefficient takes 32 bytes.
class isal_gf_engine {
 public:
  class matrix {
   private:
    friend class isal_gf_engine;

    /// ISA-L reads the tables through pointers that are not const.
    [[nodiscard]] unsigned char* tables() const noexcept {
      return const_cast<unsigned char*>(tables_.data());
    }

    std::vector<unsigned char> tables_;
    int rows_ = 0;
    int columns_ = 0;
  };

  [[nodiscard]] matrix prepare(std::span<const std::uint8_t> coefficients, std::uint32_t columns) const {
    matrix made;
    if (columns == 0) return made;
    std::vector<unsigned char> rows(coefficients.begin(), coefficients.end());
    made.columns_ = static_cast<int>(columns);
    made.rows_ = static_cast<int>(coefficients.size() / columns);
    made.tables_.resize(32 * coefficients.size());
    ec_init_tables(made.columns_, made.rows_, rows.data(), made.tables_.data());
    return made;
  }

  void multiply(const matrix& m, const std::byte* const* sources, std::byte* const* destinations,
                std::size_t bytes) const noexcept {
    if (m.rows_ == 0) return;
    if (bytes <= most_at_once) {
      ec_encode_data(static_cast<int>(bytes), m.columns_, m.rows_, m.tables(), pointers(sources),
                     pointers(destinations));
      return;
    }
    unsigned char* from[256];
    unsigned char* to[256];
    for (std::size_t at = 0; at < bytes; at += most_at_once) {
      const std::size_t step = bytes - at < most_at_once ? bytes - at : most_at_once;
      for (int s = 0; s < m.columns_; ++s)
        from[s] = pointers(sources)[s] + at;
      for (int d = 0; d < m.rows_; ++d)
        to[d] = pointers(destinations)[d] + at;
      ec_encode_data(static_cast<int>(step), m.columns_, m.rows_, m.tables(), from, to);
    }
  }

  void add(const matrix& m, std::uint32_t column, const std::byte* source, std::byte* const* destinations,
           std::size_t bytes) const noexcept {
    if (m.rows_ == 0) return;
    unsigned char* to[256];
    for (std::size_t at = 0; at < bytes; at += most_at_once) {
      const std::size_t step = bytes - at < most_at_once ? bytes - at : most_at_once;
      for (int d = 0; d < m.rows_; ++d)
        to[d] = pointers(destinations)[d] + at;
      ec_encode_data_update(static_cast<int>(step), m.columns_, m.rows_, static_cast<int>(column), m.tables(),
                            reinterpret_cast<unsigned char*>(const_cast<std::byte*>(source + at)), to);
    }
  }

 private:
  static constexpr std::size_t most_at_once = std::size_t{1} << 30;  // ISA-L counts bytes as int

  // ISA-L writes to no source, although its parameter types would allow it.
  template <class Byte>
  [[nodiscard]] static unsigned char** pointers(Byte* const* from) noexcept {
    return reinterpret_cast<unsigned char**>(const_cast<std::byte**>(from));
  }
};

static_assert(gf_engine<isal_gf_engine>);

}  // namespace v0
}  // namespace llmmem
