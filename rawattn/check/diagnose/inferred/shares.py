"""Gradients that are sums of other parts than they must be: how often each query head of a group is
in dk and dv of one view, planted in all; and a D of 0, by the rows of dq."""

from collections.abc import Iterator

import numpy as np

from rawattn.check.diagnose.engine.attention import BACKWARD, RESULTS, Bug, contexts
from rawattn.check.diagnose.engine.question import by_rows
from rawattn.check.diagnose.engine.steps import STEPS, Context, Floats
from rawattn.check.diagnose.evidence.precision import rows_off
from rawattn.check.diagnose.evidence.structure import where
from rawattn.check.diagnose.inferred.sample import Sample
from rawattn.check.diagnose.read.fields import by_head

OFF = 2.0**-7  # of its size: what a row of dq is wrong by


def bugs(sample: Sample) -> Iterator[Bug]:
    """Of each wrong gradient of keys how often it has each head of a group, where that is looked
    at, if they are all that there is and not alike."""
    dense = not sample.question.sparse and sample.question.group > 1
    names = [n for n in ("dk", "dv") if n in sample.wrong and dense]
    for c in contexts(sample.question, "backward", sample.given) if names else ():
        for name in names if sample.has(c.view) and c.S.size else ():
            step = RESULTS["backward"][name]
            due = sample.found[name][c.view.keys, c.view.head_kv].ravel()
            unit = max(sample.wrong[name], 1e-4) * float(np.sqrt(np.mean(due**2)))
            if not unit or not np.isfinite(due).all():
                continue
            parts = STEPS[step](c).reshape(len(c.S), -1) / unit
            found = np.linalg.lstsq(parts.T, due / unit, rcond=1e-9)[0]
            by = np.where(np.abs(found - np.rint(found)) < 1e-2, np.rint(found) + 0.0, found)
            if np.mean((by @ parts - due / unit) ** 2) <= 1 and np.ptp(by) > 1e-2:
                text = f"the heads of a group count {by_head(by)} times each"
                planted = {step: lambda c, x=by[:, None, None], step=step: x * STEPS[step](c)}
                yield Bug("gqa-group-not-summed", text, BACKWARD, steps=planted)


def without_D(sample: Sample) -> Iterator[Bug]:
    """D of 0 in the rows of dq that are wrong: as a grid that is too small leaves it."""
    if "dq" not in sample.wrong:
        return
    found, due = sample.found["dq"], by_rows("dq", sample.truth["dq"])
    bad = rows_off(found, due, np.ones(due.shape[:2], dtype=bool), OFF)

    def D(c: Context) -> Floats:
        return np.where(bad[np.ix_(c.view.rows, c.view.heads)].T, 0.0, STEPS["D"](c))

    places = "; ".join([*where(sample.question, "dq", bad)][1:])
    text = f"D is 0, not dout . out - dlse, in some rows: {places}"
    yield Bug("delta-of-another-out", text, BACKWARD, steps={"D": D})
