"""coverage.py FOLDER LEAST: how much of the library's device code the device tests have executed. Run from the root.

FOLDER holds what the tests wrote to PTX_MACHINE_PROFILE_FILE (tests/ptx_machine/profile.hpp). Fails where fewer than LEAST
percent of the source lines that nvcc made instructions of were executed by any kernel, and names the others. The share of
PTX statements is printed too; it is lower, because a compiler repeats a line for each way into an unrolled loop.
"""

import collections
import pathlib
import sys

folder, least = pathlib.Path(sys.argv[1]), float(sys.argv[2])
headers = {"/".join(path.parts[-2:]) for path in pathlib.Path("include/llmmem").rglob("*") if path.is_file()}

statements = {}  # of each kernel, how often each one ran, over all programs
lines = collections.Counter()
for profile in sorted(folder.glob("*.txt")):
    kernels = collections.defaultdict(list)
    with open(profile, encoding="utf-8") as text:
        for row in text:
            fields = row.rstrip("\n").split("\t")
            runs, source = int(fields[5]), fields[10]
            kernels[fields[0], fields[1]].append(runs)
            if source.rpartition(":")[0] in headers:
                lines[source] += runs
    for kernel, runs in kernels.items():
        before = statements.get(kernel, [])
        if len(before) == len(runs):  # else another version of it
            runs = [a + b for a, b in zip(before, runs)]
        statements[kernel] = runs

ours = [runs for (_, name), runs in statements.items() if "llmmem" in name]
count = sum(map(len, ours))
if not count or not lines:
    sys.exit(f"error: {folder} has no profile of a kernel of the library; run the tests labelled ptx first")
ran = sum(sum(1 for each in runs if each) for runs in ours)
missing = sorted(source for source, runs in lines.items() if not runs)
share = 100 * (len(lines) - len(missing)) / len(lines)
print(f"{len(ours)} kernels: {ran} of {count} PTX statements executed ({100 * ran / count:.1f} %), "
      f"{len(lines) - len(missing)} of {len(lines)} source lines ({share:.1f} %)")
for source in missing:
    print(f"never executed: {source}")
if share < least:
    sys.exit(f"error: {share:.1f} % of the source lines, at least {least:g} are wanted: test the lines above")
