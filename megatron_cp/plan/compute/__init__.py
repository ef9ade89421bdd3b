"""Which rank computes which pairs, in which stage."""
