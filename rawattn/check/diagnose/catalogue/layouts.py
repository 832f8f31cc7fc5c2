"""Bugs of layouts: the axes of an array, of every sequence of it, or of padded ones, taken for
others, where it is read or where it is stored."""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.catalogue import reading
from rawattn.check.diagnose.catalogue.operands import Places, column_indices
from rawattn.check.diagnose.engine.attention import (
    BACKWARD,
    STEPS,
    Bug,
    Context,
    Floats,
    Step,
    Store,
)
from rawattn.check.diagnose.engine.question import BY_ROW, OF_KEYS, STAGES, Question

Layout = Callable[[Floats], Floats]  # of (tokens, heads, columns)
AXES = ((1, 0, 2), (0, 2, 1), (2, 1, 0), (1, 2, 0), (2, 0, 1))
PADDED = "every padded sequence"
SWIZZLED = (
    "the order of columns on the way to memory: a swizzle of shared memory that is written by one "
    "formula and read by another, a layout of fragments"
)
SPREAD = ("", "every sequence", PADDED)


def layouts() -> Iterator[tuple[str, str, Layout]]:
    """How the tokens of an array, or of a sequence of it, are taken for others: the class, the
    form in words, and what is then read."""
    for axes in AXES:
        text = "".join("thd"[axis] for axis in axes)
        yield "input-layout", f"thd read as {text}", _as(axes)
        yield "input-layout", f"{text} read as thd", _from(axes)
    yield "input-layout", "heads reversed", lambda x: x[:, ::-1]
    yield "input-layout", "tokens reversed", lambda x: x[::-1]
    yield "input-layout", "the next head", lambda x: np.roll(x, -1, axis=1)
    yield "input-layout", "the head before", lambda x: np.roll(x, 1, axis=1)


def _as(axes: tuple[int, int, int]) -> Layout:
    inverse = tuple(int(i) for i in np.argsort(axes))
    return lambda x: x.reshape([x.shape[axis] for axis in axes]).transpose(inverse)


def _from(axes: tuple[int, int, int]) -> Layout:
    return lambda x: np.ascontiguousarray(x.transpose(axes)).reshape(x.shape)


def spread(
    question: Question,
    layout: Layout,
    over: str,
    name: str,
    x: Floats,
    padding: Sequence[Floats] = (),
) -> Floats:
    """``layout`` of an array, of ``every sequence`` of it, or of each one padded to the longest
    with zeros, or with these rows."""
    rows = name in (*BY_ROW, "dlse")
    whole = (x.T if rows else x)[..., None] if rows else x
    whole = np.asarray(whole).astype(np.float64)
    if not over:
        found = layout(whole)
    else:
        of_keys = name in ("k", "v", *OF_KEYS)
        offsets = np.asarray(question.cu_seqlens_k if of_keys else question.cu_seqlens_q)
        longest = int(np.diff(offsets).max(initial=0))
        found = whole.copy()
        for b, (start, stop) in enumerate(itertools.pairwise(int(i) for i in offsets)):
            part = whole[start:stop]
            if over == PADDED:
                part = np.zeros((longest, *whole.shape[1:]))
                part[stop - start :] = padding[b] if len(padding) else 0.0
                part[: stop - start] = whole[start:stop]
            found[start:stop] = layout(part)[: stop - start]
    return found[..., 0].T if rows else found


def _other_end(question: Question, last: bool, name: str, x: Floats) -> Floats:
    """Rows of padded sequences that begin with the data, taken as if they ended with it
    (``last``), or the other way round."""
    rows = name in (*BY_ROW, "dlse")
    of_keys = name in ("k", "v", *OF_KEYS)
    offsets = np.asarray(question.cu_seqlens_k if of_keys else question.cu_seqlens_q)
    longest = int(np.diff(offsets).max(initial=0))
    source = np.moveaxis(np.asarray(x), int(rows), 0)
    found = np.zeros(source.shape)
    for start, stop in itertools.pairwise(int(i) for i in offsets):
        length = stop - start
        pads = min(longest - length, length)
        if last:
            found[start : stop - pads] = source[start + pads : stop]
        else:
            found[start + pads : stop] = source[start : stop - pads]
    return np.moveaxis(found, 0, int(rows))


class Rearrangement(NamedTuple):
    """``of`` an array by its name. ``layout`` and what it is ``over`` where that is all."""

    bug: str
    text: str
    of: Callable[[str, Floats], Floats]
    layout: Layout | None = None
    over: str = ""


def rearrangements(question: Question) -> Iterator[Rearrangement]:
    equal = len(set(question.lengths_q)) == 1 and question.lengths_q == question.lengths_k
    for bug, text, layout in layouts():
        for over in SPREAD:
            if over and (question.batch == 1 or (over == PADDED and equal) or "head" in text):
                continue
            form = f"{text}, {over}" if over else text
            of = partial(spread, question, layout, over)
            yield Rearrangement(bug, form, of, layout, over)
    if not equal:
        for last in (True, False):
            text = "end" if last else "begin"
            yield Rearrangement(
                "offsets-shifted",
                f"padded sequences taken as if the data were at the {text}",
                partial(_other_end, question, last),
            )


def strided(question: Question, stage: str, right: Collection[str]) -> Iterator[Bug]:
    """An array read with the strides of another one: of another head_dim, or number of heads."""
    columns = {question.q.shape[2], question.v.shape[2]}
    heads = {question.num_heads_q, question.num_heads_kv}
    if (len(columns) == 1 and len(heads) == 1) or {"out", "tout", "gv"} & set(right):
        return
    shapes = {name: getattr(question, name).shape[1:] for name in ("q", "k", "v")}
    shapes |= dict.fromkeys(("dout", "out"), (question.num_heads_q, question.v.shape[2]))
    names = ["v"] if {"lse", "dv"} & set(right) else ["q", "k", "v"]
    if stage in ("backward", "second"):
        names += ["out"] if "dv" in right else ["dout", "out"]
    for name in names:
        own_heads, own = shapes[name]
        for count, tokens, width in itertools.product(heads, columns, columns):
            if (count, tokens, width) == (own_heads, own, own):
                continue
            text = f"{name}: read with strides of {count} * {tokens} a token and {width} a head"
            change = partial(_with_strides, count * tokens, width)
            steps = reading.rearranged((name,), change)
            look_at = f"the strides of {name}, which has {own_heads} heads of {own} columns"
            yield Bug("input-layout", text, (stage,), None, steps, None, look_at)
            if name == "dout":
                steps = {**steps, "D": reading.right_delta}
                form = f"{text}, but for delta"
                yield Bug("input-layout", form, (stage,), None, steps, None, look_at)


def _with_strides(token: int, head: int, name: str, x: Floats) -> Floats:
    """What a read with other strides finds, and 0 past the end."""
    flat = np.asarray(x).astype(np.float64).ravel()
    t, h, j = np.ogrid[: x.shape[0], : x.shape[1], : x.shape[2]]
    index = t * token + h * head + j
    if not flat.size:
        return np.asarray(x)
    return np.where(index < flat.size, flat[np.minimum(index, flat.size - 1)], 0.0)


def misread(question: Question, stage: str, right: Collection[str]) -> Iterator[Bug]:
    forward: list[tuple[str, ...]] = [("q",), ("k",), ("v",), ("k", "v"), ("q", "k", "v")]
    sets = list(forward)
    if stage in ("backward", "second"):
        sets = [("dout",), ("out",), ("lse",), ("delta",), ("lse", "delta"), ("dout", "out")]
        sets += [("dlse",), ("lse", "dlse")] * (question.dlse is not None)
        sets += [*forward, ("q", "k", "v", "dout"), ("q", "k", "v", "dout", "out")]
    if {"out", "tout", "gv"} & set(right):
        return
    if "dv" in right:  # P and dout are right
        sets = [one for one in sets if one in (("out",), ("delta",), ("dlse",), ("v",))]
    for kind, text, change, _, over in rearrangements(question):
        for names in sets:
            bug = kind
            rows = set(names) <= {"lse", "dlse", "delta"}
            if rows and "d" in text.split(" read as ")[0][:2]:
                continue
            steps = reading.rearranged(names, change)
            form = f"{', '.join(names)}: {text}"
            if rows and ("head" in text or over):
                bug = "statistics-misplaced"
            yield Bug(bug, form, (stage,), steps=steps)
            if "dout" in names:
                but = {**steps, "D": reading.right_delta}
                yield Bug(bug, f"{form}, but for delta", (stage,), steps=but)
            if names[:3] == ("q", "k", "v"):
                store = stored(change)
                yield Bug(bug, f"{form}, results too", (stage,), None, steps, store)


def stored(change: Callable[[str, Floats], Floats], names: Collection[str] = ()) -> Store:
    """Results, or some of them, with a change."""
    return lambda question, answers: {
        name: change(name, x) if not names or name in names else x for name, x in answers.items()
    }


def rearranged(question: Question, name: str) -> Iterator[tuple[Bug, Bug | None]]:
    """One result in another layout, and what follows for the backward pass if it is out."""
    stages = tuple(stage for stage in STAGES if name in STAGES[stage])
    for text, of in {} if name in BY_ROW else column_indices(question).items():
        store = stored(partial(_columns_moved, question, of), (name,))
        yield Bug("transposed", f"{name}: {text}", stages, None, {}, store, SWIZZLED), None
    for bug, text, change, layout, over in rearrangements(question):
        bug = "transposed" if bug == "input-layout" else bug
        form = f"{name}: {text.replace('read', 'stored')}"
        then = None
        if name == "out" and layout is not None:
            steps = _differentiated(layout, over)
            then = Bug(bug, f"{form}, differentiated", BACKWARD, steps=steps)
        yield Bug(bug, form, stages, store=stored(change, (name,))), then
        if name == "out" and layout is not None and over == PADDED:
            of = partial(spread, question, layout, over, padding=_means(question))
            store = stored(of, (name,))
            yield Bug(bug, f"{form} with queries of 0", stages, store=store), then


def _columns_moved(question: Question, of: Places, name: str, x: Floats) -> Floats:
    """Every row with its columns in other places, by its number in the sequence."""
    sequence = question.sequence_of("k" if name in OF_KEYS else "q")
    offsets = question.cu_seqlens_k if name in OF_KEYS else question.cu_seqlens_q
    row = np.arange(len(x)) - np.asarray(offsets)[np.maximum(sequence, 0)]
    n = x.shape[2]
    source = np.broadcast_to(of(row[:, None, None], np.arange(n), n), x.shape)
    inside = (source >= 0) & (source < n)
    return np.where(inside, np.take_along_axis(x, np.where(inside, source, 0), -1), 0.0)


def _means(question: Question) -> list[Floats]:
    """The out of a query of zeros in every sequence: the mean of v, (num_heads_q, head_dim_v)."""
    found = []
    for start, stop in itertools.pairwise(int(i) for i in question.cu_seqlens_k):
        v = np.asarray(question.v[start:stop]).astype(np.float64)
        mean = v.sum(axis=0) / max(stop - start, 1)
        found.append(np.repeat(mean, question.group, axis=0))
    return found


def _differentiated(layout: Layout, over: str) -> dict[str, Step]:
    """A backward pass through a forward one whose out was stored in another layout: dout comes
    back by the inverse way, that of padding rows to queries of 0, whose P is uniform."""

    def returned(c: Context) -> tuple[Floats, Floats]:
        question = c.question
        dout = np.asarray(question.dout).astype(np.float64)
        found, past = np.zeros_like(dout), np.zeros((question.batch, *dout.shape[1:]))
        offsets = [int(i) for i in question.cu_seqlens_q] if over else [0, len(dout)]
        for b, (start, stop) in enumerate(itertools.pairwise(offsets)):
            size = max(question.lengths_q) if over == PADDED else stop - start
            shape = (size, *dout.shape[1:])
            places = layout(np.arange(math.prod(shape)).reshape(shape))[: stop - start]
            flat = np.zeros(math.prod(shape))
            flat[places] = dout[start:stop]
            found[start:stop] = flat.reshape(shape)[: stop - start]
            past[b] = flat.reshape(shape)[stop - start :].sum(axis=0)
        return found, past

    def Y(c: Context) -> Floats:
        dout, past = returned(c)
        c.dO = reading.of_view(c, "dout", dout)
        view = c.view
        c.past = past[view.sequence, view.heads] / len(view.keys)
        return np.asarray(STEPS["Y"](c))

    return {
        "Y": Y,
        "D": lambda c: (c.P * c.dP).sum(axis=-1) - c.dL,
        "dV": lambda c: STEPS["dV"](c) + c.past[:, None, :],
    }
