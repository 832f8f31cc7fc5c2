"""Which fault of a comparison explains the wrong results that it lets pass.

Long by the list of the faults.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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


def name_causes(trials: Sequence[Trial]) -> Iterator[Finding]:
    """Gravest first. Every wrong that passes is in one of them."""
    right = [trial for trial in trials if trial.due == "pass"]
    broken = {trial.place for trial in right if trial.verdict == "raises"}
    due = [trial for trial in trials if trial.due == "refuse" and trial.place not in broken]
    causes = _causes(due)
    causes["harness-raises"] = [trial for trial in right if trial.verdict == "raises"]
    causes["harness-refuses-right"] = [trial for trial in right if trial.verdict == "is refused"]
    for bug, known in HARNESS.items():
        if found := causes.get(bug):
            lines, where = tuple(lines_of(found, trials)), where_of(found, trials)
            yield Finding("harness", bug, known.title, where, "proved", lines, known.look_at)


def _causes(due: Sequence[Trial]) -> dict[str, list[Trial]]:
    """Which bug explains which of the wrongs that pass, by what else passes and what does not."""
    fooled = [trial for trial in due if trial.wrong]
    held = [trial for trial in due if not trial.wrong]
    passing, refused = ({(t.name, t.place) for t in some} for some in (fooled, held))
    multiples = [trial for trial in held if trial.kind in ("zeros", "scaled")]
    larger = {(t.name, t.dtype, t.axes): 0.0 for t in multiples}
    for t in multiples:
        larger[t.name, t.dtype, t.axes] = max(t.size, larger[t.name, t.dtype, t.axes])
    absolute = {t.dtype for t in fooled if t.size < larger.get((t.name, t.dtype, t.axes), 0.0)}
    other = {"large": "small", "small": "large"}
    turned = {name: " ".join(other.get(word, word) for word in name.split()) for name, _ in passing}
    offsets = {
        t.place for t in fooled if t.kind == "offset" and (turned[t.name], t.place) in refused
    }
    noticed = {t.dtype: math.inf for t in due}
    by_rounding = {(t.name, t.dtype) for t in fooled}  # refused at another size
    for t in multiples:
        if t.kind == "scaled" and (t.name, t.dtype) not in by_rounding:
            noticed[t.dtype] = min(t.error, noticed[t.dtype])
    lost = {t.place for t in fooled if t.kind == "row" or (t.kind == "element" and t.error >= 1)}

    def all_pass(names: Sequence[str]) -> Callable[[Trial], bool]:
        return lambda t: all((name, t.place) in passing for name in names)

    def any_passes(t: Trial) -> bool:
        return True

    blind = not any(trial.kind in VALUES for trial in held)
    kinds = {trial.kind for trial in fooled} - {"swapped"} if blind else set()
    claims: tuple[tuple[str, Collection[str], Callable[[Trial], bool]], ...] = (
        ("harness-accepts-anything", kinds, any_passes),
        (
            *("harness-not-symmetric", ("swapped",)),
            lambda t: (t.name.removesuffix(SWAPPED), t.place) in refused,
        ),
        ("harness-ignores-nan", ("nan",), any_passes),
        ("harness-broadcasts", ("shape",), any_passes),
        ("vacuous", ("vacuous",), any_passes),
        ("harness-atol-only", VALUES, lambda t: t.dtype in absolute),
        ("harness-magnitude-only", VALUES, all_pass(PLACES)),
        ("harness-ignores-scale", ("scaled", "part"), all_pass(MULTIPLES)),
        ("harness-passes-zeros", ("zeros",), any_passes),
        ("harness-one-sided", ("offset",), lambda t: (turned[t.name], t.place) in refused),
        ("harness-one-sided", ("element",), lambda t: t.place in offsets),
        (
            *("harness-averages", ("row", "element")),
            lambda t: t.place in lost or t.error >= noticed[t.dtype],
        ),
        ("harness-too-loose", VALUES, any_passes),
    )
    causes: dict[str, list[Trial]] = {}
    for t in fooled:
        first = next((bug for bug, of, claim in claims if t.kind in of and claim(t)), "")
        causes.setdefault(first, []).append(t)
    return causes


def lines_of(trials: Iterable[Trial], among: Sequence[Trial]) -> list[str]:
    """What the comparison says where of which: a line for all that have this in common."""
    named: dict[tuple[str, str, str], list[Trial]] = {}
    for trial in trials:
        named.setdefault((trial.name, trial.verdict, trial.raised), []).append(trial)
    lines: dict[tuple[str, str], list[str]] = {}
    for (name, verdict, raised), found in named.items():
        said = f"{verdict} {raised}".rstrip()
        lines.setdefault((said, where_of(found, among)), []).append(name)
    most_first = sorted(lines.items(), key=lambda line: -len(line[1]))
    return [f"{said} ({where}): {'; '.join(names)}" for (said, where), names in most_first]


def where_of(trials: Sequence[Trial], among: Sequence[Trial]) -> str:
    """Dtypes and sizes, such as "float32, float16, size 1; bfloat16, every size"."""
    sizes: dict[str, set[float]] = {}
    for trial in trials:
        sizes.setdefault(trial.dtype, set()).add(trial.size)
    dtypes: dict[tuple[float, ...], list[str]] = {}
    for dtype, seen in sizes.items():
        dtypes.setdefault(tuple(sorted(seen, reverse=True)), []).append(dtype)
    every = [len({trial.place[n] for trial in among}) for n in range(2)]
    parts = []
    for found, names in dtypes.items():
        some = f"size {', '.join(f'{size:g}' for size in found)}"
        dtype = "every dtype" if 1 < len(names) == every[0] else ", ".join(names)
        parts.append(f"{dtype}, {'every size' if 1 < len(found) == every[1] else some}")
    return "; ".join(parts)
