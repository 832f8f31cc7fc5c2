"""softcap, sinks and seqused_k through the public functions, on arrays in host memory."""

import inspect

import numpy as np
import pytest

import rawattn
from rawattn.reference import dense, second
from tests.host.test_reference_options import CU_K, CU_Q, HEADS_Q, USED, cotangents, drawn

OPTIONS = {
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": drawn(5)[3]},
    "seqused_k": {"seqused_k": np.array(USED)},
    "all": {"softcap": 2, "sinks": drawn(5)[3], "seqused_k": np.array(USED, np.int32)},
}
FUNCTIONS = (rawattn.forward, rawattn.backward, rawattn.jvp, rawattn.double_backward)
named = pytest.mark.parametrize("name", OPTIONS)


def offsets():
    return CU_Q.astype(np.int32), CU_K.astype(np.int32)


def equal(found, exact):
    for got, wanted in zip(found, exact, strict=True):
        np.testing.assert_array_equal(got, wanted)


@named
def test_they_reach_the_reference(name):
    options, (cu_q, cu_k) = OPTIONS[name], offsets()
    *qkv, tsinks = drawn(1)
    us, (dout, dlse) = drawn(3), cotangents()
    mask = {"causal": True, "cu_seqlens_k": cu_k} | options
    exact = {"window": (-1, 0)} | options
    out, lse = rawattn.forward(*qkv, cu_q, return_lse=True, **mask)
    equal((out, lse), dense.forward(*qkv, cu_q, cu_k, **exact))
    passed = (dout, *qkv, out, lse, cu_q)
    found = rawattn.backward(*passed, dlse=dlse, **mask)
    assert len(found) == 3 + ("sinks" in options)
    equal(found, dense.backward(*passed, cu_k, dlse=dlse, **exact))
    t = {"tsinks": tsinks} if "sinks" in options else {}
    equal(
        rawattn.jvp(*qkv, *us[:3], cu_q, **mask, **t),
        second.jvp(*qkv, *us[:3], cu_q, cu_k, **exact, **t),
    )
    dd = {f"dd{name[1:]}": x for name, x in t.items()}
    found = rawattn.double_backward(*us[:3], *passed, dlse=dlse, **mask, **dd)
    assert len(found) == 5 + ("sinks" in options)
    equal(found, second.double_backward(*us[:3], *passed, cu_k, dlse=dlse, **exact, **dd))


def test_no_softcap_is_none_or_0():
    *qkv, _ = drawn(1)
    cu_q, cu_k = offsets()
    plain = rawattn.forward(*qkv, cu_q, cu_seqlens_k=cu_k)
    for none in (None, 0, 0.0):
        equal((rawattn.forward(*qkv, cu_q, cu_seqlens_k=cu_k, softcap=none),), (plain,))


def test_queries_without_any_key_at_all():
    """Sinks are then all of the denominator."""
    q, k, v, sinks = drawn(1)
    cu_q, cu_k = offsets()
    out, lse = rawattn.forward(
        *(q, k[:0], v[:0], cu_q), cu_seqlens_k=cu_k * 0, sinks=sinks, return_lse=True
    )
    assert not out.any()
    equal((lse[:, : cu_q[-1]],), (np.repeat(sinks[:, None], cu_q[-1], 1),))
    assert (lse[:, cu_q[-1] :] == -np.inf).all()
    dout, dlse = cotangents()
    *_, dsinks = rawattn.backward(
        *(dout, q, k[:0], v[:0], out, lse, cu_q), cu_seqlens_k=cu_k * 0, sinks=sinks, dlse=dlse
    )
    np.testing.assert_allclose(dsinks, dlse[:, : cu_q[-1]].sum(1), rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_gradients_of_sinks_have_their_dtype_and_place(dtype):
    *qkv, sinks = drawn(1)
    sinks, (cu_q, cu_k) = sinks.astype(dtype), offsets()
    given = {"cu_seqlens_k": cu_k, "sinks": sinks}
    passed = rawattn.forward(*qkv, cu_q, return_lse=True, **given)
    room = np.empty_like(sinks)
    found = rawattn.backward(cotangents()[0], *qkv, *passed, cu_q, dsinks=room, **given)
    assert found[3] is room
    exact = dense.backward(cotangents()[0], *qkv, *passed, cu_q, cu_k, sinks=sinks)[3]
    equal((room,), (exact.astype(dtype),))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"softcap": -1.0}, ValueError, r"softcap is -1.0: expected a positive"),
        ({"softcap": "2"}, TypeError, "softcap is a str"),
        ({"sinks": np.zeros(HEADS_Q + 1)}, ValueError, r"sinks has shape \(5,\): expected \(4,\)"),
        ({"sinks": np.zeros(HEADS_Q, int)}, TypeError, "sinks has dtype int64: expected"),
        ({"seqused_k": np.zeros(2, int)}, ValueError, r"seqused_k has shape \(2,\).*batch"),
        ({"seqused_k": np.zeros(5)}, TypeError, "seqused_k has dtype float64: expected int32"),
    ],
    ids=str,
)
def test_bad_values(options, error, text):
    *qkv, _ = drawn(1)
    cu_q, cu_k = offsets()
    with pytest.raises(error, match=text):
        rawattn.forward(*qkv, cu_q, cu_seqlens_k=cu_k, **options)


def test_a_direction_of_sinks_goes_with_sinks():
    *qkv, sinks = drawn(1)
    cu_q, cu_k = offsets()
    with pytest.raises(ValueError, match="tsinks is given without sinks"):
        rawattn.jvp(*qkv, *qkv, cu_q, cu_seqlens_k=cu_k, tsinks=sinks)


def test_every_function_of_attention_has_them():
    for function in FUNCTIONS:
        assert {"softcap", "sinks", "seqused_k"} <= set(inspect.signature(function).parameters)
