# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 4. EAGLE and draft trees
#
# **What does a tree of drafts buy over a chain, with the same drafter?**
#
# EAGLE's drafter is a small network that reads the target's features
# ([EAGLE](https://arxiv.org/abs/2401.15077),
# [EAGLE-3](https://arxiv.org/abs/2503.01840)). It often knows two or three good ways to
# go on. A chain bets on one of them; a *tree* keeps several, and the target judges all
# branches in one forward ([EAGLE-2](https://arxiv.org/abs/2406.16858)).

# %%
import importlib.util

if importlib.util.find_spec("jaxdec") is None:
    # From the clone that this notebook is in; on Colab, clone it and %cd to colab/.
    get_ipython().run_line_magic("pip", "install -q '..[plots]'")

import jaxdec
from jaxdec import course

lesson = course.start("eagle3")
lm = lesson.lm
lesson

# %% [markdown]
# ## One drafter, three shapes
#
# A chain of four tokens, and trees of eight and sixteen nodes that are as deep. The
# drafter, its weights and its depth are the same.

# %%
drafter = lesson.strategy("eagle3").draft
shapes = {
    "chain of 4": jaxdec.eagle3(drafter, length=4),
    "tree of 8": jaxdec.eagle3(drafter, tree=jaxdec.Tree(width=4, depth=4, nodes=8)),
    "tree of 16": jaxdec.eagle3(drafter, tree=jaxdec.Tree(width=4, depth=4, nodes=16)),
}
runs = {
    label: jaxdec.generate(
        lm, lesson.prompts, strategy=shape, max_new_tokens=lesson.max_new_tokens
    )
    for label, shape in shapes.items()
}
course.show_tokens(runs["tree of 16"])

# %% [markdown]
# ## The tree that was accepted
#
# The step of the first answer that accepted most. The *anchor* on the left is the last
# token that was said. Green is the path that the target agreed with; red are branches
# that it did not take. The dashed token is the target's own: a bonus where the path is
# as deep as the tree may be, a correction anywhere else.

# %%
step = course.best_step(runs["tree of 16"])
course.draw_tree(runs["tree of 16"], step)

# %%
course.tree_of(runs["tree of 16"], step)

# %% [markdown]
# A tree is stored as one array, the parent of every node. Depth, paths, and the mask
# that keeps branches from seeing each other all follow from it.
#
# The first step of the answer, for comparison:

# %%
course.draw_tree(runs["tree of 16"], 0)

# %% [markdown]
# ## Wider, not only deeper
#
# A node at depth two can be accepted although the likeliest token at depth one was
# wrong, because a sibling of it was right. So *of all drafts* more are accepted down to
# any depth than of a chain's (on the right).

# %%
course.draw_acceptance(runs)

# %% [markdown]
# ## It is still exact
#
# The tokens of the largest tree, replayed through plain decoding:

# %%
certificate = jaxdec.certify(
    lm,
    lesson.prompts,
    shapes["tree of 16"],
    outputs=runs["tree of 16"],
    max_new_tokens=lesson.max_new_tokens,
)
print(certificate)

# %% [markdown]
# ## The answer
#
# A tree commits more tokens per step, and the target reads more nodes for it. On an
# accelerator that waits for its weights the extra nodes are nearly free; on a CPU they
# are not.

# %%
answer = course.shape_table(runs)
course.draw_shapes(answer)

# %%
answer

# %% [markdown]
# ## Exercises
#
# **1.** From the parents of the draft tokens, make the mask: may node i attend node j?
# Node 0 is the anchor; entry i of `parents` is the parent of node i + 1. A list of
# lists of 0 and 1 will do.


# %%
def mask(parents):
    return None  # your answer


course.check_ancestors(mask)

# %% [markdown]
# **2.** A draft tree of five tokens, and what the target says after each node (the
# anchor first). Which words does the step emit? Answer with a list of words.

# %%
print("parents:        ", course.TREE_PARENTS)
print("draft tokens:   ", course.TREE_DRAFT)
print("the target says:", course.TREE_TARGET)

# %%
words = None  # your answer
course.check_tree_path(words)
