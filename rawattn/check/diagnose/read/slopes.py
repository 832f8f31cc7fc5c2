"""What a backward pass has in place of dS, and which heads it adds up where.

Long by the forms that a wrong dS may have.
"""

from collections.abc import Callable
from functools import cache, partial

import numpy as np

from rawattn.check.diagnose.engine.attention import STEPS, Context, changed
from rawattn.check.diagnose.evidence.places import Places
from rawattn.check.diagnose.evidence.support import LESS, MORE, Support, support_of
from rawattn.check.diagnose.read.classes import BACKWARD_ONLY, of_pairs
from rawattn.check.diagnose.read.forms import Change, dropped, form_of
from rawattn.check.diagnose.read.part import Part
from rawattn.check.diagnose.read.probe import Backward
from rawattn.check.diagnose.read.said import (
    COARSE,
    Said,
    of_scale,
    of_term,
    of_view,
)
from rawattn.check.diagnose.read.terms import Field, Term, by_head, term_of
from rawattn.check.diagnose.read.weights import said_of
from rawattn.reference.dense import dead_to_inf

Array = np.ndarray
VERBS = {LESS: "misses pairs", MORE: "has pairs that must not be"}
IN_ANOTHER_WAY = "is wrong in another way"


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
        if said.see is not None and _by_the_mask(Part(said, places, slopes, places.rights)):
            changes[name] = Change(["sees whom it must"], "", _masked, masked=True)
            continue
        part = Part(said, places, slopes)
        rows = -1 if name == "dq" else -2
        same = changes.get("dq")  # which has the cotangents of all heads, and tells more
        if same is not None and same.whole and same.dY and part.fits(part.of(same.dY)):
            changes[name] = same
            continue
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


def _by_the_mask(part: "Part") -> bool:
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


def _elsewhere(said: Said, second: Callable[[], Backward], name: str) -> Part | None:
    """The same on other lengths; None where it is not known who sees whom there."""
    read = second()
    try:
        return Part(said, read.weights.places, read.slopes[name])
    except ValueError:
        return None


def _change_of(part: Part, second: Callable[[], Part | None], rows: int) -> Change:
    """What is wrong with one of the two ways to dS; ``rows``: the axis that a row of its gradient
    is summed over."""
    if not np.isfinite(part.slopes.dS).all():
        return Change(["is not finite"])
    if not part.known.any():
        return Change(["is 0"] if part.there.any() else [])
    change = _form_of(part, second)
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


def _form_of(part: Part, second: Callable[[], Part | None]) -> Change:
    """What stands there in place of dS."""
    f, places, S = part.f, part.places, part.slopes.S
    if part.field(f - 1).zero:
        return (dropped(part) if part.gone.any() else None) or Change()
    values = [
        np.median(x[there]) if there.any() else 1.0 for x, there in zip(f, part.known, strict=True)
    ]
    by = np.array(values)[:, None, None]
    if part.field((f - by) / np.where(np.abs(by) > 1e-3, by, 1.0)).zero:
        scale = of_scale(by.ravel(), places)
        name = "output-scale" if "softmax_scale is" in scale else "constant-factor"
        text = f"is multiplied by {by_head(by)}{scale}"
        return Change([text], name, lambda c: by[c.view.heads] * c.dY, times=by.ravel())
    if (found := form_of(part, second)) is not None:
        return found
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
