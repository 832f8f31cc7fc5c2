"""The text of the kernels does not repeat: what is of several kernels stands in a header.

Counted are code lines (no comments, blanks or includes) that stand in a run of six which another
kernel has too. The limit of a kernel is half of what its share was before the headers; a new kernel
has the largest.
"""

import re
from functools import cache

import pytest

from tests.shared.structs import KERNELS, STEMS

RUN = 6
LIMITS = {  # percent of the code lines of a source
    "backward_kv": 15.9,
    "backward_q": 14.6,
    "double_backward_kv": 16.2,
    "double_backward_out": 20.4,
    "double_backward_q": 26.9,
    "forward": 14.6,
    "jvp": 12.1,
    "sparse_backward_kv": 7.9,
    "sparse_backward_q": 25.7,
    "sparse_double_backward_kv": 10.6,
    "sparse_double_backward_out": 27.6,
    "sparse_double_backward_q": 32.3,
    "sparse_forward": 21.8,
    "block_queries": 11.9,
    "block_order": 6.4,
    "block_offsets": 6.3,
    "block_lists": 3.0,
    "backward_preprocess": 0.0,
    "backward_postprocess": 0.0,
    "backward_sinks": 0.0,
    "sparse_postprocess": 0.0,
}


def code_lines(text: str) -> list[str]:
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    lines = (" ".join(re.sub(r"//.*", "", line).split()) for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#include")]


def runs(lines: list[str]) -> list[tuple[str, ...]]:
    return [tuple(lines[i : i + RUN]) for i in range(len(lines) - RUN + 1)]


def share(lines: list[str], others: list[list[str]]) -> float:
    """Percent of ``lines`` that stand in a run which is in one of the others too."""
    known = {run for other in others for run in runs(other)}
    repeated = {i + n for i, run in enumerate(runs(lines)) if run in known for n in range(RUN)}
    return 100 * len(repeated) / len(lines)


@cache
def sources() -> dict[str, list[str]]:
    return {stem: code_lines((KERNELS / f"sm80/{stem}.cu").read_text()) for stem in STEMS}


@pytest.mark.parametrize("stem", STEMS)
def test_a_kernel_repeats_little_of_the_others(stem: str) -> None:
    others = [lines for other, lines in sources().items() if other != stem]
    found, limit = share(sources()[stem], others), LIMITS.get(stem, max(LIMITS.values()))
    assert found <= limit, f"{found:.1f} % of {stem}.cu stand in others, at most {limit} % may"


def test_limits_are_of_kernels_that_there_are() -> None:
    assert set(LIMITS) <= set(STEMS)


def test_what_counts_as_repeated() -> None:
    text = "".join(f"a{n} = {n};  // {n}\n" for n in range(9)) + '#include "x"\n\n/* b\nc */\n'
    lines = code_lines(text)
    assert lines == [f"a{n} = {n};" for n in range(9)]
    assert share(lines, [["x", *lines[2:8], "y"]]) == pytest.approx(100 * 6 / 9)
    assert share(lines, [lines[:5], lines[5:]]) == 0
    assert share(lines, [lines[:6], lines[3:]]) == 100
