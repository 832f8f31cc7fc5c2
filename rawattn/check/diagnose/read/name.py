"""What a function does, in words: the fields that were read of its two passes, as readings."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from rawattn.check.diagnose.engine.attention import Bug
from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.evidence.picture import picture
from rawattn.check.diagnose.evidence.sight import sight_of
from rawattn.check.diagnose.findings import Diagnosis, Finding
from rawattn.check.diagnose.read.probe import Ask, Refused, problem, read_backward, read_forward
from rawattn.check.diagnose.read.said import Said
from rawattn.check.diagnose.read.slopes import said_of_backward
from rawattn.check.diagnose.read.weights import said_of

T = TypeVar("T")
HOW = {
    "forward": "weights of out, with unit vectors for v",
    "backward": "dS and P, with unit vectors for k, then for q and dout",
}
LOOK_AT = {
    "forward": "where the weights are made: scores, mask, row sums",
    "backward": "where P and dS = P o (dP - D) are made, and what comes before dq and dk",
}
PASSES = {"forward": "forward pass", "backward": "backward pass"}
PLAIN = ("unknown", "wrong-keys", "score-bias", "score-scale")  # what was read says more exactly
NAMELESS = ("unknown", "vacuous", "rounding")


@dataclass(frozen=True, eq=False)
class Reading:
    """What was read of a stage. right, wrong: sentences, the latter what the bug is; unread: what
    no sentence describes. ``bug`` plants what they say, None where they do not say all;
    general: on sequences of other lengths too. name: the class, "" where it is not one.
    """

    stage: str
    calls: int
    right: tuple[str, ...]
    wrong: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    picture: str = ""
    bug: Bug | None = None
    general: bool = True
    name: str = ""

    @property
    def sound(self) -> bool:
        return not (self.wrong or self.unread)

    @property
    def title(self) -> str:
        """What is wrong first, without the values of a table."""
        return self.wrong[0].partition(" (head 0, nearest")[0]

    @property
    def evidence(self) -> tuple[str, ...]:
        """What a finding says of it."""
        lines = [f"read off entry by entry, {self.calls} calls: {HOW[self.stage]}"]
        lines += [f"{word}: {', '.join(told)}" for word, told in (("right", self.right),) if told]
        lines += [f"wrong: {text}" for text in self.wrong]
        lines += [f"not understood: {text}" for text in self.unread]
        if any(" p " in line for line in self.wrong):
            lines.append("p is the key that query i stands at, i + seqlen_k - seqlen_q")
        return (*lines, *([self.picture] if self.picture else []))


@dataclass(frozen=True, eq=False)
class Readings:
    """Of all stages that could be asked; ``facts``: why others were not, and what is right."""

    of: tuple[Reading, ...] = ()
    facts: tuple[str, ...] = ()

    @property
    def bugs(self) -> list[Bug]:
        return [reading.bug for reading in self.of if reading.bug is not None]

    @property
    def general(self) -> list[Bug]:
        """Those that can be planted in problems of other lengths."""
        return [one.bug for one in self.of if one.bug is not None and one.general]

    def told(self, diagnosis: Diagnosis, side: str) -> Diagnosis:
        """``diagnosis`` of the same function, with what was read of it.

        What a bug of the catalogue explains keeps its name; what none does gets the words of the
        reading, and is as sure as its planting made it.
        """
        findings = list(diagnosis.findings)
        for reading in self.of:
            here = [
                n
                for n, finding in enumerate(findings)
                if finding.side == side and _is_of(finding, reading.stage)
            ]
            here = [n for n in here if findings[n].bug != "rounding"]
            here.sort(key=lambda n: findings[n].bug in NAMELESS)
            if here:
                findings[here[0]] = _with(findings[here[0]], reading)
            elif not findings and reading.wrong:
                findings.append(_finding(side, reading))
        return replace(diagnosis, findings=tuple(findings), facts=(*diagnosis.facts, *self.facts))


UNREAD = Readings()


def _is_of(finding: Finding, stage: str) -> bool:
    """Whether a finding is about the stage."""
    return PASSES[stage] in finding.where or finding.where.startswith(f"{stage}:")


def _with(finding: Finding, reading: Reading) -> Finding:
    """A finding with what was read, which gives it its title where it says more."""
    evidence = dict.fromkeys((*reading.evidence, *finding.evidence))
    finding = replace(finding, evidence=tuple(evidence))
    if finding.bug == "unknown" and reading.name not in ("", "unknown") and not reading.unread:
        confidence = "low" if reading.name in PLAIN else "medium"
        return replace(finding, bug=reading.name, title=reading.title, confidence=confidence)
    if finding.bug not in PLAIN or not reading.wrong:
        return finding
    sure = reading.bug is not None and finding.confidence in ("high", "medium")
    proof = finding.proof and replace(finding.proof, form="")  # which is the title
    finding = replace(finding, title=reading.title, proof=proof)
    return (
        replace(finding, look_at=LOOK_AT[reading.stage])
        if finding.bug == "unknown" and sure
        else finding
    )


def _finding(side: str, reading: Reading) -> Finding:
    return Finding(
        side,
        "unknown",
        reading.title,
        PASSES[reading.stage],
        "medium",
        reading.evidence,
        LOOK_AT[reading.stage],
    )


def read(question: Question, ask: Callable[[str], Ask | None]) -> Readings:
    """What each stage that can be asked does, on problems like ``question``.

    ``ask(stage)`` is None where the function has no such pass.
    """
    found: list[Reading] = []
    facts: list[str] = []
    for stage in PASSES:
        asked = ask(stage)
        if asked is None:
            continue
        try:
            reading = _read(question, stage, asked)
        except Refused as why:
            facts.append(f"the {PASSES[stage]} cannot be read off: {why}")
            continue
        found += [] if reading.sound else [reading]
        if reading.sound:
            told = f"the {PASSES[stage]}, read off entry by entry ({reading.calls} calls)"
            lists = " (with lists alike for all heads)" if question.sparse else ""
            facts.append(f"{told}: {', '.join(reading.right)} are right{lists}")
    return Readings(tuple(found), tuple(facts))


def _read(question: Question, stage: str, ask: Ask) -> Reading:
    calls = 0

    def counted(asked: Question) -> Answers:
        nonlocal calls
        calls += 1
        return ask(asked)

    here = problem(question, 0)
    if stage == "forward":
        said = said_of(
            read_forward(counted, here), partial(_elsewhere, read_forward, counted, here)
        )
    else:
        again = partial(_elsewhere, read_backward, counted, here)
        said = said_of_backward(read_backward(counted, here), again)
    right, wrong = (tuple(dict.fromkeys(told)) for told in (said.right, said.wrong))
    bug = None if said.unread or said.loose else _planted(stage, said, wrong)
    unread, shown = tuple(said.unread), _picture(said)
    return Reading(stage, calls, right, wrong, unread, shown, bug, said.support.plain, _name(said))


def _elsewhere(of: Callable[[Ask, Question], T], ask: Ask, question: Question) -> T:
    """What is read on other lengths; of a function that refuses them, multiples of such as it
    takes."""
    try:
        return of(ask, problem(question, 1, other=1))
    except Refused:
        return of(
            ask, problem(question, 1, other=math.gcd(*question.lengths_q, *question.lengths_k))
        )


def _picture(said: Said) -> str:
    """Of a part of the mask that is not as it must be."""
    if said.support.right:
        return ""
    sight = sight_of(said.support.places.question, Bug("unknown", see=said.see))
    return "" if sight is None else "\n".join(picture(sight))


def _planted(stage: str, said: Said, wrong: Sequence[str]) -> Bug | None:
    """What was read as a bug of the engine; classes and steps are those of its parts."""
    see = said.see
    if see is None and not said.steps:
        return None
    stages = ("forward", "backward") if stage == "forward" else ("backward",)
    return Bug(_name(said) or "unknown", "; ".join(wrong), stages, see, said.steps)


def _name(said: Said) -> str:
    """The class of what was read, "" where it is of several. Row sums that are off beside a wrong
    mask are those of what else is seen."""
    names = set(said.names) - (set() if said.support.right else {"denominator"})
    names -= {"unknown"} if len(names) > 1 else set()
    return names.pop() if len(names) == 1 else ""
