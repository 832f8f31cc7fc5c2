"""What a class of bugs is: its sentence, where it comes from, what it looks like, where to look."""

from difflib import get_close_matches

import numpy as np

from rawattn.check.diagnose.catalogue import masks
from rawattn.check.diagnose.catalogue.classes import CLASSES, BugClass
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.evidence.sight import mask_rule, sight_of
from rawattn.check.diagnose.findings import Sight
from rawattn.check.diagnose.harness.causes import HARNESS

KNOWN = HARNESS | CLASSES
NEAR = 5
# of pictures: queries, keys, whether causal, the window
EXAMPLES = ((6, 6, True, (-1, -1)), (4, 7, True, (-1, -1)), (7, 7, False, (2, 1)))


def meaning(name: str) -> BugClass:
    """The class. ValueError with the names near to it where there is none."""
    if name in KNOWN:
        return KNOWN[name]
    parts = [one for one in KNOWN if set(name.split("-")) & set(one.split("-"))]
    near = dict.fromkeys([*get_close_matches(name, KNOWN, NEAR), *parts])
    told = f"near to it: {', '.join([*near][:NEAR])}" if near else "none is near to it"
    raise ValueError(f"there is no class {name!r}; {told}")


def drawn(name: str) -> tuple[str, Sight] | None:
    """The form of a mask that a class may have, with who sees whom then, of a few tokens."""
    for rows, keys, causal, window in EXAMPLES:
        q, k = np.zeros((rows, 1, 1)), np.zeros((keys, 1, 1))
        ends = np.array([0, rows]), np.array([0, keys])
        question = Question(q, k, k, *ends, causal=causal, window=window)
        for bug in masks.masks(question):
            sight = sight_of(question, bug) if bug.name == name else None
            if sight is not None:
                return f"{bug.variant or 'no mask'}, where it must be {mask_rule(question)}", sight
    return None
