"""The one training loop: batches, steps, validation, checkpoints that go on exactly.

Weights are kept in float32 and computed with in the target's dtype. A step's loss is
the sum over the whole batch divided by the weight of the whole batch, wherever its rows
are: on a mesh each device sums over its own rows, the sums are added, and then divided.
What a step reads is a function of the seed and its number, and a checkpoint has the
weights, the optimiser's state and the number: so a run that is killed goes on as if
nothing had happened, and the losses are the same to the last bit.
"""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdec.io.checkpoint import CheckpointError
from jaxdec.io.orbax import load_metadata, load_params, save_params
from jaxdec.models.sharding import DATA, check_mesh
from jaxdec.training.acceptance import Validation
from jaxdec.training.batches import Batch, Order, Slice, make_batch
from jaxdec.training.objective import Losses, Objective
from jaxdec.training.optimiser import make_optimiser, schedule
from jaxdec.training.recipe import Recipe
from jaxdec.training.store import TokenStore
from jaxdec.types import Params

KEPT = 2
"""Checkpoints that are not removed."""

Progress = Callable[[int, int, str], None]


class Trained(NamedTuple):
    """What a run came to."""

    own: Params
    """The drafter's arrays, in the dtype that they are computed in."""
    step: int
    log: list[dict[str, Any]]
    """Of every step and validation, oldest first; what is in ``log.jsonl``."""

    @property
    def validation(self) -> dict[str, Any]:
        """The latest; empty if there was none."""
        found = [line["validation"] for line in self.log if "validation" in line]
        return found[-1] if found else {}


class Programs(NamedTuple):
    """The compiled parts of a run."""

    step: Callable[..., tuple[Params, dict]]
    """``(state, fixed, frozen, batch, keys) -> (state, figures)``; gives up `state`."""
    right: Callable[..., Any]
    """``(own, fixed, frozen, batch) -> [B, T, K]``."""
    start: Callable[[jax.Array], tuple[Params, Params]]
    """``(key) -> (state, fixed)``."""
    compute: Callable[[Params, Params], Params]
    """``(own, fixed)``: the arrays in the dtype that they are computed in."""


def make_programs(
    objective: Objective, recipe: Recipe, dtype: str, mesh: Mesh | None = None
) -> Programs:
    """What a run computes, jitted.

    Args:
        objective: what is trained.
        recipe: how.
        dtype: of the target's weights.
        mesh: devices to split the rows of a batch over, by its axis ``"data"``.
    """
    optimiser = make_optimiser(recipe, dtype)
    kinds = jax.tree.map(
        lambda x: x.dtype, jax.eval_shape(objective.init, jax.random.key(0))
    )

    def start(key):
        own = objective.init(key)
        fixed = {name: own.pop(name) for name in objective.fixed if name in own}
        own = jax.tree.map(lambda x: x.astype(jnp.float32), own)
        return {"own": own, "optimiser": optimiser.init(own)}, fixed

    def compute(own, fixed):
        wanted = {name: kinds[name] for name in own}
        own = jax.tree.map(lambda x, kind: x.astype(kind), own, wanted)
        return own | fixed

    def sums(own, fixed, frozen, batch, keys):
        def loss(own):
            found = objective.losses(compute(own, fixed), frozen, batch, keys)
            return found.loss, found

        (_, found), gradient = jax.value_and_grad(loss, has_aux=True)(own)
        return found, gradient

    def over_mesh(own, fixed, frozen, batch, keys):
        return jax.lax.psum(sums(own, fixed, frozen, batch, keys), DATA)

    if mesh is not None:
        whole, rows = PartitionSpec(), PartitionSpec(DATA)
        all_sums = jax.shard_map(
            over_mesh,
            mesh=mesh,
            in_specs=(whole, whole, whole, rows, rows),
            out_specs=whole,
            check_vma=False,
        )
    else:
        all_sums = sums

    def step(state, fixed, frozen, batch, keys):
        found, gradient = all_sums(state["own"], fixed, frozen, batch, keys)
        found = Losses(*found)
        weight = jnp.maximum(found.weight, 1e-6)
        gradient = jax.tree.map(lambda x: x / weight, gradient)
        updates, optimised = optimiser.update(
            gradient, state["optimiser"], state["own"]
        )
        own = optax.apply_updates(state["own"], updates)
        figures = {
            "loss": found.loss / weight,
            "gradient_norm": optax.tree.norm(gradient),
            **{k: x / jnp.maximum(n, 1e-6) for k, (x, n) in found.figures.items()},
        }
        return {"own": own, "optimiser": optimised}, figures

    def right(own, fixed, frozen, batch):
        return objective.right(compute(own, fixed), frozen, batch)

    return Programs(
        step=jax.jit(step, donate_argnums=0),
        right=jax.jit(right),
        start=jax.jit(start),
        compute=jax.jit(compute),
    )


class Run:
    """A training run in a folder."""

    def __init__(
        self,
        objective: Objective,
        recipe: Recipe,
        store: TokenStore,
        folder: str | Path,
        *,
        dtype: str,
        target: str = "",
        features: Callable[[int], np.ndarray] | None = None,
        mesh: Mesh | None = None,
        programs: Programs | None = None,
        begin: Params | None = None,
    ):
        """Begins a run, or goes on with the one in the folder.

        Args:
            objective: what is trained.
            recipe: how.
            store: on what.
            folder: for checkpoints and ``log.jsonl``.
            dtype: of the target's weights.
            target: the hash of the target's content.
            features: of every record, if they are kept; None computes them.
            mesh: devices to split batches over.
            begin: arrays to begin with, where there is no run yet; what is not among
                them is the objective's.
            programs: of the same objective, recipe, dtype and mesh, compiled before.

        Raises:
            CheckpointError: the folder holds a run of something else.
            ValueError: batches that do not divide by the devices.
        """
        self.objective, self.recipe, self.store = objective, recipe, store
        self.dtype = dtype
        self.folder, self.features = Path(folder), features
        self.mesh = None if mesh is None else check_mesh(mesh)
        devices = 1 if mesh is None else self.mesh.shape.get(DATA, 1)
        if recipe.batch_size % devices:
            raise ValueError(
                f"batch_size {recipe.batch_size} does not divide by the {devices} "
                'devices of the mesh\'s axis "data"; choose one that does'
            )
        train, kept = store.split(recipe.num_validation)
        if recipe.with_prompts:
            self.store = store.with_prompts()
        common = dict(lengths=store.length, batch_size=recipe.batch_size)
        self.order = Order(
            records=train,
            seed=recipe.seed,
            num_buckets=recipe.num_buckets,
            **common,
        )
        self.checked = Order(
            records=kept, seed=0, num_buckets=recipe.num_buckets, **common
        )
        if programs is None:
            programs = make_programs(objective, recipe, dtype, self.mesh)
        self.programs = programs
        self.frozen = objective.frozen
        facts = {
            "recipe": recipe.to_dict(),
            "tokens": store.content_hash(),
            "target": target,
            "dtype": dtype,
        }
        self.facts = json.loads(json.dumps(facts))  # As it comes back.
        self.state, self.fixed = self.programs.start(jax.random.key(recipe.seed))
        if begin is not None:
            own = {name: begin.get(name, x) for name, x in self.state["own"].items()}
            # Copies, for a step gives its state up.
            own = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), own)
            self.state = self.state | {"own": own}
        if self.mesh is not None:
            place = NamedSharding(self.mesh, PartitionSpec())
            trees = (self.state, self.fixed, self.frozen)
            self.state, self.fixed, self.frozen = jax.device_put(trees, place)
        self.step, self.log = 0, []
        found = self._checkpoints()
        if found:
            self._restore(found[-1])

    def train(
        self, progress: Progress | None = None, until: int | None = None
    ) -> Trained:
        """Runs to the recipe's last step, or to `until`."""
        last = self.recipe.steps if until is None else min(until, self.recipe.steps)
        if self.step == 0 and not self.log:
            self._write_log(self.validate())
        rates, batches = schedule(self.recipe), self.order.from_step(self.step)
        while self.step < last:
            begun = time.perf_counter()
            batch = self._batch(next(batches))
            keys = jax.random.split(
                jax.random.fold_in(jax.random.key(self.recipe.seed), self.step),
                self.recipe.batch_size,
            )
            self.state, figures = self.programs.step(
                self.state, self.fixed, self.frozen, batch, self.rows(keys)
            )
            figures = {k: round(float(x), 6) for k, x in figures.items()}
            self._check(figures)
            line = {
                "step": self.step,
                **figures,
                "learning_rate": round(float(rates(self.step)), 8),
                "tokens": int(batch.length.sum()),
                "length": batch.tokens.shape[1],
                "seconds": round(time.perf_counter() - begun, 4),
            }
            self.step += 1
            self._write_log(line)
            is_last = self.step == self.recipe.steps
            if is_last or self.step % self.recipe.validate_every == 0:
                self._write_log(self.validate())
            if is_last or self.step % self.recipe.save_every == 0:
                self.save()
            if progress is not None:
                progress(self.step, self.recipe.steps, self._text(line))
        return self.trained

    @property
    def trained(self) -> Trained:
        """What the run has come to so far."""
        own = self.programs.compute(self.state["own"], self.fixed)
        return Trained(own=own, step=self.step, log=self.log)

    def validate(self) -> dict[str, Any]:
        """A line of the log: acceptance on answers that are not trained on."""
        begun = time.perf_counter()
        found = Validation(self.objective.draft_length)
        for part in self.checked.once():
            batch = self.host_batch(part)
            right = self.programs.right(
                self.state["own"], self.fixed, self.frozen, batch
            )
            found.add(batch, np.asarray(right))
        seconds = round(time.perf_counter() - begun, 3)
        return {
            "step": self.step,
            "validation": found.summary(),
            "validation_seconds": seconds,
        }

    def save(self) -> None:
        """Writes a checkpoint, whole or not at all, and removes old ones."""
        path = self.folder / "checkpoints" / f"{self.step:08d}"
        if path.exists():
            return
        save_params(path, self.state, self.facts | {"step": self.step})
        for old in self._checkpoints()[:-KEPT]:
            shutil.rmtree(old)

    def _checkpoints(self) -> list[Path]:
        found = (self.folder / "checkpoints").glob("[0-9]" * 8)
        return sorted(path for path in found if path.is_dir())

    def _restore(self, path: Path) -> None:
        facts = load_metadata(path)
        wrong = [name for name in self.facts if facts.get(name) != self.facts[name]]
        if wrong:
            raise CheckpointError(
                f"{self.folder} holds a run with another {' and '.join(wrong)}; go on "
                "with what it was begun with, or name another folder"
            )
        state, _ = load_params(path, self.state)
        place = jax.tree.map(lambda x: x.sharding, self.state)
        self.state, self.step = jax.device_put(state, place), facts["step"]
        lines = (self.folder / "log.jsonl").read_text().splitlines()
        # A validation after the last step belongs to it; what came later is redone.
        for text in lines:
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                break  # It was killed while it wrote this.
            is_done = line["step"] < self.step or (
                "validation" in line and line["step"] <= self.step
            )
            if is_done:
                self.log.append(line)
        partial = self.folder / "log.partial"
        partial.write_text("".join(json.dumps(line) + "\n" for line in self.log))
        os.replace(partial, self.folder / "log.jsonl")

    def _write_log(self, line: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        mode = "a" if self.log else "w"
        self.log.append(line)
        with open(self.folder / "log.jsonl", mode) as file:
            file.write(json.dumps(line) + "\n")

    def host_batch(self, part: Slice) -> Batch:
        """The batch of a slice."""
        return make_batch(self.store, part, self.recipe.batch_size, self.features)

    def _batch(self, part) -> Batch:
        return self.rows(self.host_batch(part))

    def rows(self, tree: Any) -> Any:
        """Puts rows onto the devices of the mesh."""
        if self.mesh is None:
            return tree
        return jax.device_put(tree, NamedSharding(self.mesh, PartitionSpec(DATA)))

    def _check(self, figures: dict[str, float]) -> None:
        bad = [
            name for name in ("loss", "gradient_norm") if not np.isfinite(figures[name])
        ]
        if bad:
            raise FloatingPointError(
                f"{bad[0]} is {figures[bad[0]]} at step {self.step}; lower the "
                f"learning rate (now {self.recipe.learning_rate}) or clip, and start "
                "anew"
            )

    def _text(self, line: dict[str, Any]) -> str:
        text = (
            f"loss {line['loss']:.3f}, {line['tokens'] / line['seconds']:.0f} tokens/s"
        )
        found = [x["validation"] for x in self.log if "validation" in x]
        if found:
            text += f", {found[-1]['tokens_per_step']:.2f} tokens a step"
        return text
