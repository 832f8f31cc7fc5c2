"""The catalogue of bugs in the second derivatives and in forward mode: their terms.

The equations (``engine.STEPS``) are sums of products, and a bug is mostly a product that reads
another value for one of its operands: zeros for a term that is left out, a multiple for one that
is scaled, P o E for a P' without e. ``SITES`` names the places that read, ``at`` plants other
values there; ``tangents`` has those that are read elsewhere in memory, and loops over tiles.

Many are what autograd makes of a first backward pass in which something is a constant to it that
depends on the inputs. With X = E o (dP - D) + tdP, the gradient of P in f = <ddq, dq> + <ddk, dk> +
<ddv, dv>, and P o E that of dP as far as D does not hold it, such a double backward has

    P constant                 tdS = 0               lse constant       tdS = P o (X - e dP)
    P constant, out is not     tdS = -e o P o (dP - rowsum(dO o O))
    delta (or out) constant    tdS = P o (X - rowsum(P o X)), gV = (P o E)^T dO

where a D that is summed up from P o dP adds -e P to the gradient of dP: the right gV and ddout.

Long by the tables.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from rawattn.check.diagnose.engine.attention import (
    LOG2_E,
    OWN_P,
    PROGRAMS,
    STEPS,
    Bug,
    Context,
    Floats,
    See,
    Step,
    View,
    changed,
)
from rawattn.check.diagnose.engine.question import Question
from rawattn.reference.dense import allowed

SECOND, JVP = ("second",), ("jvp",)
SITES = {  # where something is read, and the step that reads it; W reads ddout
    "E": "tY",
    "gated E": "E",
    "gated dS'": "tdY",
    "ddout": "tO",
    "W": "w",
    "dout ddv^T": "tdP",
    "dS'": "tdS",
    "gq": "gQ",
    "gk": "gK",
    "gv": "gV",
}
DIRECTIONS = {  # of an input: its name in a context, and the sites that read it
    "q": ("tQ", ("E", "gk")),
    "k": ("tK", ("E", "gq")),
    "v": ("tV", ("ddout", "W", "dout ddv^T")),
    "block_scale": ("tG", ("gated E", "gated dS'")),
}
TERMS = {  # of a sum: the operand that is in no other term of it, the sites, the directions in it
    "ddq K^T of E": ("tQ", ("E",), "q"),
    "q ddk^T of E": ("tK", ("E",), "k"),
    "dS' k of gq": ("tdY", ("gq",), ""),
    "dS'^T q of gk": ("tdY", ("gk",), ""),
    "terms of dS'": ("tdY", ("gq", "gk"), ""),
    "dS ddk of gq": ("dY", ("gq",), "k"),
    "dS^T ddq of gk": ("dY", ("gk",), "q"),
    "direct terms": ("dY", ("gq", "gk"), "qk"),
}
READERS = {  # of P', together or some of them alone
    "everywhere": ("ddout", "W", "dS'", "gv"),
    "in ddout and W": ("ddout", "W"),
    "in ddout": ("ddout",),
    "in W": ("W",),
    "in dS' and gv": ("dS'", "gv"),
    "in dS'": ("dS'",),
    "in gv": ("gv",),
}


def bugs(question: Question) -> Iterator[Bug]:
    """Every bug of the catalogue that can matter for the question."""
    yield from _frozen(question)
    yield from _other_tangents_of_p()
    yield from _scales(question)
    yield from _terms_of_the_direction(question)
    yield from _ignored_directions(question)
    yield from _lse(question)
    if not question.sparse and question.mask_window != (-1, -1):
        yield from _masks(question)


def of(
    name: str, stages: tuple[str, ...], variants: Mapping[str, Mapping[str, Step]]
) -> Iterator[Bug]:
    for variant, steps in variants.items():
        yield Bug(name, variant, stages, steps=steps)


def given_directions(question: Question) -> list[str]:
    """Of DIRECTIONS."""
    return [name for name in DIRECTIONS if getattr(question, f"t{name}") is not None]


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


def _row(x: Floats) -> Floats:
    """A number of each row beside its scores."""
    return np.asarray(x)[..., None]


def _zeros(c: Context) -> Floats:
    return np.zeros_like(c.P)


def _zero_rows(c: Context) -> Floats:
    return np.zeros(c.P.shape[:2])


def _zeros_for(name: str) -> Step:
    return lambda c: np.zeros_like(getattr(c, name))


def _uncentred(c: Context) -> Floats:
    """The tangent of P = exp(S - L) for a constant L."""
    return np.asarray(c.r(c.P * c.E))


def _added_e(c: Context) -> Floats:
    return np.asarray(c.r(c.P * (c.E + _row(c.e))))


# ---- constants that are none ------------------------------------------------------------------


def _of_probabilities(c: Context) -> Floats:
    """X: what flows to P through dS and dV."""
    return np.asarray(c.r(c.E * (c.dP - _row(c.D))) + c.tdP)


def _through_exp(c: Context) -> Floats:
    """X through P = exp(S - L) for a constant L."""
    return np.asarray(c.r(c.P * _of_probabilities(c)))


def _through_sum(c: Context) -> Floats:
    """The same, and through D = rowsum(P o dP)."""
    return np.asarray(c.r(c.P * (_of_probabilities(c) - _row(c.e) * c.dP)))


def _through_softmax(c: Context) -> Floats:
    X = _of_probabilities(c)
    return np.asarray(c.r(c.P * (X - (c.P * X).sum(axis=-1, keepdims=True))))


def _through_out(c: Context) -> Floats:
    """What flows to S through an out that D was made of: -e dO, through the first backward."""
    return np.asarray(-_row(c.e) * c.P * (c.dP - _row(_without_dlse(c))))


def _frozen(question: Question) -> Iterator[Bug]:
    saved_p: dict[str, Step] = {"tP": _uncentred, "tdS": _zeros}
    delta: dict[str, Step] = {"tP": _uncentred, "tdS": _through_softmax}
    with_lse: dict[str, Step] = {"tP": _uncentred, "tdS": _through_exp}
    gV, no_dlse = at(["gv"], tP=_uncentred), {"tL": _zero_rows}
    of_p: dict[str, Mapping[str, Step]] = {
        "P of the first backward": {"tdS": _zeros},
        "P of the first backward, out is none": {"tdS": _through_out},
        "P and out of the first backward": {"tdS": _zeros} | gV,
        "P and delta of the first backward": saved_p,
        "P and delta of the first backward, ddlse = 0": saved_p | no_dlse,
        "lse of the first backward": {"tdS": _through_sum},
        "lse and out of the first backward": {"tdS": _through_exp} | gV,
    }
    of_delta: dict[str, Mapping[str, Step]] = {
        "delta": delta,
        "delta, ddlse = 0": delta | no_dlse,
        "delta and lse": with_lse,
        "delta and lse, ddlse = 0": with_lse | no_dlse,
        "out": {"tdS": _through_softmax} | gV,
        "W = 0, no e in ddout": at(["ddout"], tP=_uncentred) | {"w": _zero_rows},
    }
    if question.dlse is not None:  # else these are W = 0, and delta
        out_is_none: dict[str, Step] = {"tdS": lambda c: _through_exp(c) + _through_out(c)}
        of_p["lse of the first backward, out is none"] = out_is_none
        in_w = at(["W"], tP=STEPS["tP"])
        of_delta["delta but for dlse"] = {"tP": _uncentred} | in_w
    yield from of("second-frozen-p", SECOND, of_p)
    yield from of("second-frozen-delta", SECOND, of_delta)


# ---- P', e and W ------------------------------------------------------------------------------


def _other_tangents_of_p() -> Iterator[Bug]:
    for text, sites in READERS.items():
        for name, value, words in (
            ("second-frozen-p", _zeros, "P' = 0"),
            ("tangent-e-omitted", _uncentred, "no e"),
        ):
            yield Bug(name, f"{words} {text}", SECOND, steps=at(sites, tP=value))
    nowhere = {"tP": _zeros, "e": _zero_rows}
    no_out: Step = lambda c: STEPS["tO"](_without_e(c)) - _row(c.e)  # noqa: E731
    of_e: dict[str, Mapping[str, Step]] = {
        "e = 0": {"e": _zero_rows},
        "e added": {"tP": _added_e},
        "e for e O": {"tO": no_out},
    }
    yield from of("tangent-e-omitted", SECOND, of_e)
    yield from of("tangent-e-omitted", JVP, of_e | {"no e in tout": {"tP": _uncentred}})
    yield from of("second-frozen-p", SECOND, {"P' = 0, e = 0": nowhere})
    yield from of("second-frozen-p", JVP, {"P' = 0": {"tP": _zeros}, "P' = 0, e = 0": nowhere})
    yield from of(
        "second-w-omitted",
        SECOND,
        {
            "W = 0": {"w": _zero_rows},
            "W added": {"w": lambda c: -STEPS["w"](c)},
            "W from out": {"w": lambda c: (c.dO * c.O).sum(axis=-1)},
        },
    )


def _without_e(c: Context) -> Context:
    return changed(c, tP=_uncentred(c))


def by_given_out(c: Context) -> Floats:
    """The tangent of out as (P o E) V + P tV - e O."""
    return np.asarray(STEPS["tO"](_without_e(c)) - _row(c.e) * c.O)


# ---- factors ----------------------------------------------------------------------------------


def _scales(question: Question) -> Iterator[Bug]:
    """softmax_scale that is missing or there twice, and log2(e) from exponents in base 2."""
    factors = {"in base 2": LOG2_E, "times ln 2": 1 / LOG2_E}
    if not math.isclose(question.scale, 1.0):
        factors |= {"without s": 1 / question.scale, "with s twice": question.scale}
    given = given_directions(question)
    terms = {term: row for term, row in TERMS.items() if set(row[2]) <= set(given)}
    for text, factor in factors.items():
        E, of_e = _scaled(factor, "tY"), _scaled(factor, "e")
        tP = with_values("tP", E=_times(factor, "E"))
        of_terms = {
            f"{term} {text}": at(sites, **{operand: _times(factor, operand)})
            for term, (operand, sites, _) in terms.items()
        }
        of_E = {of: steps for of, steps in of_terms.items() if "of E" in of}
        yield from of("tangent-scale", JVP, {f"E {text}": E} | of_E)
        found: dict[str, Mapping[str, Step]] = {
            f"E {text}": E,
            f"gq {text}": _scaled(factor, "gQ"),
            f"gk {text}": _scaled(factor, "gK"),
            f"gq and gk {text}": _scaled(factor, "gQ", "gK"),
            f"E, gq and gk {text}": _scaled(factor, "tY", "gQ", "gK"),
            f"E {text} in ddout and ddlse": of_e | at(["ddout", "W"], tP=tP),
            f"E {text} in dS' and gv": at(["dS'", "gv"], tP=tP),
        }
        yield from of("tangent-scale", SECOND, found | of_terms)


# ---- terms that are not there -----------------------------------------------------------------


def _terms_of_the_direction(question: Question) -> Iterator[Bug]:
    given = given_directions(question)
    for term, needs in (("dS ddk of gq", "k"), ("dS^T ddq of gk", "q"), ("direct terms", "qk")):
        if set(needs) <= set(given):
            steps = at(TERMS[term][1], dY=_zeros)
            yield Bug("second-direct-term-dropped", term, SECOND, steps=steps)
    if "v" not in given:
        return
    of_value = {
        "P ddv of ddout and W": ("ddout", "W"),
        "P ddv of ddout": ("ddout",),
        "P ddv of W": ("W",),
        "dO ddv^T": ("dout ddv^T",),
        "all of ddv": DIRECTIONS["v"][1],
    }
    for term, sites in of_value.items():
        steps = at(sites, tV=_zeros_for("tV"))
        yield Bug("value-term-dropped", term, SECOND, steps=steps)
    steps = at(["ddout"], tV=_zeros_for("tV"))
    yield Bug("value-term-dropped", "P tv", JVP, steps=steps)


def _ignored_directions(question: Question) -> Iterator[Bug]:
    """One direction is taken for zeros, or all but one, or all of them."""
    given = given_directions(question)
    for count in range(1, len(given) + 1):
        if 1 < count < len(given) - 1:
            continue
        for ignored in combinations(given, count):
            names, sites = zip(*(DIRECTIONS[name] for name in ignored), strict=True)
            steps = at(sum(sites, ()), **{name: _zeros_for(name) for name in names})
            text = " and ".join(f"~{name}" for name in ignored)
            yield from in_both("direction-ignored", text, steps)


def in_both(
    name: str, text: str, steps: Mapping[str, Step], see: See | None = None
) -> Iterator[Bug]:
    """A bug of directions, "~" in its text, in the second derivatives and in forward mode."""
    for stages, prefix in ((SECOND, "dd"), (JVP, "t")):
        if steps.keys() & set(PROGRAMS[stages[0]]):
            yield Bug(name, text.replace("~", prefix), stages, see, steps)


# ---- lse and masks --------------------------------------------------------------------


def _lse(question: Question) -> Iterator[Bug]:
    name, without = "lse-gradient-dropped", {"D": _without_dlse}
    for stages, text in ((SECOND, "ddlse = 0"), (JVP, "tlse = 0")):
        yield Bug("tangent-lse-missing", text, stages, steps={"tL": _zero_rows})
    yield from of("lse-gradient-sign", SECOND, {"-ddlse": {"tL": lambda c: -c.e}})
    if question.dlse is not None:
        both = without | {"tL": _zero_rows}
        yield from of(name, SECOND, {"dlse of D": without, "dlse of D, ddlse = 0": both})
        plus = {"D": lambda c: _without_dlse(c) + c.dL}
        twice = {"D": lambda c: STEPS["D"](c) - c.dL}
        text = "dlse counts twice: D = dout . out - 2 dlse"
        yield from of("lse-gradient-sign", SECOND, {"D + dlse": plus, text: twice})
    in_base_2: dict[str, Step] = {"tL": lambda c: LOG2_E * c.e}
    L: dict[str, Step] = {"L": lambda c: LOG2_E * c.softmax[0]}
    yield from of("lse-base-2", JVP, {"tlse": in_base_2, "lse": L, "both": in_base_2 | L})


def _without_dlse(c: Context) -> Floats:
    return np.asarray((c.dO * c.O).sum(axis=-1))


def _all_keys(question: Question, views: tuple[View, ...]) -> Sequence[View]:
    return [replace(view, weight=np.ones_like(view.weight)) for view in views]


def _masks(question: Question) -> Iterator[Bug]:
    """A P over all keys in both passes or in one of them.

    With it, P' V is not (P o E) V - e O with the O that was given: kernels compute either.
    """
    given_out: dict[str, Step] = {"tO": by_given_out}
    for text, P in {"exp(S - lse)": STEPS["bP"], "softmax": OWN_P["bP"]}.items():
        first, second = {"bP": P} | _second_pass(_masked), {"bP": _masked} | _second_pass(P)
        variants: dict[str, dict[str, Step]] = {
            f"{text} in both passes": {"bP": P},
            f"{text} in both passes, given out": {"bP": P} | given_out,
            f"{text} in ddout and ddlse": first,
            f"{text} in ddout and ddlse, given out": first | given_out,
            f"{text} in gq, gk and gv": second,
        }
        for variant, steps in variants.items():
            yield Bug("mask-missing-in-backward", variant, SECOND, _all_keys, steps)


def _masked(c: Context) -> Floats:
    n, m = c.S.shape[1:]
    return np.where(allowed(n, m, c.question.mask_window), STEPS["bP"](c), 0.0)


def _second_pass(P: Step) -> dict[str, Step]:
    """Another P behind dS, dS' and gv."""

    def tP(c: Context) -> Floats:
        return np.asarray(c.r(P(c) * (c.E - _row(c.e))))

    return {name: with_values(name, P=P, tP=tP) for name in ("dS", "tdS", "gV")}
