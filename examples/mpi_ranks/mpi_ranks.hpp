/// @file
/// MPI as a `transport`, for jobs with MPI's launcher and network.
#pragma once

#include <llmmem/comm/transport.hpp>
#include <llmmem/transfer/meter.hpp>

#include <mpi.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace mpi_ranks {

/// The ranks of an MPI communicator, which outlives this object, and which nothing else may use. It sets
/// MPI_ERRORS_RETURN.
///
/// No fault tolerance: MPI reports no deaths, and most launchers then end the job. `revoke` ends waits on
/// this rank only; the others wait until their deadlines. A late send cannot be withdrawn, so leave its bytes
/// unchanged until MPI_Finalize. Tags above 32767 are taken modulo 32768.
class mpi_transport {
 public:
  explicit mpi_transport(MPI_Comm ranks) : ranks_(ranks) {
    MPI_Comm_set_errhandler(ranks, MPI_ERRORS_RETURN);
    MPI_Comm_rank(ranks, &rank_);
    MPI_Comm_size(ranks, &world_);
  }

  [[nodiscard]] llmmem::rank_id rank() const noexcept { return llmmem::rank_id(rank_); }
  [[nodiscard]] llmmem::rank_count world() const noexcept { return llmmem::rank_count(world_); }
  [[nodiscard]] llmmem::deadline after(std::uint64_t ns) const noexcept { return {clock_.now_ns() + ns}; }

  llmmem::result<void> send(std::span<const std::byte> out, llmmem::rank_id to, std::uint32_t tag,
                            llmmem::deadline by) {
    return move(out, to, std::nullopt, {}, tag, by);
  }
  llmmem::result<void> recv(std::span<std::byte> into, llmmem::rank_id from, std::uint32_t tag,
                            llmmem::deadline by) {
    return move({}, std::nullopt, into, from, tag, by);
  }
  llmmem::result<void> exchange(std::span<const std::byte> out, llmmem::rank_id to, std::span<std::byte> into,
                                llmmem::rank_id from, std::uint32_t tag, llmmem::deadline by) {
    return move(out, to, into, from, tag, by);
  }
  void revoke() noexcept { is_revoked_ = true; }

 private:
  using maybe_rank = std::optional<llmmem::rank_id>;

  /// Messages go in pieces, because MPI counts by int. A message without bytes is also one piece.
  llmmem::result<void> move(std::span<const std::byte> out, maybe_rank to,
                            std::optional<std::span<std::byte>> into, maybe_rank from, std::uint32_t tag,
                            llmmem::deadline by) {
    const std::size_t most = std::max(out.size(), into ? into->size() : 0);
    for (std::size_t at = 0; at == 0 || at < most; at += piece_bytes) {
      const bool sends = to && (at == 0 || at < out.size());
      const bool receives = from && into && (at == 0 || at < into->size());
      MPI_Request requests[2] = {MPI_REQUEST_NULL, MPI_REQUEST_NULL};
      MPI_Status status[2] = {};
      const int its_tag = static_cast<int>(tag % 32768);
      int failed = MPI_SUCCESS;
      if (receives) {
        const auto room = into->subspan(at, std::min(piece_bytes, into->size() - at));
        failed = MPI_Irecv(room.data(), static_cast<int>(room.size()), MPI_BYTE, number(*from), its_tag,
                           ranks_, &requests[0]);
      }
      if (sends && failed == MPI_SUCCESS) {
        const auto goes = out.subspan(at, std::min(piece_bytes, out.size() - at));
        failed = MPI_Isend(goes.data(), static_cast<int>(goes.size()), MPI_BYTE, number(*to), its_tag, ranks_,
                           &requests[1]);
      }
      const llmmem::rank_id whom = receives ? *from : to.value_or(rank());
      for (int done = 0; failed == MPI_SUCCESS && done == 0;) {
        failed = MPI_Testall(2, requests, &done, status);
        if (done != 0 || failed != MPI_SUCCESS) break;
        if (is_revoked_ || clock_.now_ns() >= by.ns) {
          give_up(requests);
          return refuse(is_revoked_ ? llmmem::errc::epoch_revoked : llmmem::errc::peer_timed_out, whom, most,
                        at);
        }
      }
      int came = 0;
      if (receives) MPI_Get_count(&status[0], MPI_BYTE, &came);
      if (failed != MPI_SUCCESS)
        return refuse(llmmem::errc::library_failed, llmmem::rank_id(failed), most, at);
      if (receives && static_cast<std::size_t>(came) != std::min(piece_bytes, into->size() - at)) {
        return refuse(llmmem::errc::size_mismatch, whom, into->size(), at + static_cast<std::size_t>(came));
      }
    }
    return {};
  }

  static void give_up(MPI_Request (&requests)[2]) {
    if (requests[0] != MPI_REQUEST_NULL && MPI_Cancel(&requests[0]) == MPI_SUCCESS)
      MPI_Wait(&requests[0], MPI_STATUS_IGNORE);
    if (requests[1] != MPI_REQUEST_NULL) MPI_Request_free(&requests[1]);  // it continues by itself
  }
  static llmmem::failure refuse(llmmem::error_code code, llmmem::rank_id rank, std::uint64_t wanted,
                                std::uint64_t found) noexcept {
    return {
        .code = code, .index = to_index(rank), .wanted = wanted, .found = found, .where = "mpi_transport"};
  }
  static int number(llmmem::rank_id rank) noexcept { return static_cast<int>(to_index(rank)); }

  static constexpr std::size_t piece_bytes = std::size_t{1} << 30;
  MPI_Comm ranks_;
  int rank_ = 0;
  int world_ = 1;
  bool is_revoked_ = false;
  llmmem::steady_meter_clock clock_{};
};

static_assert(llmmem::transport<mpi_transport>);

}  // namespace mpi_ranks
