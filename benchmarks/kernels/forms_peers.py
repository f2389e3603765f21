"""forms_peers.py: other quantised caches, and other choices of tokens, on the model and text of `paged_decode --weights`.

Usage: forms_peers.py --weights DIR --text FILE [--tokens 8193] [--budgets 8,16] [--fetch 4,8,16]
Needs torch, transformers, optimum-quanto, hqq, zipnn and kvpress, from PyPI; without one of the last four, its rows are left
out.

Runs train_gpt's model (the newest of its checkpoints) in torch over the same windows of the text, with keys and
values through

  transformers' QuantizedCache   its quanto and HQQ layers: quantised once over a whole window, the best case; in use
                                 each further token past the residual length quantises everything again
  zipnn                          lossless, of bf16 keys and values of a whole layer at once: only its bytes

and prints a row as paged_decode's table has: bytes a token in all layers (scales and zero points counted as bf16, as
in a bf16 model), perplexity, and KL to floats. `f32` must be the perplexity that paged_decode says.

With --budgets the first half of each window is a prompt, of whose tokens each layer and head keeps so many, by a scorer of
kvpress or by the rule of `select_tokens` (sinks, recent tokens, and of the rest the largest sums of attention weights, H2O).
The tokens of the second half attend to these and to each other; KL and perplexity are of the second half alone.

With --fetch keys and values are elsewhere, and each token and layer attends to its own and so many others: the rows with the
largest weights, summed over the heads, or the whole pages (--page tokens) with the largest bounds of products, summed alike
(Quest; the least and the largest value of each channel). It counts the bytes that are fetched for a token in all layers, with
and without a buffer of twice as many rows by last use, by the rules of `resolve_hot_rows`: what is wanted and there is not fetched, and
neither is a token's own row. Rows are f32.
"""

import argparse
import glob
import importlib.metadata
import json
import math
import struct
import sys

import torch


def read_safetensors(path):
    with open(path, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
        data = file.read()
    header.pop("__metadata__", None)
    out = {}
    for name, place in header.items():
        first, end = place["data_offsets"]
        out[name] = torch.frombuffer(bytearray(data[first:end]), dtype=torch.float32).reshape(place["shape"])
    return out


class Model:
    """train_gpt's model: GPT-2's blocks, a head of its own."""

    def __init__(self, folder):
        found = sorted(glob.glob(f"{folder}/step-*/model.safetensors"))
        if not found:
            raise SystemExit(f"{folder}: no checkpoint of train_gpt")
        self.at = read_safetensors(found[-1])
        self.blocks = sum(name.endswith("ln_1.weight") for name in self.at)
        self.context, self.width = self.at["wpe.weight"].shape

    def affine(self, x, name):
        return x @ self.at[f"{name}.weight"] + self.at[f"{name}.bias"]

    def norm(self, x, name):
        return torch.nn.functional.layer_norm(x, (self.width,), self.at[f"{name}.weight"], self.at[f"{name}.bias"], 1e-5)

    def attended(self, hidden, name, heads):
        """Queries, keys and values of a block, each [1, heads, tokens, head_dim]."""
        all_three = self.affine(hidden, name + "attn.c_attn").split(self.width, -1)
        return [each.reshape(1, len(hidden), heads, -1).transpose(1, 2) for each in all_three]

    def log_probabilities(self, tokens, heads, through):
        """`through(block, keys, values)`, both [1, heads, tokens, head_dim], returns what the cache gives back."""
        count = len(tokens)
        x = self.at["wte.weight"][tokens] + self.at["wpe.weight"][:count]
        for block in range(self.blocks):
            name = f"h.{block}."
            q, k, v = self.attended(self.norm(x, name + "ln_1"), name, heads)
            k, v = through(block, k.contiguous(), v.contiguous())
            seen = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.affine(seen.transpose(1, 2).reshape(count, self.width), name + "attn.c_proj")
            inner = torch.nn.functional.gelu(self.affine(self.norm(x, name + "ln_2"), name + "mlp.c_fc"), approximate="tanh")
            x = x + self.affine(inner, name + "mlp.c_proj")
        return torch.log_softmax((self.norm(x, "ln_f") @ self.at["lm_head.weight"]).double(), -1)

    def through_rows(self, tokens, heads, seen_by):
        """As `log_probabilities`; each token sees the rows of `seen_by(block, queries, keys, scores)`."""
        count = len(tokens)
        x = self.at["wte.weight"][tokens] + self.at["wpe.weight"][:count]
        for block in range(self.blocks):
            name = f"h.{block}."
            q, k, v = self.attended(self.norm(x, name + "ln_1"), name, heads)
            scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
            out = scores.masked_fill(~seen_by(block, q, k, scores), -math.inf).softmax(-1) @ v
            x = x + self.affine(out.transpose(1, 2).reshape(count, self.width), name + "attn.c_proj")
            inner = torch.nn.functional.gelu(self.affine(self.norm(x, name + "ln_2"), name + "mlp.c_fc"), approximate="tanh")
            x = x + self.affine(inner, name + "mlp.c_proj")
        return torch.log_softmax((self.norm(x, "ln_f") @ self.at["lm_head.weight"]).double(), -1)

    def after_prompt(self, tokens, heads, prompt, kept):
        """As `log_probabilities`; tokens from `prompt` on see of the prompt only what `kept(hidden, keys, values, weights)`
        names for each head: [heads, budget]."""
        count = len(tokens)
        x = self.at["wte.weight"][tokens] + self.at["wpe.weight"][:count]
        causal = torch.ones(count, count, dtype=torch.bool).tril()
        for block in range(self.blocks):
            name = f"h.{block}."
            hidden = self.norm(x, name + "ln_1")
            q, k, v = self.attended(hidden, name, heads)
            scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
            weights = scores[..., :prompt, :prompt].masked_fill(~causal[:prompt, :prompt], -math.inf).softmax(-1)
            seen = causal.repeat(heads, 1, 1)
            seen[:, prompt:, :prompt] = False
            for head, each in enumerate(kept(hidden[None, :prompt], k[:, :, :prompt], v[:, :, :prompt], weights)):
                seen[head, prompt:, each] = True
            out = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v
            x = x + self.affine(out.transpose(1, 2).reshape(count, self.width), name + "attn.c_proj")
            inner = torch.nn.functional.gelu(self.affine(self.norm(x, name + "ln_2"), name + "mlp.c_fc"), approximate="tanh")
            x = x + self.affine(inner, name + "mlp.c_proj")
        return torch.log_softmax((self.norm(x, "ln_f") @ self.at["lm_head.weight"]).double(), -1)


class Floats:
    name = "f32"

    def __init__(self, model):
        self.bytes_per_token = 2 * 4 * model.width * model.blocks

    def through(self, block, keys, values):
        return keys, values


class Quantized:
    """A layer of transformers' QuantizedCache."""

    def __init__(self, model, kind, bits, axis_key, axis_value, group):
        from transformers.cache_utils import HQQQuantizedLayer, QuantoQuantizedLayer

        of = {"quanto": QuantoQuantizedLayer, "hqq": HQQQuantizedLayer}[kind]
        self.layer = of(nbits=bits, axis_key=axis_key, axis_value=axis_value, q_group_size=group)
        self.name = f"{kind} int{bits}, axes {axis_key} and {axis_value}, groups of {group}"
        # A scale and a zero point for a group.
        self.bytes_per_token = int(2 * model.width * model.blocks * (bits / 8 + 4 / group))

    def through(self, block, keys, values):
        if not self.layer.is_initialized:
            self.layer.lazy_initialization(keys, values)
        back = []
        for each, axis in ((keys, self.layer.axis_key), (values, self.layer.axis_value)):
            back.append(self.layer._dequantize(self.layer._quantize(each, axis)).reshape(each.shape).to(each.dtype))
        return back


class Zipnn:
    """Its bytes alone: values come back as they were."""

    name = "zipnn, bf16 without loss"

    def __init__(self, model):
        import zipnn

        self.zip = zipnn.ZipNN(bytearray_dtype="bfloat16", input_format="byte", threads=1)
        self.taken = self.tokens = 0

    def through(self, block, keys, values):
        keys, values = keys.bfloat16(), values.bfloat16()
        for each in (keys, values):
            self.taken += len(self.zip.compress(bytearray(each.view(torch.uint8).numpy().tobytes())))
        self.tokens += keys.shape[2] * (block == 0)
        return keys.float(), values.float()

    @property
    def bytes_per_token(self):
        return self.taken / max(self.tokens, 1)


def select_tokens(budget, sinks, recent):
    """The rule of llmmem's `select_tokens`, with H2O's scores."""

    def kept(hidden, keys, values, weights):
        scores = weights[0].sum(1)
        scores[:, :sinks] = math.inf
        scores[:, scores.shape[1] - recent :] = math.inf
        return scores.topk(budget, -1).indices

    return kept


def pressed(press, heads, budget):
    """A scorer of kvpress, and its own choice: the budget's highest scores of each head."""
    config = type("Config", (), {"num_attention_heads": heads, "num_key_value_heads": heads})
    module = type("Module", (), {"config": config, "layer_idx": 0})

    def kept(hidden, keys, values, weights):
        press.compression_ratio = 1 - budget / keys.shape[2]
        return press.score(module, hidden, keys, values, weights, {})[0].topk(budget, -1).indices

    return kept


def choices_of(heads, budget):
    recent = budget // 4
    yield "all of the prompt", None
    yield f"select_tokens, sums of weights, 4 sinks, {recent} recent", select_tokens(budget, 4, recent)
    yield f"select_tokens, sums of weights, {recent} recent", select_tokens(budget, 0, recent)
    try:
        import kvpress
    except ImportError as missing:
        print(f"not installed: {missing}", file=sys.stderr)
        return
    for press in (
        kvpress.SnapKVPress(window_size=recent, kernel_size=5),
        kvpress.SnapKVPress(window_size=recent, kernel_size=1),
        kvpress.TOVAPress(),
        kvpress.ObservedAttentionPress(),
        kvpress.StreamingLLMPress(n_sink=4),
        kvpress.KnormPress(),
        kvpress.KeyDiffPress(),
        kvpress.RandomPress(),
    ):
        name = type(press).__name__
        if name == "SnapKVPress":
            name += f", window {recent}, kernel {press.kernel_size}"
        yield f"kvpress {name}", pressed(press, heads, budget)


def compare_choices(model, text, heads, budgets):
    prompt = model.context // 2
    print(f"\nprompts of {prompt} tokens, of which a budget is kept; the next {prompt} tokens")
    print(f"{'budget':>6}  {'choice':52} {'perplexity':>11} {'KL to f32, mean':>16}")
    for budget in budgets:
        choices = list(choices_of(heads, budget))
        sums = [[0.0, 0.0] for _ in choices]
        count = 0
        for first in range(0, len(text) - model.context, model.context):
            window, after = text[first : first + model.context], text[first + prompt + 1 : first + model.context + 1]
            exact = model.log_probabilities(window, heads, lambda block, keys, values: (keys, values))[prompt:]
            count += prompt
            for i, (_, kept) in enumerate(choices):
                logs = exact if kept is None else model.after_prompt(window, heads, prompt, kept)[prompt:]
                sums[i][0] -= logs[range(prompt), after].sum().item()
                sums[i][1] += (exact.exp() * (exact - logs)).sum().item()
        for (name, _), (surprise, divergence) in zip(choices, sums):
            print(f"{budget:6}  {name:52} {math.exp(surprise / count):11.4f} {divergence / count:16.2e}")


class Fetched:
    """Attention of each token to its own row and to chosen ones, and the rows that are fetched for it."""

    def __init__(self, rows, page):
        self.rows, self.page = rows, page
        self.fetched = self.buffered = 0
        self.buffers = None

    def begin(self):
        self.buffers = {}

    def seen(self, block, q, k, scores):
        heads, count = scores.shape[1:3]
        causal = torch.ones(count, count, dtype=torch.bool).tril()
        before = causal & ~torch.eye(count, dtype=torch.bool)
        seen = torch.eye(count, dtype=torch.bool)
        if self.page is None:
            weights = scores.masked_fill(~causal, -math.inf).softmax(-1)[0].sum(0).masked_fill(~before, -math.inf)
        else:
            pages = -(-count // self.page)
            bounds = torch.full((count, pages), -math.inf)
            for p in range(pages):
                part = k[0, :, p * self.page : (p + 1) * self.page]
                for t in range(p * self.page + 1, count):
                    held = part[:, : max(0, t - p * self.page)]
                    bounds[t, p] = torch.maximum(q[0, :, t] * held.amin(1), q[0, :, t] * held.amax(1)).sum()
        buffer = self.buffers.setdefault(block, {})
        for t in range(count):
            if self.page is None:
                wanted = weights[t].topk(min(self.rows, t)).indices.tolist() if t else []
            else:
                chosen = bounds[t].topk(min(self.rows // self.page, -(-t // self.page))).indices.tolist() if t else []
                wanted = [i for p in chosen for i in range(p * self.page, min((p + 1) * self.page, t))]
            seen[t, wanted] = True
            self.fetched += len(wanted)
            there = [each for each in wanted if each in buffer]
            for each in there + [each for each in wanted if each not in buffer]:
                if each in buffer:
                    del buffer[each]
                else:
                    self.buffered += 1
                buffer[each] = None
            while len(buffer) > 2 * self.rows:
                del buffer[next(iter(buffer))]
        return seen


def compare_fetches(model, text, heads, budgets, page):
    print(f"\nrows elsewhere: bytes fetched a token, f32; pages of {page} tokens")
    print(f"{'rows':>5}  {'choice':8} {'fetched':>9} {'through a buffer of twice the rows':>35} {'KL to f32, mean':>16}")
    forms = [Fetched(rows, of) for rows in budgets for of in (None, page) if of is None or rows >= page]
    sums = [0.0] * len(forms)
    count = everything = 0
    for first in range(0, len(text) - model.context, model.context):
        window = text[first : first + model.context]
        exact = model.log_probabilities(window, heads, lambda block, keys, values: (keys, values))
        count += model.context
        everything += model.context * (model.context - 1) // 2 * model.blocks
        for i, form in enumerate(forms):
            form.begin()
            logs = model.through_rows(window, heads, form.seen)
            sums[i] += (exact.exp() * (exact - logs)).sum().item()
    row = 2 * 4 * model.width
    print(f"{'all':>5}  {'':8} {everything * row / count:9,.0f} {'':35} {0:16.2e}")
    for form, divergence in zip(forms, sums):
        name = "rows" if form.page is None else "pages"
        print(f"{form.rows:5}  {name:8} {form.fetched * row / count:9,.0f} {form.buffered * row / count:35,.0f} {divergence / count:16.2e}")


def main():
    options = argparse.ArgumentParser(description="Other quantised caches on the model and text of paged_decode --weights.")
    options.add_argument("--weights", required=True, help="folder of train_gpt's checkpoints")
    options.add_argument("--text", required=True, help="a text that the model was not trained on")
    options.add_argument("--tokens", type=int, default=8193, help="of the text, from its beginning")
    options.add_argument("--budgets", default="", help="tokens to keep of a prompt of half a window: 8,16")
    options.add_argument("--fetch", default="", help="rows that a token attends to in addition to its own: 4,8,16,32")
    options.add_argument("--page", type=int, default=4, help="tokens of a page that is fetched whole")
    options.add_argument("--heads", type=int, default=4, help="of the model")
    asked = options.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model(asked.weights)
    with open(asked.text, "rb") as file:
        text = torch.tensor(list(file.read(asked.tokens)))
    makers = [lambda: Floats(model), lambda: Zipnn(model)]
    group = min(64, model.width // asked.heads)
    for kind, axes in (("quanto", ((0, 0), (-1, 0))), ("hqq", ((1, 1), (0, 1)))):
        for bits in (4, 2):
            for axis in axes:
                makers.append(lambda k=kind, b=bits, a=axis: Quantized(model, k, b, *a, group))
    forms = []
    for make in makers:
        try:
            forms.append(make())
        except ImportError as missing:
            print(f"not installed: {missing}", file=sys.stderr)
    sums = {form.name: [0.0, 0.0] for form in forms}
    with torch.no_grad():
        for first in range(0, len(text) - 1, model.context):
            window, after = text[first : first + model.context], text[first + 1 : first + model.context + 1]
            window = window[: len(after)]
            for form in forms:
                logs = model.log_probabilities(window, asked.heads, form.through)
                if form.name == "f32":
                    exact = logs
                sums[form.name][0] -= logs[range(len(after)), after].sum().item()
                sums[form.name][1] += (exact.exp() * (exact - logs)).sum().item()
    count = len(text) - 1
    print(f"{'form':44} {'bytes a token':>13} {'perplexity':>11} {'KL to f32, mean':>16}")
    for form in forms:
        surprise, divergence = sums[form.name]
        print(f"{form.name:44} {form.bytes_per_token:13.0f} {math.exp(surprise / count):11.4f} {divergence / count:16.2e}")
    if asked.budgets:
        with torch.no_grad():
            compare_choices(model, text, asked.heads, [int(each) for each in asked.budgets.split(",")])
    if asked.fetch:
        with torch.no_grad():
            compare_fetches(model, text, asked.heads, [int(each) for each in asked.fetch.split(",")], asked.page)
    for package in ("torch", "transformers", "optimum-quanto", "hqq", "zipnn", "kvpress"):
        try:
            print(package, importlib.metadata.version(package), end="; ")
        except importlib.metadata.PackageNotFoundError:
            pass
    print()


if __name__ == "__main__":
    main()
