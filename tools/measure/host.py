"""What the host spends: microseconds per call, and seconds of the first call of a process."""

import importlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from types import ModuleType

from measure.cases import BenchCase

CALLS, QUEUE = 2000, 200

# The imports stand outside the measured time: they cost the same whichever kernel is called.
FIRST_CALL = """
import time
import cuda.core, cuda.bindings.nvrtc, cupy, rawattn
q = cupy.zeros((256, 2, 64), cupy.float16)
cu_seqlens = cupy.asarray([0, 100, 256], cupy.int32)
cupy.cuda.get_current_stream().synchronize()
began = time.perf_counter()
rawattn.forward(q, q, q, cu_seqlens, causal=True)
cupy.cuda.get_current_stream().synchronize()
print(time.perf_counter() - began)
"""


def host_times(old: ModuleType | None = None) -> dict[str, float]:
    """Microseconds one call occupies the host, on a problem so small that the GPU keeps up.

    The calls take turns, QUEUE at a time, those of an ``old`` rawattn among them; the time is that
    of the median turn.
    """
    import cupy
    import torch

    import rawattn
    from measure.contenders import make
    from measure.peers import torch_varlen_call

    case = BenchCase("host", "host", (128,) * 4, 2, 2, 64, causal=True)
    data = make(case)
    tensors = (data.q, data.k, data.v, data.cu_seqlens)
    arrays = tuple(map(cupy.from_dlpack, tensors))
    calls = {"torch varlen_attn": partial(torch_varlen_call(case, data.cu_seqlens), *tensors[:3])}
    for mark, api in (("", rawattn), ("old ", old)):
        if api is not None:
            adapter = importlib.import_module(f"{api.__name__}.torch")
            calls |= {
                f"{mark}rawattn.forward, CuPy": partial(api.forward, *arrays, causal=True),
                f"{mark}rawattn.forward, torch": partial(api.forward, *tensors, causal=True),
                f"{mark}rawattn.torch.varlen_attn": partial(
                    adapter.varlen_attn, *tensors, causal=True
                ),
            }
    turns: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for _ in range(1 + CALLS // QUEUE):
            for name, call in calls.items():
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(QUEUE):
                    call()
                turns[name].append((time.perf_counter() - began) / QUEUE)
    # the first turn warmed up
    return {name: round(statistics.median(times[1:]) * 1e6, 2) for name, times in turns.items()}


def first_call_times() -> dict[str, float]:
    """Seconds of a process's first call beyond imports, the kernel cache empty and then warm."""
    times = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"RAWATTN_CACHE_DIR": folder}
        for name in ("empty cache", "warm cache"):
            run = subprocess.run(
                [sys.executable, "-c", FIRST_CALL],
                env=environment,
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            times[name] = round(float(run.stdout), 3)
    return times
