"""Bugs of what is read: arrays in each other's place, misread layouts, misplaced row statistics.

``bugs`` is the catalogue: the commonest forms. ``candidates`` are all of them: ``inferred.inputs``
tries these on one view, and plants those that come near.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping

from rawattn.check.diagnose.catalogue import heads, reading
from rawattn.check.diagnose.catalogue.layouts import misread, strided
from rawattn.check.diagnose.catalogue.masks import other_offsets
from rawattn.check.diagnose.catalogue.statistics import along_keys, misplaced, other_sums
from rawattn.check.diagnose.engine.attention import BACKWARD, FIRST, FORWARD, Bug, Store
from rawattn.check.diagnose.engine.question import Question

COMMONEST = 100  # misread layouts, which are tried first


def bugs(question: Question) -> Iterator[Bug]:
    """The commonest ones that can matter for the question, of dense attention."""
    shapes = shapes_of(question)
    for one, other in (("k", "v"), ("q", "k")):
        if shapes[one] == shapes[other]:
            yield _exchanged(one, other)
    if question.dout is not None:
        yield _exchanged("lse", "delta").at(*BACKWARD)
    if 1 < question.num_heads_kv and 1 < question.group:
        yield heads.reduced(heads.by_remainder(question), "h % num_heads_kv")
    for axis, stages in (("forward", FORWARD), ("backward", BACKWARD)):
        yield Bug("softmax-axis", axis, stages, steps=heads.over_queries(axis))
    if question.num_heads_q > 1:
        yield from heads.heads_as_tokens(question)


def candidates(
    question: Question, stage: str, wrong: Collection[str], right: Collection[str]
) -> Iterator[Bug]:
    """All of a stage that change what is ``wrong`` alone, the cheap ones first."""
    right = set(right)
    if stage == "forward" and "lse" not in wrong:
        yield from other_sums()
    if stage == "backward" and not {"dq", "dk"} & right:
        yield from along_keys(question)
    if not {"dq", "dk"} & right:
        yield from strided(question, stage, right)
    layouts = iter(()) if {"dq", "dk"} & right else misread(question, stage, right)
    yield from itertools.islice(layouts, COMMONEST)
    if stage == "backward" and not {"dq", "dk"} & right:
        yield from misplaced(question, right)
    if not {"out", "dv", "gv", "tout"} & right:
        yield from _permuted(question, stage)
        yield from other_offsets(question)
    yield from layouts


def _exchanged(one: str, other: str) -> Bug:
    steps = reading.exchanged({one: other, other: one})
    return Bug("arguments-swapped", f"{one} and {other}", FIRST, steps=steps)


def shapes_of(question: Question) -> dict[str, tuple[object, ...]]:
    """What must agree for one array to stand in another's place; rows past the end do not count."""
    found: dict[str, tuple[object, ...]] = {}
    for name in ("q", "k", "v"):
        lengths = question.lengths_q if name == "q" else question.lengths_k
        found[name] = (lengths, *getattr(question, name).shape[1:])
    return found | dict.fromkeys(("dout", "out"), (*found["q"][:2], question.v.shape[2]))


def _permuted(question: Question, stage: str) -> Iterator[Bug]:
    """Every order of the arrays that a function takes, or saves, in which the shapes agree."""
    backward = stage in ("backward", "second")
    shapes = shapes_of(question)
    names = ("q", "k", "v", "dout", "out") if backward else ("q", "k", "v")
    for order in itertools.permutations(names):
        moved = {to: of for to, of in zip(names, order, strict=True) if to != of}
        if not moved or any(shapes[to] != shapes[of] for to, of in moved.items()):
            continue
        text = ", ".join(f"{of} for {to}" for to, of in moved.items())
        steps = reading.exchanged(moved)
        yield Bug("arguments-swapped", text, (stage,), steps=steps)
        if set(moved) & {"dout", "out"}:
            form = f"{text}, but for delta"
            yield Bug(
                "arguments-swapped", form, (stage,), steps={**steps, "D": reading.right_delta}
            )
        grads = {f"d{to}": f"d{of}" for to, of in moved.items()}
        if stage == "backward" and set(grads) <= {"dq", "dk", "dv"}:
            store = _renamed(grads)
            yield Bug("arguments-swapped", f"{text}, gradients too", BACKWARD, None, steps, store)
    if backward:
        pairs = [("lse", "delta")] + [("lse", "dlse")] * (question.dlse is not None)
        for one, other in pairs:
            steps = reading.exchanged({one: other, other: one})
            yield Bug("arguments-swapped", f"{one} and {other}", (stage,), steps=steps)
            for to, of in ((one, other), (other, one)):
                steps = reading.exchanged({to: of})
                yield Bug("arguments-swapped", f"{of} for {to}", (stage,), steps=steps)


def _renamed(names: Mapping[str, str]) -> Store:
    return lambda question, answers: answers | {of: answers[to] for to, of in names.items()}
