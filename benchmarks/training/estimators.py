"""estimators.py: what `predict` says of plans of published models, and what DeepSpeed's memory estimators say.

  c++ -std=c++20 -O1 -I include benchmarks/training/plan_bytes.cpp -o build/plan_bytes
  python3 benchmarks/training/estimators.py build/plan_bytes

prints a table in GB (10^9 bytes). Where the package deepspeed is installed, its own functions are called too, and a
difference from the formulas below ends the script.

The formulas are those of deepspeed/runtime/zero/stage_1_and_2.py (estimate_zero2_model_states_mem_needs) and stage3.py
(estimate_zero3_model_states_mem_needs) of DeepSpeed 0.19. It has none for ZeRO 1.
"""

import json
import os
import subprocess
import sys

FACTOR = 1.5  # their allowance for buffers

# Parameters of the largest module by itself: the embedding, or a matrix of the MLP.
LARGEST = {"gpt2-124m": 50257 * 768, "llama2-7b": 32000 * 4096, "llama2-70b": 32000 * 8192}


def stage2(parameters, node_ranks, nodes, offload):
    """Bytes of a node's host memory, and of one device."""
    world = node_ranks * nodes
    if offload:
        return int(parameters * max(4 * world, 16) * FACTOR), 2 * parameters
    return int(parameters * 4 * node_ranks * FACTOR), 2 * parameters + int(18 * parameters / world)


def stage3(parameters, largest, node_ranks, nodes, offload):
    """The same, with weights and optimizer offloaded, or neither, and weights that are made in shards."""
    if offload:
        return int(parameters * 18 * (1 / nodes) * FACTOR), 4 * largest
    return int(largest * 4 * node_ranks * FACTOR), 4 * largest + int(18 * parameters / (node_ranks * nodes))


def check(ours, stage, parameters, largest, node_ranks, nodes, offload):
    try:
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as theirs3
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as theirs2
    except ImportError:
        return False
    if stage == 2:
        theirs = theirs2(parameters, node_ranks, nodes, offload)
    else:
        theirs = theirs3(parameters, largest, node_ranks, nodes, offload, offload, True)[:2]
    if tuple(theirs) != ours:
        sys.exit(f"estimators.py: DeepSpeed's function gives {theirs} where its formula gives {ours}")
    return True


def main():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else a warning among the rows
    checked = 0
    print("| model | ranks | ZeRO | offload | device, DeepSpeed | predicted | in 16 parts | host of a node, DeepSpeed |"
          " predicted |")
    print("|---|--:|--:|---|--:|--:|--:|--:|--:|")
    rows = [json.loads(line) for line in subprocess.run([sys.argv[1]], check=True, capture_output=True).stdout.splitlines()]
    for row in rows:
        if row["parts"] != 1:
            continue
        parts = [each for each in rows if each["parts"] != 1
                 and all(each[key] == row[key] for key in ("model", "ranks", "stage", "offload"))]
        nodes = row["ranks"] // row["node_ranks"]
        theirs = ("no formula", "no formula")
        if row["stage"] > 1:
            of = (row["parameters"], row["node_ranks"], nodes, row["offload"])
            largest = LARGEST[row["model"]]
            theirs = stage2(*of) if row["stage"] == 2 else stage3(of[0], largest, *of[1:])
            checked += check(theirs, row["stage"], of[0], largest, *of[1:])

        def told(number):
            return f"{number / 1e9:,.2f}" if isinstance(number, int) else number

        print(f"| {row['model']} | {row['ranks']} | {row['stage']} | {'yes' if row['offload'] else 'no'} |"
              f" {told(theirs[1])} | {told(row['fast'])} | {told(parts[0]['fast']) if parts else ''} |"
              f" {told(theirs[0])} | {told(row['below_node'])} |")
    print(f"\n{checked} rows checked with DeepSpeed's functions", file=sys.stderr)


if __name__ == "__main__":
    main()
