"""Rules of who sees whom of three intervals, or of the head; chance rules come last."""

from collections.abc import Callable

import numpy as np
import pytest

from rawattn.check.diagnose.catalogue.maps import geometry, layouts
from rawattn.check.diagnose.evidence.places import Places
from rawattn.check.diagnose.evidence.support import support_of
from tests.diagnose.problems import packed

Array = np.ndarray
RULES: dict[str, Callable[[Places, int], Array]] = {
    "j - (packed row 2 i + h % 2) <= 0": lambda x, h: x.j <= 2 * x.i + h % 2,
    "j % 16 <= 0 and j >= 16 and i % 16 >= 1": lambda x, h: (
        (x.j <= x.p) & ((x.j % 16 > 0) | (x.j < 16) | (x.i % 16 == 0))
    ),
    "j - i >= 0 and seqlen_k >= 2": lambda x, h: (x.j < x.p) | (x.n == 1),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_read(rule: str) -> None:
    read = []
    for lengths in (20, 70, 1, 37), (42, 7, 1, 80):
        x = Places(packed(lengths))
        seen = np.stack([x.own & RULES[rule](x, h) for h in range(4)])
        read.append((x, seen, np.ones((4, 1, 1), dtype=bool)))
    found = support_of(*read)
    assert [part.text(4).partition(": ")[2] for part in found.parts] == [rule]
    assert (found.at(read[1][0]) == read[1][1]).all() and found.plain == (" and " not in rule)


def test_layouts_of_many_rows() -> None:
    x = np.arange(4 * 3000.0).reshape(4, 3000)
    g = geometry(packed((3000,)), "lse")
    assert any(np.array_equal(by.moved(g, x), x.T.reshape(x.shape)) for by in layouts(True))
