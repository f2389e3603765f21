// expect: Traits::view_type must be a state_view: it is copied, has copy_out
// A view of the state that lacks its one function is told which.
#include <llmmem/async_checkpointer.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

struct my_view {
  static constexpr bool is_concurrent = true;
#ifdef LLMMEM_COMPILE_FAIL_CONTROL
  void copy_out(std::uint32_t, std::uint64_t, std::span<std::byte>) const {}
#else
  void copy(std::uint32_t, std::uint64_t, std::span<std::byte>) const {}
#endif
};
struct my_traits : llmmem::checkpointer_traits {
  using view_type = my_view;
};

std::size_t size() {
  return sizeof(llmmem::async_checkpointer<my_traits>);
}
