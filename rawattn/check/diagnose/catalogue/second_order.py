"""The catalogue of bugs in second derivatives and tangents, and of the terms of all derivatives. A
bug is mostly a product that reads another value for one of its operands: ``at`` plants these at
``SITES``. ``terms``: what results are sums of, each as often as one likes. Long by the tables."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain, combinations
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.engine.attention import Bug, solve
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.engine.steps import STEPS, Context, Floats, Step, changed, row_max, sunk

SECOND, JVP = ("second",), ("jvp",)
# where something is read, and the step that reads it; W reads ddout
SITES = {"e": "e", "E": "tY", "gated E": "E", "gated dS'": "tdY", "ddout": "tO", "W": "w", "D": "D"}
SITES |= {"dout ddv^T": "tdP", "dS'": "tdS", "gq": "gQ", "gk": "gK", "gv": "gV"}
DIRECTIONS = {  # of an input: its name in a context, and the sites that read it
    "q": ("tQ", ("E", "gk")),
    "k": ("tK", ("E", "gq")),
    "v": ("tV", ("ddout", "W", "dout ddv^T")),
    "block_scale": ("tG", ("gated E", "gated dS'")),
    "sinks": ("tsink", ("e",)),
}
TERMS = {  # of a sum: the operand that is in no other term of it, the sites, the directions in it
    "ddq K^T of E": ("tQ", ("E",), "q"),
    "q ddk^T of E": ("tK", ("E",), "k"),
    "dS' k of gq": ("tdY", ("gq",), ""),
    "dS'^T q of gk": ("tdY", ("gk",), ""),
    "dS ddk of gq": ("dY", ("gq",), "k"),
    "dS^T ddq of gk": ("dY", ("gk",), "q"),
    "direct terms": ("dY", ("gq", "gk"), "q k"),
    "P ddv of ddout and W": ("tV", ("ddout", "W"), "v"),
    "P ddv of ddout": ("tV", ("ddout",), "v"),
    "P ddv of W": ("tV", ("W",), "v"),
    "dO ddv^T": ("tV", ("dout ddv^T",), "v"),
}
RESULTS = {  # of a stage whole results, and the steps that give them
    "backward": {"dq and dk": "dQ dK", "dq": "dQ", "dk": "dK"},
    "jvp": {"E": "tY"},
    "second": {"E": "tY", "gq": "gQ", "gk": "gK", "gv": "gV", "gq and gk": "gQ gK"},
}
# of P', all of them or some alone
READERS = ("ddout, W, dS', gv", "ddout, dS', gv", "ddout, W", "ddout", "W", "dS', gv", "dS'", "gv")


def with_values(name: str, **values: Step) -> Step:
    """A step that takes these values for those of the context."""
    return lambda c: STEPS[name](changed(c, **{key: value(c) for key, value in values.items()}))


def at(sites: Sequence[str], **values: Step) -> dict[str, Step]:
    """Steps with which these sites alone read other values."""
    steps = {SITES[site]: with_values(SITES[site], **values) for site in sites}
    if ("W" in sites) != ("ddout" in sites):
        read = values if "W" in sites else {}
        steps["w"] = with_values("w", **{"tO": with_values("tO", **read), **read})
    return steps


def multiple(name: str, factor: float) -> Step:
    return lambda c: factor * getattr(c, name)


def _uncentred(c: Context) -> Floats:
    """The tangent of P = exp(S - L) for a constant L."""
    return np.asarray(c.r(c.P * c.E))


def by_given_out(c: Context) -> Floats:
    """The tangent of out as (P o E) V + P tV - e O."""
    return np.asarray(STEPS["tO"](changed(c, tP=_uncentred(c))) - c.e[..., None] * c.O)


def _through_P(softmax: bool, c: Context) -> Floats:
    """What flows through P by dS and dV: the softmax, or exp(S - L) for a constant L."""
    of_P = c.r(c.E * (c.dP - c.D[..., None])) + c.tdP
    mean = (c.P * of_P).sum(axis=-1, keepdims=True) if softmax else 0.0
    return np.asarray(c.r(c.P * (of_P - mean)))


RIGHT_ROWS = lru_cache(maxsize=4)(partial(solve, stage="second"))
NO_P: Step = multiple("P", 0.0)
NO_ROWS: Step = lambda c: np.zeros(c.S.shape[:2])  # noqa: E731
UNDIVIDED: dict[str, Step] = {"P0": sunk(lambda c: np.exp(c.sink - np.maximum(row_max(c), c.sink)))}
GV = at(["gv"], tP=_uncentred)
OF_EXP, OF_SOFTMAX = ({"tdS": partial(_through_P, softmax)} for softmax in (False, True))
P, D, E = "second-frozen-p", "second-frozen-delta", "tangent-e-omitted"
W, DROPPED, IGNORED = "second-w-omitted", "second-term-dropped", "direction-ignored"
BUGS = (  # those that are not one term
    Bug(P, "P of the first backward", SECOND, steps={"tdS": NO_P}),
    Bug(P, "P and out of the first backward", SECOND, steps={"tdS": NO_P} | GV),
    Bug(P, "P and delta of the first backward", SECOND, steps={"tP": _uncentred, "tdS": NO_P}),
    Bug(P, "lse and out of the first backward", SECOND, steps=OF_EXP | GV),
    Bug(D, "delta", SECOND, steps=OF_SOFTMAX | {"tP": _uncentred}),
    Bug(D, "out", SECOND, steps=OF_SOFTMAX | GV),
    Bug(D, "W = 0, no e in ddout", SECOND, steps=at(["ddout"], tP=_uncentred) | {"w": NO_ROWS}),
    Bug(E, "e = 0", SECOND + JVP, steps={"e": NO_ROWS}),
    Bug(P, "P' = 0, e = 0", SECOND + JVP, steps={"tP": NO_P, "e": NO_ROWS}),
    Bug("not-normalised", "the sink's weight", SECOND + JVP, steps=UNDIVIDED),
    Bug("not-normalised", "tlse", JVP, steps={"tL": lambda c: c.e * np.exp(c.L - row_max(c))}),
)


class Term(NamedTuple):
    """What ``of`` makes count so often, once where it is right; its class where it is missing, and
    where it counts otherwise. none: what is said where it is missing."""

    text: str
    of: Callable[[float], Mapping[str, Step]]
    name: str
    other: str
    none: str

    def by(self, factor: Callable[[Question], float]) -> Mapping[str, Step]:
        """What makes it count as often as a question has it."""
        found = {x: lambda c, x=x: self.of(factor(c.question))[x](c) for x in self.of(1.0)}
        return found


def terms(question: Question, stage: str) -> Iterator[Term]:
    """What the results of a stage are sums of, one time each."""
    second, factor, sign = stage == "second", "constant-factor", "lse-gradient-sign"
    where, none = lacking(question), factor if stage == "backward" else DROPPED
    for text, made in RESULTS[stage].items() if stage != "jvp" or not where else ():
        yield Term(text, partial(_made, made), none, factor, f"{text} = 0{where}")
    if stage != "jvp":
        dlse, of_out = (partial(_read, ("D",), (name,)) for name in ("dL", "O"))
        other = DROPPED if second else "delta-of-another-out"
        yield Term("dout . out of D", of_out, "delta-omitted", other, "no dout . out in D")
        if question.dlse is not None:
            yield Term("dlse of D", dlse, "lse-gradient-dropped", sign, "dlse of D")
            yield Term("D", partial(_made, "D"), "delta-omitted", other, "D = 0")
    if stage == "backward":
        return
    given = [name for name in DIRECTIONS if getattr(question, f"t{name}") is not None]
    for count in {1, len(given) - 1, len(given)} - {0, -1}:
        for some in combinations(given, count):
            text = " and ".join(f"{'dd' if second else 't'}{name}" for name in some)
            names, sites = zip(*(DIRECTIONS[name] for name in some), strict=True)
            of = partial(_read, [*chain(*sites)], names)
            yield Term(text, of, IGNORED, DROPPED, text + where)
    for text, (name, sites, needs) in TERMS.items():
        words = text if second else text.replace("dd", "t")
        if (second or {*sites} <= {"E", "ddout"}) and {*needs.split()} <= {*given}:
            kind = IGNORED if "E" in sites else DROPPED
            yield Term(words, partial(_read, sites, (name,)), kind, DROPPED, words + where)
    for text in READERS if second else ("ddout",):
        readers, words = text.split(", "), text if second else "tout"
        of_P = partial(_read, readers, ("tP",))
        yield Term(f"P' in {words}", of_P, P, DROPPED, f"P' = 0 in {words}")
        yield Term(f"e in {words}", partial(_centred, readers), E, E, f"no e in {words}")
    if second:
        yield Term("W", partial(_made, "w"), W, DROPPED, "W = 0")
        if question.softcap is not None:
            bend, name = "the bend, the second derivative of the softcap", "softcap-slope-omitted"
            bent = lambda by: {"tdY": with_values("tdY", cap=lambda c: (*c.cap[:2], by * c.cap[2]))}  # noqa: E731
            yield Term(bend, bent, name, name, f"{bend}, is 0")
    of_lse = "ddlse" if second else "tlse"
    yield Term(of_lse, partial(_made, "tL"), "tangent-lse-missing", sign, f"{of_lse} = 0")


def instead(question: Question) -> Iterator[Bug]:
    """An input in the place of its own direction, most likely where there is none."""
    for name, (operand, sites) in list(DIRECTIONS.items())[:3]:
        where = ", which is None" * (getattr(question, f"t{name}") is None)
        for of, t in ((SECOND, "dd"), (JVP, "t")):
            steps = at(sites, **{operand: attrgetter(name.upper())})
            yield Bug("arguments-swapped", f"{name} for {t}{name}{where}", of, steps=steps)


def lacking(question: Question) -> str:
    """Which direction of the scores there is none of, where there is the other one."""
    lacks = "tq" if question.tq is None else "tk"
    return f", where {lacks} is None" * ((question.tq is None) != (question.tk is None))


def _made(steps: str, factor: float) -> Mapping[str, Step]:
    many = {name: lambda c, name=name: factor * STEPS[name](c) for name in steps.split()}
    return many


def _read(sites: Sequence[str], names: Sequence[str], factor: float) -> dict[str, Step]:
    """Values of the context, where these read them, so many times."""
    return at(sites, **{name: multiple(name, factor) for name in names})


def _centred(sites: Sequence[str], factor: float) -> dict[str, Step]:
    return at(sites, tP=lambda c: c.P * (c.E - factor * c.e[..., None]))


def of_one_pass(bug: Bug, first: bool = False) -> Bug:
    """A bug of one pass of a double backward, the ``first`` (ddout, ddlse, e, W) or the second."""

    passed = lru_cache(maxsize=2)(partial(solve, stage="second", bug=bug)) if first else RIGHT_ROWS

    def of_rows(c: Context, name: str) -> Floats:
        x, rows, heads = passed(c.question, given=c.given), c.view.rows, c.view.heads[:, None]
        return np.asarray(x[name][heads, rows] if name == "ddlse" else x[name][rows, heads])

    steps = {"e": partial(of_rows, name="ddlse"), "tO": partial(of_rows, name="ddout")}
    form = f"{bug.variant}, in the {'first' if first else 'second'} pass alone".removeprefix(", ")
    alike = None if bug.alike is None else (first, bug.alike)
    see, others = (None, {}) if first else (bug.see, bug.steps)
    return Bug(bug.name, form, SECOND, see, {**others, **steps}, alike=alike)
