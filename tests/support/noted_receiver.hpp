// A receiver that notes how its operation completed, and on which thread.
#pragma once

#include <stdexec/execution.hpp>

#include <atomic>
#include <exception>
#include <string>
#include <thread>
#include <utility>

namespace llmmem_tests {

/// How an operation completed. One thread writes it before `times` counts.
struct completion_note {
  std::atomic<int> times{0};
  std::string how;
  std::thread::id thread;
  bool stop_requested = false;
  void (*then)(void*) = nullptr;  // the continuation
  void* context = nullptr;
};

struct noted_stop_token {
  const completion_note* note;

  [[nodiscard]] bool stop_requested() const noexcept { return note->stop_requested; }
  [[nodiscard]] static constexpr bool stop_possible() noexcept { return true; }
  template <class Callback>
  struct callback_type {
    callback_type(noted_stop_token, Callback) noexcept {}
  };
  friend bool operator==(const noted_stop_token&, const noted_stop_token&) noexcept = default;
};

struct noted_env {
  const completion_note* note;

  [[nodiscard]] noted_stop_token query(stdexec::get_stop_token_t) const noexcept { return {note}; }
};

class noted_receiver {
 public:
  using receiver_concept = stdexec::receiver_t;

  explicit noted_receiver(completion_note& note) noexcept : note_(&note) {}
  void set_value() && noexcept { end("value"); }
  void set_stopped() && noexcept { end("stopped"); }
  void set_error(std::exception_ptr why) && noexcept {
    try {
      std::rethrow_exception(std::move(why));
    } catch (const std::exception& thrown) {
      end(thrown.what());
    }
  }
  [[nodiscard]] noted_env get_env() const noexcept { return {note_}; }

 private:
  void end(std::string how) noexcept {
    completion_note& note = *note_;  // the continuation may end this receiver
    note.how = std::move(how);
    note.thread = std::this_thread::get_id();
    if (note.then != nullptr) note.then(note.context);
    note.times.fetch_add(1);
  }

  completion_note* note_;
};

}  // namespace llmmem_tests
