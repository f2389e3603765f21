/// @file
/// gzip and zstd, each unpacked piece by piece in bounded memory. Each exists if the build found its library.
#pragma once

#include <llmmem/error.hpp>

#include <cstddef>
#include <span>
#include <string>

#ifdef LLMMEM_TRACE_ZLIB
#include <zlib.h>

#include <algorithm>
#endif
#ifdef LLMMEM_TRACE_ZSTD
#include <zstd.h>

#include <memory>
#endif

namespace replay_trace {

/// The fault of packed data, and how much of the step's input came before it, as far as the library reports;
/// the reader adds the file.
class unpack_fault : public llmmem::error {
 public:
  unpack_fault(const std::string& reason, std::size_t taken) : error(reason), taken_(taken) {}
  [[nodiscard]] std::size_t taken() const noexcept { return taken_; }

 private:
  std::size_t taken_;
};

/// The bytes that one step used of its input and wrote to its output.
struct unpack_step {
  std::size_t taken = 0;
  std::size_t given = 0;
};

#ifdef LLMMEM_TRACE_ZLIB
/// gzip (RFC 1952): any number of members, one after another; zeros after the last are padding.
///
/// @par Memory   about 40 KiB, for any input.
/// @par Errors   the constructor throws `llmmem::out_of_memory`; `unpack` throws `unpack_fault`.
class gzip_unpacker {
 public:
  gzip_unpacker() {
    constexpr int gzip_only = 16 + MAX_WBITS;
    if (::inflateInit2_(&stream_, gzip_only, ZLIB_VERSION, static_cast<int>(sizeof stream_)) != Z_OK) {
      throw llmmem::out_of_memory("gzip: no memory for zlib's state");
    }
  }
  gzip_unpacker(const gzip_unpacker&) = delete;  // zlib's state points at the stream
  gzip_unpacker& operator=(const gzip_unpacker&) = delete;
  ~gzip_unpacker() { ::inflateEnd(&stream_); }

  [[nodiscard]] unpack_step unpack(std::span<char> in, std::span<char> out) {
    if (members_ > 0 && complete_) {
      const auto padding = std::find_if(in.begin(), in.end(), [](char byte) { return byte != '\0'; });
      if (padding != in.begin()) return {static_cast<std::size_t>(padding - in.begin()), 0};
    }
    if (in.empty() && complete_) return {};
    complete_ = false;
    stream_.next_in = reinterpret_cast<Bytef*>(in.data());
    stream_.avail_in = static_cast<uInt>(std::min<std::size_t>(in.size(), max_piece));
    stream_.next_out = reinterpret_cast<Bytef*>(out.data());
    stream_.avail_out = static_cast<uInt>(std::min<std::size_t>(out.size(), max_piece));
    const uInt in_before = stream_.avail_in;
    const uInt out_before = stream_.avail_out;
    const int status = ::inflate(&stream_, Z_NO_FLUSH);
    if (status == Z_STREAM_END) {
      complete_ = true;
      ++members_;
      ::inflateReset(&stream_);
    } else if (status != Z_OK && status != Z_BUF_ERROR) {  // the latter: no input or no space for output
      throw unpack_fault(stream_.msg != nullptr ? stream_.msg : "zlib error " + std::to_string(status),
                         in_before - stream_.avail_in);
    }
    return {in_before - stream_.avail_in, out_before - stream_.avail_out};
  }

  /// Returns whether the data may end here.
  [[nodiscard]] bool complete() const noexcept { return complete_; }

 private:
  static constexpr std::size_t max_piece = std::size_t{1} << 30;  // zlib counts in 32 bits

  z_stream stream_{};
  std::size_t members_ = 0;
  bool complete_ = true;
};
#endif

#ifdef LLMMEM_TRACE_ZSTD
/// zstd (RFC 8878): any number of frames, including skippable ones.
///
/// @par Memory   the window that the frame requests, at most zstd's limit of 128 MiB; more is a fault.
/// @par Errors   the constructor throws `llmmem::out_of_memory`; `unpack` throws `unpack_fault`.
class zstd_unpacker {
 public:
  zstd_unpacker() : stream_(ZSTD_createDStream(), &ZSTD_freeDStream) {
    if (!stream_) throw llmmem::out_of_memory("zstd: no memory for its state");
  }

  [[nodiscard]] unpack_step unpack(std::span<char> in, std::span<char> out) {
    if (in.empty() && complete_) return {};
    ZSTD_inBuffer from{in.data(), in.size(), 0};
    ZSTD_outBuffer to{out.data(), out.size(), 0};
    const std::size_t status = ZSTD_decompressStream(stream_.get(), &to, &from);
    if (ZSTD_isError(status) != 0) throw unpack_fault(ZSTD_getErrorName(status), from.pos);
    complete_ = status == 0;
    return {from.pos, to.pos};
  }

  /// Returns whether the data may end here.
  [[nodiscard]] bool complete() const noexcept { return complete_; }

 private:
  std::unique_ptr<ZSTD_DStream, decltype(&ZSTD_freeDStream)> stream_;
  bool complete_ = true;
};
#endif

}  // namespace replay_trace
