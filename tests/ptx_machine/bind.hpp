// bind.hpp: turns each statement of a kernel into an instruction: a handler, and the rows of its operands. A
// statement becomes a fault, raised when a lane executes it, if the machine does not know it or a word of its
// opcode.
#pragma once

#include "ptx_machine/accesses.hpp"
#include "ptx_machine/bind_arithmetic.hpp"
#include "ptx_machine/lanes.hpp"

namespace ptx_machine {

class binder : private arithmetic_binder {
 public:
  /// `variables`: addresses of the module's variables.
  binder(kernel& of, const std::vector<u64>& variables) : arithmetic_binder(of, variables) {
    for (const statement& each : of.statements) {
      inst i;
      i.from = &each;
      i.guard = each.guard < 0 ? no_guard : static_cast<u32>(each.guard);
      i.guard_flip = each.is_guard_negated ? ~u32{0} : 0;
      i.used_bytes = each.used_bytes;
      i.run = known(i, each);
      if (i.run == nullptr) {
        i.how = flow::plain;
        i.run = unsupported;
      }
      made_.insts.push_back(std::move(i));
    }
    // Lanes that come to the end return.
    inst last;
    last.how = flow::end;
    last.run = nothing;
    last.guard = no_guard;
    made_.insts.push_back(last);
    made_.file_bytes = made_.constants_at + static_cast<u32>(made_.constants.size());
  }
  [[nodiscard]] code take() { return std::move(made_); }

 private:
  handler known(inst& i, const statement& s) {
    opcode p(s.opcode);
    try {
      const handler found = bind(i, s, p);
      return p.is_used_up() ? found : nullptr;
    } catch (const std::out_of_range&) {  // other operands than the machine knows
      return nullptr;
    }
  }
  /// The lanes that take part are in this operand, or all.
  handler meets(inst& i, const operand* mask, handler run) {
    i.how = mask == nullptr ? flow::meet_all : flow::meet;
    if (mask != nullptr) i.target = row(*mask, 32);
    return run;
  }

  handler bind(inst& i, const statement& s, opcode& p) {
    const std::string_view name = p.name();
    const auto& o = s.operands;
    if (name == "bra") {
      p.ignore({"uni"});
      if (o.at(0).kind != operand_kind::label) return nullptr;
      i.how = flow::branch;
      i.target = o[0].row;
      return nothing;
    }
    if (name == "ret" || name == "exit") {
      p.ignore({"uni"});
      i.how = flow::end;
      return nothing;
    }
    if (name == "trap") return trap;
    if (name == "membar" || name == "fence") {
      p.ignore({"sc", "acq_rel", "acquire", "release", "cta", "cluster", "gpu", "gl", "sys"});
      return nothing;
    }
    if (name == "prefetch" || name == "prefetchu") {
      p.ignore({"global", "local", "L1", "L2", "L2::evict_last", "L2::evict_normal"});
      return nothing;
    }
    if (name == "nanosleep") return p.type() == "u32" ? nothing : nullptr;
    if (name == "griddepcontrol") return p.take_one({"launch_dependents", "wait"}) >= 0 ? nothing : nullptr;
    if (name == "bar" || name == "barrier") return bind_barrier(i, s, p);
    if (name == "ld" || name == "ldu") return bind_move<false>(i, s, p);
    if (name == "st") return bind_move<true>(i, s, p);
    if (name == "atom" || name == "red") return bind_atom(i, s, p);
    if (name == "cvta") {
      if (p.type() != "u64") return nullptr;
      rows(i, s, {"u64", "u64"});
      const space of = space_of(p);
      const u64 window = of == space::shared  ? shared_window
                         : of == space::local ? local_window
                         : of == space::param ? param_window
                                              : 0;
      i.row[2] = constant(p.take("to") ? 0 - window : window, 64);
      return map_rows<[](u64 a, u64 b) { return a + b; }, u64, u64, u64>;
    }
    if (name == "shfl" || name == "vote" || name == "match" || name == "redux" || name == "activemask" ||
        name == "mma" || name == "movmatrix")
      return bind_lanes(i, s, p);
    return bind_arithmetic(i, s, p);
  }
  /// Barriers of all threads, and those that combine a predicate of each. One of some threads is not known.
  handler bind_barrier(inst& i, const statement& s, opcode& p) {
    const auto& o = s.operands;
    p.ignore({"cta", "aligned"});
    if (p.take("warp")) return p.take("sync") && o.size() == 1 ? meets(i, &o[0], meet_in_order) : nullptr;
    const bool combines = p.take("red");
    if (combines) {
      const int how = p.take_one({"and", "or", "popc"});
      if (how < 0 || o.size() != 3 || p.type() != (how == 2 ? "u32" : "pred")) return nullptr;
      i.size = static_cast<u8>(combine_and + how);
      i.row[0] = row(o[0], how == 2 ? 32 : 1);
      i.row[1] = row(o[2], 1);
      i.offset = o[2].is_negated ? ~u64{0} : 0;
    }
    const operand& which = o.at(combines ? 1 : 0);
    if ((!combines && (!p.take("sync") || o.size() != 1)) || which.kind != operand_kind::number)
      return nullptr;
    made_.has_barrier = true;
    i.how = flow::barrier;
    i.form = static_cast<u8>(which.number);
    return nothing;
  }

  template <bool Stores>
  handler bind_move(inst& i, const statement& s, opcode& p) {
    const std::string_view type = p.type();
    const operand& value = s.operands.at(Stores ? 1 : 0);
    address(i, s.operands.at(Stores ? 0 : 1), i.row[1]);
    i.where = space_of(p);
    i.is_relaxed = p.take_one({"volatile", "relaxed", "acquire", "release", "mmio"}) >= 0;
    // Scopes and caching change nothing here.
    p.ignore({"weak", "cta", "cluster", "gpu", "sys", "nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt"});
    p.ignore({"L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last",
              "L1::no_allocate", "L2::evict_normal", "L2::evict_first", "L2::evict_last", "L2::cache_hint",
              "L2::64B", "L2::128B", "L2::256B"});
    const number_type of = number_type::of(type);
    if (of.is_pair || (of.kind != 'u' && of.kind != 's' && of.kind != 'f')) return nullptr;
    const int vector = p.take_one({"v2", "v4"});
    const std::size_t wanted = vector < 0 ? 1 : vector == 0 ? 2 : 4;
    std::vector<operand> parts =
        value.kind == operand_kind::tuple ? value.parts : std::vector<operand>{value};
    unsigned bits = std::max<unsigned>(of.bits, 16);
    for (const operand& each : parts)
      bits = std::max<unsigned>(bits, each.bits);
    for (const operand& each : parts) {
      if (each.kind == operand_kind::none && !Stores)
        i.more.push_back(unread_row(bits));
      else
        i.more.push_back(row(each, bits));
    }
    const std::size_t count = parts.size();
    if (count != wanted || (of.kind == 'f' && of.bits == 16)) return nullptr;
    switch (of.bits) {
      case 8:
        return of.kind == 's' ? moving<Stores, i8>(count, bits) : moving<Stores, u8>(count, bits);
      case 16:
        return of.kind == 's' ? moving<Stores, i16>(count, bits) : moving<Stores, u16>(count, bits);
      case 32:
        return of.kind == 's' ? moving<Stores, i32>(count, bits) : moving<Stores, u32>(count, bits);
      case 64:
        return moving<Stores, u64>(count, bits);
      default:
        return nullptr;
    }
  }
  handler bind_atom(inst& i, const statement& s, opcode& p) {
    const bool tells = p.name() == "atom" && s.operands.at(0).kind != operand_kind::none;
    const std::size_t first = p.name() == "atom" ? 1 : 0;
    const std::string_view type = p.type();
    if (tells) i.row[0] = row(s.operands[0], width(type));
    address(i, s.operands.at(first), i.row[1]);
    i.row[2] = row(s.operands.at(first + 1), width(type), type == "f32");
    if (s.operands.size() > first + 2) i.row[3] = row(s.operands[first + 2], width(type));
    i.where = space_of(p);
    i.is_relaxed = true;
    p.ignore({"relaxed", "acquire", "release", "acq_rel", "cta", "cluster", "gpu", "sys", "L2::cache_hint"});
    const int op = p.take_one({"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"});
    if (op < 0 || (s.operands.size() > first + 2) != (static_cast<atom_op>(op) == atom_op::cas))
      return nullptr;
    if (type[0] == 'f' && static_cast<atom_op>(op) != atom_op::add) return nullptr;
    i.size = static_cast<u8>(op);
    return tells ? atoms<true>(type) : atoms<false>(type);
  }
  handler bind_lanes(inst& i, const statement& s, opcode& p) {
    const auto& o = s.operands;
    const std::string_view name = p.name();
    if (name == "mma") return bind_mma(i, s, p);
    const std::string_view type = p.type();
    if (name == "activemask") {
      i.row[0] = row(o.at(0), 32);
      return [](warp& w, inst& by) { put_all(w, by.row[0], w.now); };
    }
    if (!p.take("sync")) return nullptr;
    if (name == "shfl") {
      for (std::size_t n = 0; n < 4; ++n)
        i.row[n] = row(o.at(n), 32);
      if (!o[0].parts.empty()) i.more.push_back(row(o[0].parts[0], 1));
      const int mode = p.take_one({"bfly", "idx", "up", "down"});
      i.form = static_cast<u8>(mode);
      return mode < 0 || type != "b32" ? nullptr : meets(i, &o.at(4), shuffle);
    }
    if (name == "vote") {
      const int mode = p.take_one({"all", "any", "uni", "ballot"});
      if (mode < 0) return nullptr;
      i.form = static_cast<u8>(mode | (o.at(1).is_negated ? 4 : 0));
      i.row[0] = row(o[0], mode == 3 ? 32 : 1);
      i.row[1] = row(o[1], 1);
      return meets(i, &o.at(2), vote);
    }
    if (name == "match") {
      const int mode = p.take_one({"any", "all"});
      if (mode < 0 || (type != "b32" && type != "b64")) return nullptr;
      i.form = static_cast<u8>(mode);
      i.size = static_cast<u8>(width(type) / 8);
      i.row[0] = row(o.at(0), 32);
      i.row[1] = row(o.at(1), width(type));
      if (!o[0].parts.empty()) i.more.push_back(row(o[0].parts[0], 1));
      return meets(i, &o.at(2), match);
    }
    if (name == "redux") {
      if (type != "u32" && type != "s32" && type != "b32") return nullptr;
      i.row[0] = row(o.at(0), 32);
      i.row[1] = row(o.at(1), 32);
      const handler by[] = {
          reduces<[](auto a, auto b) { return static_cast<u32>(a) + static_cast<u32>(b); }>(type),
          reduces<[](auto a, auto b) { return extreme<true>(a, b); }>(type),
          reduces<[](auto a, auto b) { return extreme<false>(a, b); }>(type),
          reduces<[](auto a, auto b) { return a & b; }>(type),
          reduces<[](auto a, auto b) { return a | b; }>(type),
          reduces<[](auto a, auto b) { return a ^ b; }>(type)};
      const int op = p.take_one({"add", "min", "max", "and", "or", "xor"});
      return op < 0 ? nullptr : meets(i, &o.at(2), by[op]);
    }
    // movmatrix
    if (!p.take("aligned") || !p.take("trans") || !p.take("m8n8") || type != "b16") return nullptr;
    rows(i, s, {"b32", "b32"});
    return meets(i, nullptr, transpose_matrix);
  }
  handler bind_mma(inst& i, const statement& s, opcode& p) {
    // mma.sync.aligned.SHAPE.row.col.f32.A.B.f32
    if (p.size() != 10 || p.at(1) != "sync" || p.at(2) != "aligned" || p.at(4) != "row" || p.at(5) != "col" ||
        p.at(6) != "f32" || p.at(9) != "f32")
      return nullptr;
    const std::string_view shape = p.at(3);
    const number_type type = number_type::of(p.at(7)), other = number_type::of(p.at(8));
    const bool is_16 = type.kind == 'b' || (type.kind == 'f' && type.bits == 16);
    const bool is_8 = type.kind == '4' || type.kind == '5';
    if (p.at(7) != p.at(8) && (!is_8 || (other.kind != '4' && other.kind != '5'))) return nullptr;
    const std::size_t count = is_16 && shape == "m16n8k8"                                       ? 2
                              : (is_16 && shape == "m16n8k16") || (is_8 && shape == "m16n8k32") ? 4
                                                                                                : 0;
    if (count == 0) return nullptr;
    const std::size_t counts[] = {4, count, count / 2, 4};
    for (std::size_t n = 0; n < 4; ++n) {
      const operand& o = s.operands.at(n);
      const std::vector<operand> parts = o.kind == operand_kind::tuple ? o.parts : std::vector<operand>{o};
      if (parts.size() != counts[n]) return nullptr;
      for (const operand& each : parts)
        i.more.push_back(row(each, 32));
    }
    i.size = static_cast<u8>(count);
    i.form = static_cast<u8>(type.kind);
    i.more.push_back(static_cast<u32>(other.kind));
    return meets(i, nullptr, multiply_matrices);
  }
};

}  // namespace ptx_machine
