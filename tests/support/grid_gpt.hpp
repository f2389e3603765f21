/// @file
/// A small GPT on a grid of ranks, forward and back: Optimus' two dimensions, Tesseract's two and a half.
#pragma once

#include <llmmem/comm/collectives.hpp>
#include <llmmem/comm/reduce_op.hpp>
#include <llmmem/comm/transport.hpp>
#include <llmmem/sharded_state.hpp>
#include <llmmem/sharding/grid.hpp>
#include <llmmem/sharding/summa.hpp>
#include <llmmem/space/host.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "support/tables.hpp"
#include "train_gpt/corpus.hpp"
#include "train_gpt/shape.hpp"
#include "train_gpt/stores.hpp"

namespace llmmem_tests {

/// All tensors of a GPT, layer by layer, and what each is on a grid: matrices in blocks, vectors in parts.
struct gpt_catalogue {
  std::vector<llmmem::tensor_facts> facts{};
  std::vector<llmmem::grid_role> roles{};
  std::vector<std::uint32_t> first_of_layer{};

  explicit gpt_catalogue(const train_gpt::gpt_shape& shape) {
    for (std::size_t i = 0; i < shape.layers(); ++i) {
      first_of_layer.push_back(static_cast<std::uint32_t>(facts.size()));
      for (const train_gpt::tensor_place& each : parameter_layout(shape, shape.layer(i)).tensors) {
        const bool is_vector = each.rows == 1;
        facts.push_back({each.name,
                         is_vector ? llmmem::tensor_shape::vector(each.columns)
                                   : llmmem::tensor_shape::matrix(each.rows, each.columns),
                         4});
        roles.push_back(is_vector ? llmmem::grid_role::bias : llmmem::grid_role::weight);
      }
    }
  }

  [[nodiscard]] std::uint32_t tensors() const { return static_cast<std::uint32_t>(facts.size()); }
  template <class Which>
  [[nodiscard]] std::uint32_t number(train_gpt::layer_id layer, Which which) const {
    return first_of_layer[to_index(layer)] + static_cast<std::uint32_t>(which);
  }
};

/// The columns of a layer's queries, keys and values as a grid of that many columns needs them: for each of
/// its columns the queries, the keys and the values of the heads there.
inline table by_heads(const table& fused, std::uint32_t grid_columns) {
  const std::size_t width = fused.columns / 3;
  const std::size_t share = width / grid_columns;
  table made(fused.rows, fused.columns);
  for (std::size_t r = 0; r < fused.rows; ++r) {
    for (std::size_t c = 0; c < fused.columns; ++c) {
      const std::size_t within = c % width;
      made.at(r, within / share * 3 * share + c / width * share + within % share) = fused.at(r, c);
    }
  }
  return made;
}

/// One kind of state of a store, by the numbers of the catalogue.
template <class Store>
std::vector<table> tensors_of_store(Store& store, const train_gpt::gpt_shape& shape,
                                    train_gpt::state_kind kind, std::uint32_t grid_columns) {
  std::vector<table> all;
  for (std::size_t i = 0; i < shape.layers(); ++i) {
    const train_gpt::layer_id layer = shape.layer(i);
    const auto values = store.acquire(layer, kind, train_gpt::lease_mode::read);
    for (const train_gpt::tensor_place& each : parameter_layout(shape, layer).tensors) {
      const table one(each.rows, each.columns, values.subspan(each.offset, each.rows * each.columns));
      all.push_back(each.name.find("c_attn") == each.name.npos ? one : by_heads(one, grid_columns));
    }
    store.release(layer, kind, train_gpt::lease_mode::read);
  }
  return all;
}

/// The largest of floats: the maximum of a softmax whose columns lie on several ranks.
inline constexpr llmmem::reduce_op largest_f32{
    .combine =
        [](std::byte* into, const std::byte* from, std::size_t bytes) noexcept {
          for (std::size_t at = 0; at < bytes; at += sizeof(float)) {
            float a = 0;
            float b = 0;
            std::memcpy(&a, into + at, sizeof(float));
            std::memcpy(&b, from + at, sizeof(float));
            if (b > a) std::memcpy(into + at, &b, sizeof(float));
          }
        },
    .element_bytes = 4};

/// The example's GPT over a grid of q x q x d ranks, of which this is one. Samples lie along rows and layers
/// of depth, what is hidden along columns: with it heads, and the vocabulary of the head. What it computes
/// with its own block alone is attention, GELU and what adds; matrices are multiplied by SUMMA, and sums over
/// hidden columns go along the row of the grid (Xu et al. 2021, arXiv 2104.05343; Wang et al. 2021, arXiv
/// 2105.14500).
///
/// @pre  q divides heads and vocabulary, q d the batch.
///
/// @tparam Grid  `grid2d` or `grid25d`, of the catalogue's tensors.
template <llmmem::transport Ranks, class Grid>
class grid_gpt {
 public:
  grid_gpt(Ranks& ranks, llmmem::host_space& space, const Grid& who, const train_gpt::gpt_shape& shape,
           const gpt_catalogue& catalogue)
      : ranks_(&ranks),
        grid_(who.grid()),
        place_(grid_.coordinates_of(ranks.rank())),
        shape_(shape),
        catalogue_(&catalogue),
        row_(ranks, grid_.row_group(ranks.rank())),
        column_(ranks, grid_.column_group(ranks.rank())),
        depth_(ranks, grid_.depth_group(ranks.rank())),
        rows_and_depth_(ranks, of_same_column(grid_, place_.column)),
        weights_(who, catalogue.facts, ranks, space, {.name = "weights"}),
        gradients_(catalogue.tensors()),
        rows_(llmmem::block_of(grid_, llmmem::grid_role::activation,
                               llmmem::tensor_shape::matrix(shape.tokens(), shape.width), place_)
                  .rows) {}

  [[nodiscard]] llmmem::sharded_state<Grid, Ranks, llmmem::host_space>& weights() { return weights_; }
  /// This rank's part of a tensor's gradient: of the same elements as its part of the tensor.
  [[nodiscard]] const table& gradient(std::uint32_t tensor) const { return gradients_[tensor]; }
  /// Elements of activations that the backward pass needs, less the statistics of norms, a row's two numbers.
  [[nodiscard]] std::size_t kept() const { return kept_; }

  /// The mean loss of all ranks' tokens; gradients of it.
  float forward_backward(const train_gpt::token_batch& batch) {
    ids tokens;
    ids targets;
    ids positions;
    for (std::size_t i = rows_.first; i < rows_.first + rows_.count; ++i) {
      tokens.push_back(batch.tokens[i]);
      targets.push_back(batch.targets[i]);
      positions.push_back(static_cast<std::uint32_t>(i % shape_.context));
    }
    using train_gpt::embedding_tensor;
    const std::uint32_t of_tokens = catalogue_->number(shape_.embedding(), embedding_tensor::tokens);
    const std::uint32_t of_positions = catalogue_->number(shape_.embedding(), embedding_tensor::positions);
    kept_ = 0;
    table x = sum(look_up(tokens, of_tokens), look_up(positions, of_positions));
    std::vector<block_record> records;
    for (std::size_t i = 1; i <= shape_.blocks; ++i)
      x = block_forward(shape_.layer(i), x, records.emplace_back());
    float loss = 0;
    table dx = head(x, targets, loss);
    for (std::size_t i = shape_.blocks; i > 0; --i)
      dx = block_backward(shape_.layer(i), dx, records[i - 1]);
    look_up_backward(tokens, dx, of_tokens);
    look_up_backward(positions, dx, of_positions);
    add_up_copies();
    return loss;
  }

  /// A step of gradient descent, of this rank's parts.
  void descend(float rate) {
    for (std::uint32_t t = 0; t < catalogue_->tensors(); ++t) {
      table w = weight(t);
      for (std::size_t i = 0; i < w.values.size(); ++i)
        w.values[i] -= rate * gradients_[t].values[i];
      std::memcpy(weights_.local(llmmem::tensor_id{t}).data(), w.values.data(), w.bytes().size());
    }
  }

 private:
  using ids = std::vector<std::uint32_t>;
  using group = llmmem::rank_group<Ranks>;

  struct norm_record {
    table x;
    table statistics;  // of each row the mean and the inverse of the standard deviation
    table y;
  };
  struct block_record {
    norm_record norm1, norm2;
    std::vector<attention> of_samples;
    table attended, expanded, activated;
  };

  [[nodiscard]] static std::vector<llmmem::rank_id> of_same_column(const llmmem::process_grid& grid,
                                                                   std::uint32_t column) {
    std::vector<llmmem::rank_id> all;
    for (std::uint32_t r = 0; r < to_number(grid.world()); ++r) {
      if (grid.coordinates_of(llmmem::rank_id{r}).column == column) all.push_back(llmmem::rank_id{r});
    }
    return all;
  }
  [[nodiscard]] llmmem::collective_call call() const {
    return {.by = ranks_->after(30'000'000'000), .small_bytes = 0};
  }
  void all_reduced(group& among, table& of, const llmmem::reduce_op& op = llmmem::sum_f32) {
    llmmem::collective_call with = call();
    llmmem::all_reduce(among, of.bytes(), op, with).value();
  }

  /// This rank's part of a tensor; of a vector one row.
  [[nodiscard]] table weight(std::uint32_t tensor) const {
    const llmmem::tensor_id id{tensor};
    const auto bytes = weights_.local(id);
    const Grid& who = weights_.layout();
    const std::size_t rows = who.role(id) == llmmem::grid_role::bias ? 1 : who.block(id, place_).rows.count;
    table made(rows, bytes.size() / 4 / rows);
    REQUIRE(made.bytes().size() == bytes.size());
    std::memcpy(made.values.data(), bytes.data(), bytes.size());
    return made;
  }

  // ---- SUMMA
  // -----------------------------------------------------------------------------------------------

  /// Of activations [tokens, inputs] times a matrix [inputs, outputs].
  [[nodiscard]] llmmem::summa_plan plan_of(std::uint32_t matrix) const {
    const llmmem::tensor_shape& of = catalogue_->facts[matrix].shape;
    return llmmem::plan_summa(grid_, {.m = shape_.tokens(), .n = of.columns(), .k = of.rows()});
  }
  [[nodiscard]] group& group_of(llmmem::summa_factor factor) {
    return factor == llmmem::summa_factor::a ? row_ : column_;
  }
  /// Who of the group has the step's panel of that factor. On a square grid it is all of its block.
  [[nodiscard]] llmmem::rank_id root_of(const llmmem::summa_step& step, llmmem::summa_factor factor) {
    const group& among = group_of(factor);
    for (const llmmem::summa_broadcast& each : step.broadcasts) {
      if (each.factor != factor) continue;
      for (std::uint32_t r = 0; r < to_number(among.world()); ++r) {
        if (among.beneath(llmmem::rank_id{r}) == each.root) return llmmem::rank_id{r};
      }
    }
    return among.rank();  // alone in it
  }
  /// The step's panel of a factor, of which this rank has the block `own`.
  [[nodiscard]] table panel(const llmmem::summa_step& step, llmmem::summa_factor factor, const table& own) {
    group& among = group_of(factor);
    const llmmem::rank_id root = root_of(step, factor);
    const bool is_a = factor == llmmem::summa_factor::a;
    table made = own;
    if (root != among.rank())
      made = table(is_a ? own.rows : step.inner.count, is_a ? step.inner.count : own.columns);
    llmmem::broadcast(among, made.bytes(), root, call()).value();
    return made;
  }
  /// What the group's parts of a panel sum up to, in the block of who has that panel.
  void add_up_panel(const llmmem::summa_step& step, llmmem::summa_factor factor, table part, table& block) {
    group& among = group_of(factor);
    const llmmem::rank_id root = root_of(step, factor);
    // To one: a reduce-scatter of which it has all.
    std::vector<std::uint64_t> blocks(std::size_t{to_number(among.world())} + 1, 0);
    std::fill(blocks.begin() + to_index(root) + 1, blocks.end(), part.bytes().size());
    llmmem::collective_call with = call();
    llmmem::reduce_scatter(among, part.bytes(), blocks, llmmem::sum_f32, with).value();
    if (root == among.rank()) block = std::move(part);
  }

  /// Y = X W.
  [[nodiscard]] table multiply(const table& x, std::uint32_t matrix) {
    const table w = weight(matrix);
    table y(x.rows, w.columns);
    for (const llmmem::summa_step& step : plan_of(matrix).steps) {
      const table a = panel(step, llmmem::summa_factor::a, x);
      y = sum(std::move(y), product(a, panel(step, llmmem::summa_factor::b, w)));
    }
    return y;
  }
  /// X' = Y' W^T, which it returns, and W' = X^T Y'.
  [[nodiscard]] table multiply_backward(const table& dy, const table& x, std::uint32_t matrix) {
    const table w = weight(matrix);
    table dx;
    const llmmem::summa_plan plan = plan_of(matrix);
    for (const llmmem::summa_step& step : plan.steps) {
      const table b = panel(step, llmmem::summa_factor::b, w);
      add_up_panel(step, llmmem::summa_factor::a, product(dy, transposed(b)), dx);
    }
    for (const llmmem::summa_step& step : plan.steps) {
      const table a = panel(step, llmmem::summa_factor::a, x);
      add_up_panel(step, llmmem::summa_factor::b, product(transposed(a), dy), gradients_[matrix]);
    }
    return dx;
  }

  /// A product whose left factor has one 1 in each row: every rank knows its own, and nobody sends it.
  [[nodiscard]] table look_up(const ids& of_rows, std::uint32_t matrix) {
    const table w = weight(matrix);
    table y(of_rows.size(), w.columns);
    for (const llmmem::summa_step& step : plan_of(matrix).steps) {
      const table b = panel(step, llmmem::summa_factor::b, w);
      for (std::size_t r = 0; r < of_rows.size(); ++r) {
        if (of_rows[r] < step.inner.first || of_rows[r] >= step.inner.first + step.inner.count) continue;
        for (std::size_t c = 0; c < y.columns; ++c)
          y.at(r, c) = b.at(of_rows[r] - step.inner.first, c);
      }
    }
    return y;
  }
  void look_up_backward(const ids& of_rows, const table& dy, std::uint32_t matrix) {
    for (const llmmem::summa_step& step : plan_of(matrix).steps) {
      table part(step.inner.count, dy.columns);
      for (std::size_t r = 0; r < of_rows.size(); ++r) {
        if (of_rows[r] < step.inner.first || of_rows[r] >= step.inner.first + step.inner.count) continue;
        for (std::size_t c = 0; c < dy.columns; ++c)
          part.at(of_rows[r] - step.inner.first, c) += dy.at(r, c);
      }
      add_up_panel(step, llmmem::summa_factor::b, std::move(part), gradients_[matrix]);
    }
  }

  /// Of the matrices each layer of depth has seen its own tokens; of the vectors each row, too.
  void add_up_copies() {
    for (std::uint32_t t = 0; t < catalogue_->tensors(); ++t)
      all_reduced(catalogue_->roles[t] == llmmem::grid_role::weight ? depth_ : rows_and_depth_,
                  gradients_[t]);
  }

  // ---- Between the matrices
  // --------------------------------------------------------------------------------

  [[nodiscard]] table norm_forward(const table& x, std::uint32_t scale, std::uint32_t shift,
                                   norm_record& of) {
    const auto width = static_cast<float>(shape_.width);
    const table by = weight(scale);
    const table plus = weight(shift);
    table sums(x.rows, 2);  // of values and of squares
    for (std::size_t r = 0; r < x.rows; ++r) {
      for (std::size_t c = 0; c < x.columns; ++c) {
        sums.at(r, 0) += x.at(r, c);
        sums.at(r, 1) += x.at(r, c) * x.at(r, c);
      }
    }
    all_reduced(row_, sums);
    of = {x, table(x.rows, 2), table(x.rows, x.columns)};
    for (std::size_t r = 0; r < x.rows; ++r) {
      const float mean = sums.at(r, 0) / width;
      const float inverse = 1 / std::sqrt(sums.at(r, 1) / width - mean * mean + 1e-5F);
      of.statistics.at(r, 0) = mean;
      of.statistics.at(r, 1) = inverse;
      for (std::size_t c = 0; c < x.columns; ++c)
        of.y.at(r, c) = (x.at(r, c) - mean) * inverse * by.values[c] + plus.values[c];
    }
    kept_ += of.x.values.size() + of.y.values.size();
    return of.y;
  }
  [[nodiscard]] table norm_back(const table& dy, const norm_record& of, std::uint32_t scale,
                                std::uint32_t shift) {
    const auto width = static_cast<float>(shape_.width);
    const table by = weight(scale);
    const auto normal = [&](std::size_t r, std::size_t c) {
      return (of.x.at(r, c) - of.statistics.at(r, 0)) * of.statistics.at(r, 1);
    };
    table sums(dy.rows, 2);
    gradients_[scale] = table(1, dy.columns);
    gradients_[shift] = table(1, dy.columns);
    for (std::size_t r = 0; r < dy.rows; ++r) {
      for (std::size_t c = 0; c < dy.columns; ++c) {
        sums.at(r, 0) += dy.at(r, c) * by.values[c];
        sums.at(r, 1) += dy.at(r, c) * by.values[c] * normal(r, c);
        gradients_[scale].values[c] += dy.at(r, c) * normal(r, c);
        gradients_[shift].values[c] += dy.at(r, c);
      }
    }
    all_reduced(row_, sums);
    table dx(dy.rows, dy.columns);
    for (std::size_t r = 0; r < dy.rows; ++r) {
      for (std::size_t c = 0; c < dy.columns; ++c) {
        const float g = dy.at(r, c) * by.values[c];
        dx.at(r, c) = (g - (sums.at(r, 0) + normal(r, c) * sums.at(r, 1)) / width) * of.statistics.at(r, 1);
      }
    }
    return dx;
  }

  [[nodiscard]] static table columns_of(const table& all, std::size_t part, std::size_t parts) {
    table made(all.rows, all.columns / parts);
    for (std::size_t r = 0; r < made.rows; ++r) {
      for (std::size_t c = 0; c < made.columns; ++c)
        made.at(r, c) = all.at(r, part * made.columns + c);
    }
    return made;
  }
  [[nodiscard]] static table below_each_other(const std::vector<table>& parts) {
    table all(0, parts[0].columns);
    for (const table& each : parts) {
      all.rows += each.rows;
      all.values.insert(all.values.end(), each.values.begin(), each.values.end());
    }
    return all;
  }
  [[nodiscard]] std::uint32_t samples() const {
    return static_cast<std::uint32_t>(rows_.count / shape_.context);
  }

  [[nodiscard]] table block_forward(train_gpt::layer_id layer, const table& x, block_record& of) {
    const auto number = [&](train_gpt::block_tensor which) { return catalogue_->number(layer, which); };
    const auto linear = [&](const table& in, train_gpt::block_tensor w, train_gpt::block_tensor b) {
      return with_bias(multiply(in, number(w)), weight(number(b)));
    };
    using enum train_gpt::block_tensor;
    const table qkv =
        linear(norm_forward(x, number(norm1_scale), number(norm1_shift), of.norm1), qkv_weight, qkv_bias);
    std::vector<table> parts;
    for (std::uint32_t s = 0; s < samples(); ++s) {
      const table rows = rows_of(qkv, s, samples());
      of.of_samples.push_back(
          {columns_of(rows, 0, 3), columns_of(rows, 1, 3), columns_of(rows, 2, 3), shape_.head_width()});
      parts.push_back(of.of_samples.back().forward());
      for (const table& each : of.of_samples.back().likely)
        kept_ += each.values.size();
    }
    of.attended = below_each_other(parts);
    const table middle = sum(linear(of.attended, project_weight, project_bias), x);
    of.expanded = linear(norm_forward(middle, number(norm2_scale), number(norm2_shift), of.norm2),
                         expand_weight, expand_bias);
    of.activated = gelu(of.expanded);
    kept_ += qkv.values.size() + of.attended.values.size() + 2 * of.expanded.values.size();
    return sum(linear(of.activated, contract_weight, contract_bias), middle);
  }

  [[nodiscard]] table block_backward(train_gpt::layer_id layer, const table& dy, const block_record& of) {
    const auto number = [&](train_gpt::block_tensor which) { return catalogue_->number(layer, which); };
    const auto linear = [&](const table& to_out, const table& in, train_gpt::block_tensor w,
                            train_gpt::block_tensor b) {
      gradients_[number(b)] = transposed(column_sums(to_out));
      return multiply_backward(to_out, in, number(w));
    };
    using enum train_gpt::block_tensor;
    const table d_expanded =
        gelu_backward(linear(dy, of.activated, contract_weight, contract_bias), of.expanded);
    const table d_norm2 = linear(d_expanded, of.norm2.y, expand_weight, expand_bias);
    const table d_middle = sum(norm_back(d_norm2, of.norm2, number(norm2_scale), number(norm2_shift)), dy);
    const table d_attended = linear(d_middle, of.attended, project_weight, project_bias);
    std::vector<table> parts;
    for (std::uint32_t s = 0; s < samples(); ++s) {
      // Queries, keys and values beside each other again.
      const auto three = of.of_samples[s].backward(rows_of(d_attended, s, samples()));
      parts.push_back(
          transposed(below_each_other({transposed(three[0]), transposed(three[1]), transposed(three[2])})));
    }
    const table d_norm1 = linear(below_each_other(parts), of.norm1.y, qkv_weight, qkv_bias);
    return sum(norm_back(d_norm1, of.norm1, number(norm1_scale), number(norm1_shift)), d_middle);
  }

  /// The last norm, the output, the loss; and back to the gradient of `x`.
  [[nodiscard]] table head(const table& x, const ids& targets, float& loss) {
    using train_gpt::head_tensor;
    const auto number = [&](head_tensor which) { return catalogue_->number(shape_.head(), which); };
    norm_record of;
    const table y = norm_forward(x, number(head_tensor::norm_scale), number(head_tensor::norm_shift), of);
    table logits = multiply(y, number(head_tensor::weight));
    const std::size_t first = place_.column * logits.columns;
    const auto is_here = [&](std::uint32_t target) {
      return target >= first && target < first + logits.columns;
    };
    table most(logits.rows, 1);
    for (std::size_t r = 0; r < logits.rows; ++r) {
      const auto row = logits.values.begin() + static_cast<std::ptrdiff_t>(r * logits.columns);
      most.values[r] = *std::max_element(row, row + static_cast<std::ptrdiff_t>(logits.columns));
    }
    all_reduced(row_, most, largest_f32);
    table sums(logits.rows, 2);  // of exponentials, and the target's logit
    for (std::size_t r = 0; r < logits.rows; ++r) {
      if (is_here(targets[r])) sums.at(r, 1) = logits.at(r, targets[r] - first) - most.values[r];
      for (std::size_t c = 0; c < logits.columns; ++c) {
        logits.at(r, c) = std::exp(logits.at(r, c) - most.values[r]);
        sums.at(r, 0) += logits.at(r, c);
      }
    }
    all_reduced(row_, sums);
    const auto tokens = static_cast<float>(shape_.tokens());
    table total(1, 1);
    for (std::size_t r = 0; r < logits.rows; ++r) {
      total.values[0] += (std::log(sums.at(r, 0)) - sums.at(r, 1)) / tokens;
      for (std::size_t c = 0; c < logits.columns; ++c)
        logits.at(r, c) /= sums.at(r, 0);
    }
    kept_ += logits.values.size();
    llmmem::collective_call at_once = call();
    at_once.small_bytes = 4096;
    llmmem::all_reduce(rows_and_depth_, total.bytes(), llmmem::sum_f32, at_once).value();
    loss = total.values[0];

    for (std::size_t r = 0; r < logits.rows; ++r) {
      if (is_here(targets[r])) logits.at(r, targets[r] - first) -= 1;
      for (std::size_t c = 0; c < logits.columns; ++c)
        logits.at(r, c) /= tokens;
    }
    const table dy = multiply_backward(logits, y, number(head_tensor::weight));
    return norm_back(dy, of, number(head_tensor::norm_scale), number(head_tensor::norm_shift));
  }

  Ranks* ranks_;
  llmmem::process_grid grid_;
  llmmem::grid_place place_;
  train_gpt::gpt_shape shape_;
  const gpt_catalogue* catalogue_;
  group row_;
  group column_;
  group depth_;
  group rows_and_depth_;  // all of the same column: they hold the same part of a vector
  llmmem::sharded_state<Grid, Ranks, llmmem::host_space> weights_;
  std::vector<table> gradients_;
  llmmem::index_range rows_;  // its tokens
  std::size_t kept_ = 0;
};

}  // namespace llmmem_tests
