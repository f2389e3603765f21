// ptx_bind.hpp: makes of each statement of a kernel what executes it: a function, and the rows of its
// operands. Numbers, special registers and addresses of variables become rows as well, so that no function
// has to tell them from registers.
#pragma once

#include "ptx_machine/accesses.hpp"
#include "ptx_machine/lanes.hpp"

namespace ptx_machine {

class binder {
 public:
  /// `variables`: addresses of the module's variables.
  binder(kernel& of, const std::vector<u64>& variables) : of_(of), variables_(variables) {
    made_.of = &of;
    made_.special_at = (of.file_bytes + 63) / 64 * 64;
    made_.constants_at = made_.special_at + 128 * special_rows;
    for (const statement& each : of.statements) {
      inst i;
      i.from = &each;
      i.guard = each.guard < 0 ? no_guard : static_cast<u32>(each.guard);
      i.guard_flip = each.is_guard_negated ? ~u32{0} : 0;
      i.used_bytes = each.used_bytes;
      handler found = nullptr;
      try {
        found = bind(i, each);
      } catch (const std::out_of_range&) {  // it has other operands than what is known
      }
      i.run = found == nullptr ? unsupported : found;
      made_.insts.push_back(std::move(i));
    }
    // Whoever comes to the end returns.
    inst last;
    last.how = flow::end;
    last.run = nothing;
    last.guard = no_guard;
    made_.insts.push_back(last);
    made_.file_bytes = made_.constants_at + static_cast<u32>(made_.constants.size());
  }
  [[nodiscard]] code take() { return std::move(made_); }

 private:
  using words = std::vector<std::string_view>;
  static constexpr u64 no_reader = 0xA5A5'A5A5'A5A5'A5A5;  // of the row that takes what nobody reads

  [[nodiscard]] static bool has(const words& parts, std::string_view word) {
    return std::find(parts.begin(), parts.end(), word) != parts.end();
  }
  [[nodiscard]] static unsigned width(std::string_view type) {
    const number_type of = number_type::of(type);
    return type == "pred" ? 1 : std::max(16U, of.bits * (of.is_pair ? 2U : 1U));
  }

  u32 constant(u64 value, unsigned bits) {
    const auto [found, is_new] = known_.try_emplace({value, bits}, 0);
    if (is_new) {
      found->second = made_.constants_at + static_cast<u32>(made_.constants.size());
      for (u32 k = 0; k < (bits == 1 ? 1 : 32); ++k) {
        for (unsigned b = 0; b < std::max(bits, 32U) / 8; b += 1) {
          if (bits != 16 || b < 2) made_.constants.push_back(static_cast<u8>(value >> (8 * b)));
        }
      }
      made_.constants.resize((made_.constants.size() + 63) / 64 * 64);
    }
    return found->second;
  }
  [[nodiscard]] u64 address_of(const operand& name) const {
    const symbol& of = name.variable;
    if (of.is_of_module) return variables_.at(of.offset) + name.number;
    if (of.where == space::generic) throw std::out_of_range("a name that is not known");
    // Shared memory whose size a launch tells lies behind all other.
    if (of.where == space::shared && of.size == 0) return (of_.shared_bytes + 15) / 16 * 16 + name.number;
    return of.offset + name.number;
  }
  /// The row of an operand that has so many bits.
  u32 row(const operand& o, unsigned bits, bool is_float = false) {
    switch (o.kind) {
      case operand_kind::reg:
        if (o.bits != bits) throw std::out_of_range("a register of another size");
        return o.row;
      case operand_kind::special:
        for (u32 r = 0; r < special_rows; ++r) {
          if (o.text == special_names[r]) return made_.special_at + 128 * r;
        }
        throw std::out_of_range("a special register that is not known");
      case operand_kind::number: {
        u64 value = o.number;
        if (bits == 1) value = value != 0 ? ~u64{0} : 0;
        if (is_float && bits == 32 && o.number_form == 'd')
          value = std::bit_cast<u32>(static_cast<float>(std::bit_cast<double>(o.number)));
        return constant(value, bits);
      }
      case operand_kind::name:
        return constant(address_of(o), bits);
      default:
        throw std::out_of_range("an operand of another kind");
    }
  }
  void rows(inst& i, const statement& s, std::initializer_list<std::string_view> types) {
    std::size_t n = 0;
    for (const std::string_view type : types) {
      i.row[n] = row(s.operands.at(n), width(type), type == "f32");
      ++n;
    }
  }
  void address(inst& i, const operand& o, u32& to) {
    if (o.kind == operand_kind::reg) {
      i.is_narrow_address = o.bits == 32;
      to = row(o, o.bits);
      i.offset = o.number;
    } else {
      i.is_narrow_address = false;
      to = row(o, 64);
    }
  }
  [[nodiscard]] static space space_of(const words& parts) {
    return has(parts, "global")                                ? space::global
           : has(parts, "shared") || has(parts, "shared::cta") ? space::shared
           : has(parts, "local")                               ? space::local
           : has(parts, "param") || has(parts, "param::entry") ? space::param
           : has(parts, "const")                               ? space::constant
                                                               : space::generic;
  }
  /// The lanes that take part are in this operand, or all.
  handler meets(inst& i, const operand* mask, handler run) {
    i.how = mask == nullptr ? flow::meet_all : flow::meet;
    if (mask != nullptr) i.target = row(*mask, 32);
    return run;
  }

  handler bind(inst& i, const statement& s) {
    words p;
    for (std::size_t at = 0; at <= s.opcode.size();) {
      const auto dot = std::min(s.opcode.find('.', at), s.opcode.size());
      p.push_back(s.opcode.substr(at, dot - at));
      at = dot + 1;
    }
    const std::string_view name = p[0], type = p.back();
    const std::string_view next = p.size() > 1 ? p[1] : "";
    const bool flushes = has(p, "ftz");
    const auto& o = s.operands;
    const auto rounds = [&] { return !has(p, "rz") && !has(p, "rm") && !has(p, "rp") && !has(p, "sat"); };

    if (name == "bra") {
      if (o.at(0).kind != operand_kind::label) return nullptr;
      i.how = flow::branch;
      i.target = o[0].row;
      return nothing;
    }
    if (name == "ret" || name == "exit") return i.how = flow::end, nothing;
    if (name == "trap") return trap;
    if (name == "membar" || name == "fence" || name == "prefetch" || name == "prefetchu" ||
        name == "nanosleep" || name == "griddepcontrol")
      return nothing;
    if ((name == "bar" || name == "barrier") && next == "warp") return meets(i, &o.at(0), meet_in_order);
    if ((name == "bar" || name == "barrier") && has(p, "sync")) {
      if (o.size() != 1 || o[0].kind != operand_kind::number) return nullptr;
      made_.has_barrier = true;
      i.how = flow::barrier;
      i.form = static_cast<u8>(o[0].number);
      return nothing;
    }
    if (name == "ld" || name == "ldu") return bind_move<false>(i, s, p);
    if (name == "st") return bind_move<true>(i, s, p);
    if (name == "atom" || name == "red") return bind_atom(i, s, p);
    if (name == "mov") return bind_mov(i, s, type);
    if (name == "cvt") return bind_cvt(i, s, p);
    if (name == "cvta") {
      rows(i, s, {"u64", "u64"});
      const space of = space_of(p);
      const u64 window = of == space::shared  ? shared_window
                         : of == space::local ? local_window
                         : of == space::param ? param_window
                                              : 0;
      i.row[2] = constant(has(p, "to") ? 0 - window : window, 64);
      return map_rows<[](u64 a, u64 b) { return a + b; }, u64, u64, u64>;
    }
    if (name == "setp") return bind_setp(i, s, p);
    if (name == "selp") {
      rows(i, s, {type, type, type, "pred"});
      return width(type) == 64 ? select<u64> : width(type) == 32 ? select<u32> : select<u16>;
    }
    if (name == "shfl" || name == "vote" || name == "match" || name == "redux" || name == "activemask" ||
        name == "mma" || name == "movmatrix")
      return bind_lanes(i, s, p);
    if (type == "pred") {
      i.row[0] = row(o.at(0), 1);
      i.row[1] = row(o.at(1), 1);
      i.row[2] = row(o.at(name == "not" ? 1 : 2), 1);
      if (name == "and") return combine_masks<[](u32 a, u32 b) { return a & b; }>;
      if (name == "or") return combine_masks<[](u32 a, u32 b) { return a | b; }>;
      if (name == "xor") return combine_masks<[](u32 a, u32 b) { return a ^ b; }>;
      if (name == "not") return combine_masks<[](u32 a, u32) { return ~a; }>;
      return nullptr;
    }

    // Arithmetic. Operands are of the type that the opcode ends with, but for what a wide or a shifting one
    // has.
    if (name == "shl" || name == "shr") {
      rows(i, s, {type, type, "u32"});
      if (name == "shl") return shifts<[](auto a, u32 b) { return b < 8 * sizeof a ? a << b : 0; }>(type);
      return shifts<[](auto a, u32 b) { return shifted_right(a, b); }>(type);
    }
    if (name == "popc" || name == "clz") {
      rows(i, s, {"u32", type});
      if (type == "b64") {
        if (name == "popc") return map_rows<[](u64 a) { return std::popcount(a); }, u32, u64>;
        return map_rows<[](u64 a) { return std::countl_zero(a); }, u32, u64>;
      }
      if (name == "popc") return map_rows<[](u32 a) { return std::popcount(a); }, u32, u32>;
      return map_rows<[](u32 a) { return std::countl_zero(a); }, u32, u32>;
    }
    if (name == "mul" && next == "wide") {
      i.row = {row(o.at(0), 2 * width(type)), row(o.at(1), width(type)), row(o.at(2), width(type)), 0};
      return widening<[](auto a, auto b) { return wide_product(a, b); }, false>(type);
    }
    if (name == "mad" && next == "wide") {
      i.row = {row(o.at(0), 2 * width(type)), row(o.at(1), width(type)), row(o.at(2), width(type)),
               row(o.at(3), 2 * width(type))};
      return widening<[](auto a, auto b, auto c) { return wide_product(a, b) + static_cast<u64>(c); }, true>(
          type);
    }
    if (name == "bfe") {
      rows(i, s, {type, type, "u32", "u32"});
      constexpr auto extract = [](auto a, u32 position, u32 length) {
        return extracted(a, position, length);
      };
      if (type == "u32") return map_rows<extract, u32, u32, u32, u32>;
      if (type == "s32") return map_rows<extract, i32, i32, u32, u32>;
      if (type == "u64") return map_rows<extract, u64, u64, u32, u32>;
      return type == "s64" ? map_rows<extract, i64, i64, u32, u32> : nullptr;
    }
    if (name == "bfi") {
      // Five operands: of the last two only numbers are known.
      i.row = {row(o.at(0), width(type)), row(o.at(1), width(type)), row(o.at(2), width(type)), 0};
      if (o.at(3).kind != operand_kind::number || o.at(4).kind != operand_kind::number) return nullptr;
      i.row[3] = constant(o[3].number << 32 | o[4].number, 64);
      constexpr auto insert = [](auto a, auto b, u64 where) { return inserted(a, b, where); };
      return type == "b32" ? map_rows<insert, u32, u32, u32, u64> : map_rows<insert, u64, u64, u64, u64>;
    }
    if (name == "lop3") {
      if (o.at(4).kind != operand_kind::number) return nullptr;
      rows(i, s, {"b32", "b32", "b32", "b32"});
      i.form = static_cast<u8>(o[4].number);
      return [](warp& w, inst& by) {
        for (u32 k = 0; k < 32; ++k) {
          const u32 a = w.row<u32>(by.row[1])[k], b = w.row<u32>(by.row[2])[k], c = w.row<u32>(by.row[3])[k];
          u32 made = 0;
          for (u32 t = 0; t < 8; ++t) {
            if ((by.form >> t & 1) != 0)
              made |= ((t & 4) != 0 ? a : ~a) & ((t & 2) != 0 ? b : ~b) & ((t & 1) != 0 ? c : ~c);
          }
          if ((w.now >> k & 1) != 0) w.row<u32>(by.row[0])[k] = made;
        }
      };
    }
    if (name == "prmt") {
      if (type != "b32" || p.size() != 2) return nullptr;
      rows(i, s, {type, type, type, type});
      return map_rows<[](u32 a, u32 b, u32 c) { return permuted(a, b, c); }, u32, u32, u32, u32>;
    }
    if (name == "shf") {
      rows(i, s, {type, type, type, "u32"});
      if (has(p, "clamp")) {
        if (next == "l")
          return map_rows<[](u32 a, u32 b, u32 c) { return funnel_left(a, b, std::min(c, 32U)); }, u32, u32,
                          u32, u32>;
        return map_rows<[](u32 a, u32 b, u32 c) { return funnel_right(a, b, std::min(c, 32U)); }, u32, u32,
                        u32, u32>;
      }
      if (next == "l")
        return map_rows<[](u32 a, u32 b, u32 c) { return funnel_left(a, b, c & 31); }, u32, u32, u32, u32>;
      return map_rows<[](u32 a, u32 b, u32 c) { return funnel_right(a, b, c & 31); }, u32, u32, u32, u32>;
    }
    const auto sources = o.size();
    if (sources == 2)
      rows(i, s, {type, type});
    else if (sources == 3)
      rows(i, s, {type, type, type});
    else
      rows(i, s, {type, type, type, type});
    if (name == "add" && rounds())
      return numbers<[](auto a, auto b) { return wrapped([](auto x, auto y) { return x + y; }, a, b); }, 2>(
          type, flushes);
    if (name == "sub" && rounds())
      return numbers<[](auto a, auto b) { return wrapped([](auto x, auto y) { return x - y; }, a, b); }, 2>(
          type, flushes);
    if (name == "mul" && next == "hi")
      return integers<[](auto a, auto b) { return high_product(a, b); }, 2>(type);
    if (name == "mul" && rounds())
      return numbers<[](auto a, auto b) { return wrapped([](auto x, auto y) { return x * y; }, a, b); }, 2>(
          type, flushes);
    if (name == "mad" && next == "lo")
      return integers<[](auto a, auto b, auto c) {
        return static_cast<u64>(a) * static_cast<u64>(b) + static_cast<u64>(c);
      },
                      3>(type);
    if (name == "mad" && next == "hi")
      return integers<[](auto a, auto b, auto c) {
        return static_cast<u64>(high_product(a, b)) + static_cast<u64>(c);
      },
                      3>(type);
    if ((name == "fma" || name == "mad") && rounds())
      return floats<[](auto a, auto b, auto c) { return std::fma(a, b, c); }, 3>(type, flushes);
    if (name == "div" && rounds())
      return numbers<[](auto a, auto b) { return quotient(a, b); }, 2>(type, flushes);
    if (name == "rem") return integers<[](auto a, auto b) { return remainder_of(a, b); }, 2>(type);
    if (name == "min" && p.size() <= (flushes ? 3U : 2U))
      return numbers<[](auto a, auto b) { return extreme<true>(a, b); }, 2>(type, flushes);
    if (name == "max" && p.size() <= (flushes ? 3U : 2U))
      return numbers<[](auto a, auto b) { return extreme<false>(a, b); }, 2>(type, flushes);
    if (name == "abs") return numbers<[](auto a) { return magnitude(a); }, 1>(type, flushes);
    if (name == "neg") return numbers<[](auto a) { return negated(a); }, 1>(type, flushes);
    if (name == "not") return integers<[](auto a) { return ~a; }, 1>(type);
    if (name == "cnot") return integers<[](auto a) { return a == 0 ? 1 : 0; }, 1>(type);
    if (name == "and") return integers<[](auto a, auto b) { return a & b; }, 2>(type);
    if (name == "or") return integers<[](auto a, auto b) { return a | b; }, 2>(type);
    if (name == "xor") return integers<[](auto a, auto b) { return a ^ b; }, 2>(type);
    if (name == "brev" && type == "b32") return map_rows<[](u32 a) { return reversed(a); }, u32, u32>;
    if (name == "rcp" && rounds()) return floats<[](auto a) { return 1 / a; }, 1>(type, flushes);
    if (name == "sqrt" && rounds()) return floats<[](auto a) { return std::sqrt(a); }, 1>(type, flushes);
    if (name == "rsqrt") return floats<[](auto a) { return 1 / std::sqrt(a); }, 1>(type, flushes);
    if (name == "ex2") return floats<[](auto a) { return std::exp2(a); }, 1>(type, flushes);
    if (name == "lg2") return floats<[](auto a) { return std::log2(a); }, 1>(type, flushes);
    if (name == "sin") return floats<[](auto a) { return std::sin(a); }, 1>(type, flushes);
    if (name == "cos") return floats<[](auto a) { return std::cos(a); }, 1>(type, flushes);
    if (name == "tanh") return floats<[](auto a) { return std::tanh(a); }, 1>(type, flushes);
    return nullptr;
  }

  template <bool Stores>
  handler bind_move(inst& i, const statement& s, const words& p) {
    const std::string_view type = p.back();
    const operand& value = s.operands.at(Stores ? 1 : 0);
    address(i, s.operands.at(Stores ? 0 : 1), i.row[1]);
    i.where = space_of(p);
    i.is_relaxed =
        has(p, "volatile") || has(p, "relaxed") || has(p, "acquire") || has(p, "release") || has(p, "mmio");
    const number_type of = number_type::of(type);
    if (of.is_pair || type == "b128") return nullptr;
    std::vector<operand> parts =
        value.kind == operand_kind::tuple ? value.parts : std::vector<operand>{value};
    unsigned bits = std::max<unsigned>(of.bits, 16);
    for (const operand& each : parts)
      bits = std::max<unsigned>(bits, each.bits);
    for (const operand& each : parts) {
      if (each.kind == operand_kind::none && !Stores)
        i.more.push_back(constant(no_reader, bits));
      else
        i.more.push_back(row(each, bits));
    }
    const std::size_t count = parts.size();
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
  handler bind_atom(inst& i, const statement& s, const words& p) {
    const bool tells = p[0] == "atom" && s.operands.at(0).kind != operand_kind::none;
    const std::size_t first = p[0] == "atom" ? 1 : 0;
    const std::string_view type = p.back();
    if (tells) i.row[0] = row(s.operands[0], width(type));
    address(i, s.operands.at(first), i.row[1]);
    i.row[2] = row(s.operands.at(first + 1), width(type), type == "f32");
    if (s.operands.size() > first + 2) i.row[3] = row(s.operands[first + 2], width(type));
    i.where = space_of(p);
    i.is_relaxed = true;
    constexpr const char* ops[] = {"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"};
    for (u8 n = 0; n < 10; ++n) {
      if (!has(p, ops[n])) continue;
      i.size = n;
      return tells ? atoms<true>(type) : atoms<false>(type);
    }
    return nullptr;
  }
  handler bind_mov(inst& i, const statement& s, std::string_view type) {
    const operand& to = s.operands.at(0);
    const operand& from = s.operands.at(1);
    const operand& many = to.kind == operand_kind::tuple ? to : from;
    if (many.kind == operand_kind::tuple) {
      const unsigned bits = bits_of_type(type) / static_cast<unsigned>(many.parts.size());
      i.size = static_cast<u8>(bits / 8);
      for (const operand& each : many.parts)
        i.more.push_back(each.kind == operand_kind::none ? no_guard : row(each, bits));
      if (&many == &to) return i.row[1] = row(from, bits_of_type(type)), unpack;
      return i.row[0] = row(to, bits_of_type(type)), pack;
    }
    rows(i, s, {type, type});
    if (type == "pred") {
      i.row[2] = i.row[1];
      return combine_masks<[](u32 a, u32) { return a; }>;
    }
    constexpr auto same_value = [](auto a) { return a; };
    return width(type) == 64   ? map_rows<same_value, u64, u64>
           : width(type) == 32 ? map_rows<same_value, u32, u32>
                               : map_rows<same_value, u16, u16>;
  }
  handler bind_cvt(inst& i, const statement& s, const words& p) {
    if (p.size() < 3 || has(p, "pack") || has(p, "rs") || has(p, "rna")) return nullptr;
    const std::string_view to = p[p.size() - 2], from = p.back();
    const auto bits = [&](std::size_t n, std::string_view type) {
      return s.operands.at(n).bits != 0 ? s.operands[n].bits : static_cast<u8>(width(type));
    };
    conversion by;
    by.to = number_type::of(to);
    by.from = number_type::of(from);
    if (by.to.bits == 0 || by.from.bits == 0 || to == "tf32") return nullptr;
    i.row[0] = row(s.operands.at(0), bits(0, to));
    i.row[1] = row(s.operands.at(1), bits(1, from));
    if (s.operands.size() > 2) i.row[2] = row(s.operands[2], bits(2, from));
    const handler quick = quick_conversion(s.opcode, to, from);
    if (quick != nullptr && bits(0, to) == width(to) && bits(1, from) == width(from)) return quick;
    for (const std::string_view each : {"rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi"}) {
      if (!has(p, each)) continue;
      by.how = each[1] == 'n'   ? rounding::nearest_even
               : each[1] == 'z' ? rounding::toward_zero
               : each[1] == 'm' ? rounding::down
                                : rounding::up;
      by.is_integral = each.size() == 3;
    }
    by.saturates = has(p, "sat");
    by.is_kept_finite = has(p, "satfinite");
    by.flushes = has(p, "ftz");
    by.clamps_negative = has(p, "relu");
    by.to_row = static_cast<u8>(bits(0, to) / 8);
    by.from_row = static_cast<u8>(bits(1, from) / 8);
    i.more.resize((sizeof by + 3) / 4);
    std::memcpy(i.more.data(), &by, sizeof by);
    return convert;
  }
  handler bind_setp(inst& i, const statement& s, const words& p) {
    const std::string_view type = p.back();
    rows(i, s, {"pred", type, type});
    if (!s.operands[0].parts.empty()) i.more.push_back(row(s.operands[0].parts[0], 1));
    if (s.operands.size() > 3) {
      i.row[3] = row(s.operands[3], 1);
      i.form = static_cast<u8>((has(p, "and")  ? 1
                                : has(p, "or") ? 2
                                               : 3) |
                               (s.operands[3].is_negated ? 4 : 0));
    }
    if (has(p, "ftz")) return nullptr;
    i.size = outcomes(p.at(1));
    return by_type(type, []<class T>(T) -> handler { return compare<T>; });
  }
  handler bind_lanes(inst& i, const statement& s, const words& p) {
    const auto& o = s.operands;
    const std::string_view name = p[0], type = p.back();
    if (name == "activemask") {
      i.row[0] = row(o.at(0), 32);
      return [](warp& w, inst& by) { put_all(w, by.row[0], w.now); };
    }
    if (name == "shfl") {
      for (std::size_t n = 0; n < 4; ++n)
        i.row[n] = row(o.at(n), 32);
      if (!o[0].parts.empty()) i.more.push_back(row(o[0].parts[0], 1));
      i.form = has(p, "bfly") ? 0 : has(p, "idx") ? 1 : has(p, "up") ? 2 : 3;
      return meets(i, &o.at(4), shuffle);
    }
    if (name == "vote") {
      i.form = static_cast<u8>((has(p, "all")   ? 0
                                : has(p, "any") ? 1
                                : has(p, "uni") ? 2
                                                : 3) |
                               (o.at(1).is_negated ? 4 : 0));
      i.row[0] = row(o[0], has(p, "ballot") ? 32 : 1);
      i.row[1] = row(o[1], 1);
      return meets(i, &o.at(2), vote);
    }
    if (name == "match") {
      i.form = has(p, "all") ? 1 : 0;
      i.size = static_cast<u8>(width(type) / 8);
      i.row[0] = row(o.at(0), 32);
      i.row[1] = row(o.at(1), width(type));
      if (!o[0].parts.empty()) i.more.push_back(row(o[0].parts[0], 1));
      return meets(i, &o.at(2), match);
    }
    if (name == "redux") {
      i.row[0] = row(o.at(0), 32);
      i.row[1] = row(o.at(1), 32);
      const handler by =
          has(p, "add")
              ? reduces<[](auto a, auto b) { return static_cast<u32>(a) + static_cast<u32>(b); }>(type)
          : has(p, "min") ? reduces<[](auto a, auto b) { return extreme<true>(a, b); }>(type)
          : has(p, "max") ? reduces<[](auto a, auto b) { return extreme<false>(a, b); }>(type)
          : has(p, "and") ? reduces<[](auto a, auto b) { return a & b; }>(type)
          : has(p, "or")  ? reduces<[](auto a, auto b) { return a | b; }>(type)
                          : reduces<[](auto a, auto b) { return a ^ b; }>(type);
      return meets(i, &o.at(2), by);
    }
    if (name == "movmatrix") {
      if (!has(p, "trans") || !has(p, "m8n8")) return nullptr;
      rows(i, s, {"b32", "b32"});
      return meets(i, nullptr, transpose_matrix);
    }
    return bind_mma(i, s, p);
  }
  handler bind_mma(inst& i, const statement& s, const words& p) {
    // mma.sync.aligned.SHAPE.row.col.f32.A.B.f32
    if (p.size() != 10 || p[4] != "row" || p[5] != "col" || p[6] != "f32" || p[9] != "f32") return nullptr;
    const number_type type = number_type::of(p[7]), other = number_type::of(p[8]);
    const bool is_16 = type.kind == 'b' || (type.kind == 'f' && type.bits == 16);
    const bool is_8 = type.kind == '4' || type.kind == '5';
    if (p[7] != p[8] && (!is_8 || (other.kind != '4' && other.kind != '5'))) return nullptr;
    const std::size_t count = is_16 && p[3] == "m16n8k8"                                      ? 2
                              : (is_16 && p[3] == "m16n8k16") || (is_8 && p[3] == "m16n8k32") ? 4
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

  kernel& of_;
  const std::vector<u64>& variables_;
  code made_{};
  std::map<std::pair<u64, unsigned>, u32> known_{};
};

}  // namespace ptx_machine
