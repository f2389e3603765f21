/// @file
/// Calls of the machine that CUDA does not have: tests of the machine, and of host code under it, use them. A
/// program that calls one links with the machine only.
#pragma once

extern "C" {

/// The text of the fault that lost the device; empty where there is none. Valid until the next call.
const char* ptx_machine_last_fault();
/// The device is there again, and no error is left.
void ptx_machine_forget_fault();
/// How many lanes have executed instructions that have no exact bits.
unsigned long long ptx_machine_approximate();
/// Not 0: operations run only when a call waits for them (`timing::late`).
void ptx_machine_be_late(int is_late);
/// Not 0: this seed decides when operations run (`timing::seeded`). 0: they run before the call that asks for
/// them returns.
void ptx_machine_use_seed(unsigned long long seed);
/// Not 0: lanes that branched apart join only at an instruction that joins them.
void ptx_machine_keep_apart(int is_apart);
/// Not 0: accesses to global memory are counted from here on.
void ptx_machine_profile(int is_profiled);
/// What was executed since the program began. Bytes are those that a warp asked of global memory, and sectors
/// are the 32-byte ones that each warp's access touched; both are counted while the machine profiles.
struct ptx_machine_counts {
  unsigned long long launches, lane_instructions, bytes, sectors;
};
ptx_machine_counts ptx_machine_counted();
/// The architecture of the device, as 90.
int ptx_machine_architecture();
}
