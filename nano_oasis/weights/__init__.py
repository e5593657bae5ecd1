"""Files to tensors: finds a checkpoint, checks it, and loads it under canonical names."""

from nano_oasis.weights.errors import CheckpointError
from nano_oasis.weights.gguf_scan import read_gguf_metadata
from nano_oasis.weights.load import Checkpoint, load_checkpoint, load_config
from nano_oasis.weights.resolve import resolve_model

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "load_checkpoint",
    "load_config",
    "read_gguf_metadata",
    "resolve_model",
]
