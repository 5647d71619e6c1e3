"""Says what a path holds: a language model, a drafter, or both in one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxdec.io.cache import open_checkpoint
from jaxdec.io.checkpoint import CheckpointError
from jaxdec.io.drafters.look import look
from jaxdec.io.drafters.read import open_drafter
from jaxdec.io.hub import resolve
from jaxdec.report.checkpoints import describe, describe_drafter, describe_native


def inspect(
    name: str,
    target: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """The facts of a model or a drafter, as JSON values.

    Args:
        name: a folder, a ``.gguf`` file, a built-in name or a Hub id.
        target: of a drafter: the model it is for; their pairing is checked.
        progress: told when something slow begins.

    Raises:
        CheckpointError: it cannot be opened, is not whole or not supported, or does
            not fit the target.
    """
    path = resolve(name, progress)
    if _is_drafter(path):
        config = None if target is None else open_checkpoint(target, progress).config
        return describe_drafter(look(open_drafter(path), config), name)
    if target is not None:
        raise CheckpointError(
            f"{name} is a whole model and no drafter, so a target has no meaning; "
            "leave it out"
        )
    checkpoint = open_checkpoint(name, progress)
    return describe(checkpoint) | describe_native(checkpoint)


def _is_drafter(path: Path) -> bool:
    """Whether a folder holds a drafter, and no model that it is part of."""
    if not path.is_dir() or not (path / "config.json").exists():
        return False
    try:
        stored = open_drafter(path)
    except CheckpointError:
        return False
    if stored.family != "mtp" or "speculators_model_type" in stored.values:
        return True
    try:
        open_checkpoint(path)
    except CheckpointError:
        return True  # Its model is of a kind that cannot be loaded.
    return False
