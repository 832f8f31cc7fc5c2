"""dS of one of the two gradients as it was read, beside what it must be."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.attention import Context
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.engine.steps import changed
from rawattn.check.diagnose.evidence.places import Array, Places, Right, places_of
from rawattn.check.diagnose.read.contexts import backward_of
from rawattn.check.diagnose.read.fields import Field
from rawattn.check.diagnose.read.probe import TINY, Backward
from rawattn.check.diagnose.read.said import Said, listed_scores
from rawattn.reference.dense import dead_to_inf

CLEAR = 0.2  # of the typical dP - D, at least, where dS tells anything


class Part:
    """dS as the gradient ``name`` has it, beside what it must be with what is ``said`` of P, or the
    right one; all (num_heads_q, total_q, total_k). there: where it tells something. gone, wrongly:
    where it is 0 by mistake, or is not."""

    def __init__(self, said: Said | None, read: Backward, name: str) -> None:
        self.places, self.noise = read.weights.places, 3 * read.weights.noise
        self.slopes, places = read.slopes[name], self.places
        self.seen = places.rights if said is None else said.support.at(places)
        self.said, self.name = said, name
        if said is not None and said.listed is not None:
            slope = listed_scores(said.listed, places, self.slopes.S)[1]
            self.slopes = replace(self.slopes, slope=slope)
        slopes = self.slopes
        L = np.where(np.isfinite(slopes.L), slopes.L, np.inf)
        of_rows = said is not None and "bP" in said.steps
        self.P = self.of(lambda c: c.P) if of_rows else self._weights(places, slopes.S, L)
        size = float(np.sqrt(np.mean(slopes.Z**2))) or 1.0
        self.there = (self.P > 1e-4) & (np.abs(slopes.Z) > CLEAR * size)
        due = np.where(self.there, self.P * slopes.Z, 1.0)
        self.f = np.where(self.there, slopes.dS / due, 1.0)
        self.gone = self.there & (np.abs(self.f) < 1e-3)
        self.wrongly = ~self.seen & (np.abs(slopes.dS) > TINY) & np.isfinite(L)
        self.known = self.there & ~self.gone

    def _weights(self, places: Places, S: Array, L: Array) -> Array:
        """P with what is known of it, by the right scores and lse."""
        with np.errstate(over="ignore"):
            scores = S if self.said is None else self.said.scores(places, S)
            return np.where(self.seen, np.exp(scores - L), 0.0)

    def context(self, question: Question) -> Context:
        """Of a call, with what is known of P."""
        places = places_of(question)
        c = backward_of(Right(places))
        c.W = self.seen.astype(np.float64)
        c.P = self._weights(places, c.S, dead_to_inf(np, c.L)[..., None])
        if self.said is not None and "bP" in self.said.steps:
            S = np.where(self.seen, self.said.scores(places, c.S), -np.inf)
            c.P = self.said.steps["bP"](changed(c, S=S))
        if self.said is not None and self.said.listed is not None:
            c.G = c.slope = listed_scores(self.said.listed, places, c.S)[1]
        c.dS = c.P * (c.dP - c.D[..., None])
        c.dY = c.slope * c.dS
        return c

    @cached_property
    def row_term(self) -> Array:
        """What stands in the place of D, of every pair; NaN where it is not known."""
        scale = np.where(self.known, self.P * self.slopes.slope, 1.0)
        return np.where(self.known, self.slopes.dP - self.slopes.dS / scale, np.nan)

    @cached_property
    def of_row_term(self) -> float:
        """The noise of one."""
        return self.noise * float(np.nanmax(np.abs(self.row_term), initial=1.0))

    @cached_property
    def main(self) -> tuple[Context, Any]:
        """The call that tells of the most pairs, and where in dS it is."""
        question, at = max(self.slopes.asked, key=lambda one: np.count_nonzero(self.known[one[1]]))
        return self.context(question), at

    def of(self, dY: Callable[[Context], Array]) -> Array:
        """What a step gives, of all calls."""
        found = np.zeros_like(self.slopes.dS)
        for question, at in self.slopes.asked:
            found[at] = dY(self.context(question))[at]
        return found

    def field(self, x: Array) -> Field:
        return Field(x, self.known, False, self.noise)

    def fits(self, due: Array) -> bool:
        size = np.where(self.known, self.P * np.abs(self.slopes.dP - self.slopes.D), 1.0)
        return self.field(np.where(self.known, self.slopes.dS - due, 0.0) / size).zero

    @property
    def right(self) -> bool:
        """Whether dS is right, for all that P is not."""
        return not (self.gone.any() or self.wrongly.any()) and self.field(self.f - 1).zero

    @property
    def pairs(self) -> tuple[Places, Array, Array]:
        """Which pairs dS has, beside those of P, as ``support_of`` takes it."""
        x, right = self.places, self.places.rights
        known = np.where(right, self.there, ~self.seen & x.own)
        return x, (right & ~self.gone) | (self.wrongly & ~right), known
