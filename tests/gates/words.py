"""words.py [--update [--raise]]: holds the library's English to CONTRIBUTING.md, "How we write". Run from the root.

Counts odd words in the comments and error texts of include/, in the pages (docs/, README.md, CONTRIBUTING.md,
CHANGELOG.md, the examples' READMEs) and in the subjects of later commits, and compares them with words.table. A count
that rose fails with each place. A count that fell fails too: `--update` writes the lower one, for the same commit.
`--update --raise` also writes counts that rose, and begins the subjects at HEAD: for a merge, and nothing else.

Not read: code, `code in backquotes`, and the first column of a table that is headed "before". A line that quotes an odd
word, or needs it, says so on itself or on the line above: words-allow(NAME): REASON.
"""

import bisect
import collections
import pathlib
import re
import subprocess
import sys

TABLE = pathlib.Path("tests/gates/words.table")

# Name, pattern (over lower case; a space is any white space), what to write.
WORDS = [
    ("who", r"(?<!engineers )(?<!people )(?<!readers )(?<!reader )(?<!owners )(?<!users )(?<!authors )(?<!anyone )\bwho\b",
     "name the actor: the caller, the owner, the writer thread; 'which rank' in a question"),
    ("whom", r"\bwhom\b", "name the actor"),
    ("whoever", r"\bwhoever\b", "name the actor: 'a caller that', 'the rank that'"),
    ("whatever", r"\bwhatever\b", "any; regardless of"),
    ("somebody", r"\b(?:somebody|anybody|everybody)\b", "another thread, a caller, another process, all ranks"),
    ("nobody", r"\bnobody(?:'s)?\b", "no caller, no sequence, no rank; 'unused'"),
    ("he", r"\b(?:he|him|his|himself)\b(?! et al| and zhai)", "it; or name the actor"),
    ("anew", r"\banew\b", "again; from the start"),
    ("beside", r"\bbesides?\b", "next to; in addition to; compared with; during"),
    ("told", r"\b(?:is|are|was|were|be|been|being|not) told\b", "receives, learns, is given, is reported"),
    ("tells", r"\btell(?:s|ing)?\b(?! \w+(?: and \w+)? apart)", "says, reports, returns, shows"),
    ("be-had", r"\b(?:be|is|was) had\b", "is available"),
    ("wants-of", r"\bwants? of\b", "needs from"),
    ("the-very", r"\bthe very\b", "exactly the; the same"),
    ("no-more-than", r"\bno more than\b", "at most"),
    ("in-a-row", r"\bin a row\b", "consecutive"),
    ("any-more", r"\bany more\b", "no longer"),
    ("believe", r"\bbeliev(?:e|es|ed|ing)\b", "trust, accept; 'untrusted input'"),
    ("sees-to-it", r"\bsees? to it\b", "ensures"),
    ("by-turns", r"\bby turns\b", "alternately"),
    ("becomes-of", r"\b(?:became|becomes?|becoming) of\b", "the outcome of; what happens to"),
    ("likewise", r"\blikewise\b", "also; in the same way"),
    ("stay-whole", r"\b(?:is|are|be|was|were|there|stays?|comes?|back) whole\b(?! \w+s\b)", "complete, intact"),
    ("give-back", r"\bg(?:ive|ives|ave|iven|iving) back\b|\bgiven? \w+ back\b", "return, free"),
    ("for-good", r"\bfor good\b", "permanently"),
    ("wished", r"\bwish(?:ed|es)\b", "optionally; if enabled"),
    ("bears", r"\bbears?\b", "tolerates; carries"),
    ("dear", r"\bdear(?:er|est)?\b", "expensive, costly"),
    ("mend", r"\bmend(?:s|ed|ing)?\b", "fix, repair, resolve"),
    ("but-for", r"\bbut for\b", "except; except for"),
    ("but-where", r", but where\b", "except where"),
    ("stands", r"\bst(?:ands?|ood|anding) (?:in\b(?! the way)|(?:on|at|there|here|by|beneath|above|behind|beside|still)\b)",
     "is in, is listed in, is built on"),
    ("noun-more", r"\b(?:tokens?|bytes?|blocks?|chunks?|calls?|times|lines?|ranks?|levels?|steps?|files?|pages?) more\b",
     "more tokens, one more call"),
    ("is-to-be", r"\b(?:is|are|was|were) to be\b", "must be, should be, will be"),
    ("till", r"\btill\b", "until"),
    ("goes-on", r"\b(?:goes|go|went) on\b(?! to)", "continues"),
    ("in-vain", r"\bin vain\b", "without effect"),
    ("heard", r"\b(?:not|nothing|is|are|be) heard\b|\bheard (?:of|from|any)\b", "unreachable; received"),
    ("lies", r"\b(?:lies|lie|lay)\b", "is, are, is stored"),
    ("reckon", r"\breckon(?:s|ed|ing)?\b", "compute; count on; assume"),
    ("gone", r"\b(?:is|are|was|were|be) gone\b", "no longer exists; was evicted; is dead"),
    ("at-last", r"\b(?:at last|by and by)\b", "finally; eventually"),
    ("comes-to-nothing", r"\bcomes? to nothing\b", "has no effect; fails"),
    ("without-it-being", r"\bwithout (?:its|it) (?:being|showing)\b", "unnoticed"),
    ("had-been", r"\bhad (?:it|they|there|one) (?:been|come|gone)\b", "if it had been"),
    ("as-ever", r"\bas ever\b", "as before; as usual"),
    ("noun-behind", r"\b(?:tokens?|blocks?|bytes|rows?|chunks?|operations?|vectors?|everything|writes?) behind\b"
                    r"(?![;.]| (?:a|nothing|another|its fence|that fence)\b)", "after; that follow"),
    ("room-for", r"\b(?:has|have|had|no|more|makes?|made|making|takes?|enough|finds?) room\b",
     "space, memory; a room is a folder of include/llmmem"),
    ("of-use", r"\b(?:is|are|be) of use\b", "useful"),
]
# Plain errors in a subject, where nothing can be changed later.
SUBJECTS = {"who", "whom", "whoever", "somebody", "nobody", "anew", "beside", "be-had", "the-very", "any-more", "sees-to-it",
            "by-turns", "till", "reckon"}

PATTERNS = [(name, re.compile(pattern.replace(" ", r"\s+") if "(?<!" not in pattern else pattern), better)
            for name, pattern, better in WORDS]
BETTER = {name: better for name, _, better in WORDS}
# What a text contains wherever a pattern may match it: cheap to look for.
KEYS = {"who": "who", "whom": "whom", "whoever": "whoever", "whatever": "whatever", "somebody": "body", "nobody": "nobody",
        "anew": "anew", "beside": "beside", "told": "told", "tells": "tell", "be-had": " had", "wants-of": "want",
        "the-very": "very", "no-more-than": "than", "in-a-row": " row", "any-more": "any", "believe": "believ",
        "sees-to-it": "see", "by-turns": "turns", "becomes-of": " of", "likewise": "likewise", "stay-whole": "whole",
        "give-back": "back", "for-good": "good", "wished": "wish", "bears": "bear", "dear": "dear", "mend": "mend",
        "but-for": "but", "but-where": "but", "noun-more": " more", "till": "till", "in-vain": "vain", "heard": "heard",
        "reckon": "reckon", "gone": "gone", "at-last": "at", "comes-to-nothing": "nothing", "had-been": "had ", "as-ever": "ever",
        "noun-behind": "behind", "room-for": "room", "of-use": "of use"}
ALLOW = re.compile(r"words-allow\(([a-z-]+)\)(:?)[ ]*([^\n]*)")


def blank(text):
    return re.sub(r"[^\n]", " ", text)


SPOKEN = re.compile(r'//[/!]?<?([^\n]*)|"((?:\\.|[^"\\\n])*)"')


def comments_of(text):
    """The comments and string literals of C++, one below the other, and the line of each."""
    spoken, numbers, number, at = [], [], 1, 0
    for match in SPOKEN.finditer(text):
        said = match[1] if match[1] is not None else match[2]
        if " " not in said:
            continue
        number += text.count("\n", at, match.start())
        at = match.start()
        spoken.append(said)
        numbers.append(number)
    return without_code("\n".join(spoken)), numbers


def without_code(text):
    return re.sub(r"`[^`\n]*`", "x", text)


def prose_of(text):
    """A page without its code, the targets of its links, and the first columns of tables headed "before"."""
    def fence(match):
        if not match.group().startswith("```cpp"):
            return blank(match.group())
        return "\n".join(line[line.find("//") + 2:] if "//" in line else "" for line in match.group().split("\n"))

    text = re.sub(r"^```.*?^```", fence, text, flags=re.DOTALL | re.MULTILINE)
    lines, quoting = [], False
    for line in text.split("\n"):
        if line.startswith("    ") and not line.lstrip().startswith(("-", "*", "|")) and not (lines and lines[-1].startswith(("- ", "  "))):
            line = " " * len(line)
        quoting = line.startswith("|") and (quoting or re.match(r"\| *before *\|", line) is not None)
        if quoting:
            line = re.sub(r"^\|(?:[^|`]|`[^`]*`)*\|", lambda m: " " * len(m.group()), line)
        lines.append(line)
    text = without_code("\n".join(lines))
    return re.sub(r"\]\([^)\n]*\)", lambda m: " " * len(m.group()), text)


def findings_in(path, text):
    """Yields the name and line of each odd word that no allowance covers; an allowance that covers none is a finding."""
    if path.suffix in {".hpp", ".cuh"}:
        read, numbers = comments_of(text)
    else:
        read = prose_of(text)
        numbers = range(1, read.count("\n") + 2)
    read = read.lower()
    starts = [match.end() for match in re.finditer(r"\n", read)]
    allowed = {}
    if "words-allow(" in text and path.name != "CONTRIBUTING.md":
        for match in ALLOW.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            if match[1] not in BETTER or not match[2] or len(match[3].split()) < 2:
                yield "allowance", line
            allowed[line, match[1]] = False
        read = ALLOW.sub(lambda m: blank(m.group()), read)
    for name, pattern, _ in PATTERNS:
        if KEYS.get(name, "") not in read:
            continue
        for match in pattern.finditer(read):
            line = numbers[bisect.bisect_right(starts, match.start())]
            for place in ((line, name), (line - 1, name)):
                if place in allowed:
                    allowed[place] = True
                    break
            else:
                yield name, line
    for (line, _), used in allowed.items():
        if not used:
            yield "allowance", line


def parts():
    include = sorted(p for p in pathlib.Path("include").rglob("*") if p.suffix in {".hpp", ".cuh"})
    pages = [pathlib.Path(each) for each in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    pages += sorted(pathlib.Path("docs").rglob("*.md")) + sorted(pathlib.Path("examples").rglob("README.md"))
    return {"include": include, "pages": pages}


def git(*arguments):
    done = subprocess.run(["git", *arguments], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def subjects_after(first):
    """Hash and subject of each commit after `first`, or a sentence that says why they are not read."""
    try:
        shallow = git("rev-parse", "--is-shallow-repository")
    except OSError:
        return "git is not installed"
    if shallow != "false":
        return "this is no clone, or a shallow one"
    if git("cat-file", "-e", f"{first}^{{commit}}") is None:
        return f"commit {first} is not in this clone"
    log = git("log", "--no-merges", "--format=%h %s", f"{first}..HEAD") or ""
    return [line.split(" ", 1) for line in log.splitlines() if " " in line]


def read_table():
    first, table = "", {}
    for line in TABLE.read_text().splitlines():
        fields = line.split("#")[0].split()
        if fields[:1] == ["after"]:
            first = fields[1]
        elif fields:
            table[fields[0], fields[1]] = int(fields[2])
    return first, table


def write_table(first, table):
    lines = ["# How often each odd word may still occur, by part. Written by `words.py --update`; counts only fall.",
             f"after {first}  # subjects of later commits are read"]
    lines += [f"{part} {name} {count}" for (part, name), count in sorted(table.items()) if count]
    TABLE.write_text("\n".join(lines) + "\n")


def main():
    options = sys.argv[1:]
    if not set(options) <= {"--update", "--raise"} or ("--raise" in options and "--update" not in options):
        sys.exit(__doc__)
    first, table = read_table()
    places = collections.defaultdict(list)
    for part, files in parts().items():
        for path in files:
            for name, line in findings_in(path, path.read_text()):
                places[part, name].append(f"{path}:{line}")
    subjects = subjects_after(first)
    bad_subjects = []
    if isinstance(subjects, str):
        print(f"subjects of commits are not read: {subjects}")
    else:
        for commit, subject in subjects:
            for name, pattern, better in PATTERNS:
                if name in SUBJECTS and (found := pattern.search(without_code(subject).lower())):
                    bad_subjects.append(f'commit {commit}: "{found.group()}" in its subject: {better}')

    # A new odd word is in a file that was just changed: those are printed first.
    touched = set() if isinstance(subjects, str) else set((git("diff", "--name-only", "HEAD~1") or "").splitlines())
    rose = fell = 0
    counts = dict(table)
    for key in sorted(set(table) | set(places)):
        part, name = key
        now, may = len(places[key]), table.get(key, 0)
        if now > may:
            rose += 1
            if name == "allowance":
                print(f"{part}: an allowance needs a known name and a reason, and an odd word that it covers:")
            else:
                print(f'{part}: "{name}" occurs {now} times, {may} may be. Write: {BETTER[name]}')
            found = sorted(places[key], key=lambda place: place.split(":")[0] not in touched)
            print("".join(f"  {place}\n" for place in found[:30]), end="")
            if len(found) > 30:
                print(f"  and {len(found) - 30} more")
            if "--raise" in options and name != "allowance":
                counts[key] = now
        elif now < may:
            fell += 1
            counts[key] = now
            if "--update" not in options:
                print(f'{part}: "{name}" occurs {now} times, the table says {may}')
    if fell and "--update" not in options:
        print("words.table is higher than the text: python3 tests/gates/words.py --update")
    print("".join(f"{each}\n" for each in bad_subjects), end="")
    if "--update" in options:
        if "--raise" in options:
            if bad_subjects and (head := git("rev-parse", "--short=12", "HEAD")):
                first, bad_subjects = head, []
            rose = sum(len(places[key]) > counts.get(key, 0) for key in places)
        write_table(first, counts)
        fell = 0
    total = {part: sum(len(found) for (of, _), found in places.items() if of == part) for part in parts()}
    print(", ".join(f"{part}: {count} odd words" for part, count in total.items())
          + f"; {rose} counts rose, {fell} fell, {len(bad_subjects)} subjects")
    return bool(rose or fell or bad_subjects)


if __name__ == "__main__":
    sys.exit(main())
