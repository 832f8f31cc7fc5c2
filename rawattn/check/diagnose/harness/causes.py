"""Which fault of a comparison explains the wrong results that it lets pass."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rawattn.check.diagnose.catalogue.classes import classes_of
from rawattn.check.diagnose.findings import Finding

PLACES = ("rows shifted by one", "transposed at equal size")
MULTIPLES = ("x = 0.5 ref", "x = 2 ref", "x = 4 ref")
OTHER_SIGN = str.maketrans("+-", "-+")  # in the names of offsets
BY_KIND = {"nan": "harness-ignores-nan", "shape": "harness-broadcasts", "vacuous": "vacuous"}

TEXTS = """
harness-raises: the comparison breaks down on right results
    the message: arrays or dtypes that it does not take, or an array where one verdict is due
harness-accepts-anything: no wrong value is noticed
    whether the function returns or asserts what it computed: None means equal here
harness-magnitude-only: only the size of the values is compared, not the values
    where x and ref are reduced: subtract first, (x - ref).abs().max()
harness-ignores-scale: a result that is a multiple of the right one passes
    a cosine similarity or correlation: compare |x - ref| as well
harness-passes-zeros: an all-zero result passes
    the tolerance: it must be smaller than the data, so assert that zeros would fail
harness-atol-only: the tolerance is absolute: too large for small data
    atol: take a share of max|ref|, such as twice the error of a same-dtype reference
harness-ignores-nan: NaN or inf in the result passes
    a comparison with NaN is False: assert error <= allowed, not that none is above it
harness-one-sided: errors of one sign pass
    a missing abs around the difference
harness-averages: a few wrong elements hide in an average
    a mean, a norm or a share of mismatches: compare the largest error too
harness-too-loose: errors above the dtype's rounding pass
    rtol: compare with the error that a same-dtype reference has against a float64 one
harness-broadcasts: a result of another shape passes
    assert x.shape == ref.shape first: a shape (1, ...) broadcasts, and zip stops early
vacuous: two all-zero arrays pass
    a result that underflows to 0 on both sides proves nothing: assert that ref is not 0
harness-refuses-right: right results are refused
    a tolerance below the rounding of sums near 0: allow a share of max|ref| that fits the dtype
"""
HARNESS = classes_of(TEXTS)  # the gravest first


class Trial(NamedTuple):
    """What a comparison said of a pair: "passes", "is refused", or "raises" and what.
    name, kind, error: of the pair. place: its dtype, its size, and how many axes."""

    name: str
    kind: str
    error: float
    place: tuple[str, float, int]
    verdict: str

    @property
    def wrong(self) -> bool:
        return (self.verdict == "passes") is not (self.kind == "right")


def name_causes(trials: Sequence[Trial]) -> Iterator[Finding]:
    """Gravest first. Every wrong that passes is in one of them."""
    right = [trial for trial in trials if trial.kind == "right"]
    raising = [trial for trial in right if trial.verdict.startswith("raises")]
    broken = {trial.place for trial in raising}
    causes = _causes([t for t in trials if t.kind != "right" and t.place not in broken])
    causes["harness-raises"] = raising
    causes["harness-refuses-right"] = [trial for trial in right if trial.verdict == "is refused"]
    for bug, known in HARNESS.items():
        if found := causes.get(bug):
            said = _each_once((trial.verdict, trial.name) for trial in found)
            lines = tuple(f"{verdict}: {'; '.join(names)}" for verdict, names in said.items())
            sizes = _each_once((t.place[0], f"{t.place[1]:g}") for t in found)
            where = "; ".join(f"{dtype}, size {', '.join(some)}" for dtype, some in sizes.items())
            yield Finding("harness", bug, known.title, where, "proved", lines, known.look_at)


def _causes(due: Sequence[Trial]) -> dict[str, list[Trial]]:
    """Which bug explains which of the wrongs that pass, by what else passes and what does not."""
    fooled, held = [t for t in due if t.wrong], [t for t in due if not t.wrong]
    passing, refused = ({(t.name, t.place) for t in some} for some in (fooled, held))
    names = {t.name for t in fooled}
    # the least error of all elements that is always refused, and that of one element that must be
    noticed = min([1.0, *(t.error for t in held if t.kind == "scaled" and t.name not in names)])
    blind = all(t.kind in BY_KIND for t in held)
    top = max((t.place[1] for t in due), default=0.0)
    scaled = [one for one in passing if one[0].startswith("x = ")]
    absolute = {d for name, (d, _, axes) in scaled if (name, (d, top, axes)) in refused}
    every = [one for one in passing if one[0].startswith("every")]
    one_way = {(name, at) for name, at in every if (name.translate(OTHER_SIGN), at) in refused}
    one_sided = {place for _, place in one_way}

    def cause(t: Trial) -> str:
        there, single = {name for name, place in passing if place == t.place}, t.kind == "element"
        claims = {
            "harness-accepts-anything": blind,
            BY_KIND.get(t.kind, "none"): t.kind in BY_KIND,
            "harness-atol-only": t.place[0] in absolute,
            "harness-magnitude-only": there >= {*PLACES},
            "harness-ignores-scale": there >= {*MULTIPLES} and t.kind in ("scaled", "part"),
            "harness-passes-zeros": t.kind == "zeros",
            "harness-one-sided": (t.name, t.place) in one_way or (single and t.place in one_sided),
            "harness-averages": t.kind == "row" or (single and t.error >= noticed),
            "harness-too-loose": True,
        }
        return next(bug for bug, holds in claims.items() if holds)  # the first that holds

    found = [(cause(t), t) for t in fooled]
    return {bug: [t for by, t in found if by == bug] for bug in HARNESS}


def _each_once(pairs: Iterable[tuple[str, str]]) -> dict[str, dict[str, None]]:
    """By the first of a pair the second ones, in order."""
    found: dict[str, dict[str, None]] = {}
    for key, value in pairs:
        found.setdefault(key, {})[value] = None
    return found
