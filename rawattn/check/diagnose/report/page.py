"""One self-contained page of a diagnosis: the verdict first, then pictures, then the numbers.

Longer than other modules because it holds the whole page, style sheet and drawings included, so
that the page needs nothing but itself: no script, no fonts, no links. Colours stand in the style
sheet alone, once for light and once for dark screens; every colour has a word or shape beside it.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from html import escape
from itertools import count, pairwise
from typing import TypeVar

import numpy as np

from rawattn.check.diagnose.engine.question import STAGES
from rawattn.check.diagnose.evidence.picture import picture
from rawattn.check.diagnose.evidence.structure import alike, off
from rawattn.check.diagnose.findings import Check, Diagnosis, Finding, Level, Map
from rawattn.check.diagnose.report.words import SURE, readable, sentence

ARRAYS = {"q", "k", "v", "dout", "dlse", *(name for names in STAGES.values() for name in names)}
Item = TypeVar("Item")
Curves = tuple[tuple[float, ...], ...]

# What keeps the page under a megabyte whatever it is given.
MOST_CELLS = 36_000  # of all maps together
MOST_ACROSS = 512  # cells of one map side by side: more than a screen shows
MOST_LINES = 40  # sequences that are set apart by lines, or joined by one
MOST_POINTS = 3_000  # of all charts together
MOST_ROWS = 900  # of all tables of slopes together

MAP_EDGES = (-2, -1, 0, 1, 2, 3, 4)  # log10 of error over allowance: where the colours change
MAP_NAMES = ("0.01", "0.1", "1", "10", "100", "1,000", "10,000")
WRONG, DOUBT, RIGHT = "wrong", "doubt", "right"
TONES = {"vacuous": DOUBT, "rounding": RIGHT}  # any other finding: something is wrong
VERDICTS = {"pass": RIGHT, "FAIL": WRONG, "vacuous": DOUBT, "-": "none"}
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LOOSE = 0.1  # a residual above this: the slope does not describe the difference
CHART = (320, 200, 48, 312, 10, 158)  # width, height; left, right, top, bottom of its field

STYLE = """
:root { color-scheme: light dark;
  --paper: #fbfaf7; --ink: #202327; --quiet: #595f66; --rule: #dbd7cd; --hatch: #b3b3b0;
  --right: #1c6a3c; --wrong: #a3251b; --doubt: #7a5100; --curve: #24609c;
  --h0: #f0f1ee; --h1: #dfe5e8; --h2: #c9d5dc; --h3: #efb75c; --h4: #ea9645; --h5: #d35b2c;
  --h6: #a32a22; --h7: #65101d; --infinite: #000; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #17191c; --ink: #e6e3dc; --quiet: #a6abb0; --rule: #393d42; --hatch: #55585c;
  --right: #7fca99; --wrong: #f2917f; --doubt: #e2b65e; --curve: #82b6ea;
  --h0: #1f2327; --h1: #29323a; --h2: #364651; --h3: #93431d; --h4: #b9581f; --h5: #da7c2e;
  --h6: #f0aa4c; --h7: #fbe19c; --infinite: #fff; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink); overflow-wrap: anywhere;
  font: 1.0625rem/1.55 Charter, "Bitstream Charter", "Iowan Old Style", Georgia, serif; }
main { max-width: 62rem; margin: 0 auto;
  padding: clamp(1.25rem, 5vw, 4rem) clamp(1rem, 4vw, 2rem); }
h1, h2, h3 { line-height: 1.2; text-wrap: balance; }
h1 { margin: .2rem 0 0; font-size: clamp(1.9rem, 5.5vw, 2.75rem); letter-spacing: -.01em; }
h2 { margin: 3.5rem 0 .5rem; font-size: 1.45rem; }
h3 { margin: 1.75rem 0 .4rem; font-size: 1.06rem; }
p, ul { margin: .4rem 0 .8rem; max-width: 42rem; text-wrap: pretty; }
ul { padding-left: 1.2rem; }
li { margin: .3rem 0; white-space: pre-line; }
li::marker { color: var(--quiet); }
code, pre { font: .86em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.eyebrow, .note, figcaption, .legend, .scale, .ticks, .name, table, dt, .mark, summary {
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
.eyebrow { margin: 0; max-width: none; color: var(--quiet); font-size: .86rem; }
.note, figcaption { color: var(--quiet); font-size: .86rem; line-height: 1.45; }
figcaption strong { color: var(--ink); font-size: .95rem; }
.wrong { color: var(--wrong); } .right { color: var(--right); } .doubt { color: var(--doubt); }
.none { color: var(--quiet); }
.mark { font-weight: 600; white-space: nowrap; min-width: 4.9em; }
article { margin: 1.75rem 0 0; padding-top: 1.5rem; border-top: 1px solid var(--rule); }
article h2 { margin: 0 0 1rem; font-size: clamp(1.35rem, 3.6vw, 1.75rem); }
dl { display: grid; grid-template-columns: 8rem 1fr; gap: .5rem 1rem; margin: 0; max-width: 50rem; }
dt { color: var(--quiet); font-size: .86rem; padding-top: .18rem; }
dd { margin: 0; white-space: pre-line; }
dd ul { margin: 0; padding-left: 1.1rem; } dd li:first-child { margin-top: 0; }
figure { margin: 0; min-width: 0; }
.maps { display: flex; flex-wrap: wrap; gap: 2.25rem 3rem; margin-top: 1.5rem; }
.maps figure { flex: 0 1 100%; }
.maps figure.square { flex: 0 1 27rem; }
.plot { display: grid; grid-template-columns: 2.6rem minmax(0, 1fr); margin-top: .6rem; }
.plot .mid { grid-column: 2; }
.cells { position: relative; overflow: hidden; border: 1px solid var(--rule); }
.blank { background: repeating-linear-gradient(135deg, var(--hatch) 0 2px, transparent 2px 5px); }
.cells svg { display: block; width: calc(100% + 1px); height: calc(100% + 1px); }
.ticks { position: relative; color: var(--quiet); font-size: .74rem; line-height: 1; }
.ticks span { position: absolute; white-space: nowrap; }
.ticks.across { height: 1.1rem; } .ticks.above { height: 1.3rem; }
.ticks.across span { transform: translateX(-50%); bottom: 0; }
.ticks.above span { transform: translateX(-50%); top: .1rem; }
.ticks.down span { transform: translateY(-50%); right: .4rem; }
.ticks .lead { transform: none !important; right: .4rem; }
.name { color: var(--quiet); font-size: .78rem; text-align: center; margin-top: .2rem; }
.cells path { shape-rendering: crispEdges; }
.h0 { fill: var(--h0); } .h1 { fill: var(--h1); } .h2 { fill: var(--h2); } .h3 { fill: var(--h3); }
.h4 { fill: var(--h4); } .h5 { fill: var(--h5); } .h6 { fill: var(--h6); } .h7 { fill: var(--h7); }
.infinite { fill: var(--infinite); }
.cells .cut, .cells .halo { fill: none; vector-effect: non-scaling-stroke; }
.cut { stroke: var(--ink); stroke-width: 1; } .halo { stroke: var(--paper); stroke-width: 3; }
.scale { display: flex; flex-wrap: wrap; gap: .6rem 2rem; margin: 1rem 0 0; padding: 0;
  list-style: none; max-width: none; font-size: .78rem; color: var(--quiet); }
.scale li { margin: 0; }
.scale .strip { width: min(30rem, 100%); }
.strip svg, .swatch { display: block; width: 100%; height: .8rem; border: 1px solid var(--rule); }
.swatch { display: inline-block; width: 1.6rem; vertical-align: -.1rem; margin-right: .4rem; }
.swatch.infinite { background: var(--infinite); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(17rem, 100%), 1fr));
  gap: 1.5rem 2rem; margin-top: 1rem; max-width: none; }
.charts figure { max-width: 23rem; }
.charts svg, .legend svg { display: block; width: 100%; font: 12px system-ui, "Liberation Sans",
  sans-serif; fill: var(--quiet); }
.charts .frame { fill: none; stroke: var(--rule); }
.one { fill: none; stroke: var(--quiet); stroke-dasharray: 2 3; }
.curve { fill: none; stroke: var(--curve); stroke-width: 1.5; }
.dots { fill: none; stroke: var(--ink); stroke-linecap: round; }
.holes { fill: none; stroke: var(--paper); stroke-linecap: round; }
.cross { fill: none; stroke: var(--wrong); stroke-width: 1.5; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.75rem; list-style: none; padding: 0;
  max-width: none; color: var(--quiet); font-size: .82rem; }
.legend li { display: flex; align-items: center; gap: .5rem; margin: 0; }
.legend svg { width: 22px; height: 12px; flex: none; }
.box { overflow-x: auto; margin: .5rem 0 1rem; }
table { border-collapse: collapse; font-size: .86rem; line-height: 1.4; }
.full { width: 100%; }
caption { text-align: left; color: var(--quiet); padding: 0 0 .3rem; }
th, td { text-align: left; vertical-align: baseline; padding: .32rem 1.1rem .32rem 0;
  border-bottom: 1px solid var(--rule); overflow-wrap: normal; }
th { font-weight: 600; } thead th { color: var(--quiet); font-weight: 500; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.words { width: 60%; min-width: 8rem; overflow-wrap: anywhere; }
.where { display: block; color: var(--quiet); }
.rung { width: 7.5rem; }
.rung svg { display: block; width: 6.5rem; height: .8rem; overflow: visible; }
.rung path { fill: none; stroke: var(--rule); } .rung .limit { stroke: var(--quiet); }
.rung circle { fill: currentColor; }
details { margin: .4rem 0; } summary { cursor: pointer; font-size: .92rem; padding: .2rem 0; }
:focus-visible { outline: 2px solid var(--curve); outline-offset: 2px; }
@media (max-width: 34rem) {
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .7rem; }
  h2 { margin-top: 2.75rem; } .plot { grid-template-columns: 2.2rem minmax(0, 1fr); }
  table { font-size: .8rem; } th, td { padding-right: .5rem; } td.words { min-width: 6rem; }
  .rung { display: none; } }
@media print { .box { overflow: visible; } article, figure, tr { break-inside: avoid; } }
"""


def page(diagnosis: Diagnosis, *, predicted: Curves | None = None, full: bool = False) -> str:
    """The page as HTML text; to be written as UTF-8.

    predicted: curves that a bug predicts for the slopes by sequence; each has a slope for every
    sequence in order, and stands in every chart. full: slopes of parts that say nothing too.
    """
    verdict, tone = _verdict(diagnosis)
    levels = diagnosis.levels if full else _telling(diagnosis.levels)
    sections = (
        _opening(diagnosis, verdict, tone),
        *(_finding(finding) for finding in diagnosis.findings),
        _maps(diagnosis.maps),
        _charts([level for level in levels if level.level == "sequence"], predicted),
        _ladder(diagnosis.checks),
        _slopes(levels if full else _merged(levels)),
        _section("What was compared", _list(diagnosis.facts)) if diagnosis.facts else "",
    )
    title = ": ".join(part for part in (diagnosis.title, verdict) if part)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_text(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{''.join(sections)}</main>\n</body>\n</html>\n"
    )


def _verdict(diagnosis: Diagnosis) -> tuple[str, str]:
    """The page's first words, and their tone."""
    findings = diagnosis.findings
    if not (findings or diagnosis.checks or diagnosis.levels or diagnosis.maps or diagnosis.facts):
        return "Nothing was compared", DOUBT
    tones = [TONES.get(finding.bug, WRONG) for finding in findings]
    if DOUBT in tones and WRONG not in tones:
        return "Nothing was shown", DOUBT
    if WRONG not in tones:
        return "Nothing is wrong", RIGHT
    sides = [f.side for f, tone in zip(findings, tones, strict=True) if tone == WRONG]
    names = [_side(side) for side in dict.fromkeys(sides)]
    if len(names) > 1:
        rest = [name[0].lower() + name[1:] if name[:4] == "The " else name for name in names[1:]]
        return f"{', '.join([names[0], *rest[:-1]])} and {rest[-1]} are wrong", WRONG
    verb = "are" if names[0].startswith("Both") else "is"
    ways = f" in {_number_word(len(sides))} ways" if len(sides) > 1 else ""
    return f"{names[0]} {verb} wrong{ways}", WRONG


def _side(side: str) -> str:
    """A side at the head of a sentence: "candidate" is a noun, "A" and "b.npz" are names."""
    if not side:
        return "Something"
    if side.startswith("both"):
        return side.capitalize()
    return f"The {side}" if len(side) > 1 and side.isalpha() and side.islower() else side


def _opening(diagnosis: Diagnosis, verdict: str, tone: str) -> str:
    eyebrow = f'<p class="eyebrow">{_text(diagnosis.title)}</p>\n' if diagnosis.title else ""
    return (
        f'<header>\n{eyebrow}<h1 class="{tone}">{_text(verdict)}</h1>\n'
        f"<p>{_tally(diagnosis.checks)}</p>\n</header>\n"
    )


def _tally(checks: Sequence[Check]) -> str:
    """How many of the identities hold."""
    judged = [check for check in checks if check.verdict in ("pass", "FAIL")]
    if not judged:
        return "No identity could be checked on one side alone."
    failed = sum(check.verdict == "FAIL" for check in judged)
    of = f"{_number_word(len(judged))} identit{'y' if len(judged) == 1 else 'ies'}"
    if not failed:
        what = {1: "The one identity", 2: "Both identities"}.get(len(judged), f"All {of}")
        return f"{what} that could be checked without a reference hold{'s' * (len(judged) == 1)}."
    verb = "fails" if failed == 1 else "fail"
    return f"Of {of} checked without a reference {_number_word(failed)} {verb}."


def _finding(finding: Finding) -> str:
    meaning = SURE.get(finding.confidence, "")
    sight = finding.proof.sight if finding.proof else None
    drawn = "" if sight is None else f"<pre>{_text(chr(10).join(picture(sight)))}</pre>"
    confidence = _text(finding.confidence) + (f": {_text(meaning)}" if meaning else "")
    rows = (
        ("Side", _text(finding.side)),
        ("Where", _text(finding.where)),
        ("Who sees whom", drawn),
        ("Look at", _text(finding.look_at)),
        ("Confidence", confidence),
        ("Evidence", _list(tuple(dict.fromkeys(finding.evidence)))),
        ("Looks the same", _list(finding.alternatives)),
        ("Class", f"<code>{_text(finding.bug)}</code>"),
    )
    entries = "".join(f"<dt>{name}</dt><dd>{value}</dd>\n" for name, value in rows if value)
    heading = _text(_capital(sentence(finding) or finding.bug))
    return f"<article>\n<h2>{heading}</h2>\n<dl>\n{entries}</dl>\n</article>\n"


# --- maps of errors ---------------------------------------------------------------------------


def _maps(maps: Sequence[Map]) -> str:
    if not maps:
        return ""
    share = max(4, MOST_CELLS // len(maps))
    figures = "".join(_map(each, f"map{number}", share) for number, each in enumerate(maps))
    lead = (
        '<p class="note">Colour: the error in multiples of what rounding allows. Lines across a '
        "map, or ticks where there are many: where sequences begin.</p>\n"
    )
    body = f'{lead}{_scale()}<div class="maps">\n{figures}</div>\n'
    return _section("Where the error lies", body)


def _scale() -> str:
    """The legend of all maps."""
    last = len(MAP_EDGES)
    boxes = "".join(f'<path class="h{n}" d="M{n} 0h1v1h-1z"/>' for n in range(last + 1))
    names = "".join(
        f'<span style="left:{100 * (n + 1) / (last + 1):g}%">{name}</span>'
        for n, name in enumerate(MAP_NAMES)
    )
    return (
        '<ul class="scale">\n<li class="strip">'
        f'<svg viewBox="0 0 {last + 1} 1" preserveAspectRatio="none" aria-hidden="true">{boxes}'
        f'</svg><div class="ticks across">{names}</div>errors up to 1 are allowed</li>\n'
        '<li><span class="swatch infinite"></span>infinite</li>\n'
        '<li><span class="swatch blank"></span>no data</li>\n</ul>\n'
    )


def _map(given: Map, name: str, most: int) -> str:
    """One map. Long ones lie on their side, so that tokens run from left to right."""
    values = np.atleast_2d(np.asarray(given.values, dtype=np.float64))
    caption = given.caption.rstrip(". ")
    said = f"<strong>{_text(given.tensor)}</strong>{_text(f': {caption}' if caption else '')}"
    if values.ndim != 2 or values.size == 0:
        return f"<figure>\n<figcaption>{said}. No data.</figcaption>\n</figure>\n"
    starts = sorted(b for b in given.boundaries if 0 <= b <= values.shape[0])  # empty ones too
    found = _worst(values, given, starts)
    down, across = given.rows, given.columns
    lying = values.shape[0] >= 2 * values.shape[1]
    if lying:
        values, down, across = values.T, across, down
    cuts: tuple[Sequence[int], Sequence[int]] = ([], starts) if lying else (starts, [])
    edges = _edges(values.shape, most, cuts)
    rows, columns = values.shape
    reduced = max(int(np.diff(edge).max()) for edge in edges)
    if reduced > 1:
        found += " Reduced: a cell shows the largest of those it covers."
    small = np.fmax.reduceat(np.fmax.reduceat(values, edges[0][:-1], 0), edges[1][:-1], 1)
    square = columns < 2 * rows
    if square:
        wide, tall = max(6, 1.75 * columns), f"aspect-ratio:{columns}/{rows};max-height:40rem"
    else:
        wide, tall = max(8, 3 * columns), f"height:{min(max(0.95 * rows, 3), 20):g}rem"
    few = len(starts) <= MOST_LINES
    reach = 1.0 if few else 0.04
    lines = "".join(
        f"M{at} 0V{reach * rows:g}" if lying else f"M0 {at}H{reach * columns:g}"
        for at in sorted(set(starts))
        if 0 < at < len(given.values)
    )
    labels = _sequence_ticks(starts, columns) if lying and len(starts) > 1 else ""
    halo = f'<path class="halo" d="{lines}"/>' if few else ""
    cut = f'{halo}<path class="cut" d="{lines}"/>' if lines else ""
    ground = " blank" if np.isnan(small).any() else ""
    svg = (
        f'<svg viewBox="0 0 {columns} {rows}" preserveAspectRatio="none" role="img" '
        f'aria-labelledby="{name}t {name}d">'
        f'<title id="{name}t">{_text(given.tensor)}: error by {_text(down)} and {_text(across)}'
        f'</title><desc id="{name}d">{found}</desc>\n{_runs(small, edges)}{cut}</svg>'
    )
    return (
        f'<figure class="{"square" if square else "wide"}">\n'
        f"<figcaption>{said}. {found}</figcaption>\n"
        f'<div class="plot" style="max-width:{wide + 2.6:g}rem">\n{labels}'
        f'<div class="ticks down" aria-hidden="true">{_ticks(rows, "top", 8 if square else 16)}'
        f'</div><div class="cells{ground}" style="{tall}">{svg}</div>\n'
        f'<div class="mid ticks across" aria-hidden="true">{_ticks(columns, "left", 6)}</div>\n'
        f'<div class="mid name">{_text(across)} (across), {_text(down)} (down)</div>\n'
        "</div>\n</figure>\n"
    )


def _worst(values: np.ndarray, given: Map, starts: list[int]) -> str:
    """Where the largest error stands, and how much is above what is allowed; escaped."""
    there = int(np.count_nonzero(~np.isnan(values)))
    if not there:
        return "No data."
    row, column = np.unravel_index(int(np.nanargmax(values)), values.shape)
    place = f"{_numbered(given.rows, int(row))}, {_numbered(given.columns, int(column))}"
    sequence = bisect_right(starts, int(row)) - 1
    if len(starts) > 1 and sequence >= 0:
        within = _numbered(given.rows, int(row) - starts[sequence])
        place += f", which is {within} of sequence {sequence}"
    above = int(np.count_nonzero(values > 0))
    most = f"Largest error: {_times(float(values[row, column]))}, at {place}."
    return _text(f"{most} Above what is allowed: {above:,} of {there:,}.")


def _numbered(what: str, index: int) -> str:
    """ "token 7", and of "line of 3 tokens" "line 7"."""
    return f"{what.partition(' of ')[0]} {index}"


def _times(power: float) -> str:
    if power == math.inf:
        return "infinite"
    if power > 9:
        return f"10^{power:.0f} times the allowed one"
    if power < 2:
        return f"{10**power:.2g} times the allowed one"
    return f"{round(10**power, 2 - math.floor(power)):,.0f} times the allowed one"


def _edges(
    shape: tuple[int, ...], most: int, cuts: tuple[Sequence[int], Sequence[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Where the cells that are drawn begin, by rows and columns; a sequence starts a new cell."""
    short = max(1, min(*shape, math.isqrt(most)))
    long = max(1, min(MOST_ACROSS, most // short))
    limits = (short, long) if shape[0] <= shape[1] else (long, short)
    return (
        _edges_of(shape[0], limits[0], cuts[0]),
        _edges_of(shape[1], limits[1], cuts[1]),
    )


def _edges_of(size: int, most: int, cuts: Sequence[int]) -> np.ndarray:
    if size <= most:
        return np.arange(size + 1)
    kept = [cut for cut in cuts if 0 < cut < size]
    kept = kept if len(kept) <= most // 2 else []
    even = np.linspace(0, size, most - len(kept) + 1).astype(np.int64)
    return np.unique(np.concatenate([even, np.asarray(kept, dtype=np.int64)]))


def _runs(values: np.ndarray, edges: tuple[np.ndarray, np.ndarray]) -> str:
    """The cells, those of equal colour beside each other as one, a path for every colour."""
    colours = np.digitize(values, MAP_EDGES, right=True)
    colours[np.isposinf(values)] = len(MAP_EDGES) + 1
    colours[np.isnan(values)] = -1  # not drawn: the hatched ground shows
    tops, lefts = ([int(edge) for edge in each] for each in edges)
    paths: dict[int, list[str]] = {}
    for row, line in enumerate(colours):
        height = tops[row + 1] - tops[row]
        stops = [0, *(np.flatnonzero(np.diff(line)) + 1).tolist(), len(line)]
        for start, stop in pairwise(stops):
            wide = lefts[stop] - lefts[start]
            run = f"M{lefts[start]} {tops[row]}h{wide}v{height}h-{wide}z"
            paths.setdefault(int(line[start]), []).append(run)
    names = [*(f"h{n}" for n in range(len(MAP_EDGES) + 1)), "infinite"]
    return "\n".join(
        f'<path class="{names[colour]}" d="{"".join(runs)}"/>'
        for colour, runs in sorted(paths.items())
        if colour >= 0
    )


def _ticks(size: int, side: str, most: int) -> str:
    """Numbers of rows or columns, each at the middle of its cell."""
    step = next(s for s in _steps(1) if size <= s * most)
    return "".join(
        f'<span style="{side}:{100 * (at + 0.5) / size:.4g}%">{at}</span>'
        for at in range(0, size, int(step))
    )


def _sequence_ticks(starts: Sequence[int], columns: int) -> str:
    """Above a map that lies: the numbers of the sequences that are wide enough to have one."""
    spans = list(pairwise([*starts, columns]))
    wide = [(n, a, b) for n, (a, b) in enumerate(spans) if (b - a) / columns >= 0.045]
    if not wide:
        return ""
    numbers = "".join(
        f'<span style="left:{50 * (a + b) / columns:.4g}%">{n}</span>' for n, a, b in wide
    )
    return (
        '<div class="ticks above" aria-hidden="true"><span class="lead">seq.</span></div>'
        f'<div class="ticks above" aria-hidden="true">{numbers}</div>\n'
    )


def _steps(smallest: float) -> Iterable[float]:
    """1, 2, 5, 10, 20, ... times ``smallest``."""
    return (smallest * factor * 10**power for power in count() for factor in (1, 2, 5))


# --- slopes by sequence -------------------------------------------------------------------------


def _charts(levels: Sequence[Level], predicted: Curves | None) -> str:
    numbers = _sequence_numbers(levels)
    each = sorted(set(numbers))
    if len(each) < 2:
        return ""
    panels: dict[str, list[tuple[int, Level]]] = {}
    for number, level in zip(numbers, levels, strict=True):
        panels.setdefault(level.tensor, []).append((number, level))
    curves = [
        {n: curve[n] for n in each if n < len(curve) and _drawable(curve[n])}
        for curve in predicted or ()
    ]
    heights = [level.slope for level in levels if _drawable(level.slope)]
    heights += [slope for curve in curves for slope in curve.values()]
    scales = _across(each[0], each[-1]), _up(heights)
    share = max(10, MOST_POINTS // len(panels))
    figures = "".join(
        _chart(tensor, _furthest(points, share, lambda point: point[1]), curves, scales, f"c{n}")
        for n, (tensor, points) in enumerate(panels.items())
    )
    kinds = [
        (any(_drawable(level.slope) and not _loose(level) for level in levels), "dots", "slope"),
        (any(map(_loose, levels)), "holes", f"slope that leaves more than {LOOSE:.0%} unexplained"),
        (any(not _drawable(level.slope) for level in levels), "cross", "no slope"),
        (bool(curves), "curve", "predicted by the bug named above"),
        (True, "one", "1: both sides agree"),
    ]
    legend = "".join(
        f'<li><svg viewBox="0 0 22 12" aria-hidden="true">{_sample(kind)}</svg>{words}</li>'
        for there, kind, words in kinds
        if there
    )
    lead = (
        '<p class="note">The factor between the two sides, by least squares, one dot a sequence. '
        "The same factor within a sequence and another one in the next points at lengths or "
        "padding.</p>\n"
    )
    body = f'{lead}<ul class="legend">{legend}</ul>\n<div class="charts">\n{figures}</div>\n'
    return _section("Slopes by sequence", body)


def _sequence_numbers(levels: Sequence[Level]) -> list[int]:
    """The number in each key, or, where a key has none, its place among those of its tensor."""
    places: dict[str, int] = {}
    numbers = []
    for level in levels:
        place = places[level.tensor] = places.get(level.tensor, -1) + 1
        digits = re.search(r"[0-9]{1,7}", level.key)
        numbers.append(int(digits[0]) if digits else place)
    return numbers


def _drawable(slope: float) -> bool:
    return abs(slope) < 1e12


def _loose(level: Level) -> bool:
    return _drawable(level.slope) and not level.residual <= LOOSE


Scale = tuple[Callable[[float], float], list[float]]


def _across(first: int, last: int) -> Scale:
    """Place of a sequence's number on the chart, and the numbers that stand below it."""
    left, right = CHART[2:4]
    span = last - first + 1
    step = int(next(s for s in _steps(1) if span <= s * 8))
    ticks = [float(n) for n in range(first, last + 1) if n % step == 0]
    return lambda number: left + (number - first + 0.5) / span * (right - left), ticks


def _up(heights: Sequence[float]) -> Scale:
    """Place of a slope on the chart and the numbers beside it; logarithmic where they need it."""
    top, bottom = CHART[4:6]
    low, high = min([1.0, *heights]), max([1.0, *heights])
    powers = low > 0 and high / low > 20
    if powers:
        low, high = math.log10(low), math.log10(high)
    room = max((high - low) * 0.08, 0.0 if powers else 0.05)
    low, high = low - room, high + room
    step = next(s for s in _steps(1.0 if powers else 1e-2) if (high - low) / s <= 5)
    marks = [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
    ticks = [10**mark if powers else round(mark, 2) for mark in marks]

    def place(slope: float) -> float:
        value = math.log10(slope) if powers else slope
        return bottom - (value - low) / (high - low) * (bottom - top)

    return place, ticks


def _chart(
    tensor: str,
    points: Sequence[tuple[int, Level]],
    curves: Sequence[dict[int, float]],
    scales: tuple[Scale, Scale],
    name: str,
) -> str:
    width, height, left, right, top, bottom = CHART
    (x, below), (y, beside) = scales
    foretold = [[(x(n), y(curve[n])) for n, _ in points if n in curve] for curve in curves]
    lines = "".join(f'<path class="curve" d="{_curve(places)}"/>' for places in foretold)
    drawn = [(n, level) for n, level in points if _drawable(level.slope)]
    dots = "".join(f"M{x(n):.1f} {y(level.slope):.1f}h0" for n, level in drawn)
    holes = "".join(f"M{x(n):.1f} {y(level.slope):.1f}h0" for n, level in drawn if _loose(level))
    crosses = "".join(
        f"M{x(n) - 3:.1f} {bottom - 8}l6 6m0-6l-6 6"
        for n, level in points
        if not _drawable(level.slope)
    )
    size = 6.5 if len(points) <= 40 else 4.0 if len(points) <= 150 else 2.5
    numbers = "".join(
        f'<text x="{left - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:,g}</text>'
        f'<path class="frame" d="M{left} {y(tick):.1f}h-3"/>'
        for tick in beside
    ) + "".join(
        f'<text x="{x(tick):.1f}" y="{bottom + 15}" text-anchor="middle">{tick:.0f}</text>'
        for tick in below
    )
    slopes = [level.slope for _, level in drawn]
    span = f"from {min(slopes):.4g} to {max(slopes):.4g}" if slopes else "none"
    few = "no slope at" if not slopes else "slopes of"
    return (
        f"<figure>\n<figcaption><strong>{_text(tensor)}</strong></figcaption>\n"
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-labelledby="{name}t {name}d">'
        f'<title id="{name}t">{_text(tensor)}: slope by sequence</title>'
        f'<desc id="{name}d">{few} {len(points):,} sequences, {span}</desc>\n'
        f'<path class="frame" d="M{left} {top}V{bottom}H{right}"/>{numbers}'
        f'<text x="{(left + right) / 2:g}" y="{height - 6}" text-anchor="middle">sequence</text>\n'
        f'<path class="one" d="M{left} {y(1.0):.1f}H{right}"/>{lines}'
        f'<path class="dots" stroke-width="{size}" d="{dots}"/>'
        f'<path class="holes" stroke-width="{size / 2}" d="{holes}"/>'
        f'<path class="cross" d="{crosses}"/>\n</svg>\n</figure>\n'
    )


def _curve(places: Sequence[tuple[float, float]]) -> str:
    """A line from sequence to sequence; a dash for each where there are too many of them."""
    if len(places) > MOST_LINES:
        return "".join(f"M{x - 3:.1f} {y:.1f}h6" for x, y in places)
    return "".join(f"{'L' if n else 'M'}{x:.1f} {y:.1f}" for n, (x, y) in enumerate(places))


def _sample(kind: str) -> str:
    """A mark of the charts, for the legend."""
    dot = '<path class="dots" stroke-width="6.5" d="M11 6h0"/>'
    return {
        "dots": dot,
        "holes": f'{dot}<path class="holes" stroke-width="3.25" d="M11 6h0"/>',
        "cross": '<path class="cross" d="M8 3l6 6m0-6l-6 6"/>',
    }.get(kind, f'<path class="{kind}" d="M0 6H22"/>')


# --- tables -------------------------------------------------------------------------------------


def _ladder(checks: Sequence[Check]) -> str:
    """The invariants, side by side of the comparison: a rung each."""
    if not checks:
        return ""
    lead = (
        '<p class="note">What must hold on each side alone, whatever the other side says. '
        "A dot right of its mark has more error than is allowed.</p>\n"
    )
    parts = [lead]
    for side in dict.fromkeys(check.side for check in checks):
        here = [check for check in checks if check.side == side]
        parts.append(f"<h3>{_text(side)}</h3>\n")
        heads = ("verdict", "name", "identity", "value", "allowed", "margin")
        rows = "".join(_rung(check) for check in here)
        parts.append(_table(heads, rows, f"Identities of {side}"))
    return _section("Identities that need no reference", "".join(parts))


def _rung(check: Check) -> str:
    tone = VERDICTS.get(check.verdict, "none")
    verdict = "no data" if check.verdict == "-" else check.verdict
    place = check.place
    where = f'<span class="where">{_text(place)}</span>' if place else ""
    return (
        f'<tr><td class="mark {tone}">{_text(verdict)}</td><th scope="row">{_text(check.name)}</th>'
        f'<td class="words">{_text(check.text)}{where}</td>{_cell(readable(check.value))}'
        f'{_cell(readable(check.allowed))}<td class="rung {tone}">{_gauge(check)}</td></tr>\n'
    )


def _gauge(check: Check) -> str:
    """A dot on a line of decades, the mark in the middle being what is allowed."""
    if math.isnan(check.value) or math.isnan(check.allowed) or check.verdict == "-":
        return ""
    value, allowed = abs(check.value), abs(check.allowed)
    decades = 4.0 if value > allowed else -4.0
    if 0 < value < math.inf and 0 < allowed < math.inf:
        decades = min(4.0, max(-4.0, math.log10(value) - math.log10(allowed)))
    return (
        '<svg viewBox="0 0 104 12" aria-hidden="true"><path d="M2 6H102"/>'
        f'<path class="limit" d="M52 1V11"/><circle cx="{52 + 12.5 * decades:.1f}" cy="6" r="3.2"/>'
        "</svg>"
    )


def _by_tensor_and_kind(levels: Sequence[Level]) -> Iterator[tuple[Level | None, list[Level]]]:
    """The levels of one tensor and kind together, with the one of the whole tensor."""
    whole = {level.tensor: level for level in reversed(levels) if level.level == "all"}
    groups: dict[tuple[str, str], list[Level]] = {}
    for level in levels:
        groups.setdefault((level.tensor, level.level), []).append(level)
    for (tensor, kind), group in groups.items():
        yield (None if kind == "all" else whole.get(tensor)), group


def _telling(levels: Sequence[Level]) -> list[Level]:
    """Without the parts of tensors that agree as a whole and in each of these parts."""
    return [
        level
        for whole, group in _by_tensor_and_kind(levels)
        if whole is None or off(whole) or not alike(group, whole)
        for level in group
    ]


def _merged(levels: Sequence[Level]) -> list[Level]:
    """One line for parts that all say what their whole says."""
    merged: list[Level] = []
    for whole, group in _by_tensor_and_kind(levels):
        if whole is None or len(group) == 1 or not alike(group, whole):
            merged += group
        else:
            merged.append(replace(whole, level=group[0].level, key=f"all {len(group)} alike"))
    return merged


def _slopes(levels: Sequence[Level]) -> str:
    """Whole tensors in the open, their parts folded away."""
    if not levels:
        return ""
    groups: dict[str, dict[str, list[Level]]] = {}
    for level in levels:
        groups.setdefault(level.level, {}).setdefault(level.tensor, []).append(level)
    share = max(1, MOST_ROWS // sum(len(tensors) for tensors in groups.values()))
    parts = [
        '<p class="note">Slope: the factor between the two sides, by least squares; 1 where they '
        "agree. Residual: what the slope leaves, relative to the size of the part. Error: the "
        "largest difference.</p>\n"
    ]
    for kind in sorted(groups, key=lambda kind: kind != "all"):
        every = [level for tensor in groups[kind].values() for level in tensor]
        kept = [
            level
            for tensor in groups[kind].values()
            for level in _furthest(tensor, share, lambda level: level)
        ]
        heads = ("tensor", "part", "slope", "residual", "error")
        rows = "".join(_slope(level) for level in kept)
        table = _table(heads, rows, f"Slopes by {kind}", full=False)
        if kind == "all":
            parts.append(table)
            continue
        less = f"the {len(kept):,} worst of " if len(kept) < len(every) else ""
        summary = f"<summary>By {_text(kind)} ({less}{len(every):,})</summary>"
        parts.append(f"<details>{summary}\n{table}</details>\n")
    return _section("Slopes and residuals", "".join(parts))


def _slope(level: Level) -> str:
    return (
        f'<tr><th scope="row">{_text(level.tensor)}</th><td>{_text(level.key or level.level)}</td>'
        f"{_cell(readable(level.slope, '.5g'))}{_cell(readable(level.residual, '.1%'))}"
        f"{_cell(readable(level.error))}</tr>\n"
    )


def _furthest(items: list[Item], most: int, level: Callable[[Item], Level]) -> list[Item]:
    """At most so many, those furthest from agreement, in their old order."""

    def badness(place: int) -> float:
        found = level(items[place])
        off = abs(found.slope - 1) + found.residual
        return math.inf if math.isnan(off) else off

    if len(items) <= most:
        return items
    worst = sorted(range(len(items)), key=badness, reverse=True)[:most]
    return [items[place] for place in sorted(worst)]


def _table(heads: Sequence[str], rows: str, label: str, *, full: bool = True) -> str:
    """A table in a box of its own, which scrolls when it is wider than the page."""
    kinds = dict.fromkeys(("value", "allowed", "slope", "residual", "error"), ' class="number"')
    kinds["margin"] = ' class="rung"'
    head = "".join(f'<th scope="col"{kinds.get(name, "")}>{name}</th>' for name in heads)
    return (
        f'<div class="box" tabindex="0" role="region" aria-label="{_text(label)}">\n'
        f'<table class="{"full" if full else "short"}">\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}</tbody>\n</table>\n</div>\n"
    )


# --- words --------------------------------------------------------------------------------------


def _section(heading: str, body: str) -> str:
    return f"<section>\n<h2>{heading}</h2>\n{body}</section>\n"


def _list(items: Sequence[str]) -> str:
    if not items:
        return ""
    return f"<ul>{''.join(f'<li>{_text(item)}</li>' for item in items)}</ul>"


def _cell(shown: str) -> str:
    return f'<td class="number">{shown}</td>'


def _capital(title: str) -> str:
    """With a capital letter, but for the names of arrays and arguments."""
    first = title.partition(" ")[0]
    plain = first.isalpha() and first not in ARRAYS
    return title[:1].upper() + title[1:] if plain else title


def _number_word(number: int) -> str:
    return NUMBERS[number] if number < len(NUMBERS) else f"{number:,}"


def _text(given: str) -> str:
    """Text as HTML, without the characters that could hide or turn what stands around them."""
    shown = (c if c.isprintable() or c == "\n" else " " if c.isspace() else "\ufffd" for c in given)
    return escape("".join(shown))
