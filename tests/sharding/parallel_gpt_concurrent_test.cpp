/// A block of the small GPT of examples/train_gpt in parts: its matrices over ranks, the sequence between
/// them, its layers in stages. The unsplit one is the example's own.
#include <llmmem/comm/collectives.hpp>
#include <llmmem/schedule/pipeline.hpp>
#include <llmmem/sharded_state.hpp>
#include <llmmem/sharding/ring_bytes.hpp>
#include <llmmem/sharding/split_2d.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "support/state_world.hpp"
#include "support/tables.hpp"
#include "support/tiny_gpt.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;
using ranks_of = communicator<llmmem::testing::sim_endpoint>;

// The tensors of a block. Queries, keys and values are three: as one, a band of columns would be of queries.
enum tensor_number : std::uint32_t {
  n1_scale,
  n1_shift,
  w_q,
  w_k,
  w_v,
  b_q,
  b_k,
  b_v,
  w_project,
  b_project,
  n2_scale,
  n2_shift,
  w_expand,
  b_expand,
  w_contract,
  b_contract,
  tensor_count
};

constexpr train_gpt::gpt_shape shape{.blocks = 1, .width = 24, .heads = 4, .context = 12, .batch = 1};

std::vector<tensor_facts> catalogue() {
  const std::uint64_t h = shape.width;
  const std::uint64_t f = shape.inner();
  const auto v = [](const char* name, std::uint64_t n) {
    return tensor_facts{name, tensor_shape::vector(n), 4};
  };
  const auto m = [](const char* name, std::uint64_t r, std::uint64_t c) {
    return tensor_facts{name, tensor_shape::matrix(r, c), 4};
  };
  return {v("n1_scale", h),     v("n1_shift", h),  m("w_q", h, h),        m("w_k", h, h),
          m("w_v", h, h),       v("b_q", h),       v("b_k", h),           v("b_v", h),
          m("w_project", h, h), v("b_project", h), v("n2_scale", h),      v("n2_shift", h),
          m("w_expand", h, f),  v("b_expand", f),  m("w_contract", f, h), v("b_contract", h)};
}

/// Stored input by output: a column-parallel layer is split by columns, a row-parallel one by rows.
std::vector<split_axis> axes() {
  using enum split_axis;
  return {none, none, columns, columns, columns, rows, rows, rows,
          rows, none, none,    none,    columns, rows, rows, none};
}

/// What the example's own model makes of the block: its input and output, and gradients.
struct unsplit {
  std::vector<table> weights;    // by number
  std::vector<table> gradients;  // of those
  table input, output, to_output, to_input;
};

unsplit run_unsplit() {
  using namespace train_gpt;
  tiny_training<float> tiny(shape, 1);
  const token_batch batch = tiny.text.batch(shape, 1, 0);
  const layer_id block = shape.layer(1);
  const auto values = [&](layer_id layer, train_gpt::state_kind kind) {
    return tiny.state.acquire(layer, kind, lease_mode::read);
  };
  // Biases and norms that do something.
  for (std::size_t i = 0; i < shape.layers(); ++i) {
    const auto w = values(shape.layer(i), train_gpt::state_kind::weights);
    for (std::size_t k = 0; k < w.size(); ++k)
      w[k] += 0.05F * std::sin(static_cast<float>(k + i));
  }
  static_cast<void>(tiny.trainer.forward_backward(batch));
  unsplit all;
  const layer_layout layout = parameter_layout(shape, block);
  const auto tables_of = [&](std::span<const float> from) {
    std::vector<table> made(tensor_count);
    const auto one = [&](block_tensor which) {
      const tensor_place& place = layout.tensors[static_cast<std::size_t>(which)];
      return table(place.rows, place.columns, from.subspan(place.offset, place.rows * place.columns));
    };
    const auto third = [&](const table& fused, std::size_t part) {
      table cut(fused.rows, fused.columns / 3);
      for (std::size_t r = 0; r < cut.rows; ++r) {
        for (std::size_t c = 0; c < cut.columns; ++c)
          cut.at(r, c) = fused.at(r, part * cut.columns + c);
      }
      return cut;
    };
    using enum block_tensor;
    made[n1_scale] = one(norm1_scale);
    made[n1_shift] = one(norm1_shift);
    for (std::uint32_t part = 0; part < 3; ++part) {
      made[w_q + part] = third(one(qkv_weight), part);
      made[b_q + part] = third(one(qkv_bias), part);
    }
    made[w_project] = one(project_weight);
    made[b_project] = one(project_bias);
    made[n2_scale] = one(norm2_scale);
    made[n2_shift] = one(norm2_shift);
    made[w_expand] = one(expand_weight);
    made[b_expand] = one(expand_bias);
    made[w_contract] = one(contract_weight);
    made[b_contract] = one(contract_bias);
    return made;
  };
  all.weights = tables_of(values(block, train_gpt::state_kind::weights));
  all.gradients = tables_of(values(block, train_gpt::state_kind::gradients));
  const auto record = [&](layer_id layer) {
    return tiny.activations.fetch(layer, rebuild_activations<float>(nullptr, nullptr));
  };
  const std::size_t t = shape.tokens();
  const std::size_t h = shape.width;
  all.input = table(t, h, record(block).first(t * h));
  all.output = table(t, h, record(shape.head()).first(t * h));
  // Of one sequence, the gradient of a position is that of its token's embedding: of the block's input.
  const auto embedding = values(shape.embedding(), train_gpt::state_kind::gradients);
  all.to_input = table(t, h, embedding.last(t * h));
  // The gradient of its output, by the head's definition.
  const auto head = values(shape.head(), train_gpt::state_kind::weights);
  const table scale(h, 1, head.first(h));
  const table w(h, vocabulary, head.subspan(2 * h, h * vocabulary));
  table logits(t, vocabulary, record(shape.head()).last(t * vocabulary));
  for (std::size_t r = 0; r < t; ++r) {
    logits.at(r, batch.targets[r]) -= 1;
    for (std::size_t c = 0; c < vocabulary; ++c)
      logits.at(r, c) /= static_cast<float>(t);
  }
  all.to_output = norm_backward(product(logits, transposed(w)), all.output, scale);
  return all;
}

/// What stands between the matrices, and what is sent there.
enum class between : std::uint8_t {
  nothing,   ///< the rank has the block to itself
  whole,     ///< on every rank, by all-reduces (Shoeybi et al. 2019)
  sequence,  ///< rows on each, by gathers and reduce-scatters (Korthikanti et al. 2022)
};

/// A block on `t` ranks, forward and back.
class parallel_block {
 public:
  parallel_block(ranks_of& ranks, std::span<const table> weights, between how) : ranks_(&ranks), how_(how) {
    w_.assign(weights.begin(), weights.end());
  }

  /// @param x  what this rank has of the input.
  table forward(const table& x) {
    x_ = x;
    n1_ = gather(norm(x, w_[n1_scale], w_[n1_shift]));
    attention_ = {with_bias(product(n1_, w_[w_q]), w_[b_q]), with_bias(product(n1_, w_[w_k]), w_[b_k]),
                  with_bias(product(n1_, w_[w_v]), w_[b_v]), shape.head_width()};
    attended_ = attention_.forward();
    middle_ = with_bias(sum(add_up(product(attended_, w_[w_project])), x), w_[b_project]);
    n2_ = gather(norm(middle_, w_[n2_scale], w_[n2_shift]));
    expanded_ = with_bias(product(n2_, w_[w_expand]), w_[b_expand]);
    activated_ = gelu(expanded_);
    return with_bias(sum(add_up(product(activated_, w_[w_contract])), middle_), w_[b_contract]);
  }

  /// @return the gradient of what this rank has of the input.
  table backward(const table& to_output) {
    const table dy = gather(to_output);
    gradients_[w_contract] = product(transposed(activated_), dy);
    const table d_expanded = gelu_backward(product(dy, transposed(w_[w_contract])), expanded_);
    gradients_[w_expand] = product(transposed(n2_), d_expanded);
    gradients_[b_expand] = column_sums(d_expanded);
    const table d_n2 = add_up(product(d_expanded, transposed(w_[w_expand])));
    const table d_middle = sum(norm_backward(d_n2, middle_, w_[n2_scale]), to_output);
    const table dm = gather(d_middle);
    gradients_[w_project] = product(transposed(attended_), dm);
    const auto d_qkv = attention_.backward(product(dm, transposed(w_[w_project])));
    table d_n1(n1_.rows, n1_.columns);
    for (std::uint32_t part = 0; part < 3; ++part) {
      gradients_[w_q + part] = product(transposed(n1_), d_qkv[part]);
      gradients_[b_q + part] = column_sums(d_qkv[part]);
      d_n1 = sum(d_n1, product(d_qkv[part], transposed(w_[w_q + part])));
    }
    return sum(norm_backward(add_up(d_n1), x_, w_[n1_scale]), d_middle);
  }

  [[nodiscard]] const std::map<std::uint32_t, table>& gradients() const { return gradients_; }
  /// Elements kept between the passes, of what the sequence split cuts.
  [[nodiscard]] std::size_t kept_between() const { return x_.values.size() + middle_.values.size(); }

 private:
  /// Rows of all ranks; or what is whole anyway.
  table gather(const table& rows) {
    if (how_ != between::sequence) return rows;
    const std::uint32_t world = to_number(ranks_->world());
    table all(rows.rows * world, rows.columns);
    std::copy(
        rows.values.begin(), rows.values.end(),
        all.values.begin() + static_cast<std::ptrdiff_t>(to_index(ranks_->rank()) * rows.values.size()));
    all_gather(*ranks_, all.bytes(), even_blocks(all.bytes().size(), rank_count{world}, 4), call()).value();
    return all;
  }
  /// The sum of all ranks' parts: whole, or this rank's rows of it.
  table add_up(table part) {
    if (how_ == between::nothing) return part;
    collective_call with = call();
    if (how_ == between::whole) {
      all_reduce(*ranks_, part.bytes(), sum_f32, with).value();
      return part;
    }
    const std::uint32_t world = to_number(ranks_->world());
    reduce_scatter(*ranks_, part.bytes(), even_blocks(part.bytes().size(), rank_count{world}, 4), sum_f32,
                   with)
        .value();
    const std::size_t rows = part.rows / world;
    return table(rows, part.columns,
                 std::span<const float>(part.values)
                     .subspan(to_index(ranks_->rank()) * rows * part.columns, rows * part.columns));
  }
  collective_call call() { return {.by = ranks_->after(one_second), .small_bytes = 0}; }

  ranks_of* ranks_;
  between how_;
  std::vector<table> w_;
  std::map<std::uint32_t, table> gradients_;
  table x_, n1_, attended_, middle_, n2_, expanded_, activated_;
  attention attention_{};
};

}  // namespace

TEST_SUITE("parallel_gpt") {
  TEST_CASE("a split block computes the same as a whole one, and sends the papers' bytes") {
    const unsplit expected = run_unsplit();
    const auto facts = catalogue();
    const std::uint64_t activation = 4 * shape.tokens() * shape.width;
    for (const between how : {between::whole, between::sequence}) {
      for (const std::uint32_t world : {1U, 2U, 4U}) {
        CAPTURE(world);
        in_sim_world(world, world, [&](ranks_of& ranks, host_space& space, std::uint32_t self) {
          const split_2d who(facts, axes(), rank_count{world});
          sharded_state weights(who, facts, ranks, space, {.name = "weights"});
          std::vector<table> pieces;
          for (std::uint32_t t = 0; t < tensor_count; ++t) {
            const auto piece =
                dense(bytes_of(expected.weights[t]), who.local(tensor_id{t}, rank_id{self}), 4);
            std::copy(piece.begin(), piece.end(), weights.local(tensor_id{t}).begin());
            const bool is_split_by_columns = axes()[t] == split_axis::columns;
            const bool is_split_by_rows = axes()[t] == split_axis::rows;
            const tensor_shape& of = facts[t].shape;
            table mine(of.rows() / (is_split_by_rows ? world : 1),
                       of.columns() / (is_split_by_columns ? world : 1));
            REQUIRE(piece.size() == mine.bytes().size());
            std::memcpy(mine.values.data(), weights.local(tensor_id{t}).data(), piece.size());
            pieces.push_back(mine);
          }
          parallel_block block(ranks, pieces, how);
          const auto mine = [&](const table& all) {
            return how == between::whole ? all : rows_of(all, self, world);
          };
          const std::uint64_t before = sent_by(ranks);
          const table output = block.forward(mine(expected.input));
          const std::uint64_t forward = sent_by(ranks) - before;
          CHECK(difference(output, mine(expected.output)) < 1e-5F);
          const table to_input = block.backward(mine(expected.to_output));
          CHECK(difference(to_input, mine(expected.to_input)) < 1e-5F);
          for (const auto& [t, gradient] : block.gradients()) {
            const auto piece =
                dense(bytes_of(expected.gradients[t]), who.local(tensor_id{t}, rank_id{self}), 4);
            table slice = gradient;
            REQUIRE(piece.size() == slice.bytes().size());
            std::memcpy(slice.values.data(), piece.data(), piece.size());
            CHECK(difference(gradient, slice) < 1e-5F);
          }
          CHECK(block.gradients().size() == 10);
          // Two all-reduces each way; or, at the same bytes, two gathers and two reduce-scatters.
          const std::uint64_t one = ring_sent_bytes(ring_collective::all_reduce, shape.tokens() * shape.width,
                                                    4, rank_count{world}, rank_id{self});
          CHECK(one == 2 * activation * (world - 1) / world);
          CHECK(forward == 2 * one);
          CHECK(sent_by(ranks) - before == 4 * one);
          // What lies between the matrices is divided by the ranks.
          CHECK(block.kept_between() * 4 == 2 * activation / (how == between::whole ? 1 : world));
          // A checkpoint, or anyone who needs a matrix whole, has it from the bands.
          const std::vector<tensor_id> scope{tensor_id{w_expand}, tensor_id{w_contract}, tensor_id{n1_scale}};
          const auto whole = weights.gather(scope).value();
          for (std::size_t i = 0; i < scope.size(); ++i)
            CHECK(copy_of(whole.tensor(i)) == bytes_of(expected.weights[to_index(scope[i])]));
        });
      }
    }
  }

  TEST_CASE(
      "blocks in stages compute the same as in sequence, and send an activation each way per micro-batch") {
    const unsplit expected = run_unsplit();
    constexpr std::uint32_t stages = 3;
    constexpr std::uint32_t micro_batches = 5;
    const auto input_of = [&](std::uint32_t micro) {
      table x = expected.input;
      for (float& each : x.values)
        each *= 1 + 0.1F * static_cast<float>(micro);
      return x;
    };
    const std::uint64_t activation = 4 * shape.tokens() * shape.width;
    const pipeline_order order = one_f_one_b({.devices = stages, .micro_batches = micro_batches});
    in_sim_world(stages, 1, [&](ranks_of& ranks, host_space&, std::uint32_t self) {
      const auto make = [&] { return std::vector<table>(expected.weights); };
      std::map<std::uint32_t, parallel_block> live;
      std::size_t most = 0;
      const auto send = [&](table what, std::uint32_t to, std::uint32_t tag) {
        ranks.send(what.bytes(), rank_id{to}, tag, ranks.after(one_second)).value();
      };
      const auto receive = [&](std::uint32_t from, std::uint32_t tag) {
        table what(shape.tokens(), shape.width);
        ranks.recv(what.bytes(), rank_id{from}, tag, ranks.after(one_second)).value();
        return what;
      };
      for (const pipeline_task& task : order.tasks[self]) {
        const std::uint32_t micro = task.micro_batch;
        if (task.pass == pipeline_pass::forward) {
          const table x = self == 0 ? input_of(micro) : receive(self - 1, 2 * micro);
          auto& block = live.emplace(micro, parallel_block(ranks, make(), between::nothing)).first->second;
          const table y = block.forward(x);
          most = std::max(most, live.size());
          if (self + 1 < stages) send(y, self + 1, 2 * micro);
        } else {
          const table dy = self + 1 == stages ? expected.to_output : receive(self + 1, 2 * micro + 1);
          const table dx = live.at(micro).backward(dy);
          live.erase(micro);
          if (self != 0) {
            send(dx, self - 1, 2 * micro + 1);
            continue;
          }
          // By one rank: all stages, one behind the other. The same operations in the same order.
          std::vector<parallel_block> chain;
          table y = input_of(micro);
          for (std::uint32_t stage = 0; stage < stages; ++stage) {
            chain.emplace_back(ranks, make(), between::nothing);
            y = chain.back().forward(y);
          }
          table to = expected.to_output;
          for (std::uint32_t stage = stages; stage-- > 0;)
            to = chain[stage].backward(to);
          CHECK(to.values == dx.values);
        }
      }
      CHECK(most == std::min(stages - self, micro_batches));
      const std::uint64_t neighbours = self == 0 || self + 1 == stages ? 1 : 2;
      CHECK(sent_by(ranks) == neighbours * micro_batches * activation);
    });
  }
}
