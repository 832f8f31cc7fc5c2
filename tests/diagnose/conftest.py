"""Functions of somebody, in a file of theirs."""

from collections.abc import Callable
from pathlib import Path

import pytest

ATTEND = """
from rawattn import api

def attend(q, k, v, cu_seqlens, *, return_lse=False, **mask):
    out, lse = api.forward(q, k, v, cu_seqlens, return_lse=True, backend="reference", **mask)
    return (out, lse) if return_lse else out

def attend_backward(dout, q, k, v, out, lse, cu_seqlens, **mask):
    mask["backend"] = "reference"
    dq, dk, dv, *more = api.backward(dout, q, k, v, out, lse, cu_seqlens, **mask)
    return dq, dk, dv, *more
"""


@pytest.fixture
def candidate(tmp_path: Path) -> Callable[..., str]:
    """Writes right functions to a file, with old and new texts in turn; gives FILE.py:NAME."""

    def write(*texts: str, file: str = "mine.py") -> str:
        found = ATTEND
        for old, new in zip(texts[::2], texts[1::2], strict=True):
            assert old in found
            found = found.replace(old, new)
        (tmp_path / file).write_text(found)
        return f"{tmp_path / file}:attend"

    return write
