"""What the attention operations refuse, and that layers share one trace."""

import jax
import jax.numpy as jnp
import pytest

from octavo.pallas_kernels.paged_attention import paged_attention
from octavo.pallas_kernels.ragged_paged_attention import ragged_paged_attention


def arguments(**changes) -> dict:
    args = {
        "q": jnp.zeros((2, 6, 8)),
        "kv": jnp.zeros((5, 2, 3, 4, 8)),
        "block_tables": jnp.zeros((2, 3), jnp.int32),
        "seq_lens": jnp.zeros(2, jnp.int32),
        "scale": 1.0,
    }
    return {**args, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": jnp.zeros((2, 48))}, r"q must be .* got shape \(2, 48\)"),
        ({"q": jnp.zeros((2, 7, 8))}, "7 query heads .* 3 KV heads"),
        ({"q": jnp.zeros((2, 6, 16))}, "q has head_dim 16 but kv has 8"),
        ({"q": jnp.zeros((2, 6, 8), jnp.int32)}, "q must be floating point; got int32"),
        ({"q": jnp.zeros((3, 6, 8))}, "3 queries and 2 rows"),
        ({"kv": jnp.zeros((5, 3, 3, 4, 8))}, r"kv must be .* got shape \(5, 3, 3, 4, 8\)"),
        ({"kv": jnp.zeros((0, 2, 3, 4, 8))}, "no dimension may be 0"),
        ({"block_tables": jnp.zeros((2, 3))}, "block_tables must be int32; got float32"),
        ({"block_tables": jnp.zeros((3, 3), jnp.int32)}, r"got shapes \(3, 3\) and \(2,\)"),
        ({"seq_lens": jnp.zeros(2, jnp.uint32)}, "seq_lens must be int32; got uint32"),
        ({"sinks": jnp.zeros(3)}, r"sinks must be \[6\].*got shape \(3,\)"),
        ({"scale": float("nan")}, "scale must be finite; got nan"),
        ({"window": 0}, "window must be at least 1; got 0"),
        ({"softcap": 0.0}, "softcap must be positive and finite; got 0.0"),
        ({"softcap": float("inf")}, "softcap must be positive and finite; got inf"),
        ({"implementation": "triton"}, "must be one of xla, mosaic; got 'triton'"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        paged_attention(**arguments(**changes))


@pytest.mark.parametrize("bad", [jnp.zeros(2, jnp.int32), jnp.zeros(3)])
def test_bad_query_start_loc_is_named(bad):
    with pytest.raises(ValueError, match=r"query_start_loc must be int32 \[3\] for 2 rows"):
        ragged_paged_attention(**arguments(query_start_loc=bad))


def test_mosaic_refuses_what_it_cannot_serve():
    with pytest.raises(ValueError, match="head_dim 8: the mosaic kernels take"):
        paged_attention(**arguments(implementation="mosaic"))


def test_layers_share_one_trace():
    """Equal shapes and options: the second call reuses the first one's trace. Another window needs its own."""

    def three_layers(q, kv, block_tables, seq_lens):
        for window in (None, None, 3):
            q = paged_attention(q, kv, block_tables, seq_lens, scale=1.0, window=window)
        return q

    args = arguments()
    args.pop("scale")
    calls = [e.params["jaxpr"] for e in jax.make_jaxpr(three_layers)(**args).eqns if "jaxpr" in e.params]
    assert len(calls) == 3
    assert calls[0] is calls[1]
    assert calls[0] is not calls[2]


def test_work_of_another_implementation_is_refused():
    work = jnp.zeros((4, 4), jnp.int32)
    with pytest.raises(ValueError, match="takes a RowPlan as work"):
        paged_attention(**arguments(work=work))
    with pytest.raises(ValueError, match="takes a TokenPlan as work"):
        ragged_paged_attention(**arguments(work=work, query_start_loc=jnp.zeros(3, jnp.int32)))
