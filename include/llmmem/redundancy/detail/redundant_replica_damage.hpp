/// @file
/// `redundant_replica`: what is damaged where it lies, so that nothing comes from there.
#pragma once

#include <llmmem/comm/errors.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/redundancy/redundant_replica.hpp>

#include <bit>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// As bits: one for the own blob, one each for the copies by rank, one each for the parities by codeword.
template <seated_transport T, seat_placement Place>
std::vector<std::uint32_t> redundant_replica<T, Place>::damage_in(const generation& held) const {
  std::vector<std::uint32_t> bits(damage_words(held.layout.world), 0);
  const auto note = [&](std::size_t place) { bits[place / 32] |= std::uint32_t{1} << place % 32; };
  if (!check_blob(held, held.self, held.own)) note(0);
  for (std::uint32_t rank = 0; rank < held.copies.size(); ++rank) {
    if (!held.copies[rank].empty() && !check_blob(held, rank_id{rank}, held.copies[rank])) note(1 + rank);
  }
  for (std::size_t codeword = 0; codeword < held.parities.size(); ++codeword) {
    const std::vector<std::byte>& parity = held.parities[codeword];
    if (!parity.empty() && crc32c(0, parity) != held.parity_sums[codeword])
      note(1 + held.layout.world + codeword);
  }
  return bits;
}

template <seated_transport T, seat_placement Place>
std::uint32_t redundant_replica<T, Place>::bits_in(std::span<const std::uint32_t> words) noexcept {
  std::uint32_t bits = 0;
  for (const std::uint32_t each : words)
    bits += static_cast<std::uint32_t>(std::popcount(each));
  return bits;
}

/// Of all ranks that hold the version: what each found damaged, with a checksum of that.
template <seated_transport T, seat_placement Place>
result<void> redundant_replica<T, Place>::learn_damage(found_version& of, std::vector<std::uint32_t> own,
                                                       deadline by) {
  const std::uint32_t then = of.about.layout.world;
  const std::size_t words = damage_words(then);
  own.resize(words, 0);
  own.push_back(crc32c(0, std::as_bytes(std::span(own))));
  std::vector<std::uint32_t> all((words + 1) * to_number(ranks_->world()), 0);
  const auto said_by = [&](rank_id rank) {
    return std::span(all).subspan(to_index(rank) * own.size(), own.size());
  };
  std::ranges::copy(own, said_by(ranks_->rank()).begin());
  const std::span<std::byte> bytes = std::as_writable_bytes(std::span(all));
  const auto blocks = even_blocks(bytes.size(), ranks_->world(),
                                  static_cast<std::uint32_t>(own.size() * sizeof(std::uint32_t)));
  if (auto done = all_gather(*ranks_, bytes, blocks, call(by)); !done) return done;
  for (std::uint32_t i = 0; i < then; ++i) {
    if (!of.change.now[i]) continue;
    const std::span<const std::uint32_t> said = said_by(*of.change.now[i]);
    const std::uint32_t sum = crc32c(0, std::as_bytes(said.first(words)));
    if (sum != said.back())
      return refuse(errc::message_damaged, to_index(*of.change.now[i]), said.back(), sum);
    const auto is_damaged = [&](std::size_t place) { return (said[place / 32] >> place % 32 & 1U) != 0; };
    if (is_damaged(0)) of.damaged.own.insert(rank_id{i});
    for (std::uint32_t what = 0; what < then; ++what) {
      if (is_damaged(1 + what)) of.damaged.copies.push_back({rank_id{i}, what});
      if (is_damaged(1 + then + what)) of.damaged.parities.push_back({rank_id{i}, what});
    }
  }
  return {};
}

}  // namespace v0
}  // namespace llmmem
