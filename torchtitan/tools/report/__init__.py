"""A page to inspect runs: `python -m torchtitan.tools.report RUN [RUN ...] -o report.html`. Does not import torch.

`run.py` reads dump folders, `series.py` down-samples curves, and `page.py` fills
`page.html`. See docs/report.md.
"""
