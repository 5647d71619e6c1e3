"""Reads ``pytorch_model.bin``: pickled tensors, which EAGLE's first releases come as.

A pickle can run any program when it is opened. PyTorch has a reader that only accepts
tensors, and nothing else here opens such files; so they are read where PyTorch is
installed, and must be converted where it is not.
"""

from pathlib import Path

import ml_dtypes
import numpy as np

from jaxdec.io.checkpoint import CheckpointError

_CONVERT = (
    'convert it where PyTorch is installed: python -c "import torch, '
    "safetensors.torch as s; s.save_file({k: v.contiguous() for k, v in torch.load("
    "'pytorch_model.bin', map_location='cpu', weights_only=True).items()}, "
    "'model.safetensors')\""
)


def read_torch_file(path: str | Path) -> dict[str, np.ndarray]:
    """All tensors of a pickled checkpoint, by name, in the number formats stored.

    Raises:
        CheckpointError: PyTorch is not installed, or the file is damaged or holds
            anything but named tensors.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; fetch the whole release.")
    try:
        import torch
    except ImportError:
        raise CheckpointError(
            f"{path} holds pickled tensors, which only PyTorch can read safely, and "
            f"PyTorch is not installed; install it, or {_CONVERT}"
        ) from None
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # Whatever a damaged or foreign pickle provokes.
        raise CheckpointError(
            f"{path} cannot be read as tensors only ({error}); it is damaged, or holds "
            "more than weights. Use a release in safetensors."
        ) from error
    is_tensors = isinstance(stored, dict) and all(
        isinstance(value, torch.Tensor) for value in stored.values()
    )
    if not is_tensors:
        raise CheckpointError(
            f"{path} holds something else than named tensors; use a release that has "
            "the weights alone."
        )
    return {name: _as_numpy(tensor, torch) for name, tensor in stored.items()}


def _as_numpy(tensor, torch) -> np.ndarray:
    """The same bits; NumPy itself knows no bfloat16."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
