"""alone.py INCLUDE HEADER...: the units of `headers_alone`, so that each header of HEADER... is shown to compile with
nothing before it. Prints them, a line each: the headers that a unit includes, in order. INCLUDE is the folder that the
names are relative to.

A header that another one includes needs no unit of its own if, at its first inclusion there, everything before it is
something that it includes itself before its own text: then its text sees exactly what it sees alone. Headers are included
in the order of their names here, those of this library first, so that this holds for about half of them. Others share a
unit: a header before one that includes it is alone there, and the later one sees nothing that it does not include.
"""

import functools
import pathlib
import re
import sys

root = pathlib.Path(sys.argv[1])
names = sys.argv[2:]
DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*[<\"]([^>\"]+)[>\"]")
texts = {}


@functools.cache
def included(name):
    """What a header includes, in order, each with whether text of the header itself is before it. None: not ours."""
    file = root / name
    if not file.exists():
        return None
    found, is_behind_text = [], False
    texts[name] = re.sub(r"/\*.*?\*/|//[^\n]*", "", file.read_text(), flags=re.DOTALL)
    for line in texts[name].splitlines():
        if match := DIRECTIVE.match(line):
            found.append((match[1], is_behind_text))
        elif line.strip() and line.strip() != "#pragma once":
            is_behind_text = True
    return found


@functools.cache
def closure(name):
    """What including a header includes, itself among it."""
    found, left = set(), [name]
    while left:
        each = left.pop()
        if each not in found:
            found.add(each)
            left += [other for other, _ in included(each) or ()]
    return frozenset(found)


@functools.cache
def before_text(name):
    """What is before a header's own text if it is alone."""
    found = {name}
    for other, is_behind_text in included(name) or ():
        if not is_behind_text:
            found |= closure(other)
    return frozenset(found)


def shown_by(unit):
    """The headers that a unit with nothing but those of `unit`, in order, shows to compile alone."""
    before, begun, shown = set(), set(), set()

    def enter(name):
        if name in begun:
            return
        begun.add(name)
        if included(name) is not None:
            if before <= before_text(name):
                shown.add(name)
            for other, is_behind_text in included(name):
                if is_behind_text:
                    before.add(name)
                enter(other)
        before.add(name)

    for name in unit:
        enter(name)
    return shown


def cost(name):
    """About the time that a unit takes: the lines of ours, and the standard headers."""
    return 1 + sum(0.02 * texts[each].count("\n") if each in texts else 4 for each in closure(name))


sys.setrecursionlimit(10_000)
costs = {name: cost(name) for name in names}
units, shown = [], []
# The most expensive first: each one begins a unit, or goes to the front of the one where it shows most.
for name in sorted(names, key=lambda name: (-costs[name], name)):
    if any(name in each for each in shown):
        continue
    best = None
    for i, unit in enumerate(units):
        if name not in closure(unit[-1]):
            continue
        now = shown_by([name, *unit])
        lost = shown[i] - now
        if name not in now or not all(any(each in shown[j] for j in range(len(units)) if j != i) for each in lost):
            continue
        gain = len(now) - len(shown[i])
        if best is None or gain > best[0]:
            best = gain, i, now
    if best is None:
        units.append([name])
        shown.append(shown_by([name]))
    else:
        _, i, shown[i] = best
        units[i].insert(0, name)
left_out = set(names) - set().union(*shown)
if left_out:
    sys.exit(f"alone.py: no unit shows {sorted(left_out)}")
print("\n".join(" ".join(unit) for unit in sorted(units, key=lambda unit: unit[-1])))
