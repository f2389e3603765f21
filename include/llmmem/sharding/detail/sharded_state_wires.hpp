/// @file
/// Bodies of sharded_state.hpp: gathers and sums whose messages have another form. Included by it alone.
#pragma once

#include <llmmem/comm/collectives.hpp>
#include <llmmem/comm/wired_sums.hpp>
#include <llmmem/sharding/sharded_state.hpp>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Ranks whose messages are counted. A `transport`.
template <class Ranks>
class counted_ranks {
 public:
  counted_ranks(Ranks& ranks, moved_bytes& counted) noexcept : ranks_(&ranks), counted_(&counted) {}

  [[nodiscard]] rank_id rank() const noexcept { return ranks_->rank(); }
  [[nodiscard]] rank_count world() const noexcept { return ranks_->world(); }
  [[nodiscard]] deadline after(std::uint64_t ns) const noexcept { return ranks_->after(ns); }
  result<void> send(std::span<const std::byte> bytes, rank_id to, std::uint32_t tag, deadline by) {
    return count(ranks_->send(bytes, to, tag, by), bytes.size(), 0);
  }
  result<void> recv(std::span<std::byte> bytes, rank_id from, std::uint32_t tag, deadline by) {
    return count(ranks_->recv(bytes, from, tag, by), 0, bytes.size());
  }
  result<void> exchange(std::span<const std::byte> out, rank_id to, std::span<std::byte> into, rank_id from,
                        std::uint32_t tag, deadline by) {
    return count(ranks_->exchange(out, to, into, from, tag, by), out.size(), into.size());
  }
  void revoke() noexcept { ranks_->revoke(); }

 private:
  result<void> count(const result<void>& done, std::uint64_t sent, std::uint64_t received) noexcept {
    if (!done) return done;
    counted_->sent += sent;
    counted_->received += received;
    return done;
  }

  Ranks* ranks_;
  moved_bytes* counted_;
};

/// Returns floats of a stream: in place if they are contiguous and aligned, otherwise in `room`.
[[nodiscard]] inline float* floats_in_place(const scattered_bytes& stream, std::uint64_t at,
                                            std::uint64_t count) noexcept {
  std::byte* const together = stream.together(4 * at, 4 * count);
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(together) % alignof(float) == 0;
  return is_aligned ? reinterpret_cast<float*>(together) : nullptr;
}

/// A rank's contribution to a sum of several tensors, the sum in its pieces, and what the wire lost.
/// `Fill(rank, bytes, residuals)` describes the part that a rank owns, and the residuals of the same
/// elements.
template <class Fill>
class scattered_ends {
 public:
  scattered_ends(const Fill& fill, const scattered_bytes& into, bool keeps_errors) noexcept
      : fill_(&fill), into_(&into), keeps_errors_(keeps_errors) {}

  [[nodiscard]] const float* values(std::uint32_t rank, std::uint64_t at, std::span<float> room) {
    if (rank != rank_) {
      part_.clear();
      lost_.clear();
      (*fill_)(rank, part_, lost_);
      rank_ = rank;
    }
    const float* const found = floats_in_place(part_, at, room.size());
    if (found != nullptr && !keeps_errors_) return found;
    part_.copy_to(reinterpret_cast<std::byte*>(room.data()), 4 * at, 4 * room.size());
    if (!keeps_errors_) return room.data();
    each_lost(at, room.size(), [&](std::size_t i, float* lost) { room[i] += *lost; });
    return room.data();
  }
  [[nodiscard]] bool keeps_errors() const noexcept { return keeps_errors_; }
  /// @pre `values` was called for the same rank before.
  void keep_error(std::uint32_t /*rank*/, std::uint64_t at, const float* values,
                  std::span<const float> restored) const noexcept {
    each_lost(at, restored.size(),
              [&](std::size_t i, float* lost) { *lost = lost_of(values[i], restored[i]); });
  }
  void sum(std::uint64_t at, std::span<const float> values) const noexcept {
    into_->copy_from(reinterpret_cast<const std::byte*>(values.data()), 4 * at, values.size_bytes());
  }

 private:
  /// Residuals are in memory of this state, aligned to floats.
  template <class Visit>
  void each_lost(std::uint64_t at, std::size_t count, const Visit& visit) const noexcept {
    if (float* const together = floats_in_place(lost_, at, count); together != nullptr) {
      for (std::size_t i = 0; i < count; ++i)
        visit(i, together + i);
      return;
    }
    for (std::size_t i = 0; i < count; ++i)
      visit(i, floats_in_place(lost_, at + i, 1));
  }

  const Fill* fill_;
  const scattered_bytes* into_;
  bool keeps_errors_;
  std::uint32_t rank_ = ~std::uint32_t{0};
  scattered_bytes part_{};
  scattered_bytes lost_{};
};

}  // namespace detail

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
void sharded_state<Partition, Transport, Space, Pieces>::take_wires() {
  const sharded_wires& wires = options_.wires;
  if (wires.is_plain()) return;
  if constexpr (!Space::is_host_accessible) {
    throw argument_error(options_.name +
                         ": wires encode and decode on the host, which cannot access this space; use plain "
                         "wires, the default");
  } else {
    take_host_wires();
  }
}

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
void sharded_state<Partition, Transport, Space, Pieces>::take_host_wires() {
  const sharded_wires& wires = options_.wires;
  check_wires(wires, to_number(layout_.world()), options_.name);
  if (layout_.world() != ranks_->world()) {
    throw argument_error(options_.name + ": wires for a partition of " +
                         std::to_string(to_number(layout_.world())) + " ranks over a transport of " +
                         std::to_string(to_number(ranks_->world())) +
                         "; give it a rank_group of the partition's ranks");
  }
  std::uint64_t bytes = 0;
  for (const tensor_facts& each : facts_) {
    if (each.element_bytes != 4) {
      throw argument_error(options_.name + ": wires for tensor '" + each.name + "' with elements of " +
                           std::to_string(each.element_bytes) + " bytes; they carry floats only");
    }
    residual_of_.push_back(bytes);
    if (wires.keeps_errors) bytes = checked_add(bytes, each.bytes(), options_.name.c_str());
  }
  if (!wires.keeps_errors || to_number(layout_.world()) == 1) return;
  residuals_.take(*space_, bytes, options_.alignment).value();
  if (bytes != 0) std::memset(residuals_.data(), 0, bytes);
  stats_.residual_bytes = bytes;
}

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
template <class From, class Has>
bool sharded_state<Partition, Transport, Space, Pieces>::is_split(std::uint32_t world,
                                                                  std::span<const tensor_id> scope,
                                                                  const From& from, const Has& has) const {
  return std::ranges::all_of(scope, [&](tensor_id each) {
    std::uint64_t sum = 0;
    for (std::uint32_t rank = 0; rank < world; ++rank) {
      const std::uint64_t held = from(each, rank).elements();
      if (held != has(each, rank).elements()) return false;
      sum += held;
    }
    return sum == facts_[to_index(each)].shape.elements();
  });
}

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
template <class Ranks, class Fill>
result<void> sharded_state<Partition, Transport, Space, Pieces>::gather_wired(
    Ranks& ranks, std::uint32_t world, const wire_form& wire, std::uint32_t node_ranks, moved_bytes& counted,
    const Fill& fill) {
  const std::uint32_t self = to_index(ranks.rank());
  std::vector<std::uint64_t> blocks{0};  // of encoded bytes
  for (std::uint32_t rank = 0; rank < world; ++rank) {
    in_.clear();
    fill(rank, in_);
    blocks.push_back(blocks.back() + wire.bytes(in_.bytes() / 4));
  }
  const auto room = stage(in_stage_, blocks.back());
  if (!room) return room.error();
  const std::span<std::byte> messages(*room, blocks.back());
  // Elements of a rank's part that are converted at once, for parts that are not contiguous.
  const std::uint64_t unit = wire.group();
  const std::uint64_t piece = std::max<std::uint64_t>(options_.segment_bytes / 4 / unit, 1) * unit;
  const auto each_piece = [&](std::uint32_t rank, const auto& convert) -> result<void> {
    in_.clear();
    fill(rank, in_);
    const std::uint64_t all = in_.bytes() / 4;
    std::byte* message = messages.data() + blocks[rank];
    if (all != 0 && detail::floats_in_place(in_, 0, all) != nullptr) {
      convert(message, std::span(detail::floats_in_place(in_, 0, all), all), std::uint64_t{0});
      return {};
    }
    for (std::uint64_t at = 0; at < all; at += piece) {
      const std::uint64_t count = std::min(piece, all - at);
      const auto packed = stage(own_stage_, 4 * std::min(piece, all));
      if (!packed) return packed.error();
      convert(message, std::span(reinterpret_cast<float*>(*packed), count), at);
      message += wire.bytes(count);
    }
    return {};
  };
  const auto in_place = [&](std::span<float> values, std::uint64_t at) {
    return reinterpret_cast<std::byte*>(values.data()) == in_.together(4 * at, values.size_bytes());
  };
  result<void> done = each_piece(self, [&](std::byte* to, std::span<float> values, std::uint64_t at) {
    if (!in_place(values, at))
      in_.copy_to(reinterpret_cast<std::byte*>(values.data()), 4 * at, values.size_bytes());
    wire.encode(values, to);
  });
  if (done) {
    detail::counted_ranks<Ranks> counting(ranks, counted);
    const collective_call call{.by = ranks.after(options_.patience_ns),
                               .tag = options_.tag,
                               .segment_bytes = options_.segment_bytes};
    done = node_ranks == 0 ? all_gather(counting, messages, blocks, call)
                           : two_hop_all_gather(counting, messages, blocks, node_ranks, call);
  }
  for (std::uint32_t rank = 0; done && rank < world; ++rank) {
    done = each_piece(rank, [&](const std::byte* from, std::span<float> values, std::uint64_t at) {
      wire.decode(from, values);
      if (!in_place(values, at))
        in_.copy_from(reinterpret_cast<const std::byte*>(values.data()), 4 * at, values.size_bytes());
    });
  }
  return end(done);
}

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
result<void> sharded_state<Partition, Transport, Space, Pieces>::share_sums(
    std::span<const tensor_id> scope) {
  const std::uint32_t world = to_number(layout_.world());
  const bool is_whole = std::ranges::all_of(scope, [&](tensor_id each) {
    for (std::uint32_t rank = 0; rank < world; ++rank) {
      const std::uint64_t all = facts_[to_index(each)].shape.elements();
      if (layout_.local(each, rank_id{rank}).elements() != all) return false;
    }
    return true;
  });
  if (options_.wires.has_plain_sums() || world == 1 || !is_whole) return refresh(scope);
  return share_wired_sums(scope);
}

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
result<void> sharded_state<Partition, Transport, Space, Pieces>::share_wired_sums(
    std::span<const tensor_id> scope) {
  const auto held = begin(scope, access_mode::read_write);
  if (!held) return held.error();
  ++stats_.refreshes.calls;
  const auto fill = [&](std::uint32_t rank, detail::scattered_bytes& to) {
    for (const tensor_id each : scope) {
      const element_runs part = layout_.owned(each, rank_id{rank});
      intersect(part, part,
                [&](std::uint64_t first, std::uint64_t count) { add_from_piece(to, each, first, count); });
    }
  };
  return gather_wired(*ranks_, to_number(layout_.world()), options_.wires.of_sums(),
                      options_.wires.node_ranks, stats_.refreshes, fill);
}

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
result<void> sharded_state<Partition, Transport, Space, Pieces>::sum_wired(
    std::span<const tensor_id> scope, std::span<const std::span<std::byte>> contribution,
    const reduce_op& op) {
  if (op.combine != sum_f32.combine)
    throw argument_error(options_.name + ": a sum over a wire is of floats; pass sum_f32, or plain wires");
  const std::uint32_t world = to_number(layout_.world());
  std::vector<std::uint64_t> blocks{0};
  for (std::uint32_t rank = 0; rank < world; ++rank) {
    std::uint64_t elements = 0;
    for (const tensor_id each : scope)
      elements += layout_.owned(each, rank_id{rank}).elements();
    blocks.push_back(blocks.back() + elements);
  }
  in_.clear();
  for (const tensor_id each : scope) {
    const std::span<std::byte> into = owned_of(each, address(each));
    in_.add(into.data(), into.size());
  }
  const auto fill = [&](std::uint32_t rank, detail::scattered_bytes& part, detail::scattered_bytes& lost) {
    for (std::size_t i = 0; i < scope.size(); ++i) {
      const element_runs owned = layout_.owned(scope[i], rank_id{rank});
      intersect(owned, owned, [&](std::uint64_t first, std::uint64_t count) {
        add_from_whole(part, scope[i], contribution[i], first, count);
        if (residuals_.bytes() != 0)
          lost.add(residuals_.data() + residual_of_[to_index(scope[i])] + 4 * first, 4 * count);
      });
    }
  };
  const sharded_wires& wires = options_.wires;
  const wired_sum<wire_form> sum(blocks, wires.sum, wires.node_ranks, options_.segment_bytes);
  const auto room = stage(in_stage_, sum.scratch_bytes());
  if (!room) return room.error();
  detail::scattered_ends ends(fill, in_, residuals_.bytes() != 0);
  detail::counted_ranks<Transport> counting(*ranks_, stats_.reduces);
  const collective_call call{.by = ranks_->after(options_.patience_ns), .tag = options_.tag};
  auto done = sum.run(counting, ends, {*room, sum.scratch_bytes()}, call);
  return end(done);
}

}  // namespace v0
}  // namespace llmmem
