// Every kernel that the library has, instantiated: what the gate on their device code compiles and reads.
#include <llmmem/kernels/batched_copy.hpp>
#include <llmmem/kernels/device_executor.cuh>
#include <llmmem/kernels/kv_append.hpp>
#include <llmmem/kernels/kv_blocks.hpp>
#include <llmmem/kernels/kv_gather.hpp>

namespace llmmem_tests {

using namespace llmmem;

template <class Front>
result<void> both_ways(const device_executor& run, const Front& front, const kv_memory& cache,
                       const batch_vectors& in, const batch_room& out) {
  if (auto done = append_kv(run, front, in, in, cache, 0); !done) return done;
  return gather_kv(run, front, out, out, cache, 0);
}

result<void> all_kernels(cudaStream_t stream, const slot_front& slots,
                         const position_front<csr_table_view>& positions,
                         const position_front<padded_table_view>& padded_positions,
                         const table_front<csr_table_view>& rows,
                         const table_front<padded_table_view>& padded_rows, const kv_memory& cache,
                         const batch_vectors& in, const batch_room& out, std::span<const block_pair> pairs,
                         std::span<const copy_task> tasks) {
  const device_executor run(stream);
  if (auto done = both_ways(run, slots, cache, in, out); !done) return done;
  if (auto done = append_kv(run, positions, in, in, cache, 0); !done) return done;
  if (auto done = append_kv(run, padded_positions, in, in, cache, 0); !done) return done;
  if (auto done = gather_kv(run, rows, out, out, cache, 0); !done) return done;
  if (auto done = gather_kv(run, padded_rows, out, out, cache, 0); !done) return done;
  if (auto done = copy_kv_blocks(run, cache, cache, pairs); !done) return done;
  if (auto done = copy_batch(run, tasks, 1); !done) return done;
  return copy_few(run, tasks);
}

}  // namespace llmmem_tests
