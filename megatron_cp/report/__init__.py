"""Pictures and offline HTML pages: of a training run, a dry run on the user's data, a simulation.

draw/ knows how to draw, figures/ what a mask or a plan looks like; run/, dry_run/ and simulation/ are the pages:
each reads or computes its facts first, then draws them.
"""
