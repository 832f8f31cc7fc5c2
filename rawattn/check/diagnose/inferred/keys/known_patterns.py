"""Ways in which queries see other keys than they should, with the numbers that kernels have.

There are some thousand: none is planted before sums over the keys that it has speak for it.
"""

from collections.abc import Iterator

from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.inferred.keys.loops import loops
from rawattn.check.diagnose.inferred.keys.masks import masks
from rawattn.check.diagnose.inferred.keys.others import others
from rawattn.check.diagnose.inferred.keys.pattern import Pattern


def patterns(question: Question) -> Iterator[Pattern]:
    """All that can matter for the question, the plainest first."""
    yield from masks(question)
    yield from loops(question)
    yield from others(question)
