"""What every header keeps to, as far as reading it line by line can tell. Run from the root of the checkout."""

import pathlib
import re
import sys

ROOT = pathlib.Path("include/llmmem")
UMBRELLA = ROOT / "llmmem.hpp"
# One line each, under the name that users look for. The umbrella includes what is behind them.
DOORS = {"paged_allocator", "tiered_buffer", "prefetch_schedule", "async_checkpointer", "redundant_replica", "sharded_state"}
FORBIDDEN = {"iostream", "functional", "regex"}
# Costly to include, or not for a memory library's core: only where the work is about files or threads.
RESTRICTED = {"filesystem": ("transfer/", "comm/", "checkpoint/"), "thread": ("transfer/", "comm/", "checkpoint/")}

# Macros of others that must be defined before their header is included.
CONFIGURES = {"XXH_INLINE_ALL", "ZSTD_STATIC_LINKING_ONLY"}

findings = []


def report(path, number, text):
    findings.append(f"{path}:{number}: {text}")


def without_comments(text):
    """The text with comments and string literals blanked, line numbers kept."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m.group()) if m.group()[0] == "/" else '""', text)


def mutable_statics(code):
    """Yields line and text of each variable that lives as long as the program and can change. `code` has no comments."""
    code = re.sub(r"(?m)^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", lambda m: re.sub(r"[^\n]", " ", m.group()), code)
    for statement in re.finditer(r"[^;{}]+[;{]", code):
        text = re.sub(r"^(?:\s*(?:public|private|protected)\s*:)*\s*", "", statement.group())
        if re.search(r"\b(constexpr|constinit const|using|typedef|namespace|template|operator)\b", text):
            continue
        start = re.match(r"(?:(?:static|inline|thread_local|extern)\s+)+(?!\")(.*)[;{]$", text, re.DOTALL)
        if not start:
            continue
        declarator = re.split(r"=", start.group(1), maxsplit=1)[0].strip()
        constant = re.match(r"const\b", declarator) and not re.search(r"\*\s*\w+$", declarator)
        if "(" not in declarator and not constant:
            line = code.count("\n", 0, statement.end() - len(text.lstrip())) + 1
            yield line, " ".join(text.split())


def lone_words(raw):
    """Yields line and text of each comment line that clang-format left with one word, in the middle of a sentence or of
    an example's code."""
    lines = raw.splitlines()
    for before, (at, line), after in zip(lines, enumerate(lines[1:], 2), lines[2:]):
        word = re.match(r"\s*/// *([a-z]\w*,?)$", line)
        if word and len(before) > 92 and re.match(r"\s*///", before) and re.match(r"\s*/// +\S", after):
            yield at, word[1]


def array_lengths(code):
    """Yields line and name of each constant of a function that is the length of an array and not static. Behind one, nvcc
    13.0 cannot print the same array type in other functions, the user's among them: "template argument 2 is invalid"."""
    lines = code.splitlines()
    for at, line in enumerate(lines):
        constant = re.match(r"( +)constexpr (?:std::size_t|std::uint64_t|auto) (\w+) ?[={]", line)
        if not constant:
            continue
        for after in lines[at + 1 :]:
            if after.strip() and len(after) - len(after.lstrip()) < len(constant[1]):
                break
            if re.search(rf"\barray<[^;]*, {constant[2]}>", after):
                yield at + 1, constant[2]
                break


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

    for number, text in lone_words(raw):
        report(path, number, f"a comment line with the one word '{text}': wrap the lines before it by hand")

    code = without_comments(raw)
    for number, text in array_lengths(code):
        report(path, number, f"{text} is an array's length: make it static, or nvcc fails in functions that follow")
    for number, text in mutable_statics(code):
        report(path, number, f"mutable static state: {text}")
    for number, line in enumerate(code.splitlines(), 1):
        if macro := re.match(r"\s*#\s*(?:define|undef)\s+(\w+)", line):
            if not macro.group(1).startswith("LLMMEM_") and macro.group(1) not in CONFIGURES:
                report(path, number, f"macro {macro.group(1)} must be named LLMMEM_...")
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

    public = path.suffix == ".hpp" and "detail" not in path.parts and not inside.startswith(("testing/", "kernels/", "instantiate/"))
    if path.parent == ROOT and path.stem in DOORS:
        behind = re.findall(r"^#include <llmmem/(\w+)/" + path.stem + r"\.hpp>$", raw, re.MULTILINE)
        if len(behind) != 1 or raw.count("#include") != 1:
            report(path, 1, "a door includes its room's header and nothing else")
    elif public and path != UMBRELLA:
        if f"#include <{name}>" not in umbrella and not re.search(rf"^//+ +<{re.escape(name)}> needs llmmem::", umbrella, re.MULTILINE):
            report(UMBRELLA, 1, f"must include <{name}>, or say `// <{name}> needs llmmem::<target>`")

print(f"{len(headers)} headers, {len(findings)} findings")
print("\n".join(findings))
sys.exit(bool(findings))
