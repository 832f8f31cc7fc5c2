"""What a function does, in words: of its passes, of the sliding branch of block-sparse attention, a
dense one, and of passes beyond the first order: with tv alone as direction tout, or ddout, is P tv.
And all that is asked as one packed problem, for a function that cannot be called from here:
sequences of any kind, and behind them, as many each, those of every question."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from rawattn.check.diagnose.catalogue.classes import CLASSES
from rawattn.check.diagnose.engine.attention import Bug, solve
from rawattn.check.diagnose.engine.question import BY_TOKENS, LISTS, STAGES, Answers, Question, part
from rawattn.check.diagnose.evidence.places import places_of
from rawattn.check.diagnose.evidence.support import NO_RULE, Support
from rawattn.check.diagnose.findings import NAMELESS, PLAIN, Diagnosis, Finding
from rawattn.check.diagnose.read import probe, tables
from rawattn.check.diagnose.read.probe import STILL, Ask, Refused, Weights, problem
from rawattn.check.diagnose.read.said import Said, branch_of
from rawattn.check.diagnose.read.slopes import said_of_backward
from rawattn.check.diagnose.read.weights import said_of

HOW = {
    "forward": "weights of out, with unit vectors for v",
    "backward": "dS and P, with unit vectors for k, then for q and dout",
    "sliding": "weights of sliding out, with unit vectors for v",
    "jvp": "weights of tout, with unit vectors for tv alone",
    "second": "weights of ddout, with unit vectors for ddv alone",
}
LOOK_AT = dict.fromkeys(HOW, "where it makes P: scores, mask, row sums or lse, bounds of loops")
LOOK_AT["backward"] = "where P and dS = P o (dP - D) are made, and what comes before dq and dk"
TELLING = {"forward": "out", "backward": "dv"}  # of who sees whom, on any problem
VAGUE = (NO_RULE, "holds other numbers")  # in forms: what was read says more
FURTHER = 5  # lengths of that problem
# lengths that tell what a tile is from what it is by chance
SHORT = (53, 2, 25, 5, 64, 16, 7, 3, 11, 33)
NEAR = {2: 2e-2, 4: 5e-3, 8: 1e-5}  # of a row, by the bytes of the inputs
PAST = 128  # keys behind the first sequences, which a tile of these may have read too
ADDED = 9  # tokens at most, to a sequence of the reader's second problem
Known = tuple[Question, Answers] | None
PASSES = {"forward": "forward pass", "backward": "backward pass", "sliding": "sliding branch"}
PASSES |= {"jvp": "forward-mode derivative", "second": "double backward"}


@dataclass(frozen=True, eq=False)
class Readings:
    """Of all stages that could be asked; ``facts``: why others were not, and what is right. shown:
    classes of bugs that other problems have shown, tried before any others; hints: other stages'"""

    of: tuple[Said, ...] = ()
    facts: tuple[str, ...] = ()
    shown: frozenset[str] = frozenset()
    hints: Sequence[Bug] = ()

    def told(self, diagnosis: Diagnosis, side: str) -> Diagnosis:
        """``diagnosis`` of the same function, with what was read of it: the name of what a bug of
        the catalogue explains stays, all else gets the words of the reading."""
        findings = list(diagnosis.findings)
        for said in self.of:
            words = "sliding" if said.stage == "sliding" else PASSES[said.stage]
            own = ((n, x) for n, x in enumerate(findings) if x.side == side and x.bug != "rounding")
            if here := [n for n, x in own if words in x.where or f"{said.stage}:" in x.where]:
                first = min(here, key=lambda n: findings[n].bug in NAMELESS)
                one = _with(findings[first], said)
                findings[first] = one if one.sure else replace(one, least=said.table())
            elif not findings and said.wrong:
                given = side, "unknown", said.wrong[0], PASSES[said.stage], "medium"
                one = Finding(*given, evidence_of(said), LOOK_AT[said.stage], least=said.table())
                findings.append(one)
        return replace(diagnosis, findings=tuple(findings), facts=(*diagnosis.facts, *self.facts))


UNREAD = Readings()


def ask_branch(like: Question, ask: Ask) -> Ask:
    """Asks for the sliding branch's results, by a forward pass whose lists name nothing."""

    def branch(question: Question) -> Answers:
        given: dict[str, Any] = {"causal": like.causal, "window": like.window}
        for name in LISTS[:3]:
            if (x := getattr(like, name)) is not None:
                shape = (len(question.q), *x.shape[1:])
                given[name] = np.full(shape, -1 if name == LISTS[0] else 1, x.dtype)
        answers = ask(replace(question, **given, sliding=like.sliding))
        return {name: answers[f"sliding {name}"] for name in ("out", "lse")}

    return branch


def _read_beyond(stage: str, ask: Ask, question: Question) -> Weights:
    """The weights of tout, or those of ddout, which are made with the lse that is passed, in the
    direction of tv = v alone. Raises Refused, as the others do."""
    still = {"tq": np.zeros_like(question.q), "tk": np.zeros_like(question.k)}

    def tangents(asked: Question) -> Answers:
        if stage == "jvp":
            answers = ask(replace(asked, **still, tv=asked.v))
            return {"out": answers["tout"], "lse": answers["jvp lse"]}
        _, given = probe.with_right(replace(asked, dout=np.zeros_like(asked.out)))
        return {"out": ask(replace(given, **still, tv=asked.v))["ddout"]}

    read = probe.read_forward(tangents, question)
    return read if stage == "jvp" else Weights(read.right, read.P, read.lse, None)


BEYOND = {stage: partial(_read_beyond, stage) for stage in ("jvp", "second")}  # no file tells these
READ: dict[str, Callable[..., Any]] = dict.fromkeys(PASSES, probe.read_forward)
READ |= {"backward": probe.read_backward} | BEYOND


def evidence_of(said: Said) -> tuple[str, ...]:
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
    if "as if computed" in finding.title and said.wrong:
        return replace(finding, title=said.wrong[0])
    own, first = finding.evidence, 0 if told else 2
    evidence = dict.fromkeys((*own[:first], *evidence_of(said), *own[first:]))
    finding = replace(finding, evidence=tuple(evidence))
    of_rules = said.bug and finding.form == said.bug.variant
    if of_rules and not said.support.plain and finding.confidence == "high":
        finding = replace(finding, confidence="medium")
    if told:
        sure = "low" if said.name in PLAIN else "medium"
        return replace(finding, bug=said.name, title="; ".join(said.wrong[:2]), confidence=sure)
    if finding.title == CLASSES["unknown"].title and said.unread and not said.wrong:
        rest = f"; right: {', '.join(said.right)}" * bool(said.right)
        return replace(finding, title=f"{PASSES[said.stage]}: {said.unread[0]}{rest}")
    of_others = finding.confidence in ("high", "medium") or said.loose or not said.support.plain
    vague = finding.form is not None and any(x in finding.form for x in VAGUE)
    listed = finding.form and not of_rules and of_others and not vague
    if finding.bug not in PLAIN or not said.wrong or listed:
        return finding
    if finding.bug == "unknown" and said.bug and finding.confidence in ("high", "medium"):
        finding = replace(finding, look_at=LOOK_AT[said.stage])
    text = "; ".join(said.wrong[:2])
    if said.unread and not said.unread[0].startswith("by "):  # it is not all
        text = f"{PASSES[said.stage]}: {said.unread[0]}; besides, {text}"
    return replace(finding, title=text)


def read(
    question: Question,
    ask: Callable[[str], Ask | None],
    known: Known = None,
    enough: Callable[[Bug], bool] = lambda bug: False,
) -> Readings:
    """What each stage does, on problems like ``question``; ``ask(stage)`` is None where there is no
    such pass. known: a problem of other lengths and what was answered to it, of a function that
    cannot be asked. enough: whether a bug is all that is wrong, so that nothing more is asked."""
    found, facts = list[Said](), list[str]()
    for stage in PASSES:
        branch = stage == "sliding"
        asked, lacks = ask("forward" if branch else stage), stage in BEYOND and question.tv is None
        if asked is None or lacks or (branch and question.sliding is None):
            continue
        here = branch_of(question) if branch else question
        try:
            said = _read(here, stage, ask_branch(question, asked) if branch else asked, known)
        except Refused as why:
            facts.append(f"the {PASSES[stage]} cannot be read off: {why}")
            continue
        sound = not (said.wrong or said.unread)
        found += [] if sound else [said]
        if sound:
            told = f"the {PASSES[stage]}, read off entry by entry ({said.calls} calls)"
            facts.append(f"{told}: {', '.join(said.right)} are right")
        elif said.bug is not None and said.name not in PLAIN and enough(said.bug):
            break
    return Readings(tuple(found), tuple(facts))


def _read(question: Question, stage: str, ask: Ask, known: Known) -> Said:
    calls = 0

    def counted(asked: Question) -> Answers:
        nonlocal calls
        calls += 1
        return ask(asked)

    here = problem(question, 0)
    reader, say = READ[stage], said_of_backward if stage == "backward" else said_of
    found = reader(counted, here)

    @cache
    def again() -> Any:
        try:
            other, more = (4, SHORT[4:8]) if here.sparse else (0, SHORT)  # of blocks some are long
            return reader(counted, problem(here, 1, other=other, more=more))
        except Refused:  # then of multiples of such lengths as it takes
            multiple = math.gcd(*here.lengths_q, *here.lengths_k)
            return reader(counted, problem(here, 1, other=multiple))

    def told(support: Support | None) -> Said:
        said = say(found, again, support)
        texts = (tables.told(one, here) for one in tables.tables_of(found))
        said.table = cache(lambda: next(filter(None, texts), ""))
        said.stage, said.calls = stage, calls
        for text in (said.right, said.wrong):
            text[:] = dict.fromkeys(text)
        return said

    said = told(None)
    if said.bug is None or said.support.right or not said.support.named or stage not in TELLING:
        return said
    try:
        asked, answers = known or _third(here, stage, counted)
    except Exception:  # of what a candidate throws it has told before
        return said
    if _is_so(said, asked, answers):
        return said
    for other in said.support.others(places_of(asked)):
        if _is_so(replace(said, support=other), asked, answers):
            return told(other)
    alone = len(said.names) == 1 and known is not None  # else it may be something else that is not
    return told(said.support.by_no_rule) if alone else said


def _third(question: Question, stage: str, ask: Ask) -> tuple[Question, Answers]:
    """A problem of other lengths, as it is, and what is answered to it."""
    asked = problem(question, 2, other=FURTHER)
    if stage == "backward":
        dout = np.random.default_rng(2).standard_normal((*asked.q.shape[:2], asked.v.shape[2]))
        _, asked = probe.with_right(replace(asked, dout=dout.astype(asked.q.dtype)))
    return asked, ask(asked)


def _is_so(said: Said, question: Question, answers: Answers) -> bool:
    """Whether these are the answers with what was read, where they are numbers."""
    name = TELLING[said.stage]
    if said.bug is None or name not in answers:
        return said.bug is not None
    given = question.given_to_backward(answers) if said.stage == "backward" else None
    due = solve(question, said.stage, said.bug, given=given)[name]
    off = np.abs(np.nan_to_num(answers[name].astype(np.float64) - due)).max(axis=-1, initial=0.0)
    size = np.maximum(np.abs(due).max(axis=-1, initial=0.0), np.sqrt(np.mean(due**2)))
    return bool((off <= NEAR[question.dtype.itemsize] * size).all())


def packed(like: Question) -> Question:
    """``like``, and behind its sequences those of what would be asked. Raises Refused."""
    first = replace(like, dout=_plain(like).dout, out=None, lse=None, tsinks=None, sliding=None)
    parts = [first, *(_still(of, like) for of in _questions(_shorter(like)))]
    names = [n for of in BY_TOKENS.values() for n in of if getattr(first, n) is not None]
    given: dict[str, Any] = {}
    for name in (*names, *["seqused_k"] * (first.seqused_k is not None)):
        axis = int(name in ("dlse", "lse"))
        given[name] = np.concatenate([getattr(x, name) for x in parts], axis)
    for of in "qk":
        lengths = np.concatenate([np.diff(x.offsets(of)) for x in parts])
        given[f"cu_seqlens_{of}"] = np.append(0, np.cumsum(lengths)).astype(np.int32)
    return replace(first, **given)


def _still(question: Question, like: Question) -> Question:
    """With what ``like`` has of derivatives: v as its own direction, and zeros."""
    of = {"tq": question.q, "tk": question.k, "tblock_scale": question.block_scale}
    of |= {"dlse": question.q[..., 0].T}
    given: Any = {n: np.zeros_like(x) for n, x in of.items() if getattr(like, n) is not None}
    return replace(question, **given, tv=None if like.tv is None else question.v)


def read_packed(question: Question, answers: Answers, n: int) -> tuple[Question, Answers, Readings]:
    """The first ``n`` sequences, what was answered to them, and what the others tell, but of a
    backward pass that had a wrong forward pass's out and lse. Raises ValueError where the other
    sequences are not those of ``packed``."""
    here, given = part(question, answers, 0, n, PAST)
    told = read(_shorter(here), _asked(question, answers, here), (here, given))
    for reading in told.of:  # of other lengths than those that are judged
        reading.loose |= not reading.support.named
    forward = tuple(reading for reading in told.of if reading.stage == "forward")
    told = replace(told, of=forward) if forward and question.passed is None else told
    return replace(here, whole=question), given, told


def _asked(question: Question, answers: Answers, like: Question) -> Callable[[str], Ask | None]:
    """What ``read`` takes: a function of a stage, None where there are no results of it."""
    due, batch = _questions(_shorter(like)), like.batch
    firsts = range(batch, question.batch - batch + 1, batch)
    parts = [part(question, answers, first, first + batch) for first in firsts]
    there = [replace(one, dout=None) if question.dout is None else one for one in due]
    same = (_same(one, other) for one, (other, _) in zip(there, parts, strict=False))
    if question.batch != batch * (1 + len(due)) or not all(same):
        raise ValueError("its sequences are not those of `dump --identify`: write its file anew")

    def ask(stage: str, wanted: Question) -> Answers:
        for one, (_, found) in zip(due, parts, strict=True):
            if _same(one, wanted):
                return {name: x for name, x in found.items() if name in STAGES[stage]}
        raise Refused("it was not asked this")

    return lambda stage: partial(ask, stage) if {*STAGES[stage]} & answers.keys() else None


def _plain(question: Question) -> Question:
    """Without what is about derivatives, except dout; what the reader asks has no more."""
    still = np.zeros((*question.q.shape[:2], question.v.shape[2]), question.q.dtype)
    dout = still if question.dout is None else question.dout
    return replace(question, **STILL | {"out": None, "lse": None, "dout": dout})


def _shorter(question: Question) -> Question:
    """What the questions are like: with the longer of their lengths, which the reader adds, none is
    longer than the longest of ``question``, which a function may pad all of them to."""
    changes: dict[str, Any] = {}
    for of in "qk":
        lengths = np.diff(question.offsets(of))
        lengths = np.where(lengths > 2 * ADDED, lengths - ADDED, lengths)
        changes[f"cu_seqlens_{of}"] = np.append(0, np.cumsum(lengths)).astype(np.int32)
    if question.seqused_k is not None:
        changes["seqused_k"] = np.minimum(question.seqused_k, lengths).astype(np.int32)
    return replace(_plain(question), tv=question.tv, **changes)


def _questions(like: Question) -> list[Question]:
    """All that ``read`` may ask, in its order; nothing is computed for them."""
    found: list[Question] = []

    def ask(question: Question) -> Answers:
        found.append(question)
        given = {"dq": question.q, "dk": question.k, "dv": question.v, "out": question.out}
        return {name: np.zeros(np.shape(x)) for name, x in given.items()}

    for reader in (READ["forward"], READ["backward"]):
        for seed, other in ((0, False), (1, True)):
            reader(ask, problem(like, seed, other=other))
    return [_plain(question) for question in found]


def _same(one: Question, other: Question) -> bool:
    """Whether what a function is given is the same, but for out and lse, which are its own."""
    given = zip(*(vars(_plain(x)).values() for x in (one, other)), strict=True)
    return all(a is b or (np.shape(a) == np.shape(b) and np.array_equal(a, b)) for a, b in given)
