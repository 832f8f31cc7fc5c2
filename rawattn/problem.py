"""What one call computes, in plain numbers; built once from the arrays, read by all after."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """Shapes, dtype, mask and device of one packed attention call.

    ``dtype`` is "float16", "bfloat16", "float32" or "float64". ``window_left`` and
    ``window_right`` are inclusive distances around i + seqlen_k - seqlen_q, -1 is open; causal is
    ``window_right`` 0. ``arch`` is the compute capability as a number (90 for 9.0), 0 on the CPU;
    ``device`` the CUDA ordinal, -1 on the CPU. Nothing here depends on the content of cu_seqlens.
    """

    dtype: str
    batch: int
    total_q: int
    total_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    window_left: int
    window_right: int
    softmax_scale: float
    arch: int
    device: int

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads_q // self.num_heads_kv
