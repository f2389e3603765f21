"""peers.py: what Python programs take to save the state that bench_checkpoint saves, until it is on the disk.

Prints JSON as Google Benchmark does, a row a round, for scripts/bench_table.py: durable/<who> until the file is
synced, stall/<who> until the state may change. What is not installed has a row that says so. The limit beside which
each round is held, `raw_direct_python`, does what bench_checkpoint's `raw_direct` does: a loop of pwrite past the page
cache, and fdatasync.

  LLMMEM_BENCH_CHECKPOINT_MIB, LLMMEM_BENCH_CHECKPOINT_ROUNDS, LLMMEM_BENCH_IO_DIR   as bench_checkpoint has them
"""

import json
import mmap
import os
import shutil
import sys
import tempfile
import time

MIB = 1 << 20
STATE = int(os.environ.get("LLMMEM_BENCH_CHECKPOINT_MIB", "256")) * MIB
ROUNDS = int(os.environ.get("LLMMEM_BENCH_CHECKPOINT_ROUNDS", "5"))
ROW = 4096
TENSORS = 16


def shapes():
    """Those of state.hpp: rows of 4 KiB of float32."""
    begin = 0
    for i in range(TENSORS):
        end = STATE if i + 1 == TENSORS else STATE * (i + 1) * (i + 2) // (TENSORS * (TENSORS + 1)) // ROW * ROW
        yield f"layers.{i}.weight", ((end - begin) // ROW, ROW // 4)
        begin = end


def sync(path):
    number = os.open(path, os.O_RDONLY)
    os.fsync(number)
    os.close(number)


def sync_tree(folder):
    for root, _, names in os.walk(folder):
        for name in names:
            sync(os.path.join(root, name))
        sync(root)


def raw_direct_python():
    memory = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory.write(os.urandom(MIB) * 64)

    def turn(folder):
        began = time.perf_counter()
        number = os.open(folder + "/raw", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
        os.posix_fallocate(number, 0, STATE)
        for at in range(0, STATE, 4 * MIB):
            from_here = at % (64 * MIB)
            os.pwrite(number, memoryview(memory)[from_here : from_here + min(4 * MIB, STATE - at)], at)
        os.fdatasync(number)
        os.close(number)
        sync(folder)
        return {"durable": time.perf_counter() - began}

    return turn


def synced_save(save):
    """A turn of `save(folder)`, which returns when it has written; the state may change when that is synced."""

    def turn(folder):
        began = time.perf_counter()
        save(folder)
        sync_tree(folder)
        took = time.perf_counter() - began
        return {"durable": took, "stall": took}

    return turn


def safetensors_numpy():
    import numpy
    from safetensors.numpy import save_file

    state = {name: numpy.random.default_rng(1).random(shape, dtype=numpy.float32) for name, shape in shapes()}
    return synced_save(lambda folder: save_file(state, folder + "/model.safetensors"))


def torch_state():
    import torch

    return {name: torch.rand(shape) for name, shape in shapes()}


def safetensors_torch():
    from safetensors.torch import save_file

    state = torch_state()
    return synced_save(lambda folder: save_file(state, folder + "/model.safetensors"))


def torch_save():
    import torch

    state = torch_state()
    return synced_save(lambda folder: torch.save(state, folder + "/model.pt"))


def torch_dcp():
    import torch.distributed.checkpoint as dcp

    state = torch_state()
    return synced_save(lambda folder: dcp.save(state, checkpoint_id=folder + "/dcp"))


def torch_dcp_async():
    import torch.distributed.checkpoint as dcp

    state = torch_state()

    def turn(folder):
        began = time.perf_counter()
        saving = dcp.async_save(state, checkpoint_id=folder + "/dcp")
        stall = time.perf_counter() - began
        saving.result()
        sync_tree(folder)
        return {"durable": time.perf_counter() - began, "stall": stall}

    return turn


CONTESTANTS = [raw_direct_python, safetensors_numpy, safetensors_torch, torch_save, torch_dcp, torch_dcp_async]


def main():
    rows = []
    turns = {}
    for make in CONTESTANTS:
        try:
            turns[make.__name__] = make()
        except ImportError as error:
            rows.append({"name": f"durable/{make.__name__}", "error_occurred": True, "error_message": f"not here: {error}"})
    base = tempfile.mkdtemp(prefix="llmmem-bench-", dir=os.environ.get("LLMMEM_BENCH_IO_DIR"))
    try:
        # Round 0 wakes everything up and is not counted.
        for number in range(ROUNDS + 1):
            took = {}
            for who, turn in list(turns.items()):
                folder = tempfile.mkdtemp(dir=base)
                os.sync()
                try:
                    took[who] = turn(folder)
                except Exception as error:  # whatever a peer throws takes its row away, and no other
                    rows.append({"name": f"durable/{who}", "error_occurred": True, "error_message": str(error)})
                    del turns[who]
                shutil.rmtree(folder)
            if number == 0:
                continue
            for who, times in took.items():
                for group, seconds in times.items():
                    row = {"name": f"{group}/{who}", "run_name": f"{group}/{who}", "run_type": "iteration"}
                    row |= {"iterations": 1, "real_time": seconds * 1e3, "cpu_time": 0.0, "time_unit": "ms"}
                    if group == "durable" and who != "raw_direct_python":
                        row["share_of_raw_direct"] = took["raw_direct_python"]["durable"] / seconds
                    rows.append(row)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    json.dump({"context": {}, "benchmarks": rows}, sys.stdout, indent=1)
    print()


main()
