"""Somebody's attention function, run on a case: arrays in, NumPy arrays of every tensor out."""

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rawattn.check.cases import Case, Direction
from rawattn.check.exact import gradients_of, of_direction, second_of
from rawattn.check.expected import Expected
from rawattn.check.second import inner
from rawattn.check.transfer import Array, to_framework, to_numpy

FORWARD = ("out", "lse", "sliding out", "sliding lse")
TANGENTS = ("jvp out", "tout", "jvp lse", "tlse")
Inputs = tuple[Array | None, ...]
Names = tuple[str, ...]


class Unsupported(Exception):
    """The function lacks a parameter that the case needs; the text says which."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Functions with the signatures of rawattn's, on arrays of ``framework``.

    They are called with those of rawattn's keywords that they name (all of them for ``**kwargs``).
    ``symmetry``: call ``double_backward`` once more, in a second direction. ``repeat``: call the
    backward passes once more, for the same bits.
    """

    name: str
    framework: str
    forward: Callable[..., Any] | None = None
    backward: Callable[..., Any] | None = None
    preprocess: Callable[..., Any] | None = None
    double_backward: Callable[..., Any] | None = None
    jvp: Callable[..., Any] | None = None
    symmetry: bool = True
    repeat: bool = False

    @property
    def sparse(self) -> bool:
        """Whether the functions are about block-sparse attention: they take block_indices."""
        functions = (self.forward, self.backward, self.double_backward, self.jvp)
        return any(f is not None and "block_indices" in _parameters(f) for f in functions)

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
        """What the functions give: "out", "lse" (if returned), "delta", the gradients; those of
        ``jvp`` and ``double_backward`` by the names of ``expect_second``, the two numbers of
        "symmetry", and as "repeat" how many elements of each result a second call changed.

        The backward passes get the reference's out and lse. Where functions take preallocated
        results, those are full of NaN before the call. Raises Unsupported, and what they raise.
        """
        case, move = expected.case, partial(to_framework, framework=self.framework)
        t = expected.tensors.on(self.framework)
        results: dict[str, Array] = {}

        def call(
            function: Callable[..., Any], inputs: Inputs, poisoned: Names, **options: Any
        ) -> Any:
            for name in set(poisoned) & set(case.preallocated):
                target = expected.targets[name]
                options[name] = move(np.full(target.reference.shape, np.nan, dtype=target.dtype))
            options = case.options | t.options | options
            return function(*inputs, *t.where, **_accepted(function, options))

        def backward(
            function: Callable[..., Any], names: Names, direction: Direction
        ) -> dict[str, Array]:
            """The results of a backward pass; in a direction, of ``double_backward``."""
            moved = dict(zip((f"dd{case.learned}",), direction[3:], strict=False))
            _require(function, case.needs | _there(moved))
            due = tuple(name for name in names if name in expected.targets)
            given = call(function, (*direction[:3], *passed), due, dlse=t.dlse, **moved)
            if len(given) == len(due) + 1 and given[-1] is None:  # no gradient of ``case.learned``
                given = given[:-1]
            return dict(zip(due, given, strict=True))

        if self.forward is not None:
            options = {"return_lse": True} | case.forward_options
            _require(self.forward, case.needs | dict.fromkeys(case.forward_options, True))
            given = call(self.forward, (t.q, t.k, t.v), ("out",), **options)
            given = given if isinstance(given, tuple | list) else (given,)
            two_outs = case.forward_options and not _accepted(self.forward, {"return_lse": True})
            results |= dict(zip(FORWARD[::2] if two_outs else FORWARD, given, strict=False))
        if self.preprocess is not None:
            results["delta"] = self.preprocess(move(expected.out), t.dout, dlse=t.dlse)
        passed = (t.dout, t.q, t.k, t.v, move(expected.out), move(expected.lse))
        if self.jvp is not None:
            moved = dict(zip((f"t{case.learned}",), t.direction[3:], strict=False))
            _require(self.jvp, case.needs | _there(moved))
            results_in = ("out", "tout") if "tout" in case.preallocated else ()
            given = call(self.jvp, (t.q, t.k, t.v, *t.direction[:3]), results_in, **moved)
            results |= dict(zip(TANGENTS, given, strict=True))
        for function, names, direction in (
            (self.backward, gradients_of(case), ()),
            (self.double_backward, second_of(case), t.direction),
        ):
            if function is not None:
                found = backward(function, names, direction)
                again = backward(function, names, direction) if self.repeat else {}
                results |= found
                if again:
                    results["repeat"] = np.array([_changed(found[n], again[n]) for n in again])
        if self.double_backward and self.symmetry and expected.symmetry is not None:
            u, w = expected.symmetry.direction, expected.tensors.direction
            across = backward(self.double_backward, second_of(case), tuple(map(move, u)))
            products = [
                inner(part, [found.get(name) for name in of_direction(case)[: len(part)]])
                for part, found in ((u, results), (w, across))
            ]
            results["symmetry"] = np.array(products)
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


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _accepted(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Those of ``options`` that ``function`` has a parameter for."""
    parameters = _parameters(function)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return options
    return {name: value for name, value in options.items() if name in parameters}


def _require(function: Callable[..., Any], needed: dict[str, bool]) -> None:
    """Raise Unsupported where ``function`` lacks a parameter that is needed."""
    accepted = _accepted(function, needed)
    missing = [name for name, need in needed.items() if need and name not in accepted]
    if missing:
        raise Unsupported(f"no parameter {', '.join(missing)}")


def _there(options: dict[str, Any]) -> dict[str, bool]:
    return {name: value is not None for name, value in options.items()}


def _changed(first: Array, second: Array) -> int:
    """How many elements of two equal calls differ in their bits."""
    one, two = (np.ascontiguousarray(to_numpy(a)) for a in (first, second))
    if one.shape != two.shape or one.dtype != two.dtype:
        return max(one.size, two.size, 1)
    return int((one.view(f"u{one.itemsize}") != two.view(f"u{two.itemsize}")).sum())
