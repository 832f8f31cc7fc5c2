"""Bugs of what few problems have: a softcap, sinks, keys that are not in use."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from rawattn.check.diagnose.catalogue import maps
from rawattn.check.diagnose.catalogue.second_order import JVP, SECOND, with_values
from rawattn.check.diagnose.engine.attention import BACKWARD, FORWARD, Bug, View, each, views_of
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.engine.steps import LOG2_E, STEPS, Context, Floats, Step
from rawattn.reference.dense import allowed

ALL = 1 << 40  # keys: more than there are
SLOPE = "softcap-slope-omitted"


def bugs(question: Question) -> Iterator[Bug]:
    if question.softcap is not None:
        yield Bug("softcap-dropped", steps={"cap": lambda c: (c.Y, 1.0, 0.0)})
        straight = {"cap": lambda c: (STEPS["cap"](c)[0], 1.0, 0.0)}
        yield Bug(SLOPE, "1 in its place", BACKWARD + SECOND + JVP, steps=straight)
        twice = {"tdY": with_values("tdY", tY=lambda c: c.E)}
        yield Bug(SLOPE, "the bend times E, the slope twice", SECOND, steps=twice)
        for words, of in CURVES.items():
            steps = {"cap": partial(_sloped, of)}
            yield Bug(SLOPE, f"{words} in its place", SECOND + JVP, steps=steps)
    if question.sinks is not None:
        none = with_values("softmax", sink=lambda c: None)
        L, P, P0 = (lambda c: none(c)[0]), (lambda c: none(c)[1]), {"P0": lambda c: 0.0}
        yield Bug("sinks-dropped", "", ("forward", "jvp"), steps={"softmax": none} | P0)
        yield Bug("sinks-dropped", "in lse alone", FORWARD, steps={"L": L})
        yield Bug("sinks-dropped", "in out alone", FORWARD, steps={"P": P})
        text = "in lse of sequences without keys"
        unsunk = {"L": lambda c: np.where(c.S.shape[2] == 0, -np.inf, STEPS["L"](c))}
        yield Bug("sinks-dropped", text, FORWARD, steps=unsunk)
        yield Bug("sinks-dropped", "own softmax", ("backward", "second"), steps={"bP": P} | P0)
        yield from _other_sinks(question)
    if question.seqused_k is not None:
        yield Bug("seqused-ignored", "every key is seen", see=partial(_used, ALL))
        for more, words in ((1, "many"), (-1, "few")):
            yield Bug("seqused-ignored", f"one key too {words} is in use", see=partial(_used, more))
        if question.mask_window != (-1, -1):
            text = "the diagonal ends at the last of all keys"
            yield Bug("seqused-ignored", text, see=each(_at_all_keys))


Curve = Callable[[Floats, float], Floats]  # of tanh and the softcap
CURVES: dict[str, Curve] = {  # in place of 1 - tanh^2
    "1 - tanh": lambda t, cap: 1 - t,
    "1 - S^2, of the capped score,": lambda t, cap: 1 - (cap * t) ** 2,
}


def _sloped(of: Curve, c: Context) -> tuple[Floats, ...]:
    value, _, bend = STEPS["cap"](c)
    return value, of(value / c.question.softcap, c.question.softcap), bend


def _other_sinks(question: Question) -> Iterator[Bug]:
    sinks, h = np.asarray(question.sinks, dtype=np.float64), np.arange(question.num_heads_q)
    raised: Step = lambda c: c.sink + c.S.max(axis=-1, initial=-np.inf)  # noqa: E731
    text = "exp(sink), not relative to the maximum"
    yield Bug("sinks-misplaced", text, FORWARD, steps=with_sink(raised))
    found = {"exp(softmax_scale sink)": (question.scale, h), "exp(ln 2 sink)": (1 / LOG2_E, h)}
    of_heads = maps.other_heads(h, len(h), question.group)
    found |= {f"that of {words}": (1.0, heads) for words, heads in of_heads.items()}
    for words, (times, heads) in found.items():
        if (times * sinks[heads] != sinks).any():
            sink = partial(_of_heads, times, heads)  # of any problem's sinks
            steps = with_sink(sink) | {"P0": with_values("P0", sink=sink)}
            yield Bug("sinks-misplaced", words, ("forward", "jvp"), steps=steps)


def with_sink(sink: Step) -> dict[str, Step]:
    return {"softmax": with_values("softmax", sink=sink)}


def _of_heads(times: float, heads: np.ndarray, c: Context) -> Floats:
    return np.asarray(times * np.asarray(c.question.sinks, float)[heads[c.view.heads], None])


def _used(more: int, question: Question, views: tuple[View, ...]) -> Sequence[View]:
    """So many more keys are in use, as far as there are."""
    used = np.maximum(np.asarray(question.seqused_k).astype(np.int64) + more, 0)
    return views_of(replace(question, seqused_k=used))


def _at_all_keys(question: Question, view: View) -> View:
    """The keys in use alone, but queries are placed as if all keys were."""
    allotted = np.diff(question.cu_seqlens_k)[view.sequence]
    mask = allowed(len(view.rows), int(allotted), question.mask_window)
    return replace(view, weight=mask[None, :, : len(view.keys)].astype(np.float64))
