#!/usr/bin/env python3
"""torch_twins.py [--self-test]: what a user of torch, or of Triton, would run in place of this library's kernels.

The same shapes and counts of bytes as bench_gpu_kernels_kernels and bench_gpu_kernels_attention, whose rows they stand
beside, and random numbers as there; each figure is the median of 15 replays of a CUDA graph of 20 launches and more,
over four sets of buffers and more, so that none is found in the device's L2. Prints a table, and writes its rows to the
file that LLMMEM_BENCH_ROWS names, as these programs do. Without torch or a device: a line that says so, and exit
status 77.

--self-test checks the counts of bytes, without torch.
"""

import functools
import json
import os
import statistics
import sys

KIB = 1024
MIB = 1024 * KIB
SETS = 4
LAUNCHES = 20
WARM = 2
REPLAYS = 15


def append_bytes(tokens, heads=8, head_dim=128):
    """Keys and values in bf16, read and written, and a slot of 8 bytes a token."""
    return tokens * (2 * 2 * heads * head_dim * 2 + 8)


def copy_bytes(blocks, block_bytes):
    return 2 * blocks * block_bytes


def quantize_bytes(values, bits=8, group=128):
    """bf16 read, codes and a float a group written."""
    return values * 2 + values * bits // 8 + values // group * 4


def attention_bytes(batch, tokens, query_heads=32, heads=8, head_dim=128):
    """Keys and values in bf16 read once, queries read and outputs written."""
    return 2 * batch * tokens * heads * head_dim * 2 + 2 * batch * query_heads * head_dim * 2


def blocks_of(room, block_bytes):
    return min(room // block_bytes, 256 * MIB // block_bytes)


def sets_beyond(cache_bytes, size, room):
    """How many sets of `size` bytes have twice those of the cache together, as far as `room` has them."""
    return min(max(2 * cache_bytes // size + 1, 2), room // size)


def launches_over(sets):
    """At least LAUNCHES, each set as often as the others."""
    return -(-LAUNCHES // sets) * sets


def size_text(size):
    if size >= MIB:
        return f"{size // MIB} MiB"
    return f"{size // KIB} KiB"


def self_test():
    assert append_bytes(1) == 8200
    assert copy_bytes(3, 4096) == 24576
    assert quantize_bytes(1024) == 2048 + 1024 + 32
    assert attention_bytes(1, 1024) == 2 * 1024 * 8 * 128 * 2 + 2 * 32 * 128 * 2
    assert blocks_of(1024 * MIB, 2 * MIB) == 128
    assert sets_beyond(50 * MIB, 4 * MIB, 4096 * MIB) == 26 and sets_beyond(50 * MIB, 3000 * MIB, 4096 * MIB) == 1
    assert launches_over(4) == 20 and launches_over(26) == 26 and launches_over(8) == 24
    assert size_text(4 * KIB) == "4 KiB" and size_text(2 * MIB) == "2 MiB"
    print("the counts of bytes are right")
    return 0


class Table:
    def __init__(self, torch):
        self.torch = torch
        path = os.environ.get("LLMMEM_BENCH_ROWS")
        self.file = open(path, "w", encoding="utf-8") if path else None

    def measure(self, what, shape, size, launch, sets=SETS, share_of="copy"):
        """launch(i): a launch over the i-th of `sets`. What it cannot do is told, and left out."""
        torch = self.torch
        try:
            took = self.replayed(launch, sets)
        except Exception as failed:  # versions of torch differ in what they lack, and in how they say so
            print(f"{what}, {shape}: not measured: {(str(failed) or repr(failed)).splitlines()[0]}", flush=True)
            torch.cuda.synchronize()
            return
        row = {"what": what, "shape": shape, "bytes": size, "us": round(statistics.median(took), 3),
               "least_us": round(min(took), 3), "most_us": round(max(took), 3),
               "share_of": share_of}
        print(f"{what:<34} {shape:<34} {size:>12} {row['us']:>10.2f} {size / row['us'] / 1000:>9.1f}", flush=True)
        if self.file:
            print(json.dumps(row), file=self.file, flush=True)

    def replayed(self, launch, sets):
        torch = self.torch
        for i in range(sets):
            launch(i)
        torch.cuda.synchronize()
        launches = launches_over(sets)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(launches):
                launch(i % sets)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        took = []
        for _ in range(WARM + REPLAYS):
            graph.replay()  # so that the device is busy when it is given what is timed
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            took.append(begin.elapsed_time(end) * 1000 / launches)
        return took[WARM:]


def drawn(torch, *shape):
    """Numbers as a model has them: zeros would have the device take less power, and perhaps run faster."""
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def drawn_words(torch, *shape):
    return torch.randint(-(2**63), 2**63 - 1, shape, dtype=torch.int64, device="cuda")


def measure_tokens(torch, table):
    for tokens in (1, 16, 256, 8192, 65536):
        blocks = max(2 * tokens // 16, 64)
        places = torch.randperm(blocks * 16, device="cuda")[:tokens]
        # In words of 8 bytes, as torch moves an element at a time.
        caches = [drawn_words(torch, 2, blocks * 16, 256) for _ in range(SETS)]
        batches = [drawn_words(torch, 2, tokens, 256) for _ in range(SETS)]
        shape = f"bf16 NHD, T {tokens}"

        def append(i, caches=caches, batches=batches, places=places):
            caches[i].index_copy_(1, places, batches[i])

        def gather(i, caches=caches, batches=batches, places=places):
            torch.index_select(caches[i], 1, places, out=batches[i])

        table.measure("torch index_copy_ (append_kv)", shape, append_bytes(tokens), append)
        table.measure("torch index_select (gather_kv)", shape, append_bytes(tokens), gather)


def measure_blocks(torch, triton_copy, table, room):
    for block_bytes in (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 2 * MIB):
        blocks = room // block_bytes
        count = blocks_of(room, block_bytes)
        order = torch.randperm(blocks, device="cuda")[:count]
        targets = order.flip(0)
        pools = [drawn_words(torch, 2, blocks, block_bytes // 8) for _ in range(SETS)]
        shape = f"{count} x {size_text(block_bytes)}"
        size = copy_bytes(count, block_bytes)
        table.measure("torch index_select, index_copy_", shape, size,
                      lambda i, p=pools, o=order, t=targets: p[i][1].index_copy_(0, t, p[i][0].index_select(0, o)))
        if triton_copy is not None:
            table.measure("Triton (copy_kv_blocks)", shape, size,
                          lambda i, p=pools, o=order, t=targets: triton_copy(p[i][1], p[i][0], t, o))


def make_triton_copy():
    """Blocks by number, a program for each 16 KiB of each; None without Triton."""
    try:
        import triton
        import triton.language as tl
    except (ImportError, OSError):
        print("no Triton: its rows are left out")
        return None

    @triton.jit
    def copy_blocks(to, source, to_blocks, from_blocks, words: tl.constexpr, tile: tl.constexpr):
        pair = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * tile + tl.arange(0, tile)
        read = tl.load(from_blocks + pair) * words
        written = tl.load(to_blocks + pair) * words
        tl.store(to + written + at, tl.load(source + read + at, mask=at < words), mask=at < words)

    def launch(to, source, to_blocks, from_blocks):
        words = source.shape[1]
        tile = min(words, 2048)
        copy_blocks[(to_blocks.numel(), triton.cdiv(words, tile))](to, source, to_blocks, from_blocks, words, tile)

    return launch


def measure_numbers(torch, table, room):
    values = min(room, 512 * MIB) // 2
    inputs = [drawn(torch, values // 128, 128) for _ in range(SETS)]

    def quantize(x):
        scale = x.abs().amax(dim=1, keepdim=True).float() / 127
        return torch.round(x.float() / scale).to(torch.int8), scale

    def dequantize(codes, scale):
        return (codes.float() * scale).to(torch.bfloat16)

    quantized = [quantize(each) for each in inputs]
    size = quantize_bytes(values)
    there = "bf16 to int8 by 128"
    back = "int8 to bf16 by 128"
    table.measure("torch (quantize_groups)", there, size, lambda i: quantize(inputs[i]))
    table.measure("torch (dequantize_groups)", back, size, lambda i: dequantize(*quantized[i]))
    # Compiled when it is first called, where what cannot be is left out.
    compiled = functools.cache(lambda of: torch.compile(of, dynamic=False))
    table.measure("torch.compile (quantize_groups)", there, size, lambda i: compiled(quantize)(inputs[i]))
    table.measure("torch.compile (dequantize_groups)", back, size, lambda i: compiled(dequantize)(*quantized[i]))


def measure_attention(torch, table):
    attend = torch.nn.functional.scaled_dot_product_attention
    # Older versions of torch do not tell.
    cache_bytes = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 64 * MIB)
    for batch, tokens in ((1, 1024), (1, 8192), (1, 131072), (8, 4096), (32, 4096), (128, 1024), (128, 4096)):
        size = attention_bytes(batch, tokens)
        sets = sets_beyond(cache_bytes, size, 4096 * MIB)
        query = drawn(torch, batch, 32, 1, 128)
        # In one piece: torch reads no block tables here.
        keys, values = ([drawn(torch, batch, 8, tokens, 128) for _ in range(sets)] for _ in range(2))
        table.measure("torch sdpa, in one piece", f"bf16, 32 on 8 x 128, B {batch} x {tokens}",
                      size, lambda i, q=query, k=keys, v=values: attend(q, k[i], v[i], enable_gqa=True), sets, "read")


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    if sys.argv[1:]:
        sys.exit(f"there is no '{sys.argv[1]}'\n{__doc__}")
    try:
        import torch
    except (ImportError, OSError) as failed:  # the latter where a library of its own cannot be loaded
        print(f"SKIPPED: python3 has no torch: {(str(failed) or repr(failed)).splitlines()[0]}")
        sys.exit(77)
    if not torch.cuda.is_available():
        print("SKIPPED: torch finds no CUDA device")
        sys.exit(77)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    table = Table(torch)
    room = 1024 * MIB
    # Quantising last: to compile takes longer than to measure all else.
    parts = (lambda: measure_tokens(torch, table), lambda: measure_blocks(torch, make_triton_copy(), table, room),
             lambda: measure_attention(torch, table), lambda: measure_numbers(torch, table, room))
    status = 0
    for part in parts:
        try:
            part()
        except Exception as failed:  # what has no room there, say; the others may have
            print(f"FAILED: {(str(failed) or repr(failed)).splitlines()[0]}", flush=True)
            status = 1
        torch.cuda.empty_cache()
    return status


if __name__ == "__main__":
    sys.exit(main())
