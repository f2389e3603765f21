// The ratio and speed of codecs on the state of a trained model, on one core.
//
//   encode/who/data, decode/who/data   all of it as one chunk; an item is 1 KiB of the chunk, before encoding
//
// Counters: ratio, how many times smaller; gb_per_s, of the chunk.

#include <llmmem/codec/bf16_cast.hpp>
#include <llmmem/codec/block_int.hpp>
#include <llmmem/codec/byte_plane.hpp>

#include <benchmark/benchmark.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/trained.hpp"

#ifdef LLMMEM_BENCH_ZSTD
#include <llmmem/codec/zstd_plane.hpp>

#include <zstd.h>
#endif

namespace {

using namespace llmmem;
using llmmem_benchmarks::trained;
using llmmem_benchmarks::trained_state;

using byte_vector = std::vector<std::byte>;

/// The encoded data, and the size of one element.
struct data_set {
  const char* name;
  const byte_vector trained_state::* bytes;
  std::size_t element;
};

constexpr data_set weights_bf16{"weights_bf16", &trained_state::weights_bf16, 2};
constexpr data_set weights_f32{"weights_f32", &trained_state::weights_f32, 4};
constexpr data_set mean_f32{"mean_f32", &trained_state::mean_f32, 4};
constexpr data_set variance_f32{"variance_f32", &trained_state::variance_f32, 4};

/// The library's codec, behind two throwing calls.
template <class Codec>
class of_codec {
 public:
  explicit of_codec(std::size_t bytes, std::size_t /*element*/) : codec_(bytes) {}
  [[nodiscard]] static std::size_t worst_case(std::size_t bytes) { return Codec::worst_case_bytes(bytes); }
  [[nodiscard]] std::size_t encode(std::span<const std::byte> in, std::span<std::byte> out) {
    return codec_.encode(in, out).value();
  }
  void decode(std::span<const std::byte> in, std::span<std::byte> out) { codec_.decode(in, out).value(); }

 private:
  Codec codec_;
};

class by_memcpy {
 public:
  by_memcpy(std::size_t /*bytes*/, std::size_t /*element*/) {}
  [[nodiscard]] static std::size_t worst_case(std::size_t bytes) { return bytes; }
  [[nodiscard]] static std::size_t encode(std::span<const std::byte> in, std::span<std::byte> out) {
    std::memcpy(out.data(), in.data(), in.size());
    return in.size();
  }
  static void decode(std::span<const std::byte> in, std::span<std::byte> out) {
    std::memcpy(out.data(), in.data(), in.size());
  }
};

#ifdef LLMMEM_BENCH_ZSTD
/// zstd at level 1, on the unchanged bytes.
class by_zstd {
 public:
  by_zstd(std::size_t /*bytes*/, std::size_t /*element*/)
      : encoder_(ZSTD_createCCtx(), ZSTD_freeCCtx), decoder_(ZSTD_createDCtx(), ZSTD_freeDCtx) {}
  [[nodiscard]] static std::size_t worst_case(std::size_t bytes) { return ZSTD_compressBound(bytes); }
  [[nodiscard]] std::size_t encode(std::span<const std::byte> in, std::span<std::byte> out) {
    return checked(ZSTD_compressCCtx(encoder_.get(), out.data(), out.size(), in.data(), in.size(), 1));
  }
  void decode(std::span<const std::byte> in, std::span<std::byte> out) {
    checked(ZSTD_decompressDCtx(decoder_.get(), out.data(), out.size(), in.data(), in.size()));
  }

 private:
  static std::size_t checked(std::size_t code) {
    if (ZSTD_isError(code) != 0) throw std::runtime_error(ZSTD_getErrorName(code));
    return code;
  }

  std::unique_ptr<ZSTD_CCtx, std::size_t (*)(ZSTD_CCtx*)> encoder_;
  std::unique_ptr<ZSTD_DCtx, std::size_t (*)(ZSTD_DCtx*)> decoder_;
};

/// The same after a transposition: the first byte of every element, the second byte of every element, and so
/// on.
class by_split_zstd {
 public:
  by_split_zstd(std::size_t bytes, std::size_t element)
      : zstd_(bytes, element), element_(element), planes_(bytes) {}
  [[nodiscard]] static std::size_t worst_case(std::size_t bytes) { return by_zstd::worst_case(bytes); }
  [[nodiscard]] std::size_t encode(std::span<const std::byte> in, std::span<std::byte> out) {
    const std::size_t count = in.size() / element_;
    for (std::size_t plane = 0; plane < element_; ++plane) {
      for (std::size_t i = 0; i < count; ++i)
        planes_[plane * count + i] = in[i * element_ + plane];
    }
    return zstd_.encode(planes_, out);
  }
  void decode(std::span<const std::byte> in, std::span<std::byte> out) {
    zstd_.decode(in, planes_);
    const std::size_t count = out.size() / element_;
    for (std::size_t plane = 0; plane < element_; ++plane) {
      for (std::size_t i = 0; i < count; ++i)
        out[i * element_ + plane] = planes_[plane * count + i];
    }
  }

 private:
  by_zstd zstd_;
  std::size_t element_;
  byte_vector planes_;
};
#endif

void tell(benchmark::State& state, std::size_t bytes, std::size_t encoded) {
  state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(bytes / 1024));
  state.counters["ratio"] = static_cast<double>(bytes) / static_cast<double>(encoded);
  state.counters["gb_per_s"] =
      benchmark::Counter(static_cast<double>(bytes) * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
}

template <class Codec, bool Decodes>
void coding(benchmark::State& state, const data_set& data) {
  const byte_vector& chunk = trained().*data.bytes;
  Codec codec(chunk.size(), data.element);
  byte_vector form(Codec::worst_case(chunk.size()));
  byte_vector back(chunk.size());
  const std::size_t length = codec.encode(chunk, form);
  const auto encoded = std::span<const std::byte>(form).first(length);
  codec.decode(encoded, back);
  for ([[maybe_unused]] auto _ : state) {
    if constexpr (Decodes) {
      codec.decode(encoded, back);
      benchmark::DoNotOptimize(back.data());
    } else {
      benchmark::DoNotOptimize(codec.encode(chunk, form));
    }
    benchmark::ClobberMemory();
  }
  tell(state, chunk.size(), length);
}

template <class Codec>
void rows(const char* who, const data_set& data) {
  for (const bool decodes : {false, true}) {
    const std::string name = std::string(decodes ? "decode/" : "encode/") + who + "/" + data.name;
    benchmark::RegisterBenchmark(name.c_str(), decodes ? coding<Codec, true> : coding<Codec, false>, data);
  }
}

template <dtype Element>
void rows_of(const data_set& data) {
  rows<of_codec<byte_plane<Element>>>("llmmem", data);
  rows<by_memcpy>("floor", data);
#ifdef LLMMEM_BENCH_ZSTD
  rows<of_codec<byte_plane<Element, zstd_plane>>>("llmmem_zstd", data);
  rows<by_zstd>("zstd_1", data);
  rows<by_split_zstd>("zstd_1_split", data);
#endif
}

[[maybe_unused]] const bool registered = [] {
  benchmark::AddCustomContext("trained", llmmem_benchmarks::trained_source());
  rows_of<dtype::bf16>(weights_bf16);
  for (const data_set& data : {weights_f32, mean_f32, variance_f32}) {
    rows_of<dtype::f32>(data);
    rows<of_codec<bf16_cast>>("llmmem_bf16_cast", data);
    rows<of_codec<block_int<8>>>("llmmem_block_int8", data);
    rows<of_codec<block_int<4>>>("llmmem_block_int4", data);
    rows<of_codec<block_int<2>>>("llmmem_block_int2", data);
  }
  return true;
}();

}  // namespace
