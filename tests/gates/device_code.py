"""device_code.py [--assemble-each] NVCC SOURCE INCLUDE WORK [--programs FILE... | ARCHITECTURE...]: what nvcc makes of kernels.

It compiles SOURCE, which has every kernel, for each architecture (80 and 90 unless given) and reads the PTX, and for the
last one (for each with --assemble-each) also the report of ptxas. With --programs it compiles SOURCE for sm_90 alone, and
reads the library's kernels for sm_80 in the programs of device tests, which must have each of them, with one of the lists
of blocks, pairs and tokens that it takes. It fails on

- registers spilled to memory, or locals that lie there;
- a division or remainder of 64 bits: it costs about a hundred instructions;
- a kernel that promises 16 bytes an access, and does not read or write so;
- an access to memory whose space the compiler does not know (`ld.u32` for `ld.global.u32`);
- an exchange among lanes that are no constant: before each the device would look up who takes part in it.

Exit status 0: none of these. 1: some, each named.
"""

import pathlib
import re
import shutil
import subprocess
import sys

# Of detail::move_rows_kernel<N, ...>: how wide an access is at the widest, by N and by the op's elements.
ENTRY = re.compile(r"\.entry (\w+)\(.*?\n\{(.*?)\n\}", re.DOTALL)
EXCHANGE = re.compile(r"\b(shfl|redux)\.sync\.[\w.]+\s[^;]*?([^\s,]+);")
WHOLE_WARP = re.compile(r"\bmov\.[bus]32\s+(%r\d+), (?:-1|0xffffffff|4294967295);")
ACCESS = re.compile(r"\b(ld|st)\.((?:\w|\.)+)\s")
BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def demangled(names):
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return dict(zip(names, done.stdout.splitlines()))


def widest(body, which):
    """Bytes of the widest access of a kind, `ld` or `st`, to global memory."""
    most = 0
    for kind, how in ACCESS.findall(body):
        parts = how.split(".")
        if kind != which or "global" not in parts:
            continue
        element = re.match(r"[a-z](\d+)$", parts[-1])
        vector = next((int(p[1:]) for p in parts if re.match(r"v\d$", p)), 1)
        most = max(most, vector * BYTES[element.group(1)] if element else 0)
    return most


def promised_of_items(name):
    """Of `run_items_kernel` and `run_groups_kernel`; none for those that go number by number."""
    groups = re.search(r"(de)?quantize_work<\(llmmem::v0::dtype\)(\d+), \(llmmem::v0::dtype\)(\d+)", name)
    if groups is not None:
        elements = 16 // {"1": 4, "2": 2, "3": 2}[groups.group(2)]
        codes = elements // (2 if groups.group(3) == "7" else 1)  # int4
        return (codes, 16) if groups.group(1) else (16, codes)
    planes = re.search(r"plane_work<\(llmmem::v0::plane_direction\)(\d), (\d+)u?>", name)
    if planes is not None:
        elements = int(planes.group(2))
        both = 1 if elements == 1 else min(2 * elements, 16), elements
        return both if planes.group(1) == "0" else both[::-1]
    attention = re.search(r"::attention_work<\(llmmem::v0::dtype\)(\d+), (\d+)u?,", name)
    if attention is not None:  # eight elements of a key or value, and the floats of a share's sums
        return 8 if attention.group(1) == "4" else 16, 16
    tensor = re.search(r"::attention_tensor_work<llmmem::v0::detail::tensor_elements<\(llmmem::v0::dtype\)(\d+), ", name)
    if tensor is not None:
        return 8 if tensor.group(1) == "4" else 16, 16
    codes = re.search(r"::attention_tensor_work<llmmem::v0::detail::tensor_codes<(\d+)u?,", name)
    if codes is not None:  # two neighbouring packs of keys
        return 16, 16
    if "tensor_rounded_codes" in name:
        return 8, 16
    if "tensor_latents<" in name:  # the rotary part and the queries
        return 16, 16
    if "attention_merge_work" in name:
        return 16, 16
    if "fill_work" in name:
        return 0, 16
    return (16, 0) if "verify_work" in name else None


# Of kernels that go item by item: the bytes of their accesses are an argument of the work; 0: these it has not.
ITEMS = (
    (re.compile(r"::xor_parity_work<(\d+)u>"), lambda n: (n, n)),
    (re.compile(r"::ordered_sum_work<(\d+)u,"), lambda n: (n, n)),
    (re.compile(r"::xor_delta_work<(\d+)u, \(\S*delta_use\)0>"), lambda n: (n, n)),
    (re.compile(r"::xor_delta_work<(\d+)u, \(\S*delta_use\)1>"), lambda n: (n, 0)),
    (re.compile(r"::apply_delta_work<(\d+)u>"), lambda n: (n, n)),
    (re.compile(r"::checksum_work<.*?, (\d+)u, \(\S*checksum_use\)0,"), lambda n: (n, 0)),
    (re.compile(r"::checksum_work<.*?, (\d+)u, \(\S*checksum_use\)1,"), lambda n: (n, n)),
    (re.compile(r"::kv_digest_work<(\d+)u?>"), lambda n: (n, 0)),
)


def promised(name):
    """Bytes that the widest accesses of a kernel have at either end; none for one that promises nothing."""
    for work, wide in ITEMS:
        if found := work.search(name):
            return wide(int(found.group(1)))
    packets = re.search(r"move_rows_kernel<(\d+)u?,", name)
    if packets is None:
        return promised_of_items(name)
    elements = int(packets.group(1))
    op = name[name.index("move_rows_kernel<") :]
    if "copy_op" in op:
        return elements, elements
    types = re.search(r"kv_scale_op<\(llmmem::v0::dtype\)(\d+), \(llmmem::v0::dtype\)(\d+)", op)
    if types is None:
        return None
    size = {"1": 4, "2": 2, "3": 2, "4": 1}  # the order of `dtype`: f64, f32, bf16, f16, fp8_e4m3
    return elements * size[types.group(1)], elements * size[types.group(2)]


def ptx_in(program, architecture):
    """The PTX for an architecture in a program that was linked with nvcc --no-compress."""
    parts = re.findall(rb"\.version \d[^\0]*", pathlib.Path(program).read_bytes())
    return [part.decode() for part in parts if re.search(rf"^\.target sm_{architecture}\b", part.decode(), re.MULTILINE)]


def entries_of_programs(programs, architecture, folder):
    """The library's kernels in programs, each once; leaves a file of PTX for each program in `folder`."""
    entries = {}
    for program in programs:
        parts = ptx_in(program, architecture)
        if not parts:
            sys.exit(f"{program} has no PTX for sm_{architecture}: compile it for compute_{architecture} with --no-compress")
        (folder / f"{pathlib.Path(program).name}_{architecture}.ptx").write_text("\n".join(parts[:1]))
        for part in parts:
            entries.update(ENTRY.findall(part))
    return [(mangled, entries[mangled]) for mangled in of_library(entries)]


# Where a kernel's blocks, pairs and tokens come from: tests need not have each of these with each kernel.
LISTS = (
    (r"\b(strided_blocks|numbered_blocks|few_copies|listed_copies)\b", "blocks"),
    (r"\b(few_pairs|listed_pairs)\b", "pairs"),
    (r"\b(csr_table_view|padded_table_view)\b", "table"),
    (r"\b((position|table)_front<[\w:]*table>|slot_front)", "front"),
)


def kinds_of(names):
    """Names of kernels, the lists that they take left open."""
    for name in names:
        name = name.split(">(")[0].replace("llmmem::v0::", "")
        for pattern, what in LISTS:
            name = re.sub(pattern, what, name)
        yield name.replace(" >", ">")


def of_library(entries):
    """Those of some kernels, by mangled name, that are the library's: not over a test's own work."""
    return [
        mangled
        for mangled, name in demangled(list(entries)).items()
        if "llmmem::v0::" in name.split("(")[0] and "(anonymous namespace)" not in name and "llmmem_tests::" not in name
    ]


def findings_in(entries, expects_all=True):
    if not entries:
        yield "no kernel at all"
    names = demangled([name for name, _ in entries])
    held = 0
    for mangled, body in entries:
        name = names[mangled]
        if "__local_depot" in body:
            yield f"{name}: has locals in memory"
        for division in re.findall(r"\b(?:div|rem)\.[su]64\b", body):
            yield f"{name}: {division}"
        constants = {"-1", "0xffffffff", *WHOLE_WARP.findall(body)}
        for kind, members in EXCHANGE.findall(body):
            if members not in constants:
                yield f"{name}: {kind}.sync among lanes that are no constant"
        for kind, how in ACCESS.findall(body):
            if not re.search(r"\b(global|param|shared|const|local)\b", how):
                yield f"{name}: {kind}.{how} knows no space"
        wide = promised(name)
        if wide is None:
            continue
        held += 1
        for kind, bytes_ in zip(("ld", "st"), wide):
            if widest(body, kind) < bytes_:
                yield f"{name}: promises {bytes_} bytes an access, {kind} has {widest(body, kind)}"
    if entries and held == 0:
        yield "no kernel was recognised by its name: this gate no longer knows them"
    for work, _ in ITEMS if expects_all else ():
        if not any(work.search(name) for name in names.values()):
            yield f"no kernel is named {work.pattern}: this gate no longer knows it"
    print(f"{len(entries)} kernels, {held} of them held to the width of their accesses")


def spills_in(report):
    name = ""
    for line in report.splitlines():
        name = (re.findall(r"Compiling entry function '(\w+)'", line) or [name])[0]
        if re.search(r"[1-9]\d* bytes (stack frame|spill)", line):
            yield f"{demangled([name])[name]}: {line.strip()}"


def main():
    arguments = sys.argv[1:]
    assemble_each = arguments[0] == "--assemble-each"
    nvcc, source, include, work, *architectures = arguments[assemble_each:]
    folder = pathlib.Path(work)
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    tested = None
    if architectures[:1] == ["--programs"]:
        tested = entries_of_programs(architectures[1:], "80", folder)
        for each in findings_in(tested, expects_all=False):
            print(f"sm_80: {each}")
            failed += 1
        architectures = ["90"]
    architectures = architectures or ["80", "90"]
    common = [nvcc, "-std=c++20", f"-I{include}", source]
    assembler = str(pathlib.Path(shutil.which(nvcc) or nvcc).resolve().parent / "ptxas")
    for architecture in architectures:
        ptx = folder / f"kernels_{architecture}.ptx"
        run([*common, f"-arch=compute_{architecture}", "-ptx", "-o", str(ptx)])
        entries = ENTRY.findall(ptx.read_text())
        found = list(findings_in(entries))
        if tested is not None:
            kinds, those = (set(kinds_of(demangled(names).values()))
                            for names in (of_library(dict(entries)), [name for name, _ in tested]))
            found += [f"{kind}: no device test has it, with any lists" for kind in sorted(kinds - those)]
        if assemble_each or architecture == architectures[-1]:
            report = run([assembler, "-v", f"-arch=sm_{architecture}", str(ptx), "-o", str(ptx.with_suffix(".cubin"))])
            found += spills_in(report)
            registers = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
            print(f"sm_{architecture}: at most {max(registers, default=0)} registers")
        for each in found:
            print(f"sm_{architecture}: {each}")
        failed += len(found)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
