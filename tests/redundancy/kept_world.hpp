/// @file
/// Versions that ranks hold, by definition rather than by messages.
#pragma once

#include <llmmem/hash/crc32c.hpp>
#include <llmmem/redundancy/detail/kept_version.hpp>
#include <llmmem/redundancy/gf256.hpp>
#include <llmmem/redundancy/part_ownership.hpp>
#include <llmmem/redundancy/rebuild_plan.hpp>
#include <llmmem/redundancy/replica_map.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "support/comm_job.hpp"

namespace llmmem_tests {

/// A part's bytes in a version.
inline std::vector<std::byte> part_in(std::uint64_t version, std::uint32_t part, std::uint64_t bytes) {
  return bytes_of_seed(bytes, version * 1000 + part + 1);
}

/// All parts of a rank in a version, one behind the other.
inline std::vector<std::byte> blob_in(const llmmem::detail::version_facts& facts, llmmem::rank_id rank) {
  std::vector<std::byte> blob;
  for (std::uint32_t i = 0; i < facts.layout.owners.size(); ++i) {
    if (facts.layout.owners[i] != rank) continue;
    const std::vector<std::byte> part = part_in(facts.version, i, facts.layout.part_bytes[i]);
    blob.insert(blob.end(), part.begin(), part.end());
  }
  return blob;
}

/// The parity that a member of a group keeps of a codeword, byte by byte; nothing where it keeps none.
inline std::vector<std::byte> parity_in(const llmmem::detail::version_facts& facts,
                                        const llmmem::replica_map& map, llmmem::rank_id rank,
                                        std::uint32_t codeword) {
  using namespace llmmem;
  const std::vector<rank_id>& group = map.groups()[map.group_of(rank)];
  const coded_group code = map.layout(map.group_of(rank));
  const piece_id piece = code.piece_of(map.member_of(rank), codeword);
  std::vector<std::byte> parity;
  if (to_index(piece) < code.shape().data) return parity;
  for (std::uint32_t data = 0; data < code.shape().data; ++data) {
    const std::uint32_t of = code.member_of(piece_id{data}, codeword);
    const std::vector<std::byte> blob = blob_in(facts, group[of]);
    const llmmem::redundancy::byte_range range =
        stripe_of(blob.size(), code.shape().data, code.stripe_in(of, codeword));
    parity.resize(std::max<std::size_t>(parity.size(), range.count));
    const std::uint8_t times = map.scheme().kind() == redundancy_kind::parity
                                   ? std::uint8_t{1}
                                   : code_coefficient(code.shape(), piece, piece_id{data});
    for (std::uint64_t k = 0; k < range.count; ++k)
      parity[k] ^= static_cast<std::byte>(
          gf256_multiply(times, static_cast<std::uint8_t>(blob[static_cast<std::size_t>(range.first + k)])));
  }
  return parity;
}

/// A version as a rank holds it when it has been kept by that map.
inline llmmem::detail::kept_version kept_by(const llmmem::detail::version_facts& facts, llmmem::rank_id rank,
                                            const std::optional<llmmem::replica_map>& map) {
  using namespace llmmem;
  detail::kept_version held;
  held.begin(facts, rank);
  for (std::uint32_t i = 0; i < facts.layout.owners.size(); ++i) {
    const std::vector<std::byte> part = part_in(facts.version, i, facts.layout.part_bytes[i]);
    if (facts.layout.owners[i] == rank) held.add_own(part_id{i}, part);
    held.set_sum(part_id{i}, crc32c(0, part));
  }
  if (map && !map->scheme().is_coded()) {
    for (const rank_id of : map->kept_by(rank))
      held.add_to_copy(of, blob_in(facts, of));
  }
  if (map && map->scheme().is_coded()) {
    const std::uint32_t codewords = map->layout(map->group_of(rank)).codewords();
    held.begin_parities(codewords);
    for (std::uint32_t codeword = 0; codeword < codewords; ++codeword) {
      const std::vector<std::byte> parity = parity_in(facts, *map, rank, codeword);
      held.make_parity(codeword, parity.size());
      held.add_to_parity(codeword, parity, 1);
    }
  }
  held.seal();
  return held;
}

/// A version that all ranks of a world keep, each in the seat of its number.
inline llmmem::detail::version_facts some_facts(std::uint64_t epoch, std::uint64_t version,
                                                std::vector<std::uint64_t> sizes,
                                                std::vector<llmmem::rank_id> owners, std::uint32_t world) {
  llmmem::detail::version_facts facts;
  facts.version = version;
  facts.epoch = epoch;
  for (std::uint32_t i = 0; i < world; ++i)
    facts.seats.push_back(llmmem::seat_id{i});
  for (std::uint32_t i = 0; i < sizes.size(); ++i)
    facts.sums.push_back(llmmem::crc32c(0, part_in(version, i, sizes[i])));
  facts.layout = {.part_bytes = std::move(sizes), .owners = std::move(owners), .world = world};
  return facts;
}

}  // namespace llmmem_tests
