"""What a function does, in words: the fields that were read of its two passes, as readings."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rawattn.check.diagnose.engine.attention import Bug
from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.findings import NAMELESS, Diagnosis, Finding
from rawattn.check.diagnose.read import beyond, sliding
from rawattn.check.diagnose.read.probe import Ask, Refused, problem, read_backward, read_forward
from rawattn.check.diagnose.read.said import Said
from rawattn.check.diagnose.read.slopes import said_of_backward
from rawattn.check.diagnose.read.weights import said_of

HOW = {
    "forward": "weights of out, with unit vectors for v",
    "backward": "dS and P, with unit vectors for k, then for q and dout",
    "sliding": "weights of sliding out, with unit vectors for v",
}
LOOK_AT = {
    "forward": "where the weights are made: scores, mask, row sums",
    "backward": "where P and dS = P o (dP - D) are made, and what comes before dq and dk",
    "sliding": "where the weights of the sliding branch are made: scores, mask, row sums",
}
HOW |= {
    "jvp": "weights of tout, with unit vectors for tv alone",
    "second": "weights of ddout, with unit vectors for ddv alone",
    "second pass": "P and dS' of gq, gk and gv, with unit vectors for k, then for q and dout",
}
READERS: dict[str, tuple[Callable[..., Any], Callable[..., Said]]] = {
    "forward": (read_forward, said_of),
    "backward": (read_backward, said_of_backward),
}
BEYOND: dict[str, tuple[Callable[..., Any], Callable[..., Said]]] = {  # saved arrays hold none
    "jvp": (beyond.read_tangents, said_of),
    "second": (beyond.read_first_pass, said_of),
    "second pass": (beyond.read_second_pass, beyond.say_second_pass),
}
PASSES = {"forward": "forward pass", "backward": "backward pass", "sliding": "sliding branch"}
LOOK_AT |= dict.fromkeys(BEYOND, "where this pass makes P: scores, mask, lse; bounds of its loops")
PASSES |= {"jvp": "forward-mode derivative", "second": "double backward"}
PASSES["second pass"] = PASSES["second"]
ASKED = {"sliding": "forward", "second pass": "second"}
PLAIN = ("unknown", "wrong-keys", "score-bias", "score-scale")  # what was read says more exactly


@dataclass(frozen=True, eq=False)
class Readings:
    """Of all stages that could be asked; ``facts``: why others were not, and what is right.

    shown: classes of bugs that other problems have shown, to be tried before any others.
    """

    of: tuple[Said, ...] = ()
    facts: tuple[str, ...] = ()
    shown: frozenset[str] = frozenset()

    @property
    def bugs(self) -> list[Bug]:
        return [bug for reading in self.of for bug in reading.bugs]

    @property
    def general(self) -> list[Bug]:
        """Those that can be planted in problems of other lengths."""
        return [one.bug for one in self.of if one.bug is not None and one.support.plain]

    def allows(self, bug: Bug, stage: str) -> bool:
        """Whether what was read of a stage is what it would be with a bug."""
        return all(one.allows(bug) for one in self.of if one.stage == stage)

    def told(self, diagnosis: Diagnosis, side: str) -> Diagnosis:
        """``diagnosis`` of the same function, with what was read of it.

        What a bug of the catalogue explains keeps its name; what none does gets the words of the
        reading, and is as sure as its planting made it.
        """
        findings = list(diagnosis.findings)
        for said in self.of:
            numbers = range(len(findings))
            if here := [n for n in numbers if _is_of(findings[n], side, said.stage)]:
                first = min(here, key=lambda n: findings[n].bug in NAMELESS)
                findings[first] = _with(findings[first], said)
            elif not findings and said.wrong:
                given = side, "unknown", said.wrong[0], PASSES[said.stage], "medium"
                findings.append(Finding(*given, evidence_of(said), LOOK_AT[said.stage]))
        return replace(diagnosis, findings=tuple(findings), facts=(*diagnosis.facts, *self.facts))


UNREAD = Readings()


def _is_of(one: Finding, side: str, stage: str) -> bool:
    """Whether a finding is about the stage of a side."""
    of_stage = PASSES[stage] in one.where or one.where.startswith(f"{ASKED.get(stage, stage)}:")
    of_stage = "sliding" in one.where if stage == "sliding" else of_stage
    return of_stage and one.side == side and one.bug != "rounding"


def evidence_of(said: Said) -> tuple[str, ...]:
    """What a finding says of what was read."""
    lines = [f"read off entry by entry, {said.calls} calls: {HOW[said.stage]}"]
    lines += [f"right: {', '.join(said.right)}"] * bool(said.right)
    lines += [f"wrong: {text}" for text in said.wrong]
    lines += [f"not understood: {text}" for text in said.unread]
    if any(" p " in line for line in said.wrong):
        lines.append("p is the key that query i stands at, i + seqlen_k - seqlen_q")
    return tuple(lines)


def _with(finding: Finding, said: Said) -> Finding:
    """A finding with what was read, which gives it its title where it says more."""
    told = finding.bug == "unknown" and said.name not in ("", "unknown") and not said.unread
    own, first = finding.evidence, 0 if told else 2
    evidence = dict.fromkeys((*own[:first], *evidence_of(said), *own[first:]))
    finding = replace(finding, evidence=tuple(evidence))
    of_rules = said.bug and finding.form == said.bug.variant
    if of_rules and not said.support.plain and finding.confidence == "high":
        finding = replace(finding, confidence="medium")
    if told:
        confidence = "low" if said.name in PLAIN else "medium"
        return replace(finding, bug=said.name, title=said.wrong[0], confidence=confidence)
    if finding.bug not in PLAIN or not said.wrong or (said.loose and finding.form):
        return finding
    if finding.bug == "unknown" and said.bug and finding.confidence in ("high", "medium"):
        finding = replace(finding, look_at=LOOK_AT[said.stage])
    return replace(finding, title=said.wrong[0])


def read(question: Question, ask: Callable[[str], Ask | None]) -> Readings:
    """What each stage that can be asked does, on problems like ``question``.

    ``ask(stage)`` is None where the function has no such pass.
    """
    found: list[Said] = []
    facts: list[str] = []
    for stage in PASSES:
        branch = stage == "sliding"
        asked, judged = ask(ASKED.get(stage, stage)), stage not in BEYOND or question.tv is not None
        if asked is None or not judged or (branch and question.sliding is None):
            continue
        if stage == "second pass" and any(said.stage == "second" for said in found):
            continue  # of which it has e and W
        here = sliding.alone(question) if branch else question
        try:
            said = _read(here, stage, sliding.asked(question, asked) if branch else asked)
        except Refused as why:
            facts.append(f"the {PASSES[stage]} cannot be read off: {why}")
            continue
        found += [] if said.sound else [said]
        if said.sound:
            told = f"the {PASSES[stage]}, read off entry by entry ({said.calls} calls)"
            lists = " (with lists alike for all heads)" if here.sparse else ""
            facts.append(f"{told}: {', '.join(said.right)} are right{lists}")
    return Readings(tuple(found), tuple(facts))


def _read(question: Question, stage: str, ask: Ask) -> Said:
    calls = 0

    def counted(asked: Question) -> Answers:
        nonlocal calls
        calls += 1
        return ask(asked)

    here, (reader, say) = problem(question, 0), (READERS | BEYOND).get(stage, READERS["forward"])
    said: Said = say(reader(counted, here), partial(_elsewhere, reader, counted, here))
    said.stage, said.calls = stage, calls
    for told in (said.right, said.wrong):
        told[:] = dict.fromkeys(told)
    return said


def _elsewhere(of: Callable[[Ask, Question], Any], ask: Ask, question: Question) -> Any:
    """What is read on other lengths; of a function that refuses them, multiples of such as it
    takes."""
    try:
        return of(ask, problem(question, 1, other=1))
    except Refused:
        multiple = math.gcd(*question.lengths_q, *question.lengths_k)
        return of(ask, problem(question, 1, other=multiple))
