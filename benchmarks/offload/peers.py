"""peers.py: blocks of 64 MiB moved by kv_tiers and kv_pool, and by the stores that engines use today, in one run.

Usage: peers.py [--bench build/bench/bin] [--rounds 5] [--only NAME,...]

Every round runs each program once, in turns, so that a slow minute of the machine meets all of them; the table has
medians over rounds and the range. The same bytes go in and come back, and each round compares them. Settings are the
best found for each peer; the table ends with them and with the versions.

  memory        one process stores blocks in host memory that the store owns, and loads them back
  file          the same from files, past the page cache
  two processes one process holds the blocks, another fetches them

What is not installed has a line that says so; scripts/peers installs it.
"""

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time

TOTAL = 64 << 20
NANOSECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
BLOCKS = (16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)


def page_memory(size, seed=None):
    """Bytes that begin at a page; with a seed, random ones."""
    import numpy

    memory = numpy.zeros(size + 4096, numpy.uint8)
    first = -memory.ctypes.data % 4096
    used = memory[first : first + size]
    if seed is not None:
        used[:] = numpy.random.default_rng(seed).integers(0, 256, size, dtype=numpy.uint8)
    return used


def timed(call):
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def free_port():
    with socket.socket() as end:
        end.bind(("127.0.0.1", 0))
        return end.getsockname()[1]


def check(there, here, who):
    if not (there == here).all():
        raise SystemExit(f"{who}: bytes came back wrong")


class Ours:
    """Rows of the library's own benchmarks, each a program's run; times of the clock, as the peers' are."""

    def __init__(self, bench):
        self.bench = bench

    def rows(self, program, pattern):
        done = subprocess.run(
            [f"{self.bench}/{program}", f"--benchmark_filter={pattern}", "--benchmark_min_time=0.05", "--benchmark_format=json"],
            check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for row in json.loads(done.stdout)["benchmarks"]:
            if row.get("error_occurred"):
                print(f"{row['name']}: {row['error_message']}", file=sys.stderr)
                continue
            yield row["name"].split("/"), row["real_time"] * NANOSECONDS[row["time_unit"]]

    def memory(self):
        names = {"host_memcpy": ("memcpy", "load"), "host_load": ("llmmem kv_tiers", "load"), "host_store": ("llmmem kv_tiers", "store")}
        for name, seconds in self.rows("bench_offload", "^host_(memcpy|load|store)/"):
            who, what = names[name[0]]
            yield who, what, int(name[1]), TOTAL / seconds
        for name, seconds in self.rows("bench_offload", "^file_(load|read|store)/io_uring"):
            who = "reads by io_uring alone" if name[0] == "file_read" else "llmmem kv_tiers, io_uring"
            yield who, "file store" if name[0] == "file_store" else "file load", int(name[2]), TOTAL / seconds
        for _, seconds in self.rows("bench_offload", "^lookup/1024$"):
            yield "llmmem kv_tiers", "lookup", BLOCKS[1], 1024 / seconds

    def processes(self):
        for name, seconds in self.rows("bench_pool", "^pool_fetch"):
            mover = name[0].removeprefix("pool_fetch").strip("_").replace("_", " ") or "message"
            block = next(int(part) for part in name[1:] if part.isdigit())
            yield f"llmmem kv_pool, {mover}", "fetch", block, TOTAL / seconds


class Mooncake:
    """Mooncake's store: a master process, and a client that lends memory and reads or writes it."""

    batch = 64

    def __init__(self):
        import mooncake.store  # noqa: F401  fails here where it is not installed

        os.environ.setdefault("MC_STORE_MEMCPY", "1")
        self.version = importlib.metadata.version("mooncake-transfer-engine-non-cuda")
        self.settings = f"tcp, MC_STORE_MEMCPY={os.environ['MC_STORE_MEMCPY']}, registered buffers, batches of {self.batch}"
        self.port = free_port()
        self.log = tempfile.TemporaryFile()
        master = os.path.join(os.path.dirname(sys.executable), "mooncake_master")
        self.master = subprocess.Popen(
            [master, f"-rpc_port={self.port}", "-enable_metric_reporting=false"], stdout=self.log, stderr=self.log
        )
        time.sleep(1)

    def client(self, lent):
        from mooncake.store import MooncakeDistributedStore

        store = MooncakeDistributedStore()
        if store.setup("localhost", "P2PHANDSHAKE", lent, 256 << 20, "tcp", "", f"127.0.0.1:{self.port}") != 0:
            raise SystemExit("mooncake: the client was refused")
        return store

    def batches(self, keys):
        for first in range(0, len(keys), self.batch):
            yield first, keys[first : first + self.batch]

    def put(self, store, keys, memory, block):
        for first, part in self.batches(keys):
            at = [memory.ctypes.data + (first + i) * block for i in range(len(part))]
            if any(store.batch_put_from(part, at, [block] * len(part))):
                raise SystemExit("mooncake: a put failed")

    def get(self, store, keys, memory, block):
        for first, part in self.batches(keys):
            at = [memory.ctypes.data + (first + i) * block for i in range(len(part))]
            if any(got != block for got in store.batch_get_into(part, at, [block] * len(part))):
                raise SystemExit("mooncake: a get failed")

    def keys(self, block):
        return [f"{block}-{i}" for i in range(TOTAL // block)]

    def memory(self):
        """One warm client for all rounds: its first puts touch fresh pages and take up to three times as long."""
        if not hasattr(self, "local"):
            self.local = self.client(2 << 30)
            self.source, self.target = page_memory(TOTAL, 1), page_memory(TOTAL)
            for each in (self.source, self.target):
                self.local.register_buffer(each.ctypes.data, TOTAL)
            for block in BLOCKS:
                self.put(self.local, self.keys(block), self.source, block)
            self.local.remove_all(True)
        for block in BLOCKS:
            keys = self.keys(block)
            self.target[:] = 0
            stored = timed(lambda: self.put(self.local, keys, self.source, block))
            found = timed(lambda: self.local.batch_is_exist(keys))
            loaded = timed(lambda: self.get(self.local, keys, self.target, block))
            check(self.source, self.target, "mooncake")
            self.local.remove_all(True)
            yield "Mooncake store", "store", block, TOTAL / stored
            yield "Mooncake store", "load", block, TOTAL / loaded
            yield "Mooncake store", "lookup", block, len(keys) / found

    def hold(self, end):
        store = self.client(1 << 30)
        source = page_memory(TOTAL, 1)
        store.register_buffer(source.ctypes.data, TOTAL)
        for block in BLOCKS:
            self.put(store, self.keys(block), source, block)
        end.send("ready")
        end.recv()
        store.close()

    def processes(self):
        yield from fetched_by_other(self, "Mooncake store, tcp")

    def fetch(self, end):
        """Runs in a process that lends no memory, so that every byte comes from the holder."""
        store = self.client(0)
        source, target = page_memory(TOTAL, 1), page_memory(TOTAL)
        store.register_buffer(target.ctypes.data, TOTAL)
        for block in BLOCKS:
            self.get(store, self.keys(block), target, block)  # connects, and touches the pages
            target[:] = 0
            taken = timed(lambda: self.get(store, self.keys(block), target, block))
            check(source, target, "mooncake")
            end.send((block, TOTAL / taken))
        end.send(None)
        store.close()

    def __getstate__(self):
        return {"port": self.port}  # all that a process of its own needs

    def close(self):
        self.master.kill()
        self.master.wait()


class Nixl:
    """NIXL over its UCX: one agent reads another process's registered memory, by lists prepared once."""

    def __init__(self):
        from nixl._api import nixl_agent  # noqa: F401  fails here where it is not installed

        self.version = importlib.metadata.version("nixl")
        self.settings = "UCX backend, descriptor lists prepared once, one request for all blocks"

    def agent(self, name):
        from nixl._api import nixl_agent, nixl_agent_config

        return nixl_agent(name, nixl_agent_config(backends=["UCX"]))

    def hold(self, end):
        agent = self.agent("holder")
        source = page_memory(TOTAL, 1)
        agent.register_memory([(source.ctypes.data, TOTAL, 0, "")], "DRAM")
        end.send((agent.get_agent_metadata(), source.ctypes.data))
        end.recv()

    def fetch(self, end):
        agent = self.agent("reader")
        source, target = page_memory(TOTAL, 1), page_memory(TOTAL)
        agent.register_memory([(target.ctypes.data, TOTAL, 0, "")], "DRAM")
        metadata, there = end.recv()
        holder = agent.add_remote_agent(metadata)
        for block in BLOCKS:
            count = TOTAL // block
            places = lambda base: [(base + i * block, block, 0) for i in range(count)]  # noqa: E731
            ours = agent.prep_xfer_dlist("NIXL_INIT_AGENT", places(target.ctypes.data), "DRAM")
            theirs = agent.prep_xfer_dlist(holder, places(there), "DRAM")

            def read():
                request = agent.make_prepped_xfer("READ", ours, range(count), theirs, range(count), b"")
                state = agent.transfer(request)
                while state == "PROC":
                    state = agent.check_xfer_state(request)
                if state != "DONE":
                    raise SystemExit(f"nixl: a read ended as {state}")
                agent.release_xfer_handle(request)

            read()
            target[:] = 0
            taken = timed(read)
            check(source, target, "nixl")
            end.send((block, TOTAL / taken))
        end.send(None)

    def processes(self):
        yield from fetched_by_other(self, "NIXL, UCX")

    def close(self):
        pass


class Lmcache:
    """LMCache's local backends by its storage manager. Its engine's connector copies between the objects and a
    device; here a copy of each object to and from plain memory stands for it, as llmmem's rows have."""

    def __init__(self):
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
        os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
        import torch
        from lmcache.v1.check import utils
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.event_manager import EventManager
        from lmcache.v1.storage_backend.storage_manager import StorageManager

        torch.set_num_threads(1)  # its copies of 16 KiB to 4 MiB are slower by two threads on a busy machine
        self.torch, self.utils = torch, utils
        self.version = importlib.metadata.version("lmcache")
        self.settings = "one call for all blocks, disk past the page cache (use_odirect), its own number of reading threads, copies by one"
        self.folder = tempfile.TemporaryDirectory(prefix="llmmem_peers_")
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=16, local_cpu=True, max_local_cpu_size=1.0, local_disk=self.folder.name, max_local_disk_size=4.0,
            extra_config={"use_odirect": True},
        )  # fmt: skip
        metadata = utils._get_default_metadata("model", torch.bfloat16, BLOCKS[0] // 2)
        self.manager = StorageManager(config=config, metadata=metadata, event_manager=EventManager())
        self.disk = self.manager.storage_backends["LocalDiskBackend"]
        self.source = torch.from_numpy(page_memory(TOTAL, 1))
        self.target = torch.from_numpy(page_memory(TOTAL))

    def keys(self, block):
        return [self.utils.create_test_key("model", f"{block}-{i}") for i in range(TOTAL // block)]

    def store(self, keys, block):
        from lmcache.v1.memory_management import MemoryFormat

        shape = self.torch.Size([2, 1, 16, block // 64])  # K and V, one layer, 16 tokens, numbers of two bytes
        objects = self.manager.batched_allocate(shape, self.torch.bfloat16, len(keys), fmt=MemoryFormat.KV_2LTD)
        for i, each in enumerate(objects):
            each.tensor.view(self.torch.uint8).view(-1).copy_(self.source[i * block : (i + 1) * block])
        self.manager.batched_put(keys, objects, location="LocalCPUBackend")

    def store_to_disk(self, keys, objects):
        self.manager.batched_put(keys, objects, location="LocalDiskBackend")
        while self.disk.disk_worker.put_tasks:
            time.sleep(0.0002)

    def load(self, backend, keys, block):
        for i, each in enumerate(backend.batched_get_blocking(keys)):
            self.target[i * block : (i + 1) * block].copy_(each.tensor.view(self.torch.uint8).view(-1))
            each.ref_count_down()

    def memory(self):
        host = self.manager.storage_backends["LocalCPUBackend"]
        for block in BLOCKS:
            keys = self.keys(block)
            self.store(keys, block)  # touches the pages
            self.manager.batched_remove(keys)
            self.target.zero_()
            stored = timed(lambda: self.store(keys, block))
            found = timed(lambda: self.manager.batched_contains(keys))
            loaded = timed(lambda: self.load(host, keys, block))
            check(self.source.numpy(), self.target.numpy(), "lmcache")
            yield "LMCache, local CPU", "store", block, TOTAL / stored
            yield "LMCache, local CPU", "load", block, TOTAL / loaded
            yield "LMCache, local CPU", "lookup", block, len(keys) / found
            objects = host.batched_get_blocking(keys)
            stored = timed(lambda: self.store_to_disk(keys, objects))
            for each in objects:
                each.ref_count_down()
            self.manager.batched_remove(keys, locations=["LocalCPUBackend"])
            self.target.zero_()
            loaded = timed(lambda: self.load(self.disk, keys, block))
            check(self.source.numpy(), self.target.numpy(), "lmcache")
            self.manager.batched_remove(keys)
            yield "LMCache, local disk", "file store", block, TOTAL / stored
            yield "LMCache, local disk", "file load", block, TOTAL / loaded

    def close(self):
        self.manager.close()
        self.folder.cleanup()


def fetched_by_other(peer, who):
    """Starts the holder and the reader of a peer, each in a fresh process, and passes what the holder tells."""
    spawn = multiprocessing.get_context("spawn")
    ends = [spawn.Pipe(), spawn.Pipe()]
    holder = spawn.Process(target=peer.hold, args=(ends[0][1],))
    holder.start()
    told = ends[0][0].recv()
    reader = spawn.Process(target=peer.fetch, args=(ends[1][1],))
    reader.start()
    if told != "ready":
        ends[1][0].send(told)
    while ends[1][0].poll(60):
        row = ends[1][0].recv()
        if row is None:
            break
        yield who, "fetch", row[0], row[1]
    ends[0][0].send("end")
    for each in (reader, holder):
        each.join(10)
        each.kill()


PEERS = {"mooncake": Mooncake, "nixl": Nixl, "lmcache": Lmcache}


def print_table(title, rows, unit):
    print(f"\n{title}")
    whos = list(dict.fromkeys(who for who, _ in rows))
    blocks = sorted({block for _, block in rows})
    print("| |" + "".join(f" {block >> 10} KiB |" for block in blocks))
    print("|---|" + "---|" * len(blocks))
    for who in whos:
        cells = []
        for block in blocks:
            seen = sorted(unit(each, block) for each in rows.get((who, block), []))
            cells.append(f" {statistics.median(seen):.3g} ({seen[0]:.3g} to {seen[-1]:.3g}) |" if seen else " |")
        print(f"| {who} |" + "".join(cells))


def main():
    options = argparse.ArgumentParser(description="Compares kv_tiers and kv_pool with other stores of KV blocks.")
    options.add_argument("--bench", default="build/bench/bin", help="folder of bench_offload and bench_pool")
    options.add_argument("--rounds", type=int, default=5, help="turns of each program")
    options.add_argument("--only", default="", help=f"peers to run, of {', '.join(PEERS)}")
    asked = options.parse_args()
    chosen = asked.only.split(",") if asked.only else list(PEERS)
    running = [Ours(asked.bench)]
    for name in chosen:
        try:
            running.append(PEERS[name]())
        except ImportError as missing:
            print(f"{name}: not installed ({missing}); scripts/peers installs it", file=sys.stderr)
    rows = {}
    for turn in range(asked.rounds):
        for peer in running:
            for part in ("memory", "processes"):
                for who, what, block, rate in getattr(peer, part, lambda: ())():
                    rows.setdefault((part, what), {}).setdefault((who, block), []).append(rate)
        print(f"round {turn + 1} of {asked.rounds}", file=sys.stderr)
    for what in ("store", "load", "file store", "file load"):
        title = what.replace("file ", "file: ") if what.startswith("file") else f"memory: {what}"
        print_table(f"{title}, GB/s", rows.get(("memory", what), {}), lambda rate, _: rate / 1e9)
    print_table("two processes: fetch, GB/s", rows[("processes", "fetch")], lambda rate, _: rate / 1e9)
    if ("memory", "lookup") in rows:
        print_table("lookup, us a key, all in one call", rows[("memory", "lookup")], lambda rate, _: 1e6 / rate)
    for peer in running[1:]:
        print(f"{type(peer).__name__} {peer.version}: {peer.settings}")
        peer.close()


if __name__ == "__main__":
    main()
