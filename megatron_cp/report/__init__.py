"""Pictures and one offline HTML page: of a training run, or of a dry run on the user's data.

The reader's path: view.py (what is counted), mask.py and plan.py (the pictures), html.py and svg.py
(escaping by type), run_page.py and dry_run_page.py (the pages).
"""

from megatron_cp.report.dry_run import DryRun, plan_corpus, write_dry_run_report
from megatron_cp.report.run import Run, read_run
from megatron_cp.report.run_page import run_page, write_run_report

__all__ = [
    "DryRun",
    "Run",
    "plan_corpus",
    "read_run",
    "run_page",
    "write_dry_run_report",
    "write_run_report",
]
