"""Saves and loads a run: weights, optimizer, schedule, random states and the place in the data."""
