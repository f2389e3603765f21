/// @file
/// A device without a device: its memory is the host's, its streams do what they were given later, a bit at
/// each question, in an order that a seed decides. Calls can be refused, and the device lost.
#pragma once

#include <llmmem/device/device_runtime.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace llmmem_tests {

class fake_device {
 public:
  struct stream_state {
    std::deque<std::function<bool()>> work{};  // false: not yet
  };
  struct event_state {
    std::uint64_t recorded = 0;
    std::uint64_t passed = 0;
  };
  struct range {
    std::size_t bytes = 0;
    bool is_there = false;
  };
  static constexpr llmmem::device_status not_ready = 600;
  static constexpr llmmem::device_status refused = 2;
  static constexpr std::size_t alias_shift = std::size_t{1} << 44;

  explicit fake_device(std::uint64_t seed = 1) : random_(seed) {}
  ~fake_device() {
    for (const auto& [data, its] : memory_)
      ::operator delete(data, std::align_val_t{4096});
  }
  fake_device(const fake_device&) = delete;
  fake_device& operator=(const fake_device&) = delete;

  const char* why_none = nullptr;            ///< there is no device, for that reason
  std::uint64_t refuse_at = ~0ULL;           ///< the call that is refused, counted from 0
  std::uint64_t refusals = 1;                ///< how many calls from that one on
  llmmem::device_status no_release = 0;      ///< what a release is refused with, as while others capture
  std::uint64_t pool_bytes = ~0ULL;          ///< that pools have in all: what is on its way back is not there
  llmmem::device_status lost = 0;            ///< what every question answers once it is set
  std::uint64_t aliased_apart = 0;           ///< addresses from here on are seen elsewhere
  bool is_capturing = false;                 ///< what streams are given becomes a graph
  std::uint64_t batches = 0;                 ///< calls that copied many pieces
  std::uint64_t strided = 0;                 ///< or pieces evenly apart
  std::vector<std::uint32_t> shared_with{};  ///< devices that pools were shared with
  std::uint64_t calls = 0;
  std::uint64_t waits = 0;             ///< of the host for an event
  std::uint32_t current = 0;           ///< the device that the engine's thread has current
  std::set<std::uint32_t> contexts{};  ///< devices on which pages were registered
  std::vector<std::string> wrong{};    ///< what a driver would not have borne

  [[nodiscard]] std::size_t live() const { return memory_.size(); }  ///< ranges, until their release is done
  [[nodiscard]] std::uint64_t held() const { return held_; }         ///< bytes that pools have of the system
  [[nodiscard]] std::size_t registered() const { return locked_.size(); }
  [[nodiscard]] int objects() const { return objects_; }  ///< pools, streams and events that have not ended

  /// Does some of what streams were given: about so many things.
  void proceed(std::uint64_t things) {
    for (std::uint64_t i = 0; i < things && !streams_.empty(); ++i) {
      auto at = streams_.begin();
      std::advance(at, static_cast<std::ptrdiff_t>(random_() % streams_.size()));
      step(*at->second);
    }
  }

 private:
  friend class fake_runtime;

  bool step(stream_state& of) {
    if (of.work.empty() || !of.work.front()()) return false;
    of.work.pop_front();
    return true;
  }
  /// Of the device's memory, only what the stream that gave it out has come to may be used.
  void look_at(const void* data) {
    for (const auto& [start, its] : memory_) {
      const auto* const first = static_cast<const std::byte*>(start);
      if (data >= first && data < first + its.bytes + 512 && !its.is_there)
        wrong.emplace_back("used before it was there");
    }
  }
  [[nodiscard]] llmmem::device_status call() {
    const std::uint64_t number = calls++;
    if (number >= refuse_at && number - refuse_at < refusals) return refused;
    return lost;
  }

  std::recursive_mutex mutex_;
  std::mt19937_64 random_;
  std::map<std::uintptr_t, std::unique_ptr<stream_state>> streams_;
  std::map<std::uintptr_t, std::unique_ptr<event_state>> events_;
  [[nodiscard]] std::uint64_t taken() const {
    std::uint64_t bytes = 0;
    for (const auto& [data, its] : memory_)
      bytes += its.bytes;
    return bytes;
  }

  std::map<void*, range> memory_;
  std::uint64_t held_ = 0;
  std::map<void*, std::size_t> locked_;
  std::uintptr_t made_ = 0;
  int objects_ = 0;
};

/// The calls of it.
class fake_runtime {
 public:
  using pool = std::uintptr_t;
  using stream = std::uintptr_t;
  using event = std::uintptr_t;
  static constexpr llmmem::device_status not_ready = fake_device::not_ready;

  fake_runtime(fake_device& device) : device_(&device) {}  // NOLINT(google-explicit-constructor)

  [[nodiscard]] const char* why_no_device(llmmem::device_id) const noexcept { return device_->why_none; }
  [[nodiscard]] const char* text(llmmem::device_status) const noexcept { return "refused by the test"; }
  llmmem::device_status make_pool(pool* made, llmmem::device_id) const noexcept { return make(made); }
  llmmem::device_status share_pool(pool, llmmem::device_id device) const noexcept {
    const std::lock_guard held(device_->mutex_);
    if (const auto status = device_->call(); status != 0) return status;
    device_->shared_with.push_back(to_index(device));
    return 0;
  }
  llmmem::device_status trim_pool(pool, std::size_t keep) const noexcept {
    const std::lock_guard held(device_->mutex_);
    if (const auto status = device_->call(); status != 0) return status;
    device_->held_ = std::min(device_->held_, device_->taken() + keep);
    return 0;
  }
  llmmem::device_status end_pool(pool) const noexcept { return end(); }
  llmmem::device_status allocate(void** bytes, std::size_t count, pool, stream on) const noexcept {
    const std::lock_guard held(device_->mutex_);
    if (const auto status = device_->call(); status != 0) return status;
    if (count > device_->pool_bytes - device_->taken()) return fake_device::refused;
    device_->held_ = std::max(device_->held_, device_->taken() + count);
    // At an odd multiple of 256, as a pool may.
    auto* const data = static_cast<std::byte*>(::operator new(count + 512, std::align_val_t{4096}));
    std::memset(data, 0xCD, count + 512);
    device_->memory_.emplace(data, fake_device::range{count, false});
    *bytes = data + 256;
    // In the order of the stream: another may use it once this is done.
    device_->streams_.at(on)->work.emplace_back([device = device_, data] {
      device->memory_.at(data).is_there = true;
      return true;
    });
    return 0;
  }
  llmmem::device_status release(void* bytes, stream on) const noexcept {
    const std::lock_guard held(device_->mutex_);
    if (const auto status = device_->call(); status != 0) return status;
    if (device_->no_release != 0) return device_->no_release;
    void* const data = static_cast<std::byte*>(bytes) - 256;
    if (!device_->memory_.contains(data)) {
      device_->wrong.emplace_back("released what is not live");
      return 1;
    }
    device_->streams_.at(on)->work.emplace_back([device = device_, data] {
      device->memory_.erase(data);
      ::operator delete(data, std::align_val_t{4096});
      return true;
    });
    return 0;
  }
  llmmem::device_status make_stream(stream* made, llmmem::device_id) const noexcept {
    const auto status = make(made);
    if (status == 0) device_->streams_.emplace(*made, std::make_unique<fake_device::stream_state>());
    return status;
  }
  llmmem::device_status end_stream(stream of) const noexcept {
    const std::lock_guard held(device_->mutex_);
    if (!device_->streams_.at(of)->work.empty()) device_->wrong.emplace_back("ended a stream that has work");
    device_->streams_.erase(of);
    return end();
  }
  llmmem::device_status wait_stream(stream of) const noexcept {
    const std::lock_guard held(device_->mutex_);
    if (const auto status = device_->call(); status != 0) return status;
    const auto& work = device_->streams_.at(of)->work;
    return go_until([&] { return work.empty(); });
  }
  llmmem::device_status make_event(event* made, llmmem::device_id) const noexcept {
    const auto status = make(made);
    if (status == 0) device_->events_.emplace(*made, std::make_unique<fake_device::event_state>());
    return status;
  }
  llmmem::device_status end_event(event of) const noexcept {
    const std::lock_guard held(device_->mutex_);
    static_cast<void>(go_until([&, e = device_->events_.at(of).get()] { return e->passed == e->recorded; }));
    device_->events_.erase(of);
    return end();
  }
  llmmem::device_status record(event of, stream on) const noexcept {
    const std::lock_guard held(device_->mutex_);
    if (const auto status = device_->call(); status != 0) return status;
    fake_device::event_state* const its = device_->events_.at(of).get();
    device_->streams_.at(on)->work.emplace_back([its, number = ++its->recorded] {
      its->passed = number;
      return true;
    });
    return 0;
  }
  llmmem::device_status query(event of) const noexcept {
    const std::lock_guard held(device_->mutex_);
    if (const auto status = device_->call(); status != 0) return status;
    device_->proceed(device_->random_() % 3);
    const fake_device::event_state& its = *device_->events_.at(of);
    return its.passed == its.recorded ? 0 : not_ready;
  }
  llmmem::device_status wait_event(event of) const noexcept {
    const std::lock_guard held(device_->mutex_);
    ++device_->waits;
    if (const auto status = device_->call(); status != 0) return status;
    const fake_device::event_state& its = *device_->events_.at(of);
    return go_until([&] { return its.passed == its.recorded; });
  }
  llmmem::device_status stream_waits(stream on, event of) const noexcept {
    const std::lock_guard held(device_->mutex_);
    if (const auto status = device_->call(); status != 0) return status;
    const fake_device::event_state* const its = device_->events_.at(of).get();
    device_->streams_.at(on)->work.emplace_back(
        [its, number = its->recorded] { return its->passed >= number; });
    return 0;
  }
  llmmem::device_status copy(void* to, const void* from, std::size_t count, stream on) const noexcept {
    const std::lock_guard held(device_->mutex_);
    if (const auto status = device_->call(); status != 0) return status;
    device_->streams_.at(on)->work.emplace_back([=, device = device_] {
      device->look_at(to);
      device->look_at(from);
      std::memcpy(to, from, count);
      return true;
    });
    return 0;
  }
  llmmem::device_status copy_many(void* const* to, const void* const* from, const std::size_t* bytes,
                                  std::size_t count, stream on) const noexcept {
    const std::lock_guard held(device_->mutex_);
    ++device_->batches;
    if (device_->is_capturing) device_->wrong.emplace_back("a batch is missing from the graph");
    for (std::size_t i = 0; i < count; ++i) {
      if (const auto status = copy(to[i], from[i], bytes[i], on); status != 0) return status;
    }
    return 0;
  }
  llmmem::device_status copy_evenly(void* to, std::size_t to_stride, const void* from,
                                    std::size_t from_stride, std::size_t bytes, std::size_t count,
                                    stream on) const noexcept {
    const std::lock_guard held(device_->mutex_);
    ++device_->strided;
    for (std::size_t i = 0; i < count; ++i) {
      const auto status = copy(static_cast<std::byte*>(to) + i * to_stride,
                               static_cast<const std::byte*>(from) + i * from_stride, bytes, on);
      if (status != 0) return status;
    }
    return 0;
  }
  /// What a kernel does when the stream comes to it.
  llmmem::device_status launch(std::function<void()> kernel, stream on) const {
    const std::lock_guard held(device_->mutex_);
    if (const auto status = device_->call(); status != 0) return status;
    device_->streams_.at(on)->work.emplace_back([kernel = std::move(kernel)] {
      kernel();
      return true;
    });
    return 0;
  }
  /// Some of what streams have been given is done, in any order.
  void proceed(std::uint64_t things) const {
    const std::lock_guard held(device_->mutex_);
    device_->proceed(things);
  }
  [[nodiscard]] bool takes_many(stream) const noexcept { return !device_->is_capturing; }
  [[nodiscard]] bool is_capturing(stream) const noexcept { return device_->is_capturing; }
  llmmem::device_status lock_pages(void* bytes, std::size_t count,
                                   std::optional<llmmem::device_id> by) const noexcept {
    const std::lock_guard held(device_->mutex_);
    if (const auto status = device_->call(); status != 0) return status;
    if (count >= std::size_t{1} << 39) return fake_device::refused;
    device_->contexts.insert(by ? to_index(*by) : device_->current);
    if (!device_->locked_.emplace(bytes, count).second) device_->wrong.emplace_back("registered twice");
    return 0;
  }
  llmmem::device_status unlock_pages(void* bytes) const noexcept {
    const std::lock_guard held(device_->mutex_);
    ++device_->calls;
    if (device_->locked_.erase(bytes) == 0) device_->wrong.emplace_back("unlocked what is not registered");
    return 0;
  }
  llmmem::device_status device_address(void** there, void* bytes) const noexcept {
    const std::lock_guard held(device_->mutex_);
    if (const auto status = device_->call(); status != 0) return status;
    const auto at = reinterpret_cast<std::uintptr_t>(bytes);
    const bool is_apart = device_->aliased_apart != 0 && at >= device_->aliased_apart;
    *there = static_cast<std::byte*>(bytes) + (is_apart ? 2 : 1) * fake_device::alias_shift;
    return 0;
  }

 private:
  llmmem::device_status make(std::uintptr_t* made) const noexcept {
    const std::lock_guard held(device_->mutex_);
    if (const auto status = device_->call(); status != 0) return status;
    *made = ++device_->made_;
    ++device_->objects_;
    return 0;
  }
  llmmem::device_status end() const noexcept {
    const std::lock_guard held(device_->mutex_);
    ++device_->calls;
    --device_->objects_;
    return 0;
  }
  /// Streams take turns until it is so; a wait that nothing can end is a bug.
  template <class Is>
  llmmem::device_status go_until(Is is) const noexcept {
    while (!is()) {
      bool has_moved = false;
      for (auto& [number, each] : device_->streams_)
        has_moved = device_->step(*each) || has_moved;
      if (has_moved || is()) continue;
      device_->wrong.emplace_back("waits for ever");
      return 1;
    }
    return 0;
  }

  fake_device* device_;
};
static_assert(llmmem::device_runtime<fake_runtime>);

}  // namespace llmmem_tests
