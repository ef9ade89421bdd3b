"""Which rank owns which tokens."""
