"""DeepSpeed's sequence parallelism around rawattn, on two gloo ranks: both of its Ulysses.

``DistributedAttention`` around ``varlen_attn``, and ``UlyssesSPAttentionHF`` (ALST) around the name
that ``register_with_transformers`` gives. The ranks cut the second document in two.
"""

import importlib
import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("deepspeed", minversion="0.19")

from rawattn.torch import hugging_face, varlen_attn  # noqa: E402
from tests.shared import ranks, tiny_models  # noqa: E402
from tests.shared.tiny_models import MODELS, all_apart, apart, expected  # noqa: E402

RANKS = 2
SERVED = ("llama", "gemma2")  # the second with windows and a softcap
FIRST = tiny_models.LENGTHS[0]


def begin() -> None:
    """Without DeepSpeed's reductions in shared memory: a C++ compiler makes them for 30 s."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # read when it is imported
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    importlib.import_module("deepspeed").init_distributed(dist_backend="gloo", verbose=False)


def own(x: Any, axis: int = 0) -> Any:
    """This rank's part."""
    return x.chunk(RANKS, axis)[torch.distributed.get_rank()]


# ---- DistributedAttention ------------------------------------------------------------------------


def distributed_attention() -> list[float]:
    """How far out, dq, dk and dv are from those of one process."""
    begin()
    layer = importlib.import_module("deepspeed.sequence.layer")
    generator = torch.Generator().manual_seed(0)
    offsets = torch.tensor((0, 5, 0, 23, 1, 19)).cumsum(0).int()
    q, k, v, dout = (
        torch.randn((48, heads, width), generator=generator, dtype=torch.float64)
        for heads, width in ((6, 8), (2, 8), (2, 16), (6, 16))
    )
    options = {"cu_seqlens_q": offsets, "causal": True, "window": (9, -1), "softcap": 3.0}
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    out = varlen_attn(*whole, **options)
    wanted = (out, *torch.autograd.grad(out, whole, dout))

    def local(q: Any, k: Any, v: Any, **given: Any) -> Any:
        return varlen_attn(q[0], k[0], v[0], **given)[None]

    group = torch.distributed.group.WORLD
    attention = layer.DistributedAttention(local, group, scatter_idx=2, gather_idx=1)
    parts = [own(x).clone().requires_grad_() for x in (q, k, v)]
    out = attention(*(x[None] for x in parts), 0, **options)[0]
    found = (out, *torch.autograd.grad(out, parts, own(dout)))
    return [apart(a, own(b)) for a, b in zip(found, wanted, strict=True)]


def test_distributed_attention() -> None:
    for found in ranks.run(distributed_attention, RANKS):
        assert isinstance(found, list), found
        assert max(found) < 1e-12


# ---- UlyssesSPAttentionHF ------------------------------------------------------------------------


def own_logits(model: Any, **changed: Any) -> Any:
    batch = {name: own(x, 1) for name, x in (tiny_models.packed() | changed).items()}
    return model(**batch, use_cache=False).logits[0]


def ulysses() -> tuple[dict[str, dict[str, float]], str]:
    """Of two models, how far they are from each document alone in one process; a third's error.

    They share what DeepSpeed takes from the first one's config: the numbers of heads and layers.
    """
    begin()
    hugging_face.register_with_transformers()
    models = {name: MODELS[name].build(hugging_face.NAME) for name in (*SERVED, "gpt_oss")}
    alone = {name: apart(own_logits(models[name]), own(expected(name)[0])) for name in SERVED}
    module = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")
    module.UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=models[SERVED[0]],
        core_attn_implementation=hugging_face.NAME,
        sequence_parallel_size=RANKS,
        micro_batch_size=1,
    )
    found = {n: {"no exchange": alone[n]} | distances(n, models[n]) for n in SERVED}
    try:
        own_logits(models["gpt_oss"])
    except ValueError as error:
        return found, str(error)
    return found, "nothing raised"


def distances(name: str, model: Any) -> dict[str, float]:
    logits, wanted = expected(name)
    rank_logits = own_logits(model)
    found = {"logits": apart(rank_logits, own(logits))}

    others = tiny_models.packed()["input_ids"]
    others[:, :FIRST] = others[:, :FIRST].flip(1) + 1
    moved = (own_logits(model, input_ids=others) - rank_logits).abs().amax(1)
    of_first = own(torch.arange(len(logits))) < FIRST
    found["the rest, by another first document"] = float(moved[~of_first].max())

    (rank_logits * own(tiny_models.cotangents(logits))).sum().backward()
    grads = tiny_models.of_parameters(model)
    for grad in grads.values():
        torch.distributed.all_reduce(grad)
    found["gradients"] = max(all_apart(grads, wanted).values())

    real = hugging_face.varlen_attn
    hugging_face.varlen_attn = tiny_models.mutants(hugging_face)["a leak between documents"][1]
    found["a leak"] = apart(own_logits(model), own(logits))
    hugging_face.varlen_attn = real
    return found


def test_ulysses() -> None:
    for rank, result in enumerate(ranks.run(ulysses, RANKS)):
        assert isinstance(result, tuple), result
        models, refused = result
        for found in models.values():
            assert found["logits"] < 2e-5
            assert found["gradients"] < 1e-4
            assert found["the rest, by another first document"] == 0
            assert found["a leak"] > 1e-2
            assert (found["no exchange"] > 1e-2) == (rank > 0)  # before the first there is nothing
        # DeepSpeed splits the heads of q, k and v alone.
        assert refused.startswith("sinks has shape (4,): expected (2,)")
