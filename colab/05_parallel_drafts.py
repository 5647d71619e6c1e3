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
# # 5. Parallel drafts and confidence
#
# **What does it cost and bring to draft a whole block at once, and can a drafter know
# how far to trust itself?**
#
# *DFlash* ([paper](https://arxiv.org/abs/2602.06036)) fills a block of masks in one
# forward: no token waits for the one before it. *DSpark*
# ([paper](https://arxiv.org/abs/2607.05147)) drafts such a block, then lets a small
# head look at neighbouring tokens from left to right, and says how sure it is of each.

# %%
import importlib.util

if importlib.util.find_spec("jaxdec") is None:
    # From the clone that this notebook is in; on Colab, clone it and %cd to colab/.
    get_ipython().run_line_magic("pip", "install -q '..[plots]'")

import jaxdec
from jaxdec import course

lesson = course.start("mtp", "dflash", "dspark")
lm = lesson.lm
lesson

# %% [markdown]
# ## A block against a chain
#
# An MTP module drafts token by token; the other two draft blocks.

# %%
runs = {
    name: jaxdec.generate(
        lm, lesson.prompts, strategy=name, max_new_tokens=lesson.max_new_tokens
    )
    for name in ("mtp", "dflash", "dspark")
}
course.counts_table(runs)

# %% [markdown]
# A token that does not see the one before it is a guess about a sentence whose middle
# is missing: acceptance of a pure block falls quickly along the block. DSpark's head
# mends some of that.

# %%
course.draw_acceptance(runs)

# %% [markdown]
# ## What drafting costs
#
# A chain pays for each token, a block once. Drafting and verifying are timed alone,
# after the run.

# %%
course.costs_table(runs)

# %% [markdown]
# ## Confidence against acceptance
#
# DSpark's confidence is the probability that a token is accepted, given that the one
# before it was. Multiplied up, it is the *survival*: the probability that the draft
# gets so far. A drafter is *calibrated* if tokens with survival 0.7 survive 7 times of
# 10: then its points lie on the diagonal.

# %%
reliability = course.reliability_table(runs["dspark"])
course.draw_reliability(reliability)

# %% [markdown]
# A point below the diagonal is a drafter that is too sure of itself. Dividing its
# log-odds by a temperature can mend that (`jaxdec calibrate`).
#
# ## Spending the target's time where it pays
#
# With a threshold, only draft tokens whose survival reaches it are judged. The curve
# cuts the drafts of the run above after the fact; the point is a run that really had
# the threshold.

# %%
careful = jaxdec.generate(
    lm,
    lesson.prompts,
    strategy=lesson.strategy("dspark", threshold=0.3),
    max_new_tokens=lesson.max_new_tokens,
)
answer = course.threshold_table(runs["dspark"])
course.draw_thresholds(answer, {"threshold 0.3": careful})

# %% [markdown]
# ## The answer
#
# A block costs one forward of the drafter however long it is, and loses acceptance
# along its length. A confidence lets the target read fewer tokens for nearly the same
# number of committed ones: the rows of this table.

# %%
answer

# %% [markdown]
# ## Exercises
#
# **1.** Write the survival of every token of a draft, from the list of confidences.


# %%
def survival(confidence):
    return None  # your answer


course.check_survival(survival)

# %% [markdown]
# **2.** A draft has the confidences 0.9, 0.8, 0.6, 0.95. How many of its tokens are
# judged with a threshold of 0.5 on survival?

# %%
num_judged = None  # your answer
course.check_judged(num_judged)
