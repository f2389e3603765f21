"""What every header keeps to, as far as reading it line by line can tell. Run from the root of the checkout."""

import pathlib
import re
import sys

ROOT = pathlib.Path("include/llmmem")
UMBRELLA = ROOT / "llmmem.hpp"
FORBIDDEN = {"iostream", "functional", "regex"}
# Costly to include, or not for a memory library's core: only where the work is about files or threads.
RESTRICTED = {"filesystem": ("transfer/", "comm/", "async_checkpointer"), "thread": ("transfer/", "comm/", "async_checkpointer")}

findings = []


def report(path, number, text):
    findings.append(f"{path}:{number}: {text}")


def without_comments(text):
    """The text with comments and string literals blanked, line numbers kept."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m.group()) if m.group()[0] == "/" else '""', text)


def mutable_static(line):
    """Is this line the definition of a variable that lives as long as the program and can change?"""
    if re.search(r"\b(constexpr|constinit const|static_assert|using|typedef|namespace|template|operator)\b", line):
        return False
    start = re.match(r"\s*(?:static\s+thread_local|thread_local\s+static|static\s+inline|inline\s+static|static|thread_local|inline|extern)\s+(.*)", line)
    if not start:
        return False
    declarator = re.split(r"[={;]", start.group(1), maxsplit=1)[0]
    if "(" in declarator or not re.search(r"[={;]", start.group(1)):
        return False  # a function, or the line goes on
    return not re.match(r"const\b(?!.*\*\s*\w+\s*$)", declarator)


headers = sorted(p for p in ROOT.rglob("*") if p.suffix in {".hpp", ".cuh"})
umbrella = UMBRELLA.read_text()

for path in headers:
    raw = path.read_text()
    name = path.relative_to(ROOT.parent).as_posix()
    inside = path.relative_to(ROOT).as_posix()

    if not raw.startswith("/// @file\n"):
        report(path, 1, "must begin with `/// @file` and a line that says what is in it")
    if raw.count("#pragma once\n") != 1:
        report(path, 1, "must say `#pragma once`, once")

    for number, line in enumerate(without_comments(raw).splitlines(), 1):
        if macro := re.match(r"\s*#\s*(?:define|undef)\s+(\w+)", line):
            if not macro.group(1).startswith("LLMMEM_"):
                report(path, number, f"macro {macro.group(1)} must be named LLMMEM_...")
        elif mutable_static(line):
            report(path, number, f"mutable static state: {line.strip()}")
        if re.search(r"\busing\s+namespace\b", line):
            report(path, number, "using namespace in a header")

    for number, line in enumerate(raw.splitlines(), 1):
        if not (include := re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)):
            continue
        bracket, what = include.groups()
        if bracket == '"':
            report(path, number, f'include <{what}> by its full path, not in quotes')
        if what in FORBIDDEN:
            report(path, number, f"<{what}> may not be included by a header")
        if what in RESTRICTED and not inside.startswith((*RESTRICTED[what], "testing/")):
            report(path, number, f"<{what}> may only be included under {', '.join(RESTRICTED[what])}")
        if what.startswith("llmmem/testing/") and not inside.startswith("testing/"):
            report(path, number, f"<{what}> is for tests and users, no part may include it")

    public = path.suffix == ".hpp" and "detail" not in path.parts and not inside.startswith(("testing/", "kernels/"))
    if public and path != UMBRELLA:
        if f"#include <{name}>" not in umbrella and not re.search(rf"^//+ +<{re.escape(name)}> needs llmmem::", umbrella, re.MULTILINE):
            report(UMBRELLA, 1, f"must include <{name}>, or say `// <{name}> needs llmmem::<target>`")

print(f"{len(headers)} headers, {len(findings)} findings")
print("\n".join(findings))
sys.exit(bool(findings))
