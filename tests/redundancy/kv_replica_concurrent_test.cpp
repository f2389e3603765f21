// Keys and values of sequences, kept on other ranks: when one dies, another goes on with its sequences.
#include <llmmem/comm/communicator.hpp>
#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/kv_transfer.hpp>
#include <llmmem/redundant_replica.hpp>
#include <llmmem/testing/sim_network.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "support/kv_side.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using llmmem::testing::sim_endpoint;
using llmmem::testing::sim_network;
using llmmem_tests::seeds;
using llmmem_tests::side;
using llmmem_tests::wire;

namespace {

constexpr std::uint64_t second = 1'000'000'000;
constexpr std::uint64_t last_version = 12;
constexpr kv_layout shape{.layers = 2, .heads = 2, .head_dim = 3, .block_tokens = 4, .model = 5};

/// What the sequence at home in a seat has said by a version: two to four tokens more with each.
std::vector<token_id> said(std::uint32_t home, std::uint64_t version) {
  std::vector<token_id> all;
  for (std::uint64_t v = 1; v <= version; ++v) {
    for (std::uint64_t i = 0; i < 2 + (home + v) % 3; ++i)
      all.push_back(static_cast<token_id>(1000 * (home + 1) + 10 * v + i));
  }
  return all;
}

/// Of a part: the length of the stream, then the stream of `export_sequence`, then nothing.
constexpr std::uint64_t part_bytes_most = 32'768;

/// A rank that serves sequences, its own and those that it adopted.
class server {
 public:
  [[nodiscard]] std::vector<std::byte> exported(part_id part) {
    wire out;
    const sequence_id sequence = sequences_.at(part);
    const auto tokens = said(to_index(part), version_);
    export_sequence(of_.cache, sequence, tokens, {}, of_.memory(), out.sink()).value();
    std::vector<std::byte> bytes(part_bytes_most);
    const std::uint64_t length = out.bytes.size();
    REQUIRE(length + sizeof length <= bytes.size());
    std::memcpy(bytes.data(), &length, sizeof length);
    std::memcpy(bytes.data() + sizeof length, out.bytes.data(), length);
    return bytes;
  }
  void import(part_id part, std::span<const std::byte> bytes) {
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data(), sizeof length);
    wire in;
    in.bytes.assign(bytes.begin() + sizeof length,
                    bytes.begin() + static_cast<std::ptrdiff_t>(sizeof length + length));
    const imported_sequence got = import_sequence(of_.cache, of_.memory(), in.source()).value();
    CHECK(got.tokens == said(to_index(part), version_).size());
    sequences_[part] = got.sequence;
  }
  /// Forgets what is newer than what all agreed on, and what it served for others.
  void begin(std::uint64_t version) {
    for (const auto& [part, sequence] : sequences_)
      of_.cache.release(sequence).value();
    sequences_.clear();
    version_ = version;
  }
  void create(part_id part) { sequences_[part] = of_.cache.create().value(); }
  /// The tokens of one version more, with their keys and values.
  void decode() {
    for (const auto& [part, sequence] : sequences_) {
      const auto before = said(to_index(part), version_);
      const auto after = said(to_index(part), version_ + 1);
      of_.cache.append(sequence, std::span(after).subspan(before.size())).value();
      of_.each_byte(sequence, after, [](std::byte& at, std::byte value) { at = value; });
      of_.cache.commit(sequence).value();
    }
    ++version_;
  }
  [[nodiscard]] bool holds(part_id part) {
    return of_.holds(sequences_.at(part), said(to_index(part), version_));
  }
  [[nodiscard]] std::uint64_t version() const { return version_; }

 private:
  side<> of_{{.blocks = 60, .block_tokens = 4}, shape};
  std::map<part_id, sequence_id> sequences_{};
  std::uint64_t version_ = 0;
};

struct served {
  std::map<part_id, std::uint32_t> by{};  // who had it at the end
  std::uint64_t adopted = 0;              // sequences that were gone on with elsewhere
};

void serve(sim_endpoint& end, const redundancy_scheme& scheme, std::uint32_t seats, served& record) {
  communicator ranks(end);
  if (!ranks.join(ranks.after(60 * second))) return;
  std::vector<std::uint64_t> sizes(seats, part_bytes_most);
  std::vector<seat_id> homes;
  for (std::uint32_t i = 0; i < seats; ++i)
    homes.push_back(seat_id{i});
  redundant_replica replica(ranks, scheme, sizes, homes);
  server mine;
  for (bool is_settled = false;;) {
    bool well = true;
    if (!is_settled) {
      const auto found = replica.recover(ranks.after(60 * second));
      REQUIRE((found || found.code() != errc::state_lost));
      well = found.has_value();
      if (well) {
        mine.begin(found->version);
        for (const part_id part : replica.own_parts()) {
          if (found->is_recovered) mine.import(part, replica.recovered(part));
          if (!found->is_recovered) mine.create(part);
          if (found->is_recovered && to_index(part) != to_index(end.self())) ++record.adopted;
        }
      }
    }
    if (well) {
      mine.decode();
      std::vector<std::vector<std::byte>> bytes;
      std::vector<part_bytes> parts;
      for (const part_id part : replica.own_parts())
        bytes.push_back(mine.exported(part));
      for (std::size_t i = 0; i < bytes.size(); ++i)
        parts.push_back({replica.own_parts()[i], bytes[i]});
      well = replica.keep(mine.version(), parts, ranks.after(60 * second)).has_value();
    }
    if (!well) ranks.revoke();
    const auto outcome = ranks.agree(well ? 1 : 0, ranks.after(60 * second));
    if (!outcome) return;
    if (outcome->bits == 1) replica.commit();
    if (outcome->bits != 1) replica.drop();
    if (outcome->bits == 1 && mine.version() == last_version) break;
    is_settled = outcome->bits == 1 && outcome->failed.empty() && outcome->joining.empty();
    if (!is_settled) ranks.admit(*outcome);
  }
  for (const part_id part : replica.own_parts()) {
    CHECK(mine.holds(part));
    record.by[part] = to_index(end.self());
  }
}

}  // namespace

TEST_SUITE("kv_replica") {
  TEST_CASE(
      "regardless of which rank dies, each sequence continues somewhere, with every byte of its keys and "
      "values") {
    std::uint64_t adopted = 0;
    for (const std::string scheme : {"mirror:2", "parity:2", "rs:2+2"}) {
      for (const auto seed : seeds(12)) {
        CAPTURE(scheme);
        CAPTURE(seed);
        std::mt19937_64 random(seed);
        const redundancy_scheme redundancy = redundancy_scheme::parse(scheme);
        const std::uint32_t seats = redundancy.group_ranks() + static_cast<std::uint32_t>(random() % 2);
        sim_network net({.seats = seats, .seed = seed, .frame_bytes = 1 << 16, .lane_bytes = 1 << 17});
        const auto victim = static_cast<std::uint32_t>(random() % seats);
        net.kill_in_call(seat_id{victim}, 30 + random() % 300);
        if (random() % 2 == 0) net.restart_after(seat_id{victim}, random() % 10'000'000);
        served record;
        net.run([&](sim_endpoint& end) { serve(end, redundancy, seats, record); });
        // A rank may die after the last step, with what it served: all others must have theirs.
        for (std::uint32_t part = 0; part < seats; ++part) {
          if (part != victim) CHECK(record.by.contains(part_id{part}));
        }
        adopted += record.adopted;
      }
    }
    CHECK(adopted > 8);
  }
}
