"""mutate.py [--check] [FILE.mut|FOLDER...]: applies each mutation to a copy of the checkout and runs the test that must
notice. With --check it only looks whether each still applies, to the checkout itself. Without a file: tests/mutations.

Exit status 0: every mutation was noticed. 1: some survived. 2: a mutation is malformed, or does not compile.
Run from the root of the checkout.
"""

import dataclasses
import pathlib
import re
import shutil
import subprocess
import sys
import time

SCRATCH = pathlib.Path("build/mutate")
SOURCE = SCRATCH / "source"
BUILD = SCRATCH / "build"
BUILD_THREADS = SCRATCH / "build_threads"  # with the thread sanitizer, for *_concurrent tests: it sees what x86 hides
TIMEOUT = 120  # of one test, in seconds: a mutation that makes it hang is noticed


class Malformed(Exception):
    pass


@dataclasses.dataclass
class Mutation:
    where: str  # file and line of the mutation itself
    file: str
    test: str
    find: str
    replace: str


def parse(path):
    """The mutations of one file: header lines, `find:` and its text, `replace:` and its text; `---` between two."""
    number = 0
    for block in re.split(r"(?m)^---\n", path.read_text()):
        where = f"{path}:{number + 1}"
        number += block.count("\n") + 1
        block = re.sub(r"(?m)\A(?:#[^\n]*\n|\n)+", "", block)
        if not block.strip():
            continue
        match = re.fullmatch(r"file: (\S+)\ntest: (\S+)\nfind:\n(.+?\n)replace:\n(.*)", block, re.DOTALL)
        if not match:
            raise Malformed(f"{where}: must be `file:`, `test:`, `find:` with its text, `replace:` with its text")
        file, test, find, replace = match.groups()
        if "/" not in test:
            raise Malformed(f"{where}: `test:` must be <folder>/<header>, as ctest names it")
        yield Mutation(where, file, test, find, replace.rstrip("\n") + "\n" if replace.strip() else "")


def run(*command, **options):
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def prepare():
    """A copy of what git tracks or would, configured so that tests build fast."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    wanted = {name for name in listed if pathlib.Path(name).is_file()}
    for old in [p for p in SOURCE.rglob("*") if p.is_file()]:
        if old.relative_to(SOURCE).as_posix() not in wanted:
            old.unlink()
    for name in wanted:
        copy = SOURCE / name
        # Left alone when it is the same, so that a second run does not build everything again.
        if not copy.is_file() or copy.read_bytes() != pathlib.Path(name).read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(name, copy)
    for build, flags, kinds in ((BUILD, "-O1", "unit"), (BUILD_THREADS, "-O1 -g1 -fsanitize=thread", "concurrent")):
        configured = run(
            "cmake", "-S", SOURCE, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Debug",
            f"-DCMAKE_CXX_FLAGS_DEBUG={flags}",
            "-DLLMMEM_BUILD_BENCHMARKS=OFF", "-DLLMMEM_BUILD_EXAMPLES=OFF", f"-DLLMMEM_TESTS={kinds}",
            f"-DLLMMEM_TEST_TIMEOUT={TIMEOUT}",
            # What a mutation leaves unused is no reason to reject it.
            "-DCMAKE_CXX_FLAGS=-w",
        )
        if configured.returncode != 0:
            sys.exit(configured.stdout)


def build_and_test(test):
    """Builds the program of `test` and runs it: 'passed', 'failed' or 'does not compile', and the output."""
    folder, header = test.split("/", 1)
    concurrent = header.endswith("_concurrent")
    build = BUILD_THREADS if concurrent else BUILD
    target = f"test_{folder}" + ("_concurrent" if concurrent else "")
    built = run("cmake", "--build", build, "--target", target)
    if built.returncode != 0:
        return "does not compile", built.stdout
    tested = run("ctest", "--test-dir", build, "-R", f"^{re.escape(test)}$", "--no-tests=error", "--output-on-failure")
    if "No tests were found" in tested.stdout:
        raise Malformed(f"there is no test {test}")
    return ("passed" if tested.returncode == 0 else "failed"), tested.stdout


def try_mutation(mutation):
    """'noticed', 'SURVIVED' or 'INVALID', and why."""
    path = SOURCE / mutation.file
    if not path.is_file():
        return "INVALID", f"there is no {mutation.file}"
    original = path.read_text()
    if (count := original.count(mutation.find)) != 1:
        return "INVALID", f"its text occurs {count} times in {mutation.file}, must once"
    path.write_text(original.replace(mutation.find, mutation.replace))
    try:
        outcome, output = build_and_test(mutation.test)
    finally:
        path.write_text(original)
    if outcome == "failed":
        return "noticed", ""
    if outcome == "passed":
        return "SURVIVED", f"{mutation.test} passes with this in {mutation.file}:\n{mutation.replace}"
    return "INVALID", f"does not compile:\n{output}"


def check(mutations):
    """Whether each mutation's text occurs once where it says."""
    stale = 0
    for mutation in mutations:
        path = pathlib.Path(mutation.file)
        count = path.read_text().count(mutation.find) if path.is_file() else 0
        if count != 1:
            stale += 1
            print(f"{mutation.where}: its text occurs {count} times in {mutation.file}, must once")
    print(f"{len(mutations)} mutations, {stale} do not apply")
    return 2 if stale else 0


def main(arguments):
    only_check = "--check" in arguments
    arguments = [argument for argument in arguments if argument != "--check"]
    paths = []
    for argument in map(pathlib.Path, arguments or ["tests/mutations"]):
        if not argument.exists():
            raise Malformed(f"there is no {argument}; name .mut files or folders of them")
        paths += sorted(argument.glob("*.mut")) if argument.is_dir() else [argument]
    mutations = [mutation for path in paths for mutation in parse(path)]
    if not mutations:
        raise Malformed(f"no mutations in {' '.join(arguments)}")
    if only_check:
        return check(mutations)

    prepare()
    for test in sorted({mutation.test for mutation in mutations}):
        outcome, output = build_and_test(test)
        if outcome != "passed":
            raise Malformed(f"{test} does not pass even without a mutation:\n{output}")

    counts = {"noticed": 0, "SURVIVED": 0, "INVALID": 0}
    for mutation in mutations:
        began = time.monotonic()
        verdict, why = try_mutation(mutation)
        counts[verdict] += 1
        print(f"{verdict:<9} {mutation.where}  by {mutation.test}  {time.monotonic() - began:.1f} s", flush=True)
        if why:
            print("    " + why.rstrip().replace("\n", "\n    "))
    print(f"{len(mutations)} mutations: {counts['noticed']} noticed, {counts['SURVIVED']} survived, {counts['INVALID']} invalid")
    return 2 if counts["INVALID"] else 1 if counts["SURVIVED"] else 0


try:
    sys.exit(main(sys.argv[1:]))
except Malformed as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
