"""layers.py [--write-picture]: which room of the house may include which. Run from the root of the checkout.

The table of docs/internals.md is the rule. A room is a folder of include/llmmem; `ground` is detail/ and the headers at
the root that hold no primitive. Fails on

- an include that the table does not allow, and an arrow of the table that no include needs any more;
- a room that includes one below it in the table: so there are no cycles, and no two rooms that include each other;
- an include of another room's detail/, which is private (detail/ at the root is the ground, and open to all);
- a forwarding header of deprecated/ whose target is not there;
- a picture docs/rooms.svg that is not what the table says: `--write-picture` draws it.
"""

import collections
import html
import pathlib
import re
import sys

ROOT = pathlib.Path("include/llmmem")
PAGE = pathlib.Path("docs/internals.md")
PICTURE = pathlib.Path("docs/rooms.svg")
GROUND = {"config", "error", "errors", "failure", "metadata", "result", "version"}
ALL = {"llmmem"}  # includes every room, and no room includes it

findings = []


def room_of(inside):
    parts = inside.split("/")
    if len(parts) > 1:
        return "ground" if parts[0] == "detail" else parts[0]
    stem = inside.rsplit(".", 1)[0]
    return "ground" if stem in GROUND else "all" if stem in ALL else "door"


def read_table():
    """{room: (what it holds, [rooms it may include])}, from the ground up."""
    rows = re.findall(r"^\| `(\w+)/?` \| (.+?) \| (.*?) \|$", PAGE.read_text(), re.MULTILINE)
    return {room: (holds, re.findall(r"`(\w+)`", allowed)) for room, holds, allowed in rows}


def read_includes():
    """{(room, other room): ["header:line includes header"...]}"""
    arrows = collections.defaultdict(list)
    for path in sorted(p for p in ROOT.rglob("*") if p.suffix in {".hpp", ".cuh"}):
        inside = path.relative_to(ROOT).as_posix()
        room = room_of(inside)
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if not (match := re.match(r"\s*#\s*include\s*<llmmem/([^>]+)>", line)):
                continue
            included = match.group(1)
            other = room_of(included)
            what = f"{path}:{number}: includes <llmmem/{included}>"
            if other in {"door", "all"}:
                if room not in {"door", "all"}:
                    findings.append(f"{what}, which is for users: include the room's header")
            elif room not in {other, "all", "door"}:
                arrows[room, other].append(what)
                if other != "ground" and included.split("/")[1] == "detail":
                    findings.append(f"{what}, which is private to {other}/")
    return arrows


def picture(table):
    """One row for each level: a room stands right above the highest room that it includes."""
    level = {}
    for room, (_, allowed) in table.items():
        level[room] = 1 + max((level.get(each, -1) for each in allowed), default=-1)
    rows = collections.defaultdict(list)
    for room in table:
        rows[level[room]].append(room)
    width, height, across, down = 112, 34, 150, 84
    total = across * max(map(len, rows.values())) + 20
    tall = down * len(rows) + 10
    place = {}
    for at, rooms in rows.items():
        for i, room in enumerate(rooms):
            place[room] = (total / 2 + (i - (len(rooms) - 1) / 2) * across, tall - down * at - down / 2)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {tall}" font-family="sans-serif" font-size="14">',
        "<title>Which room of llmmem includes which</title>",
        f'<rect width="{total}" height="{tall}" fill="#fff"/>',
    ]
    for room, (_, allowed) in table.items():
        for other in allowed:
            if other == "ground" and level[room] > 1:
                continue  # nearly all of them do: not drawn
            (x1, y1), (x2, y2) = place[room], place[other]
            out.append(
                f'<path d="M{x1:.0f} {y1 + height / 2:.0f}C{x1:.0f} {y1 + down / 2:.0f} {x2:.0f} {y2 - down / 2:.0f} {x2:.0f} {y2 - height / 2:.0f}" '
                f'fill="none" stroke="#789" stroke-opacity="0.55"><title>{room} includes {other}</title></path>'
            )
    for room, (holds, _) in table.items():
        x, y = place[room]
        out.append(
            f'<g><title>{html.escape(holds)}</title><rect x="{x - width / 2:.0f}" y="{y - height / 2:.0f}" width="{width}" height="{height}" '
            f'rx="6" fill="#eef4fb" stroke="#345"/><text x="{x:.0f}" y="{y + 5:.0f}" text-anchor="middle">{room}</text></g>'
        )
    return "\n".join([*out, "</svg>", ""])


table = read_table()
arrows = read_includes()
order = list(table)
for (room, other), where in sorted(arrows.items()):
    if room not in table:
        findings.append(f"{where[0]}: room {room} is not in the table of {PAGE}")
    elif other not in table[room][1]:
        findings.extend(f"{each}: {room} may not include {other}, says {PAGE}" for each in where)
for room, (_, allowed) in table.items():
    for other in allowed:
        if other not in table or order.index(other) >= order.index(room):
            findings.append(f"{PAGE}: {room} may include {other}, which is not above it in the table")
        if not arrows.get((room, other)):
            findings.append(f"{PAGE}: {room} may include {other}, but no header does: take it out of the row")

for path in sorted(pathlib.Path("deprecated").rglob("*.hpp")):
    target = re.findall(r"^#include <(.+)>$", path.read_text(), re.MULTILINE)
    if len(target) != 1 or not (ROOT.parent / target[0]).exists():
        findings.append(f"{path}: must include one header that there is")
    elif (ROOT.parent / path.relative_to("deprecated")).exists():
        findings.append(f"{path}: a header of that path stands in include/ again")

drawn = picture(table)
if sys.argv[1:] == ["--write-picture"]:
    PICTURE.write_text(drawn)
elif not PICTURE.exists() or PICTURE.read_text() != drawn:
    findings.append(f"{PICTURE}: does not show the table; run tests/gates/layers.py --write-picture")

print(f"{len(table)} rooms, {len(arrows)} arrows, {len(findings)} findings")
print("\n".join(findings))
sys.exit(bool(findings) or not arrows)
