"""The catalogue of bugs in the second derivatives and in forward mode: their terms.

A bug is mostly a product that reads another value for one of its operands: zeros for a term that is
left out, a multiple for one that is scaled, P o E for a P' without e. ``SITES`` names the places
that read, ``at`` plants other values there. Many are what autograd makes of a first backward pass
in which something is a constant to it that depends on the inputs. Long by the tables.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np

from rawattn.check.diagnose.engine.attention import Bug
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.engine.steps import LOG2_E, STEPS, Context, Floats, Step, changed

SECOND, JVP = ("second",), ("jvp",)
SITES = {  # where something is read, and the step that reads it; W reads ddout
    **{"e": "e", "E": "tY", "gated E": "E", "gated dS'": "tdY", "ddout": "tO", "W": "w"},
    **{"dout ddv^T": "tdP", "dS'": "tdS", "gq": "gQ", "gk": "gK", "gv": "gV"},
}
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
}
OF_V = {  # readers of ddv, which is in no other term of theirs
    "P ddv of ddout and W": ("ddout", "W"),
    "P ddv of ddout": ("ddout",),
    "P ddv of W": ("W",),
    "dO ddv^T": ("dout ddv^T",),
    "all of ddv": ("ddout", "W", "dout ddv^T"),
}
TERMS |= {text: ("tV", sites, "v") for text, sites in OF_V.items()}
READERS = {  # of P', together or some of them alone
    "everywhere": ("ddout", "W", "dS'", "gv"),
    "in ddout and W": ("ddout", "W"),
    "in ddout": ("ddout",),
    "in W": ("W",),
    "in dS' and gv": ("dS'", "gv"),
    "in dS'": ("dS'",),
    "in gv": ("gv",),
}
Row = tuple[str, str, tuple[str, ...], Mapping[str, Step], str]  # the last: what must be given


def bugs(question: Question) -> Iterator[Bug]:
    """Every bug of the catalogue that can matter for the question."""
    directions = [name for name in DIRECTIONS if getattr(question, f"t{name}") is not None]
    given = {*directions, *(["dlse"] if question.dlse is not None else [])}
    rows = [*TABLE, *_scales(question), *_ignored_directions(directions)]
    for name, variant, stages, steps, needs in rows:
        if set(needs.split()) <= given:
            yield Bug(name, variant, stages, steps=steps)


# ---- other values -----------------------------------------------------------------------------


def with_values(name: str, **values: Step) -> Step:
    """A step that takes these values for those of the context."""

    def step(c: Context) -> Floats:
        other = changed(c, **{key: value(c) for key, value in values.items()})
        return np.asarray(STEPS[name](other))

    return step


def at(sites: Sequence[str], **values: Step) -> dict[str, Step]:
    """Steps with which these sites alone read other values."""

    def w(c: Context) -> Floats:
        read = values if "W" in sites else {}
        other = changed(c, **{key: value(c) for key, value in read.items()})
        if "tO" not in read:
            other.tO = STEPS["tO"](other)
        return np.asarray(STEPS["w"](other))

    steps = {SITES[site]: with_values(SITES[site], **values) for site in sites}
    if ("W" in sites) != ("ddout" in sites):
        steps["w"] = w
    return steps


def _scaled(factor: float, *steps: str) -> dict[str, Step]:
    """Results of steps times a number."""

    def of(name: str) -> Step:
        return lambda c: factor * STEPS[name](c)

    return {name: of(name) for name in steps}


def _times(factor: float, name: str) -> Step:
    """A value of the context times a number."""
    return lambda c: factor * getattr(c, name)


def _zero(like: str) -> Step:
    return lambda c: np.zeros_like(getattr(c, like))


def _row(x: Floats) -> Floats:
    """A number of each row beside its scores."""
    return np.asarray(x)[..., None]


def _uncentred(c: Context) -> Floats:
    """The tangent of P = exp(S - L) for a constant L."""
    return np.asarray(c.r(c.P * c.E))


def _without_e(c: Context) -> Context:
    return changed(c, tP=_uncentred(c))


def by_given_out(c: Context) -> Floats:
    """The tangent of out as (P o E) V + P tV - e O."""
    return np.asarray(STEPS["tO"](_without_e(c)) - _row(c.e) * c.O)


def without_dlse(c: Context) -> Floats:
    """D of out alone."""
    return np.asarray((c.dO * c.O).sum(axis=-1))


# ---- constants that are none ------------------------------------------------------------------


def _of_probabilities(c: Context) -> Floats:
    """X: what flows to P through dS and dV."""
    return np.asarray(c.r(c.E * (c.dP - _row(c.D))) + c.tdP)


def _through_exp(c: Context) -> Floats:
    """X through P = exp(S - L) for a constant L."""
    return np.asarray(c.r(c.P * _of_probabilities(c)))


def _through_softmax(c: Context) -> Floats:
    X = _of_probabilities(c)
    return np.asarray(c.r(c.P * (X - (c.P * X).sum(axis=-1, keepdims=True))))


# ---- the table --------------------------------------------------------------------------------

NO_P, NO_ROWS = _zero("P"), _zero("L")
GV, NO_DDLSE = at(["gv"], tP=_uncentred), {"tL": NO_ROWS}
SAVED_P, DELTA = {"tP": _uncentred, "tdS": NO_P}, {"tP": _uncentred, "tdS": _through_softmax}
DLSE_ADDED: dict[str, Step] = {"D": lambda c: without_dlse(c) + c.dL}
NO_DLSE: dict[str, Step] = {"D": without_dlse}
P, D, E = "second-frozen-p", "second-frozen-delta", "tangent-e-omitted"
W, DROPPED, IN_E = "second-w-omitted", "second-term-dropped", "direction-ignored"
TABLE: tuple[Row, ...] = (
    (P, "P of the first backward", SECOND, {"tdS": NO_P}, ""),
    (P, "P and out of the first backward", SECOND, {"tdS": NO_P} | GV, ""),
    (P, "P and delta of the first backward", SECOND, SAVED_P, ""),
    (P, "lse and out of the first backward", SECOND, {"tdS": _through_exp} | GV, ""),
    (D, "delta", SECOND, DELTA, ""),
    (D, "out", SECOND, {"tdS": _through_softmax} | GV, ""),
    (D, "W = 0, no e in ddout", SECOND, at(["ddout"], tP=_uncentred) | {"w": NO_ROWS}, ""),
    *((P, f"P' = 0 {text}", SECOND, at(sites, tP=NO_P), "") for text, sites in READERS.items()),
    *((E, f"no e {text}", SECOND, at(sites, tP=_uncentred), "") for text, sites in READERS.items()),
    (E, "e = 0", SECOND + JVP, {"e": NO_ROWS}, ""),
    (E, "no e in tout", JVP, {"tP": _uncentred}, ""),
    (P, "P' = 0", JVP, {"tP": NO_P}, ""),
    (P, "P' = 0, e = 0", SECOND + JVP, {"tP": NO_P, "e": NO_ROWS}, ""),
    (W, "W = 0", SECOND, {"w": NO_ROWS}, ""),
    (W, "W from out", SECOND, {"w": without_dlse}, ""),
    *(
        (kind, text + how, SECOND, at(sites, **{name: _times(factor, name)}), needs)
        for how, factor in {"": 0.0, ", with the wrong sign": -1.0, ", twice": 2.0}.items()
        for text, (name, sites, needs) in TERMS.items()
        for kind in (IN_E if "E" in text and not factor else DROPPED,)
    ),
    ("not-normalised", "tlse", JVP, {"tL": lambda c: c.e * np.exp(c.L - c.S.max(axis=-1))}, ""),
    (DROPPED, "P tv", JVP, at(["ddout"], tV=_zero("tV")), "v"),
    ("tangent-lse-missing", "ddlse = 0", SECOND, NO_DDLSE, ""),
    ("tangent-lse-missing", "tlse = 0", JVP, NO_DDLSE, ""),
    ("lse-gradient-sign", "-ddlse", SECOND, {"tL": _times(-1, "e")}, ""),
    ("lse-gradient-sign", "D + dlse", SECOND, DLSE_ADDED, "dlse"),
    ("lse-gradient-dropped", "dlse of D", SECOND, NO_DLSE, "dlse"),
    ("lse-base-2", "tlse", JVP, {"tL": _times(LOG2_E, "e")}, ""),
)


def _scales(question: Question) -> Iterator[Row]:
    """softmax_scale that is missing or there twice, and log2(e) from exponents in base 2."""
    factors = {"in base 2": LOG2_E, "times ln 2": 1 / LOG2_E}
    if not math.isclose(question.scale, 1.0):
        factors |= {"without s": 1 / question.scale, "with s twice": question.scale}
    name = "tangent-scale"
    for text, factor in factors.items():
        yield name, f"E {text}", JVP, _scaled(factor, "tY"), ""
        for words, of in {"E": "tY", "gq": "gQ", "gk": "gK", "gq and gk": "gQ gK"}.items():
            yield name, f"{words} {text}", SECOND, _scaled(factor, *of.split()), ""
        for term, (operand, sites, needs) in TERMS.items():
            steps = at(sites, **{operand: _times(factor, operand)})
            yield name, f"{term} {text}", SECOND, steps, needs


def _ignored_directions(given: Sequence[str]) -> Iterator[Row]:
    """One direction is taken for zeros, or all but one, or all of them."""
    for count in {1, len(given) - 1, len(given)} - {0, -1}:
        for ignored in combinations(given, count):
            names, sites = zip(*(DIRECTIONS[name] for name in ignored), strict=True)
            steps = at(sum(sites, ()), **{name: _zero(name) for name in names})
            for stages, prefix in ((SECOND, "dd"), (JVP, "t")):
                text = " and ".join(f"{prefix}{name}" for name in ignored)
                yield "direction-ignored", text, stages, steps, ""
