"""PyTorch's attention at the same sizes, over contiguous keys and values: torch has no paged cache.

``torch.nn.functional.scaled_dot_product_attention``, as it chooses and with each backend that takes the shape; GQA by
``enable_gqa``, a query after history by a causal mask from the lower right. The calls take turns over several sets of
keys and values, so that none is in a cache when it is read again, and are timed as ``timing.py`` says. Rows of
different lengths have no counterpart in it.
"""

import contextlib
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from .parts import Options, Report, short
from .timing import time_chain

CASES: dict[str, tuple[int, int, int]] = {
    "decode 64 x 1k": (64, 1, 1024),
    "decode 64 x 4k": (64, 1, 4096),
    "decode 256 x 1k": (256, 1, 1024),
    "decode 1 x 32k": (1, 1, 32768),
    "prefill 8k": (1, 8192, 8192),
    "prefill 2k": (1, 2048, 2048),
    "2k after 6k of history": (1, 2048, 8192),
}
"""Rows, query_len, seq_len; named as in ``attention.py``."""
SMOKE_CASES = {"decode 2 x 40": (2, 1, 40), "prefill 9 after 11": (1, 9, 20)}
HEADS, SMOKE_HEADS = (32, 8, 128), (4, 2, 64)
"""Query heads, KV heads, head_dim."""
BACKENDS: dict[str, SDPBackend | None] = {
    "torch sdpa": None,
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch cudnn": SDPBackend.CUDNN_ATTENTION,
}
SET_BYTES = 4 << 30


def run(report: Report, options: Options) -> None:
    """A figure for each case and backend; a backend that does not take a shape is no fault."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_heads, num_kv_heads, head_dim = SMOKE_HEADS if options.smoke else HEADS
    for name, (rows, query_len, seq_len) in (SMOKE_CASES if options.smoke else CASES).items():
        one_set = 2 * rows * num_kv_heads * seq_len * head_dim * 2
        num_sets = 2 if options.smoke else max(2, min(32, SET_BYTES // one_set))
        shape = (rows, num_kv_heads, seq_len, head_dim)
        sets = [[_random(shape, device) for _ in range(2)] for _ in range(num_sets)]
        q = _random((rows, num_heads, query_len, head_dim), device)
        for implementation, backend in BACKENDS.items():
            try:
                figures = _time(q, sets, backend, smoke=options.smoke)
            except RuntimeError as error:
                report.skip_figure(name, short(error), implementation=implementation)
            else:
                report.add(name, implementation=implementation, rows=rows, **figures)
        del sets, q


def _random(shape: tuple[int, ...], device: str) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def _time(q: torch.Tensor, sets: list[Any], backend: SDPBackend | None, *, smoke: bool) -> dict[str, float]:
    query_len, seq_len = q.shape[2], sets[0][0].shape[2]
    keywords: dict[str, Any] = {"enable_gqa": True}
    if query_len == seq_len:
        keywords["is_causal"] = True
    elif query_len > 1:
        keywords["attn_mask"] = causal_lower_right(query_len, seq_len)

    def call(_: Any) -> torch.Tensor:
        out = q
        for k, v in sets:
            out = scaled_dot_product_attention(q, k, v, **keywords)
        return out

    def wait(_: Any) -> None:
        if q.is_cuda:
            torch.cuda.synchronize()

    with torch.no_grad(), contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
        return time_chain(call, None, wait, smoke=smoke, target_s=0.04, repeats=5).microseconds(per=len(sets))
