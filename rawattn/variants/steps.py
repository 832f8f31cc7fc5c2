"""The kernels that each function launches beside the forward: once, for all that prepare, compile
or visit them."""

from collections.abc import Mapping
from typing import NamedTuple

from rawattn.variants.row import Row


class Step(NamedTuple):
    """A kernel of a function, and whether it takes its atomic form there.

    ``in_order``: only beside a row of backward_kv that can add in order, or, False, that cannot.
    ``of_sinks``: only where there are sinks.
    """

    stem: str
    atomic: bool = False
    in_order: bool | None = None
    of_sinks: bool = False


METHODS = ("atomic_dq", "atomic_dkv", "deterministic")
_FIRST = Step("backward_preprocess")
_SINKS = Step("backward_sinks", of_sinks=True)
_LAST = Step("backward_postprocess")
STEPS: Mapping[str, tuple[Step, ...]] = {  # methods of backward, jvp, two ways of double_backward
    "atomic_dq": (_FIRST, _SINKS, Step("backward_kv", True), _LAST),
    "atomic_dkv": (_FIRST, _SINKS, Step("backward_q", True), _LAST),
    "deterministic": (
        *(_FIRST, _SINKS, Step("backward_kv"), Step("backward_q", in_order=False)),
        Step("backward_postprocess", in_order=True),
    ),
    "jvp": (Step("jvp"),),
    "second/atomic": (Step("double_backward_out"), _SINKS, Step("double_backward_kv", True), _LAST),
    "second/two_pass": (
        *(Step("double_backward_out"), _SINKS),
        *(Step("double_backward_kv"), Step("double_backward_q")),
    ),
}
SECOND = tuple(step for step in STEPS if step not in METHODS)  # those that take a direction

LISTS = tuple(map(Step, ("block_lists", "block_offsets", "block_queries", "block_order")))
SPARSE_STEPS: Mapping[str, tuple[Step, ...]] = {
    "atomic": (*LISTS, _FIRST, Step("sparse_backward_kv", True), Step("sparse_postprocess")),
    "deterministic": (*LISTS, _FIRST, Step("sparse_backward_kv"), Step("sparse_backward_q")),
    "jvp": (Step("sparse_forward"), Step("sparse_double_backward_out")),
    "second": (
        *LISTS,
        *map(Step, ("sparse_double_backward_out", "sparse_double_backward_kv")),
        Step("sparse_double_backward_q"),
    ),
}


def steps_beside(row: Row, name: str, *, sinks: bool = False) -> tuple[Step, ...]:
    """The steps of a function where ``row`` is that of backward_kv."""
    steps = (step for step in STEPS[name] if step.in_order in (None, row.in_order))
    return tuple(step for step in steps if step.of_sinks <= sinks)


def method_of(method: str | None, deterministic: bool) -> str:
    """How the backward accumulates: the caller's choice, else the fastest that is allowed."""
    if deterministic:
        return METHODS[-1]
    return method or "atomic_dq"
