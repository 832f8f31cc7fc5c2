"""What weights are divided by, lse, and which head of v they are of."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rawattn.check.diagnose.catalogue import options
from rawattn.check.diagnose.engine.attention import STEPS, TILES, Context, Step
from rawattn.check.diagnose.evidence.places import Places, Right, log_sum
from rawattn.check.diagnose.evidence.support import LESS
from rawattn.check.diagnose.read.maps import of_heads, of_other_heads
from rawattn.check.diagnose.read.said import Said, biased, noise_of
from rawattn.check.diagnose.read.terms import Term, by_head, number

Array = np.ndarray


def say_passed(said: Said, logs: Array, seen: Array, alive: Array) -> None:
    """Whether weights are exp(score - lse), with the lse that was given."""
    read = said.weights
    if read.lse is None:
        return
    noise, rows, total = _totals(said, said.scores(read.places, read.right.S), logs, seen, alive)
    off, names = total - read.lse, [*said.names]
    if _say_dropped(said, off, rows, noise):
        return
    if np.abs(off[rows]).max(initial=0.0) > 8 * noise:
        _say_mass(said, np.exp(total) - np.exp(read.lse), off, rows, noise)
        if "softmax" not in said.steps:
            said.names[:] = names  # it may be the lse that was read
        else:
            own = said.steps.pop("softmax")
            said.steps["bP"] = lambda c: own(c)[1]


def _totals(
    said: Said, S: Array, logs: Array, seen: Array, alive: Array
) -> tuple[float, Array, Array]:
    """The noise of a row; (num_heads_q, total_q) rows that tell the logarithm of what their weights
    are divided by, and that."""
    right = said.weights.places.right & seen
    count = np.maximum(right.sum(axis=-1), 1)
    total = np.where(right, S - logs, 0.0).sum(axis=-1) / count
    return 3 * noise_of(said.weights.places), right.any(axis=-1) & alive, total


def say_sums(said: Said, logs: Array, seen: Array, alive: Array) -> None:
    """What the weights are divided by, and lse."""
    read = said.weights
    places, q = read.places, read.places.question
    S = said.scores(places, read.right.S)
    noise, rows, total = _totals(said, S, logs, seen, alive)
    wrongly = seen & ~places.right & alive[..., None] & rows[..., None]
    level = logs + total[..., None]  # of which weights are exp
    usual = np.abs(level - S)[wrongly].max(initial=0.0) < 8 * noise
    if not usual:
        filled, added = level[wrongly], (level - S)[wrongly]
        text = "weights of keys that must not be seen are not those of their scores"
        if min(np.ptp(filled), np.ptp(added)) < 8 * noise:
            said.names[:] = ["mask-fill"]
            adds = bool(np.ptp(added) < np.ptp(filled))
            number = float((added if adds else filled).mean())
            whole = abs(number - np.rint(number)) < noise
            number = float(np.rint(number) if whole else np.round(number, 4)) + 0.0
            text = f"masked scores are {number:.4g}, not -inf"
            text = f"{number:.4g} is added to masked scores, not -inf" if adds else text
            said.steps["S"] = partial(_filled, number, adds)
        said.wrong.insert(0, text)
        S = np.where(wrongly, level, S)
    due = log_sum(np.where(seen, S, -np.inf))
    if _say_dropped(said, total - read.right.lse, rows, noise):
        return
    sinks = None if q.sinks is None else np.asarray(q.sinks, dtype=np.float64)[:, None]
    with_sinks = due if sinks is None else np.logaddexp(due, sinks)
    off = np.abs(total - with_sinks)[rows].max(initial=0.0)
    if off < noise:
        said.right.append("row sums")
    elif sinks is not None and np.abs(total - due)[rows].max() < noise:
        said.wrong.append("the sinks are not in the row sums")
        said.names.append("sinks-dropped")
    elif sinks is not None and _say_sink(said, S, due, total, rows, noise):
        pass
    else:
        _say_mass(said, np.exp(total) - np.exp(with_sinks), total - with_sinks, rows, noise)
    if read.lse is None:
        return
    lse, wanted = read.lse[rows], total[rows]
    if said.term is not None and said.term.table and np.ptp(lse - wanted) < 8 * noise:
        said.term = _raised(said.term, float(np.mean(lse - wanted)))
        said.steps["cap"], wanted = biased(said.term), lse
    close = partial(np.allclose, lse, rtol=0, atol=8 * noise)
    if close(wanted):
        said.right.append("lse")
    elif close(with_sinks[rows]):
        said.right.append("lse")
        if "softmax" in said.steps:
            own = said.steps["softmax"]
            said.steps["softmax"] = lambda c: (STEPS["softmax"](c)[0], own(c)[1])
    elif close(due[rows]):
        said.wrong.append("the sinks are not in lse")
        said.names.append("sinks-dropped")
    else:
        top = np.where(places.right, S, -np.inf).max(axis=-1)
        _say_lse(said, lse, total[rows], top[rows], 8 * noise)


_BASE_2 = np.array([1 / np.log(2), 0.0, 0.0, 0.0])


def _say_lse(said: Said, lse: Array, total: Array, top: Array, allowed: float) -> None:
    """What lse is made of in place of the logarithm of the row sums, ``total``."""
    parts = {"the right lse": total, "row_max": top, "row_sum": np.exp(total - top), "": top**0}
    features = np.stack([*parts.values()], axis=1)
    by = np.linalg.lstsq(features, lse, rcond=1e-9)[0] if np.isfinite(lse).all() else 0 * top[:4]
    if not len(by) == 4 or np.abs(features @ by - lse).max(initial=0.0) > allowed:
        said.wrong.append("lse is not the logarithm of the row sums")
        return
    by = np.where(np.abs(by - np.rint(by)) < 1e-2, np.rint(by), by)
    base_2 = np.allclose(by, _BASE_2, atol=1e-2)
    by = _BASE_2 if base_2 else by
    no_max = np.allclose(by, [1, -1, 0, 0], atol=1e-2)
    told = (f"{number(x)} {name}".strip() for x, name in zip(by, parts, strict=True) if x)
    told = (text.removeprefix("1 ") for text in told)
    made = " + ".join(told).replace("+ -", "- ").replace("-1 ", "-") or "0"
    text = f"lse is {made}" + " (a logarithm is missing)" * (not by[0])
    said.wrong.append("lse is in base 2" if base_2 else text)
    said.names.append("lse-base-2" if base_2 else "lse-without-max" if no_max else "unknown")
    said.steps["L"] = partial(_L, by)


def _L(by: Array, c: Context) -> Array:
    L, top = c.softmax[0], c.S.max(axis=-1, initial=-np.inf)
    with np.errstate(invalid="ignore"):
        found = by[0] * L + by[1] * top + by[2] * np.exp(L - top) + by[3]
    return np.asarray(np.where(np.isneginf(L), L, found))


def _say_sink(said: Said, S: Array, due: Array, total: Array, rows: Array, noise: float) -> bool:
    """Whether the row sums have a function of the sink and of the row's maximum; due, total: their
    logarithms without sinks and as they are."""
    places = said.weights.places
    q, more = places.question, np.exp(total) - np.exp(due)
    sink = np.broadcast_to(np.asarray(q.sinks, dtype=np.float64)[:, None], due.shape)
    top = np.where(places.right, S, -np.inf).max(axis=-1)
    known, allowed = rows & (more > 0), 8 * noise * np.exp(total)
    if not known.any():
        return False
    text, logit = "", None
    for words, of in options.others(q.scale):
        if logit is None and (np.abs(more - np.exp(of(sink, top))) < allowed)[rows].all():
            text, logit = words, of
    wanted, allowed = np.log(np.where(known, more, 1.0)), allowed / np.where(known, more, 1.0)
    times = np.exp(wanted - sink)[known]
    features = np.stack([sink[known], top[known], np.ones(known.sum())], axis=1)
    if logit is not None:
        said.steps |= options.with_sink(partial(_of_row, logit))
    elif (values := _by_head(wanted, known, allowed)) is not None:
        near = np.abs(values[:, None] - sink[:, 0]).argmin(axis=1)
        text = f"exp({by_head(values)})"
        if np.abs(values - sink[near, 0]).max() < 8 * noise:
            text = f"exp(sink) of head {of_heads(near)}"
        said.steps |= options.with_sink(lambda c: values[c.view.heads, None])
    elif times.min() > 0.5 and (np.abs(times - np.rint(times)) < 0.02).all():
        text = f"exp(sink) {times.min():.0f} to {times.max():.0f} times, by the row"
    else:
        by, *_ = np.linalg.lstsq(features, wanted[known], rcond=1e-6)
        if (np.abs(features @ by - wanted[known]) > allowed[known]).any():
            return False
        text = f"exp({by[0]:.3g} sink {by[1]:+.3g} maximum {by[2]:+.3g})"
    said.wrong.append(f"the row sums have {text}, in place of exp(sink)")
    said.names.append("sinks-misplaced")
    return True


def _by_head(x: Array, known: Array, allowed: Array) -> Array | None:
    """Of each head what all its rows have."""
    if not known.any(axis=1).all():
        return None
    values = np.array([np.median(row[there]) for row, there in zip(x, known, strict=True)])
    return values if (np.abs(x - values[:, None]) <= allowed + 1e-9)[known].all() else None


def _of_row(logit: options.Logit, c: Context) -> Array:
    return np.asarray(logit(c.sink, c.S.max(axis=-1, initial=-np.inf)))


def _say_dropped(said: Said, off: Array, rows: Array, noise: float) -> bool:
    """Whether weights are missing by no rule, and the others are what they would be without that,
    times one number; off: of the logarithm of what weights are divided by, from the right one."""
    parts, places = said.support.parts, said.weights.places
    less = bool(parts) and all(part.kind == LESS and part.rule is None for part in parts)
    if places.question.sparse or not less or np.ptp(off[rows]) > 8 * noise:
        return False
    lost = said.support.inside(LESS)
    share = lost.sum() / (places.right * len(lost)).sum()
    if (lost[..., 1:] & lost[..., :-1]).sum() > (share + 0.3) * lost.sum():  # of rows, or tiles
        return False
    kept = number(float(np.exp(-off[rows].mean())))
    text = f"weights are dropped at random, and those that are kept are times {kept}"
    said.wrong.insert(0, text)
    said.names[:] = ["dropout"]
    return True


def _raised(term: Term, by: float) -> Term:
    """A table is known up to a number, which lse tells."""
    return replace(term, of=lambda places, S: term.of(places, S) + by)


def _say_mass(said: Said, mass: Array, ratio: Array, rows: Array, noise: float) -> None:
    """What is in the row sums beside the keys that are seen; mass (num_heads_q, total_q)."""
    places = said.weights.places
    if np.ptp(ratio[rows]) < 8 * noise:
        mean = float(np.exp(-ratio[rows].mean()))
        said.wrong.append(f"the weights of a row sum to {number(mean)}, not 1")
        return
    allowed = 8 * noise * np.maximum(np.abs(np.exp(said.weights.right.lse)), 1)
    found: list[tuple[float, str, str, Array, Callable[[Places], Array]]] = []
    for name, text, of in _others():
        unit = np.where(rows, of(places), 0.0) / allowed
        size = (unit**2).sum(axis=1)
        times = (mass / allowed * unit).sum(axis=1) / np.where(size > 0, size, 1.0)
        times = np.where(np.abs(times - np.rint(times)) < 0.02, np.rint(times), times)
        left = float(np.abs(mass / allowed - times[:, None] * unit)[rows].max())
        if left < 1 and size.any() and (name != "denominator" or not text or (times == 1).all()):
            found.append((left, name, text, times, of))
    if found:
        _, name, text, times, of = min(found, key=lambda one: one[0])
        if not text:
            text = f"{by_head(times)} more than the keys that are seen"
        elif not (times == 1).all():
            with np.errstate(divide="ignore"):
                name, text = "mask-fill", f"exp({by_head(np.log(np.abs(times)))}) for {text}"
        said.wrong.append(f"the row sums have {text}")
        said.names.append(name)
        said.steps["softmax"] = _with_mass(partial(_of_rows, times, of))
        return
    b = places.b[:, 0]
    here = [mass[:, b == n][rows[:, b == n]] for n in range(places.question.batch)]
    counts = np.array([np.rint(np.median(of)) if of.size else 0.0 for of in here])
    if counts.min() >= 0 and (np.abs(mass - counts[b]) < allowed)[rows].all():
        told = ", ".join(f"{count:g}" for count in counts)
        said.wrong.append(f"the row sums have {told} keys of score 0 more, by sequence")
        said.names.append("padded-keys")
        return
    said.wrong.append(
        f"the row sums are off, by factors of {by_head(np.exp(ratio[rows][:4]))}, ..."
    )
    said.names.append("denominator")


def _others() -> Iterator[tuple[str, str, Callable[[Places], Array]]]:
    """What may be in the row sums: a class, words, and how much it is if it is there once."""
    for tile in (0, *TILES):
        upto = f"the end of its last tile of {tile} keys" if tile else "the longest sequence"
        yield "padded-keys", f"every key of padding up to {upto}", partial(_padding, tile)
    yield "denominator", "", lambda places: np.ones((1, len(places.j)))
    yield "denominator", "1, relative to the row's maximum", _exp_of_maximum
    for tile in (0, *TILES):
        of = f", of the query's own tile of {tile} and those before," if tile else ""
        yield "denominator", f"keys{of} that the mask hides", partial(_hidden, tile)


def _padding(tile: int, places: Places) -> Array:
    """(1, total_q): keys from a sequence's end to that of a tile; 0: of the longest sequence."""
    m = places.m[:, 0]
    return np.asarray(-m % tile if tile else max(places.question.lengths_k) - m)[None]


def _exp_of_maximum(places: Places) -> Array:
    """(num_heads_q, total_q): exp of the largest score that is seen."""
    S = np.where(places.right, Right(places).S, -np.inf)
    return np.asarray(np.exp(S.max(axis=-1, initial=-np.inf)))


def _hidden(tile: int, places: Places) -> Array:
    """(num_heads_q, total_q): exp of the scores of keys that are hidden, summed up."""
    hidden = places.own & ~places.right
    if tile:
        hidden &= places.j < (places.p // tile + 1) * tile
    return np.asarray(np.exp(log_sum(np.where(hidden, Right(places).S, -np.inf))))


def _filled(number: float, adds: bool, c: Context) -> Array:
    """Scores of keys that are wrongly seen."""
    S, places = STEPS["S"](c), Places(c.question)
    own = places.rights[np.ix_(c.view.heads, c.view.rows, np.maximum(c.view.keys, 0))]
    wrong = (own == 0) & (c.W > 0)
    return np.asarray(np.where(wrong, (S if adds else 0.0) + number, S))


def _of_rows(times: Array, of: Callable[[Places], Array], c: Context) -> Array:
    whole = times[:, None] * of(Places(c.question))
    return np.asarray(whole[np.ix_(c.view.heads, c.view.rows)])


def _with_mass(mass: Callable[[Context], Any]) -> Step:
    def softmax(c: Context) -> tuple[Array, Array]:
        L, P = STEPS["softmax"](c)
        with np.errstate(divide="ignore"):
            total = np.logaddexp(L, np.log(np.maximum(mass(c), 0.0)))
        return total, P * np.exp(L - total)[..., None]

    return softmax


def say_values(said: Said) -> None:
    """Which head of v is weighted."""
    found = said.weights.value_head
    if found is None:
        return
    q = said.weights.places.question
    known = [row[np.isfinite(row)] for row in found]
    heads = np.array([np.median(row) if len(row) else np.nan for row in known])
    there = np.abs(found - heads[:, None]) < 0.1
    if np.isnan(heads).any() or not there[np.isfinite(found)].all():
        return
    taken = np.rint(heads).astype(int)
    there = (np.abs(taken - heads) < 0.1) & (taken >= 0) & (taken < q.num_heads_kv)
    if not np.array_equal(taken, np.arange(q.num_heads_q) // q.group) and there.all():
        values = of_other_heads("v", taken)
        said.wrong.append(values.text)
        said.names.append("gqa-head-map")
        said.steps |= values.steps
