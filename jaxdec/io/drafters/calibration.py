"""The temperatures of a confidence head, beside its weights.

No format of a drafter has a place for them; SGLang reads such a file.
"""

import dataclasses
import json
from pathlib import Path

from jaxdec.io.checkpoint import CheckpointError
from jaxdec.io.drafters.checkpoint import DrafterCheckpoint

FILE = "calibration.json"


def write_calibration(folder: Path, checkpoint: DrafterCheckpoint) -> None:
    """Writes the temperatures of a drafter that has some; else removes the file."""
    (folder / FILE).unlink(missing_ok=True)
    temperatures = getattr(checkpoint.config, "temperatures", ())
    if temperatures:
        text = json.dumps({"temperatures": list(temperatures)})
        (folder / FILE).write_text(text + "\n")


def read_calibration(folder: Path, checkpoint: DrafterCheckpoint) -> DrafterCheckpoint:
    """The drafter with the temperatures that lie beside it, if there are any.

    Raises:
        CheckpointError: the file does not fit the drafter.
    """
    path = folder / FILE
    if checkpoint.family != "block" or not path.exists():
        return checkpoint
    config = checkpoint.config
    if config.confidence == "none":
        return checkpoint
    try:
        values = json.loads(path.read_text())["temperatures"]
        temperatures = tuple(float(x) for x in values)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} holds no temperatures ({error}); remove it, or calibrate anew"
        ) from error
    if len(temperatures) != config.max_length or min(temperatures) <= 0:
        raise CheckpointError(
            f"{path} has {len(temperatures)} temperatures, and the drafter drafts "
            f"{config.max_length} tokens; all must be above 0. Remove the file, or "
            "calibrate anew"
        )
    config = dataclasses.replace(config, temperatures=temperatures)
    facts = checkpoint.facts | {"temperatures": list(temperatures)}
    return dataclasses.replace(checkpoint, config=config, facts=facts)
