"""measured_picture.py [--check]: draws docs/benchmarks/measured.svg from the tables of docs/benchmarks/paging_results.md.

With --check it compares the picture with the tables and draws nothing. Run from the root of the checkout.
"""

import pathlib
import re
import sys

PAGE = pathlib.Path("docs/benchmarks/paging_results.md")
PICTURE = pathlib.Path("docs/benchmarks/measured.svg")
# A group of rows in the page, the title above its bars, and the rows: name in the page, name in the picture.
PANELS = [
    ("lookup_touch_evict", "Look up, touch or evict a cached block", [
        ("llmmem/10000", "llmmem"), ("list_map_reusing/10000", "std::list + unordered_map"), ("libcachesim/10000", "libCacheSim")]),
    ("lookup_s3fifo", "The same under S3-FIFO", [("llmmem/10000", "llmmem"), ("libcachesim/10000", "libCacheSim")]),
    ("allocate_free", "Allocate and free, batches of 32", [
        ("llmmem/32", "llmmem"), ("boost_pool/32", "boost::pool"), ("mimalloc/32", "mimalloc"), ("glibc/32", "glibc")]),
]
WIDTH, LEFT, BAR, HEIGHT = 720, 210, 400, 22


def median(group, row):
    table = re.search(rf"^{group} +median ns.*?(?=^\w+ +median ns|^```)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return float(re.search(rf"^{re.escape(row)} +([\d.,]+)", table.group(), re.MULTILINE)[1].replace(",", ""))


def draw():
    panels = [(title, [(label, median(group, row)) for row, label in rows]) for group, title, rows in PANELS]
    longest = max(value for _, bars in panels for _, value in bars)
    body, y = [], 16
    for title, bars in panels:
        body.append(f'<text x="8" y="{y}" font-weight="bold">{title}, ns a block</text>')
        y += 10
        for label, value in bars:
            colour = "#2b6cb0" if label == "llmmem" else "#a0aec0"
            width = value / longest * BAR
            body.append(f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{label}</text>')
            body.append(f'<rect x="{LEFT}" y="{y + 3}" width="{width:.1f}" height="{HEIGHT - 6}" fill="{colour}"/>')
            body.append(f'<text x="{LEFT + width + 6:.1f}" y="{y + 15}">{value:.1f}</text>')
            y += HEIGHT
        y += 26
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y - 18}" font-family="sans-serif" font-size="13">',
             f'<rect width="{WIDTH}" height="{y - 18}" fill="white"/>', *body, "</svg>"]
    return "\n".join(lines) + "\n"


if sys.argv[1:] not in ([], ["--check"]):
    sys.exit(__doc__)
if sys.argv[1:]:
    if not PICTURE.exists() or PICTURE.read_text() != draw():
        sys.exit(f"{PICTURE} differs from {PAGE}: run python3 scripts/measured_picture.py")
else:
    PICTURE.write_text(draw())
