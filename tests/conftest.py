"""Strict JAX for every test, and shape checks on every function of the library."""

import jax
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")

install_import_hook("jaxdec", "beartype.beartype")
