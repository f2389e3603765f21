#include <llmmem/comm/communicator.hpp>
#include <llmmem/comm/socket_endpoint.hpp>
#include <llmmem/comm/thread_network.hpp>
#include <llmmem/comm/wired_collectives.hpp>
#include <llmmem/testing/sim_network.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "support/seeds.hpp"
#include "support/sim_world.hpp"
#include "support/temporary_folder.hpp"
#include "support/wired_floats.hpp"

namespace {

using namespace llmmem;
using namespace llmmem::testing;
using llmmem_tests::in_world;
using ranks_of = llmmem_tests::sim_ranks;
using numbers = std::vector<std::uint64_t>;
using llmmem_tests::floats;
using llmmem_tests::floats_of;
using llmmem_tests::restored;
using llmmem_tests::sum_of;
constexpr std::uint64_t second = 1'000'000'000;

constexpr wire_format formats[] = {wire_format::plain, wire_format::bf16, wire_format::fp8, wire_format::int8,
                                   wire_format::int4};

wire_form random_wire(std::mt19937_64& random) {
  const wire_format format = formats[random() % 5];
  if (format == wire_format::plain || format == wire_format::bf16) return format;
  return {format, static_cast<std::uint32_t>(2 * (1 + random() % 70)),
          random() % 2 == 0 ? wire_scale::f32 : wire_scale::bf16};
}

numbers random_blocks(std::uint64_t elements, std::uint32_t world, std::mt19937_64& random) {
  numbers blocks{0};
  for (std::uint32_t i = 1; i < world; ++i)
    blocks.push_back(random() % (elements + 1));
  blocks.push_back(elements);
  std::sort(blocks.begin(), blocks.end());
  return blocks;
}

std::span<const float> block(const floats& of, const numbers& blocks, std::uint32_t rank) {
  return std::span(of).subspan(blocks[rank], blocks[rank + 1] - blocks[rank]);
}

floats gathered(const wire_form& wire, const floats& values, const numbers& blocks) {
  floats all;
  for (std::uint32_t rank = 0; rank + 1 < blocks.size(); ++rank) {
    const floats one = restored(wire, block(values, blocks, rank));
    all.insert(all.end(), one.begin(), one.end());
  }
  return all;
}

std::vector<floats> contributions(const numbers& blocks, std::uint32_t of, std::uint32_t first,
                                  std::uint32_t count, std::uint64_t seed) {
  std::vector<floats> parts;
  for (std::uint32_t rank = first; rank < first + count; ++rank) {
    const floats all = floats_of(blocks.back(), seed + rank);
    const auto part = block(all, blocks, of);
    parts.emplace_back(part.begin(), part.end());
  }
  return parts;
}

/// What the owner of a block gets of a sum in two hops.
floats two_hop_sum(const numbers& blocks, std::uint32_t of, std::uint32_t node, const hop_wires<>& wires,
                   std::uint64_t seed) {
  const auto world = static_cast<std::uint32_t>(blocks.size() - 1);
  if (world == 1) return contributions(blocks, of, 0, 1, seed)[0];
  if (node == 1) return sum_of(contributions(blocks, of, 0, world, seed), wires.between);
  std::vector<floats> nodes;
  for (std::uint32_t first = 0; first < world; first += node)
    nodes.push_back(sum_of(contributions(blocks, of, first, node, seed), wires.within));
  return nodes.size() == 1 ? nodes[0] : sum_of(nodes, wires.between);
}

bool equal_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](float x, float y) {
           return std::bit_cast<std::uint32_t>(x) == std::bit_cast<std::uint32_t>(y);
         });
}

/// The bytes that a rank has sent within its node and to others.
template <class Ranks>
wire_traffic sent_by(Ranks& ranks, std::uint32_t node) {
  wire_traffic sent;
  const std::uint32_t self = to_index(ranks.rank());
  for (std::uint32_t other = 0; other < to_number(ranks.world()); ++other) {
    const std::uint64_t bytes = ranks.traffic(ranks.seat_of(rank_id{other})).sent_bytes;
    (other / node == self / node ? sent.within : sent.between) += bytes;
  }
  return sent;
}

wire_traffic less(const wire_traffic& a, const wire_traffic& b) {
  return {a.within - b.within, a.between - b.between};
}

std::uint32_t random_divisor(std::uint32_t world, std::mt19937_64& random) {
  for (;;) {
    const auto node = static_cast<std::uint32_t>(1 + random() % world);
    if (world % node == 0) return node;
  }
}

}  // namespace

TEST_SUITE("wired_collectives") {
  TEST_CASE("a gather gives all ranks what the wire restores, in one hop, over the ring and in two hops") {
    for (const auto seed : llmmem_tests::seeds(40)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const auto world = static_cast<std::uint32_t>(1 + random() % 6);
      const std::uint32_t node = random_divisor(world, random);
      const numbers blocks = random_blocks(random() % 3000, world, random);
      const wire_form wire = random_wire(random);
      const auto segment = static_cast<std::uint32_t>(1 + random() % 2000);
      const floats values = floats_of(blocks.back(), seed);
      const floats expected = world == 1 ? values : gathered(wire, values, blocks);
      in_world(world, seed, [&](ranks_of& ranks, std::uint32_t self) {
        for (int way = 0; way < 3; ++way) {
          CAPTURE(way);
          collective_call call{.by = ranks.after(second), .segment_bytes = segment};
          if (way == 1) call.algorithm = reduce_algorithm::ring;
          floats mine(blocks.back(), -1.0F);
          const auto own = block(values, blocks, self);
          std::copy(own.begin(), own.end(), mine.begin() + static_cast<std::ptrdiff_t>(blocks[self]));
          const wire_traffic before = sent_by(ranks, node);
          if (way < 2) all_gather(ranks, std::span(mine), blocks, wire, call).value();
          if (way == 2) two_hop_all_gather(ranks, std::span(mine), blocks, node, wire, call).value();
          CHECK(equal_bits(mine, expected));
          const wire_traffic formula = way == 2
                                           ? two_hop_gather_traffic(blocks, wire, node, ranks.rank())
                                           : gather_traffic(blocks, wire, node, ranks.rank(), call.algorithm);
          CHECK(less(sent_by(ranks, node), before) == formula);
        }
      });
    }
  }

  TEST_CASE(
      "a sum has the bits of restored contributions added in order, for any segments, in one hop and two") {
    for (const auto seed : llmmem_tests::seeds(60)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const auto world = static_cast<std::uint32_t>(1 + random() % 6);
      const std::uint32_t node = random_divisor(world, random);
      const numbers blocks = random_blocks(random() % 2500, world, random);
      const hop_wires<> wires{random_wire(random), random_wire(random)};
      const auto segment = static_cast<std::uint32_t>(1 + random() % 3000);
      in_world(world, seed, [&](ranks_of& ranks, std::uint32_t self) {
        collective_call call{.by = ranks.after(second), .segment_bytes = segment};
        floats mine = floats_of(blocks.back(), seed + self);
        wire_traffic before = sent_by(ranks, node);
        reduce_scatter(ranks, std::span(mine), blocks, wires.within, call).value();
        const auto parts = contributions(blocks, self, 0, world, seed);
        CHECK(equal_bits(block(mine, blocks, self), world == 1 ? parts[0] : sum_of(parts, wires.within)));
        CHECK(less(sent_by(ranks, node), before) == reduce_traffic(blocks, wires.within, node, ranks.rank()));
        for (std::uint32_t other = 0; other < world; ++other) {
          if (other != self)
            CHECK(equal_bits(block(mine, blocks, other), contributions(blocks, other, self, 1, seed)[0]));
        }
        mine = floats_of(blocks.back(), seed + self);
        before = sent_by(ranks, node);
        two_hop_reduce_scatter(ranks, std::span(mine), blocks, node, wires, call).value();
        CHECK(equal_bits(block(mine, blocks, self), two_hop_sum(blocks, self, node, wires, seed)));
        CHECK(less(sent_by(ranks, node), before) ==
              two_hop_reduce_traffic(blocks, wires, node, ranks.rank()));
      });
    }
  }

  TEST_CASE("an all-reduce has the same bits on all ranks, flat and in the hierarchy") {
    for (const auto seed : llmmem_tests::seeds(40)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const auto world = static_cast<std::uint32_t>(1 + random() % 6);
      const std::uint32_t node = random_divisor(world, random);
      const std::uint64_t count = random() % 2000;
      const numbers blocks = even_blocks(count, rank_count{world});
      const hop_wires<> wires{random_wire(random), random_wire(random)};
      floats flat;
      floats in_nodes;
      for (std::uint32_t rank = 0; rank < world; ++rank) {
        const auto parts = contributions(blocks, rank, 0, world, seed);
        floats one = world == 1 ? parts[0] : restored(wires.within, sum_of(parts, wires.within));
        flat.insert(flat.end(), one.begin(), one.end());
        one = two_hop_sum(blocks, rank, node, wires, seed);
        if (world > 1) one = restored(wires.between, one);
        in_nodes.insert(in_nodes.end(), one.begin(), one.end());
      }
      in_world(world, seed, [&](ranks_of& ranks, std::uint32_t self) {
        collective_call call{.by = ranks.after(second), .segment_bytes = 700};
        floats mine = floats_of(count, seed + self);
        all_reduce(ranks, std::span(mine), wires.within, call).value();
        CHECK(equal_bits(mine, flat));
        mine = floats_of(count, seed + self);
        const wire_traffic before = sent_by(ranks, node);
        hierarchical_all_reduce(ranks, std::span(mine), node, wires, call).value();
        CHECK(equal_bits(mine, in_nodes));
        wire_traffic formula = two_hop_reduce_traffic(blocks, wires, node, ranks.rank());
        formula += two_hop_gather_traffic(blocks, wires.between, node, ranks.rank());
        CHECK(less(sent_by(ranks, node), before) == formula);
      });
    }
  }

  TEST_CASE("plain wires have the bits and bytes of the plain collectives") {
    for (std::uint32_t world = 1; world <= 5; ++world) {
      in_world(world, world, [&](ranks_of& ranks, std::uint32_t self) {
        collective_call call{.by = ranks.after(second), .segment_bytes = 1000, .small_bytes = 0};
        floats plain = floats_of(1777, self);
        floats wired = plain;
        const std::uint64_t start = sent_by(ranks, world).total();
        all_reduce(ranks, std::as_writable_bytes(std::span(plain)), sum_f32, call).value();
        const std::uint64_t between = sent_by(ranks, world).total();
        all_reduce(ranks, std::span(wired), wire_form(), call).value();
        CHECK(equal_bits(plain, wired));
        CHECK(sent_by(ranks, world).total() - between == between - start);
      });
    }
  }

  TEST_CASE("with error feedback nothing is lost: sums and what is kept back add up to all contributions") {
    // Integers, so that floats add them exactly; int4 loses most of them at first.
    constexpr std::uint32_t world = 4;
    constexpr std::size_t count = 512;
    for (const std::uint32_t node : {0U, 2U}) {
      std::vector<floats> lost(world, floats(count));
      floats received(count);
      std::vector<double> sent(count);
      std::mt19937_64 random(5);
      for (int step = 0; step < 12; ++step) {
        std::vector<floats> mine(world, floats(count));
        for (auto& rank : mine) {
          for (std::size_t i = 0; i < count; ++i) {
            rank[i] = static_cast<float>(static_cast<int>(random() % 2001) - 1000);
            sent[i] += static_cast<double>(rank[i]);
          }
        }
        in_world(world, 7, [&](ranks_of& ranks, std::uint32_t self) {
          const numbers blocks = even_blocks(count, ranks.world());
          collective_call call{.by = ranks.after(second)};
          const wire_form coarse(wire_format::int4, 32);
          if (node == 0) {
            reduce_scatter(ranks, std::span(mine[self]), blocks, coarse, call, lost[self]).value();
          } else {
            two_hop_reduce_scatter(ranks, std::span(mine[self]), blocks, node,
                                   hop_wires<>{coarse, wire_form()}, call, lost[self])
                .value();
          }
          for (std::uint64_t i = blocks[self]; i < blocks[self + 1]; ++i)
            received[i] += mine[self][i];
        });
      }
      for (std::size_t i = 0; i < count; ++i) {
        double kept = 0;
        for (const floats& each : lost)
          kept += static_cast<double>(each[i]);
        CHECK(std::fabs(static_cast<double>(received[i]) + kept - sent[i]) < 0.1);
        CHECK(std::fabs(kept) < 4 * 1200.0 / 14 + 1);
      }
    }
  }

  TEST_CASE("an overflow is in all sums of its group, and is not kept back") {
    in_world(3, 1, [&](ranks_of& ranks, std::uint32_t self) {
      floats mine(24, 1.0F);
      if (self == 1) mine[9] = std::numeric_limits<float>::infinity();
      floats lost(24);
      collective_call call{.by = ranks.after(second)};
      all_reduce(ranks, std::span(mine), wire_form(wire_format::int8, 4), call, lost).value();
      for (std::size_t i = 0; i < mine.size(); ++i)
        CHECK(std::isnan(mine[i]) == (i / 4 == 2));
      CHECK(lost == floats(24));
    });
  }

  TEST_CASE("ZeRO++ on two nodes of two ranks sends its formula over the link between nodes, to the byte") {
    // P weights of two bytes: M = 2 P bytes. int8 and int4 in groups of 256 that divide every block.
    constexpr std::uint64_t p = 16'384;
    constexpr std::uint64_t m = 2 * p;
    constexpr std::uint32_t node = 2;
    const wire_form int8(wire_format::int8, 256);
    const wire_form int4(wire_format::int4, 256);
    std::vector<wire_traffic> ring(4), once(4), backward(4), gradients(4), plain(4);
    in_world(4, 3, [&](ranks_of& ranks, std::uint32_t self) {
      const numbers blocks = even_blocks(p, ranks.world());
      collective_call call{.by = ranks.after(second)};
      floats weights = floats_of(p, 1);
      const auto count = [&](wire_traffic& into, const auto& work) {
        const wire_traffic before = sent_by(ranks, node);
        work().value();
        into = less(sent_by(ranks, node), before);
      };
      count(plain[self], [&] {
        return two_hop_all_gather(ranks, std::span(weights), blocks, node, wire_form(wire_format::bf16),
                                  call);
      });
      count(once[self],
            [&] { return two_hop_all_gather(ranks, std::span(weights), blocks, node, int8, call); });
      call.algorithm = reduce_algorithm::ring;
      count(ring[self], [&] { return all_gather(ranks, std::span(weights), blocks, int8, call); });
      call.algorithm = reduce_algorithm::direct;
      // hpZ: the ranks of a node hold all weights between them, as they came from the forward pass.
      const std::vector<rank_id> members{rank_id{self / node * node}, rank_id{self / node * node + 1}};
      rank_group<ranks_of> group(ranks, members);
      const floats forward = weights;
      count(backward[self],
            [&] { return all_gather(group, std::span(weights), even_blocks(p, group.world()), int8, call); });
      CHECK(equal_bits(weights, forward));
      count(gradients[self], [&] {
        return two_hop_reduce_scatter(ranks, std::span(weights), blocks, node, hop_wires<>{int4, int4}, call);
      });
    });
    // A node's bytes in one direction.
    const auto link = [](const std::vector<wire_traffic>& of) { return of[0].between + of[1].between; };
    const auto scales = [](std::uint64_t elements) { return elements / 256 * 4; };
    CHECK(link(plain) == m / 2);
    CHECK(link(ring) == m * 3 / 8 + scales(p * 3 / 4));  // 0.375 M
    CHECK(link(once) == m / 4 + scales(p / 2));          // 0.25 M
    CHECK(link(backward) == 0);
    CHECK(link(gradients) == m / 8 + scales(p / 2));  // 0.125 M
    CHECK(ring[2].between + ring[3].between == link(ring));
    CHECK(once[2].between + once[3].between == link(once));
    CHECK(gradients[2].between + gradients[3].between == link(gradients));
  }

  TEST_CASE("for many nodes the bytes of ZeRO++ tend to the published shares") {
    // 0.5 M for weights and 0.25 M for gradients of 3 M, each times (n - 1) / n on n nodes.
    for (const std::uint32_t nodes : {2U, 4U, 64U, 512U}) {
      const std::uint32_t node = 8;
      const std::uint64_t p = std::uint64_t{nodes} * node * 1024;
      const double m = 2.0 * static_cast<double>(p);
      const numbers blocks = even_blocks(p, rank_count{nodes * node});
      const wire_form int8(wire_format::int8, 1024);
      const wire_form int4(wire_format::int4, 1024);
      std::uint64_t weights = 0;
      std::uint64_t gradients = 0;
      for (std::uint32_t rank = 0; rank < node; ++rank) {
        weights += two_hop_gather_traffic(blocks, int8, node, rank_id{rank}).between;
        gradients += two_hop_reduce_traffic(blocks, hop_wires<>{int4, int4}, node, rank_id{rank}).between;
      }
      const double others = static_cast<double>(nodes - 1) / static_cast<double>(nodes);
      const double with_scale = 1 + 4.0 / 1024;
      CHECK(static_cast<double>(weights) == doctest::Approx(m / 2 * others * with_scale));
      CHECK(static_cast<double>(gradients) == doctest::Approx(m / 4 * others * (1 + 4.0 / 512)));
    }
  }

  TEST_CASE("regardless of which rank dies within a sum, no call waits, and those left can continue") {
    std::uint64_t failed = 0;
    for (const auto seed : llmmem_tests::seeds(60)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const std::uint32_t world = random() % 2 == 0 ? 4 : 6;
      sim_network net({.seats = world, .seed = seed, .lane_bytes = 4096});
      net.kill_in_call(seat_id{static_cast<std::uint32_t>(random() % world)}, 15 + random() % 150);
      const bool in_nodes = random() % 2 == 0;
      const wire_form wire = random_wire(random);
      net.run([&](sim_endpoint& end) {
        ranks_of ranks(end);
        ranks.join(ranks.after(second)).value();
        for (std::uint32_t round = 0; round < 4; ++round) {
          collective_call call{.by = ranks.after(1000 * second), .tag = round, .segment_bytes = 2048};
          floats data(9000, 1.0F);
          const std::uint32_t node = to_number(ranks.world()) % 2 == 0 ? 2 : 1;
          const result<void> done =
              in_nodes ? hierarchical_all_reduce(ranks, std::span(data), node, hop_wires<>{wire, wire}, call)
                       : all_reduce(ranks, std::span(data), wire, call);
          if (!done) {
            ++failed;
            CHECK((done.code() == errc::peer_failed || done.code() == errc::epoch_revoked));
          } else if (wire.is_plain()) {
            CHECK(data == floats(9000, static_cast<float>(to_number(ranks.world()))));
          }
          const comm::agreed outcome = ranks.agree(done ? 1 : 0, ranks.after(1000 * second)).value();
          if (outcome.bits == 0 || !outcome.failed.empty()) ranks.shrink(outcome);
        }
        CHECK(end.now_ns() < second);
      });
    }
    CHECK(failed > 25);
  }

  TEST_CASE("sums over threads and over sockets have the bits of the simulated network") {
    constexpr std::uint32_t world = 4;
    const hop_wires<> wires{wire_form(wire_format::int4, 64), wire_form(wire_format::int8, 64)};
    std::vector<floats> seen;
    in_world(world, 1, [&](ranks_of& ranks, std::uint32_t self) {
      floats mine = floats_of(5000, self);
      collective_call call{.by = ranks.after(second)};
      hierarchical_all_reduce(ranks, std::span(mine), 2, wires, call).value();
      if (self == 0) seen.push_back(mine);
    });
    std::vector<floats> found(2 * world);
    const auto live = [&](auto& end, std::uint32_t self, floats& into) {
      communicator ranks(end);
      ranks.join(ranks.after(30 * second)).value();
      into = floats_of(5000, self);
      collective_call call{.by = ranks.after(30 * second), .segment_bytes = 1000};
      hierarchical_all_reduce(ranks, std::span(into), 2, wires, call).value();
      ranks.agree(0, ranks.after(30 * second)).value();
    };
    const llmmem_tests::temporary_folder folder;
    thread_network net(world);
    std::vector<std::thread> threads;
    for (std::uint32_t self = 0; self < world; ++self) {
      threads.emplace_back([&, self] {
        thread_endpoint end(net, seat_id{self});
        live(end, self, found[self]);
      });
      threads.emplace_back([&, self] {
        socket_endpoint end({.seat = seat_id{self}, .seats = world, .folder = folder.path()});
        live(end, self, found[world + self]);
      });
    }
    for (std::thread& each : threads)
      each.join();
    for (const floats& each : found)
      CHECK(equal_bits(each, seen.at(0)));
  }

  TEST_CASE("two hops take groups of any two lengths, also of 2^32 - 1 elements") {
    const numbers blocks = even_blocks(4001, rank_count{4});
    // A step per group until both lengths meet would be 2^32 steps; a piece is at most a block.
    const hop_wires<> wires{wire_form(wire_format::int8, ~0U), wire_form(wire_format::int8, ~0U - 2)};
    const wired_sum<wire_form> sum(blocks, wires, 2, 256);
    CHECK(sum.scratch_bytes() == 4 * 4 * 1001 + 3 * (1001 + 4));
    CHECK(llmmem::detail::common_divisor(12, 18) == 6);
    CHECK(llmmem::detail::common_divisor(~0U, ~0U - 2) == 1);
    // 6 and 4 elements: pieces of 12, of which a message of 64 bytes has one.
    const hop_wires<> short_ones{wire_form(wire_format::int8, 6), wire_form(wire_format::int8, 4)};
    CHECK(wired_sum<wire_form>(blocks, short_ones, 2, 64).scratch_bytes() == 4 * 4 * 12 + 3 * (12 + 3 * 4));
  }

  TEST_CASE("mismatched sizes are refused before any rank sends, and revoke nothing") {
    in_world(2, 1, [&](ranks_of& ranks, std::uint32_t) {
      collective_call call{.by = ranks.after(second)};
      floats data(10);
      floats lost(9);
      const wire_form wire(wire_format::int8);
      const std::span<float> all(data);
      const auto misfit = [](std::uint64_t wanted, std::uint64_t found) {
        return failure{errc::size_mismatch, 0, wanted, found};
      };
      CHECK(all_gather(ranks, all, numbers{0, 5}, wire, call).error() == misfit(3, 2));
      CHECK(reduce_scatter(ranks, all, numbers{0, 5, 11}, wire, call).error() == misfit(10, 11));
      CHECK(reduce_scatter(ranks, all, numbers{0, 5, 10}, wire, call, lost).error() == misfit(10, 9));
      CHECK(all_reduce(ranks, all, wire, call, lost).error() == misfit(10, 9));
      for (const std::uint32_t node : {0U, 3U}) {
        CHECK(two_hop_all_gather(ranks, all, numbers{0, 5, 10}, node, wire, call).error() == misfit(2, node));
        CHECK(two_hop_all_gather(ranks, std::as_writable_bytes(all), numbers{0, 5, 40}, node, call).error() ==
              misfit(2, node));
        CHECK(hierarchical_all_reduce(ranks, all, node, hop_wires<>{wire, wire}, call).error() ==
              misfit(2, node));
      }
      CHECK_FALSE(ranks.is_revoked());
    });
  }
}
