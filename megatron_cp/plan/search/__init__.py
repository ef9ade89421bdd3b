"""Planner auto: what it looks at, for how long, and which plan it takes."""
