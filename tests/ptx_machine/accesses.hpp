// accesses.hpp: loads, stores and atomic operations. Each lane's access goes through warp::go, which checks
// it.
#pragma once

#include "ptx_machine/arithmetic.hpp"

namespace ptx_machine {

/// Calls `act(lane, address)` for each lane that executes `i`, an access of so many `bytes`.
template <class Act>
void each_access(warp& w, inst& i, unsigned bytes, const Act& act) {
  u64 at[32];
  w.addresses(i, i.row[1], at);
  if (w.in.options.profiles) w.profile(i, at, bytes);
  for (u32 m = w.now; m != 0; m &= m - 1) {
    const auto k = static_cast<u32>(std::countr_zero(m));
    act(k, at[k]);
  }
}
/// ld of N values of type T for each lane. inst::more has the rows of the values, of type Row, in order.
template <class T, class Row, unsigned N>
void load(warp& w, inst& i) {
  each_access(w, i, sizeof(T) * N, [&](u32 k, u64 at) {
    T value[N];
    std::memcpy(value, w.go<false, sizeof(T) * N>(i, k, at), sizeof value);
    for (unsigned n = 0; n < N; ++n)
      w.row<Row>(i.more[n])[k] = static_cast<Row>(value[n]);
  });
}
template <class T, class Row, unsigned N>
void store(warp& w, inst& i) {
  each_access(w, i, sizeof(T) * N, [&](u32 k, u64 at) {
    T value[N];
    for (unsigned n = 0; n < N; ++n)
      value[n] = static_cast<T>(w.row<Row>(i.more[n])[k]);
    std::memcpy(w.go<true, sizeof(T) * N>(i, k, at, reinterpret_cast<const u8*>(value)), value, sizeof value);
  });
}
template <bool Stores, class T, class Row>
[[nodiscard]] handler moving(std::size_t count) {
  if constexpr (sizeof(T) <= sizeof(Row)) {
    if (count == 1) return Stores ? store<T, Row, 1> : load<T, Row, 1>;
    if (count == 2) return Stores ? store<T, Row, 2> : load<T, Row, 2>;
    if constexpr (sizeof(T) <= 4) {
      if (count == 4) return Stores ? store<T, Row, 4> : load<T, Row, 4>;
    }
  }
  return nullptr;
}
template <bool Stores, class T>
[[nodiscard]] handler moving(std::size_t count, unsigned row_bits) {
  using row16 = std::conditional_t<std::is_signed_v<T>, i16, u16>;
  using row32 = std::conditional_t<std::is_signed_v<T>, i32, u32>;
  using row64 = std::conditional_t<std::is_signed_v<T>, i64, u64>;
  return row_bits == 16   ? moving<Stores, T, row16>(count)
         : row_bits == 32 ? moving<Stores, T, row32>(count)
                          : moving<Stores, T, row64>(count);
}

enum class atom_op : u8 { add, min, max, and_, or_, xor_, exch, cas, inc, dec };
/// What `op` leaves in memory that held `old`. The PTX ISA: atom.add.f32 flushes subnormals in global memory,
/// and does not in shared memory.
template <class T>
[[nodiscard]] T updated(atom_op op, T old, T by, T swapped, bool is_shared) {
  switch (op) {
    case atom_op::add:
      if constexpr (std::is_same_v<T, float>)
        return settled(is_shared ? old + by : flushed(flushed(old) + flushed(by)));
      else
        return static_cast<T>(old + by);
    case atom_op::min:
      return extreme<true>(old, by);
    case atom_op::max:
      return extreme<false>(old, by);
    case atom_op::exch:
      return by;
    case atom_op::cas:
      return std::memcmp(&old, &by, sizeof old) == 0 ? swapped : old;
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    switch (op) {
      case atom_op::and_:
        return old & by;
      case atom_op::or_:
        return old | by;
      case atom_op::xor_:
        return old ^ by;
      case atom_op::inc:
        return old >= by ? 0 : old + 1;
      default:
        return old == 0 || old > by ? by : old - 1;
    }
  }
  return old;
}
/// atom and red. inst::size is the atom_op. Row 2 has the operand, row 3 the new value of a compare-and-swap.
/// Tells: the lane gets the old value.
template <class T, bool Tells>
void atom(warp& w, inst& i) {
  const auto op = static_cast<atom_op>(i.size);
  each_access(w, i, sizeof(T), [&](u32 k, u64 at) {
    static_cast<void>(w.go<false, sizeof(T)>(i, k, at));
    u8* const to = w.go<true, sizeof(T)>(i, k, at);
    T old;
    std::memcpy(&old, to, sizeof old);
    const bool is_shared = i.where == space::shared || (i.where == space::generic && at >= shared_window);
    const T swapped = op == atom_op::cas ? w.row<T>(i.row[3])[k] : T{};
    const T made = updated(op, old, w.row<T>(i.row[2])[k], swapped, is_shared);
    std::memcpy(to, &made, sizeof made);
    if (Tells) w.row<T>(i.row[0])[k] = old;
  });
}
template <bool Tells>
[[nodiscard]] handler atoms(std::string_view type) {
  return by_type(type, []<class T>(T) -> handler {
    if constexpr (sizeof(T) >= 4)
      return atom<T, Tells>;
    else
      return nullptr;
  });
}

}  // namespace ptx_machine
