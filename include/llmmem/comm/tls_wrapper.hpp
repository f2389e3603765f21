/// @file
/// `tls_wrapper`: the TCP connections of socket endpoints over TLS 1.3, under the job's secret. Link
/// `llmmem::openssl`.
#pragma once

#include <llmmem/comm/detail/socket_descriptor.hpp>
#include <llmmem/comm/errors.hpp>
#include <llmmem/comm/socket_options.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/hash/hmac_sha256.hpp>

#if !defined(__linux__)
#error "llmmem/comm/tls_wrapper.hpp needs Linux: eventfd and nonblocking socket pairs."
#endif
#if !__has_include(<openssl/ssl.h>)
#error "llmmem/comm/tls_wrapper.hpp needs OpenSSL 3: install libssl-dev, and link llmmem::openssl."
#endif

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The counters of a `tls_wrapper`. A plain value.
struct tls_stats {
  std::uint64_t open = 0;       ///< connections now, handshakes included
  std::uint64_t shaken = 0;     ///< handshakes that succeeded
  std::uint64_t refused = 0;    ///< handshakes that failed: another secret, or a peer without TLS
  std::uint64_t tampered = 0;   ///< connections ended by a record that the other end did not write
  std::uint64_t cut = 0;        ///< connections that ended without the notice of their end (a killed process,
                                ///< or another machine in the network)
  std::uint64_t bytes_in = 0;   ///< plain
  std::uint64_t bytes_out = 0;  ///< plain
};

/// Hides what endpoints send to each other over TCP from every machine without the job's secret.
///
///     tls_wrapper tls(secret);
///     socket_endpoint end({.seat = seat, .seats = 4, .addresses = all, .secret = secret,
///                          .reach = socket_reach::any_machine, .wrapper = &tls});
///
/// TLS 1.3 with an external pre-shared key made of the secret by HMAC-SHA256, a fresh Diffie-Hellman exchange
/// for each connection (`psk_dhe_ke`: a machine that learns the secret later cannot read recorded traffic)
/// and TLS_AES_128_GCM_SHA256. There are no certificates, no resumption, and no other version or cipher. The
/// endpoints' own handshake runs inside: it says which process has which seat.
///
/// One thread moves the bytes between the endpoints' sockets, which are local pairs, and the connections. It
/// costs a copy each way through the kernel, and the cipher: see docs/benchmarks/comm.md.
///
/// A record that was changed, left out, repeated or reordered ends the connection, as a broken connection
/// does: nothing of it reaches the endpoint. A machine that can write into the network can always end a
/// connection: set `on_reset::suspected` where that must not count as a death.
///
/// A peer that has the secret and sends nothing but updates of its key (`KeyUpdate`) holds up no other
/// connection: the thread takes one record at a time of each. More than 64 of them, and one for each MiB of
/// data, end the connection as `tampered`: endpoints send none.
///
/// What an endpoint wrote last is lost if the other endpoint does not read it within `linger_time`: for so
/// long the wrapper keeps a connection that its own endpoint has closed.
///
/// @par Complexity      32 KiB of buffers and OpenSSL's own memory (some 40 KiB) for each connection.
/// @par Thread safety   any thread calls it; it outlives its endpoints. Not for use in a forked child.
/// @par Errors          the constructor: `argument_error` for an empty secret and for a linger time below
///                      1 ms or above a day; `system_error`.
/// @par Source          RFC 8446, sections 2.2 and 4.2.11.
class tls_wrapper final : public socket_wrapper {
 public:
  explicit tls_wrapper(std::string_view secret,
                       std::chrono::milliseconds linger_time = std::chrono::seconds(2));
  /// Sends what endpoints have written, and waits until the others have read it, for one second at most; ends
  /// all connections.
  ~tls_wrapper();

  [[nodiscard]] int wrap(int connected, bool has_called) noexcept override;
  [[nodiscard]] seat_absence why_ended(int wrapped) const noexcept override {
    const std::lock_guard lock(mutex_);
    const auto at = static_cast<std::size_t>(wrapped);
    return wrapped >= 0 && at < ends_.size() ? ends_[at].why : seat_absence::no_contact;
  }
  [[nodiscard]] tls_stats stats() const noexcept {
    const std::lock_guard lock(mutex_);
    return stats_;
  }

 private:
  static constexpr std::size_t part_bytes = 16384;  // the most bytes of a record

  struct context_deleter {
    void operator()(SSL_CTX* context) const noexcept { ::SSL_CTX_free(context); }
  };
  struct session_deleter {
    void operator()(SSL* session) const noexcept { ::SSL_free(session); }
  };

  /// Of the connection that had a number of an endpoint's socket last: the number of one that is closed may
  /// be given to another socket while its connection still sends.
  struct ending {
    std::uint64_t connection = 0;
    seat_absence why = seat_absence::no_contact;
  };

  /// Bytes on their way from one side to the other.
  struct passage {
    std::array<std::byte, part_bytes> bytes{};
    std::size_t begin = 0;
    std::size_t end = 0;
    bool is_over = false;  // its source has ended

    [[nodiscard]] bool empty() const noexcept { return begin == end; }
    [[nodiscard]] std::size_t size() const noexcept { return end - begin; }
  };

  struct connection {
    detail::descriptor network;
    detail::descriptor local;
    std::unique_ptr<SSL, session_deleter> session;
    int endpoint = -1;              // the number of the endpoint's socket
    std::uint64_t number = 0;       // of all connections
    std::uint64_t taken = 0;        // plain bytes
    std::uint64_t key_updates = 0;  // of the other end
    std::chrono::steady_clock::time_point lingers_until{};
    bool is_lingering = false;  // all is sent; the other end has not read all
    bool is_shaken = false;
    bool is_broken = false;
    bool is_left = false;      // the endpoint has closed its socket
    bool cannot_send = false;  // arriving bytes may still be read
    short network_events = 0;
    short local_events = 0;
    passage out;  // to the network
    passage in;
  };

  static int find_secret(SSL* session, const unsigned char* identity, std::size_t bytes, SSL_SESSION** found);
  static int use_secret(SSL* session, const EVP_MD* digest, const unsigned char** identity,
                        std::size_t* bytes, SSL_SESSION** used);
  [[nodiscard]] static SSL_SESSION* session_of(SSL* session) noexcept;
  void run() noexcept;
  void move(connection& c) noexcept;
  [[nodiscard]] bool shake(connection& c) noexcept;
  [[nodiscard]] bool send_out(connection& c) noexcept;
  void linger(connection& c) noexcept;
  [[nodiscard]] int next_wait_ms(bool is_soon) const noexcept;
  static void see_record(int is_written, int version, int type, const void* bytes, std::size_t size,
                         SSL* session, void* of);
  [[nodiscard]] bool take_in(connection& c) noexcept;
  /// Notes what OpenSSL waits for; false when the connection is broken.
  [[nodiscard]] bool waits(connection& c, int result) noexcept;
  void count(std::uint64_t tls_stats::* of, std::uint64_t more = 1) noexcept {
    const std::lock_guard lock(mutex_);
    stats_.*of += more;
  }
  void ended(const connection& c, seat_absence why) noexcept {
    const std::lock_guard lock(mutex_);
    ending& last = ends_[static_cast<std::size_t>(c.endpoint)];
    if (last.connection == c.number) last.why = why;
  }

  static constexpr std::string_view identity_ = "llmmem";

  std::unique_ptr<SSL_CTX, context_deleter> context_;
  std::array<unsigned char, 32> key_{};
  std::chrono::milliseconds linger_time_;
  detail::descriptor wake_;
  mutable std::mutex mutex_;  // protects the members up to `is_ending_`
  std::list<std::unique_ptr<connection>> fresh_;
  std::vector<ending> ends_;  // by the number of the endpoint's socket
  tls_stats stats_;
  std::uint64_t wrapped_ = 0;
  bool is_ending_ = false;
  std::list<std::unique_ptr<connection>> connections_;  // the thread's
  std::thread thread_;
};

inline tls_wrapper::tls_wrapper(std::string_view secret, std::chrono::milliseconds linger_time)
    : linger_time_(linger_time) {
  if (secret.empty()) {
    throw argument_error(
        "tls_wrapper: the secret is empty, so anyone has it; give all processes the same secret, 16 random "
        "bytes or more");
  }
  if (linger_time < std::chrono::milliseconds(1) || linger_time > std::chrono::hours(24)) {
    throw argument_error("tls_wrapper: a linger time of " + std::to_string(linger_time.count()) +
                         " ms; give the other end 1 ms to 24 hours to take what an endpoint wrote last");
  }
  const detail::hmac_sha256 made(std::as_bytes(std::span(secret.data(), secret.size())));
  constexpr std::string_view use = "llmmem tls 1.3 psk 1";
  const detail::sha256_words words = made.of(std::as_bytes(std::span(use.data(), use.size())));
  for (std::size_t i = 0; i < key_.size(); ++i)
    key_[i] = static_cast<unsigned char>(words[i / 4] >> (24 - 8 * (i % 4)));
  context_.reset(::SSL_CTX_new(::TLS_method()));
  SSL_CTX* const c = context_.get();
  if (c == nullptr || SSL_CTX_set_min_proto_version(c, TLS1_3_VERSION) != 1 ||
      SSL_CTX_set_max_proto_version(c, TLS1_3_VERSION) != 1 ||
      ::SSL_CTX_set_session_id_context(c, reinterpret_cast<const unsigned char*>(identity_.data()),
                                       static_cast<unsigned int>(identity_.size())) != 1 ||
      ::SSL_CTX_set_ciphersuites(c, "TLS_AES_128_GCM_SHA256") != 1 || ::SSL_CTX_set_num_tickets(c, 0) != 1)
    throw system_error("tls_wrapper: OpenSSL refuses TLS 1.3 with TLS_AES_128_GCM_SHA256; use OpenSSL 3");
  SSL_CTX_set_session_cache_mode(c, SSL_SESS_CACHE_OFF);
  // There are no certificates: a listener that shows one instead of the secret is refused.
  ::SSL_CTX_set_verify(c, SSL_VERIFY_PEER, nullptr);
  SSL_CTX_set_mode(c, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  ::SSL_CTX_set_psk_find_session_callback(c, &find_secret);
  ::SSL_CTX_set_psk_use_session_callback(c, &use_secret);
  SSL_CTX_set_app_data(c, this);
  // One call reads one record, also of a peer that sends only records without data.
  SSL_CTX_clear_mode(c, SSL_MODE_AUTO_RETRY);
  ::SSL_CTX_set_msg_callback(c, &see_record);
  wake_ = detail::descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_.is_open()) throw system_error("tls_wrapper: eventfd" + detail::because(errno));
  // The program's own threads handle signals; a write to a connection that has ended raises none.
  sigset_t all{};
  sigset_t before{};
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] {
      ::pthread_setname_np(::pthread_self(), "llmmem-tls");
      run();
    });
  } catch (...) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw system_error("tls_wrapper: its thread could not be started; raise the limit of threads");
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

inline tls_wrapper::~tls_wrapper() {
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  const std::uint64_t one = 1;
  static_cast<void>(!::write(wake_.get(), &one, sizeof(one)));
  thread_.join();
}

/// Returns the secret as OpenSSL takes it; null without memory.
inline SSL_SESSION* tls_wrapper::session_of(SSL* session) noexcept {
  const auto* const self = static_cast<const tls_wrapper*>(SSL_CTX_get_app_data(::SSL_get_SSL_CTX(session)));
  constexpr unsigned char aes_128_gcm_sha256[] = {0x13, 0x01};
  const SSL_CIPHER* const cipher = ::SSL_CIPHER_find(session, aes_128_gcm_sha256);
  SSL_SESSION* const made = ::SSL_SESSION_new();
  if (made != nullptr && cipher != nullptr &&
      ::SSL_SESSION_set1_master_key(made, self->key_.data(), self->key_.size()) == 1 &&
      ::SSL_SESSION_set1_id_context(made, reinterpret_cast<const unsigned char*>(identity_.data()),
                                    static_cast<unsigned int>(identity_.size())) == 1 &&
      ::SSL_SESSION_set_cipher(made, cipher) == 1 &&
      ::SSL_SESSION_set_protocol_version(made, TLS1_3_VERSION) == 1)
    return made;
  ::SSL_SESSION_free(made);
  return nullptr;
}

inline int tls_wrapper::find_secret(SSL* session, const unsigned char* identity, std::size_t bytes,
                                    SSL_SESSION** found) {
  *found = nullptr;
  if (bytes == identity_.size() && std::memcmp(identity, identity_.data(), bytes) == 0)
    *found = session_of(session);
  return 1;
}

inline int tls_wrapper::use_secret(SSL* session, const EVP_MD* /*digest*/, const unsigned char** identity,
                                   std::size_t* bytes, SSL_SESSION** used) {
  *identity = reinterpret_cast<const unsigned char*>(identity_.data());
  *bytes = identity_.size();
  *used = session_of(session);
  return *used != nullptr ? 1 : 0;
}

inline int tls_wrapper::wrap(int connected, bool has_called) noexcept {
  try {
    auto made = std::make_unique<connection>();
    made->network = detail::descriptor(::fcntl(connected, F_DUPFD_CLOEXEC, 0));
    int pair[2] = {-1, -1};
    if (!made->network.is_open() ||
        ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) != 0)
      return -1;
    detail::descriptor theirs(pair[0]);
    made->local = detail::descriptor(pair[1]);
    made->session.reset(::SSL_new(context_.get()));
    if (made->session == nullptr || ::SSL_set_fd(made->session.get(), made->network.get()) != 1) return -1;
    if (has_called) {
      ::SSL_set_connect_state(made->session.get());
    } else {
      ::SSL_set_accept_state(made->session.get());
    }
    made->endpoint = theirs.get();
    const auto at = static_cast<std::size_t>(theirs.get());
    {
      const std::lock_guard lock(mutex_);
      if (ends_.size() <= at) ends_.resize(at + 1);
      made->number = ++wrapped_;
      SSL_set_msg_callback_arg(made->session.get(), made.get());
      ends_[at] = {made->number, seat_absence::no_contact};
      fresh_.push_back(std::move(made));
      ++stats_.open;
    }
    const std::uint64_t one = 1;
    static_cast<void>(!::write(wake_.get(), &one, sizeof(one)));
    return theirs.release();
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

/// The thread: moves bytes until the wrapper ends.
inline void tls_wrapper::run() noexcept {
  std::vector<pollfd> polled;
  bool is_ending = false;
  std::chrono::steady_clock::time_point ends{};
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      connections_.splice(connections_.end(), fresh_);
      if (is_ending_ && !std::exchange(is_ending, true))
        ends = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    }
    for (auto at = connections_.begin(); at != connections_.end();) {
      move(**at);
      if ((*at)->is_broken) {
        at = connections_.erase(at);
        const std::lock_guard lock(mutex_);
        --stats_.open;
      } else {
        ++at;
      }
    }
    if (is_ending && (connections_.empty() || std::chrono::steady_clock::now() >= ends)) break;
    try {
      polled.assign(1, {wake_.get(), POLLIN, 0});
      for (const auto& each : connections_) {
        polled.push_back({each->network_events != 0 ? each->network.get() : -1, each->network_events, 0});
        // Without events too: the endpoint may close its socket while bytes wait for the network.
        const bool is_asked = each->local_events != 0 || !each->is_left;
        polled.push_back({is_asked ? each->local.get() : -1, each->local_events, 0});
      }
    } catch (const std::bad_alloc&) {
      polled.resize(1);  // looks again soon
    }
    const bool is_whole = polled.size() == 1 + 2 * connections_.size();
    ::poll(polled.data(), polled.size(), next_wait_ms(is_ending || !is_whole));
    std::size_t at = 2;
    for (const auto& each : connections_) {
      if (!is_whole) break;
      if ((polled[at].revents & POLLHUP) != 0 && !std::exchange(each->is_left, true)) {
        const auto most_ms = static_cast<unsigned int>(linger_time_.count());
        ::setsockopt(each->network.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &most_ms, sizeof(most_ms));
      }
      at += 2;
    }
    std::uint64_t times = 0;
    static_cast<void>(!::read(wake_.get(), &times, sizeof(times)));
  }
  connections_.clear();
}

/// Moves bytes both ways as far as possible, and sets the events to wait for.
inline void tls_wrapper::move(connection& c) noexcept {
  c.network_events = c.local_events = 0;
  if (c.is_lingering) return linger(c);
  if (!c.is_shaken && !shake(c)) return;
  // Each way until it must wait; a bounded number of times, so that no connection keeps others waiting.
  for (int i = 0; i < 64; ++i) {
    const bool has_sent = send_out(c);
    // Once it lingers, OpenSSL must not read: `linger` has dropped bytes, perhaps the first ones of a record.
    if (c.is_broken || c.is_lingering) return;
    const bool has_taken = take_in(c);
    if (c.is_broken || (!has_sent && !has_taken)) return;
  }
  c.network_events = POLLIN | POLLOUT;  // there is more
}

inline bool tls_wrapper::waits(connection& c, int result) noexcept {
  switch (::SSL_get_error(c.session.get(), result)) {
    case SSL_ERROR_WANT_READ:
      c.network_events = static_cast<short>(c.network_events | POLLIN);
      return true;
    case SSL_ERROR_WANT_WRITE:
      c.network_events = static_cast<short>(c.network_events | POLLOUT);
      return true;
    default:
      return false;
  }
}

/// Continues the handshake; true once it is over.
inline bool tls_wrapper::shake(connection& c) noexcept {
  ::ERR_clear_error();
  const int done = ::SSL_do_handshake(c.session.get());
  // A listener without the secret cannot get here: it has no certificate that would be accepted.
  if (done == 1 && ::SSL_session_reused(c.session.get()) == 1) {
    c.is_shaken = true;
    count(&tls_stats::shaken);
    return true;
  }
  if (done != 1 && waits(c, done)) {
    c.is_broken = c.is_left;  // the endpoint has given the connection up
    return false;
  }
  // One end has found that the other does not know this secret. Any other error means that the other end does
  // not speak TLS.
  const unsigned long first = ::ERR_peek_error();
  const int reason = ERR_GET_REASON(first);
  const bool is_alert = first != 0 && reason >= SSL_AD_REASON_OFFSET;
  const bool is_other = is_alert || reason == SSL_R_BINDER_DOES_NOT_VERIFY || reason == SSL_R_BAD_PSK ||
                        reason == SSL_R_NO_SUITABLE_SIGNATURE_ALGORITHM;
  ended(c, is_other ? seat_absence::other_secret : seat_absence::other_wrapper);
  count(&tls_stats::refused);
  if (!is_other && ::SSL_is_server(c.session.get()) == 1) {
    // An alert (protocol_version), by which an endpoint without a wrapper recognises TLS. Unread bytes would
    // make the system end the connection before the other end has read the alert.
    constexpr std::array<unsigned char, 7> alert{0x15, 3, 3, 0, 2, 2, 70};
    static_cast<void>(::send(c.network.get(), alert.data(), alert.size(), MSG_DONTWAIT | MSG_NOSIGNAL));
    while (::recv(c.network.get(), c.in.bytes.data(), c.in.bytes.size(), MSG_DONTWAIT) > 0) {
    }
  }
  c.is_broken = true;
  return false;
}

/// From the endpoint to the network; returns whether anything moved.
inline bool tls_wrapper::send_out(connection& c) noexcept {
  bool has_moved = false;
  if (c.cannot_send) {
    c.is_broken = c.is_left;
    return false;
  }
  if (c.out.empty() && !c.out.is_over) {
    const ssize_t got = ::recv(c.local.get(), c.out.bytes.data(), c.out.bytes.size(), MSG_DONTWAIT);
    if (got > 0) {
      c.out.begin = 0;
      c.out.end = static_cast<std::size_t>(got);
    } else if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
      c.out.is_over = true;
    } else {
      c.local_events = static_cast<short>(c.local_events | POLLIN);
    }
  }
  while (!c.out.empty()) {
    std::size_t sent = 0;
    ::ERR_clear_error();
    const int done = ::SSL_write_ex(c.session.get(), c.out.bytes.data() + c.out.begin, c.out.size(), &sent);
    if (done != 1) {
      if (!waits(c, done)) c.cannot_send = true;
      return has_moved;
    }
    c.out.begin += sent;
    has_moved = true;
    count(&tls_stats::bytes_out, sent);
  }
  if (c.out.is_over) {  // the endpoint has closed its socket
    ::ERR_clear_error();
    const int done = ::SSL_shutdown(c.session.get());
    if (done < 0 && waits(c, done)) return has_moved;
    ::shutdown(c.network.get(), SHUT_WR);
    c.is_lingering = true;
    c.lingers_until = std::chrono::steady_clock::now() + linger_time_;
    linger(c);
  }
  return has_moved;
}

/// Drops what the other end sends until it has read all and closes: bytes that are left to read would make
/// the system reset the connection, and the other end would lose what it has not read.
inline void tls_wrapper::linger(connection& c) noexcept {
  for (int i = 0; i < 64; ++i) {
    const ssize_t got = ::recv(c.network.get(), c.in.bytes.data(), c.in.bytes.size(), MSG_DONTWAIT);
    if (got > 0 || (got < 0 && errno == EINTR)) continue;
    c.is_broken = got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
    break;
  }
  if (std::chrono::steady_clock::now() >= c.lingers_until) c.is_broken = true;
  c.network_events = POLLIN;
  c.is_left = true;  // the endpoint's socket is of no interest
}

/// How long the thread may wait for an event.
inline int tls_wrapper::next_wait_ms(bool is_soon) const noexcept {
  if (is_soon) return 10;
  for (const auto& each : connections_) {
    if (each->is_lingering) return 100;
  }
  return -1;
}

/// OpenSSL calls it for each message of a connection.
inline void tls_wrapper::see_record(int is_written, int /*version*/, int type, const void* bytes,
                                    std::size_t size, SSL* /*session*/, void* of) {
  if (is_written != 0 || type != SSL3_RT_HANDSHAKE || size == 0 || of == nullptr) return;
  if (*static_cast<const unsigned char*>(bytes) == SSL3_MT_KEY_UPDATE)
    ++static_cast<connection*>(of)->key_updates;
}

/// From the network to the endpoint; returns whether anything moved.
inline bool tls_wrapper::take_in(connection& c) noexcept {
  if (c.in.empty() && !c.in.is_over) {
    std::size_t got = 0;
    ::ERR_clear_error();
    const int done = ::SSL_read_ex(c.session.get(), c.in.bytes.data(), c.in.bytes.size(), &got);
    if (done == 1) {
      c.in.begin = 0;
      c.in.end = got;
      c.taken += got;
      count(&tls_stats::bytes_in, got);
    } else if (c.key_updates > 64 + (c.taken >> 20)) {
      c.in.is_over = true;
      count(&tls_stats::tampered);
    } else if (!waits(c, done)) {
      c.in.is_over = true;
      const bool is_cut = ::SSL_get_error(c.session.get(), done) == SSL_ERROR_SYSCALL ||
                          ERR_GET_REASON(::ERR_peek_error()) == SSL_R_UNEXPECTED_EOF_WHILE_READING;
      const bool is_end = ::SSL_get_error(c.session.get(), done) == SSL_ERROR_ZERO_RETURN;
      if (!is_end) count(is_cut ? &tls_stats::cut : &tls_stats::tampered);
    }
  }
  if (c.in.empty()) {
    if (c.in.is_over) c.is_broken = true;  // the endpoint reads the bytes that are there, and the end
    return false;
  }
  const ssize_t sent =
      ::send(c.local.get(), c.in.bytes.data() + c.in.begin, c.in.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent > 0) {
    c.in.begin += static_cast<std::size_t>(sent);
    return true;
  }
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) {
    c.local_events = static_cast<short>(c.local_events | POLLOUT);
    return false;
  }
  // The endpoint has closed its socket and takes nothing more. Its last bytes are still sent.
  c.in.begin = c.in.end;
  return true;
}

}  // namespace v0
}  // namespace llmmem
