"""The CUDA kernels of sparse_double_backward and sparse_jvp on a GPU, by the tolerance of autograd.

The truth is torch's autograd of dense attention with the selection as a mask, in float64; the error
allowed is that of the same in the kernels' dtype.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rawattn.check.transfer import to_numpy
from rawattn.variants import Row
from tests.shared.gpu_arrays import bits
from tests.shared.gpu_problems import faults, judge, sized
from tests.shared.gpu_sparse import (
    OF_JVP,
    OF_SECOND,
    Posed,
    Sparse,
    in_chunks,
    pose,
    run_double_backward,
    run_jvp,
    table_of,
)
from tests.shared.gpu_sparse_random import SECOND, Chunk, edges, fitting, other_rows

torch = pytest.importorskip("torch")
pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu


def run_second(posed: Posed, table: Any = None, **options: Any) -> dict[str, Any]:
    options = {"backend": "cuda"} | options
    return run_jvp(posed, table, **options) | run_double_backward(posed, table, **options)


# ---- random problems --------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", SECOND, ids=str)
def test_160_problems(chunk: Chunk) -> None:
    wrong = []
    for i, sparse in enumerate(chunk.problems()):
        posed = pose(sparse, second=True)
        table = table_of(posed, backend="cuda") if i % 3 == 1 else None
        found = faults(posed, run_second(posed, table))
        wrong += [f"{sparse.spelled()}\n  {fault}" for fault in found]
    assert not wrong, "\n".join(wrong)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Chunks of 64 query tokens."""
    yield from in_chunks(64, monkeypatch)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("chunk", SECOND[:4], ids=str)
def test_chunks(chunk: Chunk) -> None:
    posed = pose(next(chunk.problems()), second=True)
    assert table_of(posed, backend="cuda").starts.shape[0] > 1
    judge(posed, run_second(posed))


# ---- rows of the table ------------------------------------------------------------------------

OTHER_ROWS = other_rows(SECOND, ("double",))


@pytest.mark.parametrize("row", OTHER_ROWS, ids=[row.name for row in OTHER_ROWS])
def test_other_row(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAWATTN_VARIANT", row.name)
    sparse = next(fitting(row), None)
    assert sparse is not None, "a row that serves nothing"
    posed = pose(sparse, second=True)
    judge(posed, run_second(posed))


# ---- repeatability ----------------------------------------------------------------------------


REPEATED = [
    edges("repeated-128", **sized(128)),
    replace(edges("repeated-64", dtype="bfloat16", group=4), gate=False, tg=False),
]


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize("sparse", REPEATED, ids=str)
def test_bitwise_repeatable(sparse: Sparse, deterministic: bool) -> None:
    """There are no atomic adds of numbers, so that it needs not be asked for."""
    posed = pose(sparse, second=True)
    table = table_of(posed)
    runs = [
        bits(*run_jvp(posed, given).values())
        + bits(*run_double_backward(posed, given, deterministic=deterministic).values())
        for given in (None, table) * 2
    ]
    assert all(run == runs[0] for run in runs)
    judge(posed, run_double_backward(posed, table))


# ---- directions -------------------------------------------------------------------------------

PARTS = [(True, False, True, False), (False, True, False, True), (False, False, False, True)]


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_none_is_zero(parts: tuple[bool, bool, bool, bool]) -> None:
    sparse = edges(f"parts-{parts}", direction=parts[:3], **sized(128))
    posed = pose(replace(sparse, tg=parts[3]), second=True)
    t, c = posed.tensors, posed.chosen
    pairs = zip("qkv", t.direction, strict=True)
    filled = {
        f"t{name}": torch.zeros_like(getattr(t, name)) if part is None else part
        for name, part in pairs
    }
    chosen = c if parts[3] else replace(c, tg=torch.zeros_like(c.tg))
    whole = replace(
        posed, tensors=replace(t, **filled), chosen=chosen, sparse=replace(posed.sparse, tg=True)
    )
    results = run_second(posed)
    judge(posed, results)
    others = run_second(whole)
    for name, array in results.items():
        verdict = posed.targets[name].judge(to_numpy(array), against=to_numpy(others[name]))
        assert verdict.ok, (name, verdict)


def test_no_direction_at_all() -> None:
    sparse = replace(edges("none", direction=(False, False, False), **sized(128)), tg=False)
    posed = pose(sparse, second=True)
    judge(posed, run_jvp(posed))  # tangents exactly zero
    judge(posed, run_double_backward(posed))


# ---- symmetry ---------------------------------------------------------------------------------


def test_the_jvp_and_the_gradient_of_dout_are_the_same() -> None:
    """Rounded in other places, thus not to the bit."""
    posed = pose(edges("same", **sized(128)), second=True)
    results = run_second(posed)
    for name, other in (("tout", "ddout"), ("tlse", "ddlse")):
        found, against = to_numpy(results[name]), to_numpy(results[other])
        verdict = posed.targets[name].judge(found, against=against)
        assert verdict.ok, (name, verdict)


@pytest.mark.parametrize("heads", [(1, 16), (2, 1)], ids=str)
@pytest.mark.parametrize("lengths", [((), ()), ((0, 0), (0, 0)), ((4, 2), (0, 0))], ids=str)
def test_nothing_to_see(lengths: tuple[Any, Any], heads: tuple[int, int]) -> None:
    case = replace(
        edges("nothing", **sized(128)).case, lengths_q=lengths[0], lengths_k=lengths[1], poisoned=()
    )
    case = replace(case, num_heads_kv=heads[0], group=heads[1])
    posed = pose(Sparse(case, 64, num_selected=2, gate=True, tg=True), second=True)
    results = run_jvp(posed)
    assert bool((results.pop("lse") == -torch.inf).all())
    results |= run_double_backward(posed)
    assert set(results) == {*OF_JVP[:2], "tlse", *OF_SECOND}
    assert not any(bool(array.any()) for array in results.values())
