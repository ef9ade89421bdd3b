"""Predicted seconds of a strategy for a mask, without building its plan."""
