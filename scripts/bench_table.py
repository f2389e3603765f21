"""bench_table.py RESULT.json...: Google Benchmark's repetitions as one table a group, each row against ours.

A row is named group/who/parameters..., e.g. allocate_free/boost_pool/32. `who` is `llmmem` for ours and `floor` for the
least that could be done: the ratios are the row's median over those of the rows whose names differ in nothing else, so
3.0 is three times as slow as we are. Times are per item where the benchmark counts items, else per iteration. Counters
of the benchmark follow in the last columns.
"""

import collections
import json
import re
import statistics
import sys

OURS = "llmmem"
FLOOR = "floor"
# Suffixes that Google Benchmark adds to a name to say how it was run.
HOW = ("iterations:", "repeats:", "min_time:", "min_warmup_time:", "real_time", "process_time", "manual_time", "threads:1")
NANOSECONDS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
# The fields that Google Benchmark itself writes of a run, and of the program; the benchmark wrote all others.
OF_A_RUN = {
    "name", "family_index", "per_family_instance_index", "run_name", "run_type", "repetitions", "repetition_index",
    "threads", "iterations", "real_time", "cpu_time", "time_unit", "items_per_second", "bytes_per_second", "label",
}  # fmt: skip
OF_A_PROGRAM = {
    "date", "host_name", "executable", "num_cpus", "mhz_per_cpu", "cpu_scaling_enabled", "aslr_enabled", "caches",
    "load_avg", "library_version", "library_build_type", "json_schema_version",
}  # fmt: skip


def read(paths):
    """Returns times and counters by row, and the facts that the benchmarks report about themselves."""
    times = collections.defaultdict(list)
    counters = collections.defaultdict(lambda: collections.defaultdict(list))
    told = {}
    for path in paths:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
        told.update((key, value) for key, value in document["context"].items() if key not in OF_A_PROGRAM)
        for run in document["benchmarks"]:
            name = tuple(part for part in run["name"].split("/") if not part.startswith(HOW))
            if run.get("error_occurred"):
                print(f"{run['name']}: {run.get('error_message', 'failed')}", file=sys.stderr)
                continue
            if run.get("run_type") != "iteration":
                continue
            per_second = run.get("items_per_second")
            times[name].append(1e9 / per_second if per_second else run["real_time"] * NANOSECONDS[run["time_unit"]])
            for key, value in run.items():
                if key not in OF_A_RUN:
                    counters[name][key].append(value)
    return times, counters, told


def rival(name, who, medians):
    """The row of `who` that competes with `name`: its name differs in one component, which is `who`."""
    for position in range(1, len(name)):
        candidate = name[:position] + (who,) + name[position + 1 :]
        if candidate in medians:
            return candidate
    return None


def natural(text):
    """Sorts 32 before 1000."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", text)]


def print_table(header, rows):
    """Cells under their header, the first column to the left; an empty row stays empty."""
    widths = [max(len(row[column]) for row in [header, *rows] if row) for column in range(len(header))]
    for row in [header, *rows]:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])] if row else []
        print("  ".join([row[0].ljust(widths[0]), *cells]).rstrip() if row else "")


def main(paths):
    times, counters, told = read(paths)
    if not times:
        sys.exit("no rows: did the filter match nothing?")
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    groups = collections.defaultdict(list)
    for name in times:
        groups[name[0]].append(name)

    for group, names in sorted(groups.items()):
        ours = {name: rival(name, OURS, medians) for name in names}
        extra = sorted({key for name in names for key in counters[name]})
        rows = []
        # Competing rows are printed together, ours first, then the fastest.
        names.sort(key=lambda n: (natural("/".join(ours[n] or n)), n != ours[n], medians[n]))
        for place, name in enumerate(names):
            if place > 0 and ours[name] != ours[names[place - 1]]:
                rows.append(None)
            ratios = [
                f"{medians[name] / medians[other]:.2f}" if other and medians[other] else "-"
                for other in (ours[name], rival(name, FLOOR, medians))
            ]
            spread = [f"{value:,.2f}" for value in (medians[name], min(times[name]), max(times[name]))]
            told_by_row = [f"{statistics.median(counters[name][k]):.4g}" if k in counters[name] else "-" for k in extra]
            rows.append(["/".join(name[1:]) or group, *spread, *ratios, *told_by_row])
        print()
        print_table([group, "median ns", "min", "max", "of ours", "of floor", *extra], rows)

    print("\nns: an item or an iteration, over the repetitions; of ours: 2.00 takes twice our time")
    for key, value in sorted(told.items()):
        print(f"{key}: {value}")


main(sys.argv[1:])
