"""Oracles: plain, slow and obvious. None of them imports the code under test."""
