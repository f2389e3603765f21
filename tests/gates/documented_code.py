"""documented_code.py COMPILER [--alone] [PAGE...]: compiles every C++ block with an #include in README.md and docs/, or
in these pages only; warnings are errors. Run from the root of the checkout.

Such a block is a whole file, as a reader would paste it; other blocks are excerpts and are skipped. The blocks of all
pages are one translation unit, each block in a namespace of its own and all includes before them, because parsing the
same headers for each block takes most of the time. That unit would hide a missing include, so the gate also looks up
each name of `std` and `llmmem` that a block uses in the headers that the block itself includes, directly or through
others. A block that is a program, or that instantiates a template of the library, is no part of a namespace and stays
alone, as does a block that defines a macro. Where the unit does not compile, each page is a unit; where a page's unit
does not compile, its blocks are compiled one by one, as --alone does for all pages.
"""

import functools
import pathlib
import re
import subprocess
import sys
import tempfile

FLAGS = ["-std=c++20", "-Wall", "-Wextra", "-Wconversion", "-Wsign-conversion", "-Wshadow", "-Wpedantic",
         "-Wold-style-cast", "-Werror", "-Iinclude", "-fsyntax-only"]
OUTSIDE_NAMESPACES = re.compile(r"^(?:int main\(|template class |#define )", re.MULTILINE)
INCLUDE = re.compile(r"^#include [<\"](.*?)[>\"].*$", re.MULTILINE)

# The standard headers that promise a name. A new name in a block belongs here.
STANDARD = {
    "algorithm": "all_of any_of fill min max ranges::copy ranges::fill ranges::max ranges::sort sort",
    "array": "array",
    "atomic": "atomic",
    "bit": "bit_cast has_single_bit",
    "chrono": "chrono",
    "cstddef": "byte max_align_t nullptr_t ptrdiff_t size_t to_integer",
    "cstdint": "int8_t int16_t int32_t int64_t intptr_t uint8_t uint16_t uint32_t uint64_t uintptr_t",
    "cstdio": "fputs printf puts size_t",
    "cstring": "memcmp memcpy memmove memset size_t strlen",
    "exception": "exception exception_ptr",
    "filesystem": "filesystem",
    "fstream": "ifstream ios::binary ofstream streamsize",
    "functional": "function",
    "ios": "ios::binary streamsize",
    "map": "map",
    "memory": "make_shared make_unique shared_ptr unique_ptr",
    "mutex": "lock_guard mutex unique_lock",
    "numeric": "accumulate iota",
    "optional": "nullopt optional",
    "set": "set",
    "span": "as_bytes as_writable_bytes span",
    "stdexcept": "runtime_error",
    "string": "string to_string",
    "string_view": "string_view",
    "thread": "jthread this_thread thread",
    "tuple": "get tie tuple",
    "type_traits": "is_same_v remove_cvref_t",
    "utility": "as_const exchange get move pair",
    "vector": "vector",
}
PROMISED_BY = {}
for header, names in STANDARD.items():
    for each in names.split():
        PROMISED_BY.setdefault(each, set()).add(header)


def without_comments(text):
    return re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)


@functools.cache
def header_text(path):
    """A header of the library without its comments; None for any other header."""
    file = pathlib.Path("include", path)
    return without_comments(file.read_text()) if file.exists() else None


@functools.cache
def reached(path):
    """What including a header includes, itself among it."""
    found, open_paths = set(), [path]
    while open_paths:
        each = open_paths.pop()
        if each in found:
            continue
        found.add(each)
        if (text := header_text(each)) is not None:
            open_paths += INCLUDE.findall(text)
    return found


@functools.cache
def words_of(path):
    return frozenset(re.findall(r"\w+", header_text(path) or ""))


def lacking(block):
    """Yields each name that a block uses and that no header included by the block declares."""
    code = without_comments(block)
    included = set().union(*(reached(path) for path in INCLUDE.findall(code)))
    for name in sorted(set(re.findall(r"\bstd::((?:ranges::|ios::)?\w+)", code))):
        if name not in PROMISED_BY:
            yield f"std::{name} is not in the gate's table of standard headers: add it there"
        elif not PROMISED_BY[name] & included:
            yield f"std::{name} needs #include <{'> or <'.join(sorted(PROMISED_BY[name]))}>"
    for name in sorted(set(re.findall(r"\bllmmem::(?:\w+::)*(\w+)", code))):
        if not re.search(rf"\bnamespace {name}\b", code) and not any(name in words_of(path) for path in included):
            yield f"llmmem::{name} is declared in no header that the block includes"


def compile_text(compiler, folder, text):
    file = pathlib.Path(folder, "block.hpp")
    file.write_text(text)
    command = [compiler, *FLAGS, "-include", str(file), "-x", "c++", "/dev/null"]
    return subprocess.run(command, capture_output=True, text=True)


def unit_of(blocks):
    includes = dict.fromkeys(match[0] for _, _, block in blocks for match in INCLUDE.finditer(block))
    parts = ["\n".join(includes)]
    for number, (page, line, block) in enumerate(blocks):
        parts.append(f'namespace block_{number} {{\n#line {line} "{page}"\n{INCLUDE.sub("", block)}\n}}')
    return "\n".join(parts) + "\n"


def compiles_together(compiler, folder, blocks):
    return len(blocks) > 1 and compile_text(compiler, folder, unit_of(blocks)).returncode == 0


arguments = [each for each in sys.argv[1:] if each != "--alone"]
if not arguments or arguments[0].startswith("-"):
    sys.exit(__doc__)
compiler = arguments[0]
is_alone = "--alone" in sys.argv
pages = [pathlib.Path(each) for each in arguments[1:]] or [pathlib.Path("README.md"), *sorted(pathlib.Path("docs").rglob("*.md"))]
blocks = []
for page in pages:
    text = page.read_text()
    for match in re.finditer(r"^```cpp\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if "#include" in match[1]:
            blocks.append((page, text.count("\n", 0, match.start()) + 2, match[1]))
failed = 0
for page, line, block in blocks:
    for finding in lacking(block):
        failed += 1
        print(f"{page}:{line}: {finding}")
together = [] if is_alone else [each for each in blocks if not OUTSIDE_NAMESPACES.search(each[2])]
alone = [each for each in blocks if each not in together]
with tempfile.TemporaryDirectory() as folder:
    if together and not compiles_together(compiler, folder, together):
        for page in pages:
            of_page = [each for each in together if each[0] == page]
            if not compiles_together(compiler, folder, of_page):
                alone += of_page
    for page, line, block in alone:
        result = compile_text(compiler, folder, f'#line {line} "{page}"\n{block}')
        if result.returncode != 0:
            failed += 1
            print(f"{page}:{line}: does not compile\n{result.stderr}")

print(f"{len(blocks)} blocks compiled, {failed} failed")
sys.exit(1 if failed or not blocks else 0)
