"""What is said of weights that were read, and what is known of them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from rawattn.check.diagnose.catalogue.classes import CLASSES
from rawattn.check.diagnose.catalogue.second_order import JVP, SECOND, of_one_pass
from rawattn.check.diagnose.engine.attention import BACKWARD, FIRST, Bug, See, Step
from rawattn.check.diagnose.evidence.places import Array, Places
from rawattn.check.diagnose.evidence.support import Support, pairs_of
from rawattn.check.diagnose.read import branches, lists
from rawattn.check.diagnose.read.contexts import context_of, scores_of
from rawattn.check.diagnose.read.probe import Weights
from rawattn.check.diagnose.read.terms import Term

STAGES = {"backward": BACKWARD, "second": SECOND, "jvp": JVP}
COARSE = 3e-3  # what is left where sums run in TF32: no bug of the weights


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

    def say_listed(self, bug: Bug) -> None:
        """All that was read is what a bug of the catalogue makes of it."""
        self.listed, self.steps = bug, dict(bug.steps)
        seen = self.weights.places.rights if bug.see is None else self.support.seen
        self.support = replace(self.support, seen=seen, listed=bug.see)
        self.say(_title(bug), bug.name)

    @property
    def sound(self) -> bool:
        return not (self.wrong or self.unread)

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
        bug = Bug(
            self.name or "unknown", words, STAGES.get(self.stage, FIRST), self.see, self.steps
        )
        return branches.planted(bug) if self.stage == "sliding" else bug

    @property
    def bugs(self) -> list[Bug]:
        """The same; of the first pass of a double backward in both passes, or there alone."""
        found = [] if self.bug is None else [self.bug]
        return found + [of_one_pass(bug, True) for bug in found if self.stage == "second"]

    def allows(self, bug: Bug) -> bool:
        """Whether with a bug of who sees whom keys are seen as they were read."""
        read = self.support
        if bug.see is None and bug.steps.keys() == {"L", "O"} and not read.right:
            return self.loose or bool(self.unread) or "lse" not in self.right  # parts are merged
        known = read.named and not (read.right or self.unread or read.places.question.sparse)
        if bug.see is None or not known or read.second is None:
            return True
        both = (read.places, read.second)
        return all(np.array_equal(read.at(x) > 0, pairs_of(x.question, bug.see)) for x in both)

    def scores(self, places: Places, S: Array) -> Array:
        """The scores (num_heads_q, total_q, total_k) with what was found, for the right ones."""
        if self.listed is not None:
            found, _ = lists.scores_of(self.listed, places, S)
            return np.where(np.isneginf(found), S, found)
        return scores_of(context_of(places, S), self.steps)

    @property
    def see(self) -> See | None:
        """Who sees whom, as a change of views; None where that is right."""
        return None if self.support.right else self.support.see


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
