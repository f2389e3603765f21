/// @file
/// A paged cache in bf16 whose full blocks have been to a cold tier and back, through its codec.
#pragma once

#include <llmmem/codec/byte_plane.hpp>
#include <llmmem/kernels/elements.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/offload/block_codec.hpp>
#include <llmmem/offload/kv_bins.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/paging/kv_memory.hpp>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "paged_decode/decoder.hpp"
#include "paged_decode/host_place.hpp"
#include "paged_decode/paged_cache.hpp"

namespace paged_decode {

/// A codec of cold blocks: lossless planes of bytes, or bins.
struct cold_form {
  std::string name{};
  std::optional<std::vector<llmmem::offload::layer_bins>> bins{};  ///< none: lossless
};

/// The forms that are compared: few and many bins, and differences of keys, of values, and of both.
[[nodiscard]] inline std::vector<cold_form> cold_forms() {
  std::vector<cold_form> out{{.name = "lossless"}};
  for (const std::uint32_t bins : {33U, 17U, 9U}) {
    for (std::uint32_t differs = 0; differs < 4; ++differs) {
      constexpr std::array names{"", " dK", " dV", " dK dV"};
      out.push_back({"bins " + std::to_string(bins) + names[differs],
                     std::vector{llmmem::offload::layer_bins{.keys = bins,
                                                             .values = bins,
                                                             .key_differences = (differs & 1U) != 0,
                                                             .value_differences = (differs & 2U) != 0}}});
    }
  }
  out.push_back({"bins K9 V33", std::vector{llmmem::offload::layer_bins{.keys = 9, .values = 33}}});
  out.push_back({"bins K33 V9", std::vector{llmmem::offload::layer_bins{.keys = 33, .values = 9}}});
  out.push_back({"bins 33, then 9", std::vector{llmmem::offload::layer_bins{}, llmmem::offload::layer_bins{},
                                                llmmem::offload::layer_bins{.keys = 9, .values = 9}}});
  return out;
}

/// What the blocks took, and lost.
struct cold_counts {
  std::uint64_t blocks = 0;
  std::uint64_t stored_bytes = 0;  ///< with all side data
  std::uint64_t values = 0;        ///< elements of these blocks
  std::array<double, 2> errors{};  ///< of keys and of values: sums of squares
  std::array<double, 2> sizes{};   ///< of the elements, the same

  [[nodiscard]] double bits_of_value() const noexcept {
    return 8 * static_cast<double>(stored_bytes) / static_cast<double>(values);
  }
  /// The root of the mean square of errors, as a share of that of elements.
  [[nodiscard]] double error_share(std::size_t plane) const noexcept {
    return std::sqrt(errors[plane] / sizes[plane]);
  }
};

/// A `kv_cache`. When a block is full, after the last layer of the step, it is encoded and decoded: tokens
/// after it attend to what comes back.
class cold_cache {
 public:
  using sequence = llmmem::sequence_id;

  /// @param how  its form is bf16.
  cold_cache(const model_config& config, const paged_config& how, host_place& place, const cold_form& form)
      : layers_(config.layers),
        block_tokens_(how.block_tokens),
        cache_(config, how, place),
        memory_(cache_.store().memories()[0]),
        packed_(memory_.layout.packed()),
        coder_(coder_of(form, packed_)),
        block_(packed_.block_bytes()),
        back_(block_.size()),
        form_(2 * block_.size() + 4096) {}

  [[nodiscard]] sequence create(std::span<const llmmem::token_id> prompt) { return cache_.create(prompt); }
  [[nodiscard]] std::uint64_t tokens(sequence of) const { return cache_.tokens(of); }
  void grow(std::span<const grown<sequence>> batch) {
    full_.clear();
    for (const auto& each : batch) {
      const std::uint64_t before = tokens(each.sequence) / block_tokens_;
      const std::uint64_t after = (tokens(each.sequence) + each.tokens.size()) / block_tokens_;
      for (std::uint64_t block = before; block < after; ++block)
        full_.push_back({each.sequence, block});
    }
    cache_.grow(batch);
  }
  [[nodiscard]] rows_of_floats attend(std::uint32_t layer, const projected& in) {
    rows_of_floats out = cache_.attend(layer, in);
    if (layer + 1 == layers_) {
      for (const full_block& each : full_)
        send_and_return(to_index(cache_.allocator().blocks(each.of)[each.index]));
    }
    return out;
  }
  void commit(sequence of) { cache_.commit(of); }
  [[nodiscard]] sequence fork(sequence parent) { return cache_.fork(parent); }
  void truncate(sequence of, std::uint64_t tokens) { cache_.truncate(of, tokens); }
  void release(sequence of) { cache_.release(of); }

  [[nodiscard]] const cold_counts& counts() const noexcept { return counts_; }
  /// Bytes of a token in full blocks, on average.
  [[nodiscard]] std::uint64_t bytes_per_token() const noexcept {
    return counts_.blocks == 0 ? 0 : counts_.stored_bytes / (counts_.blocks * block_tokens_);
  }

 private:
  using planes = llmmem::byte_plane<llmmem::dtype::bf16>;
  using bins = llmmem::offload::kv_bins::coder_type;
  struct full_block {
    sequence of{};
    std::uint64_t index = 0;
  };

  [[nodiscard]] static std::variant<planes, bins> coder_of(const cold_form& form,
                                                           const llmmem::kv_layout& of) {
    if (!form.bins) return llmmem::offload::coded<planes>{}.make(0, of.block_bytes(), {});
    return llmmem::offload::kv_bins({.layout = of, .layers = *form.bins}).make(0, of.block_bytes(), {});
  }

  void send_and_return(std::uint64_t block) {
    const llmmem::kv_memory staging{block_.data(), 1, packed_};
    llmmem::copy_kv_block(staging, 0, memory_, block, block_tokens_);
    std::visit(
        [&](auto& coder) {
          const std::uint64_t bytes = coder.encode(block_, form_).value();
          coder.decode(std::span<const std::byte>(form_).first(bytes), back_).value();
          counts_.stored_bytes += bytes;
        },
        coder_);
    ++counts_.blocks;
    counts_.values += block_.size() / 2;
    count_errors();
    block_ = back_;
    llmmem::copy_kv_block(memory_, block, staging, 0, block_tokens_);
  }
  void count_errors() {
    for (std::uint32_t p = 0; p < packed_.kv_planes(); ++p) {
      const llmmem::plane_strides strides = packed_.strides(p, 1);
      for (std::uint32_t l = 0; l < packed_.layers; ++l) {
        for (std::uint32_t t = 0; t < block_tokens_; ++t) {
          const std::uint64_t first = strides.offset(l, 0, t, 0);
          for (std::uint64_t i = 0; i < packed_.vector_elements(p) * packed_.heads; ++i) {
            const double right = element(block_, first + 2 * i);
            const double apart = element(back_, first + 2 * i) - right;
            counts_.errors[p] += apart * apart;
            counts_.sizes[p] += right * right;
          }
        }
      }
    }
  }
  [[nodiscard]] static double element(const std::vector<std::byte>& of, std::uint64_t at) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, of.data() + at, sizeof(bits));
    return static_cast<double>(llmmem::float_of<llmmem::dtype::bf16>(bits));
  }

  std::uint32_t layers_;
  std::uint32_t block_tokens_;
  paged_cache<host_place> cache_;
  llmmem::kv_memory memory_;
  llmmem::kv_layout packed_;
  std::variant<planes, bins> coder_;
  std::vector<std::byte> block_;
  std::vector<std::byte> back_;
  std::vector<std::byte> form_;
  std::vector<full_block> full_{};
  cold_counts counts_{};
};
static_assert(kv_cache<cold_cache>);

}  // namespace paged_decode
