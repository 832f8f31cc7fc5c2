"""Attention and its derivatives with a bug planted in it, one equation a step. A problem falls into
views: the queries of one key/value head of one sequence, the keys that they look at, and how often.
A bug changes views, replaces steps, or rearranges what a stage has stored; with none the results
are those of ``rawattn.reference``. Long, since all stages share the views."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from rawattn.check.diagnose.engine.effort import spend
from rawattn.check.diagnose.engine.lists import Lists, lists_of
from rawattn.check.diagnose.engine.question import BY_ROW, OF_KEYS, OF_SINKS, Answers, Question
from rawattn.check.diagnose.engine.steps import SCORES, STEPS, Context, Floats, Step, changed, times
from rawattn.reference.dense import allowed

__all__ = ["STEPS", "Context", "Floats", "Step", "changed", "times"]  # too

exact: Callable[[Floats], Floats] = lambda x: x  # noqa: E731
TILES = (8, 16, 32, 64, 128)
FORWARD, BACKWARD = ("forward",), ("backward",)
FIRST = FORWARD + BACKWARD
OF_STAGES = {
    "forward": "softmax L P O",
    "backward": "bP P0 dP D dS dY dQ dK dV sum_heads dG dsink",
    "jvp": "softmax L P P0 O tY E e tP tO tL",
    "second": "bP P0 tY E e tP tO tL dP D dS dY sum_heads tdP w tdS tdY gQ gK gV gG gsink",
}
PROGRAMS = {stage: (*SCORES, *steps.split()) for stage, steps in OF_STAGES.items()}
RESULTS = {  # of a stage, and the steps that give them
    "forward": {"out": "O", "lse": "L"},
    "backward": dict(delta="D", dq="dQ", dk="dK", dv="dV", dblock_scale="dG", dsinks="dsink"),
    "jvp": {"jvp out": "O", "tout": "tO", "jvp lse": "L", "tlse": "tL"},
    "second": dict(ddout="tO", ddlse="tL", gq="gQ", gk="gK", gv="gV")
    | dict(gblock_scale="gG", gsinks="gsink"),
}
OF_A_CALL, OF_A_VIEW, OF_A_SCORE = 0.4, 0.06, 1 / 60_000  # units of effort, of a stage
OF_LISTS = 5  # times as many, where other blocks are listed


class Rounding(NamedTuple):
    """What happens to the result of every ``operation``, to each ``operand`` of a matmul that is a
    result itself (P, dS and their tangents), and to each ``entry``, an input."""

    operation: Callable[[Floats], Floats] = exact
    operand: Callable[[Floats], Floats] = exact
    entry: Callable[[Floats], Floats] = exact


class Same(tuple[Any, ...]):
    """A key of a cache: equal to what has the same objects in it alone."""

    def __hash__(self) -> int:
        return hash(tuple(map(id, self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and tuple(map(id, self)) == tuple(map(id, other))


@dataclass(frozen=True)
class View:
    """``rows`` (n,) of q and ``keys`` (m,) of k and v; a key of -1 is a row of zeros. weight (heads
    or 1, n, m): how often a query sees a key. slot, of the same shape: which block_scale is its, -1
    for none. selections: heads of block_indices; lists: what is walked."""

    sequence: int
    rows: np.ndarray
    keys: np.ndarray
    heads: np.ndarray
    head_kv: int
    weight: Floats
    slot: np.ndarray | None = None
    selections: np.ndarray | None = None
    lists: Lists | None = None


Passed = tuple[Floats, Floats]  # out and lse, to a backward pass
Given = Passed | None
See = Callable[[Question, tuple[View, ...]], Sequence[View]]
Store = Callable[[Question, Answers], Answers]
Only = Callable[[View], bool]


@dataclass(frozen=True, eq=False)
class Bug:
    """A bug of class ``name`` in one of its ``variant`` forms, planted in some stages. alike: bugs
    with equal ones do the same to the sequence that they are tried on first."""

    name: str
    variant: str = ""
    stages: tuple[str, ...] = tuple(PROGRAMS)
    see: See | None = None
    steps: Mapping[str, Step] = field(default_factory=dict)
    store: Store | None = None
    alike: object = None

    def at(self, *stages: str) -> "Bug":
        return replace(self, stages=stages)


NO_BUG, NONE = Bug("right"), Rounding()


def each(of: Callable[..., View], *given: Any) -> See:
    """What ``of`` makes of every view by itself: of what is given, the question and the view."""
    return lambda question, views: [of(*given, question, view) for view in views]


@lru_cache(maxsize=8)
def views_of(question: Question, sliding: bool = False) -> tuple[View, ...]:
    """The right views; ``sliding``: those of the second branch of block-sparse attention."""
    if question.sparse and not sliding:
        return tuple(sparse_views(question))
    of = replace(question, window=question.sliding or (-1, -1)) if sliding else question
    found, groups = list[View](), np.arange(question.num_heads_q).reshape(question.num_heads_kv, -1)
    for b, rows, keys in sequences(question):
        weight = allowed(len(rows), len(keys), of.mask_window)[None].astype(np.float64)
        found += [View(b, rows, keys, heads, n, weight) for n, heads in enumerate(groups)]
    return tuple(found)


def sparse_views(
    question: Question, lists: Lists | None = None, like: Sequence[View] | None = None
) -> Iterator[View]:
    """Of queries that walk ``lists``, by default the right ones; of heads of ``like`` alone."""
    wanted = None if like is None else {(view.sequence, view.head_kv) for view in like}
    lists = lists_of(question) if lists is None else lists
    groups = np.arange(question.num_heads_q).reshape(question.num_heads_kv, -1)
    for b, rows, keys in sequences(question):
        for head_kv, heads in enumerate(groups):
            if wanted is not None and (b, head_kv) not in wanted:
                continue
            of = heads * lists.named.shape[1] // question.num_heads_q
            walked, entry, times = lists.keys(b, of)
            slot = np.where((times > 0) & (entry < question.slots), entry, -1)
            seen = rows, keys[walked], heads, head_kv, times.astype(np.float64)
            yield View(b, *seen, slot, of if lists.heads is None else lists.heads[heads], lists)


def sequences(question: Question) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Number, rows of q and rows of k of every sequence that has both; with sinks, or no keys."""
    offsets_q, offsets_k = question.cu_seqlens_q, question.cu_seqlens_k
    for b in range(question.batch):
        rows = np.arange(offsets_q[b], offsets_q[b + 1])
        keys = np.arange(offsets_k[b], offsets_k[b] + question.lengths_k[b])
        if len(rows) and (len(keys) or question.sinks is not None):
            yield b, rows, keys


def run_steps(c: Context, names: Sequence[str], bug: Bug) -> None:
    for name in names:
        setattr(c, "P" if name == "bP" else name, bug.steps.get(name, STEPS[name])(c))


def solve(
    question: Question,
    stage: str,
    bug: Bug = NO_BUG,
    *,
    rounding: Rounding = NONE,
    given: Given = None,
    only: Only | None = None,
) -> Answers:
    """What a stage gives when ``bug`` is in it. given: out and lse for the backward stages; those
    of the right forward by default. only: the views whose results are wanted at least."""
    planted = bug if stage in bug.stages else NO_BUG
    pairs = np.multiply(question.lengths_q, question.lengths_k)
    views = np.count_nonzero(pairs) * question.num_heads_kv
    effort = OF_A_VIEW * views + OF_A_SCORE * float(pairs.sum()) * question.num_heads_q
    effort *= OF_LISTS if question.sparse and planted.see is not None else 1
    spend(OF_A_CALL + (effort if only is None else effort / max(float(views), 1.0)))
    asked = Pass(question, stage, _given(question, stage, given), rounding)
    only = None if planted.store else only  # all may be moved
    answers = _stage(asked, planted, only)
    if stage == "forward" and question.sliding is not None:
        found = _stage(asked._replace(sliding=True), planted, only)
        answers |= {f"sliding {name}": found[name] for name in ("out", "lse")}
    of_sinks = {name: answers.pop(name) for name in OF_SINKS if name in answers}
    return (planted.store(question, answers) if planted.store else answers) | of_sinks


def contexts(question: Question, stage: str, given: Given = None) -> list[Context]:
    """The views of a stage with the results of all its steps, and no bug in them."""
    return [changed(c) for c in _right(Pass(question, stage, _given(question, stage, given)))[0]]


def _given(question: Question, stage: str, given: Given) -> Same | None:
    if given is None and stage in ("backward", "second"):
        right = solve(question, "forward")
        given = right["out"], right["lse"]
    return None if given is None else Same(given)


class Pass(NamedTuple):
    """One pass with the out and lse that it is given; ``sliding``: of the second branch."""

    question: Question
    stage: str
    given: Same | None
    rounding: Rounding = NONE
    sliding: bool = False


def _stage(asked: Pass, bug: Bug, only: Only | None) -> Answers:
    names = PROGRAMS[asked.stage]
    if bug.see is not None:
        views = tuple(v for v in views_of(asked.question, asked.sliding) if only is None or only(v))
        contexts: Iterable[Context] = (_context(asked, v) for v in bug.see(asked.question, views))
        return _run(asked, contexts, names, bug)
    contexts, answers = _right(asked)
    replaced = [place for place, name in enumerate(names) if name in bug.steps]
    if not replaced:
        return dict(answers)
    again = (changed(c) for c in contexts if only is None or only(c.view))
    return _run(asked, again, names[replaced[0] :], bug)  # all before the first one stays


@lru_cache(maxsize=6)
def _right(asked: Pass) -> tuple[list[Context], Answers]:
    """All views with the results of all steps, and what the stage gives, without a bug."""
    contexts = [_context(asked, view) for view in views_of(asked.question, asked.sliding)]
    return contexts, _run(asked, contexts, PROGRAMS[asked.stage], NO_BUG)


def _run(asked: Pass, contexts: Iterable[Context], names: Sequence[str], bug: Bug) -> Answers:
    answers = empty(asked.question, asked.stage)
    if asked.stage == "backward" and asked.given is not None:
        answers["delta"] = deltas(asked.question, asked.given).copy()
    with np.errstate(over="ignore", invalid="ignore"):
        for c in contexts:
            run_steps(c, names, bug)
            for name, x in answers.items():
                _store(x, name, getattr(c, RESULTS[asked.stage][name]), c)
    return answers


def per_key(view: View, scale: Floats | None, elsewhere: float) -> Floats | float:
    """What ``scale``, shaped like block_indices, has for every key of a view."""
    if scale is None or view.slot is None or view.selections is None or not scale.shape[2]:
        return elsewhere
    rows, selections = view.rows[:, None], view.selections[:, None, None]
    found = np.asarray(scale[rows, selections, np.maximum(view.slot, 0)], dtype=np.float64)
    return np.where(view.slot >= 0, found, elsewhere)


def _context(asked: Pass, view: View) -> Context:
    q, rounding, given = asked.question, asked.rounding, asked.given
    rows, heads = view.rows[None, :], view.heads[:, None]

    def of(x: Floats | None, at: tuple[Any, ...], none: float | None = 0.0) -> Any:
        return none if x is None else np.asarray(x[at], dtype=np.float64)

    def of_q(x: Floats | None) -> Floats:
        return rounding.entry(of(x, (rows, heads)))

    seen = (view.weight > 0).any(axis=(0, 1))

    def of_k(x: Floats | None, like: Floats) -> Floats:
        """Rows of keys that somebody sees; the others may hold anything."""
        found, there = np.zeros((len(view.keys), like.shape[2])), seen & (view.keys >= 0)
        if x is not None:
            found[there] = x[view.keys[there], view.head_kv]
        return rounding.entry(found)

    c = SimpleNamespace(question=q, view=view, s=q.scale, W=view.weight)
    c.r, c.o, c.given = rounding.operation, rounding.operand, given
    c.Q, c.K, c.V = of_q(q.q), of_k(q.k, q.k), of_k(q.v, q.v)
    c.dO, c.dL = of_q(q.dout), of(q.dlse, (heads, rows))
    c.tQ = np.zeros_like(c.Q) if q.tq is None else of_q(q.tq)
    c.tK, c.tV = of_k(q.tk, q.k), of_k(q.tv, q.v)
    c.G, c.tG = per_key(view, q.block_scale, 1.0), per_key(view, q.tblock_scale, 0.0)
    c.sink, c.tsink = of(q.sinks, (heads,), None), of(q.tsinks, (heads,))
    if given is not None:
        c.O, c.L = of_q(given[0]), of(given[1], (heads, rows))
    return c


def empty(question: Question, stage: str) -> Answers:
    """What a stage gives before any view has stored something; no gradient of what there is not."""
    by_rows, found = question.q.shape[:2], dict[str, Floats]()
    for name in (name for name in RESULTS[stage] if name != "delta"):
        if name in BY_ROW:
            found[name] = np.full(by_rows[::-1], -np.inf if name in ("lse", "jvp lse") else 0.0)
        elif "out" in name:
            found[name] = np.zeros((*by_rows, question.v.shape[2]))
        elif (of := getattr(question, name[1:])) is not None:  # dq of q, gsinks of sinks
            found[name] = np.zeros(of.shape)
    return found


def _store(array: Floats, name: str, x: Floats, c: Context) -> None:
    view, there = c.view, c.view.keys >= 0
    keys = view.keys[there]
    if name in BY_ROW:
        array[view.heads[:, None], view.rows] = x
    elif name in OF_SINKS:
        array[view.heads] += x
    elif name.endswith("block_scale"):
        x = np.where(c.W > 0, x, 0.0)
        h, i, j = np.nonzero(np.broadcast_to(view.slot >= 0, x.shape))
        np.add.at(array, (view.rows[i], view.selections[h], view.slot[h, i, j]), x[h, i, j])
    elif name not in OF_KEYS:
        array[view.rows[:, None], view.heads] += x.swapaxes(0, 1)
    elif (np.diff(keys) > 0).all():  # else keys may repeat
        array[keys, view.head_kv] += c.sum_heads(x)[there]
    else:
        np.add.at(array, (keys, view.head_kv), c.sum_heads(x)[there])


@lru_cache(maxsize=6)
def deltas(question: Question, given: Same) -> Floats:
    """D of every row, of those too that no view has; 0 where there is no sequence."""
    inside, found = question.sequence_of("q") >= 0, np.zeros(question.q.shape[1::-1])
    dout, out = (np.asarray(x)[inside].astype(np.float64) for x in (question.dout, given[0]))
    with np.errstate(invalid="ignore", over="ignore"):
        found[:, inside] = (dout * out).sum(axis=-1).T
        if question.dlse is not None:
            found[:, inside] -= np.asarray(question.dlse)[:, inside]
    return found
