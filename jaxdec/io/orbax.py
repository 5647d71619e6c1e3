"""Saves and restores trees of parameters with Orbax, exactly.

What is stored is a flat record: one array per leaf, in its own number format, and a
JSON description of where each leaf sits in the tree. So a tree comes back as it was
(integer keys stay integers, lists stay lists) without the code that made it, and
a checkpoint that does not fit the code is reported leaf by leaf.
"""

import contextlib
import hashlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import tree_util

from jaxdec.io.checkpoint import CheckpointError


def _steps(path: tuple[Any, ...]) -> list[Any]:
    """A key path as JSON: a string, an integer key, or ``[i]`` for a list's entry."""
    steps: list[Any] = []
    for entry in path:
        if isinstance(entry, tree_util.SequenceKey):
            steps.append([entry.idx])
        elif isinstance(entry, tree_util.GetAttrKey):
            steps.append(entry.name)
        else:
            key = entry.key
            if not isinstance(key, (str, int)):
                raise CheckpointError(
                    f"a tree of parameters has the key {key!r}; only strings and "
                    "integers can be saved, so rename it."
                )
            steps.append(key)
    return steps


def _name(steps: list[Any]) -> str:
    return "/".join(str(s[0]) if isinstance(s, list) else str(s) for s in steps)


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by where they are, such as ``layers/0/mlp/up/weight``."""
    found = tree_util.tree_flatten_with_path(tree)[0]
    return {_name(_steps(where)): leaf for where, leaf in found}


def _digest(arrays: Mapping[str, Any]) -> str:
    """Of all arrays, bit for bit: Orbax itself does not notice what changed on disk."""
    whole = hashlib.sha256()
    for name in sorted(arrays):
        whole.update(name.encode())
        whole.update(np.ascontiguousarray(np.asarray(arrays[name])).view(np.uint8))
    return whole.hexdigest()


def _rebuild(leaves: list[tuple[list[Any], Any]]) -> Any:
    """The tree with these leaves; dictionaries and lists only."""
    if len(leaves) == 1 and not leaves[0][0]:
        return leaves[0][1]
    groups: dict[Any, list[tuple[list[Any], Any]]] = {}
    is_list = isinstance(leaves[0][0][0], list)
    for (first, *rest), leaf in leaves:
        groups.setdefault(first[0] if is_list else first, []).append((rest, leaf))
    branches = {key: _rebuild(group) for key, group in groups.items()}
    return [branches[i] for i in sorted(branches)] if is_list else branches


def save_params(
    path: str | Path,
    tree: Any,
    metadata: Mapping[str, Any],
    *,
    overwrite: bool = False,
) -> None:
    """Writes a tree of arrays into a new folder.

    Args:
        path: The folder.
        tree: Arrays in any nesting of dictionaries, lists and tuples.
        metadata: JSON values that say what the arrays are.
        overwrite: Whether to replace what is there.

    Raises:
        CheckpointError: The folder exists, or the tree cannot be saved.
    """
    import orbax.checkpoint as ocp

    path = Path(path).absolute()
    if path.exists():
        if not overwrite:
            raise CheckpointError(
                f"{path} exists; choose another folder, or pass overwrite=True."
            )
        shutil.rmtree(path)
    leaves = [
        (_steps(where), leaf)
        for where, leaf in tree_util.tree_flatten_with_path(tree)[0]
    ]
    if not leaves:
        raise CheckpointError("the tree has no arrays; there is nothing to save.")
    names = [_name(steps) for steps, _ in leaves]
    if len(set(names)) != len(names):
        raise CheckpointError("two leaves of the tree have the same path; rename one.")
    arrays = {name: leaf for name, (_, leaf) in zip(names, leaves, strict=True)}
    record = {
        "metadata": dict(metadata),
        "sha256": _digest(arrays),
        "leaves": [
            {"path": steps, "shape": list(leaf.shape), "dtype": str(leaf.dtype)}
            for steps, leaf in leaves
        ],
    }
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(
            path,
            args=ocp.args.Composite(
                arrays=ocp.args.PyTreeSave(arrays), record=ocp.args.JsonSave(record)
            ),
        )
    # orbax writes there where the folder was made, which is nobody's business; that
    # the file exists is all it asks for.
    for marker in path.rglob("commit_success.txt"):
        marker.write_text("complete\n")


def load_metadata(path: str | Path) -> dict[str, Any]:
    """The metadata that `save_params` wrote; no array is read.

    Raises:
        CheckpointError: There is no checkpoint.
    """
    with _opened(path) as (folder, checkpointer):
        return _record(checkpointer, folder)["metadata"]


@contextlib.contextmanager
def _opened(path: str | Path) -> Iterator[tuple[Path, Any]]:
    """The folder and a checkpointer; what goes wrong with them is one kind of error."""
    import orbax.checkpoint as ocp

    folder = Path(path).absolute()
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is no folder; pass one that save_params wrote."
        )
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            yield folder, checkpointer
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{folder} cannot be restored ({type(error).__name__}: {error}); it is "
            "incomplete, or was not written by save_params."
        ) from error


def _record(checkpointer: Any, folder: Path) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    wanted = ocp.args.Composite(record=ocp.args.JsonRestore())
    return checkpointer.restore(folder, args=wanted)["record"]


def load_params(
    path: str | Path, template: Any | None = None
) -> tuple[Any, dict[str, Any]]:
    """Restores a tree that `save_params` wrote, and its metadata.

    Args:
        path: The folder.
        template: A tree of arrays or of ``jax.ShapeDtypeStruct`` that the result must
            match in structure, shapes and number formats. None returns dictionaries and
            lists.

    Raises:
        CheckpointError: There is no checkpoint, its arrays are not those that were
            saved, or it does not fit the template: all missing, unexpected and
            differing leaves are listed.
    """
    import orbax.checkpoint as ocp

    with _opened(path) as (folder, checkpointer):
        record = _record(checkpointer, folder)
        names = [_name(leaf["path"]) for leaf in record["leaves"]]
        if template is not None:
            _check(template, dict(zip(names, record["leaves"], strict=True)), folder)
        host = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        arrays = checkpointer.restore(
            folder,
            args=ocp.args.Composite(arrays=ocp.args.PyTreeRestore(restore_args=host)),
        )["arrays"]
        if record.get("sha256", "") not in ("", _digest(arrays)):
            raise CheckpointError(
                f"the arrays in {folder} are not those that were saved: the files are "
                "damaged; copy or save them again"
            )
    leaves = {name: jax.numpy.asarray(arrays[name]) for name in names}
    if template is None:
        paths = [leaf["path"] for leaf in record["leaves"]]
        tree = _rebuild([(steps, leaves[_name(steps)]) for steps in paths])
    else:
        where, structure = tree_util.tree_flatten_with_path(template)
        ordered = [leaves[_name(_steps(keys))] for keys, _ in where]
        tree = tree_util.tree_unflatten(structure, ordered)
    return tree, record["metadata"]


def _check(template: Any, found: Mapping[str, Any], path: Path) -> None:
    wanted = {
        _name(_steps(keys)): leaf
        for keys, leaf in tree_util.tree_flatten_with_path(template)[0]
    }
    lines = [f"missing: {name}" for name in wanted if name not in found]
    lines += [f"unexpected: {name}" for name in found if name not in wanted]
    for name, leaf in wanted.items():
        if name in found:
            has = (tuple(found[name]["shape"]), found[name]["dtype"])
            needs = (tuple(leaf.shape), str(leaf.dtype))
            if has != needs:
                lines.append(f"differs: {name} has {has}, needs {needs}")
    if lines:
        raise CheckpointError(
            "\n  ".join([f"{path} does not fit:", *lines])
            + "\nBuild the model with the settings that it was saved with."
        )
