/// @file
/// Floats in the forms of messages: encoded, and decoded. `bytes_per_second` is of the floats; `of_plain` is
/// the encoded bytes / the floats'. Rows `wire_sum` add what two contributions restore, as a sum over two
/// ranks does.
///
/// LLMMEM_BENCH_WIRE_KIB  floats (16384)

#include <llmmem/comm/wire_form.hpp>

#include <benchmark/benchmark.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "comm/local_job.hpp"

namespace {

using namespace llmmem;

enum class pass : std::uint8_t { encode, decode, sum };

void convert(benchmark::State& state, const wire_form& wire, pass what) {
  const std::size_t count = std::size_t{llmmem_bench::number("LLMMEM_BENCH_WIRE_KIB", 16384)} * 256;
  std::mt19937 random(1);
  std::vector<float> values(count);
  for (float& each : values)
    each = static_cast<float>(random()) * 0x1p-32F - 0.5F;
  std::vector<std::byte> encoded(wire.bytes(count));
  std::vector<float> sum(count);
  wire.encode(values, encoded.data());
  for (auto _ : state) {
    if (what == pass::encode) wire.encode(values, encoded.data());
    if (what != pass::encode) wire.decode(encoded.data(), values);
    for (std::size_t i = 0; what == pass::sum && i < count; ++i)
      sum[i] += values[i];
    benchmark::DoNotOptimize(encoded.data());
    benchmark::DoNotOptimize(values.data());
    benchmark::DoNotOptimize(sum.data());
    benchmark::ClobberMemory();
  }
  state.counters["of_plain"] = static_cast<double>(encoded.size()) / static_cast<double>(4 * count);
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(4 * count));
}

[[maybe_unused]] const bool is_registered = [] {
  const std::pair<const char*, wire_form> wires[] = {{"plain", wire_format::plain},
                                                     {"bf16", wire_format::bf16},
                                                     {"fp8", wire_format::fp8},
                                                     {"int8", wire_format::int8},
                                                     {"int4", wire_format::int4}};
  for (const auto& [name, wire] : wires) {
    for (const auto& [what, does] : {std::pair("encode/", pass::encode), std::pair("decode/", pass::decode),
                                     std::pair("sum/", pass::sum)}) {
      benchmark::RegisterBenchmark(
          (std::string("wire_") + what + name).c_str(),
          [wire = wire, does = does](benchmark::State& s) { convert(s, wire, does); });
    }
  }
  return true;
}();

}  // namespace
