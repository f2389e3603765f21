/// @file
/// Addresses of the loopback that no other process takes between their choice and their use.
#pragma once

#include <llmmem/comm/detail/socket_descriptor.hpp>

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace llmmem_tests {

/// `count` addresses, such as "127.0.5.57:20003", where nobody listens.
///
/// A port that the kernel chose and the test then released can become the source port of any connection from
/// 127.0.0.1. Therefore each process has a host of 127.0.0.0/8 of its own, made of its id, and counts the
/// ports up. Connections inside the machine leave from 127.0.0.1, so none of them takes such an address.
inline std::vector<std::string> free_addresses(std::uint32_t count) {
  constexpr std::uint32_t first_port = 10'000;
  constexpr std::uint32_t ports = 50'000;
  static std::atomic<std::uint32_t> taken{0};
  // Linux has at most 2^22 process ids.
  const std::uint32_t host = (std::uint32_t{127} << 24) + (1U << 22) + static_cast<std::uint32_t>(::getpid());
  std::vector<std::string> all;
  for (std::uint32_t tries = 0; all.size() < count; ++tries) {
    if (tries == ports) throw std::runtime_error("free_addresses: no free port on the loopback");
    const std::uint32_t port = first_port + taken++ % ports;
    const llmmem::detail::descriptor probe(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in where{};
    where.sin_family = AF_INET;
    where.sin_addr.s_addr = htonl(host);
    where.sin_port = htons(static_cast<std::uint16_t>(port));
    if (::bind(probe.get(), reinterpret_cast<const sockaddr*>(&where), sizeof(where)) != 0) continue;
    all.push_back("127." + std::to_string((host >> 16) & 255) + '.' + std::to_string((host >> 8) & 255) +
                  '.' + std::to_string(host & 255) + ':' + std::to_string(port));
  }
  return all;
}

}  // namespace llmmem_tests
