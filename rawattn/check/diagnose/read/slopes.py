"""What a backward pass has in place of dS, and which heads it adds up where.

Long by the forms that a wrong dS may have.
"""

from collections.abc import Callable
from functools import cache, partial

import numpy as np

from rawattn.check.diagnose.engine.attention import STEPS, Context, changed
from rawattn.check.diagnose.evidence.places import Places
from rawattn.check.diagnose.evidence.rules import Shown, rule_of
from rawattn.check.diagnose.evidence.support import Support
from rawattn.check.diagnose.read.change import Change
from rawattn.check.diagnose.read.classes import BACKWARD_ONLY, of_pairs
from rawattn.check.diagnose.read.maps import of_heads
from rawattn.check.diagnose.read.probe import Backward, Slopes
from rawattn.check.diagnose.read.said import COARSE, TINY, Said, noise_of
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
            changes[name] = Change(["sees whom it must"], masked=True, instead=_masked)
            continue
        part = _Part(said, places, slopes)
        rows = -1 if name == "dq" else -2
        changes[name] = _change_of(part, partial(_elsewhere, said, second, name), rows)
    dq, dk = changes["dq"], changes["dk"]
    if _delta(dq) != _delta(dk) and dq.text and dk.text:  # dq has the cotangents of all heads
        dq = dk = Change(["has another row term than D of its row"], "delta-of-another-out", None)
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
    wrong = part.gone.any() or part.wrongly.any()
    return not wrong and part.field(part.f - 1, 3 * noise_of(part.places)).zero


def _masked(c: Context) -> Array:
    """dY over the pairs of the mask, whatever the views are."""
    right = Places(c.question).rights
    here = right[np.ix_(c.view.heads, c.view.rows, np.maximum(c.view.keys, 0))]
    with np.errstate(over="ignore"):
        P = np.exp(c.G * c.cap[0] - dead_to_inf(np, c.L)[..., None])
    return np.asarray(np.where(here, c.G * c.cap[1] * P * (c.dP - c.D[..., None]), 0.0))


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
    if change.factor is None:
        said.names += [change.name] if change.name else []
        return
    scale = said.term.values if said.term is not None and said.term.kind == "factor" else ()
    if change.times is not None and scale and np.allclose(change.times, scale, rtol=1e-2):
        said.names[:] = ["score-scale"]  # everywhere
    elif not change.masked:
        said.names.append(change.name or "unknown")
    if change.planted:
        if step == "dS":
            said.steps["dY"] = lambda c: change.dY(changed(c, dY=STEPS["dY"](c)))
        else:
            said.steps[step] = lambda c: STEPS[step](changed(c, dY=change.dY(c)))


class _Part:
    """dS of ``slopes``, beside what it must be with what is known of P; all (num_heads_q, total_q,
    total_k). there: where it tells something. gone, wrongly: where it is 0 by mistake, or is not.
    seen: other pairs than those of P.
    """

    def __init__(
        self, said: Said, places: Places, slopes: Slopes, seen: Array | None = None
    ) -> None:
        self.places, self.slopes = places, slopes
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

    def field(self, x: Array, noise: float) -> Field:
        return Field(x, self.there & ~self.gone, False, noise)


def _elsewhere(said: Said, second: Callable[[], Backward], name: str) -> _Part | None:
    """The same on other lengths; None where it is not known who sees whom there."""
    read = second()
    try:
        return _Part(said, read.weights.places, read.slopes[name])
    except ValueError:
        return None


def _change_of(part: _Part, second: Callable[[], _Part | None], rows: int) -> Change:
    """What is wrong with one of the two ways to dS."""
    places, slopes = part.places, part.slopes
    noise, change = 3 * noise_of(places), Change()
    if not np.isfinite(slopes.dS).all():
        return Change(["is not finite"], factor=None)
    if (part.gone == part.there).all():
        return Change(["is 0"], factor=None) if part.there.any() else change
    if part.gone.any() or part.wrongly.any():
        other = second()
        if other is None:
            return Change(["is wrong in another way"], factor=None)
        _say_pairs(change, part, other, rows)
    f = part.f
    if part.field(f - 1, noise).zero:
        return change
    known = part.there & ~part.gone
    values = np.array([np.median(f[h][known[h]]) if known[h].any() else 1.0 for h in range(len(f))])
    by = values[:, None, None]
    if part.field((f - by) / np.where(np.abs(by) > 1e-3, by, 1.0), noise).zero:
        scale = _of_scale(values, places)
        change.text.append(f"is multiplied by {by_head(values)}{scale}")
        change.name = change.name or ("output-scale" if scale else "constant-factor")
        change.factor, change.times = (lambda c: by[c.view.heads]), values
        return change
    delta = _of_delta(part, noise)
    if delta is not None:
        return delta
    logs = part.field(np.log(np.where(f > 0, f, 1.0)), noise)
    told = None
    if (f > 0)[logs.there].all():
        told = term_of(logs, places, slopes.S) or term_of(logs, places, slopes.S, table=True)
    if told is None and part.field(f - 1, COARSE).zero:
        return change
    if told is None:
        return Change(["is wrong in another way"], factor=None)
    change.text.append(f"is multiplied by {_power(told)}")
    change.factor = _planted(told)
    change.name = "unknown"
    return change


def _power(term: Term) -> str:
    """exp of a term, in words."""
    if term.kind == "place":
        told = ", ".join(f"{np.exp(value):.4g}" for value in term.values)
        return f"a factor: {term.text} (head 0, nearest first: {told}, ...)"
    if term.text.endswith(" |j - i|"):
        return f"{by_head(np.exp(np.array(term.values)))}^|j - i|"
    return f"exp({term.text})"


def _planted(term: Term) -> Callable[[Context], Array]:
    def factor(c: Context) -> Array:
        places = Places(c.question)
        whole = term.of(places, np.zeros((c.question.num_heads_q, *places.j.shape)))
        return np.asarray(
            np.exp(whole[np.ix_(c.view.heads, c.view.rows, np.maximum(c.view.keys, 0))])
        )

    return factor


def _of_scale(values: Array, places: Places) -> str:
    s = places.question.scale
    known = {"softmax_scale is missing": 1 / s, "softmax_scale is there twice": s}
    close = (
        name for name, x in known.items() if np.allclose(values, x, rtol=5e-3) and abs(x - 1) > 1e-2
    )
    text = next(close, "")
    return f" ({text})" if text else ""


def _of_delta(part: _Part, noise: float) -> Change | None:
    """A wrong D, or none; a derivative of a softcap that is not there; no factor P."""
    slopes, there = part.slopes, part.there & ~part.gone
    dP, D, slope = slopes.dP, slopes.D, slopes.slope

    def fits(due: Array) -> bool:
        off = np.where(there, slopes.dS - due, 0.0) / np.where(there, part.P * np.abs(dP - D), 1.0)
        return Field(off, there, False, noise).zero

    if fits(part.P * (dP - D)):
        gates = part.places.question.block_scale is not None
        what, name = (
            ("block_scale", "sparse-gate-ignored")
            if gates
            else ("the derivative of the softcap", "softcap-slope-omitted")
        )
        return Change([f"lacks {what}"], name, instead=lambda c: np.asarray(c.dS))
    if (heads := _of_values(part, fits)) is not None:
        text = f"takes dP of query head h with v of head {of_heads(heads)}"
        return Change([text], "gqa-head-map", instead=partial(_with_values, heads))
    for form, terms in TERMS.items():
        one, other = (slope * of(part.P, dP, D) for of in terms)
        size = np.where(there, part.P * np.abs(dP - D), 1.0)[there]
        both = np.stack([one[there], -other[there]], axis=1) / size[:, None]
        a, b = np.linalg.lstsq(both, slopes.dS[there] / size, rcond=None)[0]
        a, b = (float(np.rint(x)) if abs(x - np.rint(x)) < noise else float(x) for x in (a, b))
        if fits(a * one - b * other):
            return Change(*_of_terms(form, a, b), instead=partial(_with_terms, terms, a, b))
    of_row = Field(dP - slopes.dS / np.where(there, part.P * slope, 1.0), there, True, noise)
    if of_row.zero and not np.ptp(D, axis=-1).any():
        return Change(["has another row term than D = dout . out"], "delta-of-another-out", None)
    return None


def _of_values(part: _Part, fits: Callable[[Array], bool]) -> Array | None:
    """Other heads of v, by the query head, that dP is of."""
    slopes, q = part.slopes, part.places.question
    if q.num_heads_kv == 1:
        return None
    due = part.P * slopes.slope * (slopes.others - slopes.D)  # (num_heads_kv, num_heads_q, ...)
    off = np.where(part.there & ~part.gone, np.abs(due - slopes.dS), 0.0).sum(axis=(2, 3))
    heads = off.argmin(axis=0)
    taken = np.take_along_axis(due, heads[None, :, None, None], axis=0)[0]
    return np.asarray(heads) if fits(taken) else None


def _with_values(heads: Array, c: Context) -> Array:
    v = np.asarray(c.question.v)[c.view.keys][:, heads[c.view.heads]].astype(np.float64)
    dP = np.einsum("hnd,mhd->hnm", c.dO, v)
    return np.asarray(c.G * c.cap[1] * c.P * (dP - c.D[..., None]))


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


def _say_pairs(change: Change, part: _Part, other: _Part, rows: int) -> None:
    """Pairs of which dS is 0 by mistake, or is not; ``rows``: the axis that a row of the gradient
    is summed over."""
    for kind, verb in (("gone", "misses pairs"), ("wrongly", "has pairs that must not be")):
        here, there = (getattr(of, kind) for of in (part, other))
        told: dict[str, list[int]] = {}
        for head in np.flatnonzero(here.any(axis=(1, 2)) | there.any(axis=(1, 2))):
            shown = []
            for of, inside in ((part, here), (other, there)):
                domain = of.there if kind == "gone" else ~of.seen & of.places.own
                shown.append(Shown(of.places, domain[head], inside[head] & domain[head]))
            rule = rule_of(*shown)
            (change.less if kind == "gone" else change.more).append((int(head), rule))
            told.setdefault("by no plain rule" if rule is None else str(rule), []).append(int(head))
        for text, heads in told.items():
            who = "" if len(heads) == len(here) else f" (head {', '.join(map(str, heads))})"
            change.text.append(f"{verb}{who}: {text}")
        if kind == "gone" and told:
            whole = not (part.there & ~here)[
                np.broadcast_to(here.any(axis=rows, keepdims=True), here.shape)
            ].any()
            change.name = "rows-not-written" if whole else of_pairs(part.places, here, part.there)
        elif told:
            change.name = BACKWARD_ONLY
