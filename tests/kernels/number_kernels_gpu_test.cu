// The kernels on numbers, each against the host's run of the same work: codes and scales of groups, planes,
// patterns, and tables of metadata, every byte of them, also replayed from a graph.
#include <llmmem/kernels/device_executor.cuh>
#include <llmmem/kernels/fill_verify.hpp>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/int_groups.hpp>
#include <llmmem/kernels/kv_append.hpp>
#include <llmmem/kernels/kv_gather.hpp>
#include <llmmem/kernels/kv_metadata.hpp>
#include <llmmem/kernels/kv_quantize.hpp>
#include <llmmem/kernels/plane_split.hpp>
#include <llmmem/kernels/quantize_groups.hpp>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "support/cache_world.hpp"
#include "support/device.cuh"

namespace {

using namespace llmmem;
using namespace llmmem_tests;

/// Runs `launch(executor)` on the device, now and then with few blocks.
template <class Launch>
void run_on_device(cudaStream_t stream, std::uint64_t seed, const Launch& launch) {
  const device_executor run(stream, {.blocks = static_cast<std::uint32_t>(seed % 5 == 0 ? 3 : 0)});
  launch_or_replay(seed, stream, "a launch", [&] { return launch(run); });
}

/// Random bits, of which the exponents are mostly near each other; some groups have what is no number.
std::vector<std::byte> any_values(dtype element, std::uint64_t bytes, std::mt19937_64& random) {
  std::vector<std::byte> out(bytes);
  for (std::uint64_t i = 0; i + element_bytes(element) <= bytes; i += element_bytes(element)) {
    const float x = static_cast<float>(static_cast<std::int64_t>(random() % 200'001) - 100'000) / 777;
    store_element(element, out.data() + i, x);
    if (random() % 300 != 0) continue;
    const std::uint64_t bits = random();
    std::memcpy(out.data() + i, &bits, element_bytes(element));
  }
  return out;
}

/// `block_int`'s bytes, and back.
void check_int_groups(std::uint64_t seed, cudaStream_t stream) {
  std::mt19937_64 random(seed);
  const int_group_form form{.bits = 2U << seed % 3,
                            .group = 8U << random() % 7,
                            .scale = seed / 3 % 2 == 0 ? dtype::f32 : dtype::bf16};
  const std::uint64_t skew = random() % 3 == 0 ? random() % 16 : 0;
  const std::uint64_t elements = 1 + random() % 2'000;
  const std::vector<std::byte> values = any_values(dtype::f32, elements * 4, random);
  const int_group_position at{seed, random() % 5, random()};
  std::vector<std::byte> host(form.bytes(elements));
  require(encode_int_groups(host_executor{}, form, std::span(values), std::span(host), at).has_value(),
          "integers on the host", seed);
  const auto placed = [&](const std::vector<std::byte>& of) {
    std::vector<std::byte> out(skew + of.size() + 16, std::byte{0xA5});
    std::copy(of.begin(), of.end(), out.begin() + static_cast<std::ptrdiff_t>(skew));
    return out;
  };
  const device_array<std::byte> from(placed(values));
  const device_array<std::byte> to(placed(std::vector<std::byte>(host.size())));
  const std::span<std::byte> codes(to.data() + skew, host.size());
  run_on_device(stream, seed, [&](const device_executor& run) {
    return encode_int_groups(run, form, {from.data() + skew, values.size()}, codes, at).has_value();
  });
  require(to.host() == placed(host), "integers differ from the host's", seed);
  if (seed % 2 == 0) {  // what no encoder writes
    host[random() % host.size()] ^= std::byte{0x80};
    check(cudaMemcpy(to.data() + skew, host.data(), host.size(), cudaMemcpyHostToDevice), "a copy");
  }
  std::vector<std::byte> back(values.size());
  const std::vector<std::uint64_t> none{~std::uint64_t{0}};
  std::uint64_t host_damaged = none[0];
  require(decode_int_groups(host_executor{}, form, std::span<const std::byte>(host), std::span(back),
                            &host_damaged)
              .has_value(),
          "floats on the host", seed);
  const device_array<std::uint64_t> damaged(none);
  run_on_device(stream, seed, [&](const device_executor& run) {
    return decode_int_groups(run, form, codes, {from.data() + skew, values.size()}, damaged.data())
        .has_value();
  });
  require(from.host() == placed(back), "restored floats differ from the host's", seed);
  require(damaged.host()[0] == host_damaged, "the damaged group differs from the host's", seed);
}

void check_groups(std::uint64_t seed, cudaStream_t stream) {
  std::mt19937_64 random(seed);
  constexpr dtype value_types[] = {dtype::f32, dtype::bf16, dtype::f16};
  constexpr dtype code_types[] = {dtype::int8, dtype::fp8_e4m3, dtype::int4};
  const dtype value = value_types[seed % 3];
  const dtype code = code_types[seed / 3 % 3];
  const group_shape shape{.rows = 1 + random() % 70,
                          .groups = static_cast<std::uint32_t>(1 + random() % (seed % 8 == 5 ? 60 : 6)),
                          .elements = std::uint32_t{32} << random() % 3};
  const std::uint64_t elements = std::uint64_t{shape.groups} * shape.elements;
  // Scales apart, or behind each row of codes; rows with gaps, or without.
  const std::uint64_t code_bytes = elements * bits_of(code) / 8;
  const bool is_inline = random() % 3 == 0;
  const std::uint64_t gap = random() % 2 == 0 ? 0 : element_bytes(value) * (1 + random() % 9);
  const std::uint64_t value_stride = elements * element_bytes(value) + gap;
  const std::uint64_t code_stride = code_bytes + (is_inline ? 4 * shape.groups : random() % 9);
  const std::uint64_t scale_stride = is_inline ? code_stride : 4 * shape.groups;
  const std::vector<std::byte> values = any_values(value, shape.rows * value_stride, random);
  std::vector<std::byte> codes(shape.rows * code_stride, poison);
  std::vector<std::byte> scales(shape.rows * scale_stride, poison);
  std::vector<std::byte> back(values.size(), poison);
  const device_array<std::byte> values_there(values);
  const device_array<std::byte> codes_there(codes);
  const device_array<std::byte> scales_there(scales);
  const device_array<std::byte> back_there(back);
  const auto both_ways = [&](const auto& run, const std::byte* from, std::byte* to, std::byte* by,
                             std::byte* again) {
    std::byte* const scale = is_inline ? to + code_bytes : by;
    return quantize_groups(run, shape, {from, value, value_stride}, {to, code, code_stride},
                           {scale, scale_stride})
               .has_value() &&
           dequantize_groups(run, shape, {to, code, code_stride}, {scale, scale_stride},
                             {again, value, value_stride})
               .has_value();
  };
  run_on_device(stream, seed, [&](const device_executor& run) {
    return both_ways(run, values_there.data(), codes_there.data(), scales_there.data(), back_there.data());
  });
  require(both_ways(host_executor{}, values.data(), codes.data(), scales.data(), back.data()),
          "groups on the host", seed);
  require(codes_there.host() == codes, "codes differ from the host's", seed);
  require(scales_there.host() == scales, "scales differ from the host's", seed);
  require(back_there.host() == back, "values differ from the host's", seed);
}

/// Blocks of a cache into codes and back, of any form and order.
void check_blocks(std::uint64_t seed, cudaStream_t stream) {
  std::mt19937_64 random(seed);
  constexpr std::uint64_t blocks = 4;
  kv_layout values{.layers = static_cast<std::uint32_t>(1 + random() % 3),
                   .heads = static_cast<std::uint32_t>(1 + random() % 3),
                   .head_dim = static_cast<std::uint32_t>(8 * (1 + random() % 6)),
                   .block_tokens = static_cast<std::uint32_t>(1 + random() % 20),
                   .element = random() % 2 == 0 ? dtype::bf16 : dtype::f32,
                   .order = block_order(random() % block_order_count)};
  kv_layout codes = values;
  codes.order = block_order(random() % block_order_count);
  const auto any_scales = [&] {
    return paging::scale_form{
        .group = random() % 2 == 0 ? paging::scale_group::channel : paging::scale_group::vector,
        .element = random() % 2 == 0 ? dtype::bf16 : dtype::f32};
  };
  codes.element = random() % 2 == 0 ? dtype::int4 : dtype::int8;
  codes.value_element = random() % 2 == 0 ? dtype::int4 : dtype::int8;
  codes.key_scales = any_scales();
  codes.value_scales = any_scales();
  codes.value_scales.element =
      codes.key_scales.element;  // floats behind an odd number of bf16 are not aligned
  const std::vector<std::byte> in = any_values(values.element, values.total_bytes(blocks), random);
  std::vector<std::byte> coded(codes.total_bytes(blocks), poison);
  std::vector<std::byte> back(in.size(), poison);
  const std::vector<block_pair> pairs{{2, 1}, {-1, 0}, {0, 3}, {9, 2}};
  const std::vector<block_pair> again{{1, 2}, {3, 0}};
  std::vector<std::uint32_t> flag(1);
  const device_array<std::byte> in_there(in);
  const device_array<std::byte> coded_there(coded);
  const device_array<std::byte> back_there(back);
  const device_array<block_pair> pairs_there(pairs);
  const device_array<block_pair> again_there(again);
  const device_array<std::uint32_t> flag_there(flag);
  const auto both_ways = [&](const auto& run, const std::byte* from, std::byte* to, std::byte* restored,
                             const block_pair* first, const block_pair* second, std::uint32_t* beyond) {
    const kv_memory floats{const_cast<std::byte*>(from), blocks, values};
    return quantize_kv_blocks(run, {to, blocks, codes}, floats, {first, pairs.size()},
                              {.out_of_range = beyond})
               .has_value() &&
           dequantize_kv_blocks(run, {restored, blocks, values}, {to, blocks, codes}, {second, again.size()})
               .has_value();
  };
  run_on_device(stream, seed, [&](const device_executor& run) {
    return both_ways(run, in_there.data(), coded_there.data(), back_there.data(), pairs_there.data(),
                     again_there.data(), flag_there.data());
  });
  require(both_ways(host_executor{}, in.data(), coded.data(), back.data(), pairs.data(), again.data(),
                    flag.data()),
          "blocks on the host", seed);
  require(coded_there.host() == coded, "codes of blocks differ from the host's", seed);
  require(back_there.host() == back, "values of blocks differ from the host's", seed);
  require(flag_there.host() == flag && flag[0] == 1, "a block that is none is not flagged", seed);
}

void check_planes(std::uint64_t seed, cudaStream_t stream) {
  std::mt19937_64 random(seed);
  const std::uint64_t count = seed == 1 ? 65536 : random() % 5000;
  const std::uint64_t shift = random() % 3 == 0 ? random() % 17 : 0;  // of all addresses, but of one plane
  const std::uint64_t other_shift = random() % 3 == 0 ? random() % 17 : shift;
  std::vector<std::byte> elements(shift + 2 * count);
  for (std::uint64_t i = 0; i < count; ++i) {
    const auto bits = static_cast<std::uint16_t>(seed == 1 ? i : random());
    std::memcpy(elements.data() + shift + 2 * i, &bits, 2);
  }
  std::vector<std::byte> exponents(shift + count, poison);
  std::vector<std::byte> others(other_shift + count, poison);
  std::vector<std::byte> merged(elements.size(), poison);
  const device_array<std::byte> elements_there(elements);
  const device_array<std::byte> exponents_there(exponents);
  const device_array<std::byte> others_there(others);
  const device_array<std::byte> merged_there(merged);
  const auto both_ways = [&](const auto& run, const std::byte* from, std::byte* exponent, std::byte* other,
                             std::byte* to) {
    return split_planes(run, from + shift, count, {exponent + shift, other + other_shift}).has_value() &&
           merge_planes(run, {exponent + shift, other + other_shift}, count, to + shift).has_value();
  };
  run_on_device(stream, seed, [&](const device_executor& run) {
    return both_ways(run, elements_there.data(), exponents_there.data(), others_there.data(),
                     merged_there.data());
  });
  require(both_ways(host_executor{}, elements.data(), exponents.data(), others.data(), merged.data()),
          "planes on the host", seed);
  require(exponents_there.host() == exponents, "exponents differ from the host's", seed);
  require(others_there.host() == others, "mantissas differ from the host's", seed);
  require(merged_there.host() == merged, "merged elements differ from the host's", seed);
}

void check_patterns(std::uint64_t seed, cudaStream_t stream) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> memory(20'000);
  const std::uint64_t first = random() % 40;
  const std::uint64_t bytes = random() % (memory.size() - first);
  const seeded_pattern pattern{.seed = seed, .first_position = random() % 50};
  std::vector<mismatch_report> reports(2);
  const device_array<std::byte> memory_there(memory);
  const device_array<mismatch_report> reports_there(reports);
  // The second report is of nearly all of it: a pattern has few bytes of poison.
  const auto fill_and_verify = [&](const auto& run, std::byte* at, mismatch_report* report) {
    const std::span<std::byte> piece(at + first, bytes);
    return fill_memory(run, {at, first}, poison_pattern{}).has_value() &&
           fill_memory(run, piece, pattern).has_value() &&
           verify_memory(run, piece, pattern, report).has_value() &&
           verify_memory(run, piece, poison_pattern{}, report + 1).has_value();
  };
  run_on_device(stream, seed, [&](const device_executor& run) {
    return fill_and_verify(run, memory_there.data(), reports_there.data());
  });
  require(fill_and_verify(host_executor{}, memory.data(), reports.data()), "patterns on the host", seed);
  require(memory_there.host() == memory, "a pattern differs from the host's", seed);
  require(reports_there.host() == reports, "a report differs from the host's", seed);
  require(reports[0] == mismatch_report{}, "a pattern is not as it was filled", seed);
}

void check_metadata(std::uint64_t seed, cudaStream_t stream) {
  std::mt19937_64 random(seed);
  const auto sequences = static_cast<std::int32_t>(random() % 20);
  const auto block_tokens = static_cast<std::int32_t>(1 + random() % 20);
  constexpr std::int32_t max_blocks = 9;
  constexpr std::int32_t blocks = 50;
  std::vector<std::int32_t> indptr{0};
  std::vector<std::int32_t> seq_lens;
  for (std::int32_t s = 0; s < sequences; ++s) {
    indptr.push_back(indptr.back() + static_cast<std::int32_t>(random() % 30));
    seq_lens.push_back(static_cast<std::int32_t>(random() % (max_blocks * 20)));
  }
  std::vector<std::int32_t> table(static_cast<std::size_t>(sequences) * max_blocks + 1);
  for (std::int32_t& block : table)
    block = static_cast<std::int32_t>(random() % (blocks + 4)) - 2;  // some are none
  const std::size_t tokens = static_cast<std::size_t>(indptr.back()) + random() % 9;
  std::vector<std::int32_t> indices(tokens);
  std::vector<std::int32_t> positions(tokens);
  std::vector<std::int64_t> slots(tokens);
  std::vector<std::int32_t> pages(table.size() * 2);
  std::vector<std::uint32_t> flags(3);
  const device_array<std::int32_t> indptr_there(indptr);
  const device_array<std::int32_t> seq_lens_there(seq_lens);
  const device_array<std::int32_t> table_there(table);
  const device_array<std::int32_t> indices_there(indices);
  const device_array<std::int32_t> positions_there(positions);
  const device_array<std::int64_t> slots_there(slots);
  const device_array<std::int32_t> pages_there(pages);
  const device_array<std::uint32_t> flags_there(flags);
  struct arrays {
    const std::int32_t* indptr;
    const std::int32_t* seq_lens;
    const std::int32_t* table;
    std::int32_t* indices;
    std::int32_t* positions;
    std::int64_t* slots;
    std::int32_t* pages;
    std::uint32_t* flags;
  };
  const auto all = [&](const auto& run, const arrays& at) {
    const batch_tokens batch{at.indptr, at.seq_lens, sequences};
    const std::span<std::int32_t> sequence_of(at.indices, tokens);
    const std::span<std::int32_t> position_of(at.positions, tokens);
    const padded_table_view tables{.block_table = at.table,
                                   .num_sequences = sequences,
                                   .max_blocks = max_blocks,
                                   .block_tokens = block_tokens};
    const position_front front(tables, sequence_of, position_of, blocks);
    const page_expansion expansion{.block_table = at.table,
                                   .rows = static_cast<std::uint64_t>(sequences),
                                   .columns = max_blocks,
                                   .row_stride = max_blocks,
                                   .blocks = blocks,
                                   .pages_per_block = 6,
                                   .plane_offset = 3};
    return token_sequences(run, batch, sequence_of).has_value() &&
           token_positions(run, batch, sequence_of, position_of, at.flags).has_value() &&
           slot_mapping(run, front, {at.slots, tokens}, at.flags + 1).has_value() &&
           expand_pages(run, expansion, {at.pages, pages.size()}, at.flags + 2).has_value();
  };
  run_on_device(stream, seed, [&](const device_executor& run) {
    return all(run, {indptr_there.data(), seq_lens_there.data(), table_there.data(), indices_there.data(),
                     positions_there.data(), slots_there.data(), pages_there.data(), flags_there.data()});
  });
  require(all(host_executor{}, {indptr.data(), seq_lens.data(), table.data(), indices.data(),
                                positions.data(), slots.data(), pages.data(), flags.data()}),
          "metadata on the host", seed);
  require(indices_there.host() == indices, "sequences differ from the host's", seed);
  require(positions_there.host() == positions, "positions differ from the host's", seed);
  require(slots_there.host() == slots, "slots differ from the host's", seed);
  require(pages_there.host() == pages, "pages differ from the host's", seed);
  require(flags_there.host() == flags, "flags differ from the host's", seed);
}

}  // namespace

int main() {
  check_worlds(400, [](std::uint64_t seed, cudaStream_t stream) {
    check_groups(seed, stream);
    if (seed % 4 == 0) check_int_groups(seed / 4, stream);
    check_blocks(seed, stream);
    check_planes(seed, stream);
    check_patterns(seed, stream);
    check_metadata(seed, stream);
  });
}
