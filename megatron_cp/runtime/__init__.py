"""Execution of plans on a process group. Decides nothing: what happens is written in the plan."""
