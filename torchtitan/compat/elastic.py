"""torchrun's agent, whose private methods `launcher/agent.py` overrides.

- `_initialize_workers`, `_start_workers`, `_restart_workers`: handle a signal that arrives while processes are starting
  or restarting
- `_invoke_run`, `_monitor_workers`: concise errors, and time for processes to write their last messages
- `_remaining_restarts`, `_worker_group`: set in `__init__`; used to prevent restarts after a user error, and to read
  the state of the processes
- `_pcontext`: set while processes run; used to forward signals to them

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
