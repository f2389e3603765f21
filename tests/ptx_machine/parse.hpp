/// @file
/// Reads PTX, the assembly that nvcc embeds in a program, into kernels of statements with every name
/// resolved. A module is scanned once for its kernels and variables; the body of a kernel is read when it is
/// first asked for. Instructions that the machine does not know are read as well: executing one is the error.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ptx_machine {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i8 = std::int8_t;
using i16 = std::int16_t;
using i32 = std::int32_t;
using i64 = std::int64_t;

/// The kinds of faults in device code, and in reading it.
enum class fault_kind { unsupported, bounds, alignment, uninitialised, race, divergence, trap };
struct fault : std::runtime_error {
  fault_kind kind;
  fault(fault_kind what, const std::string& text) : std::runtime_error(text), kind(what) {}
};

enum class space : u8 { generic, global, shared, local, param, constant };

/// A variable: a parameter, or memory of a block, a thread or the module.
struct symbol {
  space where = space::generic;
  u64 offset = 0;  // in its space; of a module's variable its number
  u64 size = 0;
  bool is_of_module = false;
};

enum class operand_kind : u8 { none, reg, special, number, name, tuple, label };
struct operand {
  operand_kind kind = operand_kind::none;
  bool is_negated = false;  // !%p
  u8 bits = 0;              // of the register: 1, 16, 32 or 64
  char number_form = 'i';   // i: an integer, f: bits of a float, d: bits of a double
  u32 row = 0;              // of the register; the target of a label
  u64 number = 0;           // also what is added to an address
  symbol variable{};        // of a name
  std::string_view text{};
  std::vector<operand> parts{};  // of a tuple; of "a|b", b
};

struct statement {
  std::string_view opcode{};
  std::string_view text{};
  std::vector<operand> operands{};
  int line = 0;
  int guard = -1;  // row of a predicate
  bool is_guard_negated = false;
  u64 used_bytes = ~u64{0};
  int source_file = 0;  // of the kernel's `files`; 0: nvcc was not asked for lines (-lineinfo)
  int source_line = 0;
};

/// A kernel. Registers are rows of 32 lanes, at these offsets into a warp's file: predicates first, 4 bytes
/// each.
struct kernel {
  std::string name{};
  std::vector<symbol> params{};
  u64 param_bytes = 0;
  u64 shared_bytes = 0;
  u64 local_bytes = 0;
  u32 file_bytes = 0;
  u32 most_threads = 1024;
  int arch = 0;  // of the module: 80, 90, ...
  std::vector<statement> statements{};
  std::unordered_map<std::string_view, symbol> names{};
  std::string_view body{};
  int body_line = 0;
  bool is_read = false;
  const std::map<int, std::string>* files = nullptr;

  /// Where in the source `at` comes from: the last two parts of the file's path and the line. Empty: not
  /// known.
  [[nodiscard]] std::string source_of(const statement& at) const {
    const auto found = files->find(at.source_file);
    if (found == files->end()) return {};
    const std::size_t last = found->second.rfind('/');
    const std::size_t folder = last == std::string::npos ? last : found->second.rfind('/', last - 1);
    return found->second.substr(folder + 1) + ":" + std::to_string(at.source_line);
  }
};

struct module_variable {
  std::string name{};
  space where = space::global;
  u64 align = 1;
  std::vector<u8> bytes{};
};

/// Tokens of PTX, and the line they are on.
class scanner {
 public:
  scanner(std::string_view text, int line) : text_(text), line_(line) {}

  void skip() {
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == '\n')
        ++line_, ++at_;
      else if (c == ' ' || c == '\t' || c == '\r' || c == '\0')
        ++at_;
      else if (text_.substr(at_, 2) == "//")
        at_ = std::min(text_.find('\n', at_), text_.size());
      else if (text_.substr(at_, 2) == "/*") {
        const auto end = std::min(text_.find("*/", at_), text_.size() - 2) + 2;
        line_ += static_cast<int>(std::count(text_.begin() + at_, text_.begin() + end, '\n'));
        at_ = end;
      } else
        return;
    }
  }
  [[nodiscard]] bool is_done() { return skip(), at_ >= text_.size(); }
  [[nodiscard]] char peek() { return is_done() ? '\0' : text_[at_]; }
  bool take(char c) {
    if (peek() != c) return false;
    ++at_;
    return true;
  }
  void need(char c) {
    if (!take(c)) wrong(std::string("wanted '") + c + "'");
  }
  /// A name, number or opcode: `extra` are the characters besides letters, digits, _ and $ that it may have.
  std::string_view word(std::string_view extra = "") {
    skip();
    const std::size_t first = at_;
    while (at_ < text_.size()) {
      const char c = text_[at_];
      const bool is_of = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                         c == '_' || c == '$' || extra.find(c) != std::string_view::npos;
      if (!is_of) break;
      ++at_;
    }
    if (at_ == first) wrong("wanted a name");
    return text_.substr(first, at_ - first);
  }
  /// Skips to behind the brace that closes the one just taken; returns what is between them.
  std::string_view braced() {
    const std::size_t first = at_;
    for (int depth = 1;; ++at_) {
      if (at_ >= text_.size()) wrong("a brace is not closed");
      if (text_[at_] == '\n') ++line_;
      if (text_[at_] == '{') ++depth;
      if (text_[at_] == '}' && --depth == 0) break;
    }
    return text_.substr(first, at_++ - first);
  }
  void skip_line() { at_ = std::min(text_.find('\n', at_), text_.size()); }
  /// What stands between two quotation marks.
  std::string_view quoted() {
    need('"');
    const std::size_t first = at_;
    at_ = std::min(text_.find('"', at_), text_.size() - 1) + 1;
    return text_.substr(first, at_ - 1 - first);
  }
  void skip_past(char c) {
    while (peek() != c)
      ++at_;
    ++at_;
  }
  u64 integer() {
    const bool is_negative = take('-');
    const u64 value = std::strtoull(std::string(word()).c_str(), nullptr, 0);
    return is_negative ? 0 - value : value;
  }
  [[nodiscard]] std::size_t at() const { return at_; }
  [[nodiscard]] int line() const { return line_; }
  [[nodiscard]] std::string_view since(std::size_t first) const { return text_.substr(first, at_ - first); }
  [[noreturn]] void wrong(const std::string& what) const {
    const auto end = std::min(text_.find('\n', at_), text_.size());
    throw fault(fault_kind::unsupported, "PTX line " + std::to_string(line_) + ": " + what + " before '" +
                                             std::string(text_.substr(at_, end - at_)) + "'");
  }

 private:
  std::string_view text_;
  std::size_t at_ = 0;
  int line_;
};

inline unsigned bits_of_type(std::string_view type) {
  if (type == "pred") return 1;
  const auto digit = type.find_first_of("0123456789");
  return digit == std::string_view::npos
             ? 0
             : static_cast<unsigned>(std::atoi(std::string(type.substr(digit)).c_str()));
}

/// What follows `.param`, `.shared`, ... : alignment, type, name and bounds.
struct declaration {
  u64 align = 0;
  unsigned bits = 0;
  std::string_view name{};
  u64 size = 0;

  static declaration read(scanner& in) {
    declaration made;
    while (in.take('.')) {
      const std::string_view word = in.word();
      if (word == "align")
        made.align = in.integer();
      else if (word != "ptr" && word != "global" && word != "const" && word != "shared" && word != "local")
        made.bits = bits_of_type(word);
    }
    made.name = in.word("%");
    made.size = made.bits / 8;
    while (in.take('[')) {
      made.size *= in.peek() == ']' ? 0 : in.integer();
      in.need(']');
    }
    made.align = std::max<u64>({made.align, made.bits / 8, 1});
    return made;
  }
};

inline u64 place(u64& end, u64 size, u64 align) {
  const u64 at = (end + align - 1) / align * align;
  end = at + size;
  return at;
}

class module {
 public:
  /// `device`: the architecture that executes it, where that is newer than the architecture it was compiled
  /// for.
  explicit module(std::string text, int device = 0) : text_(std::move(text)) {
    scanner in(text_, 1);
    while (!in.is_done()) {
      in.need('.');
      const std::string_view word = in.word();
      if (word == "version" || word == "address_size")
        in.word(".");
      else if (word == "target") {
        const std::string_view target = in.word();
        arch_ = std::max(device, std::atoi(std::string(target.substr(target.find('_') + 1)).c_str()));
        while (in.take(','))
          in.word();
      } else if (word == "visible" || word == "weak" || word == "extern" || word == "common")
        continue;
      else if (word == "entry")
        read_entry(in);
      else if (word == "func")
        skip_function(in);
      else if (word == "global" || word == "const")
        read_variable(in, word == "const");
      else if (word == "shared") {
        const declaration each = declaration::read(in);
        shared_.emplace_back(each);
        in.need(';');
      } else if (word == "file") {
        const int number = static_cast<int>(in.integer());
        files_[number] = std::string(in.quoted());
        in.skip_line();
      } else if (word == "section") {
        in.need('.');
        in.word();
        in.need('{');
        in.braced();
      } else if (word == "alias")
        in.skip_line();
      else
        in.wrong("cannot read ." + std::string(word));
    }
  }
  module(const module&) = delete;
  module& operator=(const module&) = delete;

  [[nodiscard]] int arch() const { return arch_; }
  [[nodiscard]] const std::string& text() const { return text_; }
  [[nodiscard]] std::vector<module_variable>& variables() { return variables_; }
  [[nodiscard]] std::vector<std::string> kernel_names() const {
    std::vector<std::string> all;
    for (const auto& [name, each] : kernels_)
      all.push_back(name);
    return all;
  }
  [[nodiscard]] kernel* find(const std::string& name) {
    const auto found = kernels_.find(name);
    if (found == kernels_.end()) return nullptr;
    if (!found->second.is_read) read_body(found->second);
    return &found->second;
  }

 private:
  void read_entry(scanner& in) {
    kernel made;
    made.name = in.word();
    made.arch = arch_;
    made.files = &files_;
    if (in.take('(') && !in.take(')')) {
      do {
        in.need('.');
        in.word();  // param
        const declaration each = declaration::read(in);
        const u64 at = place(made.param_bytes, each.size, each.align);
        made.params.push_back({space::param, at, each.size, false});
        made.names[each.name] = made.params.back();
      } while (in.take(','));
      in.need(')');
    }
    while (in.take('.')) {
      const std::string_view word = in.word();
      u64 product = 1;
      do {
        if (in.peek() >= '0' && in.peek() <= '9') product *= in.integer();
      } while (in.take(','));
      if (word == "maxntid" || word == "reqntid") made.most_threads = static_cast<u32>(product);
    }
    in.need('{');
    made.body_line = in.line();
    made.body = in.braced();
    kernels_.emplace(made.name, std::move(made));
  }
  void skip_function(scanner& in) {
    while (in.peek() != '{' && in.peek() != ';')
      in.skip_past(in.peek());
    if (!in.take(';')) in.need('{'), in.braced();
  }
  void read_variable(scanner& in, bool is_constant) {
    const declaration each = declaration::read(in);
    module_variable made{
        std::string(each.name), is_constant ? space::constant : space::global, each.align, {}};
    made.bytes.resize(each.size);
    if (in.take('=')) {
      const bool is_list = in.take('{');
      std::size_t at = 0;
      do {
        const operand value = read_operand(in, nullptr);
        if (value.kind != operand_kind::number) in.wrong("an initialiser that is no number");
        for (unsigned i = 0; i < each.bits / 8 && at < made.bytes.size(); ++i)
          made.bytes[at++] = static_cast<u8>(value.number >> (8 * i));
      } while (is_list && in.take(','));
      if (is_list) in.need('}');
    }
    in.need(';');
    module_names_[made.name] = {made.where, variables_.size(), each.size, true};
    variables_.push_back(std::move(made));
  }

  struct reg {
    u32 row = 0;
    u8 bits = 0;
  };
  /// The registers and labels of a body, and of the braces in it.
  struct scopes {
    kernel& of;
    std::vector<std::unordered_map<std::string, reg>> regs{1};
    std::vector<int> numbers{0};  // of open braces: a label belongs to one
    int next_number = 1;
    std::map<std::pair<int, std::string_view>, u32> labels{};

    [[nodiscard]] const reg* find(const std::string& name) const {
      for (auto scope = regs.rbegin(); scope != regs.rend(); ++scope) {
        if (const auto found = scope->find(name); found != scope->end()) return &found->second;
      }
      return nullptr;
    }
  };

  void read_body(kernel& of) {
    scopes all{of};
    // Predicates first; rows behind them begin at multiples of 64.
    u32 predicates = 0;
    for (auto at = of.body.find(".pred"); at != std::string_view::npos; at = of.body.find(".pred", at + 1)) {
      const auto end = std::min(of.body.find(';', at), of.body.size());
      const auto many = of.body.substr(at, end - at).find('<');
      predicates += many == std::string_view::npos
                        ? 1 + static_cast<u32>(std::count(of.body.begin() + at, of.body.begin() + end, ','))
                        : static_cast<u32>(std::atoi(std::string(of.body.substr(at + many + 1, 12)).c_str()));
    }
    u32 next_predicate = 0;
    of.file_bytes = (predicates * 4 + 63) / 64 * 64;
    for (const declaration& each : shared_)
      of.names[each.name] = {space::shared, place(of.shared_bytes, each.size, each.align), each.size, false};

    scanner in(of.body, of.body_line);
    std::vector<std::pair<std::size_t, std::vector<int>>> jumps;  // statements, and the braces they are in
    u64 used_bytes = ~u64{0};
    int source_file = 0, source_line = 0;
    while (!in.is_done()) {
      if (in.take('{')) {
        all.regs.emplace_back();
        all.numbers.push_back(all.next_number++);
        continue;
      }
      if (in.take('}')) {
        all.regs.pop_back();
        all.numbers.pop_back();
        continue;
      }
      if (in.take('.')) {
        const std::string_view word = in.word();
        if (word == "reg") {
          in.need('.');
          const unsigned bits = bits_of_type(in.word());
          do {
            const std::string name(in.word("%"));
            const bool is_many = in.take('<');
            const u64 count = is_many ? in.integer() : 1;
            if (is_many) in.need('>');
            for (u64 i = 0; i < count; ++i) {
              reg made{0, static_cast<u8>(std::max(bits, bits == 1 ? 1U : 16U))};
              if (bits == 1)
                made.row = 4 * next_predicate++;
              else
                made.row = of.file_bytes, of.file_bytes += 4 * made.bits;
              all.regs.back()[is_many ? name + std::to_string(i) : name] = made;
            }
          } while (in.take(','));
          in.need(';');
        } else if (word == "shared" || word == "local") {
          const declaration each = declaration::read(in);
          const bool is_shared = word == "shared";
          of.names[each.name] = {is_shared ? space::shared : space::local,
                                 place(is_shared ? of.shared_bytes : of.local_bytes, each.size, each.align),
                                 each.size, false};
          in.need(';');
        } else if (word == "pragma") {
          in.need('"');
          const std::string_view what = in.word();
          if (what == "used_bytes_mask") used_bytes = in.integer();
          in.skip_past(';');
        } else if (word == "loc") {
          source_file = static_cast<int>(in.integer());
          source_line = static_cast<int>(in.integer());
          in.skip_line();
        } else
          in.skip_past(';');
        continue;
      }
      const std::size_t first = in.at();
      statement made;
      made.line = in.line();
      made.source_file = source_file;
      made.source_line = source_line;
      if (in.take('@')) {
        made.is_guard_negated = in.take('!');
        const reg* guard = all.find(std::string(in.word("%")));
        if (guard == nullptr || guard->bits != 1) in.wrong("a guard that is no predicate");
        made.guard = static_cast<int>(guard->row);
      }
      made.opcode = in.word(".:");
      if (made.opcode.back() == ':') {
        all.labels[{all.numbers.back(), made.opcode.substr(0, made.opcode.size() - 1)}] =
            static_cast<u32>(of.statements.size());
        continue;
      }
      while (in.peek() != ';') {
        made.operands.push_back(read_operand(in, &all));
        if (!in.take(',') && in.peek() != ';') in.wrong("wanted ',' or ';'");
      }
      made.text = in.since(first);
      in.need(';');
      made.used_bytes = std::exchange(used_bytes, ~u64{0});
      if (made.opcode.substr(0, 3) == "bra") jumps.emplace_back(of.statements.size(), all.numbers);
      of.statements.push_back(std::move(made));
    }
    for (const auto& [at, braces] : jumps) {
      operand& target = of.statements[at].operands.at(0);
      for (auto brace = braces.rbegin(); brace != braces.rend() && target.kind != operand_kind::label;
           ++brace) {
        const auto found = all.labels.find({*brace, target.text});
        if (found == all.labels.end()) continue;
        target.kind = operand_kind::label;
        target.row = found->second;
      }
    }
    of.is_read = true;
  }

  operand read_operand(scanner& in, const scopes* all) {
    operand made;
    if (in.take('{')) {
      made.kind = operand_kind::tuple;
      do
        made.parts.push_back(read_operand(in, all));
      while (in.take(','));
      in.need('}');
      return made;
    }
    if (in.take('[')) {
      made = read_operand(in, all);
      in.need(']');
      return made;
    }
    made.is_negated = in.take('!');
    const char c = in.peek();
    if (c == '-' || (c >= '0' && c <= '9')) {
      const bool is_negative = in.take('-');
      const std::string word(in.word("."));
      made.kind = operand_kind::number;
      if (word.size() > 2 && word[0] == '0' &&
          (word[1] == 'f' || word[1] == 'F' || word[1] == 'd' || word[1] == 'D')) {
        made.number_form = static_cast<char>(word[1] | 0x20);
        made.number = std::strtoull(word.c_str() + 2, nullptr, 16);
      } else if (word.find('.') != std::string::npos) {
        made.number_form = 'd';
        made.number = std::bit_cast<u64>(std::strtod(word.c_str(), nullptr));
      } else {
        made.number = std::strtoull(word.c_str(), nullptr, 0);
      }
      if (is_negative) made.number = made.number_form == 'i' ? 0 - made.number : made.number ^ (u64{1} << 63);
      return made;
    }
    made.text = in.word(c == '%' ? "%." : "");
    const reg* found = all == nullptr ? nullptr : all->find(std::string(made.text));
    if (found != nullptr) {
      made.kind = operand_kind::reg;
      made.row = found->row;
      made.bits = found->bits;
    } else if (made.text == "_") {
      made.kind = operand_kind::none;
    } else if (made.text[0] == '%') {
      made.kind = operand_kind::special;
    } else {
      made.kind = operand_kind::name;
      const auto module_wide = module_names_.find(std::string(made.text));
      if (module_wide != module_names_.end()) made.variable = module_wide->second;
      if (all != nullptr) {
        const auto local = all->of.names.find(made.text);
        if (local != all->of.names.end()) made.variable = local->second;
      }
    }
    if (in.take('|')) made.parts.push_back(read_operand(in, all));
    if (in.take('+')) made.number = in.integer();
    return made;
  }

  std::string text_;
  int arch_ = 0;
  std::map<int, std::string> files_{};
  std::map<std::string, kernel> kernels_{};
  std::vector<module_variable> variables_{};
  std::map<std::string, symbol> module_names_{};
  std::vector<declaration> shared_{};
};

}  // namespace ptx_machine
