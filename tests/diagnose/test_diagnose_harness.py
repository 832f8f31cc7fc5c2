"""Comparison functions as people write them: what each lets pass is named, a sound one is left.
Long by those functions, each as somebody would write it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rawattn.check.cases import dtype_of
from rawattn.check.diagnose.findings import Diagnosis
from rawattn.check.diagnose.harness.pairs import (
    DTYPES,
    GENEROUS,
    SHAPES,
    SIZES,
    examine,
    load_compare,
    rights,
    wrongs,
)
from rawattn.check.diff import judge

Compare = Callable[[Any, Any], Any]


def wide(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def off(x: Any, ref: Any) -> np.ndarray:
    return np.abs(wide(x) - wide(ref))


def largest(array: Any) -> float:
    return float(np.abs(wide(array)).max(initial=0.0))


def mean(array: Any) -> float:
    return float(np.abs(wide(array)).mean())


def sound(x: Any, ref: Any) -> bool:
    """rawattn's rule."""
    return judge(x, wide(ref), wide(ref.astype(x.dtype))).ok


def sound_assertion(x: Any, ref: Any) -> None:
    if not sound(x, ref):  # an assert would print a thousand arrays here
        raise AssertionError("they differ")


def cosine(x: Any, ref: Any) -> bool:
    x, ref = wide(x).ravel(), wide(ref).ravel()
    return x @ ref > 0.99 * np.linalg.norm(x) * np.linalg.norm(ref)


def row_by_row(x: Any, ref: Any) -> bool:
    """Rows of one size for all, and so many of them as both have."""
    unit = max(largest(ref), 1e-9)
    eps = float(np.spacing(np.ones((), x.dtype))) if x.dtype.kind != "i" else 0
    rows = zip(x, ref, strict=False)
    return ref.any() and all((off(a, b) <= 2 * eps * unit).all() for a, b in rows)


def bugs(diagnosis: Diagnosis) -> list[str]:
    return [finding.bug for finding in diagnosis.findings]


@pytest.mark.parametrize("compare", [sound, sound_assertion])
def test_a_sound_comparison_has_no_findings(compare: Compare) -> None:
    diagnosis = examine(compare)
    assert not diagnosis.findings and bugs(diagnosis) == []
    assert "0 of 960 wrong results pass, 0 of 108 right ones do not" in diagnosis.title


LOOSE = "too-loose broadcasts vacuous"


def error_of_one_sign(x: Any, ref: Any) -> bool:
    return (wide(x) - wide(ref)).max() <= 4e-3 * largest(ref)


def error_below(x: Any, ref: Any, share: float = 4e-3) -> bool:
    return not (off(x, ref) > share * largest(ref)).any()


@pytest.mark.parametrize(
    ("due", "compare"),
    [
        ("accepts-anything", lambda x, ref: True),
        ("accepts-anything", lambda x, ref: None),
        ("accepts-anything", lambda x, ref: x.shape == ref.shape),
        ("refuses-right", lambda x, ref: False),
        ("raises", lambda x, ref: abs(x - ref) < 1e-2),
        ("raises", lambda x, ref: (True, 0.1)),
        ("raises", lambda x, ref: judge(x, ref, ref)),
        ("raises", lambda x, ref, golden: True),
        ("atol-only broadcasts vacuous refuses-right", lambda x, r: off(x, r).max() <= 1e-2),
        ("magnitude-only broadcasts", lambda x, ref: abs(mean(x) / mean(ref) - 1) < 1e-2),
        ("ignores-scale averages too-loose broadcasts", cosine),
        ("broadcasts", row_by_row),
        (f"averages {LOOSE}", lambda x, ref: mean(off(x, ref)) <= 1e-2 * mean(ref)),
        (f"ignores-nan {LOOSE} refuses-right", error_below),
        (f"one-sided {LOOSE} refuses-right", error_of_one_sign),
        (f"passes-zeros averages {LOOSE}", lambda x, r: bool((off(x, r) <= abs(wide(r))).all())),
        (LOOSE, lambda x, ref: np.allclose(x, ref, rtol=0.1, atol=0)),
    ],
)
def test_what_is_said_of_others(compare: Compare, due: str) -> None:
    """The gravest first."""
    assert [bug.removeprefix("harness-") for bug in bugs(examine(compare))] == due.split()


@pytest.mark.parametrize(
    ("compare", "message"),
    [
        (lambda x, ref: off(x, ref).max(), "returned float64 of shape (), which is no verdict"),
        (lambda x, ref: np.array(0.5, dtype_of("bfloat16")), "returned bfloat16 of shape ()"),
        (lambda x, ref: float(off(x, ref).max()), "such as (error <= allowed).all()"),
        (lambda x, ref: 7, "returned int64 of shape ()"),
        (lambda x, ref: "right", "returned <U5 of shape ()"),
        (lambda x, ref: x == ref, "returned bool of shape (96, 32), which is no verdict"),
    ],
)
def test_what_is_no_verdict(compare: Compare, message: str) -> None:
    """A number is no verdict: that of no error would be False."""
    found = examine(compare, dtypes=("float32",))
    assert bugs(found) == ["harness-raises"] and message in "\n".join(found.findings[0].evidence)


def test_errors_on_wrong_results_refuse_them() -> None:
    def compare(x: Any, ref: Any) -> bool:
        if x.shape != ref.shape:
            raise ValueError("shapes")
        return sound(x, ref)

    assert not examine(compare).findings


@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
@pytest.mark.parametrize("shape", [*SHAPES, (5, 2, 8), (1, 7)])
@pytest.mark.parametrize("with_wide", [False, True])
def test_wrongs_are_wrong_and_rights_are_right(
    dtype: str, shape: tuple[int, ...], with_wide: bool
) -> None:
    eps = float(np.spacing(np.ones((), dtype_of(dtype))))
    for size in SIZES:
        for pair in rights(shape, dtype, size=size, wide=with_wide):
            assert pair.kind == "right" and pair.x.dtype == dtype_of(dtype)
            assert off(pair.x, pair.ref).max() <= 2 * eps * largest(pair.ref)
        names = []
        for pair in wrongs(shape, dtype, size=size, wide=with_wide):
            names.append(pair.name)
            if pair.kind != "vacuous" and pair.x.shape == pair.ref.shape:
                error = off(pair.x, pair.ref).max()
                assert not error <= GENEROUS * eps * largest(pair.ref)
            if pair.kind == "shape":
                assert pair.x.shape != pair.ref.shape
        assert len(names) == len(set(names))
        assert {"x = 0 ref", "x = -1 ref", "one NaN", "x and ref both 0"} < set(names)


def test_comparisons_from_files(tmp_path: Path) -> None:
    file = tmp_path / "compares.py"
    file.write_text(
        "def close(x, ref): return True\n"
        "def close_backward(x, ref): return False\n"
        "only_backward = close_backward\n"
        "def tolerant(x, ref, rtol=1e-2, *more, atol=0, **rest): return True\n"
        "def strict(x, ref, *, rtol): return True\n"
        "def three(x, ref, golden): return True\n"
        "from numpy import array_equal, add\n"
    )
    for name in ("tolerant", "array_equal", "add"):
        assert load_compare(f"{file}:{name}")
    for name, lack in (("strict", "rtol"), ("three", "golden")):
        found = examine(load_compare(f"{file}:{name}"))
        assert bugs(found) == ["harness-raises"] and lack in "".join(found.findings[0].evidence)
    assert load_compare(f"{file}:close")(0, 0) is True
    assert load_compare(f"{file}:close_backward")(0, 0) is False
    for name in ("other", "only"):
        with pytest.raises(ValueError, match=f"has no function '{name}'"):
            load_compare(f"{file}:{name}")
    for place in (str(file), f"{tmp_path}/none.py:close"):
        with pytest.raises(ValueError):
            load_compare(place)
