"""mutate.py [--check] [FILE.mut|FOLDER...]: applies each mutation to a copy of the checkout and runs the test that must
notice. With --check it only looks whether each still applies, to the checkout itself. Without a file: tests/mutations.

Exit status 0: every mutation was noticed. 1: some survived. 2: a mutation is malformed, or does not compile.
Run from the root of the checkout.
"""

import collections
import concurrent.futures
import dataclasses
import os
import pathlib
import queue
import re
import shutil
import subprocess
import sys
import time

SCRATCH = pathlib.Path("build/mutate")
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


def occurrences(text, find):
    """Returns how often the lines occur in a text."""
    return ("\n" + text).count("\n" + find)


def run(*command, **options):
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


class Copy:
    """A copy of the checkout, and its builds: of each test by itself, so that a mutation costs one file."""

    def __init__(self, number):
        self.source = SCRATCH / f"source{number}"
        self.build = SCRATCH / f"build{number}"
        self.build_threads = SCRATCH / f"build_threads{number}"  # with the thread sanitizer: it sees what x86 hides

    def prepare(self):
        """Copies the files that git tracks or would track, configured so that tests build fast."""
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            check=True, capture_output=True, text=True,
        ).stdout.splitlines()
        wanted = {name for name in listed if pathlib.Path(name).is_file()}
        for old in [p for p in self.source.rglob("*") if p.is_file()]:
            if old.relative_to(self.source).as_posix() not in wanted:
                old.unlink()
        for name in wanted:
            copy = self.source / name
            # Left alone when it is the same, so that a second run does not build everything again.
            if not copy.is_file() or copy.read_bytes() != pathlib.Path(name).read_bytes():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(name, copy)
        # With assertions, as in other builds of tests: a write past the end of a vector shows.
        checked = "-O1 -D_GLIBCXX_ASSERTIONS"
        for build, flags, kinds in (
            (self.build, checked, "unit"), (self.build_threads, f"{checked} -g1 -fsanitize=thread", "concurrent"),
        ):
            configured = run(
                "cmake", "-S", self.source, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Debug",
                f"-DCMAKE_CXX_FLAGS_DEBUG={flags}", "-DLLMMEM_TESTS_ALONE=ON",
                "-DLLMMEM_BUILD_TESTS=ON", f"-DLLMMEM_TESTS={kinds}",
                f"-DLLMMEM_TEST_TIMEOUT={TIMEOUT}",
                # What a mutation leaves unused is no reason to reject it.
                "-DCMAKE_CXX_FLAGS=-w",
            )
            if configured.returncode != 0:
                raise Malformed(configured.stdout)

    def build_and_test(self, test):
        """Builds the program of `test` and runs it: 'passed', 'failed' or 'does not compile', and the output."""
        build = self.build_threads if test.endswith("_concurrent") else self.build
        built = run("cmake", "--build", build, "--parallel", "1", "--target", "alone_" + test.replace("/", "_"))
        if built.returncode != 0:
            return "does not compile", built.stdout
        # A sanitizer's tests take a part of their seeds: as many as other builds take must notice a mutation.
        more = {"LLMMEM_SEED_FACTOR": "4"} if test.endswith("_concurrent") else {}
        tested = run(
            "ctest", "--test-dir", build, "-R", f"^{re.escape(test)}$", "--no-tests=error", "--output-on-failure",
            env=os.environ | more,
        )
        if "No tests were found" in tested.stdout:
            raise Malformed(f"there is no test {test}")
        return ("passed" if tested.returncode == 0 else "failed"), tested.stdout

    def try_mutation(self, mutation):
        """'noticed', 'SURVIVED' or 'INVALID', and why."""
        path = self.source / mutation.file
        if not path.is_file():
            return "INVALID", f"there is no {mutation.file}"
        original = path.read_text()
        if (count := occurrences(original, mutation.find)) != 1:
            return "INVALID", f"its lines occur {count} times in {mutation.file}, must occur once"
        path.write_text(("\n" + original).replace("\n" + mutation.find, "\n" + mutation.replace)[1:])
        try:
            outcome, output = self.build_and_test(mutation.test)
        finally:
            path.write_text(original)
        if outcome == "failed":
            return "noticed", ""
        if outcome == "passed":
            return "SURVIVED", f"{mutation.test} passes with this in {mutation.file}:\n{mutation.replace}"
        return "INVALID", f"does not compile:\n{output}"

    def try_all(self, test, mutations):
        """Tries the mutations that one test must notice; the test must pass without them."""
        outcome, output = self.build_and_test(test)
        if outcome != "passed":
            raise Malformed(f"{test} does not pass even without a mutation:\n{output}")
        counts = collections.Counter()
        for mutation in mutations:
            began = time.monotonic()
            verdict, why = self.try_mutation(mutation)
            counts[verdict] += 1
            lines = f"{verdict:<9} {mutation.where}  by {test}  {time.monotonic() - began:.1f} s\n"
            if why:
                lines += "    " + why.rstrip().replace("\n", "\n    ") + "\n"
            print(lines, end="", flush=True)  # at once: others print, too
        return counts


def try_by_test(mutations):
    """Tries all of them, as many tests at once as there are cores, each in a copy of its own."""
    by_test = collections.defaultdict(list)
    for mutation in mutations:
        by_test[mutation.test].append(mutation)
    copies = queue.SimpleQueue()
    jobs = min(os.cpu_count() or 1, len(by_test))
    for number in range(jobs):
        copy = Copy(number)
        copy.prepare()
        copies.put(copy)

    def in_a_copy(test):
        copy = copies.get()
        try:
            return copy.try_all(test, by_test[test])
        finally:
            copies.put(copy)

    counts = collections.Counter()
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        # The longest first, so that none runs alone at the end.
        running = [pool.submit(in_a_copy, test) for test in sorted(by_test, key=lambda test: -len(by_test[test]))]
        for each in concurrent.futures.as_completed(running):
            try:
                counts += each.result()
            except Malformed:
                pool.shutdown(cancel_futures=True)
                raise
    return counts


def check(mutations):
    """Whether each mutation's text occurs once where it says."""
    stale = 0
    for mutation in mutations:
        path = pathlib.Path(mutation.file)
        count = occurrences(path.read_text(), mutation.find) if path.is_file() else 0
        if count != 1:
            stale += 1
            print(f"{mutation.where}: its lines occur {count} times in {mutation.file}, must occur once")
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

    counts = try_by_test(mutations)
    print(f"{len(mutations)} mutations: {counts['noticed']} noticed, {counts['SURVIVED']} survived, {counts['INVALID']} invalid")
    return 2 if counts["INVALID"] else 1 if counts["SURVIVED"] else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Malformed as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
