"""Somebody's attention function, run on a case: arrays in, NumPy arrays of every tensor out."""

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rawattn.check.cases import Case
from rawattn.check.expected import Expected
from rawattn.check.transfer import Array, to_framework, to_numpy


class Unsupported(Exception):
    """The function lacks a parameter that the case needs; the text says which."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Functions with the signatures of rawattn's, on arrays of ``framework``.

    They are called with those of rawattn's keywords that they name (all of them for ``**kwargs``).
    """

    name: str
    framework: str
    forward: Callable[..., Any] | None = None
    backward: Callable[..., Any] | None = None
    preprocess: Callable[..., Any] | None = None

    def fit(self, case: Case) -> Case:
        """``case``, without a cotangent of lse where a backward pass cannot take one."""
        takes_dlse = self.backward is None or "dlse" in _accepted(self.backward, {"dlse": None})
        return case if takes_dlse else replace(case, dlse=False)

    def run(self, expected: Expected) -> dict[str, np.ndarray[Any, Any]]:
        """What the functions give: "out", "lse" (if returned), "delta", "dq", "dk", "dv".

        The backward pass gets the reference's out and lse. Where functions take preallocated
        results, those are full of NaN before the call. Raises Unsupported, and what they raise.
        """
        case, move = expected.case, partial(to_framework, framework=self.framework)
        t = expected.tensors.on(self.framework)
        results: dict[str, Array] = {}
        mask: dict[str, Any] = {"softmax_scale": case.softmax_scale}
        mask |= {"causal": case.causal, "window": case.window, "cu_seqlens_k": t.cu_seqlens_k}

        def poison(*names: str) -> dict[str, Array]:
            targets = [(name, expected.targets[name]) for name in names]
            return {n: move(np.full(t.reference.shape, np.nan, dtype=t.dtype)) for n, t in targets}

        if self.forward is not None:
            _require(self.forward, case)
            options = mask | poison("out") | {"return_lse": True}
            options = _accepted(self.forward, options)
            given = self.forward(t.q, t.k, t.v, t.cu_seqlens_q, **options)
            given = given if isinstance(given, tuple | list) else (given,)
            results |= dict(zip(("out", "lse"), given, strict=False))
        if self.preprocess is not None:
            results["delta"] = self.preprocess(move(expected.out), t.dout, dlse=t.dlse)
        if self.backward is not None:
            _require(self.backward, case)
            options = _accepted(self.backward, mask | poison("dq", "dk", "dv") | {"dlse": t.dlse})
            inputs = (t.dout, t.q, t.k, t.v, move(expected.out), move(expected.lse))
            given = self.backward(*inputs, t.cu_seqlens_q, **options)
            results |= dict(zip(("dq", "dk", "dv"), given, strict=True))
        return {name: to_numpy(array) for name, array in results.items()}


def load(place: str, framework: str) -> Candidate:
    """The candidate at ``FILE.py:NAME``, with ``NAME_backward`` of the same file if it is there.

    ValueError where the text has another form or the file is missing, broken or lacks the name.
    """
    file, colon, name = place.rpartition(":")
    if not colon or not name.isidentifier():
        raise ValueError(f"{place!r} is not of the form FILE.py:NAME")
    if not Path(file).is_file():
        raise ValueError(f"{file}: no such file")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{file} cannot be imported: {type(error).__name__}: {error}") from error
    forward = getattr(module, name, None)
    if not callable(forward):
        raise ValueError(f"{file} has no function {name!r}")
    return Candidate(name, framework, forward, getattr(module, f"{name}_backward", None))


def _accepted(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Those of ``options`` that ``function`` has a parameter for."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return options
    return {name: value for name, value in options.items() if name in parameters}


def _require(function: Callable[..., Any], case: Case) -> None:
    """Raise Unsupported where ``case`` needs a parameter that ``function`` lacks."""
    needed = {
        "causal": case.causal,
        "window": case.window != (-1, -1),
        "softmax_scale": case.softmax_scale is not None,
        "cu_seqlens_k": case.lengths_k != case.lengths_q or case.past_k != case.past_q,
    }
    accepted = _accepted(function, needed)
    missing = [name for name, need in needed.items() if need and name not in accepted]
    if missing:
        raise Unsupported(f"no parameter {', '.join(missing)}")
