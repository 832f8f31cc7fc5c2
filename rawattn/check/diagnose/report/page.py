"""One self-contained page of a diagnosis: the verdict first, then maps of errors, then tables.

The page needs nothing but itself: no script, no fonts, no links. Colours stand in the style sheet
alone, once for light and once for dark screens; every colour has a word beside it. Long by the
style sheet and the markup, which stand beside what they show.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from html import escape
from itertools import pairwise

import numpy as np

from rawattn.check.diagnose.engine.question import STAGES
from rawattn.check.diagnose.evidence.picture import picture
from rawattn.check.diagnose.evidence.structure import off
from rawattn.check.diagnose.findings import Check, Diagnosis, Finding, Level, Map
from rawattn.check.diagnose.report.words import SURE, readable, sentence

ARRAYS = {"q", "k", "v", "dout", "dlse", *(name for names in STAGES.values() for name in names)}

# What keeps the page under a megabyte whatever it is given.
MOST_CELLS = 36_000  # of all maps together
MOST_ACROSS = 512  # cells of one map side by side: more than a screen shows
MOST_ROWS = 900  # of all tables of slopes together

MAP_EDGES = (-2, -1, 0, 1, 2, 3, 4)  # log10 of error over allowance: where the colours change
MAP_NAMES = ("0.01", "0.1", "1", "10", "100", "1,000", "10,000")
WRONG, DOUBT, RIGHT = "wrong", "doubt", "right"
TONES = {"vacuous": DOUBT, "rounding": RIGHT}  # any other finding: something is wrong
VERDICTS = {"pass": RIGHT, "FAIL": WRONG, "vacuous": DOUBT}
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

STYLE = """
:root { color-scheme: light dark;
  --paper: #fbfaf7; --ink: #202327; --quiet: #595f66; --rule: #dbd7cd; --hatch: #b3b3b0;
  --right: #1c6a3c; --wrong: #a3251b; --doubt: #7a5100;
  --h0: #f0f1ee; --h1: #dfe5e8; --h2: #c9d5dc; --h3: #efb75c; --h4: #ea9645; --h5: #d35b2c;
  --h6: #a32a22; --h7: #65101d; --infinite: #000; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #17191c; --ink: #e6e3dc; --quiet: #a6abb0; --rule: #393d42; --hatch: #55585c;
  --right: #7fca99; --wrong: #f2917f; --doubt: #e2b65e;
  --h0: #1f2327; --h1: #29323a; --h2: #364651; --h3: #93431d; --h4: #b9581f; --h5: #da7c2e;
  --h6: #f0aa4c; --h7: #fbe19c; --infinite: #fff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); overflow-wrap: anywhere;
  font: 1.0625rem/1.5 system-ui, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: clamp(1rem, 4vw, 3rem); }
h1, h2, h3 { line-height: 1.2; text-wrap: balance; }
h2 { margin-top: 3rem; }
p, ul { max-width: 46rem; }
li { margin: .3rem 0; white-space: pre-line; }
code, pre { font: .86em ui-monospace, Menlo, Consolas, monospace; }
.note, figcaption, dt, summary, thead { color: var(--quiet); font-size: .9rem; }
.wrong { color: var(--wrong); } .right { color: var(--right); } .doubt { color: var(--doubt); }
article { margin-top: 1.5rem; border-top: 1px solid var(--rule); }
article h2 { margin-top: 1.5rem; }
dl { display: grid; grid-template-columns: 8rem 1fr; gap: .5rem 1rem; }
dd { margin: 0; white-space: pre-line; }
dd ul { margin: 0; padding-left: 1.1rem; }
figure { margin: 1.5rem 0; }
.cells { overflow: hidden; border: 1px solid var(--rule); margin-top: .4rem; }
.blank { background: repeating-linear-gradient(135deg, var(--hatch) 0 2px, transparent 2px 5px); }
.cells svg { display: block; width: 100%; height: 100%; }
.cells path { shape-rendering: crispEdges; }
.h0 { fill: var(--h0); } .h1 { fill: var(--h1); } .h2 { fill: var(--h2); } .h3 { fill: var(--h3); }
.h4 { fill: var(--h4); } .h5 { fill: var(--h5); } .h6 { fill: var(--h6); } .h7 { fill: var(--h7); }
.infinite { fill: var(--infinite); }
.cut { fill: none; stroke: var(--ink); vector-effect: non-scaling-stroke; }
.scale { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; list-style: none; padding: 0; }
.scale svg { width: 1.6rem; height: .8rem; margin-right: .4rem; border: 1px solid var(--rule); }
.box { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
caption { text-align: left; color: var(--quiet); }
th, td { text-align: left; vertical-align: baseline; padding: .3rem 1.1rem .3rem 0;
  border-bottom: 1px solid var(--rule); overflow-wrap: normal; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
@media (max-width: 34rem) { dl { grid-template-columns: 1fr; gap: 0; } }
@media print { .box { overflow: visible; } article, figure, tr { break-inside: avoid; } }
"""


def page(diagnosis: Diagnosis, *, full: bool = False) -> str:
    """The page as HTML text; to be written as UTF-8. full: slopes of parts that agree too."""
    verdict, tone = _verdict(diagnosis)
    levels = [x for x in diagnosis.levels if full or x.level == "all" or off(x)]
    title = ": ".join(part for part in (diagnosis.title, verdict) if part)
    sections = (
        f"<header>\n{_element('p', diagnosis.title, 'note')}"
        f'<h1 class="{tone}">{_text(verdict)}</h1>\n'
        f"<p>{_tally(diagnosis.checks)}</p>\n</header>\n",
        *(_finding(finding) for finding in diagnosis.findings),
        _maps(diagnosis.maps),
        _identities(diagnosis.checks),
        _slopes(levels),
        _section("What was compared", "", _list(diagnosis.facts)),
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
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


def _tally(checks: Sequence[Check]) -> str:
    """How many of the identities hold."""
    judged = [check for check in checks if check.verdict in ("pass", "FAIL")]
    if not judged:
        return "No identity could be checked on one side alone."
    failed = sum(check.verdict == "FAIL" for check in judged)
    ies = "y" if len(judged) == 1 else "ies"
    fail = f"{_number_word(failed)} fail" if failed > 1 else "one fails" if failed else "none fails"
    return f"Of {_number_word(len(judged))} identit{ies} checked without a reference {fail}."


def _finding(finding: Finding) -> str:
    meaning = SURE.get(finding.confidence, "")
    sight = finding.proof.sight if finding.proof else None
    rows = (
        ("Side", _text(finding.side)),
        ("Where", _text(finding.where)),
        ("Who sees whom", _element("pre", "\n".join(picture(sight))) if sight else ""),
        ("Look at", _text(finding.look_at)),
        ("Confidence", _text(finding.confidence + (f": {meaning}" if meaning else ""))),
        ("Evidence", _list(tuple(dict.fromkeys(finding.evidence)))),
        ("Looks the same", _list(finding.alternatives)),
        ("Class", _element("code", finding.bug)),
    )
    entries = "".join(f"<dt>{name}</dt><dd>{value}</dd>\n" for name, value in rows if value)
    heading = _text(_capital(sentence(finding) or finding.bug))
    return f"<article>\n<h2>{heading}</h2>\n<dl>\n{entries}</dl>\n</article>\n"


# --- maps of errors ---------------------------------------------------------------------------


def _maps(maps: Sequence[Map]) -> str:
    share = max(4, MOST_CELLS // max(len(maps), 1))
    figures = "".join(_map(each, f"map{number}", share) for number, each in enumerate(maps))
    names = [f"up to {name}" for name in MAP_NAMES] + [f"above {MAP_NAMES[-1]}"]
    shown = [*((f"h{n}", name) for n, name in enumerate(names)), ("infinite", "infinite")]
    legend = "".join(
        f'<li><svg viewBox="0 0 1 1" preserveAspectRatio="none" aria-hidden="true">'
        f'<path class="{colour}" d="M0 0h1v1h-1z"/></svg>{name}</li>'
        for colour, name in shown
    )
    lead = (
        "Colour: the error in multiples of what rounding allows; hatched: no data. Lines across a "
        "map: where sequences begin."
    )
    body = f'<ul class="scale note">{legend}</ul>\n{figures}' if maps else ""
    return _section("Where the error lies", lead, body)


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
    cuts: list[list[int]] = [starts, []]
    lying = values.shape[0] >= 2 * values.shape[1]
    if lying:
        values, down, across, cuts = values.T, across, down, cuts[::-1]
    rows, columns = values.shape
    short = max(1, min(rows, columns, math.isqrt(most)))
    long = max(1, min(MOST_ACROSS, most // short))
    limits = (short, long) if rows <= columns else (long, short)
    tops, lefts = (_edges(*of) for of in zip((rows, columns), limits, cuts, strict=True))
    if max(np.diff(tops).max(), np.diff(lefts).max()) > 1:
        found += " Reduced: a cell shows the largest of those it covers."
    small = np.fmax.reduceat(np.fmax.reduceat(values, tops[:-1], 0), lefts[:-1], 1)
    lines = "".join(
        f"M{at} 0V{rows}" if lying else f"M0 {at}H{columns}"
        for at in sorted(set(starts))
        if 0 < at < len(given.values)
    )
    cut = f'<path class="cut" d="{lines}"/>' if lines else ""
    ground = " blank" if np.isnan(small).any() else ""
    high = f"aspect-ratio:{columns}/{rows};max-height:40rem"
    high = high if columns < 2 * rows else f"height:{min(max(0.95 * rows, 3), 20):g}rem"
    return (
        f"<figure>\n<figcaption>{said}. {found}</figcaption>\n"
        f'<div class="cells{ground}" style="{high}">'
        f'<svg viewBox="0 0 {columns} {rows}" preserveAspectRatio="none" role="img" '
        f'aria-labelledby="{name}t {name}d">'
        f'<title id="{name}t">{_text(given.tensor)}: error by {_text(down)} and {_text(across)}'
        f'</title><desc id="{name}d">{found}</desc>\n{_runs(small, tops, lefts)}{cut}</svg></div>\n'
        f'<div class="note">{_text(across)} (across), {_text(down)} (down)</div>\n</figure>\n'
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


def _edges(size: int, most: int, cuts: Sequence[int]) -> np.ndarray:
    """Where the cells that are drawn begin; a sequence starts a new cell."""
    if size <= most:
        return np.arange(size + 1)
    kept = [cut for cut in cuts if 0 < cut < size]
    kept = kept if len(kept) <= most // 2 else []
    even = np.linspace(0, size, most - len(kept) + 1).astype(np.int64)
    return np.unique(np.concatenate([even, np.asarray(kept, dtype=np.int64)]))


def _runs(values: np.ndarray, tops: np.ndarray, lefts: np.ndarray) -> str:
    """The cells, those of equal colour beside each other as one, a path for every colour."""
    colours = np.digitize(values, MAP_EDGES, right=True)
    colours[np.isposinf(values)] = len(MAP_EDGES) + 1
    colours[np.isnan(values)] = -1  # not drawn: the hatched ground shows
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


# --- tables -------------------------------------------------------------------------------------


def _identities(checks: Sequence[Check]) -> str:
    """What must hold on each side alone."""
    rows = []
    for check in checks:
        verdict = "no data" if check.verdict == "-" else check.verdict
        text = check.text + (f" ({check.place})" if check.place else "")
        numbers = readable(check.value), readable(check.allowed)
        rows.append((verdict, check.side, check.name, text, *numbers))
    tones = [VERDICTS.get(check.verdict, "note") for check in checks]
    heads = ("verdict", "side", "name", "identity", "value", "allowed")
    table = _table(heads, rows, "Identities", tones)
    lead = "What must hold on each side alone, whatever the other side says."
    return _section("Identities that need no reference", lead, table)


def _slopes(levels: Sequence[Level]) -> str:
    """Whole tensors in the open, their parts folded away."""
    groups: dict[str, list[Level]] = {}
    for level in levels:
        groups.setdefault(level.level, []).append(level)
    share = max(1, MOST_ROWS // max(len(groups), 1))
    parts = []
    for kind in sorted(groups, key=lambda kind: kind != "all"):
        every = groups[kind]
        kept = sorted(every, key=_badness)[-share:] if len(every) > share else every
        rows = [
            (
                *(level.tensor, level.key or level.level, readable(level.slope, ".5g")),
                *(readable(level.residual, ".1%"), readable(level.error)),
            )
            for level in kept
        ]
        table = _table(("tensor", "part", "slope", "residual", "error"), rows, f"Slopes by {kind}")
        less = f"the {len(kept):,} worst of " if len(kept) < len(every) else ""
        summary = f"<summary>By {_text(kind)} ({less}{len(every):,})</summary>"
        parts.append(table if kind == "all" else f"<details>{summary}\n{table}</details>\n")
    lead = (
        "Slope: the factor between the two sides, by least squares; 1 where they agree. Residual: "
        "what the slope leaves, relative to the size of the part. Error: the largest difference."
    )
    return _section("Slopes and residuals", lead, "".join(parts))


def _badness(level: Level) -> float:
    """How far from agreement."""
    off = abs(level.slope - 1) + level.residual
    return math.inf if math.isnan(off) else off


def _table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    label: str,
    tones: Sequence[str] = (),
) -> str:
    """A table in a box that scrolls when it is wider than the page. tones: of the first cells."""
    if not rows:
        return ""
    numbers = ("value", "allowed", "slope", "residual", "error")
    kinds = ["number" if head in numbers else "" for head in heads]
    top = "".join(
        f'<th scope="col"{_class(kind)}>{head}</th>'
        for head, kind in zip(heads, kinds, strict=True)
    )
    lines = []
    for n, row in enumerate(rows):
        of_row = [tones[n], *kinds[1:]] if tones else kinds
        cells = (
            f"<td{_class(kind)}>{_text(cell)}</td>" for cell, kind in zip(row, of_row, strict=True)
        )
        lines.append(f"<tr>{''.join(cells)}</tr>\n")
    return (
        f'<div class="box" tabindex="0" role="region" aria-label="{_text(label)}">\n<table>\n'
        f"<thead><tr>{top}</tr></thead>\n<tbody>\n{''.join(lines)}</tbody>\n</table>\n</div>\n"
    )


# --- words --------------------------------------------------------------------------------------


def _section(heading: str, lead: str, body: str) -> str:
    """Nothing without a body."""
    lead = _element("p", lead, "note")
    return f"<section>\n<h2>{heading}</h2>\n{lead}{body}</section>\n" if body else ""


def _element(tag: str, text: str, kind: str = "") -> str:
    return f"<{tag}{_class(kind)}>{_text(text)}</{tag}>\n" if text else ""


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def _list(items: Sequence[str]) -> str:
    if not items:
        return ""
    return f"<ul>{''.join(f'<li>{_text(item)}</li>' for item in items)}</ul>"


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
