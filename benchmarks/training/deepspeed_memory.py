"""deepspeed_memory.py: memory of DeepSpeed's ZeRO on CPUs, next to that of train_gpt with the same shapes.

  python3 benchmarks/training/deepspeed_memory.py build/examples/train_gpt/train_gpt [--ranks N] [--width N] ...

trains the model of train_gpt with DeepSpeed, in as many processes as ranks, over gloo: floats, AdamW, ZeRO 0 to 3. Of each
process it takes the peak of its resident memory (VmHWM), minus what was resident before, after two steps of a
model of the same layers and width `--heads`. train_gpt says its own
peak, in bytes that it allocated, and what the library predicts. Both are of rank 0, in MiB.

Needs the packages deepspeed and torch; with a step of every stage it takes minutes.
"""

import argparse
import gc
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile

MIB = 1 << 20


def status(field):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"deepspeed_memory.py: no {field} in /proc/self/status")


def make_model(torch, asked):
    """The layers of train_gpt: embeddings, blocks, a norm and a head, all with biases but the head."""
    nn = torch.nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            width = asked.width
            self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.attn, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            batch, context, width = x.shape
            q, k, v = self.attn(self.ln_1(x)).view(batch, context, 3, asked.heads, -1).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(mixed.transpose(1, 2).reshape(batch, context, width))
            return x + self.out(nn.functional.gelu(self.fc(self.ln_2(x))))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(256, asked.width), nn.Embedding(asked.context, asked.width)
            self.blocks = nn.ModuleList(Block() for _ in range(asked.layers))
            self.ln_f, self.head = nn.LayerNorm(asked.width), nn.Linear(asked.width, 256, bias=False)

        def forward(self, tokens, targets):
            x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
            for block in self.blocks:
                x = block(x)
            return nn.functional.cross_entropy(self.head(self.ln_f(x)).flatten(0, 1), targets.flatten())

    return Gpt


def train(asked):
    """One rank; prints its figures as JSON if it is the first."""
    import torch
    import deepspeed

    torch.set_num_threads(1)
    torch.manual_seed(1)
    deepspeed.init_distributed(dist_backend="gloo")
    torch.distributed.all_reduce(torch.zeros(1))
    config = {
        "train_batch_size": asked.batch,
        "train_micro_batch_size_per_gpu": asked.batch // asked.ranks,
        "zero_optimization": {"stage": asked.stage, "reduce_bucket_size": asked.bucket, "allgather_bucket_size": asked.bucket,
                              "stage3_prefetch_bucket_size": asked.bucket, "stage3_param_persistence_threshold": 0,
                              "stage3_max_live_parameters": asked.live},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }

    def run(width, steps):
        Gpt = make_model(torch, argparse.Namespace(**{**vars(asked), "width": width}))
        if asked.stage == 3:
            with deepspeed.zero.Init(config_dict_or_path=config):
                model = Gpt()
            parameters = sum(p.ds_numel for p in model.parameters())
        else:
            model = Gpt()
            parameters = sum(p.numel() for p in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        engine, _, _, _ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
        for _ in range(steps):
            tokens = torch.randint(256, (asked.batch // asked.ranks, asked.context))
            loss = engine(tokens, tokens)
            engine.backward(loss)
            engine.step()
        return parameters, float(loss), engine

    small = run(asked.heads, 2)[2]  # loads what the first steps load: more than a hundred MiB of code
    small.destroy()
    del small
    gc.collect()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    base = status("VmRSS")
    parameters, loss, engine = run(asked.width, asked.steps)
    if int(os.environ["RANK"]) == 0:
        with open(os.environ["FIGURES"], "w", encoding="utf-8") as out:
            json.dump({"parameters": parameters, "peak": status("VmHWM") - base, "kept": status("VmRSS") - base,
                       "loss": loss}, out)
    del engine


def of_deepspeed(asked, stage):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        figures = pathlib.Path(folder, "figures")
        env = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(asked.ranks), DS_ACCELERATOR="cpu",
                   FIGURES=str(figures), OMP_NUM_THREADS="1", LOCAL_SIZE=str(asked.ranks))
        own = [sys.executable, *sys.argv, "--stage", str(stage)]
        logs = [open(pathlib.Path(folder, f"log{rank}"), "w+", encoding="utf-8") for rank in range(asked.ranks)]
        ranks = [subprocess.Popen(own, env=dict(env, RANK=str(rank), LOCAL_RANK=str(rank)), stdout=logs[rank], stderr=logs[rank])
                 for rank in range(asked.ranks)]
        failed = [rank for rank, process in enumerate(ranks) if process.wait() != 0]
        if failed:
            logs[failed[0]].seek(0)
            sys.exit(f"deepspeed_memory.py: rank {failed[0]} at stage {stage}:\n" + logs[failed[0]].read()[-3000:])
        return json.loads(figures.read_text())


def of_train_gpt(asked, stage):
    command = [asked.program, "--text", __file__, "--ranks", str(asked.ranks), "--layers", str(asked.layers), "--width", str(asked.width),
               "--heads", str(asked.heads), "--context", str(asked.context), "--batch", str(asked.batch), "--steps", str(asked.steps),
               "--threads", str(asked.ranks), "--parallel", ["data", "zero1", "zero2", "zero3"][stage], "--update", "after_backward",
               "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    for name, default in (("ranks", 2), ("layers", 6), ("width", 512), ("heads", 8), ("context", 64), ("batch", 4), ("steps", 3),
                          ("bucket", 3_200_000), ("live", 6_400_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--stage", type=int)
    asked = parser.parse_args()
    if asked.stage is not None:
        return train(asked)
    print("| ZeRO | parameters | DeepSpeed, peak | after the steps | train_gpt, peak | predicted |")
    print("|--:|--:|--:|--:|--:|--:|")
    for stage in range(4):
        theirs = of_deepspeed(asked, stage)
        ours = of_train_gpt(asked, stage)["ranks"][0]
        peak, predicted = ours["peak_bytes"], ours["predicted"]["peak_bytes"]
        print(f"| {stage} | {theirs['parameters']:,} | {theirs['peak'] / MIB:.1f} | {theirs['kept'] / MIB:.1f} | {peak / MIB:.1f} |"
              f" {predicted / MIB:.1f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
