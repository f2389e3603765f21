"""primitive_pictures.py [--check]: draws docs/pictures/NAME.svg, one picture for each primitive's page.

With --check it compares the files with what it would draw, and draws nothing. Run from the root of the checkout.
"""

import pathlib
import sys

FOLDER = pathlib.Path("docs/pictures")
BLUE, GREEN, GREY, RED, AMBER = "#bee3f8", "#c6f6d5", "#edf2f7", "#fed7d7", "#fefcbf"


class Picture:
    """Boxes, arrows and words on a white ground; places are of left upper corners, in pixels."""

    def __init__(self, width, height):
        self.width, self.height, self.parts = width, height, []

    def box(self, x, y, width, height, text="", fill=GREY, dashed=False):
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{fill}" stroke="#4a5568"{dash}/>')
        lines = text.split("\n")
        for i, line in enumerate(lines):
            self.words(x + width / 2, y + height / 2 + 5 + 16 * (i - (len(lines) - 1) / 2), line, "middle")

    def words(self, x, y, text, anchor="start", bold=False):
        weight = ' font-weight="bold"' if bold else ""
        text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight}>{text}</text>')

    def arrow(self, x1, y1, x2, y2, text="", above=True):
        self.parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#2d3748" stroke-width="1.5" marker-end="url(#head)"/>')
        if text:
            self.words((x1 + x2) / 2, (y1 + y2) / 2 + (-6 if above else 16), text, "middle")

    def svg(self):
        head = ('<defs><marker id="head" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">'
                '<path d="M0 0 L9 4 L0 8 z" fill="#2d3748"/></marker></defs>')
        return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
                          f'viewBox="0 0 {self.width} {self.height}" font-family="sans-serif" font-size="13">', head,
                          f'<rect width="{self.width}" height="{self.height}" fill="white"/>', *self.parts, "</svg>", ""])


def paged_allocator():
    p = Picture(760, 230)
    rows = [("sequence A", 40, [0, 1, 2]), ("B, the same prompt", 110, [0, 1, 3]), ("fork of A", 180, [0, 1, 2])]
    for name, y, blocks in rows:
        p.words(10, y + 20, name)
        for i, block in enumerate(blocks):
            p.box(180 + 46 * i, y, 46, 30, str(block), BLUE if block < 2 else GREEN)
    p.words(180, 24, "block tables", bold=True)
    p.words(430, 24, "blocks of KV memory, 16 tokens each", bold=True)
    facts = ["shared by A,\nB and the fork", "shared by A,\nB and the fork", "open: copied when\nA or the fork writes", "open, of B alone", "cached, unused: until\nmatched or evicted", "free"]
    fills = [BLUE, BLUE, GREEN, GREEN, AMBER, GREY]
    for i, (fact, fill) in enumerate(zip(facts, fills)):
        x, y = 430 + 165 * (i % 2), 40 + 62 * (i // 2)
        p.box(x, y, 158, 52, f"{i}: {fact}", fill)
    p.arrow(330, 125, 422, 125, "ids only")
    return p


def tiered_buffer():
    p = Picture(760, 210)
    for i, (name, fill) in enumerate([("tier 0: device or host memory", BLUE), ("tier 1: host memory", GREEN), ("last tier: files", AMBER)]):
        y = 30 + 60 * i
        p.words(10, y + 26, name)
        p.box(230, y, 360, 40, "", "white", dashed=True)
        for c in range([2, 4, 7][i]):
            p.box(236 + 50 * c, y + 5, 44, 30, "chunk", fill)
    p.words(230, 20, "each tier within its budget", bold=True)
    p.arrow(640, 150, 640, 105, "")
    p.arrow(660, 50, 660, 95, "")
    p.words(656, 133, "miss: up,")
    p.words(656, 149, "verified")
    p.words(672, 64, "victim: down,")
    p.words(672, 80, "if it changed")
    p.box(236, 30, 94, 40, "", "none")
    p.words(340, 54, "under a lease: stays at one address")
    return p


def prefetch_schedule():
    p = Picture(760, 190)
    p.words(10, 46, "computing")
    p.words(10, 96, "link, up")
    p.words(10, 146, "link, down")
    p.words(110, 20, "a step that follows the plan", bold=True)
    for i, name in enumerate(["layer 0", "layer 1", "layer 2", "layer 3", "layer 4"]):
        p.box(110 + 110 * i, 28, 106, 28, name, BLUE)
    for i, name in enumerate(["1", "2", "3", "4", "0, next step"]):
        p.box(114 + 110 * i, 78, 92 if i < 4 else 100, 28, name, GREEN)
    for i, name in enumerate(["0", "1", "2", "3"]):
        p.box(222 + 110 * i, 128, 92, 28, name, AMBER)
    p.arrow(206, 78, 222, 58)
    p.words(110, 178, "A chunk arrives before its use, and the chunk that leaves is the one used last.")
    return p


def async_checkpointer():
    p = Picture(760, 190)
    p.words(10, 46, "training")
    p.words(10, 106, "writer thread")
    for i, name in enumerate(["step 4", "step 5", "copy", "step 6", "step 7", "step 8"]):
        x = [110, 210, 310, 360, 460, 560][i]
        p.box(x, 28, 46 if name == "copy" else 96, 28, name, RED if name == "copy" else BLUE)
    p.words(333, 20, "the stall", "middle", bold=True)
    p.box(360, 88, 170, 28, "tensors, checksums", GREEN)
    p.box(532, 88, 90, 28, "manifest", GREEN)
    p.box(624, 88, 90, 28, "rename, sync", AMBER)
    p.arrow(340, 58, 366, 86, "")
    p.words(360, 76, "ring of your size")
    p.arrow(690, 118, 690, 146)
    p.words(714, 162, "committed: survives any crash from here on", "end")
    p.words(10, 162, "A crash before that leaves the previous checkpoint")
    return p


def redundant_replica():
    p = Picture(760, 220)
    for i in range(4):
        x = 20 + 180 * i
        dead = i == 2
        p.box(x, 40, 150, 76, "", RED if dead else "white", dashed=dead)
        p.words(x + 75, 32, f"rank {i}" + (", dead" if dead else ""), "middle", bold=True)
        p.box(x + 8, 48, 134, 26, f"part {i}", BLUE)
        p.box(x + 8, 82, 134, 26, f"copy of part {(i + 3) % 4}", GREEN)
    p.box(380, 170, 150, 34, "fresh rank 2", "white")
    p.arrow(610, 118, 520, 168, "")
    p.words(586, 150, "part 2, verified")
    p.arrow(275, 118, 400, 168, "")
    p.words(190, 150, "copy of part 1 again")
    p.words(20, 194, "mirror:2 on four ranks; xor and Reed-Solomon")
    p.words(20, 210, "keep sums in place of copies")
    return p


def sharded_state():
    p = Picture(760, 220)
    for i in range(4):
        x = 150 + 150 * i
        p.words(x + 65, 24, f"rank {i}", "middle", bold=True)
        p.box(x, 32, 130, 26, f"shard {i}", BLUE)
        p.box(x, 92, 130, 26, "whole layer", GREEN, dashed=True)
        p.box(x, 152, 130, 26, f"sum of shard {i}", AMBER)
        p.arrow(x + 65, 60, x + 65, 90)
        p.arrow(x + 65, 120, x + 65, 150)
    p.words(10, 50, "kept")
    p.words(10, 80, "gather")
    p.words(10, 110, "for its use")
    p.words(10, 140, "reduce_scatter")
    p.words(10, 170, "gradients")
    p.words(150, 206, "ZeRO 3. Sums are taken in the order of ranks: equal bits in every run of four.")
    return p


PICTURES = (paged_allocator, tiered_buffer, prefetch_schedule, async_checkpointer, redundant_replica, sharded_state)

if sys.argv[1:] not in ([], ["--check"]):
    sys.exit(__doc__)
stale = []
for draw in PICTURES:
    path, svg = FOLDER / f"{draw.__name__}.svg", draw().svg()
    if sys.argv[1:]:
        if not path.exists() or path.read_text() != svg:
            stale.append(str(path))
    else:
        FOLDER.mkdir(exist_ok=True)
        path.write_text(svg)
if stale:
    sys.exit(f"differ from the script: {', '.join(stale)}; run python3 scripts/primitive_pictures.py")
