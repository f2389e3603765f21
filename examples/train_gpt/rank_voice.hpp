/// @file
/// The messages of a rank to the others between its steps.
#pragma once

#include <llmmem/comm/collectives.hpp>
#include <llmmem/comm/transport.hpp>
#include <llmmem/training/loss_scale.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "train_gpt/corpus.hpp"
#include "train_gpt/shape.hpp"

namespace train_gpt {

/// A rank among others, over any transport. This one is alone.
class rank_voice {
 public:
  virtual ~rank_voice() = default;
  [[nodiscard]] virtual std::uint32_t rank() const noexcept { return 0; }
  [[nodiscard]] virtual std::uint32_t world() const noexcept { return 1; }
  /// Gathers the numbers of all ranks, in order. All ranks call it.
  /// @throws comm_error  if a rank has failed.
  [[nodiscard]] virtual std::vector<std::uint64_t> exchange(std::uint64_t mine) { return {mine}; }
  /// Adds the gradients of all ranks. Otherwise as `exchange`.
  virtual void merge(llmmem::gradient_norm& /*norm*/) {}
};

/// A rank over a transport.
template <llmmem::transport Ranks>
class rank_voice_of final : public rank_voice {
 public:
  explicit rank_voice_of(Ranks& ranks) noexcept : ranks_(&ranks) {}

  [[nodiscard]] std::uint32_t rank() const noexcept override { return to_index(ranks_->rank()); }
  [[nodiscard]] std::uint32_t world() const noexcept override { return to_number(ranks_->world()); }
  [[nodiscard]] std::vector<std::uint64_t> exchange(std::uint64_t mine) override {
    std::vector<std::uint64_t> all(world(), mine);
    const auto bytes = std::as_writable_bytes(std::span(all));
    llmmem::all_gather(*ranks_, bytes, llmmem::even_blocks(bytes.size(), ranks_->world(), sizeof(mine)),
                       {.by = ranks_->after(patience_ns)})
        .value();
    return all;
  }
  void merge(llmmem::gradient_norm& norm) override {
    llmmem::collective_call call{.by = ranks_->after(patience_ns)};
    norm.merge_all(*ranks_, call).value();
  }

 private:
  static constexpr std::uint64_t patience_ns = 60'000'000'000;

  Ranks* ranks_;
};

/// The shape of one rank's computation: the model's, for its share of the batch.
[[nodiscard]] inline gpt_shape shape_of_rank(const gpt_shape& shape, std::size_t ranks) noexcept {
  gpt_shape mine = shape;
  mine.batch = shape.batch / ranks;
  return mine;
}

/// A trainer that is one rank of several: it takes its own sequences of each batch, the first ranks the first
/// ones, and its losses are the means over all ranks, summed in their order.
///
/// @par Thread safety   one thread; all ranks make the same calls.
/// @par Errors          as `trainer`; `comm_error` if losses cannot be exchanged.
template <class Trainer>
class shared_batch_trainer {
 public:
  /// @param workers  that train apart, each of as many ranks: the digest is then of the weights of all.
  shared_batch_trainer(Trainer& trainer, rank_voice& ranks, std::uint32_t workers = 1) noexcept
      : trainer_(&trainer), ranks_(&ranks), workers_(workers) {}

  [[nodiscard]] double step(const token_batch& batch, std::uint64_t number) {
    return mean(trainer_->step(share_of(batch), number));
  }
  [[nodiscard]] double evaluate(const token_batch& batch) {
    return mean(trainer_->evaluate(share_of(batch)));
  }
  /// A digest of all weights: every rank calls it, and gets the same.
  [[nodiscard]] std::uint64_t digest() {
    const std::uint64_t mine = trainer_->digest();
    if (workers_ == 1) return mine;
    const std::vector<std::uint64_t> all = ranks_->exchange(mine);
    std::uint64_t sum = 0;
    for (std::size_t first = 0; first < all.size(); first += all.size() / workers_)
      sum = mixed(sum, all[first]);
    return sum;
  }

 private:
  [[nodiscard]] token_batch share_of(const token_batch& batch) const {
    const std::size_t tokens = batch.tokens.size() / ranks_->world();
    const auto part = [&](const std::vector<std::uint8_t>& all) {
      const auto first = all.begin() + static_cast<std::ptrdiff_t>(ranks_->rank() * tokens);
      return std::vector<std::uint8_t>(first, first + static_cast<std::ptrdiff_t>(tokens));
    };
    return {part(batch.tokens), part(batch.targets)};
  }
  [[nodiscard]] double mean(double mine) {
    const std::vector<std::uint64_t> all = ranks_->exchange(std::bit_cast<std::uint64_t>(mine));
    double sum = 0;
    for (const std::uint64_t each : all)
      sum += std::bit_cast<double>(each);
    return sum / static_cast<double>(all.size());
  }

  Trainer* trainer_;
  rank_voice* ranks_;
  std::uint32_t workers_;
};

/// The same over a transport.
template <class Trainer, llmmem::transport Ranks>
class rank_trainer {
 public:
  rank_trainer(Trainer& trainer, Ranks& ranks) noexcept : voice_(ranks), trainer_(trainer, voice_) {}
  rank_trainer(const rank_trainer&) = delete;
  rank_trainer& operator=(const rank_trainer&) = delete;

  [[nodiscard]] double step(const token_batch& batch, std::uint64_t number) {
    return trainer_.step(batch, number);
  }
  [[nodiscard]] double evaluate(const token_batch& batch) { return trainer_.evaluate(batch); }
  [[nodiscard]] std::uint64_t digest() { return trainer_.digest(); }

 private:
  rank_voice_of<Ranks> voice_;
  shared_batch_trainer<Trainer> trainer_;
};

}  // namespace train_gpt
