"""What a backward pass has in place of dS, and which heads it adds up where.

Long by the forms that a wrong dS may have.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial

import numpy as np

from rawattn.check.diagnose.engine.attention import STEPS, Context, changed
from rawattn.check.diagnose.evidence.places import Places
from rawattn.check.diagnose.evidence.support import LESS, MORE, Support, support_of
from rawattn.check.diagnose.read.classes import BACKWARD_ONLY, of_pairs
from rawattn.check.diagnose.read.maps import of_heads, of_other_heads
from rawattn.check.diagnose.read.probe import Backward, Slopes
from rawattn.check.diagnose.read.said import (
    COARSE,
    TINY,
    Said,
    noise_of,
    of_scale,
    of_term,
    of_view,
)
from rawattn.check.diagnose.read.terms import Field, Term, by_head, term_of
from rawattn.check.diagnose.read.weights import said_of
from rawattn.reference.dense import dead_to_inf

Array = np.ndarray
Of = Callable[[Array, Array, Array], Array]  # of P, dP and D
TERMS: dict[str, tuple[Of, Of]] = {  # the two terms of dS, with parentheses that stand elsewhere
    "P o (a dP - b D)": (lambda P, dP, D: P * dP, lambda P, dP, D: P * D),
    "P o a dP - b D": (lambda P, dP, D: P * dP, lambda P, dP, D: D + 0 * P),
    "a dP - P o b D": (lambda P, dP, D: dP, lambda P, dP, D: P * D),
    "a dP - b D": (lambda P, dP, D: dP, lambda P, dP, D: D + 0 * P),
}
CLEAR = 0.2  # of the typical dP - D, at least, where dS tells anything
VERBS = {LESS: "misses pairs", MORE: "has pairs that must not be"}
IN_ANOTHER_WAY = "is wrong in another way"


@dataclass(eq=False)
class Change:
    """What is wrong with dS, in words, and its class. dY: what stands in the place of c.dY, None
    where no step tells. masked: it is right, unlike P. times: by head, a factor. whole: this is
    all of dS, so that pairs where it happens to be 0 are not missed.
    """

    text: list[str] = field(default_factory=list)
    name: str = ""
    dY: Callable[[Context], Array] | None = None
    masked: bool = False
    times: Array | None = None
    whole: bool = False


def said_of_backward(read: Backward, again: Callable[[], Backward]) -> Said:
    """Like ``said_of``, of P as dv has it, of dS as dq and dk have it, and of the heads' sums."""
    second = cache(again)
    places = read.weights.places
    heads_kv = np.arange(places.question.num_heads_kv)
    own = heads_kv.repeat(places.question.group)[:, None] == heads_kv
    sums: list[str] = []
    found: list[Array] = []
    for name, adds in read.adds.items():
        where = adds > 0.02 * adds.max(initial=0.0)
        if not np.array_equal(where, own):
            found.append(where)
            clear = np.isfinite(adds).all() and (adds[where] > 0.2 * adds.max()).all()
            sums.append(_of_sums(name, where) if clear and where.any() else "")
    if sums:
        said = Said(read.weights, Support(places, places.right[None], ()))
        said.wrong += [text for text in sums if text]
        if not all(sums):
            said.unread.append("dk and dv are not sums over the queries of their heads")
        one = all((where & own).sum() == where.sum() == where.shape[1] for where in found)
        said.names.append("gqa-group-not-summed" if one else "gqa-reduction-map")
        return said
    said = said_of(read.weights, lambda: second().weights, passed=True)
    said.right[:] = [f"P of dv ({', '.join(said.right)})"] if said.right else []
    if "bP" in said.steps or said.unread:
        return said  # what dS should be is not known
    changes = {}
    for name, slopes in read.slopes.items():
        if said.see is not None and _by_the_mask(_Part(said, places, slopes, places.rights)):
            changes[name] = Change(["sees whom it must"], "", _masked, masked=True)
            continue
        part = _Part(said, places, slopes)
        rows = -1 if name == "dq" else -2
        changes[name] = _change_of(part, partial(_elsewhere, said, second, name), rows)
    dq, dk = changes["dq"], changes["dk"]
    if _delta(dq) != _delta(dk) and dq.text and dk.text:  # dq has the cotangents of all heads
        dq = dk = Change(["has another row term than D of its row"], "delta-of-another-out")
    if [_plain(text) for text in dq.text] == [_plain(text) for text in dk.text]:
        _say(said, dq, "dS", "")
    else:
        _say(said, dq, "dQ", " of dq")
        _say(said, dk, "dK", " of dk")
    if dq.masked and places.question.sparse:
        said.names[:] = ["sparse-inverted-lists"]
    return said


def _by_the_mask(part: "_Part") -> bool:
    """Whether dS is right, for all that P is not."""
    return not (part.gone.any() or part.wrongly.any()) and part.field(part.f - 1).zero


def _masked(c: Context) -> Array:
    """dY over the pairs of the mask, whatever the views are."""
    return np.where(of_view(c, Places(c.question).rights), _unmasked(c), 0.0)


def _unmasked(c: Context) -> Array:
    """dY of all pairs, whatever the views are."""
    with np.errstate(over="ignore"):
        P = np.exp(c.G * c.cap[0] - dead_to_inf(np, c.L)[..., None])
    return np.asarray(c.G * c.cap[1] * P * (c.dP - c.D[..., None]))


def _plain(text: str) -> str:
    """Without the values in it, which differ by rounding."""
    return text.partition(" (head 0, nearest")[0]


def _delta(change: Change) -> bool:
    return change.name.startswith("delta")


def _of_sums(name: str, where: Array) -> str:
    """Which query heads add to which head of a result; where (num_heads_q, num_heads_kv)."""
    group = where.shape[0] // where.shape[1]
    told = []
    for head in range(where.shape[1]):
        due = list(range(head * group, (head + 1) * group))
        told.append(
            f"head {head} of query heads {_listed(np.flatnonzero(where[:, head]))}, not {due}"
        )
    return f"{name}, {'; '.join(told)}"


def _listed(heads: Array) -> str:
    return str([int(head) for head in heads]) if len(heads) else "none"


def _say(said: Said, change: Change, step: str, of: str) -> None:
    if not change.text:
        said.right.append(f"dS{of}")
        return
    told = said.wrong if change.name else said.right if change.masked else said.unread
    told.extend(f"dS{of} {text}" for text in change.text)
    scale = said.term.values if said.term is not None else ()
    scale = scale if change.times is not None and len(scale) == len(change.times) else ()
    if change.times is not None and scale and np.allclose(change.times, scale, rtol=1e-2):
        said.names[:] = ["score-scale"]  # everywhere
    elif change.name:
        said.names.append(change.name)
    if (dY := change.dY) is None:
        return
    if step == "dS":
        said.steps["dY"] = lambda c: dY(changed(c, dY=STEPS["dY"](c)))
    else:
        said.steps[step] = lambda c: STEPS[step](changed(c, dY=dY(c)))


class _Part:
    """dS of ``slopes``, beside what it must be with what is known of P; all (num_heads_q, total_q,
    total_k). there: where it tells something. gone, wrongly: where it is 0 by mistake, or is not.
    seen: other pairs than those of P.
    """

    def __init__(
        self, said: Said, places: Places, slopes: Slopes, seen: Array | None = None
    ) -> None:
        self.places, self.slopes, self.noise = places, slopes, 3 * noise_of(places)
        self.seen = said.support.at(places) if seen is None else seen
        L = np.where(np.isfinite(slopes.L), slopes.L, np.inf)
        with np.errstate(over="ignore"):
            scores = said.scores(places, slopes.S, once=seen is not None)
            self.P = np.where(self.seen, np.exp(scores - L), 0.0)
        size = float(np.sqrt(np.mean(slopes.Z**2))) or 1.0
        self.there = (self.P > 1e-4) & (np.abs(slopes.Z) > CLEAR * size)
        due = np.where(self.there, self.P * slopes.Z, 1.0)
        self.f = np.where(self.there, slopes.dS / due, 1.0)
        self.gone = self.there & (np.abs(self.f) < 1e-3)
        self.wrongly = ~self.seen & (np.abs(slopes.dS) > TINY) & np.isfinite(L)
        self.known = self.there & ~self.gone

    def field(self, x: Array) -> Field:
        return Field(x, self.known, False, self.noise)

    def fits(self, due: Array) -> bool:
        """Whether that is dS."""
        size = np.where(self.known, self.P * np.abs(self.slopes.dP - self.slopes.D), 1.0)
        return self.field(np.where(self.known, self.slopes.dS - due, 0.0) / size).zero

    @property
    def pairs(self) -> tuple[Places, Array, Array]:
        """Which pairs dS has, beside those of P, as ``support_of`` takes it."""
        x = self.places
        known = np.where(x.right, self.there, ~self.seen & x.own)
        return x, (x.right & ~self.gone) | (self.wrongly & ~x.right), known


def _elsewhere(said: Said, second: Callable[[], Backward], name: str) -> _Part | None:
    """The same on other lengths; None where it is not known who sees whom there."""
    read = second()
    try:
        return _Part(said, read.weights.places, read.slopes[name])
    except ValueError:
        return None


def _change_of(part: _Part, second: Callable[[], _Part | None], rows: int) -> Change:
    """What is wrong with one of the two ways to dS; ``rows``: the axis that a row of its gradient
    is summed over."""
    if not np.isfinite(part.slopes.dS).all():
        return Change(["is not finite"])
    if not part.known.any():
        return Change(["is 0"] if part.there.any() else [])
    change = _form_of(part)
    known = change.whole or (change.text and change.dY is None)
    if known or not (part.gone.any() or part.wrongly.any()):
        return change
    other = second()
    if other is None:
        return Change([IN_ANOTHER_WAY])
    pairs = support_of(part.pairs, other.pairs)
    told = [one.text(len(part.f), VERBS.get(one.kind, "")) for one in pairs.parts]
    if any(one.kind == LESS for one in pairs.parts):
        lines = np.broadcast_to(part.gone.any(axis=rows, keepdims=True), part.gone.shape)
        whole = not part.known[lines].any()
        name = "rows-not-written" if whole else of_pairs(part.places, part.gone, part.there)
    else:
        name = BACKWARD_ONLY if told else ""
    dY = partial(_with_pairs, pairs, change.dY) if pairs.named else None
    return Change([*told, *change.text], name or change.name, dY, times=change.times)


def _with_pairs(pairs: Support, dY: Callable[[Context], Array] | None, c: Context) -> Array:
    """dY of these pairs alone."""
    places, found = Places(c.question), c.dY if dY is None else dY(c)
    seen, right = (of_view(c, x) for x in (pairs.at(places), places.rights))
    return np.where(seen, np.where(right, found, _unmasked(c)), 0.0)


def _form_of(part: _Part) -> Change:
    """What stands there in place of dS."""
    f, places, S = part.f, part.places, part.slopes.S
    if part.field(f - 1).zero:
        return Change()
    values = [
        np.median(x[there]) if there.any() else 1.0 for x, there in zip(f, part.known, strict=True)
    ]
    by = np.array(values)[:, None, None]
    if part.field((f - by) / np.where(np.abs(by) > 1e-3, by, 1.0)).zero:
        scale = of_scale(by.ravel(), places)
        name = "output-scale" if "softmax_scale is" in scale else "constant-factor"
        text = f"is multiplied by {by_head(by)}{scale}"
        return Change([text], name, lambda c: by[c.view.heads] * c.dY, times=by.ravel())
    if (found := _of_products(part)) is not None:
        return replace(found, whole=True)
    logs = part.field(np.log(np.where(f > 0, f, 1.0)))
    told = None
    if (f > 0)[logs.there].all():
        told = term_of(logs, places, S) or term_of(logs, places, S, table=True)
    if told is not None:
        text = f"is multiplied by {_power(told)}"
        return Change([text], "unknown", lambda c: np.exp(of_term(told, c)) * c.dY)
    coarse = Field(f - 1, logs.there, False, COARSE).zero
    return Change([] if coarse else [IN_ANOTHER_WAY])


def _power(term: Term) -> str:
    """exp of a term, in words."""
    if term.table:
        told = ", ".join(f"{np.exp(value):.4g}" for value in term.values)
        return f"a factor: {term.text} (head 0, nearest first: {told}, ...)"
    if term.text.endswith(" |j - i|"):
        return f"{by_head(np.exp(np.array(term.values)))}^|j - i|"
    return f"exp({term.text})"


def _of_products(part: _Part) -> Change | None:
    """A wrong D, or none; a derivative of a softcap that is not there; no factor P."""
    slopes, there = part.slopes, part.known
    dP, D, slope = slopes.dP, slopes.D, slopes.slope
    if part.fits(part.P * (dP - D)):
        if part.places.question.block_scale is not None:
            return Change(["lacks block_scale"], "sparse-gate-ignored", lambda c: c.dS)
        text = "lacks the derivative of the softcap"
        return Change([text], "softcap-slope-omitted", lambda c: c.dS)
    due = part.P * slope * (slopes.others - D)  # (num_heads_kv, num_heads_q, ...)
    heads = np.where(there, np.abs(due - slopes.dS), 0.0).sum(axis=(2, 3)).argmin(axis=0)
    if len(due) > 1 and part.fits(due[heads, np.arange(len(heads))]):
        text = f"takes dP of query head h with v of head {of_heads(heads)}"
        dP_of = of_other_heads("v", heads).dP
        return Change(
            [text],
            "gqa-head-map",
            lambda c: np.asarray(c.G * c.cap[1] * c.P * (dP_of(c) - c.D[..., None])),
        )
    for form, terms in TERMS.items():
        one, other = (slope * of(part.P, dP, D) for of in terms)
        size = np.where(there, part.P * np.abs(dP - D), 1.0)[there]
        both = np.stack([one[there], -other[there]], axis=1) / size[:, None]
        a, b = np.linalg.lstsq(both, slopes.dS[there] / size, rcond=None)[0]
        a, b = (float(np.rint(x)) if abs(x - np.rint(x)) < part.noise else float(x) for x in (a, b))
        if part.fits(a * one - b * other):
            return Change(*_of_terms(form, a, b), partial(_with_terms, terms, a, b))
    of_row = Field(dP - slopes.dS / np.where(there, part.P * slope, 1.0), there, True, part.noise)
    if of_row.zero and not np.ptp(D, axis=-1).any():
        return Change(["has another row term than D = dout . out"], "delta-of-another-out")
    return None


def _of_terms(form: str, a: float, b: float) -> tuple[list[str], str]:
    """What dS of these terms is called, and its class."""
    if "P o (" not in form:
        text = "lacks the factor P" if a == b == 1 and "P o" not in form else ""
        return [text or f"is {form}, a = {a:.3g}, b = {b:.3g}"], "softmax-backward-without-p"
    if a == 1 and b in (0, -1):
        text, name = "lacks the row term D: it is P dP", "delta-omitted"
        return ([text], name) if b == 0 else (["has D with the wrong sign"], "delta-of-another-out")
    name = "delta-of-another-out" if a == 1 else "constant-factor"
    return [f"is {form}, a = {a:.3g}, b = {b:.3g}"], name


def _with_terms(terms: tuple[Of, Of], a: float, b: float, c: Context) -> Array:
    """dY of these terms."""
    one, other = (np.asarray(of(c.P, c.dP, c.D[..., None])) for of in terms)
    return np.asarray((c.W > 0) * c.G * c.cap[1] * (a * one - b * other))
