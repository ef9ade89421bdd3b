"""A model of how fast Hopper's tensor cores are kept busy by a kernel's machine code. It measures nothing."""
