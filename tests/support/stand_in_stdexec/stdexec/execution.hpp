// The words of P2300 that interop/fence_senders.hpp uses, for machines without stdexec: tags, customisation
// points that call members, environments. It has no algorithms; with the real library the tests use its own.
#pragma once

#include <concepts>
#include <type_traits>
#include <utility>

namespace stdexec {

struct sender_t {};
struct operation_state_t {};
struct scheduler_t {};
struct receiver_t {};

template <class... Signatures>
struct completion_signatures {};

struct set_value_t {
  template <class Receiver, class... Values>
  void operator()(Receiver&& receiver, Values&&... values) const noexcept {
    std::move(receiver).set_value(std::forward<Values>(values)...);
  }
};
struct set_error_t {
  template <class Receiver, class Error>
  void operator()(Receiver&& receiver, Error&& why) const noexcept {
    std::move(receiver).set_error(std::forward<Error>(why));
  }
};
struct set_stopped_t {
  template <class Receiver>
  void operator()(Receiver&& receiver) const noexcept {
    std::move(receiver).set_stopped();
  }
};
inline constexpr set_value_t set_value{};
inline constexpr set_error_t set_error{};
inline constexpr set_stopped_t set_stopped{};

template <class Signal>
struct get_completion_scheduler_t {
  template <class Attributes>
  [[nodiscard]] auto operator()(const Attributes& attributes) const noexcept {
    return attributes.query(*this);
  }
};
template <class Signal>
inline constexpr get_completion_scheduler_t<Signal> get_completion_scheduler{};

struct never_stop_token {
  [[nodiscard]] static constexpr bool stop_requested() noexcept { return false; }
};
struct get_stop_token_t {
  template <class Environment>
  [[nodiscard]] auto operator()(const Environment& environment) const noexcept {
    if constexpr (requires { environment.query(*this); }) {
      return environment.query(*this);
    } else {
      return never_stop_token{};
    }
  }
};
inline constexpr get_stop_token_t get_stop_token{};

struct empty_env {};
struct get_env_t {
  template <class Queryable>
  [[nodiscard]] auto operator()(const Queryable& queryable) const noexcept {
    if constexpr (requires { queryable.get_env(); }) {
      return queryable.get_env();
    } else {
      return empty_env{};
    }
  }
};
inline constexpr get_env_t get_env{};

struct connect_t {
  template <class Sender, class Receiver>
  [[nodiscard]] auto operator()(Sender&& sender, Receiver receiver) const {
    return std::forward<Sender>(sender).connect(std::move(receiver));
  }
};
struct start_t {
  template <class Operation>
  void operator()(Operation& operation) const noexcept {
    operation.start();
  }
};
struct schedule_t {
  template <class Scheduler>
  [[nodiscard]] auto operator()(Scheduler&& scheduler) const noexcept {
    return std::forward<Scheduler>(scheduler).schedule();
  }
};
inline constexpr connect_t connect{};
inline constexpr start_t start{};
inline constexpr schedule_t schedule{};

}  // namespace stdexec
