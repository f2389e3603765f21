/// @file
/// The bodies of `sharded_state`: set-up, gathers, refreshes and sums.
#pragma once

#include <llmmem/detail/named_range.hpp>
#include <llmmem/sharding/partition_bytes.hpp>
#include <llmmem/sharding/sharded_state.hpp>
#include <llmmem/tiering/access.hpp>
#include <llmmem/tiering/errors.hpp>

#include <concepts>
#include <cstring>
#include <type_traits>
#include <vector>

namespace llmmem {
inline namespace v0 {

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
sharded_state<Partition, Transport, Space, Pieces>::sharded_state(const Partition& layout,
                                                                  std::span<const tensor_facts> tensors,
                                                                  Transport& ranks, Space& space,
                                                                  sharded_options options)
  requires(Pieces::is_resident)
    : layout_(layout),
      facts_(tensors.begin(), tensors.end()),
      ranks_(&ranks),
      space_(&space),
      bytes_(space),
      options_(std::move(options)),
      places_(place_pieces()),
      pieces_(space, places_.offsets, places_.sizes, places_.bytes, options_.alignment),
      addresses_(facts_.size()) {
  stats_.local_bytes = places_.bytes;
  take_wires();
}

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
template <class Store>
  requires(std::same_as<Pieces, leased_pieces<Store>> || std::same_as<Pieces, leased_pieces<Store, Space>>)
sharded_state<Partition, Transport, Space, Pieces>::sharded_state(const Partition& layout,
                                                                  std::span<const tensor_facts> tensors,
                                                                  Transport& ranks, Space& space,
                                                                  Store& store, sharded_options options)
    : layout_(layout),
      facts_(tensors.begin(), tensors.end()),
      ranks_(&ranks),
      space_(&space),
      bytes_(space),
      options_(std::move(options)),
      places_(place_pieces()),
      pieces_(make_pieces(store)),
      addresses_(facts_.size()) {
  for (const std::uint64_t bytes : places_.sizes)
    stats_.local_bytes += bytes;
  take_wires();
}

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
typename sharded_state<Partition, Transport, Space, Pieces>::piece_places
sharded_state<Partition, Transport, Space, Pieces>::place_pieces() {
  detail::check_catalogue(layout_, facts_, options_.name.c_str());
  if (to_number(layout_.world()) > to_number(ranks_->world())) {
    throw argument_error(options_.name + ": a partition of " + std::to_string(to_number(layout_.world())) +
                         " ranks over a transport of " + std::to_string(to_number(ranks_->world())) +
                         "; every rank of the partition must be a rank of the transport");
  }
  if (options_.segment_bytes == 0) {
    throw argument_error(options_.name + ": sharded_options::segment_bytes is 0; use at least 1");
  }
  piece_places all;
  for (std::uint32_t t = 0; t < facts_.size(); ++t) {
    const std::uint64_t width = facts_[t].element_bytes;
    if (width == 0) {
      throw argument_error(options_.name + ": tensor '" + facts_[t].name + "' has elements of 0 bytes");
    }
    static_cast<void>(facts_[t].bytes());
    const tensor_id tensor{t};
    local_.push_back(is_member() ? layout_.local(tensor, rank()) : element_runs{});
    owned_.push_back(is_member() ? layout_.owned(tensor, rank()) : element_runs{});
    const element_runs& mine = owned_.back();
    if (!mine.empty() &&
        local_.back().position_of(mine.end() - 1) + 1 - local_.back().position_of(mine.begin) !=
            mine.elements()) {
      throw argument_error(options_.name + ": what rank " + std::to_string(to_index(rank())) +
                           " owns of tensor '" + facts_[t].name +
                           "' is not contiguous in its piece; split the tensor in two");
    }
    all.bytes = detail::next_multiple(all.bytes, width, options_.name.c_str());
    all.offsets.push_back(all.bytes);
    all.sizes.push_back(local_.back().elements() * width);
    all.bytes = checked_add(all.bytes, all.sizes.back(), options_.name.c_str());
  }
  return all;
}

// Pieces

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
result<held_pieces_of<Pieces>> sharded_state<Partition, Transport, Space, Pieces>::hold(
    std::span<const tensor_id> scope, access_mode mode) {
  if (auto fits = check(scope); !fits) return fits.error();
  hold_type held(pieces_);
  for (const tensor_id each : scope) {
    if (auto had = held.add(each, mode); !had) return had.error();
  }
  return result<hold_type>(std::move(held));
}

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
result<held_pieces_of<Pieces>> sharded_state<Partition, Transport, Space, Pieces>::hold_for_sum(
    std::span<const tensor_id> scope) {
  if (auto fits = check(scope); !fits) return fits.error();
  return hold_owned(scope, [](std::size_t, std::byte*) noexcept {});
}

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
template <class Visit>
result<held_pieces_of<Pieces>> sharded_state<Partition, Transport, Space, Pieces>::hold_owned(
    std::span<const tensor_id> scope, const Visit& visit) {
  hold_type held(pieces_);
  for (const tensor_id each : scope) {
    const std::size_t at = to_index(each);
    if (owned_[at].empty()) continue;
    const bool is_all = owned_[at].elements() == local_[at].elements();
    const auto had = held.add(each, is_all ? access_mode::write : access_mode::read_write);
    if (!had) return had.error();
    visit(at, *had);
  }
  return result<hold_type>(std::move(held));
}

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
result<held_pieces_of<Pieces>> sharded_state<Partition, Transport, Space, Pieces>::begin(
    std::span<const tensor_id> scope, access_mode mode) const {
  hold_type held(pieces_);
  for (const tensor_id each : scope) {
    const auto had = held.add(each, mode);
    if (!had) {
      if (to_number(layout_.world()) > 1) ranks_->revoke();  // others are about to wait for this one
      return had.error();
    }
    addresses_[to_index(each)] = *had;
  }
  return result<hold_type>(std::move(held));
}

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
result<piece_lease<Pieces>> sharded_state<Partition, Transport, Space, Pieces>::lease(tensor_id tensor,
                                                                                      access_mode mode) {
  if (to_index(tensor) >= facts_.size())
    return refuse(errc::no_such_tensor, to_index(tensor), to_index(tensor), facts_.size());
  piece_lease<Pieces> made;
  made.held_ = hold_type(pieces_);
  const auto had = made.held_.add(tensor, mode);
  if (!had) return had.error();
  made.local_ = local_of(tensor, *had);
  made.owned_ = owned_of(tensor, *had);
  return result<piece_lease<Pieces>>(std::move(made));
}

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
result<void> sharded_state<Partition, Transport, Space, Pieces>::hold_again(whole& gathered) {
  if constexpr (!Pieces::is_resident) {
    if (gathered.copies_pieces_) return {};
    hold_type held(pieces_);
    for (std::size_t i = 0; i < gathered.scope_.size(); ++i) {
      const tensor_id each = gathered.scope_[i];
      if (!has_all(each)) continue;
      const auto had = held.add(each, access_mode::read);
      if (!had) return had.error();
      gathered.tensors_[i] = local_of(each, *had);
    }
    gathered.held_ = std::move(held);
  }
  return {};
}

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
result<void> sharded_state<Partition, Transport, Space, Pieces>::discard(tensor_id tensor) {
  if (to_index(tensor) >= facts_.size())
    return refuse(errc::no_such_tensor, to_index(tensor), to_index(tensor), facts_.size());
  return pieces_.discard(to_index(tensor));
}

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
sharded_stats sharded_state<Partition, Transport, Space, Pieces>::stats() const noexcept {
  sharded_stats told = stats_;
  told.whole_bytes = wholes_.now.load(std::memory_order_relaxed);
  told.peak_whole_bytes = wholes_.peak.load(std::memory_order_relaxed);
  return told;
}

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
result<void> sharded_state<Partition, Transport, Space, Pieces>::check(
    std::span<const tensor_id> scope) const noexcept {
  if (!is_member()) {
    return refuse(errc::out_of_range, 0, to_index(rank()), std::uint64_t{to_number(layout_.world())} - 1);
  }
  for (const tensor_id each : scope) {
    if (to_index(each) >= facts_.size())
      return refuse(errc::no_such_tensor, to_index(each), to_index(each), facts_.size());
  }
  return {};
}

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
result<whole_tensors<Space, Pieces>> sharded_state<Partition, Transport, Space, Pieces>::allocate_whole(
    std::span<const tensor_id> scope) {
  return make_whole(scope, access_mode::write);
}

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
result<whole_tensors<Space, Pieces>> sharded_state<Partition, Transport, Space, Pieces>::make_whole(
    std::span<const tensor_id> scope, access_mode of_pieces, bool copies_pieces) {
  if (auto fits = check(scope); !fits) return fits.error();
  whole made;
  made.scope_.assign(scope.begin(), scope.end());
  made.copies_pieces_ = copies_pieces;
  std::uint64_t bytes = 0;
  for (const tensor_id each : scope) {
    if (has_all(each) && !copies_pieces) continue;
    bytes = detail::next_multiple(bytes, facts_[to_index(each)].element_bytes, options_.name.c_str());
    bytes += facts_[to_index(each)].bytes();
  }
  if (auto had = made.buffer_.take(*space_, bytes, options_.alignment, &wholes_); !had) return had.error();
  made.held_ = hold_type(pieces_);
  bool has_pieces = false;
  bytes = 0;
  for (const tensor_id each : scope) {
    if (has_all(each) && !copies_pieces) {
      const auto had = made.held_.add(each, of_pieces);
      if (!had) return had.error();
      made.tensors_.push_back(local_of(each, *had));
      has_pieces = true;
      continue;
    }
    bytes = detail::next_multiple(bytes, facts_[to_index(each)].element_bytes, options_.name.c_str());
    made.tensors_.emplace_back(made.buffer_.data() + bytes, facts_[to_index(each)].bytes());
    bytes += facts_[to_index(each)].bytes();
  }
  if constexpr (!Space::is_host_accessible && !Pieces::is_resident) {
    const bool is_written_next = has_pieces && of_pieces != access_mode::read;
    if (auto ready = is_written_next ? pieces_.wait() : result<void>{}; !ready) return ready.error();
  }
  return result<whole>(std::move(made));
}

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
result<void> sharded_state<Partition, Transport, Space, Pieces>::copy_own(const whole& into) {
  for (std::size_t i = 0; i < into.size(); ++i) {
    const tensor_id tensor = into.scope_[i];
    if (local_[to_index(tensor)].empty() || into.tensors_[i].data() == address(tensor)) continue;
    const element_runs& mine = local_[to_index(tensor)];
    const std::uint64_t width = facts_[to_index(tensor)].element_bytes;
    const std::byte* from = address(tensor);
    for (std::uint64_t run = 0; run < mine.count; ++run) {
      bytes_.copy(into.tensors_[i].data() + (mine.begin + run * mine.stride) * width, from, mine.run * width);
      from += mine.run * width;
    }
  }
  return bytes_.run();
}

// Operations

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
result<whole_tensors<Space, Pieces>> sharded_state<Partition, Transport, Space, Pieces>::gather(
    std::span<const tensor_id> scope) {
  const detail::named_range range("sharded_state gather");
  return gather_among(
      *ranks_, to_number(layout_.world()), scope,
      [this](tensor_id tensor, std::uint32_t rank) { return layout_.owned(tensor, rank_id{rank}); },
      [this](tensor_id tensor, std::uint32_t rank) { return layout_.local(tensor, rank_id{rank}); });
}

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
result<whole_tensors<Space, Pieces>> sharded_state<Partition, Transport, Space, Pieces>::gather_within(
    rank_group<Transport>& node, std::span<const tensor_id> scope) {
  if (auto fits = check(scope); !fits) return fits.error();
  if (auto fits = check_group(node, scope); !fits) return fits.error();
  const auto held = [&](tensor_id tensor, std::uint32_t rank) {
    return layout_.local(tensor, node.beneath(rank_id{rank}));
  };
  return gather_among(node, to_number(node.world()), scope, held, held);
}

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
result<void> sharded_state<Partition, Transport, Space, Pieces>::check_group(
    rank_group<Transport>& node, std::span<const tensor_id> scope) const {
  const std::uint32_t members = to_number(node.world());
  for (std::uint32_t m = 0; m < members; ++m) {
    const std::uint32_t beneath = to_index(node.beneath(rank_id{m}));
    if (beneath >= to_number(layout_.world()))
      return refuse(errc::out_of_range, 0, beneath, std::uint64_t{to_number(layout_.world())} - 1);
  }
  for (const tensor_id each : scope) {
    const std::uint64_t all = facts_[to_index(each)].shape.elements();
    const auto held = [&](std::uint32_t m) { return layout_.local(each, node.beneath(rank_id{m})); };
    std::uint64_t sum = 0;
    std::uint64_t twice = 0;
    bool has_each_all = true;
    for (std::uint32_t m = 0; m < members; ++m) {
      sum += held(m).elements();
      has_each_all = has_each_all && held(m).elements() == all;
      for (std::uint32_t other = 0; other < m; ++other)
        intersect(held(m), held(other), [&](std::uint64_t, std::uint64_t count) { twice += count; });
    }
    if (has_each_all) continue;
    if (sum - twice != all || twice != 0)
      return refuse(errc::size_mismatch, to_index(each), all, sum - twice);
  }
  return {};
}

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
template <class Ranks, class From, class Has>
result<whole_tensors<Space, Pieces>> sharded_state<Partition, Transport, Space, Pieces>::gather_among(
    Ranks& ranks, std::uint32_t world, std::span<const tensor_id> scope, const From& from, const Has& has) {
  // What the wire restores replaces this rank's own elements too, in a copy.
  bool is_wired = false;
  if constexpr (Space::is_host_accessible) {
    is_wired = !options_.wires.has_plain_gathers() && world > 1 && check(scope).has_value() &&
               is_split(world, scope, from, has);
  }
  auto made = make_whole(scope, access_mode::read, is_wired);
  if (!made) {
    // Other ranks are about to wait for this one; but an argument error that all ranks find ends nothing.
    if (world > 1 && made.code() != errc::no_such_tensor && made.code() != errc::out_of_range) ranks.revoke();
    return made.error();
  }
  const auto held = begin(scope, access_mode::read);
  if (!held) return held.error();
  const detail::finished_work before_the_buffer_goes(bytes_);
  if (auto copied = copy_own(*made); !copied) {
    if (world > 1) ranks.revoke();
    return end(copied).error();
  }
  ++stats_.gathers.calls;
  const std::uint32_t self = to_index(ranks.rank());
  if constexpr (Space::is_host_accessible) {
    if (is_wired) {
      const auto fill = [&](std::uint32_t rank, detail::scattered_bytes& to) {
        for (std::size_t i = 0; i < scope.size(); ++i) {
          const element_runs part = from(scope[i], rank);
          intersect(part, part, [&](std::uint64_t first, std::uint64_t count) {
            add_from_whole(to, scope[i], made->tensor(i), first, count);
          });
        }
      };
      const bool is_world = std::is_same_v<Ranks, Transport>;
      const std::uint32_t node_ranks = is_world ? options_.wires.node_ranks : 0;
      if (auto done = gather_wired(ranks, world, options_.wires.gather, node_ranks, stats_.gathers, fill);
          !done)
        return done.error();
      return made;
    }
  }
  const auto fill_out = [&](std::uint32_t to) {
    for (const tensor_id each : scope) {
      detail::without(from(each, self), has(each, to), [&](std::uint64_t first, std::uint64_t count) {
        add_from_piece(out_, each, first, count);
      });
    }
  };
  const auto fill_in = [&](std::uint32_t source) {
    for (std::size_t i = 0; i < scope.size(); ++i) {
      detail::without(from(scope[i], source), has(scope[i], self),
                      [&](std::uint64_t first, std::uint64_t count) {
                        add_from_whole(in_, scope[i], made->tensor(i), first, count);
                      });
    }
  };
  if (auto done = trade(ranks, world, stats_.gathers, fill_out, fill_in); !done) return done.error();
  return made;
}

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
result<void> sharded_state<Partition, Transport, Space, Pieces>::refresh(std::span<const tensor_id> scope) {
  const detail::named_range range("sharded_state refresh");
  if (auto fits = check(scope); !fits) return fits;
  std::vector<tensor_id> moving;
  for (const tensor_id each : scope) {
    if (moves_in_refresh(each)) moving.push_back(each);
  }
  const auto held = begin(moving, access_mode::read_write);
  if (!held) return held.error();
  scope = moving;
  ++stats_.refreshes.calls;
  const auto fill_out = [&](std::uint32_t to) {
    for (const tensor_id each : scope) {
      intersect(owned_[to_index(each)], layout_.local(each, rank_id{to}),
                [&](std::uint64_t first, std::uint64_t count) { add_from_piece(out_, each, first, count); });
    }
  };
  const auto fill_in = [&](std::uint32_t source) {
    for (const tensor_id each : scope) {
      intersect(layout_.owned(each, rank_id{source}), local_[to_index(each)],
                [&](std::uint64_t first, std::uint64_t count) { add_from_piece(in_, each, first, count); });
    }
  };
  return trade(*ranks_, to_number(layout_.world()), stats_.refreshes, fill_out, fill_in);
}

/// Returns whether this rank holds elements that others own, or others hold elements that it owns.
template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
bool sharded_state<Partition, Transport, Space, Pieces>::moves_in_refresh(tensor_id tensor) const noexcept {
  const std::size_t at = to_index(tensor);
  if (local_[at].elements() != owned_[at].elements()) return true;
  const std::uint32_t world = to_number(layout_.world());
  std::uint64_t common = 0;
  for (std::uint32_t other = 0; other < world; ++other) {
    if (other == to_index(rank())) continue;
    intersect(owned_[at], layout_.local(tensor, rank_id{other}),
              [&](std::uint64_t, std::uint64_t count) { common += count; });
  }
  return common != 0;
}

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
result<void> sharded_state<Partition, Transport, Space, Pieces>::check_sum(
    std::span<const tensor_id> scope, std::span<const std::span<std::byte>> contribution,
    const reduce_op& op) const noexcept {
  if (auto fits = check(scope); !fits) return fits;
  if (scope.size() != contribution.size())
    return refuse(errc::size_mismatch, 0, scope.size(), contribution.size());
  for (std::size_t i = 0; i < scope.size(); ++i) {
    const tensor_facts& facts = facts_[to_index(scope[i])];
    if (facts.element_bytes != op.element_bytes)
      return refuse(errc::size_mismatch, to_index(scope[i]), op.element_bytes, facts.element_bytes);
    if (facts.bytes() != contribution[i].size())
      return refuse(errc::size_mismatch, to_index(scope[i]), facts.bytes(), contribution[i].size());
  }
  return {};
}

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
result<void> sharded_state<Partition, Transport, Space, Pieces>::reduce_scatter(
    std::span<const tensor_id> scope, std::span<const std::span<std::byte>> contribution,
    const reduce_op& op) {
  // After a refusal too the caller may free its contribution, which kernels may still write: `end` waits.
  if (auto fits = check_sum(scope, contribution, op); !fits) return end(fits);
  const std::uint32_t world = to_number(layout_.world());
  if constexpr (!Space::is_host_accessible) {
    if (!op.is_sum) {
      static_cast<void>(end({}));
      throw argument_error(options_.name +
                           ": a device sums floats, bfloat16s and halves; pass sum_f32, sum_bf16 or sum_f16");
    }
  }
  const auto held =
      hold_owned(scope, [this](std::size_t at, std::byte* piece) noexcept { addresses_[at] = piece; });
  if (!held) {
    if (world > 1) ranks_->revoke();
    return held.error();
  }
  ++stats_.reduces.calls;
  if constexpr (Space::is_host_accessible) {
    if (world > 1 && !options_.wires.has_plain_sums()) return sum_wired(scope, contribution, op);
  }
  const detail::finished_work before_the_contribution_goes(bytes_);
  own_.clear();
  in_.clear();
  for (std::size_t i = 0; i < scope.size(); ++i) {
    const std::span<std::byte> into = owned_of(scope[i], address(scope[i]));
    if (world == 1) {  // a single rank owns all of it
      if (!into.empty()) bytes_.copy(into.data(), contribution[i].data(), into.size());
      continue;
    }
    in_.add(into.data(), into.size());
    intersect(owned_[to_index(scope[i])], owned_[to_index(scope[i])],
              [&](std::uint64_t first, std::uint64_t count) {
                add_from_whole(own_, scope[i], contribution[i], first, count);
              });
  }
  if (world == 1) return end(bytes_.run());
  const std::uint64_t whole_elements = options_.segment_bytes / op.element_bytes;
  const std::uint64_t step = (whole_elements == 0 ? 1 : whole_elements) * op.element_bytes;
  std::uint64_t most = 0;
  for (std::uint32_t rank = 0; rank < world; ++rank) {
    std::uint64_t bytes = 0;
    for (const tensor_id each : scope)
      bytes += layout_.owned(each, rank_id{rank}).elements() * op.element_bytes;
    if (bytes > most) most = bytes;
  }
  const deadline by = ranks_->after(options_.patience_ns);
  for (std::uint64_t at = 0; at < most; at += step) {
    if (auto done = sum_window(at, own_.left(at, step), step, scope, contribution, op, by); !done)
      return end(done);
  }
  return end({});
}

template <partition Partition, transport Transport, memory_space Space, piece_store Pieces>
result<void> sharded_state<Partition, Transport, Space, Pieces>::sum_window(
    std::uint64_t at, std::uint64_t bytes, std::uint64_t step, std::span<const tensor_id> scope,
    std::span<const std::span<std::byte>> contribution, const reduce_op& op, deadline by) {
  const std::uint32_t world = to_number(layout_.world());
  const std::uint32_t self = to_index(rank());
  // The others' parts, and the sum.
  const std::uint64_t apart = detail::next_multiple(bytes, decltype(bytes_)::part_alignment, "");
  const auto room = stage(in_stage_, world * apart);
  if (!room) return room.error();
  for (std::uint32_t d = 1; d < world; ++d) {
    const std::uint32_t to = (self + d) % world;
    out_.clear();
    for (std::size_t i = 0; i < scope.size(); ++i) {
      const element_runs theirs = layout_.owned(scope[i], rank_id{to});
      intersect(theirs, theirs, [&](std::uint64_t first, std::uint64_t count) {
        add_from_whole(out_, scope[i], contribution[i], first, count);
      });
    }
    const std::uint64_t sent = out_.left(at, step);
    const auto goes =
        sent == 0 ? result<std::byte*>(nullptr) : pack(out_, at, sent, out_stage_, out_.left(0, step));
    if (!goes) return goes.error();
    const std::span<std::byte> into(*room + (d - 1) * apart, bytes);
    if (auto done = swap(*ranks_, {*goes, sent}, to, into, (self + world - d) % world, by, stats_.reduces);
        !done)
      return done;
  }
  if (bytes == 0) return {};
  const auto mine = pack(own_, at, bytes, own_stage_, bytes);
  if (!mine) return mine.error();
  parts_.clear();
  for (std::uint32_t rank = 0; rank < world; ++rank)
    parts_.push_back(rank == self ? *mine : *room + ((self + world - rank) % world - 1) * apart);
  std::byte* const sum = *room + (world - 1) * apart;
  result<void> added = bytes_.add(op, parts_, sum, bytes);
  if (added) added = unpack(in_, sum, at, bytes);
  if (!added) ranks_->revoke();
  return added;
}

}  // namespace v0
}  // namespace llmmem
