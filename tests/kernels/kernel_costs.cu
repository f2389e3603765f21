// What each kernel costs a device: instructions, and sectors of memory, for the bytes that it must move. The
// PTX machine counts them, so the figures are exact, and the same on every machine. They are compared with
// the table of a page, whose rows must be what was counted now but for a twentieth.
//
//   kernel_costs docs/benchmarks/kernel_costs.md   compares, and prints the rows that differ as they are now
//   kernel_costs                                   prints all rows of one architecture, as the page has them
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
#include <llmmem/kernels/merge_attention.hpp>
#include <llmmem/kernels/muon_phases.hpp>
#include <llmmem/kernels/ordered_sum.hpp>
#include <llmmem/kernels/paged_attention.hpp>
#include <llmmem/kernels/plane_split.hpp>
#include <llmmem/kernels/quantize_groups.hpp>
#include <llmmem/kernels/select_tokens.hpp>
#include <llmmem/kernels/select_top.hpp>
#include <llmmem/kernels/xor_blocks.hpp>
#include <llmmem/paging/latent_record.hpp>
#include <llmmem/paging/named_forms.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <numeric>
#include <random>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "ptx_machine/hooks.hpp"
#include "support/device.cuh"
#include "support/small_elements.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;

constexpr std::uint64_t kib = 1024;

/// Of one row of the table.
struct cost {
  double instructions = 0;  ///< of lanes, for 16 bytes that must be read or written
  double useful = 0;        ///< bytes that lanes asked for, of those of the sectors that they touched
  double touched = 0;       ///< bytes of sectors, for one that must be read or written
};

[[nodiscard]] std::string text_of(const std::string& name, const cost& of) {
  char text[160];
  std::snprintf(text, sizeof text, "| %s | %.1f | %.2f | %.2f |", name.c_str(), of.instructions, of.useful,
                of.touched);
  return text;
}

/// Runs kernels one at a time, and keeps what each cost.
class counting {
 public:
  counting() { check(cudaStreamCreate(&stream_), "a stream"); }
  ~counting() { static_cast<void>(cudaStreamDestroy(stream_)); }
  counting(const counting&) = delete;
  counting& operator=(const counting&) = delete;

  /// @param bytes  those that must be read and written, sums and scales among them.
  template <class Launch>
  void add(const std::string& name, std::uint64_t bytes, const Launch& launch) {
    const ptx_machine_counts before = ptx_machine_counted();
    const result<void> done = launch(device_executor(stream_));
    check(cudaStreamSynchronize(stream_), name.c_str());
    if (!done) {
      std::fprintf(stderr, "FAILED: %s: %s\n", name.c_str(), done.error().message().c_str());
      std::exit(1);
    }
    const ptx_machine_counts after = ptx_machine_counted();
    const auto asked = static_cast<double>(after.bytes - before.bytes);
    const auto sectors = static_cast<double>(after.sectors - before.sectors);
    const auto needed = static_cast<double>(bytes);
    rows_.emplace_back(
        name, cost{static_cast<double>(after.lane_instructions - before.lane_instructions) * 16 / needed,
                   asked / (32 * sectors), 32 * sectors / needed});
  }
  [[nodiscard]] const std::vector<std::pair<std::string, cost>>& rows() const { return rows_; }

 private:
  cudaStream_t stream_ = nullptr;
  std::vector<std::pair<std::string, cost>> rows_{};
};

/// Memory on the device, all of it written.
[[nodiscard]] device_array<std::byte> any_memory(std::uint64_t bytes, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> out(bytes);
  std::ranges::generate(out, [&] { return static_cast<std::byte>(random() & 0x3F); });  // small as bf16
  return device_array<std::byte>(out);
}

void count_copies(counting& count) {
  constexpr std::uint64_t bytes = 256 * kib;
  const auto from = any_memory(bytes + 16, 1);
  const auto to = any_memory(bytes + 16, 2);
  for (const std::uint64_t skew : {16, 8, 4, 1}) {
    const auto aligned = static_cast<std::uint32_t>(skew);
    const std::uint64_t at = skew % 16;
    std::vector<copy_task> tasks;
    for (std::uint64_t i = 0; i < 16; ++i)
      tasks.push_back({from.data() + at + i * 16 * kib, to.data() + at + i * 16 * kib, 16 * kib});
    const device_array<copy_task> list(tasks);
    count.add("copy_batch, 16 x 16 KiB by " + std::to_string(skew), 2 * bytes, [&](const auto& run) {
      return copy_batch(run, {list.data(), list.size()}, 16 * kib, {aligned, aligned});
    });
  }
  std::vector<copy_task> apart;
  for (std::uint64_t i = 0; i < 16; ++i)
    apart.push_back({from.data() + 3 + i * 16 * kib, to.data() + 5 + i * 16 * kib, 16 * kib});
  const device_array<copy_task> list(apart);
  count.add("copy_batch, 16 x 16 KiB apart", 2 * bytes,
            [&](const auto& run) { return copy_batch(run, {list.data(), list.size()}, 16 * kib, {1, 1}); });
}

void count_tokens(counting& count) {
  const device_array<float> scale(std::vector<float>{1.5F});
  constexpr std::uint64_t tokens = 64;
  constexpr std::uint64_t blocks = 8;
  std::vector<std::int64_t> slots(tokens);
  for (std::uint64_t i = 0; i < tokens; ++i)
    slots[i] = static_cast<std::int64_t>(i * 29 % (blocks * 16));
  const device_array<std::int64_t> on_device(slots);
  const slot_front front({on_device.data(), tokens}, 16, blocks);
  const auto batch = any_memory(tokens * 4096, 3);
  for (const auto& [name, stored] :
       {std::pair{"bf16", dtype::bf16}, std::pair{"bf16 to e4m3", dtype::fp8_e4m3}}) {
    for (const auto order : {paging::head_order::nhd, paging::head_order::hnd}) {
      const kv_layout layout{
          .layers = 1, .heads = 8, .head_dim = 128, .element = stored, .heads_in_block = order};
      const auto cache = any_memory(layout.total_bytes(blocks), 4);
      const token_options options{.element = dtype::bf16,
                                  .scales = {.keys = scale.data(), .values = scale.data()}};
      const std::uint64_t bytes = tokens * (4096 + layout.layer_bytes() / layout.block_tokens + 8);
      const std::string shape =
          std::string(", ") + name + (order == paging::head_order::nhd ? " NHD" : " HND");
      const auto vectors = [&]<class Vectors>(Vectors, std::uint64_t plane) {
        return Vectors{batch.data() + plane * tokens * 2048, 2048, 256};
      };
      const kv_memory memory{cache.data(), blocks, layout};
      count.add("append_kv" + shape, bytes, [&](const auto& run) {
        return append_kv(run, front, vectors(batch_vectors{}, 0), vectors(batch_vectors{}, 1), memory, 0,
                         options);
      });
      count.add("gather_kv" + shape, bytes, [&](const auto& run) {
        return gather_kv(run, front, vectors(batch_output{}, 0), vectors(batch_output{}, 1), memory, 0,
                         options);
      });
    }
  }
}

void count_blocks(counting& count) {
  constexpr std::uint64_t blocks = 8;
  const kv_layout layout{.layers = 2, .heads = 8, .head_dim = 128, .element = dtype::bf16};
  kv_layout other = layout;
  other.heads_in_block = paging::head_order::hnd;
  const auto from = any_memory(layout.total_bytes(blocks), 5);
  const auto to = any_memory(layout.total_bytes(blocks), 6);
  const device_array<block_pair> pairs(std::vector<block_pair>{{3, 0}, {5, 1}, {0, 6}});
  const std::uint64_t bytes = 2 * 3 * layout.total_bytes(blocks) / blocks;
  const auto copy = [&](const kv_layout& as) {
    return [&](const auto& run) {
      return copy_kv_blocks(run, {to.data(), blocks, as}, {from.data(), blocks, layout},
                            {pairs.data(), pairs.size()});
    };
  };
  count.add("copy_kv_blocks, the same layout", bytes, copy(layout));
  count.add("copy_kv_blocks, NHD to HND", bytes, copy(other));
  const device_array<std::int32_t> numbers(std::vector<std::int32_t>{3, 5, 0});
  const device_array<std::uint64_t> sums(std::vector<std::uint64_t>(3, std::uint64_t{}));
  for (const auto& [name, each] : {std::pair{"NHD", layout}, std::pair{"HND", other}})
    count.add(std::string("digest_kv_blocks, ") + name, bytes / 2 + 24, [&, each = each](const auto& run) {
      return digest_kv_blocks(run, {from.data(), blocks, each}, {numbers.data(), 3}, {sums.data(), 3});
    });
}

void count_sums(counting& count) {
  constexpr std::uint64_t blocks = 4;
  constexpr std::uint64_t block_bytes = 64 * kib;
  constexpr std::uint64_t bytes = blocks * block_bytes;
  const auto from = any_memory(bytes + 16, 7);
  const auto to = any_memory(bytes + 16, 8);
  const device_array<std::uint64_t> sums(std::vector<std::uint64_t>(blocks, std::uint64_t{}));
  const std::span digests(sums.data(), blocks);
  const std::span crcs(reinterpret_cast<std::uint32_t*>(sums.data()), blocks);
  for (const std::uint64_t skew : {16, 4, 1}) {
    const std::uint64_t at = skew % 16;
    const strided_blocks looked({from.data() + at, block_bytes, blocks}, block_bytes);
    const strided_blocks copied({from.data() + at, block_bytes, blocks}, block_bytes,
                                {to.data() + at, block_bytes, blocks});
    const std::string shape = ", 4 x 64 KiB by " + std::to_string(skew);
    count.add("crc32c_blocks" + shape, bytes,
              [&](const auto& run) { return crc32c_blocks(run, looked, crcs); });
    count.add("copy_and_crc32c" + shape, 2 * bytes,
              [&](const auto& run) { return copy_and_crc32c(run, copied, crcs); });
    count.add("digest_blocks" + shape, bytes,
              [&](const auto& run) { return digest_blocks(run, looked, digests); });
    count.add("copy_and_digest" + shape, 2 * bytes,
              [&](const auto& run) { return copy_and_digest(run, copied, digests); });
  }
}

void count_differences(counting& count) {
  constexpr std::uint64_t bytes = 256 * kib;
  std::vector<device_array<std::byte>> memory;
  for (std::uint64_t i = 0; i < 4; ++i)
    memory.push_back(any_memory(bytes + 16, 9 + i));
  const device_array<std::uint32_t> bits(std::vector<std::uint32_t>(dirty_words(bytes), std::uint32_t{}));
  const std::span words(bits.data(), bits.size());
  constexpr std::uint64_t apart = 0;
  for (const std::uint64_t skew : {std::uint64_t{16}, std::uint64_t{4}, std::uint64_t{1}, apart}) {
    const auto at = [&](std::size_t i) {
      return memory[i].data() + (skew == apart ? (4 * i + 4) % 16 : skew % 16);
    };
    const std::string shape = ", 256 KiB " + (skew == apart ? "apart" : "by " + std::to_string(skew));
    const std::array<const std::byte*, 3> shards{at(0), at(1), at(2)};
    count.add("xor_parity of three" + shape, 4 * bytes,
              [&](const auto& run) { return xor_parity(run, shards, at(3), bytes); });
    for (const dtype each : {dtype::f32, dtype::bf16, dtype::f16}) {
      if (skew == 1) continue;  // no float begins there
      if (skew == apart && each != dtype::f32) continue;
      count.add("sum_in_order of three, " + std::string(name_of(each)) + shape, 4 * bytes,
                [&](const auto& run) { return sum_in_order(run, each, shards, at(3), bytes); });
    }
    count.add("compare_dirty" + shape, 2 * bytes,
              [&](const auto& run) { return compare_dirty(run, at(0), at(1), bytes, words); });
    count.add("xor_delta" + shape, 3 * bytes,
              [&](const auto& run) { return xor_delta(run, at(0), at(1), at(3), bytes, words); });
    count.add("apply_delta" + shape, 3 * bytes,
              [&](const auto& run) { return apply_delta(run, at(2), at(3), bytes, words); });
  }
}

void count_patterns(counting& count) {
  constexpr std::uint64_t bytes = 256 * kib;
  const auto memory = any_memory(bytes + 16, 13);
  for (const std::uint64_t skew : {16, 1}) {
    const std::span at(memory.data() + skew % 16, bytes);
    const std::string shape = ", 256 KiB by " + std::to_string(skew);
    const device_array<mismatch_report> report(std::vector<mismatch_report>(1, mismatch_report{}));
    count.add("verify_memory of other bytes" + shape, bytes,
              [&](const auto& run) { return verify_memory(run, at, seeded_pattern{}, report.data()); });
    count.add("fill_memory" + shape, bytes,
              [&](const auto& run) { return fill_memory(run, at, seeded_pattern{}); });
    count.add("verify_memory" + shape, bytes,
              [&](const auto& run) { return verify_memory(run, at, seeded_pattern{}, report.data()); });
  }
}

void count_groups(counting& count) {
  constexpr std::uint64_t row_values = 1024;
  constexpr std::uint64_t rows = 64;
  const auto values = any_memory(rows * row_values * 4 + 16, 14);
  const auto codes = any_memory(rows * row_values + 16, 15);
  const auto scales = any_memory(rows * row_values / 32 * 4, 16);
  struct form {
    const char* name;
    dtype value;
    dtype code;
    std::uint32_t elements;
    std::uint64_t skew;  // of values and of codes: they go in pieces
  };
  for (const form& each : {form{"bf16, int8 by 128", dtype::bf16, dtype::int8, 128, 0},
                           form{"bf16, int8 by 32", dtype::bf16, dtype::int8, 32, 0},
                           form{"bf16, e4m3 by 128", dtype::bf16, dtype::fp8_e4m3, 128, 0},
                           form{"bf16, int4 by 128", dtype::bf16, dtype::int4, 128, 0},
                           form{"f32, int8 by 128", dtype::f32, dtype::int8, 128, 0},
                           form{"bf16, int8 by 128 in pieces of 4", dtype::bf16, dtype::int8, 128, 4},
                           form{"bf16, int8 by 128 in pieces of 2", dtype::bf16, dtype::int8, 128, 2},
                           form{"bf16, e4m3 by 128 in pieces of 2", dtype::bf16, dtype::fp8_e4m3, 128, 2},
                           form{"bf16, int4 by 128 in pieces of 2", dtype::bf16, dtype::int4, 128, 2}}) {
    const auto groups = static_cast<std::uint32_t>(row_values / each.elements);
    const group_shape shape{.rows = rows, .groups = groups, .elements = each.elements};
    const std::uint64_t value_stride = row_values * element_bytes(each.value);
    const std::uint64_t code_stride = row_values * bits_of(each.code) / 8;
    const std::uint64_t bytes = rows * (value_stride + code_stride + groups * 4);
    std::byte* const value = values.data() + each.skew;
    std::byte* const code = codes.data() + each.skew;
    count.add(std::string("quantize_groups, ") + each.name, bytes, [&](const auto& run) {
      return quantize_groups(run, shape, {value, each.value, value_stride}, {code, each.code, code_stride},
                             {scales.data(), groups * 4});
    });
    count.add(std::string("dequantize_groups, ") + each.name, bytes, [&](const auto& run) {
      return dequantize_groups(run, shape, {code, each.code, code_stride}, {scales.data(), groups * 4},
                               {value, each.value, value_stride});
    });
  }
}

/// The bytes of `block_int`.
void count_int_groups(counting& count) {
  constexpr std::uint64_t elements = 64 * kib;
  const auto values = any_memory(elements * 4, 31);
  const auto codes = any_memory(elements * 2, 32);
  for (const std::uint32_t bits : {8U, 4U, 2U}) {
    const int_group_form form{.bits = bits};
    const std::span<std::byte> at(values.data(), elements * 4);
    const std::span<std::byte> to(codes.data(), form.bytes(elements));
    const std::string shape = std::to_string(bits) + " bits by 256";
    count.add("encode_int_groups, " + shape, at.size() + to.size(),
              [&](const auto& run) { return encode_int_groups(run, form, at, to); });
    count.add("decode_int_groups, " + shape, at.size() + to.size(),
              [&](const auto& run) { return decode_int_groups(run, form, to, at); });
  }
}

void count_planes(counting& count) {
  constexpr std::uint64_t values = 64 * kib;
  const auto elements = any_memory(2 * values + 16, 17);
  const auto planes = any_memory(2 * values + 32, 18);
  for (const std::uint64_t skew : {16, 4, 1}) {
    const std::uint64_t at = skew % 16;
    std::byte* const first = planes.data() + at;
    std::byte* const second = planes.data() + values + 16 + at;
    std::byte* const of = elements.data() + (skew == 4 ? 8 : at);
    const std::string shape = ", 128 KiB by " + std::to_string(skew);
    count.add("split_planes" + shape, 4 * values,
              [&](const auto& run) { return split_planes(run, of, values, {first, second}); });
    count.add("merge_planes" + shape, 4 * values,
              [&](const auto& run) { return merge_planes(run, {first, second}, values, of); });
  }
}

void count_attention(counting& count) {
  constexpr std::uint64_t sequences = 2;
  constexpr std::uint64_t tokens = 1024;
  constexpr std::uint64_t each = tokens / 16;
  std::vector<std::int32_t> table(sequences * each);
  std::iota(table.rbegin(), table.rend(), 0);
  const device_array<std::int32_t> on_device(table);
  const device_array<std::int32_t> lengths(std::vector<std::int32_t>(sequences, tokens));
  const padded_table_view tables{.block_table = on_device.data(),
                                 .seq_lens = lengths.data(),
                                 .num_sequences = sequences,
                                 .max_blocks = static_cast<std::int32_t>(each),
                                 .block_tokens = 16};
  constexpr std::uint32_t query_heads = 16;
  const auto queries = any_memory(sequences * query_heads * 256, 19);
  const auto out = any_memory(sequences * query_heads * 256, 20);
  struct form {
    const char* name;
    kv_layout layout;
    bool is_short;  // one share alone
  };
  constexpr kv_layout model{.layers = 1, .heads = 4, .head_dim = 128, .block_tokens = 16};
  const auto in = [&](dtype element) {
    kv_layout of = model;
    of.element = element;
    return of;
  };
  using enum paging::named_form;
  for (const auto& [name, layout, is_short] :
       {form{"bf16", in(dtype::bf16), false}, form{"e4m3", in(dtype::fp8_e4m3), false},
        form{"int8 by token", paging::in_form(model, int8_by_token), true},
        form{"int4 by token", paging::in_form(model, int4_by_token), true},
        form{"int4 by token with zeros", paging::in_form(model, int4_by_token_zero), true},
        form{"int4 by channel", paging::in_form(model, int4_by_channel), true},
        form{"nvfp4", paging::in_form(model, nvfp4), true}}) {
    const auto cache = any_memory(layout.total_bytes(sequences * each), 21);
    for (const auto arithmetic : {attention_arithmetic::reproducible, attention_arithmetic::tensor_cores}) {
      for (const std::uint32_t shares : {1U, 8U}) {
        if (is_short && shares != 1) continue;
        attention_options options{
            .query_heads = query_heads, .element = dtype::bf16, .arithmetic = arithmetic};
        if (shares > 1)
          options.split = {.tokens = static_cast<std::uint32_t>(tokens) / shares, .count = shares};
        const auto workspace =
            any_memory(std::max<std::uint64_t>(attention_workspace_bytes(sequences, layout, options), 1), 22);
        const std::uint64_t bytes = sequences * (tokens * layout.layer_bytes() / layout.block_tokens +
                                                 std::uint64_t{2} * query_heads * 256);
        const bool is_plain = arithmetic == attention_arithmetic::reproducible;
        count.add(std::string("paged_attention, ") + name + (is_plain ? ", plain, " : ", tensor cores, ") +
                      (shares == 1 ? "whole" : "8 shares"),
                  bytes, [&](const auto& run) {
                    return paged_attention(
                        run, tables, {.rows = sequences}, {queries.data(), query_heads * 256, 256},
                        {out.data(), query_heads * 256, 256}, {cache.data(), sequences * each, layout}, 0,
                        {workspace.data(), workspace.size()}, options);
                  });
      }
    }
  }
}

/// Absorbed attention over records of latents, 16 query heads a row.
void count_latents(counting& count) {
  constexpr std::uint64_t sequences = 2;
  constexpr std::uint64_t each = 16;
  constexpr std::uint32_t query_heads = 16;
  std::vector<std::int32_t> table(sequences * each);
  std::iota(table.rbegin(), table.rend(), 0);
  const device_array<std::int32_t> on_device(table);
  const device_array<std::int32_t> lengths(std::vector<std::int32_t>(sequences, each * 16));
  const padded_table_view tables{.block_table = on_device.data(),
                                 .seq_lens = lengths.data(),
                                 .num_sequences = sequences,
                                 .max_blocks = static_cast<std::int32_t>(each),
                                 .block_tokens = 16};
  const auto queries = any_memory(sequences * query_heads * 1152, 33);
  const auto out = any_memory(sequences * query_heads * 1024, 34);
  for (const auto& [name, record] :
       {std::pair{"bf16_mla", paging::bf16_mla}, std::pair{"fp8_ds_mla", paging::fp8_ds_mla}}) {
    const kv_layout layout = paging::latent_layout({.layers = 1, .block_tokens = 16}, record);
    const auto cache = any_memory(layout.total_bytes(sequences * each), 35);
    for (const auto arithmetic : {attention_arithmetic::reproducible, attention_arithmetic::tensor_cores}) {
      const bool is_plain = arithmetic == attention_arithmetic::reproducible;
      count.add(std::string("paged_attention, ") + name + (is_plain ? ", plain" : ", tensor cores"),
                layout.total_bytes(sequences * each) + sequences * query_heads * (1152 + 1024),
                [&](const auto& run) {
                  return paged_attention(
                      run, tables, {.rows = sequences}, {queries.data(), query_heads * 1152, 1152},
                      {out.data(), query_heads * 1024, 1024}, {cache.data(), sequences * each, layout}, 0, {},
                      {.query_heads = query_heads,
                       .element = dtype::bf16,
                       .scale = 0.07F,
                       .arithmetic = arithmetic,
                       .latents = &record});
                });
    }
  }
}

/// Rows that share their tokens, a part of them, and what parts cost to merge.
void count_parts(counting& count) {
  constexpr std::uint64_t rows = 8;
  constexpr std::uint32_t shared = 4;
  constexpr std::uint64_t tokens = 1024;
  constexpr std::uint64_t blocks = tokens / 16;
  constexpr std::uint32_t query_heads = 16;
  std::vector<std::int32_t> table(rows / shared * blocks);
  std::iota(table.begin(), table.end(), 0);
  const device_array<std::int32_t> on_device(table);
  const device_array<std::int32_t> lengths(std::vector<std::int32_t>(rows, tokens));
  std::vector<std::int32_t> sequence_of(rows);
  for (std::uint64_t i = 0; i < rows; ++i)
    sequence_of[i] = static_cast<std::int32_t>(i / shared);
  const device_array<std::int32_t> sequences(sequence_of);
  const padded_table_view tables{.block_table = on_device.data(),
                                 .seq_lens = lengths.data(),
                                 .num_sequences = rows / shared,
                                 .max_blocks = static_cast<std::int32_t>(blocks),
                                 .block_tokens = 16};
  const auto queries = any_memory(rows * query_heads * 256, 23);
  const kv_layout layout{.layers = 1, .heads = 4, .head_dim = 128, .element = dtype::bf16};
  const auto cache = any_memory(layout.total_bytes(table.size()), 24);
  const attention_part_shape shape{.rows = rows, .query_heads = query_heads, .value_dim = 128};
  const std::uint64_t part_bytes = attention_part_bytes(shape);
  constexpr std::uint64_t parts = 8;
  std::vector<float> states_and_sums(parts * part_bytes / sizeof(float));
  for (std::size_t i = 0; i < states_and_sums.size(); ++i)
    states_and_sums[i] = 1.0F + static_cast<float>(i % 7);
  const device_array<float> memory(states_and_sums);
  const auto part_at = [&](std::uint64_t i) {
    return attention_part_in({reinterpret_cast<std::byte*>(memory.data()) + i * part_bytes, part_bytes},
                             shape)
        .value();
  };
  const std::uint64_t token_bytes = layout.layer_bytes() / layout.block_tokens;
  for (const std::uint32_t sharers : {1U, shared}) {
    const std::uint64_t read = rows / sharers * tokens * token_bytes;
    for (const auto arithmetic : {attention_arithmetic::reproducible, attention_arithmetic::tensor_cores}) {
      const bool is_plain = arithmetic == attention_arithmetic::reproducible;
      count.add(std::string("paged_attention_part, bf16, ") + (is_plain ? "plain, " : "tensor cores, ") +
                    (sharers == 1 ? "each row its own" : "4 rows share"),
                read + rows * query_heads * 256 + part_bytes, [&](const auto& run) {
                  return paged_attention_part(
                      run, tables, {.rows = rows, .sequences = sequences.data(), .shared = sharers},
                      {queries.data(), query_heads * 256, 256}, part_at(0),
                      {cache.data(), table.size(), layout}, 0, {},
                      {.query_heads = query_heads, .element = dtype::bf16, .arithmetic = arithmetic});
                });
    }
  }
  std::vector<attention_part> all;
  for (std::uint64_t i = 0; i < parts; ++i)
    all.push_back(part_at(i));
  const auto out = any_memory(rows * query_heads * 256, 25);
  merged_attention<> to;
  to.out = {out.data(), query_heads * 256, 256};
  to.element = dtype::bf16;
  count.add("merge_attention, 8 parts to bf16", parts * part_bytes + rows * query_heads * 256,
            [&](const auto& run) { return merge_attention(run, shape, all, to); });
}

/// What sparse attention costs beside attention: summaries, bounds and the choice.
void count_choices(counting& count) {
  constexpr std::uint64_t rows = 4;
  constexpr std::uint32_t candidates = 4096;
  std::mt19937_64 random(26);
  std::vector<float> drawn(rows * candidates);
  std::ranges::generate(drawn, [&] { return static_cast<float>(random() % 1'000'003); });
  const device_array<float> scores(drawn);
  constexpr std::uint32_t k = 256;
  const device_array<std::int32_t> chosen(std::vector<std::int32_t>(rows * k, 0));
  const device_array<std::byte> scratch(std::vector<std::byte>(rows * k * 4, std::byte{}));
  const top_scores of{.scores = scores.data(), .rows = rows, .stride = candidates, .candidates = candidates};
  for (const auto order : {top_order::by_number, top_order::by_score})
    count.add(
        std::string("select_top, 256 of 4096, ") + (order == top_order::by_number ? "by number" : "by score"),
        rows * (candidates + k) * 4, [&](const auto& run) {
          return select_top(run, of, k, chosen.data(), k, order, {scratch.data(), scratch.size()});
        });
  count.add("select_tokens, 256 of 4096, a group of 4", (rows * candidates + k) * 4, [&](const auto& run) {
    return select_tokens(run,
                         {.scores = scores.data(),
                          .sequences = 1,
                          .query_heads = rows,
                          .kv_heads = 1,
                          .tokens = candidates,
                          .stride = candidates},
                         {.budget = k, .sinks = 4, .recent = 32}, chosen.data(), k);
  });
  const kv_layout layout{.layers = 1, .heads = 4, .head_dim = 128, .element = dtype::bf16};
  constexpr std::uint64_t blocks = 64;
  const auto cache = any_memory(layout.total_bytes(blocks), 27);
  const auto summaries = any_memory(key_summary_bytes(layout, blocks), 28);
  std::vector<std::int32_t> numbers(blocks);
  std::iota(numbers.begin(), numbers.end(), 0);
  const device_array<std::int32_t> changed(numbers);
  const device_array<std::int32_t> ends(std::vector<std::int32_t>(blocks, 16));
  const kv_memory memory{cache.data(), blocks, layout};
  std::vector<std::int32_t> every_other(256);
  for (std::int32_t i = 0; i < 256; ++i)
    every_other[static_cast<std::size_t>(i)] = 2 * i;
  const device_array<std::int32_t> listed(every_other);
  const auto fresh = any_memory(layout.total_bytes(16), 30);
  count.add(
      "copy_kept_tokens, 256 tokens of bf16", 2 * layout.total_bytes(16) + 256 * 4, [&](const auto& run) {
        const auto tables = [&](std::int32_t columns) {
          return padded_table_view{
              .block_table = changed.data(), .num_sequences = 1, .max_blocks = columns, .block_tokens = 16};
        };
        return copy_kept_tokens(run, {fresh.data(), 16, layout}, tables(16), memory,
                                tables(static_cast<std::int32_t>(blocks)),
                                {.listed = listed.data(), .sequences = 1, .budget = 256, .stride = 256}, 0);
      });
  count.add("summarize_keys, bf16", layout.total_bytes(blocks) / 2 + summaries.size() + blocks * 8,
            [&](const auto& run) {
              return summarize_keys(run, {.blocks = changed.data(), .ends = ends.data(), .count = blocks},
                                    memory, 0, {summaries.data(), summaries.size()});
            });
  const device_array<std::int32_t> length(std::vector<std::int32_t>{blocks * 16});
  const padded_table_view tables{.block_table = changed.data(),
                                 .seq_lens = length.data(),
                                 .num_sequences = 1,
                                 .max_blocks = static_cast<std::int32_t>(blocks),
                                 .block_tokens = 16};
  constexpr std::uint32_t query_heads = 16;
  const auto queries = any_memory(query_heads * 256, 29);
  const device_array<float> bounds(std::vector<float>(blocks, 0.0F));
  count.add("bound_scores, bf16", summaries.size() + query_heads * 256 + blocks * 4, [&](const auto& run) {
    return bound_scores(run, tables, {.rows = 1}, {queries.data(), query_heads * 256, 256}, memory,
                        {summaries.data(), summaries.size()}, blocks, bounds.data(),
                        {.query_heads = query_heads, .element = dtype::bf16});
  });
}

/// Two steps over buffers of 512 rows: none of the wanted rows is there, then half of them are.
void count_hot_rows(counting& count) {
  constexpr hot_rows_shape shape{.sequences = 16, .slots = 512, .positions = 4096};
  constexpr std::uint32_t wanted = 256;
  std::vector<std::int32_t> list(std::size_t{shape.sequences} * wanted);
  for (std::size_t i = 0; i < list.size(); ++i)
    list[i] = static_cast<std::int32_t>((i % wanted * 2741 + i / wanted * 97) % shape.positions);
  const device_array<std::int32_t> state(
      std::vector<std::int32_t>(hot_rows_words(shape) * shape.sequences, 0));
  const device_array<std::int32_t> slots(std::vector<std::int32_t>(list.size(), 0));
  const device_array<hot_miss> misses(std::vector<hot_miss>(list.size(), hot_miss{}));
  const device_array<std::uint32_t> counts(std::vector<std::uint32_t>(shape.sequences, 0));
  const auto reset = [&](const device_executor& run) {
    return reset_hot_rows(run, shape, {state.data(), state.size()});
  };
  count.add("reset_hot_rows", state.size() * 4, reset);
  for (const std::uint32_t there : {0U, wanted / 2}) {
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (there != 0 && i % 2 == 0) list[i] = (list[i] + 1) % static_cast<std::int32_t>(shape.positions);
    }
    const device_array<std::int32_t> on_device(list);
    const hot_rows_step step{.wanted = on_device.data(),
                             .slots = slots.data(),
                             .misses = misses.data(),
                             .counts = counts.data(),
                             .wanted_count = wanted,
                             .stride = wanted};
    const std::uint64_t missed = wanted - there;
    // Lists and misses, and the order of slots before and after.
    const std::uint64_t bytes =
        shape.sequences * (wanted * 8 + missed * 8 + std::uint64_t{shape.slots} * 8 + 4);
    count.add("resolve_hot_rows, 16 x 256 in 512, " + std::to_string(there) + " there", bytes,
              [&](const device_executor& run) {
                return resolve_hot_rows(run, shape, {state.data(), state.size()}, step);
              });
  }
}

/// The phases of optimizers of whole matrices.
void count_matrix_optimizers(counting& count) {
  constexpr adafactor_shape shape{64, 256};
  constexpr std::uint64_t floats = shape.elements() * 4;
  const device_array<float> weights(std::vector<float>(shape.elements(), 0.5F));
  const device_array<float> gradients(std::vector<float>(shape.elements(), 0.25F));
  const device_array<float> factors(std::vector<float>(shape.factors(), 0.0F));
  const device_array<unordered_sum> sums(std::vector<unordered_sum>(adafactor_sums(shape)));
  const device_array<adafactor_terms> terms(std::vector<adafactor_terms>(1));
  const adafactor_arrays arrays{factors.data(), sums.data(), terms.data()};
  const optimizer_piece piece{.weights = reinterpret_cast<std::byte*>(weights.data()),
                              .count = shape.elements()};
  const gradient_piece of{reinterpret_cast<const std::byte*>(gradients.data()), dtype::f32, shape.elements()};
  count.add("adafactor_add, 64 x 256", 2 * floats,
            [&](const auto& run) { return adafactor_add(run, shape, piece, of, {}, arrays); });
  count.add("adafactor_factors, 64 x 256", shape.sums() * sizeof(unordered_sum) + 2 * shape.factors() * 4,
            [&](const auto& run) { return adafactor_factors(run, shape, {}, arrays); });
  count.add("adafactor_add_updates, 64 x 256", floats,
            [&](const auto& run) { return adafactor_add_updates(run, shape, piece, of, {}, arrays); });
  count.add("adafactor_apply, 64 x 256", 3 * floats,
            [&](const auto& run) { return adafactor_apply(run, shape, piece, of, {}, arrays); });
  constexpr muon_shape matrix{32, 64};
  const device_array<float> scratch(std::vector<float>(matrix.scratch(), 0.0F));
  const auto some = [](const device_array<float>& in, std::uint64_t size) {
    return std::span<float>(in.data(), size);
  };
  count.add("muon_momentum", 4 * floats, [&](const auto& run) {
    return muon_momentum(run, some(gradients, shape.elements()), some(weights, shape.elements()),
                         some(weights, shape.elements()), {});
  });
  // Of a product: the factors and the result once.
  count.add("orthogonalize, 32 x 64", 5 * (3 * 64 + 4 * 32) * 32 * 4, [&](const auto& run) {
    return orthogonalize(run, matrix, some(weights, matrix.elements()), some(scratch, matrix.scratch()));
  });
  count.add("muon_apply", 3 * floats, [&](const auto& run) {
    return muon_apply(run, {64, 256}, some(weights, shape.elements()), some(gradients, shape.elements()), {});
  });
}

/// The rows of this architecture in the page, by their names.
[[nodiscard]] std::map<std::string, std::string> rows_of(const char* path, const std::string& heading) {
  std::ifstream page(path);
  if (!page) {
    std::fprintf(stderr, "FAILED: cannot read %s\n", path);
    std::exit(1);
  }
  std::map<std::string, std::string> out;
  bool is_here = false;
  for (std::string line; std::getline(page, line);) {
    if (line.starts_with("## ")) is_here = line == heading;
    if (!is_here || !line.starts_with("| ")) continue;
    out.emplace(line.substr(2, line.find(" |", 2) - 2), line);
  }
  return out;
}

/// Whether a row of the page says the same but for a twentieth, or one unit of its last digit.
[[nodiscard]] bool agrees(const std::string& row, const std::string& now) {
  const auto numbers = [](const std::string& of) {
    std::istringstream in(of.substr(of.find(" | ") + 2));
    std::vector<double> out;
    for (std::string word; in >> word;) {
      if (word != "|") out.push_back(std::strtod(word.c_str(), nullptr));
    }
    return out;
  };
  const std::vector<double> was = numbers(row);
  const std::vector<double> is = numbers(now);
  return was.size() == is.size() && std::equal(was.begin(), was.end(), is.begin(), [](double a, double b) {
           return std::abs(a - b) <= std::max(0.05 * std::max(a, b), 0.0101);
         });
}

/// The exit status of a comparison with the page.
[[nodiscard]] int compare(const counting& count, const char* path, const std::string& heading) {
  std::map<std::string, std::string> page = rows_of(path, heading);
  int wrong = 0;
  for (const auto& [name, of] : count.rows()) {
    const std::string now = text_of(name, of);
    const auto found = page.find(name);
    if (found == page.end() || !agrees(found->second, now)) {
      std::fprintf(stderr, "FAILED: the page says %s\n  counted now     %s\n",
                   found == page.end() ? "nothing" : found->second.c_str(), now.c_str());
      ++wrong;
    }
    page.erase(name);
  }
  page.erase("kernel");
  page.erase("---");
  for (const auto& [name, row] : page) {
    std::fprintf(stderr, "FAILED: the page has a row that nothing counts: %s\n", row.c_str());
    ++wrong;
  }
  std::printf("%zu rows of %s, %d differ\n", count.rows().size(), heading.c_str() + 3, wrong);
  return wrong == 0 ? 0 : 1;
}

}  // namespace

int main(int count_of_arguments, char** arguments) {
  static_cast<void>(require_device());
  ptx_machine_profile(1);
  counting count;
  count_copies(count);
  count_tokens(count);
  count_blocks(count);
  count_sums(count);
  count_differences(count);
  count_patterns(count);
  count_groups(count);
  count_int_groups(count);
  count_planes(count);
  count_attention(count);
  count_latents(count);
  count_parts(count);
  count_choices(count);
  count_hot_rows(count);
  count_matrix_optimizers(count);
  const std::string heading = "## sm_" + std::to_string(ptx_machine_architecture());
  if (count_of_arguments > 1) return compare(count, arguments[1], heading);
  std::printf("%s\n\n| kernel | instructions | useful | touched |\n| --- | --- | --- | --- |\n",
              heading.c_str());
  for (const auto& [name, of] : count.rows())
    std::printf("%s\n", text_of(name, of).c_str());
}
