"""alone.py INCLUDE HEADER...: the headers of HEADER... that `headers_alone` compiles, so that each one is shown to compile
with nothing before it. Prints them, a line each. INCLUDE is the folder that the names are relative to.

A header that another one includes needs no unit of its own if, at its first inclusion there, everything before it is
something that it includes itself: then its own text sees exactly what it sees alone. Headers are included in the order of
their names here, those of this library first, so that this holds for about half of them.
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


def shown_by(top):
    """The headers that a unit with nothing but `top` shows to compile alone."""
    before, begun, shown = set(), set(), set()

    def enter(name):
        if name in begun:
            return
        begun.add(name)
        if included(name) is not None:
            if before <= closure(name):
                shown.add(name)
            for other, is_behind_text in included(name):
                if is_behind_text:
                    before.add(name)
                enter(other)
        before.add(name)

    enter(top)
    return shown


def cost(name):
    """About the time that a unit takes: the lines of ours, and the standard headers."""
    return 1 + sum(0.02 * texts[each].count("\n") if each in texts else 4 for each in closure(name))


sys.setrecursionlimit(10_000)
shown = {name: shown_by(name) for name in names}
costs = {name: cost(name) for name in names}
left, chosen = set(names), []
while left:
    best = max(names, key=lambda name: (sum(costs[each] for each in shown[name] & left) / costs[name], name))
    chosen.append(best)
    left -= shown[best]
# What those chosen later show, too, needs no unit any more.
for name in sorted(chosen, key=lambda name: -costs[name]):
    others = set().union(*(shown[each] for each in chosen if each != name))
    if set(names) <= others:
        chosen.remove(name)
print("\n".join(sorted(chosen)))
