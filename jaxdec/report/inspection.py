"""Says what a path holds: a language model, a drafter, or both in one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxdec.io.cache import open_checkpoint
from jaxdec.io.checkpoint import CheckpointError
from jaxdec.io.drafters.look import look
from jaxdec.io.drafters.own import is_own, read_own
from jaxdec.io.drafters.read import StoredDrafter, open_drafter
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
    if path.is_dir() and is_own(path):
        found = None if target is None else open_checkpoint(target, progress)
        config, content = (found.config, found.content_hash) if found else (None, "")
        checkpoint, card = read_own(path, config, content)
        return describe_drafter(checkpoint, name) | {"card": card}
    stored = _drafter_in(path)
    if stored is not None:
        config = None if target is None else open_checkpoint(target, progress).config
        return describe_drafter(look(stored, config), name)
    if target is not None:
        raise CheckpointError(
            f"{name} is a whole model and no drafter, so a target has no meaning; "
            "leave it out"
        )
    checkpoint = open_checkpoint(name, progress)
    return describe(checkpoint) | describe_native(checkpoint)


def _drafter_in(path: Path) -> StoredDrafter | None:
    """The drafter in a folder; None if it is a model, or part of one."""
    if not path.is_dir() or not (path / "config.json").exists():
        return None
    try:
        stored = open_drafter(path)
    except CheckpointError as error:
        reason = error
    else:
        if stored.family != "mtp" or "speculators_model_type" in stored.values:
            return stored
        reason = None
    try:
        open_checkpoint(path)
    except CheckpointError as error:
        if reason is None:
            return stored  # Its model is of a kind that cannot be loaded.
        raise CheckpointError(f"as a model: {error}\nAs a drafter: {reason}") from error
    return None
