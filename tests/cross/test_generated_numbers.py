"""What the code computes that the compiler generates for a GPU: by Triton's interpreter, on the CPU.

Elsewhere it is only looked at, so a wrong stride, mask or index that compiles would be found on a GPU at the earliest.
"""

from typing import Any

import pytest
from simulated import needs_triton, on_gpu

pytestmark = [needs_triton, pytest.mark.full]

# Several roundings; another number of the 8-bit format where those before it differ.
FLOAT32, BFLOAT16, INT8, FLOAT8 = 1e-6, 2**-6, 2**-5, 0.08
ROUNDED_ONCE = 1.8e-3  # to bfloat16: 1.6e-3; twice: 2.3e-3
OTHERS_CHOSEN = 0.1  # after other roundings a token in a hundred has another expert

ROWWISE = "--float8.recipe_name=rowwise"


@pytest.mark.parametrize(
    "function, arguments, tolerance",
    [
        pytest.param("block", (False,), BFLOAT16, id="bf16"),
        pytest.param("block", (True,), BFLOAT16, id="documents"),
        pytest.param("block", (True, "--model.converters=int8"), INT8, id="int8 rowwise, documents"),
        pytest.param("block", (False, "--model.converters=float8", ROWWISE), FLOAT8, id="float8 rowwise"),
        pytest.param("block", (False, "--model.converters=float8"), FLOAT8, id="float8 tensorwise"),
        pytest.param("experts", (), OTHERS_CHOSEN, id="experts"),
        pytest.param("experts", ("--model.converters=int8",), OTHERS_CHOSEN, id="experts, int8 rowwise"),
        pytest.param("experts", ("--model.converters=float8", ROWWISE), OTHERS_CHOSEN, id="experts, float8 rowwise"),
        pytest.param("last_queries", (False,), FLOAT32, id="last queries"),
        pytest.param("last_queries", (True,), FLOAT32, id="last queries, documents"),
        pytest.param("last_queries", (False, 140), FLOAT32, id="last queries, window"),
        pytest.param("last_queries", (True, 100), FLOAT32, id="last queries, documents, window"),
        pytest.param("router", (), ROUNDED_ONCE, id="router"),
        pytest.param("noise", (), 0, id="stochastic rounding"),
        pytest.param("adamw", ("8bit", "float32"), FLOAT32, id="AdamW8bit"),
        pytest.param("adamw", ("4bit", "bfloat16"), FLOAT32, id="AdamW4bit, bfloat16 weights"),
        pytest.param("adamw", ("fp8", "float32"), FLOAT32, id="AdamWFp8"),
    ],
)
def test_generated_code_computes_what_eager_code_does(
    function: str, arguments: tuple[Any, ...], tolerance: float
) -> None:
    errors = on_gpu("sm_90", f"interpreted.{function}", *arguments)
    assert not {name: error for name, error in errors.items() if not error <= tolerance}
