/// @file
/// Bodies of sharded_state.hpp: from one partition to another, and messages between two ranks at a time.
/// Included by it alone.
#pragma once

#include <llmmem/sharding/live_reshard.hpp>
#include <llmmem/sharding/sharded_state.hpp>

#include <cstring>
#include <vector>

namespace llmmem {
inline namespace v0 {

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
template <partition To, memory_space S, piece_store M>
result<void> sharded_state<Partition, Transport, Space, Pieces>::reshard_to(
    sharded_state<To, Transport, S, M>& next) const {
  const std::uint32_t old_world = to_number(layout_.world());
  const std::uint32_t new_world = to_number(next.layout_.world());
  const std::uint32_t world = old_world > new_world ? old_world : new_world;
  if (old_world > to_number(next.ranks_->world())) {
    throw argument_error(options_.name + ": resharding from " + std::to_string(old_world) +
                         " ranks over a transport of " + std::to_string(to_number(next.ranks_->world())) +
                         "; every rank that holds elements must be in the transport");
  }
  static_assert(
      S::is_host_accessible == Space::is_host_accessible,
      "a reshard copies between pieces of one kind: the host can access those of both states, or of "
      "neither");
  const live_reshard plan = reshard(facts_, layout_, next.layout_);
  for (std::uint32_t t = 0; t < facts_.size(); ++t) {
    if (facts_[t].element_bytes == next.facts_[t].element_bytes) continue;
    throw argument_error(options_.name + ": tensor '" + facts_[t].name + "' has elements of " +
                         std::to_string(facts_[t].element_bytes) + " bytes here and of " +
                         std::to_string(next.facts_[t].element_bytes) + " there; convert it before");
  }
  const std::uint32_t self = to_index(next.rank());
  if (self >= world) return {};
  ++next.stats_.reshards.calls;
  const auto holder = [&](const reshard_copy& copy) {
    return to_index(plan.stored[to_index(copy.source)].holder);
  };
  const auto taker = [&](const reshard_copy& copy) {
    return to_index(plan.wanted[to_index(copy.destination)].rank);
  };
  const auto from = [&](const reshard_copy& copy, std::uint64_t element) {
    return address(copy.tensor) + element * facts_[to_index(copy.tensor)].element_bytes;
  };
  const auto to = [&](const reshard_copy& copy, std::uint64_t element) {
    return next.address(copy.tensor) + element * facts_[to_index(copy.tensor)].element_bytes;
  };
  std::vector<tensor_id> scope;
  const auto is_in_scope = [&](const reshard_copy& copy) {
    return scope.size() != 1 || scope.front() == copy.tensor;
  };
  const auto fill_out = [&](std::uint32_t other) {
    for (const reshard_copy& copy : plan.moves.copies) {
      if (!is_in_scope(copy) || holder(copy) != self || taker(copy) != other) continue;
      copy.each_run([&](std::uint64_t source, std::uint64_t, std::uint64_t count) {
        next.out_.add(from(copy, source), count * facts_[to_index(copy.tensor)].element_bytes);
      });
    }
  };
  const auto fill_in = [&](std::uint32_t other) {
    for (const reshard_copy& copy : plan.moves.copies) {
      if (!is_in_scope(copy) || holder(copy) != other || taker(copy) != self) continue;
      copy.each_run([&](std::uint64_t, std::uint64_t destination, std::uint64_t count) {
        next.in_.add(to(copy, destination), count * facts_[to_index(copy.tensor)].element_bytes);
      });
    }
  };
  const auto move_scope = [&]() -> result<void> {
    const auto mine = begin(scope, access_mode::read);
    if (!mine) return mine.error();
    // The copies are in the order of the other space's stream, which does not wait for this one's.
    if (auto written = detail::state_bytes<Space>(*space_).finish(); !written) {
      next.ranks_->revoke();
      return written;
    }
    const auto theirs = next.begin(scope, access_mode::write);
    if (!theirs) return theirs.error();
    const detail::finished_work before_pieces_go(next.bytes_);
    for (const reshard_copy& copy : plan.kept) {
      if (!is_in_scope(copy) || holder(copy) != self) continue;
      copy.each_run([&](std::uint64_t source, std::uint64_t destination, std::uint64_t count) {
        next.bytes_.copy(to(copy, destination), from(copy, source),
                         count * facts_[to_index(copy.tensor)].element_bytes);
      });
    }
    if (auto copied = next.bytes_.run(); !copied) {
      next.ranks_->revoke();
      return next.end(copied);
    }
    return next.trade(*next.ranks_, world, next.stats_.reshards, fill_out, fill_in);
  };
  for (std::uint32_t t = 0; t < facts_.size(); ++t) {
    scope.push_back(tensor_id{t});
    if (Pieces::is_resident && t + 1 < facts_.size()) continue;
    if (auto done = move_scope(); !done) return done;
    scope.clear();
  }
  return {};
}

// Messages

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
template <class Ranks, class FillOut, class FillIn>
result<void> sharded_state<Partition, Transport, Space, Pieces>::trade(Ranks& ranks, std::uint32_t world,
                                                                       moved_bytes& counted,
                                                                       const FillOut& fill_out,
                                                                       const FillIn& fill_in) {
  const std::uint32_t self = to_index(ranks.rank());
  const deadline by = ranks.after(options_.patience_ns);
  const detail::finished_work before_memory_goes(bytes_);
  // The n-th message of distance d is the same for sender and receiver: no ranks wait in a circle.
  for (std::uint32_t d = 1; d < world; ++d) {
    const std::uint32_t to = (self + d) % world;
    const std::uint32_t from = (self + world - d) % world;
    out_.clear();
    fill_out(to);
    in_.clear();
    fill_in(from);
    const std::uint64_t most = out_.bytes() > in_.bytes() ? out_.bytes() : in_.bytes();
    for (std::uint64_t at = 0; at < most; at += options_.segment_bytes) {
      if (auto done = trade_window(ranks, at, to, from, by, counted); !done) return end(done);
    }
  }
  return end({});
}

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
template <class Ranks>
result<void> sharded_state<Partition, Transport, Space, Pieces>::trade_window(Ranks& ranks, std::uint64_t at,
                                                                              std::uint32_t to,
                                                                              std::uint32_t from, deadline by,
                                                                              moved_bytes& counted) {
  const std::uint64_t sent = out_.left(at, options_.segment_bytes);
  const std::uint64_t received = in_.left(at, options_.segment_bytes);
  std::byte* comes = received == 0 ? nullptr : in_.together(at, received);
  const bool is_unpacked = comes == nullptr && received != 0;
  const auto goes = sent == 0 ? result<std::byte*>(nullptr)
                              : pack(out_, at, sent, out_stage_, out_.left(0, options_.segment_bytes));
  if (!goes) return goes.error();
  if (is_unpacked) {
    const auto packed = stage(in_stage_, in_.left(0, options_.segment_bytes));
    if (!packed) return packed.error();
    comes = *packed;
  }
  if (auto done = swap(ranks, {*goes, sent}, to, {comes, received}, from, by, counted); !done) return done;
  if (!is_unpacked) return {};
  auto unpacked = unpack(in_, comes, at, received);
  if (!unpacked) ranks.revoke();
  return unpacked;
}

/// Returns bytes of a stream where they are, if they are contiguous; otherwise a copy of them in `room`.
template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
result<std::byte*> sharded_state<Partition, Transport, Space, Pieces>::pack(
    const detail::scattered_bytes& from, std::uint64_t at, std::uint64_t bytes,
    detail::held_range<Space>& room, std::uint64_t most) {
  if (std::byte* const together = from.together(at, bytes); together != nullptr) return together;
  const auto packed = stage(room, most);
  if (!packed) return packed.error();
  std::byte* to = *packed;
  from.each_part(at, bytes, [&](std::byte* part, std::uint64_t count) {
    bytes_.copy(to, part, count);
    to += count;
  });
  if (auto copied = bytes_.run(); !copied) {
    ranks_->revoke();
    return copied.error();
  }
  return *packed;
}

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
result<void> sharded_state<Partition, Transport, Space, Pieces>::unpack(const detail::scattered_bytes& to,
                                                                        const std::byte* from,
                                                                        std::uint64_t at,
                                                                        std::uint64_t bytes) {
  to.each_part(at, bytes, [&](std::byte* part, std::uint64_t count) {
    bytes_.copy(part, from, count);
    from += count;
  });
  return bytes_.run();
}

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
template <class Ranks>
result<void> sharded_state<Partition, Transport, Space, Pieces>::swap(
    Ranks& ranks, std::span<const std::byte> out, std::uint32_t to, std::span<std::byte> into,
    std::uint32_t from, deadline by, moved_bytes& counted) {
  if (out.empty() && into.empty()) return {};
  result<void> done = bytes_.precede(ranks);
  if (done && into.empty()) {
    done = ranks.send(out, rank_id{to}, options_.tag, by);
  } else if (done && out.empty()) {
    done = ranks.recv(into, rank_id{from}, options_.tag, by);
  } else if (done) {
    done = ranks.exchange(out, rank_id{to}, into, rank_id{from}, options_.tag, by);
  }
  if (!done) {
    ranks.revoke();
    return done;
  }
  counted.sent += out.size();
  counted.received += into.size();
  return done;
}

/// Takes memory of the space for the length of an operation; a rank without space ends the operation for all.
template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
result<std::byte*> sharded_state<Partition, Transport, Space, Pieces>::stage(detail::held_range<Space>& room,
                                                                             std::uint64_t bytes) {
  if (room.bytes() >= bytes) return room.data();
  result<void> had;
  if (room.bytes() != 0) had = bytes_.finish();  // work may still use the earlier range
  if (had) had = room.take(*space_, bytes, options_.alignment);
  if (!had) {
    ranks_->revoke();
    return had.error();
  }
  const std::uint64_t now = out_stage_.bytes() + in_stage_.bytes() + own_stage_.bytes();
  if (now > stats_.peak_stage_bytes) stats_.peak_stage_bytes = now;
  return room.data();
}

/// Ends an operation: waits for its work, then frees its memory. Returns the operation's outcome, or else
/// that of the wait.
template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
result<void> sharded_state<Partition, Transport, Space, Pieces>::end(result<void> done) noexcept {
  const auto finished = bytes_.finish();
  // Work of a lost device may not have ended: the next operation, or the end of the state, frees its memory.
  if (!finished) {
    ranks_->revoke();
    return done ? finished : done;
  }
  out_stage_.reset();
  in_stage_.reset();
  own_stage_.reset();
  return done;
}

}  // namespace v0
}  // namespace llmmem
