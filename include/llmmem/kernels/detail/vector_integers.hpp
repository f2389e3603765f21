/// @file
/// The work of `attention_arithmetic::host_integers`: shares of rows over codes, multiplied as integers.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/attention_share.hpp>
#include <llmmem/kernels/detail/attention_tile.hpp>
#include <llmmem/kernels/detail/code_tiles.hpp>
#include <llmmem/kernels/detail/coded_vectors.hpp>
#include <llmmem/kernels/detail/integer_tile.hpp>
#include <llmmem/kernels/detail/subnormal_guard.hpp>
#include <llmmem/kernels/detail/vector_output.hpp>
#include <llmmem/kernels/detail/vector_tile.hpp>
#include <llmmem/kernels/vector_path.hpp>
#include <llmmem/model/dtype.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

// NOLINTBEGIN(cppcoreguidelines-pro-type-member-init): tiles are large, and written before they are read

/// Returns the path that multiplies bytes: AVX-512 needs its VNNI for it.
[[nodiscard]] inline vector_path integer_path(vector_path path) noexcept {
#if defined(__x86_64__)
  if (path == vector_path::avx512 && __builtin_cpu_supports("avx512vnni") == 0) return vector_path::avx2;
#endif
  return path;
}

/// As `vector_codes_work`, by integers.
template <class Tables>
class vector_integers_work {
 public:
  vector_integers_work(const attention_shape& shape, const attention_codes& codes, const Tables& tables,
                       vector_path path) noexcept
      : shape_(shape), codes_(codes), tables_(tables), shares_(shape), path_(integer_path(path)) {}

  [[nodiscard]] std::uint64_t items() const noexcept { return shares_.items(shape_); }

  void run(std::uint64_t item) const noexcept {
    const attention_place at = shares_.at(item, shape_, tables_);
    if (at.queries == 0) return;
    const subnormal_guard exact;
    integer_sums of;
    begin(at, of);
    const code_heads heads{head_of(codes_.keys, codes_.layer, at.head),
                           head_of(codes_.values, codes_.layer, at.head)};
    const auto gather_next = [&](std::uint32_t position, integer_tile& tile) {
      return gather_codes(shape_, codes_, tables_, at, heads, position, std::uint32_t{integer_tile_tokens},
                          tile);
    };
    integer_tile tiles[2];
    std::uint32_t position = gather_next(at.from, tiles[0]);
    for (unsigned turn = 0; tiles[turn].count != 0; turn ^= 1U) {
      position = gather_next(position, tiles[turn ^ 1U]);
      attend(tiles[turn], tiles[turn ^ 1U], of);
    }
    finish_vectors(shape_, at, of.sums, [&](std::uint32_t pack, std::uint32_t i) {
      return integer_place(codes_.values.code, std::size_t{pack} * attention_pack + i, lanes_in(path_));
    });
  }

 private:
  void attend(const integer_tile& tile, const integer_tile& next, integer_sums& of) const noexcept {
#if defined(__x86_64__)
    if (path_ == vector_path::avx512) return attend_integers_avx512(codes_, tile, next, of);
    if (path_ == vector_path::avx2) return attend_integers_avx2(codes_, tile, next, of);
#endif
    attend_integers_baseline(codes_, tile, next, of);
  }

  void begin(const attention_place& at, integer_sums& of) const noexcept {
    const std::size_t keys = std::size_t{shape_.key_packs} * attention_pack;
    const std::size_t values = std::size_t{shape_.value_packs} * attention_pack;
    of.key_code = codes_.keys.code;
    of.value_code = codes_.values.code;
    of.key_bytes = keys / codes_in_byte(of.key_code);
    of.value_bytes = values / codes_in_byte(of.value_code);
    of.sums.template begin<dtype::f32>(at.queries, keys, values, 0,
                                       integer_stride(of.value_code, values, lanes_in(path_)));
    for (std::uint32_t h = 0; h < at.queries; ++h) {
      float query[vector_elements];
      read_query(shape_, codes_, at, h, query);
      if (path_ == vector_path::avx512) {
        set_integer_query<16>(of.queries, h, of.key_code, query, keys, shape_.scale);
      } else if (path_ == vector_path::avx2) {
        set_integer_query<8>(of.queries, h, of.key_code, query, keys, shape_.scale);
      } else {
        set_integer_query<4>(of.queries, h, of.key_code, query, keys, shape_.scale);
      }
    }
  }

  attention_shape shape_;
  attention_codes codes_;
  Tables tables_;
  attention_shares<vector_heads> shares_;
  vector_path path_;
};

// NOLINTEND(cppcoreguidelines-pro-type-member-init)

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
