// bind_arithmetic.hpp: handlers for the instructions that each lane executes by itself on its registers.
#pragma once

#include "ptx_machine/arithmetic.hpp"
#include "ptx_machine/bind_operands.hpp"
#include "ptx_machine/convert.hpp"
#include "ptx_machine/half_arithmetic.hpp"
#include "ptx_machine/predicates.hpp"

namespace ptx_machine {

class arithmetic_binder : public operand_binder {
 protected:
  using operand_binder::operand_binder;

  /// Null: none of these, or not known.
  handler bind_arithmetic(inst& i, const statement& s, opcode& p) {
    const std::string_view name = p.name();
    if (name == "mov") return bind_mov(i, s, p.type());
    if (name == "cvt") return bind_cvt(i, s, p);
    if (name == "setp") return bind_setp(i, s, p);
    if (name == "testp") return bind_testp(i, s, p);
    if (name == "dp4a" || name == "dp2a") return bind_dot(i, s, p);
    const std::string_view type = p.type();
    if (name == "selp") {
      rows(i, s, {type, type, type, "pred"});
      return width(type) == 64 ? select<u64> : width(type) == 32 ? select<u32> : select<u16>;
    }
    if (name == "slct") return bind_slct(i, s, p);
    if (type == "pred") return bind_masks(i, s, name);
    if (const handler found = bind_bits(i, s, p, type); found != nullptr) return found;
    if (p.take("cc") || name == "addc" || name == "subc" || name == "madc") return bind_carry(i, s, p, type);
    const number_type of = number_type::of(type);
    if ((of.kind == 'f' && of.bits == 16) || of.kind == 'b') return bind_halves(i, s, p, of);
    if (type == "f32" || type == "f64") return bind_floats(i, s, p, type);
    return of.is_pair ? bind_integer_pairs(i, s, name, type) : bind_integers(i, s, p, type);
  }

 private:
  handler bind_mov(inst& i, const statement& s, std::string_view type) {
    const operand& to = s.operands.at(0);
    const operand& from = s.operands.at(1);
    const operand& many = to.kind == operand_kind::tuple ? to : from;
    if (many.kind == operand_kind::tuple) {
      const unsigned bits = bits_of_type(type) / static_cast<unsigned>(many.parts.size());
      if (bits < 16) return nullptr;
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
  handler bind_cvt(inst& i, const statement& s, opcode& p) {
    const std::string_view from = p.type(), to = p.type_before();
    const auto is_known = [](std::string_view type) {
      for (const std::string_view each : {"u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "f16", "bf16",
                                          "f32", "f64", "f16x2", "bf16x2", "e4m3x2", "e5m2x2"})
        if (type == each) return true;
      return false;
    };
    if (!is_known(to) || !is_known(from)) return nullptr;
    // A register may be wider than the type.
    const auto bits = [&](std::size_t n, std::string_view type) {
      return s.operands.at(n).bits != 0 ? s.operands[n].bits : static_cast<u8>(width(type));
    };
    conversion by;
    by.to = number_type::of(to);
    by.from = number_type::of(from);
    const bool takes_two = by.to.is_pair && !by.from.is_pair;
    if (s.operands.size() != (takes_two ? 3U : 2U) || (by.from.is_pair && !by.to.is_pair)) return nullptr;
    i.row[0] = row(s.operands[0], bits(0, to));
    i.row[1] = row(s.operands[1], bits(1, from));
    if (takes_two) i.row[2] = row(s.operands[2], bits(2, from));
    const bool is_exact_width = bits(0, to) == width(to) && bits(1, from) == width(from);
    const handler quick = is_exact_width ? quick_conversion(s.opcode, to, from) : nullptr;
    const int real = p.take_one({"rn", "rz", "rm", "rp"}), whole = p.take_one({"rni", "rzi", "rmi", "rpi"});
    by.how = static_cast<rounding>(std::max({real, whole, 0}));
    by.is_integral = whole >= 0;
    by.saturates = p.take("sat");
    by.is_kept_finite = p.take("satfinite");
    by.flushes = p.take("ftz");
    by.clamps_negative = p.take("relu");
    by.to_row = static_cast<u8>(bits(0, to) / 8);
    by.from_row = static_cast<u8>(bits(1, from) / 8);
    if (quick != nullptr) return quick;
    i.more.resize((sizeof by + 3) / 4);
    std::memcpy(i.more.data(), &by, sizeof by);
    return convert;
  }
  handler bind_setp(inst& i, const statement& s, opcode& p) {
    const std::string_view type = p.type();
    const operand& to = s.operands.at(0);
    i.row = {to.kind == operand_kind::none ? unread_row(1) : row(to, 1),
             row(s.operands.at(1), width(type), type == "f32"),
             row(s.operands.at(2), width(type), type == "f32"), 0};
    if (!to.parts.empty() && to.parts[0].kind != operand_kind::none) i.more.push_back(row(to.parts[0], 1));
    const int combined = p.take_one({"and", "or", "xor"});
    if ((combined >= 0) != (s.operands.size() == 4) || s.operands.size() > 4) return nullptr;
    if (combined >= 0) {
      i.row[3] = row(s.operands[3], 1);
      i.form = static_cast<u8>((combined + 1) | (s.operands[3].is_negated ? 4 : 0));
    }
    i.size = outcomes(p.at(1));
    if (p.take("ftz")) return type == "f32" ? compare<flushed_number> : nullptr;
    if (type == "f16") return compare<half_number<false>>;
    if (type == "bf16") return compare<half_number<true>>;
    return by_type(type, []<class T>(T) -> handler { return compare<T>; });
  }
  handler bind_testp(inst& i, const statement& s, opcode& p) {
    const std::string_view type = p.type();
    rows(i, s, {"pred", type});
    const int found = p.take_one({"finite", "infinite", "number", "notanumber", "normal", "subnormal"});
    i.size = static_cast<u8>(found);
    if (found < 0) return nullptr;
    return type == "f32" ? test_class<float> : type == "f64" ? test_class<double> : nullptr;
  }
  handler bind_slct(inst& i, const statement& s, opcode& p) {
    const std::string_view by = p.type(), type = p.type_before();
    rows(i, s, {type, type, type, by});
    const auto of = [&]<class C>(C) -> handler {
      return width(type) == 64   ? select_by_sign<u64, C>
             : width(type) == 32 ? select_by_sign<u32, C>
                                 : select_by_sign<u16, C>;
    };
    return by == "s32" ? of(i32{}) : by == "f32" ? of(float{}) : nullptr;
  }
  handler bind_masks(inst& i, const statement& s, std::string_view name) {
    i.row[0] = row(s.operands.at(0), 1);
    i.row[1] = row(s.operands.at(1), 1);
    i.row[2] = row(s.operands.at(name == "not" ? 1 : 2), 1);
    if (name == "and") return combine_masks<[](u32 a, u32 b) { return a & b; }>;
    if (name == "or") return combine_masks<[](u32 a, u32 b) { return a | b; }>;
    if (name == "xor") return combine_masks<[](u32 a, u32 b) { return a ^ b; }>;
    return name == "not" ? combine_masks<[](u32 a, u32) { return ~a; }> : nullptr;
  }

  handler bind_bits(inst& i, const statement& s, opcode& p, std::string_view type) {
    const std::string_view name = p.name();
    const auto& o = s.operands;
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
      if (type != "b32") return nullptr;
      if (name == "popc") return map_rows<[](u32 a) { return std::popcount(a); }, u32, u32>;
      return map_rows<[](u32 a) { return std::countl_zero(a); }, u32, u32>;
    }
    if (name == "bfind") {
      rows(i, s, {"u32", type});
      const bool is_distance = p.take("shiftamt");
      return by_type(type, [&]<class T>(T) -> handler {
        if constexpr (std::is_integral_v<T> && sizeof(T) >= 4) {
          if (is_distance) return map_rows<[](T a) { return highest_bit(a, true); }, u32, T>;
          return map_rows<[](T a) { return highest_bit(a, false); }, u32, T>;
        } else
          return nullptr;
      });
    }
    if (name == "fns") {
      rows(i, s, {"b32", "b32", "b32", "s32"});
      return map_rows<[](u32 mask, u32 base, i32 n) { return nth_one(mask, base, n); }, u32, u32, u32, i32>;
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
    if (name == "bfi") return bind_insertion(i, s, type);
    if (name == "brev") {
      rows(i, s, {type, type});
      if (type == "b64")
        return map_rows<[](u64 a) {
          return u64{reversed(static_cast<u32>(a))} << 32 | reversed(static_cast<u32>(a >> 32));
        },
                        u64, u64>;
      return type == "b32" ? map_rows<[](u32 a) { return reversed(a); }, u32, u32> : nullptr;
    }
    if (name == "lop3") {
      if (o.size() != 5 || o[4].kind != operand_kind::number || type != "b32") return nullptr;
      for (std::size_t n = 0; n < 4; ++n)
        i.row[n] = row(o[n], 32);
      i.form = static_cast<u8>(o[4].number);
      return look_up;
    }
    if (name == "prmt") {
      // The mode is behind the type.
      const int mode = p.take_one({"f4e", "b4e", "rc8", "ecl", "ecr", "rc16"});
      if (!p.take("b32")) return nullptr;
      rows(i, s, {"b32", "b32", "b32", "b32"});
      if (mode < 0)
        return map_rows<[](u32 a, u32 b, u32 c) { return permuted(a, b, c); }, u32, u32, u32, u32>;
      return moded_permutation(mode, std::make_index_sequence<6>());
    }
    if (name == "shf") {
      rows(i, s, {"b32", "b32", "b32", "u32"});
      const bool is_left = p.take("l"), is_right = p.take("r"), clamps = p.take("clamp"),
                 wraps = p.take("wrap");
      if (type != "b32" || is_left == is_right || clamps == wraps) return nullptr;
      if (clamps && is_left)
        return map_rows<[](u32 a, u32 b, u32 c) { return funnel_left(a, b, std::min(c, 32U)); }, u32, u32,
                        u32, u32>;
      if (clamps)
        return map_rows<[](u32 a, u32 b, u32 c) { return funnel_right(a, b, std::min(c, 32U)); }, u32, u32,
                        u32, u32>;
      if (is_left)
        return map_rows<[](u32 a, u32 b, u32 c) { return funnel_left(a, b, c & 31); }, u32, u32, u32, u32>;
      return map_rows<[](u32 a, u32 b, u32 c) { return funnel_right(a, b, c & 31); }, u32, u32, u32, u32>;
    }
    return nullptr;
  }
  template <std::size_t... Mode>
  [[nodiscard]] static handler moded_permutation(int mode, std::index_sequence<Mode...>) {
    constexpr handler made[] = {map_rows<permuted_by_mode<Mode>, u32, u32, u32, u32>...};
    return made[mode];
  }
  static void look_up(warp& w, inst& by) {
    for (u32 k = 0; k < 32; ++k) {
      const u32 a = w.row<u32>(by.row[1])[k], b = w.row<u32>(by.row[2])[k], c = w.row<u32>(by.row[3])[k];
      u32 made = 0;
      for (u32 t = 0; t < 8; ++t) {
        if ((by.form >> t & 1) != 0)
          made |= ((t & 4) != 0 ? a : ~a) & ((t & 2) != 0 ? b : ~b) & ((t & 1) != 0 ? c : ~c);
      }
      if ((w.now >> k & 1) != 0) w.row<u32>(by.row[0])[k] = made;
    }
  }
  /// bfi has five operands. `more` has the rows of the last two.
  handler bind_insertion(inst& i, const statement& s, std::string_view type) {
    const auto& o = s.operands;
    if (o.size() != 5 || (type != "b32" && type != "b64")) return nullptr;
    for (std::size_t n = 0; n < 3; ++n)
      i.row[n] = row(o[n], width(type));
    constexpr auto insert = [](auto a, auto b, u64 where) { return inserted(a, b, where); };
    if (o[3].kind == operand_kind::number && o[4].kind == operand_kind::number) {
      i.row[3] = constant(o[3].number << 32 | (o[4].number & 0xFFFF'FFFF), 64);
      return type == "b32" ? map_rows<insert, u32, u32, u32, u64> : map_rows<insert, u64, u64, u64, u64>;
    }
    i.more = {row(o[3], 32), row(o[4], 32)};
    const auto of = []<class T>(T) -> handler {
      return [](warp& w, inst& by) {
        for (u32 m = w.now; m != 0; m &= m - 1) {
          const auto k = static_cast<u32>(std::countr_zero(m));
          const u64 where = u64{w.row<u32>(by.more[0])[k]} << 32 | w.row<u32>(by.more[1])[k];
          w.row<T>(by.row[0])[k] = inserted(w.row<T>(by.row[1])[k], w.row<T>(by.row[2])[k], where);
        }
      };
    };
    return type == "b32" ? of(u32{}) : of(u64{});
  }

  handler bind_carry(inst& i, const statement& s, opcode& p, std::string_view type) {
    const std::string_view name = p.name();
    if (type != "u32" && type != "s32" && type != "u64" && type != "s64" && type != "b32" && type != "b64")
      return nullptr;
    const bool is_product = name == "mad" || name == "madc";
    if (!is_product && name != "add" && name != "addc" && name != "sub" && name != "subc") return nullptr;
    rows(i, s, type, is_product ? 3 : 2);
    const bool comes_in = name.back() == 'c';
    const bool goes_out = s.opcode.find(".cc") != std::string_view::npos;
    i.form = static_cast<u8>((comes_in ? carry_comes_in : 0) | (goes_out ? carry_goes_out : 0));
    const int part = is_product ? p.take_one({"lo", "hi"}) : 0;
    if (part < 0) return nullptr;
    const carry_op op = is_product       ? (part == 0 ? carry_op::low_product : carry_op::high_product)
                        : name[0] == 's' ? carry_op::sub
                                         : carry_op::add;
    i.size = static_cast<u8>(op);
    i.target = carry_row();
    return by_type(type, []<class T>(T) -> handler {
      if constexpr (std::is_integral_v<T> && sizeof(T) >= 4)
        return carry<T>;
      else
        return nullptr;
    });
  }
  handler bind_dot(inst& i, const statement& s, opcode& p) {
    const std::string_view b = p.type(), a = p.type_before();
    rows(i, s, {"u32", "u32", "u32", "u32"});
    if ((a != "u32" && a != "s32") || (b != "u32" && b != "s32")) return nullptr;
    const bool is_signed_a = a == "s32", is_signed_b = b == "s32";
    const auto of = [&](auto act) -> handler {
      return is_signed_a ? (is_signed_b ? act.template operator()<true, true>()
                                        : act.template operator()<true, false>())
                         : (is_signed_b ? act.template operator()<false, true>()
                                        : act.template operator()<false, false>());
    };
    if (p.name() == "dp4a")
      return of(
          []<bool A, bool B>() -> handler { return map_rows<dot_product<A, B, 4>, u32, u32, u32, u32>; });
    const int half = p.take_one({"lo", "hi"});
    if (half == 0)
      return of(
          []<bool A, bool B>() -> handler { return map_rows<dot_product<A, B, 2>, u32, u32, u32, u32>; });
    if (half < 0) return nullptr;
    return of([]<bool A, bool B>() -> handler {
      return map_rows<[](u32 x, u32 y, u32 z) { return dot_product<A, B, 2>(x, y >> 16, z); }, u32, u32, u32,
                      u32>;
    });
  }

  handler bind_halves(inst& i, const statement& s, opcode& p, const number_type& of) {
    const std::string_view name = p.name(), type = p.type();
    constexpr std::string_view names[] = {"add", "sub", "mul", "fma", "min", "max", "neg", "abs"};
    const auto found = std::find(std::begin(names), std::end(names), name);
    if (found == std::end(names)) return nullptr;
    const auto op = static_cast<half_op>(found - std::begin(names));
    const unsigned sources = op == half_op::fma ? 3 : op >= half_op::neg ? 1 : 2;
    if (s.operands.size() != sources + 1) return nullptr;
    for (unsigned n = 0; n < 4; ++n)
      i.row[n] = row(s.operands[std::min(n, sources)], width(type));
    i.size = static_cast<u8>(op);
    const bool is_extreme = op == half_op::min || op == half_op::max;
    if (op <= half_op::fma) p.ignore({"rn"});
    i.form = static_cast<u8>((of.is_pair ? half_is_pair : 0) | (of.kind == 'b' ? half_is_bf16 : 0) |
                             (p.take("ftz") ? half_flushes : 0) |
                             (op <= half_op::fma && p.take("sat") ? half_saturates : 0) |
                             (op == half_op::fma && p.take("relu") ? half_clamps : 0) |
                             (is_extreme && p.take("NaN") ? half_keeps_nan : 0));
    if ((i.form & half_flushes) != 0 && op >= half_op::neg) return nullptr;
    return calculate_halves;
  }

  template <auto F, unsigned N>
  handler rounded_floats(inst& i, const statement& s, opcode& p, std::string_view type) {
    rows(i, s, type, N);
    const bool flushes = type == "f32" && p.take("ftz"), saturates = type == "f32" && p.take("sat");
    const int how = std::max(p.take_one({"rn", "rz", "rm", "rp"}), 0);
    if (how == 0 && !saturates) return floats<F, N>(type, flushes);
    i.form = static_cast<u8>((flushes ? float_flushes : 0) | (saturates ? float_saturates : 0) |
                             how << float_rounding_at);
    return type == "f32" ? map_modified<F, float, N> : map_modified<F, double, N>;
  }
  handler bind_floats(inst& i, const statement& s, opcode& p, std::string_view type) {
    const std::string_view name = p.name();
    constexpr auto reciprocal = [](auto a) { return 1 / a; };
    constexpr auto root = [](auto a) { return std::sqrt(a); };
    constexpr auto divided = [](auto a, auto b) { return a / b; };
    if (name == "add") return rounded_floats<[](auto a, auto b) { return a + b; }, 2>(i, s, p, type);
    if (name == "sub") return rounded_floats<[](auto a, auto b) { return a - b; }, 2>(i, s, p, type);
    if (name == "mul") return rounded_floats<[](auto a, auto b) { return a * b; }, 2>(i, s, p, type);
    if (name == "fma" || name == "mad")
      return rounded_floats<[](auto a, auto b, auto c) { return std::fma(a, b, c); }, 3>(i, s, p, type);
    if (p.take_one({"approx", "full"}) >= 0) {
      const bool flushes = p.take("ftz");
      rows(i, s, type, name == "div" ? 2 : 1);
      if (name == "div") return approximate<divided, 2>(i, type, flushes);
      if (name == "rcp") return approximate<reciprocal, 1>(i, type, flushes);
      if (name == "sqrt") return approximate<root, 1>(i, type, flushes);
      if (name == "rsqrt") return approximate<[](auto a) { return 1 / std::sqrt(a); }, 1>(i, type, flushes);
      if (name == "ex2") return approximate<[](auto a) { return std::exp2(a); }, 1>(i, type, flushes);
      if (name == "lg2") return approximate<[](auto a) { return std::log2(a); }, 1>(i, type, flushes);
      if (name == "sin") return approximate<[](auto a) { return std::sin(a); }, 1>(i, type, flushes);
      if (name == "cos") return approximate<[](auto a) { return std::cos(a); }, 1>(i, type, flushes);
      if (name == "tanh") return approximate<[](auto a) { return std::tanh(a); }, 1>(i, type, flushes);
      return nullptr;
    }
    if (name == "div") return rounded_floats<divided, 2>(i, s, p, type);
    if (name == "rcp") return rounded_floats<reciprocal, 1>(i, s, p, type);
    if (name == "sqrt") return rounded_floats<root, 1>(i, s, p, type);
    const bool flushes = type == "f32" && p.take("ftz");
    if (name == "min" || name == "max") {
      rows(i, s, type, 2);
      const bool keeps_nan = p.take("NaN");
      if (keeps_nan && name == "min")
        return floats<[](auto a, auto b) { return a != a || b != b ? a + b : extreme<true>(a, b); }, 2>(
            type, flushes);
      if (keeps_nan)
        return floats<[](auto a, auto b) { return a != a || b != b ? a + b : extreme<false>(a, b); }, 2>(
            type, flushes);
      if (name == "min") return floats<[](auto a, auto b) { return extreme<true>(a, b); }, 2>(type, flushes);
      return floats<[](auto a, auto b) { return extreme<false>(a, b); }, 2>(type, flushes);
    }
    if (name == "copysign") {
      rows(i, s, type, 2);
      return floats<[](auto a, auto b) { return std::copysign(b, a); }, 2>(type, false);
    }
    rows(i, s, type, 1);
    if (name == "abs") return floats<[](auto a) { return magnitude(a); }, 1>(type, flushes);
    return name == "neg" ? floats<[](auto a) { return negated(a); }, 1>(type, flushes) : nullptr;
  }

  handler bind_integer_pairs(inst& i, const statement& s, std::string_view name, std::string_view type) {
    rows(i, s, {"b32", "b32", "b32"});
    constexpr auto sum = [](auto a, auto b) { return a + b; };
    constexpr auto least = [](auto a, auto b) { return std::min(a, b); };
    constexpr auto most = [](auto a, auto b) { return std::max(a, b); };
    const bool is_signed = type == "s16x2";
    if (!is_signed && type != "u16x2") return nullptr;
    if (name == "add") return map_rows<by_halves<sum, u16>, u32, u32, u32>;
    if (name == "min")
      return is_signed ? map_rows<by_halves<least, i16>, u32, u32, u32>
                       : map_rows<by_halves<least, u16>, u32, u32, u32>;
    if (name == "max")
      return is_signed ? map_rows<by_halves<most, i16>, u32, u32, u32>
                       : map_rows<by_halves<most, u16>, u32, u32, u32>;
    return nullptr;
  }
  handler bind_integers(inst& i, const statement& s, opcode& p, std::string_view type) {
    const std::string_view name = p.name();
    const auto& o = s.operands;
    if (name == "mul" && p.take("wide")) {
      i.row = {row(o.at(0), 2 * width(type)), row(o.at(1), width(type)), row(o.at(2), width(type)), 0};
      return widening<[](auto a, auto b) { return wide_product(a, b); }, false>(type);
    }
    if (name == "mad" && p.take("wide")) {
      i.row = {row(o.at(0), 2 * width(type)), row(o.at(1), width(type)), row(o.at(2), width(type)),
               row(o.at(3), 2 * width(type))};
      return widening<[](auto a, auto b, auto c) { return wide_product(a, b) + static_cast<u64>(c); }, true>(
          type);
    }
    if (name == "mad" || name == "sad" || name == "mad24") {
      rows(i, s, type, 3);
      if (name == "sad")
        return integers<[](auto a, auto b, auto c) {
          return static_cast<u64>(c) + (a < b ? static_cast<u64>(b) - static_cast<u64>(a)
                                              : static_cast<u64>(a) - static_cast<u64>(b));
        },
                        3>(type);
      const int part = p.take_one({"lo", "hi"});
      if (part < 0) return nullptr;
      if (name == "mad24") {
        if (part == 1) return nullptr;
        if (type == "s32")
          return map_rows<[](i32 a, i32 b, u32 c) { return static_cast<u32>(low_24(a, b)) + c; }, u32, i32,
                          i32, u32>;
        return type == "u32"
                   ? map_rows<[](u32 a, u32 b, u32 c) { return static_cast<u32>(low_24(a, b)) + c; }, u32,
                              u32, u32, u32>
                   : nullptr;
      }
      if (part == 0)
        return integers<[](auto a, auto b, auto c) {
          return static_cast<u64>(a) * static_cast<u64>(b) + static_cast<u64>(c);
        },
                        3>(type);
      return integers<[](auto a, auto b, auto c) {
        return static_cast<u64>(high_product(a, b)) + static_cast<u64>(c);
      },
                      3>(type);
    }
    if (o.size() == 2) {
      rows(i, s, {type, type});
      if (name == "abs") return integers<[](auto a) { return magnitude(a); }, 1>(type);
      if (name == "neg") return integers<[](auto a) { return negated(a); }, 1>(type);
      if (name == "not") return integers<[](auto a) { return ~a; }, 1>(type);
      return name == "cnot" ? integers<[](auto a) { return a == 0 ? 1 : 0; }, 1>(type) : nullptr;
    }
    rows(i, s, {type, type, type});
    if ((name == "add" || name == "sub") && p.take("sat")) {
      if (type != "s32") return nullptr;
      if (name == "add") return map_rows<[](i32 a, i32 b) { return saturated(i64{a} + b); }, i32, i32, i32>;
      return map_rows<[](i32 a, i32 b) { return saturated(i64{a} - b); }, i32, i32, i32>;
    }
    if (name == "add")
      return integers<[](auto a, auto b) { return static_cast<u64>(a) + static_cast<u64>(b); }, 2>(type);
    if (name == "sub")
      return integers<[](auto a, auto b) { return static_cast<u64>(a) - static_cast<u64>(b); }, 2>(type);
    if (name == "mul") {
      const int part = p.take_one({"lo", "hi"});
      if (part == 1) return integers<[](auto a, auto b) { return high_product(a, b); }, 2>(type);
      return part == 0
                 ? integers<[](auto a, auto b) { return static_cast<u64>(a) * static_cast<u64>(b); }, 2>(type)
                 : nullptr;
    }
    if (name == "mul24") {
      const int part = p.take_one({"lo", "hi"});
      if (part < 0 || (type != "u32" && type != "s32")) return nullptr;
      if (part == 0)
        return type == "u32" ? map_rows<[](u32 a, u32 b) { return low_24(a, b); }, u32, u32, u32>
                             : map_rows<[](i32 a, i32 b) { return low_24(a, b); }, u32, i32, i32>;
      return type == "u32" ? map_rows<[](u32 a, u32 b) { return middle_24(a, b); }, u32, u32, u32>
                           : map_rows<[](i32 a, i32 b) { return middle_24(a, b); }, u32, i32, i32>;
    }
    if (name == "div") return integers<[](auto a, auto b) { return quotient(a, b); }, 2>(type);
    if (name == "rem") return integers<[](auto a, auto b) { return remainder_of(a, b); }, 2>(type);
    if (name == "min") return integers<[](auto a, auto b) { return extreme<true>(a, b); }, 2>(type);
    if (name == "max") return integers<[](auto a, auto b) { return extreme<false>(a, b); }, 2>(type);
    if (name == "and") return integers<[](auto a, auto b) { return a & b; }, 2>(type);
    if (name == "or") return integers<[](auto a, auto b) { return a | b; }, 2>(type);
    return name == "xor" ? integers<[](auto a, auto b) { return a ^ b; }, 2>(type) : nullptr;
  }
};

}  // namespace ptx_machine
