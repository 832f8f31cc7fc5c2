"""The catalogue of bugs in the forward pass and its gradients, in the forms that kernels have them.

Masks, numbers and tiles have modules of their own. Bugs that no planted computation reproduces,
because nobody knows the numbers that came in, are found by their structure, in ``judge.proofs``.
"""

from collections.abc import Callable, Iterator

import numpy as np

from rawattn.check.diagnose.catalogue import heads, inputs, options
from rawattn.check.diagnose.catalogue.masks import masks, neighbours
from rawattn.check.diagnose.catalogue.numbers import of_backward, of_scores
from rawattn.check.diagnose.catalogue.partial_sums import of_rings
from rawattn.check.diagnose.catalogue.reading import reading
from rawattn.check.diagnose.catalogue.tiles import dead_rows, tiles
from rawattn.check.diagnose.engine.attention import BACKWARD, FIRST, TILES, Bug
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.engine.steps import Floats

Of = Callable[[Floats], Floats]  # the gradients of a group's heads in one
SUMS: dict[str, Of] = {
    "the last": lambda x: x[-1],
    "the first": lambda x: x[0],
    "the mean": lambda x: x.mean(axis=0),
}


def bugs(question: Question) -> Iterator[Bug]:
    """Every bug of the catalogue that can matter for the question."""
    longest = max((*question.lengths_q, *question.lengths_k), default=0)
    yield from options.bugs(question)
    yield from masks(question)
    yield from neighbours(question)
    yield from bugs_anywhere(question)
    for size in (tile for tile in TILES if tile < 2 * longest):
        yield from tiles(question, size)
    yield from dead_rows(question)
    shapes = inputs.shapes_of(question)
    for one, other in (("k", "v"), ("q", "k")):  # as ``inputs`` has them, and found at once
        if shapes[one] == shapes[other]:
            steps = reading({one: other, other: one})
            yield Bug("arguments-swapped", f"{one} and {other}", FIRST, steps=steps)
    yield from heads.bugs(question)
    yield from of_rings(question)


def bugs_anywhere(question: Question) -> Iterator[Bug]:
    """Those that have nothing to do with masks and tiles of keys."""
    yield from of_scores(question)
    yield from of_backward(question)
    if question.group > 1:
        if question.num_heads_kv > 1:
            of = np.arange(question.num_heads_q) % question.num_heads_kv
            yield Bug("gqa-head-map", "h % num_heads_kv", FIRST, heads.by_map(of))
        for text, total in SUMS.items():
            steps = {"sum_heads": lambda c, total=total: total}
            yield Bug("gqa-group-not-summed", text, (*BACKWARD, "second"), steps=steps)
