"""Decodes on meshes of four virtual devices, and on one; run by `test_mesh.py`.

Prints JSON: the tokens of every run, and where the arrays were.
"""

import dataclasses
import json
import sys
from pathlib import Path

import helpers_tiny
import jax
import jax.numpy as jnp
import numpy as np

import jaxdec
import jaxdec.program
from jaxdec.io.hf_config import config_from_hf
from jaxdec.models.config import MoeConfig
from jaxdec.models.decoder import abstract_params, make_model
from jaxdec.models.sharding import check_mesh, param_shardings

PROMPTS = ["hello there, hello", "a b a b a b a b", "xyz", "naïve 12 12"]
REQUEST = {"max_new_tokens": 20, "temperature": [0.0, 0.8, 0.0, 1.2], "seed": [1] * 4}
STRATEGIES = {
    "sample": "sample",
    "lookup": jaxdec.lookup(length=3),
    "self_draft": jaxdec.self_draft(num_layers=1, length=2),
}
FAST = {"xla_backend_optimization_level": 0}


def decode(lm, name):
    outputs = jaxdec.generate(lm, PROMPTS, strategy=STRATEGIES[name], **REQUEST)
    return [output.tokens for output in outputs]


def make_mesh(shape):
    return jax.make_mesh(shape, ("data", "model"))


def places(lm):
    """The shape of one device's part of some arrays, and of the whole."""
    layer = lm.params["layers"][0]
    program = next(iter(lm.programs.values()))
    state = program.loop.output_shardings[0]
    arrays = {
        "embedding": lm.params["embedding"],
        "qkv": layer["attention"]["qkv"]["weight"],
        "up": layer["mlp"]["up"]["weight"],
        "down": layer["mlp"]["down"]["weight"],
        "norm": lm.params["norm"]["scale"],
    }
    found = {
        name: [x.addressable_shards[0].data.shape, x.shape]
        for name, x in arrays.items()
    }
    cache = (4, lm.config.num_kv_heads, 256, lm.config.head_dim)
    found["cache"] = [state.cache.keys[0].shard_shape(cache), cache]
    found["tokens"] = [state.sequences.tokens.shard_shape((4, 256)), (4, 256)]
    return found


def mixture_difference():
    """A mixture of experts with biases and norms of heads, on a mesh and on one."""
    moe = MoeConfig(
        num_experts=4,
        num_experts_per_token=2,
        intermediate_size=24,
        norm_topk_prob=True,
        layers=(0,),
    )
    config = dataclasses.replace(
        config_from_hf(helpers_tiny.CONFIG),
        num_layers=1,
        moe=moe,
        qk_norm=True,
        qkv_bias=True,
        mlp_bias=True,
        tie_embeddings=False,
    )
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape, scale=0.2), x.dtype),
        abstract_params(config),
    )
    mesh = check_mesh(make_mesh((2, 2)))
    spread = jax.device_put(params, param_shardings(config, "float32", mesh))
    expert = spread["layers"][0]["mlp"]["up"]
    assert expert.addressable_shards[0].data.size * 2 == expert.size
    model = make_model(config)
    tokens = jnp.asarray(np.arange(24).reshape(4, 6), jnp.int32)
    position = jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32)[None], (4, 6))
    forward = jax.jit(model.forward, compiler_options=FAST)
    one, many = (
        forward(p, model.init_cache(4, 64), tokens, position, None)[1].logits
        for p in (params, spread)
    )
    return float(np.abs(np.asarray(one) - np.asarray(many)).max())


CASES = Path(__file__).parent / "golden" / "cases"
TRAINED = {
    "eagle3_tree": ("targets/llama_gqa", "drafters/e2e_eagle3_tree"),
    "dspark": ("targets/qwen3", "drafters/e2e_deepspec_dspark"),
}


def trained(name):
    """Whether a trained drafter drafts on a mesh what it drafts on one device."""
    target, drafter = (CASES / part for part in TRAINED[name])
    found = []
    for mesh in (None, make_mesh((2, 2))):
        lm = jaxdec.load(target, dtype="float32", mesh=mesh)
        lm.row_classes = ((1,), tuple(range(2, 33)))
        jaxdec.add_drafter(lm, jaxdec.load_drafter(drafter, lm))
        request = REQUEST | {"stop_tokens": []}
        prompts = [[5, 17, 40], [3, 9], [8, 8, 8, 1], [2]]
        outputs = jaxdec.generate(lm, prompts, strategy=name, **request)
        accepted = np.asarray(outputs.run.info.num_accepted)
        found.append([[list(o.tokens) for o in outputs], accepted.tolist()])
    return found


if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jaxdec.program.COMPILER_OPTIONS = FAST
    folder = helpers_tiny.write_model(Path(sys.argv[1]))
    one = jaxdec.load(folder, dtype="float32")
    result = {"one": decode(one, "sample")}
    for shape, names in (((2, 2), ("lookup", "self_draft")), ((1, 4), ("sample",))):
        lm = jaxdec.load(folder, dtype="float32", mesh=make_mesh(shape))
        # Measuring them compiles many small programs, and is no matter of meshes.
        lm.row_classes = one.row_classes
        runs = {name: decode(lm, name) for name in names}
        result[str(shape)] = {"runs": runs, "places": places(lm)}
    result["mixture"] = mixture_difference()
    result["trained"] = {name: trained(name) for name in TRAINED}
    print(json.dumps(result))
