"""Other projects' own tests of attention, on rawattn: which pass, which it refuses, which fail.

    python tools/foreign_tests.py flash-attn FILE        Dao-AILab's tests/test_flash_attn.py
    python tools/foreign_tests.py torch-compat FILE      PyTorch's test/test_varlen_attention.py
    python tools/foreign_tests.py torch-provider FILE    the same, torch's name "RAWATTN" activated

FILE is theirs, of the installed torch's version; what follows goes to pytest (-k, -x, ...). A copy
of it runs in which only the names that it imports are swapped (SUITES). A test that ends in the
message with which rawattn refuses what it does not do, dropout say, counts as refused. One that
passes without a call of rawattn has failed. The exit code is pytest's.

Tests of many cases run --most of them, drawn by --seed, in mixed order; what --seconds leave over
is counted as not reached. Without a GPU, --cpu runs what is small enough.
"""
# Long, since pytest loads the same file as its plugin, and the copy imports names from it.

import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention

from rawattn import api
from rawattn.torch import provider
from rawattn.torch.compat import varlen_attn_compat as varlen_attn  # noqa: F401
from rawattn.torch.compat import varlen_attn_out_compat as varlen_attn_out  # noqa: F401

TOOLS = Path(__file__).resolve().parent


class Suite(NamedTuple):
    """What of a file is replaced, on the CPU besides, and which tests are not of attention."""

    swaps: dict[str, str]
    on_cpu: dict[str, str]
    left_out: dict[str, str]
    active: bool = False  # the provider, during each test


_ON_CPU = {
    'device_types = ("cuda",)': 'device_types = ("cpu",)',
    "not PLATFORM_SUPPORTS_FLASH_ATTENTION": "False",
}
SUITES = {
    "flash-attn": Suite(
        {
            "from flash_attn import": "from rawattn.torch.flash_attn import",
            "from flash_attn.bert_padding import": "from foreign_tests import",
            "from flash_attn.layers.rotary import": "from foreign_tests import",
            "import _get_block_size_n, USE_TRITON_ROCM": "import USE_TRITON_ROCM",
            "from flash_attn.flash_attn_interface import USE": "from foreign_tests import USE",
            "from flash_attn.flash_attn_interface import": "from rawattn.torch.flash_attn import",
        },
        {
            'torch.cuda.get_device_capability("cuda")': "(9, 0)",
            'torch.cuda.get_device_properties("cuda").total_memory': "2**40",
            '"cuda"': '"cpu"',
        },
        {"test_flash_attn_generator_arg_must_be_none": "calls flash-attn's compiled extension"},
    ),
    "torch-compat": Suite(
        {
            "from torch.nn.attention.varlen import": "from foreign_tests import",
            '"torch_attn._varlen_attn"': '"rawattn.varlen_forward"',
            '"torch_attn._varlen_attn_out"': '"rawattn.varlen_forward_out"',
            '"torch_attn._varlen_attn_backward"': '"rawattn.varlen_backward"',
        },
        _ON_CPU,
        {"test_custom_op_compliance": "calls torch's operators, for which see torch-provider"},
    ),
    "torch-provider": Suite({}, _ON_CPU, {}, active=True),
}
# What rawattn's messages say of the forms that it does not do.
REFUSALS = {
    "dropout": "attention dropout is not supported",
    "ALiBi": "ALiBi is not supported",
    "paged keys": "paged keys are not supported",
    "paged cache": "block_table (a paged cache of keys) is not supported",
    "kv-cache": "caches of keys are not supported",
}
_LATE = "not reached"


# ---- names that the files import, beside those of the attention ---------------------------------

USE_TRITON_ROCM = False


def unpad_input(x: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a batch that are kept: they, their places, cu_seqlens, the longest, lengths."""
    lengths = kept.sum(1, dtype=torch.int32)
    places = kept.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return x.flatten(0, 1)[places], places, cu_seqlens, int(lengths.max()), lengths


def pad_input(x: Tensor, places: Tensor, batch: int, length: int) -> Tensor:
    """The batch again, zeros where no token was kept."""
    padded = x.new_zeros(batch * length, *x.shape[1:]).index_copy(0, places, x)
    return padded.unflatten(0, (batch, length))


def apply_rotary_emb(x: Tensor, *_: Any, **__: Any) -> Tensor:
    """As it is: only tests of caches rotate, and these are refused before it could matter."""
    return x


# ---- the plugin ---------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("foreign tests")
    group.addoption("--suite")
    group.addoption("--most", type=int)
    group.addoption("--seed", type=int)
    group.addoption("--seconds", type=float)
    group.addoption("--written")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Plugin(config))


class Plugin:
    """Draws the cases, counts the calls of rawattn, and says of each test how it ended."""

    def __init__(self, config: pytest.Config) -> None:
        option = config.option
        self.suite, self.most, self.seed = SUITES[option.suite], option.most, option.seed
        self.file = option.written
        self.deadline = time.monotonic() + (option.seconds or math.inf)
        self.calls = 0
        self.names: list[str] = []
        self.cases: dict[str, int] = {}
        self.ends: dict[str, Counter[str]] = defaultdict(Counter)
        api.forward = self._counted(api.forward)

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self.calls += 1
            return function(*args, **options)

        return counted

    def pytest_pycollect_makeitem(self, name: str, obj: Any) -> None:
        marks = getattr(obj, "pytestmark", [])
        if name.startswith("test") and any(mark.name == "parametrize" for mark in marks):
            obj.pytestmark, self.cases[name] = draw(marks, self.most, f"{self.seed} {name}")

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        if why := self.suite.left_out.get(self._name(item)):
            item.add_marker(pytest.mark.skip(reason=why))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        random.Random(self.seed).shuffle(items)  # so that time spent reaches all tests alike

    def _name(self, item: pytest.Item) -> str:
        """The test of a case, whose own name has its parameters at the end."""
        if not self.names:
            self.names = re.findall(r"def (test_\w+)\(", item.path.read_text())
        return max((name for name in self.names if item.name.startswith(name)), key=len)

    def pytest_runtest_setup(self) -> None:
        if time.monotonic() > self.deadline:
            pytest.skip(_LATE)
        self.calls = 0
        if self.suite.active:  # anew for each: tests may activate other names, which ends it
            attention.activate_flash_attention_impl(provider.NAME)

    def pytest_runtest_teardown(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # others use the same device

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Iterator[None]:
        report = yield
        name = self._name(item)
        report.user_properties = [("test", name), ("cases", self.cases.get(name, 0))]
        if call.when != "call" and report.passed:
            return report
        if report.skipped and _LATE in str(call.excinfo):
            end = _LATE
        elif report.skipped:
            end = "left out" if name in self.suite.left_out else "skipped"
        elif kind := call.excinfo and refusal(call.excinfo.value):
            end, report.outcome, report.wasxfail = f"refused: {kind}", "skipped", kind
        elif report.passed and not self.calls:
            end, report.outcome = "failed", "failed"
            report.longrepr = "passed without a call of rawattn"
        else:
            end = report.outcome
        report.user_properties.append(("end", end))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        said = dict(report.user_properties)
        if "end" in said:
            self.ends[said["test"]][said["end"]] += 1
            self.cases[said["test"]] = said["cases"]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("by test")
        for name, ends in [*self.ends.items(), ("all", sum(self.ends.values(), Counter()))]:
            number, cases = ends.total(), self.cases.get(name, 0)
            drawn = f"{number} drawn of {cases}" if cases > number else f"{number}"
            counts = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
            terminalreporter.write_line(f"{name} ({drawn}): {counts}")
        if self.file:
            said = {name: {"cases": self.cases[name], **ends} for name, ends in self.ends.items()}
            Path(self.file).write_text(json.dumps(said, indent=1) + "\n")


def draw(marks: list[Any], most: int, seed: str) -> tuple[list[Any], int]:
    """The marks of a test with at most so many of its cases, and how many it has."""
    others = [mark for mark in marks if mark.name != "parametrize"]
    names: list[str] = []
    values: list[list[Any]] = []
    for mark in marks:
        if mark.name == "parametrize":
            some, of = mark.args
            some = [n.strip() for n in some.split(",")] if isinstance(some, str) else some
            names += some
            values.append([x if len(some) > 1 else (x,) for x in of])
    total = math.prod(map(len, values))
    if total <= most:
        return marks, total
    rows = []
    for index in sorted(random.Random(seed).sample(range(total), most)):
        row: list[Any] = []
        for of in values:
            index, place = divmod(index, len(of))
            row += of[place]
        rows.append(pytest.param(*row, id="-".join(map(str, row))))
    return [*others, pytest.mark.parametrize(names, rows).mark], total


def refusal(error: BaseException | None) -> str:
    """Which of REFUSALS an error is, or the one that it came of; empty for another."""
    while error is not None:
        for kind, text in REFUSALS.items():
            if text in str(error):
                return kind
        error = error.__cause__ or error.__context__
    return ""


# ---- the command --------------------------------------------------------------------------------


def swapped(text: str, suite: Suite, cpu: bool) -> str:
    """Their file with our names."""
    for theirs, ours in (suite.swaps | (suite.on_cpu if cpu else {})).items():
        text = text.replace(theirs, ours)
    return text


@click.command(help=__doc__, context_settings={"ignore_unknown_options": True})
@click.argument("suite", type=click.Choice(list(SUITES)))
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.option("--most", default=100, show_default=True, help="cases of each test")
@click.option("--seed", default=0, show_default=True)
@click.option("--seconds", type=float, default=0.0, help="start no test after; 0: no limit")
@click.option("--cpu", is_flag=True, help="on the CPU, whatever device the file says")
@click.option("--json", "written", type=click.Path(path_type=Path), help="write the counts")
@click.option("--processes", type=int, default=0, help="with pytest-xdist; 0: all in one")
def main(
    suite: str,
    file: Path,
    options: tuple[str, ...],
    most: int,
    seed: int,
    seconds: float,
    cpu: bool,
    written: Path | None,
    processes: int,
) -> None:
    paths = [str(TOOLS), str(TOOLS.parent), os.environ.get("PYTHONPATH", "")]
    drawn = [f"--suite={suite}", f"--most={most}", f"--seed={seed}", f"--seconds={seconds}"]
    if written:
        drawn.append(f"--written={written.resolve()}")
    if processes:
        drawn += ["-n", str(processes), "--dist", "worksteal"]
    with tempfile.TemporaryDirectory(prefix="foreign-tests-") as folder:
        copy = Path(folder, file.name)
        copy.write_text(swapped(file.read_text(), SUITES[suite], cpu))
        alone = ["-c", os.devnull, "--rootdir", folder, "-p", "no:cacheprovider"]
        shown = ["-q", "--tb=short", "--show-capture=no", "-p", "foreign_tests"]
        command = [sys.executable, "-m", "pytest", *alone, *shown, *drawn, *options, str(copy)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        sys.exit(subprocess.run(command, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
