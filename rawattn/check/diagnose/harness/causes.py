"""Which fault of a comparison explains the wrong results that it lets pass.

Long by the list of the faults.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rawattn.check.diagnose.catalogue.classes import classes_of
from rawattn.check.diagnose.findings import Finding
from rawattn.check.diagnose.harness.pairs import PLACES, SWAPPED

MULTIPLES = ("x = 0.5 ref", "x = 2 ref", "x = 4 ref")
VALUES = ("zeros", "scaled", "places", "part", "row", "element", "offset", "integers")

TEXTS = """
harness-raises: the comparison breaks down on right results
    the message: arrays or dtypes that it does not take, or an array where one verdict is due
    an exception where a verdict is due
harness-accepts-anything: no wrong value is noticed
    whether the function returns or asserts what it computed: None means equal here
    nothing that it is fed is refused, whatever the size of the error
harness-magnitude-only: only the size of the values is compared, not the values
    where x and ref are reduced: subtract first, (x - ref).abs().max()
    shuffled results and other signs pass
harness-ignores-scale: a result that is a multiple of the right one passes
    a cosine similarity or correlation: compare |x - ref| as well
    twice the right result passes
harness-passes-zeros: an all-zero result passes
    the tolerance: it must be smaller than the data, so assert that zeros would fail
    a kernel that writes nothing passes
harness-atol-only: the tolerance is absolute: too large for small data
    atol: take a share of max|ref|, such as twice the error of a same-dtype reference
    gradients of a mean loss pass whatever they are
harness-ignores-nan: NaN or inf in the result passes
    a comparison with NaN is False: assert error <= allowed, not that none is above it
    a kernel that overflows passes
harness-one-sided: errors of one sign pass
    a missing abs around the difference
    results that are too small pass
harness-averages: a few wrong elements hide in an average
    a mean, a norm or a share of mismatches: compare the largest error too
    a wrong row or tile passes
harness-too-loose: errors above the dtype's rounding pass
    rtol: compare with the error that a same-dtype reference has against a float64 one
    errors of a wrong tile edge, a percent or so, pass
harness-broadcasts: a result of another shape passes
    assert x.shape == ref.shape first: a shape (1, ...) broadcasts, and zip stops early
    a result of one row passes for all rows
harness-not-symmetric: wrong results pass where the arguments are swapped
    which of the two is the reference at every call: the allowance grows with it
    what is refused one way passes the other way
vacuous: two all-zero arrays pass
    a result that underflows to 0 on both sides proves nothing: assert that ref is not 0
    an all-zero result would pass as well
harness-refuses-right: right results are refused
    a tolerance below the rounding of sums near 0: allow a share of max|ref| that fits the dtype
    a test that fails now and then, or on another GPU
"""
HARNESS = classes_of(TEXTS)  # the gravest first


@dataclass(frozen=True)
class Trial:
    """What a comparison said of a pair: "passes", "is refused" or "raises", and what it raised.
    error: the largest, in units of the largest element."""

    name: str
    kind: str
    due: str
    dtype: str
    size: float
    axes: int
    error: float
    verdict: str
    raised: str

    @property
    def wrong(self) -> bool:
        """Whether the verdict is."""
        return (self.verdict == "passes") is not (self.due == "pass")

    @property
    def place(self) -> tuple[str, float, int]:
        return self.dtype, self.size, self.axes

    @property
    def series(self) -> tuple[str, str, int]:
        """The same of every size."""
        return self.name, self.dtype, self.axes


def name_causes(trials: Sequence[Trial]) -> Iterator[Finding]:
    """Gravest first. Every wrong that passes is in one of them."""
    right = [trial for trial in trials if trial.due == "pass"]
    broken = {trial.place for trial in right if trial.verdict == "raises"}
    causes = _causes([t for t in trials if t.due == "refuse" and t.place not in broken])
    causes["harness-raises"] = [trial for trial in right if trial.verdict == "raises"]
    causes["harness-refuses-right"] = [trial for trial in right if trial.verdict == "is refused"]
    for bug, known in HARNESS.items():
        if found := causes.get(bug):
            lines, where = tuple(lines_of(found, trials)), where_of(found, trials)
            yield Finding("harness", bug, known.title, where, "proved", lines, known.look_at)


def _causes(due: Sequence[Trial]) -> dict[str, list[Trial]]:
    """Which bug explains which of the wrongs that pass, by what else passes and what does not."""
    fooled, held = [t for t in due if t.wrong], [t for t in due if not t.wrong]
    passing, refused = ({(t.name, t.place) for t in some} for some in (fooled, held))
    blind = not any(t.kind in VALUES for t in held)
    scaled = sorted((t for t in held if t.kind in ("zeros", "scaled")), key=lambda t: t.size)
    largest = {t.series: t.size for t in scaled}
    absolute = {t.dtype for t in fooled if t.size < largest.get(t.series, 0.0)}
    other = {"large": "small", "small": "large"}
    turned = {name: " ".join(other.get(word, word) for word in name.split()) for name, _ in passing}
    offsets = [t for t in fooled if t.kind == "offset" and (turned[t.name], t.place) in refused]
    one_sided = {t.place for t in offsets}
    by_rounding = {(t.name, t.dtype) for t in fooled}  # refused at another size
    noticed = {t.dtype: math.inf for t in due}
    for t in scaled:
        if t.kind == "scaled" and (t.name, t.dtype) not in by_rounding:
            noticed[t.dtype] = min(t.error, noticed[t.dtype])
    lost = {t.place for t in fooled if t.kind == "row" or (t.kind == "element" and t.error >= 1)}
    causes: dict[str, list[Trial]] = {}
    for t in fooled:
        few, values = t.kind in ("row", "element"), t.kind in VALUES
        shuffled, multiple = (
            all((name, t.place) in passing for name in names) for names in (PLACES, MULTIPLES)
        )
        one_way = t in offsets or (t.kind == "element" and t.place in one_sided)
        turned_round = (t.name.removesuffix(SWAPPED), t.place) in refused
        claims = (  # the first that holds
            ("harness-accepts-anything", blind and t.kind != "swapped"),
            ("harness-not-symmetric", t.kind == "swapped" and turned_round),
            ("harness-ignores-nan", t.kind == "nan"),
            ("harness-broadcasts", t.kind == "shape"),
            ("vacuous", t.kind == "vacuous"),
            ("harness-atol-only", values and t.dtype in absolute),
            ("harness-magnitude-only", values and shuffled),
            ("harness-ignores-scale", t.kind in ("scaled", "part") and multiple),
            ("harness-passes-zeros", t.kind == "zeros"),
            ("harness-one-sided", one_way),
            ("harness-averages", few and (t.place in lost or t.error >= noticed[t.dtype])),
            ("harness-too-loose", values),
        )
        causes.setdefault(next((bug for bug, holds in claims if holds), ""), []).append(t)
    return causes


def lines_of(trials: Iterable[Trial], among: Sequence[Trial]) -> list[str]:
    """What the comparison says where of which: a line for all that have this in common."""
    named: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        said = f"{trial.verdict} {trial.raised}".rstrip()
        named.setdefault((trial.name, said), []).append(trial)
    lines: dict[str, list[str]] = {}
    for (name, said), found in named.items():
        lines.setdefault(f"{said} ({where_of(found, among)})", []).append(name)
    most_first = sorted(lines.items(), key=lambda line: -len(line[1]))
    return [f"{said}: {'; '.join(names)}" for said, names in most_first]


def where_of(trials: Sequence[Trial], among: Sequence[Trial]) -> str:
    """Dtypes and sizes, such as "float32, float16, size 1; bfloat16, every size"."""
    every_size, every_dtype = ({t.size for t in among}, {t.dtype for t in among})
    dtypes: dict[str, list[str]] = {}
    for dtype in dict.fromkeys(t.dtype for t in trials):
        found = {t.size for t in trials if t.dtype == dtype}
        some = f"size {', '.join(f'{size:g}' for size in sorted(found, reverse=True))}"
        dtypes.setdefault("every size" if 1 < len(found) == len(every_size) else some, []).append(
            dtype
        )
    parts = []
    for sizes, names in dtypes.items():
        dtype = "every dtype" if 1 < len(names) == len(every_dtype) else ", ".join(names)
        parts.append(f"{dtype}, {sizes}")
    return "; ".join(parts)
