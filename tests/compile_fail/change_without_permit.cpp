// expect: mutation_permit
// Who forgets to wait for a snapshot has no permit, and without one there is nothing to write to.
#include <llmmem/version/snapshot_gate.hpp>

struct weights {
  int first = 0;
};

void optimizer_step(llmmem::guarded<weights>& state, const llmmem::mutation_permit& permit) {
  state.write(permit).first += 1;
}

void train(llmmem::snapshot_gate& gate, llmmem::guarded<weights>& state) {
#ifdef LLMMEM_COMPILE_FAIL_CONTROL
  const llmmem::mutation_permit permit = gate.mutate();
  optimizer_step(state, permit);
#else
  static_cast<void>(gate);
  optimizer_step(state, {});
#endif
}
