"""A comparison function is fed wrong results, and right ones. ``compare(x, ref)`` says whether x is
right: by its truth value, or by an AssertionError."""

import contextlib
import io
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rawattn.check.candidate import load
from rawattn.check.diagnose.findings import Diagnosis
from rawattn.check.diagnose.harness.causes import Trial, name_causes
from rawattn.check.diagnose.harness.pairs import Pair, Shape, rights, wrongs
from rawattn.check.transfer import Array, to_framework, to_numpy

Compare = Callable[[Array, Array], Any]

DTYPES = ("float32", "float16", "bfloat16")
SIZES = (100.0, 1.0, 1e-3, 1e-4)  # the last two: gradients of a loss that is a mean
SHAPES: tuple[Shape, ...] = ((96, 32), (96, 4, 16), (2, 4, 24, 16))


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
) -> Diagnosis:
    """Feed ``compare`` arrays of ``framework``, of these standard deviations, and name what is
    wrong. The reference is float64 or of x's dtype, whichever refuses fewer right results."""

    def fed(of: Callable[..., list[Pair]], wide: bool) -> Iterator[Trial]:
        for dtype, size, shape in itertools.product(dtypes, sizes, SHAPES):
            for pair in of(shape, dtype, size=size, wide=wide):
                verdict = _ask(compare, pair, framework)
                yield Trial(pair.name, pair.kind, pair.error, (dtype, size, len(shape)), verdict)

    # what a comparison prints or warns about some thousand wrong results says nothing
    printed = contextlib.redirect_stdout(io.StringIO())
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"), printed:
        right = {wide: list(fed(rights, wide)) for wide in (False, True)}
        wide = min(right, key=lambda wide: sum(trial.wrong for trial in right[wide]))
        trials = [*right[wide], *fed(wrongs, wide)]
    name = getattr(compare, "__name__", type(compare).__name__)
    facts = (f"x was {', '.join(dtypes)}; ref was {'float64' if wide else 'of the same dtype'}",)
    of = trials[len(right[wide]) :], right[wide]
    counts = [f"{sum(trial.wrong for trial in some)} of {len(some)}" for some in of]
    title = f"the comparison {name}: {counts[0]} wrong results pass, {counts[1]} right ones do not"
    return Diagnosis(title, tuple(name_causes(trials)), facts=facts)


def _ask(compare: Compare, pair: Pair, framework: str) -> str:
    """What ``compare`` says of copies of the pair, with the text of what it raises. A result that
    is no verdict is an error: a tuple is always true, a number of no error is false."""
    x, ref = (to_framework(np.array(array), framework) for array in (pair.x, pair.ref))
    try:
        result = compare(x, ref)
        result = True if result is None else result
        value = to_numpy(result) if hasattr(result, "shape") else np.asarray(result)
        if value.size != 1 or value.dtype.kind not in "biu" or value.item() not in (0, 1):
            raise TypeError(
                f"it returned {value.dtype} of shape {value.shape}, which is no verdict: return "
                "one truth value, such as (error <= allowed).all()"
            )
        return "passes" if value else "is refused"
    except AssertionError:
        return "is refused"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # pytest.fail and sys.exit raise no Exception
        if type(error).__module__ == "_pytest.outcomes" and type(error).__name__ == "Failed":
            return "is refused"
        lines = str(error).strip().splitlines()
        return "raises " + ": ".join((type(error).__name__, *lines[:1]))
