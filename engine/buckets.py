"""The only owner of compiled shapes.

A step is padded to the smallest bucket that holds it; each bucket is one compiled program.
Block tables have one width, so context length adds no buckets.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Bucket:
    """A compiled shape: ``num_tokens`` padded tokens (T) over ``num_rows`` padded rows (R)."""

    num_tokens: int
    num_rows: int
    decode_only: bool
    """One token a row, token i in row i."""

    def __str__(self) -> str:
        return f"{'decode' if self.decode_only else 'mixed'}[{self.num_tokens}x{self.num_rows}]"


def geometric_sizes(first: int, limit: int) -> tuple[int, ...]:
    """``first``, doubled while below ``limit``, then ``limit`` itself: neighbours differ by at most 2 (rule R17)."""
    sizes = [min(first, limit)]
    while sizes[-1] < limit:
        sizes.append(min(sizes[-1] * 2, limit))
    return tuple(sizes)


class BucketTable:
    """All buckets of an engine; the largest are exactly the configured limits."""

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        *,
        decode_sizes: Sequence[int] | None = None,
        mixed_sizes: Sequence[int] | None = None,
        mixed_serves_decode: bool = False,
    ) -> None:
        """``mixed_serves_decode``: there are no decode buckets of the sizes that mixed ones have. Attention in plain
        JAX on a CPU does the same work in both, and with fewer programs it starts sooner."""
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(f"{max_num_batched_tokens=} must be at least {max_num_seqs=}: every row gets a token")
        decode_sizes = decode_sizes or geometric_sizes(1, max_num_seqs)
        mixed_sizes = mixed_sizes or geometric_sizes(32, max_num_batched_tokens)
        assert decode_sizes[-1] == max_num_seqs
        assert mixed_sizes[-1] == max_num_batched_tokens
        if mixed_serves_decode:
            decode_sizes = [size for size in decode_sizes if size < mixed_sizes[0]]
        self.mixed = tuple(Bucket(size, min(size, max_num_seqs), decode_only=False) for size in mixed_sizes)
        self.decode = tuple(Bucket(size, size, decode_only=True) for size in decode_sizes)

    @property
    def all(self) -> tuple[Bucket, ...]:
        return self.decode + self.mixed

    def select(self, num_tokens: int, num_rows: int, *, decode_only: bool) -> Bucket:
        """The smallest bucket that holds the step. Forks make more rows than tokens, hence both bounds."""
        for bucket in self.all if decode_only else self.mixed:
            if num_tokens <= bucket.num_tokens and num_rows <= bucket.num_rows:
                return bucket
        raise AssertionError(f"no bucket for {num_tokens} tokens in {num_rows} rows: the scheduler overran its limits")
