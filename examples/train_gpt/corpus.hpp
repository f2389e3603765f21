/// @file
/// The training text, and the batch of a step.
#pragma once

#include <llmmem/error.hpp>
#include <llmmem/hash/crc32c.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "train_gpt/shape.hpp"

namespace train_gpt {

/// 64 well-mixed bits of a seed and a position (the output function of SplitMix64; Steele, Lea, Flood 2014).
[[nodiscard]] constexpr std::uint64_t mixed(std::uint64_t seed, std::uint64_t position) noexcept {
  std::uint64_t z = seed + (position + 1) * 0x9e37'79b9'7f4a'7c15U;
  z = (z ^ (z >> 30)) * 0xbf58'476d'1ce4'e5b9U;
  z = (z ^ (z >> 27)) * 0x94d0'49bb'1331'11ebU;
  return z ^ (z >> 31);
}

/// Sequences, and for each token the one that follows it.
struct token_batch {
  std::vector<std::uint8_t> tokens;
  std::vector<std::uint8_t> targets;
};

/// A text of any bytes. The batch of a step follows only from the seed and the step's number, so that a
/// resumed run continues as it would have.
class corpus {
 public:
  /// @param name  for error texts.
  /// @throws argument_error  if the text is shorter than one sequence of the shape's context.
  corpus(std::string name, std::string text, const gpt_shape& shape) : text_(std::move(text)) {
    if (text_.size() < shape.context + 1) {
      throw llmmem::argument_error(name + ": has " + std::to_string(text_.size()) + " bytes; sequences of " +
                                   std::to_string(shape.context) + " tokens need at least " +
                                   std::to_string(shape.context + 1) +
                                   ": take a longer text, or a context of " + "fewer tokens");
    }
  }

  [[nodiscard]] std::size_t bytes() const noexcept { return text_.size(); }
  /// A digest that distinguishes it from other texts.
  [[nodiscard]] std::uint32_t checksum() const noexcept {
    return llmmem::crc32c(0, std::as_bytes(std::span(text_.data(), text_.size())));
  }

  /// Returns the batch of step `step`: sequences from random places in the text.
  [[nodiscard]] token_batch batch(const gpt_shape& shape, std::uint64_t seed, std::uint64_t step) const {
    token_batch all;
    all.tokens.reserve(shape.tokens());
    all.targets.reserve(shape.tokens());
    for (std::size_t sequence = 0; sequence < shape.batch; ++sequence) {
      const std::uint64_t places = text_.size() - shape.context;
      const std::size_t from =
          static_cast<std::size_t>(mixed(mixed(seed, 0xba7c'4e5U), step * shape.batch + sequence) % places);
      for (std::size_t i = from; i < from + shape.context; ++i) {
        all.tokens.push_back(static_cast<std::uint8_t>(text_[i]));
        all.targets.push_back(static_cast<std::uint8_t>(text_[i + 1]));
      }
    }
    return all;
  }

 private:
  std::string text_;
};

}  // namespace train_gpt
