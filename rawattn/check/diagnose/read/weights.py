"""What the weights of a pass are in place of the right ones: who sees whom, and which scores."""

from collections.abc import Callable
from functools import cache

import numpy as np

from rawattn.check.diagnose.evidence.places import Places, log_sum
from rawattn.check.diagnose.evidence.rules import Rule, Shown, rule_of
from rawattn.check.diagnose.evidence.sight import mask_rule
from rawattn.check.diagnose.evidence.support import OTHER, Support, support_of
from rawattn.check.diagnose.read.classes import class_of
from rawattn.check.diagnose.read.contexts import context_of
from rawattn.check.diagnose.read.fields import Field
from rawattn.check.diagnose.read.maps import heads_of, rows_of
from rawattn.check.diagnose.read.probe import Weights
from rawattn.check.diagnose.read.said import COARSE, Said, least_of, logs_of, noise_of, seen_of
from rawattn.check.diagnose.read.sums import say_passed, say_sums, say_values
from rawattn.check.diagnose.read.terms import Function, Term, adding, loosely, term_of

Array = np.ndarray


def said_of(read: Weights, again: Callable[[], Weights]) -> Said:
    """``again``: the same on other lengths, where rules are checked."""
    places, noise, S = read.places, noise_of(read.places), read.right.S
    seen, alive = seen_of(read)
    second = cache(again)
    said = Said(read, Support(places, places.right[None] & seen, ()))
    if not alive.all():
        _say_dead(said, alive, second)
    alive = alive & _telling(read)
    logs = logs_of(read, seen)
    x = Field(logs - S, seen & places.right & alive[..., None], True, noise)
    _say_scores(said, x, _counted(read, x, second) if read.passed or not x.zero else None, second)
    values = "O" in said.steps  # other rows of v: who sees whom does not tell
    if not values:
        seen = seen | _too_small(said, read, seen)
        if (seen != places.right)[alive].any():
            there = second()
            seen_there, alive_there = seen_of(there)
            alive_there = alive_there & _telling(there)
            seen_there = seen_there | _too_small(said, there, seen_there)
            there_read = there.places, seen_there, alive_there[..., None]
            said.support = support_of((places, seen, alive[..., None]), there_read)
        if said.unread and not said.support.named:
            said.unread[:] = ["the weights are not those of these queries and keys, if of any"]
        else:
            _say_support(said, alive)
    if not said.unread and not said.loose and not values:
        say_passed(said) if read.passed else say_sums(said, second)
    say_values(said)
    return said


def _say_scores(said: Said, x: Field, counted: Term | None, second: Callable[[], Weights]) -> None:
    """What ``x``, log-weights less the right scores, tells of the scores."""
    read = said.weights
    c, passed = context_of(read.places, read.right.S), read.passed
    if x.zero and counted is None:
        said.right.append("scores and softmax_scale")
    elif not x.zero and (term := term_of(x, c)) is not None:
        said.term = term
    elif counted is not None:
        said.term = counted
    elif not passed and (term := heads_of(x, c) or rows_of(x, c, read)) is not None:
        said.term = term
    elif (term := term_of(x, c, table=True)) is not None:
        said.term = term
    elif x.left(np.zeros_like(c.S)) * x.noise < COARSE:
        said.right.append("scores and softmax_scale, roughly")
    elif not passed and (loose := _loosely(read, x))[0]:
        said.loose = True
        said.say(*loose)
    else:
        said.unread.append("the weights of keys that are rightly seen are wrong in another way")
    if said.term is not None:
        said.say_term(said.term)


def _telling(read: Weights) -> Array | bool:
    """Rows that tell anything: with an lse of no keys a backward pass has no weights."""
    return np.isfinite(read.lse) if read.passed and read.lse is not None else True


def _too_small(said: Said, read: Weights, seen: Array) -> Array:
    """Pairs that must be seen, and whose weight with the scores as they are is too small to be."""
    S = said.scores(read.places, read.right.S)
    total = log_sum(np.where(read.places.right, S, -np.inf))
    small = S - np.where(np.isfinite(total), total, 0.0)[..., None]
    return np.asarray(read.places.right & ~seen & (small < np.log(least_of(read)) + 1))


def _say_dead(said: Said, alive: Array, second: Callable[[], Weights]) -> None:
    """Rows that are NaN, by a rule of one head."""
    head = int(np.argmin(alive.all(axis=1)))
    shown = []
    for read in (said.weights, second()):
        whole = np.ones(read.places.j.shape, dtype=bool)
        shown.append(Shown(read.places, whole, whole & ~seen_of(read)[1][head][:, None]))
    rule = rule_of(*shown)
    count = int((~alive).sum())
    text = f"{count} of {alive.size} rows are NaN"
    said.wrong.append(text if rule is None else f"{text}: {rule}")


def _say_support(said: Said, alive: Array) -> None:
    places, rules = said.support.places, said.support
    if rules.right:
        said.right.append("who sees whom")
        return
    q, heads = places.question, places.question.num_heads_q
    due = "the keys of its blocks" if q.sparse else mask_rule(q) or "every key"
    if rules.of_rows:
        told = "; ".join(part.text(heads).partition(": ")[2] for part in rules.parts)
        what = "add nothing to dv" if said.weights.passed else "see no key, or are not written"
        said.wrong.append(f"rows {what}: {told}")
    elif rules.whole is not None:
        said.wrong.append(f"a query sees the keys of {rules.whole} (it must see {due})")
    else:
        must = f" (it must see {due})"
        said.wrong += [part.text(heads) + must * (part.kind != OTHER) for part in rules.parts]
    rows = np.broadcast_to(alive, rules.seen.shape[:2])
    said.names.append(class_of(rules, rows, backward=said.weights.passed))


def _counted(read: Weights, x: Field, second: Callable[[], Weights]) -> Term | None:
    """How often, and which, where keys count more than once."""
    for relative in (False, True):
        found, known = _times(read, relative)
        if not (values := _whole(found, known, x.noise)).size:
            continue
        shown = [(read.places, found, known), (second().places, *_times(second(), relative))]
        rule = rule_of(*(Shown(of, k[0], k[0] & (n[0] > 1.5)) for of, n, k in shown))
        if rule is None:
            continue
        if len(values[values > 1]) == 1:
            return _counting(int(values[-1]), rule, read.places)
        for name in read.places.features:
            if all(_as_often(of, n, k, name) for of, n, k in shown):
                return _counting(name, Rule(()), read.places)
    return None


def _whole(found: Array, known: Array, noise: float) -> Array:
    """How often keys count, where these are whole numbers, and some count more than once."""
    values = np.unique(np.round(found[known]))
    exact = np.abs(found - np.round(found))[known] < 8 * noise * np.maximum(found[known], 1)
    return values if exact.size and exact.all() and 1 < values[-1] <= 16 else values[:0]


def _by_no_rule(read: Weights, noise: float) -> tuple[str, str]:
    """The same of keys that no rule tells, in words, and a class."""
    for relative in (False, True):
        if (values := _whole(*_times(read, relative), noise)).size:
            name = "sparse-duplicate-twice" if read.places.question.sparse else "wrong-keys"
            return f"keys count up to {values[-1]:.0f} times, by no plain rule", name
    return "", ""


def _loosely(read: Weights, x: Field) -> tuple[str, str]:
    often = _by_no_rule(read, x.noise)
    return often if often[0] else loosely(x, read.places, read.right.S)


def _counting(often: int | str, rule: Rule, places: Places) -> Term:
    """Keys that count ``often``, which may be a feature, where ``rule`` says: to weights the
    logarithm is added."""

    def of(places: Places) -> Array:
        heads = range(places.question.num_heads_q if places.question.sparse else 1)
        found = np.ones((len(heads), *places.j.shape))
        for head in heads:
            here = places.of(head)
            count = here.feature(often) if isinstance(often, str) else often
            found[head] = np.where(rule.holds(here), np.maximum(count, 1), 1)
        return np.log(found)

    # of a tile: by places, not by distances or remainders
    other = any(f in ("j - i", "j - p") or "%" in f for f, *_ in rule.spans)
    name = "wrong-keys" if other or not rule.spans else "tile-counted-twice"
    name = "sparse-duplicate-twice" if places.question.sparse else name
    text = f"keys count {often} times: {rule}"
    text = f"keys count more than once: {often}" if isinstance(often, str) else text
    return adding(Function("", of, ()), text, name)


def _as_often(places: Places, found: Array, known: Array, name: str) -> bool:
    """Whether a feature says how often keys count."""
    due = np.maximum(np.broadcast_to(places.feature(name), known.shape[1:]), 1)
    return bool((np.round(found) == due)[known].all())


def _times(read: Weights, relative: bool) -> tuple[Array, Array]:
    """How often each key counts (num_heads_q, total_q, total_k) by lse, or relative to those of its
    row that count least; and of which that is known."""
    seen, alive = seen_of(read)
    common = seen & read.right.seen & alive[..., None]
    logs = logs_of(read, common) - read.right.S
    least = np.where(common, logs, np.inf).min(axis=-1)
    if not relative:
        least = np.full_like(least, np.nan) if read.lse is None else -read.lse
    known = common & np.isfinite(least)[..., None]
    with np.errstate(over="ignore"):
        found = np.where(known, np.exp(logs - np.where(known, least[..., None], 0.0)), 0.0)
    return found, known & ((found.max(axis=-1, keepdims=True) > 1.5) | (not relative))
