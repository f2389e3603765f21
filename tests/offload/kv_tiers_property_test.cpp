/// Worlds of requests over caches with tiers, in which every token that is looked at has contents to be
/// checked.
#include <llmmem/offload/kv_tiers.hpp>

#include <doctest/doctest.h>
#include <llmmem/eviction/any.hpp>
#include <llmmem/offload/block_codec.hpp>
#include <llmmem/paged_allocator.hpp>
#include <llmmem/paging/hybrid_allocator.hpp>
#include <llmmem/space/host.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "offload/kv_model.hpp"
#include "offload/varied_codec.hpp"
#include "support/manual_transfers.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

struct paged_tiered : paged_traits {
  using observer = offload::tier_link;
};
struct hybrid_tiered : hybrid_traits {
  using observer = offload::tier_link;
};

constexpr std::uint64_t longest = 96;

const std::array paged_group{full_attention({"kv", 1, 16, 4})};
const std::array window_groups{full_attention({"full", 1, 16, 4}),
                               sliding_window({"local", 1, 16, 4}, 10, 4)};
const std::array state_groups{full_attention({"full", 1, 16, 4}), state_snapshots("states", 1, 64, 8),
                              sliding_window({"local", 1, 16, 8}, 12)};

/// What a world is made of, drawn from its seed.
struct world_form {
  std::span<const layer_group> groups;
  std::uint64_t blocks = 0;
  std::uint64_t first_slots = 0;   // of each group
  std::uint64_t second_slots = 0;  // 0: there is no second tier
  offload::store_policy store{};
  offload::store_policy down{};
  bool faults = false;
};

template <class Cache>
Cache make_cache(const world_form& form) {
  if constexpr (std::is_same_v<Cache, paged_allocator<paged_tiered>>) {
    return Cache({.blocks = form.blocks,
                  .block_tokens = 4,
                  .max_sequences = 8,
                  .max_sequence_tokens = longest,
                  .name = "kv"});
  } else {
    return Cache({.groups = form.groups,
                  .budget_bytes = (form.blocks + 1) * 128,
                  .page_bytes = 128,
                  .max_sequences = 8,
                  .max_sequence_tokens = longest,
                  .name = "kv"});
  }
}

template <class Cache>
std::uint64_t block_ids(const Cache& cache) {
  if constexpr (requires { cache.groups(); }) {
    return cache.pool().block_ids();
  } else {
    return cache.max_physical_blocks();
  }
}

/// Requests, their loads and the transfers beneath them. @tparam Depth  tiers: of three, the middle one
/// demotes. @tparam Codec  of all tiers but the first
template <class Cache, std::size_t Depth, class Codec>
class world {
 public:
  world(std::uint64_t seed, const world_form& form)
      : form_(form),
        random_(seed),
        cache_(make_cache<Cache>(form)),
        contents_(form.groups, block_ids(cache_)),
        stream_(true),
        host_({.budget = tier_bytes(form.first_slots)}),
        below_(tier_bytes(form.second_slots == 0 ? 1 : form.second_slots) * 128),
        last_(tier_bytes(40) * 128),
        tiers_(make_tiers()) {}

  void run(std::uint32_t steps) {
    for (std::uint32_t i = 0; i < steps && wrong_.empty(); ++i)
      step();
    while (!requests_.empty())
      leave(requests_.size() - 1);
    stream_.end_all();
    tiers_.flush();
    for (std::size_t k = 0; k < Depth; ++k) {
      if (tiers_.stats().tiers[k].in_use != 0 && wrong_.empty()) wrong_ = "a slot is left in use";
    }
    check();
  }

  [[nodiscard]] const std::string& wrong() const { return wrong_; }
  [[nodiscard]] std::uint64_t loaded() const { return loaded_tokens_; }
  [[nodiscard]] std::uint64_t failed() const { return failed_loads_; }
  [[nodiscard]] std::uint64_t shared() const { return pending_; }
  [[nodiscard]] std::uint64_t withdrawn() const { return withdrawn_; }
  /// Returns how many blocks the third tier received, all by demotion, and gave back.
  [[nodiscard]] std::uint64_t demoted() const { return tiers_.stats().tiers[2].stored; }
  [[nodiscard]] std::uint64_t came_back() const { return tiers_.stats().tiers[2].loaded; }
  [[nodiscard]] std::uint64_t too_long() const { return tiers_.stats().tiers[1].too_long; }
  [[nodiscard]] std::uint64_t stored_bytes() const { return tiers_.stats().tiers[1].stored_bytes; }

 private:
  using lower_type = offload::kv_tier<manual_space, lru_eviction, Codec>;
  using two_tiers = kv_tiers<Cache, manual_mover, offload::kv_tier<host_space>, lower_type>;
  using three_tiers = kv_tiers<Cache, manual_mover, offload::kv_tier<host_space>, lower_type, lower_type>;
  using tiers_type = std::conditional_t<Depth == 2, two_tiers, three_tiers>;
  using load_type = typename tiers_type::load;

  struct request {
    kv_sequence sequence;
    std::unique_ptr<kv_chain> chain;
    load_type load;
    manual_fence written;  // of the kernels that wrote its contents
    std::uint32_t asked = 0;
    bool is_bad = false;  // its contents were spoiled
  };

  [[nodiscard]] std::uint64_t tier_bytes(std::uint64_t slots) const {
    std::uint64_t bytes = 0;
    for (const layer_group& group : form_.groups)
      bytes += slots * kv_contents::layers * group.block_tokens * 8;
    return bytes;
  }
  [[nodiscard]] kv_tiers_options options() {
    kv_tiers_options out{.store = form_.store,
                         .patience_ns = form_.faults ? std::uint64_t{60} : ~std::uint64_t{0},
                         .max_transfers = 6,
                         .max_loads = 4,
                         .load_headroom = 1,
                         .restore_bytes = random_.below(std::uint32_t{2}) == 0 ? 1U : 1U << 16,
                         .quiet_ns = 5,
                         .now_ns = [](void* at) noexcept { return ++*static_cast<std::uint64_t*>(at); },
                         .clock_context = &now_};
    for (std::size_t g = 0; g < form_.groups.size(); ++g)
      out.shares[g] = form_.groups[g].block_tokens;
    return out;
  }
  [[nodiscard]] lower_type lower(manual_space& space, std::uint64_t slots, offload::store_policy down) {
    constexpr bool is_coded = !std::is_same_v<Codec, offload::plain_blocks>;
    lower_type out(space, (is_coded ? 2 : 1) * tier_bytes(slots), down);
    out.granularity = 16;
    if (is_coded && random_.once_in(2)) out.slot_share = 1.2;  // too short for some forms
    out.coding_buffers = 2;
    return out;
  }
  [[nodiscard]] tiers_type make_tiers() {
    const offload::kv_tier first(host_, tier_bytes(form_.first_slots), form_.down);
    const auto second = lower(below_, form_.second_slots == 0 ? 1 : form_.second_slots, write_back{});
    if constexpr (Depth == 2) {
      return tiers_type(cache_, manual_mover(contents_, stream_), options(), first, second);
    } else {
      return tiers_type(cache_, manual_mover(contents_, stream_), options(), first, second,
                        lower(last_, 40, {}));
    }
  }

  void step() {
    ++now_;
    if (Depth == 3) end_transfer();  // a demotion needs two in turn
    switch (random_.below(std::uint32_t{16})) {
      case 0:
      case 1:
      case 2:
        return arrive();
      case 3:
      case 12:
      case 13:
        if (!requests_.empty()) leave(pick());
        leave_bad();
        return check();
      case 4:
      case 5:
      case 14:
        if (!requests_.empty()) proceed(requests_[pick()]);
        return;
      case 6:
        return tiers_.progress();
      case 7:
        if (random_.once_in(40)) reset();
        return;
      case 8:
        if (random_.once_in(10)) spoil();
        return;
      default:
        return end_transfer();
    }
  }
  [[nodiscard]] std::size_t pick() { return static_cast<std::size_t>(random_.below(requests_.size())); }

  /// Prompts share prefixes: few families, and each goes on in few ways.
  [[nodiscard]] std::vector<token_id> prompt() {
    const std::uint32_t family = random_.below(std::uint32_t{3});
    const std::uint64_t length = 8 + random_.below(std::uint64_t{56});
    std::vector<token_id> out;
    for (std::uint64_t i = 0; i < length; ++i) {
      const std::uint32_t way = i < 20 ? 0 : random_.below(std::uint32_t{40}) == 0 ? 1 : 0;
      out.push_back(static_cast<token_id>(family * 1000 + i + way * 500));
    }
    return out;
  }

  void arrive() {
    if (requests_.size() == 5) return;
    const auto created = cache_.create();
    if (!created) return;
    request made;
    made.sequence.id = *created;
    made.sequence.epoch = cache_.epoch();
    for (const token_id each : prompt())
      made.sequence.push(each);
    const std::span<const token_id> tokens(made.sequence.tokens);
    made.chain = std::make_unique<kv_chain>(cache_, tokens);
    const auto hit = cache_.match(*created, tokens.first(tokens.size() - 1)).value();
    made.sequence.computed = hit.tokens;
    look_at(made, hit.tokens, "matched");
    tiers_.touch(*made.chain, hit.tokens);
    const auto where = tiers_.lookup(*created, *made.chain);
    if (where.next == offload::answer::pending) ++pending_;
    if (where.loadable() != 0 && !random_.once_in(6)) {
      offload::load_limits limits{.upto = tokens.size() - 1};
      if (random_.once_in(3)) {  // loads by cost stop at any length
        limits.costs = offload::load_costs{.prefill_ns = random_.below(std::uint64_t{100})};
        for (auto& each : limits.costs->links)
          each.link.bytes_per_second = random_.below(std::uint64_t{8'000'000'000});
        const offload::load_choice choice = tiers_.choose_load(*created, *made.chain, *limits.costs);
        // The clock has moved on, so that a quiet tier may answer again.
        CHECK(choice.tokens <= tiers_.lookup(*created, *made.chain).tokens);
      }
      auto load = tiers_.prepare_load(*created, *made.chain, limits);
      if (load) {
        made.load = std::move(*load);
      } else if (cache_.tokens(*created) != hit.tokens) {
        cache_.release(*created).value();
        return;
      }
    }
    requests_.push_back(std::move(made));
    if (!requests_.back().load) compute_rest(requests_.size() - 1);
  }

  /// One request goes on: its load by a layer, or to its end.
  void proceed(request& of) {
    if (of.load) {
      // An engine that commits all its sequences at the end of a step caches nothing that is not there.
      if (random_.once_in(3)) cache_.commit(of.sequence.id).value();
      if (of.asked < kv_contents::layers && random_.once_in(2)) {
        for (std::size_t g = 0; g < form_.groups.size(); ++g)
          of.load.issue(of.asked, g).value();
        ++of.asked;
        return;
      }
      if (random_.once_in(12)) {
        of.load.cancel();
        of.is_bad = true;
        return;
      }
      return finish_load(of);
    }
    if (of.is_bad || cache_.epoch(of.sequence.id) != cache_.epoch()) return;
    grow(of, 1 + random_.below(std::uint64_t{6}));
  }

  void finish_load(request& of) {
    const offload::load_result came = of.load.complete();
    loaded_tokens_ += came.tokens > came.first ? came.tokens - came.first : 0;
    if (!came.is_complete()) ++failed_loads_;
    if (cache_.epoch(of.sequence.id) != cache_.epoch()) {
      of.is_bad = true;
      return;
    }
    if (!came.is_complete() && !cache_.truncate(of.sequence.id, came.tokens)) {
      of.is_bad = true;
      return;
    }
    of.sequence.computed = came.tokens;
    look_at(of, came.tokens, "loaded");
    for (std::size_t i = 0; i < requests_.size(); ++i) {
      if (&requests_[i] == &of) return compute_rest(i);
    }
  }

  /// Computes what the prompt lacks, and stores what it has.
  void compute_rest(std::size_t which) {
    request& of = requests_[which];
    const std::span<const token_id> rest =
        std::span<const token_id>(of.sequence.tokens).subspan(static_cast<std::size_t>(of.sequence.computed));
    if (!append(of, rest)) {
      leave(which);
      return;
    }
    write(of);
  }
  void grow(request& of, std::uint64_t count) {
    if (of.sequence.tokens.size() + count > longest) return;
    const std::size_t before = of.sequence.tokens.size();
    for (std::uint64_t i = 0; i < count; ++i)
      of.sequence.push(static_cast<token_id>(static_cast<std::size_t>(of.sequence.tokens.front()) + 100 +
                                             of.sequence.tokens.size()));
    if (!append(of, std::span<const token_id>(of.sequence.tokens).subspan(before))) {
      of.sequence.tokens.resize(before);
      of.sequence.digests.resize(before);
      return;
    }
    write(of);
  }
  bool append(request& of, std::span<const token_id> tokens) {
    const auto grown = cache_.append(of.sequence.id, tokens);
    if (!grown) return false;
    // On the stream, in order: what tiers save is read before it is written.
    stream_.end_all();
    if constexpr (requires { grown->copies; }) {
      for (const group_copy& each : grown->copies)
        copy_block(each.group, each.copy);
    } else if (grown->copy) {
      copy_block(0, grown->copy);
    }
    return true;
  }
  void copy_block(std::size_t g, const block_copy& copy) {
    std::copy_n(contents_.block(g, copy.source), contents_.block_bytes(g),
                contents_.block(g, copy.destination));
  }
  /// The kernels that write its contents have run, and the tiers are told, but only behind a fence.
  void write(request& of) {
    const auto table = table_of(of);
    const std::uint64_t first = of.sequence.computed;
    compute(contents_, of.sequence, first, of.sequence.tokens.size(), table);
    of.sequence.computed = of.sequence.tokens.size();
    if (random_.once_in(12)) return write_wrongly(of, first);
    cache_.commit(of.sequence.id).value();
    of.written = random_.once_in(8) ? kernels_.begin([](ending) {}) : manual_fence();
    tiers_.store(of.sequence.id, of.written).value();
    look_at(of, of.sequence.tokens.size(), "computed");
  }

  /// The kernels were wrong from some block on. That is found after it was stored, wholly or in part.
  void write_wrongly(request& of, std::uint64_t first) {
    const std::uint64_t from = (first + 7) / 8 * 8;
    if (from >= of.sequence.tokens.size()) return;
    for (std::size_t g = 0; g < form_.groups.size(); ++g) {
      const auto table = table_of(of)(g);
      for (std::size_t i = static_cast<std::size_t>(from / form_.groups[g].block_tokens); i < table.size();
           ++i) {
        if (table[i] != null_block) contents_.at(g, table[i], 1, 0) ^= 0xBAD;
      }
    }
    cache_.commit(of.sequence.id).value();
    tiers_.store(of.sequence.id).value();
    for (std::uint32_t i = random_.below(std::uint32_t{6}); i > 0; --i) {
      end_transfer();
      tiers_.progress();
    }
    cache_.invalidate(of.sequence.id, from).value();
    ++withdrawn_;
    of.is_bad = true;
  }

  void leave_bad() {
    for (std::size_t i = requests_.size(); i > 0; --i) {
      if (requests_[i - 1].is_bad) leave(i - 1);
    }
  }
  void leave(std::size_t which) {
    request& of = requests_[which];
    if (random_.once_in(2)) of.load.cancel();
    if (random_.once_in(2)) {
      // Its load is ended by its destructor, after the sequence.
      cache_.release(of.sequence.id).value();
    } else {
      of.load.cancel();
      cache_.release(of.sequence.id).value();
    }
    requests_.erase(requests_.begin() + static_cast<std::ptrdiff_t>(which));
  }

  void reset() {
    cache_.reset();
    for (request& each : requests_)
      each.is_bad = true;
  }

  /// An error spoils a block that sequences hold; somewhat later it is found, and withdrawn.
  void spoil() {
    if (requests_.empty()) return;
    request& of = requests_[pick()];
    if (of.load || of.is_bad) return;
    std::size_t g = static_cast<std::size_t>(random_.below(form_.groups.size()));
    const auto table = table_of(of)(g);
    const std::size_t index = static_cast<std::size_t>(random_.below(table.size()));
    if (table[index] == null_block) return;
    contents_.at(g, table[index], 1, 0) ^= 0xBAD;
    if (random_.once_in(2)) {
      tiers_.store(of.sequence.id).value();
      tiers_.progress();
    }
    const block_id bad = table[index];
    cache_.invalidate(bad).value();
    ++withdrawn_;
    for (request& each : requests_) {
      if (each.load) continue;
      if (cache_.prefix_tokens(each.sequence.id) < cache_.tokens(each.sequence.id)) each.is_bad = true;
    }
  }

  void end_transfer() {
    transfer_list* const lists[] = {&stream_, &below_.transfers(), &kernels_, &last_.transfers()};
    transfer_list& list = *lists[random_.below(std::uint32_t{Depth + 1})];
    const auto ready = list.can_end();
    if (ready.empty()) return;
    const std::size_t which = ready[static_cast<std::size_t>(random_.below(ready.size()))];
    ending how = ending::moved;
    if (form_.faults && (&list == &below_.transfers() || &list == &last_.transfers()) && random_.once_in(6))
      how = random_.once_in(2) ? ending::failed : ending::flipped;
    list.end(which, how);
    if (form_.faults && random_.once_in(20)) below_.refuse(1);
    if (Depth == 3 && form_.faults && random_.once_in(20)) last_.refuse(1);
  }

  [[nodiscard]] auto table_of(const request& of) const {
    return [this, id = of.sequence.id](std::size_t g) {
      if constexpr (requires { cache_.table(id, g); }) {
        return cache_.table(id, g);
      } else {
        return cache_.blocks(id);
      }
    };
  }
  void look_at(const request& of, std::uint64_t length, const char* when) {
    if (length == 0 || !wrong_.empty()) return;
    const std::string found = wrong_contents(contents_, of.sequence, length, table_of(of));
    if (!found.empty()) wrong_ = std::string(when) + ": " + found;
  }
  void check() {
    if (!wrong_.empty()) return;
    for (const std::string& each : cache_.audit())
      wrong_ = "cache: " + each;
    for (const std::string& each : tiers_.audit())
      wrong_ = "tiers: " + each;
    if (host_.used() > tier_bytes(form_.first_slots)) wrong_ = "the first tier passed its budget";
  }

  world_form form_;
  random_numbers random_;
  std::uint64_t now_ = 0;
  Cache cache_;
  kv_contents contents_;
  transfer_list stream_;
  transfer_list kernels_{false};
  host_space host_;
  manual_space below_;
  manual_space last_;
  tiers_type tiers_;
  std::vector<request> requests_;
  std::string wrong_;
  std::uint64_t loaded_tokens_ = 0;
  std::uint64_t failed_loads_ = 0;
  std::uint64_t pending_ = 0;
  std::uint64_t withdrawn_ = 0;
};

world_form draw(std::uint64_t seed, std::span<const layer_group> groups, bool faults) {
  random_numbers random(seed * 31 + 7);
  world_form out{.groups = groups, .faults = faults};
  out.blocks = 20 + random.below(std::uint64_t{24});
  out.first_slots = 4 + random.below(std::uint64_t{24});
  out.second_slots = 8 + random.below(std::uint64_t{80});
  const offload::store_policy policies[] = {write_through{}, write_through_selective<2>{}, write_back{},
                                            demoting<write_through>{}};
  out.store = policies[random.below(std::uint32_t{4})];
  out.down = policies[random.below(std::uint32_t{4})];
  return out;
}

struct totals {
  std::uint64_t loaded = 0;
  std::uint64_t failed = 0;
  std::uint64_t shared = 0;
  std::uint64_t withdrawn = 0;
  std::uint64_t demoted = 0;
  std::uint64_t came_back = 0;
  std::uint64_t too_long = 0;
  std::uint64_t stored_bytes = 0;
};

using varied = offload::coded<varied_codec<1>>;

template <class Cache, std::size_t Depth = 2, class Codec = offload::plain_blocks>
totals live(std::span<const layer_group> groups, bool faults, std::uint64_t count) {
  totals out;
  for (const std::uint64_t seed : llmmem_tests::seeds(count, count / 4)) {
    CAPTURE(seed);
    world_form form = draw(seed, groups, faults);
    if (Depth == 3) {  // so few slots that blocks go on to the third tier, and come back
      form.first_slots = 5 + form.first_slots % 6;
      form.second_slots = 4 + form.second_slots % 8;
    }
    world<Cache, Depth, Codec> each(seed, form);
    each.run(600);
    CHECK(each.wrong() == "");
    out.loaded += each.loaded();
    out.failed += each.failed();
    out.shared += each.shared();
    out.withdrawn += each.withdrawn();
    out.demoted += each.demoted();
    out.came_back += each.came_back();
    out.too_long += each.too_long();
    out.stored_bytes += each.stored_bytes();
    if (!each.wrong().empty()) break;
  }
  return out;
}

}  // namespace

TEST_CASE("no token of a paged cache with tiers has wrong contents") {
  const totals seen = live<paged_allocator<paged_tiered>>(paged_group, false, 400);
  CHECK(seen.loaded > 0);
  CHECK(seen.withdrawn > 0);
}

TEST_CASE("no token of a paged cache is wrong if transfers fail, flip bits or are late") {
  const totals seen = live<paged_allocator<paged_tiered>>(paged_group, true, 280);
  CHECK(seen.loaded > 0);
  CHECK(seen.failed > 0);
  const totals deep = live<paged_allocator<paged_tiered>, 3, varied>(paged_group, true, 120);
  CHECK(deep.loaded > 0);
  CHECK(deep.failed > 0);
  CHECK(deep.demoted > 0);
  CHECK(deep.came_back > 0);
  CHECK(deep.too_long > 0);
  CHECK(deep.stored_bytes > 0);
}

TEST_CASE("no token of a hybrid cache with tiers has wrong contents") {
  const totals windows = live<hybrid_allocator<hybrid_tiered>, 2, varied>(window_groups, false, 200);
  CHECK(windows.loaded > 0);
  const totals states = live<hybrid_allocator<hybrid_tiered>, 3>(state_groups, true, 200);
  CHECK(states.loaded > 0);
  CHECK(states.demoted > 0);
}
