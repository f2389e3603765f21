/// @file
/// `joint_upload`, `weights_in_use`: the devices of an engine's ranks change their weights together.
#pragma once

#include <llmmem/comm/agreement.hpp>
#include <llmmem/comm/endpoint.hpp>
#include <llmmem/config.hpp>
#include <llmmem/refit/detail/agreeing_ranks.hpp>
#include <llmmem/refit/errors.hpp>
#include <llmmem/refit/refit_device.hpp>
#include <llmmem/refit/refit_image.hpp>
#include <llmmem/result.hpp>
#include <llmmem/version/concepts.hpp>
#include <llmmem/version/errors.hpp>

#include <cstdint>
#include <optional>
#include <span>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// Uploads images to the devices of all ranks, and publishes them on all ranks or on none.
///
///     joint_upload together(ranks, upload);           // upload: a refit_upload, of this rank
///     const auto done = moving.receive(step, ...);    // all ranks have the new weights on the host
///     const auto now = weights.snapshot().value();
///     together.publish(*now, device_weights, ranks.after(10'000'000'000), readers).value();
///
/// 1. Each rank writes the image to its spare slot, which no reader can see.
/// 2. When all bytes are on its device, the rank votes with the number of its weights. A rank that cannot
///    upload votes against. If all ranks live and have the same number, each publishes; otherwise each serves
///    the version before it.
///
/// The answer reaches the ranks at different times, so a step that begins meanwhile would see both versions.
/// `weights_in_use` prevents that: a step reads the number that its batch names.
///
/// All ranks of the transport make the same calls, each rank by one object, which keeps an answer that a call
/// could not use. A call with the number that the rank has published already uploads nothing and votes again:
/// so ranks may repeat a call that failed on one of them.
///
/// @tparam T       with `agree`: a `communicator`. Of a transport without it, a death during the vote could
///                 leave some ranks with the new version.
/// @tparam Upload  a `refit_upload`.
/// @par Complexity      an upload, and one agreement: 4 messages for each other rank.
/// @par Thread safety   one thread at a time, which owns the transport. Readers of the images: any,
/// meanwhile.
/// @par Waits           for the upload, and for the other ranks until `by`.
/// @par Errors          a rank that cannot has its own failure, those of `refit_upload::publish`; what that
///      throws passes through, after the vote. All others have `errc::refit_abandoned`, found the ranks that
///      are out; all ranks have it if their numbers differ in the low 32 bits. Those of `agree`:
///      `errc::peer_timed_out` on a rank whose deadline passes in the vote, which serves the old version,
///      although the others may publish. Call again with the same image until it is published: the vote
///      continues, and this rank publishes if the others have, also when a call between fails. A call with
///      another number first is refused, because the vote was about the earlier one.
template <class T, class Upload>
  requires detail::agreeing_ranks<T>
class joint_upload {
 public:
  using fence_type = typename Upload::fence_type;

  /// Ranks and upload outlive it.
  joint_upload(T& ranks, Upload& upload) noexcept : ranks_(&ranks), upload_(&upload) {}

  /// @param weights  of this rank's device: a `versioned<refit_device_image<Space>, ...>` with two slots at
  ///                 least.
  /// @param after    of everything that still reads the slot to be written.
  template <class Versions>
  [[nodiscard]] result<version_id> publish(const refit_image& image, Versions& weights, deadline by,
                                           std::span<const fence_type> after = {}) {
    const std::uint64_t number = image.number();
    if (const auto newest = weights.snapshot(); newest && (*newest)->number() == number) {
      if (auto all = vote(number, by); !all) return all.error();
      return newest->version();
    }
    if (granted_ != number) granted_.reset();
    bool has_voted = false;
    const auto is_agreed = [&] {
      has_voted = true;
      return vote(number, by);
    };
    try {
      auto done = upload_->publish(image, weights, after, is_agreed);
      if (!has_voted) vote_against(number, by);
      return done;
    } catch (...) {
      if (!has_voted) vote_against(number, by);
      throw;
    }
  }

  /// The answer of the last vote, for `shrink` or `admit`; none if the last vote had no answer.
  [[nodiscard]] const std::optional<comm::agreed>& last_vote() const noexcept { return vote_; }

 private:
  /// The AND of equal words is the word; of others, no word: each has a bit or its complement.
  [[nodiscard]] static std::uint64_t word_of(std::uint64_t number) noexcept {
    constexpr std::uint64_t low = 0xFFFF'FFFF;
    return (number & low) | (~number & low) << 32;
  }
  /// Whether all have that number and live: a member that died may have had the image or not, and the others
  /// could not serve without it in either case.
  [[nodiscard]] static bool grants(const comm::agreed& answer, std::uint64_t number) noexcept {
    return answer.bits == word_of(number) && answer.failed.empty();
  }
  result<void> vote(std::uint64_t number, deadline by) {
    if (std::exchange(granted_, std::nullopt) == number) return {};
    const auto answer = ask(word_of(number), by);
    if (!answer) return answer.error();
    if (grants(*answer, number)) return {};
    return failure{errc::refit_abandoned, 0, number, answer->failed.size(), "joint_upload"};
  }
  void vote_against(std::uint64_t number, deadline by) {
    if (granted_ == number) return;
    const auto answer = ask(0, by);
    // Then it was the answer to this rank's earlier vote, and the others publish: so does the next call.
    if (answer && grants(*answer, number)) granted_ = number;
  }
  result<comm::agreed> ask(std::uint64_t word, deadline by) {
    vote_.reset();
    auto answer = ranks_->agree(word, by);
    if (answer) vote_ = *answer;
    return answer;
  }

  T* ranks_;
  Upload* upload_;
  std::optional<comm::agreed> vote_{};
  std::optional<std::uint64_t> granted_{};  // all have voted for it, and this rank has not published it
};

/// The weights that a rank's steps read, by the number that the batch of each step names: the same number on
/// all ranks, whichever of them have published a newer one by then.
///
///     weights_in_use served(device_weights);          // each rank, before the first step
///     // The rank that schedules names served.newest() in the batch that goes to all ranks.
///     const auto mine = served.at(batch.number);      // each rank, before it starts the kernels of the step
///
/// It pins one version, at first the newest, then that of the last number. While a rank pins the version
/// before the newest, `double_buffer` has no slot for another one, so `publish` returns
/// `errc::version_pinned` there: no rank can miss a number. With more slots take `stash`, because `latest`
/// may drop a version that no step has named yet. Made before the first weights it pins none until a step
/// names a number, and that one may be missed: make it when they are published. When a step names another
/// number, kernels of the earlier version may still run: the next `publish` takes their fences.
///
/// @par Complexity      O(versions kept).
/// @par Thread safety   one thread at a time; another may publish meanwhile.
/// @par Errors          `errc::no_such_version`, wanted the number, found that of the newest here: the answer
///      of the vote is under way to this rank's `publish`; call again when that has returned. If it has
///      returned a failure, this rank is behind: publish again. `errc::version_expired`: the newest here has
///      a higher number, and no version with the number is kept.
template <class Versions>
class weights_in_use {
 public:
  using image_type = typename Versions::pinned::value_type;

  /// Pins the newest version, if there is one. The versions outlive it.
  explicit weights_in_use(Versions& weights) noexcept : weights_(&weights) {
    if (auto first = weights.snapshot()) held_ = std::move(*first);
  }

  /// Returns the weights with this number. They stay until a call with another number that succeeds.
  [[nodiscard]] result<const image_type*> at(std::uint64_t number) noexcept {
    if (!held_ || held_->number() != number) {
      if (auto found = hold(number); !found) return found.error();
    }
    return &*held_;
  }
  /// Returns the number of the newest weights here, for the batch of the next step; 0 before the first.
  [[nodiscard]] std::uint64_t newest() const noexcept {
    const auto found = weights_->snapshot();
    return found ? (*found)->number() : 0;
  }
  /// Unpins the weights, because no step reads them: the next number may then be missed.
  void release() noexcept { held_.release(); }

 private:
  /// Numbers ascend with versions.
  result<void> hold(std::uint64_t number) noexcept {
    const std::uint64_t newest_number = newest();
    const std::uint64_t oldest = to_number(weights_->oldest());
    const std::uint64_t last = to_number(weights_->newest());
    for (std::uint64_t at = last; at != 0 && at >= oldest; --at) {
      auto found = weights_->pin(version_id{at});
      if (!found || (*found)->number() > number) continue;
      if ((*found)->number() < number) break;
      held_ = std::move(*found);
      return {};
    }
    // The first number may be 0.
    const bool comes = last == 0 || newest_number < number;
    const error_code why = comes ? errc::no_such_version : errc::version_expired;
    return failure{why, 0, number, newest_number, "weights_in_use"};
  }

  Versions* weights_;
  typename Versions::pinned held_{};
};

}  // namespace v0
}  // namespace llmmem
