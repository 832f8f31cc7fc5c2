"""Numbers that have a name: what a kernel may have multiplied by, in place of what it must."""

from rawattn.check.diagnose.engine.attention import LOG2_E
from rawattn.check.diagnose.engine.question import Question


def constants(question: Question) -> dict[str, float]:
    """By their names; s is softmax_scale, d the head_dim of q and k."""
    s, d = question.scale, question.q.shape[2]
    found = {"0": 1e-300, "1": 1.0, "2": 2.0, "3": 3.0, "1/2": 0.5, "-1": -1.0}
    found |= {"log2(e)": LOG2_E, "ln 2": 1 / LOG2_E, "s": s, "1/s": 1 / s, "s * s": s * s}
    found |= {"s * log2(e)": s * LOG2_E, "s * ln 2": s / LOG2_E, "2 s": 2 * s, "s / 2": s / 2}
    found |= {"sqrt(d)": d**0.5, "1 / sqrt(d)": d**-0.5}
    found |= {"1 / sqrt(head_dim_v)": question.v.shape[2] ** -0.5}
    found |= {"1 / sqrt(num_heads_q * d)": (d * question.num_heads_q) ** -0.5}
    sizes = {
        "group": question.group,
        "num_heads_q": question.num_heads_q,
        "num_heads_kv": question.num_heads_kv,
        "batch": question.batch,
        "d": d,
        "the longest length": max(question.lengths_q, default=1),
        "the number of tokens": len(question.q),
    }
    for name, size in sizes.items():
        found |= {name: float(size), f"1 / {name}": 1 / size}
    return found
