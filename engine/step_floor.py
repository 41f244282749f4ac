"""The least time that a step can take: bytes and floating point operations over a device's rates."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepWork:
    """What one device has to read and multiply. Bytes are of one device; so are heads and parameters."""

    weight_bytes: int
    """Read once in every step: all weights but an embedding table that is not the head too."""
    layer_params: int
    """Weights that every token is multiplied by."""
    head_params: int
    """Weights that every sampled row is multiplied by."""
    kv_bytes: int
    """Keys and values of one token in one layer."""
    query_size: int
    """Query heads times head_dim."""
    windows: tuple[int | None, ...]
    """Per layer, the tokens that a query sees; None: all."""

    def attended(self, context: int) -> int:
        """Keys that a query after ``context`` tokens sees, summed over the layers."""
        return sum(context if window is None else min(context, window) for window in self.windows)

    def decode_bytes(self, num_rows: int, context: int) -> int:
        return self.weight_bytes + num_rows * self.attended(context) * self.kv_bytes

    def decode_flops(self, num_rows: int, context: int) -> int:
        products = 2 * (self.layer_params + self.head_params)
        return num_rows * (products + 4 * self.query_size * self.attended(context))

    def prefill_flops(self, num_tokens: int) -> int:
        """Of one prompt from its start, in one step: on average a query sees half of it, or its window."""
        seen = sum(_mean_seen(num_tokens, window) for window in self.windows)
        return int(num_tokens * (2 * self.layer_params + 4 * self.query_size * seen)) + 2 * self.head_params


def _mean_seen(num_tokens: int, window: int | None) -> float:
    whole = num_tokens if window is None else min(window, num_tokens)
    return (whole * (whole + 1) / 2 + (num_tokens - whole) * whole) / num_tokens


def floor_seconds(num_bytes: float, flops: float, bytes_per_s: float, flops_per_s: float) -> float:
    """Memory and arithmetic can overlap: the longer of the two."""
    return max(num_bytes / bytes_per_s, flops / flops_per_s)
