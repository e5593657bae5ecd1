"""The weights of a linear layer, in whatever format they are kept.

Owns: what else than multiplying is done with them. Must not know: products (linear.py), the model, files.

A tensor [out, in] in float32, float16 or bfloat16, or a PackedWeight. Activations have a dtype of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nano_oasis.kernels.packed_weight import PackedWeight

Matrix = torch.Tensor | PackedWeight


def rows_of(matrix: Matrix, ids: torch.Tensor | slice, dtype: torch.dtype) -> torch.Tensor:
    """Those rows as numbers of that type [n, in]."""
    return matrix[ids].to(dtype)


def take(matrix: Matrix, ids: torch.Tensor) -> Matrix:
    """Those rows, a copy in the same format."""
    return matrix.take(ids) if isinstance(matrix, PackedWeight) else matrix[ids].contiguous()


def join(parts: Sequence[Matrix]) -> Matrix:
    """The rows of all, one after another. What no format holds together becomes float32."""
    if all(isinstance(p, PackedWeight) for p in parts):
        return PackedWeight.joined([p for p in parts if isinstance(p, PackedWeight)])
    tensors = [p[:] if isinstance(p, PackedWeight) else p for p in parts]
    if len({t.dtype for t in tensors}) > 1:
        tensors = [t.float() for t in tensors]
    return torch.cat(tensors)


def parts_of(matrix: Matrix) -> list[torch.Tensor]:
    """The tensors it consists of."""
    return matrix.parts() if isinstance(matrix, PackedWeight) else [matrix]


def rebuilt(matrix: Matrix, parts: Sequence[torch.Tensor]) -> Matrix:
    """The same matrix of other tensors that hold the same."""
    return PackedWeight(*parts) if isinstance(matrix, PackedWeight) else parts[0]
