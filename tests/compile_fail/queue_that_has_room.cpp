// expect: rename the queue.s `has_room`
// A queue that says it by the old name only would be taken for one that always has a place.
#include <llmmem/transfer/settle.hpp>

struct own_queue {
#ifdef LLMMEM_COMPILE_FAIL_CONTROL
  [[nodiscard]] bool has_capacity() const { return true; }
#endif
  [[nodiscard]] bool has_room() const {
    return true;
  }  // beside the new name, for older versions of the library
};

struct counted_queue {
  [[nodiscard]] own_queue& queue() { return own; }
  own_queue own;
};

bool may_begin(counted_queue& queue) {
  return llmmem::detail::has_capacity(queue);
}
