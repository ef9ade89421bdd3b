"""Which rows travel how, and from who computes what to the stages of a pass."""
