"""documented_code.py COMPILER [PAGE...]: compiles every C++ block with an #include in README.md and docs/, or in these
pages alone; warnings are errors.

Such a block is a whole file, as a reader would paste it. Others are excerpts, and not looked at. Run from the root.
"""

import pathlib
import re
import subprocess
import sys
import tempfile

FLAGS = ["-std=c++20", "-Wall", "-Wextra", "-Wconversion", "-Wsign-conversion", "-Wshadow", "-Wpedantic",
         "-Wold-style-cast", "-Werror", "-Iinclude", "-fsyntax-only"]

if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
    sys.exit(__doc__)
compiler = sys.argv[1]
pages = [pathlib.Path(each) for each in sys.argv[2:]]
if not pages:
    pages = [pathlib.Path("README.md"), *sorted(pathlib.Path("docs").rglob("*.md"))]
compiled = failed = 0
with tempfile.TemporaryDirectory() as folder:
    block_file = pathlib.Path(folder, "block.hpp")
    for page in pages:
        text = page.read_text()
        for match in re.finditer(r"^```cpp\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            if "#include" not in match[1]:
                continue
            line = text.count("\n", 0, match.start()) + 2
            block_file.write_text(f'#line {line} "{page}"\n{match[1]}')
            compiled += 1
            result = subprocess.run(
                [compiler, *FLAGS, "-include", block_file, "-x", "c++", "/dev/null"], capture_output=True, text=True
            )
            if result.returncode != 0:
                failed += 1
                print(f"{page}:{line}: does not compile\n{result.stderr}")

print(f"{compiled} blocks compiled, {failed} failed")
sys.exit(1 if failed or not compiled else 0)
