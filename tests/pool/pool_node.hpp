/// @file
/// A node of a pool: a cache, its tiers and the engine around them, in which every token can be checked.
#pragma once

#include <llmmem/offload/kv_tiers.hpp>
#include <llmmem/pool/kv_pool.hpp>
#include <llmmem/space/host.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/hybrid_allocator.hpp>

#include "offload/kv_model.hpp"
#include "support/manual_transfers.hpp"

namespace llmmem_tests {

struct pooled_traits : llmmem::paged_traits {
  using observer = llmmem::offload::tier_link;
};
struct pooled_hybrid_traits : llmmem::hybrid_traits {
  using observer = llmmem::offload::tier_link;
};

/// How large a node is.
struct node_form {
  std::span<const llmmem::layer_group> groups;
  std::uint64_t blocks = 64;
  std::uint64_t slots = 64;        // of each group, in the first tier
  std::uint64_t lower_slots = 64;  // and in the second
  std::uint64_t tokens = 1024;     // of a sequence
};

/// What one request of a node came to.
struct served_request {
  std::uint64_t matched = 0;  // tokens that the cache had
  std::uint64_t loaded = 0;   // tokens that tiers and other nodes had
  llmmem::pool::fetch_result fetched{};
};

/// The memory of a node's first tier.
template <class Mover>
struct first_memory {
  using space_type = llmmem::host_space;
  template <class... Parts>
  explicit first_memory(std::uint64_t bytes, Parts&...) : own({.budget = bytes}) {}
  space_type& space() { return own; }
  space_type own;
};
template <class Mover>
struct first_memory<Mover&> {
  using space_type = typename Mover::space_type;
  template <class... Parts>
  explicit first_memory(std::uint64_t, Parts&... parts) : mover(&std::get<Mover&>(std::tie(parts...))) {}
  space_type& space() { return mover->space(); }
  Mover* mover;
};

/// @tparam Cache  a `paged_allocator` or `hybrid_allocator` over `form.groups`.
/// @tparam Directory  a reference to a directory that the constructor is given, or the pool's own.
/// @tparam Mover  a reference to a mover that the constructor is given, or the pool's own.
template <class Cache, class Endpoint, class Directory = llmmem::pool::embedded_directory,
          class Mover = llmmem::pool::message_mover>
class pool_node {
 public:
  using first_type = first_memory<Mover>;
  using tiers_type =
      llmmem::kv_tiers<Cache, manual_mover, llmmem::offload::kv_tier<typename first_type::space_type>,
                       llmmem::offload::kv_tier<manual_space>>;
  using pool_type = llmmem::kv_pool<tiers_type, Endpoint, Directory, Mover>;

  template <class... Parts>
  pool_node(Endpoint& end, const node_form& form, const llmmem::kv_pool_options& options, Parts&... parts)
      : form_(form),
        cache_(make_cache(form)),
        contents_(form.groups, block_ids(cache_)),
        stream_(true),
        host_(bytes_of(form.slots), parts...),
        below_(bytes_of(form.lower_slots) + 4096),
        tiers_(cache_, manual_mover(contents_, stream_), tier_options(),
               llmmem::offload::kv_tier(host_.space(), bytes_of(form.slots),
                                        llmmem::demoting<llmmem::write_through>{}),
               lower_tier()),
        pool_(tiers_, end, parts..., options) {}

  [[nodiscard]] Cache& cache() { return cache_; }
  [[nodiscard]] tiers_type& tiers() { return tiers_; }
  [[nodiscard]] pool_type& pool() { return pool_; }
  /// The bytes of the lower tier.
  [[nodiscard]] std::span<std::byte> lower_bytes() { return below_.bytes(); }
  [[nodiscard]] const std::string& wrong() const { return wrong_; }
  /// Ends what the tiers copy, and lets the pool go on.
  void step() {
    stream_.end_all();
    below_.transfers().end_all();
    pool_.progress();
  }

  /// What an engine does with a prompt that nobody else needs an answer for: match, fetch, load, compute the
  /// rest, store, publish. Checks the contents of each token that it did not compute itself.
  /// @param fetch  called with the request, waits until it has arrived.
  template <class Fetch>
  served_request serve(std::span<const llmmem::token_id> prompt, Fetch&& fetch) {
    served_request out;
    const auto created = cache_.create();
    if (!created) return out;
    const llmmem::sequence_id id = *created;
    kv_sequence sequence;
    sequence.epoch = cache_.epoch();
    for (const llmmem::token_id each : prompt)
      sequence.push(each);
    const auto table = [&](std::size_t g) { return table_of(id, g); };
    const llmmem::kv_chain chain(cache_, prompt);
    std::uint64_t have = cache_.match(id, prompt.first(prompt.size() - 1)).value().tokens;
    out.matched = have;
    look_at(sequence, have, "matched", table);
    auto request = pool_.ask(chain, have);
    if (request) {
      fetch(*request);
      auto load = tiers_.prepare_load(id, chain, prompt.size() - 1);
      out.fetched = request->end();
      if (!load) return drop(id, out);
      if (*load) {
        for (std::uint32_t l = 0; l < kv_contents::layers; ++l) {
          for (std::size_t g = 0; g < form_.groups.size(); ++g)
            load->wait(l, g).value();
        }
        const auto came = load->complete();
        if (!came.is_complete() && !cache_.truncate(id, came.tokens)) return drop(id, out);
        out.loaded = came.tokens - have;
        have = came.tokens;
        look_at(sequence, have, "loaded", table);
      }
    }
    if (cache_.epoch(id) != cache_.epoch()) return drop(id, out);
    const auto grown = cache_.append(id, prompt.subspan(static_cast<std::size_t>(have)));
    if (!grown) return drop(id, out);
    stream_.end_all();
    compute(contents_, sequence, have, prompt.size(), table);
    cache_.commit(id).value();
    tiers_.store(id).value();
    pool_.publish(chain, cache_.tokens(id));
    look_at(sequence, prompt.size(), "computed", table);
    return drop(id, out);
  }

 private:
  static Cache make_cache(const node_form& form) {
    if constexpr (std::is_same_v<Cache, llmmem::paged_allocator<pooled_traits>>) {
      return Cache({.blocks = form.blocks,
                    .block_tokens = form.groups[0].block_tokens,
                    .max_sequences = 8,
                    .max_sequence_tokens = form.tokens,
                    .name = "kv"});
    } else {
      return Cache({.groups = form.groups,
                    .budget_bytes = (form.blocks + 1) * 128,
                    .page_bytes = 128,
                    .max_sequences = 8,
                    .max_sequence_tokens = form.tokens,
                    .name = "kv"});
    }
  }
  static std::uint64_t block_ids(const Cache& cache) {
    if constexpr (requires { cache.groups(); }) {
      return cache.pool().block_ids();
    } else {
      return cache.max_physical_blocks();
    }
  }
  [[nodiscard]] std::uint64_t bytes_of(std::uint64_t slots) const {
    std::uint64_t bytes = 0;
    for (const llmmem::layer_group& group : form_.groups)
      bytes += slots * kv_contents::layers * group.block_tokens * 8;
    return bytes;
  }
  [[nodiscard]] llmmem::kv_tiers_options tier_options() const {
    llmmem::kv_tiers_options out{.store = llmmem::write_through{},
                                 .load_headroom = form_.slots > 4 ? std::uint64_t{2} : std::uint64_t{0}};
    for (std::size_t g = 0; g < form_.groups.size(); ++g)
      out.shares[g] = form_.groups[g].block_tokens;
    return out;
  }
  [[nodiscard]] llmmem::offload::kv_tier<manual_space> lower_tier() {
    llmmem::offload::kv_tier<manual_space> out(below_, bytes_of(form_.lower_slots));
    out.granularity = 16;
    return out;
  }
  [[nodiscard]] std::span<const llmmem::block_id> table_of(llmmem::sequence_id id, std::size_t g) {
    if constexpr (requires { cache_.table(id, g); }) {
      return cache_.table(id, g);
    } else {
      return cache_.blocks(id);
    }
  }
  template <class Table>
  void look_at(const kv_sequence& sequence, std::uint64_t length, const char* what, Table&& table) {
    if (!wrong_.empty()) return;
    const std::string found = wrong_contents(contents_, sequence, length, table);
    if (!found.empty()) wrong_ = std::string(what) + ": " + found;
  }
  served_request drop(llmmem::sequence_id id, const served_request& out) {
    cache_.release(id).value();
    return out;
  }

  node_form form_;
  Cache cache_;
  kv_contents contents_;
  transfer_list stream_;
  first_type host_;
  manual_space below_;
  tiers_type tiers_;
  pool_type pool_;
  std::string wrong_;
};

}  // namespace llmmem_tests
