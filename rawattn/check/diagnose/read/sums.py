"""What weights are divided by, lse, and which head of v they are of."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.attention import STEPS, TILES, Context, Step
from rawattn.check.diagnose.evidence.places import Places, Right, log_sum
from rawattn.check.diagnose.evidence.support import LESS
from rawattn.check.diagnose.read.maps import Map
from rawattn.check.diagnose.read.said import Said, biased, noise_of
from rawattn.check.diagnose.read.terms import by_head, number

Array = np.ndarray


def say_sums(said: Said, logs: Array, seen: Array, alive: Array, *, passed: bool) -> None:
    """What the weights are divided by, and lse; ``passed``: it must be the lse that was given."""
    read = said.weights
    places, noise = read.places, 3 * noise_of(read.places)
    S = said.scores(places, read.right.S)
    right = places.right & seen
    rows = right.any(axis=-1) & alive
    total = np.where(right, S - logs, 0.0).sum(axis=-1) / np.maximum(right.sum(axis=-1), 1)
    if not passed:
        S = _filled(said, S, logs + total[..., None], seen & (alive & rows)[..., None], noise)
    if _say_dropped(said, total - read.right.lse, rows, noise):
        return
    if passed and read.lse is not None:
        if np.abs((total - read.lse)[rows]).max(initial=0.0) > 8 * noise:
            names = [*said.names]
            _say_mass(said, total, read.lse, rows, noise)
            if "softmax" not in said.steps:
                said.names[:] = names  # it may be the lse that was read
            else:
                own = said.steps.pop("softmax")
                said.steps["bP"] = lambda c: own(c)[1]
    elif not passed:
        due = log_sum(np.where(seen, S, -np.inf))
        sinks = places.question.sinks
        with_sinks = (
            due if sinks is None else np.logaddexp(due, np.asarray(sinks, np.float64)[:, None])
        )
        if np.abs(total - with_sinks)[rows].max(initial=0.0) < noise:
            said.right.append("row sums")
        elif sinks is not None and np.abs(total - due)[rows].max() < noise:
            said.wrong.append("the sinks are not in the row sums")
            said.names.append("sinks-dropped")
        else:
            _say_mass(said, total, with_sinks, rows, noise)
        if read.lse is not None:
            _say_lse(said, read.lse[rows], total[rows], with_sinks[rows], 8 * noise)


def _filled(said: Said, S: Array, level: Array, seen: Array, noise: float) -> Array:
    """The scores with those of keys that are seen by mistake as they are; level: of which the
    weights are exp."""
    wrongly = seen & ~said.weights.places.right
    if np.abs(level - S)[wrongly].max(initial=0.0) < 8 * noise:
        return S
    filled, added = level[wrongly], (level - S)[wrongly]
    text = "weights of keys that must not be seen are not those of their scores"
    if min(np.ptp(filled), np.ptp(added)) < 8 * noise:
        said.names[:] = ["mask-fill"]
        text = f"masked scores are {filled.mean():.4g}, not -inf"
        if np.ptp(added) < np.ptp(filled):
            text = f"{added.mean():.4g} is added to masked scores, not -inf"
    said.wrong.append(text)
    return np.where(wrongly, level, S)


def _say_lse(said: Said, lse: Array, total: Array, due: Array, noise: float) -> None:
    """Whether lse is what the weights are divided by, or what is due."""
    if said.term is not None and said.term.kind == "place" and np.ptp(lse - total) < noise:
        by, term = float(np.mean(lse - total)), said.term  # a table is known up to a number
        said.term = replace(term, of=lambda places, S: term.of(places, S) + by)
        said.steps["cap"], total = biased(said.term), lse
    close = partial(np.allclose, lse, rtol=0, atol=noise)
    if close(total) or close(due):
        said.right.append("lse")
        if not close(total) and "softmax" in said.steps:
            own = said.steps["softmax"]
            said.steps["softmax"] = lambda c: (STEPS["softmax"](c)[0], own(c)[1])
    elif close(total / np.log(2)):
        said.wrong.append("lse is in base 2")
        said.names.append("lse-base-2")
    else:
        said.wrong.append("lse is not the logarithm of the row sums")


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


def _say_mass(said: Said, total: Array, due: Array, rows: Array, noise: float) -> None:
    """What is in the row sums beside the keys that are seen; of sums the logarithms (num_heads_q,
    total_q), as they are and as they must be."""
    places, mass, ratio = said.weights.places, np.exp(total) - np.exp(due), total - due
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
    for tile in (0, *TILES):
        of = f", of the query's own tile of {tile} and those before," if tile else ""
        yield "denominator", f"keys{of} that the mask hides", partial(_hidden, tile)


def _padding(tile: int, places: Places) -> Array:
    """(1, total_q): keys from a sequence's end to that of a tile; 0: of the longest sequence."""
    m = places.m[:, 0]
    return np.asarray(-m % tile if tile else max(places.question.lengths_k) - m)[None]


def _hidden(tile: int, places: Places) -> Array:
    """(num_heads_q, total_q): exp of the scores of keys that are hidden, summed up."""
    hidden = places.own & ~places.right
    if tile:
        hidden &= places.j < (places.p // tile + 1) * tile
    return np.asarray(np.exp(log_sum(np.where(hidden, Right(places).S, -np.inf))))


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
        values = Map("v", taken)
        said.wrong.append(values.text)
        said.names.append("gqa-head-map")
        said.steps["O"] = values.O
