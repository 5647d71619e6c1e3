"""Draft trees in pictures: which nodes were drafted, and which path was accepted."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxdec import counts
from jaxdec.counts import Number
from jaxdec.course.display import (
    COLOURS,
    LINES,
    Picture,
    Table,
    canvas,
    evidence_of,
    token_text,
)
from jaxdec.course.drafting import MARKS
from jaxdec.text import Outputs


def best_step(outputs: Outputs, row: int = 0) -> int:
    """The step of an answer that accepted most draft tokens; of equals the first."""
    return int(np.argmax(outputs.run.info.num_accepted[row]))


def tree_of(outputs: Outputs, step: int, row: int = 0) -> Table:
    """The nodes of a step's draft: node 0 is the anchor, node i is draft token i."""
    info, lm = outputs.run.info, outputs.run.call.lm
    num = int(info.num_drafted[row, step])
    parents = [int(p) for p in info.draft_parents[row, step, :num]]
    path = _path(info, row, step)
    depths = [0]
    rows: list[tuple[Any, ...]] = [
        (0, None, 0, token_text(lm, _anchor(outputs, row, step)), "anchor")
    ]
    for node, parent in enumerate(parents, start=1):
        depths.append(depths[parent] + 1)
        text = token_text(lm, info.draft_tokens[row, step, node - 1])
        fate = "accepted" if node in path else "refused"
        rows.append((node, parent, depths[node], text, fate))
    return Table(("node", "parent", "depth", "token", "fate"), rows)


def draw_tree(outputs: Outputs, step: int, row: int = 0) -> Picture:
    """A step's draft as a tree: accepted path, refused branches, the target's token."""
    found = tree_of(outputs, step, row)
    info, lm = outputs.run.info, outputs.run.call.lm
    parents = [0, *(p for p in found.column("parent") if p is not None)]
    heights = _heights(parents)
    depths, fates = found.column("depth"), found.column("fate")
    size = max(heights) + 1
    figure, axes = canvas(
        width=1.5 * (max(depths) + 2) + 1, height=max(2.4, 0.42 * size + 0.8)
    )
    for node in range(1, len(parents)):
        parent = parents[node]
        is_kept = fates[node] == "accepted"
        axes.plot(
            [depths[parent], depths[node]],
            [heights[parent], heights[node]],
            color="#2f8f4e" if is_kept else "#bbbbbb",
            linewidth=2.5 if is_kept else 1,
            zorder=1,
        )
    for node, (text, fate) in enumerate(zip(found.column("token"), fates, strict=True)):
        colour = COLOURS.get(fate, COLOURS["plain"])
        _node(axes, depths[node], heights[node], text, colour)
    last = _path(info, row, step)[-1]
    accepted = int(info.num_accepted[row, step])
    if int(info.num_emitted[row, step]) > accepted:
        judged, emitted = (
            int(x[row, step]) for x in (info.num_judged, info.num_emitted)
        )
        kind = counts.origins(judged, accepted, emitted)[-1]
        is_leaf = last not in parents[1:]
        own = _said(outputs, row, step)[-1]
        x, y = depths[last] + 1, heights[last] + (0 if is_leaf else 0.5)
        axes.plot(
            [depths[last], x], [heights[last], y], "--", color="#555555", zorder=1
        )
        _node(axes, x, y, token_text(lm, own), COLOURS[kind], is_own=True)
    axes.set_xticks(range(max(depths) + 2))
    axes.set_xlabel("depth (dashed: the target's own token)")
    axes.set_yticks([])
    axes.set_xlim(-0.5, max(depths) + 1.5)
    axes.set_ylim(size - 0.3, -0.7)
    return Picture(
        figure,
        f"step {step}: a tree of {len(parents) - 1} draft tokens, {accepted} accepted",
    )


def _node(
    axes: Any, x: Number, y: Number, text: str, colour: str, is_own: bool = False
) -> None:
    axes.annotate(
        text,
        (x, y),
        ha="center",
        va="center",
        fontsize=9,
        zorder=2,
        bbox=dict(
            boxstyle="round,pad=0.3",
            facecolor=colour,
            edgecolor="black" if is_own else "#777777",
            linestyle="--" if is_own else "-",
        ),
    )


def _heights(parents: list[int]) -> list[float]:
    """Leaves one under the other; a parent in the middle of its children."""
    children: list[list[int]] = [[] for _ in parents]
    for node in range(1, len(parents)):
        children[parents[node]].append(node)
    heights, num_leaves = [0.0] * len(parents), 0

    def place(node: int) -> float:
        nonlocal num_leaves
        if not children[node]:
            heights[node] = float(num_leaves)
            num_leaves += 1
        else:
            own = [place(child) for child in children[node]]
            heights[node] = (own[0] + own[-1]) / 2
        return heights[node]

    place(0)
    return heights


def _path(info: Any, row: int, step: int) -> list[int]:
    """The nodes that were kept, the anchor among them."""
    num = int(info.num_accepted[row, step])
    return [int(node) for node in info.path[row, step, : num + 1]]


def _said(outputs: Outputs, row: int, step: int) -> tuple[int, ...]:
    """What a step emitted."""
    emitted = outputs.run.info.num_emitted[row]
    begin = int(emitted[:step].sum())
    return outputs[row].tokens[begin : begin + int(emitted[step])]


def _anchor(outputs: Outputs, row: int, step: int) -> int:
    if step == 0:
        return outputs.run.call.prompts[row][-1]
    return _said(outputs, row, step - 1)[-1]


def shape_table(runs: Mapping[str, Outputs]) -> Table:
    """What drafts of several shapes committed, and what the target read for it."""
    rows = []
    for label, outputs in runs.items():
        found = evidence_of(outputs)
        rows.append(
            (
                label,
                found.tree_width,
                found.tree_depth,
                found.num_nodes_verified / found.num_steps,
                found.tokens_per_step,
                found.acceptance_rate,
            )
        )
    titles = ("draft", "width", "depth", "nodes read", "tokens per step", "acceptance")
    return Table(titles, rows, "nodes read: by the target, in a step, anchor included")


def draw_shapes(table: Table) -> Picture:
    """`shape_table` as points: what a step read, and what it committed."""
    figure, axes = canvas()
    for i, (label, *_, nodes, tokens, _) in enumerate(table.rows):
        style = MARKS[i % len(MARKS)]
        axes.plot(nodes, tokens, style, color=LINES[i % len(LINES)], label=label)
    axes.set_xlabel("nodes that the target reads in a step")
    axes.set_ylabel("tokens per step")
    axes.margins(0.15)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right")
    return Picture(figure, "tokens per step against nodes read, by shape of the draft")
