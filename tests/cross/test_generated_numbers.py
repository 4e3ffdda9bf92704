"""What the code computes that the compiler generates for a GPU: by Triton's interpreter, on the CPU.

Elsewhere it is only looked at, so a wrong stride, mask or index that compiles would be found on a GPU at the earliest.
"""

from typing import Any

import pytest
from simulated import needs_triton, on_gpu

pytestmark = [needs_triton, pytest.mark.full]

BFLOAT16 = 2**-6  # several roundings


@pytest.mark.parametrize(
    "function, arguments, tolerance",
    [
        pytest.param("block", (True,), BFLOAT16, id="documents"),
    ],
)
def test_generated_code_computes_what_eager_code_does(
    function: str, arguments: tuple[Any, ...], tolerance: float
) -> None:
    errors = on_gpu("sm_90", f"interpreted.{function}", *arguments)
    assert not {name: error for name, error in errors.items() if not error <= tolerance}
