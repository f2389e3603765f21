"""test_cost.py BEGAN BUDGET PRESET...: what scripts/test took, and what of it took most.

BEGAN is when it began (seconds since 1970), BUDGET its budget in CPU minutes. build/test/times holds what bash's `times`
printed: user and system time of the script and of its children. Seconds of single translation units and tests are of the
clock, so they are larger on a busy machine.
"""

import pathlib
import re
import sys
import time

began, budget = float(sys.argv[1]), float(sys.argv[2])
times = re.findall(r"(\d+)m([\d.]+)s", pathlib.Path("build/test/times").read_text())
cpu = sum(60 * int(minutes) + float(seconds) for minutes, seconds in times)
units = {}
for preset in sys.argv[3:]:
    log = pathlib.Path("build", preset, ".ninja_log")
    if not log.exists():
        continue
    for line in log.read_text().splitlines():
        fields = line.split("\t")
        if len(fields) < 4 or not fields[3].endswith(".o"):
            continue
        output = pathlib.Path("build", preset, fields[3])
        if output.exists() and output.stat().st_mtime >= began:  # built now, not by a run before
            name = re.sub(r"CMakeFiles/|\.dir(?=/)|\.o$", "", fields[3])
            units[f"{preset}/{name}"] = (int(fields[1]) - int(fields[0])) / 1000
tests = {}
log = pathlib.Path("build/test/Testing/Temporary/LastTest.log")
if log.exists():
    for name, seconds in re.findall(r'^"(.+)" time elapsed|^Test time = +([\d.]+) sec', log.read_text(), re.MULTILINE):
        if seconds:
            last = float(seconds)
        else:
            tests[name] = last

for title, costs in (("translation units", units), ("tests", tests)):
    if costs:
        print(f"\nthe dearest of {len(costs)} {title}, in seconds")
        for name, seconds in sorted(costs.items(), key=lambda item: -item[1])[:10]:
            print(f"{seconds:8.1f}  {name}")
verdict = "within" if cpu <= 60 * budget else "OVER"
print(f"\n{cpu / 60:.1f} CPU minutes (user + sys) in {(time.time() - began) / 60:.1f} minutes, {verdict} the budget of {budget:.0f}")
