// Every kernel that the library has, instantiated: what the gate on their device code compiles and reads.
#include <llmmem/kernels/adafactor_phases.hpp>
#include <llmmem/kernels/batched_copy.hpp>
#include <llmmem/kernels/block_checksum.hpp>
#include <llmmem/kernels/block_summary.hpp>
#include <llmmem/kernels/device_executor.cuh>
#include <llmmem/kernels/fill_verify.hpp>
#include <llmmem/kernels/hot_rows.hpp>
#include <llmmem/kernels/int_groups.hpp>
#include <llmmem/kernels/kept_tokens.hpp>
#include <llmmem/kernels/kv_append.hpp>
#include <llmmem/kernels/kv_blocks.hpp>
#include <llmmem/kernels/kv_digest.hpp>
#include <llmmem/kernels/kv_gather.hpp>
#include <llmmem/kernels/kv_metadata.hpp>
#include <llmmem/kernels/kv_quantize.hpp>
#include <llmmem/kernels/latent_tokens.hpp>
#include <llmmem/kernels/merge_attention.hpp>
#include <llmmem/kernels/muon_phases.hpp>
#include <llmmem/kernels/optimizer_step.hpp>
#include <llmmem/kernels/ordered_sum.hpp>
#include <llmmem/kernels/paged_attention.hpp>
#include <llmmem/kernels/plane_split.hpp>
#include <llmmem/kernels/quantize_groups.hpp>
#include <llmmem/kernels/select_tokens.hpp>
#include <llmmem/kernels/select_top.hpp>
#include <llmmem/kernels/token_lists.hpp>
#include <llmmem/kernels/xor_blocks.hpp>

namespace llmmem_tests {

using namespace llmmem;

template <class Front>
result<void> both_ways(const device_executor& run, const Front& front, const kv_memory& cache,
                       const batch_vectors& in, const batch_output& out) {
  if (auto done = append_kv(run, front, in, in, cache, 0); !done) return done;
  return gather_kv(run, front, out, out, cache, 0);
}

result<void> all_kernels(cudaStream_t stream, const slot_front& slots,
                         const position_front<csr_table_view>& positions,
                         const position_front<padded_table_view>& padded_positions,
                         const table_front<csr_table_view>& rows,
                         const table_front<padded_table_view>& padded_rows, const kv_memory& cache,
                         const batch_vectors& in, const batch_output& out, std::span<const block_pair> pairs,
                         std::span<const copy_task> tasks) {
  const device_executor run(stream);
  if (auto done = both_ways(run, slots, cache, in, out); !done) return done;
  if (auto done = append_kv(run, positions, in, in, cache, 0); !done) return done;
  if (auto done = append_kv(run, padded_positions, in, in, cache, 0); !done) return done;
  if (auto done = gather_kv(run, rows, out, out, cache, 0); !done) return done;
  if (auto done = gather_kv(run, padded_rows, out, out, cache, 0); !done) return done;
  if (auto done = copy_kv_blocks(run, cache, cache, pairs); !done) return done;
  if (auto done = copy_few_kv_blocks(run, cache, cache, pairs); !done) return done;
  if (auto done = quantize_kv_blocks(run, cache, cache, pairs); !done) return done;
  if (auto done = dequantize_kv_blocks(run, cache, cache, pairs); !done) return done;
  const paging::latent_record& record = paging::fp8_ds_mla;
  if (auto done = append_mla(run, slots, in, in, record, cache, 0); !done) return done;
  if (auto done = gather_mla(run, slots, out, out, record, cache, 0); !done) return done;
  if (auto done = copy_batch(run, tasks, 1); !done) return done;
  return copy_few(run, tasks);
}

result<void> optimizer_kernels(cudaStream_t stream, optimizer_form form, const optimizer_piece& piece,
                               const gradient_piece& gradients, float* weights) {
  const device_executor run(stream);
  if (auto done = optimizer_begin(run, form, piece, weights); !done) return done;
  if (auto done = optimizer_step(run, form, piece, gradients, {}); !done) return done;
  return optimizer_weights(run, form, piece, weights);
}

result<void> matrix_optimizer_kernels(cudaStream_t stream, const adafactor_shape& shape,
                                      const optimizer_piece& piece, const gradient_piece& gradients,
                                      const adafactor_arrays& arrays, const muon_shape& matrix,
                                      std::span<float> floats) {
  const device_executor run(stream);
  if (auto done = adafactor_begin(run, shape, arrays); !done) return done;
  if (auto done = adafactor_add(run, shape, piece, gradients, {}, arrays); !done) return done;
  if (auto done = adafactor_factors(run, shape, {}, arrays); !done) return done;
  if (auto done = adafactor_add_updates(run, shape, piece, gradients, {}, arrays); !done) return done;
  if (auto done = adafactor_apply(run, shape, piece, gradients, {}, arrays); !done) return done;
  if (auto done = muon_momentum(run, floats, floats, floats, {}); !done) return done;
  if (auto done = orthogonalize(run, matrix, floats, floats); !done) return done;
  return muon_apply(run, matrix, floats, floats, {});
}

result<void> number_kernels(cudaStream_t stream, const group_shape& shape,
                            const group_rows<const std::byte>& in, const group_rows<std::byte>& out,
                            const group_scales<std::byte>& scales, std::span<std::byte> memory,
                            mismatch_report* report) {
  const device_executor run(stream);
  if (auto done = quantize_groups(run, shape, in, out, scales); !done) return done;
  if (auto done = dequantize_groups(run, shape, in, {scales.data, scales.row_stride}, out); !done)
    return done;
  if (auto done = split_planes(run, in.data, shape.rows, {out.data, memory.data()}); !done) return done;
  if (auto done = merge_planes(run, {in.data, in.data}, shape.rows, out.data); !done) return done;
  if (auto done = fill_memory(run, memory, seeded_pattern{}); !done) return done;
  if (auto done = fill_memory(run, memory, poison_pattern{}); !done) return done;
  if (auto done = verify_memory(run, memory, seeded_pattern{}, report); !done) return done;
  return verify_memory(run, memory, poison_pattern{}, report);
}

result<void> metadata_kernels(cudaStream_t stream, const batch_tokens& batch, const page_expansion& pages,
                              const position_front<csr_table_view>& positions,
                              const position_front<padded_table_view>& padded_positions,
                              const table_front<csr_table_view>& rows,
                              const table_front<padded_table_view>& padded_rows, std::span<std::int32_t> out,
                              std::span<std::int64_t> slots) {
  const device_executor run(stream);
  if (auto done = token_sequences(run, batch, out); !done) return done;
  if (auto done = token_positions(run, batch, out, out); !done) return done;
  if (auto done = slot_mapping(run, positions, slots); !done) return done;
  if (auto done = slot_mapping(run, padded_positions, slots); !done) return done;
  if (auto done = slot_mapping(run, rows, slots); !done) return done;
  if (auto done = slot_mapping(run, padded_rows, slots); !done) return done;
  return expand_pages(run, pages, out);
}

result<void> attention_kernels(cudaStream_t stream, const csr_table_view& tables,
                               const padded_table_view& padded, const attention_rows& rows,
                               const kv_memory& cache, const batch_vectors& in, const batch_output& out,
                               std::span<std::byte> workspace) {
  const device_executor run(stream);
  const attention_options options{.query_heads = cache.layout.heads};
#if __CUDA_ARCH_LIST__ >= 900
  // Attention reads an entry of a padded table in one line of its own: one architecture's code of it says
  // enough, and the other's takes a tenth of this file's time.
  if (auto done = paged_attention(run, padded, rows, in, out, cache, 0, workspace, options); !done)
    return done;
#else
  static_cast<void>(padded);
#endif
  return paged_attention(run, tables, rows, in, out, cache, 0, workspace, options);
}

result<void> part_kernels(cudaStream_t stream, const attention_part_shape& shape,
                          std::span<const attention_part> parts, const merged_attention<>& out,
                          const foreign_attention<log_base::two>& foreign,
                          const attention_part_output& part) {
  const device_executor run(stream);
  if (auto done = merge_attention(run, shape, parts, part); !done) return done;
  if (auto done = import_attention(run, shape, foreign, part); !done) return done;
  return merge_attention(run, shape, parts, out);
}

result<void> sparse_kernels(cudaStream_t stream, const top_scores& scores,
                            const token_lists<padded_table_view>& lists, const attention_rows& rows,
                            const kv_memory& cache, const batch_vectors& in, const batch_output& out,
                            std::int32_t* chosen, std::span<std::byte> workspace,
                            const changed_blocks& changed, const chosen_blocks& blocks, float* bounds) {
  const device_executor run(stream);
  if (auto done = select_top(run, scores, 1, chosen, 1, top_order::by_score, workspace); !done) return done;
  const attention_options options{.query_heads = cache.layout.heads};
  if (auto done = summarize_keys(run, changed, cache, 0, workspace); !done) return done;
  if (auto done = bound_scores(run, lists.tables, rows, in, cache, workspace, 1, bounds, options); !done)
    return done;
  if (auto done = list_block_tokens(run, blocks, chosen); !done) return done;
  return paged_attention(run, lists, rows, in, out, cache, 0, workspace, options);
}

result<void> keeping_kernels(cudaStream_t stream, const token_scores& scores, const token_budget& budget,
                             std::int32_t* chosen, const kv_memory& to, const kv_memory& from,
                             const padded_table_view& fresh, const csr_table_view& tables,
                             const kept_tokens& kept) {
  const device_executor run(stream);
  if (auto done = select_tokens(run, scores, budget, chosen, budget.budget); !done) return done;
  return copy_kept_tokens(run, to, fresh, from, tables, kept, 0);
}

result<void> hot_kernels(cudaStream_t stream, const hot_rows_shape& shape, std::span<std::int32_t> state,
                         const hot_rows_step& step, const padded_table_view& tables, const row_pool& pool,
                         std::span<std::byte> rows) {
  const device_executor run(stream);
  if (auto done = reset_hot_rows(run, shape, state); !done) return done;
  if (auto done = resolve_hot_rows(run, shape, state, step); !done) return done;
  return fetch_hot_rows(run, shape, step, tables, pool, rows, 16);
}

result<void> int_kernels(cudaStream_t stream, const int_group_form& form, std::span<std::byte> values,
                         std::span<std::byte> codes, std::uint64_t* damaged) {
  const device_executor run(stream);
  if (auto done = encode_int_groups(run, form, values, codes); !done) return done;
  return decode_int_groups(run, form, codes, values, damaged);
}

template <block_list Blocks>
result<void> all_sums(const device_executor& run, const Blocks& blocks, std::span<std::uint32_t> sums,
                      std::span<std::uint64_t> digests) {
  if (auto done = crc32c_blocks(run, blocks, sums); !done) return done;
  if (auto done = digest_blocks(run, blocks, digests); !done) return done;
  if (auto done = copy_and_crc32c(run, blocks, sums); !done) return done;
  return copy_and_digest(run, blocks, digests);
}

result<void> all_check_kernels(cudaStream_t stream, std::span<const std::byte* const> shards, std::byte* to,
                               const strided_blocks& strided, const numbered_blocks& numbered,
                               const few_copies& few, const listed_copies& listed,
                               std::span<std::uint32_t> words, std::span<std::uint64_t> digests,
                               const kv_memory& cache, std::span<const std::int32_t> numbers) {
  const device_executor run(stream);
  if (auto done = digest_kv_blocks(run, cache, numbers, digests, words.data()); !done) return done;
  if (auto done = xor_parity(run, shards, to, 1); !done) return done;
  for (const dtype each : {dtype::f32, dtype::bf16, dtype::f16}) {
    if (auto done = sum_in_order(run, each, shards, to, 4); !done) return done;
  }
  if (auto done = xor_delta(run, to, to, to, 1, words); !done) return done;
  if (auto done = compare_dirty(run, to, to, 1, words); !done) return done;
  if (auto done = apply_delta(run, to, to, 1, words); !done) return done;
  if (auto done = all_sums(run, strided, words, digests); !done) return done;
  if (auto done = all_sums(run, numbered, words, digests); !done) return done;
  if (auto done = all_sums(run, few, words, digests); !done) return done;
  return all_sums(run, listed, words, digests);
}

}  // namespace llmmem_tests
