"""Trains three steps on one and on four virtual devices; run by `test_trainer.py`.

Prints JSON: by kind, the losses of both.
"""

import json
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
import jax
import tiny

from jaxdec.training import kinds
from jaxdec.training.trainer import Run


def main():
    jax.config.update("jax_default_matmul_precision", "highest")
    lm, folder = tiny.target(), Path(tempfile.mkdtemp())
    store = tiny.write_answers(folder / "store", 120)
    found = {}
    for kind in ("mtp", "dspark"):
        recipe = tiny.RECIPES[kind]
        objective = kinds.make_objective(recipe, lm, store)
        found[kind] = []
        for devices in (1, 4):
            mesh = jax.make_mesh((devices,), ("data",)) if devices > 1 else None
            run = Run(
                objective,
                recipe,
                store,
                folder / f"{kind}-{devices}",
                dtype="float32",
                mesh=mesh,
            )
            log = run.train(until=3).log
            found[kind].append([line["loss"] for line in log if "loss" in line])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
