"""For every test: markers, Numba's simulator where there is no GPU, a cache of its own."""

import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator

import pytest

from tests.shared.device import device_arch, device_count
from tests.shared.thinned import thin

MARKERS = {
    "gpu": "needs a CUDA device",
    "sm90": "needs a device of compute capability 9.0, whose instructions no other device has",
    "slow": "takes more than a few seconds; leave out with -m 'not slow'",
    "sweep": "a long sweep, left out unless -m is given: pytest -m sweep, as .ci/run does",
    "rest": "of sweeps what CI leaves out too: pytest -m 'sweep or rest' where kernels change",
}
# Of a whole run, on 2 cores without a GPU.
MINUTES = {"not sweep": 4, "sweep": 8, "rest": 10}
PLAIN = "not sweep and not rest"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For torch on small tensors: more threads only wait for each other on a busy machine."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def gradients_on() -> None:
    """Once in a full run, torch's grad mode was off from the middle of a file on, for good.

    Not seen again alone; suspected is a suspended ``no_grad`` that the garbage collector ends. On
    CI it is a failure, of the test that comes after.
    """
    torch = sys.modules.get("torch")
    if torch is not None and not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        text = "torch's grad mode was off before this test"
        if os.environ.get("CI") == "true":
            pytest.fail(text)
        warnings.warn(text, stacklevel=1)


def pytest_report_header(config: pytest.Config) -> str | None:
    """How long a whole run takes, and what it leaves out."""
    if config.args_source is config.ArgsSource.ARGS or config.option.markexpr != PLAIN:
        return None
    return (
        f"about {MINUTES['not sweep']} minutes on 2 cores; the sweeps, left out here, take about "
        f"{MINUTES['sweep']} more: pytest -m sweep; what they leave out {MINUTES['rest']}: -m rest"
    )


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    if config.option.markexpr == PLAIN and all("::" in arg for arg in config.args):
        config.option.markexpr = ""  # tests asked for by name run, be they of a sweep or not
    share_gpus()
    if device_arch() == 0:
        # Numba reads this once, when it is imported: so before any test module is.
        os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")
    if workers := getattr(config.option, "numprocesses", 0):
        # Read by NumPy and torch in the workers: their threads would wait for each other.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    # JAX would take most of the GPU's memory, and the workers of a parallel run share one GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if "RAWATTN_CACHE_DIR" not in os.environ:
        # The workers of a parallel run inherit the folder of the process that starts them.
        folder = tempfile.mkdtemp(prefix="rawattn-tests-")
        os.environ["RAWATTN_CACHE_DIR"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def share_gpus() -> None:
    """Each worker of a parallel run sees one of the GPUs; CUDA reads this when it begins."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if not worker:
        os.environ["RAWATTN_TEST_GPUS"] = str(device_count())
    elif (gpus := int(os.environ["RAWATTN_TEST_GPUS"])) > 1:
        own = int(worker.removeprefix("gw")) % gpus
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", str(own))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    thin(items)
    arch = device_arch()
    no_gpu = pytest.mark.skip(reason="no CUDA device")
    not_sm90 = pytest.mark.skip(reason=f"compute capability 9.0 needed, this is {arch}")
    for item in items:
        if arch == 0 and (item.get_closest_marker("gpu") or item.get_closest_marker("sm90")):
            item.add_marker(no_gpu)
        elif arch != 90 and item.get_closest_marker("sm90"):
            item.add_marker(not_sm90)
