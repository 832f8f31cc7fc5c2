"""The mask that transformers has made for rawattn, once for all layers of a kind."""

import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

Rule = Callable[..., Any]  # (batch, head, query, key) to whether the query may see the key


def mask_of_keys(
    batch_size: int,
    kv_length: int,
    q_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    *,
    mask_function: Rule | None = None,
    attention_mask: Tensor | None = None,
    config: Any = None,
    allow_is_bidirectional_skip: bool | None = None,
    use_vmap: bool = False,
    cache_position: Tensor | None = None,
    device: Any = None,
    **_: Any,
) -> Tensor | None:
    """What transformers calls for a registered name, and ``attend`` gets, one of

    None: each row is a sequence, of which all keys count, or offsets or positions say more;
    (batch,): how many tokens there are so far, of which the cache may keep the last alone;
    (batch, tokens so far), bool: which are no padding. For one query, whose place is known, and
    without chunks, whose places count, it is (batch, kv_length), the same while a cache fills;
    (batch, seqlen), int32: the number of each token's document in its row.

    Raises ValueError for what such masks cannot say: keys after a causal query (an image's tokens,
    prefixes), models' own rules, indexers, and for models that compute attention themselves.
    """
    if cache_position is not None:  # how the first of versions 5 say it
        q_length, q_offset, device = len(cache_position), cache_position[0], cache_position.device
    if attention_mask is not None and attention_mask.dim() == 1:
        return attention_mask  # of an earlier call: generate makes masks, and the model again
    _refuse_others(config)
    if torch.compiler.is_compiling():  # where nothing can look into a function
        if use_vmap and not _both_ways(config):
            _refuse(config, "has a mask of its own")
    elif mask_function is not None and (numbers := _documents(mask_function, config)) is not None:
        return numbers.to(torch.int32)
    if attention_mask is not None:
        mask = attention_mask[:, -kv_length:]
        if torch.compiler.is_compiling() or not mask.all():
            if getattr(config, "attention_chunk_size", None) is not None:
                return attention_mask
            return F.pad(mask, (0, kv_length - mask.shape[1])) if q_length == 1 else mask
        return None if attention_mask.shape[1] == kv_length else attention_mask.sum(1)
    if allow_is_bidirectional_skip is not None or (kv_offset == 0 and kv_length == q_length):
        return None
    seen = q_offset + q_length
    if isinstance(seen, Tensor):
        return seen.expand(batch_size)
    return None if seen == kv_length else torch.full((batch_size,), seen, device=device)


def _refuse_others(config: Any) -> None:
    """Models whose attention goes its own way, but whose mask comes from here."""
    name = type(config).__module__.replace(".configuration_", ".modeling_")
    modeling = sys.modules.get(name)
    if modeling is not None and not hasattr(modeling, "ALL_ATTENTION_FUNCTIONS"):
        _refuse(config, "computes attention itself, as those with ALiBi do")
    if getattr(config, "index_topk", None) is not None:
        _refuse(config, "chooses keys by an indexer, which wants a mask of pairs of tokens")


def _refuse(config: Any, what: str) -> NoReturn:
    raise ValueError(
        f"rawattn: {getattr(config, 'model_type', 'the model')} {what}, which is not supported; "
        'set attn_implementation to "sdpa" or "eager"'
    )


def _documents(rule: Rule, config: Any) -> Tensor | None:
    """Which document each token belongs to, where positions begin anew within a row.

    transformers composes the rule of a mask of functions in each other's closures. Windows, chunks
    and padding come to ``attend`` in other ways.
    """
    numbers = None
    for part in _parts(rule):
        name = part.__qualname__.split(".")[0]
        if name == "packed_sequence_mask_function":
            numbers = _tensor_of(part)
        elif _both_ways(config):
            continue
        elif name == "blockwise_overlay" and (_tensor_of(part) >= 0).any():
            _refuse(config, "has tokens that see each other both ways, as an image's do")
        elif part.__module__ != "transformers.masking_utils":
            _refuse(config, f"has a mask of its own, {part.__qualname__}")
    return numbers


def _both_ways(config: Any) -> bool:
    """Whether no layer is causal, which ``attend`` hears as well."""
    return getattr(config, "use_bidirectional_attention", None) in (True, "all")


def _parts(rule: Rule) -> Iterator[FunctionType]:
    if isinstance(rule, FunctionType):
        yield rule
        for cell in rule.__closure__ or ():
            inside = cell.cell_contents
            for each in inside if isinstance(inside, tuple) else (inside,):
                yield from _parts(each)


def _tensor_of(rule: FunctionType) -> Tensor:
    """The tensor that a rule looks into."""
    found = [cell.cell_contents for cell in rule.__closure__ or ()]
    return next(x for x in found if isinstance(x, Tensor))
