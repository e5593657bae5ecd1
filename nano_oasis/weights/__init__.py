"""Files to tensors: finds a checkpoint, checks it, and loads it under canonical names."""

from nano_oasis.weights.errors import CheckpointError
from nano_oasis.weights.gguf_scan import read_gguf_metadata

__all__ = ["CheckpointError", "read_gguf_metadata"]
