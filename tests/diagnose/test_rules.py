"""Rules of who sees whom of two intervals, or of the head; chance rules come last."""

from collections.abc import Callable

import numpy as np
import pytest

from rawattn.check.diagnose.catalogue.maps import geometry, layouts
from rawattn.check.diagnose.catalogue.stages import EVERY, _loop
from rawattn.check.diagnose.evidence.places import Places
from rawattn.check.diagnose.evidence.support import support_of
from tests.diagnose.problems import packed

Array = np.ndarray
RULES: dict[str, Callable[[Places, int], Array]] = {
    "j - (packed row 2 i + h % 2) <= 0": lambda x, h: x.j <= 2 * x.i + h % 2,
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


def test_a_rule_that_looks_alike_gives_way_elsewhere() -> None:
    def lost(x: Places) -> Array:
        """Key tiles of 8 that are in none of three splits."""
        return x.right & (x.j >= 24 * np.maximum(1, -(-x.m // 8) // 3))

    read, third = [], Places(packed((36, 35, 110, 44), causal=True))
    for lengths in (29, 70, 5, 16), (20, 11, 78, 32):
        x = Places(packed(lengths, causal=True))
        read.append((x, np.stack(4 * [x.right & ~lost(x)]), np.ones((4, 1, 1), dtype=bool)))
    found, due = support_of(*read), third.right & ~lost(third)
    assert (found.at(third) != due).any()
    assert any((other.at(third) == due).all() for other in found.others(third))
    assert found.by_no_rule.parts[0].text(4).endswith("by no plain rule")


def test_tiles_counted_from_the_first_row() -> None:
    i, j = np.ogrid[:40, :40]
    which = next(of for words, of in EVERY.items() if words.startswith("counted"))
    ((rows, queries),) = _loop("keys", 8, 1 << 30, False, which, (j <= i) & (j >= 17) & (i >= 24))
    assert (rows[16:] == np.arange(24)).all() and len(queries) == 40


def test_layouts_of_many_rows() -> None:
    x = np.arange(4 * 3000.0).reshape(4, 3000)
    g = geometry(packed((3000,)), "lse")
    assert any(np.array_equal(by.moved(g, x), x.T.reshape(x.shape)) for by in layouts(True))
