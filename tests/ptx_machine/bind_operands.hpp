// bind_operands.hpp: rows for the operands of statements. Numbers, special registers and addresses of
// variables become rows as well, so that no handler has to tell them from registers.
#pragma once

#include "ptx_machine/numbers.hpp"
#include "ptx_machine/opcode.hpp"
#include "ptx_machine/warp.hpp"

namespace ptx_machine {

class operand_binder {
 protected:
  /// `variables`: addresses of the module's variables.
  operand_binder(kernel& of, const std::vector<u64>& variables) : of_(of), variables_(variables) {
    made_.of = &of;
    made_.special_at = (of.file_bytes + 63) / 64 * 64;
    made_.constants_at = made_.special_at + 128 * special_rows;
  }

  /// Bits of a register for a value of this type.
  [[nodiscard]] static unsigned width(std::string_view type) {
    const number_type of = number_type::of(type);
    return type == "pred" ? 1 : std::max(16U, of.bits * (of.is_pair ? 2U : 1U));
  }
  /// A row that no statement reads.
  u32 unread_row(unsigned bits) { return constant(0xA5A5'A5A5'A5A5'A5A5, bits); }
  /// The carries of the lanes. Each warp has its copy of the constants, and may write there.
  u32 carry_row() {
    if (!carry_row_) carry_row_ = fresh_row(64);
    return *carry_row_;
  }
  u32 constant(u64 value, unsigned bits) {
    const auto [found, is_new] = known_.try_emplace({value, bits}, 0);
    if (is_new) {
      found->second = fresh_row(0);
      for (u32 k = 0; k < (bits == 1 ? 1 : 32); ++k) {
        for (unsigned b = 0; b < std::max(bits, 32U) / 8; ++b) {
          if (bits != 16 || b < 2) made_.constants.push_back(static_cast<u8>(value >> (8 * b)));
        }
      }
      made_.constants.resize((made_.constants.size() + 63) / 64 * 64);
    }
    return found->second;
  }
  /// The row of an operand of this many bits.
  u32 row(const operand& o, unsigned bits, bool is_float = false) {
    switch (o.kind) {
      case operand_kind::reg:
        if (o.bits != bits) throw std::out_of_range("a register of another size");
        return o.row;
      case operand_kind::special:
        for (u32 r = 0; r < special_rows && bits == 32; ++r) {
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
  /// Rows of all operands of a statement, whose types are these.
  void rows(inst& i, const statement& s, std::initializer_list<std::string_view> types) {
    if (s.operands.size() != types.size()) throw std::out_of_range("another number of operands");
    std::size_t n = 0;
    for (const std::string_view type : types) {
      i.row.at(n) = row(s.operands[n], width(type), type == "f32");
      ++n;
    }
  }
  void rows(inst& i, const statement& s, std::string_view type, unsigned sources) {
    if (s.operands.size() != sources + 1) throw std::out_of_range("another number of operands");
    for (unsigned n = 0; n <= sources; ++n)
      i.row.at(n) = row(s.operands[n], width(type), type == "f32");
  }
  void address(inst& i, const operand& o, u32& to) {
    i.is_narrow_address = o.kind == operand_kind::reg && o.bits == 32;
    to = row(o, o.kind == operand_kind::reg ? o.bits : 64);
    i.offset = o.kind == operand_kind::reg ? o.number : 0;
  }
  [[nodiscard]] static space space_of(opcode& p) {
    constexpr space spaces[] = {space::global, space::shared, space::shared,  space::local,
                                space::param,  space::param,  space::constant};
    const int found =
        p.take_one({"global", "shared", "shared::cta", "local", "param", "param::entry", "const"});
    return found < 0 ? space::generic : spaces[found];
  }

  kernel& of_;
  code made_{};

 private:
  u32 fresh_row(std::size_t bytes) {
    const u32 at = made_.constants_at + static_cast<u32>(made_.constants.size());
    made_.constants.resize(made_.constants.size() + bytes);
    return at;
  }
  [[nodiscard]] u64 address_of(const operand& name) const {
    const symbol& of = name.variable;
    if (of.is_of_module) return variables_.at(of.offset) + name.number;
    if (of.where == space::generic) throw std::out_of_range("a name that is not known");
    // Shared memory whose size the launch gives lies behind all other.
    if (of.where == space::shared && of.size == 0) return (of_.shared_bytes + 15) / 16 * 16 + name.number;
    return of.offset + name.number;
  }

  const std::vector<u64>& variables_;
  std::map<std::pair<u64, unsigned>, u32> known_{};
  std::optional<u32> carry_row_{};
};

}  // namespace ptx_machine
