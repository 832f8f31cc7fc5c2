"""Would this comparison notice? A comparison function is fed wrong results, and right ones.

``compare(x, ref)`` says whether x is right: by its truth value, or by an AssertionError. What it is
fed is in ``pairs``; what it means that some of it passes, in ``causes``. Long by the many
ways in which such a function may answer.
"""

import contextlib
import inspect
import io
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rawattn.check.candidate import load
from rawattn.check.diagnose.findings import Check, Diagnosis
from rawattn.check.diagnose.harness.causes import (
    Trial,
    name_causes,
    where_of,
)
from rawattn.check.diagnose.harness.pairs import (
    GENEROUS,
    Pair,
    Shape,
    error_of,
    range_of,
    rights,
    wrongs,
)
from rawattn.check.transfer import Array, to_framework, to_numpy

Compare = Callable[[Array, Array], Any]

DTYPES = ("float32", "float16", "bfloat16")
REFERENCES = ("float64", "same")
SIZES = (100.0, 1.0, 1e-3, 1e-4)  # the last two: gradients of a loss that is a mean
SHAPES: tuple[Shape, ...] = ((96, 32), (96, 4, 16), (2, 4, 24, 16))


def load_compare(place: str) -> Compare:
    """The comparison at ``FILE.py:NAME``. ValueError where there is none that takes two arrays."""
    found = load(place, "numpy")
    function = found.forward
    if function is None and found.name.endswith(("backward", "jvp")):  # a name says its kind there
        function = found.double_backward or found.backward or found.jvp
    if function is None:
        raise ValueError(f"{place.rpartition(':')[0]} has no function {found.name!r}")
    try:
        inspect.signature(function).bind(None, None)
    except ValueError:  # functions of C have none
        return function
    except TypeError as error:
        raise ValueError(
            f"{found.name}{inspect.signature(function)} cannot be called as {found.name}(x, ref): "
            f"{error}. Name a function of two arrays, which gives the rest itself"
        ) from error
    return function


def examine(
    compare: Compare,
    framework: str = "numpy",
    *,
    dtypes: Sequence[str] = DTYPES,
    sizes: Sequence[float] = SIZES,
    reference: str | None = None,
) -> Diagnosis:
    """Feed ``compare`` arrays of ``framework`` and name what is wrong with it.

    sizes: standard deviations of the data. reference: "float64", or "same" for x's dtype; without
    it the one with which the comparison refuses fewer right results.
    """
    if reference not in (None, *REFERENCES):
        raise ValueError(f"reference is {reference!r}, expected 'float64', 'same' or None")
    for dtype, size in itertools.product(dtypes, sizes):
        least, most = range_of(dtype)
        if not least <= size <= most:
            raise ValueError(
                f"size {size:g} is not for {dtype}: it must lie between {least:.2g} and "
                f"{most:.2g}, so that the data is neither 0 nor inf"
            )
    trials: list[Trial] = []
    places = list(itertools.product(dtypes, sizes, SHAPES))

    def refused(wide: bool) -> int:
        fed = (pair for d, s, shape in places for pair in rights(shape, d, size=s, wide=wide))
        return sum(_ask(compare, pair, framework)[0] != "passes" for pair in fed)

    with _quiet():
        wide = reference == "float64" or (reference is None and refused(True) < refused(False))
        for dtype, size, shape in places:
            right, wrong = (of(shape, dtype, size=size, wide=wide) for of in (rights, wrongs))
            for pair in right + wrong:
                verdict, raised = _ask(compare, pair, framework)
                about = (dtype, size, len(shape), error_of(pair.x, pair.ref))
                trials.append(Trial(pair.name, pair.kind, pair.due, *about, verdict, raised))
    name = getattr(compare, "__name__", type(compare).__name__)
    facts = _facts(trials, dtypes, framework, wide)
    found = tuple(name_causes(trials))
    counts = [
        f"{sum(t.wrong for t in trials if t.due == due)} of {sum(t.due == due for t in trials)}"
        for due in ("refuse", "pass")
    ]
    title = f"the comparison {name}: {counts[0]} wrong results pass, {counts[1]} right ones do not"
    return Diagnosis(title, found, tuple(_checks(trials)), facts=facts)


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
        raise TypeError(
            f"it returned an array of shape {tuple(shape)}, not one verdict; .all() makes it one"
        )
    if shape is None and not isinstance(result, bool | int | float):
        kind = "a coroutine" if inspect.iscoroutine(result) else f"a {type(result).__name__}"
        raise TypeError(f"it returned {kind}, which is no verdict")
    value = np.asarray(to_numpy(result)).reshape(())
    if value.dtype.kind not in "biu" or value not in (0, 1):
        raise TypeError(
            f"it returned a number ({value.dtype}), which is no verdict; compare it with a limit"
        )
    return bool(value)


def _checks(trials: Sequence[Trial]) -> Iterator[Check]:
    """A row for every right and wrong result: how often the verdict on it was wrong."""
    for due, letter, must in (("pass", "R", "passes"), ("refuse", "W", "is refused")):
        names = dict.fromkeys(trial.name for trial in trials if trial.due == due)
        for number, name in enumerate(names, start=1):
            told = [trial for trial in trials if trial.name == name and trial.due == due]
            bad = [trial for trial in told if trial.wrong]
            verdict = ("vacuous" if told[0].kind == "vacuous" else "FAIL") if bad else "pass"
            where = f"{len(bad)} of {len(told)} times not: {where_of(bad, trials)}" if bad else ""
            text, count = f"{name}: {must}", float(len(bad))
            yield Check("harness", f"{letter}{number}", text, count, 0.0, verdict, where)


def _facts(
    trials: Sequence[Trial], dtypes: Sequence[str], framework: str, wide: bool
) -> tuple[str, ...]:
    facts = [
        f"x was {', '.join(dtypes)}; ref was {'float64' if wide else 'of the same dtype'}; "
        f"arrays of {framework}",
        "size: the standard deviation of the data; wrong: an error above "
        f"{GENEROUS:g} eps of the dtype times the largest element",
    ]
    raised = [trial for trial in trials if trial.verdict == "raises"]
    if raised and all(trial.due == "refuse" for trial in raised):
        names = "; ".join(dict.fromkeys(trial.name for trial in raised))
        texts = {trial.raised.partition(":")[0]: trial.raised for trial in raised[::-1]}
        facts.append(f"refused by an error of its own: {names} ({'; '.join(texts.values())})")
    return tuple(facts)
