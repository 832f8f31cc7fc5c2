"""What the host spends: microseconds per call, and seconds of the first call of a process."""

import os
import statistics
import subprocess
import sys
import tempfile
import time

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


def host_times() -> dict[str, float]:
    """Microseconds one call occupies the host, on a problem so small that the GPU keeps up."""
    import cupy
    import torch

    import rawattn
    from measure.contenders import make
    from measure.peers import torch_varlen_call
    from rawattn.torch import varlen_attn

    case = BenchCase("host", "host", (128,) * 4, 2, 2, 64, causal=True)
    data = make(case)
    q, k, v, cu_seqlens = data.q, data.k, data.v, data.cu_seqlens
    cq, ck, cv, ccu = map(cupy.from_dlpack, (q, k, v, cu_seqlens))
    theirs = torch_varlen_call(case, cu_seqlens)
    calls = {
        "rawattn.forward, CuPy": lambda: rawattn.forward(cq, ck, cv, ccu, causal=True),
        "rawattn.forward, torch": lambda: rawattn.forward(q, k, v, cu_seqlens, causal=True),
        "rawattn.torch.varlen_attn": lambda: varlen_attn(q, k, v, cu_seqlens, causal=True),
        "torch varlen_attn": lambda: theirs(q, k, v),
    }
    times = {}
    with torch.no_grad():
        for name, call in calls.items():
            queues = []
            for _ in range(1 + CALLS // QUEUE):
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(QUEUE):
                    call()
                queues.append((time.perf_counter() - began) / QUEUE)
            times[name] = round(statistics.mean(queues[1:]) * 1e6, 2)  # the first one warmed up
    return times


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
