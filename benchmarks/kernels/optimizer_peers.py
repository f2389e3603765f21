"""optimizer_peers.py: optimizer steps on the host by this library, and by torch, DeepSpeed and bitsandbytes, in one run.

Usage: optimizer_peers.py [--bench build/bench/bin/bench_kernels]... [--rounds 5]

Needs torch from PyPI, and takes deepspeed, ninja and bitsandbytes where they are there. Each steps 16 Mi parameters in a
matrix of 4,096 columns, with float weights and gradients in memory, on one thread. Every round runs each once, in
turns; the table has the median and the range of the time a parameter, and the bytes of state a parameter that each
keeps. What is not installed is left out with a line that says so. DeepSpeed compiles its CPU Adam (with -march=native)
at its first use, which needs ninja.
"""

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time

COUNT = 16 << 20
NANOSECONDS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
# Bytes of state a parameter. `adamw_split16` keeps the low half of a float weight there, and bf16 weights.
OURS = {"step/adamw": 8, "step/adamw_8bit": 2.03125, "step/adamw_split16": 10, "step/adamw_stochastic": 8, "step/sgd": 4,
        "adafactor": 0.00195, "stream": 0}  # fmt: skip


def ours(program):
    """Times a parameter, by row: an item of the benchmark is 1 Ki parameters."""
    done = subprocess.run(
        [program, "--benchmark_filter=^(step/|stream$|adafactor$)", "--benchmark_format=json", "--benchmark_min_time=0.05"],
        check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    for row in json.loads(done.stdout)["benchmarks"]:
        yield row["name"], row["real_time"] * NANOSECONDS[row["time_unit"]] / COUNT


def others():
    """Names and makers of optimizers over one parameter."""
    import torch

    yield "torch AdamW, fused", lambda p: torch.optim.AdamW([p], fused=True)
    yield "torch AdamW, foreach", lambda p: torch.optim.AdamW([p], foreach=True)
    yield "torch SGD with momentum, fused", lambda p: torch.optim.SGD([p], lr=1e-3, momentum=0.9, fused=True)
    yield "torch Adafactor", lambda p: torch.optim.Adafactor([p])

    def deepspeed(p):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam([p], adamw_mode=True)

    def bitsandbytes(p):
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit([p])

    yield "DeepSpeed CPU Adam", deepspeed
    yield "bitsandbytes AdamW8bit", bitsandbytes


def main():
    options = argparse.ArgumentParser(description="Optimizer steps on the host, beside other libraries.")
    options.add_argument("--bench", action="append", help="bench_kernels (several: built with different flags)")
    options.add_argument("--rounds", type=int, default=5)
    asked = options.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded: DeepSpeed's step follows it
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ["PATH"] = os.path.join(sys.prefix, "bin") + ":" + os.environ["PATH"]
    import torch

    torch.set_num_threads(1)
    running, state = {}, {}
    for name, make in others():
        parameter = torch.nn.Parameter(torch.randn(COUNT // 4096, 4096))
        parameter.grad = torch.randn_like(parameter) * 1e-3
        try:
            running[name] = make(parameter)
            running[name].step()  # allocates its state
        except Exception as missing:  # a package that is absent, or cannot run here
            print(f"{name}: left out ({str(missing).splitlines()[0]})", file=sys.stderr)
            running.pop(name, None)
            continue
        kept = [each for each in running[name].state[parameter].values() if torch.is_tensor(each)]
        state[name] = sum(each.numel() * each.element_size() for each in kept) / COUNT
    times = {}
    for _ in range(asked.rounds):
        for program in asked.bench or ["build/bench/bin/bench_kernels"]:
            for name, taken in ours(program):
                times.setdefault((name, program), []).append(taken)
        for name, optimizer in running.items():
            began = time.perf_counter()
            optimizer.step()
            times.setdefault((name, ""), []).append((time.perf_counter() - began) / COUNT * 1e9)
    print("| step | ns a parameter | bytes of state |\n|---|---:|---:|")
    for (name, program), taken in sorted(times.items(), key=lambda each: statistics.median(each[1])):
        taken.sort()
        kept = state.get(name, OURS.get(name))
        print(f"| {name}{f' ({program})' if program else ''} | {statistics.median(taken):.2f} ({taken[0]:.2f} to {taken[-1]:.2f}) | {'' if kept is None else f'{kept:.3g}'} |")
    for package in ("torch", "deepspeed", "bitsandbytes"):
        try:
            print(package, importlib.metadata.version(package), end="; ")
        except importlib.metadata.PackageNotFoundError:
            pass
    print()


if __name__ == "__main__":
    main()
