// The cost of parity and Reed-Solomon codes, on one core.
//
//   xor_all/who/K.bytes         the parity of K pieces
//   xor_into/who/bytes          one piece added to another
//   update_parity/who/bytes     a parity brought up to date with one changed piece
//   rs_encode/who/K+M.bytes     M pieces of parity of K pieces of data
//   rs_rebuild/who/K+M.bytes    M lost pieces of data from what is left
//   rs_update/who/K+M.bytes     M pieces of parity brought up to date with one changed piece
//
// An item is 1 KiB of what is read. `floor` moves the same bytes and computes nothing: all pieces read once,
// of which as many are copied as are written. Counter: gb_per_s, bytes read and written.

#include <llmmem/redundancy/reed_solomon.hpp>
#include <llmmem/redundancy/xor_parity.hpp>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#ifdef LLMMEM_BENCH_ISAL
#include <llmmem/redundancy/isal_reed_solomon.hpp>

#include <isa-l/erasure_code.h>
#endif

namespace {

using namespace llmmem;

/// Consecutive pieces, a few pages apart, as in an arena.
class piece_set {
 public:
  piece_set(std::size_t count, std::size_t bytes) : bytes_(bytes), memory_((bytes + apart) * count + apart) {
    std::mt19937_64 random(1);
    for (std::size_t i = 0; i + 8 <= memory_.size(); i += 8) {
      const std::uint64_t word = random();
      std::memcpy(memory_.data() + i, &word, 8);
    }
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    std::byte* first = memory_.data() + (64 - address % 64) % 64;
    for (std::size_t i = 0; i < count; ++i) {
      spans_.emplace_back(first + i * (bytes + apart / 2), bytes);
      const_spans_.emplace_back(spans_.back());
      pointers_.push_back(reinterpret_cast<unsigned char*>(spans_.back().data()));
    }
  }

  [[nodiscard]] std::span<const std::span<std::byte>> spans() const { return spans_; }
  [[nodiscard]] std::span<const std::span<const std::byte>> const_spans() const { return const_spans_; }
  [[nodiscard]] unsigned char** pointers() { return pointers_.data(); }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

 private:
  static constexpr std::size_t apart = 8320;  // two pages and two lines: not all in the same sets of a cache
  std::size_t bytes_;
  std::vector<std::byte> memory_;
  std::vector<std::span<std::byte>> spans_;
  std::vector<std::span<const std::byte>> const_spans_;
  std::vector<unsigned char*> pointers_;
};

/// Every byte, once. Vectors as wide as the machine has.
#if defined(__x86_64__) && !defined(__clang__)
[[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
#endif
std::uint64_t read_all(const std::byte* from, std::size_t bytes) {
  std::uint64_t sums[32] = {};
  for (std::size_t i = 0; i + sizeof(sums) <= bytes; i += sizeof(sums)) {
    std::uint64_t words[32];
    std::memcpy(words, from + i, sizeof(words));
    for (std::size_t k = 0; k < 32; ++k)
      sums[k] ^= words[k];
  }
  std::uint64_t sum = 0;
  for (const std::uint64_t each : sums)
    sum ^= each;
  return sum;
}

/// The bytes that an operation moves, moved by the C library and a loop.
void move_only(std::span<const std::span<const std::byte>> read,
               std::span<const std::span<std::byte>> written) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < read.size(); ++i) {
    if (i < written.size()) {
      std::memcpy(written[i].data(), read[i].data(), read[i].size());
    } else {
      sum ^= read_all(read[i].data(), read[i].size());
    }
  }
  benchmark::DoNotOptimize(sum);
}

void tell(benchmark::State& state, std::size_t read, std::size_t written) {
  state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(read / 1024));
  state.counters["gb_per_s"] = benchmark::Counter(static_cast<double>(read + written) * 1e-9,
                                                  benchmark::Counter::kIsIterationInvariantRate);
}

std::string size_text(std::size_t bytes) {
  return bytes < 1024 * 1024 ? std::to_string(bytes / 1024) + "KiB"
                             : std::to_string(bytes / 1024 / 1024) + "MiB";
}

template <class Work>
void row(const std::string& name, std::size_t reads, std::size_t writes, std::size_t bytes, Work&& work) {
  benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) mutable {
    piece_set from(reads, bytes);
    piece_set to(std::max(writes, std::size_t{1}), bytes);
    for ([[maybe_unused]] auto _ : state) {
      work(from, to);
      benchmark::ClobberMemory();
    }
    tell(state, reads * bytes, writes * bytes);
  });
}

void xor_rows(std::size_t bytes) {
  const std::string size = size_text(bytes);
  const auto floor = [](piece_set& from, piece_set& to) { move_only(from.const_spans(), to.spans()); };
  for (const std::size_t pieces : {2U, 4U, 8U}) {
    const std::string parameters = std::string("/").append(std::to_string(pieces)).append(".").append(size);
    row("xor_all/floor" + parameters, pieces, 1, bytes, floor);
    row("xor_all/llmmem" + parameters, pieces, 1, bytes,
        [](piece_set& from, piece_set& to) { xor_all(to.spans()[0], from.const_spans()).value(); });
    row("xor_all/llmmem_portable" + parameters, pieces, 1, bytes, [](piece_set& from, piece_set& to) {
      xor_all(to.spans()[0], from.const_spans(), simd_path::portable).value();
    });
  }
  // The destination is also read: it is the first of two pieces.
  const auto floor_in_place = [](piece_set& from, piece_set& /*to*/) {
    const auto all = from.spans();
    benchmark::DoNotOptimize(read_all(all[0].data(), all[0].size()));
    for (std::size_t i = 2; i < all.size(); ++i)
      benchmark::DoNotOptimize(read_all(all[i].data(), all[i].size()));
    std::memcpy(all[0].data(), all[1].data(), all[0].size());
  };
  row("xor_into/floor/" + size, 2, 1, bytes, floor_in_place);
  row("xor_into/llmmem/" + size, 2, 1, bytes,
      [](piece_set& from, piece_set& /*to*/) { xor_into(from.spans()[0], from.const_spans()[1]).value(); });
  row("update_parity/floor/" + size, 3, 1, bytes, floor_in_place);
  row("update_parity/llmmem/" + size, 3, 1, bytes, [](piece_set& from, piece_set& /*to*/) {
    update_parity(from.spans()[0], from.const_spans()[1], from.const_spans()[2]).value();
  });
}

/// The first min(k, m) data pieces, lost.
rebuild_plan losses(const code_shape& shape) {
  std::vector<piece_id> lost;
  for (std::uint32_t i = 0; i < shape.data && i < shape.parity; ++i)
    lost.push_back(piece_id{i});
  return plan_rebuild(shape, lost);
}

template <class Engine>
void code_rows(const char* who, const code_shape& shape, std::size_t bytes, const Engine& engine) {
  const std::string parameters = std::string(who) + "/" + to_text(shape) + "." + size_text(bytes);
  const reed_solomon<Engine> code(shape, engine);
  row("rs_encode/" + parameters, shape.data, shape.parity, bytes,
      [code](piece_set& from, piece_set& to) { code.encode(from.const_spans(), to.spans()).value(); });
  const rebuild_plan plan = losses(shape);
  row("rs_rebuild/" + parameters, shape.data, plan.targets.size(), bytes,
      [code, plan](piece_set& from, piece_set& to) {
        code.rebuild(plan, from.const_spans(), to.spans()).value();
      });
  row("rs_update/" + parameters, 2, shape.parity, bytes, [code](piece_set& from, piece_set& to) {
    code.update(piece_id{0}, from.const_spans()[0], from.const_spans()[1], to.spans()).value();
  });
}

#ifdef LLMMEM_BENCH_ISAL
/// ISA-L as its own examples call it.
void isal_rows(const code_shape& shape, std::size_t bytes) {
  const std::string parameters = "isal/" + to_text(shape) + "." + size_text(bytes);
  const int k = static_cast<int>(shape.data);
  const int m = static_cast<int>(shape.parity);
  std::vector<unsigned char> matrix(std::size_t{shape.pieces()} * shape.data);
  gf_gen_cauchy1_matrix(matrix.data(), k + m, k);
  std::vector<unsigned char> tables(std::size_t{32} * shape.data * shape.parity);
  ec_init_tables(k, m, matrix.data() + std::ptrdiff_t{k} * k, tables.data());
  row("rs_encode/" + parameters, shape.data, shape.parity, bytes,
      [=](piece_set& from, piece_set& to) mutable {
        ec_encode_data(static_cast<int>(from.bytes()), k, m, tables.data(), from.pointers(), to.pointers());
      });
  rebuild_plan plan = losses(shape);
  const int lost = static_cast<int>(plan.targets.size());
  row("rs_rebuild/" + parameters, shape.data, plan.targets.size(), bytes,
      [=](piece_set& from, piece_set& to) mutable {
        std::vector<unsigned char> made(std::size_t{32} * plan.coefficients.size());
        ec_init_tables(k, lost, plan.coefficients.data(), made.data());
        ec_encode_data(static_cast<int>(from.bytes()), k, lost, made.data(), from.pointers(), to.pointers());
      });
  row("rs_update/" + parameters, 2, shape.parity, bytes, [=](piece_set& from, piece_set& to) mutable {
    // A piece that is only added, so the difference must be computed first, in a separate pass.
    std::byte* delta = from.spans()[1].data();
    xor_into(from.spans()[1], from.const_spans()[0]).value();
    ec_encode_data_update(static_cast<int>(from.bytes()), k, m, 0, tables.data(),
                          reinterpret_cast<unsigned char*>(delta), to.pointers());
  });
}
#endif

void code_floor(const code_shape& shape, std::size_t bytes) {
  row("rs_encode/floor/" + to_text(shape) + "." + size_text(bytes), shape.data, shape.parity, bytes,
      [](piece_set& from, piece_set& to) { move_only(from.const_spans(), to.spans()); });
}

[[maybe_unused]] const bool registered = [] {
  benchmark::AddCustomContext("simd_path", to_text(best_simd_path()));
  constexpr std::size_t in_cache = std::size_t{16} << 10;
  constexpr std::size_t in_memory = std::size_t{32} << 20;
  for (const std::size_t bytes : {in_cache, in_memory})
    xor_rows(bytes);
  for (const std::size_t bytes : {in_cache, in_memory}) {
    for (const code_shape shape : {code_shape{2, 2}, code_shape{4, 2}, code_shape{8, 3}}) {
      code_floor(shape, bytes);
      code_rows("llmmem", shape, bytes, portable_gf_engine());
      if (best_simd_path() == simd_path::gfni)
        code_rows("llmmem_avx2", shape, bytes, portable_gf_engine(simd_path::avx2));
#ifdef LLMMEM_BENCH_ISAL
      code_rows("llmmem_isal", shape, bytes, isal_gf_engine());
      isal_rows(shape, bytes);
#endif
    }
  }
  return true;
}();

}  // namespace
