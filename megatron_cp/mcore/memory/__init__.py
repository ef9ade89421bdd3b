"""Less memory at long contexts: logits and MLPs a few rows at a time, inputs of recomputed layers on the host."""
