"""What gradients are sums of, and where they stand in the answers."""

from collections.abc import Callable, Mapping

import numpy as np

from rawattn.check.diagnose.engine.attention import Context, Floats
from rawattn.check.diagnose.engine.question import OF_KEYS, Answers

SUMS: Mapping[str, Callable[[Context], list[tuple[Floats, Floats]]]] = {  # weights times operands
    "dq": lambda c: [(c.s * c.dY, c.K)],
    "gq": lambda c: [(c.s * c.tdY, c.K), (c.s * c.dY, c.tK)],
    "dk": lambda c: [(c.s * c.dY, c.Q)],
    "dv": lambda c: [(c.P, c.dO)],
    "gk": lambda c: [(c.s * c.tdY, c.Q), (c.s * c.dY, c.tQ)],
    "gv": lambda c: [(c.tP, c.dO)],
}
WEIGHTS = {
    "dq": ("dQ", "dY"),
    "dk": ("dK", "dY"),
    "dv": ("dV", "P"),
    "gq": ("gQ", "tdY", "dY"),
    "gk": ("gK", "tdY", "dY"),
    "gv": ("gV", "tP"),
}


def found_in(c: Context, answers: Answers, name: str) -> Floats:
    """The rows of a context's gradient in the answers, in float64."""
    if name in OF_KEYS:
        return np.asarray(answers[name][c.view.keys, c.view.head_kv], dtype=np.float64)
    return np.asarray(answers[name][c.view.rows[None], c.view.heads[:, None]], dtype=np.float64)
