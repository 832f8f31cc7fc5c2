"""What is said, and known, of weights that were read; of block lists by bugs of the catalogue."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from rawattn.check.diagnose.catalogue.classes import CLASSES
from rawattn.check.diagnose.catalogue.second_order import of_one_pass
from rawattn.check.diagnose.catalogue.sparse import selection
from rawattn.check.diagnose.engine import attention
from rawattn.check.diagnose.engine.attention import FIRST, FORWARD, Bug, See, View
from rawattn.check.diagnose.engine.question import LISTS, Question
from rawattn.check.diagnose.engine.steps import STEPS, Context, Step, changed
from rawattn.check.diagnose.evidence.places import Array, Places, log_sum
from rawattn.check.diagnose.evidence.support import Support, pairs_of
from rawattn.check.diagnose.read.probe import Weights
from rawattn.check.diagnose.read.terms import Term, context_of, scores_of
from rawattn.reference.dense import dead_to_inf

COARSE = 3e-3  # what is left where sums run in TF32: no bug of the weights
SITES = {"S", "dY", "E", "tdY"}  # steps that have the factors of scores
NOISE = 8  # times what log-weights may be off by, with a listed bug


@dataclass(eq=False)
class Said:
    """What was read of a ``stage``, by so many calls. right, wrong: sentences, the latter what the
    bug is; unread: what no sentence describes. names: classes of bugs; steps: as of engine.Bug.
    term: what the sentences are about. loose: it was read on other lengths than are judged. listed:
    a bug of the catalogue that is all of it. table: tells all that is wrong in one sequence."""

    weights: Weights
    support: Support
    term: Term | None = None
    loose: bool = False
    right: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    steps: dict[str, Step] = field(default_factory=dict)
    stage: str = ""
    calls: int = 0
    listed: Bug | None = None
    table: Callable[[], str] = str

    def say(self, text: str, name: str) -> None:
        self.wrong.append(text)
        self.names += [name] if name else []

    def say_term(self, term: Term) -> None:
        scale = of_scale(np.array(term.values), self.support.places)
        self.say(term.text + scale * (term.name == "score-scale"), term.name)
        self.steps |= term.steps

    @property
    def name(self) -> str:
        """The class of what was read, "" where it is of several. Row sums that are off beside a
        wrong mask are those of what else is seen."""
        names = set(self.names) - (set() if self.support.right else {"denominator"})
        names -= {"unknown"} if len(names) > 1 else set()
        return names.pop() if len(names) == 1 else ""

    @cached_property
    def bug(self) -> Bug | None:
        """What was read as a bug of the engine, None where it does not say all."""
        if self.unread or self.loose or (self.see is None and not self.steps):
            return None
        words = "; ".join(self.wrong)
        if self.listed is not None and self.wrong == [_title(self.listed)]:
            words = self.listed.variant
        stages = (self.stage,) if self.stage in ("backward", "second", "jvp") else FIRST
        bug = Bug(self.name or "unknown", words, stages, self.see, self.steps)
        return _in_branch(bug) if self.stage == "sliding" else bug

    @property
    def bugs(self) -> list[Bug]:
        """The same; of the first pass of a double backward in both passes, or there alone."""
        found = [] if self.bug is None else [self.bug]
        return found + [of_one_pass(bug, True) for bug in found if self.stage == "second"]

    def allows(self, bug: Bug) -> bool:
        """Whether with a bug of who sees whom keys are seen as they were read."""
        read = self.support
        if bug.see is None and bug.steps.keys() == {"L", "O"} and not read.right:
            dead = ((read.seen == read.places.rights).all(-1) | ~read.seen.any(-1)).all()  # some
            return self.loose or bool(self.unread or dead) or "lse" not in self.right  # are merged
        known = read.named and not (read.right or self.unread or read.places.question.sparse)
        if bug.see is None or not known or read.second is None:
            return True
        both = (read.places, read.second)
        return all(np.array_equal(read.at(x) > 0, pairs_of(x.question, bug.see)) for x in both)

    def scores(self, places: Places, S: Array) -> Array:
        """The scores (num_heads_q, total_q, total_k) with what was found, for the right ones."""
        if self.listed is not None:
            found, _ = listed_scores(self.listed, places, S)
            return np.where(np.isneginf(found), S, found)
        return scores_of(context_of(places, S), self.steps)

    @property
    def see(self) -> See | None:
        """Who sees whom, as a change of views; None where that is right."""
        return None if self.support.right else self.support.see


@lru_cache(maxsize=8)
def branch_of(question: Question) -> Question:
    """The dense problem that the sliding branch is; ``question`` without one is no such problem."""
    without: dict[str, Any] = dict.fromkeys((*LISTS, "sliding"))
    return replace(question, **without, window=question.sliding or (-1, -1))


def _in_branch(bug: Bug) -> Bug:
    """A bug of the dense problem in the branch alone, whose views have no lists."""

    def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
        there = bug.see is not None and views and views[0].lists is None
        return bug.see(branch_of(question), views) if bug.see and there else views

    def step(name: str, c: Context) -> Any:
        if c.view.lists is not None:
            return STEPS[name](c)
        return bug.steps[name](changed(c, question=branch_of(c.question)))

    steps = {name: partial(step, name) for name in bug.steps}
    return replace(bug, stages=FORWARD, steps=steps, see=bug.see and see)


def _title(bug: Bug) -> str:
    return ": ".join(filter(None, (CLASSES[bug.name].title, bug.variant)))


def of_scale(factors: Array, places: Places) -> str:
    """What the factors by head of scores or of their gradients are, in brackets."""
    q, size = places.question, places.question.q.shape[2]
    known = {"softmax_scale is missing": 1 / q.scale, "softmax_scale is there twice": q.scale}
    known |= {"the default softmax_scale is used": size**-0.5 / q.scale}
    known |= {"that of head_dim_v is used": q.v.shape[2] ** -0.5 / q.scale}
    padded = sorted({-(-size // n) * n for n in (16, 32, 64, 128)} - {size})
    known |= {f"that of head_dim {n} is used": n**-0.5 / q.scale for n in padded}
    known |= {"by 1 / sqrt(d), the default softmax_scale, on top of a given one": size**-0.5}
    known |= {"log2(e)": 1 / np.log(2), "ln 2": np.log(2), "2": 2.0, "1/2": 0.5}
    factors = factors[np.abs(factors - 1) > 1e-2]
    told = (name for name, x in known.items() if np.allclose(factors, x, rtol=5e-3))
    text = " or ".join([name for name in told if abs(known[name] - 1) > 1e-2][:3])
    return f" ({text})" if text else ""


def of_lists(read: Weights, again: Callable[[], Weights]) -> Iterator[Said]:
    """Of block lists the listed bugs that give all weights of both problems; none of right ones."""
    views = attention.views_of(read.places.question) if read.places.question.sparse else ()
    wrong = [view for view in views if not _fits(attention.NO_BUG, read, [view])]
    if not wrong:
        return
    first = min(wrong, key=lambda view: abs(len(view.rows) * len(view.keys) - 1000))
    for bug in selection.of_weights(read.places.question):
        of_scores = bug.steps.keys() <= SITES and (bug.see or "S" in bug.steps)
        if not of_scores or not _fits(bug, read, [first]):
            continue
        if all(_fits(bug, x, attention.views_of(x.places.question)) for x in (read, again())):
            seen = read.places.rights if bug.see is None else read.places.rights & read.seen
            support = Support(read.places, seen, (), listed=bug.see)
            said = Said(read, support, steps=dict(bug.steps), listed=bug)
            said.say(_title(bug), bug.name)
            yield said


def listed_scores(
    bug: Bug, places: Places, S: Array, views: Sequence[View] | None = None
) -> tuple[Array, Array]:
    """The scores (num_heads_q, total_q, total_k) with a bug, -inf of what nobody sees, and their
    factors, for the right scores ``S``. Raises ValueError where it sees what is no key."""
    q = places.question
    views = tuple(attention.views_of(q) if views is None else views)
    right, found, gates = places.gates, np.full(S.shape, -np.inf), np.ones(S.shape)
    for view in views if bug.see is None else bug.see(q, views):
        if (view.keys < 0).any():
            raise ValueError("it sees rows of zeros")
        at = np.ix_(view.heads, view.rows, view.keys)
        c = SimpleNamespace(question=q, view=view, W=view.weight, r=attention.exact, dS=1.0)
        c.cap = S[at] / np.broadcast_to(right, S.shape)[at], 1.0
        c.G = attention.per_key(view, q.block_scale, 1.0)
        step, of = (bug.steps.get(name, STEPS[name]) for name in ("S", "dY"))
        np.logaddexp.at(found, at, step(c))
        gates[at] = np.where(view.weight > 0, of(changed(c)), gates[at])
    return found, gates


def _fits(bug: Bug, read: Weights, views: Sequence[View]) -> bool:
    """Whether these are the weights of ``views``."""
    try:
        S, _ = listed_scores(bug, read.places, read.right.S, views)
    except (IndexError, ValueError):
        return False
    for view in views:
        at = np.ix_(view.heads, view.rows)
        L = read.right.lse[at] if read.passed else log_sum(S[at])
        with np.errstate(over="ignore"):
            P = np.exp(S[at] - dead_to_inf(np, L)[..., None])
        off = np.abs(P - read.P[at]) > NOISE * read.noise * P + read.least
        if np.isnan(read.P[at]).any() or off[read.telling[at]].any():
            return False
    return True
