"""A user's module, `--experimental.custom_import=late_drawn_on_cpu`: what late.py and drawn_on_cpu.py do."""

import drawn_on_cpu  # noqa: F401
import late  # noqa: F401
