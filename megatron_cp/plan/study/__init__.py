"""Planners side by side on named workloads, predicted and simulated."""
