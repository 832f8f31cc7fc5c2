"""Which rows of a backward pass can nobody judge, since the lse that it had is far too small?

P = exp(S - lse) is then so large that the gradients are more than their dtype holds. Such rows are
taken as right; the lse is what is wrong.
"""

import ml_dtypes
import numpy as np

from rawattn.check.diagnose.engine.attention import solve
from rawattn.check.diagnose.engine.question import Answers, Question, given_to_backward
from rawattn.check.diagnose.evidence.structure import side_of

NAMES = ("dq", "dk", "dv")


def without(question: Question, answers: Answers) -> tuple[Answers, list[str]]:
    """The answers with right values in such rows, and what is to be said of them."""
    given = given_to_backward(question, answers)
    names = [name for name in NAMES if name in answers]
    broken = [name for name in names if not np.isfinite(answers[name]).all()]
    if given is None or question.dout is None or not broken:
        return answers, []
    with np.errstate(all="ignore"):
        truth = solve(question, "backward", given=given)
    found, said = dict(answers), []
    for name in broken:
        x, wanted = np.asarray(answers[name]), truth[name]
        most = float(ml_dtypes.finfo(x.dtype).max)  # type: ignore[no-untyped-call]
        rows = ~(np.abs(wanted).max(axis=-1, initial=0.0) <= most)
        rows &= ~np.isfinite(x).all(axis=-1) & (question.sequence_of(side_of(name)) >= 0)[:, None]
        if rows.any():
            wide = np.float32 if x.dtype.itemsize == 2 else x.dtype
            found[name] = np.where(rows[..., None], wanted, x.astype(np.float64)).astype(wide)
            said.append(f"{int(rows.sum())} rows of {name}")
    if not said:
        return answers, []
    text = (
        f"not judged: {'; '.join(said)}. The lse that the backward pass had is so far below the "
        "right one that P = exp(S - lse) makes them more than their dtype holds; inf and NaN come "
        "of it, and not of the backward pass"
    )
    return found, [text]
