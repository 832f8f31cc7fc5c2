"""The catalogue of bugs in the second derivatives and in forward mode; long as such.

Many are what autograd makes of a first backward pass in which something is a constant to it that
depends on the inputs. With X = E o (dP - D) + tdP, the gradient of P in f = <ddq, dq> + <ddk, dk> +
<ddv, dv>, and P o E that of dP as far as D does not hold it, such a double backward has

    P constant                 tdS = 0               lse constant       tdS = P o (X - e dP)
    P constant, out is not     tdS = -e o P o (dP - rowsum(dO o O))
    delta (or out) constant    tdS = P o (X - rowsum(P o X)), gV = (P o E)^T dO

where a D that is summed up from P o dP adds -e P to the gradient of dP: the right gV and ddout.

Long by the catalogue.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from rawattn.check.diagnose.engine.attention import (
    LOG2_E,
    OWN_P,
    STEPS,
    Bug,
    Context,
    Floats,
    Step,
    View,
    changed,
)
from rawattn.check.diagnose.engine.question import Question
from rawattn.reference.dense import allowed

SECOND, JVP = ("second",), ("jvp",)
TAKES = {  # of the direction of an input: its name in a context, and the steps that take it
    "q": ("tQ", ("tY", "gK")),
    "k": ("tK", ("tY", "gQ")),
    "v": ("tV", ("tO", "tdP")),
    "block_scale": ("tG", ("E", "tdY")),
}


def bugs(question: Question) -> Iterator[Bug]:
    """Every bug of the catalogue that can matter for the question."""
    yield from _frozen_p(question)
    yield from _frozen_delta(question)
    yield from _row_terms()
    yield from _scales(question)
    yield from _terms_of_the_direction(question)
    yield from _ignored_directions(question)
    yield from _lse(question)
    if question.group > 1:
        yield from _groups()
    if not question.sparse and question.mask_window != (-1, -1):
        yield from _masks(question)


def of(
    name: str, stages: tuple[str, ...], variants: Mapping[str, Mapping[str, Step]]
) -> Iterator[Bug]:
    for variant, steps in variants.items():
        yield Bug(name, variant, stages, steps=steps)


# ---- terms that several bugs are made of ------------------------------------------------------


def _row(x: Floats) -> Floats:
    """A number of each row beside its scores."""
    return np.asarray(x)[..., None]


def _zeros(c: Context) -> Floats:
    return np.zeros_like(c.P)


def _zero_rows(c: Context) -> Floats:
    return np.zeros(c.P.shape[:2])


def _uncentred(c: Context) -> Floats:
    """The tangent of P = exp(S - L) for a constant L."""
    return np.asarray(c.r(c.P * c.E))


def _out_of(tP: Step) -> Step:
    """The tangent of out by that of P."""
    return lambda c: c.r(c.r(c.o(tP(c)) @ c.V) + c.r(c.o(c.P) @ c.tV))


def _gV_of(tP: Step) -> Step:
    return lambda c: c.r(c.o(tP(c)).swapaxes(1, 2) @ c.dO)


def _tdS_of(tP: Step, w: Step = lambda c: c.w) -> Step:
    return lambda c: c.r(c.r(tP(c) * (c.dP - _row(c.D))) + c.r(c.P * (c.tdP - _row(w(c)))))


def _w_of(tO: Step) -> Step:
    return lambda c: (c.dO * tO(c)).sum(axis=-1)


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
    return np.asarray(-_row(c.e) * c.P * (c.dP - _row((c.dO * c.O).sum(axis=-1))))


def with_values(name: str, **values: Step) -> Step:
    """A step that takes these values for those of the context."""

    def step(c: Context) -> Floats:
        other = changed(c, **{key: value(c) for key, value in values.items()})
        return np.asarray(STEPS[name](other))

    return step


# ---- constants that are none ------------------------------------------------------------------


def _frozen_p(question: Question) -> Iterator[Bug]:
    name, uncentred_gV = "second-frozen-p", _gV_of(_uncentred)
    saved = {"tP": _uncentred, "tdS": _zeros}
    nowhere = {"tP": _zeros, "tL": _zero_rows}
    yield from of(
        name,
        SECOND,
        {
            "P of the first backward": {"tdS": _zeros},
            "P of the first backward, out is none": {"tdS": _through_out},
            "P and out of the first backward": {"tdS": _zeros, "gV": uncentred_gV},
            "P and delta of the first backward": saved,
            "P and delta of the first backward, ddlse = 0": saved | {"tL": _zero_rows},
            "lse of the first backward": {"tdS": _through_sum},
            "lse and out of the first backward": {"tdS": _through_exp, "gV": uncentred_gV},
        },
    )
    if question.dlse is not None:  # else this is W = 0
        out_is_none = {"tdS": lambda c: _through_exp(c) + _through_out(c)}
        yield from of(name, SECOND, {"lse of the first backward, out is none": out_is_none})
    yield from of(
        name,
        SECOND,
        {
            "P' = 0, e = 0": nowhere,
            "P' = 0": {"tP": _zeros},
            "P' = 0 in dS'": {"tdS": _tdS_of(_zeros)},
            "P' = 0 in dS' and gv": {"tdS": _tdS_of(_zeros), "gV": _gV_of(_zeros)},
            "P' = 0 in gv": {"gV": _gV_of(_zeros)},
            "P' = 0 in ddout and W": {"tO": _out_of(_zeros)},
            "P' = 0 in ddout": {"tO": _out_of(_zeros), "w": _w_of(STEPS["tO"])},
        },
    )
    yield from of(name, JVP, {"P' = 0": {"tP": _zeros}, "P' = 0, e = 0": nowhere})


def _frozen_delta(question: Question) -> Iterator[Bug]:
    name, uncentred_gV = "second-frozen-delta", _gV_of(_uncentred)
    delta: dict[str, Step] = {"tP": _uncentred, "tdS": _through_softmax}
    with_lse: dict[str, Step] = {"tP": _uncentred, "tdS": _through_exp}
    yield from of(
        name,
        SECOND,
        {
            "delta": delta,
            "delta, ddlse = 0": delta | {"tL": _zero_rows},
            "delta and lse": with_lse,
            "delta and lse, ddlse = 0": with_lse | {"tL": _zero_rows},
            "out": {"gV": uncentred_gV, "tdS": _through_softmax},
            "W = 0, no e in ddout": {"tO": _out_of(_uncentred), "w": _zero_rows},
        },
    )
    if question.dlse is not None:  # else this is delta
        but_for_dlse = {"tP": _uncentred, "w": _w_of(_out_of(STEPS["tP"]))}
        yield from of(name, SECOND, {"delta but for dlse": but_for_dlse})


def _row_terms() -> Iterator[Bug]:
    """W and e."""
    yield from of(
        "second-w-omitted",
        SECOND,
        {
            "W = 0": {"w": _zero_rows},
            "W added": {"w": lambda c: -STEPS["w"](c)},
            "W from out": {"w": _w_of(lambda c: c.O)},
        },
    )
    tO = _out_of(_uncentred)
    yield from of(
        "second-e-omitted",
        SECOND,
        {
            "but for ddlse": {"tP": _uncentred},
            "everywhere": {"e": _zero_rows},
            "in ddout and W": {"tO": tO},
            "in ddout": {"tO": tO, "w": _w_of(STEPS["tO"])},
            "in W": {"w": _w_of(tO)},
            "in dS' and gv": {"tdS": _tdS_of(_uncentred), "gV": _gV_of(_uncentred)},
            "in dS'": {"tdS": _tdS_of(_uncentred)},
            "in gv": {"gV": _gV_of(_uncentred)},
            "added": {"tP": _added_e},
            "e O of ddout": {"tO": lambda c: tO(c) - _row(c.e)},
        },
    )
    yield from of(
        "jvp-e-omitted",
        JVP,
        {
            "in tout": {"tP": _uncentred},
            "everywhere": {"e": _zero_rows},
            "added": {"tP": _added_e},
            "without O": {"tO": lambda c: tO(c) - _row(c.e)},
        },
    )


def _added_e(c: Context) -> Floats:
    return np.asarray(c.r(c.P * (c.E + _row(c.e))))


# ---- factors ----------------------------------------------------------------------------------


def _scales(question: Question) -> Iterator[Bug]:
    for text, factor in (("in base 2", LOG2_E), ("times ln 2", 1 / LOG2_E)):
        E, gQ, gK = ({name: _times(name, factor)} for name in ("tY", "gQ", "gK"))
        yield from of("second-scale", SECOND, {f"E {text}": E, f"gq and gk {text}": gQ | gK})
        yield from of("jvp-scale", JVP, {f"E {text}": E})
    if math.isclose(question.scale, 1.0):
        return
    for text, factor in (("without s", 1 / question.scale), ("with s twice", question.scale)):
        E, gQ, gK = ({name: _times(name, factor)} for name in ("tY", "gQ", "gK"))
        tangents = {f"E {text}": E}
        if question.tq is not None and question.tk is not None:
            tangents |= {
                f"ddq K^T of E {text}": {"tY": _tY(factor, 1.0)},
                f"q ddk^T of E {text}": {"tY": _tY(1.0, factor)},
            }
        yield from of("jvp-scale", JVP, tangents)
        yield from of("second-scale", SECOND, tangents)
        yield from of(
            "second-scale",
            SECOND,
            {
                f"gq {text}": gQ,
                f"gk {text}": gK,
                f"gq and gk {text}": gQ | gK,
                f"E, gq and gk {text}": E | gQ | gK,
                f"E {text} in ddout and ddlse": _E_of_pass(factor, 1.0),
                f"E {text} in dS' and gv": _E_of_pass(1.0, factor),
                f"direct terms {text}": {"gQ": _gQ(1.0, factor), "gK": _gK(1.0, factor)},
                f"terms of dS' {text}": {"gQ": _gQ(factor, 1.0), "gK": _gK(factor, 1.0)},
            },
        )


def _times(name: str, factor: float) -> Step:
    return lambda c: c.r(factor * STEPS[name](c))


def _tY(of_q: float, of_k: float) -> Step:
    return lambda c: c.r(c.s * c.r(of_q * c.r(c.tQ @ c.K.T) + of_k * c.r(c.Q @ c.tK.T)))


def _E_of_pass(first: float, second: float) -> dict[str, Step]:
    """E times a number in each pass; e, a result of the first pass, comes with its number."""

    def tP(c: Context) -> Floats:
        return np.asarray(c.r(c.P * (second * c.E - _row(c.e))))

    return {
        "e": lambda c: first * STEPS["e"](c),
        "tO": _out_of(lambda c: c.r(c.P * (first * c.E - _row(c.e)))),
        "tdS": _tdS_of(tP),
        "gV": _gV_of(tP),
    }


def _gQ(main: float, direct: float) -> Step:
    return lambda c: c.r(c.s * c.r(main * c.r(c.o(c.tdY) @ c.K) + direct * c.r(c.o(c.dY) @ c.tK)))


def _gK(main: float, direct: float) -> Step:
    return lambda c: (
        c.s
        * c.r(
            main * c.r(c.o(c.tdY).swapaxes(1, 2) @ c.Q)
            + direct * c.r(c.o(c.dY).swapaxes(1, 2) @ c.tQ)
        )
    )


# ---- terms that are not there -----------------------------------------------------------------


def _terms_of_the_direction(question: Question) -> Iterator[Bug]:
    name = "second-direct-term-dropped"
    gQ, gK = {"gQ": _gQ(1.0, 0.0)}, {"gK": _gK(1.0, 0.0)}
    if question.tk is not None:
        yield from of(name, SECOND, {"dS ddk of gq": gQ})
    if question.tq is not None:
        yield from of(name, SECOND, {"dS^T ddq of gk": gK})
    if question.tq is not None and question.tk is not None:
        yield from of(name, SECOND, {"both": gQ | gK})
    if question.tv is not None:
        without: Step = lambda c: c.r(c.o(c.tP) @ c.V)  # noqa: E731
        nothing: Step = lambda c: np.zeros_like(c.dP)  # noqa: E731
        yield from of(
            "second-value-term-dropped",
            SECOND,
            {
                "P ddv of ddout and W": {"tO": without},
                "P ddv of ddout": {"tO": without, "w": _w_of(STEPS["tO"])},
                "P ddv of W": {"w": _w_of(without)},
                "dO ddv^T": {"tdP": nothing},
                "all of ddv": {"tO": without, "tdP": nothing},
            },
        )
        yield from of("jvp-value-term-dropped", JVP, {"P tv": {"tO": without}})


def _ignored_directions(question: Question) -> Iterator[Bug]:
    """One direction is taken for zeros, or all but one, or all of them."""
    given = [name for name in TAKES if getattr(question, f"t{name}") is not None]
    for count in range(1, len(given) + 1):
        if 1 < count < len(given) - 1:
            continue
        for ignored in combinations(given, count):
            zeros = {TAKES[name][0]: _zeros_for(TAKES[name][0]) for name in ignored}
            takers = dict.fromkeys(step for name in ignored for step in TAKES[name][1])
            steps = {step: with_values(step, **zeros) for step in takers}
            for stages, prefix in ((SECOND, "dd"), (JVP, "t")):
                variant = " and ".join(f"{prefix}{name}" for name in ignored)
                yield Bug("direction-ignored", variant, stages, steps=steps)


def _zeros_for(name: str) -> Step:
    return lambda c: np.zeros_like(getattr(c, name))


def _lse(question: Question) -> Iterator[Bug]:
    name, without = "second-lse-gradient-dropped", {"D": _without_dlse}
    yield from of(name, SECOND, {"ddlse = 0": {"tL": _zero_rows}})
    yield from of("lse-gradient-sign", SECOND, {"-ddlse": {"tL": lambda c: -c.e}})
    if question.dlse is not None:
        both = without | {"tL": _zero_rows}
        yield from of(name, SECOND, {"dlse of D": without, "dlse of D, ddlse = 0": both})
        plus = {"D": lambda c: _without_dlse(c) + c.dL}
        twice = {"D": lambda c: STEPS["D"](c) - c.dL}
        text = "dlse counts twice: D = dout . out - 2 dlse"
        yield from of("lse-gradient-sign", SECOND, {"D + dlse": plus, text: twice})
    yield from of("jvp-lse-missing", JVP, {"tlse = 0": {"tL": _zero_rows}})
    in_base_2: dict[str, Step] = {"tL": lambda c: LOG2_E * c.e}
    L: dict[str, Step] = {"L": lambda c: LOG2_E * c.softmax[0]}
    yield from of("lse-base-2", JVP, {"tlse": in_base_2, "lse": L, "both": in_base_2 | L})


def _without_dlse(c: Context) -> Floats:
    return np.asarray((c.dO * c.O).sum(axis=-1))


def _groups() -> Iterator[Bug]:
    sums: dict[str, Callable[[Floats], Floats]] = {
        "the last": lambda x: x[-1],
        "the first": lambda x: x[0],
        "the mean": lambda x: x.mean(axis=0),
    }
    for text, total in sums.items():
        alone = {
            f"{text}, of {name.lower()} alone": {name: _one_place(name, total)}
            for name in ("gK", "gV")
        }
        both = {text: {"sum_heads": _constant(total)}}
        yield from of("second-group-not-summed", SECOND, both | alone)


def _constant(value: Callable[[Floats], Floats]) -> Step:
    return lambda c: value


def _one_place(name: str, total: Callable[[Floats], Floats]) -> Step:
    """What the heads of a group give, changed so that its sum is ``total`` of them."""

    def step(c: Context) -> Floats:
        heads = np.asarray(STEPS[name](c))
        found = np.zeros_like(heads)
        found[0] = total(heads)
        return found

    return step


# ---- the mask ---------------------------------------------------------------------------------


def _all_keys(question: Question, views: tuple[View, ...]) -> Sequence[View]:
    return [replace(view, weight=np.ones_like(view.weight)) for view in views]


def _masks(question: Question) -> Iterator[Bug]:
    """A P over all keys in both passes or in one of them.

    With it, P' V is not (P o E) V - e O with the O that was given: kernels compute either.
    """
    unmasked: dict[str, Step] = {
        "exp(S - lse)": STEPS["bP"],
        "softmax": OWN_P["bP"],
    }
    for text, P in unmasked.items():
        variants: dict[str, dict[str, Step]] = {
            f"{text} in both passes": {"bP": P},
            f"{text} in both passes, given out": {"bP": P, "tO": by_given_out},
            f"{text} in ddout and ddlse": {"bP": P} | _second_pass(_masked),
            f"{text} in ddout and ddlse, given out": (
                {"bP": P, "tO": by_given_out} | _second_pass(_masked)
            ),
            f"{text} in gq, gk and gv": {"bP": _masked} | _second_pass(P),
        }
        for variant, steps in variants.items():
            yield Bug("second-mask-missing", variant, SECOND, _all_keys, steps)


def _masked(c: Context) -> Floats:
    n, m = c.S.shape[1:]
    return np.where(allowed(n, m, c.question.mask_window), STEPS["bP"](c), 0.0)


def by_given_out(c: Context) -> Floats:
    """The tangent of out as (P o E) V + P tV - e O."""
    return np.asarray(_out_of(_uncentred)(c) - _row(c.e) * c.O)


def _second_pass(P: Step) -> dict[str, Step]:
    """Another P behind dS, dS' and gv."""

    def tP(c: Context) -> Floats:
        return np.asarray(c.r(P(c) * (c.E - _row(c.e))))

    return {name: with_values(name, P=P, tP=tP) for name in ("dS", "tdS", "gV")}
