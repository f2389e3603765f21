"""doxygen.py DOXYGEN WORK: the public headers' documentation is whole and right. Run from the root of the checkout.

Every type, function and constant of a namespace has a comment, or stands without a blank line below one that has: a
group shares it. Members of a class and macros are left to their author's judgement; an old name says itself what it is.
"""

import pathlib
import re
import shutil
import subprocess
import sys

doxygen, work = sys.argv[1], pathlib.Path(sys.argv[2])
shutil.rmtree(work, ignore_errors=True)
work.mkdir(parents=True)
log = work / "warnings"
settings = pathlib.Path("docs/Doxyfile").read_text() + f"OUTPUT_DIRECTORY = {work}\nWARN_LOGFILE = {log}\n"
subprocess.run([doxygen, "-"], input=settings, text=True, check=True)


def is_described(path, number):
    lines = pathlib.Path(path).read_text().splitlines()
    if "[[deprecated(" in lines[number - 1]:
        return True
    for line in reversed(lines[: number - 1]):
        if not line.strip():
            return False
        if line.lstrip().startswith("///"):
            return True
    return False


findings = []
for warning in log.read_text().splitlines():
    if re.search(r"Member .* (of (class|struct|union) .*|\(macro definition\) .*)is not documented", warning):
        continue
    undocumented = re.match(r"(.+?):(\d+): .* is not documented\.$", warning)
    if undocumented and is_described(undocumented.group(1), int(undocumented.group(2))):
        continue
    findings.append(warning)
shutil.rmtree(work)
print("\n".join(findings) or "no findings")
sys.exit(bool(findings))
