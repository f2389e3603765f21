/// @file
/// Bytes of activations that a training step keeps for its backward pass.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/model/model_shape.hpp>

#include <cstdint>
#include <string>

namespace llmmem {
inline namespace v0 {

/// The part that the backward pass recomputes instead of reading it from memory.
enum class recompute : std::uint8_t {
  none,       ///< nothing
  selective,  ///< the attention core: QK^T, softmax, its dropout, attention over V
  full,       ///< the whole layer from its input
};

/// Whether norms and dropouts are also split over the tensor-parallel ranks, along the sequence.
enum class sequence_parallel : std::uint8_t { off, on };

/// The size of a step.
struct training_step {
  std::uint64_t sequence = 0;         ///< tokens of one sequence
  std::uint64_t batch = 1;            ///< sequences of a micro-batch
  std::uint64_t tensor_parallel = 1;  ///< ranks that share a layer
  sequence_parallel split = sequence_parallel::off;
  recompute recomputed = recompute::none;
};

/// Returns the bytes that one layer keeps on one rank for one micro-batch, 16-bit activations: Korthikanti et
/// al. 2022 (arXiv 2205.05198), Table 2, with `s` tokens, `b` sequences, `h` hidden, `a` heads, `t` ranks:
///
/// | | bytes |
/// |---|---|
/// | nothing | sbh (34 + 5as/h) |
/// | tensor parallel | sbh (10 + 24/t + 5as/(ht)) |
/// | tensor and sequence parallel | sbh (34/t + 5as/(ht)) |
/// | selective recomputation | the same without the term in 5as/h |
/// | full recomputation | 2sbh |
///
/// It is the paper's layer: multi-head attention that stores its scores, an MLP of 4h with GELU, dropout.
/// Gated MLPs, grouped heads and flash attention keep other amounts: for them it is an order of magnitude.
/// Uneven divisions by `t` are rounded up.
///
/// @throws argument_error  when the sequence or a count is 0, or `tensor_parallel` does not divide the heads.
/// @throws length_error    when a product passes 2^63 - 1.
[[nodiscard]] constexpr std::uint64_t activation_bytes_per_layer(const model_shape& model,
                                                                 const training_step& step) {
  const auto times = [](std::uint64_t a, std::uint64_t b) {
    return checked_multiply(a, b, "activation bytes");
  };
  const auto plus = [](std::uint64_t a, std::uint64_t b) { return checked_add(a, b, "activation bytes"); };
  const auto refuse = [&](const std::string& why) {
    throw argument_error("activation bytes of " + std::string(model.name) + ": " + why);
  };
  if (step.sequence == 0) refuse("sequence is 0 tokens");
  if (step.batch == 0) refuse("batch is 0 sequences");
  if (step.tensor_parallel == 0) refuse("tensor_parallel is 0 ranks; 1 means no split");
  if (model.heads % step.tensor_parallel != 0) {
    refuse("tensor_parallel " + std::to_string(step.tensor_parallel) + " does not divide " +
           std::to_string(model.heads) + " heads");
  }
  const std::uint64_t t = step.tensor_parallel;
  const auto share = [t](std::uint64_t bytes) { return bytes / t + (bytes % t != 0 ? 1 : 0); };
  const std::uint64_t sbh = times(times(step.sequence, step.batch), model.hidden);
  if (step.recomputed == recompute::full) return times(2, sbh);

  std::uint64_t total = step.split == sequence_parallel::on ? share(times(34, sbh))
                                                            : plus(times(10, sbh), share(times(24, sbh)));
  if (step.recomputed == recompute::none) {
    const std::uint64_t scores = times(times(step.sequence, step.sequence), times(step.batch, model.heads));
    total = plus(total, share(times(5, scores)));
  }
  return total;
}

}  // namespace v0
}  // namespace llmmem
