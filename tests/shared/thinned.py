"""Tests of many long cases: most of the cases go to the sweeps, and of the longest to the rest."""

from collections import Counter
from zlib import crc32

import pytest

# Of the cases of each of these tests, one in so many runs by default.
ONE_IN = {
    "check/test_check_cli.py::test_diff_catches": 4,
    "diagnose/test_diagnose.py::test_names_the_planted_bug": 30,
    "diagnose/test_diagnose.py::test_does_not_accuse_what_is_right": 16,
    "diagnose/test_diagnose.py::test_torch_is_not_accused": 4,
    "diagnose/test_diagnose_bugs_beyond.py::test_what_an_ignored_direction_is_called": 6,
    "diagnose/test_diagnose_harness.py::test_what_is_said_of_others": 4,
    "diagnose/test_diagnose_inputs.py::test_names_the_planted_bug": 12,
    "diagnose/test_diagnose_inputs.py::test_saved_arrays_are_unpacked_in_another_order": 2,
    "diagnose/test_diagnose_invariants.py::test_identities_between_runs_hold": 4,
    "diagnose/test_diagnose_invariants.py::test_identities_hold": 4,
    "diagnose/test_diagnose_keys.py::test_names_them": 4,
    "diagnose/test_diagnose_keys.py::test_reads_the_keys_off_the_answers": 12,
    "diagnose/test_diagnose_lists.py::test_names_the_planted_bug": 12,
    "diagnose/test_diagnose_max.py::test_a_stale_maximum_is_recognised": 8,
    "diagnose/test_diagnose_printed.py::test_unmasked_p": 4,
    "diagnose/test_diagnose_robust.py::test_nothing_raises": 8,
    "diagnose/test_diagnose_softmax.py::test_does_not_accuse_what_is_right": 8,
    "diagnose/test_diagnose_softmax.py::test_names_the_planted_bug": 12,
    "diagnose/test_diagnose_tangents.py::test_names_the_planted_bug": 8,
    "diagnose/test_diagnose_terms.py::test_planted_terms_are_named": 12,
    "diagnose/test_diagnose_terms.py::test_planted_terms_are_read_off": 8,
    "diagnose/test_diagnose_terms.py::test_right_implementations_are_not_accused": 6,
    "diagnose/test_planted.py::test_bugs_show_where_they_are_planted": 4,
    "diagnose/test_planted_beyond.py::test_a_planted_bug_shows_in_its_stages_alone": 12,
    "host/test_variants.py::test_every_half_precision_problem_has_a_cuda_row_that_fits": 4,
    "host/test_variants.py::test_kernel_compiles_cleanly_in_one_form": 4,
    "twins/test_twins_broken.py::test_broken_offsets_stay_inside": 5,
    "twins/test_twins_broken.py::test_broken_offsets_of_a_selection_stay_inside": 4,
    "twins/test_twins_second_sim.py::test_double_backward_kv": 3,
    "twins/test_twins_second_sim.py::test_double_backward_out": 3,
    "twins/test_twins_second_sim.py::test_double_backward_q": 3,
    "twins/test_twins_sparse_second_sim.py::test_kv": 3,
    "twins/test_twins_sparse_second_sim.py::test_out": 3,
    "twins/test_twins_sparse_sim.py::test_backward_kv": 5,
    "twins/test_twins_sparse_sim.py::test_backward_q": 2,
}


# Of the cases of a sweep, one in so many runs in it, whichever; the others are the "rest".
ONE_IN_SWEEP = {
    "host/test_variants.py::test_row_compiles_cleanly_wherever_it_serves": 3,
    "kernels/test_backward_on_hopper.py::test_backward": 2,
    "kernels/test_backward_on_hopper.py::test_deterministic": 3,
    "kernels/test_kernels_on_the_cpu.py::test_pair": 3,
    "kernels/test_options_on_the_cpu.py::test_kernels": 3,
}


def thin(items: list[pytest.Item]) -> None:
    """Mark as "sweep" what ONE_IN leaves out, and as "rest" what ONE_IN_SWEEP does."""
    met: Counter[str] = Counter()
    for item in items:
        test = getattr(item, "originalname", item.name)
        name = f"{item.path.parent.name}/{item.path.name}::{test}"
        if name in ONE_IN:
            if met[name] % ONE_IN[name]:
                item.add_marker(pytest.mark.sweep)
            met[name] += 1
        if crc32(item.name.encode()) % ONE_IN_SWEEP.get(name, 1):
            item.own_markers = [mark for mark in item.own_markers if mark.name != "sweep"]
            item.add_marker(pytest.mark.rest)
