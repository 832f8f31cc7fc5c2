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
from rawattn.check.second import SECOND, inner
from rawattn.check.transfer import Array, to_framework, to_numpy

GRADIENTS = ("dq", "dk", "dv")
Inputs = tuple[Array | None, ...]
Names = tuple[str, ...]


class Unsupported(Exception):
    """The function lacks a parameter that the case needs; the text says which."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Functions with the signatures of rawattn's, on arrays of ``framework``.

    They are called with those of rawattn's keywords that they name (all of them for ``**kwargs``).
    ``symmetry``: call ``double_backward`` once more, in a second direction.
    """

    name: str
    framework: str
    forward: Callable[..., Any] | None = None
    backward: Callable[..., Any] | None = None
    preprocess: Callable[..., Any] | None = None
    double_backward: Callable[..., Any] | None = None
    jvp: Callable[..., Any] | None = None
    symmetry: bool = True

    @property
    def second(self) -> bool:
        """Whether there is a function that goes beyond first derivatives."""
        return self.double_backward is not None or self.jvp is not None

    def fit(self, case: Case) -> Case:
        """``case``, without a cotangent of lse where a backward pass cannot take one."""
        takes_dlse = all(
            function is None or "dlse" in _accepted(function, {"dlse": None})
            for function in (self.backward, self.double_backward)
        )
        return case if takes_dlse else replace(case, dlse=False)

    def run(self, expected: Expected) -> dict[str, np.ndarray[Any, Any]]:
        """What the functions give: "out", "lse" (if returned), "delta", "dq", "dk", "dv"; those of
        ``jvp`` and ``double_backward`` by the names of ``expect_second``, and the two numbers of
        "symmetry".

        The backward passes get the reference's out and lse. Where functions take preallocated
        results, those are full of NaN before the call. Raises Unsupported, and what they raise.
        """
        case, move = expected.case, partial(to_framework, framework=self.framework)
        t = expected.tensors.on(self.framework)
        results: dict[str, Array] = {}
        mask: dict[str, Any] = {"softmax_scale": case.softmax_scale}
        mask |= {"causal": case.causal, "window": case.window, "cu_seqlens_k": t.cu_seqlens_k}

        def call(
            function: Callable[..., Any], inputs: Inputs, poisoned: Names, **options: Any
        ) -> Any:
            _require(function, case)
            for name in poisoned:
                target = expected.targets[name]
                options[name] = move(np.full(target.reference.shape, np.nan, dtype=target.dtype))
            return function(*inputs, t.cu_seqlens_q, **_accepted(function, mask | options))

        if self.forward is not None:
            given = call(self.forward, (t.q, t.k, t.v), ("out",), return_lse=True)
            given = given if isinstance(given, tuple | list) else (given,)
            results |= dict(zip(("out", "lse"), given, strict=False))
        if self.preprocess is not None:
            results["delta"] = self.preprocess(move(expected.out), t.dout, dlse=t.dlse)
        passed = (t.dout, t.q, t.k, t.v, move(expected.out), move(expected.lse))
        if self.backward is not None:
            given = call(self.backward, passed, GRADIENTS, dlse=t.dlse)
            results |= dict(zip(GRADIENTS, given, strict=True))
        if self.jvp is not None:
            given = call(self.jvp, (t.q, t.k, t.v, *t.direction), ("out", "tout"))
            results |= dict(zip(("jvp out", "tout", "jvp lse", "tlse"), given, strict=True))
        if self.double_backward is not None:
            second = partial(call, self.double_backward, poisoned=SECOND, dlse=t.dlse)
            given = second((*t.direction, *passed))
            results |= dict(zip(SECOND, given, strict=True))
            if self.symmetry and expected.symmetry is not None:
                u, w = expected.symmetry.direction, expected.tensors.direction
                across = second((*map(move, u), *passed))
                results["symmetry"] = np.array([inner(u, given[2:]), inner(w, across[2:])])
        return {name: to_numpy(array) for name, array in results.items()}


def load(place: str, framework: str) -> Candidate:
    """The candidate at ``FILE.py:NAME``: what the file has of NAME, NAME_backward,
    NAME_double_backward and NAME_jvp. A NAME that ends in such a word is that function alone.

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
    kinds = ("double_backward", "backward", "jvp")
    kind = next((k for k in kinds if name == k or name.endswith(f"_{k}")), "forward")
    names = {kind: name} | ({k: f"{name}_{k}" for k in kinds} if kind == "forward" else {})
    found = {k: getattr(module, n, None) for k, n in names.items()}
    functions: dict[str, Any] = {k: function for k, function in found.items() if callable(function)}
    if not functions:
        raise ValueError(f"{file} has no function {name!r}")
    return Candidate(name, framework, **functions)


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
