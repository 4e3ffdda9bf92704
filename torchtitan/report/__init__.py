"""A page to inspect runs: `python -m torchtitan.report RUN [RUN ...] -o report.html`. Does not import torch.

`run.py` reads dump folders, `series.py` down-samples curves, `compare.py` compares configurations, and `page.py` fills
`page.html`. See docs/report.md.
"""
