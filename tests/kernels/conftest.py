"""The kernels of the fake GPU, emulated."""

from collections.abc import Iterator

import pytest

from tests.shared import emulated, fake_gpu


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[emulated.Kernels]:
    if emulated.COMPILER is None:
        pytest.skip("needs a C++ compiler")
    yield emulated.install(monkeypatch)
    fake_gpu.remove()
