"""A simulation: all planners at several numbers of ranks, and its page."""
