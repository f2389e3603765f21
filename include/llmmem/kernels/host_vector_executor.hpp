/// @file
/// `host_vector_executor`: runs attention on the host by vector instructions, on the caller's threads.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/kernels/detail/amx_attention.hpp>
#include <llmmem/kernels/detail/vector_attention.hpp>
#include <llmmem/kernels/detail/vector_codes.hpp>
#include <llmmem/kernels/detail/vector_integers.hpp>
#include <llmmem/kernels/detail/vector_latents.hpp>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/vector_path.hpp>
#include <llmmem/result.hpp>

#include <concepts>
#include <cstdint>
#include <utility>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// A part of a job, for the concept: not every compiler takes a lambda there.
struct any_part {
  void operator()(std::uint64_t /*part*/) const noexcept {}
};

}  // namespace detail

/// Runs the parts of a job: `team(parts, run)` calls `run(part)` once for each part below `parts`, on any
/// threads and in any order, and returns after the last of them. The calls do not throw; an exception of the
/// team leaves `paged_attention`, which may have written some outputs. An engine's thread pool, OpenMP or
/// `std::execution::par` fit in a few lines; the library starts no thread.
template <class T>
concept thread_team = std::copy_constructible<T> &&
                      requires(const T& team, std::uint64_t parts) { team(parts, detail::any_part()); };

/// The calling thread alone.
struct calling_thread {
  template <class Run>
  void operator()(std::uint64_t parts, const Run& run) const noexcept {
    for (std::uint64_t part = 0; part < parts; ++part)
      run(part);
  }
};

/// A `host_executor` that also runs `attention_arithmetic::host_vectors` and `host_integers`:
/// `paged_attention` and `paged_attention_part` at the speed of the host's memory. All other kernels, and the
/// other arithmetic, run as on `host_executor`, in the calling thread.
///
/// @par Thread safety   any number of calls at once on different outputs, if the team permits it.
template <thread_team Team = calling_thread>
class host_vector_executor : public host_executor {
 public:
  /// Takes `best_vector_path()` for floats. Each job of integers takes `best_integer_path()`, so Linux is
  /// asked for AMX only by programs that run such jobs.
  explicit host_vector_executor(Team team = {}) : path_(best_vector_path()), team_(std::move(team)) {}
  /// Takes one path for both. @throws argument_error if this machine does not have the path.
  explicit host_vector_executor(vector_path path, Team team = {})
      : path_(checked_vector_path(path)), is_named_(true), team_(std::move(team)) {}

  /// Returns the path of floats.
  [[nodiscard]] vector_path path() const noexcept { return path_; }
  /// Returns the path of integers.
  [[nodiscard]] vector_path integer_path() const noexcept { return is_named_ ? path_ : best_integer_path(); }

  /// Attends to the shares of all rows: for `paged_attention`, which has checked them.
  template <dtype Element, class Tables>
  result<void> attend_by_vectors(const detail::attention_shape& shape, const Tables& tables) const {
    const detail::vector_attention_work<Element, Tables> work(shape, tables, path_);
    team_(work.items(), [&](std::uint64_t item) noexcept { work.run(item); });
    return {};
  }

  /// The same over codes with scales.
  template <class Tables>
  result<void> attend_by_vectors(const detail::attention_shape& shape, const detail::attention_codes& codes,
                                 const Tables& tables) const {
    const detail::vector_codes_work<Tables> work(shape, codes, tables, detail::float_path(path_));
    team_(work.items(), [&](std::uint64_t item) noexcept { work.run(item); });
    return {};
  }

  /// The same over codes, multiplied as integers.
  template <class Tables>
  result<void> attend_by_integers(const detail::attention_shape& shape, const detail::attention_codes& codes,
                                  const Tables& tables) const {
    const vector_path path = integer_path();
#if defined(__x86_64__)
    if (path == vector_path::amx) {
      const detail::amx_integers_work<Tables> work(shape, codes, tables);
      team_(work.items(), [&](std::uint64_t item) noexcept { work.run(item); });
      return {};
    }
#endif
    const detail::vector_integers_work<Tables> work(shape, codes, tables, path);
    team_(work.items(), [&](std::uint64_t item) noexcept { work.run(item); });
    return {};
  }

  /// The same over records of latents.
  template <class Tables>
  result<void> attend_by_vectors(const detail::attention_shape& shape, const detail::latent_plane& plane,
                                 const Tables& tables) const {
    const detail::vector_latents_work<Tables> work(shape, plane, tables, detail::float_path(path_));
    team_(work.items(), [&](std::uint64_t item) noexcept { work.run(item); });
    return {};
  }

 private:
  vector_path path_;
  bool is_named_ = false;  // by the caller
  Team team_;
};

}  // namespace v0
}  // namespace llmmem
