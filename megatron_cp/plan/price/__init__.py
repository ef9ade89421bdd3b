"""Predicted seconds of a way to run a mask, without building its plan."""
