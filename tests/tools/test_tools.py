"""The tools as far as they go without a GPU: cases, tables, plots, records shown."""

import itertools
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import bench
import dump_sass
from measure import cases, pages, plots, tables
from tests.shared.device import device_arch

ROOT = Path(__file__).parents[2]


def row(case: str, direction: str, ours_ms: float, **peers: float) -> dict[str, Any]:
    return {
        "suite": tables.CASES[case].suite,
        "case": case,
        "direction": direction,
        "kernels": "sm80",
        "ours_ms": ours_ms,
        "ours_tflops": 1.0,
        "peers": peers,
    }


RESULT = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "versions": {"torch": "2.13.0"},
    "bench": [
        row("d64_s512_f", "forward", 1.0, sdpa_flash=2.0, fa4=0.5),
        row("d64_s512_f", "backward", 2.0, sdpa_flash=2.0),
        row("d256_s512_f", "forward", 1.0, sdpa_flash=8.0),
    ],
    "host": {"rawattn.forward, CuPy": 12.34},
}


def test_suites_hold_the_tokens_they_name() -> None:
    suites = {name: suite() for name, suite in cases.SUITES.items()}
    assert {name: len(suite) for name, suite in suites.items()} == {
        "paper": 24,
        "varlen": 12,
        "seed": 5,
        "dims": 16,
        "many_short": 2,
        "windows": 4,
        "second": 10,
        "second_length": 7,
        "sparse": 16,
        "sparse_local": 8,
        "sparse_length": 9,
    }
    assert {case.total for case in suites["paper"]} == {16384}
    assert {case.total for case in suites["varlen"]} == {32768}
    assert len(tables.CASES) == 113, "two cases share a name"


def test_the_second_suite_has_the_rows_of_both_directions() -> None:
    rows = [direction for case in cases.second() for direction in case.directions]
    assert {direction: rows.count(direction) for direction in rows} == {"second": 8, "jvp": 5}
    lengths = [case.lengths for case in cases.second_length()]
    assert lengths[0] == (1024,) and lengths[-1] == (65536,)


@pytest.mark.parametrize(("causal", "pairs"), [(False, 9 + 1), (True, 6 + 1)])
def test_flop_counts_the_allowed_pairs(causal: bool, pairs: int) -> None:
    case = cases.BenchCase("seed", "tiny", (3, 1), 4, 2, 8, causal)
    assert case.flop("forward") == 4 * 4 * 8 * pairs
    assert case.flop("backward") == 2.5 * case.flop("forward")
    assert case.flop("second") == 7.5 * case.flop("forward")
    assert case.flop("jvp") == 3 * case.flop("forward")


def test_flop_counts_the_pairs_of_a_window() -> None:
    case = cases.BenchCase("windows", "tiny", (5, 2), 4, 2, 8, True, window=2)
    assert case.flop("forward") == 4 * 4 * 8 * ((1 + 2 + 3 + 3 + 3) + (1 + 2))
    assert {case.window for case in cases.windows()} == {128, 1024}


def test_the_sparse_suites_are_of_one_causal_sequence_with_a_selection() -> None:
    wide, narrow = cases.sparse()[:8], cases.sparse()[8:]
    assert {(c.num_heads_q, c.num_heads_kv, c.selection) for c in wide} == {
        (64, 4, cases.Blocks(16, 64))
    }
    assert [c.lengths for c in wide[::2]] == [(8192,), (16384,), (32768,), (65536,)]
    assert {(c.total, c.selection.num_selected, c.selection.block_size) for c in narrow} == {
        (tokens, *blocks) for tokens in (2048, 8192) for blocks in ((4, 64), (16, 16))
    }
    assert all(c.selection.own and (c.num_heads_q, c.num_heads_kv) == (16, 4) for c in narrow)
    local = [(c.total, c.head_dim, c.selection) for c in cases.sparse_local()]
    assert local == [(c.total, c.head_dim, replace(c.selection, local=True)) for c in wide]
    length = cases.sparse_length()
    assert length[0].total == 1024 and length[-1].total == 262144
    assert all(c.alone for c in length) and not any(c.alone for c in (*wide, *narrow))


@pytest.mark.parametrize(
    ("own", "pairs"),
    # blocks of 2 keys; the query's own part, then up to one or two whole blocks before it
    [(False, (1 + 2) + (2 + 1) + (2 + 2) + (2 + 1)), (True, (1 + 2) + (2 + 1) + (2 + 2) + (4 + 1))],
)
def test_flop_counts_the_pairs_of_selected_blocks(own: bool, pairs: int) -> None:
    blocks = cases.Blocks(2, 2, own=own)
    case = cases.BenchCase("sparse", "tiny", (5,), 4, 2, 8, True, selection=blocks)
    assert case.flop("forward") == 4 * 4 * 8 * pairs
    assert case.flop("backward") == 2.5 * case.flop("forward")


def test_ratios_are_of_the_fastest_peer() -> None:
    forward, backward, _ = RESULT["bench"]
    assert tables.ratio(forward, ["sdpa_flash"]) == 2.0
    assert tables.ratio(forward) == 0.5
    assert tables.ratio(backward, ["torch_varlen"]) is None
    assert tables.geometric_mean([2.0, None, 8.0]) == pytest.approx(4.0)
    assert tables.geometric_mean([None]) is None


def test_tables_put_forward_and_backward_in_a_cell() -> None:
    header, first, second = tables.case_grid(RESULT["bench"], ["sdpa_flash"])
    flop = tables.CASES["d64_s512_f"].flop("forward")
    assert header[:4] == ["case", "ours", "sdpa_flash", "fa4"]
    assert first[1] == f"{flop / 1e9:.0f} / {2.5 * flop / 2e9:.0f}"
    assert first[-2:] == ["2.00 / 1.00", "0.50 / 1.00"]
    assert second[3] == "" and second[-1] == "8.00 / -"


def test_the_summary_leaves_head_dim_256_out_of_the_last_line() -> None:
    lines = tables.summary_grid(RESULT["bench"], ["sdpa_flash"])[1:]
    assert lines == [
        ["paper", f"{math.sqrt(16):.2f} / 1.00", f"{math.sqrt(4):.2f} / 1.00"],
        ["all with head_dim <= 128", "2.00 / 1.00", "0.50 / 1.00"],
    ]


SECOND = {
    **RESULT,
    "bench": [
        row("b1_h1_t8192_d64_f", "second", 0.5, torch_math=2.0)
        | {"ours_gib": 0.0123, "peers_gib": {"torch_math": 1.8}},
        row("b1_h1_t8192_d64_f", "jvp", 0.1, torch_math=3.0, jvp_flash_attention=0.4)
        | {"ours_gib": 0.01, "peers_gib": {"torch_math": 0.5, "jvp_flash_attention": 0.01}},
        row("b1_h1_t8192_d64_c", "second", 0.4, torch_math=2.0)
        | {"ours_gib": 0.0123, "peers_gib": {"torch_math": 1.9}},
        row("t16384", "second", 40.0, torch_math=177.0)
        | {"ours_gib": 1.2, "peers_gib": {"torch_math": 97.4}},
        row("t65536", "second", 640.0)
        | {"ours_gib": 4.8, "peers_gib": {}, "errors": {"torch_math": "OutOfMemoryError: 64 GiB"}},
    ],
}


def test_second_order_has_a_line_for_each_direction() -> None:
    grids = tables.grids(SECOND, ["sdpa_flash"])
    assert list(grids) == ["second", "second_length", "summary_second", "host"]
    header, *lines = grids["second"]
    assert header[2:6] == ["ours ms", "ours TFLOP/s", "torch_math ms", "jvp_flash_attention ms"]
    assert header[6:] == ["ours to best", "ours GiB", "torch_math GiB", "jvp_flash_attention GiB"]
    assert [line[1] for line in lines] == ["second", "second", "jvp"]
    assert lines[0][2:] == ["0.500", "1", "2.00", "", "4.00", "0.0123", "1.80", ""]
    assert lines[2][4:7] == ["3.00", "0.400", "4.00"]
    assert grids["second_length"][2][2:] == ["640", "1", "out of memory", "", "4.80", ""]
    assert "t65536 second torch_math" not in pages.markdown_tables(SECOND, [])["second_length"]


SPARSE = {
    **RESULT,
    "bench": [
        row("g16_t8192_d64", "forward", 0.5, fla_nsa=1.0, sdpa_cudnn=1.25)
        | {"ours_gib": 0.1, "peers_gib": {}},
        row("g16_t8192_d64", "backward", 2.0, fla_nsa=4.0, sdpa_cudnn=3.0)
        | {"methods": {"deterministic": 3.0}, "ours_gib": 0.2, "peers_gib": {}},
        row("g4_t2048_d64_4x64", "forward", 0.1, lucidrains_triton=0.25),
        row("local_t8192_d64", "forward", 0.25, fla_nsa=2.0),
        row("sparse_t1024", "forward", 0.25) | {"ours_gib": 0.1, "peers_gib": {}},
        row("sparse_t1024", "backward", 0.75) | {"ours_gib": 0.3, "peers_gib": {}},
        row("sparse_t2048", "forward", 0.5) | {"ours_gib": 0.2, "peers_gib": {}},
        row("sparse_t2048", "backward", 1.5) | {"ours_gib": 0.6, "peers_gib": {}},
    ],
}


def test_sparse_suites_are_in_milliseconds_with_a_ratio_for_each_peer() -> None:
    grids = tables.grids(SPARSE, ["sdpa_flash"])
    assert list(grids) == ["sparse", "sparse_local", "sparse_length", "summary_sparse", "host"]
    header, wide, narrow, means = grids["sparse"]
    assert header[:4] == ["case", "ours ms", "deterministic ms", "fla_nsa ms"]
    assert wide[1:4] == ["0.500 / 2.00", "- / 3.00", "1.00 / 4.00"]
    ratios = dict(zip(header[6:], zip(wide[6:], narrow[6:], means[6:], strict=True), strict=True))
    assert ratios == {
        "ours to fla_nsa": ("2.00 / 2.00", "", "2.00 / 2.00"),
        "ours to sdpa_cudnn": ("2.50 / 1.50", "", "2.50 / 1.50"),
        "ours to lucidrains_triton": ("", "2.50 / -", "2.50 / -"),
    }
    assert grids["sparse_local"][-1] == ["geometric mean", "", "", "8.00 / -"]
    assert grids["sparse_length"][1] == ["sparse_t1024", "forward", "0.250", "1", "", "0.100"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.01234, "0.0123"), (1.236, "1.24"), (97.4, "97.4"), (1640, "1640")],
)
def test_three_digits_without_an_exponent(value: float, text: str) -> None:
    assert tables.three_digits(value) == text


def test_markdown_goes_between_its_markers_alone() -> None:
    text = "a\n<!-- bench:host -->\nold\n<!-- /bench:host -->\nb\n"
    body = pages.markdown_tables(RESULT, ["sdpa_flash"])["host"]
    spliced = pages.splice(text, "host", body)
    assert spliced.startswith("a\n<!-- bench:host -->\nNVIDIA H200, driver 580.1, torch 2.13.0.")
    assert "| rawattn.forward, CuPy | 12.3 |" in spliced and spliced.endswith("-->\nb\n")
    assert "old" not in spliced
    with pytest.raises(ValueError, match="no place for the table 'paper'"):
        pages.splice(text, "paper", body)


def test_bench_without_a_gpu_says_so_in_a_line() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for options in (["--suite", "seed"], ["--accuracy"], ["--host"], ["--old", str(ROOT)]):
        run = CliRunner().invoke(bench.main, options)
        assert run.exit_code == 1 and isinstance(run.exception, SystemExit)
        assert run.output.startswith("Error: no CUDA device") and run.output.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [
        "sanitize.py",
        *(f"record.py --{part}" for part in ("tests", "sanitizer", "accuracy", "host")),
    ],
)
def test_what_needs_a_gpu_says_so_in_a_line(command: str, tmp_path: Path) -> None:
    if device_arch():
        pytest.skip("there is a GPU")
    script, *options = command.split()
    run = subprocess.run(
        [sys.executable, str(ROOT / "tools" / script), *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1 and not run.stdout
    assert run.stderr.startswith("Error: no CUDA device: ") and run.stderr.count("\n") == 1


def test_bench_shows_a_record(tmp_path: Path) -> None:
    source = tmp_path / "record.json"
    source.write_text(json.dumps(RESULT))
    command = [sys.executable, ROOT / "tools/bench.py", "--from", source]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    shown = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
    assert "d64_s512_f" in shown and "2.00 / 1.00" in shown


def test_rows_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (path,) = plots.plot(RESULT | {"bench": RESULT["bench"][:1]}, tmp_path)
    assert path.name == "paper_d64.png" and path.stat().st_size > 10_000


def test_a_contender_has_its_colour_and_name_in_every_plot() -> None:
    colors = pytest.importorskip("matplotlib.colors")
    rows = [*RESULT["bench"], *SECOND["bench"], *SPARSE["bench"]]
    rows += [row("docs_d64_f", d, 1.0, fa4=0.5) for d in ("forward", "backward")]
    drawn = plots.figures(RESULT | {"bench": rows})
    assert list(drawn) == [
        *("paper_d64", "paper_d256", "varlen", "sparse", "sparse_local"),
        *("second_length", "sparse_length"),
    ]
    for name, figure in drawn.items():
        assert "NVIDIA H200, bfloat16" in figure.get_suptitle()
        note = figure.get_supxlabel()
        assert ("TFLOP/s" if name.startswith(("paper", "varlen")) else "of a call") in note
        lines = [line for axis in figure.axes for line in axis.lines]
        said = {
            text.get_text().split("\n")[0].split(", dense")[0]: text.get_color()
            for axis in figure.axes
            for text in axis.texts
        }
        assert all(
            plots.LOOKS[key][1] == said[label]
            for key, (label, _) in plots.LOOKS.items()
            if label in said
        )
        assert {line.get_color() for line in lines} == {*said.values()}
        assert all(axis.get_legend() is None for axis in figure.axes), "a legend covers data"
        if name == "varlen":
            (legend,) = figure.legends
            shown = dict(
                zip((t.get_text() for t in legend.get_texts()), legend.get_patches(), strict=True)
            )
            assert colors.same_color(
                shown["FlashAttention-4"].get_facecolor(), plots.LOOKS["fa4"][1]
            )
            bars = figure.axes[0].patches
            assert sum(bar.get_x() + bar.get_width() / 2 for bar in bars) == pytest.approx(0)
        elif lines:
            labels = [tick.get_text() for tick in figure.axes[0].get_xticklabels()]
            lengths = sorted(
                {x for axis in figure.axes for line in axis.lines for x in line.get_xdata()}
            )
            assert all(math.log2(x).is_integer() for x in lengths)
            assert labels and all(label.rstrip("k").isdigit() for label in labels)
    ends = [text.get_text() for text in drawn["second_length"].axes[0].texts]
    assert any("out of memory" in text for text in ends)


def test_names_at_line_ends_do_not_meet() -> None:
    placed = plots.spread({"a": 0.5, "b": 0.51, "c": 0.2, "d": 0.52, "e": 0.24}, 0.05)
    ordered = sorted(placed, key=lambda name: placed[name])
    assert ordered == ["c", "e", "a", "b", "d"]
    heights = [placed[name] for name in ordered]
    assert min(y - x for x, y in itertools.pairwise(heights)) > 0.05 - 1e-6
    assert (
        placed["b"] == pytest.approx(0.51) and plots.spread({"a": 0.3, "b": 0.5}, 0.1)["a"] == 0.3
    )


def test_opcodes_are_counted_without_modifiers_and_predicates() -> None:
    sass = """
        /*0090*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;   /* 0x000fe200 */
        /*00a0*/              @!P0 LDSM.16.M88.4 R4, [R2] ;
        /*00b0*/             @!UP1 HMMA.16816.F32 R4, R8, R12, R4 ;
        .L_x_1:
    """
    assert dump_sass.histogram(sass) == {"HMMA": 2, "LDSM": 1}
