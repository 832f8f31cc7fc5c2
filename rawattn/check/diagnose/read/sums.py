"""What weights are divided by, lse, and which head of v they are of."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.attention import STEPS, Context, Step
from rawattn.check.diagnose.evidence.places import Places, log_sum
from rawattn.check.diagnose.evidence.support import LESS
from rawattn.check.diagnose.read.maps import of_heads
from rawattn.check.diagnose.read.said import Said, biased, noise_of
from rawattn.check.diagnose.read.terms import Term, by_head, number

Array = np.ndarray
TILES = (8, 16, 32, 64, 128)


def say_passed(said: Said, logs: Array, seen: Array, alive: Array) -> None:
    """Whether weights are exp(score - lse), with the lse that was given."""
    read = said.weights
    if read.lse is None:
        return
    noise, rows, total = _totals(said, said.scores(read.places, read.right.S), logs, seen, alive)
    off = total - read.lse
    if _say_dropped(said, off, rows, noise):
        return
    if np.abs(off[rows]).max(initial=0.0) > 8 * noise:
        _say_mass(said, np.exp(total) - np.exp(read.lse), off, rows, noise)
        if "softmax" in said.steps:
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
        spread = np.ptp(level[wrongly])
        said.wrong.append(
            f"masked scores are {level[wrongly].mean():.4g}, not -inf"
            if spread < 8 * noise
            else "weights of keys that must not be seen are not those of their scores"
        )
        S = np.where(wrongly, level, S)
        said.names[:] = ["mask-fill"] if spread < 8 * noise else said.names
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
    else:
        _say_mass(said, np.exp(total) - np.exp(with_sinks), total - with_sinks, rows, noise)
    if read.lse is None:
        return
    lse, wanted = read.lse[rows], total[rows]
    if said.term is not None and said.term.kind == "place" and np.ptp(lse - wanted) < 8 * noise:
        said.term = _raised(said.term, float(np.mean(lse - wanted)))
        said.steps["cap"], wanted = biased(said.term), lse
    close = partial(np.allclose, lse, rtol=0, atol=8 * noise)
    if close(wanted) or close(with_sinks[rows]):
        said.right.append("lse")
    elif close(wanted / np.log(2)):
        said.wrong.append("lse is in base 2")
        said.names.append("lse-base-2")
    else:
        said.wrong.append("lse is not the logarithm of the row sums")


def _say_dropped(said: Said, off: Array, rows: Array, noise: float) -> bool:
    """Whether weights are missing by no rule, and the others are what they would be without that,
    times one number; off: of the logarithm of what weights are divided by, from the right one."""
    parts, sparse = said.support.parts, said.weights.places.question.sparse
    at_random = bool(parts) and all(part.kind == LESS and part.rule is None for part in parts)
    at_random = at_random and not said.support.of_rows
    if sparse or not at_random or np.ptp(off[rows]) > 8 * noise:
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
    for tile in (0, *TILES):
        if (np.abs(mass - _padding(tile, places)) < allowed)[rows].all():
            upto = f"the end of its last tile of {tile} keys" if tile else "the longest sequence"
            said.wrong.append(f"the row sums have exp(0) for every key of padding up to {upto}")
            said.names.append("padded-keys")
            said.steps["softmax"] = _with_mass(partial(_of_rows, tile))
            return
    spread = mass[rows]
    if np.ptp(spread) < 8 * float(allowed[rows].min()):
        value = float(np.median(spread))
        said.wrong.append(f"the row sums have {value:.3g} more than the keys that are seen")
        said.names.append("denominator")
        said.steps["softmax"] = _with_mass(lambda c: value)
        return
    said.wrong.append(
        f"the row sums are off, by factors of {by_head(np.exp(ratio[rows][:4]))}, ..."
    )


def _padding(tile: int, places: Places) -> Array:
    """(total_q,): keys from a sequence's end to that of a tile; 0: of the longest sequence."""
    m = places.m[:, 0]
    return np.asarray(-m % tile if tile else max(places.question.lengths_k) - m)


def _of_rows(tile: int, c: Context) -> Array:
    return np.asarray(_padding(tile, Places(c.question))[c.view.rows])


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
    own = np.arange(q.num_heads_q) // q.group
    known = [row[np.isfinite(row)] for row in found]
    heads = np.array([np.median(row) if len(row) else np.nan for row in known])
    there = np.abs(found - heads[:, None]) < 0.1
    if np.isnan(heads).any() or not there[np.isfinite(found)].all():
        return
    taken = np.rint(heads).astype(int)
    there = (np.abs(taken - heads) < 0.1) & (taken >= 0) & (taken < q.num_heads_kv)
    if not np.array_equal(taken, own) and there.all():
        said.wrong.append(f"query head h takes the values of head {of_heads(taken)}")
        said.names.append("gqa-head-map")

        def O(c: Context) -> Array:  # noqa: E743
            v = c.question.v[c.view.keys][:, taken[c.view.heads]].astype(np.float64)
            return np.asarray(c.P @ v.swapaxes(0, 1))

        said.steps["O"] = O
