"""What a run prints, tracks and leaves for the report."""
