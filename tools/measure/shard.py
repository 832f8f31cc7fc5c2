"""A pytest plugin: ``-p measure.shard --shard 2/4`` runs the second of four parts of the tests.

By a checksum of a test's name, so that every process of a parallel run leaves out the same, and
neighbours, which take alike long, are spread.
"""

from zlib import crc32

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", required=True, metavar="I/N")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, number = map(int, config.getoption("--shard").split("/"))
    chosen = [item for item in items if crc32(item.nodeid.encode()) % number == part - 1]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen
