/// @file
/// Attention where the bytes are: query rows go to the holders of blocks, and parts return to be merged.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/errors.hpp>
#include <llmmem/kernels/attention_parts.hpp>
#include <llmmem/kernels/merge_attention.hpp>
#include <llmmem/kernels/paged_attention.hpp>
#include <llmmem/model/dtype.hpp>
#include <llmmem/result.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

namespace llmmem {
inline namespace v0 {

/// The message to a holder of blocks: the queries of one layer's rows, and which tokens they attend to.
///
/// All holders number sequences in the same way. Lengths are of the whole sequences, regardless of a holder's
/// share of them, so that windows end at the right token.
struct near_query {
  std::uint64_t rows = 0;
  std::uint32_t layer = 0;
  std::uint32_t query_heads = 0;
  std::uint32_t head_dim = 0;
  std::uint32_t value_dim = 0;
  dtype element = dtype::bf16;              ///< the type of the queries: f32, bf16 or f16
  float scale = 0;                          ///< as `attention_options::scale`
  std::uint32_t window = 0;                 ///< as `attention_options::window`
  const std::int32_t* sequences = nullptr;  ///< [rows]; a negative one is padding
  const std::int32_t* lengths = nullptr;    ///< [rows]
  const std::byte* queries = nullptr;       ///< [rows][query_heads][head_dim], contiguous, aligned to 16

  /// Returns the shape of the parts that return.
  [[nodiscard]] constexpr attention_part_shape shape() const noexcept {
    return {rows, query_heads, value_dim};
  }
  [[nodiscard]] constexpr std::uint64_t query_bytes() const noexcept {
    return rows * query_heads * head_dim * bits_of(element) / 8;
  }
};

/// Bytes on the link between the requesting rank and the holder.
struct near_traffic {
  std::uint64_t sent_bytes = 0;
  std::uint64_t received_bytes = 0;

  constexpr near_traffic& operator+=(const near_traffic& other) noexcept {
    sent_bytes += other.sent_bytes;
    received_bytes += other.received_bytes;
    return *this;
  }
  friend constexpr bool operator==(const near_traffic&, const near_traffic&) noexcept = default;
};

/// A holder of some of the rows' tokens, which attends to them: blocks in this memory, another rank, a device
/// near its storage.
///
/// - `parts()` is how many parts it returns, the same at every call.
/// - `begin(query, memory)` begins, and may return before any work is done. `memory` is `near_part_stride`
///   bytes for each part, aligned to 16; the holder writes each part to its beginning in the layout of
///   `attention_part_in`. The query and the data that it points to stay valid until `finish`.
/// - `finish()` returns once all parts are complete, with the bytes that went over a link for them; it is
///   called exactly once for each `begin` that succeeded.
template <class H>
concept attention_holder =
    requires(H& holder, const H& seen, const near_query& query, std::span<std::byte> memory) {
      { seen.parts() } noexcept -> std::same_as<std::uint32_t>;
      { holder.begin(query, memory) } -> std::same_as<result<void>>;
      { holder.finish() } -> std::same_as<result<near_traffic>>;
    };

/// Returns the bytes from one part to the next: `attention_part_bytes`, rounded up to a multiple of 16.
[[nodiscard]] constexpr std::uint64_t near_part_stride(const attention_part_shape& shape) noexcept {
  const std::uint64_t bytes = attention_part_bytes(shape);
  return bytes > ~std::uint64_t{15} ? bytes : (bytes + 15) / 16 * 16;
}

/// Returns the bytes that `attend_near` needs for `parts` parts.
[[nodiscard]] constexpr std::uint64_t near_workspace_bytes(const attention_part_shape& shape,
                                                           std::uint64_t parts) noexcept {
  const std::uint64_t each = near_part_stride(shape);
  constexpr std::uint64_t all = ~std::uint64_t{0};
  return parts != 0 && each > all / parts ? all : each * parts;
}

/// A holder of blocks in memory that `Run` can access. The thread that calls `finish` attends to them.
/// Nothing goes over a link.
///
/// @par Thread safety   one call at a time.
/// @par Errors          those of `paged_attention_part`; `errc::size_mismatch` for a query whose vector
///      lengths differ from the cache's.
template <class Run, class Tables>
class table_holder {
 public:
  /// The options of this holder's attention; scale, window and the other data of a query come from the query.
  struct options {
    attention_split split{};
    attention_arithmetic arithmetic = attention_arithmetic::reproducible;
    kv_scales scales{};
    std::uint32_t* out_of_range = nullptr;
    /// As `attention_options::latents`: of a cache of latents, whose record outlives the holder.
    const paging::latent_record* latents = nullptr;
    /// `attention_workspace_bytes` of the largest query, if there is more than one share.
    std::span<std::byte> workspace{};
  };

  /// The cache and the memory that the tables point to outlive it. With context parallelism
  /// (`cache.layout.part`) these are the rank's own.
  table_holder(const Run& run, const Tables& tables, const kv_memory& cache, const options& how = {})
      : run_(run), tables_(tables), cache_(cache), how_(how) {}

  [[nodiscard]] std::uint32_t parts() const noexcept { return 1; }
  result<void> begin(const near_query& query, std::span<std::byte> memory);
  result<near_traffic> finish();

  /// After an append: sets the new tables.
  void set_tables(const Tables& tables) noexcept { tables_ = tables; }

 private:
  Run run_;
  Tables tables_;
  kv_memory cache_;
  options how_;
  near_query query_{};
  attention_part_output part_{};
};
/// Deduces the holder from its arguments.
template <class Run, class Tables>
table_holder(Run, Tables, kv_memory) -> table_holder<Run, Tables>;

/// out[row][head] = the attention to all tokens of the holders. Every holder gets the rows; all begin before
/// the first wait; their parts are merged in the order of the holders, and of each holder's parts. So the
/// bits do not depend on the order of arrival. If each token of a row is held once, the result is that of
/// `paged_attention` over all of them, within the bounds of `paged_attention_part`.
///
/// The saving: for each row `query_heads` x (head_dim x element bytes + value_dim x 4 + 8) bytes go over a
/// link, regardless of the tokens that it attends to; its keys and values are 2 x heads x head_dim x element
/// bytes for each token.
///
/// @param run        merges; the workspace and the outputs of holders are in its memory.
/// @param workspace  `near_workspace_bytes(query.shape(), parts of all holders)`, aligned to 16.
/// @return the bytes that went over links. If a holder fails, its failure, after all others that began have
///      finished; `errc::too_short` for the workspace and for null pointers of the query,
///      `errc::bad_granularity` if one is not aligned, and the errors of `merge_attention`. `out` is then
///      unchanged.
/// @par Complexity   as the slowest holder, and a merge.
/// @par Thread safety   one call at a time for each holder.
/// @par Source   context parallelism at decode as in vLLM and FlashInfer, which merge by the logarithm; He
///      and Zhai, "FastDecode", arXiv 2403.11421, for host memory near its processors.
template <class Run, log_base Base, attention_holder... Holders>
result<near_traffic> attend_near(const Run& run, const near_query& query, std::span<std::byte> workspace,
                                 const merged_attention<Base>& out, Holders&... holders);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/kernels/detail/near_attention_body.hpp>
