"""What is wrong with dS, as it is told and planted."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rawattn.check.diagnose.engine.attention import Context
from rawattn.check.diagnose.evidence.places import Places
from rawattn.check.diagnose.evidence.rules import Rule

Array = np.ndarray
Pairs = tuple[int, Rule | None]  # a head, and which of its pairs


@dataclass(eq=False)
class Change:
    """What is wrong with dS. factor: what multiplies it where it is there, None for what no
    sentence describes. instead: what stands there in place of dY. less, more: pairs that are not
    there, or there by mistake. masked: it is right, unlike P. times: by head, a factor.
    """

    text: list[str] = field(default_factory=list)
    name: str = ""
    factor: Callable[[Context], Array | float] | None = lambda c: 1.0
    instead: Callable[[Context], Array] = lambda c: c.dY
    less: list[Pairs] = field(default_factory=list)
    more: list[Pairs] = field(default_factory=list)
    masked: bool = False
    times: Array | None = None

    @property
    def planted(self) -> bool:
        pairs = (*self.less, *self.more)
        return self.factor is not None and all(rule is not None for _, rule in pairs)

    def dY(self, c: Context) -> Array:
        """dY with the change."""
        places = Places(c.question)
        found = np.asarray(self.instead(c) * (1.0 if self.factor is None else self.factor(c)))
        here = np.ix_(c.view.rows, np.maximum(c.view.keys, 0))
        heads = [int(h) for h in c.view.heads]
        for head, rule in (*self.less, *self.more):
            if head not in heads or rule is None:
                continue
            h, of = heads.index(head), places.of(head)
            pairs = rule.holds(of)[here] & of.own[here]
            if (head, rule) in self.less:
                found[h] = np.where(pairs, 0.0, found[h])
                continue
            gate, cap, slope = (np.broadcast_to(x, c.dP.shape)[h] for x in (c.G, *c.cap[:2]))
            free = np.exp(gate * cap - c.L[h][:, None]) * (c.dP[h] - c.D[h][:, None])
            found[h] += np.where(pairs & ~of.right[here], free * gate * slope, 0.0)
        return found
