"""Which Megatron this is: its version, what it lacks, where our functions stand in the place of its own."""
