"""The page of a training run: what it left in its folder, read, judged and drawn."""
