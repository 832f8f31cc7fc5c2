"""The intermediates of one sequence, each (num_heads_q, seqlen_q, seqlen_k): the right ones, and
the step at which others part from them. E, tP and tdS are the tangents of S, P and dS."""

from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.engine.attention import contexts
from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.evidence.precision import finite, residual

MATRICES = {"forward": ("S", "P"), "backward": ("dP", "dS"), "second": ("E", "tP", "tdS")}
MADE = {  # by what, and where to look
    "S": "q k^T, softmax_scale, a softcap",
    "P": "the mask, the exponential, and the row sums or lse",
    "dP": "dout v^T",
    "dS": "P o (dP - D), and D",
    "E": "softmax_scale (tq k^T + q tk^T)",
    "tP": "P o (E - e), and e",
    "tdS": "tP o (dP - D) + P o (dout tv^T - W), and W",
}
BEFORE_THE_MASK = ("S", "dP", "E")  # of pairs that are not seen they may hold anything
NEAR = {8: 1e-9, 4: 1e-4, 2: 0.03}  # of the size, by the bytes of a number of q


def intermediates(question: Question, answers: Answers, sequence: int) -> Answers:
    """The right ones of a sequence, by the out and lse that ``answers`` say. Raises ValueError."""
    if not 0 <= sequence < question.batch:
        raise ValueError(f"sequence {sequence} of {question.batch} sequences, counted from 0 on")
    lengths = question.lengths_q[sequence], question.lengths_k[sequence]
    found: Answers = {}
    for stage in (stage for stage in MATRICES if stage in question.stages):
        names = MATRICES[stage]
        found |= {name: np.zeros((question.num_heads_q, *lengths)) for name in names}
        given = None if stage == "forward" else question.given_to_backward(answers)
        first_q, first_k = (question.offsets(of)[sequence] for of in "qk")
        for c in contexts(question, stage, given):
            if c.view.sequence == sequence:
                at = np.ix_(c.view.heads, c.view.rows - first_q, c.view.keys - first_k)
                for name in names:
                    found[name][at] = getattr(c, name)
    return found


class Parting(NamedTuple):
    """The first ``step`` that is wrong, "" for none; those that ``agree``; how many pairs are."""

    step: str
    text: str
    agree: tuple[str, ...]
    pairs: int = 0


def parting(question: Question, answers: Answers, matrices: Answers) -> Parting | None:
    """Where a side's ``matrices`` part from those of the sequence that they fit best, if any."""
    judged = [
        _judged(question, answers, matrices, b)
        for b, lengths in enumerate(zip(question.lengths_q, question.lengths_k, strict=True))
        if any(x.shape[1:] == lengths for x in matrices.values())
    ]
    return max(judged, key=lambda one: (len(one.agree), -one.pairs), default=None)


def _judged(question: Question, answers: Answers, matrices: Answers, sequence: int) -> Parting:
    right, agree, said = intermediates(question, answers, sequence), list[str](), ""
    for name, wanted in right.items():
        if name not in matrices or matrices[name].shape != wanted.shape:
            continue
        x = np.asarray(matrices[name], np.float64)
        looked = right["P"] > (0 if name in BEFORE_THE_MASK else -1)
        off = np.where(looked, np.abs(residual(x, wanted, slice(None))), 0.0)
        size = np.abs(finite(wanted[looked])).max(initial=0.0)
        wrong = np.nonzero(off > NEAR[min(question.dtype.itemsize, 8)] * size)
        if len(wrong[0]):
            at = np.unravel_index(off.argmax(), off.shape)
            axes = zip(("heads", "queries", "keys"), wrong, at, strict=True)
            spans = (f"{what} {of.min()} to {of.max()}, most at {most}" for what, of, most in axes)
            text = f"{said}sequence {sequence}: {name} parts first, in {len(wrong[0])} of "
            text += f"{looked.sum()} pairs: {'; '.join(spans)}"
            text += f": expected {wanted[at]:.4g}, got {x[at]:.4g}"
            return Parting(name, text, tuple(agree), len(wrong[0]))
        agree.append(name)
        said = f"{', '.join(agree)} right; "
    return Parting("", said.removesuffix("; "), tuple(agree))
