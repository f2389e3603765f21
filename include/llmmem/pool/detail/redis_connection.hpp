/// @file
/// A connection to a Redis server that never waits. Private to `redis_directory`; needs hiredis.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/pool/redis_types.hpp>

#include <hiredis/hiredis.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

struct redis_reply_deleter {
  void operator()(redisReply* reply) const noexcept { freeReplyObject(reply); }
};
using redis_reply = std::unique_ptr<redisReply, redis_reply_deleter>;

/// Commands in RESP2, and the server's replies in the order of the commands.
///
/// The socket is this class's own, because hiredis's contexts wait in some calls, and a write of theirs to a
/// closed connection raises SIGPIPE. hiredis reads the replies. It trusts the lengths in them, so this
/// class bounds the bytes and the elements of a reply.
///
/// @par Errors   the constructor throws `argument_error` for an address that cannot be one.
class redis_connection {
 public:
  explicit redis_connection(const redis_options& options)
      : max_reply_bytes_(options.max_reply_bytes), out_(options.buffer_bytes) {
    const auto refuse = [&](const std::string& why) { throw argument_error(options.name + ": " + why); };
    if (options.unix_socket.empty() == options.host.empty())
      refuse("redis_options must give either unix_socket or host, and not both");
    if (!options.unix_socket.empty()) {
      auto* const to = reinterpret_cast<sockaddr_un*>(&addresses_[0].of);
      if (options.unix_socket.size() >= sizeof(to->sun_path))
        refuse("the path '" + options.unix_socket + "' has " + std::to_string(options.unix_socket.size()) +
               " bytes, a socket's path at most " + std::to_string(sizeof(to->sun_path) - 1) +
               "; give a shorter one");
      to->sun_family = AF_UNIX;
      std::memcpy(to->sun_path, options.unix_socket.c_str(), options.unix_socket.size() + 1);
      addresses_[0].bytes = sizeof(sockaddr_un);
      count_ = 1;
      text_ = "unix:" + options.unix_socket;
      return;
    }
    text_ = options.host + ":" + std::to_string(options.port);
    for (std::size_t at = 0; at <= options.host.size();) {
      const std::size_t end = std::min(options.host.find(',', at), options.host.size());
      const std::string name = options.host.substr(at, end - at);
      at = end + 1;
      addrinfo hints{};
      hints.ai_socktype = SOCK_STREAM;
      addrinfo* found = nullptr;
      const int status = ::getaddrinfo(name.c_str(), std::to_string(options.port).c_str(), &hints, &found);
      if (status != 0)
        refuse("the host '" + name + "' is not known (" + ::gai_strerror(status) +
               "); give its address instead, or correct the name");
      for (const addrinfo* each = found; each != nullptr && count_ < addresses_.size();
           each = each->ai_next) {
        std::memcpy(&addresses_[count_].of, each->ai_addr, each->ai_addrlen);
        addresses_[count_++].bytes = each->ai_addrlen;
      }
      ::freeaddrinfo(found);
    }
  }
  redis_connection(const redis_connection&) = delete;
  redis_connection& operator=(const redis_connection&) = delete;
  ~redis_connection() { close(); }

  /// Begins to connect: to the address of the last connection from which something came, else to the next
  /// one.
  /// @return 0 or errno.
  [[nodiscard]] int open() noexcept {
    close();
    if (tried_ != 0) next_ = (next_ + 1) % count_;
    ++tried_;
    const address_of& to = addresses_[next_];
    socket_ = ::socket(to.of.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (socket_ < 0) return errno;
    if (to.of.ss_family != AF_UNIX) {
      const int on = 1;
      ::setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    }
    if (::connect(socket_, reinterpret_cast<const sockaddr*>(&to.of), to.bytes) != 0 &&
        errno != EINPROGRESS) {
      const int why = errno;
      close();
      return why;
    }
    reader_.reset(redisReaderCreate());
    if (!reader_) {
      close();
      return ENOMEM;
    }
    functions_ = *reader_->fn;
    inner_ = reader_->fn;
    functions_.createArray = bounded_array;
    reader_->fn = &functions_;
    reader_->privdata = this;
    elements_left_ = max_elements;
    parsed_bytes_ = 0;
    return 0;
  }
  void close() noexcept {
    if (socket_ >= 0) ::close(std::exchange(socket_, -1));
    reader_.reset();
    begin_ = end_ = 0;
    is_whole_ = true;
  }
  [[nodiscard]] bool is_open() const noexcept { return socket_ >= 0; }
  /// Returns whether the server has other addresses that were not tried since something came from it.
  [[nodiscard]] bool has_other_address() noexcept {
    if (tried_ != 0 && tried_ < count_) return true;
    tried_ = tried_ == 0 ? 0 : 1;  // the next `open` begins a new round
    return false;
  }
  [[nodiscard]] const std::string& address() const noexcept LLMMEM_LIFETIMEBOUND { return text_; }

  /// Begins a command of `count` arguments, its name included: `argument` adds each.
  void command(std::size_t count) noexcept {
    put("*");
    put_count(count);
  }
  void argument(std::string_view bytes) noexcept {
    put("$");
    put_count(bytes.size());
    put(bytes);
    put("\r\n");
  }
  void command(std::initializer_list<std::string_view> arguments) noexcept {
    command(arguments.size());
    for (const std::string_view each : arguments)
      argument(each);
  }
  [[nodiscard]] bool is_half_full() const noexcept { return end_ - begin_ > out_.size() / 2; }
  [[nodiscard]] std::size_t free_bytes() const noexcept { return out_.size() - (end_ - begin_); }
  [[nodiscard]] bool has_output() const noexcept { return end_ != begin_; }

  /// Sends what the socket takes. @return 0 or errno.
  [[nodiscard]] int flush() noexcept {
    if (!is_whole_) return ENOBUFS;
    while (begin_ != end_) {
      const ssize_t sent = ::send(socket_, out_.data() + begin_, end_ - begin_, MSG_NOSIGNAL);
      if (sent < 0) return errno == EAGAIN || errno == EINTR ? 0 : errno;
      begin_ += static_cast<std::size_t>(sent);
    }
    begin_ = end_ = 0;
    return 0;
  }
  /// Reads what has arrived, at most a MiB. @return 0 or errno; `EPROTO` for what is no reply or too long.
  [[nodiscard]] int read(bool& has_read) noexcept {
    std::array<char, 16384> bytes;  // NOLINT(cppcoreguidelines-pro-type-member-init)
    for (int i = 0; i < 64; ++i) {
      const ssize_t count = ::recv(socket_, bytes.data(), bytes.size(), 0);
      if (count == 0) return ECONNRESET;
      if (count < 0) return errno == EAGAIN || errno == EINTR ? 0 : errno;
      has_read = true;
      tried_ = 0;
      if (redisReaderFeed(reader_.get(), bytes.data(), static_cast<std::size_t>(count)) != REDIS_OK)
        return EPROTO;
      if (static_cast<std::size_t>(count) < bytes.size()) return 0;
      if (unread_bytes() > max_reply_bytes_) return 0;  // `next` checks whether it is one reply
    }
    return 0;
  }
  /// Takes the next reply, if all of it has arrived. @return 0 or `EPROTO`.
  [[nodiscard]] int next(redis_reply& into) noexcept {
    void* reply = nullptr;
    parsed_bytes_ += unread_bytes();
    if (redisReaderGetReply(reader_.get(), &reply) != REDIS_OK) return EPROTO;
    parsed_bytes_ -= unread_bytes();
    into.reset(static_cast<redisReply*>(reply));
    const std::size_t bytes = parsed_bytes_ + (into ? 0 : unread_bytes());
    if (into) {
      elements_left_ = max_elements;
      parsed_bytes_ = 0;
    }
    return bytes > max_reply_bytes_ ? EPROTO : 0;
  }

 private:
  static constexpr std::size_t max_elements = 1024;

  [[nodiscard]] std::size_t unread_bytes() const noexcept { return reader_->len - reader_->pos; }

  /// hiredis takes memory for as many elements as a reply claims to have.
  template <class Count>
  static void* bounded_array(const redisReadTask* task, Count count) {
    auto* const self = static_cast<redis_connection*>(task->privdata);
    const auto wanted = static_cast<std::size_t>(count);
    if (wanted > self->elements_left_) return nullptr;
    self->elements_left_ -= wanted;
    return self->inner_->createArray(task, count);
  }
  struct reader_deleter {
    void operator()(redisReader* reader) const noexcept { redisReaderFree(reader); }
  };

  void put_count(std::size_t count) noexcept {
    std::array<char, 24> text{};
    const auto end = std::to_chars(text.data(), text.data() + text.size(), count).ptr;
    put({text.data(), static_cast<std::size_t>(end - text.data())});
    put("\r\n");
  }
  void put(std::string_view bytes) noexcept {
    if (bytes.size() > out_.size() - end_ && begin_ != 0) {
      std::memmove(out_.data(), out_.data() + begin_, end_ - begin_);
      end_ -= std::exchange(begin_, 0);
    }
    if (bytes.size() > out_.size() - end_) {
      is_whole_ = false;
      return;
    }
    std::memcpy(out_.data() + end_, bytes.data(), bytes.size());
    end_ += bytes.size();
  }

  std::size_t max_reply_bytes_;
  struct address_of {
    sockaddr_storage of{};
    socklen_t bytes = 0;
  };
  std::array<address_of, 8> addresses_{};
  std::size_t count_ = 0;
  std::size_t next_ = 0;   // the address of this connection
  std::size_t tried_ = 0;  // connections since something came
  std::string text_;
  int socket_ = -1;
  std::unique_ptr<redisReader, reader_deleter> reader_;
  redisReplyObjectFunctions functions_{};
  redisReplyObjectFunctions* inner_ = nullptr;
  std::size_t elements_left_ = max_elements;
  std::size_t parsed_bytes_ = 0;  // of the reply that is being read: hiredis has elements of it
  std::vector<char> out_;         // bytes of commands: those from `begin_` to `end_` have not been sent
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
  bool is_whole_ = true;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
