/// @file
/// `versioned<T, Retain>`: versions of a piece of state, and the lifetime of old ones.
#pragma once

#include <llmmem/version/concepts.hpp>
#include <llmmem/version/latest.hpp>

namespace llmmem {
inline namespace v0 {

/// A piece of state with versions; `Retain` decides which stay:
///
/// | `Retain`        | keeps                                     | header             |
/// |---|---|---|
/// | `latest`        | the newest, and what is pinned            | latest.hpp         |
/// | `double_buffer` | the same, in two slots                    | double_buffer.hpp  |
/// | `stash<n>`      | the newest n                              | stash.hpp          |
/// | `delta`         | as many as `versions` and `bytes` allow   | delta.hpp          |
/// | `copy_on_write` | snapshots of bytes written in place       | cow_range.hpp      |
///
///     versioned<weights, stash<3>> kept({}, initial_weights);
///     const version_id used = kept.publish(initial_weights).value();
///     const auto seen = kept.pin(used).value();  // const weights& as *seen, for as long as `seen` lives
///
/// Pinned views must end before the state.
template <class T, class Retain = latest>
  requires retain_policy<Retain, T>
using versioned = typename Retain::template state<T>;

}  // namespace v0
}  // namespace llmmem
