// expect: (-Werror,-Wdangling|a lease that ends before the loop)
// In C++20 the temporaries of a range-for's range end before its body: the lease would be over. clang++
// warns; g++ has no such warning, and is told apart below.
#include <llmmem/space/host.hpp>
#include <llmmem/tiered_buffer.hpp>

using buffer_type = llmmem::tiered_buffer<llmmem::host_space, llmmem::host_space>;

int sum(buffer_type& buffer, llmmem::chunk_handle chunk) {
  int out = 0;
#ifdef LLMMEM_COMPILE_FAIL_CONTROL
  const auto lease = buffer.read(chunk).value();
  for (const std::byte each : lease.span())
    out += static_cast<int>(each);
#else
#ifndef __clang__
#error a lease that ends before the loop
#endif
  for (const std::byte each : buffer.read(chunk).value().span())
    out += static_cast<int>(each);
#endif
  return out;
}
