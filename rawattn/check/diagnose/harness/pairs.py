"""A comparison function is fed wrong results, and right ones; what it lets pass names its bugs.
``compare(x, ref)`` says whether x is right: by its truth value, or by an AssertionError."""

import contextlib
import io
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from rawattn.check.candidate import load
from rawattn.check.cases import dtype_of
from rawattn.check.diagnose.catalogue.classes import classes_of
from rawattn.check.diagnose.findings import Diagnosis, Finding
from rawattn.check.transfer import Array, to_framework, to_numpy

Compare = Callable[[Array, Array], Any]
Shape = tuple[int, ...]
GENEROUS = 4.0  # eps of the dtype, times the largest element, that what is wrong is off by at least
LARGEST = 3.0  # of the data, in standard deviations
DTYPES = ("float32", "float16", "bfloat16")
SIZES = (100.0, 1.0, 1e-3, 1e-4)  # the same; the last two: gradients of a loss that is a mean
SHAPES: tuple[Shape, ...] = ((96, 32), (96, 4, 16), (2, 4, 24, 16))
PLACES = ("rows shifted by one", "transposed at equal size")
FACTORS = (0.0, 0.5, 1.05, 1.43, 2.0, 4.0, -1.0)  # of results that are multiples of right ones
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


class Pair(NamedTuple):
    """What a comparison is fed. kind: "right", or what is wrong."""

    name: str
    kind: str
    x: np.ndarray
    ref: np.ndarray

    @property
    def error(self) -> float:
        """The largest error in units of the largest element; inf for NaN and other shapes."""
        if self.x.shape != self.ref.shape or not self.x.size:
            return math.inf
        found, wanted = self.x.astype(np.float64), self.ref.astype(np.float64)
        error, largest = float(np.abs(found - wanted).max()), float(np.abs(wanted).max())
        return error / largest if math.isfinite(error) and largest else math.inf


def rights(shape: Shape, dtype: str, *, size: float = 1.0, wide: bool = False) -> list[Pair]:
    """Right results of ``dtype`` with their references, float64 where ``wide``; mildest first."""
    rng = np.random.default_rng(0)
    exact, kind = _draw(shape, rng, size), dtype_of(dtype)
    ref, eps = exact if wide else exact.astype(kind), float(np.spacing(np.ones((), kind)))
    ulps = eps * 2.0 ** np.floor(np.log2(np.abs(exact) + np.finfo(np.float64).tiny))
    accumulator = min(eps, np.finfo(np.float32).eps) * np.abs(exact).max()
    found = {
        "the reference, rounded to x's dtype": exact,
        "another rounding, off by at most an ulp": exact + 0.25 * ulps * rng.uniform(-1, 1, shape),
        "the same sums in another order": exact + accumulator * rng.uniform(-1, 1, shape),
    }
    return [Pair(name, "right", x.astype(kind), ref) for name, x in found.items()]


def wrongs(shape: Shape, dtype: str, *, size: float = 1.0, wide: bool = False) -> list[Pair]:
    """Wrong results of ``dtype``, each made of a right one; the last axis is a row."""
    rng = np.random.default_rng(0)
    exact, kind = _draw(shape, rng, size), dtype_of(dtype)
    x, eps = exact.astype(kind), float(np.spacing(np.ones((), kind)))
    ref, rows = exact if wide else x, exact.reshape(-1, shape[-1])
    some, middle = slice(len(rows) // 4), len(rows) // 2  # a quarter of them
    at = np.unravel_index(np.abs(rows).argmax(), rows.shape)
    largest, others = np.abs(rows[at]), rows[some.stop : 2 * some.stop]

    def spoiled(where: Any, values: Any) -> np.ndarray:
        changed = rows.copy()
        changed[where] = values
        return changed

    changes: list[tuple[str, str, np.ndarray]] = [
        *((f"x = {by:g} ref", "scaled" if by else "zeros", exact * by) for by in FACTORS),
        (PLACES[0], "places", np.roll(rows, 1, axis=0)),
        (PLACES[1], "places", exact.swapaxes(0, 1)),
        ("other data of the same size", "part", _draw(rows.shape, rng, largest / LARGEST)),
        ("a quarter of the rows taken from the next", "part", spoiled(some, others)),
        ("a quarter of the rows 1.43 times as large", "part", spoiled(some, 1.43 * rows[some])),
        ("a row of zeros", "row", spoiled(middle, 0.0)),
        ("one NaN", "nan", spoiled((middle, 0), np.nan)),
        ("one inf", "nan", spoiled((middle, 0), np.inf)),
    ]
    for share in (1.0, 0.1, 0.01):
        changed = spoiled(at, (1 + share) * rows[at])
        changes.append((f"the largest element off by {share:.0%}", "element", changed))
    shares = (0.25, "25%"), (16 * eps, "16 eps")
    for (share, words), (sign, by) in itertools.product(shares, (("+", largest), ("-", -largest))):
        name = f"every element off by {sign}{words} of the largest"
        changes.append((name, "offset", exact + share * by))
    pairs = (Pair(name, of, y.reshape(shape).astype(kind), ref) for name, of, y in changes)
    shapes = (
        ("x of shape (1, ...) where ref repeats it", x[:1], np.broadcast_to(ref[:1], shape)),
        ("an axis too many, x = ref[None]", x[None], ref),
        ("one too few along the first axis", x[:-1], ref),
        ("an empty x", x[:0], ref),
    )
    return [
        Pair("x and ref both 0", "vacuous", np.zeros_like(x), np.zeros_like(ref)),
        *(pair for pair in pairs if pair.error > GENEROUS * eps),
        *(Pair(name, "shape", a, b) for name, a, b in shapes if a.shape != b.shape),
    ]


def _draw(shape: Shape, rng: np.random.Generator, size: float) -> np.ndarray:
    return np.asarray(rng.standard_normal(shape).clip(-LARGEST, LARGEST) * size)


def load_compare(place: str) -> Compare:
    """The comparison at ``FILE.py:NAME``. ValueError where there is none."""
    found = load(place, "numpy")
    function = found.forward
    if function is None and found.name.endswith(("backward", "jvp")):  # a name says its kind there
        function = found.double_backward or found.backward or found.jvp
    if function is None:
        raise ValueError(f"{place.rpartition(':')[0]} has no function {found.name!r}")
    return function


def examine(
    compare: Compare, framework: str = "numpy", *, dtypes: Sequence[str] = DTYPES
) -> Diagnosis:
    """Feed ``compare`` arrays of ``framework``, and name what is wrong. The reference is float64 or
    of x's dtype, whichever refuses fewer right results."""

    def fed(of: Callable[..., list[Pair]], wide: bool) -> Iterator[Trial]:
        for dtype, size, shape in itertools.product(dtypes, SIZES, SHAPES):
            for pair in of(shape, dtype, size=size, wide=wide):
                verdict = _ask(compare, pair, framework)
                yield Trial(pair.name, pair.kind, pair.error, (dtype, size, len(shape)), verdict)

    # what a comparison prints or warns about some thousand wrong results says nothing
    printed = contextlib.redirect_stdout(io.StringIO())
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"), printed:
        right = {wide: list(fed(rights, wide)) for wide in (False, True)}
        wide = min(right, key=lambda wide: sum(trial.wrong for trial in right[wide]))
        of = list(fed(wrongs, wide)), right[wide]
    name = getattr(compare, "__name__", type(compare).__name__)
    facts = (f"x was {', '.join(dtypes)}; ref was {'float64' if wide else 'of the same dtype'}",)
    counts = [f"{sum(trial.wrong for trial in some)} of {len(some)}" for some in of]
    title = f"the comparison {name}: {counts[0]} wrong results pass, {counts[1]} right ones do not"
    return Diagnosis(title, tuple(name_causes([*of[1], *of[0]])), facts=facts)


def _ask(compare: Compare, pair: Pair, framework: str) -> str:
    """What ``compare`` says of copies of the pair, with the text of what it raises. A result that
    is no verdict is an error: a tuple is always true, a number of no error is false."""
    x, ref = (to_framework(np.array(array), framework) for array in (pair.x, pair.ref))
    try:
        result = compare(x, ref)
        result = True if result is None else result
        value = to_numpy(result) if hasattr(result, "shape") else np.asarray(result)
        if value.size != 1 or value.dtype.kind not in "biu" or value.item() not in (0, 1):
            need = "return one truth value, such as (error <= allowed).all()"
            said = f"it returned {value.dtype} of shape {value.shape}, which is no verdict"
            raise TypeError(f"{said}: {need}")
        return "passes" if value else "is refused"
    except AssertionError:
        return "is refused"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # pytest.fail and sys.exit raise no Exception
        if type(error).__module__ == "_pytest.outcomes" and type(error).__name__ == "Failed":
            return "is refused"
        return "raises " + ": ".join((type(error).__name__, *str(error).strip().splitlines()[:1]))


def name_causes(trials: Sequence[Trial]) -> Iterator[Finding]:
    """Gravest first, by what else passes and what does not. Every wrong that passes is in one."""
    right = [t for t in trials if t.kind == "right"]
    broken = {t.place for t in right if t.verdict.startswith("raises")}
    due = [t for t in trials if t.kind != "right" and t.place not in broken]
    fooled, held = [t for t in due if t.wrong], [t for t in due if not t.wrong]
    passing, refused = ({(t.name, t.place) for t in some} for some in (fooled, held))
    names = {t.name for t in fooled}
    # the least error of all elements that is always refused, and that of one element that must be
    noticed = min([1.0, *(t.error for t in held if t.kind == "scaled" and t.name not in names)])
    blind, top = all(t.kind in BY_KIND for t in held), max((t.place[1] for t in due), default=0.0)
    scaled = [one for one in passing if one[0].startswith("x = ")]
    absolute = {d for name, (d, _, axes) in scaled if (name, (d, top, axes)) in refused}
    every = [one for one in passing if one[0].startswith("every")]
    one_way = {(name, at) for name, at in every if (name.translate(OTHER_SIGN), at) in refused}
    one_sided = {place for _, place in one_way}

    def cause(t: Trial) -> str:
        there, single = {name for name, place in passing if place == t.place}, t.kind == "element"
        claims = {
            "harness-raises": t.verdict.startswith("raises"),
            "harness-refuses-right": t.kind == "right",
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

    caused = [(cause(t), t) for t in (*right, *due) if t.wrong]
    for bug, known in HARNESS.items():
        if found := [t for by, t in caused if by == bug]:
            said = dict.fromkeys((t.verdict, t.name) for t in found)
            sizes = dict.fromkeys((t.place[0], f"{t.place[1]:g}") for t in found)
            verdicts, kinds = (dict.fromkeys(x for x, _ in some) for some in (said, sizes))
            lines = tuple(f"{x}: {'; '.join(y for of, y in said if of == x)}" for x in verdicts)
            of_kinds = (f"{x}, size {', '.join(y for of, y in sizes if of == x)}" for x in kinds)
            where = "; ".join(of_kinds)
            yield Finding("harness", bug, known.title, where, "proved", lines, known.look_at)
