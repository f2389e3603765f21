/// @file
/// Traces of well-known programs, to try planners in tests, benchmarks and documentation.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/model/model_shape.hpp>
#include <llmmem/schedule/trace.hpp>
#include <llmmem/transfer/link_model.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

/// Makers of traces. Each is a pure function of its arguments.
namespace llmmem {
inline namespace v0 {
namespace shapes {

/// Makes one pass over `layers` that only reads: weights streamed for inference.
/// @param bytes  of each layer; `compute_ns` of each.
[[nodiscard]] inline schedule_trace forward(std::size_t layers, std::uint64_t bytes,
                                            std::uint64_t compute_ns) {
  trace_recorder record;
  for (std::size_t i = 0; i < layers; ++i)
    record.add_chunk(bytes);
  for (std::uint32_t i = 0; i < layers; ++i) {
    record.acquire(chunk_id{i}, access_mode::read);
    record.compute(compute_ns);
    record.release(chunk_id{i});
  }
  return record.freeze();
}

/// Makes a forward and a backward pass that only read; the backward pass computes twice as long, as is usual.
[[nodiscard]] inline schedule_trace forward_backward(std::size_t layers, std::uint64_t bytes,
                                                     std::uint64_t compute_ns) {
  trace_recorder record;
  for (std::size_t i = 0; i < layers; ++i)
    record.add_chunk(bytes);
  const auto use = [&](std::size_t layer, std::uint64_t ns) {
    const chunk_id chunk{static_cast<std::uint32_t>(layer)};
    record.acquire(chunk, access_mode::read);
    record.compute(ns);
    record.release(chunk);
  };
  for (std::size_t i = 0; i < layers; ++i)
    use(i, compute_ns);
  for (std::size_t i = layers; i-- > 0;)
    use(i, 2 * compute_ns);
  return record.freeze();
}

/// Makes a forward pass over layers of two sizes, `little` and `large` alternately.
[[nodiscard]] inline schedule_trace unequal(std::size_t layers, std::uint64_t little, std::uint64_t large,
                                            std::uint64_t compute_ns) {
  trace_recorder record;
  for (std::size_t i = 0; i < layers; ++i)
    record.add_chunk(i % 2 == 0 ? little : large);
  for (std::uint32_t i = 0; i < layers; ++i) {
    record.acquire(chunk_id{i}, access_mode::read);
    record.compute(compute_ns);
    record.release(chunk_id{i});
  }
  return record.freeze();
}

/// Makes layers of `experts` chunks. Each iteration reads `active` of them per layer, drawn with
/// probabilities that fall as 1 / rank (Zipf's law), different for every seed. A layer ranks its experts by
/// their numbers, rotated by the layer's number. All arithmetic is in integers, so the trace is the same on
/// every machine.
[[nodiscard]] inline schedule_trace skewed_experts(std::size_t layers, std::size_t experts,
                                                   std::size_t active, std::uint64_t bytes,
                                                   std::uint64_t compute_ns, std::uint64_t seed) {
  if (active > experts || experts == 0) {
    throw argument_error("skewed_experts: " + std::to_string(active) + " of " + std::to_string(experts) +
                         " experts cannot be active; the number must be 0 to all, of at least 1 expert");
  }
  trace_recorder record;
  for (std::size_t i = 0; i < layers * experts; ++i)
    record.add_chunk(bytes);
  constexpr std::uint64_t scale = 1'000'000'007;
  std::uint64_t whole = 0;
  for (std::size_t rank = 0; rank < experts; ++rank)
    whole += scale / (rank + 1);
  const auto draw = [&seed] {
    std::uint64_t x = seed += 0x9E37'79B9'7F4A'7C15ULL;  // SplitMix64
    x = (x ^ (x >> 30)) * 0xBF58'476D'1CE4'E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D0'49BB'1331'11EBULL;
    return x ^ (x >> 31);
  };
  for (std::size_t layer = 0; layer < layers; ++layer) {
    std::vector<bool> chosen(experts);
    for (std::size_t i = 0; i < active;) {
      std::uint64_t point = draw() % whole;
      std::size_t rank = 0;
      for (; point >= scale / (rank + 1); ++rank)
        point -= scale / (rank + 1);
      const std::size_t expert = (rank + layer) % experts;
      if (chosen[expert]) continue;
      chosen[expert] = true;
      ++i;
    }
    for (std::size_t expert = 0; expert < experts; ++expert) {
      if (!chosen[expert]) continue;
      const chunk_id chunk{static_cast<std::uint32_t>(layer * experts + expert)};
      record.acquire(chunk, access_mode::read);
      record.compute(compute_ns);
      record.release(chunk);
    }
  }
  return record.freeze();
}

/// Makes a training step that stores weights, gradients and optimizer state of every layer separately:
/// forward and backward read weights, backward writes gradients, and the optimizer, layer by layer, holds all
/// three at once, changes weights and state, and discards the gradients.
/// @param weights, gradients, optimizer bytes of a layer.
[[nodiscard]] inline schedule_trace training_step(std::size_t layers, std::uint64_t weights,
                                                  std::uint64_t gradients, std::uint64_t optimizer,
                                                  std::uint64_t compute_ns) {
  trace_recorder record;
  for (std::size_t i = 0; i < layers; ++i) {
    record.add_chunk(weights);
    record.add_chunk(gradients);
    record.add_chunk(optimizer);
  }
  const auto chunk = [](std::size_t layer, std::size_t kind) {
    return chunk_id{static_cast<std::uint32_t>(layer * 3 + kind)};
  };
  for (std::size_t i = 0; i < layers; ++i) {
    record.acquire(chunk(i, 0), access_mode::read);
    record.compute(compute_ns);
    record.release(chunk(i, 0));
  }
  for (std::size_t i = layers; i-- > 0;) {
    record.acquire(chunk(i, 0), access_mode::read);
    record.acquire(chunk(i, 1), access_mode::write);
    record.compute(2 * compute_ns);
    record.release(chunk(i, 1));
    record.release(chunk(i, 0));
  }
  for (std::size_t i = 0; i < layers; ++i) {
    record.acquire(chunk(i, 1), access_mode::read);
    record.acquire(chunk(i, 0), access_mode::read_write);
    record.acquire(chunk(i, 2), access_mode::read_write);
    record.compute(compute_ns / 8);
    record.release(chunk(i, 2));
    record.release(chunk(i, 0));
    record.release(chunk(i, 1));
    record.discard(chunk(i, 1));
  }
  return record.freeze();
}

/// Makes one decoding step of a model: it reads the embedding, the layers and the output head in turn. Each
/// computes for as long as memory of `memory_bytes_per_second` takes to read it.
/// @param bytes_per_parameter  2 for bf16.
[[nodiscard]] inline schedule_trace decode(const model_shape& model, std::uint64_t bytes_per_parameter,
                                           std::uint64_t memory_bytes_per_second) {
  const std::uint64_t ends = model.embedding_parameters();
  const std::uint64_t shared = model.output == output_kind::separate ? 2 * ends : ends;
  const std::uint64_t layer = (model.parameters() - shared) / model.layers * bytes_per_parameter;
  trace_recorder record;
  const link_model memory{.bytes_per_second = memory_bytes_per_second};
  const auto use = [&](std::uint64_t bytes) {
    const chunk_id chunk = record.add_chunk(bytes);
    record.acquire(chunk, access_mode::read);
    record.compute(transfer_ns(memory, bytes));
    record.release(chunk);
  };
  use(ends * bytes_per_parameter);
  for (std::uint64_t i = 0; i < model.layers; ++i)
    use(layer);
  if (model.output == output_kind::separate) use(ends * bytes_per_parameter);
  return record.freeze();
}

}  // namespace shapes
}  // namespace v0
}  // namespace llmmem
