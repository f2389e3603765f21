/// @file
/// An eviction policy chosen by name at run time.
#pragma once

#include <llmmem/eviction/arc.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/eviction/fifo.hpp>
#include <llmmem/eviction/gdsf.hpp>
#include <llmmem/eviction/hazard.hpp>
#include <llmmem/eviction/length_aware.hpp>
#include <llmmem/eviction/lfu.hpp>
#include <llmmem/eviction/lru.hpp>
#include <llmmem/eviction/min.hpp>
#include <llmmem/eviction/retention.hpp>
#include <llmmem/eviction/s3fifo.hpp>
#include <llmmem/eviction/sieve.hpp>
#include <llmmem/eviction/slru.hpp>
#include <llmmem/eviction/wtinylfu.hpp>

#include <array>
#include <cstddef>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// Any `eviction_policy` behind a table of functions, for engines that read the policy's name from a
/// configuration.
///
/// Each operation of an LRU costs one comparison in addition to the policy's own work, each of another policy
/// one indirect call; there are no virtual functions and no RTTI. Movable; a moved-from object has a capacity
/// of 0 and no victim, and ignores every slot.
///
/// @par Thread safety   that of the policy inside.
/// @par Errors   construction throws what the policy's constructor throws; `make_eviction` also
///      `argument_error`.
class any_eviction {
 public:
  /// Holds an LRU: the library's default.
  explicit any_eviction(slot_count capacity, const metadata_source& source = {})
      : any_eviction(std::in_place_type<lru_eviction>, capacity, source) {}

  /// Holds a `Policy`: the library's or the engine's own.
  template <eviction_policy Policy>
  any_eviction(std::in_place_type_t<Policy>, slot_count capacity, const metadata_source& source = {})
      : functions_(&functions_of<Policy>), source_(source) {
    void* memory = detail::allocate_metadata(source_, sizeof(Policy), alignof(Policy), "any_eviction");
    try {
      auto* const made = ::new (memory) Policy(capacity, source);
      policy_ = made;
      if constexpr (std::is_same_v<Policy, lru_eviction>) lru_ = made;
    } catch (...) {
      source_.deallocate(source_.context, memory, sizeof(Policy), alignof(Policy));
      throw;
    }
  }

  any_eviction(any_eviction&& other) noexcept
      : lru_(std::exchange(other.lru_, nullptr)),
        policy_(std::exchange(other.policy_, nullptr)),
        functions_(std::exchange(other.functions_, &functions_of_none)),
        source_(other.source_) {}

  any_eviction& operator=(any_eviction&& other) noexcept {
    std::swap(lru_, other.lru_);
    std::swap(policy_, other.policy_);
    std::swap(functions_, other.functions_);
    std::swap(source_, other.source_);
    return *this;
  }

  ~any_eviction() {
    if (policy_ != nullptr) functions_->destroy(policy_, source_);
  }

  void insert(slot_id slot, const access_hint& hint = {}) noexcept {
    if (lru_ != nullptr) return lru_->insert(slot, hint);
    functions_->insert(policy_, slot, hint);
  }
  void touch(slot_id slot, const access_hint& hint = {}) noexcept {
    if (lru_ != nullptr) return lru_->touch(slot, hint);
    functions_->touch(policy_, slot, hint);
  }
  void pin(slot_id slot) noexcept {
    if (lru_ != nullptr) return lru_->pin(slot);
    functions_->pin(policy_, slot);
  }
  void unpin(slot_id slot) noexcept {
    if (lru_ != nullptr) return lru_->unpin(slot);
    functions_->unpin(policy_, slot);
  }
  /// Unpins `slots` in their order: one call for all of them.
  void unpin(std::span<const slot_id> slots) noexcept {
    if (lru_ != nullptr) {
      for (const slot_id slot : slots)
        lru_->unpin(slot);
      return;
    }
    functions_->unpin_all(policy_, slots);
  }
  void erase(slot_id slot) noexcept {
    if (lru_ != nullptr) return lru_->erase(slot);
    functions_->erase(policy_, slot);
  }
  void evict(slot_id slot) noexcept {
    if (lru_ != nullptr) return lru_->erase(slot);
    functions_->evict(policy_, slot);
  }
  /// Evicts the victim and returns it, or `no_slot` if there is none: one call for `victim` and `evict`.
  slot_id evict_victim() noexcept {
    if (lru_ != nullptr) return detail::evict_victim(*lru_);
    return functions_->evict_victim(policy_);
  }
  void expect(slot_id slot, std::uint64_t next_use) noexcept { functions_->expect(policy_, slot, next_use); }
  void relabel(slot_id from, slot_id to) noexcept { functions_->relabel(policy_, from, to); }
  void advance(std::uint64_t now) noexcept { functions_->advance(policy_, now); }
  void retain(slot_id slot, retention keep) noexcept { functions_->retain(policy_, slot, keep); }

  /// Whether the policy inside uses hints.
  [[nodiscard]] bool reads_hints() const noexcept { return functions_->reads_hints; }

  [[nodiscard]] std::optional<slot_id> victim() const noexcept {
    if (lru_ != nullptr) return lru_->victim();
    return functions_->victim(policy_);
  }
  [[nodiscard]] bool is_candidate(slot_id slot) const noexcept {
    return functions_->is_candidate(policy_, slot);
  }
  [[nodiscard]] slot_count capacity() const noexcept { return functions_->capacity(policy_); }
  [[nodiscard]] std::size_t metadata_bytes() const noexcept { return functions_->metadata_bytes(policy_); }

 private:
  struct function_table {
    void (*insert)(void*, slot_id, const access_hint&) noexcept;
    void (*touch)(void*, slot_id, const access_hint&) noexcept;
    void (*pin)(void*, slot_id) noexcept;
    void (*unpin)(void*, slot_id) noexcept;
    void (*unpin_all)(void*, std::span<const slot_id>) noexcept;
    void (*erase)(void*, slot_id) noexcept;
    void (*evict)(void*, slot_id) noexcept;
    slot_id (*evict_victim)(void*) noexcept;
    void (*expect)(void*, slot_id, std::uint64_t) noexcept;
    void (*relabel)(void*, slot_id, slot_id) noexcept;
    void (*advance)(void*, std::uint64_t) noexcept;
    void (*retain)(void*, slot_id, retention) noexcept;
    std::optional<slot_id> (*victim)(const void*) noexcept;
    bool (*is_candidate)(const void*, slot_id) noexcept;
    slot_count (*capacity)(const void*) noexcept;
    std::size_t (*metadata_bytes)(const void*) noexcept;
    void (*destroy)(void*, const metadata_source&) noexcept;
    bool reads_hints;
  };

  template <class P>
  static constexpr function_table functions_of{
      [](void* p, slot_id slot, const access_hint& hint) noexcept { static_cast<P*>(p)->insert(slot, hint); },
      [](void* p, slot_id slot, const access_hint& hint) noexcept { static_cast<P*>(p)->touch(slot, hint); },
      [](void* p, slot_id slot) noexcept { static_cast<P*>(p)->pin(slot); },
      [](void* p, slot_id slot) noexcept { static_cast<P*>(p)->unpin(slot); },
      [](void* p, std::span<const slot_id> slots) noexcept {
        for (const slot_id slot : slots)
          static_cast<P*>(p)->unpin(slot);
      },
      [](void* p, slot_id slot) noexcept { static_cast<P*>(p)->erase(slot); },
      [](void* p, slot_id slot) noexcept { detail::evict(*static_cast<P*>(p), slot); },
      [](void* p) noexcept { return detail::evict_victim(*static_cast<P*>(p)); },
      [](void* p, slot_id slot, std::uint64_t use) noexcept {
        detail::expect(*static_cast<P*>(p), slot, use);
      },
      [](void* p, slot_id from, slot_id to) noexcept { detail::relabel(*static_cast<P*>(p), from, to); },
      [](void* p, std::uint64_t now) noexcept { detail::advance(*static_cast<P*>(p), now); },
      [](void* p, slot_id slot, retention keep) noexcept { detail::retain(*static_cast<P*>(p), slot, keep); },
      [](const void* p) noexcept { return static_cast<const P*>(p)->victim(); },
      [](const void* p, slot_id slot) noexcept { return static_cast<const P*>(p)->is_candidate(slot); },
      [](const void* p) noexcept { return static_cast<const P*>(p)->capacity(); },
      [](const void* p) noexcept { return sizeof(P) + static_cast<const P*>(p)->metadata_bytes(); },
      [](void* p, const metadata_source& source) noexcept {
        static_cast<P*>(p)->~P();
        source.deallocate(source.context, p, sizeof(P), alignof(P));
      },
      !ignores_hints<P>};

  // Of a moved-from object, which has no policy.
  static constexpr function_table functions_of_none{
      [](void*, slot_id, const access_hint&) noexcept {},
      [](void*, slot_id, const access_hint&) noexcept {},
      [](void*, slot_id) noexcept {},
      [](void*, slot_id) noexcept {},
      [](void*, std::span<const slot_id>) noexcept {},
      [](void*, slot_id) noexcept {},
      [](void*, slot_id) noexcept {},
      [](void*) noexcept { return no_slot; },
      [](void*, slot_id, std::uint64_t) noexcept {},
      [](void*, slot_id, slot_id) noexcept {},
      [](void*, std::uint64_t) noexcept {},
      [](void*, slot_id, retention) noexcept {},
      [](const void*) noexcept { return std::optional<slot_id>{}; },
      [](const void*, slot_id) noexcept { return false; },
      [](const void*) noexcept { return slot_count{0}; },
      [](const void*) noexcept { return std::size_t{0}; },
      [](void*, const metadata_source&) noexcept {},
      false};

  // The policy if it is an LRU: the most frequent choice gets direct calls, which a compiler inlines, for one
  // comparison in the calls of the other policies.
  lru_eviction* lru_ = nullptr;
  void* policy_ = nullptr;
  const function_table* functions_;
  metadata_source source_;
};

static_assert(eviction_policy<any_eviction>);
template <>
inline constexpr bool detail::evicts_victims<any_eviction> = true;

namespace detail {

struct named_eviction {
  std::string_view name;
  any_eviction (*make)(slot_count, const metadata_source&);
};

template <eviction_policy Policy>
[[nodiscard]] any_eviction make_any(slot_count capacity, const metadata_source& source) {
  return any_eviction(std::in_place_type<Policy>, capacity, source);
}

inline constexpr std::array named_evictions{named_eviction{"lru", make_any<lru_eviction>},
                                            named_eviction{"fifo", make_any<fifo_eviction>},
                                            named_eviction{"lfu", make_any<lfu_eviction>},
                                            named_eviction{"min", make_any<min_eviction>},
                                            named_eviction{"slru", make_any<slru_eviction>},
                                            named_eviction{"arc", make_any<arc_eviction>},
                                            named_eviction{"s3fifo", make_any<s3fifo_eviction>},
                                            named_eviction{"sieve", make_any<sieve_eviction>},
                                            named_eviction{"wtinylfu", make_any<wtinylfu_eviction>},
                                            named_eviction{"gdsf", make_any<gdsf_eviction>},
                                            named_eviction{"length_aware", make_any<length_aware_eviction>},
                                            named_eviction{"retention", make_any<retention_eviction>},
                                            named_eviction{"hazard", make_any<hazard_eviction>}};

}  // namespace detail

/// The names that `make_eviction` accepts, in the order in which reports list them.
inline constexpr auto eviction_names = [] {
  std::array<std::string_view, detail::named_evictions.size()> names;
  for (std::size_t i = 0; i < names.size(); ++i)
    names[i] = detail::named_evictions[i].name;
  return names;
}();

/// Creates the policy called `name`.
/// @throws argument_error for a name that is not in `eviction_names`; the error lists the known names.
[[nodiscard]] inline any_eviction make_eviction(std::string_view name, slot_count capacity,
                                                const metadata_source& source = {}) {
  std::string known;
  for (const detail::named_eviction& each : detail::named_evictions) {
    if (each.name == name) return each.make(capacity, source);
    known += (known.empty() ? "" : ", ") + std::string(each.name);
  }
  throw argument_error("make_eviction: no policy is called \"" + std::string(name) + "\"; known are " +
                       known);
}

}  // namespace v0
}  // namespace llmmem
