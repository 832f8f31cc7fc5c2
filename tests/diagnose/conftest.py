"""A diagnosis takes seconds and there are hundreds: most of the long ones go to the sweeps."""

from collections import Counter
from pathlib import Path

import pytest

# Of the cases of each of these tests, one in so many runs by default.
ONE_IN = {
    "test_diagnose.py::test_names_the_planted_bug": 30,
    "test_diagnose.py::test_does_not_accuse_what_is_right": 4,
    "test_diagnose.py::test_torch_is_not_accused": 4,
    "test_diagnose_inputs.py::test_names_the_planted_bug": 6,
    "test_diagnose_inputs.py::test_saved_arrays_are_unpacked_in_another_order": 2,
    "test_diagnose_invariants.py::test_identities_hold": 4,
    "test_diagnose_keys.py::test_names_them": 4,
    "test_diagnose_lists.py::test_names_the_planted_bug": 12,
    "test_diagnose_max.py::test_a_stale_maximum_is_recognised": 8,
    "test_diagnose_robust.py::test_nothing_raises": 4,
    "test_diagnose_softmax.py::test_does_not_accuse_what_is_right": 8,
    "test_diagnose_softmax.py::test_names_the_planted_bug": 12,
    "test_diagnose_tangents.py::test_names_the_planted_bug": 4,
    "test_diagnose_bugs_beyond.py::test_what_an_ignored_direction_is_called": 3,
    "test_diagnose_terms.py::test_planted_terms_are_named": 12,
    "test_diagnose_terms.py::test_right_implementations_are_not_accused": 2,
    "test_planted_beyond.py::test_a_planted_bug_shows_in_its_stages_alone": 3,
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    met: Counter[str] = Counter()
    for item in items:
        name = f"{item.path.name}::{getattr(item, 'originalname', item.name)}"
        if name in ONE_IN and item.path.parent == Path(__file__).parent:
            if met[name] % ONE_IN[name]:
                item.add_marker(pytest.mark.sweep)
            met[name] += 1
