"""include_cost.py COMPILER [--seconds]: what including each public header costs. Run from the root of the checkout.

Lines after preprocessing are exact and gated; seconds depend on the machine, and are told when asked for.
"""

import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys
import time

LIMIT = 60_000
UMBRELLA_LIMIT = 216_000
UMBRELLA = "llmmem/llmmem.hpp"
TOOL_LIMITS = {
    # All that kv_blocks.hpp needs, 60,000 lines, and the codes of groups and of single tokens.
    "llmmem/kernels/kv_quantize.hpp": 64_000,
    "llmmem/kernels/block_lists.hpp": 62_000,
    # Attention with all of its forms, of keys and values and of latents, and what merges or summarises.
    "llmmem/kernels/paged_attention.hpp": 62_000,
    "llmmem/kernels/near_attention.hpp": 62_000,
    "llmmem/kernels/rank_attention.hpp": 63_000,
    "llmmem/kernels/open_and_closed.hpp": 62_000,
    "llmmem/kernels/host_vector_executor.hpp": 64_000,
    "llmmem/kernels/block_summary.hpp": 62_000,
    "llmmem/testing/near_storage.hpp": 62_500,
    # An image that the ranks share out, and the versions of its copy on a device.
    "llmmem/refit/refit_device.hpp": 66_000,
    "llmmem/refit/refit_together.hpp": 67_000,
    # The plan of a whole training run, with what it predicts.
    "llmmem/training/training_plan.hpp": 61_000,
    # Tools that no serving engine includes, and that bring every policy.
    "llmmem/paging/journal_what_if.hpp": 80_000,
    "llmmem/paging/hybrid_what_if.hpp": 80_000,
    # A super-page pool, a prefix chain and all that a paged allocator does, for every kind of layers, with budgets that
    # change while it runs.
    "llmmem/paging/hybrid_allocator.hpp": 63_000,
    # A thread waits for another one's return: <condition_variable> alone is 57,000.
    "llmmem/device/stream_ordered.hpp": 78_000,
    # <thread> alone is 52,000; <signal.h>, with which writes past `ulimit -f` are errors, 2,700.
    "llmmem/transfer/file_queue.hpp": 62_000,
    "llmmem/transfer/file_lock.hpp": 74_000,
    "llmmem/transfer/file_space.hpp": 77_000,
    "llmmem/transfer/device_file_space.hpp": 78_000,
    "llmmem/tiering/model_file_space.hpp": 62_000,
    "llmmem/comm/socket_endpoint.hpp": 75_000,
    # Of a training run, once; <condition_variable> alone is 57,000, and a file queue is beneath.
    "llmmem/checkpoint/async_checkpointer.hpp": 99_000,
    "llmmem/checkpoint/comm_coordinator.hpp": 85_000,
    "llmmem/checkpoint/commit_ticket.hpp": 65_000,
    "llmmem/checkpoint/file_coordinator.hpp": 85_000,
    "llmmem/checkpoint/load.hpp": 85_000,
    "llmmem/checkpoint/mirrored_coordinator.hpp": 85_000,
    "llmmem/checkpoint/posix_storage.hpp": 81_000,
    "llmmem/checkpoint/tiered_view.hpp": 66_000,
    "llmmem/tiering/persistent_file_space.hpp": 83_000,
    "llmmem/transfer/striped_space.hpp": 78_000,
    # Storages of any type are held by <memory>'s pointers, 15,000 lines; their code is compiled once.
    "llmmem/checkpoint/checkpointer_types.hpp": 65_000,
    "llmmem/checkpoint/coordinator.hpp": 75_000,
    "llmmem/checkpoint/copy.hpp": 75_000,
    "llmmem/checkpoint/folder.hpp": 75_000,
    "llmmem/checkpoint/rank_session.hpp": 75_000,
    "llmmem/checkpoint/recover.hpp": 75_000,
    "llmmem/checkpoint/replica_source.hpp": 80_000,
    "llmmem/checkpoint/search.hpp": 75_000,
    "llmmem/checkpoint/hold.hpp": 75_000,
    "llmmem/instantiate/checkpoint.hpp": 103_000,
    # Loading, with a storage, or with a resharding plan into tiers.
    "llmmem/checkpoint/safetensors_folder.hpp": 97_000,
    "llmmem/checkpoint/tiered_load.hpp": 88_000,
    # Ranks that are threads: <condition_variable>; and the simulator <thread> and <random> besides.
    "llmmem/comm/thread_network.hpp": 80_000,
    "llmmem/testing/sim_network.hpp": 105_000,
    # Rings between devices bring <mutex>, as the file spaces do that most have beneath.
    "llmmem/tiering/tiered_buffer.hpp": 65_000,
    "llmmem/tiering/tiered_tensors.hpp": 67_000,
    "llmmem/tiering/persistent_tensors.hpp": 94_000,
    # Layouts and the copies of kernels; and with them the slots and transfers of tiers.
    "llmmem/offload/kv_mover.hpp": 62_000,
    "llmmem/offload/kv_tiers.hpp": 76_000,
    "llmmem/pool/kv_pool.hpp": 81_000,
    # The plan of a split, 57,000, and memory of blocks with its fences; and for devices, <algorithm> and a mover's copies.
    "llmmem/offload/share_packer.hpp": 66_000,
    "llmmem/pool/kv_handover.hpp": 67_000,
    "llmmem/offload/executor_packer.hpp": 81_000,
    # <algorithm> is 20,000.
    "llmmem/kernels/block_checksum.hpp": 65_000,
    "llmmem/transfer/safetensors_file.hpp": 65_000,
    # The planners with it.
    "llmmem/schedule/prefetch_schedule.hpp": 81_000,
    # <algorithm>, and the types of a tiered buffer, which all its users have.
    "llmmem/tiering/measure_links.hpp": 67_000,
    # Of a training run: the resharding planner, wires and <atomic>; the planners of schedules and <thread>.
    "llmmem/sharding/sharded_state.hpp": 67_000,
    "llmmem/sharding/gather_schedule.hpp": 80_000,
    # <condition_variable> alone is 57,000, and <memory>.
    "llmmem/sharding/background_sums.hpp": 68_000,
    # The resharding planner, quantisation and byte planes; with files, what loads them.
    "llmmem/refit/refit.hpp": 70_000,
    "llmmem/refit/refit_folder.hpp": 99_000,
}

compiler = sys.argv[1]
with_seconds = sys.argv[2:] == ["--seconds"]
root = pathlib.Path("include")
names = [p.relative_to(root).as_posix() for p in sorted(root.rglob("*.hpp")) if "detail" not in p.parts]
# The doors, llmmem/<name>.hpp, cost what the header of that name costs in its room.
doors = [name for name in names if re.search(rf"#include <llmmem/\w+/{name.split('/')[-1]}>", (root / name).read_text())]
names = [name for name in names if name not in doors]
# The umbrella names the headers that need an optional library: their cost is that library's.
optional = set(re.findall(r"^//+ +<([^>]+)> needs llmmem::", (root / UMBRELLA).read_text(), re.MULTILINE))


def measure(name):
    command = [compiler, "-std=c++20", "-I", str(root), "-x", "c++", "-"]
    source = f"#include <{name}>\n".encode()
    text = subprocess.run([*command, "-E"], input=source, capture_output=True)
    if text.returncode != 0:
        return name, None, text.stderr.decode()
    if not with_seconds:
        return name, text.stdout.count(b"\n"), None
    start = time.perf_counter()
    parsed = subprocess.run([*command, "-fsyntax-only"], input=source, capture_output=True)
    seconds = time.perf_counter() - start
    if parsed.returncode != 0:
        return name, None, parsed.stderr.decode()
    return name, text.stdout.count(b"\n"), seconds


with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    rows = list(pool.map(measure, [n for n in names if n not in optional]))

failed = False
print(f"{'header':<56}{'lines':>9}{'limit':>9}{'seconds' if with_seconds else '':>9}")
for name, lines, seconds in sorted(rows, key=lambda row: -(row[1] or 0)):
    limit = UMBRELLA_LIMIT if name == UMBRELLA else TOOL_LIMITS.get(name, LIMIT)
    if lines is None:
        print(f"{name}: does not compile:\n{seconds}")
        failed = True
        continue
    over = lines > limit
    failed |= over
    took = f"{seconds:>9.2f}" if with_seconds else ""
    print(f"{name:<56}{lines:>9,}{limit:>9,}{took}{'  OVER THE LIMIT' if over else ''}")
for name in sorted(optional):
    print(f"{name}: not measured, needs an optional library")
sys.exit(failed)
