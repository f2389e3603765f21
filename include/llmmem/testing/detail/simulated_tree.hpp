/// @file
/// The folders and files of a `simulated_storage`, and the effects that may or may not survive.
#pragma once

#include <llmmem/config.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace testing {
namespace detail {

/// The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): a bijection, so counted inputs never collide.
[[nodiscard]] constexpr std::uint64_t spread(std::uint64_t x) noexcept {
  x += 0x9E37'79B9'7F4A'7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58'476D'1CE4'E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D0'49BB'1331'11EBULL;
  return x ^ (x >> 31);
}

/// A file or a folder, without its names.
struct simulated_node {
  enum class kind : std::uint8_t { file, folder } what = kind::file;
  std::uint64_t size = 0;                      ///< of a file
  std::vector<std::byte> data;                 ///< may end before `size` or past it: the written bytes
  std::map<std::string, std::uint64_t> names;  ///< of a folder: name to node

  [[nodiscard]] bool is_folder() const noexcept { return what == kind::folder; }
};

/// A change of a node. A device has all of one, or nothing of it.
struct simulated_effect {
  enum class kind : std::uint8_t { data, size, names } what = kind::data;
  std::uint64_t node = 0;
  std::uint64_t offset = 0;                                  ///< of data; or the size
  std::vector<std::byte> bytes;                              ///< of data
  std::vector<std::pair<std::string, std::uint64_t>> names;  ///< each with its node from now on; 0: removed
  std::string text;
};

/// Nodes by number. Nodes without a name stay until `prune`.
struct simulated_tree {
  static constexpr std::uint64_t root = 1;
  std::map<std::uint64_t, simulated_node> nodes;

  simulated_tree() { nodes[root].what = simulated_node::kind::folder; }

  /// @param fill   the contents of bytes that were never written
  /// @param bytes  how much of the data there is: all, or the beginning of a torn write
  void apply(const simulated_effect& effect, std::byte fill,
             std::uint64_t bytes = static_cast<std::uint64_t>(-1)) {
    simulated_node& node = nodes[effect.node];
    switch (effect.what) {
      case simulated_effect::kind::size:
        node.size = effect.offset;
        return;
      case simulated_effect::kind::data: {
        if (bytes > effect.bytes.size()) bytes = effect.bytes.size();
        if (bytes == 0) return;
        if (node.data.size() < effect.offset + bytes) node.data.resize(effect.offset + bytes, fill);
        std::memcpy(node.data.data() + effect.offset, effect.bytes.data(), bytes);
        return;
      }
      case simulated_effect::kind::names:
        for (const auto& [name, target] : effect.names) {
          if (target == 0) {
            node.names.erase(name);
          } else {
            node.names[name] = target;
          }
        }
    }
  }

  /// Calls `visit(path, number, node)` for each node that a name leads to, folders before their contents, by
  /// name. A file with two names comes twice.
  template <class Visit>
  void walk(Visit&& visit, std::uint64_t from = root, const std::string& at = {}) const {
    for (const auto& [name, number] : nodes.at(from).names) {
      const simulated_node& node = nodes.at(number);
      std::string path = at;
      if (!at.empty()) path += '/';
      path += name;
      visit(path, number, node);
      if (node.is_folder()) walk(visit, number, path);
    }
  }

  /// Keeps the nodes that names lead to, each file with as many bytes as its size.
  void prune(std::byte fill) {
    std::map<std::uint64_t, bool> named{{root, true}};
    walk([&](const std::string&, std::uint64_t number, const simulated_node&) { named[number] = true; });
    for (auto each = nodes.begin(); each != nodes.end();) {
      if (!named.contains(each->first)) {
        each = nodes.erase(each);
        continue;
      }
      each->second.data.resize(each->second.size, fill);
      ++each;
    }
  }

  /// Returns the bytes of all files that have a name.
  [[nodiscard]] std::uint64_t used() const {
    std::map<std::uint64_t, std::uint64_t> sizes;
    walk([&](const std::string&, std::uint64_t number, const simulated_node& node) {
      sizes[number] = node.size;
    });
    std::uint64_t sum = 0;
    for (const auto& [number, size] : sizes)
      sum += size;
    return sum;
  }

  /// Equal for trees that no caller of a storage can distinguish. For a pruned tree.
  [[nodiscard]] std::uint64_t fingerprint() const {
    std::uint64_t hash = 0;
    const auto take = [&hash](std::uint64_t word) { hash = spread(hash ^ word); };
    const auto take_bytes = [&take](const auto* data, std::size_t count) {
      take(count);
      for (std::size_t i = 0; i < count; i += 8) {
        std::uint64_t word = 0;
        for (std::size_t k = i; k < i + 8 && k < count; ++k)
          word = word << 8 | static_cast<unsigned char>(data[k]);
        take(word);
      }
    };
    std::map<std::uint64_t, std::uint64_t> met;  // nodes in the order in which they are met: two names of one
    walk([&](const std::string& path, std::uint64_t number, const simulated_node& node) {
      take_bytes(path.data(), path.size());
      const auto [where, fresh] = met.emplace(number, met.size());
      take(where->second);
      take(node.is_folder() ? 1 : 0);
      if (fresh) take_bytes(node.data.data(), node.data.size());
    });
    return hash;
  }
};

/// Returns, for each effect, the earlier one that must have reached the device before it: the last that
/// touched one of its names. An effect with two names may need two.
[[nodiscard]] inline std::vector<std::vector<std::size_t>> needs_of(
    std::span<const simulated_effect> effects) {
  std::vector<std::vector<std::size_t>> needs(effects.size());
  std::map<std::pair<std::uint64_t, std::string>, std::size_t> last;
  for (std::size_t i = 0; i < effects.size(); ++i) {
    for (const auto& [name, target] : effects[i].names) {
      const auto [found, fresh] = last.try_emplace({effects[i].node, name}, i);
      if (!fresh) needs[i].push_back(std::exchange(found->second, i));
    }
  }
  return needs;
}

}  // namespace detail
}  // namespace testing
}  // namespace v0
}  // namespace llmmem
