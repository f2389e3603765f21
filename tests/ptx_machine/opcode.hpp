// opcode.hpp: the words of an opcode, such as add, rn and f32 of `add.rn.f32`. The binder takes each word
// that means something to it. If a word is left over, the machine does not know the instruction.
#pragma once

#include "ptx_machine/parse.hpp"

#include <initializer_list>
#include <optional>

namespace ptx_machine {

class opcode {
 public:
  explicit opcode(std::string_view text) {
    for (std::size_t at = 0; at <= text.size();) {
      const auto dot = std::min(text.find('.', at), text.size());
      words_.push_back({text.substr(at, dot - at), false});
      at = dot + 1;
    }
    words_[0].is_taken = true;
  }
  [[nodiscard]] std::string_view name() const { return words_[0].text; }
  /// How many words it has, the name included.
  [[nodiscard]] std::size_t size() const { return words_.size(); }

  /// Takes the n-th word; an empty one where there are fewer.
  std::string_view at(std::size_t n) {
    if (n >= words_.size()) return "";
    words_[n].is_taken = true;
    return words_[n].text;
  }
  /// Takes the last word: of most opcodes the type.
  std::string_view type() { return at(words_.size() - 1); }
  /// Takes the word before the last.
  std::string_view type_before() { return words_.size() < 3 ? std::string_view() : at(words_.size() - 2); }

  /// Whether it has `word`, which counts as taken.
  bool take(std::string_view word) {
    for (auto each = words_.begin() + 1; each != words_.end(); ++each) {
      if (each->text != word) continue;
      each->is_taken = true;
      return true;
    }
    return false;
  }
  /// The place in `words` of the one that it has, or -1.
  int take_one(std::initializer_list<std::string_view> words) {
    int found = -1, n = 0;
    for (const std::string_view word : words) {
      if (take(word)) found = n;
      ++n;
    }
    return found;
  }
  /// Takes words that change nothing here.
  void ignore(std::initializer_list<std::string_view> words) {
    for (const std::string_view word : words)
      static_cast<void>(take(word));
  }
  [[nodiscard]] bool is_used_up() const {
    return std::all_of(words_.begin(), words_.end(), [](const part& each) { return each.is_taken; });
  }

 private:
  struct part {
    std::string_view text;
    bool is_taken;
  };
  std::vector<part> words_{};
};

}  // namespace ptx_machine
