"""RAWATTN_* variables: read at the moment of use, and what means nothing is found."""

import os

import pytest

from rawattn import env


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("RAWATTN_")]:
        monkeypatch.delenv(name)


def test_a_variable_is_read_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in env.VARIABLES:
        assert env.value(variable) == variable.default and not env.flag(variable)
        monkeypatch.setenv(variable.name, "1")
        assert env.value(variable) == "1" and env.flag(variable)
        monkeypatch.setenv(variable.name, "0")
        assert env.value(variable) == "0" and not env.flag(variable)
        monkeypatch.delenv(variable.name)
        assert env.value(variable) == variable.default


def test_names_that_mean_nothing_are_found_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAWATTN_SYNC", "1")
    assert env.unknown() == {}
    monkeypatch.setenv("RAWATTN_CACH_DIR", "x")
    monkeypatch.setenv("RAWATTN_QQQQQQQQQQQQQQQQQQ", "x")
    monkeypatch.setenv("OTHER_SYNC", "x")
    near = {"RAWATTN_CACH_DIR": "RAWATTN_CACHE_DIR", "RAWATTN_QQQQQQQQQQQQQQQQQQ": ""}
    assert env.unknown() == near
