"""Work captured in a CUDA graph, and replayed with other content in the same arrays."""

from collections.abc import Callable, Iterator
from typing import Any

from tests.shared.gpu_arrays import Arrays, on


def replays(
    library: str, work: Callable[[Arrays], Any], contents: list[Arrays]
) -> Iterator[tuple[Any, Arrays]]:
    """Results of a graph of ``work`` on arrays of a library, with the host arrays they are of."""
    of_library = {"cupy": cupy_replays, "torch": torch_replays}[library]
    replayed = of_library(work, [on(library, content) for content in contents])
    yield from zip(replayed, (*contents[1:], contents[0]), strict=True)


def cupy_replays(work: Callable[[Arrays], Any], batches: list[Arrays]) -> Iterator[Any]:
    """Results of a graph of ``work``, captured with the first of some batches of CuPy arrays.

    After each step they are those of one batch: the others in turn, at last the first again. Every
    batch is replayed twice, so that what the first time leaves behind would tell.
    """
    import cupy

    fixed = {name: array.copy() for name, array in batches[0].items()}
    work(fixed)  # compiled and loaded before the capture
    cupy.cuda.Device().synchronize()
    # A pool of its own, so that nobody else is given the memory of the workspaces.
    pool = cupy.cuda.MemoryPool()
    stream = cupy.cuda.Stream(non_blocking=True)
    with cupy.cuda.using_allocator(pool.malloc), stream:
        stream.begin_capture()
        results = work(fixed)
        graph = stream.end_capture()
    for batch in (*batches[1:], batches[0]):
        with stream:
            for name, array in fixed.items():
                array[...] = batch[name]
            for _ in range(2):
                graph.launch(stream=stream)
        stream.synchronize()
        yield results


def torch_replays(work: Callable[[Arrays], Any], batches: list[Arrays]) -> Iterator[Any]:
    """The same with torch tensors and torch's graphs."""
    import torch

    fixed = {name: tensor.clone() for name, tensor in batches[0].items()}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work(fixed)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work(fixed)
    for batch in (*batches[1:], batches[0]):
        for name, tensor in fixed.items():
            tensor.copy_(batch[name])
        for _ in range(2):
            graph.replay()
        torch.cuda.synchronize()
        yield results
