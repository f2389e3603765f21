/// @file
/// A Redis server of a test's own, without a network or a file that outlives it.
#pragma once

#include <fcntl.h>
#include <hiredis/hiredis.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "support/temporary_folder.hpp"

namespace llmmem_tests {

/// Returns the path of `redis-server`, empty if this machine has none.
inline std::string redis_program() {
  const char* const path = std::getenv("PATH");
  std::string folders = path == nullptr ? "" : path;
  for (std::size_t at = 0; at < folders.size();) {
    std::size_t end = folders.find(':', at);
    if (end == std::string::npos) end = folders.size();
    const std::string program = folders.substr(at, end - at) + "/redis-server";
    if (::access(program.c_str(), X_OK) == 0) return program;
    at = end + 1;
  }
  return {};
}

/// Starts it in the constructor, kills it in the destructor; `stop`, `go_on`, `kill` and `start` in between.
class redis_server {
 public:
  explicit redis_server(std::vector<std::string> more = {}) : more_(std::move(more)) { start(); }
  ~redis_server() { kill(); }

  [[nodiscard]] std::string socket() const { return folder_.file("s"); }
  void start() {
    std::vector<std::string> arguments{
        "--port", "0",     "--unixsocket",         socket(), "--save", "", "--appendonly",
        "no",     "--dir", folder_.path().string()};
    arguments.insert(arguments.end(), more_.begin(), more_.end());
    arguments.insert(arguments.begin(), redis_program());
    std::vector<char*> words;
    for (std::string& each : arguments)
      words.push_back(each.data());
    words.push_back(nullptr);
    const std::string notes = folder_.file("notes");
    child_ = ::fork();
    if (child_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      const int file = ::open(notes.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
      if (file < 0 || ::dup2(file, STDOUT_FILENO) < 0 || ::dup2(file, STDERR_FILENO) < 0) ::_exit(126);
      ::execv(words[0], words.data());
      ::_exit(127);
    }
    for (int i = 0; i < 5000; ++i) {
      if (const std::string answer = ask({"PING"});
          answer == "PONG" || answer.find("NOAUTH") != std::string::npos)
        return;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    throw std::runtime_error("redis-server does not answer");
  }
  void kill() {
    if (client_ != nullptr) redisFree(client_);
    client_ = nullptr;
    if (child_ <= 0) return;
    ::kill(child_, SIGKILL);
    ::waitpid(child_, nullptr, 0);
    child_ = -1;
  }
  void stop() const { ::kill(child_, SIGSTOP); }
  void go_on() const { ::kill(child_, SIGCONT); }

  /// Returns a reply as text; of an array its elements, each ended by a line break. A nil is "(nil)".
  std::string ask(const std::vector<std::string>& command) {
    if (client_ == nullptr) client_ = redisConnectUnix(socket().c_str());
    if (client_ == nullptr || client_->err != 0) return lost();
    std::vector<const char*> bytes;
    std::vector<std::size_t> sizes;
    for (const std::string& each : command) {
      bytes.push_back(each.data());
      sizes.push_back(each.size());
    }
    auto* const reply = static_cast<redisReply*>(
        redisCommandArgv(client_, static_cast<int>(command.size()), bytes.data(), sizes.data()));
    if (reply == nullptr) return lost();
    const std::string out = text_of(*reply);
    freeReplyObject(reply);
    return out;
  }

 private:
  std::string lost() {
    if (client_ != nullptr) redisFree(client_);
    client_ = nullptr;
    return {};
  }
  static std::string text_of(const redisReply& reply) {
    if (reply.type == REDIS_REPLY_INTEGER) return std::to_string(reply.integer);
    if (reply.type == REDIS_REPLY_NIL) return "(nil)";
    if (reply.type != REDIS_REPLY_ARRAY) return {reply.str, reply.len};
    std::string out;
    for (std::size_t i = 0; i < reply.elements; ++i)
      out += text_of(*reply.element[i]) + "\n";
    return out;
  }

  temporary_folder folder_;
  std::vector<std::string> more_;
  ::pid_t child_ = -1;
  redisContext* client_ = nullptr;
};

}  // namespace llmmem_tests
