"""The arrays of a call for the tests of the public functions, on every library, in any layout."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rawattn import arrays
from rawattn.reference import dense
from tests.shared import fake_gpu
from tests.shared.fake_gpu import DTYPES, GPU, MAKERS, values_of

KINDS = tuple(MAKERS)
TOLERANCE = {"float16": 4e-3, "bfloat16": 4e-2, "float32": 1e-5, "float64": 1e-12}
LENGTHS = ([3, 0, 4, 1], [2, 3, 5, 0])  # the last query sequence has no keys


class Case:
    """Host arrays of a call, and what the reference makes of them."""

    NAMES: tuple[str, ...] = ("q", "k", "v", "dout", "dlse", "out", "lse", "cu_q", "cu_k")

    def __init__(
        self,
        dtype: str = "float32",
        surplus: int = 2,
        heads: tuple[int, int] = (4, 2),
        **mask: Any,
    ) -> None:
        rng = np.random.default_rng(0)
        self.dtype, self.mask = dtype, {"window": (2, 0), "softmax_scale": 0.3} | mask
        self.cu_q, self.cu_k = (np.cumsum([0, *n]).astype(np.int32) for n in LENGTHS)
        total_q, total_k = self.cu_q[-1] + surplus, self.cu_k[-1] + surplus
        shapes = {
            "q": (total_q, heads[0], 16),
            "k": (total_k, heads[1], 16),
            "v": (total_k, heads[1], 8),
            "dout": (total_q, heads[0], 8),
            "dlse": (heads[0], total_q),
        }
        statistic = "float64" if dtype == "float64" else "float32"
        for name, shape in shapes.items():
            kind = DTYPES[statistic if name == "dlse" else dtype]
            setattr(self, name, fake_gpu.aligned(rng.standard_normal(shape), kind))
        exact, exact_lse = dense.forward(self.q, self.k, self.v, self.cu_q, self.cu_k, **self.mask)
        self.exact = exact, exact_lse
        self.out = fake_gpu.aligned(exact, DTYPES[dtype])
        self.lse = fake_gpu.aligned(exact_lse, statistic)
        self.statistic = statistic

    def gradients(self, *, dlse: bool = True) -> Any:
        return dense.backward(
            *(self.dout, self.q, self.k, self.v, self.out, self.lse, self.cu_q, self.cu_k),
            dlse=self.dlse if dlse else None,
            **self.mask,
        )

    def close(self, given: Any, expected: Any, dtype: str | None = None) -> None:
        dtype = dtype or self.dtype
        given = values_of(given)
        assert given.dtype == DTYPES[dtype]
        tolerance = TOLERANCE[self.dtype]
        np.testing.assert_allclose(
            given.astype(float), expected, rtol=tolerance, atol=tolerance, equal_nan=False
        )


def on(kind: str, case: Case, device: int = 0) -> dict[str, Any]:
    """The arrays of a case as fakes of a library."""
    return {name: MAKERS[kind](getattr(case, name), device) for name in case.NAMES}


def spread(values: np.ndarray, how: str) -> np.ndarray:
    """The same values in memory that kernels can or cannot read as it is."""
    shape = values.shape
    if how == "strided":  # a slice of a wider array, aligned
        wide = fake_gpu.aligned(np.zeros((shape[0] * 2, shape[1] + 1, shape[2])), values.dtype)
        view = wide[::2, 1:]
    elif how == "odd":  # rows whose distance is no multiple of 16 bytes
        view = fake_gpu.aligned(np.zeros((*shape[:2], shape[2] + 1)), values.dtype)[..., 1:]
    elif how == "last":  # last stride 2
        view = fake_gpu.aligned(np.zeros((*shape[:2], shape[2] * 2)), values.dtype)[..., ::2]
    else:  # heads outside
        view = fake_gpu.aligned(np.zeros((shape[1], shape[0], shape[2])), values.dtype)
        view = view.transpose(1, 0, 2)
    view[...] = values
    return view


def host(kind: str, case: Case) -> dict[str, Any]:
    """The arrays of a case in host memory: NumPy's, or torch tensors."""
    given = {name: getattr(case, name) for name in case.NAMES}
    if kind == "torch":
        pytest.importorskip("torch")
        return {
            name: arrays.TORCH_HOST.finish(arrays.NUMPY.view(x, name)) for name, x in given.items()
        }
    return given


def host_values(array: Any) -> np.ndarray:
    """What an array in host memory holds."""
    return arrays.framework_of(array, "").view(array, "").owner


def dtypes_of(kind: str) -> list[str]:
    """The dtypes that a library can hand over."""
    return [d for d in TOLERANCE if d != "bfloat16" or kind not in ("numba", "interface")]


KINDS_AND_DTYPES = [(kind, dtype) for kind in KINDS for dtype in dtypes_of(kind)]


def named_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function, without what catches those that it does not have."""
    parameters = inspect.signature(function).parameters.values()
    return [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def check_waits(
    gpu: fake_gpu.Kernels, a: dict[str, Any], run: Callable[[], Any], names: str
) -> None:
    """With every array on a stream of its own, ``run`` works on the first one's, after the rest."""
    streams = {name: stream for stream, name in enumerate(a, start=100)}
    for name, array in a.items():
        array.stream = streams[name]
    GPU.log.clear()
    gpu.launched.clear()
    run()
    first, *others = names.split()
    assert {used for _, used in gpu.launched} == {streams[first]}
    waits = [("wait", streams[first], streams[name]) for name in others]
    assert sorted(GPU.log) == sorted(waits)
