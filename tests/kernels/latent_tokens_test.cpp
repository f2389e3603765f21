/// Records of latents: their bytes, what reads of them give, and attention over them.
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/host_vector_executor.hpp>
#include <llmmem/kernels/kv_blocks.hpp>
#include <llmmem/kernels/latent_tokens.hpp>
#include <llmmem/kernels/merge_attention.hpp>
#include <llmmem/kernels/near_attention.hpp>
#include <llmmem/kernels/paged_attention.hpp>
#include <llmmem/kernels/token_lists.hpp>
#include <llmmem/testing/grid_executor.hpp>

#include <doctest/doctest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "support/latent_world.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::grid_executor;
using paging::record_fault;

constexpr dtype types[] = {dtype::f32, dtype::bf16, dtype::f16};

kv_memory memory_of(const latent_world& world, std::vector<std::byte>& cache) {
  return {cache.data(), world.blocks, world.layout};
}

/// Appends tokens `from` to `to` of the batch.
template <class Run>
void append(const latent_world& world, std::vector<std::byte>& cache, const Run& run, std::size_t from,
            std::size_t to) {
  const std::size_t size = element_bytes(world.element);
  const slot_front slots(std::span(world.slots).subspan(from, to - from), world.layout.block_tokens,
                         world.blocks);
  append_mla(run, slots,
             world.rows_of(world.latents.data() + from * world.record.latents * size, world.record.latents),
             world.rows_of(world.rotary.data() + from * world.record.rotary * size, world.record.rotary),
             world.record, memory_of(world, cache), latent_world::layer,
             {.element = world.element, .scales = {.keys = &world.outer}})
      .value();
}

std::vector<std::byte> appended(const latent_world& world) {
  std::vector<std::byte> cache = world.cache;
  append(world, cache, host_executor{}, 0, world.slots.size());
  return cache;
}

/// A cache with the records that the definition says.
std::vector<std::byte> expected_cache(const latent_world& world) {
  std::vector<std::byte> cache = world.cache;
  const plane_strides rows = world.layout.strides(0, world.blocks);
  for (std::size_t t = 0; t < world.slots.size(); ++t) {
    const record_by_definition made(
        world.record, world.floats(world.latents, t * world.record.latents, world.record.latents),
        world.floats(world.rotary, t * world.record.rotary, world.record.rotary), world.outer);
    const auto slot = static_cast<std::uint64_t>(world.slots[t]);
    const std::uint64_t block = slot / world.layout.block_tokens;
    const std::uint64_t token = slot % world.layout.block_tokens;
    std::memcpy(cache.data() + rows.offset(latent_world::layer, block, token, 0), made.row().data(),
                made.row().size());
    if (made.after().empty()) continue;
    const plane_strides after = world.layout.strides(1, world.blocks);
    std::memcpy(cache.data() + after.offset(latent_world::layer, block, token, 0), made.after().data(),
                made.after().size());
  }
  return cache;
}

/// The values of all tokens in floats: latents, then the rotary part.
std::vector<float> gathered(const latent_world& world, std::vector<std::byte>& cache) {
  const std::uint32_t all = world.record.key_elements();
  std::vector<float> out(world.slots.size() * all);
  auto* const data = reinterpret_cast<std::byte*>(out.data());
  const slot_front slots(world.slots, world.layout.block_tokens, world.blocks);
  gather_mla(host_executor{}, slots, {data, all * sizeof(float), 0},
             {data + world.record.latents * sizeof(float), all * sizeof(float), 0}, world.record,
             memory_of(world, cache), latent_world::layer,
             {.element = dtype::f32, .scales = {.keys = &world.outer}})
      .value();
  return out;
}

struct latent_result {
  std::vector<std::byte> out{};
  std::vector<std::uint32_t> log_sum_exp{};
  std::uint32_t flag = 0;
  friend bool operator==(const latent_result&, const latent_result&) = default;
};

template <class Run, class Tables>
latent_result attend(const latent_world& world, std::vector<std::byte>& cache, const Run& run,
                     const Tables& tables, attention_options options, const attention_rows& rows) {
  latent_result made{std::vector<std::byte>(world.out_bytes(), std::byte{0xA5}),
                     std::vector<std::uint32_t>(rows.rows * world.query_heads)};
  std::vector<float> logs(made.log_sum_exp.size());
  options.log_sum_exp = logs.data();
  options.out_of_range = &made.flag;
  options.scales.keys = &world.outer;
  const std::uint64_t needed = attention_workspace_bytes(rows.rows, world.layout, options);
  std::vector<std::byte> workspace(needed, std::byte{0xFF});
  paged_attention(run, tables, rows, world.query_rows(world.queries.data()), world.out_rows(made.out.data()),
                  memory_of(world, cache), latent_world::layer, workspace, options)
      .value();
  std::memcpy(made.log_sum_exp.data(), logs.data(), logs.size() * sizeof(float));
  return made;
}
template <class Run>
latent_result attend(const latent_world& world, std::vector<std::byte>& cache, const Run& run) {
  return attend(
      world, cache, run, world.tables(), world.options,
      {.rows = world.sequences.size(), .sequences = world.sequences.data(), .lengths = world.lengths.data()});
}

/// Merges parts, and returns how far an output of theirs is from the whole's at most. All are floats.
double worst_of_merged(const latent_world& world, const attention_part_shape& shape,
                       std::span<const attention_part> parts, const latent_result& whole) {
  std::vector<std::byte> merged(world.out_bytes());
  merge_attention(host_executor{}, shape, parts, merged_attention<>{.out = world.out_rows(merged.data())})
      .value();
  double worst = 0;
  for (std::size_t i = 0; i < merged.size() / 4; ++i)
    worst = std::max(worst, std::abs(static_cast<double>(world.number(merged, i)) -
                                     static_cast<double>(world.number(whole.out, i))));
  return worst;
}

/// How far tensor cores may be from the definition: products, and outputs relative to their values' sizes.
struct latent_bounds {
  double product = 0;
  std::vector<double> outputs{};
};

/// The definition in doubles, over values in floats.
/// @param bounds  of tensor cores, if asked for.
std::vector<double> expected_row(const latent_world& world, const std::vector<float>& values, std::size_t row,
                                 std::uint32_t head, latent_bounds* bounds = nullptr) {
  const std::uint32_t all = world.record.key_elements();
  const auto sequence = static_cast<std::size_t>(world.sequences[row]);
  std::size_t first = 0;
  for (std::size_t i = 0; i < sequence; ++i)
    first += static_cast<std::size_t>(world.tokens[i]);
  const auto length = static_cast<std::size_t>(world.lengths[row]);
  const std::size_t window = world.options.window;
  const std::size_t from = window != 0 && length > window ? length - window : 0;
  std::vector<double> scores;
  double most = -std::numeric_limits<double>::infinity();
  for (std::size_t t = from; t < length; ++t) {
    double product = 0;
    for (std::uint32_t i = 0; i < all; ++i)
      product +=
          static_cast<double>(world.number(world.queries, (row * world.query_heads + head) * all + i)) *
          static_cast<double>(values[(first + t) * all + i]);
    scores.push_back(product * static_cast<double>(world.options.scale));
    most = std::max(most, scores.back());
  }
  if (bounds != nullptr) {
    // Queries become bf16, and so do latents in codes.
    const double rounding = world.record.latent_element == dtype::bf16 ? 0x1p-8 : 0x1p-7;
    for (std::size_t t = from; t < length; ++t) {
      double size = 0;
      for (std::uint32_t i = 0; i < all; ++i)
        size += std::abs(
            static_cast<double>(world.number(world.queries, (row * world.query_heads + head) * all + i)) *
            static_cast<double>(values[(first + t) * all + i]));
      bounds->product = std::max(bounds->product, size * static_cast<double>(world.options.scale) * rounding);
    }
    bounds->product += 1e-5;
    bounds->outputs.assign(world.record.value_elements(), 0);
  }
  std::vector<double> out(world.record.value_elements());
  double total = 0;
  for (std::size_t t = from; t < length; ++t) {
    const double weight = std::exp(scores[t - from] - most);
    total += weight;
    for (std::size_t i = 0; i < out.size(); ++i)
      out[i] += weight * static_cast<double>(values[(first + t) * all + i]);
    for (std::size_t i = 0; bounds != nullptr && i < out.size(); ++i)
      bounds->outputs[i] += weight * std::abs(static_cast<double>(values[(first + t) * all + i]));
  }
  for (double& each : out)
    each = total == 0 ? 0 : each / total;
  for (std::size_t i = 0; bounds != nullptr && i < out.size(); ++i)
    bounds->outputs[i] =
        (total == 0 ? 0 : bounds->outputs[i] / total * (std::exp(2 * bounds->product) - 1 + 0x1p-7)) + 1e-5;
  return out;
}

}  // namespace

TEST_SUITE("latent_tokens") {
  TEST_CASE("tensor cores come within their bounds of the definition, with the same bits on any grid") {
    std::uint64_t seen = 0;
    for (const auto seed : seeds_within(40, 4)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const latent_record* const records[] = {&paging::bf16_mla, &paging::fp8_ds_mla,
                                              &paging::fp8_ds_mla_flashmla};
      latent_world world(random, *records[seed % 3], dtype::f32);
      world.options.arithmetic = attention_arithmetic::tensor_cores;
      if (seed % 4 == 0 && seed % 3 != 0) world.outer = 0.37F;
      std::vector<std::byte> cache = appended(world);
      const std::vector<float> values = gathered(world, cache);
      const latent_result made = attend(world, cache, host_executor{});
      if (seed % 4 == 0) CHECK(attend(world, cache, testing::grid_executor({.blocks = 3})) == made);
      CHECK(made.flag == 0);
      const std::uint32_t elements = world.record.value_elements();
      for (std::size_t row = 0; row < world.sequences.size(); ++row) {
        for (std::uint32_t head = 0; head < world.query_heads; ++head) {
          latent_bounds bounds;
          const std::vector<double> expected = expected_row(world, values, row, head, &bounds);
          for (std::uint32_t i = 0; i < elements; ++i) {
            const double got =
                static_cast<double>(world.number(made.out, (row * world.query_heads + head) * elements + i));
            if (std::abs(got - expected[i]) > bounds.outputs[i]) CHECK(got == expected[i]);
            ++seen;
          }
        }
      }
    }
    CHECK(seen > 5'000);
  }

  TEST_CASE("tensor cores refuse other records, and name those that they take") {
    std::mt19937_64 random(3);
    latent_world world(random, paging::nvfp4_ds_mla, dtype::f32);
    world.options.arithmetic = attention_arithmetic::tensor_cores;
    std::vector<std::byte> cache = appended(world);
    CHECK_THROWS_WITH_AS(
        static_cast<void>(attend(world, cache, host_executor{})),
        "paged_attention: options.arithmetic: tensor cores take records of 512 latents and 64 rotary "
        "elements "
        "of bf16, the latents in bf16 or in e4m3 with a float for each 128 (bf16_mla, fp8_ds_mla); choose "
        "attention_arithmetic::reproducible, or host_vectors with a host_vector_executor",
        argument_error);
  }

  TEST_CASE("published records have the bytes that they are named by, and different fingerprints") {
    constexpr std::uint64_t bytes[] = {1152, 576, 656, 656, 584, 432, 368, 352, 2304};
    std::set<std::uint64_t> seen;
    for (std::size_t i = 0; i < all_records.size(); ++i) {
      CAPTURE(all_records[i].name);
      CHECK(all_records[i].record.token_bytes() == bytes[i]);
      CHECK(all_records[i].record.fault() == record_fault::none);
      CHECK(seen.insert(all_records[i].record.fingerprint()).second);
      const kv_layout shape{.layers = 2,
                            .heads = 1,
                            .head_dim = 1,
                            .block_tokens = 64,
                            .order = block_order::layer_first_paired};
      const kv_layout layout = paging::latent_layout(shape, all_records[i].record);
      CHECK(layout.layer_bytes() == all_records[i].record.block_bytes(64));
      CHECK(seen.insert(layout.content_fingerprint()).second);
      kv_layout other = shape;
      other.model = 1;
      CHECK(seen.insert(paging::latent_layout(other, all_records[i].record).content_fingerprint()).second);
    }
    // Stored with caches: these never change.
    CHECK(paging::fp8_ds_mla.fingerprint() == 12919715643190879261ULL);
    CHECK(paging::nvfp4_ds_mla.fingerprint() == 15277464362833962993ULL);
    CHECK(paging::fp8_v4_mla.block_bytes(64) == 576 * 65);
    CHECK(paging::nvfp4_ds_mla.place_of_scale(0) == 0);
    CHECK(paging::nvfp4_ds_mla.place_of_scale(1) == 8);
    CHECK(paging::nvfp4_ds_mla.place_of_scale(4) == 1);
    CHECK(paging::nvfp4_ds_mla.place_of_scale(31) == 31);
  }

  TEST_CASE("fields without meaning in a record leave its fingerprint as it is") {
    const auto changed = [](latent_record of, auto change) {
      const std::uint64_t before = of.fingerprint();
      change(of);
      CHECK(of.fault() == record_fault::none);
      return of.fingerprint() != before;
    };
    latent_record latents = paging::bf16_mla;
    latents.rotary = 0;
    CHECK(!changed(latents, [](latent_record& of) {
      of.rotary_element = dtype::f32;
      of.rotary_at = 64;
    }));
    CHECK(!changed(paging::bf16_mla, [](latent_record& of) {
      of.scales_at = of.pad_at = 8;
      of.order = paging::scale_order::by_fours;
      of.rounding = paging::scale_rounding::up;
      of.floor = 1;
      of.is_divided = true;
    }));
    CHECK(!changed(paging::fp8_ds_mla, [](latent_record& of) {
      of.rounding = paging::scale_rounding::up;  // of floats
      of.order = paging::scale_order::by_fours;  // of four
    }));
    latent_record floorless = paging::nvfp4_ds_mla;
    floorless.floor = 0;
    CHECK(!changed(floorless, [](latent_record& of) { of.floor = -0.0F; }));
    CHECK(changed(floorless, [](latent_record& of) { of.floor = 0x1p-9F; }));
    CHECK(changed(floorless, [](latent_record& of) { of.rounding = paging::scale_rounding::nearest; }));
    CHECK(changed(floorless, [](latent_record& of) { of.order = paging::scale_order::linear; }));
    CHECK(changed(paging::fp8_mla, [](latent_record& of) { of.is_divided = true; }));
    CHECK(changed(paging::nvfp4_ds_mla_432, [](latent_record& of) { of.pad_at += 8, of.pad_bytes -= 8; }));
  }

  TEST_CASE("a record with a fault is refused with how to mend it") {
    const auto fault_of = [](auto change) {
      latent_record of = paging::fp8_ds_mla;
      change(of);
      return of.fault();
    };
    CHECK(fault_of([](latent_record& of) { of.latents = 0; }) == record_fault::no_latents);
    CHECK(fault_of([](latent_record& of) { of.latent_element = dtype::int8; }) == record_fault::element);
    CHECK(fault_of([](latent_record& of) { of.rotary_element = dtype::fp4_e2m1; }) == record_fault::element);
    CHECK(fault_of([](latent_record& of) { of.rotary = 60; }) == record_fault::vectors);
    CHECK(fault_of([](latent_record& of) { of.latents = 1024; }) == record_fault::length);
    CHECK(fault_of([](latent_record& of) { of.rotary_in_values = true; }) == record_fault::length);
    CHECK(fault_of([](latent_record& of) { of.group = 0; }) == record_fault::group);
    CHECK(fault_of([](latent_record& of) { of.group = 48; }) == record_fault::group);
    CHECK(fault_of([](latent_record& of) { of.group = 512; }) == record_fault::group);
    CHECK(fault_of([](latent_record& of) { of.scale = paging::latent_scale::e4m3; }) == record_fault::scale);
    CHECK(fault_of([](latent_record& of) { of.scale = paging::latent_scale::ue8m0; }) == record_fault::scale);
    CHECK(fault_of([](latent_record& of) { of.has_rotary_scale = true; }) == record_fault::scale);
    CHECK(fault_of([](latent_record& of) { of.latent_element = dtype::bf16; }) == record_fault::scale);
    CHECK(fault_of([](latent_record& of) { of.row_bytes = 640; }) == record_fault::row);
    CHECK(fault_of([](latent_record& of) { of.after_rows = 8; }) == record_fault::row);
    CHECK(fault_of([](latent_record& of) { of.scales_at = 508; }) == record_fault::overlap);
    CHECK(fault_of([](latent_record& of) { of.pad_bytes = 1; }) == record_fault::overlap);
    CHECK(fault_of([](latent_record& of) { of.row_bytes = 664; }) == record_fault::alignment);
    CHECK(fault_of([](latent_record& of) {
            of.scales_at = 514;
            of.rotary_at = 544;
            of.row_bytes = 672;
          }) == record_fault::alignment);
    CHECK(fault_of([](latent_record& of) { of.block_multiple = 0; }) == record_fault::block_multiple);
    for (int i = 0; i <= static_cast<int>(record_fault::block_multiple); ++i)
      CHECK(std::string(sentence_of(static_cast<record_fault>(i))).size() > 10);
    latent_record odd = paging::fp8_ds_mla;
    odd.latents = 0;
    CHECK_THROWS_WITH_AS(static_cast<void>(odd.checked()),
                         "latent_record: latents is 0; a record holds at least 8", argument_error);
    const kv_layout shape{.layers = 1, .heads = 1, .head_dim = 1, .block_tokens = 7};
    CHECK_THROWS_WITH_AS(static_cast<void>(paging::latent_layout(shape, paging::fp8_v4_mla)),
                         "latent_layout: the padding of a block, 520 bytes, is not the same for each of its "
                         "7 tokens; take another block_tokens, or block_multiple 1",
                         argument_error);
    kv_layout indexed = shape;
    indexed.block_tokens = 64;
    indexed.index_dim = 128;
    CHECK_THROWS_WITH_AS(static_cast<void>(paging::latent_layout(indexed, paging::fp8_v4_mla)),
                         "latent_layout: index keys together with a padded block; keep index keys in a cache "
                         "of their own",
                         argument_error);
    CHECK(paging::latent_layout(indexed, paging::fp8_ds_mla).layer_bytes() == 64 * (656 + 128));
  }

  TEST_CASE("appended records have the bytes of their definition, and no other byte changes") {
    for (const auto seed : seeds(18, 16)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const auto order = static_cast<block_order>(random() % block_order_count);
      latent_world world(random, all_records[seed % all_records.size()].record, types[seed / 9 % 3], order);
      if (seed % 3 == 0) world.outer = 0.37F;
      const std::vector<std::byte> expected = expected_cache(world);
      std::vector<std::byte> cache = world.cache;
      append(world, cache, host_executor{}, 0, world.slots.size());
      CHECK(cache == expected);
      // One by one, backwards, and as a device's lanes.
      std::vector<std::byte> again = world.cache;
      for (std::size_t t = world.slots.size(); t-- > 0;)
        append(world, again, grid_executor({.blocks = 2}), t, t + 1);
      CHECK(again == expected);
    }
  }

  TEST_CASE("a rotary part with a scale has it whether latents have groups or not") {
    latent_record wide = paging::bf16_mla;
    wide.rotary_element = dtype::fp8_e4m3;
    wide.has_rotary_scale = true;
    wide.rotary_scale_at = 1088;
    wide.pad_at = 1092;
    wide.pad_bytes = 12;
    wide.row_bytes = 1104;
    latent_record codes = paging::fp8_mla;
    codes.has_rotary_scale = true;
    codes.rotary_scale_at = 576;
    codes.pad_at = 580;
    codes.pad_bytes = 4;
    codes.row_bytes = 584;
    for (const latent_record& record : {wide, codes}) {
      std::mt19937_64 random(4);
      latent_world world(random, record, dtype::f32);
      world.outer = 0.37F;
      std::vector<std::byte> cache = appended(world);
      CHECK(cache == expected_cache(world));
      const std::vector<float> values = gathered(world, cache);
      double worst = 0;
      for (std::size_t t = 0; t < world.slots.size(); ++t) {
        for (std::uint32_t i = 0; i < record.rotary; ++i) {
          const float right = world.number(world.rotary, t * record.rotary + i);
          const float found = values[t * record.key_elements() + record.latents + i];
          worst = std::max(worst, static_cast<double>(std::abs(found - right) - std::abs(right) / 16));
        }
      }
      CHECK(worst < 1e-4);
    }
  }

  TEST_CASE("groups of zeros, of subnormal and huge numbers, infinities and NaNs have a defined record") {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
    for (const named_record& each : all_records) {
      CAPTURE(each.name);
      std::mt19937_64 random(3);
      latent_world world(random, each.record, dtype::f32);
      const std::uint32_t group = each.record.group == 0 ? 8 : each.record.group;
      const float sizes[] = {0, 0x1p-140F, 0x1p-126F, 1e30F, 3e38F, infinity, nan};
      for (std::size_t i = 0; i < world.slots.size() * each.record.latents; ++i) {
        const std::size_t number = i / group % std::size(sizes);
        const bool is_special = number < 5 || i % group == 3;
        const float x = is_special ? sizes[number] * (i % 5 == 0 ? -1.0F : 1.0F) : 0.5F;
        store_element(dtype::f32, world.latents.data() + 4 * i, x);
      }
      store_element(dtype::f32, world.rotary.data(), nan);
      store_element(dtype::f32, world.rotary.data() + 4, 1e6F);
      std::vector<std::byte> cache = appended(world);
      CHECK(cache == expected_cache(world));
      const std::vector<float> values = gathered(world, cache);
      if (each.record.group == 0) continue;
      for (std::size_t t = 0; t < world.slots.size(); ++t) {
        for (std::uint32_t i = 0; i < each.record.latents; ++i) {
          const std::size_t number = (t * each.record.latents + i) / group % std::size(sizes);
          const float value = values[t * each.record.key_elements() + i];
          CHECK(std::isnan(value) == (number >= 5));
          if (number == 0) CHECK(value == 0);
        }
      }
      CHECK(std::isnan(values[each.record.latents]));
    }
  }

  TEST_CASE("every code with every scale is read as code x scale, rounded once") {
    for (const named_record& each : all_records) {
      const latent_record& of = each.record;
      if (of.group == 0) continue;
      CAPTURE(each.name);
      std::mt19937_64 random(1);
      latent_world world(random, of, dtype::f32);
      world.outer = 0.3F;
      const plane_strides rows = world.layout.strides(0, world.blocks);
      std::vector<std::byte> cache(world.cache.size());
      std::uint64_t differing = 0;
      for (std::uint32_t round = 0; round < 256; round += 8) {
        for (std::size_t t = 0; t < world.slots.size(); ++t) {
          const auto slot = static_cast<std::uint64_t>(world.slots[t]);
          const std::uint64_t block = slot / world.layout.block_tokens;
          const std::uint64_t token = slot % world.layout.block_tokens;
          std::byte* const row = cache.data() + rows.offset(latent_world::layer, block, token, 0);
          std::byte* scales = row + of.scales_at;
          if (of.after_rows != 0)
            scales = cache.data() +
                     world.layout.strides(1, world.blocks).offset(latent_world::layer, block, token, 0);
          const std::uint32_t bits = of.latent_element == dtype::fp4_e2m1 ? 4 : 8;
          for (std::uint32_t i = 0; i < of.latents * bits / 8; ++i)
            row[i] = static_cast<std::byte>(i + round * 31);
          for (std::uint32_t s = 0; s < of.scales(); ++s) {
            const auto code = static_cast<std::uint8_t>(round + s + t);
            const float as_float = std::ldexp(1.0F + static_cast<float>(code) / 256, code % 40 - 20);
            if (of.scale_bytes() == 4)
              std::memcpy(scales + 4 * s, &as_float, 4);
            else
              scales[s] = static_cast<std::byte>(code);
          }
        }
        const std::vector<float> values = gathered(world, cache);
        for (std::size_t t = 0; t < world.slots.size(); ++t) {
          for (std::uint32_t i = 0; i < of.latents; ++i) {
            std::uint32_t s = i / of.group;
            if (of.order == paging::scale_order::by_fours) s = 8 * (s % 4) + s / 4;
            const auto code = static_cast<std::uint8_t>(round + s + t);
            float scale = std::ldexp(1.0F + static_cast<float>(code) / 256, code % 40 - 20);
            if (of.scale == paging::latent_scale::e4m3)
              scale = std::bit_cast<float>(f32_from_e4m3_bits(code));
            if (of.scale == paging::latent_scale::ue8m0)
              scale = code == 255 ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0F, code - 127);
            if (of.has_outer_scale)
              scale *= 0.0F;  // this cache has zeros there
            else
              scale *= world.outer;
            const std::uint32_t bits = of.latent_element == dtype::fp4_e2m1 ? 4 : 8;
            const auto byte = static_cast<std::uint8_t>(i * bits / 8 + round * 31);
            float number = std::bit_cast<float>(f32_from_e4m3_bits(byte));
            if (bits == 4) {
              const std::uint32_t half = byte >> (i % 2 * 4) & 0xFU;
              number = code_numbers(dtype::fp4_e2m1)[half & 7U] * ((half & 8U) != 0 ? -1.0F : 1.0F);
            }
            const float expected = number * scale;
            const float found = values[t * of.key_elements() + i];
            if (!(found == expected || (std::isnan(found) && std::isnan(expected)))) ++differing;
          }
        }
      }
      CHECK(differing == 0);
    }
  }

  TEST_CASE("attention over records is that over their values, with the same bits on a device's lanes") {
    std::uint64_t seen = 0;
    for (const auto seed : seeds(18, 16)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const auto order = static_cast<block_order>(random() % block_order_count);
      latent_world world(random, all_records[seed % all_records.size()].record, types[seed / 9 % 3], order);
      if (seed % 3 == 0) world.outer = 0.37F;
      std::vector<std::byte> cache = appended(world);
      const std::vector<float> values = gathered(world, cache);
      const latent_result made = attend(world, cache, host_executor{});
      CHECK(made.flag == 0);
      CHECK(attend(world, cache, grid_executor({.blocks = 3})) == made);
      const double rounds = world.element == dtype::f32 ? 0 : world.element == dtype::bf16 ? 0x1p-8 : 0x1p-11;
      double worst = 0;
      for (std::size_t row = 0; row < world.sequences.size(); ++row) {
        for (std::uint32_t head = 0; head < world.query_heads; ++head) {
          const std::vector<double> expected = expected_row(world, values, row, head);
          for (std::size_t i = 0; i < expected.size(); ++i) {
            const float found =
                world.number(made.out, (row * world.query_heads + head) * expected.size() + i);
            worst = std::max(
                worst, std::abs(static_cast<double>(found) - expected[i]) - rounds * std::abs(expected[i]));
            ++seen;
          }
        }
      }
      CHECK(worst < 1e-5);
    }
    CHECK(seen > 100'000);
  }

  TEST_CASE("the host's vectors come near to attention over records, on each path") {
    for (const vector_path path : vector_paths) {
      if (!has_vector_path(path)) continue;
      CAPTURE(to_text(path));
      const host_vector_executor vectors(path);
      for (const auto seed : seeds(18, 9)) {
        CAPTURE(seed);
        std::mt19937_64 random(seed);
        latent_record record = all_records[seed % all_records.size()].record;
        if (seed >= 10) {
          // Lengths that fill no group of words.
          record.latents = 208;
          record.rotary = 24;
          if (record.group > 16) record.group = 16;
          record.order = paging::scale_order::linear;
        }
        if (record.fault() != record_fault::none) continue;
        latent_world world(random, record, dtype::f32);
        if (seed % 3 == 0) world.outer = 0.37F;
        std::vector<std::byte> cache = appended(world);
        const latent_result right = attend(world, cache, host_executor{});
        world.options.arithmetic = attention_arithmetic::host_vectors;
        const latent_result found = attend(world, cache, vectors);
        CHECK(found.flag == 0);
        double worst = 0;
        for (std::size_t i = 0; i < found.out.size() / 4; ++i)
          worst = std::max(worst, std::abs(static_cast<double>(world.number(found.out, i)) -
                                           static_cast<double>(world.number(right.out, i))));
        CHECK(worst < 1e-5);
        for (std::size_t i = 0; i < found.log_sum_exp.size(); ++i) {
          const auto here = std::bit_cast<float>(found.log_sum_exp[i]);
          const auto there = std::bit_cast<float>(right.log_sum_exp[i]);
          const bool is_near = here == there || std::abs(here - there) < 1e-5F;
          CHECK(is_near);
        }
      }
    }
  }

  TEST_CASE("parts, holders and lists of tokens compose with records") {
    for (const auto seed : seeds(8, 8)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      latent_world world(random, all_records[seed % all_records.size()].record, dtype::f32);
      world.options.window = 0;
      world.options.split = {};
      const bool is_tensor = world.record == paging::fp8_ds_mla;
      if (is_tensor) world.options.arithmetic = attention_arithmetic::tensor_cores;
      std::vector<std::byte> cache = appended(world);
      for (std::size_t row = 1; row < world.sequences.size(); row += 2) {
        world.sequences[row] = world.sequences[row - 1];
        world.lengths[row] = world.lengths[row - 1];
      }
      const latent_result whole = attend(world, cache, host_executor{});
      const std::uint64_t rows = world.sequences.size();
      // Two rows that share their tokens: the same bits.
      CHECK(attend(world, cache, host_executor{}, world.tables(), world.options,
                   {.rows = rows,
                    .sequences = world.sequences.data(),
                    .lengths = world.lengths.data(),
                    .shared = 2}) == whole);
      // Lists that name each row's tokens in order: the same bits.
      const std::int32_t stride = 32;
      std::vector<std::int32_t> listed(rows * static_cast<std::uint64_t>(stride), -1);
      for (std::size_t row = 0; row < rows; ++row) {
        for (std::int32_t t = 0; t < world.lengths[row]; ++t)
          listed[row * static_cast<std::size_t>(stride) + static_cast<std::size_t>(t)] = t;
      }
      const token_lists<padded_table_view> lists{
          .tables = world.tables(),
          .of_row = world.sequences.data(),
          .listed = listed.data(),
          .stride = stride,
          .num_sequences = static_cast<std::int32_t>(rows),
          .block_tokens = static_cast<std::int32_t>(world.layout.block_tokens)};
      CHECK(attend(world, cache, host_executor{}, lists, world.options, {.rows = rows}) == whole);
      // Two holders, each with a range of every sequence's tokens.
      std::vector<std::int32_t> cut(rows);
      const std::vector<std::int32_t> none(rows, 0);
      for (std::size_t row = 0; row < rows; ++row)
        cut[row] = world.lengths[row] / 2;
      const attention_part_shape shape{rows, world.query_heads, world.record.value_elements()};
      const std::uint64_t bytes = attention_part_bytes(shape);
      std::vector<float> memory[2];
      attention_part parts[2];
      for (std::size_t i = 0; i < 2; ++i) {
        memory[i].assign(bytes / sizeof(float), std::numeric_limits<float>::quiet_NaN());
        const auto part = attention_part_in(std::as_writable_bytes(std::span(memory[i])), shape).value();
        attention_options options = world.options;
        options.scales.keys = &world.outer;
        paged_attention_part(host_executor{}, world.tables(),
                             {.rows = rows,
                              .sequences = world.sequences.data(),
                              .lengths = world.lengths.data(),
                              .begins = i == 0 ? none.data() : cut.data(),
                              .ends = i == 0 ? cut.data() : world.lengths.data()},
                             world.query_rows(world.queries.data()), part, memory_of(world, cache),
                             latent_world::layer, {}, options)
            .value();
        parts[i] = part;
      }
      // Tensor cores round weights to bf16, in a part relative to its own largest.
      CHECK(worst_of_merged(world, shape, parts, whole) < (is_tensor ? 4e-3 : 2e-6));
      // A holder of all tokens.
      table_holder<host_executor, padded_table_view> holder(host_executor{}, world.tables(),
                                                            memory_of(world, cache),
                                                            {.arithmetic = world.options.arithmetic,
                                                             .scales = {.keys = &world.outer},
                                                             .latents = &world.record});
      const near_query query{.rows = rows,
                             .layer = latent_world::layer,
                             .query_heads = world.query_heads,
                             .head_dim = world.record.key_elements(),
                             .value_dim = world.record.value_elements(),
                             .element = dtype::f32,
                             .scale = world.options.scale,
                             .sequences = world.sequences.data(),
                             .lengths = world.lengths.data(),
                             .queries = world.queries.data()};
      std::vector<float> room(near_workspace_bytes(shape, 1) / sizeof(float));
      std::vector<std::byte> near(world.out_bytes());
      attend_near(host_executor{}, query, std::as_writable_bytes(std::span(room)),
                  merged_attention<>{.out = world.out_rows(near.data())}, holder)
          .value();
      CHECK(near == whole.out);
    }
  }

  TEST_CASE("context-parallel ranks hold records in turn, and their parts merge to the whole") {
    for (const auto seed : seeds(8, 8)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      latent_world world(random, all_records[seed % all_records.size()].record, dtype::f32);
      world.options.split = {};
      std::vector<std::byte> cache = appended(world);
      const latent_result whole = attend(world, cache, host_executor{});
      const std::uint64_t rows = world.sequences.size();
      const attention_part_shape shape{rows, world.query_heads, world.record.value_elements()};
      std::vector<float> memory[2];
      attention_part parts[2];
      for (std::uint32_t rank = 0; rank < 2; ++rank) {
        // Token t is token t / 2 of rank t % 2.
        std::vector<std::byte> held = world.cache;
        std::size_t at = 0;
        for (std::size_t sequence = 0; sequence < world.tokens.size(); ++sequence) {
          for (std::int32_t t = 0; t < world.tokens[sequence]; ++t, ++at) {
            if (static_cast<std::uint32_t>(t) % 2 != rank) continue;
            world.slots[at] = world.slot_of(static_cast<std::int32_t>(sequence), t / 2);
            append(world, held, host_executor{}, at, at + 1);
          }
        }
        kv_memory rank_memory = memory_of(world, held);
        rank_memory.layout.part = {.cp_rank = rank, .cp_size = 2};
        memory[rank].assign(attention_part_bytes(shape) / sizeof(float), 0);
        const auto part = attention_part_in(std::as_writable_bytes(std::span(memory[rank])), shape).value();
        attention_options options = world.options;
        options.scales.keys = &world.outer;
        paged_attention_part(
            host_executor{}, world.tables(),
            {.rows = rows, .sequences = world.sequences.data(), .lengths = world.lengths.data()},
            world.query_rows(world.queries.data()), part, rank_memory, latent_world::layer, {}, options)
            .value();
        parts[rank] = part;
      }
      CHECK(worst_of_merged(world, shape, parts, whole) < 2e-6);
    }
  }

  TEST_CASE("copies to another order, and a layout that describes the record's parts, keep every bit") {
    for (const auto seed : seeds(8, 8)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      latent_world world(random, all_records[seed % all_records.size()].record, dtype::f32);
      std::vector<std::byte> cache = appended(world);
      const latent_result made = attend(world, cache, host_executor{});
      const kv_layout before = world.layout;
      world.layout.order = block_order::layer_last;
      std::vector<std::byte> copied(cache.size(), std::byte{0xFF});
      std::vector<block_pair> pairs;
      for (std::uint64_t b = 0; b < world.blocks; ++b)
        pairs.push_back({static_cast<std::int32_t>(b), static_cast<std::int32_t>(b)});
      copy_kv_blocks(host_executor{}, {copied.data(), world.blocks, world.layout},
                     {cache.data(), world.blocks, before}, pairs)
          .value();
      CHECK(attend(world, copied, host_executor{}) == made);
    }
    std::mt19937_64 random(5);
    latent_world world(random, paging::fp8_ds_mla, dtype::f32);
    std::vector<std::byte> cache = appended(world);
    const latent_result made = attend(world, cache, host_executor{});
    world.layout = kv_layout{.layers = latent_world::layers,
                             .heads = 1,
                             .head_dim = 512,
                             .block_tokens = world.layout.block_tokens,
                             .has_values = false,
                             .element = dtype::fp8_e4m3,
                             .key_scales = {.group = paging::scale_group::run,
                                            .run = 128,
                                            .place = paging::scale_place::after_vector},
                             .rotary_dim = 64};
    CHECK(attend(world, cache, host_executor{}) == made);
  }

  TEST_CASE("the errors of records, over normal latents with large channels, are those of their codes") {
    // Latents of unit size with every 64th channel eight times as large; rotary elements four times as large.
    const auto values_in = [&](const latent_record& record) {
      std::mt19937_64 random(9);
      latent_world world(random, record, dtype::f32);
      const auto fill = [&](std::vector<std::byte>& to, std::uint32_t elements, float size,
                            bool has_outliers) {
        for (std::size_t i = 0; i < to.size() / 4; ++i) {
          float sum = -6;
          for (int n = 0; n < 12; ++n)
            sum += static_cast<float>(random() % 65'536) / 65'536;
          const bool is_large = has_outliers && i % elements % 64 == 5;
          store_element(dtype::f32, to.data() + 4 * i, sum * size * (is_large ? 8.0F : 1.0F));
        }
      };
      fill(world.latents, record.latents, 1, true);
      fill(world.rotary, record.rotary, 4, false);
      std::vector<std::byte> cache = appended(world);
      const std::vector<float> found = gathered(world, cache);
      double errors[2] = {0, 0};
      double sizes[2] = {0, 0};
      for (std::size_t t = 0; t < world.slots.size(); ++t) {
        for (std::uint32_t i = 0; i < record.key_elements(); ++i) {
          const bool is_rotary = i >= record.latents;
          const float right = is_rotary ? world.number(world.rotary, t * record.rotary + i - record.latents)
                                        : world.number(world.latents, t * record.latents + i);
          const double apart =
              static_cast<double>(found[t * record.key_elements() + i]) - static_cast<double>(right);
          errors[is_rotary ? 1 : 0] += apart * apart;
          sizes[is_rotary ? 1 : 0] += static_cast<double>(right) * static_cast<double>(right);
        }
      }
      return std::array{std::sqrt(errors[0] / sizes[0]), std::sqrt(errors[1] / sizes[1])};
    };
    const auto check = [&](const latent_record& record, double latents, double rotary) {
      const std::array found = values_in(record);
      CHECK(std::abs(found[0] - latents) <= 0.02 * latents);
      CHECK(std::abs(found[1] - rotary) <= 0.02 * rotary);
    };
    check(paging::bf16_mla, 0.00188, 0.00170);
    check(paging::fp8_mla, 0.0273, 0.0273);
    check(paging::fp8_ds_mla, 0.0187, 0.00170);
    check(paging::fp8_ds_mla_flashmla, 0.0273, 0.00170);
    check(paging::fp8_v4_mla, 0.0268, 0.00162);
    check(paging::nvfp4_ds_mla_432, 0.1005, 0.00170);
    check(paging::nvfp4_ds_mla_368, 0.0986, 0.0262);
    check(paging::nvfp4_ds_mla, 0.1084, 0.0273);
  }

  TEST_CASE("what records do not take is refused with a reason, and nothing is written") {
    std::mt19937_64 random(2);
    latent_world world(random, paging::fp8_ds_mla, dtype::f32);
    std::vector<std::byte> cache = world.cache;
    std::vector<std::byte> out(world.out_bytes());
    const attention_rows rows{.rows = 1, .sequences = world.sequences.data()};
    const auto attended = [&](auto change) {
      kv_memory memory = memory_of(world, cache);
      attention_options options = world.options;
      options.split = {};
      change(memory, options);
      const auto done =
          paged_attention(host_executor{}, world.tables(), rows, world.query_rows(world.queries.data()),
                          world.out_rows(out.data()), memory, latent_world::layer, {}, options);
      return done ? std::string() : done.error().message();
    };
    CHECK(attended([](kv_memory&, attention_options& of) { of.scale = 0; }) ==
          "paged_attention: options.scale: attention over latents needs options.scale, the scale of a head "
          "before absorption (1 / sqrt(192) in DeepSeek-V3): the length of a latent does not say it");
    CHECK(attended([](kv_memory& of, attention_options&) { of.layout.head_dim = 640; }) ==
          "paged_attention: cache.layout: the record takes one head without values whose rows, and what is "
          "after all rows, have 656 bytes a token; the layout has 640: make it by paging::latent_layout");
    CHECK(attended([](kv_memory& of, attention_options&) { of.data += 8; }) ==
          "paged_attention: cache.layout: 8 bytes is not a multiple of the granularity, 16 bytes");
    CHECK(attended([](kv_memory&, attention_options& of) { of.query_heads = 0; }) ==
          "paged_attention: query_heads is not given: two lengths must be equal, but are 0 and 1");
    CHECK(attended([](kv_memory&, attention_options& of) { of.latents = nullptr; }) ==
          "paged_attention: options.element: no kernel converts int8 to f32; convert it before the call, or "
          "store it as int8");
    // Scales that follow each row are in its bytes: they are not after all rows.
    const latent_record after_all{.latents = 64,
                                  .rotary = 0,
                                  .latent_element = dtype::fp8_e4m3,
                                  .row_bytes = 72,
                                  .group = 8,
                                  .scale = paging::latent_scale::ue8m0,
                                  .after_rows = 72,
                                  .rounding = paging::scale_rounding::power_of_two_up};
    CHECK(after_all.fault() == record_fault::none);
    CHECK(attended([&](kv_memory& of, attention_options& options) {
            options.latents = &after_all;
            of.layout.head_dim = 64;
            of.layout.key_scales = {.group = paging::scale_group::vector,
                                    .element = dtype::int8,
                                    .numbers = 8,
                                    .place = paging::scale_place::after_vector};
          }) ==
          "paged_attention: cache.layout: the record takes one head without values whose rows, and what is "
          "after all rows, have 72 bytes a token; the layout has 0: make it by paging::latent_layout");
    const latent_record broken{.latents = 12};
    CHECK(attended([&](kv_memory&, attention_options& of) { of.latents = &broken; }) ==
          "paged_attention: cache.layout: latents and rotary must be multiples of 8: a lane reads eight "
          "elements");
    CHECK(attended([](kv_memory&, attention_options& of) {
            of.arithmetic = attention_arithmetic::host_vectors;
          }) ==
          "paged_attention: options.arithmetic (host_vectors needs a host_vector_executor): 2 requested, but "
          "the highest allowed is 1");
    CHECK(attended([](kv_memory&, attention_options& of) {
            of.arithmetic = attention_arithmetic::host_integers;
          }).find("options.arithmetic: integer dots take keys and values in int8 or int4") !=
          std::string::npos);
    const slot_front slots(world.slots, world.layout.block_tokens, world.blocks);
    const auto append_of = [&](const latent_record& record, dtype element) {
      const auto done = append_mla(host_executor{}, slots, world.rows_of(world.latents.data(), 512),
                                   world.rows_of(world.rotary.data(), 64), record, memory_of(world, cache),
                                   latent_world::layer, {.element = element});
      return done ? std::string() : done.error().message();
    };
    CHECK(append_of(paging::nvfp4_ds_mla, dtype::f32) ==
          "append_mla: the record takes one head without values whose rows, and what is after all rows, have "
          "352 bytes a token; the layout has 656: make it by paging::latent_layout");
    CHECK(append_of(paging::fp8_ds_mla, dtype::int8) ==
          "append_mla: no kernel converts int8 to fp8_e4m3; convert it before the call, or store it as int8");
    CHECK(append_of(broken, dtype::f32) ==
          "append_mla: latents and rotary must be multiples of 8: a lane reads eight elements");
    CHECK(cache == world.cache);
  }
}
