"""torchrun's agent, whose private methods `launcher/agent.py` overrides.

- `_initialize_workers`, `_start_workers`, `_restart_workers`: a signal that comes while processes are started or
  started again
- `_invoke_run`, `_monitor_workers`: our own words on a failure, and time for the last words of processes
- `_remaining_restarts`, `_worker_group`: set in `__init__`: no restart after a mistake of the user's; the state of the
  processes
- `_pcontext`: set while processes run: signals are handed on to them

`torch.distributed.launcher.api.LocalElasticAgent`, a public name, is replaced by `launch.py`.
"""

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from torchtitan.compat import require

__all__ = ["LocalElasticAgent"]

require(
    LocalElasticAgent,
    ("_initialize_workers", "_start_workers", "_restart_workers", "_invoke_run", "_monitor_workers"),
    "python -m torchtitan.launch",
)
