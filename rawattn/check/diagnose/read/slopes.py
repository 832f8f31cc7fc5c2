"""What a backward pass has in place of dS."""

from collections.abc import Callable
from functools import cache, partial
from itertools import islice

import numpy as np

from rawattn.check.diagnose.engine.attention import STEPS, Context, changed
from rawattn.check.diagnose.evidence.places import Array, places_of
from rawattn.check.diagnose.evidence.support import LESS, MORE, Support, support_of
from rawattn.check.diagnose.read.fields import Field, at, by_head, of_distance, of_view
from rawattn.check.diagnose.read.forms import Change, Part, by_own_sums, form_of
from rawattn.check.diagnose.read.probe import Backward
from rawattn.check.diagnose.read.said import COARSE, Said, of_lists, of_scale
from rawattn.check.diagnose.read.weights import BACKWARD_ONLY, of_pairs, repeated, said_of
from rawattn.reference.dense import dead_to_inf

Second = Callable[[], Backward]
TRIED = 3  # listed bugs of P that look alike
IN_ANOTHER_WAY = "is wrong in another way"


def said_of_backward(read: Backward, second: Second, support: Support | None = None) -> Said:
    """Like ``said_of``, of P as dv has it, and of dS as dq and dk have it."""
    listed = islice(of_lists(read.weights, lambda: second().weights), TRIED)
    if every := [_with_slopes(said, read, second) for said in listed]:
        return next((said for said in every if "dS" in said.right), every[0])
    return _with_slopes(said_of(read.weights, lambda: second().weights, support), read, second)


def _with_slopes(said: Said, read: Backward, second: Second) -> Said:
    """What is said of P, and what is wrong with dS beside it."""
    said.right[:] = [f"P of dv ({', '.join(said.right)})"] if said.right else []
    if said.unread:
        return said  # what dS should be is not known
    dq = _change(said, read, second, "dq", None)
    dk = _change(said, read, second, "dk", dq)
    if dq.text == dk.text:
        _say(said, dq, "dS", "")
    else:
        _say(said, dq, "dQ", " of dq")
        _say(said, dk, "dK", " of dk")
    twice = said.names == ["sparse-duplicate-twice"]
    if dq.masked and read.weights.places.question.sparse and (twice or said.see is not None):
        said.names[:] = ["sparse-inverted-lists"]
    return said


def _change(said: Said, read: Backward, second: Second, name: str, same: Change | None) -> Change:
    """What is wrong with dS of a gradient; ``same``: with that of dq, which tells of all heads."""
    of_P = said.see or said.term or said.listed or "bP" in said.steps
    right = Part(None, read, name) if of_P else None  # which dS may have, for all that P has not
    if right and right.field(right.f - 1).zero and not (right.gone.any() or right.wrongly.any()):
        return Change(["is that of the right weights"], "", _masked, masked=True)
    part, other = Part(said, read, name), cache(lambda: Part(said, second(), name))
    if said.wrong and part.fits(part.of(by_own_sums)):
        if not part.fits(part.of(lambda c: np.asarray(c.dY))):
            return Change(["has D as the sum of P dP of its weights"], "", by_own_sums, masked=True)
    if same is not None and same.whole and same.dY and part.fits(part.of(same.dY)):
        return same
    if not np.isfinite(part.slopes.dS).all():
        return Change(["is not finite"])
    if not part.known.any():
        return Change(["meets no row that it must"] if part.there.any() else [])
    change = _form_of(part, other)
    known = change.whole or (change.text and change.dY is None)
    if known or not (part.gone.any() or part.wrongly.any()):
        return change
    try:
        pairs = support_of(part.pairs, other().pairs)
    except (NotImplementedError, ValueError):  # it is not known who sees whom there
        return Change([IN_ANOTHER_WAY])
    verbs = {LESS: "misses pairs", MORE: "has pairs that must not be"}
    told = [one.text(len(part.f), verbs[one.kind]) for one in pairs.parts]
    if any(one.kind == LESS for one in pairs.parts):
        row = -1 if part.name == "dq" else -2  # of the gradient: the axis that it is summed over
        lines = np.broadcast_to(part.gone.any(axis=row, keepdims=True), part.gone.shape)
        whole = not part.known[lines].any()
        kind = "rows-not-written" if whole else of_pairs(part.places, part.gone, part.there)
    else:
        kind = BACKWARD_ONLY if told else ""
    dY = partial(_with_pairs, pairs, change.dY) if pairs.named else None
    return Change([*told, *change.text], kind or change.name, dY, times=change.times)


def _masked(c: Context) -> Array:
    """dY over the pairs of the mask with the right scores, whatever the views are."""
    right = _unmasked(changed(c, cap=STEPS["cap"](c)))
    return np.where(of_view(c, places_of(c.question).rights), right, 0.0)


def _unmasked(c: Context) -> Array:
    """dY of all pairs, whatever the views are."""
    with np.errstate(over="ignore"):
        P = np.exp(c.G * c.cap[0] - dead_to_inf(np, c.L)[..., None])
    return np.asarray(c.G * c.cap[1] * P * (c.dP - c.D[..., None]))


def _say(said: Said, change: Change, step: str, of: str) -> None:
    if not change.text:
        said.right.append(f"dS{of}")
        return
    told = said.wrong if change.name else said.right if change.masked else said.unread
    told.extend(f"dS{of} {text}" for text in change.text)
    scale, by = () if said.term is None else said.term.values, change.times
    if by is not None and len(by) == len(scale) and np.allclose(by, scale, rtol=1e-2):
        said.names[:] = ["score-scale"]  # everywhere
    elif change.name:
        said.names.append(change.name)
    dY = change.dY
    if dY is not None and step == "dS":
        said.steps["dY"] = lambda c: dY(changed(c, dY=STEPS["dY"](c)))
    elif dY is not None:
        said.steps[step] = lambda c: STEPS[step](changed(c, dY=dY(c)))


def _with_pairs(pairs: Support, dY: Callable[[Context], Array] | None, c: Context) -> Array:
    """dY of these pairs alone."""
    places, found = places_of(c.question), c.dY if dY is None else dY(c)
    seen, right = (of_view(c, x) for x in (pairs.at(places), places.rights))
    return np.where(seen, np.where(right, found, _unmasked(c)), 0.0)


def _form_of(part: Part, second: Callable[[], Part]) -> Change:
    """What stands there in place of dS."""
    f, places = part.f, part.places
    if part.field(f - 1).zero:
        return Change([])
    heads = zip(f, part.known, strict=True)
    by = np.array([np.median(x[y]) if y.any() else 1.0 for x, y in heads])[:, None, None]
    if part.field((f - by) / np.where(np.abs(by) > 1e-3, by, 1.0)).zero:
        scale = of_scale(by.ravel(), places)
        name = "output-scale" if "softmax_scale is" in scale else "constant-factor"
        text = f"is multiplied by {by_head(by)}{scale}"
        return Change([text], name, lambda c: by[c.view.heads] * c.dY, times=by.ravel())
    if (found := form_of(part, second)) is not None:
        return found
    often, most = np.rint(f), int(np.rint(f[part.known]).max())
    if most > 1 and part.field((f - often) / np.maximum(often, 1)).zero:
        other = second()
        rule = repeated((places, f, part.known), (other.places, other.f, other.known))
        if rule is not None:
            text = f"counts pairs {most} times: {rule}"
            times = partial(at, of=lambda x: np.where(rule.holds(x), most, 1)[None])
            return Change([text], "tile-counted-twice", lambda c: times(c) * c.dY)
    logs = part.field(np.log(np.where(f > 0, f, 1.0)))
    told, of = of_distance(logs, places)
    if (f > 0)[logs.there].all() and logs.fits(of(places)):
        text = f"is multiplied by exp of {told}"
        return Change([text], "unknown", lambda c: np.exp(at(c, of)) * c.dY)
    return Change([] if Field(f - 1, logs.there, False, COARSE).zero else [IN_ANOTHER_WAY])
