/// @file
/// An existing checkpoint, and loads of its state.
#pragma once

#include <llmmem/checkpoint/load.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "checkpoint/disk.hpp"
#include "checkpoint/saves.hpp"

namespace llmmem_benchmarks {

enum class warmth : std::uint8_t { cold, warm };

/// An existing checkpoint.
class load_fixture {
 public:
  load_fixture() : setup_(folder_.path + "/saves", state_, {.ring_bytes = std::uint64_t{64} << 20}) {
    auto guard = setup_.saves.begin_snapshot(1, llmmem::host_state_view(state_.spans));
    if (guard.ticket().wait() != llmmem::commit_status::committed)
      throw std::runtime_error("not committed: " + guard.ticket().why());
    guard.wait_staged();
    setup_.saves.flush();
    found_ = *llmmem::find_checkpoint(setup_.storage).found;
    for (std::size_t i = 0; i < state_.tensors.size(); ++i) {
      wanted_.push_back({.name = state_.tensors[i].name, .part = {}, .type = {}, .shape = {}});
      places_.push_back(static_cast<std::size_t>(state_.spans[i].data() - state_.bytes().data()));
    }
  }

  [[nodiscard]] std::string file() const {
    return setup_.storage.path(found_.folder + "/" + found_.manifest.files.front().name);
  }
  [[nodiscard]] std::uint64_t file_bytes() const { return found_.manifest.files.front().bytes; }

  void make(warmth how) const {
    folder_.settle();
    if (how == warmth::cold) return forget_pages(file());
    static_cast<void>(read_raw(file(), 2, page_cache::through_it));
  }

  [[nodiscard]] turn load(llmmem::verification how, llmmem::direct_io direct, warmth begin_with,
                          bool is_searched) {
    make(begin_with);
    llmmem::posix_storage<> storage(setup_.storage.path(""), {.direct = direct});
    turn taken;
    taken.seconds = seconds_of([&] {
      const llmmem::found_checkpoint from =
          is_searched ? *llmmem::find_checkpoint(storage, how).found : found_;
      const auto sink = [this](std::uint32_t tensor, std::uint64_t offset, std::span<const std::byte> bytes) {
        std::memcpy(loaded_.data() + places_[tensor] + offset, bytes.data(), bytes.size());
      };
      llmmem::load_checkpoint(storage, from, wanted_, sink, {.verify = how});
    });
    if (std::memcmp(loaded_.data(), state_.bytes().data(), state_.bytes().size()) != 0)
      throw std::runtime_error("what was loaded is not what was saved");
    return taken;
  }

 private:
  saved_state state_{};
  host_memory loaded_{state_bytes()};
  bench_folder folder_{};
  checkpointer_setup<> setup_;
  llmmem::found_checkpoint found_{};
  std::vector<llmmem::wanted_tensor> wanted_{};
  std::vector<std::size_t> places_{};
};

}  // namespace llmmem_benchmarks
