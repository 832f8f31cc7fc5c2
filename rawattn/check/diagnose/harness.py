"""Would this comparison notice? A comparison function is fed wrong results, and right ones.

``compare(x, ref)`` says whether x is right: by its truth value, or by an AssertionError. Long by
two lists: the wrong results, and what it means of a comparison to let some of them pass.

What counts as wrong leaves room for rounding: an error above GENEROUS units of the dtype's
rounding (eps) of the largest element. What people may want either way is not counted.
"""

import contextlib
import io
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from rawattn.check.candidate import load
from rawattn.check.cases import dtype_of
from rawattn.check.diagnose.classes import BugClass
from rawattn.check.diagnose.findings import Check, Diagnosis, Finding
from rawattn.check.transfer import Array, to_framework, to_numpy

Compare = Callable[[Array, Array], Any]
Float64 = npt.NDArray[np.float64]
Shape = tuple[int, ...]
Steps = dict[tuple[str, float], float]  # by dtype and size: the largest c that passes

DTYPES = ("float32", "float16", "bfloat16")
SIZES = (100.0, 1.0, 1e-3, 1e-4)  # the last two: gradients of a loss that is a mean
SHAPES: tuple[Shape, ...] = ((96, 32), (96, 4, 16), (2, 4, 24, 16))
GENEROUS = 4.0
CLEARLY = 4.0  # times larger: no accident of rounding
LARGEST = 3.0  # of the data, in standard deviations
LADDER = tuple(2.0**-n for n in range(-2, 25))  # c of x = (1 + c) ref, largest first

PAIRED = ("x = 0", "x = 0.5 ref", "x = 4 ref", "x = -ref")  # also with the arguments swapped
SWAPPED = ", arguments swapped"
MULTIPLES = ("x = 0.5 ref", "x = 2 ref", "x = 4 ref")
PLACES = ("rows shifted by one", "transposed at equal size")
VALUES = ("scaled", "places", "part", "row", "element", "offset", "integers")

HARNESS: dict[str, BugClass] = {
    "harness-accepts-anything": BugClass(
        "no wrong value is noticed",
        "whether the function returns or asserts what it computed: None means equal here",
    ),
    "harness-raises": BugClass(
        "the comparison breaks down on right results",
        "the message: dtypes that it cannot mix, or an array where one verdict is due (.all())",
    ),
    "harness-magnitude-only": BugClass(
        "only the size of the values is compared, not the values",
        "where x and ref are reduced: subtract first, (x - ref).abs().max(); neither a tolerance "
        "subtracted from each side nor two means or maxima can see that x is another array",
    ),
    "harness-ignores-scale": BugClass(
        "a result that is a multiple of the right one passes",
        "a cosine similarity or correlation: compare |x - ref| as well",
    ),
    "harness-passes-zeros": BugClass(
        "an all-zero result passes",
        "the tolerance: it must be smaller than the data, so assert that zeros would fail",
    ),
    "harness-atol-only": BugClass(
        "the tolerance is absolute: too large for small data",
        "atol: take a share of max|ref|, such as twice the error of a same-dtype reference",
    ),
    "harness-ignores-nan": BugClass(
        "NaN or inf in the result passes",
        "a comparison with NaN is False: assert error <= allowed, not that none is above it; "
        "nan_to_num, nanmax and masks by isfinite hide it too",
    ),
    "harness-one-sided": BugClass(
        "errors of one sign pass",
        "a missing abs around the difference",
    ),
    "harness-averages": BugClass(
        "a few wrong elements hide in an average",
        "a mean, a norm or a share of mismatches: compare the largest error too",
    ),
    "harness-too-loose": BugClass(
        "errors above the dtype's rounding pass",
        "rtol: compare with the error that a same-dtype reference has against a float64 one",
    ),
    "harness-broadcasts": BugClass(
        "a result of another shape passes",
        "assert x.shape == ref.shape first: a shape (1, ...) broadcasts, and zip stops early",
    ),
    "harness-not-symmetric": BugClass(
        "wrong results pass where the arguments are swapped",
        "which of the two is the reference at every call: the allowance grows with it",
    ),
    "harness-refuses-right": BugClass(
        "right results are refused",
        "a tolerance below the rounding of the dtype, or of sums that come out near 0: allow a "
        "share of max|ref| that fits the dtype",
    ),
    "vacuous": BugClass(
        "two all-zero arrays pass",
        "a result that underflows to 0 on both sides proves nothing: assert that ref is not 0",
    ),
}


@dataclass(frozen=True)
class Pair:
    """What a comparison is fed, and what is due: "refuse", "pass", or "either"."""

    name: str
    kind: str
    x: np.ndarray
    ref: np.ndarray
    due: str = "refuse"


@dataclass(frozen=True)
class Trial:
    """What a comparison said of a pair: "passes", "is refused" or "raises", and what it raised.

    error: the largest, in units of the largest element.
    """

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
    def fooled(self) -> bool:
        return self.due == "refuse" and self.verdict == "passes"

    @property
    def place(self) -> tuple[str, float, int]:
        return self.dtype, self.size, self.axes


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
    compare: Compare,
    framework: str = "numpy",
    *,
    dtypes: Sequence[str] = DTYPES,
    sizes: Sequence[float] = SIZES,
    shapes: Sequence[Shape] = SHAPES,
    reference: str | None = None,
    seed: int = 0,
) -> Diagnosis:
    """Feed ``compare`` arrays of ``framework`` and name what is wrong with it.

    sizes: standard deviations of the data. reference: "float64", or "same" for x's dtype; without
    it the one with which the comparison refuses fewer right results.
    """
    if reference not in (None, "float64", "same"):
        raise ValueError(f"reference is {reference!r}, expected 'float64', 'same' or None")
    trials: list[Trial] = []
    steps: Steps = {}
    with _quiet():
        places = list(itertools.product(dtypes, sizes, shapes))

        def right(place: tuple[str, float, Shape], wide: bool) -> list[Pair]:
            dtype, size, shape = place
            return rights(shape, dtype, np.random.default_rng(seed), size=size, wide=wide)

        def refused(wide: bool) -> int:
            pairs = (pair for place in places for pair in right(place, wide))
            return sum(_ask(compare, pair, framework)[0] != "passes" for pair in pairs)

        wide = reference == "float64" or (reference is None and refused(True) < refused(False))
        for place in places:
            dtype, size, shape = place
            rng = np.random.default_rng(seed)
            fed = right(place, wide) + wrongs(shape, dtype, None, rng, size=size, wide=wide)
            for pair in fed:
                verdict, raised = _ask(compare, pair, framework)
                about = (dtype, size, len(shape), _error(pair.x, pair.ref))
                trials.append(Trial(pair.name, pair.kind, pair.due, *about, verdict, raised))
            if shape == shapes[0]:
                steps[dtype, size] = _sensitivity(compare, framework, fed[0], dtype)
    name = getattr(compare, "__name__", type(compare).__name__)
    facts = _facts(trials, steps, wide)
    found = tuple(_findings(trials, steps))
    return Diagnosis(_title(name, trials), found, tuple(_checks(trials)), facts=facts)


def rights(
    shape: Shape,
    dtype: str,
    rng: np.random.Generator | None = None,
    *,
    size: float = 1.0,
    wide: bool = False,
) -> list[Pair]:
    """Right results of ``dtype`` with their references, float64 where ``wide``; mildest first."""
    rng = rng or np.random.default_rng(0)
    exact = _draw(shape, rng, size)
    kind = dtype_of(dtype)
    ref = exact if wide else exact.astype(kind)
    ulps = _eps(dtype) * 2.0 ** np.floor(np.log2(np.abs(exact) + np.finfo(np.float64).tiny))
    rounded = exact + 0.25 * ulps * rng.uniform(-1, 1, shape)
    accumulator = min(_eps(dtype), _eps("float32"))
    summed = exact + accumulator * np.abs(exact).max() * rng.uniform(-1, 1, shape)
    same = "the reference rounded to x's dtype" if wide else "the same array"
    noisy = f"the result of another rounding, off by at most {'0.75' if wide else '1'} ulp"
    return [
        Pair(name, "right", x.astype(kind), ref, "pass")
        for name, x in ((same, exact), (noisy, rounded), ("the same sums in another order", summed))
    ]


def wrongs(
    shape: Shape,
    dtype: str,
    lengths: Sequence[int] | None = None,
    rng: np.random.Generator | None = None,
    *,
    size: float = 1.0,
    wide: bool = False,
) -> list[Pair]:
    """Wrong results of ``dtype``, each made of a right one; and some that may be meant (either).

    ``shape``: (tokens, width), (tokens, heads, width), or (batch, heads, tokens, width) with
    sequences of one length; else ``lengths`` are those of the sequences.
    """
    rng = rng or np.random.default_rng(0)
    exact = _draw(shape, rng, size)
    kind = dtype_of(dtype)

    def typed(array: Float64) -> np.ndarray:
        return array if wide else array.astype(kind)

    ref, x = typed(exact), exact.astype(kind)
    pairs = []
    for name, group, changed in _changed(exact, lengths, rng, _eps(dtype)):
        wrong = changed if group == "integers" else changed.astype(kind)
        if _error(wrong, ref) > GENEROUS * _eps(dtype):
            pairs.append(Pair(name, group, wrong, ref))
            if name in PAIRED:
                pairs.append(Pair(name + SWAPPED, "swapped", ref, wrong))
    one_nan, one_inf, all_nan = x.copy(), x.copy(), np.full_like(x, np.nan)
    middle = tuple(n // 2 for n in shape)
    one_nan[middle], one_inf[middle] = np.nan, np.inf
    nans = (("one NaN", one_nan), ("one inf", one_inf), ("all NaN", all_nan))
    pairs += [Pair(name, "nan", wrong, ref) for name, wrong in nans]
    equal = np.broadcast_to(exact[:1], shape)
    shapes = (
        ("x of shape (1, ...) where ref repeats it", x[:1], typed(equal)),
        ("an axis too many, x = ref[None]", x[None], ref),
        ("one too few along the first axis", x[:-1], ref),
        ("one too many along the first axis", np.concatenate([x, x[:1]]), ref),
        ("an empty x", x[:0], ref),
    )
    pairs += [Pair(name, "shape", a, b) for name, a, b in shapes if a.shape != b.shape]
    zeros = np.zeros_like(exact)
    pairs.append(Pair("x and ref both 0", "vacuous", zeros.astype(kind), typed(zeros)))
    nan_ref = ref.copy()
    nan_ref[middle] = np.nan
    pairs += [
        Pair("NaN at the same place of both", "either", one_nan, nan_ref, "either"),
        Pair("x and ref both empty", "either", x[:0], ref[:0], "either"),
    ]
    if not wide:
        pairs.append(Pair("x of dtype float64", "either", x.astype(np.float64), ref, "either"))
    return pairs


def _changed(
    exact: Float64, lengths: Sequence[int] | None, rng: np.random.Generator, eps: float
) -> Iterator[tuple[str, str, np.ndarray]]:
    """Name, kind and values of wrong results of the right shape."""
    rows, back = _packed(exact)
    tokens, heads, _ = rows.shape
    if exact.ndim == 4:
        lengths = (exact.shape[2],) * exact.shape[0]
    elif lengths is None:
        lengths = (tokens // 5, tokens // 3, tokens - tokens // 5 - tokens // 3)
    if sum(lengths) != tokens:
        raise ValueError(f"lengths {tuple(lengths)} do not sum to the {tokens} rows")
    lengths = [length for length in lengths if length]
    largest = np.abs(rows).max(initial=0.0)

    def spoiled(where: Any, values: Any) -> Float64:
        changed = rows.copy()
        changed[where] = values
        return back(changed)

    for factor in (0.0, 0.5, 1.05, 1.43, 2.0, 4.0, -1.0):
        name = {0.0: "0", -1.0: "-ref"}.get(factor, f"{factor:g} ref")
        yield f"x = {name}", "scaled", exact * factor
    yield PLACES[0], "places", back(np.roll(rows, 1, axis=0))
    axes = (1, 0, 2) if heads > 1 else (2, 1, 0)
    yield PLACES[1], "places", back(rows.transpose(axes).reshape(rows.shape))
    if heads > 1:
        yield "heads swapped", "places", back(rows[:, ::-1])
    other = _draw(rows.shape, rng, 1.0) * (largest / LARGEST)
    yield "other data of the same size", "part", back(other)
    first, second = slice(0, lengths[0]), slice(lengths[0], sum(lengths[:2]))
    if len(lengths) > 1:
        taken = rows[first][np.arange(second.stop - second.start) % lengths[0]]
        yield "a sequence taken from its neighbour", "part", spoiled(second, taken)
        slope = "the first sequence 1.43 times too large (padded keys)"
        yield slope, "part", spoiled(first, 1.43 * rows[first])
    yield "a row of zeros", "row", spoiled(tokens // 2, 0.0)
    at = np.unravel_index(np.abs(rows).argmax(), rows.shape)
    for share in (1.0, 0.1, 0.01):
        name = f"the largest element off by {share:.0%}"
        yield name, "element", spoiled(at, (1 + share) * rows[at])
    for share, words in ((0.25, "25%"), (16 * eps, "16 eps")):
        for sign, way in ((1, "large"), (-1, "small")):
            name = f"every element too {way} by {words} of the largest"
            yield name, "offset", exact + sign * share * largest
    yield "x cut to int32", "integers", exact.astype(np.int32)


def _packed(array: Float64) -> tuple[Float64, Callable[[Float64], Float64]]:
    """``array`` as (tokens, heads, width), and the way back."""
    shape = array.shape
    if array.ndim == 2:
        return array[:, None], lambda rows: rows.reshape(shape)
    if array.ndim == 3:
        return array, lambda rows: rows
    if array.ndim != 4:
        raise ValueError(f"shape {shape} has {array.ndim} axes, expected 2, 3 or 4")
    batch, heads, tokens, width = shape
    rows = array.swapaxes(1, 2).reshape(batch * tokens, heads, width)
    return rows, lambda rows: rows.reshape(batch, tokens, heads, width).swapaxes(1, 2)


def _draw(shape: Shape, rng: np.random.Generator, size: float) -> Float64:
    return np.asarray(rng.standard_normal(shape).clip(-LARGEST, LARGEST) * size)


def _eps(dtype: str) -> float:
    return float(ml_dtypes.finfo(dtype_of(dtype)).eps)  # type: ignore[no-untyped-call]


def _error(x: np.ndarray, ref: np.ndarray) -> float:
    """The largest error in units of the largest element; inf for NaN and other shapes."""
    if x.shape != ref.shape or not x.size:
        return math.inf
    found, wanted = x.astype(np.float64), ref.astype(np.float64)
    error = float(np.abs(found - wanted).max())
    largest = float(np.abs(wanted).max())
    return error / largest if math.isfinite(error) and largest else math.inf


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What a comparison prints or warns about some thousand wrong results says nothing."""
    with (
        np.errstate(all="ignore"),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


def _ask(compare: Compare, pair: Pair, framework: str) -> tuple[str, str]:
    """What ``compare`` says of copies of the pair, and the text of what it raises."""
    x, ref = (to_framework(np.array(array), framework) for array in (pair.x, pair.ref))
    try:
        return "passes" if _truth(compare(x, ref)) else "is refused", ""
    except AssertionError:
        return "is refused", ""
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # pytest.fail and sys.exit raise no Exception
        if type(error).__module__ == "_pytest.outcomes" and type(error).__name__ == "Failed":
            return "is refused", ""
        lines = str(error).strip().splitlines()
        return "raises", ": ".join((type(error).__name__, *lines[:1]))


def _truth(result: Any) -> bool:
    """Whether a result says "right". TypeError where it is no verdict: a tuple is always true."""
    if result is None:
        return True
    shape = getattr(result, "shape", None)
    if shape is not None and math.prod(shape) != 1:
        raise TypeError(f"it returned an array of shape {tuple(shape)}, not one verdict")
    if shape is None and not isinstance(result, bool | int | float):
        raise TypeError(f"it returned a {type(result).__name__}, which is no verdict")
    return bool(result) if shape is None else bool(to_numpy(result).reshape(())[()])


def _sensitivity(compare: Compare, framework: str, right: Pair, dtype: str) -> float:
    """The largest c of LADDER for which x = (1 + c) ref passes; 0 where none does."""
    for step in LADDER:
        x = (right.ref.astype(np.float64) * (1 + step)).astype(dtype_of(dtype))
        if _ask(compare, Pair("", "scaled", x, right.ref), framework)[0] == "passes":
            return step
    return 0.0


def _findings(trials: Sequence[Trial], steps: Steps) -> Iterator[Finding]:
    """Gravest first. Every wrong that passes is in one of them."""
    right = [trial for trial in trials if trial.due == "pass"]
    broken = {trial.place for trial in right if trial.verdict == "raises"}
    wrong = [trial for trial in trials if trial.due == "refuse" and trial.place not in broken]
    causes = [
        ("harness-raises", [trial for trial in right if trial.verdict == "raises"]),
        *_causes(wrong, steps),
        ("harness-refuses-right", [trial for trial in right if trial.verdict == "is refused"]),
    ]
    for bug, found in causes:
        if not found:
            continue
        lines = _absolute(found, steps) if bug == "harness-atol-only" else []
        lines += _lines(found, trials)
        title, look_at = HARNESS[bug]
        where = _where(found, trials)
        yield Finding("harness", bug, title, where, "proved", tuple(lines), look_at)


def _causes(wrong: Sequence[Trial], steps: Steps) -> Iterator[tuple[str, list[Trial]]]:
    """Which bug explains which of the wrongs that pass, by what else passes and what does not."""
    fooled = [trial for trial in wrong if trial.fooled]
    held = [trial for trial in wrong if not trial.fooled]
    if not any(trial.kind in VALUES for trial in held):
        yield "harness-accepts-anything", [t for t in fooled if t.kind != "swapped"]
        return
    left = _of_kind(fooled, *VALUES)

    def explained(found: list[Trial]) -> list[Trial]:
        known = set(found)
        left[:] = [trial for trial in left if trial not in known]
        return found

    absolute = explained(_by_absolute_tolerance(left, steps))
    yield "harness-magnitude-only", explained(_all_where(left, PLACES, VALUES))
    multiples = _all_where(left, MULTIPLES, ("scaled", "part"))
    yield "harness-ignores-scale", explained([t for t in multiples if t.name != "x = 0"])
    yield "harness-passes-zeros", explained([t for t in left if t.name == "x = 0"])
    yield "harness-atol-only", absolute
    yield "harness-ignores-nan", _of_kind(fooled, "nan")
    yield "harness-one-sided", explained(_one_sided(left, held))
    yield "harness-averages", explained(_hidden(left, held))
    yield "harness-too-loose", left
    yield "harness-broadcasts", _of_kind(fooled, "shape")
    straight = {(trial.name + SWAPPED, trial.place) for trial in held}
    swapped = [t for t in _of_kind(fooled, "swapped") if (t.name, t.place) in straight]
    yield "harness-not-symmetric", swapped
    yield "vacuous", _of_kind(fooled, "vacuous")


def _of_kind(trials: Iterable[Trial], *kinds: str) -> list[Trial]:
    return [trial for trial in trials if trial.kind in kinds]


def _all_where(left: Sequence[Trial], names: Iterable[str], kinds: Sequence[str]) -> list[Trial]:
    """What passes, of ``kinds``, in those places in which all of ``names`` pass."""
    places = [{trial.place for trial in left if trial.name == name} for name in names]
    where = set.intersection(*places)
    return [trial for trial in _of_kind(left, *kinds) if trial.place in where]


def _by_absolute_tolerance(left: Iterable[Trial], steps: Steps) -> list[Trial]:
    """What passes only at sizes where the error that passes does not shrink with the data."""
    absolute: set[tuple[str, float]] = set()
    for dtype in dict.fromkeys(dtype for dtype, _ in steps):
        sizes = sorted(size for of, size in steps if of == dtype)
        for (n, small), (m, large) in itertools.combinations(enumerate(sizes), 2):
            if steps[dtype, small] >= CLEARLY * max(steps[dtype, large], _eps(dtype)):
                absolute |= {(dtype, small)} | ({(dtype, large)} if m == n + 1 else set())
    elsewhere = {
        (trial.name, trial.dtype, trial.axes)
        for trial in left
        if (trial.dtype, trial.size) not in absolute
    }
    return [t for t in left if (t.name, t.dtype, t.axes) not in elsewhere]


def _one_sided(left: Iterable[Trial], held: Iterable[Trial]) -> list[Trial]:
    """Offsets that pass where those of the other sign are refused, and elements there."""
    refused = {(trial.name, trial.place) for trial in held}
    other = {"large": "small", "small": "large"}
    offsets = [
        trial
        for trial in _of_kind(left, "offset")
        if (" ".join(other.get(w, w) for w in trial.name.split()), trial.place) in refused
    ]
    where = {trial.place for trial in offsets}
    return [*offsets, *(trial for trial in _of_kind(left, "element") if trial.place in where)]


def _hidden(left: Sequence[Trial], held: Iterable[Trial]) -> list[Trial]:
    """A few wrong elements where they hide: a total loss does, or what is refused of all does."""
    passing = {(trial.name, trial.dtype) for trial in left}
    noticed: dict[str, float] = {}
    for trial in _of_kind(held, "scaled"):
        if (trial.name, trial.dtype) not in passing:  # at another size, by rounding
            noticed[trial.dtype] = min(trial.error, noticed.get(trial.dtype, math.inf))
    few = _of_kind(left, "row", "element")
    where = {trial.place for trial in few if trial.error >= 1 or trial.kind == "row"}
    return [t for t in few if t.place in where or t.error >= noticed.get(t.dtype, math.inf)]


def _lines(trials: Iterable[Trial], among: Sequence[Trial]) -> list[str]:
    """What the comparison says where of which; a line for all that have this in common."""
    named: dict[tuple[str, str, str], list[Trial]] = {}
    for trial in trials:
        named.setdefault((trial.name, trial.verdict, trial.raised), []).append(trial)
    lines: dict[tuple[str, str], list[str]] = {}
    for (name, verdict, raised), found in named.items():
        said = f"{verdict} {raised}".rstrip()
        lines.setdefault((said, _where(found, among)), []).append(name)
    return [f"{said} ({where}): {'; '.join(names)}" for (said, where), names in lines.items()]


def _where(trials: Sequence[Trial], among: Sequence[Trial]) -> str:
    """Dtypes and sizes, such as "float32, float16, size 1; bfloat16, every size"."""
    sizes: dict[str, set[float]] = {}
    for trial in trials:
        sizes.setdefault(trial.dtype, set()).add(trial.size)
    dtypes: dict[tuple[float, ...], list[str]] = {}
    for dtype, seen in sizes.items():
        dtypes.setdefault(tuple(sorted(seen, reverse=True)), []).append(dtype)
    every = [len({trial.place[n] for trial in among}) for n in range(3)]
    parts = []
    for found, names in dtypes.items():
        some = f"size {', '.join(f'{size:g}' for size in found)}"
        dtype = "every dtype" if 1 < len(names) == every[0] else ", ".join(names)
        parts.append(f"{dtype}, {'every size' if 1 < len(found) == every[1] else some}")
    axes = sorted({trial.axes for trial in trials})
    if len(axes) < every[2] and any(t.name == trials[0].name and t.axes not in axes for t in among):
        parts[-1] += f", arrays of {' and '.join(map(str, axes))} axes"
    return "; ".join(parts)


def _absolute(found: Iterable[Trial], steps: Steps) -> list[str]:
    """Errors in numbers: they do not shrink with the data."""
    lines = []
    for dtype in dict.fromkeys(trial.dtype for trial in found):
        parts = [
            f"{_at_most(step, size * LARGEST)} at size {size:g}"
            for (of, size), step in steps.items()
            if of == dtype
        ]
        lines.append(f"{dtype}: errors that pass, about: {', '.join(parts)}")
    return lines


def _at_most(step: float, unit: float = 1.0) -> str:
    """``step`` of LADDER in numbers; at its end more may pass."""
    return f"{step * unit:.2g}" + (" or more" if step == LADDER[0] else "")


def _checks(trials: Sequence[Trial]) -> Iterator[Check]:
    """A row for every right and wrong result: how often the verdict on it was wrong."""
    for due, letter, must in (("pass", "R", "passes"), ("refuse", "W", "is refused")):
        names = dict.fromkeys(trial.name for trial in trials if trial.due == due)
        for number, name in enumerate(names, start=1):
            told = [trial for trial in trials if trial.name == name and trial.due == due]
            bad = [t for t in told if t.fooled or (due == "pass" and t.verdict != must)]
            failed = "vacuous" if told[0].kind == "vacuous" else "FAIL"
            yield Check(
                side="harness",
                name=f"{letter}{number}",
                text=f"{name}: {must}",
                value=float(len(bad)),
                allowed=0.0,
                verdict=failed if bad else "pass",
                where=f"{len(bad)} of {len(told)} times not: {_where(bad, trials)}" if bad else "",
            )


def _title(name: str, trials: Iterable[Trial]) -> str:
    counts = []
    for due, wanted, words in (
        ("refuse", False, "wrong results pass"),
        ("pass", True, "right ones do not"),
    ):
        of = [trial for trial in trials if trial.due == due]
        bad = sum((trial.verdict == "passes") is not wanted for trial in of)
        counts.append(f"{bad} of {len(of)} {words}")
    return f"the comparison {name}: {', '.join(counts)}"


def _facts(trials: Sequence[Trial], steps: Steps, wide: bool) -> tuple[str, ...]:
    dtypes = dict.fromkeys(dtype for dtype, _ in steps)
    facts = [
        f"x was {', '.join(dtypes)}; ref was {'float64' if wide else 'of the same dtype'}",
        "size: the standard deviation of the data; wrong: an error above "
        f"{GENEROUS:g} eps of the dtype times the largest element",
    ]
    for dtype in dtypes:
        parts = (f"{_at_most(c)} at size {s:g}" for (of, s), c in steps.items() if of == dtype)
        facts.append(f"{dtype}: x = (1 + c) ref passes up to c = {', '.join(parts)}")
    either = [trial for trial in trials if trial.due == "either" and trial.verdict == "passes"]
    facts += [f"not counted, since it can be meant: {line}" for line in _lines(either, trials)]
    raised = [trial for trial in trials if trial.verdict == "raises"]
    if raised and all(trial.due == "refuse" for trial in raised):
        names = "; ".join(dict.fromkeys(trial.name for trial in raised))
        texts = {trial.raised.partition(":")[0]: trial.raised for trial in raised[::-1]}
        facts.append(f"refused by an error of its own: {names} ({'; '.join(texts.values())})")
    return tuple(facts)
