/// @file
/// Bodies of ucx_mover.hpp. Only that file includes this one.
#pragma once

#include <llmmem/pool/ucx_mover.hpp>

#include <array>
#include <string_view>

namespace llmmem {
inline namespace v0 {
namespace detail {

[[nodiscard]] inline const char* transports_of(const ucx_options& options) noexcept {
  if (!options.transports.empty()) return options.transports.c_str();
  switch (options.lane) {
    case ucx_lane::shared_memory:
      return "posix,self";
    case ucx_lane::tcp:
      return "tcp,self";
    case ucx_lane::rdma:
      break;
  }
  return "rc,dc,self";
}

/// Peer error mode removes shared memory unless that reports errors, too, which by default it does not.
[[nodiscard]] inline ucx_settings settings_of(const ucx_options& options) noexcept {
  const char* const transports = transports_of(options);
  const bool is_shared = std::string_view(transports).find("posix") != std::string_view::npos;
  return {{
      {"TLS", transports},
      {"ALLOC_PRIO", options.lane == ucx_lane::shared_memory ? "md:posix,mmap" : "mmap"},
      {is_shared ? "MM_ERROR_HANDLING" : nullptr, "y"},  // UCX warns of settings that no transport has
  }};
}

}  // namespace detail

inline ucx_mover::ucx_mover(const ucx_options& options)
    : options_(options), worker_(detail::settings_of(options_)) {
  constexpr std::uint64_t most = std::uint64_t{1} << 48;
  const bool needs_landing = options.lane != ucx_lane::shared_memory;
  if (options.bytes == 0 || options.blocks == 0 || options.bytes > most || options.blocks > most / 512 ||
      (needs_landing && (options.block_bytes == 0 || options.max_reads == 0))) {
    throw length_error(options_.name + ": " + std::to_string(options.bytes) + " bytes for " +
                       std::to_string(options.blocks) + " blocks of " + std::to_string(options.block_bytes) +
                       ", " + std::to_string(options.max_reads) +
                       " reads; all must be at least 1, and below 2^48 bytes and 2^39 blocks");
  }
  const detail::export_shape shape = detail::export_shape::of(options.blocks, options.bytes);
  const auto refuse = [&](ucs_status_t status) {
    failure{.code = errc::mover_refused,
            .index = 0,
            .wanted = shape.bytes,
            .where = options_.name + ": " + ucs_status_string(status)}
        .raise();
  };
  if (worker_.status != UCS_OK) refuse(worker_.status);
  memory_.emplace(worker_, shape.bytes);
  if (memory_->status != UCS_OK) refuse(memory_->status);
  introduced mine{.remote = reinterpret_cast<std::uintptr_t>(memory_->data), .shape = shape};
  std::array<std::uint64_t, 2> nonce{};
  while (::getrandom(nonce.data(), sizeof(nonce), 0) != static_cast<ssize_t>(sizeof(nonce))) {
    if (errno != EINTR) refuse(UCS_ERR_IO_ERROR);
  }
  mine.nonce_low = nonce[0];
  mine.nonce_high = nonce[1];
  ucp_address_t* address = nullptr;
  std::size_t address_bytes = 0;
  if (const ucs_status_t status = ucp_worker_get_address(worker_.worker(), &address, &address_bytes);
      status != UCS_OK)
    refuse(status);
  mine.address_bytes = static_cast<std::uint32_t>(address_bytes);
  mine.key_bytes = static_cast<std::uint32_t>(memory_->key_bytes);
  introduction_.resize(sizeof(mine) + address_bytes + memory_->key_bytes);
  std::memcpy(introduction_.data() + sizeof(mine), address, address_bytes);
  std::memcpy(introduction_.data() + sizeof(mine) + address_bytes, memory_->key, memory_->key_bytes);
  ucp_worker_release_address(worker_.worker(), address);
  if (introduction_.size() > pool::max_introduction_bytes) {
    throw length_error(options_.name + ": UCX needs " + std::to_string(introduction_.size()) +
                       " bytes to say how this process is reached, and a message carries at most " +
                       std::to_string(pool::max_introduction_bytes) +
                       "; name fewer devices in UCX_NET_DEVICES");
  }
  mine.crc = crc32c(0, std::span<const std::byte>(introduction_).subspan(sizeof(mine)));
  std::memcpy(introduction_.data(), &mine, sizeof(mine));
  index_ = detail::export_index(memory_->data, shape, mine.nonce_low, mine.nonce_high);
  space_.emplace(detail::region_source(memory_->data + shape.first, shape.bytes - shape.first),
                 host_options{.budget = options.bytes, .name = options_.name});
  if (!needs_landing) return;
  readings_.resize(options.max_reads);
  for (reading& each : readings_)
    each.landing.resize(static_cast<std::size_t>(options.block_bytes));
}

inline ucx_mover::~ucx_mover() {
  for (std::uint32_t seat = 0; seat < others_.size(); ++seat)
    detach(seat_id{seat});
  // Forced closes end within a few rounds, also of dead peers.
  for (int i = 0; i < 100'000 && (!closing_.empty() || open_reads() != 0); ++i)
    progress([](const pool::move_ticket&, pool::moved) noexcept {});
}

inline std::size_t ucx_mover::open_reads() const noexcept {
  std::size_t count = 0;
  for (const reading& each : readings_)
    count += each.at != reading::stage::none ? 1U : 0U;
  return count;
}

/// Returns whether UCX uses the claimed lane, and no other.
inline bool ucx_mover::is_claimed(const std::string& lanes) const noexcept {
  std::string_view left = lanes;
  if (left.empty()) return false;
  while (!left.empty()) {
    const std::string_view each = left.substr(0, left.find(' '));
    left.remove_prefix(each.size() < left.size() ? each.size() + 1 : each.size());
    const bool is_shared = each == "posix" || each == "sysv";
    const bool is_network = each.starts_with("rc") || each.starts_with("dc");
    const bool is_right = options_.lane == ucx_lane::shared_memory ? is_shared
                          : options_.lane == ucx_lane::tcp         ? each == "tcp"
                                                                   : is_network;
    if (!is_right && each != "self") return false;
  }
  return true;
}

inline result<void> ucx_mover::attach(seat_id seat, std::span<const std::byte> bytes) noexcept try {
  const auto forged = [&] {
    return refused(seat, errc::mover_unreached, bytes.size(), EPROTO, options_.name);
  };
  introduced what;
  if (bytes.size() < sizeof(what)) return forged();
  std::memcpy(&what, bytes.data(), sizeof(what));
  const std::span<const std::byte> blobs = bytes.subspan(sizeof(what));
  if (what.kind != introduced{}.kind || what.address_bytes == 0 || what.key_bytes == 0) return forged();
  if (std::uint64_t{what.address_bytes} + what.key_bytes != blobs.size()) return forged();
  if (crc32c(0, blobs) != what.crc) return forged();
  const detail::export_header header{.magic = detail::export_header::right_magic,
                                     .nonce_low = what.nonce_low,
                                     .nonce_high = what.nonce_high,
                                     .buckets = what.shape.buckets,
                                     .first = what.shape.first,
                                     .bytes = what.shape.bytes};
  if (!detail::export_shape::is_right(header, what.shape.bytes)) return forged();
  if (what.remote > ~std::uint64_t{0} - what.shape.bytes) return forged();
  if (reaches(seat)) {
    const std::vector<std::byte>& known = others_[to_index(seat)]->what;
    if (known.size() == bytes.size() && std::memcmp(known.data(), bytes.data(), bytes.size()) == 0) return {};
  }
  detach(seat);
  if (to_index(seat) >= others_.size()) others_.resize(std::size_t{to_index(seat)} + 1);
  auto made = std::make_unique<other>();
  made->what.assign(bytes.begin(), bytes.end());
  made->shape = what.shape;
  made->remote = what.remote;
  // UCX reads its blobs by words.
  const std::vector<std::byte> address(blobs.begin(), blobs.begin() + what.address_bytes);
  const std::vector<std::byte> key(blobs.begin() + what.address_bytes, blobs.end());
  const auto give_up = [&](error_code code, int error, const std::string& where) {
    const failure out = refused(seat, code, what.shape.bytes, error, where);
    made->by.close();
    closing_.push_back(std::move(made));
    return out;
  };
  closing_.reserve(closing_.size() + others_.size() + 1);  // so that `detach` never allocates
  if (const ucs_status_t status = made->by.open(worker_, address.data(), key.data()); status != UCS_OK)
    return give_up(errc::mover_unreached, EHOSTUNREACH, options_.name + ": " + ucs_status_string(status));
  const std::string lanes = made->by.lanes();
  if (!is_claimed(lanes)) return give_up(errc::mover_lane_differs, 0, options_.name + ": UCX uses " + lanes);
  if (options_.lane == ucx_lane::shared_memory) {
    std::byte* const base = made->by.pointer(what.remote);
    if (base == nullptr)
      return give_up(errc::mover_lane_differs, 0, options_.name + ": no ucp_rkey_ptr over " + lanes);
    detail::export_header found;
    if (!detail::is_readable(base, what.shape.bytes))
      return give_up(errc::mover_unreached, EPROTO, options_.name);
    std::memcpy(&found, base, sizeof(found));
    if (std::memcmp(&found, &header, sizeof(found)) != 0)
      return give_up(errc::mover_unreached, EPROTO, options_.name);
    made->base = base;
  }
  others_[to_index(seat)] = std::move(made);
  return {};
} catch (const std::bad_alloc&) {
  return refused(seat, errc::mover_unreached, bytes.size(), ENOMEM, options_.name);
}

inline void ucx_mover::detach(seat_id seat) noexcept {
  if (to_index(seat) >= others_.size() || !others_[to_index(seat)]) return;
  others_[to_index(seat)]->by.close();
  closing_.push_back(std::move(others_[to_index(seat)]));
}

inline pool::moved ucx_mover::fetch(seat_id seat, const block_key& name, std::span<std::byte> into,
                                    const pool::move_ticket& ticket) noexcept {
  if (!reaches(seat)) return pool::moved::unreached;
  other& from = *others_[to_index(seat)];
  if (from.base != nullptr) return detail::copy_exported(from.base, from.shape, name, into, [] {});
  if (into.size() > options_.block_bytes) return pool::moved::unreached;
  for (reading& each : readings_) {
    if (each.at != reading::stage::none) continue;
    each.of = &from;
    each.into = into;
    each.ticket = ticket;
    each.name = name;
    each.is_dropped = false;
    each.choice = 0;
    ++from.readers;
    if (begin(each, reading::stage::bucket)) return pool::moved::begun;
    each.at = reading::stage::none;
    --from.readers;
    return pool::moved::unreached;
  }
  return pool::moved::busy;
}

inline void ucx_mover::drop(const pool::move_ticket& ticket) noexcept {
  for (reading& each : readings_) {
    if (each.at != reading::stage::none && each.ticket == ticket) each.is_dropped = true;
  }
}

/// Posts the `get` of a stage. Returns false if UCX refuses it.
inline bool ucx_mover::begin(reading& of, reading::stage at) noexcept {
  of.at = at;
  if (of.of->by.is_broken()) return false;
  const detail::export_shape& shape = of.of->shape;
  void* begun = nullptr;
  switch (at) {
    case reading::stage::bucket:
      begun = of.of->by.get(reinterpret_cast<std::byte*>(of.bucket.data()), sizeof(of.bucket),
                            of.of->remote + shape.bucket_at(of.name, of.choice));
      break;
    case reading::stage::block:
      begun = of.of->by.get(of.landing.data(), of.into.size(), of.of->remote + of.bucket[of.place].at);
      break;
    case reading::stage::entry:
      begun =
          of.of->by.get(reinterpret_cast<std::byte*>(&of.again), sizeof(of.again),
                        of.of->remote + shape.bucket_at(of.name, of.choice) + of.place * sizeof(of.again));
      break;
    case reading::stage::none:
      break;
  }
  of.request = UCS_PTR_IS_PTR(begun) ? begun : nullptr;
  return !UCS_PTR_IS_ERR(begun);
}

/// Looks at a read. Returns its outcome when it has ended.
inline std::optional<pool::moved> ucx_mover::proceed(reading& of) noexcept {
  while (true) {
    if (of.request != nullptr) {
      const ucs_status_t status = ucp_request_check_status(of.request);
      if (status == UCS_INPROGRESS) return std::nullopt;
      ucp_request_free(std::exchange(of.request, nullptr));
      if (status != UCS_OK) return pool::moved::unreached;
    }
    if (of.is_dropped) return pool::moved::unreached;
    if (const auto out = take(of)) return out;
  }
}

/// Takes what a stage has brought, and begins the next one.
inline std::optional<pool::moved> ucx_mover::take(reading& of) noexcept {
  const auto next = [&](reading::stage at) -> std::optional<pool::moved> {
    if (begin(of, at)) return std::nullopt;
    return pool::moved::unreached;
  };
  if (of.at == reading::stage::bucket) {
    for (std::size_t i = 0; i < of.bucket.size(); ++i) {
      const detail::export_entry& each = of.bucket[i];
      if (each.sequence % 2 != 0 || each.bytes == 0) continue;
      if (each.low != of.name.low || each.high != of.name.high) continue;
      if (!of.of->shape.is_right(each, of.into.size())) return pool::moved::changed;
      of.place = static_cast<std::uint8_t>(i);
      return next(reading::stage::block);
    }
    if (of.choice++ == 0) return next(reading::stage::bucket);
    return pool::moved::absent;
  }
  if (of.at == reading::stage::block) return next(reading::stage::entry);
  const std::span<const std::byte> came = std::span(of.landing).first(of.into.size());
  if (!(of.again == of.bucket[of.place])) return pool::moved::changed;
  return copy_crc32c(0, came, of.into) == of.again.crc ? pool::moved::here : pool::moved::damaged;
}

template <class F>
void ucx_mover::progress(F&& on_end) noexcept {
  constexpr int most = 256;  // bounds a step
  for (int i = 0; i < most && ucp_worker_progress(worker_.worker()) != 0; ++i) {
  }
  for (reading& each : readings_) {
    if (each.at == reading::stage::none) continue;
    const auto out = proceed(each);
    if (!out) continue;
    each.at = reading::stage::none;
    --each.of->readers;
    if (!each.is_dropped) on_end(each.ticket, *out);
  }
  end_closed();
}

/// Destroys connections that UCX has closed, and whose reads have ended.
inline void ucx_mover::end_closed() noexcept {
  for (std::size_t i = 0; i < closing_.size();) {
    if (!closing_[i]->by.is_closed() || closing_[i]->readers != 0) {
      ++i;
      continue;
    }
    std::swap(closing_[i], closing_.back());
    closing_.pop_back();
  }
}

}  // namespace v0
}  // namespace llmmem
