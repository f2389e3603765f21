"""ctags.py CTAGS: editors find what the headers define. Run from the root of the checkout.

Editors that read no C++ themselves go by ctags, and it loses everything inside of a namespace that it cannot parse
(`namespace a::inline b {` hid 13,800 of 14,487 definitions from Universal Ctags 5.9). Each class, struct, union, enum
and alias that begins a line of a header must be among its tags.
"""

import collections
import pathlib
import re
import subprocess
import sys

DEFINITION = re.compile(r"^(?:class|struct|union|enum class|enum)\s+(?:alignas\([^)]*\)\s+|\[\[[^\]]*\]\]\s+|LLMMEM_\w+\s+)*(?:\w+(?:<.*>)?::)*(\w+)[^;]*$|^using (\w+) =", re.MULTILINE)

headers = sorted(p for p in pathlib.Path("include/llmmem").rglob("*") if p.suffix in {".hpp", ".cuh"})
listing = subprocess.run([sys.argv[1], "-f", "-", "--language-force=C++", *map(str, headers)], capture_output=True, text=True, check=True).stdout
seen = collections.defaultdict(set)
count = 0
for line in listing.splitlines():
    if not line.startswith("!"):
        name, path = line.split("\t")[:2]
        seen[path].add(name)
        count += 1

missing = []
looked_for = 0
for header in headers:
    text = re.sub(r"//[^\n]*", "", header.read_text())
    for match in DEFINITION.finditer(text):
        looked_for += 1
        name = match.group(1) or match.group(2)
        if name not in seen[str(header)]:
            missing.append(f"{header}: ctags does not see {name}")

print(f"{len(headers)} headers, {count} definitions seen, {len(missing)} of {looked_for} types and aliases missing")
print("\n".join(missing))
sys.exit(bool(missing) or looked_for == 0)
