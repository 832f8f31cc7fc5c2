"""Tests of many long cases: most of the cases go to the sweeps, and of the longest to the rest."""

from collections import Counter
from zlib import crc32

import pytest

# Of the cases of each of these tests, one in so many runs by default.
ONE_IN = {
    "check/test_check_cli.py::test_diff_catches": 4,
    "diagnose/test_diagnose.py::test_does_not_accuse_derivatives_options_and_lists": 4,
    "diagnose/test_diagnose.py::test_names_the_planted_bug": 12,
    "diagnose/test_diagnose.py::test_does_not_accuse_what_is_right": 16,
    "diagnose/test_diagnose.py::test_torch_is_not_accused": 4,
    "diagnose/test_diagnose_harness.py::test_what_is_said_of_others": 4,
    "diagnose/test_diagnose_printed.py::test_unmasked_p": 4,
    "diagnose/test_diagnose_told_wrongly.py::test_a_doubled_gradient_is_a_factor": 3,
    "diagnose/test_diagnose_told_wrongly.py::test_a_narrow_intermediate_is_named": 3,
    "diagnose/test_diagnose_told_wrongly.py::test_a_stale_stage": 3,
    "diagnose/test_diagnose_told_wrongly.py::test_the_parts_of_ds": 2,
    "diagnose/test_diagnose_told_wrongly.py::test_what_a_file_leaves_out_accuses_nobody": 2,
    "diagnose/test_engine.py::test_constants_are_what_autograd_makes_of_them": 4,
    "diagnose/test_engine.py::test_nothing_raises": 4,
    "diagnose/test_evidence.py::test_identities_hold": 2,
    "diagnose/test_evidence.py::test_identities_between_runs_hold": 4,
    "diagnose/test_evidence.py::test_identities_hold_with_any_rounding": 4,
    "diagnose/test_evidence.py::test_wrong_answers_fail": 3,
    "diagnose/test_evidence.py::test_wrong_runs_fail": 2,
    "diagnose/test_planted.py::test_a_bug_shows_in_its_stages_alone": 8,
    "diagnose/test_planted.py::test_right_ones_are_right": 4,
    "diagnose/test_read_name.py::test_bugs_are_read_and_planted": 5,
    "diagnose/test_read_probe.py::test_right_functions_are_read_as_right": 5,
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
