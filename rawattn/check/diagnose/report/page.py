"""One self-contained page of a diagnosis: the verdict first, then maps of errors, then tables.

The page needs nothing but itself: no script, no fonts, no links. Every colour has a word beside it.
"""

from collections.abc import Sequence
from html import escape
from itertools import pairwise

import numpy as np

from rawattn.check.diagnose.evidence.picture import picture
from rawattn.check.diagnose.evidence.structure import off
from rawattn.check.diagnose.findings import Check, Diagnosis, Finding, Level, Map
from rawattn.check.diagnose.report import words

MAP_EDGES = (-2, -1, 0, 1, 2, 3, 4)  # log10 of error over allowance: where the colours change
MAP_NAMES = (*(f"up to {10.0**edge:,g}" for edge in MAP_EDGES), "above")
WRONG, DOUBT, RIGHT = "wrong", "doubt", "right"
TONES = {"vacuous": DOUBT, "rounding": RIGHT}  # any other finding: something is wrong
VERDICTS = {"pass": RIGHT, "FAIL": WRONG, "vacuous": DOUBT}
COUNTS = dict(enumerate(("two", "three", "four", "five"), start=2))

STYLE = """
:root { color-scheme: light dark; --rule: light-dark(#dbd7cd, #393d42);
  --quiet: light-dark(#595f66, #a6abb0); }
body { margin: 0 auto; max-width: 62rem; padding: 2rem; overflow-wrap: anywhere;
  background: light-dark(#fbfaf7, #17191c); color: light-dark(#202327, #e6e3dc);
  font: 1.0625rem/1.5 system-ui, sans-serif; }
article { margin-top: 1.5rem; border-top: 1px solid var(--rule); }
p, li { max-width: 46rem; white-space: pre-line; }
.note, figcaption, dt, summary, thead { color: var(--quiet); font-size: .9rem; }
.wrong { color: light-dark(#a3251b, #f2917f); } .right { color: light-dark(#1c6a3c, #7fca99); }
.doubt { color: light-dark(#7a5100, #e2b65e); }
dl { display: grid; grid-template-columns: 8rem 1fr; gap: .5rem 1rem; }
dd, dd ul { margin: 0; padding: 0; white-space: pre-line; }
svg { border: 1px solid var(--rule); }
figure { margin: 1.5rem 0; } figure svg { width: 100%; }
.h0 { fill: light-dark(#f0f1ee, #1f2327); } .h1 { fill: light-dark(#dfe5e8, #29323a); }
.h2 { fill: light-dark(#c9d5dc, #364651); } .h3 { fill: light-dark(#efb75c, #93431d); }
.h4 { fill: light-dark(#ea9645, #b9581f); } .h5 { fill: light-dark(#d35b2c, #da7c2e); }
.h6 { fill: light-dark(#a32a22, #f0aa4c); } .h7 { fill: light-dark(#65101d, #fbe19c); }
.cut { stroke: currentColor; vector-effect: non-scaling-stroke; }
.scale { display: flex; flex-wrap: wrap; gap: 1rem; list-style: none; padding: 0; }
.scale svg { width: 1.6rem; height: .8rem; margin-right: .4rem; }
.box { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; overflow-wrap: normal; }
th, td { text-align: left; vertical-align: baseline; padding: .3rem 1.1rem .3rem 0;
  border-bottom: 1px solid var(--rule); }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
"""


def page(diagnosis: Diagnosis, *, full: bool = False) -> str:
    """The page as HTML text; to be written as UTF-8. full: slopes of parts that agree too."""
    verdict, tone = _verdict(diagnosis)
    levels = [x for x in diagnosis.levels if full or x.level == "all" or off(x)]
    title = ": ".join(part for part in (diagnosis.title, verdict) if part)
    sections = (
        _element("p", _text(diagnosis.title), "note"),
        _element("h1", _text(verdict), tone),
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
        f"<body>\n{''.join(sections)}</body>\n</html>\n"
    )


def _verdict(diagnosis: Diagnosis) -> tuple[str, str]:
    """The page's first words, and their tone."""
    tones = [TONES.get(finding.bug, WRONG) for finding in diagnosis.findings]
    if WRONG not in tones:
        return ("Nothing was shown", DOUBT) if DOUBT in tones else ("Nothing is wrong", RIGHT)
    pairs = zip(diagnosis.findings, tones, strict=True)
    wrong = [finding.side for finding, tone in pairs if tone == WRONG]
    sides = list(dict.fromkeys(wrong))
    named = " and ".join(filter(None, sides)) or "something"
    named = named.capitalize() if named.replace(" ", "").islower() else named
    ways = f" in {COUNTS.get(len(wrong), len(wrong))} ways" if len(wrong) > len(sides) == 1 else ""
    verb = "are" if len(sides) > 1 or named.startswith("Both") else "is"
    return f"{named} {verb} wrong{ways}", WRONG


def _finding(finding: Finding) -> str:
    meaning = words.SURE.get(finding.confidence, "")
    sight = finding.proof.sight if finding.proof else None
    rows = (
        ("Side", _text(finding.side)),
        ("Where", _text(finding.where)),
        ("Who sees whom", _element("pre", _text("\n".join(picture(sight)))) if sight else ""),
        ("Look at", _text(finding.look_at)),
        ("Confidence", _text(finding.confidence + (f": {meaning}" if meaning else ""))),
        ("Evidence", _list(tuple(dict.fromkeys(finding.evidence)))),
        ("Looks the same", _list(finding.alternatives)),
        ("Class", _element("code", _text(finding.bug))),
    )
    entries = "".join(f"<dt>{name}</dt><dd>{value}</dd>\n" for name, value in rows if value)
    heading = _element("h2", _text(words.sentence(finding) or finding.bug))
    return _element("article", heading + _element("dl", entries))


# --- maps of errors ---------------------------------------------------------------------------


def _maps(maps: Sequence[Map]) -> str:
    legend = "".join(
        f'<li><svg viewBox="0 0 1 1"><path class="h{n}" d="M0 0h1v1h-1z"/></svg>{name}</li>'
        for n, name in enumerate(MAP_NAMES)
    )
    lead = (
        "Colour: the error in multiples of what rounding allows; empty: no data. Lines across a "
        "map: where sequences begin."
    )
    figures = "".join(map(_map, maps))
    body = f'<ul class="scale note">{legend}</ul>\n{figures}' if maps else ""
    return _section("Where the error lies", lead, body)


def _map(given: Map) -> str:
    """One map, tokens from left to right."""
    values = np.asarray(given.values, dtype=np.float64).T
    rows, columns = values.shape
    said = f"{given.tensor}: {given.caption}; {given.rows} (across), {given.columns} (down). "
    if not values.size or np.isnan(values).all():
        return _element("figure", _element("figcaption", _text(f"{said}No data.")))
    row, column = (int(n) for n in np.unravel_index(int(np.nanargmax(values)), values.shape))
    largest = f"{10 ** min(values[row, column], 99):.2g} times the allowed one"
    said += f"Largest error: {largest}, at {given.rows} {column}, {given.columns} {row}. "
    said += f"Above what is allowed: {(values > 0).sum():,} of {(~np.isnan(values)).sum():,}."
    cuts = "".join(f"M{at} 0V{rows}" for at in given.boundaries if 0 < at < columns)
    return _element(
        "figure",
        _element("figcaption", _text(said))
        + f'<svg viewBox="0 0 {columns} {rows}" preserveAspectRatio="none" role="img" '
        f'aria-label="errors of {_text(given.tensor)}" height="{min(20 * rows, 400)}">'
        f'{_runs(values)}<path class="cut" d="{cuts}"/></svg>\n',
    )


def _runs(values: np.ndarray) -> str:
    """The cells, those of equal colour beside each other as one, a path for every colour."""
    colours = np.digitize(values, MAP_EDGES, right=True)
    colours[np.isnan(values)] = -1  # not drawn
    paths: dict[int, list[str]] = {}
    for row, line in enumerate(colours):
        for start, stop in pairwise([0, *(np.flatnonzero(np.diff(line)) + 1), len(line)]):
            run = f"M{start} {row}h{stop - start}v1h-{stop - start}z"
            paths.setdefault(int(line[start]), []).append(run)
    return "\n".join(
        f'<path class="h{colour}" d="{"".join(runs)}"/>'
        for colour, runs in sorted(paths.items())
        if colour >= 0
    )


# --- tables -------------------------------------------------------------------------------------


def _identities(checks: Sequence[Check]) -> str:
    """What must hold on each side alone."""
    tones = [VERDICTS.get(check.verdict, "note") for check in checks]
    table = _table(words.CHECKS, words.of_checks(checks), tones)
    lead = "What must hold on each side alone, whatever the other side says."
    return _section("Identities that need no reference", lead, table)


def _slopes(levels: Sequence[Level]) -> str:
    """Whole tensors in the open, their parts folded away."""
    parts = []
    for kind in sorted({level.level for level in levels}, key=lambda kind: (kind != "all", kind)):
        rows = words.of_levels(level for level in levels if level.level == kind)
        table = _table(words.LEVELS, rows)
        summary = _element("summary", f"By {_text(kind)} ({len(rows):,})")
        parts.append(table if kind == "all" else _element("details", summary + table))
    lead = (
        "Slope: the factor between the two sides, by least squares; 1 where they agree. Residual: "
        "what the slope leaves, relative to the size of the part."
    )
    return _section("Slopes and residuals", lead, "".join(parts))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], tones: Sequence[str] = ()) -> str:
    """A table in a box that scrolls when it is wider than the page. tones: of the first cells."""
    if not rows:
        return ""
    kinds = ["number" if head in words.FIGURES else "" for head in heads]
    lines = []
    for n, row in enumerate(rows):
        of_row = [tones[n], *kinds[1:]] if tones else kinds
        cells = (_cell("td", _text(x), kind) for x, kind in zip(row, of_row, strict=True))
        lines.append(f"<tr>{''.join(cells)}</tr>\n")
    top = "".join(_cell("th", head, kind) for head, kind in zip(heads, kinds, strict=True))
    return (
        f'<div class="box" tabindex="0">\n<table>\n<thead><tr>{top}</tr></thead>\n'
        f"<tbody>\n{''.join(lines)}</tbody>\n</table>\n</div>\n"
    )


# --- words --------------------------------------------------------------------------------------


def _section(heading: str, lead: str, body: str) -> str:
    """Nothing without a body."""
    return _element(
        "section", f"<h2>{heading}</h2>\n{_element('p', lead, 'note')}{body}" * bool(body)
    )


def _element(tag: str, body: str, kind: str = "") -> str:
    """Nothing without a body."""
    return _cell(tag, body, kind) + "\n" if body else ""


def _cell(tag: str, body: str, kind: str) -> str:
    return f'<{tag} class="{kind}">{body}</{tag}>' if kind else f"<{tag}>{body}</{tag}>"


def _list(items: Sequence[str]) -> str:
    return _element("ul", "".join(_cell("li", _text(item), "") for item in items))


def _text(given: str) -> str:
    """Text as HTML, without the characters that could hide or turn what stands around them."""
    shown = (c if c.isprintable() or c == "\n" else " " if c.isspace() else "\ufffd" for c in given)
    return escape("".join(shown))
