/// @file
/// Random programs on tensors in a tiered buffer, against one vector of bytes a part.
#pragma once

#include <llmmem/tiering/tiered_tensors.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "support/random.hpp"

namespace llmmem_tests {

/// Sizes from a byte to some chunks, in two sets.
[[nodiscard]] inline std::vector<llmmem::tensor_size> random_tensor_sizes(std::uint64_t seed,
                                                                          std::size_t count) {
  random_numbers random(seed);
  std::vector<llmmem::tensor_size> sizes(count);
  for (llmmem::tensor_size& each : sizes) {
    each.bytes = 1 + random.below(random.once_in(4) ? 30'000U : random.once_in(3) ? 6'000U : 900U);
    each.alignment = std::uint64_t{1} << random.below(9U);
    each.set = random.below(2U);
  }
  return sizes;
}

/// Whether the devices of a world fail: leases may then be refused, and change nothing.
enum class devices : std::uint8_t { sound, failing };

/// Tensors, what must be in them, and leases that are held for a while, several at once. `Touch` as for
/// `tiered_world`.
template <class Buffer, class Touch>
class tensor_world {
 public:
  using bytes = std::vector<std::byte>;
  using tensors_type = llmmem::tiered_tensors<Buffer>;

  tensor_world(Buffer& buffer, tensors_type& tensors, Touch touch, std::uint64_t seed,
               devices how = devices::sound)
      : buffer_(buffer), tensors_(tensors), touch_(touch), random_(seed), devices_(how) {
    parts_.resize(tensors.mapping().parts().size());
  }

  /// Leases that devices kept from being had.
  [[nodiscard]] std::uint64_t refusals() const noexcept { return refusals_; }

  void run(int steps) {
    for (int step = 0; step < steps; ++step) {
      CAPTURE(step);
      act();
      for (const auto& held : held_)
        check(held);
      for (const std::string& broken : tensors_.audit())
        FAIL_CHECK(broken);
      for (const std::string& broken : buffer_.audit())
        FAIL_CHECK(broken);
    }
    held_.clear();
    forget_leases();
    finish();
  }

 private:
  struct part_model {
    std::optional<bytes> contents;
    int readers = 0;
    bool writing = false;
  };
  struct holding {
    std::variant<typename tensors_type::read_lease, typename tensors_type::write_lease,
                 typename tensors_type::update_lease>
        lease;
    std::uint32_t part = 0;
    bool writes = false;
    std::uint64_t from = 0;  // what it may change
    std::uint64_t to = 0;
  };
  struct chosen {
    llmmem::tensor_id tensor{};
    std::uint32_t part = 0;   // of the tensor
    std::uint32_t index = 0;  // of all
  };

  [[nodiscard]] chosen choose() {
    const auto tensor = llmmem::tensor_id{random_.below(tensors_.mapping().tensors())};
    const auto count = static_cast<std::uint32_t>(tensors_.mapping().parts(tensor).size());
    const std::uint32_t part = random_.below(count);
    return {tensor, part, tensors_.mapping().first_part(tensor) + part};
  }
  [[nodiscard]] std::uint64_t size(std::uint32_t index) const {
    return tensors_.mapping().parts()[index].bytes;
  }
  [[nodiscard]] bytes fresh(std::uint64_t count) {
    bytes made(count);
    for (std::byte& each : made)
      each = static_cast<std::byte>(random_.next());
    return made;
  }

  void act() {
    if (held_.size() == 3 || (!held_.empty() && random_.once_in(3))) {
      end(random_.below(held_.size()));
      return;
    }
    const chosen which = choose();
    part_model& model = parts_[which.index];
    switch (random_.below(12U)) {
      case 0:
      case 1:
      case 2:
        return take_read(which, model);
      case 3:
      case 4:
      case 5:
        return take_write(which, model);
      case 6:
      case 7:
        return take_update(which, model);
      case 8:
        return change_held();
      case 9:
        return move(which);
      case 10:
        if (!random_.once_in(3)) return;
        return discard(which);
      default:
        buffer_.progress();
    }
  }

  /// Whether the lease must be refused, and was, for the right reason.
  template <class Result>
  [[nodiscard]] bool refused(const Result& got, const part_model& model, bool reads, bool writes) {
    if (model.writing || (writes && model.readers != 0)) {
      CHECK(got.code() == llmmem::errc::chunk_leased);
      return true;
    }
    if (reads && !model.contents) {
      CHECK(got.code() == llmmem::errc::no_contents);
      return true;
    }
    if (devices_ == devices::failing && !got) {
      ++refusals_;
      return true;
    }
    REQUIRE_MESSAGE(got, got.error().message());
    return false;
  }

  void take_read(const chosen& which, part_model& model) {
    auto lease = tensors_.read(which.tensor, which.part);
    if (refused(lease, model, true, false)) return;
    ++model.readers;
    held_.push_back({std::move(*lease), which.index, false, 0, 0});
  }
  void take_write(const chosen& which, part_model& model) {
    auto lease = tensors_.write(which.tensor, which.part);
    if (refused(lease, model, false, true)) return;
    model.writing = true;
    model.contents = fresh(size(which.index));
    touch_.put(lease->range(), 0, *model.contents);
    held_.push_back({std::move(*lease), which.index, true, 0, size(which.index)});
  }
  void take_update(const chosen& which, part_model& model) {
    const std::uint64_t from = random_.below(size(which.index));
    const std::uint64_t to = from + random_.below(size(which.index) - from + 1);
    auto lease = tensors_.update(which.tensor, which.part, {from, to});
    if (refused(lease, model, true, true)) return;
    model.writing = true;
    held_.push_back({std::move(*lease), which.index, true, from, to});
    change(held_.back());
  }
  void change_held() {
    if (held_.empty()) return;
    holding& held = held_[random_.below(held_.size())];
    if (held.writes) change(held);
  }
  void change(holding& held) {
    if (held.from == held.to) return;
    const bytes changed = fresh(held.to - held.from);
    bytes& contents = *parts_[held.part].contents;
    std::copy(changed.begin(), changed.end(), contents.begin() + static_cast<std::ptrdiff_t>(held.from));
    std::visit([&](auto& lease) { touch_.put(lease.range(), held.from, changed); }, held.lease);
  }
  void end(std::size_t at) {
    part_model& model = parts_[held_[at].part];
    if (held_[at].writes) {
      model.writing = false;
    } else {
      --model.readers;
    }
    held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(at));
  }
  void forget_leases() {
    for (part_model& each : parts_) {
      each.readers = 0;
      each.writing = false;
    }
  }

  /// Evicts, flushes or prefetches: refused where a lease is in the way, and never changes contents.
  void move(const chosen& which) {
    const auto fine = [&](const auto& outcome) {
      CHECK((outcome || outcome.code() == llmmem::errc::chunk_leased || devices_ == devices::failing));
    };
    switch (random_.below(4U)) {
      case 0:
        return fine(tensors_.evict(which.tensor));
      case 1:
        return fine(tensors_.flush(which.tensor));
      case 2:
        return static_cast<void>(buffer_.flush());
      default: {
        bool any = false;
        const std::uint32_t first = tensors_.mapping().first_part(which.tensor);
        for (std::size_t i = 0; i < tensors_.mapping().parts(which.tensor).size(); ++i)
          any = any || parts_[first + i].contents;
        CHECK(tensors_.prefetch(which.tensor).code() == (any ? llmmem::errc::ok : llmmem::errc::no_contents));
      }
    }
  }

  void discard(const chosen& which) {
    const std::uint32_t first = tensors_.mapping().first_part(which.tensor);
    const auto count = static_cast<std::uint32_t>(tensors_.mapping().parts(which.tensor).size());
    bool leased = false;
    for (std::uint32_t i = first; i < first + count; ++i)
      leased = leased || parts_[i].writing || parts_[i].readers != 0;
    const auto gone = tensors_.discard(which.tensor);
    CHECK(gone.code() == (leased ? llmmem::errc::chunk_leased : llmmem::errc::ok));
    if (leased) return;
    CHECK_FALSE(tensors_.has_contents(which.tensor).value());
    for (std::uint32_t i = first; i < first + count; ++i)
      parts_[i].contents.reset();
  }

  void check(const holding& held) {
    std::visit([&](const auto& lease) { same(lease, held.part); }, held.lease);
  }
  template <class Lease>
  void same(const Lease& lease, std::uint32_t index) {
    REQUIRE(lease.range().bytes == size(index));
    bytes seen(size(index));
    touch_.get(lease.range(), 0, seen);
    const bool equal = seen == *parts_[index].contents;
    REQUIRE(equal);
  }

  /// All of it reaches the last tier and comes back.
  void finish() {
    for (std::uint32_t t = 0; t < tensors_.mapping().tensors(); ++t) {
      const llmmem::tensor_id tensor{t};
      if (devices_ == devices::sound) {
        REQUIRE(tensors_.flush(tensor));
        REQUIRE(tensors_.evict(tensor));
      }
      const std::uint32_t first = tensors_.mapping().first_part(tensor);
      for (std::uint32_t i = 0; i < tensors_.mapping().parts(tensor).size(); ++i) {
        const auto lease = tensors_.read(tensor, i);
        if (refused(lease, parts_[first + i], true, false)) continue;
        same(*lease, first + i);
      }
    }
  }

  Buffer& buffer_;
  tensors_type& tensors_;
  Touch touch_;
  random_numbers random_;
  devices devices_;
  std::uint64_t refusals_ = 0;
  std::vector<part_model> parts_;
  std::vector<holding> held_;
};

}  // namespace llmmem_tests
