"""doc_links.py: every link between pages leads to a file and to a heading that exist, and no page of docs/ is too long.

Run from the root. Reads README.md, CONTRIBUTING.md, CHANGELOG.md, docs/ and the examples' READMEs; addresses on the web
are not opened. Every page of docs/ must be reachable from docs/index.md.
"""

import pathlib
import re
import sys

MOST_LINES = 300
ROOT = pathlib.Path.cwd()

pages = [pathlib.Path(each) for each in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
pages += sorted(pathlib.Path("docs").rglob("*.md")) + sorted(pathlib.Path("examples").rglob("README.md"))
findings = []


def without_code(text):
    text = re.sub(r"^```.*?^```", lambda m: re.sub(r"[^\n]", " ", m.group()), text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^    .*$", "", text, flags=re.MULTILINE)


def anchors_of(text):
    """The names that a heading of the page gets, as GitHub makes them."""
    names = {}
    for heading in re.findall(r"^#+ +(.*?)\s*$", without_code(text), re.MULTILINE):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        name = re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")
        count = names.get(name, 0)
        names[name] = count + 1
        yield f"{name}-{count}" if count else name


texts = {page: page.read_text() for page in pages}
anchors = {page.resolve(): set(anchors_of(text)) for page, text in texts.items()}
leads_to = {page.resolve(): set() for page in pages}
links = 0
for page, text in texts.items():
    for match in re.finditer(r"\]\(([^)\s]+)\)", without_code(text)):
        target = match[1]
        if re.match(r"[a-z]+:", target):
            continue
        links += 1
        line = text.count("\n", 0, match.start()) + 1
        name, _, anchor = target.partition("#")
        to = (page.parent / name).resolve() if name else page.resolve()
        if not to.exists():
            findings.append(f"{page}:{line}: {target}: there is no such file")
        elif anchor and anchor not in anchors.get(to, set()):
            findings.append(f"{page}:{line}: {target}: {to.relative_to(ROOT)} has no such heading")
        elif to in leads_to:
            leads_to[page.resolve()].add(to)
    length = text.count("\n")
    if page.parts[0] == "docs" and length > MOST_LINES:
        findings.append(f"{page}: {length} lines, at most {MOST_LINES}: split it by subject")

reached, waiting = set(), [pathlib.Path("docs/index.md").resolve()]
while waiting:
    page = waiting.pop()
    if page not in reached:
        reached.add(page)
        waiting += leads_to[page]
findings += [f"{page}: no link leads to it from docs/index.md"
             for page in pages if page.parts[0] == "docs" and page.resolve() not in reached]

print(f"{len(pages)} pages, {links} links, {len(findings)} findings")
print("\n".join(findings))
sys.exit(bool(findings))
