/// @file
/// The objects of a `tiered_buffer`, and the objects that each is built on.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/tiering/detail/chunk_desk.hpp>
#include <llmmem/tiering/tier.hpp>
#include <llmmem/tiering/tiered_types.hpp>

#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// | object | knows | asks |
/// |---|---|---|
/// | `chunks` | handles, records, which chunks share one | none |
/// | `stack` | places, budgets, policies: which copies exist, which leaves next | `chunks` |
/// | `keys` | keys, and the entries of the last tier's index | `chunks` |
/// | `engine` | transfers over edges, from beginning to end | `chunks`, `stack`, `keys` |
/// | `mover` | which chunk moves, and when | `chunks`, `stack`, `engine` |
/// | `desk` | operations of callers on a chunk | all of them |
///
/// @par Thread safety   one thread at a time.
/// @par Errors          the constructor throws what `basic_tiered_buffer` documents.
template <class Traits, class... Tiers>
struct tiered_parts {
  using desk_type = chunk_desk<Traits, Tiers...>;
  using stack_type = typename desk_type::stack_type;
  static constexpr bool encodes = stack_type::encodes;

  tiered_parts(typename Traits::clock clock, typename Traits::observer observer,
               const tiered_options& options, const tier_place<typename Tiers::space_type>&... places)
      : chunks(checked(options, encodes)),
        stack(chunks, std::move(observer), options, places...),
        keys(chunks, stack.space(nth<stack_type::last>), options),
        engine(chunks, stack, keys, clock, options),
        mover(chunks, stack, engine, options),
        desk(chunks, stack, keys, engine, mover) {}

  [[nodiscard]] tiered_stats<stack_type::tiers> stats() const {
    tiered_stats<stack_type::tiers> now;
    stack.add_to(now);
    engine.add_to(now);
    mover.add_to(now);
    desk.add_to(now);
    return now;
  }
  [[nodiscard]] std::vector<std::string> audit() const {
    std::vector<std::string> found;
    chunks.audit(found);
    stack.audit(found);
    engine.audit(found);
    mover.audit(found);
    return found;
  }

  typename desk_type::table_type chunks;
  stack_type stack;
  LLMMEM_NO_UNIQUE_ADDRESS typename desk_type::keys_type keys;
  typename desk_type::engine_type engine;
  typename desk_type::mover_type mover;
  desk_type desk;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
