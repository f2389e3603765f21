/// @file
/// The LRU caches that a C++ author would write, and the minimum.
///
/// Each has `access(key)`: whether the key is there; it is the most recent afterwards, and if it was not and
/// the cache was full, the oldest has made room. They keep a 64-bit key and nothing else: no references, no
/// pins, no block to hand out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <list>
#include <unordered_map>
#include <utility>
#include <vector>

namespace llmmem_benchmarks {

/// The textbook: a list in order of use, and a map from key to place in the list.
class list_map_lru {
 public:
  explicit list_map_lru(std::size_t capacity) : capacity_(capacity) { places_.reserve(capacity); }

  bool access(std::uint64_t key) {
    if (const auto found = places_.find(key); found != places_.end()) {
      order_.splice(order_.begin(), order_, found->second);
      return true;
    }
    if (places_.size() == capacity_) {
      places_.erase(order_.back());
      order_.pop_back();
    }
    order_.push_front(key);
    places_.emplace(key, order_.begin());
    return false;
  }

 private:
  std::size_t capacity_;
  std::list<std::uint64_t> order_;
  std::unordered_map<std::uint64_t, std::list<std::uint64_t>::iterator> places_;
};

/// The same with reuse of nodes, to save heap calls: evicted entries pass their nodes to new ones.
class reusing_list_map_lru {
 public:
  explicit reusing_list_map_lru(std::size_t capacity) : capacity_(capacity) { places_.reserve(capacity); }

  bool access(std::uint64_t key) {
    if (const auto found = places_.find(key); found != places_.end()) {
      order_.splice(order_.begin(), order_, found->second);
      return true;
    }
    if (places_.size() < capacity_) {
      order_.push_front(key);
      places_.emplace(key, order_.begin());
      return false;
    }
    auto node = places_.extract(order_.back());
    order_.splice(order_.begin(), order_, std::prev(order_.end()));
    order_.front() = key;
    node.key() = key;
    places_.insert(std::move(node));
    return false;
  }

 private:
  std::size_t capacity_;
  std::list<std::uint64_t> order_;
  std::unordered_map<std::uint64_t, std::list<std::uint64_t>::iterator> places_;
};

/// The floor: keys are numbers from 0 on, so an array does for the map; links are indices.
class dense_lru {
 public:
  /// @param keys  number of keys.
  dense_lru(std::size_t capacity, std::size_t keys)
      : end_(static_cast<std::uint32_t>(capacity)), slot_of_(keys, end_), nodes_(capacity + 1) {
    nodes_[end_] = {end_, end_, 0};
  }

  bool access(std::uint32_t key) {
    std::uint32_t slot = slot_of_[key];
    const bool hit = slot != end_;
    if (hit) {
      unlink(slot);
    } else {
      if (used_ < end_) {
        slot = used_++;
      } else {
        slot = nodes_[end_].previous;
        unlink(slot);
        slot_of_[nodes_[slot].key] = end_;
      }
      nodes_[slot].key = key;
      slot_of_[key] = slot;
    }
    const std::uint32_t newest = nodes_[end_].next;
    nodes_[slot].previous = end_;
    nodes_[slot].next = newest;
    nodes_[newest].previous = slot;
    nodes_[end_].next = slot;
    return hit;
  }

 private:
  struct node {
    std::uint32_t previous;
    std::uint32_t next;
    std::uint32_t key;
  };

  void unlink(std::uint32_t slot) {
    // Read separately, as detail::slot_list does, because a load of both would wait for the neighbour's store
    // to one.
    const std::uint32_t previous = nodes_[slot].previous;
    const std::uint32_t next = nodes_[slot].next;
    nodes_[previous].next = next;
    nodes_[next].previous = previous;
  }

  std::uint32_t end_;                   // the ring's end, and no slot
  std::uint32_t used_ = 0;              // slots that were ever filled
  std::vector<std::uint32_t> slot_of_;  // by key
  std::vector<node> nodes_;
};

}  // namespace llmmem_benchmarks
