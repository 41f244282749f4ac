"""The least time that a step can take: bytes and floating point operations over a device's rates."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepWork:
    """What one device has to read and multiply. Bytes are of one device; so are heads and parameters."""

    weight_bytes: int
    """Read once in every step: all weights but experts, and but an embedding table that is not the head too."""
    layer_params: int
    """Weights that every token is multiplied by: all but experts."""
    head_params: int
    """Weights that every sampled row is multiplied by."""
    kv_bytes: int
    """Keys and values of one token in one layer."""
    query_size: int
    """Query heads times head_dim."""
    windows: tuple[int | None, ...]
    """Per layer, the tokens that a query sees; None: all."""
    num_experts: int = 0
    """Of each mixture; 0 where there is none."""
    experts_per_token: int = 0
    expert_bytes: int = 0
    """Of one expert, summed over the layers."""
    expert_params: int = 0
    """Weights of one expert, summed over the layers."""

    def weights_read(self, num_tokens: int) -> int:
        """Bytes of weights that a step of so many tokens reads: of experts those that some token chose.

        How many that are, if every token chooses freely: E (1 - (1 - k/E) ** tokens). Real ones have favourites.
        """
        if not self.num_experts:
            return self.weight_bytes
        missed = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.weight_bytes + int(self.num_experts * (1 - missed) * self.expert_bytes)

    @property
    def token_params(self) -> int:
        """Weights of the layers that one token is multiplied by."""
        return self.layer_params + self.experts_per_token * self.expert_params

    def attended(self, context: int) -> int:
        """Keys that a query after ``context`` tokens sees, summed over the layers."""
        return sum(context if window is None else min(context, window) for window in self.windows)

    def decode_bytes(self, num_rows: int, context: int) -> int:
        return self.weights_read(num_rows) + num_rows * self.attended(context) * self.kv_bytes

    def decode_flops(self, num_rows: int, context: int) -> int:
        products = 2 * (self.token_params + self.head_params)
        return num_rows * (products + 4 * self.query_size * self.attended(context))

    def prefill_flops(self, num_tokens: int) -> int:
        """Of one prompt from its start, in one step: on average a query sees half of it, or its window."""
        seen = sum(_mean_seen(num_tokens, window) for window in self.windows)
        return int(num_tokens * (2 * self.token_params + 4 * self.query_size * seen)) + 2 * self.head_params


def _mean_seen(num_tokens: int, window: int | None) -> float:
    whole = num_tokens if window is None else min(window, num_tokens)
    return (whole * (whole + 1) / 2 + (num_tokens - whole) * whole) / num_tokens


def floor_seconds(num_bytes: float, flops: float, bytes_per_s: float, flops_per_s: float) -> float:
    """Memory and arithmetic can overlap: the longer of the two."""
    return max(num_bytes / bytes_per_s, flops / flops_per_s)
