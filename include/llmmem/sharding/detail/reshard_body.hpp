/// @file
/// The bodies of reshard.hpp.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/sharding/detail/reshard_cover.hpp>
#include <llmmem/sharding/detail/reshard_join.hpp>
#include <llmmem/sharding/element_runs.hpp>
#include <llmmem/sharding/ids.hpp>
#include <llmmem/sharding/reshard.hpp>
#include <llmmem/sharding/tensor_shape.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// Plans tensor by tensor. A tensor is cut into windows, in each of which the same sets have the same
/// elements row after row; the first row is planned, and its copies repeat. Sources with equal elements are
/// one set until the copies are known; then each destination is assigned one holder of that set.
class reshard_planner {
 public:
  reshard_planner(std::span<const tensor_facts> tensors, std::span<const stored_piece> stored,
                  std::span<const wanted_piece> wanted)
      : tensors_(tensors), stored_(stored), wanted_(wanted) {
    check_pieces(stored_, "stored");
    check_pieces(wanted_, "wanted");
    by_tensor_ = sorted_stored();
    wants_by_tensor_ = sorted_wanted();
    holders_ = shares_of<holder_id>(stored_, [](const stored_piece& piece) { return piece.holder; });
    plan_.ranks = shares_of<rank_id>(wanted_, [](const wanted_piece& piece) { return piece.rank; });
  }

  [[nodiscard]] reshard_plan plan() {
    std::size_t source = 0;
    for (std::size_t want = 0; want < wants_by_tensor_.size();) {
      const tensor_id tensor = wanted_[wants_by_tensor_[want]].tensor;
      const auto end_of = [&](const std::vector<std::uint32_t>& order, std::size_t from, const auto& pieces) {
        while (from < order.size() && pieces[order[from]].tensor == tensor)
          ++from;
        return from;
      };
      while (source < by_tensor_.size() && stored_[by_tensor_[source]].tensor < tensor)
        ++source;
      const std::size_t sources_end = end_of(by_tensor_, source, stored_);
      const std::size_t wants_end = end_of(wants_by_tensor_, want, wanted_);
      plan_tensor(tensor, {by_tensor_.data() + source, sources_end - source},
                  {wants_by_tensor_.data() + want, wants_end - want});
      source = sources_end;
      want = wants_end;
    }
    std::ranges::sort(plan_.copies, [](const reshard_copy& a, const reshard_copy& b) {
      return std::tuple(a.source, a.source_offset, a.destination, a.destination_offset) <
             std::tuple(b.source, b.source_offset, b.destination, b.destination_offset);
    });
    for (const auto& each : holders_) {
      if (each.copies != 0) plan_.holders.push_back(each);
    }
    return std::move(plan_);
  }

 private:
  // Stored pieces with the same elements: `first` to `last` - 1 of the order by tensor, by holder.
  struct source_set {
    element_runs elements{};
    std::size_t first = 0;
    std::size_t last = 0;
  };
  struct local_set {
    holder_id holder{};
    std::uint32_t set = 0;
  };

  template <class Piece>
  void check_pieces(std::span<const Piece> pieces, const char* kind) const {
    if (pieces.size() > 0xFFFF'FFFFU) {
      throw length_error("make_reshard: " + std::to_string(pieces.size()) + " " + kind +
                         " pieces; their indices are 32 bits wide");
    }
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const std::uint32_t tensor = to_index(pieces[i].tensor);
      if (tensor < tensors_.size() && pieces[i].elements.is_valid(tensors_[tensor].shape.elements()))
        continue;
      const std::string where = "make_reshard: " + std::string(kind) + " piece " + std::to_string(i);
      if (tensor >= tensors_.size()) {
        throw argument_error(where + " is of tensor " + std::to_string(tensor) + ", and there are " +
                             std::to_string(tensors_.size()));
      }
      pieces[i].elements.validate(tensors_[tensor].shape.elements(),
                                  where + " of tensor '" + tensors_[tensor].name + "'");
    }
  }

  [[nodiscard]] static std::vector<std::uint32_t> numbers(std::size_t count) {
    std::vector<std::uint32_t> all(count);
    for (std::size_t i = 0; i < count; ++i)
      all[i] = static_cast<std::uint32_t>(i);
    return all;
  }
  [[nodiscard]] std::vector<std::uint32_t> sorted_stored() const {
    std::vector<std::uint32_t> order = numbers(stored_.size());
    const auto key = [&](std::uint32_t i) {
      const stored_piece& piece = stored_[i];
      const element_runs& e = piece.elements;
      return std::tuple(piece.tensor, e.begin, e.run, e.stride, e.count, piece.holder, i);
    };
    std::ranges::sort(order, [&](std::uint32_t a, std::uint32_t b) { return key(a) < key(b); });
    return order;
  }
  [[nodiscard]] std::vector<std::uint32_t> sorted_wanted() const {
    std::vector<std::uint32_t> order = numbers(wanted_.size());
    const auto key = [&](std::uint32_t i) {
      return std::tuple(wanted_[i].tensor, wanted_[i].elements.begin, i);
    };
    std::ranges::sort(order, [&](std::uint32_t a, std::uint32_t b) { return key(a) < key(b); });
    return order;
  }

  /// Returns an empty share for each id that occurs on a piece with elements, by id.
  template <class Id, class Piece, class IdOf>
  [[nodiscard]] static std::vector<reshard_share<Id>> shares_of(std::span<const Piece> pieces, IdOf id_of) {
    std::vector<Id> ids;
    for (const Piece& each : pieces) {
      if (!each.elements.empty()) ids.push_back(id_of(each));
    }
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    std::vector<reshard_share<Id>> shares(ids.size());
    for (std::size_t i = 0; i < ids.size(); ++i)
      shares[i].id = ids[i];
    return shares;
  }
  template <class Id>
  [[nodiscard]] static reshard_share<Id>& share_of(std::vector<reshard_share<Id>>& shares, Id id) noexcept {
    return *std::lower_bound(shares.begin(), shares.end(), id,
                             [](const reshard_share<Id>& share, Id wanted) { return share.id < wanted; });
  }

  void plan_tensor(tensor_id tensor, std::span<const std::uint32_t> sources,
                   std::span<const std::uint32_t> wants) {
    tensor_ = tensor;
    gather(sources, wants);
    if (wants_.empty()) return;
    const std::uint64_t elements = facts().shape.elements();
    row_ = row_length(elements);
    if (row_ == elements) {
      boundaries_ = {0, 1};
    } else {
      find_boundaries();
    }
    active_sets_.clear();
    active_wants_.clear();
    next_set_ = next_want_ = 0;
    drafts_.clear();
    for (std::size_t i = 0; i + 1 < boundaries_.size(); ++i)
      plan_window(boundaries_[i] * row_, boundaries_[i + 1] - boundaries_[i]);
    join_copies(drafts_);
    choose_holders();
  }

  [[nodiscard]] const tensor_facts& facts() const noexcept { return tensors_[to_index(tensor_)]; }

  void gather(std::span<const std::uint32_t> sources, std::span<const std::uint32_t> wants) {
    sets_.clear();
    wants_.clear();
    locals_.clear();
    for (const std::uint32_t each : wants) {
      if (!wanted_[each].elements.empty()) wants_.push_back(each);
    }
    bool has_preferences = false;
    for (const std::uint32_t each : wants_)
      has_preferences = has_preferences || wanted_[each].prefers != no_holder;
    sources_ = sources;
    for (std::size_t i = 0; i < sources.size(); ++i) {
      const stored_piece& piece = stored_[sources[i]];
      if (piece.elements.empty()) continue;
      if (sets_.empty() || sets_.back().elements != piece.elements) sets_.push_back({piece.elements, i, i});
      sets_.back().last = i + 1;
      if (has_preferences) locals_.push_back({piece.holder, static_cast<std::uint32_t>(sets_.size() - 1)});
    }
    std::ranges::sort(locals_, [](const local_set& a, const local_set& b) {
      return std::tuple(a.holder, a.set) < std::tuple(b.holder, b.set);
    });
  }

  template <class F>
  void each_elements(F&& f) const {
    for (const source_set& each : sets_)
      f(each.elements);
    for (const std::uint32_t each : wants_)
      f(wanted_[each].elements);
  }

  /// Returns the stride of all strided pieces, if they have one and none of their runs crosses the end of a
  /// row; otherwise the whole tensor is one row.
  [[nodiscard]] std::uint64_t row_length(std::uint64_t elements) const {
    std::uint64_t row = 0;
    std::uint64_t runs = 0;
    bool is_shared = true;
    each_elements([&](const element_runs& each) {
      // Saturates, because the sum of many counts may pass 2^64.
      runs = each.count > max_reshard_runs ? each.count : std::min(runs, max_reshard_runs) + each.count;
      if (each.count == 1) return;
      if (row == 0) row = each.stride;
      is_shared = is_shared && each.stride == row && each.begin % row + each.run <= row;
    });
    if (row == 0) return elements;
    if (is_shared) return row;
    if (runs > max_reshard_runs) {
      throw length_error("make_reshard: the pieces of tensor '" + facts().name +
                         "' have no row length in common and more than " + std::to_string(max_reshard_runs) +
                         " runs; store them as bands of one matrix, or in fewer runs");
    }
    return elements;
  }

  /// Finds the rows at which any piece begins or ends, and those next to them if it does so within a row.
  void find_boundaries() {
    boundaries_.clear();
    each_elements([&](const element_runs& each) {
      if (each.count != 1) {
        boundaries_.push_back(each.begin / row_);
        boundaries_.push_back(each.begin / row_ + each.count);
        return;
      }
      for (const std::uint64_t edge : {each.begin, each.end()}) {
        boundaries_.push_back(edge / row_);
        if (edge % row_ != 0) boundaries_.push_back(edge / row_ + 1);
      }
    });
    std::ranges::sort(boundaries_);
    const auto repeated = std::ranges::unique(boundaries_);
    boundaries_.erase(repeated.begin(), repeated.end());
  }

  /// Plans the row that begins at `begin`, for it and the `rows` - 1 like it.
  void plan_window(std::uint64_t begin, std::uint64_t rows) {
    const std::uint64_t end = begin + row_;
    const auto is_over = [&](const element_runs& each) { return each.end() <= begin; };
    std::erase_if(active_sets_, [&](std::uint32_t set) { return is_over(sets_[set].elements); });
    std::erase_if(active_wants_, [&](std::uint32_t want) { return is_over(wanted_[want].elements); });
    for (; next_set_ < sets_.size() && sets_[next_set_].elements.begin < end; ++next_set_)
      active_sets_.push_back(static_cast<std::uint32_t>(next_set_));
    for (; next_want_ < wants_.size() && wanted_[wants_[next_want_]].elements.begin < end; ++next_want_)
      active_wants_.push_back(wants_[next_want_]);
    if (active_wants_.empty()) return;

    all_.clear();
    for (const std::uint32_t set : active_sets_)
      all_.add(sets_[set].elements, set, begin, end);
    all_.sort();
    missing_ = cover_list::none_behind;
    for (const std::uint32_t want : active_wants_) {
      find_local(wanted_[want].prefers, begin, end);
      stretch_.clear();
      stretch_.add(wanted_[want].elements, want, begin, end);
      for (const run_fragment& each : stretch_.fragments())
        cover(each, rows);
    }
    if (missing_ != cover_list::none_behind) {
      throw argument_error("make_reshard: no stored piece has element " + std::to_string(missing_) +
                           " of tensor '" + facts().name + "', which rank " +
                           std::to_string(to_index(missing_for_)) + " wants");
    }
  }

  void find_local(holder_id holder, std::uint64_t begin, std::uint64_t end) {
    local_.clear();
    if (holder == no_holder) return;
    auto at = std::ranges::lower_bound(locals_, holder, {}, &local_set::holder);
    for (; at != locals_.end() && at->holder == holder; ++at)
      local_.add(sets_[at->set].elements, at->set, begin, end);
    local_.sort();
  }

  void cover(const run_fragment& wanted, std::uint64_t rows) {
    for (std::uint64_t x = wanted.begin; x < wanted.end;) {
      const run_fragment* source = local_.at(x);
      std::uint64_t until = wanted.end;
      if (source == nullptr) {
        source = all_.at(x);
        until = std::min(until, local_.next_behind(x));
      }
      if (source == nullptr) {
        if (x < missing_) {
          missing_ = x;
          missing_for_ = wanted_[wanted.set].rank;
        }
        return;
      }
      until = std::min(until, source->end);
      draft(source->set, wanted.set, x, until - x, rows);
      x = until;
    }
  }

  /// Drafts a copy: until its holder is chosen, its source is the index of a set.
  void draft(std::uint32_t set, std::uint32_t want, std::uint64_t first, std::uint64_t run,
             std::uint64_t rows) {
    const element_runs& from = sets_[set].elements;
    const element_runs& to = wanted_[want].elements;
    reshard_copy copy{.tensor = tensor_,
                      .source = stored_index{set},
                      .destination = wanted_index{want},
                      .source_offset = from.position_of(first),
                      .destination_offset = to.position_of(first),
                      .run = run,
                      .count = rows,
                      .source_stride = run,
                      .destination_stride = run};
    if (rows > 1) {
      copy.source_stride = from.position_of(first + row_) - copy.source_offset;
      copy.destination_stride = to.position_of(first + row_) - copy.destination_offset;
      if (copy.source_stride == run && copy.destination_stride == run) {
        copy.run = copy.source_stride = copy.destination_stride = run * rows;
        copy.count = 1;
      }
    }
    drafts_.push_back(copy);
  }

  void choose_holders() {
    for (std::size_t first = 0; first < drafts_.size();) {
      std::size_t last = first;
      std::uint64_t elements = 0;
      while (last < drafts_.size() && is_same_pair(drafts_[first], drafts_[last]))
        elements += drafts_[last++].elements();
      const wanted_piece& want = wanted_[to_index(drafts_[first].destination)];
      const std::uint32_t source = choose(sets_[to_index(drafts_[first].source)], want.prefers);
      const std::uint64_t bytes =
          checked_multiply(elements, facts().element_bytes, "make_reshard: elements x bytes per element");
      plan_.bytes = checked_add(plan_.bytes, bytes, "make_reshard: bytes of all copies");
      plan_.elements = checked_add(plan_.elements, elements, "make_reshard: elements of all copies");
      add(share_of(holders_, stored_[source].holder), last - first, elements, bytes);
      add(share_of(plan_.ranks, want.rank), last - first, elements, bytes);
      for (; first < last; ++first) {
        plan_.copies.push_back(drafts_[first]);
        plan_.copies.back().source = stored_index{source};
      }
    }
  }

  template <class Id>
  static void add(reshard_share<Id>& share, std::size_t copies, std::uint64_t elements,
                  std::uint64_t bytes) noexcept {
    share.copies += copies;
    share.elements += elements;
    share.bytes += bytes;
  }

  /// Returns the piece of the preferred holder, or of the one with the least to read.
  [[nodiscard]] std::uint32_t choose(const source_set& set, holder_id preferred) {
    std::size_t best = set.first;
    std::uint64_t least = ~std::uint64_t{0};
    for (std::size_t i = set.first; i < set.last; ++i) {
      const holder_id holder = stored_[sources_[i]].holder;
      if (holder == preferred) return sources_[i];
      const std::uint64_t bytes = share_of(holders_, holder).bytes;
      if (bytes >= least) continue;
      best = i;
      least = bytes;
    }
    return sources_[best];
  }

  std::span<const tensor_facts> tensors_;
  std::span<const stored_piece> stored_;
  std::span<const wanted_piece> wanted_;
  std::vector<std::uint32_t> by_tensor_;        // stored pieces by tensor, elements, holder
  std::vector<std::uint32_t> wants_by_tensor_;  // wanted pieces by tensor, first element
  std::vector<reshard_share<holder_id>> holders_;
  reshard_plan plan_{};

  // Of the tensor being planned
  tensor_id tensor_{};
  std::span<const std::uint32_t> sources_;
  std::vector<source_set> sets_;
  std::vector<std::uint32_t> wants_;
  std::vector<local_set> locals_;
  std::uint64_t row_ = 0;
  std::vector<std::uint64_t> boundaries_;
  std::vector<reshard_copy> drafts_;
  std::vector<std::uint32_t> active_sets_;
  std::vector<std::uint32_t> active_wants_;
  std::size_t next_set_ = 0;
  std::size_t next_want_ = 0;

  // Of the window
  cover_list all_;
  cover_list local_;
  cover_list stretch_;
  std::uint64_t missing_ = 0;
  rank_id missing_for_{};
};

}  // namespace detail

inline reshard_plan make_reshard(std::span<const tensor_facts> tensors, std::span<const stored_piece> stored,
                                 std::span<const wanted_piece> wanted) {
  return detail::reshard_planner(tensors, stored, wanted).plan();
}

}  // namespace v0
}  // namespace llmmem
