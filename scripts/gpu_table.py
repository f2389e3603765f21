"""gpu_table.py commands < JSON of ctest: each test as its name, a tab, and its command quoted for a shell.
gpu_table.py write FOLDER: writes table.md and results.json from the results of scripts/gpu there.

The exit status of `write` is that of scripts/gpu: 1 when something failed, 3 when nothing failed and something was cut.
"""

import json
import pathlib
import shlex
import sys


def commands():
    for test in json.load(sys.stdin)["tests"]:
        # A test that reports by its output that it cannot run has no program.
        only_says = any(each["name"] == "SKIP_REGULAR_EXPRESSION" for each in test.get("properties", []))
        if test.get("command") and not only_says:
            print(f"{test['name']}\t{shlex.join(test['command'])}")


def lines_of(path):
    return path.read_text().splitlines() if path.exists() else []


def rows_of(path):
    """What a benchmark wrote until it ended: its ceilings by name, and its rows."""
    ceilings = {}
    rows = []
    for line in lines_of(path):
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            continue  # one that was being written when it was cut
        if "what" in found:
            rows.append(found)
        else:
            ceilings[found["ceiling"]] = found["gb_per_s"]
    return ceilings, rows


def read(folder):
    machine = dict(line.split("\t", 1) for line in lines_of(folder / "machine.tsv"))
    ran = []
    for line in lines_of(folder / "ledger.tsv"):
        phase, name, status, seconds, why = line.split("\t", 4)
        ran.append({"phase": phase, "name": name, "status": status, "seconds": int(seconds), "why": why})
    figures = []
    ceilings = {"copy": 0, "read": 0}
    for each in ran:
        if each["phase"] not in ("benchmarks", "twins") or each["status"] == "skipped":
            continue
        its, rows = rows_of(folder / "logs" / (each["name"].replace("/", "_") + ".rows"))
        if not rows and each["status"] == "passed":
            each.update(status="failed", why="it wrote no rows")
        for name, rate in its.items():
            ceilings[name] = max(ceilings[name], rate)
        figures += [{**row, "from": each["name"]} for row in rows]
    # The same ceilings for all rows: the quickest copy within the device, and the quickest reading, that any program saw.
    for row in figures:
        row["gb_per_s"] = round(row["bytes"] / row["us"] / 1000, 1) if row["bytes"] and row["us"] else None
        ceiling = ceilings.get(row["share_of"])
        row["share"] = round(row["gb_per_s"] / ceiling, 3) if ceiling and row["gb_per_s"] else None
        if row["share"] is None:
            row["share_of"] = None
    return {"machine": machine, "ceilings_gb_per_s": ceilings, "ran": ran, "rows": figures}


def table(results):
    text = ["# What scripts/gpu found", ""]
    text += [f"- {key}: {value}" for key, value in results["machine"].items()]
    ceilings = results["ceilings_gb_per_s"]
    text += [f"- ceiling `copy`: {ceilings['copy']} GB/s, read and written, of a copy within the device",
             f"- ceiling `read`: {ceilings['read']} GB/s of a sum over what is there, for rows that only read", ""]
    text += ["| phase | what | how it ended | s |", "|---|---|---|---|"]
    for each in results["ran"]:
        why = f": {each['why']}" if each["why"] else ""
        text.append(f"| {each['phase']} | {each['name']} | {each['status']}{why} | {each['seconds']} |")
    text += ["", "| what | shape | bytes | us | least to most | GB/s | share of |", "|---|---|---|---|---|---|---|"]
    for row in results["rows"]:
        rate = "" if row["gb_per_s"] is None else row["gb_per_s"]
        share = "" if row["share"] is None else f"{row['share']:.3f} {row['share_of']}"
        text.append(f"| {row['what']} | {row['shape']} | {row['bytes']:.0f} | {row['us']:.2f} "
                    f"| {row['least_us']:.2f} to {row['most_us']:.2f} | {rate} | {share} |")
    return "\n".join(text) + "\n"


def write(folder):
    results = read(folder)
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / "table.md").write_text(table(results))
    print(f"{folder}/table.md and results.json: {len(results['rows'])} figures")
    status = 0
    for how, code in (("cut", 3), ("failed", 1)):
        for each in results["ran"]:
            if each["status"] == how:
                status = code
                print(f"{how}: {each['phase']} {each['name']}: {each['why']}")
    return status


def main(arguments):
    if arguments == ["commands"]:
        commands()
        return 0
    if len(arguments) == 2 and arguments[0] == "write":
        return write(pathlib.Path(arguments[1]))
    sys.exit(__doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
