"""The documents of a micro-batch: found in what Megatron-LM loaded, planned, cut."""
