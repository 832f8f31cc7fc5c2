"""What was read of a pass, as tables beside what is due, in the order of its steps."""

from collections.abc import Iterator

import numpy as np

from rawattn.check.diagnose.evidence.tables import ROW, Table
from rawattn.check.diagnose.read.fields import rows_of
from rawattn.check.diagnose.read.probe import Backward, Weights

Array = np.ndarray
OFF = 8.0  # units of noise
SMALL = 1e-4  # of a row's largest weight: less tells nothing


def tables_of(read: Weights | Backward) -> Iterator[Table]:
    """Scores, weights and row sums of a forward pass; P and dS of a backward pass."""
    if isinstance(read, Backward):
        yield from _of_backward(read)
        return
    S, L, rights = read.right.S, read.right.lse[..., None], read.places.rights
    noise = OFF * read.noise
    P = Table("P", read.P, _weights(S, L, rights), "q", "j", noise, SMALL)
    if read.lse is None:
        yield P
        return
    with np.errstate(invalid="ignore", over="ignore"):
        free, sums = np.where(read.places.own, np.exp(S), np.nan), np.exp(read.lse)[..., None]
        due = _weights(S, 0 * L, rights)
        bare = Table("exp(S)", read.P * sums, due, "q", "j", noise, SMALL, free)
        summed = Table("the row sum of exp(S)", sums, np.exp(L), "q", ROW, noise)
    of_P, of_bare = (np.count_nonzero(one.off) for one in (P, bare))
    if of_P and summed.off.any():
        yield from (summed, P) if not of_bare else (bare, P) if of_bare < of_P else (P, summed)
    else:
        yield from (P, Table("lse", read.lse[..., None], L, "q", ROW, noise))


def _of_backward(read: Backward) -> Iterator[Table]:
    w, noise = read.weights, OFF * read.weights.noise
    rights, L = w.places.rights, w.right.lse[..., None]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        free = _weights(w.right.S, L, True)
        P = Table("P of dv", w.P, np.where(rights, free, 0.0), "q", "j", noise, SMALL, free)
        held = np.where(rights & (w.P > 0), w.right.S - np.log(w.P), np.nan)
        yield _by_rows("the lse that P of dv has", held, L, P)
        for name, of in read.slopes.items():
            free = _weights(of.S, of.L, True) * of.Z
            due = np.where(rights, free, 0.0)
            dS = Table(f"dS of {name}", of.dS, due, "q", "j", noise, free=free)
            weights = of.slope * _weights(of.S, of.L, rights)
            held = np.where(weights > SMALL, of.dP - of.dS / weights, np.nan)
            yield _by_rows(f"the D that dS of {name} has", held, of.D, dS)


def _by_rows(name: str, held: Array, due: Array, of: Table) -> Table:
    """What rows hold, where that is all that is wrong with the table ``of``: one number of every
    pair of a row, NaN of those that are not known."""
    known = np.isfinite(held)
    near = of.noise * float(np.abs(held[known]).max(initial=0.0))
    rows, right = (rows_of(np.where(known, x, np.nan), near) for x in (held, due))
    if rows is None or right is None or not known[of.off].all():
        return of
    held, due = (np.nan_to_num(x)[..., None] for x in (rows, right))
    return Table(name, held, due, of.side, ROW, of.noise)


def _weights(S: Array, L: Array, rights: Array | bool) -> Array:
    """P of scores and an lse, with the mask."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(np.nan_to_num(np.exp(np.where(rights, S, -np.inf) - L)))
