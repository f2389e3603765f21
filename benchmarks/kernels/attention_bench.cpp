// Attention on the host, on one core, as a share of what the core can do at most.
//
//   attend/<cache's type or named form>/<query heads for each of the cache's>/<path>
//                  8 sequences over a cache of LLMMEM_BENCH_ATTENTION_MIB (256) with 8 heads of 128, in
//                  blocks of 16 tokens in random order
//   integers/...   the same by integer dots; amx is a path of these, and of bf16 and fp8
//   latents/<bytes of a record>/<query heads>/<path>
//                  a sequence of 16 MiB of records of latents, in blocks of 64 tokens in random order
//   reproducible   the same by the executor whose bits are those of a device
//
// Counters: gb_per_s, of keys and values, each counted once; gflop_per_s, two for each product and sum;
// of_limit, the share of the smaller of two limits, measured before the first row: the rate at which the core
// reads the same bytes in their own order, and its multiplications and additions in registers (of bytes, for
// integer dots).

#include <llmmem/kernels/host_vector_executor.hpp>
#include <llmmem/kernels/latent_tokens.hpp>
#include <llmmem/kernels/paged_attention.hpp>
#include <llmmem/paging/block_table.hpp>
#include <llmmem/paging/latent_record.hpp>
#include <llmmem/paging/named_forms.hpp>

#include <benchmark/benchmark.h>

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace {

using namespace llmmem;

constexpr std::uint32_t head_dim = 128;
constexpr std::uint32_t heads = 8;
constexpr std::uint64_t rows = 8;

std::uint64_t cache_bytes() {
  const char* const mib = std::getenv("LLMMEM_BENCH_ATTENTION_MIB");
  return (mib == nullptr ? std::uint64_t{256} : std::strtoull(mib, nullptr, 10)) << 20;
}

struct free_memory {
  void operator()(std::byte* at) const noexcept { std::free(at); }
};

/// A cache of bytes that are numbers from 1/8 to 2 in size in every type, in huge pages where the machine has
/// them: processors take a hundred cycles for each subnormal product.
struct cache_memory {
  std::uint64_t bytes;
  std::unique_ptr<std::byte, free_memory> at;

  explicit cache_memory(std::uint64_t size) : bytes((size + (2U << 20) - 1) / (2U << 20) * (2U << 20)) {
    at.reset(static_cast<std::byte*>(std::aligned_alloc(2U << 20, bytes)));
    ::madvise(at.get(), bytes, MADV_HUGEPAGE);
    std::mt19937_64 random(1);
    for (std::uint64_t i = 0; i + 8 <= bytes; i += 8) {
      const std::uint64_t word = (random() & 0x81FF'81FF'81FF'81FFU) | 0x3E00'3E00'3E00'3E00U;
      std::memcpy(at.get() + i, &word, 8);
    }
  }
};

/// The calling thread's time on a core, as the rows count it: other programs take none of it.
double core_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

template <class Run>
double best_seconds(const Run& run) {
  double best = 1e9;
  for (int i = 0; i < 8; ++i) {
    const double begin = core_seconds();
    run();
    best = std::min(best, core_seconds() - begin);
  }
  return best;
}

template <unsigned N>
[[gnu::always_inline]] inline float add_products(std::uint64_t turns) {
  detail::float_lanes<N> sum[12];
  for (unsigned j = 0; j < 12; ++j)  // not alike, or a compiler computes one for all
    sum[j] = detail::float_lanes<N>{} + static_cast<float>(turns % (j + 2));
  const detail::float_lanes<N> factor = detail::float_lanes<N>{} + 0.999F;
  const detail::float_lanes<N> each = detail::float_lanes<N>{} + 0.001F;
  for (std::uint64_t i = 0; i < turns; ++i) {
    LLMMEM_LANES_UNROLL
    for (unsigned j = 0; j < 12; ++j)
      sum[j] = sum[j] * factor + each;
  }
  float all = 0;
  for (const auto& lanes : sum)
    all += lanes[0];
  return all;
}
float products_baseline(std::uint64_t turns) {
  return add_products<4>(turns);
}
#if defined(__x86_64__)
[[gnu::target("avx2,fma")]] float products_avx2(std::uint64_t turns) {
  return add_products<8>(turns);
}
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]] float products_avx512(std::uint64_t turns) {
  return add_products<16>(turns);
}
#endif

template <unsigned N, detail::byte_dots Dots>
[[gnu::always_inline]] inline std::int32_t add_bytes(std::uint64_t turns) {
  detail::integer_lanes<N> sum[12];
  for (unsigned j = 0; j < 12; ++j)
    sum[j] = detail::integer_lanes<N>{} + static_cast<std::int32_t>(j);
  const detail::word_lanes<N> a = detail::word_lanes<N>{} + static_cast<std::uint32_t>(turns);
  for (std::uint64_t i = 0; i < turns; ++i) {
    LLMMEM_LANES_UNROLL
    for (unsigned j = 0; j < 12; ++j) {
      // Of the sums themselves: else a compiler computes the products once.
      const detail::word_lanes<N> b = reinterpret_cast<detail::word_lanes<N>>(sum[j]);
      detail::add_byte_products<N, Dots>(a, b, sum[j]);
    }
  }
  std::int32_t all = 0;
  for (const auto& lanes : sum)
    all += lanes[0];
  return all;
}
std::int32_t bytes_baseline(std::uint64_t turns) {
  return add_bytes<4, detail::byte_dots::by_halves>(turns);
}
#if defined(__x86_64__)
[[gnu::target("avx2,fma")]] std::int32_t bytes_avx2(std::uint64_t turns) {
  return add_bytes<8, detail::byte_dots::by_halves>(turns);
}
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]] std::int32_t bytes_avx512(
    std::uint64_t turns) {
  return add_bytes<16, detail::byte_dots::by_fours>(turns);
}
#endif

#if defined(__x86_64__)
/// Products of tiles of AMX, in their registers: of bytes, or of bf16.
template <bool Bytes>
void multiply_tiles(std::uint64_t turns) {
  detail::tile_shapes shapes;
  for (unsigned tile = 0; tile < 8; ++tile)
    shapes.set(tile, 16, 64);
  const detail::tile_use tiles(shapes);
  for (std::uint64_t i = 0; i < turns; ++i) {
    if constexpr (Bytes) {
      detail::add_signed_dots<0, 4, 5>();
      detail::add_signed_dots<1, 4, 5>();
      detail::add_signed_dots<2, 4, 5>();
      detail::add_signed_dots<3, 4, 5>();
    } else {
      detail::add_bf16_dots<0, 4, 5>();
      detail::add_bf16_dots<1, 4, 5>();
      detail::add_bf16_dots<2, 4, 5>();
      detail::add_bf16_dots<3, 4, 5>();
    }
  }
}
#endif

/// Multiplications and additions of bytes a second.
double byte_arithmetic_of(vector_path path) {
  constexpr std::uint64_t turns = 1'000'000;
#if defined(__x86_64__)
  if (path == vector_path::amx)
    return 2.0 * 4 * (16 * 16 * 64) * turns / best_seconds([] { multiply_tiles<true>(turns); });
#endif
  const double seconds = best_seconds([&] {
#if defined(__x86_64__)
    if (path == vector_path::avx512) return benchmark::DoNotOptimize(bytes_avx512(turns));
    if (path == vector_path::avx2) return benchmark::DoNotOptimize(bytes_avx2(turns));
#endif
    benchmark::DoNotOptimize(bytes_baseline(turns));
  });
  return 2.0 * 4 * 12 * detail::lanes_in(path) * static_cast<double>(turns) / seconds;
}

/// Multiplications and additions a second.
double arithmetic_of(vector_path path) {
  constexpr std::uint64_t turns = 1'000'000;
#if defined(__x86_64__)
  if (path == vector_path::amx)
    return 2.0 * 4 * (16 * 16 * 32) * turns / best_seconds([] { multiply_tiles<false>(turns); });
#endif
  const double seconds = best_seconds([&] {
#if defined(__x86_64__)
    if (path == vector_path::avx512) return benchmark::DoNotOptimize(products_avx512(turns));
    if (path == vector_path::avx2) return benchmark::DoNotOptimize(products_avx2(turns));
#endif
    benchmark::DoNotOptimize(products_baseline(turns));
  });
  return 2.0 * 12 * detail::lanes_in(path) * static_cast<double>(turns) / seconds;
}

/// Bytes a second, read in their order.
double read_rate(const cache_memory& cache) {
  return static_cast<double>(cache.bytes) / best_seconds([&] {
           std::uint64_t sums[16]{};
           const auto* const words = reinterpret_cast<const std::uint64_t*>(cache.at.get());
           for (std::uint64_t i = 0; i + 16 <= cache.bytes / 8; i += 16) {
             for (std::uint64_t j = 0; j < 16; ++j)
               sums[j] += words[i + j];
           }
           benchmark::DoNotOptimize(sums);
         });
}

/// Scales of 1/64, because random ones would be subnormal, which costs a processor a hundred cycles each.
void set_scales(const cache_memory& memory, const kv_layout& layout, std::uint64_t blocks) {
  using enum paging::plane_role;
  for (std::uint32_t p = 2; p < layout.planes(); ++p) {
    const plane_strides strides = layout.strides(p, blocks);
    const dtype element = layout.element_of(p);
    const bool is_global = layout.role_of(p) == key_global || layout.role_of(p) == value_global;
    const std::uint32_t bits = is_global                ? 0x3F80'0000U
                               : element == dtype::f32  ? 0x3C80'0000U
                               : element == dtype::bf16 ? 0x3C80U
                                                        : 0x08U;
    const std::uint64_t size = bits_of(element) / 8;
    for (std::uint64_t block = 0; block < blocks; ++block) {
      for (std::uint32_t token = 0; token < layout.tokens_of(p); ++token) {
        for (std::uint32_t head = 0; head < layout.heads_of(p); ++head) {
          std::byte* const at = memory.at.get() + strides.offset(0, block, token, head);
          for (std::uint64_t i = 0; i < layout.vector_elements(p); ++i)
            std::memcpy(at + i * size, &bits, size);
        }
      }
    }
  }
}

void attend(benchmark::State& state, const kv_layout& layout, std::uint32_t group,
            attention_arithmetic arithmetic, vector_path path) {
  static const cache_memory memory(cache_bytes());
  const double read = read_rate(memory);
  path = arithmetic == attention_arithmetic::host_integers ? detail::integer_path(path) : path;
  const double products =
      arithmetic == attention_arithmetic::host_integers ? byte_arithmetic_of(path) : arithmetic_of(path);
  const std::uint64_t blocks = cache_bytes() / layout.block_bytes();
  set_scales(memory, layout, blocks);
  std::vector<std::int32_t> table(blocks);
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), std::mt19937_64(2));
  std::vector<std::int32_t> indptr;
  for (std::uint64_t i = 0; i <= rows; ++i)
    indptr.push_back(static_cast<std::int32_t>(blocks * i / rows));
  const std::vector<std::int32_t> last(rows, 16);
  const csr_table_view tables{indptr.data(), table.data(), last.data(), rows, 16};
  const std::uint32_t query_heads = heads * group;
  std::vector<float> queries(rows * query_heads * head_dim, 0.01F);
  std::vector<float> out(queries.size());
  const attention_options how{.query_heads = query_heads, .element = dtype::f32, .arithmetic = arithmetic};
  const std::uint64_t vector = head_dim * sizeof(float);
  const host_vector_executor run(path);
  for (auto _ : state) {
    paged_attention(run, tables, {.rows = rows},
                    {reinterpret_cast<const std::byte*>(queries.data()), query_heads * vector, vector},
                    {reinterpret_cast<std::byte*>(out.data()), query_heads * vector, vector},
                    {memory.at.get(), blocks, layout}, 0, {}, how)
        .value();
    benchmark::ClobberMemory();
  }
  const auto bytes = static_cast<double>(layout.total_bytes(blocks));
  const double flop = 4.0 * head_dim * query_heads * static_cast<double>(blocks * 16);
  const double limit = std::min(read, products * bytes / flop);
  const auto rate = [&](double each) {
    return benchmark::Counter(each * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
  };
  state.counters["gb_per_s"] = rate(bytes / 1e9);
  state.counters["gflop_per_s"] = rate(flop / 1e9);
  state.counters["of_limit"] = rate(bytes / limit);
}

void attend_latents(benchmark::State& state, const paging::latent_record& record, std::uint32_t query_heads,
                    attention_arithmetic arithmetic, vector_path path) {
  constexpr std::uint64_t bytes = std::uint64_t{16} << 20;
  const kv_layout layout =
      paging::latent_layout({.layers = 1, .heads = 1, .head_dim = 1, .block_tokens = 64}, record);
  const std::uint64_t blocks = bytes / layout.block_bytes();
  const cache_memory memory(layout.total_bytes(blocks));
  const kv_memory cache{memory.at.get(), blocks, layout};
  const double read = read_rate(memory);
  const double products = arithmetic_of(path);
  std::mt19937_64 random(3);
  std::vector<float> values(blocks * 64 * record.key_elements());
  for (float& each : values)
    each = static_cast<float>(random() % 2048) / 1024 - 1;
  std::vector<std::int64_t> slots(blocks * 64);
  std::iota(slots.begin(), slots.end(), 0);
  const auto* const from = reinterpret_cast<const std::byte*>(values.data());
  const std::uint64_t row = record.key_elements() * sizeof(float);
  append_mla(host_executor{}, slot_front(slots, 64, blocks), {from, row, 0},
             {from + record.latents * sizeof(float), row, 0}, record, cache, 0, {.element = dtype::f32})
      .value();
  std::vector<std::int32_t> table(blocks);
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), std::mt19937_64(2));
  const auto tokens = static_cast<std::int32_t>(blocks * 64);
  const padded_table_view tables{table.data(), &tokens, 1, static_cast<std::int32_t>(blocks), 64};
  std::vector<float> queries(query_heads * record.key_elements(), 0.01F);
  std::vector<float> out(query_heads * record.value_elements());
  const attention_options how{.query_heads = query_heads,
                              .element = dtype::f32,
                              .scale = 0.07F,
                              .arithmetic = arithmetic,
                              .latents = &record};
  const host_vector_executor run(path);
  const std::uint64_t out_vector = record.value_elements() * sizeof(float);
  for (auto _ : state) {
    paged_attention(run, tables, {.rows = 1},
                    {reinterpret_cast<const std::byte*>(queries.data()), query_heads * row, row},
                    {reinterpret_cast<std::byte*>(out.data()), query_heads * out_vector, out_vector}, cache,
                    0, {}, how)
        .value();
    benchmark::ClobberMemory();
  }
  const auto all = static_cast<double>(layout.total_bytes(blocks));
  const double flop = 2.0 * (record.key_elements() + record.value_elements()) * query_heads *
                      static_cast<double>(blocks * 64);
  const double limit = std::min(read, products * all / flop);
  const auto rate = [&](double each) {
    return benchmark::Counter(each * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
  };
  state.counters["gb_per_s"] = rate(all / 1e9);
  state.counters["gflop_per_s"] = rate(flop / 1e9);
  state.counters["of_limit"] = rate(all / limit);
}

constexpr kv_layout shape_of(dtype element) {
  return {.layers = 1, .heads = heads, .head_dim = head_dim, .block_tokens = 16, .element = element};
}

const bool are_registered = [] {
  for (const dtype element : {dtype::f32, dtype::bf16, dtype::f16, dtype::fp8_e4m3}) {
    for (const std::uint32_t group : {1U, 4U, 8U, 16U}) {
      for (const vector_path path : vector_paths) {
        const bool is_amx = path == vector_path::amx;
        if (!has_vector_path(path) || (is_amx && element != dtype::bf16 && element != dtype::fp8_e4m3))
          continue;
        const std::string name =
            "attend/" + std::string(name_of(element)) + "/" + std::to_string(group) + "/" + to_text(path);
        benchmark::RegisterBenchmark(name.c_str(), attend, shape_of(element), group,
                                     attention_arithmetic::host_vectors, path);
      }
    }
  }
  for (std::uint32_t i = 0; i < paging::named_form_count; ++i) {
    const auto form = static_cast<paging::named_form>(i);
    for (const std::uint32_t group : {1U, 8U}) {
      for (const vector_path path : vector_paths) {
        if (!has_vector_path(path)) continue;
        const std::string name = "attend/" + std::string(paging::name_of(form)) + "/" +
                                 std::to_string(group) + "/" + to_text(path);
        const kv_layout layout = paging::in_form(shape_of(dtype::bf16), form);
        if (detail::float_path(path) == path)
          benchmark::RegisterBenchmark(name.c_str(), attend, layout, group,
                                       attention_arithmetic::host_vectors, path);
        if (!detail::check_integers(layout)) continue;
        benchmark::RegisterBenchmark(("integers" + name.substr(name.find('/'))).c_str(), attend, layout,
                                     group, attention_arithmetic::host_integers, path);
      }
    }
  }
  for (const paging::latent_record& record :
       {paging::bf16_mla, paging::fp8_ds_mla, paging::fp8_v4_mla, paging::nvfp4_ds_mla}) {
    for (const std::uint32_t query_heads : {16U, 128U}) {
      for (const vector_path path : vector_paths) {
        if (!has_vector_path(path) || detail::float_path(path) != path) continue;
        const std::string name = "latents/" + std::to_string(record.token_bytes()) + "/" +
                                 std::to_string(query_heads) + "/" + to_text(path);
        benchmark::RegisterBenchmark(name.c_str(), attend_latents, record, query_heads,
                                     attention_arithmetic::host_vectors, path);
      }
    }
  }
  benchmark::RegisterBenchmark("reproducible/656/16", attend_latents, paging::fp8_ds_mla, 16U,
                               attention_arithmetic::reproducible, vector_path::baseline);
  benchmark::RegisterBenchmark("reproducible/bf16/8", attend, shape_of(dtype::bf16), 8U,
                               attention_arithmetic::reproducible, vector_path::baseline);
  return true;
}();

}  // namespace
