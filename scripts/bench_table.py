"""bench_table.py RESULT.json...: Google Benchmark's repetitions as one table a group, each row against ours.

A row is named group/who/parameters..., e.g. allocate_free/boost_pool/32. `who` is `llmmem` for ours: the ratio is the
row's median over that of the row whose name differs in nothing else, so 3.0 is three times as slow as we are. Times are
per item where the benchmark counts items, else per iteration.
"""

import collections
import json
import re
import statistics
import sys

OURS = "llmmem"
# Suffixes that Google Benchmark adds to a name to say how it was run.
HOW = ("iterations:", "repeats:", "min_time:", "min_warmup_time:", "real_time", "process_time", "manual_time", "threads:1")
NANOSECONDS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}


def samples_by_row(paths):
    rows = collections.defaultdict(list)
    for path in paths:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
        for run in document["benchmarks"]:
            name = tuple(part for part in run["name"].split("/") if not part.startswith(HOW))
            if run.get("error_occurred"):
                print(f"{run['name']}: {run.get('error_message', 'failed')}", file=sys.stderr)
                continue
            if run.get("run_type") != "iteration":
                continue
            per_second = run.get("items_per_second")
            time = 1e9 / per_second if per_second else run["real_time"] * NANOSECONDS[run["time_unit"]]
            rows[name].append(time)
    return rows


def ours_for(name, medians):
    """Our row that `name` competes with: equal but for one component, which is ours."""
    for position in range(1, len(name)):
        candidate = name[:position] + (OURS,) + name[position + 1 :]
        if candidate in medians:
            return candidate
    return None


def natural(text):
    """Sorts 32 before 1000."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", text)]


def main(paths):
    rows = samples_by_row(paths)
    if not rows:
        sys.exit("no rows: did the filter match nothing?")
    medians = {name: statistics.median(samples) for name, samples in rows.items()}
    groups = collections.defaultdict(list)
    for name in rows:
        groups[name[0]].append(name)

    for group, names in groups.items():
        labels = {name: "/".join(name[1:]) or group for name in names}
        width = max(len(label) for label in [*labels.values(), group])
        print(f"\n{group:<{width}}  {'median ns':>12}  {'spread':>7}  {'of ours':>8}")
        # Rows that compete stand together, ours first, then the fastest.
        ours = {name: ours_for(name, medians) for name in names}
        for name in sorted(names, key=lambda n: (natural("/".join(ours[n] or n)), n != ours[n], medians[n])):
            median = medians[name]
            spread = (max(rows[name]) - min(rows[name])) / median if median else 0.0
            ratio = f"{median / medians[ours[name]]:.2f}" if ours[name] else "-"
            print(f"{labels[name]:<{width}}  {median:>12,.2f}  {spread:>7.0%}  {ratio:>8}")
    print("\nmedian ns: an item or an iteration; spread: (largest - smallest) / median; of ours: 2.00 takes twice our time")


main(sys.argv[1:])
