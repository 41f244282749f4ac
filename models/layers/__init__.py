"""The parts of a decoder layer, each a small Flax NNX module or a pure function over arrays."""
